"""The values of a `SavingCallback`: at the rows of a solution, or at times of its own.

Engines save states at the callback's own times as well, and these rows are separated afterwards. So
in every engine, the values are computed from states of the method's dense output, with their
derivatives. Where every step is saved, these states are interpolated between the steps.
"""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..ground.retcode import is_successful
from ..plan.plan import dense_of, Outcome, Plan, Result
from ..plan.saving import resolve_saving, Saving
from ..plan.trajectory_numbers import Trajectories, TrajectoryNumbers
from ..problem.saving_callback import values_at
from ..solution.dense import states_at


def with_times_of_values(every: Trajectories) -> Trajectories:
    """The ensemble that saves states also at the times of its `SavingCallback`.

    **Raises:** `TypeError` and `ValueError` for times that can't be saved.
    """
    saving, callback, shared = every.saving, every.saving_callback, every.shared
    if callback is None or callback.saveat is None:
        return every
    if shared.t0 is None or shared.t1 is None:
        raise ValueError(
            "SavingCallback has saveat, and prob_func gives each trajectory a time span of its "
            "own: give saveat to solve instead, at whose times fn is saved, too."
        )
    options = dict.fromkeys(("save_start", "save_end"), None)
    options |= {"saveat": callback.saveat, "save_everystep": False}
    _, times = resolve_saving(options, shared.t0, shared.t1, shared.t0.dtype, 0)
    every = dataclasses.replace(every, times_of_values=times)
    if saving.mode == "steps":
        return every
    ends = saving.mode == "ends"
    if ends and every.events is not None and every.events.may_end:
        raise ValueError(
            "SavingCallback has saveat beside a callback that may end trajectories, and solve "
            "saves the ends of these: give saveat to solve, too."
        )

    def with_times(lane: TrajectoryNumbers) -> TrajectoryNumbers:
        before = (lane.t0, lane.t1)[-saving.rows :] if ends else lane.saveat
        return lane._replace(saveat=_together(before, times, lane))

    if ends or shared.saveat is not None:
        shared = with_times(shared)
    return every.changed(
        with_times,
        saving=Saving("times", False, saving.rows + len(times)),
        shared=shared,
        batched=every.batched._replace(saveat=bool(every.batched.saveat)),
    )


def taken_apart(
    every: Trajectories, plan: Plan
) -> Callable[[Result, TrajectoryNumbers], tuple[Result, PyTree]]:
    """A function of the result of one trajectory and its numbers. It returns the result with only
    the states that the user asked for, and the values of the callback, with leaves `[row, ...]`."""
    callback, given, times = every.saving_callback, every.given, every.times_of_values
    assert callback is not None
    assert given is not None
    first = every.before_parameters

    def of_one(result: Result, numbers: TrajectoryNumbers) -> tuple[Result, PyTree]:
        p = given.parameters(numbers.p[first : first + given.numbers.num_leaves])
        u, t, length = result.u, result.t, result.length
        reached = jnp.arange(u.shape[0], dtype=length.dtype) < length
        if times is None:
            found = plan.as_given(u), t, reached
        elif plan.saving.mode == "steps":
            found = _between_steps(plan, result, numbers, times)
        else:
            states, values = rows_apart(numbers, times)
            found = plan.as_given(u[values]), jnp.asarray(times), reached[values]
            length = jnp.sum(reached[states], dtype=length.dtype)
            result = result._replace(u=u[states], t=t[states], length=length)
        start = plan.as_given(jnp.asarray(numbers.u0))
        return result, values_at(callback.fn, *found, start, p)

    return of_one


def rows_apart(lane: TrajectoryNumbers, times: np.ndarray) -> tuple[Array, Array]:
    """Which of the saved rows of a trajectory are those of its states, and which are at the `times`
    of the callback."""
    sign = _sign(lane)
    every, own = sign * jnp.asarray(lane.saveat), sign * jnp.asarray(times)
    # Of several rows at the same time, the last ones are those of the callback.
    below, same = (jnp.searchsorted(x, own, side="right") for x in (every, own))
    values = below - same + jnp.arange(own.size, dtype=below.dtype)
    is_state = jnp.ones(every.size, bool).at[values].set(False)
    return jnp.nonzero(is_state, size=every.size - own.size)[0], values


def _between_steps(
    plan: Plan, result: Result, numbers: TrajectoryNumbers, times: Any
) -> tuple[Array, Array, Array]:
    """The states at the times of the callback, these times, and which of them were reached."""
    u, length = plan.as_given(result.u), result.length
    outcome = Outcome(*result._replace(u=u, inner=plan.as_given(result.inner)))
    dense = dense_of(outcome, plan, (numbers.consts, numbers.p))
    assert dense is not None
    times = jnp.asarray(times)
    succeeded = is_successful(result.retcode)
    states = states_at(dense, result.t, u, length, succeeded, times, several=False)
    sign, ends = _sign(numbers), result.t[jnp.stack([jnp.zeros_like(length), length - 1])]
    inside = (sign * times >= sign * ends[0]) & (sign * times <= sign * ends[1]) & (length > 0)
    return states, times, inside


def _together(first: Any, second: Any, lane: TrajectoryNumbers) -> Any:
    """The times of both arrays, sorted in the direction of the time span."""
    ends = lane.t0, lane.t1
    first = first if isinstance(first, tuple) else (first,)
    is_jax = any(isinstance(x, jax.Array) for x in (*ends, *first, second))
    xp: ModuleType = jnp if is_jax else np
    joined = xp.concatenate([xp.atleast_1d(x) for x in first], axis=-1)
    second = xp.broadcast_to(xp.asarray(second), (*joined.shape[:-1], len(second)))
    sign = _sign(lane)
    return sign * xp.sort(sign * xp.concatenate([joined, second], axis=-1), axis=-1)


def _sign(lane: TrajectoryNumbers) -> Array | np.ndarray:
    """The direction of the time span."""
    xp: ModuleType = jnp if any(isinstance(x, jax.Array) for x in (lane.t0, lane.t1)) else np
    return xp.where(lane.t1 < lane.t0, -1, 1).astype(lane.t0.dtype)
