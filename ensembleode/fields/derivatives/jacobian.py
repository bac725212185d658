"""The Jacobian of a program with respect to its state, as a program that returns the entries that
may be nonzero, and the derivative with respect to time.

In a small program, tangents are followed component by component, so all entries come from one pass,
which computes common subexpressions once. A larger program is differentiated in forward mode, along
all components at once; or, where its Jacobian is sparse, along sums of components whose columns
have no row in common. A program that has derivatives in reverse mode only is differentiated in that
mode, from each component of its result.
"""

import dataclasses as dc
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ...tracing.evaluation import equations
from ...tracing.program import Program, program_of, structs_of
from .. import tuning
from ..equations import bind, reader, RULED
from ..scalarise import scalarise
from ..staging import staged
from .directions import along_all_components
from .sparsity import structure


@dc.dataclass(frozen=True)
class Jacobian:
    """The Jacobian `[component of the result, component of the state]` of a field.

    - `jaxpr`: a program of the field's constants, state, parameters and time. Its result is one
        vector: the entries, followed by the derivative with respect to time unless that is zero.
    - `pattern`: the places of the entries, row by row.
    - `has_dfdt`: whether the derivative with respect to time may be nonzero.
    - `differentiable`: the same program with the derivative rules of what it calls, where `jaxpr`
        is without them, as it was taken apart; otherwise None.

    As a function it computes the same numbers, and may be differentiated.
    """

    jaxpr: jex.Jaxpr
    pattern: tuple[tuple[int, int], ...]
    has_dfdt: bool
    differentiable: jex.Jaxpr | None = None

    def __call__(self, consts: Sequence, u: Array, p: Sequence, t: Array) -> Array:
        return jax.core.eval_jaxpr(self.differentiable or self.jaxpr, consts, u, *p, t)[0]


@functools.lru_cache(maxsize=256)
def jacobian(field: Program, product: Program | None = None, *, apart: bool = True) -> Jacobian:
    """The Jacobian of a field with respect to its state: by JAX, or from `product`, the user's
    program of the Jacobian times a direction, which is the last of `p`. `apart` says whether a
    small program may be taken apart into components."""
    if not apart or is_reverse_only(field):
        return _of_arrays(field, product)
    linear = _linear(field, product)
    scalars = scalarise(linear)
    if scalars is None and not _structure(field, product).all():
        scalars = scalarise(linear, tuning.MOST_OPERATIONS_OF_JACOBIANS)
    if scalars is None or not _are_followed(field, scalars):
        return _of_arrays(field, product)
    made = _of_components(field, scalars)
    if not any(eqn.primitive.name in RULED for eqn in equations(linear)):
        return made
    by_arrays = _in_arrays(field, product, made.pattern, made.has_dfdt)
    return dc.replace(made, differentiable=by_arrays)


@functools.lru_cache(maxsize=256)
def is_reverse_only(field: Program) -> bool:
    """Whether a field has only derivatives in reverse mode, because it calls a `jax.custom_vjp`
    function."""
    try:
        made = tangent(field)
    except TypeError as e:
        if "forward-mode autodiff (jvp) to a custom_vjp" not in str(e):
            raise
        return True
    return leaves_no_tangent(made)


def leaves_no_tangent(jaxpr: jex.Jaxpr) -> bool:
    """Whether the program has the primitive that JAX puts in place of a tangent that it can't
    compute."""
    return any(eqn.primitive.name == "custom_lin" for eqn in equations(jaxpr))


def tangent(field: Program) -> jex.Jaxpr:
    """The program of the field's directional derivative; the tangents of the state and of the time
    are appended to `p`."""
    return staged(field, functools.partial(tangent_at, field), extra=state_and_time(field))


def tangent_at(field: Program, consts: PyTree, u: PyTree, p: PyTree, t: Any) -> PyTree:
    """The directional derivative of a field, as `tangent` stages it, evaluated at these arrays."""
    *p, du, dt = p
    return jax.jvp(lambda u, t: field(consts, u, tuple(p), t), (u, t), (du, dt))[1]


def _linear(field: Program, product: Program | None) -> jex.Jaxpr:
    """The program of `tangent`, computed with `product` as the product with the Jacobian."""
    if product is None:
        return tangent(field)

    def linear(consts, u, p, t):
        *p, du, dt = p
        out = product(consts, u, (*p, du), t)
        if not _has_time(field):
            return out
        return out + jax.jvp(lambda t: field(consts, u, tuple(p), t), (t,), (dt,))[1]

    return staged(field, linear, extra=state_and_time(field))


def _has_time(field: Program) -> bool:
    """Whether the derivative with respect to time may be nonzero."""
    (has_time,) = field.depends_on([False] * (len(field.jaxpr.invars) - 1) + [True])
    return has_time


def state_and_time(field: Program) -> list[jax.ShapeDtypeStruct]:
    return structs_of([field.jaxpr.invars[0], field.jaxpr.invars[-1]])


# The tangents of one number along all directions, by the number of the direction; those left out
# are zero. Each is an array of one element, or a NumPy scalar where it is known while tracing.
_Row: TypeAlias = dict[int, Any]


def _of_components(field: Program, scalars: jex.Jaxpr) -> Jacobian:
    pattern: list[tuple[int, int]] = []
    has_dfdt = False
    _, time = state_and_time(field)
    (out,) = field.out_avals
    size = math.prod(field.jaxpr.invars[0].aval.shape)  # pyright: ignore

    def entries(consts, u, p, t):
        nonlocal has_dfdt
        numbers = [y.reshape(1) for x in (*consts, u, *p) for y in jnp.reshape(x, -1)]
        directions = [{i: np.ones((), out.dtype)[()]} for i in range(size)]
        directions.append({size: np.ones((), time.dtype)[()]})
        rows = _followed(scalars, [*numbers, *directions, t.reshape(1)])
        rows = [row if isinstance(row, dict) else {} for row in rows]
        pattern[:] = [(i, j) for i, row in enumerate(rows) for j in sorted(row) if j < size]
        found = [rows[i][j] for i, j in pattern]
        has_dfdt = any(size in row for row in rows)
        if has_dfdt:
            found += [row.get(size, np.zeros((), out.dtype)[()]) for row in rows]
        found = [_array(x).astype(out.dtype) for x in found]
        return jnp.concatenate(found) if found else jnp.zeros(0, out.dtype)

    jaxpr = staged(field, entries)
    return Jacobian(jaxpr, tuple(pattern), has_dfdt)


def _are_followed(field: Program, scalars: jex.Jaxpr) -> bool:
    """Whether each tangent in this program is the only result of its equation, so that it can be
    followed. (A loop has several results.)"""
    size = math.prod(field.jaxpr.invars[0].aval.shape)  # pyright: ignore
    tangents = set(scalars.invars[-size - 2 : -1])
    for eqn in scalars.eqns:
        if not tangents.isdisjoint(v for v in eqn.invars if not isinstance(v, jex.Literal)):
            if len(eqn.outvars) > 1:
                return False
            tangents.update(eqn.outvars)
    return True


def _followed(jaxpr: jex.Jaxpr, ins: Sequence) -> list:
    """The results of a program of scalars that is linear in its tangents. Inputs and results are
    coefficients or `_Row`s."""
    env: dict = dict(zip([*jaxpr.constvars, *jaxpr.invars], ins, strict=True))
    read = reader(env, lambda array: array.reshape(-1)[0])
    for eqn in jaxpr.eqns:
        args = [read(v) for v in eqn.invars]
        if not any(isinstance(x, dict) for x in args):
            outs = bind(eqn, [_like(x, v) for x, v in zip(args, eqn.invars, strict=True)])
        else:
            outs = [_row(eqn, args)]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _row(eqn: Any, args: Sequence) -> _Row:
    """The result of an equation that is linear in those operands that are `_Row`s."""
    rows = [x for x in args if isinstance(x, dict)]
    rule = _SHORTCUTS.get(eqn.primitive.name)
    found = {}
    for j in dict.fromkeys(j for row in rows for j in row):
        each = [x.get(j) if isinstance(x, dict) else x for x in args]
        short = None if rule is None else rule(*each)
        if short is None:
            zeros = [np.zeros((), v.aval.dtype)[()] for v in eqn.invars]
            each = [zero if x is None else x for x, zero in zip(each, zeros, strict=True)]
            (short,) = bind(eqn, [_like(x, v) for x, v in zip(each, eqn.invars, strict=True)])
        if not (_is_known(short) and short == 0):
            found[j] = short
    return found


def _is_known(x: ArrayLike) -> bool:
    return isinstance(x, np.generic)


def _array(x: Any) -> Any:
    return jnp.full(1, x, x.dtype) if _is_known(x) else x.reshape(1)


def _like(x: Any, atom: Any) -> Any:
    """A coefficient as an array of the shape of an operand."""
    return _array(x).reshape(atom.aval.shape)


def _plus(x: ArrayLike | None, y: ArrayLike | None) -> ArrayLike | None:
    """`x + y`, where None stands for zero; None if the primitive has to compute it."""
    return y if x is None else x if y is None else _known_only(np.add, x, y)


def _minus(x: Any, y: PyTree) -> PyTree:
    if y is None:
        return x
    return -y if x is None else _known_only(np.subtract, x, y)


def _times(x: Any, y: PyTree) -> PyTree:
    for factor, other in ((x, y), (y, x)):
        if _is_known(factor) and abs(factor) == 1:
            return other if factor > 0 else -other
    return _known_only(np.multiply, x, y)


def _known_only(fn: Callable, *args: Any) -> Any:
    """The result where all numbers are known; None otherwise: the primitive has to compute it."""
    with np.errstate(all="ignore"):
        return fn(*args) if all(map(_is_known, args)) else None


_SHORTCUTS: dict[str, Callable] = {
    "add": _plus,
    "add_any": _plus,
    "mul": _times,
    "neg": operator.neg,
    "sub": _minus,
    **dict.fromkeys(
        ("broadcast_in_dim", "copy", "reshape", "squeeze"), lambda x: x if _is_known(x) else None
    ),
}


def _of_arrays(field: Program, product: Program | None) -> Jacobian:
    places = _structure(field, product)
    pattern = tuple((i, j) for i, j in np.argwhere(places).tolist())
    has_dfdt = _has_time(field)
    return Jacobian(_in_arrays(field, product, pattern, has_dfdt), pattern, has_dfdt)


def _in_arrays(
    field: Program,
    product: Program | None,
    pattern: Sequence[tuple[int, int]],
    has_dfdt: bool,
) -> jex.Jaxpr:
    """The program of the entries by operations on arrays, with the derivative rules of what the
    field calls. The pattern holds all places of the Jacobian that aren't known to be zero."""
    places = _structure(field, product)
    colours = coloured(places)
    n_colours = max(colours, default=-1) + 1
    state, _ = state_and_time(field)

    def linear(consts, u, p, t):
        if product is not None:
            return product(consts, u, p, t)
        *p, du = p
        return jax.jvp(lambda u: field(consts, u, tuple(p), t), (u,), (du,))[1]

    def by_colours(consts, u, p, t):
        which = jnp.asarray(colours, np.int32).reshape(state.shape)

        def direction(colour):
            du = (which == colour).astype(state.dtype)
            return linear(consts, u, (*p, du), t).reshape(-1)

        return jax.vmap(direction)(jnp.arange(n_colours, dtype=np.int32))

    def entries(consts, u, p, t):
        found = []
        if product is None and is_reverse_only(field):
            rows = _pulled(lambda u: field(consts, u, p, t).reshape(-1), u)
            rows = rows.reshape(len(rows), -1)
            found += [rows[i, j].reshape(1) for i, j in pattern]
        elif len(pattern) == places.size:
            by_state = staged(field, linear, extra=[state])
            place = len(consts) + 1 + len(p)
            found.append(along_all_components(by_state, [*consts, u, *p, t], place).reshape(-1))
        elif pattern:
            columns = by_colours(consts, u, p, t)
            found += [columns[colours[j], i].reshape(1) for i, j in pattern]
        if has_dfdt:
            found.append(_by_time(field, consts, u, p, t))
        return jnp.concatenate(found) if found else jnp.zeros(0, state.dtype)

    return staged(field, entries)


def _by_time(field: Program, consts: PyTree, u: Array, p: PyTree, t: Array) -> Array:
    def at(t):
        return field(consts, u, tuple(p), t).reshape(-1)

    if not is_reverse_only(field):
        return jax.jvp(at, (t,), (jnp.ones_like(t),))[1]
    return _pulled(at, t)


def _pulled(fn: Callable, x: Array) -> Array:
    """The Jacobian of a function that returns a vector, row by row in reverse mode."""
    out, pull = jax.vjp(fn, x)
    (rows,) = jax.vmap(pull)(jnp.eye(out.size, dtype=out.dtype))
    return rows.astype(out.dtype)


def _structure(field: Program, product: Program | None) -> np.ndarray:
    """The places where the Jacobian may be nonzero."""
    if product is None:
        return structure(field)

    def of_direction(consts, direction, p, t):
        *p, u = p
        return product(consts, u, (*p, direction), t)

    jaxpr = staged(field, of_direction, extra=structs_of(field.jaxpr.outvars))
    return structure(program_of(jaxpr, field.out_tree, rules=False))


def coloured(places: np.ndarray) -> list[int]:
    """A colour for each column, such that columns of one colour have no row in common."""
    taken: list[np.ndarray] = []
    colours = []
    for column in places.T:
        free = (i for i, rows in enumerate(taken) if not (rows & column).any())
        colour = next(free, len(taken))
        if colour == len(taken):
            taken.append(np.zeros_like(column))
        taken[colour] |= column
        colours.append(colour)
    return colours
