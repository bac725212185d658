"""The saved states of the lanes of a chunk, at given times or at the end of every step."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from ...core.lane import Lane
from ...core.plan import Plan
from ...fields.lanes.field import LaneField
from ...solvers.method import equations_of
from .leaves import LANES, OfLanes
from .loop import counted, State, Step


class Output(NamedTuple):
    """The saved states so far.

    - `u`: the saved states, NaN where not reached, with one additional row at the end; `t`: their
        times, where every step is saved.
    - `row`: the next row to write; `time`: the next time to save, where times are given.
    """

    u: Inexact[Array, "lane row *state"]
    t: Float[Array, "lane row"] | None
    row: Int[Array, ""] | Int[Array, " lane"]
    time: OfLanes | None


def first_output(plan: Plan, field: LaneField, chunk: Lane, state: State) -> Output | None:
    """Arrays for the saved states, with those of the start filled in; None where only ends are
    saved."""
    saving = plan.saving
    if saving.mode == "ends":
        return None
    u0 = lane_first(field.join(chunk.u0))
    lanes, rows = len(u0), saving.rows
    u = jnp.full((lanes, rows + 1, *u0.shape[1:]), jnp.nan, u0.dtype)
    if saving.mode == "steps":
        t = jnp.full((lanes, rows + 1), jnp.nan, state.t.dtype)
        if saving.start:
            u, t = u.at[:, 0].set(u0), t.at[:, 0].set(chunk.t0)
        return Output(u, t, jnp.full(lanes, saving.start, jnp.int32), None)
    times = chunk.saveat
    at_start = times == (chunk.t0 if chunk.t0.ndim == 0 else chunk.t0[:, None])
    row = jnp.sum(at_start, axis=-1, dtype=jnp.int32)
    at_start = at_start.reshape(-1, rows, *(1,) * (u0.ndim - 1))
    first = _at_start(field, chunk, u0) if plan.method.value.direction == "forward" else u0[:, None]
    u = u.at[:, :rows].set(jnp.where(at_start, first, u[:, :rows]))
    if state.t.ndim and row.ndim == 0:
        row = jnp.broadcast_to(row, (lanes,))
    return Output(u, None, row, _next_time(chunk, row))


def _at_start(field: LaneField, chunk: Lane, u0: Any) -> Any:
    """The state at those times that equal the start: `[lane, row, *state]`. Its derivative with
    respect to such a time is the field at the start."""
    u0 = u0[:, None]
    rate = lane_first(field.join(field(chunk.p, chunk.u0, chunk.t0)))[:, None]
    since = chunk.saveat - (chunk.t0 if chunk.t0.ndim == 0 else chunk.t0[:, None])
    # Zero, but with a derivative.
    since = since - jax.lax.stop_gradient(since)
    since = since.reshape(-1, since.shape[-1], *(1,) * (u0.ndim - 2))
    return u0 + since * jnp.where(jnp.isfinite(rate), rate, 0)


def save(plan: Plan, field: LaneField, chunk: Lane, step: Step, out: Output) -> Output:
    """Save the states at times within the step just taken."""
    saving = plan.saving
    if out.t is not None:
        row = jnp.where(step.accepted, jnp.minimum(out.row, saving.rows), saving.rows)
        u = _write(out.u, row, lane_first(field.join(step.attempt.y2)))
        t = _write(out.t, row, step.t2 + jnp.zeros_like(out.t[:, 0]))
        return Output(u, t, counted(out.row, step.accepted), None)
    method = plan.method.value.method
    direction = jnp.sign(chunk.t1 - chunk.t0)

    def due(out):
        reached = direction * (step.t2 - out.time) >= 0
        return reached if out.row.ndim == 0 else reached & step.accepted

    dense = step.attempt.dense

    def more():
        equations, at = equations_of(functools.partial(field, chunk.p)), (step.t, step.h)
        return method.dense(LANES, equations, step.y, dense, *at)[len(dense) :]

    if structs := jax.eval_shape(more):
        # This runs only where something is saved.
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)
        dense = (*dense, *jax.lax.cond(jnp.any(due(out)), more, lambda: nothing))

    def save_one(out):
        now = due(out)
        theta = (out.time - step.t) / step.h
        u = lane_first(field.join(method.interpolate(LANES, step.y, dense, step.h, theta)))
        row = out.row if out.row.ndim == 0 else jnp.where(now, out.row, saving.rows)
        next_row = counted(out.row, now)
        return Output(_write(out.u, row, u), None, next_row, _next_time(chunk, next_row))

    return jax.lax.while_loop(lambda out: jnp.any(due(out)), save_one, out)


def _next_time(chunk: Lane, row: Any) -> Any:
    """The time of a row; infinitely far where there are no more rows."""
    times, rows = chunk.saveat, chunk.saveat.shape[-1]
    if times.ndim == 1:
        time = times.at[row].get(mode="clip")
    else:
        time = jnp.take_along_axis(times, jnp.minimum(row, rows - 1)[:, None], axis=1)[:, 0]
    return jnp.where(row < rows, time, jnp.sign(chunk.t1 - chunk.t0) * jnp.inf)


def _write(array: Any, row: Any, value: Any) -> Any:
    """Set row `row` of each lane; unwanted values go to the additional row at the end.

    This is written lane by lane, since XLA's CPU compiler turns a loop over time into one function,
    which is many times as fast, unless there is a scatter in it.
    """
    if row.ndim == 0:
        return jax.lax.dynamic_update_index_in_dim(array, value, row, 1)
    rest = (jnp.zeros((), row.dtype),) * (array.ndim - 2)

    def one(lane, array):
        here = jax.lax.dynamic_index_in_dim(value, lane, 0)[:, None]
        at = (lane, jax.lax.dynamic_index_in_dim(row, lane, 0, keepdims=False), *rest)
        return jax.lax.dynamic_update_slice(array, here, at)

    return jax.lax.fori_loop(
        jnp.zeros((), row.dtype), jnp.asarray(len(array), row.dtype), one, array
    )


def lane_first(u: Any) -> Any:
    return jnp.moveaxis(u, -1, 0)
