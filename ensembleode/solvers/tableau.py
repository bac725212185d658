"""Butcher tableaux, which define explicit Runge-Kutta methods for all engines."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias


# Entries may be written as integers; they are kept as floats.
Row: TypeAlias = tuple[int | float, ...]
Rows: TypeAlias = tuple[Row, ...]


@dataclass(frozen=True)
class Interpolant:
    """The solution within a step, a polynomial in `theta`, from 0 at its start to 1 at its end.

    `u(t + theta h) = u + h sum_i(b_i(theta) k_i)`, `b_i(theta) = sum_j(weights[i][j] theta^(j+1))`,
    over the stages of the method and then the extra ones.

    - `weights`: a row for each stage, a column for each power of `theta`, from the first.
    - `order`: the order for every `theta`: the error in one step is `O(h^(order + 1))`.
    - `extra_c`, `extra_a`: the nodes and rows of stages that only the interpolant needs. A row has
        an entry for every stage before it, including earlier extra ones.
    """

    weights: Rows
    order: int
    extra_c: Row = ()
    extra_a: Rows = ()

    def __post_init__(self):
        _set(self, weights=_floats(self.weights), extra_a=_floats(self.extra_a))
        _set(self, extra_c=tuple(map(float, self.extra_c)))
        stages = len(self.weights) - len(self.extra_c)
        _check_rows(self.extra_c, self.extra_a, first=stages)
        if len({len(row) for row in self.weights}) != 1:
            raise ValueError("The rows of weights differ in length.")

    @property
    def degree(self) -> int:
        return len(self.weights[0])


_BY_DEFAULT: Any = None


@dataclass(frozen=True)
class Tableau:
    """The coefficients of an explicit Runge-Kutta method of `s` stages.

    `k_i = f(u + h sum_j(a_ij k_j), t + c_i h)`, then `u_new = u + h sum_i(b_i k_i)`.

    - `c`: the nodes, starting with 0. [s]
    - `a`: a row for each stage from the second; row `i` has `i` entries.
    - `b`: the weights. [s]
    - `order`: the order of the method with weights `b`.
    - `interpolant`: the solution within the step; by default the cubic polynomial of the states and
        slopes at both ends.
    - `error`: `b` minus the weights of the embedded method, so that `h sum_i(error_i k_i)`
        estimates the error of the step; None if there is no embedded method. [s]
    - `embedded_order`: the order of the embedded method.
    - `second_error`: the same for another embedded method of that order; the larger of both
        estimates, in the norm of the solve, controls the steps. [s]

    **Raises:** `ValueError` for coefficients that don't fit together.
    ([`ExplicitRK`][ensembleode.ExplicitRK] checks that they have the orders that they claim.)
    """

    c: Row
    a: Rows
    b: Row
    order: int
    interpolant: Interpolant = _BY_DEFAULT
    error: Row | None = None
    embedded_order: int | None = None
    second_error: Row | None = None

    def __post_init__(self):
        _set(self, c=tuple(map(float, self.c)), a=_floats(self.a), b=tuple(map(float, self.b)))
        if not len(self.c) == len(self.b) == len(self.a) + 1 or self.c[0] != 0:
            raise ValueError(
                "c, a and b are not of the same number of stages, or c[0] is not 0: with s stages "
                f"c and b have s entries, and a has s - 1 rows, from that of the second stage. "
                f"They have {len(self.c)}, {len(self.b)} and {len(self.a)}."
            )
        if not isinstance(self.order, int) or self.order < 1:
            raise ValueError(f"order must be a positive integer, got {self.order!r}.")
        _check_rows(self.c[1:], self.a, first=1)
        if (self.error is None) != (self.embedded_order is None):
            raise ValueError("error and embedded_order come together.")
        if self.error is None and self.second_error is not None:
            raise ValueError("second_error comes with error.")
        for name in ("error", "second_error"):
            if (row := getattr(self, name)) is None:
                continue
            _set(self, **{name: tuple(map(float, row))})
            if len(row) != len(self.b):
                raise ValueError(f"{name} is not of as many stages as b.")
            if abs(math.fsum(row)) > 1e-12:
                raise ValueError(
                    f"{name} does not add up to 0: it is b less the weights of the embedded "
                    "method, which add up to 1, too."
                )
        if self.interpolant is None:
            _set(self, interpolant=cubic_hermite(self.b, order=self.order, fsal=self.fsal))
        if len(self.interpolant.weights) - len(self.interpolant.extra_c) != len(self.b):
            raise ValueError("The interpolant is not of as many stages as b.")

    @property
    def stages(self) -> int:
        return len(self.b)

    @property
    def errors(self) -> Rows:
        """The weights of all error estimates."""
        return tuple(row for row in (self.error, self.second_error) if row is not None)

    @property
    def fsal(self) -> bool:
        """Whether the first stage of a step is the last stage of the step before:
        `f(u_new, t + h)`."""
        return bool(self.a) and is_end_of_step(self.a[-1], self.b) and self.c[-1] == 1


def is_end_of_step(row: Row, b: Row) -> bool:
    """Whether the stage with this row, one of the stages of `b` or a later one, is `f(u_new)`."""
    return row == b[: len(row)] and not any(b[len(row) :])


def cubic_hermite(b: Row, *, order: int, fsal: bool) -> Interpolant:
    """The cubic polynomial with the states and slopes at both ends of the step.

    It is of order 3, or of the method's order if that is less. The slope at the end costs a stage
    unless `fsal`.
    """
    weights = [[0.0, 3 * w, -2 * w] for w in b]
    if not fsal:
        weights.append([0.0, 0.0, 0.0])
    for stage, slope in ((0, (1, -2, 1)), (-1, (0, -1, 1))):
        weights[stage] = [w + v for w, v in zip(weights[stage], slope, strict=True)]
    rows = tuple(map(tuple, weights))
    if fsal:
        return Interpolant(rows, min(order, 3))
    return Interpolant(rows, min(order, 3), extra_c=(1,), extra_a=(b,))


def _check_rows(c: Row, a: Rows, *, first: int) -> None:
    if len(c) != len(a):
        raise ValueError(f"{len(c)} nodes for {len(a)} rows.")
    for i, (node, row) in enumerate(zip(c, a, strict=True), start=first):
        if len(row) != i:
            raise ValueError(f"The row of stage {i + 1} has {len(row)} entries.")
        if abs(math.fsum(row) - node) > 1e-14 * (1 + max(map(abs, row))):
            raise ValueError(f"The row of stage {i + 1} does not add up to its node.")


def _floats(rows: Rows) -> Rows:
    return tuple(tuple(map(float, row)) for row in rows)


def _set(frozen: object, **values: object) -> None:
    for key, value in values.items():
        object.__setattr__(frozen, key, value)
