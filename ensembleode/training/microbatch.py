"""The size of microbatches: the number of items that a device can compute with at a time."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import Array

from ..ground.logs import logger
from .step import TrainingState, UpdateStep


# The fraction of the free memory that a step may take.
SHARE = 0.8


def out_of_memory(error: BaseException) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def that_fits(
    step: UpdateStep, state: TrainingState, batch: Any, key: Array, number: Array
) -> UpdateStep:
    """The step with the largest microbatch that fits into memory, according to the compiler."""
    free = free_bytes(next(iter(batch.place.devices())))
    if free is None:
        return step
    while True:
        compiled = step.compiled.lower(state, batch, key, number).compile()
        used = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
        if used <= SHARE * free or _size(step, batch) == 1:
            return step
        # The memory is proportional to the microbatch, except for a constant part.
        times = 2 ** int(np.ceil(np.log2(max(2.0, used / (SHARE * free)))))
        size = max(1, _size(step, batch) // times)
        step = dataclasses.replace(step, microbatch=size)
        logger.info(
            f"a step would take {used / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free: "
            f"microbatch={size}."
        )


def smaller(step: UpdateStep, batch: Any, error: BaseException) -> UpdateStep:
    """The step with half the microbatch. **Raises:** `error`, where it can't be halved."""
    size = _size(step, batch)
    if size == 1:
        raise error
    step = dataclasses.replace(step, microbatch=size // 2)
    logger.warning("out of memory with %d items at a time: microbatch=%d.", size, step.microbatch)
    return step


def _size(step: UpdateStep, batch: Any) -> int:
    rows = batch.place.shape[0] // step.placement.size
    return rows if step.microbatch is None else min(step.microbatch, rows)


def free_bytes(device: jax.Device) -> int | None:
    """The bytes that are free on a device; None where that isn't known."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
    except FileNotFoundError:
        return None
    return int(sizes["MemAvailable"].split()[0]) * 1024
