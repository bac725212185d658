"""EnsembleGPUKernel: the lanes engine's method in one kernel; without a GPU, that engine."""

import dataclasses
from typing import Any

import jax

from ..engines import kernel
from ..engines.kernel import launch
from ..ensemble import EnsembleGPUKernel
from ..logs import log_once
from ..plan import Plan
from .job import Job, Outcome
from .sharded import arrays, Devices


@dataclasses.dataclass(frozen=True)
class Kernels(Devices):
    """The executor on these GPUs; none stands for the one where JAX computes.

    Without a GPU (`on_gpu`) it is that of arrays, with the same things refused.
    """

    on_gpu: bool = True

    @property
    def how(self) -> str:
        """What a solution says of it."""
        return "in one kernel" if self.on_gpu else "as arrays, for want of an NVIDIA GPU"

    def check(self, plan: Plan) -> None:
        """
        **Raises:** `ValueError` for what has no kernel; `KernelError` where kernels can't be
        compiled.
        """
        if reason := kernel.refusal(plan):
            raise ValueError(f"EnsembleGPUKernel() {reason} Use EnsembleGPUArray() for it.")
        if self.on_gpu:
            launch.check()

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        return super().run(job.replan(engine=kernel) if self.on_gpu else job, indices, repeat)


def executor(ensemblealg: EnsembleGPUKernel) -> Kernels:
    """
    **Raises:** `ValueError` when there are fewer GPUs than asked for.
    """
    if computes_on_gpu():
        return Kernels(arrays(ensemblealg).devices)
    log_once(
        "EnsembleGPUKernel() finds no NVIDIA GPU that JAX computes on, so the lanes engine runs "
        "instead, as arrays on the CPU: the same solution, slower."
    )
    return Kernels(on_gpu=False)


def computes_on_gpu() -> bool:
    """Whether JAX's default device is an NVIDIA GPU."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    device: Any = chosen if isinstance(chosen, jax.Device) else jax.devices()[0]
    return device.platform == "gpu" and "rocm" not in device.client.platform_version.lower()
