"""Traces are used again, and never where anything that they depend on is another."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import random
import threading
import time
import types
import weakref
from typing import Any, NamedTuple

import diffrax as dfx
import equinox as eqx
import hypothesis
import hypothesis.strategies as some
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.tracing import program, trace_cache
from ensembleode.tracing.reach import reached, Unkeyed
from ensembleode.tracing.trace_cache import Traces, traces


@pytest.fixture(autouse=True)
def _none_kept():
    traces.clear()
    yield
    traces.clear()


@pytest.fixture
def count(monkeypatch):
    """A function that says how often something has been traced since it was last asked."""
    counted = []
    trace_apart = program.trace_apart

    def counting(*args, **options):
        counted.append(1)
        return trace_apart(*args, **options)

    monkeypatch.setattr(program, "trace_apart", counting)
    monkeypatch.setattr("ensembleode.core.traced_prob_func.trace_apart", counting)

    def since():
        number = len(counted)
        counted.clear()
        return number

    return since


def solve(f, prob_func=None, u0=(1.0,), p: Any = None, n=2, **options):
    """The ends of an ensemble, by steps of Euler: u0 + du for a constant du."""
    prob = eo.ODEProblem(f, jnp.asarray(u0), (0.0, 1.0), p)
    ens = eo.EnsembleProblem(prob, prob_func)
    options = {"adaptive": False, "dt": 1.0, "save_start": False, **options}
    return np.asarray(eo.solve(ens, eo.Euler(), trajectories=n, **options).u)[:, -1]


def by(value, like=0.0):
    return jnp.full(np.shape(like), value)


def rate_p(u, p, t):
    return p * jnp.ones_like(u)


#
# What a function reaches
#


K: Any = 1.0
LIST: list = [1.0]
NESTED: dict = {"a": [1.0, {"b": 2.0}]}
ARRAY = np.array([1.0])
BIG = np.ones(400_000)
MODULE: Any = types.ModuleType("of_a_test")
MODULE.k = 1.0
MODULE.inner = types.ModuleType("of_a_test.inner")
vars(MODULE.inner)["k"] = 1.0
DEVICE_ARRAY = jnp.array([1.0])


def helper(x):
    return K * x


class Model:
    scale = 1.0

    def __init__(self, k=1.0):
        self.k = k

    def rate(self):
        return self.k * type(self).scale

    def f(self, u, p, t):
        return self.rate() * jnp.ones_like(u)


class Inheriting(Model):
    def f(self, u, p, t):
        return super().f(u, p, t)


class Slotted:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 1.0

    def f(self, u, p, t):
        return self.k * jnp.ones_like(u)


class Module(eqx.Module):
    k: Any
    static: Any = eqx.field(static=True, default=1.0)

    def rate(self):
        return self.k * self.static

    def __call__(self, u, p, t):
        return self.rate() * jnp.ones_like(u)


@dataclasses.dataclass
class Mutable:
    k: float = 1.0

    def __call__(self, u, p, t):
        return self.k * jnp.ones_like(u)


class Numbers(NamedTuple):
    k: Any
    other: float = 0.0

    @property
    def rate(self):
        return self.k


def set_global(name, value):
    globals()[name] = value


def by_global():
    def f(u, p, t):
        return K * jnp.ones_like(u)

    return f, lambda k: set_global("K", k)


def by_global_of_helper():
    return (lambda u, p, t: helper(jnp.ones_like(u))), lambda k: set_global("K", k)


def by_global_in_nested():
    def f(u, p, t):
        return sum(jnp.ones_like(u) * c for c in (lambda: [K])())

    return f, lambda k: set_global("K", k)


def by_list():
    def f(u, p, t):
        return LIST[0] * jnp.ones_like(u)

    return f, lambda k: LIST.__setitem__(0, k)


def by_nested():
    def f(u, p, t):
        return NESTED["a"][0] * jnp.ones_like(u)

    return f, lambda k: NESTED["a"].__setitem__(0, k)


def by_array():
    def f(u, p, t):
        return ARRAY * jnp.ones_like(u)

    return f, lambda k: ARRAY.__setitem__(0, k)


def by_big_array():
    def f(u, p, t):
        return BIG[0] * jnp.ones_like(u)

    return f, lambda k: BIG.__setitem__(0, k)


def by_array_without_dimensions():
    k = np.array(1.0)
    return (lambda u, p, t: k * jnp.ones_like(u)), lambda new: k.__setitem__((), new)


def by_jax_array():
    def f(u, p, t):
        return DEVICE_ARRAY * jnp.ones_like(u)

    return f, lambda k: set_global("DEVICE_ARRAY", jnp.array([k]))


def by_value_of_jax_array():
    """Which is read while it is traced."""
    set_global("DEVICE_ARRAY", jnp.array(1.0))

    def f(u, p, t):
        return float(DEVICE_ARRAY) * jnp.ones_like(u)

    return f, lambda k: set_global("DEVICE_ARRAY", jnp.array(k))


def by_cell():
    k = 1.0

    def f(u, p, t):
        return k * jnp.ones_like(u)

    def change(new):
        nonlocal k
        k = new

    return f, change


def by_default():
    def f(u, p, t, k=1.0):
        return k * jnp.ones_like(u)

    return f, lambda k: setattr(f, "__defaults__", (k,))


def by_keyword_default():
    def f(u, p, t, *, k=1.0):
        return k * jnp.ones_like(u)

    return f, lambda k: setattr(f, "__kwdefaults__", {"k": k})


def by_attribute_of_function():
    def f(u, p, t):
        return f.k * jnp.ones_like(u)

    f.k = 1.0
    return f, lambda k: setattr(f, "k", k)


def by_code():
    def f(u, p, t):
        return 1.0 * jnp.ones_like(u)

    def change(k):
        exec(f"def g(u, p, t): return {k} * jnp.ones_like(u)", made := {"jnp": jnp})
        f.__code__ = made["g"].__code__

    return f, change


def by_module():
    return (lambda u, p, t: MODULE.k * jnp.ones_like(u)), lambda k: setattr(MODULE, "k", k)


def by_inner_module():
    def f(u, p, t):
        return MODULE.inner.k * jnp.ones_like(u)

    return f, lambda k: setattr(MODULE.inner, "k", k)


def by_module_as_value():
    def f(u, p, t):
        m = MODULE
        return m.k * jnp.ones_like(u)

    return f, lambda k: setattr(MODULE, "k", k)


def by_getattr():
    def f(u, p, t):
        return getattr(MODULE, "k") * jnp.ones_like(u)  # noqa: B009

    return f, lambda k: setattr(MODULE, "k", k)


def by_globals():
    def f(u, p, t):
        return globals()["K"] * jnp.ones_like(u)

    return f, lambda k: set_global("K", k)


def by_method():
    model = Model()
    return model.f, lambda k: setattr(model, "k", k)


def by_object_in_cell():
    model = Model()
    return (lambda u, p, t: model.f(u, p, t)), lambda k: setattr(model, "k", k)


def by_inherited():
    model = Inheriting()
    return model.f, lambda k: setattr(model, "k", k)


def by_attribute_of_class():
    return Model().f, lambda k: setattr(Model, "scale", k)


def by_method_of_class():
    class Own(Model):
        pass

    return Own().f, lambda k: setattr(Own, "rate", lambda self: k)


def by_slots():
    model = Slotted()
    return model.f, lambda k: setattr(model, "k", k)


def by_callable():
    model = Mutable()
    return model, lambda k: setattr(model, "k", k)


def by_module_of_equinox():
    module = Module(1.0)
    return module, lambda k: object.__setattr__(module, "k", k)


def by_method_of_equinox():
    module = Module(jnp.array(1.0))

    def f(u, p, t):
        return module.rate() * jnp.ones_like(u)

    return f, lambda k: object.__setattr__(module, "k", jnp.array(k))


def by_static_of_equinox():
    module = Module(1.0, static=[1.0])
    object.__setattr__(module, "static", np.array([1.0]))
    return module, lambda k: module.static.__setitem__(0, k)


def by_partial():
    keywords = {"k": 1.0}

    def g(u, p, t, k):
        return k * jnp.ones_like(u)

    f = functools.partial(g, **keywords)
    return f, lambda k: f.keywords.__setitem__("k", k)


def by_named_tuple():
    held = [Numbers(1.0)]
    return (lambda u, p, t: held[0].rate * jnp.ones_like(u)), lambda k: held.__setitem__(
        0, Numbers(k)
    )


def by_wrapped():
    """JAX makes of it a function of its own."""

    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def f(u, p, t):
        return K * jnp.ones_like(u)

    return f, lambda k: set_global("K", k)


@jax.vmap
def wrapped_here(u):
    return LIST[0] * jnp.ones_like(u)


def by_wrapped_global():
    """It is what its module has under its name, and still not a function of JAX."""
    return (lambda u, p, t: wrapped_here(u)), lambda k: LIST.__setitem__(0, k)


def by_custom_rule():
    @jax.custom_jvp
    def g(x):
        return K * x

    g.defjvp(lambda a, b: (K * a[0], K * b[0]))
    return (lambda u, p, t: g(jnp.ones_like(u))), lambda k: set_global("K", k)


def by_cached():
    kept = {}

    @functools.lru_cache
    def k():
        return kept["k"]

    def change(new):
        kept["k"] = new
        k.cache_clear()

    change(1.0)
    return (lambda u, p, t: k() * jnp.ones_like(u)), change


def by_patched_library():
    def f(u, p, t):
        return MODULE.jnp.ones_like(u)

    def change(k):
        MODULE.jnp = types.SimpleNamespace(ones_like=lambda u: jnp.full_like(u, k))

    MODULE.jnp = jnp
    return f, change


WAYS = [x for name, x in list(globals().items()) if name.startswith("by_")]


@pytest.fixture(autouse=True)
def _as_they_were():
    yield
    set_global("K", 1.0)
    set_global("DEVICE_ARRAY", jnp.array([1.0]))
    LIST[0] = NESTED["a"][0] = ARRAY[0] = BIG[0] = MODULE.k = MODULE.inner.k = 1.0
    Model.scale = 1.0


@pytest.mark.parametrize("way", WAYS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("alone", [True, False], ids=["f", "prob_func"])
def test_what_is_changed_is_seen(way, alone):
    """In f, or in a prob_func that calls it."""
    f, change = way()

    def prob_func(prob, ctx):
        return eo.remake(prob, p=f(prob.u0, None, 0.0) * ctx.sim_id)

    def go():
        if alone:
            return solve(f).squeeze().tolist()
        return solve(rate_p, prob_func).squeeze().tolist()

    for k in (1.0, 1.0, 3.0, 3.0, -2.0, 1.0):
        change(k)
        assert go() == ([1.0 + k] * 2 if alone else [1.0 + k, 1.0 + 2 * k])


@pytest.mark.parametrize("way", WAYS, ids=lambda x: x.__name__)
def test_what_is_the_same_is_traced_once(way, count):
    f, _ = way()
    unseen = ("by_big_array", "by_module_as_value", "by_getattr", "by_globals", "by_slots")
    solve(f)
    assert count() > 0
    solve(f)
    anew = way.__name__ in (*unseen, "by_cached")
    assert (count() > 0) == anew


@hypothesis.given(
    some.lists(
        some.tuples(some.sampled_from(range(6)), some.sampled_from([0.0, -0.0, 1.0, 2.0, 1, True])),
        min_size=2,
        max_size=12,
    )
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_any_sequence_of_changes(changes):
    """The key of a function with state of many kinds is that of its state, types included."""
    cell, listed, held, model = 1.0, [1.0], {"k": 1.0}, Model()
    array = np.array(1.0)

    def f(x, k=1.0):
        return cell, listed, held, model.rate(), array, k

    def state():
        parts = (cell, listed[0], held["k"], model.k, float(array), *(f.__defaults__ or ()))
        return tuple((type(x), str(x)) for x in parts)

    seen: dict = {}
    for which, value in changes:
        if which == 0:
            cell = value
        elif which == 1:
            listed[0] = value
        elif which == 2:
            held["k"] = value
        elif which == 3:
            model.k = value
        elif which == 4:
            array[()] = value
        else:
            f.__defaults__ = (value,)
        key = reached(f).parts
        assert seen.setdefault(key, state()) == state()
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (1.0, np.float64(1.0)),
        (np.float32(1.0), np.float64(1.0)),
        (np.array([1.0]), np.array([[1.0]])),
        (np.array([1, 2]), np.array([1, 2], np.uint64)),
        ([1.0], (1.0,)),
        ([[1.0], 2.0], [[1.0, 2.0]]),
        ("1", 1),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (slice(1), slice(2)),
        (jnp.array([1.0]), jnp.array([1.0])),
        (Numbers(1.0), (1.0, 0.0)),
        (jnp.sin, jnp.cos),
        (np.dtype("f4"), np.dtype("f8")),
        (jax.nn.relu, jax.nn.softplus),
    ],
    ids=lambda x: type(x).__name__,
)
def test_keys_that_differ(a, b):
    assert reached(a) == reached(a)
    assert reached(a).parts != reached(b).parts


def test_not_a_number_is_itself():
    assert reached(float("nan")) == reached(float("nan"))


def unkeyed_things():
    generator = np.random.default_rng(0)
    counter = itertools.count()

    def imports(u, p, t):
        import math

        return math.pi * u

    def assigns(u, p, t):
        global K
        K = 2.0
        return u

    return {
        "a generator": generator,
        "its method": generator.normal,
        "a counter": counter,
        "a bound method of Python's generator": random.random,
        "time": time.time,
        "numpy.random": lambda: np.random.normal(),  # noqa: NPY002
        "numpy.random in two steps": lambda: (lambda n: n.random)(np),
        "numpy handed on": lambda xp=np: xp.random.normal(),
        "numpy by getattr": lambda: getattr(np, "random"),  # noqa: B009
        "a file": lambda: open("numbers"),
        "loads": lambda: np.load("numbers.npy"),
        "the clock": lambda: time.time(),
        "an import": imports,
        "an assignment": assigns,
        "eval": lambda: eval("K"),
        "print": lambda: print(1),
        "JAX's configuration": lambda: jax.config.values,
        "objects in an array": np.array([[], None], object),
        "a lock": threading.Lock(),
        "a subclass of list": type("L", (list,), {})([1.0]),
        "a reference": jax.new_ref(jnp.ones(2)),
        "too much": [[x] for x in range(5000)],
        "too many numbers": [float(x) for x in range(5000)],
        "a store": lambda: eo.open_ensemble("x.zarr"),
    }


@pytest.mark.parametrize("name", unkeyed_things())
def test_what_cannot_be_told_has_no_key(name):
    with pytest.raises(Unkeyed):
        reached(unkeyed_things()[name])


def test_an_endless_thing_has_a_key():
    endless: list = [1.0]
    endless.append(endless)
    other: list = [2.0]
    other.append(other)
    assert reached(endless) == reached(endless)
    assert reached(endless).parts != reached(other).parts


#
# What touches the world
#


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.normal(),  # noqa: NPY002
        lambda: random.random(),
        lambda: time.perf_counter(),
    ],
    ids=["numpy", "python", "clock"],
)
def test_what_is_drawn_is_drawn_each_time(draw):
    def prob_func(prob, ctx):
        return eo.remake(prob, p=draw())

    drawn = [solve(rate_p, prob_func).ravel() for _ in range(3)]
    assert len(np.unique(drawn)) == 6


def test_side_effects_happen_each_time():
    calls = []

    def prob_func(prob, ctx):
        calls.append(1)
        return prob

    for _ in range(3):
        solve(rate_p, prob_func, p=1.0)
        assert calls
        calls.clear()


def test_a_callback_is_not_kept(count):
    def f(u, p, t):
        return jax.pure_callback(lambda x: np.asarray(x), u, u, vmap_method="sequential")

    for _ in range(2):
        solve(f)
        assert count() > 0


#
# Numbers of the problem and of solve
#


def grown(prob, ctx):
    return eo.remake(prob, p=prob.p * ctx.sim_id)


def decaying(u, p, t):
    return -p * u


@pytest.mark.parametrize("prob_func", [None, grown], ids=["alone", "prob_func"])
def test_new_numbers_are_used_without_a_trace(prob_func, count):
    """Whatever JAX arrays u0 and p are."""
    for i, (u0, p) in enumerate([(1.0, 1.0), (2.0, 3.0), (-1.0, 0.5)]):
        got = solve(rate_p, prob_func, u0=jnp.array([u0]), p=jnp.array(p)).squeeze()
        factors = [1, 1] if prob_func is None else [1, 2]
        np.testing.assert_array_equal(got, [u0 + p * x for x in factors])
        assert (count() > 0) == (i == 0)


@pytest.mark.parametrize("as_p", [float, np.float64, np.array], ids=str)
@pytest.mark.parametrize("prob_func", [None, grown], ids=["alone", "prob_func"])
def test_new_numbers_of_python_and_numpy(prob_func, as_p):
    for p in (1.0, 2.0, 1.0, -0.0):
        got = solve(rate_p, prob_func, p=as_p(p)).squeeze()
        np.testing.assert_array_equal(got, [1 + p, 1 + (p if prob_func is None else 2 * p)])


def test_parameters_written_into():
    p = np.array([1.0])
    for k in (1.0, 5.0, 1.0, 2.0):
        p[0] = k
        assert solve(rate_p, grown, p=p).squeeze().tolist() == [1 + k, 1 + 2 * k]


def test_another_array_of_the_same_bytes():
    """What was kept doesn't share memory with the array that it was made of."""
    first = np.ones(1024)
    solve(lambda u, p, t: p[:1] * u, grown, p=first)
    f = lambda u, p, t: p[:1] * jnp.ones_like(u)  # noqa: E731
    assert solve(f, grown, p=first).squeeze().tolist() == [2.0, 3.0]
    second = first.copy()
    first[:] = 7.0
    assert solve(f, grown, p=second).squeeze().tolist() == [2.0, 3.0]


def test_swapped_arrays():
    """One array in two places isn't one the next time."""
    a, b = jnp.array([1.0]), jnp.array([2.0])

    def prob_func(prob, ctx):
        return eo.remake(prob, p=(prob.p[0] * ctx.sim_id, prob.p[1], a))

    def f(u, p, t):
        return p[0] + 10 * p[1] + 100 * p[2] * jnp.ones_like(u)

    for p in ((a, a), (a, b), (b, a), (b, b)):
        got = solve(f, prob_func, u0=jnp.zeros(1), p=p).squeeze()
        x, y = (float(v[0]) for v in p)
        assert got.tolist() == [x + 10 * y + 100, 2 * x + 10 * y + 100]


def test_a_module_with_new_weights(count):
    for i, k in enumerate((1.0, 2.0, 3.0)):
        got = solve(
            Module(jnp.array(k)), lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id)
        )
        assert got.squeeze().tolist() == [1 + k, 2 + k]
        assert (count() > 0) == (i == 0)


def test_values_that_decide_about_the_trace(count):
    def prob_func(prob, ctx):
        return eo.remake(prob, p=prob.p * ctx.sim_id if float(prob.p) > 2 else -prob.p)

    def go(p):
        return solve(rate_p, prob_func, u0=u0, p=p).squeeze().tolist()

    u0, small, large = jnp.ones(1), jnp.array(1.0), jnp.array(3.0)
    for p, expected in ((small, [0.0, 0.0]), (large, [4.0, 7.0])) * 2:
        assert go(p) == expected
    count()
    assert go(large) == [4.0, 7.0]
    assert count() == 0
    assert go(jnp.array(4.0)) == [5.0, 9.0]


def test_times_and_tolerances_of_the_problem_are_checked():
    def prob_func(prob, ctx):
        return eo.remake(prob, u0=prob.u0 * ctx.sim_id, tspan=(0.0, prob.p), abstol=prob.p)

    for end in (1.0, 2.0, 1.0):
        got = solve(lambda u, p, t: jnp.ones_like(u), prob_func, p=jnp.array(end), dt=end)
        assert got.squeeze().tolist() == [1 + end, 2 + end]
    with pytest.raises(ValueError, match=r"tspan must be finite"):
        solve(lambda u, p, t: jnp.ones_like(u), prob_func, p=jnp.array(jnp.inf))


@pytest.mark.parametrize("prob_func", [None, grown], ids=["alone", "prob_func"])
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("saveat", [0.5, 0.25, [0.0, 1.0], np.array([0.5]), jnp.array([0.25, 1.0])]),
        ("saveat", [np.array([[0.5], [1.0]]), np.array([[1.0], [0.25]])]),
        ("abstol", [1e-6, 1e-2, np.array([1e-4])]),
        ("reltol", [1e-6, 1e-2, jnp.array(1e-4)]),
        ("dt", [0.1, 0.01]),
        ("maxiters", [10_000, 2]),
        ("save_everystep", [True, False]),
        ("adaptive", [True, False]),
    ],
)
def test_options(prob_func, option, values):
    """The same as without anything kept, in any order."""
    prob = eo.ODEProblem(decaying, jnp.array([1.0]), (0.0, 1.0), jnp.array(2.0))
    ens = eo.EnsembleProblem(prob, prob_func)

    def go(value):
        options: Any = {option: value}
        if option == "adaptive":
            options["dt"] = 0.05
        sim = eo.solve(ens, trajectories=2, **options)
        return [np.asarray(x) for x in (sim.u, sim.t, sim.retcode, sim.stats.naccept)]

    expected = []
    for value in values:
        traces.clear()
        expected.append(go(value))
    traces.clear()
    for i in (*range(len(values)), *reversed(range(len(values)))):
        jax.tree.map(np.testing.assert_array_equal, go(values[i]), expected[i])


def test_options_written_into():
    times = np.array([0.5])
    for t in (0.5, 0.25, 1.0):
        times[0] = t
        got = solve(rate_p, grown, p=1.0, saveat=times, dt=0.25, save_start=None)
        assert got.squeeze().tolist() == [1 + t, 1 + 2 * t]


@pytest.mark.parametrize("prob_func", [None, grown], ids=["alone", "prob_func"])
def test_shapes_and_precisions(prob_func):
    for dtype, shape in itertools.product((np.float32, np.float64), ((1,), (2, 2))):
        u0 = jnp.ones(shape, dtype)
        got = solve(lambda u, p, t: p * u, prob_func, u0=u0, p=jnp.array(2, u0.dtype))
        assert got.shape == (2, *shape)
        assert got.dtype == u0.dtype
        assert (got[0] == 3).all()


def test_precision_of_jax():
    def f(u, p, t):
        return jnp.full_like(u, jnp.finfo(jnp.asarray(1.0).dtype).eps)

    def go():
        return solve(f, lambda prob, ctx: prob, u0=np.zeros(1, np.float32))

    want = {}
    for x64 in (True, False, True, False):
        with jax.enable_x64(x64):
            assert want.setdefault(x64, go()).tolist() == go().tolist()
    assert want[True].max() < want[False].max()


def test_configuration_of_jax():
    keys = set()
    for context in (
        contextlib.nullcontext(),
        jax.default_matmul_precision("float32"),
        jax.numpy_dtype_promotion("standard"),
        jax.default_prng_impl("rbg"),
        jax.threefry_partitionable(False),
        jax.default_device(jax.devices()[0]),
        jax.enable_x64(jnp.asarray(1.0).dtype == np.float32),
    ):
        with context:
            keys.add(reached(helper).parts)
    assert len(keys) == 7
    assert reached(helper).parts in keys


def test_the_number_of_trajectories(count):
    for n in (2, 3, 5):
        got = solve(rate_p, grown, p=jnp.array(1.0), n=n)
        assert got.squeeze().tolist() == [2.0 + i for i in range(n)]


def test_seeds_and_keys():
    def prob_func(prob, ctx):
        return eo.remake(prob, p=jax.random.normal(ctx.key))

    drawn = [solve(rate_p, prob_func, seed=s).ravel() for s in (0, 1, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[2])
    np.testing.assert_array_equal(drawn[1], drawn[3])
    assert len(np.unique(drawn)) == 4
    np.testing.assert_array_equal(solve(rate_p, prob_func, key=jax.random.key(1)).ravel(), drawn[1])
    other = solve(rate_p, prob_func, key=jax.random.key(1, impl="rbg")).ravel()
    assert (other != drawn[1]).all()


def test_numpy_rows_picked_by_the_index(count):
    rows: Any = np.array([[1.0], [2.0], [3.0]])

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=rows[ctx.index])

    def go(k, n=2):
        return solve(rate_p, prob_func, p=jnp.array(k), n=n).squeeze().tolist()

    assert go(1.0) == [2.0, 3.0]
    assert count() > 0
    assert go(2.0) == [3.0, 4.0]
    assert count() == 0
    rows[1] = 7.0
    assert go(2.0) == [3.0, 9.0]
    assert go(2.0, 3) == [3.0, 9.0, 5.0]
    for _ in range(2):
        with pytest.raises(IndexError, match="out of bounds"):
            go(2.0, 4)


def test_an_output_func(count):
    offset = [1.0]

    def output_func(sol, ctx):
        return sol.u[-1, 0] + offset[0] + ctx.index, False

    prob = eo.ODEProblem(rate_p, jnp.zeros(1), (0.0, 1.0), jnp.array(0.0))
    ens = eo.EnsembleProblem(prob, grown, output_func)

    def go(n=2, **options):
        return eo.solve(ens, trajectories=n, **options).u.tolist()

    assert go() == [1.0, 2.0]
    assert count() > 0
    assert go() == [1.0, 2.0]
    assert count() == 0
    offset[0] = 3.0
    assert go() == [3.0, 4.0]
    assert go(saveat=0.25) == [3.0, 4.0]
    assert go() == [3.0, 4.0]


def test_a_controller_written_into():
    """What is kept isn't the controller of then."""

    def controlled(tolerance):
        return dfx.PIDController(rtol=tolerance, atol=tolerance)

    def go(controller):
        prob = eo.ODEProblem(decaying, jnp.array([1.0]), (0.0, 1.0), jnp.array(2.0))
        ens = eo.EnsembleProblem(prob, grown)
        options = {"stepsize_controller": controller, "engine": "diffrax", "trajectories": 2}
        return eo.solve(ens, eo.Tsit5(), **options).stats.naccept.tolist()

    fine, coarse = controlled(1e-10), controlled(1e-2)
    expected = go(fine), go(coarse)
    assert expected[0] > expected[1]
    for name in ("rtol", "atol"):
        object.__setattr__(fine, name, 1e-2)
    assert (go(fine), go(controlled(1e-10))) == expected[::-1]


#
# Inside of transformations
#


def test_under_transformations_nothing_is_kept():
    def end(p):
        prob = eo.ODEProblem(rate_p, jnp.ones(1), (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, grown)
        options = {"adaptive": False, "dt": 1.0, "trajectories": 2}
        return jnp.asarray(eo.solve(ens, eo.Euler(), **options).u)[:, -1, 0].sum()

    p = jnp.array(1.0)
    assert float(end(p)) == 5.0
    assert float(jax.grad(end)(p)) == 3.0
    assert float(jax.jit(end)(p)) == 5.0
    assert jax.vmap(end)(jnp.array([1.0, 2.0])).tolist() == [5.0, 8.0]
    assert float(end(2 * p)) == 8.0


def test_a_closure_that_is_traced():
    def end(k):
        prob = eo.ODEProblem(lambda u, p, t: k * jnp.ones_like(u), jnp.ones(1), (0.0, 1.0))
        return jnp.asarray(eo.solve(prob, eo.Euler(), adaptive=False, dt=1.0).u)[-1, 0]

    for _ in range(2):
        assert float(jax.grad(end)(1.0)) == 1.0
        assert float(end(jnp.array(2.0))) == 3.0
        assert jax.vmap(end)(jnp.array([1.0, 2.0])).tolist() == [2.0, 3.0]


#
# What is kept
#


def test_arrays_are_not_kept_alive():
    def closing(k):
        weight = jnp.full(1, k)
        solve(lambda u, p, t: weight * u, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * weight))
        return weakref.ref(weight)

    gone = [closing(float(k)) for k in range(3)]
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_the_oldest_are_forgotten():
    few = Traces(2)
    keys = [reached(k) for k in range(3)]
    few.keep(keys[0], [0], "a")
    few.keep(keys[1], [1], "b")
    assert few.find(keys[0]) == ([0], "a")
    few.keep(keys[2], [2], "c")
    assert few.find(keys[1]) is None
    assert few.find(keys[0]) == ([0], "a")
    assert len(few) == 2


def test_an_id_that_is_used_again():
    """By another array than that which the trace was kept for."""
    some_array, other = jnp.ones(1), jnp.zeros(1)
    kept = Traces()
    key = reached(some_array)
    kept.keep(key, [some_array], None)
    assert kept.find(key) == ([some_array], None)
    assert kept.find(key._replace(arrays=(other,))) is None
    assert len(kept) == 0


def test_many_threads():
    """Each with numbers of its own, and one changing what the others reach."""
    wrong, held = [], [1.0]

    def work(k):
        def f(u, p, t):
            return k * jnp.ones_like(u)

        def added(prob, ctx):
            return eo.remake(prob, u0=prob.u0 + prob.p)

        for p in range(5):
            got = solve(
                f, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + prob.p), p=jnp.array(1.0 * p)
            )
            if got.squeeze().tolist() != [1.0 + p + k] * 2:
                wrong.append((k, p, got))
            held[0] += 1

    threads = [threading.Thread(target=work, args=(float(k),)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_function_that_fails_fails_again():
    def f(u, p, t):
        raise RuntimeError("as always")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="as always"):
            solve(f)
    assert len(trace_cache.traces) <= 1  # a seed
