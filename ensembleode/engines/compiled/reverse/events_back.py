"""Reverse mode of events: cotangents go back through the callbacks that acted at a step's end.

The states at the end of the step are computed again, from the step and the record of the callbacks
that acted. Then cotangents go back through the discrete callbacks, the last first, and through the
continuous one, each by the transpose of a jump whose time moves (see `jumps/moving.py`). The result
is the cotangent of the state at which the step was cut or ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax

from ....jumps.moving_jumps import follow, moving_of, ROWS
from ....plan.events import EVENT_ROWS, Jump, TracedCallbacks, TracedContinuous, TracedDiscrete
from ....plan.rate import rate_of
from ..algebra.components import set_all
from ..llvm.builder import BOOL, I64, Value
from ..loop.callback_functions import CallbackFunctions
from ..loop.events import acting, marks_of, moved_numbers, saves_after, times_of
from ..steps.traced_method import EquationCalls, PulledCotangents, within_of


if TYPE_CHECKING:
    from ....solvers.method import Method
    from .record import RecordedTurn
    from .replay import Replay


class JumpFunctions(NamedTuple):
    """The functions that evaluate the callbacks; and `pull(moving, held, y, t, mask, extras,
    cotangents)`, which turns the cotangents of the rows of a jump into those of the state, of the
    extras that are `moving`, and of the parameters."""

    functions: CallbackFunctions
    pull: Callable[..., tuple]


class ActedJump(NamedTuple):
    """A jump that acted in the lanes `here`, on the state `y`."""

    callback: TracedContinuous | TracedDiscrete
    jump: Jump
    here: Value
    y: tuple[Value, ...]
    extras: dict[str, Any]


class EventsBack:
    """The variables that lanes have for events on the way back.

    - `count`, `at_end`: how many events of the trajectory are left, and whether none has been
        passed yet.
    - `to_start`: the cotangent of the state at the start of the step, from jumps that read it.
    - `to_before`: the cotangent of the state at the event, from jumps whose time depends on it.
    - `to_time`: the cotangent of the time of a callback, from other callbacks that move with it.
    - `cut`: the lanes whose step was cut, where the adjoint is the cotangent of the state there.
    """

    def __init__(self, replay: Replay, events: TracedCallbacks, jumps: JumpFunctions):
        self.replay, self.b, self.events, self.jumps = replay, replay.b, events, jumps
        b, p, cotangents = self.b, replay.problem, replay.cotangents.events
        assert cotangents is not None
        self.cotangents = cotangents
        self.count, self.at_end = b.variable(I64, 0), b.variable(BOOL, False)
        self.cut = b.variable(BOOL, False)
        reads = any("uprev" in x.part.extras for x in events.jumps)
        self.to_start = [b.variable(p.dtype, 0) for _ in range(p.size)] if reads else []
        several = len(events.continuous) > 1
        self.to_before = [b.variable(p.dtype, 0) for _ in range(p.size if several else 0)]
        n_moved = (moved_numbers(events) or 1) if follow(events) else 0
        self.to_time = [b.variable(p.dtype, 0) for _ in range(n_moved)]

    def load(self, mask: Value, count: Value) -> None:
        """Start the way back of trajectories with `count` events, in the lanes of the mask."""
        self.count.set_where(mask, count)
        self.at_end.set_where(mask, self.cotangents.ends.ne(0))

    def _of_event(self, slot: Value, mask: Value) -> list[Value]:
        """The cotangents of the rows of an event in the lanes of the mask; zero in the others."""
        replay, of = self.replay, self.cotangents
        places = of.places(replay.order, slot, replay.held.index.get(), replay.problem.size)
        return [of.buffer.gather(place, mask, 0) for row in places for place in row]

    def saves_after(self, marks: Sequence[Value]) -> Value:
        """The lanes that save the state after the events at the end of the step."""
        here = self.b.constant(False, BOOL, of_lanes=True)
        for x, own in marks_of(self.events, marks):
            if saves_after(x, self.replay.problem.saving):
                for mark in own:
                    here = here | mark.ne(0.0)
        return here

    def back(
        self,
        method: Method,
        took: Value,
        turn: RecordedTurn,
        theta: Value,
        pulled: PulledCotangents,
        calls: EquationCalls,
    ) -> None:
        """Pull back through the events at the end of this step, in the lanes that took it by this
        method: the adjoint becomes the cotangent of the state before them. `theta` is the fraction
        of the method's attempt that the step covers."""
        b, marks = self.b, list(turn.marks)
        acted = took & self._any(marks)
        self.cut.set(acted & self._any(marks[: self.events.components]) & theta.ne(1.0))
        for x in (*self.to_start, *self.to_before, *self.to_time):
            x.set(0)

        def do() -> None:
            here = pulled.without_cotangents()
            y = self._state(method, here, calls, theta)
            uprev = here.value(*here.trace.inputs[0], calls)
            for x in reversed(self._forwards(acted, y, turn, uprev)):
                b.if_(b.any(x.here), lambda x=x: self._through(x, turn.t2))
            for variable, more in zip(self.replay.adjoint, self.to_before, strict=False):
                variable.set_where(acted, variable.get() + more.get())

        b.if_(b.any(acted), do, likely=False)

    def _any(self, marks: Sequence[Value]) -> Value:
        here = self.b.constant(False, BOOL, of_lanes=True)
        for x in marks:
            here = here | x.ne(0.0)
        return here

    def _state(
        self, method: Method, pulled: PulledCotangents, calls: EquationCalls, theta: Value
    ) -> tuple:
        """The state at the end of the step, before any event."""
        b, p, trace = self.b, self.replay.problem, pulled.trace
        (start,), _, _, (h,) = (jax.tree.leaves(x) for x in trace.inputs)
        ((end,), _, dense) = trace.outputs
        y2 = pulled.value(end, calls)
        if not self.events.continuous:
            return tuple(y2)
        stages = [pulled.value(x, calls) for x in jax.tree.leaves(dense)]
        within = within_of(method, p.dtype)
        given = [pulled.value(start, calls), *stages, pulled.value(h, calls), [theta]]
        inside = PulledCotangents(b, within, p.size, given).value(within.outputs[0], calls)
        cut = self.cut.get()
        return tuple(b.where(cut, x, y) for x, y in zip(inside, y2, strict=True))

    def _forwards(
        self, acted: Value, y: tuple, turn: RecordedTurn, uprev: Sequence[Value]
    ) -> list[ActedJump]:
        """The jumps that acted, in the order in which they did."""
        b, held = self.b, self.replay.held
        step = {"uprev": uprev, "tprev": [turn.t], "before": y}
        now = [b.variable(x.dtype, x) for x in y]
        moved = [b.variable(x.dtype, 0 if i else turn.t2) for i, x in enumerate(self.to_time)]
        jumps = [
            (callback, jump, here & acted, {**step, "mask": list(own)})
            for callback, own in marks_of(self.events, turn.marks)
            for jump, here in acting(callback, own)
        ]
        found = []
        for callback, jump, here, extras in jumps:
            extras = {**extras, "moved": [v.get() for v in moved]}
            x = ActedJump(callback, jump, here, tuple(v.get() for v in now), extras)
            found.append(x)

            def act(x: ActedJump = x) -> None:
                extras = {name: x.extras[name] for name in x.jump.part.extras}
                after = self.jumps.functions(x.jump.part, held, x.y, turn.t2, x.here, extras)
                for variable, new in zip(now, after, strict=False):
                    variable.set_where(x.here, new)
                if x.jump.moves is not None:
                    time = after[-1 - len(now) : -1]
                    set_all(moved, times_of(moved, time), x.here)

            if len(found) < len(jumps):
                b.if_(b.any(here), act)
        return found

    def _through(self, x: ActedJump, t2: Value) -> None:
        replay, p = self.replay, self.replay.problem
        rate = rate_of(p.field, p.form)
        moving = moving_of(self.events, rate, x.callback, x.jump)
        cotangents = [v.get() for v in replay.adjoint]
        of_event = [self.b.constant(0, p.dtype, of_lanes=True)] * (EVENT_ROWS * p.size)
        if x.callback.is_kept:
            self.count.set_where(x.here, self.count.get() - 1)
            event, of = self.count.get(), self.cotangents
            of_event = self._of_event(event + of.ends, x.here & (event < of.room))
        if self.events.may_end:
            last = self._of_event(self.b.constant(0, I64), x.here & self.at_end.get())
            of_event = [a + b for a, b in zip(of_event, last, strict=True)]
            self.at_end.set_where(x.here, False)
        cotangents += of_event
        assert len(cotangents) == ROWS * p.size
        if not moving.follows:
            each = p.size // max(1, len(self.to_time))
            for i, more in enumerate(self.to_time):
                place = (ROWS - 1) * p.size + i * each
                cotangents[place] = cotangents[place] + more.get()
                more.set_where(x.here, 0)
        extras = {name: x.extras[name] for name in moving.extras}
        found = list(self.jumps.pull(moving, replay.held, x.y, t2, x.here, extras, cotangents))
        for variable, new in zip(replay.adjoint, found, strict=False):
            variable.set_where(x.here, new)
        found = found[p.size :]
        of = {"uprev": self.to_start, "before": self.to_before, "moved": self.to_time}
        for variables in (of[name] for name in moving.moving):
            for variable, more in zip(variables, found, strict=False):
                variable.set_where(x.here, variable.get() + more)
            found = found[len(variables) :]
        replay.add_gradient(found, x.here)
