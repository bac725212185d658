"""An explicit Runge-Kutta step and its dense output, from the method's tableau.

A state is a tuple of components, numbers of an
[`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic].
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .arithmetic import Arithmetic
from .tableau import Interpolant, Tableau


Components: TypeAlias = tuple[Any, ...]


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


def error_estimate(xp: Arithmetic, tableau: Tableau, ks: tuple, h: Any) -> Components:
    """The difference of the two embedded solutions."""
    assert tableau.error is not None
    # From the last stage to the first: where the error is all rounding, it is then of the size of
    # OrdinaryDiffEq's.
    total = weighted(xp, tableau.error[::-1], ks[::-1])
    return tuple(xp.over(h, e) * e for e in total)


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
    used = [(w, k) for w, k in zip(weights, ks, strict=True) if not _is_zero(w)]
    if len(used) == 1 and _is_power_of_two(used[0][0]):
        # One product for all components, and not a bit of them changes.
        weight, total = used[0]
        h = _times(xp, weight, h)
    else:
        total = weighted(xp, weights, ks)
    return tuple(a + xp.over(h, s) * s for a, s in zip(y, total, strict=True))


def weighted(xp: Arithmetic, weights: Sequence[Any], ks: Sequence[Components]) -> Components:
    """`sum_i(weights_i k_i)`; a weight is a Python number, or a number a trajectory."""
    used = [(w, k) for w, k in zip(weights, ks, strict=True) if not _is_zero(w)]

    def combine(*components):
        terms = [_times(xp, w, x) for (w, _), x in zip(used, components, strict=True)]
        return functools.reduce(operator.add, terms)

    return tuple(combine(*xs) for xs in zip(*(k for _, k in used), strict=True))


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
