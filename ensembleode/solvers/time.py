"""The arithmetic of time: where a step ends, and how long that makes it.

Times are rounded to the spacing of floating-point numbers about them: 1e-3 at 1e4 in single
precision, 2e-7 at the 1.7e9 seconds of today's clocks in double precision. A step is as long as
time has it after rounding (`t2 - t`), so that a state belongs to the time it is said to be at; and
it is never longer than what was asked for by more than that rounding, or a hundredth. Where time
can't resolve a step, there is none.

All functions are elementwise, over whatever has the operations of an
[`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic], `xp`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .arithmetic import Arithmetic


# By how much `t0 + n dt` may miss `t1`, in roundings of the larger of both: a half for each of the
# ends and for the sum, and one for the product.
ROUNDINGS = 3
# How far before the end an adaptive step still goes to it, in roundings, and as part of the step.
REACH, REACH_OF_STEP = 100, 0.01
# How much longer than asked for rounding may make a fixed step before time can't resolve it.
STRETCH = 1.5


def rounding(t0: Any, t1: Any, dtype: Any, xp: Any = jnp) -> Any:
    """By how much the times of a span from `t0` to `t1` may be off for being rounded."""
    return ROUNDINGS * np.finfo(dtype).eps * xp.maximum(xp.abs(t0), xp.abs(t1))


def fixed_step(
    xp: Arithmetic, anchor: Any, stop: Any, t: Any, dt: Any, number: Any
) -> tuple[Any, Any]:
    """The end of step `number` (from 0) of size `dt > 0` of a stretch of time, from `anchor` to
    `stop`, and whether time can't resolve the step.

    The times are laid out as `anchor + n dt`, so that no rounding adds up: there are as many steps
    as with the same stretch at zero. A step can't be resolved if rounding makes it zero, or half as
    long again (so steps of two spacings of floating-point numbers always can).
    """
    direction = xp.sign(stop - anchor)
    t2 = anchor + direction * (dt * xp.cast(number + 1, dt.dtype))
    reach = xp.minimum(rounding(anchor, stop, t.dtype, xp), dt / 2)
    t2 = xp.where(direction * (stop - t2) <= reach, stop, t2)
    unresolved = xp.equal(t2, t) | (xp.abs(t2 - t) > STRETCH * dt)
    return t2, xp.stopped(unresolved)


def adaptive_step(xp: Arithmetic, t: Any, stop: Any, direction: Any, h: Any) -> Any:
    """The end of a step of size `h > 0` from `t`: `stop` where that is near, or past it.

    A step to the end is longer by a hundredth at most, and then only if that is a matter of
    rounding.
    """
    left = xp.abs(stop - t)
    t2 = t + direction * xp.stopped(xp.minimum(h, left))
    largest = xp.maximum(xp.abs(t), xp.abs(stop))
    reach = xp.minimum(REACH * np.finfo(t.dtype).eps * largest, REACH_OF_STEP * h)
    return xp.where((h >= left) | (xp.abs(stop - t2) < reach), stop, t2)


def end_of_stretch(xp: Arithmetic, stops: Sequence[Any], t1: Any, direction: Any) -> Any:
    """The end of the stretch of time that begins now, which no step goes beyond: the nearest of the
    next known times, or the end of the solve."""
    end = t1
    for stop in stops:
        end = xp.where(direction * (end - stop) > 0, stop, end)
    return end


class StepBounds(NamedTuple):
    """The bounds of the sizes of steps, positive; None where there is no bound."""

    dtmin: Any = None
    dtmax: Any = None

    def bounded(self, xp: Arithmetic, h: Any) -> Any:
        """A step size within these bounds; NaN remains."""
        if self.dtmax is not None:
            h = xp.minimum(self.dtmax, h)
        return h if self.dtmin is None else xp.maximum(self.dtmin, h)

    def first(self, xp: Arithmetic, h: Any, t: Any, span: Any) -> Any:
        """The size of a first step from `t`, whose own is `h`, within them; NaN remains.

        (Steps that time can't resolve would teach the controller nothing.)
        """
        h = self.bounded(xp, h)
        return xp.maximum(2 * xp.stopped(min_step(xp, t, span)), h)


def underflows(
    xp: Arithmetic, bounds: StepBounds, next_h: Any, t: Any, stop: Any, span: Any, accepted: Any
) -> Any:
    """Whether the next step from `t` is too short to be taken: for time to resolve it, or shorter
    than `dtmin`, unless it only has to reach `stop`."""
    found = next_h <= min_step(xp, t, span)
    if bounds.dtmin is None:
        return found
    too_short = next_h <= bounds.dtmin
    return found | (too_short & (~accepted | (bounds.dtmin < xp.abs(stop - t))))


def min_step(xp: Arithmetic, t: Any, span: Any) -> Any:
    """The size of a step that time hardly resolves: the spacing of the numbers at `t`."""
    info = np.finfo(t.dtype)
    integer = np.dtype(f"int{info.bits}")
    exponent = ((1 << info.nexp) - 1) << info.nmant
    spacing = xp.bitcast(xp.bitcast(t, integer) & exponent, t.dtype) * info.eps
    # At zero they are dense beyond use.
    return xp.maximum(spacing, info.eps**2 * xp.abs(span))


def next_time(xp: Arithmetic, t: Any, direction: Any) -> Any:
    """The time that follows on `t`, forwards or backwards: one unit in the last place later.

    (The neighbours of zero are numbers that many machines take for zero; so a larger one follows.)
    """
    info = np.finfo(t.dtype)
    bits = xp.bitcast(t, np.dtype(f"int{info.bits}"))
    moved = xp.bitcast(xp.where(direction * t > 0, bits + 1, bits - 1), t.dtype)
    return xp.where(xp.equal(t, 0.0), direction * float(info.tiny), moved)


def size_within(xp: Arithmetic, t: Any, t2: Any, direction: Any) -> Any:
    """The signed size of a step from `t` to `t2`, where `f` may jump: no stage of it is after `t2`,
    as the last would be where the difference was rounded up, and `t + size` again."""
    size = t2 - t
    beyond = direction * ((t + size) - t2) > 0
    return xp.where(beyond, next_time(xp, size, -direction), size)
