"""Trajectories that wait for their method. With a method that switches between two, all lanes step
with the same one, and a trajectory that switches gives up its lane until the lanes switch, too.

So the trajectories of either method take no longer than in an ensemble of their own. If both
methods had lanes in the same turn, every lane would take the time of two steps. The results of a
trajectory don't depend on which others are in the lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..llvm.across_lanes import for_each_lane
from ..llvm.builder import BOOL, ElementPointer, I64, Value, Variable
from . import tuning


if TYPE_CHECKING:
    from .loop import Loop


class Parking:
    """Room for the trajectories that wait: for those of the first method, then of the second.
    `is_second` says with which one the lanes step."""

    def __init__(self, loop: Loop, is_second: Variable):
        self.loop, self.b, self.is_second = loop, loop.b, is_second
        b = self.b
        self.room = tuning.WAITING * b.lanes
        self._waiting = [b.variable(I64, 0, of_lanes=False) for _ in range(2)]
        # The lanes whose trajectories have switched and are still to be moved out; and the number
        # of turns that such lanes have been idle, summed over the lanes.
        self._switched = b.variable(BOOL, False)
        self._idle = b.variable(I64, 0, of_lanes=False)
        self._places: list[tuple[Variable, ElementPointer]] = []

    def places(self) -> list[tuple[Variable, ElementPointer]]:
        """The variables of a trajectory, and where they are kept while it waits."""
        if not self._places:
            b, loop = self.b, self.loop
            held = loop.held.index, *itertools.chain(*loop.held.variables())
            every = [*loop.variables(), loop.code, loop.restarts, *held]
            own = [x for x in every if x is not None and x.lanes and x is not loop.occupied]
            self._places = [(x, b.array(x.dtype, 2 * self.room)) for x in own]
        return self._places

    def has_some(self) -> Value:
        """Whether any trajectory waits, or is still to be moved."""
        first, second = (x.get() for x in self._waiting)
        return ((first + second) > 0) | self.b.any(self._switched.get())

    def _number(self, is_second: Value) -> Value:
        first, second = (x.get() for x in self._waiting)
        return self.b.where(is_second, second, first)

    def _set_number(self, is_second: Value, number: Value) -> None:
        for variable, here in zip(self._waiting, (~is_second, is_second), strict=True):
            variable.set_where(here, number)

    def switch(self, mask: Value) -> None:
        """Make the trajectories in the lanes of the mask wait for the other method."""
        self._switched.set(self._switched.get() | mask)
        self._free(mask)

    def _free(self, mask: Value) -> None:
        loop = self.loop
        loop.occupied.set(loop.occupied.get() & ~mask)
        loop.active.set(loop.active.get() & ~mask)

    def look(self) -> None:
        """After a turn, check how long lanes have been idle."""
        b = self.b
        switched = self._switched.get()

        def count() -> None:
            self._idle.set(self._idle.get() + b.count(switched))
            b.if_(
                self._idle.get() >= tuning.PATIENCE * b.lanes,
                lambda: self.loop.must_refill.set(True),
            )

        b.if_(b.any(switched), count, likely=False)

    def _park(self, mask: Value, is_second: Value) -> None:
        """Keep these trajectories until the lanes step with the given method; free their lanes."""
        b = self.b
        slots = b.variable(I64, 0)
        first = b.where(is_second, b.constant(self.room, I64), b.constant(0, I64))

        def assign(lane: Value) -> None:
            number = self._number(is_second)
            slots.set(b.with_entry(slots.get(), lane, first + number))
            self._set_number(is_second, number + 1)

        for_each_lane(b, mask, assign)
        for variable, buffer in self.places():
            buffer.scatter(slots.get(), mask, variable.get())
        self._free(mask)

    def refill(self, begin: Callable[[Value, Value], None]) -> None:
        """Give each free lane a trajectory that waits for the method of the lanes, or a new one,
        which begins with the first method. If there is neither, the lanes switch."""
        b, loop = self.b, self.loop
        switched = self._switched.get()

        def keep() -> None:
            # These trajectories are not at their end.
            loop.active.set(loop.active.get() | switched)
            self._park(switched, ~self.is_second.get())

        b.if_(b.any(switched), keep)
        self._switched.set(False)
        self._idle.set(0)
        has_new = loop.pool.has_more() & (self._waiting[1].get() <= self.room - 2 * b.lanes)
        is_second = self.is_second.get()
        own, others = self._number(is_second) > 0, self._number(~is_second) > 0
        here = own | (~is_second & has_new)
        elsewhere = others | (is_second & has_new)
        is_free = b.any(~loop.occupied.get())

        def change() -> None:
            self._park(loop.occupied.get(), is_second)
            self.is_second.set(~is_second)

        b.if_(is_free & ~here & elsewhere, change, likely=False)
        b.if_(self._number(self.is_second.get()) > 0, self._resume)
        has_new = loop.pool.has_more() & (self._waiting[1].get() <= self.room - 2 * b.lanes)
        takes_new = ~self.is_second.get() & has_new
        b.if_(takes_new, lambda: loop.pool.fill(loop.occupied, begin))

    def _resume(self) -> None:
        """Continue with trajectories that wait, in the free lanes."""
        b, loop = self.b, self.loop
        is_second = self.is_second.get()
        slots, found = b.variable(I64, 0), b.variable(BOOL, False)
        first = b.where(is_second, b.constant(self.room, I64), b.constant(0, I64))

        def assign(lane: Value) -> None:
            left = self._number(is_second) - 1

            def take() -> None:
                slots.set(b.with_entry(slots.get(), lane, first + left))
                found.set(b.with_entry(found.get(), lane, b.constant(True, BOOL)))
                self._set_number(is_second, left)

            b.if_(left >= 0, take)

        for_each_lane(b, ~loop.occupied.get(), assign)
        for variable, buffer in self.places():
            variable.set(buffer.gather(slots.get(), found.get(), variable.get()))
        loop.occupied.set(loop.occupied.get() | found.get())
        if loop.happening is not None:
            # A trajectory that came back may rest at the root of an event.
            loop.happening.recent.set(True)

    def leave(self, stopped: Value) -> None:
        """Give the trajectories that still wait this return code: they are not continued."""
        b, loop = self.b, self.loop
        loop.outputs.counts.scatter(loop.held.index.get(), self._switched.get(), b.spread(stopped))
        index = next(buffer for x, buffer in self.places() if x is loop.held.index)
        for side, number in enumerate(self._waiting):
            start = side * self.room
            b.for_(
                number.get(),
                lambda i, start=start: loop.outputs.counts.store(index.load(i + start), stopped),
            )
