"""Which components of an array are read and written at indices: their arithmetic, written once.

As in `movements.py`, `xp` is NumPy where indices are known and JAX's where they are computed. A
component's number is its place in row-major order.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .combining import least, most
from .movements import MOVEMENTS


Shape = tuple[int, ...]


class Windows(NamedTuple):
    """Parts of an array that begin at indices. The names are those of XLA's Gather.

    - `shape`: of the array.
    - `sizes`: of a window.
    - `starts`: the axes along which the columns of the indices say where a window begins.
    - `collapsed`: axes of length 1 that a window does not have in the result.
    - `batching`: axes of the array along which a window is where it is along those of the indices.
    - `window_dims`: where the axes of a window are in the result (or in the updates).
    - `result`: the shape of the result.
    - `drops`: whether a window that is not inside is none; else it is moved inside.
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
    def one(cls, shape: Shape, sizes: Shape) -> "Windows":
        """A window with all axes, as a dynamic slice has it."""
        axes = tuple(range(len(shape)))
        return cls(shape, sizes, axes, (), ((), ()), axes, sizes, False)

    def numbers(self, xp: Any, columns: Sequence) -> tuple[Any, Any]:
        """The number in the array of each component of the result, and whether there is such a
        component; None if that is certain.

        **Arguments:**

        - `columns`: of the indices, `[*lead]`.
        """
        absent = (*self.collapsed, *self.batching[0])
        window = [d for d in range(len(self.shape)) if d not in absent]
        lead = [d for d in range(len(self.result)) if d not in self.window_dims]
        parts, inside = [], []
        for d, stride in enumerate(strides_of(self.shape)):
            if d in self.starts:
                asked = _integer(xp, columns[self.starts.index(d)])
                first = _clipped(xp, asked, self.shape[d] - self.sizes[d])
                inside.append(asked == first)
                parts.append(_spread(xp, first * stride, self.result, lead))
            elif d in self.batching[0]:
                axis = self.batching[1][self.batching[0].index(d)]
                parts.append(iota(xp, self.result, lead[axis]) * stride)
            if d in window and self.sizes[d] > 1:
                axis = self.window_dims[window.index(d)]
                parts.append(iota(xp, self.result, axis) * stride)
        numbers = functools.reduce(operator.add, parts) if parts else _zeros(xp, self.result)
        if not self.drops or not inside:
            return numbers, None
        whole = functools.reduce(operator.and_, inside)
        return numbers, _spread(xp, whole, self.result, lead)


def padded(xp: Any, shape: Shape, config: Sequence) -> tuple[tuple[slice, ...], Any]:
    """The part of an array that `lax.pad` leaves, and its components' numbers in the result."""
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
    return tuple(kept), functools.reduce(operator.add, parts, _zeros(xp, sizes) + offset)


def fill_value(dtype: Any, value: Any) -> Any:
    """What JAX fills in where it reads outside of an array."""
    dtype = np.dtype(dtype)
    if value is None:
        value = least(dtype) if dtype.kind == "i" else most(dtype) if dtype.kind in "ub" else np.nan
    return dtype.type(value)


def iota(xp: Any, shape: Shape, axis: int) -> Any:
    """The counter of an axis, in an array of this shape."""
    if xp is np:
        return _spread(np, np.arange(shape[axis]), shape, [axis])
    return lax.broadcasted_iota(np.int64, shape, axis)


def strides_of(shape: Sequence[int]) -> list[int]:
    """The strides of an array in row-major order, in elements."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _drops(eqn: Any) -> bool:
    return eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP


#
# With NumPy or JAX. (Numbers are spread before they are added: that is then an expression in loops
# over the result, and no array of its own.)
#


def _integer(xp: Any, x: Any) -> Any:
    return x.astype(np.int64) if xp is np else lax.convert_element_type(x, np.int64)


def _clipped(xp: Any, x: Any, most: int) -> Any:
    """An index as JAX takes it: one outside of an array is moved to its edge."""
    low, high = np.int64(0), np.int64(most)
    return np.clip(x, low, high) if xp is np else lax.clamp(low, x, high)


def _zeros(xp: Any, shape: Shape) -> Any:
    return xp.zeros(shape, np.int64)


def _spread(xp: Any, x: Any, shape: Shape, axes: Sequence[int]) -> Any:
    """`x` along these axes of an array."""
    params = {"shape": shape, "broadcast_dimensions": tuple(axes)}
    return MOVEMENTS["broadcast_in_dim"](xp, [x], params, ())[0]
