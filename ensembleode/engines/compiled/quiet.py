"""Steps in which no condition can change its sign, recognised without evaluating conditions within.

At the points of a Runge-Kutta step, the state differs from that at the end of the step by
`h sum_i(v_i k_i)`, where the weights `v_i = w_i(theta) - b_i` depend on the point. With the last
stage `k_r`, the difference is at most `h (|sum_i v_i| |k_r| + sum_i(|v_i| |k_i - k_r|))`. Each
weight is bounded by its largest magnitude at the points that would be looked at. So the state is in
a box around its end, and the conditions are in balls around their values there (`balls.py`). If no
ball contains zero, then all of these points have the signs of the end, and so has the start. The
computation at these points would be rounded, so the box has a margin: the answer is the same as
that of looking, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

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

    def look(self, step: Step, low: Sequence[Value]) -> tuple[list[Value], Value]:
        """The conditions at the end of the step, and the lanes whose step has no event.

        **Arguments:** `low`: the conditions at the start of the step.
        """
        b, loop, y2, mask = self._loop.b, self._loop, step.attempt.y2, step.accepted
        of_state = functools.cache(functools.partial(self._of_state, step))
        ends, quiet = [], None
        for x in self._events.continuous:
            here = low[len(ends) : len(ends) + x.length]
            if x.interp_points > 2:
                of_time = functools.partial(self._of_time, step)
                found = self._functions.balls(
                    x.conditions, loop.held, y2, step.t2, mask, of_state, of_time
                )
                ends += [value for value, _ in found]
                far = [
                    value.ne(0.0) if radius is None else abs(value) > radius * SLACK
                    for value, radius in found
                ]
            else:
                found = self._functions(x.conditions, loop.held, y2, step.t2, mask, {})
                ends += found
                far = [z.ne(0.0) & ~differs(x, z, y) for z, y in zip(here, found, strict=True)]
            for z in far:
                quiet = z if quiet is None else quiet & z
        assert quiet is not None
        return ends, b.spread(quiet)

    def _of_state(self, step: Step, c: int) -> Value:
        """The largest distance of component `c` from its value at the end of the step, at the
        points that would be looked at."""
        (*ks, last) = (stage[c] for stage in step.attempt.dense)
        (*weights, of_last) = self._weights
        total = abs(last) * of_last
        for k, weight in zip(ks, weights, strict=True):
            total = abs(k - last) * weight + total
        return total * abs(step.h) + self._rounded(step.attempt.y2[c])

    def _of_time(self, step: Step) -> Value:
        return abs(step.t2 - step.t) + self._rounded(step.t2)

    def _rounded(self, x: Value) -> Value:
        info = np.finfo(self._loop.problem.dtype)
        return abs(x) * (ROUNDINGS * float(info.eps)) + float(info.tiny / info.eps)

    @functools.cached_property
    def _weights(self) -> list[float]:
        """The largest weight of each stage's difference from the last stage; and for the last
        stage, the largest weight of that stage itself."""
        method, dtype = self._loop.problem.method, self._loop.problem.dtype
        assert isinstance(method, RungeKutta)
        weights = np.array(method.tableau.interpolant.weights)
        ends = np.zeros(len(weights))
        ends[: len(method.tableau.b)] = method.tableau.b
        points = {x.interp_points for x in self._events.continuous}
        thetas = sorted({j / (n - 1) for n in points for j in range(n - 1) if n > 2})
        found = np.array([[polynomial(tuple(w), x) for w in weights] for x in thetas]) - ends
        rounding = np.abs(weights).sum(1) * (_OF_WEIGHTS * np.finfo(dtype).eps)
        most = np.abs(found).max(0) + rounding
        most[-1] = np.abs(found.sum(1)).max() + rounding.sum()
        return most.tolist()


def differs(x: Continuous, low: Value, high: Value) -> Value:
    """Whether a condition crosses zero from one value to another in a direction that makes an
    event."""
    rises, falls = (low < 0.0) & (high >= 0.0), (low > 0.0) & (high <= 0.0)
    if x.down is None:
        return rises
    return falls if x.up is None else rises | falls
