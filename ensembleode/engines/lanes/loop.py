"""The time loop of a chunk, in which every lane has its own step size, acceptance, end and return
code.

The numbers of a chunk are a `Lane` (see `chunks.chunk_of`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ...core.lane import Lane
from ...core.plan import Plan
from ...solvers import verdicts
from ...solvers.method import Attempt, equations_of, evaluated_once
from ...solvers.norms import AbstractNorm
from ...solvers.step_size import initial_step, power_of_ten, squared_error, Tolerances
from ...solvers.time import adaptive_step, fixed_step, next_time, size_before, StepBounds
from ...solvers.verdicts import Verdict
from .leaves import first_of, is_finite, LANES, Leaves, OfLanes, over, select
from .stops import arrive, begin, has_jumps, has_own, may_jump, Stops


class _OfFirst(AbstractNorm):
    """The norm of the first `count` components."""

    norm: AbstractNorm
    count: int

    def __call__(self, xp: Any, values: Leaves) -> Any:
        return self.norm(xp, first_of(values, self.count))

    def squared(self, xp: Any, values: Leaves) -> Any:
        return self.norm.squared(xp, first_of(values, self.count))


def _norm_of(plan: Plan) -> AbstractNorm:
    """The norm by which steps are controlled."""
    norm = plan.method.value.norm
    if plan.controlled < math.prod(plan.state.shape):
        return _OfFirst(norm, plan.controlled)
    return norm


def _are_finite(plan: Plan, y: Leaves) -> Any:
    """The lanes whose state is finite, in the components that step-size control looks at."""
    return is_finite(first_of(y, plan.controlled))


def _bounds_of(chunk: Lane) -> StepBounds:
    return StepBounds(chunk.dtmin, chunk.dtmax)


def _tolerances_of(chunk: Lane) -> Tolerances:
    return Tolerances(chunk.abstol, chunk.reltol)


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
    code: Int[Array, " lane"]
    failures: Int[Array, " lane"] | None
    naccept: Int[Array, " lane"]
    ntried: Int[Array, " lane"]
    stops: Stops | None = None

    @property
    def active(self) -> Bool[Array, " lane"]:
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


def lanes_of(chunk: Lane) -> int:
    return chunk.u0[0].shape[-1]


def start(plan: Plan, field: Callable, chunk: Lane, mask: Bool[Array, " lane"]) -> State:
    """The variables of the loop at `t0`; lanes that are not in the mask only fill up the chunk."""
    lanes = lanes_of(chunk)
    dtype = chunk.u0[0].dtype
    y, t0, t1 = chunk.u0, chunk.t0, chunk.t1
    controller, finite, memory = plan.method.value.controller, _are_finite(plan, y), None
    carry, h = first_step(plan, field, chunk, y, t0)
    usable, is_empty = finite, t0 == t1
    if controller is not None:
        h = _bounds_of(chunk).first(LANES, h, t0, t1 - t0)
        remembered = controller.initial_memory()
        memory = tuple(jnp.broadcast_to(np.float32(x), (lanes,)) for x in remembered)
        usable = finite & jnp.isfinite(h)
    if controller is not None or h.ndim or t0.ndim or t1.ndim or has_own(chunk):
        h, t0, t1 = (jnp.broadcast_to(x, (lanes,)) for x in (h, t0, t1))
    if t0.ndim:
        carry = of_each_lane(carry, lanes)
    none = jnp.zeros(lanes, jnp.int32)
    stops, jumps = begin(chunk, t0, t1)
    t = t0
    if stops is not None:
        t, carry = _beyond(plan, field, chunk, jumps, y, t, carry)
    return State(
        tries=jnp.zeros((), jnp.int32),
        t=t,
        h=h.astype(dtype),
        y=y,
        carry=carry,
        memory=memory,
        code=verdicts.first_code(LANES, mask, finite, usable, is_empty),
        failures=None if memory is None else none,
        naccept=none,
        ntried=none,
        stops=stops,
    )


def _beyond(
    plan: Plan, field: Callable, chunk: Lane, jumps: Any, y: Leaves, t: Any, carry: Any
) -> tuple[Any, Any]:
    """The time just after `t` and the method's carry from there, in the lanes where `f` jumps; the
    time and the carry as they are in the others."""
    following = next_time(LANES, t, jnp.sign(chunk.t1 - chunk.t0) + jnp.zeros_like(t))
    # The time keeps the derivative of `t`.
    t = t + jax.lax.stop_gradient(jnp.where(jumps, following - t, 0))

    def anew():
        made = plan.method.value.method.init(LANES, equations_of(field), y, t)
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
    plan: Plan, field: Callable, chunk: Lane, y: Leaves, t: OfLanes
) -> tuple[Any, OfLanes]:
    """The method's carry for a step from the state `y` at `t`, and the size of that step."""
    h: Any = chunk.dt
    field = evaluated_once(field, y, t)
    carry = plan.method.value.method.init(LANES, equations_of(field), y, t)
    if h is None:
        # A fixed step always has a `dt`.
        at = jax.lax.stop_gradient((t, y, field(y, t), chunk.t1 - chunk.t0))
        norm, tol = _norm_of(plan), _tolerances_of(chunk)
        order = plan.method.value.method.order
        h = initial_step(LANES, norm, power_of_ten, field, *at, tol, order, chunk.dtmax)
    # For derivatives, the sizes of steps are constants, except for the last step's.
    return carry, jax.lax.stop_gradient(jnp.abs(h))


def running(state: State) -> Any:
    """Whether any lane goes on."""
    return jnp.any(state.active)


def advance(plan: Plan, field: Callable, chunk: Lane, state: State) -> tuple[State, Step]:
    """Try one step in every active lane: attempt it, judge it, and commit the result."""
    tried = attempt(plan, field, chunk, state)
    return decide(plan, field, chunk, state, tried, _quality(plan, chunk, state, tried.attempt))


def decide(
    plan: Plan, field: Callable, chunk: Lane, state: State, tried: "Tried", quality: Any
) -> tuple[State, Step]:
    """Judge a step that was tried, and commit the result.

    **Arguments:** `quality`: for an adaptive step the square of the norm of its scaled error, for a
    fixed step whether it is sound.
    """
    state, step = _commit(plan, chunk, state, *_control(plan, chunk, state, tried, quality))
    if state.stops is None:
        return state, step
    return _go_on(plan, field, chunk, state, state.stops, step), step


def _go_on(
    plan: Plan, field: Callable, chunk: Lane, state: State, stops: Stops, step: Step
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
    stops, jumps = arrive(chunk, stops, *arrival)
    t, carry = state.t, state.carry
    if has_jumps(chunk):
        t, carry = _beyond(plan, field, chunk, jumps, state.y, t, carry)
    return state._replace(t=t, carry=carry, stops=stops)


class Tried(NamedTuple):
    """A step before it is judged. `size` is its nominal size, positive; `h` is its signed size, and
    `t2` its end. `unresolved` has the lanes where time can't resolve the step; None for an adaptive
    step."""

    size: Any
    h: Any
    t2: Any
    attempt: Attempt
    unresolved: Any


def attempt(plan: Plan, field: Callable, chunk: Lane, state: State) -> "Tried":
    """A step of the method."""
    equations, method = equations_of(field), plan.method.value.method

    def step(t2: Any, h: Any) -> Attempt:
        del t2
        return method.step(LANES, equations, state.y, state.carry, state.t, h)

    return attempt_with(plan, chunk, state, step)


def attempt_with(
    plan: Plan, chunk: Lane, state: State, step: Callable[[Any, Any], Attempt]
) -> "Tried":
    """A step that ends at the latest where the stretch of time does.

    **Arguments:** `step(t2, h)`: attempts it up to `t2`, with the signed size `h`.
    """
    t, active = state.t, state.active
    tstop, stops = chunk.t1 + jnp.zeros_like(t), state.stops
    anchor, number = chunk.t0, state.tries
    if stops is not None:
        tstop, anchor, number = stops.tstop, stops.anchor, number - stops.tried
    # For derivatives, the sizes of steps are constants, except for the last step's, which moves
    # with its end.
    size = jax.lax.stop_gradient(state.h)
    unresolved = None
    if plan.method.value.adaptive:
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
    if has_jumps(chunk):
        direction = jnp.sign(chunk.t1 - chunk.t0) + jnp.zeros_like(t)
        jumps = may_jump(chunk, t2.reshape(-1)).reshape(t2.shape)
        within = size_before(LANES, *jax.lax.stop_gradient((t, t2, jumps, direction)))
        h = h + jax.lax.stop_gradient(within - h)
    if unresolved is not None:
        # The state becomes NaN there, which ends the lane.
        h = jnp.where(unresolved, jnp.nan, h)
    return Tried(size, h, t2, step(t2, h), unresolved)


def _quality(plan: Plan, chunk: Lane, state: State, attempt: Attempt) -> Any:
    """What decides on a step: see `decide`."""
    if plan.method.value.adaptive:
        # For derivatives of the solution, the sizes of steps are constants.
        at = jax.lax.stop_gradient((attempt, state.y))
        return squared_error(LANES, _norm_of(plan), _tolerances_of(chunk), *at)
    sound = _are_finite(plan, attempt.y2)
    return sound if attempt.failed is None else sound & ~attempt.failed


def _control(
    plan: Plan, chunk: Lane, state: State, tried: Tried, quality: Any
) -> tuple[Step, Verdict, Any]:
    """The verdict on the step, and the number of failures."""
    t, y, active = state.t, state.y, state.active
    size, h, t2, attempt, unresolved = tried
    controller = plan.method.value.controller
    if controller is None:
        failures = None
        verdict = verdicts.judge_fixed(LANES, quality, unresolved, active, size)
    else:
        assert state.memory is not None
        tstop = chunk.t1 if state.stops is None else state.stops.tstop
        times = verdicts.Times(t, t2, tstop, chunk.t1 - chunk.t0)
        before, is_first = state.memory, state.naccept == 0
        bounds = _bounds_of(chunk)
        verdict = verdicts.judge(
            LANES, controller, bounds, times, size, quality, before, active, is_first
        )
        verdict, failures = verdicts.counted(LANES, verdict, state.failures, size, times.span)
        # A rejected step ends where it began.
        t2 = jnp.where(verdict.accepted, t2, t)
    return Step(t, t2, h, y, attempt, verdict.accepted), verdict, failures


def _commit(
    plan: Plan, chunk: Lane, state: State, step: Step, verdict: Verdict, failures: Any
) -> tuple[State, Step]:
    """The variables after a step."""
    accepted, active = step.accepted, state.active
    tries = state.tries + 1
    arrived = accepted & (step.t2 == chunk.t1 + jnp.zeros_like(step.t))
    ended = arrived | verdict.lost | (tries >= plan.maxiters)
    adaptive = plan.method.value.adaptive
    bounds = _bounds_of(chunk) if adaptive else None
    code = verdicts.code_at_end(LANES, verdict, arrived, bounds)
    t2, y, carry = step.t2, step.attempt.y2, step.attempt.carry
    if step.t.ndim > 0:
        carry = jax.tree.map(lambda a, b: jnp.where(over(accepted, a), a, b), carry, state.carry)
        t2, y = jnp.where(accepted, t2, step.t), select(accepted, y, step.y)
    # With a shared step all lanes end together, and a state that is NaN stays NaN.
    state = state._replace(t=t2, y=y, carry=carry)
    h = verdict.next_h
    if adaptive:
        h = jnp.where(active, h, state.h)
    state = state._replace(
        tries=tries,
        h=h,
        memory=verdict.memory,
        failures=failures,
        code=jnp.where(active & ended, code, state.code),
        naccept=counted(state.naccept, accepted),
        ntried=counted(state.ntried, active),
    )
    return state, step


def counted(count: Any, here: Any) -> Any:
    return count + here.astype(count.dtype)


def conclude(plan: Plan, chunk: Lane, state: State, probe: Callable[[State], Tried]) -> State:
    """The variables with the return codes decided: those of lanes that were stopped while going on,
    and those of lanes that take another turn first to find out.

    **Arguments:** `probe`: tries the step of such a turn.
    """
    code, tol = jnp.where(state.active, verdicts.STOPPED, state.code), _tolerances_of(chunk)
    if not plan.method.value.adaptive:
        return state._replace(code=code)
    finite, probing = _are_finite(plan, state.y), code == verdicts.PROBING
    code = verdicts.code_of_end(LANES, code, finite)

    def probed():
        tried = probe(state._replace(h=verdicts.PROBE * state.h))
        first, abstol = functools.partial(first_of, count=plan.controlled), tol.abstol
        if isinstance(abstol, tuple):
            abstol = first(abstol)
        of_first = tol._replace(abstol=abstol)
        found = verdicts.code_of_probe(LANES, of_first, first(state.y), first(tried.attempt.y2))
        return jnp.where(probing, found, code)

    return state._replace(code=jax.lax.cond(jnp.any(probing), probed, lambda: code))
