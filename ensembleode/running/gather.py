"""Batches, collected into arrays on the host."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike

from ..plan.plan import fill_of, Outcome
from .every_step import bounded
from .job import blank, integers, Job, solve_lanes, UnfinishedBatch


class BatchGatherer:
    """Collects batches into arrays on the host."""

    def __init__(self, trajectories: int):
        self.trajectories = trajectories
        self.leaves: list[np.ndarray] = []
        self.structure: Any = None

    @property
    def empty(self) -> bool:
        return not self.leaves

    def missing(self, batch_size: int):
        return ranges(self.trajectories, batch_size)

    def add(self, wanted: np.ndarray, outcome: Outcome) -> None:
        leaves, self.structure = jtu.tree_flatten_with_path(outcome)
        fills = [fill_of(path, x.dtype) for path, x in leaves]
        leaves = [np.asarray(x) for _, x in leaves]
        if not self.leaves:
            self.leaves = [
                blank((self.trajectories, *x.shape[1:]), x.dtype, fill)
                for x, fill in zip(leaves, fills, strict=True)
            ]
        for i, (new, fill) in enumerate(zip(leaves, fills, strict=True)):
            self.leaves[i] = _fit(self.leaves[i], new, fill)
            rows = tuple(slice(0, n) for n in new.shape[1:])
            self.leaves[i][(wanted, *rows)] = new

    def ensemble(
        self, job: Job, stopped: BaseException | None = None, wanted: Any = None
    ) -> Outcome:
        """All that was collected, including those trajectories of a `stopped` batch that were
        done."""
        if isinstance(stopped, UnfinishedBatch):
            done = stopped.done
            outcome = jax.tree.map(lambda x: x[done], stopped.outcome._replace(rerun=None))
            self.add(wanted[done], outcome)
        if self.empty:
            one = outcome_of_one(job)._replace(rerun=None)
            self.add(np.arange(0), jax.tree.map(lambda x: np.zeros((0, *x.shape), x.dtype), one))
        outcome = jtu.tree_unflatten(self.structure, self.leaves)
        return outcome._replace(converged=stopped is None)


def ranges(trajectories: int, batch_size: int) -> Iterator[np.ndarray]:
    """The indices of the trajectories, batch after batch."""
    for start in range(0, trajectories, batch_size):
        yield np.arange(start, min(start + batch_size, trajectories))


def outcome_of_one(job: Job) -> Outcome:
    """The shapes and dtypes of the outcome of one trajectory."""
    if not job.plan.saving.rows:
        job = bounded(job, 1)
    plan, indices = job.plan, integers(np.arange(1))

    def solve(lanes):
        return solve_lanes(plan, lanes, indices, 1, job.key, job.output_consts)

    one = jax.eval_shape(solve, job.trajectories.lanes(indices, 1))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), one)


def _fit(full: np.ndarray, new: np.ndarray, fill: ArrayLike) -> np.ndarray:
    """The array `full`, enlarged if the batch `new` saved more steps, or had more events, than
    those before it."""
    shape = (len(full), *map(max, full.shape[1:], new.shape[1:]))
    if shape == full.shape:
        return full
    larger = blank(shape, full.dtype, fill)
    larger[tuple(map(slice, full.shape))] = full
    return larger
