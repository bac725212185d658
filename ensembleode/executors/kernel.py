"""EnsembleGPUKernel: the compiled engine on GPUs; without a GPU, on one core of the CPU."""

import dataclasses
from typing import Any

from ..engines import Engine
from ..engines.compiled import gpu_engine
from ..engines.compiled.xla import launch
from ..ground.devices.placement import computes_on_nvidia
from ..ground.logs import log_once
from ..plan.plan import Outcome, Plan
from ..problem.ensemble import EnsembleGPUKernel
from ..running.job import Job
from .sharded import arrays, DevicesExecutor


@dataclasses.dataclass(frozen=True)
class KernelExecutor(DevicesExecutor):
    """The executor on these GPUs; without any, on the GPU where JAX computes. Where JAX computes on
    no GPU (`on_gpu` is false), the CPU solves, and refuses the same plans as a GPU."""

    on_gpu: bool = True
    how: str = "in one kernel"

    def check(self, plan: Plan) -> None:
        """**Raises:** `ValueError` for a plan that has no kernel; `KernelError` where kernels can't
        be compiled."""
        if reason := gpu_engine.refusal(plan):
            raise ValueError(f"EnsembleGPUKernel() {reason} Use EnsembleGPUArray() for it.")
        if self.on_gpu:
            launch.check()

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        job = job.replan(engine=gpu_engine.ENGINE) if self.on_gpu else job
        return super().run(job, indices, repeat)


def executor(ensemblealg: EnsembleGPUKernel, engine: Engine) -> KernelExecutor:
    """Raises `ValueError` when there are fewer GPUs than asked for."""
    if computes_on_nvidia():
        return KernelExecutor(arrays(ensemblealg, engine).devices)
    if ensemblealg.devices is not None:
        raise ValueError(
            f"EnsembleGPUKernel(devices={ensemblealg.devices}) names GPUs, and JAX computes on no "
            "NVIDIA GPU here: use eo.EnsembleThreads(), or eo.EnsembleGPUKernel() where it doesn't "
            "matter."
        )
    log_once(
        "EnsembleGPUKernel() finds no NVIDIA GPU that JAX computes on, so the trajectories are "
        "solved on one core of the CPU; eo.EnsembleThreads() takes all cores."
    )
    return KernelExecutor(on_gpu=False, how="on the CPU, for want of an NVIDIA GPU")
