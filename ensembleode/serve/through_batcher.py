"""An ensemble solved by the batcher of a service, beside the service's requests."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ..executors import EXECUTORS
from ..plan.plan import Outcome, RecordedEvents
from ..problem.ensemble import EnsembleAlgorithm
from ..running.executor import Executor
from ..running.job import Job
from ..solution.events import end_by, Events
from ..solution.stats import COUNTS
from .registry import is_parameter
from .solving import BatchSolver, joined, RequestArrays, ServedSolve, SolveAnswer


Submit = Callable[[ServedSolve, RequestArrays], "concurrent.futures.Future[Any]"]


class JobStopped(Exception):
    """The job was cancelled, or the service is ending."""


class RunningJob:
    """The running job: it has its batches solved, and can be stopped from another thread."""

    def __init__(
        self,
        id: str,
        solver: BatchSolver,
        submit: Submit,
        progress: Callable[[str, np.ndarray], None],
    ):
        self.id, self.solver = id, solver
        self._submit, self._progress = submit, progress
        self._stopped, self.ended = threading.Event(), threading.Event()
        self._future: concurrent.futures.Future | None = None
        self._before: np.ndarray | None = None

    def count(self) -> None:
        """Count the trajectories of the last batch, which is in the store by now."""
        if self._before is not None:
            self._progress(self.id, self._before)
        self._before = None

    def stop(self) -> None:
        self._stopped.set()
        if self._future is not None:
            self._future.cancel()

    def run(self, program: ServedSolve, numbers: RequestArrays) -> SolveAnswer:
        """The answer for these numbers; may raise `JobStopped`."""
        self.count()
        if self._stopped.is_set():
            raise JobStopped
        self._future = self._submit(program, numbers)
        if self._stopped.is_set():
            self._future.cancel()
        try:
            answer = joined(self._future.result().results)
        except concurrent.futures.CancelledError:
            raise JobStopped from None
        except Exception:
            if self._stopped.is_set():
                raise JobStopped from None
            raise
        self._before = answer.retcode
        return answer


class ThroughBatcher(EnsembleAlgorithm):
    """An ensemble algorithm by which a service solves trajectories beside its requests, with the
    same programs and the same bits."""

    current: RunningJob = eqx.field(static=True)


class _BatcherExecutor(Executor):
    def __init__(self, ensemblealg: ThroughBatcher, engine: Any):
        del engine
        self._current = ensemblealg.current

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        plan, solver = job.plan, self._current.solver
        lanes = job.trajectories.lanes(indices, repeat)
        n, entry = len(indices), solver.entry

        def each(x: Any, batched: bool) -> np.ndarray:
            x = np.asarray(x)
            return x if batched else np.broadcast_to(x, (n, *x.shape))

        batched = plan.batched
        own, p = any(batched.p), None
        if own:
            pairs = zip(lanes.p, batched.p, strict=True)
            parts = [each(x, b).reshape(n, -1) for x, b in pairs if is_parameter(x)]
            p = np.concatenate(parts, axis=1).astype(entry.p.dtype)
        times = each(lanes.saveat, batched.saveat)
        numbers = RequestArrays(
            each(lanes.u0, batched.u0), p, each(lanes.t0, batched.t0), each(lanes.t1, batched.t1),
            times,
        )  # fmt: skip
        rows = times.shape[1]
        answer = self._current.run(solver.program(rows, own=own), numbers)
        lengths = np.minimum(answer.lengths, rows)
        t = None
        if plan.own_times:
            t = np.where(np.arange(rows) < lengths[:, None], times, np.nan)
        counts = {name: getattr(answer, name) for name in COUNTS}
        events, ended = _happened(answer.events), None
        if events is not None and plan.may_end:
            ended = end_by(events.t, events.after, events.count, answer.retcode)
            ended = jax.tree.map(np.asarray, ended)
        about = (t, None, lengths, answer.retcode)
        return Outcome(answer.u[:, :rows], *about, **counts, events=events, ended=ended)


def _happened(events: Events | None) -> RecordedEvents | None:
    if events is None:
        return None
    crossed = events.direction
    crossed = crossed[..., None] if crossed.ndim == 2 else crossed
    return RecordedEvents(
        events.t, events.which, crossed, events.u_before, events.u_after, events.count
    )


EXECUTORS[ThroughBatcher] = _BatcherExecutor
