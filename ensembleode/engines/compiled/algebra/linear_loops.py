"""The linear equations of a step for large blocks: dense matrices, factorised without row exchanges
by loops over memory.

The loops work on tiles of a few rows and columns. The numbers of a tile stay in registers while the
products of the tiles to its left with those above it are subtracted from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ..llvm.builder import BOOL, Builder, Value
from . import tuning
from .components import set_all
from .reading import LoadedNumbers, Memory


# The number of a row, a column or a tile.
_Index: TypeAlias = Value | int


def is_rounding(b: Builder, rest: Value, total: Value) -> Value:
    """Whether the residual of an equation is as small as rounding makes it: a few units in the last
    place of `total`, the sum of the magnitudes of the equation's terms, or near the smallest
    numbers."""
    info = np.finfo(rest.dtype)
    return abs(rest) <= b.mul_add(total, float(info.eps**0.375), float(info.tiny / info.eps))


class DenseFactors:
    """The factors `L U` of `M - gamma_h J` in memory, for a block of the mass matrix M and of J,
    with ones on the diagonal of L.

    **Arguments:**

    - `components`: those of the block.
    - `entries`: the nonzero entries of J by row and column; or all of them, row by row.
    - `mass`: the nonzero entries of M by row and column.
    - `sums`: where the rows are sums of equations, the equations' factors `[row, equation]`;
        `entries` and right-hand sides are then those of the equations. None where the rows are the
        equations.
    """

    def __init__(
        self,
        b: Builder,
        components: Sequence[int],
        entries: Mapping[tuple[int, int], Value] | LoadedNumbers,
        gamma_h: Value,
        mass: Mapping[tuple[int, int], float],
        sums: np.ndarray | None = None,
    ):
        self.b, self.components, self.dtype = b, components, gamma_h.dtype
        self.size = n = len(components)
        self.tiles, self.rest = divmod(n, tuning.TILE)
        self.minus = -gamma_h
        self.jacobian = (
            entries.memory if isinstance(entries, LoadedNumbers) else self._copied(entries)
        )
        self.sums = None
        if sums is not None:
            places = ((i, j) for i in components for j in components)
            by_place = dict(zip(places, map(float, sums.ravel()), strict=True))
            self.sums = self._copied(self._constants(by_place), of_lanes=False)
            self.jacobian = self._summed_up(self.jacobian)
        # None stands for the identity, whose entries need no memory.
        is_identity = mass == {(i, i): 1.0 for i in components}
        self.mass = None if is_identity else self._copied(self._constants(mass), of_lanes=False)
        self.factors = Memory.new(b, self.dtype, n * n, of_lanes=True)
        self.inverse = Memory.new(b, self.dtype, n, of_lanes=True)
        self._each_tile(self._factorise)

    def _constants(self, mass: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], Value]:
        return {place: self.b.constant(x, self.dtype) for place, x in mass.items()}

    def _copied(self, entries: Mapping[tuple[int, int], Value], *, of_lanes: bool = True) -> Memory:
        b, n = self.b, self.size
        memory = Memory.new(b, self.dtype, n * n, of_lanes=of_lanes)
        if len(entries) < n * n:
            zero = b.constant(0, self.dtype, of_lanes=of_lanes)
            b.for_(n * n, lambda i: memory.store(i, zero))
        places = {k: place for place, k in enumerate(self.components)}
        for (i, j), x in entries.items():
            memory.store(places[i] * n + places[j], b.spread(x) if of_lanes else x)
        return memory

    def _summed_up(self, entries: Memory) -> Memory:
        """The entries of the rows, summed up from the entries of the equations."""
        n, of_rows = self.size, Memory.new(self.b, self.dtype, self.size**2, of_lanes=True)

        def row(i: Value) -> None:
            def column(j: Value) -> None:
                of_rows.store(i * n + j, self._sum(i, lambda k: entries.load(k * n + j)))

            self.b.for_(n, column)

        self.b.for_(n, row)
        return of_rows

    def _sum(
        self, i: Value, number: Callable[[Value], Value], *, transposed: bool = False
    ) -> Value:
        """The sum of the numbers of the equations that stands in row `i`."""
        assert self.sums is not None
        sums, n = self.sums, self.size
        total = self.b.variable(self.dtype, self.b.constant(0, self.dtype, of_lanes=True))

        def add(k: Value) -> None:
            factor = sums.load(k * n + i if transposed else i * n + k)
            total.set(self.b.mul_add(factor, number(k), total.get()))

        self.b.for_(n, add)
        return total.get()

    def _each_tile(self, body: Callable[[_Index, int], None], first: _Index = 0) -> None:
        """Run `body(tile, n)` for each tile from the first on, of `n` rows or columns."""
        self.b.for_(self.tiles - first, lambda i: body(i + first, tuning.TILE))
        if self.rest:
            body(self.tiles, self.rest)

    def _summed(
        self,
        totals: Sequence[Value],
        add: Callable[[Sequence[Value], _Index], list[Value]],
        first: _Index,
        end: _Index | None = None,
    ) -> list[Value]:
        """The totals after `add(totals, k)` for each row or column `k` of tiles before `end`."""
        sums = [self.b.variable(self.dtype, x) for x in totals]

        def turn(i: Value) -> None:
            now, k = [s.get() for s in sums], (i + first) * tuning.TILE
            for m in range(tuning.TILE):
                now = add(now, k + m)
            set_all(sums, now)

        self.b.for_((self.tiles if end is None else end) - first, turn)
        found = [s.get() for s in sums]
        for m in range(self.rest if end is None else 0):
            found = add(found, self.tiles * tuning.TILE + m)
        return found

    def _factorise(self, tile: _Index, n: int) -> None:
        """Factorise a tile on the diagonal, and then the tiles to its right and below it."""
        self._factorise_diagonal(tile, n)
        if isinstance(tile, Value):
            self._each_tile(lambda other, m: self._factorise_right(tile, other, m), tile + 1)
            self._each_tile(lambda other, m: self._factorise_below(other, m, tile), tile + 1)

    def _factorise_diagonal(self, tile: _Index, n: int) -> None:
        x = self._less(tile, tile, n, n, before=tile)
        for k in range(n):
            inverse = 1.0 / x[k][k]
            self.inverse.store(tile * tuning.TILE + k, inverse)
            for row in x[k + 1 :]:
                row[k] = row[k] * inverse
                row[k + 1 :] = self._row_less(row[k + 1 :], row[k], x[k][k + 1 :])
        self._store(tile, tile, x)

    def _factorise_right(self, tile: Value, other: _Index, n: int) -> None:
        x = self._less(tile, other, tuning.TILE, n, before=tile)
        left = self._load(self.factors, tile, tile, tuning.TILE, tuning.TILE)
        for i in range(tuning.TILE):
            for k in range(i):
                x[i] = self._row_less(x[i], left[i][k], x[k])
        self._store(tile, other, x)

    def _factorise_below(self, other: _Index, n: int, tile: Value) -> None:
        x = self._less(other, tile, n, tuning.TILE, before=tile)
        above = self._load(self.factors, tile, tile, tuning.TILE, tuning.TILE)
        for k in range(tuning.TILE):
            inverse = self.inverse.load(tile * tuning.TILE + k)
            for row in x:
                row[k] = row[k] * inverse
                row[k + 1 :] = self._row_less(row[k + 1 :], row[k], above[k][k + 1 :])
        self._store(other, tile, x)

    def _less(
        self, down: _Index, right: _Index, rows: int, columns: int, *, before: _Index
    ) -> list[list[Value]]:
        """A tile of the matrix, minus the products of the tiles before it in rows and columns."""
        i, j, is_diagonal = down * tuning.TILE, right * tuning.TILE, down is right
        matrix = [
            [self._entry(i, j, r, c, has_one=is_diagonal and r == c) for c in range(columns)]
            for r in range(rows)
        ]

        def add(totals: Sequence[Value], k: _Index) -> list[Value]:
            left = [
                self._loaded_entry(self.factors, down * tuning.TILE, k, r, 0) for r in range(rows)
            ]
            above = [
                self._loaded_entry(self.factors, k, right * tuning.TILE, 0, c)
                for c in range(columns)
            ]
            now = [totals[r * columns : (r + 1) * columns] for r in range(rows)]
            return [y for r in range(rows) for y in self._row_less(now[r], left[r], above)]

        found = self._summed([x for row in matrix for x in row], add, 0, before)
        return [found[r * columns : (r + 1) * columns] for r in range(rows)]

    def _row_less(self, row: Sequence[Value], factor: Value, other: Sequence[Value]) -> list[Value]:
        minus = -factor
        return [self.b.mul_add(minus, y, x) for x, y in zip(row, other, strict=True)]

    def _entry(self, i: _Index, j: _Index, r: int, c: int, *, has_one: bool) -> Value:
        """An entry of the matrix. `has_one`: if M is the identity, whether M has a one there."""
        x = self._loaded_entry(self.jacobian, i, j, r, c)
        if self.mass is not None:
            return self.b.mul_add(x, self.minus, self._loaded_entry(self.mass, i, j, r, c))
        return self.b.mul_add(x, self.minus, 1.0) if has_one else x * self.minus

    def solve(self, x: list[Value], *, transposed: bool = False) -> None:
        """Solve for the components of the block, in place.

        **Arguments:** `transposed`: whether to solve with the transposed matrix.
        """
        y = self._in_memory(x)

        def at(i: _Index, j: _Index, r: int, c: int) -> Value:
            i, j, r, c = (j, i, c, r) if transposed else (i, j, r, c)
            return self._loaded_entry(self.factors, i, j, r, c)

        def solved(tile: _Index, n: int, *, upper: bool) -> None:
            start = tile * tuning.TILE
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
                # The pivots are those of U.
                if upper != transposed:
                    now[r] = now[r] * self.inverse.load(start + r)
                y.store(start + r, now[r])

        self._each_tile(lambda tile, n: solved(tile, n, upper=False))
        if self.rest:
            solved(self.tiles, self.rest, upper=True)
        self.b.for_(self.tiles, lambda i: solved((self.tiles - 1) - i, tuning.TILE, upper=True))
        self._load_all(y, x)

    def sum_up(self, x: list[Value], *, transposed: bool = False) -> None:
        """Replace the equations' numbers, in place, by their sums in the rows.

        **Arguments:** `transposed`: whether to multiply with the transposed factors.
        """
        if self.sums is None:
            return
        given = self._in_memory(x)
        y = Memory.new(self.b, self.dtype, self.size, of_lanes=True)
        number = functools.partial(self._sum, number=given.load, transposed=transposed)
        self.b.for_(self.size, lambda i: y.store(i, number(i)))
        self._load_all(y, x)

    def fulfilled(self, right: Mapping[int, Value], x: Sequence[Value]) -> Value:
        """The lanes where all equations are fulfilled, up to rounding."""
        b, zero = self.b, self.b.constant(0, self.dtype, of_lanes=True)
        given = self._in_memory([right.get(i, zero) for i in range(len(x))])
        y, every = self._in_memory(x), b.variable(BOOL, True)

        def rows(tile: _Index, n: int) -> None:
            start = tile * tuning.TILE
            right = [given.load(start + r) for r in range(n)]
            solution = [y.load(start + r) for r in range(n)]

            def add(totals: Sequence[Value], k: _Index) -> list[Value]:
                other, found = y.load(k), []
                for r in range(n):
                    entry = self._entry(start, k, r, 0, has_one=False)
                    found.append(b.mul_add(-entry, other, totals[r]))
                    found.append(b.mul_add(abs(entry), abs(other), totals[n + r]))
                return [*found[::2], *found[1::2]]

            rests, sums = right, [abs(y) for y in right]
            if self.mass is None:  # then the products with the identity are not in `add`
                rests = [y - x for y, x in zip(right, solution, strict=True)]
                sums = [s + abs(x) for s, x in zip(sums, solution, strict=True)]
            found = self._summed([*rests, *sums], add, 0)
            for r in range(n):
                every.set(every.get() & is_rounding(b, found[r], found[n + r]))

        self._each_tile(rows)
        return every.get()

    def _loaded_entry(self, memory: Memory, i: _Index, j: _Index, r: int, c: int) -> Value:
        """The number that is `r` rows below and `c` columns to the right of a place."""
        return memory.moved(r * self.size + c).load(i * self.size + j)

    def _load(
        self, memory: Memory, down: _Index, right: _Index, rows: int, columns: int
    ) -> list[list[Value]]:
        i, j = down * tuning.TILE, right * tuning.TILE
        return [
            [self._loaded_entry(memory, i, j, r, c) for c in range(columns)] for r in range(rows)
        ]

    def _store(self, down: _Index, right: _Index, x: Sequence[Sequence[Value]]) -> None:
        place = down * tuning.TILE * self.size + right * tuning.TILE
        for r, row in enumerate(x):
            for c, y in enumerate(row):
                self.factors.moved(r * self.size + c).store(place, y)

    def _load_all(self, memory: Memory, x: list[Value]) -> None:
        """Put the numbers of the block in their places in `x`."""
        for place, i in enumerate(self.components):
            x[i] = memory.load(place)

    def _in_memory(self, x: Sequence[Value]) -> Memory:
        y = Memory.new(self.b, self.dtype, self.size, of_lanes=True)
        for place, i in enumerate(self.components):
            y.store(place, self.b.spread(x[i]))
        return y
