"""The predictions of a model for each item of some data."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ..problem.ensemble import EnsembleAlgorithm
from ..problem.options import check_count
from .data import Arrays
from .parallel import on_their_devices, Placement, placement
from .processes import needed, peers


@on_their_devices
def predict(
    fn: Callable,
    params: PyTree,
    data: PyTree,
    *,
    batch_size: int | None = None,
    devices: Any = None,
    ensemblealg: EnsembleAlgorithm | None = None,
    dist: bool = False,
) -> dict[str, np.ndarray] | None:
    """The results of a function for each item, in the order of the items.

    **Arguments:**

    - `fn`: `fn(params, batch)`, which returns a pytree of arrays `[item, ...]`.
    - `params`: the parameters, such as those that [`fit`][ensembleode.fit] found.
    - `data`: a pytree of arrays `[item, ...]`, in memory or on disk, with any number of items.
    - `batch_size`: the number of items to compute with at a time, by default all.
    - `devices`, `ensemblealg`, `dist`: the devices that share a batch, as in
        [`fit`][ensembleode.fit].

    **Returns:** the same pytree with NumPy arrays for all items, in every process.

    **Raises:** `ValueError` and `TypeError` for bad input.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> eo.predict(lambda slope, x: slope * x, 2.0, jnp.arange(5.0), batch_size=2).tolist()
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    placed = placement(devices, ensemblealg, dist)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    source = Arrays(data, batch_size, placed, shuffle=False)
    arrays, static = eqx.partition(params, eqx.is_array_like)

    def of_rows(arrays, rows):
        out, n = fn(eqx.combine(arrays, static), rows), jax.tree.leaves(rows)[0].shape[0]
        for x in jax.tree.leaves(out):
            if np.shape(x)[:1] != (n,):
                raise TypeError(
                    f"fn must return arrays with an axis of items, ({n}, ...) for {n} items; it "
                    f"returned the shape {np.shape(x)}."
                )
        return out

    compiled = jax.jit(placed.mapped(of_rows))
    arrays = placed.everywhere(arrays)
    parts = []
    with peers("start it again"):
        for piece in source.in_order():
            assert piece.batch is not None
            with needed():
                out = _gathered(compiled(arrays, piece.batch.rows), placed)
            parts.append(jax.tree.map(lambda x, n=piece.count: x[:n], out))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _gathered(tree: PyTree, placed: Placement) -> dict[str, np.ndarray]:
    if placed.mesh is None or jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)
