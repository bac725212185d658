"""Solves by kernels, with derivatives of any order (see `engines/derivatives.py`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ... import sensitivity
from ...core.lane import Lane
from ...core.plan import Plan, Result
from ..derivatives import differentiable
from ..flow import each
from ..results import Numbers, result_of
from .solves import Setup, solve


def solved(plan: Plan, lanes: Lane, n: int, mask: Any) -> Result:
    """The result of `n` trajectories, without shared times."""
    setup = Setup(plan, math.prod(plan.state.shape), n)
    fixed = jax.tree.map(jax.lax.stop_gradient, lanes)
    result = _finished(plan, fixed, n, solve(setup, fixed, mask))
    result = result._replace(u=differentiable(setup, lanes, mask, result))
    if plan.method.value.direction == "forward":
        return sensitivity.forward_only(result)
    return result


def _finished(plan: Plan, lanes: Lane, n: int, found: tuple) -> Result:
    end, saved, counts = found
    u0 = each(lanes.u0, plan.batched.u0, n)
    numbers = Numbers(u0, jnp.asarray(lanes.t0), jnp.asarray(lanes.t1), _times(plan, lanes))
    method = plan.method.value.method
    return result_of(plan, method, lanes.dt is not None, numbers, end, saved, counts)


def _times(plan: Plan, lanes: Lane) -> Any:
    """The times to save, infinite past those that are meant."""
    if lanes.saveat is None or lanes.count is None:
        return lanes.saveat
    times, count = jnp.asarray(lanes.saveat), jnp.asarray(lanes.count)
    beyond = jnp.where(lanes.t1 < lanes.t0, -jnp.inf, jnp.inf).astype(times.dtype)
    if times.ndim == 1 and not count.ndim and not beyond.ndim:
        rows = jnp.arange(len(times), dtype=count.dtype)
        return jnp.where(rows < count, times, beyond)
    rows = jnp.arange(times.shape[-1], dtype=count.dtype)[None]
    return jnp.where(
        rows < count.reshape(-1, 1), times.reshape(-1, rows.size), beyond.reshape(-1, 1)
    )
