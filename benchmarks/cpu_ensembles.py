"""`solve` on the CPU beside its peers: time, compile time and error, on the same ensembles.

    python benchmarks/cpu_ensembles.py [--quick] [--only a,b,...] [--sizes 4096,100000]
        [--repeats R] [--seconds S] [--core C] [--json FILE] [--work-precision PLOT.png]

- a: Lorenz, rho from 0 to 21 by trajectory, fixed steps of 1e-3 on [0, 1], endpoints.
- b: the same, adaptive on [0, 10], at 1e-6 (in float64 at 1e-9, too).
- c: a neural ODE 2 -> 50 -> 2 (tanh), weights shared, fixed steps of 0.01 on [0, 1], float32.
- d: value and gradient, by its weights, of a loss over 31 times on [0, 3] of such a neural ODE
  (1024 trajectories, weights four times as large, rtol 1e-3, atol 1e-6, float32).
- e: value and gradient, by each trajectory's rho, of a loss over 31 times on [0, 2] of Lorenz
  (1024 trajectories, 1e-6).
- f: `EnsembleThreads` on all cores against one, 10,000 trajectories of b.

The contenders: `diffrax`, a hand-written `jax.jit(jax.vmap(diffrax.diffeqsolve))`, which the ratios
are to; `solve` inside `jax.jit` and called eagerly with new functions each time, on
`EnsembleThreads(1)`; and where installed (the extra `bench`) gradsolve, heyoka.py, SciPy and a
loop written by hand in Numba, near what the hardware can do.

Each table is a process of its own, held to one core (but for f) before JAX starts. All contenders
of a table are in that process and take turns, so that a slow moment of the machine hits all of
them; the time is the best. `first call` is how much longer the first call took than the best
(the lesser of two): tracing and compiling, with JAX's caches cleared before. `ns/step` is per
trajectory and step tried, each contender's own steps. `512-bit` is the same program with XLA's
option `xla_cpu_prefer_vector_width=512`, which `solve` sets itself when called eagerly.

The errors are absolute, those of 64 trajectories against Vern9 at 1e-13 in float64 from the same
numbers (which heyoka at 1e-16 confirms: 7e-15 in the median, 2e-13 at most), so that nobody is fast
at another accuracy unseen. For a gradient they are relative errors, of the loss and of the whole
gradient's norm, against diffrax's Dopri8 at 1e-13. After each table comes what the project
promises.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo


DIFFRAX, JITTED, EAGER = "diffrax (by hand)", "ensembleode, in jit", "ensembleode, eager"
# An option of XLA's that `solve` sets when called eagerly. Inside `jit` it is the caller's to set.
WIDE, WIDER = "512-bit", {"xla_cpu_prefer_vector_width": 512}
SAMPLE = 64  # trajectories whose errors are measured
# Nanoseconds per trajectory and step of Julia's EnsembleSerial with StaticArrays (float64), and of
# vmapped diffrax on the same machine; keys are tolerances, None for fixed steps.
JULIA = {None: (45.0, 176.0), 1e-6: (121.0, 427.0), 1e-9: (112.0, 427.0)}


class Skip(Exception):
    """Why a contender does not take part."""


#
# The ensembles
#


@dataclasses.dataclass(frozen=True)
class Task:
    """An ensemble of `f(u, p, t)` from 0 to `t1`, whose trajectories differ in `own`.

    With `dt` its steps are fixed, otherwise `rtol` and `atol` choose them. Without `times` the end
    is saved.
    """

    f: Callable
    u0: Any
    p: Any
    own: str  # "u0" or "p", with the trajectories first
    n: int
    t1: float
    dt: float | None = None
    rtol: Any = None
    atol: Any = None
    times: Any = None

    @property
    def dtype(self):
        return np.dtype(self.u0.dtype)

    @property
    def sample(self):
        """Trajectories whose errors are measured."""
        return np.unique(np.linspace(0, self.n - 1, SAMPLE).astype(int))

    def only(self, rows):
        """The same with only these trajectories, and in float64."""
        u0, p = jax.tree.map(lambda x: np.asarray(x, np.float64), (self.u0, self.p))
        u0, p = (u0[rows], p) if self.own == "u0" else (u0, p[rows])
        return dataclasses.replace(self, u0=u0, p=p, n=len(rows))


def lorenz(u, p, t):
    x, y, z = u
    return jnp.stack([10.0 * (y - x), x * (p - z) - y, x * y - 8.0 / 3.0 * z])


def lorenz_task(n, dtype, t1, *, tol=None, **options):
    u0, rhos = np.array([1.0, 0.0, 0.0], dtype), np.linspace(0.0, 21.0, n, dtype=dtype)
    return Task(lorenz, jnp.array(u0), jnp.array(rhos), "p", n, t1, rtol=tol, atol=tol, **options)


def network_task(n, dtype, t1, *, scale=1.0, **options):
    key = jax.random.key(0)
    network = eqx.nn.MLP(2, 2, 50, 1, activation=jnp.tanh, key=key, dtype=dtype)
    weights, rest = eqx.partition(network, eqx.is_array)
    weights = jax.tree.map(lambda x: scale * x, weights)
    u0 = jax.random.normal(key, (n, 2), dtype)
    return Task(lambda u, p, t: eqx.combine(p, rest)(u), u0, weights, "u0", n, t1, **options)


#
# diffrax, and ensembleode: functions `(u0, p) -> states, steps`
#


def by_diffrax(task, solver=None, max_steps=100_000):
    terms = diffrax.ODETerm(lambda t, u, p: task.f(u, p, t))
    saveat = diffrax.SaveAt(t1=True) if task.times is None else diffrax.SaveAt(ts=task.times)
    controller = diffrax.ConstantStepSize()
    if task.dt is None:
        controller = diffrax.PIDController(rtol=task.rtol, atol=task.atol)

    def one(u0, p):
        sol = diffrax.diffeqsolve(
            terms,
            solver or diffrax.Tsit5(),
            0.0,
            task.t1,
            task.dt,
            u0,
            p,
            saveat=saveat,
            stepsize_controller=controller,
            max_steps=max_steps,
            throw=False,
        )
        return sol.ys, sol.stats["num_steps"]

    return jax.vmap(one, in_axes=(0, None) if task.own == "u0" else (None, 0))


def by_solve(task, where=None, alg=None, **options):
    """Makes new functions whenever it is called, as a user's own function would."""
    options |= {"adaptive": False, "dt": task.dt} if task.dt else {}
    options |= {} if task.dt else {"abstol": task.atol, "reltol": task.rtol}
    options |= {"save_start": False} if task.times is None else {"saveat": task.times}

    def solve(u0, p):
        own = u0 if task.own == "u0" else p
        first = {"u0": u0, "p": p} | {task.own: own[0]}
        prob = eo.ODEProblem(task.f, first["u0"], (0.0, task.t1), first["p"])
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, **{task.own: own[ctx.index]})
        )
        chosen = where or eo.EnsembleThreads(1)
        sim = eo.solve(ens, alg or eo.Tsit5(), chosen, trajectories=task.n, **options)
        return sim.u, sim.stats.naccept + sim.stats.nreject

    return solve


def loss_of(solve):
    """Of `p`, and then of `u0`."""

    def loss(p, u0):
        states, _ = solve(u0, p)
        return jnp.mean((states - 1.0) ** 2)

    return loss


def value_and_grad(solve, **jit_options):
    return jax.jit(jax.value_and_grad(loss_of(solve)), **jit_options)


#
# The contenders
#


class Contender(NamedTuple):
    """`call()` gives `(states, steps)`, or `(loss, gradient)`."""

    name: str
    call: Callable
    # The trajectories it solves, all by default; its time is extrapolated from theirs.
    rows: Any = None


def imported(name):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradsolve's, of float64 in a float32 process
            return importlib.import_module(name)
    except ImportError as error:
        raise Skip("not installed") from error


def diffrax_by_hand(task, name=DIFFRAX, **jit_options):
    solve = jax.jit(by_diffrax(task), **jit_options)
    return Contender(name, lambda: solve(task.u0, task.p))


def ours_in_jit(task, where=None, name=JITTED, **jit_options):
    solve = jax.jit(by_solve(task, where), **jit_options)
    return Contender(name, lambda: solve(task.u0, task.p))


def ours_eager(task, where=None, name=EAGER):
    return Contender(name, lambda: by_solve(task, where)(task.u0, task.p))


def diffrax_gradient(task, max_steps):
    grad = value_and_grad(by_diffrax(task, max_steps=max_steps))
    return Contender(f"{DIFFRAX}, max_steps={max_steps}", lambda: grad(task.p, task.u0))


def ours_gradient(task, name=JITTED, maxiters=None, **jit_options):
    bound = {} if maxiters is None else {"maxiters": maxiters}
    grad = value_and_grad(by_solve(task, **bound), **jit_options)
    name = name if maxiters is None else f"{name}, maxiters={maxiters}"
    return Contender(name, lambda: grad(task.p, task.u0))


def lorenz_only(task):
    if task.f is not lorenz:
        raise Skip("written for Lorenz only")


def gradsolve_problem(task):
    """Its own name for this Lorenz field, so that its fused kernel runs it where Warp is there."""
    lorenz_only(task)
    imported("gradsolve")

    class Lorenz:
        name, dim, t0, t1, is_stiff = "diffeqgpu_lorenz", 3, 0.0, task.t1, False

        @staticmethod
        def f_jax(t, u, p):
            return lorenz(u, p[0], t)

    u0 = np.tile(np.asarray(task.u0), (task.n, 1))
    return Lorenz(), u0, np.asarray(task.p)[:, None]


def has_warp():
    try:
        imported("warp").config.quiet = True
    except Skip:
        return False
    return True


def gradsolve_fixed(task):
    problem, u0, p = gradsolve_problem(task)
    engine = imported("gradsolve.solvers.fixed_step_tsit5")
    steps = round(task.t1 / task.dt)
    solve = jax.jit(lambda u0, p: engine.solve_jax(problem, u0, p, n_steps=steps))
    u0, p = jnp.array(u0), jnp.array(p)
    return Contender("gradsolve (lax.scan)", lambda: (solve(u0, p), np.full(task.n, steps)))


def gradsolve_record(task):
    """Its adaptive solve: the states, the steps and their sizes."""
    problem, u0, p = gradsolve_problem(task)
    options = {"rtol": task.rtol, "atol": task.atol}
    if has_warp():
        engine = imported("gradsolve.warp.warp_replay")
        options |= {"precision": task.dtype.name, "device": "cpu"}
        return "Warp", lambda: engine.record(problem, u0, p, **options)
    if task.dtype != np.float64:
        raise Skip("without warp-lang its adaptive solver is float64 only")
    engine = imported("gradsolve.solvers.tsit5_replay")

    def record():
        states, sizes, steps = engine.record_tsit5_jax(
            problem.f_jax, u0, p, 0.0, task.t1, **options
        )
        return states, steps, sizes

    return "vmap", record


def gradsolve_adaptive(task):
    kind, record = gradsolve_record(task)
    if kind != "Warp":
        return Contender(f"gradsolve ({kind})", lambda: record()[:2])
    problem, u0, p = gradsolve_problem(task)
    options = {"engine": "warp_ode", "rtol": task.rtol, "atol": task.atol, "device": "cpu"}

    def call():
        sol = imported("gradsolve").solve(problem, u0, p, **options)
        return sol.y_final, sol.accepted_steps + sol.rejected_steps

    return Contender("gradsolve (Warp)", call)


def gradsolve_gradient(task):
    """Records the steps, then differentiates the replay, compiled once and given the steps."""
    kind, record = gradsolve_record(task)
    problem, u0, _ = gradsolve_problem(task)
    replay = imported("gradsolve.warp.warp_replay").replay_solve_saveat_jax

    def loss(p, u0, sizes):
        _, states = replay(problem, u0, p[:, None], sizes, jnp.asarray(task.times))
        return jnp.mean((states - 1.0) ** 2)

    grad, u0 = jax.jit(jax.value_and_grad(loss)), jnp.array(u0)
    return Contender(f"gradsolve ({kind})", lambda: grad(task.p, u0, jnp.array(record()[2])))


def heyoka_solver(task, *, variational=False):
    """heyoka's batch integrator of Lorenz, and the parameters in batches."""
    lorenz_only(task)
    if task.dt is not None:
        raise Skip("has no fixed steps")
    heyoka, real = imported("heyoka"), task.dtype.type
    x, y, z = heyoka.make_vars("x", "y", "z")
    rho = heyoka.par[0]
    beta = real(8.0 / 3.0)
    field = [(x, real(10.0) * (y - x)), (y, x * (rho - z) - y), (z, x * y - beta * z)]
    if variational:
        field = heyoka.var_ode_sys(field, [rho], order=1)
    width = heyoka.recommended_simd_size(fp_type=real)
    start = np.zeros((6 if variational else 3, width), real)
    start[0] = 1.0
    options = {"tol": real(task.rtol), "pars": np.zeros((1, width), real), "fp_type": real}
    integrator = heyoka.taylor_adaptive_batch(field, start[:3], **options)
    rhos = np.pad(np.asarray(task.p), (0, -task.n % width), mode="edge").reshape(-1, width)

    def batches():
        for batch in rhos:
            integrator.set_time(real(0.0))
            integrator.state[:] = start
            integrator.pars[0] = batch
            yield integrator

    return batches


def steps_of(integrator):
    return [result[3] for result in integrator.propagate_res]


def heyoka_adaptive(task):
    batches, end = heyoka_solver(task), task.dtype.type(task.t1)

    def call():
        states, steps = [], []
        for integrator in batches():
            integrator.propagate_until(end)
            states.append(integrator.state.T.copy())
            steps += steps_of(integrator)
        return np.concatenate(states)[: task.n], np.array(steps[: task.n])

    return Contender("heyoka (Taylor)", call)


def heyoka_gradient(task):
    """By forward sensitivities: one parameter a trajectory."""
    batches = heyoka_solver(task, variational=True)

    def call():
        rows = []
        for integrator in batches():
            times = np.repeat(task.times[:, None], integrator.batch_size, axis=1)
            rows.append(np.moveaxis(integrator.propagate_grid(times)[1], -1, 0))
        states = np.concatenate(rows)[: task.n]  # [trajectory, time, state and sensitivity]
        off, sensitivity = states[..., :3] - 1.0, states[..., 3:]
        return np.mean(off**2), np.sum(2.0 * off * sensitivity, axis=(1, 2)) / off.size

    return Contender("heyoka (Taylor, variational)", call)


def scipy_adaptive(task, most=8):
    lorenz_only(task)
    if task.dt is not None:
        raise Skip("has no fixed steps")
    if task.dtype != np.float64:
        raise Skip("computes in float64")
    solve_ivp = imported("scipy.integrate").solve_ivp
    rows = task.sample[:: -(-len(task.sample) // most)]
    options = {"method": "RK45", "rtol": task.rtol, "atol": task.atol}

    def field(t, u, p):
        x, y, z = u
        return 10.0 * (y - x), x * (p - z) - y, x * y - 8.0 / 3.0 * z

    def call():
        u0, span = np.asarray(task.u0), (0.0, task.t1)
        sols = [solve_ivp(field, span, u0, args=(p,), **options) for p in np.asarray(task.p)[rows]]
        return np.stack([sol.y[:, -1] for sol in sols]), np.array([sol.nfev / 6 for sol in sols])

    return Contender(f"SciPy RK45 (from {len(rows)} trajectories)", call, rows)


def numba_fixed(task):
    lorenz_only(task)
    kernel = numba_kernel(imported("numba"), task.dtype.type, task.dt)
    steps = round(task.t1 / task.dt)
    u0, rhos = np.asarray(task.u0), np.asarray(task.p)
    return Contender("Numba, by hand", lambda: (kernel(u0, rhos, steps), np.full(task.n, steps)))


def numba_kernel(numba, real, dt, lanes=64):
    """Tsit5 on Lorenz, lanes innermost, which LLVM turns into vector instructions."""
    compiled = numba.njit(fastmath=True, error_model="numpy", forceinline=True)
    rows = eo.Tsit5().tableau.a  # The last is that of the result.
    coefficients = tuple(tuple(real(dt * x) for x in row) for row in rows)
    (a1,), (b1, b2), (c1, c2, c3), (d1, d2, d3, d4), (e1, e2, e3, e4, e5) = coefficients[:5]
    f1, f2, f3, f4, f5, f6 = coefficients[5]
    sigma, beta = real(10.0), real(8.0 / 3.0)

    @compiled
    def field(x, y, z, rho):
        return sigma * (y - x), x * (rho - z) - y, x * y - beta * z

    @compiled
    def second(u, k1):
        return u + a1 * k1

    @compiled
    def third(u, k1, k2):
        return u + b1 * k1 + b2 * k2

    @compiled
    def fourth(u, k1, k2, k3):
        return u + c1 * k1 + c2 * k2 + c3 * k3

    @compiled
    def fifth(u, k1, k2, k3, k4):
        return u + d1 * k1 + d2 * k2 + d3 * k3 + d4 * k4

    @compiled
    def sixth(u, k1, k2, k3, k4, k5):
        return u + e1 * k1 + e2 * k2 + e3 * k3 + e4 * k4 + e5 * k5

    @compiled
    def after(u, k1, k2, k3, k4, k5, k6):
        return u + f1 * k1 + f2 * k2 + f3 * k3 + f4 * k4 + f5 * k5 + f6 * k6

    @compiled
    def step(x, y, z, rho):
        p, q, r = field(x, y, z, rho)
        x2, y2, z2 = second(x, p), second(y, q), second(z, r)
        p2, q2, r2 = field(x2, y2, z2, rho)
        x3, y3, z3 = third(x, p, p2), third(y, q, q2), third(z, r, r2)
        p3, q3, r3 = field(x3, y3, z3, rho)
        x4, y4, z4 = fourth(x, p, p2, p3), fourth(y, q, q2, q3), fourth(z, r, r2, r3)
        p4, q4, r4 = field(x4, y4, z4, rho)
        x5, y5 = fifth(x, p, p2, p3, p4), fifth(y, q, q2, q3, q4)
        p5, q5, r5 = field(x5, y5, fifth(z, r, r2, r3, r4), rho)
        x6, y6 = sixth(x, p, p2, p3, p4, p5), sixth(y, q, q2, q3, q4, q5)
        p6, q6, r6 = field(x6, y6, sixth(z, r, r2, r3, r4, r5), rho)
        return (
            after(x, p, p2, p3, p4, p5, p6),
            after(y, q, q2, q3, q4, q5, q6),
            after(z, r, r2, r3, r4, r5, r6),
        )

    @compiled
    def kernel(u0, rhos, steps):
        n = len(rhos)
        out = np.empty((n, 3), rhos.dtype)
        x, y, z = (
            np.empty(lanes, rhos.dtype),
            np.empty(lanes, rhos.dtype),
            np.empty(lanes, rhos.dtype),
        )
        rho = np.zeros(lanes, rhos.dtype)
        for first in range(0, n, lanes):
            width = min(lanes, n - first)
            x[:], y[:], z[:] = u0[0], u0[1], u0[2]
            rho[:width] = rhos[first : first + width]
            for _ in range(steps):
                for i in range(lanes):
                    x[i], y[i], z[i] = step(x[i], y[i], z[i], rho[i])
            for i in range(width):
                out[first + i, 0], out[first + i, 1], out[first + i, 2] = x[i], y[i], z[i]
        return out

    return kernel


#
# The tables
#


class Spec(NamedTuple):
    """A table: everything that its process is told."""

    case: str
    dtype: str
    n: int
    tol: float | None = None

    @property
    def title(self):
        how = {
            "a": "Lorenz, 1000 fixed steps of 1e-3, endpoints",
            "b": f"Lorenz, adaptive on [0, 10] at {self.tol:g}, endpoints" if self.tol else "",
            "c": "MLP 2→50→2 tanh, 100 fixed steps of 0.01, endpoints",
            "d": "value and gradient, neural ODE 2→50→2 by its weights, 31 times on [0, 3]",
            "e": "value and gradient, Lorenz by each rho, 31 times on [0, 2] at 1e-6",
            "f": "threads: Lorenz, adaptive on [0, 10] at 1e-6, endpoints",
        }[self.case]
        return f"{self.case}. {how}; {self.n} trajectories, {self.dtype}"


def specs(only, quick, sizes):
    sizes = sizes or ([256, 1024] if quick else [4096, 100_000])
    small, large, dtypes = sizes[0], 1000 if quick else 10_000, ("float32", "float64")
    gradient = min(1024, 128 if quick else 1024)
    every = [Spec("a", dtype, n) for dtype in dtypes for n in sizes]
    tolerances = (("float32", 1e-6), ("float64", 1e-6), ("float64", 1e-9))
    every += [Spec("b", dtype, n, tol) for dtype, tol in tolerances for n in sizes]
    every += [Spec("c", "float32", small), Spec("d", "float32", gradient)]
    every += [Spec("e", dtype, gradient) for dtype in dtypes]
    every += [Spec("f", dtype, large, 1e-6) for dtype in dtypes]
    return [spec for spec in every if spec.case in only]


def task_of(spec):
    n, dtype = spec.n, np.dtype(spec.dtype)
    if spec.case == "a":
        return lorenz_task(n, dtype, 1.0, dt=1e-3)
    if spec.case in "bf":
        return lorenz_task(n, dtype, 10.0, tol=spec.tol)
    if spec.case == "c":
        return network_task(n, dtype, 1.0, dt=0.01)
    if spec.case == "d":
        times = np.linspace(0.0, 3.0, 31, dtype=dtype)
        return network_task(n, dtype, 3.0, scale=4.0, rtol=1e-3, atol=1e-6, times=times)
    return lorenz_task(n, dtype, 2.0, tol=1e-6, times=np.linspace(0.0, 2.0, 31, dtype=dtype))


def makers(case):
    """The contenders of a table, the one that ratios are to first."""
    partial = functools.partial
    threads, one = eo.EnsembleThreads(), eo.EnsembleThreads(1)
    wide = {"name": f"{JITTED}, {WIDE}", "compiler_options": WIDER}
    main = [diffrax_by_hand, ours_in_jit, ours_eager, partial(ours_in_jit, **wide)]
    main.append(partial(diffrax_by_hand, name=f"{DIFFRAX}, {WIDE}", compiler_options=WIDER))
    if case == "a":
        return [*main, gradsolve_fixed, heyoka_adaptive, scipy_adaptive, numba_fixed]
    if case == "b":
        return [*main, gradsolve_adaptive, heyoka_adaptive, scipy_adaptive]
    if case == "c":
        return main
    if case in "de":
        tight = {"d": 256, "e": 128}[case]
        ways = [partial(diffrax_gradient, max_steps=m) for m in (tight, 4096)]
        ways += [ours_gradient, partial(ours_gradient, maxiters=tight)]
        ways.append(partial(ours_gradient, **wide))
        return ways if case == "d" else [*ways, gradsolve_gradient, heyoka_gradient]
    return [
        partial(ours_in_jit, where=one, name=f"{JITTED}, one core"),
        partial(ours_in_jit, where=threads, name=f"{JITTED}, all cores"),
        partial(ours_eager, where=one, name=f"{EAGER}, one core"),
        partial(ours_eager, where=threads, name=f"{EAGER}, all cores"),
        diffrax_by_hand,
    ]


def enter(task, ways):
    """`(contender, seconds of its first call, what it returned)`, and why others take no part.

    The least of two first calls: what comes once a process is nobody's.
    """
    entered, skipped = {}, {}
    for _ in range(2):
        for number, way in enumerate(ways):
            jax.clear_caches()  # nobody's first call is quicker for another's before it
            started = time.perf_counter()
            try:
                contender = way(task)
            except Skip as reason:
                skipped[getattr(way, "func", way).__name__] = str(reason)
                continue
            result = jax.block_until_ready(contender.call())
            seconds = time.perf_counter() - started
            before = entered[number][1] if number in entered else seconds
            entered[number] = contender, min(seconds, before), result
    return list(entered.values()), skipped


def take_turns(contenders, repeats, budget):
    """The best time of each."""
    for contender in contenders:  # compiles again what was cleared
        jax.block_until_ready(contender.call())
    seconds = [[] for _ in contenders]
    share = budget / len(contenders)
    for turn in range(repeats):
        for contender, spent in zip(contenders, seconds, strict=True):
            if turn >= 2 and sum(spent) > share:
                continue
            started = time.perf_counter()
            jax.block_until_ready(contender.call())
            spent.append(time.perf_counter() - started)
    return [min(spent) for spent in seconds]


def warm_up(dtype):
    """One small solve of each, so that no first call pays for what comes once a process."""
    u0 = jnp.ones((4, 1), dtype)
    task = Task(lambda u, p, t: -p * u, u0, jnp.ones((), dtype), "u0", 4, 1.0, rtol=1e-3, atol=1e-6)
    for solve in (by_diffrax(task), by_solve(task)):
        jax.block_until_ready(jax.jit(solve)(task.u0, task.p))


def reference(task):
    """The states of the sample at 1e-13."""
    with jax.enable_x64(True):
        every = task.only(task.sample)
        exact = dataclasses.replace(every, dt=None, rtol=1e-13, atol=1e-13)
        states, _ = jax.jit(by_solve(exact, alg=eo.Vern9()))(exact.u0, exact.p)
        return np.asarray(states)


def gradient_reference(task):
    """The loss and its gradient at 1e-13."""
    with jax.enable_x64(True):
        every = task.only(np.arange(task.n))
        times = np.asarray(task.times, np.float64)
        exact = dataclasses.replace(every, rtol=1e-13, atol=1e-13, times=times)
        solve = by_diffrax(exact, diffrax.Dopri8(), max_steps=4096)
        return flat_gradient(value_and_grad(solve)(exact.p, exact.u0))


def flat_gradient(result):
    loss, gradient = result
    leaves = [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(gradient)]
    return float(loss), np.concatenate(leaves)


def errors(task, contender, result, exact):
    """The median and the largest error of the sample."""
    states = np.asarray(result[0], np.float64).reshape(-1, *exact.shape[2:])
    if contender.rows is None:
        states, exact = states[task.sample], exact[:, -1]
    else:
        exact = exact[np.searchsorted(task.sample, contender.rows), -1]
    off = np.abs(states - exact).max(axis=-1)
    return float(np.median(off)), float(off.max())


def gradient_errors(result, exact):
    loss, gradient = flat_gradient(result)
    off = np.linalg.norm(gradient - exact[1]) / np.linalg.norm(exact[1])
    return abs(loss - exact[0]) / abs(exact[0]), float(off)


def table(spec, repeats, budget):
    """Everything measured, as rows."""
    jax.config.update("jax_enable_x64", spec.dtype == "float64")
    task, is_gradient = task_of(spec), spec.case in "de"
    warm_up(task.dtype)
    entered, skipped = enter(task, makers(spec.case))
    bests = take_turns([contender for contender, *_ in entered], repeats, budget)
    exact = gradient_reference(task) if is_gradient else reference(task)
    rows = []
    for (contender, first, result), best in zip(entered, bests, strict=True):
        extrapolated = 1.0 if contender.rows is None else task.n / len(contender.rows)
        row = {
            "name": contender.name,
            "first": max(0.0, first - best),
            "seconds": best * extrapolated,
        }
        row["ratio"] = bests[0] / row["seconds"]
        if is_gradient:
            row["errors"] = gradient_errors(result, exact)
        else:
            row["errors"] = errors(task, contender, result, exact)
            row["steps"] = float(np.mean(result[1]))
            row["ns"] = 1e9 * row["seconds"] / task.n / row["steps"]
        rows.append(row)
    cores = len(jax.devices("cpu"))
    return {"spec": spec, "title": spec.title, "cores": cores, "rows": rows, "skipped": skipped}


#
# What the project promises
#


def verdicts(found):
    """`(what, measured, bound, held)`, a line each."""
    spec, rows = Spec(*found["spec"]), {row["name"]: row for row in found["rows"]}
    if spec.case == "f":
        return list(_threads(found, rows))
    lines = []
    if spec.case in "abc":
        factor = {"a": (30, 14), "b": (25, 12), "c": (4, 4)}[spec.case][spec.dtype == "float64"]
        lines += [
            _at_least(f"{name}: diffrax's time", rows[name]["ratio"], factor)
            for name in (JITTED, EAGER)
        ]
        if spec.case in "ab" and spec.dtype == "float64":
            lines.append(_julia(spec, rows))
    else:
        factor = {"d": 3, "e": 10}[spec.case]
        tight = next(row for name, row in rows.items() if "maxiters=" in name)
        lines.append(_at_least(f"{JITTED}: diffrax's time", rows[JITTED]["ratio"], factor))
        slower = rows[JITTED]["seconds"] / tight["seconds"]
        lines.append(_at_most("default maxiters: time with the tightest", slower, 1.2))
    compiling = rows[JITTED]["first"] / found["rows"][0]["first"]
    lines.append(_at_most(f"{JITTED}: diffrax's first call", compiling, 1.0))
    return lines


def _at_least(what, measured, bound):
    return what, measured, f"at least {bound:g}x", measured >= bound


def _at_most(what, measured, bound):
    return what, measured, f"at most {bound:g}x", measured <= bound


def _julia(spec, rows):
    """Julia's time here, were it as much faster than diffrax as on the machine it was taken."""
    theirs, diffrax_there = JULIA[spec.tol]
    julia = theirs * rows[DIFFRAX]["ns"] / diffrax_there
    what = f"{JITTED}: Julia's EnsembleSerial, about {julia:.0f} ns/step here"
    return _at_least(what, julia / rows[JITTED]["ns"], 3)


def _threads(found, rows):
    bound = 1.7 if found["cores"] == 2 else 0.85 * found["cores"]
    for name in (JITTED, EAGER):
        one, every = (rows[f"{name}, {which}"]["seconds"] for which in ("one core", "all cores"))
        yield _at_least(f"{name}: {found['cores']} cores against one", one / every, bound)


#
# Printing
#


def show(found):
    is_gradient = "ns" not in found["rows"][0]
    print(f"\n### {found['title']}\n")
    head = ["", "time, ms", "ratio", "first call, s"]
    head += ["loss error", "gradient error"] if is_gradient else ["ns/step", "steps"]
    head += [] if is_gradient else ["median error", "largest error"]
    print(f"| {' | '.join(head)} |\n|:---|{'---:|' * (len(head) - 1)}")
    for row in found["rows"]:
        cells = [row["name"], f"{1e3 * row['seconds']:.4g}", f"{row['ratio']:.3g}x"]
        cells.append(f"{row['first']:.2f}")
        cells += [] if is_gradient else [f"{row['ns']:.3g}", f"{row['steps']:.0f}"]
        print(f"| {' | '.join(cells + [f'{x:.1e}' for x in row['errors']])} |")
    print()
    for what, measured, bound, held in verdicts(found):
        print(f"- {what} x {measured:.3g}, wanted {bound}: {'met' if held else '**MISSED**'}")
    for name, reason in found["skipped"].items():
        print(f"- skipped `{name}`: {reason}")
    sys.stdout.flush()


def versions():
    found = {"Python": platform.python_version()}
    names = ("ensembleode", "jax", "diffrax", "equinox", "numpy", "gradsolve", "warp-lang")
    for name in (*names, "heyoka", "scipy", "numba"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine():
    info = pathlib.Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": versions(),
    }


#
# Work and precision
#


def work_precision(n, repeats):
    """`{label: [(error, seconds), ...]}`, over tolerances, all compiled once (512-bit)."""
    jax.config.update("jax_enable_x64", True)
    task = lorenz_task(n, np.float64, 10.0)
    exact = reference(task)[:, -1]
    curves = {}
    for label, loosest, solve in (*solvers(task), *heyoka_curve(task)):
        points = []
        for tol in 10.0 ** -np.arange(3.0, loosest + 1):
            off = np.abs(np.asarray(solve(tol))[task.sample].reshape(exact.shape) - exact)
            seconds = []
            for _ in range(repeats):
                started = time.perf_counter()
                jax.block_until_ready(solve(tol))
                seconds.append(time.perf_counter() - started)
            points.append((float(np.median(off.max(axis=-1))), min(seconds)))
        curves[label] = points
    return curves


def solvers(task):
    """`(label, tightest tolerance's exponent, tol -> end states)`."""

    def compiled(by, alg):
        def solve(tol, u0, p):
            return by(dataclasses.replace(task, rtol=tol, atol=tol), alg)(u0, p)[0]

        solve = jax.jit(solve, compiler_options=WIDER)
        return lambda tol: solve(tol, task.u0, task.p)

    for name in ("Bosh3", "Tsit5", "Dopri8", "Vern7", "Vern9"):
        own = compiled(lambda task, alg: by_solve(task, alg=alg), getattr(eo, name)())
        yield f"ensembleode {name}", 8 if name == "Bosh3" else 12, own
    for name in ("Tsit5", "Dopri8"):
        yield f"diffrax {name}", 12, compiled(by_diffrax, getattr(diffrax, name)())


def heyoka_curve(task):
    try:
        imported("heyoka")
    except Skip as reason:
        print(f"skipped heyoka: {reason}", file=sys.stderr)
        return

    @functools.cache
    def integrator(tol):
        return heyoka_adaptive(dataclasses.replace(task, rtol=tol, atol=tol)).call

    yield "heyoka (Taylor)", 12, lambda tol: integrator(tol)()[0]


def plot(curves, n, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    styles = {"ensembleode": "o-", "diffrax": "s--", "heyoka": "^:"}
    for label, points in curves.items():
        off, seconds = np.array(points).T
        axes.loglog(off, 1e6 * seconds / n, styles[label.split()[0]], label=label, markersize=4)
    axes.set(xlabel="median error at t = 10", ylabel="µs per trajectory (one core)")
    axes.set_title(f"Lorenz, {n} trajectories, float64, tolerances from 1e-3 to 1e-12")
    axes.invert_xaxis()
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


#
# Processes
#


def apart(request, *, core, x64=True):
    """What the worker says, in a process of its own; held to one core, if given."""

    def hold():
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "GRADSOLVE_X64": str(int(x64))}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    # Warp greets on stderr, so that is shown only when something is wrong.
    command = [sys.executable, __file__, "--worker", json.dumps(request)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=hold,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def work(request):
    kind, *rest = request
    if kind == "table":
        spec, repeats, budget = rest
        found = table(Spec(*spec), repeats, budget)
    else:
        found = work_precision(*rest)
    print(json.dumps(found))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small ensembles, few repeats")
    parser.add_argument("--only", default="a,b,c,d,e,f", help="such as a,b; '' for none")
    parser.add_argument("--sizes", help="trajectories of a and b, such as 4096,100000")
    parser.add_argument("--repeats", type=int, help="at most; by default 20")
    parser.add_argument("--seconds", type=float, help="about, for each table; by default 60")
    parser.add_argument("--core", type=int, help="which one; by default the last")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument("--work-precision", metavar="PNG", help="plot error against time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def core_of(options):
    if options.core is not None:
        return options.core
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def main():
    options = parse()
    if options.worker:
        work(json.loads(options.worker))
        return
    repeats = options.repeats or (3 if options.quick else 20)
    budget = options.seconds or (3.0 if options.quick else 60.0)
    core, about = core_of(options), machine()
    sizes = [int(n) for n in options.sizes.split(",")] if options.sizes else None
    named = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"{about['cpu']}, {about['cores']} cores; {named}", flush=True)
    everything = {"machine": about, "tables": []}
    for spec in specs(options.only.split(","), options.quick, sizes):
        where = None if spec.case == "f" else core
        request = ["table", spec, repeats, budget]
        found = apart(request, core=where, x64=spec.dtype == "float64")
        show(found)
        everything["tables"].append(found | {"verdicts": verdicts(found)})
    if options.work_precision:
        n = 64 if options.quick else 1024
        curves = apart(["work-precision", n, min(repeats, 5)], core=core)
        everything["work_precision"] = {"trajectories": n, "curves": curves}
        plot(curves, n, options.work_precision)
        print(f"\nwrote {options.work_precision}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(everything, indent=1))
    missed = sum(not held for t in everything["tables"] for *_, held in verdicts(t))
    total = sum(len(verdicts(t)) for t in everything["tables"])
    if total:
        print(f"\n{total - missed} of {total} met", end="")
        print(", with ensembles too small for them (--quick)" if options.quick else "")


if __name__ == "__main__":
    main()
