"""Ensembles whose processes die: real processes, by real signals."""

import functools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import dask
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed.comm import CommClosedError

import ensembleode as eo
from ensembleode.executors.distributed import worker
from ensembleode.executors.distributed.pools import DaskPool, ExecutorPool, WorkersDiedError

from ..problems import lotka_volterra
from .clusters import after_tasks, cluster, Killer, wait_until, worker_pids


N = 1500
OPTIONS = {"trajectories": N, "saveat": 0.5, "abstol": 1e-11, "reltol": 1e-11}


def ensemble(u0=None, tspan=(0.0, 40.0)):
    start = jnp.array([1.0, 1.0]) if u0 is None else u0
    prob = eo.ODEProblem(lotka_volterra, start, tspan, jnp.array([1.5, 1.0, 3.0, 1.0]))
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / N))
    )


LONG = (0.0, 250.0)  # (a second, by two workers)


def solved(u0, alg):
    return eo.solve(ensemble(u0, LONG), eo.Tsit5(), alg, **OPTIONS).u


@functools.partial(jax.jit, static_argnums=1)
def gradient(u0, alg):
    return jax.grad(lambda u0: (solved(u0, alg) ** 2).sum())(u0)


@pytest.fixture(scope="module")
def serial():
    return eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleSerial(), **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("run", [solved, gradient])
def test_a_worker_is_killed(run):
    """In mid-solve, forwards and backwards: the same bits as without."""
    u0 = jnp.array([1.0, 1.0])
    with cluster() as client:
        alg = eo.EnsembleDistributed(client)
        undisturbed = jax.block_until_ready(run(u0, alg))
        before = set(worker_pids(client))
        with Killer(client, signal.SIGKILL, after=0.05) as killer:
            np.testing.assert_array_equal(run(u0, alg), undisturbed)
            assert killer.killed == 1
        wait_until(lambda: len(worker_pids(client)) == 2)
        assert set(worker_pids(client)) != before
    # (A gradient is a sum of the chunks' sums.)
    serial = run(u0, eo.EnsembleSerial())
    np.testing.assert_allclose(undisturbed, serial, rtol=0 if run is solved else 1e-12)


@pytest.mark.slow
def test_twenty_random_kills():
    """10^5 trajectories: nothing lost, and nothing computed wrong."""
    options = {**OPTIONS, "trajectories": 100_000, "saveat": 20.0}
    expected = eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleSerial(), **options)
    with (
        cluster() as client,
        Killer(client, signal.SIGKILL, after=1, every=1.0, most=20) as killer,
    ):
        while killer.killed < 20:
            sim = eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleDistributed(client), **options)
            np.testing.assert_array_equal(sim.u, expected.u)
            np.testing.assert_array_equal(sim.retcode, expected.retcode)
            np.testing.assert_array_equal(sim.stats.nf, expected.stats.nf)


def poisoned(x):
    if (x > 3.0).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def raising(x):
    if (x > 3.0).any():
        raise RuntimeError("a table ends at 3")
    return x


def with_callback(host, n=600, poison=300):
    """The solution is `exp(-t)`; trajectory `poison` (and no other) calls the host with 4."""

    def f(u, p, t):
        q = jax.pure_callback(
            host, jax.ShapeDtypeStruct(p.shape, p.dtype), p, vmap_method="expand_dims"
        )
        return -u * jnp.minimum(q, 1.0)

    prob = eo.ODEProblem(f, jnp.ones(1), (0.0, 1.0), jnp.array(1.0))
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=jnp.where(ctx.index == poison, 4.0, 1.0))
    )


@pytest.mark.slow
def test_poison(caplog):
    """A chunk that kills every worker it meets is lost, and no other trajectory."""
    ens = with_callback(poisoned)
    with cluster(settings={"distributed.scheduler.allowed-failures": 0}) as client:
        alg = eo.EnsembleDistributed(client)
        sim = eo.solve(ens, eo.Tsit5(), alg, trajectories=600)
        lost = np.arange(256, 384)
        np.testing.assert_array_equal(sim.failed, lost)
        assert (sim.retcode[lost] == eo.ReturnCode.Failure).all()
        assert np.isnan(sim.u[lost]).all()
        rest = np.setdiff1d(np.arange(600), lost)
        np.testing.assert_allclose(sim.u[rest, -1, 0], np.exp(-1), rtol=1e-3)
        assert "trajectories 256 to 383 are given up" in caplog.text
        with pytest.raises(eo.EnsembleError, match="256 to 383 are lost: the workers that ran it"):
            eo.solve(ens, eo.Tsit5(), alg, trajectories=600, throw=True)


@pytest.mark.slow
def test_poison_time_and_again():
    """On a cluster of our own, too."""
    with eo.EnsembleDistributed(workers=2) as alg:
        for _ in range(2):
            sim = eo.solve(with_callback(poisoned), eo.Tsit5(), alg, trajectories=600)
            np.testing.assert_array_equal(sim.failed, np.arange(256, 384))


@pytest.mark.slow
def test_what_the_host_raises():
    """The error of a callback, and what was computed before."""
    with cluster() as client, pytest.raises(Exception, match="a table ends at 3") as caught:
        eo.solve(
            with_callback(raising), eo.Tsit5(), eo.EnsembleDistributed(client), trajectories=600
        )
    sim = caught.value.solution
    assert set(np.unique(sim.retcode)) <= {0, 1}
    assert (sim.retcode[256:384] == eo.ReturnCode.Default).all()


SCHEDULER = """
import sys, time
sys.path.insert(0, {path!r})
import jax
jax.config.update("jax_enable_x64", True)
from tests.executors.clusters import cluster
if __name__ == "__main__":
    with cluster() as client:
        print(client.scheduler.address, flush=True)
        time.sleep(600)
"""


def python(tmp_path, code, **options):
    """A Python process that runs this code, from a file, as spawned ones want it."""
    path = tmp_path / "script.py"
    path.write_text(code.format(path=os.path.dirname(os.path.dirname(os.path.dirname(__file__)))))
    how = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, **options}
    return subprocess.Popen([sys.executable, str(path)], **how)


@pytest.mark.slow
def test_the_scheduler_is_killed(tmp_path):
    """One clear error, with what was computed."""
    process = python(tmp_path, SCHEDULER)
    alg = eo.EnsembleDistributed(process.stdout.readline().strip())
    ens, options = ensemble(tspan=LONG), {**OPTIONS, "trajectories": 15_000}
    # (For so long its client tries to reach a scheduler again.)
    with dask.config.set({"distributed.comm.timeouts.connect": "2s"}):
        eo.solve(ens, eo.Tsit5(), alg, **{**options, "trajectories": 256})
    after_tasks(alg, 8, os.killpg, process.pid, signal.SIGKILL)
    with pytest.raises(eo.ClusterError, match="the scheduler of the cluster at tcp://") as caught:
        eo.solve(ens, eo.Tsit5(), alg, **options)
    process.wait()
    process.stdout.close()
    alg.close()
    done = caught.value.solution.retcode == eo.ReturnCode.Success
    assert 0 < done.sum() < 15_000
    all_of_them = eo.solve(ens, eo.Tsit5(), eo.EnsembleThreads(), **options)
    np.testing.assert_array_equal(caught.value.solution.u[done], all_of_them.u[done])


@pytest.mark.slow
def test_the_connection_breaks_while_a_result_comes(monkeypatch):
    """Where the scheduler dies just then, Dask's own error comes first."""

    def broken(*_):
        raise CommClosedError("in <TCP (closed)>: Connection reset by peer")

    monkeypatch.setattr(DaskPool, "_gathered", broken)
    with (
        cluster(1) as client,
        pytest.raises(eo.ClusterError, match=r"the scheduler of the cluster at tcp://\S+ is gone"),
    ):
        eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleDistributed(client), **OPTIONS)


@pytest.mark.slow
def test_all_workers_are_lost():
    with cluster() as client:
        alg = eo.EnsembleDistributed(client)
        ens, options = ensemble(tspan=LONG), {**OPTIONS, "trajectories": 30_000}
        eo.solve(ens, eo.Tsit5(), alg, **{**options, "trajectories": 256})
        with dask.config.set({"distributed.scheduler.no-workers-timeout": "1s"}):
            after_tasks(alg, 8, client.cluster.scale, 0)
            with pytest.raises(eo.ClusterError, match=r"all workers of the cluster at .* are gone"):
                eo.solve(ens, eo.Tsit5(), alg, **options)


@pytest.mark.slow
def test_workers_are_out_of_memory():
    """Killed for it by Dask, whatever they are given: one trajectory is too much."""
    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(80_000), (0.0, 1.0))
    settings = {"distributed.scheduler.allowed-failures": 0}
    with cluster(1, settings=settings, memory_limit="1 GiB") as client:
        with pytest.raises(eo.ClusterError, match="The usual cause is memory") as caught:
            eo.solve(
                eo.EnsembleProblem(prob),
                eo.Tsit5(),
                eo.EnsembleDistributed(client),
                trajectories=3,
                saveat=np.linspace(0, 1, 1_000),
            )
        assert "the workers that ran it died" in str(caught.value)


def test_a_worker_says_that_it_is_out_of_memory(monkeypatch):
    def solved(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 80 GB")

    monkeypatch.setattr(worker, "_solved", solved)
    with (
        ThreadPoolExecutor(1) as executor,
        pytest.raises(eo.ClusterError, match="ran out of memory, solving 64 trajectories at a"),
    ):
        eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleDistributed(executor), **OPTIONS)


@pytest.mark.slow
def test_an_executor_breaks(monkeypatch, serial):
    """Nobody can replace its workers; what they did is kept."""
    for name, value in eo.worker_environment().items():
        monkeypatch.setenv(name, value)
    long, options = ensemble(tspan=LONG), {**OPTIONS, "trajectories": 30_000}
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        alg = eo.EnsembleDistributed(executor)
        sim = eo.solve(ensemble(), eo.Tsit5(), alg, **OPTIONS)
        np.testing.assert_array_equal(sim.u, serial.u)
        pid = next(iter(executor._processes))
        after_tasks(alg, 8, os.kill, pid, signal.SIGKILL)
        with pytest.raises(eo.ClusterError, match=r"the executor .* can't run anything") as caught:
            eo.solve(long, eo.Tsit5(), alg, **options)
        assert (caught.value.solution.retcode == eo.ReturnCode.Success).sum() > 0
        with pytest.raises(eo.ClusterError, match=r"the executor .* can't run anything"):
            eo.solve(ensemble(), eo.Tsit5(), alg, **options)


class Breaking(ThreadPoolExecutor):
    """Takes so many tasks."""

    left = 0

    def submit(self, fn, payload):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no more")
        return super().submit(fn, payload)


def test_stopped_among_reruns(tmp_path, monkeypatch):
    """What was still to be rerun is not done, in a store or out of it."""
    # A chunk a task: five to begin with, and three for the reruns.
    sizes = sys.modules["ensembleode.executors.distributed.dispatch"]
    monkeypatch.setattr(sizes, "_SECONDS", 0.0)
    monkeypatch.setattr(sizes, "_LEAST_SECONDS", 0.0)

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=prob.u0 * ctx.repeat)

    def output_func(sol, ctx):
        return sol.u[0, 0], (ctx.repeat < 2) & (ctx.index % 2 == 1)

    ens = eo.EnsembleProblem(ensemble().prob, prob_func, output_func)
    options = {"trajectories": 600, "batch_size": 600}
    expected = np.where(np.arange(600) % 2 == 1, 2.0, 1.0)
    with Breaking(1) as executor:
        alg = eo.EnsembleDistributed(executor)
        for left in (3, 6):
            for store in ({}, {"store": tmp_path / f"{left}.zarr"}):
                executor.left = left
                with pytest.raises(eo.ClusterError, match="no more") as caught:
                    eo.solve(ens, None, alg, **options, **store)
                sim = caught.value.solution
                done = np.asarray(sim.retcode) == 1
                assert store or done.any()
                np.testing.assert_array_equal(np.asarray(sim.u)[done], expected[done])
        executor.left = 1000
        sim = eo.solve(ens, None, alg, **options, store=tmp_path / "6.zarr")
        np.testing.assert_array_equal(sim.u, expected)


def test_stopped_while_steps_are_counted():
    with Breaking(1) as executor:
        executor.left = 2
        alg = eo.EnsembleDistributed(executor)
        with pytest.raises(eo.ClusterError, match="no more"):
            eo.solve(ensemble(), None, alg, trajectories=600, save_everystep=True)


def test_a_lost_batch_is_tried_again(tmp_path):
    """Another time: it is in the store, with what was lost, but not for good."""
    path = tmp_path / "a.zarr"

    class Pool(ExecutorPool):
        deadly = True

        def result(self, future, waiting):
            answer = super().result(future, waiting)
            if self.deadly and len(answer) and future.first == 256:
                raise WorkersDiedError("the workers that ran it died")
            return answer

        def submit(self, task):
            future = super().submit(task)
            future.first = int(task.each[-1][0])
            return future

    options = {"trajectories": 600, "batch_size": 256, "store": path}
    with ThreadPoolExecutor(1) as executor:
        executor._ensembleode_pool = pool = Pool(executor, 1)
        alg = eo.EnsembleDistributed(executor)
        sim = eo.solve(ensemble(), None, alg, **options)
        assert len(sim.failed) >= 16
        np.testing.assert_array_equal(sim.failed, np.arange(256, 256 + len(sim.failed)))
        pool.deadly = False
        sim = eo.solve(ensemble(), None, alg, **options)
    np.testing.assert_array_equal(sim.failed, [])
    np.testing.assert_array_equal(sim.u, eo.solve(ensemble(), trajectories=600).u)


@pytest.mark.slow
def test_workers_without_the_package(tmp_path):
    """That is said at once, by name."""
    # (The workers of this computer have the paths of this process.)
    missing = "import sys\nsys.modules['ensembleode'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(missing)
    with cluster(1, environment={"PYTHONPATH": str(tmp_path)}) as client:
        began = time.monotonic()
        with pytest.raises(eo.ClusterError, match=r"can't import ensembleode\S* .*: install"):
            eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleDistributed(client), trajectories=10)
        assert time.monotonic() - began < 30


def test_workers_that_differ(monkeypatch):
    with cluster(environment={"JAX_ENABLE_X64": "0"}) as client:
        alg = eo.EnsembleDistributed(client)
        with pytest.raises(eo.ClusterError, match=r"has x64 False instead of True. All must be"):
            eo.solve(ensemble(), eo.Tsit5(), alg, **OPTIONS)
        monkeypatch.setattr(jax, "__version__", "0.0.1")
        with pytest.raises(eo.ClusterError, match=r"has jax .* instead of 0.0.1, x64 False"):
            eo.solve(ensemble(), eo.Tsit5(), alg, **OPTIONS)


INTERRUPTED = """
import sys
sys.path.insert(0, {path!r})
import jax
jax.config.update("jax_enable_x64", True)
import ensembleode as eo, numpy as np
from ensembleode.running.progress import Progress
from tests.executors.test_faults import ensemble, OPTIONS

def told(self, codes, report=Progress.report):
    report(self, codes)
    print("some are done", flush=True)

if __name__ == "__main__":
    options = {{**OPTIONS, "trajectories": 600_000, "saveat": 20.0}}
    alg = eo.EnsembleDistributed(workers=2)
    eo.solve(ensemble(), eo.Tsit5(), alg, **{{**options, "trajectories": 2_000}})
    Progress.report = told
    sim = eo.solve(ensemble(), eo.Tsit5(), alg, **options, on_interrupt="return", progress=True)
    codes = np.asarray(sim.retcode)
    print((codes == 1).sum(), (codes == 0).sum(), np.isnan(sim.u[codes == 0]).all(), sim.converged)
    again = eo.solve(ensemble(), eo.Tsit5(), alg, **{{**options, "trajectories": 2_000}})
    print((again.retcode == 1).all())
"""


@pytest.mark.slow
def test_ctrl_c(tmp_path):
    """Which reaches the workers, too, and they are there after it."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = python(tmp_path, INTERRUPTED, env=environment)
    assert process.stdout.readline() == "some are done\n"
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < 20
    *_, counts, again = out.strip().splitlines()
    assert again == "True"
    done, rest, nan, converged = counts.split()
    assert int(done) > 0
    assert int(rest) > 0
    assert int(done) + int(rest) == 600_000
    assert (nan, converged) == ("True", "False")
