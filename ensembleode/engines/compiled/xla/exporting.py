"""Programs that leave this process: serialised by JAX, together with the kernels that they call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array

from .call import kernels_in, NativeKernel, safety_checks


class UnexportableError(ValueError):
    """A program calls what exists only in this process."""


def exported_with_kernels(
    fn: Callable, args: Sequence, *, derivatives: int = 0, **options: Any
) -> tuple[bytes, tuple[NativeKernel, ...]]:
    """A function of arrays of these shapes, serialised with so many of its reverse derivatives, and
    the kernels that they call; a process that reads it gives the kernels to `register` first.

    `options` are those of `jax.export.export`. **Raises:** `UnexportableError`.
    """
    try:
        fn = jax.jit(fn)
        each = _with_pullbacks(fn, args, derivatives)
        found = [kernels_in(of.trace(*structs).jaxpr) for of, structs in each]
        kernels = tuple(dict.fromkeys(itertools.chain.from_iterable(found)))
        exported = jax.export.export(fn, disabled_checks=safety_checks(kernels), **options)(*args)
        return bytes(exported.serialize(vjp_order=derivatives)), kernels
    except (ValueError, NotImplementedError) as e:
        if "callback" not in str(e).lower() and "serializ" not in str(e).lower():
            raise
        raise UnexportableError(str(e)) from e


def _with_pullbacks(fn: Any, args: Sequence, derivatives: int) -> Iterator[tuple[Any, Any]]:
    """The jitted function and its pullback, that of the pullback, and so on, each with the structs
    of its arguments."""
    yield fn, args
    if derivatives:
        yield from _with_pullbacks(*_pullback(fn, args), derivatives - 1)


def _pullback(fn: Callable, args: Sequence) -> tuple[Any, list]:
    flat, tree = jtu.tree_flatten(tuple(args))

    def moving(*xs):
        return list(filter(_is_inexact, jtu.tree_leaves(fn(*tree.unflatten(xs)))))

    def pulled(xs, cts):
        _, back = jax.vjp(moving, *xs)
        return list(filter(_is_inexact, back(cts)))

    return jax.jit(pulled), [flat, jax.eval_shape(moving, *flat)]


def _is_inexact(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
