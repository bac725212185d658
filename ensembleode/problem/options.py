"""Solver options: their names, defaults and checks."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..solvers.controllers import AbstractController
from ..solvers.norms import AbstractNorm
from ..tracing.program import is_tracer
from .initialization import BrownFullBasicInit, CheckInit
from .number_table import NUMBERS, of_kind
from .unknown_options import unknown_option


# The options whose values may not differ between trajectories; then all options of a trajectory.
STATIC_OPTIONS = {
    "save_start": None,
    "save_end": None,
    "save_everystep": False,
    "save_idxs": None,
    "save_after_events": False,
    "save_noise": False,
    "adaptive": None,
    "maxiters": 100_000,
    "stepsize_controller": None,
    "internalnorm": None,
    "sensealg": None,
    "max_events": None,
    "initializealg": None,
}
# Those that say which times and components are saved.
SAVING = ("saveat", "save_start", "save_end", "save_everystep", "save_idxs")
# The options of a whole solve.
_OF_SOLVE = (
    "alg ensemblealg trajectories batch_size seed key max_repeats engine progress throw "
    "on_interrupt store store_key"
)
_OF_NOISE = ("g", "noise_rate_prototype", "noise")
_PARTS = ("f", "u0", "tspan", "p", "integrand")
DEFAULTS = {x.option: x.default for x in NUMBERS if x.option not in ("", *_PARTS)} | STATIC_OPTIONS


def among(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function that are options."""
    return {name: arguments[name] for name in DEFAULTS if name in arguments}


def check_option_names(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        name = unknown[0]
        if name in _OF_SOLVE.split():
            raise TypeError(
                f"{name!r} is neither f, u0, tspan or p nor a solver option that a problem can "
                f"hold: give it to solve. A problem can hold {', '.join(DEFAULTS)}."
            )
        if name in _OF_NOISE:
            raise TypeError(f"{name!r} is of an eo.SDEProblem(f, g, u0, tspan, p), not of others.")
        raise unknown_option("an ODEProblem", name, (*_PARTS, *DEFAULTS))


def resolve(problem_options: Mapping[str, Any], solve_options: Mapping[str, Any]) -> dict:
    """The options of a solve: those given to `solve`, else those kept with the problem, else
    defaults."""
    given = merge(problem_options, solve_options)
    options = {**DEFAULTS, **given}
    controller = options["stepsize_controller"]
    if holds_tolerances(controller):
        clash = sorted(_HELD & set(given))
        if clash:
            raise ValueError(
                f"stepsize_controller and {clash[0]} are both given; a controller of diffrax holds "
                "tolerances, norm and bounds itself, so drop one of the two."
            )
    elif controller is not None and options["adaptive"] is not None and not options["adaptive"]:
        raise ValueError(
            "stepsize_controller and adaptive=False are both given; with a fixed step nothing is "
            "controlled, so drop one of the two."
        )
    _check_static(options)
    options["maxiters_given"] = "maxiters" in given
    return options


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict:
    """The `old` options updated with `new` ones, which also replace options that they exclude."""
    new = {k: v for k, v in new.items() if v is not None}
    excluded = {other for name in new for other in _EXCLUDES.get(name, ())}
    if holds_tolerances(new.get("stepsize_controller")):
        excluded |= _HELD
    if holds_tolerances(old.get("stepsize_controller")) and _HELD & set(new):
        excluded.add("stepsize_controller")
    if new.get("stepsize_controller") is not None:
        excluded.add("adaptive")
    elif new.get("adaptive") is not None and not new["adaptive"]:
        excluded.add("stepsize_controller")
    saveat = new.get("saveat")
    if isinstance(saveat, list | tuple) or getattr(saveat, "ndim", 0):  # saved exactly as given
        excluded |= {"save_start", "save_end"}
    return {k: v for k, v in old.items() if v is not None and k not in excluded} | new


_EXCLUDES = {"saveat": ("save_everystep",), "save_everystep": ("saveat",)}
# The options that a step-size controller of diffrax has itself.
_HELD = {x.option for x in of_kind("tolerance", "bound")} | {"adaptive", "internalnorm"}


def holds_tolerances(controller: Any) -> bool:
    """Whether this is a step-size controller of diffrax, which has its own tolerances."""
    return controller is not None and not isinstance(controller, AbstractController)


def _check_static(options: dict[str, Any]) -> None:
    for name in STATIC_OPTIONS:
        if is_tracer(options[name]):
            raise TypeError(
                f"{name} must be a Python value, the same for all trajectories; it depends on a "
                "traced value."
            )
    options["maxiters"] = as_count("maxiters", options["maxiters"])
    if options["max_events"] is not None:
        options["max_events"] = as_count("max_events", options["max_events"])
    for row in NUMBERS:
        if row.check and _is_known(options[row.option]):
            row.check(row.option, options[row.option])
    least, most = options["dtmin"], options["dtmax"]
    if not any(x is None or is_tracer(x) for x in (least, most)) and least > most:
        raise ValueError(f"dtmin is {least!r}, and dtmax is smaller: {most!r}.")
    init = options["initializealg"]
    if not (init is None or isinstance(init, CheckInit | BrownFullBasicInit)):
        raise TypeError(
            "initializealg must be eo.CheckInit() or eo.BrownFullBasicInit(), for the algebraic "
            f"equations of a mass matrix; got {init!r}."
        )
    norm = options["internalnorm"]
    if not (norm is None or isinstance(norm, AbstractNorm)):
        raise TypeError(
            "internalnorm must be a norm such as eo.RMSNorm() or eo.MaxNorm(), or one of your own, "
            f"a subclass of eo.AbstractNorm; got {norm!r}."
        )
    if options["save_everystep"] and options["saveat"] is not None:
        raise ValueError("saveat and save_everystep=True are both given; drop one of the two.")


def _is_known(value: Any) -> bool:
    return value is not None and not any(map(is_tracer, jtu.tree_leaves(value)))


def check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)


def as_count(name: str, value: Any) -> int:
    """A count as an integer, which may be written as 1e4. **Raises:** `TypeError` and `ValueError`
    for others."""
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return check_count(name, int(value) if is_whole else value)


def time_dtype_of(u0: PyTree) -> np.dtype:
    """The dtype of time, which has the precision of the state."""
    return np.dtype(jnp.finfo(u0.dtype).dtype)


def check_function(callback: str, name: str, fn: Any, arguments: str) -> None:
    """**Raises:** `TypeError` for an argument of a callback that is no function."""
    if not callable(fn):
        raise TypeError(f"{name} of {callback} must be a function {name}{arguments}, got {fn!r}.")


def positions_to_save(callback: str, save_positions: Any) -> tuple[bool, bool]:
    """The `save_positions` of a callback.

    **Raises:** `ValueError` for anything but a pair.
    """
    try:
        before, after = save_positions
    except (TypeError, ValueError):
        raise ValueError(
            f"save_positions of {callback} must be a pair (before, after) of booleans, got "
            f"{save_positions!r}."
        ) from None
    return bool(before), bool(after)
