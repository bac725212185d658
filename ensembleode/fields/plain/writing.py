"""Applies the rules that rewrite an equation in plainer ones."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import source_info_util

from ..equations import called, registers


# For each primitive, `rule(equation, *operands) -> results`, written with functions of JAX.
RULES: dict[str, Callable] = {}
rule = registers(RULES)


def written_out(eqn: Any) -> Any:
    """The jaxpr of plainer equations that an equation stands for; None if it is plain already.

    For an equation that calls a function with a derivative rule, the jaxpr is the function without
    that rule.
    """
    inner, name = called(eqn), eqn.primitive.name
    if inner is not None or name not in RULES:
        return inner
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    # The numbers of components have 64 bits, whatever the dtype of the arrays.
    with jax.enable_x64(True), source_info_util.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(lambda *xs: RULES[name](eqn, *xs))(*structs)
