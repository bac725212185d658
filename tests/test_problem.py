"""Problems, their copies, and how a prob_func is called."""

import functools
import inspect
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import ensembleode as eo
from ensembleode.ground.logs import log_once
from ensembleode.problem.options import DEFAULTS, resolve

from .marks import slow_unless
from .problems import decay, linear


def context(index=2, repeat=1):
    return eo.EnsembleContext(index, repeat, jax.random.key(7))


#
# ODEProblem and remake
#


@pytest.mark.parametrize(
    "u0",
    [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0]), [np.float64(1), 2], [[1.0], [2.0]]],
    ids=["list", "tuple", "numpy", "mixed", "nested"],
)
def test_u0_becomes_an_array(u0):
    prob = eo.ODEProblem(linear, u0, (0.0, 1.0))
    assert isinstance(prob.u0, jax.Array)
    assert prob.u0.dtype == np.float64
    np.testing.assert_array_equal(prob.u0.ravel(), [1.0, 2.0])


def test_u0_of_a_number():
    prob = eo.ODEProblem(linear, 1.5, (0.0, 1.0))
    assert prob.u0.shape == ()
    assert prob.u0 == 1.5


@pytest.mark.parametrize("u0", [1.5, jnp.asarray(1.5), np.float64(1.5)])
def test_u0_has_no_weak_type(u0):
    """Else its dtype would depend on what it is combined with."""
    assert not eo.ODEProblem(linear, u0, (0.0, 1.0)).u0.weak_type


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64, np.complex128])
def test_u0_keeps_its_dtype_and_shape(dtype):
    u0 = np.ones((2, 3), dtype)
    prob = eo.ODEProblem(linear, u0, (0.0, 1.0))
    assert prob.u0.dtype == dtype
    assert prob.u0.shape == (2, 3)


def test_p_and_tspan_stay_as_they_are():
    p = {"rate": 2, "name": "linear", "table": np.arange(3)}
    prob = eo.ODEProblem(linear, 1.0, (1, 0), p)
    assert prob.p is p
    assert prob.tspan == (1, 0)
    assert eo.ODEProblem(linear, 1.0, (0.0, 1.0)).p is None


def test_remake_changes_what_it_is_given():
    prob = decay(saveat=0.1, abstol=1e-9)
    new = eo.remake(prob, u0=[3.0], tspan=(0.0, 2.0), saveat=0.5, maxiters=10)
    np.testing.assert_array_equal(new.u0, [3.0])
    assert new.tspan == (0.0, 2.0)
    assert new.options == {"saveat": 0.5, "abstol": 1e-9, "maxiters": 10}
    assert new.f is prob.f
    assert new.p is prob.p
    np.testing.assert_array_equal(prob.u0, [1.0, 2.0])
    assert prob.tspan == (0.0, 1.0)
    assert prob.options == {"saveat": 0.1, "abstol": 1e-9}


def test_none_takes_an_option_away():
    prob = decay(saveat=0.1, abstol=1e-9)
    assert eo.remake(prob, saveat=None).options == {"abstol": 1e-9}
    assert eo.remake(prob, saveat=None, save_everystep=None, abstol=None).options == {}
    np.testing.assert_array_equal(eo.solve(eo.remake(prob, saveat=None)).t, [0.0, 1.0])


def test_remake_of_f_and_p():
    def other(u, p, t):
        return u

    new = eo.remake(decay(), f=other, p=None)
    assert new.f is other
    assert new.p is None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("p", "rows", "read"),
    [
        (-1.0, lambda x: x, lambda p: p),
        (None, lambda x: x, lambda p: p),
        ([-1.0, 2.0], lambda x: [[float(y), 2.0] for y in x], lambda p: p[0]),
        (
            {"k": -1.0, "n": 2, "kind": "slow"},
            lambda x: {"k": x, "n": 2, "kind": "slow"},
            lambda p: p["k"],
        ),
        ((np.ones((2, 2)), -1.0), lambda x: (np.ones((2, 2)), x), lambda p: p[1]),
        ({"k": -1.0}, lambda x: {"k": pd.Series(x, [7, 8, 9])}, lambda p: p["k"]),
        ({"k": -1.0}, lambda x: dict(pd.DataFrame({"k": x}, [2, 1, 0])), lambda p: p["k"]),
        ([-1.0, 2.0], lambda x: pd.DataFrame({"k": x, "n": 2.0}, [7, 8, 9]), lambda p: p[0]),
    ],
    ids=["number", "none", "list", "dict", "tuple", "series", "columns", "frame"],
)
def test_rows_for_each_trajectory(p, rows, read):
    """They are the trajectories of a `prob_func` that picks them."""
    rates, starts = np.array([-1.0, -2.0, 0.5]), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    prob = eo.ODEProblem(lambda u, p, t: read(p) * u, starts[0], (0.0, 1.0), p)
    ens = eo.EnsembleProblem(prob, u0=starts, p=rows(rates))
    sim = eo.solve(ens, abstol=1e-8, reltol=1e-8)
    wanted = starts * np.exp(rates)[:, None]
    np.testing.assert_allclose(sim.u[:, -1], wanted, rtol=1e-6)
    fewer = eo.solve(ens, trajectories=2)
    assert len(fewer) == 2
    again = eo.remake(ens, u0=2.0 * starts, prob=eo.remake(prob, tspan=(0.0, 2.0)))
    sim = eo.solve(again, abstol=1e-8, reltol=1e-8)
    np.testing.assert_allclose(sim.u[:, -1], 2 * starts * np.exp(2 * rates)[:, None], rtol=1e-6)


def test_rows_before_a_prob_func_and_their_gradients():
    prob = eo.ODEProblem(lambda u, p, t: {"a": p["k"] * u["a"]}, {"a": 1.0}, (0.0, 1.0), {"k": 1.0})

    def end(starts, rates):
        ens = eo.EnsembleProblem(
            prob,
            lambda prob, ctx: eo.remake(prob, u0={"a": ctx.sim_id * prob.u0["a"]}),
            u0={"a": starts},
            p={"k": rates},
        )
        return eo.solve(ens, abstol=1e-9, reltol=1e-9).u["a"][:, -1].sum()

    starts, rates = jnp.array([1.0, 2.0]), jnp.array([0.5, -0.5])
    for transform in (jax.grad, lambda *a: jax.jit(jax.grad(*a))):
        by_start, by_rate = transform(end, (0, 1))(starts, rates)
        np.testing.assert_allclose(by_start, np.array([1.0, 2.0]) * np.exp(rates), rtol=1e-6)
        np.testing.assert_allclose(by_rate, np.array([1.0, 4.0]) * np.exp(rates), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_a_list_of_numbers_in_p_is_an_array(dtype):
    u0 = np.ones(2, dtype)
    real = np.finfo(dtype).dtype

    def of(p):
        return eo.ODEProblem(lambda u, p, t: u, u0, (0.0, 1.0), p).p

    for p in ([1.5, 1.0], [10, 28, 8 / 3], [[1.0, 2.0], [3.0, 4.0]], [np.float32(1.0), 2.0]):
        array = of(p)
        assert isinstance(array, jax.Array)
        assert array.dtype == (np.float32 if isinstance(p[0], np.float32) else real)
        np.testing.assert_allclose(array, np.array(p), rtol=1e-6)
    assert jnp.issubdtype(of([1, 2]).dtype, jnp.integer)
    assert of([1j, 1.0]).dtype == np.result_type(real, np.complex64)
    inside = of({"k": [1.0, 2.0], "more": ([3.0], "name", [4.0, "x"])})
    assert isinstance(inside["k"], jax.Array)
    assert isinstance(inside["more"][0], jax.Array)
    for p in ((1.5, 1.0), [True, 1.0], ["a", "b"], [], [None], [[1.0], [1.0, 2.0]][:0], 1.5):
        assert of(p) is p
    ragged = of([[1.0], [1.0, 2.0]])
    assert isinstance(ragged, list)
    np.testing.assert_array_equal(ragged[1], [1.0, 2.0])


@pytest.mark.slow
def test_a_list_of_traced_numbers_in_p_is_an_array():
    def end(a):
        prob = eo.ODEProblem(lambda u, p, t: p[0] * u, [1.0], (0.0, 1.0), [a, 2.0])
        return eo.solve(eo.remake(prob, p=prob.p * 2.0), abstol=1e-9, reltol=1e-9).u[-1, 0]

    np.testing.assert_allclose(jax.grad(end)(0.5), 2 * np.exp(1.0), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(end))(0.5), 2 * np.exp(1.0), rtol=1e-6)


def test_an_affect_may_give_p_as_a_list():
    half = eo.PresetTimeCallback([0.5], lambda i: eo.remake(i, p=[2.0, 1.0]))
    prob = eo.ODEProblem(lambda u, p, t: p[0] * jnp.ones_like(u), [0.0], (0.0, 1.0), [1.0, 1.0])
    np.testing.assert_allclose(eo.solve(prob, callback=half).u[-1], [1.5], rtol=1e-6)


def test_remake_without_changes_is_equal():
    prob = decay(saveat=0.1)
    new = eo.remake(prob)
    assert new is not prob
    assert new.options == prob.options
    assert jax.tree.structure(new) == jax.tree.structure(prob)
    assert all(map(np.array_equal, jax.tree.leaves(new), jax.tree.leaves(prob)))


def test_a_problem_is_a_pytree():
    """Its numbers are leaves: it can be mapped over, and be an argument of a jitted function."""
    prob = eo.remake(decay(abstol=1e-9), f=jax.tree_util.Partial(linear))
    doubled = jax.jit(lambda prob: jax.tree.map(lambda x: 2 * x, prob))(prob)
    np.testing.assert_array_equal(doubled.u0, [2.0, 4.0])
    assert doubled.p == -2.0
    assert doubled.tspan == (0.0, 2.0)
    assert doubled.options == {"abstol": 2e-9}


def test_tspan_of_arrays_inside_a_trace(caplog):
    """There, JAX's comparison of two numbers is no boolean."""
    ts = jnp.linspace(0.0, 1.0, 5)
    u0s = jnp.arange(1.0, 5.0)[:, None]
    prob = eo.ODEProblem(lambda u, p, t: -u, u0s[0], (ts[0], ts[-1]))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0s[ctx.index]))
    sim = eo.solve(ens, trajectories=4, abstol=1e-9, reltol=1e-9)
    np.testing.assert_allclose(sim.u[:, -1], u0s * np.exp(-1), rtol=1e-7)
    assert not caplog.records
    point = eo.ODEProblem(lambda u, p, t: -u, u0s[0], (ts[1], ts[1]))
    np.testing.assert_array_equal(eo.solve(point).u, np.stack([u0s[0]] * 2))


def test_options_of_solve_win_over_those_of_the_problem_over_the_defaults():
    options = resolve({"saveat": 0.1, "abstol": 1e-9}, {"abstol": 1e-4, "saveat": None})
    assert options["saveat"] == 0.1
    assert options["abstol"] == 1e-4
    assert options["reltol"] == DEFAULTS["reltol"] == 1e-3
    assert options["maxiters"] == DEFAULTS["maxiters"] == 100_000


def test_an_option_may_be_switched_off():
    assert resolve({"save_everystep": True}, {"save_everystep": False})["save_everystep"] is False
    assert resolve({"save_start": True}, {"save_start": False})["save_start"] is False


@pytest.mark.parametrize(
    ("problem", "solve", "given"),
    [({}, {}, False), ({"maxiters": 5}, {}, True), ({}, {"maxiters": 5}, True)],
)
def test_whether_maxiters_was_given_is_known(problem, solve, given):
    assert resolve(problem, solve)["maxiters_given"] is given


def test_options_kept_with_the_problem_are_used():
    prob = decay(saveat=[0.25, 0.5])
    np.testing.assert_array_equal(eo.solve(prob).t, [0.25, 0.5])
    np.testing.assert_array_equal(eo.solve(prob, saveat=[0.1, 0.9]).t, [0.1, 0.9])


def test_types_of_solutions_are_known():
    """To type checkers, which check this file."""
    prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
    sol = assert_type(eo.solve(prob, eo.Tsit5(), saveat=0.5), eo.ODESolution)
    ens = assert_type(eo.remake(eo.EnsembleProblem(prob), u0=[[1.0], [2.0]]), eo.EnsembleProblem)
    sim = assert_type(eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial()), eo.EnsembleSolution)
    assert len(sol) == 3
    assert len(sim) == 2


def test_context():
    ctx = context(index=2, repeat=3)
    assert (ctx.index, ctx.sim_id, ctx.repeat) == (2, 3, 3)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 2), 3)
    assert ctx.key == key


#
# The two forms of prob_func
#


class Callable:
    def __call__(self, prob, ctx):
        return eo.remake(prob, u0=ctx.sim_id * prob.u0)

    def method(self, prob, ctx):
        return self(prob, ctx)


class CallableWithIndex:
    def __call__(self, prob, i, repeat):
        return eo.remake(prob, u0=i * repeat * prob.u0)

    def method(self, prob, i, repeat):
        return self(prob, i, repeat)


def by_context(prob, ctx):
    return eo.remake(prob, u0=ctx.sim_id * prob.u0)


def by_index(prob, i, repeat):
    return eo.remake(prob, u0=i * repeat * prob.u0)


def scaled_by_context(scale, prob, ctx):
    return by_context(prob, ctx)


def scaled_by_index(scale, prob, i, repeat):
    return by_index(prob, i, repeat)


CONTEXT_FORMS = {
    "function": by_context,
    "lambda": lambda prob, ctx: by_context(prob, ctx),
    "one default": lambda prob, ctx, scale=2.0: by_context(prob, ctx),
    "two defaults": lambda prob, ctx, scale=2.0, shift=0.0: by_context(prob, ctx),
    "default context": lambda prob, ctx=None: by_context(prob, ctx),
    "keyword only": lambda prob, ctx, *, scale=2.0: by_context(prob, ctx),
    "keywords": lambda prob, ctx, **options: by_context(prob, ctx),
    "any": lambda *args: by_context(*args),
    "problem and any": lambda prob, *args: by_context(prob, *args),
    "positional only": lambda prob, ctx, /: by_context(prob, ctx),
    "partial": functools.partial(scaled_by_context, 2.0),
    "partial by keyword": functools.partial(
        lambda prob, ctx, scale: by_context(prob, ctx), scale=2.0
    ),
    "callable": Callable(),
    "method": Callable().method,
    "wrapped": functools.wraps(by_context)(lambda *args: by_context(*args)),
    "pytree": jax.tree_util.Partial(by_context),
}
INDEX_FORMS = {
    "function": by_index,
    "lambda": lambda prob, i, repeat: by_index(prob, i, repeat),
    "default": lambda prob, i, repeat, scale=2.0: by_index(prob, i, repeat),
    "any more": lambda prob, i, repeat, *args: by_index(prob, i, repeat),
    "partial": functools.partial(scaled_by_index, 2.0),
    "callable": CallableWithIndex(),
    "method": CallableWithIndex().method,
}


@pytest.mark.parametrize("prob_func", CONTEXT_FORMS.values(), ids=CONTEXT_FORMS)
def test_form_with_a_context(prob_func):
    made = eo.EnsembleProblem(decay(), prob_func).make(context(index=2))
    np.testing.assert_array_equal(made.u0, [3.0, 6.0])


@pytest.mark.parametrize("prob_func", INDEX_FORMS.values(), ids=INDEX_FORMS)
def test_form_with_an_index(prob_func):
    """The index counts from 0."""
    ens = eo.EnsembleProblem(decay(), prob_func)
    np.testing.assert_array_equal(ens.make(context(index=0)).u0, [0.0, 0.0])
    np.testing.assert_array_equal(ens.make(context(index=2, repeat=3)).u0, [6.0, 12.0])


def test_a_builtin_is_given_a_context():
    """It has no signature to tell. (This one can't compare the two that it is called with.)"""
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)
    ens = eo.EnsembleProblem(decay(), max)
    with pytest.raises(TypeError, match="'EnsembleContext' and 'ODEProblem'"):
        ens.make(context())


def test_counting_from_0_is_logged_once(caplog):
    log_once.cache_clear()
    ens = eo.EnsembleProblem(decay(), by_index)
    for index in range(3):
        ens.make(context(index))
    eo.EnsembleProblem(decay(), lambda prob, i, repeat: prob).make(context())
    (record,) = caplog.records
    assert record.name == "ensembleode"
    assert "counted from 0" in record.message
    assert "ctx.sim_id" in record.message


def test_the_form_with_a_context_logs_nothing(caplog):
    log_once.cache_clear()
    eo.EnsembleProblem(decay(), by_context).make(context())
    assert not caplog.records


def test_what_solve_is_given_replaces_what_it_excludes():
    """An option given to solve, or to remake, wins over a kept one that can't go with it."""
    times = eo.solve(decay(save_everystep=True), saveat=0.25)
    assert len(times) == 5
    steps = eo.solve(decay(saveat=0.25), save_everystep=True)
    assert len(steps) == steps.stats.naccept + 1
    assert len(eo.solve(decay(save_start=False), saveat=[0.5, 1.0])) == 2
    assert len(eo.solve(decay(save_start=False), saveat=0.5)) == 2
    assert len(eo.solve(eo.remake(decay(save_everystep=True), saveat=0.25))) == 5


def test_the_same_problem_for_all_is_logged(caplog):
    log_once.cache_clear()
    ens = eo.EnsembleProblem(decay(), lambda prob, ctx: eo.remake(prob, u0=2 * prob.u0))
    sim = eo.solve(ens, trajectories=3)
    assert len(np.unique(sim.u[:, 0, 0])) == 1
    assert "let it depend on ctx.index" in caplog.text


def test_a_state_written_into_after_it_was_traced():
    """JAX keeps what it made of a NumPy array for as long as a trace of it lives."""
    array = np.ones(2)  # float64, which is converted
    with jax.enable_x64(False):
        traced = jax.make_jaxpr(lambda: jnp.asarray(array))()
        array[:] = 2.0
        prob = eo.ODEProblem(lambda u, p, t: -u, array, (0.0, 1.0))
        array[:] = 3.0
    np.testing.assert_array_equal(prob.u0, [2.0, 2.0])
    del traced


def repeated(u, p, t):
    """du/dt = -rate u / 2^n, or its double."""
    rate = p["rate"]
    for _ in range(p["n"]):
        rate = rate / 2
    return p["how"](-(2 * rate if p["twice"] else rate) * u)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [1, np.int32(1)])
@pytest.mark.parametrize("twice", [True, False])
def test_f_decides_by_whole_numbers_and_functions_in_p(n, twice):
    p = {"rate": 1.0, "n": n, "twice": twice, "how": jnp.positive, "name": "halved"}
    prob = eo.ODEProblem(repeated, 1.0, (0.0, 1.0), p)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=1.0 + ctx.index))
    exact = np.exp(-1.0 if twice else -0.5)
    tight = {"abstol": 1e-10, "reltol": 1e-10}
    for _ in range(2):  # traced, and by the trace that is kept
        np.testing.assert_allclose(eo.solve(prob, **tight).u[-1], exact, rtol=1e-8)
        sim = eo.solve(ens, trajectories=2, **tight)
        np.testing.assert_allclose(sim.u[:, -1], [exact, 2 * exact], rtol=1e-8)

    def end(rate):
        return eo.solve(eo.remake(prob, p=p | {"rate": rate}), **tight).u[-1]

    slope = -exact if twice else -exact / 2
    np.testing.assert_allclose(jax.jit(jax.grad(end))(1.0), slope, rtol=1e-6)


def test_whole_numbers_that_only_enter_compile_nothing_new(compiles):
    def f(u, p, t):
        return -p["rate"] * u / p["n"]

    def end(n):
        prob = eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0), {"rate": jnp.array(1.0), "n": n})
        return eo.solve(prob, eo.Tsit5(), abstol=1e-10, reltol=1e-10).u

    end(1)
    compiles.count = 0
    found = end(2)
    assert compiles.count == 0
    np.testing.assert_allclose(found[-1], np.exp(-0.5), rtol=1e-8)


def test_counts_as_people_write_them():
    ens = eo.EnsembleProblem(decay())
    sim = eo.solve(ens, trajectories=1e1, batch_size=4.0, maxiters=1e3, max_repeats=np.float64(2))
    assert len(sim) == 10
    for bad in (2.5, np.nan, np.inf, 0.0):
        with pytest.raises(ValueError, match="trajectories must be a positive integer"):
            eo.solve(ens, trajectories=bad)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("dtype", "options", "said"),
    [
        (np.float32, {"reltol": 1e-8, "abstol": 1e-8}, True),
        (np.float32, {"reltol": 0.0, "abstol": 1e-8}, True),
        (np.float32, {"reltol": 1e-6, "abstol": 1e-9}, False),
        (np.float32, {"reltol": 1e-8, "abstol": 1e-3}, False),
        (np.float32, {"reltol": 1e-8, "abstol": 1e-8, "adaptive": False, "dt": 0.1}, False),
        (np.float64, {"reltol": 1e-8, "abstol": 1e-8}, False),
        (np.float64, {"reltol": 1e-16, "abstol": 1e-17}, True),
    ],
)
@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_a_tolerance_below_roundings_is_said(dtype, options, said, engine, caplog):
    log_once.cache_clear()
    prob = eo.ODEProblem(lambda u, p, t: -u, np.ones(2, dtype), (0.0, 1.0))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: prob)
    eo.solve(ens, eo.Tsit5(), trajectories=2, maxiters=20, engine=engine, **options)
    assert ("are finer than the roundings" in caplog.text) == said
    assert ("jax_enable_x64" in caplog.text) == (said and dtype == np.float32)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, True),
        ({"tstops": [0.5]}, False),
        ({"dtmax": 0.01}, False),
        ({"adaptive": False, "dt": 0.1}, False),
    ],
)
def test_a_pulse_that_may_be_stepped_over_is_said(options, said, caplog):
    """Once for each `f`; by name, with what has derivatives."""
    log_once.cache_clear()
    for rate in (1.0, 2.0, 1.0):
        f = lambda u, p, t, rate=rate: jnp.where(t > 0.5, rate, 0.0) - u  # noqa: E731
        eo.solve(eo.ODEProblem(f, 1.0, (0.0, 1.0)), **options)
    assert caplog.text.count("may be stepped over") == 2 * said
    assert ("d_discontinuities=, then they have derivatives" in caplog.text) == said


def test_derivatives_by_stops_where_f_jumps_are_said(caplog):
    def end(p, **options):
        prob = eo.ODEProblem(lambda u, p, t: jnp.where(t < p, 1.0, 0.0) - u, 1.0, (0.0, 1.0), p)
        return eo.solve(prob, **options).u[-1]

    said = "tstops depend on what this solve is differentiated by"
    log_once.cache_clear()
    by_jump = jax.grad(lambda p: end(p, d_discontinuities=p))(0.5)
    jax.grad(lambda p: end(p, tstops=0.5))(0.5)
    assert said not in caplog.text
    assert abs(by_jump - np.exp(-0.5)) < 1e-2
    assert jax.grad(lambda p: end(p, tstops=p))(0.5) == 0
    assert said in caplog.text
