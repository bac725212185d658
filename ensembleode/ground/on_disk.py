"""Arrays of a store, which are read from the disk when they are indexed."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import DTypeLike


class OnDisk(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a store. Indexing reads the part that is asked for; computing with the array
    reads all of it.

    Indices are those of NumPy. For several arrays of indices, such as `u[[0, 5], [1, 2]]`, it reads
    the block of these rows and columns, and picks the entries from that.
    """

    def __init__(self, array: Any):
        self._array = array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        self.chunks, self.store_path = array.chunks, getattr(array, "store_path", None)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        index = tuple(map(_of_numpy, index if isinstance(index, tuple) else (index,)))
        # NumPy checks the index, raises its errors, and gives the shape of the result.
        found = np.broadcast_to(np.zeros((), np.bool_), self.shape)[index]
        if not found.size:
            return np.empty(found.shape, self.dtype)
        read, pick = _read_and_pick(index, self.shape)
        block = self._array.oindex[tuple(read)] if read else self._array[...]
        counts = [_count(r, n) for r, n in zip(read, self.shape, strict=True)]
        return np.asarray(block).reshape(counts)[pick]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array on disk can't become one in memory without a copy.")
        return np.asarray(self._array[...], dtype)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **options: Any
    ) -> np.ndarray | None:
        out = options.get("out", ())
        if method == "at" or any(isinstance(x, OnDisk) for x in out):
            raise TypeError(
                "an array on disk can't be changed: compute with np.asarray(...) of it, or with a "
                "part, such as u[:100] + 1."
            )
        inputs = tuple(map(_in_memory, inputs))
        options = {name: _in_memory(x) for name, x in options.items()}
        return getattr(ufunc, method)(*inputs, **options)

    def __getattr__(self, name: str) -> Callable | np.ndarray | None:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)  # mean, max, ...

    def __repr__(self) -> str:
        return f"OnDisk({self.dtype}{list(self.shape)})"


def _in_memory(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, OnDisk) else x


def _of_numpy(part: Any) -> Any:
    """A part of an index: as a NumPy array if it is, or can become, an array; else as it is."""
    if part is None or part is Ellipsis or isinstance(part, slice | str):
        return part
    array = np.asarray(part)
    if not array.size and not hasattr(part, "dtype"):  # an empty list has integers
        return array.astype(np.intp)
    if array.ndim:
        return array
    if array.dtype == bool:
        return array[()]
    return int(array) if np.issubdtype(array.dtype, np.integer) else part


def _read_and_pick(index: tuple, shape: tuple[int, ...]) -> tuple[list, tuple]:
    """For each axis, which entries to read, in ascending order; and the index of the result within
    these."""
    index = _without_masks(index)
    # The number of axes that the parts of the index refer to.
    taken = sum(not (x is None or x is ... or isinstance(x, bool | np.bool_)) for x in index)
    arrays = [x for x in index if not (x is None or x is Ellipsis or isinstance(x, slice))]
    read, pick = [], []
    for part in index:
        n = shape[len(read)] if len(read) < len(shape) else 0
        match part:
            case None | bool() | np.bool_():
                pick.append(part)
            case slice():
                wanted = range(n)[part]
                up = wanted if wanted.step > 0 else wanted[::-1]
                read.append(slice(up.start, up.stop, up.step))
                pick.append(slice(None) if wanted.step > 0 else slice(None, None, -1))
            case int():
                at = range(n)[part]
                read.append(slice(at, at + 1))
                pick.append(0)
            case np.ndarray():
                rows, back = np.unique(np.where(part < 0, part + n, part), return_inverse=True)
                is_run = len(rows) == rows[-1] - rows[0] + 1
                read.append(slice(int(rows[0]), int(rows[-1]) + 1) if is_run else rows)
                back = back.reshape(part.shape)
                in_order = len(arrays) == 1 and np.array_equal(back, np.arange(len(rows)))
                pick.append(slice(None) if in_order else back)
            case _:  # Ellipsis
                rest = len(shape) - taken
                read += [slice(0, size) for size in shape[len(read) : len(read) + rest]]
                pick.append(Ellipsis)
    read += [slice(0, size) for size in shape[len(read) :]]
    return read, tuple(pick)


def _without_masks(index: tuple) -> tuple:
    """The index with each mask replaced by the integers at which it is true."""
    parts: list = []
    for part in index:
        is_mask = isinstance(part, np.ndarray) and part.dtype == bool and part.ndim
        parts += np.nonzero(part) if is_mask else [part]
    return tuple(parts)


def _count(read: Any, n: int) -> int:
    return len(range(n)[read]) if isinstance(read, slice) else len(read)
