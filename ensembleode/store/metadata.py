"""The metadata that describe the arrays of a store to Zarr."""

from typing import Any

import numpy as np

from ..analysis.labelled import retcode_attributes
from ..ground.extras import installing
from .described import Variable


def zarr_or_said() -> Any:
    """Zarr. **Raises:** `ImportError` without it, which says how to install it."""
    try:
        import zarr
    except ImportError as e:
        raise ImportError(f"store needs Zarr: {installing('store')}.") from e
    return zarr


def metadata_of(
    variables: list[Variable],
    shared: dict[str, tuple[tuple[str, ...], np.ndarray]],
    layout: Any,
    most: int,
) -> dict[str, Any]:
    """The metadata files of a store, and the files of the arrays that all trajectories share.

    **Arguments:** `shared`: arrays by name, each with its dimensions; `layout`: a `Layout`; `most`:
    the largest number of events of a trajectory.
    """
    zarr, files = zarr_or_said(), {}
    group = zarr.create_group(zarr.storage.MemoryStore(files))
    n, size = layout.trajectories, layout.batch_size
    rows = min(size, n)
    codecs = [zarr.codecs.ZstdCodec(level=1), zarr.codecs.Crc32cCodec()]

    def array(name, shape, dtype, chunks, dims, fill: Any = 0, compressed=True) -> Any:
        return group.create_array(
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
    array("trajectory", (n,), np.dtype(np.int64), (rows,), ("trajectory",), -1)
    shape = (len(layout.batches), layout.words)
    array("digest", shape, np.dtype(np.uint64), (1, layout.words), ("batch", "file"), 0, False)
    for name, (dims, x) in shared.items():
        array(name, x.shape, x.dtype, x.shape, dims)[...] = x
    return files
