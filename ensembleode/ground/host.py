"""Calls of the host from inside of a compiled program, with plain NumPy arrays as operands.

`jax.pure_callback` first makes JAX arrays of the operands. Copying large operands needs a thread of
JAX's pool; on a machine with one core, the only one is waiting for the callback.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir


_call_p = jex.Primitive("ensembleode_host_call")
_call_p.multiple_results = True


def host_call(
    fn: Callable,
    results: Sequence,
    *operands: Any,
    no_derivative: str = "what is called on the host has no derivative.",
) -> list:
    """`fn(*operands)`, which returns NumPy arrays of the shapes and dtypes of `results`.

    `fn` is hashable; compiled programs are cached by it. Under `jax.vmap`, it is called for one
    entry after the other. Differentiating raises a `TypeError` with the message `no_derivative`.
    """
    avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in results)
    return _call_p.bind(
        *map(jnp.asarray, operands), fn=fn, avals=avals, no_derivative=no_derivative
    )


def _called(*operands, fn, avals, **_):
    outs = fn(*map(np.asarray, operands))
    return [np.asarray(x, a.dtype).reshape(a.shape) for x, a in zip(outs, avals, strict=True)]


def _batched(operands, dims, **params):
    is_mapped = [d is not None for d in dims]
    moved = [jnp.moveaxis(x, d, 0) for x, d, m in zip(operands, dims, is_mapped, strict=True) if m]

    def one(rows):
        rows = iter(rows)
        every = [next(rows) if m else x for x, m in zip(operands, is_mapped, strict=True)]
        return _call_p.bind(*every, **params)

    outs = jax.lax.map(one, moved)
    return outs, [0] * len(outs)


def _jvp(primals, tangents, *, no_derivative, **_):
    raise TypeError(no_derivative)


def _lower(ctx, *operands, fn, avals, **_):
    def callback(*arrays):
        return tuple(_called(*arrays, fn=fn, avals=avals))

    results, _, _ = mlir.emit_python_callback(
        ctx,
        callback,
        None,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=False,
        returns_token=False,
    )
    return results


_call_p.def_impl(lambda *operands, **params: [jnp.asarray(x) for x in _called(*operands, **params)])
_call_p.def_abstract_eval(lambda *_, avals, **__: avals)
ad.primitive_jvps[_call_p] = _jvp
batching.primitive_batchers[_call_p] = _batched
mlir.register_lowering(_call_p, _lower)
