"""The driver of the service of service.py, in a process of its own: the requests, the clients that
send them, and the answers."""

import asyncio
import collections
import contextlib
import json
import socket
import sys
import time

import msgpack
import numpy as np
from common.processes import is_worker


PATH = "/v1/problems/neural/solve"
BINARY, JSON = "application/x-msgpack", "application/json"
ROWS = 31
DISTINCT = 1000  # requests that are sent again and again


#
# Requests
#


def array(x, dtype=np.float32):
    x = np.asarray(x, dtype)
    return {"dtype": x.dtype.str, "shape": list(x.shape), "data": x.tobytes()}


def http(body, path=PATH, kind=BINARY):
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
    head += f"Accept: {BINARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def plain_requests():
    states = np.random.default_rng(0).standard_normal((DISTINCT, 2))
    return [http(msgpack.packb({"u0": array(u0)})) for u0 in states]


def mixed_requests():
    """One or several trajectories, with parameters, time spans and saved times of their own, or
    without; in MessagePack, or in JSON."""
    rng = np.random.default_rng(1)
    every = []
    for i in range(DISTINCT):
        n = int(rng.integers(2, 9)) if i % 5 == 0 else None
        body = {"u0": rng.standard_normal((2,) if n is None else (n, 2)).astype(np.float32)}
        if i % 3 == 0:
            body["tspan"] = np.array([0.0, rng.uniform(0.5, 3.0)], np.float32)
            rows = int(rng.integers(2, ROWS + 1))
            body["saveat"] = np.linspace(0.0, body["tspan"][1], rows, dtype=np.float32)
        if i % 10 == 7:
            body["saveat"] = 0.25
        if i % 4 == 0:
            every.append(http(json.dumps(body, default=np.ndarray.tolist).encode(), kind=JSON))
        else:
            every.append(http(msgpack.packb(body, default=array)))
    return every


def bad_requests():
    """How each is to be refused, by the request."""
    good = array([0.1, 0.2])
    nan = array([0.1, np.nan])
    bodies = [
        ({"u0": array([1.0, 2.0, 3.0])}, 422),
        ({"u0": nan}, 422),
        ({"u0": array([0.1, np.inf])}, 422),
        ({"u0": "numbers"}, 422),
        ({"u0": {**good, "dtype": "|O8"}}, 422),
        ({"u0": {**good, "data": b"short"}}, 422),
        ({"u0": good, "colour": 1}, 422),
        ({"u0": good, "tspan": [0.0]}, 422),
        ({"u0": good, "saveat": -0.1}, 422),
        ({"u0": good, "saveat": array([0.5, 99.0])}, 422),
        ({"u0": good, "p": array([1.0, 2.0])}, 422),
        ({"u0": good, "deadline_ms": -1}, 422),
        ({"u0": array(np.zeros((2000, 2)))}, 413),
    ]
    every = {http(msgpack.packb(body)): status for body, status in bodies}
    texts = [b"{", b"[]", b'{"u0": [NaN, 1]}', b'{"u0": [1, 1e999]}', b'{"u0": [1, true]}']
    every |= {http(text, kind=JSON): 422 for text in texts}
    return every | {http(b"\x80", "/v1/problems/nobody/solve"): 404}


#
# Clients
#


class Connection(asyncio.Protocol):
    """One request at a time over one connection, which is kept.

    `answered(connection, status, body)` is called with each answer, `lost(connection)` when it is
    closed with a request underway.
    """

    def __init__(self, answered, lost):
        self.answered, self.lost, self.due = answered, lost, None
        self._buffer, self._whole, self._head = bytearray(), 0, 0

    def connection_made(self, transport):
        self.transport = transport
        socket_of = transport.get_extra_info("socket")
        socket_of.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request, due):
        self.request, self.due = request, due
        self.transport.write(request)

    def data_received(self, data):
        self._buffer += data
        if not self._whole:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            self._head, self._whole = end + 4, end + 4 + int(length)
        if len(self._buffer) < self._whole:
            return
        status, body = int(self._buffer[9:12]), bytes(self._buffer[self._head : self._whole])
        del self._buffer[: self._whole]
        self._whole, self.due_of_answer, self.due = 0, self.due, None
        self.answered(self, status, body)

    def connection_lost(self, error):
        if self.due is not None:
            self.lost(self)


class Driver:
    """Sends requests and counts what comes back."""

    def __init__(self, port, requests):
        self.port, self.requests, self.sent = port, requests, 0
        self.latencies, self.statuses, self.lost = [], collections.Counter(), 0

    async def connect(self, count):
        loop, found = asyncio.get_running_loop(), []
        for _ in range(count):
            made = loop.create_connection(
                lambda: Connection(self.answered, self.was_lost), "127.0.0.1", self.port
            )
            found.append((await made)[1])
        return found

    def next_request(self):
        self.sent += 1
        return self.requests[self.sent % len(self.requests)]

    def answered(self, connection, status, body):
        self.latencies.append(time.perf_counter() - connection.due_of_answer)
        self.statuses[status] += 1
        self.go_on(connection)

    def was_lost(self, connection):
        self.lost += 1
        self.go_on(None)

    def go_on(self, connection):
        raise NotImplementedError

    def found(self, seconds):
        latencies = np.sort(np.array(self.latencies)) if self.latencies else np.array([np.nan])
        return {
            "requests": len(self.latencies),
            "per_second": len(self.latencies) / seconds,
            "p50": float(np.quantile(latencies, 0.5)),
            "p99": float(np.quantile(latencies, 0.99)),
            "slowest": float(latencies[-1]),
            "statuses": dict(self.statuses),
            "sent": self.sent,
            "lost": self.lost,
        }


class Closed(Driver):
    """Each client sends again once it has an answer."""

    async def drive(self, clients, seconds, most):
        connections = await self.connect(clients)
        self.most, self.left = most, clients
        self.ended = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self.until = started + seconds
        for connection in connections:
            connection.send(self.next_request(), time.perf_counter())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended, seconds + 60)
        took = time.perf_counter() - started
        for connection in connections:
            connection.transport.close()
        return self.found(took)

    def go_on(self, connection):
        now = time.perf_counter()
        if connection is not None and now < self.until and self.sent < self.most:
            connection.send(self.next_request(), now)
            return
        self.left -= 1
        if not self.left and not self.ended.done():
            self.ended.set_result(None)


class Open(Driver):
    """Requests at random times, by whatever connection is free."""

    async def drive(self, clients, seconds, rate):
        self.free = await self.connect(clients)
        every, self.waiting = list(self.free), collections.deque()
        await asyncio.sleep(0.3)  # until the service has accepted them, too
        gaps = np.random.default_rng(2).exponential(1 / rate, int(2 * rate * seconds) + 10)
        started = time.perf_counter()
        for at in started + np.cumsum(gaps):
            if at > started + seconds:
                break
            early = at - time.perf_counter()
            if early > 0:
                await asyncio.sleep(early)
            # (It is late by how coarse the timers of this process are, not by the service.)
            now = time.perf_counter()
            if self.free:
                self.free.pop().send(self.next_request(), now)
            else:
                self.waiting.append(now)
        drained = time.perf_counter() + 60
        while len(self.free) < len(every) - self.lost and time.perf_counter() < drained:
            await asyncio.sleep(0.001)
        took = time.perf_counter() - started
        for connection in every:
            connection.transport.close()
        return {**self.found(took), "rate": rate}

    def go_on(self, connection):
        if connection is None:
            return
        if self.waiting:
            connection.send(self.next_request(), self.waiting.popleft())
        else:
            self.free.append(connection)


class Checked(Closed):
    """Compares every answer with that of the same request alone; some requests are bad."""

    def __init__(self, port, requests, bad, share):
        super().__init__(port, requests)
        self.bad, self.share, self.alone = bad, share, {}
        self.rng = np.random.default_rng(3)
        self.wrong, self.refused, self.examples = 0, 0, []

    async def ask_alone(self):
        """The answers to each request when there is no other."""
        loop = asyncio.get_running_loop()
        answers = asyncio.Queue()

        def answered(_, status, body):
            answers.put_nowait((status, body))

        _, connection = await loop.create_connection(
            lambda: Connection(answered, lambda _: answers.put_nowait((0, b"lost"))),
            "127.0.0.1",
            self.port,
        )
        for i, request in enumerate(self.requests):
            connection.send(request, 0.0)
            status, body = await answers.get()
            if status != 200:
                sys.exit(f"request {i}, alone, was answered {status}: {body[:300]!r}")
            self.alone[request] = numbers_of(body)
        connection.transport.close()

    def next_request(self):
        self.sent += 1
        drawn = self.rng.integers(len(self.requests))
        if self.rng.random() < self.share:
            return list(self.bad)[self.rng.integers(len(self.bad))]
        return self.requests[drawn]

    async def drive(self, clients, seconds, most):
        await self.ask_alone()
        found = await super().drive(clients, seconds, most)
        counts = {"wrong": self.wrong, "refused": self.refused, "examples": self.examples}
        return {**found, **counts, "unanswered": self.sent - len(self.latencies)}

    def answered(self, connection, status, body):
        request = connection.request
        if request in self.bad:
            right = status == self.bad[request]
            self.refused += right
        else:
            right = status == 200 and numbers_of(body) == self.alone[request]
        if not right:
            self.wrong += 1
            if len(self.examples) < 5:
                self.examples.append([repr(request[:300]), status, repr(body[:200])])
        super().answered(connection, status, body)


def numbers_of(body):
    """What must be the same, bit for bit: everything but the times it took."""
    answer = msgpack.unpackb(body)
    answer.pop("seconds", None)
    return answer


def work(kind, port, task):
    """What a driver of this kind found."""
    if kind == "checked":
        driver = Checked(port, mixed_requests(), bad_requests(), task.pop("share"))
    else:
        driver = {"closed": Closed, "open": Open}[kind](port, plain_requests())
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run
    started, used = time.perf_counter(), time.process_time()
    found = run(driver.drive(**task))
    found["driver"] = (time.process_time() - used) / (time.perf_counter() - started)
    return found


if __name__ == "__main__":
    is_worker(work)
