"""What is known of a problem besides its field: what implicit methods need, and its rate."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..fields import staged
from ..fields.derivatives.jacobian import coloured, is_reverse_only
from ..ground.state_tree import matrix_of_parts
from ..problem.ode_function import in_order_of
from ..solvers.mass_matrix import MassMatrix
from ..tracing.program import Program, program_of, structs_of, with_constants
from .events import CallbackProgram, over_numbers
from .extended_state import Extension, rates, with_held, with_last_as_constants


@dataclasses.dataclass(frozen=True)
class ImplicitForm:
    """What is known of a problem besides its field.

    - `product`: the product of the user's Jacobian with a direction, as a program of the field's
        constants, state, parameters and time; the direction is the last of `p`. None if the
        Jacobian is that of the field.
    - `mass`: the mass matrix; None if it is the identity.
    - `rate`: the derivative of the solution with respect to time, a program like the field, where
        the field is the step of a stochastic method; it is that of the drift.
    """

    product: Program | None = None
    mass: MassMatrix | None = None
    rate: Program | None = None

    def mapped(self, change: Any) -> "ImplicitForm":
        """The form with its `product`, if it has one, replaced by `change(product)`."""
        product = self.product
        return self if product is None else dataclasses.replace(self, product=change(product))

    def with_rate(self, change: Callable) -> "ImplicitForm":
        """The form with its `rate`, if it has one, replaced by `change(rate)`."""
        rate = self.rate
        return self if rate is None else dataclasses.replace(self, rate=change(rate))

    def over_numbers(self, numbers: tuple, places: tuple[int, ...]) -> "ImplicitForm":
        """The form over one list of numbers; see `events.over_numbers`."""
        found = self.mapped(
            lambda x: over_numbers(CallbackProgram(x, ("direction",)), numbers, places).program
        )
        return found.with_rate(lambda x: over_numbers(CallbackProgram(x), numbers, places).program)

    def with_integrals(
        self, field: Program, integrand: Program, extension: Extension
    ) -> "ImplicitForm":
        """The form for the state with its integrals, from that for the user's state."""
        return self._extended(extension, lambda x: _with_integrals(x, field, integrand, extension))

    def with_held(
        self, field: Program, before: Extension | None, extension: Extension
    ) -> "ImplicitForm":
        """The form for a state with held numbers behind it (see `extended_state.with_held`), from
        that for the state without them."""
        found = self._extended(extension, lambda x: _with_held(x, field, before, extension))
        return found.with_rate(lambda x: with_held(x, before, extension))

    def of_user(self, field: Program, extension: Extension) -> "ImplicitForm":
        """The form for the user's state alone, from that for an extended state."""
        found = self.mapped(lambda x: _of_user(x, field, extension))
        mass = self.mass and self.mass.first(extension.controlled)
        return dataclasses.replace(found, mass=mass)

    def _extended(self, extension: Extension, change: Callable) -> "ImplicitForm":
        mass = self.mass and self.mass.extended(extension.size)
        return dataclasses.replace(self.mapped(change), mass=mass)


@functools.lru_cache(maxsize=256)
def product_of(
    field: Program, jac: Program | None, places: tuple | None, order: tuple[int, ...] | None
) -> Program:
    """The `ImplicitForm.product` for the Jacobian `jac`, `[n, n]`, whose constants come after those
    of the field; if `jac` is None, for the field's own Jacobian. `places` says row by row where the
    Jacobian may be nonzero; None for all places. `order` is, for each row and column of `jac`, the
    component of the state that it belongs to; None if they have the same order. A complex `jac` is
    that of components whose real and imaginary parts are the field's."""
    (state,) = field.out_avals
    size = state.size
    mask = None if places is None else np.array(places, bool).reshape(size, size)
    more = [] if jac is None else structs_of(jac.jaxpr.constvars)

    def along(consts: PyTree, u: Array, p: tuple, t: Array) -> Array:
        p, direction, own = p[: len(p) - len(more) - 1], p[-len(more) - 1], p[len(p) - len(more) :]
        v = direction.reshape(-1)
        if jac is not None:
            matrix = jac(own, u, p, t)
            matrix = matrix if order is None else in_order_of(matrix, np.asarray(order))
            matrix = matrix_of_parts(matrix) if jnp.iscomplexobj(matrix) else matrix
        else:
            assert mask is not None
            matrix = _jacobian_found(field, mask, consts, u, p, t)
        # Components that a known zero multiplies don't count as dependences.
        row = v[None] if mask is None else jnp.asarray(mask, v.dtype) * v[None]
        return jnp.sum(matrix * row, axis=1).reshape(u.shape)

    jaxpr = staged(field, along, extra=[*structs_of(field.jaxpr.outvars), *more])
    jaxpr = with_last_as_constants(jaxpr, len(more))
    return program_of(jaxpr, jax.tree.structure(0), rules=True)


def check_jacobian(jac: Program, size: int, dtype: np.dtype) -> None:
    """**Raises:** `TypeError` or `ValueError` for a `jac` that doesn't return a matrix of this size
    and dtype, those of the user's state."""
    right = f"jac must return an array [n, n] of the dtype of the state u, {dtype}"
    if jac.out_tree != jax.tree.structure(0):
        raise TypeError(f"{right}; it returned the structure {jac.out_tree}.")
    (out,) = jac.out_avals
    if out.shape != (size, size):
        raise ValueError(
            f"{right}, here {(size, size)}: a row for each component of f, a column "
            f"for each of u. It returned the shape {out.shape}."
        )
    if out.dtype != dtype:
        raise TypeError(f"{right}; it returned {out.dtype}.")


def _jacobian_found(
    field: Program, mask: np.ndarray, consts: Any, u: Array, p: tuple, t: Array
) -> Array:
    """The Jacobian of a field; columns that have no row in common are computed together. It is
    computed by rows if the field has only derivatives in reverse mode."""
    if is_reverse_only(field):
        by_rows = jax.jacrev(lambda u: field(consts, u, p, t).reshape(-1))(u)
        return by_rows.reshape(u.size, u.size)
    colours = coloured(mask)
    which = np.asarray(colours)

    def along(colour: int) -> Array:
        direction = jnp.asarray(which == colour, u.dtype).reshape(u.shape)
        return jax.jvp(lambda u: field(consts, u, p, t), (u,), (direction,))[1].reshape(-1)

    columns = [along(colour) for colour in range(max(colours, default=-1) + 1)]
    return jnp.stack([columns[k] for k in colours], axis=1)


@functools.lru_cache(maxsize=256)
def _with_integrals(
    product: Program, field: Program, integrand: Program, extension: Extension
) -> Program:
    more = structs_of(integrand.jaxpr.constvars)

    def both(consts: list[Array], u: Array, p: tuple, t: Array) -> Array:
        p, of_integrand = p[: len(p) - len(more)], p[len(p) - len(more) :]
        p, direction = p[:-1], p[-1]
        user, v = extension.user_of(u), extension.user_of(direction)

        def of_user(user: Array) -> Array:
            return rates(integrand, extension, of_integrand, user, p, t)

        if is_reverse_only(integrand):
            matrix = jax.jacrev(of_user)(user).reshape(-1, v.size)
            along = jnp.sum(matrix * v.reshape(1, -1), axis=1)
        else:
            along = jax.jvp(of_user, (user,), (v,))[1]
        return extension.state(product(consts, user, (*p, v), t), along)

    jaxpr = staged(field, both, state=extension.vector, extra=[extension.vector, *more])
    jaxpr = with_last_as_constants(jaxpr, len(more))
    return program_of(jaxpr, product.out_tree, rules=True)


@functools.lru_cache(maxsize=256)
def _with_held(
    product: Program, field: Program, before: Extension | None, extension: Extension
) -> Program:
    n = len(product.jaxpr.constvars)

    def part(u: PyTree) -> PyTree:
        return extension.user_of(u) if before is None else u[: before.size]

    def read(consts: Any, u: PyTree, p: tuple, t: Any) -> PyTree:
        p, direction = p[:-1], p[-1]
        numbers = extension.with_held([*consts, *p], u)
        out = product(numbers[:n], part(u), (*numbers[n:], part(direction)), t).reshape(-1)
        # Held numbers don't change, so their columns, which are left out, have no effect.
        return jnp.concatenate([out, jnp.zeros(extension.size - out.size, out.dtype)])

    jaxpr = staged(field, read, state=extension.vector, extra=[extension.vector])
    return program_of(jaxpr, product.out_tree, rules=True)


@functools.lru_cache(maxsize=256)
def _of_user(product: Program, field: Program, extension: Extension) -> Program:
    def alone(consts: Any, u: PyTree, p: tuple, t: Any) -> PyTree:
        p, direction = p[:-1], p[-1]
        numbers = [*consts, *p]
        held = [numbers[i] for i, _ in extension.held]
        state, v = (extension.state(x, None, held) for x in (u, direction))
        return extension.user_of(product(consts, state, (*p, v), t))

    jaxpr = staged(field, alone, state=extension.user, extra=[extension.user])
    return program_of(jaxpr, product.out_tree, rules=True)


@functools.lru_cache(maxsize=256)
def with_constants_around(program: Program, before: tuple, after: tuple) -> Program:
    """The program with more constants (abstract values, each a pair of a shape and a dtype), which
    it doesn't read."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (*before, *after)]
    jaxpr = program.jaxpr
    new: list = list(jax.make_jaxpr(lambda *xs: ())(*structs).jaxpr.invars)
    n = len(before)
    constants = [*new[:n], *jaxpr.constvars, *new[n:]]
    return program_of(with_constants(jaxpr, constants, jaxpr.invars), program.out_tree, rules=True)
