"""The rules for branches and loops."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn

from ...tracing.evaluation import scan_parts
from ..ir import Assign, Buffer, Const, Expr, Index, Load, Op, Switch, Var, While
from .movement import picked
from .passing import Lowering, rule
from .values import BOOL, converted, elementwise, INT, LoweredArray, number, scalar, stored


@rule("cond")
def _cond(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    which, *operands = ins
    if isinstance(which.expr, Const):
        return run.evaluate(eqn.params["branches"][int(which.expr.value)], operands)
    operands = [run.settled(run.stored(x), 2) for x in operands]
    places = [_place(run, v.aval) for v in eqn.outvars]
    cases = []
    for branch in eqn.params["branches"]:
        with run.block() as body:
            for place, out in zip(places, run.evaluate(branch, operands), strict=True):
                _write(run, place, out)
        cases.append(tuple(body))
    run.emit(Switch(converted(which.expr, INT), tuple(cases)))
    return [_read(place, v.aval) for place, v in zip(places, eqn.outvars, strict=True)]


Place: TypeAlias = Var | Buffer


def _place(run: Lowering, aval: Any, value: LoweredArray | None = None) -> Place:
    """A variable or a buffer of this type that can be written repeatedly; it starts with
    `value`."""
    if math.prod(aval.shape) == 1:
        return run.variable(number(0, aval.dtype) if value is None else value.expr)
    buffer = run.allocate(aval.dtype, math.prod(aval.shape))
    if value is not None:
        run.copy(value, buffer)
    return buffer


def _write(run: Lowering, place: Place, value: LoweredArray) -> None:
    if isinstance(place, Var):
        run.emit(Assign(place, value.expr))
    elif value.buffer != place:
        run.copy(value, place)


def _read(place: Place, aval: Any) -> LoweredArray:
    if isinstance(place, Var):
        return scalar(place, aval.shape)
    return stored(place, aval.shape)


def _write_all(run: Lowering, places: Sequence[Place], values: Sequence[LoweredArray]) -> None:
    """Write values to places as if all were written at once, although one value may read a place
    that another overwrites."""
    ready = []
    for place, value in zip(places, values, strict=True):
        if isinstance(place, Var):
            value = scalar(run.variable(value.expr), value.shape)
        elif value.buffer is None or any(_overlap(value.buffer, p) for p in places if p != place):
            buffer = run.allocate(value.dtype, value.size)
            run.copy(value, buffer)
            value = stored(buffer, value.shape)
        ready.append(value)
    for place, value in zip(places, ready, strict=True):
        _write(run, place, value)


def _overlap(x: Buffer, y: Place) -> bool:
    """Whether a buffer and a place share memory."""
    if isinstance(y, Var) or (x.group, x.dtype) != (y.group, y.dtype):
        return False
    return x.start < y.start + y.size and y.start < x.start + x.size


@rule("while")
def _while(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    params = eqn.params
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    consts = [run.settled(run.stored(x), 2) for x in ins[: n_test + n_body]]
    avals = [v.aval for v in eqn.outvars]
    carried = ins[n_test + n_body :]
    places = [_place(run, a, x) for a, x in zip(avals, carried, strict=True)]
    carry = [_read(place, a) for place, a in zip(places, avals, strict=True)]
    going: Any = params["cond_jaxpr"].out_avals[0]
    # A loop under `vmap` has an array of conditions: it goes on while any of them holds.
    goes_on = run.allocate(BOOL, math.prod(going.shape)) if math.prod(going.shape) > 1 else None
    with run.block() as test:
        (each,) = run.evaluate(params["cond_jaxpr"], [*consts[:n_test], *carry])
        if goes_on is not None:
            run.copy(each, goes_on)
            condition = run.variable(number(False, BOOL))
            with run.loops(goes_on.size) as (i,):
                now = Load(goes_on, Index().plus((i, 1)))
                run.emit(Assign(condition, Op("or", (condition, now), BOOL)))
        else:
            condition = run.let(each.expr)
    with run.block() as body:
        outs = run.evaluate(params["body_jaxpr"], [*consts[n_test:], *carry])
        if goes_on is not None:
            mask = stored(goes_on, going.shape)
            outs = [_where(run, mask, new, old) for new, old in zip(outs, carry, strict=True)]
        _write_all(run, places, outs)
    run.emit(While(tuple(test), condition, tuple(body)))
    return carry


def _where(run: Lowering, mask: LoweredArray, x: LoweredArray, y: LoweredArray) -> LoweredArray:
    """`x` where the mask, along the first axes of both, is true; else `y`."""
    numbers = np.arange(mask.size).reshape(*mask.shape, *[1] * (len(x.shape) - len(mask.shape)))
    masks = picked(run, [mask], np.broadcast_to(numbers, x.shape))
    return elementwise(x.shape, x.dtype, [masks, y, x], lambda *args: Op("select_n", args, x.dtype))


@rule("scan")
def _scan(run: Lowering, eqn: Any, ins: list[LoweredArray]) -> list[LoweredArray]:
    params = eqn.params
    length, closed = params["length"], params["jaxpr"]
    body = closed.jaxpr
    n_consts, n_carry = scan_parts(eqn)
    split = n_consts + n_carry
    ins = [run.settled(run.stored(x), 2) for x in ins]
    consts, carried, xs = ins[:n_consts], ins[n_consts:split], ins[split:]
    avals = [v.aval for v in eqn.outvars]
    places = [_place(run, a, x) for a, x in zip(avals, carried, strict=False)]
    carry = [_read(place, a) for place, a in zip(places, avals, strict=False)]
    stacks = [run.allocate(a.dtype, math.prod(a.shape)) for a in avals[n_carry:]]
    with run.loops(length) as (i,):

        def row(size: int) -> Index:
            first = (length - 1) * size if params["reverse"] else 0
            return Index(first).plus((i, -size if params["reverse"] else size))

        rows = [_row(x, v.aval, row) for x, v in zip(xs, body.invars[split:], strict=True)]
        outs = run.evaluate(closed, [*consts, *carry, *rows])
        for stack, out in zip(stacks, outs[n_carry:], strict=True):
            run.copy(out, stack, row(out.size))
        _write_all(run, places, outs[:n_carry])
    stacked = [stored(s, a.shape) for s, a in zip(stacks, avals[n_carry:], strict=True)]
    return [*carry, *stacked]


def _row(x: LoweredArray, aval: Any, row: Callable[[int], Index]) -> LoweredArray:
    size = math.prod(aval.shape)
    start = row(size)

    def at(i: Index) -> Expr:
        return x.at(Index(start.offset + i.offset, (*start.terms, *i.terms)))

    return LoweredArray(aval.shape, x.dtype, at)
