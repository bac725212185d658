"""One suite for all ensemble algorithms: each feature, eagerly and inside jit.

A new ensemble algorithm joins by a line in `ALGORITHMS`. A feature it can't have is listed in
`REFUSED` with the error it raises.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .marks import on_julia, slow_unless
from .problems import decay, linear, lotka_volterra, scaled


class By(NamedTuple):
    """An ensemble algorithm with an engine that `auto` does not take for these problems."""

    engine: str
    alg: Any


ALGORITHMS = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "columns": eo.EnsembleColumns(),
    "arrays": eo.EnsembleGPUArray(),
    "kernel": eo.EnsembleGPUKernel(),
    "devices": eo.EnsembleGPUArray(devices=2),
    "distributed": eo.EnsembleDistributed(workers=2),
    "3 workers": eo.EnsembleDistributed(workers=3),
    "split threads": eo.EnsembleSplitThreads(workers=2, threads=2),
}
BY_DIFFRAX = {"diffrax": By("diffrax", eo.EnsembleThreads())}
ON_JULIA = {
    "julia serial": By("julia", eo.EnsembleSerial()),
    "julia threads": By("julia", eo.EnsembleThreads()),
    "julia distributed": By("julia", eo.EnsembleDistributed(workers=2)),
    "julia split threads": By("julia", eo.EnsembleSplitThreads(workers=2, threads=1)),
    "julia columns": By("julia", eo.EnsembleColumns()),
}
# (algorithm, feature): (exception, message)
REFUSED = {
    (name, feature): (ValueError, f"{what} must be the same")
    for name in ("columns", "julia columns")
    for feature, what in {
        "tspan of each": "tspan",
        "saveat of each": "saveat",
        "tolerance of each": "reltol",
        "known times of each": "tstops",
        "spacing over tspan of each": "tspan",
    }.items()
}
REFUSED |= {
    (name, "integrand"): (ValueError, "let f return what integrand does")
    for name in ("columns", *ON_JULIA)
}
REFUSED |= {
    (name, "callback"): (ValueError, "callback") for name in ("columns", "diffrax", "julia columns")
}
REFUSED |= {(name, "max_norm"): (ValueError, "has no max_norm") for name in ON_JULIA}
REFUSED |= {
    (name, "max_norm"): (ValueError, "max_norm ends each by itself: use EnsembleThreads")
    for name in ("columns", "julia columns")
}
REFUSED |= {(name, "gradient through callbacks"): (TypeError, "has callbacks") for name in ON_JULIA}
REFUSED |= {
    (name, "rosenbrock"): (ValueError, r"can('t)? run Rodas5P.*eo\.Kvaerno5\(\)")
    for name in ("columns", "diffrax")
}
REFUSED |= {
    (name, "mass matrix"): (ValueError, "can('t)? run Rodas5P") for name in ("columns", "diffrax")
}
REFUSED[("julia columns", "mass matrix")] = (ValueError, "EnsembleColumns has no mass_matrix")
# One failing column fails the whole solve, which shares its steps.
SHARED_STEPS = {"columns", "julia columns"}

TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


# On the CPU, EnsembleGPUArray is EnsembleThreads(1).
QUICK = ("serial", "threads", "columns", "kernel", "distributed")


# Of these, the features below run every time, which an executor has code of its own for; the others
# (batches, reruns, keys, outputs, reductions) are the same code for all, that `threads` runs.
# (Eagerly, workers are tested in tests/executors, columns in the tutorial.)
IN_PART = {
    "serial": ("eager", "jit"),
    "columns": ("jit",),
    "kernel": ("jit",),
    "distributed": ("jit",),
}
OF_EXECUTORS = {
    "test_backwards_in_time",
    "test_batches_change_nothing",
    "test_closed_form",
    "test_closure_of_each",
    "test_every_step",
    "test_gradient",
    "test_integrand",
    "test_known_times_of_each",
    "test_output_func",
    "test_parameters_of_each_and_shared",
    "test_retcodes",
    "test_retcodes_with_a_fixed_step",
    "test_rosenbrock",
    "test_saveat_of_each",
    "test_spacing_over_tspan_of_each",
    "test_tolerance_of_each",
    "test_tspan_of_each",
}


def is_slow(test, name, mode=None, batch_size=None, **_):
    """Whether a test of this suite, with these parameters, is one for `pytest -m slow`."""
    if name == "distributed" and mode != "jit":
        return True
    if name == "columns" and (mode == "eager" or batch_size):
        return True
    if name not in IN_PART or (mode and mode not in IN_PART[name]):
        return False
    few = {"test_batches_change_nothing": (3,), "test_gradient": (None,)}.get(test, (batch_size,))
    return test not in OF_EXECUTORS or batch_size not in few


_CASES = [slow_unless(name in QUICK, name) for name in (*ALGORITHMS, *BY_DIFFRAX)]


@pytest.fixture(params=[*_CASES, *map(on_julia, ON_JULIA)])
def name(request):
    return request.param


@pytest.fixture
def alg(name, request):
    if name == "kernel":  # as on a GPU
        request.getfixturevalue("on_host")
    return {**ALGORITHMS, **BY_DIFFRAX, **ON_JULIA}[name]


def solve(ens, solver, alg, **options):
    if isinstance(alg, By):
        alg, options = alg.alg, {"engine": alg.engine, **options}
    return eo.solve(ens, solver, alg, **options)


@pytest.fixture(params=["eager", "jit"])
def mode(request):
    return request.param


def run(mode, ens, alg, n, solver=None, **options):
    def go():
        return solve(ens, solver or eo.Tsit5(), alg, trajectories=n, **options)

    return go() if mode == "eager" else jax.jit(go)()


def refused(name, feature):
    """The error that this algorithm raises for this feature, or nothing."""
    if (name, feature) not in REFUSED:
        return None
    exception, message = REFUSED[name, feature]
    return pytest.raises(exception, match=message)


def feature(what):
    """A test of it, which on an algorithm that hasn't it ends in the algorithm's error."""

    def decorated(test):
        @functools.wraps(test)
        def run_test(name, **given):
            with refused(name, what) or contextlib.nullcontext():
                test(name=name, **given)

        return run_test

    return decorated


def ensemble(**parts):
    return eo.EnsembleProblem(decay(), scaled, **parts)


def exact(n, t):
    """The solution of `ensemble()`: [trajectory, time, state]."""
    start = np.arange(1, n + 1)[:, None, None] * np.array([1.0, 2.0])
    return start * np.exp(-np.asarray(t))[None, :, None]


@pytest.mark.quick_cases(1)
def test_closed_form(alg, mode):
    sim = run(mode, ensemble(), alg, 5, saveat=0.25, **TIGHT)
    np.testing.assert_allclose(sim.t, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(sim.u, exact(5, sim.t), **CLOSE)
    assert (np.asarray(sim.retcode) == eo.ReturnCode.Success).all()
    assert (np.asarray(sim.lengths) == 5).all()
    assert (np.asarray(sim.stats.naccept) > 0).all()
    assert len(sim) == 5


@pytest.mark.quick_cases(1)
@feature("integrand")
def test_integrand(name, alg, mode):
    ens = eo.EnsembleProblem(decay(integrand=lambda u, p, t: {"area": u, "t": t}), scaled)
    sim = run(mode, ens, alg, 3, saveat=0.5, **TIGHT)
    without = run(mode, ensemble(), alg, 3, saveat=0.5, **TIGHT)
    np.testing.assert_array_equal(sim.u, without.u)
    np.testing.assert_array_equal(sim.stats.naccept, without.stats.naccept)
    np.testing.assert_allclose(sim.integral["area"], exact(3, [0.0]) - sim.u, **CLOSE)
    np.testing.assert_allclose(sim.integral["t"], [[0, 1 / 8, 1 / 2]] * 3, **CLOSE)


@pytest.mark.quick_cases(1)
@feature("rosenbrock")
def test_rosenbrock(name, alg, mode):
    sim = run(mode, ensemble(), alg, 3, eo.Rodas5P(), saveat=0.5, **TIGHT)
    np.testing.assert_allclose(sim.u, exact(3, [0.0, 0.5, 1.0]), **CLOSE)
    assert (np.asarray(sim.retcode) == eo.ReturnCode.Success).all()


@pytest.mark.slow
@feature("mass matrix")
def test_mass_matrix(name, alg, mode):
    """`u' = -u` once more, with the component and its half, which an algebraic equation determines
    from a start that is found."""
    f = eo.ODEFunction(
        lambda u, p, t: jnp.stack([2 * u[1] - u[0], -2 * u[0]]),
        mass_matrix=[[0.0, 0.0], [2.0, 0.0]],
        jac=lambda u, p, t: jnp.array([[-1.0, 2.0], [-2.0, 0.0]]),
    )
    prob = eo.ODEProblem(f, jnp.array([1.0, 0.0]), (0.0, 1.0), saveat=0.5)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=ctx.sim_id * prob.u0))
    options = {"initializealg": eo.BrownFullBasicInit(), **TIGHT}
    sim = run(mode, ens, alg, 3, eo.Rodas5P(), **options)
    np.testing.assert_allclose(sim.u, exact(3, [0.0, 0.5, 1.0]) / [1.0, 4.0], **CLOSE)
    assert (np.asarray(sim.retcode) == eo.ReturnCode.Success).all()


@pytest.mark.quick_cases(1)
def test_backwards_in_time(alg, mode):
    ens = eo.EnsembleProblem(decay(tspan=(1.0, 0.0)), scaled)
    sim = run(mode, ens, alg, 3, saveat=[0.75, 0.5, 0.0], **TIGHT)
    expected = exact(3, [0.75, 0.5, 0.0]) * np.e
    np.testing.assert_allclose(sim.u, expected, rtol=1e-7)


@pytest.mark.quick_cases(1)
def test_matrix_state_and_scalar_state(alg, mode):
    for u0 in (jnp.ones((2, 3)), jnp.array(1.0)):
        ens = eo.EnsembleProblem(eo.ODEProblem(linear, u0, (0.0, 1.0), jnp.array(-1.0)), scaled)
        sim = run(mode, ens, alg, 3, saveat=0.5, **TIGHT)
        assert sim.u.shape == (3, 3, *u0.shape)
        first = np.asarray(sim.u).reshape(3, 3, -1)[:, :, 0]
        np.testing.assert_allclose(first, exact(3, [0, 0.5, 1])[:, :, 0], **CLOSE)


@pytest.mark.quick_cases(1)
@feature("tspan of each")
def test_tspan_of_each(name, alg, mode):
    def prob_func(prob, ctx):
        return eo.remake(prob, tspan=(0.0, 1.0 * ctx.sim_id))

    ens = eo.EnsembleProblem(decay(), prob_func)
    sim = run(mode, ens, alg, 3, **TIGHT)
    np.testing.assert_allclose(sim.t, [[0, 1], [0, 2], [0, 3]])
    np.testing.assert_allclose(sim.u[:, 1, 0], np.exp([-1, -2, -3]), **CLOSE)


@pytest.mark.quick_cases(3)
@feature("spacing over tspan of each")
def test_spacing_over_tspan_of_each(name, alg):
    """Grids of different lengths are padded with NaN, and their lengths told."""

    def prob_func(prob, ctx):
        return eo.remake(prob, tspan=(0.0, 0.4 + 0.3 * ctx.index))

    ens = eo.EnsembleProblem(decay(), prob_func)
    sim = run("eager", ens, alg, 3, saveat=0.2, **TIGHT)
    nan = np.nan
    expected = [
        [0, 0.2, 0.4, nan, nan, nan],
        [0, 0.2, 0.4, 0.6, 0.7, nan],
        [0, 0.2, 0.4, 0.6, 0.8, 1],
    ]
    np.testing.assert_allclose(sim.t, expected, atol=1e-15)
    np.testing.assert_array_equal(sim.lengths, [3, 5, 6])
    np.testing.assert_allclose(sim.u[:, :, 0], np.exp(-np.array(expected)), rtol=1e-7)
    assert sim[1].u.shape == (5, 2)
    with pytest.raises(TypeError, match="pass saveat as an array"):
        run("jit", ens, alg, 3, saveat=0.2)


@pytest.mark.quick_cases(1)
@feature("saveat of each")
def test_saveat_of_each(name, alg, mode):
    times = jnp.array([[0.1, 0.5], [0.2, 0.6], [0.3, 1.0]])

    def prob_func(prob, ctx):
        return eo.remake(prob, saveat=times[ctx.index])

    ens = eo.EnsembleProblem(decay(), prob_func)
    by_problem = run(mode, ens, alg, 3, **TIGHT)
    by_solve = run(mode, eo.EnsembleProblem(decay()), alg, 3, saveat=times, **TIGHT)
    for sim in (by_problem, by_solve):
        np.testing.assert_allclose(sim.t, times)
        np.testing.assert_allclose(sim.u[:, :, 0], np.exp(-times), rtol=1e-7)


@pytest.mark.quick_cases(1)
@feature("known times of each")
def test_known_times_of_each(name, alg, mode):
    """A pulse for each, at another time."""
    starts = jnp.array([0.2, 0.7, 0.31])

    def prob_func(prob, ctx):
        start = starts[ctx.index]
        times = jnp.stack([jnp.array(jnp.inf), start + 0.01, start])
        return eo.remake(prob, p=start, d_discontinuities=times, tstops=times - 0.1)

    def field(u, p, t):
        return jnp.where((t > p) & (t <= p + 0.01), 100.0, 0.0) - u

    ens = eo.EnsembleProblem(eo.ODEProblem(field, [0.0], (0.0, 1.0), 0.0), prob_func)
    sim = run(mode, ens, alg, 3, **TIGHT)
    expected = 100 * (np.exp(starts + 0.01 - 1) - np.exp(starts - 1))
    np.testing.assert_allclose(sim.u[:, -1, 0], expected, **CLOSE)


@pytest.mark.quick_cases(1)
@feature("tolerance of each")
def test_tolerance_of_each(name, alg, mode):
    def prob_func(prob, ctx):
        return eo.remake(prob, reltol=jnp.array([1e-3, 1e-11])[ctx.index], abstol=1e-12)

    ens = eo.EnsembleProblem(decay(), prob_func)
    sim = run(mode, ens, alg, 2)
    error = abs(np.asarray(sim.u[:, -1, 0]) - np.exp(-1))
    assert error[0] > 1e-7
    assert error[1] < 1e-11
    assert sim.stats.naccept[1] > 2 * sim.stats.naccept[0]


@pytest.mark.quick_cases(1)
def test_parameters_of_each_and_shared(alg, mode):
    rates = jnp.array([-1.0, -2.0, -3.0])
    shared = jnp.array([1.0, 10.0])

    def prob_func(prob, ctx):
        return eo.remake(prob, p={"rate": rates[ctx.index], "shared": shared})

    prob = eo.ODEProblem(
        lambda u, p, t: p["rate"] * p["shared"] * u,
        jnp.ones(2),
        (0.0, 0.1),
        {"rate": 0.0, "shared": shared},
    )
    sim = run(mode, eo.EnsembleProblem(prob, prob_func), alg, 3, **TIGHT)
    expected = np.exp(0.1 * np.outer(rates, shared))
    np.testing.assert_allclose(sim.u[:, -1], expected, **CLOSE)


@pytest.mark.quick_cases(1)
def test_closure_of_each(alg, mode):
    """f may close over the index, too."""

    def prob_func(prob, ctx):
        return eo.remake(prob, f=lambda u, p, t: -ctx.sim_id * u)

    sim = run(mode, eo.EnsembleProblem(decay(), prob_func), alg, 3, **TIGHT)
    np.testing.assert_allclose(sim.u[:, -1, 0], np.exp([-1, -2, -3]), **CLOSE)


@pytest.mark.slow
def test_every_step(alg, mode):
    options = TIGHT if mode == "eager" else {**TIGHT, "maxiters": 64}
    sim = run(mode, ensemble(), alg, 3, save_everystep=True, **options)
    lengths = np.asarray(sim.lengths)
    np.testing.assert_array_equal(lengths, np.asarray(sim.stats.naccept) + 1)
    for i in range(3):
        t = np.asarray(sim.t)[i]
        assert t[0] == 0
        assert t[lengths[i] - 1] == 1
        assert np.isnan(t[lengths[i] :]).all()
        assert np.isnan(np.asarray(sim.u)[i, lengths[i] :]).all()
        kept = slice(0, lengths[i])
        np.testing.assert_allclose(sim.u[i, kept], exact(i + 1, t[kept])[-1], **CLOSE)
    between = jnp.array([0.05, 0.5, 0.99])
    np.testing.assert_allclose(sim(between), exact(3, between), rtol=1e-5)
    np.testing.assert_allclose(sim(0.5), exact(3, [0.5])[:, 0], rtol=1e-5)
    assert np.isnan(sim(1.5)).all()


def test_saved_components(alg, mode):
    """The same bits as those of a solve that saves all."""
    every, second = (
        run(mode, ensemble(), alg, 3, saveat=0.5, save_idxs=idxs) for idxs in (None, [1])
    )
    np.testing.assert_array_equal(second.u, every.u[..., 1:])
    np.testing.assert_array_equal(second.stats.naccept, every.stats.naccept)


@pytest.mark.quick_cases(1)
def test_every_step_needs_a_bound_inside_jit(alg):
    with pytest.raises(ValueError, match="needs maxiters"):
        run("jit", ensemble(), alg, 3, save_everystep=True)


@pytest.mark.quick_cases(1)
def test_output_func(alg, mode):
    def output_func(sol, ctx):
        return {"end": sol.u[-1], "id": ctx.sim_id, "t": sol.t[-1], "ok": sol.retcode == 1}, False

    sim = run(mode, ensemble(output_func=output_func), alg, 3, **TIGHT)
    np.testing.assert_allclose(sim.u["end"], exact(3, [1])[:, 0], **CLOSE)
    np.testing.assert_array_equal(sim.u["id"], [1, 2, 3])
    np.testing.assert_array_equal(sim.u["t"], [1, 1, 1])
    assert np.asarray(sim.u["ok"]).all()
    assert sim.t is None


@pytest.mark.quick_cases(1)
def test_output_func_of_every_step(alg):
    sim = run(
        "eager",
        ensemble(output_func=lambda sol, ctx: (sol.length, False)),
        alg,
        3,
        save_everystep=True,
    )
    np.testing.assert_array_equal(sim.u, np.asarray(sim.stats.naccept) + 1)


@pytest.mark.quick_cases(2)
def test_rerun(alg, mode):
    """Each trajectory is rerun, with its repeat counted, until it is satisfied."""

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=1.0 * ctx.repeat * prob.u0)

    def output_func(sol, ctx):
        return sol.u[0, 0], ctx.repeat < ctx.sim_id

    ens = eo.EnsembleProblem(decay(), prob_func, output_func)
    sim = run(mode, ens, alg, 4)
    np.testing.assert_array_equal(sim.u, [1.0, 2.0, 3.0, 4.0])
    assert (np.asarray(sim.retcode) == eo.ReturnCode.Success).all()
    sim = run(mode, ens, alg, 4, max_repeats=3)
    np.testing.assert_array_equal(sim.u, [1.0, 2.0, 3.0, 3.0])
    np.testing.assert_array_equal(sim.retcode, [1, 1, 1, eo.ReturnCode.Failure.value])


@pytest.mark.quick_cases(1)
def test_reduction_stops_early(alg, mode):
    def reduction(u, data, indices):
        u = u + data[:, -1, 0].sum()
        return u, indices[-1] >= 5

    ens = ensemble(reduction=reduction, u_init=jnp.array(0.0))
    sim = run(mode, ens, alg, 11, batch_size=3, **TIGHT)
    np.testing.assert_allclose(sim.u, exact(6, [1])[:, 0, 0].sum(), rtol=1e-8)
    assert sim.converged
    codes = np.asarray(sim.retcode)
    assert (codes[:6] == eo.ReturnCode.Success).all()
    # Inside jit the rest has its place; eagerly it was never made.
    assert (codes[6:] == eo.ReturnCode.Default).all()
    sim = run(mode, ens, alg, 5, batch_size=3, **TIGHT)
    np.testing.assert_allclose(sim.u, exact(5, [1])[:, 0, 0].sum(), rtol=1e-8)
    assert not sim.converged
    assert len(sim) == 5


@pytest.mark.quick_cases(1)
def test_reduction_without_u_init(alg):
    """It starts from an empty array like the data, so that SciML's append works."""
    ens = ensemble(reduction=lambda u, data, indices: (jnp.concatenate([u, data]), False))
    sim = run("eager", ens, alg, 5, batch_size=2, **TIGHT)
    np.testing.assert_allclose(sim.u, exact(5, [0, 1]), **CLOSE)
    with pytest.raises(ValueError, match="u_init is missing"):
        run("jit", ens, alg, 5, batch_size=2)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("batch_size", [slow_unless(x in (3, 100), x) for x in (1, 3, 7, 100)])
def test_batches_change_nothing(name, alg, mode, batch_size):
    whole = run(mode, ensemble(), alg, 7, saveat=0.5, **TIGHT)
    split = run(mode, ensemble(), alg, 7, saveat=0.5, batch_size=batch_size, **TIGHT)
    np.testing.assert_allclose(split.u, whole.u, **CLOSE)
    if name not in SHARED_STEPS:
        np.testing.assert_array_equal(split.stats.naccept, whole.stats.naccept)
    assert jax.tree.map(type, (split.u, split.t)) == jax.tree.map(type, (whole.u, whole.t))
    if mode == "eager":
        assert isinstance(split.u, jax.Array)
        assert isinstance(split.t, jax.Array)
        counted = (split.retcode, split.lengths, split.stats)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(counted))
        np.testing.assert_array_equal(split.u.at[0].set(0.0)[1:], split.u[1:])


@pytest.mark.quick_cases(1)
def test_keys(alg, mode):
    """A trajectory has its own key, whatever runs it and however it is split into batches."""

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=jax.random.normal(ctx.key, (2,)))

    def output_func(sol, ctx):
        return jax.random.uniform(ctx.key), False

    ens = eo.EnsembleProblem(decay(), prob_func)
    key = jax.random.key(3)
    ids = [jax.random.fold_in(jax.random.fold_in(key, i), 1) for i in range(5)]
    expected = np.stack([jax.random.normal(k, (2,)) for k in ids])
    for options in ({"key": key}, {"seed": 3}, {"seed": 3, "batch_size": 2}):
        sim = run(mode, ens, alg, 5, **options)
        # (Beside other operations XLA rounds the inverse error function otherwise.)
        np.testing.assert_allclose(sim.u[:, 0], expected, rtol=1e-15)
    other = run(mode, ens, alg, 5, seed=4)
    assert not np.allclose(other.u[:, 0], expected)
    outputs = run(mode, eo.EnsembleProblem(decay(), output_func=output_func), alg, 5, key=key)
    np.testing.assert_array_equal(outputs.u, [jax.random.uniform(k) for k in ids])


@pytest.mark.quick_cases(1)
def test_reruns_have_new_keys(alg, mode):
    def prob_func(prob, ctx):
        return eo.remake(prob, u0=jax.random.uniform(ctx.key, (1,)))

    def output_func(sol, ctx):
        return sol.u[0, 0], sol.u[0, 0] < 0.5

    sim = run(mode, eo.EnsembleProblem(decay(), prob_func, output_func), alg, 20, max_repeats=30)
    assert (np.asarray(sim.u) >= 0.5).all()
    assert len(set(np.asarray(sim.u).tolist())) == 20


@pytest.mark.quick_cases(1)
def test_prob_func_that_cannot_be_traced(alg, mode):
    calls = []

    def prob_func(prob, ctx):
        calls.append(int(ctx.index))
        u0 = prob.u0 if ctx.index % 2 else 2 * prob.u0
        return eo.remake(prob, u0=u0)

    sim = run(mode, eo.EnsembleProblem(decay(), prob_func), alg, 4, **TIGHT)
    np.testing.assert_allclose(sim.u[:, 0, 0], [2.0, 1.0, 2.0, 1.0])
    np.testing.assert_allclose(sim.u[:, 1, 0], np.array([2.0, 1.0, 2.0, 1.0]) / np.e, **CLOSE)
    assert set(calls) == set(range(4))


@pytest.mark.quick_cases(1)
def test_rerun_of_a_prob_func_that_cannot_be_traced(alg):
    def prob_func(prob, ctx):
        return eo.remake(prob, u0=float(ctx.repeat) * prob.u0)

    def output_func(sol, ctx):
        return sol.u[0, 0], ctx.repeat < ctx.sim_id

    ens = eo.EnsembleProblem(decay(), prob_func, output_func)
    np.testing.assert_array_equal(run("eager", ens, alg, 3).u, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="prob_func can't be traced"):
        run("jit", ens, alg, 3)


@pytest.mark.quick_cases(1)
def test_only_numbers_of_output_func_vary(alg, mode):
    ens = eo.EnsembleProblem(
        decay(), output_func=lambda sol, ctx: (sol.u[-1, 0] * ctx.index, False)
    )
    sim = run(mode, ens, alg, 3, **TIGHT)
    np.testing.assert_allclose(sim.u, np.arange(3) / np.e, **CLOSE)


@pytest.mark.quick_cases(1)
def test_retcodes(name, alg, mode):
    """A bad trajectory gets its code, and the others their untouched answers.

    u' = p u^2 blows up at t = 1/(p u0); a stiff linear one takes too many steps; a NaN stays one.
    """
    p = jnp.array([-1.0, 2.0, -1.0, -1e5, -0.5])
    u0 = jnp.array([1.0, 1.0, jnp.nan, 1.0, 1.0])

    def f(u, p, t):
        return jnp.where(p < -1e3, p * (u - jnp.cos(t)), p * u**2)

    def prob_func(prob, ctx):
        return eo.remake(prob, p=p[ctx.index], u0=u0[ctx.index][None])

    ens = eo.EnsembleProblem(eo.ODEProblem(f, jnp.array([1.0]), (0.0, 1.0), 1.0), prob_func)
    sim = run(mode, ens, alg, 5, maxiters=3000, saveat=[0.25, 1.0], **TIGHT)
    codes = [eo.ReturnCode(c).name for c in np.asarray(sim.retcode)]
    if name in SHARED_STEPS:
        assert codes == ["Unstable"] * 5
        assert np.isnan(sim.u).all()
        return
    assert codes == ["Success", "Unstable", "Unstable", "MaxIters", "Success"]
    np.testing.assert_array_equal(sim.lengths, [2, 1, 0, 0, 2])
    np.testing.assert_allclose(sim.u[0, :, 0], 1 / (1 + np.array([0.25, 1.0])), rtol=1e-7)
    np.testing.assert_allclose(sim.u[4, :, 0], 1 / (1 + np.array([0.125, 0.5])), rtol=1e-7)
    np.testing.assert_allclose(sim.u[1, 0, 0], 2.0, rtol=1e-7)
    assert np.isnan(sim.u[1, 1, 0])
    assert np.isnan(sim.u[2:4]).all()
    alone = run(mode, ens, alg, 1, maxiters=3000, saveat=[0.25, 1.0], **TIGHT)
    np.testing.assert_array_equal(alone.u[0], sim.u[0])
    if mode == "eager":
        np.testing.assert_array_equal(sim.failed, [1, 2, 3])


@pytest.mark.quick_cases(5)
def test_retcodes_with_a_fixed_step(name, alg, mode):
    p = jnp.array([-1.0, 50.0, -1.0])
    u0 = jnp.array([1.0, 10.0, jnp.nan])

    def prob_func(prob, ctx):
        return eo.remake(prob, p=p[ctx.index], u0=u0[ctx.index][None])

    prob = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.array([1.0]), (0.0, 1.0), 1.0)
    sim = run(mode, eo.EnsembleProblem(prob, prob_func), alg, 3, solver=eo.Euler(), dt=0.01)
    codes = [eo.ReturnCode(c).name for c in np.asarray(sim.retcode)]
    if name in SHARED_STEPS:
        assert codes == ["Unstable"] * 3
        return
    assert codes == ["Success", "Unstable", "Unstable"]
    assert abs(sim.u[0, -1, 0] - 0.5) < 1e-2
    assert np.isnan(sim.u[1:, -1]).all()
    sim = run(mode, eo.EnsembleProblem(decay()), alg, 2, solver=eo.Euler(), dt=0.01, maxiters=50)
    assert (np.asarray(sim.retcode) == eo.ReturnCode.MaxIters).all()


@feature("max_norm")
def test_max_norm(name, alg, mode):
    """Each has its own limit, and no derivative where it ends there."""
    limits = jnp.array([jnp.inf, 2.0, 40.0, 1e30])
    prob = eo.ODEProblem(linear, jnp.ones(2), (0.0, 5.0), jnp.array(1.0))

    def prob_func(prob, ctx):
        return eo.remake(prob, max_norm=limits[ctx.index])

    def ends(scale):
        ens = eo.EnsembleProblem(eo.remake(prob, u0=scale * prob.u0), prob_func)
        sim = run(mode, ens, alg, 4, saveat=[0.5, 2.0, 4.9], **TIGHT)
        return jnp.where(jnp.isnan(sim.u), 0.0, sim.u)[..., 0].sum(), sim

    if mode == "jit":
        slope, sim = jax.grad(ends, has_aux=True)(1.0)
        np.testing.assert_allclose(slope, 2 * np.exp([0.5, 2, 4.9]).sum(), rtol=1e-8)
    else:
        _, sim = ends(1.0)
    codes = [eo.ReturnCode(c).name for c in np.asarray(sim.retcode)]
    assert codes == ["Success", "Diverged", "Diverged", "Success"]
    np.testing.assert_array_equal(sim.lengths, [3, 1, 2, 3])
    expected = np.where([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], np.exp([0.5, 2, 4.9]), np.nan)
    np.testing.assert_allclose(sim.u[..., 0], expected, rtol=1e-8)


@pytest.mark.quick_cases(1)
def test_throw(alg):
    prob = eo.ODEProblem(lambda u, p, t: u**2, jnp.array([1.0]), (0.0, 2.0))
    ens = eo.EnsembleProblem(prob)
    with pytest.raises(eo.EnsembleError, match=r"Unstable 3 \[0, 1, 2\]") as caught:
        run("eager", ens, alg, 3, throw=True)
    assert caught.value.solution.u.shape == (3, 2, 1)
    assert (run("eager", ensemble(), alg, 3, throw=True).retcode == eo.ReturnCode.Success).all()
    with pytest.raises(ValueError, match="throw=True can't work inside jit"):
        run("jit", ens, alg, 3, throw=True)


@pytest.mark.quick_cases(1)
def test_progress(alg, capfd):
    run("eager", ensemble(), alg, 4, batch_size=2, progress=True)
    assert "4/4" in capfd.readouterr().err
    with pytest.raises(ValueError, match="progress=True can't work inside jit"):
        run("jit", ensemble(), alg, 4, progress=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("which", ["tspan", "saveat"])
def test_vmap_over_times(alg, which):
    """Times that all trajectories share, and that differ along the mapped axis."""

    def solved(times):
        tspan = (0.0, times[-1] if which == "tspan" else 2.0)
        ens = eo.EnsembleProblem(eo.remake(decay(), tspan=tspan), scaled)
        saved = {"saveat": times} if which == "saveat" else {}
        sim = solve(ens, None, alg, trajectories=3, **saved, **TIGHT)
        return sim.t, sim.u[:, :, 0]

    times = jnp.array([[0.0, 0.5], [0.0, 1.5]])
    t, u = jax.vmap(solved)(times)
    np.testing.assert_array_equal(t, times)
    expected = np.exp(-times)[:, None, :] * np.array([1.0, 2.0, 3.0])[:, None]
    np.testing.assert_allclose(u, expected, **CLOSE)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_gradient(alg, mode, batch_size):
    """d/dp and d/du0 of the sum of all ends, against the closed form."""

    def loss(p, u0):
        ens = eo.EnsembleProblem(eo.ODEProblem(linear, u0, (0.0, 1.0), p), scaled)
        sim = solve(ens, eo.Tsit5(), alg, trajectories=3, batch_size=batch_size, **TIGHT)
        return sim.u[:, -1].sum()

    grad = jax.grad(loss, argnums=(0, 1))
    if mode == "jit":
        grad = jax.jit(grad)
    dp, du0 = grad(jnp.array(-1.0), jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(dp, 6 * 3 / np.e, rtol=1e-7)
    np.testing.assert_allclose(du0, [6 / np.e, 6 / np.e], rtol=1e-7)


@pytest.mark.quick_cases(1)
def test_gradient_through_outputs_and_reduction(alg):
    def loss(p):
        ens = eo.EnsembleProblem(
            eo.remake(decay(), p=p),
            scaled,
            lambda sol, ctx: (sol.u[-1, 0] ** 2, False),
            lambda u, data, indices: (u + data.sum(), False),
            jnp.array(0.0),
        )
        return solve(ens, None, alg, trajectories=3, batch_size=2, **TIGHT).u

    np.testing.assert_allclose(jax.grad(loss)(jnp.array(-1.0)), 14 * 2 * np.exp(-2), rtol=1e-7)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_serial_is_each_problem_alone(engine):
    """Bit for bit."""
    prob = eo.ODEProblem(
        lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 3.0), jnp.array([1.5, 1.0, 3.0, 1.0])
    )

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=jnp.exp(0.1 * ctx.sim_id / 7) * prob.u0 + 0.3)

    ens = eo.EnsembleProblem(prob, prob_func)
    sim = run("eager", ens, eo.EnsembleSerial(), 5, saveat=0.5, engine=engine)
    for i in range(5):
        made = prob_func(prob, eo.EnsembleContext(i, 1, jax.random.key(0)))
        sol = eo.solve(made, eo.Tsit5(), saveat=0.5, engine=engine)
        np.testing.assert_array_equal(sol.u, sim[i].u)
        assert sol.stats.naccept == sim[i].stats.naccept


@pytest.mark.quick_cases(1)
def test_tolerances_of_components(name, alg):
    def steps(tolerance):
        sim = run("eager", ensemble(), alg, 3, abstol=tolerance, reltol=tolerance)
        return np.asarray(sim.stats.naccept)

    mixed = steps(jnp.array([1e-3, 1e-9]))
    assert np.all(steps(1e-3) < mixed)
    assert np.all(mixed <= steps(1e-9))
    np.testing.assert_array_equal(steps(jnp.array([1e-6, 1e-6])), steps(1e-6))


class Pendulum(NamedTuple):
    angle: Any
    speed: Any


def swinging(length):
    def f(u, p, t):
        return Pendulum(u.speed, -jnp.sin(u.angle) / p)

    return eo.ODEProblem(f, Pendulum(jnp.array([0.5, 1.0]), jnp.zeros(2)), (0.0, 2.0), length)


def swinging_as_array(length):
    def f(u, p, t):
        return jnp.concatenate([u[2:], -jnp.sin(u[:2]) / p])

    return eo.ODEProblem(f, jnp.array([0.5, 1.0, 0.0, 0.0]), (0.0, 2.0), length)


@pytest.mark.quick_cases(1)
def test_a_state_that_is_a_pytree(name, alg):
    """The same numbers as of the array with its components, in its structure."""

    def found(make):
        ens = eo.EnsembleProblem(
            make(1.0), lambda prob, ctx: eo.remake(prob, p=ctx.sim_id * prob.p)
        )
        return run("eager", ens, alg, 3, saveat=0.5, **TIGHT)

    tree, array = found(swinging), found(swinging_as_array)
    assert isinstance(tree.u, Pendulum)
    assert tree.u.angle.shape == (3, 5, 2)
    both = jnp.concatenate([tree.u.angle, tree.u.speed], axis=-1)
    np.testing.assert_allclose(both, array.u, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(tree.t, array.t)


#
# Events: state i rises with the slope of its trajectory, 1, 5/4, 3/2, ...
#


def slopes(n):
    return 1 + np.arange(n) / 4


def restarted(integrator, *mask):
    return eo.remake(integrator, u=0.0 * integrator.u)


def reaches(level):
    return lambda u, t, integrator: u[0] - level


def begins_anew(integrator, mask):
    """Where it reaches one; it falls by 1/16 at t = 2.2."""
    u = integrator.u
    return eo.remake(integrator, u=jnp.where(mask[0] == 1, 0.0 * u, u - 1 / 16))


CALLBACKS = {
    "continuous": eo.ContinuousCallback(reaches(1.0), restarted),
    "vector": eo.VectorContinuousCallback(
        lambda u, t, integrator: jnp.stack([u[0] - 1.0, t - 2.2]), begins_anew, 2
    ),
    "terminal": eo.CallbackSet(
        eo.ContinuousCallback(reaches(3.1), eo.terminate),
        eo.ContinuousCallback(reaches(2.0), lambda integrator: integrator),
    ),
    "discrete": eo.DiscreteCallback(lambda u, t, integrator: u[0] > 0.95, restarted),
    "parameters": eo.ContinuousCallback(
        reaches(1.5), lambda integrator: eo.remake(integrator, p=-integrator.p)
    ),
}


def rising(kind, n, **parts):
    how = {"dt": 0.1, "adaptive": False} if kind == "discrete" else {}
    prob = eo.ODEProblem(
        lambda u, p, t: p + 0.0 * u, jnp.zeros(1), (0.0, 3.9), jnp.array(1.0), **how
    )
    prob = eo.remake(prob, callback=CALLBACKS[kind])

    def prob_func(prob, ctx):
        return eo.remake(prob, p=parts.get("scale", 1.0) * jnp.asarray(slopes(n))[ctx.index])

    return eo.EnsembleProblem(prob, prob_func)


def expected_events(kind, slope):
    """Their times, and the state at the end."""
    end = 3.9
    if kind == "continuous":
        times = np.arange(1, int(end * slope + 1e-9) + 1) / slope
        return times, slope * (end - times[-1])
    if kind == "vector":
        times, t, u = [], 0.0, 0.0
        while True:
            up = t + (1 - u) / slope
            cut = 2.2 if t < 2.2 <= min(up, end) else np.inf
            if min(up, cut) > end:
                return np.array(times), u + slope * (end - t)
            u = 0.0 if up < cut else u + slope * (cut - t) - 1 / 16
            t = min(up, cut)
            times.append(t)
    if kind == "terminal":
        return np.array([2.0, 3.1]) / slope, 3.1
    if kind == "parameters":
        return np.array([1.5 / slope]), 1.5 - slope * (end - 1.5 / slope)
    times, u = [], 0.0
    for i in range(1, 40):
        u += 0.1 * slope
        if u > 0.95:
            times.append(0.1 * i)
            u = 0.0
    return np.array(times), u


CORRECTIONS = {
    "manifold": eo.ManifoldProjection(lambda u, p, t: u[0] - p * t - jnp.sin(t)),
    "positive": eo.PositiveDomain(),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [slow_unless(x == "manifold", x) for x in CORRECTIONS])
@feature("callback")
def test_corrections(name, alg, mode, kind):
    """Of a second component that falls to zero and stays there, and a first one that is on a
    curve; with gradients by the slopes."""

    def f(u, p, t):
        return jnp.stack([p + jnp.cos(t), -jnp.exp(4 * p - 4) * jnp.where(u[1] > 0, 1.0, 0.0)])

    def solved(scale, n=3):
        how = {"callback": CORRECTIONS[kind], "dtmax": 0.2}
        prob = eo.ODEProblem(f, jnp.array([0.0, 1.0]), (0.0, 2.0), 1.0, **how)

        def prob_func(prob, ctx):
            return eo.remake(prob, p=scale * jnp.asarray(slopes(n))[ctx.index])

        return run(mode, eo.EnsembleProblem(prob, prob_func), alg, n, save_start=False)

    ends = np.asarray(solved(1.0).u[:, -1])
    curve = 2 * slopes(3) + np.sin(2.0)
    np.testing.assert_allclose(ends[:, 0], curve, rtol=1e-14 if kind == "manifold" else 1e-5)
    if kind == "positive":
        np.testing.assert_array_equal(ends[:, 1], 0.0)
    if mode == "jit" and not refused(name, "gradient through callbacks"):
        slope = jax.grad(lambda x: jnp.sum(solved(x).u[:, -1, 0]))(1.0)
        np.testing.assert_allclose(slope, 2 * slopes(3).sum(), rtol=1e-5)


@pytest.mark.slow
def test_saved_functions(name, alg, mode):
    def solved(scale, n=3):
        saving = eo.SavingCallback(lambda u, p, t: {"rate": p * u, "time": t})
        prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.ones(1), (0.0, 1.0), 1.0, callback=saving)

        def prob_func(prob, ctx):
            return eo.remake(prob, p=scale * jnp.asarray(slopes(n))[ctx.index])

        return run(mode, eo.EnsembleProblem(prob, prob_func), alg, n, saveat=0.5, **TIGHT)

    sim, rates = solved(1.0), slopes(3)[:, None]
    decayed = np.exp(-rates * np.array([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(sim.saved.values["rate"][..., 0], rates * decayed, rtol=1e-8)
    np.testing.assert_array_equal(sim.saved.values["time"], [[0.0, 0.5, 1.0]] * 3)
    if mode == "jit":
        slope = jax.grad(lambda x: jnp.sum(solved(x).saved.values["rate"][:, -1]))(1.0)
        end = rates[:, 0] * decayed[:, -1]
        np.testing.assert_allclose(slope, (end * (1 - rates[:, 0])).sum(), rtol=1e-7)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", CALLBACKS)
@feature("callback")
def test_callbacks(name, alg, mode, kind):
    n = 3
    ens = rising(kind, n)
    sim = run(mode, ens, alg, n, save_start=False, **TIGHT)
    for i, slope in enumerate(slopes(n)):
        times, end = expected_events(kind, slope)
        count = int(sim.events.count[i])
        assert count == len(times)
        np.testing.assert_allclose(sim.events.t[i, :count], times, rtol=1e-13)
        assert np.isnan(sim.events.t[i, count:]).all()
        np.testing.assert_allclose(sim.u[i, -1, 0], end, rtol=1e-12)
    code = eo.ReturnCode.Terminated if kind == "terminal" else eo.ReturnCode.Success
    assert (np.asarray(sim.retcode) == code).all()
    assert not np.asarray(sim.failed).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLBACKS)
def test_callbacks_in_batches_under_vmap_and_beside_failures(name, alg, kind):
    if refused(name, "callback"):
        return
    n, how = 7, {"saveat": 0.5, **TIGHT}
    ens = rising(kind, n)
    whole = run("eager", ens, alg, n, **how)
    split = run("eager", ens, alg, n, batch_size=3, **how)
    np.testing.assert_array_equal(split.u, whole.u)
    np.testing.assert_array_equal(split.events.t, whole.events.t)

    def prob_func(prob, ctx):
        made = ens.prob_func(prob, ctx)
        return eo.remake(made, p=jnp.where(ctx.index == 2, jnp.nan, made.p))

    beside = run("eager", eo.EnsembleProblem(ens.prob, prob_func), alg, n, **how)
    others = np.arange(n) != 2
    assert list(np.flatnonzero(np.asarray(beside.retcode) == eo.ReturnCode.Unstable)) == [2]
    np.testing.assert_array_equal(np.asarray(beside.u)[others], np.asarray(whole.u)[others])
    most = whole.events.t.shape[1]
    np.testing.assert_array_equal(
        np.asarray(beside.events.t)[others, :most], np.asarray(whole.events.t)[others]
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", [slow_unless(x == "eager", x) for x in ("eager", "jit")])
@pytest.mark.parametrize("how", ["outputs", "reruns", "a sum"])
def test_outputs_and_reductions_see_events(name, alg, how, mode):
    """All of them, although some have more than there is room for at first, in batches."""
    if refused(name, "callback"):
        return
    n = 5
    turns = eo.ContinuousCallback(lambda u, t, i: jnp.sin(i.p * t + 0.1), lambda x: x)

    def prob_func(prob, ctx):
        return eo.remake(prob, p=(4.0 + 3.0 * ctx.index) * ctx.repeat)

    def output_func(sol, ctx):
        again = (ctx.index % 2 == 0) & (ctx.repeat < 2) if how == "reruns" else False
        return {"count": sol.events.count, "sum": jnp.nansum(sol.events.t)}, again

    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1), (0.0, 4.0), 1.0, callback=turns)
    reduction = eo.sum_reduction if how == "a sum" else None
    ens = eo.EnsembleProblem(prob, prob_func, output_func, reduction)
    options = {"max_events": 48} if mode == "jit" else {}
    sim = run(mode, ens, alg, n, batch_size=2, **TIGHT, **options)
    rates = (4.0 + 3.0 * np.arange(n)) * np.where(np.arange(n) % 2, 1, 1 + (how == "reruns"))
    times = [(np.pi * np.arange(1, 1000) - 0.1) / rate for rate in rates]
    counts = np.array([(t < 4.0).sum() for t in times])
    sums = np.array([t[t < 4.0].sum() for t in times])
    assert counts.max() > 16 > counts.min()
    if how == "a sum":
        counts, sums = counts.sum(), sums.sum()
    np.testing.assert_array_equal(sim.u["count"], counts)
    np.testing.assert_allclose(sim.u["sum"], sums, rtol=1e-12)
    assert not np.asarray(sim.failed).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLBACKS)
def test_gradient_through_callbacks(name, alg, kind):
    """By the slopes: of the times of events, and of the ends."""
    if refused(name, "callback") or kind == "discrete":
        return
    n = 3

    def found(scale):
        sim = run("jit", rising(kind, n, scale=scale), alg, n, save_start=False, **TIGHT)
        return jnp.nansum(sim.events.t), jnp.sum(sim.u[:, -1])

    if error := refused(name, "gradient through callbacks"):
        with error:
            jax.grad(lambda x: found(x)[1])(1.0)
        return

    def expected(scale):
        each = [expected_events(kind, scale * slope) for slope in slopes(n)]
        return np.array([sum(t.sum() for t, _ in each), sum(end for _, end in each)])

    step = 1e-6
    differences = (expected(1 + step) - expected(1 - step)) / (2 * step)
    got = jnp.stack([jax.grad(lambda x, i=i: found(x)[i])(1.0) for i in range(2)])
    np.testing.assert_allclose(got, differences, rtol=1e-7, atol=1e-7)
