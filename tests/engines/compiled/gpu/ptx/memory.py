"""The memory of a launch: buffers far from each other, and the memory of each thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import PtxError


# Buffers are so far apart that no index leads from one to another.
_APART = 40
# Where global memory, and the threads' own, are for instructions that don't say which they mean. A
# GPU has global memory at the same addresses; here it has not, so that none is taken for the other.
GENERIC_GLOBAL, GENERIC_LOCAL = 1 << 56, 1 << 57
# What is there where nobody has written: a number that is seen in every result.
_GARBAGE = 0xA5
_NOBODY = -1


class Buffer:
    """Bytes, of which it is known whether they were written, and by which thread."""

    def __init__(self, name: str, size: int, content: bytes | None = None):
        self.name, self.size, self.is_read_only = name, size, content is not None
        padded = -(-size // 16) * 16
        self.data = np.full(padded, _GARBAGE, np.uint8)
        self.written = np.zeros(padded, np.uint8)
        # (By the first byte of each access.)
        self.writer = np.full(padded, _NOBODY, np.int32)
        if content is not None:
            self.data[:size] = np.frombuffer(content, np.uint8)
            self.written[:size] = 0xFF

    def load(
        self,
        offsets: Any,
        dtype: np.dtype,
        threads: Any,
        *,
        constant: bool = False,
        may_be_garbage: bool = False,
    ) -> Any:
        """What is there, a thread's at each offset.

        **Arguments:** `constant`: whether nobody may ever write there. `may_be_garbage`: whether
        it may be what nobody wrote, of which nothing is made.
        """
        at = self._places(offsets, dtype, threads)
        bits = np.dtype(f"u{dtype.itemsize}")
        written = self.written.view(bits)[at] == np.iinfo(bits).max
        if not may_be_garbage:
            self._check(written, "reads what nobody wrote", offsets, threads)
        writer = self.writer[offsets]
        alone = (writer == threads) | (writer == _NOBODY)
        self._check(alone, "reads what another thread wrote", offsets, threads)
        if constant and not self.is_read_only:
            raise PtxError(f"{self.name} is read as if nobody ever wrote there.")
        return self.data.view(dtype)[at]

    def store(self, offsets: Any, x: Any, dtype: np.dtype, threads: Any) -> None:
        """Write, each thread at its offset."""
        at = self._places(offsets, dtype, threads)
        if self.is_read_only:
            raise PtxError(f"{self.name} is written, and may only be read.")
        writer = self.writer[offsets]
        alone = (writer == threads) | (writer == _NOBODY)
        self._check(alone, "writes where another thread wrote", offsets, threads)
        self.writer[offsets] = threads
        alone = self.writer[offsets] == threads
        self._check(alone, "writes where another thread writes", offsets, threads)
        self.data.view(dtype)[at] = x
        self.written.view(f"u{dtype.itemsize}")[at] = np.iinfo(f"u{dtype.itemsize}").max

    def _places(self, offsets: Any, dtype: np.dtype, threads: Any) -> Any:
        inside = (offsets >= 0) & (offsets + dtype.itemsize <= self.size)
        self._check(inside, f"is {self.size} bytes long, and has none", offsets, threads)
        return offsets // dtype.itemsize

    def _check(self, is_right: Any, what: str, offsets: Any, threads: Any) -> None:
        if not is_right.all():
            i = int(np.argmin(is_right))
            raise PtxError(f"{self.name}: thread {threads[i]} at byte {offsets[i]}: {what}.")


class Memory:
    """Global memory, by its addresses."""

    def __init__(self):
        self._buffers: list[tuple[Buffer, int]] = []

    def add(self, buffer: Buffer, alignment: int) -> int:
        """Where a buffer is from now on: a multiple of `alignment`, and of nothing larger."""
        self._buffers.append((buffer, alignment))
        return (len(self._buffers) << _APART) + alignment

    def load(self, addresses: Any, dtype: np.dtype, threads: Any, *, constant: bool) -> Any:
        found = np.empty(addresses.shape, dtype)
        for buffer, offsets, part in self._parts(addresses, threads):
            found[part] = buffer.load(offsets, dtype, threads[part], constant=constant)
        return found

    def store(self, addresses: Any, x: Any, dtype: np.dtype, threads: Any) -> None:
        x = np.broadcast_to(x, addresses.shape)
        for buffer, offsets, part in self._parts(addresses, threads):
            buffer.store(offsets, x[part], dtype, threads[part])

    def _parts(self, addresses: Any, threads: Any) -> Any:
        """The buffers that are meant, where in them, and by which of the threads."""
        addresses = addresses.astype(np.int64)
        which = addresses >> _APART
        for number in {*which.tolist()}:
            part = which == number
            if not 1 <= number <= len(self._buffers):
                thread = threads[np.argmax(part)]
                raise PtxError(f"thread {thread} has an address that is in no buffer.")
            buffer, alignment = self._buffers[number - 1]
            yield buffer, addresses[part] - (number << _APART) - alignment, part


class Local:
    """The memory that each thread has for itself, in one buffer; addresses are of each thread."""

    def __init__(self, threads: int):
        self._threads = threads
        self._buffer, self._each = Buffer("local memory", 0), 0

    def enter(self, start: int, size: int) -> None:
        """A function begins whose frame is there: nobody has written there yet."""
        if start + size > self._each:
            before = self._buffer
            each = -(-(start + size) // 64) * 64
            self._buffer = Buffer("local memory", each * self._threads)
            for name in ("data", "written", "writer"):
                rows = getattr(self._buffer, name).reshape(self._threads, each)
                rows[:, : self._each] = getattr(before, name).reshape(self._threads, -1)
            self._each = each

    def leave(self, start: int, threads: Any) -> None:
        """What is there from `start` on is gone, of these threads."""
        rows = self._buffer.written.reshape(self._threads, -1)
        rows[threads, start:] = 0

    def load(self, addresses: Any, dtype: np.dtype, threads: Any, *, several: bool) -> Any:
        # LLVM reads several numbers at once, also where the last isn't one of the array's.
        how = {"may_be_garbage": several}
        return self._buffer.load(self._offsets(addresses, threads), dtype, threads, **how)

    def store(self, addresses: Any, x: Any, dtype: np.dtype, threads: Any) -> None:
        self._buffer.store(self._offsets(addresses, threads), x, dtype, threads)

    def _offsets(self, addresses: Any, threads: Any) -> Any:
        addresses = addresses.astype(np.int64)
        if ((addresses < 0) | (addresses >= self._each)).any():
            raise PtxError("an address that is outside of a thread's local memory.")
        return addresses + threads * self._each
