"""The names and options of our solvers and ensemble algorithms in Julia."""

from collections.abc import Callable
from typing import Any

from ...core.plan import Plan
from ...ensemble import (
    EnsembleAlgorithm,
    EnsembleDistributed,
    EnsembleGPUArray,
    EnsembleGPUKernel,
    EnsembleSerial,
    EnsembleSplitThreads,
    EnsembleThreads,
)
from ...ground import cpu_devices
from ...solvers import JuliaAlg, ODESolver
from ...solvers.auto import AutoSwitch
from ...solvers.controllers import AbstractController, IController, PIController, PIDController
from ...solvers.julia_alg import described, Description, Val
from ...solvers.norms import MaxNorm, RMSNorm
from . import environment


_OTHER_NAMES = {"Bosh3": "BS3", "Dopri5": "DP5"}

# The name of an ensemble algorithm, and its options.
Place = tuple[str, tuple[tuple[str, Any], ...]]
SERIAL: Place = ("EnsembleSerial", ())


def description(alg: ODESolver) -> Description:
    if isinstance(alg, JuliaAlg):
        return alg.description
    name = type(alg).__name__
    if isinstance(alg, AutoSwitch):
        stiff = described(type(alg.stiff).__name__)
        return described(name)._replace(arguments=(stiff,), options=tuple(alg.changed.items()))
    return described(_OTHER_NAMES.get(name, name))


def as_table(method: Description) -> dict[str, Any]:
    """The method's table in a request."""
    name, package, arguments, options = method
    return {
        "name": name,
        "package": package,
        "arguments": [_as_value(x) for x in arguments],
        "options": {k: _as_value(x) for k, x in options},
    }


def control_refusal(alg: Any, options: dict, ensemblealg: Any) -> str | None:
    """Why Julia can't use this step-size controller or this norm; None when it can."""
    controller, norm = options["stepsize_controller"], options["internalnorm"]
    if controller is None and norm is None:
        return None
    if isinstance(ensemblealg, EnsembleGPUArray | EnsembleGPUKernel):
        return "DiffEqGPU has a step-size controller and a norm of its own."
    if controller is not None and type(controller) not in _CONTROLLERS:
        return (
            f"stepsize_controller={type(controller).__name__}() is in Python, and Julia has "
            "PIController, IController and PIDController."
        )
    if norm is not None and type(norm) not in (RMSNorm, MaxNorm):
        return f"internalnorm={type(norm).__name__}() is in Python: it takes RMSNorm and MaxNorm."
    if controller is not None and isinstance(alg, AutoSwitch):
        return "each method of two that are switched has its own controller in Julia."
    betas = () if not isinstance(controller, PIController) else (controller.beta1, controller.beta2)
    if isinstance(alg, JuliaAlg) and None in betas:
        return "the order of a JuliaAlg is known to Julia only: give PIController(beta1, beta2)."
    return None


_CONTROLLERS = (PIController, IController, PIDController)


def control_as_table(controller: AbstractController) -> dict[str, Any]:
    """The table of a step-size controller in a request."""
    if isinstance(controller, PIDController):
        arguments = [controller.beta1, controller.beta2, controller.beta3]
        options = {"accept_safety": controller.accept_safety}
    else:
        arguments = []
        names = ("gamma", "qmin", "qmax", "qmax_first_step", "qsteady_max")
        options = {"qsteady_min": 1.0, **{name: getattr(controller, name) or 1.0 for name in names}}
        if isinstance(controller, PIController):
            arguments = [controller.beta1, controller.beta2]
            options["qoldinit"] = controller.qoldinit
    return {"name": type(controller).__name__, "arguments": arguments, "options": options}


def _as_value(x: Any) -> Any:
    if isinstance(x, Description):
        return as_table(x)
    return {"val": x.value} if isinstance(x, Val) else x


def among(method: Description) -> set[Description]:
    """A method and the methods among its arguments."""
    every = (*method.arguments, *(x for _, x in method.options))
    return {method}.union(*(among(x) for x in every if isinstance(x, Description)))


def packages(method: Description) -> set[str]:
    """The Julia packages of a method and of the methods among its arguments."""
    return {x.package for x in among(method)}


# When an event has cut a step of these methods, OrdinaryDiffEq interpolates within the step with
# wrong coefficients (`stiff_addsteps.jl` computes none for their caches).
_ASTRAY_BEFORE_EVENTS = ("Rosenbrock23", "Rosenbrock32")


def check_events(method: Description, plan: Plan) -> None:
    """**Raises:** `ValueError` if Julia would save wrong states."""
    found = [x.name for x in among(method) if x.name in _ASTRAY_BEFORE_EVENTS]
    if plan.events is None or not plan.events.continuous or plan.saving.mode != "times":
        return
    if found:
        raise ValueError(
            f"with engine='julia' {found[0]} has no right states within a step that an event cuts, "
            "where a time of saveat may be: leave saveat out, or use Rodas5P or engine='compiled'."
        )


# Their estimates of the error are of `M u`, and are compared with the tolerances of `u`.
_ONLY_DIAGONAL = ("Rosenbrock23", "Rosenbrock32")


def check_mass(method: Description, plan: Plan) -> None:
    """**Raises:** `ValueError` if the method of Julia can't solve with this mass matrix."""
    found = [x.name for x in among(method) if x.name in _ONLY_DIAGONAL]
    if found and plan.mass is not None and any(i != j for i, j, _ in plan.mass.entries):
        raise ValueError(
            f"with engine='julia' {found[0]} takes diagonal mass matrices only: use Rodas5P, or "
            "engine='compiled'."
        )


def place(ensemblealg: EnsembleAlgorithm, threads: Callable[[], int]) -> Place:
    """The place where Julia runs an ensemble.

    **Arguments:** `threads()`: the number of Julia's threads. It starts Julia, so it is only called
    if the number matters.

    **Raises:** `ValueError` for an ensemble algorithm that Julia doesn't have.
    """
    match ensemblealg:
        case EnsembleSerial():
            return SERIAL
        case EnsembleThreads(n=n):
            if n == 1:
                return SERIAL
            have = threads()
            if n not in (None, have):
                raise ValueError(
                    f"EnsembleThreads(n={n}) wants {n} threads, and Julia runs with {have}: "
                    f"call ensembleode.julia.start(threads={n}) before the first solve, or set "
                    f"PYTHON_JULIACALL_THREADS={n}."
                )
            return ("EnsembleThreads", ()) if have > 1 else SERIAL
        case EnsembleDistributed(workers=workers):
            workers = workers or cpu_devices.cores()
            return "EnsembleDistributed", (("workers", workers), ("threads", 1))
        case EnsembleSplitThreads(workers=workers, threads=each):
            workers = workers or 2
            each = each or max(1, cpu_devices.cores() // workers)
            return "EnsembleSplitThreads", (("workers", workers), ("threads", each))
        case EnsembleGPUArray(devices=devices, backend=backend):
            if devices is not None:
                raise ValueError(
                    "EnsembleGPUArray(devices=...) are devices of JAX; with engine='julia' say "
                    "backend='CUDA'."
                )
            return _on_gpu("EnsembleGPUArray", backend)
        case EnsembleGPUKernel(backend=backend):
            return _on_gpu("EnsembleGPUKernel", backend)
    raise ValueError(f"{type(ensemblealg).__name__} does not run with engine='julia'.")


def _on_gpu(name: str, backend: str | None) -> Place:
    known = ("CPU", *environment.BACKENDS)
    if backend not in (None, *known):
        raise ValueError(f"{name}(backend={backend!r}): backend must be one of {', '.join(known)}.")
    return name, (("backend", backend or "CUDA"),)


def is_gpu(place: Place) -> bool:
    return place[0].startswith("EnsembleGPU")
