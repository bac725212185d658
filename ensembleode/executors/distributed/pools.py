"""The pools that tasks are sent to: a Dask cluster, or any executor of `concurrent.futures`."""

# ruff: noqa: B027 (some pools have nothing to do in some of these methods)

import abc
import asyncio
import builtins
import collections
import concurrent.futures
import dataclasses
import functools
import pickle
import threading
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from ...solution.solution import EnsembleError
from .worker import keep, run, stop, Task


class ClusterError(EnsembleError):
    """The cluster can't go on; `solution` holds what was computed before (None inside `jit`)."""


@dataclasses.dataclass
class Traffic:
    """The traffic with the workers since they were first used.

    - `tasks`: how many tasks were done; `repeated`: how many had to be sent again.
    - `sent`, `received`: bytes.
    - `seconds`: the time spent solving, added up over the workers.
    - `compiled`: the number of programs compiled, added up over the workers.
    """

    tasks: int = 0
    repeated: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    compiled: int = 0

    def __sub__(self, before: "Traffic") -> "Traffic":
        return Traffic(
            *(getattr(self, x.name) - getattr(before, x.name) for x in dataclasses.fields(self))
        )


class WorkersDiedError(Exception):
    """A task was given up because the workers that ran it died."""


class Pool(abc.ABC):
    """Workers, and what is known about them.

    - `sent`: for each hash, how often the object was sent along with a task.
    - `queued`: the number of tasks under way for each slot, so that no worker waits for one.
    - `rates`: the seconds that a unit takes, by program; `given_up`: how many units were lost.
    """

    queued: Any = 2

    def __init__(self):
        self.traffic = Traffic()
        self.sent: collections.Counter = collections.Counter()
        self.rates: dict[Any, float] = {}
        self.given_up: collections.Counter = collections.Counter()

    def submit(self, task: Task) -> Any:
        """A future of the pickled answer to a task."""
        payload = pickle.dumps(task, protocol=5)
        self.traffic.sent += len(payload)
        return self._submit(run_pickled, payload)

    def deliver(self, things: dict[str, Any], to: str) -> None:
        """Send objects to the worker at this address, if it still exists, for its next tasks."""

    def result(self, future: Any, waiting: Callable[[], Any]) -> Any:
        """The answer to a task that is done. `waiting` is called from time to time until it is
        here, and its exceptions end that. Raises `WorkersDiedError`, `ClusterError` where the
        cluster can't go on, and any exception of a function that the program calls."""
        answer = self._result(future, waiting)
        self.traffic.received += len(answer)
        return pickle.loads(answer)

    def open(self) -> None:
        """Be ready for tasks. Raises `ClusterError` where the cluster can't be reached."""

    @abc.abstractmethod
    def slots(self) -> int:
        """How many tasks can run at a time. Raises `ClusterError` where the cluster is gone."""

    @abc.abstractmethod
    def cancel(self, futures: list) -> None:
        """Cancel the tasks of these futures, if that is possible."""

    def stop(self, work: str) -> None:
        """Have workers end the tasks of this work, if they can be reached."""

    def settle(self) -> None:
        """Clean up when a batch is done."""

    def close(self) -> None:
        """Release what was started for this pool."""

    @abc.abstractmethod
    def _submit(self, fn: Callable, payload: bytes) -> Any: ...

    @abc.abstractmethod
    def _result(self, future: Any, waiting: Callable[[], Any]) -> bytes: ...


def run_pickled(payload: bytes) -> bytes:
    """[`run`][] for a task that arrives as bytes."""
    return pickle.dumps(run(pickle.loads(payload)), protocol=5)


@functools.cache
def _by_value(fn: Callable) -> Callable:
    """A function that does the same, and is pickled with its code. A worker that can't import this
    package then says so when it runs it, and doesn't lose its connection when it reads it."""
    module, name = fn.__module__, fn.__name__

    def imported(payload: bytes) -> Any:
        import importlib

        return getattr(importlib.import_module(module), name)(payload)

    # (Functions of `__main__` are pickled with their code.)
    of_main = {"__name__": "__main__", "__builtins__": builtins}
    return types.FunctionType(imported.__code__, of_main, name, None, imported.__closure__)


class ExecutorPool(Pool):
    """The workers of the user's `concurrent.futures.Executor`."""

    def __init__(self, executor: Any, workers: int | None):
        super().__init__()
        context = getattr(executor, "_mp_context", None)  # of a ProcessPoolExecutor
        if context is not None and context.get_start_method() == "fork":
            raise ValueError(
                "EnsembleDistributed was given an executor that forks its processes: they would "
                "wait for ever, since JAX has threads. Let them be spawned: ProcessPoolExecutor(n, "
                'mp_context=multiprocessing.get_context("spawn")).'
            )
        self._executor = executor
        self.resize(workers)

    def resize(self, workers: int | None) -> None:
        """Set how many tasks the executor runs at a time: `workers`, or what it says itself, or
        one."""
        executor = self._executor
        counts = (getattr(executor, name, None) for name in ("num_workers", "_max_workers"))
        self._slots = workers or next((n for n in counts if isinstance(n, int) and n), 1)

    def slots(self) -> int:
        return self._slots

    def cancel(self, futures: list) -> None:
        for future in futures:
            future.cancel()

    def _submit(self, fn: Callable, payload: bytes) -> Any:
        try:
            return self._executor.submit(fn, payload)
        except RuntimeError as e:  # the executor is broken or shut down
            raise self._gone(e) from e

    def _result(self, future: Any, waiting: Callable[[], Any]) -> bytes:
        try:
            return future.result()
        except (concurrent.futures.BrokenExecutor, concurrent.futures.CancelledError) as e:
            raise self._gone(e) from e

    def _gone(self, e: BaseException) -> ClusterError:
        return ClusterError(
            f"the executor that EnsembleDistributed was given can't run anything any more ({e}): a "
            "worker of it died, or it was shut down. Make another; a Dask cluster replaces "
            "workers that die."
        )


class Connection(NamedTuple):
    """A Dask client, and functions for its connection.

    - `close`: ends what was started for it; `settle`: called after each batch.
    - `patience`: the seconds to wait when no worker is left; by default Dask's configuration.
    - `queued`: the number of tasks under way for each slot; clusters grow while many are waiting.
    """

    client: Any
    close: Callable[[], Any] = lambda: None
    settle: Callable[[], Any] = lambda: None
    patience: float | None = None
    queued: int = 16


class DaskPool(Pool):
    """The workers of a Dask cluster; `connect` makes the connection when it is first needed."""

    def __init__(self, connect: Callable[[], Connection]):
        super().__init__()
        self._connect = connect
        self._connection: Any = None  # a `Connection`, once it is made
        self._nobody_since: float | None = None
        self._counted: tuple[float, int] = (-1.0, 0)
        self._had_workers = False
        self._opening = threading.Lock()
        self._delivering: list = []

    @property
    def client(self) -> Any:
        return self._connection.client

    def open(self) -> None:
        with self._opening:
            if self._connection is not None and self.client.status in ("running", "connecting"):
                return
            self.close()
            self._connection = self._connect()
            self._had_workers, self._nobody_since = False, None
            self._counted = (-1.0, 0)
            self.sent.clear()

    @property
    def queued(self) -> int:
        return self._connection.queued

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def settle(self) -> None:
        if self._connection is not None:
            self._connection.settle()

    def slots(self) -> int:
        at, count = self._counted
        if time.monotonic() - at > 1.0:
            count = self._count()
            self._counted = (time.monotonic(), count)
        return count

    def _count(self) -> int:
        if self.client.status != "running":
            raise self._scheduler_lost()
        try:
            threads = self.client.nthreads()
        except (OSError, TimeoutError) as e:
            raise self._scheduler_lost() from e
        count = sum(threads.values())
        if count:
            self._had_workers, self._nobody_since = True, None
        elif self._had_workers:
            self._nobody_since = self._nobody_since or time.monotonic()
            patience = self._connection.patience or _patience()
            if time.monotonic() - self._nobody_since > patience:
                raise ClusterError(
                    f"all workers of the cluster at {self._address} are gone, and none has come "
                    f"for {patience:g} s (distributed.scheduler.no-workers-timeout in Dask's "
                    "configuration). Their logs say why (out of memory, the end of a job's time)."
                )
        return count

    def cancel(self, futures: list) -> None:
        if futures and self.client.status == "running":
            self.client.cancel(futures, force=True)

    def stop(self, work: str) -> None:
        self.client.run(stop, work, on_error="ignore")

    @property
    def _address(self) -> str:
        scheduler = self.client.scheduler
        return getattr(scheduler, "address", None) or "?"

    def _submit(self, fn: Callable, payload: bytes, **where: Any) -> Any:
        import dask

        if self.client.status != "running":
            raise self._scheduler_lost()
        # (Dask advises to scatter large data, but a replacement of a worker would lack them.)
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}):
            return self.client.submit(_by_value(fn), payload, pure=False, **where)

    def deliver(self, things: dict[str, Any], to: str) -> None:
        payload = pickle.dumps(things, protocol=5)
        self.traffic.sent += len(payload)
        # Nobody waits for this future, as the worker may be gone.
        future = self._submit(keep, payload, workers=[to])
        self._delivering = [*(x for x in self._delivering if not x.done()), future]

    def _result(self, future: Any, waiting: Callable[[], Any]) -> bytes:
        from distributed import KilledWorker
        from distributed.comm import CommClosedError
        from distributed.scheduler import NoWorkerError

        try:
            return self._gathered(future, waiting)
        except KilledWorker as e:
            last = e.last_worker.address
            raise WorkersDiedError(
                f"the workers that ran it died, the last of them at {last}"
            ) from e
        except (concurrent.futures.CancelledError, CommClosedError) as e:
            raise self._scheduler_lost() from e
        except NoWorkerError as e:
            raise ClusterError(f"no worker of the cluster is left: {e}") from e
        except ImportError as e:
            raise ClusterError(
                f"a worker of the cluster at {self._address} can't import {e.name or 'a part'} "
                f"({e}): install ensembleode, with the same versions of everything, for the "
                "workers, too."
            ) from e

    def _gathered(self, future: Any, waiting: Callable[[], Any]) -> bytes:
        """What the future's task returned. If the worker that holds it dies now, Dask runs the task
        again, which may take long, or for ever if no worker is left."""

        async def gathered() -> Any:
            return await self.client.gather(future, asynchronous=True)

        # (Where `waiting` raises, the dispatch cancels the task, which ends this, too.)
        answer = asyncio.run_coroutine_threadsafe(gathered(), self.client.loop.asyncio_loop)
        while not concurrent.futures.wait([answer], timeout=0.1).done:
            waiting()
        return answer.result()

    def _scheduler_lost(self) -> ClusterError:
        return ClusterError(
            f"the scheduler of the cluster at {self._address} is gone (the connection was lost or "
            "closed, or the tasks were cancelled there). Start it again, and solve again: with "
            "store= only what is missing is computed."
        )


def _patience() -> float:
    """The number of seconds to wait when there is no worker any more."""
    import dask
    from dask.utils import parse_timedelta

    set_to = dask.config.get("distributed.scheduler.no-workers-timeout", None)
    return 300.0 if set_to is None else float(parse_timedelta(set_to))
