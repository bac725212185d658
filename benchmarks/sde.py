"""Stochastic equations on one core: the time of a step, the error, and the gradient.

    python benchmarks/sde.py [--n 4096] [--steps 1000] [--only 'EM;C++'] [--json FILE]
    python benchmarks/sde.py --precision
    python benchmarks/sde.py --adaptive

The equations are those of Lorenz with three noises, each in proportion to its component (for
SRA1, which is for additive noise, they are constant). Each trajectory has its own parameter.
Steps are fixed, and the end is saved. `compiled` is the engine, in `jit`, with `EM(split=False)`,
`SRA1`, `SRIW1` and `SOSRI`. The contenders take Euler-Maruyama steps:

- `C++`, written by hand (sde.cpp, with g++ or $CXX): Philox and Box-Muller in vectors;
- `scan`, a `lax.scan` over the steps with one array of noise for all trajectories, and `scan,
  keys`, mapped over a key for each;
- `diffrax` with an `UnsafeBrownianPath`, and `diffrax, tree` with a `VirtualBrownianTree`, mapped
  over a key for each; `diffrax SRA1, tree` with space-time Levy areas;
- `Numba`, loops over trajectories and steps with Numba's own normal numbers;
- `torchsde`, on one array of all trajectories, with its Brownian interval.

Contenders that are not installed are left out. Slow ones solve fewer trajectories, and their times
are scaled.

All contenders run in one process, held to one core, and take turns: the time is the least CPU
time. `error` is the strong error in float64: the mean distance of a geometric Brownian motion at
t = 1, after 64 steps, from the exact solution on its own path. It is half a percent to two percent
uncertain. (So all Euler-Maruyama steps have the same, if they are right.) `gradient` is the time of
the gradient of the sum of all ends with respect to all initial states and parameters, divided by
that of the sum, in float64.

`--precision` prints the time that the engine needs for a strong error instead: of the geometric
Brownian motion, by fixed steps and by adaptive ones, in float64. `--adaptive` prints the time of an
accepted step of the adaptive methods, with tolerances of 0.01.
"""

import argparse
import ctypes
import functools
import math
import pathlib
import random
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import imported, Skip
from common.cpp import library
from common.processes import held, last_core
from common.report import header, line, machine, PEERS, write_json
from common.tasks import lorenz
from common.timing import in_turns


jax.config.update("jax_enable_x64", True)

import ensembleode as eo  # noqa: E402


NOISE, RATE, GROWTH_NOISE = 0.3, 0.5, 0.5
CHECKED = 20_000  # trajectories whose errors are measured
DTYPES = ("float32", "float64")


class Problem(NamedTuple):
    """`f(u, p, t)` and `g(u, p, t)` for a state `[d]`, with the starts and the parameters of `n`
    trajectories."""

    name: str
    f: Callable
    g: Callable
    u0: np.ndarray
    p: np.ndarray
    t1: float
    steps: int
    is_scalar: bool = False

    @property
    def n(self):
        return len(self.p)

    @property
    def dt(self):
        return self.t1 / self.steps

    def of(self, n, dtype):
        """The problem with only `n` trajectories, spread over those that there are."""
        few = np.linspace(0, self.n - 1, n).astype(int)
        return self._replace(u0=self.u0[few].astype(dtype), p=self.p[few].astype(dtype))


def in_proportion(u, p, t):
    return NOISE * u


def constant(u, p, t):
    return jnp.full_like(u, NOISE)


def noisy_lorenz(n, steps, *, additive=False):
    """Lorenz's equations to t = 1, or for less than a thousand steps of the same size."""
    u0 = np.tile([1.0, 0.5, 20.0], (n, 1))
    g = constant if additive else in_proportion
    return Problem("lorenz", lorenz, g, u0, np.linspace(10.0, 28.0, n), steps / 1000, steps)


def growth(n, steps):
    """A geometric Brownian motion to t = 1, and its noise as the second component."""
    f = lambda u, p, t: jnp.stack([p * u[0], jnp.zeros_like(u[1])])  # noqa: E731
    g = lambda u, p, t: jnp.stack([GROWTH_NOISE * u[0], jnp.ones_like(u[1])])  # noqa: E731
    u0 = np.tile([1.0, 0.0], (n, 1))
    return Problem("growth", f, g, u0, np.full(n, RATE), 1.0, steps, is_scalar=True)


def strong_error(ends):
    """Of the ends `[n, 2]` of `growth`."""
    x, w = np.asarray(ends).T
    exact = np.exp(RATE - GROWTH_NOISE**2 / 2 + GROWTH_NOISE * w)
    return float(np.mean(np.abs(x - exact)))


#
# Ways in JAX: a function of `(u0, p)` that gives the ends
#


def ends(sim):
    return sim.u[:, -1]


def ends_and_steps(sim):
    return ends(sim), jnp.sum(sim.stats.naccept)


def by_engine(problem, alg=None, tolerance=None, wanted=ends):
    def solve(u0, p):
        noise = eo.WienerProcess(scalar=True) if problem.is_scalar else None
        span = np.zeros((), u0.dtype), np.asarray(problem.t1, u0.dtype)
        prob = eo.SDEProblem(problem.f, problem.g, u0[0], span, p[0], noise=noise)
        ens = eo.EnsembleProblem(prob, u0=u0, p=p)
        options = {"dt": problem.dt}
        if tolerance is not None:
            options = {"abstol": tolerance, "reltol": tolerance}
        where = eo.EnsembleThreads(1)
        return wanted(eo.solve(ens, alg, where, save_start=False, **options))

    return solve


def em(problem, u, p, t, normal):
    """The state after an Euler-Maruyama step, for normal numbers like the noise."""
    h = problem.dt
    return u + h * problem.f(u, p, t) + math.sqrt(h) * problem.g(u, p, t) * normal


def by_scan(problem):
    """With the components first, so that each is an array of all trajectories."""

    def solve(u0, p):
        shape = (1, len(p)) if problem.is_scalar else u0.T.shape

        def step(u, i):
            key = jax.random.fold_in(jax.random.key(0), i)
            normal = jax.random.normal(key, shape, u.dtype)
            return em(problem, u, p, i * problem.dt, normal), None

        return jax.lax.scan(step, u0.T, jnp.arange(problem.steps))[0].T

    return solve


def by_scan_of_keys(problem):
    def solve(u0, p):
        def one(u0, p, key):
            def step(u, i):
                shape = () if problem.is_scalar else u.shape
                normal = jax.random.normal(jax.random.fold_in(key, i), shape, u.dtype)
                return em(problem, u, p, i * problem.dt, normal), None

            return jax.lax.scan(step, u0, jnp.arange(problem.steps))[0]

        return jax.vmap(one)(u0, p, jax.random.split(jax.random.key(0), len(p)))

    return solve


def by_diffrax(problem, *, tree=False, method="Euler"):
    diffrax, lineax = imported("diffrax"), imported("lineax")
    area = {"levy_area": diffrax.SpaceTimeLevyArea} if method == "SRA1" else {}

    def diffusion(t, u, p):
        g = problem.g(u, p, t)
        return g if problem.is_scalar else lineax.DiagonalLinearOperator(g)

    def solve(u0, p):
        t0, t1, dt = (jnp.asarray(x, u0.dtype) for x in (0.0, problem.t1, problem.dt))

        def one(u0, p, key):
            shape = jax.ShapeDtypeStruct(() if problem.is_scalar else u0.shape, u0.dtype)
            if tree:
                path = diffrax.VirtualBrownianTree(t0, t1, dt, shape, key=key, **area)
            else:
                path = diffrax.UnsafeBrownianPath(shape, key=key, **area)
            drift = diffrax.ODETerm(lambda t, u, p: problem.f(u, p, t))
            terms = diffrax.MultiTerm(drift, diffrax.ControlTerm(diffusion, path))
            solver = getattr(diffrax, method)()
            options = {"max_steps": problem.steps + 2}
            if not tree:
                options["adjoint"] = diffrax.ForwardMode()
            return diffrax.diffeqsolve(terms, solver, t0, t1, dt, u0, p, **options).ys[-1]

        return jax.vmap(one)(u0, p, jax.random.split(jax.random.key(0), len(p)))

    return solve


#
# Ways elsewhere: `call()` gives the ends
#


def by_cpp(problem):
    source = pathlib.Path(__file__).with_suffix(".cpp")
    solves = library(source, flags=["-mprefer-vector-width=512"])
    run = solves[f"{problem.name}_{problem.u0.dtype}"]
    number = ctypes.c_float if problem.u0.dtype == np.float32 else ctypes.c_double
    run.argtypes = [ctypes.c_long] * 2 + [number, ctypes.c_uint64] + [ctypes.c_void_p] * 3
    u0, p, ends = np.ascontiguousarray(problem.u0), problem.p, np.empty_like(problem.u0)

    def call():
        arrays = (x.ctypes.data for x in (p, u0, ends))
        run(problem.n, problem.steps, problem.dt, 1, *arrays)
        return ends

    return call


def by_numba(problem):
    numba = imported("numba")
    number = problem.u0.dtype.type
    h, root, s, b = (number(x) for x in (problem.dt, problem.dt**0.5, NOISE, GROWTH_NOISE))
    ten, beta = number(10), number(8 / 3)

    @numba.njit(fastmath=True)
    def increment():
        return root * number(random.gauss(0.0, 1.0))

    @numba.njit(fastmath=True)
    def lorenz_step(u, p):
        x, y, z = u[0], u[1], u[2]
        u[0] = x + h * (ten * (y - x)) + s * x * increment()
        u[1] = y + h * (x * (p - z) - y) + s * y * increment()
        u[2] = z + h * (x * y - beta * z) + s * z * increment()

    @numba.njit(fastmath=True)
    def growth_step(u, p):
        w = increment()
        u[0] += h * p * u[0] + b * u[0] * w
        u[1] += w

    step, steps = {"lorenz": lorenz_step, "growth": growth_step}[problem.name], problem.steps

    @numba.njit(fastmath=True)
    def solve(u0, ps):
        ends = u0.copy()
        for i in range(len(ps)):
            for _ in range(steps):
                step(ends[i], ps[i])
        return ends

    return lambda: solve(problem.u0, problem.p)


def by_torchsde(problem):
    torch, torchsde = imported("torch"), imported("torchsde")
    torch.set_num_threads(1)
    u0, p = torch.tensor(problem.u0), torch.tensor(problem.p)

    class Lorenz:
        noise_type, sde_type = "diagonal", "ito"

        def f(self, t, u):
            x, y, z = u.T
            return torch.stack([10 * (y - x), x * (p - z) - y, x * y - 8 / 3 * z], 1)

        def g(self, t, u):
            return NOISE * u

    class Growth:
        noise_type, sde_type = "scalar", "ito"

        def f(self, t, u):
            return torch.stack([p * u[:, 0], torch.zeros_like(p)], 1)

        def g(self, t, u):
            return torch.stack([GROWTH_NOISE * u[:, 0], torch.ones_like(p)], 1)[:, :, None]

    sde = {"lorenz": Lorenz, "growth": Growth}[problem.name]()
    times = torch.tensor([0.0, problem.t1], dtype=u0.dtype)

    def call():
        with torch.no_grad():
            return torchsde.sdeint(sde, u0, times, dt=problem.dt, method="euler")[-1].numpy()

    return call


METHODS = {
    "EM": eo.EM(split=False),
    "SRA1": eo.SRA1(),
    "SRIW1": eo.SRIW1(),
    "SOSRI": eo.SOSRI(),
}
IN_JAX = {
    **{name: functools.partial(by_engine, alg=alg) for name, alg in METHODS.items()},
    "scan": by_scan,
    "scan, keys": by_scan_of_keys,
    "diffrax": by_diffrax,
    "diffrax, tree": functools.partial(by_diffrax, tree=True),
    "diffrax SRA1, tree": functools.partial(by_diffrax, tree=True, method="SRA1"),
}
ELSEWHERE = {"C++": by_cpp, "Numba": by_numba, "torchsde": by_torchsde}
ADDITIVE = ("SRA1", "diffrax SRA1, tree")
NO_GRADIENT = ("diffrax",)  # in reverse mode
SLOW = {"diffrax": 4, "diffrax, tree": 16, "diffrax SRA1, tree": 16, "scan, keys": 4, "Numba": 4}


def compiled(solve, problem):
    u0, p = jnp.asarray(problem.u0), jnp.asarray(problem.p)
    return functools.partial(jax.jit(solve), u0, p)


def call_of(name, problem):
    if name in IN_JAX:
        return compiled(IN_JAX[name](problem), problem)
    return ELSEWHERE[name](problem)


def gradient_of(name, problem):
    solve = IN_JAX[name](problem)
    gradient = jax.grad(lambda u0, p: jnp.sum(solve(u0, p)), argnums=(0, 1))
    return compiled(gradient, problem)


def tried(make: Callable, name: str, problem: Problem) -> tuple[Callable, float] | None:
    """A call, and the seconds of the first one, which compiles; None if it takes no part."""
    try:
        call, started = make(name, problem), time.perf_counter()
        jax.block_until_ready(call())
        return call, time.perf_counter() - started
    except Skip as why:
        print(f"- {name}: {why}")
        return None


def precision_table(n):
    """The times and errors of the engine's methods, by the number of steps or by tolerances."""
    methods = METHODS | {"RKMil": eo.RKMil()}
    steps = {f"{x} steps": (x, None) for x in (16, 64, 256, 1024)}
    tolerances = {f"tolerance {x:g}": (1, x) for x in (1e-1, 1e-2, 1e-3)}
    calls = {}
    for name in ("EM", "RKMil", "SRIW1", "SOSRI"):
        settings = steps | tolerances if methods[name].adaptive else steps
        for setting, (count, tolerance) in settings.items():
            problem = growth(n, count)
            solve = by_engine(problem, methods[name], tolerance)
            calls[name, setting] = compiled(solve, problem)
    in_turns(calls, 1)  # compiles
    spent = in_turns(calls, 5, budget=60, clock=time.process_time)
    print(header(("method", "steps", "us a trajectory", "error"), left=2))
    for (name, setting), call in calls.items():
        us = min(spent[name, setting]) / n * 1e6
        print(line((name, setting, f"{us:.2f}", f"{strong_error(call()):.1e}")))


def adaptive_table(n):
    """The time of an accepted step of the engine's adaptive methods."""
    calls = {}
    for name in ("SRIW1", "SOSRI"):
        for dtype in DTYPES:
            problem = noisy_lorenz(n, 1000).of(n, dtype)
            solve = by_engine(problem, METHODS[name], 1e-2, ends_and_steps)
            calls[name, dtype] = compiled(solve, problem)
    steps = {key: int(call()[1]) for key, call in calls.items()}  # (Compiles.)
    spent = in_turns(calls, 5, budget=60, clock=time.process_time)
    print(header(("adaptive", *(f"{x}, ns an accepted step" for x in DTYPES), "steps")))
    for name in ("SRIW1", "SOSRI"):
        each = [min(spent[name, x]) / steps[name, x] * 1e9 for x in DTYPES]
        print(line((name, *map("{:.1f}".format, each), f"{steps[name, 'float64'] / n:.0f}")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", default="", help="names of ways, separated by semicolons")
    parser.add_argument("--precision", action="store_true", help="times by errors, of the engine")
    parser.add_argument("--adaptive", action="store_true", help="times of adaptive steps alone")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.precision or args.adaptive:
        print(machine(*PEERS))
        with held(None if (core := last_core()) is None else {core}):
            (precision_table if args.precision else adaptive_table)(args.n)
        return
    names = args.only.split(";") if args.only else [*IN_JAX, *ELSEWHERE]
    core, calls, report, sizes = last_core(), {}, {}, {}
    print(machine(*PEERS, "torchsde"))
    with held(None if core is None else {core}):
        for name in names:
            sizes[name] = max(64, args.n // SLOW.get(name, 1))
            whole = noisy_lorenz(args.n, args.steps, additive=name in ADDITIVE)
            for dtype in DTYPES:
                problem = whole.of(sizes[name], dtype)
                found = tried(call_of, name, problem)
                if found is None:
                    break
                calls[name, dtype], first = found
                report.setdefault(name, {"n": sizes[name]})["first"] = first
            if name in report and name in IN_JAX and name not in NO_GRADIENT:
                calls[name, "gradient"], _ = tried(gradient_of, name, problem)
        spent = in_turns(calls, 5, budget=180, share=20, clock=time.process_time)
        for name, row in report.items():
            for dtype in DTYPES:
                row[dtype] = min(spent[name, dtype]) / (row["n"] * args.steps) * 1e9
            if (name, "gradient") in spent:
                row["gradient"] = min(spent[name, "gradient"]) / min(spent[name, "float64"])
            if name not in ADDITIVE:
                found = call_of(name, growth(CHECKED, 64).of(CHECKED, "float64"))()
                row["error"] = strong_error(found)
    columns = ("way", "float32, ns a step", "float64, ns", "gradient", "error", "first, s")
    print(header(columns))
    forms = {"float32": ".2f", "float64": ".2f", "gradient": ".1f", "error": ".4f", "first": ".2f"}
    for name, row in report.items():
        print(line((name, *(format(row[x], f) if x in row else "" for x, f in forms.items()))))
    if args.json:
        write_json(args.json, report)


if __name__ == "__main__":
    main()
