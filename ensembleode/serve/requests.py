"""Requests, their fields read within their limits, and the answers to them. (What is no JSON, or no
array, is refused by `bodies.py` before; what only ensembles have is read in `ensembles.py`, and
which part of one is asked for in `jobs.py`.)"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from ..ground.retcode import ReturnCode
from ..plan.saving import grid, Spacing
from ..solution.events import Events, first_events
from ..solution.stats import COUNTS
from .bodies import converted, invalid, is_number, over_limit, path_of
from .exchange import JsonObject
from .registry import RegistryEntry
from .solving import Gradients, RequestArrays, SolveAnswer


_FIELDS = ("u0", "p", "tspan", "saveat", "deadline_ms")
_CODES = [code.name for code in ReturnCode]


@dataclasses.dataclass(slots=True)
class Query:
    """A request for some trajectories.

    - `numbers`: the numbers of `n` trajectories, without a cotangent.
    - `counts`: how many times each trajectory saves, a number or `[n]`; `rows`: the most of these.
    - `times`: the times of the answer, `[rows]` or `[n, rows]` (NaN past the count).
    - `many`: whether the answer has a trajectory axis.
    - `own`: whether `u0`, and whether `p`, differ between trajectories.
    - `deadline`: in seconds, or None.
    - `rest`: the other fields of the body.
    """

    numbers: RequestArrays
    n: int
    counts: np.ndarray | int
    rows: int
    times: np.ndarray
    many: bool
    own: tuple[bool, bool]
    deadline: float | None
    rest: JsonObject


def query(
    entry: RegistryEntry,
    given: JsonObject,
    more: Sequence[str] = (),
    *,
    ensemble: int | None = None,
) -> Query:
    """The request in the given fields, of which those in `more` are allowed besides the usual ones;
    raises `RefusedRequest`. `ensemble`: the largest number of trajectories, if it is for an
    ensemble."""
    for name in given:
        if name not in _FIELDS and name not in more:
            names = ", ".join((*_FIELDS, *more))
            raise invalid(str(name)[:100], f"there is no such field; there are {names}.")
    limits, spans = entry.limits, given.get("tspan")
    u0, many_u0 = _array(given.get("u0"), "u0", entry.shape, entry.dtype, entry.u0)
    p, many_p = _array(given.get("p"), "p", entry.p.shape, entry.p.dtype, None)
    tspan, many_spans = _array(spans, "tspan", (2,), entry.time_dtype, entry.default_span)
    many = many_u0 or many_p or many_spans
    n = 1
    if many:
        axes = (("u0", u0, many_u0), ("p", p, many_p), ("tspan", tspan, many_spans))
        counts = [(name, len(x)) for name, x, has in axes if has]
        first, n = counts[0]
        for name, count in counts:
            if count == 0:
                raise invalid(name, f"{name} is empty.")
            if count != n:
                raise invalid(name, f"{name} has {count} trajectories, and {first} has {n}.")
        limit = "trajectories" if ensemble is None else "ensemble"
        if n > (most := limits.trajectories if ensemble is None else ensemble):
            message = f"{n} trajectories are more than the limit {limit}={most}."
            raise over_limit(limit, None, message, 413)
    if u0 is not entry.u0:
        _check_within(u0, entry.u0_limits, "u0", many_u0)
    if p is not None:
        _check_within(p, entry.p_limits, "p", many_p)
    if tspan is not entry.default_span:
        _check_spans(tspan, limits.tspan, many_spans)
    times, counts, shared = _times(entry, given.get("saveat"), tspan, many_spans, n)
    rows = times.shape[1]
    spans = _rows(tspan, many_spans, n)
    numbers = RequestArrays(
        _rows(u0, many_u0, n),
        None if p is None else _rows(p, many_p, n),
        spans[:, 0],
        spans[:, 1],
        times if len(times) == n else np.broadcast_to(times, (n, rows)),
    )
    return Query(
        numbers, n, counts, rows, times[0] if shared else times, many, (many_u0, many_p),
        _deadline(given.get("deadline_ms")), {name: given.get(name) for name in more},
    )  # fmt: skip


def bound(entry: RegistryEntry, name: str, given: Any, path: str) -> np.ndarray:
    """A bound of the state or the parameters, within their limits; raises `RefusedRequest`."""
    like, limits = {"u0": (entry.u0, entry.u0_limits), "p": (entry.p, entry.p_limits)}[name]
    if given is None:
        raise invalid(path, "it is missing.")
    found, many = _array(given, path, like.shape, like.dtype, None)
    if many:
        raise invalid(path, f"it must have the shape {list(like.shape)}.")
    _check_within(found, limits, path, False)
    return found


def _rows(x: np.ndarray, many: bool, n: int) -> np.ndarray:
    if many:
        return x
    return x[None] if n == 1 else np.broadcast_to(x, (n, *x.shape))


def cotangent(entry: RegistryEntry, asked: Query) -> np.ndarray:
    """The cotangent of a vjp, `[n, rows, *state]`; raises `RefusedRequest`."""
    given = asked.rest["cotangent"]
    if given is None:
        raise invalid("cotangent", "cotangent is missing: it has the shape of u.")
    shape = (*((asked.n,) if asked.many else ()), asked.rows, *entry.shape)
    found, extra = _array(given, "cotangent", shape, entry.dtype, None)
    if extra:
        raise invalid("cotangent", f"cotangent must have the shape of u, {list(shape)}.")
    return found if asked.many else found[None]


def check_answer(entry: RegistryEntry, asked: Query, *, pulls: bool = False) -> None:
    """Raises `RefusedRequest` where the arrays of the answer are too large."""
    size = asked.n * entry.answer_bytes(asked.rows, pulls)
    if size > entry.limits.answer:
        less = "fewer trajectories" if pulls else "fewer trajectories, or times,"
        more = "" if pulls else ", or have it kept as an ensemble, to be downloaded in parts"
        raise over_limit(
            "answer", None, f"the answer would have {size} bytes, and the limit answer is "
            f"{entry.limits.answer}: ask for {less} at a time{more}.", 413,
        )  # fmt: skip


def _deadline(given: Any) -> float | None:
    if given is None:
        return None
    if not is_number(given) or not 0 < given < 1e12:
        raise invalid("deadline_ms", "deadline_ms must be a positive number of milliseconds.")
    return given / 1000


def _times(
    entry: RegistryEntry, saveat: Any, tspan: np.ndarray, many_spans: bool, n: int
) -> tuple[np.ndarray, np.ndarray | int, bool]:
    """The times `[1 or n, rows]`, how many each trajectory saves, and whether all share them."""
    most = entry.limits.saveat
    t0, t1 = tspan[..., 0], tspan[..., 1]
    path = "saveat"
    if saveat is None and tspan is entry.default_span:
        times = entry.default_times[None]
        return times, times.shape[1], True
    if saveat is None:
        saveat, path = entry.saveat, "tspan"
        if saveat is None:
            return (tspan if many_spans else tspan[None]), 2, not many_spans
    if isinstance(saveat, np.ndarray):
        times = saveat
    elif is_number(saveat):
        # (An integer may be larger than any float.)
        step = float(saveat) if abs(saveat) <= sys.float_info.max else 0.0
        return _spaced(entry, step, path, tspan, many_spans)
    else:
        times = _times_given(saveat, n, entry.time_dtype)
    rows = times.shape[-1]
    if rows > most:
        raise over_limit(
            "saveat", path, f"saveat has {rows} times, and the limit saveat is {most}."
        )
    shared = times.ndim == 1
    if shared:
        times = times[None]
    low, high = np.minimum(t0, t1)[..., None], np.maximum(t0, t1)[..., None]
    close = 8 * np.finfo(entry.time_dtype).eps * np.maximum(abs(low), abs(high))
    outside = (times < low - close) | (times > high + close)
    if outside.any():
        i, j = np.argwhere(outside)[0]
        if path == "tspan":
            raise invalid(
                path, "the registered saveat has times outside of this tspan: give a saveat, too."
            )
        where = f"saveat[{j}]" if shared else f"saveat[{i}][{j}]"
        raise invalid(where, "a time of saveat is outside of tspan.")
    # Rounding in `arange` and similar functions may put times beyond an end by an ulp or two.
    times = np.minimum(np.maximum(times, low), high)
    turned = np.diff(times, axis=-1) * np.sign(t1 - t0)[..., None] < 0
    if turned.any():
        i, j = np.argwhere(turned)[0]
        where = f"saveat[{j + 1}]" if shared else f"saveat[{i}][{j + 1}]"
        raise invalid(where, "saveat is not sorted in the direction of time.")
    if shared and len(times) > 1 and (times == times[0]).all():
        times = times[:1]  # only the comparison needed them for each span
    return times, rows, shared and len(times) == 1


@np.errstate(over="ignore", invalid="ignore")
def _spaced(
    entry: RegistryEntry, step: float, path: str, tspan: np.ndarray, many: bool
) -> tuple[np.ndarray, np.ndarray | int, bool]:
    """The same as `_times`, for evenly spaced times."""
    if not step > 0:
        raise invalid(path, "saveat must be a positive spacing, or times.")
    most = entry.limits.saveat
    t0, t1 = tspan[..., 0], tspan[..., 1]
    rows = float(np.max(np.abs(t1.astype(float) - t0))) / step
    if rows <= 2 * most:
        times, counts = grid(Spacing(step, True), t0, t1, entry.time_dtype)
        rows = times.shape[-1]
        if rows <= most and not many:
            return times[None], int(counts), True
        if rows <= most:
            blank = np.arange(rows) >= counts[:, None]
            times = np.where(blank, np.nan, times) if blank.any() else times
            return times.astype(entry.time_dtype), counts, False
    raise over_limit(
        "saveat", path, f"saveat={step} gives {rows:.6g} times, and the limit is {most}."
    )


def _times_given(saveat: Any, n: int, dtype: np.dtype) -> np.ndarray:
    found = converted(saveat, "saveat", dtype)
    if found.ndim not in (1, 2) or not found.size:
        raise invalid("saveat", "saveat must be a spacing, times, or times of each trajectory.")
    if found.ndim == 2 and len(found) != n:
        raise invalid("saveat", f"saveat has {len(found)} rows for {n} trajectories.")
    return found


def _check_spans(tspan: np.ndarray, limits: Any, many: bool) -> None:
    t0, t1 = tspan[..., 0], tspan[..., 1]
    if (bad := np.atleast_1d(t0 == t1)).any():
        where = f"tspan[{int(np.argmax(bad))}]" if many else "tspan"
        raise invalid(where, "tspan has no length: give two different times.")
    if limits is not None and (bad := (tspan < limits[0]) | (tspan > limits[1])).any():
        where = path_of("tspan", np.argwhere(bad)[0])
        raise over_limit("tspan", where, f"a time is outside of the limit tspan={tuple(limits)}.")


def _check_within(x: np.ndarray, limits: PyTree, name: str, many: bool) -> None:
    if limits is None:
        return
    low, high = limits
    if (bad := (x < low) | (x > high)).any():
        at = np.argwhere(bad)[0]
        inner = tuple(at[1:] if many else at)
        limit, ends = name.partition(".")[0], f"{low[inner]:g} to {high[inner]:g}"
        message = f"{x[tuple(at)]:g} is outside of the limit {limit}: {ends}."
        raise over_limit(limit, path_of(name, at), message)


def _array(
    given: Any, name: str, shape: tuple, dtype: np.dtype, default: np.ndarray | None
) -> tuple[Any, bool]:
    """An array of this shape, or with a leading axis more; and whether it has that axis."""
    if given is None:
        return default, False
    found = converted(given, name, dtype)
    if found.shape in (shape, (*found.shape[:1], *shape)):
        return found, found.ndim > len(shape)
    many, has = ", ".join(map(str, ("n", *shape))), f"{name} has the shape {list(found.shape)}"
    raise invalid(name, f"{has}; it must be {list(shape)}, or [{many}].")


def solved(asked: Query, answer: SolveAnswer, wait: float, solve: float) -> JsonObject:
    """The object of a response; its arrays are NumPy's."""
    rows = asked.rows
    u, times, codes = answer.u[:, :rows], asked.times, _codes(answer.retcode)
    counts = {name: getattr(answer, name) for name in COUNTS}
    # Padding times that the engine saved, too, don't count.
    lengths = np.minimum(answer.lengths, asked.counts)
    if lengths.min() < rows:
        reached = np.arange(rows) < lengths[:, None]
        u = np.where(reached.reshape(*reached.shape, *(1,) * (u.ndim - 2)), u, np.nan)
    if not asked.many:
        u, lengths, codes = u[0], int(lengths[0]), codes[0]
        times = times if times.ndim == 1 else times[0]
        counts = {k: None if x is None else int(x[0]) for k, x in counts.items()}
    answered = {"u": u, "t": times, "retcode": codes, "stats": counts, "lengths": lengths}
    if answer.events is not None:
        answered["events"] = of_events(answer.events, asked.many)
    return answered | {"seconds": {"wait": wait, "solve": solve}}


def of_events(events: Events, many: bool) -> JsonObject:
    """The object for events, with as much room as the trajectory with most events needs."""
    events = first_events(events, int(np.max(events.count, initial=0)), several=True)
    return {name: np.asarray(x) if many else np.asarray(x[0]) for name, x in vars(events).items()}


def _codes(codes: np.ndarray) -> list[str]:
    return [_CODES[i] for i in codes.tolist()]


def pulled(asked: Query, gradients: Gradients, wait: float, solve: float) -> JsonObject:
    """The object of a response with gradients, in the shapes of the request's `u0` and `p`."""
    own_u0, own_p = asked.own
    codes = _codes(gradients.retcode)
    return {
        "u0": gradients.u0 if own_u0 else gradients.u0.sum(axis=0),
        "p": gradients.p if own_p else gradients.p.sum(axis=0),
        "retcode": codes if asked.many else codes[0],
        "seconds": {"wait": wait, "solve": solve},
    }
