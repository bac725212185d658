"""`benchmarks/gpu_check.py`: whatever becomes of a part, the others run, and what it had found is
kept."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from .problems import BENCHMARKS, of_benchmarks


gpu_check = of_benchmarks("gpu_check")

# What a part says, by its name; `only` are the checks that it is asked for.
SAY = """
import json, os, signal, subprocess, sys, time
only = json.loads(sys.argv[1])

def say(**event):
    print(json.dumps(event), flush=True)

def check(name, result="passed", **more):
    say(check=name, result=result, **more)
"""
FAKES = {
    "good": 'say(checks=["a"]); say(begun="a"); check("a", note="all is well")',
    "raises": 'print("no JSON"); raise ValueError("nothing works")',
    "hangs": """
checks = only or ["first", "stuck by kernel", "last"]
say(checks=checks)
for name in checks:
    say(begun=name)
    if "stuck" in name:
        time.sleep(1000)
    check(name)
""",
    "dies": """
checks = only or ["first", "second", "third"]
say(checks=checks)
for name in checks:
    say(begun=name)
    if name == "second":
        sys.stdout.write('{"half a li')
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    check(name)
""",
    "loses": """
checks = only or ["first", "second"]
say(checks=checks)
for name in checks:
    say(begun=name)
    if name == "first":
        check(name, "failed", error="the address is illegal")
        sys.exit(3)
    check(name)
""",
    "forks": """
say(checks=["a"]); say(begun="a"); check("a")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
say(about={"child": child.pid})
""",
    "never starts twice": """
say(checks=only or ["first", "second"])
os.kill(os.getpid(), signal.SIGKILL)
""",
    "last": 'say(checks=["a"]); say(begun="a"); check("a")',
}


def started(log):
    def start(part, only):
        command = [sys.executable, "-c", SAY + FAKES[part.name], json.dumps(list(only))]
        return gpu_check.Watched(command, {}, log)

    return start


@pytest.fixture
def report(tmp_path):
    return gpu_check.Report(tmp_path, {"device": "none"}, quiet=True)


def run(report, *names, each=5.0, most=60.0, seconds=60.0):
    parts = [gpu_check.Part(name, "", each, most) for name in names]
    deadline = time.monotonic() + seconds
    gpu_check.run_all(parts, started(report.log), report, deadline)
    report.end()
    return [(row["part"], row["check"], row["result"]) for row in report.rows]


@pytest.mark.slow
def test_what_goes_wrong_costs_no_other(report):
    assert run(report, *FAKES, each=2.0) == [
        ("good", "a", "passed"),
        ("raises", "(start)", "died"),
        ("hangs", "first", "passed"),
        ("hangs", "stuck", "hung"),
        ("hangs", "last", "passed"),
        ("dies", "first", "passed"),
        ("dies", "second", "died"),
        ("dies", "third", "passed"),
        ("loses", "first", "failed"),
        ("loses", "second", "passed"),
        ("forks", "a", "passed"),
        ("never starts twice", "(start)", "died"),
        ("never starts twice", "(start)", "died"),
        ("never starts twice", "first", "left out"),
        ("never starts twice", "second", "left out"),
        ("last", "a", "passed"),
    ]
    # (Its whole group is ended; nothing of it is left but what nobody has waited for.)
    status = pathlib.Path(f"/proc/{report.about['child']}/status")
    assert not status.exists() or re.search(r"State:\s+Z", status.read_text())

    log = report.log.read_text()
    assert "ValueError: nothing works" in log
    assert "no JSON" in log
    died = next(row for row in report.rows if row["check"] == "second")
    assert signal.SIGSEGV.name in died["error"]
    place = int(died["log"].rpartition(" ")[2])
    assert log.splitlines()[place - 1] == "=== dies"

    written = json.loads((report.folder / "gpu_check.json").read_text())
    assert written["rows"] == report.rows
    assert written["counts"]["passed"] == 8
    table = (report.folder / "gpu_check.md").read_text()
    assert "| dies | second |  | DIED |" in table
    assert "stuck, kernel: HUNG: nothing for 2 s" in table
    assert len(list(report.folder.iterdir())) == 3


@pytest.mark.slow
def test_what_has_no_time_is_left_out(report):
    found = run(report, "hangs", "last", each=60.0, seconds=2.0)
    assert found == [
        ("hangs", "first", "passed"),
        ("hangs", "stuck", "left out"),
        ("hangs", "last", "left out"),
        ("last", "(all)", "left out"),
    ]
    assert report.bad


@pytest.mark.slow
def test_a_part_has_a_limit_of_its_own(report):
    found = run(report, "hangs", "last", each=60.0, most=2.0)
    assert found[1:] == [
        ("hangs", "stuck", "left out"),
        ("hangs", "last", "left out"),
        ("last", "a", "passed"),
    ]


def test_it_does_not_import_jax():
    code = "import sys, gpu_check\nassert not {'jax', 'numpy', 'ensembleode'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


@pytest.mark.slow
def test_on_a_cpu(tmp_path):
    """Everything passes, or is for a GPU, and is in the JSON and in the table."""
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--cpu", "--minutes", "30"]
    done = subprocess.run(
        [*command, "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {row["part"] for row in found["rows"]} == {part.name for part in gpu_check.PARTS}
    assert {row["result"] for row in found["rows"]} <= {"passed", "skipped"}
    skipped = {row["error"] for row in found["rows"] if row["result"] == "skipped"}
    why = ("there is no GPU", "not installed", "no Rosenbrock methods")
    assert all(any(x in reason for x in why) for reason in skipped)
    assert {"device", "date", "commit", "versions"} <= set(found)
    times = {(row["check"], row["by"]) for row in found["rows"] if "best" in row}
    assert {("Lorenz, float32", x) for x in ("kernel", "arrays", "diffrax")} < times
    table = (tmp_path / "gpu_check.md").read_text()
    assert table.startswith("# no GPU")
    for row in found["rows"]:
        assert f"| {row['part']} | {row['check']} | {row.get('by', '')} |" in table
    assert len(list(tmp_path.iterdir())) == 3
