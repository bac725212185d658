"""HTTP/1.1 by uvicorn, with a shorter path for small requests.

Between the bytes of a request and its endpoint, ASGI needs a task, an event, some twenty objects
and two writes, which altogether take half of the time of a small request. Here, a request whose
endpoint takes a `Call` goes to the endpoint as soon as its body has arrived, and its answer is a
single write. All others take uvicorn's path: other endpoints, large bodies, bodies in chunks, and
requests that are sent before the previous one is answered. The answers are the same on both paths.
"""

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from . import calls
from .bodies import RefusedRequest
from .calls import Call, LARGE, Reply, too_large, too_late
from .room import MemoryRoom
from .service import Service


# The most bytes of a request's headers (for more, the answer is 431), and seconds for them.
_HEAD, _HEAD_SECONDS = 2**16, 10.0
# The seconds between two pieces of a body that was refused.
_PAUSE = 0.01
# The bytes of an answer that a client has to read within this many seconds.
_READ, _READ_SECONDS = 2**16, 20.0


class _Exchange(Call):
    """A request whose body is being collected; it takes the place of uvicorn's cycle."""

    __slots__ = ("_body", "disconnected", "endpoint", "keep_alive", "response_complete", "task")

    def __init__(self, headers: Any, name: str, endpoint: Callable):
        super().__init__(headers, None, name)
        self.endpoint = endpoint
        self._body: list[bytes] = []
        self.task: asyncio.Task | None = None
        self.keep_alive = True
        self.disconnected = self.response_complete = False

    async def body(self, limit: int, room: MemoryRoom) -> bytes:
        body = b"".join(self._body)
        if len(body) > limit:
            raise too_large(limit)
        return body

    @property
    def message_event(self) -> "_Exchange":
        return self

    def set(self) -> None:
        """Note that the connection is lost; uvicorn calls this."""
        if self.disconnected:
            self.leave()


async def _too_late(call: Call) -> Reply:
    raise too_late()


def protocol(service: Service, endpoints: dict[str, Callable]) -> type[asyncio.Protocol]:
    """The class for uvicorn's `http`, with the endpoints of `POST /v1/problems/{name}/...`."""
    of_bytes = {what.encode(): endpoint for what, endpoint in endpoints.items()}

    class Protocol(HttpToolsProtocol):
        _exchange: _Exchange | None = None  # the request whose body is arriving
        _timer: asyncio.TimerHandle | None = None  # set if the body doesn't arrive at once
        _idle_since = math.inf  # when a request was last answered here
        _keeper: asyncio.TimerHandle | None = None
        _is_whole = False  # whether the last request has arrived completely
        _unread = 0  # bytes received since the last progress of a request
        _patience: asyncio.TimerHandle | None = None  # set while only the client is waited for
        _refused = False
        _has_headers = False  # whether the headers of the last request are complete
        _owner = ""  # the owner of the last request's token
        _since = 0.0  # when something was last received
        _unwritten = 0  # the bytes that wait to be written
        _writer: asyncio.TimerHandle | None = None  # set while bytes wait

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._since = self.loop.time()
            self._be_patient()
            if len(self.connections) >= (self.config.limit_concurrency or math.inf):
                self._make_room()

        def _make_room(self) -> None:
            """Close the connection that is idle for longest, as there is a limit of open files."""
            every: Any = self.connections
            idle = [x for x in every if x is not self and x.is_idle]
            if idle:
                oldest = min(idle, key=lambda x: x._since)
                oldest.transport.close()
                every.discard(oldest)  # (by `close`, a little later)

        @property
        def is_idle(self) -> bool:
            return not (self._is_answering or self._exchange or self.transport.is_closing())

        def pause_writing(self) -> None:
            """Called when bytes wait to be written, as the client doesn't read."""
            super().pause_writing()
            self._count_unwritten()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._forget_unwritten()

        def _count_unwritten(self) -> None:
            self._unwritten = self.transport.get_write_buffer_size()
            service.answers.put(self, self._owner, self._unwritten)
            self._unset("_writer")
            self._writer = self.loop.call_later(_READ_SECONDS, self._check_reader)

        def _forget_unwritten(self) -> None:
            service.answers.drop(self)
            self._unset("_writer")

        def _check_reader(self) -> None:
            self._writer = None
            if self.transport.get_write_buffer_size() > self._unwritten - _READ:
                self.transport.abort()  # (`close` would wait for the client)
            else:
                self._count_unwritten()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            self._idle_since, self._since = math.inf, self.loop.time()
            self._unread += len(data)
            super().data_received(data)
            if self._refused or self._unread > _HEAD:  # also for trailers of chunks
                self._refuse()
            else:
                self._wait_or_not()
            if self._exchange is not None and self._timer is None:
                self._timer = self.loop.call_later(calls.BODY_SECONDS, self._end_waiting)

        @property
        def _is_answering(self) -> bool:
            return not (self.cycle is None or self.cycle.response_complete)

        def _wait_or_not(self) -> None:
            """Wait for the rest of a request with a time limit, if nothing else is to be done."""
            if self._is_answering or (self._is_whole and not self._unread):
                self._unset("_patience")
            elif self._patience is None and not self.transport.is_closing():
                self._be_patient()

        def _be_patient(self) -> None:
            self._patience = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

        def _refuse(self) -> None:
            """Answer a request with endless headers, unless another request is being answered."""
            self._refused = True
            if not (self._is_answering or self.transport.is_closing()):
                reply = calls.reply_to(RefusedRequest(431, "headers", "the headers are too long."))
                self.transport.write(reply.head(self._headers(None), close=True) + reply.body)
            self.transport.close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait_or_not()

        def _headers(self, id: str | None) -> list[tuple[bytes, bytes]]:
            named = [] if id is None else [(b"x-request-id", id.encode())]
            return [*self.server_state.default_headers, *named]

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._unset("_timer", "_patience", "_keeper")
            self._forget_unwritten()

        def _unset(self, *timers: str) -> None:
            for name in timers:
                if (timer := getattr(self, name)) is not None:
                    timer.cancel()
                    setattr(self, name, None)

        def _end_waiting(self) -> None:
            exchange = self._exchange
            assert exchange is not None
            exchange.endpoint, exchange.keep_alive = _too_late, False
            self.on_message_complete()

        def on_message_begin(self) -> None:
            self._is_whole = self._has_headers = False
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._has_headers:  # trailers are no headers (RFC 9110, 6.5.1)
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._has_headers = True
            if self._unread > _HEAD and not self._refused:
                # The bytes received may contain more than the headers.
                size = len(self.url) + sum(len(name) + len(x) for name, x in self.headers)
                self._refused = size > _HEAD
            if self._refused:  # as soon as everything that has arrived is read
                return
            self._unread = 0
            # The health check is answered however many connections there are.
            is_watched = self.url == b"/healthz"
            self.limit_concurrency = None if is_watched else self.config.limit_concurrency
            # The timer may have been set for the previous request, by the same bytes.
            self._unset_keepalive_if_required()
            self._owner = ""
            parts = self.url.split(b"/")
            if len(parts) == 5 and parts[4] in of_bytes and self.url.startswith(b"/v1/problems/"):
                headers = dict(self.headers)
                if b"%" not in self.url and self._is_plain(headers.get(b"content-length", b"")):
                    endpoint = of_bytes[parts[4]]
                    exchange = _Exchange(headers, parts[3].decode("latin-1"), endpoint)
                    exchange.owner = service.owner(exchange)
                    if exchange.owner is not None:  # else refused before its body arrives
                        self._owner = exchange.owner
                        self._exchange = exchange
                        self.cycle = exchange  # pyright: ignore
                        return
            super().on_headers_complete()

        def _is_plain(self, length: bytes) -> bool:
            parser: Any = self.parser
            return (
                length.isdigit()
                and int(length) <= LARGE
                and parser.get_method() == b"POST"
                and parser.get_http_version() == "1.1"
                and parser.should_keep_alive()
                and not parser.should_upgrade()
                and not self.expect_100_continue
                and not self.root_path
                and not (self.limit_concurrency and len(self.connections) >= self.limit_concurrency)
                and (self.cycle is None or self.cycle.response_complete)
            )

        def on_body(self, body: bytes) -> None:
            self._unread = 0
            if self._refused:
                return
            if self._exchange is not None:
                self._exchange._body.append(body)
            elif not isinstance(self.cycle, _Exchange):  # or it is too late
                if self.cycle.response_complete:
                    # Otherwise, other clients would wait for a refused body that arrives fast.
                    self.flow.pause_reading()
                    self.loop.call_later(_PAUSE, self._go_on_reading)
                super().on_body(body)

        def _go_on_reading(self) -> None:
            if not self.transport.is_closing():
                self.flow.resume_reading()

        def on_message_complete(self) -> None:
            self._unread, self._is_whole = 0, True
            if self._refused:
                return
            exchange, self._exchange = self._exchange, None
            if exchange is None:
                if not isinstance(self.cycle, _Exchange):
                    super().on_message_complete()
                return
            self._unset("_timer")
            # Event loops keep no references to their tasks.
            if sys.version_info >= (3, 12):
                exchange.task = asyncio.Task(
                    self._answer(exchange), loop=self.loop, eager_start=True
                )
            else:
                exchange.task = self.loop.create_task(self._answer(exchange))

        async def _answer(self, exchange: _Exchange) -> None:
            try:
                endpoint = exchange.endpoint
                reply, id = await service.answered(endpoint, exchange, guarded=True)
                if self.flow.write_paused and not exchange.disconnected:
                    await self.flow.drain()
            except BaseException:
                self.transport.close()
                raise
            exchange.response_complete, exchange.task = True, None
            if exchange.disconnected:
                return
            stays = exchange.keep_alive and service.status != "draining"
            head = reply.head(self._headers(id), close=not stays)
            self.transport.write(head + reply.body)
            if not stays:
                self.transport.close()
            if self.pipeline or self.transport.is_closing():
                self.on_response_complete()
                return
            self.server_state.total_requests += 1
            # A timer for each answer would take a twentieth of all the time.
            self._idle_since = self.loop.time()
            self._wait_or_not()
            if self._keeper is None:
                self._keeper = self.loop.call_later(self.timeout_keep_alive, self._keep)

        def _keep(self) -> None:
            """Close the connection if it has been idle for long enough."""
            self._keeper = None
            left = self._idle_since + self.timeout_keep_alive - self.loop.time()
            if left <= 0:
                self.timeout_keep_alive_handler()
            elif left < math.inf:  # otherwise the end of an answer sets it again
                self._keeper = self.loop.call_later(left, self._keep)

    return Protocol
