"""From the bodies of requests and answers (JSON or MessagePack) to arrays and back. Malformed
bodies are refused, with the path of the field at fault. Which fields there are, and their limits:
`requests.py`.

In MessagePack, an array is `{"dtype": "<f8", "shape": [...], "data": bytes}`, in C order.
"""

import dataclasses
import json
import math
import threading
from typing import Any

import msgpack
import numpy as np
import orjson
from jax.typing import ArrayLike
from jaxtyping import PyTree

from .exchange import BINARY as BINARY, JSON as JSON, JsonObject, packed


# The dtypes that arrays of requests may have.
DTYPES = {name: np.dtype(name) for name in ("<f4", "<f8", "<i4", "<i8")}
_OF_AN_ARRAY = {"dtype", "shape", "data"}
# The most lists and objects of a body; each takes a byte or two in the body, and seventy when
# parsed.
_LISTS = 2**20
# Further limits of MessagePack, for example on the number of elements of a list.
_MOST = {"max_array_len": 2**22, "max_map_len": 2**10, "max_str_len": 2**16, "max_ext_len": 2**10}


@dataclasses.dataclass(eq=False)
class RefusedRequest(Exception):
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

    def body(self) -> JsonObject:
        error = {"code": self.code, "message": self.message, "path": self.path, "id": self.id}
        return {"error": error}


def invalid(path: str | None, message: str) -> RefusedRequest:
    return RefusedRequest(422, "invalid", message, path)


def over_limit(limit: str, path: str | None, message: str, status: int = 422) -> RefusedRequest:
    return RefusedRequest(status, f"limit_{limit}", message, path)


def parsed(body: bytes | bytearray, binary: bool) -> JsonObject:
    """The object in a body; raises `RefusedRequest`."""
    try:
        found = _of_msgpack(body) if binary else _of_json(body or b"{}")
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as e:
        kind = "MessagePack" if binary else "JSON"
        why = str(e).partition("\n")[0][:200].rstrip(".") or type(e).__name__
        raise RefusedRequest(400, "invalid_body", f"the body is not {kind}: {why}.") from None
    if not isinstance(found, dict):
        raise RefusedRequest(422, "invalid_body", "the body must be an object.")
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


def _too_many_lists() -> RefusedRequest:
    return over_limit(
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


def converted(given: Any, name: str, dtype: np.dtype) -> np.ndarray:
    if isinstance(given, dict):
        found = _unpacked(given, name)
    else:
        if not (isinstance(given, list) or is_number(given)):
            raise invalid(name, f"{name} must be numbers, got {_kind(given)}.")
        try:
            found = np.array(given)
        except (ValueError, OverflowError):  # ragged, or too deep
            found = None
        if found is None or found.dtype.kind not in "fiu":
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
    """An array of numbers that NumPy doesn't convert as they are; raises `RefusedRequest` for other
    values."""

    def shape_of(x: Any, path: str) -> tuple[int, ...]:
        if isinstance(x, list):
            shapes = [shape_of(y, f"{path}[{i}]") for i, y in enumerate(x)]
            for i, shape in enumerate(shapes):
                if shape != shapes[0]:
                    others = f"is not that of those before it, {list(shapes[0])}."
                    raise invalid(f"{path}[{i}]", f"its shape {list(shape)} {others}")
            return (len(x), *(shapes[0] if shapes else ()))
        if not is_number(x):
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


def is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def path_of(name: str, at: np.ndarray) -> str:
    return name + "".join(f"[{i}]" for i in at)


def _kind(x: Any) -> str:
    names = {dict: "an object", str: "a string", bool: "a boolean", list: "a list"}
    return "null" if x is None else names.get(type(x), type(x).__name__)


def encoded(content: PyTree, binary: bool) -> bytes:
    """The body of a response."""
    if binary:
        return _packers.packer.pack(content)
    # In JSON, NaN is null.
    return orjson.dumps(content, _listed, orjson.OPT_SERIALIZE_NUMPY)


def _packed(x: np.ndarray) -> JsonObject:
    if isinstance(x, np.ndarray | np.generic):  # a sum of scalars is np.generic
        return packed(x)
    raise TypeError(f"{type(x).__name__} can't be packed")


def _listed(x: np.ndarray) -> ArrayLike:
    if isinstance(x, np.ndarray):  # not contiguous
        return np.ascontiguousarray(x) if x.ndim else x.item()
    raise TypeError(f"{type(x).__name__} is not JSON")


class _Packers(threading.local):
    """A packer for each thread; a new one for each answer would also need a new buffer."""

    def __init__(self):
        self.packer = msgpack.Packer(default=_packed)


_packers = _Packers()
