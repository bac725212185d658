"""Complex parameters of real problems: derivatives by JAX's convention, as of a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless


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
    slow_unless(
        False, mode, {"engine": engine, "sensealg": adjoint, **more}, id=f"{engine}, {adjoint}"
    )
    for mode, engine, adjoint, more in [
        ("reverse", "diffrax", None, {}),
        ("forward", "diffrax", eo.ForwardDiffSensitivity(), {}),
        ("forward over reverse", "diffrax", eo.DirectAdjoint(), {"maxiters": 64}),
        ("reverse", "diffrax", eo.BacksolveAdjoint(), {}),
    ]
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "options"), CASES)
def test_derivatives(mode, options):
    found = jax.jit(MODES[mode](lambda p: loss(p, **options)))(P)
    wanted = jax.jit(MODES[mode](by_plain_steps))(P)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.linalg.norm(a) > 0.1


@pytest.mark.parametrize("alg", [eo.Tsit5(), eo.Rodas5P()], ids=["Tsit5", "Rodas5P"])
def test_every_function_of_a_problem(alg):
    """`u = (1, 2) exp(-|z w| t)`, from `t = 0.5` on with half of that: in `f`, its Jacobian, the
    integrand, an affect and what is saved beside, `z` is a parameter, and `w` is closed over."""
    z, w = jnp.array([0.6 + 0.8j, 1j]), np.array([1j, -1.0])
    matrix = jnp.eye(2, dtype=complex)

    def rate(p):
        return jnp.sum(jnp.abs(p["z"] * w)) / 2

    def f(u, p, t):
        return -rate(p) * (matrix.real @ u)

    def jac(u, p, t):
        return -rate(p) * matrix.real

    def halved(integrator):
        return eo.remake(integrator, u=integrator.u * jnp.abs(integrator.p["z"][0] * w[0]) / 2)

    ends = eo.ContinuousCallback(
        lambda u, t, integrator: u[0] - 0.3 * jnp.abs(integrator.p["z"][0]), eo.terminate
    )
    callback = eo.CallbackSet(
        eo.PresetTimeCallback([0.5], halved),
        ends,
        eo.SavingCallback(lambda u, p, t: rate(p) * u[0]),
    )
    prob = eo.ODEProblem(
        eo.ODEFunction(f, jac=jac),
        jnp.array([1.0, 2.0]),
        (0.0, 1.0),
        {"z": z},
        integrand=lambda u, p, t: rate(p) * u,
        callback=callback,
    )
    sim = eo.solve(
        eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p={"z": z * (1 + ctx.index)})),
        alg,
        trajectories=2,
        saveat=[0.25],
        abstol=1e-10,
        reltol=1e-10,
    )
    assert str(sim.engine).startswith("compiled")
    np.testing.assert_array_equal(sim.p["z"], np.stack([z, 2 * z]))
    k = np.array([1.0, 2.0])
    u = np.exp(-0.25 * k)
    np.testing.assert_allclose(sim.u[:, 0], np.outer(u, [1.0, 2.0]), rtol=1e-8)
    np.testing.assert_allclose(sim.saved.values[:, 0], k * u, rtol=1e-8)
    np.testing.assert_allclose(sim.integral[:, 0, 0], 1 - u, rtol=1e-7)
    # (After the affect, u[0] is k exp(-k t) / 2; it ends at 0.3 k.)
    expected = np.where(k * np.exp(-0.5 * k) / 2 > 0.3 * k, -np.log(0.6) / k, np.nan)
    np.testing.assert_allclose(np.where(np.isnan(expected), np.nan, sim.end.t), expected, rtol=1e-7)


@pytest.mark.slow
def test_a_changing_parameter_beside():
    """`u' = -|z| k u` with `k` 1 before `t = 0.5` and 3 after it."""

    def f(u, p, t):
        return -jnp.abs(p[0]) * p[1]["k"] * u

    def faster(integrator):
        z, other = integrator.p
        return eo.remake(integrator, p=(z, other | {"k": 3 * other["k"]}))

    def end(z):
        prob = eo.ODEProblem(f, jnp.array(1.0), (0.0, 1.0), (z, {"k": jnp.array(1.0), "w": 2j}))
        callback = eo.PresetTimeCallback([0.5], faster)
        return eo.solve(prob, eo.Tsit5(), callback=callback, saveat=[0.25, 1.0], reltol=1e-9)

    z = jnp.array(0.6 + 0.8j)
    sol = end(z)
    np.testing.assert_allclose(sol.u, np.exp([-0.25, -2.0]), rtol=1e-6)
    assert (sol.p_at[0], sol.p_at[1]["w"], sol.p[1]["w"]) == (None, None, 2j)
    np.testing.assert_array_equal(sol.p_at[1]["k"], [1.0, 3.0])
    slope = jax.grad(lambda z: end(z).u[-1])(z)
    np.testing.assert_allclose(slope, -2 * np.exp(-2) * np.conj(z), rtol=1e-5)
