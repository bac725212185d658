"""Mass matrices: `M du/dt = f(u, p, t)`, constant, singular ones among them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arithmetic import Components


# Of the least singular value beside the largest, in roundings: less is singular.
_ROUNDINGS = 100


@dataclasses.dataclass(frozen=True)
class MassMatrix:
    """A constant matrix `M`, by its entries other than zero.

    Rows of zeros are algebraic equations, and columns of zeros algebraic components, as many of
    both; what is left is not singular.

    - `entries`: `(row, column, number)`, row by row.
    """

    size: int
    entries: tuple[tuple[int, int, float], ...]

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
        """`[size, size]`"""
        found = np.zeros((self.size, self.size))
        for i, j, x in self.entries:
            found[i, j] = x
        return found

    def inverse(self) -> "MassMatrix":
        """Of one that is not singular."""
        return _of_array(np.linalg.inv(self.matrix))

    def transposed(self) -> "MassMatrix":
        return _of_array(self.matrix.T)

    def extended(self, size: int) -> "MassMatrix":
        """Of so many components, of which each that is new has the derivative that its equation
        says."""
        more = tuple((i, i, 1.0) for i in range(self.size, size))
        return MassMatrix(size, (*self.entries, *more))

    def doubled(self) -> "MassMatrix":
        """Of a state and its tangent, one after the other."""
        n = self.size
        more = tuple((n + i, n + j, x) for i, j, x in self.entries)
        return MassMatrix(2 * n, (*self.entries, *more))

    def first(self, size: int) -> "MassMatrix":
        """Of the first components, which are coupled to no others."""
        return MassMatrix(size, tuple(x for x in self.entries if x[0] < size))

    def times(self, y: Components, zero: Callable[[Any], Any]) -> Components:
        """The product with a state of as many components.

        **Arguments:** `zero(x)`: a zero like the number `x`.
        """
        rows: list[Any] = [None] * self.size
        for i, j, x in self.entries:
            term = y[j] if x == 1 else x * y[j]
            rows[i] = term if rows[i] is None else rows[i] + term
        return tuple(zero(a) if x is None else x for a, x in zip(y, rows, strict=True))


def mass_matrix_of(array: np.ndarray) -> MassMatrix | None:
    """The mass matrix of an array `[n, n]`; None where that is the identity.

    **Raises:** `ValueError` for numbers that are infinite or NaN, and for one that is singular
    otherwise than by rows and columns of zeros.
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
def pivots(mass: MassMatrix, pattern: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Which equation each component is eliminated by, where `M - gamma h J` is factorised without
    exchanges, with a Jacobian of this pattern.

    Differential components are by the equations in which their derivatives have large factors,
    algebraic ones by algebraic equations that they are in: so it is well done at small steps, where
    the index is one.

    **Raises:** `ValueError` where that can't be: the algebraic equations don't determine the
    algebraic components.
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
    # (Its own, if it may be.)
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
