"""PRNG keys, which are sent and stored as the integers that they consist of."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def raw(x: Any) -> Any:
    """The integers of a key, abstract for an abstract key; any other value as it is."""
    if not is_key(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))


def as_before(like: Any, x: ArrayLike | None) -> ArrayLike | None:
    """The inverse of [`raw`][]: `x` as a key, if `like` is a key; otherwise `x` as it is."""
    if not is_key(like):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))


def words_of(key: Array) -> Array:
    """Two numbers of 32 bits that stand for a key: its own, where it has two."""
    words = jnp.asarray(raw(key))
    if words.shape == (2,):
        return words
    return jax.random.bits(key, (2,), jnp.uint32)
