"""On which device results are, and how much of its memory they may take."""

import contextlib
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np


HOST = 2**28  # bytes on the CPU, for results or a batch


def as_jax_arrays(tree: Any) -> Any:
    """Results as JAX arrays, however many batches they are from.

    What was gathered on the host goes to JAX's default device; on an accelerator only where it
    takes less than a quarter of its memory, and else to JAX's CPU device.
    """
    device = default_device()
    gathered = [x for x in jtu.tree_leaves(tree) if isinstance(x, np.ndarray)]
    home = None
    if device.platform != "cpu" and sum(x.nbytes for x in gathered) > share_of_memory(device):
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave it out
            home = jax.devices("cpu")[0]

    def put(x):
        return jax.device_put(x, home, may_alias=True) if isinstance(x, np.ndarray) else x

    return jax.tree.map(put, tree)


def copied_to_jax(x: Any) -> jax.Array:
    """Numbers that are known as an array of JAX's, which shares no memory with them.

    (`jnp.asarray` compiles a program for every shape, and `device_put` alone shares the memory.)
    """
    return jax.device_put(np.array(x))


def default_device() -> Any:
    """Where JAX computes what is on no device yet."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    return chosen if isinstance(chosen, jax.Device) else jax.devices()[0]


def share_of_memory(device: Any) -> int:
    """Bytes of an accelerator that a batch, or the results of all, may take."""
    return (device.memory_stats() or {}).get("bytes_limit", 4 * HOST) // 4
