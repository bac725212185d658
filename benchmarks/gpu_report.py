"""The rows of gpu_ensembles.py: as written, as printed, and what they say of the promises."""

import json
import pathlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from common import report
from gpu_cases import (
    ARRAYS,
    BOTH,
    Case,
    CUDA,
    DIFFRAX,
    FLOAT32,
    KERNEL,
    MODES,
    Sizes,
    TARGET,
    TORCH,
    WARP,
)
from gpu_contenders import on_gpu


COLUMNS = ("to_gpu", "kernel", "from_gpu", "end_to_end")  # of times that are repeated
HEAD = ["contender", "mode", "", "n", "compile s", "to GPU", "kernel", "from GPU", "end to end"]
FRACTIONS = ("flops_fraction", "memory_fraction")
HEAD += ["steps", "failed", "error", "FLOP/s", "memory"]


class Report:
    """The rows so far, as printed and as written; two threads may add to it."""

    def __init__(self, path: pathlib.Path, about: dict, sizes: Sizes, started: float):
        self.path, self.about, self.sizes, self.started = path, about, sizes, started
        self.rows: list[dict] = []
        self.lock = threading.RLock()
        self.ended: str | None = None

    def add(self, name: str, case: Case, found: dict) -> None:
        method = {key: getattr(case.method, key) for key in ("rtol", "atol", "dt")}
        with self.lock:
            if self.ended:
                return
            self.rows.append({"contender": name, **case._asdict(), **method, **found})
            if "skipped" not in found:  # of those there are many, for the end
                print(line(self.rows[-1]), flush=True)
                self.write()

    def end(self, how: str) -> None:
        """Say what was left out, and what of the promises was kept."""
        with self.lock:
            if self.ended:
                return
            self.ended = how
            self.write()
            print(*summary(self.rows, self.sizes), sep="\n", flush=True)
            print(f"\n{how} after {time.monotonic() - self.started:.0f} s; {self.path}", flush=True)

    def write(self) -> None:
        """Whole or not at all: a run that is cut off leaves the file of the row before."""
        everything = {
            **self.about,
            "ended": self.ended,
            "seconds": round(time.monotonic() - self.started, 1),
            "sizes": self.sizes._asdict(),
            "promises": [promise._asdict() for promise in promises(self.rows, self.sizes)],
            "rows": self.rows,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(everything, indent=1, default=str))
        part.replace(self.path)


def is_of(row: dict, name: str, mode: str) -> bool:
    return "kernel" in row and (row["contender"], row["mode"]) == (name, mode)


# Seconds that a contender's first case of a mode is expected to take.
UNKNOWN = {KERNEL: 8.0, ARRAYS: 10.0, DIFFRAX: 15.0, WARP: 30.0, CUDA: 30.0, TORCH: 20.0}


def predicted(rows: Sequence[dict], name: str, case: Case) -> float:
    """Seconds that the case will take: from the largest one yet of the same mode that is not
    larger, the other precision's where there is none."""
    known = [row for row in rows if is_of(row, name, case.mode) and row["n"] <= case.n]
    if not known:
        return UNKNOWN[name]
    row = max(known, key=lambda row: (row["dtype"] == case.dtype, row["n"]))
    once = sum(row[column] for column in COLUMNS)
    doubled = (row["dtype"], case.dtype) == BOTH
    growth = case.n / row["n"] * (2.0 if doubled else 1.0)
    return row["seconds"] + max(0.0, growth - 1.0) * 5 * once


def header() -> str:
    return report.header(HEAD, left=3)


def line(row: dict) -> str:
    cells = [row["contender"], row["mode"], row["dtype"].replace("float", "f"), size(row["n"])]
    if "error_message" in row:
        return report.line([*cells, f"FAILED: {row['error_message']}"])

    def number(key: str, form: str, scale: float = 1.0) -> str:
        return format(scale * row[key], form) if row.get(key) is not None else ""

    cells.append(number("compile", ".2f"))
    cells += [number(key, ".4g", 1e3) for key in COLUMNS]
    cells += [number("steps", ".1f"), number("failed", "d", 1), number("error", ".1e")]
    cells += [number(key, ".3g", 100) + " %" * (key in row) for key in FRACTIONS]
    return report.line(cells)


def size(n: int) -> str:
    return f"2^{n.bit_length() - 1}" if n & (n - 1) == 0 else str(n)


class Promise(NamedTuple):
    """`measured` is None where something it needs is missing."""

    what: str
    target: str
    measured: str | None
    kept: bool | None


def promises(rows: Sequence[dict], sizes: Sizes) -> list[Promise]:
    main, small, large = (2**exponent for exponent in sizes.promised)
    case = f"{TARGET} {FLOAT32}"

    def of(name: str, n: int) -> dict | None:
        every = (row for row in rows if is_of(row, name, TARGET))
        return next((r for r in every if (r["dtype"], r["n"]) == (FLOAT32, n)), None)

    found = []
    row = of(KERNEL, main)
    text, kept = (f"{1e3 * row['kernel']:.3g} ms", row["kernel"] <= 1.5e-3) if row else (None, None)
    found.append(Promise(f"kernel, {case}, {size(main)}", "at most 1.5 ms", text, kept))
    for n, target in ((small, 50), (large, 10)):
        pair = of(DIFFRAX, n), of(KERNEL, n)
        text = kept = None
        if pair[0] and pair[1]:
            ratio = pair[0]["kernel"] / pair[1]["kernel"]
            text, kept = f"{ratio:.3g}x", ratio >= target
        what = f"diffrax's time by the kernel's, {case}, {size(n)}"
        found.append(Promise(what, f"at least {target}x", text, kept))
    for n in (main, large):
        row, text, kept = of(KERNEL, n), None, None
        if row:
            parts = ("to_gpu", "kernel", "from_gpu")
            ratio = row["end_to_end"] / sum(row[part] for part in parts)
            text, kept = f"{ratio:.3g}x", ratio <= 1.3
        what = f"solve end to end by kernel and transfers, {case}, {size(n)}"
        found.append(Promise(what, "at most 1.3x", text, kept))
    return found


def summary(rows: Sequence[dict], sizes: Sizes) -> Iterator[str]:
    yield from ("", "Times of others by the kernel's (kernel column):", "")
    yield from ratios(rows)
    yield from left_out(rows)
    for row in _noted(rows):
        yield f"- {row['contender']}, {row['mode']}: {row['note']}"
    yield from ("", "target / measured:", "")
    for what, target, text, kept in promises(rows, sizes):
        verdict = {None: "not measured", True: "met", False: "MISSED"}[kept]
        yield f"- {what}: {target} / {text or '-'}: {verdict}"
    if not on_gpu():
        yield "- (without a GPU, where no kernel runs: what is met or missed here means nothing)"


def _noted(rows: Sequence[dict]) -> Iterable[dict]:
    """One row of each contender and mode with a note."""
    return {(r["contender"], r["mode"]): r for r in rows if "note" in r}.values()


def ratios(rows: Sequence[dict]) -> Iterator[str]:
    """A line for each mode and precision."""
    times: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        if "kernel" in row:
            key = row["contender"], row["mode"], row["dtype"]
            times.setdefault(key, {})[row["n"]] = row["kernel"]
    for (name, mode, dtype), seconds in sorted(times.items()):
        own = times.get((KERNEL, mode, dtype), {})
        both = [n for n in sorted(seconds) if n in own]
        if name != KERNEL and both:
            every = ", ".join(f"{size(n)} {seconds[n] / own[n]:.3g}x" for n in both)
            yield f"- {name}, {mode}, {dtype}: {every}"


def left_out(rows: Sequence[dict]) -> Iterator[str]:
    """A line for each contender and reason; which sizes, where that is not all of a mode."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        if "skipped" in row:
            modes = groups.setdefault((row["contender"], row["skipped"]), {})
            exponents = modes.setdefault(f"{row['mode']} {row['dtype'].replace('float', 'f')}", [])
            exponents.append(size(row["n"]))
    if groups:
        yield "\nSkipped:\n"
    for (name, reason), modes in groups.items():
        every = "; ".join(f"{what} {', '.join(exponents)}" for what, exponents in modes.items())
        count = sum(map(len, modes.values()))
        yield f"- {name}, {count} cases, {reason}" + (f": {every}" if "time" in reason else "")


def show(path: pathlib.Path) -> None:
    """The table of a file, in order."""
    found = json.loads(path.read_text())
    print(found["gpu"]["name"], found["date"], found["ended"], sep=", ")
    modes = list(MODES)
    rows = [row for row in found["rows"] if "skipped" not in row]
    rows.sort(key=lambda r: (modes.index(r["mode"]), r["dtype"], r["n"], r["contender"]))
    print(header(), *map(line, rows), *summary(found["rows"], Sizes(**found["sizes"])), sep="\n")
