"""From requests to batches and back, in pure asyncio, without any knowledge of HTTP or JAX.

Each problem has a thread, in which its lines take turns (see `lines.py`). So a batch that takes
long, or never returns, doesn't hold up other problems.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .lines import Part, WaitingItem, WaitingLines


logger = logging.getLogger("ensembleode.serve")

# The resolution of the timers of event loops.
_TICK = 0.002
# The largest number of runs for the parts of a batch that crashed: two runs for each halving find
# one culprit among thousands.
_RUNS_APART = 32


@dataclasses.dataclass(eq=False)
class QueueFull(Exception):
    """The queue is full; the client should try again after `seconds`."""

    seconds: float


class DrainingError(Exception):
    """The service is ending, and accepts no more requests."""


class DeadlineExceeded(Exception):
    """The answer is too late for the deadline."""


@dataclasses.dataclass(eq=False)
class BatchFailed(Exception):
    """Running the item crashed; the log has the reason under this `id`."""

    id: str


@dataclasses.dataclass(eq=False)
class BatchHungError(Exception):
    """A batch of the problem doesn't return: the item's own (`mine`) or another one."""

    problem: str
    mine: bool


class Slice(NamedTuple):
    """A part of an item: `payload` from `start` to `stop`."""

    payload: Any
    start: int
    stop: int


class ItemResult(NamedTuple):
    """The results of an item, part by part in order; the seconds that it waited for its first
    batch; and the seconds that its batches took."""

    results: list
    wait: float
    seconds: float


class _Runner:
    """A thread that calls a function with each of the arguments that are put into the queue
    `given`, until one is None. It is a daemon, so that a call that never returns doesn't keep the
    process from ending. If a call that was given up returns after all, the thread goes on."""

    def __init__(self, call: Callable[..., Any], name: str):
        self.began = math.inf  # when the present call began
        self.parts: list[Part] = []  # the parts of items in that call
        self.hangs = False  # whether the present call has been given up
        self.timer: asyncio.TimerHandle | None = None  # for checking whether the call is over time
        self._call = call
        self.given: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._live, name=name, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        while (arguments := self.given.get()) is not None:
            self._call(self, *arguments)
            del arguments  # they would otherwise be kept until the next call


class Batcher:
    """Gathers items into batches, and runs the batches one by one in the thread of their problem.

    - `run(line, slices)`: returns a result for each slice; it blocks.
    - `most(line)`: the largest size of a batch of that line; by default `max_batch`.
    - `max_wait`: for how many seconds the first item of a batch waits for others at the most.
    - `queue`: how many trajectories may wait.
    - `share`: how many trajectories of each item go into a batch before its remaining places are
        filled.
    - `coalesce`: whether items share batches.
    - `limit`: the seconds after which a run is given up; its problem is refused until it returns.
    - `observe(line, count, items, seconds)`: called for each batch.
    """

    def __init__(
        self,
        run: Callable[[Any, Sequence[Slice]], Sequence],
        *,
        most: Callable[..., int] | None = None,
        max_batch: int = 4096,
        max_wait: float = 0.005,
        queue: int = 16384,
        share: int | None = None,
        coalesce: bool = True,
        limit: float = math.inf,
        observe: Callable[[Any, int, int, float], None] | None = None,
    ):
        self._run = run
        most = most or (lambda line: max_batch)
        share = share or max(1, max_batch // 8)
        self._lines = WaitingLines(most, share, max_wait if coalesce else 0.0, coalesce)
        self._queue = queue
        self._limit = limit
        self._observe = observe
        self._rate = 1000.0  # recent rate, in items per second
        self._draining = False
        self._runners: dict[Any, _Runner] = {}  # by problem
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task | None = None
        self._ended = False
        self._loop: Any = None  # the event loop, from `start` on

    @property
    def waiting(self) -> int:
        """How many trajectories wait, without those of background items."""
        return self._lines.waiting

    @property
    def is_dead(self) -> bool:
        """Whether its task, or one of its threads, has ended although nothing told it to."""
        if self._ended or self._task is None:
            return False
        return self._task.done() or not all(x.thread.is_alive() for x in self._runners.values())

    @property
    def _running(self) -> list[_Runner]:
        """The threads that run a batch that somebody waits for."""
        return [x for x in self._runners.values() if x.parts]

    @property
    def hung(self) -> list:
        """The problems with a batch that doesn't return."""
        return [problem for problem, runner in self._runners.items() if runner.hangs]

    @property
    def is_at_work(self) -> bool:
        """Whether a thread is running a batch, whether or not somebody waits for it."""
        return any(x.began < math.inf for x in self._runners.values())

    def start(self) -> None:
        """Start, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._go(), name="ensembleode-batcher")

    def submit(
        self,
        problem: str,
        line: Any,
        payload: Any,
        n: int,
        *,
        deadline: float | None = None,
        background: bool = False,
    ) -> "asyncio.Future[ItemResult]":
        """Have an item of `n` trajectories run; the lines of a problem take turns. If the future is
        cancelled, the parts of the item that haven't run are dropped.

        Raised here or by the future: `QueueFull`, `DrainingError`, `DeadlineExceeded` (by the clock
        `time.monotonic`), `BatchFailed`, `BatchHungError`. An item in the `background` gets no more
        than a share of a batch, and isn't counted in the queue.
        """
        if self._draining:
            raise DrainingError
        runner = self._runners.get(problem)
        if runner is not None and runner.hangs:
            raise BatchHungError(problem, mine=False)
        excess = self.waiting + n - self._queue
        if not background and self.waiting and excess > 0:
            raise QueueFull(min(60.0, max(1.0, math.ceil(excess / self._rate))))
        now = time.monotonic()
        item = WaitingItem(
            (problem, line), payload, n, n, now, self._loop.create_future(), background
        )
        if deadline is not None:
            if deadline <= now:
                raise DeadlineExceeded
            late = DeadlineExceeded()
            item.timer = self._loop.call_later(deadline - now, _refuse, [item], late)
        self._idle.clear()
        if self._lines.add(item):
            self._wake.set()
        item.settled = lambda _: self._settled(item)
        item.future.add_done_callback(item.settled)
        return item.future

    async def drain(self, seconds: float) -> bool:
        """Accept nothing more, finish what was accepted, and end. Returns whether everything was
        finished; items that weren't raise `DrainingError`."""
        self._draining = True
        self._wake.set()
        finished = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            finished = False
        self._ended = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._refuse_all(DrainingError())
        for runner in self._runners.values():
            runner.given.put(None)
        return finished

    def _refuse_all(self, error: Exception) -> None:
        running = [item for x in self._running for item, _, _ in x.parts]
        _refuse([*self._lines.items(), *running], error)

    def _settled(self, item: WaitingItem) -> None:
        """Drop the waiting parts of an item whose future is done."""
        item.settled = None
        if item.timer is not None:
            item.timer.cancel()
        if item.waiting:
            self._lines.drop(item)
            self._rest()

    def _rest(self) -> None:
        if not self._lines.problems and not self._running:
            self._idle.set()

    async def _go(self) -> None:
        try:
            while True:
                now = time.monotonic()
                busy = {x for x, runner in self._runners.items() if runner.parts or runner.hangs}
                found, due = self._lines.next(now, busy, at_once=self._draining)
                if found is not None:
                    self._begin(*found, now)
                elif (seconds := due - now) < _TICK:
                    await asyncio.sleep(0)
                else:  # until then, or until something is due earlier
                    self._wake.clear()
                    limit = None if seconds == math.inf else seconds - _TICK
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(limit):
                            await self._wake.wait()
        except Exception as e:
            # Without this task nothing is solved, so nothing waits, and nothing is accepted.
            self._draining = True
            self._refuse_all(self._crash("all problems", e))
            for runner in self._running:
                runner.parts = []
            raise

    def _begin(self, problem: str, key: Any, now: float) -> None:
        """Run the next batch of a line."""
        parts = self._lines.take(problem, key, now)
        slices = [Slice(item.payload, start, stop) for item, start, stop in parts]
        try:
            if problem not in self._runners:
                name = f"ensembleode-batches-{problem}"
                self._runners[problem] = _Runner(self._run_and_tell, name)
        except RuntimeError as e:  # no thread could be started
            self._end(parts, [self._crash(key, e)] * len(parts), 0.0)
            self._rest()
            return
        runner = self._runners[problem]
        runner.parts, runner.began = parts, now
        self._look(problem, runner)
        runner.given.put((problem, key, slices))

    def _look(self, problem: str, runner: _Runner) -> None:
        """Check whether a run is over its time limit; if not, check again when it would be."""
        left = runner.began + self._limit - time.monotonic()
        if left <= 0:
            self._give_up(problem, runner)
        elif left < math.inf:
            runner.timer = self._loop.call_later(left, self._look, problem, runner)

    def _give_up(self, problem: str, runner: _Runner) -> None:
        """Give up the present run of a thread, which Python can't end, and refuse its problem."""
        logger.error("a batch of %s has not returned in %g s: it is given up", problem, self._limit)
        parts, runner.parts, runner.hangs = runner.parts, [], True
        _refuse([item for item, _, _ in parts], BatchHungError(problem, mine=True))
        _refuse(self._lines.items(problem), BatchHungError(problem, mine=False))
        self._rest()

    def _run_and_tell(
        self, runner: _Runner, problem: str, key: Any, slices: Sequence[Slice]
    ) -> None:
        """Run a batch in the thread of its problem, and report to the event loop."""
        began = time.monotonic()
        try:
            results = self._in_halves(runner, key, slices, [_RUNS_APART])
        except BaseException as e:  # no exception may end the thread
            results = [self._crash(key, e)] * len(slices)
        seconds = time.monotonic() - began  # the event loop may get to this later
        runner.began = math.inf
        with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
            self._loop.call_soon_threadsafe(self._finish, problem, key, results, seconds)

    def _finish(self, problem: str, key: Any, results: Sequence, seconds: float) -> None:
        runner = self._runners[problem]
        if runner.timer is not None:
            runner.timer.cancel()
        if runner.hangs:
            logger.warning("the batch of %s returned after %.0f s", problem, seconds)
            runner.hangs = False
            return
        parts, runner.parts = runner.parts, []
        if not parts:  # all of them were given up
            return
        count = sum(stop - start for _, start, stop in parts)
        self._rate = 0.8 * self._rate + 0.2 * count / max(seconds, 1e-6)
        self._end(parts, results, seconds)
        self._rest()
        if problem in self._lines.problems:
            self._wake.set()
        if self._observe is not None:
            try:
                self._observe(key, count, len(parts), seconds)
            except Exception as e:  # the batch itself didn't fail
                logger.error("a batch of %s can't be observed", key, exc_info=e)

    def _end(self, parts: list[Part], results: Sequence, seconds: float) -> None:
        """Hand the results of a batch to its items; there, a `BatchFailed` is raised."""
        for (item, _, stop), result in zip(parts, results, strict=True):
            if item.future.done():
                continue
            item.seconds += seconds
            if isinstance(result, BatchFailed):
                item.future.set_exception(result)
                continue
            item.results.append(result)
            if stop == item.n:
                wait = item.started - item.submitted
                if item.timer is None:  # there is nothing else to do
                    item.future.remove_done_callback(item.settled)
                    item.settled = None  # so that no cycle is left to the garbage collector
                item.future.set_result(ItemResult(item.results, wait, item.seconds))

    def _in_halves(
        self, runner: _Runner, key: Any, slices: Sequence[Slice], runs_left: list[int]
    ) -> Sequence:
        """The results of a batch. If running it crashes, its halves are run separately, so that
        only an item that crashes by itself fails (or all remaining ones, once `runs_left` is used
        up)."""
        runner.began = time.monotonic()
        try:
            results = self._run(key, slices)
            if len(results) != len(slices):
                raise RuntimeError(f"{len(results)} results for {len(slices)} parts")
            return results
        except BaseException as e:  # no exception may end the thread
            if len(slices) == 1 or runs_left[0] < 2:
                return [self._crash(key, e)] * len(slices)
        runs_left[0] -= 2
        half = len(slices) // 2
        first = self._in_halves(runner, key, slices[:half], runs_left)
        return [*first, *self._in_halves(runner, key, slices[half:], runs_left)]

    def _crash(self, key: Any, cause: BaseException) -> BatchFailed:
        failure = BatchFailed(secrets.token_hex(8))
        logger.error("batch %s of %s crashed", failure.id, key, exc_info=cause)
        return failure


def _refuse(items: Sequence[WaitingItem], error: Exception) -> None:
    for item in items:
        if not item.future.done():
            item.future.set_exception(error)
