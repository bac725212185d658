"""The exchange between clients and a service: requests, answers, errors, and when to try again.

Nothing here waits or opens connections, so it serves the blocking and the asynchronous client.
Bodies are MessagePack, in which an array is a dtype, a shape and its bytes.
"""

import dataclasses
import email.utils
import functools
import json
import math
import random
import time
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime, UTC
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..ground.retcode import ReturnCode, ReturnCodes, was_ended
from ..plan.plan import NO_CALLBACK
from ..solution.events import end_by, Events
from ..solution.solution import EngineChoice, EnsembleSolution, ODESolution
from ..solution.stats import COUNTS, Stats
from ..tracing.program import is_tracer


BINARY, JSON = "application/x-msgpack", "application/json"
# An object of a body, by the names of its fields.
JsonObject: TypeAlias = dict[str, Any]
# The kinds of dtypes that arrays in answers may have: numbers and booleans, never objects.
_KINDS = frozenset("biufc")
# The seconds before the first repetition, which double for each further one; and their maximum.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
# The service's refusal may arrive this many seconds after the deadline that it was given.
_GRACE = 1.0


class ServiceError(RuntimeError):
    """Raised when a service refuses a request, or can't be reached.

    - `status`: the HTTP status; None where there was no answer.
    - `code`: a short name of the error, such as `"queue_full"`; `"connection"` and `"timeout"`
        where there was no answer, `"deadline"` where the client's deadline passed.
    - `path`: the field of the request that was wrong, such as `"u0[3][1]"`, or None.
    - `id`: the id of this error in the logs of the service, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str = "",
        path: str | None = None,
        id: str | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.path, self.id = status, code, path, id

    def __str__(self) -> str:
        message = super().__str__()
        where = f"{self.path}: " if self.path and self.path not in message else ""
        known = [str(x) for x in (self.status, self.code) if x]
        known += [f"id {self.id}"] if self.id else []
        return f"{where}{message}" + (f" ({', '.join(known)})" if known else "")


def pack(body: Mapping[str, Any]) -> bytes:
    """The body of a request: a dictionary of numbers, strings, arrays and dictionaries of these."""
    import msgpack

    return msgpack.Packer(default=_packed).pack(body)


def _packed(x: np.ndarray) -> JsonObject | float:
    if isinstance(x, np.ndarray):
        if not x.ndim:  # a spacing, or the state of a scalar problem
            return x.item()
        return packed(x)
    raise TypeError(f"a request has numbers and arrays in it, not {type(x).__name__}.")


def packed(x: np.ndarray) -> JsonObject:
    """An array, or a number of NumPy's, in MessagePack."""
    x = x.astype(x.dtype.newbyteorder("<"), copy=False)
    return {"dtype": x.dtype.str, "shape": x.shape, "data": x.tobytes()}


def unpack(kind: str, content: bytes) -> PyTree:
    """An answer of this content type. **Raises:** `ServiceError` where it can't be read."""
    import msgpack

    try:
        if kind.startswith(BINARY):
            return msgpack.unpackb(content, object_hook=_unpacked)
        return json.loads(content)
    except Exception as e:
        raise ServiceError(
            f"the answer can't be read as {kind or 'JSON'}: is this an ensembleode service?",
            code="bad_answer",
        ) from e


def _unpacked(x: dict) -> PyTree:
    if x.keys() != {"dtype", "shape", "data"}:
        return x
    dtype = np.dtype(x["dtype"])
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of {dtype}")
    # Copied, because arrays on a received buffer are read-only.
    return np.frombuffer(x["data"], dtype).reshape(x["shape"]).copy()


class Gradients(NamedTuple):
    """The gradients of a remote solve: `u0` in the shape of the request's, `p` as the vector of its
    numbers (summed over the trajectories that share them), and the return codes. (From a
    `BatchSolver`, all of them have an axis of trajectories.)"""

    u0: Any
    p: Any
    retcode: ReturnCodes


def solution(
    answer: Mapping[str, Any], engine: EngineChoice, elapsed: float = math.nan
) -> EnsembleSolution | ODESolution:
    """The `EnsembleSolution` of an answer; or the `ODESolution` of one trajectory."""
    try:
        u, t = _floats(answer["u"]), _floats(answer["t"])
        retcode = codes(answer["retcode"])
        stats = [_integers(answer["stats"].get(name)) for name in COUNTS]
        lengths = _integers(answer.get("lengths"))
        if lengths is None:
            lengths = np.full(retcode.shape, t.shape[-1], np.int32)
        events = _events(answer.get("events"), u.shape[retcode.ndim + 1 :])
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise ServiceError("the answer is not a solution.", code="bad_answer") from e
    is_one = not retcode.ndim
    if is_one and (events is None or not was_ended(retcode)):
        counts = Stats(*(None if x is None else int(x) for x in stats))
        code = ReturnCode(int(retcode))
        return ODESolution(u, t, code, counts, int(lengths), None, engine, events=events)
    found = (u, t, retcode, lengths, Stats(*stats))
    if is_one:  # as one of several, which knows where an event has ended it
        found, events = jax.tree.map(lambda x: np.asarray(x)[None], (found, events))
    of_ends = _of_ends(events, found[2])
    about = (True, elapsed, engine, "trajectories")
    sim = EnsembleSolution(*found, *about, events=events, **of_ends)
    return sim[0] if is_one else sim


def _of_ends(events: Events | None, retcode: np.ndarray) -> JsonObject:
    """The states and times of trajectories that an event ended, as a solution keeps them."""
    if events is None:
        return {}
    ended = end_by(events.t, events.u_after, events.count, retcode)
    return {"_ended": jax.tree.map(np.asarray, ended), "_adds_end": True}


def _events(answer: Mapping[str, Any] | None, state: tuple[int, ...]) -> Events | None:
    if answer is None:
        return None
    t = _floats(answer["t"])
    # In JSON, an array without entries has lost its shape.
    states = (_floats(answer[x]).reshape(*t.shape, *state) for x in ("u_before", "u_after"))
    which, direction, count = (_integers(answer[x]) for x in ("which", "direction", "count"))
    return Events(t, which, direction, *states, count if count.ndim else int(count))


def gradients(answer: Mapping[str, Any]) -> Gradients:
    """The gradients in an answer of `/vjp`."""
    try:
        return Gradients(_floats(answer["u0"]), _floats(answer["p"]), codes(answer["retcode"]))
    except (KeyError, TypeError, ValueError) as e:
        raise ServiceError("the answer is not a gradient.", code="bad_answer") from e


def codes(x: Any) -> np.ndarray:
    """Return codes, given by name or by number, as the integers of a solution."""
    if isinstance(x, str):
        return np.asarray(ReturnCode[x].value, np.int8)
    if isinstance(x, list):
        x = [c if isinstance(c, int) else ReturnCode[c].value for c in x]
    return np.asarray(x, np.int8)


def _floats(x: PyTree) -> np.ndarray:
    """An array of floats. In JSON, entries that were not reached are null."""
    return x if isinstance(x, np.ndarray) else np.array(x, np.float64)


def _integers(x: PyTree) -> Any:
    return None if x is None else np.asarray(x, np.int32)


def concatenated(parts: list[EnsembleSolution]) -> EnsembleSolution:
    """The pages of one ensemble, joined."""
    first = parts[0]
    if len(parts) == 1:
        return first
    t = first.t
    if not all(p.t.ndim == 1 and np.array_equal(p.t, t, equal_nan=True) for p in parts):
        t = np.concatenate([np.broadcast_to(part.t, part.u.shape[:2]) for part in parts])
    columns = [(part.u, part.retcode, part.lengths, part.stats) for part in parts]
    u, retcode, lengths, stats = jax.tree.map(lambda *pages: np.concatenate(pages), *columns)
    about = (True, first.elapsed, first.engine, "trajectories")
    events = None
    if of_pages := [part.events for part in parts if part.events is not None]:
        # Each page has as much room as its trajectories need.
        most = max(page.t.shape[1] for page in of_pages)
        of_pages = [with_room(page, most) for page in of_pages]
        events = jax.tree.map(lambda *pages: np.concatenate(pages), *of_pages)
    of_ends = _of_ends(events, retcode)
    return EnsembleSolution(u, t, retcode, lengths, stats, *about, events=events, **of_ends)


def with_room(events: Events, most: int) -> Events:
    """The events of several trajectories, with room for this many of each."""

    def filled(name: str, fill: float) -> np.ndarray:
        x = np.asarray(getattr(events, name))
        rest = np.full((len(x), most - x.shape[1], *x.shape[2:]), fill, x.dtype)
        return np.concatenate([x, rest], axis=1)

    nan, none = np.nan, NO_CALLBACK
    fills = {"t": nan, "which": none, "direction": 0, "u_before": nan, "u_after": nan}
    return Events(**{name: filled(name, x) for name, x in fills.items()}, count=events.count)


def refusal(status: int, kind: str, content: bytes) -> ServiceError:
    """The error for an answer that is no success."""
    try:
        error = unpack(kind, content)["error"]
        known = {"code": str(error["code"]), "path": error.get("path"), "id": error.get("id")}
        return ServiceError(str(error["message"]), status=status, **known)
    except (ServiceError, KeyError, TypeError, AttributeError):
        # It may be from a proxy.
        text = " ".join(content[:200].decode("utf-8", "replace").split())
        return ServiceError(f"the request was refused: {text or 'without a word'}", status=status)


class RetryPolicy:
    """Decides how often a request is tried again, and how long the client waits in between.

    - `timeout`: the seconds to wait for an answer, or as long as the service asks for at the most.
    - `deadline`: the seconds for everything, or None.
    - `repeatable`: whether doing the request twice has the effect of doing it once; otherwise it is
        only tried again where the service can't have received it.
    """

    def __init__(
        self, retries: int, timeout: float, deadline: float | None, repeatable: bool = True
    ):
        self.retries, self.timeout, self.deadline = retries, timeout, deadline
        self.repeatable, self.failed = repeatable, 0
        self._until = math.inf if deadline is None else time.monotonic() + deadline

    @property
    def left(self) -> float:
        """The seconds until the deadline."""
        return self._until - time.monotonic()

    @property
    def patience(self) -> float:
        """The seconds that the next attempt waits for an answer."""
        return max(0.001, min(self.timeout, self.left + _GRACE))

    @property
    def rest(self) -> float | None:
        """The seconds until an answer that arrives is given up; None without a deadline."""
        return None if self.deadline is None else max(0.001, self.left + _GRACE)

    def is_too_late(self, for_success: bool) -> bool:
        """Whether an answer that has partly arrived is of no use any more."""
        return self.left <= (0.0 if for_success else -_GRACE)

    def after_refusal(self, status: int, kind: str, content: bytes, later: str | None) -> float:
        """The seconds to pause after this answer, an error; raises the error where trying again is
        no use."""
        error = refusal(status, kind, content)
        taken = status in (502, 504)  # the service may have the request: a gateway got no answer
        mine = status == 504 and self.deadline is not None
        again = status in (429, 502, 503, 504) and not mine and (self.repeatable or not taken)
        return self._pause(error, again, _seconds(later))

    def after_loss(self, error: ServiceError, *, again: bool) -> float:
        """The seconds to pause where there was no answer; raises `error` where trying again is no
        use."""
        if self.left <= 0:
            error.code = "deadline"
        return self._pause(error, again, 0.0)

    def _pause(self, error: ServiceError, again: bool, asked: float) -> float:
        if not again or self.failed >= self.retries or asked > self.timeout:
            raise error
        spread = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self.failed)
        self.failed += 1
        # Random, so that clients that were refused together don't return together.
        pause = asked + random.uniform(0.5 * spread, spread)
        if pause >= self.left:
            raise error
        return pause


def _seconds(retry_after: str | None) -> float:
    """The seconds of a `Retry-After` header, which is a number of seconds or a date."""
    try:
        seconds = float(retry_after or 0.0)
    except ValueError:
        try:
            at = email.utils.parsedate_to_datetime(str(retry_after))
        except ValueError:
            return 0.0
        seconds = (at - datetime.now(at.tzinfo and UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


@dataclasses.dataclass
class HttpRequest:
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, Any] | None = None
    deadline: float | None = None
    repeatable: bool = True
    key: str | None = None

    def options(self, attempts: RetryPolicy) -> JsonObject:
        """The options of HTTPX's `request`."""
        headers = {} if self.key is None else {"idempotency-key": self.key}
        content = None
        if self.body is not None:
            headers["content-type"] = BINARY
            # The service is told how much of the deadline is left.
            late = {} if self.deadline is None else {"deadline_ms": max(1.0, 1e3 * attempts.left)}
            content = pack({**self.body, **late})
        asked = {"method": self.method, "url": self.path, "params": self.query}
        return asked | {"headers": headers, "content": content, "timeout": attempts.patience}


def path_of(kind: str, name: str, what: str = "") -> str:
    return f"/v1/{kind}/{urllib.parse.quote(name, safe='')}{what}"


def bounds_of(name: str, pair: Any) -> JsonObject:
    if not (isinstance(pair, list | tuple | np.ndarray) and len(pair) == 2):
        what = "a pair (low, high), between which each trajectory's is drawn"
        raise ValueError(f"with trajectories, {name} must be {what}, got {pair!r:.200}.")
    return {"low": numbers_of(name, pair[0]), "high": numbers_of(name, pair[1])}


def arguments_of(*, may_be_traced: bool = False, **given: Any) -> JsonObject:
    """The arguments that are not None, as NumPy arrays; those that are traced stay as they are."""
    return {name: numbers_of(name, x, may_be_traced) for name, x in given.items() if x is not None}


def numbers_of(name: str, x: Any, may_be_traced: bool = False) -> Array | np.ndarray | None:
    """An argument as an array of floating-point or complex numbers, traced only where that may be.
    Raises `TypeError` for others."""
    x = _as_vector(x) if name == "p" else x
    if any(map(is_tracer, jax.tree.leaves(x))):
        if not may_be_traced:
            raise TypeError(
                f"{name} is traced: only Client.solve works inside jit, grad and vmap. Call this "
                "outside of them."
            )
        return x if is_tracer(x) else jnp.asarray(x)
    try:
        array = np.asarray(x)
    except ValueError as e:  # ragged
        raise TypeError(f"{name} must be an array of numbers, got rows of unequal length.") from e
    if array.dtype.kind in "iu":
        return array.astype(np.float64)
    if array.dtype.name in ("float16", "bfloat16"):
        return array.astype(np.float32)
    if array.dtype.kind not in "fc":
        raise TypeError(f"{name} must be an array of numbers, got {x!r:.200}.")
    return array


def _as_vector(p: PyTree) -> PyTree:
    """Parameters as they are, if they are an array or lists of numbers; for a pytree, the vector of
    its numbers that are real and not integers."""
    if p is None or isinstance(p, jax.Array | np.ndarray | np.generic):
        return p
    leaves = jax.tree.leaves(p)
    if isinstance(p, int | float | list | tuple) and not any(map(eqx.is_array, leaves)):
        return p
    leaves = [x for x in leaves if eqx.is_inexact_array(x) or isinstance(x, float)]
    leaves = [x for x in leaves if not jnp.iscomplexobj(x)]
    if not leaves:
        raise TypeError(f"p must have numbers that are no integers in it, got {p!r:.200}.")
    xp = jnp if any(map(is_tracer, leaves)) else np
    dtype = jnp.result_type(*leaves)
    return xp.concatenate([xp.asarray(x).astype(dtype).reshape(-1) for x in leaves])


def for_both(method: Callable[..., Coroutine]) -> Callable[..., Any]:
    """Makes a method for both clients from a coroutine. In the asynchronous client it is awaited.
    In the other one it is run to its end at once, as its requests and pauses block."""

    @functools.wraps(method)
    def asking(self: Any, *arguments: Any, **named: Any) -> Any:
        return self._run_to_end(method(self, *arguments, **named))

    return asking
