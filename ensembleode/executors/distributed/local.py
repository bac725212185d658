"""The pool of an ensemble algorithm, and Dask clusters on this computer.

If the user gives no cluster, one is started when it is first needed. It is kept for the `with`
block of its ensemble algorithm, or until Python ends.
"""

import atexit
import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from typing import Any, TYPE_CHECKING

import jax

from ...ground.devices import cpu_devices
from ...ground.extras import installing
from .pools import ClusterError, Connection, DaskPool, ExecutorPool, Pool


if TYPE_CHECKING:
    from ...problem.ensemble import ClusterAlgorithm


_own: dict[Hashable, DaskPool] = {}
_POOL = "_ensembleode_pool"
# Options of a `LocalCluster`.
LOCAL: dict[str, Any] = {
    "threads_per_worker": 1,
    "host": "127.0.0.1",
    "dashboard_address": None,
    # The server of health checks starts anyway, by default on the same port for all clusters.
    "scheduler_kwargs": {"dashboard": False, "dashboard_address": "127.0.0.1:0"},
    "memory_limit": 0,
}


def worker_environment(threads: int = 1) -> dict[str, str]:
    """The environment variables with which workers compute the same as this process would.

    They are for workers that are started by hand or by a batch system: JAX reads them when it is
    imported.

    **Arguments:** `threads`: the number of threads of each worker.

    >>> import ensembleode as eo
    >>> eo.worker_environment(threads=4)["NPROC"]
    '4'
    """
    return {
        # One device, which the threads share, so that a program is compiled once.
        cpu_devices.VARIABLE: "1",
        # Workers compute on the CPU. If they started JAX on a GPU, each would take its memory.
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
        "JAX_ENABLE_X64": str(int(jax.config.jax_enable_x64)),  # pyright: ignore
        "NPROC": str(threads),
    }


def pool_of(ensemblealg: "ClusterAlgorithm") -> Pool:
    """The workers of an ensemble algorithm, already running or to be started. Raises `TypeError`
    for a `cluster` that is none."""
    cluster = ensemblealg.cluster
    if cluster is None:
        sizes = ensemblealg._sizes()
        # All numbers of a process have one precision, so it is a part of the key.
        key = *sizes, jax.config.jax_enable_x64  # pyright: ignore
        return _own.setdefault(key, DaskPool(functools.partial(_started, *sizes)))
    if isinstance(cluster, str):
        return _own.setdefault(cluster, DaskPool(functools.partial(_connected, cluster)))
    # The pool is kept as an attribute of the cluster, for as long as that exists.
    if not hasattr(cluster, _POOL):
        setattr(cluster, _POOL, _pool_on(cluster, ensemblealg.workers))
    pool = getattr(cluster, _POOL)
    if isinstance(pool, ExecutorPool):
        pool.resize(ensemblealg.workers)
    return pool


_RUN_AGAIN = (
    "EnsembleDistributed() starts processes, which run this script again to begin with: "
    'put what solves under `if __name__ == "__main__":`.'
)


def _is_unguarded() -> bool:
    """Whether new processes would run this process's script again, because nothing in it checks
    `__name__`. For a script from standard input, they are kept from looking for a file."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None:
        return False
    if not os.path.exists(path):
        del main.__file__
        return False
    with open(path, "rb") as file:
        return b"__main__" not in file.read()


def _started(workers: int, threads: int) -> Connection:
    """A cluster on this computer: loopback only, and without a dashboard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(_RUN_AGAIN)
    is_unguarded = _is_unguarded()
    dask, distributed = _dask()
    environment = worker_environment(threads) | {"PYTHONHASHSEED": "6640"}  # Dask's default
    settings = {
        "distributed.nanny.pre-spawn-environ": environment,
        # The profiler would need a core of its own.
        "distributed.worker.profile.enabled": False,
        "distributed.admin.system-monitor.interval": "10s",
        "distributed.admin.tick.interval": "1s",
        # A task that kills a worker twice is run again alone, and then given up.
        "distributed.scheduler.allowed-failures": 1,
    }
    logging.getLogger("distributed.nanny").addFilter(_is_of_interest)
    restore = set_aside(environment)
    cluster = None
    try:
        with dask.config.set(settings):
            cluster = _lasting(distributed.LocalCluster)(
                n_workers=workers,
                **LOCAL,
                # Ctrl-C is sent to all processes of a terminal, and this process handles it.
                preload=[
                    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
                    # Heartbeats fail while a cluster closes on a busy machine.
                    "import logging; logging.getLogger('distributed.worker').setLevel('ERROR')",
                ],
            )
        client = distributed.Client(cluster, set_as_default=False, direct_to_workers=True)
    except BaseException as e:
        if cluster is not None:
            cluster.close()
        if is_unguarded and isinstance(e, RuntimeError):
            raise RuntimeError(_RUN_AGAIN) from e
        raise
    finally:
        restore()

    def end():
        client.close()
        cluster.close()
        restore()

    return Connection(client, end, restore, patience=60.0, queued=2)


def _is_of_interest(record: logging.LogRecord) -> bool:
    """False for the log's records of workers that are killed because a busy machine delays them
    while their cluster closes."""
    return "still alive" not in record.getMessage()


def _lasting(LocalCluster: type) -> type:
    """A subclass of Dask's `LocalCluster` that never gives up a worker. (When a worker has died,
    Dask closes for good those that are missing 15 s later, even one that has died again and is
    being restarted.)"""
    import dask

    class Lasting(LocalCluster):
        def _update_worker_status(self, *what: Any) -> None:
            with dask.config.set({"distributed.deploy.lost-worker-timeout": "1000d"}):
                super()._update_worker_status(*what)

    return Lasting


def set_aside(environment: dict[str, str]) -> Callable[[], None]:
    """Remove these variables from this process's environment; returns a function that restores
    them. (Dask sets them in this process for each process that it starts, and prefers values that
    are set here to those that it is given.)"""
    before = {name: os.environ.pop(name, None) for name in environment}

    def restore():
        for name, value in before.items():
            if os.environ.get(name) not in (None, environment[name]):
                continue  # it has been set in the meantime
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return restore


def _connected(address: str) -> Connection:
    try:
        return _client_of(address)
    except (OSError, TimeoutError, ValueError) as e:
        raise ClusterError(
            f"there is no Dask scheduler at {address!r}: {e}. Give the address that it printed "
            "when it started, such as 'tcp://127.0.0.1:8786'."
        ) from e


def _pool_on(cluster: Any, workers: int | None) -> Pool:
    if isinstance(cluster, Executor):
        return ExecutorPool(cluster, workers)
    if hasattr(cluster, "scheduler_info") and hasattr(cluster, "submit"):
        if getattr(cluster, "asynchronous", False):
            raise TypeError(
                "EnsembleDistributed needs a synchronous Dask client; this one is asynchronous."
            )
        return DaskPool(lambda: Connection(cluster))
    if hasattr(cluster, "get_client"):
        return DaskPool(functools.partial(_client_of, cluster))
    raise TypeError(
        "cluster must be a Dask client or cluster, the address of a scheduler, or an executor of "
        f"concurrent.futures, got {type(cluster).__name__}."
    )


def _client_of(cluster: str) -> Connection:
    _, distributed = _dask()
    client = distributed.Client(cluster, set_as_default=False)
    return Connection(client, client.close)


def _dask() -> tuple[Any, Any]:
    try:
        import dask
        import distributed
    except ImportError as e:
        raise ImportError(
            f"EnsembleDistributed starts Dask workers: {installing('dask')}. (With "
            "engine='julia' it starts Julia's, and needs no Dask.)"
        ) from e
    _close_at_exit()
    return dask, distributed


@functools.cache
def _close_at_exit() -> None:
    """Close the workers when Python ends. (Functions that are registered last are called first, so
    this has to be called after Dask's import; Dask would close the workers with warnings.)"""
    atexit.register(_close_all)


def _close_all() -> None:
    for pool in _own.values():
        pool.close()
