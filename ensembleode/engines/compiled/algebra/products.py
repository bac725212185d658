"""Matrix products, in which weights that all lanes share are read once for many components."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from ....fields import ir
from ..llvm.builder import Builder, ElementPointer, Value
from ..llvm.machine import current
from . import tuning


# `rows(first, n, term)` returns the numbers of `n` rows from `first` on, for one term of a product.
Rows: TypeAlias = Callable[[Value | int, int, Value | int], list[Value]]


class Tile(NamedTuple):
    """How many rows and columns of a product are computed at once."""

    rows: int
    columns: int


def tile_of(b: Builder, shape: tuple[int, int, int], dtype: np.dtype, *, varies: bool) -> Tile:
    """The tiles of a product, of this shape: see `product`."""
    rows, columns, terms = shape
    if rows * columns * terms <= tuning.WRITTEN_OUT:
        return Tile(rows, columns)
    width = max(1, b.lanes) if varies else 1
    at_once = max(1, room(b) // (width * dtype.itemsize))
    tile_rows = min(rows, at_once)
    return Tile(tile_rows, min(columns, max(1, at_once // tile_rows)))


def product(
    b: Builder,
    shape: tuple[int, int, int],
    tile_size: Tile,
    dtype: np.dtype,
    x: Rows,
    y: Rows,
    store: Callable[[Value | int, Value | int, Value], None],
    *,
    varies: bool,
) -> None:
    """Store the entries of `x @ y`, each the sum of its terms in order, starting from zero. `shape`
    has the rows, the columns and the terms, `x` gives the rows of `x`, `y` the columns of `y`, and
    `varies` says whether the result differs from lane to lane."""
    rows, columns, terms = shape

    def tile(row: Value | int, column: Value | int, n_rows: int, n_columns: int) -> None:
        places = [(row + i, column + j) for i in range(n_rows) for j in range(n_columns)]
        if terms <= tuning.LONGEST_SUM or rows * columns * terms <= tuning.WRITTEN_OUT:
            totals = [b.constant(0, dtype) for _ in places]
            for m in range(terms):
                totals = _added(totals, m, row, column, n_rows, n_columns)
        else:
            sums = [b.variable(dtype, 0, of_lanes=varies) for _ in places]

            def add(first: Value | int, n: int) -> None:
                now = [s.get() for s in sums]
                for m in range(n):
                    now = _added(now, first + m, row, column, n_rows, n_columns)
                for s, total in zip(sums, now, strict=True):
                    s.set(total)

            in_parts(b, terms, tuning.TERMS_AT_ONCE, add)
            totals = [s.get() for s in sums]
        for place, total in zip(places, totals, strict=True):
            store(*place, total)

    def _added(totals, m, row, column, n_rows, n_columns) -> list[Value]:
        left, right = x(row, n_rows, m), y(column, n_columns, m)
        pairs = ((a, c) for a in left for c in right)
        return [b.mul_add(a, c, t) for (a, c), t in zip(pairs, totals, strict=True)]

    def in_rows(row: Value | int, n_rows: int) -> None:
        def one(column: Value | int, n_columns: int) -> None:
            tile(row, column, n_rows, n_columns)

        in_parts(b, columns, tile_size.columns, one)

    in_parts(b, rows, tile_size.rows, in_rows)


@dataclasses.dataclass(frozen=True)
class Strips:
    """A matrix of weights that all lanes share, packed as `[strip, term, row of the strip]`: a
    product reads a strip from its beginning to its end (see Goto and van de Geijn, Anatomy of
    High-Performance Matrix Multiplication, 2008), instead of a cache line for each term. A strip
    has `tile` rows, as many as are computed at once; the last one may have fewer."""

    weights: ir.Matrix
    tile: int

    @property
    def size(self) -> int:
        return self.weights.rows * self.weights.columns

    @property
    def dtype(self) -> np.dtype:
        return self.weights.buffer.dtype

    def write(self, weights: ElementPointer, to: ElementPointer) -> None:
        """Write the strips; the matrix begins at `weights`."""
        by_row, by_term = self.weights.strides
        terms = self.weights.columns

        def strip(row: Value | int, n: int) -> None:
            def one(m: Value) -> None:
                place = m * n + row * terms
                at = m * by_term + row * by_row
                for i in range(n):
                    to.store(place + i, weights.load(at + i * by_row))

            weights.builder.for_(terms, one)

        in_parts(weights.builder, self.weights.rows, self.tile, strip)

    def rows(self, packed: ElementPointer) -> Rows:
        """The rows of the packed matrix."""
        terms = self.weights.columns

        def found(first: Value | int, n: int, m: Value | int) -> list[Value]:
            place = first * terms + m * n
            return [packed.load(place + i) for i in range(n)]

        return found


def strips_pay(b: Builder, weights: ir.Matrix) -> bool:
    """Whether a matrix of shared weights is better packed, for a product with these rows."""
    size = weights.rows * weights.columns * weights.buffer.dtype.itemsize
    return b.lanes > 1 and size >= tuning.LEAST_PACKED and weights.strides[1] > 1


def in_parts(b: Builder, n: int, size: int, body: Callable[[Value | int, int], None]) -> None:
    """Run `body(start, size)` for parts of this size in a loop, and for the smaller rest."""
    whole, rest = divmod(n, size)
    if whole == 1:
        body(0, size)
    elif whole:
        b.for_(whole, lambda i: body(i * size, size))
    if rest:
        body(whole * size, rest)


def room(b: Builder) -> int:
    """The bytes of sums that are accumulated at once: of vectors, 3/4 of the registers."""
    here = current()
    return here.registers * here.vector_bytes * 3 // 4 if b.lanes > 1 else tuning.BYTES_AT_ONCE
