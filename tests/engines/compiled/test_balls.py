"""Balls contain every number computed while the state and the time stay within their balls."""

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from ensembleode.engines.compiled.field.field import evaluate_with_parts
from ensembleode.engines.compiled.llvm.builder import ElementPointer
from ensembleode.engines.compiled.llvm.module import Module
from ensembleode.engines.compiled.loop.balls import _RULES, balls, bounded, SLACK
from ensembleode.fields.ir import Op
from ensembleode.fields.walking import every_part

from .field_harness import Case, Columns, compiled, LANES, lowered


SIZE = 3


class Balls:
    """The values and the radii of functions of a state of `SIZE` components, a parameter of each
    lane, and the time."""

    def __init__(self, fns, dtype=np.float64):
        self.dtype = np.dtype(dtype)
        numbers = np.ones((LANES, SIZE), dtype), (np.ones(LANES, dtype),), np.ones(LANES, dtype)
        self.fields = [lowered(Case(lambda u, p, t, f=f: f(u, p[0], t), *numbers)) for f in fns]
        for field, fn in zip(self.fields, fns, strict=True):
            assert bounded(field.function)[0] == (0,), fn
        module = Module(4)
        self.keys = [list(f.arrays) for f in self.fields]
        for i in range(len(self.fields)):
            self._write(module, i)
        self.engine = compiled(module.text)

    def _write(self, module, i):
        field, keys = self.fields[i], self.keys[i]
        names = [f"numbers{k}" for k in range(len(keys))] + ["t", "spread", "out"]
        with module.function(f"run{i}", [f"ptr %{x}" for x in names], linkage="external") as b:
            time, spread, out = (ElementPointer(b, f"%{x}", self.dtype) for x in names[-3:])

            def body(k):
                first = k * 4
                numbers, t = Columns(b, keys, first), time.load_lanes(first)
                (value,), at = evaluate_with_parts(b, field.function, numbers, t)
                radii = [spread.load_lanes(first + c * LANES) for c in range(SIZE + 1)]
                found = balls(b, field.function, at, radii.__getitem__, lambda: radii[SIZE])
                (ball,) = found
                out.store_lanes(first, b.spread(value))
                out.store_lanes(first + LANES, b.spread(ball.rounded()))

            b.for_(LANES // 4, body)
            b.return_()

    def __call__(self, i, u, p, t, spread):
        """The values and the radii, `[lane]`; `u` and `spread` are `[number, lane]`."""
        arrays = dict(self.fields[i].arrays) | {("u", self.dtype): u}
        if ("own", self.dtype) in arrays:
            arrays["own", self.dtype] = p[None]
        out = np.zeros((2, LANES), self.dtype)
        given = [*(np.ascontiguousarray(arrays[k], k[1]) for k in self.keys[i]), t, spread, out]
        given = [np.ascontiguousarray(x) for x in given[:-1]] + [out]
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(given))
        function(self.engine.get_function_address(f"run{i}"))(*[x.ctypes.data for x in given])
        return out

    def check(self, i, rng, what, scale=1.0):
        """Checks that the values at points of the box are in the balls. Returns which radii are
        finite, the smallest radii that these points need, and the radii."""
        dtype = self.dtype
        u, p = rng.normal(size=(SIZE, LANES)) * scale, rng.normal(size=LANES)
        t, size = rng.normal(size=LANES), 10.0 ** rng.uniform(-9, 0.5, LANES)
        spread = rng.uniform(0, 1, (SIZE + 1, LANES)) * size * scale
        u, p, t, spread = (x.astype(dtype) for x in (u, p, t, spread))
        room = 256 * np.finfo(dtype).eps
        with np.errstate(all="ignore"):
            radii = SLACK * spread + room * np.abs([*u, t]).astype(dtype)
            value, radius = self(i, u, p, t, radii)
            most = np.zeros(LANES)
            for k in range(40):
                shift = rng.uniform(-1, 1, spread.shape)
                shift = np.sign(shift) if k < 20 else shift
                shift = (shift * spread).astype(dtype)
                there, _ = self(i, u + shift[:SIZE], p, t + shift[SIZE], radii)
                most = np.fmax(most, np.abs(there.astype(float) - value))
        assert np.all((most <= radius) | ~np.isfinite(radius)), (what, most, radius)
        return np.isfinite(radius) & np.isfinite(value), most, radius


CASES = {
    "abs": lambda u, p, t: jnp.abs(u[0]) - abs(p),
    "neg": lambda u, p, t: -u[0],
    "convert_element_type": lambda u, p, t: jnp.where(u[0].astype(float) > 0.25, u[1], u[2]),
    "add": lambda u, p, t: u[0] + (u[1] + (p + t)),
    "sub": lambda u, p, t: u[0] - u[1] - p,
    "max": lambda u, p, t: jnp.maximum(u[0], p) - 1e3,
    "min": lambda u, p, t: jnp.minimum(u[0] + u[1], t),
    "clamp": lambda u, p, t: lax.clamp(jnp.full_like(u[0], -0.5), u[0], p),
    "mul": lambda u, p, t: 3.0 * u[0] * u[1] * (p * t),
    "square": lambda u, p, t: jnp.square(u[0]) - 100.0,
    "powers": lambda u, p, t: u[0] ** 3 + u[1] ** 4 - u[2] ** -7,
    "div": lambda u, p, t: u[0] / u[1] + u[2] / (1 + p * p) + 1 / (2 + t),
    "sqrt": lambda u, p, t: jnp.sqrt(u @ u) - jnp.sqrt(1 + p * p),
    "rsqrt": lambda u, p, t: lax.rsqrt(u[0]),
    "log": lambda u, p, t: jnp.log(u[0]),
    "exp": lambda u, p, t: jnp.exp(-u[0] / 7.2) - p,
    "pow": lambda u, p, t: lax.pow(u[0], jnp.asarray(1.4, u.dtype)) - lax.pow(u[1], p),
    "asinh": lambda u, p, t: jnp.arcsinh(u[0]),
    "atan": lambda u, p, t: jnp.arctan(u[0]),
    "cos": lambda u, p, t: jnp.cos(u[0] - t),
    "erf": lambda u, p, t: lax.erf(u[0]),
    "logistic": lambda u, p, t: jax.nn.sigmoid(u[0]),
    "sin": lambda u, p, t: jnp.sin(3 * u[0]),
    "tanh": lambda u, p, t: jnp.tanh(u[0]),
    "eq": lambda u, p, t: jnp.hypot(u[0], u[1]) - p,
    "ge": lambda u, p, t: jnp.where(u[0] >= 0, 1.0, -1.0) + u[1],
    "gt": lambda u, p, t: jnp.where(u[0] > p, u[1], 1e3),
    "le": lambda u, p, t: jnp.where(u[0] <= t, u[1], 2 * u[2]),
    "lt": lambda u, p, t: jnp.where(u[0] < u[1], p, u[2]),
    "ne": lambda u, p, t: jnp.where(u[0] != u[1], p, u[2]),
    "sign": lambda u, p, t: jnp.sign(u[0] - u[1]),
    "and": lambda u, p, t: jnp.where((u[0] > 0) & (u[1] > 0), u[2], 5.0),
    "or": lambda u, p, t: jnp.where((u[0] > 0) | (u[1] > p), u[2], 5.0),
    "xor": lambda u, p, t: jnp.where((u[0] > 0) ^ (u[1] > 0), u[2], 5.0),
    "not": lambda u, p, t: jnp.where(~(u[0] > 0), u[2], 5.0),
    "select_n": lambda u, p, t: jnp.where(p > 0, u[0], u[1] * u[2]),
    "what is the same": lambda u, p, t: p - 3.0,
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rules(dtype):
    found = Balls(CASES.values(), dtype)
    used = {x.name for f in found.fields for x in every_part(f.function) if isinstance(x, Op)}
    assert used >= _RULES.keys() - ({"convert_element_type"} if dtype == np.float64 else set())
    rng = np.random.default_rng(0)
    for i, name in enumerate(CASES):
        for scale in (1.0, 30.0):
            finite, most, radius = found.check(i, rng, name, scale)
            assert finite.any(), name
            if name in ("add", "mul", "sqrt", "exp", "sin"):
                # The balls of smooth functions are hardly wider than the slopes require.
                near = finite & (most > 1e-3 * radius)
                assert near.sum() > LANES / 4, (name, most, radius)


@pytest.mark.parametrize(
    "fn",
    [
        lambda u, p, t: jnp.floor(u[0]),
        lambda u, p, t: jnp.tan(u[0]),
        lambda u, p, t: lax.pow(u[0], u[1]),
        lambda u, p, t: lax.rem(u[0], u[1]),
        lambda u, p, t: u[jnp.asarray(u[0], int)],
        lambda u, p, t: lax.fori_loop(0, 300, lambda i, x: jnp.cos(x) * u[1], u[0]),
        lambda u, p, t: lax.cond(u[0] > 0, lambda: jnp.sin(u[1]), lambda: jnp.exp(u[2])),
        lambda u, p, t: u[0].astype(int).astype(u.dtype),
        lambda u, p, t: sum(jnp.sin(u[0] * i) for i in range(80)),
    ],
)
def test_no_rule(fn):
    numbers = np.ones((LANES, SIZE)), (np.ones(LANES),), np.ones(LANES)
    field = lowered(Case(lambda u, p, t: fn(u, p[0], t), *numbers))
    assert bounded(field.function)[0] == ()


def test_results_have_rules_of_their_own():
    """Whatever stands beside them; and as many as are short together."""

    def fn(u, p, t):
        known = [u[0] * p[0], jnp.sin(u[1]) - t]
        return jnp.stack([known[0], jnp.floor(u[0]), known[1], known[1] + jnp.tan(u[2])])

    numbers = np.ones((LANES, SIZE)), (np.ones(LANES),), np.ones(LANES)
    which, part = bounded(lowered(Case(fn, *numbers)).function)
    assert which == (0, 2)
    assert {x.name for x in every_part(part) if isinstance(x, Op)} == {"mul", "sin", "sub"}

    def long(u):
        return functools.reduce(lambda x, i: x * u[1] + i, range(45), u[0])

    fn = Case(lambda u, p, t: jnp.stack([long(u), u[2], long(-u)]), *numbers)
    assert bounded(lowered(fn).function)[0] == (0, 1)


def test_overflow():
    """A number that overflows has no finite ball if it is compared."""
    fns = [
        lambda u, p, t: jnp.where(jnp.exp(u[0]) * 0.0 > -1.0, 1.0, -1.0),
        lambda u, p, t: jnp.where(jnp.sqrt(u[0]) + 5.0 > 3.0, 1.0, -1.0),
    ]
    found = Balls(fns)
    spread = np.full((SIZE + 1, LANES), 0.5)
    one = np.ones(LANES)
    for i, at in enumerate((709.5, 0.25)):
        _, radius = found(i, np.full((SIZE, LANES), at), one, one, spread)
        assert not np.isfinite(radius).any()
        _, radius = found(i, np.full((SIZE, LANES), 2.0), one, one, spread)
        assert np.isfinite(radius).all()


LEAVES = st.sampled_from([0, 1, 2, "p", "t", 1.5, -0.25, 100.0])
UNARY = ("abs", "neg", "square", "sqrt", "exp", "sin", "tanh", "cube", "log")
BINARY = ("add", "sub", "mul", "div", "max", "min", "where")
TREES = st.recursive(
    LEAVES,
    lambda x: st.one_of(
        st.tuples(st.sampled_from(UNARY), x), st.tuples(st.sampled_from(BINARY), x, x)
    ),
    max_leaves=8,
)


FUNCTIONS = {
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "cube": lambda x: x**3,
    "where": lambda x, y: jnp.where(x > y, x - 1, y),
}


def written(tree, u, p, t):
    if isinstance(tree, tuple):
        name, *xs = tree
        fn = FUNCTIONS.get(name) or getattr(lax, name)
        return fn(*(written(x, u, p, t) for x in xs))
    if isinstance(tree, int):
        return u[tree]
    return {"p": p, "t": t}.get(tree, tree) if isinstance(tree, str) else jnp.full_like(t, tree)


@settings(max_examples=5, deadline=None)
@given(st.lists(TREES, min_size=8, max_size=16), st.integers(0, 2**32 - 1))
def test_expressions(trees, seed):
    found = Balls([lambda u, p, t, x=x: written(x, u, p, t) for x in trees])
    rng = np.random.default_rng(seed)
    for i, tree in enumerate(trees):
        found.check(i, rng, tree)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(TREES, min_size=8, max_size=16), st.integers(0, 2**32 - 1))
def test_many_expressions(trees, seed):
    test_expressions.hypothesis.inner_test(trees, seed)
