"""The mass matrix `M` of `M du/dt = f(u, p, t)`, which is constant and may be singular."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from ..fields.derivatives.elimination import connected, Row
from .arithmetic import Components, Number


# Of more algebraic components that determine each other in a circle, equations are only summed up
# if a third of the places are taken: the sums take all of them.
_MOST_SUMMED = 16
# What sums of equations are rounded to, as parts of one.
_GRID = 2.0**20
# A matrix is singular if its least singular value is less than this many rounding errors of the
# largest one.
_ROUNDINGS = 100


@dataclasses.dataclass(frozen=True)
class MassMatrix:
    """A constant matrix `M`, by its nonzero entries.

    Rows of zeros are algebraic equations, and columns of zeros are algebraic components. There are
    as many of one as of the other, and the remaining matrix is not singular.
    """

    size: int
    entries: tuple[tuple[int, int, float], ...]  # `(row, column, number)`, row by row

    @property
    def algebraic_rows(self) -> tuple[int, ...]:
        """The equations without a derivative."""
        return self._without({i for i, _, _ in self.entries})

    @property
    def algebraic_columns(self) -> tuple[int, ...]:
        """The components whose derivative is in no equation."""
        return self._without({j for _, j, _ in self.entries})

    def _without(self, found: set[int]) -> tuple[int, ...]:
        return tuple(i for i in range(self.size) if i not in found)

    @property
    def is_singular(self) -> bool:
        return bool(self.algebraic_rows)

    @property
    def matrix(self) -> np.ndarray:
        """`M` as an array `[size, size]`."""
        found = np.zeros((self.size, self.size))
        for i, j, x in self.entries:
            found[i, j] = x
        return found

    def inverse(self) -> "MassMatrix":
        """The inverse of a matrix that is not singular."""
        return _of_array(np.linalg.inv(self.matrix))

    def transposed(self) -> "MassMatrix":
        return _of_array(self.matrix.T)

    def extended(self, size: int) -> "MassMatrix":
        """The matrix for a state of `size` components, in which the equation of each new component
        gives its derivative."""
        more = tuple((i, i, 1.0) for i in range(self.size, size))
        return MassMatrix(size, (*self.entries, *more))

    def doubled(self) -> "MassMatrix":
        """The matrix for a state followed by its tangent."""
        n = self.size
        more = tuple((n + i, n + j, x) for i, j, x in self.entries)
        return MassMatrix(2 * n, (*self.entries, *more))

    def first(self, size: int) -> "MassMatrix":
        """The matrix for the first components, which must not be coupled to the others."""
        return MassMatrix(size, tuple(x for x in self.entries if x[0] < size))

    def times(self, y: Components, zero: Callable[[Number], Number]) -> Components:
        """The product with a state of as many components. `zero(x)`: a zero like the number `x`."""
        rows: list = [None] * self.size
        for i, j, x in self.entries:
            term = y[j] if x == 1 else x * y[j]
            rows[i] = term if rows[i] is None else rows[i] + term
        return tuple(zero(a) if x is None else x for a, x in zip(y, rows, strict=True))


def mass_matrix_of(array: np.ndarray) -> MassMatrix | None:
    """The mass matrix given by an array `[n, n]`; None for the identity.

    **Raises:** `ValueError` for numbers that are infinite or NaN, and for a matrix that is singular
    in another way than by rows and columns of zeros.
    """
    if not np.isfinite(array).all():
        raise ValueError("mass_matrix has entries that are infinite or NaN.")
    rows, columns = array.any(axis=1), array.any(axis=0)
    if rows.sum() != columns.sum():
        raise ValueError(
            f"mass_matrix has {int((~rows).sum())} rows and {int((~columns).sum())} columns of "
            "zeros, and must have as many of both: a row of zeros is an algebraic equation, and a "
            "column of zeros a component that such equations determine."
        )
    rest = array[rows][:, columns]
    values = np.linalg.svd(rest, compute_uv=False)
    if len(values) and values[-1] <= _ROUNDINGS * np.finfo(float).eps * values[0]:
        raise ValueError(
            "mass_matrix is singular, and not by rows and columns of zeros: replace equations by "
            "sums of several, and components by others, so that its algebraic equations have rows "
            "of zeros, and what is left is not singular."
        )
    return None if np.array_equal(array, np.eye(len(array))) else _of_array(array)


def _of_array(array: np.ndarray) -> MassMatrix:
    places = zip(*np.nonzero(array), strict=True)
    return MassMatrix(len(array), tuple((int(i), int(j), float(array[i, j])) for i, j in places))


@functools.lru_cache(maxsize=256)
def rows_for_pivots(mass: MassMatrix, pattern: Sequence[tuple[int, int]]) -> tuple[Row, ...]:
    """For each component, the sum of equations by which it is eliminated when `M - gamma h J` is
    factorised without row exchanges, for Jacobians with this pattern.

    The equations are first assigned to components, see `pivots`. Where several algebraic components
    determine each other in a circle, each of their equations is replaced by a sum of all of them,
    with fixed factors that have nothing to do with the problem. Otherwise a pivot might always
    vanish, as the second one of `[[1, 1, 0], [1, 1, 1], [0, 1, 1]]` does. (The equations should be
    divided by their sizes before they are summed up.)

    **Raises:** the error of `pivots`.

    Source: D. S. Parker, "Random butterfly transformations with applications in computational
    linear algebra", UCLA CSD-950023 (1995), which makes pivoting unnecessary in this way.
    """
    equations = pivots(mass, pattern)
    rows: list[Row] = [((equation, 1.0),) for equation in equations]
    row = {equations[i]: i for i in mass.algebraic_columns}
    depends: list[list[int]] = [[] for _ in equations]
    for equation, j in pattern:
        if equation in row and j in mass.algebraic_columns:
            depends[row[equation]].append(j)
    for group in connected(depends):
        size, taken = len(group), sum(j in group for i in group for j in depends[i])
        if size > 1 and (size <= _MOST_SUMMED or 3 * taken >= size**2):
            for i, factors in zip(group, mixing(size), strict=True):
                rows[i] = tuple(
                    (equations[k], float(x)) for k, x in zip(group, factors, strict=True)
                )
    return tuple(rows)


def mixing(size: int) -> np.ndarray:
    """A matrix that is about orthogonal, and otherwise random, but always the same: rounded to
    twenty bits, it has the same numbers on every machine. (Numbers of fewer bits often add up to
    zero, and so would pivots.)"""
    found = np.linalg.qr(np.random.default_rng(size).standard_normal((size, size)))[0]
    return np.round(found * _GRID) / _GRID


@functools.lru_cache(maxsize=256)
def pivots(mass: MassMatrix, pattern: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """For each component, the equation that is assigned to it, for Jacobians with this pattern.

    To a differential component, it is an equation in which its derivative has a large factor, and
    to an algebraic component, an algebraic equation that contains it.

    **Raises:** `ValueError` if there are no such equations, because the algebraic equations don't
    determine the algebraic components.
    """
    from scipy.optimize import linear_sum_assignment  # (only here, and it takes a while to import)

    n = mass.size
    cost = np.full((n, n), np.inf)
    for i, j in pattern:
        if i in mass.algebraic_rows and j in mass.algebraic_columns:
            cost[i, j] = 0.0
    largest = np.abs(mass.matrix).max(axis=1)
    for i, j, x in mass.entries:
        cost[i, j] = np.log(largest[i] / abs(x))
    # A component's own equation is preferred.
    cost += np.where(np.eye(n, dtype=bool), 0.0, 1e-3)
    try:
        equations, components = linear_sum_assignment(cost)
    except ValueError:
        raise ValueError(
            "mass_matrix has rows of zeros whose equations don't determine the components whose "
            "columns are zeros: by their structure the Jacobian of these equations by these "
            "components is singular, so the index is above one. Differentiate some of the "
            "algebraic equations by time."
        ) from None
    found = dict(zip(components.tolist(), equations.tolist(), strict=True))
    return tuple(found[j] for j in range(n))
