"""How many saved steps results have room for, where every step is saved."""

import dataclasses
import math
from typing import Any

import numpy as np
from jax import Array

from ..plan.saving import Saving
from .executor import Executor
from .interrupts import check
from .job import Job, UnfinishedBatch, with_output


def count_steps(job: Job, executor: Executor, indices: Array | np.ndarray, repeat: Any) -> Job:
    """The job with room for as many saved steps as a first solve, which is done here, takes."""
    ends = dataclasses.replace(job, report=None, sink=None)
    try:
        plain = ends.replan(saving=Saving("ends", False, 1), saves_values=False)
        counts = executor.run(plain, indices, repeat)
        check(job, counts)
    except UnfinishedBatch as e:  # the first solve has no states to keep
        raise e.cause from None
    most = int(np.max(np.asarray(counts.naccept) + np.asarray(counts.nreject)))
    # A little more, as the program that saves steps is a different one, and may round differently.
    room = 2 ** math.ceil(math.log2(max(16, most + most // 16 + 1)))
    room = min(room, job.plan.maxiters)
    return bounded(job, room)


def bounded(job: Job, steps: int) -> Job:
    """The job with room for this many saved steps."""
    rows = steps if job.plan.events is None else 2 * steps  # (with the states after events)
    saving = job.plan.saving._replace(rows=rows + job.plan.saving.start)
    return with_output(job.replan(saving=saving, maxiters=steps))
