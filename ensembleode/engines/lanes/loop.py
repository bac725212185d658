"""The time loop of a chunk: every lane with its own step size, acceptance, end and return code."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from ...core.retcode import ReturnCode
from ...core.saving import Saving
from ...solvers.controllers import AbstractController
from ...solvers.norms import AbstractNorm
from ...solvers.runge_kutta import Attempt, RungeKutta
from ...solvers.step_size import (
    count_failures,
    initial_step,
    is_moved,
    MOST_FAILURES,
    squared_error,
    Tolerances,
)
from ...solvers.time import adaptive_step, fixed_step, min_step, StepBounds, underflows
from ..compiled.stopping import stopped
from .leaves import computed_once, is_finite, LANES, Leaves, OfLanes, over, select, sum_of


# Turns between two looks at whether the loop is to stop.
_TURNS = 256


class Stepping(NamedTuple):
    """What is fixed about the steps: static."""

    method: RungeKutta
    controller: AbstractController | None  # None with a fixed step
    norm: AbstractNorm
    maxiters: int

    @property
    def adaptive(self) -> bool:
        return self.controller is not None


class Chunk(NamedTuple):
    """The numbers of the lanes of a chunk.

    - `u0`: leaves of the state.
    - `args`: what the field wants besides `(u, t)`.
    - `tol`: None with a fixed step.
    - `dt`: the size of the (first) step; None for an automatic one.
    - `bounds`: of an adaptive step.
    - `times`: the times to save; None where there are none. Those past the count of a lane are
        infinite, in the direction of time.
    - `mask`: false in the lanes that only fill up the chunk.
    - `stop`: as in a `Lane`.
    - `more`: the other numbers of a `Lane`, by name.
    """

    u0: Leaves
    args: PyTree
    t0: OfLanes
    t1: OfLanes
    tol: Tolerances | Any
    dt: OfLanes | Any
    bounds: StepBounds
    times: Float[Array, "time"] | Float[Array, "lane time"] | Any
    mask: Bool[Array, "lane"]
    stop: Any = None
    more: Any = None


class State(NamedTuple):
    """Where the lanes are.

    (Where all lanes share a fixed step, `t` and `h` have no axis.)

    - `t`, `y`: the time and the state; `k`: the field there, where the last step has computed it.
    - `h`: the size of the next step, positive; a fixed step that time can't resolve becomes zero.
    - `memory`: what the controller remembers, a tuple; None with a fixed step.
    - `active`: whether the lane goes on.
    - `failures`: see `count_failures`, and all there may be where time can't resolve a step after
        one that was infinite or NaN; None with a fixed step.
    - `naccept`, `ntried`: counts of steps; `tries`: those of the chunk.
    """

    tries: Int[Array, ""]
    t: OfLanes
    h: OfLanes
    y: Leaves
    k: Leaves | None
    memory: tuple | Any
    active: Bool[Array, "lane"]
    failures: Int[Array, "lane"] | Any
    naccept: Int[Array, "lane"]
    ntried: Int[Array, "lane"]


class Step(NamedTuple):
    """A step that has been tried, from `t` and `y` to `t2`, of the signed size `h`, with the
    derivatives `ks` at its stages; `accepted` is true in the lanes that took it."""

    t: Any
    t2: Any
    h: Any
    y: Leaves
    y2: Leaves
    ks: tuple
    accepted: Any


class Output(NamedTuple):
    """What is saved on the way.

    - `u`: the saved states, NaN where not reached, with a row past the end; `t`: the times, where
        every step is saved.
    - `row`: the next row to write; `time`: the next time to save, where times are given.
    """

    u: Inexact[Array, "lane row *state"]
    t: Float[Array, "lane row"] | Any
    row: Int[Array, ""] | Int[Array, "lane"]
    time: OfLanes | Any


def lanes_of(chunk: Chunk) -> int:
    return chunk.u0[0].shape[-1]


def start(stepping: Stepping, field: Callable, chunk: Chunk) -> State:
    """The state of the loop at `t0`."""
    lanes = lanes_of(chunk)
    dtype = chunk.u0[0].dtype
    y, t0, t1 = chunk.u0, chunk.t0, chunk.t1
    active = chunk.mask & is_finite(y)
    k: Any = None
    memory: Any = None
    h: Any = chunk.dt
    if stepping.method.keeps or h is None:
        k = field(y, t0)
    if h is None:
        at = jax.lax.stop_gradient((t0, y, k, t1 - t0))
        order, dtmax = stepping.method.order, chunk.bounds.dtmax
        norm = stepping.norm
        h = initial_step(LANES, norm, _power_of_ten, field, *at, chunk.tol, order, dtmax)
    # Steps are constants to whoever differentiates, but for the last.
    h = jax.lax.stop_gradient(jnp.abs(h))
    if stepping.controller is not None:
        h = chunk.bounds.bounded(LANES, h)
        # Steps that time can't resolve would teach the controller nothing.
        h = jnp.maximum(h, 2 * jax.lax.stop_gradient(min_step(LANES, t0, t1 - t0)))
        remembered = stepping.controller.initial_memory()
        memory = tuple(jnp.broadcast_to(np.float32(x), (lanes,)) for x in remembered)
        h, t0, t1 = (jnp.broadcast_to(x, (lanes,)) for x in (h, t0, t1))
        active = active & jnp.isfinite(h)
    elif h.ndim or t0.ndim or t1.ndim:
        h, t0, t1 = (jnp.broadcast_to(x, (lanes,)) for x in (h, t0, t1))
    none = jnp.zeros(lanes, jnp.int32)
    return State(
        tries=jnp.zeros((), jnp.int32),
        t=t0,
        h=h.astype(dtype),
        y=y,
        k=k if stepping.method.keeps else None,
        memory=memory,
        active=active & (t0 != t1),
        failures=None if memory is None else none,
        naccept=none,
        ntried=none,
    )


def running(stepping: Stepping, state: State) -> Any:
    """Whether any lane goes on."""
    return jnp.any(state.active) & (state.tries < stepping.maxiters)


def advance(stepping: Stepping, field: Callable, chunk: Chunk, state: State) -> tuple[State, Step]:
    """Try one step in every lane that is active: attempt, control, commit."""
    tried = _attempt(stepping, field, chunk, state)
    return _commit(stepping, chunk, state, *_control(stepping, chunk, state, tried))


class _Tried(NamedTuple):
    """A step before it is judged: `size` is what it was to be, positive; of a fixed step zero where
    time can't resolve it. `h` is its signed size, `t2` its end."""

    size: Any
    h: Any
    t2: Any
    attempt: Attempt


class _Controlled(NamedTuple):
    """Of a step that is judged: the size of the `next_h`, the controller's `memory`, which lanes
    are `lost`, as time can't resolve the next step or nothing but failures comes of it, and the
    count of `failures`; None with a fixed step."""

    next_h: Any
    memory: Any
    lost: Any
    failures: Any


def _attempt(stepping: Stepping, field: Callable, chunk: Chunk, state: State) -> _Tried:
    """A step, as long as time has it."""
    t, y, active = state.t, state.y, state.active
    t1 = chunk.t1 + jnp.zeros_like(t)
    direction = jnp.sign(chunk.t1 - chunk.t0)
    # Steps are constants to whoever differentiates, but for the last, which moves with its end.
    size = jax.lax.stop_gradient(state.h)
    unresolved = None
    if stepping.adaptive:
        t2 = adaptive_step(LANES, t, t1, direction, size)
        size = jnp.minimum(size, jax.lax.stop_gradient(jnp.abs(t1 - t)))
    else:
        # All lanes that go on have taken as many steps.
        t2, unresolved = fixed_step(LANES, chunk.t0, t1, t, size, state.tries)
        unresolved = unresolved & (active if t.ndim else jnp.any(active))
        t2 = jnp.where(unresolved, t, t2)
        size = jnp.where(unresolved, jnp.zeros_like(size), size)
    # As time has it after rounding: otherwise the state would be ahead of it, or behind.
    h = t2 - t
    if unresolved is not None:
        # The state becomes NaN, and the lane ends.
        h = jnp.where(unresolved, jnp.nan, h)
    return _Tried(size, h, t2, stepping.method.step(LANES, field, y, state.k, t, h))


def _control(
    stepping: Stepping, chunk: Chunk, state: State, tried: _Tried
) -> tuple[Step, _Controlled]:
    """Whether the step is accepted, and the next one."""
    t, y, active = state.t, state.y, state.active
    size, h, t2, attempt = tried
    if stepping.controller is None:
        accepted = is_finite(attempt.y2) & active
        return Step(t, t2, h, y, *attempt, accepted), _Controlled(size, state.memory, None, None)
    # The steps are constants to whoever differentiates the solution.
    at = jax.lax.stop_gradient((attempt, h, y))
    squared = squared_error(LANES, stepping.method, stepping.norm, chunk.tol, *at)
    squared = computed_once(squared)
    accepted = stepping.controller.accepts(LANES, squared, state.memory) & active
    first = state.naccept == 0
    next_h, memory = computed_once(
        stepping.controller.next_step(LANES, size, squared, state.memory, accepted, first)
    )
    t2 = jnp.where(accepted, t2, t)
    # If so the lane is lost (`retcodes` says how).
    span = chunk.t1 - chunk.t0
    lost = underflows(LANES, chunk.bounds, next_h, t2, chunk.t1, span, accepted)
    next_h = jnp.where(active, chunk.bounds.bounded(LANES, next_h), state.h)
    failed = active & ~(squared < jnp.inf)
    failures = count_failures(LANES, state.failures, failed, size, span)
    failures = jnp.where(lost & failed, MOST_FAILURES, failures)
    controlled = _Controlled(next_h, memory, lost | (failures >= MOST_FAILURES), failures)
    return Step(t, t2, h, y, *attempt, accepted), controlled


def _commit(
    stepping: Stepping, chunk: Chunk, state: State, step: Step, controlled: _Controlled
) -> tuple[State, Step]:
    """The state after a step."""
    t, t2, accepted, active = step.t, step.t2, step.accepted, state.active
    next_h, memory, lost, failures = controlled
    ends = t2 == chunk.t1 + jnp.zeros_like(t)
    going = accepted & ~ends
    if lost is not None:
        going = active & ~(ends | lost)
    k = state.k
    if k is not None:
        k = stepping.method.kept(Attempt(step.y2, step.ks))
    if t.ndim > 0:
        if k is not None and state.k is not None:
            k = select(accepted, k, state.k)
        y = select(accepted, step.y2, step.y)
        state = state._replace(t=jnp.where(accepted, t2, t), y=y, k=k)
    else:
        # All lanes end together, and what is NaN stays NaN.
        state = state._replace(t=t2, y=step.y2, k=k)
    state = state._replace(
        tries=state.tries + 1,
        h=next_h,
        memory=memory,
        active=going,
        failures=failures,
        naccept=_count(state.naccept, accepted),
        ntried=_count(state.ntried, active),
    )
    return state, step


def _power_of_ten(x: Any, order: int) -> Any:
    return 10.0 ** (-(2.0 + jnp.log10(x)) / order)


def _count(count: Any, here: Any) -> Any:
    return count + here.astype(count.dtype)


#
# Output
#


def first_output(
    field: Callable | None, saving: Saving, chunk: Chunk, state: State, join: Callable
) -> Output | None:
    """Room for what is saved, with what is saved at the start; `join` puts leaves together.

    `field` is given where this is differentiated forwards, by the times to save, perhaps.
    """
    if saving.mode == "ends":
        return None
    u0 = _lane_first(join(chunk.u0))
    lanes, rows = len(u0), saving.rows
    u = jnp.full((lanes, rows + 1, *u0.shape[1:]), jnp.nan, u0.dtype)
    if saving.mode == "steps":
        t = jnp.full((lanes, rows + 1), jnp.nan, state.t.dtype)
        if saving.start:
            u, t = u.at[:, 0].set(u0), t.at[:, 0].set(chunk.t0)
        return Output(u, t, jnp.full(lanes, saving.start, jnp.int32), None)
    times = chunk.times
    at_start = times == (chunk.t0 if chunk.t0.ndim == 0 else chunk.t0[:, None])
    row = jnp.sum(at_start, axis=-1, dtype=jnp.int32)
    at_start = at_start.reshape(-1, rows, *(1,) * (u0.ndim - 1))
    u = u.at[:, :rows].set(jnp.where(at_start, _at_start(field, chunk, u0, join), u[:, :rows]))
    if state.t.ndim and row.ndim == 0:
        row = jnp.broadcast_to(row, (lanes,))
    return Output(u, None, row, _next_time(chunk, row))


def _at_start(field: Callable | None, chunk: Chunk, u0: Any, join: Callable) -> Any:
    """The state at times that are those of the start: `[lane, row or 1, *state]`.

    Its derivative by such a time is the field there.
    """
    u0 = u0[:, None]
    if field is None:
        return u0
    rate = _lane_first(join(field(chunk.u0, chunk.t0)))[:, None]
    since = chunk.times - (chunk.t0 if chunk.t0.ndim == 0 else chunk.t0[:, None])
    # Nothing, but for its derivative.
    since = since - jax.lax.stop_gradient(since)
    since = since.reshape(-1, since.shape[-1], *(1,) * (u0.ndim - 2))
    return u0 + since * jnp.where(jnp.isfinite(rate), rate, 0)


def save(
    stepping: Stepping,
    field: Callable,
    saving: Saving,
    chunk: Chunk,
    step: Step,
    out: Output,
    join: Callable,
) -> Output:
    """Save what lies in the step just taken."""
    if saving.mode == "steps":
        row = jnp.where(step.accepted, jnp.minimum(out.row, saving.rows), saving.rows)
        u = _write(out.u, row, _lane_first(join(step.y2)))
        t = _write(out.t, row, step.t2 + jnp.zeros_like(out.t[:, 0]))
        return Output(u, t, _count(out.row, step.accepted), None)
    method = stepping.method
    direction = jnp.sign(chunk.t1 - chunk.t0)

    def due(out):
        reached = direction * (step.t2 - out.time) >= 0
        return reached if out.row.ndim == 0 else reached & step.accepted

    ks = step.ks

    def extra_stages():
        attempt = Attempt(step.y2, step.ks)
        return method.dense(LANES, field, step.y, attempt, step.t, step.h)[len(step.ks) :]

    if method.has_extra_stages:
        # Only where something is saved.
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(extra_stages))
        ks = (*ks, *jax.lax.cond(jnp.any(due(out)), extra_stages, lambda: nothing))

    def save_one(out):
        now = due(out)
        theta = (out.time - step.t) / step.h
        u = _lane_first(join(method.interpolate(LANES, step.y, ks, step.h, theta)))
        row = out.row if out.row.ndim == 0 else jnp.where(now, out.row, saving.rows)
        next_row = _count(out.row, now)
        return Output(_write(out.u, row, u), None, next_row, _next_time(chunk, next_row))

    return jax.lax.while_loop(lambda out: jnp.any(due(out)), save_one, out)


def _next_time(chunk: Chunk, row: Any) -> Any:
    """The time of the row, infinitely far where there are no more."""
    times, rows = chunk.times, chunk.times.shape[-1]
    if times.ndim == 1:
        time = times.at[row].get(mode="clip")
    else:
        time = jnp.take_along_axis(times, jnp.minimum(row, rows - 1)[:, None], axis=1)[:, 0]
    return jnp.where(row < rows, time, jnp.sign(chunk.t1 - chunk.t0) * jnp.inf)


def _write(array: Any, row: Any, value: Any) -> Any:
    """Set row `row` of each lane; the row past the end is there for what is not wanted.

    (Lane by lane: XLA's CPU compiler turns a loop over time into one function, many times as fast,
    unless there is a scatter in it.)
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


def _lane_first(u: Any) -> Any:
    return jnp.moveaxis(u, -1, 0)


#
# From start to end
#


def solve_chunk(
    stepping: Stepping,
    field: Callable,
    saving: Saving,
    chunk: Chunk,
    join: Callable,
    *,
    forward_mode: bool,
) -> tuple[State, Output | None]:
    """Integrate all lanes of the chunk to their ends."""
    state = start(stepping, field, chunk)
    out = first_output(field if forward_mode else None, saving, chunk, state, join)

    def body(carry):
        state, out = carry
        state, step = advance(stepping, field, chunk, state)
        return state, out if out is None else save(stepping, field, saving, chunk, step, out, join)

    def going(carry):
        return running(stepping, carry[0])

    if chunk.stop is None:
        return jax.lax.while_loop(going, body, (state, out))

    def turns(carry):
        carry, _ = carry
        most = jnp.minimum(stepping.maxiters - _TURNS, carry[0].tries) + _TURNS
        carry = jax.lax.while_loop(lambda x: going(x) & (x[0].tries < most), body, carry)
        return carry, stopped(chunk.stop, carry[0].tries)

    carry = (state, out), stopped(chunk.stop, state.tries)
    return jax.lax.while_loop(lambda x: going(x[0]) & ~x[1], turns, carry)[0]


def retcodes(stepping: Stepping, field: Callable, chunk: Chunk, state: State) -> Any:
    """The return codes: [lane]."""
    arrived = (state.t == chunk.t1) & is_finite(state.y)

    def code(value):
        return jnp.asarray(value.value, jnp.int8)

    failed = code(ReturnCode.Unstable)
    if not stepping.adaptive:
        failed = jnp.where(state.h == 0, code(ReturnCode.DtLessThanMin), failed)
    else:
        lost = ~(arrived | state.active)
        calm = jax.lax.cond(
            jnp.any(lost),
            lambda: _is_calm(stepping, field, chunk, state),
            lambda: jnp.zeros_like(lost),
        )
        calm = calm & (state.failures < MOST_FAILURES)
        if chunk.bounds.dtmin is not None:
            calm = calm | (lost & (state.h <= chunk.bounds.dtmin))
        failed = jnp.where(calm, code(ReturnCode.DtLessThanMin), failed)
    # (Where steps are left, it was stopped.)
    ran_out = state.tries >= stepping.maxiters
    unfinished = jnp.where(ran_out, code(ReturnCode.MaxIters), code(ReturnCode.Default))
    failed = jnp.where(state.active, unfinished, failed)
    return jnp.where(arrived, code(ReturnCode.Success), failed)


def _is_calm(stepping: Stepping, field: Callable, chunk: Chunk, state: State) -> Any:
    """Whether a step too short for time to feel it leaves the state as good as unchanged.

    If so, the tolerances can't be met; if not, the solution diverges.
    """
    # A step that failed for being infinite or NaN was that much longer.
    state = state._replace(active=jnp.ones_like(state.active), h=5 * state.h)
    _, tried = advance(stepping, field, chunk, state)
    abstol = chunk.tol.abstol

    def moved(i, a, b):
        at = abstol[i] if isinstance(abstol, tuple) else abstol
        return is_moved(over(at, a), a, b)

    moves = tuple(
        moved(i, a, b).astype(a.dtype)
        for i, (a, b) in enumerate(zip(state.y, tried.y2, strict=True))
    )
    return (sum_of(lambda x: x, moves) == 0) & jnp.isfinite(state.h)
