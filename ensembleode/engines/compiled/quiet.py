"""Steps in which no condition can change its sign, recognised without evaluating conditions within.

At the points of a Runge-Kutta step, the state differs from that at the end of the step by
`h sum_i((w_i - b_i) k_i)`, where the weights `w_i` depend on the point. This is the sum of a
fraction of the change over the step, `h sum_i(b_i k_i)`, of a multiple of the error,
`h sum_i(e_i k_i)`, and of a rest whose weights are small, since the curvature of a step is mostly
in its error. So the state is in a box around its end, and the conditions are in balls around their
values there (`balls.py`). If no ball contains zero, then all points that would be looked at have
the signs of the end, and so has the start. The computation at these points would be rounded, so the
box has a margin: the answer is the same as that of looking, bit for bit.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple, TYPE_CHECKING, TypeAlias

import numpy as np

from ...core.events import Continuous, Events
from ...solvers.runge_kutta import polynomial, RungeKutta
from .balls import ROUNDINGS, SLACK
from .builder import Value
from .callback_functions import CallbackFunctions
from .saved_rows import Step


if TYPE_CHECKING:
    from .loop import Loop


# A bound on the rounding error of a weight, in rounding errors of its coefficients.
_OF_WEIGHTS = 64

# For each callback that looks within steps: its conditions at the end of the step, and whether each
# of them is too far from zero to reach it within the step. None for other callbacks.
Foreseen: TypeAlias = list[tuple[list[Value], list[Value]] | None]


class Quiet:
    """Recognises steps without events."""

    def __init__(self, loop: Loop, events: Events, functions: CallbackFunctions):
        self._loop, self._events, self._functions = loop, events, functions

    @staticmethod
    def of(loop: Loop, events: Events, functions: CallbackFunctions) -> Quiet | None:
        """None where points within a step have to be looked at anyway, or there are no
        conditions."""
        method = loop.problem.method
        is_bounded = isinstance(method, RungeKutta) and not method.tableau.interpolant.extra_c
        looked = [x for x in events.continuous if x.interp_points > 2]
        if looked and not (is_bounded and all(functions.has_balls(x.conditions) for x in looked)):
            return None
        return Quiet(loop, events, functions) if events.continuous else None

    @property
    def asks_for_start(self) -> bool:
        """Whether conditions are evaluated at the start of a step."""
        return any(x.interp_points <= 2 for x in self._events.continuous)

    def foresee(self, step: Step) -> Foreseen:
        """What is known of an attempted step, for the callbacks that look within steps."""
        of_state = functools.cache(functools.partial(self._of_state, step))
        of_time = functools.partial(self._of_time, step)
        at = self._loop.held, step.attempt.y2, step.t2, step.accepted

        def known(x: Continuous) -> tuple[list[Value], list[Value]]:
            balls = self._functions.balls(x.conditions, *at, of_state, of_time)
            far = [c.ne(0.0) if r is None else abs(c) > r * SLACK for c, r in balls]
            return [c for c, _ in balls], far

        return [known(x) if x.interp_points > 2 else None for x in self._events.continuous]

    def look(
        self, step: Step, foreseen: Foreseen, low: Sequence[Value]
    ) -> tuple[list[Value], Value]:
        """The conditions at the end of the step, and the lanes whose step has no event.

        **Arguments:** `low`: the conditions at the start of the step, if `asks_for_start`.
        """
        at = self._loop.held, step.attempt.y2, step.t2, step.accepted
        ends, every = [], []
        for x, known in zip(self._events.continuous, foreseen, strict=True):
            if known is None:
                found = self._functions(x.conditions, *at, {})
                # (A step is looked at if the product underflows.)
                pairs = zip(low[len(ends) :], found, strict=False)
                known = list(found), [y * z > 0.0 for y, z in pairs]
            ends += known[0]
            every += known[1]
        return ends, self._loop.b.spread(functools.reduce(operator.and_, every))

    def _of_state(self, step: Step, c: int) -> Value:
        """The largest distance of component `c` from its value at the end of the step, at the
        points that would be looked at."""
        attempt, weights = step.attempt, self._weights
        stages = functools.reduce(operator.add, (abs(stage[c]) for stage in attempt.dense))
        total = self._rounded(attempt.y2[c]) + abs(attempt.y2[c] - step.y[c])
        for error, weight in zip(attempt.error, weights.of_errors, strict=False):
            total = abs(error[c]) * weight + total
        return stages * (abs(step.h) * weights.of_stages) + total

    def _of_time(self, step: Step) -> Value:
        return abs(step.t2 - step.t) + self._rounded(step.t2)

    def _rounded(self, x: Value) -> Value:
        info = np.finfo(x.dtype)
        return abs(x) * (ROUNDINGS * float(info.eps)) + float(info.tiny / info.eps)

    @functools.cached_property
    def _weights(self) -> _Weights:
        problem = self._loop.problem
        method = problem.method
        assert isinstance(method, RungeKutta)
        tableau = method.tableau
        weights = np.array(tableau.interpolant.weights)
        # (Errors are computed only for adaptive steps.)
        errors = tableau.errors if problem.adaptive else ()
        known = np.zeros((1 + len(errors), len(weights)))
        for row, found in zip(known, (tableau.b, *errors), strict=True):
            row[: len(found)] = found
        ends, errors = known[0], known[1:]
        points = {x.interp_points for x in self._events.continuous}
        thetas = np.array(sorted({j / (n - 1) for n in points if n > 2 for j in range(n - 1)}))
        at = np.array([[polynomial(tuple(w), x) for w in weights] for x in thetas])
        rest = at - thetas[:, None] * ends
        of_errors = rest @ np.linalg.pinv(errors)
        rest = np.abs(rest - of_errors @ errors)
        most = np.abs(of_errors).max(0)
        sizes = np.abs(weights).sum(1) + np.abs(ends) + most @ np.abs(errors)
        rest += sizes * (_OF_WEIGHTS * np.finfo(problem.dtype).eps)
        return _Weights(most.tolist(), float(rest.max()))


class _Weights(NamedTuple):
    """The largest weights of the error estimates, and that of any stage."""

    of_errors: list[float]
    of_stages: float


def differs(x: Continuous, low: Value, high: Value) -> Value:
    """Whether a condition crosses zero from one value to another in a direction that makes an
    event."""
    rises, falls = (low < 0.0) & (high >= 0.0), (low > 0.0) & (high <= 0.0)
    if x.down is None:
        return rises
    return falls if x.up is None else rises | falls
