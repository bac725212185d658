"""The whole solve of each trajectory in one GPU kernel: what EnsembleGPUKernel runs on.

The lanes engine's method for each thread of a kernel: the field's jaxpr becomes C++, around which
the time loop is the same as that engine's, and its tableaux and constants are the same objects.

- `source.py`: the field as C++; `numbers.py`: where a trajectory's numbers lie.
- `generate.py`: the source of a kernel, around `primitives.cuh`, `integrate.cuh` (the time loop),
    `forward.cuh` (what it saves), `gradient.cuh` and `backward.cuh` (record and replay).
- `nvrtc.py`: source to PTX; `launch.py`: PTX to an operation of XLA.
- `calls.py`: the kernels as functions of arrays; `derivatives.py`: made differentiable.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...plan import Plan, Result
from ...trajectories import Lane
from .. import lanes as _lanes
from ..rates import with_rates
from ..results import with_times
from .calls import Setup
from .derivatives import solved
from .generate import pulling_back, solving


name = "kernel"
chunked = True
integrate = _lanes.integrate
width = _lanes.width


def refusal(plan: Plan) -> str | None:
    """Why this engine can't solve a plan of the lanes engine's; None when it can."""
    if plan.engine is not _lanes:
        return f"runs the explicit methods of the lanes engine, and this is {plan.engine.name!r}."
    solver = plan.method.value
    if solver.direction == "reverse" and solver.adjoint != _lanes.default_sensealg:
        return (
            f"differentiates by {_lanes.default_sensealg}() or ForwardDiffSensitivity(), not by "
            f"{solver.adjoint}()."
        )
    return None


def sources(plan: Plan, lanes: Lane) -> dict[str, str | None]:
    """The source of each kernel, by its name; None for one that is not needed.

    **Arguments:** `lanes`: the numbers of trajectories, which may be abstract.
    """
    size = math.prod(plan.state.shape)
    d = Setup(plan, size, 1).description(lanes)
    in_reverse = plan.method.value.direction == "reverse"
    return {"solve": solving(d), "pull_back": pulling_back(d) if in_reverse else None}


def solve_trajectories(plan: Plan, lanes: Lane, n: int, mask: Any = None) -> Result:
    """Solve `n` trajectories in one launch."""
    mask = np.ones(n, bool) if mask is None else mask
    result = solved(plan, lanes, n, jnp.asarray(mask))
    return with_rates(plan, lanes, with_times(plan, lanes, result))
