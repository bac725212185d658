"""EnsembleColumns: all trajectories as the columns of one matrix, with the same steps.

    python benchmarks/columns.py [--trajectories N ...] [--two-threads] [--json FILE]

The problems are Lorenz (float64, t = 0 to 5, rho from 20 to 28, rtol and atol 1e-6) and networks
2 -> W -> W -> 2 with tanh (float32, t = 0 to 1, 1e-5). The ways are

- `compiled`: `EnsembleColumns` with this engine;
- `by hand`: `diffrax.diffeqsolve` of the matrix, with `f` mapped over the columns;
- `own steps`: the compiled engine with `EnsembleThreads`, each trajectory with its own steps.

Each call is in `jit`; `gradient` is that of the sum of squared ends by the initial states and the
parameters. All are in one process and take turns, on one core unless `--two-threads`. The
milliseconds are the third least of the rounds: CPU time, with two threads wall time. `error` is
the largest difference of the ends from those of Vern9 at 1e-12, relative to the largest state.
"""

import argparse
import functools
import itertools
import os
import sys
import time


# (XLA reads this when it starts.)
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    "" if "--two-threads" in sys.argv else " --xla_cpu_multi_thread_eigen=false"
)

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from common.processes import held, last_core
from common.report import header, line, machine, PEERS, write_json
from common.tasks import lorenz, tanh_network
from common.timing import in_turns, timed


jax.config.update("jax_enable_x64", True)

import ensembleode as eo  # noqa: E402


TWO = "--two-threads" in sys.argv
HEADER = ("problem", "N", "way", "error", "forward", "gradient", "first", "its gradient")


def weights(width):
    rng, sizes = np.random.default_rng(0), (2, width, width, 2)
    return [
        (jnp.asarray(rng.normal(size=(m, n)) / np.sqrt(n), jnp.float32), jnp.zeros(m, jnp.float32))
        for n, m in itertools.pairwise(sizes)
    ]


def problem(name, n):
    """The field, the initial states, the parameters, and whether each trajectory has its own of
    these; and the end and the tolerance."""
    if name == "Lorenz":
        return lorenz, jnp.ones((n, 3)), jnp.linspace(20.0, 28.0, n), True, 5.0, 1e-6
    starts = jnp.asarray(np.random.default_rng(1).normal(size=(n, 2)), jnp.float32)
    return tanh_network, starts, weights(int(name)), False, 1.0, 1e-5


def by_compiled(name, n, ensemblealg, alg=None, tol=None):
    f, u0, p, own, end, usual = problem(name, n)
    tol = tol or usual
    prob = eo.ODEProblem(f, u0[0], (0.0, end))

    def prob_func(u0, p, prob, ctx):
        return eo.remake(prob, u0=u0[ctx.index], p=p[ctx.index] if own else p)

    def ends(u0, p):
        ens = eo.EnsembleProblem(prob, functools.partial(prob_func, u0, p))
        options = {"trajectories": n, "engine": "compiled", "abstol": tol, "reltol": tol}
        options |= {"save_start": False, "maxiters": 4096}
        return eo.solve(ens, alg or eo.Tsit5(), ensemblealg, **options).u[:, -1]

    return ends, (u0, p)


def by_hand(name, n):
    f, u0, p, own, end, tol = problem(name, n)
    controller = diffrax.PIDController(rtol=tol, atol=tol)

    def ends(u0, p):
        term = diffrax.ODETerm(lambda t, u, p: jax.vmap(f, (0, 0 if own else None, None))(u, p, t))
        given = term, diffrax.Tsit5(), 0.0, end, None, u0, p
        return diffrax.diffeqsolve(*given, stepsize_controller=controller).ys[-1]

    return ends, (u0, p)


def ways(name, n):
    columns, threads = eo.EnsembleColumns(), eo.EnsembleThreads(2 if TWO else 1)
    return {
        "compiled": by_compiled(name, n, columns),
        "by hand": by_hand(name, n),
        "own steps": by_compiled(name, n, threads),
    }


def reference(name, n):
    ends, args = by_compiled(name, n, eo.EnsembleThreads(1), eo.Vern9(), 1e-12)
    return np.asarray(ends(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args)))


def measured(name, n, rounds):
    forward, backward, found = {}, {}, {}
    exact = reference(name, n)
    for way, (ends, args) in ways(name, n).items():

        def loss(u0, p, ends=ends):
            return jnp.sum(ends(u0, p) ** 2)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
        forward[way] = functools.partial(jax.jit(ends), *args)
        backward[way] = functools.partial(gradient, *args)
        first, got = timed(forward[way], clock=time.process_time)
        error = np.max(np.abs(np.asarray(got) - exact)) / np.max(np.abs(exact))
        of_gradient, _ = timed(backward[way], clock=time.process_time)
        found[way] = {"error": float(error), "first": first, "first gradient": of_gradient}
    clock = time.perf_counter if TWO else time.process_time
    for what, calls in (("forward", forward), ("gradient", backward)):
        for way, spent in in_turns(calls, rounds, clock=clock).items():
            found[way][what] = 1e3 * sorted(spent)[2]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problems", nargs="+", default=["Lorenz", "16", "64", "256"])
    parser.add_argument("--trajectories", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--two-threads", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(machine(*PEERS))
    print(header(HEADER, 3))
    report = []
    for name in options.problems:
        for n in options.trajectories:
            for way, x in measured(name, n, options.rounds).items():
                times = (f"{x[what]:.3g}" for what in ("forward", "gradient"))
                firsts = (f"{x[what]:.2g}" for what in ("first", "first gradient"))
                print(line((name, n, way, f"{x['error']:.1e}", *times, *firsts)), flush=True)
                report.append({"problem": name, "n": n, "way": way, **x})
    if options.json:
        write_json(options.json, {"machine": machine(*PEERS), "rows": report})


if __name__ == "__main__":
    if TWO:
        main()
    else:
        with held({last_core()}):
            main()
