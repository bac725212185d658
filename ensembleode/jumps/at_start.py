"""Callbacks that act at the start: a dose, or a condition that holds there."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from ..plan.trajectory_numbers import Trajectories


def after_start(every: Trajectories) -> Trajectories:
    """The ensemble (after `with_one_list`) whose initial states are those after the callbacks that
    act at the start."""
    assert every.events is not None
    acting = [x for x in every.events.discrete if x.at_start]
    if not acting:
        return every

    def of_one(u0: PyTree, numbers: Sequence, t0: Array) -> Array:
        for x in acting:
            given = {"uprev": u0, "tprev": t0}
            (wanted,), out = (
                part.program((), u0, (*numbers, *(given[name] for name in part.extras)), t0)
                for part in (x.condition, x.jump.part)
            )
            u0 = jnp.where(wanted > 0, out[:-1].reshape(u0.shape), u0)
        return u0

    return every.with_start(of_one)
