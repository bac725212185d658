"""The contents of a store: the arrays of an ensemble, and the solution that is made from them."""

import dataclasses
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..ground.hidden_object import HiddenObject
from ..ground.keys import is_key
from ..ground.on_disk import OnDisk
from ..ground.state_tree import is_tree
from ..plan.plan import fill_of, Outcome, Plan
from ..problem.saving_callback import Saved
from ..running.job import adds_end, events_of, Job
from ..solution import labelled
from ..solution.dense import KeptNodes, KeptSlopes
from ..solution.events import End, Events
from ..solution.labelled import OWN_TIMES
from ..solution.solution import EngineChoice, EnsembleError, EnsembleSolution
from ..solution.stats import COUNTS, Stats
from .described import described, put_together, StoredVariable
from .kept_given import known_in


class StoreError(EnsembleError):
    """The store can't be used, or can't be used any longer; `solution` reads its contents, if any.

    - `differs`: for a store of another ensemble, the names of the differences.
    """

    differs: tuple[str, ...] = ()


# The number of events of a trajectory in a chunk.
_EVENTS = 16
# A prefix of the names of states within steps, for a state that is a pytree.
_INNER = "inner."
_DU = "du."  # in stores of earlier versions
# The largest number of bytes of a name, which file systems bound, with what stores add.
_LONGEST = 200


def as_kept(outcome: Outcome, plan: Plan) -> Outcome:
    """An outcome as a store keeps it; its events are those of a solution."""
    ended = outcome.ended
    if ended is not None:
        ended = dataclasses.replace(ended, p_at=_plain(ended.p_at))
    changed = {"events": events_of(outcome, plan), "ended": ended, "p_at": _plain(outcome.p_at)}
    return outcome._replace(rerun=None, **changed)


def _plain(p: PyTree) -> PyTree:
    """Parameters as a store has them: objects of other classes become dicts of their numbers."""
    try:
        described(p, "p")
    except TypeError:
        leaves = jtu.tree_leaves_with_path(p)
        return {jtu.keystr(path, simple=True, separator="."): x for path, x in leaves}
    return p


def abstract_of(outcome: Outcome, plan: Plan) -> Outcome:
    """`as_kept`, for the abstract outcome of one trajectory."""
    kept: Outcome = jax.eval_shape(lambda x: as_kept(x, plan), outcome)
    return kept


def variables_of(
    outcome: Outcome, kind: str, own_times: bool, times_of_values: Any
) -> tuple[list[StoredVariable], Any]:
    """The variables, in the order of the leaves that are kept; and how outputs are put together
    from them. `own_times`: whether trajectories have times of their own; `times_of_values`: the
    times of a `SavingCallback`, if it has its own."""
    time = "step" if own_times else "time"
    of_states = kind == "trajectories" and is_tree(outcome.u)
    tree = described(outcome.u, "") if kind == "outputs" or of_states else None
    variables = []
    for path, x in jtu.tree_leaves_with_path(outcome):
        field, ndim = str(path[0].name), len(x.shape)
        grows, fill = False, fill_of(path, x.dtype)
        name = {"t": "time"}.get(field, field)
        dims = labelled.inner_dims(name, ndim)
        if field == "u" and kind == "outputs":
            name = _checked(labelled.output_name(path[1:]))
            dims = labelled.inner_dims(name, ndim)
            if is_key(x):
                raise TypeError(f"a store keeps numbers, and the output {name} is a PRNG key.")
        elif field in ("u", "inner"):
            lead = (time,) if field == "u" else (time, "node")
            dims = (*lead, *labelled.state_dims(ndim - len(lead)))
            if of_states:
                leaf = _checked(labelled.output_name(path[1:]))
                name = leaf if field == "u" else _INNER + leaf
                dims = (*lead, *labelled.inner_dims(name, ndim - len(lead)))
        elif field in ("integral", "p_at", "noise", "saved"):
            name = labelled.name_beside(field, path[1:])
            of_rows = time if field != "saved" or times_of_values is None else OWN_TIMES
            dims = (of_rows, *labelled.inner_dims(name, ndim - 1))
        elif field == "t":
            dims = (time,)
        elif field == "ended":
            name = jtu.keystr(path, simple=True, separator=".")
            dims = labelled.inner_dims(name, ndim)
        elif field == "events":
            name = jtu.keystr(path, simple=True, separator=".")
            dims, grows = labelled.event_dims(path[1:], ndim), name != "events.count"
        about = ("trajectory", *dims), x.shape, np.dtype(x.dtype)
        variables.append(StoredVariable(name, *about, grows, fill))
    names = [v.name for v in variables]
    taken = {"trajectory", "digest"} & set(names)
    if len(set(names)) < len(names) or taken:
        raise TypeError(
            "a store has variables retcode, length, trajectory, digest and those of counts "
            f"({', '.join(COUNTS)}) of its own; give the outputs of output_func other names than "
            f"{names}."
        )
    return variables, tree


def _checked(name: str) -> str:
    """The name of an output or of a part of the state, which is that of a folder in the store;
    raises `TypeError` for one that the store can't have."""
    parts = name.split("/")
    is_ours = name in ("time", OWN_TIMES) or parts[0] == "zarr.json"
    if is_ours or not {".", ".."}.isdisjoint(parts) or name.endswith(".partial"):
        raise TypeError(
            f"a store can't have an output, or a part of the state, called {name!r}, which is a "
            "name of its own: call it something else."
        )
    if len(name.encode()) > _LONGEST:
        raise TypeError(
            f"a store can't have an output, or a part of the state, whose name has more than "
            f"{_LONGEST} bytes, such as {name[:20]!r}...: give it a shorter one."
        )
    return name


def end_described(job: Job, ended: End | None) -> dict[str, Any] | None:
    """The description of the ends of trajectories in JSON; None where no event may end any."""
    if ended is None:
        return None
    names = ("t", "u", "integral", "p_at", "noise")
    parts = {name: described(getattr(ended, name), f"ended.{name}") for name in names}
    return {"parts": parts, "adds": adds_end(job)}


def events_described(
    events: Events | None, room: int
) -> dict[str, Any] | dict[str, int | str] | None:
    """The description of events in JSON: how their states are put together, and how many events a
    chunk has; None without events. Raises `TypeError` for states that can't be stored."""
    if events is None:
        return None
    states = {x: described(getattr(events, x), f"events.{x}") for x in ("u_before", "u_after")}
    return states | {"chunk": min(room, _EVENTS)}


def solution_in(group: Any, kept: dict[str, Any], whole: bool, elapsed: float) -> EnsembleSolution:
    """The solution in a store's group, whose attributes are `kept`; `whole` if it has all
    batches."""

    names = {x[0] for part in ("variables", "shared") for x in kept[part]}

    def lazily(name):
        return leaf(name) if name in names else None

    def leaf(name):
        return OnDisk(group[name])

    def made(tree, prefix=""):
        return put_together(tree, lambda name: leaf(prefix + name))

    kind = kept["kind"]
    tree, dense = kept["outputs"], None
    u = lazily("u") if tree is None else made(tree)
    if kind == "trajectories":
        for how, prefix in ((KeptNodes, _INNER), (KeptSlopes, _DU)):
            if tree is None and prefix[:-1] in names:
                dense = how(lazily(prefix[:-1]))
            elif tree is not None and any(name.startswith(prefix) for name in names):
                dense = how(made(tree, prefix))
    t = lazily("time") if kind == "trajectories" else None
    if t is not None and t.ndim == 1:
        t = np.asarray(t)
    stats = Stats(*(lazily(name) for name in COUNTS))
    retcode, lengths, engine = lazily("retcode"), lazily("length"), EngineChoice(*kept["engine"])
    order = tuple(kept["order"]) if kept["order"] else None
    integral, events, given = made(kept.get("integral")), None, None
    if (of_events := kept.get("events")) is not None:
        of_event = ("t", "which", "direction", "count")
        fields = {name: leaf(f"events.{name}") for name in of_event}
        states = {name: made(of_events[name]) for name in ("u_before", "u_after")}
        events = Events(**fields, **states)
    if (described := kept.get("given")) is not None:
        own = {x[0] for x in kept["variables"]}
        given = known_in(described, kept["fingerprint"]["trajectories"], leaf, own)
    saved = None
    if (of_values := kept.get("saved")) is not None:
        own = OWN_TIMES in names
        saved = Saved(np.asarray(group[OWN_TIMES]) if own else t, made(of_values), own)
    names_of = tuple(kept["names"]) if kept.get("names") else None
    more: dict[str, Any] = {name: made(kept.get(name)) for name in ("p_at", "noise")}
    more["_names"] = names_of
    if (of_ends := kept.get("ended")) is not None:
        ended = End(**{name: made(x) for name, x in of_ends["parts"].items()})
        more |= {"_ended": ended, "_adds_end": of_ends["adds"]}
    about = (
        whole,
        elapsed,
        engine,
        kind,
        dense,
        order,
        integral,
        events,
        HiddenObject(given),
        saved,
    )
    return EnsembleSolution(u, t, retcode, lengths, stats, *about, **more)
