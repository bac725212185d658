"""Step-size control besides the controller: errors in units of the tolerances; and the first step,
which is Hairer's estimate (Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I",
II.4)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .arithmetic import Arithmetic, Components, Mask, Number
from .explicit_runge_kutta import add_scaled
from .method import StepAttempt
from .norms import AbstractNorm


class Tolerances(NamedTuple):
    """The absolute and the relative tolerance; each is one number for each trajectory, or such a
    number for each component."""

    abstol: Number
    reltol: Number


def looked_at(
    xp: Arithmetic, values: Components, controlled: int | None, in_parts: bool
) -> Components:
    """What step-size control looks at of the components: the first `controlled` ones, or all; of
    complex numbers `in_parts`, all real parts and then all imaginary parts, the absolute values."""
    first = values[slice(controlled)]
    if not in_parts:
        return first
    return tuple(_largest_absolute(xp, x) for x in zip(*_halves(first), strict=True))


def _halves(values: Components) -> tuple[Components, Components]:
    """The components in two halves; they may be one array."""
    if len(values) > 1:
        half = len(values) // 2
        return values[:half], values[half:]
    whole: Any = next(iter(values))
    half = len(whole) // 2
    return (whole[:half],), (whole[half:],)


def _largest_absolute(xp: Arithmetic, *numbers: tuple[Number, Number]) -> Number:
    """The largest absolute value of complex numbers `(real, imaginary)`, whose squares may
    overflow."""
    most = functools.reduce(xp.maximum, (xp.abs(x) for z in numbers for x in z))
    tiny = float(np.finfo(most.dtype).tiny)
    unit = xp.where(most > 4 * tiny, most, 1.0)
    inverse = 1.0 / unit
    squares = []
    for z in numbers:
        real, imag = (x * inverse for x in z)
        squares.append(real * real + imag * imag)
    return unit * xp.sqrt(functools.reduce(xp.maximum, squares))


def of_complex(tol: Tolerances) -> Tolerances:
    """The tolerances of complex numbers, from those of their real and imaginary parts, which are
    the same."""

    def first_half(x: Number) -> Number:
        if isinstance(x, tuple):
            is_number = len(x) == 1 and not hasattr(x[0], "__len__")
            return x if is_number else _halves(x)[0]
        return x[: len(x) // 2] if np.ndim(x) else x

    return Tolerances(*map(first_half, tol))


def scaled(
    xp: Arithmetic,
    tol: Tolerances,
    values: Components,
    *states: Components,
    controlled: int | None = None,
    in_parts: bool = False,
) -> Components:
    """`values / (abstol + reltol max(|state|))` of what is `looked_at`, component by component."""

    def largest_of(*at):
        return functools.reduce(xp.maximum, (xp.abs(x) for x in at))

    each: list[tuple] = [x[slice(controlled)] for x in (values, *states)]
    if in_parts:
        tol, largest_of = of_complex(tol), functools.partial(_largest_absolute, xp)
        each = [tuple(zip(*_halves(x), strict=True)) for x in each]

    def scale(i, value, *at):
        abstol, reltol = (x[i] if isinstance(x, tuple) else x for x in tol)
        value = largest_of(value) if in_parts else value
        return value / (
            xp.broadcast_over(abstol, value) + xp.broadcast_over(reltol, value) * largest_of(*at)
        )

    return tuple(scale(i, *x) for i, x in enumerate(zip(*each, strict=True)))


def in_abstol(xp: Arithmetic, tol: Tolerances, values: Components) -> Components:
    """`values / abstol`, component by component."""
    each = tol.abstol if isinstance(tol.abstol, tuple) else [tol.abstol] * len(values)
    return tuple(x / xp.broadcast_over(abstol, x) for abstol, x in zip(each, values, strict=True))


def squared_error(
    xp: Arithmetic,
    norm: AbstractNorm,
    tol: Tolerances,
    attempt: StepAttempt,
    y: Components,
    controlled: int | None = None,
    in_parts: bool = False,
) -> Number:
    """The square of the norm of a step's error in units of the tolerances. With several error
    estimates, it is the largest. The norm is over what is `looked_at`. It is infinite where the
    method failed."""
    look: dict[str, Any] = {"controlled": controlled, "in_parts": in_parts}
    squares = [norm.squared(xp, scaled(xp, tol, x, y, attempt.y2, **look)) for x in attempt.error]
    largest = squares[0] if len(squares) == 1 else xp.largest(tuple(squares))
    if attempt.residual is not None:
        residual = looked_at(xp, attempt.residual, **look)
        tol = of_complex(tol) if in_parts else tol
        norms = xp.sqrt(largest) + norm(xp, in_abstol(xp, tol, residual))
        largest = norms * norms
    return largest if attempt.failed is None else xp.where(attempt.failed, np.inf, largest)


def power_of_ten(x: Number, order: int) -> Number:
    """`10^(-(2 + log10(x)) / order)` for JAX arrays, as `initial_step` wants it."""
    return 10.0 ** (-(2.0 + jnp.log10(x)) / order)


def unit_of_time(xp: Arithmetic, span: Number) -> Number:
    """The time in which the constants of first steps are: one, and for spans that are shorter than
    their shortest step, 1e-6, the span. (There, squares of rates are also beyond single
    precision.)"""
    return xp.where(xp.abs(span) < 1e-6, xp.abs(span), 1.0)


def initial_step(
    xp: Arithmetic,
    norm: AbstractNorm,
    power_of_ten: Callable,
    field: Callable,
    t: Number,
    y: Components,
    k: Components,
    span: Number,
    tol: Tolerances,
    order: int,
    dtmax: Number = None,
    controlled: int | None = None,
    in_parts: bool = False,
) -> Number:
    """The size of the first step, from two evaluations: `k = f(y, t)` and one more.

    **Arguments:** `power_of_ten(x, order)`: `10^(-(2 + log10(x)) / order)`; `span`: `t1 - t0`,
    negative backwards in time; `dtmax`: the longest step, if there is one; `controlled`,
    `in_parts`: which components are `looked_at`.
    """
    length, unit = xp.abs(span), unit_of_time(xp, span)
    look: dict[str, Any] = {"controlled": controlled, "in_parts": in_parts}

    def in_units(rates):
        rates = tuple(x * xp.broadcast_over(unit, x) for x in rates)
        return scaled(xp, tol, rates, y, **look)

    if dtmax is not None:
        length = xp.minimum(dtmax, length)
    d0 = norm(xp, scaled(xp, tol, y, y, **look))
    d1 = norm(xp, in_units(k))
    probe = unit * xp.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * (d0 / d1))
    # The minimum is NaN where its second operand is NaN, for every `xp`.
    probe = xp.minimum(length, xp.cast(probe, d0.dtype))
    probe = xp.maximum(float(np.finfo(d0.dtype).tiny), probe)
    step = xp.sign(span) * probe
    k2 = field(add_scaled(xp, y, step, [1.0], [k]), t + step)
    change = tuple(a - b for a, b in zip(k2, k, strict=True))
    probe = probe / unit
    d2 = norm(xp, in_units(change)) / probe
    most = xp.maximum(d1, d2)
    by_error = power_of_ten(most, order)
    dt = xp.where(most <= 1e-15, xp.maximum(1e-3 * probe, 1e-6), by_error)
    return xp.cast(xp.minimum(length, unit * xp.minimum(100 * probe, dt)), d0.dtype)


# The number of short attempts in a row, infinite or NaN, after which there is no way to go on.
MOST_FAILURES = 100
# An attempt is short if it is less than this part of the span, or than this number of spacings of
# its times. A trajectory that really needed such steps would take more of them than anyone waits
# for.
_SHORT, _SHORT_SPACINGS = 2.0**-27, 128
# An attempt that is shorter than this part of a short one is far too short; halving a short step
# gets there in 60 attempts.
_FAR = 2.0**-60


def count_failures(
    xp: Arithmetic, failures: Number, failed: Mask, size: Number, span: Number
) -> Number:
    """The number of attempts in a row that were short and yet infinite or NaN, after one of this
    `size`.

    Where `f` is NaN beyond some point, steps become shorter as they approach the point, until
    rounding keeps the state from moving while time still moves. Then a step succeeds, the next,
    longer step fails, and so on for ever. Successful steps don't end the row of failures, but a
    longer step that fails does. So a trajectory that comes near such a point and leaves it may fail
    as often each time. Attempts that are shorter by far are not counted, since near t = 0 a first
    step may have to be found there.

    **Arguments:** `failed`: whether this attempt was infinite or NaN; `span`: `t1 - t0`.
    """
    short = max(_SHORT, _SHORT_SPACINGS * float(np.finfo(size.dtype).eps)) * xp.abs(span)
    counted = xp.where(size <= short, xp.where(size >= _FAR * short, failures + 1, failures), 0)
    return xp.where(failed, counted, failures)


def is_moved(abstol: Number, before: Number, after: Number) -> Mask:
    """Whether a step too short for time to resolve has moved a component noticeably, or to a value
    that is not finite; the solution then diverges. If no component has moved, the tolerances can't
    be met."""
    return ~(abs(after - before) <= 1e-4 * abs(before) + abstol)
