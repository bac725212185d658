"""What implicit methods take from a problem besides its field."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..fields import staged
from ..fields.jacobian import coloured
from ..tracing.program import Program, program_of, with_constants
from .events import over, Part
from .extended_state import Extension, with_last_as_constants


@dataclasses.dataclass(frozen=True)
class ImplicitForm:
    """What implicit methods take from a problem besides its field.

    - `product`: the product of the Jacobian that the user gave with a direction, the last of `p`,
        as a program of the constants, state, parameters and time of the field; None where the
        Jacobian is the field's own.
    """

    product: Program | None = None

    def mapped(self, change: Any) -> "ImplicitForm":
        """With what `change` makes of `product`, where there is one."""
        product = self.product
        return self if product is None else dataclasses.replace(self, product=change(product))

    def with_constants_around(self, before: Sequence, after: Sequence) -> "ImplicitForm":
        """Of a field that has these more constants (abstract values), before its own and after."""
        return self.mapped(lambda x: with_constants_around(x, tuple(before), tuple(after)))

    def over(self, numbers: tuple, places: tuple[int, ...]) -> "ImplicitForm":
        """See `events.over`."""
        return self.mapped(lambda x: over(Part(x, ("direction",)), numbers, places).program)

    def with_integrals(
        self, field: Program, integrand: Program, extension: Extension
    ) -> "ImplicitForm":
        """From that of a field to that of its state and integrals."""
        return self.mapped(lambda x: _with_integrals(x, field, integrand, extension))

    def with_held(
        self, field: Program, before: Extension | None, extension: Extension
    ) -> "ImplicitForm":
        """From that of a field to that of a state behind which there are numbers that are held (see
        `extended_state.with_held`)."""
        return self.mapped(lambda x: _with_held(x, field, before, extension))

    def of_user(self, field: Program, extension: Extension) -> "ImplicitForm":
        """From that of a field to that of the user's state alone."""
        return self.mapped(lambda x: _of_user(x, field, extension))


#
# Of a Jacobian
#


@functools.lru_cache(maxsize=256)
def product_of(
    field: Program, jac: Program | None, places: tuple | None, order: tuple[int, ...] | None
) -> Program:
    """`ImplicitForm.product` of a Jacobian `[n, n]`, whose constants come after those of the field;
    or, without one, of that of the field.

    **Arguments:** `places`: where it may be other than zero, row by row; None: everywhere; `order`:
        which component of the field's state each row and column of `jac` is of; None: the same.
    """
    (state,) = field.out_avals
    size = state.size
    mask = None if places is None else np.array(places, bool).reshape(size, size)
    more = [] if jac is None else [_struct(v.aval) for v in jac.jaxpr.constvars]

    def along(consts: Any, u: Any, p: tuple, t: Any) -> Any:
        p, direction, own = p[: len(p) - len(more) - 1], p[-len(more) - 1], p[len(p) - len(more) :]
        v = direction.reshape(-1)
        if jac is not None:
            matrix = jac(own, u, p, t)
            matrix = matrix if order is None else in_order_of(matrix, np.asarray(order))
        else:
            assert mask is not None
            matrix = _found(field, mask, consts, u, p, t)
        if mask is None:
            out = jnp.sum(matrix * v[None], axis=1)
        else:
            # (What is multiplied by a known zero is none of the structure.)
            out = jnp.sum(matrix * (jnp.asarray(mask, v.dtype) * v[None]), axis=1)
        return out.reshape(u.shape)

    jaxpr = staged(field, along, extra=[_struct(state), *more])
    jaxpr = with_last_as_constants(jaxpr, len(more))
    return program_of(jaxpr, jax.tree.structure(0), rules=True)


def in_order_of(matrix: Any, order: np.ndarray) -> Any:
    """A matrix whose rows and columns are of the components of this order, by components."""
    place = np.argsort(order)
    return matrix[place][:, place]


def check_jacobian(jac: Program, field: Program) -> None:
    """**Raises:** `TypeError` or `ValueError` for what is no matrix `[n, n]` of the field's
    dtype."""
    (state,) = field.out_avals
    right = f"jac must return an array [n, n] of the dtype of the state u, {state.dtype}"
    if jac.out_tree != jax.tree.structure(0):
        raise TypeError(f"{right}; it returned the structure {jac.out_tree}.")
    (out,) = jac.out_avals
    if out.shape != (state.size, state.size):
        raise ValueError(
            f"{right}, here {(state.size, state.size)}: a row for each component of f, a column "
            f"for each of u. It returned the shape {out.shape}."
        )
    if out.dtype != state.dtype:
        raise TypeError(f"{right}; it returned {out.dtype}.")


def _found(field: Program, mask: np.ndarray, consts: Any, u: Any, p: tuple, t: Any) -> Any:
    """The Jacobian of a field, of which columns without a row in common are found together."""
    colours = coloured(mask)
    which = np.asarray(colours)

    def along(colour: int) -> Any:
        direction = jnp.asarray(which == colour, u.dtype).reshape(u.shape)
        return jax.jvp(lambda u: field(consts, u, p, t), (u,), (direction,))[1].reshape(-1)

    columns = [along(colour) for colour in range(max(colours, default=-1) + 1)]
    return jnp.stack([columns[k] for k in colours], axis=1)


#
# Of other states
#


@functools.lru_cache(maxsize=256)
def _with_integrals(
    product: Program, field: Program, integrand: Program, extension: Extension
) -> Program:
    more = [_struct(v.aval) for v in integrand.jaxpr.constvars]
    vector = jax.ShapeDtypeStruct((extension.size,), extension.user.dtype)

    def both(consts: Any, u: Any, p: tuple, t: Any) -> Any:
        p, of_integrand = p[: len(p) - len(more)], p[len(p) - len(more) :]
        p, direction = p[:-1], p[-1]
        user, v = extension.user_of(u), extension.user_of(direction)

        def rates(user: Any) -> Any:
            leaves = jax.tree.leaves(integrand(of_integrand, user, tuple(p), t))
            flat = [jnp.asarray(x, extension.user.dtype).reshape(-1) for x in leaves]
            return jnp.concatenate(flat)

        return extension.state(product(consts, user, (*p, v), t), jax.jvp(rates, (user,), (v,))[1])

    jaxpr = staged(field, both, state=vector, extra=[vector, *more])
    jaxpr = with_last_as_constants(jaxpr, len(more))
    return program_of(jaxpr, product.out_tree, rules=True)


@functools.lru_cache(maxsize=256)
def _with_held(
    product: Program, field: Program, before: Extension | None, extension: Extension
) -> Program:
    n = len(product.jaxpr.constvars)
    vector = jax.ShapeDtypeStruct((extension.size,), extension.user.dtype)

    def part(u: Any) -> Any:
        return extension.user_of(u) if before is None else u[: before.size]

    def read(consts: Any, u: Any, p: tuple, t: Any) -> Any:
        p, direction = p[:-1], p[-1]
        numbers = [*consts, *p]
        for (i, _), x in zip(extension.held, extension.held_of(u), strict=True):
            numbers[i] = x
        out = product(numbers[:n], part(u), (*numbers[n:], part(direction)), t).reshape(-1)
        # (What is held stays as it is, so nothing depends on the columns that are left out.)
        return jnp.concatenate([out, jnp.zeros(extension.size - out.size, out.dtype)])

    jaxpr = staged(field, read, state=vector, extra=[vector])
    return program_of(jaxpr, product.out_tree, rules=True)


@functools.lru_cache(maxsize=256)
def _of_user(product: Program, field: Program, extension: Extension) -> Program:
    def alone(consts: Any, u: Any, p: tuple, t: Any) -> Any:
        p, direction = p[:-1], p[-1]
        numbers = [*consts, *p]
        held = [numbers[i] for i, _ in extension.held]
        state, v = (extension.state(x, None, held) for x in (u, direction))
        return extension.user_of(product(consts, state, (*p, v), t))

    jaxpr = staged(field, alone, state=extension.user, extra=[extension.user])
    return program_of(jaxpr, product.out_tree, rules=True)


#
# Variables
#


@functools.lru_cache(maxsize=256)
def with_constants_around(program: Program, before: tuple, after: tuple) -> Program:
    """The same with more constants (abstract values, each a pair of a shape and a dtype), which it
    doesn't read."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (*before, *after)]
    jaxpr = program.jaxpr
    new: list[Any] = list(jax.make_jaxpr(lambda *xs: ())(*structs).jaxpr.invars)
    n = len(before)
    constants = [*new[:n], *jaxpr.constvars, *new[n:]]
    return program_of(with_constants(jaxpr, constants, jaxpr.invars), program.out_tree, rules=True)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
