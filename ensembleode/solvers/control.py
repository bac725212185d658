"""Step-size control: OrdinaryDiffEq's, constant by constant, so that its steps come out.

The first step is Hairer's estimate (Hairer, Norsett and Wanner, "Solving Ordinary Differential
Equations I", II.4); all others come from a PI controller (Gustafsson, "Control theoretic techniques
for stepsize selection in explicit Runge-Kutta methods", ACM TOMS 17, 1991). Its powers are
approximate, in single precision: a step size needs no more, and real ones would take a third of the
time of a small step.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .arithmetic import Arithmetic, Components, NUMBERS
from .runge_kutta import add_scaled


class PIController(NamedTuple):
    """The constants of the controller, for a method of order `order`."""

    order: int
    gamma: float = 0.9
    shrink_most: float = 5.0
    grow_most: float = 10.0
    grow_most_first: float = 10_000.0  # until a step is accepted
    least_error: float = 1e-4

    @property
    def beta1(self) -> float:
        return 7 / (10 * self.order)

    @property
    def beta2(self) -> float:
        return 2 / (5 * self.order)

    @property
    def initial_memory(self) -> np.float32:
        """What is remembered of the errors before the first step."""
        least = log2(NUMBERS, np.array([self.least_error], np.float32))[0]
        return np.float32(self.beta2) * least

    def next_step(
        self, xp: Arithmetic, h: Any, squared: Any, memory: Any, accepted: Any, is_first: Any
    ) -> tuple:
        """The size of the next step after one of size `h`, and the new memory.

        `squared` is the mean square of the scaled error, infinite or NaN where the step failed; a
        step is accepted where it is at most one. `is_first` is true until one has been accepted.
        Logarithms are remembered: so there is one power, and no division, between an error and the
        step that has to wait for it.
        """
        log_error = log2(xp, xp.sqrt(xp.cast(squared, np.float32)))
        before = xp.where(accepted, memory, np.float32(0))
        growth = self.gamma * exp2(xp, before - self.beta1 * log_error)
        most = xp.where(is_first, np.float32(self.grow_most_first), np.float32(self.grow_most))
        growth = xp.maximum(xp.minimum(growth, most), 1 / self.shrink_most)
        remembered = xp.maximum(self.beta2 * log_error, self.initial_memory)
        return h * xp.cast(growth, h.dtype), xp.where(accepted, remembered, memory)


def log2(xp: Arithmetic, x: Any) -> Any:
    """The binary logarithm of a positive float32, to within 1e-3; large for infinity and NaN.

    Source: Goldberg, "Fast approximate logarithms, part III: the formulas" (2015), table 2.
    """
    a, b, c = map(float, LOG2)
    bits = xp.bitcast(x, np.int32)
    exponent = (bits & 0x7F800000) >> 23
    upper_half = (bits & 0x00400000) > 0  # a significand of at least 1.5 is halved
    base = xp.where(upper_half, np.int32(0x3F000000), np.int32(0x3F800000))
    significand = xp.bitcast((bits & 0x007FFFFF) | base, np.float32)
    whole = exponent - xp.where(upper_half, np.int32(126), np.int32(127))
    s = significand - 1
    return xp.cast(whole, np.float32) + s * (a * s + b) / (s + c)


def exp2(xp: Arithmetic, x: Any) -> Any:
    """Two to the power of a float32, to within its rounding: a Taylor polynomial about the nearest
    whole number.

    (Our own, as a library's may have other last bits in one program than in another.)
    """
    x = xp.minimum(xp.maximum(x, -126.0), 126.0)
    whole = xp.floor(x + 0.5)
    rest = x - whole
    # In pairs, and pairs of pairs, which don't wait for each other.
    pairs = [b * rest + a for a, b in zip(TAYLOR[::2], TAYLOR[1::2], strict=True)]
    square = rest * rest
    low, high = pairs[1] * square + pairs[0], pairs[3] * square + pairs[2]
    value = high * (square * square) + low
    scale = xp.bitcast((xp.cast(whole, np.int32) + 127) << 23, np.float32)
    return value * scale


# The constants of `log2` and of `exp2`, for whatever else computes as they do.
LOG2 = (0.338953, 2.198599, 1.523692)
TAYLOR = [math.log(2) ** k / math.factorial(k) for k in range(8)]


class Tolerances(NamedTuple):
    """Each a number a trajectory, or a tuple with one a component."""

    abstol: Any
    reltol: Any


def scaled(xp: Arithmetic, tol: Tolerances, values: Components, *states: Components) -> Components:
    """`values / (abstol + reltol max(|state|))`, component by component."""

    def scale(i, value, *at):
        abstol, reltol = (x[i] if isinstance(x, tuple) else x for x in tol)
        largest = xp.abs(at[0])
        for x in at[1:]:
            largest = xp.maximum(largest, xp.abs(x))
        return value / (xp.over(abstol, value) + xp.over(reltol, value) * largest)

    return tuple(scale(i, *x) for i, x in enumerate(zip(values, *states, strict=True)))


def initial_step(
    xp: Arithmetic,
    norm: Callable,
    power_of_ten: Callable,
    field: Callable,
    t: Any,
    y: Components,
    k: Components,
    span: Any,
    tol: Tolerances,
    order: int,
) -> Any:
    """The size of the first step, from two evaluations: `k = f(y, t)` and one more.

    **Arguments:** `norm`: the root of the mean square of components; `power_of_ten(x, order)`:
    `10^(-(2 + log10(x)) / order)`; `span`: `t1 - t0`, negative backwards in time.
    """
    length = xp.abs(span)
    d0 = norm(scaled(xp, tol, y, y))
    d1 = norm(scaled(xp, tol, k, y))
    probe = xp.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * (d0 / d1))
    # (NaN remains where the second of two numbers is NaN, whatever `xp`.)
    probe = xp.minimum(length, xp.cast(probe, d0.dtype))
    step = xp.sign(span) * probe
    k2 = field(add_scaled(xp, y, step, [1.0], [k]), t + step)
    change = tuple(a - b for a, b in zip(k2, k, strict=True))
    d2 = norm(scaled(xp, tol, change, y)) / probe
    most = xp.maximum(d1, d2)
    by_error = power_of_ten(most, order)
    dt = xp.where(most <= 1e-15, xp.maximum(1e-3 * probe, 1e-6), by_error)
    return xp.cast(xp.minimum(length, xp.minimum(100 * probe, dt)), d0.dtype)
