"""What a fit is of: its loss and its data, so that no other goes on from its checkpoints."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from ..core.fingerprint import text_of_jaxpr
from ..tracing.by_value import digest_by_value, NotByValue
from .step import Step


def of_loss(loss: Callable, step: Step, params: Any, rows: Any, key: Any) -> dict[str, str | None]:
    """The loss in two ways: what JAX traces, and the function with all that it refers to.

    Two are the same if one of the ways says so: other code may compute the same, and the same code
    may be traced otherwise, with another number of devices or by another JAX. A way is None where
    it can't be told.

    **Arguments:**

    - `rows`: a batch, of which shapes and dtypes matter; None where it isn't known yet.
    """
    return {"traced": _traced(step, params, rows, key), "function": _function(loss, step.static)}


def _traced(step: Step, params: Any, rows: Any, key: Any) -> str | None:
    if step.has_data and rows is None:
        return None
    params = jax.tree.map(_abstract, params)
    if step.has_data:
        count = jtu.tree_leaves(rows)[0].shape[0]
        place = jax.ShapeDtypeStruct((count,), np.int32)
        closed = jax.make_jaxpr(step.losses)(params, rows, place, key)
    else:
        closed = jax.make_jaxpr(step.alone)(params)
    try:
        return hashlib.sha256(text_of_jaxpr(closed)).hexdigest()
    except NotByValue:
        return None


def _function(loss: Callable, static: Any) -> str | None:
    try:
        return digest_by_value((loss, static), versions=False).hex()
    except NotByValue:
        return None


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def of_array(x: Any) -> str:
    """An array by its numbers, where it is in memory; else by where it is on disk."""
    about = f"{np.dtype(x.dtype)} {list(x.shape)}"
    if isinstance(x, np.memmap):
        return f"{about} of {x.filename}"
    if isinstance(x, np.ndarray):
        return f"{about} {hashlib.sha256(np.ascontiguousarray(x).data).hexdigest()}"
    return f"{about} of {getattr(x, 'store_path', type(x).__qualname__)}"


def is_same_loss(there: dict[str, str | None], here: dict[str, str | None]) -> bool:
    """As far as is known."""
    return any(here[way] is not None and here[way] == there.get(way) for way in here)
