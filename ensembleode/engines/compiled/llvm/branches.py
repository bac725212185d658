"""Two branches, each of which is run only if a lane needs it."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from .builder import Builder, Value, Variable


def either(
    b: Builder,
    mask: Value,
    then: tuple[Value, Callable[[], Any]],
    otherwise: tuple[Value, Callable[[], Any]],
) -> Any:
    """The result of `then` in the lanes of the mask, and of `otherwise` elsewhere: trees of values.
    Each function comes with the lanes that need its result, and is run only if there are any. Only
    one of the functions is written where the mask is a constant."""
    if mask.constant is not None:
        leaves, tree = jax.tree.flatten((then if mask.constant else otherwise)[1]())
        # (As with branches, these results are not fused with what follows.)
        variables = [b.variable(x.dtype, x) for x in leaves]
        return tree.unflatten([x.get() for x in variables])
    start = b.position
    variables: list[Variable] = []
    tree: PyTree = None

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
