"""Calls and control flow: functions with derivative rules, branches and loops."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ...tracing.program import is_inexact, scan_parts, tangents_of
from .interpreter import cost, Interpreter, mapped, rule
from .values import fill, is_constant, Scalars, spread, Stacked, tail_of, unpack, Value


@rule("jit remat2")
def _call(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    return run.evaluate_closed(eqn.params["jaxpr"], ins)


#
# Derivative rules
#


@rule("custom_jvp_call")
def _custom_jvp_call(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    """A function with a forward rule: both it and its rule are evaluated for all lanes at once.

    `custom_vjp_call` has no rule here: it is mapped by `jax.vmap`, which keeps its derivative rule.
    """
    leaves = [x for value in ins for x in _leaves(value)]
    if not leaves:
        return run.evaluate_closed(eqn.params["call_jaxpr"], ins)
    tail = tail_of(*ins)
    avals = [v.aval for v in eqn.outvars]

    @jax.custom_jvp
    def call(*leaves):
        outs = run.evaluate_closed(eqn.params["call_jaxpr"], _with_leaves(ins, leaves))
        return _flat_outputs(run, outs, tail)

    def forward(primals, tangents):
        tangent_values = _with_leaves(ins, tangents, tangent=True)
        ins_and_tangents = [*_with_leaves(ins, primals)]
        ins_and_tangents += [t for t in tangent_values if is_inexact(t)]
        outs = run.evaluate_closed(tangents_of(eqn), ins_and_tangents)
        outs, d_outs = outs[: len(avals)], outs[len(avals) :]
        flat = _flat_outputs(run, outs, tail)
        d_flat = []
        for out, d in zip(outs, d_outs, strict=True):
            if not is_inexact(out):
                like = _flat_outputs(run, [out], tail)
                d_flat += [np.zeros(x.shape, jax.dtypes.float0) for x in like]
            else:
                d_flat += _flat_outputs(run, [d], tail)
        return flat, d_flat

    call.defjvp(forward, symbolic_zeros=True)
    flat = iter(call(*leaves))
    results = []
    for aval in avals:
        if run.is_apart(aval.shape):
            entries = [next(flat) for _ in range(math.prod(aval.shape))]
            results.append(Scalars(aval.shape, aval.dtype, entries))
        else:
            results.append(Stacked(next(flat), bool(tail)))
    return results


def _leaves(value: Value) -> list:
    if isinstance(value, Stacked):
        return [value.array]
    return [x for x in value.entries if not is_constant(x)]


def _with_leaves(values: Sequence[Value], leaves: Sequence, tangent: bool = False) -> list[Value]:
    """The values with their leaves replaced. With `tangent`, constants become zero, as they have no
    tangent."""
    remaining = iter(leaves)

    def entry(x, dtype):
        if is_constant(x):
            return np.zeros_like(x)[()] if tangent else x
        new = next(remaining)
        return np.dtype(dtype).type(0) if isinstance(new, SymbolicZero) else new

    def replaced(value):
        if isinstance(value, Scalars):
            entries = [entry(x, value.dtype) for x in value.entries]
            return Scalars(value.shape, value.dtype, entries)
        new = next(remaining)
        if isinstance(new, SymbolicZero):
            new = jnp.zeros_like(value.array)
        return Stacked(new, value.batched)

    return [replaced(v) for v in values]


def _flat_outputs(run: Interpreter, outs: Sequence[Value], tail: tuple) -> list:
    """The outputs as a flat list of arrays, each of which has lanes where `tail` does."""
    flat: list = []
    for out in outs:
        if run.is_apart(out.shape):
            flat += [fill(x, tail, out.dtype) for x in unpack(out).entries]
        else:
            flat.append(spread(out, tail))
    return flat


#
# Branches
#


@rule("cond")
def _cond(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    which, *operands = ins
    branches = eqn.params["branches"]
    (index,) = unpack(which).entries
    if is_constant(index):
        return run.evaluate_closed(branches[max(0, min(int(index), len(branches) - 1))], operands)
    if not which.batched:
        # All lanes take the same branch; the other one must not even be differentiated.
        return mapped(run, eqn, ins)
    outs = [
        run.evaluate_closed(branch, [_where_taken(run, index, i, x) for x in operands])
        for i, branch in enumerate(branches)
    ]
    if len(branches) == 2:
        index = lax.ne(index, np.zeros((), index.dtype)[()])
    return [_select(run, index, cases) for cases in zip(*outs, strict=True)]


def _where_taken(run: Interpreter, index: Any, branch: int, value: Value) -> Value:
    """The operand of a branch, made differentiable only in the lanes that take the branch.

    In other lanes a zero cotangent may meet an infinite derivative; `jax.vmap` guards against that
    in the same way. Large arrays that all lanes share stay shared, as a copy for each lane would
    make their products slow.
    """
    if not run.differentiated or not is_inexact(value):
        return value
    taken = lax.eq(index, np.asarray(branch, index.dtype)[()])

    def only(x):
        wide = lax.broadcast_in_dim(taken, x.shape, (x.ndim - 1,))
        return lax.select(wide, x, lax.stop_gradient(x))

    if isinstance(value, Stacked):
        if not value.batched and math.prod(value.shape) > run.limits.scalars:
            return value
        return Stacked(only(spread(value, index.shape)), True)
    entries = [
        x if is_constant(x) else only(fill(x, index.shape, value.dtype)) for x in value.entries
    ]
    return Scalars(value.shape, value.dtype, entries)


def _select(run: Interpreter, index: Any, cases: Sequence[Value]) -> Value:
    """For each lane, the value of the case that its `index` chooses."""
    shape, dtype = cases[0].shape, cases[0].dtype
    components = run.as_scalars(cases, math.prod(shape))
    if components is not None:
        columns = zip(*(c.entries for c in components), strict=True)
        entries = [run.scalar("select_n", lax.select_n, (index, *c), dtype) for c in columns]
        return Scalars(shape, dtype, entries)
    run.count(1)
    arrays = [spread(c, index.shape) for c in cases]
    which = lax.broadcast_in_dim(index, arrays[0].shape, (len(shape),))
    return run.results([lax.select_n(which, *arrays)], True)[0]


#
# Loops
#


@rule("scan")
def _scan(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    """A loop, unrolled where it is short and small."""
    params = eqn.params
    length, closed = params["length"], params["jaxpr"]
    sizes = [math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
    limits = run.limits
    if max(sizes) > limits.moved or length * cost(closed) > limits.unrolled:
        return mapped(run, eqn, ins)
    n_consts, n_carry = scan_parts(eqn)
    split = n_consts + n_carry
    consts, carry, xs = ins[:n_consts], list(ins[n_consts:split]), ins[split:]
    steps = range(length - 1, -1, -1) if params["reverse"] else range(length)
    ys: list = [None] * length
    for i in steps:
        outs = run.evaluate_closed(closed, [*consts, *carry, *(_row(run, x, i) for x in xs)])
        carry, ys[i] = outs[:n_carry], outs[n_carry:]
    stacked = [_stack_rows(run, rows) for rows in zip(*ys, strict=True)]
    if not length:
        avals: list[Any] = [v.aval for v in eqn.outvars[n_carry:]]
        stacked = [Scalars(a.shape, a.dtype, []) for a in avals]
    return [*carry, *stacked]


def _row(run: Interpreter, x: Value, i: int) -> Value:
    if isinstance(x, Stacked):
        return run.results([lax.index_in_dim(x.array, i, keepdims=False)], x.batched)[0]
    size = math.prod(x.shape[1:])
    return Scalars(x.shape[1:], x.dtype, x.entries[i * size : (i + 1) * size])


def _stack_rows(run: Interpreter, rows: Sequence[Value]) -> Value:
    shape, dtype = (len(rows), *rows[0].shape), rows[0].dtype
    scalars = [x for x in rows if isinstance(x, Scalars)]
    if len(scalars) == len(rows):
        return Scalars(shape, dtype, [e for x in scalars for e in x.entries])
    tail = tail_of(*rows)
    return run.results([jnp.stack([spread(x, tail) for x in rows])], bool(tail))[0]
