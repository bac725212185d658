"""Plots of solutions, ensembles and summaries, with matplotlib (the extra `plot`).

The `plot` methods import this module when they are called, as matplotlib is optional.
"""

import itertools
from typing import Any

import jax
import numpy as np

from ..ground.extras import installing
from ..ground.retcode import has_failed, was_ended, was_run
from ..ground.state_tree import flattened
from ..solution.dense import states_between


try:
    import matplotlib
    from matplotlib import colors
    from matplotlib.axes import Axes

    from . import drawing
    from .event_marks import add_marks, marks_of
    from .outcomes import add_outcomes, drawn, numbers_against, outcomes_of
    from .plot_arguments import (
        as_color,
        check_numbers,
        check_one_of,
        choose,
        color_and_line,
        plan_of,
        PlotArguments as PlotArguments,
    )
except ModuleNotFoundError as e:
    raise ImportError(f"plots need matplotlib: {installing('plot')}.") from e


# The number of points drawn for each step where steps are interpolated; and about how many in all.
_POINTS = 10
_MOST_POINTS = 2_000_000
_SEM = 1.96  # 95% of a normal distribution
_NO_STATES = {
    "outputs": "this ensemble has what output_func returned, no states over time: plot sim.u with "
    "matplotlib, or solve without output_func.",
    "reduced": "this ensemble was reduced: plot sim.u with matplotlib, or solve without a "
    "reduction and plot eo.EnsembleSummary(sim).",
}


def plot_ensemble(sim: Any, wanted: PlotArguments, *, events: Any, against: Any) -> Axes:
    """See [`EnsembleSolution.plot`][ensembleode.EnsembleSolution.plot]."""
    if against is not None and sim.kind != "reduced":
        return _plot_outcomes(sim, wanted, against)
    if sim.kind != "trajectories":
        raise TypeError(_NO_STATES[sim.kind])
    u = flattened(sim.u, 2, sim._order)
    check_numbers(u, sim.retcode, 1)
    n, _, *state = u.shape
    plan = plan_of(wanted.idxs, tuple(state), wanted.names or sim.names)
    color, line = color_and_line(wanted.color, wanted.line)
    chosen = choose(wanted.trajectories, sim)
    rows, which = _marks(sim, chosen, plan.components, events)
    own, bar = drawing.own_colors(plan, color, line, n, chosen)
    if own is not None:
        color = matplotlib.rcParams["text.color"]  # that of lines in the legend
    looks = drawing.looks_of(plan, color, line)
    paths = _paths(sim, u, chosen, plan.components)
    curves = [[path[:, columns] for columns in plan.columns] for path in paths]
    failed = np.asarray(has_failed(np.asarray(sim.retcode)[chosen]))

    ax = drawing.axes_for(plan, wanted.ax)
    had_data = ax.has_data()
    each = colors.to_rgba_array([drawing.add_entry(ax, plan, look, line) for look in looks])
    each = np.tile(each, (len(paths), 1)) if own is None else np.repeat(own, len(looks), axis=0)
    # Below other artists, such as those of a summary.
    style = {"zorder": 1.8} | drawing.density(len(paths), own is not None) | line
    style["label"] = None
    if wanted.alpha is not None:
        style["alpha"] = wanted.alpha
    if looks[0].linestyle is not None:
        style["linestyle"] = [look.linestyle for look in looks]
    drawing.add_lines(ax, curves, failed, each, style)
    # Marks are on the lines, unless an event is between two saved times.
    marks = [[rows[:, columns] for columns in plan.columns]] if len(rows) else []
    none = np.zeros(len(marks), bool)
    drawing.set_view(ax, [*curves, *marks], np.concatenate([failed, none]), had_data)
    add_marks(ax, rows, which, plan.columns, events, max(0.3, style["alpha"] or 1.0))
    drawing.add_crosses(ax, plan, list(itertools.compress(curves, failed)))
    drawing.finish(ax, plan, bar)
    return ax


def _plot_outcomes(sim: Any, wanted: PlotArguments, against: Any) -> Axes:
    """A point for each trajectory."""
    for x in jax.tree.leaves(sim.u):
        check_numbers(x, sim.retcode, 1)
    if isinstance(wanted.idxs, tuple):
        raise ValueError("idxs is a tuple, a phase portrait, which is not against anything else.")
    x, label = numbers_against(sim, against)
    y, known = outcomes_of(sim)
    plan = plan_of(wanted.idxs, y.shape[1:], wanted.names or known)
    color, line = color_and_line(wanted.color, wanted.line)
    every = wanted.trajectories is None
    chosen, failed = drawn(sim, np.arange(len(sim)) if every else choose(wanted.trajectories, sim))
    own, bar = drawing.own_colors(plan, color, line, len(sim), chosen)
    looks = drawing.looks_of(plan, color if own is None else None, line)
    style = line | ({} if wanted.alpha is None else {"alpha": wanted.alpha})

    ax = drawing.axes_for(plan, wanted.ax)
    add_outcomes(ax, x[chosen], y[chosen][:, plan.components], looks, own, failed, style)
    if not ax.get_xlabel():
        ax.set_xlabel(label)
    drawing.finish(ax, plan, bar)
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
    check_numbers(u, sol.retcode, 0)
    rows, *state = u.shape
    plan = plan_of(idxs, tuple(state), names or sol.names)
    color, line = color_and_line(color, line)
    looks = drawing.looks_of(plan, as_color(color), line)
    retcode = int(sol.retcode)
    length = 0 if not was_run(retcode) else int(sol.length)
    u = np.asarray(u).reshape(rows, -1)
    between = None
    if sol._dense is not None and length > 1:
        states = states_between(sol._dense, sol.t, sol.u, sol.length, _POINTS, several=False)
        between = np.asarray(flattened(states, 2, sol._order)).reshape(rows, _POINTS, -1)
    path = _path(np.asarray(sol.t), u, between, length, plan.components)
    if was_ended(retcode):
        path = _to_end(path, np.append(sol.t[-1], u[-1, plan.components]))

    ax = drawing.axes_for(plan, ax)
    curves = [path[:, columns] for columns in plan.columns]
    for curve, look in zip(curves, looks, strict=True):
        drawing.add_line(ax, curve, look, line)
    add_marks(ax, *_marks(sol, None, plan.components, events), plan.columns, events, 1.0)
    if has_failed(retcode) and length:
        drawing.add_crosses(ax, plan, [curves])
    drawing.finish(ax, plan, drawing.component_bar(plan, color))
    return ax


def plot_summary(
    summary: Any, idxs: Any, ci_type: str, error_style: str, names: Any, ax: Any, line: Any
) -> Axes:
    """See [`EnsembleSummary.plot`][ensembleode.EnsembleSummary.plot]."""
    check_one_of("ci_type", ci_type, ("quantile", "SEM"))
    check_one_of("error_style", error_style, ("ribbon", "bars", "none"))
    check_numbers(summary.u, summary.t, 1)
    rows, *state = summary.u.shape
    plan = plan_of(idxs, tuple(state), names or summary.names)
    color, line = color_and_line(None, line)
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
    looks = drawing.looks_of(plan, as_color(color), line, label=what)

    ax = drawing.axes_for(plan, ax)
    if len(looks) > 1:  # the entries of the legend are the names
        ax.plot([], [], color="none", label=what)
    path = np.column_stack([t, middle])
    for i, (columns, look) in enumerate(zip(plan.columns, looks, strict=True)):
        drawn = drawing.add_line(ax, path[:, columns], look, line)
        for low, high in [] if alone else bands:
            drawing.add_spread(ax, path[:, columns], low[:, i], high[:, i], drawn, error_style)
    drawing.finish(ax, plan, drawing.component_bar(plan, color))
    return ax


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
        dense = sim._dense.of_trajectories(chosen)
        states = states_between(dense, t, some, lengths, points, several=True)
        between = np.asarray(flattened(states, 3, sim._order)).reshape(*t.shape, points, -1)
    paths = [
        _path(*one, int(length), components)
        for *one, length in zip(t, u, between, lengths, strict=True)
    ]
    if sim._ended is not None:
        end = sim.end
        u = np.asarray(flattened(end.u, 1, sim._order)).reshape(n, -1)[:, components]
        ends = np.column_stack([end.t, u])[chosen]
        is_end = was_ended(np.asarray(sim.retcode)[chosen])
        for i in np.flatnonzero(is_end):
            paths[i] = _to_end(paths[i], ends[i])
    return paths


def _to_end(path: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The path up to where an event ended it."""
    return path if np.array_equal(path[-1:], end[None]) else np.vstack([path, end])


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
