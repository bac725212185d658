"""The rules by which primitives are evaluated component by component, one small function for a
primitive or for a family of them.

A primitive without a rule works, too, if all its operands and results are single components. What a
new primitive needs besides: see `fields/__init__.py`. The rules for indexing are in `indexing.py`,
those for branches and loops in `control_flow.py`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..combining import CUMULATIVE, REDUCTIONS
from ..equations import DRAWN, ELEMENTWISE
from ..gather_scatter import iota, padded
from ..movements import MOVEMENTS
from ..products import layouts
from ..simplifying import written_out
from .interpreter import Interpreter, NotSmallError, rule
from .values import from_constant, rearranged, Scalars


@rule(
    ELEMENTWISE
    + DRAWN
    + """
    add_any complex conj convert_element_type copy imag mulhi polynomial real reduce_precision
    stop_gradient
    """
)
def elementwise(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    aval = eqn.outvars[0].aval
    run.check_size(math.prod(aval.shape))
    columns = [_broadcast_entries(x, aval.shape) for x in ins]
    name, emit = eqn.primitive.name, functools.partial(eqn.primitive.bind, **eqn.params)
    if name == "add_any":
        emit = lax.add
    entries = [
        run.scalar(name, emit, args, aval.dtype, eqn.params) for args in zip(*columns, strict=True)
    ]
    return [Scalars(aval.shape, aval.dtype, entries)]


def _broadcast_entries(x: Scalars, shape: tuple) -> list:
    if x.shape == shape:
        return x.entries
    if len(x.entries) == 1:
        return x.entries * math.prod(shape)
    numbers = np.arange(len(x.entries)).reshape(x.shape)
    return [x.entries[i] for i in np.broadcast_to(numbers, shape).reshape(-1)]


@rule(" ".join(MOVEMENTS))
def _moved(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    move, params = MOVEMENTS[eqn.primitive.name], eqn.params
    shapes = [v.aval.shape for v in eqn.outvars]
    if sum(map(math.prod, shapes)) > run.limits.moved:
        raise NotSmallError
    return rearranged(ins, lambda xs: move(np, xs, params, ()), shapes)


@rule("pad")
def _pad(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    x, value = ins
    shape = eqn.outvars[0].aval.shape
    if math.prod(shape) > run.limits.moved:
        raise NotSmallError

    def placed(xs: list) -> list:
        kept, numbers = padded(np, x.shape, eqn.params["padding_config"])
        whole = np.full(math.prod(shape), xs[1])
        whole[numbers] = xs[0][kept]
        return [whole]

    return rearranged([x, value], placed, [shape])


@rule("iota")
def _iota(run: Interpreter, eqn: JaxprEqn, ins: Sequence[Scalars]) -> list[Scalars]:
    params = eqn.params
    shape, d = params["shape"], params["dimension"]
    if ins or math.prod(shape) > run.limits.moved:
        raise NotSmallError
    return [from_constant(iota(np, shape, d).astype(params["dtype"]))]


@rule(" ".join(REDUCTIONS))
def _reduce(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    (x,) = ins
    aval, axes = eqn.outvars[0].aval, eqn.params["axes"]
    run.check_size(len(x.entries))
    if not x.entries:
        raise NotSmallError
    combine = _combiner(run, eqn)
    kept = [i for i in range(len(x.shape)) if i not in axes]
    numbers = np.arange(len(x.entries)).reshape(x.shape).transpose([*kept, *axes])
    rows = numbers.reshape(math.prod(aval.shape), -1)
    entries = [functools.reduce(combine, [x.entries[i] for i in row]) for row in rows]
    return [Scalars(aval.shape, aval.dtype, entries)]


@rule("reduce")
def in_plainer(run: Interpreter, eqn: JaxprEqn, ins: Sequence[Scalars]) -> list[Scalars]:
    """A primitive rewritten in plainer equations, of which short loops are unrolled."""
    return run.evaluate(written_out(eqn), ins)


@rule("cummax cummin cumprod cumsum")
def _cumulate(run: Interpreter, eqn: JaxprEqn, ins: Sequence[Scalars]) -> list[Scalars]:
    (x,) = ins
    run.check_size(len(x.entries))
    if not x.entries:
        raise NotSmallError
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    combine = _combiner(run, eqn)
    entries = list(x.entries)
    numbers = np.moveaxis(np.arange(len(entries)).reshape(x.shape), axis, 0)
    numbers = numbers[::-1] if reverse else numbers
    for before, now in itertools.pairwise(numbers.reshape(len(numbers), -1)):
        for i, j in zip(before, now, strict=True):
            entries[j] = combine(entries[i], entries[j])
    return [Scalars(x.shape, x.dtype, entries)]


def _combiner(run: Interpreter, eqn: Any) -> Callable:
    by = (REDUCTIONS | CUMULATIVE)[eqn.primitive.name]
    return lambda x, y: run.scalar(by.name, by.emit, (x, y), eqn.outvars[0].aval.dtype)


@rule("dot_general")
def _dot_general(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    x, y = ins
    aval = eqn.outvars[0].aval
    (contracted, _), _ = eqn.params["dimension_numbers"]
    products = math.prod(aval.shape) * math.prod(x.shape[i] for i in contracted)
    run.check_size(products)
    if not products:
        raise NotSmallError
    dtype = aval.dtype
    xs, ys = layouts(eqn, x.shape, y.shape)

    def entry(value: Scalars, i: Any) -> Any:
        e = value.entries[i]
        return e if e.dtype == dtype else lax.convert_element_type(e, dtype)

    def product(row: Any, column: Any) -> Any:
        terms = [
            run.scalar("mul", lax.mul, (entry(x, i), entry(y, j)), dtype)
            for i, j in zip(row, column, strict=True)
        ]
        return functools.reduce(lambda a, b: run.scalar("add", lax.add, (a, b), dtype), terms)

    entries = [
        product(row, column)
        for rows, columns in zip(xs, ys, strict=True)
        for row in rows
        for column in columns
    ]
    return [Scalars(aval.shape, dtype, entries)]
