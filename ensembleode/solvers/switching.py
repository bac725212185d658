"""Two methods, of which each step takes one: an explicit Runge-Kutta method, and a Rosenbrock
method where the problem is stiff. Each trajectory decides for itself, as by OrdinaryDiffEq's
`AutoSwitch`.

Where stability bounds the steps of the explicit method they are about as long as its stability
region is wide, over the largest eigenvalue of the Jacobian. That is estimated at each step, from
the stages of an explicit one, and as the largest sum of a row of the Jacobian of the other. (Of a
component that rests OrdinaryDiffEq's estimate from stages is NaN, which counts as stiff; here it
says nothing.)

Source: Rackauckas and Nie, "DifferentialEquations.jl", J. Open Res. Softw. 5 (2017), 15; of the
estimate, Hairer and Wanner, "Solving Ordinary Differential Equations II", IV.2.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .arithmetic import Arithmetic, Components, NUMBERS
from .controllers import AbstractController
from .method import Attempt, carry_like, Equations, LinearAlgebra
from .rosenbrock import ModifiedRosenbrock, Rodas
from .runge_kutta import RungeKutta


@dataclasses.dataclass(frozen=True)
class Rule:
    """When to switch.

    - `boundary`: the length of the explicit method's stability region on the negative real axis.
    - The others: see `auto.AutoTsit5`.
    """

    boundary: float
    maxstiffstep: int = 10
    maxnonstiffstep: int = 3
    nonstifftol: float = 0.9
    stifftol: float = 0.9
    dtfac: float = 2.0


class Tried(NamedTuple):
    """How many steps were tried, accepted or not: all of them, and those of the Rosenbrock method;
    and how many switches there were."""

    all: Any
    stiff: Any = 0
    switches: Any = 0


class Choice(NamedTuple):
    """Which method makes the next attempt, of each trajectory.

    - `is_stiff`: whether it is the Rosenbrock method; `switched`: whether that is another than of
        the attempt before.
    - `count`: so many attempts in a row have looked stiff, or, negative, have not.
    - `h`: how long it is to be, positive.
    """

    is_stiff: Any
    switched: Any
    count: Any
    h: Any


@dataclasses.dataclass(frozen=True)
class Switching:
    """Both methods as one [`Method`][ensembleode.solvers.method.Method].

    It makes steps in a mode (see `in_mode`); which, is none of what it carries, but a number that
    time loops have of each trajectory. What is carried are the derivatives that both carry; of
    a method without they are those of an earlier step, and made anew on a switch. The `last` of an
    `Attempt` are the `stretches` of the method that made it.

    - `is_stiff`: of the steps that it makes, a mask; None where it makes none.
    """

    nonstiff: RungeKutta
    stiff: Rodas | ModifiedRosenbrock
    rule: Rule
    is_stiff: Any = None

    remembers = False
    is_implicit = True

    def in_mode(self, is_stiff: Any) -> Switching:
        """That which makes the steps of the Rosenbrock method where the mask is true, and of the
        other elsewhere."""
        return dataclasses.replace(self, is_stiff=is_stiff)

    def made_by(
        self, xp: Arithmetic, equations: Equations, y: Components, t: Any, h: Any, y2: Components
    ) -> Switching:
        """That which makes the step from `y` at `t` to `y2`, to rounding."""

        def distance(method: Any) -> Any:
            carry = method.init(xp, equations, y, t)
            found = method.step(xp, equations, y, carry, t, h).y2
            return xp.total(tuple((a - b) * (a - b) for a, b in zip(found, y2, strict=True)))

        # (An explicit step that overflows is not it.)
        return self.in_mode(~(distance(self.nonstiff) <= distance(self.stiff)))

    @property
    def order(self) -> int:
        """Of the method that begins."""
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

    def evaluations(self, ntried: Any) -> Any:
        """How many evaluations of the field so many steps take, which may be a `Tried`."""
        ntried, stiff, switches = ntried if isinstance(ntried, Tried) else Tried(ntried)
        to_stiff = (switches + 1) // 2
        again = self.nonstiff.evaluations(0) * (switches - to_stiff)
        again = again + self.stiff.evaluations(0) * (to_stiff - 1)
        return self.nonstiff.evaluations(ntried - stiff) + self.stiff.evaluations(stiff) + again

    def linear_algebra(self, ntried: Any) -> LinearAlgebra:
        return self.stiff.linear_algebra(ntried.stiff if isinstance(ntried, Tried) else 0)

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Any) -> tuple:
        method = self.nonstiff if _carries(self.nonstiff) else self.stiff
        return method.init(xp, equations, y, t)

    def begins_anew(self, choice: Choice) -> Any:
        """Where what is carried is made anew before an attempt: a mask; None: nowhere."""
        if _carries(self.nonstiff) and _carries(self.stiff):
            return choice.switched
        if _carries(self.stiff):
            return choice.switched & choice.is_stiff
        return choice.switched & ~choice.is_stiff if _carries(self.nonstiff) else None

    def step(
        self, xp: Arithmetic, equations: Equations, y: Components, carry: tuple, t: Any, h: Any
    ) -> Attempt:
        shapes = [_shape(x) for x in (self.nonstiff, self.stiff)]
        n_dense, n_errors = max(x.dense for x in shapes), max(x.errors for x in shapes)

        def by(method: Any) -> Callable[[Equations], tuple]:
            def made(equations: Equations) -> tuple:
                own = carry if _carries(method) else ()
                attempt = method.step(xp, equations, y, own, t, h)
                assert attempt.failed is None
                carried = attempt.carry or carry
                # (The largest of several estimates counts.)
                error = attempt.error + attempt.error[:1] * (n_errors - len(attempt.error))
                dense = _padded(attempt.dense, n_dense)
                stretches = method.stretches(xp, equations, attempt.last)
                return attempt.y2, carried, error, dense, stretches

            return made

        made = equations.either(xp, self.is_stiff, by(self.stiff), by(self.nonstiff))
        y2, carry, error, dense, stretches = made
        return Attempt(y2, carry, error, dense, last=stretches)

    def dense(
        self, xp: Arithmetic, equations: Equations, y: Components, dense: tuple, t: Any, h: Any
    ) -> tuple:
        size = max(_shape(x).within for x in (self.nonstiff, self.stiff))

        def by(method: Any) -> Callable[[Equations], tuple]:
            def made(equations: Equations) -> tuple:
                own = dense[: _shape(method).dense]
                return _padded(method.dense(xp, equations, y, own, t, h), size)

            return made

        return equations.either(xp, self.is_stiff, by(self.stiff), by(self.nonstiff))

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Any, theta: Any
    ) -> Components:
        def by(method: Any) -> Components:
            own = dense[: _shape(method).within]
            return method.interpolate(xp, y, own, h, theta)

        pairs = zip(by(self.stiff), by(self.nonstiff), strict=True)
        return tuple(xp.where(self.is_stiff, a, b) for a, b in pairs)

    def looks_stiff(self, xp: Arithmetic, stretches: tuple, h: Any) -> Any:
        """Whether the step after an attempt, of the size `h`, is one that stability bounds.

        **Arguments:** `stretches`: those of the attempt, of the components that count.
        """
        rule = self.rule
        share = h * (1 / (rule.boundary * rule.nonstifftol))
        if rule.stifftol != rule.nonstifftol:
            share = xp.where(self.is_stiff, h * (1 / (rule.boundary * rule.stifftol)), share)
        calm = [k * share <= y for y, k in zip(*stretches, strict=True)]
        # (What is NaN looks stiff.)
        return ~functools.reduce(operator.and_, calm)

    def choose(self, xp: Arithmetic, count: Any, looks_stiff: Any, h: Any, counts: Any) -> Choice:
        """Which method makes the attempt after one of this, of the size `h`.

        **Arguments:** `count`: until then; `looks_stiff`: see above; `counts`: where there was an
        attempt, and the next is to come.
        """
        rule, is_stiff = self.rule, self.is_stiff
        one_more = xp.where(count < 0, 1, count + 1)
        one_less = xp.where(count > 0, -1, count - 1)
        count = xp.where(counts, xp.where(looks_stiff, one_more, one_less), count)
        to_stiff = counts & ~is_stiff & (count > rule.maxstiffstep)
        back = counts & is_stiff & (count < -rule.maxnonstiffstep)
        h = xp.where(to_stiff, h * rule.dtfac, xp.where(back, h * (1 / rule.dtfac), h))
        return Choice((is_stiff | to_stiff) & ~back, to_stiff | back, count, h)


class _Shape(NamedTuple):
    """Of how many states dense output is made, before and after `Method.dense`; and how many
    estimates of the error there are."""

    dense: int
    within: int
    errors: int


@functools.cache
def _shape(method: Any) -> _Shape:
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


def _carries(method: Any) -> bool:
    """Whether a method carries anything."""
    return bool(jax.tree.leaves(carry_like(method, 1, np.float64)))


def _padded(states: tuple, size: int) -> tuple:
    """So many states, the first again and again in the place of those that there are not."""
    return states + states[:1] * (size - len(states))


class SwitchingController(AbstractController):
    """The step-size control of a `Switching`: each of its methods has its own, with its own memory,
    which rests while the other goes on.

    - `nonstiff`, `stiff`: of both methods. `is_stiff`: see `Switching`.
    """

    nonstiff: AbstractController
    stiff: AbstractController
    is_stiff: Any = None

    def in_mode(self, is_stiff: Any) -> SwitchingController:
        """That which controls the steps of the Rosenbrock method where the mask is true, and of the
        other elsewhere."""
        return SwitchingController(self.nonstiff, self.stiff, is_stiff)

    def initial_memory(self) -> tuple[float, ...]:
        return self.nonstiff.initial_memory() + self.stiff.initial_memory()

    def _of_each(self, memory: tuple) -> tuple[tuple, tuple]:
        n = len(self.nonstiff.initial_memory())
        return memory[:n], memory[n:]

    def accepts(self, xp: Arithmetic, squared: Any, memory: tuple) -> Any:
        before, other = self._of_each(memory)
        explicit = self.nonstiff.accepts(xp, squared, before)
        return xp.where(self.is_stiff, self.stiff.accepts(xp, squared, other), explicit)

    def factor(
        self, xp: Arithmetic, log_error: Any, memory: tuple, accepted: Any, is_first: Any
    ) -> tuple[Any, tuple]:
        before, other = self._of_each(memory)
        by_explicit, after = self.nonstiff.factor(xp, log_error, before, accepted, is_first)
        by_stiff, other_after = self.stiff.factor(xp, log_error, other, accepted, is_first)
        kept = [xp.where(self.is_stiff, a, b) for a, b in zip(before, after, strict=True)]
        kept += [xp.where(self.is_stiff, b, a) for a, b in zip(other, other_after, strict=True)]
        return xp.where(self.is_stiff, by_stiff, by_explicit), tuple(kept)
