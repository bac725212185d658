"""Derivatives through a jump whose time depends on the numbers of the problem, while the times of
steps are regarded as constants.

A step ends at a fixed time, and the state jumps there. With slightly different numbers (an initial
state, parameters) the jump would be `delta` later. Until then, the state would go on along the
field; there, the condition would have the value that it now has here, and the state would jump.
After the jump, the state is followed back along the field to the fixed time, at which the next step
begins. `delta` is an expression whose value is zero and whose derivatives are not. So values are
those of a jump at the fixed time, and JAX differentiates the rest.

The first derivatives are those of the saltation matrix (Kong, Payne, Zhu and Johnson, "Saltation
Matrices", Proceedings of the IEEE 2024, arXiv:2306.06862). For derivatives of `order` k, the state
moves by its Taylor polynomial of order k. `delta` is then found by Newton's iteration from zero,
each turn of which doubles the order up to which the derivatives are right.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree


class MovedJump(NamedTuple):
    """The result of a jump, with derivatives.

    - `on`: the state with which the next step begins, at the fixed time; after a jump that ends the
        solve, it is `after`.
    - `before`, `after`: the states at the time of the jump.
    - `time`: the time of the jump.
    - `ends`: whether the jump ends the solve.
    """

    on: Any
    before: Any
    after: Any
    time: Any
    ends: Any


def solution_after(field: Callable, u: PyTree, t: Array, delta: Array, order: int) -> Array:
    """The solution of `field(u, t)` that starts from the state `u` at `t`, after a time `delta`, as
    a Taylor polynomial of this order."""
    rate, power, total = field, 1.0, u
    for k in range(1, order + 1):
        power = power * delta / k
        total = total + power * rate(u, t)
        rate = _rate_of(rate, field)
    return total


def _rate_of(fn: Callable, field: Callable) -> Callable:
    """The derivative of `fn(u, t)` with respect to time along the field, as a function of `u` and
    `t`."""

    def rate(u: PyTree, t: Array) -> Array:
        return jax.jvp(fn, (u, t), (field(u, t), jnp.ones_like(t)))[1]

    return rate


def switched(
    field: Callable, after: Callable, u: PyTree, t: Array, delta: Array, order: int
) -> Array:
    """The state with which the next step begins, at the fixed time `t`, where `after(u, t)` takes
    the place of the vector field; `delta` and `order`: see `jumped`."""
    return solution_after(
        after, solution_after(field, u, t, delta, order), t + delta, -delta, order
    )


def rates(fn: Callable, t: Array, order: int) -> list:
    """`fn(t)`, and its derivatives by the time up to this order."""
    found = []
    for _ in range(order + 1):
        found.append(fn(t))
        fn = functools.partial(_by_time, fn)
    return found


def _by_time(fn: Callable, t: Array) -> Array:
    return jax.jvp(fn, (t,), (jnp.ones_like(t),))[1]


def crossing(field: Callable, condition: Callable, u: PyTree, t: Array, order: int) -> Array:
    """The time that passes until `condition(u, t)`, a real number, has its present value again:
    zero, with derivatives up to this order, infinite where the solution only touches that value."""
    level = jax.lax.stop_gradient(condition(u, t))

    def excess(delta: Array) -> Array:
        return condition(solution_after(field, u, t, delta, order), t + delta) - level

    delta = jnp.zeros_like(t)
    tiny = jnp.finfo(delta.dtype).tiny
    for _ in range(math.ceil(math.log2(order + 1))):
        value, slope = jax.jvp(excess, (delta,), (jnp.ones_like(delta),))
        # Dividing zero by zero would make the value NaN.
        delta = delta - value / jnp.where(slope == 0, tiny, slope)
    return delta


def shift(time: Array) -> Array:
    """The amount by which a known time moves: zero, with the derivatives of the time."""
    return time - jax.lax.stop_gradient(time)


def jumped(
    field: Callable,
    affect: Callable,
    u: PyTree,
    t: Array,
    delta: Array | None = None,
    *,
    order: int,
) -> MovedJump:
    """A jump from the state `u` at the fixed time `t`, with derivatives up to this `order`.
    Parameters that it changes are a part of the state. `affect(u, t)` returns the state after the
    jump, and whether the jump ends the solve. For `delta` see `crossing` and `shift`; it is None
    for a jump whose time does not move."""
    if delta is None:
        after, ends = affect(u, t)
        return MovedJump(after, u, after, t, ends)
    before, time = solution_after(field, u, t, delta, order), t + delta
    after, ends = affect(before, time)
    on = solution_after(field, after, time, -delta, order)
    return MovedJump(jnp.where(ends, after, on), before, after, time, ends)
