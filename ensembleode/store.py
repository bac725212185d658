"""Ensembles on disk: batches go into a Zarr store as they are done, and are not computed again.

A store is one directory. Each variable is an array over the trajectories with a chunk a batch; a
batch is done when its digest, which is written last, is there. The attributes hold a fingerprint of
the problem, the solver, the options and the versions, so that no other ensemble goes into it.
"""

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .analysis.labelled import inner_dims, output_name, retcode_attributes, state_dims
from .core.executor import Executor
from .core.files import Locked, locked
from .core.fingerprint import digest_of, fingerprint, NotKnown
from .core.job import integers, Job, may_rerun, Unfinished
from .core.keys import is_key, raw
from .core.on_disk import OnDisk
from .core.plan import Result
from .core.state_tree import is_tree
from .solution import EngineChoice, EnsembleError, EnsembleSolution, Stats


FORMAT = 1
# Bytes of a variable in a batch, and how many batches there are at least, where there are enough
# trajectories: what a crash costs. (Writing a batch takes some 20 ms: of few trajectories, as long
# as solving them.)
_CHUNK, _BATCHES, _FEWEST = 2**24, 64, 64
# Batches that workers are given at a time, so that none waits for the last of one.
_AHEAD = 16


class StoreError(EnsembleError):
    """The store can't be used, or no longer; `solution` reads what is in it, if anything.

    - `differs`: where it is that of another ensemble, the names of what differs.
    """

    differs: tuple[str, ...] = ()


class Variable(NamedTuple):
    """An array of the store: its name, its dimensions, and what a trajectory has in it."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


def open_ensemble(path: str | os.PathLike) -> EnsembleSolution:
    """The solution in a store of `solve(..., store=path)`, finished or not.

    Its arrays are on disk. Indexed, they read what is asked for: `sim.u[1000:2000]`, `sim[5]`;
    computed with, all of it, as `np.asarray(sim)` does (functions of `jax.numpy` want that).
    Trajectories that are not in it yet have the return code `Default` and NaN for a state.
    `xarray.open_zarr(path)` opens it with named dimensions.

    **Raises:** `StoreError` where there is no store of an ensemble; `ImportError` without Zarr (the
    extra `store`).
    """
    return _solution(path, _opened(path, "r"))


class Writer:
    """The store of a solve, as it is filled."""

    empty = False

    def __init__(
        self,
        path: str | os.PathLike,
        job: Job,
        outcome: Result,
        times: Any,
        choice: EngineChoice,
        trajectories: int,
        batch_size: int | None,
        description: dict[str, Any],
        lost: Set[int],
        store_key: str | None = None,
    ):
        """
        **Arguments:**

        - `outcome`: the abstract values of one trajectory's.
        - `times`: the saved times, where all share them.
        - `description`: what else the numbers depend on.
        - `lost`: trajectories that workers died of, as they become known: their batches are
            written, and computed again another time.
        - `store_key`: stands for what Python functions compute that are called at run time.

        **Raises:** `StoreError` for a store of another ensemble (naming what differs), one that
        another process writes to, a directory that can't be written to, or Python functions of
        which it can't be told what they compute; `TypeError` for outputs that can't be kept.
        """
        self.path, self.job, self.trajectories, self.lost = _folder(path), job, trajectories, lost
        self._real = self.path.resolve()  # (a link may be to a folder that is not there yet)
        self.kind = "trajectories" if job.plan.output is None else "outputs"
        self.variables, tree = _variables(outcome, self.kind, job.plan.own_times)
        try:
            of_job = fingerprint(job, store_key)
        except NotKnown as e:
            raise StoreError(
                f"the store {path} can't know this ensemble again: {e}. Give store_key='...', a "
                "string that stands for what is computed there, and another one whenever that "
                "changes."
            ) from e
        with self._explained():
            self._lock = _locked(self.path)
            try:
                given = {"trajectories": trajectories, **of_job, **description}
                self._open(given, batch_size, tree, times, choice)
                with self._explained("read"):
                    self._todo = self._missing()
            except BaseException:
                self.close()
                raise

    @property
    def done(self) -> int:
        """How many trajectories are in it already."""
        return self.trajectories - sum(len(self._rows(b)) for b in self._todo)

    def missing(self, batch_size: int) -> Iterator[np.ndarray]:
        """The trajectories still to be solved, some whole batches at a time."""
        at_once = max(1, batch_size // self.batch_size)
        while self._todo:
            yield np.concatenate([self._rows(b) for b in self._todo[:at_once]])

    def part(self, wanted: np.ndarray, outcome: Result, done: np.ndarray) -> None:
        """Keep the batches that are complete, of those `wanted`."""
        outcome = jax.tree.map(np.asarray, outcome._replace(rerun=None))
        batches = wanted // self.batch_size
        for batch in set(self._todo).intersection(batches.tolist()):
            at = np.flatnonzero(batches == batch)
            if done[at].all():
                self._write(batch, [x[at] for x in jtu.tree_leaves(outcome)])

    def add(self, wanted: np.ndarray, outcome: Result) -> None:
        self.part(wanted, outcome, np.ones(len(wanted), bool))

    def ensemble(self, job: Job, stopped: BaseException | None = None, wanted: Any = None) -> None:
        """Keep what is complete of the batches in which it was `stopped`; else finish."""
        if isinstance(stopped, Unfinished) and not isinstance(stopped.cause, StoreError):
            self.part(wanted, stopped.outcome, stopped.done)
        if stopped is None and not self.group.attrs["ensembleode"]["complete"]:
            with self._explained():
                attributes = {**self.group.attrs["ensembleode"], "complete": True}
                self.group.attrs["ensembleode"] = attributes
                with warnings.catch_warnings():
                    # Other readers of the format may not know of it; they read the rest.
                    warnings.simplefilter("ignore")
                    _zarr().consolidate_metadata(os.fspath(self._real))

    def solution(self, elapsed: float) -> EnsembleSolution:
        return _solution(self.path, _opened(self._real, "r"), elapsed)

    def close(self) -> None:
        self._lock.release()

    #
    # The group
    #

    def _open(self, given: dict, batch_size: int | None, tree: Any, times: Any, choice: Any):
        zarr = _zarr()
        if (self._real / "zarr.json").exists():
            self.group = _opened(self._real, "r+")
            kept = _attributes(self.path, self.group)
            wanted = {**given, "batch_size": batch_size or kept["fingerprint"]["batch_size"]}
            self._compare(kept["fingerprint"], wanted)
            for left in self._real.rglob("*.partial"):
                left.unlink(missing_ok=True)
            self.batch_size = kept["fingerprint"]["batch_size"]
            with _reading(self.path):
                self.arrays = self._arrays(times)
        else:
            if self._real.exists() and any(f.suffix != ".partial" for f in self._real.iterdir()):
                raise StoreError(f"{self.path} exists, and is no Zarr group.")
            self.batch_size = batch_size or self._default_batch_size()
            attributes = {
                "coordinates": "trajectory time" if self.kind == "trajectories" else "trajectory",
                "ensembleode": {
                    "format": FORMAT,
                    "fingerprint": {**given, "batch_size": self.batch_size},
                    "kind": self.kind,
                    "outputs": tree,
                    "order": self.job.plan.order,
                    "engine": list(choice),
                    "complete": False,
                },
            }
            self.group = zarr.open_group(
                os.fspath(self._real), mode="w-", attributes=attributes, zarr_format=3
            )
            self.arrays = self._arrays(times)

    def _compare(self, kept: dict, given: dict) -> None:
        differ = [k for k in {**kept, **given} if kept.get(k) != given.get(k)]
        if not differ:
            return
        plain = (int, str)
        said = [
            f"{k} ({kept.get(k)} there, {given.get(k)} here)"
            if isinstance(given.get(k), plain) and not k.startswith("#")
            else k.lstrip("#")
            for k in differ
        ]
        error = StoreError(
            f"the store {self.path} is that of another ensemble, which differs in "
            f"{', '.join(said)}. Give another path, or delete it."
        )
        error.differs = tuple(differ)
        raise error

    def _default_batch_size(self) -> int:
        """So many that a crash costs little, and a file is not too small."""
        each = max(1, *(int(np.prod(v.shape)) * v.dtype.itemsize for v in self.variables))
        width = self.job.plan.width
        rows = max(-(-self.trajectories // _BATCHES), _FEWEST)
        rows = max(1, min(rows, _CHUNK // each))
        return -(-rows // width) * width

    def _arrays(self, times: Any) -> dict[str, Any]:
        """Those of the store, made where they are missing."""
        n, size = self.trajectories, self.batch_size
        batches = -(-n // size)

        def array(name, shape, dtype, chunks, dims):
            if name in self.group:
                return self.group[name]
            codecs = _zarr().codecs
            floating = np.issubdtype(dtype, np.inexact)
            return self.group.create_array(
                name,
                shape=shape,
                dtype=dtype,
                chunks=tuple(max(1, c) for c in chunks),
                compressors=[codecs.ZstdCodec(level=1), codecs.Crc32cCodec()],
                fill_value=np.nan if floating else 0,
                dimension_names=dims,
                attributes=retcode_attributes() if name == "retcode" else {},
            )

        arrays = {
            v.name: array(v.name, (n, *v.shape), v.dtype, (min(size, n), *v.shape), v.dims)
            for v in self.variables
        }
        index = ("trajectory",)
        arrays["trajectory"] = array("trajectory", (n,), np.dtype(np.int64), (min(size, n),), index)
        for name in ("inputs", "lost", "digest"):
            arrays[name] = array(name, (batches,), np.dtype(np.uint64), (1,), ("batch",))
        if times is not None:
            times = np.asarray(times)
            kept = array("time", times.shape, times.dtype, times.shape, ("time",))
            with self._explained("read"):
                there = _reads(kept, slice(None), times)
            if not there:
                kept[:] = times
        return arrays

    #
    # Batches
    #

    def _rows(self, batch: int) -> np.ndarray:
        start = batch * self.batch_size
        return np.arange(start, min(start + self.batch_size, self.trajectories))

    def _missing(self) -> list[int]:
        """The batches that are not there, or not as they were written."""
        missing = []
        for batch in range(-(-self.trajectories // self.batch_size)):
            rows = self._rows(batch)
            if not self._is_there(batch):
                missing.append(batch)
            elif self.arrays["inputs"][batch] != self._inputs(batch):
                raise StoreError(
                    f"the store {self.path} is that of another ensemble: prob_func makes other "
                    f"problems of trajectories {rows[0]} to {rows[-1]}. Give another path, or "
                    "delete it."
                )
        return missing

    def _is_there(self, batch: int) -> bool:
        """Whether it is as it was written, and nothing of it was lost."""
        rows = self._rows(batch)
        at = slice(rows[0], rows[-1] + 1)
        try:
            digest, inputs, lost = (
                int(self.arrays[name][batch]) for name in ("digest", "inputs", "lost")
            )
            if not digest or not inputs or lost:
                return False
            if digest != digest_of([self.arrays[v.name][at] for v in self.variables]):
                return False
        except _UNREADABLE:
            return False
        return _reads(self.arrays["trajectory"], at, rows)

    def _inputs(self, batch: int) -> int:
        """Of the numbers of a batch, and of its first reruns'."""
        leaves = []
        for repeat in (1, 2) if may_rerun(self.job.plan) else (1,):
            lanes = self.job.trajectories.lanes(integers(self._rows(batch)), repeat)
            leaves += jtu.tree_leaves(eqx.partition(lanes, self.job.plan.batched)[0])
        return digest_of([np.asarray(raw(x)) for x in leaves])

    def _write(self, batch: int, leaves: list[np.ndarray]) -> None:
        rows = self._rows(batch)
        at = slice(rows[0], rows[-1] + 1)
        with self._explained():
            self.arrays["trajectory"][at] = rows
            for variable, values in zip(self.variables, leaves, strict=True):
                self.arrays[variable.name][at] = values
            self.arrays["inputs"][batch] = self._inputs(batch)
            self.arrays["lost"][batch] = int(not self.lost.isdisjoint(rows.tolist()))
            self.arrays["digest"][batch] = digest_of(leaves)
        self._todo.remove(batch)

    @contextlib.contextmanager
    def _explained(self, what: str = "written to") -> Iterator[None]:
        """What the file system says, said in terms of the store; with what is in it."""
        try:
            yield
        except OSError as e:
            kept = getattr(self, "_todo", None)
            there = f"; the {self.done} trajectories in it are kept" if kept is not None else ""
            solution = None
            if kept is not None:
                with contextlib.suppress(OSError, StoreError):  # the disk may be gone altogether
                    solution = self.solution(float("nan"))
            raise StoreError(
                f"the store {self.path} can't be {what}: {e.strerror or e}{there}. See to "
                "that, and call solve again with the same store.",
                solution,
            ) from e


def batch_size_for(writer: Writer, executor: Executor, batch_size: int) -> int:
    """How many trajectories to solve at a time: a batch of the store, or several."""
    if not executor.reports:
        return writer.batch_size
    ahead = min(_AHEAD, batch_size // writer.batch_size)
    return writer.batch_size * max(1, ahead)


#
# What is in it
#


# Before the names of the derivatives of a state that is a pytree.
_DU = "du."


def _variables(outcome: Result, kind: str, own_times: bool) -> tuple[list[Variable], Any]:
    """The variables, in the order of the leaves; and how outputs are put together from them."""
    time = "step" if own_times else "time"
    of_states = kind == "trajectories" and is_tree(outcome.u)
    tree = _described(outcome.u, "") if kind == "outputs" or of_states else None
    variables = []
    for path, x in jtu.tree_leaves_with_path(outcome._replace(rerun=None)):
        field, ndim = str(path[0].name), len(x.shape)
        name = {"t": "time"}.get(field, field)
        dims = inner_dims(name, ndim)
        if field == "u" and kind == "outputs":
            name = output_name(path[1:])
            dims = inner_dims(name, ndim)
            if is_key(x):
                raise TypeError(f"a store keeps numbers, and the output {name} is a PRNG key.")
        elif field in ("u", "du"):
            dims = (time, *state_dims(ndim - 1))
            if of_states:
                leaf = output_name(path[1:])
                name = leaf if field == "u" else _DU + leaf
                dims = (time, *inner_dims(name, ndim - 1))
        elif field == "t":
            dims = (time,)
        variables.append(Variable(name, ("trajectory", *dims), x.shape, np.dtype(x.dtype)))
    names = [v.name for v in variables]
    taken = {"trajectory", "inputs", "lost", "digest"} & set(names)
    if len(set(names)) < len(names) or taken:
        raise TypeError(
            "a store has variables retcode, length, naccept, nreject, nf, trajectory, inputs, lost "
            f"and digest of its own; give the outputs of output_func other names than {names}."
        )
    return variables, tree


def _described(out: Any, name: str) -> Any:
    """A pytree of outputs in JSON: the names of its leaves."""
    inside = f"{name}." if name else ""
    if type(out) is dict and all(isinstance(k, str) for k in out):
        return {"dict": {str(k): _described(v, f"{inside}{k}") for k, v in out.items()}}
    if type(out) in (list, tuple):
        parts = [_described(v, f"{inside}{i}") for i, v in enumerate(out)]
        return {type(out).__name__: parts}
    if out is None:
        return None
    if not hasattr(out, "shape"):
        raise TypeError(
            "a store keeps outputs and states that are made of dicts (of names), lists and tuples "
            f"of arrays; here there is a {type(out).__name__}."
        )
    return name or "out"


def _put_together(tree: Any, group: Any, prefix: str = "") -> Any:
    def put(part):
        return _put_together(part, group, prefix)

    match tree:
        case None:
            return None
        case str():
            return OnDisk(group[prefix + tree])
        case {"dict": parts}:
            return {k: put(v) for k, v in parts.items()}
        case {"list": parts}:
            return [put(v) for v in parts]
        case {"tuple": parts}:
            return tuple(put(v) for v in parts)
    raise AssertionError(tree)


def _solution(path: Any, group: Any, elapsed: float = float("nan")) -> EnsembleSolution:
    with _reading(path):
        return _as_it_is(_attributes(path, group), group, elapsed)


def _attributes(path: Any, group: Any) -> dict[str, Any]:
    """What the store says of itself.

    **Raises:** `StoreError` where it isn't one that this version reads.
    """
    kept = group.attrs.get("ensembleode")
    if kept is None:
        raise StoreError(f"the Zarr group at {os.fspath(path)!r} is not that of an ensemble.")
    names = {"format", "fingerprint", "kind", "outputs", "engine", "complete"}
    if not isinstance(kept, dict) or "format" not in kept:
        raise _damaged(path, "it doesn't say what format it has")
    if kept["format"] != FORMAT:
        raise StoreError(
            f"the store at {os.fspath(path)!r} has the format {kept['format']}, and this version "
            f"of ensembleode reads {FORMAT}."
        )
    if missing := sorted(names - set(kept)):
        raise _damaged(path, f"its attributes have no {missing[0]}")
    return kept


def _as_it_is(kept: dict[str, Any], group: Any, elapsed: float) -> EnsembleSolution:
    def lazily(name):
        return OnDisk(group[name]) if name in group else None

    kind = kept["kind"]
    tree, du = kept["outputs"], None
    u = lazily("u") if tree is None else _put_together(tree, group)
    if kind == "trajectories":
        saves_du = tree is not None and any(name.startswith(_DU) for name in group)
        du = _put_together(tree, group, _DU) if saves_du else lazily("du")
    t = lazily("time") if kind == "trajectories" else None
    if t is not None and t.ndim == 1:
        t = np.asarray(t)
    stats = Stats(*(lazily(name) for name in ("naccept", "nreject", "nf")))
    return EnsembleSolution(
        u,
        t,
        lazily("retcode"),
        lazily("length"),
        stats,
        kept["complete"],
        elapsed,
        EngineChoice(*kept["engine"]),
        kind,
        du,
        tuple(kept["order"]) if kept.get("order") else None,
    )


# What a codec's checksum, or a file cut short, raises. (No OSError: that may pass, and says nothing
# of what is on the disk.)
_UNREADABLE = (ValueError, RuntimeError)
# What metadata raises that isn't what was written.
_MALFORMED = (*_UNREADABLE, KeyError, TypeError, AttributeError)


def _reads(array: Any, at: slice, expected: np.ndarray) -> bool:
    """Whether this is there."""
    try:
        return np.array_equal(array[at], expected)
    except _UNREADABLE:
        return False


#
# The file system
#


def _folder(path: Any) -> Path:
    """
    **Raises:** `ValueError` for the address of an object store, `TypeError` for what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"store must be a path, such as 'sweep.zarr', got {path!r}.")
    if address := re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise ValueError(
            f"store must be a path of a file system, got {os.fspath(path)!r}: a store can't be "
            f"written to {address[0]}/ directly. Give a local path, and copy the folder when it "
            "is complete."
        )
    return Path(path)


def _opened(path: str | os.PathLike, mode: Any) -> Any:
    """The Zarr group.

    **Raises:** `StoreError` where there is none, or its metadata is damaged.
    """
    zarr = _zarr()
    with _reading(path):
        try:
            return zarr.open_group(os.fspath(path), mode=mode)
        except FileNotFoundError as e:
            raise StoreError(f"there is no store at {os.fspath(path)!r}.") from e
        except zarr.errors.ContainsArrayError as e:
            raise StoreError(f"the Zarr array at {os.fspath(path)!r} is no ensemble.") from e


@contextlib.contextmanager
def _reading(path: Any) -> Iterator[None]:
    """Says so where the metadata of the store isn't what was written.

    **Raises:** `StoreError`.
    """
    try:
        yield
    except StoreError:
        raise
    except _MALFORMED as e:
        raise _damaged(path, e) from e


def _damaged(path: Any, why: Any) -> StoreError:
    """What of the metadata can't be read, as far as that can be told."""
    about = [Path(path) / "zarr.json", *sorted(Path(path).glob("*/zarr.json"))]
    broken = [str(file) for file in about if not _is_json(file)]
    what = f"{broken[0]} is not what was written there" if broken else f"{why}"
    return StoreError(
        f"the store at {os.fspath(path)!r} is damaged: {what}. Put that back from a copy, or "
        "delete the store and compute it again."
    )


def _is_json(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except ValueError:
        return False


def _locked(path: Path) -> Any:
    """By the folder that it is, whatever symbolic links lead there.

    **Raises:** `StoreError` where another process has it.
    """
    _zarr()
    real = path.resolve()
    real.parent.mkdir(parents=True, exist_ok=True)
    try:
        return locked(f"{real}.lock")
    except ImportError as e:
        raise ImportError("store needs filelock: pip install 'ensembleode[store]'.") from e
    except Locked as e:
        raise StoreError(
            f"another process (or solve) is writing to the store {path}: wait for it to end, or "
            "give another path."
        ) from e


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as e:
        raise ImportError("store needs Zarr: pip install 'ensembleode[store]'.") from e
    return zarr
