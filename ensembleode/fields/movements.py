"""What only moves data, once for all: `fn(xp, arrays, params, tail) -> arrays` a primitive.

`xp` is NumPy or JAX's: they move arrays of any numbers, such as those by which components are
known, or lanes-last arrays, whose `tail` is `(lanes,)`.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from .equations import registers


MOVEMENTS: dict[str, Callable] = {}
movement = registers(MOVEMENTS)


@movement("reshape")
def _reshape(xp, xs, params, tail):
    (x,), order = xs, params.get("dimensions")
    if order is not None:
        x = xp.transpose(x, (*order, *range(len(order), x.ndim)))
    return [x.reshape((*params["new_sizes"], *tail))]


@movement("squeeze")
def _squeeze(xp, xs, params, tail):
    return [xp.squeeze(xs[0], tuple(params["dimensions"]))]


@movement("transpose")
def _transpose(xp, xs, params, tail):
    order = params["permutation"]
    return [xp.transpose(xs[0], (*order, *range(len(order), xs[0].ndim)))]


@movement("rev")
def _rev(xp, xs, params, tail):
    return [xp.flip(xs[0], tuple(params["dimensions"]))]


@movement("slice")
def _slice(xp, xs, params, tail):
    starts, ends = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    return [xs[0][tuple(map(slice, starts, ends, strides))]]


@movement("concatenate")
def _concatenate(xp, xs, params, tail):
    return [xp.concatenate(xs, params["dimension"])]


@movement("stack")
def _stack(xp, xs, params, tail):
    return [xp.stack(xs, params["axis"])]


@movement("unstack")
def _unstack(xp, xs, params, tail):
    axis = params["axis"]
    where = (slice(None),) * axis
    return [xs[0][(*where, i)] for i in range(xs[0].shape[axis])]


@movement("split")
def _split(xp, xs, params, tail):
    return xp.split(xs[0], np.cumsum(params["sizes"])[:-1].tolist(), params["axis"])


@movement("tile")
def _tile(xp, xs, params, tail):
    return [xp.tile(xs[0], (*params["reps"], *(1 for _ in tail)))]


@movement("broadcast_in_dim")
def _broadcast_in_dim(xp, xs, params, tail):
    (x,) = xs
    shape, dims = params["shape"], params["broadcast_dimensions"]
    if xp is jnp:
        lane = (len(shape),) if tail else ()
        return [lax.broadcast_in_dim(x, (*shape, *tail), (*dims, *lane))]
    kept = [x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
    return [np.broadcast_to(x.reshape(kept), shape)]
