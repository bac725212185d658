"""How far each way is from the limit of the hardware: the same ensembles on one core.

    python benchmarks/limits.py [--quick] [--only a,b,...] [--no-cold] [--json FILE]

The ensembles (`--only lorenz-rk4`, or part of a name) are Lorenz and a damped pendulum with fixed
steps of RK4; Lorenz, Van der Pol (even, where neighbours are alike, and shuffled), Lorenz 96 with
10, 20 and 40 components, a network 2 -> 50 -> 2 and a bubble (Keller and Miksis 1980, with the
constants of Hegedus et al., Ultrasonics Sonochemistry 67, 2020) with adaptive steps of Tsit5; and
the gradients of half the sum of squares of the ends with respect to all initial states and
parameters.

The contenders are `C++`, written by hand (limits.cpp, with g++ or $CXX, the best of 1, 2 and 4
registers of lanes), to which the ratios refer, and `C++ scalar`, the same without vectors; the
engine `compiled` in `jit`; `diffrax`, vmapped; `Numba`, a loop over the trajectories;
`heyoka`, Taylor's method in batches, which chooses its own steps, at 1e-9 if the steps of the
others are fixed. Contenders that are not installed are left out.

All contenders for an ensemble run in one process, held to one core, and take turns. The time is the
least CPU time, which other processes disturb less than the clock. `ns/step` is for one trajectory
and one attempted step, by each contender's own count of steps; in C++ a lane that has ended counts
as long as others go on. `error` is the largest error of the end states of a sample, relative to the
norm of each or to one; or that of the whole gradient; the reference is Vern9 at 1e-12 in float64.
`first` is a first call, in a new process without caches on disk, and `cached` one with these caches
(for C++ it is the time of the compiler).

limits_report.py writes tables and figures of the pages from the file of `--json`.
"""

import argparse
import ctypes
import dataclasses
import functools
import hashlib
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import by_diffrax, by_solve, gradient_error, imported, Skip
from common.cpp import library
from common.numba_loops import loop
from common.peers import heyoka_adaptive
from common.processes import apart, is_worker, last_core
from common.report import line, machine, PEERS, write_json
from common.tasks import sample
from common.timing import in_turns, timed
from limits_cases import cases

import ensembleode as eo
from ensembleode.engines.compiled.llvm.machine import host


SAMPLE = 32  # trajectories whose errors are measured
FOLDER = pathlib.Path(__file__).parent


#
# Ways: functions of a case, its dtype, and whether the gradient is wanted. `call()` gives the ends
# and the steps tried, or the gradients by `u0` and by `p`.
#


def by_engine(engine: str) -> Callable:
    def way(case, dtype, gradient):
        task, alg = case.task(dtype), eo.RK4() if case.dt else eo.Tsit5()
        solve = by_solve(task, alg=alg, engine=engine, maxiters=10**5)
        return in_jit(solve, task, gradient)

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


def diffrax_by_hand(case, dtype, gradient):
    task, solver = case.task(dtype), RK4() if case.dt else diffrax.Tsit5()
    return in_jit(by_diffrax(task, solver, 4096 if gradient else 10**5), task, gradient)


def in_jit(solve, task, gradient):
    inputs = task.inputs()

    def loss(u0, p):
        return 0.5 * jnp.sum(solve(u0, p)[0] ** 2)

    if gradient:
        run = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return lambda: jax.block_until_ready(run(*inputs))
    run = jax.jit(solve)

    def call():
        u, tried = jax.block_until_ready(run(*inputs))
        return u.reshape(task.u0.shape), tried

    return call


def cpp_library(case, dtype, *, scalar: bool = False) -> ctypes.CDLL:
    if case.cpp is None:
        raise Skip("not written")
    single, scalars = ["SINGLE"] * (dtype == "float32"), ["SCALAR"] * scalar
    defines = [f"FIELD={case.cpp}", *single, *scalars]
    return library(FOLDER / "limits.cpp", FOLDER / "limits_fields.hpp", defines=defines)


def by_cpp(case, dtype, gradient, *, scalar: bool = False):
    if gradient and not case.has_gradient:
        raise Skip("not written")
    library = cpp_library(case, dtype, scalar=scalar)
    library.solve.restype = ctypes.c_long
    task = case.task(dtype)
    u0, p = task.u0, task.p
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
    seconds = least_seconds({m: functools.partial(run, m) for m in (1, 2, 4)}, 4)
    best = min(seconds, key=seconds.__getitem__)
    return lambda: (run(best), out)[::-1]


def by_scalar_cpp(case, dtype, gradient):
    """The same, one trajectory at a time, with the functions of libm."""
    if gradient:
        raise Skip("not measured")
    return by_cpp(case, dtype, gradient, scalar=True)


def by_numba(case, dtype, gradient):
    if gradient:
        raise Skip("not written")
    solve, task = loop(imported("numba"), case, np.dtype(dtype).type), case.task(dtype)
    return lambda: solve(task.u0, task.p[None] if case.shares_p else task.p)


def by_heyoka(case, dtype, gradient):
    if gradient:
        raise Skip("not written")
    tol = (case.tol or 1e-9) if dtype == "float64" else 1e-6
    return heyoka_adaptive(case.task(dtype), case.f, tol)


WAYS = {
    "C++": by_cpp,
    "C++ scalar": by_scalar_cpp,
    "compiled": by_engine("compiled"),
    "diffrax": diffrax_by_hand,
    "Numba": by_numba,
    "heyoka": by_heyoka,
}


#
# Measuring
#


def least_seconds(calls, most, **options) -> dict[str, float]:
    spent = in_turns(calls, most, clock=time.process_time, **options)
    return {name: min(seconds) for name, seconds in spent.items()}


def reference(case, gradient):
    """Which trajectories are compared, and what they should have; kept in the temporary folder."""
    rows = sample(case.n, SAMPLE)
    task = case.task("float64").only(np.arange(case.n) if gradient else rows)
    task = dataclasses.replace(task, dt=None, rtol=1e-12, atol=1e-12)
    sources = [(FOLDER / name).read_bytes() for name in ("limits_cases.py", "common/tasks.py")]
    source = b"".join([*sources, task.u0.tobytes(), task.p.tobytes()])
    key = hashlib.sha256(
        source + f"{type(case.f).__name__} {case.t1} {gradient}".encode()
    ).hexdigest()[:16]
    path = pathlib.Path(tempfile.gettempdir()) / f"limits-{key}.npz"
    if not path.exists():
        with jax.enable_x64(True):
            solve = by_solve(task, alg=eo.Vern9(), engine="compiled", maxiters=10**5)
            found = in_jit(solve, task, gradient)()
        np.savez(path, *map(np.asarray, found))
    with np.load(path) as found:
        return rows, [found[x] for x in sorted(found)]


def error(gradient, found, rows, exact):
    if gradient:
        return gradient_error(found, exact)
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
    budget, most = (2.0, 3) if quick else (30.0, 40)
    least = least_seconds(calls, most, least=2, budget=budget)
    rows, exact = reference(case, gradient)
    out = {}
    for name, seconds in least.items():
        out[name] = {"ms": 1e3 * seconds, "error": error(gradient, found[name], rows, exact)}
        if not gradient:
            out[name]["ns"] = 1e9 * seconds / float(np.sum(found[name][1]))
    return out, skipped


def first_call(name, case, dtype, gradient):
    """Seconds, what it takes to start JAX not among them."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))
    return timed(lambda: WAYS[name](case, dtype, gradient)())[0]


#
# Processes
#


def worker(request, core, caches=""):
    names = ("JAX_COMPILATION_CACHE_DIR", "ENSEMBLEODE_CACHE_DIR")
    environment = dict.fromkeys(names, caches) | {"JAX_PLATFORMS": "cpu"}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return apart(__file__, request, cores=[core], environment=environment)


def work(kind, quick, dtype, *rest):
    jax.config.update("jax_enable_x64", dtype == "float64")
    name, gradient, *way = rest
    case = cases(quick)[name]
    if kind == "first":
        return first_call(way[0], case, dtype, gradient)
    return warm(case, dtype, gradient, quick)


def cold(options, core, dtype, name, gradient, row, way):
    """Seconds of its first call, and with caches on disk."""
    if way.startswith("C++"):
        library = cpp_library(cases(options.quick)[name], dtype, scalar=way != "C++")
        return {"first": library.seconds, "cached": None}
    request = ["first", options.quick, dtype, name, gradient, way]
    with tempfile.TemporaryDirectory() as folder:
        first = worker(request, core, folder)
        cached = worker(request, core, folder) if way in ("compiled", "diffrax") else None
    return {"first": first, "cached": cached}


def show(name, dtype, gradient, rows, skipped):
    print(f"\n### {name}, {dtype}{', gradient' if gradient else ''}\n")
    print("| | ms | ns/step | to C++ | error | first, s | cached, s |\n|:---|" + "---:|" * 6)
    base = rows.get("C++", {}).get("ms")
    for way, row in rows.items():
        cells = [f"{row['ms']:.4g}", f"{row['ns']:.3g}" if "ns" in row else ""]
        cells += [f"{row['ms'] / base:.2f}" if base else "", f"{row['error']:.1e}"]
        cells += [f"{x:.2f}" if (x := row.get(k)) is not None else "" for k in ("first", "cached")]
        print(line([way, *cells]))
    for way, reason in skipped.items():
        print(f"- without {way}: {reason}")
    sys.stdout.flush()


def main():
    if is_worker(work):
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a sixteenth of them, few turns")
    parser.add_argument("--only", default="", help="parts of names, such as lorenz-rk4,network")
    parser.add_argument("--no-cold", action="store_true", help="without first calls")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    core, about = last_core(), machine(*PEERS)
    about["vectors"] = {64: "AVX-512", 32: "AVX2"}.get(host().vector_bytes, "narrow vectors")
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}")
    everything = {"machine": about, "quick": options.quick, "tables": []}
    for name, case in cases(options.quick).items():
        if not any(part in name for part in options.only.split(",")):
            continue
        for dtype in case.dtypes:
            for gradient in (False, True) if case.has_gradient else (False,):
                rows, skipped = worker(["warm", options.quick, dtype, name, gradient], core)
                if not options.no_cold:
                    for way, row in rows.items():
                        row |= cold(options, core, dtype, name, gradient, row, way)
                show(name, dtype, gradient, rows, skipped)
                everything["tables"].append([name, dtype, gradient, rows])
    if options.json:
        write_json(options.json, everything)


if __name__ == "__main__":
    main()
