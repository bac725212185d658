"""Branches (`lax.cond`, `lax.switch`) that are all computed, and one result selected.

This is what JAX does where `vmap` makes the index differ. But what was differentiated in forward
mode before that can't be transposed: JAX's rule stops gradients that are tangents.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from .evaluation import equations, evaluated_at_any_depth
from .program import is_inexact, Program


def with_selected_branches(program: Program) -> Callable:
    """The program as a function that may be differentiated, mapped, and differentiated again, in
    any order; the program itself where it has no branches."""
    if not any(map(_is_branch, equations(program.jaxpr))):
        return program

    def selected(consts: Sequence, *args: Any) -> Any:
        leaves, how = jax.tree.leaves(args), {"which": _is_branch, "instead": _selected}
        outs = evaluated_at_any_depth(program.jaxpr, *leaves, consts=consts, **how)
        return jax.tree.unflatten(program.out_tree, outs)

    return selected


def _is_branch(eqn: JaxprEqn) -> bool:
    # (The branch for a platform is the same for all.)
    return eqn.primitive.name == "cond" and eqn.params.get("branches_platforms") is None


def _selected(eqn: JaxprEqn, ins: Sequence, run: Callable) -> list:
    index, *operands = map(jnp.asarray, ins)
    branches = [
        run(branch, *(_only_where(index == i, x) for x in operands))
        for i, branch in enumerate(eqn.params["branches"])
    ]
    return [jax.lax.select_n(index, *each) for each in zip(*branches, strict=True)]


def _only_where(here: Array, x: Array) -> Array:
    """The array, with derivatives only where its branch is taken: others may not be finite."""
    return _with_derivative_where(here, x) if is_inexact(x) else x


@jax.custom_jvp
def _with_derivative_where(here: Array, x: Array) -> Array:
    # (A choice, so that `vmap` gives it the axes of `here`, as it does to its derivative.)
    return jnp.where(here, x, x)


@_with_derivative_where.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    (here, x), (_, dx) = primals, tangents
    return _with_derivative_where(here, x), jnp.where(here, dx, jnp.zeros_like(dx))
