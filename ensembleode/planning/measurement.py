"""Measures the cost of an iteration on this machine, for several sizes."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..ground.devices import cpu_devices
from ..running.progress import bar
from ..tools.scripts import ScriptError, split
from .checks import number, PlanError, whole_number
from .fleet import Kind
from .tables import columns, plain


# Set in the environment of processes that measure.
_MEASURING = "ENSEMBLEODE_MEASURING"


@dataclasses.dataclass(frozen=True)
class Timing:
    """The measurement of one size: a row of a [`Measurement`][ensembleode.planning.Measurement].

    - `items`: the size.
    - `cores`: the number of CPU cores that the process had; None on an accelerator.
    - `device`: its name in JAX, such as "NVIDIA H100 80GB HBM3"; None for a process that failed
        before that was known.
    - `status`: "ok", "OOM" (out of memory), "timeout" or "error".
    - `reason`: the reason for a status other than "ok", on one line.
    - `iterations`: how many iterations were timed together.
    - `times`: `[repeat]`, the seconds of that many iterations.
    - `first`: the seconds of the first iteration, which compiles.
    - `memory`: the most bytes in use: of an accelerator's memory, or by the whole process including
        Python.
    """

    items: int
    cores: int | None
    device: str | None
    status: str
    reason: str = ""
    iterations: int | None = None
    times: tuple[float, ...] = ()
    first: float | None = None
    memory: int | None = None

    @property
    def seconds(self) -> float | None:
        """The median of the times."""
        return statistics.median(self.times) if self.times else None

    @property
    def spread(self) -> float | None:
        """The difference between the largest and the least of the times, relative to the median."""
        return (max(self.times) - min(self.times)) / self.seconds if self.seconds else None

    @property
    def unit_time(self) -> float | None:
        """The seconds for one item and 1000 iterations."""
        if self.seconds is None or self.iterations is None:
            return None
        return 1000 * self.seconds / self.iterations / self.items

    @property
    def where(self) -> str:
        """A short description of the device."""
        if self.cores is None:
            return self.device or "?"
        return f"{self.device or 'cpu'}, {self.cores} core{'s' if self.cores > 1 else ''}"


@dataclasses.dataclass(frozen=True)
class Fit:
    """The seconds of an iteration as `overhead + slope * items`, fitted by least squares of
    relative errors, since sizes differ by powers of ten, and timings by percents.

    - `cores`: the number of cores in the rows that were fitted.
    - `points`: the number of these rows.
    - `overhead`, `slope`: in seconds, and in seconds per item.
    - `overhead_error`, `slope_error`: their standard errors, from the residuals; NaN for two rows,
        which a line always fits.
    """

    cores: int | None
    points: int
    overhead: float
    slope: float
    overhead_error: float
    slope_error: float

    def __str__(self) -> str:
        overhead, slope = f"{1e3 * self.overhead:.4g}", f"{1e6 * self.slope:.4g}"
        if self.points > 2:
            overhead = f"({overhead} +/- {1e3 * self.overhead_error:.2g})"
            slope = f"({slope} +/- {1e6 * self.slope_error:.2g})"
        return f"{overhead} ms + {slope} us x items"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The result of [`measure`][ensembleode.planning.measure]; prints as a table.

    - `make_loss`: the name of the function that was measured.
    - `rows`: a [`Timing`][ensembleode.planning.Timing] for each number of cores and each size.
    - `fits`: a [`Fit`][ensembleode.planning.Fit] for each number of cores for which at least two
        sizes were timed.
    """

    make_loss: str
    rows: tuple[Timing, ...]
    fits: tuple[Fit, ...]

    def kind(self, name: str, count: int = 1) -> Kind:
        """A kind of a fleet that is as fast as the row with the least unit time.

        **Arguments:** `name` and `count`: those of the [`Kind`][ensembleode.planning.Kind].

        **Raises:** [`PlanError`][ensembleode.planning.PlanError] if nothing could be timed.
        """
        timed = [row for row in self.rows if row.status == "ok"]
        if not timed:
            raise PlanError(
                f"no size of {self.make_loss} could be timed, so {name!r} has no speed."
            )
        best = min(timed, key=lambda row: row.unit_time or math.inf)
        # Six digits, so that a fleet file is readable.
        return Kind(name, count, float(f"{best.seconds:.6g}"), best.items, best.iterations)

    def as_dict(self) -> dict[str, Any]:
        """The measurement as dictionaries, lists and numbers, for JSON; NaN becomes None."""
        found = plain(self)
        for row, fields in zip(self.rows, found["rows"], strict=True):
            fields |= {"seconds": row.seconds, "spread": row.spread, "unit_time": row.unit_time}
        return found

    def __str__(self) -> str:
        head = ["device", "items", "iterations", "seconds", "spread", "unit time", "first (s)"]
        table = [[*head, "memory"]]
        for row in self.rows:
            cells = [row.where, f"{row.items:,}"]
            if row.seconds is None or row.first is None or row.unit_time is None:
                cells += ["", row.status, "", "", "", ""]
            else:
                cells += [f"{row.iterations:,}", f"{row.seconds:.4g}", f"{row.spread:.0%}"]
                memory = "" if row.memory is None else f"{row.memory / 2**20:,.0f} MiB"
                cells += [f"{row.unit_time:.4g}", f"{row.first:.3g}", memory]
            table.append(cells)
        lines = [*columns(table), ""]
        for fit in self.fits:
            where = next(row.where for row in self.rows if row.cores == fit.cores)
            lines.append(f"an iteration ({where}): {fit}")
        bad = [row for row in self.rows if row.reason]
        lines += [f"{x.status} of {x.items:,} items ({x.where}): {x.reason}" for x in bad]
        lines.append("seconds: median of the repeats, which differ by the spread")
        return "\n".join([*lines, "unit time: seconds an item and 1000 iterations"])


def measure(
    make_loss: str,
    sizes: Sequence[int | float],
    *,
    iterations: int | None = None,
    cores: Sequence[int] | None = None,
    repeats: int = 5,
    time_limit: int | float = 600,
    progress: bool = False,
) -> Measurement:
    """Time an iteration for several sizes, each in a process of its own.

    So a size that fails, even if its process is killed, is a row like the others, and affects no
    other. In each process, `make_loss(items)` is called once. The function that it returns, for
    example `run`, is called without arguments: once, which compiles, and then `repeats` times
    `iterations` times. Each call is one iteration, and is waited for. With a training step, for
    instance:

        def make_loss(items):
            points = jax.random.uniform(jax.random.key(0), (items, 2))
            return functools.partial(step, params, points)  # step is jitted

    Arrays that a jitted function closes over, instead of taking them as arguments, are constants to
    XLA, which may compute with them at compile time.

    **Arguments:**

    - `make_loss`: the function, as `"path/to/script.py:make_loss"` or as
        `"package.module:make_loss"`. A script is imported, so the code that should only run when
        the script is run should be under `if __name__ == "__main__":`.
    - `sizes`: the numbers of items to try.
    - `iterations`: how many iterations to time together; by default as many as take half a second.
    - `cores`: the numbers of cores to try, on the CPU. A process gets that many cores by its
        affinity (on Linux, where this exists), and as many JAX devices. By default, JAX's default
        device is measured, or all cores.
    - `repeats`: how often the iterations are timed; the median counts.
    - `time_limit`: the limit for each process, in seconds.
    - `progress`: show a progress bar.

    **Returns:** a [`Measurement`][ensembleode.planning.Measurement], whose rows are in the order of
    `cores` and `sizes`.

    **Raises:** [`PlanError`][ensembleode.planning.PlanError] for wrong numbers, for more cores than
    there are, and when there is no such function, or it doesn't return a function.

    A process to which JAX has given an accelerator keeps most of the accelerator's memory, so call
    this in a process that has computed nothing.
    """
    if _MEASURING in os.environ:
        raise PlanError(
            "a script that is measured must not measure when it is imported: put that under "
            '`if __name__ == "__main__":`.'
        )
    try:
        source, function = split(make_loss)
    except ScriptError as e:
        raise PlanError(str(e)) from e
    sizes = _distinct(sizes, "sizes")
    settings = [None] if cores is None else _distinct(cores, "cores")
    usable = cpu_devices.cores()
    for count in settings:
        if count is not None and count > usable:
            raise PlanError(f"cores: {count} were asked for, and this process may use {usable}.")
    task = {
        "source": source,
        "function": function,
        "iterations": None if iterations is None else whole_number(iterations, "iterations"),
        "repeats": whole_number(repeats, "repeats"),
    }
    time_limit = number(time_limit, "time_limit")
    rows = []
    with bar(len(settings) * len(sizes), "size", disable=not progress) as shown:
        for count, items in itertools.product(settings, sizes):
            rows.append(_row(task | {"items": items}, count, time_limit))
            shown.update()
    return Measurement(make_loss, tuple(rows), tuple(_fits(rows)))


def _distinct(values: Sequence, what: str) -> list[int]:
    found = [whole_number(value, what) for value in values]
    if not found or len(set(found)) < len(found):
        raise PlanError(f"{what} must be one number or more, each once, got {list(values)}.")
    return found


def _row(task: dict[str, Any], cores: int | None, time_limit: float) -> Timing:
    with tempfile.TemporaryDirectory(prefix="ensembleode-") as directory:
        result, log = (pathlib.Path(directory, name) for name in ("result.json", "log"))
        code = _run([json.dumps(task), str(result)], log, cores, time_limit)
        try:
            report = json.loads(result.read_text())
        except (OSError, ValueError):
            report = {}
        said = log.read_text(errors="replace").split("\n")
    if "status" not in report:
        report |= _ended(code, said, time_limit)
    if report["status"] == "unusable":
        raise PlanError(f"can't measure: {report['reason']}")
    report["times"] = tuple(report.get("times", ()))
    return Timing(**{"items": task["items"], "cores": cores, "device": None, **report})


def _run(arguments: list[str], log: pathlib.Path, cores: int | None, limit: float) -> int | None:
    """The exit code of a process; None if it was ended at the time limit."""
    command = [sys.executable, "-m", "ensembleode.planning.process", *arguments]
    environment = os.environ | {_MEASURING: "1"}
    if cores is not None:
        environment.pop("JAX_NUM_CPU_DEVICES", None)
        environment |= {
            cpu_devices.VARIABLE: str(cores),
            "JAX_PLATFORMS": "cpu",
            # This limits the threads of XLA where there is no affinity.
            "NPROC": str(cores),
        }
    with log.open("wb") as output, _affinity(cores):
        process = subprocess.Popen(
            command,
            # The process ends when this end of the pipe is closed, however this process ends.
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # A process group, so that the processes that it starts end with it.
            start_new_session=True,
        )
    try:
        return process.wait(limit)
    except BaseException as e:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        if isinstance(e, subprocess.TimeoutExpired):
            return None
        raise
    finally:
        assert process.stdin is not None
        process.stdin.close()


@contextlib.contextmanager
def _affinity(cores: int | None) -> Iterator[None]:
    """Within this block, processes that this thread starts may use `cores` cores."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _ended(code: int | None, said: list[str], limit: float) -> dict[str, str]:
    """The status and the reason for a process that ended before it could write these itself."""
    last = next((line.strip() for line in reversed(said) if line.strip()), "")
    if code is None:
        return {"status": "timeout", "reason": f"not done after {limit:g} seconds (time_limit)"}
    if code == -signal.SIGABRT and any("bad_alloc" in line for line in said):
        return {"status": "OOM", "reason": last}
    name = next((x.name for x in signal.Signals if x == -code), f"signal {-code}")
    if name == "SIGKILL":
        return {"status": "OOM", "reason": "killed (SIGKILL), as Linux does when memory is out"}
    why = f"ended by {name}" if code < 0 else f"exited with code {code}"
    return {"status": "error", "reason": f"{why}: {last}" if last else why}


def _fits(rows: Sequence[Timing]) -> Iterator[Fit]:
    for cores in dict.fromkeys(row.cores for row in rows):
        timed = [row for row in rows if row.cores == cores and row.seconds and row.iterations]
        if len(timed) > 1:
            cost = [row.seconds / row.iterations for row in timed]  # pyright: ignore
            yield fitted(cores, [row.items for row in timed], cost)


def fitted(cores: int | None, items: Sequence[int], cost: Sequence[float]) -> Fit:
    """The line through the costs of iterations over numbers of items, of which there are at least
    two."""
    n, y = np.asarray(items, float), np.asarray(cost, float)
    # Columns of order one are well conditioned; rows are divided by the cost, for relative errors.
    scale = np.array([1.0, n.max()])
    x = np.stack([np.ones_like(n), n], axis=1) / scale / y[:, None]
    inverse = np.linalg.inv(x.T @ x)
    line = np.linalg.lstsq(x, np.ones_like(y), rcond=None)[0]
    free = len(n) - 2
    variance = np.sum((x @ line - 1) ** 2) / free if free else math.nan
    errors = np.sqrt(variance * np.diag(inverse)) / scale
    overhead, slope = line / scale
    return Fit(cores, len(n), float(overhead), float(slope), float(errors[0]), float(errors[1]))
