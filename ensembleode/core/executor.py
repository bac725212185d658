"""What an executor is: it runs the trajectories of a batch where its ensemble algorithm says."""

import abc
from collections.abc import Sequence, Set
from typing import Any, ClassVar

import jax
import numpy as np

from .job import Job
from .plan import Outcome, Plan


class Executor(abc.ABC):
    """Where trajectories run.

    - `vectorised`: whether a batch is stepped together, trajectory by trajectory independently.
        Then a batch had better fit the cache, and a short last one is filled up with copies, so
        that it needs no program of its own.
    - `reports`: whether it calls `job.report` and `job.sink` itself, as trajectories are done.
    - `totals`: whether it has `total`.
    - `local`: whether trajectories are solved in this process.
    - `how`: what solutions say of it, besides which engine ran.
    - `notes`: what happened to trajectories, besides numerics.
    - `lost`: the indices of the trajectories that workers died of.
    """

    vectorised: ClassVar[bool] = False
    reports: ClassVar[bool] = False
    totals: ClassVar[bool] = False
    local: ClassVar[bool] = True

    how: str = ""
    notes: Sequence[str] = ()
    lost: Set[int] = frozenset()

    def check(self, plan: Plan) -> None:
        """**Raises:** `ValueError` for what this ensemble algorithm can't do."""
        del plan

    @abc.abstractmethod
    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        """Solve these trajectories, eagerly or while being traced.

        **Raises:** `Unfinished` when it is stopped and something is done already.
        """

    def run_one(self, job: Job, index: Any, repeat: Any) -> Outcome:
        """Solve one trajectory, without an axis of trajectories."""
        return jax.tree.map(lambda x: x[0], self.run(job, np.asarray(index)[None], repeat))

    def total(self, job: Job, indices: Any) -> tuple[Any, Outcome]:
        """The sum of the outputs over these trajectories, added up where they were computed (on a
        worker, say), and the return codes and counts of each."""
        raise NotImplementedError
