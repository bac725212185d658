"""Measurements: how processes end, and what is computed from their times."""

import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from ensembleode import planning
from ensembleode.planning import measurement, process
from ensembleode.planning.measurement import fitted


SCRIPT = """
import os
import signal

import jax
import jax.numpy as jnp

from beside import STEP


def make_loss(items):
    if items == 3:
        raise MemoryError
    if items == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if items == 5:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        raise ValueError(f"{cores} cores, {jax.device_count()} devices")
    step, x = jax.jit(STEP), jnp.ones(items)
    return lambda: step(x)


def something_else(items):
    return items


if __name__ == "__main__":
    raise RuntimeError("measuring doesn't run the script")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("STEP = lambda x: 2 * x\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_measure(script, capfd):
    found = planning.measure(f"{script}:make_loss", [100, 200.0, 3, 4, 5], cores=[1], repeats=3)
    assert [row.items for row in found.rows] == [100, 200, 3, 4, 5]
    assert [row.status for row in found.rows] == ["ok", "ok", "OOM", "OOM", "error"]
    assert [row.cores for row in found.rows] == [1] * 5
    assert [row.device for row in found.rows] == ["cpu"] * 5
    assert [row.reason for row in found.rows] == [
        "",
        "",
        "MemoryError",
        "killed (SIGKILL), as Linux does when memory is out",
        "ValueError: 1 cores, 1 devices",
    ]
    for row in found.rows[:2]:
        assert len(row.times) == 3
        assert row.seconds == sorted(row.times)[1]
        assert row.unit_time == pytest.approx(1000 * row.seconds / row.items / row.iterations)
        assert row.first > 0
        assert row.memory is None or row.memory > 2**20
    (fit,) = found.fits
    assert (fit.cores, fit.points) == (1, 2)
    assert "OOM of 4 items (cpu, 1 core): killed" in str(found)
    assert found.kind("here", 2).count == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_all_cores_and_several(script):
    name = f"{script}:make_loss"
    every = measurement.cpu_devices.cores()
    (row,) = planning.measure(name, [5]).rows
    assert row.reason == f"ValueError: {every} cores, {every} devices"
    rows = planning.measure(name, [5, 6], cores=range(1, every + 1), iterations=7).rows
    assert [(row.cores, row.items) for row in rows] == [
        (cores, items) for cores in range(1, every + 1) for items in (5, 6)
    ]
    assert [row.reason for row in rows[::2]] == [
        f"ValueError: {cores} cores, {cores} devices" for cores in range(1, every + 1)
    ]
    assert all(row.iterations == 7 for row in rows[1::2])


@pytest.mark.slow
def test_what_hangs_or_exits(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "HERE = pathlib.Path(__file__).parent\n"
        "PROGRAM = 'import time\\nwhile True: print(flush=True); time.sleep(0.05)'\n"
        "def make_loss(items):\n"
        "    if items == 1:\n"
        "        print('so long', flush=True)\n"
        "        os._exit(7)\n"
        "    subprocess.run([sys.executable, '-c', PROGRAM], stdout=(HERE / 'alive').open('w'))\n"
    )
    (row,) = planning.measure(f"{path}:make_loss", [1]).rows
    assert (row.status, row.reason) == ("error", "exited with code 7: so long")
    (row,) = planning.measure(f"{path}:make_loss", [2], time_limit=20).rows
    assert (row.status, row.reason) == ("timeout", "not done after 20 seconds (time_limit)")
    # The process that it started has ended with it.
    alive = tmp_path / "alive"
    before = alive.stat().st_size
    time.sleep(1)
    assert alive.stat().st_size == before > 0


@pytest.mark.slow
def test_a_module(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("def make(items):\n    return lambda: None\n")
    monkeypatch.chdir(tmp_path)
    (row,) = planning.measure("package.module:make", [10], repeats=1).rows
    assert row.status == "ok"


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """What is reported about a script, here."""
    monkeypatch.setattr(process, "_let_the_kernel_choose_this", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def report(text, function="make", **task):
        path, result = tmp_path / "a_script.py", tmp_path / "result.json"
        path.write_text(text)
        task = {"items": 10, "iterations": 2, "repeats": 3, "function": function} | task
        process.main(json.dumps(task | {"source": str(path)}), str(result))
        return json.loads(result.read_text())

    yield report
    sys.modules.pop("_script_a_script", None)


def test_calls(reported):
    report = reported("calls = []\ndef make(items):\n    return lambda: calls.append(items)\n")
    assert report["status"] == "ok"
    assert len(report["times"]) == 3
    assert report["device"] == "cpu"
    # The first, and three repeats of two.
    assert sys.modules["_script_a_script"].calls == [10] * (1 + 3 * 2)


def test_iterations_that_take_half_a_second(reported):
    report = reported(
        "import time\ndef make(items):\n    return lambda: time.sleep(0.1)\n",
        iterations=None,
        repeats=1,
    )
    assert 1 <= report["iterations"] <= 5
    assert 0.1 * report["iterations"] <= report["times"][0]


def test_results_are_waited_for(reported, monkeypatch):
    waited = []
    monkeypatch.setattr(process.jax, "block_until_ready", waited.append)
    reported("def make(items):\n    return lambda: {'loss': items}\n")
    assert waited == [{"loss": 10}] * 7


OUT_OF_MEMORY = """
import jax.numpy as jnp
def make(items):
    return lambda: jnp.ones((2**20, 2**30)) + 1
"""


def test_memory_that_xla_can_not_have(reported):
    report = reported(OUT_OF_MEMORY)
    assert report["status"] == "OOM"
    assert "RESOURCE_EXHAUSTED" in report["reason"]


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (
            "1 / 0",
            "unusable",
            "a_script.py can't be imported: ZeroDivisionError: division by zero.",
        ),
        ("raise SystemExit(3)", "unusable", "a_script.py can't be imported: SystemExit: 3."),
        ("raise MemoryError", "OOM", "MemoryError"),
        ("make = 3", "unusable", "a_script.py has no function make."),
        ("def made(items): ...", "unusable", "a_script.py has no function make."),
        (
            "def make(items): return items",
            "unusable",
            "make(10) must return a function without arguments that does one iteration, got int.",
        ),
        ("def make(items): raise SystemExit", "error", "SystemExit"),
        ("def make(items): 1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("def make(items): return lambda: 1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("def make(items): raise ValueError('a\\n b.')", "error", "ValueError: a b"),
        ("def make(items): raise OSError('Out of memory')", "OOM", "OSError: Out of memory"),
    ],
)
def test_reasons(text, status, reason, reported):
    report = reported(text)
    assert report["status"] == status
    assert report["reason"].endswith(reason)


def test_memory_of_an_accelerator():
    def device(stats):
        return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    assert process.peak_memory(device({"peak_bytes_in_use": 5})) == 5
    assert process.peak_memory(device(None)) is None


def test_long_reasons(reported):
    assert len(reported("def make(items): raise ValueError('x' * 1000)")["reason"]) == 303


@pytest.mark.parametrize(
    ("code", "said", "status", "reason"),
    [
        (None, "", "timeout", "not done after 5 seconds (time_limit)"),
        (3, "some\nthing\n\n", "error", "exited with code 3: thing"),
        (0, "", "error", "exited with code 0"),
        (-signal.SIGSEGV, "", "error", "ended by SIGSEGV"),
        (-35, "", "error", "ended by signal 35"),
        (-signal.SIGABRT, "check failed", "error", "ended by SIGABRT: check failed"),
        (
            -signal.SIGABRT,
            "terminate called\n  what():  std::bad_alloc\n",
            "OOM",
            "what():  std::bad_alloc",
        ),
    ],
)
def test_ends(code, said, status, reason):
    ended = measurement._ended(code, said.split("\n"), 5.0)
    assert ended == {"status": status, "reason": reason}


def test_reason_that_is_unusable_is_raised(script):
    with pytest.raises(planning.PlanError, match=r"can't measure: something_else\(7\) must return"):
        planning.measure(f"{script}:something_else", [7, 8])


@pytest.mark.slow
def test_scripts_that_measure_themselves(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "from ensembleode import planning\n"
        "def make_loss(items): ...\n"
        "planning.measure(f'{__file__}:make_loss', [1])\n"
    )
    with pytest.raises(planning.PlanError, match="must not measure when it is imported: put that"):
        planning.measure(f"{path}:make_loss", [1])


def test_fit_of_two_points():
    fit = fitted(None, [1, 3], [10.0, 14.0])
    assert (fit.overhead, fit.slope) == (pytest.approx(8), pytest.approx(2))
    assert math.isnan(fit.overhead_error)
    assert math.isnan(fit.slope_error)
    assert str(fit) == "8000 ms + 2e+06 us x items"


def test_uncertainty_covers_the_truth():
    """Timings off by 5%: the truth is within two standard errors, as often as Student has it."""
    rng = np.random.default_rng(0)
    items = [4**i for i in range(3, 11)]
    truth = 1e-3 + 1e-6 * np.array(items)
    noise = 1 + 0.05 * rng.normal(size=(1000, 8))
    fits = [fitted(1, items, cost.tolist()) for cost in truth * noise]
    for name, value in (("overhead", 1e-3), ("slope", 1e-6)):
        off = [(getattr(f, name) - value) / getattr(f, f"{name}_error") for f in fits]
        # For six degrees of freedom.
        assert np.mean(np.abs(off) < 2) == pytest.approx(0.908, abs=0.03)


def timing(items, cores, *times, iterations=10, **fields):
    return planning.Timing(items, cores, "cpu", "ok", "", iterations, times, 1.0, **fields)


FOUND = planning.Measurement(
    "script.py:make_loss",
    (
        timing(1000, 1, 0.2, 0.1, 0.9, memory=300 * 2**20),
        timing(4000, 1, 0.5),
        timing(16000, 1, 1.6),
        planning.Timing(64000, 1, "cpu", "OOM", "MemoryError"),
        timing(1000, 2, 0.08),
        planning.Timing(64000, None, None, "timeout", "not done"),
    ),
    (planning.Fit(1, 3, 0.01, 1e-5, 2e-4, 3e-7),),
)


def test_fits_are_by_cores():
    rows = [timing(n, cores, 1e-4 * n * cores) for cores in (1, 2) for n in (100, 200)]
    failed = planning.Timing(400, 1, "cpu", "OOM", "MemoryError")
    fits = list(measurement._fits([*rows, failed, timing(100, 4, 1.0)]))
    assert [(fit.cores, fit.points) for fit in fits] == [(1, 2), (2, 2)]
    assert [fit.slope for fit in fits] == pytest.approx([1e-5, 2e-5])


def test_table():
    assert str(FOUND) == (
        "device         items  iterations  seconds  spread  unit time  first (s)   memory\n"
        "cpu, 1 core    1,000          10      0.2    400%       0.02          1  300 MiB\n"
        "cpu, 1 core    4,000          10      0.5      0%     0.0125          1\n"
        "cpu, 1 core   16,000          10      1.6      0%       0.01          1\n"
        "cpu, 1 core   64,000                  OOM\n"
        "cpu, 2 cores   1,000          10     0.08      0%      0.008          1\n"
        "?             64,000              timeout\n"
        "\n"
        "an iteration (cpu, 1 core): (10 +/- 0.2) ms + (10 +/- 0.3) us x items\n"
        "OOM of 64,000 items (cpu, 1 core): MemoryError\n"
        "timeout of 64,000 items (?): not done\n"
        "seconds: median of the repeats, which differ by the spread\n"
        "unit time: seconds an item and 1000 iterations"
    )


def test_as_dict():
    found = json.loads(json.dumps(FOUND.as_dict(), allow_nan=False))
    assert found["make_loss"] == "script.py:make_loss"
    assert found["rows"][0]["times"] == [0.2, 0.1, 0.9]
    assert found["rows"][0]["seconds"] == 0.2
    assert found["rows"][0]["unit_time"] == pytest.approx(0.02)
    assert found["rows"][3]["unit_time"] is None
    two = planning.Measurement("a.py:b", (), (fitted(1, [1, 2], [1.0, 2.0]),))
    assert two.as_dict()["fits"][0]["slope_error"] is None


def test_kind():
    assert FOUND.kind("here", 3) == planning.Kind("here", 3, 0.08, 1000, 10)
    nothing = planning.Measurement("script.py:make_loss", FOUND.rows[3:4], ())
    with pytest.raises(planning.PlanError, match=r"no size of script\.py:make_loss could be timed"):
        nothing.kind("here")


@pytest.mark.parametrize(
    ("make_loss", "message"),
    [
        ("script.py", r"named as 'script\.py:function', .*got 'script\.py'"),
        ("script.py:", "named as"),
        (":make_loss", "named as"),
        ("script.py:make loss", "named as"),
        ("nowhere.py:make_loss", r"there is no file 'nowhere\.py'"),
        ("no/where:make_loss", "'no/where' is neither a script, which ends in .py, nor"),
    ],
)
def test_bad_names(make_loss, message):
    with pytest.raises(planning.PlanError, match=message):
        planning.measure(make_loss, [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": []}, "sizes must be one number or more"),
        ({"sizes": [1, 1.0]}, "sizes must be one number or more, each once"),
        ({"sizes": [0]}, "sizes must be a whole number, 1 or more, got 0"),
        ({"cores": [0]}, "cores must be a whole number"),
        ({"cores": [10_000]}, "cores: 10000 were asked for, and this process may use"),
        ({"iterations": 0}, "iterations must be a whole number"),
        ({"repeats": 0}, "repeats must be a whole number"),
        ({"time_limit": -1}, "time_limit must be a positive number, got -1"),
    ],
)
def test_bad_numbers(options, message, script):
    run = functools.partial(planning.measure, f"{script}:make_loss", **({"sizes": [1]} | options))
    with pytest.raises(planning.PlanError, match=message):
        run()


SLOW = """
import os, subprocess, sys, time
def make_loss(items):
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.path.join(os.path.dirname(__file__), "pids"), "w") as file:
        file.write(f"{os.getpid()} {own.pid}\\n")
    return lambda: time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="groups of processes are POSIX")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda x: x.name)
def test_it_ends_with_the_process_that_waits(tmp_path, number):
    """And so do its own."""
    psutil = pytest.importorskip("psutil")
    (tmp_path / "slow.py").write_text(SLOW)
    loss = f"{tmp_path / 'slow.py'}:make_loss"
    call = f"from ensembleode import planning; planning.measure({loss!r}, [1])"
    process = subprocess.Popen([sys.executable, "-c", call])
    pids = tmp_path / "pids"
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.05)
    children = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    process.send_signal(number)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    for child in alive:
        child.kill()
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
