"""Applies the rules that rewrite an equation in plainer ones."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..equations import called, registers, traced


# For each primitive, `rule(equation, *operands) -> results`, written with functions of JAX.
RULES: dict[str, Callable] = {}
# Those that are applied where a program is taken apart into scalars, too: that has no rules of its
# own for these primitives.
APART: set[str] = set()
# Those of functions that a target language may have itself.
FUNCTIONS: dict[str, Callable] = {}


def rule(names: str, *, apart: bool = False) -> Callable[[Callable], Callable]:
    """A decorator that enters a rule for each of the primitives in `names`, a string with spaces
    between the names; `apart`: also for programs that are taken apart into scalars."""
    APART.update(names.split() if apart else ())
    return registers(RULES)(names)


function = registers(FUNCTIONS)


def written_out(eqn: Any, *, functions: bool = False) -> Any:
    """The jaxpr of plainer equations that an equation stands for; None if it is plain already. With
    `functions`, `FUNCTIONS` are written out, too."""
    inner, name = called(eqn), eqn.primitive.name
    apply = RULES.get(name) or (FUNCTIONS.get(name) if functions else None)
    if inner is not None or apply is None:
        return inner
    with as_written():
        return traced(eqn, lambda *xs: apply(eqn, *xs))


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Within this, the options of JAX are those that rules are written for: the numbers of
    components have 64 bits, whatever the dtype of the arrays, and operands are broadcast."""
    options = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with jax.enable_x64(True), options[0], options[1]:
        yield
