"""A fit goes on where it was: after a kill, on other devices, and past a damaged checkpoint."""

import contextlib
import errno
import json
import os
import pathlib
import random
import re
import signal
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ensembleode as eo
from ensembleode.ground.files import locked
from ensembleode.ground.on_disk import OnDisk
from ensembleode.training.checkpoints import Folder
from ensembleode.training.identity import of_optimizer
from ensembleode.training.log import LogFile

from ..marks import slow_unless
from . import several
from .test_fit import fit_line, FLAT, line, QUIET, squares


ocp = pytest.importorskip("orbax.checkpoint")
zarr = pytest.importorskip("zarr")
pytestmark = pytest.mark.usefixtures("optax_mixes_dtypes")
SCRIPT = several.ROOT / "tests" / "training" / "resumed.py"


def alone(folder, where=None):
    """One process."""
    return several.start(SCRIPT, 1, folder, json.dumps(where or {}))[0]


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


OPTIMISERS = {
    "adam": optax.adam(0.1),
    "lbfgs": optax.lbfgs(),
    "least squares": eo.LevenbergMarquardt(),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, id=f"{name}-{how}")
        for name in OPTIMISERS
        for how in ({}, {"devices": 2})
    ],
)
def test_interrupted_or_not(tmp_path, name, how):
    """By the callback in the middle of a pass, with whatever state an optimiser has."""
    options = {"optimizer": OPTIMISERS[name], "batch_size": 4, "maxiters": 8, **how}
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
    # (A step is done when its callback is.)
    assert (result.stopped, result.steps) == ("interrupted", 3)
    assert steps_in(tmp_path / "run") == [3]
    assert fit_line(maxiters=9, checkpoint=tmp_path / "run").steps == 9


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_on_other_devices(tmp_path, before, after):
    options = {"batch_size": 4, "maxiters": 8}
    expected = fit_line(**options)
    fit_line(**options, checkpoint=tmp_path, devices=before, callback=lambda s: s.step == 5)
    found = fit_line(**options, checkpoint=tmp_path, devices=after)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)


@pytest.mark.slow
def test_the_last_and_the_best_are_kept(tmp_path):
    """A loss that goes up again."""
    options = {"optimizer": optax.sgd(1.0), "maxiters": 8, **QUIET}
    how = eo.Checkpoints(tmp_path, steps=1, keep=2)

    def loss(p):
        return (p - 2) ** 2 * jnp.where(p > 2, 50.0, 0.1)

    result = eo.fit(loss, jnp.array(0.0), checkpoint=how, **options)
    steps = steps_in(tmp_path)
    assert steps[-2:] == [7, 8]
    assert len(steps) <= 3
    assert result.best_loss == result.losses.min()
    np.testing.assert_allclose(loss(result.best), result.best_loss, rtol=1e-10)


def saved(tmp_path, steps=3):
    how = eo.Checkpoints(tmp_path, steps=1, keep=3)
    return fit_line(checkpoint=how, maxiters=steps)


# (Orbax leaves futures behind whose errors nobody asks for.)
@pytest.mark.quick_cases(1)
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
    assert f"the checkpoint {tmp_path / '3'} is damaged" in caplog.text
    assert (tmp_path / "3.unreadable").is_dir()
    np.testing.assert_array_equal(found.losses, expected.losses)


def test_none_that_can_be_read(tmp_path):
    """They are left where they are."""
    saved(tmp_path)
    away = tmp_path.parent / "away"
    away.mkdir()
    for step in (1, 2, 3):
        (tmp_path / str(step) / "arrays").rename(away / str(step))
    with pytest.raises(eo.CheckpointError, match="none of the 3 checkpoints"):
        fit_line(checkpoint=tmp_path)
    assert steps_in(tmp_path) == [1, 2, 3]
    for step in (1, 2, 3):
        (away / str(step)).rename(tmp_path / str(step) / "arrays")
    np.testing.assert_array_equal(
        fit_line(checkpoint=tmp_path, maxiters=5).losses, fit_line(maxiters=5).losses
    )


# As the operating system, Orbax and TensorStore say it.
PASSING = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    PermissionError(errno.EACCES, "Permission denied"),
    MemoryError("no memory left"),
    ValueError("UNKNOWN: Error reading local file [OS error 5: EIO Input/output error]"),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("error", PASSING, ids=str)
def test_an_error_that_passes(tmp_path, monkeypatch, error):
    """Nothing is deleted, or passed over, as it can't be read for the moment."""
    saved(tmp_path)

    def fails(self, step):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "_read", fails)
        with pytest.raises(type(error), match=re.escape(str(error))):
            fit_line(checkpoint=tmp_path, maxiters=5)
    assert steps_in(tmp_path) == [1, 2, 3]
    found = fit_line(checkpoint=tmp_path, maxiters=5)
    np.testing.assert_array_equal(found.losses, fit_line(maxiters=5).losses)


@pytest.mark.slow
def test_two_fits_on_one_folder(tmp_path):
    """The second is refused, by whichever name; a fit that was killed has no lock."""
    folder, link = tmp_path / "run", tmp_path / "link"
    process = alone(folder, {"slow": 0.1})
    wait_for_step(process, 4)
    link.symlink_to(folder)
    for name in (folder, link):
        with pytest.raises(eo.CheckpointError, match=r"another fit .* has its checkpoints in"):
            fit_line(checkpoint=name)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    locked(folder / ".lock").release()
    assert steps_in(folder)


def test_two_fits_in_one_process(tmp_path):
    def within(state):
        with pytest.raises(eo.CheckpointError, match="another fit"):
            fit_line(checkpoint=tmp_path / "link")
        return state.step == 2

    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert fit_line(checkpoint=tmp_path / "run", callback=within).steps == 2
    assert fit_line(checkpoint=tmp_path / "link").steps == 5


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


@pytest.mark.parametrize("name", [slow_unless(i % 2 == 0, x) for i, x in enumerate(OTHERS)])
def test_a_checkpoint_of_another_run(tmp_path, name):
    saved(tmp_path)
    given, message = OTHERS[name]
    with pytest.raises(eo.CheckpointError, match=message):
        fit_line(checkpoint=tmp_path, **given)
    assert fit_line(checkpoint=tmp_path, resume=False, **given).steps == 5


def test_the_log_goes_on(tmp_path):
    """A run that begins anew adds its lines, and one that goes on those that are missing."""
    log = tmp_path / "fit.jsonl"
    fit_line(maxiters=3, log=log)
    fit_line(maxiters=2, log=log, checkpoint=tmp_path / "run")
    with open(log, "a") as file:
        file.write('{"step": 3, "los')  # as a kill leaves it
    fit_line(maxiters=4, log=log, checkpoint=tmp_path / "run")
    steps = [json.loads(x)["step"] for x in log.read_text().splitlines()]
    assert steps == [1, 2, 3, 1, 2, 3, 4]


def shifted(shift):
    def loss(params, batch):
        return squares(params, batch) + shift + params.get("more", 0)

    return loss


def with_a_lock(params, batch, lock=threading.Lock()):  # noqa: B008
    """Of which only what JAX traces can be compared."""
    assert not lock.locked()
    return squares(params, batch)


CHANGES = {
    "a constant of the loss": ({"loss": shifted(2.0)}, "has another loss"),
    "an array of the loss": (
        {"loss": lambda p, b: squares(p, b) + jnp.linspace(0.0, 1.0, 2000)[1000]},
        "has another loss",
    ),
    "what is not trained": ({"params": {**FLAT, "more": 7}}, "has another loss"),
    "other numbers": ({"data": {**line(), "y": -5 * line()["x"]}}, r"has other data \(\['y'\]\)"),
    "both": (
        {"loss": shifted(2.0), "data": {**line(), "y": -5 * line()["x"]}},
        "has another loss and has other data",
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CHANGES)
def test_another_loss_or_other_data(tmp_path, name):
    """Is refused; or, where it is allowed, what is best is looked for anew."""
    first = fit_line(shifted(-10.0), checkpoint=tmp_path)
    given, message = CHANGES[name]
    given = {"loss": shifted(-10.0), "maxiters": 8, **given}
    for maxiters in (5, 8):  # (no step is left, or some are)
        with pytest.raises(eo.CheckpointError, match=message):
            fit_line(checkpoint=tmp_path, **{**given, "maxiters": maxiters})
    found = fit_line(checkpoint=eo.Checkpoints(tmp_path, allow_changes=True), **given)
    np.testing.assert_array_equal(found.losses[:5], first.losses)
    assert found.steps == 8
    assert found.best_loss == found.losses[5:].min()
    # From there on it is of this loss.
    assert fit_line(checkpoint=tmp_path, **{**given, "maxiters": 9}).steps == 9
    with pytest.raises(eo.CheckpointError, match=message):
        fit_line(shifted(-10.0), checkpoint=tmp_path)


# Of which some have states that look alike; of one number each.
ALIASES = (
    "adabelief adadelta adamax adam adamw amsgrad lion nadam nadamw radam rmsprop sgd sign_sgd yogi"
)
OPTIMISERS_OF = {
    **{name: getattr(optax, name) for name in ALIASES.split()},
    "momentum": lambda x: optax.sgd(x, momentum=x),
    "Nesterov": lambda x: optax.sgd(x, momentum=x, nesterov=True),
    "a schedule": lambda x: optax.adam(optax.cosine_decay_schedule(x, int(1000 * x))),
    "clipped": lambda x: optax.chain(optax.clip_by_global_norm(x), optax.adam(x)),
    "injected": optax.inject_hyperparams(optax.adam),
    "injected, Nesterov": optax.inject_hyperparams(optax.nadam),
    "a search": lambda x: optax.chain(
        optax.sgd(x), optax.scale_by_backtracking_linesearch(9, decrease_factor=x)
    ),
    "least squares": eo.LevenbergMarquardt,
}


def test_an_optimiser_is_known_by_what_it_does():
    """And not by its numbers."""
    known = {}
    for name, of in OPTIMISERS_OF.items():
        one, two = (of_optimizer(of(x), FLAT)["traced"] for x in (0.1, 0.37))
        assert one == two
        assert one is not None
        assert known.setdefault(one, name) == name


@pytest.mark.slow
def test_another_optimiser(tmp_path):
    """Doesn't go on with the moments of the first one, unless that is allowed."""
    options = {"optimizer": optax.nadam(0.1), "maxiters": 8}
    for run_key in (None, "one"):
        how = eo.Checkpoints(tmp_path / str(run_key), run_key=run_key)
        first = fit_line(checkpoint=how)
        with pytest.raises(eo.CheckpointError, match="this one has another optimizer"):
            fit_line(checkpoint=how, **options)
        how = eo.Checkpoints(how.path, run_key=run_key, allow_changes=True)
        found = fit_line(checkpoint=how, **options)
        np.testing.assert_array_equal(found.losses[:5], first.losses)
        assert found.steps == 8
        assert found.best_loss == found.losses.min()


INJECTED = optax.inject_hyperparams(optax.adam)
WAYS = {
    "injected": INJECTED,
    "in a chain": lambda rate: optax.chain(optax.clip(1e9), INJECTED(rate)),
    "of some": lambda rate: optax.partition(
        {"slope": INJECTED(rate), "shift": INJECTED(rate)}, {"slope": "slope", "shift": "shift"}
    ),
    "one in two": lambda rate: optax.MultiSteps(INJECTED(rate), 1),
}


@pytest.mark.parametrize("name", [slow_unless(x == "one in two", x) for x in WAYS])
def test_numbers_of_the_optimiser_may_change(tmp_path, name):
    """Wherever it keeps them: those of now hold, and everything else goes on."""
    for folder, of in {"plain": optax.adam, "kept": WAYS[name]}.items():
        fit_line(checkpoint=tmp_path / folder, optimizer=of(0.1), maxiters=3)
    plain, kept = (
        fit_line(checkpoint=tmp_path / folder, optimizer=of(0.02), maxiters=6).losses
        for folder, of in {"plain": optax.adam, "kept": WAYS[name]}.items()
    )
    np.testing.assert_allclose(kept, plain, rtol=1e-12)
    assert abs(plain[-1] - fit_line(maxiters=6).losses[-1]) > 1e-3


@pytest.mark.slow
def test_the_same_loss_again(tmp_path):
    """Written otherwise, of other objects, on other devices, or with what can't be compared."""
    fit_line(checkpoint=tmp_path, maxiters=2)

    def other_words(p, b):
        """The same computation."""
        predicted = p["slope"] * b["x"] + p["shift"]
        return (predicted - b["y"]) ** 2

    losses = [other_words, with_a_lock, squares, lambda p, b: squares(p, b)]
    for i, loss in enumerate(losses):
        data = {name: jnp.asarray(x) for name, x in line().items()}
        result = fit_line(loss, checkpoint=tmp_path, data=data, maxiters=3 + i, devices=1 + i % 2)
        assert result.steps == 3 + i
    found = fit_line(checkpoint=tmp_path, maxiters=8, batch_size=3)
    assert found.steps == 8


def test_a_loss_that_can_not_be_compared(tmp_path):
    """Is refused, or has a name."""

    def called(params, batch, lock=threading.Lock()):  # noqa: B008
        shape = jax.ShapeDtypeStruct(batch["x"].shape, batch["x"].dtype)
        x = jax.pure_callback(lambda x: lock.locked() + x, shape, batch["x"])
        return squares(params, {**batch, "x": x})

    fit_line(called, checkpoint=tmp_path / "a", maxiters=1)
    with pytest.raises(eo.CheckpointError, match="has a loss that can't be compared"):
        fit_line(called, checkpoint=tmp_path / "a")
    named = eo.Checkpoints(tmp_path / "b", run_key="one")
    fit_line(called, checkpoint=named, maxiters=1)
    assert fit_line(called, checkpoint=named, maxiters=2).steps == 2
    other = eo.Checkpoints(tmp_path / "b", run_key="two")
    with pytest.raises(eo.CheckpointError, match="this one has another run_key"):
        fit_line(called, checkpoint=other)


def test_a_loss_that_reads_a_file(tmp_path):
    """What it reads when it is traced is part of it."""

    def reading(params, batch):
        return squares(params, batch) + np.load(tmp_path / "a.npy")

    np.save(tmp_path / "a.npy", 1.0)
    fit_line(reading, checkpoint=tmp_path / "run", maxiters=1)
    assert fit_line(reading, checkpoint=tmp_path / "run", maxiters=2).steps == 2
    np.save(tmp_path / "a.npy", 2.0)
    with pytest.raises(eo.CheckpointError, match="has another loss"):
        fit_line(reading, checkpoint=tmp_path / "run")


def test_a_loss_of_all_items(tmp_path):
    weights = jnp.arange(10.0)
    for steps in (1, 2):
        found = fit_line(lambda p, b: weights * squares(p, b), checkpoint=tmp_path, maxiters=steps)
        assert found.steps == steps


class Loader:
    """Batches that are made anew in each pass."""

    def __init__(self, *slopes):
        self.slopes = slopes

    def __iter__(self):
        for slope in self.slopes:
            x = line()["x"]
            yield {"x": x, "y": slope * x}


@pytest.mark.slow
@pytest.mark.parametrize(
    "of", [Loader, lambda *slopes: iter(Loader(*slopes))], ids=["class", "once"]
)
def test_an_iterable_is_known_by_its_first_batches(tmp_path, of):
    """Which are given all the same."""
    options = {"maxiters": 3, "checkpoint": tmp_path}
    first = fit_line(data=of(3.0, 4.0, 5.0), **options)
    expected = fit_line(data=of(3.0, 4.0, 5.0), maxiters=3)
    np.testing.assert_array_equal(first.losses, expected.losses)
    assert fit_line(data=of(3.0, 4.0, 5.0), **options).steps == 3
    with pytest.raises(eo.CheckpointError, match=r"has other data \(batch 1\['y'\]\)"):
        fit_line(data=of(3.0, -4.0, 5.0), **options)


def test_other_batches(tmp_path):
    """In a list, and mapped from a file."""
    options = {"maxiters": 2, "checkpoint": tmp_path / "list"}
    fit_line(data=[line(4), line(6)], **options)
    assert fit_line(data=[line(4), line(6)], **{**options, "maxiters": 3}).steps == 3
    with pytest.raises(eo.CheckpointError, match=r"other data \(batch 1\['x'\], batch 1\['y'\]"):
        fit_line(data=[line(4), line(7)], **options)
    options["checkpoint"] = tmp_path / "mapped"
    mapped = {}
    for name in "xyz":
        np.save(tmp_path / f"{name}.npy", line()["x"])
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    fit_line(data={"x": mapped["x"], "y": mapped["y"]}, **options)
    with pytest.raises(eo.CheckpointError, match=r"other data \(\['y'\]\)"):
        fit_line(data={"x": mapped["x"], "y": mapped["z"]}, **options)
    np.save(tmp_path / "y.npy", -line()["x"])
    mapped["y"] = np.load(tmp_path / "y.npy", mmap_mode="r")
    with pytest.raises(eo.CheckpointError, match=r"other data \(\['y'\]\)"):
        fit_line(data={"x": mapped["x"], "y": mapped["y"]}, **options)
    options["checkpoint"] = tmp_path / "stored"
    stored = {}
    for name in "xyz":
        stored[name] = zarr.create_array(tmp_path / f"{name}.zarr", data=line()["x"])
    fit_line(data={"x": OnDisk(stored["x"]), "y": stored["y"]}, **options)
    fit_line(data={"x": stored["x"], "y": OnDisk(stored["y"])}, **options)
    with pytest.raises(eo.CheckpointError, match=r"other data \(\['y'\]\)"):
        fit_line(data={"x": stored["x"], "y": OnDisk(stored["z"])}, **options)


def test_a_line_search_does_not_keep_the_other_loss(tmp_path):
    options = {"optimizer": optax.lbfgs(), "maxiters": 6}
    fit_line(shifted(-10.0), checkpoint=tmp_path, **{**options, "maxiters": 3})
    how = eo.Checkpoints(tmp_path, allow_changes=True)
    found = fit_line(shifted(100.0), checkpoint=how, **options)
    assert (found.losses[:3] < 0).all()
    assert (found.losses[3:] >= 100.0).all()


class Stopping(Exception):
    pass


def fails_at(step, error):
    def callback(state):
        if state.step == step:
            raise error

    return callback


def batches_until(count, error):
    for _ in range(count):
        yield line()
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("error", [Stopping("enough"), OSError("no route"), SystemExit(3)], ids=str)
@pytest.mark.parametrize("where", ["callback", "data"])
def test_an_exception_keeps_what_there_is(tmp_path, error, where):
    options = {"callback": fails_at(4, error)} if where == "callback" else {}
    data = batches_until(4, error) if where == "data" else None
    done = 3  # (A step counts when its callback is done, a batch when the next one is there.)
    expected = fit_line(maxiters=done, data=None if data is None else iter([line()] * 9))
    with pytest.raises(type(error)) as caught:
        fit_line(maxiters=9, data=data, checkpoint=tmp_path / "run", **options)
    assert caught.value is error
    result = caught.value.result
    assert (result.stopped, result.steps) == ("failed", done)
    np.testing.assert_array_equal(result.losses, expected.losses)
    jax.tree.map(np.testing.assert_array_equal, result.params, expected.params)
    assert steps_in(tmp_path / "run") == [done]
    if where == "callback":
        again = fit_line(maxiters=9, checkpoint=tmp_path / "run")
        np.testing.assert_array_equal(again.losses, fit_line(maxiters=9).losses)
    data = batches_until(4, error) if where == "data" else None
    with pytest.raises(type(error)) as caught:  # and without a checkpoint
        fit_line(maxiters=9, data=data, **options)
    assert caught.value.result.steps == done


def test_sigterm_in_this_process(tmp_path):
    """Raises, between steps, never while a checkpoint is written; and only where nobody waits."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def told(state):
        if state.step == 4:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        fit_line(maxiters=9, checkpoint=tmp_path / "run", callback=told)
    assert caught.value.code == 143
    assert caught.value.result.steps == 3
    assert "SIGTERM" in caught.value.result.message
    assert steps_in(tmp_path / "run") == [3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        assert fit_line(maxiters=9, callback=told).steps == 9
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert came == [1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda x: x.name)
def test_told_to_end_while_it_writes(tmp_path, monkeypatch, number):
    """The checkpoint is whole."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    save, came = ocp.CheckpointManager.save, []

    def told(*args, **options):
        came.append(signal.raise_signal(number))
        return save(*args, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "save", told)
    how = eo.Checkpoints(tmp_path, steps=2)
    try:
        with contextlib.suppress(SystemExit):
            assert fit_line(maxiters=9, checkpoint=how).stopped == "interrupted"
    finally:
        signal.signal(signal.SIGINT, before)
    assert came
    assert steps_in(tmp_path) == [2]
    monkeypatch.undo()
    np.testing.assert_array_equal(
        fit_line(maxiters=9, checkpoint=tmp_path).losses, fit_line(maxiters=9).losses
    )


@contextlib.contextmanager
def no_more(call):
    """The operating system says so, by this call; or, within Orbax's C++, of files that grow."""
    if call == "write":
        resource = pytest.importorskip("resource")
        before, limits = signal.getsignal(signal.SIGXFSZ), resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        return

    def fails(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, fails)
        yield


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", ["rename", "mkdir", "write"])
def test_a_disk_that_is_full(tmp_path, monkeypatch, call):
    """The error names the folder; what was written stays, what was computed is its result."""
    how = eo.Checkpoints(tmp_path, steps=2)
    fit_line(maxiters=4, checkpoint=how)
    save = ocp.CheckpointManager.save

    def full(*args, **options):
        with no_more(call):
            return save(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        for maxiters in (9, 5):  # (on the way, and at the end)
            with pytest.raises(eo.CheckpointError) as caught:
                fit_line(maxiters=maxiters, checkpoint=how)
            assert f"can't be written to {tmp_path}" in str(caught.value)
            said = "No space left" if call != "write" else "File too large"
            assert said in str(caught.value)
            assert caught.value.result.steps == min(maxiters, 6)
            assert steps_in(tmp_path) == [2, 4]
    again = fit_line(maxiters=9, checkpoint=how)
    np.testing.assert_array_equal(again.losses, fit_line(maxiters=9).losses)


class Full:
    """A file for which there is no room."""

    def __init__(self, file, after):
        self._file, self._after = file, after

    def write(self, text):
        self._after -= 1
        if self._after < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self):
        pass

    def close(self):
        self._file.close()
        if self._after == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("after", [0, 2, 5])
def test_no_room_for_the_log(tmp_path, monkeypatch, after):
    """While it is written, or as it is closed."""
    log = tmp_path / "fit.jsonl"
    opened = LogFile.__init__

    def init(self, *args):
        opened(self, *args)
        self._file = Full(self._file, after)

    monkeypatch.setattr(LogFile, "__init__", init)
    with pytest.raises(OSError, match="No space left on device") as caught:
        fit_line(maxiters=5, log=log)
    assert caught.value.filename == str(log)
    assert caught.value.result.steps == after


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
