"""Steps in which no condition can change its sign, recognised without evaluating conditions within.

Within a step of a Runge-Kutta method the state is that at its end and `h sum_i(v_i k_i)`, where the
weights `v_i = w_i(theta) - b_i` go with the point, which is at most
`h (|sum_i v_i| |k_r| + sum_i(|v_i| |k_i - k_r|))` with the last stage `k_r`: each weight as large
as it is at one of the points that are looked at. So the state is in a box about its end, and
conditions are in balls about theirs (`balls.py`). Where zero is in none, all of these points have
the signs of the end, and so has the start. What is computed there is rounded, for which the box has
a margin: the answer is that of the looks, to the bit.
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


# What rounding does to a weight, in roundings of its coefficients.
_OF_WEIGHTS = 64


class Quiet:
    """Which steps are quiet."""

    def __init__(self, loop: Loop, events: Events, functions: CallbackFunctions):
        self._loop, self._events, self._functions = loop, events, functions

    @staticmethod
    def of(loop: Loop, events: Events, functions: CallbackFunctions) -> Quiet | None:
        """None where looks can't be spared, or there is nothing to look at."""
        method = loop.problem.method
        is_bounded = isinstance(method, RungeKutta) and not method.tableau.interpolant.extra_c
        looked = [x for x in events.continuous if x.interp_points > 2]
        if looked and not (is_bounded and all(functions.has_balls(x.conditions) for x in looked)):
            return None
        return Quiet(loop, events, functions) if events.continuous else None

    def look(self, step: Step, low: Sequence[Value]) -> tuple[list[Value], Value]:
        """The conditions at the end of the step, and the lanes in whose step there is no event.

        **Arguments:** `low`: the conditions where the step begins.
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
        """How far component `c` is from its end at most, at the points that are looked at."""
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
        """The largest weights of the differences from the last stage, and in its place that of the
        last stage itself."""
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
    """Whether a condition crosses zero from one value to another, where that makes an event."""
    rises, falls = (low < 0.0) & (high >= 0.0), (low > 0.0) & (high <= 0.0)
    if x.down is None:
        return rises
    return falls if x.up is None else rises | falls
