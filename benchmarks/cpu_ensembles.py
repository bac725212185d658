"""`solve` on the CPU beside its peers: time, compile time and error, on the same ensembles.

    python benchmarks/cpu_ensembles.py [--quick] [--only a,b,...] [--sizes 4096,100000]
        [--repeats R] [--seconds S] [--core C] [--json FILE] [--work-precision PLOT.png]

- a: Lorenz, a different rho from 0 to 21 for each trajectory, fixed steps of 1e-3 on [0, 1],
    endpoints.
- b: the same, adaptive on [0, 10], at 1e-6 (in float64 at 1e-9, too).
- c: a neural ODE 2 -> 50 -> 2 (tanh), weights shared, fixed steps of 0.01 on [0, 1], float32.
- d: value and gradient, with respect to its weights, of a loss over 31 times on [0, 3] of such a
    neural ODE (1024 trajectories, weights four times as large, rtol 1e-3, atol 1e-6, float32).
- e: value and gradient, with respect to the rho of each trajectory, of a loss over 31 times on [0,
    2] of Lorenz (1024 trajectories, 1e-6).
- f: `EnsembleThreads` on all cores compared with one core, 10,000 trajectories of b.

The contenders are `diffrax`, a hand-written `jax.jit(jax.vmap(diffrax.diffeqsolve))`, to which the
ratios refer; `solve` inside `jax.jit`, and called eagerly with new functions each time, on
`EnsembleThreads(1)`; and, if they are installed (the extra `bench`), gradsolve, heyoka.py, SciPy
and a loop written by hand in Numba, which comes near the limit of the hardware.

Each table is measured in a process of its own, held to one core (except for f) before JAX starts.
All contenders of a table are in that process and take turns, so that a slow moment of the machine
hits all of them; the time is the best. `first call` is how much longer the first call took than the
best call (the lesser of two such differences): it has tracing and compiling, with JAX's caches
cleared before. `ns/step` is for one trajectory and one attempted step, by each contender's own
count of steps. `512-bit` is the same program with XLA's option `xla_cpu_prefer_vector_width=512`,
which `solve` sets itself when called eagerly.

The errors are absolute errors of 64 trajectories. The reference is Vern9 at 1e-13 in float64 from
the same numbers, which heyoka at 1e-16 confirms (7e-15 in the median, 2e-13 at most). So a
contender can't hide a lower accuracy behind its speed. For a gradient they are relative errors of
the loss and of the norm of the whole gradient, against diffrax's Dopri8 at 1e-13. After each table
the script prints the promises of the project.
"""

import argparse
import dataclasses
import sys
from typing import NamedTuple

import diffrax
import jax
import numpy as np
import work_precision
from common.contenders import by_diffrax, by_solve, exact_states, gradient_error, Skip
from common.processes import apart, is_worker, last_core
from common.report import header, line, machine, named, PEERS, show_verdicts, write_json
from common.tasks import lorenz_task, network_task, Task
from common.timing import in_turns, timed
from cpu_contenders import DIFFRAX, EAGER, JITTED, makers, value_and_grad


# Nanoseconds per trajectory and step of Julia's EnsembleSerial with StaticArrays (float64), and of
# vmapped diffrax on the same machine; keys are tolerances, None for fixed steps.
JULIA = {None: (45.0, 176.0), 1e-6: (121.0, 427.0), 1e-9: (112.0, 427.0)}


#
# The tables
#


class Spec(NamedTuple):
    """A table: everything that its process is told."""

    case: str
    dtype: str
    n: int
    tol: float | None = None

    @property
    def title(self):
        how = {
            "a": "Lorenz, 1000 fixed steps of 1e-3, endpoints",
            "b": f"Lorenz, adaptive on [0, 10] at {self.tol:g}, endpoints" if self.tol else "",
            "c": "MLP 2→50→2 tanh, 100 fixed steps of 0.01, endpoints",
            "d": "value and gradient, neural ODE 2→50→2 by its weights, 31 times on [0, 3]",
            "e": "value and gradient, Lorenz by each rho, 31 times on [0, 2] at 1e-6",
            "f": "threads: Lorenz, adaptive on [0, 10] at 1e-6, endpoints",
        }[self.case]
        return f"{self.case}. {how}; {self.n} trajectories, {self.dtype}"


def specs(only, quick, sizes):
    sizes = sizes or ([256, 1024] if quick else [4096, 100_000])
    small, large, dtypes = sizes[0], 1000 if quick else 10_000, ("float32", "float64")
    gradient = min(1024, 128 if quick else 1024)
    every = [Spec("a", dtype, n) for dtype in dtypes for n in sizes]
    tolerances = (("float32", 1e-6), ("float64", 1e-6), ("float64", 1e-9))
    every += [Spec("b", dtype, n, tol) for dtype, tol in tolerances for n in sizes]
    every += [Spec("c", "float32", small), Spec("d", "float32", gradient)]
    every += [Spec("e", dtype, gradient) for dtype in dtypes]
    every += [Spec("f", dtype, large, 1e-6) for dtype in dtypes]
    return [spec for spec in every if spec.case in only]


def task_of(spec):
    n, dtype = spec.n, np.dtype(spec.dtype)
    if spec.case == "a":
        return lorenz_task(n, dtype, 1.0, dt=1e-3)
    if spec.case in "bf":
        return lorenz_task(n, dtype, 10.0, tol=spec.tol)
    if spec.case == "c":
        return network_task(n, dtype, 1.0, dt=0.01)
    if spec.case == "d":
        times = np.linspace(0.0, 3.0, 31, dtype=dtype)
        return network_task(n, dtype, 3.0, scale=4.0, rtol=1e-3, atol=1e-6, times=times)
    return lorenz_task(n, dtype, 2.0, tol=1e-6, times=np.linspace(0.0, 2.0, 31, dtype=dtype))


#
# Measuring
#


def enter(task, ways):
    """`(contender, seconds of its first call, what it returned)`, and why others take no part.

    The least of two first calls: what comes once a process is nobody's.
    """
    entered, skipped = {}, {}
    for _ in range(2):
        for number, way in enumerate(ways):
            jax.clear_caches()  # nobody's first call is quicker for another's before it
            try:
                seconds, (contender, result) = timed(first_call, way, task)
            except Skip as reason:
                skipped[getattr(way, "func", way).__name__] = str(reason)
                continue
            before = entered[number][1] if number in entered else seconds
            entered[number] = contender, min(seconds, before), result
    return list(entered.values()), skipped


def first_call(way, task):
    contender = way(task)
    return contender, contender.call()


def best_times(contenders, repeats, budget):
    calls = dict(enumerate(contender.call for contender in contenders))
    in_turns(calls, 1)  # compiles again what was cleared
    spent = in_turns(calls, repeats, least=2, share=budget / len(calls))
    return [min(seconds) for seconds in spent.values()]


def warm_up(dtype):
    """One small solve of each, so that no first call pays for what comes once a process."""
    u0, p = np.ones((4, 1), dtype), np.ones((), dtype)
    task = Task(lambda u, p, t: -p * u, u0, p, ("u0",), 4, 1.0, rtol=1e-3, atol=1e-6)
    for solve in (by_diffrax(task), by_solve(task)):
        jax.block_until_ready(jax.jit(solve)(*task.inputs()))


def gradient_reference(task):
    """The loss and its gradient at 1e-13."""
    with jax.enable_x64(True):
        every = task.only(np.arange(task.n))
        times = np.asarray(task.times, np.float64)
        tight = dataclasses.replace(every, rtol=1e-13, atol=1e-13, times=times)
        solve = by_diffrax(tight, diffrax.Dopri8(), max_steps=4096)
        return jax.tree.map(np.asarray, value_and_grad(solve)(tight.p, tight.u0))


def errors(task, contender, result, exact):
    """The median and the largest error of the sample."""
    states = np.asarray(result[0], np.float64).reshape(-1, *exact.shape[2:])
    if contender.rows is None:
        states, exact = states[task.sample], exact[:, -1]
    else:
        exact = exact[np.searchsorted(task.sample, contender.rows), -1]
    off = np.abs(states - exact).max(axis=-1)
    return float(np.median(off)), float(off.max())


def gradient_errors(result, exact):
    (loss, gradient), (exact_loss, exact_gradient) = result, exact
    off = abs(float(loss) - float(exact_loss)) / abs(float(exact_loss))
    return off, gradient_error(gradient, exact_gradient)


def table(spec, repeats, budget):
    """Everything measured, as rows."""
    spec = Spec(*spec)
    jax.config.update("jax_enable_x64", spec.dtype == "float64")
    task, is_gradient = task_of(spec), spec.case in "de"
    warm_up(task.dtype)
    entered, skipped = enter(task, makers(spec.case))
    bests = best_times([contender for contender, *_ in entered], repeats, budget)
    expected = gradient_reference(task) if is_gradient else exact_states(task, task.sample)
    rows = []
    for (contender, first, result), best in zip(entered, bests, strict=True):
        extrapolated = 1.0 if contender.rows is None else task.n / len(contender.rows)
        row = {
            "name": contender.name,
            "first": max(0.0, first - best),
            "seconds": best * extrapolated,
        }
        row["ratio"] = bests[0] / row["seconds"]
        if is_gradient:
            row["errors"] = gradient_errors(result, expected)
        else:
            row["errors"] = errors(task, contender, result, expected)
            row["steps"] = float(np.mean(result[1]))
            row["ns"] = 1e9 * row["seconds"] / task.n / row["steps"]
        rows.append(row)
    cores = len(jax.devices("cpu"))
    return {"spec": spec, "title": spec.title, "cores": cores, "rows": rows, "skipped": skipped}


#
# What the project promises
#


def verdicts(found):
    """`(what, measured, bound, held)`, a line each."""
    spec, rows = Spec(*found["spec"]), {row["name"]: row for row in found["rows"]}
    if spec.case == "f":
        return list(_threads(found, rows))
    lines = []
    if spec.case in "abc":
        factor = {"a": (30, 14), "b": (25, 12), "c": (4, 4)}[spec.case][spec.dtype == "float64"]
        lines += [
            _at_least(f"{name}: diffrax's time", rows[name]["ratio"], factor)
            for name in (JITTED, EAGER)
        ]
        if spec.case in "ab" and spec.dtype == "float64":
            lines.append(_julia(spec, rows))
    else:
        factor = {"d": 3, "e": 10}[spec.case]
        tight = next(row for name, row in rows.items() if "maxiters=" in name)
        lines.append(_at_least(f"{JITTED}: diffrax's time", rows[JITTED]["ratio"], factor))
        slower = rows[JITTED]["seconds"] / tight["seconds"]
        lines.append(_at_most("default maxiters: time with the tightest", slower, 1.2))
    compiling = rows[JITTED]["first"] / found["rows"][0]["first"]
    lines.append(_at_most(f"{JITTED}: diffrax's first call", compiling, 1.0))
    return lines


def _at_least(what, measured, bound):
    return what, measured, f"at least {bound:g}x", measured >= bound


def _at_most(what, measured, bound):
    return what, measured, f"at most {bound:g}x", measured <= bound


def _julia(spec, rows):
    """Julia's time here, were it as much faster than diffrax as on the machine it was taken."""
    theirs, diffrax_there = JULIA[spec.tol]
    julia = theirs * rows[DIFFRAX]["ns"] / diffrax_there
    what = f"{JITTED}: Julia's EnsembleSerial, about {julia:.0f} ns/step here"
    return _at_least(what, julia / rows[JITTED]["ns"], 3)


def _threads(found, rows):
    bound = 1.7 if found["cores"] == 2 else 0.85 * found["cores"]
    for name in (JITTED, EAGER):
        one, every = (rows[f"{name}, {which}"]["seconds"] for which in ("one core", "all cores"))
        yield _at_least(f"{name}: {found['cores']} cores against one", one / every, bound)


#
# Printing
#


def show(found):
    is_gradient = "ns" not in found["rows"][0]
    print(f"\n### {found['title']}\n")
    head = ["", "time, ms", "ratio", "first call, s"]
    head += ["loss error", "gradient error"] if is_gradient else ["ns/step", "steps"]
    head += [] if is_gradient else ["median error", "largest error"]
    print(header(head))
    for row in found["rows"]:
        cells = [row["name"], f"{1e3 * row['seconds']:.4g}", f"{row['ratio']:.3g}x"]
        cells.append(f"{row['first']:.2f}")
        cells += [] if is_gradient else [f"{row['ns']:.3g}", f"{row['steps']:.0f}"]
        print(line(cells + [f"{x:.1e}" for x in row["errors"]]))
    show_verdicts(verdicts(found), " x {:.3g}")
    for name, reason in found["skipped"].items():
        print(f"- skipped `{name}`: {reason}")
    sys.stdout.flush()


#
# Processes
#


def worker(request, cores, x64=True):
    environment = {"JAX_PLATFORMS": "cpu", "GRADSOLVE_X64": str(int(x64))}
    environment["JAX_COMPILATION_CACHE_DIR"] = ""
    return apart(__file__, request, cores=cores, environment=environment)


def work(kind, *rest):
    return {"table": table, "work-precision": work_precision.work_precision}[kind](*rest)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small ensembles, few repeats")
    parser.add_argument("--only", default="a,b,c,d,e,f", help="such as a,b; '' for none")
    parser.add_argument("--sizes", help="trajectories of a and b, such as 4096,100000")
    parser.add_argument("--repeats", type=int, help="at most; by default 20")
    parser.add_argument("--seconds", type=float, help="about, for each table; by default 60")
    parser.add_argument("--core", type=int, help="which one; by default the last")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument("--work-precision", metavar="PNG", help="plot error against time")
    return parser.parse_args()


def main():
    if is_worker(work):
        return
    options = parse()
    repeats = options.repeats or (3 if options.quick else 20)
    budget = options.seconds or (3.0 if options.quick else 60.0)
    core = last_core() if options.core is None else options.core
    held, about = None if core is None else [core], machine(*PEERS)
    sizes = [int(n) for n in options.sizes.split(",")] if options.sizes else None
    print(f"{about['cpu']}, {about['cores']} cores; {named(about['versions'])}", flush=True)
    everything = {"machine": about, "tables": []}
    for spec in specs(options.only.split(","), options.quick, sizes):
        request = ["table", spec, repeats, budget]
        found = worker(request, None if spec.case == "f" else held, spec.dtype == "float64")
        show(found)
        everything["tables"].append(found | {"verdicts": verdicts(found)})
    if options.work_precision:
        n = 64 if options.quick else 1024
        curves = worker(["work-precision", n, min(repeats, 5)], held)
        everything["work_precision"] = {"trajectories": n, "curves": curves}
        work_precision.plot(curves, n, options.work_precision)
        print(f"\nwrote {options.work_precision}")
    if options.json:
        write_json(options.json, everything)
    missed = sum(not held for t in everything["tables"] for *_, held in verdicts(t))
    total = sum(len(verdicts(t)) for t in everything["tables"])
    if total:
        print(f"\n{total - missed} of {total} met", end="")
        print(", with ensembles too small for them (--quick)" if options.quick else "")


if __name__ == "__main__":
    main()
