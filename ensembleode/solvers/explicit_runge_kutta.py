"""Explicit Runge-Kutta methods: a step and its dense output, from the method's tableau.

A method is a file with a subclass of `ExplicitRungeKutta`, such as `bs5.py`, and is named in
`__init__.py` and `__init__.pyi`.

A state is a tuple of components, which are numbers of an
[`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic].
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import ClassVar

from .arithmetic import Arithmetic, Components, Number
from .base import ODESolver
from .method import Equations, StepAttempt
from .tableau import Tableau


@dataclasses.dataclass(frozen=True)
class RungeKutta:
    """An explicit Runge-Kutta [`Method`][ensembleode.solvers.method.Method].

    If its last stage is the derivative at the end of the step, that is carried to the next step,
    which then needs one evaluation less. Dense output is computed from all stages.
    """

    tableau: Tableau

    # The carry is the derivative at the state, which `init` would evaluate, too.
    remembers = False
    is_implicit = False
    grid = None

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
    def degree(self) -> int:
        return self.tableau.interpolant.degree

    def evaluations(self, ntried: Number) -> Number:
        return ntried * (self.stages - 1) + 1 if self.tableau.fsal else ntried * self.stages

    def linear_algebra(self, ntried: Number) -> None:
        """None, as it is explicit."""

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Number) -> tuple:
        return (equations.f(y, t),) if self.tableau.fsal else ()

    def step(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        carry: tuple,
        t: Number,
        h: Number,
    ) -> StepAttempt:
        tableau, f = self.tableau, equations.f
        ks = [carry[0] if carry else f(y, t)]
        before = new = y
        for c, row in zip(tableau.c[1:], tableau.a, strict=True):
            before, new = new, _once(xp, add_scaled(xp, y, h, row, ks))
            ks.append(_once(xp, f(new, t + c * h)))
        last = before, new
        if not tableau.fsal:
            new = _once(xp, add_scaled(xp, y, h, tableau.b, ks))
        carry = (ks[-1],) if tableau.fsal else ()
        # From the last stage to the first: an error that is all rounding then has the size that it
        # has in OrdinaryDiffEq.
        error = tuple(
            tuple(xp.broadcast_over(h, e) * e for e in weighted(xp, weights[::-1], ks[::-1]))
            for weights in tableau.errors
        )
        return StepAttempt(new, carry, error, tuple(ks), last=(*ks[-2:], *last))

    def stretches(self, xp: Arithmetic, equations: Equations, last: tuple) -> tuple:
        """The distances, component by component, between the states of the last two stages, and
        between their slopes. The ratio of the distances estimates the absolute value of the largest
        eigenvalue of the Jacobian (Hairer and Wanner, "Solving Ordinary Differential Equations II",
        IV.2). `last`: see `StepAttempt`."""
        k1, k2, y1, y2 = last

        def apart(a: Components, b: Components) -> Components:
            return tuple(xp.abs(q - p) for p, q in zip(a, b, strict=True))

        return apart(y1, y2), apart(k1, k2)

    def dense(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        dense: tuple,
        t: Number,
        h: Number,
    ) -> tuple:
        interpolant, every = self.tableau.interpolant, list(dense)
        for c, row in zip(interpolant.extra_c, interpolant.extra_a, strict=True):
            at = _once(xp, add_scaled(xp, y, h, row, every))
            every.append(_once(xp, equations.f(at, t + c * h)))
        return tuple(every)

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Number, theta: Number
    ) -> Components:
        weights = [polynomial(w, theta) for w in self.tableau.interpolant.weights]
        weights = [w if isinstance(w, float) else xp.once(w) for w in weights]
        return _once(xp, add_scaled(xp, y, h, weights, dense))


def polynomial(weights: tuple, theta: Number) -> Number:
    """`sum_j(weights_j theta^(j + 1))`; the Python number zero where all weights are zero."""
    if not any(weights):
        return 0.0
    value = weights[-1]
    for w in reversed(weights[:-1]):
        value = value * theta + w
    return value * theta


def add_scaled(
    xp: Arithmetic, y: Components, h: Number, weights: Sequence[Number], ks: Sequence[Components]
) -> Components:
    """`y + h sum_i(weights_i k_i)`, without the terms whose weight is zero."""
    used = _used(weights, ks)
    if len(used) == 1 and _is_power_of_two(used[0][0]):
        # One product for all components saves operations, and doesn't change a bit of them.
        weight, total = used[0]
        h = _times(xp, weight, h)
    else:
        total = weighted(xp, weights, ks)
    return tuple(a + xp.broadcast_over(h, s) * s for a, s in zip(y, total, strict=True))


def weighted(xp: Arithmetic, weights: Sequence[Number], ks: Sequence[Components]) -> Components:
    """`sum_i(weights_i k_i)`; a weight is a Python number, or one number for each trajectory."""
    used = _used(weights, ks)

    def combine(*components):
        terms = [_times(xp, w, x) for (w, _), x in zip(used, components, strict=True)]
        return functools.reduce(operator.add, terms)

    return tuple(combine(*xs) for xs in zip(*(k for _, k in used), strict=True))


def _used(weights: Sequence[Number], ks: Sequence[Components]) -> list[tuple[Number, Components]]:
    """The pairs of a weight and a stage whose weight is not zero."""
    pairs = zip(weights, ks, strict=True)
    return [(w, k) for w, k in pairs if not (isinstance(w, float | int) and w == 0)]


def _once(xp: Arithmetic, components: Components) -> Components:
    return tuple(map(xp.once, components))


def _is_power_of_two(weight: Number) -> bool:
    return isinstance(weight, float | int) and abs(math.frexp(weight)[0]) == 0.5


def _times(xp: Arithmetic, weight: Number, component: Number) -> Number:
    if isinstance(weight, float | int):
        return component if weight == 1 else weight * component
    return xp.broadcast_over(weight, component) * component


class ExplicitRungeKutta(ODESolver):
    """An explicit Runge-Kutta method. A subclass gives its tableau, and everything else follows
    from it.

    - `tableau`: its coefficients; `method`: the method as engines use it.
    """

    tableau: ClassVar[Tableau]
    engines: ClassVar[tuple[str, ...]] = ("compiled", "diffrax", "julia")

    @property
    def method(self) -> RungeKutta:
        return RungeKutta(self.tableau)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not isinstance(getattr(cls, "tableau", None), Tableau):
            return  # each of its objects has a tableau of its own
        cls.order = cls.tableau.order
        cls.adaptive = cls.tableau.error is not None
        cls.stages = cls.tableau.stages
        cls.fsal = cls.tableau.fsal
