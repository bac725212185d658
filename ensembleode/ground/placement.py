"""The devices on which results are, and how much of their memory results may take."""

import contextlib
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np


HOST = 2**28  # bytes on the CPU, for results or a batch


def as_jax_arrays(tree: Any) -> Any:
    """Results as JAX arrays, however many batches they come from.

    Results that were gathered on the host go to JAX's default device. If that is an accelerator,
    they go there only if they take less than a quarter of its memory, and otherwise to JAX's CPU
    device.
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
    """Known numbers as a JAX array that shares no memory with them.

    `jnp.asarray` would compile a program for every shape, and `device_put` alone shares the memory.
    """
    return jax.device_put(np.array(x))


def default_device() -> Any:
    """The device on which JAX computes with arrays that are on no device yet."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    return chosen if isinstance(chosen, jax.Device) else jax.devices()[0]


def share_of_memory(device: Any) -> int:
    """The bytes of an accelerator's memory that a batch, or all results, may take."""
    return (device.memory_stats() or {}).get("bytes_limit", 4 * HOST) // 4
