"""Methods that are not Runge-Kutta methods, as solvers for the engines that run any method of ours.

Sources: Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I": III.5 (variable
steps of Adams methods), I.8 (Taylor series).
"""

import dataclasses
from typing import Any, ClassVar

from ensembleode.solvers.base import ODESolver
from ensembleode.solvers.method import StepAttempt


def combined(xp, y, *terms):
    """`y` with the sum of numbers times states."""
    for number, state in terms:
        y = tuple(a + xp.broadcast_over(number, s) * s for a, s in zip(y, state, strict=True))
    return y


@dataclasses.dataclass(frozen=True)
class AdamsBashforth:
    """Of second order, by the derivative at the start of the last step, too; its error is estimated
    by the trapezoidal rule."""

    order = 2
    embedded_order = 2
    stages = 1
    degree = 3
    remembers = True
    is_implicit = False
    grid = None

    def evaluations(self, ntried):
        return ntried + 1

    def linear_algebra(self, ntried):
        return None

    def init(self, xp, equations, y, t):
        k = equations.f(y, t)
        return k, k, t * 0.0

    def step(self, xp, equations, y, carry, t, h):
        k, before, last = carry
        is_first = xp.equal(last, 0.0)
        ratio = xp.where(is_first, 0.0, h / xp.where(is_first, 1.0, last))
        half = 0.5 * ratio * h
        y2 = combined(xp, y, (h + half, k), (-half, before))
        k2 = equations.f(y2, t + h)
        trapezoidal = combined(xp, y, (0.5 * h, k), (0.5 * h, k2))
        error = tuple(a - b for a, b in zip(y2, trapezoidal, strict=True))
        return StepAttempt(y2, (k2, k, h), (error,), (k, y2, k2))

    def dense(self, xp, equations, y, dense, t, h):
        return dense

    def interpolate(self, xp, y, dense, h, theta):
        k, y2, k2 = dense
        rest = 1.0 - theta
        share = theta * theta * (1.0 + 2.0 * rest)
        moved = combined(xp, y, (-share, y), (share, y2))
        return combined(xp, moved, (theta * rest * rest * h, k), (-theta * theta * rest * h, k2))


@dataclasses.dataclass(frozen=True)
class Lagging:
    """By the mean of the derivative here and where the last step began: what a step carries on is
    not what one that begins anew at its end is carried."""

    order = 1
    embedded_order = None
    stages = 1
    degree = 1
    remembers = True
    is_implicit = False
    grid = None

    def evaluations(self, ntried):
        return ntried + 1

    def linear_algebra(self, ntried):
        return None

    def init(self, xp, equations, y, t):
        return equations.f(y, t)

    def step(self, xp, equations, y, carry, t, h):
        k = equations.f(y, t)
        y2 = combined(xp, y, (0.5 * h, k), (0.5 * h, carry))
        return StepAttempt(y2, k, (), (y2,))

    def dense(self, xp, equations, y, dense, t, h):
        return dense

    def interpolate(self, xp, y, dense, h, theta):
        return combined(xp, y, (theta, dense[0]), (-theta, y))


class OneStep:
    """Carries nothing."""

    remembers = False
    is_implicit = False
    grid = None

    def evaluations(self, ntried):
        return ntried

    def linear_algebra(self, ntried):
        return None

    def init(self, xp, equations, y, t):
        return ()

    def dense(self, xp, equations, y, dense, t, h):
        return dense


@dataclasses.dataclass(frozen=True)
class Taylor2(OneStep):
    """The Taylor polynomial of second order, with the derivative of `f` along the solution."""

    order = 2
    embedded_order = 1
    stages = 2
    degree = 2

    def step(self, xp, equations, y, carry, t, h):
        k = equations.f(y, t)
        dk = equations.jvp(y, t, k, t * 0.0 + 1.0)
        y2 = self.interpolate(xp, y, (k, dk), h, 1.0)
        half = 0.5 * h * h
        error = tuple(xp.broadcast_over(half, x) * x for x in dk)
        return StepAttempt(y2, (), (error,), (k, dk))

    def interpolate(self, xp, y, dense, h, theta):
        k, dk = dense
        part = theta * h
        return combined(xp, y, (part, k), (0.5 * part * part, dk))


@dataclasses.dataclass(frozen=True)
class RationalEuler(OneStep):
    """Euler's method for the inverse of each component, which is not linear in the slopes."""

    order = 1
    embedded_order = None
    stages = 1
    degree = 1

    def step(self, xp, equations, y, carry, t, h):
        k = equations.f(y, t)
        below = (
            xp.maximum(a - xp.broadcast_over(h, b) * b, 0.5 * xp.abs(a))
            for a, b in zip(y, k, strict=True)
        )
        y2 = tuple(a * a / b for a, b in zip(y, below, strict=True))
        return StepAttempt(y2, (), (), (y2,))

    def interpolate(self, xp, y, dense, h, theta):
        return combined(xp, y, (theta, dense[0]), (-theta, y))


class OfAdams(ODESolver):
    order = 2
    stages = 1
    engines = ("compiled", "diffrax")
    method: ClassVar[Any] = AdamsBashforth()


class OfTaylor(ODESolver):
    order = 2
    stages = 2
    engines = ("compiled", "diffrax")
    method: ClassVar[Any] = Taylor2()


class Rational(ODESolver):
    order = 1
    stages = 1
    adaptive = False
    engines = ("compiled", "diffrax")
    method: ClassVar[Any] = RationalEuler()


class Lags(ODESolver):
    order = 1
    stages = 1
    adaptive = False
    engines = ("compiled",)
    method: ClassVar[Any] = Lagging()


SOLVERS = {"Adams-Bashforth": OfAdams(), "Taylor": OfTaylor()}
