"""Sums of products over a long inner length, one panel of columns after the other.

The sums are `to[i, j] += sum_s left[i, s] * right[s, j]`, where each number of `left` and `right`
is a vector of lanes, whose entries are further terms `s`. A panel is some columns of `right`,
transposed so that a vector holds neighbouring columns. With it, the sums are an ordinary product of
matrices (see Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008): they
stay in registers, and the panel in the nearest cache.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ....fields.derivatives.outer_products import OuterProductTerm
from ..llvm.across_lanes import transposed
from ..llvm.builder import Builder, ElementPointer, I64, Value
from . import tuning
from .components import set_all
from .products import in_parts, room


def suits(b: Builder, term: OuterProductTerm, lanes: int) -> bool:
    """Whether a term's columns are worth transposing: they lie side by side, and are many."""
    if term.right is None or b.lanes != lanes or b.lanes < 2:
        return False
    return term.to.second == 1 and term.columns >= b.lanes and term.rows >= tuning.LEAST_ROWS


class _LaneVectors(NamedTuple):
    """Vectors of lanes; the one of step `s` and row `i` begins at `s * step + i * other`."""

    buffer: ElementPointer
    step: int
    other: int

    def vector(self, step: Value | int, other: Value | int) -> ElementPointer:
        return self.buffer.offset(step * self.step + other * self.other)


class Panels:
    """Writes the code that adds a term to `sums`, over all `calls`. Number `i` of call `s` is a
    vector of `unit` lanes that begins at `s * each + i * unit` in `factors`."""

    def __init__(
        self,
        b: Builder,
        term: OuterProductTerm,
        factors: ElementPointer,
        calls: Value,
        each: int,
        unit: int,
        sums: ElementPointer,
    ):
        self.b, self.term, self.sums = b, term, sums
        self._factors, self._calls, self._each, self._unit = factors, calls, each, unit
        self._wide = tuning.VECTORS_OF_PANELS * b.lanes
        size = sums.dtype.itemsize
        self._tile_rows = max(1, room(b) // (self._wide * size))
        self._steps = max(1, tuning.PANEL_BYTES // (self._wide * unit * size))
        self._panel = b.array(sums.dtype, self._steps * unit * self._wide)

    def write(self) -> None:
        b, term, unit = self.b, self.term, self._unit
        left, right = term.left, term.right
        assert right is not None

        def rows_at(at: ElementPointer, c: Value | int, step: int) -> _LaneVectors:
            start = (c * left.second + left.start) * unit
            return _LaneVectors(at.offset(start), step, left.first * unit)

        def columns_at(at: ElementPointer, c: Value | int, step: int) -> _LaneVectors:
            start = (c * right.first + right.start) * unit
            return _LaneVectors(at.offset(start), step, right.second * unit)

        def one_call(number: Value) -> None:
            at = self._factors.offset(number * self._each)

            def block(c: Value | int, n: int) -> None:
                rows = rows_at(at, c, left.second * unit)
                self._block(rows, columns_at(at, c, right.first * unit), n)

            in_parts(b, term.inner, self._steps, block)

        def some_calls() -> None:
            now = first.get()
            at = self._factors.offset(now * self._each)
            n = b.minimum(self._calls - now, self._steps)
            self._block(rows_at(at, 0, self._each), columns_at(at, 0, self._each), n)
            first.set(now + self._steps)

        if term.inner > 1:
            b.for_(self._calls, one_call)
        else:
            first = b.variable(I64, 0, of_lanes=False)
            b.while_(lambda: first.get() < self._calls, some_calls)

    def _block(self, rows: _LaneVectors, columns: _LaneVectors, n: Value | int) -> None:
        """Add up `n` steps."""
        term = self.term

        def panel(column: Value | int, size: int) -> None:
            vectors = -(-size // self.b.lanes)
            self._transpose(columns, n, column, size, vectors)

            def tile(row: Value | int, n_rows: int) -> None:
                self._tile(rows, n, (row, n_rows), (column, size), vectors)

            in_parts(self.b, term.rows, self._tile_rows, tile)

        in_parts(self.b, term.columns, self._wide, panel)

    def _transpose(
        self, columns: _LaneVectors, n: Value | int, column: Value | int, size: int, vectors: int
    ) -> None:
        """Write the panel `[step, lane, column]`."""
        b, lanes = self.b, self.b.lanes
        zero = b.constant(0, self.sums.dtype, of_lanes=True)

        def one(step: Value) -> None:
            for part, v in itertools.product(range(self._unit // lanes), range(vectors)):
                first = v * lanes
                xs = [
                    columns.vector(step, column + (first + j)).load_lanes(part * lanes)
                    if first + j < size
                    else zero
                    for j in range(lanes)
                ]
                to = self._panel.offset(step * (self._unit * vectors * lanes))
                for lane, x in enumerate(transposed(b, xs)):
                    to.store_lanes(((part * lanes + lane) * vectors + v) * lanes, x)

        b.for_(n, one)

    def _tile(
        self,
        rows: _LaneVectors,
        n: Value | int,
        of_rows: tuple[Value | int, int],
        of_columns: tuple[Value | int, int],
        vectors: int,
    ) -> None:
        """Add up some rows and columns, each given by the first of them and how many there are."""
        b, lanes, dtype = self.b, self.b.lanes, self.sums.dtype
        (row, n_rows), (column, n_columns) = of_rows, of_columns
        totals = [b.variable(dtype, 0) for _ in range(n_rows * vectors)]

        def one(step: Value) -> None:
            of_step = self._panel.offset(step * (self._unit * vectors * lanes))
            each = [rows.vector(step, row + i) for i in range(n_rows)]

            def some(lane: Value | int, n: int) -> None:
                now = [x.get() for x in totals]
                for k in range(n):
                    right = [
                        of_step.load_lanes((lane + k) * (vectors * lanes) + v * lanes)
                        for v in range(vectors)
                    ]
                    left = [x.load(lane + k) for x in each]
                    pairs = itertools.product(left, right)
                    now = [b.mul_add(x, y, t) for (x, y), t in zip(pairs, now, strict=True)]
                set_all(totals, now)

            in_parts(b, self._unit, tuning.TERMS_OF_PANELS_AT_ONCE, some)

        b.for_(n, one)
        places = itertools.product(range(n_rows), range(vectors))
        for total, (i, v) in zip(totals, places, strict=True):
            place = (row + i) * self.term.to.first + (column + (self.term.to.start + v * lanes))
            self._add(place, total.get(), n_columns - v * lanes)

    def _add(self, place: Value | int, x: Value, n: int) -> None:
        """Add the first `n` entries to the sums from this place on."""
        b, sums = self.b, self.sums
        if n >= b.lanes:
            sums.store_lanes(place, sums.load_lanes(place) + x)
            return
        for j in range(n):
            entry = b.entry(x, b.constant(j, I64))
            sums.store(place + j, sums.load(place + j) + entry)
