"""Functions have the meaning that they have when `solve` is called: everything that they read may
have changed since the last call, in any way that Python allows."""

import abc
import dataclasses
import functools
import threading
import types
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo


K: Any = 1.0
HELD: dict = {"k": 1.0, "nested": [{"k": 1.0}]}
ARRAY = np.array([1.0])
BIG = np.ones(400_000)
MODULE: Any = types.ModuleType("of_a_test")
CONFIG: Any = jax.config


def helper():
    return K


def set_global(k):
    globals()["K"] = k


class Model:
    scale = 1.0

    def __init__(self, k=1.0):
        self.k = k

    def rate(self):
        return self.k * type(self).scale


class Inheriting(Model):
    def rate(self):
        return super().rate()


class Module(eqx.Module):
    k: Any
    static: Any = eqx.field(static=True, default=1.0)

    def rate(self):
        return self.k * self.static


# Each way gives a function of no arguments, and another that changes what it returns.

WRAPPED = jax.vmap(lambda x: K * x)
PARTIAL = functools.partial(lambda k: k, k=1.0)
MODEL = Inheriting()


def read(k=1.0, *, by_keyword=1.0):
    return max(k, by_keyword)


def with_attribute():
    return with_attribute.k


def with_code():
    return 1.0


def with_name():
    return float(with_name.__name__)


def with_annotation():
    return with_annotation.__annotations__["k"]


def set_item(held, key):
    return lambda k: held.__setitem__(key, k)


def set_attribute(thing, name, of=lambda k: k):
    """(Of modules of Equinox, too.)"""
    if isinstance(thing, eqx.Module):
        return lambda k: object.__setattr__(thing, name, of(k))
    return lambda k: setattr(thing, name, of(k))


ALONE = {
    "global": (lambda: [K][0], set_global),
    "global_of_a_helper": (lambda: helper(), set_global),
    "globals": (lambda: globals()["K"], set_global),
    "globals_of_another": (lambda: getattr(helper, "__globals__")["K"], set_global),  # noqa: B009
    "containers": (lambda: HELD["nested"][0]["k"], lambda k: HELD["nested"][0].update(k=k)),
    "array": (lambda: ARRAY[0], set_item(ARRAY, 0)),
    "traced_array": (lambda: jnp.asarray(BIG)[0], set_item(BIG, 0)),
    "default": (read, set_attribute(read, "__defaults__", lambda k: (k,))),
    "keyword_default": (read, set_attribute(read, "__kwdefaults__", lambda k: {"by_keyword": k})),
    "attribute": (with_attribute, set_attribute(with_attribute, "k")),
    "code": (
        with_code,
        set_attribute(with_code, "__code__", lambda k: eval(f"lambda: {k}").__code__),
    ),
    "name": (with_name, set_attribute(with_name, "__name__", str)),
    "annotation": (with_annotation, lambda k: with_annotation.__annotations__.update(k=k)),
    "partial": (PARTIAL, lambda k: PARTIAL.keywords.update(k=k)),
    "module": (lambda: MODULE.k, set_attribute(MODULE, "k")),
    "patched_library": (
        lambda: MODULE.jnp.ones(()),
        lambda k: setattr(MODULE, "jnp", types.SimpleNamespace(ones=lambda s: jnp.full(s, k))),
    ),
    "object": (MODEL.rate, set_attribute(MODEL, "k")),
    "class": (Model().rate, set_attribute(Model, "scale")),
    "module_of_equinox": (
        (of_equinox := Module(jnp.array(1.0))).rate,
        set_attribute(of_equinox, "k", jnp.array),
    ),
    "static_of_equinox": ((static := Module(1.0)).rate, set_attribute(static, "static")),
    "wrapped": (lambda: WRAPPED(jnp.ones(1))[0], set_global),
}


def by_array_of_jax(_):
    held = [jnp.array(1.0)]
    return (lambda: held[0]), lambda k: held.__setitem__(0, jnp.array(k))


def by_value_of_an_array_of_jax(_):
    held = [jnp.array(1.0)]
    return (lambda: float(held[0])), lambda k: held.__setitem__(0, jnp.array(k))


def by_cell(_):
    k = 1.0

    def change(new):
        nonlocal k
        k = new

    return (lambda: k), change


def by_method(_):
    class Own(Model):
        pass

    own = Own()
    return (lambda: own.rate()), lambda k: setattr(Own, "rate", lambda self: k)


def by_method_of_a_library(patch):
    layer: Any = eqx.nn.Linear(1, 1, key=jax.random.key(0))

    def change(k):
        patch.setattr(eqx.nn.Linear, "__call__", lambda self, x: k * x)

    return (lambda: layer(1.0)), change


def by_default_of_a_tuple(_):
    class Numbers(NamedTuple):
        k: float = 1.0

    return (lambda: Numbers().k), lambda k: setattr(Numbers.__new__, "__defaults__", (k,))


def by_metadata(_):
    held = {"k": 1.0}

    @dataclasses.dataclass
    class Data:
        x: float = dataclasses.field(default=0.0, metadata=held)

    return (lambda: dataclasses.fields(Data)[0].metadata["k"]), lambda k: held.update(k=k)


def by_registration(_):
    class Large(abc.ABC):  # noqa: B024
        pass

    model = Model()
    return (
        lambda: 3.0 if isinstance(model, Large) else 1.0,
        lambda k: Large.register(Model) if k == 3.0 else None,
    )


def by_repr(_):
    class Shown:
        def __repr__(self):
            return str(HELD["k"])

    shown = Shown()
    return (lambda: float(repr(shown))), lambda k: HELD.update(k=k)


def by_cache(_):
    cached = functools.lru_cache(lambda: HELD["k"])

    def change(k):
        HELD["k"] = k
        cached.cache_clear()

    return (lambda: cached()), change


def by_custom_rule(_):
    @jax.custom_jvp
    def g(x):
        return K * x

    g.defjvp(lambda primals, tangents: (K * primals[0], K * tangents[0]))
    return (lambda: g(jnp.ones(()))), set_global


def by_configuration(_):
    return (
        lambda: {"float32": 1.0, "highest": 3.0}[str(CONFIG.jax_default_matmul_precision)],
        lambda k: CONFIG.update(
            "jax_default_matmul_precision", {1.0: "float32", 3.0: "highest"}[k]
        ),
    )


WAYS = {name: lambda _, way=way: way for name, way in ALONE.items()}
WAYS |= {name[3:]: x for name, x in list(globals().items()) if name.startswith("by_")}


@pytest.fixture(autouse=True)
def _as_they_were():
    precision = CONFIG.jax_default_matmul_precision
    yield
    set_global(1.0)
    HELD.update(k=1.0, nested=[{"k": 1.0}])
    ARRAY[0] = BIG[0] = Model.scale = 1.0
    CONFIG.update("jax_default_matmul_precision", precision)


def solve(f=None, prob_func=None, output_func=None, p: Any = 0.0, n=2):
    """A step of Euler, from zero: p, or what `f` returns."""
    f = f or (lambda u, p, t: jnp.full_like(u, p))
    prob = eo.ODEProblem(f, jnp.zeros(1), (0.0, 1.0), p)
    ens = eo.EnsembleProblem(prob, prob_func, output_func)
    sim = eo.solve(ens, eo.Euler(), dt=1.0, trajectories=n, save_start=False)
    return np.asarray(sim.u).ravel().tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(x, id=name) for i, (name, x) in enumerate(WAYS.items())]
)
def test_what_has_changed_is_seen(way, monkeypatch):
    """In f, in prob_func and in output_func."""
    k, change = way(monkeypatch)

    def f(u, p, t):
        return k() * jnp.ones_like(u)

    def prob_func(prob, ctx):
        return eo.remake(prob, p=k() * ctx.sim_id)

    def output_func(sol, ctx):
        return sol.u[-1, 0] + k(), False

    for value in (1.0, 3.0) if way is by_registration else (1.0, 3.0, 1.0):
        change(value)
        assert solve(f) == [value, value]
        assert solve(prob_func=prob_func) == [value, 2 * value]
        assert solve(output_func=output_func) == [value, value]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "read", [np.load, jnp.load, eqx.tree_deserialise_leaves], ids=["numpy", "jax", "equinox"]
)
def test_a_file_that_has_changed_is_read(read, tmp_path):
    path = tmp_path / "k.eqx"
    like = (np.zeros(1),) if read is eqx.tree_deserialise_leaves else ()
    for k in (1.0, 3.0):
        with path.open("wb") as file:
            np.save(file, np.array([k]))
        assert solve(lambda u, p, t: jnp.asarray(read(path, *like))) == [k, k]


def test_what_another_thread_changed_meanwhile_does_not_last():
    """It sets a value that f reads, and sets it back while f is being traced still."""
    asked, changed, read = (threading.Event() for _ in range(3))

    def f(u, p, t):
        if asked.is_set():
            return HELD["k"] * jnp.ones_like(u)
        asked.set()
        changed.wait()
        k = HELD["k"]
        read.set()
        other.join()
        return k * jnp.ones_like(u)

    def meanwhile():
        asked.wait()
        HELD["k"] = 3.0
        changed.set()
        read.wait()
        HELD["k"] = 1.0

    other = threading.Thread(target=meanwhile)
    asked.set()
    assert solve(f) == [1.0, 1.0]  # (and once more, to see whether it is the same each time)
    asked.clear()
    other.start()
    assert solve(f) == [3.0, 3.0]
    assert solve(f) == [1.0, 1.0]


@pytest.mark.slow
def test_many_threads():
    """Each with numbers of its own."""
    wrong = []

    def work(k):
        for p in range(4):
            got = solve(
                lambda u, p, t: (p + k) * jnp.ones_like(u),
                lambda prob, ctx: eo.remake(prob, p=prob.p * ctx.sim_id),
                p=jnp.array(1.0 * p),
            )
            if got != [p + k, 2 * p + k]:
                wrong.append((k, p, got))

    threads = [threading.Thread(target=work, args=(float(k),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_side_effects_happen_each_time():
    calls = []

    def prob_func(prob, ctx):
        calls.append(1)
        return prob

    for _ in range(3):
        calls.clear()
        solve(prob_func=prob_func)
        assert calls


def test_a_function_that_fails_fails_again():
    def f(u, p, t):
        raise RuntimeError("as always")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="as always"):
            solve(f)


#
# Numbers of the problem and of solve
#


def grown(prob, ctx):
    return eo.remake(prob, p=prob.p * ctx.sim_id)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "as_p", [float, np.float64, np.array, jnp.array], ids=["float", "float64", "numpy", "jax"]
)
def test_new_parameters(as_p):
    for p in (1.0, 2.0, 1.0):
        assert solve(p=as_p(p)) == [p, p]
        assert solve(prob_func=grown, p=as_p(p)) == [p, 2 * p]


def test_parameters_written_into():
    p = np.array([1.0])
    for p[0] in (1.0, 5.0, 1.0):
        assert solve(prob_func=grown, p=p) == [p[0], 2 * p[0]]


def test_swapped_parameters():
    """One array in two places isn't one the next time."""
    a, b = jnp.array([1.0]), jnp.array([2.0])

    def prob_func(prob, ctx):
        return eo.remake(prob, p=(prob.p[0] * ctx.sim_id, prob.p[1], a))

    def f(u, p, t):
        return p[0] + 10 * p[1] + 100 * p[2] * jnp.ones_like(u)

    for p in ((a, a), (a, b), (b, a), (b, b)):
        x, y = (float(v[0]) for v in p)
        assert solve(f, prob_func, p=p) == [x + 10 * y + 100, 2 * x + 10 * y + 100]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("as_p", [np.array, jnp.array], ids=["numpy", "jax"])
def test_parameters_that_decide(as_p):
    def prob_func(prob, ctx):
        return eo.remake(prob, p=prob.p * ctx.sim_id if prob.p > 2 else -prob.p)

    for p in (1.0, 3.0, 1.0, 4.0):
        assert solve(prob_func=prob_func, p=as_p(p)) == ([p, 2 * p] if p > 2 else [-p, -p])


@pytest.mark.slow
def test_new_rows_of_numpy():
    rows: Any = np.array([[1.0], [2.0], [3.0]])

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=rows[ctx.index])

    for rows[1] in (2.0, 7.0):
        assert solve(prob_func=prob_func) == [1.0, rows[1, 0]]
    assert solve(prob_func=prob_func, n=3) == [1.0, 7.0, 3.0]
    with pytest.raises(IndexError, match="index 3 along axis 0"):
        solve(prob_func=prob_func, n=4)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [lambda i: ARRAY[i], range], ids=["lifted", "called"])
def test_what_was_traced_in_vain_is_forgotten(fails):
    """An array of JAX's that was made of one of NumPy's is not taken for what that is now."""

    def prob_func(prob, ctx):
        p = jnp.asarray(BIG)[0] * ctx.sim_id
        fails(ctx.index * 0)
        return eo.remake(prob, p=p)

    with jax.enable_x64(False):  # (where NumPy's numbers are converted)
        for BIG[0] in (1.0, 3.0, 5.0):
            assert solve(prob_func=prob_func) == [BIG[0], 2 * BIG[0]]


@pytest.mark.slow
def test_seeds_and_keys():
    def prob_func(prob, ctx):
        return eo.remake(prob, p=jax.random.normal(ctx.key))

    ens = eo.EnsembleProblem(
        eo.ODEProblem(lambda u, p, t: jnp.full_like(u, p), jnp.zeros(1), (0.0, 1.0)), prob_func
    )

    def draw(**how):
        return np.asarray(eo.solve(ens, eo.Euler(), dt=1.0, trajectories=2, **how).u)[:, -1, 0]

    drawn = [draw(seed=s) for s in (0, 1, 0)]
    np.testing.assert_array_equal(drawn[0], drawn[2])
    np.testing.assert_array_equal(draw(key=jax.random.key(1)), drawn[1])
    assert len(np.unique([*drawn, draw(key=jax.random.key(1, impl="rbg"))])) == 6


@pytest.mark.slow
def test_precisions_of_jax():
    def f(u, p, t):
        return jnp.full_like(u, jnp.finfo(jnp.asarray(1.0).dtype).eps)

    def go():
        prob = eo.ODEProblem(f, np.zeros(1, np.float32), (0.0, 1.0))
        return float(eo.solve(prob, eo.Euler(), dt=1.0).u[-1, 0])

    for x64 in (True, False, True):
        with jax.enable_x64(x64):
            assert go() == np.finfo(np.float64 if x64 else np.float32).eps


@pytest.mark.slow
def test_a_closure_that_is_traced():
    def end(k):
        prob = eo.ODEProblem(lambda u, p, t: k * jnp.ones_like(u), jnp.ones(1), (0.0, 1.0))
        return jnp.asarray(eo.solve(prob, eo.Euler(), dt=1.0).u)[-1, 0]

    for _ in range(2):
        assert float(jax.grad(end)(1.0)) == 1.0
        assert float(end(jnp.array(2.0))) == 3.0
        assert jax.vmap(end)(jnp.array([1.0, 2.0])).tolist() == [2.0, 3.0]
