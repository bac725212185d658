"""The primitives that only move data: for each a function `fn(xp, arrays, params, tail) -> arrays`,
where `xp` is NumPy or `jax.numpy`.

The arrays may hold anything, for example the numbers of components. They may have further axes at
the end, of the lengths `tail`.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax


def _reshape(xp, xs, params, tail):
    (x,), order = xs, params.get("dimensions")
    if order is not None:
        x = _transpose(xp, x, order)
    return [x.reshape((*params["new_sizes"], *tail))]


def _transpose(xp, x, order):
    return xp.transpose(x, (*order, *range(len(order), x.ndim)))


def _slice(xp, xs, params, tail):
    starts, ends = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    return [xs[0][tuple(map(slice, starts, ends, strides))]]


def _unstack(xp, xs, params, tail):
    where = (slice(None),) * params["axis"]
    return [xs[0][(*where, i)] for i in range(xs[0].shape[params["axis"]])]


def _split(xp, xs, params, tail):
    return xp.split(xs[0], np.cumsum(params["sizes"])[:-1].tolist(), params["axis"])


def _broadcast_in_dim(xp, xs, params, tail):
    (x,) = xs
    shape, dims = params["shape"], params["broadcast_dimensions"]
    if xp is jnp:
        lane = (len(shape),) if tail else ()
        return [lax.broadcast_in_dim(x, (*shape, *tail), (*dims, *lane))]
    kept = [x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
    return [np.broadcast_to(x.reshape((*kept, *tail)), (*shape, *tail))]


MOVEMENTS: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda xp, xs, params, tail: [xp.concatenate(xs, params["dimension"])],
    "reshape": _reshape,
    "rev": lambda xp, xs, params, tail: [xp.flip(xs[0], tuple(params["dimensions"]))],
    "slice": _slice,
    "split": _split,
    "squeeze": lambda xp, xs, params, tail: [xp.squeeze(xs[0], tuple(params["dimensions"]))],
    "stack": lambda xp, xs, params, tail: [xp.stack(xs, params["axis"])],
    "tile": lambda xp, xs, params, tail: [xp.tile(xs[0], (*params["reps"], *(1 for _ in tail)))],
    "transpose": lambda xp, xs, params, tail: [_transpose(xp, xs[0], params["permutation"])],
    "unstack": _unstack,
}
