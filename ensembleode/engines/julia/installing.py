"""Installs the Julia that runs the engine, and the packages that it needs.

Only this module has the package manager download or change anything.
"""

import subprocess

from . import environment
from .environment import BACKENDS, GPU, JuliaError, JuliaInstallation, METHODS


# Packages are given as name=uuid=versions.
_ADD = """
import Pkg
packages = map(ARGS) do argument
    name, uuid, versions = String.(split(argument, "="; limit=3))
    Pkg.PackageSpec(; name, uuid=Base.UUID(uuid), version=Pkg.Versions.semver_spec(versions))
end
Pkg.add(packages)
"""


def install(gpu: str | None = None, *, all_methods: bool = False) -> JuliaInstallation:
    """Install what is missing, and compile it: Julia itself, its packages, and on demand the
    packages for a kind of GPU (`BACKENDS`) or for all methods. Progress goes to the terminal.

    If `PYTHON_JULIACALL_EXE` and `PYTHON_JULIACALL_PROJECT` are set, that Julia is used, and
    missing packages are added to that project. Otherwise juliapkg installs everything in the Python
    environment.

    **Raises:** `JuliaError` when the installation fails, or the engine can't run after it;
    `ValueError` for an unknown `gpu`.
    """
    if gpu is not None and gpu not in BACKENDS:
        raise ValueError(f"gpu must be None or one of {sorted(BACKENDS)}, got {gpu!r}.")
    if environment.juliacall() is None:
        raise environment.no_juliacall()
    extra = {} if gpu is None else {**GPU, gpu: BACKENDS[gpu]}
    extra |= METHODS if all_methods else {}
    given = bool(
        environment.setting("juliacall", "exe") or environment.setting("juliacall", "project")
    )
    try:
        julia = _add_to_given(extra) if given else _resolve(extra)
        versions = environment.check(julia)
        print(f"Compiling EnsembleODE for {julia.project}", flush=True)
        extension = list(GPU) if versions.gpu.keys() >= GPU.keys() else []
        environment.run(julia, ", ".join([environment.loading(), *extension]))
    except subprocess.CalledProcessError as error:
        raise JuliaError(
            "Julia's package manager, or its compiler, failed: what it said is above.",
            f"Run `{environment.INSTALL}` again. Where it can't find versions that go together, "
            "its registry may be out of date: set JULIA_PKG_SERVER_REGISTRY_PREFERENCE=eager.",
        ) from error
    return julia


def _resolve(extra: dict[str, str]) -> JuliaInstallation:
    import juliapkg

    for name, uuid in extra.items():
        juliapkg.add(name, uuid=uuid)
    try:
        # By force, as juliapkg checks what is required and not what is installed.
        juliapkg.resolve(force=True)
    except subprocess.CalledProcessError:
        raise
    except Exception as error:  # juliapkg raises no narrower class for versions that can't be met
        raise JuliaError(f"juliapkg failed: {error}", environment.install_it()) from error
    return environment.find()


def _add_to_given(extra: dict[str, str]) -> JuliaInstallation:
    julia = environment.find()
    versions = environment.inspect(julia)
    compats = environment.project_toml()["compat"]
    uuids = {name: package["uuid"] for name, package in environment.requirements().items()}
    uuids |= {"PythonCall": environment.PYTHONCALL, **extra}
    wanted = environment.needed(versions, in_process=True)
    there = versions.packages | versions.gpu
    wanted |= {name: compats.get(name, ">= 0") for name in extra if name not in there}
    if wanted and not environment.offline():
        environment.run(
            julia, _ADD, *(f"{name}={uuids[name]}={version}" for name, version in wanted.items())
        )
    return julia
