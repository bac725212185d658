"""Lorenz 96 from 40 to 1,000 components: the compiled engine, and C++ with loops by hand.

    python benchmarks/lorenz_96.py [--sizes 40,65,100,200,400,1000] [--trajectories N]
        [--dtype float64] [--budget SECONDS]

The field is written with `jnp.roll`, and solved adaptively by Tsit5 at 1e-6; the gradient is that
of half the sum of squares of the ends with respect to all initial states and parameters. C++
(limits.cpp, with g++ or $CXX) has loops over the components, which are unrolled up to 64 of them.

Both run in turns in one process, on one core. A cell has the least CPU time in nanoseconds for each
trajectory, attempted step and component, of the solve and of the gradient; in brackets are the
ratios to the first size, and to C++. `first` is the CPU time of the first call of each in seconds.
The last column is the largest difference of the ends from those of C++.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from common.processes import held, last_core
from common.report import header, line, machine
from common.timing import in_turns, timed
from limits import by_cpp, by_engine
from limits_cases import Case, of_lorenz_96


class Rolls(Case):
    def field(self, u, p, t):
        return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u + p[0]


def measured(problem, dtype, budget):
    """For each way: the nanoseconds, and the seconds of its first call; and the difference."""
    ways = {"compiled": by_engine("compiled"), "C++": by_cpp}
    runs, firsts, found = {}, {}, {}
    for name, way in ways.items():
        for what, gradient in (("solve", False), ("gradient", True)):
            run = way(problem, dtype, gradient)
            firsts[name, what], found[name, what] = timed(run, clock=time.process_time)
            runs[name, what] = run
    ends = {name: np.asarray(found[name, "solve"][0], float) for name in ways}
    tried = {name: float(np.sum(found[name, "solve"][1])) for name in ways}
    spent = in_turns(runs, 100, least=3, budget=budget, clock=time.process_time)
    each = problem.u0.shape[1]
    ns = {key: 1e9 * min(x) / (tried[key[0]] * each) for key, x in spent.items()}
    return ns, firsts, float(np.abs(ends["compiled"] - ends["C++"]).max())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="40,65,100,200,400,1000")
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--budget", type=float, default=20.0)
    given = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_enable_x64", True)
    about, core = machine("ensembleode", "jax"), last_core()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}\n")
    print(header(["components", "solve", "gradient", "C++", "its gradient", "first", "difference"]))
    base = None
    for size in map(int, given.sizes.split(",")):
        with held(None if core is None else {core}):
            problem = of_lorenz_96(size, given.trajectories, 0.5, Rolls)
            ns, firsts, difference = measured(problem, given.dtype, given.budget)
        base = base or ns
        cells = [
            f"{ns['compiled', x]:.2f} ({ns['compiled', x] / base['compiled', x]:.2f}, "
            f"{ns['compiled', x] / ns['C++', x]:.2f})"
            for x in ("solve", "gradient")
        ]
        cells += [f"{ns['C++', x]:.2f}" for x in ("solve", "gradient")]
        cells.append(", ".join(f"{firsts['compiled', x]:.1f}" for x in ("solve", "gradient")))
        print(line([size, *cells, f"{difference:.1e}"]), flush=True)


if __name__ == "__main__":
    main()
