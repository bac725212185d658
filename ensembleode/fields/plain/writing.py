"""What an equation is in plainer ones."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import source_info_util

from ..equations import called, registers


# How a primitive is written: `rule(equation, *operands) -> results`, by functions of JAX.
RULES: dict[str, Callable] = {}
rule = registers(RULES)


def written_out(eqn: Any) -> Any:
    """The jaxpr of plainer equations that an equation is written in; None if it is plain.

    (Where it calls a function with a derivative rule, that is not in it.)
    """
    inner, name = called(eqn), eqn.primitive.name
    if inner is not None or name not in RULES:
        return inner
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    # Indices have 64 bits, whatever numbers have.
    with jax.enable_x64(True), source_info_util.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(lambda *xs: RULES[name](eqn, *xs))(*structs)
