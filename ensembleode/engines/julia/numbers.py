"""The numbers of trajectories as arrays of a request, and results from the arrays that return."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ...fields.lowering.values import is_stored_as_bits
from ...ground.keys import raw
from ...plan.plan import Plan, Result, shared_times
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem.number_table import but
from ...solution.events import end_by
from ..base.results import end_times
from .callbacks import events_of, written_events
from .fields import JuliaField
from .noise import noise_arrays, parameters_read


# The rows of the table of numbers that are arrays of a request under their own names.
_ARRAYS = but("constants", "parameters", "times", "count", "flag")


def read_arrays(
    plan: Plan, field: JuliaField, lanes: TrajectoryNumbers, n: int
) -> dict[str, np.ndarray]:
    """The numbers of `n` trajectories, as the arrays that Julia reads."""
    dtype, batched = plan.state.dtype, plan.batched
    read = [parameters_read(plan, x.parameters) for x in (lanes, batched)]
    own, shared = _parameters(field, *read, n)
    arrays = {"own": own, "shared": shared}
    if plan.noise is not None:
        arrays |= noise_arrays(plan, plan.noise, lanes, n)
    for row in _ARRAYS:
        if (x := getattr(lanes, row.name)) is not None:
            is_number = row.kind in ("time", "step", "bound") or not getattr(batched, row.name)
            shape = (-1,) if is_number else (n, -1)
            arrays[row.name] = _array(x, row.dtype or dtype, shape)
    if lanes.saveat is not None:
        rows = plan.saving.rows
        arrays["times"] = _array(lanes.saveat, dtype, (n, rows) if batched.saveat else (rows,))
        meant = np.isfinite(arrays["times"])
        count = meant.sum(-1) if lanes.count is None and not meant.all() else lanes.count
        if count is not None:
            arrays["counts"] = _array(count, np.int32, (-1,))
    if (mass := plan.mass) is not None:
        # Transposed, as its row-major order is Julia's column-major one.
        arrays["mass"] = _array(mass.matrix.T, dtype, (mass.size, mass.size))
    return arrays


def _array(x: np.ndarray, dtype: DTypeLike, shape: Sequence[int]) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x), dtype=dtype).reshape(shape)


def _parameters(
    field: JuliaField, parameters: Sequence, batched: Sequence[bool], n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The parameters of each trajectory, `[trajectory, number]`, and the shared ones,
    `[number]`."""
    storage, own, shared = field.inputs.storage, [], []
    assert storage is not None
    for x, is_own in zip(parameters, batched, strict=True):
        x = np.ascontiguousarray(raw(x))
        as_bits = is_stored_as_bits(x.dtype, storage)
        x = x.view(storage) if as_bits else x.astype(storage, copy=False)
        if is_own:
            own.append(x.reshape(n, -1))
        else:
            shared.append(x.reshape(-1))
    none = np.zeros((n, 0), storage)
    every = own[0] if len(own) == 1 else np.concatenate([none, *own], axis=1)
    return np.ascontiguousarray(every), np.concatenate([none[0, :0], *shared])


def written(plan: Plan, n: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays in which Julia writes the solutions."""
    dtype, rows = plan.state.dtype, plan.saving.rows
    arrays = {"u": jax.ShapeDtypeStruct((n, rows, math.prod(plan.state.shape)), dtype)}
    if plan.saving.mode == "steps":
        arrays["t"] = jax.ShapeDtypeStruct((n, rows), dtype)
    for name in ("lengths", "codes", *plan.engine.counts(plan.method)):
        arrays[name] = jax.ShapeDtypeStruct((n,), np.int32)
    return arrays | written_events(plan, n)


def result_of(plan: Plan, lanes: TrajectoryNumbers, arrays: dict[str, Any], n: int) -> Result:
    """The result from the arrays that Julia wrote, `[trajectory, ...]`."""
    u = jnp.asarray(arrays["u"]).reshape(n, plan.saving.rows, *plan.state.shape)
    lengths = jnp.asarray(arrays["lengths"])
    counts = {name: jnp.asarray(arrays[name]) for name in plan.engine.counts(plan.method)}
    codes = jnp.asarray(arrays["codes"]).astype(jnp.int8)
    events = events_of(plan, arrays)
    ended = None
    if events is not None and plan.keeps_end:
        ended = end_by(events.t, events.after, events.count, codes)
    t = _times(plan, lanes, arrays, lengths, ended)
    return Result(u, t, None, lengths, codes, **counts, events=events, ended=ended)


def _times(
    plan: Plan, lanes: TrajectoryNumbers, arrays: dict[str, Any], lengths: Array, ended: Any
) -> Array:
    if plan.saving.mode == "steps":
        return jnp.asarray(arrays["t"])
    if not plan.own_times:
        return shared_times(plan, lanes)
    rows = plan.saving.rows
    if plan.saving.mode == "times":
        times = jnp.asarray(lanes.saveat)
    else:
        times = end_times(lanes, ended, len(lengths))[:, -rows:]
    reached = jnp.arange(rows, dtype=lengths.dtype)[None] < lengths[:, None]
    return jnp.where(reached, times, jnp.nan)
