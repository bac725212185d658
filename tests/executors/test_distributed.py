"""EnsembleDistributed: what it sends and computes, with any workers."""

import asyncio
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import dask
import distributed
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import ensembleode as eo
from ensembleode.engines import compiled
from ensembleode.executors.distributed import local, worker
from ensembleode.ground.extras import installing

from ..marks import on_julia, slow_unless
from ..problems import lorenz, mlp, network
from .clusters import cluster, wait_until, worker_pids


def sweep(n, u0=None, rate=1.0):
    start = jnp.array([1.0, 0.0, 0.0]) if u0 is None else u0
    prob = eo.ODEProblem(lorenz, start, (0.0, 2.0), jnp.array([10.0, 28.0, 8 / 3]) * rate)
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / n))
    )


def networks(n, model):
    prob = eo.ODEProblem(mlp, jnp.array([1.0, 0.5]), (0.0, 1.0), model)
    return eo.EnsembleProblem(prob, sweep(n).prob_func)


TWO = eo.EnsembleDistributed(workers=2)
SPLIT = eo.EnsembleSplitThreads(workers=2, threads=2)


def ran(tmp_path, code, *python, environment=None):
    """A script of this code, by Python or what starts that, to its end."""
    path = tmp_path / "script.py"
    path.write_text(code)
    command = [*(python or [sys.executable]), str(path)]
    how = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run(command, env=environment, **how)


@pytest.mark.parametrize("alg", [TWO, slow_unless(False, SPLIT)], ids=str)
def test_the_bits_of_serial(alg):
    """Of states, counts and codes; with matrix products, several times and one chunk or many."""
    for ens, options in (
        (sweep(1000), {"trajectories": 1000, "saveat": 0.1}),
        (networks(700, network()), {"trajectories": 700}),
        (sweep(60), {"trajectories": 60, "save_everystep": True}),
        (sweep(1000), {"trajectories": 1000, "batch_size": 300}),
    ):
        serial = eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), **options)
        sim = eo.solve(ens, eo.Tsit5(), alg, **options)
        jax.tree.map(np.testing.assert_array_equal, sim.u, serial.u)
        np.testing.assert_array_equal(sim.t, serial.t)
        np.testing.assert_array_equal(sim.retcode, serial.retcode)
        jax.tree.map(np.testing.assert_array_equal, sim.stats, serial.stats)


@pytest.mark.slow
def test_executors(monkeypatch):
    """Of concurrent.futures: processes, and threads of this one."""
    for name, value in eo.worker_environment().items():
        monkeypatch.setenv(name, value)
    serial = eo.solve(sweep(600), eo.Tsit5(), eo.EnsembleSerial(), trajectories=600)
    with (
        ProcessPoolExecutor(2, get_context("spawn")) as processes,
        ThreadPoolExecutor(2) as threads,
    ):
        for executor in (processes, threads):
            alg = eo.EnsembleDistributed(executor)
            sim = eo.solve(sweep(600), eo.Tsit5(), alg, trajectories=600)
            np.testing.assert_array_equal(sim.u, serial.u)
            assert local.pool_of(alg) is local.pool_of(eo.EnsembleDistributed(executor))


MPI = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
sys.path.insert(0, {path!r})
import ensembleode as eo, numpy as np
from mpi4py.futures import MPIPoolExecutor
from tests.executors.test_distributed import sweep
if __name__ == "__main__":
    serial = eo.solve(sweep(600), eo.Tsit5(), eo.EnsembleSerial(), trajectories=600)
    with MPIPoolExecutor() as executor:
        alg = eo.EnsembleDistributed(executor)
        sim = eo.solve(sweep(600), eo.Tsit5(), alg, trajectories=600)
        print(np.array_equal(sim.u, serial.u), alg.traffic().tasks > 1, executor.num_workers)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="there is no mpiexec (Open MPI)")
def test_mpi(tmp_path):
    pytest.importorskip("mpi4py")
    code = MPI.format(path=os.path.abspath(os.path.join(__file__, "../../..")))
    flags = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,tcp", "-n", "3"]
    command = ["mpiexec", *flags, sys.executable, "-m", "mpi4py.futures"]
    done = ran(tmp_path, code, *command, environment={**os.environ, **eo.worker_environment()})
    assert done.stdout.split()[:3] == ["True", "True", "2"], done.stderr


def traces():
    """Counts what JAX traces on a worker, from the first call on."""
    import jax

    if not hasattr(jax, "_traces_counted"):
        jax._traces_counted = 0

        def count(event, duration, **_):
            jax._traces_counted += "jaxpr_trace_duration" in event

        jax.monitoring.register_event_duration_secs_listener(count)
    return jax._traces_counted


@pytest.mark.slow
def test_a_training_run_compiles_once(compiles):
    """Each worker compiles a program once, and traces nothing after that; neither does the client.
    Weights go to each worker once a step, and the answers are sums."""

    def end(sol, ctx):
        return ((sol.u[-1] - 1) ** 2).sum(), False

    def loss(model, alg):
        ens = networks(640, model)
        ens = eo.EnsembleProblem(ens.prob, ens.prob_func, end, eo.sum_reduction)
        return eo.solve(ens, eo.Tsit5(), alg, trajectories=640).u

    step = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    model = network(64)
    with cluster() as client:
        alg = eo.EnsembleDistributed(client)
        client.run(traces)
        values = [step(model, alg)]
        before, traced = alg.traffic(), client.run(traces)
        compiles.count = 0
        values += [step(model, alg) for _ in range(3)]
        after = alg.traffic()
        assert client.run(traces) == traced
        assert compiles.count == 0
        assert 1 <= before.compiled <= 2
        assert after.compiled <= 2
    for value in values[1:]:
        jax.tree.map(np.testing.assert_array_equal, value, values[0])
    serial = step(model, eo.EnsembleSerial())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), values[0], serial)
    each = after - before
    # Each chunk of a step has its own part of the sum.
    chunks = 640 // compiled.ENGINE.width(jax.ShapeDtypeStruct((2,), float), 640)
    weights = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    assert each.received < 3 * (chunks * weights + 640 * 20 + 20_000)


@pytest.mark.slow
def test_large_arrays_are_sent_once():
    """And again to a worker that has not got them."""
    table = jnp.linspace(0.0, 1.0, 200_000)
    prob = eo.ODEProblem(lambda u, p, t: -u * p[0], jnp.ones(2), (0.0, 1.0), table + 1.0)
    ens = eo.EnsembleProblem(prob)
    with cluster() as client:
        alg = eo.EnsembleDistributed(client)
        sim = eo.solve(ens, eo.Tsit5(), alg, trajectories=5000)
        np.testing.assert_allclose(sim.u[:, -1], np.exp(-1), rtol=1e-3)
        first = alg.traffic()
        assert table.nbytes < first.sent < 5 * table.nbytes
        eo.solve(ens, eo.Tsit5(), alg, trajectories=5000)
        assert (alg.traffic() - first).sent < table.nbytes / 2
        # Who joins late is sent it when it needs it.
        client.cluster.scale(3)
        wait_until(lambda: len(worker_pids(client)) == 3)
        deadline = time.monotonic() + 30
        while alg.traffic().compiled < 3:
            assert time.monotonic() < deadline
            eo.solve(ens, eo.Tsit5(), alg, trajectories=5000)
        first = alg.traffic()
        for _ in range(6):
            eo.solve(ens, eo.Tsit5(), alg, trajectories=5000)
        assert (alg.traffic() - first).sent < table.nbytes / 2


def test_who_has_not_got_it_is_sent_it():
    """A worker that was replaced, say."""
    serial = eo.solve(sweep(300), eo.Tsit5(), eo.EnsembleSerial(), trajectories=300)
    with ThreadPoolExecutor(1) as executor:
        alg = eo.EnsembleDistributed(executor)
        eo.solve(sweep(300), eo.Tsit5(), alg, trajectories=300)
        before = alg.traffic()
        worker._kept._things.clear()
        sim = eo.solve(sweep(300), eo.Tsit5(), alg, trajectories=300)
        np.testing.assert_array_equal(sim.u, serial.u)
        assert (alg.traffic() - before).repeated >= 1


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_workers():
    """Bit for bit, by shared numbers and by those of each; and they are those of serial."""

    def loss(args, alg):
        u0, rate, table = args
        ens = eo.EnsembleProblem(
            sweep(600, u0, rate).prob,
            lambda prob, ctx: eo.remake(prob, u0=prob.u0 + table[ctx.index]),
        )
        sim = eo.solve(ens, eo.Tsit5(), alg, trajectories=600, saveat=0.5)
        return jnp.sin(sim.u).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    args = jnp.array([1.0, 0.5, 0.25]), jnp.array(1.0), jnp.linspace(0, 1, 1800).reshape(600, 3)
    serial = gradient(args, eo.EnsembleSerial())
    two = gradient(args, TWO)
    three = gradient(args, eo.EnsembleDistributed(workers=3))
    jax.tree.map(np.testing.assert_array_equal, two, three)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), two, serial)
    np.testing.assert_array_equal(two[2], serial[2])


def total(rate, alg, output=None):
    ens = sweep(600, rate=rate)
    output = output or (lambda sol, ctx: (jnp.sin(sol.u[-1]).sum(), False))
    ens = eo.EnsembleProblem(ens.prob, ens.prob_func, output, eo.sum_reduction)
    return eo.solve(ens, eo.Tsit5(), alg, trajectories=600, abstol=1e-8, reltol=1e-8)


@pytest.mark.parametrize(
    "alg",
    [*map(functools.partial(slow_unless, False), (eo.EnsembleSerial(), eo.EnsembleThreads())), TWO],
    ids=str,
)
def test_sum_reduction(alg):
    """With any algorithm; its gradient by finite differences, too."""
    sim = total(1.0, alg)
    assert sim.u.shape == ()
    assert (sim.retcode == 1).all()
    value, gradient = jax.jit(jax.value_and_grad(lambda r: total(r, alg).u))(1.0)
    np.testing.assert_allclose(value, sim.u, rtol=1e-12)
    h = 1e-5
    difference = (total(1.0 + h, alg).u - total(1.0 - h, alg).u) / (2 * h)
    np.testing.assert_allclose(gradient, difference, rtol=1e-4)
    doubled = jax.grad(lambda r: 2 * total(r, alg).u)(1.0)
    np.testing.assert_allclose(doubled, 2 * gradient, rtol=1e-12)
    # A tree of arrays is added up, too.
    tree = total(1.0, alg, lambda sol, ctx: ({"end": sol.u[-1], "one": 1}, False)).u
    assert tree["one"] == 600
    np.testing.assert_allclose(jnp.sin(tree["end"]).shape, (3,))


def test_sums_of_whatever_kind():
    """Counts of booleans, small integers; a complex one, differentiated."""
    with ThreadPoolExecutor(1) as executor:
        algs = (eo.EnsembleSerial(), eo.EnsembleDistributed(executor))
        many = [
            total(1.0, alg, lambda sol, ctx: ((ctx.index % 3 == 0, jnp.int8(100)), False)).u
            for alg in algs
        ]
        assert many[0] == many[1] == (200, 60_000)

        def turned(sol, ctx):
            return jax.lax.complex(jnp.cos(sol.u[-1, 0]), jnp.sin(sol.u[-1, 0])), False

        def squared(rate, alg):
            return abs(total(rate, alg, turned).u) ** 2

        serial, workers = (jax.grad(squared)(1.0, alg) for alg in algs)
        np.testing.assert_allclose(workers, serial, rtol=1e-9)


def test_more_than_a_worker_keeps(monkeypatch):
    monkeypatch.setattr(worker._kept, "most", 100_000)
    p = jnp.linspace(0, 1, 20_000), jnp.linspace(0, 1, 30_000)
    prob = eo.ODEProblem(lambda u, p, t: -u * p[0][-1] * p[1][-1], jnp.ones(1), (0.0, 1.0), p)
    with ThreadPoolExecutor(1) as executor:
        alg = eo.EnsembleDistributed(executor)
        sim = eo.solve(eo.EnsembleProblem(prob), None, alg, trajectories=300)
    np.testing.assert_allclose(sim.u[:, -1], np.exp(-1), rtol=1e-3)


def test_a_worker_of_two_threads_and_two_programs(monkeypatch):
    """What one wants, and was told that it has, the other makes room of."""
    ens = eo.EnsembleProblem(eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1), (0.0, 1.0)))
    add = worker._kept.add

    def add_two(things, wanted):
        found = add(things, wanted)
        add({"another": worker.PickledProgram(b"x" * 100, 1)}, ["another"])
        return found

    monkeypatch.setattr(worker._kept, "most", 10)
    monkeypatch.setattr(worker._kept, "add", add_two)
    with ThreadPoolExecutor(1) as executor:
        sim = eo.solve(ens, None, eo.EnsembleDistributed(executor), trajectories=300)
    np.testing.assert_allclose(sim.u[:, -1], np.exp(-1), rtol=1e-3)


def test_the_longest_go_first():
    """By their time spans, or what they are said to cost."""
    order = []

    class Recording(ThreadPoolExecutor):
        def submit(self, fn, payload):
            import pickle

            order.append(float(pickle.loads(payload).each[-1][0]))
            return super().submit(fn, payload)

    def prob_func(prob, ctx):
        return eo.remake(prob, tspan=(0.0, 1.0 + ctx.index / 100))

    ens = sweep(600)
    by_span = eo.EnsembleProblem(ens.prob, prob_func)
    with Recording(1) as executor:
        alg = eo.EnsembleDistributed(executor)
        eo.solve(by_span, eo.Tsit5(), alg, trajectories=600)
        # The last of the flat numbers are the indices.
        assert order[0] == max(order)
        order.clear()
        costs = np.where(np.arange(600) // 64 == 4, 5.0, 1.0)
        alg = eo.EnsembleDistributed(executor, costs=costs)
        sim = eo.solve(ens, eo.Tsit5(), alg, trajectories=600)
        assert 256 <= order[0] < 320
    serial = eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), trajectories=600)
    np.testing.assert_array_equal(sim.u, serial.u)


def interpolated(p):
    return np.interp(p, [0.0, 1.0], [1.0, 2.0])


@pytest.mark.slow
def test_what_calls_the_host():
    """Is pickled and traced on the worker; inside jit, if it closes over no traced value."""

    def f(u, p, t):
        rate = jax.pure_callback(
            interpolated, jax.ShapeDtypeStruct(p.shape, p.dtype), p, vmap_method="expand_dims"
        )
        return -rate * u

    def solve(p):
        prob = eo.ODEProblem(f, jnp.ones(1), (0.0, 1.0), p)
        return eo.solve(eo.EnsembleProblem(prob), eo.Tsit5(), TWO, trajectories=300)

    np.testing.assert_allclose(solve(jnp.array(0.5)).u[:, -1, 0], np.exp(-1.5), rtol=1e-3)
    compiled = TWO.traffic().compiled
    np.testing.assert_allclose(solve(jnp.array(0.25)).u[:, -1, 0], np.exp(-1.25), rtol=1e-3)
    assert TWO.traffic().compiled <= max(2, compiled)
    every = eo.ODEProblem(f, jnp.ones(1), (0.0, 1.0), jnp.array(0.5))
    sim = eo.solve(eo.EnsembleProblem(every), None, TWO, trajectories=3, save_everystep=True)
    np.testing.assert_allclose(sim(1.0)[:, 0], np.exp(-1.5), rtol=1e-3)
    inside = jax.jit(lambda p: solve(p).u[:, -1, 0])(jnp.array(1.0))
    np.testing.assert_allclose(inside, np.exp(-2.0), rtol=1e-3)

    def closing_over(p):
        prob = eo.ODEProblem(lambda u, _, t: f(u, p, t), jnp.ones(1), (0.0, 1.0))
        return eo.solve(eo.EnsembleProblem(prob), eo.Tsit5(), TWO, trajectories=300).u

    with pytest.raises(ValueError, match="put what is differentiated into p or u0"):
        jax.jit(closing_over)(jnp.array(1.0))


@pytest.mark.slow
def test_room_for_events_in_what_calls_the_host():
    """What is traced on the worker has as much room as the client found to be needed."""

    def count(sol, ctx):
        count, struct = sol.events.count, jax.ShapeDtypeStruct((), jnp.int32)
        return jax.pure_callback(np.int32, struct, count, vmap_method="sequential"), False

    back = eo.ContinuousCallback(
        lambda u, t, integrator: u[0] - 1,
        lambda integrator: eo.remake(integrator, u=jnp.zeros(1)),
    )
    prob = eo.ODEProblem(lambda u, p, t: jnp.ones(1), [0.0], (0.0, 40.5), callback=back)
    ens = eo.EnsembleProblem(prob, output_func=count)
    sim = eo.solve(ens, eo.Tsit5(), TWO, trajectories=3, dtmax=0.3)
    np.testing.assert_array_equal(sim.u, [40, 40, 40])


def test_loopback_only():
    """Whatever the processes of a cluster of ours listen to, nobody else can reach."""
    eo.solve(sweep(10), eo.Tsit5(), TWO, trajectories=10)
    this = psutil.Process()
    listening = [
        c.laddr.ip
        for process in (this, *this.children(recursive=True))
        for c in process.net_connections()
        if c.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3
    assert set(listening) <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_the_environment_is_left_alone():
    def environment():
        """(Dask leaves a mark that only Dask reads.)"""
        return {name: x for name, x in os.environ.items() if name != "__DASK_PARENT_PID"}

    before = environment()
    with eo.EnsembleDistributed(workers=1) as alg:
        eo.solve(sweep(10), eo.Tsit5(), alg, trajectories=10)
        assert environment() == before


@pytest.mark.slow
def test_no_worker_is_given_up():
    """One that is still restarting when Dask looks after it."""
    late = dask.config.set({"distributed.deploy.lost-worker-timeout": "100ms"})
    with late, eo.EnsembleDistributed(workers=1) as alg:
        eo.solve(sweep(10), eo.Tsit5(), alg, trajectories=10)
        (pid,) = worker_pids(local.pool_of(alg).client)
        os.kill(pid, signal.SIGKILL)
        sim = eo.solve(sweep(10), eo.Tsit5(), alg, trajectories=10)
        assert (sim.retcode == 1).all()
        assert worker_pids(local.pool_of(alg).client) != [pid]


@pytest.mark.slow
def test_lifetime():
    """As a context to its end; else as long as the process."""
    compiled = jax.jit(lambda: eo.solve(sweep(10), eo.Tsit5(), alg, trajectories=10).retcode)
    with eo.EnsembleDistributed(workers=1) as alg:
        assert (compiled() == 1).all()
        pool = local.pool_of(alg)
        assert pool is local.pool_of(eo.EnsembleDistributed(workers=1))
        pids = worker_pids(pool.client)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    # And again, if need be; what was compiled before, too.
    sim = eo.solve(sweep(10), eo.Tsit5(), alg, trajectories=10)
    assert (sim.retcode == 1).all()
    alg.close()
    assert (compiled() == 1).all()
    alg.close()


@pytest.mark.slow
def test_whose_cluster():
    """A client, a cluster, the address of a scheduler."""
    serial = eo.solve(sweep(300), eo.Tsit5(), eo.EnsembleSerial(), trajectories=300)
    with cluster(1) as client:
        address = client.scheduler.address
        for given in (client, client.cluster, address):
            alg = eo.EnsembleDistributed(given)
            sim = eo.solve(sweep(300), eo.Tsit5(), alg, trajectories=300)
            np.testing.assert_array_equal(sim.u, serial.u)
            alg.close()
        assert client.status == "running"
        assert len(worker_pids(client)) == 1


def test_bad_clusters(monkeypatch):
    def solve(given):
        return eo.solve(sweep(10), eo.Tsit5(), eo.EnsembleDistributed(given), trajectories=10)

    with pytest.raises(TypeError, match=r"cluster must be a Dask client or cluster, .* got int"):
        solve(3)
    with pytest.raises(eo.ClusterError, match="no Dask scheduler at 'nowhere'"):
        solve("nowhere")
    with pytest.raises(ValueError, match="threads is missing: say how many each worker"):
        eo.EnsembleSplitThreads("tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="costs must be an array of one number a trajectory"):
        eo.EnsembleDistributed(costs=3.0)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=re.escape(installing("dask"))):
        eo.solve(sweep(10), eo.Tsit5(), eo.EnsembleDistributed(workers=7), trajectories=10)


@pytest.mark.slow
def test_an_asynchronous_client():
    async def main(address):
        async with distributed.Client(address, asynchronous=True, set_as_default=False) as client:
            with pytest.raises(TypeError, match="needs a synchronous Dask client"):
                eo.solve(sweep(10), None, eo.EnsembleDistributed(client), trajectories=10)

    with cluster(1) as client:
        asyncio.run(main(client.scheduler.address))


NESTED = {
    "forward over reverse": lambda f, x, v: jax.jvp(jax.grad(f), (x,), (v,))[1],
    "reverse over reverse": lambda f, x, v: jax.grad(lambda x: jax.grad(f)(x) @ v)(x),
    "reverse over forward": lambda f, x, v: jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1])(x),
    "forward twice": lambda f, x, v: jax.jacfwd(lambda x: jax.jvp(f, (x,), (v,))[1])(x),
    "hessian": lambda f, x, v: jax.hessian(f)(x) @ v,
    "jacrev of jacrev": lambda f, x, v: jax.jacrev(jax.jacrev(f))(x) @ v,
    "third": lambda f, x, v: jax.grad(lambda x: jax.jvp(jax.grad(f), (x,), (v,))[1] @ v)(x),
}


def squares(x, alg, **options):
    """By the first state, a shared rate, numbers of each trajectory and the end of time."""
    options = {"abstol": 1e-9, "reltol": 1e-9} | options
    prob = eo.ODEProblem(lambda u, p, t: -p[0] * u**2 + p[1], x[:2], (0.0, x[2]), (x[3], x[4]))

    def prob_func(prob, ctx):
        return eo.remake(prob, p=(x[3], x[4:][ctx.index]))

    ens = eo.EnsembleProblem(prob, prob_func, *options.pop("reduced", ()))
    u = eo.solve(ens, eo.Tsit5(), alg, trajectories=3, **options).u
    return u if u.ndim == 0 else jnp.sum(u**2 * jnp.cos(jnp.arange(u.size)).reshape(u.shape))


def last(sol, ctx):
    return jnp.sum(sol.u[-1] ** 2), False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "options"),
    [
        (way, options)
        for way in NESTED
        for name, options in {
            "ends": {},
            "times": {"saveat": np.array([0.2, 0.5])},
            "diffrax": {"engine": "diffrax"},
            "sum": {"reduced": (last, eo.sum_reduction)},
        }.items()
        if name != "diffrax" or way == "forward over reverse"
    ],
)
def test_derivatives_of_any_order(way, options):
    """Those of serial, whichever way they are nested."""
    x = jnp.array([0.5, 0.8, 1.1, 0.7, 0.2, 0.3, 0.4])
    v = jnp.cos(jnp.arange(7.0))
    with ThreadPoolExecutor(1) as executor:
        serial, workers = (
            jax.jit(functools.partial(NESTED[way], functools.partial(squares, alg=alg, **options)))
            for alg in (eo.EnsembleSerial(), eo.EnsembleDistributed(executor))
        )
        np.testing.assert_allclose(workers(x, v), serial(x, v), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_second_derivatives_on_split_threads():
    """As the sum over many chunks, on processes."""
    first, second = (
        jax.jit(lambda r, alg=alg: jax.jvp(jax.grad(lambda r: total(r, alg).u), (r,), (1.0,))[1])
        for alg in (eo.EnsembleSerial(), SPLIT)
    )
    np.testing.assert_allclose(second(1.0), first(1.0), rtol=1e-8)


def test_forward_mode_alone():
    """With the `sensealg` for that; and of one that is of reverse mode only, it says so."""

    def end(rate, **options):
        prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.ones(1), (0.0, 1.0), rate)
        return eo.solve(eo.EnsembleProblem(prob), eo.Tsit5(), alg, trajectories=2, **options).u

    with ThreadPoolExecutor(1) as executor:
        alg = eo.EnsembleDistributed(executor)
        forwards = functools.partial(end, sensealg=eo.ForwardDiffSensitivity())
        found = jax.jacfwd(forwards)(1.0)
        np.testing.assert_allclose(found[:, -1], -np.exp(-1.0), rtol=1e-3)
        with pytest.raises(TypeError, match=r"GaussAdjoint\(\) is for reverse mode only"):
            jax.jacfwd(functools.partial(end, sensealg=eo.GaussAdjoint()))(1.0)


ONE_CORE = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, os, time
import ensembleode as eo
assert len(os.sched_getaffinity(0)) == 1
if __name__ == "__main__":
    def ends(u0s, alg):
        prob = eo.ODEProblem(lambda u, p, t: -u, u0s[0], (0.0, 1.0))
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0s[ctx.index]))
        return eo.solve(ens, eo.Tsit5(), alg, trajectories=len(u0s), save_start=False).u
    with eo.EnsembleDistributed() as alg:
        for n in (1_000_000, 5_000_000):
            u0s = jnp.linspace(0.0, 1.0, n).reshape(-1, 100)
            value, gradient = jax.jit(
                jax.value_and_grad(lambda u: ends(u, alg).sum())
            )(u0s)
            np.testing.assert_allclose(value, u0s.sum() * np.exp(-1), rtol=1e-3)
            np.testing.assert_allclose(gradient, np.exp(-1), rtol=1e-3)
    print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("taskset") is None, reason="there is no taskset")
def test_one_core(tmp_path):
    """Large operands of a callback deadlock there, if they are made JAX's."""
    done = ran(tmp_path, ONE_CORE, "taskset", "-c", "0", sys.executable)
    assert done.stdout.strip() == "done", done.stderr


UNGUARDED = """
import ensembleode as eo, jax.numpy as jnp
prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1), (0.0, 1.0))
eo.solve(eo.EnsembleProblem(prob), None, eo.EnsembleDistributed(workers=1), trajectories=3)
"""


@pytest.mark.slow
def test_a_script_without_a_guard(tmp_path):
    done = ran(tmp_path, UNGUARDED)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert 'put what solves under `if __name__ == "__main__":`' in last


@pytest.mark.slow
@pytest.mark.parametrize("way", ["standard input", "an argument"])
def test_what_is_in_no_file_needs_no_guard(way):
    arguments = ["-"] if way == "standard input" else ["-c", UNGUARDED]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=UNGUARDED,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [on_julia("julia")])
def test_julia_in_workers(name):
    """A cluster's workers each start a Julia: the steps of the compiled engine, and gradients."""
    environment = {
        x: os.environ[x]
        for x in ("PYTHON_JULIACALL_EXE", "PYTHON_JULIACALL_PROJECT")
        if x in os.environ
    }
    rates = jnp.linspace(0.5, 2.0, 5)

    def ends(scale, alg, engine):
        prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.0, 2.0]), (0.0, 1.0), scale)
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, p=prob.p * rates[ctx.index])
        )
        options = {"trajectories": 5, "saveat": 0.25, "engine": engine}
        return eo.solve(ens, eo.Tsit5(), alg, abstol=1e-9, reltol=1e-9, **options)

    def loss(scale, alg, engine):
        return jnp.sum(ends(scale, alg, engine).u ** 2)

    with cluster(environment=environment) as client:
        alg = eo.EnsembleDistributed(client)
        here, there = ends(1.0, eo.EnsembleSerial(), "compiled"), ends(1.0, alg, name)
        np.testing.assert_allclose(there.u, here.u, rtol=1e-8)
        np.testing.assert_array_equal(there.stats.naccept, here.stats.naccept)
        expected = jax.grad(loss)(1.0, eo.EnsembleSerial(), "compiled")
        np.testing.assert_allclose(jax.grad(loss)(1.0, alg, name), expected, rtol=1e-6)


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked")
def test_forked_processes_are_refused():
    """Before anything runs: JAX has threads, and they would hang."""
    with ProcessPoolExecutor(2, get_context("fork")) as executor:
        with pytest.raises(ValueError, match=r"forks its processes.*get_context\(\"spawn\"\)"):
            eo.solve(sweep(9), eo.Tsit5(), eo.EnsembleDistributed(executor), trajectories=9)
        assert not executor._processes
