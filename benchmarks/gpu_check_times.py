"""The times of gpu_check.py: jitted solves of arrays on the device, with results that stay there.
They are by EnsembleGPUKernel(), EnsembleGPUArray() and a vmapped diffrax, beside the peaks of the
GPU."""

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import by_diffrax, by_solve, imported, Skip
from common.ivp_test_set import constants_of, PROBLEMS
from common.tasks import lorenz_task, tanh_network, Task
from gpu_check_values import ARRAYS, is_lost as is_lost, KERNEL, way_of, weights_of
from gpu_peaks import explicit_step, fractions_of, peak_of, rosenbrock_step

import ensembleode as eo
from ensembleode.engines.compiled.xla import ptxas


DIFFRAX = "diffrax"
CONTENDERS = (KERNEL, ARRAYS, DIFFRAX)
MOST_STEPS = 4096
GOAL = 1e-3  # seconds, of Lorenz by kernels


def row_of(call: Callable, inputs: Sequence[Any], seconds: float = 1.0) -> dict[str, Any]:
    """The seconds of a call: the best and the median of several, each of which is as many calls in
    a row as take two milliseconds, so that launches overlap; of one that is waited for; and what
    the first call took longer than a later one."""
    first = _seconds(call, inputs, 1)
    waited = min(_seconds(call, inputs, 1) for _ in range(1 if first > seconds else 3))
    calls = max(1, min(100, math.ceil(2e-3 / waited)))
    spent: list[float] = []
    while not spent or (len(spent) < 20 and sum(spent) * calls < seconds):
        spent.append(_seconds(call, inputs, calls) / calls)
    row = {"result": "passed", "best": min(spent), "median": statistics.median(spent)}
    return row | {"compile": max(0.0, first - waited), "waited": waited, "turns": len(spent)}


def _seconds(call: Callable, inputs: Sequence[Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        found = call(*inputs)
    jax.block_until_ready(found)
    return time.perf_counter() - began


class Timed(NamedTuple):
    """An ensemble, how it is solved, by which solver of diffrax, and what a tried step computes."""

    task: Task
    alg: Any
    solver: str
    flops: int
    gradient: bool = False
    goal: float | None = None

    def call(self, name: str) -> Callable:
        """The states and the steps of each trajectory; or, with a gradient, that by everything."""
        solve = self._solve(name)
        if not self.gradient:
            return jax.jit(solve)

        def loss(u0: Any, p: Any) -> tuple[Any, Any]:
            states, steps = solve(u0, p)
            return jnp.sum(states**2), steps

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    def _solve(self, name: str) -> Callable:
        if name == DIFFRAX:
            solver = getattr(imported("diffrax"), self.solver)()
            return by_diffrax(self.task, solver, MOST_STEPS)
        if name == ARRAYS and isinstance(self.alg, eo.Rodas5P):
            raise Skip("the engine that arrays have on a GPU has no Rosenbrock methods")
        way = dict(way_of(name).options)
        where = way.pop("ensemblealg")
        return by_solve(self.task, where, self.alg, maxiters=MOST_STEPS, **way)


def timed(case: Callable[[bool], Timed], name: str, small: bool) -> dict[str, Any]:
    """A row: the times, and the fractions of the peaks that they are."""
    timed_case = case(small)
    task = timed_case.task
    with jax.enable_x64(task.dtype == np.float64):
        inputs = jax.block_until_ready(task.inputs())
        call = timed_case.call(name)
        row = row_of(call, inputs)
        results = call(*inputs)
        steps = float(jnp.mean(results[1]))
        good = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(results[0]))
    row |= {"steps": steps, "trajectories": task.n, "dtype": task.dtype.name}
    peak = peak_of(jax.devices()[0].device_kind)
    if peak is not None:
        moved = sum(x.nbytes for x in jax.tree.leaves((inputs, results)))
        flops = task.n * steps * timed_case.flops * (3 if timed_case.gradient else 1)
        row |= fractions_of(flops, moved, row["best"], task.dtype.name, peak)
    if timed_case.goal is not None and name == KERNEL and not small:
        verdict = "met" if row["best"] <= timed_case.goal else "MISSED"
        row["note"] = f"the goal of {1e3 * timed_case.goal:g} ms is {verdict}"
    if not good:
        row |= {"result": "failed", "note": "some numbers are not finite"}
    return row


def lorenz(small: bool, *, gradient: bool = False) -> Timed:
    """That of gpu_ensembles.py at 1e-6."""
    n = 2**7 if small else 2**20
    task = lorenz_task(n, np.float32, 1.0, dt=0.01, rtol=1e-6, atol=1e-9)
    flops = explicit_step(eo.Tsit5().tableau, task.f, task.u0, task.p[0])
    return Timed(task, eo.Tsit5(), "Tsit5", flops, gradient, None if gradient else GOAL)


def robertson(small: bool) -> Timed:
    """To 1e5, with rates that differ by a tenth."""
    problem, n = PROBLEMS["ROBER"], 32 if small else 10**5
    constants, u0 = constants_of(problem, n - 1), np.array(problem.u0, float)
    task = Task(problem.f, u0, constants, ("p",), n, 1e5, rtol=1e-6, atol=1e-9)
    flops = rosenbrock_step(eo.Rodas5P().method, task.f, u0, constants[0])
    return Timed(task, eo.Rodas5P(), "Kvaerno5", flops)


def network(small: bool, *, gradient: bool = False) -> Timed:
    """2-64-64-2, whose weights all trajectories share."""
    n = 16 if small else 4096
    starts = np.random.default_rng(1).normal(size=(n, 2)).astype(np.float32)
    weights = jax.tree.map(np.asarray, weights_of(64, "float32"))
    task = Task(tanh_network, starts, weights, ("u0",), n, 1.0, rtol=1e-5, atol=1e-5)
    flops = explicit_step(eo.Tsit5().tableau, task.f, starts[0], weights)
    return Timed(task, eo.Tsit5(), "Tsit5", flops, gradient)


#
# What kernels take
#


def registers(case: Callable[[bool], Timed], small: bool) -> dict[str, Any]:
    if not ptxas.available():
        raise Skip("ptxas is not installed")
    timed_case = case(small)
    task = timed_case.task
    with jax.enable_x64(task.dtype == np.float64), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is spilled: that is in the row
        u0, p = task.inputs()
        every = {"u0": u0, "p": p}
        first = every | {name: every[name][0] for name in task.own}
        prob = eo.ODEProblem(task.f, first["u0"], (0.0, task.t1), first["p"])

        def change(prob: Any, ctx: Any) -> Any:
            return eo.remake(prob, **{name: every[name][ctx.index] for name in task.own})

        # (Of a network, without the kernel that goes back: see `widest`.)
        alone = {"sensealg": eo.ForwardDiffSensitivity()} if task.f is tanh_network else {}
        report = eo.kernel_report(eo.EnsembleProblem(prob, change), timed_case.alg, **alone)
    text = "; ".join(
        f"{name}: {x.registers} registers, {x.stack:,} B of stack, {x.spill_stores:,} B spilled"
        for name, x in report.kernels.items()
    )
    return {"result": "passed", "note": f"{report.arch}: {text}"}


def checks(part: str, *, small: bool, references: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """The checks of a part by name."""
    if part == "registers":
        every = {"Lorenz": lorenz, "Robertson": robertson, "2-64-64-2": network}
        return {f"{x} by kernel": functools.partial(registers, f, small) for x, f in every.items()}
    return {
        f"{name} by {by}": functools.partial(timed, case, by, small)
        for (name, by), case in PARTS[part].items()
    }


SOLVE, GRADIENT = "2-64-64-2, float32", "2-64-64-2, its gradient, float32"
PARTS: dict[str, dict[tuple[str, str], Callable[[bool], Timed]]] = {
    "lorenz": {
        **{("Lorenz, float32", by): lorenz for by in CONTENDERS},
        ("Lorenz, its gradient, float32", KERNEL): functools.partial(lorenz, gradient=True),
    },
    "network": {
        **{(SOLVE, by): network for by in CONTENDERS},
        # (The kernel's last: it is large, and compiling it may take longer than there is.)
        **{
            (GRADIENT, by): functools.partial(network, gradient=True)
            for by in (ARRAYS, DIFFRAX, KERNEL)
        },
    },
    "robertson": {("Robertson, float64", by): robertson for by in CONTENDERS},
}
