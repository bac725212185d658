"""Orders of convergence of the steps, and of the interpolation within them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode import solvers

from ...marks import slow_unless


METHODS = [cls for cls in vars(solvers).values() if hasattr(cls, "tableau")]
methods = functools.partial(pytest.mark.parametrize, "cls", ids=lambda cls: cls.__name__)
# Steps of the coarser of two solves, in [0, 3]: asymptotic, and far from rounding.
STEPS = {1: 768, 2: 192, 3: 96, 4: 48, 5: 24, 6: 16, 7: 12, 8: 16, 9: 6}
# Of a single step.
STEP = {1: 0.01, 2: 0.02, 3: 0.02, 4: 0.03, 5: 0.07, 6: 0.1, 7: 0.2, 8: 0.25, 9: 0.3}
SPANS = np.array([[0.0, 3.0], [3.0, 0.0]])
# Within steps, and at no special place of one.
INSIDE = np.array([0.03, 0.31, 0.77, 1.13, 1.73, 2.93])


def field(u, p, t):
    """Nonlinear, coupled and not autonomous, with the solution below."""
    x, y = u
    return jnp.array(
        [
            p[0] * jnp.cos(p[0] * t) + x * y - jnp.sin(p[0] * t) * jnp.exp(-t),
            -y + jnp.sin(x) ** 2 - jnp.sin(jnp.sin(p[0] * t)) ** 2,
        ]
    )


def solution(t, rate):
    return np.stack([np.sin(rate * t), np.exp(-t)], axis=-1)


RATES = np.array([1.0, 1.5, 2.0])


@functools.partial(jax.jit, static_argnums=0)
def solve(cls, dt, span, times):
    """Three trajectories at a step size."""
    t0, t1 = span
    prob = eo.ODEProblem(field, jnp.zeros(2), (t0, t1), jnp.zeros(1))

    def prob_func(prob, ctx):
        p = jnp.asarray(RATES)[ctx.index][None]
        u0 = jnp.stack([jnp.sin(p[0] * t0), jnp.exp(-t0)])
        return eo.remake(prob, u0=u0, p=p)

    sim = eo.solve(
        eo.EnsembleProblem(prob, prob_func),
        cls(),
        trajectories=len(RATES),
        dt=dt,
        adaptive=False,
        saveat=times,
        engine="compiled",
    )
    return sim.u, sim.stats.naccept


def errors(cls, steps, span, inside):
    """At the end, and within the steps."""
    times = np.sort(np.append(inside, span[1]))
    times = times if span[1] > span[0] else times[::-1]
    u, naccept = solve(cls, abs(span[1] - span[0]) / steps, span, times)
    assert (np.asarray(naccept) == steps).all()
    exact = np.stack([solution(times, rate) for rate in RATES])
    error = np.abs(np.asarray(u) - exact)
    return np.sqrt([np.mean(error[:, -1] ** 2), np.mean(error[:, :-1] ** 2)])


@pytest.mark.slow
@pytest.mark.parametrize("span", SPANS, ids=["forwards", "backwards"])
@methods(METHODS)
def test_order(cls, span):
    """Of the states at the end, and within the steps."""
    steps = 8 if cls is eo.Vern8 else STEPS[cls.order]
    coarse, fine = (errors(cls, n, span, INSIDE) for n in (steps, 2 * steps))
    assert np.all(fine > 1e-14)
    orders = np.log2(coarse / fine)
    # Tsit5 is all but of order 6 here, Vern8 backwards of 11, and Dopri8 not yet of its own.
    short, more = (1 if cls is eo.Dopri8 else 0.2), (3 if cls is eo.Vern8 else 1.2)
    assert np.all(orders > cls.order - short)
    assert np.all(orders < cls.order + more)


@methods([slow_unless(cls.order > 6, cls) for cls in METHODS])
def test_order_within_one_step(cls):
    """O(h^(q + 1)) for an interpolant of order q, whatever the order of the method."""
    theta = np.array([0.1, 0.25, 0.4, 0.6, 0.75, 0.9])
    starts = np.linspace(0, 2, 8)

    def error(h):
        each = [errors(cls, 1, np.array([t, t + h]), t + h * theta)[1] for t in starts]
        return np.sqrt(np.mean(np.square(each)))

    h = STEP[cls.tableau.interpolant.order]
    coarse, fine = error(h), error(h / 1.5)
    assert fine > 1e-14
    order = np.log(coarse / fine) / np.log(1.5) - 1
    # Verner's are of one order more, but for a remainder that is small here.
    declared, more = cls.tableau.interpolant.order, cls.__name__.startswith("Vern")
    assert declared - 0.2 < order < declared + (1.2 if more else 0.2)


@pytest.mark.slow
@methods([cls for cls in METHODS if cls.order > 4])
def test_errors_and_steps_follow_the_tolerance(cls):
    """From 1e-4 to 1e-10, at the ends of steps as within them."""
    prob = eo.ODEProblem(field, jnp.array([0.0, 1.0]), (0.0, 3.0), jnp.array([2.0]))
    exact, steps = solution(INSIDE, 2.0), []
    for tol in (1e-4, 1e-6, 1e-8, 1e-10):
        sol = eo.solve(prob, cls(), saveat=INSIDE, abstol=tol, reltol=tol, engine="compiled")
        assert np.abs(np.asarray(sol.u) - exact).max() < 2 * tol
        assert sol.stats.nreject <= 2
        steps.append(int(sol.stats.naccept))
    # As the estimate of a step's error is O(h^order).
    growth = np.log(steps[3] / steps[1]) / np.log(1e4)
    assert 0.7 / cls.order < growth < 1.3 / cls.order
