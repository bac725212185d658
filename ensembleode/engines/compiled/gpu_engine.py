"""The compiled engine on NVIDIA GPUs, with a thread for each trajectory: the engine of
EnsembleGPUKernel.

The code is that of a CPU's kernel with one lane, compiled to PTX. What differs is written where
`on_gpu` is asked: the operands and the loop over trajectories in `kernel.py`, the order of numbers
in memory in `steps/layout.py`, whether lanes wait in `loop/loop.py`, sums of cotangents in
`steps/description.py`, the memory and the call in `solves.py`, which enter by `xla/entry.py`; and
`is_gpu` in `llvm/`.
"""

from typing import Any

from ...fields import parameters_of
from ...plan.plan import Plan
from ...plan.trajectory_numbers import TrajectoryNumbers
from ..derivatives.flow import inexact_of
from . import CompiledEngine, kernel
from .solves import described
from .xla.launch import PtxKernel


class GpuEngine(CompiledEngine):
    """The compiled engine with a GPU thread for each trajectory."""

    on_gpu = True


ENGINE = GpuEngine()

# The largest number of constants and parameters of a field. Each is a parameter of the kernels, of
# eight bytes, beside a dozen others; before PTX 8.1, NVIDIA's assemblers accept 4,352 bytes of
# parameters. (XLA takes any number: `PackKernelArgs` in xla/stream_executor/kernel_args.h.)
_MOST_ARRAYS = 500


def refusal(plan: Plan) -> str | None:
    """Why there is no kernel for a plan of the compiled engine; None where there is one."""
    field: Any = plan.field
    if reason := ENGINE.unreadable(field, plan.state, plan.batched):
        return f"runs what the compiled engine does: {reason}"
    if (arrays := len(parameters_of(field))) > _MOST_ARRAYS:
        return (
            f"takes at most {_MOST_ARRAYS} arrays (each leaf of p, each array that f closes over, "
            f"and one for the numbers written in f), and these are {arrays}: put several into one."
        )
    return None


def kernels(plan: Plan, lanes: TrajectoryNumbers) -> dict[str, PtxKernel | None]:
    """Each kernel by its name; None for a kernel that is not needed.

    **Arguments:** `lanes`: the numbers of the trajectories, which may be abstract values.
    """
    d = described(plan, lanes, 1, wanted=tuple(inexact_of(plan.field)))
    found = {"solve": PtxKernel(kernel.solving(d)[0], "solve", *kernel.pointers(d, "solve"))}
    if plan.method.value.direction != "reverse":
        return {**found, "pull_back": None}
    name, text = "pull_back", kernel.pulling_back(d).text
    return {**found, name: PtxKernel(text, name, *kernel.pointers(d, name))}
