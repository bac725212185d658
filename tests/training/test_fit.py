"""`fit`: its result doesn't depend on how items are split; what stops it, and what it refuses."""

import itertools
import json
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
import xarray as xr

import ensembleode as eo
from ensembleode.training import parallel
from ensembleode.training.checkpoints import Folder
from ensembleode.training.least_squares import LeastSquaresStep
from ensembleode.training.step import UpdateStep

from ..marks import slow_unless
from . import parity, several


pytestmark = pytest.mark.usefixtures("optax_mixes_dtypes")
SCRIPT = several.ROOT / "tests" / "training" / "parity.py"
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def on_one():
    """Of each fit: its losses, what it found, and the lowest loss, on one device."""
    return {name: parity.numbers(parity.fitted(name)) for name in parity.FITS}


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def squares(params, batch):
    return (params["slope"] * batch["x"] + params["shift"] - batch["y"]) ** 2


def line(n=10):
    x = np.linspace(0.0, 1.0, n)
    return {"x": x, "y": 3 * x - 1}


FLAT = {"slope": jnp.array(0.0), "shift": jnp.array(0.0)}


def fit_line(loss=squares, params=FLAT, data=None, **options):
    options = {"optimizer": optax.adam(0.1), "maxiters": 5, **QUIET, **options}
    return eo.fit(loss, params, line() if data is None else data, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", parity.FITS)
@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"devices": 2}, id="devices"),
        pytest.param({"ensemblealg": eo.EnsembleThreads()}, id="threads"),
        pytest.param({"ensemblealg": eo.EnsembleSerial()}, id="serial"),
    ],
)
def test_devices_change_nothing(name, where, on_one):
    same(parity.numbers(parity.fitted(name, **where)), on_one[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", parity.FITS)
def test_devices_change_nothing_by_diffrax(name):
    # (Its bounds of the change of a step leave no step to the roundings of an estimate.)
    loss = parity.trajectories("diffrax", stepsize_controller=eo.PIController())
    one, two = (parity.numbers(parity.fitted(name, loss, devices=n)) for n in (1, 2))
    same(two, one)


def test_the_device_that_is_named():
    last = jax.local_devices()[-1]
    for where in ({"devices": [last]}, {"ensemblealg": eo.EnsembleGPUArray(devices=[last])}):
        placed = parallel.placement(**{"devices": None, "ensemblealg": None, "dist": False} | where)
        assert placed.mesh.devices.tolist() == [last]


@pytest.mark.parametrize(
    ("count", "devices", "where"),
    [
        slow_unless(False, 2, 1, {}),
        slow_unless(False, 4, 1, {}),
        slow_unless(False, 2, 2, {"dist": True}),
        slow_unless(False, 1, 4, {"dist": True}),
    ],
)
def test_processes_change_nothing(count, devices, where, on_one):
    processes = several.start(SCRIPT, count, json.dumps(where), devices=devices)
    outputs = several.finish(processes, timeout=200)
    assert [p.returncode for p in processes] == [0] * count, outputs
    found = json.loads(outputs[0][0].splitlines()[-1])
    for name, expected in on_one.items():
        same(found[name], expected)
    np.testing.assert_array_equal(found["predict"], 2 * parity.items()["u0"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["compiled", "diffrax"])
def test_the_gradient_is_that_of_the_mean(engine):
    """Of one step of gradient descent, with what a solver of each engine gives."""
    loss, rate = parity.trajectories(engine, noise=0.0), 0.01
    keys = jax.random.split(jax.random.key(0), parity.N)
    batch = jax.tree.map(jnp.asarray, parity.items())
    expected = jax.jit(jax.grad(lambda p: jnp.mean(loss(p, batch, keys))))(parity.start())
    for devices in (1, 2):
        options = {"optimizer": optax.sgd(rate), "maxiters": 1, "devices": devices}
        found = eo.fit(loss, parity.start(), parity.items(), **options, **QUIET).params
        for name, value in parity.start().items():
            np.testing.assert_allclose(found[name], value - rate * expected[name], rtol=1e-9)


ADJOINTS = {
    "replay": eo.ReplayAdjoint(),
    "gauss": eo.GaussAdjoint(),
    "backsolve": eo.BacksolveAdjoint(),
    "checkpoints": eo.RecursiveCheckpointAdjoint(),
    "direct": eo.DirectAdjoint(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADJOINTS)
def test_every_adjoint(name):
    loss = parity.trajectories("auto", sensealg=ADJOINTS[name], maxiters=64)
    one, two = (parity.fitted("minibatches", loss, devices=n) for n in (1, 2))
    np.testing.assert_allclose(parity.numbers(two), parity.numbers(one), rtol=1e-10)


@pytest.mark.slow
def test_a_trajectory_that_fails_is_alone():
    """Masked, it counts as the loss says (here 0), and the others as they are."""

    def loss(rate, batch):
        prob = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.ones(1), (0.0, 1.0), rate)
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=batch["u0"][ctx.index][None])
        )
        sim = eo.solve(
            ens, eo.Tsit5(), trajectories=len(batch["u0"]), save_start=False, maxiters=200
        )
        return jnp.where(sim.successful, sim.u[:, 0, 0], 0.0) ** 2

    options = {"optimizer": optax.sgd(1.0), "maxiters": 1, **QUIET}
    ends = [0.5, 0.3, 0.2]  # 5.0 is infinite at t = 1/5
    expected = eo.fit(loss, jnp.array(1.0), {"u0": np.array(ends)}, **options)
    for devices in (1, 2):
        data = {"u0": np.array([0.5, 5.0, 0.3, 0.2])}
        found = eo.fit(loss, jnp.array(1.0), data, devices=devices, **options)
        np.testing.assert_allclose(found.losses, expected.losses * 3 / 4, rtol=1e-12)
        moved, wanted = (float(x.params) - 1.0 for x in (found, expected))
        np.testing.assert_allclose(moved, wanted * 3 / 4, rtol=1e-10)


def test_each_device_has_its_share_of_the_work():
    """Items whose loss is evaluated, counted on the host: never more than the share, rounded up."""

    def counted(counts):
        def loss(params, batch):
            jax.debug.callback(counts.append, batch["x"].shape[0])
            return squares(params, batch)

        return loss

    for devices, share in ((1, 10), (2, 5)):
        counts = []
        fit_line(counted(counts), devices=devices, maxiters=3)
        jax.effects_barrier()
        assert [int(x) for x in counts] == [share] * (3 * devices)


@pytest.mark.slow
def test_keys_are_of_items_and_steps():
    seen = []

    def loss(params, batch, key):
        noise = jax.vmap(jax.random.uniform)(key)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), noise)
        return squares(params, batch) + 0 * noise

    def run(**how):
        seen.clear()
        fit_line(loss, maxiters=2, **how)
        jax.effects_barrier()
        return np.sort(np.concatenate(seen)[: 2 * 10])

    alone = run()
    assert len(np.unique(alone)) == 20
    np.testing.assert_array_equal(run(devices=2), alone)
    assert (run(key=jax.random.key(1)) != alone).any()


@pytest.mark.parametrize("devices", [1, 2])
def test_weak_scaling_gives_each_device_that_many(devices):
    result = fit_line(batch_size=2, scaling="weak", devices=devices, maxiters=None, epochs=1)
    assert result.steps == 10 // (2 * devices) + (10 % (2 * devices) > 0)


def test_no_item_is_dropped():
    """Each is in one batch of a pass, and passes are in other orders."""
    batches = []

    def loss(params, batch):
        jax.debug.callback(lambda x: batches.append(np.asarray(x)), batch["i"])
        return params * batch["x"]

    data = {"x": np.ones(10), "i": np.arange(10)}
    options = {"optimizer": optax.sgd(0.0), "batch_size": 4, "epochs": 3}
    result = eo.fit(loss, jnp.array(1.0), data, **options, **QUIET)
    jax.effects_barrier()
    assert (result.steps, result.epochs) == (9, 3)
    sizes = (4, 4, 2) * 3
    rows = np.concatenate([b[:n] for b, n in zip(batches, sizes, strict=True)]).reshape(3, 10)
    for one in rows:
        np.testing.assert_array_equal(np.sort(one), np.arange(10))
    assert (rows[0] != rows[1]).any()


SEARCHES = {
    "keeps the gradient": optax.scale_by_backtracking_linesearch(15, store_grad=True),
    "keeps none": optax.scale_by_backtracking_linesearch(15),
    "zoom": optax.scale_by_zoom_linesearch(15),
}


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        slow_unless(name.startswith("keeps") and dtypes == ("f4", "f8"), name, dtypes)
        for name in SEARCHES
        for dtypes in itertools.product(["f4", "f8"], repeat=2)
    ],
)
def test_each_line_search(name, dtypes):
    """Its steps are those of optax by hand, whatever the dtypes of the parameters and the loss."""
    optimizer = optax.chain(optax.sgd(1.0), SEARCHES[name])
    start, data = jnp.zeros(2, dtypes[0]), jnp.asarray(line()["x"], dtypes[0])

    def losses(p, x):
        return ((p[0] * x + p[1] - 3 * x + 1) ** 2).astype(dtypes[1])

    def value(p):
        return jnp.mean(losses(p, data)).astype("f8")

    @jax.jit
    def update(p, state):
        loss, grad = jax.value_and_grad(value)(p)
        change, state = optimizer.update(grad, state, p, value=loss, grad=grad, value_fn=value)
        return optax.apply_updates(p, change), state

    p, state = start, optimizer.init(start)
    for _ in range(6):
        p, state = update(p, state)
    found = eo.fit(losses, start, data, optimizer=optimizer, maxiters=6, **QUIET).params
    assert found.dtype == dtypes[0]
    np.testing.assert_allclose(found, p, rtol=1e-4 if "f4" in dtypes else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"devices": 2}, {"microbatch": 3}], ids=str)
def test_line_searches_of_the_full_batch(how):
    result = fit_line(optimizer=optax.lbfgs(), maxiters=12, **how)
    np.testing.assert_allclose(result.params["slope"], 3.0, atol=1e-6)
    np.testing.assert_allclose(result.params["shift"], -1.0, atol=1e-6)


@pytest.mark.slow
def test_what_a_line_search_found_is_used():
    """Each of its values is computed once: as often as by optax's own way to reuse them."""
    counts = {"ours": 0, "by hand": 0}

    def count(name):
        counts[name] += 1

    def value(params, name):
        jax.debug.callback(lambda: count(name))
        return jnp.sum(jnp.stack([params["slope"] - 3, 10 * params["shift"] + 1]) ** 2)

    optimizer = optax.lbfgs()
    eo.fit(lambda p: value(p, "ours"), FLAT, optimizer=optimizer, maxiters=4, **QUIET)
    by_hand = lambda p: value(p, "by hand")  # noqa: E731
    params, state = FLAT, optimizer.init(FLAT)

    @jax.jit
    def update(params, state):
        loss, gradient = optax.value_and_grad_from_state(by_hand)(params, state=state)
        extra = {"value": loss, "grad": gradient, "value_fn": by_hand}
        updates, state = optimizer.update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for _ in range(4):
        params, state = update(params, state)
    jax.effects_barrier()
    assert counts["ours"] == counts["by hand"] > 4


def test_the_callback_can_stop_it():
    seen = []

    def callback(state):
        seen.append(state)
        return state.step == 3

    result = fit_line(batch_size=4, maxiters=10, callback=callback)
    assert result.stopped == "callback"
    assert result.steps == len(result.losses) == 3
    assert [s.step for s in seen] == [1, 2, 3]
    assert [s.items for s in seen] == [4, 4, 2]
    assert [s.loss for s in seen] == result.losses.tolist()
    assert float(seen[0].params["slope"]) == 0.0
    first, why, loss, params, _ = repr(result).splitlines()
    assert first == "FitResult: callback after 3 steps, 1 epochs"
    assert why.endswith(result.message)
    from_to = f"{result.losses[0]:.4g} to {result.losses[-1]:.4g}"
    assert loss == f"  loss     {from_to}, best {result.best_loss:.4g}"
    assert "slope" in params


def test_a_loss_that_is_not_finite_keeps_the_last_good_parameters():
    def loss(params, batch):
        return jnp.where(batch["x"] > 0.5, jnp.sqrt(0.25 - params), 1.0 - params)

    options = {"optimizer": optax.sgd(0.1), "maxiters": 100, **QUIET}
    result = eo.fit(loss, jnp.array(0.0), {"x": np.linspace(0, 1, 4)}, **options)
    assert result.stopped == "nonfinite"
    assert 0 < float(result.params) <= 0.25
    assert np.isfinite(result.losses).all()
    assert len(result.losses) == result.steps
    assert f"of step {result.steps + 1} " in result.message
    assert "the loss of 2 of 4 items, first that of item 2" in result.message


def test_the_best_of_minibatches_is_that_of_passes():
    means, losses = [], []

    def callback(state):
        losses.append(state.loss * state.items)
        if state.epoch > len(means):
            means.append(sum(losses) / 10)
            losses.clear()

    result = fit_line(batch_size=4, maxiters=None, epochs=4, callback=callback)
    np.testing.assert_allclose(result.best_loss, min(means), rtol=1e-12)


def test_floats_of_containers_are_trained():
    """As arrays, wherever they are; in NumPy's numbers, too, and complex ones."""

    class Pair(NamedTuple):
        a: float
        b: jax.Array

    params = {"one": 1.0, "pair": Pair(2.0, jnp.array(0.0)), "list": [1j, (np.float32(0), None, 7)]}

    def loss(params):
        one, pair, (c, (d, _, seven)) = params["one"], params["pair"], params["list"]
        found = [one - 3, pair.a - 4, pair.b - 5, c - (1 + 2j), d - seven]
        return sum(jnp.abs(x) ** 2 for x in found)

    result = eo.fit(loss, params, optimizer=optax.sgd(0.25), maxiters=60, **QUIET)
    expected = {"one": 3.0, "pair": Pair(4.0, 5.0), "list": [1 + 2j, (7.0, None, 7)]}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), result.params, expected)
    assert result.params["list"][1][2] == 7


def test_only_floating_point_arrays_of_modules_are_trained():
    class Model(eqx.Module):
        weight: jax.Array
        steps: jax.Array
        activation: object = jnp.tanh
        rate: float = 0.5

    def loss(model, batch):
        return (model.activation(model.weight * batch["x"]) - 0.5) ** 2 * model.rate

    model = Model(jnp.array(0.1), jnp.array(3))
    result = fit_line(loss, model, maxiters=20)
    assert abs(float(result.params.weight) - 0.1) > 0.1
    assert int(result.params.steps) == 3
    assert result.params.rate == 0.5


def test_it_compiles_once(compiles):
    fit_line(batch_size=4, maxiters=2)
    compiles.count = 0
    fit_line(batch_size=4, maxiters=9)
    few = compiles.count
    compiles.count = 0
    fit_line(batch_size=4, maxiters=30)
    assert compiles.count == few


def test_data_of_any_kind(tmp_path):
    import zarr

    data = line(23)
    expected = fit_line(data=data, batch_size=5, maxiters=9).losses
    on_disk, of_zarr = {}, {}
    for name, x in data.items():
        np.save(tmp_path / f"{name}.npy", x)
        on_disk[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
        of_zarr[name] = zarr.create_array(tmp_path / f"{name}.zarr", data=x, chunks=(4,))
    for other in (jax.tree.map(jnp.asarray, data), on_disk, of_zarr):
        np.testing.assert_array_equal(
            fit_line(data=other, batch_size=5, maxiters=9).losses, expected
        )


class Tensor:
    """An array of another library, with its own dtypes and indices."""

    dtype, shape = "tensor.float64", property(lambda self: self.values.shape)

    def __init__(self, values):
        self.values = values

    def __getitem__(self, index):
        raise NotImplementedError

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


def labelled(x):
    """The same numbers in the same order, under labels in another order."""
    labels = np.random.default_rng(0).permutation(len(x))
    return {
        "series": pd.Series(x, labels),
        "xarray": xr.DataArray(x, {"item": labels}, ["item"]),
        "tensor": Tensor(x),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", labelled(np.ones(1)))
def test_items_are_counted_by_position(kind):
    """Beside arrays, in minibatches, in batches that are given, and where a model predicts."""
    data = line(23)
    with_labels = {"x": labelled(data["x"])[kind], "y": data["y"]}
    options = {"batch_size": 5, "maxiters": 9}
    expected = fit_line(data=data, **options).losses
    np.testing.assert_array_equal(fit_line(data=with_labels, **options).losses, expected)
    np.testing.assert_array_equal(
        fit_line(data=[with_labels], maxiters=3).losses, fit_line(data=data, maxiters=3).losses
    )
    found = eo.predict(lambda p, batch: p * batch["x"], 2.0, with_labels, batch_size=5)
    np.testing.assert_array_equal(found, 2 * data["x"])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("shared", ["array", "dict"])
def test_batches_in_the_same_memory(shared, checkpoint, tmp_path):
    """As readers of files fill it: a batch is taken before the next one is asked for."""

    def batches():
        batch = {"x": np.empty(4)}
        for i in range(6):
            if shared == "dict":
                batch["x"] = np.empty(4)
            batch["x"][:] = i
            yield batch
            if shared == "array":
                batch["x"][:] = np.nan

    result = eo.fit(
        lambda p, batch: (p - batch["x"]) ** 2,
        jnp.array(0.0),
        batches(),
        optimizer=optax.sgd(0.0),
        maxiters=6,
        checkpoint=tmp_path if checkpoint else None,
        **QUIET,
    )
    np.testing.assert_array_equal(result.losses, np.arange(6.0) ** 2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_batches_as_they_come(devices):
    """Of any size; weighed by their items over a pass."""
    data = line(10)
    batches = [
        jax.tree.map(lambda x, s=s: x[s], data) for s in (slice(0, 7), slice(7, 8), slice(8, 10))
    ]
    result = fit_line(data=batches, maxiters=None, epochs=2, devices=devices)
    assert result.steps == 6
    assert np.isclose(result.losses[0], np.mean((data["y"][:7]) ** 2))
    endless = (jax.tree.map(lambda x, i=i: x[i % 3 : i % 3 + 4], data) for i in range(10**9))
    assert fit_line(data=endless, maxiters=5, devices=devices).stopped == "done"
    result = fit_line(data=iter(batches), maxiters=10, devices=devices)
    assert (result.stopped, result.steps) == ("exhausted", 3)


def test_the_log_and_the_curve(tmp_path):
    result = fit_line(batch_size=4, maxiters=4, log=tmp_path / "logs" / "fit.jsonl")
    lines = [json.loads(x) for x in (tmp_path / "logs" / "fit.jsonl").read_text().splitlines()]
    assert [x["loss"] for x in lines] == result.losses.tolist()
    assert [x["step"] for x in lines] == [1, 2, 3, 4]
    assert [x["items"] for x in lines] == [4, 4, 2, 4]
    assert all(x["items_per_second"] > 0 for x in lines)
    pytest.importorskip("matplotlib").use("Agg")
    drawn = result.plot(color="red").lines[0]
    np.testing.assert_array_equal(drawn.get_ydata(), result.losses)


def test_a_checkpoint_writes_the_log_first(tmp_path, monkeypatch):
    """A run that goes on from the checkpoint doesn't write those lines again."""
    log, seen, save = tmp_path / "fit.jsonl", [], Folder.save

    def looked(folder, now):
        seen.append((now.step, len(log.read_text().splitlines())))
        save(folder, now)

    monkeypatch.setattr(Folder, "save", looked)
    fit_line(maxiters=5, log=log, checkpoint=eo.Checkpoints(tmp_path / "c", steps=2))
    assert seen == [(2, 2), (4, 4), (5, 5)]


def test_progress(capfd):
    fit_line(maxiters=3, progress=True)
    assert "loss" in capfd.readouterr().err


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("batch_size", [None, 1, 4, 100])
@pytest.mark.parametrize("n", [1, 3, 10])
def test_predict_keeps_the_order(n, batch_size):
    data = {"x": np.arange(n, dtype=float)}
    for devices in (1, 2):
        out = eo.predict(
            lambda p, b: {"y": p * b["x"][:, None]},
            2.0,
            data,
            batch_size=batch_size,
            devices=devices,
        )
        np.testing.assert_array_equal(out["y"], 2 * data["x"][:, None])


def test_predict_wants_rows():
    with pytest.raises(TypeError, match=r"fn must return arrays with an axis of items, \(3, ...\)"):
        eo.predict(lambda p, x: jnp.sum(x), 1.0, np.ones(3))


FRAME = pd.DataFrame({"x": [0.0, 1.0], "text": ["a", "b"]})
DATASET = xr.Dataset({"x": ("row", [0.0, 1.0])})
NAN = {"x": np.array([0.0, np.nan, 1.0]), "y": np.zeros(3)}
REFUSED = {
    "both": ({"epochs": 1}, ValueError, "epochs and maxiters are both given"),
    "neither": ({"maxiters": None}, ValueError, "epochs= .* or maxiters="),
    "a count": ({"maxiters": 0}, ValueError, "maxiters must be a positive integer"),
    "a mean": (
        {"loss": lambda p, b: jnp.mean(squares(p, b))},
        TypeError,
        r"one number for each item, an array of the shape \(10,\).*Don't average in it",
    ),
    "a matrix": (
        {"loss": lambda p, b: jnp.ones((10, 2)) * p["slope"]},
        TypeError,
        r"returned the shape \(10, 2\)",
    ),
    "nothing": ({"loss": lambda p, b: None}, TypeError, "must return an array"),
    "integers": ({"loss": lambda p, b: jnp.arange(10)}, TypeError, "the loss must be real"),
    "one argument": ({"loss": lambda p: p}, TypeError, "with data, the loss must take"),
    "empty": ({"data": {"x": np.ones(0)}}, ValueError, "data is empty"),
    "no batch": ({"data": []}, ValueError, "data is empty"),
    "ragged": (
        {"data": {"x": np.ones(3), "y": np.ones(4)}},
        ValueError,
        r"data is ragged.*\['x'\] has 3 of them, \['y'\] has 4",
    ),
    "NaN": ({"data": NAN}, ValueError, r"data holds NaN or infinity: \['x'\], first in item 1"),
    "a scalar": ({"data": {"x": np.float64(1)}}, TypeError, "an axis of items"),
    "a frame": ({"data": FRAME}, TypeError, "data is a DataFrame: give its columns"),
    "frames": ({"data": {"x": FRAME}}, TypeError, r"\['x'\] is a DataFrame: give its columns"),
    "batches of frames": ({"data": iter([FRAME])}, TypeError, "data is a DataFrame: give its"),
    "a dataset": ({"data": DATASET}, TypeError, "data is a Dataset: give its columns"),
    "text": ({"data": {"x": FRAME["text"]}}, TypeError, r"\['x'\] has the dtype object"),
    "dates": ({"data": {"x": np.ones(3, "M8[s]")}}, TypeError, r"has the dtype datetime64"),
    "masked": ({"data": np.ma.array([1.0, 2.0], mask=[0, 1])}, TypeError, "no masked arrays"),
    "more devices": ({"devices": 1000}, ValueError, "devices=1000 are more than there are"),
    "two places": ({"devices": 1, "dist": True}, ValueError, "devices and dist are both given"),
    "workers": (
        {"ensemblealg": eo.EnsembleDistributed()},
        ValueError,
        "ensemblealg must be EnsembleSerial.*Give others to the solve in the loss",
    ),
    "scaling": ({"scaling": "big"}, ValueError, "scaling must be 'strong' or 'weak'"),
    "weak": ({"scaling": "weak"}, ValueError, "wants batch_size="),
    "microbatch": ({"microbatch": "some"}, ValueError, "microbatch must be"),
    "params": ({"params": {"slope": 1}}, TypeError, "params has no floating-point numbers"),
    "optimizer": ({"optimizer": "adam"}, TypeError, "must be one of optax"),
    "once": ({"data": iter([line()]), "maxiters": None, "epochs": 2}, ValueError, "once only"),
    "their size": ({"data": [line()], "batch_size": 2}, ValueError, "drop batch_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fit_line(**given)


WITHOUT_DATA = {
    "epochs": ({"epochs": 1, "maxiters": None}, "epochs is of data"),
    "batch_size": ({"batch_size": 1}, "batch_size is of data"),
    "devices": ({"devices": 2}, "share the items of data"),
}


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_what_is_refused_without_data(name):
    given, message = WITHOUT_DATA[name]
    options = {"optimizer": optax.sgd(0.1), "maxiters": 1, **QUIET, **given}
    with pytest.raises(ValueError, match=message):
        eo.fit(lambda p: jnp.sum(p**2), jnp.ones(2), **options)


def solved(ensemblealg, alone=False):
    """A loss that solves an ensemble, there."""

    def losses(rate, n):
        prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.ones(2), (0.0, 1.0), rate)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.index))
        sim = eo.solve(ens, eo.Euler(), ensemblealg, trajectories=n, dt=0.5, adaptive=False)
        return jnp.sum(sim.u[:, -1] ** 2, axis=1)

    if alone:
        return lambda rate: jnp.sum(losses(rate, 400))
    return lambda rate, batch: losses(rate, len(batch["x"]))


SCHEDULE = optax.adam(optax.linear_schedule(0.1, 0.01, 10))
ONCE = {
    "one device": {},
    "dist": {"dist": True},
    "schedule": {"optimizer": SCHEDULE},
    "schedule, dist": {"optimizer": SCHEDULE, "dist": True},
    "microbatches": {"microbatch": 2},
    "microbatches, dist": {"microbatch": 1, "dist": True},
    "automatic": {"microbatch": "auto"},
    "line search": {"optimizer": optax.lbfgs()},
    "least squares": {"optimizer": eo.LevenbergMarquardt()},
    "least squares, dist": {"optimizer": eo.LevenbergMarquardt(), "dist": True},
    "no data": {"loss": lambda p: p**2, "data": None},
    "a solve": {"loss": solved(eo.EnsembleSerial())},
    "a solve on one": {"loss": solved(eo.EnsembleThreads(1))},
    "a solve on two": {"loss": solved(eo.EnsembleThreads(2))},
    "a solve, dist": {"loss": solved(eo.EnsembleThreads()), "dist": True},
    "a solve, no data": {"loss": solved(eo.EnsembleThreads(2), alone=True), "data": None},
}


QUICK_ONCE = ("one device", "dist", "microbatches", "no data", "a solve on two")


@pytest.mark.parametrize("name", [slow_unless(name in QUICK_ONCE, name) for name in ONCE])
def test_a_step_is_compiled_once(name, tmp_path, monkeypatch):
    """At the start, and after it goes on from a checkpoint."""
    given = {"loss": lambda p, b: (p * b["x"] - b["y"]) ** 2, "data": line(8), **ONCE[name]}
    if given["data"] is not None:
        given["batch_size"] = 4
    traced = []
    kind = LeastSquaresStep if name.startswith("least squares") else UpdateStep
    step = kind._step
    monkeypatch.setattr(kind, "_step", lambda *args: (traced.append(1), step(*args))[1])
    loss, data = given.pop("loss"), given.pop("data")
    options = {"optimizer": optax.adam(0.1), **QUIET, "checkpoint": tmp_path, **given}
    for maxiters in (4, 8):
        traced.clear()
        assert eo.fit(loss, jnp.array(0.5), data, maxiters=maxiters, **options).steps == maxiters
        assert len(traced) == 1  # (what is traced is compiled)


def series(rate=2.0):
    times = np.array([[0.5, 1.0], [0.25, np.inf], [0.1, 0.2]])
    u = np.where(np.isfinite(times), np.exp(-rate * times), np.nan)
    return {"t": times, "u": u, "each": np.repeat(u[..., None], 2, axis=-1)}


def misses(rate, batch):
    ens = eo.EnsembleProblem(
        eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.0]), (0.0, 1.0), rate)
    )
    sim = eo.solve(ens, trajectories=len(batch["t"]), saveat=batch["t"], reltol=1e-6)
    there = jnp.isfinite(batch["t"])
    return jnp.sum(
        (jnp.where(there, sim.u[..., 0], 0.0) - jnp.where(there, batch["u"], 0.0)) ** 2, axis=1
    )


def test_series_of_several_lengths():
    options = {"optimizer": optax.adam(0.1), "maxiters": 150, "progress": False}
    result = eo.fit(misses, jnp.array(1.0), series(), **options)
    np.testing.assert_allclose(result.params, 2.0, rtol=1e-3)


def rows_of_grain(data):
    grain = pytest.importorskip("grain")
    rows = [{"x": x, "y": y} for x, y in zip(data["x"], data["y"], strict=True)]
    return grain.MapDataset.source(rows)


def rows_of_datasets(data):
    return pytest.importorskip("datasets").Dataset.from_dict(data).with_format("numpy")


@pytest.mark.parametrize("of", [rows_of_grain, rows_of_datasets])
def test_data_sets_of_others(of):
    """Their batches are like those of a list; their rows are refused."""
    data = {name: x.astype(np.float32) for name, x in line().items()}
    batches = [{k: x[i : i + 4] for k, x in data.items()} for i in range(0, 10, 4)]
    rows = of(data)
    expected = fit_line(data=batches, maxiters=7)
    for accumulate in (1, 2):
        found = fit_line(data=rows.batch(4), maxiters=7, accumulate=accumulate)
        if accumulate == 1:
            np.testing.assert_array_equal(found.losses, expected.losses)
        else:
            assert found.epochs == 3
    with pytest.raises(TypeError, match=r"gives batches of items, as .*batch\(32\)"):
        fit_line(data=rows)


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("u", (2, 0), np.inf),
        ("each", (0, 1, 1), -np.inf),
        ("t", (0, 0), np.inf),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [None, 1])
def test_what_is_infinite_elsewhere_is_refused(name, at, value, size, tmp_path):
    data = series()
    data[name][at] = value
    if size is not None:  # read as it is needed
        np.save(tmp_path / "t.npy", data["t"])
        data["t"] = np.load(tmp_path / "t.npy", mmap_mode="r")
    with pytest.raises(ValueError, match=r"data holds NaN or infinity: .*item"):
        eo.fit(misses, jnp.array(1.0), data, optimizer=optax.adam(0.1), maxiters=9, batch_size=size)
