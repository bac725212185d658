"""Reading and writing the components of a flat array by their numbers; those read must be in
range."""

import jax.extend.core as jex
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.interpreters import mlir

from ..combining import SCATTERS


_take_p = jex.Primitive("take")
_put_p = jex.Primitive("put")


def take(x: Array, numbers: Array) -> Array:
    """The components of `x [size]` with these numbers, which must be in range."""
    return _take_p.bind(x, numbers)


def put(
    x: Array, numbers: Array, new: Array, inside: Array | None = None, by: str = "scatter"
) -> Array:
    """`x [size]` with `new` combined, one after the other, into the components with these numbers,
    as the scatter primitive of the name `by` does it; only those that are `inside`, if given."""
    masks = () if inside is None else (inside,)
    return _put_p.bind(x, numbers, new, *masks, by=by)


def _taken_numbers(x, numbers):
    return x.at[numbers].get(mode="promise_in_bounds")


def _written(x, numbers, new, inside=None, *, by):
    if inside is not None:
        numbers = jnp.where(inside, numbers, x.size)
    combined = SCATTERS[by]
    method = "set" if combined is None else combined.name
    method = {"mul": "multiply", "sub": "subtract"}.get(method, method)
    return getattr(x.at[numbers], method)(new, mode="drop")


for _primitive, _computed, _aval in (
    (_take_p, _taken_numbers, lambda x, numbers: ShapedArray(numbers.shape, x.dtype)),
    (_put_p, _written, lambda x, *_, by: ShapedArray(x.shape, x.dtype)),
):
    _primitive.def_impl(_computed)
    _primitive.def_abstract_eval(_aval)
    mlir.register_lowering(_primitive, mlir.lower_fun(_computed, multiple_results=False))
