"""A method of steps, as the time loop sees it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ...solvers import runge_kutta
from ...solvers.arithmetic import Arithmetic
from ...solvers.runge_kutta import Components
from ...solvers.tableau import Tableau


class Attempt(NamedTuple):
    """A step that was tried: its end, and the derivatives at its stages."""

    y2: Components
    ks: tuple[Components, ...]


@dataclasses.dataclass(frozen=True)
class RungeKutta:
    """An explicit method: between steps it keeps the derivative at their end, where that is its
    last stage."""

    tableau: Tableau

    @property
    def keeps(self) -> bool:
        return self.tableau.fsal

    @property
    def has_extra_stages(self) -> bool:
        """Whether dense output takes more evaluations."""
        return bool(self.tableau.interpolant.extra_c)

    def step(
        self, xp: Arithmetic, field: Callable, y: Components, k: Any, t: Any, h: Any
    ) -> Attempt:
        """A step of the signed size `h`; `k`: what is kept."""
        k1 = k if self.keeps else field(y, t)
        return Attempt(*runge_kutta.step(xp, self.tableau, field, y, k1, t, h))

    def error(self, xp: Arithmetic, attempt: Attempt, h: Any) -> Components:
        return runge_kutta.error_estimate(xp, self.tableau, attempt.ks, h)

    def kept(self, attempt: Attempt) -> Components:
        """What is kept after a step that is accepted."""
        return attempt.ks[-1]

    def dense(
        self, xp: Arithmetic, field: Callable, y: Components, attempt: Attempt, t: Any, h: Any
    ) -> tuple:
        """What `interpolate` needs."""
        interpolant = self.tableau.interpolant
        return runge_kutta.dense_stages(xp, interpolant, field, y, attempt.ks, t, h)

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Any, theta: Any
    ) -> Components:
        """The state at `t + theta h`."""
        return runge_kutta.interpolate(xp, self.tableau.interpolant, y, dense, h, theta)
