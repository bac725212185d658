"""Writing a store: batches as they are done, and their records."""

import contextlib
import errno
import operator
import os
import re
import time
import warnings
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax import Array

from ..ground.extras import installing
from ..ground.files import locked, LockedError
from ..plan.plan import Outcome
from ..running.every_event import check_room
from ..running.executor import Executor
from ..running.fingerprint import fingerprint, NotKnownError
from ..running.job import cause_of, Job, may_rerun, UnfinishedBatch
from ..solution.labelled import OWN_TIMES
from ..solution.solution import EngineChoice, EnsembleSolution
from . import reading, stored
from .described import described, StoredVariable
from .kept_given import kept_given
from .stored import StoreError


# The bytes of a variable in a batch; the least number of batches, which bounds the work that a
# crash loses; and the least number of trajectories of a batch, as writing one takes some 20 ms.
_CHUNK, _BATCHES, _FEWEST = 2**24, 64, 64
# The number of batches that workers get at a time; with several, few wait for the last of a batch.
_AHEAD = 16


class StoreWriter:
    """Fills the store of a solve."""

    empty = False

    def __init__(
        self,
        path: str | os.PathLike,
        job: Job,
        outcome: Outcome,
        times: Array | None,
        choice: EngineChoice,
        trajectories: int,
        batch_size: int | None,
        description: dict[str, Any],
        lost: Set[int],
        store_key: str | None,
        started: float,
    ):
        """- `outcome`: the abstract outcome of one trajectory.
        - `times`: the saved times, where all trajectories share them.
        - `description`: everything else that the numbers depend on.
        - `lost`: the trajectories whose workers died, as they become known. Their batches are
            written, and computed again another time.
        - `store_key`: stands for the results of Python functions that are called at run time.
        - `started`: the start of the solve, in seconds of `time.perf_counter`.

        **Raises:** `StoreError` for a store of another ensemble, or that can't be written to, and
        for functions that can't be identified by what they compute; `TypeError` for outputs that
        can't be stored.
        """
        self.path, self.job, self.trajectories, self.lost = _folder(path), job, trajectories, lost
        self._started = started
        self._real = self.path.resolve()  # a link may point to a folder that doesn't exist yet
        self.kind = "trajectories" if job.plan.output is None else "outputs"
        outcome = stored.abstract_of(outcome, job.plan)
        own = job.trajectories.times_of_values
        self.variables, tree = stored.variables_of(outcome, self.kind, job.plan.own_times, own)
        of_events = stored.events_described(outcome.events, job.plan.max_events)
        names = {"trajectory", "time", OWN_TIMES, "digest", *(v.name for v in self.variables)}
        # (With reruns, it isn't recorded from which run a trajectory's `u0` and `p` are.)
        given = None if may_rerun(job.plan) else job.trajectories.given
        self._given = kept_given(given, names, job.plan.saved is None)
        self._shared = dict(self._given.shared)
        if own is not None and outcome.saved is not None:
            self._shared[OWN_TIMES] = (OWN_TIMES,), np.asarray(own)
        if times is not None:
            self._shared["time"] = ("time",), np.asarray(times)
        self.variables += self._given.variables
        number = StoredVariable("trajectory", ("trajectory",), (), np.dtype(np.int64), fill=-1)
        self._all = [number, *self.variables]
        self._said = {
            "outputs": tree,
            "integral": described(outcome.integral, "integral"),
            "p_at": described(outcome.p_at, "p_at"),
            "noise": described(outcome.noise, "noise"),
            "ended": stored.end_described(job, outcome.ended),
            "saved": described(outcome.saved, "saved"),
            "events": of_events,
            "given": self._given.described,
        }
        try:
            of_job = fingerprint(job, store_key)
        except NotKnownError as e:
            raise StoreError(
                f"the store {path} can't know this ensemble again: {e}. Give store_key='...', a "
                "string that stands for what that computes, and another one whenever it changes."
            ) from e
        with self._explained():
            self._lock = _locked(self.path)
            try:
                given = {"trajectories": trajectories, **of_job, **description}
                self._open(given, batch_size, choice)
            except BaseException:
                self.close()
                raise

    @property
    def done(self) -> int:
        """The number of trajectories that are in the store already."""
        return self.trajectories - sum(len(self._rows(b)) for b in self._todo)

    def missing(self, batch_size: int) -> Iterator[np.ndarray]:
        """The trajectories still to be solved, several whole batches at a time."""
        at_once = max(1, batch_size // self.batch_size)
        while self._todo:
            yield np.concatenate([self._rows(b) for b in self._todo[:at_once]])

    def part(self, wanted: np.ndarray, outcome: Outcome, done: np.ndarray) -> None:
        """Write those of the batches in `wanted` that are complete."""
        outcome = jax.tree.map(np.asarray, stored.as_kept(outcome, self.job.plan))
        batches = wanted // self.batch_size
        for batch in set(self._todo).intersection(batches.tolist()):
            at = np.flatnonzero(batches == batch)
            if done[at].all():
                self._write(batch, jax.tree.map(operator.itemgetter(at), outcome))

    def add(self, wanted: np.ndarray, outcome: Outcome) -> None:
        self.part(wanted, outcome, np.ones(len(wanted), bool))

    def ensemble(self, job: Job, stopped: BaseException | None = None, wanted: Any = None) -> None:
        """Write the complete batches of those in which the solve was `stopped`; or else finish."""
        if stopped is not None and isinstance(cause_of(stopped), StoreError):
            return  # `part` has done this
        if isinstance(stopped, UnfinishedBatch):
            self.part(wanted, stopped.outcome, stopped.done)
        with self._explained():
            self._files.flush()
            if stopped is None and (lost := self._files.find_lacking(True)):
                raise FileNotFoundError(errno.ENOENT, f"{next(iter(lost.values()))} is gone")
            if not self._kept["complete"]:
                self._kept["complete"] = stopped is None
                self._kept["elapsed"] = self._before + time.perf_counter() - self._started
                self._write_group()

    def solution(self, elapsed: float) -> EnsembleSolution:
        return reading.solution_at(self._real, elapsed)

    def close(self) -> None:
        self._lock.release()

    def _open(self, given: dict, batch_size: int | None, choice: EngineChoice):
        with reading.readable(self._real):
            kept = reading.attributes_at(self._real, lost_is_none=True)
            size = kept["fingerprint"]["batch_size"] if kept else self._default_batch_size()
            given = {**given, "batch_size": batch_size or size}
            if kept is not None:
                of_store = {"format": kept["format"], **kept["fingerprint"]}
                self._compare(of_store, {"format": reading.FORMAT, **given})
        shared = [
            StoredVariable(k, dims, x.shape, x.dtype) for k, (dims, x) in self._shared.items()
        ]
        self._kept = kept or {
            "format": reading.FORMAT,
            "fingerprint": given,
            "kind": self.kind,
            **self._said,
            "order": self.job.plan.order,
            "names": self.job.plan.names,
            "engine": list(choice[:4]),
            "variables": [v.in_json() for v in self._all],
            "shared": [v.in_json() for v in shared],
            "sums": {},
            "complete": False,
        }
        self.batch_size = given["batch_size"]
        if kept is None:
            # The store was never begun, or is damaged: the folder may only have the contents of a
            # store.
            self._real.mkdir(exist_ok=True)
            for x in self._real.iterdir():
                known = {v.name for v in (*self._all, *shared)} | {"time", "digest", "zarr.json"}
                if x.name not in known and x.suffix != ".partial":
                    raise StoreError(f"{self.path} exists, and is no Zarr group.")
        for left in self._real.rglob("*.partial"):
            left.unlink(missing_ok=True)
        self._inode = self._real.stat().st_ino
        with self._explained("read"):
            self._files = files = reading.files_at(self._real, self._kept, read_only=False)
            todo = [b for b in files.layout.batches if not files.is_whole(b)]
            if kept is None and len(todo) == len(files.layout.batches) and files.has_records():
                raise StoreError(
                    f"the store {self.path} is damaged: its zarr.json is lost, and what is in it "
                    "is of another ensemble. Give another path, or delete it."
                )
        done = set(files.layout.batches).difference(todo)
        self._most = files.most_events(done)
        self.arrays = self._arrays()
        if self._write_shared() or kept is None or not reading.is_node(self._real / "zarr.json"):
            self._write_group()
        self._todo = todo
        self._before = self._kept.get("elapsed", 0.0)

    def _compare(self, kept: dict, given: dict) -> None:
        differ = [k for k in {**kept, **given} if kept.get(k) != given.get(k)]
        if not differ:
            return

        def said(k: str) -> str:
            is_plain = isinstance(given.get(k), int | str) and not k.startswith("#")
            return f"{k} ({kept.get(k)} there, {given.get(k)} here)" if is_plain else k.lstrip("#")

        error = StoreError(
            f"the store {self.path} is that of another ensemble, which differs in "
            f"{', '.join(map(said, differ))}. Give another path, or delete it."
        )
        error.differs = tuple(differ)
        raise error

    def _default_batch_size(self) -> int:
        """A batch size for which a crash costs little, and a file is not too small."""
        each = max(1, *(int(np.prod(v.shape)) * v.dtype.itemsize for v in self.variables))
        width = self.job.plan.width
        rows = max(-(-self.trajectories // _BATCHES), _FEWEST)
        rows = max(1, min(rows, _CHUNK // each))
        return -(-rows // width) * width

    def _arrays(self) -> dict[str, Any]:
        """The arrays of the store; those that are missing, or not as they should be, are made."""
        shared = [*map(StoredVariable.of_json, self._kept["shared"])]
        metadata = reading.metadata_of(self._all, shared, self._files.layout, self._most)
        self._files.metadata = metadata
        written = []
        for file, data in metadata.items():
            data, place = data.to_bytes(), self._real / file
            of_group = file in ("zarr.json", reading.ATTRIBUTES)
            if not of_group and not (place.exists() and place.read_bytes() == data):
                # While the store grows, others may be reading the file that this one replaces.
                self._files.write(file, data, synced=place.exists())
                written.append(file)
        self._files.sync(written)
        return {
            v.name: reading.zarr_or_said().open_array(self._files, path=v.name) for v in self._all
        }

    def _write_shared(self) -> bool:
        """Write the arrays that all trajectories share, unless their files are intact. Returns
        whether the attributes have to be written, too."""
        with self._explained("read"):
            is_there = self._files.has_shared()
        if not (is_there and self._kept["sums"]):
            # (Zarr writes no file for zeros alone.)
            metadata, zarr = self._files.metadata, reading.zarr_or_said()
            files = dict(metadata)
            group = zarr.open_group(zarr.storage.MemoryStore(files))
            for name, (_, x) in self._shared.items():
                group[name][...] = x
            self._files.put_shared({k: x for k, x in files.items() if k not in metadata})
        before, self._kept["sums"] = self._kept["sums"], self._files.shared
        return before != self._files.shared

    def _write_group(self) -> None:
        """Write the group and the attributes; if complete, with the consolidated metadata."""
        zarr, files = reading.zarr_or_said(), dict(self._files.metadata)
        memory = zarr.storage.MemoryStore(files)
        group = zarr.open_group(memory)
        times = ["time"] if self.kind == "trajectories" else []
        names = ["trajectory", *times, *(v.name for v in self._given.variables)]
        group.attrs["coordinates"] = " ".join(names)
        group["digest"].attrs.update(reading.written_attributes(self._kept))
        if self._kept["complete"]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # (that other readers may not know this metadata)
                zarr.consolidate_metadata(memory)
        for file in (reading.ATTRIBUTES, "zarr.json"):
            self._files.write(file, files[file].to_bytes(), synced=True)

    def _rows(self, batch: int) -> np.ndarray:
        return np.asarray(self._files.layout.rows(batch))

    def _write(self, batch: int, outcome: Outcome) -> None:
        rows = self._rows(batch)
        at = slice(rows[0], rows[-1] + 1)
        leaves = [*jtu.tree_leaves(outcome), *self._given.values_of(rows)]
        events = outcome.events
        most = 0 if events is None else min(int(events.count.max()), events.t.shape[1])
        with self._explained():
            self._files.forget(batch)
            try:
                # First, so that arrays are never longer than readers are told.
                if most > self._most:
                    self._most = most
                    self.arrays = self._arrays()
                self.arrays["trajectory"][at] = rows
                for variable, values in zip(self.variables, leaves, strict=True):
                    array = self.arrays[variable.name]
                    if variable.grows:
                        array[at, :most] = values[:, :most]
                    else:
                        check_room(variable.shape, values.shape[1:])
                        array[at] = values
            except OSError:
                with contextlib.suppress(OSError):
                    self._files.forget(batch)  # this makes room for the records of other batches
                raise
            self._todo.remove(batch)
            self._files.keep(batch, not self.lost.isdisjoint(rows.tolist()), most)

    @contextlib.contextmanager
    def _explained(self, what: str = "written to") -> Iterator[None]:
        """Turns errors of the file system into errors about the store, which have its contents."""
        try:
            yield
        except OSError as e:
            solution = self._contents() if hasattr(self, "_todo") else None
            count = 0 if solution is None else np.count_nonzero(np.asarray(solution.retcode))
            there = f"; the {count} trajectories in it are kept" if count else ""
            raise StoreError(
                f"the store {self.path} can't be {what}: {e.strerror or e}{there}. See to "
                "that, and call solve again with the same store.",
                solution,
            ) from e

    def _contents(self) -> EnsembleSolution | None:
        """The contents of the store, even if moved within its folder; None where it is gone."""
        for place in (self._real, *self._real.parent.iterdir()):
            with contextlib.suppress(OSError, StoreError):  # the disk may have been removed
                if place.stat().st_ino != self._inode:
                    continue
                there = reading.attributes_at(place)
                if there and there["fingerprint"] == self._kept["fingerprint"]:
                    self._files.root = place
                    with contextlib.suppress(OSError):
                        self._files.flush()
                    return reading.solution_at(place)
        return None


def batch_size_for(writer: StoreWriter, executor: Executor, batch_size: int) -> int:
    """The number of trajectories to solve at a time: a batch of the store, or several."""
    if not executor.reports:
        return writer.batch_size
    return writer.batch_size * max(1, min(_AHEAD, batch_size // writer.batch_size))


def _folder(path: Any) -> Path:
    """**Raises:** `ValueError` for the address of an object store, `TypeError` for an object that
    is no path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"store must be a path, such as 'sweep.zarr', got {path!r}.")
    if address := re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise ValueError(
            f"store must be a path of a file system, got {os.fspath(path)!r}: a store can't be "
            f"written to {address[0]}/ directly. Give a local path, and copy the folder when it "
            "is complete."
        )
    return Path(path)


def _locked(path: Path) -> Any:
    """The lock of the folder itself, whichever symbolic links lead there."""
    reading.zarr_or_said()
    real = path.resolve()
    real.parent.mkdir(parents=True, exist_ok=True)
    try:
        return locked(f"{real}.lock")
    except ImportError as e:
        raise ImportError(f"store needs filelock: {installing('store')}.") from e
    except LockedError as e:
        raise StoreError(
            f"another process (or solve) is writing to the store {path}: wait for it to end, or "
            "give another path."
        ) from e
