"""Arithmetic on the state of a chunk: a tuple of arrays whose last axis is the lane.

The leaves are one `[lane]` vector for each component where the field is scalarised, and a single
`[*state, lane]` array otherwise.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...ground.placement import platform
from ...solvers.arithmetic import JaxArithmetic


Leaves: TypeAlias = tuple[Any, ...]
# A time or a step size: one for each lane, or one that all lanes share.
OfLanes: TypeAlias = Float[Array, ""] | Float[Array, " lane"]


def over(lane: Any, leaf: Any) -> Any:
    """Numbers with one entry for each lane, in a shape that broadcasts against a leaf; a Python
    number as it is."""
    if isinstance(lane, float):
        return lane
    missing = leaf.ndim - lane.ndim
    return lane.reshape((1,) * missing + lane.shape) if missing and lane.ndim else lane


def map_leaves(fn: Callable, *trees: Leaves) -> Leaves:
    return tuple(fn(*leaves) for leaves in zip(*trees, strict=True))


def computed_once(values: Any) -> Any:
    """The values, forced to memory: on the CPU, XLA would otherwise recompute them for every
    use."""
    if platform() != "cpu":
        return values
    return jax.tree.map(lambda x: x if isinstance(x, float) else _barrier(x), values)


_barrier = jax.lax.optimization_barrier


def select(mask: Any, new: Leaves, old: Leaves) -> Leaves:
    """`new` in the lanes where the mask is true, `old` in the others."""
    return map_leaves(lambda a, b: jnp.where(over(mask, a), a, b), new, old)


def sum_of(fn: Callable, *trees: Leaves) -> Any:
    """The sum of `fn` over the components: [lane]."""
    terms = [
        jnp.sum(x, axis=tuple(range(x.ndim - 1))) if x.ndim > 1 else x
        for x in map_leaves(fn, *trees)
    ]
    return functools.reduce(operator.add, terms)


def size(leaves: Leaves) -> int:
    """The number of components of a lane."""
    return sum(math.prod(x.shape[:-1]) for x in leaves)


def first_of(leaves: Leaves, count: int | None) -> Leaves:
    """The first `count` components, whether leaves are components or arrays; all with None."""
    if count is None or count >= size(leaves):
        return leaves
    first, *more = leaves
    return leaves[:count] if more else (first.reshape(-1, first.shape[-1])[:count],)


def is_finite(leaves: Leaves) -> Any:
    """Whether all components are finite: [lane]."""
    # This takes a multiplication and an addition for each component; testing each takes three times
    # as long.
    return sum_of(lambda x: x * 0, leaves) == 0


class _Arithmetic(JaxArithmetic):
    """The [`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic] for arrays with lanes."""

    def over(self, number: Any, component: Any) -> Any:
        return over(number, component)

    def once(self, x: Any) -> Any:
        return computed_once(x)

    def mean(self, components: Leaves) -> Any:
        return self.total(components) / size(components)

    def total(self, components: Leaves) -> Any:
        return sum_of(lambda x: x, components)

    def largest(self, components: Leaves) -> Any:
        axes = [tuple(range(x.ndim - 1)) for x in components]
        each = [jnp.max(x, axis=a) for x, a in zip(components, axes, strict=True)]
        return functools.reduce(jnp.maximum, each)


LANES: Any = _Arithmetic()
