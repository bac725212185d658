"""The problems that a service solves, by name, and the limits of requests for them."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.state_tree import refuse_tree
from ..plan.known_times import scheduled
from ..plan.saving import grid, Spacing
from ..problem.callbacks import all_of
from ..problem.jump_problem import JumpProblem
from ..problem.options import check_count, check_option_names, merge, time_dtype_of
from ..problem.problem import ODEProblem, remake
from ..problem.saving_callback import saving_among
from ..problem.stochastic import SDEProblem
from ..running.tuning import MOST_EVENTS
from ..solvers import Direct, Tsit5
from .exchange import JsonObject


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of requests for a problem.

    - `u0`, `p`: `(low, high)`, numbers or arrays; None for any finite values. (They are also the
        ends of the sliders on the page.)
    - `tspan`: `(earliest, latest)`, within which time spans lie; None for any.
    - `trajectories`: the number of trajectories of a request; `ensemble`: that of a durable job.
    - `saveat`: the number of saved times of a trajectory.
    - `maxiters`: the number of steps of a trajectory; one that needs more has the return code
        `MaxIters`.
    - `body`: the bytes of a request; `answer`: those of the arrays of an answer; `store`: those of
        the states of a durable job.
    """

    u0: tuple[Any, Any] | None = None
    p: tuple[Any, Any] | None = None
    tspan: tuple[float, float] | None = None
    trajectories: int = 1024
    saveat: int = 1024
    maxiters: int = 100_000
    body: int = 16 * 2**20
    ensemble: int = 10**7
    answer: int = 2**28
    store: int = 2**34

    def __post_init__(self):
        for name in ("trajectories", "saveat", "maxiters", "body", "ensemble", "answer", "store"):
            check_count(name, getattr(self, name))
        if self.saveat < 2:
            raise ValueError("saveat of Limits must be 2 or more, for the start and the end.")
        for name in ("u0", "p", "tspan"):
            pair = getattr(self, name)
            if pair is not None and not (isinstance(pair, list | tuple) and len(pair) == 2):
                raise ValueError(f"{name} of Limits must be a pair (low, high), got {pair!r}.")
        if self.tspan is not None and not self.tspan[0] < self.tspan[1]:
            what = "(earliest, latest), the earliest first"
            raise ValueError(f"tspan of Limits must be {what}, got {self.tspan}.")


class Registry:
    """Problems by name, for [`create_app`][ensembleode.serve.create_app].

    >>> import ensembleode as eo
    >>> registry = eo.serve.Registry()
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), 0.5)
    >>> registry.add("decay", prob, saveat=0.25).names
    ['decay']
    """

    def __init__(self):
        self._entries: dict[str, RegistryEntry] = {}

    def add(
        self,
        name: str,
        prob: ODEProblem,
        *,
        alg: Any = None,
        saveat: PyTree = None,
        params: str | os.PathLike | None = None,
        limits: Limits | None = None,
        description: str = "",
        labels: Mapping[str, Sequence[str]] | Sequence[str] | None = None,
        **options: Any,
    ) -> "Registry":
        """Add a problem.

        **Arguments:**

        - `name`: a name of lower-case letters, digits, `-` and `_`.
        - `prob`: its `u0`, `p` and `tspan` are the defaults of requests.
        - `alg`: the solver, by default `Tsit5()`, and `Direct()` for a `JumpProblem`; an
            `SDEProblem` needs one. All answers have the same noise, that of the seed 0.
        - `saveat`: a spacing or an array of times, the default of requests; by default that of the
            problem, or the start and the end.
        - `params`: a file written by `equinox.tree_serialise_leaves`, with the leaves of `prob.p`.
        - `limits`: a [`Limits`][ensembleode.serve.Limits].
        - `description`: a sentence for the page.
        - `labels`: the names of the components of the state; or `{"u0": [...], "p": [...]}`.
        - `options`: those of the solver (`abstol=`, `reltol=`, `dt=`, ...), and `callback=`.
            Answers then have the events, of which a trajectory may have `max_events=`, by default
            16 besides those at known times. (Callbacks with `save_positions=(False, False)` may act
            any number of times.)

        **Returns:** the registry.

        **Raises:** `ValueError` and `TypeError` for bad arguments.
        """
        if not (isinstance(name, str) and re.fullmatch(r"[a-z0-9_-]+", name)):
            raise ValueError(f"name must be made of small letters, digits, - and _, got {name!r}.")
        if name in self._entries:
            raise ValueError(f"name {name!r} is in the registry already; choose another.")
        if not isinstance(prob, ODEProblem):
            raise TypeError(f"prob must be an ODEProblem, got {type(prob).__name__}.")
        if limits is not None and not isinstance(limits, Limits):
            raise TypeError(f"limits must be an eo.serve.Limits, got {type(limits).__name__}.")
        if params is not None:
            prob = remake(prob, p=eqx.tree_deserialise_leaves(os.fspath(params), prob.p))
        if alg is None and isinstance(prob, SDEProblem):
            raise ValueError("alg is missing, which an SDEProblem needs here, such as eo.SOSRI().")
        if alg is None:
            alg = Direct() if isinstance(prob, JumpProblem) else Tsit5()
        limits = limits or Limits()
        self._entries[name] = _entry(name, prob, alg, saveat, limits, description, labels, options)
        return self

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def __getitem__(self, name: str) -> "RegistryEntry":
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator["RegistryEntry"]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


@dataclasses.dataclass(frozen=True, eq=False)
class RegistryEntry:
    """A problem of a registry, and values derived from it.

    The default parameters `p` are a vector: all elements, in C order, of each inexact leaf of
    `prob.p` (real arrays and numbers, in the order of `jax.tree.leaves`).
    """

    name: str
    prob: ODEProblem
    alg: Any
    saveat: PyTree  # None, a spacing, or an array of times
    limits: Limits
    description: str
    options: JsonObject
    u0: np.ndarray
    p: np.ndarray
    u0_limits: tuple[np.ndarray, np.ndarray] | None  # low and high, in the shape of u0
    p_limits: tuple[np.ndarray, np.ndarray] | None
    u0_labels: list[str] | None
    p_labels: list[str] | None
    tspan: tuple[float, float]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.u0.shape

    @property
    def dtype(self) -> np.dtype:
        return self.u0.dtype

    @property
    def max_events(self) -> int:
        """The number of events of a trajectory that there is room for."""
        return self.options.get("max_events") or 0

    def answer_bytes(self, rows: int, pulls: bool = False) -> int:
        """The most bytes of a trajectory's part of an answer, which is states and events, or of a
        gradient."""
        state = self.u0.size * self.dtype.itemsize
        if pulls:
            return state + self.p.size * self.dtype.itemsize
        return rows * state + self.max_events * (2 * state + self.time_dtype.itemsize + 8)

    @functools.cached_property
    def time_dtype(self) -> np.dtype:
        return time_dtype_of(self.u0)

    @functools.cached_property
    def default_times(self) -> np.ndarray:
        """The saved times of a request without `tspan` and `saveat`."""
        if self.saveat is None:
            return self.default_span
        if np.ndim(self.saveat):
            return self.saveat
        return grid(Spacing(self.saveat, True), *self.tspan, self.time_dtype)[0]

    @functools.cached_property
    def default_span(self) -> np.ndarray:
        return np.array(self.tspan, self.time_dtype)

    def with_parameters(self, flat: Array | np.ndarray) -> Any:
        """`prob.p` with its inexact leaves taken from a vector, which may be traced."""
        leaves, structure = jtu.tree_flatten(self.prob.p)
        start = 0
        for i, x in enumerate(leaves):
            if not is_parameter(x):
                continue
            size = math.prod(np.shape(x))
            leaves[i] = flat[start : start + size].reshape(np.shape(x)).astype(self._dtype_of(x))
            start += size
        return jtu.tree_unflatten(structure, leaves)

    def flat(self, p: PyTree) -> np.ndarray:
        """The vector of the parameters."""
        leaves = [x for x in jtu.tree_leaves(p) if is_parameter(x)]
        parts = [np.asarray(x, self._dtype_of(x)).reshape(-1) for x in leaves]
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def _dtype_of(self, x: Any) -> np.dtype:
        # A Python number has the state's precision.
        return np.dtype(x.dtype) if hasattr(x, "dtype") else self.dtype

    def describe(self) -> JsonObject:
        """The description of the problem for clients, as JSON."""
        limits = dataclasses.asdict(self.limits)
        del limits["u0"], limits["p"]  # these are with the state and the parameters
        if self.limits.tspan is not None:
            limits["tspan"] = list(map(float, self.limits.tspan))
        state = _described(self.u0, self.u0_labels, self.u0_limits)
        return {
            "name": self.name,
            "description": self.description,
            "state": {"shape": list(self.shape)} | state,
            "parameters": {"size": self.p.size} | _described(self.p, self.p_labels, self.p_limits),
            "tspan": list(self.tspan),
            "saveat": self.default_times.tolist(),
            "limits": limits,
            "alg": type(self.alg).__name__,
        }


def is_parameter(x: Any) -> bool:
    """Whether a leaf of `p` is one of the parameters: real, and not an integer."""
    return eqx.is_inexact_array_like(x) and not jnp.iscomplexobj(x)


def _described(
    default: np.ndarray, labels: list[str] | None, limits: tuple[np.ndarray, ...] | None
) -> JsonObject:
    low, high = (None, None)
    if limits is not None:  # None in them becomes null, as JSON has no infinity
        low, high = (np.where(np.isfinite(x), x, np.array(None)).tolist() for x in limits)
    found = {"dtype": default.dtype.name, "labels": labels, "default": default.tolist()}
    return found | {"low": low, "high": high}


def _entry(name, prob, alg, saveat, limits, description, labels, options) -> RegistryEntry:
    if isinstance(alg, type):
        raise TypeError(f"alg must be a solver, got the class; give {alg.__name__}().")
    unwanted = {"save_everystep", "save_start", "save_end", "maxiters"} & set(options)
    if unwanted:
        raise TypeError(
            f"{min(unwanted)} can't be given to a registry: saveat says what is saved, and "
            "limits=eo.serve.Limits(maxiters=...) limits the steps."
        )
    kept = prob.options
    saveat = kept.get("saveat") if saveat is None else saveat
    most = min(limits.maxiters, kept.get("maxiters", limits.maxiters))
    engine = options.pop("engine", "auto")
    check_option_names(options)
    if {**kept, **options}.get("save_idxs") is not None:
        raise TypeError(
            "save_idxs can't be given to a registry, as a service answers with whole states: leave "
            "it out (of prob, too), and choose components of the answer."
        )
    options = merge({k: v for k, v in kept.items() if not k.startswith("save")}, options)
    options |= {"maxiters": most, "engine": engine}
    if options.get("callback") is not None:
        dtype = time_dtype_of(prob.u0)
        known = (x for x in scheduled(options["callback"], *prob.tspan, dtype) if x is not None)
        options.setdefault("max_events", MOST_EVENTS + sum(x.size for x in known))
    if prob.integrand is not None:
        raise TypeError(
            "prob has an integrand, and a service answers with states: let f return what integrand "
            "does as further components of the state."
        )
    if saving_among(all_of(options.get("callback"))) is not None:
        raise TypeError(
            "callback has a SavingCallback, and a service answers with states: apply its fn to the "
            "states of the answer."
        )
    prob = remake(prob, **dict.fromkeys(prob.options))
    refuse_tree(prob.u0, "a service")
    u0 = np.asarray(prob.u0)
    if np.issubdtype(u0.dtype, np.complexfloating):
        what = "prob has a complex state, and requests are real numbers"
        raise TypeError(f"{what}; write it as real and imaginary parts.")
    t0, t1 = (float(t) for t in prob.tspan)
    names = {"u0": labels} if not isinstance(labels, Mapping) else dict(labels)
    if unknown := set(names) - {"u0", "p"}:
        raise ValueError(f"labels has {min(unknown)!r}; it may have u0 and p.")
    entry = RegistryEntry(
        name, prob, alg, _as_saveat(saveat, t0, t1, time_dtype_of(u0)), limits, description,
        options, u0, np.zeros(0), None, None, None, None, (t0, t1),
    )  # fmt: skip
    p = entry.flat(prob.p)
    entry = dataclasses.replace(
        entry,
        p=p,
        u0_limits=_as_limits("u0", limits.u0, u0),
        p_limits=_as_limits("p", limits.p, p),
        u0_labels=_as_labels("u0", names.get("u0"), u0.size),
        p_labels=_as_labels("p", names.get("p"), p.size) or _names_of(prob.p, p.size),
    )
    if (rows := len(entry.default_times)) > limits.saveat:
        allowed = f"limits.saveat allows {limits.saveat}; raise that, or save less."
        raise ValueError(f"saveat has {rows} times, and {allowed}")
    if limits.tspan is not None:
        earliest, latest = limits.tspan
        if min(t0, t1) < earliest or max(t0, t1) > latest:
            raise ValueError(f"tspan ({t0}, {t1}) of prob is outside of limits.tspan.")
    return entry


def _as_saveat(saveat: PyTree, t0: float, t1: float, dtype: np.dtype) -> ArrayLike | None:
    if saveat is None:
        return None
    if np.ndim(saveat) == 0:
        step = float(saveat)
        if not (math.isfinite(step) and step > 0):
            raise ValueError(f"saveat must be a positive spacing or an array of times, got {step}.")
        return step
    times = np.asarray(saveat, dtype)
    if times.ndim != 1 or not times.size:
        what = "a number, or an array of times"
        raise ValueError(f"saveat must be {what}; its shape is {times.shape}.")
    low, high = min(t0, t1), max(t0, t1)
    close = 8 * np.finfo(dtype).eps * max(abs(t0), abs(t1))
    if not (np.all(times >= low - close) and np.all(times <= high + close)):
        raise ValueError(f"saveat has times outside of tspan ({t0}, {t1}).")
    if np.any(np.diff(times) * np.sign(t1 - t0) < 0):
        raise ValueError("saveat is not sorted in the direction of time.")
    return np.clip(times, low, high).astype(dtype)


def _as_limits(name: str, pair: Any, default: np.ndarray) -> tuple | None:
    if pair is None:
        return None
    try:
        low, high = (np.broadcast_to(np.asarray(x, default.dtype), default.shape) for x in pair)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"{name} of limits must be a pair (low, high) of numbers, or of arrays of the shape "
            f"{default.shape}."
        ) from e
    if not np.all(low <= high):
        raise ValueError(f"{name} of limits has a low above its high (or NaN).")
    if np.any(default < low) or np.any(default > high):
        raise ValueError(f"{name} of prob is outside of its limits.")
    return low, high


def _as_labels(name: str, labels: Any, size: int) -> list[str] | None:
    if labels is None:
        return None
    labels = [str(x) for x in labels]
    if len(labels) != size:
        raise ValueError(f"labels has {len(labels)} names for the {size} components of {name}.")
    return labels


def _names_of(p: PyTree, size: int) -> list[str] | None:
    """The names of the numbers of a dict; None for other parameters."""
    if not (type(p) is dict and len(p) == size and all(isinstance(k, str) for k in p)):
        return None
    return sorted(p) if all(is_parameter(x) and np.shape(x) == () for x in p.values()) else None
