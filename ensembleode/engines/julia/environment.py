"""Finds the Julia that runs the engine, and checks it.

Nothing here starts Julia inside of Python, downloads anything or changes a project; `installing.py`
does that. Julia is found as juliacall finds it: `PYTHON_JULIACALL_EXE` and
`PYTHON_JULIACALL_PROJECT` name an executable and a project, otherwise juliapkg has installed both.
Of juliapkg, only the last resolution is read (a new one needs the internet and a lock); `check`
finds out whether it still meets the requirements.

The project holds the dependencies of EnsembleODE, our own Julia package. EnsembleODE itself comes
with this Python package, and is loaded from `package_root` (see `loading`), so that the versions of
both match.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any

from ...ground.extras import installing


OLDEST = (1, 10)

# The packages that DiffEqGPU needs, and the one for each kind of GPU.
GPU = {
    "DiffEqGPU": "071ae1c0-96b5-11e9-1965-c90190d839ea",
    "KernelAbstractions": "63c18a36-062a-441e-b654-da1e3ab1ce7c",
}
BACKENDS = {
    "AMDGPU": "21141c5a-9bdb-4563-92ae-f87d6854732e",
    "CUDA": "052768ef-5323-5732-b1bb-66c8b64840ba",
    "Metal": "dde4c033-4e86-420c-a63e-0dd931031962",
    "oneAPI": "8f75cd03-7ff8-4ecb-9b8f-daf728133b1b",
}

# The packages that all methods share: controllers, Newton iterations, and their linear solves.
CORE = {
    "DiffEqBase": "2b5f629d-d688-5b77-993f-72d75c75574e",
    "LinearSolve": "7ed4a6bd-45f5-4d41-b270-4a48e9bafcae",
    "OrdinaryDiffEqCore": "bbf590c4-e513-4bbe-9b18-05decba2e5d8",
    "OrdinaryDiffEqDifferentiation": "4302a76b-040a-498a-8c04-15b101fed76b",
    "OrdinaryDiffEqNonlinearSolve": "127b3ac7-2247-4354-8eb6-78cf4e7c58e8",
}

# The packages of methods that are used less often (`JuliaAlg`), and of those for noise.
METHODS = {
    "OrdinaryDiffEqAdamsBashforthMoulton": "89bda076-bce5-4f1c-845f-551c83cdda9a",
    "OrdinaryDiffEqBDF": "6ad6398a-0878-4a85-9266-38940aa047c8",
    "OrdinaryDiffEqFIRK": "5960d6e9-dd7a-4743-88e7-cf307b64f125",
    "OrdinaryDiffEqFeagin": "101fe9f7-ebb6-4678-b671-3a81e7194747",
    "OrdinaryDiffEqSSPRK": "669c94d9-1f4b-4b64-b377-1aa079aa2388",
    "OrdinaryDiffEqStabilizedRK": "358294b1-0aab-51c3-aafe-ad5ab194a2ad",
    "StochasticDiffEqHighOrder": "0520c28c-50fd-4d16-9c96-902fc80b3bab",
    "StochasticDiffEqLowOrder": "d15fe365-ce7f-450a-828a-7985bd5b681b",
}

# What the methods for noise depend on, and draw it by.
NOISE = {"DiffEqNoiseProcess": "77a26b50-5914-5dd7-bc55-306e6241c503"}

PYTHONCALL = "6099a3de-0909-46bc-b1f4-468b9a2dfc0d"
INSTALL = "ensembleode julia install"
_EXE, _PROJECT = "PYTHON_JULIACALL_EXE", "PYTHON_JULIACALL_PROJECT"
_OTHER = f"Set {_EXE} to another julia, or unset it and run `{INSTALL}`."


class JuliaError(RuntimeError):
    """The engine can't run: `problem` says why, and `remedy` what to do."""

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


@dataclasses.dataclass(frozen=True)
class JuliaInstallation:
    """An executable, the project to run it with, and the tool or variables that name them."""

    executable: str
    project: str
    how: str


@dataclasses.dataclass(frozen=True)
class Versions:
    """The version of Julia and, by name, those of the packages that it would load in a project;
    packages that are missing are left out."""

    julia: str
    packages: dict[str, str]
    gpu: dict[str, str]  # the packages for GPUs
    ensembleode: str | None = None  # the folder of an EnsembleODE in the project


#
# Where things are
#


def package_root() -> pathlib.Path:
    """The folder of EnsembleODE, with its `Project.toml`: in a wheel, a folder beside this module;
    in a checkout, the whole repository.

    **Raises:** `JuliaError` when it is in neither place.
    """
    here = pathlib.Path(__file__).resolve().parent
    for root in (here / "package", here.parents[2]):
        if (root / "Project.toml").is_file() and (root / "src" / "EnsembleODE.jl").is_file():
            return root
    raise JuliaError(
        f"The Julia sources of ensembleode are not beside {here}.",
        f"Reinstall it: {installing('julia')}.",
    )


def loading() -> str:
    """Julia code that loads EnsembleODE in any active project.

    The folder of EnsembleODE goes last in the load path, so that the project decides which versions
    of other packages are loaded.
    """
    root = f'raw"{package_root()}"'
    return f"{root} in LOAD_PATH || push!(LOAD_PATH, {root}); using EnsembleODE"


@functools.cache
def requirements() -> dict[str, dict[str, str]]:
    """The packages to install, each with its `uuid` and, as Julia writes it, its `version`."""
    path = pathlib.Path(__file__).resolve().parents[2] / "juliapkg.json"
    return json.loads(path.read_text())["packages"]


def find() -> JuliaInstallation:
    """The Julia to run. Starts nothing, installs nothing.

    **Raises:** `JuliaError` when there is none, or only one of the two environment variables.
    """
    executable, project = setting("juliacall", "exe"), setting("juliacall", "project")
    if not executable and not project:
        return _from_juliapkg()
    if not executable or not project:
        given, other = (_EXE, _PROJECT) if executable else (_PROJECT, _EXE)
        raise JuliaError(
            f"{given} is set, but not {other}.",
            f"Set both, or neither, for the Julia that `{INSTALL}` installs.",
        )
    path = shutil.which(executable)
    if path is None:
        raise JuliaError(
            f"{_EXE} is {executable!r}, which is no executable.", "Set it to the path of julia."
        )
    if not os.path.exists(project):
        raise JuliaError(
            f"{_PROJECT} is {project!r}, which doesn't exist.",
            "Set it to a folder with a Project.toml; an empty one will do, if you then run "
            f"`{INSTALL}`.",
        )
    return JuliaInstallation(
        os.path.abspath(path), os.path.abspath(project), f"{_EXE} and {_PROJECT}"
    )


def _from_juliapkg() -> JuliaInstallation:
    # The public functions of juliapkg resolve first, which takes a lock in the project's folder.
    # All jobs of a cluster would queue for it, and the folder may be read-only.
    try:
        from juliapkg.deps import load_meta
        from juliapkg.state import STATE
    except ImportError:
        raise no_juliacall() from None
    project = STATE["project"]
    meta = load_meta()
    if meta is None:
        raise JuliaError(f"No Julia is installed for {sys.prefix}.", install_it())
    executable, wanted = meta["executable"], STATE["override_executable"]
    if wanted and wanted != executable:
        raise JuliaError(
            f"PYTHON_JULIAPKG_EXE is {wanted!r}, and {project} was made with {executable}.",
            install_it(),
        )
    if shutil.which(executable) is None:
        raise JuliaError(f"The Julia that was installed, {executable}, is gone.", install_it())
    return JuliaInstallation(executable, project, "juliapkg")


def setting(tool: str, name: str) -> str | None:
    """An option of juliacall or juliapkg, from the command line (`-X juliacall-exe=...`) or from
    the environment."""
    value = sys._xoptions.get(f"{tool}-{name}")
    if value is not None:
        return "yes" if value is True else value
    return os.environ.get(f"PYTHON_{tool}_{name}".upper())


def offline() -> bool:
    """Whether juliapkg was told to download nothing."""
    return setting("juliapkg", "offline") == "yes"


def threads() -> int:
    """How many threads Julia is started with: `PYTHON_JULIACALL_THREADS`, else
    `JULIA_NUM_THREADS`, else the cores that this process may use.

    **Raises:** `ValueError` for a variable that isn't a number of threads.
    """
    from ...ground.devices.cpu_devices import cores

    for name, text in (
        ("PYTHON_JULIACALL_THREADS", setting("juliacall", "threads")),
        ("JULIA_NUM_THREADS", os.environ.get("JULIA_NUM_THREADS")),
    ):
        if not text:
            continue
        # "4,1" means four threads that compute, and one for interactive tasks.
        count = text.split(",")[0].strip()
        if count == "auto":
            return cores()
        if not count.isdecimal() or int(count) == 0:
            raise ValueError(f"{name} must be a number of threads, or 'auto', got {text!r}.")
        return int(count)
    return cores()


#
# What is installed
#


# Finds the packages that `using` would load, without loading them. Packages are given as name=uuid;
# those that are installed are printed with their version and folder.
_QUICK = ("-O0", "--compile=min")
_INSPECT = """
println("julia ", VERSION)
for argument in ARGS
    name, uuid = String.(split(argument, "="))
    path = Base.locate_package(Base.PkgId(Base.UUID(uuid), name))
    path === nothing && continue
    root = dirname(dirname(path))
    file = Base.env_project_file(root)
    toml = file isa String ? Base.parsed_toml(file) : Dict{String,Any}()
    println(name, " ", get(toml, "version", "unknown"), " ", root)
end
"""


def inspect(julia: JuliaInstallation) -> Versions:
    """Ask Julia for its version and those of the packages.

    **Raises:** `JuliaError` when Julia can't be run.
    """
    required = {name: package["uuid"] for name, package in requirements().items()}
    named = required | METHODS | NOISE | CORE | GPU | BACKENDS
    named |= {"PythonCall": PYTHONCALL, "EnsembleODE": project_toml()["uuid"]}
    packages = [f"{name}={uuid}" for name, uuid in named.items()]
    try:
        done = run(julia, _INSPECT, *packages, flags=_QUICK, capture=True, timeout=120.0)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise JuliaError(
            f"{julia.executable} could not be run: {said[-1000:]}",
            "See what it says to --version. " + _OTHER,
        ) from error
    lines = re.findall(r"^(\w+) (\S+) ?(.*)$", done.stdout, re.MULTILINE)
    versions = {name: version for name, version, _ in lines}
    if "julia" not in versions:
        raise JuliaError(
            f"{julia.executable} is not Julia: it printed {done.stdout[:200]!r}.", _OTHER
        )

    def there(*names: str) -> dict[str, str]:
        return {name: versions[name] for name in names if name in versions}

    return Versions(
        julia=versions["julia"],
        packages=there(*required, *METHODS, *NOISE, *CORE, "PythonCall"),
        gpu=there(*GPU, *BACKENDS),
        ensembleode=next((folder for name, _, folder in lines if name == "EnsembleODE"), None),
    )


@functools.cache
def inspected(julia: JuliaInstallation) -> Versions:
    """`inspect`, once in a process, as loaded packages stay loaded."""
    return inspect(julia)


def check(julia: JuliaInstallation, *, in_process: bool = True) -> Versions:
    """`inspect`, and raise if the engine could not run.

    **Arguments:** `in_process`: whether juliacall is to run Julia within Python, for which the
    project needs PythonCall in the version of juliacall.

    **Raises:** `JuliaError` for the first problem found.
    """
    versions = inspect(julia)
    if problems := _problems(julia, versions, in_process):
        raise problems[0]
    return versions


def _problems(julia: JuliaInstallation, versions: Versions, in_process: bool) -> list[JuliaError]:
    if tuple(_numbers(versions.julia)) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        problem = f"{julia.executable} is Julia {versions.julia}, and {oldest} is the oldest."
        return [JuliaError(problem, install_it() if julia.how == "juliapkg" else _OTHER)]
    problems = []
    if in_process and juliacall() is None:
        problems.append(no_juliacall())
    if wanted := needed(versions, in_process):
        there = versions.packages
        lacking = [
            f"{name} {compat}" + (f" (there is {there[name]})" if name in there else "")
            for name, compat in wanted.items()
        ]
        problem = f"The Julia project {julia.project} lacks {'; '.join(lacking)}."
        by_hand = f"put {', '.join(wanted)} into that project by Pkg.add"
        problems.append(JuliaError(problem, install_it(by_hand)))
    other = versions.ensembleode
    if other is not None and pathlib.Path(other).resolve() != package_root():
        problem = f"Julia would load the EnsembleODE in {other}, not that of this ensembleode."
        remedy = 'Remove it from the Julia project by Pkg.rm("EnsembleODE"): none has to have it.'
        problems.append(JuliaError(problem, remedy))
    return problems


def needed(versions: Versions, in_process: bool) -> dict[str, str]:
    """The packages that are missing or whose version is not allowed, with the allowed versions."""
    wanted = {name: package["version"] for name, package in requirements().items()}
    if in_process and (version := juliacall()) is not None:
        wanted["PythonCall"] = f"={version}"
    return {
        name: compat
        for name, compat in wanted.items()
        if name not in versions.packages or not allows(compat, versions.packages[name])
    }


def allows(compat: str, version: str) -> bool:
    """Whether `compat` allows a version, by Julia's rule: "2.4, 3" allows versions from 2.4 to
    below 3 and from 3 to below 4; "=1.2.3" allows only that version.

    >>> [allows("0.9.2, 1", version) for version in ("0.9.1", "0.9.3", "0.10.0", "1.4.0", "2.0.0")]
    [False, True, False, True, False]
    """
    have = [*_numbers(version), 0, 0][:3]
    for clause in compat.split(","):
        low = _numbers(clause)
        # The first number that isn't zero must not change.
        fixed = next((i + 1 for i, number in enumerate(low) if number), len(low))
        same = have == low if "=" in clause else have[:fixed] == low[:fixed]
        if same and have >= low:
            return True
    return False


def _numbers(version: str) -> list[int]:
    """The numbers of a version without its suffix: 1, 10 and 0 for "1.10.0-rc1"."""
    return [int(number) for number in re.findall(r"\d+", re.split("[-+]", version)[0])]


def project_toml() -> dict[str, Any]:
    """The content of the Julia package's Project.toml."""
    return tomllib.loads((package_root() / "Project.toml").read_text())


def juliacall() -> str | None:
    """The version of juliacall; None where it is not installed."""
    return version_of("juliacall")


def version_of(package: str) -> str | None:
    """The version of an installed Python package; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def status() -> dict[str, Any]:
    """Everything that matters for running Julia, for `ensembleode julia status`. Raises nothing.

    `problems` are the reasons why the engine can't run, each with its remedy. If there are none,
    the engine can run.
    """
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "juliacall": juliacall(),
        "juliapkg": version_of("juliapkg"),
        "offline": offline(),
        **dict.fromkeys(("threads", "executable", "project", "how", "julia")),
        "packages": {},
        "gpu": {},
        "problems": [],
    }

    def failed(error: Exception) -> None:
        remedy = getattr(error, "remedy", "")
        problem = getattr(error, "problem", f"{type(error).__name__}: {error}")
        report["problems"].append({"problem": problem, "remedy": remedy})

    try:
        report["threads"] = threads()
    except Exception as error:
        failed(error)
    try:
        julia = find()
        report |= dataclasses.asdict(julia)
        versions = inspect(julia)
        report |= {"julia": versions.julia, "packages": versions.packages, "gpu": versions.gpu}
        for error in _problems(julia, versions, in_process=True):
            failed(error)
    except Exception as error:
        failed(error)
    return report


def run(
    julia: JuliaInstallation,
    source: str,
    *arguments: str,
    flags: tuple[str, ...] = (),
    capture: bool = False,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Julia code in a process of its own, with the arguments in `ARGS`.

    **Raises:** `subprocess.CalledProcessError` if it fails, `subprocess.TimeoutExpired`.
    """
    command = [julia.executable, "--startup-file=no", f"--project={julia.project}", *flags]
    # Otherwise PythonCall would install a Python of its own.
    environment = {"JULIA_PYTHONCALL_EXE": sys.executable, **os.environ}
    return subprocess.run(
        [*command, "-e", source, *arguments],
        check=True,
        capture_output=capture,
        text=True,
        timeout=timeout,
        env=environment,
    )


def no_juliacall() -> JuliaError:
    """The error where juliacall is not installed."""
    return JuliaError(
        "juliacall is not installed.", f"Run {installing('julia')}, then `{INSTALL}`."
    )


def install_it(by_hand: str = f"set {_EXE} and {_PROJECT} to a Julia that is here") -> str:
    """The remedy where something has to be installed.

    **Arguments:** `by_hand`: what else to do where nothing may be downloaded.
    """
    if not offline():
        return f"Run `{INSTALL}`."
    return (
        "PYTHON_JULIAPKG_OFFLINE is set, so nothing is downloaded: with the same project and "
        f"JULIA_DEPOT_PATH, run `{INSTALL}` where there is internet, or {by_hand}."
    )
