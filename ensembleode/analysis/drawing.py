"""The drawing of a plot: colours and line styles, lines, the view, the legend."""

import itertools
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import PyTree
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba
from matplotlib.lines import Line2D
from mpl_toolkits.mplot3d.art3d import Line3D, Line3DCollection

from .plot_arguments import as_numbers, DrawnComponents, STYLES


# The largest number of components in a legend; more have a colorbar.
_MOST_ENTRIES = 20
# How far failed trajectories may widen the view on each side, in ranges of the other trajectories.
_WIDEN = 2.0


class Look(NamedTuple):
    """The look of a component's curves; None as the colour is the next one of the axes' cycle."""

    color: Any
    linestyle: Any
    label: str | None


def looks_of(
    plan: DrawnComponents, color: Any, line: dict[str, Any], label: str | None = None
) -> list[Look]:
    """The look of each curve: each has its own colour, or with one colour for all its own line
    style. `label` is the label of a single curve, unless `line` has one."""
    k = len(plan.columns)
    style, given = line.get("linestyle"), line.get("label")
    if k == 1:
        return [Look(color, style, label if given is None else str(given))]
    labels = [name if given is None else f"{given}: {name}" for name in plan.names]
    if color is None:
        if bar := component_bar(plan, color):
            each, labels = bar[0].to_rgba(np.asarray(plan.components)), [None] * k
        elif k <= len(matplotlib.rcParams["axes.prop_cycle"]):
            each = [None] * k
        else:
            each = matplotlib.colormaps["tab20"](np.arange(k))
        return [Look(c, style, entry) for c, entry in zip(each, labels, strict=True)]
    if style is not None:  # all curves are alike, as asked for, and share an entry
        return [Look(color, style, given), *[Look(color, style, None)] * (k - 1)]
    if k > len(STYLES):
        raise ValueError(
            "color leaves only line styles to tell components apart: there are "
            f"{len(STYLES)}, and {k} components are drawn. Choose some with idxs, draw a phase "
            "portrait (idxs as a tuple), or give a linestyle (such as ls='-') for all."
        )
    return [Look(color, s, entry) for s, entry in zip(STYLES, labels, strict=False)]


def color_bar(numbers: PyTree, cmap: Any, norm: Any, label: str) -> tuple[ScalarMappable, str]:
    """The mappable and the label of a colorbar."""
    mappable = ScalarMappable(norm, cmap)
    mappable.set_array(numbers)
    if len(numbers):
        mappable.autoscale_None()
    return mappable, str(label)


def component_bar(plan: DrawnComponents, color: Any) -> tuple[ScalarMappable, str] | None:
    """The colorbar that explains the colours of components where a legend can't list them."""
    crowded = color is None and len(plan.columns) > _MOST_ENTRIES
    return color_bar(plan.components, "viridis", None, "component") if crowded else None


def own_colors(
    plan: DrawnComponents,
    color: Any,
    line: dict[str, Any],
    n: int,
    chosen: np.ndarray,
    label: str = "",
) -> tuple[np.ndarray | None, tuple[ScalarMappable, str] | None]:
    """The colours of the chosen trajectories if numbers determine them, else None; and the
    colorbar, whose entries are removed from `line`. `label`: its label, unless `line` has one."""
    numbers = as_numbers(color, n, chosen)
    if numbers is None:
        return None, component_bar(plan, color)
    norm = line.pop("norm", None) or norm_of(numbers)
    bar = color_bar(numbers, line.pop("cmap", "viridis"), norm, line.pop("label", label))
    return bar[0].to_rgba(numbers), bar


def shaded(
    ax: Axes, each: np.ndarray, numbers: np.ndarray, norm: Any, label: str
) -> tuple[np.ndarray, tuple[ScalarMappable, str]]:
    """Shades of the colours `each [component, 4]`, from light to dark by the numbers of the
    trajectories: `[trajectory, component, 4]`; and the colorbar."""

    def shades(color: PyTree) -> LinearSegmentedColormap:
        light, dark = map(to_rgba, (ax.get_facecolor(), matplotlib.rcParams["text.color"]))
        ends = np.array([[0.7, 0.0], [0.0, 0.45]]) @ [light, dark]
        ends += np.outer([0.3, 0.55], color)
        return LinearSegmentedColormap.from_list("shades", [ends[0], color, ends[1]])

    bar = color_bar(numbers, shades(to_rgba("gray")), norm or norm_of(numbers), label)
    relative = bar[0].norm(numbers)
    return np.stack([shades(color)(relative) for color in each], axis=1), bar


def norm_of(numbers: np.ndarray) -> LogNorm | None:
    """A logarithmic scale for numbers over more than two decades whose median is nearer to the
    geometric mean of the smallest and the largest than to the arithmetic one; else None."""
    if not len(numbers) or numbers.min() <= 0 or numbers.max() <= 100 * numbers.min():
        return None
    low, middle, high = np.quantile(numbers, [0.0, 0.5, 1.0])
    return LogNorm() if middle**2 < np.sqrt(low * high) * (low + high) / 2 else None


def faintness(n: int, numbered: bool) -> dict[str, float]:
    """The style for `n` lines: few lines are opaque; many lines are thin and faint, so that one
    sees how many cross. They are less faint where colours stand for numbers, which must be told
    apart."""
    few = min(1.0, 10 / max(n, 1))
    width = matplotlib.rcParams["lines.linewidth"]
    return {
        # With a smaller alpha, rounding to 8 bits for each colour changes the hue.
        "alpha": max(0.1, min(1.0, np.sqrt(few * (10 if numbered else 1)))),
        "linewidth": width * max(0.3, few**0.25),
    }


def axes_for(plan: DrawnComponents, ax: Axes | None) -> Axes:
    """The given axes, or those of a new figure."""
    solid = plan.dimensions == 3
    if ax is None:
        import matplotlib.pyplot as plt  # may start a GUI toolkit

        projection = "3d" if solid else None
        _, ax = plt.subplots(layout="constrained", subplot_kw={"projection": projection})
    elif solid and ax.name != "3d":
        raise ValueError(
            "idxs has three components, so ax must be 3-D, as from "
            "plt.subplot(projection='3d'), or left out."
        )
    elif ax.name == "3d" and not solid:
        raise ValueError("ax is 3-D, so idxs must be a tuple of three components.")
    return ax


def add_entry(ax: Axes, plan: DrawnComponents, look: Look, line: dict[str, Any]) -> Any:
    """Add an empty, opaque line for the legend. Returns its colour, either the given one or the
    next one of the cycle."""
    (entry,) = ax.plot(*[[]] * plan.dimensions, **_style(look, line))
    color = entry.get_color()
    if look.label is None:
        entry.remove()
    return color


def add_line(ax: Any, curve: np.ndarray, look: Look, line: dict[str, Any]) -> Any:
    """Draw a line, or a dot where there is only one point."""
    dot = {"marker": "o"} if len(curve) == 1 else {}
    (drawn,) = ax.plot(*curve.T, **dot | _style(look, line))
    return drawn


def _style(look: Look, line: dict[str, Any]) -> dict[str, Any]:
    return line | {"label": None} | {k: v for k, v in look._asdict().items() if v is not None}


def add_lines(
    ax: Axes, curves: list[list[np.ndarray]], failed: np.ndarray, each: np.ndarray, style: dict
) -> None:
    """Draw lines in the colours `each [line, 4]` as one collection, trajectory by trajectory, so
    that no component covers all of another; dots where there is only one point."""
    if not curves:
        return
    collection = Line3DCollection if ax.name == "3d" else LineCollection
    flat = list(itertools.chain(*curves))
    ax.add_collection(collection(flat, colors=each, **style), autolim=False)
    # A failed trajectory with one point has a cross instead of a dot.
    dots = np.array([len(several[0]) == 1 for several in curves]) & ~failed
    if dots.any():
        dots = np.repeat(dots, len(curves[0]))
        points = np.concatenate(list(itertools.compress(flat, dots)))
        ax.scatter(*points.T, s=16, c=each[dots], alpha=style["alpha"])


def add_spread(
    ax: Axes, curve: np.ndarray, low: np.ndarray, high: np.ndarray, line: Any, error_style: str
) -> None:
    t, middle = curve.T
    color = line.get_color()
    if error_style == "ribbon" and len(t) > 1:
        ax.fill_between(t, low, high, color=color, alpha=0.25, linewidth=0, zorder=1.9)
        return
    # By the rounding of quantiles, the median may be outside of them by an ulp.
    error = np.maximum([middle - low, high - middle], 0)
    ax.errorbar(t, middle, yerr=error, fmt="none", ecolor=color, elinewidth=1, capsize=2)


def set_view(ax: Any, curves: list[list[np.ndarray]], failed: np.ndarray, had_data: bool) -> None:
    """Set a view that contains all curves, except that failed ones are cut where the others would
    become unreadable."""
    if not curves:
        return
    points = np.concatenate(list(itertools.chain(*curves)))
    if failed.any() and not failed.all():
        # The range of the others, together with the starts of the failed ones.
        each = zip(curves, failed, strict=True)
        plain = np.concatenate([x[:1] if bad else x for several, bad in each for x in several])
        low, high = plain.min(axis=0), plain.max(axis=0)
        room = np.where(high > low, _WIDEN * (high - low), np.inf)
        points = np.clip(points, low - room, high + room)
    if ax.name == "3d":
        ax.auto_scale_xyz(*points.T, had_data)
    else:
        ax.update_datalim(points)
        ax.autoscale_view()


def add_crosses(ax: Axes, plan: DrawnComponents, failed: list[list[np.ndarray]]) -> None:
    """Draw a red cross where each of these curves ends; crosses don't change the view. Against
    time, a curve that ends above or below the view also has a cross at the border of the view."""
    if not failed:
        return
    ends = np.array([[curve[-1] for curve in several] for several in failed])
    low, high = np.sort([getattr(ax, f"get_{axis}lim")() for axis in "xyz"[: plan.dimensions]]).T
    outside = ((ends < low) | (ends > high)).any(axis=(1, 2)).sum()
    label = f"failed ({outside} out of view)" if outside else "failed"
    if label in ax.get_legend_handles_labels()[1]:
        label = None
    style = {"color": "red", "linestyle": "none", "marker": "x", "markeredgewidth": 1.5}
    ends = ends.reshape(-1, plan.dimensions)
    line = Line3D if ax.name == "3d" else Line2D
    ax.add_artist(line(*ends.T, label=label, zorder=3, **style))
    if not plan.portrait:
        t, u = ends.T
        for beyond, height in ((u > high[1], 0.98), (u < low[1], 0.02)):
            where = (t[beyond], np.full(beyond.sum(), height))
            ax.add_artist(Line2D(*where, transform=ax.get_xaxis_transform(), zorder=3, **style))


def finish(ax: Axes, plan: DrawnComponents, *bars: tuple[ScalarMappable, str] | None) -> None:
    """Add the names to axes that have none, the colorbars, and the legend. The legend hides no
    data: it is beside the axes, if there is space and the layout can make room for it."""
    for axis, label in zip("xyz", plan.axes, strict=False):
        if not getattr(ax, f"get_{axis}label")():
            getattr(ax, f"set_{axis}label")(label)
    for bar in bars:
        if bar is None:
            continue
        # The labels of 3-D axes extend farther to the right than the layout knows.
        room = {"location": "left", "pad": 0, "shrink": 0.8} if ax.name == "3d" else {}
        ax.figure.colorbar(bar[0], ax=ax, label=bar[1], **room)
    if not (entries := ax.get_legend_handles_labels()[1]):
        return
    if ax.figure.get_layout_engine() is not None:
        most = max(1, int(ax.get_window_extent().height // 25))  # entries in a column
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
        legend = ax.legend(ncols=-(-len(entries) // most), **place)
        if legend.get_window_extent().width < 0.4 * ax.figure.bbox.width:
            return
    ax.legend(loc="best").set_in_layout(False)
