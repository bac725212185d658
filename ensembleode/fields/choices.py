"""Gathers and sorts of small arrays, written as comparisons. Programs that are taken apart into
scalars need this: they have a variable for each component, which can't be addressed by a computed
index."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..tracing.program import structs_of
from . import tuning
from .gather_scatter import fill_value, Windows
from .simplifying.writing import as_written


def by_choice(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr of comparisons that computes the same as an equation; None where there is none."""
    fn = _CHOICES[eqn.primitive.name](eqn)
    if fn is None:
        return None
    with as_written():
        return jax.make_jaxpr(fn)(*structs_of(eqn.invars))


def _gather(eqn: Any) -> Callable | None:
    """A gather of whole rows, where the axes of the indices are the first axes of the result."""
    windows = Windows.of_gather(eqn)
    n = windows.shape[0] if windows.shape else 0
    of_result = eqn.outvars[0].aval.shape
    n_before = len(of_result) - len(windows.shape) + 1
    are_rows = (
        (windows.starts, windows.collapsed, windows.batching) == ((0,), (0,), ((), ()))
        and tuple(windows.window_dims) == tuple(range(n_before, len(of_result)))
        and tuple(windows.sizes) == (1, *windows.shape[1:])
        and 0 < n <= tuning.MOST_ROWS
    )
    if not are_rows:
        return None

    def gather(x: Array, indices: Array) -> Array:
        index = indices.reshape((*indices.shape[:-1], *[1] * (x.ndim - 1)))
        found = jnp.broadcast_to(x[0], of_result)
        for i in range(1, n):
            # (An index beyond the last is moved to it.)
            is_here = index >= i if i == n - 1 else index == i
            found = jnp.where(is_here, x[i], found)
        if not windows.drops:
            return found
        nothing = fill_value(x.dtype, eqn.params["fill_value"])
        return jnp.where((index >= 0) & (index < n), found, nothing)

    return gather


def _sort(eqn: Any) -> Callable | None:
    """A sort of integers."""
    aval = eqn.invars[0].aval
    if aval.ndim != 1 or eqn.params["num_keys"] != 1 or aval.dtype.kind not in "iu":
        return None
    if (n := aval.size) > tuning.MOST_SORTED:
        return None

    def sort(*operands: Any) -> list:
        keys, one = operands[0], np.int32(1)
        places = [lax.full((), np.int32(0)) for _ in range(n)]
        for j in range(n):
            for i in range(j):
                precedes = keys[j] < keys[i]
                places[i] = places[i] + jnp.where(precedes, one, 0)
                places[j] = places[j] + jnp.where(precedes, 0, one)
        return [_at_places(x, places) for x in operands]

    return sort


def _at_places(x: Array, places: list) -> Array:
    found = []
    for k in range(len(places)):
        chosen = x[0]
        for i in range(1, len(places)):
            chosen = jnp.where(places[i] == k, x[i], chosen)
        found.append(chosen)
    return jnp.stack(found) if found else x


_CHOICES: dict[str, Callable[[Any], Callable | None]] = {"gather": _gather, "sort": _sort}
CHOICES = tuple(_CHOICES)
