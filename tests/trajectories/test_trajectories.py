"""From a prob_func to arrays: which numbers vary with the index, and their values."""

import collections
import functools
import itertools
import random
import time

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.ground.logs import log_once
from ensembleode.plan.saving import Saving
from ensembleode.problem.options import DEFAULTS
from ensembleode.tracing.program import is_tracer
from ensembleode.trajectories.trajectories import describe

from ..problems import decay, scaled


KEY = jax.random.key(5)
U0S = np.arange(6.0).reshape(3, 2)


def described(prob_func=None, n=3, prob=None, key=KEY, output_func=None, **options):
    ens = eo.EnsembleProblem(prob or decay(), prob_func, output_func)
    return describe(ens, {name: options.get(name) for name in DEFAULTS}, key, n)


def lanes_of(prob_func, n=3, repeat=1, **options):
    return described(prob_func, n, **options).lanes(np.arange(n), repeat)


def by_index(index, repeat=1):
    return eo.EnsembleContext(index, repeat, KEY)


#
# What is shared
#


def test_nothing_varies_without_a_prob_func():
    every = described(abstol=1e-9)
    assert not any(jax.tree.leaves(every.batched))
    lanes = every.lanes(np.arange(3), 1)
    np.testing.assert_array_equal(lanes.u0, [1.0, 2.0])
    np.testing.assert_array_equal(lanes.p[0], -1.0)
    assert (lanes.t0, lanes.t1) == (0.0, 1.0)
    assert (lanes.abstol, lanes.reltol) == (1e-9, 1e-3)
    assert lanes.dt is None
    assert lanes.saveat is None
    assert every.saving == Saving("ends", True, 2)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("varies", "changes"),
    [
        ("u0", lambda ctx: {"u0": ctx.sim_id * np.array([1.0, 2.0])}),
        ("p", lambda ctx: {"p": -1.0 * ctx.sim_id}),
        ("t0", lambda ctx: {"tspan": (-1.0 * ctx.sim_id, 1.0)}),
        ("t1", lambda ctx: {"tspan": (0.0, 1.0 * ctx.sim_id)}),
        ("saveat", lambda ctx: {"saveat": jnp.array([0.1, 0.2]) * ctx.sim_id}),
        ("abstol", lambda ctx: {"abstol": 1e-6 * ctx.sim_id}),
        ("reltol", lambda ctx: {"reltol": 1e-6 * ctx.sim_id}),
        ("dt", lambda ctx: {"dt": 0.1 * ctx.sim_id}),
    ],
)
def test_one_thing_varies(varies, changes):
    """It has a row for each trajectory, and all else has none."""

    def prob_func(prob, ctx):
        return eo.remake(prob, **changes(ctx))

    every = described(prob_func)
    lanes = every.lanes(np.arange(3), 1)
    shared = described(dt=0.5).lanes(np.arange(3), 1)
    for name in lanes._fields:
        batched = getattr(every.batched, name)
        (batched,) = jax.tree.leaves(batched) or (None,)
        value = getattr(lanes, name)
        (value,) = jax.tree.leaves(value) or (None,)
        assert batched is (None if value is None else name == varies)
        if name == varies:
            assert value.shape[0] == 3
            assert (np.diff(value, axis=0) != 0).all()
        elif value is not None:
            assert np.shape(value) == np.shape(jax.tree.leaves(getattr(shared, name))[0])


def test_p_is_batched_leaf_by_leaf():
    p = {"a": jnp.ones(2), "b": (jnp.ones(3), 2.0), "name": "text"}

    def prob_func(prob, ctx):
        a, (b, c) = prob.p["a"], prob.p["b"]
        return eo.remake(prob, p={**prob.p, "b": (ctx.index + b, c), "a": a + 1.0})

    prob = eo.ODEProblem(lambda u, p, t: p["a"] * u + p["b"][0].sum(), jnp.ones(2), (0.0, 1.0), p)
    every = described(prob_func, prob=prob)
    assert every.batched.p == (False, True, False)
    a, b, c = every.lanes(np.arange(3), 1).p
    np.testing.assert_array_equal(a, [2.0, 2.0])
    np.testing.assert_array_equal(b, np.arange(3)[:, None] + np.ones(3))
    assert c == 2.0


def test_the_closure_of_f():
    shared = jnp.array([3.0, 4.0])

    def prob_func(prob, ctx):
        rate = 1.0 * ctx.index
        return eo.remake(prob, f=lambda u, p, t: rate * u + shared)

    every = described(prob_func)
    lanes = every.lanes(np.arange(3), 1)
    assert sorted(every.batched.consts) == [False, True]
    rate, other = sorted(lanes.consts, key=lambda x: not np.array_equal(x, [0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(rate, [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(other, shared)


@pytest.mark.parametrize("wrapped", ["all of it", "a part"])
def test_through_the_jit_of_a_user(wrapped):
    def split(u0, index):
        return index * u0, u0 + 1.0

    split = jax.jit(split) if wrapped == "a part" else split

    def prob_func(prob, ctx):
        u0, p = split(prob.u0, ctx.index)
        return eo.remake(prob, u0=u0, p=p)

    every = described(eqx.filter_jit(prob_func) if wrapped == "all of it" else prob_func)
    assert every.batched.u0 is True
    assert every.batched.p == (False,)
    lanes = every.lanes(np.arange(3), 1)
    np.testing.assert_array_equal(lanes.u0, np.arange(3)[:, None] * [1.0, 2.0])
    np.testing.assert_array_equal(lanes.p[0], [2.0, 3.0])


def test_one_call_whatever_the_number_of_trajectories(compiles):
    calls = []

    def prob_func(prob, ctx):
        calls.append(ctx.index)
        return scaled(prob, ctx)

    described(prob_func, n=3, saveat=0.1)
    assert len(calls) == 2  # the second to see that it makes the same
    compiles.count = 0
    described(prob_func, n=10**9, saveat=0.1)
    assert len(calls) == 3
    assert all(map(is_tracer, calls))
    assert compiles.count == 0


#
# The numbers
#


@pytest.mark.slow
@hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
@hypothesis.given(
    numbers=st.lists(st.floats(-3, 3), min_size=12, max_size=12),
    varies=st.tuples(*[st.booleans()] * 4),
    indices=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    repeat=st.integers(1, 4),
)
def test_lanes_are_prob_func_called_one_by_one(numbers, varies, indices, repeat):
    base, slope, twist = jnp.asarray(numbers).reshape(3, 4)

    def prob_func(prob, ctx):
        value = [
            base[i] + (slope[i] * ctx.index + twist[i] * ctx.repeat if vary else 0.0)
            for i, vary in enumerate(varies)
        ]
        tspan = (value[2] - 1000.0, value[2] + 1000.0 + value[3])
        return eo.remake(prob, u0=jnp.stack([value[0], base[0]]), p=(value[1], base), tspan=tspan)

    prob = eo.ODEProblem(lambda u, p, t: p[0] * u, [1.0, 2.0], (0.0, 1.0), (0.0, base))
    every = described(prob_func, n=21, prob=prob)
    assert every.batched.u0 is varies[0]
    assert every.batched.p == (varies[1], False)
    assert every.batched.t0 is varies[2]
    assert every.batched.t1 is (varies[2] or varies[3])
    lanes = every.lanes(np.array(indices), repeat)

    def row(x, batched, k):
        return x[k] if batched else x

    for k, index in enumerate(indices):
        made = prob_func(prob, by_index(index, repeat))
        lane = every.lane(index, repeat)
        for got in (jax.tree.map(functools.partial(row, k=k), lanes, every.batched), lane):
            np.testing.assert_allclose(got.u0, made.u0, rtol=1e-14)
            np.testing.assert_allclose(got.p[0], made.p[0], rtol=1e-14)
            np.testing.assert_array_equal(got.p[1], base)
            np.testing.assert_allclose([got.t0, got.t1], made.tspan, rtol=1e-14)


@pytest.mark.parametrize("index", [lambda i: 1.0 * i, float], ids=["traced", "called"])
def test_a_key_may_be_a_parameter(index):
    def prob_func(prob, ctx):
        return eo.remake(prob, p=ctx.key, u0=index(ctx.index) * prob.u0)

    def f(u, p, t):
        return u * jax.random.normal(p, (2,))

    prob = eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0), KEY)
    assert described(prob=prob).batched.p == (False,)
    (keys,) = lanes_of(prob_func, prob=prob).p
    assert (keys == jnp.stack([by_index(i).key for i in range(3)])).all()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "u0",
    [
        lambda u0, ctx: u0 * (ctx.sim_id / 100),
        lambda u0, ctx: ctx.sim_id / 100 * u0,
        lambda u0, ctx: u0 + ctx.index,
        lambda u0, ctx: u0 * ctx.repeat * ctx.index,
        lambda u0, ctx: u0**ctx.sim_id,
        lambda u0, ctx: u0 * jnp.sin(ctx.index / 2),
    ],
)
def test_the_index_takes_the_precision_of_what_it_meets(u0):
    """As a Python integer does: a float32 state stays one."""
    u0s = lanes_of(
        lambda prob, ctx: eo.remake(prob, u0=u0(prob.u0, ctx)),
        prob=eo.ODEProblem(lambda u, p, t: -u, np.array([1.0, 2.0], np.float32), (0.0, 1.0)),
    ).u0
    assert u0s.dtype == np.float32
    for i in range(3):
        expected = u0(jnp.array([1.0, 2.0], jnp.float32), by_index(i))
        np.testing.assert_allclose(u0s[i], expected, rtol=1e-6)


def test_times_and_tolerances_have_the_precision_of_the_state():
    every = described(
        lambda prob, ctx: eo.remake(prob, tspan=(0, 1.0 * ctx.sim_id), reltol=np.float64(1e-3)),
        prob=eo.ODEProblem(lambda u, p, t: -u, np.ones(2, np.complex64), (0.0, 1.0)),
        dt=1,
    )
    lanes = every.lanes(np.arange(3), 1)
    for name in ("t0", "t1", "abstol", "reltol", "dt"):
        assert getattr(lanes, name).dtype == np.float32


def test_integer_parameters_stay_integers():
    table = jnp.arange(3, dtype=jnp.int8)
    lanes = lanes_of(
        lambda prob, ctx: eo.remake(prob, f=lambda u, p, t: -u, p=(ctx.index, table[ctx.index], 3))
    )
    index, row, three = lanes.p
    assert jnp.issubdtype(index.dtype, jnp.integer)
    assert row.dtype == np.int8
    assert three == 3
    assert jnp.issubdtype(jnp.result_type(three), jnp.integer)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8], ids=lambda x: x.__name__)
def test_indices_of_any_integer_dtype(dtype):
    """What they make does not depend on it."""
    every = described(
        lambda prob, ctx: eo.remake(prob, f=lambda u, p, t: -u, p=(ctx.index, ctx.index / 2))
    )
    indices = np.array([2, 0], dtype)
    traced = jax.jit(lambda indices: every.lanes(indices, 1))(indices)
    for lanes in (every.lanes(indices, 1), traced):
        assert lanes.p[0].dtype == np.int64
        np.testing.assert_array_equal(lanes.p[0], [2, 0])
        np.testing.assert_array_equal(lanes.p[1], [1.0, 0.0])


def test_saveat_over_a_span_that_grows_in_a_rerun():
    """There is no room for the times that come with it."""
    every = described(lambda prob, ctx: eo.remake(prob, tspan=(0.0, 1.0 * ctx.repeat)), saveat=0.5)
    assert every.lanes(np.arange(3), 1).saveat.shape[-1] == 3
    with pytest.raises(ValueError, match=r"saveat.*tspan.*rerun"):
        every.lanes(np.arange(3), 2)


#
# NumPy arrays that are indexed
#


U0S_GLOBAL = U0S


def closing(u0s=U0S):
    def prob_func(prob, ctx, scale=1.0):
        return eo.remake(prob, u0=scale * u0s[ctx.index])

    return prob_func


def closing_over_more(u0s=U0S, text="text", unset=False):
    """Over what is no array, too, and over a variable that is not set."""
    numbers = np.array(["a"]), np.array(1.0), [1, 2]

    def prob_func(prob, ctx):
        if ctx is None:
            return text, numbers, never
        return eo.remake(prob, u0=u0s[ctx.index])

    if unset:
        never = None
    return prob_func


def with_keyword(u0s=U0S):
    return lambda prob, ctx, *, scale=1.0: eo.remake(prob, u0=scale * u0s[ctx.index])


LIFTED = {
    "closure": closing(),
    "closure with more": closing_over_more(),
    "global": lambda prob, ctx: eo.remake(prob, u0=U0S_GLOBAL[ctx.index]),
    "default": lambda prob, ctx, u0s=U0S: eo.remake(prob, u0=u0s[ctx.index]),
    "keyword default": lambda prob, ctx, *, u0s=U0S: eo.remake(prob, u0=u0s[ctx.index]),
    "closure and keyword default": with_keyword(),
    "partial": functools.partial(lambda u0s, prob, ctx: eo.remake(prob, u0=u0s[ctx.index]), U0S),
    "partial by keyword": functools.partial(
        lambda prob, ctx, u0s: eo.remake(prob, u0=u0s[ctx.index]), u0s=U0S
    ),
    "partial of a closure": functools.partial(closing(), scale=1.0),
}


@pytest.mark.parametrize("prob_func", LIFTED.values(), ids=LIFTED)
def test_a_numpy_array_is_lifted(prob_func, caplog):
    log_once.cache_clear()
    every = described(prob_func)
    assert every.repeatable
    assert every.batched.u0 is True
    np.testing.assert_array_equal(every.lanes(np.arange(3), 1).u0, U0S)
    assert not caplog.records


def test_a_numpy_array_that_f_indexes_is_lifted(caplog):
    """In the closure of prob_func, as what f closes over is there, too."""
    log_once.cache_clear()
    rates = np.array([1.0, 2.0, 3.0])
    every = described(
        lambda prob, ctx: eo.remake(prob, f=lambda u, p, t: rates[ctx.index] * u),
    )
    lanes = every.lanes(np.arange(3), 1)
    assert every.repeatable
    assert any(every.batched.consts)
    for i in range(3):
        consts = [c[i] if b else c for c, b in zip(lanes.consts, every.batched.consts, strict=True)]
        np.testing.assert_array_equal(every.field(consts, jnp.ones(2), -1.0, 0.0), [rates[i]] * 2)
    assert not caplog.records


def test_lifting_leaves_the_function_alone():
    for prob_func in (LIFTED["closure"], LIFTED["global"], LIFTED["default"]):
        described(prob_func)
    assert isinstance(LIFTED["closure"].__closure__[-1].cell_contents, np.ndarray)
    assert isinstance(U0S_GLOBAL, np.ndarray)
    assert isinstance(LIFTED["default"].__defaults__[0], np.ndarray)


class Picks:
    def __init__(self):
        self.u0s = U0S

    def __call__(self, prob, ctx):
        return eo.remake(prob, u0=self.u0s[ctx.index])

    def method(self, prob, ctx):
        return self(prob, ctx)


@pytest.mark.parametrize(
    "prob_func",
    [
        Picks(),
        Picks().method,
        lambda prob, ctx, u0s=tuple(U0S): eo.remake(prob, u0=u0s[ctx.index]),
        lambda prob, ctx, u0s={"a": U0S}: eo.remake(prob, u0=u0s["a"][ctx.index]),
    ],
    ids=["callable", "method", "tuple", "dict"],
)
def test_an_array_that_cannot_be_found_is_read_one_by_one(prob_func, caplog):
    log_once.cache_clear()
    np.testing.assert_array_equal(lanes_of(prob_func).u0, U0S)
    assert "jnp.asarray(u0s)[ctx.index]" in caplog.text


# Reads past the end of an array, each with the first trajectory that makes one, and the index.
ROWS = jnp.asarray(U0S)
PAST = {
    "NumPy": (closing(), 3, 3),
    "a row": (lambda prob, ctx: eo.remake(prob, u0=ROWS[ctx.index]), 3, 3),
    "an entry": (lambda prob, ctx: eo.remake(prob, p=ROWS[ctx.index, 1]), 3, 3),
    "counted from 1": (lambda prob, ctx: eo.remake(prob, u0=ROWS[ctx.sim_id]), 2, 3),
    "negative": (lambda prob, ctx: eo.remake(prob, u0=ROWS[-1 - ctx.index]), 3, -4),
    "computed": (lambda prob, ctx: eo.remake(prob, u0=ROWS[ctx.index // 2 + 1]), 4, 3),
    "several": (lambda prob, ctx: eo.remake(prob, u0=ROWS[jnp.array([0, ctx.index]), 0]), 3, 3),
    "a slice": (
        lambda prob, ctx: eo.remake(prob, u0=jax.lax.dynamic_slice(ROWS[:, 0], (ctx.index,), (2,))),
        2,
        3,
    ),
    "in jit": (lambda prob, ctx: eo.remake(prob, u0=jax.jit(lambda i: ROWS[i])(ctx.index)), 3, 3),
    "index of one": (lambda prob, i, repeat: eo.remake(prob, u0=ROWS[i]), 3, 3),
    "under a wrong condition": (
        lambda prob, ctx: eo.remake(prob, u0=jnp.where(ctx.index < 4, ROWS[ctx.index], prob.u0)),
        3,
        3,
    ),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("prob_func", "first", "index"), PAST.values(), ids=PAST)
@pytest.mark.parametrize("wrapped", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_an_index_past_the_end_is_an_error(prob_func, first, index, wrapped):
    """JAX would take the last entry."""
    wrapped(lambda: lanes_of(prob_func, n=first))()
    where = rf"prob_func reads index {index} .*test_trajectories.py.* trajectory {first} of 6"
    with pytest.raises(IndexError, match=where):
        wrapped(lambda: lanes_of(prob_func, n=6))()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "prob_func",
    [
        lambda prob, ctx: eo.remake(prob, u0=ROWS[ctx.index % 3]),
        lambda prob, ctx: eo.remake(prob, u0=ROWS[jnp.minimum(ctx.index, 2)]),
        lambda prob, ctx: eo.remake(prob, u0=jnp.where(ctx.index < 3, ROWS[ctx.index], prob.u0)),
        lambda prob, ctx: eo.remake(prob, u0=jnp.select([ctx.index < 3], [ROWS[ctx.index]], 1.0)),
        lambda prob, ctx: eo.remake(prob, u0=ROWS[jax.random.randint(ctx.key, (), 0, 3)]),
        lambda prob, ctx: eo.remake(prob, u0=ROWS[-1 - ctx.index % 3]),
    ],
    ids=["remainder", "minimum", "where", "select", "drawn", "negative"],
)
def test_indices_that_stay_inside_are_none(prob_func):
    assert lanes_of(prob_func, n=6).u0.shape == (6, 2)


def test_of_very_many_trajectories_the_last_is_looked_at():
    rows = jnp.ones((10**6 - 1, 2), np.float32)
    with pytest.raises(IndexError, match=r"index 999999 .*trajectory 999999 of 1000000"):
        described(lambda prob, ctx: eo.remake(prob, u0=rows[ctx.index]), n=10**6)


def test_an_output_past_the_end_is_an_error():
    prob, weights = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0)), jnp.ones(3)
    ens = eo.EnsembleProblem(
        prob, output_func=lambda sol, ctx: (sol.u[-1] * weights[ctx.index], False)
    )
    with pytest.raises(IndexError, match=r"output_func reads index 3 .* trajectory 3 of 5"):
        eo.solve(ens, trajectories=5)


PAST_IN_F = {
    "u": lambda u, p, t: jnp.array([u[2], u[0]]),
    "p": lambda u, p, t: -p[-4] * u,
    "several": lambda u, p, t: -p[np.array([0, 3])] * u,
    "closed over": lambda u, p, t: u + U0S_OF_JAX[3],
}
U0S_OF_JAX = jnp.asarray(U0S)


@pytest.mark.parametrize("f", PAST_IN_F.values(), ids=PAST_IN_F)
def test_a_field_that_reads_past_the_end_is_an_error(f):
    prob = eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0), jnp.ones(3))
    for _ in range(2):
        with pytest.raises(IndexError, match=r"f reads index (2|3|-4) .*test_trajectories.py"):
            eo.solve(prob)


def test_a_condition_that_reads_past_the_end_is_an_error():
    at = eo.ContinuousCallback(lambda u, t, integrator: u[2], eo.terminate)
    with pytest.raises(IndexError, match=r"condition of callback 0.* reads index 2"):
        eo.solve(eo.ODEProblem(lambda u, p, t: u, jnp.ones(2), (0.0, 1.0)), callback=at)


def test_a_parameter_that_nothing_reads_is_an_error():
    """Where only `prob_func` knows it; what a callback or an integrand reads is fine."""

    def sweep(prob, known):
        def prob_func(prob, ctx):
            return eo.remake(prob, p={**prob.p, "A": 1.0 + ctx.index})

        return eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=2, **known)

    prob = eo.ODEProblem(lambda u, p, t: -p["a"] * u, [1.0], (0.0, 1.0), {"a": 1.0})
    with pytest.raises(ValueError, match=r"f never reads p\['A'\].* Is it p\['a'\]\?"):
        sweep(prob, {})
    reading = eo.remake(prob, integrand=lambda u, p, t: p.get("A", 1.0) * u)
    np.testing.assert_allclose(
        sweep(reading, {}).integral[:, -1, 0], (1 - np.exp(-1)) * np.array([1.0, 2.0]), rtol=1e-3
    )
    down = eo.ContinuousCallback(
        lambda u, t, integrator: u[0] - 1 / (1.0 + integrator.p.get("A", 1.0)), eo.terminate
    )
    assert sweep(prob, {"callback": down}).events.count.tolist() == [1, 0]


#
# A prob_func that can't be traced
#


def branching(calls):
    def prob_func(prob, ctx):
        calls.append(ctx.index)
        rate = -1.0 if ctx.index % 2 else -2.0
        return eo.remake(prob, u0=(1.0 if ctx.index > 1 else 2.0) * prob.u0, p=rate)

    return prob_func


def test_it_is_called_once_for_each_index():
    calls = []
    every = described(branching(calls), n=5)
    assert is_tracer(calls[0])
    assert [x for x in calls if not is_tracer(x)] == [0, 1, 2, 3, 4]
    calls.clear()
    lanes = every.lanes(np.array([4, 0, 1]), 1)
    assert not calls
    assert not every.repeatable
    np.testing.assert_array_equal(lanes.u0[:, 0], [1.0, 2.0, 2.0])
    np.testing.assert_array_equal(lanes.p[0], [-2.0, -2.0, -1.0])
    lane = every.lane(3, 1)
    np.testing.assert_array_equal(lane.u0, [1.0, 2.0])
    assert lane.p[0] == -1.0


def test_it_shares_what_is_the_same():
    big = jnp.ones(7)

    def prob_func(prob, ctx):
        u0 = 2.0 * prob.u0 if ctx.index else prob.u0
        return eo.remake(prob, u0=u0, p=(prob.p, big), f=lambda u, p, t: u, tspan=(0.0, 1.0 + 1))

    every = described(prob_func)
    assert every.batched.u0 is True
    assert every.batched.p == (False, False)
    assert every.batched.t1 is False
    lanes = every.lanes(np.arange(3), 1)
    assert lanes.u0.shape == (3, 2)
    np.testing.assert_array_equal(lanes.p[1], big)


def test_it_is_called_again_for_a_rerun():
    calls = []

    def prob_func(prob, ctx):
        calls.append((int(ctx.index), ctx.repeat))
        return eo.remake(prob, u0=1.0 * ctx.repeat * prob.u0)

    every = described(prob_func, output_func=lambda sol, ctx: (sol.u, False))
    assert calls == [(0, 1), (1, 1), (2, 1)]
    np.testing.assert_array_equal(every.lanes(np.array([2, 0]), 3).u0, [[3.0, 6.0], [3.0, 6.0]])
    assert calls[3:] == [(2, 3), (0, 3)]


class Rates(eqx.Module):
    of: dict


CONTAINERS = {  # of the rate, and how it is found
    "dict": (lambda k: {"of": k}, lambda p: p),
    "nested": (lambda k: ({"of": k, "other": None}, "text"), lambda p: p[0]),
    "list": (lambda k: [k, "text"], lambda p: p),
    "module": (lambda k: Rates({"of": k}), lambda p: p.of),
    "defaultdict": (lambda k: collections.defaultdict(int, of=k), lambda p: p),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("index", [jnp.asarray, int], ids=["traced", "called"])
@pytest.mark.parametrize("number", [float, np.atleast_1d, jnp.asarray], ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", CONTAINERS)
def test_it_may_change_its_problem(name, number, index):
    """Each trajectory has a copy of its own; and the user's problem stays as it is."""
    of, within = CONTAINERS[name]
    key = 0 if name == "list" else "of"
    p = of(number(0.5))

    def f(u, p, t):
        return {"a": -within(p)[key] * u["a"]}

    prob = eo.ODEProblem(f, {"a": jnp.ones(1)}, (0.0, 3.0), p, saveat=[1.0])

    def prob_func(prob, ctx):
        rates, times = within(prob.p), 1.0 + index(ctx.index)
        if index is int and isinstance(rates[key], np.ndarray):
            rates[key] *= times  # in its own memory
        else:
            rates[key] = rates[key] * times
        prob.u0["a"] = prob.u0["a"] * times
        prob.options["saveat"].append(2.0)
        prob.options["reltol"] = 1e-9
        return prob

    ens = eo.EnsembleProblem(prob, prob_func)
    before = jax.tree.map(np.array, (prob.u0, within(prob.p)[key]))
    many = described(prob_func, prob=prob)
    for _ in range(2):
        every = many.lanes(np.arange(3), 1)
        np.testing.assert_allclose(jnp.ravel(every.p[0]), [0.5, 1.0, 1.5])
        np.testing.assert_allclose(jnp.ravel(every.u0), [1.0, 2.0, 3.0])
    after = jax.tree.map(np.array, (ens.prob.u0, within(ens.prob.p)[key]))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert list(prob.options) == ["saveat"]


def test_it_shares_arrays_that_it_leaves_alone():
    """NumPy's, too, though each trajectory has a copy of them."""

    def prob_func(prob, ctx):
        prob.p["own"][:] = float(ctx.index)
        return prob

    p = {"own": np.zeros(2), "table": np.ones(7)}
    prob = eo.ODEProblem(lambda u, p, t: p["own"] * p["table"][0], jnp.ones(2), (0.0, 1.0), p)
    assert described(prob_func, prob=prob).batched.p == (True, False)


def test_it_is_logged_once(caplog):
    log_once.cache_clear()
    for _ in range(2):
        described(branching([]))
    (record,) = caplog.records
    assert record.name == "ensembleode"
    assert "prob_func can't be traced over the index" in record.message
    assert "TracerBoolConversionError" in record.message
    assert "jnp.where" in record.message


def test_it_may_see_tracers_of_outside():
    """Only the index has to be a number."""

    def go(scale):
        def prob_func(prob, ctx):
            return eo.remake(prob, u0=(scale if ctx.index else 1.0) * jnp.ones(2))

        every = described(prob_func)
        return every.lanes(np.arange(3), 1).u0.sum()

    assert jax.grad(go)(1.0) == 4.0


def test_its_spans_may_differ():
    def prob_func(prob, ctx):
        return eo.remake(prob, tspan=(0.0, 1.0 if ctx.index else 0.5))

    every = described(prob_func, saveat=0.5)
    lanes = every.lanes(np.arange(3), 1)
    np.testing.assert_array_equal(lanes.t1, [0.5, 1.0, 1.0])
    np.testing.assert_array_equal(lanes.saveat, [[0, 0.5, 0.5], [0, 0.5, 1], [0, 0.5, 1]])
    np.testing.assert_array_equal(lanes.count, [2, 3, 3])


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("mine"), TypeError("mine")])
def test_errors_of_prob_func_come_through(error, caplog):
    log_once.cache_clear()

    def prob_func(prob, ctx):
        raise error

    with pytest.raises(type(error), match="mine") as caught:
        described(prob_func)
    assert caught.value is error
    assert not caplog.records


def test_an_error_at_one_index_comes_through():
    def prob_func(prob, ctx):
        if int(ctx.index) == 2:
            raise ValueError("no third one")
        return prob

    with pytest.raises(ValueError, match="no third one"):
        described(prob_func)
    described(prob_func, n=2)


#
# A prob_func that makes another problem each time
#


def written_into(rng):
    row = np.ones(2)

    def prob_func(prob, ctx):
        row[:] = rng.random(2)
        return eo.remake(prob, u0=row)

    return prob_func


def parameters_written_into(rng):
    prob = eo.remake(decay(), p=np.ones(1))

    def prob_func(_, ctx):
        prob.p[:] = rng.random(1)
        return prob

    return prob_func


def counted(rng):
    ticks = itertools.count(1)
    return lambda prob, ctx: eo.remake(prob, p=float(next(ticks)), u0=ctx.index * prob.u0)


def closed_over(rng):
    def prob_func(prob, ctx):
        rate = jnp.asarray(rng.random(2))
        return eo.remake(prob, f=lambda u, p, t: rate * u)

    return prob_func


def drawn(**changes):
    """A prob_func that remakes with functions of the random numbers and of the index."""

    def make(rng):
        def prob_func(prob, ctx):
            return eo.remake(prob, **{name: fn(rng, ctx) for name, fn in changes.items()})

        return prob_func

    return make


def legacy():
    return np.random.random()  # noqa: NPY002


IMPURE = {
    "p": drawn(p=lambda rng, ctx: rng.random(), u0=lambda rng, ctx: ctx.index * np.ones(2)),
    "p mixed with the index": drawn(p=lambda rng, ctx: ctx.index + rng.random()),
    "u0": drawn(u0=lambda rng, ctx: rng.random(2)),
    "tspan": drawn(tspan=lambda rng, ctx: (0.0, 1.0 + rng.random())),
    "saveat": drawn(saveat=lambda rng, ctx: [rng.random(), 1.0]),
    "reltol": drawn(reltol=lambda rng, ctx: rng.random()),
    "dt": drawn(dt=lambda rng, ctx: rng.random()),
    "an inner jit": drawn(p=lambda rng, ctx: jax.jit(jnp.multiply)(rng.random(), ctx.index + 1)),
    "an array written into": written_into,
    "parameters written into": parameters_written_into,
    "a counter": counted,
    "the closure of f": closed_over,
    "NumPy's generator of all": lambda _: drawn(p=lambda rng, ctx: legacy())(None),
    "Python's generator of all": lambda _: drawn(p=lambda rng, ctx: random.random())(None),
    "a branch by NumPy's": lambda _: drawn(p=lambda rng, ctx: np.float64(legacy() > 0.5))(None),
    "the clock": lambda _: drawn(p=lambda rng, ctx: time.perf_counter())(None),
}


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("make", IMPURE.values(), ids=IMPURE)
def test_what_changes_from_call_to_call_is_drawn_for_each(make, caplog):
    """As in SciML; and inside jit, where nothing can be drawn, it is refused."""
    log_once.cache_clear()
    np.random.seed(0)  # noqa: NPY002
    n = 20
    prob_func = make(np.random.default_rng(0))
    lanes = lanes_of(prob_func, n=n)
    varying = [x for x in jax.tree.leaves(lanes) if np.shape(x)[:1] == (n,)]
    most = max(len(np.unique(x, axis=0)) for x in varying)
    assert most == (2 if make is IMPURE["a branch by NumPy's"] else n)
    assert "by jax.random with ctx.key" in caplog.text
    with pytest.raises(TypeError, match=r"jit.*ctx\.key"):
        jax.jit(lambda: lanes_of(make(np.random.default_rng(0))).u0)()


def fresh_module(prob, ctx):
    net = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    return eo.remake(prob, f=lambda u, p, t: net(u), u0=ctx.index * jnp.ones(2))


@pytest.mark.parametrize(
    "prob_func",
    [
        lambda prob, ctx: eo.remake(prob, f=lambda u, p, t: jax.pure_callback(lambda u: -u, u, u)),
        fresh_module,
        lambda prob, ctx: eo.remake(
            prob, u0=ctx.index * np.random.default_rng(0).random(2), p=np.nan
        ),
        lambda prob, ctx: (legacy(), scaled(prob, ctx))[1],
        scaled,
    ],
)
def test_what_is_made_anew_but_the_same_is_traced(prob_func, caplog):
    log_once.cache_clear()
    assert described(prob_func).repeatable
    assert "is called once a trajectory" not in caplog.text


@pytest.mark.parametrize("many", [False, True])
def test_a_field_that_changes_from_call_to_call(many):
    rng = np.random.default_rng(0)
    prob = eo.ODEProblem(lambda u, p, t: -u + rng.normal(), jnp.ones(2), (0.0, 1.0))
    with pytest.raises(
        TypeError, match=r"f gives another value each time.*pass them in p.*ctx\.key"
    ):
        described(scaled if many else None, n=3 if many else None, prob=prob)


def test_an_output_that_changes_from_call_to_call():
    rng = np.random.default_rng(0)
    ens = eo.EnsembleProblem(decay(), None, lambda sol, ctx: (sol.u[-1] + rng.normal(), False))
    with pytest.raises(TypeError, match=r"output_func gives another value.*ctx\.key"):
        eo.solve(ens, trajectories=3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alg", [eo.EnsembleSerial(), eo.EnsembleThreads()], ids=["serial", "all"])
def test_reruns_compile_two_programs_whatever_is_left(alg, compiles):
    """One for the first run and for many that are left, one for few; the results are those of one
    trajectory after the other."""
    prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))

    def repeats(counts):
        wanted = jnp.asarray(counts)
        ens = eo.EnsembleProblem(
            prob,
            lambda prob, ctx: eo.remake(prob, u0=(100.0 * ctx.repeat + ctx.index) * prob.u0),
            output_func=lambda sol, ctx: (sol.u[0, 0], ctx.repeat < wanted[ctx.index]),
        )
        sim = eo.solve(ens, eo.Tsit5(), alg, trajectories=len(counts), max_repeats=12)
        np.testing.assert_array_equal(sim.u, 100.0 * np.array(counts) + np.arange(len(counts)))

    # From 300 trajectories down to one, on both sides of the number from which on all are run.
    left = [300, 299, 150, 80, 65, 64, 63, 33, 17, 16, 2, 1]
    repeats([sum(n > i for n in left) for i in range(300)])
    compiles.count = 0
    repeats([sum(n > i for n in [300, 200, 100, 77, 40, 31, 7, 3]) for i in range(300)][::-1])
    assert compiles.count == 0
