"""The arguments of plots: components, trajectories, colours, names."""

import operator
from typing import Any, NamedTuple

import numpy as np
from matplotlib import cbook, colors
from matplotlib.lines import Line2D

from ..ground.logs import log_once
from ..ground.retcode import has_failed, was_run
from ..ground.state_tree import array_names, components_of
from ..tracing.program import is_tracer


# The largest number of trajectories drawn where none are chosen: more can't be told apart, and take
# minutes to draw.
_MOST_TRAJECTORIES = 200
_MOST_FAILED = 20


class PlotArguments(NamedTuple):
    """The arguments of [`EnsembleSolution.plot`][ensembleode.EnsembleSolution.plot] that plots of
    states and plots of outcomes have in common; `line` has the options of the lines or points."""

    idxs: Any
    trajectories: Any
    color: Any
    names: Any
    alpha: Any
    ax: Any
    line: dict[str, Any]


class DrawnComponents(NamedTuple):
    """The components of the flattened state that are drawn, and what they are drawn against."""

    components: list[int]
    names: list[str]
    portrait: bool  # against each other, not against time
    columns: list[list[int]]  # each curve's coordinates, in a path `[row, 1 + component]`

    @property
    def dimensions(self) -> int:
        return len(self.columns[0])


def plan_of(idxs: Any, state: tuple[int, ...], names: Any) -> DrawnComponents:
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
    return DrawnComponents(components, [every[i] for i in components], portrait, columns)


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


def check_numbers(u: Any, counted: Any, ndim: int) -> None:
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
    run = was_run(retcode)
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


def color_and_line(color: Any, line: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    line = cbook.normalize_kwargs(line, Line2D)  # `lw` → `linewidth` and so on
    if "color" in line:
        if color is not None:
            raise TypeError("color is given twice, once as c.")
        color = line.pop("color")
    return color, line


def as_color(color: Any) -> Any:
    if color is not None and not colors.is_color_like(color):
        raise ValueError(f"color must be a matplotlib colour, got {color!r}.")
    return color


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
