"""Methods for stochastic differential equations, whose step is a function of the noise in it.

A method is a file with a subclass of `SDESolver`, `SRI` or `SRA`, such as `em.py` or `sra1.py`, and
is named in `__init__.py` and `__init__.pyi`.
"""

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .arithmetic import Arithmetic, Components, Number
from .base import ODESolver
from .brownian_tree import units_of
from .controllers import PIController
from .method import Equations, StepAttempt


class StochasticTerms(NamedTuple):
    """The terms of `du = f(u, t) dt + g(u, t) dW`.

    - `f(u, t)`: the drift; `g(u, t)`: the diffusion.
    - `times(g, w)`: the product of a value of the diffusion with numbers like those of the noise.
    """

    f: Callable[[Number, Number], Number]
    g: Callable[[Number, Number], Number]
    times: Callable[[Number, Number], Number]


class StochasticStep(NamedTuple):
    """The change of the state in a step, and the estimate of its error; None for a method without
    estimates."""

    change: Number
    error: Number = None


class SDESolver(ODESolver):
    """A method for stochastic differential equations.

    - `order`: its strong order, for the noises that it is made for.
    - `control_order`: the order that step-size control takes it to have, as in StochasticDiffEq.
    - `draws`: how many normal numbers a step takes of each noise: one, the increment of the noise,
        or two, also one for the integral of the noise within the step.
    - `noises`: the kinds of noise that it has: `"diagonal"`, each component its own; `"scalar"`,
        one for all; `"general"`, a matrix.
    - `additive`: whether the diffusion must not depend on the state.
    - `interpretation`: the stochastic integral whose solution it converges to.
    """

    order: ClassVar[float]  # pyright: ignore[reportIncompatibleVariableOverride]
    control_order: ClassVar[int | float | None] = None
    adaptive: ClassVar[bool] = False
    stages: ClassVar[int | None] = 1
    engines: ClassVar[tuple[str, ...]] = ("compiled", "julia")
    draws: ClassVar[int] = 1
    noises: ClassVar[tuple[str, ...]] = ("diagonal", "scalar", "general")
    additive: ClassVar[bool] = False
    interpretation: ClassVar[str] = "Ito"

    # The places in the state at which the components of the error begin and end, where steps adapt.
    _errors: tuple[int, int] | None = eqx.field(default=None, static=True, repr=False, kw_only=True)

    @property
    def method(self) -> "OneStepMap":
        """The method as engines use it."""
        return OneStepMap(self.control_order or self.order, self.stages or 1, self._errors)

    @property
    def controller(self) -> PIController:
        """The controller of adaptive steps. A step is half of the one before, or twice as long, and
        so is decided by its error alone: an integral part would keep it short."""
        return PIController(1 / (self.control_order or self.order), 0.0)

    @abc.abstractmethod
    def step(
        self, terms: StochasticTerms, u: Number, t: Number, h: Number, dw: Number, dz: Number
    ) -> StochasticStep:
        """A step with the `terms` of the state `u` from `t`, of the size `h`. `dw` is the increment
        of the noise, `dz` an independent one of the same distribution, or None."""


@dataclasses.dataclass(frozen=True)
class OneStepMap:
    """A [`Method`][ensembleode.solvers.method.Method] whose step is the field itself: the field's
    value for a state and for the size of the step, in the place of the time, is the change of the
    state. Within a step the solution is linear.

    - `errors`: where the components of the step's error begin and end in that value; None for a
        method of fixed steps. (They stay zero in the state.) The component before them says how
        many units, of which the time span has `units_of`, lie before the step: adaptive steps are
        halves of halves of the span.
    """

    order: float
    stages: int
    errors: tuple[int, int] | None = None

    degree = 1
    remembers = False
    is_implicit = False

    @property
    def embedded_order(self) -> int | float | None:
        return None if self.errors is None else self.order

    @property
    def grid(self) -> "OneStepMap":
        return self

    def evaluations(self, ntried: Number) -> Number:
        return ntried * self.stages

    def linear_algebra(self, ntried: Number) -> None:
        """None, as it is explicit."""

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Number) -> tuple:
        return ()

    def step(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        carry: tuple,
        t: Number,
        h: Number,
    ) -> StepAttempt:
        change = equations.f(y, h)
        new = tuple(a + b for a, b in zip(y, change, strict=True))
        if self.errors is None:
            return StepAttempt(new, (), (), (change,))
        first, end = self.errors
        new = (*new[:first], *y[first:end], *new[end:])
        return StepAttempt(new, (), (change[first:end],), (change,))

    def end(self, xp: Arithmetic, y: Components, t0: Number, t1: Number, h: Number) -> Number:
        """The end of an adaptive step from the state `y`, at most of the size `h > 0`: the largest
        half of halves of the time span that begins there."""
        assert self.errors is not None
        at, span = y[self.errors[0] - 1], t1 - t0
        units = units_of(at.dtype)
        # The lowest bit of a whole number is the largest power of two that divides it.
        whole = whole_number(xp, at)
        most = xp.cast(whole & (0 - whole), at.dtype)
        most = xp.where(xp.equal(at, 0.0), float(units), most)
        wanted = xp.maximum(xp.minimum(h / span * float(units), float(units)), 1.0)
        after = at + xp.minimum(most, power_below(xp, wanted))
        return xp.where(after >= units, t1, t0 + span * (after * (1.0 / units)))

    def dense(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        dense: tuple,
        t: Number,
        h: Number,
    ) -> tuple:
        return dense

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Number, theta: Number
    ) -> Components:
        (change,) = dense
        pairs = zip(y, change, strict=True)
        return tuple(a + xp.broadcast_over(theta, b) * b for a, b in pairs)


def whole_number(xp: Arithmetic, x: Number) -> Number:
    """A whole number, zero or more, as an integer with sign of its size: its bits after a number
    whose lowest bit is one. (A conversion has to look at what is out of range, one trajectory after
    the other.)"""
    digits = int(jnp.finfo(x.dtype).nmant)
    integer = np.dtype(f"int{8 * x.dtype.itemsize}")
    return xp.bitcast(x + 2.0**digits, integer) & ((1 << digits) - 1)


def power_below(xp: Arithmetic, x: Number) -> Number:
    """The largest power of two that is at most `x`, a positive number: its bits without those of
    the fraction."""
    digits = int(jnp.finfo(x.dtype).nmant)
    integer = np.dtype(f"int{8 * x.dtype.itemsize}")
    return xp.bitcast(xp.bitcast(x, integer) & ~((1 << digits) - 1), x.dtype)


def combined(weights: tuple, values: list) -> Number:
    """`sum_i(weights_i values_i)`, without the terms whose weight is zero; 0.0 if none is left."""
    terms = [w * x for w, x in zip(weights, values, strict=True) if w]
    return functools.reduce(operator.add, terms) if terms else 0.0


class SRITableau(NamedTuple):
    """The coefficients of a stochastic Runge-Kutta method of strong order 1.5 for diagonal noise,
    in the notation of Roessler, "Runge-Kutta methods for the strong approximation of solutions of
    stochastic differential equations" (SIAM J. Numer. Anal. 48(3), 2010), table 6.2. Rows of `a0`
    to `b1` are those of the second to the fourth stage."""

    a0: tuple
    a1: tuple
    b0: tuple
    b1: tuple
    alpha: tuple
    beta1: tuple
    beta2: tuple
    beta3: tuple
    beta4: tuple
    c0: tuple
    c1: tuple


class SRI(SDESolver):
    """A stochastic Runge-Kutta method of four stages, for diagonal or scalar noise."""

    coefficients: ClassVar[SRITableau]
    order: ClassVar[float] = 1.5
    stages: ClassVar[int | None] = 4
    adaptive: ClassVar[bool] = True
    draws: ClassVar[int] = 2
    noises: ClassVar[tuple[str, ...]] = ("diagonal", "scalar")
    # The weight of the drift's part of the error.
    drift_weight: ClassVar[float] = 1.0

    def step(
        self, terms: StochasticTerms, u: Number, t: Number, h: Number, dw: Number, dz: Number
    ) -> StochasticStep:
        """See [`SDESolver`][ensembleode.SDESolver.step]."""
        x, f, g, times = self.coefficients, terms.f, terms.g, terms.times
        root = jnp.sqrt(h)
        inverse = 1.0 / root
        # The iterated integrals I(1,1) / sqrt(h), I(1,0) / h and I(1,1,1) / h.
        chi1 = (dw * dw - h) * (0.5 * inverse)
        chi2 = (dw + dz * (1 / 3) ** 0.5) * 0.5
        chi3 = dw * (dw * dw - 3 * h) * (inverse * inverse * (1 / 6))
        ks, gs = [f(u, t)], [g(u, t + x.c1[0] * h)]
        for i in range(1, 4):
            a0, a1, b0, b1 = (rows[i - 1] for rows in (x.a0, x.a1, x.b0, x.b1))
            first = u + h * combined(a0, ks) + times(combined(b0, gs), chi2)
            second = u + h * combined(a1, ks) + root * combined(b1, gs)
            ks.append(f(first, t + x.c0[i] * h))
            gs.append(g(second, t + x.c1[i] * h))
        noise = [
            times(combined(weights, gs), chi)
            for weights, chi in ((x.beta3, chi2), (x.beta4, chi3), (x.beta1, dw), (x.beta2, chi1))
        ]
        change = h * combined(x.alpha, ks) + noise[0] + noise[1] + noise[2] + noise[3]
        by_drift = (self.drift_weight * h) * combined((1,) * len(ks), ks)
        return StochasticStep(change, by_drift + noise[0] + noise[1])


class SRATableau(NamedTuple):
    """The coefficients of a stochastic Runge-Kutta method of strong order 1.5 for additive noise,
    in the notation of Roessler (2010), table 6.3. Rows of `a0` and `b0` are those of the stages
    after the first."""

    a0: tuple
    b0: tuple
    alpha: tuple
    beta1: tuple
    beta2: tuple
    c0: tuple
    c1: tuple


class SRA(SDESolver):
    """A stochastic Runge-Kutta method for additive noise."""

    coefficients: ClassVar[SRATableau]
    order: ClassVar[float] = 1.5
    control_order: ClassVar[int | float | None] = 2.0
    adaptive: ClassVar[bool] = True
    draws: ClassVar[int] = 2
    additive: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.stages = len(cls.coefficients.alpha)

    def step(
        self, terms: StochasticTerms, u: Number, t: Number, h: Number, dw: Number, dz: Number
    ) -> StochasticStep:
        """See [`SDESolver`][ensembleode.SDESolver.step]."""
        x, f, g, times = self.coefficients, terms.f, terms.g, terms.times
        chi2 = (dw + dz * (1 / 3) ** 0.5) * 0.5
        gs = [g(u, t + c * h) for c in x.c1]
        ks = [f(u, t)]
        for i in range(1, len(x.alpha)):
            noise = times(combined(x.b0[i - 1], gs[:i]), chi2)
            ks.append(f(u + h * combined(x.a0[i - 1], ks) + noise, t + x.c0[i] * h))
        first, second = combined(x.beta1, gs), times(combined(x.beta2, gs), chi2)
        change = h * combined(x.alpha, ks) + times(first, dw) + second
        return StochasticStep(change, h * combined((1,) * len(ks), ks) + second)
