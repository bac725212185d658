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
from .paths import path_of, paths_of, POINTS, to_end


try:
    import matplotlib
    from matplotlib import colors
    from matplotlib.axes import Axes

    from . import drawing
    from .density import add_density
    from .directions import add_directions
    from .event_marks import add_marks, marks_of
    from .outcomes import add_outcomes, drawn, outcomes_of
    from .own_numbers import numbers_against
    from .plot_arguments import (
        as_color,
        check_numbers,
        check_one_of,
        choose,
        color_and_line,
        colored_by,
        is_varying,
        plan_of,
        PlotArguments as PlotArguments,
        sample,
        wants_density,
        with_unit,
    )
except ModuleNotFoundError as e:
    raise ImportError(f"plots need matplotlib: {installing('plot')}.") from e


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
    plan = plan_of(wanted.idxs, tuple(state), wanted.names or sim.names, wanted.units)
    chosen = choose(wanted.trajectories, sim)
    if wants_density(wanted, plan, len(chosen)):
        return add_density(sim, u, chosen, plan, wanted)
    if wanted.trajectories is None:
        chosen = sample(chosen, sim)
    color, line, label = colored_by(wanted, sim, chosen, plan)
    rows, which = _marks(sim, chosen, plan.components, events)
    shades = is_varying(wanted.color) and label and len(plan.columns) > 1 and "cmap" not in line
    numbers, color = (np.asarray(color)[chosen], None) if shades else (None, color)
    norm = line.pop("norm", None) if shades else None
    own, bar = drawing.own_colors(plan, color, line, n, chosen, label)
    if own is not None:
        color = matplotlib.rcParams["text.color"]  # that of lines in the legend
    looks = drawing.looks_of(plan, color, line)
    paths = paths_of(sim, u, chosen, plan.components)
    curves = [[path[:, columns] for columns in plan.columns] for path in paths]
    failed = np.asarray(has_failed(np.asarray(sim.retcode)[chosen]))

    ax = drawing.axes_for(plan, wanted.ax)
    had_data = ax.has_data()
    each = colors.to_rgba_array([drawing.add_entry(ax, plan, look, line) for look in looks])
    if numbers is not None:
        each, bar = drawing.shaded(ax, each, numbers, norm, label)
        each = each.reshape(-1, 4)
    else:
        each = np.tile(each, (len(paths), 1)) if own is None else np.repeat(own, len(looks), axis=0)
    # Below other artists, such as those of a summary.
    numbered = own is not None or numbers is not None
    style = {"zorder": 1.8} | drawing.faintness(len(paths), numbered) | line
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
    if plan.portrait and wanted.arrows:
        add_directions(ax, [curve for several in curves for curve in several], each)
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
    plan = plan_of(wanted.idxs, y.shape[1:], wanted.names or known, wanted.units)
    every = wanted.trajectories is None
    chosen, failed = drawn(sim, np.arange(len(sim)) if every else choose(wanted.trajectories, sim))
    if is_varying(wanted.color):
        wanted = wanted._replace(color=None)
    color, line, name = colored_by(wanted, sim, chosen, plan)
    own, bar = drawing.own_colors(plan, color, line, len(sim), chosen, name)
    looks = drawing.looks_of(plan, color if own is None else None, line)
    style = line | ({} if wanted.alpha is None else {"alpha": wanted.alpha})

    ax = drawing.axes_for(plan, wanted.ax)
    add_outcomes(ax, x[chosen], y[chosen][:, plan.components], looks, own, failed, style)
    if not ax.get_xlabel():
        ax.set_xlabel(with_unit(label, wanted.units))
    drawing.finish(ax, plan, bar)
    return ax


def _marks(sol: Any, chosen: np.ndarray | None, components: list[int], events: Any) -> tuple:
    if sol.events is None or events is False:
        return np.zeros((0, 1 + len(components))), np.zeros(0, int)
    return marks_of(sol, chosen, components)


def plot_solution(
    sol: Any,
    idxs: Any,
    color: str | None,
    names: Any,
    units: Any,
    ax: Axes | None,
    line: Any,
    *,
    events: Any,
    arrows: bool,
) -> Axes:
    """See [`ODESolution.plot`][ensembleode.ODESolution.plot]."""
    u = flattened(sol.u, 1, sol._order)
    check_numbers(u, sol.retcode, 0)
    rows, *state = u.shape
    plan = plan_of(idxs, tuple(state), names or sol.names, units)
    color, line = color_and_line(color, line)
    looks = drawing.looks_of(plan, as_color(color), line)
    retcode = int(sol.retcode)
    length = 0 if not was_run(retcode) else int(sol.length)
    u = np.asarray(u).reshape(rows, -1)
    between = None
    if sol._dense is not None and length > 1:
        states = states_between(sol._dense, sol.t, sol.u, sol.length, POINTS, several=False)
        between = np.asarray(flattened(states, 2, sol._order)).reshape(rows, POINTS, -1)
    path = path_of(np.asarray(sol.t), u, between, length, plan.components)
    if was_ended(retcode):
        path = to_end(path, np.append(sol.t[-1], u[-1, plan.components]))

    ax = drawing.axes_for(plan, ax)
    curves = [path[:, columns] for columns in plan.columns]
    lines = [drawing.add_line(ax, *one, line) for one in zip(curves, looks, strict=True)]
    add_marks(ax, *_marks(sol, None, plan.components, events), plan.columns, events, 1.0)
    if has_failed(retcode) and length:
        drawing.add_crosses(ax, plan, [curves])
    if plan.portrait and arrows:
        add_directions(ax, curves, [line.get_color() for line in lines])
    drawing.finish(ax, plan, drawing.component_bar(plan, color))
    return ax


def plot_summary(
    summary: Any,
    idxs: Any,
    ci_type: str,
    error_style: str,
    names: Any,
    units: Any,
    ax: Axes | None,
    line: Any,
) -> Axes:
    """See [`EnsembleSummary.plot`][ensembleode.EnsembleSummary.plot]."""
    check_one_of("ci_type", ci_type, ("quantile", "SEM"))
    check_one_of("error_style", error_style, ("ribbon", "bars", "none"))
    check_numbers(summary.u, summary.t, 1)
    rows, *state = summary.u.shape
    plan = plan_of(idxs, tuple(state), names or summary.names, units)
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
