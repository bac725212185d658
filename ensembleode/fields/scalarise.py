"""Takes small programs apart into scalars, by the interpreter of `scalarising/`."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..tracing.evaluation import equations
from . import tuning
from .choices import by_choice, CHOICES
from .equations import bind, branch_here, called, interpreted, rewritten
from .scalarising import (
    control_flow as control_flow,
    indexing as indexing,
    rules as rules,
)
from .scalarising.interpreter import Interpreter, mapped, NotSmallError, RULES, SizeLimits
from .scalarising.values import fill, Scalars
from .simplifying import APART


def scalarise(jaxpr: jex.Jaxpr, most: int = tuning.MOST_SCALAR_OPERATIONS) -> jex.Jaxpr | None:
    """The same computation with a variable for each component; None if that takes more than `most`
    operations. The constants, arguments and results of `jaxpr` become their components, one after
    the other, each an array of one element."""
    limits = SizeLimits(scalars=most, moved=4 * most, choice=64, operations=most)
    binders: list = [*jaxpr.constvars, *jaxpr.invars]
    sizes = [math.prod(v.aval.shape) for v in binders]
    if sum(sizes) > limits.moved:
        return None
    flat = inlined(jaxpr)
    has_matrices = any(eqn.primitive.name in _MATRICES for eqn in equations(flat))
    run = Interpreter(limits, _WITH_MATRICES if has_matrices else RULES)

    def components(*entries):
        remaining = iter(entries)
        values = [
            Scalars(v.aval.shape, v.aval.dtype, [next(remaining) for _ in range(size)])
            for v, size in zip(binders, sizes, strict=True)
        ]
        outs = run.evaluate(flat, values)
        return [fill(x, (1,), out.dtype) for out in outs for x in out.entries]

    entries = [
        jax.ShapeDtypeStruct((1,), v.aval.dtype)
        for v, size in zip(binders, sizes, strict=True)
        for _ in range(size)
    ]
    try:
        closed = jax.make_jaxpr(components)(*entries)
    except NotSmallError:
        return None
    if closed.consts or not _is_scalar(closed.jaxpr):
        return None
    return closed.jaxpr


def inlined(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """The jaxpr without calls, and without equations whose results are not used."""

    def equation(eqn: JaxprEqn, ins: list) -> list:
        inner = called(eqn)
        if inner is not None:
            return interpreted(inner, ins, lambda x: x, equation)
        return [branch_here(eqn)] if eqn.primitive.name == "platform_index" else bind(eqn, ins)

    return rewritten(jaxpr, lambda *xs: interpreted(jaxpr, xs, lambda x: x, equation))


def _is_scalar(jaxpr: Any) -> bool:
    variables: Sequence = [v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
    return all(math.prod(v.aval.shape) == 1 for v in variables) and not any(
        jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in variables
    )


def _chosen(run: Interpreter, eqn: JaxprEqn, ins: Sequence[Scalars]) -> list[Scalars]:
    """The permutations that result from pivots."""
    computed = ins[-1] if eqn.primitive.name == "gather" else ins[0]
    closed = by_choice(eqn) if computed.computed else None
    if closed is None:
        return RULES.get(eqn.primitive.name, mapped)(run, eqn, ins)
    return run.evaluate(closed, ins)


_MATRICES = {*APART, "custom_linear_solve"}
_WITH_MATRICES = {
    **RULES, **dict.fromkeys(CHOICES, _chosen), **dict.fromkeys(_MATRICES, rules.in_plainer)
}  # fmt: skip
