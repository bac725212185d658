"""Jobs on disks that fail, and in processes that are replaced: none is lost, or stops unnoticed."""

import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import json
import logging
import os
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.serve.batcher import ItemResult
from ensembleode.serve.bodies import RefusedRequest
from ensembleode.serve.jobs import Jobs
from ensembleode.serve.solving import BatchSolver
from ensembleode.store.reading import ATTRIBUTES

from ..marks import slow_unless
from .running import registry, Running, until
from .test_app import refused


PROB = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.0]), (0.0, 1.0), jnp.array(0.5))
REGISTRY = eo.serve.Registry().add("decay", PROB, limits=eo.serve.Limits(saveat=4))
ENTRY = REGISTRY["decay"]
SOLVER = BatchSolver(ENTRY, max_batch=32)
BODY = {"trajectories": 40}


class Held(Jobs):
    """Without HTTP and a batcher; `pause()` is called before each batch."""

    def __init__(self, folder, **options):
        self.pause = lambda: None
        self.threads = concurrent.futures.ThreadPoolExecutor(1)
        super().__init__(folder, {"decay": SOLVER}, self._solved, **options)

    def _solved(self, program, numbers):
        def solved():
            self.pause()
            n, most = len(numbers.u0), program.most
            parts = [
                type(numbers)(*(None if x is None else x[i : i + most] for x in numbers))
                for i in range(0, n, most)
            ]
            return ItemResult([SOLVER.run(program, [part])[0] for part in parts], 0.0, 0.0)

        return self.threads.submit(solved)

    def made(self, key=None, **body):
        return self.create(ENTRY, BODY | body, key)["id"]

    def ended(self, id):
        until(lambda: self.status(id)["status"] not in ("queued", "running"), 60)
        until(lambda: self._current is None)
        return self.status(id)


@contextlib.contextmanager
def started(folder, **options):
    jobs = Held(folder, **options)
    jobs.start()
    try:
        yield jobs
    finally:
        jobs.stop(30)
        assert not jobs._thread.is_alive()


def begun(folder):
    """The id of a job that was interrupted."""
    with started(folder) as jobs:
        jobs.pause = lambda: time.sleep(0.02)
        id = jobs.made("mine", trajectories=3000)
        until(lambda: jobs.status(id)["done"] > 0)
    return id


def left_with(damage, folder):
    """One that was, and what its store then says of itself."""
    id = begun(folder)
    (folder / id / "ensemble.zarr" / ATTRIBUTES).write_text(damage)
    return id


class Faults:
    """Has the `wanted`th access to files below a folder fail (or the `wanted`th that writes), by
    what Python tells of all."""

    def __init__(self):
        self.folder, self.wanted, self.count, self.reads = None, None, 0, False

    def __call__(self, event, args):
        if self.folder is None or event not in ("open", "os.mkdir", "os.rename", "os.remove"):
            return
        if not os.fspath(args[0] if not isinstance(args[0], int) else "").startswith(self.folder):
            return
        if event == "open" and not self.reads and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self.count += 1
        if self.count == self.wanted:
            raise OSError(errno.EIO, "Input/output error", args[0])


FAULTS = Faults()
sys.addaudithook(FAULTS)  # which can't be taken away again


@contextlib.contextmanager
def fault(folder, wanted, reads):
    """Yields how many accesses there were."""
    FAULTS.wanted, FAULTS.count, FAULTS.reads, FAULTS.folder = wanted, 0, reads, str(folder)
    try:
        yield FAULTS
    finally:
        FAULTS.folder = None


# (Of what Zarr writes at once, it forgets the rest when one fails.)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    ("reads", "stride", "at_ends"),
    [(False, 40, 3), (True, 5, 1)],
)
def test_whichever_access_fails(tmp_path, caplog, reads, stride, at_ends):
    """Each access to a file in the life of a job fails once: the job is done, or has failed, or is
    not taken; by its key it can be had all the same, and those after it are done as well. (Of the
    hundred that are Zarr's some are enough by default.)"""
    # (Records would keep the tracebacks, and with them what is never awaited.)
    caplog.set_level(logging.CRITICAL, logger="ensembleode.serve")
    with started(tmp_path) as jobs:
        with fault(tmp_path, None, reads) as counted:
            id = jobs.made("first")
            assert jobs.ended(id)["status"] == "done"
        expected = b"".join(jobs.read(id, 0, None, True)[0])
        outcomes = []
        first = range(1, 10, at_ends)
        last = range(counted.count, counted.count - 6, -at_ends)
        for wanted in sorted({*first, *range(10, counted.count, stride), *last}):
            key = f"key {wanted}"
            with fault(tmp_path, wanted, reads):
                try:
                    id = jobs.made(key)
                    outcomes.append(jobs.ended(id)["status"])
                except OSError:
                    outcomes.append("not taken")
            assert not jobs.is_dead
            again = jobs.made(key)
            assert jobs.ended(again)["status"] == "done", (wanted, outcomes)
            assert b"".join(jobs.read(again, 0, None, True)[0]) == expected
            on_disk = json.loads((tmp_path / again / "job.json").read_text())
            assert (on_disk["status"], on_disk["done"]) == ("done", 40)
            assert jobs.status(again)["retcodes"] == {"Success": 40}
            jobs.delete(again)
            assert not (tmp_path / again).exists()
        # (Some are made up for: Zarr reads what may be there, say.)
        assert {"not taken", "failed"} <= set(outcomes)
    gc.collect()  # while that is expected


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["", *("{", "[]", '{"zarr_format": 3}')])
def test_metadata_that_are_lost(tmp_path, damage):
    """Are written again, and the job goes on."""
    id = left_with(damage, tmp_path)
    with started(tmp_path) as jobs:
        assert jobs.ended(id)["status"] == "done"
        assert jobs.status(id)["retcodes"] == {"Success": 3000}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ['{"node_type": "array"}', '{"node_type": "group"}'])
def test_a_damaged_store(tmp_path, damage):
    """Its job fails; the next one is done; deleted, it can be had again."""
    id = left_with(damage, tmp_path)
    with started(tmp_path) as jobs:
        assert jobs.ended(id)["status"] == "failed"
        assert jobs.ended(jobs.made())["status"] == "done"
        assert not jobs.is_dead
        assert jobs.delete(id)["status"] == "deleted"
        assert jobs.ended(jobs.made("mine", trajectories=3000))["status"] == "done"


DAMAGES = ["", '{"id": "ID"}', "a folder"]
DAMAGES += [slow_unless(False, x) for x in ("{", "[]", "{}", "\udcff")]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_job(tmp_path, damage, caplog):
    """It is left as it is, and out; the others are there."""
    with started(tmp_path) as jobs:
        whole, broken = jobs.made("whole"), jobs.made("broken")
        jobs.ended(broken)
    path = tmp_path / broken / "job.json"
    content = damage.replace("ID", broken).encode(errors="surrogateescape")
    if damage == "a folder":  # which is an OSError when it is read
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    with started(tmp_path) as jobs:
        assert [job["id"] for job in jobs.page()["ensembles"]] == [whole]
        assert str(path) in caplog.text
        with pytest.raises(RefusedRequest, match="can't be read"):
            jobs.made("broken")
        assert jobs.ended(jobs.made("another"))["status"] == "done"
    assert path.is_dir() if damage == "a folder" else path.read_bytes() == content
    assert (path.parent / "ensemble.zarr").exists()


@pytest.mark.slow
def test_one_process_at_a_time_has_the_folder(tmp_path, caplog):
    """The new one of two waits until the old one has ended, and goes on with its jobs."""
    with contextlib.ExitStack() as stack:
        old = Held(tmp_path)
        old.start()
        stack.callback(old.stop, 30)
        let_go = threading.Event()
        let_go.set()
        stack.callback(let_go.set)
        old.pause = lambda: let_go.wait(60)
        id = old.made(trajectories=3000)
        until(lambda: old.status(id)["done"] > 0)
        let_go.clear()
        new = stack.enter_context(started(tmp_path))
        for ask in (lambda: new.status(id), new.page, new.made, lambda: new.delete(id)):
            with pytest.raises(RefusedRequest) as raised:
                ask()
            assert raised.value.status == 503
        assert "another process has the ensembles" in caplog.text
        assert not new.is_dead
        assert old.status(id)["status"] == "running"
        let_go.set()
        old.stop(30)
        until(lambda: new.is_open)
        done = new.ended(id)
        assert (done["status"], done["done"]) == ("done", 3000)
        with pytest.raises(RefusedRequest):
            old.cancel(id)


@pytest.mark.slow
def test_a_release_in_between(tmp_path, monkeypatch, caplog):
    """The store of other versions is dropped, and the job done from the beginning."""
    id = begun(tmp_path)
    monkeypatch.setattr("ensembleode.ground.version.__version__", "99.9")
    with started(tmp_path) as jobs:
        done = jobs.ended(id)
        assert (done["status"], done["done"], done["error"]) == ("done", 3000, None)
        assert done["retcodes"] == {"Success": 3000}
        assert "begins anew" in caplog.text
        assert jobs.made("mine", trajectories=3000) == id
        assert jobs.status(id)["status"] == "done"


@pytest.mark.slow
def test_another_problem_in_between(tmp_path, monkeypatch):
    """Its store is not dropped: the job fails, until it is deleted."""
    id = begun(tmp_path)
    other = eo.serve.Registry().add("decay", eo.remake(PROB, f=lambda u, p, t: -2 * p * u))
    with monkeypatch.context() as context:
        context.setattr(SOLVER, "entry", other["decay"])
        with started(tmp_path) as jobs:
            assert jobs.ended(id)["status"] == "failed"
    with started(tmp_path) as jobs:  # as it was
        assert jobs.status(id)["status"] == "failed"
        jobs.resume(id)
        assert jobs.ended(id)["status"] == "done"
        # A key whose job failed works again.
        jobs.pause = lambda: 1 / 0
        failed = jobs.made("again")
        assert jobs.ended(failed)["status"] == "failed"
        jobs.pause = lambda: None
        assert jobs.made("again") == failed
        assert jobs.ended(failed)["status"] == "done"


def test_deleted(tmp_path):
    with started(tmp_path, queued=3) as jobs:
        solving, let_go = threading.Event(), threading.Event()

        def pause():
            solving.set()
            assert let_go.wait(60)

        jobs.pause = pause
        running = jobs.made(trajectories=3000)
        assert solving.wait(60)
        waits = jobs.made()
        assert jobs.delete(waits)["status"] == "cancelled"
        assert jobs.delete(waits)["status"] == "deleted"
        assert jobs.cancel(running)["status"] == "cancelled"
        with pytest.raises(RefusedRequest) as raised:  # it waits for its batch still
            jobs.delete(running)
        assert (raised.value.status, raised.value.code) == (503, "stopping")
        let_go.set()
        until(lambda: jobs._current is None)
        assert jobs.delete(running)["status"] == "deleted"
        with pytest.raises(RefusedRequest) as raised:
            jobs.delete(running)
        assert raised.value.status == 404
        assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.lock"]
    with started(tmp_path) as jobs:
        assert jobs.page()["ensembles"] == []


def test_deleted_and_made_again(tmp_path, monkeypatch):
    """While the old one is being removed, and after that was interrupted."""
    from ensembleode.serve import jobs as module

    remove, trash = module.remove_folder, []
    monkeypatch.setattr(module, "remove_folder", trash.append)
    with started(tmp_path) as jobs:
        id = jobs.made("mine")
        jobs.ended(id)
        jobs.delete(id)
        assert jobs.made("mine") == id
        remove(trash[0])
        assert jobs.ended(id)["status"] == "done"
        jobs.delete(id)
    monkeypatch.undo()
    assert trash[1].exists()
    with started(tmp_path) as jobs:
        assert jobs.page()["ensembles"] == []
    assert not trash[1].exists()


@pytest.mark.slow
def test_pages(tmp_path):
    with started(tmp_path) as jobs:
        ids = [jobs.made() for _ in range(7)]
        found, after = [], ""
        while after is not None:
            page = jobs.page(after, 3)
            assert len(page["ensembles"]) <= 3
            found += [job["id"] for job in page["ensembles"]]
            after = page["next"]
            if len(found) == 3:  # one that is gone meanwhile is no place to go on from
                jobs.ended(found[-1])
                jobs.delete(found[-1])
        assert found == ids


def test_few_are_queued(tmp_path):
    with started(tmp_path, queued=3) as jobs:
        let_go = threading.Event()
        jobs.pause = lambda: let_go.wait(60)
        ids = [jobs.made(f"{i}") for i in range(3)]
        with pytest.raises(RefusedRequest) as raised:
            jobs.made("3")
        assert (raised.value.status, raised.value.code) == (429, "queue_full")
        assert jobs.made("2") == ids[2]
        let_go.set()
        for id in ids:
            jobs.ended(id)
        assert jobs.ended(jobs.made("3"))["status"] == "done"


def test_a_store_has_its_limit(tmp_path):
    limits = eo.serve.Limits(saveat=4, store=16_000)
    entry = eo.serve.Registry().add("decay", PROB, limits=limits)["decay"]
    with started(tmp_path) as jobs:
        jobs.create(entry, {"trajectories": 1000}, None)
        for body in ({"trajectories": 1001}, {"trajectories": 900, "saveat": 0.4}):
            with pytest.raises(RefusedRequest) as raised:
                jobs.create(entry, body, None)
            assert (raised.value.status, raised.value.code) == (413, "limit_store")
        assert "500 at most" in raised.value.message


def test_health(running, tmp_path, monkeypatch):
    """Whatever has ended that shouldn't have."""
    with Running(registry(), like=running, store=tmp_path) as mine:
        assert mine.client.get("/healthz").json() == {"status": "ok"}
        assert mine.solve().status_code == 200

        def dead():
            response = mine.client.get("/healthz")
            return response.status_code, response.json().get("dead")

        thread = mine.service.jobs._thread
        mine.service.jobs._queue.put(None)
        thread.join(30)
        assert dead() == (503, ["ensembles"])
        (runner,) = mine.service.batcher._runners.values()
        with monkeypatch.context() as context:
            context.setattr(runner, "thread", threading.Thread(target=lambda: None))
            assert dead() == (503, ["batcher", "ensembles"])
        assert dead() == (503, ["ensembles"])
        loop = mine.service._loop
        asyncio.run_coroutine_threadsafe(_cancelled(mine.service.batcher._task), loop).result(30)
        assert dead() == (503, ["batcher", "ensembles"])


async def _cancelled(task):
    task.cancel()
    await asyncio.wait([task])


def test_two_services(running, tmp_path):
    """The second serves requests, and says that it waits with ensembles."""
    with (
        Running(registry(), like=running, store=tmp_path) as old,
        Running(registry(), like=running, store=tmp_path) as new,
    ):
        until(lambda: old.service.jobs.is_open)
        answer = {"status": "ready", "ensembles": "waiting for another process"}
        assert new.client.get("/readyz").json() == answer
        assert new.client.get("/healthz").status_code == 200
        assert new.solve().status_code == 200
        refused(new.client.get("/v1/ensembles"), 503, "ensembles_not_ready")
        old.stop()
        until(lambda: new.client.get("/readyz").json() == {"status": "ready"})
        assert new.client.get("/v1/ensembles").json() == {"ensembles": [], "next": None}


@pytest.mark.slow
def test_deleted_over_http(running, tmp_path):
    body = {"trajectories": 10, "u0": {"low": [0.5, 0.5], "high": [2.0, 2.0]}}
    with (
        Running(registry(), like=running, store=tmp_path) as mine,
        eo.Client(mine.url) as client,
    ):
        job = client.submit("lotka", trajectories=10, u0=([0.5, 0.5], [2.0, 2.0]))
        sim = job.result()
        assert np.isfinite(sim.elapsed)
        assert job.status()["seconds"] > 0
        assert job.cancel()["status"] == "done"
        assert (tmp_path / job.id).exists()
        job.delete()
        assert not (tmp_path / job.id).exists()
        with pytest.raises(eo.ServiceError, match="no such ensemble"):
            job.status()
        # The page of another site can't do it (a form can't send JSON, but needs no body here).
        mine.client.post("/v1/problems/lotka/ensembles", json=body)
        (job,) = client.jobs()
        job.wait()
        url = f"/v1/ensembles/{job.id}"
        elsewhere = {"Origin": "https://evil.example"}
        for method, path in (("DELETE", url), ("POST", f"{url}/resume"), ("POST", f"{url}/cancel")):
            response = mine.client.request(method, path, headers=elsewhere)
            refused(response, 403, "cross_origin")
        own = {"Origin": mine.url}
        assert mine.client.delete(url, headers=own).json()["status"] == "deleted"
