"""The command line, up to what its commands do."""

import json
import pathlib
import subprocess
import sys
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ensembleode import cli, doctor
from ensembleode.engines.julia import environment


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
        return environment.Julia("/opt/julia", "/opt/project", "juliapkg")

    monkeypatch.setattr(environment, "install", install)
    assert run("julia", "install") == 0
    assert capsys.readouterr().out == "Installed for /opt/julia, in the project /opt/project.\n"
    assert run("julia", "install", "--gpu=CUDA") == 0
    assert run("julia", "install", "--all_methods") == 0
    assert calls == [(None, False), ("CUDA", False), (None, True)]


def test_install_that_fails(monkeypatch, capsys):
    def install(gpu, *, all_methods):
        raise environment.JuliaError("It is raining.", "Wait.")

    monkeypatch.setattr(environment, "install", install)
    assert run("julia", "install") == 1
    assert capsys.readouterr().err == "ensembleode: It is raining. Wait.\n"


def test_kinds_of_gpu():
    choices = typing.get_args(cli.julia_install.__annotations__["gpu"])
    assert choices == ("none", *environment.BACKENDS)


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


@pytest.mark.parametrize("path", [(), *commands(cli.COMMANDS)], ids=" ".join)
def test_help(path, capsys):
    assert run(*path, "--help") == 0
    assert "usage: ensembleode" in capsys.readouterr().out


def test_help_imports_little():
    program = (
        "import runpy, sys\n"
        f"main = runpy.run_path({str(pathlib.Path(cli.__file__))!r})['main']\n"
        "try:\n"
        "    main(['julia', 'install', '--help'])\n"
        "finally:\n"
        "    assert not {'jax', 'numpy', 'juliacall'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_entry_point():
    from importlib.metadata import entry_points

    for entry in entry_points(group="console_scripts", name="ensembleode"):
        assert entry.load() is cli.main


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


def test_doctor(capsys, monkeypatch):
    assert run("doctor") == 0
    said = capsys.readouterr().out
    assert f"jax {jax.__version__}" in said
    assert f"{len(jax.local_devices())} CPU devices for" in said
    assert "float64" in said
    monkeypatch.setitem(doctor.EXTRAS, "dask", ("EnsembleDistributed", ("no_such.module",)))
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {"problem": "EnsembleDistributed needs no_such.module.",
            "remedy": "pip install 'ensembleode[dask]'"} in report["problems"]  # fmt: skip
    assert report["x64"] is True


def test_bench(capsys):
    assert run("bench", "--trajectories", "10", "--repeats", "1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["algorithm"] for row in rows} >= {"EnsembleSerial()", "EnsembleThreads()"}
    assert all(row["failed"] == 0 and row["seconds"] > 0 for row in rows)
