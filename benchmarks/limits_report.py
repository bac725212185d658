"""The tables of docs/measured/limits.md and the figures of README.md, from one run of limits.py.

    python benchmarks/limits.py --json benchmarks/limits.json
    python benchmarks/limits_report.py [FILE] [--check]

Both pages have places for them, from a line `<!-- limits: NAME -->` to `<!-- end of limits -->`,
whose content is written anew. `--check` writes nothing, and ends with 1 where a page has something
else. What the text around the tables says of them is printed, so that it can be compared.
"""

import argparse
import json
import pathlib
import re
import sys

from common.report import header, line


TOP = pathlib.Path(__file__).parents[1]
PAGES = (TOP / "README.md", TOP / "docs" / "measured" / "limits.md")
RESULTS = TOP / "benchmarks" / "limits.json"

LABELS = {
    "lorenz-rk4": "Lorenz, 1,000 steps of RK4",
    "pendulum-rk4": "pendulum, 1,000 steps of RK4",
    "lorenz-tsit5": "Lorenz, Tsit5",
    "van-der-pol-even": "Van der Pol, in order",
    "van-der-pol-shuffled": "Van der Pol, shuffled",
    "lorenz-96-10": "Lorenz 96, 10 components",
    "lorenz-96-20": "Lorenz 96, 20 components",
    "lorenz-96-40": "Lorenz 96, 40 components",
    "network": "network 2-50-2",
    "bubble": "bubble, at 1e-10",
}
HEADLINE = "lorenz-tsit5"
WAYS = ("C++", "compiled", "diffrax", "Numba", "heyoka")
GRADIENTS = WAYS[:3]
FIRST = ("compiled", "diffrax")


#
# Numbers
#


def number(x: float) -> str:
    """With three digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def ratio(x: float) -> str:
    return f"{x:.2f}" if x < 2 else f"{x:.1f}" if x < 10 else f"{x:,.0f}"


def seconds(x: float) -> str:
    return f"{x:.2f}" if x < 1 else f"{x:.1f}" if x < 10 else f"{x:.0f}"


#
# Blocks
#


class Results:
    """What a run of limits.py measured."""

    def __init__(self, found: dict):
        self.machine = found["machine"]
        self.rows = {(name, dtype, back): rows for name, dtype, back, rows in found["tables"]}

    def milliseconds(self, key: tuple, way: str) -> str:
        """Those of this way, and after them how many times those of C++."""
        rows = self.rows[key]
        if way not in rows:
            return ""
        time, base = rows[way]["ms"], rows.get("C++", {}).get("ms")
        is_ratio = base is not None and way != "C++"
        return number(time) + (f" ({ratio(time / base)})" if is_ratio else "")

    def first(self, key: tuple, way: str) -> str:
        """The seconds of its first call without, and with caches on disk."""
        found = [self.rows[key].get(way, {}).get(x) for x in ("first", "cached")]
        return ", ".join(seconds(x) for x in found if x is not None)


def blocks(results: Results) -> dict[str, str]:
    """The content of each place by its name."""
    return {
        "machine": machine(results),
        "solve float64": solves(results, "float64"),
        "solve float32": solves(results, "float32"),
        "gradient": gradients(results),
        "first calls": first_calls(results),
        "headline": headline(results),
    }


def machine(results: Results) -> str:
    about = results.machine
    versions = {**about["versions"]}
    names = {"jax": "JAX", "numpy": "NumPy", "numba": "Numba", "heyoka": "heyoka.py"}
    shown = ("Python", "jax", "diffrax", "numpy", "numba", "heyoka")
    *most, last = [f"{names.get(x, x)} {versions[x]}" for x in shown if x in versions]
    return (
        f"The machine is an {about['cpu']} with {about['cores']} cores and {about['vectors']}, "
        f"with\n{', '.join(most)} and {last}."
    )


def solves(results: Results, dtype: str) -> str:
    keys = [key for key in results.rows if key[1:] == (dtype, False)]
    ways = [way for way in WAYS if any(way in results.rows[key] for key in keys)]
    rows = [[LABELS[key[0]], *(results.milliseconds(key, x) for x in ways)] for key in keys]
    return table(["problem", *ways], rows)


def gradients(results: Results) -> str:
    keys = [key for key in results.rows if key[2]]
    keys.sort(key=lambda key: list(LABELS).index(key[0]))
    rows = [[LABELS[k[0]], k[1], *(results.milliseconds(k, x) for x in GRADIENTS)] for k in keys]
    return table(["problem", "precision", *GRADIENTS], rows, left=2)


def first_calls(results: Results) -> str:
    keys = [key for key in results.rows if key[1] == "float64"]
    keys.sort(key=lambda key: list(LABELS).index(key[0]))
    rows = [
        [LABELS[k[0]], "gradient" if k[2] else "solve", *(results.first(k, x) for x in FIRST)]
        for k in keys
    ]
    return table(["problem", "program", *FIRST], rows, left=2)


def headline(results: Results) -> str:
    """Six figures of the README, each with those of others beside it."""
    solve, gradient = ((HEADLINE, "float64", back) for back in (False, True))
    (ours, cpp, theirs), (our_gradient, cpp_gradient, their_gradient) = (
        [number(results.rows[key][way]["ms"]) for way in ("compiled", "C++", "diffrax")]
        for key in (solve, gradient)
    )
    (our_first, their_first), (our_second, their_second) = (
        [seconds(results.rows[key][way]["first"]) for way in ("compiled", "diffrax")]
        for key in (solve, gradient)
    )
    about = results.machine
    return "\n".join(
        [
            f"On one core of an {about['cpu']} (JAX {about['versions']['jax']}, float64, inside "
            "`jit`), for 4,096 Lorenz\ntrajectories to t = 10 by Tsit5 at a tolerance of 1e-6:",
            "",
            f"- the solve takes {ours} ms (C++ written by hand for it takes {cpp} ms, a vmapped "
            f"diffrax {theirs} ms);",
            f"- its gradient by all initial states and parameters takes {our_gradient} ms "
            f"(C++ {cpp_gradient} ms, diffrax {their_gradient} ms);",
            f"- the first call of each, which compiles, takes {our_first} s and {our_second} s "
            f"(diffrax {their_first} s and {their_second} s).",
        ]
    )


def table(columns: list[str], rows: list[list[str]], left: int = 1) -> str:
    return "\n".join([header(columns, left), *map(line, rows)])


#
# Pages
#


PLACE = re.compile(r"(<!-- limits: ([\w ]+) -->\n\n?)(.*?)(\n\n?<!-- end of limits -->)", re.DOTALL)


def filled(page: str, made: dict[str, str]) -> str:
    """The page with these blocks in their places.

    **Raises:** `KeyError` for a place of another name.
    """
    return PLACE.sub(lambda found: found[1] + made[found[2]] + found[4], page)


def said_of(results: Results) -> list[str]:
    """What the text around the tables says of them."""

    def span(found):
        return f"{ratio(min(found))} to {ratio(max(found))}" if found else "not measured"

    pairs = [(name, dtype) for name, dtype, back in results.rows if back]
    said = []
    for way in ("compiled", "C++"):
        both = [[results.rows[*pair, back] for back in (False, True)] for pair in pairs]
        times = [(x[way]["ms"], y[way]["ms"]) for x, y in both if way in x and way in y]
        said.append(f"{way}: a gradient takes {span([y / x for x, y in times])} times a solve")
    for way in ("compiled", "diffrax"):
        errors = [
            rows[way]["error"] / rows["C++"]["error"]
            for (_, dtype, _), rows in results.rows.items()
            if dtype == "float64" and way in rows and "C++" in rows
        ]
        said.append(f"{way}: its errors in float64 are {span(errors)} times those of C++")
    if rows := results.rows.get(("bubble", "float64", False)):
        without = rows["C++ scalar"]["ms"]
        said.append(
            f"the bubble takes {rows['compiled']['ms'] / without:.2f} times as long as in C++ "
            f"without vectors ({number(without)} ms)"
        )
    return said


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args()
    found = json.loads(options.file.read_text())
    if found["quick"]:
        sys.exit(f"{options.file} is of a quick run, which is no measurement.")
    results = Results(found)
    made, differs = blocks(results), False
    for path in PAGES:
        before = path.read_text()
        after = filled(before, made)
        if after != before:
            differs = True
            print(f"{path.relative_to(TOP)} {'differs' if options.check else 'is written'}")
            if not options.check:
                path.write_text(after)
    print("\n".join(said_of(results)))
    sys.exit(options.check and differs)


if __name__ == "__main__":
    main()
