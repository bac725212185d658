"""How much a solve of gpu_ensembles.py or gpu_check.py computes, and how much a GPU could."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common.tasks import lorenz
from gpu_cases import Case, Mode, TIMES

import ensembleode as eo


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
COUNTED = {"add": 1, "sub": 1, "mul": 1, "div": 1, "neg": 1, "square": 1, "add_any": 1}
# Functions: exponentials like those of step-size control, and what is around them.
COUNTED |= {"exp": 17, "log": 17, "tanh": 20, "logistic": 20, "sin": 17, "cos": 17}


def peak_of(name: str) -> Peak | None:
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def flops_of(f: Callable, *args: Any) -> int:
    """Additions, multiplications and divisions in the jaxpr of a function, and functions by what
    they take; one that moves or compares numbers counts for nothing."""
    return _flops_of(jax.make_jaxpr(f)(*args).jaxpr)


def _flops_of(jaxpr: Any) -> int:
    return sum(map(_flops_of_equation, jaxpr.eqns))


def _flops_of_equation(eqn: Any) -> int:
    size = math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else 0
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    if eqn.primitive.name == "integer_pow":
        return size * (abs(eqn.params["y"]) - 1)
    inner = (eqn.params.get(name) for name in ("jaxpr", "call_jaxpr"))
    within = sum(_flops_of(getattr(x, "jaxpr", x)) for x in inner if x is not None)
    return within + size * COUNTED.get(eqn.primitive.name, 0)


def flops_of_step(mode: Mode) -> int:
    """Operations of a step of Lorenz that is tried."""
    tableau = eo.Tsit5().tableau
    return explicit_step(tableau, lorenz, jnp.ones(3), jnp.ones(()), adaptive=mode.adaptive)


def explicit_step(tableau: Any, f: Callable, u: Any, p: Any, *, adaptive: bool = True) -> int:
    """Operations of a step that is tried, where an FMA is two, as in the peak.

    Of each stage after the first (which is the last of the step before): the sum of its `m` terms
    and the state, `y + h (a1 k1 + ... + am km)`: `2 m + 1` for each component; and the field. If
    adaptive: the error estimate, `2 m` for each; its norm, 5 for each (scale, divide, square, add)
    and 2; and the controller. Those in single precision count like others in a float64 solve.
    """
    n, field = len(u), flops_of(f, u, p, 0.0)
    flops = sum(n * (2 * _terms(row) + 1) + field for row in tableau.a)
    if not adaptive:
        return flops + 3  # time
    return flops + n * 2 * _terms(tableau.error or ()) + n * 5 + 2 + CONTROL


def rosenbrock_step(method: Any, f: Callable, u: Any, p: Any) -> int:
    """Operations of a step of a Rosenbrock method that is tried: the Jacobian, as if it were dense;
    the matrix of the step and its LU; of each stage the state, the field, the coupling of the
    stages and two triangular solves; and the control of an adaptive step."""
    n, field = len(u), flops_of(f, u, p, 0.0)
    flops = flops_of(jax.jacfwd(f), u, p, 0.0) + n * n + n + 2 * n**3 // 3
    for state, coupling in zip(((), *method.a), ((), *method.coupling), strict=True):
        flops += field + n * (2 * _terms(state) + 2 * _terms(coupling) + 3) + 2 * n * n
    return flops + n * 5 + 2 + CONTROL


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
    return fractions_of(flops, bytes_moved(case), seconds, case.dtype, peak)


def fractions_of(
    flops: float, moved: int, seconds: float, dtype: str, peak: Peak
) -> dict[str, float]:
    """Of the peaks."""
    return {
        "flops_fraction": flops / seconds / getattr(peak, dtype),
        "memory_fraction": moved / seconds / peak.memory,
    }
