"""Plots of solutions, ensembles and summaries, with matplotlib (the extra `plot`).

The `plot` methods import this module when they are called, as matplotlib is optional.
"""

import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from ..dense import states_between
from ..ground.logs import log_once
from ..ground.retcode import has_failed, ReturnCode
from ..ground.state_tree import component_names, components_of, flattened
from ..tracing.program import is_tracer


try:
    import matplotlib
    from matplotlib import cbook, colors
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D
    from mpl_toolkits.mplot3d.art3d import Line3D, Line3DCollection

    from .event_marks import add_marks, marks_of
    from .outcomes import add_outcomes, drawn, numbers_against, outcomes_of
except ModuleNotFoundError as e:
    raise ImportError("plots need matplotlib: pip install 'ensembleode[plot]'") from e


_STYLES = ("-", "--", ":", "-.")
# The largest number of components in a legend; more have a colorbar.
_MOST_ENTRIES = 20
# The largest number of trajectories drawn where none are chosen: more can't be told apart, and take
# minutes to draw.
_MOST_TRAJECTORIES = 200
_MOST_FAILED = 20
# The number of points drawn for each step where steps are interpolated; and about how many in all.
_POINTS = 10
_MOST_POINTS = 2_000_000
# How far failed trajectories may widen the view on each side, in ranges of the other trajectories.
_WIDEN = 2.0
_SEM = 1.96  # 95% of a normal distribution
_NO_STATES = {
    "outputs": "this ensemble has what output_func returned, no states over time: plot sim.u with "
    "matplotlib, or solve without output_func.",
    "reduced": "this ensemble was reduced: plot sim.u with matplotlib, or solve without a "
    "reduction and plot eo.EnsembleSummary(sim).",
}


def plot_ensemble(
    sim: Any,
    idxs: Any,
    trajectories: Any,
    color: Any,
    names: Any,
    alpha: Any,
    ax: Any,
    line: Any,
    *,
    events: Any,
    against: Any,
) -> Axes:
    """See [`EnsembleSolution.plot`][ensembleode.EnsembleSolution.plot]."""
    if against is not None and sim.kind != "reduced":
        return _plot_outcomes(sim, idxs, trajectories, color, names, alpha, ax, line, against)
    if sim.kind != "trajectories":
        raise TypeError(_NO_STATES[sim.kind])
    u = flattened(sim.u, 2, sim._order)
    _check_numbers(u, sim.retcode, 1)
    n, _, *state = u.shape
    plan = _plan(idxs, tuple(state), names or component_names(sim.u, 2, sim._order))
    color, line = _color_and_line(color, line)
    chosen = _choose(trajectories, sim)
    rows, which = _marks(sim, chosen, plan.components, events)
    numbers = _as_numbers(color, n, chosen)
    if numbers is None:
        bar, own_colors = _component_bar(plan, color), None
    else:
        how = (line.pop("cmap", "viridis"), line.pop("norm", None), line.pop("label", ""))
        bar = _bar(numbers, *how)
        own_colors = bar[0].to_rgba(numbers)
        color = matplotlib.rcParams["text.color"]  # that of lines in the legend
    looks = _looks(plan, color, line)
    paths = _paths(sim, u, chosen, plan.components)
    curves = [[path[:, columns] for columns in plan.columns] for path in paths]
    failed = np.asarray(has_failed(np.asarray(sim.retcode)[chosen]))

    ax = _axes_for(plan, ax)
    had_data = ax.has_data()
    each = colors.to_rgba_array([_add_entry(ax, plan, look, line) for look in looks])
    if own_colors is None:
        each = np.tile(each, (len(paths), 1))
    else:
        each = np.repeat(own_colors, len(looks), axis=0)
    # Below other artists, such as those of a summary.
    style = {"zorder": 1.8} | _density(len(paths), own_colors is not None) | line
    style["label"] = None
    if alpha is not None:
        style["alpha"] = alpha
    if looks[0].linestyle is not None:
        style["linestyle"] = [look.linestyle for look in looks]
    _add_lines(ax, curves, failed, each, style)
    # Marks are on the lines, unless an event is between two saved times.
    marks = [[rows[:, columns] for columns in plan.columns]] if len(rows) else []
    none = np.zeros(len(marks), bool)
    _set_view(ax, [*curves, *marks], np.concatenate([failed, none]), had_data)
    add_marks(ax, rows, which, plan.columns, events, max(0.3, style["alpha"] or 1.0))
    _add_crosses(ax, plan, [several for several, bad in zip(curves, failed, strict=True) if bad])
    _finish(ax, plan, bar)
    return ax


def _plot_outcomes(
    sim: Any,
    idxs: Any,
    trajectories: Any,
    color: Any,
    names: Any,
    alpha: Any,
    ax: Any,
    line: Any,
    against: Any,
) -> Axes:
    """A point for each trajectory."""
    for x in jax.tree.leaves(sim.u):
        _check_numbers(x, sim.retcode, 1)
    if isinstance(idxs, tuple):
        raise ValueError("idxs is a tuple, a phase portrait, which is not against anything else.")
    x, label = numbers_against(sim, against)
    y, known = outcomes_of(sim)
    plan = _plan(idxs, y.shape[1:], names or known)
    color, line = _color_and_line(color, line)
    chosen = np.arange(len(sim)) if trajectories is None else _choose(trajectories, sim)
    chosen, failed = drawn(sim, chosen)
    numbers, bar = _as_numbers(color, len(sim), chosen), _component_bar(plan, color)
    if numbers is not None:
        bar = _bar(
            numbers, line.pop("cmap", "viridis"), line.pop("norm", None), line.pop("label", "")
        )
        numbers, color = bar[0].to_rgba(numbers), None
    looks = _looks(plan, color, line)
    style = line | ({} if alpha is None else {"alpha": alpha})

    ax = _axes_for(plan, ax)
    add_outcomes(ax, x[chosen], y[chosen][:, plan.components], looks, numbers, failed, style)
    if not ax.get_xlabel():
        ax.set_xlabel(label)
    _finish(ax, plan, bar)
    return ax


def _marks(sol: Any, chosen: Any, components: list[int], events: Any) -> tuple:
    if sol.events is None or events is False:
        return np.zeros((0, 1 + len(components))), np.zeros(0, int)
    return marks_of(sol, chosen, components)


def plot_solution(
    sol: Any, idxs: Any, color: Any, names: Any, ax: Any, line: Any, *, events: Any
) -> Axes:
    """See [`ODESolution.plot`][ensembleode.ODESolution.plot]."""
    u = flattened(sol.u, 1, sol._order)
    _check_numbers(u, sol.retcode, 0)
    rows, *state = u.shape
    plan = _plan(idxs, tuple(state), names or component_names(sol.u, 1, sol._order))
    color, line = _color_and_line(color, line)
    looks = _looks(plan, _as_color(color), line)
    retcode = int(sol.retcode)
    length = 0 if retcode == ReturnCode.Default else int(sol.length)
    u = np.asarray(u).reshape(rows, -1)
    between = None
    if sol._dense is not None and length > 1:
        states = states_between(sol._dense, sol.t, sol.u, sol.length, _POINTS, several=False)
        between = np.asarray(flattened(states, 2, sol._order)).reshape(rows, _POINTS, -1)
    path = _path(np.asarray(sol.t), u, between, length, plan.components)

    ax = _axes_for(plan, ax)
    curves = [path[:, columns] for columns in plan.columns]
    for curve, look in zip(curves, looks, strict=True):
        _add_line(ax, curve, look, line)
    add_marks(ax, *_marks(sol, None, plan.components, events), plan.columns, events, 1.0)
    if has_failed(retcode) and length:
        _add_crosses(ax, plan, [curves])
    _finish(ax, plan, _component_bar(plan, color))
    return ax


def plot_summary(
    summary: Any, idxs: Any, ci_type: str, error_style: str, names: Any, ax: Any, line: Any
) -> Axes:
    """See [`EnsembleSummary.plot`][ensembleode.EnsembleSummary.plot]."""
    _check_one_of("ci_type", ci_type, ("quantile", "SEM"))
    _check_one_of("error_style", error_style, ("ribbon", "bars", "none"))
    _check_numbers(summary.u, summary.t, 1)
    rows, *state = summary.u.shape
    plan = _plan(idxs, tuple(state), names or summary.names)
    color, line = _color_and_line(None, line)
    t = np.asarray(summary.t, np.float64)

    def flat(x):
        return np.asarray(x, np.float64).reshape(rows, -1)[:, plan.components]

    if ci_type == "quantile":
        middle = flat(summary.med)
        bands = [tuple(map(flat, band)) for band in zip(summary._low, summary._high, strict=True)]
        ranks = [f"{100 * low:g}% to {100 * high:g}%" for low, high in summary._bands]
        what, spread = "median", f", {' and '.join(ranks)}"
    else:
        count = np.asarray(summary.num_monte, np.float64)[:, None]
        error = _SEM * np.sqrt(flat(summary.v) / np.where(count > 0, count, np.nan))
        middle = flat(summary.u)
        bands = [(middle - error, middle + error)]
        what, spread = "mean", f" ± {_SEM:g} SEM"
    alone = plan.portrait or error_style == "none"
    what += "" if alone else spread
    looks = _looks(plan, _as_color(color), line, label=what)

    ax = _axes_for(plan, ax)
    if len(looks) > 1:  # the entries of the legend are the names
        ax.plot([], [], color="none", label=what)
    path = np.column_stack([t, middle])
    for i, (columns, look) in enumerate(zip(plan.columns, looks, strict=True)):
        drawn = _add_line(ax, path[:, columns], look, line)
        for low, high in [] if alone else bands:
            _add_spread(ax, path[:, columns], low[:, i], high[:, i], drawn, error_style)
    _finish(ax, plan, _component_bar(plan, color))
    return ax


#
# Reading the arguments
#


class _Plan(NamedTuple):
    """The components of the flattened state that are drawn, and what they are drawn against."""

    components: list[int]
    names: list[str]
    portrait: bool  # against each other, not against time
    columns: list[list[int]]  # each curve's coordinates, in a path `[row, 1 + component]`

    @property
    def dimensions(self) -> int:
        return len(self.columns[0])


class _Look(NamedTuple):
    """The look of a component's curves; None as the colour is the next one of the axes' cycle."""

    color: Any
    linestyle: Any
    label: str | None


def _plan(idxs: Any, state: tuple[int, ...], names: Any) -> _Plan:
    count = int(np.prod(state))
    every = _names(names, state, count)
    portrait = isinstance(idxs, tuple)
    if idxs is None:
        idxs = range(count)
    several = [idxs] if isinstance(idxs, str) or not np.iterable(idxs) else idxs
    components = [i for idx in several for i in _components(idx, every)]
    k = len(components)
    if k == 0:
        raise ValueError("idxs has no components: there is nothing to draw.")
    if portrait and k not in (2, 3):
        raise ValueError(
            f"idxs has {k} components in a tuple, and a phase portrait has 2 or 3; for components "
            f"against time give a list: idxs={components}."
        )
    columns = [list(range(1, 1 + k))] if portrait else [[0, 1 + i] for i in range(k)]
    return _Plan(components, [every[i] for i in components], portrait, columns)


def _components(i: Any, names: list[str]) -> list[int]:
    """The index of the component with this number or name; or the indices of those of a leaf."""
    if isinstance(i, str):
        return components_of(i, names)
    count = len(names)
    try:
        if isinstance(i, bool | np.bool_):
            raise TypeError
        number = operator.index(i)
    except TypeError:
        raise TypeError(
            "idxs must be an integer or a name, a list of them (components against time), or a "
            f"tuple of them (a phase portrait), got {i!r}."
        ) from None
    if not -count <= number < count:
        raise ValueError(
            f"idxs has the component {number}, and the state has {count}, counted from 0."
        )
    return [number % count]


def _names(names: Any, state: tuple[int, ...], count: int) -> list[str]:
    if names is not None:
        given = [names] if isinstance(names, str) else [str(name) for name in names]
        if len(given) != count:
            raise ValueError(
                f"names must have a name for each of the {count} components of the state (also "
                f"where idxs chooses some), got {len(given)}."
            )
        return given
    if not state:
        return ["u"]
    if len(state) == 1:
        return [f"u{i}" for i in range(count)]
    return [f"u[{','.join(map(str, index))}]" for index in np.ndindex(state)]


def _check_one_of(argument: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {value!r}.")


def _check_numbers(u: Any, counted: Any, ndim: int) -> None:
    """Check that `u` is an array whose axes are known; `counted` says how it was counted, and
    `ndim` is its number of axes."""
    if is_tracer(u) or is_tracer(counted):
        raise TypeError(
            "a plot needs numbers, and inside jit, grad or vmap nothing has been computed yet: "
            "return the solution, and plot it outside."
        )
    if np.ndim(counted) != ndim:
        raise TypeError(
            "these are many solutions in one, as vmap makes them: pick one with "
            "jax.tree.map(lambda x: x[i], ...), and plot it."
        )
    if np.iscomplexobj(u):
        raise TypeError(
            f"the states are complex ({u.dtype}), and an axis has real numbers: plot real and "
            "imaginary parts, or sizes, with matplotlib from .t and .u."
        )


def _choose(trajectories: Any, sim: Any) -> np.ndarray:
    """The indices of the trajectories to draw, without those that were not run: the ones asked for,
    or a sample."""
    n = len(sim)
    retcode = np.asarray(sim.retcode)
    chosen = np.arange(n)
    if trajectories is not None:
        if isinstance(trajectories, tuple):
            trajectories = list(trajectories)
        try:
            chosen = np.atleast_1d(chosen[trajectories])
        except IndexError as e:
            raise ValueError(
                f"trajectories must be indices, a slice or a mask of the {n} trajectories, got "
                f"{trajectories!r}."
            ) from e
    run = retcode != ReturnCode.Default.value
    chosen = chosen[(run & (np.asarray(sim.lengths) > 0))[chosen]]
    if trajectories is not None or len(chosen) <= _MOST_TRAJECTORIES:
        return chosen
    # As many as can be told apart, evenly spaced, and in addition some that failed.
    failed = chosen[has_failed(retcode[chosen])]
    more = _spaced(failed, _MOST_FAILED)
    log_once(
        f"plot draws {_MOST_TRAJECTORIES} of {len(chosen)} trajectories, evenly spaced by index, "
        f"and {len(more)} of the {len(failed)} that failed. Choose with trajectories= "
        "(trajectories=slice(None) draws all); eo.EnsembleSummary(sim).plot() shows quantiles."
    )
    return np.union1d(_spaced(chosen, _MOST_TRAJECTORIES), more)


def _spaced(indices: np.ndarray, most: int) -> np.ndarray:
    if len(indices) <= most:
        return indices
    return indices[np.linspace(0, len(indices) - 1, most).astype(int)]


def _color_and_line(color: Any, line: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    line = cbook.normalize_kwargs(line, Line2D)  # `lw` → `linewidth` and so on
    if "color" in line:
        if color is not None:
            raise TypeError("color is given twice, once as c.")
        color = line.pop("color")
    return color, line


def _as_color(color: Any) -> Any:
    if color is not None and not colors.is_color_like(color):
        raise ValueError(f"color must be a matplotlib colour, got {color!r}.")
    return color


def _as_numbers(color: Any, n: int, chosen: np.ndarray) -> np.ndarray | None:
    """The numbers of the chosen trajectories; None where `color` is a colour."""
    if color is None or isinstance(color, str | tuple):
        _as_color(color)
        return None
    if is_tracer(color):
        raise TypeError("color is traced: nothing has been computed of it yet. Plot outside jit.")
    numbers = np.asarray(color)
    if numbers.dtype.kind not in "biuf" or numbers.shape != (n,):
        raise ValueError(
            f"color must be a matplotlib colour (by its red, green and blue: a tuple), or one "
            f"number for each of the {n} trajectories, got {color!r}."
        )
    numbers = numbers[chosen].astype(np.float64)
    bad = ~np.isfinite(numbers)
    if bad.any():
        raise ValueError(
            f"color is {numbers[bad][0]} for trajectory {chosen[bad][0]}, and no colormap has "
            "that; leave it out with trajectories."
        )
    return numbers


#
# Colours and line styles
#


def _looks(plan: _Plan, color: Any, line: dict[str, Any], label: str | None = None) -> list[_Look]:
    """The look of each curve: each has its own colour, or with one colour for all its own line
    style. `label` is the label of a single curve, unless `line` has one."""
    k = len(plan.columns)
    style, given = line.get("linestyle"), line.get("label")
    if k == 1:
        return [_Look(color, style, label if given is None else str(given))]
    labels = [name if given is None else f"{given}: {name}" for name in plan.names]
    if color is None:
        if bar := _component_bar(plan, color):
            each, labels = bar[0].to_rgba(np.asarray(plan.components)), [None] * k
        elif k <= len(matplotlib.rcParams["axes.prop_cycle"]):
            each = [None] * k
        else:
            each = matplotlib.colormaps["tab20"](np.arange(k))
        return [_Look(c, style, entry) for c, entry in zip(each, labels, strict=True)]
    if style is not None:  # all curves are alike, as asked for, and share an entry
        return [_Look(color, style, given), *[_Look(color, style, None)] * (k - 1)]
    if k > len(_STYLES):
        raise ValueError(
            "color leaves only line styles to tell components apart: there are "
            f"{len(_STYLES)}, and {k} components are drawn. Choose some with idxs, draw a phase "
            "portrait (idxs as a tuple), or give a linestyle (such as ls='-') for all."
        )
    return [_Look(color, s, entry) for s, entry in zip(_STYLES, labels, strict=False)]


def _bar(numbers: Any, cmap: Any, norm: Any, label: Any) -> tuple[ScalarMappable, str]:
    """The mappable and the label of a colorbar."""
    mappable = ScalarMappable(norm, cmap)
    mappable.set_array(numbers)
    if len(numbers):
        mappable.autoscale_None()
    return mappable, str(label)


def _component_bar(plan: _Plan, color: Any) -> tuple[ScalarMappable, str] | None:
    """The colorbar that explains the colours of components where a legend can't list them."""
    crowded = color is None and len(plan.columns) > _MOST_ENTRIES
    return _bar(plan.components, "viridis", None, "component") if crowded else None


def _density(n: int, numbered: bool) -> dict[str, float]:
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


#
# Paths: `[row, 1 + component]`, the time first
#


def _paths(sim: Any, u: Any, chosen: np.ndarray, components: list[int]) -> list[np.ndarray]:
    n, rows = u.shape[:2]
    t = np.broadcast_to(np.asarray(sim.t), (n, rows))[chosen]
    u = np.asarray(u).reshape(n, rows, -1)[chosen]
    lengths = np.asarray(sim.lengths)[chosen]
    points = int(np.clip(_MOST_POINTS // max(1, lengths.sum()), 1, _POINTS))
    between: Any = [None] * len(chosen)
    if sim._dense is not None and points > 1 and len(chosen):
        some = jax.tree.map(lambda x: x[chosen], sim.u)
        dense = sim._dense.of(chosen)
        states = states_between(dense, t, some, lengths, points, several=True)
        between = np.asarray(flattened(states, 3, sim._order)).reshape(*t.shape, points, -1)
    return [
        _path(*one, int(length), components)
        for *one, length in zip(t, u, between, lengths, strict=True)
    ]


def _path(
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


#
# Drawing
#


def _axes_for(plan: _Plan, ax: Any) -> Any:
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


def _add_entry(ax: Any, plan: _Plan, look: _Look, line: dict[str, Any]) -> Any:
    """Add an empty, opaque line for the legend. Returns its colour, either the given one or the
    next one of the cycle."""
    (entry,) = ax.plot(*[[]] * plan.dimensions, **_style(look, line))
    color = entry.get_color()
    if look.label is None:
        entry.remove()
    return color


def _add_line(ax: Any, curve: np.ndarray, look: _Look, line: dict[str, Any]) -> Any:
    """Draw a line, or a dot where there is only one point."""
    dot = {"marker": "o"} if len(curve) == 1 else {}
    (drawn,) = ax.plot(*curve.T, **dot | _style(look, line))
    return drawn


def _style(look: _Look, line: dict[str, Any]) -> dict[str, Any]:
    return line | {"label": None} | {k: v for k, v in look._asdict().items() if v is not None}


def _add_lines(
    ax: Any, curves: list[list[np.ndarray]], failed: np.ndarray, each: np.ndarray, style: dict
) -> None:
    """Draw lines in the colours `each [line, 4]` as one collection, trajectory by trajectory, so
    that no component covers all of another; dots where there is only one point."""
    if not curves:
        return
    collection = Line3DCollection if ax.name == "3d" else LineCollection
    flat = [curve for several in curves for curve in several]
    ax.add_collection(collection(flat, colors=each, **style), autolim=False)
    # A failed trajectory with one point has a cross instead of a dot.
    dots = np.array([len(several[0]) == 1 for several in curves]) & ~failed
    if dots.any():
        dots = np.repeat(dots, len(curves[0]))
        points = np.concatenate([curve for curve, dot in zip(flat, dots, strict=True) if dot])
        ax.scatter(*points.T, s=16, c=each[dots], alpha=style["alpha"])


def _add_spread(
    ax: Any, curve: np.ndarray, low: np.ndarray, high: np.ndarray, line: Any, error_style: str
) -> None:
    t, middle = curve.T
    color = line.get_color()
    if error_style == "ribbon" and len(t) > 1:
        ax.fill_between(t, low, high, color=color, alpha=0.25, linewidth=0, zorder=1.9)
        return
    # By the rounding of quantiles, the median may be outside of them by an ulp.
    error = np.maximum([middle - low, high - middle], 0)
    ax.errorbar(t, middle, yerr=error, fmt="none", ecolor=color, elinewidth=1, capsize=2)


def _set_view(ax: Any, curves: list[list[np.ndarray]], failed: np.ndarray, had_data: bool) -> None:
    """Set a view that contains all curves, except that failed ones are cut where the others would
    become unreadable."""
    if not curves:
        return
    points = np.concatenate([curve for several in curves for curve in several])
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


def _add_crosses(ax: Any, plan: _Plan, failed: list[list[np.ndarray]]) -> None:
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


def _finish(ax: Any, plan: _Plan, bar: tuple[ScalarMappable, str] | None) -> None:
    """Add the names to axes that have none, the colorbar, and the legend. The legend hides no data:
    it is beside the axes, if there is space and the layout can make room for it."""
    labels = plan.names if plan.portrait else ["t", plan.names[0] if len(plan.names) == 1 else ""]
    for axis, label in zip("xyz", labels, strict=False):
        if not getattr(ax, f"get_{axis}label")():
            getattr(ax, f"set_{axis}label")(label)
    if bar is not None:
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
