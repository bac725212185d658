"""Marks of events on the lines of a plot."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from jax import Array
from matplotlib.lines import Line2D
from mpl_toolkits.mplot3d.art3d import Line3D

from ..ground.state_tree import flattened


# The shapes of marks, one for each callback; they repeat after the last one.
_SHAPES = "osD^vP*X"
_SIZE = 4.0
# The largest number of marks; of more events, evenly spaced ones are marked.
_MOST_MARKS = 20_000


def marks_of(
    sol: Any, chosen: np.ndarray | None, components: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The places of event marks: rows of a time and the components, `[mark, 1 + component]`, with
    the state before the event and, if it is different, the state after it; and the callback of each
    mark, `[mark]`. `chosen`: the indices of trajectories; None for a single solution."""
    events = sol.events
    alone = chosen is None
    lead = 1 if alone else 2

    def read(x: Array | np.ndarray) -> np.ndarray:
        x = np.asarray(x if alone else x[chosen])
        return x[None] if alone else x

    t, which, count = map(read, (events.t, events.which, events.count))
    before, after = (
        read(flattened(x, lead, sol._order)).reshape(*t.shape, -1)[..., components]
        for x in (events.u_before, events.u_after)
    )
    there = np.arange(t.shape[1]) < count[:, None]
    jumps = there & (before != after).any(axis=-1)
    rows = [np.column_stack([t[x], u[x]]) for x, u in ((there, before), (jumps, after))]
    found = np.concatenate(rows).astype(np.float64)
    return found, np.concatenate([which[there], which[jumps]])


def add_marks(
    ax: Any, rows: np.ndarray, which: np.ndarray, columns: list[list[int]], names: Any, alpha: float
) -> None:
    """Draw the marks, and name them in the legend. `columns`: for each curve, the columns of the
    rows that are its coordinates; `names`: those of the callbacks, or True for their numbers."""
    if not len(rows):
        return
    kinds = np.unique(which)
    labels = _labels(names, kinds)
    line = Line3D if ax.name == "3d" else Line2D
    known = ax.get_legend_handles_labels()[1]
    for kind, label in zip(kinds, labels, strict=True):
        some = rows[which == kind]
        some = some[np.linspace(0, len(some) - 1, min(len(some), _MOST_MARKS)).astype(int)]
        points = np.concatenate([some[:, columns_of_one] for columns_of_one in columns])
        style = {
            "color": matplotlib.rcParams["text.color"],
            "marker": _SHAPES[int(kind) % len(_SHAPES)],
            "markersize": _SIZE,
            "markerfacecolor": "none",
            "linestyle": "none",
        }
        ax.add_artist(line(*points.T, alpha=alpha, zorder=2.5, **style))
        if label not in known:
            ax.add_artist(line(*[[]] * points.shape[1], label=label, **style))


def _labels(names: Any, kinds: np.ndarray) -> list[str]:
    """The labels of the callbacks. **Raises:** `ValueError` where there are fewer names than
    callbacks."""
    if names is True:
        return ["event"] if kinds.tolist() == [0] else [f"event {kind}" for kind in kinds]
    names = [names] if isinstance(names, str) else list(names)
    if len(kinds) and kinds.max() >= len(names):
        raise ValueError(
            "events must be True, False or a name for each callback, counted from 0; there are "
            f"{len(names)} names, and the callback {kinds.max()} had events."
        )
    return [str(names[kind]) for kind in kinds]
