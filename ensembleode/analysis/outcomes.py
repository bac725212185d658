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
from ..tracing.program import is_tracer


def numbers_against(sim: Any, against: Any) -> tuple[np.ndarray, str]:
    """The numbers `[trajectory]` on the horizontal axis, and their name.

    **Raises:** `ValueError` for an unknown name, or for numbers of another shape.
    """
    if not isinstance(against, str):
        if is_tracer(against):
            raise TypeError("against is traced: nothing has been computed yet. Plot outside jit.")
        x = np.asarray(against)
        if x.dtype.kind not in "biuf" or x.shape != (len(sim),):
            raise ValueError(
                "against must be the name of a start or a parameter, such as 'p', 'p.k', 'p[0]' or "
                f"'u0[1]', or one number for each of the {len(sim)} trajectories, got {against!r}."
            )
        return x, ""
    found = {}
    for path, x in jtu.tree_leaves_with_path({"u0": sim.u0, "p": sim.p}):
        if not hasattr(x, "shape") or is_key(x) or x.dtype.kind not in "biuf":
            continue
        name = jtu.keystr(path, simple=True, separator=".")
        for index in np.ndindex(x.shape[1:]):
            label = f"{name}[{','.join(map(str, index))}]" if index else name
            found[label] = (x, index)
    if against not in found:
        raise ValueError(
            f"against is {against!r}, and trajectories were given {', '.join(list(found)[:20])}"
            + ("." if len(found) <= 20 else ", ...")
        )
    x, index = found[against]
    return np.asarray(x)[:, *index], against


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
    ax: Any, x: np.ndarray, y: np.ndarray, looks: Any, numbers: Any, failed: np.ndarray, style: dict
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
