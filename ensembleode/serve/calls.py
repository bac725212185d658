"""Requests, their answers, and the answers to errors.

These classes are small, since a small request is solved in ten microseconds, and Starlette's
objects for it would take longer.
"""

import asyncio
import dataclasses
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from . import bodies
from .batcher import BatchFailed, BatchHungError, DeadlineExceeded, DrainingError, QueueFull
from .bodies import RefusedRequest
from .room import MemoryRoom


logger = logging.getLogger("ensembleode.serve")

_IS_BINARY = {bodies.BINARY: True, "application/msgpack": True, bodies.JSON: False}
_STATUS_LINES = {x.value: f"HTTP/1.1 {x.value} {x.phrase}\r\n".encode() for x in HTTPStatus}
_STATUS_LINES[499] = b"HTTP/1.1 499 \r\n"
# The time in seconds for a body to arrive.
BODY_SECONDS = 60.0
# The size in bytes up to which a body is so small that reading it doesn't delay other requests.
LARGE = 2**16
# The most bytes of all larger bodies together, and of those of one token; and likewise of answers,
# from the request until the client has read them.
BODIES = (2**28, 2**26)
ANSWERS = (2**28, 2**27)


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """A request."""

    headers: Mapping[bytes, bytes]  # by name, in lower case
    receive: Any  # the function of ASGI; None where a lost connection is noticed otherwise
    name: str = ""  # the name of the problem, if any
    count: int | None = None  # the number of trajectories, once it is known
    future: asyncio.Future | None = None  # what the call waits for
    gone: bool = False  # whether the client has disconnected
    owner: str | None = None  # the token's owner ("" where none are needed), once it is known

    def leave(self) -> None:
        """The client has disconnected."""
        self.gone = True
        if self.future is not None:
            self.future.cancel()

    def header(self, name: bytes) -> str:
        """The header of this name (in lower case), or nothing."""
        return self.headers.get(name, b"").decode("latin-1")

    async def body(self, limit: int, room: MemoryRoom) -> bytes | bytearray:
        """The body; raises `RefusedRequest` if it is over the limit, doesn't arrive, or has no
        room."""
        length = self.headers.get(b"content-length", b"")
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    size = max(len(body), int(length) if length.isdigit() else 0)
                    if size > limit:
                        raise too_large(limit)
                    if size > max(LARGE, room.bytes_of(self)):
                        if not room.has(self, self.owner or "", size):
                            message = "too many large bodies are here already; try again later."
                            later = {"Retry-After": "1"}
                            raise RefusedRequest(429, "bodies_full", message, headers=later)
                        room.put(self, self.owner or "", size)
                    if not more:
                        return body
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedRequest(499, "gone", "the client has gone.")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            raise too_late() from None

    def sends_binary(self) -> bool:
        """Whether the body is MessagePack; raises `RefusedRequest` for any other type than that and
        JSON, and for one that is compressed. The page of another site can't send either type
        without asking for permission first."""
        encoding = self.header(b"content-encoding").strip().lower()
        if encoding not in ("", "identity"):
            message = f"the Content-Encoding {encoding[:40]!r} is not read: send the body as it is."
            raise RefusedRequest(415, "unsupported_media_type", message)
        kind = self.header(b"content-type").partition(";")[0].strip().lower()
        if kind not in _IS_BINARY:
            message = f"the Content-Type must be {bodies.JSON} or {bodies.BINARY}."
            raise RefusedRequest(415, "unsupported_media_type", message)
        return _IS_BINARY[kind]

    def wants_binary(self) -> bool:
        accepted = self.header(b"accept")
        return any(kind in accepted for kind, is_binary in _IS_BINARY.items() if is_binary)

    def check_host(self, hosts: frozenset[bytes]) -> None:
        """Raises `RefusedRequest` if the request was sent to another host name than these. The page
        of another site may have given its own name this address."""
        host = self.headers.get(b"host", b"").lower()
        if hosts.isdisjoint((host, host.rpartition(b":")[0])):
            other = (
                "this service answers to other names: ask it by the address it was started with."
            )
            raise RefusedRequest(421, "misdirected", other)

    def check_origin(self, allowed: Collection[str]) -> None:
        """Raises `RefusedRequest` if the request is from the page of another site, as browsers
        tell. (They ask for permission before a request with a body of JSON, but not before one
        without a body.)"""
        origin = self.header(b"origin")
        is_ours = not origin or self.header(b"sec-fetch-site") == "same-origin"
        if is_ours or origin in allowed or "*" in allowed:
            return
        if origin.partition("://")[2].lower() != self.header(b"host").lower():
            message = "the page of another site asks for this; allow it by cors."
            raise RefusedRequest(403, "cross_origin", message)


def too_large(limit: int) -> RefusedRequest:
    message = f"the body is larger than the limit body={limit} bytes."
    return bodies.over_limit("body", None, message, 413)


def too_late() -> RefusedRequest:
    return RefusedRequest(408, "timeout", "the body did not arrive.")


class Reply(NamedTuple):
    """An answer."""

    body: bytes
    kind: str = bodies.JSON
    status_code: int = 200
    headers: Mapping[str, str] | None = None

    def response(self) -> Response:
        """The answer as an object of Starlette."""
        headers = dict(self.headers) if self.headers else None
        return Response(self.body, self.status_code, headers, self.kind)

    def head(self, more: Iterable[tuple[bytes, bytes]], close: bool) -> bytes:
        """The lines before the body, in HTTP/1.1."""
        headers = [
            *more,
            (b"content-type", self.kind.encode()),
            (b"content-length", b"%d" % len(self.body)),
            *((k.lower().encode(), v.encode()) for k, v in (self.headers or {}).items()),
        ]
        if close:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in headers]
        return b"".join([_STATUS_LINES[self.status_code], *lines, b"\r\n"])


def in_json(content: Any, status: int = 200) -> Reply:
    return Reply(bodies.encoded(content, False), bodies.JSON, status)


def reply_to(refused: RefusedRequest) -> Reply:
    # This can encode any text that may have been in the request.
    body = json.dumps(refused.body()).encode()
    return Reply(body, bodies.JSON, refused.status, refused.headers)


def refusal(e: Exception, id: str) -> RefusedRequest:
    """The answer to an exception; unexpected exceptions are logged."""
    match e:
        case RefusedRequest():
            return e
        case QueueFull():
            later = {"Retry-After": str(int(e.seconds))}
            return RefusedRequest(
                429, "queue_full", "the queue is full; try again later.", headers=later
            )
        case DeadlineExceeded():
            return RefusedRequest(504, "deadline", "the answer is not there within deadline_ms.")
        case DrainingError():
            later = {"Retry-After": "1"}
            return RefusedRequest(503, "draining", "the service is draining.", headers=later)
        case BatchHungError():
            if e.mine:
                return RefusedRequest(
                    504, "hung", "its batch takes longer than a batch may: given up."
                )
            message = f"a batch of {e.problem} doesn't return; its requests are refused until then."
            return RefusedRequest(503, "hung", message, headers={"Retry-After": "10"})
        case BatchFailed():
            return RefusedRequest(
                500, "batch_failed", "solving it failed; the log has why.", id=e.id
            )
        case RequestValidationError():
            first = e.errors()[0]
            path = ".".join(map(str, first.get("loc", ())[1:]))
            return RefusedRequest(
                422, "invalid", str(first.get("msg", "it is not valid")), path or None
            )
        case HTTPException():
            codes = {404: "not_found", 405: "method_not_allowed"}
            headers = dict(e.headers) if e.headers else None
            code = codes.get(e.status_code, "refused")
            return RefusedRequest(e.status_code, code, str(e.detail), headers=headers)
    logger.error("request %s failed", id, exc_info=e)
    return RefusedRequest(500, "internal", "something went wrong; the log has what.", id=id)
