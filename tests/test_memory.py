"""Streaming: what a large ensemble costs."""

import resource
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .problems import lorenz


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
