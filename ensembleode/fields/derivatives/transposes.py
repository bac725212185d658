"""Programs that pull cotangents back through a field and through its Jacobian."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from ...tracing.evaluation import equations
from ...tracing.program import Program, substituted
from ..staging import parameters_of, staged
from .jacobian import Jacobian, state_and_time, tangent_at
from .residuals import split, SplitTranspose


def transposed(field: Program, which: Sequence[int], *, of_tangent: bool = False) -> jex.Jaxpr:
    """The program that pulls a cotangent back through the field. Its state is the cotangent; the
    field's state is appended to `p`. Its results are the cotangents of the state, and of the
    constants and parameters numbered `which`.

    With `of_tangent`, it is pulled back through the field's `tangent` instead. The tangents of the
    state and of the time then follow the state in `p`, and the cotangent of the state's tangent
    follows the state's in the results.
    """
    struct, time = state_and_time(field)
    if not of_tangent:
        return _transposed(field, field, which, struct, [])

    def along(consts, u, p, t, du, dt):
        return tangent_at(field, consts, u, (*p, du, dt), t)

    return _transposed(field, along, which, struct, [struct, time])


@functools.lru_cache(maxsize=256)
def effects_of(field: Program) -> frozenset:
    """The effects of a field, and those of its rules for the way back (`custom_vjp`)."""
    if not any(eqn.primitive.name.startswith("custom_vjp") for eqn in equations(field.jaxpr)):
        return frozenset(field.jaxpr.effects)
    real = [i for i, a in enumerate(parameters_of(field)) if jnp.issubdtype(a.dtype, jnp.inexact)]
    try:
        return frozenset({*field.jaxpr.effects, *transposed(field, real).effects})
    except Exception:  # it can't be differentiated; asking for the derivative will say so
        return frozenset(field.jaxpr.effects)


def transposed_jacobian(field: Program, made: Jacobian, which: Sequence[int]) -> jex.Jaxpr:
    """The program that pulls a cotangent back through the Jacobian of the field, like `transposed`;
    its state has a cotangent for each of the Jacobian's numbers."""
    struct, _ = state_and_time(field)
    size: Any = made.jaxpr.outvars[0].aval
    return _transposed(field, made, which, jax.ShapeDtypeStruct(size.shape, struct.dtype), [])


def _transposed(
    field: Program,
    fn: Callable,
    which: Sequence[int],
    cotangent: PyTree,
    more: Sequence,
    *,
    has_value: bool = False,
) -> jex.Jaxpr:
    """**Arguments:** `fn(consts, u, p, t, *more)`: the function that is pulled back through; the
    last of `more`, if any, gets no cotangent; `has_value`: whether its value is a second result."""
    n = len(field.jaxpr.constvars)
    struct, _ = state_and_time(field)
    extra = [struct, *more]

    def pulled(consts, cotangent, p, t):
        p, (u, *along) = p[: -len(extra)], p[-len(extra) :]
        numbers = [*consts, *p]

        def at(chosen, u, *du):
            every = substituted(numbers, which, chosen)
            return fn(every[:n], u, tuple(every[n:]), t, *du, *along[-1:])

        chosen = [numbers[i] for i in which]
        value, (to_chosen, *to_states) = _pulled_back(at, (chosen, u, *along[:-1]), cotangent)
        found = (*to_states, *to_chosen)
        joined = jnp.concatenate([x.reshape(-1).astype(struct.dtype) for x in found])
        return (joined, value) if has_value else joined

    return staged(field, pulled, state=cotangent, extra=extra)


_NO_WAY_BACK = (
    "Reverse-mode differentiation does not work for lax.while_loop",
    "Linearization failed to produce known values",
)


def _pulled_back(fn: Callable, args: tuple, cotangent: Array) -> tuple[Any, tuple]:
    """The value of a function, and the cotangents of its arguments. Where JAX has no reverse mode
    (`while_loop`, `custom_vmap`), forward mode is used along each component."""
    try:
        value, pullback = jax.vjp(fn, *args)
        return value, pullback(cotangent)
    except ValueError as e:
        if not any(message in str(e) for message in _NO_WAY_BACK):
            raise

    def paired(args: tuple) -> tuple[Array, Array]:
        value = fn(*args)
        return jnp.sum(value * cotangent), value

    found, value = jax.jacfwd(paired, has_aux=True)(args)
    return value, found


@functools.lru_cache(maxsize=256)
def in_two_parts(field: Program, which: tuple[int, ...]) -> SplitTranspose | None:
    """`transposed` as a program for the way forwards and one for the way back; None where it can't
    be split (see `residuals.split`)."""
    struct, _ = state_and_time(field)
    return split(_transposed(field, field, which, struct, [], has_value=True))
