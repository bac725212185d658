"""The Julia engine beside the compiled engine and diffeqpy: time and error, on the same ensembles.

The ensembles are Lorenz trajectories with rho from 0 to 21, from (1, 0, 0) to t = 10, by `Tsit5` at
tolerances of 1e-6, in float64; only the end is saved. All contenders run in one process:

- `compiled` and `julia`: `solve` with that engine, called eagerly with new functions each time, as
    user code would do (which traces them anew, some milliseconds);
- `diffeqpy, f in Python`: its `EnsembleProblem`, whose right-hand side Julia calls at each stage of
    each step;
- `diffeqpy, f in Julia`: the same with a right-hand side in Julia, by `seval`, as the documentation
    of diffeqpy recommends. `prob_func` is Python in both.

`first call` includes the compilation for a size, and at the first size all other compilation as
well. The time is the best of the later calls, in which the contenders take turns. `ratio` is
relative to the Julia engine on one core (less than 1 is faster). The errors are those of any
component at the end, against Vern9 at 1e-12 by the compiled engine: the median, and the largest
error. The largest error grows with the number of trajectories, because some come ever nearer to rho =
13.93, where they may take the one side or the other. A contender is skipped if a call would need
longer than `--seconds`, according to its time at the size before.

diffeqpy takes part if it is installed. It asks juliapkg for all of DifferentialEquations, which is
not needed here: use `pip install --no-deps diffeqpy`, with a Julia named by `PYTHON_JULIACALL_EXE`
and `PYTHON_JULIACALL_PROJECT`.

    python benchmarks/julia.py [--trajectories N ...] [--repeats R] [--seconds S]
"""

import argparse
import dataclasses
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import solution
from common.report import cpu, named, versions
from common.tasks import lorenz, lorenz_components, lorenz_task
from common.timing import in_turns, timed

import ensembleode as eo
import ensembleode.julia
from ensembleode.engines.julia import session


jax.config.update("jax_enable_x64", True)
U0, T1, TOL = [1.0, 0.0, 0.0], 10.0, 1e-6
BASE = "julia, EnsembleSerial"  # what the ratios are to


#
# The contenders: functions of the array of rho that give the states at the end
#


def by_engine(engine, ensemblealg, alg=None, tol=TOL):
    def solve(rhos):
        task = lorenz_task(len(rhos), np.float64, T1, tol=tol)
        task = dataclasses.replace(task, f=lambda u, p, t: lorenz(u, p, t))
        where = {"where": ensemblealg, "alg": alg, "first": {"p": 28.0}}
        sim = solution(task, jnp.array(U0), rhos, engine=engine, **where)
        return np.asarray(sim.u)[:, -1]

    return solve


def in_python(u, p, t):
    return lorenz_components(u, p)


LORENZ = """
function (du, u, p, t)
    x, y, z = u
    du[1] = 10.0 * (y - x)
    du[2] = x * (p - z) - y
    du[3] = x * y - 8.0 / 3.0 * z
    nothing
end
"""
ENDS = "sim -> reduce(hcat, [s.u[end] for s in sim.u])"


def by_diffeqpy():
    """One for each right-hand side.

    Julia's garbage collector waits for each thread that Julia has been called in. So all is done in
    the one thread that the engine calls it in.
    """
    in_julias_thread = session.start()._thread.submit
    try:
        sciml, tsit5, jl = in_julias_thread(modules_of_diffeqpy).result()
    except ImportError:
        print("skipped diffeqpy: not installed", file=sys.stderr)
        return {}

    def contender(f):
        def solve(rhos):
            rhos = np.asarray(rhos).tolist()
            prob = sciml.ODEProblem(f, U0, (0.0, T1), 28.0)

            def prob_func(prob, ctx):
                return sciml.remake(prob, p=rhos[ctx.sim_id - 1])

            ens = sciml.EnsembleProblem(prob, prob_func=prob_func, safetycopy=False)
            how = {"abstol": TOL, "reltol": TOL, "save_everystep": False, "save_start": False}
            how |= {"trajectories": len(rhos)}
            sim = sciml.solve(ens, tsit5.Tsit5(), sciml.EnsembleSerial(), **how)
            return np.array(ends(sim)).T

        return lambda rhos: in_julias_thread(solve, rhos).result()

    in_julia, ends = in_julias_thread(lambda: [jl.seval(x) for x in (LORENZ, ENDS)]).result()
    return {
        "diffeqpy, f in Julia": contender(in_julia),
        "diffeqpy, f in Python": contender(in_python),
    }


def modules_of_diffeqpy():
    """What its `de` collects from, but for the equations that aren't needed here."""
    from diffeqpy import load_julia_packages

    # It looks for a Julia, though one runs.
    folder = os.path.dirname(ensembleode.julia.status()["executable"])
    os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", "")])
    import juliacall

    return *load_julia_packages("SciMLBase", "OrdinaryDiffEqTsit5"), juliacall.Main


#
# Measuring
#


def measure(contenders, rhos, repeats, limit):
    """The seconds of the first call, and of the others, and what each gives at the end."""
    calls = {name: functools.partial(solve, rhos) for name, solve in contenders.items()}
    firsts = {name: timed(call) for name, call in calls.items()}
    first, ends = ({name: pair[i] for name, pair in firsts.items()} for i in (0, 1))
    return first, in_turns(calls, repeats, share=limit), ends


def report(n, contenders, expected_seconds, repeats, limit):
    """Print a table; the best seconds of each contender."""
    rhos = jnp.linspace(0.0, 21.0, n)
    slow = {name for name in contenders if expected_seconds.get(name, 0.0) > limit}
    taking_part = {name: solve for name, solve in contenders.items() if name not in slow}
    first, seconds, ends = measure(taking_part, rhos, repeats, limit)
    exact = by_engine("compiled", eo.EnsembleThreads(), eo.Vern9(), 1e-12)(rhos)
    best = {name: min(times) for name, times in seconds.items()}
    print(f"\n{n} trajectories")
    header = ("", "seconds", "calls", "ratio", "first call", "median off", "most off")
    print("{:<24}{:>11}{:>7}{:>9}{:>12}{:>12}{:>10}".format(*header))
    for name in contenders:
        if name in slow:
            print(f"{name:<24}{'skipped':>11}, at about {expected_seconds[name]:.0f} s")
            continue
        errors = np.abs(ends[name] - exact)
        calls, ratio = len(seconds[name]), best[name] / best[BASE]
        numbers = f"{best[name]:>11.4f}{calls:>7}{ratio:>9.2f}{first[name]:>12.2f}"
        off = f"{np.median(errors):>12.1e}{errors.max():>10.1e}"
        print(f"{name:<24}{numbers}{off}", flush=True)
    return {**expected_seconds, **best}


def machine(julia):
    found = versions("jax", "juliacall", "diffeqpy", "ensembleode")
    about = {"Python": found.pop("Python"), "Julia": julia["julia"]}
    about["OrdinaryDiffEqTsit5"] = julia["packages"]["OrdinaryDiffEqTsit5"]
    threads = f"{julia['threads']} Julia threads, {len(jax.devices('cpu'))} JAX devices"
    busy = f"; load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{cpu()}, {os.cpu_count()} cores, {threads}; {named(about | found)}{busy}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = [100, 1000, 10_000, 100_000]
    parser.add_argument("--trajectories", type=int, nargs="+", default=sizes)
    parser.add_argument("--repeats", type=int, default=3, help="at most; by default 3")
    parser.add_argument("--seconds", type=float, default=60.0, help="for a contender, at a size")
    options = parser.parse_args()
    try:
        took, _ = timed(lambda: ensembleode.julia.start(process=False))
    except ensembleode.julia.JuliaError as error:
        sys.exit(str(error))
    print(machine(ensembleode.julia.status()))
    print(f"Julia started in {took:.1f} s", flush=True)
    contenders = {
        f"{engine}, {type(where).__name__}": by_engine(engine, where)
        for engine in ("compiled", "julia")
        for where in (eo.EnsembleSerial(), eo.EnsembleThreads())
    }
    contenders |= by_diffeqpy()
    best, before = {}, None
    for n in options.trajectories:
        expected = {name: t * n / before for name, t in best.items()} if before else {}
        best, before = report(n, contenders, expected, options.repeats, options.seconds), n


if __name__ == "__main__":
    main()
