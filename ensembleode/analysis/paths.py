"""The paths of plots: `[row, 1 + component]`, the time first."""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..ground.on_disk import OnDisk
from ..ground.retcode import was_ended
from ..ground.state_tree import flattened
from ..solution.dense import states_between


# The number of points drawn for each step where steps are interpolated; and about how many in all.
POINTS = 10
_MOST_POINTS = 2_000_000


def paths_of(sim: Any, u: PyTree, chosen: np.ndarray, components: list[int]) -> list[np.ndarray]:
    """The paths of the chosen trajectories, each as far as it came. `u`: the states, flattened."""
    rows, *state = u.shape[1:]
    t = np.asarray(sim.t) if np.ndim(sim.t) == 1 else rows_of(sim.t, chosen)
    t = np.broadcast_to(t, (len(chosen), rows))
    u = rows_of(u, chosen).reshape(len(chosen), rows, int(np.prod(state)))
    lengths = np.asarray(sim.lengths)[chosen]
    points = int(np.clip(_MOST_POINTS // max(1, lengths.sum()), 1, POINTS))
    between: Any = [None] * len(chosen)
    if sim._dense is not None and points > 1 and len(chosen):
        some = jax.tree.map(lambda x: x[chosen], sim.u)
        dense = sim._dense.of_trajectories(chosen)
        states = states_between(dense, t, some, lengths, points, several=True)
        between = np.asarray(flattened(states, 3, sim._order)).reshape(*t.shape, points, -1)
    paths = [
        path_of(*one, int(length), components)
        for *one, length in zip(t, u, between, lengths, strict=True)
    ]
    if sim._ended is not None and len(chosen):
        end = sim[chosen].end
        ends = np.column_stack([end.t, flat_ends(end, sim._order)[:, components]])
        is_end = was_ended(np.asarray(sim.retcode)[chosen])
        for i in np.flatnonzero(is_end):
            paths[i] = to_end(paths[i], ends[i])
    return paths


def flat_ends(end: Any, order: Any) -> np.ndarray:
    """The states at which trajectories stopped, `[trajectory, component]`."""
    u = np.asarray(flattened(end.u, 1, order))
    return u.reshape(len(u), -1)


def rows_of(x: Any, chosen: np.ndarray) -> np.ndarray:
    """These rows of an array, of which only they are read where it is in a store."""
    return np.asarray(x[chosen] if isinstance(x, OnDisk) else np.asarray(x)[chosen])


def to_end(path: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The path up to where an event ended it."""
    return path if np.array_equal(path[-1:], end[None]) else np.vstack([path, end])


def path_of(
    t: np.ndarray, u: np.ndarray, between: np.ndarray | None, length: int, components: list[int]
) -> np.ndarray:
    """The path of a trajectory as far as it came, with the points within each step,
    `[time, point, component]`, where the solution is dense."""
    t = t[:length].astype(np.float64)
    u = u[:length, components].astype(np.float64)
    if between is None or length < 2:
        return np.column_stack([t, u])
    inner = between[: length - 1][..., components].astype(np.float64)
    x = (np.arange(inner.shape[1]) / inner.shape[1])[:, None]
    # The interpolant may be infinite in the last step before a blow-up.
    straight = u[:-1, None] + x * np.diff(u, axis=0)[:, None]
    inner = np.where(np.isfinite(inner), inner, straight)
    times = t[:-1, None] + np.diff(t)[:, None] * x[:, 0]
    rows = np.column_stack([times.reshape(-1), inner.reshape(-1, u.shape[-1])])
    return np.vstack([rows, np.append(t[-1], u[-1])])
