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

    python benchmarks/stiff.py [--problems ROBER,VDP] [--methods KenCarp4] [--no-raw]
"""

import argparse
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import by_diffrax, solution
from common.report import line
from common.tasks import Task
from common.timing import timed


jax.config.update("jax_enable_x64", True)

import diffrax  # noqa: E402

import ensembleode as eo  # noqa: E402


class Problem(NamedTuple):
    f: object
    u0: object
    end: float
    constants: object
    published: object


def hires(u, p, t):
    """High irradiance response of a plant: 8 species."""
    y1, y2, y3, y4, y5, y6, y7, y8 = u
    bound = p[0] * y6 * y8
    return jnp.stack(
        [
            -p[1] * y1 + p[2] * y2 + p[3] * y3 + p[4],
            p[1] * y1 - p[5] * y2,
            -p[6] * y3 + p[2] * y4 + p[7] * y5,
            p[3] * y2 + p[1] * y3 - p[8] * y4,
            -p[9] * y5 + p[2] * (y6 + y7),
            -bound + p[10] * (y4 + y7) + p[1] * y5 - p[2] * y6,
            bound - p[11] * y7,
            -bound + p[11] * y7,
        ]
    )


def rober(u, p, t):
    """Robertson's autocatalytic reaction: 3 species, over eleven decades of time."""
    a, b = p[0] * u[0] - p[2] * u[1] * u[2], p[1] * u[1] ** 2
    return jnp.stack([-a, a - b, b])


def orego(u, p, t):
    """The Oregonator, an oscillating reaction."""
    x, y, z = u
    return jnp.stack(
        [p[0] * (y + x * (1 - p[1] * x - y)), (z - (1 + x) * y) / p[0], p[2] * (x - z)]
    )


def vdp(u, p, t):
    """Van der Pol's oscillator, mu = 1000, in its own time."""
    return jnp.stack([u[1], p[0] * (1 - u[0] ** 2) * u[1] - u[0]])


def pollu(u, p, t):
    """Air pollution: 25 reactions of 20 species."""
    y = (None, *u)
    k = (None, *p)
    r = (
        None,
        k[1] * y[1],
        k[2] * y[2] * y[4],
        k[3] * y[5] * y[2],
        k[4] * y[7],
        k[5] * y[7],
        k[6] * y[7] * y[6],
        k[7] * y[9],
        k[8] * y[9] * y[6],
        k[9] * y[11] * y[2],
        k[10] * y[11] * y[1],
        k[11] * y[13],
        k[12] * y[10] * y[2],
        k[13] * y[14],
        k[14] * y[1] * y[6],
        k[15] * y[3],
        k[16] * y[4],
        k[17] * y[4],
        k[18] * y[16],
        k[19] * y[16],
        k[20] * y[17] * y[6],
        k[21] * y[19],
        k[22] * y[19],
        k[23] * y[1] * y[4],
        k[24] * y[19] * y[1],
        k[25] * y[20],
    )
    return jnp.stack(
        [
            -r[1] - r[10] - r[14] - r[23] - r[24]
            + (r[2] + r[3] + r[9] + r[11] + r[12] + r[22] + r[25]),
            -r[2] - r[3] - r[9] - r[12] + r[1] + r[21],
            -r[15] + r[1] + r[17] + r[19] + r[22],
            -r[2] - r[16] - r[17] - r[23] + r[15],
            -r[3] + 2 * r[4] + r[6] + r[7] + r[13] + r[20],
            -r[6] - r[8] - r[14] - r[20] + r[3] + 2 * r[18],
            -r[4] - r[5] - r[6] + r[13],
            r[4] + r[5] + r[6] + r[7],
            -r[7] - r[8],
            -r[12] + r[7] + r[9],
            -r[9] - r[10] + r[8] + r[11],
            r[9],
            -r[11] + r[10],
            -r[13] + r[12],
            r[14],
            -r[18] - r[19] + r[16],
            -r[20],
            r[20],
            -r[21] - r[22] - r[24] + r[23] + r[25],
            -r[25] + r[24],
        ]
    )  # fmt: skip


PROBLEMS = {
    "HIRES": Problem(
        hires,
        [1.0, 0, 0, 0, 0, 0, 0, 0.0057],
        321.8122,
        [280.0, 1.71, 0.43, 8.32, 0.0007, 8.75, 10.03, 0.035, 1.12, 1.745, 0.69, 1.81],
        [
            *(0.7371312573325668e-3, 0.1442485726316185e-3, 0.5888729740967575e-4),
            *(0.1175651343283149e-2, 0.2386356198831331e-2, 0.6238968252742796e-2),
            *(0.2849998395185769e-2, 0.2850001604814231e-2),
        ],
    ),
    "ROBER": Problem(
        rober,
        [1.0, 0, 0],
        1e11,
        [0.04, 3e7, 1e4],
        [0.2083340149701255e-7, 0.8333360770334713e-13, 0.9999999791665050],
    ),
    "OREGO": Problem(
        orego,
        [1.0, 2, 3],
        360.0,
        [77.27, 8.375e-6, 0.161],
        [0.1000814870318523e1, 0.1228178521549917e4, 0.1320554942846706e3],
    ),
    "VDP": Problem(
        vdp, [2.0, 0], 2000.0, [1e3], [0.1706167732170469e1, -0.8928097010248125e-3]
    ),
    "POLLU": Problem(
        pollu,
        [0, 0.2, 0, 0.04, 0, 0, 0.1, 0.3, 0.01, 0, 0, 0, 0, 0, 0, 0, 0.007, 0, 0, 0],
        60.0,
        [
            *(0.35, 0.266e2, 0.123e5, 0.86e-3, 0.82e-3, 0.15e5, 0.13e-3, 0.24e5, 0.165e5),
            *(0.9e4, 0.22e-1, 0.12e5, 0.188e1, 0.163e5, 0.48e7, 0.35e-3, 0.175e-1, 0.1e9),
            *(0.444e12, 0.124e4, 0.21e1, 0.578e1, 0.474e-1, 0.178e4, 0.312e1),
        ],
        [
            *(0.5646255480022769e-1, 0.1342484130422339, 0.4139734331099427e-8),
            *(0.5523140207484359e-2, 0.2018977262302196e-6, 0.1464541863493966e-6),
            *(0.7784249118997964e-1, 0.3245075353396018, 0.7494013383880406e-2),
            *(0.1622293157301561e-7, 0.1135863833257075e-7, 0.2230505975721359e-2),
            *(0.2087162882798630e-3, 0.1396921016840158e-4, 0.8964884856898295e-2),
            *(0.4352846369330103e-17, 0.6899219696263405e-2, 0.1007803037365946e-3),
            *(0.1772146513969984e-5, 0.5682943292316392e-4),
        ],
    ),
}  # fmt: skip

# Absolute tolerance over relative tolerance. Robertson's second species is at most 4e-5 and ends
# as 8e-14, which 1e-4 does not see at all: it stands for a user who gives no thought to it.
ABSTOL = {"ROBER": (1e-4, 1e-10)}
METHODS = ["Kvaerno3", "Kvaerno4", "Kvaerno5", "KenCarp3", "KenCarp4", "KenCarp5", "ImplicitEuler"]


def tolerances(method):
    return [1e-3] if method == "ImplicitEuler" else [1e-4, 1e-7]


def constants_of(problem, copies):
    """Those of the problem, then perturbed ones: `[copies + 1, constants]`."""
    constants = np.asarray(problem.constants)
    noise = np.random.default_rng(0).normal(size=(copies, len(constants)))
    return np.concatenate([constants[None], constants * np.exp(0.1 * noise)])


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
    parser.add_argument("--problems", default=",".join(PROBLEMS))
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
