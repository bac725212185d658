"""Several processes that train together, each with devices of its own."""

import contextlib
import os
from collections.abc import Iterator

import jax
import numpy as np


class ProcessLost(RuntimeError):
    """A process that trains together with this one is gone."""


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    patience: int = 30,
) -> None:
    """Join the processes that run this script together. Call it before JAX computes anything.

    Under `mpirun` (Open MPI) and `srun` (Slurm), it needs no arguments. Processes that are started
    by hand have to pass theirs. It is a thin layer over `jax.distributed.initialize`. After it,
    [`fit`][ensembleode.fit] and [`predict`][ensembleode.predict] share the work out among all
    processes: each reads the same data and computes with its part of a batch on its own devices,
    and the gradients are added up by one all-reduce (by gloo on CPUs, NCCL on GPUs).

    Further calls do nothing.

    **Arguments:**

    - `coordinator`: the address of process 0, such as `"127.0.0.1:12345"`; by default
        `JAX_COORDINATOR_ADDRESS` from the environment.
    - `processes`, `process`: the number of processes, and the number of this one, from 0.
    - `patience`: the number of seconds without a sign of life after which a process counts as lost.

    **Raises:** `ValueError` where the arguments are missing and can't be found out; `RuntimeError`
    where JAX has started already.
    """
    if jax.distributed.is_initialized():
        return
    given = (coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"), processes, process)
    if None in given and given[1:] != (None, None):
        raise ValueError(
            "initialize wants all of coordinator, processes and process, or none of them (under "
            f"mpirun and srun): got coordinator={coordinator!r}, processes={processes!r}, "
            f"process={process!r}."
        )
    try:
        jax.distributed.initialize(
            *given, heartbeat_timeout_seconds=patience, shutdown_timeout_seconds=patience
        )
    except ValueError as e:
        raise ValueError(
            "nothing says which processes run together: start the script with mpirun or srun, or "
            "give initialize(coordinator='127.0.0.1:12345', processes=2, process=0), and "
            f"process=1 to the other. ({e})"
        ) from e
    except RuntimeError as e:
        if "before" not in str(e):
            raise
        raise RuntimeError(
            "initialize must be called before JAX computes anything or is asked for its devices: "
            "put it right after the imports."
        ) from e


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def from_first(value: bytes) -> bytes:
    """The value that the first process passes."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(value))))
    room = np.frombuffer(value, np.uint8) if is_first() else np.zeros(count, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(room)).tobytes()


@contextlib.contextmanager
def peers(what_then: str) -> Iterator[None]:
    """Turns errors that another process's loss causes into `ProcessLost`; `what_then` says what to
    do about it."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as e:  # ValueError is raised when dispatching
        known = ("Gloo", "NCCL", "Connection closed", "CoordinationService")
        if jax.process_count() == 1 or not any(x in str(e) for x in known):
            raise
        raise ProcessLost(
            f"a process that trains with this one (process {jax.process_index()} of "
            f"{jax.process_count()}) is gone: {str(e).splitlines()[0]}. {what_then}"
        ) from e
