"""Memory for the arrays of a function, in place of its stack, which may be too small for them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from .values import Buffer


# Arrays begin at multiples of a cache line.
_ALIGNMENT = 64


class Heap:
    """The memory from a buffer of bytes on, from which arrays are taken as a function is written.

    - `size`: how many bytes the arrays need.
    """

    def __init__(self, memory: Buffer):
        self._memory, self._used = memory, 0
        self.size = 0

    def array(self, dtype: np.dtype, n: int) -> Buffer:
        """Memory for `n` elements, to be used in the current block of code."""
        place = self._memory.pointer(self._used)
        self._used += -(-n * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.size = max(self.size, self._used)
        return Buffer(self._memory.builder, place, dtype)

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block of code, after which the memory of its arrays is free again."""
        before = self._used
        try:
            yield
        finally:
            self._used = before
