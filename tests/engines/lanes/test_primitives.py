"""Every primitive, on scalars and on arrays, compared with JAX's own batching."""

import functools
import math
from collections.abc import Callable

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from ensembleode.fields.lanes import (
    control_flow as control_flow,
    indexing as indexing,
    primitives as primitives,
)
from ensembleode.fields.lanes.interpreter import Interpreter, RULES, TooLong
from ensembleode.fields.lanes.scalars import simplify
from ensembleode.fields.lanes.values import from_array, from_constant, Scalars, spread, unpack
from hypothesis import given, settings, strategies as st
from jax import lax

from ...fields.drawn import DRAWN, reals
from ...marks import slow_unless


LANES = 3
# Of newer versions of JAX.
NEW = {"log2", "mulhi", "one_minus_square", "polynomial", "stack", "unstack"}
quick = settings(max_examples=5, deadline=None, derandomize=True, database=None)


#
# The cases: functions of one trajectory, with example arguments
#


def ints(*shape, low=-5, high=6):
    return np.random.default_rng(len(shape)).integers(low, high, shape)


def bools(*shape):
    return np.random.default_rng(7).integers(0, 2, shape).astype(bool)


X, Y, POSITIVE, UNIT = reals(3), reals(3, low=-1.5), reals(3, low=0.5), reals(3, low=-0.9, high=0.9)
INTS, COUNTS, B, C = ints(3), ints(3, low=1), bools(3), bools(3)[::-1]
M = reals(3, 2)

UNARY: dict[str, tuple[Callable, np.ndarray]] = {
    "abs": (lax.abs, X),
    "acos": (lax.acos, UNIT),
    "acosh": (lax.acosh, 1 + POSITIVE),
    "asin": (lax.asin, UNIT),
    "asinh": (lax.asinh, X),
    "atan": (lax.atan, X),
    "atanh": (lax.atanh, UNIT),
    "bessel_i0e": (lax.bessel_i0e, X),
    "bessel_i1e": (lax.bessel_i1e, X),
    "cbrt": (lax.cbrt, X),
    "ceil": (lax.ceil, X),
    "conj": (lambda x: lax.conj(lax.complex(x, x)), X),
    "copy": (jnp.copy, X),
    "convert_element_type": (lambda x: x.astype(jnp.int32), 3 * X),
    "cos": (lax.cos, X),
    "cosh": (lax.cosh, X),
    "digamma": (lax.digamma, POSITIVE),
    "erf": (lax.erf, X),
    "erf_inv": (lax.erf_inv, UNIT),
    "erfc": (lax.erfc, X),
    "exp": (lax.exp, X),
    "exp2": (lax.exp2, X),
    "expm1": (lax.expm1, X),
    "floor": (lax.floor, X),
    "imag": (lambda x: lax.imag(lax.complex(x, 2 * x)), X),
    "is_finite": (lambda x: lax.is_finite(1 / jnp.floor(x)), X),
    "lgamma": (lax.lgamma, POSITIVE),
    "log": (lax.log, POSITIVE),
    "log1p": (lax.log1p, POSITIVE),
    "log2": (jnp.log2, POSITIVE),
    "logistic": (lax.logistic, X),
    "neg": (lax.neg, X),
    "not": (lax.bitwise_not, B),
    "one_minus_square": (lambda x: jax.jvp(jnp.tanh, (x,), (x,)), X),
    "polynomial": (lambda x: jnp.polyval(x, x), X),
    "population_count": (lax.population_count, COUNTS),
    "real": (lambda x: lax.real(lax.complex(x, 2 * x)), X),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), X),
    "round": (lax.round, 4 * X),
    "rsqrt": (lax.rsqrt, POSITIVE),
    "sign": (lax.sign, X),
    "sin": (lax.sin, X),
    "sinh": (lax.sinh, X),
    "sqrt": (lax.sqrt, POSITIVE),
    "square": (lax.square, X),
    "stop_gradient": (lax.stop_gradient, X),
    "tan": (lax.tan, X),
    "tanh": (lax.tanh, X),
}
BINARY: dict[str, tuple] = {
    "add": (lax.add, X, Y),
    "and": (lax.bitwise_and, B, C),
    "atan2": (lax.atan2, X, Y),
    "clz": (lambda x, y: lax.clz(x) + y, COUNTS, COUNTS),
    "complex": (lax.complex, X, Y),
    "div": (lax.div, X, Y),
    "eq": (lax.eq, INTS, COUNTS),
    "ge": (lax.ge, X, Y),
    "gt": (lax.gt, X, Y),
    "igamma": (lax.igamma, POSITIVE, POSITIVE),
    "igammac": (lax.igammac, POSITIVE, POSITIVE),
    "le": (lax.le, INTS, COUNTS),
    "lt": (lax.lt, X, Y),
    "max": (lax.max, X, Y),
    "min": (lax.min, X, Y),
    "mul": (lax.mul, X, Y),
    "mulhi": (lambda x, y: lax.mulhi(x, y) if hasattr(lax, "mulhi") else x, INTS, COUNTS),
    "ne": (lax.ne, INTS, COUNTS),
    "nextafter": (lax.nextafter, X, Y),
    "or": (lax.bitwise_or, B, C),
    "polygamma": (lax.polygamma, np.array([1.0, 2.0, 3.0]), POSITIVE),
    "pow": (lax.pow, POSITIVE, X),
    "rem": (lax.rem, INTS, COUNTS),
    "shift_left": (lax.shift_left, INTS, COUNTS),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, INTS, COUNTS),
    "shift_right_logical": (lax.shift_right_logical, INTS, COUNTS),
    "sub": (lax.sub, X, Y),
    "xor": (lax.bitwise_xor, B, C),
    "zeta": (lax.zeta, 1 + POSITIVE, POSITIVE),
}


@jax.custom_jvp
def cubed(x, y):
    return x**3, y


@cubed.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return cubed(x, y), (jnp.cos(x) * dx, dy + 0 * x.sum())


def _nested(x):
    def step(carry, z):
        return carry * z + 1, (carry, z.sum())

    return lax.scan(step, x[0], x)


CASES: dict[str, list[tuple]] = {name: [case] for name, case in (UNARY | BINARY).items()}
CASES |= {
    "add_any": [(lambda x: jax.grad(lambda z: jnp.sum(jnp.sin(z) * z))(x), X)],
    "argmax": [(lambda x: jnp.argmax(x, 0), M), (lambda x: jnp.argmax(x), X)],
    "argmin": [(lambda x: jnp.argmin(x, 1), M)],
    "broadcast_in_dim": [
        (lambda x: jnp.broadcast_to(x[:, None], (3, 4)), X),
        (lambda x: jnp.full((2, 3), x), X[0].reshape(())),
        (lambda x: jnp.broadcast_to(x, (90,)), X[0].reshape(1)),
    ],
    "clamp": [
        (lax.clamp, -abs(X), Y, abs(X)),
        (lambda x, low: lax.clamp(low, x, 1.0), X, X[0].reshape(())),
    ],
    "concatenate": [
        (lambda x, y: jnp.concatenate([x, y], 1), M, reals(3, 1)),
        (lambda x, y: jnp.concatenate([x, y]), X, reals(1)),
    ],
    "cond": [
        (lambda x, y: lax.cond(x[0] > y[0], lambda: (x, y.sum()), lambda: (y, x[1])), X, Y),
        (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.exp], x), np.int64(1), X),
        (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), X),
    ],
    "cumlogsumexp": [(lambda x: lax.cumlogsumexp(x, 0), M)],
    "cummax": [(lambda x: lax.cummax(x, 0), M)],
    "cummin": [(lambda x: lax.cummin(x, 1, reverse=True), M)],
    "cumprod": [(lambda x: jnp.cumprod(x), X)],
    "cumsum": [
        (lambda x: jnp.cumsum(x[:0]), X),
        (lambda x: jnp.cumsum(x, 0), M),
        (lambda x: lax.cumsum(x, 0, reverse=True), X),
    ],
    "custom_jvp_call": [(cubed, X, Y), (jax.nn.relu, M), (jax.nn.softplus, X)],
    "dot_general": [
        (lambda a, x: a @ x, reals(2, 3), X),
        (lambda x, a: x @ a, X, M),
        (jnp.dot, X, Y),
        (lambda a, b: a @ b, reals(2, 3), M),
        (lambda a, b: a @ b, reals(5, 6), reals(6, 4)),
        (lambda a, x: a @ x, reals(8, 9), reals(9)),
        (lambda x, a: x @ a, reals(9), reals(9, 7)),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), reals(2, 3, 4), reals(2, 4, 3)),
        (lambda a, x: jnp.einsum("bij,bj->bi", a, x), reals(2, 9, 4), reals(2, 4)),
        (lambda x, a: jnp.einsum("bj,bij->bi", x, a), reals(2, 4), reals(2, 9, 4)),
        (lambda a, b: jnp.einsum("ij,jk->ki", a, b), reals(5, 6), reals(6, 4)),
        (jnp.outer, X, reals(20)),
    ],
    "dynamic_slice": [
        (lambda x: lax.dynamic_slice(x, (1, 1), (2, 1)), M),
        (lambda x, i: x[i], X, np.int64(-1)),
        (lambda x, i: lax.dynamic_slice(x, (i,), (2,)), X, np.int64(2)),
        (lambda x, i: x[i], reals(30), np.int64(17)),
        (lambda x, i: x[i], M, np.int64(2)),
    ],
    "dynamic_update_slice": [
        (lambda x, y: lax.dynamic_update_slice(x, y, (2,)), X, reals(2)),
        (lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), M, reals(2, 1), np.int64(1)),
    ],
    "eq_to": [(lambda x: lax.eq_to_p.bind(x, x[::-1]), X)],
    "gather": [
        (lambda x: x[np.array([2, 0, -1])], X),
        (lambda x: x[np.array([[2, 0], [1, 1]])], M),
        (lambda x: x[np.array([0, 2]), np.array([1, 0])], M),
        (lambda x: x.at[np.array([1, 7])].get(mode="fill"), X),
        (lambda x: x.at[np.array([1, 7])].get(mode="clip"), X),
        (lambda x: x.at[np.array([1, 7])].get(mode="fill", fill_value=3), INTS),
        (lambda x, i: x[i], M, np.array([2, 1])),
        (lambda x: jnp.take_along_axis(x, np.array([[1, 0], [0, 1], [1, 1]]), 1), M),
    ],
    "integer_pow": [(lambda x, n=n: x**n, X) for n in (2, 3, 5, 7, -1, -3)],
    "iota": [
        (lambda x: x + lax.broadcasted_iota(jnp.float64, (3, 2), 1), M),
        (lambda x: jnp.sum(x) + jnp.arange(70.0), X),
    ],
    "jit": [(jax.jit(lambda x: jnp.sin(x) * 2), X), (lambda x: jnp.where(x > 0, x, 1.0), X)],
    "le_to": [(lambda x: lax.le_to_p.bind(x, x[::-1]), X)],
    "lt_to": [(lambda x: lax.lt_to_p.bind(x, x[::-1]), X)],
    "pad": [
        (lambda x: jnp.pad(x, 1), M),
        (lambda x: lax.pad(x, 2.0, [(1, -1, 2)]), X),
        (lambda x: lax.pad(x, 2.0, [(-1, 2, 0), (0, 0, 1)]), M),
        (lambda x, y: lax.pad(x, y, [(1, 1, 0)]), X, np.float64(3)),
    ],
    "reduce": [
        (lambda x: lax.reduce(x, 5.0, lax.add, (0,)), X),
        (lambda x: lax.reduce(x, 0.5, lax.max, (1,)), M),
        (lambda x: lax.reduce(x, -1.0, lambda a, b: a + b * b, (0, 1)), M),
        (lambda x: lax.reduce(x, 2.0, lax.mul, (0,)), reals(30, 3)),
        (
            lambda x, i: lax.reduce(
                (x, i), (5.0, np.int64(1)), lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0,)
            ),
            X,
            INTS,
        ),
    ],
    "reduce_and": [(lambda x: jnp.all(x, 0), bools(3, 2))],
    "reduce_max": [(lambda x: jnp.max(x, 1), M), (jnp.max, X)],
    "reduce_min": [(lambda x: jnp.min(x, 0), M)],
    "reduce_or": [(jnp.any, bools(3, 2))],
    "reduce_prod": [(lambda x: jnp.prod(x, 0), M)],
    "reduce_sum": [
        (lambda x: jnp.sum(x, 1), M),
        (lambda x: jnp.sum(x, (0, 2)), reals(2, 3, 2)),
        (lambda x: jnp.sum(x[:0]), X),
    ],
    "reduce_window": [
        (lambda x: lax.reduce_window(x, 5.0, lax.add, (3,), (1,), "VALID"), X),
        (lambda x: lax.reduce_window(x, 0.5, lax.max, (2, 1), (1, 1), "SAME"), M),
    ],
    "reduce_xor": [(lambda x: lax.reduce(x, np.int64(0), lax.bitwise_xor, (0,)), ints(3, 2))],
    "regularized_incomplete_beta": [(lax.betainc, POSITIVE, POSITIVE, abs(UNIT))],
    "remat2": [(jax.checkpoint(lambda x: jnp.sin(x) * 2), X)],
    "reshape": [
        (lambda x: x.reshape(2, 3), M),
        (lambda x: x.reshape(-1), M),
        (lambda x: lax.reshape(x, (6,), (1, 0)), M),
        (lambda x: lax.reshape(x, (4, 40), (2, 0, 1)), reals(2, 20, 4)),
    ],
    "rev": [(lambda x: x[::-1], M), (lambda x: jnp.flip(x), M)],
    "scan": [
        (_nested, M),
        (lambda x: lax.scan(lambda c, z: (c + z, c * z), x, None, length=0) if 0 else x, X),
        (lambda x: lax.scan(lambda c, z: (c + z, c), x[0], x, reverse=True), X),
        (lambda x: lax.fori_loop(0, 3, lambda i, z: z * x[i], x), X),
        (lambda x: lax.fori_loop(0, 90, lambda i, z: 0.9 * jnp.roll(z, 1) + i, x), X),
        (lambda x: lax.scan(lambda c, z: (c + z, jnp.outer(c, z)), x, reals(2, 3)), X),
        (lambda x, y: lax.scan(lambda c, z: (c + z, z), y, x), reals(2, 40), reals(40)),
    ],
    "scatter": [
        (lambda x: x.at[1].set(5.0), X),
        (lambda x: x.at[np.array([0, 5])].set(5.0, mode="drop"), X),
        (lambda x, y: x.at[:, 1].set(y), M, X),
        (lambda x, y: x.at[1:].set(y), X, reals(2)),
        (lambda x, y, i: x.at[i].set(y), X, np.float64(3), np.int64(2)),
    ],
    "scatter-add": [
        (lambda x, y: x.at[np.array([0, 0, 2])].add(y), X, Y),
        (lambda x, y, i: x.at[i].add(y), M, reals(2), np.int64(2)),
    ],
    "scatter-sub": [(lambda x: x.at[1].subtract(5.0), X)],
    "scatter-max": [(lambda x: x.at[np.array([1, 2])].max(0.5), X)],
    "scatter-min": [(lambda x: x.at[np.array([1, 2])].min(0.5), X)],
    "scatter-mul": [(lambda x: x.at[np.array([1, 2])].multiply(0.5), X)],
    "select_n": [
        (lambda b, x, y: lax.select_n(b, x, y), B, X, Y),
        (lambda b, x, y: lax.select_n(b, x, y), np.bool_(True), X, Y),
        (lambda i, x, y: lax.select_n(i, x, y, x * y), np.array([0, 1, 2], np.int32), X, Y),
        (lambda x, y: jnp.where(np.array([True, False, True]), x, y), X, Y),
    ],
    "slice": [(lambda x: x[1:], X), (lambda x: x[::2, 1:], M), (lambda x: x[:0], X)],
    "sort": [(lambda x: jnp.sort(x, 0), M), (lambda x, y: lax.sort((x, y), num_keys=1), X, Y)],
    "split": [(lambda x: jnp.split(x, [1], 0), M), (lambda x: jnp.split(x, 2, 1), M)],
    "squeeze": [(lambda x: jnp.squeeze(x, 1), reals(3, 1))],
    "stack": [(lambda x, y: jnp.stack([x, y], 1), X, Y)],
    "tile": [(lambda x: jnp.tile(x, (1, 2)), M), (lambda x: lax.tile(x, (2,)), X)],
    "transpose": [(lambda x: x.T, M), (lambda x: x.transpose(2, 0, 1), reals(2, 3, 2))],
    "unstack": [(lambda x: tuple(x), X), (lambda x: jnp.unstack(x, axis=1), M)],
}
ALL = [(name, i) for name, cases in sorted(CASES.items()) for i in range(len(cases))]


#
# The checks
#


def primitives_of(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for x in jtu.tree_leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(x):
                yield from primitives_of(getattr(x, "jaxpr", x))


def _is_jaxpr(x):
    return isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)


def in_lanes(array, lane_axis=-1):
    """Different numbers in each lane, of the same kind."""
    array = np.asarray(array)
    if array.dtype == bool:
        lanes = [array ^ (k % 2 == 1) for k in range(LANES)]
    elif array.dtype.kind == "i":
        lanes = [
            np.roll(array, k) if array.ndim else np.maximum(array - k, 0) for k in range(LANES)
        ]
    else:
        lanes = [array * (1 - k / 16) for k in range(LANES)]
    return np.stack(lanes, lane_axis).astype(array.dtype)


@functools.cache
def traced(name, i):
    fn, *args = CASES[name][i]
    return jax.make_jaxpr(fn)(*args)


def inputs(args, kinds):
    return [
        in_lanes(a) if k == "lanes" else np.asarray(a) for a, k in zip(args, kinds, strict=True)
    ]


def by_jax(fn, arrays, kinds):
    """The mapped function, lanes last."""
    if "lanes" in kinds:
        axes = [-1 if k == "lanes" else None for k in kinds]
        fn = jax.vmap(fn, in_axes=axes, out_axes=-1)
    return jtu.tree_leaves(fn(*arrays))


def value_of(run, array, kind):
    if kind == "constant":
        return from_constant(array)
    batched = kind == "lanes"
    shape = array.shape[:-1] if batched else array.shape
    if not run.is_apart(shape):
        return from_array(jnp.asarray(array), batched)
    rows = array.reshape(math.prod(shape), *array.shape[len(shape) :])
    return Scalars(shape, array.dtype, [jnp.asarray(x) for x in rows])


def by_lanes(closed, arrays, kinds, scalarised):
    """The interpreter; None where it declines to take a matrix product apart."""
    run = Interpreter(scalarised)
    values = [value_of(run, array, kind) for array, kind in zip(arrays, kinds, strict=True)]
    try:
        outs = run.evaluate_closed(closed, values)
    except TooLong:
        assert scalarised
        assert "dot_general" in primitives_of(closed.jaxpr)
        return None
    return [spread(x, (LANES,) if "lanes" in kinds else ()) for x in outs]


def both(fn, closed, args, kinds):
    """For each of these kinds, what JAX has, and what the interpreter, in scalars and in arrays.

    All in one program, as compiling is what takes the time.
    """
    constants = [inputs(args, each) for each in kinds]

    @jax.jit
    def program(given):
        outs = []
        for numbers, arrays, each in zip(constants, given, kinds, strict=True):
            mixed = [
                x if kind == "constant" else y
                for x, y, kind in zip(numbers, arrays, each, strict=True)
            ]
            # (For JAX, a constant is what all lanes share.)
            expected = by_jax(fn, arrays, each)
            outs.append((expected, [by_lanes(closed, mixed, each, s) for s in (True, False)]))
        return outs

    return program(constants)


def assert_same(got, expected, rtol=1e-13):
    if got is None:
        return
    for x, want in zip(got, expected, strict=True):
        assert x.shape == want.shape
        assert x.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(x), np.asarray(want), rtol=rtol, atol=rtol)


# (To compile.)
LONG = {"igamma", "igammac", "regularized_incomplete_beta"}


def test_every_rule_has_a_case():
    assert set(RULES) == set(CASES)


# (Those of tests/fields are run for every primitive.)
QUICK = [x for x in ALL if x[1] == 0 and x[0] not in LONG][::2]


@pytest.mark.parametrize(
    ("name", "i"),
    [slow_unless((name, i) in QUICK, name, i, id=f"{name}-{i}") for name, i in ALL],
)
def test_agrees_with_jax(name, i):
    fn, *args = CASES[name][i]
    kinds = [["lanes"] * len(args), ["shared"] * len(args), ["constant"] * len(args)]
    if len(args) > 1:
        kinds += [["shared", *kinds[0][1:]], [*kinds[0][1:], "constant"]]
    for expected, found in both(fn, traced(name, i), args, kinds):
        for got in found:
            assert_same(got, expected)


@pytest.mark.parametrize("name", sorted(CASES))
def test_cases_use_their_primitive(name):
    used = {p for i in range(len(CASES[name])) for p in primitives_of(traced(name, i).jaxpr)}
    assert name in used or (name in NEW and jax.__version_info__ < (0, 12))


#
# Shapes, axes and indices at random
#


def agree(fn, *args, rtol=1e-13):
    """In both forms, with the first argument in lanes, and with all of them."""
    closed = jax.make_jaxpr(fn)(*args)
    kinds = [["lanes"] * len(args), ["lanes", *["shared"] * (len(args) - 1)]]
    # (Of one argument, these are the same.)
    for expected, found in both(fn, closed, args, kinds[: len(args)]):
        for got in found:
            assert_same(got, expected, rtol)


@pytest.mark.parametrize("case", DRAWN)
@quick
@given(st.data())
def test_any_shapes_and_axes(case, data):
    agree(*DRAWN[case](data), rtol=1e-12)


@settings(quick, max_examples=20)
@given(
    st.sampled_from(["add", "sub", "mul", "div", "max", "min", "pow", "eq", "lt", "rem", "atan2"]),
    st.sampled_from([0, 1, -1, 2.5, -7]),
    st.sampled_from([0, 1, -1, 2.5, -7]),
    st.sampled_from([np.float64, np.float32, np.int64, np.int32]),
)
def test_constants_fold_as_jax_computes(name, x, y, dtype):
    fn = getattr(lax, name)
    if name in ("pow", "atan2") and np.dtype(dtype).kind == "i":
        return
    if name in ("div", "rem") and np.dtype(dtype).kind == "i" and y == 0:
        return
    args = np.asarray(x, dtype), np.asarray(y, dtype)
    closed = jax.make_jaxpr(fn)(*args)
    expected = [np.asarray(fn(*args))]
    for kinds in (["constant"] * 2, ["constant", "shared"], ["shared", "constant"]):
        got = by_lanes(closed, inputs(args, kinds), kinds, True)
        assert_same(got, expected, 1e-6 if dtype is np.float32 else 1e-13)


def test_nothing_is_emitted_for_what_changes_nothing():
    def fn(x, i):
        one, zero = lax.full_like(x, 1), lax.full_like(x, 0)
        floats = (x * one) / one - zero + lax.neg(zero)
        integers = i * 0 + i * 1 - (0 - 0 * i)
        return floats, integers, jnp.where(zero > one, jnp.sin(x), x)

    run = Interpreter(scalarised=True)
    x, i = (unpack(from_array(jnp.ones((3, LANES), d), True)) for d in (np.float64, np.int64))
    outs = run.evaluate_closed(jax.make_jaxpr(fn)(np.ones(3), np.ones(3, int)), [x, i])
    assert [o.entries for o in outs] == [x.entries, i.entries, x.entries]
    assert run.operations == 3  # the sines that are not chosen
    assert simplify("add_any", (x.entries[0], np.float64(0)), np.float64, {}) is x.entries[0]


#
# The numbers with which arithmetic goes its own way
#


SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan)
BINARY_OPERATIONS = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "max": lax.max,
    "min": lax.min,
    "where": lambda x, y: jnp.where(x > y, x, y),
    "unless": lambda x, y: jnp.where(x == 0, y, -x),
    "prod": lambda x, y: jnp.prod(jnp.stack([x, y])),
}
UNARY_OPERATIONS = {
    "neg": lax.neg,
    "sqrt": lax.sqrt,
    "log": lax.log,
    "abs": lax.abs,
    "sign": lax.sign,
    "floor": lax.floor,
    "to the 0": lambda x: lax.integer_pow(x, 0),
    "to the 3": lambda x: lax.integer_pow(x, 3),
    "to the -1": lambda x: lax.integer_pow(x, -1),
}
leaves = st.one_of(st.sampled_from("xy"), st.sampled_from(SPECIAL))
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY_OPERATIONS)), inner),
        st.tuples(st.sampled_from(sorted(BINARY_OPERATIONS)), inner, inner),
    ),
    max_leaves=6,
)


def meaning(expression, x, y):
    match expression:
        case str():
            return {"x": x, "y": y}[expression]
        case float():
            return np.asarray(expression, x.dtype)
        case (name, a):
            return UNARY_OPERATIONS[name](meaning(a, x, y))
        case (name, a, b):
            return BINARY_OPERATIONS[name](meaning(a, x, y), meaning(b, x, y))


@settings(quick, max_examples=60)
@given(expressions, st.sampled_from([np.float64, np.float32]))
@pytest.mark.slow
def test_special_numbers_are_those_of_jax(expression, dtype):
    def field(x, y):
        # Of the variables, whatever the expression.
        return jnp.where(jnp.isfinite(x + y), meaning(expression, x, y), meaning(expression, x, y))

    x, y = (np.asarray(a.ravel(), dtype) for a in np.meshgrid(SPECIAL, SPECIAL))
    with jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(field)(x[0], y[0])
        expected = np.asarray(jax.vmap(field)(x, y))
    for scalarised in (True, False):
        values = [from_array(jnp.asarray(a), True) for a in (x, y)]
        (out,) = Interpreter(scalarised).evaluate_closed(closed, values)
        got = np.asarray(spread(out, x.shape))
        np.testing.assert_array_equal(got, expected)
        numbers = ~np.isnan(expected)  # whose sign means nothing
        np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])


def test_matrix_products_are_not_transposed():
    weights, x = np.ones((50, 40)), np.ones(40)
    for fn, shape in ((lambda w, x: w @ x, (40,)), (lambda w, x: x @ w.T, (40,))):
        closed = jax.make_jaxpr(fn)(weights, x)

        def lanes(w, xs, closed=closed):
            ins = [from_array(w, False), from_array(xs, True)]
            return Interpreter(False).evaluate_closed(closed, ins)[0].array

        jaxpr = jax.make_jaxpr(lanes)(weights, np.ones((*shape, LANES)))
        transposed = [e for e in jaxpr.eqns if e.primitive.name == "transpose"]
        assert all(e.invars[0].aval.shape == weights.shape for e in transposed)


@pytest.mark.parametrize("fn", [jnp.sort, jnp.fft.fft, jnp.linalg.inv, jnp.linalg.eigvalsh])
def test_what_has_no_rule_is_mapped(fn):
    args = [np.eye(3) * 2 + reals(3, 3, low=0.0, high=0.2)]
    args[0] = args[0] + args[0].T
    agree(fn, *args, rtol=1e-9)


def test_what_is_filled_in():
    for dtype in (jnp.bfloat16, np.float32, np.complex128, np.int8, np.uint16, bool):
        agree(
            lambda x, dtype=dtype: x.astype(dtype).at[np.array([1, 7])].get(mode="fill") * dtype(1),
            X,
        )


def test_indices_of_each_lane():
    table = reals(40)
    agree(lambda i, x: x[i], np.int64(3), table)
    agree(lambda i, x: x[i], np.int64(3), X)
    agree(lambda i, x: x[i], np.array([2, 0]), M)
    agree(lambda i, x: x.at[i].add(1.0), np.int64(1), X)
    agree(lambda i, x: lax.dynamic_update_slice(x, x[:2] * 2, (i,)), np.int64(1), X)
    agree(lambda i, x: lax.dynamic_slice(x, (i,), (2,)), np.int64(2), X)
