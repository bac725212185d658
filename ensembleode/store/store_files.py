"""The files of a store. A batch counts as written when its files are on the disk, and is checked
when it is read.

A chunk ends with its CRC-32C, which Zarr's codec puts there. The record of a batch is written when
all of its chunks are on the disk. It has the size and the CRC of each, and a digest of itself with
the number of the batch and the fingerprint of the ensemble. So a file that is missing, cut short,
damaged, of another batch or of an earlier run is recognised when it is read. The store's attributes
have the size and the CRC of each array that all trajectories share, and say what arrays there are:
the metadata, which other readers of Zarr need, are not read here.
"""

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from zarr.storage import LocalStore, WrapperStore

from ..ground.files import make_folders, sync, written_whole
from ..running.fingerprint import digest_of
from .stored import StoreError


# The largest fraction of the time that is spent on waiting for the disk; for this, the files of
# several batches are synced together.
_SHARE = 0.1
_CHUNK = re.compile(r"(.+)/c/(\d+)(?:/\d+)*")
_NOT_THERE = (FileNotFoundError, NotADirectoryError)


class StoreLayout(NamedTuple):
    """The layout of a batch in a store.

    - `dims`: for each array over the trajectories, by name, its number of dimensions.
    - `seed`: stands for the ensemble.
    - `growing`: the names of the arrays whose second axis is that of events, which is as long as
        trajectories need.
    - `chunk`: the number of events in a chunk.
    """

    dims: dict[str, int]
    trajectories: int
    batch_size: int
    seed: str
    growing: frozenset[str] = frozenset()
    chunk: int = 1

    @property
    def batches(self) -> range:
        return range(-(-self.trajectories // self.batch_size))

    def rows(self, batch: int) -> range:
        """The trajectories of a batch."""
        start = batch * self.batch_size
        return range(start, min(start + self.batch_size, self.trajectories))

    def files(self, batch: int, most: int) -> list[list[str]]:
        """The files of each array, if the trajectories of the batch have at most `most` events."""
        return [self.files_of(name, batch, most) for name in self.dims]

    def files_of(self, name: str, batch: int, most: int) -> list[str]:
        ndim = self.dims[name]
        if name not in self.growing:
            return [f"{name}/c/{batch}{'/0' * (ndim - 1)}"]
        chunks = range(-(-most // self.chunk))
        return [f"{name}/c/{batch}/{i}{'/0' * (ndim - 2)}" for i in chunks]

    @property
    def words(self) -> int:
        """The number of words of a record."""
        return len(self.dims) + 2 + bool(self.growing)


class StoreFiles(WrapperStore):
    """The Zarr store of this folder. It only returns data that agree with the records of batches.

    - `root`: the present place of the folder.
    - `shared`: the checksum of each file of the arrays that all trajectories share.
    - `metadata`: the metadata files, which are not read from the folder.
    - `lacking`: damaged batches, which are read as if they had never been written.
    """

    def __init__(self, store: LocalStore, layout: StoreLayout, shared: dict[str, int]):
        super().__init__(store)
        self.root, self.layout, self.shared = store.root, layout, shared
        self.metadata: dict[str, Any] = {}
        self._places = {name: i for i, name in enumerate(layout.dims)}
        self._records: dict[int, list[int]] = {}
        self._written: dict[str, int] = {}
        # For each batch that is not on the disk yet: its files, and its record.
        self._waiting: dict[int, tuple[list[str], list[int]]] = {}
        self._ends: dict[tuple[str, int], dict[str, int]] = {}
        self._free_at = 0.0
        self.lacking: dict[int, str] = {}

    def _with_store(self, store: LocalStore) -> "StoreFiles":
        new = StoreFiles(store, self.layout, self.shared)
        new.metadata, new.lacking = self.metadata, self.lacking
        return new

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """**Raises:** `StoreError` for a chunk that isn't what was written."""
        if key in self.metadata:
            return self.metadata[key]
        if key in self.shared:
            value = await super().get(key, prototype)
            if self.shared[key] != (0 if value is None else checksum(value.to_bytes())):
                raise self._damaged(key)
            return value
        at = _CHUNK.fullmatch(key)
        if at is None or at[1] not in self._places:
            return await super().get(key, prototype, byte_range)
        batch = int(at[2])
        if batch in self.lacking or (record := self._record(batch)) is None:
            return None
        value = await super().get(key, prototype)
        found = 0 if value is None else checksum(value.to_bytes())
        word = record[self._places[at[1]] + 1]
        if at[1] in self.layout.growing:
            ends = self._ends_of(at[1], batch, record)
            is_written = _joined(ends.values()) == word and found == ends.get(key, 0)
        else:
            is_written = found == word
        if not is_written:
            rows = self.layout.rows(batch)
            raise self._damaged(f"{key}, of the trajectories {rows[0]} to {rows[-1]},")
        return value

    def _damaged(self, what: str) -> StoreError:
        return StoreError(
            f"the store {self.root} is damaged: {what} is not what was written. solve with the "
            "same store computes it again."
        )

    def is_whole(self, batch: int) -> bool:
        """Whether the batch was written, and all of its files are intact."""
        record = self._record(batch)
        if record is None or record[0]:
            return False
        return self._words(batch, self._most(record), self._sum_of) == record[1:]

    def has_records(self) -> bool:
        return any((self.root / _record_file(b)).exists() for b in self.layout.batches)

    def most_events(self, batches: Iterable[int]) -> int:
        """The largest number of events of a trajectory in these batches, as far as recorded."""
        records = map(self._record, batches)
        return max((self._most(x) for x in records if x is not None), default=0)

    def _most(self, record: list[int]) -> int:
        return record[-1] if self.layout.growing else 0

    def _words(self, batch: int, most: int, sum_of: Callable[[str], int]) -> list[int]:
        """The words of a record: the checksum of each file, or for an array that grows one checksum
        over those of its files; and at the end the largest number of events."""
        words = []
        for name, files in zip(self.layout.dims, self.layout.files(batch, most), strict=True):
            sums = [sum_of(file) for file in files]
            words.append(_joined(sums) if name in self.layout.growing else sums[0])
        return [*words, most] if self.layout.growing else words

    def _sum_of(self, file: str) -> int:
        try:
            return checksum((self.root / file).read_bytes())
        except _NOT_THERE:
            return 0

    def _ends_of(self, name: str, batch: int, record: list[int]) -> dict[str, int]:
        """For each file of an array that grows, the checksum at its end; the rest isn't read."""
        if (name, batch) not in self._ends:
            files = self.layout.files_of(name, batch, self._most(record))
            self._ends[name, batch] = {file: checksum_at_end(self.root / file) for file in files}
        return self._ends[name, batch]

    def _record(self, batch: int) -> list[int] | None:
        """Whether the workers of a batch died, and its `_words`; None without a valid record."""
        if batch in self._records:
            return self._records[batch]
        try:
            words = np.frombuffer((self.root / _record_file(batch)).read_bytes(), "<u8").tolist()
        except (*_NOT_THERE, ValueError):  # missing or cut short
            return None
        if len(words) != self.layout.words or words[-1] != self._check(batch, words[:-1]):
            return None
        self._records[batch] = words[:-1]
        return words[:-1]

    def _check(self, batch: int, words: list[int]) -> int:
        return digest_of([self.layout.seed.encode(), np.array([batch, *words], "<u8")])

    def find_lacking(self, complete: bool) -> dict[int, str]:
        """The batches that were written (if the store is `complete`, all batches) and are damaged,
        each with a file that is missing or cut short."""
        found = {}
        for batch in self.layout.batches:
            record = self._record(batch)
            if record is not None:
                lost = self._lost_of(batch, record)
            else:
                file = _record_file(batch)
                lost = file if complete or (self.root / file).exists() else None
            if lost is not None:
                found[batch] = lost
        return found

    def find_lost(self) -> list[str]:
        """The files of shared arrays that are missing, cut short, or of another store."""
        return [file for file, x in self.shared.items() if checksum_at_end(self.root / file) != x]

    def _lost_of(self, batch: int, record: list[int]) -> str | None:
        """A file of the batch that is missing or cut short, or in an array whose sum differs."""
        for name, word in zip(self.layout.dims, record[1:], strict=False):
            files = self.layout.files_of(name, batch, self._most(record))
            if name not in self.layout.growing:
                if self._size(files[0]) != word >> 32:
                    return files[0]
            elif _joined((ends := self._ends_of(name, batch, record)).values()) != word:
                return next((file for file, x in ends.items() if x < 2), files[0])
        return None

    def _size(self, file: str) -> int:
        try:
            return (self.root / file).stat().st_size % 2**32
        except _NOT_THERE:
            return 0

    def has_shared(self) -> bool:
        """Whether the files of the arrays that all trajectories share are intact."""
        return all(self._sum_of(file) == x for file, x in self.shared.items())

    def put_shared(self, files: dict[str, Any]) -> None:
        """Write the files of the arrays that all trajectories share, if they aren't there."""
        self.shared = {file: checksum(data.to_bytes()) for file, data in files.items()}
        lost = [file for file, x in self.shared.items() if self._sum_of(file) != x]
        for file in lost:
            self.write(file, files[file].to_bytes())
        self.sync(lost)

    async def set(self, key: str, value: Any) -> None:
        data = value.to_bytes()
        await asyncio.to_thread(self.write, key, data)
        self._written[key] = checksum(data)

    def write(self, key: str, data: bytes, synced: bool = False) -> None:
        """Write a file in place, without waiting for the disk. If the store's folder is gone, it
        isn't made again."""
        make_folders((self.root / key).parent, self.root)
        with written_whole(self.root / key, synced=synced) as file:
            file.write(data)

    def forget(self, batch: int) -> None:
        """Forget a batch, as it is going to be written, possibly again."""
        self._records.pop(batch, None)
        for name in self.layout.growing:
            self._ends.pop((name, batch), None)
        # An array that grows may have further files, from an earlier run.
        folders = [self.root / name / "c" / str(batch) for name in self.layout.growing]
        more = [x for folder in folders for x in folder.rglob("*") if x.is_file()]
        known = [_record_file(batch), *itertools.chain(*self.layout.files(batch, 0))]
        for file in (*(self.root / x for x in known), *more):
            file.unlink(missing_ok=True)

    def keep(self, batch: int, lost: bool, most: int) -> None:
        """Have the record of a batch written, now or soon; its chunks are written already. `most`
        is the largest number of events of a trajectory."""
        files = itertools.chain(*self.layout.files(batch, most))
        # (Zarr writes no chunk that holds nothing but the fill value.)
        written = {file: self._written.pop(file, 0) for file in files}
        words = [int(lost), *self._words(batch, most, written.__getitem__)]
        self._waiting[batch] = [file for file, x in written.items() if x], words
        if time.monotonic() >= self._free_at:
            self.flush()

    def flush(self) -> None:
        """Put the chunks on the disk, and then the records."""
        started = time.monotonic()
        self.sync(file for files, _ in self._waiting.values() for file in files)
        for batch, (_, words) in self._waiting.items():
            record = np.array([*words, self._check(batch, words)], "<u8")
            self.write(_record_file(batch), record.tobytes())
        self.sync(map(_record_file, self._waiting))
        self._waiting = {}
        self._free_at = time.monotonic() + (time.monotonic() - started) / _SHARE

    def sync(self, files: Iterable[str]) -> None:
        """Wait until these files, and the folders that they are in, are on the disk."""
        paths = [Path(self.root, file) for file in files]
        above = {x for p in paths for x in p.parents if x.is_relative_to(self.root)}
        sync(paths)
        sync(above)


def _record_file(batch: int) -> str:
    return f"digest/c/{batch}/0"


def _joined(sums: Iterable[int]) -> int:
    return digest_of([np.array([*sums], "<u8")])


def checksum_at_end(path: Path) -> int:
    """`checksum` of a file, assuming that it is whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - 4))
            end = file.read()
    except _NOT_THERE:
        return 0
    return 1 if size < 4 else size % 2**32 << 32 | int.from_bytes(end, "little")


def checksum(data: bytes) -> int:
    """The size of a chunk's file and the CRC-32C at its end; 1 where that CRC is wrong."""
    if len(data) < 4 or google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return 1
    return len(data) % 2**32 << 32 | int.from_bytes(data[-4:], "little")
