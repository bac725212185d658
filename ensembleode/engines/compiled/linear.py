"""Linear equations of a step: those of `1 - gamma_h J` with a sparse Jacobian.

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
from collections.abc import Sequence

import numpy as np

from ...fields.elimination import Block, Elimination, Move, Place
from ...solvers.arithmetic import Components
from .builder import Builder, Value
from .linear_loops import DenseFactors
from .reading import Loaded


# A block of more updates is factorised by loops. Dense, 8 to 16 components take as long either way;
# written out, more of them take longer to compile (benchmarks/stiff_sizes.py).
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

    **Arguments:** `pattern`: the places of the Jacobian's entries.
    """

    def __init__(self, b: Builder, plan: Elimination, pattern: Sequence[Place]):
        self.b, self.plan, self.pattern = b, plan, pattern

    def factorise(
        self, jacobian: Sequence[Value], gamma_h: Value, *, checks: bool = True
    ) -> Factors:
        """Of `1 - gamma_h jacobian`.

        **Arguments:** `checks`: whether the first solution is put back.
        """
        factors = Factors(self._matrix(jacobian, gamma_h), is_checked=not checks)
        for block in self.plan.blocks:
            if _is_by_loops(block):
                factors.dense[block] = self._by_loops(block, jacobian, gamma_h)
            else:
                _factorise(factors, block)
        return factors

    def _by_loops(self, block: Block, jacobian: Sequence[Value], gamma_h: Value) -> DenseFactors:
        components = sorted(pivot.component for pivot in block.pivots)
        if isinstance(jacobian, Loaded) and len(jacobian) == len(components) ** 2:
            return DenseFactors(self.b, components, jacobian, gamma_h)
        inside = set(block.inside)
        entries = {p: jacobian[k] for k, p in enumerate(self.pattern) if p in inside}
        return DenseFactors(self.b, components, entries, gamma_h)

    def _matrix(self, jacobian: Sequence[Value], gamma_h: Value) -> dict[Place, Value]:
        """Its entries, but for those inside of what is factorised by loops."""
        minus, dtype = -gamma_h, gamma_h.dtype
        apart = {p for block in self.plan.blocks if _is_by_loops(block) for p in block.inside}
        products = {p: jacobian[k] * minus for k, p in enumerate(self.pattern) if p not in apart}
        entries = {}
        for i, j in self.plan.entries:
            if (i, j) in products:
                entries[i, j] = 1.0 + products[i, j] if i == j else products[i, j]
            elif (i, j) not in apart:
                entries[i, j] = self.b.constant(1, dtype, of_lanes=True)
        return entries

    def solve(self, factors: Factors, right: Components) -> Components:
        """The solution for a right-hand side; its first component is NaN where it is none."""
        b, x = self.b, list(right)
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
                factors.dense[block].solve(x, transposed=True)
                moves = moves[: len(block.before)]
            for move in reversed(moves):
                _move(factors, x, move._replace(row=move.column, column=move.row), transposed=True)
        return tuple(x)


def _is_by_loops(block: Block) -> bool:
    return block.updates > _MOST_UPDATES


def _factorise(factors: Factors, block: Block) -> None:
    m = {place: factors.entries[place] for place in block.inside}
    for k, below, right in block.pivots:
        pivot = m[k, k]
        if pivot.constant is None:
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
