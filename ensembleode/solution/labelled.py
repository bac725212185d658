"""Solutions with named dimensions: xarray datasets, and pandas frames made from them."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TYPE_CHECKING

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..ground.extras import installing
from ..ground.hidden_object import HiddenObject
from ..ground.keys import is_key
from ..ground.retcode import ReturnCode
from ..ground.state_tree import array_names, flattened, is_tree, leaf_names
from ..tracing.program import is_tracer


if TYPE_CHECKING:
    from .solution import EnsembleSolution, ODESolution


def ensemble_dataset(sim: "EnsembleSolution", names: Sequence[str] | None) -> Any:
    """See `EnsembleSolution.to_xarray`."""
    xarray = _xarray(sim.retcode)
    if sim.kind == "reduced":
        raise TypeError("this ensemble was reduced: its result, as a whole, is sim.u.")
    attrs = {"engine": str(sim.engine)}
    trajectory = {"trajectory": np.arange(len(sim))}
    if sim.kind == "outputs":
        # (An output with the name of a count replaces it.)
        variables = _counts(sim, ("trajectory",)) | _variables(sim.u, ("trajectory",), output_name)
        return xarray.Dataset(variables, _inputs_that_differ(sim, variables) | trajectory, attrs)
    t = np.asarray(sim.t)
    time = (("trajectory", "step") if t.ndim == 2 else ("time",), t)
    variables, state = _states(sim, ("trajectory", time[0][-1]), names)
    variables |= {"length": ("trajectory", np.asarray(sim.lengths))}
    variables |= _counts(sim, ("trajectory",)) | _events(sim, ("trajectory",))
    if sim._ended is not None:
        for name in ("t", "u"):
            variables |= _beside(f"end.{name}", getattr(sim.end, name), ("trajectory",))
    own = trajectory | {"time": time} | state
    return xarray.Dataset(variables, _inputs_that_differ(sim, variables | own) | own, attrs)


def solution_dataset(sol: "ODESolution", names: Sequence[str] | None) -> Any:
    """See `ODESolution.to_xarray`."""
    xarray = _xarray(sol.retcode)
    variables, state = _states(sol, ("time",), names)
    variables |= {"length": ((), np.asarray(sol.length))}
    variables |= _counts(sol, ()) | _events(sol, ())
    return xarray.Dataset(variables, {"time": np.asarray(sol.t)} | state)


def summary_dataset(summary: Any, names: Sequence[str] | None) -> Any:
    """See `EnsembleSummary.to_xarray`."""
    xarray = _xarray(summary.u)
    dims, state = _state(np.shape(summary.u)[1:], names, summary.names)
    dims = ("time", *dims)
    if summary._has_several_bands:
        of_band, (low, high) = ("band", *dims), zip(*summary.quantiles, strict=True)
    else:
        of_band, (low, high) = dims, summary.quantiles
    variables = {
        "mean": (dims, np.asarray(summary.u)),
        "variance": (dims, np.asarray(summary.v)),
        "median": (dims, np.asarray(summary.med)),
        "qlow": (of_band, np.asarray(summary.qlow), {"quantile": low}),
        "qhigh": (of_band, np.asarray(summary.qhigh), {"quantile": high}),
        "num_monte": ("time", np.asarray(summary.num_monte)),
    }
    return xarray.Dataset(variables, {"time": np.asarray(summary.t)} | state)


def frame(sol: Any, names: Sequence[str] | None) -> Any:
    """A pandas frame of the states of a solution or an ensemble, with a row for each trajectory and
    time, and a column for each component."""
    lead = 1 + np.ndim(sol.retcode)
    u = flattened(sol.u, lead, sol._order)
    flat = dataclasses.replace(sol, u=u, _given=HiddenObject(), _names=sol.names)
    dataset = (ensemble_dataset if lead == 2 else solution_dataset)(flat, names)
    u = dataset["u"]
    one = {"u": u.attrs["long_name"]} if "long_name" in u.attrs else {}
    parts = u.to_dataset("state") if "state" in u.dims else u.to_dataset().rename(one)
    columns = parts.to_dataframe()
    if "time" not in columns:
        return columns
    # Where trajectories have their own times, the rows of shorter ones are padded.
    columns.insert(0, "time", columns.pop("time"))
    return columns[columns["time"].notna()]


def outputs_frame(sim: "EnsembleSolution") -> Any:
    """A pandas frame of the outputs of an `output_func`, with a row for each trajectory."""
    _xarray(sim.retcode)
    import pandas

    columns = {}
    for name, (_, values) in _variables(sim.u, ("trajectory",), output_name).items():
        for index in np.ndindex(values.shape[1:]):
            label = f"{name}[{','.join(map(str, index))}]" if index else name
            columns[label] = values[:, *index]
    return pandas.DataFrame(columns, pandas.RangeIndex(len(sim), name="trajectory"))


def _xarray(number: Any) -> Any:
    if is_tracer(number):
        raise TypeError("labels need numbers: call this outside of jit, grad and vmap.")
    try:
        import xarray
    except ImportError as e:
        raise ImportError(f"this needs xarray: {installing('plot')}.") from e
    return xarray


def _states(sol: Any, outer: tuple, names: Sequence[str] | None) -> tuple[dict, dict]:
    """The variables of the states (`u`, or one for each leaf of a pytree) and of the values beside
    them; and their coordinates."""
    u, saved = sol.u, sol.saved
    beside = _beside("integral", sol.integral, outer) | _beside("p_at", sol.p_at, outer)
    beside |= _beside("noise", sol.noise, outer)
    times = {}
    if saved is not None and saved.has_own_times:
        times = {OWN_TIMES: np.asarray(saved.t)}
        beside |= _beside("saved", saved.values, (*outer[:-1], OWN_TIMES))
    elif saved is not None:
        beside |= _beside("saved", saved.values, outer)
    if not is_tree(u):
        dims, state = _state(np.shape(u)[len(outer) :], names, sol.names)
        about = {} if dims or sol.names is None else {"long_name": sol.names[0]}
        return {"u": ((*outer, *dims), np.asarray(u), about)} | beside, state | times
    if names is not None:
        raise ValueError("names are for the components of a vector; the leaves of this state have.")
    variables = {}
    for name, x in leaf_names(u, sol._order):
        dims = inner_dims(name, np.ndim(x) - len(outer))
        variables[name] = ((*outer, *dims), np.asarray(x))
    own = {"trajectory", "time", "step", "length", "retcode", *vars(sol.stats), *beside}
    taken = own & set(variables)
    if taken:
        raise ValueError(
            f"the state has a leaf {min(taken)!r}, which is a name of the dataset's own: make the "
            "dataset of sim.u yourself."
        )
    return variables | beside, times


def _state(
    shape: tuple, names: Sequence[str] | None, known: Sequence[str] | None
) -> tuple[tuple, dict]:
    """The dimensions of the state, and their coordinates; without `names`, those that are `known`
    name its components, if any are."""
    if len(shape) == 1:
        names = [names] if isinstance(names, str) else names
        labels = list(names or known or array_names(shape))
        taken = {"trajectory", "time", "step"} & set(labels)
        if len(labels) != shape[0] or len(set(labels)) != shape[0] or taken:
            raise ValueError(
                f"names must be {shape[0]} different names, one a component, and none of them "
                f"trajectory, time or step; got {names!r}."
            )
        return state_dims(1), {"state": labels}
    if names is not None:
        raise ValueError(
            f"names are for the components of a vector; this state has the shape {shape}."
        )
    return state_dims(len(shape)), {}


def state_dims(ndim: int) -> tuple[str, ...]:
    """The names of the dimensions of a state with `ndim` axes."""
    return ("state",) if ndim == 1 else inner_dims("state", ndim)


def inner_dims(name: str, ndim: int) -> tuple[str, ...]:
    return tuple(f"{name}_{axis}" for axis in range(ndim))


def output_name(path: tuple) -> str:
    """The name of a leaf of the outputs of an `output_func`."""
    return jtu.keystr(path, simple=True, separator=".") or "out"


def _inputs_that_differ(sim: Any, taken: Collection[str]) -> dict:
    """The initial states and parameters that differ between trajectories, as coordinates; names
    that are `taken` are left out."""
    given = sim._given.content
    found = {}
    for path, x in jtu.tree_leaves_with_path({} if given is None else given.varying()):
        name = jtu.keystr(path, simple=True, separator=".")
        if name in taken or is_key(x):
            continue
        is_state = name == "u0" and np.ndim(x) == 2 and sim.names is None
        dims = ("state",) if is_state else inner_dims(name, np.ndim(x) - 1)
        found[name] = (("trajectory", *dims), np.asarray(x))
    return found


# The dimension of the values of a `SavingCallback` that has times of its own.
OWN_TIMES = "saved.time"


def name_beside(what: str, path: tuple) -> str:
    """The name of a leaf of the values beside the states, such as `"integral"` or `"saved"`."""
    leaf = jtu.keystr(path, simple=True, separator=".")
    return f"{what}.{leaf}" if leaf else what


def _beside(what: str, tree: PyTree, outer: tuple) -> dict:
    """Values beside the states, row by row."""
    return _variables(tree, outer, functools.partial(name_beside, what))


def _variables(tree: PyTree, outer: tuple, name_of: Callable[[tuple], str]) -> dict:
    """A variable for each leaf, whose first dimensions are `outer`."""
    variables = {}
    for path, leaf in jtu.tree_leaves_with_path(tree):
        name = name_of(path)
        dims = (*outer, *inner_dims(name, np.ndim(leaf) - len(outer)))
        variables[name] = (dims, np.asarray(leaf))
    return variables


def _events(sol: Any, outer: tuple) -> dict:
    """The events of callbacks: a variable for each field of `sim.events`, and for each leaf of the
    states in it."""
    variables = {}
    for path, x in jtu.tree_leaves_with_path(sol.events):
        name = jtu.keystr(path, simple=True, separator=".")
        dims = event_dims(path, np.ndim(x) - len(outer))
        variables[f"events.{name}"] = ((*outer, *dims), np.asarray(x))
    return variables


def event_dims(path: tuple, ndim: int) -> tuple[str, ...]:
    """The names of the dimensions of the leaf of events at this path, for one trajectory."""
    field, *in_state = path
    if not field.name.startswith("u_"):
        return ("event", "condition")[:ndim]
    leaf = jtu.keystr(tuple(in_state), simple=True, separator=".")
    return ("event", *(inner_dims(leaf, ndim - 1) if leaf else state_dims(ndim - 1)))


def retcode_attributes() -> dict:
    """The meanings of the integers of return codes, in the form of the CF conventions."""
    return {
        "flag_values": [code.value for code in ReturnCode],
        "flag_meanings": " ".join(code.name for code in ReturnCode),
    }


def _counts(sol: Any, dims: tuple) -> dict:
    codes = np.asarray(sol.retcode)
    names = np.array([code.name for code in ReturnCode])
    variables: dict[str, tuple] = {
        "retcode": (dims, codes, retcode_attributes()),
        "retcode.name": (dims, names[codes]),
    }
    for name, count in vars(sol.stats).items():
        if count is not None:
            variables[name] = (dims, np.asarray(count))
    return variables
