"""The rules for branches and loops."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from ...tracing.evaluation import scan_parts
from .interpreter import cost, Interpreter, mapped, rule
from .values import is_constant, Scalars


@rule("cond")
def _cond(run: Interpreter, eqn: JaxprEqn, ins: Sequence[Scalars]) -> list[Scalars]:
    which, *operands = ins
    branches = eqn.params["branches"]
    (index,) = which.entries
    if is_constant(index):
        return run.evaluate(branches[max(0, min(int(index), len(branches) - 1))], operands)
    if not which.computed:
        return mapped(run, eqn, ins)
    outs = [run.evaluate(branch, operands) for branch in branches]
    if len(branches) == 2:
        index = lax.ne(index, np.zeros((), index.dtype)[()])
    return [_select(run, index, cases) for cases in zip(*outs, strict=True)]


def _select(run: Interpreter, index: Array, cases: Sequence[Scalars]) -> Scalars:
    """The value of the case that `index` chooses."""
    shape, dtype = cases[0].shape, cases[0].dtype
    run.check_size(math.prod(shape))
    columns = zip(*(c.entries for c in cases), strict=True)
    entries = [run.scalar("select_n", lax.select_n, (index, *c), dtype) for c in columns]
    return Scalars(shape, dtype, entries)


@rule("scan")
def _scan(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    """A loop, unrolled where it is short and small."""
    params = eqn.params
    length, closed = params["length"], params["jaxpr"]
    sizes = [math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
    limits = run.limits
    if max(sizes) > limits.moved or length * cost(closed) > limits.operations:
        return mapped(run, eqn, ins)
    n_consts, n_carry = scan_parts(eqn)
    split = n_consts + n_carry
    consts, carry, xs = ins[:n_consts], list(ins[n_consts:split]), ins[split:]
    steps = range(length - 1, -1, -1) if params["reverse"] else range(length)
    ys: list = [None] * length
    for i in steps:
        outs = run.evaluate(closed, [*consts, *carry, *(_row(x, i) for x in xs)])
        carry, ys[i] = outs[:n_carry], outs[n_carry:]
    avals: list = [v.aval for v in eqn.outvars[n_carry:]]
    rows = zip(*ys, strict=True) if length else [[] for _ in avals]
    stacked = [
        Scalars(a.shape, a.dtype, [e for x in each for e in x.entries])
        for a, each in zip(avals, rows, strict=True)
    ]
    return [*carry, *stacked]


def _row(x: Scalars, i: int) -> Scalars:
    size = math.prod(x.shape[1:])
    return Scalars(x.shape[1:], x.dtype, x.entries[i * size : (i + 1) * size])
