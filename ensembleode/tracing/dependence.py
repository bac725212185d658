"""On which inputs of a program its results depend, and which decide what is computed."""

import functools
import operator
from collections.abc import Sequence

import jax.extend.core as jex

from .evaluation import is_jaxpr, params_of


def depending(jaxpr: jex.Jaxpr, marks: Sequence[bool]) -> list[bool]:
    """Which results of a program depend on its constants and inputs that are marked."""
    invars = [*jaxpr.constvars, *jaxpr.invars]
    marked = {v for v, mark in zip(invars, marks, strict=True) if mark}

    def is_marked(atom):
        return not isinstance(atom, jex.Literal) and atom in marked

    for eqn in jaxpr.eqns:
        ins = [is_marked(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            outs = depending(eqn.params["jaxpr"].jaxpr, ins)
        else:
            outs = [any(ins)] * len(eqn.outvars)
        marked.update(v for v, mark in zip(eqn.outvars, outs, strict=True) if mark)
    return [is_marked(v) for v in jaxpr.outvars]


# The slice of the operands that are indices.
_INDICES = {
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "gather": slice(1, 2),
    **{f"scatter{kind}": slice(1, 2) for kind in ("", "-add", "-max", "-min", "-mul", "-sub")},
}


def deciding(jaxpr: jex.Jaxpr, inputs: Sequence[int]) -> tuple[list[int], int]:
    """For each output the set of inputs that it may depend on, and the set of inputs that decide
    what is computed. A set is the bits of an integer."""
    depends = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    found = 0

    def union(sets):
        return functools.reduce(operator.or_, sets, 0)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        ins = [0 if isinstance(v, jex.Literal) else depends[v] for v in eqn.invars]
        outs = [union(ins)] * len(eqn.outvars)
        if name == "while":
            found |= union(ins)
        elif name == "cond":
            found |= ins[0]
            ins = ins[1:]
        elif name in _INDICES:
            found |= union(ins[_INDICES[name]])
        for inner in params_of(eqn):
            if not is_jaxpr(inner):
                continue
            inner = getattr(inner, "jaxpr", inner)
            count = len(inner.constvars) + len(inner.invars)
            is_call = name in _CALLS and count == len(ins)
            inner_outs, more = deciding(inner, ins if is_call else [union(ins)] * count)
            found |= more
            outs = inner_outs if is_call else outs
        depends.update(zip(eqn.outvars, outs, strict=True))
    return [0 if isinstance(v, jex.Literal) else depends[v] for v in jaxpr.outvars], found


# Primitives that only evaluate their jaxpr.
_CALLS = ("jit", "remat2", "checkpoint", "custom_jvp_call")
