"""Fields that are infinite or NaN beyond some point: their trajectories end soon, as `Unstable`."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless


# Of all that may be bad: where that begins, which way time goes, what it is, and of what.
STARTS = np.array([-0.1, 0.0, 1e-9, 0.3, 0.77777, 0.995])
CASES = np.array(list(itertools.product(STARTS, (1, -1), (np.nan, np.inf), (0, 1))))
# How far the second clock is ahead.
AHEAD = {np.float64: 1000, np.float32: 4}


def field(u, p, t):
    """Two clocks, the second of which is ahead, and the coarser for that."""
    start, sign, what, of_time, ahead = p
    bad = jnp.where(of_time > 0, sign * t, u[1] - ahead) > start
    return sign * jnp.stack([jnp.where(bad, what, 1.0).astype(u.dtype), jnp.ones_like(u[0])])


def ensemble(dtype):
    cases = jnp.asarray([(*case, AHEAD[dtype]) for case in CASES], dtype)
    prob = eo.ODEProblem(field, np.array([0, AHEAD[dtype]], dtype), (0.0, 1.0), cases[0])

    def prob_func(prob, ctx):
        case = cases[ctx.index]
        # (Both clocks go forwards, whichever way time does.)
        return eo.remake(prob, tspan=(0.0, case[1]), p=case)

    return eo.EnsembleProblem(prob, prob_func)


class Brave(eo.AbstractController):
    """After a failure it tries again four billion times as short."""

    def initial_memory(self):
        return ()

    def factor(self, xp, log_error, memory, accepted, is_first):
        return xp.minimum(0.8 * self.exp2(xp, -log_error / 4), 3.0), ()


WAYS = {
    "adaptive": {},
    "fixed": {"dt": 0.01, "adaptive": False},
    "own": {"stepsize_controller": Brave()},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("engine", "way", "dtype", "alg"),
    [
        ("compiled", "adaptive", np.float64, eo.Tsit5()),
        ("compiled", "adaptive", np.float32, eo.Vern7()),
        ("compiled", "own", np.float64, eo.Tsit5()),
        *(
            slow_unless(False, engine, way, dtype, alg)
            for engine in ("compiled", "diffrax")
            for way in WAYS
            for dtype in (np.float32, np.float64)
            for alg in (eo.Tsit5(), eo.Bosh3())
        ),
    ],
)
def test_ends_soon_and_says_why(engine, way, dtype, alg):
    many = {"trajectories": len(CASES), "engine": engine}
    sim = eo.solve(ensemble(dtype), alg, saveat=[0.0], **many, **WAYS[way])
    assert sim.retcode.tolist() == [eo.ReturnCode.Unstable.value] * len(CASES)
    # (At time zero, diffrax's controllers go on until the numbers underflow.)
    assert sim.stats.nreject.max() < (500 if engine == "diffrax" else 300)
    if way != "own":  # (which takes a score of steps to be as long again as the one that failed)
        assert sim.stats.naccept.max() < 500


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_a_way_round_is_found(engine):
    """Close to zero, all steps that are not short enough have a stage below it."""
    prob = eo.ODEProblem(lambda u, p, t: 1e-3 - 10 * jnp.sqrt(u), jnp.array([1e-4]), (0.0, 0.05))
    sol = eo.solve(prob, eo.Tsit5(), engine=engine, abstol=1e-6)
    assert sol.retcode == eo.ReturnCode.Success
    assert sol.stats.nreject > 500
    np.testing.assert_allclose(sol.u[-1], 1e-8, rtol=0, atol=1e-6)
