"""Durable ensembles: drawn or sent, cancelled and resumed, and what is refused."""

import contextlib
import datetime
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import httpx
import msgpack
import numpy as np
import pytest

import ensembleode as eo

from ..test_store_damage import as_of_earlier
from .running import registry, Running, until
from .test_app import refused, unpacked


DRAWN = {
    "trajectories": 1000,
    "u0": {"low": [0.5, 0.5], "high": [2.0, 2.0]},
    "p": {"low": [1.0, 1.0, 1.0, 1.0], "high": [2.0, 2.0, 2.0, 2.0]},
    "seed": 7,
    "saveat": [0.5, 1.0],
}


def created(client, problem="lotka", headers=None, **body):
    response = client.post(f"/v1/problems/{problem}/ensembles", json=body, headers=headers)
    assert response.status_code == 202, response.text
    return response.json()


def ended(client, id, status="done"):
    """Wait until it is."""

    def has_ended():
        found = client.get(f"/v1/ensembles/{id}").json()
        assert found["status"] in ("queued", "running", status), found
        return found["status"] == status

    until(has_ended)
    return client.get(f"/v1/ensembles/{id}").json()


def download(client, id, **params):
    response = client.get(f"/v1/ensembles/{id}/download", params=params)
    assert response.status_code == 200, response.text
    found = msgpack.unpackb(response.content)
    return {k: unpacked(v) if isinstance(v, dict) and "data" in v else v for k, v in found.items()}


def test_an_ensemble_that_is_sent(running):
    """It has the bits of a request."""
    rng = np.random.default_rng(0)
    body = {
        "u0": rng.uniform(0.5, 2, (30, 2)).tolist(),
        "tspan": [[0.0, 1.0 + i / 30] for i in range(30)],
        "saveat": [[0.3, 0.5 + i / 60] for i in range(30)],
    }
    job = ended(running.client, created(running.client, **body)["id"])
    found = download(running.client, job["id"])
    answer = running.solve(**body).json()
    np.testing.assert_array_equal(found["u"], answer["u"])
    np.testing.assert_array_equal(found["t"], answer["t"])
    np.testing.assert_array_equal(found["stats"]["nf"]["shape"], [30])
    # What is kept is an ensemble's store, as any other.
    sim = eo.open_ensemble(running.service.jobs._folder / job["id"] / "ensemble.zarr")
    assert sim.converged
    np.testing.assert_array_equal(sim.u, found["u"])
    # Spans of different lengths, on a grid: the shorter ones end several times.
    del body["saveat"]
    job = ended(running.client, created(running.client, **body | {"saveat": 0.5})["id"])
    assert download(running.client, job["id"])["t"].shape == (30, 5)


@pytest.mark.slow
def test_the_network_of_the_registry(running):
    """Shared weights stay shared: the bits of a request without p."""
    u0 = np.random.default_rng(1).uniform(-1, 1, (20, 2)).tolist()
    job = ended(running.client, created(running.client, "node", u0=u0)["id"])
    answer = running.solve("node", u0=u0).json()
    np.testing.assert_array_equal(download(running.client, job["id"])["u"], answer["u"])


@pytest.mark.parametrize(
    ("body", "status", "path"),
    [
        ({"trajectories": 0}, 422, "trajectories"),
        ({"trajectories": "5"}, 422, "trajectories"),
        ({"trajectories": 10**8}, 413, "trajectories"),
        ({"trajectories": 5, "seed": -1}, 422, "seed"),
        ({"trajectories": 5, "u0": {"low": [1, 1]}}, 422, "u0"),
        ({"trajectories": 5, "u0": {"low": [1], "high": [2, 2]}}, 422, "u0.low"),
        ({"trajectories": 5, "u0": {"low": [1, 1], "high": [2, "x"]}}, 422, "u0.high[1]"),
        ({"trajectories": 5, "u0": {"low": [1, 2], "high": [2, 1]}}, 422, "u0.low[1]"),
        ({"trajectories": 5, "u0": {"low": [1, 2], "high": [2, 9]}}, 422, "u0.high[1]"),
        ({"trajectories": 5, "u0": [[1, 1], [2, 2]]}, 422, "trajectories"),
        ({"trajectories": 5, "x": 1}, 422, "x"),
        ({"trajectories": 5, "deadline_ms": 1}, 422, "deadline_ms"),
        ({"u0": [[1, 1]], "deadline_ms": 1}, 422, "deadline_ms"),
        ({"u0": [[1, 1], [1, 9]]}, 422, "u0[1][1]"),
    ],
)
def test_refusals(running, body, status, path):
    response = running.client.post("/v1/problems/lotka/ensembles", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["path"] == path


def test_what_is_not_there(running):
    for id in ("0" * 16, "x", "..%2f.."):
        url = f"/v1/ensembles/{id}"
        refused(running.client.get(url), 404, "not_found")
        refused(running.client.delete(url), 404, "not_found")
        refused(running.client.post(url + "/resume"), 404, "not_found")
        refused(running.client.get(url + "/download"), 404, "not_found")
    job = ended(running.client, created(running.client, **DRAWN)["id"])
    url = f"/v1/ensembles/{job['id']}/download"
    for params, path in (
        ({"start": -1}, "start"),
        ({"start": 1001}, "start"),
        ({"stop": 0}, "stop"),
        ({"start": "x"}, "start"),
        ({"format": "pickle"}, "format"),
    ):
        refused(running.client.get(url, params=params), 422, "invalid", path)


@pytest.mark.slow
def test_without_a_store(running):
    with Running(registry(), like=running) as other:
        response = other.client.post("/v1/problems/lotka/ensembles", json=DRAWN)
        refused(response, 404, "no_store")
        refused(other.client.get("/v1/ensembles"), 404, "no_store")


def slowed(monkeypatch, service, seconds=0.02):
    """Batches of jobs take that long."""
    run = service._in_background

    def slow(program, numbers):
        time.sleep(seconds)
        return run(program, numbers)

    monkeypatch.setattr(service.jobs, "_submit", slow)


@pytest.mark.slow
def test_cancelled_and_resumed(running, tmp_path, monkeypatch):
    whole = ended(running.client, created(running.client, **DRAWN)["id"])
    expected = download(running.client, whole["id"])["u"]
    with Running(registry(), like=running, store=tmp_path) as other:
        slowed(monkeypatch, other.service)
        client = other.client
        id = created(client, **DRAWN)["id"]
        waits = created(client, **DRAWN)["id"]
        until(lambda: client.get(f"/v1/ensembles/{id}").json()["done"] > 0)
        refused(client.get(f"/v1/ensembles/{waits}/download"), 409, "conflict")
        assert client.delete(f"/v1/ensembles/{waits}").json()["status"] == "cancelled"
        assert client.delete(f"/v1/ensembles/{id}").json()["status"] == "cancelled"
        until(lambda: other.service.jobs._current is None)
        job = client.get(f"/v1/ensembles/{id}").json()
        assert 0 < job["done"] < 1000
        assert (np.array(download(client, id)["retcode"]) == "Success").sum() == job["done"]
        assert client.post(f"/v1/ensembles/{id}/resume").json()["status"] == "queued"
        assert ended(client, id)["done"] == 1000
        np.testing.assert_array_equal(download(client, id)["u"], expected)
        assert client.post(f"/v1/ensembles/{id}/resume").json()["status"] == "done"
        assert client.get(f"/v1/ensembles/{waits}").json()["status"] == "cancelled"


@pytest.mark.slow
def test_a_job_goes_on_after_a_restart(running, tmp_path, monkeypatch):
    whole = ended(running.client, created(running.client, **DRAWN)["id"])
    expected = download(running.client, whole["id"])["u"]
    with Running(registry(), like=running, store=tmp_path) as first:
        slowed(monkeypatch, first.service)
        id = created(first.client, **DRAWN)["id"]
        waits = created(first.client, **DRAWN | {"trajectories": 10})["id"]
        until(lambda: first.client.get(f"/v1/ensembles/{id}").json()["done"] > 0)
    kept = json.loads((tmp_path / id / "job.json").read_text())
    assert kept["status"] == "running"
    with Running(registry(), like=running, store=tmp_path) as second:
        job = ended(second.client, id)
        assert job["done"] == 1000
        assert job["retcodes"] == {"Success": 1000}
        np.testing.assert_array_equal(download(second.client, id)["u"], expected)
        assert ended(second.client, waits)["done"] == 10


def test_jobs_are_their_owners(running, tmp_path):
    """To another token they are not there, after a restart as well; one key is another's, too."""
    tokens = {"tokens": ["one", "two"]}
    one, two = ({"Authorization": f"Bearer {x}"} for x in ("one", "two"))
    drawn = DRAWN | {"trajectories": 10}

    def hidden(client, id):
        url = f"/v1/ensembles/{id}"
        for method, path in (
            ("GET", url), ("DELETE", url), ("POST", f"{url}/cancel"), ("POST", f"{url}/resume"),
            ("GET", f"{url}/download"),
        ):  # fmt: skip
            refused(client.request(method, path, headers=two), 404, "not_found")
        assert id not in str(client.get("/v1/ensembles", headers=two).json())
        assert client.get(url, headers=one).json()["id"] == id

    with Running(registry(), like=running, store=tmp_path, **tokens) as first:
        keyed = {"Idempotency-Key": "mine"}
        id = created(first.client, headers=one | keyed, **drawn)["id"]
        assert created(first.client, headers=one | keyed, **drawn)["id"] == id
        other, url = drawn | {"seed": 1}, "/v1/problems/lotka/ensembles"
        refused(first.client.post(url, json=other, headers=one | keyed), 409, "conflict")
        assert created(first.client, headers=two | keyed, **drawn | {"seed": 1})["id"] != id
        hidden(first.client, id)
        until(lambda: first.client.get(f"/v1/ensembles/{id}", headers=one).json()["done"] == 10)
    kept = (tmp_path / id / "job.json").read_text()
    assert "Bearer" not in kept
    assert '"one"' not in kept
    # One of an older version has no owner, and is everybody's.
    old = json.loads(kept) | {"id": "0" * 16}
    del old["owner"]
    (tmp_path / old["id"]).mkdir()
    (tmp_path / old["id"] / "job.json").write_text(json.dumps(old))
    with Running(registry(), like=running, store=tmp_path, **tokens) as second:
        hidden(second.client, id)
        for mine in (one, two):
            found = second.client.get("/v1/ensembles", headers=mine).json()["ensembles"]
            assert old["id"] in [x["id"] for x in found]
            assert len(found) == 2
        deleted = second.client.delete(f"/v1/ensembles/{id}", headers=one)
        assert deleted.json()["status"] == "deleted"
    with Running(registry(), like=running, store=tmp_path) as open_to_all:
        assert len(open_to_all.client.get("/v1/ensembles").json()["ensembles"]) == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("format", [1, 2, 3])
def test_a_job_of_an_earlier_format(running, tmp_path, format):
    """It begins anew."""
    with Running(registry(), like=running, store=tmp_path) as first:
        id = ended(first.client, created(first.client, **DRAWN | {"trajectories": 10})["id"])["id"]
        expected = download(first.client, id)["u"]
    place = tmp_path / id / "ensemble.zarr"
    as_of_earlier(place, format)
    job = json.loads((tmp_path / id / "job.json").read_text())
    (tmp_path / id / "job.json").write_text(json.dumps(job | {"status": "running"}))
    with Running(registry(), like=running, store=tmp_path) as second:
        assert ended(second.client, id)["done"] == 10
        np.testing.assert_array_equal(download(second.client, id)["u"], expected)


@pytest.mark.slow
def test_the_clock_jumps_back(running, tmp_path, monkeypatch):
    """Jobs stay in the order in which they were made, page by page, and after a restart."""

    class Clock(datetime.datetime):
        years = iter((2030, 2001, 2020))

        @classmethod
        def now(cls, zone=None):
            return cls(next(cls.years), 1, 1, tzinfo=zone)

    drawn = DRAWN | {"trajectories": 10}
    with Running(registry(), like=running, store=tmp_path) as first:
        monkeypatch.setattr(datetime, "datetime", Clock)
        ids = [created(first.client, **drawn)["id"]]
        page = first.client.get("/v1/ensembles", params={"most": 1}).json()
        assert page["next"] is None
        ids += [created(first.client, **drawn)["id"] for _ in range(2)]
        for id in ids:
            ended(first.client, id)
    with Running(registry(), like=running, store=tmp_path) as second:
        found, after = [], ""
        while after is not None:
            page = second.client.get("/v1/ensembles", params={"most": 1, "after": after}).json()
            found += [x["id"] for x in page["ensembles"]]
            after = page["next"]
        assert found == ids


@pytest.mark.slow
def test_a_share_of_the_queue_for_each_token(running, tmp_path):
    one, two = ({"Authorization": f"Bearer {x}"} for x in ("one", "two"))
    with Running(registry(), like=running, store=tmp_path, tokens=["one", "two"]) as shared:
        jobs, let_go = shared.service.jobs, threading.Event()
        assert jobs._share == 50
        jobs._share, turn = 2, jobs._take_turn
        jobs._take_turn = lambda id: let_go.wait(60) and turn(id)
        drawn = DRAWN | {"trajectories": 10}
        ids = [created(shared.client, headers=one, **drawn)["id"] for _ in range(2)]
        full = shared.client.post("/v1/problems/lotka/ensembles", json=drawn, headers=one)
        refused(full, 429, "queue_full")
        ids.append(created(shared.client, headers=two, **drawn)["id"])
        let_go.set()
        until(lambda: all(job["status"] == "done" for job in jobs._jobs.values()))
        created(shared.client, headers=one, **drawn)
        assert len(set(ids)) == 3


def test_a_job_that_fails(running, tmp_path, monkeypatch):
    with Running(registry(), like=running, store=tmp_path) as other:

        def crash(program, numbers):
            raise ArithmeticError("secret")

        with monkeypatch.context() as context:
            context.setattr(other.service.jobs, "_submit", crash)
            id = created(other.client, **DRAWN)["id"]
            job = ended(other.client, id, "failed")
        assert "see the log" in job["error"]
        assert "secret" not in job["error"]
        other.client.post(f"/v1/ensembles/{id}/resume")
        assert ended(other.client, id)["error"] is None


@pytest.mark.slow
def test_requests_beside_a_job(running, tmp_path):
    """They are answered while it runs."""
    with Running(registry(), like=running, store=tmp_path) as other:
        id = created(other.client, **DRAWN | {"trajectories": 200_000})["id"]
        until(lambda: other.client.get(f"/v1/ensembles/{id}").json()["status"] == "running")
        expected = [running.solve(u0=[1 + i / 20, 1]).json()["u"] for i in range(20)]
        got = [other.solve(u0=[1 + i / 20, 1]).json()["u"] for i in range(20)]
        assert got == expected
        assert other.client.get(f"/v1/ensembles/{id}").json()["status"] == "running"
        other.client.delete(f"/v1/ensembles/{id}")


APP = """
import jax, jax.numpy as jnp, ensembleode as eo

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

def heavy(u, p, t):
    # (Slow, so that there is something to interrupt.)
    return jnp.array([p[0] * u[1], -p[0] * u[0]])

def registry():
    prob = eo.ODEProblem(heavy, jnp.array([1.0, 0.0]), (0.0, 1.0), jnp.array([3.0]))
    limits = eo.serve.Limits(saveat=8, maxiters=10**9)
    return eo.serve.Registry().add("heavy", prob, dt=DT, adaptive=False, limits=limits)
"""


class Process:
    """`ensembleode serve`, once it is ready."""

    def __init__(self, folder, *options, dt=1e-4, app=APP):
        (folder / "app.py").write_text(textwrap.dedent(app).replace("DT", repr(dt)))
        command = "from ensembleode.cli import main; main()"
        self.log = open(folder / "log", "a")  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                sys.executable, "-c", command, "serve", "app.py:registry", "--port", "0",
                "--store", str(folder / "ensembles"), "--max-batch", "128", *options,
            ],
            cwd=folder,
            stdout=self.log,
            stderr=self.log,
            env=os.environ | {"ENSEMBLEODE_TOKENS": "sesame"},
        )  # fmt: skip
        self.folder = folder

    def __enter__(self):
        began = (self.folder / "log").read_text().count("Uvicorn running")

        def url():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            lines = (self.folder / "log").read_text().splitlines()
            found = [x for x in lines if "Uvicorn running on" in x]
            return len(found) > began and found[-1].split("running on ")[1].split()[0]

        until(url)
        headers = {"Authorization": "Bearer sesame"}
        self.url = url()
        self.client = httpx.Client(base_url=self.url, timeout=60, headers=headers)
        try:
            until(lambda: self.client.get("/readyz").status_code == 200)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self.log.close()


JOB = {k: x for k, x in DRAWN.items() if k != "p"} | {"trajectories": 3000, "seed": 3}


@pytest.mark.slow
def test_sigterm_leaves_a_job_for_later(tmp_path):
    """With the numbers of one that ran on."""
    with Process(tmp_path) as first:
        id = created(first.client, "heavy", **JOB)["id"]
        until(lambda: first.client.get(f"/v1/ensembles/{id}").json()["done"] > 100)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0
    status = json.loads((tmp_path / "ensembles" / id / "job.json").read_text())["status"]
    assert status == "running"
    with Process(tmp_path) as second:
        other = created(second.client, "heavy", **JOB)["id"]
        assert ended(second.client, id)["retcodes"] == {"Success": 3000}
        ended(second.client, other)
        found, expected = (download(second.client, x)["u"] for x in (id, other))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "seed"), [(3, 0)])
def test_killed_at_random(tmp_path, kills, seed):
    """Whatever the process was doing, beginning a job or ending one, too: each job that it had
    taken ends, with the numbers of one that ran on, and what was done stays done."""
    rng = random.Random(seed)
    kinds = [JOB | {"trajectories": 600, "seed": i} for i in range(4)]
    folder = tmp_path / "killed"
    folder.mkdir()
    with Process(tmp_path) as served:
        ids = [created(served.client, "heavy", **x)["id"] for x in kinds]
        expected = [ended(served.client, id) and download(served.client, id)["u"] for id in ids]
    taken, done, sent = {}, set(), set()

    def status(client, id):
        return client.get(f"/v1/ensembles/{id}").json()["status"]

    def send(client, round, kind):
        sent.add((round, kind))
        key = {"Idempotency-Key": f"{round}, {kind}"}
        taken[created(client, "heavy", headers=key, **kinds[kind])["id"]] = kind

    for kill in range(kills):
        with Process(folder) as served:
            assert {x for x in taken if status(served.client, x) == "done"} >= done
            killer = threading.Timer(rng.uniform(0.0, 1.5), served.process.kill)
            killer.start()
            with contextlib.suppress(httpx.TransportError):
                for i in itertools.count():
                    # (One whose answer was not read is sent again.)
                    send(served.client, kill // 2, i % len(kinds))
                    done |= {x for x in taken if status(served.client, x) == "done"}
            killer.join()
    with Process(folder) as served:
        for id, kind in taken.items():
            assert ended(served.client, id)["retcodes"] == {"Success": 600}
            np.testing.assert_array_equal(download(served.client, id)["u"], expected[kind])
        listed = served.client.get("/v1/ensembles").json()["ensembles"]
        assert {x["id"] for x in listed} >= set(taken)
        assert len(listed) <= len(sent)  # a key has one job


@pytest.mark.slow
def test_sigterm_finishes_what_was_taken(tmp_path):
    """Requests that wait are answered; the process ends, with 0, within the bound."""
    import concurrent.futures

    with (
        Process(tmp_path, "--no-batching", dt=2e-7) as served,
        concurrent.futures.ThreadPoolExecutor(8) as threads,
    ):
        ask = {"u0": [[1.0, 0.0]] * 2}
        posts = [
            threads.submit(served.client.post, "/v1/problems/heavy/solve", json=ask)
            for _ in range(8)
        ]

        def taken():
            # (One runs.)
            text = served.client.get("/metrics").text
            return "ensembleode_queue_trajectories 14.0" in text

        until(taken)
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0
        assert time.monotonic() - began < 40
        assert [x.result().status_code for x in posts] == [200] * 8
        assert all(x.result().json()["retcode"] == ["Success"] * 2 for x in posts)
