"""The direction of time in phase portraits: arrows along the curves, and dots at their starts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree
from matplotlib.patches import FancyArrowPatch
from mpl_toolkits.mplot3d import proj3d

from .plot_arguments import spaced


_MOST_ARROWS = 24
_EACH = 3  # the largest number of arrows on a curve
_SHAFT = 0.01  # of the view: it is within the head
_HEAD = "-|>,head_length=0.7,head_width=0.35"


class _SolidArrow(FancyArrowPatch):
    """An arrow between two points of 3-D axes."""

    def __init__(self, ends: np.ndarray, **style: Any):
        super().__init__((0, 0), (0, 0), **style)
        self._ends = ends

    def do_3d_projection(self, renderer: Any = None) -> float:
        axes: Any = self.axes
        x, y, depth = proj3d.proj_transform(*self._ends.T, axes.M)
        self.set_positions((x[0], y[0]), (x[1], y[1]))
        return float(np.min(depth))


def add_directions(ax: Any, curves: Sequence[np.ndarray], each: PyTree) -> None:
    """Draw them for `curves`, `[point, coordinate]`, `each` in its colour. Of many curves, some
    have arrows."""
    moving = [i for i, curve in enumerate(curves) if len(curve) > 1]
    if not moving:
        return
    starts = np.array([curves[i][0] for i in moving])
    # Edges in the colour of the background set them off from lines of the same colour.
    edge = {"edgecolor": ax.get_facecolor(), "linewidth": 0.7, "zorder": 2.4}
    size = 12 + 24 / (1 + len(moving) / 10)
    ax.scatter(*starts.T, s=size, c=[each[i] for i in moving], **edge)
    limits = [getattr(ax, f"get_{axis}lim")() for axis in "xyz"[: starts.shape[1]]]
    low, high = np.sort(limits).T
    drawn = spaced(np.array(moving), _MOST_ARROWS)
    count = int(np.clip(_MOST_ARROWS // len(drawn), 1, _EACH))
    for i in drawn:
        style = {"facecolor": each[i], "arrowstyle": _HEAD, "mutation_scale": 12} | edge
        style |= {"shrinkA": 0, "shrinkB": 0}
        for ends in _pieces(curves[i], low, high, count):
            three = len(limits) == 3
            arrow = _SolidArrow(ends, **style) if three else FancyArrowPatch(*ends, **style)
            ax.add_artist(arrow)


def _pieces(
    curve: np.ndarray, low: np.ndarray, high: np.ndarray, count: int
) -> Iterator[np.ndarray]:
    """`count` short pieces of the curve, evenly spaced along what is in the view."""
    # A trajectory that failed may go so far out that matplotlib takes forever.
    seen = np.clip(curve, low, high)
    lengths = np.linalg.norm(np.diff(seen, axis=0) / (high - low), axis=1)
    along = np.cumsum(lengths)
    if along[-1] == 0:
        return
    for place in (np.arange(count) + 0.5) / count * along[-1]:
        i = np.searchsorted(along, place)
        step = (seen[i + 1] - seen[i]) / lengths[i]
        head = seen[i + 1] - (along[i] - place) * step
        yield np.stack([head - _SHAFT * step, head])
