"""The record of the turns of a time loop, from which they are replayed backwards.

It has room for a segment of turns; before each segment a checkpoint is kept, all variables of the
time loop, from which the segment is recorded anew.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ...solvers.switching import Switching
from .builder import BOOL, Buffer, I32, I64, type_of, Value, Variable
from .loop import Loop
from .saved_rows import Step


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


class Turn(NamedTuple):
    """The state, what was carried, the time and the size of a step (zero where it was rejected);
    its end (see `Description.records_end`), and what acted there; which of two methods made it."""

    y: list
    carry: list
    t: Value
    h: Value
    t2: Any = None
    marks: Sequence[Value] = ()
    is_stiff: Value | None = None


class Record:
    """Memory for turns, for events (lanes that begin a trajectory), and for checkpoints.

    Turns and events are in cells, with an entry a lane.

    - `alone`: whether a group is a single trajectory.
    """

    def __init__(self, loop: Loop, work: Work, *, alone: bool):
        self.b, self.loop, self.work, self.alone = loop.b, loop, work, alone
        b = self.b
        self.width = max(1, b.lanes)
        self.numbers = loop.problem.recorded
        self.remembers = loop.problem.method.remembers
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
        carried = jax.tree.leaves(step.carry) if self.remembers else []
        if self.loop.switch is not None:
            assert isinstance(step.method, Switching)
            carried.append(b.cast(step.method.is_stiff, step.t.dtype))
        ends = [step.t2] if self.loop.problem.records_end else []
        if self.loop.happening is not None:
            marks = [b.where(step.accepted, x.get(), 0) for x in self.loop.happening.marks]
            ends += [b.cast(x, step.t.dtype) for x in marks]
        for i, x in enumerate((*step.y, *carried, *ends, step.t, h)):
            self.work.turns.store_lanes(self._cell(first + i), x)
        self.turn.set(turn + 1)

    def read_turn(self, turn: Value) -> Turn:
        first = turn * self.numbers
        cells = [self._cell(first + i) for i in range(self.numbers)]
        *numbers, t, h = [self.work.turns.load_lanes(cell) for cell in cells]
        p, ends = self.loop.problem, []
        size = p.size
        if p.records_end:
            start = len(numbers) - 1 - (0 if p.events is None else p.events.marks)
            numbers, ends = numbers[:start], numbers[start:]
        is_stiff = numbers.pop().ne(0.0) if p.switches else None
        state, carry = numbers[:size], numbers[size:]
        return Turn(state, carry, t, h, *ends[:1], marks=ends[1:], is_stiff=is_stiff)

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
