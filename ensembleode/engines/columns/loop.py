"""The decisions of a time loop whose state is one matrix: step sizes, acceptance, and the end."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...plan.plan import Plan
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...solvers import verdicts
from ...solvers.arithmetic import ARRAYS
from ...solvers.method import equations_of, evaluated_once
from ...solvers.step_size import initial_step, power_of_ten, Tolerances
from ...solvers.time import adaptive_step, fixed_step, next_time, size_before, StepBounds
from ..compiled.xla.stopping import stopped
from . import tuning
from .stops import arrive, begin, ColumnStops, may_jump


class ColumnState(NamedTuple):
    """The variables of the loop. `h` is the size of the next step, positive; `code` is `GOING` as
    long as the loop goes on. A variable that a fixed step, or a solve without known times, doesn't
    need is None."""

    t: Float[Array, ""]
    h: Float[Array, ""]
    memory: tuple | None
    code: Int[Array, ""]
    failures: Int[Array, ""] | None
    naccept: Int[Array, ""]
    ntried: Int[Array, ""]
    stops: ColumnStops | None = None

    @property
    def is_active(self) -> Array:
        return self.code == verdicts.GOING


class ColumnTrial(NamedTuple):
    """A step to be tried: its nominal size, positive; its signed size `h`; its end `t2`; and
    whether time can't resolve it, None for an adaptive step."""

    size: Any
    h: Any
    t2: Any
    unresolved: Any


def _bounds_of(numbers: TrajectoryNumbers) -> StepBounds:
    return StepBounds(numbers.dtmin, numbers.dtmax)


def _tolerances_of(numbers: TrajectoryNumbers) -> Tolerances:
    return Tolerances(numbers.abstol, numbers.reltol)


def start(
    plan: Plan, field: Callable, numbers: TrajectoryNumbers, y: tuple
) -> tuple[ColumnState, Any]:
    """The variables at `t0`, and the method's carry for a step from the state `y` there."""
    solver, t0, t1 = plan.method.value, jnp.asarray(numbers.t0), jnp.asarray(numbers.t1)
    carry, h = _first_step(plan, field, numbers, y)
    finite, memory = _is_finite(y), None
    usable = finite
    if solver.controller is not None:
        h = _bounds_of(numbers).first(ARRAYS, h, t0, t1 - t0)
        memory = tuple(jnp.asarray(np.float32(x)) for x in solver.controller.initial_memory())
        usable = finite & jnp.isfinite(h)
    none = jnp.zeros((), jnp.int32)
    stops, jumps = begin(numbers)
    state = ColumnState(
        t=t0,
        h=h.astype(plan.state.dtype),
        memory=memory,
        code=verdicts.first_code(ARRAYS, jnp.array(True), finite, usable, t0 == t1),
        failures=None if memory is None else none,
        naccept=none,
        ntried=none,
        stops=stops,
    )
    if stops is None:
        return state, carry
    t = _beyond(numbers, jumps, t0)
    if numbers.d_discontinuities is not None:
        carry = jax.lax.cond(jumps, lambda: carry_at(plan, field, y, t), lambda: carry)
    return state._replace(t=t), carry


def _is_finite(y: tuple) -> Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in y]))


def _first_step(plan: Plan, field: Callable, numbers: TrajectoryNumbers, y: tuple) -> tuple:
    """The method's carry at the start, and the size of the first step."""
    solver, t = plan.method.value, jnp.asarray(numbers.t0)
    h: Any = numbers.dt
    field = evaluated_once(field, y, t)
    carry = carry_at(plan, field, y, t)
    if h is None:
        # A fixed step always has a `dt`.
        at = t, y, field(y, t), numbers.t1 - numbers.t0
        of = solver.norm, power_of_ten, field
        tol, order = _tolerances_of(numbers), solver.method.order
        how = tol, order, numbers.dtmax, None, plan.in_parts
        h = initial_step(ARRAYS, *of, *at, *how)
    return carry, jnp.abs(h)


def _beyond(numbers: TrajectoryNumbers, jumps: Array, t: Array) -> Array:
    """The time just after `t` where `f` jumps there, else `t`."""
    return jnp.where(jumps, next_time(ARRAYS, t, jnp.sign(numbers.t1 - numbers.t0)), t)


def carry_at(plan: Plan, field: Callable, y: tuple, t: Array) -> Any:
    """The method's carry for a step from the state `y` at `t`."""
    return plan.method.value.method.init(ARRAYS, equations_of(field), y, t)


def attempt(plan: Plan, numbers: TrajectoryNumbers, state: ColumnState) -> ColumnTrial:
    """The next step, which ends at the latest where the stretch of time does."""
    t, size, stops = state.t, state.h, state.stops
    tstop, anchor, number = jnp.asarray(numbers.t1), jnp.asarray(numbers.t0), state.ntried
    direction, unresolved = jnp.sign(numbers.t1 - numbers.t0), None
    if stops is not None:
        tstop, anchor, number = stops.tstop, stops.anchor, number - stops.tried
    if plan.method.value.adaptive:
        t2 = adaptive_step(ARRAYS, t, tstop, direction, size)
        size = jnp.minimum(size, jnp.abs(tstop - t))
    else:
        t2, unresolved = fixed_step(ARRAYS, anchor, tstop, t, size, number)
        t2 = jnp.where(unresolved, t, t2)
    # The size after the end was rounded, so that the state and the time stay together.
    h = t2 - t
    if numbers.d_discontinuities is not None:
        h = size_before(ARRAYS, t, t2, may_jump(numbers, t2), direction)
    if unresolved is not None:
        # The state becomes NaN there, which ends the loop.
        h = jnp.where(unresolved, jnp.nan, h)
    return ColumnTrial(size, h, t2, unresolved)


def decide(
    plan: Plan, numbers: TrajectoryNumbers, state: ColumnState, trial: ColumnTrial, quality: Array
) -> tuple:
    """The variables after a step, whether it was accepted, and whether `f` jumps at its end (None
    without known times). `quality`: for an adaptive step the square of the norm of its scaled
    error, for a fixed step whether it is sound."""
    controller, active = plan.method.value.controller, state.is_active
    size, _, t2, unresolved = trial
    bounds = failures = None
    if controller is None:
        verdict = verdicts.judge_fixed(ARRAYS, quality, unresolved, active, size)
    else:
        assert state.memory is not None
        tstop = numbers.t1 if state.stops is None else state.stops.tstop
        times = verdicts.Times(state.t, t2, tstop, numbers.t1 - numbers.t0)
        bounds, is_first = _bounds_of(numbers), state.naccept == 0
        verdict = verdicts.judge(
            ARRAYS, controller, bounds, times, size, quality, state.memory, active, is_first
        )
        verdict, failures = verdicts.counted(ARRAYS, verdict, state.failures, size, times.span)
    accepted = verdict.accepted
    arrived, ntried = accepted & (t2 == numbers.t1), state.ntried + 1
    ended = arrived | verdict.lost | (ntried >= plan.maxiters)
    code = verdicts.code_at_end(ARRAYS, verdict, arrived, bounds)
    state = ColumnState(
        t=jnp.where(accepted, t2, state.t),
        h=verdict.next_h,
        memory=verdict.memory,
        code=jnp.where(ended, code, state.code),
        failures=failures,
        naccept=state.naccept + accepted.astype(state.naccept.dtype),
        ntried=ntried,
        stops=state.stops,
    )
    if state.stops is None:
        return state, accepted, None
    here = accepted & state.is_active & (state.t == state.stops.tstop)
    stops, jumps = arrive(numbers, state.stops, state.t, ntried, here)
    return state._replace(t=_beyond(numbers, jumps, state.t), stops=stops), accepted, jumps


def code_of(
    plan: Plan,
    numbers: TrajectoryNumbers,
    state: ColumnState,
    y: tuple,
    probe: Callable[[ColumnTrial], tuple],
) -> Array:
    """The return code of a loop that has ended or was stopped, in the state `y`. To find it out may
    take another turn: `probe` makes a trial step and returns the state after it."""
    code, tol = jnp.where(state.is_active, verdicts.STOPPED, state.code), _tolerances_of(numbers)
    if not plan.method.value.adaptive:
        return code

    def probed() -> Array:
        trial = attempt(plan, numbers, state._replace(h=verdicts.PROBE * state.h))
        return verdicts.code_of_probe(ARRAYS, tol, y, probe(trial))

    probing = code == verdicts.PROBING
    code = verdicts.code_of_end(ARRAYS, code, _is_finite(y))
    return jax.lax.cond(probing, probed, lambda: code)


def turns(
    body: Callable, state_of: Callable[[Any], ColumnState], stop: Array | None
) -> tuple[Callable, Callable]:
    """The condition and the body of a loop that takes turns until it ends or is stopped."""

    def going(carry: Any) -> Array:
        return state_of(carry).is_active

    if stop is None:
        return going, body

    def some(carry: Any) -> Any:
        first = state_of(carry).ntried

        def soon(carry: Any) -> Array:
            return going(carry) & (state_of(carry).ntried - first < tuning.TURNS_BETWEEN_LOOKS)

        return jax.lax.while_loop(soon, body, carry)

    return lambda carry: going(carry) & ~stopped(stop, state_of(carry).ntried), some
