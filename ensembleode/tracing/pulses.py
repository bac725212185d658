"""What a traced function decides by the time alone: finds switches in time, and the comparisons
that make them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn

from .evaluation import evaluated, is_jaxpr, params_of
from .program import Program


_COMPARISONS = ("lt", "le", "gt", "ge")
# Primitives that compare or round, whose results jump; and those whose results have kinks.
_JUMPS, _BENDS = (*_COMPARISONS, "floor", "ceil", "round", "rem", "sign"), ("max", "min", "clamp")
# Primitives that call a jaxpr with their own operands; those with derivative rules of their own are
# as smooth as these.
_SMOOTH = ("custom_jvp_call", "custom_vjp_call")
_CALLS = ("jit", "remat2", "checkpoint", *_SMOOTH)
# JAX's functions that interpolate in a table, and that find the place in it.
_TABLES, _PLACES = ("interp", "_interp"), ("searchsorted",)

# Marks for numbers that depend on the time, on the state, and on a place in a table of times.
_TIME, _STATE, _PLACE = 1, 2, 4


@functools.lru_cache(maxsize=256)
def switches_in_time(field: Program) -> str:
    """How a program `(consts, u, p, t)` changes abruptly at some time, independently of the state:
    "jump" where it compares the time with something, or takes a remainder of it (a pulse, a switch,
    a table of these), "bend" where it limits the time (a ramp), otherwise "".

    The bends of an interpolated table don't count. A table is recognised by the difference of the
    time and an entry.
    """
    found = set(_changes(field.jaxpr, _marks_of_inputs(field)))
    if "jump" in found or ("place" in found and "distance" not in found):
        return "jump"
    return "bend" if "bend" in found else ""


def _marks_of_inputs(field: Program) -> list[int]:
    n = len(field.jaxpr.invars) - 2
    return [0] * len(field.jaxpr.constvars) + [_STATE, *[0] * n, _TIME]


def _changes(jaxpr: Jaxpr, marks: list[int]) -> Iterator[str]:
    known = _marks(jaxpr, marks)
    for eqn in jaxpr.eqns:
        name, ins = eqn.primitive.name, _marks_of(known, eqn.invars)
        every = functools.reduce(int.__or__, ins, 0)
        if (every == _TIME and name in _JUMPS) or (name == "cond" and ins[0] == _TIME):
            yield "jump"
        elif every == _TIME and name in _BENDS:
            yield "bend"
        elif name == "sub" and sorted(ins) == [_TIME, _PLACE]:
            yield "distance"
        elif _is_of_table(eqn, _PLACES) and every & _TIME:
            yield "place"
        if not _is_of_table(eqn, (*_TABLES, *_PLACES)):
            for body, given in _inside(eqn, ins):
                inside = _changes(body, given)
                yield from (x for x in inside if x != "bend" or name not in _SMOOTH)


def _is_of_table(eqn: JaxprEqn, names: Sequence[str]) -> bool:
    return eqn.primitive.name == "jit" and eqn.params["name"] in names


def _marks(jaxpr: Jaxpr, marks: list[int]) -> dict[Any, int]:
    """The marks of all variables, from those of the constants and inputs."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], marks, strict=True))
    for eqn in jaxpr.eqns:
        ins = _marks_of(known, eqn.invars)
        outs = [functools.reduce(int.__or__, ins, 0)] * len(eqn.outvars)
        if _is_of_table(eqn, _PLACES) and outs[0] == _TIME:
            outs = [_PLACE]
        elif eqn.primitive.name in _CALLS:
            for body, given in _inside(eqn, ins):
                found = _marks_of(_marks(body, given), body.outvars)
                outs = found if len(found) == len(outs) else outs
        known.update(zip(eqn.outvars, outs, strict=True))
    return known


def _marks_of(known: dict[Any, int], atoms: Sequence) -> list[int]:
    return [0 if isinstance(x, jex.Literal) else known.get(x, 0) for x in atoms]


def _inside(eqn: JaxprEqn, ins: list[int]) -> Iterator[tuple[Any, list[int]]]:
    """The jaxprs in an equation, with the marks of their inputs. Each input of a loop's body has
    the marks of all operands, unless the inputs are the operands themselves."""
    given = ins[1:] if eqn.primitive.name == "cond" else ins
    for inner in filter(is_jaxpr, params_of(eqn)):
        body = getattr(inner, "jaxpr", inner)
        n = len(body.constvars) + len(body.invars)
        every = functools.reduce(int.__or__, ins, 0)
        yield body, given if len(given) == n else [every] * n


def compared(field: Program, *args: Any, at: Callable) -> Array:
    """`field(*args)`, where each comparison of real numbers that depends on the time and not on the
    state is replaced by `at(a, b, result)`, of its operands and its result. Comparisons inside of
    loops, branches and functions with derivative rules stay as they are."""

    def through(jaxpr: Jaxpr, consts: Sequence, args: Sequence, marks: list[int]) -> list:
        known = _marks(jaxpr, marks)

        def instead(eqn: JaxprEqn, ins: Sequence) -> list | None:
            name, own = eqn.primitive.name, _marks_of(known, eqn.invars)
            if name == "jit":
                inner = eqn.params["jaxpr"]
                marks = [0] * len(inner.jaxpr.constvars) + own
                return through(inner.jaxpr, inner.consts, ins, marks)
            is_of_time = functools.reduce(int.__or__, own, 0) == _TIME
            if name not in _COMPARISONS or not is_of_time:
                return None
            if not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in ins):
                return None
            return [at(*ins, eqn.primitive.bind(*ins))]

        return evaluated(jaxpr, *args, consts=consts, instead=instead)

    consts, u, p, t = args
    (found,) = through(field.jaxpr, consts, [u, *p, t], _marks_of_inputs(field))
    return found
