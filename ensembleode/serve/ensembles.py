"""The specification of a job's ensemble: made from the body of a request, kept on disk, and turned
into a `prob_func`."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..problem.problem import remake
from . import bodies, requests
from .exchange import JsonObject
from .registry import RegistryEntry


def specified(entry: RegistryEntry, body: JsonObject) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """The specification, and the arrays that are kept with it, from a request's body."""
    if "trajectories" in body or "seed" in body:
        return _drawn(entry, body)
    asked = _asked(entry, body, ensemble=entry.limits.ensemble)
    return {"trajectories": asked.n, "seed": 0, "drawn": False}, _arrays(asked)


def _asked(entry: RegistryEntry, body: JsonObject, **options: Any) -> requests.Query:
    if "deadline_ms" in body:
        raise bodies.invalid("deadline_ms", "an ensemble has no deadline.")
    return requests.query(entry, body, **options)


def _arrays(asked: requests.Query) -> dict[str, np.ndarray]:
    """The arrays that are kept; numbers that all trajectories share are in them only once."""
    numbers, times, (own_u0, own_p) = asked.numbers, asked.times, asked.own
    if times.ndim == 2:  # missing times become the end again
        times = np.where(np.isnan(times), numbers.t1[:, None], times)
    tspan = np.stack([numbers.t0, numbers.t1], axis=1)
    arrays = {
        "u0": numbers.u0 if own_u0 else numbers.u0[0],
        "tspan": tspan[0] if (tspan == tspan[0]).all() else tspan,
        "times": np.array(times),
    }
    if numbers.p is not None:
        arrays["p"] = numbers.p if own_p else numbers.p[0]
    return arrays


def check_store(entry: RegistryEntry, n: int, times: np.ndarray) -> None:
    each = entry.answer_bytes(times.shape[-1])
    each += times.shape[-1] * times.itemsize if times.ndim == 2 else 0
    limit = entry.limits.store
    if n * each > limit:
        message = f"{n} trajectories of {each} bytes are more than the limit store={limit}"
        less = f"ask for {max(1, limit // each)} at most, or for fewer times."
        raise bodies.over_limit("store", None, f"{message}: {less}", 413)


def _drawn(entry: RegistryEntry, body: JsonObject) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """The specification of an ensemble whose `u0` and `p` are drawn between bounds."""
    given = (body.get("trajectories"), body.get("seed", 0))
    n, seed = (int(x) if isinstance(x, float) and x.is_integer() else x for x in given)
    if type(n) is not int or n < 1:
        raise bodies.invalid("trajectories", "trajectories must be a positive integer.")
    if n > (most := entry.limits.ensemble):
        message = f"{n} trajectories are more than the limit ensemble={most}."
        raise bodies.over_limit("ensemble", "trajectories", message, 413)
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise bodies.invalid("seed", "seed must be an integer, 0 or more and below 2^31.")
    arrays: dict[str, np.ndarray] = {}
    rest = {k: v for k, v in body.items() if k not in ("trajectories", "seed")}
    for name in ("u0", "p"):
        given = body.get(name)
        if not (isinstance(given, dict) and "low" in given):
            continue
        del rest[name]
        if set(given) != {"low", "high"}:
            raise bodies.invalid(name, f"{name} must be an array, or have low and high.")
        bounds = [requests.bound(entry, name, given[x], f"{name}.{x}") for x in ("low", "high")]
        if (low_above := bounds[0] > bounds[1]).any():
            at = np.argwhere(low_above)[0]
            raise bodies.invalid(bodies.path_of(f"{name}.low", at), "low is above high.")
        arrays[f"{name}_low"], arrays[f"{name}_high"] = bounds
    asked = _asked(entry, rest)
    if asked.many:
        message = "with trajectories, u0, p and tspan are those of one, or bounds."
        raise bodies.invalid("trajectories", message)
    return {"trajectories": n, "seed": seed, "drawn": True}, arrays | _arrays(asked)


def prob_func_of(entry: RegistryEntry, job: JsonObject, arrays: dict[str, np.ndarray]) -> Callable:
    numbers = {k: jnp.asarray(x) for k, x in arrays.items() if k != "times"}

    def own(name: str, ctx: Any, ndim: int) -> Array:
        x = numbers[name]
        return x[ctx.index] if x.ndim > ndim else x

    def drawn(name: str, key: Array) -> Array:
        low, high = numbers[f"{name}_low"], numbers[f"{name}_high"]
        return low + (high - low) * jax.random.uniform(key, low.shape, low.dtype)

    def prob_func(prob: Any, ctx: Any) -> Any:
        tspan = own("tspan", ctx, 1)
        changes = {"u0": own("u0", ctx, len(entry.shape)), "tspan": (tspan[0], tspan[1])}
        p = own("p", ctx, 1) if "p" in numbers else None
        if job["drawn"]:
            of_u0, of_p = jax.random.split(ctx.key)
            if "u0_low" in numbers:
                changes["u0"] = drawn("u0", of_u0)
            if "p_low" in numbers:
                p = drawn("p", of_p)
        if p is not None:
            changes["p"] = entry.with_parameters(p)
        return remake(prob, **changes)

    return prob_func


def digest_of(spec: JsonObject, arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode())
    for name, x in sorted(arrays.items()):
        digest.update(f"{name} {x.dtype.str} {x.shape}".encode())
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()
