"""The rows that a kernel saves of its trajectories, and where the results go."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ....plan.events import EVENT_ROWS
from ....solution.dense import inner_nodes
from ....solvers.method import Method, StepAttempt
from ..algebra.components import arithmetic, for_chosen, for_each_component, total
from ..llvm.builder import Builder, ElementPointer, I64, Value, Variable
from .description import KernelDescription
from .layout import LaneNumbers, NumbersOrder


class EventRows(NamedTuple):
    """The rows of events, or their cotangents, `[slot * EVENT_ROWS, trajectory, component]`; on a
    GPU the trajectories come last.

    - `room`: how many events of a trajectory can be kept, from slot `ends` on.
    - `last`: the number of events after which one more ends its trajectory.
    - `ends`: 1 if slot 0 has the last event so far, even one beyond `room`; else 0.
    """

    buffer: ElementPointer
    n: Value
    room: Value
    last: Value
    ends: Value

    def places(
        self, order: NumbersOrder, slot: Value, index: Value, size: int
    ) -> list[list[Value]]:
        """The places of the numbers of an event: for each of its rows a list."""
        first = slot * EVENT_ROWS
        return [
            [order.place_in_row(self.n, first + i, index, c, size) for c in range(size)]
            for i in range(EVENT_ROWS)
        ]


class KernelOutputs(NamedTuple):
    """Where the results go, as row-major arrays. On a GPU the trajectories come last.

    - `u [trajectory, row, component]`, `t [trajectory, row]`: the saved components of states, and
        their times where every step is saved.
    - `counts [count, trajectory]`: the return code, the accepted and the tried steps, the rows, and
        then the counts that `KernelDescription.counted` names.
    - `n`: the number of trajectories; `events`: the rows of events.
    - `marks [event, 1 + longest, trajectory]`: which callback an event belongs to, and how each of
        its conditions crossed zero (1 for a discrete callback).
    - `inner [trajectory, row, node, component]`: the states at the inner nodes of the step to a
        row.
    """

    u: ElementPointer
    t: ElementPointer | None
    counts: ElementPointer
    n: Value
    events: EventRows | None = None
    marks: ElementPointer | None = None
    inner: ElementPointer | None = None


class TriedStep(NamedTuple):
    """A step from `t` and `y` to `t2`, in the lanes that `accepted` it; `h` is the signed size of
    the `attempt` of the `method`, which may go on beyond `t2`."""

    t: Value
    t2: Value
    h: Value
    y: tuple[Value, ...]
    carry: Any
    method: Method
    attempt: StepAttempt
    accepted: Value


class SavedRows:
    """The saved states of the trajectories in the lanes: `n` rows of each, at the `times` of each
    trajectory or of all (`saveat`). Nothing is written where `outputs` is None."""

    def __init__(
        self,
        b: Builder,
        problem: KernelDescription,
        held: LaneNumbers,
        times: ElementPointer | None,
        outputs: KernelOutputs | None,
        n: Value,
    ):
        self.b, self.problem, self.held, self.order, self.n = b, problem, held, held.order, n
        self.xp = arithmetic(b, problem)
        self._times: Any = times
        self._outputs: Any = outputs
        saves = outputs is not None and problem.saving.mode != "ends"
        has_times = problem.saving.mode == "times"
        shared = problem.is_uniform and not problem.own_times and not problem.has("count")
        # Whether all lanes are at the same row.
        self._is_shared = shared and has_times
        # The next row of each lane; and its time, where times are saved.
        variable = functools.partial(b.variable, value=0, of_lanes=not self._is_shared)
        self.row: Any = variable(I64) if saves else None
        self._time: Any = variable(problem.dtype) if saves and has_times else None

    def variables(self) -> list[Variable]:
        return [x for x in (self.row, self._time) if x is not None]

    def time_at(self, row: Value, mask: Value, held: LaneNumbers) -> Value:
        """The times of these rows in the lanes of the mask; infinitely far behind the last row."""
        b, p = self.b, self.problem
        inside = row < self.n
        if p.has("count"):
            inside = inside & (row < b.cast(held.number("count"), I64))
        at = b.where(inside, row, 0)
        if p.own_times:
            place = self.order.place(held.index.get(), at, self.n)
            found = self._times.gather(place, mask, 0)
        elif row.lanes:
            found = self._times.gather(at, mask, 0)
        else:
            found = self._times.load(at)
        backwards = held.number("t1") < held.number("t0")
        beyond = b.where(backwards, -np.inf, b.constant(np.inf, p.dtype))
        return b.where(inside, found, beyond)

    def write(self, row: Value, mask: Value, y: tuple) -> None:
        """Write what is saved of states as these rows, in the lanes of the mask."""
        b, saved, size = self.b, self.problem.saved, self.problem.row
        # Where all trajectories take the same steps, one that overflows goes on with them. Its rows
        # show that, also if the component that overflows isn't saved.
        hides = saved is not None and self.problem.is_uniform
        sound = total(x * 0.0 for x in y).eq(0.0) if hides else None

        def write(c: Value | int, x: Value) -> None:
            place = self.order.place(self.held.index.get(), row * size + c, self.n * size)
            self._outputs.u.scatter(place, mask, x if sound is None else b.where(sound, x, np.nan))

        for_chosen(y, saved, write)

    def _write_time(self, row: Value | int, mask: Value, t: Value) -> None:
        place = self.order.place(self.held.index.get(), row, self.n)
        self._outputs.t.scatter(place, mask, t)

    def start(self, fresh: Value, t0: Value, y: tuple) -> None:
        """Save what is saved at the start of trajectories, in the lanes `fresh`."""
        b, p = self.b, self.problem
        if self.row is None:
            return
        if p.saving.mode == "steps":
            self.row.set_where(fresh, int(p.saving.start))
            if p.saving.start:
                self.write(b.constant(0, I64), fresh, y)
                self._write_time(0, fresh, t0)
            return
        self._set(self.row, fresh, 0)
        self._set(self._time, fresh, self.time_at(self.row.get(), fresh, self.held))

        def due() -> Value:
            here = self._time.get().eq(t0)
            return here if self._is_shared else fresh & here

        def one() -> None:
            self._write_next(fresh if self._is_shared else due(), y)

        b.while_(lambda: b.any(due()), one)

    def _set(self, variable: Variable, mask: Value, x: Value | int) -> None:
        """Set a variable of the rows in the lanes of the mask, or of all lanes that share it."""
        if self._is_shared:
            variable.set(x)
        else:
            variable.set_where(mask, x)

    def _write_next(self, mask: Value, y: tuple) -> None:
        """Write the next row, in the lanes of the mask."""
        row = self.row.get()
        self.write(row, mask, y)
        self._set(self.row, mask, row + 1)
        self._set(self._time, mask, self.time_at(row + 1, mask, self.held))

    def write_step(self, mask: Value, t: Value, y: tuple) -> None:
        """Write the next row where every step is saved, in the lanes of the mask."""
        row = self.row.get()
        here = mask & (row < self.n)
        self.write(row, here, y)
        self._write_time(row, here, t)
        self.row.set(row + self.b.cast(here, I64))

    def write_again(self, mask: Value, t: Value, y: tuple) -> None:
        """Write the last rows, those at the time `t`, again, in the lanes of the mask."""
        b, row = self.b, self.b.variable(I64, self.row.get())

        def due() -> Value:
            here = mask & (row.get() > 0)
            return here & self.time_at(row.get() - 1, here, self.held).eq(t)

        def one() -> None:
            here = due()
            row.set_where(here, row.get() - 1)
            self.write(row.get(), here, y)

        b.while_(lambda: b.any(due()), one)

    def _write_inner(self, step: TriedStep, equations: Callable) -> None:
        """Write the states at the inner nodes of a step, with the next row."""
        p, method, row = self.problem, step.method, self.row.get()
        here = step.accepted & (row < self.n)
        at, nodes = (step.y, step.attempt.dense, step.t, step.h), inner_nodes(p.method.degree)
        dense = method.dense(self.xp, equations(self.held, here), *at)
        for i, theta in enumerate(nodes):
            first, size = (row * len(nodes) + i) * p.size, self.n * len(nodes) * p.size
            u = method.interpolate(self.xp, step.y, dense, step.h, theta)

            def write(c: Any, x: Value, first: Value = first, size: Value = size) -> None:
                place = self.order.place(self.held.index.get(), first + c, size)
                self._outputs.inner.scatter(place, here, x)

            for_each_component(u, write)

    def save_rows_within(
        self, step: TriedStep, direction: Value, equations: Callable, occupied: Variable
    ) -> None:
        """Save the rows whose times lie in a step; for `equations` see `Loop`."""
        b, p = self.b, self.problem
        if self.row is None:
            return
        if p.saving.mode == "steps":
            if p.inner:
                self._write_inner(step, equations)
            self.write_step(step.accepted, step.t2, step.attempt.y2)
            return

        def due() -> Value:
            """The lanes whose next row lies in the step."""
            reached = direction * (step.t2 - self._time.get()) >= 0.0
            return reached if self._is_shared else reached & step.accepted

        def save() -> None:
            mask = b.spread(due())
            at, method = (step.y, step.attempt.dense, step.t, step.h), step.method
            dense = method.dense(self.xp, equations(self.held, mask), *at)

            def one() -> Value:
                theta = (self._time.get() - step.t) / step.h
                u = method.interpolate(self.xp, step.y, dense, step.h, theta)
                self._write_next(occupied.get() if self._is_shared else due(), u)
                return b.any(due())

            b.do_while(one)

        b.if_(b.any(due()), save)
