"""Steps within which no condition is evaluated: events have the same bits as with evaluations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import solves

from ...marks import slow_unless


def oscillator(u, p, t):
    return jnp.stack([p[0] * u[1], -p[0] * u[0]])


def kicked(integrator):
    return eo.remake(integrator, u=0.9 * integrator.u + 0.05)


N, LANES = 97, solves.tuning.MOST_LANES


def component(u, level, t):
    return u[0] - level


OTHERS = {
    "multiple": lambda u, level, t: 2 * u[0] - 2 * level,
    "difference": lambda u, level, t: u[0] + 0.01 * u[1] - level,
    "time": lambda u, level, t: u[0] + 1e-3 * t - level * (1 + 1e-3 * t),
    "squares": lambda u, level, t: (u[0] - 3) ** 2 - (level - 3) ** 2 + 1e-3 * jnp.sin(u[1]) ** 2,
    "choice": lambda u, level, t: jnp.where(u[0] > 0, jnp.exp(u[0]) - jnp.exp(level), -1.0),
    "norm": lambda u, level, t: jnp.hypot(u[0], u[1] - 1) - jnp.hypot(level, 1),
    "quotient": lambda u, level, t: jnp.maximum(u[0], u[1]) / (2 + u[0]) - level / (2 + level),
}


def several(u, level, t):
    """Which never cross zero together, as what is at one time depends on rules for rounding."""
    return jnp.stack([OTHERS["squares"](u, level, t), OTHERS["choice"](u, 0.9 * level, t)])


def events(alg, dtype, *, looks, condition=component, length=1, **options):
    """The events of oscillators with levels near their largest values, so that some steps rise
    above a level and come back.

    `looks`: whether the time is in the conditions, by a term without a rule. The term is zero, but
    because of it the conditions are evaluated within each step. `length`: how many conditions there
    are.
    """
    options = {"interp_points": 10, **options}
    points = {"interp_points": options.pop("interp_points")}

    def at(u, t, integrator):
        out = condition(u, integrator.p[1], t)
        return out + 0.0 * jnp.floor(t) if looks else out

    if length > 1:
        callback = eo.VectorContinuousCallback(at, lambda x, _: kicked(x), length, **points)
    else:
        callback = eo.ContinuousCallback(at, kicked, **points)
    rng = np.random.default_rng(0)
    p = np.stack([rng.uniform(0.5, 2.0, N), np.linspace(0.7, 1.02, N)], 1).astype(dtype)
    # Neighbouring lanes have equal parameters, so that no lane is evaluated because of another one.
    p = jnp.asarray(p.repeat(LANES, 0))
    prob = eo.ODEProblem(oscillator, np.array([1.0, 0.0], dtype), (0.0, 8.0), p[0])
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=p[ctx.index]))
    sim = eo.solve(
        ens,
        alg,
        eo.EnsembleThreads(1),
        trajectories=N * LANES,
        engine="compiled",
        callback=callback,
        **options,
    )
    return jax.tree.map(np.asarray, (sim.u, sim.stats, sim.events))


ADAPTIVE = {"abstol": 1e-4, "reltol": 1e-3, "max_events": 64}
FIXED = {"adaptive": False, "dt": 0.25, "max_events": 64}
CASES = {
    "Tsit5": (eo.Tsit5(), np.float64, {}, ADAPTIVE),
    "several": (eo.Tsit5(), np.float64, {"condition": several, "length": 2}, ADAPTIVE),
    "single": (eo.Tsit5(), np.float32, {"condition": several, "length": 2}, ADAPTIVE),
    "fixed": (eo.SSPRK33(), np.float64, {}, FIXED),
    "Dopri5": (eo.Dopri5(), np.float64, {}, ADAPTIVE),
    "Bosh3": (eo.Bosh3(), np.float64, {}, ADAPTIVE),
    **{x: (eo.Tsit5(), np.float64, {"condition": fn}, ADAPTIVE) for x, fn in OTHERS.items()},
    "four": (eo.Tsit5(), np.float64, {"interp_points": 4}, ADAPTIVE),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [slow_unless(x in ("Tsit5", "difference"), x) for x in CASES])
def test_the_same_events(name):
    alg, dtype, how, options = CASES[name]
    ours, looked = (events(alg, dtype, looks=x, **how, **options) for x in (False, True))
    jax.tree.map(np.testing.assert_array_equal, ours, looked)
    counts = ours[2].count
    assert counts.min() < counts.max()
    if name == "Tsit5":
        ends = events(alg, dtype, looks=True, interp_points=0, **options)
        assert np.any(ends[2].count < counts)
