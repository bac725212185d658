"""Ensembles of stiff problems: `solve` beside diffrax itself, vmapped.

Five problems of the "Test Set for IVP Solvers" (Mazzia and Magherini, University of Bari, 2008),
each with its own rate constants, and 64 times with all of them perturbed by about 10%. A row is a
problem, a method and its tolerances. Columns: trajectories that succeeded; steps, accepted +
rejected, with the problem's own constants, and the least, median and most of all copies; correct
digits of the least correct component at the end, with the problem's own constants, and the least of
all copies; seconds on the second call.

Digits are those of the published solutions, and for the copies those of Kvaerno5 at 1e-10, which is
first compared with the published ones. "raw" is `jax.vmap` of `diffrax.diffeqsolve` with diffrax's
own default for the method, in the same process, with at most `--raw-maxiters` steps.

    python benchmarks/stiff_methods.py [--problems ROBER,VDP] [--methods KenCarp4] [--no-raw]
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import by_diffrax, solution
from common.ivp_test_set import constants_of, PROBLEMS
from common.report import line
from common.tasks import Task
from common.timing import timed


jax.config.update("jax_enable_x64", True)

import diffrax  # noqa: E402

import ensembleode as eo  # noqa: E402


# Absolute tolerance over relative tolerance. Robertson's second species is at most 4e-5 and ends
# as 8e-14, which 1e-4 does not see at all: it stands for a user who gives no thought to it.
ABSTOL = {"ROBER": (1e-4, 1e-10)}
CHOSEN = ("HIRES", "ROBER", "OREGO", "VDP", "POLLU")
METHODS = ["Kvaerno3", "Kvaerno4", "Kvaerno5", "KenCarp3", "KenCarp4", "KenCarp5", "ImplicitEuler"]


def tolerances(method):
    return [1e-3] if method == "ImplicitEuler" else [1e-4, 1e-7]


def task_of(problem, constants, reltol, abstol):
    u0 = np.asarray(problem.u0, float)
    options = {"rtol": reltol, "atol": abstol}
    return Task(problem.f, u0, constants, ("p",), len(constants), problem.end, **options)


def ours(problem, method, constants, reltol, abstol, **options):
    """The ends, a mask of success, and steps accepted and rejected."""
    task = task_of(problem, constants, reltol, abstol)
    where, alg = eo.EnsembleSerial(), getattr(eo, method)()  # one device, as raw diffrax has
    sim = solution(task, task.u0, jnp.asarray(constants), where, alg, **options)
    stats = sim.stats
    return [np.array(x) for x in (sim.u[:, -1], sim.successful, stats.naccept, stats.nreject)]


def raw(problem, method, maxiters):
    """`ours` by diffrax alone, to be called with constants and tolerances."""
    solver, terms = getattr(diffrax, method)(), diffrax.ODETerm(lambda t, u, p: problem.f(u, p, t))
    if method.startswith("KenCarp"):
        none = diffrax.ODETerm(lambda t, u, p: jnp.zeros_like(u))
        terms = diffrax.MultiTerm(none, terms)

    def gives(sol):
        steps = sol.stats["num_accepted_steps"], sol.stats["num_rejected_steps"]
        return sol.ys[-1], sol.result == diffrax.RESULTS.successful, *steps

    @jax.jit
    def solve(constants, reltol, abstol):
        task = task_of(problem, constants, reltol, abstol)
        every = by_diffrax(task, solver, maxiters, terms=terms, gives=gives)
        return every(jnp.asarray(task.u0), constants)

    return lambda *args: [np.array(x) for x in solve(*args)]


def digits(ends, exact):
    """Correct digits of the least correct component of each trajectory; NaN where it failed."""
    with np.errstate(divide="ignore"):
        return -np.log10(np.max(np.abs(ends / exact - 1), axis=-1))


def references(problem, constants, abstol):
    """The ends of all copies, and how many digits of the published end they agree in."""
    ends, succeeded, _, _ = ours(problem, "Kvaerno5", constants, 1e-10, 1e-10 * abstol)
    if not succeeded.all():
        raise RuntimeError("The reference solution failed; no digits can be said.")
    agreement = digits(ends[:1], np.asarray(problem.published))[0]
    ends[0] = problem.published
    return ends, agreement


def row(exact, solve, *args):
    solve(*args)
    seconds, (ends, succeeded, accepted, rejected) = timed(solve, *args)
    correct = np.where(succeeded, digits(ends, exact), np.nan)
    steps = accepted + rejected
    return {
        "succeeded": int(succeeded.sum()),
        "of": len(succeeded),
        "steps": f"{accepted[0]} + {rejected[0]}",
        "all steps": [int(steps.min()), float(np.median(steps)), int(steps.max())],
        "digits": round(float(correct[0]), 1),
        "least digits": round(float(correct.min()), 1),
        "seconds": round(seconds, 3),
    }


def printed(found):
    least, median, most = found["all steps"]
    columns = [
        f"{found['succeeded']}/{found['of']}",
        found["steps"],
        f"{least} / {median:.0f} / {most}",
        found["digits"],
        found["least digits"],
        f"{found['seconds']:.2f}",
    ]
    return " | ".join(map(str, columns))


def table(path):
    """The rows of a file of `--json` in brief: two tolerances, ours and raw, in a line."""
    lines = {}
    with open(path) as file:
        for record in map(json.loads, file):
            reltol, abstol = record["tolerances"]
            loose = abstol / reltol > 1e-5
            cells = lines.setdefault((record["problem"], record["method"], loose), [])
            for who in ("ours", "raw"):
                found = record[who]
                everyone = found["succeeded"] == found["of"]
                least, median, most = found["all steps"]
                text = f"{found['succeeded']}/{found['of']}"
                if everyone:
                    text = f"{found['steps']} ({least}, {median:.0f}, {most}); {found['digits']}"
                cells.append((reltol, who, text))
    print("| | | reltol | `solve` | diffrax | reltol | `solve` | diffrax |")
    print(f"|{'---|' * 8}")
    for (problem, method, loose), cells in lines.items():
        texts = [problem if loose else f"{problem}, tight", method]
        for (reltol, _, text), (_, _, other) in zip(cells[::2], cells[1::2], strict=True):
            texts += [f"{reltol:.0e}", text, other]
        print(line(texts + [""] * (8 - len(texts))))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problems", default=",".join(CHOSEN))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--copies", type=int, default=64)
    parser.add_argument("--no-raw", action="store_true", help="only `solve`")
    parser.add_argument("--raw-maxiters", type=int, default=5000, help="diffrax's max_steps")
    parser.add_argument("--json", help="append the rows to this file, one a line")
    parser.add_argument("--table", help="only print the rows of such a file in brief")
    options = parser.parse_args()
    if options.table:
        return table(options.table)
    columns = "succeeded | steps | least / median / most | digits | least digits | seconds"
    print(f"| problem | method | reltol | abstol | | {columns} |\n|{'---|' * 11}")
    for name in options.problems.split(","):
        problem = PROBLEMS[name]
        constants = constants_of(problem, options.copies)
        exact, agreement = references(problem, constants, min(ABSTOL.get(name, (1e-4,))))
        print(f"| {name} | reference | | | | agrees in {agreement:.1f} digits |", flush=True)
        for method in options.methods.split(","):
            theirs = raw(problem, method, options.raw_maxiters)
            for abstol in ABSTOL.get(name, (1e-4,)):
                for reltol in tolerances(method):
                    tols = reltol, abstol * reltol
                    found = {"ours": row(exact, ours, problem, method, constants, *tols)}
                    if not options.no_raw:
                        found["raw"] = row(exact, theirs, constants, *tols)
                    for who, numbers in found.items():
                        labels = f"{name} | {method} | {tols[0]:.0e} | {tols[1]:.0e} | {who}"
                        print(f"| {labels} | {printed(numbers)} |", flush=True)
                    if options.json:
                        record = {"problem": name, "method": method, "tolerances": tols, **found}
                        with open(options.json, "a") as file:
                            file.write(json.dumps(record) + "\n")
    return None


if __name__ == "__main__":
    main()
