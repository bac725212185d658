"""Rewrites programs that draw random numbers: the integers of PRNG keys take the place of the keys.

As in JAX itself, each operation on a key (a split, random bits) is a function of integers, which
belongs to the key's implementation.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..ground.keys import is_key, raw
from ..tracing.evaluation import equations, is_jaxpr, params_of
from ..tracing.program import structs_of
from .equations import bind, called, interpreted, of_each, rewritten


def without_keys(jaxpr: jex.Jaxpr, storage: np.dtype | None = None) -> jex.Jaxpr:
    """The same program without keys. A program whose inputs are keys is left as it is if `storage`,
    the dtype in which parameters are stored, has fewer than 64 bits."""
    if not any(map(_has_keys, equations(jaxpr))):
        return jaxpr
    given = any(is_key(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
    if given and storage is not None and np.dtype(storage).itemsize < 8:
        return jaxpr
    structs = _structs([*jaxpr.constvars, *jaxpr.invars])
    return rewritten(jaxpr, lambda *xs: interpreted(jaxpr, xs, raw, _equation), structs)


def _has_keys(eqn: JaxprEqn) -> bool:
    return any(is_key(v.aval) for v in (*eqn.invars, *eqn.outvars))


def _closed(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without keys, of its constants and its inputs."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    binders = inner.invars if inner is not jaxpr else [*inner.constvars, *inner.invars]
    return jax.make_jaxpr(lambda *xs: interpreted(jaxpr, xs, raw, _equation))(*_structs(binders))


def _structs(binders: list) -> list:
    avals = [raw(v.aval) for v in binders]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _equation(eqn: JaxprEqn, ins: list) -> list:
    inner, name = called(eqn), eqn.primitive.name
    with _at_place_of(eqn):
        if inner is not None:
            return interpreted(inner, ins, raw, _equation)
        if name == "random_gamma":
            return interpreted(_implemented(eqn), ins, raw, _equation)
        if name in _RULES:
            return [_RULES[name](eqn, *ins)]
        if any(any(map(_has_keys, equations(x))) for x in filter(is_jaxpr, params_of(eqn))):
            params = {name: _changed(value) for name, value in eqn.params.items()}
            return bind(eqn.replace(params=params), ins)
        if not _has_keys(eqn):
            return bind(eqn, ins)
        # A primitive that only moves keys moves their integers.
        axes = [-1 if is_key(v.aval) else None for v in eqn.invars]
        return jax.vmap(lambda *xs: bind(eqn, xs), in_axes=axes, out_axes=-1)(*ins)


def _at_place_of(eqn: JaxprEqn) -> Any:
    """A context in which new equations name the place in the user's source that this one comes
    from; if it has none, that of the equation that calls it."""
    if not source_info_util.summarize(eqn.source_info):
        return contextlib.nullcontext()
    return source_info_util.user_context(eqn.source_info.traceback)


def _implemented(eqn: JaxprEqn) -> Any:
    """The function of keys by which JAX computes a primitive."""
    implementation = functools.partial(eqn.primitive.impl, **eqn.params)
    return jax.make_jaxpr(implementation)(*structs_of(eqn.invars))


def _changed(value: Any) -> Any:
    """The static parameter of an equation, in which jaxprs are rewritten without keys."""
    if not any(map(is_jaxpr, jax.tree.leaves(value, is_leaf=is_jaxpr))):
        return value
    return jax.tree.map(lambda x: _closed(x) if is_jaxpr(x) else x, value, is_leaf=is_jaxpr)


def _implementation(eqn: Any) -> Any:
    """The functions of a key's kind."""
    return eqn.params["impl"] if "impl" in eqn.params else eqn.invars[0].aval.dtype._impl


def _split(eqn: Any, keys: Any) -> Any:
    split, shape = _implementation(eqn).split, eqn.params["shape"]
    return of_each(lambda key: split(key, shape), eqn.invars[0].aval.ndim)(keys)


def _fold_in(eqn: Any, keys: Any, numbers: Any) -> Any:
    shape = eqn.outvars[0].aval.shape
    keys = jnp.broadcast_to(keys, (*shape, *keys.shape[eqn.invars[0].aval.ndim :]))
    fold_in = of_each(_implementation(eqn).fold_in, len(shape))
    return fold_in(keys, jnp.broadcast_to(numbers, shape))


def _bits(eqn: Any, keys: Any) -> Any:
    params, random_bits = eqn.params, _implementation(eqn).random_bits

    def bits(key: Array) -> Array:
        return random_bits(key, params["bit_width"], params["shape"])

    return of_each(bits, eqn.invars[0].aval.ndim)(keys)


_RULES: dict[str, Callable] = {
    "random_bits": _bits,
    "random_clone": lambda eqn, x: x,
    "random_fold_in": _fold_in,
    "random_seed": lambda eqn, seeds: of_each(_implementation(eqn).seed, seeds.ndim)(seeds),
    "random_split": _split,
    "random_unwrap": lambda eqn, x: x,
    "random_wrap": lambda eqn, x: x,
}
