"""Decisions about steps, and return codes: in a loop over NumPy arrays with the functions that the
time loops share, and on every engine."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.solvers import verdicts
from ensembleode.solvers.arithmetic import NUMBERS
from ensembleode.solvers.method import equations_of
from ensembleode.solvers.runge_kutta import RungeKutta
from ensembleode.solvers.step_size import squared_error, Tolerances
from ensembleode.solvers.time import adaptive_step, fixed_step, StepBounds

from ..marks import slow_unless


N = 64
METHOD = RungeKutta(eo.Tsit5().tableau)
CONTROLLER = eo.PIController().for_method(5, 4)
# What a field may do at the time `at`, or to a state that is larger.
SMOOTH, NAN_IN_TIME, INF_IN_STATE, BLOWS_UP, STIFF = range(5)


class Case(NamedTuple):
    """Numbers of trajectories, `[n]` each."""

    kind: Any
    rate: Any
    at: Any
    t0: Any
    t1: Any
    abstol: Any
    reltol: Any
    dt: Any
    dtmin: Any
    dtmax: Any


def drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    span = rng.choice([-1.0, 1.0], N) * 10.0 ** rng.uniform(-2, 0.5, N)
    span = np.where(rng.random(N) < 0.05, 0.0, span)
    t0 = rng.uniform(-2, 2, N)
    dtmin = np.where(rng.random(N) < 0.3, 10.0 ** rng.uniform(-6, -1, N), 1e-300)
    dtmax = np.where(rng.random(N) < 0.3, 10.0 ** rng.uniform(-1, 0, N), 1e3)
    return Case(
        rng.integers(0, 5, N).astype(float),
        rng.uniform(0.5, 3.0, N),
        t0 + span * rng.uniform(0.1, 2.0, N),
        t0,
        t0 + span,
        10.0 ** rng.uniform(-9, -3, N),
        10.0 ** rng.uniform(-9, -3, N),
        10.0 ** rng.uniform(-3, 0, N),
        dtmin,
        np.maximum(dtmin, dtmax),
    )


def field(xp, case, u, t):
    """Over NumPy or JAX: two components, the second of which only turns."""
    forwards = xp.sign(case.t1 - case.t0)
    beyond = forwards * (t - case.at) > 0
    x, y = u
    dx = -case.rate * x
    dx = xp.where((case.kind == NAN_IN_TIME) & beyond, xp.nan, dx)
    dx = xp.where((case.kind == INF_IN_STATE) & (y < 0.2), xp.inf, dx)
    dx = xp.where(case.kind == BLOWS_UP, forwards * 3 * case.rate * x * x, dx)
    dx = xp.where(case.kind == STIFF, -200 * forwards * (x - xp.cos(t)), dx)
    return dx, -case.rate * forwards * y + xp.where(case.kind == SMOOTH, 0.1 * x, 0.0)


def by_numpy(case: Case, maxiters: int, *, adaptive: bool):
    """The codes, and the steps accepted and rejected."""
    xp: Any = NUMBERS
    bounds, tol = StepBounds(case.dtmin, case.dtmax), Tolerances(case.abstol, case.reltol)
    t, y, span = case.t0, (np.ones(N), np.ones(N)), case.t1 - case.t0
    h = bounds.first(xp, case.dt, t, span) if adaptive else case.dt
    memory = tuple(np.full(N, x, np.float32) for x in CONTROLLER.initial_memory())
    everywhere, none = np.ones(N, bool), np.zeros(N, np.int32)
    code = verdicts.first_code(xp, everywhere, everywhere, np.isfinite(h), t == case.t1)
    failures, naccept, ntried = none, none, none
    unresolved: Any = None
    equations = equations_of(lambda y, t: field(np, case, y, t))
    for number in range(maxiters + 1):
        going, probing = code == verdicts.GOING, code == verdicts.PROBING
        size = h
        if adaptive:
            t2 = adaptive_step(xp, t, case.t1, np.sign(span), h)
            size = np.minimum(h, np.abs(case.t1 - t))
        else:
            t2, unresolved = fixed_step(xp, case.t0, case.t1, t, h, np.array(number))
        attempt = METHOD.step(xp, equations, y, METHOD.init(xp, equations, y, t), t, t2 - t)
        finite = np.all(np.isfinite(attempt.y2), axis=0)
        if adaptive:
            squared = squared_error(xp, eo.RMSNorm(), tol, attempt, y)
            times = verdicts.Times(t, t2, case.t1, span)
            verdict = verdicts.judge(
                xp, CONTROLLER, bounds, times, size, squared, memory, going, naccept == 0
            )
            verdict, failures = verdicts.counted(xp, verdict, failures, size, span)
            h, memory = np.where(going, verdict.next_h, h), verdict.memory
        else:
            verdict = verdicts.judge_fixed(xp, finite, unresolved, going, h)
        naccept, ntried = naccept + verdict.accepted, ntried + going
        arrived = verdict.accepted & (t2 == case.t1)
        ended = arrived | verdict.lost | (ntried >= maxiters)
        last = verdicts.code_at_end(xp, verdict, arrived, bounds if adaptive else None)
        last = verdicts.code_of_end(xp, last, finite)
        probed = verdicts.code_of_probe(xp, tol, y, attempt.y2)
        code = np.where(probing, probed, np.where(going & ended, last, code))
        h = np.where(going & (code == verdicts.PROBING), verdicts.PROBE * h, h)
        t = np.where(verdict.accepted, t2, t)
        y = tuple(np.where(verdict.accepted, b, a) for a, b in zip(y, attempt.y2, strict=True))
        if not ((code == verdicts.GOING) | (code == verdicts.PROBING)).any():
            break
    return code, naccept, ntried - naccept


def ensemble(case: Case, *, adaptive: bool):
    every = Case(*map(jnp.asarray, case))

    def f(u, p, t):
        return jnp.stack(field(jnp, p, (u[0], u[1]), t))

    def prob_func(prob, ctx):
        own = Case(*(x[ctx.index] for x in every))
        options = {"dt": own.dt}
        if adaptive:
            options |= {"abstol": own.abstol, "reltol": own.reltol}
            options |= {"dtmin": own.dtmin, "dtmax": own.dtmax}
        return eo.remake(prob, tspan=(own.t0, own.t1), p=own, **options)

    first = Case(*(x[0] for x in every))
    return eo.EnsembleProblem(eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0), first), prob_func)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adaptive", "maxiters"),
    [
        (True, 5000),
        slow_unless(False, True, 7),
        slow_unless(False, False, 100),
        slow_unless(False, False, 5000),
    ],
)
def test_every_trajectory_is_decided_as_by_numpy(adaptive, maxiters):
    for seed in range(4):
        case = drawn(seed)
        with np.errstate(all="ignore"):
            code, naccept, nreject = by_numpy(case, maxiters, adaptive=adaptive)
        options = {"adaptive": adaptive, "maxiters": maxiters, "engine": "compiled"}
        sim = eo.solve(ensemble(case, adaptive=adaptive), eo.Tsit5(), trajectories=N, **options)
        np.testing.assert_array_equal(sim.retcode, code)
        # (How often it is tried to go beyond where `f` ends is a matter of rounding.)
        sure = np.isin(case.kind, (SMOOTH, STIFF)) if adaptive else np.ones(N, bool)
        np.testing.assert_array_equal(sim.stats.naccept[sure], naccept[sure])
        np.testing.assert_array_equal(sim.stats.nreject[sure], nreject[sure])


#
# A code for every way to end
#


class Way(NamedTuple):
    """A way to end, and its code; `f` over the first component and `t`, from one to `t1`."""

    code: eo.ReturnCode
    f: Any = lambda u, t: -u
    u0: float = 1.0
    t1: float = 1.0
    options: dict = {}  # noqa: RUF012


FIXED = {"adaptive": False, "dt": 0.01}
Code = eo.ReturnCode
WAYS = {
    "success": Way(Code.Success),
    "no time to go": Way(Code.Success, t1=0.0),
    "no time to go, and f is NaN": Way(Code.Success, lambda u, t: u * jnp.nan, t1=0.0),
    "a start that is NaN": Way(Code.Unstable, u0=np.nan),
    "a start that is NaN, and below dtmin": Way(
        Code.Unstable, u0=np.nan, options={"dtmin": 0.1, "dt": 0.1}
    ),
    "f is NaN": Way(Code.Unstable, lambda u, t: u * jnp.nan),
    "f becomes NaN": Way(Code.Unstable, lambda u, t: jnp.where(jnp.abs(t) > 0.4, jnp.nan, -u)),
    "it diverges": Way(Code.Unstable, lambda u, t: 3 * u * jnp.abs(u) * jnp.sign(0.5 + 0 * t)),
    "tolerances that can't be met": Way(
        Code.DtLessThanMin,
        lambda u, t: jnp.cos(t) - u,
        options={"abstol": 1e-60, "reltol": 1e-60},
    ),
    "below dtmin": Way(
        Code.DtLessThanMin, lambda u, t: -1e4 * (u - jnp.cos(t)), options={"dtmin": 1e-2}
    ),
    "no more steps": Way(
        Code.MaxIters, lambda u, t: jnp.cos(50 * t) + 0 * u, options={"maxiters": 9}
    ),
    "fixed": Way(Code.Success, options=FIXED),
    "fixed, with no step to spare": Way(Code.Success, options={**FIXED, "maxiters": 100}),
    "fixed, no more steps": Way(Code.MaxIters, options={**FIXED, "maxiters": 99}),
    "fixed, f becomes NaN": Way(
        Code.Unstable, lambda u, t: jnp.where(jnp.abs(t) > 0.4, jnp.nan, -u), options=FIXED
    ),
    "fixed, a start that is NaN": Way(Code.Unstable, u0=np.nan, options=FIXED),
    "fixed, too short for time": Way(
        Code.DtLessThanMin, options={"adaptive": False, "dt": 1e-18, "maxiters": 1000}
    ),
}


@pytest.mark.parametrize("sign", [slow_unless(False, 1), -1])
def test_the_code_of_every_way_to_end(sign):
    for name, way in WAYS.items():
        # Far enough from zero for its numbers not to be dense.
        prob = eo.ODEProblem(
            lambda u, p, t, way=way: sign * way.f(u, t - 2.0),
            jnp.array([way.u0]),
            (2.0, 2 + sign * way.t1),
        )
        for where in (eo.EnsembleSerial(), None):
            options = {"engine": "compiled", **way.options}
            if where is None:
                code = eo.solve(prob, eo.Tsit5(), **options).retcode
            else:
                ens = eo.EnsembleProblem(prob)
                (code,) = set(
                    eo.solve(ens, eo.Tsit5(), where, trajectories=3, **options).retcode.tolist()
                )
            assert code == way.code, name


def test_what_happens_later_to_another_changes_no_code():
    """A lane is NaN before time, which all share, has no more numbers for a step."""
    spacing = 2.0**-23
    tspan = (np.float32(2 - 64 * spacing), np.float32(2 + 64 * spacing))

    def f(u, p, t):
        return jnp.where((p > 0) & (t > 2 - 32 * spacing), jnp.nan, -u).astype(u.dtype)

    prob = eo.ODEProblem(f, jnp.ones(2, np.float32), tspan, jnp.float32(0))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=jnp.float32(ctx.index % 2)))
    sim = eo.solve(ens, eo.RK4(), trajectories=4, dt=spacing, adaptive=False, engine="compiled")
    assert sim.retcode.tolist() == [Code.DtLessThanMin, Code.Unstable] * 2
