"""Where trajectories run.

An executor is a module or an object with

- `vectorised`: whether a batch is stepped together, trajectory by trajectory independently: then
  a batch had better fit the cache, and a short last one is filled up with copies (so that it needs
  no program of its own);
- `check(plan)`: raises `ValueError` for what this ensemble algorithm can't do;
- `run(job, indices, repeat) -> Outcome`: solves those trajectories, eagerly or being traced.

A new ensemble algorithm is a class in `ensembleode.ensemble`, a module here and a line in
`EXECUTORS`, which makes the executor.
"""

from collections.abc import Callable
from typing import Any

from ..ensemble import EnsembleColumns, EnsembleGPUArray, EnsembleSerial, EnsembleThreads
from . import columns, serial, sharded


EXECUTORS: dict[type, Callable[[Any], Any]] = {
    EnsembleSerial: lambda _: serial,
    EnsembleThreads: sharded.threads,
    EnsembleColumns: lambda _: columns,
    EnsembleGPUArray: sharded.arrays,
}


def executor_for(ensemblealg: Any) -> Any:
    """The executor of an ensemble algorithm.

    **Raises:** `TypeError` for anything that is not one; what the executor raises for devices that
    are not there.
    """
    make = EXECUTORS.get(type(ensemblealg))
    if make is None:
        hint = "; give an instance, with ()" if isinstance(ensemblealg, type) else ""
        raise TypeError(
            f"ensemblealg must be one of {', '.join(c.__name__ + '()' for c in EXECUTORS)}, got "
            f"{ensemblealg!r}{hint}."
        )
    return make(ensemblealg)
