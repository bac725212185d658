"""How far each way is from the limit of the hardware: the same ensembles on one core.

    python benchmarks/limits.py [--quick] [--only a,b,...] [--small] [--no-cold] [--json FILE]

Ensembles (`--only lorenz-rk4`, or part of a name): Lorenz and a damped pendulum with fixed steps of
RK4; Lorenz, Van der Pol (even: each like its neighbours; and shuffled), Lorenz 96 of 10, 20 and 40
components, a network 2 -> 50 -> 2 and a bubble (Keller and Miksis 1980, with the constants of
Hegedus et al., Ultrasonics Sonochemistry 67, 2020) with adaptive steps of Tsit5; and the gradients
of half the sum of squares of the ends by all initial states and parameters.

Ways: `C++`, by hand (limits.cpp, with g++ or $CXX, the best of 1, 2 and 4 registers of lanes),
which the ratios are to; the engines `compiled` and `lanes` in `jit`; `diffrax`, vmapped; `Numba`, a
loop over the trajectories; `heyoka`, Taylor's method in batches, which has steps of its own, at
1e-9 where the others' are fixed. Those that are not installed are left out.

All ways of an ensemble are in one process, held to one core, and take turns: the time is the least
CPU time (which other processes disturb less than the clock). `ns/step` is per trajectory and step
tried, each way's own steps; in C++ a lane that has ended counts as long as others go on. `error` is
the largest of the end states, of a sample, relative to the norm of each or to one; or that of the
whole gradient; against Vern9 at 1e-12 in float64. `first` is a first call, in a process of its own,
without caches on disk, and `cached` with them (of C++ it is the compiler's time).

`--small` prints another table instead: ensembles of few trajectories and of many, of chains of 1 to
60 oscillators: the time of lanes over that of compiled; and gradients of Lotka-Volterra at 21 times
besides diffrax.
"""

import argparse
import ctypes
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from cpu_ensembles import imported, machine, Skip
from limits_cases import Case, cases, lotka_volterra, oscillators

import ensembleode as eo


SAMPLE = 32  # trajectories whose errors are measured
FOLDER = pathlib.Path(__file__).parent


#
# Ways: functions of a case, its dtype, and whether the gradient is wanted. `call()` gives the ends
# and the steps tried, or the gradients by `u0` and by `p`.
#


def by_engine(engine: str) -> Callable:
    def way(case, dtype, gradient, alg=None, tol=None):
        options = {"abstol": tol or case.tol, "reltol": tol or case.tol}
        if tol is None and case.dt:
            options = {"adaptive": False, "dt": case.dt}
        options |= {"save_start": False} if case.times is None else {"saveat": case.times}
        alg = alg or (eo.RK4() if case.dt else eo.Tsit5())

        def solve(u0, p):
            first = p if case.shares_p else p[0]
            prob = eo.ODEProblem(case.field, u0[0], (0.0, case.t1), first)

            def change(prob, ctx):
                own = {} if case.shares_p else {"p": p[ctx.index]}
                return eo.remake(prob, u0=u0[ctx.index], **own)

            sim = eo.solve(
                eo.EnsembleProblem(prob, change),
                alg,
                eo.EnsembleThreads(1),
                trajectories=len(u0),
                engine=engine,
                maxiters=10**5,
                **options,
            )
            return sim.u, sim.stats.naccept + sim.stats.nreject

        return in_jit(solve, case, dtype, gradient)

    return way


class RK4(diffrax.AbstractERK):
    tableau: ClassVar = diffrax.ButcherTableau(
        c=np.array([0.5, 0.5, 1.0]),
        a_lower=(np.array([0.5]), np.array([0.0, 0.5]), np.array([0.0, 0.0, 1.0])),
        b_sol=np.array([1, 2, 2, 1]) / 6,
        b_error=np.zeros(4),
    )
    interpolation_cls: ClassVar = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

    def order(self, terms):
        del terms
        return 4


def by_diffrax(case, dtype, gradient):
    controller = diffrax.ConstantStepSize()
    if case.dt is None:
        controller = diffrax.PIDController(rtol=case.tol, atol=case.tol)
    saveat = diffrax.SaveAt(t1=True) if case.times is None else diffrax.SaveAt(ts=case.times)

    def one(u0, p):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, u, p: case.field(u, p, t)),
            RK4() if case.dt else diffrax.Tsit5(),
            0.0,
            case.t1,
            case.dt,
            u0,
            p,
            saveat=saveat,
            stepsize_controller=controller,
            max_steps=4096 if gradient else 10**5,
            throw=False,
        )
        return sol.ys, sol.stats["num_steps"]

    solve = jax.vmap(one, in_axes=(0, None if case.shares_p else 0))
    return in_jit(solve, case, dtype, gradient)


def in_jit(solve, case, dtype, gradient):
    u0, p = jnp.asarray(case.u0, dtype), jnp.asarray(case.p, dtype)

    def loss(u0, p):
        return 0.5 * jnp.sum(solve(u0, p)[0] ** 2)

    if gradient:
        run = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return lambda: jax.block_until_ready(run(u0, p))
    run = jax.jit(solve)

    def call():
        u, tried = jax.block_until_ready(run(u0, p))
        return (u if case.times is not None else u.reshape(case.u0.shape)), tried

    return call


def cpp_library(case, dtype) -> ctypes.CDLL:
    """Compiled, and kept in the temporary folder."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or case.cpp is None:
        raise Skip("no compiler of C++" if case.cpp else "not written")
    source = FOLDER / "limits.cpp"
    flags = ["-std=c++17", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    flags += [f"-DFIELD={case.cpp}", *(["-DSINGLE"] if dtype == "float32" else [])]
    key = hashlib.sha256(f"{flags}{source.read_text()}".encode()).hexdigest()[:16]
    path = pathlib.Path(tempfile.gettempdir()) / f"limits-{key}.so"
    if not path.exists():
        started = time.perf_counter()
        command = [compiler, *flags, str(source), "-o", f"{path}.new", "-lmvec", "-lm"]
        subprocess.run(command, check=True)
        path.with_suffix(".seconds").write_text(str(time.perf_counter() - started))
        os.replace(f"{path}.new", path)
    library = ctypes.CDLL(str(path))
    library.seconds = float(path.with_suffix(".seconds").read_text())
    return library


def by_cpp(case, dtype, gradient):
    if gradient and not case.has_gradient:
        raise Skip("not written")
    library = cpp_library(case, dtype)
    library.solve.restype = ctypes.c_long
    u0, p = (np.ascontiguousarray(x, dtype) for x in (case.u0, case.p))
    out, gu, gp, gs = np.empty_like(u0), np.empty_like(u0), np.empty_like(p), np.empty(999, dtype)
    own, shared = (gs, p) if case.shares_p else (p, gs)

    def run(registers):
        return library.solve(
            registers,
            int(case.dt is None),
            ctypes.c_long(case.n),
            *(ctypes.c_void_p(x.ctypes.data) for x in (u0, own, shared)),
            ctypes.c_double(case.t1),
            ctypes.c_double(case.dt or case.tol),
            *(ctypes.c_void_p(x.ctypes.data) for x in (out, gu, gp, gs)),
        )

    if gradient:
        run(0)
        return lambda: (run(0), (gu, gs[: p.size] if case.shares_p else gp))[1]
    seconds = {m: min(timed(lambda: run(m)) for _ in range(4)) for m in (1, 2, 4)}  # noqa: B023
    best = min(seconds, key=seconds.__getitem__)
    return lambda: (run(best), out)[::-1]


def by_numba(case, dtype, gradient):
    if gradient:
        raise Skip("not written")
    from limits_numba import loop

    solve = loop(imported("numba"), case, eo.Tsit5().tableau, np.dtype(dtype).type)
    u0, p = (np.ascontiguousarray(x, dtype) for x in (case.u0, case.p))
    p = p[None] if case.shares_p else p
    return lambda: solve(u0, p)


def by_heyoka(case, dtype, gradient):
    if gradient:
        raise Skip("not written")
    heyoka, real = imported("heyoka"), np.dtype(dtype).type
    size, width = case.u0.shape[1], heyoka.recommended_simd_size(fp_type=real)
    names = heyoka.make_vars(*(f"u{i}" for i in range(size)))
    u = list(names) if size > 1 else [names]
    p = (
        [real(x) for x in case.p]
        if case.shares_p
        else [heyoka.par[i] for i in range(case.p.shape[1])]
    )
    field = rounded(case.f(heyoka, u, p, heyoka.time), heyoka, real)
    rows = np.arange(case.n + -case.n % width).clip(max=case.n - 1).reshape(-1, width)
    start, own = np.zeros((size, width), real), np.zeros((len(case.p.T), width), real)
    integrator = heyoka.taylor_adaptive_batch(
        list(zip(u, field, strict=True)),
        start,
        tol=real(case.tol or 1e-9) if real is np.float64 else real(1e-6),
        fp_type=real,
        **({} if case.shares_p else {"pars": own}),
    )

    def call():
        ends, tried = [], 0
        for batch in rows:
            integrator.set_time(real(0.0))
            integrator.state[:] = case.u0[batch].T
            if not case.shares_p:
                integrator.pars[:] = case.p[batch].T
            integrator.propagate_until(real(case.t1))
            ends.append(integrator.state.T.copy())
            tried += sum(x[3] for x in integrator.propagate_res)
        return np.concatenate(ends)[: case.n], tried

    return call


def rounded(field, heyoka, real):
    """Its constants as numbers of this precision."""
    return field if real is np.float64 else [heyoka.expression(x) for x in field]


WAYS = {
    "C++": by_cpp,
    "compiled": by_engine("compiled"),
    "lanes": by_engine("lanes"),
    "diffrax": by_diffrax,
    "Numba": by_numba,
    "heyoka": by_heyoka,
}


#
# Measuring
#


def timed(call) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def in_turns(calls: dict, seconds: float, most: int) -> dict[str, float]:
    """The least CPU time of each, as many rounds as fit; at least two."""
    least = dict.fromkeys(calls, np.inf)
    started, turn = time.perf_counter(), 0
    while turn < 2 or (turn < most and time.perf_counter() - started < seconds):
        for name, call in calls.items():
            least[name] = min(least[name], timed(call))
        turn += 1
    return least


def reference(case, gradient):
    """Which trajectories are compared, and what they should have; kept in the temporary folder."""
    rows = np.unique(np.linspace(0, case.n - 1, SAMPLE).astype(int))
    some = case if gradient else case.only(rows)
    source = (FOLDER / "limits_cases.py").read_bytes() + some.u0.tobytes() + some.p.tobytes()
    key = hashlib.sha256(
        source + f"{type(case.f).__name__} {case.t1} {gradient}".encode()
    ).hexdigest()[:16]
    path = pathlib.Path(tempfile.gettempdir()) / f"limits-{key}.npz"
    if not path.exists():
        with jax.enable_x64(True):
            found = by_engine("lanes")(some, "float64", gradient, eo.Vern9(), 1e-12)()
        np.savez(path, *map(np.asarray, found))
    with np.load(path) as found:
        return rows, [found[x] for x in sorted(found)]


def error(case, gradient, found, rows, exact):
    if gradient:
        ours, theirs = (
            np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in every])
            for every in (found, exact)
        )
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    ours, theirs = np.asarray(found[0], np.float64)[rows], np.asarray(exact[0])
    off = np.abs(ours - theirs).max(-1) / np.abs(theirs).max(-1).clip(min=1.0)
    return float(off.max())


def warm(case, dtype, gradient, quick):
    """A row for each way, and why others take no part."""
    calls, found, skipped = {}, {}, {}
    for name, way in WAYS.items():
        try:
            calls[name] = way(case, dtype, gradient)
            found[name] = calls[name]()
        except Skip as reason:
            calls.pop(name, None)
            skipped[name] = str(reason)
    least = in_turns(calls, 2.0 if quick else 30.0, 3 if quick else 40)
    rows, exact = reference(case, gradient)
    out = {}
    for name, seconds in least.items():
        out[name] = {"ms": 1e3 * seconds, "error": error(case, gradient, found[name], rows, exact)}
        if not gradient:
            out[name]["ns"] = 1e9 * seconds / float(np.sum(found[name][1]))
    return out, skipped


def small(size, dtype, quick):
    """Seconds by engine, of ensembles of chains of so many oscillators."""
    out = []
    u0 = np.sin(1.0 + np.arange(size))
    for n in (1, 4, 32) if quick else (1, 4, 32, 64, 1024, 100_000):
        # (As long as they can be waited for.)
        t1 = 2.0 if n * size <= 2**16 else 0.2
        p = np.linspace(0.5, 1.5, n)[:, None]
        case = Case(oscillators, np.tile(u0, (n, 1)), p, t1, None, tol=1e-6)
        if dtype == "float32":
            case = dataclasses.replace(case, tol=1e-4)
        for gradient in (False, True):
            calls = {name: WAYS[name](case, dtype, gradient) for name in ("compiled", "lanes")}
            for call in calls.values():
                call()
            out.append([n, size, dtype, gradient, in_turns(calls, 0.2 if quick else 2.0, 200)])
    return out


def populations(n, quick):
    """Seconds of gradients of Lotka-Volterra by way."""
    p = np.linspace(0.8, 1.2, n)[:, None] * np.array([1.5, 1.0, 1.0, 3.0])
    times = np.linspace(0.0, 10.0, 21)
    u0 = np.ones((n, 2))
    case = Case(lotka_volterra, u0, p, 10.0, None, tol=1e-6, times=times)
    calls = {x: WAYS[x](case, "float64", True) for x in ("compiled", "lanes", "diffrax")}
    for call in calls.values():
        call()
    return in_turns(calls, 1.0 if quick else 10.0, 300)


def first_call(name, case, dtype, gradient):
    """Seconds, what it takes to start JAX not among them."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))
    started = time.perf_counter()
    WAYS[name](case, dtype, gradient)()
    return time.perf_counter() - started


#
# Processes
#


def apart(request, core, caches=None):
    """What the worker says, in a process of its own, held to a core."""

    def hold():
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    names = ("JAX_COMPILATION_CACHE_DIR", "ENSEMBLEODE_CACHE_DIR")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment |= dict.fromkeys(names, "" if caches is None else caches)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, __file__, "--worker", json.dumps(request)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=hold
    )
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def work(kind, quick, dtype, *rest):
    jax.config.update("jax_enable_x64", dtype == "float64")
    if kind == "small":
        return small(rest[0], dtype, quick)
    if kind == "populations":
        return populations(rest[0], quick)
    name, gradient, *way = rest
    case = cases(quick)[name]
    if kind == "first":
        return first_call(way[0], case, dtype, gradient)
    return warm(case, dtype, gradient, quick)


def cold(options, core, dtype, name, gradient, row, way):
    """Seconds of its first call, and with caches on disk."""
    if way == "C++":
        case = cases(options.quick)[name]
        return {"first": cpp_library(case, dtype).seconds, "cached": None}
    request = ["first", options.quick, dtype, name, gradient, way]
    with tempfile.TemporaryDirectory() as folder:
        first = apart(request, core, folder)
        cached = apart(request, core, folder) if way in ("compiled", "lanes", "diffrax") else None
    return {"first": first, "cached": cached}


def show(name, dtype, gradient, rows, skipped):
    print(f"\n### {name}, {dtype}{', gradient' if gradient else ''}\n")
    print("| | ms | ns/step | to C++ | error | first, s | cached, s |\n|:---|" + "---:|" * 6)
    base = rows.get("C++", {}).get("ms")
    for way, row in rows.items():
        cells = [f"{row['ms']:.4g}", f"{row['ns']:.3g}" if "ns" in row else ""]
        cells += [f"{row['ms'] / base:.2f}" if base else "", f"{row['error']:.1e}"]
        cells += [f"{x:.2f}" if (x := row.get(k)) is not None else "" for k in ("first", "cached")]
        print(f"| {way} | {' | '.join(cells)} |")
    for way, reason in skipped.items():
        print(f"- without {way}: {reason}")
    sys.stdout.flush()


def small_tables(options, core):
    print("\n| n | size | dtype | | compiled, us | lanes, us | lanes / compiled |\n|" + "---|" * 7)
    found = []
    for size in (1, 3, 12) if options.quick else (1, 2, 3, 6, 12, 24, 40, 60):
        for dtype in ("float64", "float32"):
            for n, _, _, gradient, least in apart(["small", options.quick, dtype, size], core):
                ours, theirs = (1e6 * least[x] for x in ("compiled", "lanes"))
                cells = [n, size, dtype, "gradient" if gradient else "", f"{ours:.4g}"]
                cells += [f"{theirs:.4g}", f"{theirs / ours:.2f}"]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
                found.append([n, size, dtype, gradient, least])
    for n in (4, 32):
        least = apart(["populations", options.quick, "float64", n], core)
        each = ", ".join(f"{name} {1e6 * x:.4g} us" for name, x in least.items())
        print(f"\nGradients of {n} of Lotka-Volterra at 21 times: {each}", flush=True)
        found.append([n, "lotka-volterra", "float64", True, least])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a sixteenth of them, few turns")
    parser.add_argument("--only", default="", help="parts of names, such as lorenz-rk4,network")
    parser.add_argument("--small", action="store_true", help="the table of small ensembles")
    parser.add_argument("--no-cold", action="store_true", help="without first calls")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(*json.loads(options.worker))))
        return
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}")
    everything = {"machine": about, "tables": []}
    if options.small:
        everything["small"] = small_tables(options, core)
    chosen = {} if options.small else cases(options.quick)
    for name, case in chosen.items():
        if not any(part in name for part in options.only.split(",")):
            continue
        for dtype in case.dtypes:
            for gradient in (False, True) if case.has_gradient else (False,):
                rows, skipped = apart(["warm", options.quick, dtype, name, gradient], core)
                if not options.no_cold:
                    for way, row in rows.items():
                        row |= cold(options, core, dtype, name, gradient, row, way)
                show(name, dtype, gradient, rows, skipped)
                everything["tables"].append([name, dtype, gradient, rows])
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
