"""The arithmetic of time: where a step ends, and how long that makes it.

Times are rounded to the spacing of floating-point numbers near them: 1e-3 near 1e4 in single
precision, 2e-7 near the 1.7e9 seconds of today's clocks in double precision. The length of a step
is the difference of its rounded times (`t2 - t`), so that a state belongs to the time that is
reported for it. It is never longer than the requested length by more than that rounding, or a
hundredth. Where time can't resolve a step, there is no step.

All functions are elementwise, over any numbers that have the operations of an
[`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic], `xp`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .arithmetic import Arithmetic, Mask, Number


# The largest difference between `t0 + n dt` and `t1`, in roundings of the larger of both: a half
# for each of the ends and for the sum, and one for the product.
ROUNDINGS = 3
# An adaptive step is extended to the end from this far before it, in roundings, and as a part of
# the step.
REACH, REACH_OF_STEP = 100, 0.01
# The shortest step at time zero, as a part of the span. It is the same for both precisions, whose
# numbers near zero are equally fine: from there, a solve can go through any number of decades.
SHORTEST_AT_ZERO = 2.0**-104
# A fixed step is not resolved if rounding makes it longer than requested by more than this factor.
STRETCH = 1.5


def rounding(t0: Number, t1: Number, dtype: DTypeLike, xp: Any = jnp) -> Number:
    """The largest error that rounding can have in the times of a span from `t0` to `t1`."""
    return ROUNDINGS * np.finfo(dtype).eps * xp.maximum(xp.abs(t0), xp.abs(t1))


def fixed_step(
    xp: Arithmetic, anchor: Number, stop: Number, t: Number, dt: Number, number: Number
) -> tuple[Number, Number]:
    """The end of step `number` (from 0), of size `dt > 0`, of a stretch of time from `anchor` to
    `stop`; and whether time can't resolve the step.

    The times are `anchor + n dt`, so that rounding errors don't accumulate. A step can't be
    resolved if rounding makes it zero, or longer by half (so a step of two spacings of
    floating-point numbers is always resolved).
    """
    direction = xp.sign(stop - anchor)
    t2 = anchor + direction * (dt * xp.cast(number + 1, dt.dtype))
    reach = xp.minimum(rounding(anchor, stop, t.dtype, xp), dt / 2)
    t2 = xp.where(direction * (stop - t2) <= reach, stop, t2)
    unresolved = xp.equal(t2, t) | (xp.abs(t2 - t) > STRETCH * dt)
    return t2, xp.stopped(unresolved)


def adaptive_step(xp: Arithmetic, t: Number, stop: Number, direction: Number, h: Number) -> Number:
    """The end of a step of size `h > 0` from `t`; it is `stop` if that is near or before the end.

    A step that is extended to `stop` becomes longer by at most a hundredth, and only if the
    difference is a matter of rounding.
    """
    left = xp.abs(stop - t)
    t2 = t + direction * xp.stopped(xp.minimum(h, left))
    largest = xp.maximum(xp.abs(t), xp.abs(stop))
    reach = xp.minimum(REACH * np.finfo(t.dtype).eps * largest, REACH_OF_STEP * h)
    return xp.where((h >= left) | (xp.abs(stop - t2) < reach), stop, t2)


def end_of_stretch(
    xp: Arithmetic, stops: Sequence[Number], t1: Number, direction: Number
) -> Number:
    """The end of the current stretch of time, beyond which no step goes: the nearest of the next
    known times, or the end of the solve."""
    end = t1
    for stop in stops:
        end = xp.where(direction * (end - stop) > 0, stop, end)
    return end


class StepBounds(NamedTuple):
    """The bounds of step sizes, positive; None where there is no bound."""

    dtmin: Number = None
    dtmax: Number = None

    def bounded(self, xp: Arithmetic, h: Number) -> Number:
        """A step size limited to these bounds; NaN remains NaN."""
        if self.dtmax is not None:
            h = xp.minimum(self.dtmax, h)
        return h if self.dtmin is None else xp.maximum(self.dtmin, h)

    def first(self, xp: Arithmetic, h: Number, t: Number, span: Number) -> Number:
        """The size of a first step from `t`, for the proposed size `h`, within the bounds; NaN
        remains NaN.

        It is at least a step that time can resolve, as the controller would learn nothing from
        others.
        """
        h = self.bounded(xp, h)
        return xp.maximum(2 * xp.stopped(min_step(xp, t, span)), h)


def underflows(
    xp: Arithmetic,
    bounds: StepBounds,
    next_h: Number,
    t: Number,
    stop: Number,
    span: Number,
    accepted: Mask,
) -> Number:
    """Whether the next step from `t` is too short to be taken, either for time to resolve it, or
    because it is shorter than `dtmin` and doesn't just have to reach `stop`."""
    found = next_h <= min_step(xp, t, span)
    if bounds.dtmin is None:
        return found
    too_short = next_h <= bounds.dtmin
    return found | (too_short & (~accepted | (bounds.dtmin < xp.abs(stop - t))))


def min_step(xp: Arithmetic, t: Number, span: Number) -> Number:
    """The size of a step that time can just resolve: the spacing of floating-point numbers at
    `t`."""
    info = np.finfo(t.dtype)
    integer = np.dtype(f"int{info.bits}")
    exponent = ((1 << info.nexp) - 1) << info.nmant
    spacing = xp.bitcast(xp.bitcast(t, integer) & exponent, t.dtype) * info.eps
    # At zero the spacing is so small that it has no use.
    return xp.maximum(spacing, SHORTEST_AT_ZERO * xp.abs(span))


def next_time(xp: Arithmetic, t: Number, direction: Number) -> Number:
    """The next time after `t`, forwards or backwards: one unit in the last place later.

    The neighbours of zero are subnormal, and many machines treat them as zero; so a larger number
    follows zero.
    """
    info = np.finfo(t.dtype)
    bits = xp.bitcast(t, np.dtype(f"int{info.bits}"))
    moved = xp.bitcast(xp.where(direction * t > 0, bits + 1, bits - 1), t.dtype)
    return xp.where(xp.equal(t, 0.0), direction * float(info.tiny), moved)


def size_before(xp: Arithmetic, t: Number, t2: Number, jumps: Number, direction: Number) -> Number:
    """The signed size of a step from `t` to `t2`. Where `f` jumps at `t2`, its stages are before
    that, as `f` may have its value behind the jump there already."""
    before = next_time(xp, t2, -direction)
    end = xp.where(jumps & ~xp.equal(before, t), before, t2)
    return size_within(xp, t, end, direction)


def size_within(xp: Arithmetic, t: Number, t2: Number, direction: Number) -> Number:
    """The signed size of a step from `t` to `t2`, after which no stage is: the last one would be if
    both the difference and then `t + size` were rounded up."""
    size = t2 - t
    beyond = direction * ((t + size) - t2) > 0
    return xp.where(beyond, next_time(xp, size, -direction), size)
