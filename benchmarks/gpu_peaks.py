"""How much a solve of gpu_ensembles.py computes, and how much a GPU could."""

import math
from collections.abc import Iterable
from typing import NamedTuple

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
