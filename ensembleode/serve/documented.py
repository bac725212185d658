"""What the OpenAPI document says of each endpoint: bodies, answers and errors."""

from typing import Any


ABOUT = (
    "Solves ordinary differential equations that it has by name. Requests are gathered into "
    "ensembles. An array is nested lists in JSON (null where a state was not reached), and "
    '{"dtype": "<f8", "shape": [...], "data": bytes} in MessagePack.'
)

_NUMBERS: dict[str, Any] = {"description": "A number, or nested lists of numbers."}
_ARRAY = {"type": "array", "items": {}}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "path": {"type": ["string", "null"], "description": "The field that is wrong."},
                "id": {"type": ["string", "null"], "description": "What the log calls it."},
            },
            "required": ["code", "message", "path", "id"],
        }
    },
    "required": ["error"],
}
_WHY = {
    400: "It is not HTTP as it should be.",
    401: "A token is needed.",
    403: "The page of another site asks for it.",
    404: "There is no such thing.",
    405: "It can't be done with that.",
    408: "The body did not arrive.",
    409: "It can't be done now.",
    413: "A limit, which is named.",
    415: "Neither JSON nor MessagePack.",
    421: "It was sent to another name.",
    422: "A field is wrong: its path is in the answer.",
    429: "The queue is full: see Retry-After.",
    500: "It failed; the log has why, under the id.",
    503: "Warming up, or draining.",
    504: "The deadline has passed.",
}
_ASKED: dict[str, Any] = {
    "u0": {
        **_NUMBERS,
        "description": "The state at the start, or one a trajectory; by default the registered.",
    },
    "p": {
        **_NUMBERS,
        "description": "The vector of parameters, or one a trajectory; by default the registered.",
    },
    "tspan": {
        **_NUMBERS,
        "description": "[t0, t1], or one a trajectory; by default the registered.",
    },
    "saveat": {
        **_NUMBERS,
        "description": "A spacing, times, or the times of each trajectory; by default the "
        "registered.",
    },
    "deadline_ms": {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "description": "Milliseconds after which no answer is wanted.",
    },
}
_CODE = {"description": "The return code, or one a trajectory: Success, MaxIters, ..."}
_SECONDS = {
    "type": "object",
    "properties": {"wait": {"type": "number"}, "solve": {"type": "number"}},
    "description": "From the request to its first batch, and those of its batches.",
}
_PROBLEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "state": {
            "type": "object",
            "description": "Its shape, dtype, labels, default, low and high.",
        },
        "parameters": {
            "type": "object",
            "description": "Their size, dtype, labels, default, low and high.",
        },
        "tspan": {"type": "array", "items": {"type": "number"}},
        "saveat": {"type": "array", "items": {"type": "number"}},
        "limits": {"type": "object"},
        "alg": {"type": "string"},
    },
}
_JOB = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "problem": {"type": "string"},
        "status": {"enum": ["queued", "running", "done", "failed", "cancelled", "deleted"]},
        "done": {"type": "integer"},
        "trajectories": {"type": "integer"},
        "retcodes": {"type": "object"},
        "created": {"type": "string"},
        "seconds": {"type": "number", "description": "For which it has run."},
        "error": {"type": ["string", "null"]},
    },
}


def _extra(body: dict | None, answer: dict, status: int, errors: tuple[int, ...]) -> dict[str, Any]:
    responses: dict[int | str, Any] = {
        code: {"description": _WHY[code], "content": {"application/json": {"schema": _ERROR}}}
        for code in sorted((*errors, 401, 421))
    }
    content = {"application/json": {"schema": answer}}
    if body is not None and status == 200:
        content["application/x-msgpack"] = {"schema": {}}
    responses[status] = {"description": "Done.", "content": content}
    found: dict[str, Any] = {"responses": responses}
    extra: dict[str, Any] = {"security": [{}, {"token": []}]}
    if body is not None:
        schema = {"type": "object", "properties": body, "additionalProperties": False}
        extra["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {"schema": schema},
                "application/x-msgpack": {"schema": schema},
            },
        }
    return found | {"openapi_extra": extra}


_OF_SOLVES = (400, 404, 405, 408, 413, 415, 422, 429, 500, 503, 504)


def solve() -> dict[str, Any]:
    answer = {
        "type": "object",
        "properties": {
            "u": {**_ARRAY, "description": "[time, *state], or [trajectory, time, *state]."},
            "t": {**_ARRAY, "description": "[time], or [trajectory, time]."},
            "retcode": _CODE,
            "stats": {"type": "object"},
            "lengths": {"description": "How many times were reached, or one a trajectory."},
            "seconds": _SECONDS,
        },
    }
    return _extra(_ASKED, answer, 200, _OF_SOLVES)


def vjp() -> dict[str, Any]:
    body = {**_ASKED, "cotangent": {**_NUMBERS, "description": "Of the shape of u."}}
    answer = {
        "type": "object",
        "properties": {
            "u0": {"description": "The gradient by u0, of its shape."},
            "p": {"description": "The gradient by p, of its shape (summed up where it is shared)."},
            "retcode": _CODE,
            "seconds": _SECONDS,
        },
    }
    return _extra(body, answer, 200, _OF_SOLVES)


def ensembles() -> dict[str, Any]:
    body: dict[str, Any] = {k: v for k, v in _ASKED.items() if k != "deadline_ms"}
    body["trajectories"] = {
        "type": "integer",
        "minimum": 1,
        "description": "How many are drawn, where u0 or p are {low, high}.",
    }
    body["seed"] = {"type": "integer", "minimum": 0, "description": "Of what is drawn."}
    errors = (400, 404, 405, 408, 409, 413, 415, 422, 429, 500, 503)
    return _extra(body, _JOB, 202, errors)


def problems() -> dict[str, Any]:
    answer = {"type": "object", "properties": {"problems": {"type": "array", "items": _PROBLEM}}}
    return _extra(None, answer, 200, (405, 500))


def problem() -> dict[str, Any]:
    return _extra(None, _PROBLEM, 200, (404, 405, 500))


def jobs() -> dict[str, Any]:
    answer = {
        "type": "object",
        "properties": {
            "ensembles": {"type": "array", "items": _JOB},
            "next": {
                "type": ["string", "null"],
                "description": "The after of the next page; null where there is none.",
            },
        },
    }
    return _extra(None, answer, 200, (404, 405, 422, 500, 503))


def job() -> dict[str, Any]:
    return _extra(None, _JOB, 200, (403, 404, 405, 409, 422, 429, 500, 503))


def download() -> dict[str, Any]:
    found = _extra(None, {}, 200, (404, 405, 409, 413, 422, 500, 503))
    binary = {"schema": {"type": "string", "format": "binary"}}
    kinds = ("application/x-msgpack", "application/x-npz")
    found["responses"][200]["content"] = dict.fromkeys(kinds, binary)
    return found


def health() -> dict[str, Any]:
    answer = {"type": "object", "properties": {"status": {"type": "string"}}}
    return {
        "responses": {
            code: {"description": what, "content": {"application/json": {"schema": answer}}}
            for code, what in ((200, "It is."), (503, "Not now."))
        }
    }


def metrics() -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {"responses": {200: {"description": "Prometheus's text format.", "content": content}}}
