"""Derivatives of saved states with respect to times: `f` along the solution, times the tangents of
the times."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ...ground.devices.alone import alone
from ...plan.events import EVENT_ROWS
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...solvers.arithmetic import ArrayArithmetic
from ...solvers.time import next_time
from ..base.results import numbers_of_each
from .flow import Flow, RecordedSolve
from .rates import rates


def where(mask: Array, x: Any) -> Array:
    """`x` where the mask, which has the first axes of `x`, is true; zero elsewhere."""
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, jnp.zeros_like(x))


def saved_of(flow: Flow) -> int:
    """The number of saved states of each trajectory."""
    saving = flow.plan.saving
    return 1 if saving.mode == "ends" else saving.rows


def sizes_of(flow: Flow) -> list[int]:
    """The numbers of rows of a trajectory: of saved states, and of events if there may be any."""
    slots = flow.plan.event_slots
    return [saved_of(flow), EVENT_ROWS * slots] if slots else [saved_of(flow)]


def without_events(flow: Flow) -> Flow:
    """The flow without rows of events."""
    plan = dataclasses.replace(flow.plan, max_events=0, keeps_end=False)
    return dataclasses.replace(flow, plan=plan)


def is_there(flow: Flow, known: RecordedSolve) -> list:
    """The rows that were reached, in trajectories that succeeded: `[trajectory, row]`."""
    there, plan, ok = [_is_saved(flow, known)], flow.plan, known.ok[:, None]
    if plan.event_slots:
        ended, happened = known.ended, known.happened
        events = [] if ended is None or not plan.keeps_end else [ok & ended[:, None]]
        if happened is not None:
            event = jnp.arange(plan.max_events, dtype=happened.dtype)[None]
            events.append(ok & (event < happened[:, None]))
        there.append(jnp.repeat(jnp.concatenate(events, axis=1), EVENT_ROWS, axis=1))
    return there


def _is_saved(flow: Flow, known: RecordedSolve) -> Array:
    """The rows of saved states that were reached: `[trajectory, row]`."""
    ok, reached = known.ok[:, None], known.reached
    if flow.plan.saving.mode == "ends":
        return ok
    return ok & (jnp.arange(saved_of(flow), dtype=reached.dtype)[None] < reached[:, None])


def times_rate(rate: Array, dt: Array) -> Array:
    """A rate of change multiplied by a tangent of time."""
    return rate * dt.reshape(*dt.shape, *(1,) * (rate.ndim - dt.ndim))


def each_t0(flow: Flow, x: Array) -> Array:
    """`x` with one number for each trajectory, where all may share `t0`."""
    return numbers_of_each(x, flow.plan.batched.t0, flow.n)


def fit_for(ok: Array) -> Callable[..., Any]:
    """`fit(x, is_own)`, which makes numbers fit to compute with for all trajectories: it replaces
    those of trajectories that failed, which may be infinite, by those of one that succeeded. If
    none succeeded, its result depends on nothing that is differentiated."""
    some, any_ = jnp.argmax(ok), jnp.any(ok)

    def fit(x: Array, is_own: bool = True) -> Array:
        # Not differentiated, since zero times an infinite derivative is NaN.
        fixed = jax.lax.stop_gradient(x)
        if not is_own:
            return jnp.where(any_, x, fixed)
        return jnp.where(ok.reshape(-1, *(1,) * (x.ndim - 1)), x, fixed[some][None])

    return fit


def _rates(flow: Flow, lanes: TrajectoryNumbers, ok: Array, u: Array, t: Array) -> Array:
    """`f` at states `[trajectory, time, *state]`; zero for trajectories that failed."""
    safe, own = fit_for(ok), flow.plan.batched
    consts, p = map(safe, lanes.consts, own.consts), map(safe, lanes.p, own.p)
    lanes = lanes._replace(consts=tuple(consts), p=tuple(p))
    return where(ok, alone(functools.partial(rates, flow.plan), lanes, safe(u), safe(t)))


def start_rate(flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve) -> Array:
    """`f` at the initial states; where `f` jumps at `t0`, just after the jump."""
    t0 = _beside(flow, lanes, each_t0(flow, lanes.t0)[:, None], 1)
    return _rates(flow, lanes, known.ok, lanes.u0[:, None], t0)[:, 0]


def _beside(flow: Flow, lanes: TrajectoryNumbers, t: Array, side: ArrayLike) -> Array:
    """The times `[trajectory, time]`, or where `f` may jump their neighbours: the later ones if
    `side` is 1, the earlier ones if it is -1."""
    if lanes.d_discontinuities is None:
        return t
    t1 = numbers_of_each(lanes.t1, flow.plan.batched.t1, flow.n)
    direction = jnp.where(t1 < each_t0(flow, lanes.t0), -1, 1).astype(t.dtype)[:, None]
    fixed = jax.lax.stop_gradient(t)
    return t + jax.lax.stop_gradient(next_time(ArrayArithmetic(jnp), fixed, side * direction) - t)


def _which_end(flow: Flow, known: RecordedSolve) -> tuple[Array, Array]:
    """The row of each trajectory that is at `t1`, and whether there is such a row."""
    saving, reached = flow.plan.saving, known.reached
    arrived = jnp.ones_like(reached, bool) if known.ended is None else ~known.ended
    if saving.mode == "ends":
        return jnp.zeros_like(reached), arrived
    return jnp.clip(reached - 1, 0, saving.rows - 1), arrived & (reached > int(saving.start))


def moving_times(flow: Flow, dlanes: TrajectoryNumbers) -> Any:
    """The tangent of the times of saved states, or a symbolic Zero."""
    return dlanes.saveat if flow.plan.saving.mode == "times" else dlanes.t1


def row_rates(flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, rows: Array) -> Array:
    """`f` at those saved states whose times may move, `[trajectory, time, *state]`; where `f` jumps
    at such a time, just before the jump, except at the start. Zero where a state wasn't reached."""
    plan, n, ok = flow.plan, flow.n, known.ok
    if plan.saving.mode == "times":
        there, t = _is_saved(flow, known), numbers_of_each(lanes.saveat, plan.batched.saveat, n)
    else:
        row, is_end = _which_end(flow, known)
        rows = jnp.take_along_axis(rows, row.reshape(n, *(1,) * (rows.ndim - 1)), 1)
        there, t = (ok & is_end)[:, None], numbers_of_each(lanes.t1, plan.batched.t1, n)[:, None]
    # A row that is not reached has no state, and its time may be infinite.
    t0 = each_t0(flow, lanes.t0)[:, None]
    t = jnp.where(there, t, t0)
    t = _beside(flow, lanes, t, jnp.where(t == t0, 1, -1).astype(t.dtype))
    mask = there.reshape(*there.shape, *(1,) * (rows.ndim - 2))
    safe = jnp.where(mask, rows, lanes.u0[:, None])
    return where(there, _rates(flow, lanes, ok, safe, t))


def at_times(flow: Flow, dtimes: Array) -> Array:
    """Tangents of times as `[trajectory, time]`, for the times of `row_rates`."""
    batched, n = flow.plan.batched, flow.n
    if flow.plan.saving.mode == "times":
        return numbers_of_each(dtimes, batched.saveat, n)
    return numbers_of_each(dtimes, batched.t1, n)[:, None]


def to_rows(flow: Flow, known: RecordedSolve, x: Array) -> Array:
    """An array over the times of `row_rates`, extended to all saved rows by zeros."""
    if flow.plan.saving.mode != "steps":
        return x
    row, _ = _which_end(flow, known)
    is_end = jnp.arange(saved_of(flow), dtype=row.dtype)[None] == row[:, None]
    return where(is_end, jnp.broadcast_to(x, (flow.n, saved_of(flow), *x.shape[2:])))


def from_rows(flow: Flow, known: RecordedSolve, c: Array) -> Array:
    """The transpose of `to_rows`: from all saved rows to the times of `row_rates`."""
    if flow.plan.saving.mode != "steps":
        return c
    row, _ = _which_end(flow, known)
    return jnp.take_along_axis(c, row.reshape(-1, *(1,) * (c.ndim - 1)), 1)
