"""What a step of Rodas5P costs by the number of states, dense and sparse, beside C++ by hand.

    python benchmarks/stiff_sizes.py [--only dense,chain] [--sizes 8,30] [--limit SECONDS]

Ensembles of 64 trajectories in float64, at 1e-6: species that all act on each other, whose Jacobian
is dense, with rates of decay over four decades; and a reaction with diffusion on a line, whose
Jacobian has three diagonals. The tables that the limits of the compiled engine are chosen from
(`_MOST_UPDATES`, `_MOST_OPERATIONS`) are this one's.

A process a problem and size, on one core, without caches on disk. `us` is the CPU time of a call,
the least of several, a trajectory and step tried; `first` is the CPU time of the first call, and
`wall` what it took. `gradient` and what follows are the same for a solve with the gradient of the
squares of its ends by the initial states and all parameters (dense: n + n^2). C++ does the same
steps with 8 lanes of a fixed step size: the Jacobian, its LU without exchanges, in tiles of
registers (of three diagonals: Thomas's), eight stages and the norm of the error.
"""

import ctypes
import pathlib
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import Skip
from common.cpp import library
from common.processes import is_worker
from common.report import line
from common.sizes import by_size
from common.timing import best_of, timed

import ensembleode as eo


TRAJECTORIES = 64
ROUND = 0.3


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
    """The steps of a trajectory; and then, for the solve and for the gradient, microseconds a step,
    and seconds of the first call: of processor, and in all."""
    signal.alarm(limit)
    jax.config.update("jax_enable_x64", True)
    field, u0, shared = case(name, size)

    def solve(u0, p):
        prob = eo.ODEProblem(field, u0[0], (0.0, 2.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        options = {"abstol": 1e-6, "reltol": 1e-6, "engine": "compiled", "save_start": False}
        sim = eo.solve(ens, eo.Rodas5P(), eo.EnsembleThreads(1), trajectories=len(u0), **options)
        return jnp.sum(sim.u**2), (jnp.sum(sim.stats.naccept + sim.stats.nreject), sim.retcode)

    args = jnp.asarray(u0), [jnp.asarray(x) for x in shared]
    found = []
    for fn in (solve, jax.grad(solve, argnums=(0, 1), has_aux=True)):
        fn, started = jax.jit(fn), time.perf_counter()
        first, (_, (steps, retcodes)) = timed(fn, *args, clock=time.process_time)
        wall = time.perf_counter() - started
        if (np.asarray(retcodes) != eo.ReturnCode.Success).any():
            raise RuntimeError(f"{name} of {size} states failed.")
        us = seconds(lambda fn=fn: jax.block_until_ready(fn(*args))) * 1e6 / int(steps)
        found += us, first, wall
    return int(steps) / len(u0), *found


def seconds(call):
    """CPU time of a call: the least of several rounds of many, as the clock of it is coarse."""
    started = time.perf_counter()
    call()
    n = max(1, int(ROUND / (time.perf_counter() - started)))
    return best_of(lambda: [call() for _ in range(n)], 5, clock=time.process_time)[0] / n


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

    return seconds(call) * 1e6 / (8 * steps)


def work(name, size, limit):
    found = ours(name, size, limit)
    try:
        return *found, by_hand(name, size)
    except Skip:
        return *found, None


def main():
    if is_worker(work):
        return
    first = ["first", "wall"]
    cases = by_size(
        __file__,
        __doc__,
        only="dense,chain",
        sizes="1,2,4,8,12,16,20,30,40,50,60",
        limit="a problem and size",
        columns=["states", "steps", "us", "C++", "ratio", *first, "gradient", *first],
    )
    for name, size, cold in cases:
        steps, us, first, wall, *gradient, hand = cold()
        numbers = us, hand, hand and us / hand, first, wall, *gradient
        cells = ["" if x is None else f"{x:.3g}" for x in numbers]
        print(line([name, size, f"{steps:.0f}", *cells]), flush=True)


if __name__ == "__main__":
    main()
