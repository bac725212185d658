"""A run of a job: batch by batch, and reruns of those trajectories for which `output_func` asks."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array

from ..ground.keys import as_before, raw
from ..ground.retcode import is_successful, ReturnCode
from ..plan.plan import Outcome
from ..problem.ensemble import EnsembleAlgorithm
from ..problem.problem import EnsembleProblem
from ..solution.solution import EngineChoice
from . import tuning
from .batch_size import default_batch_size
from .every_event import check_room, lacks_room, of_whole, with_more_room
from .every_step import count_steps
from .executor import Executor
from .interrupts import check
from .job import cause_of, integers, Job, may_rerun, UnfinishedBatch


class Run(NamedTuple):
    """A job of `n` trajectories, with the executor and the options by which it is run.

    - `batch_size`: how many trajectories are solved at a time; None until that is decided (see
        `size`).
    - `started`: the start of the run, in seconds of `time.perf_counter`.
    """

    job: Job
    ens: EnsembleProblem
    ensemblealg: EnsembleAlgorithm
    executor: Executor
    choice: EngineChoice
    n: int
    batch_size: int | None
    max_repeats: int
    progress: bool
    store: Any
    store_key: str | None
    started: float

    @property
    def size(self) -> int:
        """The size of batches: the one that was given, or one that fits the memory. With a progress
        bar there are at least twenty batches."""
        if self.batch_size is not None:
            return self.batch_size
        size = default_batch_size(self.job, self.executor, self.n)
        if self.progress and self.executor.vectorised:
            size = min(size, -(-self.n // 20))
        return size

    def solve(self, wanted: np.ndarray) -> Outcome:
        """The outcome of these trajectories.

        **Raises:** `UnfinishedBatch`, with the outcome so far, if the run is stopped.
        """
        try:
            outcome = self._once(wanted, 1, self.size)
        except UnfinishedBatch as e:
            if e.outcome.rerun is None:
                raise
            raise UnfinishedBatch(e.outcome, e.done & ~e.outcome.rerun, e.cause) from None
        if outcome.rerun is not None:
            outcome = self._again(wanted, outcome)
        self._report(outcome)
        return outcome

    def solve_traced(self, indices: Array) -> Outcome:
        """`solve` as one traced program."""
        job, executor = self.job, self.executor
        first = executor.run(job, indices, 1)
        if first.rerun is None:
            return first

        def again(outcome, repeat):
            def redo():
                new = executor.run(job, indices, repeat)

                def pick(old, new):
                    mask = outcome.rerun.reshape(-1, *(1,) * (old.ndim - 1))
                    return jnp.where(mask, new, old)

                return jax.tree.map(pick, outcome, new)

            return jax.lax.cond(jnp.any(outcome.rerun), redo, lambda: outcome), None

        outcome, _ = jax.lax.scan(again, first, integers(np.arange(2, self.max_repeats + 1)))
        return _give_up(outcome, jnp)

    def solve_into(self, gather: Any, wanted: np.ndarray) -> Outcome:
        """Solve these trajectories, and hand them to `gather` in parts if the executor returns
        parts."""
        if not hasattr(gather, "part") or may_rerun(self.job.plan):
            return self.solve(wanted)
        sink = functools.partial(gather.part, wanted)
        return self._replace(job=dataclasses.replace(self.job, sink=sink)).solve(wanted)

    def total(self, wanted: np.ndarray) -> tuple[Any, Outcome]:
        """The sum of the outputs of these trajectories, added up where they were computed; and
        their return codes and counts."""
        indices = integers(wanted)
        u, outcome = self.executor.total(self.job, indices)
        job = self.job
        while (job := with_more_room(job, outcome)) is not None:
            u, outcome = self.executor.total(job, indices)
        self._report(outcome)
        return u, outcome

    def _once(self, wanted: np.ndarray, repeat: int, size: int) -> Outcome:
        job, executor = self.job, self.executor
        missing = size - len(wanted) if executor.fills_up(job.plan) else 0
        # (NumPy arrays, since jitted functions accept these faster.)
        indices = np.pad(wanted, (0, missing), mode="edge")
        indices = indices.astype(jax.dtypes.canonicalize_dtype(int))
        if not job.plan.saving.rows:
            job = count_steps(job, executor, indices, repeat)
        while True:
            try:
                outcome = executor.run(of_whole(job), indices, repeat)
            except UnfinishedBatch as e:
                done = e.done & ~lacks_room(job, e.outcome)
                raise UnfinishedBatch(e.outcome, done, e.cause) from None
            more = with_more_room(job, outcome)
            if more is None:
                break
            job = more
        if missing:
            # (On the host, since JAX would compile a program for each length.)
            first = slice(len(wanted))
            outcome = jax.tree.map(lambda x: as_before(x, np.asarray(raw(x))[first]), outcome)
        check(job, outcome)
        return outcome

    def _again(self, wanted: np.ndarray, outcome: Outcome) -> Outcome:
        first, outcome = outcome, jax.tree.map(lambda x: np.array(raw(x)), outcome)
        # However many trajectories are left, batches have one of two sizes, so that two programs
        # suffice.
        small = self.size
        if self.executor.fills_up(self.job.plan):
            small = min(max(self.size // tuning.FEW_RERUNS**2, self.job.plan.width), self.size)
        for repeat in range(2, self.max_repeats + 1):
            pending = np.flatnonzero(outcome.rerun)
            if not len(pending):
                break
            size = small if len(pending) <= tuning.FEW_RERUNS * small else self.size
            for part in np.split(pending, range(size, len(pending), size)):
                try:
                    again = self._once(wanted[part], repeat, size)
                except (UnfinishedBatch, KeyboardInterrupt) as e:
                    done = ~outcome.rerun
                    outcome = jax.tree.map(as_before, first, outcome)
                    raise UnfinishedBatch(outcome, done, cause_of(e)) from None
                for old, new in zip(jtu.tree_leaves(outcome), jtu.tree_leaves(again), strict=True):
                    new = np.asarray(raw(new))
                    check_room(old.shape[1:], new.shape[1:])
                    old[part] = new
        return jax.tree.map(as_before, first, _give_up(outcome, np))

    def _report(self, outcome: Outcome) -> None:
        if self.job.report is not None and not self.executor.reports:
            self.job.report(np.asarray(outcome.retcode))


def _give_up(outcome: Outcome, np_: Any) -> Outcome:
    """The outcome in which trajectories that still ask for a rerun count as failed."""
    unsettled = outcome.rerun & is_successful(outcome.retcode)
    failure = np_.asarray(ReturnCode.Failure.value, outcome.retcode.dtype)
    return outcome._replace(retcode=np_.where(unsettled, failure, outcome.retcode), rerun=None)
