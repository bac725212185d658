"""The names and options of our solvers and ensemble algorithms in Julia."""

from collections.abc import Callable
from typing import Any

from ...ground.devices import cpu_devices
from ...problem import ensemble
from ...solvers import EM, JuliaAlg, ODESolver, RKMil
from ...solvers.auto import AutoSwitch
from ...solvers.controllers import AbstractController, PIController, PIDController
from ...solvers.julia_alg import among, described, JuliaMethod, Val
from . import environment


_OTHER_NAMES = {"Bosh3": "BS3", "Dopri5": "DP5"}

# The name of an ensemble algorithm, and its options.
Place = tuple[str, tuple[tuple[str, Any], ...]]
SERIAL: Place = ("EnsembleSerial", ())


def description(alg: ODESolver) -> JuliaMethod:
    if isinstance(alg, JuliaAlg):
        return alg.description
    name = type(alg).__name__
    if isinstance(alg, EM):
        return described(name)._replace(arguments=(alg.split,))
    if isinstance(alg, RKMil):
        return described(name)._replace(options=(("interpretation", alg.interpretation),))
    if isinstance(alg, AutoSwitch):
        stiff = described(type(alg.stiff).__name__)
        return described(name)._replace(arguments=(stiff,), options=tuple(alg.changed.items()))
    return described(_OTHER_NAMES.get(name, name))


def as_table(method: JuliaMethod) -> dict[str, Any]:
    """The method's table in a request."""
    name, package, arguments, options = method
    return {
        "name": name,
        "package": package,
        "arguments": [_as_value(x) for x in arguments],
        "options": {k: _as_value(x) for k, x in options},
    }


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


def _as_value(x: JuliaMethod) -> dict[str, Any]:
    if isinstance(x, JuliaMethod):
        return as_table(x)
    return {"val": x.value} if isinstance(x, Val) else x


def packages(method: JuliaMethod) -> set[str]:
    """The Julia packages of a method and of the methods among its arguments."""
    return {x.package for x in among(method)}


def place(ensemblealg: ensemble.EnsembleAlgorithm, threads: Callable[[], int]) -> Place:
    """The place where Julia runs an ensemble.

    **Arguments:** `threads()`: the number of Julia's threads. It starts Julia, so it is only called
    if the number matters.

    **Raises:** `ValueError` for an ensemble algorithm that Julia doesn't have.
    """
    match ensemblealg:
        case ensemble.EnsembleSerial():
            return SERIAL
        case ensemble.EnsembleThreads(n=n):
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
        case ensemble.EnsembleDistributed(workers=workers):
            workers = workers or cpu_devices.cores()
            return "EnsembleDistributed", (("workers", workers), ("threads", 1))
        case ensemble.EnsembleSplitThreads(workers=workers, threads=each):
            workers = workers or 2
            each = each or max(1, cpu_devices.cores() // workers)
            return "EnsembleSplitThreads", (("workers", workers), ("threads", each))
        case ensemble.EnsembleGPUArray(devices=devices, backend=backend):
            if devices is not None:
                raise ValueError(
                    "EnsembleGPUArray(devices=...) are devices of JAX; with engine='julia' say "
                    "backend='CUDA'."
                )
            return _on_gpu("EnsembleGPUArray", backend)
        case ensemble.EnsembleGPUKernel(backend=backend):
            return _on_gpu("EnsembleGPUKernel", backend)
    raise ValueError(f"{type(ensemblealg).__name__} does not run with engine='julia'.")


def _on_gpu(name: str, backend: str | None) -> Place:
    known = ("CPU", *environment.BACKENDS)
    if backend not in (None, *known):
        raise ValueError(f"{name}(backend={backend!r}): backend must be one of {', '.join(known)}.")
    return name, (("backend", backend or "CUDA"),)


def is_gpu(place: Place) -> bool:
    return place[0].startswith("EnsembleGPU")
