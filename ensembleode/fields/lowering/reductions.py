"""Reductions."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir import Assign, Expr, Op, Store
from .passing import aval_of, Lowering, rule
from .values import BOOL, converted, INT, number, position, stored, strides_of, Value


def least(dtype: np.dtype) -> Any:
    return -np.inf if dtype.kind == "f" else False if dtype.kind == "b" else np.iinfo(dtype).min


def most(dtype: np.dtype) -> Any:
    return np.inf if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max


# The operation, and what it starts from.
_REDUCE: dict[str, tuple[str, Callable]] = {
    "and": ("and", lambda dtype: True if dtype.kind == "b" else -1),
    "max": ("max", least),
    "min": ("min", most),
    "or": ("or", lambda dtype: 0),
    "prod": ("mul", lambda dtype: 1),
    "sum": ("add", lambda dtype: 0),
    "xor": ("xor", lambda dtype: 0),
}
_CUMULATE: dict[str, tuple[str, Callable]] = {"logsumexp": ("logaddexp", least)}


@rule(" ".join(f"reduce_{name}" for name in _REDUCE))
def _reduce(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    (x,) = ins
    aval, axes = aval_of(eqn), eqn.params["axes"]
    name, start = _REDUCE[eqn.primitive.name.removeprefix("reduce_")]
    dtype = np.dtype(aval.dtype)
    if x.size == math.prod(aval.shape):
        return [run.flat(x)]
    kept = [a for a in range(len(x.shape)) if a not in axes]

    def component(counters):
        total = run.variable(number(start(dtype), dtype))
        with run.loops(*(x.shape[a] for a in axes)) as inner:
            by_axis = dict(zip((*kept, *axes), (*counters, *inner), strict=True))
            element = x.by_axes([by_axis[a] for a in range(len(x.shape))])
            run.emit(Assign(total, Op(name, (total, element), dtype)))
        return total

    return [run.built(aval.shape, dtype, component)]


@rule(" ".join(f"cum{name}" for name in ("logsumexp", "max", "min", "prod", "sum")))
def _cumulate(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    (x,) = ins
    x, axis, reverse = run.flat(x), eqn.params["axis"], eqn.params["reverse"]
    name, start = (_REDUCE | _CUMULATE)[eqn.primitive.name.removeprefix("cum")]
    strides, n = strides_of(x.shape), x.shape[axis]
    buffer = run.allocate(x.dtype, x.size)
    others = [a for a in range(len(x.shape)) if a != axis]
    with run.loops(*(x.shape[a] for a in others)) as counters:
        total = run.variable(number(start(x.dtype), x.dtype))
        with run.loops(n) as (k,):
            along = (n - 1) * strides[axis] if reverse else 0
            step = -strides[axis] if reverse else strides[axis]
            where = position([*counters, k], [*(strides[a] for a in others), step], along)
            combine = _logaddexp if name == "logaddexp" else functools.partial(Op, name)
            run.emit(Assign(total, combine((total, run.let(x.at(where))), x.dtype)))
            run.emit(Store(buffer, where, total))
    return [stored(buffer, x.shape)]


def _logaddexp(args: tuple[Expr, Expr], dtype: np.dtype) -> Expr:
    """`log(exp(x) + exp(y))`, also of infinities."""
    x, _ = args
    below = Op("neg", (Op("abs", (Op("sub", args, dtype),), dtype),), dtype)
    more = Op("log1p", (Op("exp", (below,), dtype),), dtype)
    different = Op("add", (Op("max", args, dtype), more), dtype)
    equal = Op("add", (x, number(math.log(2), dtype)), dtype)
    return Op("select_n", (Op("eq", args, BOOL), different, equal), dtype)


@rule("argmax argmin")
def _arg(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    (x,) = ins
    aval = aval_of(eqn)
    (axis,) = eqn.params["axes"]
    better = "gt" if eqn.primitive.name == "argmax" else "lt"
    strides = strides_of(x.shape)
    kept = [a for a in range(len(x.shape)) if a != axis]
    x = run.stored(x)

    def component(counters):
        start = position(counters, [strides[a] for a in kept])
        best, at = run.variable(x.at(start)), run.variable(number(0, INT))
        with run.loops(x.shape[axis]) as (k,):
            now = run.variable(x.at(start.plus((k, strides[axis]))))
            wins = Op(better, (now, best), BOOL)
            if x.dtype.kind == "f":  # the first NaN wins
                nan, held = Op("ne", (now, now), BOOL), Op("eq", (best, best), BOOL)
                wins = Op("or", (wins, Op("and", (nan, held), BOOL)), BOOL)
            wins = run.let(wins)
            run.emit(Assign(at, Op("select_n", (wins, at, k), INT)))
            run.emit(Assign(best, Op("select_n", (wins, best, now), x.dtype)))
        return converted(at, aval.dtype)

    return [run.built(aval.shape, aval.dtype, component)]
