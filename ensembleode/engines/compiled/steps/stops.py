"""The position of each lane among its known times, `tstops` and `d_discontinuities`: the next row
of each of these sorted tables in memory."""

import numpy as np

from ....problem.number_table import of_kind
from ....solvers.time import end_of_stretch, next_time
from ..llvm.builder import BOOL, Builder, I64, Value, Variable
from .layout import LaneNumbers, NumbersLayout


_NAMES = [row.name for row in of_kind("stops")]


def known_times(layout: NumbersLayout) -> list[str]:
    """The names of the tables that these trajectories have."""
    return [name for name in _NAMES if layout.find(name) is not None]


class LaneStops:
    """The variables that lanes have for their known times: the end `tstop` of the current stretch
    of time, beyond which no step goes, and whether `f` may jump there."""

    def __init__(self, b: Builder, held: LaneNumbers, dtype: np.dtype):
        self.b, self._held = b, held
        self.tstop, self.jumps = b.variable(dtype, 0), b.variable(BOOL, False)
        self._rows = {name: b.variable(I64, 0) for name in known_times(held.layout)}

    def variables(self) -> list[Variable]:
        return [self.tstop, self.jumps, *self._rows.values()]

    def begin(self, fresh: Value, t: Variable) -> Value:
        """Begin trajectories in the lanes `fresh`, and return what `arrive` returns."""
        for row in self._rows.values():
            row.set_where(fresh, 0)
        return self.arrive(fresh, t)

    def arrive(self, here: Value, t: Variable) -> Value:
        """In the lanes `here`, whose stretch of time ends at `t`, go on to the next stretch. Where
        `f` jumps, it begins a unit in the last place later. Returns the lanes where `f` jumps."""
        b, held = self.b, self._held
        t1 = held.number("t1")
        direction = b.sign(t1 - held.number("t0"))
        end = t.get()
        for name in reversed(self._rows):  # (discontinuities first)
            self._pass(name, t, direction, here)
        jumps = here & t.get().ne(end)
        ahead = {name: self._next(name, direction) for name in self._rows}
        tstop = end_of_stretch(b, list(ahead.values()), t1, direction)
        self.tstop.set_where(here, tstop)
        if "d_discontinuities" in ahead:
            # (A jump at the end is not in the table.)
            at_jump = tstop.eq(ahead["d_discontinuities"]) | tstop.eq(t1)
            self.jumps.set_where(here, at_jump)
        return jumps

    def _pass(self, name: str, t: Variable, direction: Value, here: Value) -> None:
        """Go to the first row after the time `t`, which moves where `f` jumps at `t`."""
        b, row = self.b, self._rows[name]

        def due() -> Value:
            return here & (direction * (t.get() - self._next(name, direction)) >= 0.0)

        def one() -> None:
            passed = due()
            if name == "d_discontinuities":
                jumps = passed & self._next(name, direction).eq(t.get())
                t.set_where(jumps, next_time(b, t.get(), direction))
            row.set(row.get() + b.cast(passed, I64))

        b.while_(lambda: b.any(due()), one)

    def _next(self, name: str, direction: Value) -> Value:
        """The time of the next row; infinitely far where there is none."""
        b, row, size = self.b, self._rows[name].get(), self._held.size(name)
        found = self._held.element(name, b.minimum(row, size - 1))
        return b.where(row < size, found, direction * np.inf)
