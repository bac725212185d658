"""The requests of the clients of a service, and how the two clients share their methods."""

import dataclasses
import functools
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..tracing.program import is_tracer
from . import exchange


@dataclasses.dataclass
class Request:
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, Any] | None = None
    deadline: float | None = None
    repeatable: bool = True
    key: str | None = None

    def options(self, attempts: exchange.Attempts) -> dict[str, Any]:
        """The options of HTTPX's `request`."""
        headers = {} if self.key is None else {"idempotency-key": self.key}
        content = None
        if self.body is not None:
            headers["content-type"] = exchange.BINARY
            # The service is told how much of the deadline is left.
            late = {} if self.deadline is None else {"deadline_ms": max(1.0, 1e3 * attempts.left)}
            content = exchange.pack({**self.body, **late})
        asked = {"method": self.method, "url": self.path, "params": self.query}
        return asked | {"headers": headers, "content": content, "timeout": attempts.patience}


def path_of(kind: str, name: str, what: str = "") -> str:
    return f"/v1/{kind}/{urllib.parse.quote(name, safe='')}{what}"


def bounds_of(name: str, pair: Any) -> dict[str, Any]:
    if not (isinstance(pair, list | tuple | np.ndarray) and len(pair) == 2):
        what = "a pair (low, high), between which each trajectory's is drawn"
        raise ValueError(f"with trajectories, {name} must be {what}, got {pair!r:.200}.")
    return {"low": numbers_of(name, pair[0]), "high": numbers_of(name, pair[1])}


def arguments_of(*, may_be_traced: bool = False, **given: Any) -> dict[str, Any]:
    """The arguments that are not None, as NumPy arrays; those that are traced stay as they are."""
    return {name: numbers_of(name, x, may_be_traced) for name, x in given.items() if x is not None}


def numbers_of(name: str, x: Any, may_be_traced: bool = False) -> Any:
    x = _as_vector(x) if name == "p" else x
    if not any(map(is_tracer, jax.tree.leaves(x))):
        return exchange.numbers(name, x)
    if not may_be_traced:
        raise TypeError(
            f"{name} is traced: only Client.solve works inside jit, grad and vmap. Call this "
            "outside of them."
        )
    return x if is_tracer(x) else jnp.asarray(x)


def _as_vector(p: Any) -> Any:
    """Parameters as they are, if they are an array or lists of numbers; for a pytree, the vector of
    its numbers that are real and not integers."""
    if p is None or isinstance(p, jax.Array | np.ndarray | np.generic):
        return p
    leaves = jax.tree.leaves(p)
    if isinstance(p, int | float | list | tuple) and not any(map(eqx.is_array, leaves)):
        return p
    leaves = [x for x in leaves if eqx.is_inexact_array(x) or isinstance(x, float)]
    leaves = [x for x in leaves if not jnp.iscomplexobj(x)]
    if not leaves:
        raise TypeError(f"p must have numbers that are no integers in it, got {p!r:.200}.")
    xp = jnp if any(map(is_tracer, leaves)) else np
    dtype = jnp.result_type(*leaves)
    return xp.concatenate([xp.asarray(x).astype(dtype).reshape(-1) for x in leaves])


def for_both(method: Callable[..., Coroutine]) -> Callable[..., Any]:
    """Makes a method for both clients from a coroutine. In the asynchronous client it is awaited.
    In the other one it is run to its end at once, as its requests and pauses block."""

    @functools.wraps(method)
    def asking(self: Any, *arguments: Any, **named: Any) -> Any:
        return self._made(method(self, *arguments, **named))

    return asking
