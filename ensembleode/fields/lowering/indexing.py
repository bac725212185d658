"""Reading and writing at indices."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..ir import Expr, Index, Load, Op, Store
from .passing import aval_of, Lowering, rule
from .reductions import least, most
from .values import BOOL, converted, INT, number, position, stored, strides_of, Value


def _clamped(run: Lowering, index: Expr, most: int) -> Expr:
    """As JAX does: what is outside of an array is moved to its edge."""
    index = converted(index, INT)
    return run.let(Op("clamp", (number(0, INT), index, number(most, INT)), INT))


@rule("dynamic_slice")
def _dynamic_slice(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, *starts = ins
    sizes = eqn.params["slice_sizes"]
    x = run.stored(x)
    strides = strides_of(x.shape)
    firsts = [
        _clamped(run, s.expr, n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)
    ]
    start = position(firsts, strides)
    return [run.built(sizes, x.dtype, lambda c: x.at(start.plus(*zip(c, strides, strict=True))))]


@rule("dynamic_update_slice")
def _dynamic_update_slice(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, update, *starts = ins
    update = run.flat(update)
    strides = strides_of(x.shape)
    firsts = [
        _clamped(run, s.expr, n - size)
        for s, n, size in zip(starts, x.shape, update.shape, strict=True)
    ]
    buffer = run.allocate(x.dtype, x.size)
    run.copy(x, buffer)
    start = position(firsts, strides)
    inner = strides_of(update.shape)
    with run.loops(*update.shape) as counters:
        where = start.plus(*zip(counters, strides, strict=True))
        run.emit(Store(buffer, where, update.at(position(counters, inner))))
    return [stored(buffer, x.shape)]


@rule("gather")
def _gather(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, indices = map(run.stored, ins)
    aval, dims, sizes = aval_of(eqn), eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    fill = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    window = [
        d
        for d in range(len(x.shape))
        if d not in dims.collapsed_slice_dims and d not in dims.operand_batching_dims
    ]
    lead = [d for d in range(len(aval.shape)) if d not in dims.offset_dims]

    def component(counters):
        batch = [counters[d] for d in lead]
        place, inside = _window_start(
            run,
            x.shape,
            indices,
            batch,
            sizes,
            tuple(map(int, dims.start_index_map)),
            (dims.operand_batching_dims, dims.start_indices_batching_dims),
        )
        strides = strides_of(x.shape)
        offsets = [(counters[o], strides[d]) for o, d in zip(dims.offset_dims, window, strict=True)]
        value = x.at(place.plus(*offsets))
        if not fill or not inside:
            return value
        nothing = number(_fill_value(x.dtype, eqn.params["fill_value"]), x.dtype)
        all_inside = functools.reduce(lambda a, b: Op("and", (a, b), BOOL), inside)
        return Op("select_n", (all_inside, nothing, value), x.dtype)

    return [run.built(aval.shape, x.dtype, component)]


def _fill_value(dtype: np.dtype, value: Any) -> Any:
    """What JAX fills in where it reads outside of an array."""
    if value is not None:
        return value
    if dtype.kind == "f":
        return np.nan
    return least(dtype) if dtype.kind == "i" else most(dtype)


def _window_start(
    run: Lowering,
    shape: Sequence[int],
    indices: Value,
    batch: Sequence[Expr],
    sizes: Sequence[int],
    starts: Sequence[int],
    batching: tuple[Sequence[int], Sequence[int]],
) -> tuple[Index, list[Expr]]:
    """Where a window begins in an array of `shape`, and what is true if it is inside."""
    row = position(batch, strides_of(indices.shape)[:-1])
    place, inside = Index(), []
    for d, (n, stride) in enumerate(zip(shape, strides_of(shape), strict=True)):
        if d in starts:
            asked = run.let(converted(indices.at(row.shifted(starts.index(d))), INT))
            first = _clamped(run, asked, n - sizes[d])
            inside.append(Op("eq", (asked, first), BOOL))
            place = place.plus((first, stride))
        elif d in batching[0]:
            place = place.plus((batch[batching[1][batching[0].index(d)]], stride))
    return place, inside


_SCATTER = {
    "scatter": None,
    "scatter-add": "add",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-mul": "mul",
    "scatter-sub": "sub",
}


@rule(" ".join(_SCATTER))
def _scatter(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, indices, updates = ins
    indices, updates = run.stored(indices), run.stored(updates)
    dims, name = eqn.params["dimension_numbers"], _SCATTER[eqn.primitive.name]
    drop = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    window = [
        d
        for d in range(len(x.shape))
        if d not in dims.inserted_window_dims and d not in dims.operand_batching_dims
    ]
    sizes = [1] * len(x.shape)
    for d, w in zip(window, dims.update_window_dims, strict=True):
        sizes[d] = updates.shape[w]
    lead = [d for d in range(len(updates.shape)) if d not in dims.update_window_dims]
    buffer = run.allocate(x.dtype, x.size)
    run.copy(x, buffer)
    strides = strides_of(x.shape)
    with run.loops(*updates.shape) as counters:
        place, inside = _window_start(
            run,
            x.shape,
            indices,
            [counters[d] for d in lead],
            sizes,
            tuple(map(int, dims.scatter_dims_to_operand_dims)),
            (dims.operand_batching_dims, dims.scatter_indices_batching_dims),
        )
        offsets = [
            (counters[w], strides[d]) for d, w in zip(window, dims.update_window_dims, strict=True)
        ]
        where = place.plus(*offsets)
        old = run.variable(Load(buffer, where))
        new = updates.at(position(counters, strides_of(updates.shape)))
        new = Op(name, (old, new), x.dtype) if name else new
        if drop and inside:
            all_inside = functools.reduce(lambda a, b: Op("and", (a, b), BOOL), inside)
            new = Op("select_n", (all_inside, old, new), x.dtype)
        run.emit(Store(buffer, where, new))
    return [stored(buffer, x.shape)]
