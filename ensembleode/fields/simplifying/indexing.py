"""Rules for primitives that read and write at indices, or that pad."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from ..combining import SCATTERS
from ..gather_scatter import fill_value, padded, Windows
from .memory import put, take
from .writing import rule


def _columns(indices: Array) -> list:
    """The columns of the indices, which run along their last axis."""
    axis = indices.ndim - 1
    return [lax.index_in_dim(indices, k, axis, keepdims=False) for k in range(indices.shape[axis])]


@rule("gather")
def _gather(eqn: JaxprEqn, x: Array, indices: Array) -> list:
    numbers, inside = Windows.of_gather(eqn).numbers(jnp, _columns(indices))
    found = take(x.reshape(-1), numbers)
    if inside is not None:
        nothing = lax.full_like(found, fill_value(x.dtype, eqn.params["fill_value"]))
        found = lax.select(inside, found, nothing)
    return [found]


@rule(" ".join(SCATTERS))
def _scatter(eqn: JaxprEqn, x: Array, indices: Array, updates: Array) -> list:
    numbers, inside = Windows.of_scatter(eqn).numbers(jnp, _columns(indices))
    out = put(x.reshape(-1), numbers, updates, inside, eqn.primitive.name)
    return [out.reshape(x.shape)]


@rule("dynamic_slice")
def _dynamic_slice(eqn: JaxprEqn, x: Array, *starts: Any) -> list:
    numbers, _ = Windows.whole_array(x.shape, eqn.params["slice_sizes"]).numbers(jnp, starts)
    return [take(x.reshape(-1), numbers)]


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: JaxprEqn, x: Array, update: Array, *starts: Any) -> list:
    numbers, _ = Windows.whole_array(x.shape, update.shape).numbers(jnp, starts)
    return [put(x.reshape(-1), numbers, update).reshape(x.shape)]


@rule("pad")
def _pad(eqn: Any, x: Any, value: Any) -> list:
    shape = eqn.outvars[0].aval.shape
    kept, numbers = padded(jnp, x.shape, eqn.params["padding_config"])
    whole = lax.broadcast(value, (int(np.prod(shape)),))
    return [put(whole, numbers, x[kept]).reshape(shape)]
