"""How many trajectories make a batch."""

import math

from .executor import Executor
from .job import Job
from .placement import default_device, HOST, share_of_memory


# Bytes of a batch. On the CPU a lockstep loop over more than the cache holds takes several times
# longer for each trajectory.
_CACHE = 2**20
_LEAST = 256  # trajectories, below which the cost of starting a batch shows


def default_batch_size(job: Job, executor: Executor, trajectories: int) -> int:
    """How many trajectories make a batch, from an estimate of their memory.

    On the CPU, what fits the cache where the executor is vectorised, and 256 MiB otherwise; on an
    accelerator a quarter of its memory. Batches are of equal size but for the last.
    """
    u0 = job.plan.state
    state = max(1, math.prod(u0.shape))
    rows = job.plan.saving.rows or 256
    # Stages twice over (XLA keeps old and new), or the Jacobian of an implicit method.
    work = 2 * (job.plan.method.value.stages or state + 8) + 16
    step_bytes = u0.dtype.itemsize * state * work
    all_bytes = step_bytes + u0.dtype.itemsize * state * rows
    device = default_device()
    if device.platform == "cpu":
        most = max(1, HOST // all_bytes)
        if executor.vectorised and not job.plan.engine.chunked:
            most = min(most, max(_LEAST, _CACHE // step_bytes))
    else:
        most = max(1, share_of_memory(device) // all_bytes)
    return math.ceil(trajectories / math.ceil(trajectories / most))
