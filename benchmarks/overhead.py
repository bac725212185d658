"""What `solve` costs on top of a hand-written `jax.jit(jax.vmap(diffrax.diffeqsolve))`.

Lorenz trajectories with rho from 0 to 21, to t = 10, at the default tolerances, three ways:

- `by hand`: diffrax, jitted and vmapped once, given the array of rho;
- `eager`: `eo.solve` called again and again, with new functions `f` and `prob_func` each time;
- `in jit`: `eo.solve` inside a jitted function of the array of rho.

Each returns states, result codes and step counts. The three take turns, so that a slow moment of
the machine hits all of them; the bounds are on the minimum (`eager`: 10% and 5 ms more than by
hand, `in jit`: 5%).

    python benchmarks/overhead.py [--trajectories N ...] [--repeats R] [--float32]
"""

import argparse
import os
import pathlib
import platform
import time

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo


T1 = 10.0


def lorenz(u, p, t):
    x, y, z = u
    return jnp.stack([10.0 * (y - x), x * (p - z) - y, x * y - 8.0 / 3.0 * z])


def by_hand(rhos, u0, times):
    saveat = diffrax.SaveAt(t1=True) if times is None else diffrax.SaveAt(ts=times)
    terms = diffrax.ODETerm(lambda t, u, p: lorenz(u, p, t))
    controller = diffrax.PIDController(rtol=1e-3, atol=1e-6)

    def one(rho):
        sol = diffrax.diffeqsolve(
            terms,
            diffrax.Tsit5(),
            0.0,
            T1,
            None,
            u0,
            rho,
            saveat=saveat,
            stepsize_controller=controller,
            max_steps=100_000,
            throw=False,
        )
        counts = sol.stats["num_accepted_steps"], sol.stats["num_rejected_steps"]
        return sol.ys, sol.result, *counts

    solve = jax.jit(jax.vmap(one))
    return lambda: solve(rhos)


def with_solve(rhos, u0, times):
    """Makes new functions whenever it is called, as a user's own function would."""
    prob = eo.ODEProblem(lambda u, p, t: lorenz(u, p, t), u0, (0.0, T1), rhos[0])
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=rhos[ctx.index]))
    options = {"save_start": False} if times is None else {"saveat": times}
    options |= {"trajectories": len(rhos), "engine": "diffrax"}
    sim = eo.solve(ens, eo.Tsit5(), eo.EnsembleGPUArray(), **options)
    return sim.u, sim.retcode, sim.stats.naccept, sim.stats.nreject


def eager(rhos, u0, times):
    return lambda: with_solve(rhos, u0, times)


def in_jit(rhos, u0, times):
    solve = jax.jit(lambda rhos: with_solve(rhos, u0, times))
    return lambda: solve(rhos)


def measure(ways, repeats, budget):
    """Seconds `[way, repeat]`, and what each returned."""
    results, seconds = [], []
    for _ in range(2):  # compile, and warm up
        results = [jax.block_until_ready(way()) for way in ways]
    began = time.perf_counter()
    while len(seconds) < repeats and (len(seconds) < 3 or time.perf_counter() - began < budget):
        row = []
        for way in ways:
            started = time.perf_counter()
            jax.block_until_ready(way())
            row.append(time.perf_counter() - started)
        seconds.append(row)
    return np.array(seconds).T, results


def report(n, rows, dtype, repeats, budget):
    rhos = jnp.linspace(0.0, 21.0, n, dtype=dtype)
    u0 = jnp.array([1.0, 0.0, 0.0], dtype)
    times = None if rows == 1 else np.linspace(0.0, T1, rows, dtype=dtype)
    ways = [make(rhos, u0, times) for make in (by_hand, eager, in_jit)]
    seconds, results = measure(ways, repeats, budget)
    best, median = 1e3 * seconds.min(axis=1), 1e3 * np.median(seconds, axis=1)
    expected = np.asarray(results[0][0])
    steps = np.asarray(results[0][2] + results[0][3])
    saved = "endpoint" if times is None else f"{rows} times"
    print(f"\n{n} trajectories, {saved} in {u0.dtype}, {len(seconds[0])} repeats; ", end="")
    print(f"{steps.mean():.0f} steps on average, {steps.max()} at most")
    header = ("", "min ms", "median ms", "ratio", "median", "more ms", "difference", "bound")
    print("{:<9}{:>11}{:>11}{:>8}{:>8}{:>10}{:>12}  {}".format(*header))
    bounds = (np.inf, 1.10 * best[0] + 5.0, 1.05 * best[0])
    names = ("by hand", "eager", "in jit")
    for i, name in enumerate(names):
        ratio, ratio_median = best[i] / best[0], np.median(seconds[i] / seconds[0])
        difference = np.abs(np.asarray(results[i][0])[:, -1] - expected[:, -1]).max()
        numbers = f"{best[i]:>11.2f}{median[i]:>11.2f}{ratio:>8.3f}{ratio_median:>8.3f}"
        verdict = "" if i == 0 else "met" if best[i] <= bounds[i] else "MISSED"
        print(f"{name:<9}{numbers}{best[i] - best[0]:>10.2f}{difference:>12.1e}  {verdict}")


def machine():
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    device = jax.devices()[0]
    return (
        f"{cpu}, {os.cpu_count()} cores; JAX device {device.platform} ({device.device_kind}); "
        f"Python {platform.python_version()}, jax {jax.__version__}, "
        f"diffrax {diffrax.__version__}, ensembleode {eo.__version__}"
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
