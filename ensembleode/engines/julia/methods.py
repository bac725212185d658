"""Our solvers and ensemble algorithms by what Julia calls them."""

from typing import Any

from ... import cpu_devices
from ...ensemble import (
    EnsembleAlgorithm,
    EnsembleDistributed,
    EnsembleGPUArray,
    EnsembleGPUKernel,
    EnsembleSerial,
    EnsembleSplitThreads,
    EnsembleThreads,
)
from ...solvers import JuliaAlg, ODESolver
from ...solvers.julia_alg import described, Description


_OTHER_NAMES = {"Bosh3": "BS3", "Dopri5": "DP5"}

# The name of an ensemble algorithm, and its options.
Place = tuple[str, tuple[tuple[str, Any], ...]]
SERIAL: Place = ("EnsembleSerial", ())


def description(alg: ODESolver) -> Description:
    if isinstance(alg, JuliaAlg):
        return alg.description
    name = type(alg).__name__
    return described(_OTHER_NAMES.get(name, name))


def as_table(method: Description) -> dict[str, Any]:
    """The method as a request has it."""
    name, package, arguments, options = method
    return {
        "name": name,
        "package": package,
        "arguments": [as_table(x) if isinstance(x, tuple) else x for x in arguments],
        "options": {k: as_table(v) if isinstance(v, tuple) else v for k, v in options},
    }


def place(ensemblealg: EnsembleAlgorithm, threads: int) -> Place:
    """Where Julia, which has so many threads, runs an ensemble.

    **Raises:** `ValueError` for what it has not got.
    """
    match ensemblealg:
        case EnsembleSerial():
            return SERIAL
        case EnsembleThreads(n=n):
            if n == 1:
                return SERIAL
            if n not in (None, threads):
                raise ValueError(
                    f"EnsembleThreads(n={n}) wants {n} threads, and Julia runs with {threads}: "
                    f"call ensembleode.julia.start(threads={n}) before the first solve, or set "
                    f"PYTHON_JULIACALL_THREADS={n}."
                )
            return ("EnsembleThreads", ()) if threads > 1 else SERIAL
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
            return "EnsembleGPUArray", (("backend", backend or "CUDA"),)
        case EnsembleGPUKernel(backend=backend):
            return "EnsembleGPUKernel", (("backend", backend or "CUDA"),)
    raise ValueError(f"{type(ensemblealg).__name__} does not run with engine='julia'.")


def is_gpu(place: Place) -> bool:
    return place[0].startswith("EnsembleGPU")
