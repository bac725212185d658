"""The service while things go wrong: batches that hang, large bodies, clients that disconnect."""

import contextlib
import select
import signal
import statistics
import subprocess
import sys
import threading
import time

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


def solve(served, problem, x=1.0):
    return served.client.post(f"/v1/problems/{problem}/solve", json={"u0": [x]})


def hang(served, problem):
    """Have a batch of it run that never returns."""

    def ask():
        with contextlib.suppress(httpx.HTTPError):
            solve(served, problem, 9.0)

    threading.Thread(target=ask, daemon=True).start()
    time.sleep(1.0)


# (In processes of their own, as who measures should not wait for them.)
OTHERS = f"""
import socket, sys, time

host, port, what = sys.argv[1:]

def connected(size):
    connection = socket.create_connection((host, int(port)), 60)
    head = (
        "POST /v1/problems/healthy/solve HTTP/1.1\\r\\nHost: x\\r\\n{TOKEN}\\r\\n"
        f"Content-Type: application/json\\r\\nContent-Length: {{size}}\\r\\n\\r\\n"
    )
    connection.sendall(head.encode())
    return connection

if what == "bodies":
    piece, held = b" " * 2**20, []
    for _ in range(60):
        held.append(connected({LARGEST}))
        left = {LARGEST} - 1
        while left:
            left -= held[-1].send(piece[:left])
    print("sent", flush=True)
    sys.stdin.read()
while True:
    with connected(2) as connection:
        connection.sendall(b"{{}}")
    time.sleep(0.02)
"""


@contextlib.contextmanager
def others(served, what, count=1):
    """Those who have sent all of sixty of the largest bodies but the last byte (or are at it); or
    clients that ask, and are gone before they are answered, again and again."""
    host, port = served.url.removeprefix("http://").split(":")
    command = [sys.executable, "-c", OTHERS, host, port, what]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(count)]
    try:
        yield processes[0].stdout
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def asked(served, count=50):
    """The seconds of healthy requests; each is answered, or refused with a reason."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        response = solve(served, "healthy")
        seconds.append(time.perf_counter() - began)
        assert response.status_code == 200 or response.json()["error"]["code"], response.text
    return seconds


@pytest.mark.slow
def test_beside_what_goes_wrong(tmp_path):
    with Process(tmp_path, "--drain-seconds", str(DRAIN), app=APP) as served:
        asked(served)
        memory = psutil.Process(served.process.pid).memory_info
        before, beside = memory().rss, []
        with others(served, "bodies") as sent:
            while not select.select([sent], [], [], 0)[0]:
                beside += asked(served, 1)
            found = [beside, asked(served)]
            taken = memory().rss - before
        with others(served, "leave", 8):
            time.sleep(1.0)
            found.append(asked(served))
        hang(served, "host")
        found.append(asked(served))
        with others(served, "bodies") as sent, others(served, "leave", 8):
            assert sent.readline() == b"sent\n"
            found.append(asked(served))
        hang(served, "endless")
        found.append(asked(served))
        assert served.client.get("/healthz").status_code == 200  # (The batches have time left.)
        assert taken < 300 * 2**20
        assert all(statistics.median(x) < 5.0 for x in found)
        # Who asks while it ends is told that it drains.
        served.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        with httpx.Client(base_url=served.url, timeout=60) as other:  # over a new connection
            until(lambda: other.get("/readyz").status_code == 503)
            assert other.get("/readyz").json()["status"] == "draining"
        assert solve(served, "healthy").json()["error"]["code"] == "draining"
        served.process.wait(60)
        assert time.monotonic() - began < DRAIN + 2.0
        assert served.process.returncode == 1
