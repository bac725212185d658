"""The rules for primitives that only move data."""

import dataclasses as dc
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..gather_scatter import strides_of
from ..ir import Index, Store
from ..movements import MOVEMENTS
from .passing import aval_of, Lowering, rule
from .values import converted, LoweredArray, number, only_by_axes, position, scalar, stored


@rule(" ".join(MOVEMENTS))
def _moved(run: Lowering, eqn: Any, ins: list[LoweredArray]) -> list[LoweredArray]:
    starts = itertools.accumulate((x.size for x in ins), initial=0)
    numbers = [_numbers(x, start) for start, x in zip(starts, ins, strict=False)]
    ins = [x if x.view is None else stored(x.view[0], (x.size,)) for x in ins]
    outs = MOVEMENTS[eqn.primitive.name](np, numbers, eqn.params, ())
    return [
        picked(run, ins, np.asarray(m).reshape(v.aval.shape))
        for m, v in zip(outs, eqn.outvars, strict=True)
    ]


def _numbers(x: LoweredArray, start: int) -> np.ndarray:
    """The numbers of the components from `start` on, in the order in which they lie in memory."""
    if x.view is None:
        return np.arange(start, start + x.size).reshape(x.shape)
    _, strides = x.view
    parts = (stride * i for stride, i in zip(strides, np.indices(x.shape), strict=True))
    return sum(parts, start=np.full(x.shape, start))


def picked(run: Lowering, sources: Sequence[LoweredArray], numbers: np.ndarray) -> LoweredArray:
    """The array of the components with these numbers, which count on through all sources."""
    sources = [run.flat(x) for x in sources]
    ends = np.cumsum([x.size for x in sources])
    shape, dtype = numbers.shape, sources[0].dtype

    def source(n: int) -> tuple[LoweredArray, int]:
        k = int(np.searchsorted(ends, n, side="right"))
        return sources[k], n - int(ends[k]) + sources[k].size

    if numbers.size == 0:
        return LoweredArray(shape, dtype, lambda _: number(0, dtype))
    if numbers.size == 1:
        x, n = source(int(numbers.flat[0]))
        return scalar(x.at(Index(n)), shape)
    affine = _affine(numbers, ends)
    if affine is not None:
        x, first = source(int(numbers.flat[0]))
        linear = _linear(numbers)
        if linear is not None:
            if linear == 0:
                x = run.settled(x, 2)
                expr = x.at(Index(first))
                return LoweredArray(shape, dtype, lambda _: expr)
            whole = linear == 1 and first == 0 and numbers.size == x.size
            buffer = x.buffer if whole else None
            if linear == 1 and x.buffer is not None and not whole:
                buffer = dc.replace(x.buffer, start=x.buffer.start + first, size=numbers.size)
                return stored(buffer, shape)
            at = x.at
            return LoweredArray(
                shape, dtype, lambda i: at(i.shifted(first, linear)), buffer, x.depth
            )
        if numbers.size > x.size:
            x = run.stored(x)
        at = x.at
        found = only_by_axes(shape, dtype, lambda c: at(position(c, affine, first)), x.depth)
        if x.buffer is None or numbers.max() - first + 1 != numbers.size:
            return found
        buffer = dc.replace(x.buffer, start=x.buffer.start + first, size=numbers.size)
        return dc.replace(found, view=(buffer, tuple(affine)))
    if numbers.size > ends[-1]:
        sources = [run.stored(x) for x in sources]
    buffer = run.allocate(dtype, numbers.size)
    pieces = _pieces(numbers, ends)
    if pieces is None:
        place = run.table(numbers)
        joined = sources[0] if len(sources) == 1 else _joined(run, sources)
        joined = run.stored(joined)
        at = joined.at
        with run.loops(numbers.size) as (i,):
            where = Index().plus((i, 1))
            run.emit(Store(buffer, where, at(Index().plus((place.at(where), 1)))))
        return stored(buffer, shape)
    strides = strides_of(shape)
    for axis, start, piece in pieces:
        x, first = source(int(piece.flat[0]))
        affine = _affine(piece, ends)
        assert affine is not None
        with run.loops(*piece.shape) as counters:
            where = position(counters, strides, start * strides[axis])
            run.emit(Store(buffer, where, x.at(position(counters, affine, first))))
    return stored(buffer, shape)


def _joined(run: Lowering, sources: Sequence[LoweredArray]) -> LoweredArray:
    buffer = run.allocate(sources[0].dtype, sum(x.size for x in sources))
    start = 0
    for x in sources:
        run.copy(x, buffer, Index(start))
        start += x.size
    return stored(buffer, (start,))


def _affine(numbers: np.ndarray, ends: np.ndarray) -> list[int] | None:
    """The strides of these numbers along each axis; None if they aren't evenly spaced, or belong to
    several sources."""
    first = numbers.flat[0]
    strides = []
    expected = np.full((1,) * numbers.ndim, first)
    for axis, n in enumerate(numbers.shape):
        along = numbers[tuple(slice(0, 2) if a == axis else 0 for a in range(numbers.ndim))]
        stride = int(along[1] - along[0]) if n > 1 else 0
        strides.append(stride)
        steps = np.arange(n) * stride
        expected = expected + steps.reshape([-1 if a == axis else 1 for a in range(numbers.ndim)])
    source = np.searchsorted(ends, [numbers.min(), numbers.max()], side="right")
    if source[0] != source[1] or not (expected == numbers).all():
        return None
    return strides


def _linear(numbers: np.ndarray) -> int | None:
    """The stride of the numbers in row-major order; None if there is no single one."""
    flat = numbers.reshape(-1)
    steps = np.diff(flat)
    return int(steps[0]) if (steps == steps[0]).all() else None


def _pieces(numbers: np.ndarray, ends: np.ndarray) -> list[tuple[int, int, np.ndarray]] | None:
    """The numbers cut along one axis into pieces with strides (see `_affine`); None if these would
    be too many."""
    for axis in range(numbers.ndim):
        pieces, start, n = [], 0, numbers.shape[axis]
        while start < n and len(pieces) < 16:
            low, high = start + 1, n
            while low < high:  # the longest piece from here on
                middle = (low + high + 1) // 2
                if _affine(numbers.take(range(start, middle), axis), ends) is None:
                    high = middle - 1
                else:
                    low = middle
            piece = numbers.take(range(start, low), axis)
            if _affine(piece, ends) is None:
                break
            pieces.append((axis, start, piece))
            start = low
        if start == n:
            return pieces
    return None


@rule("iota")
def _iota(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    aval, d = aval_of(eqn), eqn.params["dimension"]
    if math.prod(aval.shape) <= 1:
        return [run.constant(np.zeros(aval.shape, aval.dtype))]
    return [only_by_axes(aval.shape, aval.dtype, lambda c: converted(c[d], aval.dtype), 0)]
