"""Programs that leave this process: serialised by JAX, together with the kernels that they call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .call import kernels_in, NativeKernel, safety_checks


def exported_with_kernels(
    fn: Callable, args: Sequence[Any], *, derivatives: int = 0, **options: Any
) -> tuple[bytes, tuple[NativeKernel, ...]]:
    """A function of arrays of these shapes, serialised with so many of its reverse derivatives, and
    the kernels that they call; a process that reads it gives the kernels to `register` first.

    `options` are those of `jax.export.export`. **Raises:** what that raises.
    """
    fn = jax.jit(fn)
    found = [kernels_in(of.trace(*xs).jaxpr) for of, xs in _with_pullbacks(fn, args, derivatives)]
    kernels = tuple(dict.fromkeys(kernel for of_one in found for kernel in of_one))
    exported = jax.export.export(fn, disabled_checks=safety_checks(kernels), **options)(*args)
    return bytes(exported.serialize(vjp_order=derivatives)), kernels


def _with_pullbacks(fn: Any, args: Sequence[Any], derivatives: int) -> Iterator[tuple[Any, Any]]:
    """The jitted function and its pullback, that of the pullback, and so on, each with the structs
    of its arguments."""
    yield fn, args
    if derivatives:
        yield from _with_pullbacks(*_pullback(fn, args), derivatives - 1)


def _pullback(fn: Callable, args: Sequence[Any]) -> tuple[Any, list]:
    flat, tree = jtu.tree_flatten(tuple(args))
    outs = jtu.tree_leaves(jax.eval_shape(fn, *args))
    moving = [jnp.issubdtype(x.dtype, jnp.inexact) for x in outs]

    def pulled(xs, cts):
        _, back = jax.vjp(lambda *xs: jtu.tree_leaves(fn(*tree.unflatten(xs))), *xs)
        left = iter(cts)
        found = back(
            [
                next(left) if moves else np.zeros(x.shape, jax.dtypes.float0)
                for x, moves in zip(outs, moving, strict=True)
            ]
        )
        return [x for x in found if x.dtype != jax.dtypes.float0]

    structs = [x for x, moves in zip(outs, moving, strict=True) if moves]
    return jax.jit(pulled), [flat, structs]
