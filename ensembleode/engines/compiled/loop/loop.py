"""The time loop of a kernel, for the lanes of a builder.

A lane that has finished a trajectory takes the next one of the queue. Where all trajectories share
a fixed step, the time and the step are scalars, and the lanes begin and end together.

Each lane has a return code, `code`, which is `GOING` until the end of its trajectory is decided.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ....solvers import verdicts
from ....solvers.method import Equations, evaluated_once
from ....solvers.step_size import in_abstol, initial_step, looked_at, unit_of_time
from ....solvers.time import fixed_step, StepBounds
from ....solvers.verdicts import Verdict
from ..algebra.components import arithmetic, places, set_all, total
from ..llvm.builder import BOOL, Builder, ElementPointer, F32, I32, Value, Variable
from ..llvm.functions import FUNCTIONS
from ..steps.description import KernelDescription
from ..steps.layout import LaneNumbers
from ..steps.saved_rows import KernelOutputs, SavedRows, TriedStep
from ..steps.stops import LaneStops
from . import tuning
from .callback_functions import CallbackFunctions
from .ends import conclude, end
from .events import LaneEvents
from .queue import PreparedStarts, Queue
from .switch import MethodSwitch
from .turn import attempt, commit, control


class Loop:
    """The variables of the lanes, and the operations on them.

    **Arguments:**

    - `equations(held, mask)`: returns the equations of the trajectories in `held`; only results in
        the lanes of the mask are used.
    - `outputs`: None where nothing is saved, and all wanted trajectories succeed.
    - `stop`: a byte. Once it isn't zero, the trajectories that have not ended get the return code
        `Default`. None where nothing can stop the solve.
    - `on_begin(index, fresh)`: called with the numbers of the trajectories that begin, and their
        lanes.
    """

    def __init__(
        self,
        b: Builder,
        problem: KernelDescription,
        equations: Callable[[LaneNumbers, Value], Equations],
        held: LaneNumbers,
        queue: Queue,
        times: ElementPointer | None,
        outputs: KernelOutputs | None,
        rows: Value,
        maxiters: Value,
        *,
        stop: ElementPointer | None = None,
        on_begin: Callable[[Value, Value], None] | None = None,
        functions: CallbackFunctions | None = None,
    ):
        self.b, self.problem, self.held, self.queue = b, problem, held, queue
        self.maxiters = maxiters
        # Attributes that are None have type Any: each is used only where it isn't None.
        self.outputs: Any = outputs
        self._stop, self._on_begin = stop, on_begin
        self.is_uniform = is_uniform = problem.is_uniform
        self.order = held.order
        self.equations = equations
        dtype, self.xp = problem.dtype, arithmetic(b, problem)
        self.y = places(b, problem)
        # The numbers of the method's carry, one after the other; or its states.
        carried, self._carry_tree = jax.tree.flatten(problem.carry_like)
        self.carry: list = []
        for _ in carried:
            self.carry += places(b, problem) if problem.in_memory else [b.variable(dtype, 0)]
        self.t = b.variable(dtype, 0, of_lanes=not is_uniform)
        self.h = b.variable(dtype, 0, of_lanes=not is_uniform)
        # Whether the trajectory goes on; if not, `code` says why.
        self.active = b.variable(BOOL, False)
        self.code = b.variable(I32, verdicts.GOING)
        self.occupied = b.variable(BOOL, False)
        self.stops = LaneStops(b, held, dtype) if problem.has_stops else None
        self.restarts = b.variable(I32, 0) if problem.restarts else None
        restarts = problem.has_stops or problem.events is not None
        self.has_anchor = restarts and not problem.adaptive
        if self.has_anchor:
            self._anchor, self._tried_before = b.variable(dtype, 0), b.variable(I32, 0)
        self.naccept = b.variable(I32, 0)
        self.ntried = b.variable(I32, 0, of_lanes=not is_uniform)
        remembered = problem.controller.initial_memory() if problem.controller else ()
        self.memory = [b.variable(F32, 1) for _ in remembered]
        self.short_failures: Any = b.variable(I32, 0) if problem.adaptive else None
        self.switch = MethodSwitch(self) if problem.switches else None
        self.parking = None if self.switch is None else self.switch.parking
        if is_uniform:
            # Whether no step of the lane has failed, and the number of failed steps (0 or 1).
            self.sound, self.failures = b.variable(BOOL, False), b.variable(I32, 0)
        # Whether any lane goes on, where lanes end together: a turn then needn't look at the lanes.
        self.alive: Any = b.variable(BOOL, False, of_lanes=False) if is_uniform else None
        self.saved = SavedRows(b, problem, held, times, outputs, rows)
        n_carried = len(self.carry) * (problem.size if problem.in_memory else 1)
        self.pool = PreparedStarts(b, problem, queue, held, n_carried, self.first_step)
        self.happening = None
        if problem.events is not None:
            assert functions is not None
            self.happening = LaneEvents(self, problem.events, functions)
        # Whether lanes may wait for pieces of Brownian paths. (Steps that are recorded are repeated
        # from the middle, where they would wait elsewhere. A lane alone would wait for itself.)
        self.can_wait = problem.adaptive and problem.method.grid is not None
        self.can_wait &= outputs is not None and (bool(b.lanes) or problem.on_gpu)
        # The lanes that wait in this turn.
        self.waiting: Value | None = None
        self.must_refill = b.variable(BOOL, True, of_lanes=False)
        self.goes_on = b.variable(BOOL, True, of_lanes=False)

    def run(self) -> None:
        """Solve all trajectories of the queue."""
        run = self._run_together if self.is_uniform else self._run_on_their_own
        self.b.if_(self.pool.has_more(), run)

    def _run_together(self) -> None:
        b = self.b

        def going() -> Value:
            return self.alive.get() & (self.ntried.get() < self.maxiters)

        def look() -> None:
            self.alive.set(self.alive.get() & ~self._stopped())

        def turn() -> None:
            self.turn(self.equations)
            if self._stop is not None:
                b.if_(
                    (self.ntried.get() & (tuning.TURNS_BETWEEN_LOOKS - 1)).eq(0), look, likely=False
                )

        def one() -> Value:
            self.refill()
            self.sound.set(self.active.get())
            self.failures.set(0)
            b.while_(going, turn)
            ended = b.where(self.t.get().eq(self.t1), verdicts.SUCCESS, verdicts.MAX_ITERS)
            self.code.set_where(self.active.get(), ended)
            # Lanes that the flag has stopped have not ended, so the flag is read once more.
            self._unless_stopped(lambda: end(self, self.occupied.get()))
            return self.goes_on.get()

        b.do_while(one)

    def _run_on_their_own(self) -> None:
        def one() -> Value:
            self._unless_stopped(self.go_on if self.parking is None else self._go_on_by_method)
            return self.goes_on.get()

        self.b.do_while(one)

    def _stopped(self) -> Value:
        assert self._stop is not None
        return self.b.value(f"load volatile i8, ptr {self._stop.base}", np.dtype(np.int8), 0).ne(0)

    def _unless_stopped(self, then: Callable[[], Any]) -> None:
        if self._stop is None:
            then()
        else:
            self.b.if_(self._stopped(), self._abandon, then, likely=False)

    def _abandon(self) -> None:
        """Give up the trajectories that are in the lanes, and those that would come next."""
        b, counts = self.b, self.outputs.counts
        stopped = b.constant(verdicts.STOPPED, I32)
        counts.scatter(self.held.index.get(), self.occupied.get(), b.spread(stopped))
        if self.parking is not None:
            self.parking.leave(stopped)
        self.pool.leave(lambda index: counts.store(index, stopped))
        self.goes_on.set(False)

    def go_on(
        self, equations: Callable[[LaneNumbers, Value], Equations] | None = None
    ) -> TriedStep:
        """A turn, with the preparation before it and the ends of trajectories after it.

        **Arguments:** `equations`: makes those for the attempt; by default the loop's own do.
        """
        self.b.if_(self.must_refill.get(), self.refill, likely=False)
        return self._go_on(equations or self.equations)

    def _go_on_by_method(self) -> None:
        """`go_on` where all lanes step with one of two methods, each of which has its own code."""
        assert self.switch is not None
        self.b.if_(self.must_refill.get(), self.refill, likely=False)
        self.switch.by_method(lambda: self._go_on(self.equations))

    def _go_on(self, equations: Callable[[LaneNumbers, Value], Equations]) -> TriedStep:
        """A turn, and the ends of trajectories."""
        b = self.b
        step, verdict = self.turn(equations)
        tired = self.ntried.get() >= self.maxiters
        if self.is_uniform:
            # Lanes that began together also end together.
            b.if_(~self.alive.get() | tired, lambda: end(self, self.occupied.get()))
            return step
        ended = ~self.active.get() | tired
        ended = self.occupied.get() & ended
        if self.waiting is not None:
            ended = ended & ~self.waiting
        b.if_(b.any(ended), lambda: end(self, conclude(self, ended, step, verdict)), likely=False)
        if self.switch is not None:
            self.switch.choose(step)
        return step

    def variables(self) -> list[Variable]:
        """The variables that keep their values from turn to turn, except for the numbers in `held`
        and in `arrays`, and for `code`, which isn't read where there are no outputs."""
        several = [] if self.problem.in_memory else [*self.y, *self.carry]
        several += [self.t, self.h, self.active, self.occupied, self.naccept, self.ntried]
        several += [*self.memory, *self.saved.variables(), self.short_failures]
        for part in (self.switch, self.stops):
            several += [] if part is None else part.variables()
        if self.has_anchor:
            several += [self._anchor, self._tried_before]
        several += [] if self.happening is None else self.happening.variables()
        several += [self.alive, *self.pool.variables(), self.must_refill, self.goes_on]
        return [x for x in several if x is not None]

    def arrays(self) -> list[tuple[ElementPointer, int]]:
        """The buffers that keep their contents from turn to turn, with their sizes."""
        if not self.problem.in_memory:
            return self.pool.arrays()
        n = self.problem.size * max(1, self.b.lanes)
        return [*((x.memory.buffer, n) for x in (*self.y, *self.carry)), *self.pool.arrays()]

    #
    # Numbers
    #

    @property
    def t0(self) -> Value:
        return self.held.number("t0")

    @property
    def t1(self) -> Value:
        return self.held.number("t1")

    @property
    def direction(self) -> Value:
        return self.b.sign(self.t1 - self.t0)

    @property
    def tstop(self) -> Value:
        """The end of the current stretch of time, beyond which no step goes."""
        return self.t1 if self.stops is None else self.stops.tstop.get()

    @property
    def anchor(self) -> tuple[Value, Value | int]:
        """Where the current stretch of time begins, and how many steps had been tried until
        then."""
        if self.has_anchor:
            return self._anchor.get(), self._tried_before.get()
        return self.t0, 0

    def set_anchor(self, mask: Value) -> None:
        """Lay fixed steps out from the current time, in the lanes of the mask."""
        self._anchor.set_where(mask, self.t.get())
        self._tried_before.set_where(mask, self.ntried.get())

    def set_anchor_after_event(self, mask: Value) -> None:
        """Lay fixed steps out after an event in the lanes of the mask: from the current time; or,
        with noise, where the event has cut a step, such that the next one is the rest of that."""
        if self.problem.method.grid is None:
            self.set_anchor(mask)
            return
        (anchor, before), t = self.anchor, self.t.get()
        number = self.ntried.get() - before - 1
        end, _ = fixed_step(self.b, anchor, self.tstop, t, self.h.get(), number)
        is_cut = mask & t.ne(end)
        self._tried_before.set_where(is_cut, before + 1)
        self.set_anchor(mask & ~is_cut)

    def state(self) -> tuple[Value, ...]:
        return tuple(x.get() for x in self.y)

    def carried(self) -> Any:
        """The method's carry as a tree."""
        return self._carry_tree.unflatten([x.get() for x in self.carry])

    def now(self, x: Any) -> Any:
        """A method or a controller; one that switches, for the method that the lanes have now."""
        return x if self.switch is None else x.in_mode(self.switch.now())

    def bounds(self, held: LaneNumbers) -> StepBounds:
        has = self.problem.has
        return StepBounds(*(held.number(x) if has(x) else None for x in StepBounds._fields))

    def is_finite(self, y: tuple) -> Value:
        return total(x * 0.0 for x in y[: self.problem.controlled]).eq(0.0)

    def may_be_infinite(self, y: tuple) -> Value:
        """True where a component is infinite or NaN, or the sum of all of them overflows."""
        return (total(y[: self.problem.controlled]) * 0.0).ne(0.0)

    #
    # Begins
    #

    def refill(self) -> None:
        """Give each lane without a trajectory the next one, as long as there are any."""
        if self.parking is not None:
            self.parking.refill(self._begin)
        else:
            self.pool.fill(self.occupied, self._begin)
        self.must_refill.set(False)

    def first_step(self, held: LaneNumbers, y: tuple, t: Value, mask: Value) -> tuple[list, Value]:
        """The method's carry for a step from the state `y` at `t`, and the size of that step, for
        trajectories that begin or restart in the lanes of the mask."""
        b, p = self.b, self.problem
        equations = self.equations(held, mask)
        f = evaluated_once(equations.f, y, t)
        carry = p.method.init(self.xp, dataclasses.replace(equations, f=f), y, t)
        carry = jax.tree.leaves(carry)
        if p.has("dt"):
            return carry, held.number("dt")
        span = held.number("t1") - held.number("t0")
        if p.method.grid is not None:
            return carry, span * tuning.FIRST_OF_SPAN
        if p.mass is not None:
            # (OrdinaryDiffEq's choice, whatever the mass matrix.)
            return carry, b.minimum(abs(span), 1e-6 * unit_of_time(self.xp, span))

        def power(x: Value, order: int) -> Value:
            """`10^(-(2 + log10(x)) / order)`"""
            return FUNCTIONS["exp"](b, (FUNCTIONS["log"](b, x) + 2 * math.log(10)) / -float(order))

        at = t, y, f(y, t), span, held.tolerances(p.controlled)
        how = p.method.order, self.bounds(held).dtmax, p.controlled, p.in_parts
        return carry, initial_step(self.xp, p.norm, power, f, *at, *how)

    def _begin(self, index: Value, fresh: Value) -> None:
        """Start these trajectories, in the lanes `fresh`."""
        b, p, held = self.b, self.problem, self.held
        held.take(index, fresh)
        y = held.u0(held.index.get(), fresh)
        set_all(self.y, y, fresh)
        t0 = self.t0
        self._set(self.t, fresh, t0)
        self._set(self.ntried, fresh, 0)
        if self.is_uniform:
            carry, h = self.first_step(held, self.state(), t0, fresh)
        else:
            carry, h = self.pool.first(index, fresh, self.carry)
        if self.restarts is not None:
            self.restarts.set_where(fresh, 0)
        self.restart(fresh, carry, h)
        self.naccept.set_where(fresh, 0)
        wanted = self.queue.wanted.gather(held.index.get(), fresh, False)
        finite = self.is_finite(self.state())
        usable = finite & (self.h.get() * 0.0).eq(0.0) if p.adaptive else finite
        code = verdicts.first_code(b, wanted, finite, usable, t0.eq(self.t1))
        if (consistent := self.consistent(fresh, self.t.get())) is not None:
            code = b.where(wanted & finite & ~consistent, verdicts.INCONSISTENT, code)
        self.code.set_where(fresh, code)
        active = code.eq(verdicts.GOING)
        if p.adaptive:
            assert p.controller is not None
            set_all(self.memory, map(np.float32, p.controller.initial_memory()), fresh)
            self.short_failures.set_where(fresh, 0)
        if self.switch is not None:
            self.switch.begin(fresh)
        if self.is_uniform:
            self.active.set(active & fresh)
            self.alive.set(b.any(active & fresh))
        else:
            self.active.set_where(fresh, active)
        self.occupied.set_where(fresh, True)
        if self._on_begin is not None:
            self._on_begin(index, fresh)
        self.saved.start(fresh, t0, self.state())
        if self.happening is not None:
            self.happening.begin(fresh)

    def consistent(self, mask: Value, t: Value) -> Value | None:
        """The lanes where the algebraic equations hold at the time `t`; None without these."""
        b, p = self.b, self.problem
        if p.mass is None or not p.mass.is_singular:
            return None
        equations, n = self.equations(self.held, mask), p.controlled
        assert equations.algebraic is not None
        rest = equations.algebraic(equations.f(self.state(), t))
        return p.norm(b, in_abstol(b, self.held.tolerances(n), rest[:n])) <= 1.0

    def restart(self, mask: Value, carry: list, h: Value) -> None:
        """Start from the current times and states in the lanes of the mask, with this carry of the
        method and a first step of the size `h`, of either sign."""
        set_all(self.carry, carry, None if self.is_uniform else mask)
        t, h = self.t.get(), abs(h)
        if self.problem.adaptive:
            h = self.bounds(self.held).first(self.b, h, t, self.t1 - self.t0)
        self._set(self.h, mask, h)
        if self.stops is not None:
            self._after_stop(mask, self.stops.begin(mask, self.t))
        elif self.has_anchor:
            self.set_anchor(mask)

    def begin_anew(self, mask: Value) -> None:
        """`carry_anew`, counted as a restart of the trajectories."""
        self.carry_anew(mask)
        assert self.restarts is not None
        self.restarts.set(self.restarts.get() + self.b.cast(mask, I32))

    def carry_anew(self, mask: Value) -> None:
        """Recompute the method's carry from the current times and states."""
        equations = self.equations(self.held, mask)
        made = self.problem.method.init(self.xp, equations, self.state(), self.t.get())
        set_all(self.carry, jax.tree.leaves(made), mask)

    def _after_stop(self, here: Value, jumps: Value) -> None:
        """Begin the next stretch of time in the lanes `here`; in those of `jumps`, `f` jumps."""
        if self.problem.has("d_discontinuities"):
            self.b.if_(self.b.any(jumps), lambda: self.begin_anew(jumps), likely=False)
        if self.has_anchor:
            self.set_anchor(here)

    def _set(self, variable: Variable, mask: Value, x: Value | int) -> None:
        """Set a variable in the lanes of the mask; lanes that step together also start together."""
        if self.is_uniform:
            variable.set(x)
        else:
            variable.set_where(mask, x)

    #
    # A turn
    #

    def turn(
        self, equations: Callable[[LaneNumbers, Value], Equations]
    ) -> tuple[TriedStep, Verdict]:
        """One turn, in which every lane tries a step."""
        step, unresolved = attempt(self, equations)
        step, verdict, size = control(self, step, unresolved)
        if self.happening is None:
            commit(self, size, step, verdict)
        else:
            on = functools.partial(commit, self, size)
            step, verdict = self.happening.locate(step, verdict, on)
            self.happening.act(step)
        if self.problem.has("max_norm") and self.outputs is not None:
            self._end_diverged(step)
        if self.stops is not None:
            self._pass_stops(step, self.stops)
        if self.waiting is not None:
            resuming = self.waiting & self.code.get().eq(verdicts.GOING)
            self.active.set(self.active.get() | resuming)
        return step, verdict

    def suspend(self, waits: Value) -> None:
        """Leave the lanes that wait as they are in this turn."""
        active = self.active.get()
        self.waiting = waits & (active | self.code.get().eq(verdicts.PROBING))
        self.active.set(active & ~waits)

    def _end_diverged(self, step: TriedStep) -> None:
        """End the trajectories that have diverged, unless an event has ended them."""
        p, limit = self.problem, self.held.number("max_norm")
        state = looked_at(self.xp, self.state(), p.controlled, p.in_parts)
        far = verdicts.has_diverged(self.xp, p.norm, limit, state)
        far = far & step.accepted & self.code.get().eq(verdicts.GOING)
        self.code.set_where(far, verdicts.DIVERGED)
        self.active.set(self.active.get() & ~far)

    def _pass_stops(self, step: TriedStep, stops: LaneStops) -> None:
        """Go on from the known times that steps have ended on."""
        b = self.b
        here = step.accepted & self.active.get() & step.t2.eq(self.tstop)

        def go_on() -> None:
            self._after_stop(here, stops.arrive(here, self.t))

        b.if_(b.any(here), go_on, likely=False)
