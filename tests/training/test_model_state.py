"""A model with a state, which goes from step to step: running statistics, a memory."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ensembleode as eo

from .test_fit import FLAT, line, QUIET


pytestmark = pytest.mark.usefixtures("optax_mixes_dtypes")


class Normalised(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(1, 3, key=keys[0])
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch", momentum=0.9)
        self.last = eqx.nn.Linear(3, "scalar", key=keys[1])
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, key):
        h, state = self.norm(self.first(x[None]), state)
        return self.last(self.dropout(jnp.tanh(h), key=key)), state


def normalised(model, state, batch, keys):
    over = {"axis_name": "batch", "in_axes": (0, None, 0), "out_axes": (0, None)}
    y, state = jax.vmap(model, **over)(batch["x"], state, keys)
    return (y - batch["y"]) ** 2, state


def fit_normalised(**options):
    model, state = eqx.nn.make_with_state(Normalised)(jax.random.key(0))
    options = {"optimizer": optax.adam(0.05), "batch_size": 4, "epochs": 3, **QUIET, **options}
    return eo.fit(normalised, model, line(), state=state, **options)


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_running_statistics():
    """Those of batches of four, four and two items, by the parameters of each step."""
    seen = []
    result = fit_normalised(shuffle=False, callback=lambda s: seen.append((s.params, s.state)))
    _, state = eqx.nn.make_with_state(Normalised)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 4)  # (which the statistics don't depend on)
    for step, (model, told) in enumerate(seen):
        close(told, state)
        i = 4 * (step % 3)
        batch = {k: x[i : i + 4] for k, x in line().items()}
        _, state = normalised(model, state, batch, keys[: len(batch["x"])])
    assert result.steps == 9
    close(result.state, state)


def close(found, expected):
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9)


def remembering(params, state, batch):
    """What was seen before counts half as much, and all is counted."""
    losses = (params["slope"] * batch["x"] + params["shift"] - batch["y"] + state["mean"]) ** 2
    mean, seen = state["mean"] / 2 + jnp.mean(batch["x"]), state["seen"] + len(batch["x"])
    return losses, {"mean": mean, "seen": seen}


FRESH = {"mean": 0.0, "seen": 0}
WAYS = {
    "batches": ({}, (4, 4, 2)),
    "one batch": ({"batch_size": None}, (10,)),
    "microbatches": ({"batch_size": None, "microbatch": 4}, (4, 4, 2)),
    "microbatches of batches": ({"microbatch": 3}, (3, 1, 3, 1, 2)),
    "accumulated": ({"accumulate": 2}, (4, 4, 2)),
    "an iterable": ({"batch_size": None, "data": (3, 1, 4, 2)}, (3, 1, 4, 2)),
    "a device": ({"devices": [jax.devices()[-1]]}, (4, 4, 2)),
    "a line search": ({"optimizer": optax.lbfgs()}, (4, 4, 2)),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", WAYS)
def test_the_state_goes_from_batch_to_batch(name):
    """Each item is seen once in a pass, and a padded row never."""
    how, sizes = WAYS[name]
    options = {"batch_size": 4, "optimizer": optax.adam(0.1), "shuffle": False, **QUIET, **how}
    data, ends = line(), np.cumsum([0, *sizes])
    parts = [{k: v[i:j] for k, v in data.items()} for i, j in itertools.pairwise(ends)]
    if "data" in options:
        data = parts
        del options["data"]
    result = eo.fit(remembering, FLAT, data, state=FRESH, epochs=2, **options)
    mean = 0.0
    for part in 2 * parts:
        mean = mean / 2 + part["x"].mean()
    np.testing.assert_allclose(result.state["mean"], mean, rtol=1e-12)
    assert result.state["seen"] == 20
    assert result.state["seen"].dtype == jnp.asarray(0).dtype


def test_accumulated_batches_are_those_of_before():
    """The loss of a step is the mean over batches that have seen those before them."""
    options = {"batch_size": 4, "shuffle": False, "state": FRESH, **QUIET}
    result = eo.fit(
        remembering, FLAT, line(), optimizer=optax.sgd(0.0), accumulate=3, epochs=1, **options
    )
    losses, state = [], FRESH
    for i in (0, 4, 8):
        part = {k: v[i : i + 4] for k, v in line().items()}
        each, state = remembering(FLAT, state, part)
        losses.append(each)
    np.testing.assert_allclose(result.losses, [np.concatenate(losses).mean()], rtol=1e-12)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="as it is"),
        pytest.param({"accumulate": 2}, id="accumulating", marks=pytest.mark.slow),
        pytest.param({"optimizer": optax.lbfgs()}, id="a line search", marks=pytest.mark.slow),
        pytest.param(
            {"validation": line(5), "batch_size": None}, id="validation", marks=pytest.mark.slow
        ),
    ],
)
def test_interrupted_or_not(tmp_path, how):
    """A fit that goes on has the same bits, in its state, too."""
    pytest.importorskip("orbax.checkpoint")
    expected = fit_normalised(**how)
    first = fit_normalised(**how, checkpoint=tmp_path, callback=lambda s: s.step == 2)
    assert first.steps == 2
    found = fit_normalised(**how, checkpoint=tmp_path)
    for name in ("params", "state", "best", "best_state", "losses", "validation_losses"):
        same(*(eqx.filter(getattr(x, name), eqx.is_array) for x in (found, expected)))


def test_a_checkpoint_of_another_state_is_refused(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    options = {"optimizer": optax.adam(0.1), "maxiters": 2, "checkpoint": tmp_path, **QUIET}
    eo.fit(remembering, FLAT, line(), state=FRESH, **options)

    def longer(params, state, batch):
        return remembering(params, state["old"], batch)[0], state

    other = {"old": FRESH, "more": jnp.zeros(2)}
    with pytest.raises(eo.CheckpointError, match=r"model_state\.\w+"):
        eo.fit(longer, FLAT, line(), state=other, **options)


def test_validation_is_in_inference_mode():
    """By the running statistics and without dropout; and the state is that of training."""
    seen = []

    def loss_of_held(model, state):
        model = eqx.nn.inference_mode(model)
        seen.append(state)
        keys = jax.random.split(jax.random.key(1), 5)
        return jnp.mean(normalised(model, state, line(5), keys)[0])

    by_function = fit_normalised(validation=loss_of_held)
    by_data = fit_normalised(validation=line(5))
    np.testing.assert_allclose(by_data.validation_losses, by_function.validation_losses, rtol=1e-12)
    same(by_data.state, fit_normalised().state)
    best = int(np.argmin(by_data.validation_losses))
    same(by_data.best_state, eqx.filter(seen[best], eqx.is_array))
    model = eqx.nn.inference_mode(by_data.best)
    found = loss_of_held(model, by_data.best_state)
    np.testing.assert_allclose(found, by_data.best_loss, rtol=1e-12)


def test_dropout_is_only_for_training():
    """Without a state, too."""
    drop = eqx.nn.Dropout(0.5)

    def loss(params, batch, keys):
        slope, drop = params
        return jax.vmap(lambda x, y, key: (drop(slope * x, key=key) - y) ** 2)(
            batch["x"], batch["y"], keys
        )

    options = {"optimizer": optax.sgd(0.0), "maxiters": 1, **QUIET}
    found = eo.fit(loss, (jnp.array(2.0), drop), line(), validation=line(), **options)
    expected = np.mean((2 * line()["x"] - line()["y"]) ** 2)
    np.testing.assert_allclose(found.validation_losses, [expected])
    assert abs(found.losses[0] - expected) > 1e-3
    assert not found.params[1].inference


def test_without_data():
    """A state with a PRNG key; the best parameters go with the state that their loss returned."""

    def loss(p, state):
        key, noise = jax.random.split(state["key"])
        return (p - jax.random.normal(noise)) ** 2, {"key": key, "count": state["count"] + 1}

    state = {"key": jax.random.key(3), "count": 0}
    result = eo.fit(
        loss, jnp.array(0.0), state=state, optimizer=optax.sgd(0.1), maxiters=5, **QUIET
    )
    p, losses = jnp.array(0.0), []
    for _ in range(5):
        (value, state), slope = jax.value_and_grad(loss, has_aux=True)(p, state)
        losses.append(value)
        p = p - 0.1 * slope
    np.testing.assert_allclose(result.losses, losses, rtol=1e-12)
    assert jax.random.key_data(result.state["key"]).tolist() == (
        jax.random.key_data(state["key"]).tolist()
    )
    assert result.best_state["count"] == np.argmin(losses) + 1


@pytest.mark.slow
def test_a_callback_may_use_the_state():
    """An `equinox.nn.State` can be used once: each call has its own."""

    def callback(state):
        normalised(state.params, state.state, line(), jax.random.split(jax.random.key(0), 10))

    expected = fit_normalised(epochs=1)
    same(fit_normalised(epochs=1, callback=callback).state, expected.state)


def test_a_loss_that_is_not_finite_has_its_items():
    def loss(params, state, batch):
        losses, state = remembering(params, state, batch)
        return jnp.where(batch["x"] == 1.0, jnp.nan, losses), state

    options = {"optimizer": optax.adam(0.1), "epochs": 1, "batch_size": 4, "shuffle": False}
    result = eo.fit(loss, FLAT, line(), state=FRESH, **options, **QUIET)
    assert result.stopped == "nonfinite"
    assert "first that of item 9" in result.message
    assert result.state["seen"] == 8


def returning(state):
    return lambda params, _, batch: (params["slope"] * batch["x"], state)


REFUSED = {
    "dist": ({"dist": True}, ValueError, "on one device.*Drop dist="),
    "devices": ({"devices": 2}, ValueError, "on one device"),
    "least squares": ({"optimizer": eo.LevenbergMarquardt()}, ValueError, "state= is of losses"),
    "auto": ({"microbatch": "auto"}, ValueError, "give microbatch= a number"),
    "no arrays": ({"state": {}}, TypeError, "has none"),
    "a function": ({"state": {"f": abs}}, TypeError, "pytree of arrays.*built-in"),
    "one parameter": ({"loss": lambda p: p}, TypeError, r"with data and state=.*\(params, state"),
    "no state back": (
        {"loss": lambda p, s, b: p["slope"] * b["x"]},
        TypeError,
        r"must return \(loss, state\)",
    ),
    "another shape": (
        {"loss": returning({"mean": jnp.zeros(2), "seen": 0})},
        TypeError,
        r"a state like .*\[2\]",
    ),
    "another dtype": (
        {"loss": returning({"mean": 0.0, "seen": 0.5})},
        TypeError,
        "a state like",
    ),
    "another structure": ({"loss": returning({"mean": 0.0})}, TypeError, "a state like"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, error, message = REFUSED[name]
    options = {"loss": remembering, "state": FRESH, "optimizer": optax.adam(0.1), **given}
    loss = options.pop("loss")
    with pytest.raises(error, match=f"(?s){message}"):
        eo.fit(loss, FLAT, line(), maxiters=2, **options, **QUIET)
