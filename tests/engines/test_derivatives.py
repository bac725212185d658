"""Derivatives by times, and where a number that all trajectories share decides what is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless


TIGHT = {"abstol": 1e-9, "reltol": 1e-9}
REVERSE = {
    "replay": {},
    "gauss": {"sensealg": eo.GaussAdjoint()},
    "backsolve": {"sensealg": eo.BacksolveAdjoint()},
    "kernel": {"ensemblealg": eo.EnsembleGPUKernel()},
    "diffrax": {"engine": "diffrax"},
}
FORWARD = {
    "lanes": {"sensealg": eo.ForwardDiffSensitivity()},
    "kernel": {"ensemblealg": eo.EnsembleGPUKernel(), "sensealg": eo.ForwardDiffSensitivity()},
    "diffrax": {"engine": "diffrax", "sensealg": eo.ForwardDiffSensitivity()},
}
CASES = [
    *(
        slow_unless(way in ("replay", "kernel"), jax.jacrev, way, how)
        for way, how in REVERSE.items()
    ),
    *(slow_unless(way == "lanes", jax.jacfwd, way, how) for way, how in FORWARD.items()),
]


def use(way, request):
    if way == "kernel":
        request.getfixturevalue("on_host")


@pytest.mark.parametrize(("derivative", "way", "how"), CASES)
@pytest.mark.parametrize("direction", [1, pytest.param(-1, marks=pytest.mark.slow)])
def test_by_times_at_the_ends(derivative, way, how, direction, request):
    """Of `exp(-(t - t0))`, saved at both ends, twice at the start, and between."""
    use(way, request)
    weights = jnp.array([5.0, 1.0, 2.0, 3.0, 4.0])
    x = {
        "t0": jnp.array(0.1),
        "t1": jnp.array(0.1 + 1.2 * direction),
        "saveat": 0.1 + direction * jnp.array([0.0, 0.0, 0.4, 0.8, 1.2]),
    }

    def loss(x):
        # (Two trajectories, of which the first has times of its own.)
        prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=(1.0 + ctx.index) * prob.u0)
        )
        ens = eo.EnsembleProblem(eo.remake(ens.prob, tspan=(x["t0"], x["t1"])), ens.prob_func)
        sim = eo.solve(ens, trajectories=2, saveat=x["saveat"], **TIGHT, **how)
        return jnp.sum(weights[None] * sim.u[..., 0])

    gradient = derivative(loss)(x)
    u = 3 * np.exp(-(x["saveat"] - x["t0"]))
    np.testing.assert_allclose(gradient["saveat"], -weights * u, rtol=1e-6)
    np.testing.assert_allclose(gradient["t0"], np.sum(weights * u), rtol=1e-6)
    np.testing.assert_allclose(gradient["t1"], 0.0, atol=1e-6)


def by_cond(u, p, t):
    return jax.lax.cond(p > 0, lambda: -jnp.sqrt(p) * u, lambda: 0 * u)


def by_switch(u, p, t):
    branches = [lambda: 0 * u, lambda: u / (p * 0), lambda: -jnp.sqrt(jnp.abs(p)) * u]
    return jax.lax.switch(jnp.where(p > 0, 2, 0), branches)


def by_index(u, p, t):
    table = jnp.stack([0 * p, -jnp.sqrt(jnp.abs(p))])
    return table[jnp.where(p > 0, 1, 0)] * u


def nested(u, p, t):
    """The predicate comes from within a jit, and the branch holds another."""

    @jax.jit
    def positive(p):
        return p > 0

    inner = lambda: jax.lax.cond(p > 100, lambda: u / (0 * p), lambda: -jnp.sqrt(p) * u)  # noqa: E731
    return jax.lax.cond(positive(p), inner, lambda: 0 * u)


DECIDED = {"cond": by_cond, "switch": by_switch, "index": by_index, "nested": nested}
WAYS = {name: how for name, how in REVERSE.items() if name != "kernel"}


@pytest.mark.parametrize(
    ("name", "way"),
    [slow_unless(way == "replay", name, way) for name in DECIDED for way in WAYS],
)
def test_only_the_branch_that_is_taken_is_differentiated(name, way):
    """`u' = -sqrt(p) u`, or zero where p is negative; the square root of that has no derivative."""
    f, how = DECIDED[name], WAYS[way]

    def solved(p, trajectories):
        prob = eo.ODEProblem(f, [1.0], (0.0, 1.0), p)
        if trajectories is None:
            return jnp.sum(eo.solve(prob, saveat=[0.5, 1.0], **TIGHT, **how).u[-1])
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index))
        )
        sim = eo.solve(ens, trajectories=trajectories, saveat=[0.5, 1.0], **TIGHT, **how)
        return jnp.sum(sim.u[:, -1])

    for trajectories, total in ((None, 1.0), (3, 6.0)):
        gradient = jax.jit(jax.grad(solved), static_argnums=1)
        assert gradient(-1.0, trajectories) == 0
        p = 1.5
        exact = -total * np.exp(-np.sqrt(p)) / (2 * np.sqrt(p))
        np.testing.assert_allclose(gradient(p, trajectories), exact, rtol=1e-6)
