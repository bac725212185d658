"""Complex parameters of real problems: derivatives by JAX's convention, as of a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless


pytestmark = pytest.mark.filterwarnings("ignore:Complex dtype support in Diffrax")

U0 = jnp.array([1.0, 0.5, -0.3, 0.2])
P = {
    "matrix": jnp.array([[0.3 + 0.2j, -0.4j], [0.1 - 0.3j, 0.2 + 0.5j]]),  # all share it
    "z": jnp.array([0.5 + 0.1j, -0.2 + 1j, 0.3 - 0.4j]),  # of each trajectory
    "shift": jnp.array(0.3),
}
DOTS = {"matrix": 1j * P["matrix"], "z": P["z"][::-1], "shift": P["shift"]}
WEIGHTS = jnp.arange(1.0, 5.0)


def field(u, p, t):
    matrix, (z, shift) = p["in"]["matrix"], p["of"]
    w = z * (matrix @ jax.lax.complex(u[:2], u[2:])) + jax.lax.complex(shift, 0.1 * shift)
    return jnp.concatenate([w.real, w.imag])


def parameters(p, z):
    return {"in": {"matrix": p["matrix"]}, "of": (z, p["shift"])}


def by_plain_steps(p, n=100):
    def end(z):
        def step(u, _):
            h, q = 1.0 / n, parameters(p, z)
            k1 = field(u, q, 0.0)
            k2 = field(u + h / 2 * k1, q, 0.0)
            k3 = field(u + h / 2 * k2, q, 0.0)
            k4 = field(u + h * k3, q, 0.0)
            return u + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        return jax.lax.scan(step, U0, None, n)[0]

    return jnp.sum(jax.vmap(end)(p["z"]) ** 2 @ WEIGHTS)


def loss(p, **options):
    prob = eo.ODEProblem(field, U0, (0.0, 1.0), parameters(p, p["z"][0]))
    ens = eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=parameters(p, p["z"][ctx.index]))
    )
    sim = eo.solve(ens, trajectories=3, abstol=1e-9, reltol=1e-9, **options)
    return jnp.sum(sim.u[:, -1] ** 2 @ WEIGHTS)


MODES = {
    "reverse": lambda f: jax.grad(f),
    "forward": lambda f: lambda p: jax.jvp(f, (p,), (DOTS,))[1],
    "forward over reverse": lambda f: lambda p: jax.jvp(jax.grad(f), (p,), (DOTS,))[1],
    "reverse over forward": lambda f: jax.grad(lambda p: jax.jvp(f, (p,), (DOTS,))[1]),
}
CASES = [
    slow_unless(mode == "reverse", mode, {}, id=f"auto, {mode}") for mode in MODES
] + [
    slow_unless(False, mode, {"engine": engine, "sensealg": adjoint, **more}, id=f"{adjoint}")
    for mode, engine, adjoint, more in [
        ("reverse", "diffrax", None, {}),
        ("forward", "diffrax", eo.ForwardDiffSensitivity(), {}),
        ("forward over reverse", "diffrax", eo.DirectAdjoint(), {"maxiters": 64}),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_derivatives(mode, options):
    found = jax.jit(MODES[mode](lambda p: loss(p, **options)))(P)
    wanted = jax.jit(MODES[mode](by_plain_steps))(P)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.linalg.norm(a) > 0.1


@pytest.mark.slow
def test_backsolve_of_diffrax_is_refused():
    with pytest.raises(TypeError, match=r"complex.*leave sensealg out"):
        jax.grad(lambda p: loss(p, engine="diffrax", sensealg=eo.BacksolveAdjoint()))(P)
