"""The memory that a large ensemble takes when it is solved in batches."""

import ctypes
import gc
import pathlib
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled.xla.call import SPARE
from ensembleode.ground.recent import RECENT

from .problems import lorenz


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
@pytest.mark.parametrize("how", ["eager", "in jit"])
def test_one_problem_after_another_in_bounded_memory(how):
    """Fields of other code, each with a kernel and a program of its own."""

    def solve(i):
        prob = eo.ODEProblem(lambda u, p, t: -u * 2.0**-i, jnp.ones(2), (0.0, 1.0))

        def end(u0):
            prob_u0 = eo.remake(prob, u0=u0)
            return eo.solve(prob_u0, eo.Euler(), dt=1.0, engine="compiled").u[-1]

        end = end if how == "eager" else jax.jit(end)
        np.testing.assert_array_equal(end(jnp.ones(2)), 1 - 2.0**-i)

    def resident():
        gc.collect()
        if how == "in jit":
            jax.clear_caches()
        ctypes.CDLL(None).malloc_trim(0)
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for i in range(RECENT + SPARE):
        solve(i)
    before, more = resident(), 150
    for i in range(RECENT + SPARE, RECENT + SPARE + more):
        solve(i)
    assert resident() - before < 3e5 * more  # bytes; one is 2.4e6


@pytest.mark.slow
def test_a_million_trajectories_in_bounded_memory():
    """Peak memory is reached early on, and prob_func is called once."""
    calls = []

    def prob_func(prob, ctx):
        calls.append(None)
        return eo.remake(prob, p=prob.p.at[1].set(21.0 * ctx.index / 1e6))

    peaks = []

    def reduction(u, data, indices):
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return u + np.asarray(data)[:, -1].sum(axis=0), False

    prob = eo.ODEProblem(
        lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 1.0), jnp.array([10.0, 28.0, 8 / 3])
    )
    ens = eo.EnsembleProblem(prob, prob_func, reduction=reduction, u_init=np.zeros(3))
    sim = eo.solve(ens, trajectories=1_000_000, batch_size=20_000, save_start=False)
    assert len(calls) == 2
    assert len(sim) == 1_000_000
    assert (sim.retcode == eo.ReturnCode.Success).all()
    assert len(peaks) > 20
    unit = 1 if sys.platform == "darwin" else 1024
    grown = unit * (peaks[-1] - peaks[len(peaks) // 10])
    assert grown < 20e6  # bytes; a return code each is 1e6
