"""Decisions about steps, and return codes: of random trajectories as the oracle has them, and of
every way to end."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .. import oracle
from ..marks import slow_unless


N = 16
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


def field(u, p, t):
    """Two components, the second of which only turns."""
    forwards = jnp.sign(p.t1 - p.t0)
    beyond = forwards * (t - p.at) > 0
    x, y = u
    dx = -p.rate * x
    dx = jnp.where((p.kind == NAN_IN_TIME) & beyond, jnp.nan, dx)
    dx = jnp.where((p.kind == INF_IN_STATE) & (y < 0.2), jnp.inf, dx)
    dx = jnp.where(p.kind == BLOWS_UP, forwards * 3 * p.rate * x * x, dx)
    dx = jnp.where(p.kind == STIFF, -200 * forwards * (x - jnp.cos(t)), dx)
    dy = -p.rate * forwards * y + jnp.where(p.kind == SMOOTH, 0.1 * x, 0.0)
    return jnp.stack([dx, dy])


def ensemble(case: Case, *, adaptive: bool):
    every = Case(*map(jnp.asarray, case))
    names = ("dt", "abstol", "reltol", "dtmin", "dtmax") if adaptive else ("dt",)

    def prob_func(prob, ctx):
        own = Case(*(x[ctx.index] for x in every))
        options = {name: getattr(own, name) for name in names}
        return eo.remake(prob, tspan=(own.t0, own.t1), p=own, **options)

    first = Case(*(x[0] for x in every))
    return eo.EnsembleProblem(eo.ODEProblem(field, jnp.ones(2), (0.0, 1.0), first), prob_func)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("adaptive", "maxiters"), [(True, 5000), (True, 7), (False, 100), (False, 5000)]
)
def test_every_trajectory_is_decided_as_by_the_oracle(adaptive, maxiters, seed):
    case = drawn(seed)
    ens, options = ensemble(case, adaptive=adaptive), {"adaptive": adaptive, "maxiters": maxiters}
    expected = oracle.solve_each(ens, n=N, **options)
    sim = eo.solve(ens, eo.Tsit5(), trajectories=N, engine="compiled", **options)
    np.testing.assert_array_equal(sim.retcode, [x.retcode for x in expected])
    # (How often it is tried to go beyond where `f` ends is a matter of rounding.)
    sure = np.isin(case.kind, (SMOOTH, STIFF)) if adaptive else np.ones(N, bool)
    for name in ("naccept", "nreject"):
        counts = np.array([getattr(x, name) for x in expected])
        np.testing.assert_array_equal(getattr(sim.stats, name)[sure], counts[sure])


class Way(NamedTuple):
    """A way to end, and its code; `f` over the first component and `t`, from one to `t1`."""

    code: eo.ReturnCode
    f: Any = lambda u, t: -u
    u0: float = 1.0
    t1: float = 1.0
    options: dict = {}  # noqa: RUF012


FIXED, FAR = {"adaptive": False, "dt": 0.01}, {"max_norm": 10.0}
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
    "too far by the last step": Way(
        Code.Diverged, lambda u, t: 0 * u + 50, options={**FAR, "dt": 0.05, "maxiters": 2}
    ),
    "too far at the end": Way(Code.Diverged, lambda u, t: 0 * u + 9.001, options=FAR),
    "nearly too far": Way(Code.Success, lambda u, t: 0 * u + 8.999, options=FAR),
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


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
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


STARTS = {"few": np.linspace(1, 2, 3), "many": np.linspace(1, 2, 60), "single": np.ones(3, "f4")}
BY_DIFFRAX, BY_LARGEST = {"engine": "diffrax"}, {"internalnorm": eo.MaxNorm()}
WITH_INTEGRAL = {"integrand": lambda u, p, t: 1e3 * u}


@pytest.mark.parametrize(
    ("alg", "start", "options"),
    [
        (eo.Tsit5(), "single", {}),
        *(
            slow_unless(False, *case)
            for case in (
                (eo.Tsit5(), "few", {**BY_LARGEST, **WITH_INTEGRAL}),
                (eo.Tsit5(), "many", {}),
                (eo.RK4(), "few", FIXED),
                (eo.RK4(), "many", {**FIXED, **BY_LARGEST}),
                (eo.Rodas5P(), "few", WITH_INTEGRAL),
                (eo.AutoTsit5(eo.Rosenbrock23()), "few", {}),
                (eo.Vern7(), "single", {**BY_DIFFRAX, **WITH_INTEGRAL, "tstops": [0.3, 0.9]}),
                (eo.Euler(), "few", {**BY_DIFFRAX, "dt": 0.01, "d_discontinuities": [0.3]}),
            )
        ),
    ],
)
def test_the_first_step_beyond_max_norm_is_the_last(alg, start, options):
    """Up to it, all bits are those without a limit. (In single precision, the squares of numbers
    below the limit overflow.)"""
    u0, limit = STARTS[start], 1e25 if start == "single" else 30.0
    rates = jnp.asarray(np.log(limit) * np.array([0.3, 1.2, 1.05]), u0.dtype)
    options = {"save_everystep": True, **options}
    how = {"trajectories": 3, "engine": options.pop("engine", "auto")}
    prob = eo.ODEProblem(lambda u, p, t: p * u, u0, (0.0, 1.0), rates[0], **options)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=rates[ctx.index]))
    free, sim = eo.solve(ens, alg, **how), eo.solve(ens, alg, max_norm=limit, **how)
    assert sim.retcode.tolist() == [Code.Success, Code.Diverged, Code.Diverged]
    for long, short in zip(free, sim, strict=True):
        scaled = np.asarray(long.u) / limit
        norms = scaled.max(1) if "internalnorm" in options else np.sqrt((scaled**2).mean(1))
        rows = np.argmax(norms > 1) + 1 if norms.max() > 1 else len(norms)
        assert short.length == rows == short.stats.naccept + 1
        np.testing.assert_array_equal(short.u, long.u[:rows])
        np.testing.assert_array_equal(short.t, long.t[:rows])


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
