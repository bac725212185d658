"""Which trajectories the lanes of a time loop take next.

The first steps of those that come next are chosen for as many of them at once as there are lanes,
and lie in a pool until a lane is free.
"""

from collections.abc import Callable
from typing import NamedTuple

from .builder import BOOL, Buffer, Builder, I64, Value, Variable
from .description import Description
from .numbers import Held


class Queue(NamedTuple):
    """Which trajectories these lanes solve: `first`, then every one up to `n`; on a GPU, every
    `stride`-th. `wanted` is a mask in memory."""

    first: Value
    stride: Value
    n: Value
    wanted: Buffer


class Pool:
    """The next trajectory of a queue, and the first steps of those up to `end`.

    **Arguments:** `first_step(held, y, t, mask)`: what the method carries to a first step from the
    state `y` at `t`, and the size of that step. `is_uniform`: whether the lanes begin together, so
    that nothing is prepared.
    """

    def __init__(
        self,
        b: Builder,
        problem: Description,
        queue: Queue,
        held: Held,
        n_carried: int,
        first_step: Callable,
    ):
        self.b, self.queue = b, queue
        self._problem, self._held, self._first_step = problem, held, first_step
        self.next = b.variable(I64, queue.first, of_lanes=False)
        self._first = b.variable(I64, queue.first, of_lanes=False)
        self._end = b.variable(I64, queue.first, of_lanes=False)
        self._n_carried = n_carried
        self._prepares = not problem.is_uniform and (n_carried > 0 or not problem.has("dt"))
        if self._prepares:
            if n_carried:
                self._carry = b.array(problem.dtype, n_carried, of_lanes=True)
            self._h = b.array(problem.dtype, 1, of_lanes=True)

    def has_more(self) -> Value:
        return self.next.get() < self.queue.n

    def variables(self) -> list[Variable]:
        return [self.next, self._first, self._end]

    def arrays(self) -> list[tuple[Buffer, int]]:
        """The first steps: memory, and how many elements."""
        # (A single lane takes what was prepared at once.)
        width = self.b.lanes
        if not self._prepares or not width:
            return []
        carry = [(self._carry, self._n_carried * width)] if self._n_carried else []
        return [*carry, (self._h, width)]

    def fill(self, occupied: Variable, begin: Callable[[Value, Value], None]) -> None:
        """Give each lane that isn't occupied the next trajectory, as far as there are: `begin` is
        told which, and in which lanes."""
        b = self.b
        fresh = b.variable(BOOL, False)
        queue_end = self.queue.n

        def some() -> Value:
            return b.any(~occupied.get()) & (self.next.get() < queue_end)

        def one() -> None:
            empty = self.next.get() >= self._end.get()
            b.if_(empty, self._prepare)
            fresh.set(False)
            index = b.variable(I64, 0)

            def assign(lane: Value) -> None:
                number = self.next.get()

                def take() -> None:
                    index.set(b.with_entry(index.get(), lane, number))
                    fresh.set(b.with_entry(fresh.get(), lane, b.constant(True, BOOL)))
                    self.next.set(number + self.queue.stride)

                b.if_(number < self._end.get(), take)

            b.for_each_lane(~occupied.get(), assign)
            begin(index.get(), fresh.get())

        b.while_(some, one)

    def _prepare(self) -> None:
        """The first steps of the trajectories that come next: one a lane."""
        b, queue = self.b, self.queue
        first = self.next.get()
        index = b.lane_numbers() + first
        inside = index < queue.n
        if b.lanes:
            self._end.set(b.minimum(first + b.lanes, queue.n))
        else:
            self._end.set(first + 1)
        self._first.set(first)
        if not self._prepares:
            return
        # In place of the trajectories that the lanes hold, for a while.
        held = self._held.another()
        held.take(b.where(inside, index, 0), b.spread(inside))
        y = tuple(held.u0(held.index.get(), inside))
        carry, h = self._first_step(held, y, held.number("t0"), b.spread(inside))
        for c, x in enumerate(carry):
            self._carry.store_lanes(c * max(1, b.lanes), x)
        if not self._problem.has("dt"):
            self._h.store_lanes(0, h)

    def first(self, index: Value, fresh: Value, carry: list[Variable]) -> tuple[list[Value], Value]:
        """What was prepared for these trajectories, in the lanes that are fresh; `carry` is what
        the others carry."""
        b = self.b
        at = index - self._first.get() if b.lanes else b.constant(0, I64)
        width, found = max(1, b.lanes), []
        for c, variable in enumerate(carry):
            found.append(self._carry.gather(at + c * width, fresh, variable.get()))
        if self._problem.has("dt"):
            return found, self._held.number("dt")
        return found, self._h.gather(at, fresh, 1)

    def leave(self, each: Callable[[Value], None]) -> None:
        """Take no more; `each` is told every trajectory that is left."""

        def one() -> None:
            each(self.next.get())
            self.next.set(self.next.get() + self.queue.stride)

        self.b.while_(self.has_more, one)
