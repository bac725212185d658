"""The arguments of plots: components, trajectories, colours, names."""

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree
from matplotlib import cbook, colors
from matplotlib.lines import Line2D

from ..ground.logs import log_once
from ..ground.retcode import has_failed, was_run
from ..ground.state_tree import array_names, components_of
from ..tracing.program import is_tracer
from .own_numbers import is_own_number, named_numbers, what_varies


# The largest number of trajectories drawn as lines, unless more are asked for: more can't be told
# apart, and take minutes to draw.
MOST_LINES = 500
MOST_FAILED = 20
# Line styles, which tell components apart where colours don't.
STYLES = ("-", "--", ":", "-.")
_MOST_SHADED = 10  # components, each of which has shades of its colour


class PlotArguments(NamedTuple):
    """The arguments of [`EnsembleSolution.plot`][ensembleode.EnsembleSolution.plot] that plots of
    states and plots of outcomes have in common; `line` has the options of the lines or points."""

    idxs: Any
    trajectories: Any
    color: Any
    names: Any
    units: Any
    alpha: Any
    density: bool | None
    arrows: bool
    ax: Any
    line: dict[str, Any]


class DrawnComponents(NamedTuple):
    """The components of the flattened state that are drawn, and what they are drawn against."""

    components: list[int]
    names: list[str]
    portrait: bool  # against each other, not against time
    columns: list[list[int]]  # each curve's coordinates, in a path `[row, 1 + component]`
    axes: list[str]  # the labels of the axes

    @property
    def dimensions(self) -> int:
        return len(self.columns[0])


def plan_of(idxs: Any, state: tuple[int, ...], names: Any, units: Any = None) -> DrawnComponents:
    count = int(np.prod(state))
    every = _names(names, state, count)
    _check_units(units, every)
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
    drawn = [every[i] for i in components]
    named = [with_unit(name, units) for name in drawn]
    if portrait:
        return DrawnComponents(components, named, portrait, columns, named)
    time, label = with_unit("t", units), named[0] if k == 1 else ""
    shared = {_unit_of(name, units) for name in drawn}
    if k > 1 and len(shared) == 1 and (unit := shared.pop()) is not None:
        named, label = drawn, unit  # the axis has it, and not the legend
    return DrawnComponents(components, named, portrait, columns, [time, label])


def with_unit(name: str, units: Mapping[str, Any] | None) -> str:
    unit = _unit_of(name, units)
    return name if unit is None else f"{name} ({unit})"


def _unit_of(name: str, units: Mapping[str, Any] | None) -> str | None:
    """The unit of this name, or else that of the leaf or the vector that it is a component of."""
    found = None if units is None else units.get(name, units.get(_whole(name)))
    return None if found is None else str(found)


def _whole(name: str) -> str:
    """`place` of `place[0]`, `u` of `u0` and of `u[0,1]`."""
    whole = name.rstrip("[]0123456789,")
    return name if whole == "t" else whole


def _check_units(units: Any, names: list[str]) -> None:
    """**Raises:** `TypeError` where these are not units by name; `ValueError` for a name that
    nothing has."""
    if units is None:
        return
    if not isinstance(units, Mapping):
        raise TypeError(
            "units must be a dictionary from names to units, such as {'t': 'days', "
            f"{names[0]!r}: 'mg/L'}}, got {units!r}."
        )
    known = {"t", *names, *map(_whole, names)}
    for name in units:
        if name not in known and not is_own_number(name):
            raise ValueError(
                f"units has {name!r}, and there are t, {', '.join(names)}; parameters are named as "
                "in 'p.k' or 'p[0]'."
            )


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
    return list(array_names(state))


def check_one_of(argument: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {value!r}.")


def check_numbers(u: PyTree, counted: Any, ndim: int) -> None:
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


def choose(trajectories: Any, sim: Any) -> np.ndarray:
    """The indices of the trajectories that are asked for, by default all, without those that were
    not run."""
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
    run = was_run(retcode)
    return chosen[(run & (np.asarray(sim.lengths) > 0))[chosen]]


def sample(chosen: np.ndarray, sim: Any) -> np.ndarray:
    """As many trajectories as can be told apart, evenly spaced, and some more that failed."""
    if len(chosen) <= MOST_LINES:
        return chosen
    failed = chosen[has_failed(np.asarray(sim.retcode)[chosen])]
    more = spaced(failed, MOST_FAILED)
    log_once(
        f"plot draws {MOST_LINES} of {len(chosen)} trajectories, evenly spaced by index, "
        f"and {len(more)} of the {len(failed)} that failed. Choose with trajectories= "
        "(trajectories=slice(None) draws all); density=True draws how dense all of them are, and "
        "eo.EnsembleSummary(sim).plot() quantiles."
    )
    return np.union1d(spaced(chosen, MOST_LINES), more)


def spaced(indices: np.ndarray, most: int) -> np.ndarray:
    if len(indices) <= most:
        return indices
    return indices[np.linspace(0, len(indices) - 1, most).astype(int)]


def color_and_line(color: Any, line: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    line = cbook.normalize_kwargs(line, Line2D)  # `lw` → `linewidth` and so on
    if "color" in line:
        if color is not None:
            raise TypeError("color is given twice, once as c.")
        color = line.pop("color")
    return color, line


def as_color(color: Any) -> str | tuple[float, ...] | None:
    if color is not None and not colors.is_color_like(color):
        raise ValueError(f"color must be a matplotlib colour, got {color!r}.")
    return color


# The default of `color`.
VARYING = "varying"
# The options that a density has; others are for lines.
DENSITY_OPTIONS = {"label", "cmap", "norm", "zorder"}


def colored_by(
    wanted: PlotArguments, sim: Any, chosen: np.ndarray, plan: DrawnComponents
) -> tuple[Any, dict[str, Any], str]:
    """The colour of an ensemble, or a number for each trajectory; the options of lines; and the
    name of numbers that are asked for by name, or that vary (see `EnsembleSolution.plot`)."""
    by_default = is_varying(wanted.color)
    color, line = color_and_line(None if by_default else wanted.color, wanted.line)
    name = None
    if color is not None:
        name = color if is_own_number(color) else None
    elif by_default and not (wanted.ax is not None and wanted.ax.has_data()):
        few = len(plan.columns) <= _MOST_SHADED
        name = what_varies(sim, chosen) if few and "label" not in line else None
    if name is None:
        unused = ("cmap", "norm") if by_default and color is None else ()
        return color, {k: x for k, x in line.items() if k not in unused}, ""
    return named_numbers(sim, name, "color"), line, with_unit(name, wanted.units)


def wants_density(wanted: PlotArguments, plan: DrawnComponents, n: int) -> bool:
    """Whether `n` trajectories are drawn as a density and not as lines."""
    color, line = color_and_line(None if is_varying(wanted.color) else wanted.color, wanted.line)
    by_numbers = is_own_number(color) or not (color is None or isinstance(color, str | tuple))
    flat = plan.dimensions == 2
    if wanted.density and not (flat and not by_numbers):
        raise ValueError(
            "density=True draws how many trajectories there are, in two dimensions: leave out "
            + ("the numbers of color." if flat else "one of the three components of idxs.")
        )
    if n == 0 or wanted.density is not None:
        return bool(n and wanted.density)
    return n > MOST_LINES and flat and not by_numbers and set(line) <= DENSITY_OPTIONS


def is_varying(color: Any) -> bool:
    return isinstance(color, str) and color == VARYING


def as_numbers(color: Any, n: int, chosen: np.ndarray) -> np.ndarray | None:
    """The numbers of the chosen trajectories; None where `color` is a colour."""
    if color is None or isinstance(color, str | tuple):
        as_color(color)
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
