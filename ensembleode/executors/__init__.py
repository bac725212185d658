"""Where trajectories run.

An executor is a module or an object with

- `vectorised`: whether a batch is stepped together, trajectory by trajectory independently: then
  a batch had better fit the cache, and a short last one is filled up with copies (so that it needs
  no program of its own);
- `check(plan)`: raises `ValueError` for what this ensemble algorithm can't do;
- `run(job, indices, repeat) -> Outcome`: solves those trajectories, eagerly or being traced;
- `run_one(job, index, repeat) -> Outcome`, where a problem is solved on its own;
- `reports`, only where it is true: it calls `job.report` itself, as trajectories are done;
- `total(job, indices) -> (sum, Outcome)`, only where it can add up the outputs where they are.

An executor that is stopped raises `Unfinished`, if something is done already.

A new ensemble algorithm is a class in `ensembleode.ensemble`, a module here and a line in
`EXECUTORS`, which makes the executor.
"""

from collections.abc import Callable
from typing import Any

from ..ensemble import (
    EnsembleAlgorithm,
    EnsembleColumns,
    EnsembleDistributed,
    EnsembleGPUArray,
    EnsembleSerial,
    EnsembleSplitThreads,
    EnsembleThreads,
)
from . import columns, distributed, serial, sharded


EXECUTORS: dict[type, Callable[[Any], Any]] = {
    EnsembleSerial: lambda _: serial,
    EnsembleThreads: sharded.threads,
    EnsembleColumns: lambda _: columns,
    EnsembleGPUArray: sharded.arrays,
    EnsembleDistributed: distributed.executor,
    EnsembleSplitThreads: distributed.executor,
}


def executor_for(ensemblealg: Any, engine: Any) -> Any:
    """The executor of an ensemble algorithm with an engine.

    **Raises:** `TypeError` for anything that is not one; `ValueError` for one that this engine has
    not got; what the executor raises for devices that are not there.
    """
    if not isinstance(ensemblealg, EnsembleAlgorithm):
        hint = "; give an instance, with ()" if isinstance(ensemblealg, type) else ""
        raise TypeError(
            f"ensemblealg must be one of {', '.join(c.__name__ + '()' for c in EXECUTORS)}, got "
            f"{ensemblealg!r}{hint}."
        )
    own = engine.executor(ensemblealg) if hasattr(engine, "executor") else None
    if own is not None:
        return own
    make = EXECUTORS.get(type(ensemblealg))
    if make is None:
        raise ValueError(
            f"{type(ensemblealg).__name__}() runs with engine='julia' only, and the engine is "
            f"{engine.name!r}."
        )
    return make(ensemblealg)
