"""Interpolation between saved steps."""

from typing import Any

import jax
import jax.numpy as jnp


def cubic_hermite(x: Any, h: Any, left: Any, right: Any, dleft: Any, dright: Any) -> Any:
    """The cubic polynomial with these values and slopes at the ends of a step of size `h`, at the
    share `x` of it."""
    return (
        (1 + 2 * x) * (1 - x) ** 2 * left
        + x**2 * (3 - 2 * x) * right
        + h * x * (1 - x) ** 2 * dleft
        + h * x**2 * (x - 1) * dright
    )


@jax.jit
def hermite(ts, us, dus, length, t):
    if ts.shape[0] == 1:  # a step of nothing
        ts, us, dus = (jnp.concatenate([x, x]) for x in (ts, us, dus))
    sign = jnp.where(ts[1] >= ts[0], 1, -1).astype(ts.dtype)
    length = jnp.asarray(length)
    reached = jnp.arange(ts.shape[0], dtype=length.dtype) < length
    ordered = jnp.where(reached, ts * sign, jnp.inf)

    def at(t):
        i = jnp.searchsorted(ordered, t * sign, side="right") - 1
        i = jnp.clip(i, 0, jnp.asarray(length - 2, i.dtype))
        i = jnp.maximum(i, 0)
        # A single time, or a span of no length, has no interval.
        has_length = (length > 1) & (ts[i + 1] != ts[i])
        j = jnp.where(has_length, i + 1, i)
        h = jnp.where(has_length, ts[j] - ts[i], 1)
        x = (t - ts[i]) / h
        value = cubic_hermite(x, h, us[i], us[j], dus[i], dus[j])
        inside = (t * sign >= ordered[0]) & (t * sign <= ordered[length - 1]) & (length > 0)
        return jnp.where(inside, value, jnp.nan)

    return jax.vmap(at)(t) if t.ndim else at(t)
