"""`fit` by the Levenberg-Marquardt method: steps as by hand, however they are split; what is
rejected, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.training import least_squares
from ensembleode.training.least_squares import LeastSquaresStep
from ensembleode.training.parallel import Placement
from ensembleode.training.step import checked, PaddedBatch, TrainingState

from .test_fit import line, QUIET


N = 10


def fit(loss, params, data=None, damping=1e-3, **options):
    options = {"optimizer": eo.LevenbergMarquardt(damping), "maxiters": 5, **QUIET, **options}
    return eo.fit(loss, params, data, **options)


def polynomial(params, batch):
    """Linear in the parameters: one residual of an item."""
    return jnp.stack([batch["x"] ** i for i in range(params.shape[0])], 1) @ params - batch["y"]


def curve(params, batch):
    """Two residuals of an item, of two parameters."""
    model = params["height"] * jnp.exp(-params["rate"] * batch["x"])
    return jnp.stack([model - batch["y"], 0.1 * (model - 1.0)], axis=1)


CURVE = {"height": jnp.array(0.5), "rate": jnp.array(0.3)}


def neurons(params, batch):
    """One residual of an item, of nine parameters."""
    hidden = jnp.tanh(jnp.outer(batch["x"], params["inner"]) + params["shift"][None])
    return hidden @ params["outer"] - batch["y"]


NEURONS = {
    "inner": jnp.array([1.0, -0.5, 0.3]),
    "shift": jnp.array([0.1, 0.2, -0.1]),
    "outer": jnp.array([0.5, 0.5, -0.5]),
}


SPLITS = [
    {},
    {"microbatch": 3},
    {"devices": 2},
    {"devices": 2, "microbatch": 1},
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("floor", [0.0, 2.0])
@pytest.mark.parametrize("how", SPLITS, ids=str)
def test_the_steps_are_those_by_hand(how, floor):
    """Of batches of four, four and two items, however they are split."""
    data, params, damping = line(N), jnp.array([0.3, 0.2]), 0.5
    losses, expected = [], np.asarray(params)
    for step in range(6):
        start = 4 * (step % 3)
        x, y = data["x"][start : start + 4], data["y"][start : start + 4]
        matrix = np.stack([np.ones_like(x), x], axis=1)
        r = matrix @ expected - y
        losses.append(np.mean(r**2))
        product = matrix.T @ matrix
        diagonal = np.diag(product) + floor * np.mean(np.diag(product))
        change = -np.linalg.solve(product + damping * np.diag(diagonal), matrix.T @ r)
        expected = expected + change
        damping /= 3  # as the model is linear: what it foretells comes true
    optimizer = eo.LevenbergMarquardt(0.5, floor)
    options = {"optimizer": optimizer, "batch_size": 4, "maxiters": 6, "shuffle": False}
    found = fit(polynomial, params, data, **options, **how)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-10)
    np.testing.assert_allclose(found.params, expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "params"), [(curve, CURVE), (neurons, NEURONS)])
@pytest.mark.parametrize("how", SPLITS[1:], ids=str)
def test_parts_change_nothing(loss, params, how):
    """In forward mode, and in reverse mode row by row."""
    data = {"x": np.linspace(0, 1, N), "y": np.exp(-np.linspace(0, 2, N))}
    whole = fit(loss, params, data, batch_size=7, maxiters=8)
    parts = fit(loss, params, data, batch_size=7, maxiters=8, **how)
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-8)
    assert whole.losses[-1] < 0.1 * whole.losses[0]


@pytest.mark.slow
def test_many_items_take_no_more_memory(monkeypatch):
    """By the compiler's account, as rows of the Jacobian are computed some at a time."""
    width = 100
    monkeypatch.setattr(least_squares, "_ENTRIES", 1000 * width)

    def step(n):
        def loss(params, x, key):
            return jnp.sin(jnp.outer(x, jnp.arange(width, dtype=x.dtype))) @ params

        how = LeastSquaresStep(
            checked(loss, True)[0],
            None,
            eo.LevenbergMarquardt(),
            Placement(),
            has_data=True,
            repeats=True,
            dtype=jnp.dtype("f8"),
        )
        state = TrainingState(jnp.ones(width), how.optimizer.init(jnp.ones(width)))
        batch = PaddedBatch(jnp.ones(n), jnp.arange(n, dtype=jnp.int32), jnp.int32(n))
        lowered = how.compiled.lower(state, batch, jax.random.key(0), jnp.int32(0))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = step(2000), step(100_000)
    assert 1000 * width * 8 < few < 10 * 1000 * width * 8
    assert many - few < 100_000 * 8 * 8  # (some numbers of each item, and not `width`)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("data", [None, np.arange(4.0)], ids=["alone", "items"])
@pytest.mark.parametrize("dtypes", [("f4", "f8"), ("f8", "f4"), ("bfloat16", "f4")], ids=str)
def test_dtypes_stay_as_they_are(dtypes, data):
    """Those of parameters, and of residuals."""
    of_params, of_residuals = map(jnp.dtype, dtypes)

    def loss(p, batch=None):
        residuals = jnp.stack([p - 1, 2 * p - 2]).astype(of_residuals)
        return residuals if batch is None else jnp.broadcast_to(residuals, (len(batch), 2))

    whole = loss if data is None else lambda p, batch: loss(p, batch)
    result = fit(whole, jnp.zeros((), of_params), data)
    assert result.params.dtype == of_params
    np.testing.assert_allclose(float(result.params), 1.0, rtol=1e-2)


def test_rosenbrock():
    """Without data, what the loss returns are all residuals."""

    def loss(p):
        return jnp.stack([10 * (p[1] - p[0] ** 2), 1 - p[0]])

    result = fit(loss, jnp.array([-1.2, 1.0]), maxiters=30)
    np.testing.assert_allclose(result.params, [1.0, 1.0], rtol=1e-12)
    np.testing.assert_allclose(result.losses[0], 24.2)
    assert (np.diff(result.losses) <= 0).all()
    assert result.best_loss == result.losses.min()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_trajectories(width):
    """Rates are found from the ends of solves, by either mode."""
    u0 = np.random.default_rng(0).uniform(0.5, 2.0, (N, 2))
    data = {"u0": u0, "end": u0 * np.exp([-1.0, -2.0])}

    def loss(rates, batch):
        prob = eo.ODEProblem(lambda u, p, t: -p[:2] * u + p[2:], u0[0], (0.0, 1.0), rates)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=batch["u0"][ctx.index]))
        options = {"trajectories": len(batch["u0"]), "save_start": False}
        sim = eo.solve(ens, eo.Tsit5(), abstol=1e-10, reltol=1e-10, **options)
        misses = sim.u[:, 0] - batch["end"]
        return misses if width == 2 else misses @ jnp.array([1.0, 2.0])

    for devices in (1, 2):
        found = fit(loss, jnp.array([0.3, 0.3, 0.1]), data, maxiters=12, devices=devices).params
        np.testing.assert_allclose(found, [1.0, 2.0, 0.0], atol=1e-7)


def test_the_key_of_a_step_is_that_of_its_tries():
    """A residual with noise is zero after the step, which sees the same noise."""
    seen = []

    def loss(p, batch, key):
        noise = jax.vmap(jax.random.normal)(key)
        jax.debug.callback(lambda *x: seen.append(np.asarray(x)), jax.lax.stop_gradient(noise))
        return p - noise

    data = np.zeros(1)
    fit(lambda p, batch, key: loss(p, batch, key), jnp.array(9.0), data, maxiters=1)
    jax.effects_barrier()
    assert len(seen) >= 2
    assert len(np.unique(np.concatenate([x.ravel() for x in seen]))) == 1


def test_a_step_too_far_is_tried_again():
    """From here, the method of Gauss and Newton ends in infinity."""
    result = fit(lambda p: jnp.arctan(p)[None], jnp.array(3.0), damping=1e-12, maxiters=20)
    assert (np.diff(result.losses) <= 0).all()
    assert abs(float(result.params)) < 1e-8


def test_what_is_not_finite_is_rejected():
    """The first change is to where the logarithm is NaN."""
    result = fit(lambda p: jnp.log(p)[None] - 1, jnp.array(10.0), damping=1e-12, maxiters=20)
    assert result.stopped == "done"
    assert np.isfinite(result.losses).all()
    np.testing.assert_allclose(result.params, np.e, rtol=1e-10)


def test_where_every_try_is_rejected():
    """The parameters stay, and the next step begins with more damping."""

    def loss(p):
        """Finite at 1 alone; its derivative is known."""
        return jnp.where(p == 1, p, jnp.nan)[None]

    result = fit(loss, jnp.array(1.0), maxiters=30)
    assert (result.stopped, result.steps, float(result.params)) == ("done", 30, 1.0)
    np.testing.assert_array_equal(result.losses, 1.0)


def test_nothing_finite_to_begin_with():
    data = {"x": np.linspace(0, 1, 4), "y": np.zeros(4)}

    def loss(p, batch):
        return jnp.where(batch["x"] > 0.9, jnp.sqrt(p), 1.0) * jnp.ones(4)

    result = fit(loss, jnp.array(-1.0), data)
    assert (result.stopped, float(result.params)) == ("nonfinite", -1.0)
    assert "the loss of 1 of 4 items, first that of item 3" in result.message


@pytest.mark.slow
def test_units_change_nothing():
    """Without a floor: not the losses of steps of parameters in other units."""
    data = {"x": np.linspace(0, 1, N), "y": np.exp(-np.linspace(0, 2, N))}
    units = {"height": 1e6, "rate": 1e-4}

    def other(params, batch):
        return curve({name: x * units[name] for name, x in params.items()}, batch)

    params = {name: x / units[name] for name, x in CURVE.items()}
    for floor, same in ((0.0, True), (1.0, False)):
        how = {"optimizer": eo.LevenbergMarquardt(floor=floor), "maxiters": 3}
        ours, theirs = (fit(f, p, data, **how).losses for f, p in ((curve, CURVE), (other, params)))
        assert np.allclose(theirs, ours, rtol=1e-8) == same


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_parameters_that_nothing_depends_on(dtype):
    """They stay as they are; of two that do the same, the sum is found."""

    def loss(p, batch):
        return (p[0] + p[1]) * batch["x"] - batch["y"]

    x = np.linspace(0, 1, N).astype(dtype)
    found = fit(loss, jnp.array([0.0, 1.0, 7.0], dtype), {"x": x, "y": 3 * x}, maxiters=9).params
    assert float(found[2]) == 7.0
    np.testing.assert_allclose(found[0] + found[1], 3.0, rtol=1e-4)


LINE = {"x": np.ones(3), "y": np.ones(3)}
REFUSED = {
    "mean": (
        {"loss": lambda p, b: jnp.mean(b["x"])},
        TypeError,
        r"must return the residuals of each item.*\(3,\) or \(3, ...\).*returned the shape \(\)",
    ),
    "nothing": ({"loss": lambda p, b: None}, TypeError, "it returned None"),
    "complex residuals": (
        {"loss": lambda p, b: jax.lax.complex(p[0] * b["x"], b["x"])},
        TypeError,
        "the loss must be real",
    ),
    "complex parameters": ({"params": jnp.ones(2, complex)}, TypeError, "params must be real"),
    "sum of squares": (
        {"loss": lambda p: jnp.sum(p**2), "data": None},
        TypeError,
        "and not the sum of their squares",
    ),
    "too many": (
        {"params": jnp.ones(10**7)},
        ValueError,
        r"params has 10,000,000 numbers: that takes .* GB .* such as optax.lbfgs\(\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, error, message = REFUSED[name]
    given = {"loss": polynomial, "params": jnp.ones(2), "data": LINE, **given}
    with pytest.raises(error, match=message):
        fit(**given)


@pytest.mark.parametrize("x", [0.0, -1.0, np.inf, np.nan])
def test_damping_is_positive_and_the_floor_not_negative(x):
    with pytest.raises(ValueError, match=f"damping must be positive and finite, got {x}"):
        eo.LevenbergMarquardt(x)
    if x != 0:
        with pytest.raises(ValueError, match=f"floor must be finite and not negative, got {x}"):
            eo.LevenbergMarquardt(floor=x)
