"""Ctrl-C ends a solve within about a second, wherever it runs, and the results so far are kept."""

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.base import tuning
from ensembleode.executors.distributed.dispatch import BatchNumbers, dispatch
from ensembleode.executors.distributed.pools import ExecutorPool

from ..marks import slow_unless


N = 24
# One that would take hours, in time and in steps. (With more, each thread might have one, which
# holds up the others that the thread has not begun.)
LONG = np.arange(N) == 3
OPTIONS = {"trajectories": N, "maxiters": 2**31 - 1, "abstol": 1e-8, "reltol": 1e-8}


@pytest.fixture(autouse=True)
def handled_by_python():
    """Ctrl-C is Python's own to handle; a shell starts what runs in its background without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before or signal.default_int_handler)


def ensemble(longest=1e9):
    until = jnp.where(jnp.asarray(LONG), longest, 1 + jnp.arange(N) / 8)
    prob = eo.ODEProblem(lambda u, p, t: jnp.stack([u[1], -u[0]]), jnp.ones(2), (0.0, 1.0))
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, tspan=(0.0, until[ctx.index]))
    )


def columns(longest=1e9):
    prob = eo.ODEProblem(lambda u, p, t: jnp.stack([u[1], -u[0]]), jnp.ones(2), (0.0, longest))
    return eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id))


@contextlib.contextmanager
def pressed(after=0.5):
    """Ctrl-C, so many seconds after programs are watched; yields when that was, in a list."""
    times, ended = [], threading.Event()

    def press():
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            if ended.wait(0.01):
                return
        time.sleep(after)
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    try:
        yield times
    finally:
        ended.set()
        thread.join(60)


def interrupted(solve):
    """What a solve raises that is interrupted."""
    with pressed() as times, pytest.raises(KeyboardInterrupt) as caught:
        solve()
    assert time.monotonic() - times[0] < 20  # (a second, where nothing else runs)
    return caught.value


WHERE = {
    "serial": eo.EnsembleSerial(),
    "one": eo.EnsembleThreads(1),
    "threads": eo.EnsembleThreads(),
    "arrays": eo.EnsembleGPUArray(),
    "kernel": eo.EnsembleGPUKernel(),
    "distributed": eo.EnsembleDistributed(workers=2),
    "split": eo.EnsembleSplitThreads(workers=2),
}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("engine", "where"),
    [
        *(("compiled", x) for x in ("serial", "threads", "arrays", "kernel")),
        slow_unless(False, "compiled", "one"),
        slow_unless(False, "compiled", "split"),
        ("compiled", "distributed"),
        ("diffrax", "one"),
        slow_unless(False, "diffrax", "threads"),
        slow_unless(False, "diffrax", "serial"),
        slow_unless(False, "diffrax", "distributed"),
    ],
)
def test_every_ensemble_algorithm(engine, where):
    how = {**OPTIONS, "engine": engine}
    expected = eo.solve(ensemble(1.0), eo.Tsit5(), WHERE[where], **how)
    got = interrupted(lambda: eo.solve(ensemble(), eo.Tsit5(), WHERE[where], **how)).solution
    done = got.retcode == eo.ReturnCode.Success
    assert (got.retcode[~done] == eo.ReturnCode.Default).all()
    assert not done[LONG].any()
    if engine == "compiled" and where in ("serial", "one", "threads", "arrays", "kernel"):
        assert done[~LONG].all()
    np.testing.assert_array_equal(got.u[done], expected.u[done])
    assert np.isnan(got.u[~done]).all()
    assert not got.converged
    # And then as before.
    again = eo.solve(ensemble(1.0), eo.Tsit5(), WHERE[where], **how)
    assert (again.retcode == eo.ReturnCode.Success).all()
    np.testing.assert_array_equal(again.u, expected.u)


class Endless:
    """A program for each trajectory by itself."""

    unit = width = capacity = 1

    def units(self, n):
        return n

    def results(self, n):
        return [], []


@pytest.mark.slow
def test_among_other_signals():
    """(Python's `SimpleQueue` waits for ever where a signal comes just as its timeout ends.)"""
    never = types.SimpleNamespace(num_workers=1, submit=lambda *_: concurrent.futures.Future())
    program: Any = Endless()
    shipped: Any = types.SimpleNamespace(hash="program", content=b"")
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-4)
    try:
        with pressed() as times:
            batch = BatchNumbers([np.ones(1)], [])
            results = dispatch(ExecutorPool(never, None), program, shipped, batch)
        assert time.monotonic() - times[0] < 20
        assert isinstance(results.cause, KeyboardInterrupt)
        assert not results.done.any()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_those_that_wait_for_another_method():
    """Of two kinds some are endless, so that one kind waits while the other has the lanes."""
    rate, is_long = jnp.where(jnp.arange(N) % 2 == 0, 1.0, 1e4), jnp.arange(N) < 2

    def solve(longest, **how):
        until = jnp.where(is_long, longest, 1.0)
        prob = eo.ODEProblem(lambda u, p, t: -p * (u - jnp.cos(t)), jnp.ones(1), (0.0, 1.0), 1.0)
        ens = eo.EnsembleProblem(
            prob,
            lambda prob, ctx: eo.remake(prob, p=rate[ctx.index], tspan=(0.0, until[ctx.index])),
        )
        alg = eo.AutoTsit5(eo.Rodas5P())
        how = {**OPTIONS, "abstol": 1e-4, "reltol": 1e-4, **how}
        return eo.solve(ens, alg, eo.EnsembleSerial(), **how)

    expected = solve(1.0)
    with pressed():
        sim = solve(1e9, on_interrupt="return")
    codes = np.asarray(sim.retcode)
    assert (codes[:2] == eo.ReturnCode.Default).all()
    # How many of the kind that waits are done depends on the number of lanes.
    done = codes == eo.ReturnCode.Success
    assert done.sum() >= N // 2 - 1
    assert (codes[~done] == eo.ReturnCode.Default).all()
    np.testing.assert_array_equal(sim.u[done], expected.u[done])
    assert ((np.asarray(sim.stats.nw) > 0) == (np.arange(N) % 2 == 1))[done].all()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["compiled", "diffrax"])
def test_columns(engine):
    how = {**OPTIONS, "engine": engine}
    if engine == "compiled":
        how["maxiters"] = tuning.MOST_COLUMN_STEPS
    expected = eo.solve(columns(1.0), eo.Tsit5(), eo.EnsembleColumns(), **how)
    got = interrupted(lambda: eo.solve(columns(), eo.Tsit5(), eo.EnsembleColumns(), **how)).solution
    assert (got.retcode == eo.ReturnCode.Default).all()
    again = eo.solve(columns(1.0), eo.Tsit5(), eo.EnsembleColumns(), **how)
    np.testing.assert_array_equal(again.u, expected.u)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
@pytest.mark.parametrize("way", [{}, {"dt": 1e-3, "adaptive": False}, {"save_everystep": True}])
def test_a_problem_alone(engine, way):
    prob = ensemble().prob
    how = {"maxiters": OPTIONS["maxiters"], "engine": engine, **way}
    long = eo.remake(prob, tspan=(0.0, 1e9 if "dt" not in way else 2e6))
    interrupted(lambda: eo.solve(long, **how))
    assert eo.solve(prob, **how).retcode == eo.ReturnCode.Success


@pytest.mark.slow
def test_returned_and_resumed(tmp_path):
    """Batches that are done are in the store; the others are solved when it is asked again."""
    path = tmp_path / "store"
    plain = {**OPTIONS, "batch_size": 3, "engine": "compiled"}
    expected = eo.solve(ensemble(6e5), **plain)
    how = {**plain, "store": path}
    with pressed(0.2):
        sim = eo.solve(ensemble(6e5), **how, on_interrupt="return", progress=True)
    codes = np.asarray(sim.retcode)
    assert not sim.converged
    assert (codes == eo.ReturnCode.Default).any()
    done = codes == eo.ReturnCode.Success
    np.testing.assert_array_equal(np.asarray(sim.u)[done], expected.u[done])
    resumed = eo.solve(ensemble(6e5), **how)
    assert resumed.converged
    np.testing.assert_array_equal(resumed.u, expected.u)


@pytest.mark.slow
def test_other_threads_go_on():
    """A solve on another thread has a flag of its own."""
    others = []
    how = {**OPTIONS, "engine": "compiled"}
    thread = threading.Thread(target=lambda: others.append(eo.solve(ensemble(3e5), **how)))
    thread.start()
    interrupted(lambda: eo.solve(ensemble(), **how))
    thread.join()
    assert (others[0].retcode == eo.ReturnCode.Success).all()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
