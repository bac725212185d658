"""Ensembles of stiff problems on one core: times and errors, with other libraries and C++.

    python benchmarks/stiff.py [--only ROBER,VDP] [--ways C++,Rodas5P] [--n 1024] [--json FILE]
    python benchmarks/stiff.py --gradients | --first

The problems are those of the "Test Set for IVP Solvers" (common/ivp_test_set.py), in float64. All
rate constants of each trajectory are perturbed by about 10%, and the end is saved. Relative
tolerances are from 1e-3 to 1e-8. The absolute tolerance is 1e-2 times the relative one, and 1e-4
times the relative one for ROBER.

The contenders are `C++`, Rodas5P written by hand (stiff.cpp, with g++ or $CXX), which needs
AVX-512, and `C++ 23`, Rosenbrock23; `Rodas5P`, `Rodas4` and `Rosenbrock23` by the compiled engine,
and `Kvaerno5` and `KenCarp4` by `solve` on diffrax, all of them in `jit`; `diffrax`, its own
Kvaerno5, vmapped; `LSODA`, numbalsoda (LSODA in C, with the loop over trajectories in Numba);
`BDF`, `ESDIRK34` and `TR-BDF2`, pydiffsol; `SciPy LSODA` and `SciPy Radau`; `Julia`, Rodas5P by the
Julia engine. Contenders that are not installed are left out. Slow ones solve fewer trajectories,
and their times are scaled.

All contenders run in one process, held to one core, and take turns. The time is the least CPU time
(slow contenders run only once). `error` is the largest relative error of a component at the end,
for the median of the trajectories that reached it, against Rodas5P at 1e-12. The last columns are
the least times for such an error, interpolated between the tolerances, and in brackets their ratios
to that of `Rodas5P`.

`--gradients` prints the times of the gradient of a sum of all ends with respect to all rate
constants, by `ReplayAdjoint` and by `GaussAdjoint`, divided by the time of the sum, and the
differences of these gradients from finite differences, at 1e-10.

`--first` prints the seconds of first calls in processes of their own, without caches on disk, for
100 trajectories, then for 1,000.
"""

import argparse
import ctypes
import functools
import itertools
import math
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import stiff_peers as peers
from common.contenders import Skip, solution
from common.cpp import library
from common.ivp_test_set import constants_of, PROBLEMS
from common.processes import apart, held, is_worker, last_core
from common.report import header, line, machine, PEERS, write_json
from common.timing import in_turns, timed
from stiff_methods import raw, task_of

import ensembleode as eo
from ensembleode.engines.julia import environment


FOLDER = pathlib.Path(__file__).parent
CASES = {
    "ROBER": PROBLEMS["ROBER"]._replace(end=1e5, published=None),
    "ROBER to 1e11": PROBLEMS["ROBER"],
    **{name: PROBLEMS[name] for name in ("OREGO", "HIRES", "VDP", "POLLU")},
}
TOLERANCES = tuple(10.0**-k for k in range(3, 9))
TARGETS = (1e-4, 1e-6)
MOST = 5.0  # seconds of a call, after which a way takes no part any more
# Absolute tolerance over relative tolerance, otherwise 1e-2.
ABSTOL = {"ROBER": 1e-4, "ROBER to 1e11": 1e-4}


#
# Ways: functions of the problem's name and the constants `[trajectories, constants]`
#


def by_cpp(name, constants, *, method="Rodas5P"):
    about = pathlib.Path("/proc/cpuinfo")
    if not about.exists() or "avx512f" not in about.read_text():
        raise Skip("no AVX-512")
    problem, field = CASES[name], name.split()[0]
    defines = [f"FIELD={field}", f"METHOD={method}", f"K={1 if field == 'POLLU' else 2}"]
    flags = ["-std=c++20", "-mprefer-vector-width=512"]
    flags += ["-fno-finite-math-only", "-fno-associative-math"]
    includes = FOLDER / "stiff_lanes.hpp", FOLDER / "stiff_fields.hpp"
    run = library(FOLDER / "stiff.cpp", *includes, defines=defines, flags=flags).solve
    run.restype = None
    n, number, at = len(constants), ctypes.c_double, lambda x: ctypes.c_void_p(x.ctypes.data)
    ends, steps = np.empty((n, len(problem.u0))), np.empty(n, np.int64)

    def solve(reltol, abstol):
        tolerances = number(reltol), number(abstol)
        run(ctypes.c_long(n), at(constants), number(problem.end), *tolerances, at(ends), at(steps))
        return ends, steps

    return solve


def by_solve(name, constants, *, method, **options):
    problem, alg = CASES[name], getattr(eo, method)()

    def solve(constants, reltol, abstol):
        task = task_of(problem, constants, reltol, abstol)
        u0 = jnp.asarray(task.u0)
        sim = solution(task, u0, constants, alg=alg, maxiters=10**6, **options)
        ends = jnp.where(sim.successful[:, None], sim.u[:, -1], jnp.nan)
        return ends, sim.stats.naccept + sim.stats.nreject

    solve = solve if options.get("engine") == "julia" else jax.jit(solve)
    return functools.partial(solve, jnp.asarray(constants))


def by_julia(name, constants):
    try:
        environment.check(environment.find())
    except environment.JuliaError as e:
        raise Skip(str(e)) from e
    return by_solve(name, constants, method="Rodas5P", engine="julia")


def by_diffrax(name, constants):
    solve = raw(CASES[name], "Kvaerno5", 10_000)

    def ends(reltol, abstol):
        u, succeeded, _, _ = solve(constants, reltol, abstol)
        return np.where(succeeded[:, None], u, np.nan)

    return ends


def by_peer(name, constants, *, peer, **options):
    return peer(CASES[name], constants, **options)


def way(function, most=math.inf, **options):
    """A contender, and the largest number of trajectories that it solves."""
    return functools.partial(function, **options), most


WAYS = {
    "C++": way(by_cpp),
    "C++ 23": way(by_cpp, method="Rosenbrock23"),
    "Rodas5P": way(by_solve, method="Rodas5P"),
    "Rodas4": way(by_solve, method="Rodas4"),
    "Rosenbrock23": way(by_solve, method="Rosenbrock23"),
    "Kvaerno5": way(by_solve, 64, method="Kvaerno5"),
    "KenCarp4": way(by_solve, 64, method="KenCarp4"),
    "diffrax": way(by_diffrax, 16),
    "LSODA": way(by_peer, 256, peer=peers.numbalsoda),
    "BDF": way(by_peer, 64, peer=peers.pydiffsol, method="bdf"),
    "ESDIRK34": way(by_peer, 64, peer=peers.pydiffsol, method="esdirk34"),
    "TR-BDF2": way(by_peer, 64, peer=peers.pydiffsol, method="tr_bdf2"),
    "SciPy LSODA": way(by_peer, 4, peer=peers.scipy, method="LSODA"),
    "SciPy Radau": way(by_peer, 4, peer=peers.scipy, method="Radau"),
    "Julia": way(by_julia),
}


def tolerances(name, reltol):
    return reltol, reltol * ABSTOL.get(name, 1e-2)


#
# Seconds and errors
#


def exact_ends(name, constants):
    """The ends at 1e-12, and the distance of the first one from the published end."""
    problem = CASES[name]
    every = np.concatenate([np.asarray(problem.constants)[None], constants])
    ends, _ = map(np.asarray, by_solve(name, every, method="Rodas5P")(1e-12, 1e-18))
    published = problem.published
    apart = math.nan if published is None else np.max(np.abs(ends[0] / np.array(published) - 1))
    return ends[1:], float(apart)


def measured(name, ways, n, seconds):
    """Microseconds for a trajectory, and the error, by contender and tolerance; and the reasons why
    contenders are left out."""
    constants = constants_of(CASES[name], n)[1:]
    exact, apart = exact_ends(name, constants)
    print(f"\n### {name}\n\nThe reference is {apart:.1e} from the published end.\n", flush=True)
    calls, skipped, found = {}, {}, {}
    for which in ways:
        make, most = WAYS[which]
        try:
            solve = make(name, constants[: min(n, most)])
            solve(*tolerances(name, TOLERANCES[0]))  # compiles
            calls[which] = solve
        except Skip as why:
            skipped[which] = str(why)
    for reltol in TOLERANCES:
        at, turns = tolerances(name, reltol), {}
        for which, solve in list(calls.items()):
            cpu, ends = timed(solve, *at, clock=time.process_time)
            ends = np.asarray(ends[0] if isinstance(ends, tuple) else ends)
            with np.errstate(invalid="ignore"):
                error = np.max(np.abs(ends / exact[: len(ends)] - 1), axis=1)
            arrived = error[~np.isnan(error)]
            row = {"n": len(ends), "failed": len(error) - len(arrived), "us": 1e6 * cpu / len(ends)}
            row["error"] = float(np.median(arrived)) if len(arrived) else math.nan
            found.setdefault(which, {})[reltol] = row
            if cpu < seconds / 4:
                turns[which] = functools.partial(solve, *at)
            elif cpu > MOST:
                calls.pop(which)
        spent = in_turns(turns, 40, least=2, budget=seconds, clock=time.process_time)
        for which, each in spent.items():
            row = found[which][reltol]
            row["us"] = min(row["us"], 1e6 * min(each) / row["n"])
    return found, skipped


def at_error(rows, target):
    """The least time for such an error, interpolated between neighbouring tolerances."""
    most = [x for x in rows if x["failed"] < x["n"] / 2 and x["error"] > 0]
    points = [(math.log(x["error"]), math.log(x["us"])) for x in most]
    goal, times = math.log(target), [us for error, us in points if error <= math.log(target)]
    for (e1, us1), (e2, us2) in itertools.pairwise(points):
        if (e1 - goal) * (e2 - goal) < 0:
            times.append(us1 + (us2 - us1) * (goal - e1) / (e2 - e1))
    return math.exp(min(times)) if times else math.nan


def show(found, skipped):
    tols = [f"{x:.0e}" for x in TOLERANCES]
    print(header(("us a trajectory (error)", *tols, *(f"at {x:.0e}" for x in TARGETS))))
    base = {x: at_error(found.get("Rodas5P", {}).values(), x) for x in TARGETS}
    for which, rows in found.items():
        cells = []
        for row in rows.values():
            failed = f", {row['failed']}/{row['n']} failed" if row["failed"] else ""
            cells.append(f"{row['us']:.4g} ({row['error']:.0e}{failed})")
        cells += [""] * (len(TOLERANCES) - len(cells))
        for target in TARGETS:
            us = at_error(rows.values(), target)
            cells.append("" if math.isnan(us) else f"{us:.4g} ({us / base[target]:.3g})")
        print(line((which, *cells)))
    for which, why in skipped.items():
        print(f"- without {which}: {why}")
    sys.stdout.flush()


#
# Gradients
#


def gradients(name, n, seconds):
    """Microseconds for a trajectory of the sum of weighted ends and of its gradients, at 1e-6; and
    the differences of the gradients from finite differences, at 1e-10."""
    problem = CASES[name]
    constants = constants_of(problem, n)[1:]
    exact, _ = exact_ends(name, constants[:1])
    weights = jnp.cos(jnp.arange(exact.shape[1])) / exact[0]

    def loss(constants, reltol, abstol, sensealg=None):
        task = task_of(problem, constants, reltol, abstol)
        options = {"alg": eo.Rodas5P(), "maxiters": 10**5, "sensealg": sensealg}
        sim = solution(task, jnp.asarray(task.u0), constants, **options)
        return jnp.sum(sim.u[:, -1] @ weights)

    by_gauss = functools.partial(loss, sensealg=eo.GaussAdjoint())
    forward, p, at = jax.jit(loss), jnp.asarray(constants), tolerances(name, 1e-6)
    both, gauss = (jax.jit(jax.value_and_grad(x)) for x in (loss, by_gauss))
    turns = {
        "forward": lambda: forward(p, *at),
        "gradient": lambda: both(p, *at),
        "gauss": lambda: gauss(p, *at),
    }
    in_turns(turns, 1)  # compiles
    spent = in_turns(turns, 100, least=3, budget=seconds, clock=time.process_time)
    row = {which: min(each) / n * 1e6 for which, each in spent.items()}
    tight = 1e-10, 1e-10 * ABSTOL.get(name, 1e-2)
    few = p[:1]
    # (By their logarithms.)
    found = [np.asarray(x(few, *tight)[1])[0] * constants[0] for x in (both, gauss)]
    moves = np.eye(constants.shape[1])[:, None]

    def differences(h):
        values = [[float(forward(few * np.exp(s * h * e), *tight)) for s in (1, -1)] for e in moves]
        return np.array([(up - down) / (2 * h) for up, down in values])

    expected = (4 * differences(5e-5) - differences(1e-4)) / 3
    for which, x in zip(("error", "error_gauss"), found, strict=True):
        row[which] = float(np.max(np.abs(x - expected)) / np.max(np.abs(expected)))
    return row


def gradient_table(names, n, seconds):
    columns = "forward, us", "gradient, us", "ratio", "error", "Gauss, us", "ratio", "error"
    print(header(("", *columns)))
    report = {}
    for name in names:
        report[name] = row = gradients(name, n, seconds)
        cells = [name, f"{row['forward']:.3g}"]
        for which, error in (("gradient", "error"), ("gauss", "error_gauss")):
            ratio = f"{row[which] / row['forward']:.2f}"
            cells += [f"{row[which]:.3g}", ratio, f"{row[error]:.0e}"]
        print(line(tuple(cells)), flush=True)
    return report


#
# First calls
#


def first_calls(name, which):
    """CPU seconds, without those of starting JAX."""
    jax.config.update("jax_enable_x64", True)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))
    seconds = []
    for n in (100, 1000, 1000):
        constants, at = jnp.asarray(constants_of(CASES[name], n)[1:]), tolerances(name, 1e-6)

        def solve(constants=constants, at=at):
            task = task_of(CASES[name], constants, *at)
            return solution(task, task.u0, constants, alg=getattr(eo, which)()).u

        seconds.append(timed(solve, clock=time.process_time)[0])
    return seconds


def first_table(names, core):
    print(header(("CPU s", "", "first, 100", "first, 1,000", "then, 1,000"), left=2))
    report = {}
    for name in names:
        for which in ("Rodas5P", "Kvaerno5"):
            with tempfile.TemporaryDirectory() as folder:
                caches = ("JAX_COMPILATION_CACHE_DIR", "ENSEMBLEODE_CACHE_DIR")
                environment = dict.fromkeys(caches, folder) | {"JAX_PLATFORMS": "cpu"}
                seconds = apart(__file__, [name, which], cores=[core], environment=environment)
            report[f"{name}, {which}"] = seconds
            print(line((name, which, *(f"{x:.2f}" for x in seconds))), flush=True)
    return report


def main():
    if is_worker(first_calls):
        return
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=8.0, help="of turns, for each tolerance")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    args = parser.parse_args()
    core, names, report = last_core(), args.only.split(","), {}
    about = machine(*PEERS, "numbalsoda", "pydiffsol")
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}")
    with held(None if core is None else {core}):
        if args.first:
            report = first_table(names, core)
        elif args.gradients:
            report = gradient_table(names, args.n, args.seconds)
        else:
            for name in names:
                found, skipped = measured(name, args.ways.split(","), args.n, args.seconds)
                show(found, skipped)
                report[name] = found
    if args.json:
        write_json(args.json, {"machine": about, "found": report})


if __name__ == "__main__":
    main()
