"""Events within the time loop of a kernel: where a step meets an event, and what the event does.

After a step has been accepted, the conditions of the continuous callbacks are checked as in
OrdinaryDiffEq: their signs at the end of the step are compared with those at its start, and if
these are the same, points within the step are checked as well. If a condition has changed its sign,
its root is searched (`root_finding.py`), down to neighbouring floating-point numbers. The step is
cut at the earliest root (`locate`), and the callbacks with that root act; then the discrete
callbacks do whose conditions hold (`act`). What only lanes with an event need is behind a branch.

Source: OrdinaryDiffEq's DiffEqBase (`callbacks.jl`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TYPE_CHECKING

import numpy as np

from ....ground.retcode import AffectOutcome
from ....jumps.moving_jumps import follow
from ....plan.events import (
    CallbackProgram,
    EVENT_ROWS,
    Jump,
    TracedCallbacks,
    TracedContinuous,
    TracedDiscrete,
    TracedStepLimit,
)
from ....plan.saving import Saving
from ....solvers import verdicts
from ....solvers.time import next_time
from ....solvers.verdicts import Verdict
from ..algebra.components import set_all
from ..llvm.builder import BOOL, I32, I64, Value, Variable
from ..steps.saved_rows import TriedStep
from .callback_functions import CallbackFunctions
from .quiet import QuietTest
from .root_finding import Search, WatchedConditions
from .step_limits import hold


if TYPE_CHECKING:
    from .loop import Loop


def moved_numbers(events: TracedCallbacks) -> int:
    """How many numbers are kept of the time of an event: the time and its tangents, where discrete
    callbacks may move with it; zero for a state without tangents."""
    levels = max((len(x.moves.levels) for x in events.jumps if x.moves is not None), default=0)
    return 2**levels if levels and follow(events) else 0


def times_of(moved: Sequence, row: Sequence[Value]) -> Sequence[Value]:
    """The entries of a row that holds a time, one for each number of `moved`."""
    return row[:: len(row) // len(moved)] if moved else ()


class LaneEvents:
    """The variables that lanes have for events, and the operations on them."""

    def __init__(self, loop: Loop, events: TracedCallbacks, functions: CallbackFunctions):
        self.loop, self.b, self.events, self.functions = loop, loop.b, events, functions
        b, dtype = loop.b, loop.problem.dtype
        # For each condition that rests at the root of an event, its value there; otherwise NaN.
        self.residual = [b.variable(dtype, np.nan) for _ in range(events.components)]
        # How far from zero these are zero to rounding, where events may be at one time.
        self.radii = [b.variable(dtype, 0) for _ in self.residual if events.may_coincide]
        # Whether any condition rests at a root, in any lane.
        self.recent = b.variable(BOOL, False, of_lanes=False)
        # Recognises steps that can't have events; None where that isn't possible.
        self._quiet = QuietTest.make(loop, events, functions)
        # The conditions at the start of the step, if each step needs them.
        asks = self._quiet is None or self._quiet.asks_for_start
        self.values = [b.variable(dtype, 0) for _ in range(events.components if asks else 0)]
        # The number of events so far, and the marks of what acted at the end of this step.
        self.count = b.variable(I32, 0)
        self.marks = [b.variable(I32, 0) for _ in range(events.marks)]
        # For a state with tangents: the time of the event at the step's end, with its tangents.
        self.moved = [b.variable(dtype, 0) for _ in range(moved_numbers(events))]

    def variables(self) -> list[Variable]:
        """The variables that keep their values from turn to turn."""
        return [*self.values, *self.residual, *self.radii, self.recent, self.count]

    def radius(self, k: int) -> Value:
        """How far from zero condition `k` may rest at a root."""
        return self.radii[k].get() if self.radii else self.b.constant(0, self.loop.problem.dtype)

    def at_known_time(self, step: TriedStep) -> Value:
        """The lanes in which callbacks may act because the step ends at a known time."""
        return step.accepted & step.t2.eq(self.loop.tstop)

    def part_at(
        self, part: CallbackProgram, y: tuple, t: Value, lanes: Value, **extras: Any
    ) -> tuple:
        """The components of a part in these lanes."""
        given = {name: extras[name] for name in part.extras}
        return self.functions(part, self.loop.held, y, t, lanes, given)

    def conditions(self, y: tuple, t: Value, mask: Value) -> list[Value]:
        every = (self.part_at(x.conditions, y, t, mask) for x in self.events.continuous)
        return [x for xs in every for x in xs]

    def begin(self, fresh: Value) -> None:
        """Prepare for the trajectories that begin in the lanes `fresh`."""
        self._look(fresh)
        self.count.set_where(fresh, 0)
        for x in self.residual:
            x.set_where(fresh, np.nan)

    def _look(self, mask: Value) -> None:
        """Evaluate the conditions at the current times and states of the lanes in the mask."""
        if self.values:
            set_all(self.values, self.conditions(self.loop.state(), self.loop.t.get(), mask), mask)

    def at_start(self, step: TriedStep) -> list[Value]:
        """The conditions at the start of the step."""
        return [x.get() for x in self.values] or self.conditions(step.y, step.t, step.accepted)

    #
    # Where a step meets an event
    #

    def locate(
        self, step: TriedStep, verdict: Verdict, commit: Callable[[TriedStep, Verdict], None]
    ) -> tuple[TriedStep, Verdict]:
        """The step, cut at its earliest event if it has one, and the verdict with the size of the
        next step adapted to that. `commit`, which goes on to the end of a step, is written twice:
        steps without events run no code that joins theirs with what a search finds."""
        b, loop = self.b, self.loop
        for x in self.marks:
            x.set(0)
        if not self.events.continuous:
            commit(step, verdict)
            return step, verdict
        dtype = loop.problem.dtype
        t2 = b.variable(dtype, step.t2)
        end = [b.variable(dtype, x) for x in step.attempt.y2]
        next_h = b.variable(dtype, verdict.next_h, of_lanes=bool(verdict.next_h.lanes))
        lost = b.variable(BOOL, verdict.lost)

        def cut() -> tuple[TriedStep, Verdict]:
            attempt = step.attempt._replace(y2=tuple(x.get() for x in end))
            shorter = step._replace(t2=t2.get(), attempt=attempt)
            return shorter, verdict._replace(next_h=next_h.get(), lost=lost.get())

        def look(at: WatchedConditions) -> None:
            """Look for events in the step, and change its end and what follows accordingly."""
            search = Search(self, step)
            search.notice(at)
            relaxed, met = b.variable(dtype, 1), b.variable(BOOL, False)

            def run() -> None:
                met.set(search.run(t2, end, relaxed))
                self.recent.set(True)

            fires = functools.reduce(operator.or_, [x.get() for x in search.fires])
            b.if_(b.any(fires), run, likely=False)
            b.if_(self.recent.get(), lambda: search.forget(t2.get()), likely=False)
            if loop.problem.adaptive:
                bounds = loop.bounds(loop.held)
                next_h.set_where(met.get(), bounds.bounded(b, loop.h.get() * relaxed.get()))
                lost.set(lost.get() & ~met.get())
            commit(*cut())

        if self._quiet is None:
            look(WatchedConditions())
        elif self._quiet.unforeseen:
            look(WatchedConditions(self._loud(step, self._quiet, []), self._quiet.unforeseen))
        else:
            found = [b.variable(dtype, 0) for _ in self.values]
            loud = self._loud(step, self._quiet, found)

            def quiet() -> None:
                self.arrive(step, [x.get() for x in found])
                commit(step, verdict)

            b.if_(loud, lambda: look(WatchedConditions()), quiet, likely=False)
        return cut()

    def _loud(self, step: TriedStep, quiet: QuietTest, found: Sequence[Variable]) -> Value:
        """Whether any lane may have an event in the step. The conditions at its end are set as
        `found`, if that has places for them. (In a block of its own, LLVM doesn't mix this with
        what is before it, for which there are too few registers already.)"""
        b = self.b
        loud = b.variable(BOOL, self.recent.get(), of_lanes=False)

        def ask() -> None:
            ends, known = quiet.look(step, [x.get() for x in self.values])
            for variable, x in zip(found, ends, strict=False):
                variable.set(x)
            known = step.accepted & ~known
            if self.events.scheduled:
                known = known | self.at_known_time(step)
            loud.set(loud.get() | b.any(known))

        b.if_(b.any(step.accepted), ask, likely=True)
        return loud.get()

    def arrive(self, step: TriedStep, end: Sequence[Value]) -> None:
        """Keep the conditions at the end of the step, where the next step starts."""
        for variable, x in zip(self.values, end, strict=False):
            variable.set_where(step.accepted, x)

    #
    # What the event does
    #

    def act(self, step: TriedStep) -> None:
        """Do what the callbacks do at the end of the step, in the lanes that accepted it."""
        b, loop = self.b, self.loop
        for i, x in enumerate(self.moved):
            x.set(0 if i else step.t2)
        jumped = b.variable(BOOL, False)
        if self.events.continuous:
            b.if_(self.recent.get(), lambda: self._act_continuous(step, jumped), likely=False)
        place = self.events.components
        for i, x in enumerate(self.events.discrete):
            if x.limit is not None and loop.problem.adaptive:
                # After a jump of the state, the last step predicts nothing.
                here = step.accepted & loop.active.get() & ~jumped.get()
                hold(loop, step, here, self._tolerance(x.limit, here), x.limit.scalefactor)
            self._act_discrete(step, x, self.marks[place + i], jumped)

        def go_on_anew() -> None:
            here = jumped.get()
            self._save_after(here)
            self._restart(here & loop.active.get())

        b.if_(b.any(jumped.get()), go_on_anew, likely=False)

    def _tolerance(self, limit: TracedStepLimit, mask: Value) -> tuple:
        """For each component that step-size control looks at, how far it may be below zero."""
        loop = self.loop
        if limit.tolerance is None:
            return loop.held.tolerances(loop.problem.controlled).abstol
        return self.part_at(limit.tolerance, loop.state(), loop.t.get(), mask)

    def _act_continuous(self, step: TriedStep, jumped: Variable) -> None:
        """Let the callbacks act whose conditions are marked."""
        for _, x, places in self.events.slices():
            marks = self.marks[places]
            mask = [self.b.cast(m.get(), self.loop.problem.dtype) for m in marks]
            for jump, here in acting(x, [m.get() for m in marks]):
                self._jump(step, x, jump, here & ~self._is_out(), jumped, marks, mask=mask)

    def _act_discrete(
        self, step: TriedStep, x: TracedDiscrete, mark: Variable, jumped: Variable
    ) -> None:
        b, loop = self.b, self.loop
        code = loop.code.get()
        going = step.accepted & code.ne(verdicts.MAX_EVENTS)
        if x.scheduled:
            going = going & step.t2.eq(loop.tstop)

        def ask() -> None:
            at = loop.state(), loop.t.get(), going
            (wanted,) = self.part_at(x.condition, *at, uprev=step.y, tprev=[step.t])
            here = going & (wanted > 0.0)

            def do() -> None:
                mark.set_where(here, 1)
                self._jump(step, x, x.jump, here, jumped, [mark])

            b.if_(b.any(here), do, likely=False)

        if x.scheduled:
            b.if_(b.any(going), ask, likely=False)
        else:
            ask()

    def _jump(
        self,
        step: TriedStep,
        callback: TracedContinuous | TracedDiscrete,
        jump: Jump,
        here: Value,
        jumped: Variable,
        marks: Sequence[Variable],
        **extras: Any,
    ) -> None:
        """Change the state of the lanes `here`, and record that as an event."""
        b, loop = self.b, self.loop

        def do() -> None:
            mask = self._with_room(here, marks) if callback.is_kept else here
            y, t = loop.state(), loop.t.get()
            moved = [x.get() for x in self.moved]
            about = {"uprev": step.y, "tprev": [step.t], "moved": moved, "before": step.attempt.y2}
            *found, outcome = self.part_at(jump.part, y, t, mask, **about, **extras)
            if jump.moves is None:
                time = (t, *(b.constant(0, loop.problem.dtype) for _ in y[1:]))
                found = [*found, *y, *found, *time]
            n = len(y)
            on, *rows = (found[i * n : (i + 1) * n] for i in range(1 + EVENT_ROWS))
            if callback.is_kept:
                self._note(callback, mask, marks, rows)
            if self.events.may_end and (outputs := loop.outputs) is not None:
                self._write(b.constant(0, I64), mask & outputs.events.ends.ne(0), rows)
            set_all(loop.y, on, mask)
            set_all(self.moved, times_of(self.moved, rows[-1]), mask)
            if jump.ends is not False:
                over, code = mask & (outcome > float(AffectOutcome.GoesOn)), verdicts.TERMINATED
                if jump.fails:
                    fails = outcome > float(AffectOutcome.Terminates)
                    code = b.where(fails, verdicts.NOT_CONVERGED, code)
                loop.code.set_where(over & ~self._is_out(), code)
                loop.active.set(loop.active.get() & ~over)
            jumped.set(jumped.get() | mask)

        b.if_(b.any(here), do)

    def _is_out(self) -> Value:
        """The lanes that had more events than they may."""
        return self.loop.code.get().eq(verdicts.MAX_EVENTS)

    def _with_room(self, here: Value, marks: Sequence[Variable]) -> Value:
        """The lanes of `here` that may have another event; the others end."""
        b, loop = self.b, self.loop
        if loop.outputs is None:
            return here
        full = here & (b.cast(self.count.get(), I64) >= loop.outputs.events.last)
        loop.code.set_where(full, verdicts.MAX_EVENTS)
        loop.active.set(loop.active.get() & ~full)
        for x in marks:
            x.set_where(full, 0)
        return here & ~full

    def _note(
        self,
        callback: TracedContinuous | TracedDiscrete,
        mask: Value,
        marks: Sequence[Variable],
        rows: Sequence[Sequence[Value]],
    ) -> None:
        """Write an event of the lanes in the mask: see `plan.events.EVENT_ROWS`."""
        b, loop, outputs = self.b, self.loop, self.loop.outputs
        event = b.cast(self.count.get(), I64)
        self.count.set_where(mask, self.count.get() + 1)
        if outputs is None:
            return
        to = outputs.events
        mask = mask & (event < to.room)
        self._write(event + to.ends, mask, rows)
        index, width = loop.held.index.get(), 1 + self.events.longest
        found = [b.constant(callback.which, I32), *(x.get() for x in marks)]
        found += [b.constant(0, I32)] * (width - len(found))
        for i, x in enumerate(found):
            place = loop.order.place_in_row(to.n, event * width + i, index, 0, 1)
            outputs.marks.scatter(place, mask, x)

    def _write(self, slot: Value, mask: Value, rows: Sequence[Sequence[Value]]) -> None:
        """Write the rows of an event into a slot, in the lanes of the mask."""
        to, loop = self.loop.outputs.events, self.loop
        places = to.places(loop.order, slot, loop.held.index.get(), len(rows[0]))
        for row, of_row in zip(rows, places, strict=True):
            for x, place in zip(row, of_row, strict=True):
                to.buffer.scatter(place, mask, x)

    def _save_after(self, here: Value) -> None:
        """Save the state after the events at the end of this step, where that is wanted."""
        loop, b = self.loop, self.b
        saving = loop.problem.saving
        wanted = [saves_after(x, saving) for x in self.events.callbacks]
        if loop.outputs is None or not any(wanted):
            return
        saves = here
        if not all(wanted):
            saves = b.constant(False, BOOL, of_lanes=True)
            for x, marks in marks_of(self.events, self.marks):
                if saves_after(x, saving):
                    for mark in marks:
                        saves = saves | mark.get().ne(0)
            saves = saves & here
        write = loop.saved.write_step if saving.mode == "steps" else loop.saved.write_again
        write(saves, loop.t.get(), loop.state())

    def _restart(self, here: Value) -> None:
        """Go on from the changed state."""
        loop = self.loop
        loop.begin_anew(here)
        if not loop.problem.adaptive:
            loop.set_anchor_after_event(here)
        t = loop.t.get()
        for x, marks in marks_of(self.events, self.marks):
            if isinstance(x, TracedDiscrete) and x.after_jump:
                t = self.b.where(marks[0].get().ne(0), next_time(self.b, t, loop.direction), t)
        if (consistent := loop.consistent(here, t)) is not None:
            lost = here & ~consistent
            loop.code.set_where(lost, verdicts.INCONSISTENT)
            loop.active.set(loop.active.get() & ~lost)
        self._look(here)


def saves_after(x: TracedContinuous | TracedDiscrete, saving: Saving) -> bool:
    """Whether the state after an event of this callback is saved: as a further row where every step
    is saved, otherwise in the rows at that time."""
    if saving.mode == "steps":
        return x.save_positions[1]
    return saving.after_events and not (isinstance(x, TracedDiscrete) and x.is_discontinuity)


def marks_of(
    events: TracedCallbacks, marks: Sequence
) -> Iterator[tuple[TracedContinuous | TracedDiscrete, Sequence]]:
    """The callbacks, each with its own part of the `marks` of all callbacks."""
    start = 0
    for x in events.callbacks:
        length = x.length if isinstance(x, TracedContinuous) else 1
        yield x, marks[start : start + length]
        start += length


def acting(
    x: TracedContinuous | TracedDiscrete, marks: Sequence[Value]
) -> Iterator[tuple[Jump, Value]]:
    """The jumps of a callback, each with the lanes in which it acts, by the marks of its
    conditions: 1 where a condition rises, -1 where it falls, 0 where it doesn't cross zero."""
    if isinstance(x, TracedDiscrete):
        yield x.jump, marks[0].ne(0)
        return
    if x.up is not None and x.up == x.down:
        yield x.up, functools.reduce(operator.or_, (m.ne(0) for m in marks))
        return
    (mark,) = marks
    for jump, sign in ((x.up, 1), (x.down, -1)):
        if jump is not None:
            yield jump, mark.eq(sign)
