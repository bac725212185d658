"""`f` at the saved states, which derivatives with respect to times need."""

from typing import Any

import jax

from ..core.lane import Lane
from ..core.plan import Plan


def rates(plan: Plan, lanes: Lane, u: Any, t: Any) -> Any:
    """`f` at the states `u [trajectory, time, *state]` and the times `t [trajectory, time]`."""
    batched: Any = jax.tree.map(lambda b: 0 if b else None, plan.batched)

    def of_one(consts, p, u, t):
        return jax.vmap(lambda u, t: plan.field(consts, u, p, t))(u, t)

    return jax.vmap(of_one, in_axes=(batched.consts, batched.p, 0, 0))(lanes.consts, lanes.p, u, t)
