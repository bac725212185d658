"""Rules for primitives that accumulate, fold, search or sort along axes."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from ..combining import as_rows, Combination, CUMULATIVE, folded
from ..gather_scatter import iota, strides_of
from .memory import put
from .writing import rule


@rule(" ".join(CUMULATIVE))
def _cumulate(eqn: JaxprEqn, x: Array) -> list:
    by: Combination = CUMULATIVE[eqn.primitive.name]
    axis = eqn.params["axis"]

    def step(total: Array, row: Array) -> tuple:
        total = by.emit(total, row)
        return total, total

    rows = jnp.moveaxis(x, axis, 0)
    start = lax.full(rows.shape[1:], x.dtype.type(by.neutral(x.dtype)))
    _, totals = lax.scan(step, start, rows, reverse=eqn.params["reverse"])
    return [jnp.moveaxis(totals, 0, axis)]


@rule("reduce")
def _reduce(eqn: JaxprEqn, *ins: Any) -> list:
    n = len(ins) // 2
    rows = [as_rows(x, eqn.params["dimensions"]) for x in ins[:n]]
    starts = [lax.broadcast(x, rows[0].shape[1:]) for x in ins[n:]]
    return list(folded(eqn.params["jaxpr"], starts, rows))


@rule("argmax argmin")
def _arg(eqn: Any, x: Any) -> list:
    """The place of the first NaN along an axis; if there is none, of the first extreme value."""
    (axis,) = eqn.params["axes"]
    reduce = lax.reduce_max if eqn.primitive.name == "argmax" else lax.reduce_min
    best = reduce(x, (axis,))
    others = tuple(a for a in range(x.ndim) if a != axis)
    wins = lax.eq(x, lax.broadcast_in_dim(best, x.shape, others))
    if x.dtype.kind == "f":
        wins = lax.bitwise_or(wins, lax.ne(x, x))
    places = iota(jnp, x.shape, axis)
    last = lax.full_like(places, x.shape[axis])
    first = lax.reduce_min(lax.select(wins, places, last), (axis,))
    return [lax.convert_element_type(first, eqn.outvars[0].aval.dtype)]


@rule("sort")
def _sort(eqn: JaxprEqn, *operands: Any) -> list:
    """Sorting by counting: the place of a component is the number of components that precede it."""
    axis = eqn.params["dimension"]
    operands = tuple(jnp.moveaxis(x, axis, 0) for x in operands)
    shape = operands[0].shape
    pairs = (shape[0], *shape)
    others, own = (0, *range(2, len(pairs))), tuple(range(1, len(pairs)))
    # Equal components keep their order, whether the sort has to be stable or not.
    before = lax.lt(*(iota(jnp, pairs, d) for d in (0, 1)))
    for key in operands[: eqn.params["num_keys"]][::-1]:
        x, y = (lax.broadcast_in_dim(key, pairs, axes) for axes in (others, own))
        before = lax.bitwise_or(_less(x, y), lax.bitwise_and(_equal(x, y), before))
    place = lax.reduce_sum(lax.convert_element_type(before, np.int64), (0,))
    first, *strides = strides_of(shape)
    numbers = place * first
    for d, stride in enumerate(strides, 1):
        numbers = numbers + iota(jnp, shape, d) * stride
    placed = (put(x.reshape(-1), numbers, x).reshape(shape) for x in operands)
    return [jnp.moveaxis(x, 0, axis) for x in placed]


def _less(x: Array, y: Array) -> Array:
    """Whether `x` precedes `y` in the order of sorting, in which NaN is last."""
    less = lax.lt(x, y)
    if x.dtype.kind != "f":
        return less
    return lax.bitwise_or(less, lax.bitwise_and(lax.eq(x, x), lax.ne(y, y)))


def _equal(x: Array, y: Array) -> Array:
    """Whether `x` and `y` are equal in the order of sorting: equal numbers, or both NaN."""
    equal = lax.eq(x, y)
    if x.dtype.kind != "f":
        return equal
    return lax.bitwise_or(equal, lax.bitwise_and(lax.ne(x, x), lax.ne(y, y)))


@rule("polynomial")
def _polynomial(eqn: JaxprEqn, x: Any, *coefficients: Any) -> list:
    """A polynomial by Horner's rule."""
    return [functools.reduce(lambda total, c: total * x + c, coefficients[::-1])]


@rule("top_k")
def _top_k(eqn: JaxprEqn, x: Array) -> list:
    """The last components of the sorted array. Those that are equal keep their order."""
    k, axis = eqn.params["k"], eqn.params["axis"]
    places = lax.broadcasted_iota(np.int32, x.shape, axis)
    backwards = [lax.rev(y, (axis,)) for y in (x, places)]
    found = [lax.rev(y, (axis,)) for y in lax.sort(backwards, dimension=axis, num_keys=1)]
    return [lax.slice_in_dim(y, 0, k, axis=axis) for y in found]
