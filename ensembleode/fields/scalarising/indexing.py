"""The rules for reading and writing at indices. Where the indices are constants, this only
rearranges components while tracing."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from ..combining import SCATTERS
from ..gather_scatter import fill_value, Windows
from .interpreter import Interpreter, mapped, rule
from .values import is_key, rearranged, Scalars, Shape


@rule("dynamic_slice")
def _dynamic_slice(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    x, *starts = ins
    sizes, shape = eqn.params["slice_sizes"], eqn.outvars[0].aval.shape
    where = _constant_window(starts, x.shape, sizes)
    if where is not None:
        return rearranged([x], lambda xs: [xs[0][where]], [shape])
    if sizes == (1,) and len(x.entries) <= run.limits.choice:
        return [_choose(run, x, starts[0].entries[0])]
    return mapped(run, eqn, ins)


def _constant_window(starts: Sequence[Scalars], shape: Shape, sizes: Shape) -> tuple | None:
    """The slices of a window whose start is constant, moved inside of the array as JAX does; None
    if the start isn't constant."""
    if not all(s.constant for s in starts):
        return None
    firsts = [int(s.entries[0]) for s in starts]
    firsts = [max(0, min(i, n - k)) for i, n, k in zip(firsts, shape, sizes, strict=True)]
    return tuple(slice(i, i + k) for i, k in zip(firsts, sizes, strict=True))


def _choose(run: Interpreter, x: Scalars, index: Array) -> Scalars:
    """The entry at the index, which is clipped to the range of the entries."""
    last = np.asarray(len(x.entries) - 1, index.dtype)[()]
    run.count(len(x.entries))
    which = lax.clamp(np.zeros_like(last)[()], index, last).astype(np.int32)
    entry = run.scalar("select_n", lax.select_n, (which, *x.entries), x.dtype)
    return Scalars((1,), x.dtype, [entry])


@rule("dynamic_update_slice")
def _dynamic_update_slice(run: Interpreter, eqn: JaxprEqn, ins: Sequence[Scalars]) -> list[Scalars]:
    x, update, *starts = ins
    where = _constant_window(starts, x.shape, update.shape)
    if where is None:
        return mapped(run, eqn, ins)

    def written(xs: list) -> list:
        xs[0][where] = xs[1]
        return [xs[0]]

    return rearranged([x, update], written, [x.shape])


@rule("gather")
def _gather(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    x, indices = ins
    shape = eqn.outvars[0].aval.shape
    if not indices.constant or math.prod(shape) > run.limits.moved or is_key(x.dtype):
        return mapped(run, eqn, ins)
    numbers = _numbers(Windows.of_gather(eqn), indices)
    entries = [*x.entries, fill_value(x.dtype, eqn.params["fill_value"])]
    return [Scalars(shape, x.dtype, [entries[i] for i in numbers.reshape(-1)])]


@rule(" ".join(SCATTERS))
def _scatter(run: Interpreter, eqn: JaxprEqn, ins: Sequence[Scalars]) -> list[Scalars]:
    x, indices, updates = ins
    numbers = _scatter_numbers(eqn, indices)
    if numbers is None:
        return mapped(run, eqn, ins)
    by = SCATTERS[eqn.primitive.name]
    entries = list(x.entries)
    for i, new in zip(numbers.reshape(-1), updates.entries, strict=True):
        if i >= 0:
            if by is not None:
                new = run.scalar(by.name, by.emit, (entries[i], new), x.dtype)
            entries[i] = new
    return [Scalars(x.shape, x.dtype, entries)]


def _scatter_numbers(eqn: JaxprEqn, indices: Scalars) -> np.ndarray | None:
    """The number of the component that each update goes to; None if that isn't known while
    tracing."""
    if not indices.constant:
        return None
    windows = Windows.of_scatter(eqn)
    numbers = _numbers(windows, indices)
    # XLA decides whether a window that is partly outside is written in part.
    partly = math.prod(windows.sizes) > 1 and bool((numbers < 0).any())
    return None if partly else numbers


def _numbers(windows: Windows, indices: Scalars) -> Any:
    """The number of the component at each constant index; -1 for an index outside of the array."""
    numbers, inside = windows.numbers(np, list(np.moveaxis(indices.numpy(), -1, 0)))
    return numbers if inside is None else np.where(inside, numbers, -1)
