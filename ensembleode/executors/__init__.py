"""Executors, which run trajectories where an ensemble algorithm says.

A new ensemble algorithm is a class in `ensembleode.problem.ensemble`, a subclass of
`running.executor.Executor` in a module here, and a line in `EXECUTORS`, which makes the executor
for an engine.
"""

from collections.abc import Callable
from typing import Any

from ..engines import Engine
from ..problem import ensemble
from ..problem.ensemble import EnsembleAlgorithm
from ..running.executor import Executor
from . import columns, distributed, kernel, serial, sharded


EXECUTORS: dict[type, Callable[[Any, Engine], Executor]] = {
    ensemble.EnsembleSerial: lambda *_: serial.SerialExecutor(),
    ensemble.EnsembleThreads: sharded.threads,
    ensemble.EnsembleColumns: lambda *_: columns.ColumnsExecutor(),
    ensemble.EnsembleGPUArray: sharded.arrays,
    ensemble.EnsembleGPUKernel: kernel.executor,
    ensemble.EnsembleDistributed: distributed.executor,
    ensemble.EnsembleSplitThreads: distributed.executor,
}


def executor_for(ensemblealg: EnsembleAlgorithm | None, engine: Engine) -> Executor:
    """The executor of an ensemble algorithm with an engine. Raises `TypeError` for an object that
    is no ensemble algorithm, and `ValueError` for a backend of Julia with another engine, or for
    devices that don't exist."""
    if (
        not isinstance(ensemblealg, ensemble.EnsembleAlgorithm)
        or type(ensemblealg) not in EXECUTORS
    ):
        hint = "; give an instance, with ()" if isinstance(ensemblealg, type) else ""
        raise TypeError(
            f"ensemblealg must be one of {', '.join(c.__name__ + '()' for c in EXECUTORS)}, got "
            f"{ensemblealg!r}{hint}."
        )
    own = engine.executor(ensemblealg)
    backend = getattr(ensemblealg, "backend", None)
    if own is None and backend is not None:
        name = type(ensemblealg).__name__
        raise ValueError(
            f"{name}(backend={backend!r}) names a package of Julia, and the {engine.name} engine "
            f"solves this: pass engine='julia' to solve, or eo.{name}(), which takes JAX's devices."
        )
    return EXECUTORS[type(ensemblealg)](ensemblealg, engine) if own is None else own
