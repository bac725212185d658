"""The values that the interpreter computes with: lists of components, so that indexing, stacking
and reshaping cost nothing, as they rearrange Python lists while tracing."""

import dataclasses as dc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike


Shape: TypeAlias = tuple[int, ...]


@dc.dataclass(frozen=True, slots=True)
class Scalars:
    """A value as a list of components in row-major order.

    An entry is a NumPy scalar (a constant of the program), a `[1]` JAX array (computed from the
    program's arguments), or a `[]` JAX array (computed from constants alone).
    """

    shape: Shape
    dtype: Any
    entries: list

    @property
    def computed(self) -> bool:
        """Whether the value depends on the program's arguments."""
        return any(is_computed(x) for x in self.entries)

    @property
    def constant(self) -> bool:
        return all(is_constant(x) for x in self.entries)

    def numpy(self) -> np.ndarray:
        """The value as an array; it has to be a constant."""
        return np.array(self.entries, self.dtype).reshape(self.shape)


def is_constant(entry: Any) -> bool:
    return isinstance(entry, np.generic)


def is_computed(entry: Any) -> bool:
    return not isinstance(entry, np.generic) and entry.ndim == 1


def from_constant(array: Any) -> Scalars:
    array = np.asarray(array)
    return Scalars(array.shape, array.dtype, list(array.reshape(-1)))


def fill(entry: Any, tail: Shape, dtype: DTypeLike) -> Array:
    """An entry as an array of shape `tail`."""
    if is_constant(entry):
        return lax.full(tail, entry, dtype)
    return entry if entry.shape == tail else lax.broadcast(entry, tail)


def rearranged(values: Sequence[Scalars], move: Callable, shapes: Sequence[Shape]) -> list[Scalars]:
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


def is_key(dtype: DTypeLike) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
