"""The service beside what goes wrong: batches that never return, bodies that fill it, those who leave.

`python -m tests.serve.test_beside` says how long a healthy request takes alone and beside each.
"""

import contextlib
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from .running import until
from .test_jobs import Process


APP = """
import time

import jax, jax.numpy as jnp, numpy as np, ensembleode as eo

def host(u):
    if np.asarray(u).max() > 5:
        time.sleep(10**6)
    return -np.asarray(u)

def asks_the_host(u, p, t):
    kind = jax.ShapeDtypeStruct(u.shape, u.dtype)
    return jax.pure_callback(host, kind, u, vmap_method="expand_dims")

def never_ends(u, p, t):
    return -jax.lax.while_loop(lambda x: jnp.any(x > 5), lambda x: x, u)

limits = eo.serve.Limits(saveat=2, maxiters=64)
registry = eo.serve.Registry()
for name, f in (
    ("healthy", lambda u, p, t: -u), ("host", asks_the_host), ("endless", never_ends),
):
    registry.add(name, eo.ODEProblem(f, jnp.ones(1), (0.0, 1.0)), limits=limits)
"""
DRAIN = 3.0
TOKEN = "Authorization: Bearer sesame"
LARGEST = 2**24 - 1


@contextlib.contextmanager
def started(folder):
    with Process(folder, "--drain-seconds", str(DRAIN), app=APP) as served:
        yield served


def solve(served, problem, x=1.0):
    return served.client.post(f"/v1/problems/{problem}/solve", json={"u0": [x]})


def hang(served, problem):
    """Have a batch of it run that never returns."""

    def ask():
        with contextlib.suppress(httpx.HTTPError):
            solve(served, problem, 9.0)

    threading.Thread(target=ask, daemon=True).start()
    time.sleep(1.0)


def connected(served, size):
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 60)
    head = (
        f"POST /v1/problems/healthy/solve HTTP/1.1\r\nHost: x\r\n{TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    connection.sendall(head.encode())
    return connection


@contextlib.contextmanager
def largest_bodies(served, count=60):
    """So many connections that have sent all of such a body but its last byte; it goes on while
    they come."""
    piece, held = b" " * 2**20, []

    def send():
        for _ in range(count):
            connection, left = connected(served, LARGEST), LARGEST - 1
            held.append(connection)
            while left > 0:
                left -= connection.send(piece[:left])

    thread = threading.Thread(target=send)
    thread.start()
    yield thread
    thread.join()
    for connection in held:
        connection.close()


@contextlib.contextmanager
def those_who_leave(served, count=8):
    """Clients that ask, and are gone before they are answered, again and again."""
    ended = threading.Event()

    def leave():
        while not ended.wait(0.02):
            with connected(served, 2) as connection:
                connection.sendall(b"{}")

    threads = [threading.Thread(target=leave) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()


def asked(served, count=50):
    """The seconds of healthy requests; each is answered, or refused with a reason."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        response = solve(served, "healthy")
        seconds.append(time.perf_counter() - began)
        assert response.status_code == 200 or response.json()["error"]["code"], response.text
    return seconds


def all_of_it(served):
    """The seconds of healthy requests alone, and beside each; and the memory that bodies took."""
    asked(served)
    memory = psutil.Process(served.process.pid).memory_info
    found, before = {"alone": asked(served)}, memory().rss
    with largest_bodies(served) as sending:
        beside = []
        while sending.is_alive():
            beside += asked(served, 1)
        found["bodies that come"] = beside
        found["bodies that are there"] = asked(served)
        taken = memory().rss - before
    with those_who_leave(served):
        found["those who leave"] = asked(served)
    for problem in ("host", "endless"):
        hang(served, problem)
        found[f"a batch that hangs: {problem}"] = asked(served)
    with largest_bodies(served) as sending, those_who_leave(served):
        sending.join()
        found["all of these"] = asked(served)
    found["alone but for what hangs"] = asked(served)
    return found, taken


def end(served):
    """The seconds from SIGTERM to the end; who asks meanwhile is told that it drains."""
    served.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    with httpx.Client(base_url=served.url, timeout=60) as other:  # over a new connection
        until(lambda: other.get("/readyz").status_code == 503)
        assert other.get("/readyz").json()["status"] == "draining"
    assert solve(served, "healthy").json()["error"]["code"] == "draining"
    served.process.wait(60)
    return time.monotonic() - began


@pytest.mark.slow
def test_beside_what_goes_wrong(tmp_path):
    with started(tmp_path) as served:
        found, taken = all_of_it(served)
        assert served.client.get("/healthz").status_code == 200  # (The batches have time left.)
        assert taken < 300 * 2**20
        assert all(statistics.median(x) < 5.0 for x in found.values())
        assert end(served) < DRAIN + 2.0
        assert served.process.returncode == 1


def main():
    with tempfile.TemporaryDirectory() as folder, started(Path(folder)) as served:
        found, taken = all_of_it(served)
        alone = statistics.median(found["alone"])
        for what, seconds in found.items():
            median, worst = statistics.median(seconds), max(seconds)
            print(f"{what}: {1e3 * median:.1f} ms ({median / alone:.2f}), worst {1e3 * worst:.1f}")
        print(f"bodies took {taken / 2**20:.0f} MiB; the end {end(served):.1f} s after SIGTERM")


if __name__ == "__main__":
    sys.exit(main())
