"""Makes the `Result` of one trajectory or many from what a time loop of this library returns."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int, Int8

from ...ground.devices.alone import without_types
from ...ground.devices.given_device import for_one_device
from ...ground.retcode import reached_end, ReturnCode, was_ended
from ...plan.events import EVENT_ROWS
from ...plan.implicit_form import with_constants_around
from ...plan.plan import Plan, RecordedEvents, Result, shared_times
from ...plan.saving import meant
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...solution.events import End
from ...solvers.switching import StepCounts
from ...tracing.program import Program, program_of, trace, with_constants


class LoopResult(NamedTuple):
    """The outcome of a time loop, with the trajectories along the first axis.

    - `u`, `t`: the saved states (where only ends are saved, the last ones), and their times where
        every step is saved.
    - `ntried`: the number of steps tried; `StepCounts` if two methods make them.
    - `restarts`: how often the method's carry was made anew during the trajectory; None for never.
    - `events`, `ended`: see `Result`.
    """

    u: Inexact[Array, "lane row *state"]
    t: Float[Array, "lane row"] | None
    rows: Int[Array, ""] | Int[Array, " lane"]
    codes: Int8[Array, " lane"]
    naccept: Int[Array, " lane"]
    ntried: Int[Array, " lane"] | StepCounts
    restarts: Int[Array, " lane"] | None = None
    events: RecordedEvents | None = None
    ended: End | None = None


def result_of(plan: Plan, lanes: TrajectoryNumbers, left: LoopResult) -> Result:
    """The result for these numbers. Rows that were not reached are NaN; `t` is there only where
    each trajectory has its own times. A trajectory whose saved states overflow, or that misses a
    time to save, is no success."""
    saving, codes = plan.saving, left.codes
    method = plan.method.value.method
    success = reached_end(codes)
    ended = was_ended(codes)
    n = len(codes)
    t0, t1 = jnp.asarray(lanes.t0), jnp.asarray(lanes.t1)
    times = meant(lanes.saveat, lanes.count, t0, t1)
    if saving.mode == "ends":
        u0 = numbers_of_each(plan.row_of(lanes.u0), plan.batched.u0, n)[:, None]
        u = jnp.concatenate([u0, left.u], axis=1)[:, -saving.rows :]
        # The last state of a failed trajectory is not its state at t1.
        reached = jnp.ones((n, saving.rows), bool).at[:, -1].set(success | ended)
    else:
        u = left.u[:, : saving.rows]
        rows = left.rows if left.rows.ndim == 0 else left.rows[:, None]
        reached = jnp.arange(saving.rows, dtype=rows.dtype)[None] < rows
        if saving.mode == "times":
            asked, astray = _asked_for(times, t0, t1)
            reached = reached & ~astray
            missed = jnp.any(asked & ~reached, axis=1) & success
            codes = jnp.where(missed, jnp.asarray(ReturnCode.Failure.value, codes.dtype), codes)
    first = u.reshape(*u.shape[:2], -1)[..., : plan.controlled]  # (all of chosen ones)
    finite = jnp.all(jnp.isfinite(first), axis=2)
    overflow = jnp.any(reached & ~finite, axis=1)
    codes = jnp.where(overflow, jnp.asarray(ReturnCode.Unstable.value, codes.dtype), codes)
    reached = reached & finite
    u = jnp.where(reached.reshape(n, -1, *(1,) * (u.ndim - 2)), u, jnp.nan)
    t = None
    if plan.own_times:
        if saving.mode == "ends":
            t = end_times(lanes, left.ended, n)[:, -saving.rows :]
        else:
            t = times if left.t is None else left.t[:, : saving.rows]
        t = jnp.where(reached, t, jnp.nan)
    nf = method.evaluations(left.ntried)
    if left.restarts is not None:
        nf = nf + left.restarts * method.evaluations(0)
    if lanes.dt is None:
        nf = nf + 2  # the automatic choice of the first step
    length = jnp.sum(reached, axis=1, dtype=jnp.int32)
    tried = left.ntried.all if isinstance(left.ntried, StepCounts) else left.ntried
    about = length, codes, left.naccept, tried - left.naccept, nf
    of_matrices = method.linear_algebra(left.ntried) or ()
    return Result(u, t, None, *about, *of_matrices, events=left.events, ended=left.ended)


def end_times(lanes: TrajectoryNumbers, ended: End | None, n: int) -> Any:
    """Where each of `n` trajectories starts and ends: `[trajectory, 2]`."""
    t0, t1 = jnp.asarray(lanes.t0), jnp.asarray(lanes.t1)
    ends = [numbers_of_each(x, x.ndim > 0, n) for x in (t0, t1)]
    if ended is not None:
        ends[1] = jnp.where(jnp.isnan(ended.t), ends[1], ended.t)
    return jnp.stack(ends, axis=1)


def rows_of_events(events: RecordedEvents | None, ended: End | None) -> Any:
    """The rows `[trajectory, row, *state]` of events, three for each of the `Plan.event_slots`: the
    state before the event, the state after it, and its time as the first component of a row that is
    otherwise zero. The state before the event that ended a trajectory isn't kept."""
    parts = []
    if ended is not None:
        parts.append([jnp.zeros_like(ended.u[:, None]), ended.u[:, None], ended.t[:, None]])
    if events is not None:
        parts.append([events.before, events.after, events.t])
    before, after, t = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    zeros = jnp.zeros((*t.shape, before[0, 0].size - 1), t.dtype)
    time = jnp.concatenate([t[..., None], zeros], axis=2).reshape(before.shape)
    rows = jnp.stack([before, after, time], axis=2)
    return rows.reshape(len(rows), -1, *before.shape[2:])


def events_in(plan: Plan, rows: Any) -> tuple[dict[str, Any], End | None]:
    """The fields of `RecordedEvents` that these rows hold, by name; and the `End`."""
    before, after, time = (rows[:, i::EVENT_ROWS] for i in range(EVENT_ROWS))
    t, first = time.reshape(*time.shape[:2], -1)[..., 0], int(plan.keeps_end)
    ended = End(t[:, 0], after[:, 0]) if plan.keeps_end else None
    named = {"t": t, "before": before, "after": after}
    return {name: x[:, first:] for name, x in named.items()}, ended


def _asked_for(times: Any, t0: Array, t1: Array) -> tuple:
    """Masks `[1, row]` or `[lane, row]` of the rows that have a time, and of the rows whose time is
    before `t0` or before that of an earlier row, which is possible for traced times."""
    times = jnp.asarray(times)
    times = times if times.ndim == 2 else times[None]
    t0, t1 = (x if x.ndim == 0 else x[:, None] for x in (t0, t1))
    forwards = jnp.sign(t1 - t0) * times
    first = jnp.broadcast_to(jnp.sign(t1 - t0) * t0, (*forwards.shape[:-1], 1))
    before = jnp.concatenate([first, forwards[:, :-1]], axis=1)
    return jnp.isfinite(times), forwards < before


def numbers_of_each(x: Array, is_own: bool, n: int) -> Array:
    """The numbers `x` of `n` trajectories, repeated where all trajectories share `x`."""
    x = jnp.asarray(x)
    return x if is_own else jnp.broadcast_to(x, (n, *x.shape))


def for_one(plan: Plan, lane: TrajectoryNumbers) -> tuple[Plan, TrajectoryNumbers]:
    """The plan and the numbers of one trajectory without an axis of trajectories. A field that is
    no program (such as that of the columns of a matrix) is traced."""
    if not isinstance(plan.field, Program):

        def traced(fn, *p):
            with for_one_device():
                program, consts = trace(fn, *without_types((lane.consts, u0, p, t)))
            jaxpr, n = program.jaxpr, len(lane.consts)
            constants = (*jaxpr.constvars, *jaxpr.invars[:n])
            jaxpr = with_constants(jaxpr, constants, jaxpr.invars[n:])
            return program_of(jaxpr, program.out_tree, rules=True), [*consts, *lane.consts]

        u0, form = jnp.asarray(lane.u0), plan.form
        t = jax.ShapeDtypeStruct((), jnp.asarray(lane.t0).dtype)
        program, consts = traced(plan.field, *lane.p)
        if form is not None and form.product is not None:
            # The field's and the product's programs both get the constants of both.
            product, more = traced(form.product, *lane.p, u0)
            first, last = ([(x.shape, x.dtype) for x in xs] for xs in (consts, more))
            form = form.mapped(lambda _: with_constants_around(product, tuple(first), ()))
            program = with_constants_around(program, (), tuple(last))
            consts = [*consts, *more]
        batched = plan.batched._replace(consts=(False,) * len(consts))
        state = jax.ShapeDtypeStruct(u0.shape, u0.dtype)
        changes: dict[str, Any] = {"field": program, "state": state, "controlled": u0.size}
        plan = dataclasses.replace(plan, batched=batched, form=form, **changes)
        lane = lane._replace(consts=tuple(consts))
    none = jax.tree.map(lambda _: False, plan.batched)
    return dataclasses.replace(plan, batched=none, width=1), lane


def only(plan: Plan, result: Result) -> Result:
    """The result of a single trajectory, without the axis of trajectories."""
    t = result.t[0] if plan.own_times else result.t
    return jax.tree.map(lambda x: x[0], result._replace(t=None))._replace(t=t)


def with_times(plan: Plan, lanes: TrajectoryNumbers, result: Result) -> Result:
    """The result with its saved times, which it lacks where trajectories share them."""
    t = shared_times(plan, lanes) if result.t is None else _own_times(plan, lanes, result)
    return result._replace(t=t)


def _own_times(plan: Plan, lanes: TrajectoryNumbers, result: Result) -> Any:
    """The saved times `[trajectory, row]` as functions of the numbers that they depend on. Where
    every step is saved, all but the first and the last are constants; the last may be that of an
    event."""
    n, rows = result.t.shape

    def column(x, batched):
        return jnp.broadcast_to(x[:, None] if batched else x, (n, rows))

    saved = jax.lax.stop_gradient(result.t)
    row = jnp.arange(rows, dtype=result.length.dtype)[None]
    t0, t1 = column(lanes.t0, plan.batched.t0), column(lanes.t1, plan.batched.t1)
    if plan.saving.mode == "times":
        t = jnp.broadcast_to(jnp.asarray(lanes.saveat), (n, rows))
    else:
        first = (row == 0) & plan.saving.start
        last = row == result.length[:, None] - 1
        arrived = reached_end(result.retcode[:, None])
        t = jnp.where(first, t0, jnp.where(last & arrived, t1, saved))
        # (Whether the state after every event that may end a trajectory is saved.)
        ends = () if plan.events is None else (x for x in plan.events.callbacks if x.may_end)
        saves = plan.saving.mode == "ends" or all(x.save_positions[1] for x in ends)
        if result.ended is not None and saves:
            is_end = was_ended(result.retcode)[:, None]
            t = jnp.where(last & is_end, result.ended.t[:, None], t)
    return jnp.where(jnp.isnan(saved), saved, t)
