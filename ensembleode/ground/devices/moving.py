"""Arrays moved between devices outside of `jit`, differentiably.

`jax.device_put` commits what it moves to a device, so that it can't be used together with arrays
that are committed to other devices; its transpose does the same with cotangents. Here, arrays that
are moved to JAX's default device are uncommitted, and so are the cotangents of arrays that were
moved away from it.
"""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from ..keys import as_before, raw


def to_device(tree: PyTree, device: jax.Device) -> PyTree:
    """The tree, with its arrays committed to a device."""
    return jtu.tree_map(lambda x: _moved_p.bind(x, to=device, back=None) if _has(x) else x, tree)


def to_default(tree: PyTree, back: jax.Device) -> PyTree:
    """The tree, with its arrays on JAX's default device, committed to none. Their cotangents go to
    the device `back`, where the arrays were."""
    return jtu.tree_map(lambda x: _moved_p.bind(x, to=None, back=back) if _has(x) else x, tree)


def uncommitted(x: Array) -> Any:
    """A known array on JAX's default device, committed to none."""
    return as_before(x, jnp.asarray(np.asarray(raw(x))))


def _has(x: Any) -> bool:
    return isinstance(x, jax.Array)


# Moves an array to the device `to`; its transpose moves the cotangent to `back`. None stands for
# the default device.
_moved_p = jex.Primitive("ensembleode_moved")


@_moved_p.def_impl
def _(x, *, to, back):
    return uncommitted(x) if to is None else jax.device_put(x, to)


def _transposed(cotangent, x, *, to, back):
    if type(cotangent) is ad.Zero:
        return [cotangent]
    return [_moved_p.bind(cotangent, to=back, back=to)]


_moved_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_moved_p, _transposed)
batching.defvectorized(_moved_p)
# (A program runs on a single device.)
mlir.register_lowering(_moved_p, lambda ctx, x, **_: [x])
