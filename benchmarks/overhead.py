"""What `solve` costs on top of a hand-written `jax.jit(jax.vmap(diffrax.diffeqsolve))`.

Lorenz trajectories with rho from 0 to 21, to t = 10, at the default tolerances, are solved in three
ways:

- `by hand`: diffrax, jitted and vmapped once, given the array of rho;
- `eager`: `eo.solve` called again and again, with new functions `f` and `prob_func` each time;
- `in jit`: `eo.solve` inside a jitted function of the array of rho.

Each way returns states, result codes and step counts. The three take turns, so that a slow moment
of the machine hits all of them. The bounds are on the minimum (`eager`: 10% and 5 ms more than by
hand, `in jit`: 5%).

    python benchmarks/overhead.py [--trajectories N ...] [--repeats R] [--float32]
"""

import argparse
import dataclasses
import os

import jax
import numpy as np
from common.contenders import by_diffrax, solution
from common.report import cpu, named, versions
from common.tasks import lorenz, lorenz_task
from common.timing import in_turns

import ensembleode as eo


T1 = 10.0


def by_hand(task):
    def gives(sol):
        counts = sol.stats["num_accepted_steps"], sol.stats["num_rejected_steps"]
        return sol.ys, sol.result, *counts

    solve, inputs = jax.jit(by_diffrax(task, gives=gives)), task.inputs()
    return lambda: solve(*inputs)


def with_solve(task, u0, p):
    """Makes new functions whenever it is called, as a user's own function would."""
    task = dataclasses.replace(task, f=lambda u, p, t: lorenz(u, p, t))
    sim = solution(task, u0, p, eo.EnsembleGPUArray(), engine="diffrax")
    return sim.u, sim.retcode, sim.stats.naccept, sim.stats.nreject


def eager(task):
    inputs = task.inputs()
    return lambda: with_solve(task, *inputs)


def in_jit(task):
    solve, inputs = jax.jit(lambda u0, p: with_solve(task, u0, p)), task.inputs()
    return lambda: solve(*inputs)


WAYS = {"by hand": by_hand, "eager": eager, "in jit": in_jit}


def report(n, rows, dtype, repeats, budget):
    times = None if rows == 1 else np.linspace(0.0, T1, rows, dtype=dtype)
    task = lorenz_task(n, dtype, T1, rtol=1e-3, atol=1e-6, times=times)
    ways = {name: make(task) for name, make in WAYS.items()}
    in_turns(ways, 1)  # compiles
    results = [jax.block_until_ready(way()) for way in ways.values()]
    seconds = np.array([*in_turns(ways, repeats, least=3, budget=budget).values()])
    best, median = 1e3 * seconds.min(axis=1), 1e3 * np.median(seconds, axis=1)
    expected = np.asarray(results[0][0])
    steps = np.asarray(results[0][2] + results[0][3])
    saved = "endpoint" if times is None else f"{rows} times"
    print(f"\n{n} trajectories, {saved} in {task.dtype}, {len(seconds[0])} repeats; ", end="")
    print(f"{steps.mean():.0f} steps on average, {steps.max()} at most")
    header = ("", "min ms", "median ms", "ratio", "median", "more ms", "difference", "bound")
    print("{:<9}{:>11}{:>11}{:>8}{:>8}{:>10}{:>12}  {}".format(*header))
    bounds = (np.inf, 1.10 * best[0] + 5.0, 1.05 * best[0])
    for i, name in enumerate(ways):
        ratio, ratio_median = best[i] / best[0], np.median(seconds[i] / seconds[0])
        difference = np.abs(np.asarray(results[i][0])[:, -1] - expected[:, -1]).max()
        numbers = f"{best[i]:>11.2f}{median[i]:>11.2f}{ratio:>8.3f}{ratio_median:>8.3f}"
        verdict = "" if i == 0 else "met" if best[i] <= bounds[i] else "MISSED"
        print(f"{name:<9}{numbers}{best[i] - best[0]:>10.2f}{difference:>12.1e}  {verdict}")


def machine():
    device = jax.devices()[0]
    about = versions("jax", "diffrax") | {"ensembleode": eo.__version__}
    return (
        f"{cpu()}, {os.cpu_count()} cores; JAX device {device.platform} ({device.device_kind}); "
        f"{named(about)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--repeats", type=int, default=100, help="at most; by default 100")
    parser.add_argument("--seconds", type=float, default=40.0, help="for each table; at least 3")
    parser.add_argument("--float32", action="store_true", help="instead of float64")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", not options.float32)
    dtype = np.float32 if options.float32 else np.float64
    print(machine())
    for n in options.trajectories:
        report(n, 1, dtype, options.repeats, options.seconds)
    report(1000, 31, dtype, options.repeats, options.seconds)


if __name__ == "__main__":
    main()
