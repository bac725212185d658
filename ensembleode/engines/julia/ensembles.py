"""The executor of the Julia engine: SciML's own ensemble algorithms run the trajectories."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ...ground.recent import jit_recent
from ...plan.plan import Outcome
from ...running.executor import Executor
from ...running.job import finish_lanes, Job, solve_lanes
from ...tracing.program import Static
from . import methods
from .numbers import result_of
from .solving import solve_on_host


@dataclasses.dataclass(frozen=True)
class JuliaExecutor(Executor):
    """Runs the trajectories of a batch in one call of Julia, at this place."""

    place: methods.Place

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        lanes = job.trajectories.lanes(indices, repeat)
        method = job.plan.method.value._replace(place=self.place)
        plan = dataclasses.replace(job.plan, method=Static(method))
        numbers = (lanes, indices, repeat, job.key, job.output_consts)
        if job.traced:
            return _solve(plan, *numbers)
        # The arrays go straight from the host's memory to Julia's, and back.
        n = len(indices)
        written = solve_on_host(plan, jax.tree.map(np.asarray, lanes), n)
        return _finish(plan, written, *numbers)


_solve = jit_recent(solve_lanes)


@jit_recent
def _finish(plan, written, lanes, indices, repeat, key, output_consts):
    result = result_of(plan, lanes, written, indices.shape[0])
    return finish_lanes(plan, result, lanes, indices, repeat, key, output_consts)
