"""Decisions about a trajectory after a step that it has tried: whether the step is accepted, how
long the next step is, whether there is none, and which return code results. All time loops of this
library use them, over the operations of an
[`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic].

The return code is a variable of the trajectory, and is set where it is decided. As long as it is
`GOING`, the trajectory goes on. If time can't resolve any further step, although no step was
infinite or NaN, it is `PROBING` for one more turn, with a step of `PROBE` times the size. If so
short a step moves the state, the solution diverges; if not, the tolerances can't be met.

In compiled code `engines/compiled/loop/turn.py` and `ends.py` set the codes by these rules. Codes
that no step decides are set elsewhere: those of events in `events.py` there; in its `loop.py` those
of starts, `Diverged`, and `MaxIters` of lanes that end together; those of trajectories that can't
be computed at all in `running/run.py`. diffrax's steps have codes by
`engines/diffrax/control.py`, and its results become codes in `solving.py` there.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ..ground.retcode import ReturnCode
from .arithmetic import Arithmetic, Components, Mask, Number
from .controllers import AbstractController
from .norms import AbstractNorm
from .step_size import count_failures, in_abstol, is_moved, MOST_FAILURES, Tolerances
from .time import StepBounds, underflows


SUCCESS, MAX_ITERS = np.int32(ReturnCode.Success), np.int32(ReturnCode.MaxIters)
TOO_SMALL, UNSTABLE = np.int32(ReturnCode.DtLessThanMin), np.int32(ReturnCode.Unstable)
STOPPED = np.int32(ReturnCode.Default)
TERMINATED, MAX_EVENTS = np.int32(ReturnCode.Terminated), np.int32(ReturnCode.MaxEvents)
NOT_CONVERGED = np.int32(ReturnCode.ConvergenceFailure)
INCONSISTENT, DIVERGED = np.int32(ReturnCode.InitialFailure), np.int32(ReturnCode.Diverged)
# The codes of trajectories that have not ended.
GOING, PROBING = np.int32(-1), np.int32(-2)
# The probing step is as long as the step before the last, which was then cut to a fifth.
PROBE = 5


class Verdict(NamedTuple):
    """The decision about a trajectory after a step."""

    accepted: Mask  # whether the trajectory goes on from the end of the step
    failed: Mask  # whether the step was infinite or NaN; for a fixed step, only if time resolved it
    lost: Mask  # whether there is no next step
    next_h: Number  # the size of the next step, positive; zero for a fixed step too short for time
    memory: Any = None  # the controller's memory; None with a fixed step


class Times(NamedTuple):
    """The times of a step."""

    t: Number  # its start
    t2: Number  # its end
    stop: Number  # the end of the current stretch of time, which no step passes
    span: Number  # that of the whole solve, `t1 - t0`


def judge(
    xp: Arithmetic,
    controller: AbstractController,
    bounds: StepBounds,
    times: Times,
    size: Number,
    squared: Number,
    memory: tuple,
    going: Mask,
    is_first: Mask,
) -> Verdict:
    """The verdict on an adaptive step.

    **Arguments:** `size`: the nominal size of the step, positive, at most what is left of the
    stretch of time; `squared`: the square of the norm of its scaled error; `memory`: the
    controller's memory of the steps before; `going`: whether the trajectory goes on (otherwise no
    step of it is accepted); `is_first`: whether no step has been accepted before.
    """
    squared = xp.once(squared)
    accepted = controller.accepts(xp, squared, memory) & going
    next_h, memory = controller.next_step(xp, size, squared, memory, accepted, is_first)
    next_h, memory = xp.once(next_h), tuple(map(xp.once, memory))
    at = xp.where(accepted, times.t2, times.t)
    lost = underflows(xp, bounds, next_h, at, times.stop, times.span, accepted)
    failed = going & ~(squared < math.inf)
    return Verdict(accepted, failed, lost, bounds.bounded(xp, next_h), memory)


def counted(
    xp: Arithmetic, verdict: Verdict, failures: Number, size: Number, span: Number
) -> tuple[Verdict, Number]:
    """The verdict with failures in a row taken into account, and their new number: after too many
    the trajectory is lost. `size`, `span`: see `count_failures`."""
    failures = count_failures(xp, failures, verdict.failed, size, span)
    return verdict._replace(lost=verdict.lost | (failures >= MOST_FAILURES)), failures


def judge_fixed(xp: Arithmetic, sound: Mask, unresolved: Mask, going: Mask, h: Number) -> Verdict:
    """The verdict on a step of a fixed size.

    **Arguments:** `sound`: whether the state at its end is finite, and the method did not fail;
    `unresolved`: whether time could not resolve the step; `h`: the nominal size of the step.
    """
    accepted = sound & going
    lost = going & ~accepted
    return Verdict(accepted, lost & ~unresolved, lost, xp.where(unresolved, 0.0, h))


def first_code(xp: Arithmetic, wanted: Mask, finite: Mask, usable: Mask, is_empty: Mask) -> Number:
    """The code before the first step.

    **Arguments:** `wanted`: whether the trajectory is to be solved; `finite`: whether its state is
    finite; `usable`: whether the size of its first step is finite; `is_empty`: whether it ends
    where it begins.
    """
    code = xp.where(finite & is_empty, SUCCESS, xp.where(usable, GOING, UNSTABLE))
    return xp.where(wanted, code, STOPPED)


def code_at_end(
    xp: Arithmetic, verdict: Verdict, arrived: Mask, bounds: StepBounds | None
) -> Number:
    """The code of a trajectory whose last step this was.

    **Arguments:** `arrived`: whether it is at the end of the solve; `bounds`: those of adaptive
    steps.
    """
    lost = xp.where(verdict.failed, UNSTABLE, TOO_SMALL if bounds is None else PROBING)
    if bounds is not None and bounds.dtmin is not None:
        lost = xp.where(verdict.next_h <= bounds.dtmin, TOO_SMALL, lost)
    return xp.where(arrived, SUCCESS, xp.where(verdict.lost, lost, MAX_ITERS))


def code_of_end(xp: Arithmetic, code: Number, finite: Mask) -> Number:
    """The code, given whether the last state is `finite`: a step with a small error may still
    overflow."""
    return xp.where(xp.equal(code, SUCCESS) & ~finite, UNSTABLE, code)


def has_diverged(xp: Arithmetic, norm: AbstractNorm, max_norm: Number, y: Components) -> Mask:
    """Whether the norm of the state `y` exceeds `max_norm`. (It is the norm in units of `max_norm`,
    as squares of large numbers overflow.)"""
    return norm.squared(xp, in_abstol(xp, Tolerances(max_norm, None), y)) > 1.0


def code_of_probe(xp: Arithmetic, tol: Tolerances, y: Components, y2: Components) -> Number:
    """The code of a `PROBING` trajectory after its turn, which went from `y` to `y2`."""
    abstol = tol.abstol if isinstance(tol.abstol, tuple) else (tol.abstol,) * len(y)
    moved = tuple(
        xp.cast(is_moved(xp.broadcast_over(tol, a), a, b), a.dtype)
        for tol, a, b in zip(abstol, y, y2, strict=True)
    )
    calm = xp.equal(xp.total(moved), 0)
    return xp.where(calm, TOO_SMALL, UNSTABLE)
