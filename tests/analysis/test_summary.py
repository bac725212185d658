"""EnsembleSummary, and the same statistics computed in one pass over batches."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo
from ensembleode.analysis import summarize
from ensembleode.analysis.digest import Digest

from .test_statistics import blowup, growth, ragged as ragged, RATES


FIELDS = ("t", "u", "v", "med", "qlow", "qhigh", "num_monte")


def random_growth(n_components=2):
    """Random rates: the state at t is lognormal."""
    prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.ones(n_components), (0.0, 1.0), 0.0)

    def prob_func(prob, ctx):
        return eo.remake(prob, p=jax.random.normal(ctx.key, (), float))

    return eo.EnsembleProblem(prob, prob_func)


def assert_same(a, b, rtol=1e-12):
    for name in FIELDS:
        np.testing.assert_allclose(
            getattr(a, name), getattr(b, name), rtol=rtol, atol=1e-13, err_msg=name
        )


def test_failed_trajectories(ragged):
    summary = eo.EnsembleSummary(ragged)
    np.testing.assert_array_equal(summary.num_monte, [5, 5, 4, 3, 3, 3])
    u = np.asarray(ragged.u)
    np.testing.assert_allclose(summary.u, np.nanmean(u, axis=0))
    np.testing.assert_allclose(summary.v, np.nanvar(u, axis=0, ddof=1))
    np.testing.assert_allclose(summary.med, np.nanmedian(u, axis=0))
    np.testing.assert_allclose(summary.qlow, np.nanquantile(u, 0.05, axis=0))
    assert "3 to 5 trajectories, 6 times, state (1,)" in repr(summary)


@pytest.mark.slow
def test_times_and_quantiles_of_ones_own():
    sim = eo.solve(growth(RATES), trajectories=5, save_everystep=True, abstol=1e-9, reltol=1e-9)
    ts = np.array([0.1, 0.6])
    summary = eo.EnsembleSummary(sim, ts, quantiles=(0.25, 0.75))
    exact = np.exp(RATES[:, None] * ts)[..., None] * [1.0, 2.0]
    np.testing.assert_allclose(summary.u, exact.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(summary.qlow, np.quantile(exact, 0.25, axis=0), rtol=1e-5)
    np.testing.assert_allclose(summary.qhigh, np.quantile(exact, 0.75, axis=0), rtol=1e-5)
    assert summary.quantiles == (0.25, 0.75)
    # By default the times of the trajectory with most steps.
    most = sim[int(np.argmax(sim.lengths))]
    np.testing.assert_array_equal(eo.EnsembleSummary(sim).t, most.t)


def test_times_of_the_trajectory_that_came_furthest():
    """Before it blew up, another took many more steps."""
    ens = blowup(jnp.array([0.25, 2.0, -1.0]))
    sim = eo.solve(ens, trajectories=3, save_everystep=True)
    assert np.argmax(sim.lengths) == 1
    summary = eo.EnsembleSummary(sim)
    assert summary.t[-1] == 1
    assert summary.num_monte[-1] == 2
    assert "2 to 3 trajectories" in repr(summary)


@pytest.mark.slow
def test_spans_of_their_own():
    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1), (0.0, 1.0))
    ens = eo.EnsembleProblem(
        prob,
        lambda prob, ctx: eo.remake(prob, tspan=(0.0, 1.0 + ctx.index), u0=prob.u0 + ctx.index),
    )
    options = {"saveat": [0.0, 0.5, 1.0, 1.5, 2.0], "abstol": 1e-9, "reltol": 1e-9}
    grid = jnp.array(options.pop("saveat"))
    sim = eo.solve(ens, trajectories=2, save_everystep=True, **options)
    summary = eo.EnsembleSummary(sim, grid)
    np.testing.assert_array_equal(summary.num_monte, [2, 2, 2, 1, 1])
    np.testing.assert_allclose(summary.u[:3, 0], 1.5 * np.exp(-grid[:3]), rtol=1e-6)
    np.testing.assert_allclose(summary.u[3:, 0], 2 * np.exp(-grid[3:]), rtol=1e-6)
    streamed = summarize(ens, trajectories=2, saveat=0.5, **options)
    np.testing.assert_array_equal(streamed.num_monte, [2, 2, 2, 1, 1])
    np.testing.assert_allclose(streamed.u, summary.u, rtol=1e-5)
    np.testing.assert_array_equal(eo.EnsembleSummary(sim).t, sim[1].t)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("quantiles", [(0.05, 0.95), (0.0, 1.0), (0.5, 0.5)])
def test_under_jit(ragged, quantiles):
    """NumPy computes what is on the host, and JAX elsewhere."""
    here = eo.EnsembleSummary(ragged, quantiles=quantiles)
    there = jax.jit(lambda sim: eo.EnsembleSummary(sim, quantiles=quantiles))(ragged)
    assert_same(there, here)
    assert all(getattr(there, name).dtype == getattr(here, name).dtype for name in FIELDS)


def test_several_bands():
    """Of a solution and of a stream: each is what it is alone."""
    pairs = [(0.05, 0.95), (0.25, 0.75)]
    ens, options = growth(RATES), {"trajectories": 5, "saveat": 0.25}
    sim = eo.solve(ens, **options)
    for make in (
        lambda q: eo.EnsembleSummary(sim, quantiles=q),
        lambda q: summarize(ens, **options, quantiles=q),
    ):
        both = make(pairs)
        assert both.quantiles == tuple(pairs)
        assert "5% to 95%" not in repr(both)
        for i, pair in enumerate(pairs):
            one = make(pair)
            np.testing.assert_array_equal(both.qlow[i], one.qlow)
            np.testing.assert_array_equal(both.qhigh[i], one.qhigh)
            np.testing.assert_array_equal(both.med, one.med)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_shapes_of_the_state(shape):
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.ones(shape), (0.0, 1.0), 1.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=1.0 + ctx.index))
    summary = eo.EnsembleSummary(eo.solve(ens, trajectories=4, saveat=0.5))
    assert summary.u.shape == summary.qhigh.shape == (3, *shape)
    assert_same(summary, summarize(ens, trajectories=4, saveat=0.5, batch_size=3))


def test_in_one_pass(ragged):
    options = {"saveat": 0.2, "abstol": 1e-10, "reltol": 1e-10}
    streamed = summarize(blowup(), trajectories=5, batch_size=2, **options)
    assert_same(streamed, eo.EnsembleSummary(ragged))


@pytest.mark.slow
def test_in_one_pass_over_many():
    n, options = 20_000, {"saveat": [0.5, 1.0], "abstol": 1e-8, "reltol": 1e-8}
    ens = random_growth(1)
    streamed = summarize(ens, trajectories=n, batch_size=1999, quantiles=(0.01, 0.9), **options)
    sim = eo.solve(ens, trajectories=n, **options)
    whole = eo.EnsembleSummary(sim, quantiles=(0.01, 0.9))
    for name in ("t", "u", "v", "num_monte"):
        np.testing.assert_allclose(getattr(streamed, name), getattr(whole, name), rtol=1e-11)
    u = np.sort(np.asarray(sim.u)[..., 0], axis=0)
    for q, value, off in (
        (0.01, streamed.qlow, 2e-4),
        (0.5, streamed.med, 2e-3),
        (0.9, streamed.qhigh, 2e-3),
    ):
        rank = (u < np.asarray(value)[:, 0]).mean(axis=0)
        np.testing.assert_allclose(rank, q, atol=off)
    # They are those of a lognormal distribution.
    np.testing.assert_allclose(streamed.med[:, 0], [1, 1], atol=0.03)
    np.testing.assert_allclose(streamed.u[:, 0], np.exp([0.125, 0.5]), rtol=0.03)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"save_everystep": True}, ValueError, "use saveat"),
        ({"quantiles": (0.9, 0.1)}, ValueError, "pairs from 0 to 1 in order"),
        ({"quantiles": 0.5}, ValueError, "a pair of numbers"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        summarize(growth(RATES), trajectories=5, **options)


@pytest.mark.slow
def test_errors_of_ensembles(ragged):
    with pytest.raises(ValueError, match="output_func=, and summarize needs the states"):
        summarize(
            eo.EnsembleProblem(growth(RATES).prob, output_func=lambda sol, ctx: (sol.u, False)),
            trajectories=2,
        )
    times = jnp.array([[0.0, 0.5], [0.0, 0.75]])
    for batch_size in (None, 1):
        with pytest.raises(ValueError, match="times that all trajectories share"):
            summarize(growth(RATES[:2], saveat=times), trajectories=2, batch_size=batch_size)
    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1), (0.0, 1.0), save_everystep=True)
    with pytest.raises(ValueError, match="use saveat"):
        summarize(eo.EnsembleProblem(prob), trajectories=2)
    with pytest.raises(ValueError, match="ts must be an array of times"):
        eo.EnsembleSummary(ragged, [])
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda r: summarize(growth(r), trajectories=5).u)(jnp.asarray(RATES))
    with pytest.raises(TypeError, match="takes an EnsembleSolution, got ODESolution"):
        eo.EnsembleSummary(ragged[0])
    with pytest.raises(TypeError, match="takes an EnsembleProblem, got ODEProblem"):
        summarize(growth(RATES).prob, trajectories=2)
    reduced = eo.EnsembleProblem(
        growth(RATES).prob, reduction=lambda u, data, i: (u + data.sum(), False), u_init=0.0
    )
    with pytest.raises(TypeError, match="reduced in place of its states"):
        eo.EnsembleSummary(eo.solve(reduced, trajectories=2))
    rotation = eo.ODEProblem(lambda u, p, t: 1j * u, jnp.ones(1, complex), (0.0, 1.0))
    for call in (
        lambda: eo.EnsembleSummary(eo.solve(eo.EnsembleProblem(rotation), trajectories=2)),
        lambda: summarize(eo.EnsembleProblem(rotation), trajectories=2),
    ):
        with (
            warnings.catch_warnings(action="ignore"),  # diffrax's, of complex states
            pytest.raises(TypeError, match="complex states have no order"),
        ):
            call()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6) | st.just(np.nan), max_size=30), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_a_digest_of_few_samples_is_exact(batches, q):
    digest = Digest.empty(1, 1000)
    for batch in batches:
        digest = digest.add(np.array(batch, float)[:, None])
    samples = np.concatenate([np.array(b, float) for b in batches])
    samples = samples[~np.isnan(samples)]
    expected = np.quantile(samples, q) if len(samples) else np.nan
    np.testing.assert_allclose(digest.quantile(q), expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("order", ["random", "sorted", "interleaved"])
def test_a_digest_of_many_samples_is_close_in_rank(order):
    """In whichever order they come, of whatever distribution."""
    n, batches = 50_000, 25
    rng = np.random.default_rng(0)
    columns = [rng.normal(size=n), rng.exponential(size=n) ** 3, np.round(rng.normal(size=n), 1)]
    x = np.stack(columns, axis=1)
    if order == "sorted":
        x = np.sort(x, axis=0)
    elif order == "interleaved":
        x = np.sort(x, axis=0).reshape(n // batches, batches, 3).swapaxes(0, 1).reshape(n, 3)
    digest = Digest.empty(3, 1000)
    for batch in np.split(x, batches):
        digest = digest.add(batch)
    assert digest.weight.sum(axis=0).tolist() == [n] * 3
    np.testing.assert_array_equal(digest.quantile(0.0), x.min(axis=0))
    np.testing.assert_array_equal(digest.quantile(1.0), x.max(axis=0))
    for q in (0.0, 1e-4, 0.01, 0.1, 0.5, 0.9, 0.999, 1.0):
        got = digest.quantile(q)
        off = 2e-3 * np.sqrt(q * (1 - q)) * 2 + 2 / n
        for column in range(3):
            low, high = (np.quantile(x[:, column], np.clip(q + d, 0, 1)) for d in (-off, off))
            assert low - 1e-12 <= got[column] <= high + 1e-12, (q, column)


@pytest.mark.parametrize("end", [2.0, 2.4])
def test_events_and_trajectories_that_they_end(end):
    """Those that ended count for as long as they lasted, whether or not the last time is saved."""
    callback = eo.CallbackSet(
        eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.75, lambda x: x),
        eo.ContinuousCallback(lambda u, t, integrator: u[0] - 1.0, eo.terminate),
    )
    prob = eo.ODEProblem(lambda u, p, t: 0.0 * u + p, [0.0], (0.0, end), 1.0, callback=callback)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=0.2 * (1 + ctx.index)))
    how = {"trajectories": 5, "saveat": jnp.array([0.0, 0.9, 1.1, 2.0]), "abstol": 1e-8}
    sim = eo.solve(ens, **how)
    for summary in (eo.EnsembleSummary(sim), eo.analysis.summarize(ens, **how, batch_size=2)):
        assert summary.num_monte.tolist()[1:] == [5, 4, 2]
        np.testing.assert_allclose(summary.u[1:, 0], [0.54, 0.55, 0.6], rtol=1e-6)
        assert summary.t.tolist() == sim.t.tolist()
        assert summary.qlow.shape == summary.med.shape == summary.u.shape
        assert (summary.num_events, summary.num_terminated) == (7, 3)
        assert repr(summary).endswith("events     7, which ended 3 trajectories")
    unrecorded = eo.ContinuousCallback(
        lambda u, t, integrator: u[0] - 1.0, eo.terminate, save_positions=(False, False)
    )
    ens = eo.EnsembleProblem(eo.remake(prob, callback=unrecorded), ens.prob_func)
    summary = eo.analysis.summarize(ens, **how, batch_size=2)
    assert summary.t.tolist() == [0.0, 0.9, 1.1, 2.0]
    assert summary.num_monte.tolist() == [5, 5, 4, 2]
