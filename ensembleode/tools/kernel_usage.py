"""The registers and memory that the kernels of a solve take on a GPU; no GPU is needed."""

import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from ..engines.compiled import gpu_engine
from ..engines.compiled.llvm import machine
from ..engines.compiled.xla import launch, ptxas
from ..engines.compiled.xla.entry import entry_name
from ..engines.compiled.xla.launch import BLOCK
from ..engines.compiled.xla.ptxas import Usage
from ..engines.job import job_for
from ..problem.ensemble import EnsembleGPUKernel
from ..problem.options import among
from ..problem.problem import EnsembleProblem, ODEProblem
from ..problem.sensitivity import SensitivityAlgorithm
from ..running.job import integers


# The registers and threads of a multiprocessor since compute capability 7.0, and the most registers
# of a thread.
_REGISTERS, _THREADS, _MOST = 65536, 2048, 255
# The bytes that may be spilled at practically no cost.
_FEW = 64


class KernelReport(NamedTuple):
    """The result of [`kernel_report`][ensembleode.kernel_report].

    - `arch`: the architecture compiled for, such as "sm_90".
    - `solve`, `pull_back`: what a thread takes in the kernel that solves, and in the one that pulls
        cotangents back (None with `ForwardDiffSensitivity()`): the number of 32-bit `registers`,
        and the bytes of `spill_stores`, `spill_loads` and of `stack`, the memory for what is not in
        registers.
    """

    arch: str
    solve: Usage
    pull_back: Usage | None

    @property
    def kernels(self) -> dict[str, Usage]:
        """The kernels that exist, by name."""
        found = {"solve": self.solve, "pull_back": self.pull_back}
        return {name: usage for name, usage in found.items() if usage is not None}

    def __str__(self) -> str:
        lines = [f"{self.arch:12} registers  stack (B)  spilled (B)  threads at a time"]
        for name, usage in self.kernels.items():
            lines.append(
                f"{name:12} {usage.registers:9}  {usage.stack:9}  {usage.spill_stores:11}  "
                f"{resident(usage)} of {_THREADS} a multiprocessor"
            )
        return "\n".join(lines)


def resident(usage: Usage) -> int:
    """The number of threads of a kernel that a multiprocessor runs at a time, as far as registers
    allow."""
    # Registers are allocated to each thread in units of eight.
    each = -(-max(usage.registers, 1) // 8) * 8
    blocks = min(_REGISTERS // (each * BLOCK), _THREADS // BLOCK)
    return blocks * BLOCK


def kernel_report(
    prob: ODEProblem | EnsembleProblem,
    alg: Any = None,
    *,
    saveat: Any = None,
    save_start: bool | None = None,
    save_end: bool | None = None,
    save_everystep: bool | None = None,
    save_idxs: Any = None,
    adaptive: bool | None = None,
    dt: Any = None,
    maxiters: int | None = None,
    sensealg: SensitivityAlgorithm | None = None,
    arch: str | None = None,
) -> KernelReport:
    """Compile the kernels that [`EnsembleGPUKernel`][ensembleode.EnsembleGPUKernel] would run, and
    report what they take. No GPU is needed, but ptxas, NVIDIA's assembler
    (`pip install nvidia-cuda-nvcc`).

    A kernel that keeps everything in registers, and needs few of them, is fast: the fewer
    registers, the more threads hide each other's latency. If a kernel spills, measure whether
    `float32` or EnsembleGPUArray is faster.

    **Arguments:**

    - `prob`, `alg` and the options: those of [`solve`][ensembleode.solve]. It matters which
        parameters differ between trajectories, so pass the ensemble.
    - `arch`: the architecture, such as "sm_80" (A100), "sm_90" (H100, H200) or "sm_100" (B200); by
        default that of this machine's GPU, or else "sm_90".

    **Returns:** a [`KernelReport`][ensembleode.KernelReport].

    **Raises:** `ValueError` for a problem or option that has no kernel, naming it; `PtxasError`
    without ptxas.

    **Warns** where more than 64 bytes are spilled.
    """
    options = among(locals())
    ens = EnsembleProblem(prob) if isinstance(prob, ODEProblem) else prob
    about = ens, options, jax.random.key(0), 2, "auto", alg, EnsembleGPUKernel()
    job, _ = job_for(*about, is_given=True)
    if reason := gpu_engine.refusal(job.plan):
        raise ValueError(f"EnsembleGPUKernel() {reason}")
    job = job.replan(engine=gpu_engine.ENGINE)
    lanes = jax.eval_shape(lambda: job.trajectories.lanes(integers(np.arange(2)), 1))
    if arch is None:
        devices = launch.cuda_devices()
        arch = launch.arch_of(*devices) if devices else "sm_90"
    arch = machine.gpu(arch).name
    usages: Any = dict.fromkeys(("solve", "pull_back"))
    for name, kernel in gpu_engine.kernels(job.plan, lanes).items():
        if kernel is not None:
            usages[name] = ptxas.usage(launch.ptx_of(kernel, arch), arch)[entry_name(kernel.name)]
    report = KernelReport(arch, **usages)
    for name, usage in report.kernels.items():
        if usage.spill_stores > _FEW:
            warnings.warn(
                f"the kernel {name!r} spills {usage.spill_stores:,} bytes a thread, as it needs "
                f"more registers than the {_MOST} that there are: EnsembleGPUArray() may be "
                "faster.",
                RuntimeWarning,
                stacklevel=2,
            )
    return report
