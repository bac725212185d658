"""EnsembleGPUArray: all trajectories of a batch at once."""

import functools
from typing import Any

import jax

from ..plan import Plan
from .job import axes, Job, Outcome, solve_lane


vectorised = True


def check(plan: Plan) -> None:
    """No option is refused."""


def run(job: Job, indices: Any, repeat: Any) -> Outcome:
    lanes = job.trajectories.lanes(indices, repeat)
    return _solve(job.plan, lanes, indices, repeat, job.key, job.output_consts)


@functools.partial(jax.jit, static_argnums=0)
def _solve(plan, lanes, indices, repeat, key, output_consts):
    def one(lane, index):
        return solve_lane(plan, lane, index, repeat, key, output_consts)

    return jax.vmap(one, in_axes=(axes(plan.batched), 0))(lanes, indices)
