"""Whether a function of time switches at some of it, as its traced program shows."""

import functools
from typing import Any

import jax.extend.core as jex

from .program import is_jaxpr, params_of, Program


# What is compared, or rounded, to a number that jumps.
_SWITCHES = ("lt", "le", "gt", "ge", "floor", "ceil", "round", "rem", "sign")
# What calls a jaxpr with its operands as they are.
_CALLS = ("jit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")

# Marks of what depends on the time, and of what depends on the state.
_TIME, _STATE = 1, 2


@functools.lru_cache(maxsize=256)
def switches_in_time(field: Program) -> bool:
    """Whether a program `(consts, u, p, t)` compares the time with something, or takes a remainder
    of it, whatever the state is: a pulse, a switch, a table of them. (What the state decides, too,
    is at no time that is known.)"""
    jaxpr = field.jaxpr
    marks = [0] * len(jaxpr.constvars) + [_STATE, *[0] * (len(jaxpr.invars) - 2), _TIME]
    return _look(jaxpr, marks)[1]


def _look(jaxpr: Any, marks: list[int]) -> tuple[list[int], bool]:
    """The marks of the outputs, and whether something switches in time, from the marks of constants
    and inputs."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], marks, strict=True))

    def of(atom: Any) -> int:
        return 0 if isinstance(atom, jex.Literal) else known.get(atom, 0)

    for eqn in jaxpr.eqns:
        name, ins = eqn.primitive.name, [of(x) for x in eqn.invars]
        every = _union(ins)
        if every == _TIME and name in _SWITCHES:
            return [], True
        if name == "cond" and ins[0] == _TIME:
            return [], True
        outs = [every] * len(eqn.outvars)
        for inner in filter(is_jaxpr, params_of(eqn)):
            body = getattr(inner, "jaxpr", inner)
            n = len(body.constvars) + len(body.invars)
            given = ins[1:] if name == "cond" else ins
            # (Of a loop the operands of the body are not told apart, but by its own.)
            given = given if len(given) == n else [every] * n
            found, switches = _look(body, given)
            if switches:
                return [], True
            if name in _CALLS and len(found) == len(outs):
                outs = found
        known.update(zip(eqn.outvars, outs, strict=True))
    return [of(x) for x in jaxpr.outvars], False


def _union(marks: list[int]) -> int:
    found = 0
    for x in marks:
        found |= x
    return found
