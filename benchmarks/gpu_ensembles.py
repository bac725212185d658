"""`EnsembleGPUKernel` beside its peers, on one GPU: a table, and everything measured as JSON.

    python benchmarks/gpu_ensembles.py [--out DIR] [--minutes 8] [--only kernel,arrays,...]
        [--modes fixed,1e-6,...] [--sizes 10,13,...] [--cpu] [--show FILE.json]

The problem is Lorenz with sigma = 10, beta = 8/3, a different rho from 0 to 21 for each trajectory,
from (1, 0, 0), to t = 1 (that of GPUODEBenchmarks). The modes:

- `fixed`: 1000 steps of 1e-3, endpoints; `fixed saveat`: with 11 saved times as well.
- `1e-5`, `1e-6`: adaptive at this rtol, atol a thousandth of it, first step 0.01, endpoints (as in
    SciMLBenchmarks); `saveat`: at 1e-6, with 11 saved times as well.
- `1e-8`: adaptive at rtol = atol = 1e-8, first step 1e-3, endpoints (as in GPUODEBenchmarks). In
  float32 that is below rounding.
- `gradient`: at 1e-6, of the sum of the squares of all endpoints with respect to each rho, in
    reverse mode.

The contenders. All but `kernel` and `arrays` are optional; a row or line gives the reason if one
takes no part:

- `kernel`: `solve` on EnsembleGPUKernel(); `arrays`: on EnsembleGPUArray().
- `diffrax`: `jax.jit(jax.vmap(diffeqsolve))`, Tsit5, PIDController, without raising (which is
    faster).
- `gradsolve Warp`, `gradsolve CUDA`: its two fused kernels, only adaptive and with endpoints. (The
    second needs nvcc, and always begins with 0.01.)
- `torchdiffeq`: RK4 for fixed steps, by `torch.func.vmap` if it can (otherwise the row says so);
    Dopri5 for adaptive steps, on states [N, 3], which all share one step size.

All contenders allow 4096 steps. The columns are times in ms unless said otherwise, and each is the
best of several (the medians are in the JSON):

- `compile`: how many seconds longer the first call took than a later one. JAX's and CUDA's caches
    on disk are off, but a kernel's PTX is kept for other numbers of trajectories.
- `to GPU`: the inputs, from NumPy; `kernel`: the jitted solve of arrays on the GPU, with results
    that stay there, and with all that XLA does around the kernel (below 1 ms: of several calls in a
    row, so that launches overlap); `from GPU`: the states, into NumPy. The arrays are pageable, not
    page-locked.
- `end to end`: from NumPy to NumPy by the public call. For this library it is an eager `solve` of a
    new ensemble.
- `steps`: attempted steps of a trajectory, on average. `failed`: trajectories that did not succeed.
- `error`: the largest absolute error of 64 trajectories, at all saved times, against Vern9 at 1e-13
    in float64 from the same numbers; for a gradient, relative to its largest entry.
- `FLOP/s`, `memory`: the fractions of the GPU's peaks that the kernel reaches (see `flops_of_step`
    and `bytes_moved` in gpu_peaks.py). Threads that wait for others of their warp count as idle.

The most important cases come first. A case is skipped if it would not end in time, according to the
time of smaller ones; the end of the output says so. Results are written after each case. When its
time is over, the script stops, even in the middle of a case.
"""

import argparse
import datetime
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


STARTED = time.monotonic()
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Before JAX and CUDA start: memory is left for torch, gradsolve does not switch to float64, and
# compiling is not what a cache remembers of the last run.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("GRADSOLVE_X64", "0")
os.environ.setdefault("CUDA_CACHE_DISABLE", "1")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
if os.environ.get("JAX_PLATFORMS") in ("cuda", "gpu"):
    os.environ["JAX_PLATFORMS"] += ",cpu"  # where what is exact is computed
if "--cpu" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common.contenders import exact_states, Skip  # noqa: E402
from common.report import machine, named, PEERS  # noqa: E402
from common.tasks import lorenz, Task  # noqa: E402
from gpu_cases import (  # noqa: E402
    ARRAYS,
    Case,
    DIFFRAX,
    FLOAT32,
    FLOAT64,
    KERNEL,
    Mode,
    MODES,
    ON_CPU,
    ON_GPU,
    schedule,
    Sizes,
    TIMES,
)
from gpu_contenders import Contender, first_line, on_gpu, refusal, Solved, WAYS  # noqa: E402
from gpu_peaks import flops_of_step, fractions, peak_of  # noqa: E402
from gpu_report import COLUMNS, header, predicted, Report, show  # noqa: E402


#
# Measuring
#


class Limits(NamedTuple):
    """How long a case is measured: seconds of each of its two loops, and turns."""

    seconds: float
    warm_up: float
    most: int = 30


def measured(name: str, case: Case, exact: "Exact | None", limits: Limits, peak: Any) -> dict:
    """A row: what the contender took for the case."""
    with jax.enable_x64(case.dtype == FLOAT64):
        contender, rhos = WAYS[name](case), case.task.p
        began = time.perf_counter()
        inputs = contender.put(rhos)
        solved = contender.wait(contender.run(inputs))
        first = time.perf_counter() - began
        row = _times(contender, rhos, first, limits)
        row |= _checked(case, contender, solved, exact)
        if name == KERNEL and peak is not None and row.get("steps"):
            row |= fractions(case, row["steps"], row["kernel"], peak)
    return row | ({"note": contender.note} if contender.note else {})


def _times(contender: Contender, rhos: np.ndarray, first: float, limits: Limits) -> dict:
    inputs = contender.put(rhos)
    waited = min(
        _repeated(lambda: contender.wait(contender.run(inputs)), limits.warm_up, limits.most)
    )
    calls = 1 if waited >= 1e-3 else min(100, math.ceil(2e-3 / waited))
    turns: list[tuple[float, float, float]] = []
    _repeated(lambda: turns.append(_turn(contender, rhos, calls)), limits.seconds, limits.most)
    began = time.perf_counter()
    contender.end_to_end(rhos)
    first_public = time.perf_counter() - began
    whole = _repeated(lambda: contender.end_to_end(rhos), limits.seconds, limits.most)
    row: dict[str, Any] = {"compile": max(0.0, first - waited), "calls": calls, "waited": waited}
    columns = (*zip(*turns, strict=True), whole)
    for column, seconds in zip(COLUMNS, columns, strict=True):
        row[column] = min(seconds)
        row[f"{column}_median"] = statistics.median(seconds)
    return row | {"turns": len(turns), "compile_end_to_end": max(0.0, first_public - min(whole))}


def _turn(contender: Contender, rhos: np.ndarray, calls: int) -> tuple[float, float, float]:
    """Seconds to the device, of one solve of several on end, and from the device."""
    began = time.perf_counter()
    inputs = contender.put(rhos)
    there = time.perf_counter()
    for _ in range(calls):
        solved = contender.run(inputs)
    contender.wait(solved)
    done = time.perf_counter()
    contender.fetch(solved)  # new results each time: JAX keeps what it has fetched
    return there - began, (done - there) / calls, time.perf_counter() - done


def _repeated(call: Callable[[], Any], seconds: float, most: int) -> list[float]:
    """Seconds of each call, one at least; the first three may take three times as long."""
    spent: list[float] = []
    while not spent or (len(spent) < most and sum(spent) < seconds * (1 if spent[2:] else 3)):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return spent


def _checked(case: Case, contender: Contender, solved: Solved, exact: "Exact | None") -> dict:
    """Steps, failures and errors."""
    states = contender.fetch(solved).reshape(case.n, -1)
    good = np.isfinite(states).all(1)
    row: dict[str, Any] = {}
    if solved.good is not None:
        good &= np.asarray(solved.good)
    if solved.steps is not None:
        steps = np.asarray(solved.steps)
        row = {"steps": float(np.mean(steps)), "most_steps": int(np.max(steps))}
    if exact is not None:
        off = np.abs(states[case.task.sample].astype(float) - exact.of(case.method))
        if case.method.gradient:
            off /= np.abs(exact.gradient).max()
        row["error"] = float(off.max())
    return row | {"failed": int(case.n - good.sum())}


#
# What is exact
#


class Exact(NamedTuple):
    """Of a sample of trajectories: states `[trajectory, time, 3]`, and the derivative of the sum of
    the squares of each one's end by its rho, `[trajectory]`."""

    states: np.ndarray
    gradient: np.ndarray

    def of(self, mode: Mode) -> np.ndarray:
        if mode.gradient:
            return self.gradient[:, None]
        rows = self.states if mode.saves else self.states[:, -1:]
        return rows.reshape(len(rows), -1)


def with_sensitivity(u: Any, p: Any, t: Any) -> Any:
    """Lorenz, and how its state changes with rho."""
    state, change = jax.jvp(lambda u, p: lorenz(u, p, t), (u[:3], p), (u[3:], jnp.ones_like(p)))
    return jnp.concatenate([state, change])


def references(cases: Iterable[Case]) -> dict[tuple[str, int], Exact]:
    """By dtype and number of trajectories: all in one solve by Vern9 at 1e-13, on the CPU."""
    every = {(case.dtype, case.n): case.task for case in cases}
    samples = [task.p[task.sample].astype(float) for task in every.values()]
    rhos, u0 = np.concatenate(samples), np.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    task = Task(with_sensitivity, u0, rhos, ("p",), len(rhos), 1.0, times=TIMES)
    found = exact_states(task, np.arange(task.n), throw=True)
    parts = np.split(found, np.cumsum([len(x) for x in samples])[:-1])
    ends = [2.0 * np.sum(x[:, -1, :3] * x[:, -1, 3:], axis=1) for x in parts]
    all_exact = (Exact(x[:, :, :3], end) for x, end in zip(parts, ends, strict=True))
    return dict(zip(every, all_exact, strict=True))


#
# Running
#


def run_all(report: Report, todo: Sequence[tuple[str, Case]], deadline: float, limits: Limits):
    """Each in turn, as long as there is time and a GPU."""
    exact = _references(report, todo)
    peak = peak_of(report.about["gpu"]["name"])
    missing: dict[str, str] = {}
    lost = None
    for name, case in todo:
        if report.ended:
            return
        left = deadline - time.monotonic()
        if reason := lost or missing.get(name):
            report.add(name, case, {"skipped": reason})
        elif predicted(report.rows, name, case) > left:
            report.add(name, case, {"skipped": "no time left for it"})
        else:
            found = attempted(name, case, exact.get((case.dtype, case.n)), limits, peak)
            if found.pop("missing", False):
                missing[name] = found["skipped"]
            report.add(name, case, found)
            if "error_message" in found and (lost := _lost()):
                lost += f" after {name}, {case.mode}, {case.dtype}, {case.n}"


def attempted(name: str, case: Case, exact: Exact | None, limits: Limits, peak: Any) -> dict:
    """A row, of a case that may fail."""
    began = time.monotonic()
    try:
        found = measured(name, case, exact, limits, peak)
    except Skip as reason:
        return {"skipped": str(reason), "missing": "installed" in str(reason)}
    except Exception as error:  # a peer's, or no memory: the others go on
        traceback.print_exc(limit=-3)
        return {"error_message": first_line(error), "seconds": time.monotonic() - began}
    finally:
        _free_torch()
    return found | {"seconds": time.monotonic() - began}


def _references(report: Report, todo: Sequence[tuple[str, Case]]) -> dict:
    try:
        return references(case for _, case in todo)
    except Exception as error:
        traceback.print_exc(limit=-3)
        report.about["notes"].append(f"no errors are known: {first_line(error)}")
        return {}


def _free_torch() -> None:
    """Give back the memory that torch keeps."""
    if (torch := sys.modules.get("torch")) and on_gpu():
        torch.cuda.empty_cache()


def _lost() -> str | None:
    """Why nothing can run any more: a kernel that went wrong takes the process's GPU with it."""
    reason = refusal(lambda: jax.block_until_ready(jnp.arange(8) + 1))
    return reason and f"the GPU was lost ({reason})"


#
# The machine
#


def gpu() -> dict[str, str]:
    """What the driver says of the GPU; only its name where it is not asked."""
    about = {"name": jax.devices()[0].device_kind}
    if not on_gpu():
        return about | {"name": "none"}
    fields = "driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return about | {"nvidia-smi": first_line(error)}
    first = done.stdout.splitlines()[0].split(", ")
    return about | dict(zip(fields.split(","), first, strict=False))


def described(options: argparse.Namespace) -> dict[str, Any]:
    libraries = ("torch", "torchdiffeq", "jaxlib", "jax-cuda13-plugin", "llvmlite")
    about = machine(*PEERS, *libraries)
    notes = ["transfers are of pageable arrays", "times in seconds: the best, and the median"]
    device = gpu()
    if peak_of(device["name"]) is None:
        notes.append("the peaks of this device are not in the table: no fractions of them")
    if not on_gpu():
        notes.append("no GPU: the rows of kernel and arrays are the compiled engine on the CPU")
    return {
        "benchmark": "gpu_ensembles",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": about,
        "gpu": device,
        "commit": _commit(),
        "command": sys.argv[1:],
        "minutes": options.minutes,
        "flops_of_step": {name: flops_of_step(mode) for name, mode in MODES.items()},
        "notes": notes,
    }


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def warm_up() -> None:
    """A small solve of ours and of diffrax: none is to pay for what comes once a process."""
    case = Case("1e-5", FLOAT32, 4)
    for name in (KERNEL, ARRAYS, DIFFRAX):
        # (What fails here does so again in a row, which says so.)
        refusal(lambda name=name: WAYS[name](case).end_to_end(case.task.p))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=pathlib.Path, default=results, help="for the JSON")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which it has stopped")
    parser.add_argument("--only", help=f"contenders, of {', '.join(WAYS)}")
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}")
    parser.add_argument("--sizes", help="exponents of two, such as 10,13")
    parser.add_argument("--cpu", action="store_true", help="small, without a GPU: to try it out")
    parser.add_argument("--show", type=pathlib.Path, metavar="JSON", help="print a file's table")
    options = parser.parse_args()
    for what, every in (("only", WAYS), ("modes", MODES)):
        chosen = (getattr(options, what) or ",".join(every)).split(",")
        if wrong := set(chosen) - set(every):
            parser.error(f"--{what}: there is no {', '.join(wrong)}")
        setattr(options, what, chosen)
    return options


def chosen(options: argparse.Namespace, sizes: Sizes) -> list[tuple[str, Case]]:
    exponents = [int(x) for x in options.sizes.split(",")] if options.sizes else None
    sizes = sizes._replace(every=exponents) if exponents else sizes
    return [
        (name, case)
        for name, case in schedule(sizes)
        if name in options.only
        and case.mode in options.modes
        and (exponents is None or case.n in [2**x for x in exponents])
    ]


def main() -> None:
    options = parse()
    if options.show:
        show(options.show)
        return
    if not (options.cpu or on_gpu()):
        sys.exit("JAX finds no GPU; --cpu tries this out without one.")
    sizes = ON_GPU if on_gpu() else ON_CPU
    limits = Limits(0.4, 0.2) if on_gpu() else Limits(0.02, 0.0, 3)
    todo, about = chosen(options, sizes), described(options)
    options.out.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    report = Report(options.out / f"gpu_ensembles-{stamp}.json", about, sizes, STARTED)
    end = STARTED + 60.0 * options.minutes

    def cut_off() -> None:
        done = {(row["contender"], row["mode"], row["dtype"], row["n"]) for row in report.rows}
        for name, case in todo:
            if (name, *case) not in done:
                report.add(name, case, {"skipped": "cut off at the end of the time"})
        report.end("cut off at the end of its time")
        os._exit(0)  # whatever the other thread waits for

    timer = threading.Timer(max(0.0, end - time.monotonic() - 3.0), cut_off)
    timer.daemon = True
    timer.start()
    computer = f"{about['machine']['cpu']}; {named(about['machine']['versions'])}"
    print(f"{about['gpu']}; {computer}\n\n{header()}", flush=True)
    warm_up()
    run_all(report, todo, end - 8.0, limits)
    timer.cancel()
    report.end("ended")


if __name__ == "__main__":
    main()
