"""The Jacobian of a program by its state, as a program: its entries that may be other than zero,
and the derivative by the time.

Where the program is small, its tangents are followed through it component by component: all entries
come of one pass, with what they have in common computed once. Otherwise it is pushed forward along
all components at once; or, where it is sparse, along directions each of which is of columns that
have no row in common. What only has derivatives backwards is pulled back from each component of its
result.
"""

import dataclasses as dc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..tracing.program import equations, Program
from .directions import along_all_components
from .lanes.interpreter import bind
from .scalarise import scalarise
from .sparsity import structure
from .staging import staged


# Tangents are followed through programs of at most so many operations where the Jacobian is sparse.
# (Where it is not, longer ones compile in up to four times as long, and are no faster: see
# benchmarks/stiff_sizes.py.)
_MOST_OPERATIONS = 4000


@dc.dataclass(frozen=True)
class Jacobian:
    """The Jacobian `[component of the result, component of the state]` of a field.

    - `jaxpr`: of the field's constants, state, parameters and time; its result is a vector, of the
        entries, and then of the derivative by the time unless that is zero.
    - `pattern`: the places of the entries, row by row.
    - `has_dfdt`: whether the derivative by the time may be other than zero.
    """

    jaxpr: jex.Jaxpr
    pattern: tuple[tuple[int, int], ...]
    has_dfdt: bool

    def __call__(self, consts: Sequence, u: Any, p: Sequence, t: Any) -> Any:
        return jax.core.eval_jaxpr(self.jaxpr, consts, u, *p, t)[0]


@functools.lru_cache(maxsize=256)
def jacobian(field: Program, *, apart: bool = True) -> Jacobian:
    """The Jacobian of a field by its state.

    **Arguments:** `apart`: whether a small one is taken apart into components.
    """
    scalars = None
    if is_reverse_only(field):
        return _of_arrays(field, by_rows=True)
    if apart:
        scalars = scalarise(tangent(field))
        if scalars is None and not structure(field).all():
            scalars = scalarise(tangent(field), _MOST_OPERATIONS)
    return _of_arrays(field) if scalars is None else _of_components(field, scalars)


#
# The derivative along a tangent
#


@functools.lru_cache(maxsize=256)
def is_reverse_only(field: Program) -> bool:
    """Whether a field has no derivative along a tangent, as what calls a `jax.custom_vjp`
    function."""
    try:
        made = tangent(field)
    except TypeError as e:
        if "forward-mode autodiff (jvp) to a custom_vjp" not in str(e):
            raise
        return True
    return leaves_no_tangent(made)


def leaves_no_tangent(jaxpr: jex.Jaxpr) -> bool:
    """Whether it has what JAX leaves in the place of a tangent that there is none of."""
    return any(eqn.primitive.name == "custom_lin" for eqn in equations(jaxpr))


def tangent(field: Program) -> jex.Jaxpr:
    """The program of the field's derivative along the tangents at the end of `p`, of the state and
    of the time."""
    struct, t = state_and_time(field)
    return staged(field, functools.partial(tangent_at, field), extra=[struct, t])


def tangent_at(field: Program, consts: Any, u: Any, p: Any, t: Any) -> Any:
    """`tangent` of arrays."""
    *p, du, dt = p
    return jax.jvp(lambda u, t: field(consts, u, tuple(p), t), (u, t), (du, dt))[1]


def _tangent_of_state(field: Program, consts: Any, u: Any, p: Any, t: Any) -> Any:
    *p, du = p
    return jax.jvp(lambda u: field(consts, u, tuple(p), t), (u,), (du,))[1]


def state_and_time(field: Program) -> list[jax.ShapeDtypeStruct]:
    avals: Any = [v.aval for v in (field.jaxpr.invars[0], field.jaxpr.invars[-1])]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


#
# Component by component
#

# What a tangent is multiplied by, by the number of the direction: an array of one element, or a
# number that is known.
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


def _followed(jaxpr: jex.Jaxpr, ins: Sequence) -> list:
    """The results of a program of scalars, each a number or a `_Row`; so are its inputs."""
    env: dict = dict(zip([*jaxpr.constvars, *jaxpr.invars], ins, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jex.Literal):
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype).reshape(-1)[0]
        return env[atom]

    for eqn in jaxpr.eqns:
        args = [read(v) for v in eqn.invars]
        if not any(isinstance(x, dict) for x in args):
            outs = bind(eqn, [_like(x, v) for x, v in zip(args, eqn.invars, strict=True)])
        else:
            outs = [_row(eqn, args)]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _row(eqn: Any, args: Sequence) -> _Row:
    """A result that is linear in those operands that are rows."""
    rows = [x for x in args if isinstance(x, dict)]
    rule = _SHORTCUTS.get(eqn.primitive.name)
    found = {}
    for j in dict.fromkeys(j for row in rows for j in row):
        each = [x.get(j) if isinstance(x, dict) else x for x in args]
        short = None if rule is None else rule(*each)
        if short is None:
            each = [_zero(v) if x is None else x for x, v in zip(each, eqn.invars, strict=True)]
            (short,) = bind(eqn, [_like(x, v) for x, v in zip(each, eqn.invars, strict=True)])
        if not (_is_known(short) and short == 0):
            found[j] = short
    return found


def _zero(atom: Any) -> Any:
    return np.zeros((), atom.aval.dtype)[()]


def _is_known(x: Any) -> bool:
    return isinstance(x, np.generic)


def _array(x: Any) -> Any:
    return jnp.full(1, x, x.dtype) if _is_known(x) else x.reshape(1)


def _like(x: Any, atom: Any) -> Any:
    """A number in the shape of an operand."""
    return _array(x).reshape(atom.aval.shape)


def _plus(x: Any, y: Any) -> Any:
    """(None is zero.)"""
    return y if x is None else x if y is None else _known_only(np.add, x, y)


def _minus(x: Any, y: Any) -> Any:
    if y is None:
        return x
    return _negative(y) if x is None else _known_only(np.subtract, x, y)


def _negative(x: Any) -> Any:
    return -x


def _times(x: Any, y: Any) -> Any:
    for factor, other in ((x, y), (y, x)):
        if _is_known(factor) and abs(factor) == 1:
            return other if factor > 0 else _negative(other)
    return _known_only(np.multiply, x, y)


def _known_only(fn: Callable, *args: Any) -> Any:
    """(None is left to the primitive.)"""
    with np.errstate(all="ignore"):
        return fn(*args) if all(map(_is_known, args)) else None


def _same(x: Any) -> Any:
    return x if _is_known(x) else None


_SHORTCUTS: dict[str, Callable] = {
    "add": _plus,
    "add_any": _plus,
    "mul": _times,
    "neg": _negative,
    "sub": _minus,
    **dict.fromkeys(("broadcast_in_dim", "copy", "reshape", "squeeze"), _same),
}


#
# Along directions
#


def _of_arrays(field: Program, *, by_rows: bool = False) -> Jacobian:
    """**Arguments:** `by_rows`: backwards from each component of the result."""
    places = structure(field)
    pattern = tuple((int(i), int(j)) for i, j in zip(*np.nonzero(places), strict=True))
    colours = coloured(places)
    n_colours = max(colours, default=-1) + 1
    state, time = state_and_time(field)
    ts = [False] * (len(field.jaxpr.invars) - 1) + [True]
    (has_dfdt,) = field.depends_on(ts)

    def pulled(consts, u, p, t):
        out, pull = jax.vjp(lambda u, t: field(consts, u, p, t).reshape(-1), u, t)
        rows, dfdt = jax.vmap(pull)(jnp.eye(out.size, dtype=out.dtype))
        rows = rows.reshape(out.size, -1)
        found = [rows[i, j].reshape(1).astype(out.dtype) for i, j in pattern]
        found += [dfdt.astype(out.dtype)] if has_dfdt else []
        return jnp.concatenate(found) if found else jnp.zeros(0, out.dtype)

    def entries(consts, u, p, t):
        def along(du, dt):
            return tangent_at(field, consts, u, (*p, du, dt), t).reshape(-1)

        which = jnp.asarray(colours, np.int32).reshape(state.shape)

        def direction(colour):
            return along((which == colour).astype(state.dtype), jnp.zeros((), time.dtype))

        found = []
        if len(pattern) == places.size:
            by_state = staged(field, functools.partial(_tangent_of_state, field), extra=[state])
            place = len(consts) + 1 + len(p)
            rows = along_all_components(by_state, [*consts, u, *p, t], place)
            found.append(rows.reshape(-1))
        elif pattern:
            rows = jax.vmap(direction)(jnp.arange(n_colours, dtype=np.int32))
            found += [rows[colours[j], i].reshape(1) for i, j in pattern]
        if has_dfdt:
            found.append(along(jnp.zeros(state.shape, state.dtype), jnp.ones((), time.dtype)))
        return jnp.concatenate(found) if found else jnp.zeros(0, state.dtype)

    return Jacobian(staged(field, pulled if by_rows else entries), pattern, has_dfdt)


def coloured(places: np.ndarray) -> list[int]:
    """A colour for each column, so that none of the columns of a colour have a row in common."""
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
