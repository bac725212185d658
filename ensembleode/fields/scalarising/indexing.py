"""Reading and writing at indices. Where the indices are constants, scalars are moved while tracing.

Indices that all lanes share, known or traced, leave arrays lanes-last. Indices that differ between
lanes go through JAX's own batching.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from ..combining import SCATTERS
from ..gather_scatter import fill_value, Windows
from .interpreter import Interpreter, mapped, rule
from .values import is_key, pack, rearranged, Scalars, Shape, spread, tail_of, unpack, Value


@rule("dynamic_slice")
def _dynamic_slice(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, *starts = ins
    sizes, shape = eqn.params["slice_sizes"], eqn.outvars[0].aval.shape
    where = _constant_window(starts, x.shape, sizes)
    if where is not None and isinstance(x, Scalars):
        return rearranged([x], lambda xs: [xs[0][where]], [shape])
    if isinstance(x, Scalars) and sizes == (1,) and len(x.entries) <= run.limits.choice:
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
    """The slices of a window whose start is constant, moved inside of the array as JAX does; None
    if the start isn't constant."""
    if not all(isinstance(s, Scalars) and s.constant for s in starts):
        return None
    firsts = [int(unpack(s).entries[0]) for s in starts]
    firsts = [max(0, min(i, n - k)) for i, n, k in zip(firsts, shape, sizes, strict=True)]
    return tuple(slice(i, i + k) for i, k in zip(firsts, sizes, strict=True))


def _choose(run: Interpreter, x: Scalars, index: Any) -> Scalars:
    """In each lane, the entry at its index, which is clipped to the range of the entries."""
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
    static = isinstance(indices, Scalars) and indices.constant and isinstance(x, Scalars)
    if static and math.prod(shape) <= run.limits.moved and not is_key(x.dtype):
        numbers = _numbers(Windows.of_gather(eqn), unpack(indices))
        entries = [*unpack(x).entries, fill_value(x.dtype, eqn.params["fill_value"])]
        return [Scalars(shape, x.dtype, [entries[i] for i in numbers.reshape(-1)])]
    if indices.batched:
        return mapped(run, eqn, ins)
    run.count(1)
    params = dict(eqn.params)
    array = pack(x).array
    if x.batched:
        params["dimension_numbers"] = dims._replace(offset_dims=(*dims.offset_dims, len(shape)))
        params["slice_sizes"] = (*params["slice_sizes"], array.shape[-1])
    return run.results([eqn.primitive.bind(array, pack(indices).array, **params)], x.batched)


@rule(" ".join(SCATTERS))
def _scatter(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    x, indices, updates = ins
    numbers = _scatter_numbers(eqn, ins)
    if numbers is not None:
        by = SCATTERS[eqn.primitive.name]
        entries = list(unpack(x).entries)
        for i, new in zip(numbers.reshape(-1), unpack(updates).entries, strict=True):
            if i >= 0:
                if by is not None:
                    new = run.scalar(by.name, by.emit, (entries[i], new), x.dtype)
                entries[i] = new
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
    """The number of the component that each update goes to; None if that isn't known while
    tracing."""
    indices = ins[1]
    if not all(isinstance(v, Scalars) for v in ins) or not unpack(indices).constant:
        return None
    windows = Windows.of_scatter(eqn)
    numbers = _numbers(windows, unpack(indices))
    # XLA decides whether a window that is partly outside is written in part.
    partly = math.prod(windows.sizes) > 1 and bool((numbers < 0).any())
    return None if partly else numbers


def _numbers(windows: Windows, indices: Scalars) -> np.ndarray:
    """The number of the component at each constant index; -1 for an index outside of the array."""
    numbers, inside = windows.numbers(np, list(np.moveaxis(indices.numpy(), -1, 0)))
    return numbers if inside is None else np.where(inside, numbers, -1)
