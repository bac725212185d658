"""Elementary functions of this library, of XLA and of the C library, in accuracy and in time.

    python benchmarks/functions.py [--points 20000] [--width 16] [names ...]

The table has, for every function and precision, the greatest error on the same points, in units in
the last place (`-` if there is no such function), and nanoseconds for one value on one core, in
cache.
"""

import argparse
import functools
import math
import os
import pathlib
import sys


os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from common.report import line
from common.timing import best_of
from jax import lax

from ensembleode.engines.compiled.llvm.functions import FUNCTIONS
from tests.engines.compiled.harness import OnArrays
from tests.engines.compiled.references import errors, NAMES, points


VALUES = 1 << 12  # timed at once, and sixteen times as many: calls cost the same
REPEATS = 20

LIBRARY = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atan2": np.arctan2, "atanh": np.arctanh, "cbrt": np.cbrt, "cos": np.cos,
    "cosh": np.cosh, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log,
    "log10": np.log10, "log1p": np.log1p, "log2": np.log2, "pow": np.power, "sin": np.sin,
    "sinh": np.sinh, "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh,
    # (Of doubles only, one value after the other.)
    "erf": math.erf, "erfc": math.erfc, "lgamma": math.lgamma,
}  # fmt: skip


def of_xla(name: str):
    function = {"log2": jnp.log2, "log10": jnp.log10}.get(name) or getattr(lax, name)
    return jax.jit(function)


def of_library(name: str, dtype):
    function = LIBRARY.get(name)
    if function is None or isinstance(function, np.ufunc):
        return function
    if dtype == np.float32:
        return None
    return lambda x: np.array([function(y) for y in x])


def best_time(run, args: list) -> float:
    """In nanoseconds a value, without what a call costs: the difference of two lengths."""
    times = []
    for repeats in (1, 16):
        tiled = [np.tile(x, repeats) for x in args]
        tiled = [jnp.asarray(x) for x in tiled] if isinstance(args[0], jax.Array) else tiled
        run(*tiled)
        times.append(best_of(functools.partial(run, *tiled), REPEATS)[0])
    return (times[1] - times[0]) / (15 * VALUES) * 1e9


def to_time(name: str, args, n: int) -> list[np.ndarray]:
    """Moderate arguments, in random order: what fields are evaluated at."""
    rng = np.random.default_rng(0)
    if name in ("sin", "cos", "tan"):
        return [rng.uniform(-30, 30, n).astype(args[0].dtype)]
    moderate = np.logical_and.reduce([(abs(x) > 1e-3) & (abs(x) < 30) for x in args])
    chosen = rng.choice(np.flatnonzero(moderate), n)
    return [np.ascontiguousarray(x[chosen]) for x in args]


def row(name: str, dtype, n_points: int, width: int) -> list[float]:
    args = points(name, dtype, n_points)
    timed = to_time(name, args, VALUES)
    ours = OnArrays(FUNCTIONS[name], dtype, len(args), width)
    out = np.zeros(16 * VALUES, dtype)
    found = [errors(name, args, ours(*args)).max()]
    times = [best_time(lambda *x: ours.code.run([*x, out], len(x[0])), timed)]

    xla = of_xla(name)
    found.append(errors(name, args, np.asarray(xla(*args))).max())
    many = [jnp.asarray(x) for x in timed]
    times.append(best_time(xla, many))

    library = of_library(name, dtype)
    if library is None:
        return [found[0], found[1], math.nan, *times, math.nan]
    with np.errstate(all="ignore"):
        found.append(errors(name, args, np.asarray(library(*args))).max())
        return [*found, *times, best_time(library, timed)]


def written(x: float) -> str:
    if math.isnan(x):
        return "-"
    return f"{x:.2f}" if x < 1e3 else f"{x:.0e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=16)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("| function | ulp: ours | XLA | libm | ns: ours | XLA | libm |\n" + "|---" * 7 + "|")
    for dtype in (np.dtype(np.float64), np.dtype(np.float32)):
        for name in options.names:
            n = 2_000 if name in ("digamma", "erf", "erfc", "erf_inv", "lgamma") else options.points
            cells = map(written, row(name, dtype, n, options.width))
            print(line([f"{name} {dtype}", *cells]), flush=True)


if __name__ == "__main__":
    main()
