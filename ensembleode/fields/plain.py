"""Equations written in plainer ones: of all that indexes, pads, accumulates or calls, what is left
are elementwise operations, movements, reductions, products, branches, loops, [`take`][] and
[`put`][].

To add a primitive, write its [`rule`][ensembleode.fields.plain.rule] here where others can say what
it does, and a case in `tests/fields/test_primitives.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.interpreters import mlir

from .combining import as_rows, Combination, CUMULATIVE, folded, SCATTERS
from .equations import called
from .windows import fill_value, padded, strides_of, Windows


# How a primitive is written: `rule(equation, *operands) -> results`, by functions of JAX.
RULES: dict[str, Callable] = {}


def rule(names: str) -> Callable:
    """Registers how the primitives of these names, with spaces between, are written."""

    def register(fn: Callable) -> Callable:
        RULES.update(dict.fromkeys(names.split(), fn))
        return fn

    return register


def written_out(eqn: Any) -> Any:
    """The jaxpr of plainer equations that an equation is, closed or not; None if it is plain.

    (What it computes is not what it is differentiated as: derivatives have been taken by now.)
    """
    inner, name = called(eqn), eqn.primitive.name
    if inner is not None or name not in RULES:
        return inner
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    # Indices have 64 bits, whatever numbers have.
    with jax.enable_x64(True), source_info_util.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(lambda *xs: RULES[name](eqn, *xs))(*structs)


#
# Memory: the components of a flat array at numbers that are inside of it
#


_take_p = jex.Primitive("take")
_put_p = jex.Primitive("put")


def take(x: Any, numbers: Any) -> Any:
    """The components of `x`, `[size]`, of these numbers."""
    return _take_p.bind(x, numbers)


def put(x: Any, numbers: Any, new: Any, inside: Any = None, by: str = "scatter") -> Any:
    """`x`, `[size]`, where the components of these numbers are combined with new ones, in order.

    **Arguments:**

    - `inside`: which of them are not left out.
    - `by`: a scatter's name.
    """
    masks = () if inside is None else (inside,)
    return _put_p.bind(x, numbers, new, *masks, by=by)


def _taken(x, numbers):
    return x.at[numbers].get(mode="promise_in_bounds")


def _written(x, numbers, new, inside=None, *, by):
    if inside is not None:
        numbers = jnp.where(inside, numbers, x.size)
    combined = SCATTERS[by]
    method = "set" if combined is None else combined.name
    method = {"mul": "multiply", "sub": "subtract"}.get(method, method)
    return getattr(x.at[numbers], method)(new, mode="drop")


for _primitive, _computed, _aval in (
    (_take_p, _taken, lambda x, numbers: ShapedArray(numbers.shape, x.dtype)),
    (_put_p, _written, lambda x, *_, by: ShapedArray(x.shape, x.dtype)),
):
    _primitive.def_impl(_computed)
    _primitive.def_abstract_eval(_aval)
    mlir.register_lowering(_primitive, mlir.lower_fun(_computed, multiple_results=False))


#
# Indexing
#


def _columns(indices: Any) -> list:
    """Of the last axis."""
    axis = indices.ndim - 1
    return [lax.index_in_dim(indices, k, axis, keepdims=False) for k in range(indices.shape[axis])]


@rule("gather")
def _gather(eqn: Any, x: Any, indices: Any) -> list:
    numbers, inside = Windows.of_gather(eqn).numbers(jnp, _columns(indices))
    found = take(x.reshape(-1), numbers)
    if inside is not None:
        nothing = lax.full_like(found, fill_value(x.dtype, eqn.params["fill_value"]))
        found = lax.select(inside, found, nothing)
    return [found]


@rule(" ".join(SCATTERS))
def _scatter(eqn: Any, x: Any, indices: Any, updates: Any) -> list:
    numbers, inside = Windows.of_scatter(eqn).numbers(jnp, _columns(indices))
    out = put(x.reshape(-1), numbers, updates, inside, eqn.primitive.name)
    return [out.reshape(x.shape)]


@rule("dynamic_slice")
def _dynamic_slice(eqn: Any, x: Any, *starts: Any) -> list:
    numbers, _ = Windows.one(x.shape, eqn.params["slice_sizes"]).numbers(jnp, starts)
    return [take(x.reshape(-1), numbers)]


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, x: Any, update: Any, *starts: Any) -> list:
    numbers, _ = Windows.one(x.shape, update.shape).numbers(jnp, starts)
    return [put(x.reshape(-1), numbers, update).reshape(x.shape)]


@rule("pad")
def _pad(eqn: Any, x: Any, value: Any) -> list:
    shape = eqn.outvars[0].aval.shape
    kept, numbers = padded(jnp, x.shape, eqn.params["padding_config"])
    whole = lax.broadcast(value, (int(np.prod(shape)),))
    return [put(whole, numbers, x[kept]).reshape(shape)]


#
# Along an axis
#


@rule(" ".join(CUMULATIVE))
def _cumulate(eqn: Any, x: Any) -> list:
    by: Combination = CUMULATIVE[eqn.primitive.name]
    axis = eqn.params["axis"]

    def step(total: Any, row: Any) -> tuple:
        total = by.emit(total, row)
        return total, total

    rows = _first(x, axis)
    start = lax.full(rows.shape[1:], x.dtype.type(by.neutral(x.dtype)))
    _, totals = lax.scan(step, start, rows, reverse=eqn.params["reverse"])
    return [_back(totals, axis)]


def _first(x: Any, axis: int) -> Any:
    """An axis as the first one."""
    return lax.transpose(x, (axis, *(a for a in range(x.ndim) if a != axis)))


def _back(x: Any, axis: int) -> Any:
    """The first axis as this one."""
    order = list(range(1, x.ndim))
    order.insert(axis, 0)
    return lax.transpose(x, tuple(order))


@rule("reduce")
def _reduce(eqn: Any, *ins: Any) -> list:
    n = len(ins) // 2
    rows = [as_rows(x, eqn.params["dimensions"]) for x in ins[:n]]
    starts = [lax.broadcast(x, rows[0].shape[1:]) for x in ins[n:]]
    return list(folded(eqn.params["jaxpr"], starts, rows))


@rule("argmax argmin")
def _arg(eqn: Any, x: Any) -> list:
    """The first that is NaN, or else the first that is the largest."""
    (axis,) = eqn.params["axes"]
    reduce = lax.reduce_max if eqn.primitive.name == "argmax" else lax.reduce_min
    best = reduce(x, (axis,))
    others = tuple(a for a in range(x.ndim) if a != axis)
    wins = lax.eq(x, lax.broadcast_in_dim(best, x.shape, others))
    if x.dtype.kind == "f":
        wins = lax.bitwise_or(wins, lax.ne(x, x))
    places = lax.broadcasted_iota(np.int64, x.shape, axis)
    last = lax.full_like(places, x.shape[axis])
    first = lax.reduce_min(lax.select(wins, places, last), (axis,))
    return [lax.convert_element_type(first, eqn.outvars[0].aval.dtype)]


@rule("sort")
def _sort(eqn: Any, *operands: Any) -> list:
    """Each to its place, which is how many come before it."""
    axis = eqn.params["dimension"]
    operands = tuple(_first(x, axis) for x in operands)
    shape = operands[0].shape
    pairs = (shape[0], *shape)
    others, own = (0, *range(2, len(pairs))), tuple(range(1, len(pairs)))
    # (Of equal ones those that come before stay before.)
    before = lax.lt(*(lax.broadcasted_iota(np.int64, pairs, d) for d in (0, 1)))
    for key in operands[: eqn.params["num_keys"]][::-1]:
        x, y = (lax.broadcast_in_dim(key, pairs, axes) for axes in (others, own))
        before = lax.bitwise_or(_less(x, y), lax.bitwise_and(_equal(x, y), before))
    place = lax.reduce_sum(lax.convert_element_type(before, np.int64), (0,))
    first, *strides = strides_of(shape)
    numbers = place * first
    for d, stride in enumerate(strides, 1):
        numbers = numbers + lax.broadcasted_iota(np.int64, shape, d) * stride
    return [_back(put(x.reshape(-1), numbers, x).reshape(shape), axis) for x in operands]


def _less(x: Any, y: Any) -> Any:
    """Whether it comes before, where NaN comes last."""
    less = lax.lt(x, y)
    if x.dtype.kind != "f":
        return less
    return lax.bitwise_or(less, lax.bitwise_and(lax.eq(x, x), lax.ne(y, y)))


def _equal(x: Any, y: Any) -> Any:
    """Or NaN both."""
    equal = lax.eq(x, y)
    if x.dtype.kind != "f":
        return equal
    return lax.bitwise_or(equal, lax.bitwise_and(lax.ne(x, x), lax.ne(y, y)))


@rule("polynomial")
def _polynomial(eqn: Any, x: Any, *coefficients: Any) -> list:
    """Horner's."""
    del eqn
    return [functools.reduce(lambda total, c: total * x + c, coefficients[::-1])]
