"""The times that are saved: from `saveat`, `save_start`, `save_end` and `save_everystep` to a
grid."""

import math
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..problem.number_table import check_real
from ..solvers.time import rounding
from ..tracing.program import is_tracer


class Saving(NamedTuple):
    """What every trajectory of a solve saves. This is the static part; the times themselves are
    numbers.

    - `mode`: `"ends"`, `"times"` (an array of these) or `"steps"` (every accepted step).
    - `start`: whether the start is saved, in the modes `"ends"` and `"steps"`.
    - `rows`: the largest number of times of a trajectory.
    - `after_events`: whether the state that is saved at the time of an event is the one after it,
        in the mode `"times"`.
    """

    mode: Literal["ends", "times", "steps"]
    start: bool
    rows: int
    after_events: bool = False


class Spacing(NamedTuple):
    """The spacing of a grid of saved times (a number as `saveat`), which can't be laid out yet
    since `tspan` differs between trajectories."""

    step: float
    start: bool
    end: bool = True


def resolve_saving(
    options: dict,
    t0: ArrayLike,
    t1: ArrayLike,
    dtype: np.dtype,
    index: Any,
    *,
    defer: bool = False,
) -> tuple[Saving | Spacing, Any]:
    """The saving of one trajectory, and its times (an array, or None), from the resolved options.
    The `index` of the trajectory picks a row of a two-dimensional `saveat`. With `defer`, the grid
    of a number as `saveat` is left to [`grid`][]."""
    saveat = _as_numbers(options["saveat"])
    start, end = (options[name] is not False for name in ("save_start", "save_end"))
    if options["save_everystep"]:
        if not end:
            raise ValueError(
                "save_end=False is given with save_everystep=True, whose last step ends there; "
                "drop one of the two."
            )
        return Saving("steps", start, 0), None
    if saveat is None and end:
        return Saving("ends", start, 1 + start), None
    if saveat is None:
        if not start:
            raise ValueError(
                "save_start=False and save_end=False leave nothing to save; drop one of the two, "
                "or give saveat."
            )
        xp: ModuleType = jnp if is_tracer(t0) else np
        return Saving("times", False, 1), xp.asarray(t0, dtype)[None]
    if np.ndim(saveat) == 0:
        return _spaced(saveat, start, end, t0, t1, dtype, defer)
    for name in ("start", "end"):
        if options[f"save_{name}"] is not None:
            raise ValueError(
                f"save_{name} is given with an array saveat, which is saved exactly as it is; put "
                f"the {name} into saveat, or leave it out."
            )
    if np.ndim(saveat) > 2:
        raise ValueError(
            f"saveat must be a number, an array of times, or an array [trajectory, time]; its "
            f"shape is {np.shape(saveat)}."
        )
    # One trajectory, or a row of `saveat`, may have fewer times than others.
    times = _as_times(saveat, t0, t1, dtype, may_end=defer or np.ndim(saveat) == 2)
    if times.ndim == 2:
        times = (jnp.asarray(times) if is_tracer(index) else times)[index]
    return Saving("times", False, times.shape[-1]), times


def grid(
    spacing: Spacing, t0: ArrayLike, t1: ArrayLike, dtype: np.dtype, rows: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Evenly spaced times, laid out on the host: `[trajectory, rows]`, and `counts [trajectory]`.
    The first `counts` of the times are to be saved; the others repeat `t1`. If `t0` and `t1` are
    numbers, there is no trajectory axis. By default there are as many `rows` as the longest span
    needs. A span of no length has one time, which is both of its ends."""
    t0, t1 = np.broadcast_arrays(np.asarray(t0, np.float64), np.asarray(t1, np.float64))
    intervals = np.abs(t1 - t0) / spacing.step
    # A span that is a whole number of steps up to the rounding of its ends, ends on the grid.
    slack = np.minimum(rounding(t0, t1, dtype, np) / spacing.step + 1e-15 * intervals, 0.5)
    whole = np.floor(intervals + slack)
    between = whole < intervals - slack
    last = np.asarray(whole + between)
    if last.max() > np.iinfo(np.int32).max:
        raise ValueError(
            f"saveat={spacing.step:g} gives {last.max():.3g} times; choose a larger spacing."
        )
    counts = np.where(
        last == 0, spacing.start or spacing.end, last - 1 + spacing.start + spacing.end
    ).astype(np.int32)
    number = np.arange(counts.max()) + (not spacing.start)
    times = t0[..., None] + number * spacing.step * np.sign(t1 - t0)[..., None]
    times = np.where(number >= last[..., None], t1[..., None], times)
    if rows is None:
        if not counts.max():
            raise ValueError(
                f"saveat={spacing.step:g} has no time between the ends, and save_start=False and "
                "save_end=False leave these out; drop one of the two, or choose a smaller spacing."
            )
    else:
        missing = rows - times.shape[-1]
        if missing < 0:
            raise ValueError(
                "saveat is a number, and prob_func makes tspan longer in a rerun than in any first "
                "run, where room for the times was made; pass saveat as an array of times."
            )
        times = np.concatenate([times, np.repeat(t1[..., None], missing, axis=-1)], axis=-1)
    return times.astype(dtype), counts


def meant(times: Array | None, count: Array | None, t0: Array, t1: Array) -> Any:
    """The times, of which those after the first `count` become infinite, in the direction from `t0`
    to `t1`. If `count` is None, all times stay as they are."""
    if times is None or count is None:
        return times
    times, count = jnp.asarray(times), jnp.asarray(count)
    beyond = jnp.where(t1 < t0, -jnp.inf, jnp.inf).astype(times.dtype)
    rows = jnp.arange(times.shape[-1], dtype=count.dtype)
    if times.ndim == 1 and not count.ndim and not beyond.ndim:
        return jnp.where(rows < count, times, beyond)
    times = times.reshape(-1, rows.size)
    return jnp.where(rows[None] < count.reshape(-1, 1), times, beyond.reshape(-1, 1))


def _as_numbers(saveat):
    if saveat is None or is_tracer(saveat):
        return saveat
    what = f"saveat must be a number or an array of times, got {saveat!r}."
    try:
        array = np.asarray(saveat)
    except ValueError as e:  # ragged
        raise TypeError(
            f"{what} Rows of different lengths are filled up: put jnp.inf behind the last time of "
            "a shorter one."
        ) from e
    return check_real(array, what)


def _spaced(saveat, start, end, t0, t1, dtype, defer):
    if is_tracer(saveat):
        raise TypeError(
            "saveat is a traced number, so the count of saved times is not known; pass a Python "
            "number, or an array of times."
        )
    step = float(saveat)
    if not (math.isfinite(step) and step > 0):
        raise ValueError(f"saveat must be a positive spacing or an array of times, got {step}.")
    spacing = Spacing(step, start, end)
    if defer or is_tracer(t0) or is_tracer(t1):
        return spacing, None
    times, _ = grid(spacing, t0, t1, dtype)
    return Saving("times", start, len(times)), times


def _as_times(saveat, t0, t1, dtype, *, may_end):
    """The times as an array. Infinite and NaN entries become infinitely late, so they are not
    saved."""
    times = saveat.astype(dtype)
    if times.shape[-1] == 0:
        raise ValueError("saveat is empty; leave it out to save the start and the end.")
    xp: ModuleType = jnp if any(map(is_tracer, (saveat, t0, t1))) else np
    t0, t1 = (xp.asarray(t, dtype) for t in (t0, t1))
    meant, never = xp.isfinite(times), xp.where(t1 < t0, -np.inf, np.inf).astype(dtype)
    # (Times from a file of single precision are rounded to that.)
    given = saveat.dtype if saveat.dtype.kind == "f" else times.dtype
    times = xp.where(meant, _within_span(xp, xp.where(meant, times, t1), t0, t1, given), never)
    if xp is jnp:
        return times
    lo, hi = min(t0, t1), max(t0, t1)
    outside = ~((times >= lo) & (times <= hi)) & (meant if may_end else True)
    if outside.any():
        time = saveat[outside].flat[0]
        raise ValueError(f"saveat has the time {time}, outside tspan=({t0}, {t1}).")
    earlier, later = times[..., :-1], times[..., 1:]
    if ((later < earlier) if t0 <= t1 else (later > earlier)).any():
        order = "decreasing, as time runs backwards here" if t1 < t0 else "increasing"
        raise ValueError(f"saveat is not sorted: it must be {order}.")
    return times


def _within_span(xp, times, t0, t1, given):
    """The times, where those beyond an end by one or two roundings (of `arange`, for example; in
    the dtype in which they were given) are moved to that end. Derivatives with respect to a time
    stay with that time."""
    lo, hi = xp.minimum(t0, t1), xp.maximum(t0, t1)
    coarser = max(times.dtype, given, key=lambda dtype: jnp.finfo(dtype).eps)
    close = 2 * rounding(t0, t1, coarser, xp)
    beyond = xp.maximum(lo - times, times - hi)
    moved = xp.where((beyond > 0) & (beyond <= close), xp.clip(times, lo, hi), times)
    return moved if xp is np else times + jax.lax.stop_gradient(moved - times)
