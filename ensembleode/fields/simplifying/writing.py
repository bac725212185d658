"""Applies the rules that rewrite an equation in plainer ones."""

import contextlib
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..equations import called, registers, traced


# For each primitive, `rule(equation, *operands) -> results`, written with functions of JAX.
RULES: dict[str, Callable] = {}
# The rules that also apply where a program is taken apart into scalars, for primitives that have no
# rules there.
APART: set[str] = set()
# The rules of functions that a target language may have itself.
FUNCTIONS: dict[str, Callable] = {}


def rule(names: str, *, apart: bool = False) -> Callable[[Callable], Callable]:
    """A decorator that enters a rule for each of the primitives in `names`, a string with spaces
    between the names; `apart` says whether it also applies where programs are taken apart into
    scalars."""
    APART.update(names.split() if apart else ())
    return registers(RULES)(names)


function = registers(FUNCTIONS)


def written_out(eqn: JaxprEqn, *, functions: bool = False) -> ClosedJaxpr | Jaxpr | None:
    """The jaxpr of plainer equations that replaces an equation; None if it is plain already. With
    `functions`, the rules in `FUNCTIONS` apply, too."""
    inner, name = called(eqn), eqn.primitive.name
    apply = RULES.get(name) or (FUNCTIONS.get(name) if functions else None)
    if inner is not None or apply is None:
        return inner
    with as_written():
        return traced(eqn, lambda *xs: apply(eqn, *xs))


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """A context with the options of JAX that rules are written for: integers have 64 bits, whatever
    the dtype of the arrays, and operands are broadcast."""
    options = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with jax.enable_x64(True), options[0], options[1]:
        yield
