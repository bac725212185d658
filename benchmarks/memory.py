"""Peak memory of an eager solve against the number of trajectories, with a `reduction`.

The ends of Lorenz trajectories to t = 1 are summed batch by batch, so that no state is kept once
its batch is done. Each row is measured in a process of its own. `imports` is the peak before
anything is solved, `one batch` the peak after the first batch, and `all` the peak after all
batches, which is the number to compare between rows. The last two columns say how often Python
called `reduction` and `prob_func`.

    python benchmarks/memory.py [--large]
"""

import argparse
import resource
import sys

import jax.numpy as jnp
from common.processes import apart, is_worker
from common.tasks import lorenz

import ensembleode as eo


def peak():
    """The largest memory this process has had, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def work(trajectories, batch_size):
    calls = {"reduction": 0, "prob_func": 0}
    rows = {"imports": peak()}

    def prob_func(prob, ctx):
        calls["prob_func"] += 1
        return eo.remake(prob, p=21.0 * ctx.index / (trajectories - 1))

    def reduction(u, data, indices):
        calls["reduction"] += 1
        return u + data[:, -1].sum(axis=0), "one batch" not in rows

    prob = eo.ODEProblem(lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 1.0), 0.0)
    ens = eo.EnsembleProblem(prob, prob_func, reduction=reduction, u_init=jnp.zeros(3))

    def solve():
        options = {"trajectories": trajectories, "batch_size": batch_size, "save_start": False}
        return eo.solve(ens, eo.Tsit5(), eo.EnsembleGPUArray(), **options)

    solve()  # compiles, and stops after the first batch
    rows["one batch"] = peak()
    calls.update(reduction=0, prob_func=0)
    sim = solve()
    rows |= {"all": peak(), "rate": trajectories / sim.elapsed}
    return rows | calls | {"failed": len(sim.failed)}


def main():
    if is_worker(work):
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--large", action="store_true", help="10 million trajectories, too")
    options = parser.parse_args()
    sizes = [10**5, 10**6] + [10**7] * options.large
    head = f"{'trajectories':>12}{'batch_size':>12}{'imports':>9}{'one batch':>11}{'all':>7}"
    print(f"peak memory in MiB\n{head}{'trajectories/s':>16}{'reduction':>11}{'prob_func':>11}")
    for n, batch_size in [*((n, None) for n in sizes), (sizes[-1], 10_000)]:
        row = apart(__file__, [n, batch_size])
        numbers = f"{row['imports']:>9.0f}{row['one batch']:>11.0f}{row['all']:>7.0f}"
        numbers += f"{row['rate']:>16.0f}{row['reduction']:>11}{row['prob_func']:>11}"
        print(f"{n:>12}{batch_size or 'default':>12}{numbers}", flush=True)
        if row["failed"]:
            sys.exit(f"{row['failed']} trajectories failed")


if __name__ == "__main__":
    main()
