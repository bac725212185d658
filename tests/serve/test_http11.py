"""The short path of small requests: its answers are those of uvicorn's own http11."""

import asyncio
import contextlib
import json
import operator
import socket
import sys
import threading
import time

import httpx
import msgpack
import numpy as np
import pytest

from ensembleode.serve import calls, http11
from ensembleode.serve.room import MemoryRoom

from .running import held_back, registry, Running, until
from .test_app import without_server


JSON, BINARY = "application/json", "application/x-msgpack"
SOLVE = "/v1/problems/lotka/solve"
ASKED = {"u0": [1.0, 2.0], "tspan": [0.0, 1.0], "saveat": 0.5}


@pytest.fixture
def short(monkeypatch):
    """Counts the requests that go the short way."""
    taken = []

    class Counted(http11._Exchange):
        def __init__(self, *args):
            taken.append(args)
            super().__init__(*args)

    monkeypatch.setattr(http11, "_Exchange", Counted)
    return taken


def request(body=None, path=SOLVE, *, version="1.1", more=(), length=None, chunks=None):
    """The bytes of one, with a body (whose length may be said to be another) or one in chunks."""
    if chunks is not None:
        body = b"".join(b"%x\r\n%b\r\n" % (len(x), x) for x in (*chunks, b""))
    elif not isinstance(body, bytes):
        body = json.dumps(ASKED if body is None else body).encode()
    framing = f"Content-Length: {len(body) if length is None else length}"
    if chunks is not None:
        framing = "Transfer-Encoding: chunked"
    lines = [f"POST {path} HTTP/{version}", "Host: here", f"Content-Type: {JSON}", *more, framing]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection:
    """One to a service, read an answer at a time."""

    def __init__(self, running):
        host, port = running.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()
        self.socket.close()

    def ask(self, data):
        """The answer to these bytes."""
        self.socket.sendall(data)
        return self.answer()

    def answer(self):
        """Its status, headers and body."""
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip().decode():
            name, _, value = line.partition(": ")
            assert name not in headers
            headers[name] = value
        return status, headers, self.file.read(int(headers.get("content-length", 0)))

    def ended(self):
        return self.file.read() == b""


def numbers(body):
    return {k: v for k, v in json.loads(body).items() if k != "seconds"}


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("lotka/solve", JSON, ASKED),
        ("lotka/solve", JSON, {"u0": [[1.0, 2.0], [2.0, 1.0]]}),
        ("lotka/solve", BINARY, {"u0": [1.0, 2.0]}),
        ("lotka/vjp", JSON, {"cotangent": np.ones((9, 2)).tolist()}),
        ("lotka/solve", JSON, {"u0": [1.0, 2.0, 3.0]}),
        ("lotka/solve", JSON, {"tspan": [0.0, 99.0]}),
        ("lotka/solve", "text/plain", ASKED),
        ("nobody/solve", JSON, ASKED),
        ("lotka/ensembles", JSON, {"trajectories": 10**9}),
    ],
)
def test_as_by_uvicorn(running, short, path, kind, body):
    """Bytes, status and headers."""
    body = msgpack.packb(body) if kind == BINARY else json.dumps(body).encode()
    headers = {"Content-Type": kind, "Accept": kind}

    ask = operator.methodcaller("post", f"/v1/problems/{path}", content=body, headers=headers)
    found = ask(running.client)
    assert len(short) == 1
    # (In the event loop of the service, where its batches are.)
    other = without_server(running.app, ask)
    other = asyncio.run_coroutine_threadsafe(other, running.service._loop).result(60)
    assert len(short) == 1
    assert found.status_code == other.status_code
    assert found.headers.keys() - {"date"} == other.headers.keys()
    for name in ("content-type", "retry-after"):
        assert found.headers.get(name) == other.headers.get(name)
    read = msgpack.unpackb if found.headers["content-type"] == BINARY else json.loads
    found, other = read(found.content), read(other.content)
    assert found.pop("seconds", None) is not None or "error" in found
    other.pop("seconds", None)
    assert found == other


def test_what_goes_the_short_way(running, short):
    """And what doesn't is answered the same."""
    with Connection(running) as connection:

        def asked(data):
            status, _, body = connection.ask(data)
            assert status == 200
            return numbers(body)

        expected = asked(request())
        assert len(short) == 1
        assert asked(request(path="/v1/problems/l%6Ftka/solve")) == expected
        assert asked(request(path="/v1/problems/lotka/solve?x=1")) == expected
        assert asked(request(b" " * 2**16 + json.dumps(ASKED).encode())) == expected
        whole = json.dumps(ASKED).encode()
        assert asked(request(chunks=[whole[:7], whole[7:]])) == expected
        assert len(short) == 1
        assert asked(request()) == expected
        assert len(short) == 2


def test_byte_by_byte(running, short):
    with Connection(running) as connection:
        for byte in request():
            connection.socket.sendall(bytes([byte]))
        status, _, body = connection.answer()
    assert status == 200
    assert numbers(body)["t"] == [0.0, 0.5, 1.0]
    assert len(short) == 1


def test_one_after_the_other(running, short):
    """Requests that are sent before the one before is answered are answered in order."""
    ends = [0.5, 1.0, 1.5, 2.0]
    several = [request({"tspan": [0.0, end]}) for end in ends]
    several.insert(2, b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
    several.insert(1, request({"u0": "numbers"}))
    with Connection(running) as connection:
        connection.socket.sendall(b"".join(several))
        answers = [connection.answer() for _ in several]
    assert [status for status, _, _ in answers] == [200, 422, 200, 200, 200, 200]
    assert json.loads(answers[3][2]) == {"status": "ok"}
    found = [numbers(answers[i][2])["t"][-1] for i in (0, 2, 4, 5)]
    assert found == ends
    # The others had to wait, or would have overtaken.
    assert len(short) == 1


def test_refused_ones_and_those_after_them(running, short):
    """What is refused is answered at once, so that the next goes the short way, too (from Python
    3.12 on: before, tasks begin later)."""
    with Connection(running) as connection:
        assert connection.ask(request({"u0": "numbers"}) + request())[0] == 422
        assert connection.answer()[0] == 200
    assert len(short) == 1 + (sys.version_info >= (3, 12))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize("some", [True, False])
def test_a_body_that_does_not_arrive(running, monkeypatch, length, some):
    monkeypatch.setattr(calls, "BODY_SECONDS", 0.2)
    with Connection(running) as connection:
        whole = request(b"5\r\n12345\r\n0\r\n\r\n") if length else request(chunks=[b"12345"])
        status, headers, body = connection.ask(whole[: -8 if some else -15])
        assert (status, json.loads(body)["error"]["code"]) == (408, "timeout")
        if length:
            assert headers["connection"] == "close"
            assert connection.ended()
    assert running.solve().status_code == 200


@pytest.mark.slow
def test_idle_connections(running, short, monkeypatch):
    """They are closed some time after the last answer, not after the first."""
    monkeypatch.setattr(running.server.config, "timeout_keep_alive", 1.0)
    healthy = b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n"
    for last in (request(), healthy):
        with Connection(running) as connection:
            for i in range(8):
                assert connection.ask(last if i % 2 else request())[0] == 200
                time.sleep(0.2)
            began = time.monotonic()
            assert connection.ended()
            assert 0.4 < time.monotonic() - began < 10
        with Connection(running) as connection:
            assert connection.ask(request())[0] == 200
            # A request that has begun to come is waited for.
            connection.socket.sendall(last[:20])
            time.sleep(1.5)
            assert connection.ask(last[20:])[0] == 200
    assert len(short) == 8 + 1 + 1 + 4 + 1


def test_ways_to_end(running, short):
    with Connection(running) as connection:
        status, headers, _ = connection.ask(request(more=["Connection: close"]))
        assert (status, headers["connection"]) == (200, "close")
        assert connection.ended()
    with Connection(running) as connection:
        assert connection.ask(request(version="1.0"))[0] == 200
        assert connection.ended()
    assert not short


@pytest.mark.parametrize(
    "begins",
    [
        b"POST /v1/problems/lotka/solve HTTP/1.1\r\nHost: x\r\nX-A: ",  # one
        b"GET /" + b"a" * 100,
        b"\r\n" * 50,
        # Those that may come after a body in chunks.
        request(chunks=[b"{}"])[:-2] + b"X: ",
    ],
)
@pytest.mark.parametrize("piece", [2**10, 2**20])
def test_headers_without_end(running, begins, piece):
    """Are no longer read; others are answered."""
    sent = 0
    filling = b"\r\n" if begins.startswith(b"\r") else b"a"
    with Connection(running) as connection:
        with contextlib.suppress(ConnectionError):
            connection.socket.sendall(begins)
            while sent < 2**26:
                connection.socket.sendall(filling * (piece // len(filling)))
                sent += piece
        assert sent < 2**26
        # (What is answered is lost where more was sent than read.)
        with contextlib.suppress(ConnectionError):
            answered = connection.file.read()
            assert not answered or b" 431 " in answered or b" 200 " in answered
    assert running.solve().status_code == 200


def test_headers_that_are_too_long(running, short):
    """In one piece, and those that are just not."""
    for size, status in ((2**16 + 1, 431), (2**16 - 2**10, 200)):
        with Connection(running) as connection:
            found, headers, body = connection.ask(request(more=["X-A: " + "a" * size]))
            assert found == status
            if status == 431:
                assert json.loads(body)["error"]["code"] == "headers"
                assert headers["connection"] == "close"
                assert connection.ended()
    # Many requests in one piece are not long headers.
    with Connection(running) as connection:
        many = request() * 500
        assert len(many) > 2**16
        sending = threading.Thread(target=connection.socket.sendall, args=[many])
        sending.start()
        assert {connection.answer()[0] for _ in range(500)} == {200}
        sending.join()


HALF = request()[:40]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", 0),
        (HALF, 0),
        (b"\r\n", 0),
        (request() + HALF, 1),
        # Refused before its body is there, which then does not come.
        (request(path="/v1/problems/lotka/nothing", length=9), 1),
    ],
)
def test_those_that_say_no_more_are_closed(running, monkeypatch, sent, answers):
    monkeypatch.setattr(http11, "_HEAD_SECONDS", 0.2)
    with Connection(running) as connection, Connection(running) as other:
        connection.socket.sendall(sent)
        for _ in range(answers):
            connection.answer()
        # (Those that are idle between requests have more time, and so has what is underway.)
        assert other.ask(request())[0] == 200
        if b"nothing" in sent:
            connection.socket.sendall(b"1")
        assert connection.ended()
        assert other.ask(request())[0] == 200


@pytest.mark.slow
def test_a_body_may_take_longer_than_headers(running, monkeypatch):
    monkeypatch.setattr(http11, "_HEAD_SECONDS", 0.1)
    for path in (SOLVE, "/v1/problems/l%6Ftka/solve"):
        whole = request(path=path)
        with Connection(running) as connection:
            connection.socket.sendall(whole[:-8])
            time.sleep(0.4)
            assert connection.ask(whole[-8:])[0] == 200


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("path", ["lotka/solve", "l%6Ftka/solve"])
def test_a_token_comes_before_the_body(running, path):
    """One without is refused before its body is there."""
    with Running(registry(), like=running, tokens=["one"]) as guarded:
        whole = request(path=f"/v1/problems/{path}")
        with Connection(guarded) as connection:
            assert connection.ask(whole[:-8])[0] == 401
        whole = request(path=f"/v1/problems/{path}", more=["Authorization: Bearer one"])
        with Connection(guarded) as connection:
            assert connection.ask(whole)[0] == 200


def test_too_many_connections(running):
    """Those beyond are told so, whichever way their request goes; then there is room again."""
    with Running(registry(), like=running) as few:
        few.server.config.limit_concurrency = 3
        few.client.close()
        with Connection(few) as first, Connection(few) as second:
            for busy in (first, second):
                busy.socket.sendall(request()[:-8])
            there = few.server.server_state.connections
            until(lambda: sum(not x.is_idle for x in there) == 2)
            for path in ("lotka/solve", "l%6Ftka/solve"):
                with Connection(few) as third:
                    assert third.ask(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")[0] == 200
                    assert third.ask(request(path=f"/v1/problems/{path}"))[0] == 503
                until(lambda: len(there) == 2)
        until(lambda: not there)
        with Connection(few) as connection:
            assert connection.ask(request())[0] == 200
        few.client = httpx.Client()


def test_idle_ones_make_room(running):
    """The one that has said nothing for longest is closed."""
    with Running(registry(), like=running) as few:
        few.server.config.limit_concurrency = 4
        few.client.close()
        with contextlib.ExitStack() as stack:
            idle = []
            for _ in range(6):
                connection = stack.enter_context(Connection(few))
                assert connection.ask(request())[0] == 200
                idle.append(connection)
            assert [x.ended() for x in idle[:3]] == [True] * 3
            assert idle[-1].ask(request())[0] == 200
        few.client = httpx.Client()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("path", ["lotka/solve", "l%6Ftka/solve"])
def test_answers_that_nobody_reads(running, monkeypatch, path):
    """They are counted until they are read, and the connection is closed after a time."""
    monkeypatch.setattr(http11, "_READ_SECONDS", 1.5)
    answers = MemoryRoom(2**30, 3 * 2**20)
    monkeypatch.setattr(running.service, "answers", answers)
    # (Larger than what the kernel holds.)
    monkeypatch.setattr(running.service, "_id_prefix", "x" * 2**24)
    whole = request(path=f"/v1/problems/{path}", body={})
    with contextlib.ExitStack() as stack:
        unread = socket.socket()
        stack.callback(unread.close)
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(running.server.servers[0].sockets[0].getsockname())
        unread.sendall(whole)
        until(lambda: answers.total > 3 * 2**20)
        with Connection(running) as other:
            status, headers, _ = other.ask(whole)
            assert (status, headers["retry-after"]) == (429, "1")
        began = time.monotonic()
        until(lambda: answers.total == 0)
        assert time.monotonic() - began < 20
        received = 0
        with contextlib.suppress(ConnectionError):
            while piece := unread.recv(2**20):
                received += len(piece)
        assert received < 2**24
    # One who reads slowly, but does, gets all of it.
    with Connection(running) as slow:
        slow.socket.sendall(whole)
        time.sleep(1.0)
        assert slow.answer()[0] == 200


def test_trailers_are_no_headers(running):
    """(RFC 9110, 6.5.1.) They come after what a proxy has looked at."""
    with Running(registry(), like=running, tokens=["one"]) as guarded:
        token, kind = "Authorization: Bearer one", f"Content-Type: {JSON}"
        for head, trailer, status in (
            ([token, kind], [], 200),
            ([kind], [token], 401),
            ([token], [kind], 415),
            ([token, kind], ["Content-Type: text/plain", "Host: elsewhere"], 200),
        ):
            lines = ["POST /v1/problems/lotka/solve HTTP/1.1", "Host: here", *head]
            lines += ["Transfer-Encoding: chunked", "", "2", "{}", "0", *trailer, "", ""]
            with Connection(guarded) as connection:
                assert connection.ask("\r\n".join(lines).encode())[0] == status


def test_expect_continue(running, short):
    with Connection(running) as connection:
        whole = request(more=["Expect: 100-continue"])
        head, _, body = whole.partition(b"\r\n\r\n")
        assert connection.ask(head + b"\r\n\r\n")[0] == 100
        assert connection.ask(body)[0] == 200
    assert not short


def test_nonsense(running):
    with Connection(running) as connection:
        assert connection.ask(request() + b"nonsense\r\n\r\n")[0] == 400
        assert connection.ended()
    assert running.solve().status_code == 200


def test_the_end_of_a_service(running, short):
    """What is underway is answered, with the last word of its connection."""
    with Running(registry(), like=running, max_wait_ms=0.0) as ending:
        let_go = held_back(ending.service)
        with Connection(ending) as connection, Connection(ending) as idle:
            connection.socket.sendall(request())
            until(lambda: ending.service.batcher._running)
            ending.server.should_exit = True
            assert idle.ended()
            let_go.set()
            status, headers, _ = connection.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert connection.ended()
    assert len(short) == 1


def test_middleware_is_not_passed_by(running, short):
    """Of pages from elsewhere."""
    with Running(registry(), like=running, cors=["https://elsewhere.org"]) as open_to_others:
        headers = {"Origin": "https://elsewhere.org"}
        response = open_to_others.client.post(SOLVE, json=ASKED, headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://elsewhere.org"
    assert response.status_code == 200
    assert not short
