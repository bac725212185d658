"""Steps in which no condition is looked at: events have the same bits as with looking."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.core.events import Part
from ensembleode.engines.compiled.quiet import components_of
from ensembleode.tracing.program import trace

from ...marks import slow_unless


def found(condition):
    def fn(u, numbers, t):
        return jnp.atleast_1d(condition(u, *numbers, t))

    u, number = jnp.ones(3), jnp.ones(())
    return components_of(Part(trace(fn, u, (number,), number, rules=True)[0]))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (lambda u, p, t: u[2] - 100.0, [2]),
        (lambda u, p, t: -(p**2 - u[0]), [0]),
        (lambda u, p, t: jnp.stack([u[1] + p, u[0]]), [1, 0]),
        (lambda u, p, t: u - jnp.arange(3.0), [0, 1, 2]),
        (lambda u, p, t: jax.jit(lambda x: x - p)(u[1]), [1]),
        (lambda u, p, t: u[0] - t, None),
        (lambda u, p, t: 2 * u[0], None),
        (lambda u, p, t: u[0] - u[1], None),
        # (Between the two sums a large number may round it away.)
        (lambda u, p, t: (u[0] + p) - p, None),
        (lambda u, p, t: jnp.floor(u[0]), None),
        (lambda u, p, t: jax.lax.stop_gradient(u[0]) ** 2, None),
        (lambda u, p, t: jnp.where(u[0] > 0, 1.0, -1.0), None),
        (lambda u, p, t: p, None),
    ],
)
def test_components(condition, expected):
    assert found(condition) == expected


def oscillator(u, p, t):
    return jnp.stack([p[0] * u[1], -p[0] * u[0]])


def kicked(integrator):
    return eo.remake(integrator, u=0.9 * integrator.u + 0.05)


N = 193


def events(alg, dtype, *, looks, is_vector=False, **options):
    """Of oscillators with levels about their largest values, that steps go over and come back from.

    `looks`: with time in the conditions, which adds nothing to them, but has each looked at.
    """
    options = {"interp_points": 10, **options}
    points = {"interp_points": options.pop("interp_points")}

    def also(t):
        return 0.0 * t if looks else 0.0

    def one(u, t, integrator):
        return (u[0] - integrator.p[1]) + also(t) if looks else u[0] - integrator.p[1]

    def several(u, t, integrator):
        level = integrator.p[1]
        both = jnp.stack([u[0] - level, -level - u[1]])
        return both + also(t) if looks else both

    if is_vector:
        callback = eo.VectorContinuousCallback(several, lambda x, _: kicked(x), 2, **points)
    else:
        callback = eo.ContinuousCallback(one, kicked, **points)
    rng = np.random.default_rng(0)
    p = np.stack([rng.uniform(0.5, 2.0, N), rng.uniform(0.7, 1.02, N)], 1).astype(dtype)
    prob = eo.ODEProblem(oscillator, np.array([1.0, 0.0], dtype), (0.0, 12.0), p[0])
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=jnp.asarray(p)[ctx.index]))
    sim = eo.solve(
        ens,
        alg,
        eo.EnsembleThreads(1),
        trajectories=N,
        engine="compiled",
        callback=callback,
        **options,
    )
    return jax.tree.map(np.asarray, (sim.u, sim.stats, sim.events))


ADAPTIVE = {"abstol": 1e-4, "reltol": 1e-3, "max_events": 256}
FIXED = {"adaptive": False, "dt": 0.25, "max_events": 256}
CASES = {
    "Tsit5": (eo.Tsit5(), np.float64, {}, ADAPTIVE),
    "vector": (eo.Tsit5(), np.float64, {"is_vector": True}, ADAPTIVE),
    "single": (eo.Tsit5(), np.float32, {}, ADAPTIVE),
    "fixed": (eo.RK4(), np.float64, {}, FIXED),
    "Bosh3": (eo.Bosh3(), np.float64, {}, ADAPTIVE),
    "four": (eo.Tsit5(), np.float64, {"interp_points": 4}, ADAPTIVE),
}


@pytest.mark.parametrize("name", [slow_unless(x in ("Tsit5", "vector"), x) for x in CASES])
def test_the_same_events(name):
    alg, dtype, how, options = CASES[name]
    ours, looked = (events(alg, dtype, looks=x, **how, **options) for x in (False, True))
    jax.tree.map(np.testing.assert_array_equal, ours, looked)
    counts = ours[2].count
    assert counts.min() == 0 < counts.max()
    if name == "Tsit5":
        ends = events(alg, dtype, looks=True, interp_points=0, **options)
        assert np.any(ends[2].count < counts)
