"""Pieces of Brownian paths; see [`brownian_tree`][ensembleode.solvers.brownian_tree].

A lane remembers pieces of its trajectory's path: the last one that it was asked for, and the right
halves of those that it is in the left half of. A step that goes on from the one before finds
its piece among these, or few halvings below.
"""

from __future__ import annotations

import numpy as np

from .....solvers.brownian_tree import halves, SPREAD, units_of
from ..builder import BOOL, Builder, ElementPointer, I64, Value, Variable
from .powers import sqrt
from .random_numbers import differs, NO_WORD, philox_normal, remember


_WORD = np.dtype(np.uint32)


def brownian_piece(
    b: Builder, operands: list[Value], dtype: np.dtype, which: tuple[int, int]
) -> Value:
    """A number of a piece, `which = (i, noises)`."""
    i, noises = which
    words = [b.spread(x) for x in operands]
    key = "brownian_piece", *map(str, words), dtype, noises
    return b.once_for(key, lambda: _PieceSearch(b, words, dtype, noises).numbers())[i]


class _PieceMemory:
    """What the lanes remember. Right halves of the length `2^i` are in row `i`; the row `nowhere`,
    after these, is written where there is nothing to be remembered.

    - `owner`: the four words on which the path depends.
    - `starts [row]`, `numbers [number, row]`: where the pieces start, and their numbers.
    - `start`, `length`, `last`: the last piece, and its numbers.
    """

    def __init__(self, b: Builder, dtype: np.dtype, count: int):
        self.nowhere = units_of(dtype).bit_length() - 1
        rows = self.nowhere + 1
        self.stride = rows * max(1, b.lanes)
        self.owner = b.lasting_array(_WORD, 4, fill=NO_WORD)
        self.starts = b.lasting_array(_WORD, rows)
        self.numbers = b.lasting_array(dtype, rows * count)
        self.start = b.lasting_array(_WORD, 1)
        self.length = b.lasting_array(_WORD, 1, fill=1)
        self.last = b.lasting_array(dtype, count, fill=0)


class _PieceSearch:
    """Writes the instructions that find the numbers of a piece."""

    def __init__(self, b: Builder, words: list[Value], dtype: np.dtype, noises: int):
        self.b, self.dtype, self.noises, self.units = b, dtype, noises, units_of(dtype)
        self.count, self.width = 2 * noises, max(1, b.lanes)
        *self.owner, start, size = words
        # (In lanes whose results aren't used, these may be anything.)
        self.is_inside = start < self.units
        self.start, self.size = start & (self.units - 1), b.maximum(size, 1)
        self.memory = _PieceMemory(b, dtype, self.count)
        self.everywhere = b.constant(True, BOOL, of_lanes=True)

    def numbers(self) -> list[Value]:
        b, memory = self.b, self.memory
        # The lanes whose memory is of another path.
        other = differs(b, memory.owner, self.owner)
        b.if_(b.any(other), lambda: self._forget(other), likely=False)
        start, length = memory.start.load_lanes(0), memory.length.load_lanes(0)
        is_last = (self.start & (0 - length)).eq(start) & (length >= self.size)
        # The longest piece that starts here. (Where the last one starts here, too, it is shorter,
        # and so takes fewer halvings.)
        longest = self.start & (0 - self.start)
        is_first = self.start.eq(0)
        at = self._places(b.where(is_first, memory.nowhere, _exponent(b, longest)))
        found = memory.starts.gather(at, self.everywhere, NO_WORD).eq(self.start) & ~is_first
        found = found & ~(is_last & start.eq(self.start))
        length = b.where(is_last, length, self.units)
        self.length = b.variable(_WORD, b.where(found, longest, length))
        self.values: list[Variable] = []
        for i in range(self.count):
            last = memory.last.load_lanes(i * self.width)
            numbers = memory.numbers.offset(i * memory.stride)
            self.values.append(b.variable(self.dtype, numbers.gather(at, found, last)))
        fresh = self.is_inside & ~(found | is_last)
        b.if_(b.any(fresh), lambda: self._begin(fresh), likely=False)
        self._descend()
        start = self.start & (0 - self.length.get())
        memory.start.store_lanes(0, b.where(self.is_inside, start, NO_WORD))
        memory.length.store_lanes(0, self.length.get())
        for i, x in enumerate(self.values):
            memory.last.store_lanes(i * self.width, x.get())
        found = [x.get() for x in self.values]
        if b.waits is None:
            return found
        # A step that waits is made with no noise: with that of a much longer piece it might be far
        # from where any step is.
        waits = self.length.get() > self.size
        return [b.where(waits, 0.0, x) for x in found]

    def _forget(self, other: Value) -> None:
        b, memory = self.b, self.memory

        def forget(starts: ElementPointer, at: Value | int) -> None:
            starts.store_lanes(at, b.where(other, NO_WORD, starts.load_lanes(at)))

        b.for_(memory.nowhere + 1, lambda i: forget(memory.starts, i * self.width))
        forget(memory.start, 0)
        remember(b, memory.owner, self.owner)

    def _begin(self, fresh: Value) -> None:
        """The numbers of the whole span, in the lanes `fresh`."""
        drawn = self._drawn(self.b.constant(0, _WORD, of_lanes=True))
        for i, (value, x) in enumerate(zip(self.values, drawn, strict=True)):
            value.set_where(fresh, x if i < self.noises else x * SPREAD)

    def _descend(self) -> None:
        """Halve the pieces until they are those wanted; or once, where lanes may wait. (Some lane
        nearly always wants several halvings, but all of them one a step on average.)"""
        b = self.b

        def left() -> Value:
            return self.is_inside & (self.length.get() > self.size)

        if b.waits is None:
            b.while_(lambda: b.any(left()), lambda: self._halve(left()))
        else:
            b.if_(b.any(left()), lambda: self._halve(left()))
            b.waits.set(b.waits.get() | left())

    def _halve(self, here: Value) -> None:
        b, memory, n = self.b, self.memory, self.noises
        length = self.length.get()
        half, first = length >> 1, self.start & (0 - length)
        drawn = self._drawn((self.start + self.units) >> _exponent(b, length))
        root = sqrt(b, b.cast(length, self.dtype) * (1 / self.units))
        is_right = (self.start & half).ne(0)
        at = self._places(b.where(here & ~is_right, _exponent(b, half), memory.nowhere))
        memory.starts.scatter(at, self.everywhere, first + half)
        for i in range(n):
            both = self.values[i], self.values[n + i]
            w, a = (x.get() for x in both)
            left, right = halves(w, a, root, drawn[i], drawn[n + i])
            for j, variable, x, y in zip((i, n + i), both, left, right, strict=True):
                numbers = memory.numbers.offset(j * memory.stride)
                numbers.scatter(at, self.everywhere, y)
                variable.set_where(here, b.where(is_right, y, x))
        self.length.set_where(here, half)

    def _drawn(self, number: Value) -> list[Value]:
        """Normal numbers of the pieces of these numbers."""
        b, (first, second, index, stream) = self.b, self.owner
        found = []
        for i in range(self.count):
            block = b.constant(i // 4, _WORD)
            words = [first, second, number, block, index, stream]
            found.append(philox_normal(b, words, self.dtype, i % 4))
        return found

    def _places(self, row: Value) -> Value:
        """The elements of the lanes in this row of each."""
        b = self.b
        return b.cast(row * self.width, I64) + b.lane_numbers()


def _exponent(b: Builder, x: Value) -> Value:
    """That of a power of two."""
    return b.intrinsic("ctpop", x - 1)
