"""What a store holds: the arrays of an ensemble, and the solution made of them again."""

from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np

from ..analysis.labelled import inner_dims, integral_name, output_name, state_dims
from ..core.plan import Outcome
from ..dense import Kept, Slopes
from ..ground.keys import is_key
from ..ground.on_disk import OnDisk
from ..ground.state_tree import is_tree
from ..solution import COUNTS, EngineChoice, EnsembleError, EnsembleSolution, Stats


class StoreError(EnsembleError):
    """The store can't be used, or no longer; `solution` reads what is in it, if anything.

    - `differs`: where it is that of another ensemble, the names of what differs.
    """

    differs: tuple[str, ...] = ()


class Variable(NamedTuple):
    """An array of the store: its name, its dimensions, and what a trajectory has in it."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


# Before the names of what is within the steps of a state that is a pytree.
_INNER = "inner."
_DU = "du."  # (in stores of earlier versions)


def variables_of(outcome: Outcome, kind: str, own_times: bool) -> tuple[list[Variable], Any]:
    """The variables, in the order of the leaves; and how outputs are put together from them."""
    time = "step" if own_times else "time"
    of_states = kind == "trajectories" and is_tree(outcome.u)
    tree = _described(outcome.u, "") if kind == "outputs" or of_states else None
    variables = []
    for path, x in jtu.tree_leaves_with_path(outcome._replace(rerun=None)):
        field, ndim = str(path[0].name), len(x.shape)
        name = {"t": "time"}.get(field, field)
        dims = inner_dims(name, ndim)
        if field == "u" and kind == "outputs":
            name = output_name(path[1:])
            dims = inner_dims(name, ndim)
            if is_key(x):
                raise TypeError(f"a store keeps numbers, and the output {name} is a PRNG key.")
        elif field in ("u", "inner"):
            lead = (time,) if field == "u" else (time, "node")
            dims = (*lead, *state_dims(ndim - len(lead)))
            if of_states:
                leaf = output_name(path[1:])
                name = leaf if field == "u" else _INNER + leaf
                dims = (*lead, *inner_dims(name, ndim - len(lead)))
        elif field == "integral":
            name = integral_name(path[1:])
            dims = (time, *inner_dims(name, ndim - 1))
        elif field == "t":
            dims = (time,)
        variables.append(Variable(name, ("trajectory", *dims), x.shape, np.dtype(x.dtype)))
    names = [v.name for v in variables]
    taken = {"trajectory", "digest"} & set(names)
    if len(set(names)) < len(names) or taken:
        raise TypeError(
            "a store has variables retcode, length, trajectory, digest and those of counts "
            f"({', '.join(COUNTS)}) of its own; give the outputs of output_func other names than "
            f"{names}."
        )
    return variables, tree


def integral_described(integral: Any) -> Any:
    """How integrals are put together from their variables, in JSON; None where there are none.

    **Raises:** `TypeError` for what a store can't keep.
    """
    return _described(integral, "integral")


def _described(out: Any, name: str) -> Any:
    """A pytree of outputs in JSON: the names of its leaves."""
    inside = f"{name}." if name else ""
    if type(out) is dict and all(isinstance(k, str) for k in out):
        return {"dict": {str(k): _described(v, f"{inside}{k}") for k, v in out.items()}}
    if type(out) in (list, tuple):
        parts = [_described(v, f"{inside}{i}") for i, v in enumerate(out)]
        return {type(out).__name__: parts}
    if out is None:
        return None
    if not hasattr(out, "shape"):
        raise TypeError(
            "a store keeps outputs and states that are made of dicts (of names), lists and tuples "
            f"of arrays; here there is a {type(out).__name__}."
        )
    return name or "out"


def _put_together(tree: Any, group: Any, prefix: str = "") -> Any:
    def put(part):
        return _put_together(part, group, prefix)

    match tree:
        case None:
            return None
        case str():
            return OnDisk(group[prefix + tree])
        case {"dict": parts}:
            return {k: put(v) for k, v in parts.items()}
        case {"list": parts}:
            return [put(v) for v in parts]
        case {"tuple": parts}:
            return tuple(put(v) for v in parts)
    raise AssertionError(tree)


def solution_in(group: Any, kept: dict[str, Any], whole: bool, elapsed: float) -> EnsembleSolution:
    """What is in the group of a store.

    **Arguments:**

    - `kept`: what the store says of itself; `whole`: whether all batches are there.
    """

    def lazily(name):
        return OnDisk(group[name]) if name in group else None

    kind = kept["kind"]
    tree, dense = kept["outputs"], None
    u = lazily("u") if tree is None else _put_together(tree, group)
    if kind == "trajectories":
        for how, prefix in ((Kept, _INNER), (Slopes, _DU)):
            if tree is None and prefix[:-1] in group:
                dense = how(lazily(prefix[:-1]))
            elif tree is not None and any(name.startswith(prefix) for name in group):
                dense = how(_put_together(tree, group, prefix))
    t = lazily("time") if kind == "trajectories" else None
    if t is not None and t.ndim == 1:
        t = np.asarray(t)
    stats = Stats(*(lazily(name) for name in COUNTS))
    retcode, lengths, engine = lazily("retcode"), lazily("length"), EngineChoice(*kept["engine"])
    order = tuple(kept["order"]) if kept["order"] else None
    integral = _put_together(kept.get("integral"), group)
    about = (whole, elapsed, engine, kind, dense, order, integral)
    return EnsembleSolution(u, t, retcode, lengths, stats, *about)
