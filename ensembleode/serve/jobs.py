"""Durable ensembles: jobs in a folder, which run one at a time by way of the batcher.

A job is a folder: `job.json` says what it is and how far it is, `numbers.npz` holds the arrays that
were sent, and `ensemble.zarr` is the store of `solve(..., store=)`. Jobs that were queued or
running when the process ended go on when the next process starts. Only one process at a time uses
the folder: others wait for its lock, and then take over.
"""

import collections
import contextlib
import datetime
import hashlib
import json
import logging
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np

from ..ground.files import remove_folder, set_aside, written_whole
from ..ground.retcode import ReturnCode
from ..problem.problem import EnsembleProblem
from ..solution.stats import COUNTS
from ..solving import solve
from ..store import open_ensemble, StoreError
from .bodies import invalid, over_limit, RefusedRequest
from .downloads import ArrayRows, in_msgpack, in_npz
from .ensembles import check_store, digest_of, prob_func_of, specified
from .exchange import JsonObject
from .registry import RegistryEntry
from .solving import BatchSolver
from .through_batcher import JobStopped, RunningJob, Submit, ThroughBatcher


logger = logging.getLogger("ensembleode.serve")

# The largest size of a download in bytes.
_DOWNLOAD = 2**28
_GOING_ON = ("queued", "running")
_STATUSES = (*_GOING_ON, "done", "failed", "cancelled")
# The fields of a job that clients are told; `job.json` has further ones.
_TOLD = (
    "id", "problem", "status", "done", "trajectories", "retcodes", "created", "seconds", "error",
)  # fmt: skip
_KEPT = (*_TOLD, "digest", "seed", "drawn", "owner")
_TRASH = ".deleted"
# The seconds for which a request waits for the folder, or for a job to stop.
_PATIENCE = 1.0


class Jobs:
    """The jobs of a service; the methods raise `RefusedRequest`.

    A job belongs to its owner; for others it doesn't exist. A job without an owner ("", as in a
    service that lets everybody in) belongs to everybody, and for such a service so do all jobs.
    """

    def __init__(
        self,
        folder: Path,
        solvers: Mapping[str, BatchSolver],
        submit: Submit,
        queued: int = 100,
        owners: int = 1,
    ):
        """`queued`: how many jobs may be queued; `owners`: how many owners share that."""
        self._folder = folder
        self._solvers = solvers
        self._submit = submit
        self._most_queued, self._share = queued, max(1, queued // owners)
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._current: RunningJob | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._opened = threading.Event()  # set once this process has the folder, and has read it
        self._tried = threading.Event()
        self._jobs: dict[str, JsonObject] = {}
        self._unreadable: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, may_run: threading.Event | None = None) -> None:
        """Start with the jobs that are left over, once the folder is free and `may_run` is set."""
        name = "ensembleode-jobs"
        self._thread = threading.Thread(target=self._live, args=[may_run], name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether this process has the folder; until then, requests for jobs are refused (503)."""
        return self._opened.is_set()

    @property
    def is_dead(self) -> bool:
        """Whether the thread of the jobs has ended although nothing told it to."""
        ended = self._thread is not None and not self._thread.is_alive()
        return ended and not self._ending.is_set()

    def end(self) -> None:
        """Start no more jobs, and stop the one that runs, which goes on when the next process
        starts. (This takes no lock, as the handler of a signal calls it.)"""
        self._ending.set()
        current = self._current
        if current is not None:
            current.stop()
        self._queue.put(None)

    def stop(self, seconds: float) -> None:
        """End, and wait for that."""
        self.end()
        if self._thread is not None:
            self._thread.join(seconds)

    def create(
        self, entry: RegistryEntry, body: JsonObject, key: str | None, owner: str = ""
    ) -> JsonObject:
        """Create a job; or return that of the same `key` (and run it again, if it failed)."""
        spec, arrays = specified(entry, body)
        check_store(entry, spec["trajectories"], arrays["times"])
        id = secrets.token_hex(8)
        if key is not None:
            of_owner = f"{owner} {entry.name} {key}" if owner else f"{entry.name} {key}"
            id = hashlib.sha256(of_owner.encode()).hexdigest()[:16]
        digest = digest_of(spec, arrays)
        with self._access():
            if id in self._unreadable:
                raise _conflict("the ensemble of this Idempotency-Key can't be read: give another.")
            if id in self._jobs:
                if self._jobs[id]["digest"] != digest:
                    raise _conflict("the Idempotency-Key was given with another body before.")
                if self._jobs[id]["status"] == "failed":
                    self._queue_again(self._jobs[id])
                return _described_job(self._jobs[id])
            self._check_room(owner)
            created = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
            job = {"id": id, "problem": entry.name, "owner": owner, "digest": digest}
            job |= {"status": "queued", "done": 0, "retcodes": {}, "created": created}
            last = max((x["number"] for x in self._jobs.values()), default=0)
            job |= {"seconds": 0.0, "error": None, "number": last + 1, **spec}
            path = self._folder / id
            if path.exists():  # without a job.json: making or deleting it was interrupted
                shutil.rmtree(path)
            path.mkdir()
            with written_whole(path / "numbers.npz") as file:
                np.savez(file, allow_pickle=False, **arrays)  # pyright: ignore
            self._save(job)
            self._jobs[id] = job
            self._queue.put(id)
            return _described_job(job)

    def page(self, after: str = "", most: int | None = None, owner: str = "") -> JsonObject:
        """A page of `ensembles`, the oldest first, and `next`, the value of `after` for the next
        page (None at the end)."""
        with self._access():
            mine = (job for job in self._jobs.values() if _is_of(job, owner))
            left = sorted((job for job in mine if _place(job) > after), key=_place)
            page = left[:most]
            end = _place(page[-1]) if len(page) < len(left) else None
            return {"ensembles": [*map(_described_job, page)], "next": end}

    def status(self, id: str, owner: str = "") -> JsonObject:
        with self._access_to(id, owner) as job:
            return _described_job(job)

    def cancel(self, id: str, owner: str = "") -> JsonObject:
        """Cancel a job, unless it has ended; its results so far are kept."""
        with self._access_to(id, owner) as job:
            if job["status"] in _GOING_ON:
                self._change(job, status="cancelled")
                if self._current is not None and self._current.id == id:
                    self._current.stop()
            return _described_job(job)

    def delete(self, id: str, owner: str = "") -> JsonObject:
        """Delete a job that has ended, with its store; one that has not is cancelled, and kept."""
        with self._access_to(id, owner) as job:
            if job["status"] in _GOING_ON:
                return self.cancel(id, owner)
            current = self._current
        if current is not None and current.id == id:
            current.ended.wait(_PATIENCE)
        with self._access_to(id, owner) as job:
            if self._current is not None and self._current.id == id:
                message = "it was cancelled, but has not stopped yet: try again."
                raise RefusedRequest(503, "stopping", message, headers={"Retry-After": "1"})
            path = self._folder / id
            # Without this file it is no job any more, whatever else is still in the folder.
            (path / "job.json").unlink()
            del self._jobs[id]
            trash = set_aside(path, _TRASH)
        remove_folder(trash)
        logger.info("ensemble %s of %s is deleted", id, job["problem"])
        return _described_job(job) | {"status": "deleted"}

    def resume(self, id: str, owner: str = "") -> JsonObject:
        """Resume a job that was cancelled or has failed."""
        with self._access_to(id, owner) as job:
            if job["problem"] not in self._solvers:
                raise _conflict("its problem is no longer served.")
            if job["status"] in ("cancelled", "failed"):
                self._queue_again(job)
            return _described_job(job)

    def _queue_again(self, job: JsonObject) -> None:
        self._check_room(job["owner"])
        self._change(job, status="queued", error=None)
        self._queue.put(job["id"])

    def _check_room(self, owner: str) -> None:
        owners = [job["owner"] for job in self._jobs.values() if job["status"] in _GOING_ON]
        for queued, most in (
            (len(owners), self._most_queued),
            (owners.count(owner), self._share if owner else self._most_queued),
        ):
            if queued >= most:
                message = f"{most} ensembles are queued; try again later."
                raise RefusedRequest(429, "queue_full", message, headers={"Retry-After": "10"})

    @contextlib.contextmanager
    def _access(self) -> Iterator[None]:
        """A context that waits a little for the folder, which another process may have; after that,
        the request is refused (503)."""
        self._tried.wait(_PATIENCE)
        with self._lock:
            if not self._opened.is_set():
                message = "another process has the folder of the ensembles still; try again later."
                later = {"Retry-After": "1"}
                raise RefusedRequest(503, "ensembles_not_ready", message, headers=later)
            yield

    @contextlib.contextmanager
    def _access_to(self, id: str, owner: str) -> Iterator[JsonObject]:
        with self._access():
            job = self._jobs.get(id)
            if job is None or not _is_of(job, owner):
                raise RefusedRequest(404, "not_found", "there is no such ensemble.")
            yield job

    def read(
        self, id: str, start: int, stop: int | None, npz: bool, owner: str = ""
    ) -> tuple[Iterator[bytes], int]:
        """The results of trajectories `start` to `stop` as MessagePack or `.npz`, in pieces; and
        how many bytes are in memory at a time."""
        with self._access_to(id, owner) as job:
            n = job["trajectories"]
        end = n if stop is None else stop
        for name, value in (("start", start), ("stop", end)):
            if not 0 <= value <= n:
                raise invalid(name, f"{name} must be between 0 and {n}.")
        if start >= end:
            raise invalid("stop", "stop must be larger than start.")
        sim = self._opened_store(id)
        if sim is None:
            raise _conflict("there is nothing to download yet.")
        every = [sim.u, *jax.tree.leaves(sim.events)]
        each = sum(int(np.prod(x.shape[1:])) * x.dtype.itemsize for x in every)
        if (end - start) * each > _DOWNLOAD:
            most = max(1, _DOWNLOAD // each)
            message = f"download at most {most} trajectories at a time."
            raise over_limit("download", "stop", message, 413)

        def of(x: Any) -> ArrayRows:
            return ArrayRows(x, start, end)

        t = ArrayRows(sim.t, 0, len(sim.t)) if isinstance(sim.t, np.ndarray) else of(sim.t)
        arrays = {"u": of(sim.u), "t": t, "retcode": of(sim.retcode), "lengths": of(sim.lengths)}
        counts = {name: getattr(sim.stats, name) for name in COUNTS}
        stats = {name: of(x) for name, x in counts.items() if x is not None}
        events = {} if sim.events is None else {k: of(x) for k, x in vars(sim.events).items()}
        size = max(x.bytes_at_once for x in (*arrays.values(), *events.values()))
        if npz:
            of_events = {f"events.{k}": x for k, x in events.items()}
            return in_npz(arrays | stats | of_events), size
        codes = [ReturnCode(i).name for i in sim.retcode[start:end].tolist()]
        content = {**arrays, "retcode": codes, "stats": stats, "start": start}
        return in_msgpack(content | ({"events": events} if events else {})), size

    def _opened_store(self, id: str) -> Any:
        """The store of a job; None as long as it doesn't have all of its arrays."""
        try:
            sim = open_ensemble(self._folder / id / "ensemble.zarr")
        except StoreError:
            return None
        return None if any(x is None for x in (sim.u, sim.t, sim.retcode, sim.lengths)) else sim

    def _change(self, job: JsonObject, **changes: Any) -> None:
        """Change a job, first on the disk; if that fails, the job stays as it was."""
        self._save(job | changes)
        job |= changes

    def _save(self, job: JsonObject) -> None:
        with written_whole(self._folder / job["id"] / "job.json", "w") as file:
            json.dump(job, file, indent=1)

    def _live(self, may_run: threading.Event | None) -> None:
        lock = filelock.FileLock(self._folder / "jobs.lock")
        self._open(lock)
        try:
            while may_run is not None and not may_run.wait(0.1) and not self._ending.is_set():
                pass
            while not self._ending.is_set() and (id := self._queue.get()) is not None:
                self._take_turn(id)
        finally:
            with self._lock:
                self._opened.clear()
            lock.release(force=True)

    def _open(self, lock: Any) -> None:
        """Wait for the folder, and read the jobs in it."""
        told = False
        while not self._ending.is_set():
            try:
                lock.acquire(timeout=0)
                self._load()
                return
            except filelock.Timeout:
                if not told:
                    what = "another process has the ensembles in %s: waiting until it has ended"
                    logger.warning(what, self._folder)
            except OSError as e:
                if not told:
                    logger.error("the ensembles in %s can't be read", self._folder, exc_info=e)
            told = True
            self._tried.set()
            self._ending.wait(0.5)

    def _load(self) -> None:
        for path in self._folder.glob(f"*{_TRASH}"):
            remove_folder(path)
        for path in sorted(self._folder.glob("*/job.json")):
            try:
                job = _loaded(path)
            except (ValueError, OSError) as e:
                # The folder stays, for anyone who may know what to do with it.
                logger.error("an ensemble is left out, as it can't be read: %s", e)
                self._unreadable.add(path.parent.name)
                continue
            self._jobs[job["id"]] = job
        for job in sorted(self._jobs.values(), key=_place):
            if job["status"] in _GOING_ON:
                self._queue.put(job["id"])
        self._opened.set()
        self._tried.set()

    def _take_turn(self, id: str) -> None:
        """Run a job; however it ends, later jobs run after it."""
        try:
            self._run(id)
        except BaseException as e:
            incident, said = secrets.token_hex(8), "solving it failed"
            logger.error("ensemble %s failed (%s)", id, incident, exc_info=e)
            if isinstance(e, StoreError):
                said = "its store can't be written to, or is that of another problem"
            self._fail(id, f"{said}; see the log ({incident})")
        finally:
            current, self._current = self._current, None
            if current is not None:
                current.ended.set()

    def _run(self, id: str) -> None:
        with self._lock:
            job = self._jobs.get(id)
            if job is None or job["status"] not in _GOING_ON:
                return
            solver = self._solvers.get(job["problem"])
            if solver is None:
                self._change(job, status="failed", error="its problem is no longer served")
                return
            self._change(job, status="running")
            self._current = current = RunningJob(id, solver, self._submit, self._progress)
        if self._ending.is_set():  # `end` may have been called before this job could be stopped
            current.stop()
        began, finished = time.monotonic(), False
        try:
            self._solve_or_begin_anew(job, current)
            current.count()
            finished = True
        except JobStopped:
            pass
        finally:
            job["seconds"] += time.monotonic() - began
        with self._lock:
            status = job["status"]
            if status == "running" and not finished:
                return  # the service ends, and the job goes on with the next process
            found = self._in_store_if_readable(job)
            if finished and found.get("done") != job["trajectories"]:
                found = {"done": job["trajectories"]}  # all trajectories are there even so
            status = "done" if status == "running" else status
            self._change(job, status=status, error=None, **found)

    def _fail(self, id: str, error: str) -> None:
        with self._lock:
            if (job := self._jobs.get(id)) is None:  # deleted in the meantime
                return
            if job["status"] in _GOING_ON:
                job |= {"status": "failed", "error": error}
            job |= self._in_store_if_readable(job)
            try:
                self._save(job)
            except Exception as e:
                # The job goes on when the next process starts.
                logger.error("what became of ensemble %s can't be written", id, exc_info=e)

    def _solve_or_begin_anew(self, job: JsonObject, current: RunningJob) -> None:
        try:
            self._solve(job, current)
        except StoreError as e:
            if not {"versions", "format"} & set(e.differs):
                raise
            # (Other versions may also describe the same problem differently.)
            what = "ensemble %s begins anew: its store is of other versions (%s)"
            logger.warning(what, job["id"], e)
            remove_folder(set_aside(self._folder / job["id"] / "ensemble.zarr", _TRASH))
            self._solve(job, current)

    def _solve(self, job: JsonObject, current: RunningJob) -> None:
        entry = current.solver.entry
        path = self._folder / job["id"]
        job |= self._in_store(job)
        with np.load(path / "numbers.npz", allow_pickle=False) as kept:
            arrays = dict(kept)
        solve(
            EnsembleProblem(entry.prob, prob_func_of(entry, job, arrays)),
            entry.alg,
            ThroughBatcher(current),
            trajectories=job["trajectories"],
            saveat=arrays["times"],
            seed=job["seed"],
            store=path / "ensemble.zarr",
            **entry.options,
        )

    def _progress(self, id: str, codes: np.ndarray) -> None:
        with self._lock:
            job = self._jobs[id]
            job["done"] = min(job["trajectories"], job["done"] + len(codes))
            job["retcodes"] = dict(collections.Counter(job["retcodes"]) + _counted(codes))

    def _in_store(self, job: JsonObject) -> JsonObject:
        """The progress of a job, from its store."""
        sim = self._opened_store(job["id"])
        if sim is None:
            return {"done": 0, "retcodes": {}}
        counts = _counted(np.asarray(sim.retcode))
        counts.pop(ReturnCode.Default.name, None)
        return {"done": counts.total(), "retcodes": dict(counts)}

    def _in_store_if_readable(self, job: JsonObject) -> JsonObject:
        try:
            return self._in_store(job)
        except Exception as e:  # any error of Zarr about a file that was cut off
            logger.error("the store of ensemble %s can't be read", job["id"], exc_info=e)
            return {}


def _counted(codes: np.ndarray) -> collections.Counter:
    counts = np.bincount(np.asarray(codes).astype(np.int64), minlength=1)
    return collections.Counter({ReturnCode(i).name: int(c) for i, c in enumerate(counts) if c})


def _conflict(message: str) -> RefusedRequest:
    return RefusedRequest(409, "conflict", message)


def _loaded(path: Path) -> JsonObject:
    """The job in a folder; raises `ValueError` if there is none."""
    try:
        job = json.loads(path.read_bytes())
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    if not (isinstance(job, dict) and job.get("id") == path.parent.name):
        raise ValueError(f"{path} is not that of an ensemble")
    job = {"seconds": 0.0, "owner": "", "number": 0} | job  # older versions have no such fields
    if missing := [name for name in _KEPT if name not in job]:
        raise ValueError(f"{path} is damaged: it lacks {missing[0]}")
    if job["status"] not in _STATUSES or not isinstance(job["created"], str):
        raise ValueError(f"{path} is damaged: its status is {job['status']!r}")
    return job


def _described_job(job: JsonObject) -> JsonObject:
    return {name: job[name] for name in _TOLD}


def _place(job: JsonObject) -> str:
    """The place of a job in the order in which jobs were made, whatever the clock said then."""
    return f"{job['number']:012d} {job['created']} {job['id']}"


def _is_of(job: JsonObject, owner: str) -> bool:
    return not owner or job["owner"] in ("", owner)
