"""Clusters for the tests, on the loopback interface and any free port."""

import contextlib
import os
import threading
import time

import dask
import distributed

import ensembleode as eo
from ensembleode.executors.distributed.local import LOCAL, set_aside


@contextlib.contextmanager
def cluster(workers=2, *, environment=None, settings=None, **options):
    """A Dask cluster of the test's own, and its client."""
    environment = eo.worker_environment() | {"JAX_PLATFORMS": "cpu"} | (environment or {})
    settings = {
        "distributed.nanny.pre-spawn-environ": environment,
        "distributed.scheduler.no-workers-timeout": "60s",
        "distributed.deploy.lost-worker-timeout": "1h",
        **(settings or {}),
    }
    restore = set_aside(environment)
    try:
        with (
            dask.config.set(settings),
            distributed.LocalCluster(n_workers=workers, **{**LOCAL, **options}) as made,
            distributed.Client(made, set_as_default=False) as client,
        ):
            yield client
    finally:
        restore()


def worker_pids(client):
    # (Of one that was killed just now, the scheduler may not know yet.)
    return list(client.run(os.getpid, on_error="ignore").values())


class Killer(threading.Thread):
    """Kills a worker that has something to do by `signal`, every so often, until it is stopped."""

    def __init__(self, client, signal, *, after, every=1e9, most=1):
        super().__init__(daemon=True)
        self.client, self.signal, self.after, self.every = client, signal, after, every
        self.most, self.killed, self.stopped = most, 0, threading.Event()

    def run(self):
        self.stopped.wait(self.after)
        while not self.stopped.is_set() and self.killed < self.most:
            busy = [worker for worker, tasks in self.client.processing().items() if tasks]
            if not busy:
                self.stopped.wait(0.005)
                continue
            with contextlib.suppress(Exception):
                (pid,) = self.client.run(os.getpid, workers=busy[:1]).values()
                os.kill(pid, self.signal)
                self.killed += 1
            self.stopped.wait(self.every)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.join()


def after_tasks(alg, count, action, *args):
    """A thread that calls `action` when `count` more tasks of this algorithm are done."""
    before = alg.traffic().tasks

    def waiting():
        while alg.traffic().tasks < before + count:
            time.sleep(0.002)
        action(*args)

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    return thread


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
