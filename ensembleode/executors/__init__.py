"""Where trajectories run.

An executor is a module or an object with

- `vectorised`: whether a batch is stepped together, trajectory by trajectory independently: then
  a batch had better fit the cache, and a short last one is filled up with copies (so that it needs
  no program of its own);
- `check(plan)`: raises `ValueError` for what this ensemble algorithm can't do;
- `run(job, indices, repeat) -> Outcome`: solves those trajectories, eagerly or being traced;
- `run_one(job, index, repeat) -> Outcome`, where a problem is solved on its own;
- `reports`, only where it is true: it calls `job.report` itself, as trajectories are done;
- `how`, only where solutions say more of it than which engine ran;
- `total(job, indices) -> (sum, Outcome)`, only where it can add up the outputs where they are.

An executor that is stopped raises `Unfinished`, if something is done already.

A new ensemble algorithm is a class in `ensembleode.ensemble`, a module here and a line in
`EXECUTORS`, which makes the executor for an engine.
"""

from collections.abc import Callable
from typing import Any

from ..ensemble import (
    EnsembleAlgorithm,
    EnsembleColumns,
    EnsembleDistributed,
    EnsembleGPUArray,
    EnsembleGPUKernel,
    EnsembleSerial,
    EnsembleSplitThreads,
    EnsembleThreads,
)
from . import columns, distributed, kernel, serial, sharded


EXECUTORS: dict[type, Callable[[Any, Any], Any]] = {
    EnsembleSerial: lambda *_: serial,
    EnsembleThreads: sharded.threads,
    EnsembleColumns: lambda *_: columns,
    EnsembleGPUArray: sharded.arrays,
    EnsembleGPUKernel: kernel.executor,
    EnsembleDistributed: distributed.executor,
    EnsembleSplitThreads: distributed.executor,
}


def executor_for(ensemblealg: Any, engine: Any) -> Any:
    """The executor of an ensemble algorithm with an engine.

    **Raises:** `TypeError` for anything that is not one; what the executor raises for devices that
    are not there.
    """
    if not isinstance(ensemblealg, EnsembleAlgorithm) or type(ensemblealg) not in EXECUTORS:
        hint = "; give an instance, with ()" if isinstance(ensemblealg, type) else ""
        raise TypeError(
            f"ensemblealg must be one of {', '.join(c.__name__ + '()' for c in EXECUTORS)}, got "
            f"{ensemblealg!r}{hint}."
        )
    own = engine.executor(ensemblealg) if hasattr(engine, "executor") else None
    return EXECUTORS[type(ensemblealg)](ensemblealg, engine) if own is None else own
