"""Train an ODE on trajectories that other processes solve, on this computer or a cluster.

The ensemble is that of `quickstart.py`, solved by `EnsembleDistributed`, with one loss in two
forms. In the first form the trajectories come back to this process, which compares them with 1. In
the second form the workers compare, add up and differentiate, so that only a loss and a gradient
come back. Nothing is defined on the workers, and both forms must find the parameters that the Julia
tutorial on data-parallel training publishes.

    python examples/distributed_training.py [--updates N] [--workers N]
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ensembleode as eo


jax.config.update("jax_enable_x64", True)
START, PUBLISHED = [3.0, 1.0], [1.094120061965113, -0.41178007289727964]  # after 99 updates


def simulate(theta, ensemblealg, **what):
    prob = eo.ODEProblem(lambda u, p, t: 1.01 * p * u, theta[:1], (0.0, 1.0), theta[1:])
    ens = eo.EnsembleProblem(
        prob,
        prob_func=lambda prob, ctx: eo.remake(prob, u0=0.5 + ctx.sim_id / 100 * prob.u0),
        **what,
    )
    return eo.solve(
        ens, eo.Tsit5(), ensemblealg, trajectories=100, saveat=0.1, abstol=1e-10, reltol=1e-10
    )


def loss_here(theta, ensemblealg):
    """Workers give their trajectories."""
    return jnp.sum((1.0 - simulate(theta, ensemblealg).u) ** 2)


def loss_there(theta, ensemblealg):
    """Workers give the sum of the losses of their trajectories, and its gradient."""

    def output_func(sol, ctx):
        return jnp.sum((1.0 - sol.u) ** 2), False

    return simulate(theta, ensemblealg, output_func=output_func, reduction=eo.sum_reduction).u


def train(loss, ensemblealg, updates):
    """The parameters found, and the bytes sent and received for each update after the first."""
    theta, adam, traffic = jnp.array(START), optax.adam(0.1), []
    state = adam.init(theta)

    @jax.jit
    def update(theta, state):
        gradient = jax.grad(loss)(theta, ensemblealg)
        change, state = adam.update(gradient, state)
        return optax.apply_updates(theta, change), state

    for _ in range(updates):
        before = ensemblealg.traffic()
        theta, state = jax.block_until_ready(update(theta, state))
        traffic.append(ensemblealg.traffic() - before)
    later = traffic[1:] or traffic
    sent, received = (np.median([getattr(x, k) for x in later]) for k in ("sent", "received"))
    return np.asarray(theta), sent, received


def main(ensemblealg, updates=99):
    """The parameters found by the second form."""
    header = ("what comes back", "a", "p", "off by", "bytes sent", "received")
    print("{:<19}{:>12}{:>13}{:>10}{:>12}{:>10}".format(*header))
    off = []
    for name, loss in (("trajectories", loss_here), ("sum and gradient", loss_there)):
        theta, sent, received = train(loss, ensemblealg, updates)
        off.append(abs(theta - PUBLISHED).max())
        found = f"{name:<19}{theta[0]:>12.8f}{theta[1]:>13.8f}{off[-1]:>10.1e}"
        print(f"{found}{sent:>12.0f}{received:>10.0f}")
    print(f"{'published':<19}{PUBLISHED[0]:>12.8f}{PUBLISHED[1]:>13.8f}")
    if updates == 99 and not np.all(np.array(off) <= 2e-6):
        sys.exit("a training ended further than 2e-6 from the published parameters")
    return theta


# Workers that are started on this computer begin by importing this script: hence the condition.
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=99, help="of Adam; by default 99")
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    # Elsewhere only the next line changes, with the cluster's own arguments (see docs/clusters):
    #   Slurm         eo.EnsembleDistributed(dask_jobqueue.SLURMCluster(n_workers=4, ...))
    #   PBS           eo.EnsembleDistributed(dask_jobqueue.PBSCluster(n_workers=4, ...))
    #   Kubernetes    eo.EnsembleDistributed(dask_kubernetes.operator.KubeCluster(n_workers=4, ...))
    #   several GPUs  eo.EnsembleDistributed(dask_cuda.LocalCUDACluster(...))
    #   MPI           eo.EnsembleDistributed(mpi4py.futures.MPIPoolExecutor())
    with eo.EnsembleDistributed(workers=options.workers) as alg:
        main(alg, options.updates)
