"""The interface of executors. An executor runs the trajectories of a batch, as the ensemble
algorithm says."""

import abc
from collections.abc import Sequence, Set
from typing import Any, ClassVar

import jax
import numpy as np

from ..plan.plan import Outcome, Plan
from .job import Job


class Executor(abc.ABC):
    """Runs trajectories.

    - `vectorised`: whether a batch is stepped together, with independent trajectories. A batch
        should then fit the cache.
    - `reports`: whether the executor itself calls `job.report` and `job.sink` as trajectories are
        done.
    - `totals`: whether it has `total`.
    - `local`: whether trajectories are solved in this process.
    - `how`: the text by which solutions describe the executor, besides the engine.
    - `notes`: texts on what happened to trajectories, apart from numerics.
    - `lost`: the indices of the trajectories whose workers died.
    """

    vectorised: ClassVar[bool] = False
    reports: ClassVar[bool] = False
    totals: ClassVar[bool] = False
    local: ClassVar[bool] = True

    how: str = ""
    notes: Sequence[str] = ()
    lost: Set[int] = frozenset()

    def check(self, plan: Plan) -> None:
        """**Raises:** `ValueError` for a plan that this ensemble algorithm can't carry out."""
        del plan

    def fills_up(self, plan: Plan) -> bool:
        """Whether a batch that is shorter than others is filled up with copies of a trajectory, so
        that it needs no program of its own."""
        return self.vectorised

    @abc.abstractmethod
    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        """Solve these trajectories, eagerly or while being traced.

        **Raises:** `UnfinishedBatch` if it is stopped when some trajectories are done.
        """

    def run_one(self, job: Job, index: Any, repeat: Any) -> Outcome:
        """Solve one trajectory, without an axis of trajectories."""
        return jax.tree.map(lambda x: x[0], self.run(job, np.asarray(index)[None], repeat))

    def total(self, job: Job, indices: Any) -> tuple[Any, Outcome]:
        """The sum of the outputs over these trajectories, added up where they were computed (on a
        worker, for example), and the return code and the counts of each."""
        raise NotImplementedError
