"""Whether a function switches at some time, according to its traced program."""

import functools
from typing import Any

import jax.extend.core as jex

from .program import is_jaxpr, params_of, Program


# Primitives that compare or round, so that their results jump.
_SWITCHES = ("lt", "le", "gt", "ge", "floor", "ceil", "round", "rem", "sign")
# Primitives that call a jaxpr with their own operands.
_CALLS = ("jit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")

# Marks for numbers that depend on the time, and for numbers that depend on the state.
_TIME, _STATE = 1, 2


@functools.lru_cache(maxsize=256)
def switches_in_time(field: Program) -> bool:
    """Whether a program `(consts, u, p, t)` compares the time with something, or takes a remainder
    of it, independently of the state: a pulse, a switch, a table of these. (A switch that the state
    also decides is at no known time.)"""
    jaxpr = field.jaxpr
    marks = [0] * len(jaxpr.constvars) + [_STATE, *[0] * (len(jaxpr.invars) - 2), _TIME]
    return _look(jaxpr, marks)[1]


def _look(jaxpr: Any, marks: list[int]) -> tuple[list[int], bool]:
    """The marks of the outputs, and whether something switches in time, from the marks of the
    constants and inputs."""
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
            # The inputs of a loop's body are not told apart, unless they are the operands
            # themselves.
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
