"""Pulls cotangents back through the recorded turns of lanes.

The turns are replayed backwards. The gradient is that of the steps taken, whose sizes are regarded
as constants: the discrete adjoint.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ....solvers.method import Method
from ....solvers.switching import Switching
from ..algebra.components import built, each_place, places, set_all
from ..algebra.parameter_sums import ParameterSums
from ..llvm.builder import Builder, ElementPointer, I64, Value, Variable
from ..loop.loop import Loop
from ..steps.layout import LaneNumbers
from ..steps.saved_rows import EventRows
from ..steps.traced_method import (
    EquationCalls,
    PulledCotangents,
    start_of,
    step_of,
    TracedMethod,
    variables_of,
    within_of,
)
from .events_back import EventsBack, JumpFunctions
from .record import Record, RecordedTurn


class Cotangents(NamedTuple):
    """The cotangents that are pulled back, and the results, as row-major arrays.

    - `rows [trajectory, row, component]`: the cotangents of what was saved.
    - `reached [trajectory]`: how many times were saved, or would have been with more rows.
    - `happened [trajectory]`, `events`: how many events there were, and the cotangents of their
        rows.
    - `u0 [trajectory, component]`, `own [trajectory, number]` and `shared [trajectory, number]`:
        the results: the cotangents of the initial states, and of own and shared parameters.
        `shared` is `[block, number]` where its sums are in memory, and `[number, thread]` on a GPU,
        where the trajectories come last.
    """

    rows: ElementPointer
    reached: ElementPointer
    u0: ElementPointer
    own: ElementPointer
    shared: ElementPointer
    happened: ElementPointer | None = None
    events: EventRows | None = None


@dataclasses.dataclass(frozen=True)
class Pullback:
    """The functions that pull back through the equations.

    - `calls(held, mask)`: returns the equations of the trajectories in `held`, with their
        transposes.
    - `n_own`, `n_shared`: how many parameters with cotangents each trajectory has, and all share.
    - `sums`: where cotangents of parameters are added up in memory; None where `calls` return them.
    - `keeping`: see `Record`.
    """

    calls: Callable[[LaneNumbers, Value], EquationCalls]
    n_own: int
    n_shared: int
    jumps: JumpFunctions | None = None
    sums: ParameterSums | None = None
    keeping: Callable | None = None


class Replay:
    """The variables that lanes have on the way back, and the pull-back through a step."""

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
        dtype, events = self.problem.dtype, self.problem.events
        self.events = None
        if events is not None:
            assert pullback.jumps is not None
            self.events = EventsBack(self, events, pullback.jumps)
        cuts = events is not None and bool(events.continuous)
        self.is_dense = self.problem.saving.mode == "times" or cuts
        self.adjoint = places(b, self.problem)
        # The cotangents of those parts of the method's carry that are states.
        carried = jax.tree.leaves(self._trace_of(self.problem.method).inputs[1])
        self.states = [bool(v.aval.shape) for v in carried]
        self.carry = [places(b, self.problem) for x in self.states if x]
        # Sums over trajectories of the gradients by shared parameters.
        self.sums = sums
        n_each = self.problem.returned + (pullback.n_shared if sums is None else 0)
        self.each = [b.variable(dtype, 0) for _ in range(n_each)]
        # The start of the next step, where a lane may have computed the carry anew.
        self.begins_anew = bool(self.carry) and self.problem.restarts
        if self.begins_anew:
            self.y2 = places(b, self.problem)
            self.t2 = b.variable(dtype, 0)
        self.gradient = [*self.each, *(sums or [])]
        # How many saved rows are left.
        self.rows = b.variable(I64, 0)

    def load(self, index: Value, mask: Value) -> None:
        """Start on the way back from the ends of these trajectories, in the lanes of the mask."""
        b, p = self.b, self.problem
        index = b.where(mask, b.cast(index, I64), 0)
        self.held.take(index, mask)
        for x in (*self.each, *itertools.chain(*self.carry)):
            x.set_where(mask, 0)
        if self.begins_anew:
            self.t2.set_where(mask, np.nan)
        if self.events is not None:
            happened = self.cotangents.happened
            assert happened is not None
            self.events.load(mask, b.cast(happened.gather(index, mask, 0), I64))
        if p.saving.mode == "ends":

            def read(c: Any, x: Variable) -> None:
                place = self.order.place(index, c, p.size)
                x.set(self.cotangents.rows.gather(place, mask, x.get()))

            each_place(self.adjoint, read)
            return
        for x in self.adjoint:
            x.set_where(mask, 0)
        self.rows.set_where(mask, b.cast(self.cotangents.reached.gather(index, mask, 0), I64))

    def store(self, index: Value, mask: Value) -> None:
        """Write the results of the trajectories whose start is reached, in these lanes."""
        b, p, to = self.b, self.problem, self.cotangents
        index = b.where(mask, b.cast(index, I64), 0)
        if p.saving.mode == "times":
            # The rows that were saved at the start.
            self._add_rows(lambda: mask & (self.rows.get() > 0))
        wanted = self.loop.queue.wanted.gather(index, mask, False)
        if self.carry:
            self._start(self.held.u0(index, wanted), self.held.number("t0"), wanted)

        def write(c: Value | int, x: Any) -> None:
            place = self.order.place(index, c, p.size)
            to.u0.scatter(place, mask, b.where(wanted, x.get(), 0.0))

        each_place(self.adjoint, write)
        n_own, n_shared = self.pullback.n_own, self.pullback.n_shared
        for i, x in enumerate(self.each):
            is_own = i < n_own
            buffer, n, at = (to.own, n_own, i) if is_own else (to.shared, n_shared, i - n_own)
            place = self.order.place(index, at, n)
            buffer.scatter(place, mask, b.where(wanted, x.get(), 0.0))

        def write_own(lane: Value, i: Value, total: Value) -> None:
            first = b.entry(index, lane) * n_own
            to.own.store(first + i, b.where(b.entry(wanted, lane), total, 0.0))

        if self.pullback.sums is not None:
            self.pullback.sums.take(mask, write_own)

    def cotangent_of(self, row: Value, mask: Value) -> list:
        """The cotangent of a saved row in the lanes of the mask; zero in the others."""
        size, rows, index = self.problem.size, self.loop.saved.n, self.held.index.get()
        return built(
            self.b,
            self.problem,
            lambda c: self.order.place(index, row * size + c, rows * size),
            lambda place: self.cotangents.rows.gather(place, mask, 0),
        )

    def _saved_step(self, mask: Value) -> None:
        """Add the cotangent of the row that was saved for a step, in the lanes of the mask."""
        self.rows.set_where(mask, self.rows.get() - 1)
        self._add_row(mask & (self.rows.get() < self.loop.saved.n))

    def _saved_after(self, mask: Value, t: Value) -> None:
        """Add the cotangents of the last rows, those at the time `t`, in the lanes of the mask."""

        def due() -> Value:
            here = mask & (self.rows.get() > 0)
            return here & self.loop.saved.time_at(self.rows.get() - 1, here, self.held).eq(t)

        self._add_rows(due)

    def _add_rows(self, due: Callable[[], Value]) -> None:
        """Add the cotangents of the last rows, as long as any lanes are `due`."""

        def one() -> None:
            here = due()
            self.rows.set_where(here, self.rows.get() - 1)
            self._add_row(here)

        self.b.while_(lambda: self.b.any(due()), one)

    def _add_row(self, mask: Value) -> None:
        for x, more in zip(self.adjoint, self.cotangent_of(self.rows.get(), mask), strict=True):
            x.set_where(mask, x.get() + more)

    def run(self) -> None:
        """Go back through the turns of the record, the last first."""
        b, record = self.b, self.record
        turn = b.variable(I64, record.turn.get(), of_lanes=False)
        event = b.variable(I64, record.event.get(), of_lanes=False)

        def one() -> None:
            turn.set(turn.get() - 1)
            self.step(record.read_turn(turn.get()))

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

    def step(self, turn: RecordedTurn) -> None:
        """Pull back through one step, in the lanes that took it."""
        b, method = self.b, self.problem.method
        took = turn.h.ne(0.0)
        if turn.is_stiff is None:
            self._through(method, took, turn)
            return
        # With two methods: through each, in the lanes where it made the step.
        assert isinstance(method, Switching)
        parts = (method.nonstiff, took & ~turn.is_stiff), (method.stiff, took & turn.is_stiff)
        for part, here in parts:
            b.if_(b.any(here), functools.partial(self._through, part, here, turn))

    def _trace_of(self, method: Method) -> TracedMethod:
        """The trace of a step."""
        if isinstance(method, Switching):
            method = method.nonstiff  # (Neither of the two remembers anything.)
        p = self.problem
        return step_of(method, p.dtype, is_dense=self.is_dense, has_mass=p.mass is not None)

    def _through(self, method: Method, took: Value, turn: RecordedTurn) -> None:
        """Pull back through the steps of one method, in the lanes that took one."""
        b, p, trace = self.b, self.problem, self._trace_of(method)
        y, t, h = turn.y, turn.t, turn.h
        (to_y2,), to_carry, _ = trace.outputs
        pulled = PulledCotangents(b, trace, p.values, [y, *self._carried(turn.carry), [t], [h]])
        stages = [stage[0] for stage in trace.stages]
        pulled.values.update(zip(stages, turn.stages, strict=False))
        pulled.residuals.update(zip(stages, turn.residuals, strict=False))
        calls = self.pullback.calls(self.held, took)
        if self.begins_anew:
            self._anew(took, turn)
            set_all((*self.y2, self.t2), (*y, t), took)
        theta = None
        if self.events is not None:
            after = took & self.events.saves_after(turn.marks)
            if p.saving.mode == "steps":
                self._saved_step(after)
            elif p.saving.after_events:
                self._saved_after(after, turn.t2)
            theta = (turn.t2 - t) / b.where(took, h, 1.0)
            self.events.back(method, took, turn, theta, pulled, calls)
        if p.saving.mode == "steps":
            self._saved_step(took)
        eqns = trace.before((to_y2, to_carry))
        end = [x.get() for x in self.adjoint]
        if self.events is not None:
            # Where the step was cut, this is the cotangent of the state within the attempt.
            end = [b.where(self.events.cut.get(), 0.0, x) for x in end]
            if to_start := self.events.to_start:
                pulled.add(trace.inputs[0][0], [x.get() for x in to_start])
        pulled.add(to_y2, end)
        self._add_carry(pulled, to_carry)
        if self.is_dense:
            self._dense(method, took, turn, pulled, eqns, calls, theta)
        pulled.back(eqns, calls)
        to_state, to_carried, *_ = trace.inputs
        self._set(pulled, to_state, [self.adjoint], took)
        self._set(pulled, to_carried, self.carry, took)
        self.add_gradient(pulled.gradient, took)

    def _carried(self, carry: list) -> list[list]:
        """The carry's values as a list for each part of the carry."""
        left, sizes = iter(carry), [self.problem.values if x else 1 for x in self.states]
        return [list(itertools.islice(left, n)) for n in sizes]

    def _add_carry(self, pulled: PulledCotangents, to_carry: Any) -> None:
        states = [v for v in jax.tree.leaves(to_carry) if v.aval.shape]
        for v, variables in zip(states, self.carry, strict=True):
            pulled.add(v, [x.get() for x in variables])

    def _set(self, pulled: PulledCotangents, to: Any, places: list, mask: Value) -> None:
        """Set variables to the cotangents of those inputs that are states."""
        states = [v for v in jax.tree.leaves(to) if v.aval.shape]
        for v, variables in zip(states, places, strict=True):
            set_all(variables, pulled.cotangent_of(v), mask)

    def add_gradient(self, more: Any, mask: Value) -> None:
        for variable, x in zip(self.gradient, more or (), strict=False):
            variable.set_where(mask, variable.get() + x)

    def _start(self, y: list, t: Value, mask: Value) -> None:
        """Pull back through the carry of a step from `y` at `t` that has no step before it."""
        b, p = self.b, self.problem
        trace = start_of(p.method, p.dtype)
        pulled = PulledCotangents(b, trace, p.values, [y, [t]])
        self._add_carry(pulled, trace.outputs)
        pulled.add(trace.inputs[0][0], [x.get() for x in self.adjoint])
        pulled.back(trace.eqns, self.pullback.calls(self.held, mask))
        self._set(pulled, trace.inputs[0], [self.adjoint], mask)
        self.add_gradient(pulled.gradient, mask)

    def _anew(self, took: Value, turn: RecordedTurn) -> None:
        """Pull back through a restart at the end of this step, in the lanes that went on there."""
        b, t2 = self.b, self.t2.get()
        # Where the field jumps, the next step begins a little later than this one ends. (The last
        # step of a trajectory has no step after it; t2 is NaN there.)
        begins = [t2.ne(turn.t2), *(x.ne(0.0) for x in turn.marks)]
        here = took & t2.eq(t2) & functools.reduce(operator.or_, begins)

        def begin() -> None:
            self._start([x.get() for x in self.y2], t2, here)
            for x in itertools.chain(*self.carry):
                x.set_where(here, 0)

        b.if_(b.any(here), begin, likely=False)

    def _dense(
        self,
        method: Method,
        took: Value,
        turn: RecordedTurn,
        pulled: PulledCotangents,
        eqns: list,
        calls: EquationCalls,
        theta_of_event: Value | None,
    ) -> None:
        """Pull back through the rows within the step, through the state where an event cut it, and
        through equations that only these depend on."""
        b, p, loop, held = self.b, self.problem, self.loop, self.held
        y, t, h = turn.y, turn.t, turn.h
        direction = b.sign(held.number("t1") - held.number("t0"))
        within = within_of(method, p.dtype)
        (to_y,), dense = pulled.trace.inputs[0], jax.tree.leaves(pulled.trace.outputs[2])
        known = {v for eqn in eqns for v in eqn.outvars}
        others = [eqn for eqn in pulled.trace.eqns if known.isdisjoint(eqn.outvars)]
        made = {v for eqn in others for v in eqn.outvars}
        operands = [x for eqn in others for x in variables_of(eqn.invars) if x not in made]
        # These cotangents go through memory, as the code that computes them may not run.
        wanted = dict.fromkeys(x for x in (to_y, *dense, *operands) if pulled.is_active(x))
        sums = {v: places(b, p) for v in wanted}
        for variable in itertools.chain(*sums.values()):
            variable.set(0)
        # (Values that are computed inside of a block can't be used after it.)
        for x in (*operands, *pulled.operands_of_calls(eqns)):
            pulled.value(x, calls)

        def time() -> Value:
            return loop.saved.time_at(b.maximum(self.rows.get() - 1, 0), took, held)

        def due() -> Value:
            inside = direction * (time() - t) > 0.0
            return took & (self.rows.get() > 0) & inside

        def through(theta: Value, row: list) -> None:
            stages = [functools.partial(pulled.value, v, calls) for v in dense]
            state = PulledCotangents(b, within, p.values, [y, *stages, [h], [theta]])
            state.add(within.outputs[0], row)
            state.back(within.eqns, calls)
            (start,), stages, *_ = within.inputs
            for v, to in zip((start, *jax.tree.leaves(stages)), (to_y, *dense), strict=True):
                if v in state.cotangents:
                    for variable, x in zip(sums[to], state.cotangent_of(v), strict=True):
                        variable.set(variable.get() + x)

        def one() -> Value:
            here = due()
            theta = b.where(here, (time() - t) / b.where(here, h, 1.0), 0.0)
            self.rows.set_where(here, self.rows.get() - 1)
            row = self.cotangent_of(self.rows.get(), here)
            through(theta, [loop.xp.once(x) for x in row])
            return b.any(due())

        has_times, cut = p.saving.mode == "times", None
        if self.events is not None and self.events.events.continuous:
            cut = self.events.cut.get()

        def at_event() -> None:
            assert cut is not None
            row = [b.where(cut, x.get(), 0.0) for x in self.adjoint]
            through(b.where(cut, theta_of_event, 0.0), row)

        def concern() -> Value:
            if cut is None:
                return due()
            return due() | cut if has_times else cut

        def save() -> None:
            # The other lanes are left out, since a zero cotangent times infinity is not zero.
            concerned = concern()
            if cut is None:
                b.do_while(one)
            else:
                b.if_(b.any(cut), at_event)
                if has_times:
                    b.if_(b.any(due()), lambda: b.do_while(one))
            more = pulled.without_cotangents()
            # (In an order that is the same in every process, for the object code on disk.)
            for v in (v for v in sums if v in made):
                more.add(v, [x.get() for x in sums[v]])
            more.back(others, self.pullback.calls(held, concerned))
            for v in more.cotangents:
                for variable, x in zip(sums[v], more.cotangent_of(v), strict=True):
                    variable.set_where(concerned, variable.get() + x)
            self.add_gradient(more.gradient, concerned)

        b.if_(b.any(concern()), save, likely=None if has_times else False)
        for v in sums:
            if v not in made:
                pulled.add(v, [x.get() for x in sums[v]])
