"""The metadata that describe the arrays of a store to Zarr."""

from collections.abc import Sequence
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
    variables: Sequence[Variable], shared: Sequence[Variable], layout: Any, most: int
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
    # (Of bytes: file formats that xarray writes have no numbers that are as large.)
    shape = (len(layout.batches), layout.words * 8)
    array("digest", shape, np.dtype(np.int8), (1, shape[1]), ("batch", "byte"), 0, False)
    for v in shared:
        array(v.name, v.shape, v.dtype, v.shape, v.dims)
    return files


def files_of_shared(values: dict[str, np.ndarray], metadata: dict[str, Any]) -> dict[str, Any]:
    """The file of each array that all trajectories share. (Zarr writes none for zeros alone.)"""
    zarr, files = zarr_or_said(), dict(metadata)
    group = zarr.open_group(zarr.storage.MemoryStore(files))
    for name, x in values.items():
        group[name][...] = x
    return {file: data for file, data in files.items() if file not in metadata}
