"""How Julia is found, checked and installed, with shell scripts in the place of Julia."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from ensembleode.engines.julia import environment, installing
from ensembleode.engines.julia.environment import JuliaError, JuliaInstallation
from ensembleode.ground import extras
from ensembleode.solvers.julia_alg import PACKAGES


juliapkg = pytest.importorskip("juliapkg")

ROOT = pathlib.Path(__file__).parents[3]
# Pkg's, Julia's own, and so of Julia's version.
STANDARD = {"Distributed", "LinearAlgebra", "Mmap", "TOML"}


@pytest.fixture(autouse=True)
def undisturbed(request, monkeypatch, tmp_path):
    """Tests see no settings from outside, and nothing installed by juliapkg; tests marked `julia`
    see the real installation."""
    if request.node.get_closest_marker("julia"):
        return
    for name in os.environ:
        if name.startswith(("PYTHON_JULIA", "JULIA_")):
            monkeypatch.delenv(name)
    state = {
        "project": str(tmp_path / "julia_env"),
        "meta": str(tmp_path / "julia_env" / "pyjuliapkg" / "meta.json"),
        "override_executable": None,
    }
    for name, value in state.items():
        monkeypatch.setitem(juliapkg.state.STATE, name, value)
    monkeypatch.setattr(environment, "juliacall", lambda: "0.9.34")


GOOD = {
    "julia": "1.10.8",
    "OrdinaryDiffEqHighOrderRK": "2.2.0",
    "OrdinaryDiffEqLowOrderRK": "2.2.3",
    "OrdinaryDiffEqRosenbrock": "2.6.6",
    "OrdinaryDiffEqSDIRK": "2.9.1",
    "OrdinaryDiffEqTsit5": "2.1.3",
    "OrdinaryDiffEqVerner": "2.3.0",
    "PythonCall": "0.9.34",
    "SciMLBase": "3.49.2",
    "SpecialFunctions": "2.8.0",
    "StaticArrays": "1.9.15",
}


ADDED = {"DiffEqGPU": "3.17.0", "KernelAbstractions": "0.9.39"}


@pytest.fixture
def fake(tmp_path):
    """Makes an executable that records its arguments, and says that these versions are installed;
    all of them, if it has been told to add packages."""

    def lines(versions):
        julia = f"julia {versions['julia']}"
        rest = [f"{name} {version}" for name, version in versions.items() if name != "julia"]
        return "\n".join([julia, *(line + " /depot/a folder" for line in rest)])

    def make(julia="1.10.8", without=(), adding="true", **versions):
        said = {k: v for k, v in {**GOOD, "julia": julia, **versions}.items() if k not in without}
        path = tmp_path / "bin" / "julia"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"""#!/bin/sh
            printf '%s\\n' "$@" >> {tmp_path}/arguments
            case "$*" in
                *Pkg.add*) {adding} && touch {tmp_path}/added; exit ;;
                *'using EnsembleODE'*) exit ;;
            esac
            if test -e {tmp_path}/added; then
                cat <<'END'\n{lines({**GOOD, **ADDED})}\nEND
            else
                cat <<'END'\n{lines(said)}\nEND
            fi
            """
        )
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Sets the environment variables that name an executable and a project."""

    def name(executable, project="project"):
        (tmp_path / "project").mkdir(exist_ok=True)
        monkeypatch.setenv("PYTHON_JULIACALL_EXE", executable)
        monkeypatch.setenv("PYTHON_JULIACALL_PROJECT", str(tmp_path / project))
        return JuliaInstallation(
            executable, str(tmp_path / project), "PYTHON_JULIACALL_EXE and PYTHON_JULIACALL_PROJECT"
        )

    return name


def save_meta(executable, **changes):
    """Writes the file that juliapkg writes when it has resolved."""
    meta = {"meta_version": juliapkg.deps.META_VERSION, "executable": executable}
    juliapkg.deps.save_meta({**meta, **changes})


def offline(monkeypatch):
    monkeypatch.setenv("PYTHON_JULIAPKG_OFFLINE", "yes")


def test_project_and_juliapkg_agree():
    project = tomllib.loads((ROOT / "Project.toml").read_text())
    registered = {name: uuid for name, uuid in project["deps"].items() if name not in STANDARD}
    packages = environment.requirements()
    assert {name: package["uuid"] for name, package in packages.items()} == registered
    assert {name: package["version"] for name, package in packages.items()} == {
        name: project["compat"][name] for name in registered
    }
    assert project["weakdeps"] == environment.GPU | environment.NOISE
    assert project["compat"].keys() == {*project["deps"], *project["weakdeps"], "Test", "julia"}
    assert project["compat"]["julia"] == ".".join(map(str, environment.OLDEST))


def test_packages_of_all_methods_can_be_installed():
    assert PACKAGES.keys() == {
        *(name for name in environment.requirements() if name.startswith("OrdinaryDiffEq")),
        *environment.METHODS,
    }


def test_package_root_in_a_checkout():
    assert environment.package_root() == ROOT


def test_package_root_in_a_wheel(monkeypatch, tmp_path):
    here = tmp_path / "site-packages" / "ensembleode" / "engines" / "julia"
    (here / "package" / "src").mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(here / "environment.py"))
    with pytest.raises(
        JuliaError, match=rf"not beside .* Reinstall it: {re.escape(extras.installing('julia'))}"
    ):
        environment.package_root()
    (here / "package" / "Project.toml").touch()
    (here / "package" / "src" / "EnsembleODE.jl").touch()
    assert environment.package_root() == here / "package"
    assert f'push!(LOAD_PATH, raw"{here}/package")' in environment.loading()


def test_the_wheel_has_what_package_root_looks_for():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    package = "ensembleode/engines/julia/package/"
    included = build["targets"]["wheel"]["force-include"].items()
    assert {source: target for source, target in included if target.startswith(package)} == {
        source: f"{package}{target}"
        for source, target in {
            "Project.toml": "Project.toml",
            "julia/src": "src",
            "julia/ext": "ext",
        }.items()
    }


def test_given_julia_is_found(fake, given):
    expected = given(fake())
    assert environment.find() == expected


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("PYTHON_JULIACALL_EXE", "PYTHON_JULIACALL_PROJECT"),
        ("PYTHON_JULIACALL_PROJECT", "PYTHON_JULIACALL_EXE"),
    ],
)
def test_both_variables_are_needed(name, other, monkeypatch):
    monkeypatch.setenv(name, "somewhere")
    with pytest.raises(JuliaError, match=f"{name} is set, but not {other}. Set both, or neither"):
        environment.find()


def test_given_julia_must_exist(fake, given):
    given("/nowhere/julia")
    with pytest.raises(JuliaError, match=r"EXE is '/nowhere/julia', which is no executable. Set"):
        environment.find()
    given(fake(), project="elsewhere")
    with pytest.raises(JuliaError, match=r"PROJECT is '.*elsewhere', which doesn't exist. Set it"):
        environment.find()


def test_options_of_the_interpreter_count(fake, given, monkeypatch, tmp_path):
    given("/nowhere/julia")
    monkeypatch.setitem(sys._xoptions, "juliacall-exe", fake())
    assert environment.find().executable == str(tmp_path / "bin" / "julia")
    monkeypatch.setitem(sys._xoptions, "juliapkg-offline", True)
    assert environment.offline()


def test_juliacall_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "juliapkg", None)
    monkeypatch.setitem(sys.modules, "juliapkg.deps", None)
    with pytest.raises(JuliaError, match=rf"{re.escape(extras.installing('julia'))}, then"):
        environment.find()


def test_nothing_is_installed(monkeypatch, tmp_path):
    with pytest.raises(JuliaError, match=r"No Julia is installed for .*`ensembleode julia install"):
        environment.find()
    offline(monkeypatch)
    with pytest.raises(
        JuliaError, match=r"OFFLINE is set.*`ensembleode julia install` where there"
    ):
        environment.find()
    assert not (tmp_path / "julia_env").exists()


def refuse(*args, **kwargs):
    raise AssertionError("find must neither resolve nor run anything")


def test_what_juliapkg_installed_is_found(fake, monkeypatch, tmp_path):
    executable = fake()
    save_meta(executable)
    monkeypatch.setattr(juliapkg.deps, "resolve", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)
    found = environment.find()
    assert found == JuliaInstallation(executable, str(tmp_path / "julia_env"), "juliapkg")
    assert {path.name for path in (tmp_path / "julia_env").iterdir()} == {"pyjuliapkg"}


def test_what_juliapkg_installed_has_changed(fake, monkeypatch):
    save_meta("/nowhere/julia")
    with pytest.raises(JuliaError, match=r"/nowhere/julia, is gone. Run `ensembleode julia inst"):
        environment.find()
    save_meta(fake())
    monkeypatch.setitem(juliapkg.state.STATE, "override_executable", "/other/julia")
    with pytest.raises(JuliaError, match=r"PYTHON_JULIAPKG_EXE is '/other/julia', and"):
        environment.find()
    save_meta(fake(), meta_version=juliapkg.deps.META_VERSION)
    monkeypatch.setitem(juliapkg.state.STATE, "override_executable", None)
    environment.find()


def test_check(fake, given, tmp_path):
    julia = given(fake(CUDA="5.8.0", SomethingElse="1.0.0"))
    versions = environment.check(julia)
    assert versions.julia == "1.10.8"
    assert versions.packages == {name: v for name, v in GOOD.items() if name != "julia"}
    assert versions.gpu == {"CUDA": "5.8.0"}
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert {"--startup-file=no", f"--project={julia.project}"} <= set(arguments)
    assert "SciMLBase=0bca4576-84f4-4d90-8ffe-ffa030f20462" in arguments


@pytest.mark.parametrize("version", ["1.9.4", "0.6.4", "1.9.0-rc1"])
def test_too_old(version, fake, given):
    julia = given(fake(julia=version))
    with pytest.raises(JuliaError, match=rf"Julia {version}, and 1.10 is the oldest. Set PYTHON_"):
        environment.check(julia)
    save_meta(julia.executable)
    by_juliapkg = JuliaInstallation(julia.executable, julia.project, "juliapkg")
    with pytest.raises(JuliaError, match=r"is the oldest. Run `ensembleode julia install`"):
        environment.check(by_juliapkg)


@pytest.mark.parametrize("version", ["1.10.0", "1.12.3", "1.14.0-DEV.12", "2.0.0"])
def test_new_enough(version, fake, given):
    assert environment.check(given(fake(julia=version))).julia == version


def test_missing_packages(fake, given, monkeypatch):
    julia = given(fake(without=("SciMLBase", "StaticArrays")))
    lacks = r"project lacks SciMLBase 2, 3; StaticArrays 1\. "
    with pytest.raises(JuliaError, match=lacks + "Run `ensembleode julia install`"):
        environment.check(julia)
    offline(monkeypatch)
    with pytest.raises(JuliaError, match=lacks + "PYTHON_JULIAPKG_OFFLINE is set") as raised:
        environment.check(julia)
    assert str(raised.value).endswith("put SciMLBase, StaticArrays into that project by Pkg.add.")


@pytest.mark.parametrize("version", ["1.90.0", "4.0.0"])
def test_packages_of_other_versions(version, fake, given):
    julia = given(fake(SciMLBase=version))
    with pytest.raises(JuliaError, match=rf"lacks SciMLBase 2, 3 \(there is {version}\)\."):
        environment.check(julia)


def test_pythoncall_of_another_version(fake, given):
    julia = given(fake(PythonCall="0.9.31"))
    with pytest.raises(JuliaError, match=r"lacks PythonCall =0.9.34 \(there is 0.9.31\)"):
        environment.check(julia)
    assert environment.check(julia, in_process=False).packages["PythonCall"] == "0.9.31"


def test_juliacall_is_needed_in_process_only(fake, given, monkeypatch):
    monkeypatch.setattr(environment, "juliacall", lambda: None)
    julia = given(fake(without=["PythonCall"]))
    environment.check(julia, in_process=False)
    with pytest.raises(JuliaError, match="juliacall is not installed"):
        environment.check(julia)


def test_another_ensembleode_in_the_project(fake, given):
    julia = given(fake(EnsembleODE="0.0.1"))
    with pytest.raises(JuliaError, match=r"the EnsembleODE in /depot/a folder, not .* Remove it"):
        environment.check(julia)


def test_what_is_not_julia(given, tmp_path):
    julia = given("/bin/echo")
    with pytest.raises(JuliaError, match=r"/bin/echo is not Julia: it printed '--startup-file=no"):
        environment.check(julia)
    julia = given("/bin/false")
    with pytest.raises(JuliaError, match=r"/bin/false could not be run: .* non-zero exit status 1"):
        environment.check(julia)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'libjulia is gone' >&2\nexit 3")
    broken.chmod(0o755)
    with pytest.raises(JuliaError, match=r"broken could not be run: libjulia is gone"):
        environment.check(given(str(broken)))


@pytest.mark.parametrize(
    ("compat", "allowed", "others"),
    [
        ("2, 3", ["2.0.0", "3.49.2"], ["1.9.9", "4.0.0", "unknown"]),
        ("1.10", ["1.10.0", "1.12.0"], ["1.9.4", "2.0.0"]),
        ("0.9.38", ["0.9.38", "0.9.40"], ["0.9.37", "0.10.0", "1.0.0"]),
        ("0.9", ["0.9.0", "0.9.5"], ["0.8.9", "0.10.0"]),
        ("0.0.3", ["0.0.3"], ["0.0.4", "0.0.2"]),
        ("0", ["0.0.1", "0.9.0"], ["1.0.0"]),
        ("=0.9.34", ["0.9.34"], ["0.9.33", "0.9.35"]),
        ("1", ["1.0.0-rc1", "1.2.0+build", "1.11"], ["2.0.0-alpha"]),
    ],
)
def test_allows(compat, allowed, others):
    assert all(environment.allows(compat, version) for version in allowed)
    assert not any(environment.allows(compat, version) for version in others)


@pytest.mark.parametrize(
    ("juliacall", "julia", "expected"),
    [
        (None, None, 7),
        (None, "3", 3),
        ("2", "3", 2),
        ("auto", "3", 7),
        ("4,1", None, 4),
        ("auto,auto", None, 7),
        ("", "3", 3),
    ],
)
def test_threads(juliacall, julia, expected, monkeypatch):
    monkeypatch.setattr("ensembleode.ground.devices.cpu_devices.cores", lambda: 7)
    for name, value in {"PYTHON_JULIACALL_THREADS": juliacall, "JULIA_NUM_THREADS": julia}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert environment.threads() == expected


@pytest.mark.parametrize("text", ["none", "0", "-1", "1.5"])
def test_no_number_of_threads(text, monkeypatch):
    monkeypatch.setenv("JULIA_NUM_THREADS", text)
    with pytest.raises(ValueError, match=f"JULIA_NUM_THREADS must be a number .* got '{text}'"):
        environment.threads()


def test_status(fake, given, monkeypatch):
    monkeypatch.setenv("JULIA_NUM_THREADS", "3")
    julia = given(fake(DiffEqGPU="3.17.0"))
    report = environment.status()
    assert report["problems"] == []
    expected = {"executable": julia.executable, "project": julia.project, "how": julia.how}
    assert expected.items() <= report.items()
    assert (report["julia"], report["threads"]) == ("1.10.8", 3)
    assert report["packages"]["SciMLBase"] == "3.49.2"
    assert report["gpu"] == {"DiffEqGPU": "3.17.0"}


def test_status_has_every_problem(fake, given, monkeypatch):
    monkeypatch.setenv("JULIA_NUM_THREADS", "many")
    monkeypatch.setattr(environment, "juliacall", lambda: None)
    given(fake(without=["SciMLBase"]))
    report = environment.status()
    problems = [found["problem"] for found in report["problems"]]
    assert len(problems) == 3
    assert problems[0].startswith("ValueError: JULIA_NUM_THREADS must be")
    assert "juliacall" in problems[1]
    assert "lacks SciMLBase" in problems[2]
    assert report["packages"]["StaticArrays"] == "1.9.15"


def test_status_raises_nothing(monkeypatch):
    def broken():
        raise KeyError("meta")

    monkeypatch.setattr(environment, "find", broken)
    assert environment.status()["problems"] == [{"problem": "KeyError: 'meta'", "remedy": ""}]


def test_install_adds_what_a_given_project_lacks(fake, given, tmp_path):
    julia = given(fake(without=["SciMLBase"], PythonCall="0.9.31"))
    assert installing.install() == julia
    arguments = (tmp_path / "arguments").read_text().splitlines()
    added = [text for text in arguments if text.count("=") >= 2 and not text.startswith("-")]
    added = [text for text in added if "-" in text]
    assert added == [
        "SciMLBase=0bca4576-84f4-4d90-8ffe-ffa030f20462=2, 3",
        "PythonCall=6099a3de-0909-46bc-b1f4-468b9a2dfc0d==0.9.34",
    ]
    assert any(
        text.endswith("using EnsembleODE, DiffEqGPU, KernelAbstractions") for text in arguments
    )


def test_install_leaves_a_good_project_alone(fake, given, tmp_path):
    given(fake())
    installing.install()
    assert "Pkg.add" not in (tmp_path / "arguments").read_text()


def test_install_for_a_gpu(fake, given, tmp_path):
    given(fake())
    installing.install("CUDA")
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert "DiffEqGPU=071ae1c0-96b5-11e9-1965-c90190d839ea=3" in arguments
    assert "CUDA=052768ef-5323-5732-b1bb-66c8b64840ba=>= 0" in arguments
    assert not any("BDF=" in text and text.endswith("=>= 0") for text in arguments)
    installing.install(all_methods=True)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert f"OrdinaryDiffEqBDF={environment.METHODS['OrdinaryDiffEqBDF']}=>= 0" in arguments
    with pytest.raises(ValueError, match=r"gpu must be None or one of \['AMDGPU', .* got 'TPU'"):
        installing.install("TPU")


def test_install_downloads_nothing_when_offline(fake, given, monkeypatch, tmp_path):
    given(fake(without=["SciMLBase"]))
    offline(monkeypatch)
    with pytest.raises(JuliaError, match=r"lacks SciMLBase 2, 3. PYTHON_JULIAPKG_OFFLINE is set"):
        installing.install()
    assert "Pkg.add" not in (tmp_path / "arguments").read_text()


def test_install_that_fails(fake, given):
    given(fake(without=["SciMLBase"], adding="exit 1"))
    with pytest.raises(JuliaError, match=r"failed: what it said is above.* Run `ensembleode julia"):
        installing.install()


def test_install_by_juliapkg(fake, monkeypatch):
    calls = []

    def resolve(force):
        calls.append(force)
        save_meta(fake())

    monkeypatch.setattr(juliapkg, "resolve", resolve)
    monkeypatch.setattr(juliapkg, "add", lambda name, uuid: calls.append(name))
    assert installing.install().how == "juliapkg"
    assert calls == [True]
    installing.install("Metal")
    assert calls[1:] == ["DiffEqGPU", "KernelAbstractions", "Metal", True]


def test_install_by_juliapkg_that_fails(monkeypatch):
    def resolve(force):
        raise Exception("could not find Julia 1.10.3 - 1")

    monkeypatch.setattr(juliapkg, "resolve", resolve)
    with pytest.raises(JuliaError, match=r"juliapkg failed: could not find Julia 1.10.3 - 1 Run"):
        installing.install()
    monkeypatch.setattr(environment, "juliacall", lambda: None)
    with pytest.raises(JuliaError, match="juliacall is not installed"):
        installing.install()


@pytest.mark.julia
def test_real_julia():
    try:
        julia = environment.find()
    except JuliaError as error:
        pytest.skip(str(error))
    versions = environment.check(julia, in_process=False)
    assert versions.packages.keys() >= environment.requirements().keys()
    done = environment.run(
        julia, f"{environment.loading()}; print(pathof(EnsembleODE))", capture=True
    )
    assert done.stdout == str(environment.package_root() / "src" / "EnsembleODE.jl")
