"""The time loop of a kernel, for the lanes of a builder.

A lane that has finished takes the next trajectory of the queue. The first steps of those that come
next are chosen for as many of them at once as there are lanes. Where all trajectories share a fixed
step, time and step are scalars, and the lanes begin and end together.

The parts of a turn: `attempt` a step, `control` the size of the next, `commit`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ...core.retcode import ReturnCode
from ...core.saving import Saving
from ...solvers.controllers import AbstractController
from ...solvers.method import Attempt, carry_like, Equations, evaluated_once, Method
from ...solvers.norms import AbstractNorm
from ...solvers.step_size import (
    count_failures,
    initial_step,
    is_moved,
    MOST_FAILURES,
    squared_error,
    Tolerances,
)
from ...solvers.time import adaptive_step, fixed_step, min_step, StepBounds, underflows
from ...tracing.program import Program
from .builder import BOOL, Buffer, Builder, F32, I32, I64, Value, Variable
from .functions import FUNCTIONS
from .numbers import Held, Layout


# Where lanes end together: turns between two looks at whether they are to stop, a power of two.
_TURNS = 4096


@dataclasses.dataclass(frozen=True)
class Description:
    """All that decides a kernel.

    - `field`: the vector field, `field(consts, u, p, t)`.
    - `controlled`: how many components of the state step-size control looks at.
    - `method`, `controller`, `norm`: how it steps; no controller with a fixed step.
    - `saving`: what is saved (however many rows).
    - `layout`: what the numbers of a trajectory are.
    - `own_times`: whether each trajectory has its own times to save.
    - `width`: how many lanes; `has_fma`: whether the machine has fused operations.
    - `on_gpu`: whether this is what a thread of a GPU does, `thread` of `threads`, both parameters
        that come first.
    """

    field: Program
    controlled: int
    method: Method
    controller: AbstractController | None
    norm: AbstractNorm
    saving: Saving
    layout: Layout
    own_times: bool
    width: int
    has_fma: bool = True
    on_gpu: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.field.out_avals[0].shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.field.out_avals[0].dtype)

    @property
    def carry_like(self) -> Any:
        """What the method carries, of zeros."""
        return carry_like(self.method, self.size, self.dtype)

    @property
    def recorded(self) -> int:
        """How many numbers say what a step was: the state, what was carried (where that is not
        made of the state again), the time and the size."""
        carried = jax.tree.leaves(self.carry_like) if self.method.remembers else []
        return self.size + len(carried) + 2

    @property
    def is_uniform(self) -> bool:
        """Whether all trajectories take the same steps, of a fixed size."""
        named = [x for x in self.layout.numbers if x.name in ("t0", "t1", "dt")]
        return self.controller is None and not any(x.is_own for x in named)

    @property
    def adaptive(self) -> bool:
        return self.controller is not None

    def has(self, name: str) -> bool:
        """Whether the trajectories have a number of this name."""
        return self.layout.find(name) is not None


class Queue(NamedTuple):
    """Which trajectories these lanes solve: `first`, then every one up to `n`; on a GPU, every
    `stride`-th. `wanted` is a mask in memory."""

    first: Value
    stride: Value
    n: Value
    wanted: Buffer


class Outputs(NamedTuple):
    """Where the results go, as row-major arrays: `u [trajectory, row, component]`, `t [trajectory,
    row]` where every step is saved, `counts [4, trajectory]` (code, accepted, tried, rows), of `n`
    trajectories. (On a GPU the trajectories come last: see `numbers.Order`.)"""

    u: Buffer
    t: Buffer | None
    counts: Buffer
    n: Value


class Step(NamedTuple):
    """A step from `t` to `t2`, of the signed size `h`, in the lanes that `accepted` it; `failed` in
    those where it was infinite or NaN (None with a fixed step)."""

    t: Value
    t2: Value
    h: Value
    y: tuple[Value, ...]
    carry: Any
    attempt: Attempt
    accepted: Value
    failed: Any = None


class Loop:
    """The variables of the lanes, and what is done with them.

    **Arguments:**

    - `problem`: what is solved.
    - `equations(held, mask)`: those of the trajectories that are held; the mask is of the lanes
        that count.
    - `outputs`: None where nothing is saved, and all trajectories that are wanted succeed.
    - `stop`: a byte, zero until the trajectories that have not ended are to have the return code
        `Default`; None where nobody may stop it.
    - `on_begin(index, fresh)`: told which trajectories begin, and in which lanes.
    """

    def __init__(
        self,
        b: Builder,
        problem: Description,
        equations: Callable[[Held, Value], Equations],
        held: Held,
        queue: Queue,
        times: Buffer | None,
        outputs: Outputs | None,
        rows: Value,
        maxiters: Value,
        *,
        stop: Buffer | None = None,
        on_begin: Callable[[Value, Value], None] | None = None,
    ):
        self.b, self.problem, self.held, self.queue = b, problem, held, queue
        self.times, self.rows, self.maxiters = times, rows, maxiters
        # (None what there is nothing for; each is used only where there is.)
        self.outputs: Any = outputs
        self._stop, self._on_begin = stop, on_begin
        self.is_uniform = is_uniform = problem.is_uniform
        self.order = held.order
        self.equations = equations
        dtype, n = problem.dtype, problem.size
        self.y = [b.variable(dtype, 0) for _ in range(n)]
        # What the method carries from step to step, its numbers one after the other.
        carried, self._carry_tree = jax.tree.flatten(problem.carry_like)
        self.carry = [b.variable(dtype, 0) for _ in carried]
        self.t = b.variable(dtype, 0, of_lanes=not is_uniform)
        self.h = b.variable(dtype, 0, of_lanes=not is_uniform)
        self.active = b.variable(BOOL, False)
        self.occupied = b.variable(BOOL, False)
        self.naccept = b.variable(I32, 0)
        self.ntried = b.variable(I32, 0, of_lanes=not is_uniform)
        remembered = problem.controller.initial_memory() if problem.controller else ()
        self.memory = [b.variable(F32, 1) for _ in remembered]
        self.probing: Any = b.variable(BOOL, False) if problem.adaptive else None
        self.short_failures: Any = b.variable(I32, 0) if problem.adaptive else None
        if is_uniform:
            # Whether no step has failed; of those where one has, how many (one).
            self.sound, self.failures = b.variable(BOOL, False), b.variable(I32, 0)
        # Whether any lane goes on: where they end together, a turn takes no look at the lanes.
        self.alive: Any = b.variable(BOOL, False, of_lanes=False) if is_uniform else None
        saves = problem.saving.mode != "ends" and outputs is not None
        shares_rows = is_uniform and not problem.own_times and not problem.has("count")
        self.shares_rows = shares_rows and problem.saving.mode == "times"
        self.row: Any = b.variable(I64, 0, of_lanes=not self.shares_rows) if saves else None
        self.time: Any = None
        if saves and problem.saving.mode == "times":
            self.time = b.variable(dtype, 0, of_lanes=not self.shares_rows)
        # The next trajectory of the queue; those up to `pool_end` have their first step.
        self.next = b.variable(I64, queue.first, of_lanes=False)
        self.pool_first = b.variable(I64, queue.first, of_lanes=False)
        self.pool_end = b.variable(I64, queue.first, of_lanes=False)
        self.must_refill = b.variable(BOOL, True, of_lanes=False)
        self.goes_on = b.variable(BOOL, True, of_lanes=False)
        self._prepares = not is_uniform and (bool(self.carry) or not problem.has("dt"))
        if self._prepares:
            n_carried = len(self.carry)
            self._pool_carry: Any = b.array(dtype, n_carried, of_lanes=True) if n_carried else None
            self._pool_h = b.array(dtype, 1, of_lanes=True)

    def run(self) -> None:
        """Solve all trajectories of the queue."""
        b = self.b
        some = self.next.get() < self.queue.n
        b.if_(some, self._run_together if self.is_uniform else self._run_on_their_own)

    def _run_together(self) -> None:
        b = self.b

        def going() -> Value:
            return self.alive.get() & (self.ntried.get() < self.maxiters)

        def look() -> None:
            self.alive.set(self.alive.get() & ~self._stopped())

        def turn() -> None:
            self.turn()
            if self._stop is not None:
                b.if_((self.ntried.get() & (_TURNS - 1)).eq(0), look, likely=False)

        def one() -> Value:
            self.refill()
            self.sound.set(self.active.get())
            self.failures.set(0)
            b.while_(going, turn)
            # (Stopped at the end of the last turn, they have ended.)
            self._unless_stopped(lambda: self.end(self.occupied.get(), None))
            return self.goes_on.get()

        b.do_while(one)

    def _run_on_their_own(self) -> None:
        b = self.b

        def one() -> Value:
            self._unless_stopped(self.go_on)
            return self.goes_on.get()

        b.do_while(one)

    def _stopped(self) -> Value:
        assert self._stop is not None
        return self.b.value(f"load volatile i8, ptr {self._stop.base}", np.dtype(np.int8), 0).ne(0)

    def _unless_stopped(self, then: Callable[[], Any]) -> None:
        if self._stop is None:
            then()
        else:
            self.b.if_(self._stopped(), self._abandon, then, likely=False)

    def _abandon(self) -> None:
        """Leave the trajectories that are in the lanes, and those that come next."""
        b, counts = self.b, self.outputs.counts
        default = b.constant(ReturnCode.Default.value, I32)
        counts.scatter(self.held.index.get(), self.occupied.get(), b.spread(default))

        def one() -> None:
            counts.store(self.next.get(), default)
            self.next.set(self.next.get() + self.queue.stride)

        b.while_(lambda: self.next.get() < self.queue.n, one)
        self.goes_on.set(False)

    def go_on(self) -> Step:
        """A turn, with what comes before and after it."""
        b = self.b
        b.if_(self.must_refill.get(), self.refill, likely=False)
        step = self.turn()
        tired = self.ntried.get() >= self.maxiters
        if self.is_uniform:
            # Together, as they began.
            b.if_(~self.alive.get() | tired, lambda: self.end(self.occupied.get(), step))
            return step
        ended = ~self.active.get() | tired
        ended = self.occupied.get() & ended
        b.if_(b.any(ended), lambda: self.end(ended, step), likely=False)
        return step

    def variables(self) -> list[Variable]:
        """All that goes on from turn to turn, but for the numbers that are held and `arrays`."""
        several = [*self.y, *self.carry, self.t, self.h, self.active, self.occupied]
        several += [self.naccept, self.ntried, *self.memory, self.probing, self.row, self.time]
        several += [self.short_failures]
        several += [
            self.alive,
            self.next,
            self.pool_first,
            self.pool_end,
            self.must_refill,
            self.goes_on,
        ]
        return [x for x in several if x is not None]

    def arrays(self) -> list[tuple[Buffer, int]]:
        """The pool of first steps: memory, and how many elements."""
        # (A single lane takes what was prepared at once.)
        if not self._prepares or not self.b.lanes:
            return []
        width = self.b.lanes
        first = [(self._pool_h, width)]
        if self._pool_carry is None:
            return first
        return [(self._pool_carry, len(self.carry) * width), *first]

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

    def state(self) -> tuple[Value, ...]:
        return tuple(x.get() for x in self.y)

    def tolerances(self, held: Held, components: int) -> Tolerances:
        """Those of the first components; of what step-size control doesn't look at they are any."""
        controlled = self.problem.controlled

        def of(name: str) -> tuple:
            return tuple(held.number(name, c if c < controlled else 0) for c in range(components))

        return Tolerances(of("abstol"), of("reltol"))

    def bounds(self, held: Held) -> StepBounds:
        has = self.problem.has
        return StepBounds(*(held.number(x) if has(x) else None for x in StepBounds._fields))

    def is_finite(self, y: tuple) -> Value:
        total = y[0] * 0.0
        for x in y[1 : self.problem.controlled]:
            total = total + x * 0.0
        return total.eq(0.0)

    def may_be_infinite(self, y: tuple) -> Value:
        """True where a component is infinite or NaN, and where their sum overflows."""
        total = y[0]
        for x in y[1 : self.problem.controlled]:
            total = total + x
        return (total * 0.0).ne(0.0)

    def time_at(self, row: Value, mask: Value, held: Held | None = None) -> Value:
        """The time of a row, infinitely far where there are no more; of the lanes of the mask."""
        b, p = self.b, self.problem
        held = self.held if held is None else held
        assert self.times is not None
        inside = row < self.rows
        if p.has("count"):
            inside = inside & (row < b.cast(held.number("count"), I64))
        at = b.where(inside, row, 0)
        if p.own_times:
            place = self.order.place(held.index.get(), at, self.rows)
            found = self.times.gather(place, mask, 0)
        elif row.lanes:
            found = self.times.gather(at, mask, 0)
        else:
            found = self.times.load(at)
        beyond = b.where(
            held.number("t1") < held.number("t0"), -np.inf, b.constant(np.inf, p.dtype)
        )
        return b.where(inside, found, beyond)

    #
    # The queue
    #

    def refill(self) -> None:
        """Give each lane without a trajectory the next one, as far as there are."""
        b = self.b
        fresh = b.variable(BOOL, False)
        queue_end = self.queue.n

        def some() -> Value:
            return b.any(~self.occupied.get()) & (self.next.get() < queue_end)

        def one() -> None:
            empty = self.next.get() >= self.pool_end.get()
            b.if_(empty, self._prepare)
            fresh.set(False)
            index = b.variable(I64, 0)

            def assign(lane: Value) -> None:
                number = self.next.get()

                def take() -> None:
                    index.set(b.with_entry(index.get(), lane, number))
                    fresh.set(b.with_entry(fresh.get(), lane, b.constant(True, BOOL)))
                    self.next.set(number + self.queue.stride)

                b.if_(number < self.pool_end.get(), take)

            b.for_each_lane(~self.occupied.get(), assign)
            self._begin(index.get(), fresh.get())

        b.while_(some, one)
        self.must_refill.set(False)

    def _prepare(self) -> None:
        """The first steps of the trajectories that come next: one a lane."""
        b, p, queue = self.b, self.problem, self.queue
        first = self.next.get()
        index = b.lane_numbers() + first
        inside = index < queue.n
        if b.lanes:
            self.pool_end.set(b.minimum(first + b.lanes, queue.n))
        else:
            self.pool_end.set(first + 1)
        self.pool_first.set(first)
        if not self._prepares:
            return
        # In place of the trajectories that the lanes hold, for a while.
        held = self.held.another()
        held.take(b.where(inside, index, 0), b.spread(inside))
        y = tuple(held.u0(held.index.get(), inside))
        t0, t1 = held.number("t0"), held.number("t1")
        equations = self.equations(held, b.spread(inside))
        f = evaluated_once(equations.f, y, t0)
        carry = p.method.init(b, dataclasses.replace(equations, f=f), y, t0)
        for c, x in enumerate(jax.tree.leaves(carry)):
            self._pool_carry.store_lanes(c * max(1, b.lanes), x)
        if p.has("dt"):
            return
        assert p.controller is not None
        tol = self.tolerances(held, p.size)

        def norm(xp: Any, values: tuple) -> Value:
            return p.norm(xp, values[: p.controlled])

        h = initial_step(
            b,
            norm,
            self._power_of_ten,
            f,
            t0,
            y,
            f(y, t0),
            t1 - t0,
            tol,
            p.method.order,
            self.bounds(held).dtmax,
        )
        self._pool_h.store_lanes(0, h)

    def _power_of_ten(self, x: Value, order: int) -> Value:
        """`10^(-(2 + log10(x)) / order)`"""
        log = FUNCTIONS["log"](self.b, x)
        return FUNCTIONS["exp"](self.b, (log + 2 * math.log(10)) / -float(order))

    def _begin(self, index: Value, fresh: Value) -> None:
        """Start these trajectories, in the lanes that are fresh."""
        b, p, held = self.b, self.problem, self.held
        held.take(index, fresh)
        y = held.u0(held.index.get(), fresh)
        for variable, x in zip(self.y, y, strict=True):
            variable.set_where(fresh, x)
        t0, t1 = self.t0, self.t1
        if self.is_uniform:
            self.t.set(t0)
            self.h.set(abs(held.number("dt")))
            self.ntried.set(0)
            if self.carry:
                carry = p.method.init(b, self.equations(held, fresh), self.state(), t0)
                for variable, x in zip(self.carry, jax.tree.leaves(carry), strict=True):
                    variable.set(x)
        else:
            self.t.set_where(fresh, t0)
            self.ntried.set_where(fresh, 0)
            pool = index - self.pool_first.get() if b.lanes else b.constant(0, I64)
            width = max(1, b.lanes)
            for c, variable in enumerate(self.carry):
                variable.set(self._pool_carry.gather(pool + c * width, fresh, variable.get()))
            h = held.number("dt") if p.has("dt") else self._pool_h.gather(pool, fresh, 1)
            h = abs(h)
            if p.adaptive:
                h = self.bounds(held).bounded(b, h)
                # (In this order NaN remains.)
                h = b.maximum(2 * min_step(b, t0, t1 - t0), h)
            self.h.set_where(fresh, h)
        self.naccept.set_where(fresh, 0)
        active = self.queue.wanted.gather(held.index.get(), fresh, False)
        active = active & self.is_finite(self.state()) & t0.ne(t1)
        if p.adaptive:
            active = active & (self.h.get() * 0.0).eq(0.0)
            assert p.controller is not None
            for variable, x in zip(self.memory, p.controller.initial_memory(), strict=True):
                variable.set_where(fresh, np.float32(x))
            self.probing.set_where(fresh, False)
            self.short_failures.set_where(fresh, 0)
        if self.is_uniform:
            self.active.set(active & fresh)
            self.alive.set(b.any(active & fresh))
        else:
            self.active.set_where(fresh, active)
        self.occupied.set_where(fresh, True)
        if self._on_begin is not None:
            self._on_begin(index, fresh)
        self._save_start(fresh)

    #
    # A turn
    #

    def turn(self) -> Step:
        """Try a step in every lane."""
        step, next_h, memory, lost = self.control(*self.attempt())
        self.commit(step, next_h, memory, lost)
        return step

    def attempt(self) -> tuple:
        """The end of the step that time allows, its signed size, and the step."""
        b, p = self.b, self.problem
        t, h = self.t.get(), self.h.get()
        if p.adaptive:
            t2 = adaptive_step(b, t, self.t1, self.direction, h)
            size, next_h = t2 - t, h
        else:
            t2, unresolved = fixed_step(b, self.t0, self.t1, t, h, self.ntried.get())
            if not self.is_uniform:
                unresolved = unresolved & self.active.get()
            t2 = b.where(unresolved, t, t2)
            # The state becomes NaN, and the lane ends.
            size = b.where(unresolved, np.nan, t2 - t)
            next_h = b.where(unresolved, 0.0, h)
        y = self.state()
        carry = self._carry_tree.unflatten([x.get() for x in self.carry])
        attempt = p.method.step(b, self._equations(), y, carry, t, size)
        return t, t2, size, next_h, y, carry, attempt

    def _equations(self) -> Equations:
        """For the lanes that try a step."""
        mask = self.active.get()
        if self.probing is not None:
            mask = mask | self.probing.get()
        return self.equations(self.held, mask)

    def control(self, t, t2, size, next_h, y, carry, attempt) -> tuple:
        """Whether the step is accepted, the size of the next, what the controller remembers, and
        whether time can't resolve the next."""
        b, p = self.b, self.problem
        active = self.active.get()
        if not p.adaptive:
            accepted = active & self.is_finite(attempt.y2)
            if attempt.failed is not None:
                accepted = accepted & ~attempt.failed
            return Step(t, t2, size, y, carry, attempt, accepted), next_h, None, None
        assert p.controller is not None
        tol = self.tolerances(self.held, p.controlled)
        squared = squared_error(b, p.norm, tol, attempt, y, p.controlled)
        before = tuple(x.get() for x in self.memory)
        accepted = p.controller.accepts(b, squared, before) & active & ~self.probing.get()
        first = self.naccept.get().eq(0)
        tried = b.minimum(next_h, abs(self.t1 - t))
        next_h, memory = p.controller.next_step(b, tried, squared, before, accepted, first)
        bounds, span = self.bounds(self.held), self.t1 - self.t0
        at = b.where(accepted, t2, t)
        lost = underflows(b, bounds, next_h, at, self.t1, span, accepted)
        next_h = bounds.bounded(b, next_h)
        failed = active & ~(squared < np.inf)
        return Step(t, t2, size, y, carry, attempt, accepted, failed), next_h, memory, lost

    def commit(self, step: Step, next_h: Value, memory: Any, lost: Any) -> None:
        """Save what lies in the step, and go on to its end where it is accepted."""
        b, p = self.b, self.problem
        self._save(step)
        active, accepted = self.active.get(), step.accepted
        ends = step.t2.eq(self.t1)
        if self.is_uniform:
            self.t.set(step.t2)
            self.h.set(next_h)
            for variable, x in zip(self.y, step.attempt.y2, strict=True):
                variable.set(x)
            for variable, x in zip(self.carry, jax.tree.leaves(step.attempt.carry), strict=True):
                variable.set(x)
            tries = self.ntried.get()

            def look() -> None:
                failed = active & ~accepted
                self.naccept.set_where(failed, tries)
                self.failures.set_where(failed, 1)
                self.sound.set(accepted)
                self.active.set(accepted)
                self.alive.set(b.any(accepted))

            b.if_(b.any(self.may_be_infinite(step.attempt.y2)), look, likely=False)
            self.ntried.set(tries + 1)
            self.alive.set(self.alive.get() & ~ends)
            return
        self.t.set_where(accepted, step.t2)
        for variable, x in zip(self.y, step.attempt.y2, strict=True):
            variable.set_where(accepted, x)
        for variable, x in zip(self.carry, jax.tree.leaves(step.attempt.carry), strict=True):
            variable.set_where(accepted, x)
        if p.adaptive:
            for variable, x in zip(self.memory, memory, strict=True):
                variable.set(x)
            self.h.set_where(active, next_h)
            self.active.set(active & ~((accepted & ends) | lost))

            def count() -> None:
                span, before = self.t1 - self.t0, self.short_failures.get()
                failures = count_failures(b, before, step.failed, abs(step.h), span)
                self.short_failures.set(failures)
                self.active.set(self.active.get() & (failures < MOST_FAILURES))

            b.if_(b.any(step.failed), count, likely=False)
        else:
            self.h.set(next_h)
            self.active.set(accepted & ~ends)
        self.naccept.set(self.naccept.get() + b.cast(accepted, I32))
        self.ntried.set(self.ntried.get() + b.cast(active, I32))

    #
    # What is saved
    #

    def _write(self, row: Value, mask: Value, y: tuple) -> None:
        """A row of the states of the lanes of the mask."""
        size = self.problem.size
        for c, x in enumerate(y):
            place = self.order.place(self.held.index.get(), row * size + c, self.rows * size)
            self.outputs.u.scatter(place, mask, x)

    def _place_of_time(self, row: Value | int) -> Value:
        return self.order.place(self.held.index.get(), row, self.rows)

    def _save_start(self, fresh: Value) -> None:
        """What is saved at the start of trajectories."""
        b, p = self.b, self.problem
        if self.row is None:
            return
        if p.saving.mode == "steps":
            self.row.set_where(fresh, int(p.saving.start))
            if p.saving.start:
                self._write(b.constant(0, I64), fresh, self.state())
                self.outputs.t.scatter(self._place_of_time(0), fresh, self.t0)
            return
        t0 = self.t0
        if self.shares_rows:
            self.row.set(0)
            self.time.set(self.time_at(self.row.get(), fresh))
        else:
            self.row.set_where(fresh, 0)
            self.time.set_where(fresh, self.time_at(self.row.get(), fresh))

        def due() -> Value:
            here = self.time.get().eq(t0)
            return here if self.shares_rows else fresh & here

        def one() -> None:
            self._write_row(fresh if self.shares_rows else due(), self.state())

        b.while_(lambda: b.any(due()), one)

    def _write_row(self, mask: Value, y: tuple) -> None:
        """The next row of the lanes of the mask."""
        row = self.row.get()
        self._write(row, mask, y)
        if self.shares_rows:
            self.row.set(row + 1)
            self.time.set(self.time_at(row + 1, mask))
        else:
            self.row.set_where(mask, row + 1)
            self.time.set_where(mask, self.time_at(row + 1, mask))

    def _save(self, step: Step) -> None:
        """What lies in a step."""
        b, p = self.b, self.problem
        if self.row is None:
            return
        if p.saving.mode == "steps":
            row = self.row.get()
            here = step.accepted & (row < self.rows)
            self._write(row, here, step.attempt.y2)
            self.outputs.t.scatter(self._place_of_time(row), here, step.t2)
            self.row.set(row + b.cast(here, I64))
            return
        direction = self.direction

        def due() -> Value:
            """Those that are in the step, of a row of theirs."""
            reached = direction * (step.t2 - self.time.get()) >= 0.0
            return reached if self.shares_rows else reached & step.accepted

        def save() -> None:
            mask = b.spread(due())
            at = step.y, step.attempt.dense, step.t, step.h
            dense = p.method.dense(b, self.equations(self.held, mask), *at)

            def one() -> Value:
                theta = (self.time.get() - step.t) / step.h
                u = p.method.interpolate(b, step.y, dense, step.h, theta)
                self._write_row(self.occupied.get() if self.shares_rows else due(), u)
                return b.any(due())

            b.do_while(one)

        b.if_(b.any(due()), save)

    #
    # Ends
    #

    def end(self, ended: Value, step: Step | None) -> None:
        """Write the results of the lanes that have ended; they are free then.

        A lane that is lost in an adaptive solve, and not for what is infinite or NaN, has another
        turn first: does a step too short for time to feel move its state? If so the solution
        diverges; if not, the tolerances can't be met.
        """
        b, p = self.b, self.problem
        if self.outputs is None:
            self._free(ended)
            return
        y = self.state()
        arrived = self.t.get().eq(self.t1) & self.is_finite(y)
        active = self.active.get()
        failed = b.constant(ReturnCode.Unstable.value, I32)
        too_small = ReturnCode.DtLessThanMin.value
        if not p.adaptive:
            failed = b.where(self.h.get().eq(0.0), too_small, failed)
        else:
            assert step is not None
            lost = ended & ~arrived & ~active
            starts = lost & ~self.probing.get() & ~step.failed
            dtmin = self.bounds(self.held).dtmin
            below = None if dtmin is None else self.h.get() <= dtmin
            if below is not None:
                starts = starts & ~below
            # A step that failed for being infinite or NaN was that much longer.
            h = self.h.get() * 5.0
            calm = (self.h.get() * 0.0).eq(0.0) & ~step.failed
            for c in range(p.controlled):
                abstol = self.held.number("abstol", c)
                calm = calm & ~is_moved(abstol, step.y[c], step.attempt.y2[c])
            if below is not None:
                calm = calm | below
            failed = b.where(calm, too_small, failed)
            self.h.set_where(starts, h)
            self.probing.set(self.probing.get() | starts)
            ended = ended & ~starts
        code = b.where(active, ReturnCode.MaxIters.value, failed)
        code = b.where(arrived, ReturnCode.Success.value, code)
        naccept, ntried = self.naccept.get(), self.ntried.get()
        if self.is_uniform:
            tries, sound = ntried, self.sound.get()
            ntried = b.where(sound, tries, naccept + self.failures.get())
            naccept = b.where(sound, tries, naccept)
        index, n = self.held.index.get(), self.outputs.n
        if p.saving.mode == "ends":
            for c, x in enumerate(y):
                self.outputs.u.scatter(self.order.place(index, c, p.size), ended, x)
        counts = [code, naccept, ntried]
        if self.row is not None:
            counts.append(b.cast(self.row.get(), I32))
        for i, x in enumerate(counts):
            self.outputs.counts.scatter(index + n * i, ended, x)
        self._free(ended)

    def _free(self, ended: Value) -> None:
        b = self.b
        self.occupied.set(self.occupied.get() & ~ended)
        more = self.next.get() < self.queue.n
        self.must_refill.set(more)
        self.goes_on.set(more | b.any(self.occupied.get()))
