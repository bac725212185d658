"""EnsembleSerial: one trajectory after the other; also for a single problem."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.typing import ArrayLike

from ..ground.recent import jit_recent
from ..plan.plan import Outcome, Plan
from ..running.executor import Executor
from ..running.interrupts import finished
from ..running.job import Job, solve_lane, UnfinishedBatch
from .places import brought_here
from .sharded import DevicesExecutor


class SerialExecutor(Executor):
    """Solves one trajectory at a time; in engines that loop over trajectories themselves, on one
    thread."""

    def fills_up(self, plan: Plan) -> bool:
        return plan.engine.shares_work

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        if job.plan.engine.shares_work:
            return DevicesExecutor().run(job, indices, repeat)
        if job.traced:
            lanes = job.trajectories.lanes(indices, repeat)
            return _solve_in_turn(job.plan, lanes, indices, repeat, job.key, job.output_consts)
        each: list[Outcome] = []

        def stacked():
            return jax.tree.map(lambda *leaves: np.stack(leaves), *each)

        try:
            for index in np.asarray(indices):
                outcome = self.run_one(job, index, repeat)
                each.append(jax.device_get(outcome))
        except KeyboardInterrupt as e:
            if not each:
                raise
            done = np.arange(len(indices)) < len(each)
            each += [each[0]] * np.count_nonzero(~done)
            raise UnfinishedBatch(stacked(), done, e) from None
        return stacked()

    def run_one(self, job: Job, index: ArrayLike, repeat: Any) -> Outcome:
        """Solve one trajectory by the program for a single problem."""
        lane = job.trajectories.lane(index, repeat)
        numbers = (lane, index, repeat, job.key, job.output_consts)
        return finished(job, _solve, job.plan, *brought_here(numbers))


_solve = jit_recent(solve_lane)


@jit_recent
def _solve_in_turn(plan, lanes, indices, repeat, key, output_consts):
    # If all numbers were constants, XLA would run the loop while compiling it, very slowly.
    lanes = lanes._replace(u0=jax.lax.optimization_barrier(lanes.u0))
    each, shared = eqx.partition(lanes, plan.batched)

    def one(lane_and_index):
        lane, index = lane_and_index
        return solve_lane(plan, eqx.combine(lane, shared), index, repeat, key, output_consts)

    return jax.lax.map(one, (each, indices))
