"""Downloads: the results in a store as a stream of pieces, only few of which are in memory at a
time."""

import io
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import numpy as np


# The largest size of a piece in bytes.
_PIECE = 2**20


class ArrayRows:
    """Some rows of an array, which are read when they are sent."""

    def __init__(self, array: Any, start: int, stop: int):
        self.array, self.start, self.stop = array, start, stop
        self.shape, self.dtype = (stop - start, *array.shape[1:]), array.dtype

    @property
    def bytes_at_once(self) -> int:
        return self._step * max(1, self.dtype.itemsize * int(np.prod(self.shape[1:])))

    @property
    def _step(self) -> int:
        """The rows of a chunk, which is read as a whole."""
        chunks = getattr(self.array, "chunks", None)
        return min(chunks[0] if chunks else self.shape[0], self.shape[0])

    def pieces(self) -> Iterator[bytes]:
        at = self.start
        while at < self.stop:
            end = min(self.stop, (at // self._step + 1) * self._step)
            x = np.ascontiguousarray(self.array[at:end])
            data = x.astype(x.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8)
            for i in range(0, len(data), _PIECE):
                yield data[i : i + _PIECE].tobytes()
            at = end


def in_msgpack(content: Mapping[str, Any]) -> Iterator[bytes]:
    """The contents in MessagePack: the same bytes that `bodies.encoded` makes from arrays in
    memory."""
    packer = msgpack.Packer()
    yield packer.pack_map_header(len(content))
    for name, x in content.items():
        yield packer.pack(name)
        if isinstance(x, ArrayRows):
            size = x.dtype.itemsize * int(np.prod(x.shape))
            yield packer.pack_map_header(3)
            for key, value in (("dtype", x.dtype.newbyteorder("<").str), ("shape", x.shape)):
                yield packer.pack(key) + packer.pack(value)
            yield packer.pack("data") + b"\xc6" + struct.pack(">I", size)
            yield from x.pieces()
        elif isinstance(x, Mapping):
            yield from in_msgpack(x)
        else:
            yield packer.pack(x)


def in_npz(arrays: Mapping[str, ArrayRows]) -> Iterator[bytes]:
    """The contents as a file like that of `numpy.savez`."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w") as file:
        for name, x in arrays.items():
            # (An entry that is given as such has no time of its own.)
            with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                about = {"descr": x.dtype.newbyteorder("<").str, "fortran_order": False}
                np.lib.format.write_array_header_1_0(entry, about | {"shape": x.shape})  # pyright: ignore
                for piece in x.pieces():
                    entry.write(piece)
                    yield from sink.take()
    yield from sink.take()


class _Sink(io.RawIOBase):
    """A file that can only be written to."""

    def __init__(self):
        self._pieces: list[bytes] = []

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces
