"""The identity of a fit: digests of its loss, its data and its optimiser. No fit is resumed from
the checkpoints of another one."""

import contextlib
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax import Array
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from ..ground.devices.given_device import for_one_device
from ..ground.keys import raw
from ..ground.version import __version__
from ..running.fingerprint import NotKnownError, text_of_jaxpr
from .step import TrainingState, UpdateStep


# The number of bytes at the beginning of an array on disk that are read.
_BYTES = 2**20


def of_loss(
    step: UpdateStep, state: TrainingState, rows: dict[str, Any] | None, key: Array
) -> dict[str, str | None]:
    """The identity of the loss: its trace for one device, and the versions of the libraries. Parts
    that can't be identified are None. Of the batch `rows`, only shapes and dtypes matter."""
    traced = None
    with contextlib.suppress(NotKnownError):
        traced = _hashed(text_of_jaxpr(_traced(step, state, rows, key)))
    return {"traced": traced, "versions": f"ensembleode {__version__}, jax {jax.__version__}"}


def of_optimizer(optimizer: Any, params: PyTree) -> dict[str, Any]:
    """The identity of an optimiser: the trace of its update without its numbers (None if it can't
    be identified), and digests of the numbers in its initial state, which tell later which of these
    the user has changed."""
    state = optimizer.init(jax.tree.map(jnp.zeros_like, params))  # independent of the parameters

    def updated(params, state, gradient, value):
        if not hasattr(optimizer, "update"):  # Levenberg-Marquardt
            return state
        how = {"value": value, "grad": gradient, "value_fn": lambda p, **_: optax.tree.norm(p)}
        return optimizer.update(gradient, state, params, **how)

    traced = None
    with contextlib.suppress(NotKnownError):
        jaxpr = jax.make_jaxpr(updated)(params, state, params, jnp.zeros(()))
        traced = _hashed(text_of_jaxpr(jaxpr, numbers=False))
    return {
        "traced": traced,
        "versions": f"optax {optax.__version__}, jax {jax.__version__}",
        "begin": {
            name: digest(np.asarray(raw(x)))
            for name, x in leaves_by_name(TrainingState(None, state))
        },
    }


def leaves_by_name(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a pytree by their names, such as `state.params.rate`."""
    leaves = jtu.tree_leaves_with_path(tree)
    return [(jtu.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def _traced(
    step: UpdateStep, state: TrainingState, rows: dict[str, Any] | None, key: Array
) -> ClosedJaxpr:
    given = state.params, state.model_state
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)

    def of(count):
        some = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows)
        place = jax.ShapeDtypeStruct((count,), np.int32)
        return jax.make_jaxpr(step.losses)(*given, some, place, key)

    with for_one_device():
        if not step.has_data:
            return jax.make_jaxpr(step.alone)(*given)
        size = jtu.tree_leaves(rows)[0].shape[0]
        try:  # with few rows, so that the size of batches doesn't matter
            return of(min(2, size))
        except Exception:  # the loss may need a certain number of rows
            return of(size)


def of_array(x: Any) -> str:
    """The identity of an array: a digest of its numbers if it is in memory; otherwise its place on
    the disk, and a digest of its first numbers."""
    about = f"{np.dtype(x.dtype)} {list(x.shape)}"
    if isinstance(x, np.ndarray) and not isinstance(x, np.memmap):
        return f"{about} {digest(x)}"
    where = x.filename if isinstance(x, np.memmap) else getattr(x, "store_path", type(x).__name__)
    rows = max(1, _BYTES // max(1, np.asarray(x[:1]).nbytes))
    return f"{about} of {where} {digest(np.asarray(x[:rows]))}"


def _hashed(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def digest(x: np.ndarray) -> str:
    """A digest of the numbers of an array."""
    return hashlib.sha256(np.ascontiguousarray(x).view(np.uint8).data).hexdigest()
