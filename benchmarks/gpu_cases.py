"""The cases of gpu_ensembles.py, and in which order they are run."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from common.tasks import lorenz_task, Task


TIMES = np.linspace(0.0, 1.0, 11)
FLOAT32, FLOAT64 = "float32", "float64"
BOTH = (FLOAT32, FLOAT64)

KERNEL, ARRAYS, DIFFRAX = "kernel", "arrays", "diffrax"
WARP, CUDA, TORCH = "gradsolve Warp", "gradsolve CUDA", "torchdiffeq"
NAMES = (KERNEL, ARRAYS, DIFFRAX, WARP, CUDA, TORCH)


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
    def task(self) -> Task:
        return task_of(self)


@functools.lru_cache(2)
def task_of(case: Case) -> Task:
    method = case.method
    times = TIMES.astype(case.dtype) if method.saves else None
    options = {"dt": method.dt, "rtol": method.rtol, "atol": method.atol, "times": times}
    return lorenz_task(case.n, case.dtype, 1.0, **options)


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
        ((KERNEL, ARRAYS, DIFFRAX), (TARGET,), (FLOAT32,), sizes.promised),
        ((WARP, CUDA), (TARGET,), (FLOAT32,), sizes.promised),
        ((KERNEL,), solves, BOTH, (main,)),
        ((KERNEL, ARRAYS, DIFFRAX), (GRADIENT,), (FLOAT32,), sizes.gradients),
        ((TORCH,), ("fixed", TARGET), (FLOAT32,), (small, main)),
        ((ARRAYS, DIFFRAX), ("fixed",), (FLOAT32,), (small, main)),
        ((KERNEL, ARRAYS, DIFFRAX, WARP, CUDA), (TARGET,), (FLOAT64,), (small, main, large)),
        ((KERNEL,), ("fixed", TARGET), BOTH, sizes.every),
        ((ARRAYS, DIFFRAX), solves, (FLOAT32,), (main,)),
        ((KERNEL, ARRAYS, DIFFRAX), (GRADIENT,), (FLOAT64,), sizes.gradients),
        ((KERNEL,), solves, BOTH, sizes.every),
        ((DIFFRAX, WARP, CUDA), solves, (FLOAT32,), sizes.every),
        (NAMES, solves, BOTH, sizes.every),
    ]
    order: dict[tuple[str, Case], None] = {}
    for names, modes, dtypes, exponents in blocks:
        # (All contenders of a case one after the other: as alike as can be.)
        for mode, dtype, exponent, name in itertools.product(modes, dtypes, exponents, names):
            order[name, Case(mode, dtype, 2**exponent)] = None
    return list(order)
