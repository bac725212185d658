"""Derivatives of any order of a solve: four primitives over the two kernels.

With S the saved states as a function of x, the first state and the parameters, and JF the field
augmented by a tangent:

    solve[F](x)          S(x)                              kernel `solve` of F
    push[F](x; v)        DS(x) v                           kernel `solve` of JF, its tangent half
    pull[F](x; c)        DS(x)^T c                         kernel `pull_back` of F
    bend[F](x, c; v, w)  DS(x)^T w + (D^2 S(x) v)^T c      kernel `pull_back` of JF, its primal half

What stands after the `;` is what they are linear in. They are closed: the derivative of each is one
of them, of F or of JF, and so is each transpose (that of `bend` in v is `bend`, as second
derivatives are symmetric). Batching makes more trajectories. Nothing is traced of JF before a
program with `push` or `bend` is lowered, or one of them is differentiated: in a first gradient
`push` is only a step on the way to `pull`.

Steps are constants, chosen by the components of F's own state alone, which JF computes by the same
operations: they have the same bits, and the steps are the same. (Where a derivative rule of a
function of the user's computes it otherwise, a step whose error is at the bound may be another's:
then these are derivatives of other steps, as right as those.) The solution is that of F always.
Derivatives by times are those of the solution of the ODE, along the field: S moves by f when its
times do, and by -DS f when `t0` does.

Only trajectories that succeeded have derivatives, and rows that were reached; others have zero.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import ad, batching, mlir

from ...core.lane import Lane
from ...core.recent import jit_recent
from ...fields import parameters_of
from ..rates import rates
from . import solves
from .flow import (
    augmented,
    augmented_tangents,
    each,
    Flow,
    is_zero,
    own_of,
    reals_of,
    stacked,
    with_own,
    with_reals,
)
from .solves import Setup


def _half(rows: Any, i: int) -> Any:
    """Of rows of JF `[trajectory, row, 2, *state]`: the states (0), or their tangents (1)."""
    return rows[:, :, i]


#
# What the kernels compute
#


def _is_there(flow: Flow, ok: Any, reached: Any) -> Any:
    """Which rows were reached, of trajectories that succeeded: `[trajectory, row]`."""
    rows = jnp.arange(_rows(flow), dtype=reached.dtype)[None]
    if flow.setup.plan.saving.mode == "ends":
        return ok[:, None]
    return ok[:, None] & (rows < reached[:, None])


def _rows(flow: Flow) -> int:
    saving = flow.setup.plan.saving
    return 1 if saving.mode == "ends" else saving.rows


def _where(mask: Any, x: Any) -> Any:
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, jnp.zeros_like(x))


def _solve(flow: Flow, lanes: Lane, ok: Any, reached: Any) -> list:
    end, saved, _ = solves.solve(flow.setup, lanes, ok)
    rows = end[:, None] if saved.u is None else saved.u
    return [_where(_is_there(flow, ok, reached), rows)]


def _push(flow: Flow, lanes: Lane, ok: Any, reached: Any, *v: Any) -> list:
    (rows,) = _solve(*augmented(flow, lanes, v), ok, reached)
    return [_half(rows, 1)]


def _pull(flow: Flow, lanes: Lane, ok: Any, reached: Any, c: Any) -> list:
    # (Of what was not reached they may be NaN.)
    c = _where(_is_there(flow, ok, reached), c)
    pulled = solves.pull_back(flow.setup, lanes, ok, c, reached)
    parameters = [
        _where(ok, x) if own else x for x, own in zip(pulled.parameters, own_of(flow), strict=True)
    ]
    return [_where(ok, pulled.u0), *parameters]


def _bend(flow: Flow, lanes: Lane, ok: Any, reached: Any, c: Any, *rest: Any) -> list:
    *v, w = rest
    wide, both = augmented(flow, lanes, v)
    u0, *parameters = _pull(wide, both, ok, reached, jnp.stack([w, c], axis=2))
    return [u0[:, 0], *parameters[: len(flow.moved)]]


def _of_rows(flow: Flow) -> list:
    plan = flow.setup.plan
    return [jax.core.ShapedArray((flow.n, _rows(flow), *plan.state.shape), plan.state.dtype)]


def _of_numbers(flow: Flow) -> list:
    """Cotangents: of what all share, one a group."""
    plan = flow.setup.plan
    avals = [parameters_of(plan.field)[i] for i in flow.real]
    lead = [flow.n if own else flow.setup.groups for own in own_of(flow)]
    parameters = [
        jax.core.ShapedArray((k, *a.shape), a.dtype) for k, a in zip(lead, avals, strict=True)
    ]
    return [jax.core.ShapedArray((flow.n, *plan.state.shape), plan.state.dtype), *parameters]


def _primitive(name: str, fn: Callable, results: Callable[[Flow], list]) -> Any:
    """A primitive whose operands are the numbers of a `Lane`, which trajectories have derivatives,
    how many rows of each were reached, and what is its own."""
    prim = jex.Primitive(f"ensembleode_{name}")
    prim.multiple_results = True

    def run(*operands, flow):
        return fn(flow, *_numbers(flow, operands))

    eagerly = jit_recent(lambda flow, *operands: run(*operands, flow=flow))
    prim.def_impl(jax.disable_jit(False)(lambda *operands, flow: eagerly(flow, *operands)))
    prim.def_abstract_eval(lambda *_, flow: results(flow))
    lower: Callable = mlir.lower_fun(run, multiple_results=True)
    mlir.register_lowering(prim, lower)
    return prim


def _numbers(flow: Flow, operands: Sequence) -> list:
    """The operands of a primitive, the numbers as a `Lane`."""
    n = flow.tree.num_leaves
    return [jtu.tree_unflatten(flow.tree, operands[:n]), *operands[n:]]


def _bind(prim: Any, flow: Flow, lanes: Lane, *others: Any) -> list:
    return prim.bind(*jtu.tree_leaves(lanes), *others, flow=flow)


def _solve_or_given(flow: Flow, lanes: Lane, ok: Any, reached: Any, *given: Any) -> list:
    return list(given) or _solve(flow, lanes, ok, reached)


# (Where the rows are at hand, they are an operand, and what it gives.)
solve_p = _primitive("solve", _solve_or_given, _of_rows)
push_p = _primitive("push", _push, _of_rows)
pull_p = _primitive("pull", _pull, _of_numbers)
bend_p = _primitive("bend", _bend, _of_numbers)


#
# Derivatives
#


def _moving(flow: Flow, lanes: Lane, ok: Any, dlanes: Lane) -> tuple[Flow, list] | None:
    """The tangents of x as operands, that of the first state with what it moves along the field
    when `t0` does; None where nothing moves."""
    v0, reals = dlanes.u0, reals_of(flow, dlanes)
    if is_zero(v0) and is_zero(dlanes.t0) and all(map(is_zero, reals)):
        return None
    v0 = ad.instantiate_zeros(v0)
    if not is_zero(dlanes.t0):
        v0 = v0 - _times_rate(_start_rate(flow, lanes, ok), _each_t0(flow, dlanes.t0))
    moved = [None if is_zero(x) else own for x, own in zip(reals, own_of(flow), strict=True)]
    return flow.with_moved(moved, groups=1), [v0, *(x for x in reals if not is_zero(x))]


def _times_rate(rate: Any, dt: Any) -> Any:
    return rate * dt.reshape(*dt.shape, *(1,) * (rate.ndim - dt.ndim))


def _each_t0(flow: Flow, x: Any) -> Any:
    return each(x, flow.setup.plan.batched.t0, flow.n)


def _rates(flow: Flow, lanes: Lane, ok: Any, u: Any, t: Any) -> Any:
    """`f` at states `[trajectory, time, *state]` of trajectories that succeeded, zero of others.

    (Their numbers, which may be infinite or NaN, are replaced by those of one that succeeded, so
    that products with what is shared stay finite.)
    """
    some = jnp.argmax(ok)

    def safe(x, is_own=True):
        if not is_own:
            return x
        return jnp.where(ok.reshape(-1, *(1,) * (x.ndim - 1)), x, x[some][None])

    plan = flow.setup.plan
    numbers = {
        name: tuple(map(safe, getattr(lanes, name), getattr(plan.batched, name)))
        for name in ("consts", "p")
    }
    return _where(ok, rates(plan, lanes._replace(**numbers), safe(u), safe(t)))


def _start_rate(flow: Flow, lanes: Lane, ok: Any) -> Any:
    """`f` at the first states."""
    t0 = _each_t0(flow, lanes.t0)
    return _rates(flow, lanes, ok, lanes.u0[:, None], t0[:, None])[:, 0]


def _which_end(flow: Flow, reached: Any) -> tuple[Any, Any]:
    """The row of a trajectory that is at `t1`, and whether there is one."""
    saving = flow.setup.plan.saving
    if saving.mode == "ends":
        return jnp.zeros_like(reached), jnp.ones_like(reached, bool)
    return jnp.clip(reached - 1, 0, saving.rows - 1), reached > int(saving.start)


def _moving_times(flow: Flow, dlanes: Lane) -> Any:
    """The tangent of the times that saved states are at; a Zero where it is one."""
    return dlanes.saveat if flow.setup.plan.saving.mode == "times" else dlanes.t1


def _row_rates(flow: Flow, lanes: Lane, ok: Any, reached: Any, rows: Any) -> Any:
    """`f` at the saved states whose times may move: `[trajectory, time, *state]`, the times those
    of `saveat`, or `t1` alone. Zero where there is none."""
    plan, n = flow.setup.plan, flow.n
    if plan.saving.mode == "times":
        there, t = _is_there(flow, ok, reached), each(lanes.saveat, plan.batched.saveat, n)
    else:
        row, is_there = _which_end(flow, reached)
        rows = jnp.take_along_axis(rows, row.reshape(n, *(1,) * (rows.ndim - 1)), 1)
        there, t = (ok & is_there)[:, None], each(lanes.t1, plan.batched.t1, n)[:, None]
    # Of rows that are not reached there is no state, and their times may be infinite.
    t = jnp.where(there, t, _each_t0(flow, lanes.t0)[:, None])
    mask = there.reshape(*there.shape, *(1,) * (rows.ndim - 2))
    safe = jnp.where(mask, rows, lanes.u0[:, None])
    return _where(there, _rates(flow, lanes, ok, safe, t))


def _at_times(flow: Flow, dtimes: Any) -> Any:
    """Tangents of times, `[trajectory, time]` as of `_row_rates`."""
    batched, n = flow.setup.plan.batched, flow.n
    if flow.setup.plan.saving.mode == "times":
        return each(dtimes, batched.saveat, n)
    return each(dtimes, batched.t1, n)[:, None]


def _to_rows(flow: Flow, reached: Any, x: Any) -> Any:
    """From the times of `_row_rates` to rows."""
    if flow.setup.plan.saving.mode != "steps":
        return x
    row, _ = _which_end(flow, reached)
    is_end = jnp.arange(_rows(flow), dtype=row.dtype)[None] == row[:, None]
    return _where(is_end, jnp.broadcast_to(x, (flow.n, _rows(flow), *x.shape[2:])))


def _from_rows(flow: Flow, reached: Any, c: Any) -> Any:
    """The transpose."""
    if flow.setup.plan.saving.mode != "steps":
        return c
    row, _ = _which_end(flow, reached)
    return jnp.take_along_axis(c, row.reshape(-1, *(1,) * (c.ndim - 1)), 1)


def _solve_dot(flow: Flow, dlanes: Lane, rows: Any, lanes: Lane, ok: Any, reached: Any) -> Any:
    """The tangent of `rows`, the result of `solve`."""
    moving, dtimes = _moving(flow, lanes, ok, dlanes), _moving_times(flow, dlanes)
    out = None
    if moving is not None:
        with_v, v = moving
        (out,) = _bind(push_p, with_v, lanes, ok, reached, *v)
    if dtimes is not None and not is_zero(dtimes):
        rate = _row_rates(flow, lanes, ok, reached, rows())
        along = _to_rows(flow, reached, _times_rate(rate, _at_times(flow, dtimes)))
        out = along if out is None else out + along
    return out


def _pull_dot(
    flow: Flow, dlanes: Lane, dc: Any, lanes: Lane, ok: Any, reached: Any, c: Any, pulled: Callable
) -> list:
    """The tangents of `pulled()`, the results of `pull`."""
    moving, dtimes = _moving(flow, lanes, ok, dlanes), _moving_times(flow, dlanes)
    more: list = []
    if dtimes is not None and not is_zero(dtimes):
        # J^T c at the saved states, and what the parameters of f there are moved by.
        (rows,) = _bind(solve_p, flow.with_moved(groups=1), lanes, ok, reached)
        args = _by_group(flow, lanes)

        def along(rows, reals):
            return _row_rates(*_of_groups(flow, lanes, reals), ok, reached, rows)

        at_times = _from_rows(flow, reached, c)
        at_times = _times_rate(at_times, _at_times(flow, dtimes))
        to_rows, to_reals = jax.vjp(along, rows, args)[1](at_times)
        dc = to_rows + ad.instantiate_zeros(dc)
        more.append([None, *to_reals])
    if moving is not None:
        with_v, v = moving
        with_v = with_v.with_moved(with_v.moved, groups=flow.setup.groups)
        w = ad.instantiate_zeros(dc)
        more.append(_bind(bend_p, with_v, lanes, ok, reached, c, *v, w))
    elif not is_zero(dc):
        more.append(_bind(pull_p, flow.with_moved(), lanes, ok, reached, dc))
    if not is_zero(dlanes.t0):
        to_u0 = pulled()[0]

        def leaving(u0, reals):
            here, numbers = _of_groups(flow, lanes, reals)
            return _start_rate(here, numbers._replace(u0=u0), ok)

        by = -_times_rate(to_u0, _each_t0(flow, dlanes.t0))
        to_u0, to_reals = jax.vjp(leaving, lanes.u0, _by_group(flow, lanes))[1](by)
        more.append([to_u0, *to_reals])
    found: list = [None] * len(_of_numbers(flow))
    for xs in more:
        found = list(map(_sum, found, xs))
    return [ad.Zero(a) if x is None else x for x, a in zip(found, _of_numbers(flow), strict=True)]


def _sum(a: Any, b: Any) -> Any:
    """None is zero."""
    return b if a is None else a if b is None else a + b


def _by_group(flow: Flow, lanes: Lane) -> list:
    """The real parameters, of those that all share one a group."""
    k = flow.setup.groups
    return [
        x if own else jnp.broadcast_to(x, (k, *x.shape))
        for x, own in zip(reals_of(flow, lanes), own_of(flow), strict=True)
    ]


def _of_groups(flow: Flow, lanes: Lane, by_group: Sequence) -> tuple[Flow, Lane]:
    """With these parameters."""
    k, own = flow.setup.groups, own_of(flow)
    if k == 1:
        reals = [x if o else x[0] for x, o in zip(by_group, own, strict=True)]
        return flow, with_reals(flow, lanes, reals)
    reals = [
        x if o else jnp.repeat(x, flow.n // k, axis=0) for x, o in zip(by_group, own, strict=True)
    ]
    plan = flow.setup.plan
    batched = with_reals(flow, plan.batched, [True] * len(own))
    plan = dataclasses.replace(plan, batched=batched)
    return flow.with_moved(plan=plan), with_reals(flow, lanes, reals)


def _parts(flow: Flow, xs: Sequence) -> tuple:
    """The operands of a primitive, or their tangents: the numbers, and what is its own."""
    lanes, _, _, *others = _numbers(flow, xs)
    return lanes, others


def _is_still(dlanes: Lane) -> bool:
    return all(map(is_zero, jtu.tree_leaves(dlanes, is_leaf=is_zero)))


def _solve_jvp(primals, tangents, *, flow):
    lanes, ok, reached, *_ = _numbers(flow, primals)
    dlanes, _ = _parts(flow, tangents)
    outs = solve_p.bind(*primals, flow=flow)
    out = _solve_dot(flow, dlanes, lambda: outs[0], lanes, ok, reached)
    return outs, [ad.Zero(_of_rows(flow)[0]) if out is None else out]


def _push_jvp(primals, tangents, *, flow):
    lanes, ok, reached, *v = _numbers(flow, primals)
    dlanes, dv = _parts(flow, tangents)
    outs = push_p.bind(*primals, flow=flow)
    if _is_still(dlanes):
        with_v, dv = _linear(flow, dv)
        return outs, _bind(push_p, with_v, lanes, ok, reached, *dv)
    wide, both = augmented(flow, lanes, v)

    def rows():
        return _bind(solve_p, wide, both, ok, reached)[0]

    out = _solve_dot(wide, augmented_tangents(flow, dlanes, dv, wide), rows, both, ok, reached)
    return outs, [ad.Zero(_of_rows(flow)[0]) if out is None else _half(out, 1)]


def _linear(flow: Flow, dv: Sequence) -> tuple[Flow, list]:
    """The tangents of tangents as such, without those that are zero."""
    dv0, *rest = dv
    flags = iter(rest)
    kept = [next(flags) if m is not None else None for m in flow.moved]
    moved = [None if m is None or is_zero(x) else m for m, x in zip(flow.moved, kept, strict=True)]
    chosen = [x for x in rest if not is_zero(x)]
    return flow.with_moved(moved), [ad.instantiate_zeros(dv0), *chosen]


def _pull_jvp(primals, tangents, *, flow):
    lanes, ok, reached, c = _numbers(flow, primals)
    dlanes, (dc,) = _parts(flow, tangents)
    outs = pull_p.bind(*primals, flow=flow)
    return outs, _pull_dot(flow, dlanes, dc, lanes, ok, reached, c, lambda: outs)


def _bend_jvp(primals, tangents, *, flow):
    lanes, ok, reached, c, *v, w = _numbers(flow, primals)
    dlanes, (dc, *dv, dw) = _parts(flow, tangents)
    outs = bend_p.bind(*primals, flow=flow)
    if _is_still(dlanes) and is_zero(dc):
        if all(map(is_zero, dv)):
            return outs, _bind(pull_p, flow.with_moved(), lanes, ok, reached, dw)
        with_v, dv = _linear(flow, dv)
        dw = ad.instantiate_zeros(dw)
        return outs, _bind(bend_p, with_v, lanes, ok, reached, c, *dv, dw)
    wide, both = augmented(flow, lanes, v)
    c2 = jnp.stack([w, c], axis=2)
    dc2 = stacked(dw, dc, axis=2)

    def pulled():
        return _bind(pull_p, wide, both, ok, reached, c2)

    moved = augmented_tangents(flow, dlanes, dv, wide)
    u0, *parameters = _pull_dot(wide, moved, dc2, both, ok, reached, c2, pulled)
    to_u0 = ad.Zero(_of_numbers(flow)[0]) if is_zero(u0) else u0[:, 0]
    return outs, [to_u0, *parameters[: len(flow.moved)]]


#
# Transposes
#


def _as_tangents(flow: Flow, cts: Sequence) -> tuple[Flow, list]:
    """Cotangents of cotangents of the numbers, as what `push` and `bend` are linear in."""
    z0, *zs = cts
    k = flow.setup.groups
    moved, found = [], []
    for z, own in zip(zs, own_of(flow), strict=True):
        moved.append(None if is_zero(z) else own or k > 1)
        if not is_zero(z):
            found.append(z if own else z[0] if k == 1 else jnp.repeat(z, flow.n // k, axis=0))
    return flow.with_moved(moved, groups=1), [ad.instantiate_zeros(z0), *found]


def _to_tangents(
    flow: Flow, prim: Any, lanes: Lane, ok: Any, reached: Any, *others: Any, like: Flow
) -> list:
    """Cotangents of the tangents of `like`: each trajectory's own, or their sum."""
    wanted = [bool(m) for m in like.moved]
    flow, lanes = with_own(flow.with_moved(flow.moved, groups=1), lanes, wanted)
    to_u0, *found = _bind(prim, flow, lanes, ok, reached, *others)
    out = [to_u0]
    for x, own, m in zip(found, own_of(flow), like.moved, strict=True):
        if m is not None:
            out.append(x if m else x.sum(0) if own else x[0])
    return out


def _push_transpose(cts, *operands, flow):
    lanes, ok, reached, *v = _numbers(flow, operands)
    fixed = [None] * (len(operands) - len(v))
    if is_zero(cts[0]):
        return [*fixed, *(None for _ in v)]
    found = _to_tangents(flow.with_moved(), pull_p, lanes, ok, reached, cts[0], like=flow)
    return [*fixed, *_where_undefined(v, found)]


def _where_undefined(operands: Sequence, found: Sequence) -> list:
    pairs = zip(operands, found, strict=True)
    return [x if ad.is_undefined_primal(operand) else None for operand, x in pairs]


def _pull_transpose(cts, *operands, flow):
    lanes, ok, reached, _ = _numbers(flow, operands)
    fixed = [None] * (len(operands) - 1)
    if all(map(is_zero, cts)):
        return [*fixed, None]
    with_z, z = _as_tangents(flow, cts)
    return [*fixed, *_bind(push_p, with_z, lanes, ok, reached, *z)]


def _bend_transpose(cts, *operands, flow):
    lanes, ok, reached, c, *v, w = _numbers(flow, operands)
    fixed = [None] * (len(operands) - len(v) - 1)
    if all(map(is_zero, cts)):
        return [*fixed, *(None for _ in v), None]
    with_z, z = _as_tangents(flow, cts)
    to_v: list = [None] * len(v)
    if any(map(ad.is_undefined_primal, v)):
        none = jnp.zeros_like(c)
        found = _to_tangents(with_z, bend_p, lanes, ok, reached, c, *z, none, like=flow)
        to_v = _where_undefined(v, found)
    to_w = None
    if ad.is_undefined_primal(w):
        (to_w,) = _bind(push_p, with_z, lanes, ok, reached, *z)
    return [*fixed, *to_v, to_w]


#
# More trajectories
#


def _folded_tangents(flow: Flow, size: int, v: Sequence, batched: Sequence) -> tuple[list, list]:
    """The tangents of `size` times as many trajectories, and whether each has its own."""
    own = [True, *(m for m in flow.moved if m is not None)]
    found, now = [], []
    for x, is_batched, is_own in zip(v, batched, own, strict=True):
        now.append(is_own or is_batched)
        if not is_own:
            found.append(jnp.repeat(x, flow.n, axis=0) if is_batched else x)
            continue
        x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        found.append(x.reshape(-1, *x.shape[2:]))
    return found, now


def _batch(prim: Any, operands, axes, *, flow):
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    operands = [
        x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(operands, axes, strict=True)
    ]
    batched = [a is not None for a in axes]
    lanes, ok, reached, *others = _numbers(flow, operands)
    lanes_b, ok_b, reached_b, *others_b = _numbers(flow, batched)
    # What is its own: rows (of each trajectory), and tangents.
    n_v = 0 if prim in (solve_p, pull_p) else 1 + sum(m is not None for m in flow.moved)
    start = 1 if prim is bend_p else 0
    v, v_b = (x[start : start + n_v] for x in (others, others_b))
    rows, rows_b = (x[:start] + x[start + n_v :] for x in (others, others_b))
    setup, lanes, ok, reached, *rows = solves.widened(
        flow.setup, size, (lanes_b, ok_b, reached_b, *rows_b), lanes, ok, reached, *rows
    )
    moved: tuple = flow.moved
    if n_v:
        v, now = _folded_tangents(flow, size, v, v_b)
        flags = iter(now[1:])
        moved = tuple(None if m is None else next(flags) for m in flow.moved)
    if prim in (solve_p, push_p):
        setup = setup._replace(groups=1)
    wide = Flow(setup, flow.tree, moved)
    outs = _bind(prim, wide, lanes, ok, reached, *rows[:start], *v, *rows[start:])
    if prim in (solve_p, push_p):
        found = [x.reshape(size, -1, *x.shape[1:]) for x in outs]
    else:
        found = [outs[0].reshape(size, -1, *outs[0].shape[1:])]
        for x, was, now in zip(outs[1:], own_of(flow), own_of(wide), strict=True):
            if now and not was:
                # Shared in each, but not by all: the sum over the trajectories of each group.
                x = x.reshape(size, flow.setup.groups, -1, *x.shape[1:]).sum(2)
            else:
                x = x.reshape(size, -1, *x.shape[1:])
            found.append(x)
    return found, [0] * len(found)


for _prim, _jvp, _transpose in (
    (solve_p, _solve_jvp, None),
    (push_p, _push_jvp, _push_transpose),
    (pull_p, _pull_jvp, _pull_transpose),
    (bend_p, _bend_jvp, _bend_transpose),
):
    ad.primitive_jvps[_prim] = _jvp
    batching.primitive_batchers[_prim] = functools.partial(_batch, _prim)
    if _transpose is not None:
        ad.primitive_transposes[_prim] = _transpose


def differentiable(setup: Setup, lanes: Lane, ok: Any, reached: Any, rows: Any) -> Any:
    """`rows`, what was saved, with derivatives of any order by the numbers.

    **Arguments:**

    - `ok`: which trajectories have some: `[trajectory]`.
    - `reached`: how many times of each were saved, or would have been with more rows.
    - `rows`: `[trajectory, row, *state]`, the last state alone where only ends are saved.
    """
    plan, n = setup.plan, setup.n
    u0 = each(lanes.u0, plan.batched.u0, n)
    plan = dataclasses.replace(plan, batched=plan.batched._replace(u0=True))
    lanes = jax.tree.map(jnp.asarray, lanes._replace(u0=u0))
    flow = Flow(setup._replace(plan=plan), jtu.tree_structure(lanes))
    return _bind(solve_p, flow, lanes, ok, reached, rows)[0]
