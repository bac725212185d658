"""What a step of Rodas5P costs by the number of states, dense and sparse, beside C++ by hand.

    python benchmarks/stiff_sizes.py [--only dense,chain] [--sizes 8,30] [--limit SECONDS]

Ensembles of 64 trajectories in float64, at 1e-6: species that all act on each other, whose Jacobian
is dense, with rates of decay over four decades; and a reaction with diffusion on a line, whose
Jacobian has three diagonals. The tables that the limits of the compiled engine are chosen from
(`_MOST_UPDATES`, `_MOST_OPERATIONS`) are this one's.

A process a problem and size, on one core, without caches on disk. `us` is the least CPU time of
several calls, a trajectory and step tried; `first` is the CPU time of the first call, and `wall`
what it took. C++ does the same steps with 8 lanes of a fixed step size: the Jacobian, its LU
without exchanges, in tiles of registers (of three diagonals: Thomas's), eight stages and the norm
of the error.
"""

import argparse
import ctypes
import pathlib
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import Skip
from common.cpp import library
from common.processes import apart, is_worker, last_core
from common.report import header, line, machine
from common.timing import in_turns, timed

import ensembleode as eo


TRAJECTORIES = 64


def dense(u, p, t):
    rates, weights = p
    return weights @ (u * u) - rates * u


def chain(u, p, t):
    padded = jnp.pad(u, 1, mode="edge")
    return p[0] * (padded[2:] - 2 * u + padded[:-2]) + u - u**3


def case(name, size):
    """The field, the initial states, and what all trajectories share."""
    rng = np.random.default_rng(0)
    u0 = rng.uniform(0.5, 1.5, (TRAJECTORIES, size))
    if name == "chain":
        return chain, u0, [np.array(0.25 * size**2)]
    return dense, u0, [np.logspace(0, 4, size), rng.uniform(-1, 1, (size, size)) / size]


def ours(name, size, limit):
    """Microseconds a step, the steps, and seconds of the first call: of processor, and in all."""
    signal.alarm(limit)
    jax.config.update("jax_enable_x64", True)
    field, u0, shared = case(name, size)

    @jax.jit
    def solve(u0, p):
        prob = eo.ODEProblem(field, u0[0], (0.0, 2.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        options = {"abstol": 1e-6, "reltol": 1e-6, "engine": "compiled", "save_start": False}
        sim = eo.solve(ens, eo.Rodas5P(), eo.EnsembleThreads(1), trajectories=len(u0), **options)
        return jnp.sum(sim.stats.naccept + sim.stats.nreject), sim.u, sim.retcode

    args = jnp.asarray(u0), [jnp.asarray(x) for x in shared]
    started = time.perf_counter()
    first, (steps, _, retcodes) = timed(solve, *args, clock=time.process_time)
    wall = time.perf_counter() - started
    if (np.asarray(retcodes) != eo.ReturnCode.Success).any():
        raise RuntimeError(f"{name} of {size} states failed.")
    calls = {"": lambda: solve(*args)}
    (spent,) = in_turns(calls, 50, least=3, budget=2.0).values()
    return 1e6 * min(spent) / int(steps), int(steps) / len(u0), first, wall


def by_hand(name, size):
    """Microseconds a step of a trajectory in C++."""
    source = pathlib.Path(__file__).with_name("stiff_sizes.cpp")
    made = library(source, defines=[f"N={size}", f"DENSE={int(name == 'dense')}"])
    _, u0, shared = case(name, size)
    arrays = [np.ascontiguousarray(u0[:8].T), *map(np.ascontiguousarray, shared)]
    pointers = [x.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for x in arrays]
    made.run.restype, steps = ctypes.c_double, 2000 if size <= 16 else 300
    pointers += [None] * (3 - len(pointers))

    def call():
        return made.run(*pointers, ctypes.c_double(1e-6), ctypes.c_int(steps))

    (spent,) = in_turns({"": call}, 30, least=3, budget=1.0, clock=time.process_time).values()
    return 1e6 * min(spent) / (8 * steps)


def work(name, size, limit):
    found = ours(name, size, limit)
    try:
        return *found, by_hand(name, size)
    except Skip:
        return *found, None


def main():
    if is_worker(work):
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="dense,chain")
    parser.add_argument("--sizes", default="1,2,4,8,12,16,20,30,40,50,60")
    parser.add_argument("--limit", type=int, default=200, help="seconds for a problem and size")
    options = parser.parse_args()
    core, about = last_core(), machine("ensembleode", "jax")
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}\n")
    print(header(["", "states", "steps", "us", "C++", "ratio", "first", "wall"], left=2))
    caches = ("JAX_COMPILATION_CACHE_DIR", "ENSEMBLEODE_CACHE_DIR")
    for name in options.only.split(","):
        for size in map(int, options.sizes.split(",")):
            environment = dict.fromkeys(caches, "") | {"JAX_PLATFORMS": "cpu"}
            request = [name, size, options.limit]
            found = apart(__file__, request, cores=[core], environment=environment)
            us, steps, first, wall, hand = found
            cells = ["" if x is None else f"{x:.3g}" for x in (hand, hand and us / hand)]
            print(
                line(
                    [name, size, f"{steps:.0f}", f"{us:.3g}", *cells, f"{first:.3g}", f"{wall:.3g}"]
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
