"""Reading and writing at indices: by moving scalars if the indices are constants.

Indices that all lanes share, traced or not, keep arrays lanes-last; for what depends on the lane
JAX's own batching is used.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .interpreter import Interpreter, mapped, rule
from .values import (
    is_key,
    pack,
    rearranged,
    Scalars,
    Shape,
    spread,
    tail_of,
    unpack,
    Value,
)


@rule("dynamic_slice")
def _dynamic_slice(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, *starts = ins
    sizes, shape = eqn.params["slice_sizes"], eqn.outvars[0].aval.shape
    where = _constant_window(starts, x.shape, sizes)
    if where is not None and isinstance(x, Scalars):
        return rearranged([x], lambda xs: [xs[0][where]], [shape])
    if _is_choice(run, x, sizes):
        return [_choose(run, unpack(x), unpack(starts[0]).entries[0])]
    if any(s.batched for s in starts):
        return mapped(run, eqn, ins)
    run.count(1)
    array = pack(x).array
    if where is not None:
        return run.results([array[where]], x.batched)
    indices = [unpack(s).entries[0] for s in starts]
    if x.batched:
        indices.append(np.zeros((), starts[0].dtype))
        sizes = (*sizes, array.shape[-1])
    return run.results([lax.dynamic_slice(array, indices, sizes)], x.batched)


def _constant_window(starts: Sequence[Value], shape: Shape, sizes: Shape) -> tuple | None:
    """The slices of a window whose start is constant; JAX keeps windows inside of the array."""
    if not all(isinstance(s, Scalars) and s.constant for s in starts):
        return None
    firsts = [int(unpack(s).entries[0]) for s in starts]
    firsts = [max(0, min(i, n - k)) for i, n, k in zip(firsts, shape, sizes, strict=True)]
    return tuple(slice(i, i + k) for i, k in zip(firsts, sizes, strict=True))


def _is_choice(run: Interpreter, x: Value, sizes: Shape) -> bool:
    return isinstance(x, Scalars) and sizes == (1,) and len(x.entries) <= run.limits.choice


def _choose(run: Interpreter, x: Scalars, index: Any) -> Scalars:
    """One of the entries."""
    last = np.asarray(len(x.entries) - 1, index.dtype)[()]
    run.count(len(x.entries))
    which = lax.clamp(np.zeros_like(last)[()], index, last).astype(np.int32)
    entry = run.scalar("select_n", lax.select_n, (which, *x.entries), x.dtype)
    return Scalars((1,), x.dtype, [entry])


@rule("dynamic_update_slice")
def _dynamic_update_slice(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, update, *starts = ins
    where = _constant_window(starts, x.shape, update.shape)
    if where is not None and isinstance(x, Scalars) and isinstance(update, Scalars):

        def written(xs):
            xs[0][where] = xs[1]
            return [xs[0]]

        return rearranged([x, update], written, [x.shape])
    if any(s.batched for s in starts):
        return mapped(run, eqn, ins)
    run.count(1)
    tail = tail_of(x, update)
    indices = [unpack(s).entries[0] for s in starts]
    if tail:
        indices.append(np.zeros((), starts[0].dtype))
    arrays = [spread(v, tail) for v in (x, update)]
    out = lax.dynamic_update_slice(*arrays, indices)
    if tail:
        out = run.computed_once("dynamic_update_slice", out)
    return run.results([out], bool(tail))


@rule("gather")
def _gather(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, indices = ins
    shape, dims = eqn.outvars[0].aval.shape, eqn.params["dimension_numbers"]
    sizes, mode = eqn.params["slice_sizes"], eqn.params["mode"]
    static = isinstance(indices, Scalars) and indices.constant and isinstance(x, Scalars)
    if static and math.prod(shape) <= run.limits.moved and not is_key(x.dtype):
        numbers = _windows(
            x.shape,
            unpack(indices).numpy(),
            sizes,
            collapsed=dims.collapsed_slice_dims,
            starts=dims.start_index_map,
            batching=(dims.operand_batching_dims, dims.start_indices_batching_dims),
            window_dims=dims.offset_dims,
            mode=mode,
        )
        entries = [*unpack(x).entries, _fill_value(x.dtype, eqn.params["fill_value"])]
        return [Scalars(shape, x.dtype, [entries[i] for i in numbers.reshape(-1)])]
    if indices.batched:
        return mapped(run, eqn, ins)
    run.count(1)
    params = dict(eqn.params)
    array = pack(x).array
    if x.batched:
        params["dimension_numbers"] = dims._replace(offset_dims=(*dims.offset_dims, len(shape)))
        params["slice_sizes"] = (*sizes, array.shape[-1])
    return run.results([eqn.primitive.bind(array, pack(indices).array, **params)], x.batched)


def _fill_value(dtype: Any, value: Any) -> Any:
    """What JAX fills in where it reads outside of an array."""
    dtype = np.dtype(dtype)
    if value is not None:
        return dtype.type(value)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return dtype.type(info.min if dtype.kind == "i" else info.max)
    return np.bool_(True) if dtype.kind == "b" else dtype.type(np.nan)


def _windows(
    shape: Shape,
    indices: np.ndarray,
    sizes: Shape,
    *,
    collapsed: Shape,
    starts: Shape,
    batching: tuple[Shape, Shape],
    window_dims: Shape,
    mode: Any,
) -> np.ndarray:
    """Which component of an array of `shape` each one of a gather's result (or of a scatter's
    updates) is; -1 where it is none. The names are those of XLA's Gather.
    """
    lead = indices.shape[:-1]
    window = [d for d in range(len(shape)) if d not in collapsed and d not in batching[0]]
    total = len(lead) + len(window)
    numbers = np.zeros((1,) * total, int)
    inside = np.ones((1,) * total, bool)
    for d, (n, size) in enumerate(zip(shape, sizes, strict=True)):
        first = np.zeros((1,) * len(lead), int)
        if d in starts:
            first = indices[..., starts.index(d)].astype(int)
        elif d in batching[0]:
            axis = batching[1][batching[0].index(d)]
            first = _along(np.arange(lead[axis]), axis, len(lead))
        first = first.reshape(first.shape + (1,) * len(window))
        if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
            inside = inside & (first >= 0) & (first <= n - size)
        first = np.clip(first, 0, n - size)
        if d in window:
            first = first + _along(np.arange(size), len(lead) + window.index(d), total)
        numbers = numbers * n + first
    numbers = np.where(inside, numbers, -1)
    full = np.broadcast_to(numbers, (*lead, *(sizes[d] for d in window)))
    return np.moveaxis(full, range(len(lead), total), window_dims)


def _along(x: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    return x.reshape([-1 if i == axis else 1 for i in range(ndim)])


_SCATTER: dict[str, tuple[str, Callable]] = {
    "scatter": ("", lambda old, new: new),
    "scatter-add": ("add", lax.add),
    "scatter-mul": ("mul", lax.mul),
    "scatter-min": ("min", lax.min),
    "scatter-max": ("max", lax.max),
    "scatter-sub": ("sub", lax.sub),
}


@rule(" ".join(_SCATTER))
def _scatter(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, indices, updates = ins
    numbers = _scatter_numbers(eqn, ins)
    if numbers is not None:
        element, emit = _SCATTER[eqn.primitive.name]
        entries = list(unpack(x).entries)
        for i, new in zip(numbers.reshape(-1), unpack(updates).entries, strict=True):
            if i >= 0:
                old = entries[i]
                entries[i] = run.scalar(element, emit, (old, new), x.dtype) if element else new
        return [Scalars(x.shape, x.dtype, entries)]
    if indices.batched:
        return mapped(run, eqn, ins)
    run.count(1)
    tail = tail_of(x, updates)
    params = dict(eqn.params)
    dims = params["dimension_numbers"]
    if tail:
        window_dims = (*dims.update_window_dims, len(updates.shape))
        params["dimension_numbers"] = dims._replace(update_window_dims=window_dims)
    arrays = [spread(x, tail), pack(indices).array, spread(updates, tail)]
    out = eqn.primitive.bind(*arrays, **params)
    if tail:
        out = run.computed_once(eqn.primitive.name, out)
    return run.results([out], bool(tail))


def _scatter_numbers(eqn: Any, ins: Sequence[Value]) -> np.ndarray | None:
    """Which component each update goes to, if that can be said while tracing."""
    x, indices, updates = ins
    if not all(isinstance(v, Scalars) for v in ins) or not unpack(indices).constant:
        return None
    dims = eqn.params["dimension_numbers"]
    window_sizes = iter(updates.shape[d] for d in dims.update_window_dims)
    absent = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    sizes = tuple(1 if d in absent else next(window_sizes) for d in range(len(x.shape)))
    numbers = _windows(
        x.shape,
        unpack(indices).numpy(),
        sizes,
        collapsed=dims.inserted_window_dims,
        starts=dims.scatter_dims_to_operand_dims,
        batching=(dims.operand_batching_dims, dims.scatter_indices_batching_dims),
        window_dims=dims.update_window_dims,
        mode=eqn.params["mode"],
    )
    # Whether a window that is partly outside is written in part is XLA's business.
    partly = math.prod(sizes) > 1 and bool((numbers < 0).any())
    return None if partly else numbers
