"""Known times to be stepped onto: from `tstops` and `d_discontinuities` to tables of times in the
order in which they come."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..numbers import Row
from ..solvers.arithmetic import ArrayArithmetic
from ..solvers.time import next_time
from ..tracing.program import is_tracer


def in_order(row: Row, value: Any, t0: Any, t1: Any, dtype: np.dtype, index: Any) -> Any:
    """The known times of one trajectory, sorted: `[time]`. Those that its time span does not have
    come last, infinitely late; so do those that are NaN.

    A discontinuity may be at the start, as what matters of it is what comes after. Of one right
    before the end nothing does.

    **Arguments:** `row`: what they are; `value`: as it is given, a time, several, or a row for each
    trajectory, of which `index` picks one; `t0` and `t1`: the ends of the time span.
    """
    times = _as_array(value, dtype)
    if times is None or times.shape[-1] == 0:
        return None
    if times.ndim == 2:
        times = (jnp.asarray(times) if is_tracer(index) else times)[index]
    xp: Any = jnp if any(map(is_tracer, (times, t0, t1))) else np
    direction = xp.where(t1 < t0, -1, 1).astype(dtype)
    start, end, times = direction * t0, direction * t1, direction * times
    inside = (times > start) & (times < end)
    if row.name == "d_discontinuities":
        following = next_time(ArrayArithmetic(xp), times, xp.ones_like(times))
        inside = (times >= start) & (following < end)
    return direction * xp.sort(xp.where(inside, times, np.inf).astype(dtype))


def _as_array(value: Any, dtype: np.dtype) -> Any:
    """Of at least one axis. (Traced times may be in a list.)"""
    if isinstance(value, list | tuple) and any(map(is_tracer, value)):
        value = jnp.stack([jnp.asarray(x, dtype) for x in value])
    if value is None:
        return None
    times = value.astype(dtype) if is_tracer(value) else np.asarray(value, dtype)
    return times[None] if times.ndim == 0 else times
