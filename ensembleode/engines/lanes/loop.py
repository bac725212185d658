"""The time loop of a chunk, in which every lane has its own step size, acceptance, end and return
code."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from ...core.saving import Saving
from ...solvers import verdicts
from ...solvers.controllers import AbstractController
from ...solvers.method import Attempt, equations_of, evaluated_once, Method
from ...solvers.norms import AbstractNorm
from ...solvers.step_size import initial_step, power_of_ten, squared_error, Tolerances
from ...solvers.time import adaptive_step, fixed_step, next_time, size_within, StepBounds
from ...solvers.verdicts import Verdict
from ..compiled.stopping import stopped
from .leaves import first_of, is_finite, LANES, Leaves, OfLanes, over, select
from .stops import arrive, begin, has_jumps, has_own, Stops


# The number of turns after which the flag that stops the loop is read.
_TURNS = 256


class Stepping(NamedTuple):
    """The static properties of the steps. The first `controlled` components of a state, or all,
    tell whether it went wrong."""

    method: Method
    controller: AbstractController | None  # None with a fixed step
    norm: AbstractNorm
    maxiters: int
    controlled: int | None = None

    def is_finite(self, y: Leaves) -> Any:
        return is_finite(first_of(y, self.controlled))

    @property
    def adaptive(self) -> bool:
        return self.controller is not None


class Chunk(NamedTuple):
    """The numbers of the lanes of a chunk.

    - `u0`: the leaves of the initial state.
    - `args`: the inputs of the field besides `(u, t)`.
    - `tol`: the tolerances; None with a fixed step.
    - `dt`: the size of the (first) step; None for an automatic one.
    - `bounds`: the bounds of an adaptive step.
    - `times`: the times to save; None where none are given. Those past the count of a lane are
        infinite, in the direction of time.
    - `mask`: false in the lanes that only fill up the chunk.
    - `stop`: as in a `Lane`.
    - `more`: the other numbers of a `Lane`, by name.
    """

    u0: Leaves
    args: PyTree
    t0: OfLanes
    t1: OfLanes
    tol: Tolerances | None
    dt: OfLanes | None
    bounds: StepBounds
    times: Float[Array, "time"] | Float[Array, "lane time"] | None
    mask: Bool[Array, "lane"]
    stop: Any = None
    more: Any = None


class State(NamedTuple):
    """The variables of the loop.

    Where all lanes share a fixed step, `t` and `h` have no axis.

    - `t`, `y`: the time and the state; `carry`: the method's carry.
    - `h`: the size of the next step, positive.
    - `memory`: the controller's memory, a tuple; None with a fixed step.
    - `code`: the return code; `GOING` where the lane goes on, which is then `active`.
    - `failures`: see `count_failures`; None with a fixed step.
    - `stops`: the position of the lanes among their known times; None without such times.
    - `naccept`, `ntried`: each lane's numbers of steps; `tries`: the number of turns of the chunk.
    """

    tries: Int[Array, ""]
    t: OfLanes
    h: OfLanes
    y: Leaves
    carry: Any
    memory: tuple | None
    code: Int[Array, "lane"]
    failures: Int[Array, "lane"] | None
    naccept: Int[Array, "lane"]
    ntried: Int[Array, "lane"]
    stops: Stops | None = None

    @property
    def active(self) -> Bool[Array, "lane"]:
        return self.code == verdicts.GOING


class Step(NamedTuple):
    """A step that has been tried, from `t` and `y` to `t2`, of the signed size `h`; `accepted` has
    the lanes that took it."""

    t: Any
    t2: Any
    h: Any
    y: Leaves
    attempt: Attempt
    accepted: Any


class Output(NamedTuple):
    """The saved states so far.

    - `u`: the saved states, NaN where not reached, with one additional row at the end; `t`: their
        times, where every step is saved.
    - `row`: the next row to write; `time`: the next time to save, where times are given.
    """

    u: Inexact[Array, "lane row *state"]
    t: Float[Array, "lane row"] | None
    row: Int[Array, ""] | Int[Array, "lane"]
    time: OfLanes | None


def lanes_of(chunk: Chunk) -> int:
    return chunk.u0[0].shape[-1]


def start(stepping: Stepping, field: Callable, chunk: Chunk) -> State:
    """The variables of the loop at `t0`."""
    lanes = lanes_of(chunk)
    dtype = chunk.u0[0].dtype
    y, t0, t1 = chunk.u0, chunk.t0, chunk.t1
    finite, memory = stepping.is_finite(y), None
    carry, h = first_step(stepping, field, chunk, y, t0)
    usable, is_empty = finite, t0 == t1
    if stepping.controller is not None:
        h = chunk.bounds.first(LANES, h, t0, t1 - t0)
        remembered = stepping.controller.initial_memory()
        memory = tuple(jnp.broadcast_to(np.float32(x), (lanes,)) for x in remembered)
        usable = finite & jnp.isfinite(h)
    if stepping.adaptive or h.ndim or t0.ndim or t1.ndim or has_own(chunk.more):
        h, t0, t1 = (jnp.broadcast_to(x, (lanes,)) for x in (h, t0, t1))
    if t0.ndim:
        carry = of_each_lane(carry, lanes)
    none = jnp.zeros(lanes, jnp.int32)
    stops, jumps = begin(chunk.more, t0, t1)
    t = t0
    if stops is not None:
        t, carry = _beyond(stepping, field, chunk, jumps, y, t, carry)
    return State(
        tries=jnp.zeros((), jnp.int32),
        t=t,
        h=h.astype(dtype),
        y=y,
        carry=carry,
        memory=memory,
        code=verdicts.first_code(LANES, chunk.mask, finite, usable, is_empty),
        failures=None if memory is None else none,
        naccept=none,
        ntried=none,
        stops=stops,
    )


def _beyond(
    stepping: Stepping, field: Callable, chunk: Chunk, jumps: Any, y: Leaves, t: Any, carry: Any
) -> tuple[Any, Any]:
    """The time just after `t` and the method's carry from there, in the lanes where `f` jumps; the
    time and the carry as they are in the others."""
    following = next_time(LANES, t, jnp.sign(chunk.t1 - chunk.t0) + jnp.zeros_like(t))
    # The time keeps the derivative of `t`.
    t = t + jax.lax.stop_gradient(jnp.where(jumps, following - t, 0))

    def anew():
        made = stepping.method.init(LANES, equations_of(field), y, t)
        if t.ndim:
            made = of_each_lane(made, lanes_of(chunk))
        return jax.tree.map(lambda a, b: jnp.where(over(jumps, a), a, b), made, carry)

    if not jax.tree.leaves(carry):
        return t, carry
    return t, jax.lax.cond(jnp.any(jumps), anew, lambda: carry)


def of_each_lane(carry: Any, lanes: int) -> Any:
    """The method's carry with each number extended to one for each lane."""
    return jax.tree.map(lambda x: x if x.ndim else jnp.broadcast_to(x, (lanes,)), carry)


def first_step(
    stepping: Stepping, field: Callable, chunk: Chunk, y: Leaves, t: OfLanes
) -> tuple[Any, OfLanes]:
    """The method's carry for a step from the state `y` at `t`, and the size of that step."""
    h: Any = chunk.dt
    field = evaluated_once(field, y, t)
    carry = stepping.method.init(LANES, equations_of(field), y, t)
    if h is None:
        assert chunk.tol is not None  # a fixed step has `dt`
        at = jax.lax.stop_gradient((t, y, field(y, t), chunk.t1 - chunk.t0))
        order, dtmax = stepping.method.order, chunk.bounds.dtmax
        norm = stepping.norm
        h = initial_step(LANES, norm, power_of_ten, field, *at, chunk.tol, order, dtmax)
    # For derivatives, the sizes of steps are constants, except for the last step's.
    return carry, jax.lax.stop_gradient(jnp.abs(h))


def running(state: State) -> Any:
    """Whether any lane goes on."""
    return jnp.any(state.active)


def advance(stepping: Stepping, field: Callable, chunk: Chunk, state: State) -> tuple[State, Step]:
    """Try one step in every active lane: attempt it, judge it, and commit the result."""
    tried = _attempt(stepping, field, chunk, state)
    state, step = _commit(stepping, chunk, state, *_control(stepping, chunk, state, tried))
    if state.stops is None:
        return state, step
    return _go_on(stepping, field, chunk, state, state.stops, step), step


def _go_on(
    stepping: Stepping, field: Callable, chunk: Chunk, state: State, stops: Stops, step: Step
) -> State:
    """The variables in the next stretch of time, for lanes that have come to the end of one."""
    t1 = chunk.t1 + jnp.zeros_like(state.t)
    direction = jnp.sign(chunk.t1 - chunk.t0) + jnp.zeros_like(state.t)
    stepped, here = step.accepted, step.accepted & state.active & (state.t == stops.tstop)
    if not state.t.ndim:
        # All lanes go on together.
        stepped, here = jnp.array(True), state.t == stops.tstop
    stops = stops._replace(anew=stops.anew & ~stepped)
    arrival = state.t, t1, direction, state.tries, here
    stops, jumps = arrive(chunk.more, stops, *arrival)
    t, carry = state.t, state.carry
    if has_jumps(chunk.more):
        t, carry = _beyond(stepping, field, chunk, jumps, state.y, t, carry)
    return state._replace(t=t, carry=carry, stops=stops)


class _Tried(NamedTuple):
    """A step before it is judged. `size` is its nominal size, positive; `h` is its signed size, and
    `t2` its end. `unresolved` has the lanes where time can't resolve the step; None for an adaptive
    step."""

    size: Any
    h: Any
    t2: Any
    attempt: Attempt
    unresolved: Any


def _attempt(stepping: Stepping, field: Callable, chunk: Chunk, state: State) -> _Tried:
    """A step that ends at the latest where the stretch of time does."""
    t, y, active = state.t, state.y, state.active
    tstop, stops = chunk.t1 + jnp.zeros_like(t), state.stops
    anchor, number = chunk.t0, state.tries
    if stops is not None:
        tstop, anchor, number = stops.tstop, stops.anchor, number - stops.tried
    # For derivatives, the sizes of steps are constants, except for the last step's, which moves
    # with its end.
    size = jax.lax.stop_gradient(state.h)
    unresolved = None
    if stepping.adaptive:
        t2 = adaptive_step(LANES, t, tstop, jnp.sign(chunk.t1 - chunk.t0), size)
        size = jnp.minimum(size, jax.lax.stop_gradient(jnp.abs(tstop - t)))
    else:
        # All lanes that go on have taken equally many steps.
        t2, unresolved = fixed_step(LANES, anchor, tstop, t, size, number)
        unresolved = unresolved & (active if t.ndim else jnp.any(active))
        t2 = jnp.where(unresolved, t, t2)
    # The size after the end was rounded; with the size before, the state would be ahead of the time
    # or behind.
    h = t2 - t
    if has_jumps(chunk.more):
        direction = jnp.sign(chunk.t1 - chunk.t0) + jnp.zeros_like(t)
        within = size_within(LANES, *jax.lax.stop_gradient((t, t2, direction)))
        h = h + jax.lax.stop_gradient(within - h)
    if unresolved is not None:
        # The state becomes NaN there, which ends the lane.
        h = jnp.where(unresolved, jnp.nan, h)
    attempt = stepping.method.step(LANES, equations_of(field), y, state.carry, t, h)
    return _Tried(size, h, t2, attempt, unresolved)


def _control(
    stepping: Stepping, chunk: Chunk, state: State, tried: _Tried
) -> tuple[Step, Verdict, Any]:
    """The verdict on the step, and the number of failures."""
    t, y, active = state.t, state.y, state.active
    size, h, t2, attempt, unresolved = tried
    if stepping.controller is None:
        sound, failures = stepping.is_finite(attempt.y2), None
        if attempt.failed is not None:
            sound = sound & ~attempt.failed
        verdict = verdicts.judge_fixed(LANES, sound, unresolved, active, size)
    else:
        assert chunk.tol is not None
        assert state.memory is not None
        # For derivatives of the solution, the sizes of steps are constants.
        at = jax.lax.stop_gradient((attempt, y))
        squared = squared_error(LANES, stepping.norm, chunk.tol, *at)
        tstop = chunk.t1 if state.stops is None else state.stops.tstop
        times = verdicts.Times(t, t2, tstop, chunk.t1 - chunk.t0)
        before, is_first = state.memory, state.naccept == 0
        judged = times, size, squared, before, active, is_first
        verdict = verdicts.judge(LANES, stepping.controller, chunk.bounds, *judged)
        verdict, failures = verdicts.counted(LANES, verdict, state.failures, size, times.span)
        # A rejected step ends where it began.
        t2 = jnp.where(verdict.accepted, t2, t)
    return Step(t, t2, h, y, attempt, verdict.accepted), verdict, failures


def _commit(
    stepping: Stepping, chunk: Chunk, state: State, step: Step, verdict: Verdict, failures: Any
) -> tuple[State, Step]:
    """The variables after a step."""
    accepted, active = step.accepted, state.active
    tries = state.tries + 1
    arrived = accepted & (step.t2 == chunk.t1 + jnp.zeros_like(step.t))
    ended = arrived | verdict.lost | (tries >= stepping.maxiters)
    bounds = chunk.bounds if stepping.adaptive else None
    code = verdicts.code_at_end(LANES, verdict, arrived, bounds)
    t2, y, carry = step.t2, step.attempt.y2, step.attempt.carry
    if step.t.ndim > 0:
        carry = jax.tree.map(lambda a, b: jnp.where(over(accepted, a), a, b), carry, state.carry)
        t2, y = jnp.where(accepted, t2, step.t), select(accepted, y, step.y)
    # With a shared step all lanes end together, and a state that is NaN stays NaN.
    state = state._replace(t=t2, y=y, carry=carry)
    h = verdict.next_h
    if stepping.adaptive:
        h = jnp.where(active, h, state.h)
    state = state._replace(
        tries=tries,
        h=h,
        memory=verdict.memory,
        failures=failures,
        code=jnp.where(active & ended, code, state.code),
        naccept=_count(state.naccept, accepted),
        ntried=_count(state.ntried, active),
    )
    return state, step


def _count(count: Any, here: Any) -> Any:
    return count + here.astype(count.dtype)


#
# Saved states
#


def first_output(
    field: Callable | None, saving: Saving, chunk: Chunk, state: State, join: Callable
) -> Output | None:
    """Arrays for the saved states, with those of the start filled in; `join` puts leaves together.

    `field` is given where the solve is differentiated forwards, possibly with respect to the times
    to save.
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
    """The state at those times that equal the start: `[lane, row or 1, *state]`.

    Its derivative with respect to such a time is the field at the start.
    """
    u0 = u0[:, None]
    if field is None or chunk.times is None:
        return u0
    rate = _lane_first(join(field(chunk.u0, chunk.t0)))[:, None]
    since = chunk.times - (chunk.t0 if chunk.t0.ndim == 0 else chunk.t0[:, None])
    # Zero, but with a derivative.
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
    """Save the states at times within the step just taken."""
    if out.t is not None:
        row = jnp.where(step.accepted, jnp.minimum(out.row, saving.rows), saving.rows)
        u = _write(out.u, row, _lane_first(join(step.attempt.y2)))
        t = _write(out.t, row, step.t2 + jnp.zeros_like(out.t[:, 0]))
        return Output(u, t, _count(out.row, step.accepted), None)
    method = stepping.method
    direction = jnp.sign(chunk.t1 - chunk.t0)

    def due(out):
        reached = direction * (step.t2 - out.time) >= 0
        return reached if out.row.ndim == 0 else reached & step.accepted

    dense = step.attempt.dense

    def more():
        at = step.y, dense, step.t, step.h
        return method.dense(LANES, equations_of(field), *at)[len(dense) :]

    if structs := jax.eval_shape(more):
        # This runs only where something is saved.
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)
        dense = (*dense, *jax.lax.cond(jnp.any(due(out)), more, lambda: nothing))

    def save_one(out):
        now = due(out)
        theta = (out.time - step.t) / step.h
        u = _lane_first(join(method.interpolate(LANES, step.y, dense, step.h, theta)))
        row = out.row if out.row.ndim == 0 else jnp.where(now, out.row, saving.rows)
        next_row = _count(out.row, now)
        return Output(_write(out.u, row, u), None, next_row, _next_time(chunk, next_row))

    return jax.lax.while_loop(lambda out: jnp.any(due(out)), save_one, out)


def _next_time(chunk: Chunk, row: Any) -> Any:
    """The time of a row; infinitely far where there are no more rows."""
    assert chunk.times is not None
    times, rows = chunk.times, chunk.times.shape[-1]
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
        return running(carry[0])

    if chunk.stop is None:
        state, out = jax.lax.while_loop(going, body, (state, out))
        return _conclude(stepping, field, chunk, state), out

    def turns(carry):
        first, _ = carry

        def soon(carry):
            return going(carry) & (carry[0].tries - first[0].tries < _TURNS)

        carry = jax.lax.while_loop(soon, body, first)
        return carry, stopped(chunk.stop, carry[0].tries)

    carry = (state, out), stopped(chunk.stop, state.tries)
    (state, out), _ = jax.lax.while_loop(lambda x: going(x[0]) & ~x[1], turns, carry)
    return _conclude(stepping, field, chunk, state), out


def _conclude(stepping: Stepping, field: Callable, chunk: Chunk, state: State) -> State:
    """The variables with the return codes decided: those of lanes that were stopped while going on,
    and those of lanes that take another turn first to find out."""
    code, tol = jnp.where(state.active, verdicts.STOPPED, state.code), chunk.tol
    if tol is None or not stepping.adaptive:
        return state._replace(code=code)
    finite, probing = stepping.is_finite(state.y), code == verdicts.PROBING
    code = verdicts.code_of_end(LANES, code, finite)

    def probed():
        tried = _attempt(stepping, field, chunk, state._replace(h=verdicts.PROBE * state.h))
        first, abstol = functools.partial(first_of, count=stepping.controlled), tol.abstol
        if isinstance(abstol, tuple):
            abstol = first(abstol)
        of_first = tol._replace(abstol=abstol)
        found = verdicts.code_of_probe(LANES, of_first, first(state.y), first(tried.attempt.y2))
        return jnp.where(probing, found, code)

    return state._replace(code=jax.lax.cond(jnp.any(probing), probed, lambda: code))
