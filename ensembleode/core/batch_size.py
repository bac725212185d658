"""How many trajectories make a batch."""

import math

from ..ground.placement import default_device, HOST, share_of_memory
from .executor import Executor
from .job import Job


# Bytes of a batch. On the CPU a lockstep loop over more than the cache holds takes several times
# longer for each trajectory.
_CACHE = 2**20
_LEAST = 256  # trajectories, below which the cost of starting a batch shows
# Programs that factorise matrices take seconds to compile. One serves all ensembles, with batches
# that are filled up, and narrow enough for that to be cheap; another those that would be more than
# so many of these, wider and so faster by a quarter.
_NARROW, _FEW = (32, 128), 16


def default_batch_size(job: Job, executor: Executor, trajectories: int) -> int:
    """How many trajectories make a batch, from an estimate of their memory.

    On the CPU, what fits the cache where the executor is vectorised, and 256 MiB otherwise; on an
    accelerator a quarter of its memory. Batches are of equal size but for the last; those of an
    implicit method, on the CPU, of one size whatever the number of trajectories.
    """
    u0 = job.plan.state
    state = max(1, math.prod(u0.shape))
    rows = job.plan.saving.rows or 256
    # Stages twice over (XLA keeps old and new), or the Jacobian of an implicit method.
    factorises = job.plan.engine.factorises(job.plan)
    stages = None if factorises else job.plan.method.value.stages
    work = 2 * (stages or state + 8) + 16
    step_bytes = u0.dtype.itemsize * state * work
    all_bytes = step_bytes + u0.dtype.itemsize * state * rows
    device = default_device()
    if device.platform == "cpu":
        most = max(1, HOST // all_bytes)
        if executor.vectorised and not job.plan.engine.chunked:
            fitting = _CACHE // step_bytes
            if factorises and not job.traced:
                narrow = 2 ** int(math.log2(min(max(fitting, _NARROW[0]), _NARROW[1])))
                wide = max(_LEAST, fitting)
                return min(most, narrow if trajectories <= _FEW * narrow else wide)
            most = min(most, max(_LEAST, fitting))
    else:
        most = max(1, share_of_memory(device) // all_bytes)
    return math.ceil(trajectories / math.ceil(trajectories / most))
