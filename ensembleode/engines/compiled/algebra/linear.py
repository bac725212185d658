"""The linear equations of a step, with the matrix `M - gamma_h J` of a sparse Jacobian and a mass
matrix `M`.

The order of the pivots is the same in all lanes, and no rows are exchanged. Instead, the first
solution with a matrix's factors is put back into the equations. If it doesn't fulfil them, because
small pivots made the factors too large, the solution becomes NaN, and the step is rejected.

Where the elimination's plan sums up equations, so that no pivot vanishes, each equation is first
divided by its largest entry in algebraic columns, so that none is lost in another's rounding.

Source of the check: W. Oettli and W. Prager, "Compatibility of approximate solution of linear
equations with given error bounds for coefficients and right-hand sides", Numer. Math. 6 (1964),
405.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from ....fields.derivatives.elimination import (
    Block,
    Elimination,
    factors_of,
    Move,
    own_rows,
    Place,
    Row,
    rows_by_equation,
)
from ....solvers.arithmetic import Components
from ..llvm.builder import Builder, Value
from . import tuning
from .linear_loops import DenseFactors, is_rounding
from .reading import LoadedNumbers


class Factors:
    """The factors of a matrix.

    - `entries`: the entries of the matrix itself, by their places.
    - `inside`: the entries of L and U, by their places, in blocks that are unrolled.
    - `inverse`: for the unrolled blocks, the reciprocals of the pivots that are not one.
    - `dense`: the factors of blocks that are factorised by loops.
    - `scales`: what equations are multiplied by, if they are summed up.
    - `is_checked`: whether a solution with the factors has been put back into the equations.
    """

    def __init__(self, entries: dict[Place, Value], scales: dict[int, Value], *, is_checked: bool):
        self.entries, self.scales = entries, scales
        self.inside: dict[Place, Value] = {}
        self.inverse: dict[int, Value] = {}
        self.dense: dict[Block, DenseFactors] = {}
        self.is_checked = is_checked

    def scaled(self, x: Value, k: int) -> Value:
        """`x` divided by pivot `k`."""
        return x * self.inverse[k] if k in self.inverse else x


class LinearEquations:
    """Factorises matrices and solves equations by the plan of an elimination: in unrolled
    operations, or by loops for large blocks. `pattern` has the places of the Jacobian's entries,
    `mass` the entries of the mass matrix (by default of the identity)."""

    def __init__(
        self,
        b: Builder,
        plan: Elimination,
        pattern: Sequence[Place],
        mass: Mapping[Place, float] | None = None,
    ):
        self.b, self.plan = b, plan
        if mass is None:
            mass = {(i, i): 1.0 for i in range(plan.size)}
        rows = list(plan.rows or own_rows(plan.size))
        summed = {equation for row in rows if len(row) > 1 for equation, _ in row}
        self.by_loops = {x for x in plan.blocks if _is_by_loops(x, rows)}
        self.sums = {block: _taken_out(rows, block.components) for block in self.by_loops}
        self.rows = None if plan.rows is None else rows
        # For each place of the matrix: the Jacobian's entries whose weighted sum stands there, by
        # number and factor; and the entry of the mass matrix.
        stands_in = rows_by_equation(rows)
        self.terms: dict[Place, list[tuple[int, float]]] = {}
        for k, (equation, j) in enumerate(pattern):
            for i, factor in stands_in[equation]:
                self.terms.setdefault((i, j), []).append((k, factor))
        self.mass = {(i, j): x for (e, j), x in mass.items() for i, _ in stands_in[e]}
        # For summed equations, the numbers of all their entries, and of those in algebraic columns.
        differential = {j for _, j in mass}
        numbers = {e: [k for k, (i, _) in enumerate(pattern) if i == e] for e in sorted(summed)}
        self.summed = {
            e: (each, [k for k in each if pattern[k][1] not in differential])
            for e, each in numbers.items()
        }

    def factorise(
        self, jacobian: Sequence[Value], gamma_h: Value, *, checks: bool = True
    ) -> Factors:
        """The factors of `M - gamma_h jacobian`.

        **Arguments:** `checks`: whether the first solution is put back into the equations.
        """
        scales, jacobian = self._scaled(jacobian)
        factors = Factors(self._matrix(jacobian, gamma_h), scales, is_checked=not checks)
        for block in self.plan.blocks:
            if block in self.by_loops:
                factors.dense[block] = self._by_loops(block, jacobian, gamma_h)
            else:
                _factorise(factors, block)
        return factors

    def _scaled(self, jacobian: Sequence[Value]) -> tuple[dict[int, Value], Sequence[Value]]:
        """What summed equations are multiplied by, and the Jacobian with them multiplied."""
        if not self.summed:
            return {}, jacobian
        b, scales, entries = self.b, {}, [*jacobian]
        for equation, (every, algebraic) in self.summed.items():
            largest = functools.reduce(b.maximum, (abs(entries[k]) for k in algebraic))
            scales[equation] = 1.0 / b.spread(largest)
            for k in every:
                entries[k] = entries[k] * scales[equation]
        return scales, entries

    def _by_loops(self, block: Block, jacobian: Sequence[Value], gamma_h: Value) -> DenseFactors:
        components, inside = block.components, set(block.inside)
        mass = {place: x for place, x in self.mass.items() if place in inside}
        # (Whether the Jacobian's entries are all those of this block, row by row.)
        size = self.plan.size
        is_whole = len(components) == size and len(jacobian) == size**2
        in_order = self.plan.rows is None and is_whole
        if isinstance(jacobian, LoadedNumbers) and in_order:
            return DenseFactors(self.b, components, jacobian, gamma_h, mass)
        entries = {p: _sum_of(jacobian, terms) for p, terms in self.terms.items() if p in inside}
        return DenseFactors(self.b, components, entries, gamma_h, mass, self.sums[block])

    def _matrix(self, jacobian: Sequence[Value], gamma_h: Value) -> dict[Place, Value]:
        """The entries of the matrix, without those inside of blocks in `by_loops`."""
        minus, dtype = -gamma_h, gamma_h.dtype
        apart = {p for block in self.by_loops for p in block.inside}
        terms = {p: x for p, x in self.terms.items() if p not in apart}
        products = {p: _sum_of(jacobian, x) * minus for p, x in terms.items()}
        entries = {}
        for place in self.plan.entries:
            m, product = self.mass.get(place, 0.0), products.get(place)
            if product is not None:
                entries[place] = m + product if m else product
            elif place not in apart:
                entries[place] = self.b.constant(m, dtype, of_lanes=True)
        return entries

    def solve(self, factors: Factors, right: Components) -> Components:
        """The solution for a right-hand side; its first component is NaN where the check fails."""
        b, x = self.b, _multiplied(right, factors.scales)
        if self.rows is not None:
            x = [_sum_of(x, row) for row in self.rows]
        puts_back, fulfilled = not factors.is_checked, []
        factors.is_checked = True
        for block in self.plan.blocks:
            moves = list(block.moves)
            n = len(block.before)
            for move in moves[:n]:
                _move(factors, x, move)
            if block in factors.dense:
                factors.dense[block].sum_up(x)
            given = {pivot.component: x[pivot.component] for pivot in block.pivots}
            if block in factors.dense:
                factors.dense[block].solve(x)
            else:
                for move in moves[n:]:
                    _move(factors, x, move)
            if puts_back and len(given) > 1:
                fulfilled += self._fulfilled(factors, block, given, x)
        if fulfilled:
            x[0] = b.where(functools.reduce(operator.and_, fulfilled), x[0], np.nan)
        return tuple(x)

    def _fulfilled(
        self, factors: Factors, block: Block, given: dict[int, Value], x: Sequence[Value]
    ) -> list[Value]:
        """For each equation of a block, the lanes where it is fulfilled."""
        b = self.b
        if block in factors.dense:
            return [factors.dense[block].fulfilled(given, x)]
        rests, sums = dict(given), {i: abs(y) for i, y in given.items()}
        for i, j in block.inside:
            entry = factors.entries[i, j]
            rests[i] = rests[i] - entry * x[j]
            sums[i] = b.mul_add(abs(entry), abs(x[j]), sums[i])
        return [is_rounding(b, rests[i], sums[i]) for i in given]

    def solve_transposed(self, factors: Factors, right: Components) -> Components:
        """The solution with the transposed matrix."""
        x = list(right)
        for block in reversed(self.plan.blocks):
            moves = list(block.moves)
            if block in factors.dense:
                factors.dense[block].solve(x, transposed=True)
                factors.dense[block].sum_up(x, transposed=True)
                moves = moves[: len(block.before)]
            for move in reversed(moves):
                _move(factors, x, move._replace(row=move.column, column=move.row), transposed=True)
        if self.rows is None:
            return tuple(x)
        sums = [_sum_of(x, places) for places in rows_by_equation(self.rows)]
        return tuple(_multiplied(sums, factors.scales))


def _is_by_loops(block: Block, rows: Sequence[Row]) -> bool:
    longest = max(len(rows[i]) for i in block.components)
    return block.updates > tuning.MOST_UPDATES or longest > tuning.MOST_TERMS


def _taken_out(rows: list[Row], components: Sequence[int]) -> np.ndarray | None:
    """The factors of the equations in the rows of a block, `[row, equation]`, where these are sums;
    the rows are single equations afterwards."""
    summed = [i for i in components if len(rows[i]) > 1]
    if not summed:
        return None
    found = factors_of([rows[i] for i in components], len(rows))
    equations = sorted({equation for i in summed for equation, _ in rows[i]})
    for i, equation in zip(summed, equations, strict=True):
        rows[i] = ((equation, 1.0),)
    return found[:, [rows[i][0][0] for i in components]]


def _sum_of(numbers: Sequence[Value], terms: Sequence[tuple[int, float]]) -> Value:
    """The sum of some of the numbers, by their places and factors."""
    products = [numbers[k] if factor == 1 else numbers[k] * factor for k, factor in terms]
    return functools.reduce(operator.add, products)


def _multiplied(numbers: Sequence[Value], scales: Mapping[int, Value]) -> list[Value]:
    return [x * scales[i] if i in scales else x for i, x in enumerate(numbers)]


def _factorise(factors: Factors, block: Block) -> None:
    m = {place: factors.entries[place] for place in block.inside}
    for k, below, right in block.pivots:
        pivot = m[k, k]
        if pivot.constant != 1:
            factors.inverse[k] = 1.0 / pivot
        for i in below:
            left = factors.inside[i, k] = factors.scaled(m[i, k], k)
            for j in right:
                product = left * m[k, j]
                m[i, j] = m[i, j] - product if (i, j) in m else -product
    for k, _, right in block.pivots:
        for j in right:
            factors.inside[k, j] = factors.scaled(m[k, j], k)


def _move(factors: Factors, x: list[Value], move: Move, *, transposed: bool = False) -> None:
    kind, i, j = move
    if kind == "pivot":
        x[i] = factors.scaled(x[i], i)
    else:
        entries = factors.inside if kind == "factor" else factors.entries
        x[i] = x[i] - entries[(j, i) if transposed else (i, j)] * x[j]
