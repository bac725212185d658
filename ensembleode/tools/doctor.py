"""Reports which parts of this installation work, which don't, and what to do about it."""

import collections
import importlib.util
import os
import platform
from collections.abc import Callable
from typing import Any

import jax

from ..engines.compiled.xla import launch
from ..engines.julia import environment
from ..ground.devices import cpu_devices
from ..ground.devices.placement import platform_of


PACKAGES = ("ensembleode", "jax", "jaxlib", "diffrax", "equinox", "optax", "numpy")
# For each extra, what it is for, and its modules.
EXTRAS = {
    "dask": ("EnsembleDistributed", ("distributed", "cloudpickle")),
    "store": ("solve(..., store=)", ("zarr", "xarray", "filelock")),
    "train": ("fit(..., checkpoint=)", ("filelock", "orbax.checkpoint")),
    "track": ("logs of a fit for trackers", ("mlflow", "tensorboard", "wandb")),
    "bayes": ("posteriors", ("blackjax", "numpyro")),
    "sbml": ("JumpProblem.of_sbml", ("libsbml",)),
    "plot": ("plots", ("matplotlib", "xarray")),
    "serve": (
        "ensembleode serve, eo.Client",
        ("fastapi", "httptools", "httpx", "msgpack", "orjson", "prometheus_client", "uvicorn"),
    ),
    "examples": ("the examples", ("SALib", "sklearn", "matplotlib", "xarray")),
}


def report() -> dict[str, Any]:
    """The state of the installation by name: `versions`, `devices`, `threads`, `x64`, `extras`,
    `julia`, `gpu`; and `problems`, each with its `remedy`."""
    problems: list[dict[str, str]] = []

    def problem(what: str, remedy: str) -> None:
        problems.append({"problem": what, "remedy": remedy})

    return {
        "versions": {"Python": platform.python_version()}
        | {name: environment.version_of(name) or "missing" for name in PACKAGES},
        "devices": _devices(problem),
        "threads": _threads(),
        "x64": bool(jax.config.read("jax_enable_x64")),
        # (It is no problem if they aren't installed: one installs only those that one needs.)
        "extras": {
            name: {"for": what, "missing": [m for m in modules if not _importable(m)]}
            for name, (what, modules) in EXTRAS.items()
        },
        "julia": _julia(),
        "gpu": _gpu(problem),
        "problems": problems,
    }


def _devices(problem: Callable) -> list[str]:
    try:
        devices = jax.devices()
    except RuntimeError as e:
        problem(
            f"JAX has no device: {str(e).splitlines()[0]}",
            "Unset JAX_PLATFORMS, or install JAX for what it names.",
        )
        return ["none"]
    kinds = collections.Counter(f"{d.platform}: {d.device_kind}" for d in devices)
    return [f"{count} x {kind}" for kind, count in kinds.items()]


def _threads() -> dict[str, int]:
    try:
        there = len(jax.local_devices(backend="cpu"))
    except RuntimeError:
        there = 0
    return {"devices": there, "threads": cpu_devices.threads(), "cores": cpu_devices.cores()}


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _julia() -> dict[str, str | None]:
    """The Julia engine. It is no problem if it isn't installed: few need it."""
    status = environment.status()
    if status["problems"]:
        first = status["problems"][0]
        return {"version": None, "problem": f"{first['problem']} {first['remedy']}".strip()}
    return {"version": status["julia"], "problem": None}


def _gpu(problem: Callable) -> str:
    accelerators = [d for d in jax.local_devices() if platform_of(d) != "cpu"]
    if accelerators:
        kind, missing = accelerators[0].device_kind, launch.missing()
        if missing:
            problem(f"EnsembleGPUKernel() can't run on {kind}.", " ".join(missing))
            return f"EnsembleGPUArray() runs on {kind}."
        return f"EnsembleGPUArray() and EnsembleGPUKernel() run on {kind}."
    if any(os.path.exists(f"/dev/nvidia{i}") for i in range(8)):
        problem(
            "There is an NVIDIA GPU that JAX doesn't use.",
            "pip install 'jax[cuda13]', and unset JAX_PLATFORMS.",
        )
        return "there is one that JAX doesn't use"
    return "none; EnsembleGPUArray() and EnsembleGPUKernel() run on the CPU"
