"""What a time loop asks of a method of steps."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

from .arithmetic import Arithmetic, Components


class Attempt(NamedTuple):
    """A step that was tried: its end, and the derivatives at its stages."""

    y2: Components
    ks: tuple[Components, ...]


class Method(abc.ABC):
    """A method of steps, over the numbers of an
    [`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic]; hashable, and compared by content.

    `field(y, t)` is the vector field, `h` the signed size of a step from the state `y` at `t`.

    """

    @property
    @abc.abstractmethod
    def order(self) -> int:
        """Of the solution."""

    @property
    @abc.abstractmethod
    def embedded_order(self) -> int | None:
        """Of the solution that it is compared with; None where there is no error estimate."""

    @property
    @abc.abstractmethod
    def stages(self) -> int:
        """Evaluations of the field in a step."""

    @property
    @abc.abstractmethod
    def keeps(self) -> bool:
        """Whether a step hands on the derivative at its end to the next, which then needs one
        evaluation less."""

    @property
    @abc.abstractmethod
    def has_extra_stages(self) -> bool:
        """Whether dense output takes more evaluations."""

    @abc.abstractmethod
    def step(
        self, xp: Arithmetic, field: Callable, y: Components, k: Components | None, t: Any, h: Any
    ) -> Attempt:
        """A step; `k`: what the one before handed on. (Without it, it is computed.)"""

    def kept(self, attempt: Attempt) -> Components:
        """What an accepted step hands on, of a method that `keeps` something."""
        return attempt.ks[-1]

    @abc.abstractmethod
    def errors(self, xp: Arithmetic, attempt: Attempt, h: Any) -> tuple[Components, ...]:
        """The estimates of the error of the step, component by component: the largest counts."""

    @abc.abstractmethod
    def dense(
        self, xp: Arithmetic, field: Callable, y: Components, attempt: Attempt, t: Any, h: Any
    ) -> tuple[Components, ...]:
        """The stages of the step with those that only its dense output needs."""

    @abc.abstractmethod
    def weights(self, xp: Arithmetic, theta: Any) -> list[Any]:
        """The weights of all `dense` stages in the state at `t + theta h`, which is
        `y + h sum_i(weights_i k_i)`; the number zero for those that have none."""

    @abc.abstractmethod
    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple[Components, ...], h: Any, theta: Any
    ) -> Components:
        """The state at `t + theta h`."""

    def evaluations(self, ntried: Any) -> Any:
        """How many evaluations of the field so many steps take, accepted or not."""
        return ntried * (self.stages - 1) + 1 if self.keeps else ntried * self.stages
