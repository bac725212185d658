"""Reductions with an initial value (`lax.reduce`), of which JAX's derivatives forget that value."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .evaluation import equations, evaluated_at_any_depth


# By the name of an operation, the number that changes nothing.
_NEUTRAL = {"add": 0, "mul": 1, "max": -np.inf, "min": np.inf}


def reduces(jaxpr: ClosedJaxpr | Jaxpr) -> bool:
    """Whether there is such a reduction in a jaxpr, at any depth."""
    return any(map(_is_reduction, equations(jaxpr)))


def reduced(jaxpr: ClosedJaxpr, *args: Any) -> list:
    """Evaluate a jaxpr with sums, products, maxima and minima that begin with an initial value
    taken without it, and that value taken in afterwards."""
    return evaluated_at_any_depth(jaxpr, *args, which=_is_reduction, instead=_reduced)


def _is_reduction(eqn: JaxprEqn) -> bool:
    return _operation(eqn) is not None


def _reduced(eqn: Any, ins: Sequence, run: Callable) -> list:
    (x, start), operation = ins, _operation(eqn)
    assert operation is not None
    neutral = np.array(_NEUTRAL[operation.__name__], x.dtype)
    return [operation(start, jax.lax.reduce(x, neutral, operation, eqn.params["dimensions"]))]


def _operation(eqn: Any) -> Callable | None:
    """The operation of JAX by which numbers are reduced; None where it isn't known here."""
    if eqn.primitive.name != "reduce" or len(eqn.invars) != 2:
        return None
    inner, aval = eqn.params["jaxpr"], eqn.outvars[0].aval
    names = [x.primitive.name for x in getattr(inner, "jaxpr", inner).eqns]
    known = len(names) == 1 and names[0] in _NEUTRAL and jnp.issubdtype(aval.dtype, jnp.floating)
    return getattr(jax.lax, names[0]) if known else None
