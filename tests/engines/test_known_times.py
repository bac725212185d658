"""Known times at which steps end: `tstops`, and `d_discontinuities`, where `f` jumps."""

import json
import pathlib

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo

from ..marks import on_julia, slow_unless
from .methods import Lags


DATA = pathlib.Path(__file__).parents[1] / "data" / "julia_known_times.json"
RECORDED = {x["case"]: x for x in json.loads(DATA.read_text())["records"]}
ENGINES = ("compiled", slow_unless(False, "diffrax"), on_julia("julia"))
TIGHT = {"abstol": 1e-10, "reltol": 1e-10}


def oscillator(u, p, t):
    return jnp.stack([u[1], -u[0]])


def switched(u, p, t):
    return jnp.where(t < 1, -1.0, 1.0) * jnp.ones(1)


CASES = {
    "tstops with saveat": (oscillator, (0.0, 10.0), {"tstops": [0.35], "saveat": 0.25}),
    # (OrdinaryDiffEq's first step where f looks constant is the span, cut at the first stop.)
    "d_discontinuities": (
        switched,
        (0.0, 2.0),
        {"d_discontinuities": [1.0], "dt": 1.0, "save_everystep": True},
    ),
    "fixed dt with tstops": (
        oscillator,
        (0.0, 10.0),
        {"tstops": [0.25], "adaptive": False, "dt": 0.1, "save_everystep": True},
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["compiled", on_julia("julia")])
def test_the_steps_of_julia(engine, case):
    field, tspan, options = CASES[case]
    recorded, stats = RECORDED[case], RECORDED[case]["stats"]
    u0 = recorded["u"][0]
    how = {} if "adaptive" in options else {"abstol": 1e-8, "reltol": 1e-8}
    sol = eo.solve(eo.ODEProblem(field, u0, tspan), engine=engine, **how, **options)
    if case == "d_discontinuities" and engine != "julia":
        # (OrdinaryDiffEq evaluates the last stage before the jump at its time, for `t < 1` behind
        # it, and so takes 125 steps.)
        assert (int(sol.stats.naccept), int(sol.stats.nreject)) == (2, 0)
        np.testing.assert_allclose(sol.u[:, 0], [1.0, 0.0, 1.0], rtol=0, atol=1e-15)
        return
    estimated = 2 if case == "d_discontinuities" else 0
    assert int(sol.stats.naccept) == stats["naccept"]
    assert int(sol.stats.nreject) == stats["nreject"]
    assert int(sol.stats.nf) == stats["nf"] - estimated
    # (The powers of step-size control are of single precision.)
    np.testing.assert_allclose(sol.t, recorded["t"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(sol.u, recorded["u"], rtol=0, atol=1e-6)


N, SIZE = 4, 5


def steps_of(u, p, t):
    """Piecewise constant: `p["rate"][k]` after `k` of the times."""
    passed = jnp.sum(p["sign"] * (t - p["times"]) > 0)
    return p["rate"][passed] * jnp.ones(1)


def pieces(numbers, *, engine, direction, sorted_times=False, **options):
    """Solve the ensemble, which begins at 0 and ends at 1, or -1."""
    times, rates = numbers

    def prob_func(prob, ctx):
        p = {"times": jnp.sort(times[ctx.index]), "rate": rates[ctx.index], "sign": direction}
        known = direction * times[ctx.index]
        own = {"times": direction * p["times"], "rate": p["rate"], "sign": direction}
        return eo.remake(prob, p=own, d_discontinuities=known)

    p = {"times": times[0], "rate": rates[0], "sign": direction}
    prob = eo.ODEProblem(steps_of, [0.0], (0.0, direction), p)
    ens = eo.EnsembleProblem(prob, prob_func)
    sim = eo.solve(ens, trajectories=N, engine=engine, **options)
    return sim.u[:, -1, 0], sim.stats, sim.retcode


SOLVERS = {
    (engine, direction, name): jax.jit(
        lambda numbers, how=(engine, direction), options=options: pieces(
            numbers, engine=how[0], direction=how[1], **options
        )
    )
    for engine in ("compiled", "diffrax")
    for direction in (1.0, -1.0)
    for name, options in {"adaptive": {}, "fixed": {"adaptive": False, "dt": 0.37}}.items()
}
TIMES = st.floats(-0.5, 1.5).map(lambda x: round(x, 5)) | st.sampled_from(
    [0.0, 0.25, 0.5, 1.0, np.inf]
)
TABLES = st.lists(st.lists(TIMES, min_size=SIZE, max_size=SIZE), min_size=N, max_size=N)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("engine", "direction", "name"),
    [slow_unless(x == "compiled" and (d > 0) == (k == "fixed"), x, d, k) for x, d, k in SOLVERS],
)
def test_piecewise_constant_fields(engine, direction, name):
    """With a step for each piece at least, none of which sees two: right to rounding. Times are in
    any order, several of them the same, at the ends and outside."""

    @settings(max_examples=25, deadline=None)
    @given(TABLES)
    def check(table):
        times = np.array(table)
        rates = np.arange(1.0, SIZE + 2) * np.array([1.0, -1, 1, -1, 1, -1]) * np.ones((N, 1))
        ends, stats, codes = SOLVERS[engine, direction, name]((jnp.array(times), jnp.array(rates)))
        bounds = np.clip(np.sort(times, axis=1), 0, 1)
        bounds = np.concatenate([np.zeros((N, 1)), bounds, np.ones((N, 1))], axis=1)
        exact = direction * np.sum(rates * np.diff(bounds, axis=1), axis=1)
        assert (np.asarray(codes) == 1).all()
        np.testing.assert_allclose(ends, exact, rtol=0, atol=1e-13)
        np.testing.assert_array_equal(stats.nreject, 0)
        inside = [len({x for x in row if 0 < x < 1}) for row in times]
        assert (np.asarray(stats.naccept) > inside).all()

    check()


def pulse(u, p, t):
    return jnp.where((t > p["on"]) & (t <= p["off"]), p["rate"], 0.0) - p["k"] * u


P = {"on": 3.0, "off": 3.5, "rate": 10.0, "k": 0.5}


def infused(p, engine, **options):
    """Three patients, the first of whom has the whole pulse and the last a third of it."""

    def prob_func(prob, ctx):
        own = p | {"off": p["on"] + (p["off"] - p["on"]) / (1 + ctx.index)}
        times = jax.lax.stop_gradient(jnp.stack([own["off"], own["on"]]))
        return eo.remake(prob, p=own, d_discontinuities=times, tstops=[own["on"] / 2])

    prob = eo.ODEProblem(pulse, [1.0], (0.0, 10.0), p)
    options = {"trajectories": 3, "engine": engine, **TIGHT, **options}
    return eo.solve(eo.EnsembleProblem(prob, prob_func), **options)


def exactly(p, t, i=0):
    on, off = p["on"], p["on"] + (p["off"] - p["on"]) / (1 + i)
    held = np.exp(-p["k"] * max(0, t - off)) - np.exp(-p["k"] * max(0, t - on))
    return np.exp(-p["k"] * t) + p["rate"] / p["k"] * held


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pulse(engine):
    """Which is stepped over where nobody knows of it."""
    times = [1.0, 3.0, 3.2, 3.5, 10.0]
    sim = infused(P, engine, saveat=times)
    exact = [[exactly(P, t, i) for t in times] for i in range(3)]
    np.testing.assert_allclose(sim.u[..., 0], exact, rtol=1e-8)
    alone = eo.solve(eo.ODEProblem(pulse, [1.0], (0.0, 10.0), P), engine=engine)
    assert abs(float(alone.u[-1, 0]) - exactly(P, 10.0)) > 0.01


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_end_there_and_go_on_right_after(engine):
    sim = infused(P, engine, save_everystep=True)
    for i, t in enumerate(np.asarray(sim.t)):
        off = 3 + 0.5 / (1 + i)
        assert np.isin([1.5, 3.0, off], t).all()
        # (Where there is a row, there is one state.)
        assert len({*t[np.isfinite(t)]}) == int(sim.lengths[i])
    within = np.array([0.7, 2.999, 3.001, 3.1, 3.5, 7.0])
    exact = [exactly(P, t) for t in within]
    np.testing.assert_allclose(sim[0](within)[:, 0], exact, rtol=1e-7)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("engine", "mode"),
    [("compiled", mode) for mode in ("ends", "times", "steps")]
    + [slow_unless(False, "diffrax", mode) for mode in ("ends", "times")]
    + [on_julia("julia", mode) for mode in ("ends", "times")],
)
def test_gradients(engine, mode):
    saving = {
        "ends": {},
        "times": {"saveat": np.array([3.0, 3.2, 10.0])},
        "steps": {"save_everystep": True, "maxiters": 150},
    }[mode]

    def end(p):
        sim = infused(P | p, engine, **saving)
        last = sim.u[jnp.arange(3), sim.lengths - 1, 0].sum()
        return last + sim.u[:, 1, 0].sum() if mode == "times" else last

    def exact(p):
        times = [10.0, 3.2] if mode == "times" else [10.0]
        return sum(exactly(P | p, t, i) for i in range(3) for t in times)

    found = jax.jit(jax.grad(end))({"rate": 10.0, "k": 0.5})
    for name, step in (("rate", 1e-4), ("k", 1e-5)):
        sides = [exact({name: P[name] + d}) for d in (step, -step)]
        assert float(found[name]) == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-6)


def swing(u, p, t):
    return jnp.stack([u[1], -p[0] * jnp.sin(u[0]) * (1 + p[1] * jnp.where(t > 0.25, t, 0.0))])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("saving", [{"saveat": jnp.linspace(0.1, 1.0, 7)}, {}])
def test_gradients_of_a_method_that_remembers(saving):
    """What it carries is made anew of the state where the field jumps, backwards, too."""

    def loss(x):
        prob = eo.ODEProblem(swing, x[:2], (0.0, 1.0), x[2:])
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + 0.1 * ctx.index))
        )
        times = jnp.array([[0.71, 0.25], [0.25, 0.5], [jnp.inf, jnp.inf]])
        options = {"adaptive": False, "dt": 0.03, "engine": "compiled", "d_discontinuities": times}
        u = eo.solve(ens, Lags(), trajectories=3, **options, **saving).u[:, 1:]
        return jnp.sum(u**2 * jnp.cos(jnp.arange(float(u.size))).reshape(u.shape))

    x, step = jnp.array([1.0, 0.5, 2.0, 1.0]), 1e-5
    found, value = jax.jit(jax.grad(loss))(x), jax.jit(loss)
    expected = [(value(x + d) - value(x - d)) / (2 * step) for d in step * np.eye(len(x))]
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)
    _, pushed = jax.jit(lambda x: jax.jvp(loss, (x,), (x,)))(x)
    np.testing.assert_allclose(pushed, found @ x, rtol=1e-11)


X = jnp.array([3.0, 3.5, 10.0, 0.5])


def ramped(u, p, t):
    """An infusion from p[0] to p[1] whose rate grows."""
    return jnp.where((t > p[0]) & (t <= p[1]), p[2] * (1 + t), 0.0) - p[3] * u


def ramps(x, n=2, **options):
    """Of each patient the last state, and those within the infusion and behind it."""

    def prob_func(prob, ctx):
        own = x * (1 + 0.1 * ctx.index)
        return eo.remake(prob, p=own, d_discontinuities=own[1::-1])

    prob = eo.ODEProblem(ramped, jnp.ones(1), (0.0, 10.0), x)
    options = {"engine": "compiled", "saveat": jnp.array([3.4, 10.0])} | TIGHT | options
    return eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=n, **options).u[..., 0]


def ramps_exactly(x, n=2):
    def one(x, t):
        on, off, rate, k = x

        def until(s):
            return jnp.exp(-k * (t - s)) * ((1 + s) / k - 1 / k**2)

        return jnp.exp(-k * t) + rate * (until(jnp.minimum(off, t)) - until(jnp.minimum(on, t)))

    each = [x * (1 + 0.1 * i) for i in range(n)]
    return jnp.stack([jnp.stack([one(p, t) for t in (3.4, 10.0)]) for p in each])


def total(u):
    return jnp.sum(jnp.sin(u) * jnp.arange(1.0, 1 + u.size).reshape(u.shape))


@pytest.mark.slow
def test_derivatives_by_the_times_of_jumps():
    """In closed form, of first and second order, in both modes."""

    def found(x):
        return total(ramps(x))

    def expected(x):
        return total(ramps_exactly(x))

    pushed = jax.jit(lambda x: jax.jvp(found, (x,), (X,))[1])(X)
    np.testing.assert_allclose(pushed, jax.grad(expected)(X) @ X, rtol=1e-8)
    gradient, hessian = jax.jit(lambda x: (jax.grad(found)(x), jax.hessian(found)(x)))(X)
    np.testing.assert_allclose(gradient, jax.grad(expected)(X), rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(hessian, jax.hessian(expected)(X), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_derivatives_by_the_times_of_jumps_of_third_order():
    """One by the others first, and by the times last."""

    def third(fn):
        def by_others(y):
            return jax.grad(lambda z: total(fn(jnp.concatenate([X[:2], z]))))(y)

        def mixed(times):
            return jax.jacfwd(jax.grad(lambda z: total(fn(jnp.concatenate([times, z])))))(X[2:])

        return by_others(X[2:]), jax.jacfwd(mixed)(X[:2])

    for a, b in zip(third(ramps), third(ramps_exactly), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def stirred(u, p, t):
    return jnp.stack([u[1], -p[0] * u[0] * jnp.where((t - p[1]) * p[2] > 0, 2.0, 1.0)])


@pytest.mark.parametrize(
    ("direction", "also"), [(1, True), slow_unless(False, -1, True), slow_unless(False, -1, False)]
)
def test_moving_jumps_with_events(direction, also):
    """Backwards in time, and with a callback that acts before or behind the jump: against
    differences."""
    strike = eo.ContinuousCallback(
        lambda u, t, i: u[0], lambda i: eo.remake(i, u=jnp.stack([0 * i.u[0], -0.8 * i.u[1]]))
    )

    def found(x):
        u0, when = x[:2], direction * x[3]
        p = jnp.stack([x[2], when, jnp.asarray(float(direction))])
        prob = eo.ODEProblem(stirred, u0, (0.0, 2.0 * direction), p, integrand=lambda u, p, t: u[0])
        how = {"callback": strike, "max_events": 6} if also else {}
        sol = eo.solve(prob, eo.Vern7(), d_discontinuities=when, abstol=1e-12, reltol=1e-12, **how)
        return jnp.concatenate([sol.u[-1], sol.integral[-1:]])

    x, h = jnp.array([1.0, 0.5, 2.0, 0.7]), 1e-5
    got, value = jax.jit(jax.jacrev(found))(x), jax.jit(found)
    differences = [(value(x + d) - value(x - d)) / (2 * h) for d in h * np.eye(4)]
    assert np.abs(got[:, 3]).min() > 1e-3
    np.testing.assert_allclose(got, np.stack(differences, axis=1), rtol=1e-7, atol=1e-7)


def test_a_thousand():
    times = np.random.default_rng(0).permutation(1000) / 1000
    prob = eo.ODEProblem(oscillator, [1.0, 0.0], (0.0, 1.0))
    sol = eo.solve(prob, tstops=times, engine="compiled", **TIGHT)
    assert 1000 <= int(sol.stats.naccept) < 1100
    np.testing.assert_allclose(sol.u[-1], [np.cos(1), -np.sin(1)], rtol=1e-10)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_times_that_are_not_in_the_span_change_nothing(engine):
    prob = eo.ODEProblem(oscillator, [1.0, 0.0], (0.0, 5.0))
    plain = eo.solve(prob, engine=engine)
    for times in ([], [-1.0, 0.0, 5.0, 7.0, np.inf], np.zeros((0,))):
        sol = eo.solve(prob, engine=engine, tstops=times)
        np.testing.assert_array_equal(sol.u, plain.u)
        assert int(sol.stats.naccept) == int(plain.stats.naccept)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_trajectory_that_fails(engine):
    """Leaves its neighbours alone, before a known time of its own or after."""

    def field(u, p, t):
        return jnp.where(t > p, jnp.nan, -u)

    def prob_func(prob, ctx):
        last = jnp.array([0.3, 0.8, 9.0])[ctx.index]
        return eo.remake(prob, p=last, tstops=jnp.array([0.5, 0.8]) + ctx.index * 0.01)

    ens = eo.EnsembleProblem(eo.ODEProblem(field, [1.0], (0.0, 1.0), 0.3), prob_func)
    sim = eo.solve(ens, trajectories=3, engine=engine, **TIGHT)
    assert [x.name for x in map(eo.ReturnCode, sim.retcode)] == ["Unstable", "Unstable", "Success"]
    assert np.isnan(sim.u[:2, -1]).all()
    np.testing.assert_allclose(sim.u[2, -1], np.exp(-1), rtol=1e-8)


def stopped(**options):
    return lambda: eo.solve(eo.ODEProblem(oscillator, [1.0, 0.0], (0.0, 1.0)), **options)


def preset(times):
    return lambda: eo.PresetTimeCallback(times, ten_more)


def periodic(dt, **options):
    return lambda: eo.PeriodicCallback(ten_more, dt, **options)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "tstops has a time that is NaN", stopped(tstops=[0.5, np.nan])),
        (TypeError, "tstops must be a time, an array of times", stopped(tstops="noon")),
        (TypeError, "tstops must be a time, an array of times", stopped(tstops=[[1], [2, 3]])),
        (ValueError, "d_discontinuities must be a time", stopped(d_discontinuities=[[[1.0]]])),
        (ValueError, r"tstops has the shape \(2, 1\)", stopped(tstops=[[0.5], [0.6]])),
        (
            ValueError,
            "sensealg=BacksolveAdjoint.. solves the ODE once more",
            stopped(tstops=0.5, engine="diffrax", sensealg=eo.BacksolveAdjoint()),
        ),
        (TypeError, "it is called tstops", stopped(step_ts=0.5)),
        (TypeError, "it is called d_discontinuities", stopped(jump_ts=0.5)),
        (ValueError, "times of PresetTimeCallback has a time that is NaN", preset([np.nan])),
        (ValueError, "let prob_func pick a row", preset([[1.0], [2.0]])),
        (TypeError, "times of PresetTimeCallback must be a time", preset("noon")),
        (ValueError, "dt of PeriodicCallback must be a positive number", periodic(0.0)),
        (ValueError, "phase of PeriodicCallback must be zero", periodic(1.0, phase=-1.0)),
    ],
)
def test_bad_input(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_rows_must_be_of_one_length():
    def prob_func(prob, ctx):
        return eo.remake(prob, tstops=np.arange(int(ctx.index) + 1) / 10)

    ens = eo.EnsembleProblem(eo.ODEProblem(oscillator, [1.0, 0.0], (0.0, 1.0)), prob_func)
    with pytest.raises(ValueError, match=r"how many times there are in tstops \(fill up with inf"):
        eo.solve(ens, trajectories=2)


def ten_more(integrator):
    return eo.remake(integrator, u=integrator.u + 10.0)


# (Of a dose at the start, OrdinaryDiffEq's own loses what it did to a static array.)
SCHEDULES = {
    "preset dosing save_positions=true,true": eo.PresetTimeCallback([4.0, 2.0, 6.0], ten_more),
    "periodic 2.0": eo.PeriodicCallback(ten_more, 2.0),
    "periodic 2.0 initial_affect": eo.PeriodicCallback(ten_more, 2.0, initial_affect=True),
    "periodic 2.0 final_affect": eo.PeriodicCallback(ten_more, 2.0, final_affect=True),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", SCHEDULES)
def test_the_schedules_of_julia(case):
    recorded = RECORDED[case]
    prob = eo.ODEProblem(lambda u, p, t: -0.5 * u, [10.0], (0.0, 10.0), callback=SCHEDULES[case])
    sol = eo.solve(prob, abstol=1e-8, reltol=1e-8)
    happened = [x for x in recorded["events"] if x["t"] > 0]
    counts = {name: int(getattr(sol.stats, name)) for name in ("naccept", "nreject", "nf")}
    assert counts == recorded["stats"]
    assert sol.events.t.tolist() == [x["t"] for x in happened]
    before = [x["u_before"] for x in happened]
    np.testing.assert_allclose(sol.events.u_before, before, rtol=1e-11)
    np.testing.assert_allclose(sol.u[-1], recorded["u"][-1], rtol=1e-11)


@pytest.mark.slow
def test_periods_are_multiples():
    """Later, and backwards in time; as many as there are before the end."""

    def times(tspan, *period, **options):
        callback = eo.PeriodicCallback(ten_more, *period, **options)
        prob = eo.ODEProblem(lambda u, p, t: -0.5 * u, [10.0], tspan, callback=callback)
        return eo.solve(prob).events.t.tolist()

    assert times((0.0, 7.0), 2.0, phase=0.5) == [0.5, 2.5, 4.5, 6.5]
    assert times((5.0, -1.0), 2.0) == [3.0, 1.0]
    assert times((0.0, 0.3), 0.1) == [i * 0.1 for i in (1, 2)]
    assert times((0.0, 1.0), 3.0) == []


DOSES = np.array([[0.0, 12.0, 24.0, np.inf], [36.0, 6.0, 6.0, 47.0], [np.inf] * 4, [48, 0, 1, 2]])
RATES = np.array([0.1, 0.2, 0.3, 0.05])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_bolus_doses_by_a_schedule_of_each(mode):
    """One compartment, against the sum of the doses before; some at the start, at the end, or
    twice at the same time."""
    times = np.array([0.0, 6.0, 13.0, 30.0, 47.5, 48.0])

    def course(doses, rates, amount):
        def prob_func(prob, ctx):
            def dosed(integrator):
                return eo.remake(integrator, u=integrator.u + amount)

            # (Later by a lag of the patient's, as an estimate would have it.)
            lag = 0.0 * rates[ctx.index]
            callback = eo.PresetTimeCallback(doses[ctx.index] + lag, dosed)
            return eo.remake(prob, p=rates[ctx.index], callback=callback)

        prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 48.0), 0.1)
        ens = eo.EnsembleProblem(prob, prob_func)
        return eo.solve(ens, trajectories=4, saveat=times, **TIGHT)

    sim = (jax.jit(course) if mode == "jit" else course)(DOSES, RATES, 10.0)
    for i, (doses, rate) in enumerate(zip(DOSES, RATES, strict=True)):
        given = {x for x in doses if x < 48}
        # (A row at the time of a dose is the state before it.)
        exact = [
            np.exp(-rate * t) + sum(10 * np.exp(-rate * (t - x)) for x in given if x < t or x == 0)
            for t in times
        ]
        np.testing.assert_allclose(sim.u[i, :, 0], exact, rtol=1e-8, atol=1e-9)
        happened = sorted({x for x in doses if 0 < x <= 48})
        assert int(sim.events.count[i]) == len(happened)
        assert np.asarray(sim.events.t)[i, : len(happened)].tolist() == happened


def test_a_schedule_that_ends_the_trajectory():
    ends = eo.PresetTimeCallback([0.5], eo.terminate)
    prob = eo.ODEProblem(oscillator, [1.0, 0.0], (0.0, 1.0), callback=ends)
    sol = eo.solve(prob, **TIGHT)
    assert sol.retcode == eo.ReturnCode.Terminated
    np.testing.assert_allclose(sol.u[-1, 0], np.cos(0.5), rtol=1e-9)


def test_what_schedules_can_not_be():
    prob = eo.ODEProblem(oscillator, [1.0, 0.0], (0.0, 1.0))

    def over(end):
        every = eo.PeriodicCallback(ten_more, 0.1)
        return eo.solve(eo.remake(prob, tspan=(0.0, end), callback=every)).u

    with pytest.raises(TypeError, match=r"tspan is traced.*PresetTimeCallback"):
        jax.jit(over)(1.0)
    with pytest.raises(TypeError, match="dt of PeriodicCallback is traced"):
        jax.jit(lambda dt: eo.PeriodicCallback(ten_more, dt))(0.1)
    ends = eo.PresetTimeCallback([0.0, 0.5], eo.terminate)
    with pytest.raises(ValueError, match="may terminate a trajectory, and may be at its start"):
        eo.solve(prob, callback=ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "direction"),
    [
        (eo.Kvaerno5(), 1),
        (diffrax.Kvaerno5(), 1),
        (eo.Kvaerno4(), -1),
        (diffrax.Kvaerno5(), -1),
    ],
)
def test_no_stage_is_behind_a_jump(solver, direction):
    """These methods have a stage past the end of the step."""

    def f(u, p, t):
        t = direction * t
        return direction * (jnp.where(t < p, jnp.cos(t), 100.0) - u)

    def solved(p, **options):
        prob = eo.ODEProblem(f, [0.5], (0.0, 2.0 * direction), p)
        return eo.solve(prob, solver, d_discontinuities=[direction * p], **options)

    def exact(p):
        at_jump = (jnp.cos(p) + jnp.sin(p)) / 2
        return 100 + (at_jump - 100) * jnp.exp(p - 2)

    p, tight = jnp.pi / 3, {"abstol": 1e-8, "reltol": 1e-8}
    sol = solved(p, **tight)
    np.testing.assert_allclose(sol.u[-1, 0], exact(p), rtol=1e-7)
    # Not many more attempts than where nothing jumps.
    apart, state = 0, [0.5]
    for start, end, jump in ((0.0, p, 3.0), (p, 2.0, -1.0)):
        prob = eo.ODEProblem(f, state, (direction * start, direction * end), jump)
        piece = eo.solve(prob, solver, **tight)
        apart, state = apart + piece.stats.naccept + piece.stats.nreject, piece.u[-1]
    assert sol.stats.naccept + sol.stats.nreject <= apart + 40
    if direction == 1:
        gradient = jax.grad(lambda p: solved(p, **tight).u[-1, 0])(p)
        np.testing.assert_allclose(gradient, jax.grad(exact)(p), rtol=1e-5)
