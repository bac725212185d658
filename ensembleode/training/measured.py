"""Checks of arrays of measured data."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..tracing.program import is_tracer


def as_numbers(name: str, values: PyTree) -> Array | np.ndarray | None:
    """An array of inexact numbers, in NumPy where they are known. **Raises:** `TypeError` that
    names `name`."""
    if is_tracer(values):
        return values
    try:
        values = np.asarray(values)
    except ValueError as e:  # ragged
        raise TypeError(f"{name} must be one array, and its parts differ in shape.") from e
    if not jnp.issubdtype(values.dtype, jnp.number):
        raise TypeError(f"{name} must be an array of numbers, got the dtype {values.dtype}.")
    inexact = jnp.issubdtype(values.dtype, jnp.inexact)
    return values if inexact else values.astype(jnp.result_type(float))


def check_finite(what: str, values: Any, remedy: str = "") -> None:
    """**Raises:** `ValueError` that says where `values`, if they are known, are not finite."""
    if is_tracer(values) or np.isfinite(values).all():
        return
    at, *more = np.argwhere(~np.isfinite(values))[0].tolist()
    at = (at, *more) if more else at
    raise ValueError(f"{what} that is not finite, at {at}{'; ' if remedy else ''}{remedy}.")
