"""Networks whose weights all trajectories share: the compiled engine beside the lanes engine.

    python benchmarks/networks.py [--widths 16,64] [--trajectories 16,256] [--dtype float32]

A network 2 -> W -> W -> 2 with tanh is solved from 0 to 1 by Tsit5, with ten fixed steps and
adaptively at 1e-5, and differentiated by the states of each trajectory and by all weights. Both
engines run in turns in one process, on one core, without JAX's cache on disk. A cell has the median
CPU time in milliseconds, and the CPU time of the first call in seconds.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from common.report import line
from common.timing import in_turns, timed

import ensembleode as eo


ENGINES = "compiled", "lanes"
STEPS = {"fixed": {"adaptive": False, "dt": 0.1}, "adaptive": {"abstol": 1e-5, "reltol": 1e-5}}


def network(u, p, t):
    (w1, b1), (w2, b2), (w3, b3) = p
    return w3 @ jnp.tanh(w2 @ jnp.tanh(w1 @ u + b1) + b2) + b3


def case(width, n, dtype):
    """The initial states, and the weights."""
    rng = np.random.default_rng(0)
    sizes = (width, 2), (width, width), (2, width)
    p = [(rng.normal(size=s) / s[1] ** 0.5, 0.1 * rng.normal(size=s[0])) for s in sizes]
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (rng.normal(size=(n, 2)), p))


def functions(engine, n, options):
    """The solve and its gradient."""

    def solve(u0, p):
        prob = eo.ODEProblem(network, u0[0], (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        given = {"trajectories": n, "save_start": False, "engine": engine, **options}
        return eo.solve(ens, eo.Tsit5(), eo.EnsembleThreads(1), **given).u

    def loss(u0, p):
        return jnp.sum(solve(u0, p) ** 2)

    return {"solve": jax.jit(solve), "gradient": jax.jit(jax.grad(loss, argnums=(0, 1)))}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="16,64,128,256")
    parser.add_argument("--trajectories", default="16,256,1024,4096")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=float, default=5.0)
    given = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_enable_x64", True)
    ways = [f"{engine}, {what}" for what in ("solve", "gradient") for engine in ENGINES]
    print(line(["W", "trajectories", "steps", *ways]))
    for width in map(int, given.widths.split(",")):
        for n in map(int, given.trajectories.split(",")):
            args = case(width, n, given.dtype)
            for name, options in STEPS.items():
                runs, firsts = {}, {}
                for engine in ENGINES:
                    for what, run in functions(engine, n, options).items():
                        way = f"{engine}, {what}"
                        firsts[way], _ = timed(run, *args, clock=time.process_time)
                        runs[way] = lambda run=run, args=args: run(*args)
                times = in_turns(runs, 200, least=5, budget=given.budget, clock=time.process_time)
                cells = [f"{1e3 * np.median(times[w]):.3g}, {firsts[w]:.1f}" for w in ways]
                print(line([width, n, name, *cells]), flush=True)


if __name__ == "__main__":
    main()
