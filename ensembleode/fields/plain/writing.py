"""Applies the rules that rewrite an equation in plainer ones."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import source_info_util

from ..equations import called, registers


# For each primitive, `rule(equation, *operands) -> results`, written with functions of JAX.
RULES: dict[str, Callable] = {}
# Those that are applied where a program is taken apart into scalars, too: that has no rules of its
# own for these primitives.
APART: set[str] = set()


def rule(names: str, *, apart: bool = False) -> Callable[[Callable], Callable]:
    """A decorator that enters a rule for each of the primitives in `names`, a string with spaces
    between the names; `apart`: also for programs that are taken apart into scalars."""
    APART.update(names.split() if apart else ())
    return registers(RULES)(names)


def written_out(eqn: Any) -> Any:
    """The jaxpr of plainer equations that an equation stands for; None if it is plain already.

    For an equation that calls a function with a derivative rule, the jaxpr is the function without
    that rule.
    """
    inner, name = called(eqn), eqn.primitive.name
    if inner is not None or name not in RULES:
        return inner
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    with as_written(), source_info_util.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(lambda *xs: RULES[name](eqn, *xs))(*structs)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Within this, the options of JAX are those that rules are written for: the numbers of
    components have 64 bits, whatever the dtype of the arrays, and operands are broadcast."""
    options = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with jax.enable_x64(True), options[0], options[1]:
        yield
