"""The initial states and parameters of trajectories in a store.

Values that differ between trajectories are variables of the store, and are written batch by batch.
Values that all trajectories share are written once. The pytree that they form is described in JSON,
so that reading it runs no code.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..ground.keys import is_key
from ..ground.logs import log_once
from ..plan.given import GivenInputs, KnownInputs
from ..solution.labelled import inner_dims, state_dims
from .described import put_together, safe_name, StoredVariable


# Values that JSON can represent.
_PLAIN = (bool, int, float, str)


class _StoredLeaf:
    """A leaf of the initial states or parameters: whether it differs between trajectories (None if
    it is no number); and, once it is known, its description in JSON."""

    def __init__(self, value: Any, is_own: Any):
        self.value, self.is_own, self.said = value, is_own, None


class StoredInputs(NamedTuple):
    """The initial states and parameters of trajectories, as a store keeps them.

    - `described`: the structure of `u0` and `p` in JSON, with the names of their variables.
    - `variables`: those of leaves that differ between trajectories; `places`: their indices.
    - `shared`: the arrays that all trajectories share, by name, each with its dimensions.
    - `given`: computes the values; None where they are not known.
    """

    described: Any
    variables: list[StoredVariable]
    places: list[int]
    shared: dict[str, tuple[tuple[str, ...], np.ndarray]]
    given: GivenInputs | None

    def values_of(self, rows: np.ndarray) -> list[np.ndarray]:
        """The values of the variables for these trajectories."""
        if not self.places:
            return []
        assert self.given is not None
        slots = jtu.tree_leaves(_slots(self.given.known_of(rows)))
        return [np.asarray(slots[i].value) for i in self.places]


def kept_given(given: GivenInputs | None, taken: Collection[str], whole: bool) -> StoredInputs:
    """The initial states and parameters (None: not known) as a store keeps them, under names that
    aren't `taken`. What can't be stored is named in the log. `whole`: whether the saved states have
    all components, as initial states do."""
    if given is None:
        return StoredInputs(None, [], [], {}, None)
    slots = _slots(given.known_of(np.arange(1)))
    names, variables, places, shared, lost = set(taken), [], [], {}, []
    for i, (path, slot) in enumerate(jtu.tree_leaves_with_path(slots)):
        wanted = jtu.keystr(path, simple=True, separator=".")
        x, is_own = slot.value, slot.is_own
        is_number = is_own is not None and not is_key(x) and np.asarray(x).dtype.kind in "biufc"
        if not is_number:
            is_plain = x is None or isinstance(x, _PLAIN)
            slot.said = {"value": x if is_plain else None}
            lost += [] if is_plain else [wanted]
            continue
        slot.said = name = safe_name(wanted, names)
        names.add(name)
        x = np.asarray(x)
        ndim = x.ndim - bool(is_own)
        dims = state_dims(ndim) if wanted == "u0" and whole else inner_dims(name, ndim)
        if is_own:
            fill = np.nan if x.dtype.kind in "fc" else 0
            about = ("trajectory", *dims), x.shape[1:], x.dtype
            variables.append(StoredVariable(name, *about, fill=fill))
            places.append(i)
        else:
            shared[name] = dims, x
    if lost:
        log_once(
            f"the store keeps numbers, words and None of the parameters, and not {lost[0]}"
            + (f" and {len(lost) - 1} others" if lost[1:] else "")
            + ": what opens it finds None there."
        )
    described = {name: _in_json(part) for name, part in slots.items()}
    return StoredInputs(described, variables, places, shared, given)


def known_in(
    described: dict[str, Any] | dict[str, str],
    n: int,
    leaf: Callable[[str], Any],
    own: Collection[str],
) -> KnownInputs:
    """The initial states and parameters in a store; `leaf` returns the variable of a name, and
    `own` are the names of those that differ between trajectories."""

    def mark(name: str) -> bool:
        return name in own

    starts, parameters = (put_together(described[name], leaf) for name in ("u0", "p"))
    own_starts = put_together(described["u0"], mark)
    own_parameters = put_together(described["p"], mark, lambda _: None)
    return KnownInputs(starts, parameters, any(jtu.tree_leaves(own_starts)), own_parameters, n=n)


def _slots(known: KnownInputs) -> dict[str, Any]:
    starts = jtu.tree_map(lambda x: _StoredLeaf(x, known.own_starts), known.starts)
    return {"u0": starts, "p": known.of_parameters(_StoredLeaf, lambda x: _StoredLeaf(x, None))}


def _in_json(tree: PyTree) -> PyTree:
    """The structure of a pytree of `_StoredLeaf` in JSON; nodes of other classes become dicts."""
    if isinstance(tree, _StoredLeaf):
        return tree.said
    parts = jtu.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_in_json(x) for _, x in parts]}
    if type(tree) is dict:  # in the order of its insertions
        parts = [((jtu.DictKey(k),), x) for k, x in tree.items()]
    return {"dict": {jtu.keystr(path, simple=True): _in_json(x) for path, x in parts}}
