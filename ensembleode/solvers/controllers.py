"""Step-size controllers: from the error of a step to the size of the next. They do what
OrdinaryDiffEq does, constant by constant, so that the steps are the same.

Powers are approximate, in single precision, and errors are given by their logarithms: a step size
needs no more accuracy, and accurate powers would take a third of the time of a small step.
"""

import abc
import math
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import numpy as np

from .arithmetic import Arithmetic, Mask, Number, NUMBERS
from .powers import arctan, exp2, log2


_Controller = TypeVar("_Controller", bound="AbstractController")
# (The order of a stochastic method may be 1/2 or 3/2.)
_Order: TypeAlias = int | float | None


def _number(value: Any) -> Any:
    """A Python number as a float; other objects as they are, for `_check_numbers` to refuse."""
    is_one = isinstance(value, int | float | np.integer | np.floating)
    return float(value) if is_one and not isinstance(value, bool) else value


def _constant(**options: Any) -> Number:
    return eqx.field(converter=_number, **options)


class AbstractController(eqx.Module):
    """Chooses the sizes of steps, for `solve(..., stepsize_controller=...)`.

    A subclass writes two methods over the operations of an `Arithmetic`, `xp`. So it runs on every
    engine: as arrays of many trajectories, in generated machine code, or within diffrax. Its fields
    must be Python numbers.

    >>> import ensembleode as eo
    >>> class Careful(eo.AbstractController):
    ...     def initial_memory(self):
    ...         return ()
    ...     def factor(self, xp, log_error, memory, accepted, is_first):
    ...         return 0.8 * self.exp2(xp, -log_error / 4), ()
    >>> prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
    >>> eo.solve(prob, stepsize_controller=Careful()).retcode.name
    'Success'
    """

    @abc.abstractmethod
    def initial_memory(self) -> tuple[float, ...]:
        """The controller's memory before the first step, as numbers."""

    @abc.abstractmethod
    def factor(
        self, xp: Arithmetic, log_error: Number, memory: tuple, accepted: Mask, is_first: Mask
    ) -> tuple[Number, tuple]:
        """The ratio of the next step's size to this step's, and the memory after this step.

        **Arguments:**

        - `xp`: the operations; all numbers are float32, one for each trajectory.
        - `log_error`: the binary logarithm of the norm of the scaled error; about 128 where the
            step failed.
        - `memory`: the memory of the steps before.
        - `accepted`: whether this step is accepted; the next one starts from its end, or tries
            again.
        - `is_first`: whether no step has been accepted before.

        **Returns:** a positive number, and a tuple as long as `memory`, which is discarded where
        the step is rejected.
        """

    def accepts(self, xp: Arithmetic, squared: Number, memory: tuple) -> Mask:
        """Whether a step is accepted; never where its error is not finite.

        **Arguments:** `xp`: the operations; `squared`: the square of the norm of the scaled error;
        `memory`: the memory of the steps before.
        """
        return squared <= 1

    def for_method(self: _Controller, order: _Order, embedded_order: _Order) -> _Controller:
        """The controller with constants that depend on the `order` of the method, and on the
        `embedded_order` of the solution with which it is compared; either is None where it isn't
        known."""
        return self

    def for_implicit(self: _Controller) -> _Controller:
        """The controller with the default constants for Rosenbrock methods."""
        return self

    @staticmethod
    def exp2(xp: Arithmetic, x: Number) -> Number:
        """Two to the power of `x`, a float32, by the operations `xp`."""
        return exp2(xp, x)

    def next_step(
        self,
        xp: Arithmetic,
        h: Number,
        squared: Number,
        memory: tuple,
        accepted: Mask,
        is_first: Mask,
    ) -> tuple[Number, tuple]:
        """The size of the next step after one of size `h`, and the new `memory`.

        **Arguments:** `xp`, `squared`, `accepted`, `is_first`: as of `accepts` and `factor`.
        """
        factor, new = self.factor(xp, log_of(xp, squared), memory, accepted, is_first)
        # The next step waits for this product, so it is written first: LLVM's schedule depends on
        # the order.
        next_h = h * xp.cast(factor, h.dtype)
        kept = [xp.where(accepted, a, b) for a, b in zip(new, memory, strict=True)]
        return next_h, tuple(kept)


def log_of(xp: Arithmetic, squared: Number) -> Number:
    """The binary logarithm of the square root of `squared`."""
    return log2(xp, xp.sqrt(xp.cast(squared, np.float32)))


class _ClippedController(AbstractController):
    """A controller whose factor is multiplied by a safety factor and then clipped."""

    gamma: float = _constant(default=0.9, kw_only=True)
    qmin: float = _constant(default=0.2, kw_only=True)
    qmax: float = _constant(default=10.0, kw_only=True)
    qmax_first_step: float = _constant(default=10_000.0, kw_only=True)
    qsteady_max: float | None = _constant(default=None, kw_only=True)

    def __check_init__(self):
        _check_numbers(self)
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {self.gamma}.")
        if not 0 < self.qmin < 1 < self.qmax:
            raise ValueError(
                f"qmin must be in (0, 1), and qmax more than 1, got {self.qmin} and {self.qmax}."
            )
        if not self.qmax_first_step >= 1:
            raise ValueError(f"qmax_first_step must be 1 or more, got {self.qmax_first_step}.")
        if self.qsteady_max is not None and not self.qsteady_max >= 1:
            raise ValueError(f"qsteady_max must be 1 or more, got {self.qsteady_max}.")

    def for_implicit(self):
        """See [`AbstractController`][ensembleode.AbstractController.for_implicit]."""
        # (The constant is that of OrdinaryDiffEq.)
        return self if self.qsteady_max is not None else _replace(self, qsteady_max=1.2)

    def clipped(self, xp: Arithmetic, power: Number, accepted: Mask, is_first: Mask) -> Number:
        """`gamma 2^power`, limited to between `qmin` and `qmax`; or one, for a step that keeps its
        size."""
        steady = self.qsteady_max or 1.0
        factor = self.gamma * exp2(xp, power)
        most = xp.where(is_first, np.float32(self.qmax_first_step), np.float32(self.qmax))
        factor = xp.maximum(xp.minimum(factor, most), self.qmin)
        if steady == 1:
            return factor
        is_steady = accepted & (factor <= 1.0) & (factor >= 1 / steady)
        return xp.where(is_steady, np.float32(1), factor)


class PIController(_ClippedController):
    """The proportional-integral controller, the default:
    `h_next = h gamma err^-beta1 err_old^beta2`.

    `err` is the norm of the scaled error, and `err_old` that of the last accepted step, but at
    least `qoldinit`. When a rejected step is tried again, `err_old` is left out. The constants are
    those of OrdinaryDiffEq.

    **Arguments:**

    - `beta1`, `beta2`: the exponents, by default `7 / (10 order)` and `2 / (5 order)`.
    - `gamma`: the safety factor.
    - `qmin`, `qmax`: the limits of the ratio of the next step's size to this step's;
        `qmax_first_step`: the upper limit until a step has been accepted.
    - `qsteady_max`: after an accepted step, the next step keeps its size if it would be shorter by
        no more than this factor; by default 6/5 for Rosenbrock methods, and 1 for others.
    - `qoldinit`: the least `err_old`, and its value before the first step.

    **Raises:** `ValueError` and `TypeError` for constants out of their range.

    Source: Gustafsson, "Control theoretic techniques for stepsize selection in explicit Runge-Kutta
    methods", ACM TOMS 17 (1991); Hairer and Wanner, "Solving Ordinary Differential Equations II",
    IV.2.
    """

    beta1: float | None = _constant(default=None)
    beta2: float | None = _constant(default=None)
    qoldinit: float = _constant(default=1e-4, kw_only=True)

    def __check_init__(self):
        if not (_is_number(self.qoldinit) and self.qoldinit > 0):
            raise ValueError(f"qoldinit must be positive, got {self.qoldinit!r}.")

    def for_method(self, order: _Order, embedded_order: _Order) -> "PIController":
        """See [`AbstractController`][ensembleode.AbstractController.for_method]."""
        if order is None:
            return self
        beta1 = 7 / (10 * order) if self.beta1 is None else self.beta1
        beta2 = 2 / (5 * order) if self.beta2 is None else self.beta2
        return _replace(self, beta1=beta1, beta2=beta2)

    def initial_memory(self) -> tuple[float, ...]:
        """See [`AbstractController`][ensembleode.AbstractController.initial_memory]."""
        return (float(self._least),)

    @property
    def _least(self) -> np.float32:
        """The least value of the memory: `beta2` times the logarithm of `qoldinit`."""
        assert self.beta2 is not None
        return np.float32(self.beta2) * log2(NUMBERS, np.array([self.qoldinit], np.float32))[0]

    def factor(self, xp, log_error, memory, accepted, is_first):
        """See [`AbstractController`][ensembleode.AbstractController.factor]."""
        assert self.beta1 is not None
        assert self.beta2 is not None
        # The next step has to wait for this: one power, and no division, between its size and the
        # error.
        before = xp.where(accepted, memory[0], np.float32(0))
        factor = self.clipped(xp, before - self.beta1 * log_error, accepted, is_first)
        return factor, (xp.maximum(self.beta2 * log_error, self._least),)


class IController(_ClippedController):
    """The integral, or standard, controller: `h_next = h gamma err^(-1 / k)`.

    `err` is the norm of the scaled error, and `k` is one more than the order of the method with
    which the step is compared. The constants are those of OrdinaryDiffEq.

    **Arguments:** `gamma`, `qmin`, `qmax`, `qmax_first_step`, `qsteady_max`: see
    [`PIController`][ensembleode.PIController].

    **Raises:** `ValueError` and `TypeError` for constants out of their range.

    Source: Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I", II.4.
    """

    exponent: float | None = _constant(default=None, init=False)

    def for_method(self, order: _Order, embedded_order: _Order) -> "IController":
        """See [`AbstractController`][ensembleode.AbstractController.for_method]."""
        if embedded_order is None:
            return self
        return _replace(self, exponent=1 / (embedded_order + 1))

    def initial_memory(self) -> tuple[float, ...]:
        """See [`AbstractController`][ensembleode.AbstractController.initial_memory]."""
        return ()

    def factor(self, xp, log_error, memory, accepted, is_first):
        """See [`AbstractController`][ensembleode.AbstractController.factor]."""
        assert self.exponent is not None
        return self.clipped(xp, -self.exponent * log_error, accepted, is_first), ()


class PIDController(AbstractController):
    """The proportional-integral-derivative controller, designed as a digital filter:
    `h_next = h limiter(err^(-beta1 / k) err_1^(-beta2 / k) err_2^(-beta3 / k))`.

    `err` is the norm of the scaled error, and `err_1` and `err_2` are those of the last two
    accepted steps. `k` is one more than the lower order of the two methods that are compared, and
    `limiter(x) = 1 + atan(x - 1)`. A step is accepted where that factor is at least
    `accept_safety`. This is OrdinaryDiffEq's controller of that name.

    **Arguments:**

    - `beta1`, `beta2`, `beta3`: for example (1, 0, 0), the basic controller; (0.6, -0.2, 0), PI42;
        (2/3, -1/3, 0), PI33; (0.7, -0.4, 0), PI34; (1/6, 1/6, 0), H211PI; (1/18, 1/9, 1/18),
        H312PID.
    - `accept_safety`: a number between 0 and 1.

    **Raises:** `ValueError` and `TypeError` for constants out of their range.

    Source: Soderlind, "Digital filters in adaptive time-stepping", ACM TOMS 29 (2003), with the
    limiter of Soderlind and Wang, "Adaptive time-stepping and computational stability", JCAM 185
    (2006).
    """

    beta1: float = _constant()
    beta2: float = _constant()
    beta3: float = _constant(default=0.0)
    accept_safety: float = _constant(default=0.81, kw_only=True)
    k: float | None = _constant(default=None, init=False)

    def __check_init__(self):
        _check_numbers(self)
        if not 0 < self.accept_safety < 1:
            raise ValueError(f"accept_safety must be in (0, 1), got {self.accept_safety}.")

    def for_method(self, order: _Order, embedded_order: _Order) -> "PIDController":
        """See [`AbstractController`][ensembleode.AbstractController.for_method]."""
        if order is None or embedded_order is None:
            return self
        return _replace(self, k=min(order, embedded_order) + 1)

    def initial_memory(self) -> tuple[float, ...]:
        """See [`AbstractController`][ensembleode.AbstractController.initial_memory]."""
        return (0.0, 0.0)

    def factor(self, xp, log_error, memory, accepted, is_first):
        """See [`AbstractController`][ensembleode.AbstractController.factor]."""
        return self._limited(xp, log_error, memory), (log_error, memory[0])

    def accepts(self, xp, squared, memory):
        """See [`AbstractController`][ensembleode.AbstractController.accepts]."""
        enough = self._limited(xp, log_of(xp, squared), memory) >= self.accept_safety
        return enough & (squared < math.inf)

    def _limited(self, xp: Arithmetic, log_error: Number, memory: tuple) -> Number:
        assert self.k is not None
        beta1, beta2, beta3 = (x / self.k for x in (self.beta1, self.beta2, self.beta3))
        power = beta1 * log_error + beta2 * memory[0] + beta3 * memory[1]
        return 1.0 + arctan(xp, exp2(xp, -power) - 1.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _check_numbers(controller: AbstractController) -> None:
    for name, value in vars(controller).items():
        if value is not None and not _is_number(value):
            raise TypeError(
                f"{name} of {type(controller).__name__} must be a finite Python number, the same "
                f"for all trajectories, got {value!r}."
            )


def _replace(controller: _Controller, **changes: float) -> _Controller:
    """A copy of the controller with other constants."""
    new = object.__new__(type(controller))
    for name, value in vars(controller).items():
        object.__setattr__(new, name, changes.get(name, value))
    return new
