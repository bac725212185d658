"""A turn of the time loop, in which every lane tries a step: `attempt` makes the step, `control`
decides on it, and `commit` changes the variables of the lanes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TYPE_CHECKING

import jax
import numpy as np

from ....solvers import verdicts
from ....solvers.method import Equations
from ....solvers.step_size import squared_error
from ....solvers.time import adaptive_step, fixed_step, size_before
from ....solvers.verdicts import Verdict
from ..algebra.components import copied, set_all
from ..llvm.builder import BOOL, I32, Value
from ..steps.layout import LaneNumbers
from ..steps.saved_rows import TriedStep


if TYPE_CHECKING:
    from .loop import Loop


def attempt(
    loop: Loop, make_equations: Callable[[LaneNumbers, Value], Equations]
) -> tuple[TriedStep, Value]:
    """Try a step, which ends at the next known time at the latest. Returns the step, and the lanes
    where time can't resolve a fixed step."""
    b, p = loop.b, loop.problem
    t, h = loop.t.get(), loop.h.get()
    unresolved = b.constant(False, BOOL)
    if p.method.grid is not None and p.adaptive:
        t2 = p.method.grid.end(loop.xp, loop.state(), loop.t0, loop.t1, h)
        size = t2 - t
    elif p.adaptive:
        t2 = adaptive_step(b, t, loop.tstop, loop.direction, h)
        size = _size(loop, t, t2)
    else:
        anchor, before = loop.anchor
        t2, unresolved = fixed_step(b, anchor, loop.tstop, t, h, loop.ntried.get() - before)
        if not loop.is_uniform:
            unresolved = unresolved & loop.active.get()
        t2 = b.where(unresolved, t, t2)
        # There the state becomes NaN, which ends the trajectory.
        size = b.where(unresolved, np.nan, _size(loop, t, t2))
    y = loop.state()
    carry = loop.carried()
    if loop.outputs is None:
        # Recorded steps are read after the state has changed.
        y = tuple(map(copied, y))
        carry = jax.tree.map(copied, carry) if p.stages_apart else carry
    method = loop.now(p.method)
    if loop.switch is not None:
        loop.switch.count(loop.active.get())
    # The lanes that try a step.
    mask = loop.active.get()
    if p.adaptive and loop.outputs is not None:
        mask = mask | loop.code.get().eq(verdicts.PROBING)
    equations = make_equations(loop.held, mask)
    with b.waiting() if loop.can_wait else nullcontext() as waits:
        attempt = method.step(loop.xp, equations, y, carry, t, size)
    if waits is not None:
        loop.suspend(waits.get())
    return TriedStep(t, t2, size, y, carry, method, attempt, loop.active.get()), unresolved


def _size(loop: Loop, t: Value, t2: Value) -> Value:
    """The signed size of a step from `t` to `t2`."""
    if loop.problem.has("d_discontinuities"):
        assert loop.stops is not None
        jumps = loop.stops.jumps.get() & t2.eq(loop.tstop)
        return size_before(loop.b, t, t2, jumps, loop.direction)
    return t2 - t


def control(loop: Loop, step: TriedStep, unresolved: Value) -> tuple[TriedStep, Verdict, Any]:
    """The verdict on the step; and for an adaptive step, its size before its end was rounded."""
    b, p, attempt = loop.b, loop.problem, step.attempt
    active = loop.active.get()
    if p.controller is None:
        sound = loop.is_finite(attempt.y2)
        if attempt.failed is not None:
            sound = sound & ~attempt.failed
        verdict = verdicts.judge_fixed(b, sound, unresolved, active, loop.h.get())
        return step._replace(accepted=verdict.accepted), verdict, None
    tol = loop.held.tolerances(p.controlled)
    squared = squared_error(loop.xp, p.norm, tol, attempt, step.y, p.controlled, p.in_parts)
    before = tuple(x.get() for x in loop.memory)
    if p.method.grid is None:
        size = b.minimum(loop.h.get(), abs(loop.tstop - step.t))
    else:
        size = step.t2 - step.t
    times = verdicts.Times(step.t, step.t2, loop.tstop, loop.t1 - loop.t0)
    first, bounds = loop.naccept.get().eq(0), loop.bounds(loop.held)
    how = loop.now(p.controller), bounds, times
    verdict = verdicts.judge(b, *how, size, squared, before, active, first)
    return step._replace(accepted=verdict.accepted), verdict, size


def commit(loop: Loop, size: Value | None, step: TriedStep, verdict: Verdict) -> None:
    """Save the rows within the step, and go on to its end in the lanes that accept it."""
    b, p = loop.b, loop.problem
    loop.saved.save_rows_within(step, loop.direction, loop.equations, loop.occupied)
    active, accepted = loop.active.get(), step.accepted
    arrived = step.t2.eq(loop.t1)
    if loop.is_uniform:
        loop.t.set(step.t2)
        # (Set in each turn: LLVM would keep what it computes from a constant size in registers.)
        loop.h.set(verdict.next_h)
        set_all(loop.y, step.attempt.y2)
        set_all(loop.carry, jax.tree.leaves(step.attempt.carry))
        tries = loop.ntried.get()

        def look() -> None:
            code = verdicts.code_at_end(b, verdict, accepted & arrived, None)
            loop.code.set_where(verdict.lost, code)
            loop.naccept.set_where(verdict.lost, tries)
            loop.failures.set_where(verdict.lost, 1)
            loop.sound.set(accepted)
            loop.active.set(accepted)
            loop.alive.set(b.any(accepted))

        b.if_(b.any(loop.may_be_infinite(step.attempt.y2)), look, likely=False)
        loop.ntried.set(tries + 1)
        loop.alive.set(loop.alive.get() & ~arrived)
        return

    def arrive() -> None:
        loop.t.set_where(accepted, step.t2)
        set_all(loop.y, step.attempt.y2, accepted)
        set_all(loop.carry, jax.tree.leaves(step.attempt.carry), accepted)

    if loop.happening is None:
        # In a block of its own, LLVM doesn't mix this with the step.
        b.if_(b.any(accepted), arrive, likely=True)
    else:
        arrive()
    loop.active.set(active & ~((accepted & arrived) | verdict.lost))
    if p.adaptive:
        set_all(loop.memory, verdict.memory)
        loop.h.set_where(active, verdict.next_h)

        def count() -> None:
            before, span = loop.short_failures.get(), loop.t1 - loop.t0
            after, failures = verdicts.counted(b, verdict, before, size, span)
            loop.short_failures.set(failures)
            loop.active.set(loop.active.get() & ~after.lost)

        b.if_(b.any(verdict.failed), count, likely=False)
    else:
        loop.h.set(verdict.next_h)
    loop.naccept.set(loop.naccept.get() + b.cast(accepted, I32))
    loop.ntried.set(loop.ntried.get() + b.cast(active, I32))
