"""The numeric literals of a program, turned into inputs.

`f = lambda u, p, t: -0.7 * u` is a different program for every number in it. Here, a number becomes
an operand unless compiled code gains from knowing it. So a sweep over a Python number compiles
once.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import PyTree

from .evaluation import bound_again, evaluated, is_jaxpr, params_of, WITHIN
from .program import Program, program_of, with_constants


@functools.lru_cache(maxsize=256)
def with_numbers_apart(program: Program) -> tuple[Program, list]:
    """The program (with derivative rules) without its literals of the output's dtype, and a list of
    one constant with the values of these, which comes after the program's own constants. The list
    is empty if there is no such literal. The constant holds the bits as integers, so that nothing
    differentiates with respect to it."""
    dtype = np.dtype(program.out_avals[0].dtype)
    written = _written(program.jaxpr, dtype)
    if not 0 < len(written) <= _MOST_APART:
        return program, []
    bits = np.array(list(written), dtype).view(f"i{dtype.itemsize}")
    n = len(program.jaxpr.constvars)

    def apart(bits, *flat):
        each = {x: jax.lax.bitcast_convert_type(bits[i], dtype) for i, x in enumerate(written)}
        instead = functools.partial(_with_operands, each, dtype)
        return evaluated(program.jaxpr, *flat[n:], consts=flat[:n], instead=instead)

    avals: list = [v.aval for v in (*program.jaxpr.constvars, *program.jaxpr.invars)]
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    inner: Any = jax.make_jaxpr(apart)(bits, *structs).jaxpr
    constants, inputs = [*inner.invars[1 : n + 1], inner.invars[0]], inner.invars[n + 1 :]
    return program_of(with_constants(inner, constants, inputs), program.out_tree, rules=True), [
        bits
    ]


def _with_operands(apart: dict, dtype: np.dtype, eqn: Any, ins: list) -> PyTree:
    """The outputs of an equation whose literals are replaced by operands."""
    if written := _numbers_of(eqn, dtype):
        ins = [apart[written[i]] if i in written else x for i, x in enumerate(ins)]
        return [eqn.primitive.bind(*ins, **eqn.params)]
    if not _written_within(eqn, dtype):
        return None

    def run(inner, *args):
        consts = list(map(jnp.asarray, getattr(inner, "consts", ())))
        instead = functools.partial(_with_operands, apart, dtype)
        return evaluated(inner, *args, consts=consts, instead=instead)

    arrays = [jnp.asarray(x, v.aval.dtype) for x, v in zip(ins, eqn.invars, strict=True)]
    return bound_again(eqn, arrays, run)


_MOST_APART = 32  # literals that become operands
_ARITHMETIC = ("add", "sub", "mul", "div", "max", "min", "gt", "ge", "lt", "le")


def _numbers_of(eqn: JaxprEqn, dtype: np.dtype) -> dict[int, float]:
    """The operands of an equation, by index, that are literals from which compiled code gains
    nothing. Zero and the powers of two stay literals: a product with one is no operation, a product
    with two is a sum, and a quotient by a power of two is a product."""
    if eqn.primitive.name not in _ARITHMETIC or dtype.kind != "f":
        return {}
    found = {i: np.asarray(x.val) for i, x in enumerate(eqn.invars) if isinstance(x, jex.Literal)}
    found = {i: float(x) for i, x in found.items() if x.shape == () and x.dtype == dtype}
    return {i: x for i, x in found.items() if 0.5 < abs(math.frexp(x)[0]) < 1}


def _written(jaxpr: ClosedJaxpr | Jaxpr, dtype: np.dtype) -> dict[float, None]:
    """All literals of a jaxpr that become operands, at any depth, each once."""
    found: dict[float, None] = {}
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found |= _written_within(eqn, dtype) | dict.fromkeys(_numbers_of(eqn, dtype).values())
    return found


def _written_within(eqn: JaxprEqn, dtype: np.dtype) -> dict[float, None]:
    """The literals inside of the jaxprs that an equation calls, repeats or chooses from."""
    if eqn.primitive.name not in WITHIN:
        return {}
    if eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
        return {}  # (of a mapped loop, which only JAX can write)
    found = (_written(inner, dtype) for inner in filter(is_jaxpr, params_of(eqn)))
    return functools.reduce(operator.or_, found, {})
