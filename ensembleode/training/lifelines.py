"""Connections between processes that train together, by which each learns when another one ends.

JAX's own service for this ends a process from C++ (SIGABRT) as soon as another is gone. To prevent
that, JAX's client connects to a port of its own process, which passes the bytes on, and stays open
whatever happens.

Process 0 has one *door*, a port for connections of two kinds. Connections of JAX's clients are
passed on to JAX's service. The others are lifelines: each process has one for as long as it lives,
and the operating system closes it however the process ends. Messages on a lifeline are lines of
JSON. First each process sends what the others need to know about it, and all get the whole list
when it is complete. After that, `{word: process}` says that a process is ready to end (`bye`), has
ended and isn't needed (`left`), or was lost (`lost`).
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any


_LIFELINE, _SERVICE = b"ensembleode lifeline\n", b"ensembleode service\n"
_LIMIT = 2**26  # the most bytes of a line


class Door:
    """The door of process 0, for the lifelines of all `processes`, a number. JAX's service listens
    on the port `service` of this computer; `patience`: see `Lifeline`."""

    def __init__(self, processes: int, service: int, patience: float):
        self._processes, self._service, self._patience = processes, service, patience
        self._lines: dict[int, asyncio.StreamWriter] = {}
        self._about: dict[int, Any] = {}

    async def open(self, host: str | None, port: int) -> None:
        """**Raises:** `OSError` where the port is taken."""
        self._server = await asyncio.start_server(self._came, host, port, limit=_LIMIT)

    def close(self) -> None:
        self._server.close()
        for writer in self._lines.values():
            writer.close()

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = await _line(reader)
        if kind == _SERVICE:
            # (JAX opens it when all processes have joined.)
            there, to = await _connected("127.0.0.1", self._service, time.monotonic() + 60)
            await asyncio.gather(_passed_on(reader, to), _passed_on(there, writer))
        elif kind == _LIFELINE and (about := await _line(reader)):
            await self._lives(json.loads(about), reader, writer)
        writer.close()

    async def _lives(
        self, about: dict[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        process = about["process"]
        if process in self._about or about["processes"] != self._processes:
            writer.write(_encoded({"refused": self._processes}))
            return
        _kept_alive(writer, self._patience)
        self._lines[process], self._about[process] = writer, about
        if len(self._about) == self._processes:
            self._tell({"begin": [self._about[i] for i in range(self._processes)]})
        last = None
        while line := await _line(reader):
            last = json.loads(line)
            self._tell({last: process})
        del self._lines[process]
        if last not in ("left", "done"):
            self._tell({"lost": process})

    def _tell(self, message: dict) -> None:
        for writer in self._lines.values():
            writer.write(_encoded(message))


class Lifeline:
    """The lifeline of this process, and the port at which its client of JAX connects.

    **Arguments:** `hear`: called with each word and the number of the process that it is about;
    `patience`: the number of seconds for which another computer may not answer. (If a process is
    killed, its operating system closes the connection, which is noticed at once.)
    """

    def __init__(self, hear: Callable[[str, int], None], patience: float):
        self._hear, self._patience = hear, patience
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task] = set()  # kept, as asyncio has only weak references
        self._open: list = []  # the connections to be closed at the end
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.name = "ensembleode lifeline"
        self._thread.start()

    def open_door(self, processes: int, port: int, host: str | None) -> int:
        """In process 0: open the door. Returns the port on which JAX's service is to listen, on
        this computer only."""
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            service = free.getsockname()[1]
        door = Door(processes, service, self._patience)
        self._wait(door.open(host, port))
        self._open.append(door)
        return service

    def join(self, host: str, port: int, about: dict, within: float) -> list[dict]:
        """Send `about` this process to the others. Returns what all processes sent, in their order,
        when it is complete.

        **Raises:** `TimeoutError` where some haven't joined in time; `ConnectionError` where one is
        lost, or where another one has this number already; `OSError` where process 0 can't be
        reached.
        """
        return self._wait(self._join(host, port, about, time.monotonic() + within))

    def relay(self, host: str, port: int) -> int:
        """Open a port on this computer whose connections go to JAX's service through the door;
        returns it."""
        return self._wait(self._relay(host, port))

    def say(self, word: str) -> None:
        """Send a word to the others. After `left` or `done`, a process may end."""
        self._wait(self._say(word))

    def close(self) -> None:
        """Close all connections, as the end of the process does."""
        if self._loop.is_closed():
            return
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    async def _join(self, host: str, port: int, about: dict, until: float) -> list[dict]:
        reader, writer = await _connected(host, port, until)
        self._open.append(writer)
        _kept_alive(writer, self._patience)
        writer.write(_LIFELINE + _encoded(about))
        line = await asyncio.wait_for(_line(reader), until - time.monotonic())
        begin = json.loads(line or "{}")
        if "begin" not in begin:
            raise ConnectionError(
                f"process 0 has {begin['refused']} processes, or one with this number"
                if "refused" in begin
                else "a process was lost before all had come"
            )
        self._writer = writer
        self._task(self._listen(reader))
        return begin["begin"]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await _line(reader):
            [(word, process)] = json.loads(line).items()
            self._hear(word, process)
        self._hear("closed", 0)

    async def _relay(self, host: str, port: int) -> int:
        async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # JAX's side is never closed from here.
            with contextlib.suppress(OSError):
                there, to = await asyncio.open_connection(host, port)
                to.write(_SERVICE)
                self._task(_passed_on(there, writer, closes=False))
                await _passed_on(reader, to)

        server = await asyncio.start_server(came, "127.0.0.1", 0)
        self._open.append(server)
        return server.sockets[0].getsockname()[1]

    async def _say(self, word: str) -> None:
        with contextlib.suppress(OSError):  # process 0 is lost, which its lifeline tells
            self._writer.write(_encoded(word))
            await self._writer.drain()

    async def _close(self) -> None:
        for what in self._open:
            what.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _task(self, what: Coroutine) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _connected(host: str, port: int, until: float) -> Any:
    """The reader and the writer of a connection, once something listens there."""
    while True:
        try:
            return await asyncio.open_connection(host, port, limit=_LIMIT)
        except OSError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)


async def _passed_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, closes: bool = True
) -> None:
    with contextlib.suppress(OSError):  # one of the two ends is gone
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    if closes:
        writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty where the other end was closed, in whatever way."""
    try:
        return await reader.readline()
    except OSError:
        return b""


def _encoded(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _kept_alive(writer: asyncio.StreamWriter, patience: float) -> None:
    """Let the system probe the other computer (TCP keep-alive), and close the connection without an
    answer."""
    of = writer.get_extra_info("socket")
    of.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, round(patience / 4))
    options = {"TCP_KEEPIDLE": every, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": 3}
    options["TCP_USER_TIMEOUT"] = round(1000 * patience)
    for name, value in options.items():
        if hasattr(socket, name):  # (not on all systems)
            of.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
