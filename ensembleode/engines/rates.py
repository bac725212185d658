"""`f` at the saved states, which interpolation and derivatives with respect to times need."""

from typing import Any

import jax
import jax.numpy as jnp

from ..core.lane import Lane
from ..core.plan import Plan, Result


def rates(plan: Plan, lanes: Lane, u: Any, t: Any) -> Any:
    """`f` at the states `u [trajectory, time, *state]` and the times `t [trajectory, time]`."""
    batched: Any = jax.tree.map(lambda b: 0 if b else None, plan.batched)

    def of_one(consts, p, u, t):
        return jax.vmap(lambda u, t: plan.field(consts, u, p, t))(u, t)

    return jax.vmap(of_one, in_axes=(batched.consts, batched.p, 0, 0))(lanes.consts, lanes.p, u, t)


def with_rates(plan: Plan, lanes: Lane, result: Result) -> Result:
    """The result of several trajectories with `du`, where every step is saved."""
    if plan.saving.mode != "steps":
        return result
    reached = jnp.isfinite(result.t)
    # Where nothing was saved, at some state that was: a NaN in f would spread to the gradient.
    rows = reached.reshape(*reached.shape, *(1,) * (result.u.ndim - 2))
    u0 = jnp.asarray(lanes.u0)
    safe_u = jnp.where(rows, result.u, u0[:, None] if plan.batched.u0 else u0)
    t0 = jnp.asarray(lanes.t0)
    safe_t = jnp.where(reached, result.t, t0[:, None] if plan.batched.t0 else t0)
    du = rates(plan, lanes, safe_u, safe_t)
    return result._replace(du=jnp.where(rows, du, jnp.nan))
