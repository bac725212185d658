"""The order in which the lanes of a time loop take trajectories.

Before trajectories begin, the method's carry and the size of the first step are computed for as
many of them at once as there are lanes, and kept in memory until lanes are free.
"""

from collections.abc import Callable
from typing import NamedTuple

from ..algebra.components import changed, for_each_component
from ..llvm.across_lanes import for_each_lane
from ..llvm.builder import BOOL, Builder, ElementPointer, I64, Value, Variable
from ..steps.description import KernelDescription
from ..steps.layout import LaneNumbers


class Queue(NamedTuple):
    """The trajectories that these lanes solve: the numbers from `first` to below `n`; on a GPU,
    every `stride`-th of these. `wanted` is a mask in memory."""

    first: Value
    stride: Value
    n: Value
    wanted: ElementPointer


class PreparedStarts:
    """The number of the next trajectory of a queue; and, for the trajectories from there up to
    number `end`, what they start with. `first_step(held, y, t, mask)` computes that: the method's
    carry, of `n_carried` numbers, for a step from the state `y` at `t`, and the size of that step.
    Lanes that begin together need no preparation."""

    def __init__(
        self,
        b: Builder,
        problem: KernelDescription,
        queue: Queue,
        held: LaneNumbers,
        n_carried: int,
        first_step: Callable,
    ):
        self.b, self.queue = b, queue
        self._problem, self._held, self._first_step = problem, held, first_step
        self.next, self._first, self._end = (
            b.variable(I64, queue.first, of_lanes=False) for _ in range(3)
        )
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

    def arrays(self) -> list[tuple[ElementPointer, int]]:
        """The buffers of the first steps, each with its number of elements."""
        # A single lane takes a first step as soon as it is prepared.
        width = self.b.lanes
        if not self._prepares or not width:
            return []
        carry = [(self._carry, self._n_carried * width)] if self._n_carried else []
        return [*carry, (self._h, width)]

    def fill(self, occupied: Variable, begin: Callable[[Value, Value], None]) -> None:
        """Give each lane that isn't occupied the next trajectory, as long as there are any. `begin`
        is called with the numbers of these trajectories, and the lanes that get them."""
        b = self.b
        fresh = b.variable(BOOL, False)

        def some() -> Value:
            return b.any(~occupied.get()) & self.has_more()

        def one() -> None:
            b.if_(self.next.get() >= self._end.get(), self._prepare)
            fresh.set(False)
            index = b.variable(I64, 0)

            def assign(lane: Value) -> None:
                number = self.next.get()

                def take() -> None:
                    index.set(b.with_entry(index.get(), lane, number))
                    fresh.set(b.with_entry(fresh.get(), lane, b.constant(True, BOOL)))
                    self.next.set(number + self.queue.stride)

                b.if_(number < self._end.get(), take)

            for_each_lane(b, ~occupied.get(), assign)
            begin(index.get(), fresh.get())

        b.while_(some, one)

    def _prepare(self) -> None:
        """Prepare the first steps of the next trajectories, one in each lane."""
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
        # These trajectories' numbers are held in place of those of the trajectories under way.
        held = self._held.another()
        held.take(b.where(inside, index, 0), b.spread(inside))
        y = tuple(held.u0(held.index.get(), inside))
        carry, h = self._first_step(held, y, held.number("t0"), b.spread(inside))
        for_each_component(carry, lambda c, x: self._carry.store_lanes(c * max(1, b.lanes), x))
        if not self._problem.has("dt"):
            self._h.store_lanes(0, h)

    def first(self, index: Value, fresh: Value, carry: list) -> tuple[list[Value], Value]:
        """The prepared first steps, in the lanes `fresh`; the other lanes keep `carry`."""
        b, width = self.b, max(1, self.b.lanes)
        at = index - self._first.get() if b.lanes else b.constant(0, I64)

        def new(c: Value | int, before: Callable[[], Value]) -> Value:
            return self._carry.gather(at + c * width, fresh, before())

        found = changed(carry, new)
        if self._problem.has("dt"):
            return found, self._held.number("dt")
        return found, self._h.gather(at, fresh, 1)

    def leave(self, each: Callable[[Value], None]) -> None:
        """Take no more trajectories; `each` is called with the number of every one that is left."""

        def one() -> None:
            each(self.next.get())
            self.next.set(self.next.get() + self.queue.stride)

        self.b.while_(self.has_more, one)
