"""Matrix products, in which weights that all lanes share are read once for many components."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from .builder import Builder, Value
from .machine import current


Entry: TypeAlias = Callable[[Value | int, Value | int], Value]

# Products with fewer multiplications are unrolled.
_WRITTEN_OUT = 200
# The largest number of terms of sums that are unrolled, too.
_LONGEST_SUM = 16
# The bytes of sums that are accumulated at once, which leaves registers for their terms.
_AT_ONCE = 256
# The number of terms of each sum in one turn of the loop.
_TERMS_AT_ONCE = 4


def product(
    b: Builder,
    shape: tuple[int, int, int],
    dtype: np.dtype,
    x: Entry,
    y: Entry,
    store: Callable[[Value | int, Value | int, Value], None],
    *,
    varies: bool,
) -> None:
    """Store the entries of `x @ y`. Each entry is the sum of its terms in order, starting from
    zero.

    **Arguments:**

    - `shape`: the rows and the columns of the result, and the number of terms of an entry.
    - `x`, `y`: functions that return an entry by its row and column.
    - `varies`: whether the result differs from lane to lane.
    """
    rows, columns, terms = shape
    if rows * columns * terms <= _WRITTEN_OUT:
        tile_rows, tile_columns = rows, columns
    else:
        width = max(1, b.lanes) if varies else 1
        at_once = max(1, room(b) // (width * dtype.itemsize))
        tile_rows = min(rows, at_once)
        tile_columns = min(columns, max(1, at_once // tile_rows))

    def tile(row: Value | int, column: Value | int, n_rows: int, n_columns: int) -> None:
        places = [(row + i, column + j) for i in range(n_rows) for j in range(n_columns)]
        if terms <= _LONGEST_SUM or rows * columns * terms <= _WRITTEN_OUT:
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

            along(b, terms, _TERMS_AT_ONCE, add)
            totals = [s.get() for s in sums]
        for place, total in zip(places, totals, strict=True):
            store(*place, total)

    def _added(totals, m, row, column, n_rows, n_columns) -> list[Value]:
        left = [x(row + i, m) for i in range(n_rows)]
        right = [y(m, column + j) for j in range(n_columns)]
        pairs = ((a, c) for a in left for c in right)
        return [b.mul_add(a, c, t) for (a, c), t in zip(pairs, totals, strict=True)]

    along(
        b,
        rows,
        tile_rows,
        lambda row, n_rows: along(
            b, columns, tile_columns, lambda column, n_columns: tile(row, column, n_rows, n_columns)
        ),
    )


def along(b: Builder, n: int, size: int, body: Callable[[Value | int, int], None]) -> None:
    """Run `body(start, size)` for parts of this size in a loop, and for the smaller rest."""
    whole, rest = divmod(n, size)
    if whole == 1:
        body(0, size)
    elif whole:
        b.for_(whole, lambda i: body(i * size, size))
    if rest:
        body(whole * size, rest)


def room(b: Builder) -> int:
    """The bytes of sums that are accumulated at once. With vectors they take three quarters of the
    registers, and the terms take the others. (With AVX-512 these are 12 rows of 2 vectors: a
    product of 64 rows takes 0.8 times as long as with 2 rows.)"""
    here = current()
    return here.registers * here.vector_bytes * 3 // 4 if b.lanes > 1 else _AT_ONCE
