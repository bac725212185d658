"""The sums of the cotangents of many parameters that all trajectories share, in memory.

A call of a transposed field stores the factors of outer products (see `fields.outer_products`).
They are collected over many calls and then multiplied as blocked products, whose inner length is
calls times lanes: each number of the sums is read and written once in a long while.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from ...fields.outer_products import TakenOut, Term
from .builder import Buffer, Builder, I64, Value, Variable
from .machine import current
from .products import along, room
from .reading import Memory


# The bytes of factors that are collected before they are multiplied, which should stay in a cache.
# (With half of it a gradient of 256 neurons takes 1.07 times as long; with twice, one of 64 does.)
_COLLECTED = 2**20
# More calls than this are not worth collecting.
_MOST_CALLS = 64
# How many tiles of rows are gone through for the same columns, while the factors of the columns are
# in the nearest cache.
_TILES = 4
# How many terms one function adds up. (LLVM's NewGVN ends the process at a function with a hundred
# such loops, one after the other: each `p` of as many leaves has them.)
_TERMS = 32


class ParameterSums:
    """The sums, and the memory in which factors are collected for them.

    **Arguments:**

    - `factors`: memory for the factors; after the code of all calls has been written, `length` says
        how many numbers it has to have.
    - `sums [block, number]`, `n`: the sums of blocks of trajectories, each of `n` numbers.
    """

    def __init__(self, b: Builder, factors: Buffer, sums: Buffer, n: int):
        self.b, self.factors, self._sums, self.n = b, factors, sums, n
        self.length = 0
        # Where the sums of the current block begin.
        self._start = b.variable(I64, 0, of_lanes=False)
        self._collections: list[Collection] = []
        self._beginning = b.position

    @property
    def sums(self) -> Buffer:
        """The sums of the current block."""
        return self._sums.offset(self._start.get())

    def collection(self, name: str, program: TakenOut, kept: int) -> "Collection":
        """Memory for the results of the calls of a function of this name, whose first `kept`
        results are no factors."""
        with self.b.inserting(self._beginning):
            calls = self.b.variable(I64, 0, of_lanes=False)
        found = Collection(self, self.length, calls, name, program, kept)
        self.length += found.length
        self._collections.append(found)
        return found

    def begin(self, block: Value) -> None:
        """Begin the sums of a block of trajectories."""
        self._start.set(block * self.n)
        sums, zero = self.sums, self.b.constant(0, self._sums.dtype)
        self.b.for_(self.n, lambda i: sums.store(i, zero))

    def end(self) -> None:
        """Add what is still collected to the sums of the block."""
        for x in self._collections:
            x.add_up()


class Collection:
    """The results of calls of one function: `[call, number, lane]`."""

    def __init__(
        self,
        sums: ParameterSums,
        start: int,
        calls: Variable,
        name: str,
        program: TakenOut,
        kept: int,
    ):
        self.b, self._sums, self._start, self._name = sums.b, sums, start, f"{name}_sums"
        self._terms, self._kept = program.terms, kept
        self._each = (kept + program.size) * max(1, self.b.lanes)
        fitting = _COLLECTED // (self._each * sums.factors.dtype.itemsize)
        self._most = max(1, min(_MOST_CALLS, fitting))
        self.length = self._most * self._each
        self._calls = calls

    def next(self) -> Memory:
        """The memory for the results of the next call."""
        place = self._calls.get() * self._each + self._start
        return Memory(self._sums.factors.offset(place), of_lanes=True)

    def add(self, mask: Value) -> None:
        """Add the factors that the last call has stored there, in the lanes of the mask."""
        b = self.b
        factors = self.next().moved(self._kept)
        size = self._each // max(1, b.lanes) - self._kept

        def clear(i: Value) -> None:
            factors.store(i, b.where(mask, factors.load(i), 0.0))

        b.if_(b.any(~mask), lambda: b.for_(size, clear))
        self._calls.set(self._calls.get() + 1)
        b.if_(self._calls.get() >= self._most, self.add_up, likely=False)

    def add_up(self) -> None:
        """Add the products of the collected factors to the sums."""
        b = self.b
        factors, to = self._sums.factors.offset(self._start), self._sums.sums
        for start in range(0, len(self._terms), _TERMS):
            name = f"{self._name}_{start}"
            if not b.module.has(name):
                self._write(name, self._terms[start : start + _TERMS])
            b.emit(f"call void @{name}(ptr {factors.base}, {self._calls.get()}, ptr {to.base})")
        self._calls.set(0)

    def _write(self, name: str, terms: Sequence[Term]) -> None:
        """Write the function that adds some of the terms to the sums."""
        b, dtype = self.b, self._sums.factors.dtype
        parameters = ["ptr noalias readonly %factors", "i64 %calls", "ptr noalias %sums"]
        with b.module.function(name, parameters, attributes="noinline") as inside:
            # (A register at a time: the tiles of sums are squarer.)
            inside.lanes = min(b.lanes, current().lanes(dtype))
            parts = max(1, b.lanes) // max(1, inside.lanes)
            factors, sums = (Buffer(inside, f"%{x}", dtype) for x in ("factors", "sums"))
            calls = inside.parameter("%calls", I64)
            for term in terms:
                _Sum(inside, term, factors, calls, self._each, self._kept, sums, parts).write()
            inside.return_()


class _Sum:
    """Writes the code that adds up one term of all collected calls."""

    def __init__(
        self,
        b: Builder,
        term: Term,
        factors: Buffer,
        calls: Value,
        each: int,
        kept: int,
        sums: Buffer,
        parts: int,
    ):
        self.b, self.term, self.factors, self.sums = b, term, factors, sums
        self.calls, self.each, self.kept, self.parts = calls, each, kept, parts

    def write(self) -> None:
        term, b = self.term, self.b
        at_once = max(1, room(b) // (max(1, b.lanes) * self.factors.dtype.itemsize))
        if term.right is None:
            along(b, term.rows, at_once, lambda row, n: self._tile(row, n, 0, 1))
            return
        tile_rows = max(1, min(term.rows, math.isqrt(at_once)))
        tile_columns = min(term.columns, at_once // tile_rows)

        def rows(first: Value | int, n: int) -> None:
            parts = list(_parts(n, tile_rows))

            def columns(column: Value | int, n_columns: int) -> None:
                for start, size in parts:
                    self._tile(first + start, size, column, n_columns)

            along(b, term.columns, tile_columns, columns)

        along(b, term.rows, tile_rows * _TILES, rows)

    def _tile(self, row: Value | int, n_rows: int, column: Value | int, n_columns: int) -> None:
        """Add up some rows and columns, over all calls."""
        b, term, dtype = self.b, self.term, self.factors.dtype
        totals = [b.variable(dtype, 0) for _ in range(n_rows * n_columns)]

        def call(number: Value) -> None:
            at = Memory(self.factors.offset(number * self.each), of_lanes=True)
            at = at.moved(self.kept * self.parts)
            for part in range(self.parts):
                if term.inner == 1:
                    product(at.moved(part), 0)
                else:
                    b.for_(term.inner, lambda c, part=part: product(at.moved(part), c))

        def product(at: Memory, c: Value | int) -> None:
            def load(number: Value | int) -> Value:
                return at.load(number * self.parts)

            x = term.left
            left = [load((row + i) * x.first + (c * x.second + x.start)) for i in range(n_rows)]
            if (y := term.right) is None:
                for total, value in zip(totals, left, strict=True):
                    total.set(total.get() + value)
                return
            right = [
                load((column + j) * y.second + (c * y.first + y.start)) for j in range(n_columns)
            ]
            for total, (u, v) in zip(totals, itertools.product(left, right), strict=True):
                total.set(b.mul_add(u, v, total.get()))

        b.for_(self.calls, call)
        places = itertools.product(range(n_rows), range(n_columns))
        found = b.sums_of_lanes([x.get() for x in totals])
        for total, (i, j) in zip(found, places, strict=True):
            to = (row + i) * term.to.first + ((column + j) * term.to.second + term.to.start)
            self.sums.store(to, self.sums.load(to) + total)


def _parts(n: int, size: int) -> Iterator[tuple[int, int]]:
    """The starts and sizes of the parts of `n` things."""
    return ((start, min(size, n - start)) for start in range(0, n, size))
