"""`EnsembleGPUKernel` beside its peers, on one GPU: a table, and everything measured as JSON.

    python benchmarks/gpu_ensembles.py [--out DIR] [--minutes 8] [--only kernel,lanes,...]
        [--modes fixed,1e-6,...] [--sizes 10,13,...] [--cpu] [--show FILE.json]

The problem: Lorenz, sigma = 10, beta = 8/3, rho from 0 to 21 by trajectory, from (1, 0, 0), to
t = 1 (that of GPUODEBenchmarks). The modes:

- `fixed`: 1000 steps of 1e-3, endpoints; `fixed saveat`: and 11 times saved.
- `1e-5`, `1e-6`: adaptive at this rtol, atol a thousandth of it, first step 0.01, endpoints (as in
  SciMLBenchmarks); `saveat`: at 1e-6, and 11 times saved.
- `1e-8`: adaptive at rtol = atol = 1e-8, first step 1e-3, endpoints (as in GPUODEBenchmarks). In
  float32 that is below rounding.
- `gradient`: at 1e-6, of the sum of the squares of all endpoints by each rho, in reverse mode.

The contenders, each optional but ours; a row or line says why one takes no part:

- `kernel`: `solve` on EnsembleGPUKernel(); `lanes`: on EnsembleGPUArray().
- `diffrax`: `jax.jit(jax.vmap(diffeqsolve))`, Tsit5, PIDController, without raising (kinder to it).
- `gradsolve Warp`, `gradsolve CUDA`: its two fused kernels, adaptive and endpoints only. (The
  second needs nvcc, and always begins with 0.01.)
- `torchdiffeq`: RK4 where steps are fixed, by `torch.func.vmap` if it can (it says otherwise);
  Dopri5 where adaptive, on states [N, 3], which all share one step size.

All allow 4096 steps. The columns, times in ms unless said otherwise, each the best of several (the
medians are in the JSON):

- `compile`: seconds that the first call took more than a later one. JAX's and CUDA's caches on disk
  are off, but a kernel's PTX is kept for other numbers of trajectories.
- `to GPU`: the inputs, from NumPy; `kernel`: the jitted solve of what is on the GPU, the results
  left there, with whatever XLA does around the kernel (below 1 ms: of several calls on end, so that
  launching overlaps); `from GPU`: the states, into NumPy. The arrays are pageable, not page-locked.
- `end to end`: from NumPy to NumPy by the public call. Ours is an eager `solve` of a new ensemble.
- `steps`: tried by a trajectory, on average. `failed`: trajectories that did not succeed.
- `error`: the largest of 64 trajectories', at all times that are saved, against Vern9 at 1e-13 in
  float64 from the same numbers, absolute; of a gradient, relative to its largest entry.
- `FLOP/s`, `memory`: the kernel's fractions of the GPU's peaks (see `flops_of_step` and
  `bytes_moved`). Threads that wait for others of their warp count as idle.

The most important cases come first; one that would not end in time, from what smaller ones took, is
skipped, which is said at the end. Results are written after each case. At the end of its time it
stops, whatever runs.
"""

import argparse
import contextlib
import datetime
import importlib.metadata as importlib_metadata
import itertools
import json
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
from collections.abc import Callable, Iterable, Iterator, Sequence
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

import diffrax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cpu_ensembles import (  # noqa: E402
    gradsolve_problem,
    has_warp,
    imported,
    lorenz,
    lorenz_task,
    machine,
    SAMPLE,
    Skip,
)

import ensembleode as eo  # noqa: E402


MOST_STEPS = 4096
TIMES = np.linspace(0.0, 1.0, 11)
FLOAT32, FLOAT64 = "float32", "float64"
BOTH = (FLOAT32, FLOAT64)
COLUMNS = ("to_gpu", "kernel", "from_gpu", "end_to_end")  # of times that are repeated

KERNEL, LANES, DIFFRAX = "kernel", "lanes", "diffrax"
WARP, CUDA, TORCH = "gradsolve Warp", "gradsolve CUDA", "torchdiffeq"


class Mode(NamedTuple):
    """How the steps are chosen, and what comes of them. `dt` is the first step, or all."""

    dt: float
    rtol: float | None = None
    atol: float | None = None
    saves: bool = False
    gradient: bool = False

    @property
    def adaptive(self) -> bool:
        return self.rtol is not None


TARGET = "1e-6"  # the mode that the project's promises are about
GRADIENT = "gradient"
MODES = {
    "fixed": Mode(1e-3),
    "fixed saveat": Mode(1e-3, saves=True),
    "1e-5": Mode(0.01, 1e-5, 1e-8),
    TARGET: Mode(0.01, 1e-6, 1e-9),
    "1e-8": Mode(1e-3, 1e-8, 1e-8),
    "saveat": Mode(0.01, 1e-6, 1e-9, saves=True),
    GRADIENT: Mode(0.01, 1e-6, 1e-9, gradient=True),
}


class Case(NamedTuple):
    """An ensemble of `n` trajectories, to be solved in one of the modes."""

    mode: str
    dtype: str
    n: int

    @property
    def method(self) -> Mode:
        return MODES[self.mode]

    @property
    def rhos(self) -> np.ndarray:
        return np.linspace(0.0, 21.0, self.n, dtype=self.dtype)

    @property
    def sample(self) -> np.ndarray:
        """Trajectories whose errors are measured."""
        return np.unique(np.linspace(0, self.n - 1, SAMPLE).astype(int))

    @property
    def u0(self) -> np.ndarray:
        return np.array([1.0, 0.0, 0.0], self.dtype)


class Solved(NamedTuple):
    """What a contender computes: states `[trajectory, (time,) 3]`, or gradients `[trajectory]`; the
    steps of each trajectory, and which succeeded, where it says so."""

    states: Any
    steps: Any = None
    good: Any = None


class Contender(NamedTuple):
    """A case, as one of the contenders runs it.

    - `put`: the parameters to the device, done on return. `run`: the solve of what `put` gave; may
        return before it is done. `wait`: until it is. `fetch`: the states as NumPy.
    - `public`: from NumPy to NumPy; where None, these one after the other.
    - `note`: what a reader of the row should know.
    """

    run: Callable[[Any], Solved]
    put: Callable[[np.ndarray], Any]
    wait: Callable[[Any], Any]
    fetch: Callable[[Solved], np.ndarray]
    public: Callable[[np.ndarray], np.ndarray] | None = None
    note: str | None = None

    def end_to_end(self, rhos: np.ndarray) -> np.ndarray:
        if self.public is not None:
            return self.public(rhos)
        return self.fetch(self.wait(self.run(self.put(rhos))))


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


#
# The contenders of JAX
#


def in_jax(run: Callable, public: Callable | None = None, also: Any = ()) -> Contender:
    """Of a jitted function of the parameters, and of what else (`also`) it is given."""

    def put(rhos: np.ndarray) -> Any:
        return jax.block_until_ready(jax.device_put((rhos, *also)))

    return Contender(
        run=lambda inputs: run(*inputs),
        put=put,
        wait=jax.block_until_ready,
        fetch=lambda solved: np.asarray(solved.states),
        public=public,
    )


def gradient_of(solve: Callable[[Any], Solved]) -> Callable[[Any], Solved]:
    gradient = jax.grad(lambda rhos: jnp.sum(solve(rhos).states ** 2))
    return lambda rhos: Solved(gradient(rhos))


def ours(alg: eo.EnsembleGPUArray | eo.EnsembleGPUKernel) -> Callable[[Case], Contender]:
    def way(case: Case) -> Contender:
        def solution(rhos: Any) -> eo.EnsembleSolution:
            return solution_of(case, rhos, alg)

        def solve(rhos: Any) -> Solved:
            sim = solution(rhos)
            good = sim.retcode == eo.ReturnCode.Success.value
            return Solved(sim.u, sim.stats.naccept + sim.stats.nreject, good)

        if case.method.gradient:
            return in_jax(jax.jit(gradient_of(solve)))
        return in_jax(jax.jit(solve), lambda rhos: np.asarray(solution(jnp.asarray(rhos)).u))

    return way


def solution_of(
    case: Case, rhos: Any, alg: eo.EnsembleGPUArray | eo.EnsembleGPUKernel
) -> eo.EnsembleSolution:
    method, real = case.method, np.dtype(case.dtype).type
    prob = eo.ODEProblem(lorenz, jnp.asarray(case.u0), (0.0, 1.0), real(0.0))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=rhos[ctx.index]))
    options: dict[str, Any] = {"adaptive": False}
    if method.adaptive:
        options = {"abstol": method.atol, "reltol": method.rtol}
    options |= {"saveat": TIMES} if method.saves else {"save_start": False}
    return eo.solve(
        ens, eo.Tsit5(), alg, trajectories=case.n, dt=method.dt, maxiters=MOST_STEPS, **options
    )


def by_diffrax(case: Case) -> Contender:
    method = case.method
    controller: Any = diffrax.ConstantStepSize()
    if method.adaptive:
        controller = diffrax.PIDController(rtol=method.rtol, atol=method.atol)
    saveat = diffrax.SaveAt(t1=True)
    if method.saves:
        saveat = diffrax.SaveAt(ts=jnp.asarray(TIMES, case.dtype))

    def one(rho: Any) -> Solved:
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, u, p: lorenz(u, p, t)),
            diffrax.Tsit5(),
            0.0,
            1.0,
            method.dt,
            jnp.asarray(case.u0),
            rho,
            saveat=saveat,
            stepsize_controller=controller,
            adjoint=diffrax.RecursiveCheckpointAdjoint(),
            max_steps=MOST_STEPS,
            throw=False,
        )
        good = sol.result == diffrax.RESULTS.successful
        return Solved(sol.ys, sol.stats["num_steps"], good)

    solve = jax.vmap(one)
    return in_jax(jax.jit(gradient_of(solve) if method.gradient else solve))


#
# gradsolve
#


def _gradsolve(case: Case) -> tuple[Any, np.ndarray]:
    """Its problem, and the initial states, of which it wants one each."""
    method = case.method
    if not method.adaptive or method.saves or method.gradient:
        raise Skip("its fused kernels are adaptive, and give endpoints only")
    problem, u0, _ = gradsolve_problem(lorenz_task(case.n, case.dtype, 1.0))
    return problem, u0


def _gradsolve_publicly(case: Case, engine: str) -> Callable[[np.ndarray], np.ndarray]:
    problem, u0 = _gradsolve(case)
    options = {"rtol": case.method.rtol, "atol": case.method.atol, "engine": engine}
    options["device"] = "cuda" if on_gpu() else "cpu"
    solve = imported("gradsolve").solve
    return lambda rhos: solve(problem, u0, rhos[:, None], **options).y_final


def gradsolve_warp(case: Case) -> Contender:
    """Below its public call, which goes by way of the host."""
    _, u0 = _gradsolve(case)
    if not has_warp():
        raise Skip("warp-lang is not installed")
    engine, method = imported("gradsolve.warp.warp_ode"), case.method
    conf = np.array([0.0, 1.0, method.rtol, method.atol, method.dt], case.dtype)
    public = _gradsolve_publicly(case, "warp_ode")
    if not on_gpu():
        names = ("t0", "t1", "rtol", "atol", "dt0")
        options = dict(zip(names, map(float, conf), strict=True))
        options |= {"max_steps": MOST_STEPS, "record": 0, "precision": case.dtype}

        def on_host(rhos: np.ndarray) -> Solved:
            states, accepted, rejected, status, _ = engine._launch(u0, rhos, **options)
            return Solved(states, accepted + rejected, status == 0)

        same = jax.block_until_ready
        return Contender(on_host, lambda rhos: rhos, same, lambda x: x.states, public)
    runner = engine._ffi_runner(case.n, MOST_STEPS, 0, case.dtype)

    def solve(rhos: Any, u0: Any, conf: Any) -> Solved:
        states, accepted, rejected, status, _ = runner(u0, rhos, conf)
        return Solved(states, accepted + rejected, status == 0)

    return in_jax(jax.jit(solve), public, (u0, conf))


def gradsolve_cuda(case: Case) -> Contender:
    _, u0 = _gradsolve(case)
    if not imported("gradsolve.cuda.cuda_tsit5")._CUDA_AVAILABLE:
        raise Skip("nvcc is not on the PATH")
    bridge = imported("gradsolve.cuda._ffi_bridge")

    def solve(rhos: Any, u0: Any) -> Solved:
        with contextlib.redirect_stdout(sys.stderr):  # nvcc's report of registers
            runner = bridge.make_runner("lorenz", 3, case.dtype, "cuda" if on_gpu() else "cpu")
        states, _ = runner(u0, rhos, 1.0, case.method.rtol, case.method.atol, MOST_STEPS)
        return Solved(states.T)  # (it counts only the steps that it accepts)

    public = _gradsolve_publicly(case, "cuda_tsit5")
    return in_jax(jax.jit(solve), public, (np.ascontiguousarray(u0.T),))


#
# torchdiffeq
#


def by_torch(case: Case) -> Contender:
    torch, method = imported("torch"), case.method
    odeint = imported("torchdiffeq").odeint
    if method.gradient:
        raise Skip("forwards only")
    if on_gpu() and not torch.cuda.is_available():
        raise Skip("its torch finds no GPU")
    device = torch.device("cuda" if on_gpu() else "cpu")
    real = getattr(torch, case.dtype)
    u0 = torch.tensor(case.u0, dtype=real, device=device)
    times = torch.tensor(TIMES if method.saves else [0.0, 1.0], dtype=real, device=device)
    options: dict[str, Any] = {"method": "rk4", "options": {"step_size": method.dt}}
    if method.adaptive:
        options = {"rtol": method.rtol, "atol": method.atol, "method": "dopri5"}
        options["options"] = {"first_step": method.dt, "max_num_steps": MOST_STEPS}

    def solve(rhos: Any, u0: Any) -> Any:
        def field(t: Any, u: Any) -> Any:
            x, y, z = u.unbind(-1)
            return torch.stack([10.0 * (y - x), x * (rhos - z) - y, x * y - 8.0 / 3.0 * z], -1)

        states = odeint(field, u0, times, **options)
        return states if method.saves else states[-1]

    def together(rhos: Any) -> Solved:
        states = solve(rhos, u0.expand(len(rhos), 3))
        return Solved(states.movedim(1, 0) if method.saves else states)

    def mapped(rhos: Any) -> Solved:
        return Solved(torch.func.vmap(solve, in_dims=(0, None))(rhos, u0))

    def wait(x: Any) -> Any:
        if on_gpu():
            torch.cuda.synchronize()
        return x

    def put(rhos: np.ndarray) -> Any:
        return wait(torch.from_numpy(rhos).to(device))

    note, run = "Dopri5; one step size for all", together
    if not method.adaptive:
        note, run = "RK4; vmap", mapped
        if refusal := _refusal(lambda: mapped(put(case.rhos[:2]))):
            note, run = f"RK4; states [N, 3], as vmap refuses it: {refusal}", together
    # (Nothing records a graph: no input asks for a gradient.)
    return Contender(run, put, wait, lambda solved: solved.states.cpu().numpy(), note=note)


def _refusal(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return _first_line(error)
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"


WAYS: dict[str, Callable[[Case], Contender]] = {
    KERNEL: ours(eo.EnsembleGPUKernel()),
    LANES: ours(eo.EnsembleGPUArray()),
    DIFFRAX: by_diffrax,
    WARP: gradsolve_warp,
    CUDA: gradsolve_cuda,
    TORCH: by_torch,
}


#
# How much a solve computes, and how much a GPU could
#


class Peak(NamedTuple):
    """Operations a second outside of tensor cores, by precision, and bytes of memory a second."""

    float32: float
    float64: float
    memory: float


# By what the name of a GPU contains; the first that fits. From NVIDIA's data sheets: "H200 Tensor
# Core GPU" (2024), "H100 Tensor Core GPU" (2024), "A100 Tensor Core GPU" (2022), "V100" (2020).
PEAKS = {
    "H200 NVL": Peak(60e12, 30e12, 4.8e12),
    "H200": Peak(67e12, 34e12, 4.8e12),
    "H100 PCIe": Peak(51e12, 26e12, 2.0e12),
    "H100 NVL": Peak(60e12, 30e12, 3.9e12),
    "H100 80GB HBM3": Peak(67e12, 34e12, 3.35e12),
    "A100-SXM4-80GB": Peak(19.5e12, 9.7e12, 2.039e12),
    "A100 80GB PCIe": Peak(19.5e12, 9.7e12, 1.935e12),
    "A100": Peak(19.5e12, 9.7e12, 1.555e12),
    "V100-PCIE": Peak(14e12, 7e12, 0.9e12),
    "V100": Peak(15.7e12, 7.8e12, 0.9e12),
}
# Those of step-size control: a logarithm (7) and two powers of two (17 each), what is
# between them (6), and a step's time and size (6).
CONTROL = 7 + 2 * 17 + 6 + 6
COUNTED = {"add": 1, "sub": 1, "mul": 1, "div": 1, "neg": 1}


def peak_of(name: str) -> Peak | None:
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def flops_of_field() -> int:
    """Additions, multiplications and divisions in the field's jaxpr; one that moves or compares
    numbers counts for nothing."""
    jaxpr = jax.make_jaxpr(lorenz)(jnp.ones(3), jnp.ones(()), 0.0)
    return sum(
        COUNTED.get(eqn.primitive.name, 0) * math.prod(eqn.outvars[0].aval.shape)
        for eqn in jaxpr.jaxpr.eqns
    )


def flops_of_step(mode: Mode) -> int:
    """Operations of a step that is tried, where an FMA is two, as in the peak.

    Of each stage after the first (which is the last of the step before): the sum of its `m` terms
    and the state, `y + h (a1 k1 + ... + am km)`: `2 m + 1` for each component; and the field. If
    adaptive: the error estimate, `2 m` for each; its norm, 5 for each (scale, divide, square, add)
    and 2; and the controller. Those in single precision count like others in a float64 solve.
    """
    tableau = eo.Tsit5().tableau
    flops = sum(3 * (2 * _terms(row) + 1) + flops_of_field() for row in tableau.a)
    if not mode.adaptive:
        return flops + 3  # time
    return flops + 3 * 2 * _terms(tableau.error or ()) + 3 * 5 + 2 + CONTROL


def flops_of_saved() -> int:
    """Of a saved time: a polynomial for the weight of each stage, and their sum."""
    interpolant = eo.Tsit5().tableau.interpolant
    weights = [row for row in interpolant.weights if any(row)]
    return len(weights) * (2 * interpolant.degree - 1) + 3 * (2 * len(weights) + 1)


def _terms(row: Iterable[float]) -> int:
    return sum(bool(w) for w in row)


def bytes_moved(case: Case) -> int:
    """What the kernel has to read and write: the parameter, whether it is wanted, the states that
    are saved, and the return code and counts (32 bits each)."""
    size, rows = np.dtype(case.dtype).itemsize, len(TIMES) if case.method.saves else 1
    counts = 4 if case.method.saves else 3
    return case.n * (size + 1 + 3 * size * rows + 4 * counts)


def fractions(case: Case, steps: float, seconds: float, peak: Peak) -> dict[str, float]:
    """Of the peaks."""
    flops = case.n * steps * flops_of_step(case.method)
    flops += case.n * len(TIMES) * flops_of_saved() if case.method.saves else 0
    return {
        "flops_fraction": flops / seconds / getattr(peak, case.dtype),
        "memory_fraction": bytes_moved(case) / seconds / peak.memory,
    }


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
        contender, rhos = WAYS[name](case), case.rhos
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
        off = np.abs(states[case.sample].astype(float) - exact.of(case.method))
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
    every = {(case.dtype, case.n): case for case in cases}
    samples = [case.rhos[case.sample].astype(float) for case in every.values()]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        rhos = jnp.asarray(np.concatenate(samples))
        u0 = jnp.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        prob = eo.ODEProblem(with_sensitivity, u0, (0.0, 1.0), 0.0)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=rhos[ctx.index]))
        options = {"saveat": TIMES, "abstol": 1e-13, "reltol": 1e-13, "throw": True}
        where = eo.EnsembleThreads(1)
        sim = eo.solve(ens, eo.Vern9(), where, trajectories=len(rhos), **options)
        found = np.asarray(sim.u)
    parts = np.split(found, np.cumsum([len(x) for x in samples])[:-1])
    ends = [2.0 * np.sum(x[:, -1, :3] * x[:, -1, 3:], axis=1) for x in parts]
    exact = (Exact(x[:, :, :3], end) for x, end in zip(parts, ends, strict=True))
    return dict(zip(every, exact, strict=True))


#
# Which cases, in which order
#


class Sizes(NamedTuple):
    """Exponents of two: of the promises, of the gradients, and of all."""

    main: int
    small: int
    large: int
    gradients: Sequence[int]
    every: Sequence[int]

    @property
    def promised(self) -> tuple[int, int, int]:
        return self.main, self.small, self.large


ON_GPU = Sizes(20, 13, 21, (16, 20), (10, 13, 15, 17, 20, 21, 23))
ON_CPU = Sizes(9, 6, 10, (5, 7), (4, 6, 9, 10))


def schedule(sizes: Sizes) -> list[tuple[str, Case]]:
    """Contenders and cases, the most important first."""
    solves = tuple(name for name in MODES if name != GRADIENT)
    main, small, large = sizes.promised
    blocks = [
        ((KERNEL, LANES, DIFFRAX), (TARGET,), (FLOAT32,), sizes.promised),
        ((WARP, CUDA), (TARGET,), (FLOAT32,), sizes.promised),
        ((KERNEL,), solves, BOTH, (main,)),
        ((KERNEL, LANES, DIFFRAX), (GRADIENT,), (FLOAT32,), sizes.gradients),
        ((TORCH,), ("fixed", TARGET), (FLOAT32,), (small, main)),
        ((LANES, DIFFRAX), ("fixed",), (FLOAT32,), (small, main)),
        ((KERNEL, LANES, DIFFRAX, WARP, CUDA), (TARGET,), (FLOAT64,), (small, main, large)),
        ((KERNEL,), ("fixed", TARGET), BOTH, sizes.every),
        ((LANES, DIFFRAX), solves, (FLOAT32,), (main,)),
        ((KERNEL, LANES, DIFFRAX), (GRADIENT,), (FLOAT64,), sizes.gradients),
        ((KERNEL,), solves, BOTH, sizes.every),
        ((DIFFRAX, WARP, CUDA), solves, (FLOAT32,), sizes.every),
        (tuple(WAYS), solves, BOTH, sizes.every),
    ]
    order: dict[tuple[str, Case], None] = {}
    for names, modes, dtypes, exponents in blocks:
        # (All contenders of a case one after the other: as alike as can be.)
        for mode, dtype, exponent, name in itertools.product(modes, dtypes, exponents, names):
            order[name, Case(mode, dtype, 2**exponent)] = None
    return list(order)


# Seconds that a contender's first case of a mode is expected to take.
UNKNOWN = {KERNEL: 8.0, LANES: 10.0, DIFFRAX: 15.0, WARP: 30.0, CUDA: 30.0, TORCH: 20.0}


def predicted(rows: Sequence[dict], name: str, case: Case) -> float:
    """Seconds that the case will take: from the largest one yet of the same mode that is not
    larger, the other precision's where there is none."""
    known = [row for row in rows if _is_of(row, name, case.mode) and row["n"] <= case.n]
    if not known:
        return UNKNOWN[name]
    row = max(known, key=lambda row: (row["dtype"] == case.dtype, row["n"]))
    once = sum(row[column] for column in COLUMNS)
    doubled = (row["dtype"], case.dtype) == BOTH
    growth = case.n / row["n"] * (2.0 if doubled else 1.0)
    return row["seconds"] + max(0.0, growth - 1.0) * 5 * once


def _is_of(row: dict, name: str, mode: str) -> bool:
    return "kernel" in row and (row["contender"], row["mode"]) == (name, mode)


#
# Running
#


class Report:
    """The rows so far, as printed and as written; two threads may add to it."""

    def __init__(self, path: pathlib.Path, about: dict, sizes: Sizes):
        self.path, self.about, self.sizes = path, about, sizes
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
            print(f"\n{how} after {time.monotonic() - STARTED:.0f} s; {self.path}", flush=True)

    def write(self) -> None:
        """Whole or not at all: a run that is cut off leaves the file of the row before."""
        everything = {
            **self.about,
            "ended": self.ended,
            "seconds": round(time.monotonic() - STARTED, 1),
            "sizes": self.sizes._asdict(),
            "promises": [promise._asdict() for promise in promises(self.rows, self.sizes)],
            "rows": self.rows,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(everything, indent=1, default=str))
        part.replace(self.path)


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
        return {"error_message": _first_line(error), "seconds": time.monotonic() - began}
    finally:
        _free_torch()
    return found | {"seconds": time.monotonic() - began}


def _references(report: Report, todo: Sequence[tuple[str, Case]]) -> dict:
    try:
        return references(case for _, case in todo)
    except Exception as error:
        traceback.print_exc(limit=-3)
        report.about["notes"].append(f"no errors are known: {_first_line(error)}")
        return {}


def _free_torch() -> None:
    """Give back the memory that torch keeps."""
    if (torch := sys.modules.get("torch")) and on_gpu():
        torch.cuda.empty_cache()


def _lost() -> str | None:
    """Why nothing can run any more: a kernel that went wrong takes the process's GPU with it."""
    reason = _refusal(lambda: jax.block_until_ready(jnp.arange(8) + 1))
    return reason and f"the GPU was lost ({reason})"


#
# Printing
#


HEAD = ["contender", "mode", "", "n", "compile s", "to GPU", "kernel", "from GPU", "end to end"]
FRACTIONS = ("flops_fraction", "memory_fraction")
HEAD += ["steps", "failed", "error", "FLOP/s", "memory"]


def header() -> str:
    return f"| {' | '.join(HEAD)} |\n|{':---|' * 3}{'---:|' * (len(HEAD) - 3)}"


def line(row: dict) -> str:
    cells = [row["contender"], row["mode"], row["dtype"].replace("float", "f"), size(row["n"])]
    if "error_message" in row:
        return f"| {' | '.join(cells)} | FAILED: {row['error_message']} |"

    def number(key: str, form: str, scale: float = 1.0) -> str:
        return format(scale * row[key], form) if row.get(key) is not None else ""

    cells.append(number("compile", ".2f"))
    cells += [number(key, ".4g", 1e3) for key in COLUMNS]
    cells += [number("steps", ".1f"), number("failed", "d", 1), number("error", ".1e")]
    cells += [number(key, ".3g", 100) + " %" * (key in row) for key in FRACTIONS]
    return f"| {' | '.join(cells)} |"


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
        every = (row for row in rows if _is_of(row, name, TARGET))
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
        return about | {"nvidia-smi": _first_line(error)}
    first = done.stdout.splitlines()[0].split(", ")
    return about | dict(zip(fields.split(","), first, strict=False))


def described(options: argparse.Namespace) -> dict[str, Any]:
    about = machine()
    for name in ("torch", "torchdiffeq", "jaxlib", "jax-cuda13-plugin", "llvmlite"):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            about["versions"][name] = importlib_metadata.version(name)
    notes = ["transfers are of pageable arrays", "times in seconds: the best, and the median"]
    device = gpu()
    if peak_of(device["name"]) is None:
        notes.append("the peaks of this device are not in the table: no fractions of them")
    if not on_gpu():
        notes.append("no GPU: the kernel's rows are the lanes engine on the CPU")
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


def show(path: pathlib.Path) -> None:
    """The table of a file, in order."""
    found = json.loads(path.read_text())
    print(found["gpu"]["name"], found["date"], found["ended"], sep=", ")
    modes = list(MODES)
    rows = [row for row in found["rows"] if "skipped" not in row]
    rows.sort(key=lambda r: (modes.index(r["mode"]), r["dtype"], r["n"], r["contender"]))
    print(header(), *map(line, rows), *summary(found["rows"], Sizes(**found["sizes"])), sep="\n")


def warm_up() -> None:
    """A small solve of ours and of diffrax: none is to pay for what comes once a process."""
    case = Case("1e-5", FLOAT32, 4)
    for name in (KERNEL, LANES, DIFFRAX):
        # (What fails here does so again in a row, which says so.)
        _refusal(lambda name=name: WAYS[name](case).end_to_end(case.rhos))


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
    report = Report(options.out / f"gpu_ensembles-{stamp}.json", about, sizes)
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
    named = ", ".join(f"{name} {version}" for name, version in about["machine"]["versions"].items())
    print(f"{about['gpu']}; {about['machine']['cpu']}; {named}\n\n{header()}", flush=True)
    warm_up()
    run_all(report, todo, end - 8.0, limits)
    timer.cancel()
    report.end("ended")


if __name__ == "__main__":
    main()
