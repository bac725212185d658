"""The loss of data that a fit isn't trained with, and what is told of its steps."""

import csv
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo
from ensembleode.training.validation import Validation

from ..marks import slow_unless
from .test_fit import fit_line, FLAT, line, squares


pytestmark = pytest.mark.usefixtures("optax_mixes_dtypes")
HELD = {"x": np.array([0.05, 0.3, 0.55, 0.8, 1.3]), "y": np.array([-0.8, 0.1, 0.6, 1.3, 3.1])}
OPTIONS = {"batch_size": 4, "maxiters": 30, "validation": HELD}


def loss_of_held(params):
    return float(jnp.mean(squares(params, HELD)))


WAYS = {
    "one batch": {"batch_size": None},
    "batches": {},
    "every step": {"validate_every": 1},
    "microbatches": {"microbatch": 2},
    "two devices": {"devices": 2},
    "an iterable": {"validation": [{k: v[i : i + 2] for k, v in HELD.items()} for i in (0, 2, 4)]},
    "a function": {"validation": lambda params: jnp.mean(squares(params, HELD))},
    "batches of the data": {
        "batch_size": None,
        "data": [{k: v[i : i + 4] for k, v in line().items()} for i in (0, 4, 8)],
    },
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", WAYS)
def test_the_lowest_is_the_best(name):
    """Of all that were validated; each loss is the mean over the held-out items."""
    options = {**OPTIONS, **WAYS[name]}
    seen = {}

    def callback(state):
        seen[state.step - 1] = state.params  # (those that the step began with)

    result = fit_line(**options, callback=callback)
    seen[result.steps] = result.params
    each = options.get("validate_every") or (1 if name == "one batch" else 3)
    np.testing.assert_array_equal(result.validation_steps, np.arange(each, 31, each))
    expected = [loss_of_held(seen[step]) for step in result.validation_steps]
    np.testing.assert_allclose(result.validation_losses, expected, rtol=1e-12)
    assert result.best_loss == result.validation_losses.min()
    np.testing.assert_allclose(loss_of_held(result.best), result.best_loss, rtol=1e-12)


def test_there_is_one_more_at_the_end():
    result = fit_line(**OPTIONS | {"maxiters": 8, "validate_every": 5})
    np.testing.assert_array_equal(result.validation_steps, [5, 8])
    np.testing.assert_allclose(result.validation_losses[-1], loss_of_held(result.params))


def test_residuals_are_summed():
    def residuals(params, batch):
        return params["slope"] * batch["x"] + params["shift"] - batch["y"]

    how = {"optimizer": eo.LevenbergMarquardt(), "batch_size": None, "maxiters": 3}
    result = fit_line(residuals, **OPTIONS | how)
    np.testing.assert_allclose(result.validation_losses[-1], loss_of_held(result.params))


losses = st.lists(st.one_of(st.floats(0, 1), st.just(np.nan)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(losses, st.integers(1, 4))
def test_patience(losses, patience):
    """The fit ends at the first validation that is the last of so many, none lower than before."""

    def lowest(x):
        return np.nanmin(x) if np.isfinite(x).any() else np.inf

    def is_over(x):
        return len(x) >= patience and not any(
            lowest(x[: k + 1]) < lowest(x[:k]) if k else np.isfinite(x[0])
            for k in range(len(x) - patience, len(x))
        )

    validation = Validation(None, lambda _: 0.0, 1, patience)
    for n in range(len(losses) + 1):
        so_far = np.array([(i + 1, x) for i, x in enumerate(losses[:n])]).reshape(-1, 2)
        assert bool(validation.why_no_more(so_far)) == is_over(so_far[:, 1])


def test_patience_ends_the_fit():
    given = iter([3.0, 2.0, 4.0, 2.5, 2.0, 1.0])
    params = []

    def validation(now):
        params.append(now)
        return next(given)

    result = fit_line(validation=validation, patience=3, maxiters=6)
    assert (result.stopped, result.steps) == ("patience", 5)
    assert result.message == (
        "The validation loss was 2 after 2 steps, and none of the 3 after it was lower."
    )
    np.testing.assert_array_equal(result.validation_losses, [3.0, 2.0, 4.0, 2.5, 2.0])
    jax.tree.map(np.testing.assert_array_equal, result.best, params[1])
    assert "validation  3 to 2, best 2" in repr(result)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [1, 5, 6])
@pytest.mark.parametrize("devices", [1, slow_unless(False, 2)])
def test_interrupted_or_not(tmp_path, at, devices):
    """The same bits, with what a callback keeps, before and at a validation."""
    pytest.importorskip("orbax.checkpoint")
    options = OPTIONS | {"maxiters": 12, "devices": devices, "patience": 3}
    # (A running mean of the parameters.)
    options["callback_state"] = {"mean": np.zeros(2), "count": 0}

    def callback(state, own, stop=None):
        now = np.array([state.params["slope"], state.params["shift"]])
        own = {"mean": 0.9 * own["mean"] + 0.1 * now, "count": own["count"] + 1}
        return state.step == stop, own

    expected = fit_line(**options, callback=callback)
    path = tmp_path / "run"
    first = fit_line(**options, callback=lambda s, own: callback(s, own, at), checkpoint=path)
    assert (first.stopped, first.steps) == ("callback", at)
    found = fit_line(**options, callback=callback, checkpoint=path)
    for name in ("params", "best", "best_loss", "validation_losses", "validation_steps"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(expected, name))
    jax.tree.map(np.testing.assert_array_equal, found.callback_state, expected.callback_state)
    assert found.callback_state["count"] == 12


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("at", [4, 5])
def test_interrupted_in_a_callback(tmp_path, at, error):
    """The step comes again, with its callback, which keeps what it kept before."""
    pytest.importorskip("orbax.checkpoint")
    options = OPTIONS | {"maxiters": 9, "callback_state": 0.0, "checkpoint": tmp_path / "run"}
    log = tmp_path / "log.jsonl"
    raised = []

    def callback(state, own):
        if state.step == at and not raised:
            raised.append(state.step)
            raise error
        return False, own + state.step

    if error is KeyboardInterrupt:
        first = fit_line(**options, callback=callback, log=log)
        assert (first.stopped, first.steps) == ("interrupted", at - 1)
    else:
        with pytest.raises(error):
            fit_line(**options, callback=callback, log=log)
    found = fit_line(**options, callback=callback, log=log)
    expected = fit_line(**options | {"checkpoint": None}, callback=callback)
    assert found.callback_state == expected.callback_state == sum(range(10))
    np.testing.assert_array_equal(found.losses, expected.losses)
    jax.tree.map(np.testing.assert_array_equal, found.best, expected.best)
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(1, 10))


def test_ctrl_c_in_a_validation(tmp_path):
    """The step comes again, with its validation."""
    pytest.importorskip("orbax.checkpoint")
    interrupted = []

    def validation(params):
        if len(interrupted) == 2:
            interrupted.append(1)
            raise KeyboardInterrupt
        interrupted.append(1)
        return loss_of_held(params)

    options = OPTIONS | {"maxiters": 12, "validation": loss_of_held}
    expected = fit_line(**options)
    options["validation"] = validation
    first = fit_line(**options, checkpoint=tmp_path)
    assert (first.stopped, first.steps, len(first.validation_steps)) == ("interrupted", 8, 2)
    found = fit_line(**options, checkpoint=tmp_path)
    np.testing.assert_array_equal(found.validation_losses, expected.validation_losses)
    np.testing.assert_array_equal(found.losses, expected.losses)


def test_a_validation_that_was_not_there_before(tmp_path):
    """What was the best by another loss isn't the best by this one."""
    pytest.importorskip("orbax.checkpoint")
    options = {"batch_size": 4, "maxiters": 30, "checkpoint": tmp_path}
    assert fit_line(**options).best_loss < 5
    given = {**options, "validation": lambda p: 5 + loss_of_held(p)}
    result = fit_line(**given | {"maxiters": 36})
    assert result.best_loss == result.validation_losses.min() > 5
    result = fit_line(**options | {"maxiters": 42})
    assert result.best_loss < 5
    assert not len(result.validation_losses)


def test_a_checkpoint_of_other_held_out_data(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    fit_line(**OPTIONS | {"maxiters": 6}, checkpoint=tmp_path)
    other = OPTIONS | {"validation": {**HELD, "y": HELD["y"] + 1}}
    with pytest.raises(eo.CheckpointError, match=r"other data \(validation \['y'\]\)"):
        fit_line(**other, checkpoint=tmp_path)
    result = fit_line(**other, checkpoint=eo.Checkpoints(tmp_path, allow_changes=True))
    assert result.validation_steps[0] > 6  # (Those of other data are no losses of these.)


RATE = optax.exponential_decay(0.1, 10, 0.5)


def test_what_is_told_of_a_step(tmp_path):
    """In the callback, as lines of JSON, and as comma-separated values."""
    seen, also = [], []
    result = fit_line(
        **OPTIONS | {"maxiters": 7},
        optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=RATE),
        callback=lambda s: seen.append(s) and None,
        log=[tmp_path / "log.csv", tmp_path / "log.jsonl", also.append],
    )
    assert [s.step for s in also] == [s.step for s in seen] == list(range(1, 8))
    np.testing.assert_array_equal([s.loss for s in seen], result.losses)
    rates = [s.learning_rate for s in seen]
    np.testing.assert_allclose(rates, [RATE(i) for i in range(7)], rtol=1e-6)
    assert [s.validated for s in seen] == [s % 3 == 0 or s == 7 for s in range(1, 8)]
    assert np.isnan([s.validation_loss for s in seen[:2]]).all()
    assert [s.validation_loss for s in seen[3:5]] == [result.validation_losses[0]] * 2
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lines) == 7
    for state, line_, row in zip(seen, lines, rows, strict=True):
        for name, value in state.numbers.items():
            assert line_[name] == float(row[name]) == value
        assert (row["validation_loss"] == "") != state.validated


def test_the_norm_of_the_gradient():
    def mean(params):
        return jnp.mean(squares(params, line()))

    for optimizer in (optax.adam(0.1), optax.lbfgs(), eo.LevenbergMarquardt()):
        seen = []

        def loss(params, batch, optimizer=optimizer):
            value = squares(params, batch)
            return jnp.sqrt(value) if isinstance(optimizer, eo.LevenbergMarquardt) else value

        fit_line(loss, optimizer=optimizer, callback=lambda s, seen=seen: seen.append(s) and None)
        for state in seen[:2]:
            norm = optax.tree.norm(jax.grad(mean)(state.params))
            np.testing.assert_allclose(state.gradient_norm, norm, rtol=1e-5)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_the_log_goes_on(tmp_path, suffix):
    pytest.importorskip("orbax.checkpoint")
    log = tmp_path / f"log.{suffix}"
    options = OPTIONS | {"maxiters": 8, "checkpoint": eo.Checkpoints(tmp_path / "run", steps=3)}
    fit_line(**options | {"maxiters": 5}, log=log)
    with open(log, "a") as file:
        file.write("6,1,0.5\n" if suffix == "csv" else '{"step": 6}\n')  # of a run that was killed
    fit_line(**options, log=log)
    numbers = re.findall(r"^(\d+)," if suffix == "csv" else r'"step": (\d+)', log.read_text(), re.M)
    assert list(map(int, numbers)) == list(range(1, 9))


def test_an_infinite_loss_is_never_the_best(tmp_path):
    given = iter([np.nan, np.inf, 2.0, np.nan])
    result = fit_line(validation=lambda _: next(given), maxiters=4, log=tmp_path / "log.jsonl")
    assert result.best_loss == 2.0
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [x["validation_loss"] for x in lines] == [None, None, 2.0, None]
    result = fit_line(validation=lambda _: np.nan, patience=2, maxiters=4)
    assert (result.stopped, result.steps) == ("patience", 2)
    assert result.message == "None of the 2 validation losses was finite."


ALL = {k: np.tile(v, (3, 1)).T for k, v in line(12).items()}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("of", ["arrays", "batches"])
def test_batches_are_accumulated(of, devices):
    """As one large batch, also the last one of a pass, of which there are fewer."""

    def loss(params, batch):
        rows.append(batch["x"].shape[0])
        return squares(params, batch).sum(axis=1)

    rows = []
    options = {"optimizer": optax.sgd(0.1), "maxiters": 7, "shuffle": False, "devices": devices}
    expected = fit_line(loss, data=ALL, batch_size=6, **options)
    rows.clear()
    if of == "arrays":
        found = fit_line(loss, data=ALL, batch_size=2, accumulate=3, **options)
    else:
        data = [{k: v[i : i + 2] for k, v in ALL.items()} for i in range(0, 12, 2)]
        found = fit_line(loss, data=data, accumulate=3, **options)
    assert set(rows) <= {6, 2 // devices}  # (It is traced for all of them, too.)
    assert 2 // devices in rows
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-10)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), *[
        x.params for x in (found, expected)
    ])  # fmt: skip


def test_the_last_of_the_accumulated_batches(tmp_path):
    """Passes of 2 + 2 and then 1 batches, also where a fit goes on within a pass."""
    pytest.importorskip("orbax.checkpoint")
    data = [{k: v[i : i + 2] for k, v in line(10).items()} for i in range(0, 10, 2)]
    options = {"data": data, "accumulate": 2, "maxiters": 8}
    seen = []
    expected = fit_line(**options, callback=lambda s: seen.append((s.items, s.epoch)) and None)
    assert seen[:4] == [(4, 0), (4, 0), (2, 1), (4, 1)]
    for stop in (1, 2, 3):
        path = tmp_path / str(stop)
        fit_line(**options, checkpoint=path, callback=lambda s, stop=stop: s.step == stop)
        found = fit_line(**options, checkpoint=path)
        np.testing.assert_array_equal(found.losses, expected.losses)


REFUSED = {
    "patience alone": ({"patience": 3}, ValueError, "patience counts validations"),
    "every alone": ({"validate_every": 3}, ValueError, "validate_every counts validations"),
    "no count": ({"validation": HELD, "patience": 0}, ValueError, "patience must be a positive"),
    "other names": ({"validation": {"x": HELD["x"]}}, ValueError, r"has \['x'\], \['y'\]; it"),
    "an iterator": ({"validation": iter([HELD])}, ValueError, "gone over once only"),
    "no number": ({"validation": lambda p: HELD["x"]}, TypeError, "must return one number"),
    "no state": (
        {"callback": lambda s, own: True, "callback_state": 0.0},
        TypeError,
        r"must return \(stop, own\); it returned True",
    ),
    "another state": (
        {"callback": lambda s, own: (False, np.ones(2)), "callback_state": 0.0},
        TypeError,
        r"arrays of the shapes \(\); it returned \(2,\)",
    ),
    "no log": ({"log": 3}, TypeError, "log must be the path of a file, or a function"),
    "no accumulation": ({"accumulate": 0}, ValueError, "accumulate must be a positive integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fit_line(**given)


def test_a_fit_without_data_is_validated_by_a_function():
    def loss(params):
        return jnp.mean(squares(params, line()))

    how = {"optimizer": optax.adam(0.1), "maxiters": 4, "progress": False}
    result = eo.fit(loss, FLAT, validation=loss_of_held, validate_every=2, **how)
    np.testing.assert_array_equal(result.validation_steps, [2, 4])
    np.testing.assert_allclose(result.validation_losses[-1], loss_of_held(result.params))
    with pytest.raises(TypeError, match="validation must be a function here"):
        eo.fit(loss, FLAT, validation=HELD, **how)
    with pytest.raises(ValueError, match="accumulate is of data"):
        eo.fit(loss, FLAT, accumulate=2, **how)


def test_both_curves_are_drawn():
    plt = pytest.importorskip("matplotlib.pyplot")
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    result = fit_line(**OPTIONS | {"maxiters": 120})
    ax = result.plot(color="C3")
    mean, each, validation = ax.lines
    assert [x.get_text() for x in ax.get_legend().get_texts()] == ["loss", "validation"]
    np.testing.assert_allclose(mean.get_ydata()[0], result.losses[:2].mean())
    np.testing.assert_array_equal(each.get_ydata(), result.losses)
    np.testing.assert_array_equal(validation.get_xdata(), result.validation_steps)
    assert len(result.plot(smoothing=1).lines) == 2
    for color in ("C0", "C1", "tab:blue", "red"):
        loss, *_, validation = result.plot(color=color).lines
        assert len({to_hex(x.get_color()) for x in (loss, validation)}) == 2
    plt.close("all")


MISSING = np.where(np.arange(24).reshape(8, 3) % 5 == 1, np.nan, 2.0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", [{}, {"batch_size": 3}, {"devices": 2}])
def test_missing_observations(how):
    """The loss leaves them out; where it doesn't, the message says so."""
    options = {"data": MISSING, "params": jnp.array(0.0), "optimizer": optax.sgd(0.1)} | how

    def loss(level, seen):
        error = jnp.where(jnp.isnan(seen), 0.0, level - jnp.nan_to_num(seen))
        return jnp.sum(error**2, axis=1)

    result = fit_line(loss, maxiters=60, **options)
    np.testing.assert_allclose(result.params, 2.0, rtol=1e-3)

    def careless(level, seen):
        return jnp.sum((level - seen) ** 2, axis=1)

    def trap(level, seen):  # (of which the loss is finite, and the gradient isn't)
        return jnp.sum(jnp.where(jnp.isnan(seen), 0.0, (level - seen) ** 2), axis=1)

    for loss in (careless, trap):
        result = fit_line(loss, **options)
        assert result.stopped == "nonfinite"
        assert "has missing observations (NaN): replace them before" in result.message
