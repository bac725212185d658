"""Edge cases that are the same on every engine: spans of no length, steps against the direction of
time, ends that are not saved, rows of times that end early, and no jit."""

import hypothesis as hp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .marks import slow_unless
from .problems import linear


ALGS = {
    "compiled": eo.Tsit5(),
    "diffrax": eo.Tsit5(),
    "implicit": eo.Kvaerno3(),
}
TIGHT = {"abstol": 1e-9, "reltol": 1e-9}


@pytest.fixture(params=[slow_unless(x == "compiled", x) for x in ALGS])
def solve(request):
    """`solve` on one engine."""
    engine = "diffrax" if request.param == "implicit" else request.param

    def solve(prob, **options):
        return eo.solve(prob, ALGS[request.param], engine=engine, **options)

    return solve


def spans(t0s, t1s, **options):
    """Each trajectory with its own span."""
    t0s, t1s = jnp.asarray(t0s), jnp.asarray(t1s)
    prob = eo.ODEProblem(linear, jnp.array([2.0]), (0.0, 1.0), 0.5, **options)
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, tspan=(t0s[ctx.index], t1s[ctx.index]))
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 2),
        slow_unless(False, {"save_start": False}, 1),
        slow_unless(False, {"save_end": False}, 1),
        slow_unless(False, {"saveat": 0.1}, 1),
        slow_unless(False, {"saveat": 0.1, "save_start": False}, 1),
        slow_unless(False, {"saveat": [1.0, 1.0]}, 2),
        ({"save_everystep": True, "maxiters": 16}, 1),
        ({"dt": 0.1, "adaptive": False}, 2),
    ],
    ids=str,
)
def test_a_span_of_no_length_is_its_start(solve, options, rows):
    def of(u0, p, t):
        return solve(eo.ODEProblem(linear, u0, (t, t), p), **options)

    u0 = jnp.array([2.0])
    sol = of(u0, 0.5, 1.0)
    assert sol.retcode == eo.ReturnCode.Success
    assert sol.u.tolist() == [[2.0]] * rows
    assert sol.t.tolist() == [1.0] * rows
    sim = solve(spans([1.0, 1.0], [1.0, 1.2]), trajectories=2, **options)
    assert sim.retcode.tolist() == [eo.ReturnCode.Success.value] * 2
    assert sim.lengths[0] == rows
    assert sim.u[0, :rows].tolist() == [[2.0]] * rows
    assert np.isnan(sim.u[0, rows:]).all()
    np.testing.assert_allclose(sim.u[1, sim.lengths[1] - 1], 2 * np.exp(0.1), atol=1)


@pytest.mark.slow
def test_gradients_of_a_span_of_no_length(solve):
    for options in ({}, {"saveat": jnp.array([1.0])}, {"save_everystep": True, "maxiters": 16}):

        def end(u0, p, t1, options=options):
            return solve(eo.ODEProblem(linear, u0, (1.0, t1), p), **options).u[0, 0]

        got = jax.grad(end, argnums=(0, 1, 2))(jnp.array([2.0]), 0.5, 1.0)
        assert [x.squeeze().tolist() for x in got] == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_the_end_is_not_saved(solve):
    ens = spans([0.0, 1.0], [1.0, 0.25])
    every = solve(ens, trajectories=2, saveat=0.25, **TIGHT)
    for options, first, last in (
        ({"save_end": False}, 0, -1),
        ({"save_end": False, "save_start": False}, 1, -1),
    ):
        sim = solve(ens, trajectories=2, saveat=0.25, **options, **TIGHT)
        for got, want in zip(sim, every, strict=True):
            np.testing.assert_array_equal(got.t, want.t[first:last])
            np.testing.assert_array_equal(got.u, want.u[first:last])
    sim = solve(ens, trajectories=2, save_end=False)
    assert sim.u.tolist() == [[[2.0]]] * 2
    assert sim.t.tolist() == [[0.0], [1.0]]


def test_the_end_is_not_saved_under_jit(solve):
    prob = eo.ODEProblem(linear, jnp.array([2.0]), (0.0, 1.0), 0.5)

    @jax.jit
    @jax.value_and_grad
    def last(p):
        return solve(eo.remake(prob, p=p), saveat=0.25, save_end=False, **TIGHT).u[-1, 0]

    np.testing.assert_allclose(last(0.5), [2 * np.exp(0.375), 1.5 * np.exp(0.375)], rtol=1e-6)


def test_a_step_against_time_is_refused(solve):
    prob = eo.ODEProblem(linear, jnp.array([2.0]), (0.0, 1.0), 0.5)
    backwards = eo.remake(prob, tspan=(1.0, 0.0))
    for options in ({}, {"adaptive": False}):
        with pytest.raises(
            ValueError, match=r"dt=-0\.1 is negative, and tspan runs forwards; give"
        ):
            solve(prob, dt=-0.1, **options)
        with pytest.raises(ValueError, match=r"dt=-0\.1 .*\(first of trajectory 1\)"):
            solve(spans([1.0, 0.0], [0.0, 1.0]), dt=-0.1, trajectories=2, **options)
        np.testing.assert_array_equal(
            solve(backwards, dt=-0.1, **options).u, solve(backwards, dt=0.1, **options).u
        )
        size = jax.jit(lambda dt, options=options: solve(prob, dt=dt, **options).u)
        np.testing.assert_array_equal(size(-0.1), size(0.1))


def test_a_step_of_a_trajectory_against_time_is_refused(solve):
    dts = jnp.array([0.1, 0.2, -0.1])
    prob = eo.ODEProblem(linear, jnp.array([2.0]), (0.0, 1.0), 0.5)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, dt=dts[ctx.index]))
    with pytest.raises(ValueError, match=r"dt=-0\.1 .*\(first of trajectory 2\)"):
        solve(ens, trajectories=3)
    assert solve(ens, trajectories=2).successful.all()


@pytest.mark.parametrize(
    "options", [{}, slow_unless(False, {"saveat": np.array([0.5, 1.0])})], ids=str
)
def test_without_jit(solve, options):
    prob = eo.ODEProblem(linear, jnp.array([2.0]), (0.0, 1.0), 0.5)

    def end(p):
        sim = solve(spans([0.0, 0.0], [1.0, 2.0], **options), trajectories=2)
        return solve(eo.remake(prob, p=p), **options).u[-1, 0] + sim.u[1, -1, 0]

    with jax.disable_jit():
        found = jax.value_and_grad(end)(0.5)
    np.testing.assert_allclose(found, jax.value_and_grad(end)(0.5), rtol=1e-13)


ROWS = {
    1: [[0.25, 0.5, 1.0], [0.0, 0.75, np.inf], [np.inf] * 3, [0.5, np.nan, np.nan]],
    -1: [[0.75, 0.5, 0.0], [1.0, 0.25, np.inf], [-np.inf] * 3, [0.5, np.nan, np.nan]],
}
LENGTHS = [3, 2, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ROWS)
@pytest.mark.parametrize("way", ["array", "prob_func", "called"])
def test_rows_that_end_early(solve, direction, way):
    rows = np.array(ROWS[direction])
    u0s, p = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array(0.5)

    def saved(p, u0s, fixed, rows=rows):
        prob = eo.ODEProblem(
            linear, jnp.array([1.0]), (0.0, 1.0) if direction > 0 else (1.0, 0.0), p
        )

        def prob_func(prob, ctx):
            i = int(ctx.index) if way == "called" else ctx.index
            prob = eo.remake(prob, u0=u0s[i][None])
            if way == "array":
                return prob
            return eo.remake(prob, saveat=(rows if way == "called" else jnp.asarray(rows))[i])

        ens = eo.EnsembleProblem(prob, prob_func)
        how = {"dt": 0.01, "adaptive": False} if fixed else TIGHT
        return solve(ens, trajectories=4, **how, **({"saveat": rows} if way == "array" else {}))

    t = np.where(np.isfinite(rows), rows, 0)
    exact = u0s[:, None] * np.exp(0.5 * (t - (direction < 0)))
    meant = np.isfinite(rows)
    for fixed in (False, True):
        sim = saved(p, u0s, fixed)
        assert sim.lengths.tolist() == LENGTHS
        assert sim.retcode.tolist() == [eo.ReturnCode.Success.value] * 4
        assert (np.isfinite(sim.t) == meant).all()
        assert (np.isfinite(sim.u[..., 0]) == meant).all()
        np.testing.assert_allclose(
            np.where(meant, sim.u[..., 0], 0), np.where(meant, exact, 0), rtol=1e-6
        )

    def loss(p, u0s, filled):
        # Whatever stands in the rows that are none, it is not pulled back.
        return jnp.sum(jnp.where(meant | filled, saved(p, u0s, False).u[..., 0], 0.0))

    if way != "array":
        return
    for filled in (False, True):
        to_p, to_u0s = jax.grad(loss, argnums=(0, 1))(p, u0s, filled)
        since = t - (direction < 0)
        np.testing.assert_allclose(to_p, np.sum(np.where(meant, since * exact, 0)), rtol=1e-5)
        np.testing.assert_allclose(
            to_u0s, np.sum(np.where(meant, exact / u0s[:, None], 0), axis=1), rtol=1e-6
        )


def test_statistics_are_over_the_rows_that_are_there(solve):
    rows = np.array([[0.0, 0.5, 1.0], [0.0, 0.5, np.inf]])
    ens = eo.EnsembleProblem(
        eo.ODEProblem(lambda u, p, t: jnp.ones_like(u), jnp.array([0.0]), (0.0, 1.0)),
        lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index),
    )
    sim = solve(ens, trajectories=2, saveat=rows)
    mean = eo.analysis.timeseries_steps_mean(sim)
    np.testing.assert_allclose(np.ravel(getattr(mean, "u", mean)), [0.5, 1.0, 1.0], rtol=1e-6)


@pytest.mark.slow
@hp.given(
    st.integers(0, 5),
    st.integers(1, 5),
    st.sampled_from([1, -1]),
    st.sampled_from([np.inf, np.nan]),
)
@hp.settings(deadline=None, max_examples=30)
def test_what_is_not_meant_ends_a_row(meant, more, direction, nothing):
    from ensembleode.plan.saving import resolve_saving

    options = {"save_start": None, "save_end": None, "save_everystep": False}
    times = np.linspace(0.1, 0.9, 5)[::direction][:meant]
    row = np.concatenate([times, np.full(more, nothing)])
    t0, t1 = (0.0, 1.0) if direction > 0 else (1.0, 0.0)
    dtype = np.dtype(np.float64)

    def of(saveat, t0=t0):
        return resolve_saving({**options, "saveat": saveat}, t0, t1, dtype, 0)[1]

    expected = np.concatenate([times, np.full(more, direction * np.inf)])
    np.testing.assert_array_equal(of(row[None]), expected)
    np.testing.assert_array_equal(jax.jit(of)(row, t0), expected)
    if meant:
        with pytest.raises(ValueError, match="not sorted"):
            of(np.roll(row, 1)[None])
    with pytest.raises(ValueError, match="saveat has the time"):
        of(row)


@pytest.mark.slow
@pytest.mark.parametrize("debug", [jax.debug_nans, jax.debug_infs], ids=["nans", "infs"])
@pytest.mark.parametrize("way", ["every step", "an event", "a failure"])
def test_padding_is_no_error(way, debug):
    """Where JAX looks for numbers that aren't finite: rows that aren't reached hold such."""
    prob = eo.ODEProblem(linear, jnp.ones(2), (0.0, 1.0), -1.0)
    event = eo.ContinuousCallback(
        lambda u, t, integrator: u[0] - 0.5, lambda integrator: integrator
    )
    options = {
        "every step": {"save_everystep": True, "maxiters": 50},
        "an event": {"callback": event},
        "a failure": {"maxiters": 1, "dt": 0.1},
    }[way]

    def first(p):
        return eo.solve(eo.remake(prob, p=p), **options).u[0].sum()

    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=prob.p * ctx.sim_id))
    with debug(True):
        sol = eo.solve(prob, **options)
        assert (sol.retcode == eo.ReturnCode.Success) == (way != "a failure")
        if way != "every step":
            assert len(eo.solve(ens, trajectories=2, **options)) == 2
        assert jnp.isfinite(jax.grad(first)(-1.0))
        assert jax.config.jax_debug_nans == (debug is jax.debug_nans)
