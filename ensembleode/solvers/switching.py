"""Methods that switch between an explicit Runge-Kutta method and a Rosenbrock method, which makes
the steps where the problem is stiff. Each trajectory chooses for itself, by the rule of
OrdinaryDiffEq's `AutoSwitch`.

Where stability limits the steps of an explicit method, the step size times the largest eigenvalue
of the Jacobian is about the length of the method's stability region. The eigenvalue is estimated at
each step: from the stages of an explicit step, and as the largest row sum of the Jacobian of a
Rosenbrock step. (OrdinaryDiffEq's estimate from stages is NaN for a component that doesn't change,
which counts as stiff; here such a component is ignored.)

Source: Rackauckas and Nie, "DifferentialEquations.jl", J. Open Res. Softw. 5 (2017), 15. The
estimate is from Hairer and Wanner, "Solving Ordinary Differential Equations II", IV.2.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .arithmetic import Arithmetic, Components, Mask, Number, NUMBERS
from .controllers import AbstractController
from .explicit_runge_kutta import RungeKutta
from .method import carry_like, Equations, LinearAlgebra, Method, StepAttempt
from .rosenbrock import ModifiedRosenbrock, Rodas


@dataclasses.dataclass(frozen=True)
class SwitchingRule:
    """When to switch: the length of the explicit method's stability region on the negative real
    axis, its `boundary`, and the options of `AutoTsit5`."""

    boundary: float
    maxstiffstep: int
    maxnonstiffstep: int
    nonstifftol: float
    stifftol: float
    dtfac: float


class StepCounts(NamedTuple):
    """Counts of steps that were tried, whether accepted or not."""

    all: Number  # the steps of both methods
    stiff: Number = 0  # the steps of the Rosenbrock method
    switches: Number = 0  # how often the method was switched


class MethodChoice(NamedTuple):
    """Which method makes the next attempt of each trajectory."""

    is_stiff: Mask  # whether it is the Rosenbrock method
    switched: Mask  # whether it isn't the method of the previous attempt
    count: Number  # how many attempts in a row looked stiff; negative for attempts that didn't
    h: Number  # the size of the attempt, positive


@dataclasses.dataclass(frozen=True)
class Switching:
    """Two methods as one [`Method`][ensembleode.solvers.method.Method].

    Steps are made in a mode, which says which of the methods makes them (see `in_mode`). The mode
    isn't part of the carry: time loops keep it for each trajectory. The carry is the derivatives
    that both methods carry. A method that carries nothing leaves them as they are, so they are
    recomputed on a switch. The `last` of a `StepAttempt` is the `stretches` of the method that made
    it.
    """

    nonstiff: RungeKutta
    stiff: Rodas | ModifiedRosenbrock
    rule: SwitchingRule
    is_stiff: Mask = None  # a mask, true where the Rosenbrock method makes the steps; or no mode

    remembers = False
    is_implicit = True
    grid = None

    def in_mode(self, is_stiff: Mask) -> Switching:
        """The same methods in the mode in which the Rosenbrock method makes the steps where the
        mask is true, and the explicit method elsewhere."""
        return dataclasses.replace(self, is_stiff=is_stiff)

    def made_by(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        t: Number,
        h: Number,
        y2: Components,
    ) -> Switching:
        """The same methods in the mode that makes the step from `y` at `t` to `y2`, up to
        rounding."""

        def distance(method: Method) -> Number:
            carry = method.init(xp, equations, y, t)
            found = method.step(xp, equations, y, carry, t, h).y2
            return xp.total(tuple((a - b) * (a - b) for a, b in zip(found, y2, strict=True)))

        nonstiff, stiff = distance(self.nonstiff), distance(self.stiff)
        # (A method whose step is NaN didn't make it.)
        return self.in_mode((stiff < nonstiff) | (nonstiff != nonstiff))

    @property
    def order(self) -> int:
        """The order of the explicit method, which begins."""
        return self.nonstiff.order

    @property
    def embedded_order(self) -> int | None:
        return self.nonstiff.embedded_order

    @property
    def stages(self) -> int:
        return max(self.nonstiff.stages, self.stiff.stages)

    @property
    def degree(self) -> int:
        return max(self.nonstiff.degree, self.stiff.degree)

    def evaluations(self, ntried: Number) -> Number:
        """How many evaluations of the field `ntried` steps take; `ntried` may be `StepCounts`."""
        ntried, stiff, switches = ntried if isinstance(ntried, StepCounts) else StepCounts(ntried)
        to_stiff = (switches + 1) // 2
        again = self.nonstiff.evaluations(0) * (switches - to_stiff)
        again = again + self.stiff.evaluations(0) * (to_stiff - 1)
        return self.nonstiff.evaluations(ntried - stiff) + self.stiff.evaluations(stiff) + again

    def linear_algebra(self, ntried: Number) -> LinearAlgebra:
        return self.stiff.linear_algebra(ntried.stiff if isinstance(ntried, StepCounts) else 0)

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Number) -> tuple:
        method = self.nonstiff if _carries(self.nonstiff) else self.stiff
        return method.init(xp, equations, y, t)

    def begins_anew(self, choice: MethodChoice) -> Mask:
        """Where the carry is to be recomputed before the next attempt: a mask; None for nowhere."""
        if _carries(self.nonstiff) and _carries(self.stiff):
            return choice.switched
        if _carries(self.stiff):
            return choice.switched & choice.is_stiff
        return choice.switched & ~choice.is_stiff if _carries(self.nonstiff) else None

    def step(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        carry: tuple,
        t: Number,
        h: Number,
    ) -> StepAttempt:
        shapes = [_shape(x) for x in (self.nonstiff, self.stiff)]
        n_dense, n_errors = max(x.dense for x in shapes), max(x.errors for x in shapes)

        def made(method: Any, equations: Equations) -> tuple:
            attempt = method.step(xp, equations, y, carry if _carries(method) else (), t, h)
            assert attempt.failed is None
            # (Of the estimates of the error, only the largest counts, so one may be repeated.)
            error, dense = _padded(attempt.error, n_errors), _padded(attempt.dense, n_dense)
            stretches = method.stretches(xp, equations, attempt.last)
            return attempt.y2, attempt.carry or carry, error, dense, stretches

        *found, stretches = self._by_mode(xp, equations, made)
        return StepAttempt(*found, last=stretches)

    def dense(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        dense: tuple,
        t: Number,
        h: Number,
    ) -> tuple:
        size = max(_shape(x).within for x in (self.nonstiff, self.stiff))

        def made(method: Method, equations: Equations) -> tuple:
            own = dense[: _shape(method).dense]
            return _padded(method.dense(xp, equations, y, own, t, h), size)

        return self._by_mode(xp, equations, made)

    def _by_mode(self, xp: Arithmetic, equations: Equations, made: Callable) -> Any:
        """`made(method, equations)` for the method that makes the steps."""
        by = [functools.partial(made, method) for method in (self.stiff, self.nonstiff)]
        return equations.either(xp, self.is_stiff, *by)

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Number, theta: Number
    ) -> Components:
        def by(method: Method) -> Components:
            own = dense[: _shape(method).within]
            return method.interpolate(xp, y, own, h, theta)

        pairs = zip(by(self.stiff), by(self.nonstiff), strict=True)
        return tuple(xp.where(self.is_stiff, a, b) for a, b in pairs)

    def looks_stiff(self, xp: Arithmetic, stretches: tuple, h: Number) -> Mask:
        """Whether stability limits the step after an attempt.

        **Arguments:** `stretches`: those of the attempt, of the components that step-size control
        looks at; `h`: the size of the step.
        """
        rule = self.rule
        share = h * (1 / (rule.boundary * rule.nonstifftol))
        if rule.stifftol != rule.nonstifftol:
            share = xp.where(self.is_stiff, h * (1 / (rule.boundary * rule.stifftol)), share)
        calm = [k * share <= y for y, k in zip(*stretches, strict=True)]
        # (NaN looks stiff.)
        return ~functools.reduce(operator.and_, calm)

    def choose(
        self, xp: Arithmetic, count: Number, looks_stiff: Mask, h: Number, counts: Number
    ) -> MethodChoice:
        """Choose the method of the next attempt.

        **Arguments:** `count`: that of the choice before; `looks_stiff`: see the method of this
        name; `h`: the proposed size of the next attempt; `counts`: a mask, true where an attempt
        was made and another is to follow.
        """
        rule, is_stiff = self.rule, self.is_stiff
        one_more = xp.where(count < 0, 1, count + 1)
        one_less = xp.where(count > 0, -1, count - 1)
        count = xp.where(counts, xp.where(looks_stiff, one_more, one_less), count)
        to_stiff = counts & ~is_stiff & (count > rule.maxstiffstep)
        back = counts & is_stiff & (count < -rule.maxnonstiffstep)
        h = xp.where(to_stiff, h * rule.dtfac, xp.where(back, h * (1 / rule.dtfac), h))
        return MethodChoice((is_stiff | to_stiff) & ~back, to_stiff | back, count, h)


class _Shape(NamedTuple):
    """Sizes of what a method returns."""

    dense: int  # the number of states of the dense output
    within: int  # the same after `Method.dense`
    errors: int  # the number of error estimates


@functools.cache
def _shape(method: Method) -> _Shape:
    one, none = np.float64(1), ((), None)
    equations = Equations(
        lambda y, t: y,
        lambda y, t, dy, dt: y,
        lambda y, t: none,
        lambda jacobian, gamma_h: (),
        lambda factors, b: b,
    )
    y = (one,)
    attempt = method.step(NUMBERS, equations, y, method.init(NUMBERS, equations, y, one), one, one)
    within = method.dense(NUMBERS, equations, y, attempt.dense, one, one)
    return _Shape(len(attempt.dense), len(within), len(attempt.error))


def _carries(method: Method) -> bool:
    """Whether a method carries anything."""
    return bool(jax.tree.leaves(carry_like(method, 1, np.float64)))


def _padded(states: tuple, size: int) -> tuple:
    """The elements, with the first one repeated at the end to make up this number."""
    return states + states[:1] * (size - len(states))


class SwitchingController(AbstractController):
    """The step-size control of a `Switching`. Each of its methods has its own control with its own
    memory, which doesn't change while the other method makes the steps."""

    nonstiff: AbstractController
    stiff: AbstractController
    is_stiff: Mask = None  # see `Switching`

    def in_mode(self, is_stiff: Mask) -> SwitchingController:
        """See `Switching.in_mode`."""
        return SwitchingController(self.nonstiff, self.stiff, is_stiff)

    def initial_memory(self) -> tuple[float, ...]:
        return self.nonstiff.initial_memory() + self.stiff.initial_memory()

    def _of_each(self, memory: tuple) -> tuple[tuple, tuple]:
        n = len(self.nonstiff.initial_memory())
        return memory[:n], memory[n:]

    def accepts(self, xp: Arithmetic, squared: Number, memory: tuple) -> Mask:
        before, other = self._of_each(memory)
        explicit = self.nonstiff.accepts(xp, squared, before)
        return xp.where(self.is_stiff, self.stiff.accepts(xp, squared, other), explicit)

    def factor(
        self, xp: Arithmetic, log_error: Number, memory: tuple, accepted: Mask, is_first: Mask
    ) -> tuple[Number, tuple]:
        before, other = self._of_each(memory)
        by_explicit, after = self.nonstiff.factor(xp, log_error, before, accepted, is_first)
        by_stiff, other_after = self.stiff.factor(xp, log_error, other, accepted, is_first)
        kept = [xp.where(self.is_stiff, a, b) for a, b in zip(before, after, strict=True)]
        kept += [xp.where(self.is_stiff, b, a) for a, b in zip(other, other_after, strict=True)]
        return xp.where(self.is_stiff, by_stiff, by_explicit), tuple(kept)
