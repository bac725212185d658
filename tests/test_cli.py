"""The command line, without what its commands do."""

import errno
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode import cli
from ensembleode.engines.julia import environment, installing
from ensembleode.ground import extras
from ensembleode.tools import doctor, scripts


def run(*arguments):
    """The exit code."""
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    return raised.value.code


REPORT = {
    "python": "3.12.1",
    "juliacall": "0.9.34",
    "juliapkg": "0.1.28",
    "offline": True,
    "threads": 4,
    "executable": "/opt/julia",
    "project": "/opt/project",
    "how": "juliapkg",
    "julia": "1.10.8",
    "packages": {"SciMLBase": "3.49.2", "StaticArrays": "1.9.15"},
    "gpu": {},
    "problems": [],
}
MISSING = {"problem": "The project lacks X 1.", "remedy": "Run it."}
BROKEN = REPORT | {"how": None, "executable": None, "julia": None, "problems": [MISSING]}


@pytest.fixture
def status(monkeypatch):
    return lambda report: monkeypatch.setattr(environment, "status", lambda: report)


def test_status(status, capsys):
    status(REPORT)
    assert run("julia", "status") == 0
    assert capsys.readouterr().out == (
        "Python      3.12.1\n"
        "juliacall   0.9.34\n"
        "juliapkg    0.1.28, offline\n"
        "Julia       1.10.8\n"
        "executable  /opt/julia, by juliapkg\n"
        "project     /opt/project\n"
        "packages    SciMLBase 3.49.2\n"
        "            StaticArrays 1.9.15\n"
        "for GPUs    none\n"
        "threads     4\n"
        "\n"
        'engine="julia" can run.\n'
    )


def test_status_of_what_can_not_run(status, capsys):
    status(BROKEN)
    assert run("julia", "status") == 1
    out = capsys.readouterr().out
    assert "executable  none\n" in out
    assert out.endswith("problem     The project lacks X 1.\n            Run it.\n")
    assert "can run" not in out


@pytest.mark.parametrize("report", [REPORT, BROKEN])
def test_status_as_json(report, status, capsys):
    status(report)
    assert run("julia", "status", "--json") == len(report["problems"])
    assert json.loads(capsys.readouterr().out) == report


def test_install(monkeypatch, capsys):
    calls = []

    def install(gpu, *, all_methods):
        calls.append((gpu, all_methods))
        return environment.JuliaInstallation("/opt/julia", "/opt/project", "juliapkg")

    monkeypatch.setattr(installing, "install", install)
    assert run("julia", "install") == 0
    assert capsys.readouterr().out == "Installed for /opt/julia, in the project /opt/project.\n"
    assert run("julia", "install", "--gpu=CUDA") == 0
    assert run("julia", "install", "--all_methods") == 0
    assert calls == [(None, False), ("CUDA", False), (None, True)]


def test_install_that_fails(monkeypatch, capsys):
    def install(gpu, *, all_methods):
        raise environment.JuliaError("It is raining.", "Wait.")

    monkeypatch.setattr(installing, "install", install)
    assert run("julia", "install") == 1
    assert capsys.readouterr().err == "ensembleode: It is raining. Wait.\n"


def test_kinds_of_gpu():
    choices = typing.get_args(cli.julia_install.__annotations__["gpu"])
    assert choices == ("none", *environment.BACKENDS)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "arguments", [["julia", "install", "--gpu=TPU"], ["julia", "remove"], ["nothing"], ["julia"]]
)
def test_wrong_arguments(arguments, capsys):
    assert run(*arguments) == 2
    assert "usage: ensembleode" in capsys.readouterr().err


def commands(table, path=()):
    for name, command in table.items():
        if isinstance(command, dict):
            yield (*path, name)
            yield from commands(command, (*path, name))
        elif name != "_help":
            yield (*path, name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("path", [(), *commands(cli.COMMANDS)], ids=" ".join)
def test_help(path, capsys):
    assert run(*path, "--help") == 0
    assert "usage: ensembleode" in capsys.readouterr().out


def of_the_script(*arguments, after=""):
    """What the console script prints, run in a process of its own; and then this."""
    name, _, function = SCRIPT.partition(":")
    program = (
        f"import sys; sys.argv[1:] = {list(arguments)!r}\n"
        f"from {name} import {function} as script\n"
        "try:\n"
        "    script()\n"
        "except SystemExit as e:\n"
        "    code = e.code\n" + after
    )
    found = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["ensembleode"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["julia", "install", "--help"]])
def test_help_imports_little(arguments):
    said = of_the_script(
        *arguments,
        after="assert not {'jax', 'numpy', 'equinox', 'juliacall'} & set(sys.modules)\n",
    )
    if arguments == ["--version"]:
        assert said == f"ensembleode {eo.__version__}\n"


def test_the_first_help(capsys):
    """What there is, examples that can be run, and where more is."""
    assert run("--help") == 0
    said = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n    {name} " in said
    examples = [x.split("   ")[0].split() for x in said.splitlines() if x.startswith("  ensemble")]
    assert len(examples) > 2
    for _, *arguments in examples:
        assert run(*arguments, "--print_config" if len(arguments) > 1 else "--help") == 0
    pages = re.findall(r"[\w/-]+\.md", said)
    assert len(pages) > 2
    assert all((ROOT / "docs" / page).exists() for page in pages)


@pytest.mark.slow
def test_a_command_of_the_script():
    """It imports the package by itself."""
    said = of_the_script("doctor", "--json")
    assert json.loads(said)["versions"]["ensembleode"] == eo.__version__


MODEL = """
import jax.numpy as jnp
import numpy as np

def problem():
    x = np.linspace(0.0, 1.0, 40)
    def loss(slope, batch):
        return (slope * batch["x"] - batch["y"]) ** 2
    return {"loss": loss, "params": jnp.array(0.0), "data": {"x": x, "y": 3 * x}}

def nothing():
    return 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_train_by_a_file(model, capsys):
    """`n_gpus` devices share the batches; again it goes on from its checkpoint."""
    pytest.importorskip("orbax.checkpoint")
    (model / "train.yaml").write_text(
        "problem: model.py:problem\nlearning_rate: 0.1\nn_gpus: 2\nbatch_size: 16\n"
        "epochs: 40\ncheckpoint: run\noutput: best.eqx\nquiet: true\nlog: log.jsonl\n"
    )
    with jax.numpy_dtype_promotion("standard"):
        assert run("train", "--config", "train.yaml") == 0
        assert "Done after 120 steps." in capsys.readouterr().out
        slope = eqx.tree_deserialise_leaves("best.eqx", jnp.array(0.0))
        np.testing.assert_allclose(slope, 3.0, atol=1e-2)
        assert len((model / "log.jsonl").read_text().splitlines()) == 120
        assert run("train", "--config", "train.yaml", "--epochs", "41") == 0
    assert "Done after 123 steps." in capsys.readouterr().out


VALIDATED = """
import jax.numpy as jnp
import numpy as np

def problem():
    x = np.linspace(0.0, 1.0, 40)
    def loss(slope, seen, batch):
        return (slope * batch["x"] - batch["y"]) ** 2, seen + batch["x"].size
    validation = iter([1.0, 0.5, 2.0, 3.0, 4.0])
    return {
        "loss": loss,
        "params": jnp.array(0.0),
        "state": jnp.array(0.0),
        "data": {"x": x, "y": 3 * x},
        "validation": lambda slope, seen: next(validation),
        "callback": lambda told, count: (False, count + 1),
        "callback_state": 0.0,
    }
"""


def test_train_with_validation_and_a_state(model, capsys):
    """Patience ends it, which is no failure, and the best of both is written."""
    (model / "model.py").write_text(VALIDATED)
    arguments = ("--maxiters", "99", "--batch_size", "8", "--accumulate", "2", "--quiet")
    more = ("--validate_every", "3", "--patience", "2", "--output", "best.eqx")
    with jax.numpy_dtype_promotion("standard"):
        assert run("train", "model.py:problem", *arguments, *more) == 0
    said = capsys.readouterr().out
    assert "The validation loss was 0.5 after 6 steps, and none of the 2 after" in said
    assert "(loss 0.5) are in best.eqx" in said
    like = jnp.array(0.0), jnp.array(0.0)
    slope, seen = eqx.tree_deserialise_leaves("best.eqx", like)
    assert slope > 0
    # (An epoch has five batches, whose last is a step by itself.)
    assert seen == 80


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model.py:problem",), "fit wants epochs="),
        (("model.py:problem", "--epochs", "1", "--n_gpus", "1000"), "devices=1000 are more"),
        (("model.py:problem", "--n_gpus", "1", "--devices", "1"), "drop one"),
        (("model.py:problem", "--epochs", "1", "--optimizer", "best"), "no optimiser 'best'"),
        (("model.py:nothing", "--epochs", "1"), "must return a dict with loss and params"),
        (("model.py:missing", "--epochs", "1"), "has no function missing"),
        (("missing.py:problem", "--epochs", "1"), "there is no file 'missing.py'"),
        (("model", "--epochs", "1"), "must be named as 'script.py:function'"),
    ],
)
def test_train_that_can_not(model, capsys, arguments, message):
    assert run("train", *arguments, "--quiet") == 1
    assert message in capsys.readouterr().err


DEEP = """
import jax.numpy as jnp

def reshaped(x):
    return x.reshape(3, 5)

def problem():
    return {"loss": lambda p, b: reshaped(b), "params": jnp.array(0.0), "data": jnp.ones(8)}

def failing():
    return int("one")
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("function", "error", "where"),
    [("problem", TypeError, "reshaped"), ("failing", ValueError, "failing")],
)  # fmt: skip
def test_train_shows_where_the_users_code_fails(model, function, error, where):
    (model / "deep.py").write_text(DEEP)
    with pytest.raises(error) as caught:
        run("train", f"deep.py:{function}", "--epochs", "1", "--quiet")
    frames = [(frame.path.name, frame.name) for frame in caught.traceback if frame.path]
    assert ("deep.py", where) in frames


def test_train_knows_at_once_where_it_can_not_write(model, capsys):
    path = "nowhere/best.eqx"
    (model / "model.py").write_text(MODEL.replace("x = np", "print('begun')\n    x = np"))
    assert run("train", "model.py:problem", "--epochs", "1", "--quiet", "--output", path) == 1
    said = capsys.readouterr()
    assert path in said.err
    assert "begun" not in said.out


def test_train_with_no_room_for_the_parameters(model, capsys, monkeypatch):
    """They are put where there is, and what was there stays."""
    replace = os.replace
    (model / "best.eqx").write_text("good")

    def full(source, target):
        if pathlib.Path(target).name == "best.eqx":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(tempfile, "tempdir", str(model))
    arguments = ("--epochs", "3", "--quiet", "--output", "best.eqx")
    with jax.numpy_dtype_promotion("standard"):
        assert run("train", "model.py:problem", *arguments) == 1
    said = capsys.readouterr()
    assert "No space left on device: 'best.eqx'" in said.err
    assert (model / "best.eqx").read_text() == "good"
    place = said.out.split(" are in ")[1].strip()
    assert eqx.tree_deserialise_leaves(place, jnp.array(0.0)) != 0.0


def test_train_that_is_stopped_writes_what_it_has(model, capsys):
    callback = "'callback': lambda s: 1 // (3 - s.step) > 9, "
    (model / "model.py").write_text(MODEL.replace('{"loss"', "{" + callback + '"loss"'))
    arguments = ("--epochs", "9", "--quiet", "--output", "best.eqx")
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ZeroDivisionError):
        run("train", "model.py:problem", *arguments)
    assert "the best parameters so far" in capsys.readouterr().err
    assert eqx.tree_deserialise_leaves("best.eqx", jnp.array(0.0)) != 0.0


def test_a_script_is_sent_to_workers_by_value(tmp_path):
    """To processes that have no module of its name."""
    cloudpickle = pytest.importorskip("cloudpickle")
    script = tmp_path / "app.py"
    script.write_text("RATE = 3\nother = lambda u: RATE * u\ndef host(u): return other(u)\n")
    host = scripts.object_named(str(script), "host")
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(2))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=cloudpickle.dumps(host),
        capture_output=True,
        check=True,
    )
    assert done.stdout.strip() == b"6"


def test_doctor_knows_the_extras():
    """Those that users install, and that have packages; and each of these is found."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_developers = {"bench", "dev", "docs", "julia", "test"}
    assert set(doctor.EXTRAS) == set(project["optional-dependencies"]) - of_developers
    assert not any(x["missing"] for x in doctor.report()["extras"].values())


def test_doctor(capsys, monkeypatch):
    assert run("doctor") == 0
    said = capsys.readouterr().out
    assert f"jax {jax.__version__}" in said
    assert f"{len(jax.local_devices())} CPU devices for" in said
    assert "float64" in said
    problems = doctor.report()["problems"]
    monkeypatch.setitem(doctor.EXTRAS, "dask", ("EnsembleDistributed", ("no_such.module",)))
    assert run("doctor") == 0
    line = f"dask: EnsembleDistributed, not installed ({extras.installing('dask')})\n"
    assert line in capsys.readouterr().out
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["extras"]["dask"]["missing"] == ["no_such.module"]
    assert report["problems"] == problems
    assert report["x64"] is True


def test_bench(capsys):
    assert run("bench", "--trajectories", "10", "--repeats", "1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["algorithm"] for row in rows} >= {"EnsembleSerial()", "EnsembleThreads()"}
    assert all(row["failed"] == 0 and row["seconds"] > 0 for row in rows)
    for option in ("--trajectories", "--repeats"):
        assert run("bench", option, "0") == 1
        assert f"{option[2:]} must be a positive integer, got 0" in capsys.readouterr().err
