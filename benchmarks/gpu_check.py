"""Whether the library works on this machine's GPU, and how fast: everything once, in eight minutes.

    python benchmarks/gpu_check.py [--minutes 8] [--out DIR] [--only readme,explicit,...] [--cpu]

Each part runs in a process of its own, the most important first:

- `device`: the GPU, the versions, what `ensembleode doctor` says; `launch`: the smallest kernel, by
    each launcher.
- `readme`: the example of README.md as written, without an ensemble algorithm, and on GPUs.
- `explicit`, `gradients`, `stiff`, `events`, `networks`, `transforms`: solves by
    EnsembleGPUKernel() (`kernel`) and EnsembleGPUArray() (`arrays`), compared with those of
    EnsembleSerial() in a process that has only the CPU.
- `lorenz`, `robertson`, `network`: the times of both beside a vmapped diffrax; `limits`: what the
    machine can do at most.
- `streams`: whether launches wait for what they read, and leave it alone; `threads`: the algorithms
    for CPUs in a process that has a GPU; `fit`; `large`: results beyond 2^31 bytes, and batches;
    `registers`: what kernels take (this needs ptxas); `widest`: the gradient of a network that is
    large for one thread.

A part consists of checks. One that fails costs no other. Where one hangs, or takes the process or
its GPU with it, a new process goes on with those after it. What has no time left is left out.

DIR (by default benchmarks/results) gets `gpu_check.json` and the table `gpu_check.md`, both written
anew after each check, and `gpu_check.log` with all that the processes wrote. The exit status is 0
only if everything passed, or was skipped for want of something optional.

`--cpu` runs everything at small sizes on the CPU. Then `kernel` is what EnsembleGPUKernel() does
without a GPU, and `arrays` is the same engine (diffrax) on the CPU.

This process doesn't import JAX, so it can neither hang nor lose the GPU. A check passes if it
agrees with the CPU; its time never decides.
"""

import argparse
import contextlib
import datetime
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from common.report import header, line, machine


ROOT = pathlib.Path(__file__).resolve().parents[1]
LOST = 3  # the exit status of a part that has lost its GPU


class Part(NamedTuple):
    """The checks of a part are in a module here. A check may take `each` seconds, and all of them
    `most` seconds."""

    name: str
    module: str
    each: float
    most: float


VALUES = "gpu_check_values"  # whose checks compare with the CPU
PARTS = (
    Part("device", "gpu_check_machine", 60, 90),
    Part("launch", "gpu_check_machine", 40, 60),
    Part("readme", VALUES, 40, 90),
    Part("explicit", VALUES, 40, 110),
    Part("lorenz", "gpu_check_times", 50, 80),
    Part("gradients", VALUES, 50, 110),
    Part("limits", "gpu_check_machine", 30, 40),
    Part("stiff", VALUES, 50, 90),
    Part("events", VALUES, 40, 70),
    Part("networks", VALUES, 50, 90),
    Part("network", "gpu_check_times", 45, 90),
    Part("robertson", "gpu_check_times", 60, 90),
    Part("streams", "gpu_check_machine", 40, 50),
    Part("transforms", VALUES, 40, 70),
    Part("threads", VALUES, 40, 40),
    Part("fit", VALUES, 40, 40),
    Part("noise", VALUES, 40, 60),
    Part("large", "gpu_check_machine", 40, 60),
    Part("registers", "gpu_check_times", 30, 40),
    Part("widest", VALUES, 60, 90),
)


#
# A part, from outside
#


class Ended(NamedTuple):
    """How a process of a part ended (`done`, `died`, `lost`, `hung`, `no time`), what is to be said
    of it, and which check it was at."""

    how: str
    why: str
    at: str | None
    left: list[str]


class Watched:
    """A process, in a group of its own, that writes a line of JSON for each event. Files hold what
    it writes, so no child of its own that lives on keeps anyone waiting."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: pathlib.Path):
        self.events = tempfile.TemporaryFile()  # noqa: SIM115 (`kill` closes it)
        self.read, self.rest, self.log = 0, b"", log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self.events,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def new(self) -> Iterator[dict[str, Any]]:
        """The events since the last call. Other lines go to the log."""
        while found := os.pread(self.events.fileno(), 1 << 20, self.read):
            self.read += len(found)
            *lines, self.rest = (self.rest + found).split(b"\n")
            for text in lines:
                yield from self._event(text)

    def _event(self, text: bytes) -> Iterator[dict[str, Any]]:
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if isinstance(event, dict):
            yield event
        else:
            with self.log.open("ab") as log:
                log.write(text + b"\n")

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """End the process, and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # (One that waits for a driver that hangs can't be ended.)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.events.close()

    def verdict(self) -> tuple[str, str]:
        code = self.process.returncode
        if code == 0:
            return "done", ""
        if code == LOST:
            return "lost", "the GPU was lost"
        if code < 0:
            return "died", f"the process was ended by {signal.Signals(-code).name}"
        return "died", f"the process ended with status {code}"


def attempt(
    watched: Watched,
    part: Part,
    only: Sequence[str],
    until: float,
    add: Callable[[dict[str, Any]], None],
) -> Ended:
    """Give what the process finds to `add`, until it ends, or is ended: at `until`, or where a
    check takes too long. `only`: its checks, as far as they are known before it says so."""
    at, left, moved = None, list(only), time.monotonic()
    try:
        while True:
            was_over = watched.is_over()
            for event in watched.new():
                moved = time.monotonic()
                if "checks" in event:
                    left = list(event["checks"])
                elif "begun" in event:
                    at = event["begun"]
                    left.remove(at)
                else:
                    at = None
                    add(event)
            now = time.monotonic()
            if was_over:
                return Ended(*watched.verdict(), at, left)
            if now > until:
                return Ended("no time", "its time was over", at, left)
            if now - moved > part.each:
                return Ended("hung", f"nothing for {part.each:.3g} s", at, left)
            time.sleep(0.02)
    finally:
        watched.kill()


Start = Callable[[Part, Sequence[str]], Watched]


def run_part(part: Part, start: Start, report: "Report", deadline: float) -> None:
    """All checks of a part, in as many processes as that takes."""
    until = min(deadline, time.monotonic() + part.most)
    only: list[str] = []  # all
    while True:
        where = report.mark(part)

        def add(event: dict[str, Any], where: str = where) -> None:
            report.add(part.name, event | ({"log": where} if "error" in event else {}))

        ended = attempt(start(part, only), part, only, until, add)
        if ended.how == "no time":
            _leave_out([*filter(None, [ended.at]), *ended.left], ended, part, report, where)
            return
        # (What lost the GPU has said so itself.)
        if ended.how in ("hung", "died") or ended.at:
            result = "hung" if ended.how == "hung" else "died"
            report.add(part.name, _row(ended.at or "(start)", result, ended.why, where))
        if ended.how == "done" or not ended.left or ended.left == only:
            if ended.left:
                _leave_out(ended.left, ended, part, report, where)
            return
        only = ended.left


def _leave_out(
    checks: Sequence[str], ended: Ended, part: Part, report: "Report", where: str
) -> None:
    why = ended.why or "the process ended before it"
    for check in checks or ["(all)"]:
        report.add(part.name, _row(check, "left out", why, where))


def _row(name: str, result: str, why: str, where: str) -> dict[str, Any]:
    return {**named(name), "result": result, "error": why, "log": where}


def named(name: str) -> dict[str, str]:
    """What is checked, and by what, of the name of a check."""
    return dict(zip(("check", "by"), name.split(" by "), strict=False))


def run_all(parts: Sequence[Part], start: Start, report: "Report", deadline: float) -> None:
    for part in parts:
        if time.monotonic() >= deadline:
            report.add(part.name, {"check": "(all)", "result": "left out", "error": "no time left"})
        else:
            run_part(part, start, report, deadline)


#
# The report
#


COLUMNS = ["part", "check", "by", "result", "s", "found"]
TIMES = ["check", "by", "compile s", "best ms", "median ms", "steps", "FLOP/s", "memory", "note"]
BAD = ("failed", "hung", "died", "left out")


class Report:
    """What was found, as JSON and as a table, written anew with each row."""

    def __init__(self, folder: pathlib.Path, about: dict[str, Any], *, quiet: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.about, self.quiet = folder, about, quiet
        self.log = folder / "gpu_check.log"
        self.log.write_bytes(b"")
        self.rows: list[dict[str, Any]] = []
        self.started = time.monotonic()

    def mark(self, part: Part) -> str:
        """A heading in the log; where it is."""
        before = self.log.read_bytes().count(b"\n")
        with self.log.open("ab") as log:
            log.write(f"\n=== {part.name}\n".encode())
        return f"{self.log.name}, line {before + 2}"

    def add(self, part: str, row: dict[str, Any]) -> None:
        if "about" in row:
            self.about |= row["about"]
            return
        self.rows.append({"part": part, **row})
        self._print(row_line(self.rows[-1]))
        self.write()

    def _print(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    @property
    def bad(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["result"] in BAD]

    def write(self) -> None:
        """Each file whole, or as it was before."""
        seconds = round(time.monotonic() - self.started, 1)
        everything = {**self.about, "seconds": seconds, "counts": self.counts(), "rows": self.rows}
        _replace(self.folder / "gpu_check.json", json.dumps(everything, indent=1, default=str))
        _replace(self.folder / "gpu_check.md", "\n".join([*self.table(), ""]))

    def counts(self) -> dict[str, int]:
        results = [row["result"] for row in self.rows]
        return {name: results.count(name) for name in ("passed", *BAD, "skipped")}

    def table(self) -> Iterator[str]:
        yield f"# {self.about.get('device', 'no device found')}"
        yield ""
        for name, what in self.about.items():
            if name != "device":
                yield f"- {name}: {what}"
        yield from ("", *self.summary())
        times = [row for row in self.rows if "best" in row]
        if times:
            yield from ("", header(TIMES, left=2), *map(times_line, times))
        yield from ("", header(COLUMNS, left=len(COLUMNS)), *map(row_line, self.rows))

    def summary(self) -> Iterator[str]:
        """How many there were of each result; what went wrong, and what was skipped."""
        yield ", ".join(f"{n} {name}" for name, n in self.counts().items() if n) or "nothing yet"
        yield ""
        for row in self.rows:
            what = f"- {row['part']}, {row['check']}{', ' * ('by' in row)}{row.get('by', '')}"
            if row["result"] in BAD:
                why = row.get("error") or found(row)
                place = f" ({row['log']})" if "log" in row else ""
                yield f"{what}: {row['result'].upper()}: {why}{place}"
            elif row["result"] == "skipped":
                yield f"{what}: skipped: {row['error']}"

    def end(self) -> None:
        self.write()
        seconds = time.monotonic() - self.started
        self._print("\n" + "\n".join(self.summary()))
        self._print(f"\n{seconds:.0f} s; {self.folder / 'gpu_check.md'}")


def _replace(path: pathlib.Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def row_line(row: dict[str, Any]) -> str:
    result = row["result"].upper() if row["result"] in BAD else row["result"]
    seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
    text = row.get("error") or found(row)
    cells = [row["part"], row["check"], row.get("by", ""), result, seconds, text]
    return line(str(cell).replace("|", "\\|") for cell in cells)


def found(row: dict[str, Any]) -> str:
    """The numbers of a row in words."""
    parts = []
    if "difference" in row:
        parts.append(f"difference {row['difference']:.1e} (allowed {row['allowed']:.0e})")
    if "best" in row:
        parts.append(f"{1e3 * row['best']:.4g} ms")
        parts.append(f"median {1e3 * row['median']:.4g} ms")
        parts.append(f"compile {row['compile']:.2g} s")
        parts += [f"{percent(row, x)} of {what}" for x, what in FRACTIONS.items() if x in row]
    return "; ".join([*parts, *([row["note"]] if row.get("note") else [])])


FRACTIONS = {"flops_fraction": "FLOP/s", "memory_fraction": "memory"}


def times_line(row: dict[str, Any]) -> str:
    numbers = [f"{row['compile']:.2f}", f"{1e3 * row['best']:.4g}", f"{1e3 * row['median']:.4g}"]
    steps = f"{row['steps']:.1f}" if row.get("steps") is not None else ""
    fractions = [percent(row, x) for x in FRACTIONS]
    return line([row["check"], row["by"], *numbers, steps, *fractions, row.get("note", "")])


def percent(row: dict[str, Any], fraction: str) -> str:
    return f"{100 * row[fraction]:.3g} %" if fraction in row else ""


#
# A part, from inside
#


def say(**event: Any) -> None:
    """An event, for the process that watches."""
    print(json.dumps(event, default=str), flush=True)


def work(options: argparse.Namespace) -> int:
    """The checks of a part, in this process; the exit status."""
    import faulthandler

    part = next(part for part in PARTS if part.name == options.part)
    faulthandler.enable()
    module = importlib.import_module(part.module)
    checks = module.checks(part.name, small=options.cpu, references=options.references)
    names = options.checks.split(";") if options.checks else list(checks)
    say(checks=names)
    for name in names:
        say(begun=name)
        # (Where it hangs, if it does.)
        faulthandler.dump_traceback_later(0.9 * part.each * (3 if options.cpu else 1))
        began = time.monotonic()
        row = attempted(checks[name])
        say(**named(name), seconds=round(time.monotonic() - began, 2), **row)
        if row["result"] == "failed" and "error" in row and module.is_lost():
            return LOST
    faulthandler.cancel_dump_traceback_later()
    return 0


def attempted(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a check found, if only that it failed."""
    import traceback

    from common.contenders import Skip

    try:
        return check()
    except Skip as reason:
        return {"result": "skipped", "error": str(reason)}
    except Exception as error:  # the others go on
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        first = lines[0][:200] if lines else ""
        return {"result": "failed", "error": f"{type(error).__name__}: {first}"}


def refer(options: argparse.Namespace) -> int:
    """What the CPU computes, for the checks of all chosen parts that compare with it."""
    for part in PARTS:
        if part.name in options.only and part.module == VALUES:
            module = importlib.import_module(part.module)
            module.refer(part.name, small=options.cpu, references=options.references)
    return 0


#
# All of it
#


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """What the processes run in: no cache on disk decides what compiling takes; memory is taken as
    it is needed; the CPU is there, too."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1", "MPLBACKEND": "agg"}
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_X64", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        found.pop(name, None)
    path = [str(ROOT), *filter(None, [found.get("PYTHONPATH")])]
    found |= {"PYTHONPATH": os.pathsep.join(path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found |= {"CUDA_CACHE_DISABLE": "1", "ENSEMBLEODE_CACHE_DIR": ""}
    found["JAX_PLATFORMS"] = "cpu" if options.cpu else "cuda,cpu"
    if options.cpu:
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def starter(options: argparse.Namespace, folder: str, log: pathlib.Path) -> Start:
    environment = environment_of(options)

    def start(part: Part, only: Sequence[str]) -> Watched:
        command = [sys.executable, __file__, "--part", part.name, "--references", folder]
        command += ["--cpu"] * options.cpu + (["--checks", ";".join(only)] if only else [])
        return Watched(command, environment | quick_on(options, part.module), log)

    return start


def quick_on(options: argparse.Namespace, module: str) -> dict[str, str]:
    """On a CPU, compiling would take most of the time; values don't need fast programs."""
    is_quick = options.cpu and module == VALUES
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if is_quick else {}


def start_references(options: argparse.Namespace, folder: str) -> Watched:
    environment = environment_of(options) | quick_on(options, VALUES)
    environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, "--refer", "--references", folder]
    command += ["--only", ",".join(options.only)] + ["--cpu"] * options.cpu
    watched = Watched(command, environment, pathlib.Path(folder, "references.log"))

    def note_the_end() -> None:
        watched.process.wait()
        pathlib.Path(folder, "ended").touch()

    threading.Thread(target=note_the_end, daemon=True).start()
    return watched


def described(options: argparse.Namespace) -> dict[str, Any]:
    kept = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "diffrax", "equinox")
    about = machine("ensembleode", *kept, "numpy", "llvmlite")
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": f"{about['cpu']}, {about['cores']} cores",
        "load": about["load"],
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "command": " ".join(sys.argv[1:]),
        "minutes": options.minutes,
    }
    if options.cpu:
        text = "no GPU: small sizes; `kernel` is what EnsembleGPUKernel() does without a GPU, and "
        found["note"] = text + "`arrays` is the diffrax engine on the CPU"
    return found


def commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results = ROOT / "benchmarks" / "results"
    every = [part.name for part in PARTS]
    parser.add_argument("--out", type=pathlib.Path, default=results, help="for what is written")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which it has stopped")
    parser.add_argument("--only", default=",".join(every), help=f"of {', '.join(every)}")
    parser.add_argument("--cpu", action="store_true", help="small, without a GPU")
    for name in ("part", "checks", "references"):  # of the processes that it starts
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--refer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = options.only.split(",")
    if wrong := set(options.only) - set(every):
        parser.error(f"--only: there is no {', '.join(wrong)}")
    return options


def main() -> int:
    options = parse()
    if options.part:
        return work(options)
    if options.refer:
        return refer(options)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    report = Report(options.out, described(options))
    print(header(COLUMNS, left=len(COLUMNS)), flush=True)
    chosen = [part for part in PARTS if part.name in options.only]
    if options.cpu:  # which others may be busy with, too
        chosen = [part._replace(each=3 * part.each, most=4 * part.most) for part in chosen]
    # (Some seconds for the end.)
    deadline = began + 60.0 * options.minutes - 5.0
    with tempfile.TemporaryDirectory() as folder:
        references = start_references(options, folder)
        try:
            run_all(chosen, starter(options, folder, report.log), report, deadline)
        finally:
            references.kill()
            with report.log.open("ab") as log:
                log.write(b"\n=== references\n" + pathlib.Path(references.log).read_bytes())
            report.end()
    return 1 if report.bad else 0


if __name__ == "__main__":
    sys.exit(main())
