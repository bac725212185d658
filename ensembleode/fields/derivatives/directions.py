"""The derivatives of a program of arrays along all components of its state at once.

As long as the tangents along all directions make up a diagonal matrix, only the diagonal is kept. A
matrix times a diagonal then is the matrix with its columns scaled, instead of a product of
matrices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import Array

from ..equations import bind, called, DRAWN, ELEMENTWISE, interpreted, RULED


class _DiagonalTangent(NamedTuple):
    """A tangent along all directions that is a diagonal matrix: its component `i` along direction
    `i` is component `i` of this array; all others are zero."""

    array: Any


class _EveryDirection(NamedTuple):
    """A tangent along all directions; these are the last axis of the array."""

    array: Any


_Value: TypeAlias = Any  # an array, or a tangent


def along_all_components(jaxpr: jex.Jaxpr, args: Sequence, place: int) -> Array:
    """The results of a program that is linear in one of its inputs, for each component of that
    input: `[component of the result, component of the input]`. `args` are the constants and the
    other inputs; `place` is where that input belongs among them."""
    aval: Any = [*jaxpr.constvars, *jaxpr.invars][place].aval
    ins: list[_Value] = [
        *args[:place],
        _DiagonalTangent(jnp.ones(aval.shape, aval.dtype)),
        *args[place:],
    ]
    (out,) = interpreted(jaxpr, ins, lambda x: x, _equation)
    if isinstance(out, _DiagonalTangent | _EveryDirection):
        return _along_every_direction(out).reshape(-1, aval.size)
    return jnp.zeros((out.size, aval.size), out.dtype)


def _equation(eqn: Any, args: Sequence[_Value]) -> list[_Value]:
    tangents = [x for x in args if isinstance(x, _DiagonalTangent | _EveryDirection)]
    if not tangents:
        return bind(eqn, args)
    name, size = eqn.primitive.name, eqn.outvars[0].aval.size
    # (Calls with rules stay calls, as the result may be differentiated.)
    if name not in RULED and (inner := called(eqn)) is not None:
        return interpreted(inner, args, lambda x: x, _equation)
    diagonal = all(isinstance(x, _DiagonalTangent) for x in tangents)
    # All diagonals have as many components as the input.
    if diagonal and size == tangents[0].array.size and _keeps_diagonals(name, args):
        outs = bind(eqn, [x.array if isinstance(x, _DiagonalTangent) else x for x in args])
        return [_DiagonalTangent(outs[0])]
    if name == "dot_general" and diagonal and (found := _scaled(eqn, args)) is not None:
        return [found]
    if name in _ELEMENTWISE:
        n = _along_every_direction(tangents[0]).shape[-1]
        shape = (*eqn.outvars[0].aval.shape, n)
        return [_EveryDirection(bind(eqn, [_alike(x, shape) for x in args])[0])]
    axes = [-1 if isinstance(x, _DiagonalTangent | _EveryDirection) else None for x in args]
    arrays = [
        _along_every_direction(x) if isinstance(x, _DiagonalTangent | _EveryDirection) else x
        for x in args
    ]
    outs = jax.vmap(lambda *xs: bind(eqn, xs), in_axes=axes, out_axes=-1)(*arrays)
    return list(map(_EveryDirection, outs))


def _keeps_diagonals(name: str, args: Sequence[_Value]) -> bool:
    """Whether the tangent of the result is diagonal, too: each component stays in its place, and is
    zero where the components of all tangents are zero."""
    if name in ("mul", "div"):
        return not all(isinstance(x, _DiagonalTangent) for x in args)
    return name in _IN_ORDER and all(isinstance(x, _DiagonalTangent) for x in args)


_IN_ORDER = {
    *("add", "add_any", "broadcast_in_dim", "convert_element_type", "copy", "neg", "reshape"),
    *("squeeze", "sub"),
}
_ELEMENTWISE = frozenset([*(ELEMENTWISE + DRAWN).split(), "add_any", "convert_element_type"])


def _scaled(eqn: Any, args: Sequence[_Value]) -> _EveryDirection | None:
    """The product of an array with a diagonal matrix, as the array with its columns scaled; None
    for any other product."""
    contracted, (batched, _) = eqn.params["dimension_numbers"]
    which = next(i for i, x in enumerate(args) if isinstance(x, _DiagonalTangent))
    diagonal, other = args[which].array, args[1 - which]
    if batched or diagonal.ndim != 1 or len(contracted[which]) != 1:
        return None
    columns = jnp.moveaxis(other, contracted[1 - which][0], -1)
    dtype = eqn.outvars[0].aval.dtype
    diagonal = jnp.broadcast_to(diagonal, columns.shape)
    return _EveryDirection(columns.astype(dtype) * diagonal.astype(dtype))


def _along_every_direction(x: _DiagonalTangent | _EveryDirection) -> Any:
    if isinstance(x, _EveryDirection):
        return x.array
    n = x.array.size
    column = jnp.broadcast_to(x.array.reshape(n, 1), (n, n))
    places = jnp.eye(n, dtype=bool)
    return jnp.where(places, column, jnp.zeros_like(column)).reshape(*x.array.shape, n)


def _alike(x: _Value, shape: Sequence[int]) -> Array:
    """An array or a tangent with all directions as its last axis."""
    if isinstance(x, _DiagonalTangent | _EveryDirection):
        return jnp.broadcast_to(_along_every_direction(x), shape)
    x = jnp.asarray(x)
    return jnp.broadcast_to(x[..., None] if x.ndim else x, shape)
