"""The executor of the Julia engine: SciML's own ensemble algorithms run the trajectories."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ...core.executor import Executor
from ...core.job import finish_lanes, Job, solve_lanes
from ...core.plan import Outcome, Plan
from ...ensemble import EnsembleColumns
from ...ground.recent import jit_recent
from ...numbers import but, of_kind
from ...tracing.program import Static
from . import methods, session
from .numbers import result_of
from .solving import solve_on_host


@dataclasses.dataclass(frozen=True)
class InJulia(Executor):
    """Runs the trajectories of a batch in one call of Julia, at this place."""

    place: methods.Place

    def check(self, plan: Plan) -> None:
        """**Raises:** `ValueError` for plans that DiffEqGPU can't run, and for those whose results
        would be wrong in Julia."""
        methods.check_events(plan.method.value.description, plan)
        methods.check_mass(plan.method.value.description, plan)
        if not methods.is_gpu(self.place):
            return
        if plan.mass is not None:
            raise ValueError(
                f"{self.place[0]} of DiffEqGPU runs without a mass_matrix: use EnsembleThreads(), "
                "or engine='compiled'."
            )
        if plan.events is not None:
            raise ValueError(
                f"{self.place[0]} of DiffEqGPU has no callbacks: use EnsembleThreads(), or "
                "engine='compiled'."
            )
        if plan.saving.mode == "steps":
            raise ValueError(f"{self.place[0]} can't save every step; use saveat.")
        if plan.method.value.sensealg == "InterpolatingAdjoint":
            raise ValueError(
                f"{self.place[0]} can't keep the forward solution that InterpolatingAdjoint() "
                "follows back: leave sensealg out, or use BacksolveAdjoint()."
            )
        for row in of_kind("bound", "stops"):
            if getattr(plan.batched, row.name) is not None:
                raise ValueError(
                    f"{self.place[0]} of DiffEqGPU has no {row.option}: use EnsembleThreads()."
                )
        for row in but("state", "parameters", "constants", "flag"):
            may_differ = row.kind == "time" and self.place[0] != "EnsembleGPUArray"
            if getattr(plan.batched, row.name) and not may_differ:
                raise ValueError(
                    f"{self.place[0]} shares {row.option} among all trajectories, and prob_func "
                    "makes it depend on the index. Use EnsembleThreads()."
                )

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


def executor_for(ensemblealg: Any) -> InJulia | None:
    """**Raises:** `ValueError` for an ensemble algorithm that Julia doesn't have."""
    if isinstance(ensemblealg, EnsembleColumns) or getattr(ensemblealg, "cluster", None):
        return None
    return InJulia(methods.place(ensemblealg, lambda: session.start().threads))


_solve = jit_recent(solve_lanes)


@jit_recent
def _finish(plan, written, lanes, indices, repeat, key, output_consts):
    result = result_of(plan, lanes, written, indices.shape[0])
    return finish_lanes(plan, result, lanes, indices, repeat, key, output_consts)
