"""The derivatives and transposes of the four primitives, and the solves that use them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array
from jax.interpreters import ad, batching

from ...ground.retcode import reached_end, was_ended
from ...jumps.moving_discontinuities import with_moving_discontinuities
from ...plan.plan import Plan, Result
from ...plan.trajectory_numbers import TrajectoryNumbers
from ..base.capabilities import no_derivative, STOPS
from ..base.checks import say_that_stops_move
from ..base.results import events_in, numbers_of_each, rows_of_events
from .along import (
    at_times,
    each_t0,
    from_rows,
    moving_times,
    row_rates,
    sizes_of,
    start_rate,
    times_rate,
    to_rows,
    without_events,
)
from .batching import batch
from .flow import (
    augmented,
    augmented_tangents,
    Flow,
    inexact_of,
    inexacts_of,
    is_zero,
    RecordedSolve,
    stacked,
    with_own,
    with_wanted,
)
from .primitives import bend_p, bind, half, parted, pull_p, push_p, solve_p, unpack


#
# Derivatives
#


def _moving(
    flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, dlanes: TrajectoryNumbers
) -> tuple[Flow, list] | None:
    """The flow and the operands for the tangents of x. The tangent of the initial state includes
    its change along the field when `t0` moves. None where all tangents are zero."""
    v0, reals = dlanes.u0, inexacts_of(flow.plan, dlanes)
    if is_zero(v0) and is_zero(dlanes.t0) and all(map(is_zero, reals)):
        return None
    v0 = ad.instantiate_zeros(v0)
    if not is_zero(dlanes.t0):
        v0 = v0 - times_rate(start_rate(flow, lanes, known), each_t0(flow, dlanes.t0))
    own = inexacts_of(flow.plan, flow.plan.batched)
    moved = [None if is_zero(x) else bool(o) for x, o in zip(reals, own, strict=True)]
    return flow.with_moved(moved, groups=1, wanted=()), [v0, *(x for x in reals if not is_zero(x))]


def _with_moving_jumps(
    flow: Flow, lanes: TrajectoryNumbers, dlanes: TrajectoryNumbers
) -> tuple[Flow, TrajectoryNumbers, TrajectoryNumbers]:
    """The flow with derivatives with respect to the times at which the field jumps, if these times
    have tangents. Other known times have none, as the solution there is as smooth as elsewhere.

    **Raises:** `NotImplementedError` where the engine has no such derivatives.
    """
    moving, table = dlanes.d_discontinuities, lanes.d_discontinuities
    if moving is None or is_zero(moving):
        if dlanes.tstops is not None and not is_zero(dlanes.tstops):
            say_that_stops_move(flow.plan)
        return flow, lanes, dlanes
    if reason := no_derivative(flow.plan.engine.name, STOPS):
        raise NotImplementedError(reason)
    own = bool(flow.plan.batched.d_discontinuities)
    like = jax.ShapeDtypeStruct(table.shape[own:], table.dtype)
    plan = with_moving_discontinuities(flow.plan, like)
    fixed = jax.lax.stop_gradient(table)
    lanes = lanes._replace(consts=(), p=(*lanes.parameters, table), d_discontinuities=fixed)
    still = ad.Zero(moving.aval.to_tangent_aval())
    p = (*dlanes.parameters, moving)
    dlanes = dlanes._replace(consts=(), p=p, d_discontinuities=still)
    # The times of jumps, now the last parameter, have no tangent among those of the flow itself.
    return flow.with_moved((*flow.moved, None), plan=plan), lanes, dlanes


def _solve_dot(
    flow: Flow,
    dlanes: TrajectoryNumbers,
    rows: Callable,
    lanes: TrajectoryNumbers,
    known: RecordedSolve,
) -> list:
    """The tangents of the results of `solve`, None for zero; `rows()` returns the saved states."""
    moving, dtimes = _moving(flow, lanes, known, dlanes), moving_times(flow, dlanes)
    outs: list = [None] * len(sizes_of(flow))
    if moving is not None:
        with_v, v = moving
        outs = bind(push_p, with_v, lanes, known, *v)
    if dtimes is not None and not is_zero(dtimes):
        rate = row_rates(flow, lanes, known, rows())
        outs[0] = _sum(outs[0], to_rows(flow, known, times_rate(rate, at_times(flow, dtimes))))
    return outs


def _asked(flow: Flow, c: Sequence) -> tuple[Flow, list]:
    """The flow and the cotangents, without the rows of events if their cotangent is zero."""
    if len(c) > 1 and is_zero(c[1]):
        flow, c = without_events(flow), c[:1]
    return flow, list(map(ad.instantiate_zeros, c))


def _pull_dot(
    flow: Flow,
    dlanes: TrajectoryNumbers,
    dc: list,
    lanes: TrajectoryNumbers,
    known: RecordedSolve,
    c: Sequence,
    pulled: Callable,
) -> list:
    """The tangents of `pulled()`, the results of `pull`; None for zero."""
    moving, dtimes = _moving(flow, lanes, known, dlanes), moving_times(flow, dlanes)
    more: list = []
    if dtimes is not None and not is_zero(dtimes):
        # J^T c at the saved states, and how it changes with the parameters of f.
        rows, *_ = bind(solve_p, flow.with_moved(groups=1, wanted=()), lanes, known)
        args = by_group(flow, lanes)

        def along(rows, wanted):
            return row_rates(*of_groups(flow, lanes, wanted), known, rows)

        by = times_rate(from_rows(flow, known, c[0]), at_times(flow, dtimes))
        at_rows, to_wanted = jax.vjp(along, rows, args)[1](by)
        dc = [at_rows + ad.instantiate_zeros(dc[0]), *dc[1:]]
        more.append([None, *to_wanted])
    if moving is not None:
        with_v, v = moving
        with_v = with_v.with_moved(with_v.moved, groups=flow.groups, wanted=flow.wanted)
        w = map(ad.instantiate_zeros, dc)
        more.append(bind(bend_p, with_v, lanes, known, *c, *v, *w))
    elif not all(map(is_zero, dc)):
        asked, c = _asked(flow.with_moved(), dc)
        more.append(bind(pull_p, asked, lanes, known, *c))
    if not is_zero(dlanes.t0):
        to_u0 = pulled()[0]

        def leaving(u0, wanted):
            here, numbers = of_groups(flow, lanes, wanted)
            return start_rate(here, numbers._replace(u0=u0), known)

        by = -times_rate(to_u0, each_t0(flow, dlanes.t0))
        to_u0, to_wanted = jax.vjp(leaving, lanes.u0, by_group(flow, lanes))[1](by)
        more.append([to_u0, *to_wanted])
    found: list = [None] * (1 + len(flow.wanted))
    for xs in more:
        found = list(map(_sum, found, xs))
    return found


def _sum(a: Array | None, b: Array | None) -> Array | None:
    """The sum, where None is zero."""
    return b if a is None else a if b is None else a + b


def by_group(flow: Flow, lanes: TrajectoryNumbers) -> list:
    """The `wanted` parameters; those that all trajectories share get an axis of groups."""
    k = flow.groups
    return [
        x if own else jnp.broadcast_to(x, (k, *x.shape))
        for x, own in zip(flow.wanted_of(lanes), flow.own, strict=True)
    ]


def of_groups(
    flow: Flow, lanes: TrajectoryNumbers, grouped: Sequence
) -> tuple[Flow, TrajectoryNumbers]:
    """The flow and its numbers with these parameters, which may differ between groups."""
    own, plan = flow.own, flow.plan
    values = [x if o else _ungrouped(flow, x) for x, o in zip(grouped, own, strict=True)]
    lanes = with_wanted(flow, lanes, values)
    if flow.groups == 1:
        return flow, lanes
    batched = with_wanted(flow, plan.batched, [True] * len(own))
    return flow.with_moved(plan=dataclasses.replace(plan, batched=batched)), lanes


def _ungrouped(flow: Flow, x: Array) -> Array:
    """Numbers `[group, ...]` as numbers of each trajectory; with a single group, as shared ones."""
    return x[0] if flow.groups == 1 else jnp.repeat(x, flow.n // flow.groups, axis=0)


def _tangents(outs: Sequence, found: Sequence) -> list:
    """The tangents of `outs`, where None is zero."""
    pairs = zip(outs, found, strict=True)
    return [ad.Zero(jax.typeof(out).to_tangent_aval()) if x is None else x for out, x in pairs]


def _is_still(dlanes: TrajectoryNumbers) -> bool:
    return all(map(is_zero, jtu.tree_leaves(dlanes, is_leaf=is_zero)))


def _solve_jvp(primals, tangents, *, flow):
    lanes, known, *_ = unpack(flow, primals)
    dlanes, *_ = unpack(flow, tangents)
    outs, plan = solve_p.bind(*primals, flow=flow), flow.plan
    # The derivatives are those of whole rows.
    flow = flow.with_moved(plan=dataclasses.replace(plan, saved=None))
    flow, lanes, dlanes = _with_moving_jumps(flow, lanes, dlanes)

    def rows():
        return outs[0] if plan.chosen is None else bind(solve_p, flow, lanes, known)[0]

    of_rows, *of_events = _solve_dot(flow, dlanes, rows, lanes, known)
    return outs, _tangents(outs, [of_rows if of_rows is None else plan.row_of(of_rows), *of_events])


def _push_jvp(primals, tangents, *, flow):
    lanes, known, *v = unpack(flow, primals)
    dlanes, _, *dv = unpack(flow, tangents)
    outs = push_p.bind(*primals, flow=flow)
    if _is_still(dlanes):
        with_v, dv = _linear(flow, dv)
        return outs, bind(push_p, with_v, lanes, known, *dv)
    flow, lanes, dlanes = _with_moving_jumps(flow, lanes, dlanes)
    wide, both = augmented(flow, lanes, v)

    def rows():
        return bind(solve_p, wide, both, known)[0]

    found = _solve_dot(wide, augmented_tangents(flow, dlanes, dv, wide), rows, both, known)
    return outs, _tangents(outs, [x if x is None else half(x, 1) for x in found])


def _linear(flow: Flow, dv: Sequence) -> tuple[Flow, list]:
    """The flow and the operands for tangents of tangents, without those that are zero."""
    dv0, *rest = dv
    flags = iter(rest)
    kept = [next(flags) if m is not None else None for m in flow.moved]
    moved = [None if m is None or is_zero(x) else m for m, x in zip(flow.moved, kept, strict=True)]
    chosen = [x for x in rest if not is_zero(x)]
    return flow.with_moved(moved), [ad.instantiate_zeros(dv0), *chosen]


def _pull_jvp(primals, tangents, *, flow):
    lanes, known, *c = unpack(flow, primals)
    dlanes, _, *dc = unpack(flow, tangents)
    outs = pull_p.bind(*primals, flow=flow)
    flow, lanes, dlanes = _with_moving_jumps(flow, lanes, dlanes)
    return outs, _tangents(outs, _pull_dot(flow, dlanes, dc, lanes, known, c, lambda: outs))


def _bend_jvp(primals, tangents, *, flow):
    lanes, known, *others = unpack(flow, primals)
    dlanes, _, *tangents = unpack(flow, tangents)
    (c, v, w), (dc, dv, dw) = parted(flow, others), parted(flow, tangents)
    outs = bend_p.bind(*primals, flow=flow)
    if _is_still(dlanes) and all(map(is_zero, dc)):
        if all(map(is_zero, dv)):
            asked, c = _asked(flow.with_moved(), dw)
            return outs, bind(pull_p, asked, lanes, known, *c)
        with_v, dv = _linear(flow, dv)
        dw = map(ad.instantiate_zeros, dw)
        return outs, bind(bend_p, with_v, lanes, known, *c, *dv, *dw)
    flow, lanes, dlanes = _with_moving_jumps(flow, lanes, dlanes)
    wide, both = augmented(flow, lanes, v)
    c2 = [jnp.stack([x, y], axis=2) for x, y in zip(w, c, strict=True)]
    dc2 = [stacked(x, y, axis=2) for x, y in zip(dw, dc, strict=True)]

    def pulled():
        return bind(pull_p, wide, both, known, *c2)

    moved = augmented_tangents(flow, dlanes, dv, wide)
    u0, *parameters = _pull_dot(wide, moved, dc2, both, known, c2, pulled)
    return outs, _tangents(outs, [u0 if u0 is None else u0[:, 0], *parameters])


#
# Transposes
#


def _as_tangents(flow: Flow, cts: Sequence) -> tuple[Flow, list]:
    """Cotangents of the cotangents of the numbers, as tangents for `push` and `bend`."""
    z0, *zs = cts
    flags, found = dict.fromkeys(inexact_of(flow.plan.field)), []
    for i, z, own in zip(flow.wanted, zs, flow.own, strict=True):
        if not is_zero(z):
            flags[i] = own or flow.groups > 1
            found.append(z if own else _ungrouped(flow, z))
    moved = list(flags.values())
    return flow.with_moved(moved, groups=1, wanted=()), [ad.instantiate_zeros(z0), *found]


def _to_tangents(
    flow: Flow,
    prim: Any,
    lanes: TrajectoryNumbers,
    known: RecordedSolve,
    *others: Any,
    v: Sequence,
    like: Flow,
) -> list:
    """Cotangents of `v`, the tangents of `like`: one for each trajectory, or their sum. None for
    tangents that are known; cotangents of parameters without a tangent aren't computed at all."""
    v0, *rest = map(ad.is_undefined_primal, v)
    are_asked = iter(rest)
    asked = {
        i: m
        for i, m in zip(inexact_of(flow.plan.field), like.moved, strict=True)
        if m is not None and next(are_asked)
    }
    flow = dataclasses.replace(flow, groups=1, wanted=tuple(asked))
    flow, lanes = with_own(flow, lanes, list(asked.values()))
    to_u0, *found = bind(prim, flow, lanes, known, *others)
    own = zip(found, flow.own, asked.values(), strict=True)
    left = iter([x if m else x.sum(0) if o else x[0] for x, o, m in own])
    return [to_u0 if v0 else None, *(next(left) if is_asked else None for is_asked in rest)]


# Each returns the cotangents of the last operands, in which the primitive is linear.


def _push_transpose(flow, cts, lanes, known, v):
    asked, c = _asked(flow.with_moved(), cts)
    return _to_tangents(asked, pull_p, lanes, known, *c, v=v, like=flow)


def _pull_transpose(flow, cts, lanes, known, c):
    with_z, z = _as_tangents(flow, cts)
    return bind(push_p, with_z, lanes, known, *z)


def _bend_transpose(flow, cts, lanes, known, others):
    c, v, w = parted(flow, others)
    with_z, z = _as_tangents(flow, cts)
    to_v: list = [None] * len(v)
    if any(map(ad.is_undefined_primal, v)):
        none = map(jnp.zeros_like, c)
        to_v = _to_tangents(with_z, bend_p, lanes, known, *c, *z, *none, v=v, like=flow)
    to_w: list = [None] * len(w)
    are_asked = list(map(ad.is_undefined_primal, w))
    if any(are_asked):
        pushed = bind(push_p, with_z, lanes, known, *z)
        to_w = [x if is_asked else None for x, is_asked in zip(pushed, are_asked, strict=True)]
    return [*to_v, *to_w]


def _transpose_by(rule, cts, *operands, flow):
    if all(map(is_zero, cts)):
        return [None] * len(operands)
    lanes, known, *others = unpack(flow, operands)
    found = rule(flow, cts, lanes, known, others)
    return [*(None for _ in operands[len(found) :]), *found]


for _prim, _jvp, _transpose in (
    (solve_p, _solve_jvp, None),
    (push_p, _push_jvp, _push_transpose),
    (pull_p, _pull_jvp, _pull_transpose),
    (bend_p, _bend_jvp, _bend_transpose),
):
    ad.primitive_jvps[_prim] = _jvp
    batching.primitive_batchers[_prim] = functools.partial(batch, _prim)
    if _transpose is not None:
        ad.primitive_transposes[_prim] = functools.partial(_transpose_by, _transpose)


#
# Solves with these derivatives
#


def differentiable(plan: Plan, lanes: TrajectoryNumbers, ok: Any, result: Result) -> Result:
    """A result whose saved states and events have derivatives of any order with respect to the
    numbers; `ok` says which trajectories are wanted."""
    saving, events, u = plan.saving, result.events, result.u
    ended = was_ended(result.retcode)
    ok = ok & (reached_end(result.retcode) | ended)
    if saving.mode == "steps" and plan.events is None:
        reached = result.naccept + int(saving.start)
    else:
        reached = result.length
    known = RecordedSolve(ok, reached)
    if plan.events is not None:
        known = known._replace(ended=ended, happened=None if events is None else events.count)
    u0 = numbers_of_each(lanes.u0, plan.batched.u0, len(u))
    plan = dataclasses.replace(plan, batched=plan.batched._replace(u0=True))
    lanes = jax.tree.map(jnp.asarray, lanes._replace(u0=u0))
    flow = Flow(plan, len(u))
    rows = u[:, -1:] if saving.mode == "ends" else u
    slots = [rows_of_events(events, result.ended)] if plan.event_slots else []
    rows, *slots = bind(solve_p, flow, lanes, known, rows, *slots)
    if slots:
        found, ended = events_in(plan, *slots)
        events = None if events is None else events._replace(**found)
        result = result._replace(events=events, ended=ended)
    if saving.mode == "times" or not saving.start:
        return result._replace(u=rows)
    # The state saved at the start is u0, whatever t0 is; a state saved at a time of `saveat` moves
    # with that time.
    start = plan.row_of(u0)
    start = jnp.where(ok.reshape(-1, *(1,) * (start.ndim - 1)), start, u[:, 0])[:, None]
    rows = rows if saving.mode == "ends" else rows[:, 1:]
    return result._replace(u=jnp.concatenate([start, rows], axis=1))
