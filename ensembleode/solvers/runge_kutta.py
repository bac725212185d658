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
from .method import Attempt, Method
from .tableau import Interpolant, Tableau


class Stage(NamedTuple):
    """The derivative at `t + node h`, in the state `y + h sum_j(row_j k_j)`."""

    node: float
    row: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class RungeKutta(Method):
    """An explicit method: between steps it keeps the derivative at their end, where that is its
    last stage."""

    tableau: Tableau

    @property
    def order(self) -> int:
        return self.tableau.order

    @property
    def embedded_order(self) -> int | None:
        return self.tableau.embedded_order

    @property
    def stages(self) -> int:
        return self.tableau.stages

    @property
    def keeps(self) -> bool:
        return self.tableau.fsal

    @property
    def has_extra_stages(self) -> bool:
        return bool(self.tableau.interpolant.extra_c)

    def step(
        self, xp: Arithmetic, field: Callable, y: Components, k: Components | None, t: Any, h: Any
    ) -> Attempt:
        k1 = field(y, t) if k is None or not self.keeps else k
        return Attempt(*step(xp, self.tableau, field, y, k1, t, h))

    def errors(self, xp: Arithmetic, attempt: Attempt, h: Any) -> tuple[Components, ...]:
        def estimate(weights):
            # From the last stage to the first: where the error is all rounding, it is then of the
            # size of OrdinaryDiffEq's.
            total = weighted(xp, weights[::-1], attempt.ks[::-1])
            return tuple(xp.over(h, e) * e for e in total)

        return tuple(map(estimate, self.tableau.errors))

    def dense(
        self, xp: Arithmetic, field: Callable, y: Components, attempt: Attempt, t: Any, h: Any
    ) -> tuple[Components, ...]:
        return dense_stages(xp, self.tableau.interpolant, field, y, attempt.ks, t, h)

    def weights(self, xp: Arithmetic, theta: Any) -> list[Any]:
        return weights_at(xp, self.tableau.interpolant, theta)

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple[Components, ...], h: Any, theta: Any
    ) -> Components:
        return interpolate(xp, self.tableau.interpolant, y, dense, h, theta)

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


def step(
    xp: Arithmetic, tableau: Tableau, field: Callable, y: Components, k1: Components, t: Any, h: Any
) -> tuple:
    """The state after a step of size `h`, and the derivatives at the stages.

    `field(y, t)` is the vector field, `k1` its value at the start.
    """
    ks = [k1]
    new = y
    for c, row in zip(tableau.c[1:], tableau.a, strict=True):
        new = _once(xp, add_scaled(xp, y, h, row, ks))
        ks.append(_once(xp, field(new, t + c * h)))
    if not tableau.fsal:
        new = _once(xp, add_scaled(xp, y, h, tableau.b, ks))
    return new, tuple(ks)


def dense_stages(
    xp: Arithmetic,
    interpolant: Interpolant,
    field: Callable,
    y: Components,
    ks: tuple,
    t: Any,
    h: Any,
) -> tuple:
    """The stages of a step with those that only its dense output needs."""
    every = list(ks)
    for c, row in zip(interpolant.extra_c, interpolant.extra_a, strict=True):
        at = _once(xp, add_scaled(xp, y, h, row, every))
        every.append(_once(xp, field(at, t + c * h)))
    return tuple(every)


def interpolate(
    xp: Arithmetic, interpolant: Interpolant, y: Components, ks: tuple, h: Any, theta: Any
) -> Components:
    """The state at `t + theta h`, from all `dense_stages`."""
    return _once(xp, add_scaled(xp, y, h, weights_at(xp, interpolant, theta), ks))


def weights_at(xp: Arithmetic, interpolant: Interpolant, theta: Any) -> list:
    """The weight of each stage at `theta`; the number zero where it has none."""
    weights = [polynomial(w, theta) for w in interpolant.weights]
    return [w if isinstance(w, float) else xp.once(w) for w in weights]


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
