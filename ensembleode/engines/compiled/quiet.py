"""Steps in which no condition can change its sign, recognised without evaluating conditions within.

Consider a condition that is a component of the state, up to its sign and an added constant. Within
a step of a Runge-Kutta method it changes by `h sum_i(w_i(theta) k_i)`, which by the Cauchy-Schwarz
inequality is at most `h |w(theta)| |k|`. If the condition is farther from zero at the start, then
all points of the step that would be looked at have the sign of the start, and so has the end. The
evaluation of those points would be rounded, so the bound has a margin: the answer is the same as
that of looking, bit for bit.
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


# Bounds on the effect of rounding: on the bound itself, as a factor; and on the quantities from
# which a condition is computed, in units of the rounding error.
_SLACK, _ROUNDINGS = 1.02, 256


class Quiet:
    """Recognises steps without events.

    **Arguments:** `components`: for each condition, the component of the state that it is; None for
    any other condition, which is looked at only at the ends of a step.
    """

    def __init__(self, loop: Loop, events: Events, components: Sequence[int | None]):
        self._loop, self._events, self._components = loop, events, components

    @staticmethod
    def of(loop: Loop, events: Events) -> Quiet | None:
        """None where points within a step have to be looked at anyway, or there are no
        conditions."""
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
        """The lanes whose step has no event.

        **Arguments:** `low`: the value of each condition at the start of the step; `differ`:
        whether each condition crosses zero between the start and the end.
        """
        quiet = None
        for c, value, differs in zip(self._components, low, differ, strict=True):
            here = value.ne(0.0) & ~differs if c is None else self._is_far(step, c, value)
            quiet = here if quiet is None else quiet & here
        assert quiet is not None
        return quiet

    def _is_far(self, step: Step, c: int, value: Value) -> Value:
        """Whether a condition is so far from zero that it can't reach zero within the step."""
        b, info = self._loop.b, np.finfo(self._loop.problem.dtype)
        # Squares that underflow are less than this.
        least = float(info.tiny / info.eps)
        (k, *ks) = (stage[c] for stage in step.attempt.dense)
        squares = k * k + least
        for k in ks:
            squares = k * k + squares
        # Since 2xy <= 64 x^2 + y^2 / 64, the square of a sum is at most 65 times the one square
        # plus 65/64 times the other.
        most = 65 / 64 * (_SLACK * self._longest()) ** 2
        rounding = 65 * (_ROUNDINGS * float(info.eps)) ** 2
        y = b.spread(step.y[c])
        margin = y * (y * rounding) + least
        return value * value > (squares * step.h) * (step.h * most) + margin

    def _longest(self) -> float:
        """The largest norm of the interpolant's weights at a point of the step that would be looked
        at."""
        method = self._loop.problem.method
        assert isinstance(method, RungeKutta)
        found = [math.hypot(*method.tableau.b)]
        for n in {x.interp_points for x in self._events.continuous}:
            for j in range(1, n - 1):
                weights = method.tableau.interpolant.weights
                found.append(math.hypot(*(polynomial(w, j / (n - 1)) for w in weights)))
        return max(found)


def components_of(condition: Part) -> list[int] | None:
    """For each condition, the component of the state that it is, up to its sign and one added
    number that depends neither on the state nor on the time; None if one condition isn't of that
    form."""
    jaxpr = condition.program.jaxpr
    inputs: list[_Found] = [_nothing(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
    n = len(jaxpr.constvars)
    state: Any = jaxpr.invars[0].aval
    inputs[n] = np.arange(math.prod(state.shape)).reshape(state.shape), False
    # The time and the extras, which depend on the step, must not take part.
    for i in range(len(condition.extras) + 1):
        inputs[len(inputs) - 1 - i] = None
    (found,) = _evaluated(jaxpr, inputs)
    if found is None or (found[0] < 0).any():
        return None
    return found[0].reshape(-1).tolist()


# For each entry of an array, the index of the state's component that it is (-1 for a number that
# doesn't depend on state or time); and whether a number has been added already. None for an array
# of any other form.
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
