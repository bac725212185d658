"""From what a time loop of ours leaves behind to the `Result` of trajectories, many or one."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int, Int8

from ..core.lane import Lane
from ..core.plan import Happened, Plan, Result, shared_times
from ..ground.retcode import ReturnCode
from ..solvers.method import Method
from ..tracing.program import Program, trace


class Numbers(NamedTuple):
    """The numbers of trajectories: where they begin, their spans (`[]` where all have the same),
    and the times to save."""

    u0: Inexact[Array, "lane *state"]
    t0: Float[Array, ""] | Float[Array, "lane"]
    t1: Float[Array, ""] | Float[Array, "lane"]
    times: Float[Array, "time"] | Float[Array, "lane time"] | Any


class Saved(NamedTuple):
    """What was saved on the way: the states, their times where every step is saved, and how many
    rows; all None where only the end is saved."""

    u: Inexact[Array, "lane row *state"] | Any
    t: Float[Array, "lane row"] | Any
    rows: Int[Array, ""] | Int[Array, "lane"] | Any


class Counts(NamedTuple):
    """Return codes, how many steps were accepted and tried, and how often what a method carries was
    made anew on the way (None: never)."""

    codes: Int8[Array, "lane"]
    naccept: Int[Array, "lane"]
    ntried: Int[Array, "lane"]
    restarts: Int[Array, "lane"] | None = None


def result_of(
    plan: Plan,
    method: Method,
    has_dt: bool,
    numbers: Numbers,
    end: Any,
    saved: Saved,
    counts: Counts,
    controlled: int,
    events: Happened | None = None,
) -> Result:
    """The result, NaN where nothing was reached. Trajectories whose saved states overflow, or which
    miss a time, have not succeeded.

    **Arguments:** `end`: the last state, `[lane, *state]`; `controlled`: how many of its components
    say whether it is finite (the first ones).
    """
    saving, codes = plan.saving, counts.codes
    success = codes == ReturnCode.Success.value
    ended = codes == ReturnCode.Terminated.value
    lanes = len(codes)
    if saved.u is None:
        u = jnp.stack([numbers.u0, end][-saving.rows :], axis=1)
        # The last state of a failed trajectory is not its state at t1.
        reached = jnp.ones((lanes, saving.rows), bool).at[:, -1].set(success | ended)
    else:
        u = saved.u[:, : saving.rows]
        rows = saved.rows if saved.rows.ndim == 0 else saved.rows[:, None]
        reached = jnp.arange(saving.rows, dtype=rows.dtype)[None] < rows
        if saving.mode == "times":
            asked, astray = _asked_for(numbers)
            reached = reached & ~astray
            missed = jnp.any(asked & ~reached, axis=1) & success
            codes = jnp.where(missed, jnp.asarray(ReturnCode.Failure.value, codes.dtype), codes)
    first = u.reshape(*u.shape[:2], -1)[..., :controlled]
    finite = jnp.all(jnp.isfinite(first), axis=2)
    overflow = jnp.any(reached & ~finite, axis=1)
    codes = jnp.where(overflow, jnp.asarray(ReturnCode.Unstable.value, codes.dtype), codes)
    reached = reached & finite
    u = jnp.where(reached.reshape(lanes, -1, *(1,) * (u.ndim - 2)), u, jnp.nan)
    t = None
    if plan.own_times:
        if saved.u is None:
            ends = [jnp.broadcast_to(x, (lanes,)) for x in (numbers.t0, numbers.t1)]
            if events is not None:
                last = jnp.clip(events.count - 1, 0)[:, None]
                last = jnp.take_along_axis(events.t, last, axis=1)[:, 0]
                ends[1] = jnp.where(ended, last, ends[1])
            t = jnp.stack(ends[-saving.rows :], axis=1)
        else:
            t = numbers.times if saved.t is None else saved.t[:, : saving.rows]
        t = jnp.where(reached, t, jnp.nan)
    nf = method.evaluations(counts.ntried)
    if counts.restarts is not None:
        nf = nf + counts.restarts * method.evaluations(0)
    if not has_dt:
        nf = nf + 2  # the automatic first step
    length = jnp.sum(reached, axis=1, dtype=jnp.int32)
    nreject = counts.ntried - counts.naccept
    about = length, codes, counts.naccept, nreject, nf
    return Result(u, t, None, *about, events=events)


def _asked_for(numbers: Numbers) -> tuple:
    """Which rows have a time; and which have one before `t0`, or before that of an earlier row (as
    traced times may): `[1, row]` or `[lane, row]`."""
    times = numbers.times if numbers.times.ndim == 2 else numbers.times[None]
    t0, t1 = (x if x.ndim == 0 else x[:, None] for x in (numbers.t0, numbers.t1))
    forwards = jnp.sign(t1 - t0) * times
    first = jnp.broadcast_to(jnp.sign(t1 - t0) * t0, (*forwards.shape[:-1], 1))
    before = jnp.concatenate([first, forwards[:, :-1]], axis=1)
    return jnp.isfinite(times), forwards < before


def for_one(plan: Plan, lane: Lane) -> tuple[Plan, Lane]:
    """The plan and the numbers of one trajectory without an axis of trajectories; a field that is
    no program (that of the columns of a matrix, say) is traced."""
    if not isinstance(plan.field, Program):

        def field(u, p, t):
            return plan.field(lane.consts, u, p, t)

        u0 = jnp.asarray(lane.u0)
        t = jax.ShapeDtypeStruct((), jnp.asarray(lane.t0).dtype)
        program, consts = trace(field, u0, lane.p, t, rules=True)
        batched = plan.batched._replace(consts=(False,) * len(consts))
        state = jax.ShapeDtypeStruct(u0.shape, u0.dtype)
        plan = dataclasses.replace(plan, field=program, batched=batched, state=state)
        lane = lane._replace(consts=tuple(consts))
    return dataclasses.replace(plan, batched=jax.tree.map(lambda _: False, plan.batched)), lane


def only(plan: Plan, result: Result) -> Result:
    """The result of a single trajectory, without the axis of trajectories."""
    t = result.t[0] if plan.own_times else result.t
    return jax.tree.map(lambda x: x[0], result._replace(t=None))._replace(t=t)


def with_times(plan: Plan, lanes: Lane, result: Result) -> Result:
    """The result with its saved times, which it lacks where the trajectories share them."""
    t = shared_times(plan, lanes) if result.t is None else _own_times(plan, lanes, result)
    return result._replace(t=t)


def _own_times(plan: Plan, lanes: Lane, result: Result) -> Any:
    """The saved times `[trajectory, row]` as functions of the numbers that they depend on.

    (Within a solve that saves every step they are constants, but for the first and the last.)
    """
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
        arrived = result.retcode[:, None] == ReturnCode.Success.value
        t = jnp.where(first, t0, jnp.where(last & arrived, t1, saved))
    return jnp.where(jnp.isnan(saved), saved, t)
