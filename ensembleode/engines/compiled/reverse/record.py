"""The record of the turns of a time loop, from which they are replayed backwards.

The record has room for one segment of turns. A checkpoint has all variables of the time loop before
a segment, from which the segment can be recorded again.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ....solvers.method import Equations
from ....solvers.switching import Switching
from ..algebra.components import for_each_component, StoredArray
from ..algebra.reading import LoadedNumbers, Memory
from ..llvm.builder import BOOL, Builder, ElementPointer, I32, I64, type_of, Value, Variable
from ..loop.loop import Loop
from ..steps.layout import LaneNumbers
from ..steps.saved_rows import TriedStep


class Blocks(NamedTuple):
    """The blocks of trajectories, each with gradient sums of its own: the trajectories fall into
    sets of equal size, and each set into blocks of `size`, the last of which may be smaller."""

    set: Value
    size: Value

    def range(self, b: Builder, number: Value) -> tuple[Value, Value]:
        """The first trajectory of a block, and the first after it."""
        of_set = b.binary("udiv", self.set + self.size - 1, self.size)
        which = b.binary("udiv", number, of_set)
        first = which * self.set + (number - which * of_set) * self.size
        return first, b.minimum(first + self.size, (which + 1) * self.set)


class PullBackWork(NamedTuple):
    """The trajectories that are pulled back through, and the memory for that.

    - `first`, `end`: the range of trajectories, taken in groups of `group` that begin `stride`
        apart.
    - `turns`, `events`, `kept`: memory for a `Record`, with room for `room` turns and for
        `checkpoints`, an even number unless there are never more.
    - `factors`, `blocks`: where the sums of shared parameters are in memory, memory for factors,
        and the blocks, each with a sum; `first` and `end` are then numbers of blocks.
    - `thread`, `threads`: on a GPU, the number of the thread, and how many threads interleave their
        elements in that memory.
    """

    first: Value
    end: Value
    group: Value
    stride: Value
    turns: ElementPointer
    events: ElementPointer
    kept: ElementPointer
    room: Value
    checkpoints: Value
    thread: Value
    threads: Value
    factors: ElementPointer | None = None
    blocks: Blocks | None = None


class RecordedTurn(NamedTuple):
    """A recorded step: the state `y`, the method's carry, the time and the size (zero if the step
    was rejected).

    - `t2`: the step's end (see `KernelDescription.records_end`).
    - `marks`: the marks of the callbacks that acted at the end.
    - `is_stiff`: with two methods, whether the Rosenbrock method made the step.
    - `stages`, `residuals`: the derivatives at its stages, and the field's residuals there, if
        recorded.
    """

    y: list
    carry: list
    t: Value
    h: Value
    t2: Any = None
    marks: Sequence[Value] = ()
    is_stiff: Value | None = None
    stages: Sequence[Sequence[Value]] = ()
    residuals: Sequence[LoadedNumbers | None] = ()


class Record:
    """Memory for turns, for events (here: that lanes begin a trajectory), and for checkpoints.
    Turns and events consist of cells, which have an entry for each lane. `alone`: whether a group
    is a single trajectory; `keeping`: see `equations.keeping_in`."""

    def __init__(
        self, loop: Loop, work: PullBackWork, *, alone: bool, keeping: Callable | None = None
    ):
        self.b, self.loop, self.work, self.alone = loop.b, loop, work, alone
        b, self._keeping = self.b, keeping
        self.width, self.numbers = max(1, b.lanes), loop.problem.recorded
        self.turn = b.variable(I64, 0, of_lanes=False)
        self.event = b.variable(I64, 0, of_lanes=False)
        # The last trajectory of each lane, or -1.
        self.last = b.variable(I32, -1)

    def _cell(self, number: Value) -> Value:
        """The index at which the cell of this number begins."""
        return (number * self.work.threads + self.work.thread) * self.width

    def add_turn(self, step: TriedStep) -> None:
        b, p, turn = self.b, self.loop.problem, self.turn.get()
        first = turn * self.numbers
        h = b.where(step.accepted, step.h, 0.0)
        carried = jax.tree.leaves(step.carry) if p.method.remembers else []
        if p.switches:
            assert isinstance(step.method, Switching)
            carried.append(b.cast(step.method.is_stiff, step.t.dtype))
        ends = [step.t2] if p.records_end else []
        if self.loop.happening is not None:
            marks = [b.where(step.accepted, x.get(), 0) for x in self.loop.happening.marks]
            ends += [b.cast(x, step.t.dtype) for x in marks]

        def write(i: Value | int, x: Value) -> None:
            self.work.turns.store_lanes(self._cell(first + i), x)

        for i, state in enumerate((step.y, *step.attempt.dense[: p.stages_apart])):
            for_each_component(state, lambda c, x, i=i: write(c + p.size * i, x))
        for i, x in enumerate((*carried, *ends, step.t, h), p.size * (1 + p.stages_apart)):
            write(i, x)
        self.turn.set(turn + 1)

    def read_turn(self, turn: Value) -> RecordedTurn:
        p, ends = self.loop.problem, []
        first, turns = turn * self.numbers, self.work.turns

        def state_at(number: int) -> list:
            if p.in_memory:
                # (On a CPU the cells of a turn lie one after the other.)
                cells = Memory(turns.offset(self._cell(first + number)), of_lanes=True)
                return [StoredArray(cells, p.size)]
            return [turns.load_lanes(self._cell(first + number + c)) for c in range(p.size)]

        state, *stages = [state_at(i * p.size) for i in range(1 + p.stages_apart)]
        cells = [self._cell(first + i) for i in range(p.size * (1 + p.stages_apart), p.of_step)]
        *numbers, t, h = [turns.load_lanes(cell) for cell in cells]
        if p.records_end:
            start = len(numbers) - 1 - (0 if p.events is None else p.events.marks)
            numbers, ends = numbers[:start], numbers[start:]
        is_stiff = numbers.pop().ne(0.0) if p.switches else None
        numbered = range(-int(p.passes_on), p.evaluations)
        evaluations = [self._evaluation_of(turn, i) for i in numbered]
        if p.in_memory:
            stages += [[StoredArray(x, p.size)] for x in evaluations]
        residuals = [None] * p.unevaluated + [self._residuals(x) for x in evaluations]
        t2 = ends[0] if ends else None
        return RecordedTurn(state, numbers, t, h, t2, ends[1:], is_stiff, stages, residuals)

    #
    # Evaluations of the field, with what the way back needs of them
    #

    def _evaluation_of(self, turn: Value, i: int) -> Memory:
        """The memory for evaluation `i` of a turn; -1 is the one passed on by the turn before."""
        p = self.loop.problem
        if p.passes_on:
            turn, i = (turn + 1, 0) if i == p.evaluations - 1 else (turn, i + 1)
        number = p.of_step + i * p.evaluation
        cell = self._cell(turn * self.numbers + number)
        return Memory(self.work.turns.offset(cell), of_lanes=True)

    def _residuals(self, evaluation: Memory) -> LoadedNumbers:
        p = self.loop.problem
        assert p.parts is not None
        return LoadedNumbers(evaluation.moved(p.size), p.parts.size)

    def _equations(self, held: LaneNumbers, mask: Value) -> Equations:
        """The equations for the attempt that is recorded next."""
        assert self._keeping is not None
        turn, numbers = self.turn.get(), itertools.count()
        return self._keeping(held, mask, lambda: self._evaluation_of(turn, next(numbers)))

    def _evaluate_first(self) -> None:
        """Record the first evaluation of the next turn, which no turn has passed on."""
        assert self._keeping is not None
        loop, turn = self.loop, self.turn.get()
        self.b.if_(loop.must_refill.get(), loop.refill)
        active, place = loop.active.get(), self._evaluation_of(turn, -1)
        self._keeping(loop.held, active, lambda: place).f(loop.state(), loop.t.get())

    def add_event(self, index: Value, fresh: Value) -> None:
        """Record that these trajectories begin, in the lanes `fresh`."""
        b, events = self.b, self.work.events
        index = b.cast(index, I32)
        turn, before, after = self._event_cells(self.event.get())
        events.store(turn, b.cast(self.turn.get(), I32))
        events.store_lanes(before, self.last.get())
        events.store_lanes(after, b.where(fresh, index, -1))
        self.last.set_where(fresh, index)
        self.event.set(self.event.get() + 1)

    def read_event(self, event: Value) -> tuple[Value, Value, Value]:
        """An event: its turn, and for each lane the trajectories before and after it, or -1."""
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
        """The bytes in which checkpoints are counted: the alignment of vectors in memory."""
        return 64 if self.b.lanes else 8

    def checkpoint_size(self) -> int:
        """The size of a checkpoint in bytes."""
        return self._unit * sum(self._units())

    def _units(self) -> list[int]:
        """How many units the variables take, and then the arrays."""
        sizes = [max(1, x.lanes) * x.dtype.itemsize for x in self._variables()]
        sizes += [n * x.dtype.itemsize for x, n in self.loop.arrays()]
        return [-(-size // self._unit) for size in sizes]

    def _variables(self) -> list[Variable]:
        held = self.loop.held
        # The numbers of a single trajectory are the same at all checkpoints.
        own = [] if self.alone else [held.index, *itertools.chain(*held.variables())]
        return [*self.loop.variables(), *own, self.last]

    def keep(self, number: Value) -> None:
        """Write the checkpoint of this number."""
        b, variables = self.b, self._variables()
        for variable, at in self._places(number, variables):
            x = variable.get()
            if variable.dtype == BOOL:
                x = b.cast(x, np.int8)
            b.emit(f"store {x}, ptr {at}, align {x.dtype.itemsize}")
        for (buffer, n), at in self._places(number, self.loop.arrays(), len(variables)):
            self._copy(buffer, ElementPointer(b, at, buffer.dtype), n)

    def restore(self, number: Value) -> None:
        b, variables = self.b, self._variables()
        for variable, at in self._places(number, variables):
            dtype = np.dtype(np.int8) if variable.dtype == BOOL else variable.dtype
            text = f"load {type_of(dtype, variable.lanes)}, ptr {at}, align {dtype.itemsize}"
            x = b.value(text, dtype, variable.lanes)
            variable.set(x.ne(0) if variable.dtype == BOOL else x)
        for (buffer, n), at in self._places(number, self.loop.arrays(), len(variables)):
            self._copy(ElementPointer(b, at, buffer.dtype), buffer, n)

    def move(self, number: Value, to: Value) -> None:
        """Copy a checkpoint to the place of another."""

        def one(unit: Value) -> None:
            source, target = (
                ElementPointer(self.b, self._pointer(x, unit), I64) for x in (number, to)
            )
            for i in range(self._unit // 8):
                target.store(i, source.load(i))

        self.b.for_(sum(self._units()), one)

    def _copy(self, source: ElementPointer, target: ElementPointer, n: int) -> None:
        def one(i: Value) -> None:
            target.store_lanes(i * self.width, source.load_lanes(i * self.width))

        self.b.for_(n // self.width, one)

    def _places(self, number: Value, kept: Sequence, first: int = 0) -> list[tuple[Any, str]]:
        """The variables or arrays `kept`, from number `first` on, each with its pointer into a
        checkpoint."""
        starts = itertools.accumulate(self._units(), initial=0)
        pairs = zip(kept, itertools.islice(starts, first, None), strict=False)
        return [(x, self._pointer(number, at)) for x, at in pairs]

    def _pointer(self, number: Value, unit: Value | int) -> str:
        """A pointer to this unit of a checkpoint."""
        work = self.work
        place = number * sum(self._units()) + unit
        return work.kept.pointer((place * work.threads + work.thread) * self._unit)

    def fill(self) -> None:
        """Record turns until the segment is full, or all trajectories are done."""
        b = self.b
        self.turn.set(0)
        self.event.set(0)

        def one() -> Value:
            if self.loop.problem.passes_on:
                begins = self.turn.get().eq(0) | self.loop.must_refill.get()
                b.if_(begins, self._evaluate_first, likely=False)
            equations = None if self._keeping is None else self._equations
            self.add_turn(self.loop.go_on(equations))
            return self.loop.goes_on.get() & (self.turn.get() < self.work.room)

        b.do_while(one)


# The cells of an event: its turn, the trajectories before it, and those that begin.
EVENT_CELLS = 3
