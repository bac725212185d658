"""The values that the lanes-last interpreter computes with: those of one trajectory, for all lanes.

A value is held as [`Scalars`][], with an entry for each component, or as [`Stacked`][], one array
whose last axis is the lane. Small values are `Scalars`, because indexing, stacking and reshaping
these costs nothing: it rearranges Python lists while tracing.
"""

import dataclasses as dc
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


Shape: TypeAlias = tuple[int, ...]


@dc.dataclass(frozen=True, slots=True)
class Scalars:
    """A value as a list of components in row-major order.

    An entry is a NumPy scalar (a constant of the program), a `[]` JAX array (the same in all
    lanes), or a `[lane]` JAX array.
    """

    shape: Shape
    dtype: Any
    entries: list

    @property
    def batched(self) -> bool:
        return any(is_batched(x) for x in self.entries)

    @property
    def constant(self) -> bool:
        return all(is_constant(x) for x in self.entries)

    def numpy(self) -> np.ndarray:
        """The value as an array; it has to be a constant."""
        return np.array(self.entries, self.dtype).reshape(self.shape)


@dc.dataclass(frozen=True, slots=True)
class Stacked:
    """A value as one array: `[*shape, lane]`, or `[*shape]` if all lanes share it.

    A value of a single component is always `Scalars`.
    """

    array: Any
    batched: bool

    @property
    def shape(self) -> Shape:
        return self.array.shape[:-1] if self.batched else self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype


Value: TypeAlias = Scalars | Stacked


def is_constant(entry: Any) -> bool:
    return isinstance(entry, np.generic)


def is_batched(entry: Any) -> bool:
    return not isinstance(entry, np.generic) and entry.ndim == 1


def from_array(array: Any, batched: bool) -> Value:
    """A lanes-last array as a value."""
    shape = array.shape[:-1] if batched else array.shape
    if math.prod(shape) > 1:
        return Stacked(array, batched)
    if math.prod(shape) == 0:
        return Scalars(shape, array.dtype, [])
    return Scalars(shape, array.dtype, [array.reshape(array.shape[len(shape) :])])


def from_constant(array: np.ndarray) -> Scalars:
    return Scalars(array.shape, array.dtype, list(array.reshape(-1)))


def tail_of(*values: Value) -> Shape:
    """The shape of the lane axis, `(lanes,)`; `()` if no value has lanes."""
    for value in values:
        if isinstance(value, Stacked):
            if value.batched:
                return value.array.shape[-1:]
        else:
            for x in value.entries:
                if is_batched(x):
                    return x.shape
    return ()


def unpack(value: Value) -> Scalars:
    """The value as `Scalars`."""
    if isinstance(value, Scalars):
        return value
    n = math.prod(value.shape)
    rows = value.array.reshape((n, *value.array.shape[len(value.shape) :]))
    entries = [lax.index_in_dim(rows, i, keepdims=False) for i in range(n)]
    return Scalars(value.shape, value.dtype, entries)


def pack(value: Value) -> Stacked:
    """The value as `Stacked`, whatever its size."""
    if isinstance(value, Stacked):
        return value
    shape, entries = value.shape, value.entries
    if value.constant:
        return Stacked(value.numpy(), False)
    tail = tail_of(value)
    first = entries[0]
    if all(x is first for x in entries):
        array = lax.broadcast_in_dim(first, (*shape, *tail), (len(shape),) if tail else ())
    else:
        array = jnp.stack([fill(x, tail, value.dtype) for x in entries]).reshape((*shape, *tail))
    return Stacked(array, bool(tail))


def fill(entry: Any, tail: Shape, dtype: Any) -> Any:
    """An entry as an array of shape `tail`."""
    if is_constant(entry):
        return lax.full(tail, entry, dtype)
    return entry if entry.shape == tail else lax.broadcast(entry, tail)


def spread(value: Value, tail: Shape) -> Any:
    """The value as an array of shape `(*shape, *tail)`."""
    packed = pack(value)
    if packed.batched or not tail:
        return jnp.asarray(packed.array)
    shape = packed.shape
    return lax.broadcast_in_dim(packed.array, (*shape, *tail), tuple(range(len(shape))))


def rearranged(values: Sequence[Scalars], move: Callable, shapes: Sequence[Shape]) -> list:
    """Values of `shapes` that hold the entries of `values`, placed as `move` places their
    numbers."""
    entries: list = []
    numbers = []
    for x in values:
        numbers.append(np.arange(len(entries), len(entries) + len(x.entries)).reshape(x.shape))
        entries += x.entries
    moved = move(numbers)
    dtype = values[0].dtype
    return [
        Scalars(shape, dtype, [entries[i] for i in m.reshape(-1)])
        for m, shape in zip(moved, shapes, strict=True)
    ]


def is_key(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
