"""The places where trajectories may run: on JAX's accelerator or on the CPU beside it, also if the
user gives no ensemble algorithm."""

import contextlib
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from ..engines import Engine
from ..engines.compiled import CompiledEngine
from ..engines.compiled.xla.launch import KernelError
from ..engines.diffrax import DiffraxEngine
from ..ground.devices import placement
from ..plan.plan import Plan
from ..problem.ensemble import (
    ClusterAlgorithm,
    EnsembleAlgorithm,
    EnsembleGPUArray,
    EnsembleGPUKernel,
    EnsembleSerial,
    EnsembleThreads,
)
from ..running.executor import Executor
from ..solution.solution import EngineChoice
from ..tracing.program import being_staged


# The algorithms that run on the CPU, even if JAX computes on an accelerator.
_ON_CPU = EnsembleSerial | EnsembleThreads | ClusterAlgorithm


class NotHereError(ValueError):
    """A place that the user did not ask for can't run the solve."""


class Place(NamedTuple):
    """An ensemble algorithm, and where it runs.

    - `algorithm`: the ensemble algorithm.
    - `on_cpu`: whether it runs on the CPU although JAX computes on an accelerator.
    - `is_given`: whether the user asked for it.
    - `if_compiled`: whether it is only for solves by the compiled engine.
    """

    algorithm: EnsembleAlgorithm
    on_cpu: bool = False
    is_given: bool = False
    if_compiled: bool = False

    @property
    def asked(self) -> EnsembleAlgorithm | None:
        """The algorithm for which an engine is chosen; None if any algorithm will do."""
        of_devices = isinstance(self.algorithm, EnsembleGPUKernel | EnsembleGPUArray)
        return self.algorithm if self.is_given or of_devices else None

    @property
    def how(self) -> str:
        """What solutions say about the place."""
        return "on the CPU" if self.on_cpu else ""

    def computing(self) -> contextlib.AbstractContextManager:
        """A context within which JAX computes there; raises `NoCpuError` where it has no CPU."""
        return placement.on_cpu() if self.on_cpu else contextlib.nullcontext()

    def brought_home(self, solution: Any) -> Any:
        """A solution that was computed in this place, moved to where JAX computes by default."""
        return placement.brought_home(solution) if self.on_cpu and not being_staged() else solution

    def check(self, executor: Executor, plan: Plan, choice: EngineChoice) -> None:
        """Raises `NotHereError` where the next place is to be tried, and the errors of an algorithm
        that was asked for and can't carry out the plan. `choice`: the plan's engine, and why it is
        this one."""
        if self.if_compiled and not isinstance(plan.engine, CompiledEngine):
            asked_for = f"engine={choice.name!r} is {choice.reason}"
            raise NotHereError(dict(choice.refused).get("compiled", asked_for))
        try:
            executor.check(plan)
        except (ValueError, KernelError) as e:
            if self.is_given:
                raise
            raise NotHereError(str(e)) from e

    def check_staged(self, engine: Engine) -> None:
        """**Raises:** `ValueError` for a solve inside of `jit` that can be no part of the program,
        since that is for an accelerator."""
        in_process = isinstance(self.algorithm, EnsembleSerial | EnsembleThreads)
        if self.on_cpu and in_process and being_staged() and isinstance(engine, DiffraxEngine):
            name = type(self.algorithm).__name__
            there = placement.platform_of(jax.local_devices()[0])
            raise ValueError(
                f"{name}() runs on the CPU, and inside of this jit JAX computes on {there}, from "
                f"where it can call kernels on the CPU, but no programs of the {engine.name} "
                "engine: use EnsembleGPUArray(), or jit for the CPU, with "
                "jax.default_device('cpu')."
            )


def brought_here(numbers: PyTree) -> PyTree:
    """The numbers of a solve, which may be committed elsewhere, where JAX computes now."""
    # (Checked last, as `being_staged` takes longer, and there is mostly no accelerator.)
    if not placement.has_accelerator() or being_staged():
        return numbers
    return placement.on_this_platform(numbers)


def places(ensemblealg: EnsembleAlgorithm | None, *, alone: bool, in_julia: bool) -> list[Place]:
    """The places for an ensemble algorithm, or without one, of which the first that can run a solve
    does so. `alone`: whether a single problem is solved; `in_julia`: whether in Julia, which has
    devices of its own."""
    elsewhere = placement.platform() != "cpu"
    if ensemblealg is not None:
        return [Place(ensemblealg, elsewhere and isinstance(ensemblealg, _ON_CPU), is_given=True)]
    if in_julia or not elsewhere:
        return [Place(EnsembleSerial() if alone else EnsembleThreads())]
    if alone:
        return [Place(EnsembleSerial(), on_cpu=True, if_compiled=True), Place(EnsembleSerial())]
    kernels = (
        [Place(EnsembleGPUKernel(), if_compiled=True)] if placement.computes_on_nvidia() else []
    )
    return [*kernels, Place(EnsembleGPUArray()), Place(EnsembleThreads(), on_cpu=True)]
