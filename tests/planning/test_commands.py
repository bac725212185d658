"""The commands of `ensembleode plan`."""

import json
import signal
import subprocess
import sys

import pytest
import yaml

from ensembleode import planning

from ..test_cli import run


FLEET = """
- {name: gpu, count: 32, seconds: 185.3456, items: 65536, iterations: 2000}
- {name: cpu, count: 40, seconds: 4141.0066, items: 16384, iterations: 2000}
"""


@pytest.fixture
def fleet(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return str(path)


def estimate(fleet, *options):
    return run(
        "plan", "estimate", "--items", "1e8", "--iterations", "1e5", "--fleet", fleet, *options
    )


def test_estimate(fleet, capsys):
    assert estimate(fleet) == 0
    out = capsys.readouterr().out
    assert out == f"{planning.estimate(1e8, 1e5, planning.read_fleet(fleet))}\n"
    assert "run time      121.06 hours (5.0 days)\n" in out


@pytest.mark.parametrize("option", ["--items-per-job", "--items_per_job"])
def test_estimate_of_jobs(option, fleet, capsys):
    assert estimate(fleet, option, "65536", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["jobs"] == 1526
    assert found["run_hours"] == pytest.approx(123.56, abs=0.01)


def test_estimate_from_a_file(fleet, tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(f"items: 1e8\niterations: 100000\nfleet: {fleet}\n")
    assert run("plan", "estimate", "--config", str(path)) == 0
    assert "121.06 hours" in capsys.readouterr().out


def test_bad_estimates(fleet, tmp_path, capsys):
    assert run("plan", "estimate", "--items=0.5", "--iterations=1", "--fleet", fleet) == 1
    assert run("plan", "estimate", "--items=1", "--iterations=1", "--fleet=none.yaml") == 1
    assert capsys.readouterr().err == (
        "ensembleode: items must be a whole number, 1 or more, got 0.5.\n"
        "ensembleode: the fleet none.yaml can't be read: No such file or directory.\n"
    )
    assert run("plan", "estimate", "--items=many", "--iterations=1", "--fleet", fleet) == 2
    assert run("plan", "estimate", "--items=1", "--iterations=1") == 2


def test_nobody_reads_on(fleet):
    """(`| head`)"""
    command = [sys.executable, "-c", "from ensembleode.cli import main; main()", "plan", "estimate"]
    command += ["--fleet", fleet, "--items=1e8", "--iterations=1e5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.fixture
def measured(monkeypatch):
    """Measuring that takes no time; what it was asked for."""
    asked = []

    def measure(make_loss, sizes, **options):
        asked.append((make_loss, sizes, options))
        row = planning.Timing(1000, 1, "cpu", "ok", "", 10, (0.25,), 1.0)
        failed = planning.Timing(2000, 1, "cpu", "OOM", "MemoryError")
        return planning.Measurement(make_loss, (row, failed)[2 - len(sizes) :], ())

    monkeypatch.setattr(planning, "measure", measure)
    return asked


def test_measure(measured, capsys):
    assert run("plan", "measure", "a.py:make", "--sizes", "1000,2e3") == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["cpu,", "1", "core", "2,000", "OOM"]
    options = ["--iterations=7", "--cores=1,2", "--repeats=3", "--time-limit=60", "--json"]
    assert run("plan", "measure", "a.py:make", "--sizes=[1000, 2000]", *options) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["seconds"] == 0.25
    given = {"iterations": None, "cores": None, "repeats": 5, "time_limit": 600.0}
    asked = {"iterations": 7, "cores": [1, 2], "repeats": 3, "time_limit": 60.0}
    assert measured == [
        ("a.py:make", [1000, 2000], given | {"progress": False}),
        ("a.py:make", [1000, 2000], asked | {"progress": False}),
    ]
    # Where nothing could be measured.
    assert run("plan", "measure", "a.py:make", "--sizes=2000") == 1
    assert "OOM" in capsys.readouterr().out


def test_measure_as_kind(measured, capsys):
    options = ["--sizes=1000,2000", "--as-kind=here", "--count=4"]
    assert run("plan", "measure", "a.py:make", *options) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out) == [
        {"name": "here", "count": 4, "seconds": 0.25, "items": 1000, "iterations": 10}
    ]
    assert "OOM" in err


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes=1,two"], "sizes must be a whole number, 1 or more, got 'two'"),
        (["--sizes="], "sizes must be a whole number, 1 or more, got ''"),
        (["--sizes=1", "--cores=1,0"], "cores must be a whole number, 1 or more, got '0'"),
        (["--sizes=1", "--iterations=0.5"], "iterations must be a whole number"),
        (
            ["--sizes=1", "--as-kind=a", "--json"],
            "is for one number of cores, and without --json",
        ),
        (["--sizes=1", "--as-kind=a", "--cores=1,2"], "--as-kind is for one number of cores"),
        (["--sizes=1", "--as-kind=a", "--count=0"], "'a': count must be a whole number"),
    ],
)
def test_bad_measures(options, message, measured, capsys):
    assert run("plan", "measure", "a.py:make", *options) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ensembleode: ")
    assert message in err
    assert err.count("\n") == 1
    assert measured == []


def test_no_script(capsys):
    assert run("plan", "measure", "nowhere.py:make", "--sizes=1") == 1
    assert capsys.readouterr().err.startswith("ensembleode: there is no file 'nowhere.py'")
