"""Which of two methods each lane steps with: the variables of `solvers.switching`'s rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...solvers.switching import Switching
from .builder import BOOL, I32, Value, Variable
from .saved_rows import Step


if TYPE_CHECKING:
    from .loop import Loop


class Switch:
    """Of each lane, which method makes the next attempt, or made the last one, and what that is
    decided by; how many attempts `stiff` ones have been, and how many `switches` there were."""

    def __init__(self, loop: Loop):
        method = loop.problem.method
        assert isinstance(method, Switching)
        self.loop, self.b, self.method = loop, loop.b, method
        b = self.b
        self.is_stiff = b.variable(BOOL, False)
        self._count, self._looks_stiff = b.variable(I32, 0), b.variable(BOOL, False)
        self.stiff, self.switches = b.variable(I32, 0), b.variable(I32, 0)

    def variables(self) -> list[Variable]:
        """What goes on from turn to turn and decides the steps."""
        return [self.is_stiff, self._count, self._looks_stiff]

    def begin(self, fresh: Value) -> None:
        """Trajectories begin, in the lanes that are fresh."""
        for variable in (self.is_stiff, self._count, self.stiff, self.switches):
            variable.set_where(fresh, 0)

    def choose(self) -> None:
        """Choose what makes the next attempts of the lanes that go on."""
        b, loop = self.b, self.loop
        active, h = loop.active.get(), loop.h.get()
        counts = active & (loop.ntried.get() > 0)
        now = self.is_stiff.get(), self._count.get(), self._looks_stiff.get(), h
        choice = self.method.choose(b, *now, counts)
        self._count.set(choice.count)

        def switch() -> None:
            self.is_stiff.set(choice.is_stiff)
            bounded = loop.bounds(loop.held).bounded(b, choice.h)
            loop.h.set_where(choice.switched, bounded)
            self.switches.set(self.switches.get() + b.cast(choice.switched, I32))
            anew = self.method.begins_anew(choice)
            if anew is not None:
                b.if_(b.any(anew), lambda: loop.carry_anew(anew))

        b.if_(b.any(choice.switched), switch, likely=False)
        tried = active & self.is_stiff.get()
        self.stiff.set(self.stiff.get() + b.cast(tried, I32))

    def note(self, step: Step, next_h: Value) -> None:
        """What a step says of the next, of this size."""
        method, n = step.method, self.loop.problem.controlled
        assert isinstance(method, Switching)
        stretches = tuple(x[:n] for x in step.attempt.last)
        self._looks_stiff.set(method.looks_stiff(self.b, stretches, next_h))
