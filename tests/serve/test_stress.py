"""Overload, late requests, crashes and disconnecting clients: others don't suffer from them."""

import asyncio
import collections
import contextlib
import gc
import json
import os
import random
import threading
import time

import httpx
import numpy as np
import psutil
import pytest

from ensembleode.serve import service

from .running import held_back, registry, Running, until
from .test_app import refused, without_seconds
from .test_http11 import Connection, request


@pytest.fixture
def held(running, monkeypatch):
    """A service with a small queue, whose batches wait to be let go, and may crash."""
    with Running(registry(), like=running, queue=20, max_wait_ms=0.0) as held:
        run = held.service._run

        def crash(program, slices):
            if any((s.payload.u0 == 3.25).any() for s in slices):
                raise ArithmeticError("u0=3.25")
            return run(program, slices)

        held.service.batcher._run = crash
        held.let_go = held_back(held.service)
        held.posts = []
        yield held
        held.let_go.set()
        for thread in held.posts:
            thread.join(30)


def post(held, n=1, x=1.0, **body):
    """Ask from a thread; the list that the response will be in."""
    got = []
    thread = threading.Thread(target=lambda: got.append(held.solve(u0=[[x, 1.0]] * n, **body)))
    thread.start()
    held.posts.append(thread)
    return got


def occupied(held):
    """Have a batch run, so that what comes waits."""
    got = post(held)
    until(lambda: held.service.batcher._running)
    return got


def test_a_full_queue(held):
    first = occupied(held)
    waits = [post(held, 10), post(held, 10)]
    until(lambda: held.service.batcher.waiting == 20)
    assert "ensembleode_queue_trajectories 20.0" in held.client.get("/metrics").text
    response = held.solve(u0=[[1, 1]])
    refused(response, 429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    held.let_go.set()
    until(lambda: all([first, *waits]))
    assert {x[0].status_code for x in [first, *waits]} == {200}
    assert held.solve(u0=[[1, 1]]).status_code == 200


def test_a_deadline(held):
    first = occupied(held)
    began = time.monotonic()
    refused(held.solve(deadline_ms=50), 504, "deadline")
    assert time.monotonic() - began < 5
    until(lambda: held.service.batcher.waiting == 0)
    held.let_go.set()
    until(lambda: first)
    assert first[0].status_code == 200
    assert held.solve(deadline_ms=60_000).status_code == 200


def test_a_crash(held, caplog):
    """Who caused it is told an id, which the log has; others of the batch are answered."""
    first = occupied(held)
    bad, *others = [post(held, x=x) for x in (3.25, 1.5, 2.5)]
    until(lambda: held.service.batcher.waiting == 3)
    held.let_go.set()
    until(lambda: all([first, bad, *others]))
    assert [x[0].status_code for x in [first, *others]] == [200] * 3
    assert refused(bad[0], 500, "batch_failed")["id"] in caplog.text
    assert held.solve().status_code == 200
    assert held.client.get("/readyz").status_code == 200


def test_something_unforeseen(running, monkeypatch, caplog):
    def crash(*_):
        raise ArithmeticError("secret")

    monkeypatch.setattr(running.service, "solver", crash)
    error = refused(running.solve(), 500, "internal")
    assert "secret" not in error["message"]
    assert error["id"] in caplog.text


@pytest.mark.parametrize("chunked", [False, True])
def test_those_who_leave(held, chunked):
    """Their trajectories are dropped, whichever way their request went."""
    first = occupied(held)
    body = json.dumps({"u0": [[1, 1]] * 15}).encode()
    with Connection(held) as connection:
        connection.socket.sendall(request(chunks=[body]) if chunked else request(body))
        until(lambda: held.service.batcher.waiting == 15)
    until(lambda: held.service.batcher.waiting == 0)
    held.let_go.set()
    until(lambda: first)
    assert first[0].status_code == 200


def test_a_batch_that_hangs(running):
    """Who waits for it is told, and who asks for its problem; others are answered; and `/healthz`
    says so until it returns."""
    with Running(registry(), like=running, max_wait_ms=0.0, batch_seconds=0.5) as held:
        let_go, held.posts = held_back(held.service, "lotka"), []
        mine = post(held)
        until(lambda: held.service.batcher._running)
        waits = post(held, p=[1.0, 1.0, 1.0, 1.0])
        assert held.solve("node").status_code == 200
        until(lambda: mine and waits)
        refused(mine[0], 504, "hung")
        refused(waits[0], 503, "hung")
        error = refused(held.solve(), 503, "hung")
        assert "lotka" in error["message"]
        assert held.solve("node").status_code == 200
        health = held.client.get("/healthz")
        assert (health.status_code, health.json()["dead"]) == (503, ["batches of lotka"])
        ready = held.client.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "hung": ["lotka"]})
        let_go.set()
        until(lambda: held.client.get("/healthz").status_code == 200)
        assert held.solve().status_code == 200
        assert held.service.batcher.waiting == 0


def test_large_bodies_have_their_room(running, monkeypatch):
    """By what they say, and by what comes, of a token and of all; small ones are not among them."""
    monkeypatch.setattr(service, "BODIES", (300_000, 200_000))
    with Running(registry(), like=running, tokens=["one", "two", "three"]) as guarded:

        def begun(stack, token, size, chunked=False):
            """A request whose body doesn't end yet."""
            connection = stack.enter_context(Connection(guarded))
            more = [f"Authorization: Bearer {token}"]
            if chunked:
                begins = request(chunks=[b" " * size], more=more)[: -len(b"\r\n0\r\n\r\n")]
            else:
                begins = request(b" " * size, more=more)[: 1 - size]
            connection.socket.sendall(begins)
            return connection

        def small():
            headers = {"Authorization": "Bearer one"}
            return guarded.client.post("/v1/problems/lotka/solve", json={}, headers=headers)

        def held():
            return guarded.service.bodies.total

        with contextlib.ExitStack() as stack:
            begun(stack, "one", 120_000)
            until(lambda: held() == 120_000)
            # Of the same token there is no more room, whichever way it is sent.
            for chunked in (False, True):
                status, headers, body = begun(stack, "one", 100_000, chunked).answer()
                assert (status, headers["retry-after"]) == (429, "1")
                assert b"bodies_full" in body
            begun(stack, "two", 120_000)
            until(lambda: held() == 240_000)
            assert begun(stack, "three", 100_000).answer()[0] == 429
            assert small().status_code == 200
        until(lambda: held() == 0)
        with contextlib.ExitStack() as stack:
            begun(stack, "three", 100_000, chunked=True)
            until(lambda: held() >= 100_000)


def test_draining(held):
    """What waits is answered, what comes then is refused."""
    got = [occupied(held), post(held), post(held)]
    until(lambda: held.service.batcher.waiting == 2)
    held.service.begin_draining()
    assert held.client.get("/readyz").json() == {"status": "draining"}
    refused(held.solve(), 503, "draining")
    stopping = threading.Thread(target=held.stop)
    stopping.start()
    time.sleep(0.2)
    held.let_go.set()
    stopping.join(30)
    until(lambda: all(got))
    assert {x[0].status_code for x in got} == {200}


BAD = [
    (422, {"u0": [1, 9]}),
    (422, {"u0": [1, "x"]}),
    (422, {"u0": [1, 2, 3]}),
    (422, {"saveat": [0.5, 0.1]}),
    (422, {"nonsense": 1}),
    (413, {"u0": [[1, 1]] * 65}),
]


def load(running, requests, seed=0):
    """How many of each status there were of distinct requests that came again and again, 1% of them
    bad; every answer was the one of that request alone."""
    rng = np.random.default_rng(seed)
    pool = [("lotka", {"u0": rng.uniform(0.5, 2, 2).tolist(), "saveat": 0.5}) for _ in range(50)]
    pool += [("node", {"u0": rng.uniform(-2, 2, 2).tolist()}) for _ in range(50)]
    alone = [without_seconds(running.solve(problem, **body)) for problem, body in pool]
    statuses = collections.Counter()
    choose = random.Random(seed)

    async def client(http, count):
        for _ in range(count):
            if choose.random() < 0.01:
                status, body = choose.choice(BAD)
                response = await http.post("/v1/problems/lotka/solve", json=body)
                assert response.status_code == status
            else:
                i = choose.randrange(len(pool))
                problem, body = pool[i]
                response = await http.post(f"/v1/problems/{problem}/solve", json=body)
                assert without_seconds(response) == alone[i]
            statuses[response.status_code] += 1

    async def drive():
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=running.url, timeout=60, limits=limits) as http:
            await asyncio.gather(*(client(http, requests // 50) for _ in range(50)))

    asyncio.run(drive())
    return statuses


@pytest.mark.slow
def test_many_requests(running):
    """1% of them bad: no wrong answer, none lost, the bad ones refused. (10^5 of them, as
    `ENSEMBLEODE_REQUESTS` says; `benchmarks/service.py` has more.)"""
    n = int(os.environ.get("ENSEMBLEODE_REQUESTS", "4000"))
    statuses = load(running, n)
    assert statuses.total() == n
    assert 0.005 < (statuses[422] + statuses[413]) / n < 0.02


@pytest.mark.slow
def test_memory_is_level(running):
    process = psutil.Process()
    load(running, 1500)
    gc.collect()
    before = process.memory_info().rss
    for seed in range(2):
        load(running, 1500, seed)
    gc.collect()
    assert process.memory_info().rss - before < 40 * 2**20
