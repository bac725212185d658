"""Memory for the arrays of a function for which its stack may be too small."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from .values import ElementPointer


if TYPE_CHECKING:
    from .builder import Builder


# The bytes of a cache line, at which arrays begin.
_LINE = 64
# The arrays of a function stay on its stack as long as they have no more bytes together.
MOST_ON_STACK = 2**16


class Heap(abc.ABC):
    """The memory for those arrays of a function that are not on its stack."""

    def __init__(self, b: Builder):
        self._b, self._on_stack = b, 0
        self._lent: dict[str, list[str]] = {}

    def array(self, dtype: np.dtype, n: int, *, of_lanes: bool) -> ElementPointer | None:
        """Memory for `n` elements in the current block; None where they are to be on the stack."""
        return self.lasting_array(dtype, n)

    def lasting_array(self, dtype: np.dtype, n: int) -> ElementPointer | None:
        """Memory for `n` elements in the whole function; None as for `array`."""
        size = n * dtype.itemsize
        if self._on_stack + size > MOST_ON_STACK:
            return ElementPointer(self._b, self.place(size), dtype)
        self._on_stack += size
        return None

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block of code, after which the memory of its arrays may be free again."""
        yield

    @abc.abstractmethod
    def place(self, size: int) -> str:
        """A pointer to so many bytes, which nothing else in the function uses."""

    def lent(self, name: str, sizes: Sequence[int]) -> list[str]:
        """The pointers, to so many bytes each, that are passed to the function of this name."""
        if name not in self._lent:
            self._lent[name] = [self.place(size) for size in sizes]
        return self._lent[name]


class LentHeap(Heap):
    """The memory that a function is passed by its caller, a parameter for each of its arrays;
    `sizes` are the bytes of the arrays."""

    def __init__(self, b: Builder):
        super().__init__(b)
        self.sizes: list[int] = []

    def place(self, size: int) -> str:
        self.sizes.append(size)
        return f"%array{len(self.sizes) - 1}"

    @property
    def parameters(self) -> list[str]:
        return [f"ptr noalias %array{i}" for i in range(len(self.sizes))]


class ThreadHeap(Heap):
    """A thread's part of a buffer of bytes. `size` is how many bytes its arrays take, known once
    the kernel is written; `part` returns pointers to the start and to the end of the part.
    With `by_blocks`, all arrays of lanes are here: they begin at the start, and take the place of
    arrays whose block has ended."""

    def __init__(
        self,
        b: Builder,
        part: Callable[[], tuple[ElementPointer, ElementPointer]],
        *,
        by_blocks: bool,
    ):
        super().__init__(b)
        self._part, self._by_blocks = part, by_blocks
        self._ends: tuple[ElementPointer, ElementPointer] | None = None
        self._used = self._most = self._at_end = 0

    @property
    def size(self) -> int:
        return self._most + self._at_end

    def array(self, dtype: np.dtype, n: int, *, of_lanes: bool) -> ElementPointer | None:
        if not (self._by_blocks and of_lanes):
            return super().array(dtype, n, of_lanes=of_lanes)
        start, _ = self._pointers()
        place = start.pointer(self._used)
        self._used += _whole_lines(n * dtype.itemsize)
        self._most = max(self._most, self._used)
        return ElementPointer(self._b, place, dtype)

    @contextmanager
    def block(self) -> Iterator[None]:
        before = self._used
        try:
            yield
        finally:
            self._used = before

    def place(self, size: int) -> str:
        _, end = self._pointers()
        self._at_end += _whole_lines(size)
        with self._b.at_start():
            return end.pointer(-self._at_end)

    def _pointers(self) -> tuple[ElementPointer, ElementPointer]:
        if self._ends is None:
            with self._b.at_start():
                self._ends = self._part()
        return self._ends


def _whole_lines(size: int) -> int:
    """The bytes of an array in an odd number of lines, which spreads arrays over a cache."""
    return (-(-size // _LINE) | 1) * _LINE
