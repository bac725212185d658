"""Linear equations of a step: those of `M - gamma_h J` with a sparse Jacobian, and a mass matrix.

Nothing is exchanged for the sake of accuracy: the order of the pivots is the same in all lanes.
Instead the first solution with the factors is put back into the equations. Where these are not
fulfilled, because small pivots made the factors too large, it becomes NaN, and the step is
rejected.

Source of the check: W. Oettli and W. Prager, "Compatibility of approximate solution of linear
equations with given error bounds for coefficients and right-hand sides", Numer. Math. 6 (1964),
405.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from ...fields.elimination import Block, Elimination, Move, Place
from ...solvers.arithmetic import Components
from .builder import Builder, Value
from .linear_loops import DenseFactors


# A block of more updates is factorised by loops. Dense, 12 components written out take 0.9 times as
# long as by loops, and 16 take 1.6 times and longer to compile.
_MOST_UPDATES = 600


class Factors:
    """Those of a matrix.

    - `entries`: of the matrix itself, by their places.
    - `inside`: of L and U, likewise; `inverse`: one over the pivots, but for those that are one.
    - `dense`: of the blocks that are not written out.
    - `is_checked`: whether a solution with them has been put back into the equations.
    """

    def __init__(self, entries: dict[Place, Value], *, is_checked: bool):
        self.entries = entries
        self.inside: dict[Place, Value] = {}
        self.inverse: dict[int, Value] = {}
        self.dense: dict[Block, DenseFactors] = {}
        self.is_checked = is_checked

    def scaled(self, x: Value, k: int) -> Value:
        """Divided by a pivot."""
        return x * self.inverse[k] if k in self.inverse else x


def _tolerance(dtype: np.dtype) -> float:
    """How far a solution may be from one of the equations, in parts of what is summed there: with
    accurate factors it is some units in the last place."""
    return float(np.finfo(dtype).eps ** 0.375)


class LinearEquations:
    """The factorisation and the solutions of an elimination: every operation by itself, or by loops
    over memory in large blocks.

    **Arguments:** `pattern`: the places of the Jacobian's entries; `mass`: the entries of the mass
        matrix, by default of the identity.
    """

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
        # (In the rows where they stand.)
        row = {equation: i for i, equation in enumerate(plan.equations or range(plan.size))}
        self.pattern = [(row[i], j) for i, j in pattern]
        self.mass = {(row[i], j): x for (i, j), x in mass.items()}

    def factorise(
        self, jacobian: Sequence[Value], gamma_h: Value, *, checks: bool = True
    ) -> Factors:
        """Of `M - gamma_h jacobian`.

        **Arguments:** `checks`: whether the first solution is put back.
        """
        factors = Factors(self._matrix(jacobian, gamma_h), is_checked=not checks)
        for block in self.plan.blocks:
            if block.updates > _MOST_UPDATES:
                entries = {place: factors.entries[place] for place in block.inside}
                factors.dense[block] = DenseFactors(self.b, entries)
            else:
                _factorise(factors, block)
        return factors

    def _matrix(self, jacobian: Sequence[Value], gamma_h: Value) -> dict[Place, Value]:
        minus, dtype = -gamma_h, gamma_h.dtype
        products = {p: x * minus for p, x in zip(self.pattern, jacobian, strict=True)}
        entries = {}
        for place in self.plan.entries:
            m, product = self.mass.get(place, 0.0), products.get(place)
            if product is None:
                entries[place] = self.b.constant(m, dtype, of_lanes=True)
            else:
                entries[place] = m + product if m else product
        return entries

    def solve(self, factors: Factors, right: Components) -> Components:
        """The solution for a right-hand side; its first component is NaN where it is none."""
        b, rows = self.b, self.plan.equations
        x = list(right) if rows is None else [right[i] for i in rows]
        puts_back, fulfilled = not factors.is_checked, []
        factors.is_checked = True
        for block in self.plan.blocks:
            moves = list(block.moves)
            n = len(block.before)
            for move in moves[:n]:
                _move(factors, x, move)
            given = {k: x[k] for k in (pivot.component for pivot in block.pivots)}
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
        """Where the equations of a block are, one after the other."""
        b, tolerance = self.b, _tolerance(x[0].dtype)
        if block in factors.dense:
            return [factors.dense[block].fulfilled(given, x, tolerance)]
        rests, sums = dict(given), {i: abs(y) for i, y in given.items()}
        for i, j in block.inside:
            entry = factors.entries[i, j]
            rests[i] = rests[i] - entry * x[j]
            sums[i] = b.mul_add(abs(entry), abs(x[j]), sums[i])
        return [abs(rests[i]) <= sums[i] * tolerance for i in given]

    def solve_transposed(self, factors: Factors, right: Components) -> Components:
        """The solution with the transposed matrix."""
        x = list(right)
        for block in reversed(self.plan.blocks):
            moves = list(block.moves)
            if block in factors.dense:
                factors.dense[block].solve_transposed(x)
                moves = moves[: len(block.before)]
            for move in reversed(moves):
                _move(factors, x, move._replace(row=move.column, column=move.row), transposed=True)
        if self.plan.equations is None:
            return tuple(x)
        return tuple(x[i] for i in np.argsort(self.plan.equations))


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
