"""How each primitive is evaluated for all lanes at once: a small function each, or one a family.

A primitive that is not here works, too: it is mapped over the lanes by `jax.vmap`. To add one,
write its [`rule`][ensembleode.fields.lanes.interpreter.rule], and a case in
`tests/engines/lanes/test_primitives.py`. Indexing is in `indexing.py`, calls and loops in
`control.py`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .interpreter import bind, cost, Interpreter, mapped, rule, TooLong
from .values import (
    from_constant,
    pack,
    rearranged,
    Scalars,
    spread,
    Stacked,
    tail_of,
    unpack,
    Value,
)


#
# Elementwise
#


@rule(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log
    log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or
    polygamma polynomial population_count pow real reduce_precision regularized_incomplete_beta
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square stop_gradient sub tan tanh xor zeta
    """
)
def elementwise(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    aval = eqn.outvars[0].aval
    components = run.as_scalars(ins, math.prod(aval.shape))
    if components is None:
        return _elementwise_arrays(run, eqn, ins)
    columns = [_broadcast_entries(x, aval.shape) for x in components]
    name, emit = eqn.primitive.name, functools.partial(eqn.primitive.bind, **eqn.params)
    if name == "add_any":
        emit = lax.add
    entries = [
        run.scalar(name, emit, args, aval.dtype, eqn.params) for args in zip(*columns, strict=True)
    ]
    return [Scalars(aval.shape, aval.dtype, entries)]


def _broadcast_entries(x: Scalars, shape: tuple) -> list:
    if x.shape == shape:
        return x.entries
    if len(x.entries) == 1:
        return x.entries * math.prod(shape)
    numbers = np.arange(len(x.entries)).reshape(x.shape)
    return [x.entries[i] for i in np.broadcast_to(numbers, shape).reshape(-1)]


def _elementwise_arrays(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    run.count(1)
    shape = eqn.outvars[0].aval.shape
    tail = tail_of(*ins)
    args = [_aligned(x, len(shape), bool(tail)) for x in ins]
    if eqn.primitive.name in ("add_any", "clamp", "select_n"):
        # These don't broadcast.
        args = [jnp.broadcast_to(a, (*shape, *tail)) for a in args]
    out = eqn.primitive.bind(*args, **eqn.params)
    if tail:
        out = run.computed_once(eqn.primitive.name, out)
    return run.results([out], bool(tail))


def _aligned(x: Value, ndim: int, batched: bool) -> Any:
    """As an array that broadcasts, where a shared one has a lane axis of 1 or is a scalar."""
    if not x.shape and not x.batched:
        assert isinstance(x, Scalars)
        return x.entries[0]
    packed = pack(x)
    array = packed.array
    if not packed.batched:
        return array.reshape((*array.shape, 1)) if batched else array
    return array if x.shape else array.reshape((*(1,) * ndim, array.shape[-1]))


#
# Data movement. One function serves both forms: it moves NumPy arrays of the components' numbers,
# or lanes-last arrays, whose `tail` is `(lanes,)`.
#


MOVEMENTS: dict[str, Callable] = {}


def movement(names: str) -> Callable:
    """Registers `fn(xp, arrays, params, tail) -> arrays` for primitives that only move data."""

    def register(fn: Callable) -> Callable:
        MOVEMENTS.update(dict.fromkeys(names.split(), fn))

        @rule(names)
        def moved(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
            shapes = [v.aval.shape for v in eqn.outvars]
            sizes = [math.prod(s) for s in shapes]
            if all(isinstance(x, Scalars) for x in ins) and sum(sizes) <= run.limits.moved:
                move = functools.partial(_call_movement, fn, np, eqn.params, ())
                return rearranged([unpack(x) for x in ins], move, shapes)
            tail = tail_of(*ins)
            arrays = [spread(x, tail) for x in ins]
            run.count(len(arrays))
            outs = fn(jnp, arrays, eqn.params, tail)
            if tail:
                outs = [run.computed_once(eqn.primitive.name, x) for x in outs]
            return run.results(outs, bool(tail))

        return fn

    return register


def _call_movement(fn, xp, params, tail, arrays):
    return fn(xp, arrays, params, tail)


@movement("reshape")
def _reshape(xp, xs, params, tail):
    return [xs[0].reshape((*params["new_sizes"], *tail))]


@movement("squeeze")
def _squeeze(xp, xs, params, tail):
    return [xp.squeeze(xs[0], tuple(params["dimensions"]))]


@movement("transpose")
def _transpose(xp, xs, params, tail):
    order = params["permutation"]
    return [xp.transpose(xs[0], (*order, *range(len(order), xs[0].ndim)))]


@movement("rev")
def _rev(xp, xs, params, tail):
    return [xp.flip(xs[0], tuple(params["dimensions"]))]


@movement("slice")
def _slice(xp, xs, params, tail):
    starts, ends = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    return [xs[0][tuple(map(slice, starts, ends, strides))]]


@movement("concatenate")
def _concatenate(xp, xs, params, tail):
    return [xp.concatenate(xs, params["dimension"])]


@movement("stack")
def _stack(xp, xs, params, tail):
    return [xp.stack(xs, params["axis"])]


@movement("unstack")
def _unstack(xp, xs, params, tail):
    axis = params["axis"]
    where = (slice(None),) * axis
    return [xs[0][(*where, i)] for i in range(xs[0].shape[axis])]


@movement("split")
def _split(xp, xs, params, tail):
    return xp.split(xs[0], np.cumsum(params["sizes"])[:-1].tolist(), params["axis"])


@movement("tile")
def _tile(xp, xs, params, tail):
    return [xp.tile(xs[0], (*params["reps"], *(1 for _ in tail)))]


@movement("broadcast_in_dim")
def _broadcast_in_dim(xp, xs, params, tail):
    (x,) = xs
    shape, dims = params["shape"], params["broadcast_dimensions"]
    if xp is jnp:
        lane = (len(shape),) if tail else ()
        return [lax.broadcast_in_dim(x, (*shape, *tail), (*dims, *lane))]
    kept = [x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
    return [np.broadcast_to(x.reshape(kept), shape)]


@rule("pad")
def _pad(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, value = ins
    config = eqn.params["padding_config"]
    shape = eqn.outvars[0].aval.shape
    few = math.prod(shape) <= run.limits.moved
    if few and isinstance(x, Scalars) and isinstance(value, Scalars):
        return rearranged([x, value], lambda xs: [_pad_numbers(*xs, config)], [shape])
    if value.batched:
        return mapped(run, eqn, ins)
    run.count(1)
    lane = [(0, 0, 0)] if x.batched else []
    array = lax.pad(pack(x).array, unpack(value).entries[0], [*config, *lane])
    if x.batched:
        array = run.computed_once("pad", array)
    return run.results([array], x.batched)


def _pad_numbers(x: np.ndarray, value: np.ndarray, config: Sequence) -> np.ndarray:
    for axis, (low, high, interior) in enumerate(config):
        n = x.shape[axis]
        x = np.moveaxis(x, axis, 0)
        spaced = np.full((max(n + (n - 1) * interior, 0), *x.shape[1:]), value)
        spaced[:: interior + 1] = x
        ends = [np.full((max(k, 0), *x.shape[1:]), value) for k in (low, high)]
        cut = spaced[max(-low, 0) : len(spaced) - max(-high, 0)]
        x = np.moveaxis(np.concatenate([ends[0], cut, ends[1]]), 0, axis)
    return x


@rule("iota")
def _iota(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    params = eqn.params
    shape, d = params["shape"], params["dimension"]
    if ins or math.prod(shape) > run.limits.moved:
        return mapped(run, eqn, ins)
    column = np.arange(shape[d]).reshape([-1 if i == d else 1 for i in range(len(shape))])
    return [from_constant(np.broadcast_to(column, shape).astype(params["dtype"]))]


#
# Reductions
#


_REDUCE: dict[str, Callable] = {
    "reduce_and": lax.bitwise_and,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_or": lax.bitwise_or,
    "reduce_prod": lax.mul,
    "reduce_sum": lax.add,
    "reduce_xor": lax.bitwise_xor,
}
_CUMULATE: dict[str, Callable] = {
    "cummax": lax.max,
    "cummin": lax.min,
    "cumprod": lax.mul,
    "cumsum": lax.add,
}
# The name of the elementwise primitive, by what folding and pruning know it.
_ELEMENT = {
    "and": "and",
    "max": "max",
    "min": "min",
    "or": "or",
    "prod": "mul",
    "sum": "add",
    "xor": "xor",
}


@rule(" ".join(_REDUCE))
def _reduce(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    (x,) = ins
    aval, axes = eqn.outvars[0].aval, eqn.params["axes"]
    if not isinstance(x, Scalars) or len(x.entries) > run.largest or not x.entries:
        return _leading(run, eqn, ins)
    combine = _combiner(run, eqn)
    kept = [i for i in range(len(x.shape)) if i not in axes]
    numbers = np.arange(len(x.entries)).reshape(x.shape).transpose([*kept, *axes])
    rows = numbers.reshape(math.prod(aval.shape), -1)
    entries = [functools.reduce(combine, [x.entries[i] for i in row]) for row in rows]
    return [Scalars(aval.shape, aval.dtype, entries)]


@rule("reduce")
def _reduce_by(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    """Reduces several arrays at once by any function, from initial values."""
    n = len(ins) // 2
    arrays, inits, body = ins[:n], ins[n:], eqn.params["jaxpr"]
    shape, axes = arrays[0].shape, eqn.params["dimensions"]
    size = math.prod(shape)
    small = size <= run.largest and size * cost(body) <= run.limits.unrolled
    if small and all(isinstance(x, Scalars) for x in ins):
        avals = [v.aval for v in eqn.outvars]
        kept = [i for i in range(len(shape)) if i not in axes]
        numbers = np.arange(size).reshape(shape).transpose([*kept, *axes])
        columns: list[list] = [[] for _ in arrays]
        for row in numbers.reshape(math.prod(avals[0].shape), -1):
            total = list(inits)
            for i in row:
                each = [Scalars((), x.dtype, [unpack(x).entries[i]]) for x in arrays]
                total = run.evaluate_closed(body, [*total, *each])
            for column, x in zip(columns, total, strict=True):
                column.extend(unpack(x).entries)
        return [Scalars(a.shape, a.dtype, c) for a, c in zip(avals, columns, strict=True)]
    run.count(size)
    tail = tail_of(*ins)
    rows = [_rows(spread(x, tail), axes) for x in arrays]
    like = rows[0].shape[1:]
    lane = range(len(like) - len(tail), len(like))
    starts = [lax.broadcast_in_dim(spread(x, tail), like, tuple(lane)) for x in inits]
    return run.results(_folded(body, starts, rows), bool(tail))


def _rows(x: Any, axes: Sequence[int]) -> Any:
    """What is reduced over, as the first axis."""
    x = jnp.moveaxis(x, axes, range(len(axes)))
    return x.reshape((-1, *x.shape[len(axes) :]))


def _folded(body: Any, starts: list, rows: list) -> list:
    """The rows combined by `body`, one after the other.

    Not by JAX's primitive: its derivative has another initial value than it has itself (JAX 0.12).
    """
    known = _known_reduction(body)
    if known is not None:
        whole = getattr(lax, "reduce_" + known)(rows[0], (0,))
        return [_REDUCE["reduce_" + known](starts[0], whole)]
    combine = jex.jaxpr_as_fun(body)
    for _ in starts[0].shape:
        combine = jax.vmap(combine)
    return lax.scan(lambda carry, row: (combine(*carry, *row), None), starts, rows)[0]


def _known_reduction(body: Any) -> str | None:
    """The name, in `_ELEMENT`, of a reduction that is a primitive of its own."""
    jaxpr = body.jaxpr
    if len(jaxpr.eqns) != 1 or len(jaxpr.invars) != 2:
        return None
    (eqn,) = jaxpr.eqns
    if set(eqn.invars) != set(jaxpr.invars) or eqn.outvars != jaxpr.outvars:
        return None
    return next((k for k, v in _ELEMENT.items() if v == eqn.primitive.name), None)


@rule("reduce_window")
def _reduce_window(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    n = len(ins) // 2
    return mapped(run, eqn, [*map(_not_joined, ins[:n]), *ins[n:]])


def _not_joined(x: Value) -> Stacked:
    """An array of which XLA does not see that it was made by joining others.

    It takes the reduction of joined arrays apart, and loses the initial value
    (`test_xla_loses_the_initial_value`).
    """
    packed = pack(x)
    if isinstance(packed.array, np.ndarray):
        return packed
    return Stacked(lax.optimization_barrier(packed.array), packed.batched)


@rule(" ".join(_CUMULATE))
def _cumulate(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    (x,) = ins
    if not isinstance(x, Scalars) or not 0 < len(x.entries) <= run.largest:
        return _leading(run, eqn, ins)
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    combine = _combiner(run, eqn)
    entries = list(x.entries)
    numbers = np.moveaxis(np.arange(len(entries)).reshape(x.shape), axis, 0)
    numbers = numbers[::-1] if reverse else numbers
    for before, now in itertools.pairwise(numbers.reshape(len(numbers), -1)):
        for i, j in zip(before, now, strict=True):
            entries[j] = combine(entries[i], entries[j])
    return [Scalars(x.shape, x.dtype, entries)]


def _combiner(run: Interpreter, eqn: Any) -> Callable:
    name = eqn.primitive.name
    emit = (_REDUCE | _CUMULATE)[name]
    element = _ELEMENT[name.removeprefix("reduce_").removeprefix("cum")]
    return lambda x, y: run.scalar(element, emit, (x, y), eqn.outvars[0].aval.dtype)


@rule("argmax argmin cumlogsumexp sort")
def _leading(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    """A primitive along axes of one array or of several: lanes last, the axes are the same."""
    run.count(1)
    tail = tail_of(*ins)
    return run.results(bind(eqn, [spread(x, tail) for x in ins]), bool(tail))


#
# Products
#


@rule("dot_general")
def _dot_general(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, y = ins
    (contracted, _), _ = eqn.params["dimension_numbers"]
    inner = math.prod(x.shape[i] for i in contracted)
    products = math.prod(eqn.outvars[0].aval.shape) * inner
    both = x.batched and y.batched
    largest = run.limits.batched_dot if both else run.limits.dot
    if 0 < products <= largest:
        # Of the operands, not of the output: they may be larger than what is kept as scalars.
        components = run.as_scalars(ins, 1)
        if components is not None:
            return [_expanded_dot(run, eqn, *components)]
    if run.scalarised and (x.batched or y.batched):
        raise TooLong("a matrix product")
    run.count(1)
    if both:
        if products == max(math.prod(x.shape), math.prod(y.shape)):
            return run.results([_reduced_dot(eqn, pack(x).array, pack(y).array)], True)
        return mapped(run, eqn, ins)
    if not x.batched:
        # The lanes are the last free axis of `y`, and so of the result.
        return run.results(bind(eqn, [pack(x).array, pack(y).array]), y.batched)
    return run.results([_swapped_dot(eqn, pack(x).array, pack(y).array)], True)


def _expanded_dot(run: Interpreter, eqn: Any, x: Scalars, y: Scalars) -> Scalars:
    aval = eqn.outvars[0].aval
    dtype = aval.dtype
    xs, ys = _dot_layout(eqn, x.shape, y.shape)

    def entry(value, i):
        e = value.entries[i]
        return e if e.dtype == dtype else lax.convert_element_type(e, dtype)

    def product(row, column):
        terms = [
            run.scalar("mul", lax.mul, (entry(x, i), entry(y, j)), dtype)
            for i, j in zip(row, column, strict=True)
        ]
        return functools.reduce(lambda a, b: run.scalar("add", lax.add, (a, b), dtype), terms)

    entries = [
        product(row, column)
        for rows, columns in zip(xs, ys, strict=True)
        for row in rows
        for column in columns
    ]
    return Scalars(aval.shape, dtype, entries)


def _dot_layout(eqn: Any, *shapes: tuple) -> list[np.ndarray]:
    """The numbers of the operands' components as `[batch, free, contracted]`."""
    contracted, batch = eqn.params["dimension_numbers"]
    layouts = []
    for shape, c, b in zip(shapes, contracted, batch, strict=True):
        free = [i for i in range(len(shape)) if i not in c and i not in b]
        numbers = np.arange(math.prod(shape)).reshape(shape).transpose([*b, *free, *c])
        sizes = [math.prod(shape[i] for i in axes) for axes in (b, free, c)]
        layouts.append(numbers.reshape(sizes))
    return layouts


def _reduced_dot(eqn: Any, x: Any, y: Any) -> Any:
    """A product of two batched values, one a vector a lane: multiply, and sum over leading axes."""
    (cx, cy), (bx, by) = eqn.params["dimension_numbers"]
    dtype = eqn.outvars[0].aval.dtype
    free_x = [i for i in range(x.ndim - 1) if i not in cx and i not in bx]
    free_y = [i for i in range(y.ndim - 1) if i not in cy and i not in by]
    x = x.astype(dtype).transpose([*cx, *bx, *free_x, x.ndim - 1])
    y = y.astype(dtype).transpose([*cy, *by, *free_y, y.ndim - 1])
    shared = len(cx) + len(bx)
    x = lax.expand_dims(x, range(x.ndim - 1, x.ndim - 1 + len(free_y)))
    y = lax.expand_dims(y, range(shared, shared + len(free_x)))
    return lax.reduce_sum(lax.mul(x, y), tuple(range(len(cx))))


def _swapped_dot(eqn: Any, x: Any, y: Any) -> Any:
    """A product of a batched value with a shared one: the other way round, for lanes last."""
    params = dict(eqn.params)
    contracted, batch = params["dimension_numbers"]
    params["dimension_numbers"] = (contracted[::-1], batch[::-1])
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    out = eqn.primitive.bind(y, x, **params)  # [batch, free of y, free of x, lane]
    n_batch = len(batch[0])
    n_y = y.ndim - n_batch - len(contracted[1])
    last = out.ndim - 1
    free_y, free_x = range(n_batch, n_batch + n_y), range(n_batch + n_y, last)
    if not free_y or not free_x:
        return out
    return out.transpose([*range(n_batch), *free_x, *free_y, last])
