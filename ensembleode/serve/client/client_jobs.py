"""The handles of long jobs that clients of a service return."""

import math
import time
from typing import Any

from ...solution.solution import ODESolution
from .. import exchange
from ..exchange import for_both, JsonObject, path_of, ServiceError


# The seconds between two queries for a job's status, at first and at most.
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 5.0
# The bytes of one part of a job's result.
_PART = 2**24
_ENDED = frozenset({"done", "failed", "cancelled"})


class EnsembleJob:
    """The handle of a job of [`Client.submit`][ensembleode.Client.submit]. If it is from an
    `AsyncClient`, its methods are awaited.

    - `id`: the job's id in the service, with which [`Client.job`][ensembleode.Client.job] finds it
        again.
    - `problem`: the name of the problem.
    """

    def __init__(self, client: Any, id: str, problem: str):
        self._client, self.id, self.problem = client, id, problem
        self._run_to_end = client._run_to_end

    async def _ask(self, method: str, what: str = "", **options: Any) -> Any:
        return await self._client._ask(method, path_of("ensembles", self.id, what), **options)

    @for_both
    async def status(self) -> JsonObject:
        """The status of the job: a dictionary of `"status"` (`"queued"`, `"running"`, `"done"`,
        `"failed"` or `"cancelled"`), how many of the `"trajectories"` are `"done"`, their
        `"retcodes"`, when it was `"created"`, for how many `"seconds"` it has run, and its
        `"error"`."""
        return await self._ask("GET")

    @for_both
    async def wait(self, timeout: float | None = None) -> JsonObject | None:
        """Wait until the job has ended, and return its status: done, failed or cancelled.

        **Arguments:** `timeout`: in seconds; None for as long as it takes.

        **Raises:** `TimeoutError` after that time.
        """
        return await self._ended(timeout)

    async def _ended(self, timeout: float | None) -> Any:
        started, pause = time.monotonic(), _FIRST_LOOK
        while (status := await self._ask("GET"))["status"] not in _ENDED:
            left = math.inf if timeout is None else started + timeout - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"the job {self.id} has not ended after {timeout:g} s: "
                    f"{status['done']} of {status['trajectories']} trajectories are done."
                )
            await self._client._paused(min(pause, left))
            pause = min(_LONGEST_LOOK, 1.5 * pause)
        return status

    @for_both
    async def cancel(self) -> JsonObject:
        """Cancel the job, unless it has ended; its results so far are kept. Returns its status."""
        return await self._ask("POST", "/cancel")

    @for_both
    async def delete(self) -> Any:
        """Delete the job from the service, with all its results; if it is running, cancel it
        first."""
        await self._ask("POST", "/cancel")
        await self._ask("DELETE", repeatable=False)

    @for_both
    async def resume(self) -> JsonObject:
        """Resume a job that was cancelled or failed. Returns its status."""
        return await self._ask("POST", "/resume", repeatable=False)

    @for_both
    async def result(
        self, start: int = 0, stop: int | None = None, *, timeout: float | None = None
    ) -> Any:
        """Wait for the end of the job, and fetch the solution.

        **Arguments:**

        - `start`, `stop`: the range of trajectories; by default all. They must fit into memory.
        - `timeout`: the seconds to wait for the end.

        **Returns:** an [`EnsembleSolution`][ensembleode.EnsembleSolution]. Trajectories that a
        cancelled job did not get to have the return code `Default`.

        **Raises:** `TimeoutError`; `ServiceError` for a job that failed.
        """
        status = await self._ended(timeout)
        if status["status"] == "failed":
            raise ServiceError(str(status.get("error") or "the job failed."), code="job_failed")
        n = status["trajectories"]
        at, end, _ = slice(start, stop).indices(n)
        if at >= end:
            raise ValueError(f"there are no trajectories from {start} to {stop}: the job has {n}.")
        engine, elapsed = self._client._engine(self.problem), float(status.get("seconds", math.nan))
        # The first trajectory alone, whose size then tells how many fit into a part.
        parts, size = [], 1
        while at < end:
            query = {"start": at, "stop": min(end, at + size)}
            answer = await self._ask("GET", "/download", query=query)
            part = exchange.solution(answer, engine, elapsed)
            if isinstance(part, ODESolution) or not len(part):
                raise ServiceError("the answer is not of an ensemble.", code="bad_answer")
            parts.append(part)
            at += len(part)
            size = max(1, _PART // max(1, part.u[0].nbytes))
        return exchange.concatenated(parts)

    def __repr__(self) -> str:
        return f"EnsembleJob({self.id!r}, problem={self.problem!r})"
