"""An explicit Runge-Kutta step and its dense output, from the method's tableau.

A state is a tuple of components, numbers of an
[`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic].
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .arithmetic import Arithmetic, Components
from .tableau import Tableau


class Attempt(NamedTuple):
    """A step that was tried: its end, and the derivatives at its stages."""

    y2: Components
    ks: tuple[Components, ...]


class Stage(NamedTuple):
    """The derivative at `t + node h`, in the state `y + h sum_j(row_j k_j)`."""

    node: float
    row: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class RungeKutta:
    """An explicit method: what a time loop asks of its tableau.

    `field(y, t)` is the vector field, `h` the signed size of a step from the state `y` at `t`.
    Between steps it keeps the derivative at their end, where that is its last stage.
    """

    tableau: Tableau

    @property
    def order(self) -> int:
        return self.tableau.order

    @property
    def embedded_order(self) -> int | None:
        """Of the solution that it is compared with; None where there is no error estimate."""
        return self.tableau.embedded_order

    @property
    def stages(self) -> int:
        """Evaluations of the field in a step."""
        return self.tableau.stages

    @property
    def keeps(self) -> bool:
        """Whether a step hands on the derivative at its end to the next, which then needs one
        evaluation less."""
        return self.tableau.fsal

    @property
    def has_extra_stages(self) -> bool:
        """Whether dense output takes more evaluations."""
        return bool(self.tableau.interpolant.extra_c)

    @property
    def degree(self) -> int:
        """Of the polynomial that dense output is within a step."""
        return self.tableau.interpolant.degree

    def evaluations(self, ntried: Any) -> Any:
        """How many evaluations of the field so many steps take, accepted or not."""
        return ntried * (self.stages - 1) + 1 if self.keeps else ntried * self.stages

    def step(
        self, xp: Arithmetic, field: Callable, y: Components, k: Components | None, t: Any, h: Any
    ) -> Attempt:
        """A step; `k`: what the one before handed on. (Without it, it is computed.)"""
        tableau = self.tableau
        ks = [field(y, t) if k is None or not self.keeps else k]
        new = y
        for c, row in zip(tableau.c[1:], tableau.a, strict=True):
            new = _once(xp, add_scaled(xp, y, h, row, ks))
            ks.append(_once(xp, field(new, t + c * h)))
        if not tableau.fsal:
            new = _once(xp, add_scaled(xp, y, h, tableau.b, ks))
        return Attempt(new, tuple(ks))

    def kept(self, attempt: Attempt) -> Components:
        """What an accepted step hands on, of a method that `keeps` something."""
        return attempt.ks[-1]

    def errors(self, xp: Arithmetic, attempt: Attempt, h: Any) -> tuple[Components, ...]:
        """The estimates of the error of the step, component by component: the largest counts."""

        def estimate(weights):
            # From the last stage to the first: where the error is all rounding, it is then of the
            # size of OrdinaryDiffEq's.
            total = weighted(xp, weights[::-1], attempt.ks[::-1])
            return tuple(xp.over(h, e) * e for e in total)

        return tuple(map(estimate, self.tableau.errors))

    def dense(
        self, xp: Arithmetic, field: Callable, y: Components, attempt: Attempt, t: Any, h: Any
    ) -> tuple[Components, ...]:
        """The stages of the step with those that only its dense output needs."""
        interpolant, every = self.tableau.interpolant, list(attempt.ks)
        for c, row in zip(interpolant.extra_c, interpolant.extra_a, strict=True):
            at = _once(xp, add_scaled(xp, y, h, row, every))
            every.append(_once(xp, field(at, t + c * h)))
        return tuple(every)

    def weights(self, xp: Arithmetic, theta: Any) -> list[Any]:
        """The weights of all `dense` stages in the state at `t + theta h`, which is
        `y + h sum_i(weights_i k_i)`; the number zero for those that have none."""
        weights = [polynomial(w, theta) for w in self.tableau.interpolant.weights]
        return [w if isinstance(w, float) else xp.once(w) for w in weights]

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple[Components, ...], h: Any, theta: Any
    ) -> Components:
        """The state at `t + theta h`."""
        return _once(xp, add_scaled(xp, y, h, self.weights(xp, theta), dense))

    #
    # For those that go through the stages themselves, such as adjoints
    #

    @property
    def every_stage(self) -> tuple[Stage, ...]:
        """The stages of a step, and then those of its dense output."""
        tableau, more = self.tableau, self.tableau.interpolant
        nodes = (*tableau.c, *more.extra_c)
        return tuple(map(Stage, nodes, ((), *tableau.a, *more.extra_a)))

    @property
    def end(self) -> tuple[float, ...]:
        """The weights of the stages in the state at the end of the step."""
        return self.tableau.b


def polynomial(weights: tuple, theta: Any) -> Any:
    """`sum_j(weights_j theta^(j + 1))`; zero, the number, where all weights are."""
    if not any(weights):
        return 0.0
    value = weights[-1]
    for w in reversed(weights[:-1]):
        value = value * theta + w
    return value * theta


def add_scaled(
    xp: Arithmetic, y: Components, h: Any, weights: Sequence[Any], ks: Sequence[Components]
) -> Components:
    """`y + h sum_i(weights_i k_i)`, without the terms whose weight is zero."""
    used = _used(weights, ks)
    if len(used) == 1 and _is_power_of_two(used[0][0]):
        # One product for all components, and not a bit of them changes.
        weight, total = used[0]
        h = _times(xp, weight, h)
    else:
        total = weighted(xp, weights, ks)
    return tuple(a + xp.over(h, s) * s for a, s in zip(y, total, strict=True))


def weighted(xp: Arithmetic, weights: Sequence[Any], ks: Sequence[Components]) -> Components:
    """`sum_i(weights_i k_i)`; a weight is a Python number, or a number a trajectory."""
    used = _used(weights, ks)

    def combine(*components):
        terms = [_times(xp, w, x) for (w, _), x in zip(used, components, strict=True)]
        return functools.reduce(operator.add, terms)

    return tuple(combine(*xs) for xs in zip(*(k for _, k in used), strict=True))


def _used(weights: Sequence[Any], ks: Sequence[Components]) -> list[tuple[Any, Components]]:
    """The stages whose weight is not zero, with it."""
    return [(w, k) for w, k in zip(weights, ks, strict=True) if not _is_zero(w)]


def _once(xp: Arithmetic, components: Components) -> Components:
    return tuple(map(xp.once, components))


def _is_zero(weight: Any) -> bool:
    return isinstance(weight, float | int) and weight == 0


def _is_power_of_two(weight: Any) -> bool:
    return isinstance(weight, float | int) and abs(math.frexp(weight)[0]) == 0.5


def _times(xp: Arithmetic, weight: Any, component: Any) -> Any:
    if isinstance(weight, float | int):
        return component if weight == 1 else weight * component
    return xp.over(weight, component) * component
