"""Durable ensembles: jobs in a folder, one at a time, by way of the batcher.

A job is a folder: `job.json` says what it is and how far, `numbers.npz` holds what was sent,
`ensemble.zarr` is the store of `solve(..., store=)`. Whatever was queued or running when the
process ended goes on when the next one starts.
"""

import collections
import concurrent.futures
import datetime
import hashlib
import io
import json
import logging
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..ensemble import EnsembleAlgorithm
from ..executors import EXECUTORS
from ..executors.job import Job, Outcome
from ..problem import EnsembleProblem, remake
from ..solution import ReturnCode
from ..solve import solve
from ..store import open_ensemble, StoreError
from . import wire
from .registry import Entry, is_parameter
from .solving import Answer, joined, Numbers, Program, Solver
from .wire import Refused


logger = logging.getLogger("ensembleode.serve")

# Bytes of a download.
_DOWNLOAD = 2**28
_GOING_ON = ("queued", "running")
_ID = re.compile(r"[0-9a-f]{16}")

Submit = Callable[[Program, Numbers], "concurrent.futures.Future[Any]"]


class Stopped(Exception):
    """The job is cancelled, or the service ends."""


class Jobs:
    """The jobs of a service.

    **Arguments:**

    - `folder`: where they are kept; it is made.
    - `solvers`: by the name of the problem.
    - `submit`: has numbers solved in the background; a future of a `Done`.
    """

    def __init__(self, folder: Path, solvers: Mapping[str, Solver], submit: Submit):
        self._folder = folder
        self._solvers = solvers
        self._submit = submit
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._current: _Current | None = None
        self._ending = False
        self._thread: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._jobs = {job["id"]: job for job in map(_loaded, sorted(folder.glob("*/job.json")))}

    def start(self) -> None:
        """Begin, with what was left over."""
        self._thread = threading.Thread(target=self._go, name="ensembleode-jobs", daemon=True)
        self._thread.start()
        for job in sorted(self._jobs.values(), key=lambda job: job["created"]):
            if job["status"] in _GOING_ON:
                self._queue.put(job["id"])

    def stop(self, seconds: float) -> None:
        """End; what runs goes on when the next process starts."""
        with self._lock:
            self._ending = True
            if self._current is not None:
                self._current.stop()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    #
    # What is asked of them
    #

    def create(self, entry: Entry, body: dict[str, Any], key: str | None) -> dict[str, Any]:
        """A new job; with a `key` that was given before, that one's.

        **Raises:** `Refused`.
        """
        spec, arrays = _specified(entry, body)
        id = secrets.token_hex(8)
        if key is not None:
            id = hashlib.sha256(f"{entry.name} {key}".encode()).hexdigest()[:16]
        digest = _digest(spec, arrays)
        with self._lock:
            if id in self._jobs:
                if self._jobs[id]["digest"] != digest:
                    message = "the Idempotency-Key was given with another body before."
                    raise Refused(409, "conflict", message)
                return self.status(id)
            job = {
                "id": id,
                "problem": entry.name,
                "status": "queued",
                "done": 0,
                "retcodes": {},
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
                "error": None,
                "digest": digest,
                **spec,
            }
            path = self._folder / id
            path.mkdir()
            _write(path / "numbers.npz", _npz(arrays))
            self._jobs[id] = job
            self._save(job)
            self._queue.put(id)
        return self.status(id)

    def every(self) -> list[dict[str, Any]]:
        with self._lock:
            jobs = sorted(self._jobs.values(), key=lambda job: job["created"])
            return [self.status(job["id"]) for job in jobs]

    def status(self, id: str) -> dict[str, Any]:
        """
        **Raises:** `Refused`.
        """
        with self._lock:
            job = self._found(id)
            names = (
                "id", "problem", "status", "done", "trajectories", "retcodes", "created", "error",
            )  # fmt: skip
            return {name: job[name] for name in names}

    def cancel(self, id: str) -> dict[str, Any]:
        """Stop it, unless it has ended.

        **Raises:** `Refused`.
        """
        with self._lock:
            job = self._found(id)
            if job["status"] in _GOING_ON:
                job["status"] = "cancelled"
                self._save(job)
                if self._current is not None and self._current.id == id:
                    self._current.stop()
            return self.status(id)

    def resume(self, id: str) -> dict[str, Any]:
        """Go on, where it was cancelled or has failed.

        **Raises:** `Refused`.
        """
        with self._lock:
            job = self._found(id)
            if job["problem"] not in self._solvers:
                raise Refused(409, "conflict", "its problem is no longer served.")
            if job["status"] in ("cancelled", "failed"):
                job |= {"status": "queued", "error": None}
                self._save(job)
                self._queue.put(id)
            return self.status(id)

    def read(self, id: str, start: int, stop: int | None, npz: bool) -> bytes:
        """Trajectories `start` to `stop` as MessagePack, or `.npz`.

        **Raises:** `Refused`.
        """
        with self._lock:
            n = self._found(id)["trajectories"]
        end = n if stop is None else stop
        for name, value in (("start", start), ("stop", end)):
            if not 0 <= value <= n:
                raise wire.invalid(name, f"{name} must be between 0 and {n}.")
        if start >= end:
            raise wire.invalid("stop", "stop must be larger than start.")
        try:
            sim = open_ensemble(self._folder / id / "ensemble.zarr")
        except StoreError:
            raise Refused(409, "conflict", "there is nothing to download yet.") from None
        each = int(np.prod(sim.u.shape[1:])) * sim.u.dtype.itemsize
        if (end - start) * each > _DOWNLOAD:
            raise wire.over(
                "download", "stop",
                f"download at most {max(1, _DOWNLOAD // each)} trajectories at a time.", 413,
            )  # fmt: skip
        at = slice(start, end)
        arrays = {
            "u": sim.u[at],
            "t": sim.t if isinstance(sim.t, np.ndarray) else sim.t[at],
            "retcode": sim.retcode[at],
            "lengths": sim.lengths[at],
        }
        counts = {"naccept": sim.stats.naccept, "nreject": sim.stats.nreject, "nf": sim.stats.nf}
        stats = {k: x[at] for k, x in counts.items() if x is not None}
        if npz:
            return _npz(arrays | stats)
        codes = [ReturnCode(i).name for i in arrays["retcode"].tolist()]
        return wire.encoded(arrays | {"retcode": codes, "stats": stats, "start": start}, True)

    def _found(self, id: str) -> dict[str, Any]:
        if not _ID.fullmatch(id) or id not in self._jobs:
            raise Refused(404, "not_found", "there is no such ensemble.")
        return self._jobs[id]

    def _save(self, job: dict[str, Any]) -> None:
        _write(self._folder / job["id"] / "job.json", json.dumps(job, indent=1).encode())

    #
    # The thread
    #

    def _go(self) -> None:
        while (id := self._queue.get()) is not None and not self._ending:
            with self._lock:
                job = self._jobs[id]
                if job["status"] not in _GOING_ON:
                    continue
                solver = self._solvers.get(job["problem"])
                if solver is None:
                    self._ended(job, "failed", "its problem is no longer served")
                    continue
                self._current = _Current(id, solver, self._submit, self._progress)
                job["status"] = "running"
                self._save(job)
            status, error = "done", None
            try:
                self._solve(job, self._current)
            except Stopped:
                # Cancelled it says so already; else it goes on another time.
                status = None
            except Exception as e:
                incident = secrets.token_hex(8)
                logger.error("ensemble %s failed (%s)", id, incident, exc_info=e)
                said = "solving it failed"
                if isinstance(e, StoreError):
                    said = "its store can't be written to, or is that of another problem"
                status, error = "failed", f"{said}; see the log ({incident})"
            with self._lock:
                self._current = None
                if status is not None and job["status"] == "running":
                    self._ended(job, status, error)
                elif not self._ending or job["status"] == "cancelled":
                    self._ended(job, job["status"], None)

    def _ended(self, job: dict[str, Any], status: str, error: str | None) -> None:
        job |= {"status": status, "error": error, **self._in_store(job)}
        self._save(job)

    def _solve(self, job: dict[str, Any], current: "_Current") -> None:
        entry = current.solver.entry
        path = self._folder / job["id"]
        job |= self._in_store(job)
        with np.load(path / "numbers.npz", allow_pickle=False) as kept:
            arrays = dict(kept)
        solve(
            EnsembleProblem(entry.prob, _prob_func(entry, job, arrays)),
            entry.alg,
            ThroughBatcher(current.run),
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
            counts = collections.Counter(job["retcodes"]) + _counted(codes)
            job["retcodes"] = dict(counts)

    def _in_store(self, job: dict[str, Any]) -> dict[str, Any]:
        """How far it is."""
        try:
            codes = np.asarray(open_ensemble(self._folder / job["id"] / "ensemble.zarr").retcode)
        except StoreError:
            return {"done": 0, "retcodes": {}}
        counts = _counted(codes)
        counts.pop(ReturnCode.Default.name, None)
        return {"done": counts.total(), "retcodes": dict(counts)}


class _Current:
    """The job that runs: solves its batches, and can be stopped from another thread."""

    def __init__(
        self, id: str, solver: Solver, submit: Submit, progress: Callable[[str, np.ndarray], None]
    ):
        self.id = id
        self.solver = solver
        self._submit = submit
        self._progress = progress
        self._stopped = threading.Event()
        self._future: Any = None
        self._before: np.ndarray | None = None

    def stop(self) -> None:
        self._stopped.set()
        if self._future is not None:
            self._future.cancel()

    def run(self, program: Program, numbers: Numbers) -> Answer:
        """
        **Raises:** `Stopped`, and what solving them raises.
        """
        if self._before is not None:  # which is in the store by now
            self._progress(self.id, self._before)
        self._before = None
        if self._stopped.is_set():
            raise Stopped
        self._future = self._submit(program, numbers)
        if self._stopped.is_set():
            self._future.cancel()
        try:
            answer = joined(self._future.result().results)
        except concurrent.futures.CancelledError:
            raise Stopped from None
        except Exception:
            if self._stopped.is_set():
                raise Stopped from None
            raise
        self._before = answer.retcode
        return answer


class ThroughBatcher(EnsembleAlgorithm):
    """Trajectories solved by a service, beside its requests: the same programs, the same bits."""

    run: Callable[[Program, Numbers], Answer] = eqx.field(static=True)


class _Executor:
    vectorised = False

    def __init__(self, ensemblealg: ThroughBatcher):
        self._current: _Current = ensemblealg.run.__self__  # pyright: ignore

    def check(self, plan: Any) -> None:
        """No option is refused."""

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        plan, solver = job.plan, self._current.solver
        lanes = job.trajectories.lanes(indices, repeat)
        n, entry = len(indices), solver.entry

        def each(x: Any, batched: bool) -> np.ndarray:
            x = np.asarray(x)
            return x if batched else np.broadcast_to(x, (n, *x.shape))

        batched = plan.batched
        own = any(batched.p)
        p = None
        if own:
            parts = [
                each(x, b).reshape(n, -1)
                for x, b in zip(lanes.p, batched.p, strict=True)
                if is_parameter(x)
            ]
            p = np.concatenate(parts, axis=1).astype(entry.p.dtype)
        times = each(lanes.saveat, batched.saveat)
        numbers = Numbers(
            each(lanes.u0, batched.u0), p, each(lanes.t0, batched.t0), each(lanes.t1, batched.t1),
            times,
        )  # fmt: skip
        rows = times.shape[1]
        answer = self._current.run(solver.program(rows, own=own), numbers)
        lengths = np.minimum(answer.lengths, rows)
        t = None
        if plan.own_times:
            t = np.where(np.arange(rows) < lengths[:, None], times, np.nan)
        return Outcome(
            answer.u[:, :rows], t, None, lengths, answer.retcode, answer.naccept, answer.nreject,
            answer.nf, None,
        )  # fmt: skip


EXECUTORS[ThroughBatcher] = _Executor


#
# What a job is
#


def _specified(entry: Entry, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """From a body to what is kept of it.

    **Raises:** `Refused`.
    """
    if "trajectories" in body or "seed" in body:
        return _drawn(entry, body)
    if "deadline_ms" in body:
        raise wire.invalid("deadline_ms", "an ensemble has no deadline.")
    asked = wire.query(entry, body, ensemble=entry.limits.ensemble)
    numbers = asked.numbers
    own_u0, own_p = asked.own
    arrays = {"u0": numbers.u0 if own_u0 else numbers.u0[0], "times": _filled(asked)}
    if numbers.p is not None:
        arrays["p"] = numbers.p if own_p else numbers.p[0]
    arrays["tspan"] = np.stack([numbers.t0, numbers.t1], axis=1)
    if (arrays["tspan"] == arrays["tspan"][0]).all():
        arrays["tspan"] = arrays["tspan"][0]
    return {"trajectories": asked.n, "seed": 0, "drawn": False}, arrays


def _drawn(entry: Entry, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """An ensemble whose `u0` and `p` are drawn between bounds."""
    n, seed = body.get("trajectories"), body.get("seed", 0)
    if type(n) is not int or n < 1:
        raise wire.invalid("trajectories", "trajectories must be a positive integer.")
    if n > entry.limits.ensemble:
        raise wire.over(
            "ensemble", "trajectories", f"{n} trajectories are more than the limit "
            f"ensemble={entry.limits.ensemble}.", 413,
        )  # fmt: skip
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise wire.invalid("seed", "seed must be an integer, 0 or more and below 2^31.")
    arrays: dict[str, np.ndarray] = {}
    fixed: dict[str, Any] = {}
    for name in ("u0", "p"):
        given = body.get(name)
        if not (isinstance(given, dict) and "low" in given):
            fixed[name] = given
            continue
        if set(given) != {"low", "high"}:
            raise wire.invalid(name, f"{name} must be an array, or have low and high.")
        bounds = []
        for end in ("low", "high"):
            value = wire.bound(entry, name, given[end], f"{name}.{end}")
            bounds.append(value)
        if (low_above := bounds[0] > bounds[1]).any():
            at = np.argwhere(low_above)[0]
            raise wire.invalid(wire.path_of(f"{name}.low", at), "low is above high.")
        arrays[f"{name}_low"], arrays[f"{name}_high"] = bounds
    rest = {k: v for k, v in body.items() if k not in ("trajectories", "seed", "u0", "p")}
    if "deadline_ms" in rest:
        raise wire.invalid("deadline_ms", "an ensemble has no deadline.")
    asked = wire.query(entry, rest | fixed)
    if asked.many:
        raise wire.invalid(
            "trajectories", "with trajectories, u0, p and tspan are those of one, or bounds."
        )
    numbers = asked.numbers
    arrays |= {
        "u0": numbers.u0[0],
        "tspan": np.stack([numbers.t0[0], numbers.t1[0]]),
        "times": _filled(asked),
    }
    if numbers.p is not None:
        arrays["p"] = numbers.p[0]
    return {"trajectories": n, "seed": seed, "drawn": True}, arrays


def _filled(asked: wire.Query) -> np.ndarray:
    """The times to save; those that are missing are the end again."""
    times = asked.times
    if times.ndim == 2:
        times = np.where(np.isnan(times), asked.numbers.t1[:, None], times)
    return np.array(times)


def _prob_func(entry: Entry, job: dict[str, Any], arrays: dict[str, np.ndarray]) -> Callable:
    numbers = {k: jnp.asarray(x) for k, x in arrays.items() if k != "times"}

    def own(name: str, ctx: Any, ndim: int) -> Any:
        x = numbers[name]
        return x[ctx.index] if x.ndim > ndim else x

    def drawn(name: str, key: Any) -> Any:
        low, high = numbers[f"{name}_low"], numbers[f"{name}_high"]
        return low + (high - low) * jax.random.uniform(key, low.shape, low.dtype)

    def prob_func(prob: Any, ctx: Any) -> Any:
        tspan = own("tspan", ctx, 1)
        changes = {"u0": own("u0", ctx, len(entry.shape)), "tspan": (tspan[0], tspan[1])}
        p = own("p", ctx, 1) if "p" in numbers else None
        if job["drawn"]:
            of_u0, of_p = jax.random.split(ctx.key)
            if "u0_low" in numbers:
                changes["u0"] = drawn("u0", of_u0)
            if "p_low" in numbers:
                p = drawn("p", of_p)
        if p is not None:
            changes["p"] = entry.with_parameters(p)
        return remake(prob, **changes)

    return prob_func


def _digest(spec: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode())
    for name, x in sorted(arrays.items()):
        digest.update(f"{name} {x.dtype.str} {x.shape}".encode())
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


def _counted(codes: np.ndarray) -> collections.Counter:
    counts = np.bincount(np.asarray(codes).astype(np.int64), minlength=1)
    return collections.Counter({ReturnCode(i).name: int(c) for i, c in enumerate(counts) if c})


#
# Files
#


def _loaded(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)  # pyright: ignore
    return file.getvalue()


def _write(path: Path, content: bytes) -> None:
    """All of it, or nothing."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
