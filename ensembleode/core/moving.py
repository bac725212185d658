"""Derivatives through a jump whose time moves: the times of steps are constants, those of jumps are
not.

A step ends at a fixed time, where the state jumps. With other numbers (a first state, parameters)
the jump would be at another time, `delta` later: there the condition is what it is here, and the
state, which goes on along the field until then, jumps. After the jump it is followed back along the
field to the fixed time, from which the next step begins. `delta` is an expression whose value is
zero and whose derivatives are not, so that values are those of the jump at the fixed time, and JAX
differentiates the rest.

The first derivatives are those of the saltation matrix (Kong, Payne, Zhu and Johnson, "Saltation
Matrices", Proceedings of the IEEE 2024, arXiv:2306.06862); for those of `order` k the state moves
by its Taylor polynomial of order k, and `delta` is what Newton's iteration finds from zero, which
doubles the orders that are right each time.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Moved(NamedTuple):
    """What a jump makes of a state, with derivatives.

    - `on`: the state that the next step begins with, at the fixed time; after a jump that ends the
        solve, `after`.
    - `before`, `after`: the states at the time of the jump.
    - `time`: that time.
    - `ends`: whether the jump ends the solve.
    """

    on: Any
    before: Any
    after: Any
    time: Any
    ends: Any


def along(field: Callable, u: Any, t: Any, delta: Any, order: int) -> Any:
    """The solution of `field(u, t)` from the state `u` at `t`, by `delta` later: its Taylor
    polynomial of this order."""
    rate, power, total = field, 1.0, u
    for k in range(1, order + 1):
        power = power * delta / k
        total = total + power * rate(u, t)
        rate = _rate_of(rate, field)
    return total


def _rate_of(fn: Callable, field: Callable) -> Callable:
    """How `fn(u, t)` changes along the field."""

    def rate(u: Any, t: Any) -> Any:
        return jax.jvp(fn, (u, t), (field(u, t), jnp.ones_like(t)))[1]

    return rate


def crossing(field: Callable, condition: Callable, u: Any, t: Any, order: int) -> Any:
    """How much later `condition(u, t)`, a real number, is what it is here: zero, with derivatives
    up to this order. (Infinite ones where the solution only touches that level.)"""
    level = jax.lax.stop_gradient(condition(u, t))

    def excess(delta: Any) -> Any:
        return condition(along(field, u, t, delta, order), t + delta) - level

    delta = jnp.zeros_like(t)
    tiny = jnp.finfo(delta.dtype).tiny
    for _ in range(math.ceil(math.log2(order + 1))):
        value, slope = jax.jvp(excess, (delta,), (jnp.ones_like(delta),))
        # (Not a division of zero by zero: the value would be NaN.)
        delta = delta - value / jnp.where(slope == 0, tiny, slope)
    return delta


def shift(time: Any) -> Any:
    """How much later a known time is than it is: zero, with derivatives."""
    return time - jax.lax.stop_gradient(time)


def spacing(time: Any) -> Any:
    """That of floating-point numbers about a time, or a little more: a constant."""
    limits = jnp.finfo(time.dtype)
    return jax.lax.stop_gradient(jnp.maximum(limits.eps * jnp.abs(time), limits.tiny))


def jumped(
    field: Callable,
    affect: Callable,
    u: Any,
    t: Any,
    delta: Any = None,
    *,
    order: int,
    field_after: Callable | None = None,
) -> Moved:
    """A jump from the state `u` at the fixed time `t`.

    **Arguments:**

    - `field(u, t)`: the vector field up to the jump; `field_after`: from there, where that is
        another. (Parameters that the jump changes belong to the state.)
    - `affect(u, t)`: the state after the jump, and whether that ends the solve.
    - `delta`: see `crossing` and `shift`; None of a jump whose time does not move.
    - `order`: up to which derivatives are right.
    """
    if delta is None:
        after, ends = affect(u, t)
        return Moved(after, u, after, t, ends)
    before, time = along(field, u, t, delta, order), t + delta
    after, ends = affect(before, time)
    on = along(field_after or field, after, time, -delta, order)
    return Moved(jnp.where(ends, after, on), before, after, time, ends)
