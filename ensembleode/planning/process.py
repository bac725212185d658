"""Times one size, in a process of its own: `python -m ensembleode.planning.process TASK RESULT`.

TASK is JSON: `source`, `function`, `items`, `iterations`, `repeats`. The outcome is written to the
file RESULT as JSON, first the device alone and later everything. So even a process that is killed
has written where it ran.
"""

import contextlib
import json
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from ..ground.devices import cpu_devices
from ..tools.scripts import loaded, ScriptError


# The least number of seconds of a repeat, where the number of iterations is not given.
SECONDS = 0.5


class UnusableError(Exception):
    """The function to be measured doesn't exist, or isn't as it should be, at any size."""


def main(task: str, result: str) -> None:
    """Do the task, and write its outcome."""
    _let_the_kernel_choose_this()
    cpu_devices.share()
    path = pathlib.Path(result)
    report: dict[str, Any] = {}
    try:
        measured(**json.loads(task), report=report, say=lambda: path.write_text(json.dumps(report)))
        report["status"] = "ok"
    except (Exception, SystemExit) as e:
        report |= {"status": status_of(e), "reason": reason_of(e)}
    path.write_text(json.dumps(report))


def measured(
    source: str,
    function: str,
    items: int,
    iterations: int | None,
    repeats: int,
    report: dict[str, Any],
    say: Callable[[], Any],
) -> None:
    """Make the function to be timed, and time it; `say` is called when the report has grown."""
    make_loss = function_of(source, function)
    device = jax.devices()[0]
    report["device"] = device.device_kind
    if device.platform == "cpu":
        report["cores"] = cpu_devices.cores()
    say()
    run = make_loss(items)
    if not callable(run):
        raise UnusableError(
            f"{function}({items}) must return a function without arguments that does one iteration,"
            f" got {type(run).__name__}."
        )
    report["first"] = seconds(run)
    if iterations is None:
        iterations = max(1, math.ceil(SECONDS / seconds(run)))
    report["iterations"] = iterations
    report["times"] = [seconds(run, iterations) for _ in range(repeats)]
    report["memory"] = peak_memory(device)


def seconds(run: Callable[[], Any], iterations: int = 1) -> float:
    """The seconds that this many iterations take, each of which is waited for."""
    start = time.perf_counter()
    for _ in range(iterations):
        jax.block_until_ready(run())
    # The clock may be coarser than a call takes.
    return max(time.perf_counter() - start, 1e-9)


def function_of(source: str, function: str) -> Callable[[int], Any]:
    """The function to measure. **Raises:** `UnusableError`."""
    try:
        return loaded(source, function)
    except ScriptError as e:
        raise UnusableError(str(e)) from e
    except (Exception, SystemExit) as e:
        if status_of(e) == "OOM":
            raise
        raise UnusableError(f"{source} can't be imported: {reason_of(e)}.") from e


def status_of(error: BaseException) -> str:
    """The status of a row after this error: "OOM" or "error"; or "unusable"."""
    if isinstance(error, UnusableError):
        return "unusable"
    text = str(error)
    is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text
    return "OOM" if is_memory or "out of memory" in text.lower() else "error"


def reason_of(error: BaseException) -> str:
    """The text of an error on one line, which is not too long."""
    if isinstance(error, UnusableError):
        return str(error)
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":").rstrip(".")
    return text if len(text) <= 300 else f"{text[:300]}..."


def peak_memory(device: Any) -> int | None:
    """The most bytes that were in use: of an accelerator's memory, or by this process."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("peak_bytes_in_use")
    # On Linux, `ru_maxrss` may be that of the process that started this one.
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _end_with_the_parent() -> None:
    """End this process when its parent ends, in whichever way: the parent holds the other end of
    the pipe that is this process's standard input."""
    pipe = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait():
        os.read(pipe, 1)  # returns only at the end of the pipe
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with the processes that this one started
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _let_the_kernel_choose_this() -> None:
    """Let Linux choose this process when it runs out of memory, and not the parent that waits for
    it."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    _end_with_the_parent()
    main(*sys.argv[1:])
