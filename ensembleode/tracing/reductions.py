"""Reductions with an initial value (`lax.reduce`), of which JAX's derivatives forget that value."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import PyTree

from .evaluation import bound_again, equations, evaluated, is_jaxpr, params_of, WITHIN


# By the name of an operation, the number that changes nothing.
_NEUTRAL = {"add": 0, "mul": 1, "max": -np.inf, "min": np.inf}


def reduces(jaxpr: ClosedJaxpr | Jaxpr) -> bool:
    """Whether there is such a reduction in a jaxpr, at any depth."""
    return any(eqn.primitive.name == "reduce" for eqn in equations(jaxpr))


def reduced(eqn: JaxprEqn, ins: Sequence) -> PyTree:
    """For `evaluated`: a sum, product, maximum or minimum that begins with an initial value, with
    that value taken in afterwards; and the same within calls, loops and branches. None for other
    equations."""
    if eqn.primitive.name in WITHIN and any(map(reduces, _inner(eqn))):
        return bound_again(eqn, ins, _run)
    operation = _operation(eqn)
    if operation is None:
        return None
    x, start = ins
    neutral = np.array(_NEUTRAL[operation.__name__], x.dtype)
    return [operation(start, jax.lax.reduce(x, neutral, operation, eqn.params["dimensions"]))]


def _inner(eqn: JaxprEqn) -> list:
    return [x for x in params_of(eqn) if is_jaxpr(x)]


def _run(jaxpr: ClosedJaxpr | Jaxpr, *args: Any) -> list:
    consts = list(map(jnp.asarray, getattr(jaxpr, "consts", ())))
    return evaluated(jaxpr, *args, consts=consts, instead=reduced)


def _operation(eqn: Any) -> Callable | None:
    """The operation of JAX by which numbers are reduced; None where it isn't known here."""
    if eqn.primitive.name != "reduce" or len(eqn.invars) != 2:
        return None
    inner, aval = eqn.params["jaxpr"], eqn.outvars[0].aval
    names = [x.primitive.name for x in getattr(inner, "jaxpr", inner).eqns]
    known = len(names) == 1 and names[0] in _NEUTRAL and jnp.issubdtype(aval.dtype, jnp.floating)
    return getattr(jax.lax, names[0]) if known else None
