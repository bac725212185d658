"""Events beyond the record, where solves stop, and what is saved at events."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo
from ensembleode.ground import logs
from ensembleode.running import every_event


TIGHT = {"abstol": 1e-9, "reltol": 1e-9}


def added(integrator):
    return eo.remake(integrator, u=integrator.u + 1.0)


def decay(k, callback, end=40.0, **options):
    prob = eo.ODEProblem(lambda u, k, t: -k * u, jnp.zeros(1), (0.0, end), k, callback=callback)
    return eo.solve(prob, **TIGHT, **options)


def doses(n):
    return eo.PresetTimeCallback(jnp.arange(1.0, n + 1.0), added)


def by_period(n):
    del n
    return eo.PeriodicCallback(added, 1.0, final_affect=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [doses, by_period])
def test_known_times_are_counted_in_a_trace(kind):
    """There is a record of each, with derivatives, and no word about it."""
    n = 40

    def end(k):
        sol = decay(k, kind(n))
        return sol.u[-1, 0], (sol.events, sol.retcode)

    def exact(k):
        return jnp.sum(jnp.exp(-k * jnp.arange(40.0 - n, 40.0)))

    (value, (events, code)), slope = jax.jit(jax.value_and_grad(end, has_aux=True))(0.1)
    np.testing.assert_allclose([value, slope], [exact(0.1), jax.grad(exact)(0.1)], rtol=1e-6)
    assert code == eo.ReturnCode.Success
    np.testing.assert_array_equal(events.t, np.arange(1.0, n + 1.0))
    np.testing.assert_allclose(events.u_after, events.u_before + 1.0, rtol=1e-14)


def clock(rate, most=None, end=10.0):
    """A clock that ticks whenever the first component reaches 1; the second one adds up the
    times."""

    def tick(integrator):
        return eo.remake(integrator, u=jnp.stack([0.0, integrator.u[1] + integrator.t]))

    ticks = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 1.0, tick)
    prob = eo.ODEProblem(
        lambda u, rate, t: jnp.stack([rate, 0.0 * rate]), jnp.zeros(2), (0.0, end), rate,
        callback=ticks,
    )  # fmt: skip
    return eo.solve(prob, max_events=most, **TIGHT)


@pytest.mark.slow
def test_events_beyond_the_record_act(monkeypatch):
    """States and their derivatives are those of all events, whatever the record has, and a warning
    says what it lacks."""
    monkeypatch.setattr(every_event.tuning, "MOST_ROOM_TRACED", 20)
    logs.log_once.cache_clear()
    rate = 4.06
    sol = jax.jit(clock)(rate)
    assert sol.events.t.shape == (20,)
    assert sol.events.count == 40
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.events.t, np.arange(1.0, 21.0) / rate, rtol=1e-9)
    slopes = jax.jit(jax.jacrev(lambda rate: clock(rate).events.t))(rate)
    np.testing.assert_allclose(slopes, -np.arange(1.0, 21.0) / rate**2, rtol=1e-7)
    jitted = jax.jit(jax.value_and_grad(lambda rate: clock(rate).u[-1, 1]))
    value, slope = jitted(rate)
    # Tick number i is at i / rate.
    total = np.arange(1.0, 41.0).sum()
    np.testing.assert_allclose([value, slope], [total / rate, -total / rate**2], rtol=1e-8)


def test_one_warning_for_a_limit(caplog):
    logs.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for end in (1.0, 2.0):
            jax.eval_shape(lambda rate, end=end: clock(rate, end=end).u, 2.0)
    (record,) = caplog.records
    assert "max_events" in record.message
    logs.log_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        jax.eval_shape(lambda rate: clock(rate, most=20).u, 2.0)
        jax.eval_shape(lambda k: decay(k, doses(40)).u, 0.1)
        jax.eval_shape(lambda k: decay(k, lands(0.5)).u, 0.1)
    assert not caplog.records


def test_as_many_as_said():
    """`max_events` still ends a trajectory."""
    sol = jax.jit(lambda rate: clock(rate, most=7))(4.06)
    assert sol.retcode == eo.ReturnCode.MaxEvents
    assert sol.events.t.shape == (7,)


def lands(level):
    return eo.ContinuousCallback(lambda u, t, integrator: u[0] - level, None, eo.terminate)


def falling(speed):
    """It lands, unless it is slow."""
    return eo.ODEProblem(
        lambda u, p, t: jnp.stack([-p, 1.0 + 0.0 * p]), jnp.array([2.0, 0.0]), (0.0, 5.0), speed,
        callback=lands(0.0), **TIGHT,
    )  # fmt: skip


SAVED = {
    "ends": {},
    "end": {"save_start": False},
    "spacing": {"saveat": 0.6},
    "no end": {"saveat": 0.6, "save_end": False},
    "before": {"saveat": jnp.array([0.1, 0.3])},
    "at": {"saveat": jnp.array([0.5, 1.0, 2.0])},
    "steps": {"save_everystep": True, "maxiters": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SAVED)
def test_where_a_solve_stopped_is_its_last_row(how):
    """Alone, in a view, in `output_func`, staged or not, with derivatives."""
    options = SAVED[how]

    def last(speed):
        sol = eo.solve(falling(speed), **options)
        return jnp.stack([sol.t[-1], *sol.u[-1]])

    speeds = jnp.array([2.0, 4.0, 0.1])  # the last one doesn't land

    def ensemble(speeds, output_func=None):
        def prob_func(prob, ctx):
            return eo.remake(prob, p=speeds[ctx.index])

        ens = eo.EnsembleProblem(falling(1.0), prob_func, output_func)
        return eo.solve(ens, trajectories=3, **options)

    def of_output(speeds):
        def output_func(sol, ctx):
            return jnp.stack([sol.t[-1], *sol.u[-1]]), False

        return ensemble(speeds, output_func).u

    def of_end(speeds):
        end = ensemble(speeds).end
        return jnp.concatenate([end.t[:, None], end.u], axis=1)

    at = {"no end": 4.8, "before": 0.3, "at": 2.0}.get(how, 5.0)
    expected = np.array([[1.0, 0.0, 1.0], [0.5, 0.0, 0.5], [at, 2.0 - 0.1 * at, at]])
    close = {"rtol": 1e-7, "atol": 1e-7}
    sim = ensemble(speeds)
    views = np.stack([[x.t[-1], *x.u[-1]] for x in sim])
    for found in (views, of_output(speeds), of_end(speeds)):
        np.testing.assert_allclose(found, expected, **close)
    for view in sim:
        assert len(view.t) == len(view.u)
        assert np.isfinite(view.u).all()
    # The time is 2 / speed where it lands.
    slope = np.array([-0.5, 0.0, -0.5])
    np.testing.assert_allclose(last(2.0), expected[0], **close)
    np.testing.assert_allclose(jax.jit(jax.jacrev(last))(2.0), slope, **close)
    for f in (of_output, of_end):
        np.testing.assert_allclose(jax.jit(jax.jacrev(f))(speeds)[0, :, 0], slope, **close)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"saveat": 0.6}])
def test_second_derivatives_of_ends(options):
    def last(speed):
        sol = eo.solve(falling(speed), **options)
        return jnp.stack([sol.t[-1], *sol.u[-1]])

    found = jax.jit(jax.jacfwd(jax.jacrev(last)))(2.0)
    np.testing.assert_allclose(found, [0.5, 0.0, 0.5], rtol=1e-7, atol=1e-7)


@pytest.mark.slow
def test_a_failure_has_no_end():
    large = eo.ContinuousCallback(lambda u, t, i: u - 50.0, eo.terminate)
    prob = eo.ODEProblem(lambda u, p, t: p * u**2, 1.0, (0.0, 2.0), 0.1, callback=large)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=0.1 + 0.9 * ctx.index))
    sim = eo.solve(ens, trajectories=2, saveat=0.5, maxiters=12, dtmax=0.2)
    assert sim.retcode.tolist() == [eo.ReturnCode.Success, eo.ReturnCode.MaxIters]
    assert sim.end.t[0] == 2.0
    assert np.isnan(sim.end.t[1])
    assert np.isnan(sim.end.u[1])
    last = eo.EnsembleProblem(prob, ens.prob_func, lambda sol, ctx: (sol.u[-1], False))
    assert np.isnan(eo.solve(last, trajectories=2, saveat=0.5, maxiters=12, dtmax=0.2).u[1])


@pytest.mark.slow
def test_the_end_where_the_record_is_too_short(monkeypatch):
    """Neither an event that isn't recorded, nor one of a callback without a record, loses it."""
    monkeypatch.setattr(every_event.tuning, "RECORD_BYTES", 0)
    monkeypatch.setattr(every_event.tuning, "MOST_EVENTS", 3)
    stop = eo.ContinuousCallback(
        lambda u, t, i: t - 7.77, eo.terminate, save_positions=(False, False)
    )

    def solve(k, **options):
        sol = decay(k, eo.CallbackSet(doses(8), stop), **options)
        return jnp.stack([sol.t[-1], sol.u[-1, 0]])

    exact = sum(np.exp(-0.1 * (7.77 - i)) for i in range(1, 8))
    for options in ({}, {"saveat": 3.0}):
        for f in (solve, jax.jit(solve, static_argnames=list(options))):
            np.testing.assert_allclose(f(0.1, **options), [7.77, exact], rtol=1e-7)


@pytest.mark.slow
def test_ends_on_disk(tmp_path):
    prob = eo.ODEProblem(
        lambda u, p, t: {"x": -p["v"], "y": u["x"]}, {"x": 1.0, "y": 0.0}, (0.0, 3.0), {"v": 1.0},
        callback=eo.ContinuousCallback(
            lambda u, t, i: u["x"], lambda i: eo.terminate(eo.remake(i, p={"v": 2 * i.p["v"]}))
        ),
    )  # fmt: skip
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p={"v": 0.2 + ctx.index / 2}))
    options = {"trajectories": 3, "saveat": 0.7, **TIGHT}
    expected = eo.solve(ens, **options)
    eo.solve(ens, **options, store=tmp_path / "a.zarr")
    sim = eo.open_ensemble(tmp_path / "a.zarr")
    for x, y in zip(jax.tree.leaves(sim.end), jax.tree.leaves(expected.end), strict=True):
        np.testing.assert_array_equal(x, y)
    for i in range(3):
        np.testing.assert_array_equal(sim[i].t, expected[i].t)
        np.testing.assert_array_equal(sim[i].p_at["v"], expected[i].p_at["v"])
    np.testing.assert_allclose(sim[2].p_at["v"], [1.2, 1.2, 2.4], rtol=1e-6)
    data, again = (x.to_xarray().drop_attrs() for x in (expected, sim))
    assert data.identical(again)
    np.testing.assert_array_equal(data["end.t"], expected.end.t)
    assert data["p_at.v"].dims == ("trajectory", "time")


def dosed(k, times, saved, after):
    """The states and doses at saved times. Each dose is half of the one before."""

    def dose(i):
        return eo.remake(i, u=i.u + i.p["dose"], p={**i.p, "dose": i.p["dose"] / 2})

    prob = eo.ODEProblem(
        lambda u, p, t: -p["k"] * u, jnp.ones(1), (0.0, 3.5), {"k": k, "dose": jnp.ones(())},
        callback=eo.PresetTimeCallback(times, dose),
    )  # fmt: skip
    sol = eo.solve(prob, saveat=saved, save_after_events=after, **TIGHT)
    return sol.u[:, 0], sol.p_at["dose"]


DOSED = [jax.jit(f, static_argnums=3) for f in (dosed, jax.jacrev(dosed), jax.jacfwd(dosed))]


@settings(max_examples=30, deadline=None)
@given(
    times=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=6),
    saved=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 2.0, 2.0, 3.0]), min_size=4, max_size=4),
    after=st.booleans(),
)
def test_rows_at_the_time_of_events(times, saved, after):
    """With derivatives of both modes; a dose at the start is part of the start."""
    times, saved = np.unique(times), np.sort(saved)
    padded = np.concatenate([times, np.full(6 - len(times), np.inf)])
    (u, dose), *slopes = (f(0.3, padded, saved, after) for f in DOSED)
    past = (times < saved[:, None]) | ((times == saved[:, None]) & (after | (times == 0.0)))
    sizes = 0.5 ** np.arange(len(times))
    left = np.where(past, sizes * np.exp(-0.3 * (saved[:, None] - times)), 0.0)
    np.testing.assert_allclose(u, np.exp(-0.3 * saved) + left.sum(1), rtol=1e-7)
    np.testing.assert_array_equal(dose, 0.5 ** past.sum(1))
    slope = -saved * np.exp(-0.3 * saved) - (left * (saved[:, None] - times)).sum(1)
    for found, of_dose in slopes:
        np.testing.assert_allclose(found, slope, atol=1e-7)
        np.testing.assert_array_equal(of_dose, 0.0)


@pytest.mark.slow
def test_rows_after_events_that_are_searched():
    """A state saved at an event that ends the trajectory is the one after it."""
    halves = eo.ContinuousCallback(
        lambda u, t, i: t - 1.0, lambda i: eo.remake(i, u=i.u / 2, p=2 * i.p)
    )
    prob = eo.ODEProblem(lambda u, p, t: 0.0 * u, jnp.ones(1), (0.0, 2.0), 1.0, callback=halves)
    time = float(eo.solve(prob).events.t[0])
    for after, expected in ((False, [1.0, 1.0, 0.5]), (True, [1.0, 0.5, 0.5])):
        sol = eo.solve(prob, saveat=jnp.array([0.5, time, 1.5]), save_after_events=after)
        np.testing.assert_array_equal(sol.u[:, 0], expected)
        np.testing.assert_array_equal(sol.p_at, [1.0, 2.0 if after else 1.0, 2.0])


@pytest.mark.slow
def test_parameters_without_changes():
    assert decay(0.1, doses(3)).p_at is None
    p = (1.0, {"k": 0.5})
    changes = eo.PresetTimeCallback([1.0], lambda i: eo.remake(i, p=(i.p[0], {"k": 0.0})))
    prob = eo.ODEProblem(lambda u, p, t: p[1]["k"] * u, 1.0, (0.0, 2.0), p, callback=changes)
    sim = eo.solve(eo.EnsembleProblem(prob), trajectories=2, saveat=0.8)
    assert sim.p_at[0] is None
    np.testing.assert_array_equal(sim.p_at[1]["k"], [[0.5, 0.5, 0.0, 0.0]] * 2)
    np.testing.assert_array_equal(sim[1].p_at[1]["k"], [0.5, 0.5, 0.0, 0.0])
    np.testing.assert_array_equal(sim.end.p_at[1]["k"], [0.0, 0.0])


def test_julia_says_what_it_saves():
    with pytest.raises(ValueError, match="save_after_events"):
        decay(0.1, doses(3), saveat=1.0, save_after_events=True, engine="julia")
