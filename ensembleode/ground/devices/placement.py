"""The device on which JAX computes, and how much of its memory results may take."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..hidden_object import HiddenObject
from ..keys import as_before, raw
from .moving import to_default, to_device


HOST = 2**28  # bytes that results or a batch may take on the CPU


def default_device() -> Any:
    """The device on which JAX computes with arrays that are on no device yet."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def platform_of(device: Any) -> str:
    """The platform of a device, such as "cpu" or "gpu"."""
    return device.platform


def platform() -> str:
    """The platform on which JAX computes."""
    return platform_of(default_device())


def has_accelerator() -> bool:
    """Whether there is an accelerator, on which JAX computes unless it is told otherwise."""
    return platform_of(jax.local_devices()[0]) != "cpu"


def computes_on_nvidia() -> bool:
    """Whether JAX computes on an NVIDIA GPU."""
    device = default_device()
    is_gpu = platform_of(device) == "gpu"
    return is_gpu and "rocm" not in device.client.platform_version.lower()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Within this block JAX computes on the CPU.

    **Raises:** `NoCpuError` where JAX was told to leave the CPU out.
    """
    with jax.default_device(_cpu()):
        yield


class NoCpuError(ValueError):
    """JAX has no CPU device."""


def _cpu() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as e:
        raise NoCpuError(
            "this runs on the CPU, and JAX has no CPU device, as JAX_PLATFORMS leaves it out: put "
            "cpu behind the others (JAX_PLATFORMS=cuda,cpu)."
        ) from e


def share_of_memory(device: Any) -> int:
    """The bytes of an accelerator's memory that a batch, or all results, may take."""
    return (device.memory_stats() or {}).get("bytes_limit", 4 * HOST) // 4


def on_this_platform(tree: PyTree) -> PyTree:
    """The inputs of a solve outside of `jit`, on the platform on which it computes: tracers, and
    arrays that are committed to a device of another platform, are moved there."""
    device = default_device()

    def stays(x):
        if isinstance(x, jax.core.Tracer):
            return False
        if not isinstance(x, jax.Array) or not x.committed:
            return True
        return {platform_of(d) for d in x.devices()} == {platform_of(device)}

    return jtu.tree_map(lambda x: x if stays(x) else to_device(x, device), tree)


def brought_home(solution: Any) -> Any:
    """A solution that was computed on the CPU outside of `jit`, with its JAX arrays on JAX's
    default device, an accelerator, if it has room for them (see `as_jax_arrays`)."""
    leaves, tree = jtu.tree_flatten(solution, is_leaf=lambda x: isinstance(x, HiddenObject))
    cpu = _cpu()

    def known(x):
        is_known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        return np.asarray(raw(x)) if is_known else None

    def home(x, found):
        if found is not None:
            return as_before(x, found)
        return to_default(x, back=cpu) if isinstance(x, jax.core.Tracer) else x

    found = as_jax_arrays([known(x) for x in leaves])
    return jtu.tree_unflatten(tree, map(home, leaves, found))


def as_jax_arrays(tree: PyTree) -> PyTree:
    """Results as JAX arrays. Those that were gathered on the host go to JAX's default device; or to
    its CPU device, if they would take more than a quarter of an accelerator's memory."""
    device = default_device()
    gathered = [x for x in jtu.tree_leaves(tree) if isinstance(x, np.ndarray)]
    home = None
    if platform_of(device) != "cpu" and sum(x.nbytes for x in gathered) > share_of_memory(device):
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave it out
            home = jax.devices("cpu")[0]

    def put(x):
        return jax.device_put(x, home, may_alias=True) if isinstance(x, np.ndarray) else x

    return jax.tree.map(put, tree)


def copied_to_jax(x: Any) -> jax.Array:
    """Known numbers as a JAX array that shares no memory with them. (`jnp.asarray` would compile a
    program for every shape.)"""
    return jax.device_put(np.array(x))
