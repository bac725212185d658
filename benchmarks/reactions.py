"""Reactions one by one, on one core: the time of a reaction, and the error of the mean.

    python benchmarks/reactions.py [--n 20000] [--only 'compiled;Numba'] [--json FILE]

Molecules A are made and decay, and two of them join to a D, which falls apart again: four
reactions, by Gillespie's direct method, from nothing to t = 10. The end is saved.

- `compiled` is the engine, in float32 and in float64;
- `Numba`, loops over trajectories and reactions, with Numba's own random numbers;
- `GillesPy2`, whose `SSACSolver` compiles C++ for the model (it needs scons and a compiler). It
  runs fewer trajectories, as it returns them by way of a text; its time has that in it.

Contenders that are not installed are left out. They take turns, in a process that is held to one
core, and the time is the least. That of GillesPy2 is by the clock, as it starts a process. It is
divided by the mean number of reactions, which Numba's loop counts. `error` is the difference of the
mean number of A at the end from the average of all others, in standard errors of that difference.
"""

import argparse
import math
import random
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import imported, Skip
from common.processes import held, last_core
from common.report import header, line, machine, PEERS, write_json
from common.timing import in_turns


jax.config.update("jax_enable_x64", True)

import ensembleode as eo  # noqa: E402


# A is made; A decays; A and A join; D falls apart.
REACTANTS = [[0, 0], [1, 0], [2, 0], [0, 1]]
PRODUCTS = [[1, 0], [0, 0], [0, 1], [2, 0]]
CONSTANTS = [100.0, 1.0, 0.01, 0.5]
END = 10.0
# GillesPy2 has fewer trajectories by this factor.
FEWER = 20


def by_engine(n: int, dtype: str) -> Callable:
    constants, start = np.array(CONSTANTS, dtype), np.zeros(2, dtype)
    prob = eo.JumpProblem.of_reactions(REACTANTS, PRODUCTS, start, (0.0, END), constants)

    def solve(seed):
        ens = eo.EnsembleProblem(prob)
        how = {"trajectories": n, "seed": seed, "saveat": [END]}
        return eo.solve(ens, eo.Direct(), eo.EnsembleThreads(1), **how).u[:, -1, 0]

    compiled, seeds = jax.jit(solve), iter(range(1000))
    return lambda: compiled(jnp.asarray(next(seeds)))


def by_numba(n: int) -> Callable:
    """The numbers of A at the end, and of reactions."""
    numba = imported("numba")
    made, decay, join, part = CONSTANTS

    @numba.njit(fastmath=True)
    def solve():
        ends, reactions = np.empty(n), 0
        for i in range(n):
            t, a, d = 0.0, 0.0, 0.0
            while True:
                one, two = made, made + decay * a
                three = two + join * a * (a - 1.0) * 0.5
                total = three + part * d
                t -= math.log(1.0 - random.random()) / total
                if t > END:
                    break
                reactions += 1
                which = random.random() * total
                if which < one:
                    a += 1.0
                elif which < two:
                    a -= 1.0
                elif which < three:
                    a -= 2.0
                    d += 1.0
                else:
                    a += 2.0
                    d -= 1.0
            ends[i] = a
        return ends, reactions

    return solve


def by_gillespy2(n: int) -> Callable:
    gillespy2 = imported("gillespy2")
    model = gillespy2.Model(name="dimers")
    a = gillespy2.Species(name="A", initial_value=0, mode="discrete")
    d = gillespy2.Species(name="D", initial_value=0, mode="discrete")
    names = ("made", "decay", "join", "part")
    # (Its propensity of two equal molecules is k A (A - 1), and not half of it.)
    values = [k / 2 if 2 in taken else k for k, taken in zip(CONSTANTS, REACTANTS, strict=True)]
    constants = [
        gillespy2.Parameter(name=name, expression=x) for name, x in zip(names, values, strict=True)
    ]
    model.add_species([a, d])
    model.add_parameter(constants)
    changes = [({}, {a: 1}), ({a: 1}, {}), ({a: 2}, {d: 1}), ({d: 1}, {a: 2})]
    for (taken, given), rate in zip(changes, constants, strict=True):
        how = {"reactants": taken, "products": given, "rate": rate}
        model.add_reaction(gillespy2.Reaction(name=f"r_{rate.name}", **how))
    model.timespan(gillespy2.TimeSpan.linspace(t=END, num_points=2))
    try:
        solver = gillespy2.SSACSolver(model=model)
        solver.run(number_of_trajectories=1)
    except Exception as error:
        raise Skip(f"SSACSolver can't run here: {error}") from error

    def solve():
        results = solver.run(number_of_trajectories=n)
        return np.array([x["A"][-1] for x in results])

    return solve


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--only", default="", help="names of ways, separated by semicolons")
    parser.add_argument("--json")
    args = parser.parse_args()
    makers = {
        "compiled, float32": lambda: by_engine(args.n, "float32"),
        "compiled, float64": lambda: by_engine(args.n, "float64"),
        "Numba": lambda: by_numba(args.n),
        "GillesPy2": lambda: by_gillespy2(max(1, args.n // FEWER)),
    }
    chosen = args.only.split(";") if args.only else [*makers]
    print(machine(*PEERS, "gillespy2"))
    core, calls, report, ends = last_core(), {}, {}, {}
    with held(None if core is None else {core}):
        for name in chosen:
            try:
                call, started = makers[name](), time.perf_counter()
                jax.block_until_ready(call())
            except Skip as why:
                print(f"- {name}: {why}")
                continue
            calls[name], report[name] = call, {"first": time.perf_counter() - started}
        spent = in_turns(calls, 5, budget=120, share=30)
        for name, call in calls.items():
            found = call()
            ends[name] = np.asarray(found[0] if name == "Numba" else found, float)
        _, reactions = by_numba(args.n)()
    for name, row in report.items():
        mine, n = ends[name], len(ends[name])
        row["ns"] = min(spent[name]) / (n * reactions / args.n) * 1e9
        others = np.concatenate([x for other, x in ends.items() if other != name] or [mine])
        row["mean"] = float(mine.mean())
        spread = math.sqrt(mine.var() / n + others.var() / len(others))
        row["error"] = float((mine.mean() - others.mean()) / spread)
    print(f"{reactions / args.n:.0f} reactions a trajectory")
    print(header(("way", "ns a reaction", "mean of A", "error", "first, s")))
    for name, row in report.items():
        forms = {"ns": ".1f", "mean": ".2f", "error": ".1f", "first": ".2f"}
        print(line((name, *(format(row[x], f) for x, f in forms.items()))))
    if args.json:
        write_json(args.json, report)


if __name__ == "__main__":
    main()
