"""The operations by which a reduction, a cumulative operation or a scatter combines numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr
from jax.typing import ArrayLike

from .equations import of_each


class Combination(NamedTuple):
    """A binary operation by which numbers are combined.

    - `name`: the name of the elementwise primitive, or a name of its own where there is no such
        primitive.
    - `emit`: the operation, a function of two arrays.
    - `neutral`: a function of a dtype that returns the operation's neutral element.
    """

    name: str
    emit: Callable
    neutral: Callable[[np.dtype], Any]


def least(dtype: np.dtype) -> ArrayLike:
    """The smallest number of a dtype."""
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def most(dtype: np.dtype) -> ArrayLike:
    """The largest number of a dtype."""
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _logaddexp(x: Array, y: Array) -> Array:
    """`log(exp(x) + exp(y))`, also for infinities."""
    more = lax.log1p(lax.exp(lax.neg(lax.abs(lax.sub(x, y)))))
    equal = lax.add(x, lax.full_like(x, math.log(2)))
    return lax.select(lax.eq(x, y), equal, lax.add(lax.max(x, y), more))


_ADD = Combination("add", lax.add, lambda dtype: 0)
_AND = Combination("and", lax.bitwise_and, lambda dtype: True if dtype.kind == "b" else -1)
_LOGADDEXP = Combination("logaddexp", _logaddexp, least)
_MAX = Combination("max", lax.max, least)
_MIN = Combination("min", lax.min, most)
_MUL = Combination("mul", lax.mul, lambda dtype: 1)
_OR = Combination("or", lax.bitwise_or, lambda dtype: 0)
_SUB = Combination("sub", lax.sub, lambda dtype: 0)
_XOR = Combination("xor", lax.bitwise_xor, lambda dtype: 0)

# Each table is keyed by the name of the primitive. None: the scatter overwrites the old numbers.
REDUCTIONS = {
    **{f"reduce_{by.name}": by for by in (_AND, _MAX, _MIN, _OR, _XOR)},
    **{"reduce_prod": _MUL, "reduce_sum": _ADD},
}
CUMULATIVE = {
    **{f"cum{by.name}": by for by in (_MAX, _MIN)},
    **{"cumlogsumexp": _LOGADDEXP, "cumprod": _MUL, "cumsum": _ADD},
}
SCATTERS = {"scatter": None, **{f"scatter-{by.name}": by for by in (_ADD, _MAX, _MIN, _MUL, _SUB)}}


def as_rows(x: Array, axes: Sequence[int]) -> Array:
    """`x` as an array whose first axis runs over all the elements that a reduction over `axes`
    combines."""
    x = jnp.moveaxis(x, axes, range(len(axes)))
    return x.reshape((-1, *x.shape[len(axes) :]))


def folded(body: ClosedJaxpr, starts: list, rows: list) -> list:
    """The rows combined by `body`, one after the other. (The derivative of JAX's own primitive
    starts from another initial value, in JAX 0.12.)"""
    known = _known_reduction(body)
    if known is not None:
        whole = getattr(lax, known)(rows[0], (0,))
        return [REDUCTIONS[known].emit(starts[0], whole)]
    combine = of_each(jex.jaxpr_as_fun(body), starts[0].ndim)
    return lax.scan(lambda carry, row: (combine(*carry, *row), None), starts, rows)[0]


def _known_reduction(body: ClosedJaxpr) -> str | None:
    """The name of the reduction primitive that does the same as this body; None if there is
    none."""
    jaxpr = body.jaxpr
    if len(jaxpr.eqns) != 1 or len(jaxpr.invars) != 2:
        return None
    (eqn,) = jaxpr.eqns
    if set(eqn.invars) != set(jaxpr.invars) or eqn.outvars != jaxpr.outvars:
        return None
    return next((k for k, by in REDUCTIONS.items() if by.name == eqn.primitive.name), None)
