"""The rates `du/dt` of saved states, which derivatives with respect to times need."""

from typing import Any

import jax
from jax import Array

from ...plan.plan import Plan
from ...plan.rate import rate_of
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...tracing.program import Program


def rates(plan: Plan, lanes: TrajectoryNumbers, u: Array, t: Array) -> Array:
    """`du/dt` at the states `u [trajectory, time, *state]` and the times `t [trajectory, time]`."""
    rate: Any = plan.field
    if plan.form is not None:
        assert isinstance(plan.field, Program)
        rate = rate_of(plan.field, plan.form)
    batched: Any = jax.tree.map(lambda b: 0 if b else None, plan.batched)

    def of_one(consts, p, u, t):
        return jax.vmap(lambda u, t: rate(consts, u, p, t))(u, t)

    return jax.vmap(of_one, in_axes=(batched.consts, batched.p, 0, 0))(lanes.consts, lanes.p, u, t)
