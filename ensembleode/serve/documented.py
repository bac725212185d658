"""The OpenAPI documentation of the endpoints: bodies, answers and errors."""

from collections.abc import Callable
from typing import Any

from .bodies import BINARY, DTYPES, JSON
from .exchange import JsonObject


ABOUT = (
    "Solves ordinary differential equations that it has by name. Requests are gathered into "
    "ensembles. An array is nested lists in JSON (null where a state was not reached), and "
    '{"dtype": "<f8", "shape": [...], "data": bytes} in MessagePack.'
)

_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}


def _list(items: Any, **more: Any) -> JsonObject:
    return {"type": "array", "items": items, **more}


def _has(**properties: Any) -> JsonObject:
    found: JsonObject = {"type": "object"}
    return found | {"properties": properties} if properties else found


def _object(properties: JsonObject, *required: str) -> JsonObject:
    """The schema of an object that has no other properties."""
    found = _has(**properties) | {"additionalProperties": False}
    return found | {"required": list(required)} if required else found


_ARRAY = _list({})
_MAYBE_TEXT = {"type": ["string", "null"]}
_WRONG = _has(
    code=_TEXT,
    message=_TEXT,
    path=_MAYBE_TEXT | {"description": "The field that is wrong."},
    id=_MAYBE_TEXT | {"description": "What the log calls it."},
) | {"required": ["code", "message", "path", "id"]}
_ERROR = _has(error=_WRONG) | {"required": ["error"]}
_WHY = {
    400: "It is not HTTP, JSON or MessagePack as it should be.",
    401: "A token is needed.",
    403: "The page of another site asks for it.",
    404: "There is no such thing: a problem, or the gradient of one that has none.",
    405: "It can't be done with that.",
    408: "The body did not arrive.",
    409: "It can't be done now.",
    413: "A limit, which is named.",
    415: "Neither JSON nor MessagePack.",
    421: "It was sent to another name.",
    422: "A field is wrong: its path is in the answer.",
    429: "There is no room for it now: see Retry-After.",
    500: "It failed; the log has why, under the id.",
    503: "Warming up, draining, or a batch of the problem hangs.",
    504: "The deadline has passed, or its batch does not return.",
}


def _fields(binary: bool) -> JsonObject:
    """The fields of a request, by name. They are as strict as `requests.py`, except for conditions
    that depend on the problem (such as the shapes of its arrays) or on other fields."""
    pair, times = _list(_NUMBER, minItems=2, maxItems=2), _list(_NUMBER, minItems=1)
    tree = {"$ref": "#/components/schemas/Numbers"}
    packed = [{"$ref": "#/components/schemas/Packed"}] if binary else []

    def field(description: str, *kinds: Any) -> JsonObject:
        return {"anyOf": [*kinds, *packed, {"type": "null"}], "description": description}

    milliseconds = _NUMBER | {"exclusiveMinimum": 0, "exclusiveMaximum": 1e12}
    default = "by default the registered."
    return {
        "u0": field(f"The state at the start, or one a trajectory; {default}", tree),
        "p": field(
            f"The vector of parameters, or one a trajectory; {default}",
            _list(_NUMBER), _list(_list(_NUMBER)),
        ),
        "tspan": field(f"[t0, t1], or one a trajectory; {default}", pair, _list(pair, minItems=1)),
        "saveat": field(
            f"A spacing, times, or the times of each trajectory; {default}",
            _NUMBER | {"exclusiveMinimum": 0}, times, _list(times, minItems=1),
        ),
        "deadline_ms": {
            "anyOf": [milliseconds, {"type": "null"}],
            "description": "Milliseconds after which no answer is wanted.",
        },
    }  # fmt: skip


def _pulls(binary: bool) -> JsonObject:
    cotangent = _fields(binary)["u0"]["anyOf"][:-1]
    more = {"cotangent": {"anyOf": cotangent, "description": "Of the shape of u."}}
    return _object(_fields(binary) | more, "cotangent")


def _keeps(binary: bool) -> JsonObject:
    sent = _fields(binary)
    del sent["deadline_ms"]
    drawn = sent | {
        "trajectories": {"type": "integer", "minimum": 1, "description": "How many are drawn."},
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    }
    for name in ("u0", "p"):
        end = {"anyOf": drawn[name]["anyOf"][:-1]}
        bounds = _object({"low": end, "high": end}, "low", "high")
        what = f"As it is for all, or between which it is drawn; {name} by default the registered."
        drawn[name] = {"anyOf": [*drawn[name]["anyOf"], bounds], "description": what}
    return {"anyOf": [_object(sent), _object(drawn, "trajectories")]}


def complete(document: JsonObject) -> None:
    """Add the components that the endpoints refer to."""
    packed = _object(
        {
            "dtype": {"enum": sorted(DTYPES)},
            "shape": _list({"type": "integer", "minimum": 0}, maxItems=16),
            "data": {"description": "As many bytes as shape and dtype say, in C order."},
        },
        "dtype", "shape", "data",
    )  # fmt: skip
    numbers = {"anyOf": [_NUMBER, _list({"$ref": "#/components/schemas/Numbers"})]}
    parts = document.setdefault("components", {})
    parts.setdefault("schemas", {}).update(Numbers=numbers, Packed=packed)
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}


_CODE = {"description": "The return code, or one a trajectory: Success, MaxIters, ..."}
_SECONDS = _has(wait=_NUMBER, solve=_NUMBER) | {
    "description": "From the request to its first batch, and those of its batches."
}
_PROBLEM = _has(
    name=_TEXT,
    description=_TEXT,
    state=_has() | {"description": "Its shape, dtype, labels, default, low and high."},
    parameters=_has() | {"description": "Their size, dtype, labels, default, low and high."},
    tspan=_list(_NUMBER),
    saveat=_list(_NUMBER),
    limits=_has(),
    alg=_TEXT,
    no_gradient=_MAYBE_TEXT | {"description": "Why it has none, if so."},
)
_JOB = _has(
    id=_TEXT,
    problem=_TEXT,
    status={"enum": ["queued", "running", "done", "failed", "cancelled", "deleted"]},
    done={"type": "integer"},
    trajectories={"type": "integer"},
    retcodes=_has(),
    created=_TEXT,
    seconds=_NUMBER | {"description": "For which it has run."},
    error=_MAYBE_TEXT,
)


def _extra(
    body: Callable[[bool], dict] | None, answer: dict, status: int, errors: tuple[int, ...]
) -> JsonObject:
    responses: dict[int | str, Any] = {
        code: {"description": _WHY[code], "content": {JSON: {"schema": _ERROR}}}
        for code in sorted((*errors, 401, 421))
    }
    content = {JSON: {"schema": answer}}
    if body is not None and status == 200:
        content[BINARY] = {"schema": {}}
    responses[status] = {"description": "Done.", "content": content}
    extra: JsonObject = {"security": [{}, {"token": []}]}
    if body is not None:
        schemas = {JSON: body(False), BINARY: body(True)}
        extra["requestBody"] = {
            "required": True,
            "content": {kind: {"schema": schema} for kind, schema in schemas.items()},
        }
    return {"responses": responses, "openapi_extra": extra}


_OF_SOLVES = (400, 404, 405, 408, 413, 415, 422, 429, 500, 503, 504)
_SOLVED = _has(
    u=_ARRAY | {"description": "[time, *state], or [trajectory, time, *state]."},
    t=_ARRAY | {"description": "[time], or [trajectory, time]."},
    retcode=_CODE,
    stats=_has(),
    lengths={"description": "How many times were reached, or one a trajectory."},
    events=_has(
        t=_ARRAY | {"description": "With callbacks: [event], or [trajectory, event]."},
        which=_ARRAY | {"description": "Of which callback, from 0; -1 where there is none."},
        direction=_ARRAY | {"description": "Rising, 1, or falling, -1."},
        u_before=_ARRAY | {"description": "[event, *state], or [trajectory, event, *state]."},
        u_after=_ARRAY,
        count={"description": "How many there were, or one a trajectory."},
    ),
    seconds=_SECONDS,
)
_PULLED = _has(
    u0={"description": "The gradient by u0, of its shape."},
    p={"description": "The gradient by p, of its shape (summed up where it is shared)."},
    retcode=_CODE,
    seconds=_SECONDS,
)
_AFTER = _MAYBE_TEXT | {"description": "The after of the next page; null where there is none."}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": _TEXT,
    "description": "Sent again with the same, it is the same ensemble.",
}

# The arguments for FastAPI's decorators of the endpoints.
SOLVE = _extra(lambda binary: _object(_fields(binary)), _SOLVED, 200, _OF_SOLVES)
VJP = _extra(_pulls, _PULLED, 200, _OF_SOLVES)
ENSEMBLES = _extra(_keeps, _JOB, 202, (400, 404, 405, 408, 409, 413, 415, 422, 429, 500, 503))
ENSEMBLES["openapi_extra"]["parameters"] = [_KEY]
PROBLEMS = _extra(None, _has(problems=_list(_PROBLEM)), 200, (405, 500))
PROBLEM = _extra(None, _PROBLEM, 200, (404, 405, 500))
JOBS = _extra(None, _has(ensembles=_list(_JOB), next=_AFTER), 200, (404, 405, 422, 500, 503))
JOB = _extra(None, _JOB, 200, (403, 404, 405, 409, 422, 429, 500, 503))
DOWNLOAD = _extra(None, {}, 200, (404, 405, 409, 413, 422, 500, 503))
_FILE = {"schema": _TEXT | {"format": "binary"}}
DOWNLOAD["responses"][200]["content"] = {BINARY: _FILE, "application/x-npz": _FILE}
_HEALTH = {JSON: {"schema": _has(status=_TEXT)}}
HEALTH: JsonObject = {
    "responses": {
        200: {"description": "It is.", "content": _HEALTH},
        503: {"description": "Not now.", "content": _HEALTH},
    }
}
_LINES = {"text/plain": {"schema": _TEXT}}
METRICS: JsonObject = {
    "responses": {200: {"description": "Prometheus's text format.", "content": _LINES}}
}
