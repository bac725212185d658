"""Which components of an array are read or written at indices: the arithmetic of gather and
scatter, written once.

As in `movements.py`, `xp` is NumPy where the indices are known while tracing, and `jax.numpy` where
they are computed. The number of a component is its position in row-major order.
"""

import functools
import math
import operator
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike, DTypeLike

from .combining import least, most
from .movements import MOVEMENTS


Shape = tuple[int, ...]


class Windows(NamedTuple):
    """Windows of an array that begin at given indices. The fields are named after XLA's Gather.

    - `shape`: the shape of the array.
    - `sizes`: the shape of a window.
    - `starts`: for each column of the indices, the axis of the array along which it says where a
        window begins.
    - `collapsed`: the axes of length 1 that a window loses in the result.
    - `batching`: pairs of an axis of the array and an axis of the indices along which the two are
        matched.
    - `window_dims`: the axes of the result (for a scatter, of the updates) that are axes of a
        window.
    - `result`: the shape of the result.
    - `drops`: whether windows that are partly outside are dropped; otherwise they are moved inside.
    """

    shape: Shape
    sizes: Shape
    starts: Shape
    collapsed: Shape
    batching: tuple[Shape, Shape]
    window_dims: Shape
    result: Shape
    drops: bool

    @classmethod
    def of_gather(cls, eqn: Any) -> "Windows":
        dims = eqn.params["dimension_numbers"]
        return cls(
            eqn.invars[0].aval.shape,
            eqn.params["slice_sizes"],
            tuple(map(int, dims.start_index_map)),
            dims.collapsed_slice_dims,
            (dims.operand_batching_dims, dims.start_indices_batching_dims),
            dims.offset_dims,
            eqn.outvars[0].aval.shape,
            _drops(eqn),
        )

    @classmethod
    def of_scatter(cls, eqn: Any) -> "Windows":
        dims = eqn.params["dimension_numbers"]
        shape, updates = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
        absent = (*dims.inserted_window_dims, *dims.operand_batching_dims)
        sizes = iter(updates[d] for d in dims.update_window_dims)
        return cls(
            shape,
            tuple(1 if d in absent else next(sizes) for d in range(len(shape))),
            tuple(map(int, dims.scatter_dims_to_operand_dims)),
            dims.inserted_window_dims,
            (dims.operand_batching_dims, dims.scatter_indices_batching_dims),
            dims.update_window_dims,
            updates,
            _drops(eqn),
        )

    @classmethod
    def whole_array(cls, shape: Shape, sizes: Shape) -> "Windows":
        """A single window with all axes of the array, as in a dynamic slice."""
        axes = tuple(range(len(shape)))
        return cls(shape, sizes, axes, (), ((), ()), axes, sizes, False)

    def numbers(
        self, xp: ModuleType, columns: Sequence, integer: type[np.integer] = np.int64
    ) -> tuple:
        """For each component of the result, its number in the array; and a mask that says whether
        the component is inside of the array, or None where all certainly are. `columns` are those
        of the indices, each `[*lead]`; all numbers fit in the type `integer`."""
        absent = (*self.collapsed, *self.batching[0])
        window = [d for d in range(len(self.shape)) if d not in absent]
        lead = [d for d in range(len(self.result)) if d not in self.window_dims]
        parts, inside = [], []
        for d, stride in enumerate(strides_of(self.shape)):
            if d in self.starts:
                column = columns[self.starts.index(d)]
                asked = (
                    column.astype(integer)
                    if xp is np
                    else lax.convert_element_type(column, integer)
                )
                first = _clipped(xp, asked, integer(self.shape[d] - self.sizes[d]))
                inside.append(asked == first)
                parts.append(_spread(xp, first * integer(stride), self.result, lead))
            elif d in self.batching[0]:
                axis = self.batching[1][self.batching[0].index(d)]
                parts.append(iota(xp, self.result, lead[axis], integer) * integer(stride))
            if d in window and self.sizes[d] > 1:
                axis = self.window_dims[window.index(d)]
                parts.append(iota(xp, self.result, axis, integer) * integer(stride))
        parts = parts or [xp.zeros(self.result, integer)]
        numbers = functools.reduce(operator.add, parts)
        if not self.drops or not inside:
            return numbers, None
        whole = functools.reduce(operator.and_, inside)
        return numbers, _spread(xp, whole, self.result, lead)


def padded(xp: Any, shape: Shape, config: Sequence) -> tuple[tuple[slice, ...], Any]:
    """The slices of an array that `lax.pad` keeps, and the numbers of their components in the
    result."""
    config = [tuple(map(int, axis)) for axis in config]
    ends = [
        max(0, low + n + max(0, n - 1) * between + high)
        for n, (low, high, between) in zip(shape, config, strict=True)
    ]
    kept, offset, steps = [], 0, []
    for n, end, stride, (low, _, between) in zip(
        shape, ends, strides_of(ends), config, strict=True
    ):
        step = between + 1
        first = 0 if low >= 0 else -(low // step)
        last = min(n, (end - low + between) // step)
        kept.append(slice(first, max(first, last)))
        offset += (low + first * step) * stride
        steps.append(step * stride)
    sizes = tuple(part.stop - part.start for part in kept)
    parts = [iota(xp, sizes, d) * step for d, step in enumerate(steps)]
    start = xp.zeros(sizes, np.int64) + offset
    return tuple(kept), functools.reduce(operator.add, parts, start)


def fill_value(dtype: DTypeLike, value: ArrayLike | None) -> ArrayLike:
    """The number that JAX fills in where it reads outside of an array."""
    dtype = np.dtype(dtype)
    if value is None:
        value = least(dtype) if dtype.kind == "i" else most(dtype) if dtype.kind in "ub" else np.nan
    return dtype.type(value)


def iota(xp: ModuleType, shape: Shape, axis: int, integer: type[np.integer] = np.int64) -> Any:
    """An array of this shape with the index along `axis` as its entries."""
    if xp is np:
        return _spread(np, np.arange(shape[axis], dtype=integer), shape, [axis])
    return lax.broadcasted_iota(integer, shape, axis)


def strides_of(shape: Sequence[int]) -> list[int]:
    """The strides of an array in row-major order, in elements."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _drops(eqn: JaxprEqn) -> bool:
    return eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP


def _clipped(xp: ModuleType, x: ArrayLike, high: np.integer) -> ArrayLike:
    """An index as JAX takes it: clipped to the range of the array."""
    low = type(high)(0)
    return np.clip(x, low, high) if xp is np else lax.clamp(low, x, high)


def _spread(xp: ModuleType, x: ArrayLike, shape: Shape, axes: Sequence[int]) -> Array | np.ndarray:
    """`x` broadcast to `shape`, with the axes of `x` in the places `axes`. (XLA fuses sums of
    arrays that were broadcast into one loop.)"""
    params = {"shape": shape, "broadcast_dimensions": tuple(axes)}
    return MOVEMENTS["broadcast_in_dim"](xp, [x], params, ())[0]
