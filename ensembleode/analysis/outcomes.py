"""Plots of an outcome of each trajectory against one of its numbers."""

from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
import matplotlib
import numpy as np

from ..ground.keys import is_key
from ..ground.retcode import has_failed, was_run
from ..ground.state_tree import flattened
from ..solution.labelled import output_name


def outcomes_of(sim: Any) -> tuple[np.ndarray, Sequence[str] | None]:
    """The outcome of each trajectory, `[trajectory, component]`: its last state, or the output of
    its `output_func`; and the names of the components, None for those of an array."""
    if sim.kind == "outputs":
        columns, names = [], []
        for path, x in jtu.tree_leaves_with_path(sim.u):
            if is_key(x) or np.asarray(x).dtype.kind not in "biuf":
                continue
            x = np.asarray(x)
            for index in np.ndindex(x.shape[1:]):
                label = f"[{','.join(map(str, index))}]" if index else ""
                columns.append(x[:, *index])
                names.append(output_name(path) + label)
        # The columns may have different dtypes.
        return np.column_stack([np.asarray(x, np.float64) for x in columns]), names
    u = np.asarray(flattened(sim.u, 2, sim._order))
    last = np.maximum(np.asarray(sim.lengths) - 1, 0)
    reached = u[np.arange(len(u)), last].reshape(len(u), -1)
    end = flattened(sim.end.u, 1, sim._order).reshape(reached.shape)
    found = np.where(np.asarray(sim.successful)[:, None], end, reached)
    return found, sim.names


def add_outcomes(
    ax: Any,
    x: np.ndarray,
    y: np.ndarray,
    looks: Any,
    numbers: np.ndarray | None,
    failed: np.ndarray,
    style: dict,
) -> None:
    """Draw a point for each trajectory and component of `y [trajectory, component]`, a red cross
    where the trajectory failed. `numbers`: those by which trajectories are coloured, or None."""
    size = matplotlib.rcParams["lines.markersize"]
    dots = {"marker": "o", "markersize": 0.7 * size, "linestyle": "none"} | style
    for column, look in zip(y.T, looks, strict=True):
        color = {} if look.color is None else {"color": look.color}
        if numbers is None:
            ax.plot(x[~failed], column[~failed], **dots | color | {"label": look.label})
        else:
            area = dots["markersize"] ** 2
            shape = {"marker": dots["marker"], "label": look.label, "alpha": dots.get("alpha")}
            ax.scatter(x[~failed], column[~failed], s=area, c=numbers[~failed], **shape)
    if failed.any():
        crosses = {"color": "red", "marker": "x", "linestyle": "none"}
        ax.plot(np.repeat(x[failed], y.shape[1]), y[failed].ravel(), label="failed", **crosses)


def drawn(sim: Any, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chosen trajectories that were run, and a mask of those that failed."""
    codes = np.asarray(sim.retcode)[chosen]
    run = was_run(codes)
    return chosen[run], np.asarray(has_failed(codes[run]))
