"""Memory for the arrays of a function, in place of its stack, which may be too small for them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from .values import Buffer


# The bytes of a cache line, at which arrays begin.
_LINE = 64


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
        lines = -(-n * dtype.itemsize // _LINE)
        # An odd number of them, so that equal components of many arrays lie in different sets of a
        # cache.
        self._used += (lines | 1) * _LINE
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
