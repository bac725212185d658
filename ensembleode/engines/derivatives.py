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

from ..core.lane import Lane
from ..core.plan import Result
from ..fields import parameters_of
from ..ground.recent import jit_recent
from ..ground.retcode import ReturnCode
from .along import (
    at_times,
    each_t0,
    from_rows,
    is_there,
    moving_times,
    row_rates,
    rows_of,
    start_rate,
    times_rate,
    to_rows,
    where,
)
from .flow import (
    augmented,
    augmented_tangents,
    each,
    Flow,
    is_zero,
    Known,
    own_of,
    real_of,
    reals_of,
    Setup,
    stacked,
    unaugmented,
    widened,
    with_own,
    with_reals,
)


def _half(rows: Any, i: int) -> Any:
    """Of rows of JF `[trajectory, row, 2, *state]`: the states (0), or their tangents (1)."""
    return rows[:, :, i]


#
# What the kernels compute
#


def _solve(flow: Flow, lanes: Lane, known: Known) -> list:
    return [where(is_there(flow, known), flow.setup.rows(lanes, known))]


def _push(flow: Flow, lanes: Lane, known: Known, *v: Any) -> list:
    (rows,) = _solve(*augmented(flow, lanes, v), known)
    return [_half(rows, 1)]


def _pull(flow: Flow, lanes: Lane, known: Known, c: Any) -> list:
    # (Of what was not reached they may be NaN.)
    c = where(is_there(flow, known), c)
    u0, *parameters = flow.setup.pull_back(lanes, known, c)
    own = own_of(flow.plan)
    parameters = [where(known.ok, x) if o else x for x, o in zip(parameters, own, strict=True)]
    return [where(known.ok, u0), *parameters]


def _bend(flow: Flow, lanes: Lane, known: Known, c: Any, *rest: Any) -> list:
    *v, w = rest
    wide, both = augmented(flow, lanes, v)
    u0, *parameters = _pull(wide, both, known, jnp.stack([w, c], axis=2))
    return [u0[:, 0], *unaugmented(flow, wide, parameters)]


def _of_rows(flow: Flow) -> list:
    plan = flow.plan
    return [jax.core.ShapedArray((flow.n, rows_of(flow), *plan.state.shape), plan.state.dtype)]


def _of_numbers(flow: Flow) -> list:
    """Cotangents: of what all share, one a group."""
    plan = flow.plan
    avals = [parameters_of(plan.field)[i] for i in real_of(plan)]
    lead = [flow.n if own else flow.setup.groups for own in own_of(plan)]
    parameters = [
        jax.core.ShapedArray((k, *a.shape), a.dtype) for k, a in zip(lead, avals, strict=True)
    ]
    return [jax.core.ShapedArray((flow.n, *plan.state.shape), plan.state.dtype), *parameters]


def _primitive(name: str, fn: Callable, results: Callable[[Flow], list]) -> Any:
    """A primitive whose operands are the numbers of a `Lane`, what is `Known`, and what is its
    own."""
    prim: Any = jex.Primitive(f"ensembleode_{name}")
    prim.multiple_results = True

    def run(*operands, flow):
        return fn(flow, *_numbers(flow, operands))

    prim.opened = run  # (see `compiled.call.kernels_in`)
    eagerly = jit_recent(lambda flow, *operands: run(*operands, flow=flow))
    prim.def_impl(jax.disable_jit(False)(lambda *operands, flow: eagerly(flow, *operands)))
    prim.def_abstract_eval(lambda *_, flow: results(flow))
    lower: Callable = mlir.lower_fun(run, multiple_results=True)
    mlir.register_lowering(prim, lower)
    return prim


def _numbers(flow: Flow, operands: Sequence) -> list:
    """The operands of a primitive (or their tangents): the numbers, what is known, and others."""
    n = flow.tree.num_leaves
    return [*jtu.tree_unflatten(flow.tree, operands[:n]), *operands[n:]]


def _bind(prim: Any, flow: Flow, lanes: Lane, known: Known, *others: Any) -> list:
    leaves, tree = jtu.tree_flatten((lanes, known))
    return prim.bind(*leaves, *others, flow=dataclasses.replace(flow, tree=tree))


def _solve_or_given(flow: Flow, lanes: Lane, known: Known, *given: Any) -> list:
    return list(given) or _solve(flow, lanes, known)


# (Where the rows are at hand, they are an operand, and what it gives.)
solve_p = _primitive("solve", _solve_or_given, _of_rows)
push_p = _primitive("push", _push, _of_rows)
pull_p = _primitive("pull", _pull, _of_numbers)
bend_p = _primitive("bend", _bend, _of_numbers)


#
# Derivatives
#


def _moving(flow: Flow, lanes: Lane, known: Known, dlanes: Lane) -> tuple[Flow, list] | None:
    """The tangents of x as operands, that of the first state with what it moves along the field
    when `t0` does; None where nothing moves."""
    v0, reals = dlanes.u0, reals_of(flow.plan, dlanes)
    if is_zero(v0) and is_zero(dlanes.t0) and all(map(is_zero, reals)):
        return None
    v0 = ad.instantiate_zeros(v0)
    if not is_zero(dlanes.t0):
        v0 = v0 - times_rate(start_rate(flow, lanes, known), each_t0(flow, dlanes.t0))
    moved = [None if is_zero(x) else own for x, own in zip(reals, own_of(flow.plan), strict=True)]
    return flow.with_moved(moved, groups=1), [v0, *(x for x in reals if not is_zero(x))]


def _solve_dot(flow: Flow, dlanes: Lane, rows: Any, lanes: Lane, known: Known) -> Any:
    """The tangent of `rows`, the result of `solve`."""
    moving, dtimes = _moving(flow, lanes, known, dlanes), moving_times(flow, dlanes)
    out = None
    if moving is not None:
        with_v, v = moving
        (out,) = _bind(push_p, with_v, lanes, known, *v)
    if dtimes is not None and not is_zero(dtimes):
        rate = row_rates(flow, lanes, known, rows())
        along = to_rows(flow, known, times_rate(rate, at_times(flow, dtimes)))
        out = along if out is None else out + along
    return out


def _pull_dot(
    flow: Flow, dlanes: Lane, dc: Any, lanes: Lane, known: Known, c: Any, pulled: Callable
) -> list:
    """The tangents of `pulled()`, the results of `pull`."""
    moving, dtimes = _moving(flow, lanes, known, dlanes), moving_times(flow, dlanes)
    more: list = []
    if dtimes is not None and not is_zero(dtimes):
        # J^T c at the saved states, and what the parameters of f there are moved by.
        (rows,) = _bind(solve_p, flow.with_moved(groups=1), lanes, known)
        args = _by_group(flow, lanes)

        def along(rows, reals):
            return row_rates(*_of_groups(flow, lanes, reals), known, rows)

        by = times_rate(from_rows(flow, known, c), at_times(flow, dtimes))
        at_rows, to_reals = jax.vjp(along, rows, args)[1](by)
        dc = at_rows + ad.instantiate_zeros(dc)
        more.append([None, *to_reals])
    if moving is not None:
        with_v, v = moving
        with_v = with_v.with_moved(with_v.moved, groups=flow.setup.groups)
        w = ad.instantiate_zeros(dc)
        more.append(_bind(bend_p, with_v, lanes, known, c, *v, w))
    elif not is_zero(dc):
        more.append(_bind(pull_p, flow.with_moved(), lanes, known, dc))
    if not is_zero(dlanes.t0):
        to_u0 = pulled()[0]

        def leaving(u0, reals):
            here, numbers = _of_groups(flow, lanes, reals)
            return start_rate(here, numbers._replace(u0=u0), known)

        by = -times_rate(to_u0, each_t0(flow, dlanes.t0))
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
        for x, own in zip(reals_of(flow.plan, lanes), own_of(flow.plan), strict=True)
    ]


def _of_groups(flow: Flow, lanes: Lane, by_group: Sequence) -> tuple[Flow, Lane]:
    """With these parameters."""
    k, own = flow.setup.groups, own_of(flow.plan)
    if k == 1:
        reals = [x if o else x[0] for x, o in zip(by_group, own, strict=True)]
        return flow, with_reals(flow.plan, lanes, reals)
    reals = [
        x if o else jnp.repeat(x, flow.n // k, axis=0) for x, o in zip(by_group, own, strict=True)
    ]
    plan = flow.plan
    batched = with_reals(plan, plan.batched, [True] * len(own))
    lanes = with_reals(plan, lanes, reals)
    return flow.with_moved(plan=dataclasses.replace(plan, batched=batched)), lanes


def _is_still(dlanes: Lane) -> bool:
    return all(map(is_zero, jtu.tree_leaves(dlanes, is_leaf=is_zero)))


def _solve_jvp(primals, tangents, *, flow):
    lanes, known, *_ = _numbers(flow, primals)
    dlanes, *_ = _numbers(flow, tangents)
    outs = solve_p.bind(*primals, flow=flow)
    out = _solve_dot(flow, dlanes, lambda: outs[0], lanes, known)
    return outs, [ad.Zero(_of_rows(flow)[0]) if out is None else out]


def _push_jvp(primals, tangents, *, flow):
    lanes, known, *v = _numbers(flow, primals)
    dlanes, _, *dv = _numbers(flow, tangents)
    outs = push_p.bind(*primals, flow=flow)
    if _is_still(dlanes):
        with_v, dv = _linear(flow, dv)
        return outs, _bind(push_p, with_v, lanes, known, *dv)
    wide, both = augmented(flow, lanes, v)

    def rows():
        return _bind(solve_p, wide, both, known)[0]

    out = _solve_dot(wide, augmented_tangents(flow, dlanes, dv, wide), rows, both, known)
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
    lanes, known, c = _numbers(flow, primals)
    dlanes, _, dc = _numbers(flow, tangents)
    outs = pull_p.bind(*primals, flow=flow)
    return outs, _pull_dot(flow, dlanes, dc, lanes, known, c, lambda: outs)


def _bend_jvp(primals, tangents, *, flow):
    lanes, known, c, *v, w = _numbers(flow, primals)
    dlanes, _, dc, *dv, dw = _numbers(flow, tangents)
    outs = bend_p.bind(*primals, flow=flow)
    if _is_still(dlanes) and is_zero(dc):
        if all(map(is_zero, dv)):
            return outs, _bind(pull_p, flow.with_moved(), lanes, known, dw)
        with_v, dv = _linear(flow, dv)
        dw = ad.instantiate_zeros(dw)
        return outs, _bind(bend_p, with_v, lanes, known, c, *dv, dw)
    wide, both = augmented(flow, lanes, v)
    c2 = jnp.stack([w, c], axis=2)
    dc2 = stacked(dw, dc, axis=2)

    def pulled():
        return _bind(pull_p, wide, both, known, c2)

    moved = augmented_tangents(flow, dlanes, dv, wide)
    u0, *parameters = _pull_dot(wide, moved, dc2, both, known, c2, pulled)
    to_u0 = ad.Zero(_of_numbers(flow)[0]) if is_zero(u0) else u0[:, 0]
    return outs, [to_u0, *unaugmented(flow, wide, parameters)]


#
# Transposes
#


def _as_tangents(flow: Flow, cts: Sequence) -> tuple[Flow, list]:
    """Cotangents of cotangents of the numbers, as what `push` and `bend` are linear in."""
    z0, *zs = cts
    k = flow.setup.groups
    moved, found = [], []
    for z, own in zip(zs, own_of(flow.plan), strict=True):
        moved.append(None if is_zero(z) else own or k > 1)
        if not is_zero(z):
            found.append(z if own else z[0] if k == 1 else jnp.repeat(z, flow.n // k, axis=0))
    return flow.with_moved(moved, groups=1), [ad.instantiate_zeros(z0), *found]


def _to_tangents(
    flow: Flow, prim: Any, lanes: Lane, known: Known, *others: Any, like: Flow
) -> list:
    """Cotangents of the tangents of `like`: each trajectory's own, or their sum."""
    wanted = [bool(m) for m in like.moved]
    setup, lanes = with_own(flow.setup._replace(groups=1), lanes, wanted)
    flow = dataclasses.replace(flow, setup=setup)
    to_u0, *found = _bind(prim, flow, lanes, known, *others)
    out = [to_u0]
    for x, own, m in zip(found, own_of(flow.plan), like.moved, strict=True):
        if m is not None:
            out.append(x if m else x.sum(0) if own else x[0])
    return out


def _push_transpose(cts, *operands, flow):
    lanes, known, *v = _numbers(flow, operands)
    fixed = [None] * (len(operands) - len(v))
    if is_zero(cts[0]):
        return [*fixed, *(None for _ in v)]
    found = _to_tangents(flow.with_moved(), pull_p, lanes, known, cts[0], like=flow)
    return [*fixed, *_where_undefined(v, found)]


def _where_undefined(operands: Sequence, found: Sequence) -> list:
    pairs = zip(operands, found, strict=True)
    return [x if ad.is_undefined_primal(operand) else None for operand, x in pairs]


def _pull_transpose(cts, *operands, flow):
    lanes, known, _ = _numbers(flow, operands)
    fixed = [None] * (len(operands) - 1)
    if all(map(is_zero, cts)):
        return [*fixed, None]
    with_z, z = _as_tangents(flow, cts)
    return [*fixed, *_bind(push_p, with_z, lanes, known, *z)]


def _bend_transpose(cts, *operands, flow):
    lanes, known, c, *v, w = _numbers(flow, operands)
    fixed = [None] * (len(operands) - len(v) - 1)
    if all(map(is_zero, cts)):
        return [*fixed, *(None for _ in v), None]
    with_z, z = _as_tangents(flow, cts)
    to_v: list = [None] * len(v)
    if any(map(ad.is_undefined_primal, v)):
        none = jnp.zeros_like(c)
        found = _to_tangents(with_z, bend_p, lanes, known, c, *z, none, like=flow)
        to_v = _where_undefined(v, found)
    to_w = None
    if ad.is_undefined_primal(w):
        (to_w,) = _bind(push_p, with_z, lanes, known, *z)
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
    if not flow.setup.widens(size):
        return _in_turn(prim, flow, operands, batched)
    lanes, known, *others = _numbers(flow, operands)
    lanes_b, known_b, *others_b = _numbers(flow, batched)
    # What is its own: rows (of each trajectory), and tangents.
    n_v = 0 if prim in (solve_p, pull_p) else 1 + sum(m is not None for m in flow.moved)
    start = 1 if prim is bend_p else 0
    v, v_b = (x[start : start + n_v] for x in (others, others_b))
    rows, rows_b = (x[:start] + x[start + n_v :] for x in (others, others_b))
    setup, lanes, known, *rows = widened(
        flow.setup, size, (lanes_b, known_b, *rows_b), lanes, known, *rows
    )
    moved: tuple = flow.moved
    if n_v:
        v, now = _folded_tangents(flow, size, v, v_b)
        flags = iter(now[1:])
        moved = tuple(None if m is None else next(flags) for m in flow.moved)
    if prim in (solve_p, push_p):
        setup = setup._replace(groups=1)
    wide = Flow(setup, moved=moved)
    outs = _bind(prim, wide, lanes, known, *rows[:start], *v, *rows[start:])
    if prim in (solve_p, push_p):
        found = [x.reshape(size, -1, *x.shape[1:]) for x in outs]
    else:
        found = [outs[0].reshape(size, -1, *outs[0].shape[1:])]
        for x, was, now in zip(outs[1:], own_of(flow.plan), own_of(wide.plan), strict=True):
            if now and not was:
                # Shared in each, but not by all: the sum over the trajectories of each group.
                x = x.reshape(size, flow.setup.groups, -1, *x.shape[1:]).sum(2)
            else:
                x = x.reshape(size, -1, *x.shape[1:])
            found.append(x)
    return found, [0] * len(found)


def _in_turn(prim: Any, flow: Flow, operands: Sequence, batched: Sequence[bool]) -> tuple:
    """One after the other."""
    mapped = [x for x, b in zip(operands, batched, strict=True) if b]

    def one(mapped):
        left = iter(mapped)
        each = [next(left) if b else x for x, b in zip(operands, batched, strict=True)]
        return prim.bind(*each, flow=flow)

    found = jax.lax.map(one, mapped)
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


#
# Solves with them
#


def differentiable(setup: Setup, lanes: Lane, ok: Any, result: Result, more: Any = None) -> Any:
    """The saved states of a result, with derivatives of any order by the numbers.

    **Arguments:**

    - `ok`: which trajectories are wanted: `[trajectory]`.
    - `more`: see `Known`.
    """
    plan, n, u = setup.plan, setup.n, result.u
    saving = plan.saving
    ok = ok & (result.retcode == ReturnCode.Success.value)
    reached = result.naccept + int(saving.start) if saving.mode == "steps" else result.length
    u0 = each(lanes.u0, plan.batched.u0, n)
    plan = dataclasses.replace(plan, batched=plan.batched._replace(u0=True))
    lanes = jax.tree.map(jnp.asarray, lanes._replace(u0=u0))
    flow = Flow(setup._replace(plan=plan))
    rows = u[:, -1:] if saving.mode == "ends" else u
    (rows,) = _bind(solve_p, flow, lanes, Known(ok, reached, more), rows)
    if saving.mode == "times" or not saving.start:
        return rows
    # A state saved at t0 is u0, whenever that is; but where it is at a time given by saveat.
    start = jnp.where(ok.reshape(-1, *(1,) * (u0.ndim - 1)), u0, u[:, 0])[:, None]
    return jnp.concatenate([start, rows if saving.mode == "ends" else rows[:, 1:]], axis=1)
