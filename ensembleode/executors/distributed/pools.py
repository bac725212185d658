"""Where tasks go: a Dask cluster, or any executor of `concurrent.futures`."""

# ruff: noqa: B027 (some of what a pool may have to do is nothing for others)

import abc
import collections
import concurrent.futures
import dataclasses
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ...solution import EnsembleError
from .worker import keep, run, stop, Task


class ClusterError(EnsembleError):
    """The cluster can't go on; `solution` holds what was computed before (None inside `jit`)."""


@dataclasses.dataclass
class Traffic:
    """What went to the workers and came back, since they were first used.

    - `tasks`: how many were done; `repeated`: how many had to be sent again.
    - `sent`, `received`: bytes.
    - `seconds`: of solving, added up over the workers.
    - `compiled`: programs compiled, added up over the workers.
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


class Died(Exception):
    """A task was given up, as the workers that ran it died."""


class Pool(abc.ABC):
    """Workers, and what is known of them.

    - `sent`: how often something was sent along with a task, by hash.
    - `queued`: tasks of each slot that are under way, so that none waits for the next.
    - `rates`: seconds that a unit takes, by program; `given_up`: how many of them were lost.
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
        """Send things to the worker at this address (if it is still there), for its next tasks."""

    def result(self, future: Any) -> Any:
        """The answer.

        **Raises:** `Died`; `ClusterError` where the cluster can't go on; what was raised by what
        the program calls.
        """
        answer = self._result(future)
        self.traffic.received += len(answer)
        return pickle.loads(answer)

    def open(self) -> None:
        """Be ready for tasks.

        **Raises:** `ClusterError` where the cluster can't be reached.
        """

    @abc.abstractmethod
    def slots(self) -> int:
        """How many tasks can run at a time, now.

        **Raises:** `ClusterError` where there is no cluster any more.
        """

    @abc.abstractmethod
    def cancel(self, futures: list) -> None:
        """Forget about these futures."""

    def stop(self, work: str) -> None:
        """Have workers end the tasks of this work that they are at, where they can be told."""

    def settle(self) -> None:
        """A batch is done."""

    def close(self) -> None:
        """Let go of what was started for this pool."""

    @abc.abstractmethod
    def _submit(self, fn: Callable, payload: bytes) -> Any: ...

    @abc.abstractmethod
    def _result(self, future: Any) -> bytes: ...


def keep_pickled(payload: bytes) -> None:
    """[`keep`][] where things come as bytes."""
    keep(pickle.loads(payload))


def run_pickled(payload: bytes) -> bytes:
    """[`run`][] where a task comes as bytes."""
    return pickle.dumps(run(pickle.loads(payload)), protocol=5)


class ExecutorPool(Pool):
    """The workers of a `concurrent.futures.Executor`, which is the user's."""

    def __init__(self, executor: Any, workers: int | None):
        super().__init__()
        self._executor = executor
        self.resize(workers)

    def resize(self, workers: int | None) -> None:
        """How many tasks it runs at a time, where it doesn't say."""
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
        except RuntimeError as e:  # broken, or shut down
            raise self._gone(e) from e

    def _result(self, future: Any) -> bytes:
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
    """A Dask client, and what goes with it.

    - `close`: ends what was started for it; `settle`: called after each batch.
    - `patience`: seconds to wait when there is no worker any more; None for Dask's configuration.
    - `queued`: tasks of each slot that are under way. (A cluster that adapts grows while there are
        some seconds of them.)
    """

    client: Any
    close: Callable[[], Any] = lambda: None
    settle: Callable[[], Any] = lambda: None
    patience: float | None = None
    queued: int = 16


class DaskPool(Pool):
    """The workers of a Dask cluster.

    - `connect`: makes the connection, when there is need of it.
    """

    def __init__(self, connect: Callable[[], Connection]):
        super().__init__()
        self._connect = connect
        self._connection: Connection | None = None
        self._nobody_since: float | None = None
        self._counted: tuple[float, int] = (-1.0, 0)
        self._had_workers = False
        self._opening = threading.Lock()
        self._delivering: list = []

    @property
    def client(self) -> Any:
        assert self._connection is not None
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
        assert self._connection is not None
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
            assert self._connection is not None
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
        # What a task needs is no graph that could have been scattered: a worker may be replaced.
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}):
            return self.client.submit(fn, payload, pure=False, **where)

    def deliver(self, things: dict[str, Any], to: str) -> None:
        payload = pickle.dumps(things, protocol=5)
        self.traffic.sent += len(payload)
        # A future that nobody waits for: the worker may be gone. (A task for it with
        # `allow_other_workers` would wait for ever, once no worker is there.)
        future = self._submit(keep_pickled, payload, workers=[to])
        self._delivering = [*(x for x in self._delivering if not x.done()), future]

    def _result(self, future: Any) -> bytes:
        from distributed import KilledWorker
        from distributed.scheduler import NoWorkerError

        try:
            return future.result()
        except KilledWorker as e:
            last = e.last_worker.address
            raise Died(f"the workers that ran it died, the last of them at {last}") from e
        except concurrent.futures.CancelledError as e:
            raise self._scheduler_lost() from e
        except NoWorkerError as e:
            raise ClusterError(f"no worker of the cluster is left: {e}") from e
        except ModuleNotFoundError as e:
            raise ClusterError(
                f"a worker of the cluster at {self._address} can't import {e.name}: install "
                "ensembleode, with the same versions of everything, for the workers, too."
            ) from e

    def _scheduler_lost(self) -> ClusterError:
        return ClusterError(
            f"the scheduler of the cluster at {self._address} is gone (the connection was lost or "
            "closed, or the tasks were cancelled there). Start it again, and solve again: with "
            "store= only what is missing is computed."
        )


def _patience() -> float:
    """How long to wait, in seconds, when there is no worker any more."""
    import dask
    from dask.utils import parse_timedelta

    set_to = dask.config.get("distributed.scheduler.no-workers-timeout", None)
    return 300.0 if set_to is None else float(parse_timedelta(set_to))
