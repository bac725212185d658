"""EnsembleDistributed and EnsembleSplitThreads: the trajectories of a batch on other processes.

- `requests.py`: the requests to workers, as differentiable primitives; `forms.py`: the computations
    that are requested.
- `programs.py`: these computations as programs over chunks; `worker.py`: runs them.
- `pools.py`: the pools that take tasks (Dask, or a `concurrent.futures` executor); `local.py`:
    clusters on this computer, and the pool of an ensemble algorithm.
- `dispatch.py`: from a batch to tasks and back, and the handling of failures.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...plan.plan import Outcome, Plan
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem.ensemble import EnsembleDistributed, EnsembleSplitThreads
from ...running.executor import Executor
from ...running.interrupts import looking_at
from ...running.job import integers, Job, UnfinishedBatch
from ...tracing.program import is_tracer
from . import local
from .dispatch import BatchResults
from .forms import form_of, SentArrays
from .pools import Pool
from .programs import numbers_of, pickled
from .requests import fail_lost, FormRequest


@dataclasses.dataclass(frozen=True)
class DistributedExecutor(Executor):
    """The executor on the workers of a pool.

    - `threads`: the number of threads of each worker.
    - `costs`: the cost of each trajectory, `[trajectory]`; None where it isn't known.
    - `notes`: what happened to trajectories, apart from numerics; `lost`: the trajectories whose
        workers died.
    """

    pool: Pool
    threads: int
    costs: Any = None
    notes: list = dataclasses.field(default_factory=list)
    lost: set = dataclasses.field(default_factory=set)

    reports = True
    totals = True
    local = False

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        request, numbers, costs = self._prepared("solve", job, indices, repeat)
        if job.traced:
            return request.in_program(numbers, costs)[0]
        if not (isinstance(repeat, int) and repeat == 1):
            job = dataclasses.replace(job, report=None, sink=None)
        outcome, _, results = request.now(numbers, costs, self._seen(job, indices))
        self._note(outcome, results, indices)
        if results.cause is not None:
            raise UnfinishedBatch(outcome, results.done, results.cause) from None
        return outcome

    def total(self, job: Job, indices: Array) -> tuple[Any, Outcome]:
        """The sum of the outputs over these trajectories, and their return codes and counts.
        Workers add up the outputs of their trajectories; where this is differentiated, they return
        the gradient of that sum, too, and never their trajectories."""
        request, numbers, costs = self._prepared("total", job, indices, 1)
        if job.traced:
            counts, total = request.in_program(numbers, costs)
            return total, counts
        each, parts, results = request.now(numbers, costs, self._seen(job, indices))
        if results.cause is not None:
            raise results.cause
        self._note(each, results, indices)
        return jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), parts), each

    def _seen(self, job: Job, indices: Array | np.ndarray) -> Callable:
        """A function that is called with the results so far, and the rows that are new in them."""

        def seen(outcome, results, rows):
            self._note(outcome, results, indices)
            if job.report is not None:
                job.report(outcome.retcode[rows])
            if job.sink is not None:
                job.sink(outcome, results.done)

        return seen

    def _prepared(
        self, kind: str, job: Job, indices: Array | np.ndarray, repeat: Any
    ) -> tuple[FormRequest, SentArrays, Any]:
        if not job.traced and job.plan.engine.is_stoppable():
            job = looking_at(job, None)  # each worker has its own flag
        lanes = job.trajectories.lanes(indices, repeat)
        costs = self._costs(job.plan, lanes, indices)
        numbers = numbers_of(
            lanes, job.plan.batched, indices, integers(repeat), job.key, job.output_consts
        )
        pickle = functools.partial(pickled, make=job.make, arguments=job.arguments)
        numbers = jax.tree.map(jnp.asarray, numbers)
        form = form_of(kind, job.plan, numbers)
        return FormRequest(self.pool, self.threads, form, indices.shape[0], pickle), numbers, costs

    def _note(self, outcome: Outcome, results: BatchResults, indices: Array | np.ndarray) -> None:
        fail_lost(outcome, results)
        for rows, why in results.lost:
            which = np.asarray(indices)[rows].tolist()
            if not self.lost.issuperset(which):
                self.notes.append(f"trajectories {which[0]} to {which[-1]} are lost: {why}")
            self.lost.update(which)

    def _costs(
        self, plan: Plan, lanes: TrajectoryNumbers, indices: Array | np.ndarray
    ) -> Array | None:
        """The cost of each trajectory of the batch, if it is known."""
        if self.costs is not None:
            if not is_tracer(indices) and np.max(indices) >= len(self.costs):
                raise ValueError(
                    f"costs are those of {len(self.costs)} trajectories, and there are more: give "
                    "one for each."
                )
            return jnp.asarray(self.costs)[indices]
        if not (plan.batched.t0 or plan.batched.t1):
            return None
        return jax.lax.stop_gradient(jnp.abs(jnp.asarray(lanes.t1) - jnp.asarray(lanes.t0)))


def executor(
    ensemblealg: EnsembleDistributed | EnsembleSplitThreads, engine: Any
) -> DistributedExecutor:
    """Raises `ImportError` if Dask is needed and missing, `ClusterError` for an unreachable
    cluster."""
    pool = local.pool_of(ensemblealg)
    pool.open()
    return DistributedExecutor(pool, ensemblealg._sizes()[1], ensemblealg.costs)
