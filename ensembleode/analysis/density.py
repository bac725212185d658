"""How dense very many trajectories are: at each time, or in a phase portrait."""

from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import PyTree
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, PowerNorm, to_rgba

from ..ground.retcode import has_failed
from ..ground.state_tree import flattened
from . import drawing
from .paths import flat_ends, paths_of, POINTS, rows_of
from .plot_arguments import (
    as_color,
    color_and_line,
    DENSITY_OPTIONS,
    DrawnComponents,
    is_varying,
    MOST_FAILED,
    PlotArguments,
    spaced,
)


_TIMES, _VALUES = 300, 200  # of the histograms
_MOST_NUMBERS = 1_000_000  # in memory at once
# Cells denser than this quantile of all that aren't empty look alike: at the start, all
# trajectories may be in one.
_FULL = 0.98


def add_density(
    sim: Any, u: PyTree, chosen: np.ndarray, plan: DrawnComponents, wanted: PlotArguments
) -> Axes:
    """Draw the density of the chosen trajectories, as far as each came: a histogram of each
    component at each time, whose integral over the values is one; or one of all points of a phase
    portrait. `u`: the states, flattened."""
    color = None if is_varying(wanted.color) else wanted.color
    color, line = color_and_line(as_color(color), wanted.line)
    own = {name: line[name] for name in line.keys() & {"cmap", "norm", "zorder"}}
    line = {name: line[name] for name in line.keys() & (DENSITY_OPTIONS - set(own))}
    looks = drawing.looks_of(plan, color, {"linestyle": "-"} | line if color else line)
    failed = has_failed(np.asarray(sim.retcode)[chosen])
    cells, x, y = _histograms(sim, u, chosen, failed, plan)

    ax = drawing.axes_for(plan, wanted.ax)
    each = [drawing.add_entry(ax, plan, look, line) for look in looks]
    filled = cells[cells > 0]
    most = np.quantile(filled, _FULL) if filled.size else 1.0
    norm = own.pop("norm", None) or PowerNorm(0.5, 0.0, most)
    cmap, alpha = own.pop("cmap", None), 1.0 if wanted.alpha is None else wanted.alpha
    style = {"norm": norm, "zorder": 1.8, "rasterized": True} | own
    for values, one in zip(cells, each, strict=True):
        shades = cmap or _shades(one, alpha)
        ax.pcolormesh(x, y, np.ma.masked_equal(values, 0.0).T, cmap=shades, **style)
    if failed.any():
        paths = paths_of(sim, u, spaced(chosen[failed], MOST_FAILED), plan.components)
        curves = [[path[:, columns] for columns in plan.columns] for path in paths]
        drawing.add_crosses(ax, plan, curves)
    if not ax.get_title():
        lost = f" ({failed.sum():,} failed)" if failed.any() else ""
        ax.set_title(f"density of {len(chosen):,} trajectories{lost}", fontsize="medium")
    shown = each[0] if len(each) == 1 else matplotlib.rcParams["text.color"]
    what = f"probability density {'over all times' if plan.portrait else 'at each time'}"
    bar = drawing.color_bar(filled, cmap or _shades(shown, alpha), norm, what)
    drawing.finish(ax, plan, bar, drawing.component_bar(plan, color))
    return ax


def _shades(color: Any, alpha: float) -> Colormap:
    ends = [to_rgba(color, 0.08 * alpha), to_rgba(color, alpha)]
    shades: Any = LinearSegmentedColormap.from_list("density", ends)
    shades.colorbar_extend = "max"
    return shades


def _histograms(
    sim: Any, u: PyTree, chosen: np.ndarray, failed: np.ndarray, plan: DrawnComponents
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The densities `[curve, x, y]`, and the edges of their cells along both axes."""
    t = np.asarray(sim.t) if np.ndim(sim.t) == 1 else rows_of(sim.t, chosen)
    start, end = float(np.nanmin(t)), float(np.nanmax(t))
    times = _edges(start, end, _TIMES)
    centres = np.clip((times[1:] + times[:-1]) / 2, start, end)
    low, high = _range(sim, u, chosen, failed, plan.components)
    if plan.portrait:
        edges = [_edges(*ends, _VALUES) for ends in zip(low, high, strict=True)]
    else:
        edges = [times, _edges(np.min(low), np.max(high), _VALUES)]
    shape = tuple(len(x) - 1 for x in edges)
    cells = np.zeros((len(plan.columns), *shape))
    reached = np.zeros(len(centres))
    column = np.broadcast_to(np.arange(len(centres)), (1, len(centres)))
    for x in _states(sim, u, chosen, plan, centres):
        reached += np.isfinite(x[..., 0]).sum(axis=0)
        for i in range(len(cells)):
            if plan.portrait:
                places = [_place(x[..., j], edges[j]) for j in (0, 1)]
            else:
                places = [np.broadcast_to(column, x.shape[:2]), _place(x[..., i], edges[1])]
            inside = (places[0] >= 0) & (places[1] >= 0)
            flat = places[0][inside] * shape[1] + places[1][inside]
            cells[i] += np.bincount(flat, minlength=np.prod(shape)).reshape(shape)
    area = np.diff(edges[1])
    if plan.portrait:
        total = reached.sum()
        area = np.diff(edges[0])[:, None] * area
    else:
        total = reached[:, None]
    return cells / (np.maximum(total, 1) * area), edges[0], edges[1]


def _range(
    sim: Any, u: PyTree, chosen: np.ndarray, failed: np.ndarray, components: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest value of each component; of trajectories that failed the start,
    where others didn't."""
    low, high = np.full((2, len(components)), np.nan)
    start_only = [] if failed.all() else chosen[failed]
    for some in _chunks(chosen, np.prod(u.shape[1:])):
        saved, lost = _saved(sim, u, some, components), np.isin(some, start_only)
        saved[lost, 1:] = np.nan
        every = [saved.reshape(-1, len(components))]
        if sim._ended is not None:
            every.append(flat_ends(sim[some].end, sim._order)[~lost][:, components])
        for x in every:
            low, high = np.fmin(low, np.fmin.reduce(x)), np.fmax(high, np.fmax.reduce(x))
    return low, high


def _chunks(chosen: np.ndarray, numbers: int) -> Iterator[np.ndarray]:
    """Some trajectories after others, with so many numbers each, that memory is bounded."""
    size = max(1, _MOST_NUMBERS // int(numbers))
    return (chosen[first : first + size] for first in range(0, len(chosen), size))


def _saved(sim: Any, u: PyTree, chosen: np.ndarray, components: list[int]) -> np.ndarray:
    """The saved states, `[trajectory, time, component]`, NaN where a trajectory didn't come."""
    rows, *state = u.shape[1:]
    x = rows_of(u, chosen).reshape(len(chosen), rows, int(np.prod(state)))[..., components]
    reached = np.arange(rows) < np.asarray(sim.lengths)[chosen, None]
    return np.where(reached[..., None], x.astype(np.float64), np.nan)


def _edges(low: float, high: float, count: int) -> np.ndarray:
    if not low < high:  # a single value, or none
        low = low if np.isfinite(low) else 0.0
        return low + max(1.0, abs(low)) * np.array([-0.5, 0.5])
    return np.linspace(low, high, count + 1)


def _place(x: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The number of the cell of each value; -1 for those outside, and for NaN."""
    count = len(edges) - 1
    with np.errstate(invalid="ignore"):
        place = (x - edges[0]) * (count / (edges[-1] - edges[0]))
        inside = (place >= 0) & (place <= count)
    return np.where(inside, np.minimum(np.where(inside, place, 0), count - 1), -1).astype(int)


def _states(
    sim: Any, u: PyTree, chosen: np.ndarray, plan: DrawnComponents, times: np.ndarray
) -> Iterator[np.ndarray]:
    """The drawn components of some trajectories after others at these times, on the lines that
    would be drawn: `[trajectory, time, component]`, NaN where a trajectory didn't come."""
    dense, ended = sim._dense is not None, sim._ended is not None
    saved = np.prod(u.shape[1:]) * (1 + dense * ended * POINTS)
    for some in _chunks(chosen, max(len(times) * len(plan.components), saved)):
        if np.ndim(sim.t) == 1 and not ended:
            x = _saved(sim, u, some, plan.components)
            yield _on_lines(np.asarray(sim.t, np.float64), x, times)
        elif dense and not ended:
            x = np.asarray(flattened(sim[some](times), 2, sim._order))
            yield x.reshape(len(some), len(times), -1)[..., plan.components].astype(np.float64)
        else:
            yield np.stack([_on_path(x, times) for x in paths_of(sim, u, some, plan.components)])


def _on_lines(t: np.ndarray, u: np.ndarray, times: np.ndarray) -> np.ndarray:
    """States at these times, linearly between the saved ones."""
    if len(t) == 1:
        return u
    if t[0] > t[-1]:
        t, u = t[::-1], u[:, ::-1]
    row = np.clip(np.searchsorted(t, times, "right") - 1, 0, len(t) - 2)
    weight = ((times - t[row]) / (t[row + 1] - t[row]))[:, None]
    low, high = u[:, row], u[:, row + 1]
    # (Where a trajectory ended at a time, that is 0 times NaN.)
    return np.where(weight == 0, low, low + weight * (high - low))


def _on_path(path: np.ndarray, times: np.ndarray) -> np.ndarray:
    t, *u = path.T if path[0, 0] <= path[-1, 0] else path[::-1].T
    return np.stack([np.interp(times, t, x, np.nan, np.nan) for x in u], axis=-1)
