"""Solves by kernels, with derivatives of any order (see `engines/derivatives.py`)."""

from typing import Any

import jax
import jax.numpy as jnp

from ... import sensitivity
from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...core.saving import meant
from ..derivatives import differentiable
from ..flow import each
from ..results import Numbers, result_of
from .solves import Found, parted, Setup, solve


def solved(plan: Plan, lanes: Lane, n: int, mask: Any) -> Result:
    """The result of `n` trajectories, without shared times."""
    setup = Setup(plan, plan.controlled, n)
    fixed = jax.tree.map(jax.lax.stop_gradient, lanes)
    result = _finished(setup, fixed, solve(setup, fixed, mask))
    result = differentiable(setup, lanes, mask, result)
    if plan.method.value.direction == "forward":
        return sensitivity.forward_only(result)
    return result


def _finished(setup: Setup, lanes: Lane, found: Found) -> Result:
    plan = setup.plan
    end, saved, counts, events = parted(plan, found)
    u0 = each(lanes.u0, plan.batched.u0, setup.n)
    t0, t1 = jnp.asarray(lanes.t0), jnp.asarray(lanes.t1)
    numbers = Numbers(u0, t0, t1, meant(lanes.saveat, lanes.count, t0, t1))
    method = plan.method.value.method
    has_dt, controlled = lanes.dt is not None, setup.controlled
    return result_of(plan, method, has_dt, numbers, end, saved, counts, controlled, events)
