"""Separates the jumps of a field at one known time that come from several comparisons, such as
`t < p.off` and `t > p.on`: each jump moves with its own time.

The values of the field before and after all of these jumps don't say how much of the change is due
to which time. So the comparisons are taken in the order in which the field makes them. Each keeps
its result from before until its own time, which is found from its operands, and has its new result
afterwards. The state follows the field from each of these times to the next, and finally to the
known time, for the rest of the jump.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..fields import staged
from ..tracing.program import Program
from ..tracing.pulses import compared
from .moving import rates, solution_after


@functools.lru_cache(maxsize=256)
def is_told_apart(field: Program) -> bool:
    """Whether the field makes comparisons by which its jumps are told apart."""
    found = []

    def all_of(consts: Any, u: PyTree, p: tuple[Array, ...], t: Array) -> Array:
        found.append(comparisons(field, consts, u, p, t)[1])
        return u

    staged(field, all_of)
    return found[0] is not None and found[0].size > 1


def comparisons(field: Program, consts: Any, u: PyTree, p: tuple[Array, ...], t: Array) -> tuple:
    """The differences `a - b` of the operands of all comparisons that the field makes at `t`, and
    whether each holds: `[comparison]`. Both are None where the field compares nothing."""
    differences, holds = [], []

    def at(a: Array, b: Array, result: Array) -> Array:
        differences.append((a - b).astype(t.dtype).reshape(-1))
        holds.append(result.reshape(-1))
        return result

    compared(field, consts, u, p, t, at=at)
    if not holds:
        return None, None
    return jnp.concatenate(differences), jnp.concatenate(holds)


def decided(
    field: Program, holds: Array, consts: Any, u: PyTree, p: tuple[Array, ...], t: Array
) -> Any:
    """The value of the field with given results of its comparisons, `holds [comparison]`."""
    end = 0

    def at(a: Array, b: Array, result: Array) -> Array:
        nonlocal end
        start, end = end, end + result.size
        return holds[start:end].reshape(result.shape)

    return compared(field, consts, u, p, t, at=at)


def crossings(
    field: Program,
    turned: Array,
    consts: Any,
    u: PyTree,
    p: tuple[Array, ...],
    t: Array,
    order: int,
) -> Array:
    """The delays of the comparisons whose results have `turned` at `t`: zero, with derivatives up
    to this order, `[comparison]`."""

    def difference(time: Array) -> Array:
        found = comparisons(field, consts, u, p, time)[0]
        return jnp.where(turned, found, 0)

    terms = rates(difference, t, order)
    level = jax.lax.stop_gradient(terms[0])

    def excess(delta: Array) -> Array:
        power, total = 1.0, terms[0] - level
        for k, term in enumerate(terms[1:], 1):
            power = power * delta / k
            total = total + power * term
        return total

    delta = jnp.zeros_like(level)
    for _ in range(math.ceil(math.log2(order + 1))):
        value, slope = jax.jvp(excess, (delta,), (jnp.ones_like(delta),))
        delta = delta - value / jnp.where(slope == 0, 1, slope)
    return delta


# The most comparisons for which the loop has a turn each; in reverse mode, each turn adds to the
# cotangents of all numbers.
_FEW = 8


def moved_one_by_one(
    field: Program, numbers: tuple, u: PyTree, times: tuple, delta: Array, order: int
) -> Array:
    """The state with which the next step begins, at the fixed time. `numbers` are the constants and
    parameters of the field; `times` are the times just before the jump, of the jump, and just after
    it; `delta` is the delay of the known time: zero, with derivatives."""
    consts, p = numbers
    earlier, t, later = times
    _, before = comparisons(field, consts, u, p, earlier)
    _, behind = comparisons(field, consts, u, p, later)
    turned = before != behind
    each = crossings(field, turned, consts, u, p, t, order)
    places = jnp.arange(len(turned))

    def until(passed: ArrayLike, last: Array, u: PyTree, end: Array) -> Array:
        """The state at `end`, from the state at `last`, along the field in which the first `passed`
        comparisons have their new results."""
        holds = jnp.where(places < passed, behind, before)

        def rate(u: PyTree, since: Array) -> Array:
            return decided(field, holds, consts, u, p, earlier + since)

        return solution_after(rate, u, last, end - last, order)

    rank = jnp.cumsum(turned)

    @jax.checkpoint
    def one(carry: tuple, k: Any) -> tuple:
        last, u = carry
        # The next comparison that has turned; `len(turned)` where there is none.
        i = jnp.sum(rank <= k)
        here = jnp.sum(jnp.where(places == i, each, 0))
        return jax.lax.cond(
            i < len(turned), lambda: (here, until(i, last, u, here)), lambda: carry
        ), None

    def several(n: int) -> tuple[Array, ...]:
        return jax.lax.scan(one, (jnp.zeros_like(t), u), jnp.arange(n))[0]

    if len(turned) <= _FEW:
        last, u = several(len(turned))
    else:
        last, u = jax.lax.cond(rank[-1] > _FEW, lambda: several(len(turned)), lambda: several(_FEW))
    u = until(len(turned), last, u, delta)

    def rate(u: PyTree, since: Array) -> Array:
        return field(consts, u, p, later + since)

    return solution_after(rate, u, delta, -delta, order)
