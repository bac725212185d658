"""The sources that a field reads its numbers from: registers, or memory."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ....fields import ir
from ..llvm.builder import BOOL, Builder, ElementPointer, Value
from .products import Strips


class Memory:
    """Numbers in memory, from `buffer` on. With `of_lanes`, each number has an entry for each lane,
    side by side. With `offsets`, each lane's numbers begin at the lane's offset and lie `stride`
    elements apart. Otherwise all lanes share the numbers."""

    def __init__(
        self,
        buffer: ElementPointer,
        *,
        of_lanes: bool = False,
        offsets: Value | None = None,
        stride: Value | int = 1,
    ):
        self.buffer, self.of_lanes = buffer, of_lanes
        self.offsets, self.stride = offsets, stride

    @classmethod
    def new(cls, b: Builder, dtype: np.dtype, n: int, *, of_lanes: bool) -> Memory:
        return cls(b.array(dtype, n, of_lanes=of_lanes), of_lanes=of_lanes)

    def moved(self, by: int | Value) -> Memory:
        """The same memory, with indices shifted by `by`."""
        if isinstance(by, int) and not by:
            return self
        each = self.buffer.builder.lanes or 1 if self.of_lanes else self.stride
        buffer = self.buffer.offset(by * each)
        return Memory(buffer, of_lanes=self.of_lanes, offsets=self.offsets, stride=self.stride)

    def load(self, index: Value | int) -> Value:
        """The number with this index, which may differ from lane to lane, but is always valid."""
        b, place = self.buffer.builder, self._place(index)
        if isinstance(place, Value) and place.lanes:
            return self.buffer.gather(place, b.constant(True, BOOL, of_lanes=True), 0)
        return self.buffer.load_lanes(place) if self.of_lanes else self.buffer.load(place)

    def store(self, index: Value | int, value: Value, mask: Value | None = None) -> None:
        """Write a number in the lanes of the mask; not supported with `offsets`."""
        assert self.offsets is None
        b, place = self.buffer.builder, self._place(index)
        if not self.of_lanes:
            assert mask is None
            self.buffer.store(place, value)
        elif isinstance(place, Value) and place.lanes:
            every = b.constant(True, BOOL, of_lanes=True)
            self.buffer.scatter(place, every if mask is None else b.spread(mask), value)
        else:
            if mask is not None:
                value = b.where(mask, value, self.buffer.load_lanes(place))
            self.buffer.store_lanes(place, value)

    def _place(self, index: Value | int) -> Value | int:
        b = self.buffer.builder
        if self.offsets is not None:
            stride = self.stride
            at = index if isinstance(stride, int) and stride == 1 else index * stride
            return self.offsets + at
        if not self.of_lanes or not b.lanes:
            return index
        place = index * b.lanes
        return place + b.lane_numbers() if isinstance(place, Value) and place.lanes else place


class LoadedNumbers(Sequence[Value]):
    """The first `n` numbers in memory; each is loaded when it is used."""

    def __init__(self, memory: Memory, n: int):
        self.memory, self._n = memory, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(self._n)[index]]
        if not -self._n <= index < self._n:
            raise IndexError(index)
        return self.memory.load(index % self._n)


class OperandReader(abc.ABC):
    """The source of a field's numbers, by the groups of `fields.ir.Buffer` and dtypes. All lanes
    share the numbers in `shared`, so these are scalars."""

    @abc.abstractmethod
    def load(self, group: str, dtype: np.dtype, index: int) -> Value:
        """The number with this index."""

    def read(self, buffer: ir.Buffer, index: int) -> Value:
        """The number with this index in its group, which belongs to the array `buffer`."""
        return self.load(buffer.group, buffer.dtype, index)

    def memory(self, group: str, dtype: np.dtype, start: int, end: int) -> Memory | None:
        """The memory of a group, for indices that are computed at run time. They are from `start`
        to below `end`, the indices of one array. None where its numbers are in registers."""
        return None

    def packed(self, strips: Strips) -> ElementPointer | None:
        """Weights that all lanes share, packed as strips; None where no packed copy is kept."""
        return None


def copied(
    b: Builder, numbers: OperandReader, group: str, dtype: np.dtype, indices: Iterable[int]
) -> Memory:
    """Memory with copies of these numbers of a group, indexed as the group is."""
    indices = sorted(indices)
    memory = Memory.new(b, dtype, indices[-1] + 1 - indices[0], of_lanes=group != "shared")
    for i in indices:
        memory.store(i - indices[0], numbers.load(group, dtype, i))
    return memory.moved(-indices[0])
