"""From bodies to numbers and back: JSON and MessagePack. Wrong bodies are refused with the path of
the field at fault.

In MessagePack, an array is `{"dtype": "<f8", "shape": [...], "data": bytes}`, in C order.
"""

import dataclasses
import json
import math
import threading
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import orjson

from ..core.saving import grid, Spacing
from ..ground.retcode import ReturnCode
from ..solution import COUNTS, Events, first_events
from .exchange import BINARY as BINARY, JSON as JSON
from .registry import Entry
from .solving import Answer, Gradients, Numbers


# The dtypes that arrays of requests may have.
DTYPES = {name: np.dtype(name) for name in ("<f4", "<f8", "<i4", "<i8")}
_KINDS = {dtype: name for name, dtype in DTYPES.items()}
_FIELDS = ("u0", "p", "tspan", "saveat", "deadline_ms")
_OF_AN_ARRAY = {"dtype", "shape", "data"}
_CODES = [code.name for code in ReturnCode]
# The largest number of lists and objects of a body: an empty one takes a byte or two, and seventy
# bytes when it is read.
_LISTS = 2**20
# Further limits of MessagePack, for example on the number of elements of a list.
_MOST = {"max_array_len": 2**22, "max_map_len": 2**10, "max_str_len": 2**16, "max_ext_len": 2**10}


@dataclasses.dataclass(eq=False)
class Refused(Exception):
    """A request that is refused: the status, a code, what is wrong, and where."""

    status: int
    code: str
    message: str
    path: str | None = None
    _: dataclasses.KW_ONLY
    id: str | None = None
    headers: dict[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        error = {"code": self.code, "message": self.message, "path": self.path, "id": self.id}
        return {"error": error}


def invalid(path: str | None, message: str) -> Refused:
    return Refused(422, "invalid", message, path)


def over(limit: str, path: str | None, message: str, status: int = 422) -> Refused:
    return Refused(status, f"limit_{limit}", message, path)


@dataclasses.dataclass(slots=True)
class Query:
    """A request for some trajectories.

    - `numbers`: the numbers of `n` trajectories, without a cotangent.
    - `counts`: how many times each trajectory saves, a number or `[n]`; `rows`: the largest of
        these.
    - `times`: the times of the answer, `[rows]` or `[n, rows]` (NaN past the count).
    - `many`: whether the answer has a trajectory axis.
    - `own`: whether `u0`, and whether `p`, differ between trajectories.
    - `deadline`: in seconds, or None.
    - `rest`: the other fields of the body.
    """

    numbers: Numbers
    n: int
    counts: np.ndarray | int
    rows: int
    times: np.ndarray
    many: bool
    own: tuple[bool, bool]
    deadline: float | None
    rest: dict[str, Any]


def parsed(body: bytes | bytearray, binary: bool) -> dict[str, Any]:
    """The object in a body; raises `Refused`."""
    try:
        found = _of_msgpack(body) if binary else _of_json(body or b"{}")
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as e:
        kind = "MessagePack" if binary else "JSON"
        raise Refused(400, "invalid_body", f"the body is not {kind}: {_short(e)}.") from None
    if not isinstance(found, dict):
        raise Refused(422, "invalid_body", "the body must be an object.")
    if binary or b"true" in body or b"false" in body:
        # NumPy would treat booleans beside numbers as numbers.
        for name, value in found.items():
            if type(value) is dict and value.keys() == _OF_AN_ARRAY:
                continue  # this field has its own checks
            try:
                _refuse_booleans(value, str(name))
            except RecursionError:
                raise invalid(str(name), "it is nested too deep.") from None
    return found


def _of_msgpack(body: bytes | bytearray) -> Any:
    left = _LISTS

    def counted(x: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _too_many_lists()
        return x

    return msgpack.unpackb(
        body, raw=False, strict_map_key=True, list_hook=counted, object_hook=counted, **_MOST
    )


def _too_many_lists() -> Refused:
    return over(
        "lists", None, f"the body has more than {_LISTS} lists: send numbers as arrays in "
        "MessagePack, with dtype, shape and data.", 413,
    )  # fmt: skip


def _of_json(body: bytes | bytearray) -> Any:
    if body.count(b"[") + body.count(b"{") > _LISTS:
        raise _too_many_lists()
    try:
        return orjson.loads(body)
    except ValueError:
        # orjson takes neither NaN nor large integers, which are refused later, with their path.
        found = json.loads(body)
        if b"\\u" in body:  # this may be half a character, which UTF-8 can't encode
            json.dumps(found, ensure_ascii=False).encode()
        return found


def query(
    entry: Entry, given: dict[str, Any], more: Sequence[str] = (), *, ensemble: int | None = None
) -> Query:
    """The request in the fields that were given, of which those in `more` are allowed besides the
    usual ones; raises `Refused`. `ensemble` is the largest number of trajectories of an ensemble;
    requests have another limit."""
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
        n = _agreed([(name, len(x)) for name, x, has in axes if has])
        limit = "trajectories" if ensemble is None else "ensemble"
        if n > (most := limits.trajectories if ensemble is None else ensemble):
            message = f"{n} trajectories are more than the limit {limit}={most}."
            raise over(limit, None, message, 413)
    if u0 is not entry.u0:
        _check_within(u0, entry.u0_limits, "u0", many_u0)
    if p is not None:
        _check_within(p, entry.p_limits, "p", many_p)
    if tspan is not entry.default_span:
        _check_spans(tspan, limits.tspan, many_spans)
    times, counts, shared = _times(entry, given.get("saveat"), tspan, many_spans, n)
    rows = times.shape[1]
    spans = _rows(tspan, many_spans, n)
    numbers = Numbers(
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


def bound(entry: Entry, name: str, given: Any, path: str) -> np.ndarray:
    """A lower or upper bound of the state or the parameters, within their limits; raises
    `Refused`."""
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


def cotangent(entry: Entry, asked: Query) -> np.ndarray:
    """The cotangent of a vjp, `[n, rows, *state]`; raises `Refused`."""
    given = asked.rest["cotangent"]
    if given is None:
        raise invalid("cotangent", "cotangent is missing: it has the shape of u.")
    shape = (*((asked.n,) if asked.many else ()), asked.rows, *entry.shape)
    found, extra = _array(given, "cotangent", shape, entry.dtype, None)
    if extra:
        raise invalid("cotangent", f"cotangent must have the shape of u, {list(shape)}.")
    return found if asked.many else found[None]


def check_answer(entry: Entry, asked: Query, *, pulls: bool = False) -> None:
    """Raises `Refused` where the arrays of the answer are too large."""
    each = entry.p.size + entry.u0.size if pulls else asked.rows * entry.u0.size
    each = each * entry.dtype.itemsize + (0 if pulls else entry.event_bytes)
    size = asked.n * each
    if size > entry.limits.answer:
        less = "fewer trajectories" if pulls else "fewer trajectories, or times,"
        more = "" if pulls else ", or have it kept as an ensemble, to be downloaded in parts"
        raise over(
            "answer", None, f"the answer would have {size} bytes, and the limit answer is "
            f"{entry.limits.answer}: ask for {less} at a time{more}.", 413,
        )  # fmt: skip


def _agreed(counts: list[tuple[str, int]]) -> int:
    first, n = counts[0]
    for name, count in counts:
        if count == 0:
            raise invalid(name, f"{name} is empty.")
        if count != n:
            raise invalid(name, f"{name} has {count} trajectories, and {first} has {n}.")
    return n


def _deadline(given: Any) -> float | None:
    if given is None:
        return None
    if not _is_number(given) or not 0 < given < 1e12:
        raise invalid("deadline_ms", "deadline_ms must be a positive number of milliseconds.")
    return given / 1000


def _times(
    entry: Entry, saveat: Any, tspan: np.ndarray, many_spans: bool, n: int
) -> tuple[np.ndarray, np.ndarray | int, bool]:
    """The times `[1 or n, rows]`, how many of them each trajectory saves, and whether all share
    them."""
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
    elif _is_number(saveat):
        return _spaced(entry, float(saveat) if saveat < 1e308 else 0.0, path, tspan, many_spans)
    else:
        times = _times_given(saveat, n, entry.time_dtype)
    rows = times.shape[-1]
    if rows > most:
        raise over("saveat", path, f"saveat has {rows} times, and the limit saveat is {most}.")
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
    entry: Entry, step: float, path: str, tspan: np.ndarray, many: bool
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
    raise over("saveat", path, f"saveat={step} gives {rows:.6g} times, and the limit is {most}.")


def _times_given(saveat: Any, n: int, dtype: np.dtype) -> np.ndarray:
    found = _converted(saveat, "saveat", dtype)
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
        raise over("tspan", where, f"a time is outside of the limit tspan={tuple(limits)}.")


def _check_within(x: np.ndarray, limits: Any, name: str, many: bool) -> None:
    if limits is None:
        return
    low, high = limits
    if (bad := (x < low) | (x > high)).any():
        at = np.argwhere(bad)[0]
        inner = tuple(at[1:] if many else at)
        limit, ends = name.partition(".")[0], f"{low[inner]:g} to {high[inner]:g}"
        message = f"{x[tuple(at)]:g} is outside of the limit {limit}: {ends}."
        raise over(limit, path_of(name, at), message)


def _array(given: Any, name: str, shape: tuple, dtype: np.dtype, default: Any) -> tuple[Any, bool]:
    """An array of this shape, or one with an additional leading axis; and whether it has that
    axis."""
    if given is None:
        return default, False
    found = _converted(given, name, dtype)
    if found.shape in (shape, (*found.shape[:1], *shape)):
        return found, found.ndim > len(shape)
    many, has = ", ".join(map(str, ("n", *shape))), f"{name} has the shape {list(found.shape)}"
    raise invalid(name, f"{has}; it must be {list(shape)}, or [{many}].")


def _converted(given: Any, name: str, dtype: np.dtype) -> np.ndarray:
    if isinstance(given, dict):
        found = _unpacked(given, name)
    else:
        if not (isinstance(given, list) or _is_number(given)):
            raise invalid(name, f"{name} must be numbers, got {_kind(given)}.")
        try:
            found = np.array(given)
        except (ValueError, OverflowError):  # ragged, or too deep
            found = None
        if found is None or found.dtype.kind not in "fiu":
            if isinstance(given, list) and not given:
                return np.zeros(0, dtype)
            found = _looked_through(given, name)
    if found.dtype != dtype:
        with np.errstate(over="ignore", invalid="ignore"):
            found = found.astype(dtype)
    if not np.isfinite(found).all():
        at = np.argwhere(~np.isfinite(found))[0]
        raise invalid(
            path_of(name, at), f"NaN, infinity, or a number too large for {np.dtype(dtype).name}."
        )
    return found


def _unpacked(given: dict, name: str) -> np.ndarray:
    """An array of a MessagePack body."""
    if given.keys() != _OF_AN_ARRAY:
        raise invalid(name, f"{name} must be numbers, or an array with dtype, shape and data.")
    shape, data = given["shape"], given["data"]
    dtype = DTYPES.get(given["dtype"]) if isinstance(given["dtype"], str) else None
    if dtype is None:
        raise invalid(f"{name}.dtype", f"dtype must be one of {', '.join(sorted(DTYPES))}.")
    is_short = isinstance(shape, list) and len(shape) <= 16
    if not (is_short and all(type(x) is int and x >= 0 for x in shape)):
        raise invalid(f"{name}.shape", "shape must be a list of counts.")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
        raise invalid(f"{name}.data", "data must be as many bytes as shape and dtype say.")
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except ValueError:  # no data, and huge dimensions beside one that is 0
        raise invalid(f"{name}.shape", "shape is too large for an array.") from None


def _looked_through(given: Any, name: str) -> np.ndarray:
    """Numbers that NumPy doesn't convert as they are; raises `Refused` where they aren't
    numbers."""

    def shape_of(x: Any, path: str) -> tuple[int, ...]:
        if isinstance(x, list):
            shapes = [shape_of(y, f"{path}[{i}]") for i, y in enumerate(x)]
            for i, shape in enumerate(shapes):
                if shape != shapes[0]:
                    others = f"is not that of those before it, {list(shapes[0])}."
                    raise invalid(f"{path}[{i}]", f"its shape {list(shape)} {others}")
            return (len(x), *(shapes[0] if shapes else ()))
        if not _is_number(x):
            raise invalid(path, f"it must be a number, got {_kind(x)}.")
        try:
            float(x)
        except OverflowError:
            raise invalid(path, "a number too large.") from None
        return ()

    try:
        shape_of(given, name)
        return np.array(given, np.float64)
    except (RecursionError, ValueError):
        raise invalid(name, f"{name} is not an array of numbers.") from None


def _refuse_booleans(value: Any, path: str) -> None:
    if isinstance(value, bool):
        raise invalid(path, "it must be a number, got a boolean.")
    if isinstance(value, list):
        for i, x in enumerate(value):
            if isinstance(x, list | bool):
                _refuse_booleans(x, f"{path}[{i}]")
    elif isinstance(value, dict):
        for name, x in value.items():
            _refuse_booleans(x, f"{path}.{name}")


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def path_of(name: str, at: Any) -> str:
    return name + "".join(f"[{i}]" for i in at)


def _kind(x: Any) -> str:
    names = {dict: "an object", str: "a string", bool: "a boolean", list: "a list"}
    return "null" if x is None else names.get(type(x), type(x).__name__)


def _short(e: Exception) -> str:
    return str(e).partition("\n")[0][:200].rstrip(".") or type(e).__name__


def solved(asked: Query, answer: Answer, wait: float, solve: float) -> dict[str, Any]:
    """The object of a response; its arrays are NumPy's."""
    rows = asked.rows
    counts = {name: getattr(answer, name) for name in COUNTS}
    if asked.many:
        # Padding times that the engine saved, too, don't count.
        lengths = np.minimum(answer.lengths, asked.counts)
        u = answer.u[:, :rows]
        if lengths.min() < rows:
            reached = np.arange(rows) < lengths[:, None]
            u = np.where(reached.reshape(*reached.shape, *(1,) * (u.ndim - 2)), u, np.nan)
        times, codes = asked.times, _codes(answer.retcode)
    else:
        u, lengths = answer.u[0, :rows], min(int(answer.lengths[0]), int(asked.counts))
        if lengths < rows:
            u = u.copy()
            u[lengths:] = np.nan
        times = asked.times if asked.times.ndim == 1 else asked.times[0]
        (codes,) = _codes(answer.retcode)
        counts = {k: None if x is None else int(x[0]) for k, x in counts.items()}
    answered = {"u": u, "t": times, "retcode": codes, "stats": counts, "lengths": lengths}
    if answer.events is not None:
        answered["events"] = of_events(answer.events, asked.many)
    return answered | {"seconds": {"wait": wait, "solve": solve}}


def of_events(events: Events, many: bool) -> dict[str, Any]:
    """The object for events, with as much room as the trajectory with most events needs."""
    events = first_events(events, int(np.max(events.count, initial=0)), several=True)
    return {name: np.asarray(x) if many else np.asarray(x[0]) for name, x in vars(events).items()}


def _codes(codes: np.ndarray) -> list[str]:
    return [_CODES[i] for i in codes.tolist()]


def pulled(asked: Query, gradients: Gradients, wait: float, solve: float) -> dict[str, Any]:
    """The object of a response with gradients, in the shapes of the request's `u0` and `p`."""
    own_u0, own_p = asked.own
    codes = _codes(gradients.retcode)
    return {
        "u0": gradients.u0 if own_u0 else gradients.u0.sum(axis=0),
        "p": gradients.p if own_p else gradients.p.sum(axis=0),
        "retcode": codes if asked.many else codes[0],
        "seconds": {"wait": wait, "solve": solve},
    }


def encoded(content: Any, binary: bool) -> bytes:
    """The body of a response."""
    if binary:
        return _packers.packer.pack(content)
    # In JSON, NaN is null.
    return orjson.dumps(content, _listed, orjson.OPT_SERIALIZE_NUMPY)


def _packed(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic):  # a sum of scalars is np.generic
        kind = _KINDS.get(x.dtype)
        if kind is None:
            x = x.astype(x.dtype.newbyteorder("<"))
            kind = x.dtype.str
        return {"dtype": kind, "shape": x.shape, "data": x.tobytes()}
    raise TypeError(f"{type(x).__name__} can't be packed")


def _listed(x: Any) -> Any:
    if isinstance(x, np.ndarray):  # not contiguous
        return np.ascontiguousarray(x) if x.ndim else x.item()
    raise TypeError(f"{type(x).__name__} is not JSON")


class _Packers(threading.local):
    """A packer for each thread; a new one for each answer would also need a new buffer."""

    def __init__(self):
        self.packer = msgpack.Packer(default=_packed)


_packers = _Packers()
