"""Linear equations of a step by loops over memory, for large blocks: a dense matrix, factorised
without exchanges of rows.

All goes by tiles of some rows and columns, whose numbers are in registers while everything that
lies to the left and above is subtracted from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .builder import BOOL, Builder, Value
from .reading import Loaded, Memory


# Rows and columns of a tile: with a vector for each number, half of 32 registers.
_TILE = 4

# A row, a column or a tile, by its number.
_Index: TypeAlias = Value | int


def is_rounding(b: Builder, rest: Value, total: Value) -> Value:
    """Whether the rest of an equation is no more than rounding leaves.

    With accurate factors it is some units in the last place of the `total`, the sum of the absolute
    values of all terms; but next to the smallest numbers there are, where rounding is absolute.
    """
    info = np.finfo(rest.dtype)
    return abs(rest) <= b.mul_add(total, float(info.eps**0.375), float(info.tiny / info.eps))


class DenseFactors:
    """`L U` of `1 - gamma_h J` for a block of J, or of another matrix, with ones on the diagonal of
    L, in memory.

    **Arguments:**

    - `components`: the rows and columns of the block.
    - `entries`: of J by row and column, zero where there are none; or all of them, row by row.
    - `gamma_h`: None where the entries are those of the matrix itself, by row and column.
    """

    def __init__(
        self,
        b: Builder,
        components: Sequence[int],
        entries: Mapping[tuple[int, int], Value] | Loaded,
        gamma_h: Value | None,
    ):
        number = gamma_h
        if number is None:
            assert isinstance(entries, Mapping)
            number = next(iter(entries.values()))
        self.b, self.components, self.dtype = b, components, number.dtype
        self.size = n = len(components)
        self.tiles, self.rest = divmod(n, _TILE)
        self.minus = None if gamma_h is None else -gamma_h
        self.jacobian = entries.memory if isinstance(entries, Loaded) else self._copied(entries)
        self.factors = Memory.on_stack(b, self.dtype, n * n, of_lanes=True)
        self.inverse = Memory.on_stack(b, self.dtype, n, of_lanes=True)
        self._each_tile(self._factorise)

    def _copied(self, entries: Mapping[tuple[int, int], Value]) -> Memory:
        b, n = self.b, self.size
        memory = Memory.on_stack(b, self.dtype, n * n, of_lanes=True)
        if len(entries) < n * n:
            zero = b.constant(0, self.dtype, of_lanes=True)
            b.for_(n * n, lambda i: memory.store(i, zero))
        places = {k: place for place, k in enumerate(self.components)}
        for (i, j), x in entries.items():
            memory.store(places[i] * n + places[j], b.spread(x))
        return memory

    #
    # Loops
    #

    def _each_tile(self, body: Callable[[_Index, int], None], first: _Index = 0) -> None:
        """`body(tile, n)`, of `n` rows or columns, for each from the first on."""
        self.b.for_(self.tiles - first, lambda i: body(i + first, _TILE))
        if self.rest:
            body(self.tiles, self.rest)

    def _each_tile_backwards(self, body: Callable[[_Index, int], None]) -> None:
        if self.rest:
            body(self.tiles, self.rest)
        self.b.for_(self.tiles, lambda i: body((self.tiles - 1) - i, _TILE))

    def _summed(
        self,
        totals: Sequence[Value],
        add: Callable[[Sequence[Value], _Index], list[Value]],
        first: _Index,
        end: _Index | None = None,
    ) -> list[Value]:
        """The totals after `add(totals, k)` for each row or column `k` of the tiles from the first
        on, before one or to the last."""
        sums = [self.b.variable(self.dtype, x) for x in totals]

        def turn(i: Value) -> None:
            now, k = [s.get() for s in sums], (i + first) * _TILE
            for m in range(_TILE):
                now = add(now, k + m)
            for s, x in zip(sums, now, strict=True):
                s.set(x)

        self.b.for_((self.tiles if end is None else end) - first, turn)
        found = [s.get() for s in sums]
        for m in range(self.rest if end is None else 0):
            found = add(found, self.tiles * _TILE + m)
        return found

    #
    # The factorisation
    #

    def _factorise(self, tile: _Index, n: int) -> None:
        """A tile of the diagonal, and then those to its right and below it."""
        self._factorise_diagonal(tile, n)
        if isinstance(tile, Value):
            self._each_tile(lambda other, m: self._factorise_right(tile, other, m), tile + 1)
            self._each_tile(lambda other, m: self._factorise_below(other, m, tile), tile + 1)

    def _factorise_diagonal(self, tile: _Index, n: int) -> None:
        x = self._less(tile, tile, n, n, before=tile)
        for k in range(n):
            inverse = 1.0 / x[k][k]
            self.inverse.store(tile * _TILE + k, inverse)
            for row in x[k + 1 :]:
                row[k] = row[k] * inverse
                row[k + 1 :] = self._row_less(row[k + 1 :], row[k], x[k][k + 1 :])
        self._store(tile, tile, x)

    def _factorise_right(self, tile: Value, other: _Index, n: int) -> None:
        x = self._less(tile, other, _TILE, n, before=tile)
        left = self._load(self.factors, tile, tile, _TILE, _TILE)
        for i in range(_TILE):
            for k in range(i):
                x[i] = self._row_less(x[i], left[i][k], x[k])
        self._store(tile, other, x)

    def _factorise_below(self, other: _Index, n: int, tile: Value) -> None:
        x = self._less(other, tile, n, _TILE, before=tile)
        above = self._load(self.factors, tile, tile, _TILE, _TILE)
        for k in range(_TILE):
            inverse = self.inverse.load(tile * _TILE + k)
            for row in x:
                row[k] = row[k] * inverse
                row[k + 1 :] = self._row_less(row[k + 1 :], row[k], above[k][k + 1 :])
        self._store(other, tile, x)

    def _less(
        self, down: _Index, right: _Index, rows: int, columns: int, *, before: _Index
    ) -> list[list[Value]]:
        """A tile of the matrix, less what lies to its left times what lies above it, of the tiles
        before this one."""
        matrix = self._load(self.jacobian, down, right, rows, columns)
        for r, row in enumerate(matrix):
            for c, x in enumerate(row):
                row[c] = self._entry(x, is_diagonal=down is right and r == c)

        def add(totals: Sequence[Value], k: _Index) -> list[Value]:
            left = [self._at(self.factors, down * _TILE, k, r, 0) for r in range(rows)]
            above = [self._at(self.factors, k, right * _TILE, 0, c) for c in range(columns)]
            now = [totals[r * columns : (r + 1) * columns] for r in range(rows)]
            return [y for r in range(rows) for y in self._row_less(now[r], left[r], above)]

        found = self._summed([x for row in matrix for x in row], add, 0, before)
        return [found[r * columns : (r + 1) * columns] for r in range(rows)]

    def _row_less(self, row: Sequence[Value], factor: Value, other: Sequence[Value]) -> list[Value]:
        minus = -factor
        return [self.b.mul_add(minus, y, x) for x, y in zip(row, other, strict=True)]

    def _entry(self, x: Value, *, is_diagonal: bool) -> Value:
        """Of the matrix, by that of J."""
        if self.minus is None:
            return x
        return self.b.mul_add(x, self.minus, 1.0) if is_diagonal else x * self.minus

    #
    # Solutions
    #

    def solve(self, x: list[Value], *, transposed: bool = False) -> None:
        """The components of the block, in place.

        **Arguments:** `transposed`: with the transposed matrix.
        """
        y = self._in_memory(x)

        def at(i: _Index, j: _Index, r: int, c: int) -> Value:
            i, j, r, c = (j, i, c, r) if transposed else (i, j, r, c)
            return self._at(self.factors, i, j, r, c)

        def solved(tile: _Index, n: int, *, upper: bool) -> None:
            start = tile * _TILE
            now = [y.load(start + r) for r in range(n)]

            def add(totals: Sequence[Value], k: _Index) -> list[Value]:
                other = y.load(k)
                return [
                    self.b.mul_add(-at(start, k, r, 0), other, total)
                    for r, total in enumerate(totals)
                ]

            if not upper:
                now = self._summed(now, add, 0, tile)
            elif isinstance(tile, Value):
                now = self._summed(now, add, tile + 1)
            for r in range(n)[:: -1 if upper else 1]:
                for c in range(r + 1, n) if upper else range(r):
                    now[r] = self.b.mul_add(-at(start, start, r, c), now[c], now[r])
                # (The pivots are those of U.)
                if upper != transposed:
                    now[r] = now[r] * self.inverse.load(start + r)
                y.store(start + r, now[r])

        self._each_tile(lambda tile, n: solved(tile, n, upper=False))
        self._each_tile_backwards(lambda tile, n: solved(tile, n, upper=True))
        for place, i in enumerate(self.components):
            x[i] = y.load(place)

    def fulfilled(self, right: Mapping[int, Value], x: Sequence[Value]) -> Value:
        """Where the equations are, but for rounding."""
        b = self.b
        zero = b.constant(0, self.dtype, of_lanes=True)
        given = self._in_memory([right.get(i, zero) for i in range(len(x))])
        y, every = self._in_memory(x), b.variable(BOOL, True)

        def rows(tile: _Index, n: int) -> None:
            start = tile * _TILE
            right = [given.load(start + r) for r in range(n)]
            solution = [y.load(start + r) for r in range(n)]

            def add(totals: Sequence[Value], k: _Index) -> list[Value]:
                other, found = y.load(k), []
                for r in range(n):
                    entry = self._entry(self._at(self.jacobian, start, k, r, 0), is_diagonal=False)
                    found.append(b.mul_add(-entry, other, totals[r]))
                    found.append(b.mul_add(abs(entry), abs(other), totals[n + r]))
                return [*found[::2], *found[1::2]]

            rests, sums = right, list(map(abs, right))
            if self.minus is not None:
                # (That is 1 - gamma_h J, the 1 and J apart.)
                rests = [y - x for y, x in zip(right, solution, strict=True)]
                sums = [abs(y) + abs(x) for y, x in zip(right, solution, strict=True)]
            found = self._summed([*rests, *sums], add, 0)
            for r in range(n):
                every.set(every.get() & is_rounding(b, found[r], found[n + r]))

        self._each_tile(rows)
        return every.get()

    #
    # Memory
    #

    def _at(self, memory: Memory, i: _Index, j: _Index, r: int, c: int) -> Value:
        """The number `r` rows below and `c` columns to the right of a place."""
        return memory.moved(r * self.size + c).load(i * self.size + j)

    def _load(
        self, memory: Memory, down: _Index, right: _Index, rows: int, columns: int
    ) -> list[list[Value]]:
        i, j = down * _TILE, right * _TILE
        return [[self._at(memory, i, j, r, c) for c in range(columns)] for r in range(rows)]

    def _store(self, down: _Index, right: _Index, x: Sequence[Sequence[Value]]) -> None:
        place = down * _TILE * self.size + right * _TILE
        for r, row in enumerate(x):
            for c, y in enumerate(row):
                self.factors.moved(r * self.size + c).store(place, y)

    def _in_memory(self, x: Sequence[Value]) -> Memory:
        y = Memory.on_stack(self.b, self.dtype, self.size, of_lanes=True)
        for place, i in enumerate(self.components):
            y.store(place, self.b.spread(x[i]))
        return y
