"""The number of trajectories of a batch."""

import math

from ..ground.devices.placement import default_device, HOST, platform_of, share_of_memory
from ..plan.events import EVENT_ROWS
from . import tuning
from .executor import Executor
from .job import Job


def default_batch_size(job: Job, executor: Executor, trajectories: int) -> int:
    """The number of trajectories of a batch, from an estimate of their memory. On the CPU a batch
    takes as much memory as the cache has if the executor is vectorised, and 256 MiB otherwise; on
    an accelerator it takes a quarter of the memory."""
    u0 = job.plan.state
    state = max(1, math.prod(u0.shape))
    saved = (job.plan.saving.rows or 256) * math.prod(job.plan.row_shape)
    saved += EVENT_ROWS * job.plan.event_slots * state
    # The stages count twice, as XLA keeps old and new ones; for implicit methods, the Jacobian
    # counts.
    factorises = job.plan.engine.factorises(job.plan)
    stages = None if factorises else job.plan.method.value.stages
    work = 2 * (stages or state + 8) + 16
    step_bytes = u0.dtype.itemsize * state * work
    all_bytes = step_bytes + u0.dtype.itemsize * saved
    device = default_device()
    if platform_of(device) == "cpu":
        most = max(1, HOST // all_bytes)
        if executor.vectorised and not job.plan.engine.shares_work:
            fitting = tuning.BATCH_BYTES // step_bytes
            if factorises and not job.traced:
                narrow = 2 ** int(math.log2(min(max(fitting, tuning.NARROW[0]), tuning.NARROW[1])))
                wide = max(tuning.LEAST_BATCH, fitting)
                return min(
                    most, narrow if trajectories <= tuning.FEW_NARROW_BATCHES * narrow else wide
                )
            most = min(most, max(tuning.LEAST_BATCH, fitting))
    else:
        if job.traced and not job.plan.engine.closed:
            # diffrax keeps checkpoints of its loop for the way back.
            all_bytes += math.isqrt(2 * job.plan.maxiters) * 4 * u0.dtype.itemsize * state
        most = max(1, share_of_memory(device) // all_bytes)
    return math.ceil(trajectories / math.ceil(trajectories / most))
