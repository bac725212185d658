"""Step-size control besides the controller: errors in units of the tolerances, and the first step,
which is Hairer's estimate (Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I",
II.4)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .arithmetic import Arithmetic, Components
from .method import Attempt
from .norms import AbstractNorm
from .runge_kutta import add_scaled


class Tolerances(NamedTuple):
    """Absolute and relative; each is a number a trajectory, or one for each component."""

    abstol: Any
    reltol: Any


def scaled(xp: Arithmetic, tol: Tolerances, values: Components, *states: Components) -> Components:
    """`values / (abstol + reltol max(|state|))`, component by component."""

    def scale(i, value, *at):
        abstol, reltol = (x[i] if isinstance(x, tuple) else x for x in tol)
        largest = xp.abs(at[0])
        for x in at[1:]:
            largest = xp.maximum(largest, xp.abs(x))
        return value / (xp.over(abstol, value) + xp.over(reltol, value) * largest)

    return tuple(scale(i, *x) for i, x in enumerate(zip(values, *states, strict=True)))


def in_abstol(xp: Arithmetic, tol: Tolerances, values: Components) -> Components:
    """`values / abstol`, component by component."""
    each = tol.abstol if isinstance(tol.abstol, tuple) else [tol.abstol] * len(values)
    return tuple(x / xp.over(abstol, x) for abstol, x in zip(each, values, strict=True))


def squared_error(
    xp: Arithmetic,
    norm: AbstractNorm,
    tol: Tolerances,
    attempt: Attempt,
    y: Components,
    controlled: int | None = None,
) -> Any:
    """The square of the norm of the error of a step from `y`, in units of the tolerances: the
    largest of its estimates, of the first `controlled` components or of all; infinite where the
    method failed."""
    first = slice(controlled)
    squares = [
        norm.squared(xp, scaled(xp, tol, estimate[first], y[first], attempt.y2[first]))
        for estimate in attempt.error
    ]
    largest = squares[0] if len(squares) == 1 else xp.largest(tuple(squares))
    if attempt.residual is not None:
        norms = xp.sqrt(largest) + norm(xp, in_abstol(xp, tol, attempt.residual[first]))
        largest = norms * norms
    return largest if attempt.failed is None else xp.where(attempt.failed, np.inf, largest)


def power_of_ten(x: Any, order: int) -> Any:
    """As `initial_step` wants it, of JAX's arrays."""
    return 10.0 ** (-(2.0 + jnp.log10(x)) / order)


def initial_step(
    xp: Arithmetic,
    norm: Callable[[Arithmetic, Components], Any],
    power_of_ten: Callable,
    field: Callable,
    t: Any,
    y: Components,
    k: Components,
    span: Any,
    tol: Tolerances,
    order: int,
    dtmax: Any = None,
) -> Any:
    """The size of the first step, from two evaluations: `k = f(y, t)` and one more.

    **Arguments:** `power_of_ten(x, order)`: `10^(-(2 + log10(x)) / order)`; `span`: `t1 - t0`,
    negative backwards in time; `dtmax`: the longest step, if there is one.
    """
    length = xp.abs(span)
    if dtmax is not None:
        length = xp.minimum(dtmax, length)
    d0 = norm(xp, scaled(xp, tol, y, y))
    d1 = norm(xp, scaled(xp, tol, k, y))
    probe = xp.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * (d0 / d1))
    # (NaN remains where the second of two numbers is NaN, whatever `xp`.)
    probe = xp.minimum(length, xp.cast(probe, d0.dtype))
    step = xp.sign(span) * probe
    k2 = field(add_scaled(xp, y, step, [1.0], [k]), t + step)
    change = tuple(a - b for a, b in zip(k2, k, strict=True))
    d2 = norm(xp, scaled(xp, tol, change, y)) / probe
    most = xp.maximum(d1, d2)
    by_error = power_of_ten(most, order)
    dt = xp.where(most <= 1e-15, xp.maximum(1e-3 * probe, 1e-6), by_error)
    return xp.cast(xp.minimum(length, xp.minimum(100 * probe, dt)), d0.dtype)


# So many attempts in a row that are short, and yet infinite or NaN: there is no way on.
MOST_FAILURES = 100
# What is short: so much of the span, or so many spacings of its numbers. Whoever needs
# steps like that all the way would take more of them than anybody waits for.
_SHORT, _SHORT_SPACINGS = 2.0**-27, 128
# Of such a step, what is shorter by far: with steps that are halved 60 attempts later.
_FAR = 2.0**-60


def count_failures(xp: Arithmetic, failures: Any, failed: Any, size: Any, span: Any) -> Any:
    """How many attempts in a row were short, and yet infinite or NaN, after one of this `size`.

    Where `f` is NaN beyond some point, steps become shorter as they come near, until rounding keeps
    the state from moving any further while time still does: then a step succeeds, and the next,
    longer one fails, for ever. Steps that succeed don't break the row, but a longer one that fails
    does: so a trajectory that comes near such a point and leaves it has each time as many. Attempts
    that are shorter by far are not among them: near t = 0 a first step may have to be found there.

    **Arguments:** `failed`: whether this attempt was infinite or NaN; `span`: `t1 - t0`.
    """
    short = max(_SHORT, _SHORT_SPACINGS * float(np.finfo(size.dtype).eps)) * xp.abs(span)
    counted = xp.where(size <= short, xp.where(size >= _FAR * short, failures + 1, failures), 0)
    return xp.where(failed, counted, failures)


def is_moved(abstol: Any, before: Any, after: Any) -> Any:
    """Whether a step too short for time to resolve moved a component noticeably, or to a value
    that is not finite: then the solution diverges. If no component moved, the tolerances can't
    be met."""
    return ~(abs(after - before) <= 1e-4 * abs(before) + abstol)
