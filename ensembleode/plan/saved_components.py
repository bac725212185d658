"""The components of the state that are saved: what `save_idxs` chooses."""

import math
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..ground.state_tree import array_names, component_names, flattened, leaf_names, StateTree
from ..tracing.program import is_tracer


class SavedComponents(NamedTuple):
    """The components that are saved, where these are not all.

    - `places`: their places among the components of the state (the flattened array, or the leaves
        of a pytree one after the other).
    - `shape`: the shape in which they are saved, where that is an array.
    - `tree`: the structure in which they are saved, where that is a pytree or complex; else None.
    - `names`: the names of the components of such an array; None for a pytree, which has them.
    """

    places: tuple[int, ...]
    shape: tuple[int, ...]
    tree: StateTree | None = None
    names: tuple[str, ...] | None = None

    def shaped(self, x: Array) -> PyTree:
        """The numbers `[..., number]` that an engine saves in the structure of what is saved."""
        return x.reshape(*x.shape[:-1], *self.shape) if self.tree is None else self.tree.unravel(x)

    def chosen_of(self, u: PyTree, lead: int) -> Array | None:
        """Those of states in the user's structure, with `lead` axes of several states before those
        of one; None stays None."""
        if u is None:
            return None
        x = flattened(u, lead)
        x = x.reshape(*x.shape[:lead], -1)[..., np.array(self.places)]
        return self.shaped(x) if self.tree is None else self.tree.leaves_of(x)


def saved_components(idxs: Any, state: Array, tree: StateTree | None) -> SavedComponents | None:
    """What a `save_idxs` chooses of a `state`, an array (the vector of a state with this `tree`).
    None if it saves all as they are.

    **Raises:** `TypeError` where `save_idxs` has another form than this state needs; `ValueError`
    for components that the state doesn't have, for none, and for the same one twice.
    """
    if idxs is None:
        return None
    if tree is None:
        return _of_array(idxs, state.shape)
    found = _of_array(idxs, tree.shapes[0]) if tree.order is None else _of_leaves(idxs, tree)
    if found is None or found.tree is not None or not tree.is_complex:
        return found
    leaf = StateTree(jtu.tree_structure(0), (found.shape,), tree.dtype, None)
    return found._replace(tree=leaf)


def _of_array(idxs: Any, shape: tuple[int, ...]) -> SavedComponents | None:
    size, named = math.prod(shape), array_names(shape)
    what = f"an integer, a list of integers or a slice, of the {size} components of u0"
    index, is_one = idxs, False
    if not isinstance(idxs, slice):
        if any(map(is_tracer, jtu.tree_leaves(idxs))):
            raise TypeError(f"save_idxs is traced, and what is saved is fixed: give {what}.")
        index = np.asarray(list(idxs) if isinstance(idxs, tuple | range) else idxs)
        is_mask = index.dtype == bool and index.shape == (size,)
        is_one = index.ndim == 0
        if index.ndim > 1 or not (is_mask or index.dtype.kind in "iu" or not index.size):
            raise TypeError(f"save_idxs must be {what}, counted from 0; got {idxs!r}.")
        index = index if index.size else index.astype(int)
    try:
        places = np.arange(size)[index]
    except IndexError:
        raise ValueError(
            f"save_idxs has a component that u0 doesn't have: it must be {what}, counted from 0; "
            f"got {idxs!r}."
        ) from None
    chosen = tuple(np.atleast_1d(places).tolist())
    _check(chosen, idxs)
    if chosen == tuple(range(size)) and places.shape == shape:
        return None
    names = tuple(named[i] for i in chosen)
    return SavedComponents(chosen, () if is_one else (len(chosen),), None, names)


def _of_leaves(idxs: Any, tree: StateTree) -> SavedComponents:
    leaves = dict(leaf_names(tree.leaves_of(np.arange(tree.components)), tree.order))
    wanted = [idxs] if isinstance(idxs, str) else idxs
    if not isinstance(wanted, list | tuple) or not all(isinstance(x, str) for x in wanted):
        raise TypeError(
            "save_idxs must be the name of a leaf of u0, or a list of names, as u0 is a pytree: "
            f"{', '.join(leaves)}; got {idxs!r}. (Components of a leaf are chosen by an "
            "output_func.)"
        )
    if unknown := [x for x in wanted if x not in leaves]:
        raise ValueError(
            f"save_idxs has {unknown[0]!r}, and the leaves of u0 are {', '.join(leaves)}."
        )
    _check(wanted, idxs)
    if isinstance(idxs, str):
        places = leaves[idxs]
        names = component_names({idxs: places})
        return SavedComponents(tuple(places.reshape(-1).tolist()), places.shape, None, names)
    found, structure = jtu.tree_flatten({name: leaves[name] for name in wanted})
    shapes = tuple(x.shape for x in found)
    saved = StateTree(structure, shapes, tree.dtype, tuple(wanted))
    places = np.concatenate([x.reshape(-1) for x in found])
    return SavedComponents(tuple(places.tolist()), (), saved)


def _check(chosen: Any, idxs: Any) -> None:
    if not len(chosen):
        raise ValueError(
            f"save_idxs={idxs!r} leaves nothing to save: leave it out to save all components."
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"save_idxs has a component twice: {idxs!r}.")
