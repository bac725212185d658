"""Which of two methods the lanes step with: the variables of the rule in `solvers.switching`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ....solvers.switching import Switching
from ..llvm.builder import BOOL, I32, Value, Variable
from ..steps.saved_rows import TriedStep
from .parking import Parking


if TYPE_CHECKING:
    from .loop import Loop


class MethodSwitch:
    """Which of two methods makes the next attempt, or made the last one. If results are saved and
    there are several lanes, all lanes step with the same method, and the trajectories that need the
    other one wait in `parking`. `stiff` counts a trajectory's attempts by the Rosenbrock method,
    `switches` its changes of method."""

    def __init__(self, loop: Loop):
        method = loop.problem.method
        assert isinstance(method, Switching)
        self.loop, self.b, self.method = loop, loop.b, method
        b = self.b
        parks = loop.outputs is not None and b.lanes > 0
        self.is_stiff = b.variable(BOOL, False, of_lanes=not parks)
        self._count = b.variable(I32, 0)
        self.stiff, self.switches = b.variable(I32, 0), b.variable(I32, 0)
        self.parking = Parking(loop, self.is_stiff) if parks else None
        # While code for one of the methods is written: whether that is the Rosenbrock method.
        self._known: Value | None = None

    def now(self) -> Value:
        """Where the Rosenbrock method makes the attempt: a mask, or a constant."""
        return self.is_stiff.get() if self._known is None else self._known

    def by_method(self, write: Callable[[], object]) -> None:
        """Write the code of a turn once for each method, where all lanes have the same one."""

        def known(is_stiff: bool) -> None:
            self._known = self.b.constant(is_stiff, BOOL)
            write()
            self._known = None

        self.b.if_(self.is_stiff.get(), lambda: known(True), lambda: known(False))

    def variables(self) -> list[Variable]:
        """The variables that are kept from turn to turn."""
        return [self.is_stiff, self._count, self.stiff, self.switches]

    def begin(self, fresh: Value) -> None:
        """Set the variables for the trajectories that begin in the lanes `fresh`."""
        for variable in (self._count, self.stiff, self.switches):
            variable.set_where(fresh, 0)
        if self.parking is None:
            self.is_stiff.set_where(fresh, False)

    def count(self, active: Value) -> None:
        """Count the attempt that the active lanes make."""
        tried = self.b.spread(active & self.now())
        self.stiff.set(self.stiff.get() + self.b.cast(tried, I32))

    def choose(self, step: TriedStep) -> None:
        """Choose the method of the attempt after this step, in the lanes that go on."""
        b, loop, method = self.b, self.loop, step.method
        assert isinstance(method, Switching)
        counts, h = loop.active.get() & loop.occupied.get(), loop.h.get()
        n = loop.problem.controlled
        looks_stiff = method.looks_stiff(b, tuple(x[:n] for x in step.attempt.last), h)
        choice = method.choose(b, self._count.get(), looks_stiff, h, counts)
        self._count.set(choice.count)

        def switch() -> None:
            loop.h.set_where(choice.switched, loop.bounds(loop.held).bounded(b, choice.h))
            self.switches.set(self.switches.get() + b.cast(choice.switched, I32))
            if (anew := method.begins_anew(choice)) is not None:
                b.if_(b.any(anew), lambda: loop.carry_anew(anew))
            if self.parking is None:
                self.is_stiff.set(choice.is_stiff)
            else:
                self.parking.switch(choice.switched)

        b.if_(b.any(choice.switched), switch, likely=False)
        if self.parking is not None:
            self.parking.look()
