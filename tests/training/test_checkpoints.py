"""A fit goes on where it was: after a kill, on other devices, past a damaged checkpoint."""

import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ensembleode as eo

from . import several
from .test_fit import fit_line, FLAT, line, QUIET


pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.usefixtures("optax_mixes_dtypes")
SCRIPT = several.ROOT / "tests" / "training" / "resumed.py"


def begun(folder, where=None, count=1, devices=1):
    return several.start(SCRIPT, count, folder, json.dumps(where or {}), devices=devices)


def alone(folder, where=None, devices=1):
    """One process, without `initialize`."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, str(folder), json.dumps(where or {})],
        env=several.environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process):
    [(out, err)] = several.finish([process])
    assert process.returncode == 0, err
    said = [line.split(maxsplit=1) for line in out.splitlines()]
    steps = [int(words[1]) for words in said if words[0] == "step"]
    numbers = next(words[1] for words in said if words[0] == "result")
    return np.array([float.fromhex(x) for x in json.loads(numbers)]), steps


def wait_for_step(process, step):
    assert process.stdout is not None
    for printed in process.stdout:
        if printed.startswith("step") and int(printed.split()[1]) >= step:
            return


def steps_in(folder):
    return sorted(int(x.name) for x in pathlib.Path(folder).iterdir() if x.name.isdecimal())


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 5])
def test_killed_at_random_moments(tmp_path, kills):
    """The end is that of an undisturbed run, to the bit; no step is lost but those since."""
    expected, _ = result_of(alone("none"))
    rng, reached = random.Random(kills), 0
    for _ in range(kills):
        process = alone(tmp_path / "run", {"slow": 0.05})
        upto = reached + rng.randint(1, 9)
        wait_for_step(process, upto)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        reached = upto
    found, steps = result_of(alone(tmp_path / "run"))
    np.testing.assert_array_equal(found, expected)
    assert (reached - 1) // 3 * 3 < steps[0] <= reached + 3
    assert steps[-1] == 40


@pytest.mark.parametrize("how", [{}, {"devices": 2}], ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(0.1), optax.lbfgs(), optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))],
)
def test_interrupted_or_not(tmp_path, optimizer, how):
    """By the callback in the middle of a pass, with whatever state an optimiser has."""
    options = {"optimizer": optimizer, "batch_size": 4, "maxiters": 8, **how}
    expected = fit_line(**options)
    path = tmp_path / "run"
    first = fit_line(**options, checkpoint=path, callback=lambda s: s.step == 5)
    assert first.steps == 5
    second = fit_line(**options, checkpoint=path)
    assert second.steps == 8
    for got, wanted in ((second.params, expected.params), (second.best, expected.best)):
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    np.testing.assert_array_equal(second.losses, expected.losses)
    third = fit_line(**options, checkpoint=path)
    np.testing.assert_array_equal(third.losses, expected.losses)


def test_ctrl_c_keeps_what_it_has(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def callback(state):
        if state.step == 4:
            signal.raise_signal(signal.SIGINT)

    try:
        result = fit_line(maxiters=9, checkpoint=tmp_path / "run", callback=callback)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.stopped, result.steps) == ("interrupted", 4)
    assert steps_in(tmp_path / "run") == [4]
    assert fit_line(maxiters=9, checkpoint=tmp_path / "run").steps == 9


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_on_other_devices(tmp_path, before, after):
    options = {"batch_size": 4, "maxiters": 8}
    expected = fit_line(**options)
    fit_line(**options, checkpoint=tmp_path, devices=before, callback=lambda s: s.step == 5)
    found = fit_line(**options, checkpoint=tmp_path, devices=after)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)


def test_a_process_is_killed(tmp_path):
    """The other stops with what to do; and the run goes on with another number of processes."""
    expected, _ = result_of(alone("none"))
    processes = begun(tmp_path / "run", {"slow": 0.1}, count=2)
    first, second = processes
    wait_for_step(first, 8)
    second.send_signal(signal.SIGKILL)
    [(_, err), _] = several.finish(processes, timeout=60)
    assert first.returncode != 0
    assert "ProcessLost: a process that trains with this one" in err
    assert "goes on from its last checkpoint" in err
    found, steps = result_of(alone(tmp_path / "run"))
    assert steps[0] > 6
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_last_and_the_best_are_kept(tmp_path):
    """A loss that goes up again."""
    options = {"optimizer": optax.sgd(1.0), "maxiters": 8, **QUIET}
    how = eo.Checkpoints(tmp_path, steps=1, keep=2)
    result = eo.fit(lambda p: (p - 2) ** 2 * jnp.where(p > 2, 50.0, 0.1), jnp.array(0.0),
                    checkpoint=how, **options)  # fmt: skip
    steps = steps_in(tmp_path)
    assert steps[-2:] == [7, 8]
    assert len(steps) <= 3
    assert result.best_loss == result.losses.min()


def saved(tmp_path, steps=3):
    how = eo.Checkpoints(tmp_path, steps=1, keep=3)
    return fit_line(checkpoint=how, maxiters=steps)


# (Orbax leaves futures behind whose errors nobody asks for.)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("harm", ["truncated", "flipped", "gone"])
def test_a_damaged_checkpoint(tmp_path, harm, caplog):
    """Is passed over, and said to be."""
    expected = fit_line(maxiters=5)
    saved(tmp_path)
    files = [
        x for x in (tmp_path / "3" / "arrays").rglob("*") if x.is_file() and x.parent.name == "d"
    ]
    for file in files:
        content = file.read_bytes()
        if harm == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif harm == "flipped":
            middle = len(content) // 2
            file.write_bytes(
                content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
            )
        else:
            file.unlink()
    found = fit_line(checkpoint=tmp_path, maxiters=5)
    assert "the checkpoint of step 3" in caplog.text
    np.testing.assert_array_equal(found.losses, expected.losses)


def test_none_that_can_be_read(tmp_path):
    saved(tmp_path, steps=1)
    shutil.rmtree(tmp_path / "1" / "arrays")
    with pytest.raises(eo.CheckpointError, match="none of the 1 checkpoints"):
        fit_line(checkpoint=tmp_path)


class Model(eqx.Module):
    slope: jax.Array
    shift: jax.Array
    more: jax.Array


OTHERS = {
    "shape": (
        {"params": {"slope": jnp.zeros(1), "shift": jnp.array(0.0)},
         "loss": lambda p, b: (p["slope"][0] * b["x"] - b["y"]) ** 2},
        r"its state\.params\.slope is float64\[\], and float64\[1\] here",
    ),
    "leaf": (
        {"params": {**FLAT, "more": jnp.zeros(2)}},
        r"it has no state\.params\.more, which is float64\[2\] here",
    ),
    "optimiser": ({"optimizer": optax.sgd(0.1)}, r"it has state\.optimizer\S+, which there is not"),
    "items": ({"data": line(11)}, "a run with items 10, and this one has 11"),
    "key": ({"key": jax.random.key(7)}, "a run with key"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run(tmp_path, name):
    saved(tmp_path)
    given, message = OTHERS[name]
    with pytest.raises(eo.CheckpointError, match=message):
        fit_line(checkpoint=tmp_path, **given)
    assert fit_line(checkpoint=tmp_path, resume=False, **given).steps == 5


def test_the_log_goes_on(tmp_path):
    log = tmp_path / "fit.jsonl"
    fit_line(maxiters=3, checkpoint=tmp_path / "run", log=log)
    with open(log, "a") as file:
        file.write('{"step": 4, "los')  # as a kill leaves it
    fit_line(maxiters=6, checkpoint=tmp_path / "run", log=log)
    assert [json.loads(x)["step"] for x in log.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": 0}, "keep must be a positive integer"),
        ({"steps": 0}, "steps must be a positive integer"),
        ({"seconds": -1.0}, "seconds must not be negative"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        eo.Checkpoints("run", **given)
