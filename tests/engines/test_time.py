"""The arithmetic of time, in both precisions and far from zero: there are as many steps as in the
same problem at zero, and they are as long, up to the resolution of time."""

import itertools

import hypothesis as hp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.solvers import time
from ensembleode.solvers.arithmetic import JaxArithmetic

from ..marks import slow_unless


JAX = JaxArithmetic()
DTYPES = [np.float32, np.float64]
# How far from zero times are.
FAR = {np.float32: 1e5, np.float64: 2e9}
MOST = 64


@jax.jit
def laid_out(t0, t1, dt):
    """The times after each of so many fixed steps, and whether time could not resolve the step."""

    def one(t, number):
        t2, unresolved = time.fixed_step(JAX, t0, t1, t, dt, number)
        return t2, (t2, unresolved)

    return jax.lax.scan(one, t0, jnp.arange(MOST, dtype=jnp.int32))[1]


@st.composite
def spans(draw, most_spacings=1e7):
    """A dtype; `t0`, `t1`; the size of a step, from a fraction of the spacing of numbers at `t0` to
    many; how many steps; and the spacing at the larger end."""
    dtype = draw(st.sampled_from(DTYPES))
    t0 = draw(st.floats(-FAR[dtype], FAR[dtype], width=32))
    count = draw(st.integers(1, MOST - 2))
    spacings = 10 ** draw(st.floats(-2, np.log10(most_spacings)))
    direction = draw(st.sampled_from([-1, 1]))
    dt = dtype(spacings * float(np.spacing(dtype(abs(t0) + 1e-3))))
    t0 = dtype(t0)
    # As users have it: computed in double precision, and rounded.
    t1 = dtype(float(t0) + direction * count * float(dt))
    return dtype, t0, t1, dt, count, float(np.spacing(max(abs(t0), abs(t1))))


@pytest.mark.slow
@hp.given(spans())
@hp.settings(max_examples=200, deadline=None)
def test_fixed_steps_are_never_stretched(span):
    _, t0, t1, dt, count, spacing = span
    hp.assume(t0 != t1)
    times, unresolved = map(np.asarray, laid_out(t0, t1, dt))
    lost = np.flatnonzero(unresolved)
    taken = len(times) if not lost.size else lost[0]
    arrived = np.flatnonzero(times == t1)
    if arrived.size and arrived[0] < taken:
        taken = arrived[0] + 1
    sizes = np.abs(np.diff(np.concatenate([[t0], times[:taken]]).astype(np.float64)))
    assert (sizes <= float(dt) + min(8 * spacing, float(dt) / 2) * (1 + 1e-6)).all()
    assert (sizes > 0).all()
    if dt >= 2.01 * spacing:
        assert taken == count
        assert times[taken - 1] == t1
        # All but the last are as long as asked for, to rounding: that of the time since `t0`, which
        # may be twice as far as either, and that of the sum, at both ends of a step.
        rounding = spacing + float(np.spacing(np.abs(t1 - t0)))
        assert (np.abs(sizes[:-1] - float(dt)) <= 1.01 * rounding).all()
    elif dt < 0.49 * spacing and abs(t0) > 0.1:  # near zero there are more numbers
        assert lost.size
        assert taken <= 1


@st.composite
def adaptive(draw):
    dtype = draw(st.sampled_from(DTYPES))
    t = dtype(draw(st.sampled_from([-1, 1])) * draw(st.floats(1e-3, FAR[dtype])))
    left = draw(st.floats(1, 1e7)) * float(np.spacing(np.abs(t)))
    t1 = dtype(float(t) + draw(st.sampled_from([-1, 1])) * left)
    return dtype, t, t1, dtype(10 ** draw(st.floats(-8, 4)) * left)


@pytest.mark.slow
@hp.given(adaptive())
@hp.settings(max_examples=300, deadline=None)
def test_adaptive_steps_are_stretched_by_a_hundredth_at_most(step):
    dtype, t, t1, h = step
    hp.assume(t1 != t)
    spacing = max(float(np.spacing(np.abs(t))), float(np.spacing(np.abs(t1))))
    direction = np.sign(t1 - t)
    t2 = np.asarray(time.adaptive_step(JAX, *map(jnp.asarray, (t, t1, direction, h))))
    assert t2.dtype == dtype
    size = abs(float(t2) - float(t))
    assert size <= 1.01 * float(h) + spacing / 2
    assert size >= min(float(h), abs(float(t1) - float(t))) - spacing
    assert direction * (t1 - t2) >= 0
    if h >= abs(t1 - t):
        assert t2 == t1


def far_away(dtype):
    near = np.array([0.0, 1.0, -3.0, 1e2, -1e3, 1e4, 2e4])
    return near if dtype == np.float32 else np.concatenate([near, [1e7, 1.7e9, -2e9]])


def shifted(f, u0, starts, span, dtype):
    """An ensemble of the same problem, starting at these times."""
    starts = jnp.asarray(starts, dtype)
    prob = eo.ODEProblem(f, np.asarray(u0, dtype), (dtype(0), dtype(span)))

    def prob_func(prob, ctx):
        t0 = starts[ctx.index]
        return eo.remake(prob, tspan=(t0, t0 + dtype(span)))

    return eo.EnsembleProblem(prob, prob_func), np.asarray(starts), np.asarray(starts + dtype(span))


def decay(rate):
    return lambda u, p, t: -rate * u


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("span", [0.5, -0.5])
def test_fixed_solves_far_from_zero(dtype, span):
    """As many steps as at zero, each of which is stable and as accurate."""
    rate = np.sign(span) * 20
    f = decay(dtype(rate))
    for dt in (0.05, 0.0125):
        ens, t0, t1 = shifted(f, [1.0], far_away(dtype), span, dtype)
        sim = eo.solve(
            ens,
            eo.RK4(),
            eo.EnsembleSerial(),
            trajectories=len(t0),
            dt=dtype(dt),
            adaptive=False,
            batch_size=16,
        )
        spacing = np.spacing(np.maximum(np.abs(t0), np.abs(t1))).astype(float)
        resolved = dt > 2 * spacing
        assert resolved.sum() >= len(t0) - 1
        np.testing.assert_array_equal(sim.retcode[resolved], eo.ReturnCode.Success)
        np.testing.assert_array_equal(sim.retcode[dt < spacing / 2], eo.ReturnCode.DtLessThanMin)
        expected = np.exp(-rate * (t1.astype(float) - t0.astype(float)))
        np.testing.assert_array_equal(sim.stats.naccept[resolved], round(abs(span) / dt))
        error = np.abs(np.asarray(sim.u)[:, -1, 0] / expected - 1)[resolved]
        rounding = (spacing / dt)[resolved]
        # At zero, and what steps of different lengths add.
        assert (error <= error[0] * (1 + 10 * rounding) + 1e-5).all(), error


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adaptive_solves_far_from_zero(dtype):
    """Steps are limited by stability (to 3.3e-3): where time resolves that, it is solved as at
    zero; where not, it says so."""
    f = decay(dtype(1000))
    starts = np.append(far_away(dtype), 1e5 if dtype == np.float32 else 1e14)
    ens, t0, t1 = shifted(lambda u, p, t: f(u - 1, p, t), [2.0], starts, 0.25, dtype)
    sim = eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), trajectories=len(t0), batch_size=16)
    spacing = np.spacing(np.maximum(np.abs(t0), np.abs(t1))).astype(float)
    resolved = spacing < 5e-4
    assert not resolved[-1]
    np.testing.assert_array_equal(sim.retcode[resolved], eo.ReturnCode.Success)
    assert not sim.successful[-1]
    np.testing.assert_allclose(sim.u[resolved, -1, 0], 1.0, atol=5e-3)
    steps = (sim.stats.naccept + sim.stats.nreject)[resolved]
    few = spacing[resolved] < 1e-4
    assert (steps <= np.where(few, 1.1, 2) * steps[0] + 5).all(), steps
    assert (steps >= 0.9 * steps[0]).all(), steps


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_fifteen_decades_in_single_precision(engine):
    """`u = sqrt(p / (t + p))` falls within times of `p = 1e-4`, and is followed until 1e11."""
    p, t1 = jnp.float32(1e-4), 1e11
    prob = eo.ODEProblem(lambda u, p, t: -u / (2 * (t + p)), jnp.ones(1, jnp.float32), (0.0, t1), p)
    sol = eo.solve(prob, eo.Tsit5(), abstol=1e-12, reltol=1e-4, engine=engine)
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.u[-1], np.sqrt(1e-4 / t1), rtol=1e-3)


@pytest.mark.slow
def test_diffrax_stretches_no_fixed_step():
    """It goes to the end from a hundred roundings away, so it can do less far from zero; then it
    says so."""
    dtype = np.float32
    ens, t0, t1 = shifted(decay(dtype(30)), [1.0], far_away(dtype), 0.5, dtype)
    how = {"dt": dtype(0.05), "adaptive": False, "engine": "diffrax"}
    sim = eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), trajectories=len(t0), **how)
    expected = np.exp(-30 * (t1.astype(float) - t0.astype(float)))
    ok = np.asarray(sim.successful)
    assert ok[np.abs(t0) <= 1000].all()
    np.testing.assert_array_equal(sim.retcode[~ok], eo.ReturnCode.DtLessThanMin)
    assert (np.abs(sim.stats.naccept[ok] - 10) <= 1).all()
    np.testing.assert_allclose(sim.u[ok, -1, 0], expected[ok], rtol=0.2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_time_is_shared_and_the_same(dtype):
    """A single problem, whose lanes share the time: the steps of each trajectory of an ensemble."""
    starts = far_away(dtype)
    ens, t0, t1 = shifted(decay(dtype(20)), [1.0], starts, 0.5, dtype)
    how = {"dt": dtype(0.0125), "adaptive": False}
    sim = eo.solve(ens, eo.RK4(), eo.EnsembleSerial(), trajectories=len(t0), **how)
    for i, ends in enumerate(zip(t0, t1, strict=True)):
        sol = eo.solve(eo.remake(ens.prob, tspan=ends), eo.RK4(), **how)
        assert sol.retcode == sim.retcode[i]
        if sol.retcode == eo.ReturnCode.Success:
            np.testing.assert_array_equal(sol.stats.naccept, sim.stats.naccept[i])
            np.testing.assert_allclose(sol.u[-1], sim.u[i, -1], rtol=1e-6)
        else:
            assert np.isnan(sol.u[-1]).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_times_far_from_zero(dtype):
    """Saved states belong to the times they are said to be at, in grids and in arrays."""
    start = dtype(FAR[dtype] / 50)
    prob = eo.ODEProblem(decay(dtype(1)), np.ones(1, dtype), (start, start + dtype(1)))
    grid = eo.solve(prob, saveat=0.1)
    np.testing.assert_allclose(grid.t - start, np.arange(11) / 10, atol=2 * np.spacing(start))
    near = start + np.arange(6) * np.spacing(start)  # not the start itself, but the first
    for sol in (grid, eo.solve(prob, saveat=near)):
        since = np.asarray(sol.t, float) - float(start)
        np.testing.assert_allclose(sol.u[:, 0], np.exp(-since), rtol=3e-4, atol=0)
    np.testing.assert_array_equal(sol.t, near)
    tight = eo.solve(prob, saveat=near, abstol=dtype(1e-7), reltol=dtype(1e-6))
    np.testing.assert_allclose(np.diff(tight.u[:, 0]) / np.diff(near), -1, rtol=0.2)


def in_units(unit, dtype, *, mass=False, alg, engine="auto", **options):
    """An oscillation and what relaxes to it, over three units of time: everything that is found, in
    that unit."""
    # (With df/dt, which methods for stiff problems take, rates have squares.)
    driven = dtype == np.float64
    unit = jnp.asarray(unit, dtype)

    def f(u, k, t):
        drive = jnp.cos(3 * t / unit) if driven else jnp.cos(3 * u[2])
        return k / unit * jnp.stack([u[1], -u[0] + drive, 20 * (u[0] - u[2]) * (1 + mass)])

    if mass:
        f = eo.ODEFunction(f, mass_matrix=np.diag([1.0, 1.0, 2.0]).astype(dtype))
    options = {name: make(unit) for name, make in options.items()}

    def solved(k):
        start = jnp.array([1.0, 0.2, 0.0], dtype)
        prob = eo.ODEProblem(f, start, (0 * unit, 3 * unit), k)
        return eo.solve(prob, alg, engine=engine, **options)

    def last(k):
        return jnp.sum(solved(k).u[-1] ** 2)

    k = jnp.asarray(1.0, dtype)
    sol = solved(k)
    assert sol.retcode == eo.ReturnCode.Success
    found = [sol.t / unit, sol.u, sol.stats.naccept, sol.stats.nreject, jax.grad(last)(k)]
    if sol.events is not None:
        found += [sol.events.t / unit]
    if "save_everystep" in options:
        found.append(jax.vmap(sol)(jnp.linspace(0.1, 0.9, 9, dtype=dtype) * 3 * unit))
    return [np.asarray(x) for x in found]


def bounces(unit):
    def turn(integrator):
        return eo.remake(integrator, u=integrator.u.at[1].multiply(-0.5))

    crossing = eo.ContinuousCallback(lambda u, t, _: u[0], turn)
    doses = eo.PresetTimeCallback(
        unit * np.array([1.0, 2.25], unit.dtype), lambda i: eo.remake(i, u=i.u + 1)
    )
    return eo.CallbackSet(crossing, doses)


def every(x):
    return lambda unit: x


def times(unit):
    return unit * jnp.linspace(0, 3, 13, dtype=unit.dtype)


WAYS = {
    "Tsit5": {"alg": eo.Tsit5(), "save_everystep": every(True), "maxiters": every(256)},
    "events": {"alg": eo.Tsit5(), "saveat": times, "callback": bounces, "max_events": every(8)},
    "fixed": {"alg": eo.RK4(), "dt": lambda unit: 0.0625 * unit, "adaptive": every(False)},
    "Rodas5P": {"alg": eo.Rodas5P(), "saveat": times},
    "Rodas5P, events": {
        "alg": eo.Rodas5P(),
        "saveat": times,
        "callback": bounces,
        "max_events": every(8),
    },
    "mass": {
        "alg": eo.Rodas5P(),
        "mass": True,
        "save_everystep": every(True),
        "maxiters": every(256),
    },
    "AutoTsit5": {
        "alg": eo.AutoTsit5(eo.Rosenbrock23()),
        "save_everystep": every(True),
        "maxiters": every(256),
    },
    "diffrax": {"alg": eo.Tsit5(), "engine": "diffrax", "saveat": times},
    "Kvaerno5": {"alg": eo.Kvaerno5(), "saveat": times},
}
QUICK = {(np.float32, "events"), (np.float32, "Rodas5P"), (np.float64, "fixed")}
CASES = [slow_unless(x in QUICK, *x) for x in itertools.product(DTYPES, WAYS)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "way"), CASES)
def test_no_unit_of_time_is_too_short(way, dtype):
    """Of a scaled problem, the solution is the scaled one, by as many steps. (The units are powers
    of two near those of ten, which would be rounded.)"""
    one = in_units(2.0**-33, dtype, **WAYS[way])
    for exponent in (-16, -25) if dtype == np.float32 else (-40, -140):
        other = in_units(2.0 ** round(exponent / np.log10(2)), dtype, **WAYS[way])
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"1e{exponent}")
    if dtype == np.float32 and WAYS[way].get("engine") != "diffrax":
        # There, the first step is as long as the smallest number.
        _, u, *_ = in_units(2.0**-100, dtype, **WAYS[way])
        np.testing.assert_allclose(u[-1], one[1][-1], rtol=2e-3)
