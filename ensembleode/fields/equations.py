"""The equations of a jaxpr: which of them are used, which jaxprs they call, and interpreters of
them by tables of rules, keyed by the primitive."""

import collections
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.typing import ArrayLike

from ..tracing.program import structs_of, with_constants


_Rule = TypeVar("_Rule", bound=Callable)

# The primitives that act component by component on real numbers, integers and booleans.
ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
    integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul ne neg
    nextafter not one_minus_square or polygamma population_count pow regularized_incomplete_beta
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square sub tan tanh xor zeta
"""
# Those of this library, which draw random numbers (see `solvers/philox.py`, `brownian_tree.py`).
DRAWN = " brownian_piece philox_normal philox_normal_of_step philox_uniform "
# Where fields are lowered, derivatives have been taken already. So a function with a derivative
# rule is just the computation that it wraps.
CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "jit": "jaxpr",
    "remat2": "jaxpr",
}
# What has a derivative that may be another than that of how it is computed in scalars: a linear
# system is solved with factors that are taken for constants; and both branches are computed, of
# which the one that is not taken may have no derivative.
RULED = ("call_hi_primitive", "cond", "custom_jvp_call", "custom_linear_solve", "custom_vjp_call")


def registers(rules: dict[str, _Rule]) -> Callable[[str], Callable[[_Rule], _Rule]]:
    """A decorator `rule(names)`, which enters a function into `rules` for each of the primitives in
    `names`, a string with spaces between the names."""

    def rule(names: str) -> Callable[[_Rule], _Rule]:
        def register(fn: _Rule) -> _Rule:
            rules.update(dict.fromkeys(names.split(), fn))
            return fn

        return register

    return rule


def bind(eqn: JaxprEqn, args: Sequence) -> list:
    """Evaluate one equation by JAX itself."""
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def called(eqn: JaxprEqn) -> Any:
    """The jaxpr, closed or not, that an equation calls; None if it calls none."""
    name = eqn.primitive.name
    if name in CALLS:
        return eqn.params[CALLS[name]]
    # Newer versions of JAX define some primitives, such as a search, by functions of others.
    if name == "call_hi_primitive":
        return traced(eqn, lambda *xs: eqn.primitive.to_lojax(*xs, **eqn.params))
    if name == "custom_linear_solve":
        return traced(eqn, lambda *xs: _solved(eqn, xs))
    # (The versions of JAX have the primitives of sparse arrays in different places.)
    sparse = sys.modules.get("jax.experimental.sparse.bcoo")
    if name.startswith("bcoo_") and (fn := getattr(sparse, f"_{name}_impl", None)) is not None:
        return traced(eqn, lambda *xs: fn(*xs, **eqn.params))
    return None


def traced(eqn: JaxprEqn, fn: Callable) -> ClosedJaxpr:
    """The jaxpr of `fn`, a function of an equation's operands."""
    with source_info_util.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(fn)(*structs_of(eqn.invars))


def of_each(fn: Callable, axes: int) -> Callable:
    """A function of single arrays, mapped over this number of leading `axes`."""
    for _ in range(axes):
        fn = jax.vmap(fn)
    return fn


def _solved(eqn: JaxprEqn, args: Sequence) -> list:
    """The solution of a linear system, by the function that was given for it."""
    lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    first = lengths.matvec + lengths.vecmat
    consts, b = args[first : first + lengths.solve], args[sum(lengths) :]
    return jex.jaxpr_as_fun(solve)(*consts, *b)


def used(jaxpr: jex.Jaxpr) -> tuple[list, collections.Counter]:
    """The equations whose results are used, and how often each variable is used."""
    eqns: list = []
    uses = collections.Counter(v for v in jaxpr.outvars if not isinstance(v, jex.Literal))
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(uses[v] for v in eqn.outvars):
            eqns.append(eqn)
            uses.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
    return eqns[::-1], uses


def interpreted(
    jaxpr: ClosedJaxpr | Jaxpr, ins: Sequence, known: Callable, equation: Callable
) -> list:
    """The values of the outputs of a jaxpr, closed or not. `ins` are the values of its inputs; if
    it isn't closed, those of its constants come first. `known(array)` is the value of a literal or
    a constant, and `equation(eqn, ins)` those of the outputs of an equation."""
    inner, env = opened(jaxpr, ins, known)
    read = reader(env, known)
    for eqn in used(inner)[0]:
        env.update(zip(eqn.outvars, equation(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, inner.outvars))


def opened(jaxpr: Any, ins: Sequence, known: Callable) -> tuple[Any, dict]:
    """The open jaxpr, and the values of its constants and inputs; for the arguments see
    `interpreted`."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    variables = [*inner.constvars, *inner.invars]
    if len(ins) < len(variables):
        ins = [*map(known, jaxpr.consts), *ins]
    return inner, dict(zip(variables, ins, strict=True))


def reader(env: dict, known: Callable) -> Callable:
    """The function from variables to their values in `env`, and from literals to
    `known(array)`."""

    def read(atom: Any) -> Any:
        if not isinstance(atom, jex.Literal):
            return env[atom]
        aval: Any = atom.aval
        return known(np.asarray(atom.val, aval.dtype))

    return read


def rewritten(jaxpr: jex.Jaxpr, fn: Callable, structs: Sequence | None = None) -> jex.Jaxpr:
    """The program of `fn`, a function of a jaxpr's constants and inputs, or of arrays like
    `structs` in their place; the jaxpr itself if that program would have further constants."""
    structs = structs or structs_of([*jaxpr.constvars, *jaxpr.invars])
    closed, n = jax.make_jaxpr(fn)(*structs), len(jaxpr.constvars)
    if closed.consts:
        return jaxpr
    inner: Any = closed.jaxpr
    return with_constants(inner, inner.invars[:n], inner.invars[n:])


def branch_here(eqn: JaxprEqn) -> ArrayLike:
    """The branch of a `platform_index` equation that is taken on this platform."""
    platforms = eqn.params["platforms"]
    return np.int32(next(i for i, names in enumerate(platforms) if not names or "cpu" in names))
