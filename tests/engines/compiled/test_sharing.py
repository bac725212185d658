"""Work that threads share."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo
from ensembleode.engines.compiled.xla.call import call

from ...problems import lorenz
from .ffi import Runtime


# Adds one to each item of a range, and writes down which thread did it; for each item, the sum of
# the numbers below `work` is found first, which takes time.
COUNT = """
define void @count(i64 %first, i64 %end, i64 %thread, ptr %work, ptr %times, ptr %who) {
  %n = load i64, ptr %work
  br label %item
item:
  %i = phi i64 [ %first, %0 ], [ %next, %done ]
  br label %busy
busy:
  %j = phi i64 [ 0, %item ], [ %more, %busy ]
  %more = add i64 %j, 1
  %seen = load volatile i64, ptr %work
  %on = icmp slt i64 %more, %n
  br i1 %on, label %busy, label %done
done:
  %a = getelementptr i64, ptr %times, i64 %i
  %before = load i64, ptr %a
  %after = add i64 %before, 1
  store i64 %after, ptr %a
  %b = getelementptr i64, ptr %who, i64 %i
  store i64 %thread, ptr %b
  %next = add i64 %i, 1
  %again = icmp slt i64 %next, %end
  br i1 %again, label %item, label %out
out:
  ret void
}
"""


def counted(schedule, n, threads, least, work=1):
    """How often each item was done, and by which thread."""
    runtime = Runtime(COUNT, "count", 2, 2, schedule=schedule, shared=True)
    share = np.array([n, threads, least], np.int32)
    times, who = np.zeros(n + 1, np.int64), np.full(n + 1, -1)
    frame = runtime.frame(share, np.array([work]), results=[times, who])
    assert runtime.call(frame) is None
    assert times[n] == 0
    assert runtime.errors == []
    return times[:n], who[:n], runtime


def never(task):
    return True


def at_once(task):
    task()
    return True


def refused(task):
    return False


SHARES = {"n": st.integers(1, 300), "threads": st.integers(1, 9), "least": st.integers(1, 64)}


@pytest.mark.parametrize("schedule", [never, at_once, refused])
@settings(max_examples=15, deadline=None)
@given(**SHARES)
def test_each_item_is_done_once_whoever_comes(schedule, n, threads, least):
    """Also where the helpers run in the thread that calls, never, or can't be had."""
    times, who, runtime = counted(schedule, n, threads, least)
    assert (times == 1).all()
    assert set(who) <= set(range(threads))
    if schedule is refused and threads > 1 and n > least:
        assert runtime.destroyed == [5678] * (threads - 1)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), **SHARES)
def test_on_threads_that_come_when_they_like(seed, n, threads, least):
    """Before the end or long after it."""
    random = np.random.default_rng(seed)
    helpers = []

    def sometime(task):
        helper = threading.Timer(random.choice([0, 1e-4, 1e-3, 0.02]), task)
        helper.start()
        helpers.append(helper)
        return True

    times, who, _ = counted(sometime, n, threads, least, work=2000)
    finished = times.copy()
    for helper in helpers:
        helper.join()
    assert (finished == 1).all()
    assert (times == 1).all()
    assert set(who) <= set(range(threads))


def test_threads_are_told_apart():
    """Each part goes to one, and parts get smaller."""
    _, who, _ = counted(at_once, 1000, 3, 10)
    assert set(who) == {1}  # who comes first does all
    ready = threading.Event()

    def later(task):
        def run():
            ready.set()
            task()

        threading.Thread(target=run).start()
        return ready.wait(10)

    for _ in range(20):
        _, who, _ = counted(later, 1000, 2, 10, work=20_000)
        if set(who) == {0, 1}:
            break
    assert set(who) == {0, 1}
    runs = [len(list(same)) for _, same in itertools.groupby(who)]
    assert all(run % 10 == 0 for run in runs)


def test_within_a_program_of_jax():
    """On the threads of XLA, which other calls want at the same time."""

    def count(work):
        outputs = [jax.ShapeDtypeStruct((1000,), jnp.int64)] * 2
        return call(COUNT_INTO, "count", [work], outputs, items=1000, threads=4, least=8)

    @jax.jit
    def several(work):
        return [count(work + i)[0] for i in range(8)]

    for _ in range(5):
        for times in several(jnp.array([200])):
            assert (np.asarray(times) == 1).all()


# The same, whose results begin as whatever was there before.
COUNT_INTO = COUNT.replace("%after = add i64 %before, 1", "%after = add i64 0, 1")


P = jnp.array([10.0, 28.0, 8 / 3])


@pytest.mark.slow
def test_an_ensemble_on_more_threads_than_there_are_cores():
    """Whatever the number of threads, the bits are the same, and so are those of gradients."""

    def solve(u0, threads):
        ens = eo.EnsembleProblem(
            eo.ODEProblem(lorenz, u0, (0.0, 1.0), P),
            prob_func=lambda prob, ctx: eo.remake(prob, p=prob.p + 0.1 * ctx.sim_id),
        )
        alg = eo.EnsembleThreads(threads)
        return eo.solve(ens, eo.Tsit5(), alg, trajectories=101, saveat=0.25, engine="compiled").u

    u0 = jnp.array([1.0, 0.5, 0.0])
    expected = solve(u0, 1)
    gradient = jax.grad(lambda u0: solve(u0, 1).sum())(u0)
    for threads in (2, 3, 64):
        np.testing.assert_array_equal(solve(u0, threads), expected)
        np.testing.assert_array_equal(
            jax.grad(lambda u0, n=threads: solve(u0, n).sum())(u0), gradient
        )


def test_steps_launched_ahead_of_each_other():
    """None waits for another: many steps of a training loop are on their way at once. (Where one
    does, XLA ends the process.)"""

    @jax.jit
    def update(u0):
        def loss(u0):
            ens = eo.EnsembleProblem(
                eo.ODEProblem(lorenz, u0, (0.0, 0.1), P),
                prob_func=lambda prob, ctx: eo.remake(prob, p=prob.p + 0.1 * ctx.sim_id),
            )
            alg = eo.EnsembleThreads(2)
            sim = eo.solve(ens, eo.Tsit5(), alg, trajectories=100, engine="compiled")
            return jnp.mean(sim.u[:, -1] ** 2)

        return u0 - 1e-3 * jax.grad(loss)(u0)

    u0 = jnp.array([1.0, 0.5, 0.0])
    for _ in range(300):
        u0 = update(u0)
    assert np.isfinite(np.asarray(u0)).all()
