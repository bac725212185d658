"""Several processes: the script of the page by every launcher, and what becomes of the others when
one is killed."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ensembleode.training.lifelines import Lifeline

from ..test_docs import blocks_of
from . import several
from .test_checkpoints import alone as fit_alone, result_of, wait_for_step


PAGE = several.ROOT / "docs" / "training" / "processes.md"
SURVIVOR = several.ROOT / "tests" / "training" / "survivor.py"
RESUMED = several.ROOT / "tests" / "training" / "resumed.py"


def page_script(folder):
    folder.mkdir()
    script = folder / "train.py"
    block = next(x for x in blocks_of(PAGE.read_text()) if x.text.startswith("# train.py\n"))
    script.write_text(block.text)
    return script


def losses(folder):
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of the page's script in one process."""
    script = page_script(tmp_path_factory.mktemp("page") / "alone")
    [(out, err)] = several.finish(several.start(script, 1, cwd=script.parent))
    said = next(x for x in blocks_of(PAGE.read_text()) if x.text.startswith("Done after"))
    assert out.strip() == said.text.strip(), err
    return losses(script.parent)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["JAX", "torchrun", "Open MPI", "MPICH", "Slurm"])
def test_what_a_launcher_sets(launcher, tmp_path, alone):
    script = page_script(tmp_path / "page")
    processes = several.start(script, 2, launcher=launcher, devices=None, cwd=script.parent)
    outputs = several.finish(processes)
    assert [p.returncode for p in processes] == [0, 0], outputs
    found = losses(script.parent)
    assert len(found) == 160  # of the first process only
    np.testing.assert_allclose(found, alone, rtol=1e-6)


COMMANDS = {
    "mpirun.openmpi": "--allow-run-as-root --oversubscribe -np 2",
    "mpiexec.hydra": "-n 2",
    "srun": "-n 2",
    "torchrun": "--nproc-per-node 2 --no-python",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_launcher_itself(command, tmp_path, alone):
    if not shutil.which(command):
        pytest.skip(f"there is no {command}")
    if command == "srun" and subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("no controller of Slurm answers")
    script = page_script(tmp_path / "page")
    done = subprocess.run(
        [command, *COMMANDS[command].split(), sys.executable, script],
        cwd=script.parent,
        env=several.environment(None),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Done after 160 steps") == 1
    np.testing.assert_allclose(losses(script.parent), alone, rtol=1e-6)


SHARES = """
import jax, os, ensembleode as eo
eo.initialize()
print(len(jax.local_devices()), sorted(os.sched_getaffinity(0)), jax.process_count())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there are no affinities")
@pytest.mark.parametrize("devices", [None, 1])
def test_cores_are_divided(devices, tmp_path):
    """Unless it is said how many devices there are."""
    script = tmp_path / "script.py"
    script.write_text(SHARES)
    every = sorted(os.sched_getaffinity(0))
    processes = several.start(script, 2, devices=devices)
    outputs = several.finish(processes)
    assert [p.returncode for p in processes] == [0, 0], outputs
    found = [next(x for x in out.splitlines() if x.endswith(" 2")) for out, _ in outputs]
    each = max(1, len(every) // 2)
    shares = [every[:each], (every[each:] or every)[:each]]
    if devices is not None:
        each, shares = devices, [every, every]
    assert found == [f"{each} {share} 2" for share in shares]


@pytest.mark.slow
def test_cores_that_are_bound_stay(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\ncores = sorted(os.sched_getaffinity(0))\n"
        "os.sched_setaffinity(0, cores[-1:] if os.environ['JAX_PROCESS_ID'] == '1' else cores)\n"
        + SHARES
    )
    every = sorted(os.sched_getaffinity(0))
    if len(every) == 1:
        pytest.skip("there is one core")
    outputs = several.finish(several.start(script, 2, devices=None))
    assert f"{len(every)} {every} 2" in outputs[0][0]
    assert f"1 {every[-1:]} 2" in outputs[1][0]


@pytest.mark.slow
def test_too_late():
    """JAX has started."""
    program = "import jax, ensembleode as eo; jax.devices(); eo.initialize()"
    processes = several.start("-c", 2, program)
    for _, err in several.finish(processes):
        assert "RuntimeError: initialize must be called before JAX computes" in err
    assert [p.returncode for p in processes] == [1, 1]


def the_sentence(number, lost, count=2):
    return (
        f"ensembleode: process {number} of {count} ends with status 75, as process {lost} was "
        "killed or can't be reached any more: start it again"
    )


def ready(processes):
    for process in processes:
        assert any(line.startswith("ready") for line in process.stdout)


def ends_cleanly(process, err, sentence):
    """With the status and one sentence."""
    assert process.returncode == 75, err
    assert err.startswith(sentence), err
    assert err.count("\n") == 1, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("doing", "lost"),
    [
        (doing, lost)
        for doing in ("steps", "callback", "python", "computation", "caught")
        for lost in (0, 1)
        if (doing, lost) != ("computation", 0)
    ],
)
def test_one_is_killed(doing, lost):
    processes = several.start(SURVIVOR, 2, doing)
    ready(processes)
    time.sleep(1.0)
    processes[lost].kill()
    began = time.monotonic()
    out, err = several.finish(processes, timeout=60)[1 - lost]
    assert time.monotonic() - began < 30
    process = processes[1 - lost]
    if doing == "computation":  # a program of the user, whose error Python prints
        assert process.returncode == 75
        assert the_sentence(1 - lost, lost) in err
        assert "Fatal" not in err
        return
    ends_cleanly(process, err, the_sentence(1 - lost, lost))
    if doing == "caught":
        assert "caught it after True steps: a process that trains with this one" in out
        assert "and had the time for this" in out


@pytest.mark.slow
def test_one_of_three_is_killed():
    processes = several.start(SURVIVOR, 3, "steps")
    ready(processes)
    processes[2].kill()
    outputs = several.finish(processes, timeout=60)
    for i in (0, 1):
        ends_cleanly(processes[i], outputs[i][1], the_sentence(i, 2, 3))


@pytest.fixture(scope="module")
def undisturbed():
    """What the fit with checkpoints finds."""
    return result_of(fit_alone("none"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random(seed, tmp_path, undisturbed):
    """The other has the status and the sentence; and one process goes on to the same end."""
    rng = random.Random(seed)
    processes = several.start(RESUMED, 2, tmp_path / "run", '{"slow": 0.05}')
    wait_for_step(processes[0], rng.randint(1, 30))
    time.sleep(rng.uniform(0.0, 0.3))
    lost = rng.randint(0, 1)
    processes[lost].kill()
    _, err = several.finish(processes, timeout=60)[1 - lost]
    ends_cleanly(processes[1 - lost], err, the_sentence(1 - lost, lost))
    assert "it goes on from its last checkpoint" in err
    found, _ = result_of(fit_alone(tmp_path / "run"))
    np.testing.assert_allclose(found, undisturbed, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_are_told_to_end(number, tmp_path):
    """As a launcher does when time is up: each in its own way, and a checkpoint is left."""
    processes = several.start(RESUMED, 2, tmp_path / "run", '{"slow": 0.05}')
    wait_for_step(processes[0], 4)
    for process in processes:
        process.send_signal(number)
    outputs = several.finish(processes, timeout=60)
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode in (-signal.SIGTERM, 143, 0, 75), err
        assert "Fatal" not in err
    assert any((tmp_path / "run").glob("[0-9]*"))


ONE_ENDS = {
    "error in one": ([1, 75], "process 0 has ended"),
    "exit in one": ([3, 75], "process 0 has ended"),
    "one is done": ([75, 75], "process 1 has ended"),
    "one takes longer": ([0, 0], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("doing", ONE_ENDS)
def test_one_ends(doing):
    """By itself: the others end, too, if they need it."""
    processes = several.start(SURVIVOR, 2, doing)
    outputs = several.finish(processes, timeout=100)
    codes, why = ONE_ENDS[doing]
    assert [p.returncode for p in processes] == codes, outputs
    errors = "".join(err for _, err in outputs)
    assert why in errors
    assert ("done" in outputs[0][0]) == (doing == "one takes longer")
    assert not re.search("Fatal|Aborted|terminate", errors)


@pytest.mark.slow
def test_another_job_at_the_port():
    port = several.free_port()
    first = several.start(SURVIVOR, 2, "python", port=port)
    ready(first)
    late = several.start(SURVIVOR, 2, "python", port=port)
    outputs = several.finish(late)
    for process in first:
        process.kill()
    several.finish(first)
    assert [p.returncode for p in late] == [1, 1]
    assert f"can't reach or open 127.0.0.1:{port} of process 0" in outputs[0][1]
    assert "Set JAX_COORDINATOR_ADDRESS to its host and a free port" in outputs[0][1]
    assert "process 0 has 2 processes, or one with this number. Another job" in outputs[1][1]


class Member:
    """A process's lifeline, and what is heard of the others."""

    def __init__(self):
        self.heard = []
        self.line = Lifeline(lambda word, process: self.heard.append((word, process)), 3)

    def join(self, port, number, count, within=10):
        about = {"process": number, "processes": count}
        return self.line.join("127.0.0.1", port, about, within)

    def hears(self, *words):
        until = time.monotonic() + 10
        while not set(words) <= set(self.heard):
            assert time.monotonic() < until, self.heard
            time.sleep(0.01)


def test_not_all_come():
    member, port = Member(), several.free_port()
    member.line.open_door(2, port, "127.0.0.1")
    with pytest.raises(TimeoutError):
        member.join(port, 0, 2, within=0.3)
    with pytest.raises(ConnectionError, match="process 0 has 2 processes"):
        member.join(port, 0, 2)
    with pytest.raises(ConnectionError, match="process 0 has 2 processes"):
        member.join(port, 1, 3)
    with pytest.raises(ConnectionRefusedError):
        member.join(several.free_port(), 1, 2, within=0.3)
    member.line.close()


def test_what_strangers_send():
    """At the door, such as a scan of ports: those who have joined hear of each other all the same,
    and that one is lost, or the first."""
    port, members = several.free_port(), [Member() for _ in range(3)]
    members[0].line.open_door(3, port, "127.0.0.1")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda i: members[i].join(port, i, 3), range(3)))
    assert found == [[{"process": i, "processes": 3} for i in range(3)]] * 3
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100)):
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), 5)) as s:
            s.sendall(said)
    members[1].line.say("bye")
    members[1].line.close()
    members[0].hears(("bye", 1), ("lost", 1))
    members[2].hears(("bye", 1), ("lost", 1))
    members[0].line.close()
    members[2].hears(("closed", 0))
    members[2].line.close()
