"""Reading a store: its metadata, its files and the solution in it."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ground.logs import logger
from ..solution import EnsembleSolution
from .metadata import zarr_or_said
from .stored import solution_in, StoreError


FORMAT = 3
# A store of format 2 has neither events nor initial states and parameters.
_READ = (2, FORMAT)


def open_ensemble(path: str | os.PathLike) -> EnsembleSolution:
    """The solution in a store of `solve(..., store=path)`, finished or not.

    Its arrays are on disk. Indexing reads only the part that is asked for: `sim.u[1000:2000]`,
    `sim[5]`. Computing with an array, or `np.asarray(sim)`, reads all of it; functions of
    `jax.numpy` need the latter. Trajectories that are not in the store yet have the return code
    `Default` and NaN for a state. So have those whose files are missing or cut short; the log names
    these. `sim.elapsed` has the seconds of the solves that filled the store, as far as they came to
    an end. `sim.to_xarray()` has named dimensions. (So has `xarray.open_zarr(path)`, but it
    replaces what is missing by fill values.)

    `sim.events` is as in memory. So are `sim.u0` and `sim.p`, except that the leaves of `p` are
    numbers, strings and None, in dicts, lists and tuples. Other leaves are None, and other classes
    are dicts of their parts.

    **Raises:** `StoreError` where there is no store of an ensemble, and when a chunk is read whose
    contents have changed; `ImportError` without Zarr (the extra `store`).
    """
    return solution_at(Path(path))


def solution_at(path: Path, elapsed: float | None = None) -> EnsembleSolution:
    """**Arguments:** `elapsed`: the seconds of a solve; by default those that the store says.

    **Raises:** `StoreError` where there is no store, or its metadata is damaged."""
    zarr = zarr_or_said()
    kept = attributes_at(path)
    if kept is None:
        raise StoreError(f"there is no store at {os.fspath(path)!r}.")
    with readable(path):
        files = files_at(path, kept, read_only=True)
        files.lacking = lacking = files.find_lacking(kept["complete"])
        if lacking:
            batch, file = next(iter(lacking.items()))
            rows, others = files.layout.rows(batch), len(lacking) - 1
            more = f", and files of {others} other batches" if others else ""
            logger.warning(
                f"the store {path} is damaged: {file}, of the trajectories {rows[0]} to "
                f"{rows[-1]}, is missing or cut short{more}. They have the return code Default; "
                "solve with the same store computes them again."
            )
        whole = kept["complete"] and not lacking
        seconds = kept.get("elapsed", float("nan")) if elapsed is None else elapsed
        return solution_in(zarr.open_group(files, mode="r"), kept, whole, seconds)


def files_at(path: Path, kept: dict[str, Any], read_only: bool) -> Any:
    """The Zarr store in this folder; its chunks are checked against their records."""
    zarr = zarr_or_said()
    from .store_files import Layout, StoreFiles

    of = kept["fingerprint"]
    events = kept.get("events") or {"growing": [], "chunk": 1}
    layout = Layout(
        dict(kept["dims"]),
        of["trajectories"],
        of["batch_size"],
        json.dumps(of, sort_keys=True),
        frozenset(events["growing"]),
        events["chunk"],
    )
    return StoreFiles(zarr.storage.LocalStore(path, read_only=read_only), layout)


def attributes_at(path: Path, lost_is_none: bool = False) -> dict[str, Any] | None:
    """The attributes of the store. None where there is no store, or where they are damaged or
    missing and `lost_is_none`.

    **Raises:** `StoreError` for a store that this version can't read.
    """
    group = _json_of(path / "zarr.json")
    if group is None:
        return None
    if not isinstance(group, dict) or "node_type" not in group:
        if lost_is_none:
            return None
        raise _damaged(path, "its zarr.json is not what was written there")
    if group["node_type"] == "array":
        raise StoreError(f"the Zarr array at {os.fspath(path)!r} is no ensemble.")
    kept = group.get("attributes", {}).get("ensembleode")
    if kept is None:
        raise StoreError(f"the Zarr group at {os.fspath(path)!r} is not that of an ensemble.")
    if not isinstance(kept, dict) or "format" not in kept:
        raise _damaged(path, "it doesn't say what format it has")
    if kept["format"] not in _READ:
        raise StoreError(
            f"the store at {os.fspath(path)!r} has the format {kept['format']}, and this version "
            f"of ensembleode reads {FORMAT}."
        )
    names = {"format", "fingerprint", "kind", "outputs", "engine", "dims", "order", "complete"}
    if missing := sorted(names - set(kept)):
        raise _damaged(path, f"its attributes have no {missing[0]}")
    return kept


@contextlib.contextmanager
def readable(path: Any) -> Iterator[None]:
    """**Raises:** `StoreError` where the metadata of the store have changed since they were
    written."""
    try:
        yield
    except StoreError:
        raise
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as e:
        raise _damaged(path, e) from e


def _damaged(path: Any, why: Any) -> StoreError:
    """The error for metadata that can't be read, as far as it is known which part."""
    about = [Path(path) / "zarr.json", *sorted(Path(path).glob("*/zarr.json"))]
    broken = [str(file) for file in about if not isinstance(_json_of(file), dict)]
    what = f"{broken[0]} is not what was written there" if broken else f"{why}"
    return StoreError(
        f"the store at {os.fspath(path)!r} is damaged: {what}. Call solve with the same store, or "
        "put that back from a copy."
    )


def _json_of(file: Path) -> Any:
    """The contents of a JSON file; None where there is no file, "" where it is damaged."""
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return ""
