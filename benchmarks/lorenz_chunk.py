"""The computation of all contenders of benchmarks/distributed.py: chunks of Lorenz trajectories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo

from .common.tasks import lorenz


WIDTH, DT = 128, 1e-3
OPTIONS = {"adaptive": False, "save_start": False, "maxiters": 10**8}


def ensemble(rhos, t1, scale=1.0):
    prob = eo.ODEProblem(lorenz, scale * jnp.array([1.0, 0.0, 0.0]), (0.0, t1), 28.0)
    return eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=rhos[ctx.index]))


def solve(rhos, t1, alg, dt=DT):
    ens = ensemble(jnp.asarray(rhos), t1)
    return eo.solve(ens, eo.Tsit5(), alg, trajectories=len(rhos), dt=dt, **OPTIONS)


@functools.cache
def program():
    """A chunk, compiled once in each process; the step is an input, as it is to `solve`."""

    def run(rhos, t1, dt):
        sim = solve(rhos, t1, eo.EnsembleSerial(), dt)
        return sim.u, sim.retcode, sim.stats

    return jax.jit(run, compiler_options={"xla_cpu_prefer_vector_width": 512})


def chunk(rhos, t1):
    """The states, return codes and statistics of its trajectories, as `solve` has them."""
    return jax.tree.map(np.asarray, program()(rhos, t1, DT))
