"""The rules for products of arrays."""

import math
from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from ..gather_scatter import strides_of
from ..ir import Assign, Matrix, Op, Product
from ..products import is_large
from .passing import aval_of, Lowering, rule
from .values import BOOL, cast, LoweredArray, number, position, stored


@rule("dot_general")
def _dot_general(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    aval = aval_of(eqn)
    dtype = np.dtype(aval.dtype)
    (contracted, batch) = eqn.params["dimension_numbers"]
    free = [
        [a for a in range(len(x.shape)) if a not in c and a not in b]
        for x, c, b in zip(ins, contracted, batch, strict=True)
    ]
    ins = [cast(x, dtype) for x in ins]
    if dtype.kind == "f" and not batch[0] and is_large(eqn):
        x, y = (v if v.view is not None else run.stored(v) for v in ins)
        left = _matrix(x, free[0], contracted[0], first=False)
        right = _matrix(y, free[1], contracted[1], first=True)
        if left is not None and right is not None:
            out = run.allocate(dtype, math.prod(aval.shape))
            result = Matrix(out, left.rows, right.columns, False)
            run.emit(Product(result, left, right))
            return [stored(out, aval.shape)]
    # (Each component of an operand is read several times, so it is computed beforehand.)
    x, y = (run.flat(run.settled(v, 2)) for v in ins)
    strides = [strides_of(v.shape) for v in (x, y)]
    n_batch, n_x = len(batch[0]), len(free[0])
    times, plus = ("and", "or") if dtype == BOOL else ("mul", "add")

    def component(counters):
        b, fx, fy = counters[:n_batch], counters[n_batch : n_batch + n_x], counters[n_batch + n_x :]
        total = run.variable(number(0, dtype))
        with run.loops(*(x.shape[a] for a in contracted[0])) as k:
            places = [
                position([*b, *f, *k], [s[a] for a in (*bs, *fs, *cs)])
                for f, s, bs, fs, cs in zip((fx, fy), strides, batch, free, contracted, strict=True)
            ]
            product = Op(times, (x.at(places[0]), y.at(places[1])), dtype)
            run.emit(Assign(total, Op(plus, (total, product), dtype)))
        return total

    return [run.built(aval.shape, dtype, component)]


def _matrix(
    x: LoweredArray, free: Sequence[int], contracted: Sequence[int], first: bool
) -> Matrix | None:
    """An operand as a matrix `[free, contracted]`, or `[contracted, free]` if `first`; None if it
    doesn't lie in memory like that."""
    if x.place is None:
        return None
    buffer, strides = x.place
    of_rows, of_columns = (contracted, free) if first else (free, contracted)
    rows, columns = (math.prod(x.shape[a] for a in axes) for axes in (of_rows, of_columns))
    for transposed in False, True:
        order = [*of_columns, *of_rows] if transposed else [*of_rows, *of_columns]
        straight = strides_of([x.shape[a] for a in order])
        if all(strides[a] == s or x.shape[a] == 1 for a, s in zip(order, straight, strict=True)):
            return Matrix(buffer, rows, columns, transposed)
    return None
