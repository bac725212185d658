"""Networks whose weights all trajectories share: the compiled engine, and C++ by hand.

    python benchmarks/networks.py [--widths 16,64] [--trajectories 16,256] [--dtype float32]

A network 2 -> W -> W -> 2 with tanh is solved from 0 to 1 by Tsit5, with ten fixed steps and
adaptively at 1e-5, and differentiated by the states of each trajectory and by all weights. All run
in turns in one process, on one core, without JAX's cache on disk. C++ (networks.cpp, with g++ or
$CXX, the better of two widths) has fixed steps only, float32, and multiples of 64 trajectories.

A cell has the median CPU time in milliseconds, and the CPU time of the first call in seconds; that
of C++ has the time of a solve, and in brackets the ratios of our two times to it. The last
column is the largest difference of the ends from those of C++.
"""

import argparse
import contextlib
import ctypes
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import Skip
from common.cpp import library
from common.processes import held, last_core
from common.report import line, machine
from common.tasks import tanh_network
from common.timing import in_turns, timed

import ensembleode as eo


WAYS = "solve", "gradient"
STEPS = {"fixed": {"adaptive": False, "dt": 0.1}, "adaptive": {"abstol": 1e-5, "reltol": 1e-5}}


def case(width, n, dtype):
    """The initial states, and the weights."""
    rng = np.random.default_rng(0)
    sizes = (width, 2), (width, width), (2, width)
    p = [(rng.normal(size=s) / s[1] ** 0.5, 0.1 * rng.normal(size=s[0])) for s in sizes]
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (rng.normal(size=(n, 2)), p))


def functions(n, options):
    """The solve and its gradient."""

    def solve(u0, p):
        prob = eo.ODEProblem(tanh_network, u0[0], (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        given = {"trajectories": n, "save_start": False, "engine": "compiled", **options}
        return eo.solve(ens, eo.Tsit5(), eo.EnsembleThreads(1), **given).u

    def loss(u0, p):
        return jnp.sum(solve(u0, p) ** 2)

    return {"solve": jax.jit(solve), "gradient": jax.jit(jax.grad(loss, argnums=(0, 1)))}


def by_cpp(width, u0, p):
    """Solves by C++ with vectors of two widths, and where their ends are.

    **Raises:** `Skip` where it doesn't solve this case.
    """
    n = len(u0)
    if u0.dtype != np.float32 or n % 64:
        raise Skip("float32 and multiples of 64 trajectories")
    run = library(pathlib.Path(__file__).with_suffix(".cpp")).solve
    run.restype = None
    *weights, start = (np.ascontiguousarray(x) for x in (*jax.tree.leaves(p), u0))
    ends = np.empty((n, 2), np.float32)

    def call(vectors):
        number, at = ctypes.c_long, lambda x: ctypes.c_void_p(x.ctypes.data)
        pointers = (ctypes.c_void_p * len(weights))(*(x.ctypes.data for x in weights))
        steps = number(10), ctypes.c_float(0.1)
        run(ctypes.c_int(vectors), number(width), pointers, number(n), at(start), *steps, at(ends))

    return {f"C++ {x}": functools.partial(call, x) for x in (2, 4)}, ends


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="16,64,128,256")
    parser.add_argument("--trajectories", default="16,256,1024,4096")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=float, default=5.0)
    given = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_enable_x64", True)
    about, core = machine("ensembleode", "jax"), last_core()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}\n")
    print(line(["W", "trajectories", "steps", *WAYS, "C++", "difference"]))
    for width in map(int, given.widths.split(",")):
        for n in map(int, given.trajectories.split(",")):
            args = case(width, n, given.dtype)
            for name, options in STEPS.items():
                with held(None if core is None else {core}):
                    cells = row(width, n, args, options, given.budget)
                print(line([width, n, name, *cells]), flush=True)


def row(width, n, args, options, budget):
    """The cells of a row: of the ways, of C++, and the difference from it."""
    runs, firsts, found = {}, {}, {}
    for way, run in functions(n, options).items():
        firsts[way], found[way] = timed(run, *args, clock=time.process_time)
        runs[way] = lambda run=run: jax.block_until_ready(run(*args))
    hand, ends = {}, None
    if "dt" in options:
        with contextlib.suppress(Skip):
            hand, ends = by_cpp(width, *args)
    times = in_turns(runs | hand, 200, least=5, budget=budget, clock=time.process_time)
    median = {way: 1e3 * float(np.median(spent)) for way, spent in times.items()}
    cells = [f"{median[way]:.3g}, {firsts[way]:.1f}" for way in WAYS]
    if ends is None:
        return [*cells, "", ""]
    best = min(median[way] for way in hand)
    ratios = ", ".join(f"{median[way] / best:.2f}" for way in WAYS)
    off = np.abs(np.asarray(found["solve"][:, -1]) - ends).max()
    return [*cells, f"{best:.3g} ({ratios})", f"{off:.1e}"]


if __name__ == "__main__":
    main()
