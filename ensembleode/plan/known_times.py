"""Known times on which steps end: sorted tables, in the order of integration, from `tstops` and
`d_discontinuities`."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..problem.callbacks import all_of, PeriodicCallback, PresetTimeCallback
from ..problem.number_table import NumberRow
from ..solvers.arithmetic import ArrayArithmetic
from ..solvers.time import next_time
from ..tracing.program import is_tracer


ADJACENT = 3  # the most jumps that may follow each other at neighbouring floating-point numbers


def in_order(
    row: NumberRow,
    value: PyTree,
    more: Sequence,
    t0: Array | np.ndarray,
    t1: Array | np.ndarray,
    dtype: np.dtype,
    index: ArrayLike,
) -> Any:
    """The known times of one trajectory, sorted: `[time]`. Times that are outside of its time span,
    from `t0` to `t1`, or NaN come last, and are infinitely late.

    A discontinuity may be at the start, because what matters is the field after it. For the same
    reason, a discontinuity just before the end is left out.

    **Arguments:** `row`: the row of the option in the number table; `value`: the times as they are
    given: one, several, or a row for each trajectory, of which `index` picks one; `more`: further
    times, `[time]`.
    """
    times = own_times(value, dtype, index)
    several = [x for x in (times, *more) if x is not None and x.size]
    if not several:
        return None
    times = several[0]
    if len(several) > 1:
        times = (jnp if any(map(is_tracer, several)) else np).concatenate(several)
    xp: ModuleType = jnp if any(map(is_tracer, (times, t0, t1))) else np
    direction = xp.where(t1 < t0, -1, 1).astype(dtype)
    start, end, times = direction * t0, direction * t1, direction * times
    inside = (times > start) & (times < end)
    if row.name == "d_discontinuities":
        following = next_time(ArrayArithmetic(xp), times, xp.ones_like(times))
        inside = (times >= start) & (following < end)
    return direction * xp.sort(xp.where(inside, times, np.inf).astype(dtype))


@jax.custom_jvp
def differing(times: Array) -> Array:
    """Sorted times `[time, ...]`. Derivatives with respect to times that coincide are NaN: where
    steps move with the times, they would be derivatives of the numerical steps."""
    return times


@differing.defjvp
def _differing_jvp(primals: tuple, tangents: tuple) -> tuple:
    (times,), (tangent,) = primals, tangents
    near = jnp.abs(jnp.diff(times, axis=0)) <= NEAR * jnp.abs(times[1:])
    no = jnp.zeros_like(times[:1], bool)
    coincide = jnp.concatenate([no, near]) | jnp.concatenate([near, no])
    coincide &= jnp.isfinite(times)
    return times, tangent * jnp.where(coincide, jnp.nan, 1)


NEAR = 1e-8  # relative to the time; shorter steps are mostly rounding


def own_times(value: PyTree, dtype: np.dtype, index: Any) -> Any:
    """The times of one trajectory as they are given, `[time]`, or None: see `in_order`."""
    times = _as_array(value, dtype)
    if times is not None and times.ndim == 2:
        times = (jnp.asarray(times) if is_tracer(index) else times)[index]
    return times


def scheduled(callback: Any, t0: Any, t1: Any, dtype: np.dtype) -> list:
    """The known times of each callback, `[time]`; None for callbacks without known times.

    **Raises:** `TypeError` for a period over a time span that isn't known while tracing.
    """
    found: list = []
    for x in all_of(callback):
        times = None
        if isinstance(x, PresetTimeCallback):
            times = _as_array(x.times, dtype)
        elif isinstance(x, PeriodicCallback):
            times = _periodic(x, t0, t1, dtype)
        # The end of a step is compared with the time, so the time must not be computed twice, with
        # different rounding.
        found.append(jax.lax.optimization_barrier(times) if is_tracer(times) else times)
    return found


def before_jumps(
    times: Array | np.ndarray | None,
    jumps: Array | np.ndarray | None,
    t0: Array | np.ndarray,
    t1: Array | np.ndarray,
) -> Array | np.ndarray | None:
    """The known times `[time]` of a callback, moved where they are a unit in the last place behind
    a jump of the field (the next step begins there): to the time of the jump, on which a step
    ends."""
    if times is None or jumps is None or not jumps.size:
        return times
    xp: ModuleType = jnp if any(map(is_tracer, (times, jumps, t0, t1))) else np
    direction = xp.where(t1 < t0, -1, 1).astype(times.dtype)
    table, found = xp.sort(jumps), xp.asarray(times)
    # (Several jumps may be a unit in the last place apart.)
    for _ in range(ADJACENT):
        earlier = next_time(ArrayArithmetic(xp), _constant(found), -direction)
        row = xp.clip(xp.searchsorted(table, earlier), 0, len(table) - 1)
        moved = xp.where(table[row] == earlier, earlier - _constant(found), 0)
        found = found + _constant(moved)
    return jax.lax.optimization_barrier(found) if is_tracer(found) else found


def _constant(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if is_tracer(x) else x


def _periodic(callback: PeriodicCallback, t0: Any, t1: Any, dtype: np.dtype) -> np.ndarray | None:
    if is_tracer(t0) or is_tracer(t1):
        raise TypeError(
            "callback is an eo.PeriodicCallback, and tspan is traced, so how many times there are "
            "is not known: use eo.PresetTimeCallback(t0 + dt * jnp.arange(1, n), affect)."
        )
    direction = -1 if t1 < t0 else 1
    phase, dt = (dtype.type(direction * x) for x in (callback.phase, callback.dt))
    first = 0 if callback.phase else 1
    count = math.ceil(abs(float(t1) - float(t0)) / callback.dt) + 2
    # By multiplication, so that rounding errors don't accumulate.
    times = (t0 + phase) + np.arange(first, count).astype(dtype) * dt
    times = times[direction * (t1 - times) > 0]
    initial, final = [t0] * callback.initial_affect, [t1] * callback.final_affect
    return np.concatenate([initial, times, final]).astype(dtype)


def _as_array(value: PyTree, dtype: np.dtype) -> Array | np.ndarray | None:
    """An array of at least one axis, from a value that may be a list with traced times."""
    if isinstance(value, list | tuple) and any(map(is_tracer, value)):
        value = jnp.stack([jnp.asarray(x, dtype) for x in value])
    if value is None:
        return None
    times = (jnp if is_tracer(value) else np).asarray(value, dtype)
    return times[None] if times.ndim == 0 else times
