"""Pulling cotangents back through trajectories: record and replay.

The trajectories of a group are solved again, and every turn of the lanes is recorded: where it
began, and how long the step was, zero where it was rejected. Then the turns are replayed backwards.
The record has room for a segment of turns; of the others a checkpoint is kept, all variables of the
time loop, from which the segment is recorded anew. The gradient is that of the steps taken, whose
sizes are constants: the discrete adjoint.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...solvers.runge_kutta import add_scaled
from .builder import BOOL, Buffer, Builder, I32, I64, type_of, Value, Variable
from .loop import Loop, Step
from .numbers import Held


class Work(NamedTuple):
    """Which trajectories are pulled back through here, and what with.

    - `first`, `end`: they are taken `group` by group, the next of which begins `stride` later.
    - `turns`, `events`, `kept`: memory for a `Record`, with `room` for as many turns.
    - `thread`, `threads`: of a GPU. Each has a part of that memory: every element is followed by
        that of the next thread. (On a CPU all is of one.)
    """

    first: Value
    end: Value
    group: Value
    stride: Value
    turns: Buffer
    events: Buffer
    kept: Buffer
    room: Value
    thread: Value
    threads: Value


class Record:
    """Memory for turns, for events (lanes that begin a trajectory), and for checkpoints.

    Turns and events are in cells, with an entry a lane.

    - `alone`: whether a group is a single trajectory.
    """

    def __init__(self, loop: Loop, work: Work, *, alone: bool):
        self.b, self.loop, self.work, self.alone = loop.b, loop, work, alone
        b = self.b
        self.width = max(1, b.lanes)
        self.numbers = loop.problem.size + 2
        self.turn = b.variable(I64, 0, of_lanes=False)
        self.event = b.variable(I64, 0, of_lanes=False)
        # The trajectory that a lane had last, or -1.
        self.last = b.variable(I32, -1)

    def _cell(self, number: Value) -> Value:
        """Where it begins."""
        return (number * self.work.threads + self.work.thread) * self.width

    def add_turn(self, step: Step) -> None:
        b, turn = self.b, self.turn.get()
        first = turn * self.numbers
        h = b.where(step.accepted, step.h, 0.0)
        for i, x in enumerate((*step.y, step.t, h)):
            self.work.turns.store_lanes(self._cell(first + i), x)
        self.turn.set(turn + 1)

    def read_turn(self, turn: Value) -> tuple[tuple, Value, Value]:
        """State, time and step of a turn."""
        first = turn * self.numbers
        cells = [self._cell(first + i) for i in range(self.numbers)]
        *y, t, h = [self.work.turns.load_lanes(cell) for cell in cells]
        return tuple(y), t, h

    def add_event(self, index: Value, fresh: Value) -> None:
        """These trajectories begin, in the lanes that are fresh."""
        b, events = self.b, self.work.events
        index = b.cast(index, I32)
        turn, before, after = self._event_cells(self.event.get())
        events.store(turn, b.cast(self.turn.get(), I32))
        events.store_lanes(before, self.last.get())
        events.store_lanes(after, b.where(fresh, index, -1))
        self.last.set_where(fresh, index)
        self.event.set(self.event.get() + 1)

    def read_event(self, event: Value) -> tuple[Value, Value, Value]:
        """When it was, in turns of the segment; which trajectory each lane had before, or -1; which
        begins, or -1."""
        events = self.work.events
        turn, before, after = self._event_cells(event)
        number = self.b.cast(events.load(turn), I64)
        return number, events.load_lanes(before), events.load_lanes(after)

    def _event_cells(self, event: Value) -> list[Value]:
        return [self._cell(event * EVENT_CELLS + i) for i in range(EVENT_CELLS)]

    #
    # Checkpoints
    #

    @property
    def _unit(self) -> int:
        """The bytes of which all have one or more: as vectors are aligned in memory."""
        return 64 if self.b.lanes else 8

    def checkpoint_size(self) -> int:
        """In bytes."""
        sizes = [_bytes_of(x) for x in self._variables()]
        sizes += [n * x.dtype.itemsize for x, n in self.loop.arrays()]
        return self._unit * sum(map(self._units, sizes))

    def _units(self, size: int) -> int:
        return -(-size // self._unit)

    def _variables(self) -> list[Variable]:
        loop = self.loop
        # (What is held of a single trajectory is the same in all checkpoints.)
        held = [] if self.alone else [x for xs in loop.held.variables() for x in xs]
        index = [] if self.alone else [loop.held.index]
        return [*loop.variables(), *index, *held, self.last]

    def keep(self, segment: Value) -> None:
        """Write checkpoint number `segment`."""
        b = self.b
        for variable, at in self._places(segment):
            x = variable.get()
            if variable.dtype == BOOL:
                x = b.cast(x, np.int8)
            b.emit(f"store {x}, ptr {at}, align {x.dtype.itemsize}")
        for buffer, n, at in self._array_places(segment):
            self._copy(buffer, Buffer(b, at, buffer.dtype), n)

    def restore(self, segment: Value) -> None:
        b = self.b
        for variable, at in self._places(segment):
            dtype = np.dtype(np.int8) if variable.dtype == BOOL else variable.dtype
            text = f"load {type_of(dtype, variable.lanes)}, ptr {at}, align {dtype.itemsize}"
            x = b.value(text, dtype, variable.lanes)
            variable.set(x.ne(0) if variable.dtype == BOOL else x)
        for buffer, n, at in self._array_places(segment):
            self._copy(Buffer(b, at, buffer.dtype), buffer, n)

    def _copy(self, source: Buffer, target: Buffer, n: int) -> None:
        self.b.for_(
            n // self.width,
            lambda i: target.store_lanes(i * self.width, source.load_lanes(i * self.width)),
        )

    def _places(self, segment: Value) -> list[tuple[Variable, str]]:
        found, at = [], 0
        for variable in self._variables():
            found.append((variable, self._pointer(segment, at)))
            at += self._units(_bytes_of(variable))
        return found

    def _pointer(self, segment: Value, unit: int) -> str:
        """To a part of a checkpoint."""
        work = self.work
        number = segment * (self.checkpoint_size() // self._unit) + unit
        return work.kept.pointer((number * work.threads + work.thread) * self._unit)

    def _array_places(self, segment: Value) -> list[tuple[Buffer, int, str]]:
        found = []
        at = sum(self._units(_bytes_of(x)) for x in self._variables())
        for buffer, n in self.loop.arrays():
            found.append((buffer, n, self._pointer(segment, at)))
            at += self._units(n * buffer.dtype.itemsize)
        return found

    def fill(self) -> None:
        """Record turns until the segment is full, or all trajectories are done."""
        b = self.b
        self.turn.set(0)
        self.event.set(0)

        def one() -> Value:
            self.add_turn(self.loop.go_on())
            return self.loop.goes_on.get() & (self.turn.get() < self.work.room)

        b.do_while(one)


def _bytes_of(variable: Variable) -> int:
    return max(1, variable.lanes) * variable.dtype.itemsize


# Of an event: when it was, what each lane had before, and what has begun.
EVENT_CELLS = 3


class Cotangents(NamedTuple):
    """What is pulled back, and where to: row-major arrays.

    - `rows [trajectory, row, component]`: of what was saved; `reached [trajectory]`: how many times
        were, also those past the last row (not with ends).
    - `u0 [trajectory, component]`, `own` and `shared [trajectory, number]`: the results, the latter
        of the parameters.

    On a GPU the trajectories come last, and `shared` is `[number, thread]`: of each the sum.
    """

    rows: Buffer
    reached: Buffer
    u0: Buffer
    own: Buffer
    shared: Buffer


@dataclasses.dataclass(frozen=True)
class Pullback:
    """How to pull back through the field.

    `transposed(held)`: `(y, t, cotangent, mask) -> cotangents` of
    the state, and then of the parameters, `n_own` of each trajectory and `n_shared` of all.
    """

    transposed: Callable[[Held], Callable]
    n_own: int
    n_shared: int


class Replay:
    """The variables of the lanes on the way back."""

    def __init__(
        self,
        b: Builder,
        loop: Loop,
        record: Record,
        pullback: Pullback,
        cotangents: Cotangents,
        sums: list[Variable] | None,
    ):
        self.b, self.loop, self.record, self.order = b, loop, record, loop.order
        self.problem, self.cotangents, self.pullback = loop.problem, cotangents, pullback
        self.held = loop.held.another()
        self.field = loop.field_of(self.held)
        self.transposed = pullback.transposed(self.held)
        dtype = self.problem.dtype
        self.adjoint = [b.variable(dtype, 0) for _ in range(self.problem.size)]
        # Where there are sums of those that are shared, they go on from trajectory to trajectory.
        self.sums = sums
        n_each = pullback.n_own + (pullback.n_shared if sums is None else 0)
        self.each = [b.variable(dtype, 0) for _ in range(n_each)]
        self.gradient = [*self.each, *(sums or [])]
        # How many of the saved rows are left.
        self.rows = b.variable(I64, 0)

    def load(self, index: Value, mask: Value) -> None:
        """Take trajectories at their ends, in the lanes of the mask."""
        b, p = self.b, self.problem
        index = b.where(mask, b.cast(index, I64), 0)
        self.held.take(index, mask)
        for x in self.each:
            x.set_where(mask, 0)
        if p.saving.mode == "ends":
            for c, x in enumerate(self.adjoint):
                place = self.order.place(index, c, p.size)
                x.set(self.cotangents.rows.gather(place, mask, x.get()))
            return
        for x in self.adjoint:
            x.set_where(mask, 0)
        self.rows.set_where(mask, b.cast(self.cotangents.reached.gather(index, mask, 0), I64))

    def store(self, index: Value, mask: Value) -> None:
        """Write the results of trajectories whose start is reached, in the lanes of the mask."""
        b, p, to = self.b, self.problem, self.cotangents
        index = b.where(mask, b.cast(index, I64), 0)
        if p.saving.mode == "times":
            # Those saved at the start.

            def left() -> Value:
                return mask & (self.rows.get() > 0)

            def one() -> None:
                here = left()
                self.rows.set_where(here, self.rows.get() - 1)
                self._add_row(here)

            b.while_(lambda: b.any(left()), one)
        wanted = self.loop.queue.wanted.gather(index, mask, False)
        for c, x in enumerate(self.adjoint):
            place = self.order.place(index, c, p.size)
            to.u0.scatter(place, mask, b.where(wanted, x.get(), 0.0))
        n_own = self.pullback.n_own
        for i, x in enumerate(self.each):
            buffer, n, at = to.own, n_own, i
            if i >= n_own:
                buffer, n, at = to.shared, self.pullback.n_shared, i - n_own
            place = self.order.place(index, at, n)
            buffer.scatter(place, mask, b.where(wanted, x.get(), 0.0))

    def cotangent_of(self, row: Value, mask: Value) -> list[Value]:
        """That of a saved row of the lanes of the mask; zero in the others."""
        size, rows, index = self.problem.size, self.loop.rows, self.held.index.get()
        places = [self.order.place(index, row * size + c, rows * size) for c in range(size)]
        return [self.cotangents.rows.gather(place, mask, 0) for place in places]

    def _add_row(self, mask: Value) -> None:
        row = self.cotangent_of(self.rows.get(), mask)
        for x, more in zip(self.adjoint, row, strict=True):
            x.set_where(mask, x.get() + more)

    #
    # Backwards
    #

    def run(self) -> None:
        """Through the turns of the record, the last first."""
        b, record = self.b, self.record
        turn = b.variable(I64, record.turn.get(), of_lanes=False)
        event = b.variable(I64, record.event.get(), of_lanes=False)

        def one() -> None:
            turn.set(turn.get() - 1)
            self.step(*record.read_turn(turn.get()))

            def due() -> Value:
                some = event.get() > 0
                last = b.where(some, event.get() - 1, 0)
                return some & record.read_event(last)[0].eq(turn.get())

            def begin() -> None:
                event.set(event.get() - 1)
                _, before, after = record.read_event(event.get())
                fresh = after >= 0
                self.store(after, fresh)
                self.load(before, fresh & (before >= 0))

            b.while_(due, begin, likely=False)

        b.while_(lambda: turn.get() > 0, one)

    def step(self, y: tuple, t: Value, h: Value) -> None:
        """Through one step, in the lanes that took it."""
        b, p = self.b, self.problem
        took = h.ne(0.0)
        size = range(p.size)
        if p.saving.mode == "steps":
            self.rows.set_where(took, self.rows.get() - 1)
            self._add_row(took & (self.rows.get() < self.loop.rows))
        adjoint = [x.get() for x in self.adjoint]

        def field(y: tuple, t: Value) -> tuple:
            return self.field(y, t, took)

        attempt = p.method.step(b, field, y, None, t, h)
        stages, every = p.method.stages, len(p.method.every_stage)
        dense = p.saving.mode == "times"
        to_y: Any = [b.variable(p.dtype, 0) for _ in size] if dense else None
        to_k: list[Any] = [None] * every
        if dense:
            for variable in to_y:
                variable.set(0)
            to_k = [[b.variable(p.dtype, 0) for _ in size] for _ in range(every)]
            for ks in to_k:
                for variable in ks:
                    variable.set(0)
            self._dense(took, y, t, h, attempt, to_y, to_k)
            to_y = [x.get() for x in to_y]
            to_k = [[x.get() for x in ks] for ks in to_k[:stages]]
        pulled = _Pulled(b, to_y, to_k, took)
        self._stages(y, t, h, attempt, adjoint, pulled)
        for variable, x in zip(self.adjoint, pulled.to_y, strict=True):
            variable.set_where(took, x)
        for variable, x in zip(self.gradient, pulled.gradient, strict=True):
            variable.set_where(took, variable.get() + x)

    def _stages(self, y, t, h, attempt, adjoint, pulled) -> None:
        """Through the stages of the step, from the cotangent of its end."""
        b, method = self.b, self.problem.method
        pulled.add_y(adjoint)
        # (The last that is kept matters for the next step only.)
        last = method.stages - 1 if method.keeps else method.stages
        pulled.spread(method.end[:last], h, adjoint)
        for s in reversed(range(last)):
            if pulled.to_k[s] is None:
                continue
            stage = method.every_stage[s]
            w = add_scaled(b, y, h, stage.row, attempt.ks[:s]) if s else y
            at = t + stage.node * h if s else t
            to_w = pulled.through(self.transposed, w, at, pulled.to_k[s])
            pulled.add_y(to_w)
            pulled.spread(stage.row, h, to_w)
        pulled.fill(self.pullback.n_own + self.pullback.n_shared)

    def _dense(self, took, y, t, h, attempt, to_y, to_k) -> None:
        """Through what was saved within the step."""
        b, p, loop = self.b, self.problem, self.loop
        held = self.held
        direction = b.sign(held.number("t1") - held.number("t0"))

        def time() -> Value:
            row = b.maximum(self.rows.get() - 1, 0)
            return loop.time_at(row, took, held)

        def due() -> Value:
            inside = direction * (time() - t) > 0.0
            return took & (self.rows.get() > 0) & inside

        def save() -> None:
            # Others see nothing of it: what is zero times infinity there is not zero.
            concerned = due()

            def one() -> Value:
                here = due()
                theta = b.where(here, (time() - t) / b.where(here, h, 1.0), 0.0)
                self.rows.set_where(here, self.rows.get() - 1)
                row = self.cotangent_of(self.rows.get(), here)
                for variable, x in zip(to_y, row, strict=True):
                    variable.set(variable.get() + x)
                moved = [x * h for x in row]
                for ks, weight in zip(to_k, p.method.weights(b, theta), strict=True):
                    if isinstance(weight, float):
                        continue
                    for variable, x in zip(ks, moved, strict=True):
                        variable.set(variable.get() + weight * x)
                return b.any(due())

            b.do_while(one)
            self._last_stages(y, t, h, attempt, to_y, to_k, concerned)

        b.if_(b.any(due()), save)

    def _last_stages(self, y, t, h, attempt, to_y, to_k, concerned) -> None:
        """Through the stages that matter for dense output only: the extra ones, and the last where
        it is the first of the next step."""
        b, p = self.b, self.problem
        method = p.method

        def field(y: tuple, t: Value) -> tuple:
            return self.field(y, t, concerned)

        ks = method.dense(b, field, y, attempt, t, h)
        first = method.stages - 1 if method.keeps else method.stages
        for s in reversed(range(first, len(method.every_stage))):
            c, row = method.every_stage[s]
            pulled = _Pulled(b, None, [None] * s, concerned)
            w = add_scaled(b, y, h, row, ks[: len(row)])
            cotangent = [x.get() for x in to_k[s]]
            to_w = pulled.through(self.transposed, w, t + c * h, cotangent)
            pulled.add_y(to_w)
            pulled.spread(row, h, to_w)
            targets = [(to_y, pulled.to_y), (self.gradient, pulled.gradient)]
            targets += [(to_k[j], xs) for j, xs in enumerate(pulled.to_k) if xs is not None]
            for variables, xs in targets:
                for variable, x in zip(variables, xs, strict=True):
                    variable.set_where(concerned, variable.get() + x)


class _Pulled:
    """Cotangents as they add up within a step: of its start, of its stages, of the parameters; None
    for zero."""

    def __init__(self, b: Builder, to_y: Any, to_k: list, mask: Value):
        self.mask = mask
        self.b, self.to_k = b, list(to_k)
        self.to_y: Any = to_y
        self.gradient: Any = None

    def add_y(self, more: Sequence[Value]) -> None:
        self.to_y = _sum(self.to_y, more)

    def spread(self, row: Sequence[float], h: Value, to_w: Sequence[Value]) -> None:
        """From the cotangent of `y + h sum(row_j k_j)` to those of the stages."""
        used = [(j, float(weight)) for j, weight in enumerate(row) if weight]
        if len(used) == 1:
            # One product for all components.
            ((j, weight),) = used
            self.to_k[j] = _sum(self.to_k[j], [(weight * h) * x for x in to_w])
            return
        moved = [h * x for x in to_w]
        for j, weight in used:
            self.to_k[j] = _sum(self.to_k[j], [weight * x for x in moved])

    def through(self, transposed: Callable, w: tuple, t: Value, cotangent: Sequence) -> list:
        out = transposed(w, t, tuple(cotangent), self.mask)
        self.gradient = _sum(self.gradient, out[len(w) :])
        return list(out[: len(w)])

    def fill(self, n: int) -> None:
        if self.gradient is None:
            zero = self.to_y[0] * 0.0
            self.gradient = [zero] * n


def _sum(xs: Any, more: Sequence[Value]) -> list[Value]:
    if xs is None:
        return list(more)
    # (The product among the terms, if there is one, is the new one.)
    return [b + a for a, b in zip(xs, more, strict=True)]


def pull_back(
    b: Builder,
    make_loop: Callable[[Value, Value, Callable], Loop],
    work: Work,
    pullback: Pullback,
    cotangents: Cotangents,
    *,
    alone: bool,
) -> int:
    """Pull back through trajectories, group by group; returns the bytes of a checkpoint.

    **Arguments:** `make_loop(first, end, on_begin)`: the time loop of a group; `alone`: whether a
    group is a single trajectory, as in the threads of a GPU, each of which sums its own gradient by
    what is shared.
    """
    first = b.variable(I64, work.first, of_lanes=False)
    sums = [b.variable(cotangents.shared.dtype, 0) for _ in range(pullback.n_shared)]
    segment = b.variable(I64, 0, of_lanes=False)
    forwards = b.variable(BOOL, True, of_lanes=False)

    size = 0

    def one_group() -> None:
        nonlocal size
        start = first.get()
        end = b.minimum(start + work.group, work.end)
        events: list[Callable] = []
        loop = make_loop(start, end, lambda index, fresh: events[0](index, fresh))
        record = Record(loop, work, alone=alone)
        size = record.checkpoint_size()
        events.append(record.add_event)
        replay = Replay(b, loop, record, pullback, cotangents, sums if alone else None)
        segment.set(0)
        forwards.set(True)

        def one_segment() -> Value:
            now = segment.get()
            b.if_(forwards.get(), lambda: record.keep(now), lambda: record.restore(now))
            record.fill()
            more = forwards.get() & loop.goes_on.get()

            def back() -> None:
                def begin() -> None:
                    forwards.set(False)
                    last = record.last.get()
                    replay.load(last, last >= 0)

                b.if_(forwards.get(), begin)
                replay.run()

            b.if_(~more, back)
            segment.set(b.where(more, now + 1, now - 1))
            return segment.get() >= 0

        b.do_while(one_segment)
        first.set(start + work.stride)

    b.while_(lambda: first.get() < work.end, one_group)
    if alone:
        for i, x in enumerate(sums):
            cotangents.shared.store(i * work.threads + work.thread, x.get())
    return size
