"""From a batch to tasks and back: the sizes of tasks, their order, and the handling of failures.

A task is a number of units (chunks, or groups of chunks where gradients are added up). The
composition of the units is fixed, so the results do not depend on which worker computes them, or
when. From the times of the first tasks, the others are made to take about half a second, and less
towards the end, so that workers finish at the same time. Where costs are known, the longest tasks
are sent first.

If the workers of a task die, its units are run again, one at a time and alone, after all other
tasks. A unit that then still kills its workers is lost; other units are not. (That a worker has
died is noticed in `pools.py`; what is lost gets its return code in `requests.py`.)
"""

import contextlib
import dataclasses
import hashlib
import queue
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...ground.logs import log_once, logger
from ...plan.plan import fill_of
from ...running.interrupts import StopFlag, watched
from ...running.job import blank
from .pools import ClusterError, Pool, WorkersDiedError
from .programs import ChunkProgram, ShippedProgram
from .worker import environment, MissingObjects, ObjectReference, Task, TaskRefusal, TaskResult


# The seconds that a task takes, and their minimum, a few times the cost of sending a task. The most
# bytes that a task is sent, and that it returns.
_SECONDS, _LEAST_SECONDS = 0.5, 0.02
_BYTES = 2**25
# The smallest size in bytes of shared arrays that are sent to each worker only once.
_LARGE = 2**15


class BatchNumbers(NamedTuple):
    """The numbers of a batch, flat, and what is known about it.

    - `each`: arrays `[trajectory, ...]`, the cotangents last; `shared`: arrays for all of them.
    - `costs`: the cost of each trajectory in any unit; None where it isn't known.
    - `stop`: the index of the shared array with the address of a flag that stops it, if any.
    """

    each: list[np.ndarray]
    shared: list[np.ndarray]
    costs: np.ndarray | None = None
    stop: int | None = None

    @property
    def n(self) -> int:
        return len(self.each[0])


@dataclasses.dataclass
class BatchResults:
    """The results of a batch: flat arrays over the trajectories and over the units.

    - `done`: which trajectories are solved or lost.
    - `lost`: the trajectories whose workers died, with the reasons.
    - `cause`: the exception that ended the batch before its end, if there was one.
    """

    each: list[np.ndarray]
    parts: list[np.ndarray]
    done: np.ndarray
    lost: list[tuple[np.ndarray, str]] = dataclasses.field(default_factory=list)
    cause: BaseException | None = None


def dispatch(
    pool: Pool,
    program: ChunkProgram,
    shipped: ShippedProgram,
    batch: BatchNumbers,
    *,
    threads: int = 1,
    report: Callable[[BatchResults, Any], Any] | None = None,
) -> BatchResults:
    """Run a program on all trajectories of a batch. Workers get it as `shipped`, and each runs
    `threads` calls at once. `report` is called with the results so far, and the rows that are new
    in them. An exception that ends the dispatch early, even `KeyboardInterrupt`, isn't raised but
    put into the results."""
    work = _Dispatch(pool, program, shipped, batch, threads, report)
    try:
        pool.open()
        with watched() as stop:
            stop = stop or StopFlag()
            # In the middle of a call of Dask's, Ctrl-C might leave Dask in an inconsistent state.
            with stop.setting_the_flag():
                work.run(stop)
    except (Exception, KeyboardInterrupt) as e:
        work.results.cause = e
        with contextlib.suppress(Exception):  # the cluster may be gone
            pool.cancel(list(work.in_flight))
            pool.stop(work.name)
    finally:
        pool.settle()
    return work.results


class _Dispatch:
    """The state of a dispatch: the units to be done, those that workers have, and the results so
    far."""

    def __init__(self, pool, program, shipped, batch, threads, report):
        self.pool, self.program, self.shipped, self.batch = pool, program, shipped, batch
        self.threads, self.report = threads, report
        self.name = uuid.uuid4().hex
        self.environment = environment()
        self.kept, self.shared = self._shared()
        self.rows = program.unit * program.width
        units = program.units(batch.n)
        self.pending = self._ordered(units)
        self.suspects: list[int] = []
        self.in_flight: dict[Any, np.ndarray] = {}
        # `SimpleQueue` waits for ever if a signal arrives as its timeout ends.
        self.finished: queue.Queue = queue.Queue()
        self.measured = [0.0, 0]
        n = batch.n
        each, parts = (
            [blank(x.shape, x.dtype, fill_of((), x.dtype)) for x in xs] for xs in program.results(n)
        )
        self.results = BatchResults(each, parts, np.zeros(n, bool))
        size = sum(x.nbytes for x in (*batch.each, *each, *parts))
        self.most = max(1, _BYTES * units // max(1, size))

    def _shared(self) -> tuple[dict[str, Any], tuple]:
        """The objects that workers keep, by hash; and the shared arrays as they are in tasks."""
        kept: dict[str, Any] = {self.shipped.hash: self.shipped.content}
        shared = []
        for x in self.batch.shared:
            if x.nbytes < _LARGE:
                shared.append(x)
                continue
            digest = hashlib.sha256(repr((x.shape, x.dtype)).encode())
            digest.update(np.ascontiguousarray(x).tobytes())
            kept[digest.hexdigest()] = x
            shared.append(ObjectReference(digest.hexdigest()))
        return kept, tuple(shared)

    def _ordered(self, units: int) -> list[int]:
        """The units in the reverse order of sending: the last one in the list is sent first."""
        order = np.arange(units)[::-1]
        if self.batch.costs is None:
            return order.tolist()
        # A chunk takes as long as its longest trajectory.
        costs = np.maximum.reduceat(self.batch.costs, np.arange(0, self.batch.n, self.rows))
        return order[np.argsort(costs[order], kind="stable")].tolist()

    def run(self, stop: StopFlag) -> None:
        def check():
            if stop.is_set:
                raise KeyboardInterrupt

        def waiting():
            check()
            self.pool.slots()

        while self.pending or self.in_flight or self.suspects:
            check()
            self._send()
            try:
                future = self.finished.get(timeout=0.1)
            except queue.Empty:
                continue
            if future in self.in_flight:
                self._received(future, waiting)
        check()
        if self.measured[1]:
            self.pool.rates[self.program] = self.measured[0] / self.measured[1]

    def _send(self) -> None:
        slots = self.pool.slots()
        if not slots and not self.in_flight:
            log_once("EnsembleDistributed waits for the workers of its cluster.")
        # A cluster that adapts starts workers only when there are tasks.
        slots = max(1, slots)
        while self.pending and len(self.in_flight) < self.pool.queued * slots:
            size = self._size(slots)
            units = np.sort([self.pending.pop() for _ in range(size)])
            # Sent along with as many tasks as there are slots; a worker that still lacks them asks
            # for them.
            new = [h for h in self.kept if self.pool.sent[h] < slots]
            self.pool.sent.update(new)
            self._submit(units, new)
        if self.suspects and not self.pending and not self.in_flight:
            self._submit(np.array([self.suspects[-1]]), [])

    def _size(self, slots: int) -> int:
        """The number of units of the next task: half a second's, or less towards the end."""
        seconds, count = self.measured
        rate = seconds / count if count else self.pool.rates.get(self.program)
        if rate is None:
            return 1
        a_second = self.threads / max(rate, 1e-9)
        fair = max(-(-len(self.pending) // (2 * slots)), int(_LEAST_SECONDS * a_second))
        return max(1, min(int(_SECONDS * a_second), fair, self.most, len(self.pending)))

    def _submit(self, units: np.ndarray, kept: list[str]) -> None:
        rows = self._rows(units)
        task = Task(
            self.shipped.hash,
            self.environment,
            tuple(x[rows] for x in self.batch.each),
            self.shared,
            self.program.width,
            self.program.capacity,
            self.threads,
            {h: self.kept[h] for h in kept},
            None if self.batch.stop is None else (self.batch.stop, self.name),
        )
        future = self.pool.submit(task)
        self.in_flight[future] = units
        future.add_done_callback(self.finished.put)

    def _rows(self, units: np.ndarray) -> np.ndarray | slice:
        starts = units * self.rows
        if len(units) == units[-1] - units[0] + 1:
            return slice(starts[0], min(starts[-1] + self.rows, self.batch.n))
        rows = (starts[:, None] + np.arange(self.rows)).ravel()
        return rows[rows < self.batch.n]

    def _received(self, future: Any, waiting: Callable[[], Any]) -> None:
        try:
            answer = self.pool.result(future, waiting)
        except WorkersDiedError as e:
            answer = e
        units = self.in_flight.pop(future)
        match answer:
            case WorkersDiedError():
                self._died(units, str(answer))
            case TaskResult():
                self._done(units, answer)
            case MissingObjects(hashes, address):
                self.pool.traffic.repeated += 1
                self._submit(units, list(hashes))
                if address is not None:  # the task may be sent to another worker now
                    self.pool.deliver({h: self.kept[h] for h in hashes}, address)
            case TaskRefusal(why):
                raise ClusterError(why + ".")

    def _done(self, units: np.ndarray, answer: TaskResult) -> None:
        rows = self._rows(units)
        for old, new in zip(self.results.each, answer.each, strict=True):
            old[rows] = new
        for old, new in zip(self.results.parts, answer.parts, strict=True):
            old[units] = new
        self.results.done[rows] = True
        if self.suspects and self.suspects[-1] == units[0]:
            self.suspects.pop()
        self.measured[0] += answer.seconds
        self.measured[1] += len(units)
        traffic = self.pool.traffic
        traffic.tasks += 1
        traffic.seconds += answer.seconds
        traffic.compiled += answer.compiled
        if self.report is not None:
            self.report(self.results, rows)

    def _died(self, units: np.ndarray, why: str) -> None:
        self.pool.traffic.repeated += 1
        if not (self.suspects and self.suspects[-1] == units[0]):
            self.suspects += units[::-1].tolist()
            return
        # The unit was running alone, so it was this one that killed the worker.
        unit = self.suspects.pop()
        rows = np.arange(unit * self.rows, min((unit + 1) * self.rows, self.batch.n))
        self.results.lost.append((rows, why))
        self.results.done[rows] = True
        for part in self.results.parts:
            if np.issubdtype(part.dtype, np.inexact):
                part[unit] = np.nan
        logger.warning("trajectories %d to %d are given up: %s", rows[0], rows[-1], why)
        self.pool.given_up[self.program] += 1
        never = not self.measured[1] and self.program not in self.pool.rates
        if never and self.pool.given_up[self.program] > 1:
            raise ClusterError(
                f"whatever is tried, {why}. The usual cause is memory: save fewer times, or give "
                "the workers more."
            )
