"""The files of a store: on the disk before they count, and known again when they are read.

A chunk ends with its CRC-32C, which Zarr's codec puts there. The record of a batch, which is
written when all its chunks are on the disk, has the size and that sum of each, and a digest of
itself with the number of the batch and the fingerprint of the ensemble. So a file that is missing,
cut short, flipped, of another batch or of an earlier run is found when it is read.
"""

import asyncio
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from zarr.storage import LocalStore, WrapperStore

from ..core.fingerprint import digest_of
from ..ground.files import make_folders, sync, written_whole
from .stored import StoreError


# How much of the time may go into waiting for the disk: batches wait for one another.
_SHARE = 0.1
_CHUNK = re.compile(r"(.+)/c/(\d+)(?:/0)*")
_NOT_THERE = (FileNotFoundError, NotADirectoryError)


class Layout(NamedTuple):
    """What a batch has in a store.

    - `dims`: of each array over the trajectories, by name, how many dimensions it has.
    - `seed`: stands for the ensemble.
    """

    dims: dict[str, int]
    trajectories: int
    batch_size: int
    seed: str

    @property
    def batches(self) -> range:
        return range(-(-self.trajectories // self.batch_size))

    def rows(self, batch: int) -> range:
        """Its trajectories."""
        start = batch * self.batch_size
        return range(start, min(start + self.batch_size, self.trajectories))

    def files(self, batch: int) -> list[str]:
        return [f"{name}/c/{batch}{'/0' * (ndim - 1)}" for name, ndim in self.dims.items()]


class StoreFiles(WrapperStore):
    """The Zarr store of this folder, which gives what the records say, or nothing.

    - `root`: where the folder is now.
    - `lacking`: batches that are to be read as if they had never been.
    """

    def __init__(self, store: LocalStore, layout: Layout):
        super().__init__(store)
        self.root, self.layout = store.root, layout
        self._places = {name: i for i, name in enumerate(layout.dims)}
        self._records: dict[int, list[int]] = {}
        self._written: dict[str, int] = {}
        self._waiting: dict[int, list[int]] = {}  # records of batches that are not on the disk yet
        self._free_at = 0.0
        self.lacking: dict[int, str] = {}

    def _with_store(self, store: LocalStore) -> "StoreFiles":
        new = StoreFiles(store, self.layout)
        new.lacking = self.lacking
        return new

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """**Raises:** `StoreError` for a chunk that isn't what was written."""
        at = _CHUNK.fullmatch(key)
        if at is None or at[1] not in self._places:
            return await super().get(key, prototype, byte_range)
        batch = int(at[2])
        if batch in self.lacking or (record := self._record(batch)) is None:
            return None
        value = await super().get(key, prototype)
        if (0 if value is None else _sum(value.to_bytes())) != record[self._places[at[1]] + 1]:
            rows = self.layout.rows(batch)
            raise StoreError(
                f"the store {self.root} is damaged: {key}, of the trajectories {rows[0]} to "
                f"{rows[-1]}, is not what was written. solve with the same store computes them "
                "again."
            )
        return value

    def is_whole(self, batch: int) -> bool:
        """Whether the batch is there, and all its files are what was written."""
        record = self._record(batch)
        return record is not None and not record[0] and self._sums(batch) == record[1:]

    def has_records(self) -> bool:
        return any((self.root / _record_file(b)).exists() for b in self.layout.batches)

    def _sums(self, batch: int) -> list[int]:
        def sum_of(file):
            try:
                return _sum((self.root / file).read_bytes())
            except _NOT_THERE:
                return 0

        return [sum_of(file) for file in self.layout.files(batch)]

    def _record(self, batch: int) -> list[int] | None:
        """Whether workers died of it, and each file's size and sum; None where none is good."""
        if batch in self._records:
            return self._records[batch]
        try:
            words = np.frombuffer((self.root / _record_file(batch)).read_bytes(), "<u8").tolist()
        except (*_NOT_THERE, ValueError):  # or cut short
            return None
        if len(words) != len(self._places) + 2 or words[-1] != self._check(batch, words[:-1]):
            return None
        self._records[batch] = words[:-1]
        return words[:-1]

    def _check(self, batch: int, words: list[int]) -> int:
        return digest_of([self.layout.seed.encode(), np.array([batch, *words], "<u8")])

    def find_lacking(self, complete: bool) -> dict[int, str]:
        """The batches that were written, as all are where it is `complete`, and are not whole:
        each with a file that is missing or cut short."""
        found = {}
        for batch in self.layout.batches:
            record = self._record(batch)
            if record is not None:
                sizes = zip(self.layout.files(batch), record[1:], strict=True)
                lost = next((f for f, x in sizes if self._size(f) != x >> 32), None)
            else:
                file = _record_file(batch)
                lost = file if complete or (self.root / file).exists() else None
            if lost is not None:
                found[batch] = lost
        return found

    def _size(self, file: str) -> int:
        try:
            return (self.root / file).stat().st_size % 2**32
        except _NOT_THERE:
            return 0

    async def set(self, key: str, value: Any) -> None:
        data = value.to_bytes()
        await asyncio.to_thread(self.write, key, data)
        self._written[key] = _sum(data)

    def write(self, key: str, data: bytes, synced: bool = False) -> None:
        """In place, but not yet on the disk. The store's folder is not made where it is gone."""
        make_folders((self.root / key).parent, self.root)
        with written_whole(self.root / key, synced=synced) as file:
            file.write(data)

    def forget(self, batch: int) -> None:
        """The batch is to be written, perhaps again."""
        self._records.pop(batch, None)
        for file in (_record_file(batch), *self.layout.files(batch)):
            (self.root / file).unlink(missing_ok=True)

    def keep(self, batch: int, lost: bool) -> None:
        """Of a batch whose chunks are written: have it recorded, now or soon."""
        # (Zarr writes no chunk that has but the fill value.)
        sums = [self._written.pop(file, 0) for file in self.layout.files(batch)]
        self._waiting[batch] = [int(lost), *sums]
        if time.monotonic() >= self._free_at:
            self.flush()

    def flush(self) -> None:
        """Put the chunks on the disk, and then the records."""
        started = time.monotonic()
        there = [
            file
            for batch, (_, *sums) in self._waiting.items()
            for file, x in zip(self.layout.files(batch), sums, strict=True)
            if x
        ]
        self.sync(there)
        for batch, words in self._waiting.items():
            record = np.array([*words, self._check(batch, words)], "<u8")
            self.write(_record_file(batch), record.tobytes())
        self.sync(map(_record_file, self._waiting))
        self._waiting = {}
        self._free_at = time.monotonic() + (time.monotonic() - started) / _SHARE

    def sync(self, files: Iterable[str]) -> None:
        """These, and the folders that they are in, are on the disk."""
        paths = [Path(self.root, file) for file in files]
        above = {x for p in paths for x in p.parents if x.is_relative_to(self.root)}
        sync(paths)
        sync(above)


def _record_file(batch: int) -> str:
    return f"digest/c/{batch}/0"


def _sum(data: bytes) -> int:
    """The size of a chunk's file, and the CRC-32C at its end; 1 where that isn't its."""
    if len(data) < 4 or google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return 1
    return len(data) % 2**32 << 32 | int.from_bytes(data[-4:], "little")
