"""Reading a store: its metadata, its files and the solution in it."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..ground.extras import installing
from ..ground.logs import logger
from ..running.fingerprint import digest_of
from ..solution.labelled import retcode_attributes
from ..solution.solution import EnsembleSolution
from .described import StoredVariable
from .stored import solution_in, StoreError


FORMAT = 4
# A store of format 2 has neither events nor initial states and parameters. Before format 4, the
# attributes and the arrays that all trajectories share have no checksums.
_READ = (2, 3, FORMAT)
# The file with the store's attributes, of an array: xarray replaces those of the group when it adds
# a variable.
ATTRIBUTES = "digest/zarr.json"
_NAME = "ensembleode"


def zarr_or_said() -> Any:
    """The module `zarr`. **Raises:** `ImportError` without it, which says how to install it."""
    try:
        import zarr
    except ImportError as e:
        raise ImportError(f"store needs Zarr: {installing('store')}.") from e
    return zarr


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
    """The solution in a store, of which a solve took `elapsed` seconds (by default, as it says).
    Raises `StoreError` where there is no store, or its metadata is damaged."""
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
        if lost := files.find_lost():
            logger.warning(
                f"the store {path} is damaged: {', '.join(lost)} is missing, cut short or of "
                "another store, which is an error when it is read; solve with the same store "
                "writes it again."
            )
        whole = kept["complete"] and not lacking and not lost
        seconds = kept.get("elapsed", float("nan")) if elapsed is None else elapsed
        return solution_in(zarr.open_group(files, mode="r"), kept, whole, seconds)


def files_at(path: Path, kept: dict[str, Any], read_only: bool) -> Any:
    """The Zarr store in this folder; its chunks are checked against their records."""
    zarr = zarr_or_said()
    from .store_files import StoreFiles, StoreLayout

    of, variables = kept["fingerprint"], [*map(StoredVariable.of_json, kept["variables"])]
    layout = StoreLayout(
        {v.name: len(v.dims) for v in variables},
        of["trajectories"],
        of["batch_size"],
        json.dumps(of, sort_keys=True),
        frozenset(v.name for v in variables if v.grows),
        (kept.get("events") or {"chunk": 1})["chunk"],
    )
    files = StoreFiles(zarr.storage.LocalStore(path, read_only=read_only), layout, kept["sums"])
    if read_only:  # (A writer makes the metadata step by step.)
        shared, most = (
            [*map(StoredVariable.of_json, kept["shared"])],
            files.most_events(layout.batches),
        )
        files.metadata = metadata_of(variables, shared, layout, most)
    return files


def metadata_of(
    variables: Sequence[StoredVariable], shared: Sequence[StoredVariable], layout: Any, most: int
) -> dict[str, Any]:
    """The metadata files of a store; `shared` are the arrays that all trajectories share, `most` is
    the largest number of events of a trajectory."""
    zarr, files = zarr_or_said(), {}
    group = zarr.create_group(zarr.storage.MemoryStore(files))
    n, size = layout.trajectories, layout.batch_size
    rows = min(size, n)
    codecs = [zarr.codecs.ZstdCodec(level=1), zarr.codecs.Crc32cCodec()]

    def array(name, shape, dtype, chunks, dims, fill: Any = 0, compressed=True) -> None:
        group.create_array(
            name,
            shape=shape,
            dtype=dtype,
            chunks=tuple(max(1, c) for c in chunks),
            compressors=codecs if compressed else None,
            fill_value=fill,
            dimension_names=dims,
            attributes=retcode_attributes() if name == "retcode" else {},
        )

    for v in variables:
        shape = chunks = v.shape
        if v.grows:
            shape, chunks = (most, *shape[1:]), (layout.chunk, *shape[1:])
        array(v.name, (n, *shape), v.dtype, (rows, *chunks), v.dims, v.fill)
    # (As bytes, since not all file formats that xarray writes have numbers of this size.)
    shape = (len(layout.batches), layout.words * 8)
    array("digest", shape, np.dtype(np.int8), (1, shape[1]), ("batch", "byte"), 0, False)
    for v in shared:
        array(v.name, v.shape, v.dtype, v.shape, v.dims)
    return files


def written_attributes(kept: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a store as they are written: a text, and its checksum. (Only text can be
    copied as an attribute into other file formats.)"""
    text = json.dumps(kept)
    return {_NAME: text, f"{_NAME}_digest": _digest(text)}


def _digest(text: str) -> str:
    return f"{digest_of([text.encode()]):016x}"


def attributes_at(path: Path, lost_is_none: bool = False) -> dict[str, Any] | None:
    """The attributes of the store. None where there is no store, or where they are damaged or
    missing and `lost_is_none`. Raises `StoreError` for a store that this version can't read."""
    group, digest = (_json_of(path / x) for x in ("zarr.json", ATTRIBUTES))
    if group is None and digest is None:
        return None
    # (Up to format 3, the group has the attributes.)
    found = [x for x in (_attributes_in(digest), _attributes_in(group)) if _NAME in x]
    kept = found[0][_NAME] if found else None
    if isinstance(kept, str):
        kept = json.loads(kept) if found[0].get(f"{_NAME}_digest") == _digest(kept) else None
    if kept is None:
        if isinstance(group, dict) and group.get("node_type") == "array":
            raise StoreError(f"the Zarr array at {os.fspath(path)!r} is no ensemble.")
        is_whole = all(is_node(path / x) for x in ("zarr.json", ATTRIBUTES))
        if (is_whole and not found) or not (path / ATTRIBUTES).parent.exists():
            raise StoreError(f"the Zarr group at {os.fspath(path)!r} is not that of an ensemble.")
        if lost_is_none:
            return None
        raise _damaged(path, f"its {ATTRIBUTES} is not what was written there")
    if not isinstance(kept, dict) or "format" not in kept:
        raise _damaged(path, "it doesn't say what format it has")
    if kept["format"] not in _READ:
        error = StoreError(
            f"the store at {os.fspath(path)!r} has the format {kept['format']}, and this version "
            f"of ensembleode reads the formats {', '.join(map(str, _READ))}: read it with the "
            "version that wrote it, or solve into another one."
        )
        error.differs = ("format",)
        raise error
    names = {"format", "fingerprint", "kind", "outputs", "engine", "order", "complete"}
    names |= {"variables", "shared", "sums"} if kept["format"] == FORMAT else {"dims"}
    if missing := sorted(names - set(kept)):
        raise _damaged(path, f"its attributes have no {missing[0]}")
    return kept if kept["format"] == FORMAT else _as_now(path, kept)


def is_node(file: Path) -> bool:
    """Whether a file has metadata of Zarr."""
    found = _json_of(file)
    return isinstance(found, dict) and "node_type" in found


def _attributes_in(node: Any) -> dict[str, Any]:
    """The attributes in the metadata of a group or an array, as far as there are any."""
    found = node.get("attributes") if isinstance(node, dict) else None
    return found if isinstance(found, dict) else {}


def _as_now(path: Path, kept: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a store of an earlier format in today's form, by its arrays."""
    from .store_files import checksum_at_end

    zarr = zarr_or_said()
    growing = (kept.get("events") or {"growing": []})["growing"]
    variables, shared, sums = [], [], {}
    with readable(path):
        files = zarr.storage.LocalStore(path, read_only=True)
        for name, x in zarr.open_group(files, mode="r").arrays():
            if name == "digest":
                continue
            is_own = name in dict(kept["dims"])
            about = x.metadata.dimension_names, x.shape[is_own:], x.dtype, name in growing
            variable = StoredVariable(name, *about, x.fill_value)
            (variables if is_own else shared).append(variable.in_json())
            if not is_own:
                file = "/".join([name, "c", *["0"] * x.ndim])
                sums[file] = checksum_at_end(path / file)
        places = [name for name, _ in kept["dims"]]
        variables.sort(key=lambda x: places.index(x[0]))
    return kept | {"variables": variables, "shared": shared, "sums": sums}


@contextlib.contextmanager
def readable(path: Any) -> Iterator[None]:
    """Raises `StoreError` where the store's metadata have changed since they were written."""
    try:
        yield
    except StoreError:
        raise
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as e:
        raise _damaged(path, e) from e


def _damaged(path: Any, why: Any) -> StoreError:
    """The error for metadata that can't be read; it names the damaged part if that is known."""
    about = [Path(path) / "zarr.json", *sorted(Path(path).glob("*/zarr.json"))]
    broken = [str(file) for file in about if not isinstance(_json_of(file), dict)]
    what = f"{broken[0]} is not what was written there" if broken else f"{why}"
    return StoreError(
        f"the store at {os.fspath(path)!r} is damaged: {what}. Call solve with the same store, or "
        "put that back from a copy."
    )


def _json_of(file: Path) -> dict[str, Any] | str | None:
    """The contents of a JSON file; None where there is no file, "" where it is damaged."""
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return ""
