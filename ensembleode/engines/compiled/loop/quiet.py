"""Recognises quiet steps, in which no condition can cross zero, without evaluating conditions at
points within the step.

The states within a step are in a box around its end (`solvers/within_step_bounds.py`), and the
conditions are in balls around their values there (`balls.py`). If no ball contains zero, the
conditions have the same signs at the start, at the end and at all points within the step where they
would be evaluated. These evaluations would be rounded, so the box has a margin: the result is the
same, bit for bit.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....plan.events import TracedCallbacks, TracedContinuous
from ....solvers.within_step_bounds import Reach, reach
from ..llvm.across_lanes import largest_magnitude
from ..llvm.builder import Value
from ..steps.saved_rows import TriedStep
from .balls import rounded, SLACK
from .callback_functions import CallbackFunctions


if TYPE_CHECKING:
    from .loop import Loop


class QuietTest:
    """Recognises steps without events. `within`: how far states within a step are from its end;
    None where no condition that is evaluated within steps has bounds."""

    def __init__(
        self,
        loop: Loop,
        events: TracedCallbacks,
        functions: CallbackFunctions,
        within: Reach | None,
    ):
        self._loop, self._events, self._functions, self._within = loop, events, functions, within
        # The numbers of the conditions that have to be evaluated within every step.
        self.unforeseen = frozenset(
            k
            for i, x, places in events.slices()
            if x.interp_points > 2
            for component, k in enumerate(range(places.start, places.stop))
            if component not in self._bounded(x)
        )

    @staticmethod
    def make(loop: Loop, events: TracedCallbacks, functions: CallbackFunctions) -> QuietTest | None:
        """A test of these events; None where every condition has to be evaluated within every step,
        or there are none."""
        looked = [x for x in events.continuous if x.interp_points > 2]
        within, p = None, loop.problem
        if any(functions.bounded(x.conditions) for x in looked):
            ns = {x.interp_points for x in looked}
            points = sorted({j / (n - 1) for n in ns for j in range(n - 1)})
            within = reach(p.method, points, p.dtype, has_errors=p.adaptive)
        found = QuietTest(loop, events, functions, within)
        return found if len(found.unforeseen) < events.components else None

    @property
    def asks_for_start(self) -> bool:
        """Whether conditions are evaluated at the start of a step."""
        looks_at_ends = any(x.interp_points <= 2 for x in self._events.continuous)
        return looks_at_ends or bool(self.unforeseen)

    def _bounded(self, x: TracedContinuous) -> tuple[int, ...]:
        """The components of a callback's condition that have bounds."""
        return () if self._within is None else self._functions.bounded(x.conditions)

    def look(self, step: TriedStep, low: Sequence[Value]) -> tuple[list[Value], Value]:
        """The conditions at the end of the step, without those that are `unforeseen`; and the lanes
        in whose step none of them has an event. `low`: the conditions at the start, if
        `asks_for_start`."""
        of_state = functools.cache(functools.partial(self._of_state, step))

        def of_time() -> Value:
            return abs(step.t2 - step.t) * SLACK + rounded(step.t2)

        at = self._loop.held, step.attempt.y2, step.t2, step.accepted
        ends, quiet = [], []
        for _, x, places in self._events.slices():
            if x.interp_points <= 2:
                found = self._functions(x.conditions, *at, {})
                # (A step is looked at if the product underflows.)
                quiet += [y * z > 0.0 for y, z in zip(low[places], found, strict=True)]
                ends += found
            elif self._bounded(x):
                balls = self._functions.balls(x.conditions, *at, of_state, of_time)
                quiet += [c.ne(0.0) if r is None else abs(c) > r for c, r in balls]
                ends += [c for c, _ in balls]
        return ends, self._loop.b.spread(functools.reduce(operator.and_, quiet))

    def _of_state(self, step: TriedStep, c: int) -> Value:
        """The largest distance of component `c` within the step from its value at the end."""
        attempt, within = step.attempt, self._within
        assert within is not None
        total = rounded(attempt.y2[c])
        if within.of_error:
            total = abs(attempt.error[0][c]) * (within.of_error * SLACK) + total
        stages = tuple(attempt.dense[i][c] for i in within.stages)
        largest = largest_magnitude(self._loop.b, stages)
        return largest * (abs(step.h) * (within.of_stages * SLACK)) + total


def differs(x: TracedContinuous, low: Value, high: Value) -> Value:
    """Whether a condition crosses zero in a direction that makes an event."""
    rises, falls = (low < 0.0) & (high >= 0.0), (low > 0.0) & (high <= 0.0)
    if x.down is None:
        return rises
    return falls if x.up is None else rises | falls
