"""The equations of a jaxpr: which are used, and what they call."""

import collections
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend import source_info_util


# A function with a derivative rule is what it computes: derivatives have been taken by now.
CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_lin": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
}


def called(eqn: Any) -> Any:
    """The jaxpr that an equation calls, closed or not; None if it calls none."""
    name = eqn.primitive.name
    if name in CALLS:
        return eqn.params[CALLS[name]]
    if name != "call_hi_primitive":
        return None
    # Newer versions of JAX have primitives that are written in others, such as a search.
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    with source_info_util.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(lambda *xs: eqn.primitive.to_lojax(*xs, **eqn.params))(*structs)


def used(jaxpr: jex.Jaxpr) -> tuple[list, collections.Counter]:
    """The equations whose results are used, and how often each variable is."""
    eqns: list = []
    uses = collections.Counter(v for v in jaxpr.outvars if not isinstance(v, jex.Literal))
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(uses[v] for v in eqn.outvars):
            eqns.append(eqn)
            uses.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
    return eqns[::-1], uses


def branch_here(eqn: Any) -> Any:
    """Of the branches for different platforms, the one that is taken here."""
    platforms = eqn.params["platforms"]
    return np.int32(next(i for i, names in enumerate(platforms) if not names or "cpu" in names))
