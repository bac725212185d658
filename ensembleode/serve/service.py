"""The state that endpoints share: solvers, the batcher, jobs and metrics."""

import asyncio
import contextlib
import itertools
import logging
import operator
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..ground.devices import cpu_devices
from . import tokens as tokens_of
from .batcher import Batcher, ItemResult, QueueFull, Slice
from .bodies import RefusedRequest
from .calls import ANSWERS, BODIES, Call, refusal, reply_to
from .jobs import Jobs
from .metrics import Metrics
from .registry import Registry
from .room import MemoryRoom
from .solving import BatchSolver, RequestArrays, ServedSolve


logger = logging.getLogger("ensembleode.serve")

# The seconds after which a program that is being compiled is taken to hang.
_COMPILING = 1800.0


class Service:
    """Solves the requests."""

    def __init__(
        self,
        registry: Registry,
        ensemblealg: Any,
        max_batch: int,
        tokens: tokens_of.Tokens | None,
        hosts: Sequence[str] | None,
        store: str | Path | None,
        drain_seconds: float,
        **batching: Any,  # options of a `Batcher`
    ):
        self.solvers = {e.name: BatchSolver(e, ensemblealg, max_batch) for e in registry}
        self.tokens = tokens
        self.hosts = None if hosts is None else frozenset(x.lower().encode() for x in hosts)
        self.drain_seconds = drain_seconds
        self.status = "warming"
        self.compiled = (0, 0)  # the number of compiled programs, and of all
        self._compiled_at = time.monotonic()  # when the last one was compiled
        self.failure: Exception | None = None
        self.on_ready: Callable[[], Any] = lambda: None
        self.on_failure: Callable[[], Any] = lambda: None
        self.on_drained: Callable[[float], Any] = lambda left: None
        self._make_batcher = lambda: Batcher(
            self._run,
            most=lambda program: program.most,
            share=max(128, max_batch // 8),
            observe=lambda program, n, _, seconds: self.metrics.batch(program.problem, n, seconds),
            **batching,
        )
        self.batcher = self._make_batcher()  # each start makes a new one
        self.metrics = Metrics(registry.names, lambda: self.batcher.waiting)
        self.jobs: Jobs | None = None
        if store is not None:
            owners = 1 if tokens is None else len(tokens)
            self.jobs = Jobs(Path(store), self.solvers, self._in_background, owners=owners)
        self.reading_large = asyncio.Semaphore(2)
        # The answers are held by calls, and then by connections, until the clients have read them.
        self.bodies, self.answers = MemoryRoom(*BODIES), MemoryRoom(*ANSWERS)
        self._warm_now = threading.Event()
        self._until = float("inf")  # when accepted requests are given up
        self._loop: Any = None  # the event loop, from `start` on
        self._warming: threading.Thread | None = None
        self._ending: asyncio.Task | None = None
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(4)

    async def start(self) -> None:
        """Begin to warm up; requests are refused until that is done."""
        self._loop = asyncio.get_running_loop()
        self.status, self._ending, self._compiled_at = "warming", None, time.monotonic()
        self.batcher = self._make_batcher()
        self.batcher.start()
        if self.jobs is not None:
            self.jobs.start(may_run=self._warm_now)
        self._warming = threading.Thread(target=self._warm, name="ensembleode-warming", daemon=True)
        self._warming.start()

    def _warm(self) -> None:
        began = time.perf_counter()
        try:
            with ThreadPoolExecutor(cpu_devices.cores()) as threads:
                every = [x for solver in self.solvers.values() for x in solver.warming()]
                self.compiled = (0, len(every))
                # The largest programs take longest, so they are compiled first.
                steps = threads.map(lambda step: self.status == "warming" and step(), every[::-1])
                for done, _ in enumerate(steps, 1):
                    self.compiled = (done, len(every))
                    self._compiled_at = time.monotonic()
                    if self.status == "warming":
                        seconds = time.perf_counter() - began
                        logger.info("compiled %d of %d (%.1f s)", done, len(every), seconds)
        except Exception as e:
            logger.error("a problem can't be solved", exc_info=e)
            self.failure, self.status = e, "failed"
            self.on_failure()
            return
        logger.info("ready after %.1f s", time.perf_counter() - began)
        with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
            self._loop.call_soon_threadsafe(self._ready)

    def _ready(self) -> None:
        if self.status == "warming":
            self.on_ready()
            self.status = "ready"
            self._warm_now.set()

    def dead(self) -> list[str]:
        """The parts without which the service doesn't work, and which ended, or hang for good."""
        found = [f"batches of {problem}" for problem in self.hung]
        if self.status == "warming" and time.monotonic() - self._compiled_at > _COMPILING:
            found.append("compiling")
        if self.batcher.is_dead:
            found.append("batcher")
        if self.jobs is not None and self.jobs.is_dead:
            found.append("ensembles")
        return found

    @property
    def hung(self) -> list[str]:
        """The problems with a batch that doesn't return."""
        return self.batcher.hung

    @property
    def is_at_work(self) -> bool:
        """Whether a thread is compiling or solving, whether or not somebody waits for it."""
        warms = self._warming is not None and self._warming.is_alive()
        return warms or self.batcher.is_at_work

    def begin_draining(self) -> None:
        """Refuse requests from now on, and have accepted ones end within `drain_seconds`; then call
        `on_drained` with the seconds left. (This takes no lock, as a signal handler calls it.)"""
        if self.status != "draining":
            self.status = "draining"
            self._until = time.monotonic() + self.drain_seconds
            if self.jobs is not None:
                self.jobs.end()
            if self._loop is None:  # the service has not started
                self.on_drained(0.0)
            else:
                self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> asyncio.Task:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        return self._ending

    async def stop(self) -> None:
        """Finish accepted requests within `drain_seconds` from the start of draining, and end."""
        self.begin_draining()
        await self._begin_to_end()

    async def _end(self) -> None:
        def left() -> float:
            return max(0.0, self._until - time.monotonic())

        if self.jobs is not None:
            await asyncio.to_thread(self.jobs.stop, left())
        if not await self.batcher.drain(left()):
            logger.warning("some requests were not answered within %s s", self.drain_seconds)
        if self._warming is not None and self._warming.is_alive():
            await asyncio.to_thread(self._warming.join, left())
        self.on_drained(left())

    def _run(self, program: ServedSolve, slices: Sequence[Slice]) -> list:
        solver = self.solvers[program.problem]
        results = solver.run(program, [_part(s) for s in slices])
        self.metrics.codes(program.problem, np.concatenate([x.retcode for x in results]))
        return results

    def _in_background(self, program: ServedSolve, numbers: RequestArrays) -> Any:
        """Submit a background item from another thread; returns a future of its results."""
        batcher = self.batcher

        async def done() -> ItemResult:
            n = len(numbers.u0)
            return await batcher.submit(program.problem, program, numbers, n, background=True)

        return asyncio.run_coroutine_threadsafe(done(), self._loop)

    async def done(
        self, call: Call, program: ServedSolve, numbers: RequestArrays, deadline: float | None
    ) -> ItemResult:
        """The results for a request's numbers. It raises the errors of `Batcher.submit`, and stops
        where the client has disconnected."""
        at = None if deadline is None else time.monotonic() + deadline
        n = len(numbers.u0)
        entry = self.solvers[program.problem].entry
        size = n * entry.answer_bytes(numbers.times.shape[1], program.pulls)
        # (The bytes of the answer are counted until it is written.)
        if not self.answers.has(call, call.owner or "", size):
            raise QueueFull(1.0)
        self.answers.put(call, call.owner or "", size)
        future = self.batcher.submit(program.problem, program, numbers, n, deadline=at)
        call.future = future
        look = None if call.receive is None else asyncio.create_task(_look_after(call))
        try:
            done = await future
        except asyncio.CancelledError:
            if call.gone:
                raise RefusedRequest(499, "gone", "the client has gone.") from None
            raise
        finally:
            if look is not None:
                look.cancel()
        self.metrics.waits[program.problem].observe(done.wait)
        return done

    def solver(self, name: str) -> BatchSolver:
        if name not in self.solvers:
            raise RefusedRequest(404, "not_found", f"there is no problem {name[:100]!r}.")
        return self.solvers[name]

    def check_ready(self) -> None:
        """Raises `RefusedRequest` before and after the time in which the service answers."""
        if self.status != "ready":
            message = f"the service is {self.status}"
            if self.status == "warming" and self.compiled[1]:
                message += ": {} of {} programs are compiled".format(*self.compiled)
            raise RefusedRequest(503, self.status, f"{message}.", headers={"Retry-After": "1"})

    def owner(self, call: Call) -> str | None:
        """The owner of a call's token, "" if none is needed; None for a call without a valid
        token."""
        return "" if self.tokens is None else self.tokens.owner(call.header(b"authorization"))

    async def answered(self, handle: Callable, call: Call, *, guarded: bool) -> tuple[Any, str]:
        """The result of an endpoint for a call (a `Reply`, or Starlette's response), or the reply
        to an exception that it raises; and the id of the request."""
        began = time.perf_counter()
        id = f"{self._id_prefix}-{next(self._ids)}"
        why = ""
        try:
            if guarded and call.owner is None:
                call.owner = self.owner(call)
                if call.owner is None:
                    raise RefusedRequest(
                        401, "unauthorized",
                        "a token is needed: send the header Authorization: Bearer TOKEN.",
                        headers={"WWW-Authenticate": "Bearer"},
                    )  # fmt: skip
            if guarded and self.hosts is not None:
                call.check_host(self.hosts)
            reply = await handle(call)
        except Exception as e:
            refused = refusal(e, id)
            reply = reply_to(refused)
            # The path may contain what the client sent; as it is quoted, it can't end the line.
            why = f" {refused.code}" + (f" {refused.path!r}" if refused.path else "")
        finally:
            self.bodies.drop(call)
            self.answers.drop(call)
        if guarded:
            status = reply.status_code
            seconds = time.perf_counter() - began
            known = call.name if call.name in self.solvers else ""
            self.metrics.request(known, status, seconds)
            # Clients that ask too early ask again and again.
            level = logging.DEBUG if status < 400 or status == 503 else logging.INFO
            if logger.isEnabledFor(level):
                what = (known or "-", "-" if call.count is None else call.count)
                logger.log(level, "%s %s %s %d %.4f s%s", id, *what, status, seconds, why)
        return reply, id


async def _look_after(call: Call) -> None:
    """Notice when the client disconnects."""
    while (await call.receive())["type"] != "http.disconnect":
        pass
    call.leave()


def _part(part: Slice) -> RequestArrays:
    numbers = part.payload
    if part.stop - part.start == len(numbers.u0):
        return numbers
    return jax.tree.map(operator.itemgetter(slice(part.start, part.stop)), numbers)
