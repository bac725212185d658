"""The statistics, compared with NumPy's and with those that Julia computed for the same
ensemble."""

import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import ensembleode as eo
from ensembleode import analysis

from ..problems import lorenz


def growth(rates, tspan=(0.0, 1.0), **each):
    """du/dt = p u for each rate: exp(p t) and 2 exp(p t)."""
    rates = jnp.asarray(rates)
    prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.array([1.0, 2.0]), tspan, rates[0])

    def prob_func(prob, ctx):
        own = {name: values[ctx.index] for name, values in each.items()}
        return eo.remake(prob, p=rates[ctx.index], **own)

    return eo.EnsembleProblem(prob, prob_func)


RATES = np.array([0.5, -1.0, 0.25, 2.0, -0.75])


@pytest.fixture(scope="module")
def sim():
    return eo.solve(growth(RATES), trajectories=5, saveat=0.25, abstol=1e-10, reltol=1e-10)


STARTS = jnp.array([0.25, 0.5, -1.0, 2.0, 4.0])


def blowup(starts=STARTS):
    """du/dt = u^2, which is infinite at t = 1 / u0."""
    prob = eo.ODEProblem(lambda u, p, t: u**2, starts[:1], (0.0, 1.0))
    return eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index][None]))


@pytest.fixture(scope="module")
def ragged():
    """Trajectories 3 and 4 blow up, at t = 0.5 and 0.25."""
    return eo.solve(blowup(), trajectories=5, saveat=0.2, abstol=1e-10, reltol=1e-10)


samples = hnp.arrays(
    np.float64,
    st.tuples(st.sampled_from([2, 5, 40]), st.just(3)),  # each shape is compiled
    elements=st.one_of(st.floats(-1e3, 1e3, allow_subnormal=False), st.just(np.nan)),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(samples)
def test_of_samples_with_gaps(a):
    for column, x in enumerate(a.T):
        x = x[~np.isnan(x)]
        mean, variance = analysis.componentwise_meanvar(a)
        median = analysis.componentwise_median(a)
        q = analysis.componentwise_quantile(a, 0.3)
        if not len(x):
            assert np.isnan([mean[column], variance[column], median[column], q[column]]).all()
            continue
        np.testing.assert_allclose(mean[column], x.mean(), rtol=1e-12, atol=1e-10)
        np.testing.assert_allclose(median[column], np.median(x), rtol=1e-12, atol=1e-300)
        np.testing.assert_allclose(q[column], np.quantile(x, 0.3), rtol=1e-10, atol=1e-10)
        if len(x) > 1:
            np.testing.assert_allclose(variance[column], x.var(ddof=1), rtol=1e-10, atol=1e-9)
        else:
            assert np.isnan(variance[column])


def pair(seed=0, n=30):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(n, 2))
    b = 0.5 * a + rng.normal(size=(n, 2)) + 3
    a[3, 0] = b[7, 0] = np.nan
    return a, b


def complete(a, b, column):
    there = ~np.isnan(a[:, column]) & ~np.isnan(b[:, column])
    return there, a[there, column], b[there, column]


@pytest.mark.parametrize("bessel", [True, False])
def test_covariance_is_over_the_complete_pairs(bessel):
    a, b = pair()
    mean_a, mean_b, cov = analysis.componentwise_meancov(a, b, bessel=bessel)
    for column in range(2):
        _, x, y = complete(a, b, column)
        np.testing.assert_allclose(mean_a[column], x.mean(), rtol=1e-13)
        np.testing.assert_allclose(mean_b[column], y.mean(), rtol=1e-13)
        np.testing.assert_allclose(cov[column], np.cov(x, y, ddof=int(bessel))[0, 1], rtol=1e-12)


def test_correlation():
    a, b = pair()
    _, _, cor = analysis.componentwise_meancor(a, b)
    for column in range(2):
        _, x, y = complete(a, b, column)
        np.testing.assert_allclose(cor[column], np.corrcoef(x, y)[0, 1], rtol=1e-12)
    assert np.isnan(analysis.componentwise_meancor(np.ones((4, 1)), b[:4, 1:])[2])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", ["trajectory", "component"])
def test_weighted_covariance(shape):
    a, b = pair()
    n = len(a)
    w = np.arange(1.0, n + 1) if shape == "trajectory" else np.arange(1.0, 2 * n + 1).reshape(n, 2)
    for kind, keyword in (("frequency", "fweights"), ("reliability", "aweights")):
        mean_a, _, cov = analysis.componentwise_weighted_meancov(a, b, w, kind)
        for column in range(2):
            there, x, y = complete(a, b, column)
            own = (w if shape == "trajectory" else w[:, column])[there]
            weights = own.astype(int) if kind == "frequency" else own
            expected = np.cov(x, y, **{keyword: weights})[0, 1]
            np.testing.assert_allclose(cov[column], expected, rtol=1e-12)
            np.testing.assert_allclose(mean_a[column], np.average(x, weights=own), rtol=1e-12)
    _, _, population = analysis.componentwise_weighted_meancov(a, b, np.ones(n), "population")
    _, _, plain = analysis.componentwise_meancov(a, b, bessel=False)
    np.testing.assert_allclose(population, plain, rtol=1e-12)


def test_of_complex_states():
    z = np.array([[1 + 1j], [3 - 1j], [np.nan]])
    mean, variance = analysis.componentwise_meanvar(z)
    np.testing.assert_allclose(mean, [2.0])
    np.testing.assert_allclose(variance, [4.0])
    assert variance.dtype == np.float64
    with pytest.raises(TypeError, match="complex states have no order"):
        analysis.componentwise_median(z)


def test_of_counts():
    np.testing.assert_allclose(
        analysis.componentwise_mean(np.array([2**31 - 1, 1], np.int32)), 2**30
    )
    np.testing.assert_allclose(analysis.componentwise_median(np.array([True, False, True])), 1)
    with pytest.raises(ValueError, match="over the first axis"):
        analysis.componentwise_mean(np.zeros(()))


# Of each kind of place: one, in arguments, and its row or rows.
PLACES = {
    "timestep": ((1,), 1),
    "timeseries_steps": ((), slice(None)),
    "timepoint": ((0.75,), 3),
    "timeseries_point": ((jnp.array([0.25, 0.75, 1.0]),), [1, 3, 4]),
}


@pytest.mark.parametrize("at", PLACES)
def test_at(sim, at):
    where, rows = PLACES[at]
    u = np.asarray(sim.u)[:, rows]

    def found(name, *given):
        return getattr(analysis, f"{at}_{name}")(sim, *given, *where)

    np.testing.assert_allclose(found("mean"), u.mean(axis=0))
    np.testing.assert_allclose(found("median"), np.median(u, axis=0))
    np.testing.assert_allclose(found("quantile", 0.2), np.quantile(u, 0.2, axis=0))
    mean, variance = found("meanvar")
    np.testing.assert_allclose(mean, u.mean(axis=0))
    np.testing.assert_allclose(variance, u.var(axis=0, ddof=1), atol=1e-14)


def test_samples_at(sim):
    u = np.asarray(sim.u)
    np.testing.assert_array_equal(analysis.get_timestep(sim, 2), u[:, 2])
    np.testing.assert_allclose(analysis.timestep_mean(sim, -1), u[:, -1].mean(axis=0))
    np.testing.assert_allclose(
        analysis.timestep_quantile(sim, [0.1, 0.8], 1), np.quantile(u[:, 1], [0.1, 0.8], axis=0)
    )
    mean, _ = analysis.timestep_meanvar(sim, slice(None))
    np.testing.assert_allclose(mean, u.mean(axis=0))
    assert analysis.componentwise_vectors_timestep(sim, 2).shape == (2, 5)
    assert analysis.componentwise_vectors_timepoint(sim, 0.3).shape == (2, 5)


def test_between_steps(sim):
    w = np.arange(1.0, 6)
    for name, *how in (("meancov",), ("meancor",), ("weighted_meancov", w, "population")):
        series = getattr(analysis, f"timeseries_steps_{name}")(sim, *how)
        single = getattr(analysis, f"timestep_{name}")(sim, *how[:1], 1, 3, *how[1:])
        for x, y in zip(series, single, strict=True):
            assert x.shape == (5, 5, 2)
            np.testing.assert_allclose(x[1, 3], y, rtol=1e-13)


@pytest.mark.slow
def test_between_the_times_saved_it_is_linear(sim):
    u = np.asarray(sim.u)
    np.testing.assert_array_equal(analysis.get_timepoint(sim, 0.5), u[:, 2])
    halfway = (u[:, 2] + u[:, 3]) / 2
    np.testing.assert_allclose(analysis.get_timepoint(sim, 0.625), halfway, rtol=1e-14)
    several = analysis.get_timepoint(sim, jnp.array([0.0, 0.625, 1.0]))
    np.testing.assert_allclose(several, np.stack([u[:, 0], halfway, u[:, -1]], 1), rtol=1e-14)
    outside = analysis.get_timepoint(sim, jnp.array([-0.1, 1.1]))
    assert np.isnan(outside).all()


@pytest.mark.slow
@pytest.mark.parametrize("tspan", [(0.0, 1.0), (1.0, -0.5)])
def test_after_every_step_it_is_as_good_as_the_solution(tspan):
    options = {"abstol": 1e-8, "reltol": 1e-8}
    sim = eo.solve(growth(RATES, tspan), trajectories=5, save_everystep=True, **options)
    assert sim.t.ndim == 2
    t = 0.3
    expected = np.exp(RATES * (t - tspan[0]))[:, None] * [1.0, 2.0]
    np.testing.assert_allclose(analysis.get_timepoint(sim, t), expected, rtol=1e-5)
    mean, variance = analysis.timepoint_meanvar(sim, t)
    np.testing.assert_allclose(mean, expected.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(variance, expected.var(axis=0, ddof=1), rtol=1e-5)


@pytest.mark.slow
def test_each_with_its_own_times_forwards_and_backwards():
    times = jnp.stack([jnp.linspace(1, -1, 5), jnp.linspace(0.5, -0.5, 5)])
    ens = growth(RATES[:2], (1.0, -1.0), saveat=times)
    sim = eo.solve(ens, trajectories=2, abstol=1e-10, reltol=1e-10)
    got = analysis.get_timepoint(sim, jnp.array([0.25, 0.75]))
    ends = [np.exp(RATES[0] * (t - 1)) for t in (0.5, 0.0)]
    np.testing.assert_allclose(got[0, 0, 0], (ends[0] + ends[1]) / 2, rtol=1e-9)
    np.testing.assert_allclose(got[1, 0, 0], np.exp(RATES[1] * (0.25 - 1)), rtol=1e-9)
    assert np.isnan(got[1, 1]).all()
    assert not np.isnan(got[0, 1]).any()


@pytest.mark.slow
def test_between_times(sim):
    ts = jnp.array([0.25, 0.75, 1.0])
    w = np.arange(1.0, 6)
    for name, weights in (("meancov", ()), ("meancor", ()), ("weighted_meancov", (w,))):
        series = getattr(analysis, f"timeseries_point_{name}")
        single = getattr(analysis, f"timepoint_{name}")
        for x, y in zip(
            series(sim, *weights, ts, ts), single(sim, *weights, 0.25, 1.0), strict=True
        ):
            assert x.shape == (3, 3, 2)
            np.testing.assert_allclose(x[0, 2], y, rtol=1e-12)
        # As in SciML: all times but the last, and all but the first.
        for x, y in zip(series(sim, *weights, ts), series(sim, *weights, ts, ts), strict=True):
            np.testing.assert_allclose(x, y[:2, 1:], rtol=1e-12)


@pytest.mark.slow
def test_failed_trajectories_count_as_far_as_they_came(ragged):
    assert list(ragged.lengths) == [6, 6, 6, 3, 2]
    starts = np.asarray(STARTS)
    for i, t in enumerate(ragged.t):
        reached = starts[starts * t < 1]
        exact = reached / (1 - reached * t)
        mean, variance = analysis.timestep_meanvar(ragged, i)
        np.testing.assert_allclose(mean, exact.mean(), rtol=1e-6)
        np.testing.assert_allclose(variance, exact.var(ddof=1), rtol=1e-6)
        np.testing.assert_allclose(analysis.timestep_median(ragged, i), np.median(exact), rtol=1e-6)
    between = analysis.get_timepoint(ragged, 0.3)
    np.testing.assert_array_equal(np.isnan(between[:, 0]), [False] * 4 + [True])


@pytest.mark.slow
def test_under_jit_and_grad(sim):
    def spread(rates):
        out = eo.solve(growth(rates), trajectories=5, saveat=0.25, abstol=1e-10, reltol=1e-10)
        mean, variance = analysis.timeseries_steps_meanvar(out)
        q = analysis.timeseries_point_quantile(out, 0.25, jnp.array([0.3, 0.9]))
        return variance[-1, 0], (mean, q)

    (value, (mean, q)), gradient = jax.jit(jax.value_and_grad(spread, has_aux=True))(
        jnp.asarray(RATES)
    )
    np.testing.assert_allclose(mean, analysis.timeseries_steps_mean(sim), rtol=1e-12)
    expected = analysis.timeseries_point_quantile(sim, 0.25, jnp.array([0.3, 0.9]))
    np.testing.assert_allclose(q, expected, rtol=1e-12)
    end = np.exp(RATES)
    np.testing.assert_allclose(value, end.var(ddof=1), rtol=1e-8)
    np.testing.assert_allclose(gradient, 2 * (end - end.mean()) / 4 * end, rtol=1e-7)


def test_a_failed_trajectory_does_not_spoil_the_gradient():
    def mean_end(starts):
        sim = eo.solve(blowup(starts), trajectories=3, abstol=1e-10, reltol=1e-10)
        return analysis.timestep_mean(sim, -1)[0]

    starts = jnp.array([0.25, 2.0, -1.0])
    gradient = jax.grad(mean_end)(starts)
    np.testing.assert_allclose(gradient, [0.5 / 0.75**2, 0, 0.5 / 2**2], rtol=1e-7)


OTHER = jnp.array([3.0, -1.0, 2.0, 2.5, 1.0])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "statistic",
    [
        lambda a: analysis.componentwise_meanvar(a)[1],
        lambda a: analysis.componentwise_meancov(a, OTHER[: len(a)])[2],
        lambda a: analysis.componentwise_meancor(a, OTHER[: len(a)])[2],
        lambda a: analysis.componentwise_weighted_meancov(
            a, OTHER[: len(a)], np.arange(1.0, 1.0 + len(a))
        )[2],
        lambda a: analysis.componentwise_quantile(a, 0.3),
    ],
    ids=["variance", "covariance", "correlation", "weighted covariance", "quantile"],
)
def test_the_gradient_where_one_is_missing(statistic):
    """That of the others, and zero."""
    there = jnp.array([1.0, 2.0, 4.0, 7.0])
    value, gradient = jax.value_and_grad(statistic)(jnp.append(there, jnp.nan))
    expected, of_others = jax.value_and_grad(statistic)(there)
    np.testing.assert_allclose(value, expected, rtol=1e-13)
    np.testing.assert_allclose(gradient, jnp.append(of_others, 0.0), rtol=1e-12)
    assert abs(of_others).max() > 0.01


@pytest.mark.slow
def test_the_gradient_between_times_that_not_all_reach():
    ends, t = jnp.array([1.0, 2.0]), 1.25

    def mean(rates, t):
        prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.ones(1), (0.0, 1.0), rates[0])
        ens = eo.EnsembleProblem(
            prob,
            lambda prob, ctx: eo.remake(prob, p=rates[ctx.index], tspan=(0.0, ends[ctx.index])),
        )
        sim = eo.solve(
            ens,
            trajectories=2,
            saveat=jnp.array([[0.0, 0.5, 1.0, jnp.nan], [0.0, 0.5, 1.0, 1.5]]),
            abstol=1e-10,
            reltol=1e-10,
        )
        return analysis.timepoint_mean(sim, t)[0]

    rates = jnp.array([0.5, -1.0])
    by_rates, by_time = jax.grad(mean, argnums=(0, 1))(rates, t)
    np.testing.assert_allclose(by_rates, [0, (np.exp(-1) + 1.5 * np.exp(-1.5)) / 2], rtol=1e-7)
    np.testing.assert_allclose(by_time, (np.exp(-1.5) - np.exp(-1)) / 0.5, rtol=1e-7)


JULIA = json.loads((pathlib.Path(__file__).parents[1] / "data/julia_lorenz64.json").read_text())


def lorenz64():
    prob = eo.ODEProblem(lorenz, jnp.array([1.0, 0, 0]), (0.0, 10.0), jnp.array([10.0, 0, 8 / 3]))
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=prob.p.at[1].set(21 * ctx.index / 63))
    )


def test_julia_finds_the_same():
    sim = eo.solve(lorenz64(), trajectories=64, saveat=0.5, abstol=1e-9, reltol=1e-9)
    for summary in (
        eo.EnsembleSummary(sim),
        analysis.summarize(
            lorenz64(), trajectories=64, saveat=0.5, abstol=1e-9, reltol=1e-9, batch_size=13
        ),
    ):
        for name, ours in (("mean", "u"), ("var", "v"), ("med", "med"), ("qlow", "qlow")):
            np.testing.assert_allclose(getattr(summary, ours), JULIA[name], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(summary.qhigh, JULIA["qhigh"], rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(sim.stats.naccept, JULIA["naccept"])


def test_all_of_scimls_names_are_there():
    names = {"get_timestep", "get_timepoint", "componentwise_mean", "componentwise_meanvar"}
    names |= {"componentwise_vectors_timestep", "componentwise_vectors_timepoint"}
    for at in ("timestep", "timepoint", "timeseries_steps", "timeseries_point"):
        for what in ("mean", "median", "quantile", "meanvar", "meancov", "meancor"):
            names.add(f"{at}_{what}")
        names.add(f"{at}_weighted_meancov")
    missing = [name for name in names if not inspect.isfunction(getattr(analysis, name, None))]
    assert not missing


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: analysis.timestep_quantile(s, 5, 1), ValueError, "q must be from 0 to 1"),
        (lambda s: analysis.timestep_mean(s, 5), IndexError, "step 5 of 5"),
        (lambda s: analysis.get_timestep(s, [0, -6]), IndexError, "step -6 of 5"),
        (lambda s: analysis.timeseries_point_mean(s, 0.5), ValueError, r"array \[n\]"),
        (
            lambda s: analysis.timestep_weighted_meancov(s, np.ones(3), 0, 1),
            ValueError,
            "a weight for each of the 5 trajectories",
        ),
        (
            lambda s: analysis.timestep_weighted_meancov(s, np.ones(5), 0, 1, "median"),
            ValueError,
            "weight_type must be one of reliability, population, frequency",
        ),
        (
            lambda s: analysis.componentwise_meancov(s.u[:, 0], s.u[:3, 0]),
            ValueError,
            "of one shape",
        ),
    ],
)
def test_errors(sim, call, error, message):
    with pytest.raises(error, match=message):
        call(sim)


def test_several_ensembles_in_one():
    mapped = jax.vmap(lambda scale: eo.solve(growth(scale * RATES), trajectories=5, saveat=0.5))(
        jnp.array([1.0, 2.0])
    )
    for call in (lambda: analysis.timestep_mean(mapped, 0), lambda: eo.EnsembleSummary(mapped)):
        with pytest.raises(TypeError, match="many ensembles in one"):
            call()
    inside = jax.vmap(
        lambda scale: analysis.timestep_mean(
            eo.solve(growth(scale * RATES), trajectories=5, saveat=0.5), -1
        )
    )(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(inside[1, 0], np.exp(2 * RATES).mean(), rtol=1e-3)


def test_outputs_have_no_steps():
    ens = eo.EnsembleProblem(growth(RATES).prob, output_func=lambda sol, ctx: (sol.u[-1], False))
    sim = eo.solve(ens, trajectories=3)
    with pytest.raises(TypeError, match="outputs in place of its states"):
        analysis.timestep_mean(sim, 0)
    np.testing.assert_allclose(analysis.componentwise_mean(sim.u), sim.u[0])


def test_statistics_of_a_store_have_its_precision(tmp_path):
    """Also where JAX's double precision is off, as in another process than wrote it."""
    pytest.importorskip("zarr")
    sim = eo.solve(growth(RATES), trajectories=5, saveat=0.25, store=tmp_path / "a.zarr")
    analysis = eo.analysis

    def computed():
        return [
            analysis.timeseries_steps_mean(sim),
            analysis.timestep_meanvar(sim, 1)[1],
            analysis.timepoint_median(sim, 0.3),
            analysis.timeseries_point_quantile(sim, [0.1, 0.9], [0.1, 0.2]),
            analysis.timeseries_steps_meancov(sim)[2],
            analysis.timepoint_weighted_meancov(sim, np.ones(5), 0.1, 0.2)[2],
            eo.EnsembleSummary(sim).qlow,
            eo.EnsembleSummary(sim, [0.1, 0.2]).v,
        ]

    expected = computed()
    with jax.enable_x64(False):
        found = computed()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, theirs, rtol=1e-14)
