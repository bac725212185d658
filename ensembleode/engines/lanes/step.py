"""One explicit Runge-Kutta step of all lanes, and its dense output, from the method's tableau."""

from collections.abc import Callable
from typing import Any

from ...solvers.tableau import Interpolant, Tableau
from .leaves import add_scaled, computed_once, Leaves, map_leaves, over, weighted


def step(tableau: Tableau, field: Callable, y: Leaves, k1: Leaves, t: Any, h: Any) -> tuple:
    """The state after a step of size `h`, and the derivatives at the stages.

    `field(y, t)` is the vector field, `k1` its value at the start.
    """
    ks = [k1]
    new = y
    for c, row in zip(tableau.c[1:], tableau.a, strict=True):
        new = computed_once(add_scaled(y, h, row, ks))
        ks.append(computed_once(field(new, t + c * h)))
    if not tableau.fsal:
        new = computed_once(add_scaled(y, h, tableau.b, ks))
    return new, tuple(ks)


def error_estimate(tableau: Tableau, ks: tuple, h: Any) -> Leaves:
    """The difference of the two embedded solutions."""
    assert tableau.error is not None
    # From the last stage to the first: where the error is all rounding, it is then of the size of
    # OrdinaryDiffEq's.
    total = weighted(tableau.error[::-1], ks[::-1])
    return map_leaves(lambda e: over(h, e) * e, total)


def dense_stages(interpolant: Interpolant, field, y: Leaves, ks: tuple, t: Any, h: Any) -> tuple:
    """The stages of a step with those that only its dense output needs."""
    every = list(ks)
    for c, row in zip(interpolant.extra_c, interpolant.extra_a, strict=True):
        every.append(computed_once(field(computed_once(add_scaled(y, h, row, every)), t + c * h)))
    return tuple(every)


def interpolate(interpolant: Interpolant, y: Leaves, ks: tuple, h: Any, theta: Any) -> Leaves:
    """The state at `t + theta h`, from all `dense_stages`."""
    return computed_once(add_scaled(y, h, weights_at(interpolant, theta), ks))


def weights_at(interpolant: Interpolant, theta: Any) -> list:
    """The weight of each stage at `theta`; the number zero where it has none."""
    weights = [polynomial(w, theta) for w in interpolant.weights]
    return computed_once(weights)


def polynomial(weights: tuple, theta: Any) -> Any:
    """`sum_j(weights_j theta^(j + 1))`; zero, the number, where all weights are."""
    if not any(weights):
        return 0.0
    value = weights[-1]
    for w in reversed(weights[:-1]):
        value = value * theta + w
    return value * theta
