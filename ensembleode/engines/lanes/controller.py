"""Step-size control: OrdinaryDiffEq's, constant by constant, so that its steps come out.

The first step is Hairer's estimate (Hairer, Norsett and Wanner, "Solving Ordinary Differential
Equations I", II.4); all others come from a PI controller (Gustafsson, "Control theoretic techniques
for stepsize selection in explicit Runge-Kutta methods", ACM TOMS 17, 1991). Its powers are
approximate, in single precision: a step size needs no more, and real ones would take a third of the
time of a small step.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .leaves import add_scaled, Leaves, map_leaves, mean_square, over


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

    def initial_memory(self, lanes: int) -> Any:
        """What is remembered of the errors before the first step: [lane], in single precision."""
        least = log2(jnp.float32(self.least_error))
        return jnp.broadcast_to(exp2(self.beta2 * least), (lanes,))

    def next_step(self, h: Any, error: Any, memory: Any, accepted: Any, is_first: Any) -> tuple:
        """The size of the next step after one of size `h`, and the new memory; all [lane].

        `error` is the norm of the scaled error, infinite or NaN where the step failed; `is_first`
        is true until a step has been accepted.
        """
        log_error = log2(error.astype(jnp.float32))
        power = exp2(self.beta1 * log_error)
        least = jnp.where(
            is_first, jnp.float32(1 / self.grow_most_first), jnp.float32(1 / self.grow_most)
        )
        q = jnp.clip(power / memory / self.gamma, least, self.shrink_most)
        q_rejected = jnp.minimum(power / self.gamma, self.shrink_most)
        q = jnp.where(accepted, q, q_rejected)
        remembered = exp2(self.beta2 * jnp.maximum(log_error, log2(np.float32(self.least_error))))
        return h / q.astype(h.dtype), jnp.where(accepted, remembered, memory)


def log2(x: Any) -> Any:
    """The binary logarithm of a positive float32, to within 1e-3; large for infinity and NaN.

    Source: Goldberg, "Fast approximate logarithms, part III: the formulas" (2015), table 2.
    """
    a, b, c = map(np.float32, LOG2)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits & 0x7F800000) >> 23
    upper_half = (bits & 0x00400000) != 0  # a significand of at least 1.5 is halved
    base = jnp.where(upper_half, np.int32(0x3F000000), np.int32(0x3F800000))
    significand = jax.lax.bitcast_convert_type((bits & 0x007FFFFF) | base, jnp.float32)
    whole = exponent - jnp.where(upper_half, np.int32(126), np.int32(127))
    s = significand - 1
    return whole.astype(jnp.float32) + s * (a * s + b) / (s + c)


def exp2(x: Any) -> Any:
    """Two to the power of a float32, to within its rounding: a Taylor polynomial about the nearest
    whole number.

    (Our own, as a library's may have other last bits in one program than in another.)
    """
    x = jnp.clip(x, -126, 126)
    whole = jnp.floor(x + 0.5)
    rest = x - whole
    value = jnp.full_like(rest, TAYLOR[-1])
    for coefficient in TAYLOR[-2::-1]:
        value = value * rest + coefficient
    scale = jax.lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return value * scale


# The constants of `log2` and of `exp2`, for whatever else computes as they do.
LOG2 = (0.338953, 2.198599, 1.523692)
TAYLOR = [math.log(2) ** k / math.factorial(k) for k in range(8)]


class Tolerances(NamedTuple):
    """`abstol` and `reltol`: each a number for all, a number a lane, or leaves like the state."""

    abstol: Any
    reltol: Any

    def scaled(self, values: Leaves, *states: Leaves) -> Leaves:
        """`values / (abstol + reltol max(|state|))`, component by component."""

        def scale(i, value, *at):
            abstol, reltol = (x[i] if isinstance(x, tuple) else x for x in self)
            largest = jnp.abs(at[0])
            for x in at[1:]:
                largest = jnp.maximum(largest, jnp.abs(x))
            return value / (over(abstol, value) + over(reltol, value) * largest)

        return tuple(scale(i, *x) for i, x in enumerate(zip(values, *states, strict=True)))


def initial_step(
    field, t: Any, y: Leaves, k: Leaves, span: Any, tol: Tolerances, order: int
) -> Any:
    """The size of the first step, [lane], from two evaluations: `k = f(y, t)` and one more.

    `span` is `t1 - t0`, negative backwards in time.
    """
    length = jnp.abs(span)
    d0 = jnp.sqrt(mean_square(tol.scaled(y, y)))
    d1 = jnp.sqrt(mean_square(tol.scaled(k, y)))
    probe = jnp.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * (d0 / d1)).astype(d0.dtype)
    probe = jnp.minimum(probe, length)
    step = jnp.sign(span) * probe
    k2 = field(add_scaled(y, step, [1.0], [k]), t + step)
    d2 = jnp.sqrt(mean_square(tol.scaled(map_leaves(jnp.subtract, k2, k), y))) / probe
    most = jnp.maximum(d1, d2)
    by_error = 10.0 ** (-(2.0 + jnp.log10(most)) / order)
    dt = jnp.where(most <= 1e-15, jnp.maximum(1e-6, 1e-3 * probe), by_error)
    return jnp.minimum(jnp.minimum(100 * probe, dt), length).astype(d0.dtype)
