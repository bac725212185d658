"""Lanes that do one thing or another, each branch run where a lane wants it."""

from collections.abc import Callable
from typing import Any

import jax

from .builder import Builder, Value, Variable


def either(
    b: Builder,
    mask: Value,
    then: tuple[Value, Callable[[], Any]],
    otherwise: tuple[Value, Callable[[], Any]],
) -> Any:
    """What one function returns in the lanes of the mask, and the other elsewhere: trees of values.
    Each comes with the lanes that want it; where none does, it is not run, and where nobody wants
    either, there is anything.

    (Where all lanes want the second, nothing is done besides.)
    """
    start = b.position
    variables: list[Variable] = []
    tree: Any = None

    def second() -> None:
        nonlocal tree
        leaves, tree = jax.tree.flatten(otherwise[1]())
        for x in leaves:
            variables.append(b.variable(x.dtype))
            variables[-1].set(x)

    def first() -> None:
        leaves, found = jax.tree.flatten(then[1]())
        assert found == tree, (found, tree)
        for variable, x in zip(variables, leaves, strict=True):
            if mask.lanes:
                variable.set_where(mask, x)
            else:
                variable.set(x)

    b.if_(b.any(otherwise[0]), second)
    with b.inserting(start):
        for variable in variables:
            variable.set(0)
    b.if_(b.any(then[0]), first)
    return tree.unflatten([x.get() for x in variables])
