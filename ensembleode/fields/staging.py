"""Programs that engines lower besides a field: functions of the same constants, state, parameters
and time."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..tracing.program import Program, structs_of, with_constants


def parameters_of(program: Any) -> list:
    """The abstract values of a program's constants, and of its arguments between the state and the
    time."""
    return [v.aval for v in (*program.jaxpr.constvars, *program.jaxpr.invars[1:-1])]


def staged(
    program: Program, fn: Callable, *, state: PyTree = None, extra: Sequence = ()
) -> jex.Jaxpr:
    """Trace `fn(consts, u, p, t)` with the constants and inputs of a program. `state` is the
    abstract value of `u`, by default the program's; `extra` are those of further inputs, which are
    appended to `p`."""
    jaxpr = program.jaxpr
    n = len(jaxpr.constvars)
    u, *p, t = jaxpr.invars
    *structs, u, t = structs_of([*jaxpr.constvars, *p, u, t])
    args = (structs[:n], u if state is None else state, (*structs[n:], *extra), t)
    closed = jax.make_jaxpr(fn)(*args)
    if closed.consts:  # a derivative rule may add constants
        with_consts = closed

        def spelled_out(*xs):
            consts = map(_spelled_out, with_consts.consts)
            return jax.core.eval_jaxpr(with_consts.jaxpr, list(consts), *xs)

        closed = jax.make_jaxpr(spelled_out)(*jax.tree.leaves(args))
    inner: Any = closed.jaxpr
    return with_constants(inner, [*inner.constvars, *inner.invars[:n]], inner.invars[n:])


def _spelled_out(array: Any) -> Array:
    """A constant array as an expression of literals, so that the program gets no further
    constant."""
    array = np.asarray(array)
    numbers = [jax.lax.full((1,), x, array.dtype) for x in array.reshape(-1)]
    return jax.lax.reshape(jax.lax.concatenate(numbers, 0), array.shape)
