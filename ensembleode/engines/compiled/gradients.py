"""Solves by kernels, with derivatives of any order (see `derivatives.py`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ... import sensitivity
from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...core.retcode import ReturnCode
from ...core.saving import meant
from ..results import Numbers, result_of
from .derivatives import differentiable
from .flow import each
from .solves import Setup, solve


def solved(plan: Plan, lanes: Lane, n: int, mask: Any) -> Result:
    """The result of `n` trajectories, without shared times."""
    setup = Setup(plan, math.prod(plan.state.shape), n)
    fixed = jax.tree.map(jax.lax.stop_gradient, lanes)
    result = _finished(plan, fixed, n, solve(setup, fixed, mask))
    result = result._replace(u=_differentiable(setup, lanes, mask, result))
    if plan.method.value.direction == "forward":
        return sensitivity.forward_only(result)
    return result


def _differentiable(setup: Setup, lanes: Lane, mask: Any, result: Result) -> Any:
    """The saved states, with their derivatives."""
    plan, u = setup.plan, result.u
    saving = plan.saving
    ok = mask & (result.retcode == ReturnCode.Success.value)
    reached = result.naccept + int(saving.start) if saving.mode == "steps" else result.length
    rows = u[:, -1:] if saving.mode == "ends" else u
    rows = differentiable(setup, lanes, ok, reached, rows)
    if saving.mode == "times" or not saving.start:
        return rows
    # A state saved at t0 is u0, whenever that is; but where it is at a time given by saveat.
    u0 = each(lanes.u0, plan.batched.u0, setup.n)
    start = jnp.where(ok.reshape(-1, *(1,) * (u0.ndim - 1)), u0, u[:, 0])[:, None]
    return jnp.concatenate([start, rows if saving.mode == "ends" else rows[:, 1:]], axis=1)


def _finished(plan: Plan, lanes: Lane, n: int, found: tuple) -> Result:
    end, saved, counts = found
    u0 = each(lanes.u0, plan.batched.u0, n)
    t0, t1 = jnp.asarray(lanes.t0), jnp.asarray(lanes.t1)
    numbers = Numbers(u0, t0, t1, meant(lanes.saveat, lanes.count, t0, t1))
    method = plan.method.value.method
    return result_of(plan, method, lanes.dt is not None, numbers, end, saved, counts)
