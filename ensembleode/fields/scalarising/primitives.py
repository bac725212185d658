"""The rules by which primitives are evaluated for all lanes at once, one small function for a
primitive or for a family of them.

A primitive without a rule works, too: `jax.vmap` maps it over the lanes. To add a primitive, write
its [`rule`][ensembleode.fields.lanes.interpreter.rule], and a case in
`tests/engines/lanes/test_primitives.py`. The rules for indexing are in `indexing.py`, those for
calls and loops in `control_flow.py`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..combining import CUMULATIVE, REDUCTIONS
from ..equations import ELEMENTWISE
from ..gather_scatter import iota, padded
from ..movements import MOVEMENTS
from ..plain import written_out
from ..products import layouts
from .interpreter import bind, Interpreter, mapped, rule, TooLong
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
    ELEMENTWISE
    + """
    add_any complex conj convert_element_type copy imag mulhi polynomial real reduce_precision
    stop_gradient
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
        # These primitives don't broadcast their operands.
        args = [jnp.broadcast_to(a, (*shape, *tail)) for a in args]
    out = eqn.primitive.bind(*args, **eqn.params)
    if tail:
        out = run.computed_once(eqn.primitive.name, out)
    return run.results([out], bool(tail))


def _aligned(x: Value, ndim: int, batched: bool) -> Any:
    """`x` as an array that broadcasts with others: a shared array gets a lane axis of length 1, a
    shared number stays a scalar."""
    if not x.shape and not x.batched:
        assert isinstance(x, Scalars)
        return x.entries[0]
    packed = pack(x)
    array = packed.array
    if not packed.batched:
        return array.reshape((*array.shape, 1)) if batched else array
    return array if x.shape else array.reshape((*(1,) * ndim, array.shape[-1]))


#
# Data movement, of component numbers or of lanes-last arrays
#


@rule(" ".join(MOVEMENTS))
def _moved(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    move, params = MOVEMENTS[eqn.primitive.name], eqn.params
    shapes = [v.aval.shape for v in eqn.outvars]
    sizes = [math.prod(s) for s in shapes]
    if all(isinstance(x, Scalars) for x in ins) and sum(sizes) <= run.limits.moved:
        entries = [unpack(x) for x in ins]
        return rearranged(entries, lambda xs: move(np, xs, params, ()), shapes)
    tail = tail_of(*ins)
    arrays = [spread(x, tail) for x in ins]
    run.count(len(arrays))
    outs = move(jnp, arrays, params, tail)
    if tail:
        outs = [run.computed_once(eqn.primitive.name, x) for x in outs]
    return run.results(outs, bool(tail))


@rule("pad")
def _pad(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, value = ins
    config = eqn.params["padding_config"]
    shape = eqn.outvars[0].aval.shape
    few = math.prod(shape) <= run.limits.moved
    if few and isinstance(x, Scalars) and isinstance(value, Scalars):

        def placed(xs):
            kept, numbers = padded(np, x.shape, config)
            whole = np.full(math.prod(shape), xs[1])
            whole[numbers] = xs[0][kept]
            return [whole]

        return rearranged([x, value], placed, [shape])
    if value.batched:
        return mapped(run, eqn, ins)
    run.count(1)
    lane = [(0, 0, 0)] if x.batched else []
    array = lax.pad(pack(x).array, unpack(value).entries[0], [*config, *lane])
    if x.batched:
        array = run.computed_once("pad", array)
    return run.results([array], x.batched)


@rule("iota")
def _iota(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    params = eqn.params
    shape, d = params["shape"], params["dimension"]
    if ins or math.prod(shape) > run.limits.moved:
        return mapped(run, eqn, ins)
    return [from_constant(iota(np, shape, d).astype(params["dtype"]))]


#
# Reductions
#


@rule(" ".join(REDUCTIONS))
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
    """A reduction by any function, rewritten in plainer equations; short loops of them are
    unrolled."""
    return run.evaluate_closed(written_out(eqn), ins)


@rule("reduce_window")
def _reduce_window(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    n = len(ins) // 2
    return mapped(run, eqn, [*map(_not_joined, ins[:n]), *ins[n:]])


def _not_joined(x: Value) -> Stacked:
    """An array behind a barrier, so that XLA does not see that it was made by joining others.

    XLA splits a reduction of joined arrays into one reduction for each of them, and loses the
    initial value (`test_xla_loses_the_initial_value`).
    """
    packed = pack(x)
    if isinstance(packed.array, np.ndarray):
        return packed
    return Stacked(lax.optimization_barrier(packed.array), packed.batched)


@rule("cummax cummin cumprod cumsum")
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
    by = (REDUCTIONS | CUMULATIVE)[eqn.primitive.name]
    return lambda x, y: run.scalar(by.name, by.emit, (x, y), eqn.outvars[0].aval.dtype)


@rule("argmax argmin cumlogsumexp sort")
def _leading(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    """A primitive along axes of one or more arrays; with the lanes last, the numbers of these axes
    stay the same."""
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
        # The limit is on the operands, which may be larger than values that are kept as scalars.
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
        # The lane is the last free axis of `y`, and so it is the last axis of the result.
        return run.results(bind(eqn, [pack(x).array, pack(y).array]), y.batched)
    return run.results([_swapped_dot(eqn, pack(x).array, pack(y).array)], True)


def _expanded_dot(run: Interpreter, eqn: Any, x: Scalars, y: Scalars) -> Scalars:
    aval = eqn.outvars[0].aval
    dtype = aval.dtype
    xs, ys = layouts(eqn, x.shape, y.shape)

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


def _reduced_dot(eqn: Any, x: Any, y: Any) -> Any:
    """A product of two batched values, one of which is a vector in each lane: multiply, and sum
    over leading axes."""
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
    """A product of a batched value with a shared one. The operands change places, so that the lane
    becomes the last axis."""
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
