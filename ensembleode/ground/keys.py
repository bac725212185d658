"""PRNG keys, which are sent and stored as the integers that they consist of."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def raw(x: Any) -> Any:
    """The integers of a key; any other value as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def as_before(like: Any, x: Any) -> Any:
    """The inverse of [`raw`][]: `x` as a key, if `like` is a key; otherwise `x` as it is."""
    if not is_key(like):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))
