"""Sparse Gaussian elimination, planned from the pattern of a matrix alone.

Pivots are on the diagonal, in an order that is chosen beforehand. The matrix is first split into
blocks of components that depend on each other in a circle. Only these blocks are factorised; the
entries that couple a block to earlier blocks are used as they are. So quadratures and tangents that
are appended to a state don't change how the state itself is solved for.

Sources: blocks as in T. A. Davis and E. Palamadai Natarajan, "Algorithm 907: KLU", ACM TOMS 37
(2010), 36; the order within a block as in H. M. Markowitz, "The elimination form of the inverse",
Management Science 3 (1957), 255.
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np


Place = tuple[int, int]
# The sum of equations that stands in a row of a matrix: the number and the factor of each.
Row: TypeAlias = tuple[tuple[int, float], ...]


class Pivot(NamedTuple):
    """One step of the elimination within a block.

    - `component`: the component whose row and column are eliminated.
    - `below`, `right`: the components whose entries in that column, and in that row, are not zero
        when this step is reached.
    """

    component: int
    below: tuple[int, ...]
    right: tuple[int, ...]


class Block(NamedTuple):
    """Components that depend on each other in a circle, in the order of their elimination.

    - `before`: the entries of the block's rows in columns of earlier blocks.
    - `inside`: the entries of its rows in its own columns.
    """

    pivots: tuple[Pivot, ...]
    before: tuple[Place, ...]
    inside: tuple[Place, ...]

    @property
    def components(self) -> list[int]:
        """The components in their own order."""
        return sorted(x.component for x in self.pivots)

    @property
    def updates(self) -> int:
        """The number of products that the factorisation subtracts."""
        return sum(len(x.below) * len(x.right) for x in self.pivots)

    @property
    def moves(self) -> Iterator[Move]:
        """The operations that solve for this block's components, in order."""
        for i, j in self.before:
            yield Move("matrix", i, j)
        for pivot in self.pivots:
            for i in pivot.below:
                yield Move("factor", i, pivot.component)
        for pivot in self.pivots:
            yield Move("pivot", pivot.component, pivot.component)
        for pivot in reversed(self.pivots):
            for j in pivot.right:
                yield Move("factor", pivot.component, j)


class Move(NamedTuple):
    """An operation of a solve: `x[row] -= entry[row, column] * x[column]` with an entry of a factor
    (`"factor"`) or of the matrix (`"matrix"`), or the division of `x[row]` by its pivot
    (`"pivot"`).

    Run in reverse order with rows and columns exchanged, the moves of a solve are a solve with the
    transposed matrix.
    """

    kind: Literal["factor", "matrix", "pivot"]
    row: int
    column: int


@dc.dataclass(frozen=True)
class Elimination:
    """The plan by which matrices with nonzero entries at the same places are factorised, and linear
    systems with them are solved. Each block is factorised as `L D U`, with ones on the diagonals of
    L and U.

    - `size`: the number of rows, and of columns.
    - `rows`: for each row, the sum of equations that stands in it; None if each equation stands in
        its own row.
    - `entries`: the places of the matrix's entries, including the diagonal, row by row.
    - `blocks`: the blocks in the order in which they are solved.
    """

    size: int
    entries: tuple[Place, ...]
    blocks: tuple[Block, ...]
    rows: tuple[Row, ...] | None = None

    @property
    def updates(self) -> int:
        """The number of products that the factorisation subtracts."""
        return sum(x.updates for x in self.blocks)


@functools.lru_cache(maxsize=256)
def eliminated(
    size: int, pattern: Sequence[Place], rows: tuple[Row, ...] | None = None
) -> Elimination:
    """The elimination of matrices with entries at the places of `pattern`, and on the diagonal
    after the sums of equations have taken the places of the rows."""
    if rows is not None:
        stands_in = rows_by_equation(rows)
        pattern = [(i, j) for equation, j in pattern for i, _ in stands_in[equation]]
    places = {*pattern, *((i, i) for i in range(size))}
    columns: list[list[int]] = [[] for _ in range(size)]
    for i, j in sorted(places):
        columns[i].append(j)
    blocks = []
    for components in connected(columns):
        own, here = set(components), [(i, j) for i in components for j in columns[i]]
        inside = tuple(p for p in here if p[1] in own)
        before = tuple(p for p in here if p[1] not in own)
        blocks.append(Block(_pivots(components, inside), before, inside))
    return Elimination(size, tuple(sorted(places)), tuple(blocks), rows)


def own_rows(size: int) -> tuple[Row, ...]:
    """The rows where each equation stands in its own row."""
    return tuple(((i, 1.0),) for i in range(size))


def rows_by_equation(rows: Sequence[Row]) -> list[list[tuple[int, float]]]:
    """For each equation, the rows that it stands in, and its factors there."""
    found: list[list[tuple[int, float]]] = [[] for _ in rows]
    for i, row in enumerate(rows):
        for equation, factor in row:
            found[equation].append((i, factor))
    return found


def factors_of(rows: Sequence[Row], size: int) -> np.ndarray:
    """The factors of `size` equations in the rows, `[row, equation]`."""
    found = np.zeros((len(rows), size))
    for i, row in enumerate(rows):
        for equation, factor in row:
            found[i, equation] = factor
    return found


def _pivots(components: Sequence[int], places: Sequence[Place]) -> tuple[Pivot, ...]:
    """Pivots by Markowitz' rule: next is the component with the smallest product of the numbers of
    other entries in its row and in its column; of several, the first."""
    columns = {k: {i for i, j in places if j == k and i != k} for k in components}
    rows = {k: {j for i, j in places if i == k and j != k} for k in components}
    left, pivots = list(components), []
    while left:
        k = min(left, key=lambda c: len(columns[c]) * len(rows[c]))
        left.remove(k)
        below, right = columns.pop(k), rows.pop(k)
        pivots.append(Pivot(k, tuple(sorted(below)), tuple(sorted(right))))
        for i in below:
            rows[i] = (rows[i] | right) - {i, k}
        for j in right:
            columns[j] = (columns[j] | below) - {j, k}
    return tuple(pivots)


def connected(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected sets of components, each after the sets that it depends on.

    Source: R. Tarjan, "Depth-first search and linear graph algorithms", SIAM J. Comput. 1 (1972),
    146; written without recursion.
    """
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    waiting: set[int] = set()
    found: list[list[int]] = []
    for start in range(len(rows)):
        path = [] if start in number else [(start, iter(rows[start]))]
        while path:
            i, following = path[-1]
            if i not in number:
                number[i] = lowest[i] = len(number)
                stack.append(i)
                waiting.add(i)
            for j in following:
                if j not in number:
                    path.append((j, iter(rows[j])))
                    break
                if j in waiting:
                    lowest[i] = min(lowest[i], number[j])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[i])
                if lowest[i] == number[i]:
                    at = stack.index(i)
                    found.append(sorted(stack[at:]))
                    waiting.difference_update(stack[at:])
                    del stack[at:]
    return found
