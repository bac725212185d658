"""Trajectories as the arrays of a request, and what comes back as a result."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.lane import Lane
from ...core.plan import Plan, Result, shared_times
from .fields import Field


def flags(plan: Plan) -> tuple[bool, ...]:
    """Which of the constants and parameters differ by trajectory."""
    return tuple(map(bool, (*plan.batched.consts, *plan.batched.p)))


def read_arrays(plan: Plan, field: Field, lanes: Lane, n: int) -> dict[str, np.ndarray]:
    """The numbers of `n` trajectories: what Julia reads."""
    dtype = plan.state.dtype
    size = math.prod(plan.state.shape)
    batched = plan.batched
    own, shared = _parameters(field, lanes, flags(plan), n)
    arrays = {
        "u0": _array(lanes.u0, dtype, (n, size) if batched.u0 else (size,)),
        "own": own,
        "shared": shared,
        "t0": _array(lanes.t0, dtype, (-1,)),
        "t1": _array(lanes.t1, dtype, (-1,)),
        "abstol": _array(lanes.abstol, dtype, (n, -1) if batched.abstol else (-1,)),
        "reltol": _array(lanes.reltol, dtype, (n, -1) if batched.reltol else (-1,)),
    }
    if lanes.saveat is not None:
        rows = plan.saving.rows
        arrays["times"] = _array(lanes.saveat, dtype, (n, rows) if batched.saveat else (rows,))
        meant = np.isfinite(arrays["times"])
        count = meant.sum(-1) if lanes.count is None and not meant.all() else lanes.count
        if count is not None:
            arrays["counts"] = _array(count, np.int32, (-1,))
    for name in ("dt", "dtmin", "dtmax"):
        if (size_of_step := getattr(lanes, name)) is not None:
            arrays[name] = _array(size_of_step, dtype, (-1,))
    return arrays


def _array(x: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x), dtype=dtype).reshape(shape)


def _parameters(
    field: Field, lanes: Lane, batched: Sequence[bool], n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Those of each trajectory, `[trajectory, number]`, and those of all, `[number]`."""
    inputs = field.inputs
    own, shared = [], []
    for x, is_own in zip((*lanes.consts, *lanes.p), batched, strict=True):
        x = np.asarray(x)
        if x.dtype.kind in "iu" and np.any(np.abs(x.astype(np.float64)) > 2**53):
            raise ValueError(
                "p holds an integer larger than 2^53, which engine='julia' would round; use "
                "another engine."
            )
        if is_own:
            own.append(x.reshape(n, -1).astype(inputs.storage, copy=False))
        else:
            shared.append(x.reshape(-1).astype(inputs.storage, copy=False))
    none = np.zeros((n, 0), inputs.storage)
    every = own[0] if len(own) == 1 else np.concatenate([none, *own], axis=1)
    return np.ascontiguousarray(every), np.concatenate([none[0, :0], *shared])


def written(plan: Plan, n: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What Julia writes: the solutions."""
    dtype, rows = plan.state.dtype, plan.saving.rows
    size = math.prod(plan.state.shape)
    arrays = {"u": jax.ShapeDtypeStruct((n, rows, size), dtype)}
    if plan.saving.mode == "steps":
        arrays["t"] = jax.ShapeDtypeStruct((n, rows), dtype)
    for name in ("lengths", "codes", "naccept", "nreject", "nf"):
        arrays[name] = jax.ShapeDtypeStruct((n,), np.int32)
    return arrays


def result_of(plan: Plan, lanes: Lane, arrays: dict[str, Any], n: int) -> Result:
    """What came back, `[trajectory, ...]`."""
    u = jnp.asarray(arrays["u"]).reshape(n, plan.saving.rows, *plan.state.shape)
    lengths = jnp.asarray(arrays["lengths"])
    counts = [jnp.asarray(arrays[name]) for name in ("naccept", "nreject", "nf")]
    codes = jnp.asarray(arrays["codes"]).astype(jnp.int8)
    return Result(u, _times(plan, lanes, arrays, lengths, n), None, lengths, codes, *counts)


def _times(plan: Plan, lanes: Lane, arrays: dict[str, Any], lengths: Any, n: int) -> Any:
    if plan.saving.mode == "steps":
        return jnp.asarray(arrays["t"])
    if not plan.own_times:
        return shared_times(plan, lanes)
    rows = plan.saving.rows
    if plan.saving.mode == "times":
        times = jnp.asarray(lanes.saveat)
    else:
        ends = [jnp.broadcast_to(jnp.asarray(t), (n,)) for t in (lanes.t0, lanes.t1)]
        times = jnp.stack(ends[-rows:], axis=1)
    reached = jnp.arange(rows, dtype=lengths.dtype)[None] < lengths[:, None]
    return jnp.where(reached, times, jnp.nan)
