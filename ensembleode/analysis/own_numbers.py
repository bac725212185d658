"""The numbers by which trajectories differ, by name: parameters and initial states."""

import re
from collections.abc import Iterator
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jax import Array

from ..ground.keys import is_key
from ..tracing.program import is_tracer
from .paths import rows_of


# The largest number of components of a parameter, or of the initial state, of which one is looked
# at by itself; that of a larger one, such as a weight of a network, says little.
_MOST_COMPONENTS = 10


def named_numbers(sim: Any, name: str, argument: str) -> np.ndarray:
    """The numbers `[trajectory]` of this name.

    **Raises:** `ValueError` for an unknown name, which the `argument` of a plot has.
    """
    found = {
        label: (x, index)
        for of_leaf, x in _leaves({"u0": sim.u0, "p": sim.p})
        for label, index in _components(of_leaf, x)
    }
    if name not in found:
        raise ValueError(
            f"{argument} is {name!r}, and trajectories were given {', '.join(list(found)[:20])}"
            + ("." if len(found) <= 20 else ", ...")
        )
    x, index = found[name]
    return np.asarray(x)[:, *index]


def numbers_against(sim: Any, against: Any) -> tuple[np.ndarray, str]:
    """The numbers `[trajectory]` on the horizontal axis, and their name.

    **Raises:** `ValueError` for an unknown name, or for numbers of another shape.
    """
    if isinstance(against, str):
        return named_numbers(sim, against, "against"), against
    if is_tracer(against):
        raise TypeError("against is traced: nothing has been computed yet. Plot outside jit.")
    x = np.asarray(against)
    if x.dtype.kind not in "biuf" or x.shape != (len(sim),):
        raise ValueError(
            "against must be the name of a start or a parameter, such as 'p', 'p.k', 'p[0]' or "
            f"'u0[1]', or one number for each of the {len(sim)} trajectories, got {against!r}."
        )
    return x, ""


def is_own_number(name: Any) -> bool:
    """Whether this is how numbers of trajectories are named: `p`, `p.k`, `p[0]`, `u0[1]`, ..."""
    return isinstance(name, str) and re.fullmatch(r"(p|u0)([.\[].+)?", name) is not None


def what_varies(sim: Any, chosen: np.ndarray) -> str | None:
    """The name of the first number that differs between the chosen trajectories: of the parameters,
    then of the initial states. None where nothing differs, or where the solution doesn't know."""
    given = sim._given.content
    varying = {} if given is None or len(chosen) < 2 else given.varying()
    for of_leaf, x in _leaves(varying):
        if np.prod(x.shape[1:]) > _MOST_COMPONENTS:
            continue
        x = rows_of(x, chosen)
        for label, index in _components(of_leaf, x):
            numbers = x[:, *index]
            if np.isfinite(numbers).all() and (numbers != numbers[0]).any():
                return label
    return None


def _leaves(tree: dict) -> Iterator[tuple[str, Any]]:
    """The leaves that are real numbers, with their names; parameters first, as JAX sorts them."""
    for path, x in jtu.tree_leaves_with_path(tree):
        if hasattr(x, "shape") and not is_key(x) and x.dtype.kind in "biuf":
            yield jtu.keystr(path, simple=True, separator="."), x


def _components(name: str, x: Array | np.ndarray) -> Iterator[tuple[str, tuple[int, ...]]]:
    for index in np.ndindex(x.shape[1:]):
        yield (f"{name}[{','.join(map(str, index))}]" if index else name), index
