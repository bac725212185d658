"""Steps in which no condition can change its sign: known without a look within.

For a condition that is a component of the state, up to its sign and a number that is known: within
a step of a Runge-Kutta method it moves by `h sum_i(w_i(theta) k_i)`, by the inequality of Cauchy
and Schwarz no more than `h |w(theta)| |k|`. Where it is farther from zero, all points of the step
that are looked at have the sign that it begins with, and so has the end. What is computed there is
rounded, so the bound has a margin: the answer is that of the looks, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TYPE_CHECKING

import jax.extend.core as jex
import numpy as np

from ...core.events import Events, Part
from ...fields.equations import called, used
from ...fields.movements import MOVEMENTS
from ...solvers.runge_kutta import polynomial, RungeKutta
from .builder import Value


if TYPE_CHECKING:
    from .loop import Loop
    from .saved_rows import Step


# More than all that rounding does to a bound, of its size; and of what a condition is computed
# from, in roundings of one.
_SLACK, _ROUNDINGS = 1.02, 256


class Quiet:
    """Which steps are quiet.

    **Arguments:** `components`: of each condition the component that it is; None where it is
    something else, of which the ends alone are looked at.
    """

    def __init__(self, loop: Loop, events: Events, components: Sequence[int | None]):
        self._loop, self._events, self._components = loop, events, components

    @staticmethod
    def of(loop: Loop, events: Events) -> Quiet | None:
        """None where looks can't be spared, or there is nothing to look at."""
        found: list[int | None] = []
        method = loop.problem.method
        is_bounded = isinstance(method, RungeKutta) and not method.tableau.interpolant.extra_c
        for x in events.continuous:
            components = components_of(x.conditions) if is_bounded else None
            if components is None and x.interp_points > 2:
                return None
            found += components or [None] * x.length
        return Quiet(loop, events, found) if found else None

    def steps(self, step: Step, low: Sequence[Value], differ: Sequence[Value]) -> Value:
        """The lanes in whose step there is no event.

        **Arguments:** `low`: each condition where the step begins; `differ`: whether it crosses
        zero from there to the end.
        """
        quiet = None
        for c, value, differs in zip(self._components, low, differ, strict=True):
            here = value.ne(0.0) & ~differs if c is None else self._is_far(step, c, value)
            quiet = here if quiet is None else quiet & here
        assert quiet is not None
        return quiet

    def _is_far(self, step: Step, c: int, value: Value) -> Value:
        """Whether a condition is so far from zero that it can't get there within the step."""
        b, info = self._loop.b, np.finfo(self._loop.problem.dtype)
        # (Squares that underflow are less than this.)
        least = float(info.tiny / info.eps)
        (k, *ks) = (stage[c] for stage in step.attempt.dense)
        squares = k * k + least
        for k in ks:
            squares = k * k + squares
        # The square of a sum is at most 65 of one term's, and 65/64 of the other's.
        most = 65 / 64 * (_SLACK * self._longest()) ** 2
        rounding = 65 * (_ROUNDINGS * float(info.eps)) ** 2
        y = b.spread(step.y[c])
        margin = y * (y * rounding) + least
        return value * value > (squares * step.h) * (step.h * most) + margin

    def _longest(self) -> float:
        """The largest norm of weights at a point of the step that is looked at."""
        method = self._loop.problem.method
        assert isinstance(method, RungeKutta)
        found = [math.hypot(*method.tableau.b)]
        for n in {x.interp_points for x in self._events.continuous}:
            for j in range(1, n - 1):
                weights = method.tableau.interpolant.weights
                found.append(math.hypot(*(polynomial(w, j / (n - 1)) for w in weights)))
        return max(found)


def components_of(condition: Part) -> list[int] | None:
    """Which component of the state each condition is, up to its sign and one number that neither
    state nor time has a part in; None where one is not."""
    jaxpr = condition.program.jaxpr
    inputs: list[_Found] = [_nothing(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
    n = len(jaxpr.constvars)
    state: Any = jaxpr.invars[0].aval
    inputs[n] = np.arange(math.prod(state.shape)).reshape(state.shape), False
    # (Time, and what is read of the step besides, are none of it.)
    for i in range(len(condition.extras) + 1):
        inputs[len(inputs) - 1 - i] = None
    (found,) = _evaluated(jaxpr, inputs)
    if found is None or (found[0] < 0).any():
        return None
    return found[0].reshape(-1).tolist()


# Of an array which component each of its entries is, -1 where it is a number, and whether one has
# been added; None where it is something else.
_Found = tuple[np.ndarray, bool] | None


def _nothing(aval: Any) -> _Found:
    return np.full(aval.shape, -1), False


def _evaluated(jaxpr: Any, ins: Sequence[_Found]) -> list[_Found]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], ins, strict=True))

    def read(atom: Any) -> _Found:
        return _nothing(atom.aval) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in used(jaxpr)[0]:
        env.update(zip(eqn.outvars, _equation(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _equation(eqn: Any, ins: list[_Found]) -> list[_Found]:
    name = eqn.primitive.name
    unknown: list[_Found] = [None] * len(eqn.outvars)
    known = [x for x in ins if x is not None]
    if len(known) < len(ins):
        return unknown
    if all((x < 0).all() for x, _ in known):
        return [_nothing(v.aval) for v in eqn.outvars]
    inner = called(eqn)
    if inner is not None:
        consts = [_nothing(v.aval) for v in getattr(inner, "jaxpr", inner).constvars]
        return _evaluated(getattr(inner, "jaxpr", inner), [*consts, *ins])
    added = any(x for _, x in known)
    if name in MOVEMENTS:
        outs = MOVEMENTS[name](np, [x for x, _ in known], eqn.params, ())
        return [(np.asarray(x), added) for x in outs]
    if name in ("copy", "neg") or (
        name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    ):
        return [known[0]]
    if name in ("add", "sub"):
        (x, _), (y, _) = known
        if not (added or ((x >= 0) & (y >= 0)).any()):
            return [(np.maximum(x, y), True)]
    return unknown
