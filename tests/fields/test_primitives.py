"""Every primitive, taken apart into scalars and on arrays, compared with JAX."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.extend.random import threefry_2x32
from jax.lax import linalg

from ensembleode.fields.equations import CALLS, DRAWN as RANDOM, ELEMENTWISE
from ensembleode.fields.lowering.passing import RULES
from ensembleode.fields.simplifying import RULES as WRITTEN_OUT

from ..marks import slow_unless
from .cases import B, CASES as SHARED_CASES, INTS, M, X, Y
from .drawn import DRAWN, MODES, reals
from .lowered import agree


def countdown(x, n):
    return lax.while_loop(lambda c: c[1] > 0, lambda c: (c[0] * c[0] - 0.3, c[1] - 1), (x, n))


def in_groups(x, y):
    return lax.conv_general_dilated(x, y, (1,), "SAME", feature_group_count=2)


def pooled(x):
    return lax.reduce_window(x, -np.inf, lax.max, (2, 1), (1, 1), "SAME")


def least(x):
    return lax.reduce_window(x, np.inf, lax.min, (2,), (2,), [(1, 2)])


@jax.custom_batching.custom_vmap
def mapped(x):
    return jnp.sin(x)


mapped.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))
HERE = jax.devices()[0]
WORDS = np.array([0, 1, 2**32 - 1, 3141592653, 7], np.uint32)


# Every rule has a case, and so has every call. (In others all memory is read and written.)
NAMES = {*RULES, *WRITTEN_OUT, *CALLS} - {"take", "put"}
CASES = {name: SHARED_CASES[name] for name in SHARED_CASES if name in NAMES}
A = reals(3, 3) + 2 * np.roll(np.eye(3), 1, 0)
LARGER = reals(6, 6) + 2 * np.roll(np.eye(6), 1, 0)
CASES |= {
    "cholesky": [(lambda x, a=a: jnp.linalg.cholesky(a @ a.T + x[0] ** 2), X) for a in (A, LARGER)],
    "geqrf": [(lambda a: jnp.linalg.qr(a, mode="raw"), a) for a in (A, LARGER, M, M.T)],
    "householder_product": [
        (linalg.householder_product, M, np.array([0.3, 1.2])),
        (linalg.householder_product, LARGER, np.linspace(0.1, 1, 6)),
    ],
    "lu": [(linalg.lu, a) for a in (A, LARGER, M, M.T, np.stack([A, A.T]))],
    "lu_pivots_to_permutation": [
        (lambda k: linalg.lu_pivots_to_permutation(k, 4), np.array([2, 1, 3], np.int32))
    ],
    "ormqr": [(linalg.ormqr, M, np.array([0.3, 1.2]), A)],
    "qr": [(linalg.qr, a) for a in (A, LARGER, M, M.T)],
    "triangular_solve": [
        (linalg.triangular_solve, A + 3 * np.eye(3), M.T),
        (lambda a, b: linalg.triangular_solve(a, b, left_side=True), LARGER, reals(6, 2)),
    ],
    "tridiagonal_solve": [(linalg.tridiagonal_solve, X, Y, X[::-1], M)],
    "bitcast_convert_type": [(lambda x: jnp.copysign(x, -x[::-1]), X)],
    "call_hi_primitive": [(lambda x: jnp.searchsorted(np.sort(X), x), Y)],
    "conv_general_dilated": [
        (lambda x, y: jnp.convolve(x, y, "same"), reals(7), reals(3)),
        (lambda x, y: jnp.convolve(x, y), reals(7), reals(3)),
        (
            lambda x, y: lax.conv_general_dilated(
                x, y, (2, 1), [(1, 2), (0, 1)], (1, 2), (2, 1), ("NHWC", "HWIO", "NHWC")
            ),
            reals(2, 5, 4, 3),
            reals(2, 3, 3, 4),
        ),
        (
            jax.grad(lambda x, y: jnp.sum(in_groups(x, y) ** 2), (0, 1)),
            reals(3, 4, 4),
            reals(6, 2, 3),
        ),
        (in_groups, reals(3, 4, 4), reals(6, 2, 3)),
        (
            jax.grad(lambda x, y: jnp.sum(lax.conv(x, y, (2, 1), "SAME") ** 2), (0, 1)),
            reals(1, 2, 5, 4),
            reals(3, 2, 3, 2),
        ),
    ],
    "custom_vmap_call": [(mapped, X)],
    "copy_p": [(lambda x: jnp.array(x, copy=True), X)],
    "device_put": [(jax.device_put, X)],
    "empty": [(lambda x: x + lax.empty((3,), x.dtype) * 0, X)],
    "empty2": [(jax.grad(lambda x: jnp.sum(jnp.diag(x))), reals(3, 3))],
    "optimization_barrier": [(lambda x: lax.optimization_barrier((x, 2 * x)), X)],
    "platform_index": [(jnp.diagonal, reals(3, 3))],
    "reduce_window_max": [
        (lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 1), (2, 1), "SAME"), M)
    ],
    "reduce_window_min": [
        (lambda x: lax.reduce_window(x, np.inf, lax.min, (2,), (1,), "VALID"), X)
    ],
    "reduce_window_sum": [
        (
            lambda x: lax.reduce_window(
                x, 0.0, lax.add, (2, 2), (2, 1), [(1, 0), (0, 3)], (2, 1), (1, 2)
            ),
            M,
        ),
    ],
    "select_and_gather_add": [
        (lambda x, dx: jax.jvp(pooled, (x,), (dx,))[1], M, M[::-1]),
        (lambda x, dx: jax.jvp(least, (x,), (dx,))[1], X, Y),
    ],
    "select_and_scatter_add": [
        (lambda x: jax.grad(lambda x: jnp.sum(pooled(x) ** 2))(x), M),
        (lambda x: jax.grad(lambda x: jnp.sum(least(x) ** 2))(x), X),
        (lambda x: jax.hessian(lambda x: jnp.sum(pooled(x) ** 3))(x), M),
        (lambda x: jax.grad(lambda x: jnp.sum(pooled(x) ** 2))(x), np.ones((3, 2))),
    ],
    "sharding_constraint": [
        (lambda x: lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(HERE)), X)
    ],
    "iota_2x32_shape": [
        (lambda key: jax.random.bits(jax.random.wrap_key_data(key), (2, 3)), WORDS[:2]),
    ],
    "threefry2x32": [(lambda key, x: threefry_2x32((key[0], key[1]), x), WORDS[:2], WORDS)],
    "top_k": [
        (lambda x: lax.top_k(x, 2), X),
        (lambda x: lax.top_k(x, 2, axis=0), M),
        (lambda x: lax.top_k(x, 3), np.array([1.0, 2.0, 1.0, np.nan, 2.0, np.inf])),
        (jax.grad(lambda x: jnp.sum(lax.top_k(x, 2)[0] ** 2)), X),
        (lambda k: lax.top_k(k, 2), INTS),
    ],
    "while": [(countdown, X, np.int64(4)), (countdown, X[0], np.int64(4))],
}
ALL = [(name, i) for name, cases in sorted(CASES.items()) for i in range(len(cases))]


def agree_on(fn, *args, **options):
    """Whatever the function takes and returns: each of its results alone; the programs."""
    state = isinstance(args[0], np.ndarray) and args[0].dtype == np.float64
    u, p = (args[0], args[1:]) if state else (np.zeros(1), args)

    def result(k, u, p, t):
        return jtu.tree_leaves(fn(*([u] * state), *p))[k]

    outs = jtu.tree_leaves(jax.jit(fn)(*args))
    return [
        agree(functools.partial(result, k), u, p, expected=x, **options) for k, x in enumerate(outs)
    ]


# These are there on meshes only: tests/test_users_at_random.py.
ON_MESHES = {"pvary", "reshard"}


def test_every_rule_has_a_case():
    # (Those that draw are compared in `noise/test_random_numbers.py`, in compiled code.)
    assert NAMES - set(CALLS) - ON_MESHES - set(RANDOM.split()) <= set(CASES)


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize(
    ("name", "i"), [slow_unless(i < 1, name, i, id=f"{name}-{i}") for name, i in ALL]
)
def test_agrees_with_jax(name, i):
    fn, *args = CASES[name][i]
    programs = agree_on(fn, *args)
    assert all(apart.is_scalar for apart, _ in programs) or name not in ELEMENTWISE.split()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["add", "erf", "igamma", "integer_pow", "logistic", "round"])
def test_single_precision(name):
    for fn, *args in CASES[name]:
        args = [np.asarray(x, np.float32) for x in args]
        u, p = args[0], args[1:]
        agree(lambda u, p, t, fn=fn: fn(u, *p), u, p, np.float32(0), 2e-6, storage=np.float32)


#
# What is not a number, or outside of something
#


SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e300, -1e300, 3.0, 40.0]
)
WHOLE = np.array([0, 1, -1, 2, -7, 63, 64, -(2**63), 2**63 - 1])
BOTH = {
    "f": np.array(list(itertools.product(SPECIAL, SPECIAL))).T,
    "i": np.array(list(itertools.product(WHOLE, WHOLE))).T,
}
ALONE = {"f": SPECIAL, "i": WHOLE}
# At their poles and far from zero, no two libraries agree on these.
INEXACT = ("digamma", "igamma", "igammac", "polygamma", "regularized_incomplete_beta", "zeta")
ARGUMENTS = {
    name: [x.dtype.kind for x in CASES[name][0][1:]]
    for name in ELEMENTWISE.split()
    if name not in INEXACT
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "name",
    [n for n, kinds in ARGUMENTS.items() if kinds[0] in ALONE and len(kinds) < 3],
)
def test_special_numbers(name):
    fn, *args = CASES[name][0]
    kind = args[0].dtype.kind
    storage = np.float64 if kind == "f" else np.int64
    agree_on(fn, *([ALONE[kind]] if len(args) == 1 else BOTH[kind]), storage=storage)


@pytest.mark.slow
def test_special_numbers_among_others():
    x = SPECIAL
    rows = np.array(list(itertools.permutations([np.nan, np.inf, -np.inf, 1.0])))
    for fn in (jnp.argmax, jnp.argmin, jnp.max, jnp.min, lax.cummax, lax.cummin):
        agree_on(lambda x, fn=fn: fn(x, axis=1), rows)
        agree_on(lambda x, fn=fn: fn(x, axis=0), rows[:, :1])
    for dtype in (np.int8, np.int32, np.int64, np.uint8, np.uint32, np.bool_):
        agree_on(lambda x, dtype=dtype: x.astype(dtype), x)
    agree_on(lambda x: lax.clamp(-2.0, x, 2.0), x)
    agree_on(lambda x: lax.cumlogsumexp(x), np.array([-np.inf, -np.inf, 1.0, 700.0, 2.0]))
    agree_on(lambda x: lax.cumlogsumexp(x, reverse=True), np.array([1.0, np.nan, 2.0]))
    agree_on(lambda x: jnp.where(x > 0, jnp.log(x), jnp.sqrt(-x)), x)
    agree_on(lambda x: x**-2 + x**3, x)
    agree_on(lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), np.arange(-3.0, 3.0, 0.5))
    agree_on(lax.round, np.append(np.arange(-3.0, 3.0, 0.5), 0.49999999999999994))


@pytest.mark.slow
def test_sorting():
    x = np.array([0.5, np.nan, -0.0, -np.inf, 0.0, np.inf, 0.5, -1.0, -np.nan])
    whole, columns = np.array([3, -1, 3, 0, 2]), reals(4, 3)
    agree_on(jnp.sort, x)
    agree_on(lambda x: jnp.sort(x, descending=True), x)
    agree_on(jnp.argsort, x)
    agree_on(lambda x: 1 / jnp.sort(x), x)  # zeros of both signs are equal, and stay as they are
    agree_on(lambda k: jnp.argsort(k), whole)
    agree_on(lambda b: jnp.sort(b), B)
    agree_on(lambda x: jnp.sort(x, 0), columns)
    agree_on(lambda x: jnp.sort(x, 1), columns)
    agree_on(lambda x: x[jnp.argsort(x[:, 0])], columns)
    agree_on(lambda x, y: lax.sort((x, y, x * y), num_keys=2), np.round(X), Y)
    agree_on(lambda x: jnp.median(x), X)
    agree_on(jax.grad(lambda x: jnp.sum(jnp.sort(x) * jnp.arange(3.0))), X)
    agree_on(lambda x: jnp.searchsorted(jnp.sort(x), x, method="sort").astype(x.dtype), X)
    agree_on(lambda x: jnp.sort(x[:0]), X)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "dtype",
    [
        slow_unless(d in (np.int8, np.uint32), d)
        for d in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)
    ],
)
def test_integers_of_all_widths(dtype):
    info = np.iinfo(dtype)
    ends = np.array([info.min, info.max, 1, 3, 100], dtype)
    x, y = np.array(list(itertools.product(ends, ends)), dtype).T

    def fn(x, y):
        wrapped = x + y, x - y, x * y, -x, x // jnp.maximum(y, 1), x % jnp.maximum(y, 1), x**3
        bits = ~x, x & y, x | y, x ^ y, x << y, lax.shift_right_logical(x, y)
        compared = x < y, jnp.max(x), jnp.min(x), jnp.sum(x), jnp.argmax(x), x.astype(np.int8)
        counted = lax.clz(x), lax.population_count(x), lax.shift_right_arithmetic(x, y), abs(x)
        return *wrapped, *bits, *compared, *counted

    agree_on(fn, x, y, storage=dtype)
    if hasattr(lax, "mulhi"):
        agree_on(lax.mulhi, x, y, storage=dtype)


def test_fewer_bits():
    numbers = np.concatenate([SPECIAL, [1e-40, 3.0e38, 3.5e38, 65519.0, 65520.0, 6e-8, 2.0**-14]])
    x = np.concatenate([numbers, reals(20, low=-100.0), 1 + np.arange(9) * 2.0**-9])
    for exponent, mantissa in ((8, 7), (5, 10), (8, 23), (11, 52), (11, 3)):
        agree_on(lambda x, e=exponent, m=mantissa: lax.reduce_precision(x, e, m), x)
    singles = x[np.abs(x) < 1e38].astype(np.float32)
    agree(
        lambda u, p, t: lax.reduce_precision(u, 5, 10),
        singles,
        t=np.float32(0),
        storage=np.float32,
    )


#
# Indices in and out of bounds
#


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("i", [-9, -4, -3, -1, 0, 2, 3, 7])
def test_indices_out_of_bounds(i, mode):
    i = np.int64(i)
    if mode == "promise_in_bounds" and not -3 <= i < 3:
        return
    whole = np.array([2, 0, i])
    for j in (i, whole):
        agree_on(lambda x, j: x.at[j].get(mode=mode), X, j)
        agree_on(lambda x, j: x.at[j].get(mode=mode), M, j)
        agree_on(lambda x, j: x.at[:, j].get(mode=mode), reals(2, 3), j)
        agree_on(lambda x, j: x.at[j].add(x[0], mode=mode), X, j)
        agree_on(lambda x, j: x.at[j].set(x[0] * 2, mode=mode), M, j)
        agree_on(lambda x, j: x.at[j, 0].multiply(2.0, mode=mode), M, j)
    agree_on(lambda k, j: k.at[j].get(mode=mode), INTS, i)
    agree_on(lambda b, j: b.at[j].get(mode=mode), B, i)
    agree_on(lambda x, j: x.at[j].get(mode=mode, fill_value=7.0), X, i)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("i", [slow_unless(abs(i) == 9, i) for i in (-9, -3, -1, 0, 1, 2, 9)])
def test_windows_are_moved_inside(i):
    i = np.int64(i)
    agree_on(lambda x, i: lax.dynamic_slice(x, (i,), (2,)), X, i)
    agree_on(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 1)), M, i)
    agree_on(lambda x, i: lax.dynamic_slice(x, (i, i), (2, 1)), M, i.astype(np.int32))
    agree_on(lambda x, i: lax.dynamic_update_slice(x, -x[:2], (i,)), X, i)
    agree_on(lambda x, i: lax.dynamic_update_slice(x, -x[:2], (i, 0)), M, i)
    agree_on(lambda x, i: lax.dynamic_update_slice(x, x * 2, (i,)), X[:1], i)


def test_updates_of_windows():
    rows = np.array([[0, 1], [2, 0], [2, 1]])
    agree_on(lambda x: x.at[rows[:, 0], rows[:, 1]].add(1.0), M)
    agree_on(lambda x, y: x.at[np.array([1, 1, 0])].add(y), M, reals(3, 2, low=0.0))
    agree_on(lambda x, y: x.at[np.array([1, 1, 0])].max(y), M, reals(3, 2, low=0.0))
    agree_on(lambda x, i, y: x.at[i, :, 1].set(y), reals(3, 4, 2), np.array([2, 0]), reals(2, 4))
    agree_on(lambda x, i: jnp.take_along_axis(x, i, 1), reals(4, 5), np.array([[1], [0], [4], [9]]))
    agree_on(jax.vmap(lambda x, i: x.at[i].add(1.0)), M, np.array([0, 1, 1]))
    agree_on(
        jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (2,))), reals(3, 4), np.array([0, 3, 1])
    )
    agree_on(jax.grad(lambda x: jnp.sum(x[np.array([0, 0, 2])] ** 2)), X)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", DRAWN)
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_shapes_and_axes(case, data):
    agree_on(*DRAWN[case](data))


def test_products_of_other_dtypes():
    x, y = np.arange(-12, 12, dtype=np.int8).reshape(3, 8), np.arange(40, dtype=np.int8)
    agree_on(lambda x, y: lax.dot(x, y), x, y.reshape(8, 5), storage=np.int8)
    agree_on(
        lambda x, y: lax.dot(x, y, preferred_element_type=np.int32),
        *(x, y.reshape(8, 5)),
        storage=np.int8,
    )
    single = reals(8, 9, dtype=np.float32), reals(9, dtype=np.float32)
    agree_on(lambda x, y: lax.dot(x, y, preferred_element_type=np.float64), *single)
    agree_on(jnp.dot, np.tri(40, dtype=bool), np.arange(40) % 3 == 2)
