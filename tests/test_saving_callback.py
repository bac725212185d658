"""Functions of the state that are saved beside the state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import ensembleode as eo


TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
TIMES = np.array([0.0, 0.5, 1.0])


def decays(u, p, t):
    return -p["rate"] * u


def observed(u, p, t):
    return {"flow": p["rate"] * u[0], "both": jnp.stack([t, p["unit"] * u[0]])}


BARE = eo.ODEProblem(decays, [1.0], (0.0, 1.0), {"rate": 1.0, "unit": 2.0, "name": "x"}, **TIGHT)
PROB = eo.remake(BARE, saveat=0.5)
SAVING = eo.SavingCallback(observed)


def ensemble(prob, scale=1.0, **more):
    def prob_func(prob, ctx):
        return eo.remake(prob, p={**prob.p, "rate": scale * (1 + ctx.index)})

    return eo.EnsembleProblem(prob, prob_func, **more)


@pytest.mark.slow
def test_values_of_each_trajectory():
    sim = eo.solve(ensemble(PROB), trajectories=3, callback=SAVING)
    plain = eo.solve(ensemble(PROB), trajectories=3)
    np.testing.assert_array_equal(sim.u, plain.u)
    assert sim.engine.name == plain.engine.name
    assert plain.saved is None
    rates = np.arange(1.0, 4.0)[:, None]
    u = np.exp(-rates * TIMES)
    values = sim.saved.values
    np.testing.assert_array_equal(sim.saved.t, TIMES)
    np.testing.assert_allclose(values["flow"], rates * u, rtol=1e-8)
    np.testing.assert_array_equal(values["both"][..., 0], np.broadcast_to(TIMES, (3, 3)))
    np.testing.assert_allclose(values["both"][..., 1], 2 * u, rtol=1e-8)
    assert sim.events is None
    of_one = sim[2].saved
    np.testing.assert_array_equal(of_one.values["flow"], values["flow"][2])
    alone = eo.solve(eo.remake(PROB, p={**PROB.p, "rate": 3.0}), callback=SAVING).saved
    np.testing.assert_allclose(alone.values["both"], of_one.values["both"], rtol=1e-14)


def test_states_that_are_pytrees_in_single_precision():
    saving = eo.SavingCallback(lambda u, p, t: (p * u["x"] + u["y"][0], jnp.int32(4)))
    u0 = {"x": np.float32(1.0), "y": np.ones(2, np.float32)}
    prob = eo.ODEProblem(lambda u, p, t: jax.tree.map(jnp.zeros_like, u), u0, (0.0, 1.0), 2.0)
    number, whole = eo.solve(prob, callback=saving).saved.values
    assert number.dtype == np.float32
    np.testing.assert_array_equal(number, [3.0, 3.0])
    np.testing.assert_array_equal(whole, [4, 4])


def test_labelled():
    sim = eo.solve(ensemble(PROB), trajectories=3, callback=SAVING)
    data = sim.to_xarray()
    assert data["saved.flow"].dims == ("trajectory", "time")
    assert data["saved.both"].dims == ("trajectory", "time", "saved.both_0")
    np.testing.assert_array_equal(data["saved.both"], sim.saved.values["both"])
    np.testing.assert_array_equal(sim[1].to_xarray()["saved.flow"], sim.saved.values["flow"][1])
    assert "saved.flow" not in sim.to_pandas()
    plain = eo.SavingCallback(lambda u, p, t: u[0])
    sol = eo.solve(PROB, callback=plain)
    np.testing.assert_array_equal(sol.to_xarray()["saved"], sol.u[:, 0])


@pytest.mark.slow
def test_every_step_and_events():
    """The rows of events are rows; and callbacks are counted as they were given."""
    halved = eo.ContinuousCallback(lambda u, t, i: u[0] - 0.5, lambda i: eo.remake(i, u=i.u / 2))
    both = eo.CallbackSet(SAVING, halved)
    sim = eo.solve(ensemble(PROB), trajectories=3, callback=both, save_everystep=True, saveat=None)
    assert (np.asarray(sim.events.which)[np.isfinite(sim.events.t)] == 1).all()
    assert np.asarray(sim.lengths).min() < sim.t.shape[1]
    for i in range(3):
        n, sol = int(sim.lengths[i]), sim[i]
        flow = np.asarray(sim.saved.values["flow"][i])
        np.testing.assert_array_equal(flow[:n], (1 + i) * np.asarray(sim.u[i, :n, 0]))
        assert np.isnan(flow[n:]).all()
        np.testing.assert_array_equal(sol.saved.values["flow"], flow[:n])
        np.testing.assert_array_equal(sol.saved.t, sol.t)
        assert (np.diff(sol.saved.t) == 0).sum() == int(sol.events.count)


@pytest.mark.slow
def test_after_the_end():
    """A constant, too, is NaN there; and what is summed of the rest has finite gradients, though
    one trajectory never begins and others end."""

    def explodes(u, p, t):
        return p * u**2

    saving = eo.SavingCallback(lambda u, p, t: jnp.stack([jnp.log(u[0]) / t, 7.0 + 0 * p]))
    prob = eo.ODEProblem(explodes, [1.0], (0.0, 1.0), 0.5, saveat=[0.25, 0.75], callback=saving)
    rates = np.array([0.5, 2.0, 8.0])  # ends at 1 / rate

    def solved(scale):
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, p=scale * jnp.asarray(rates)[ctx.index])
        )
        return eo.solve(ens, trajectories=3, maxiters=10_000, **TIGHT)

    sim = solved(1.0)
    np.testing.assert_array_equal(sim.lengths, [2, 1, 0])
    reached = np.array([[True, True], [True, False], [False, False]])
    values = np.asarray(sim.saved.values)
    np.testing.assert_array_equal(np.isfinite(values[..., 0]), reached)
    np.testing.assert_array_equal(values[..., 1], np.where(reached, 7.0, np.nan))

    def total(scale):
        values = solved(scale).saved.values[..., 0]
        return jnp.sum(jnp.where(reached, values, 0.0))

    value, slope = jax.jit(jax.value_and_grad(total))(1.0)
    t, a = np.array([0.25, 0.75, 0.25]), np.array([0.5, 0.5, 2.0])
    np.testing.assert_allclose(value, (-np.log(1 - a * t) / t).sum(), rtol=1e-7)
    # (That of a trajectory that failed is zero.)
    np.testing.assert_allclose(slope, (a / (1 - a * t))[:2].sum(), rtol=1e-7)


@pytest.mark.slow
def test_after_an_event_that_ends():
    """Each trajectory ends where its state is a half."""
    falls = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, eo.terminate)
    saving = eo.SavingCallback(lambda u, p, t: p["rate"] * jnp.sqrt(t) * jnp.log(u[0]))
    prob = eo.remake(PROB, saveat=0.25, callback=eo.CallbackSet(falls, saving))

    def first(scale):
        sim = eo.solve(ensemble(prob, scale), trajectories=3)
        return sim.saved.values[:, 1], sim

    values, sim = first(1.0)
    np.testing.assert_allclose(values, -np.array([1.0, 4.0, np.nan]) / 8, rtol=1e-8)
    assert np.isnan(sim.saved.values[1, 2:]).all()
    np.testing.assert_array_equal(np.isnan(sim.saved.values), np.isnan(sim.u[..., 0]))
    slope = jax.jit(jax.grad(lambda x: jnp.nansum(first(x)[0])))(1.0)
    np.testing.assert_allclose(slope, -2 * (1.0 + 4.0) / 8, rtol=1e-7)


def test_gradients_by_what_the_function_closes_over():
    def end(scale, weight, n=2):
        saving = eo.SavingCallback(lambda u, p, t: weight * u[0] * p["unit"])
        prob = eo.remake(PROB, callback=saving)
        return jnp.sum(eo.solve(ensemble(prob, scale), trajectories=n).saved.values[:, -1])

    slopes = jax.jit(jax.grad(end, argnums=(0, 1)))(1.0, 3.0)
    k = np.arange(1.0, 3.0)
    np.testing.assert_allclose(slopes[0], -(6 * k * np.exp(-k)).sum(), rtol=1e-7)
    np.testing.assert_allclose(slopes[1], (2 * np.exp(-k)).sum(), rtol=1e-8)


def test_outputs_have_the_values():
    def output(sol, ctx):
        return {"t": sol.saved.t, "values": sol.saved.values, "u": sol.u}, False

    plain = eo.solve(ensemble(PROB), trajectories=3, callback=SAVING)
    for callback in (SAVING, eo.SavingCallback(observed, TIMES[::2])):
        sim = eo.solve(ensemble(PROB, output_func=output), trajectories=3, callback=callback)
        step = 1 if callback is SAVING else 2
        assert sim.saved is None
        np.testing.assert_array_equal(sim.u["u"], plain.u)
        np.testing.assert_array_equal(sim.u["t"], [TIMES[::step]] * 3)
        for name, x in sim.u["values"].items():
            np.testing.assert_allclose(x, plain.saved.values[name][:, ::step], rtol=1e-13)


OWN = np.array([0.0, 0.1, 0.5, 0.9])
ALGORITHMS = {
    "compiled": (eo.EnsembleThreads(), "compiled"),
    "diffrax": (eo.EnsembleThreads(1), "diffrax"),
    "serial": (eo.EnsembleSerial(), "auto"),
    "columns": (eo.EnsembleColumns(), "compiled"),
    "distributed": (eo.EnsembleDistributed(workers=1), "auto"),
}


SAVEAT = {"spaced": 0.5, "times": [0.5, 0.7], "ends": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saveat"),
    [(x, y) for x, y in itertools.product(ALGORITHMS, SAVEAT)],
)
def test_own_times(name, saveat):
    """The states are those of a solve without the callback, and the values have its times."""
    alg, engine = ALGORITHMS[name]
    ens, options = ensemble(BARE), {"trajectories": 3, "engine": engine, "saveat": SAVEAT[saveat]}
    plain = eo.solve(ens, None, alg, **options)
    sim = eo.solve(ens, None, alg, callback=eo.SavingCallback(observed, OWN), **options)
    np.testing.assert_array_equal(sim.t, plain.t)
    np.testing.assert_allclose(sim.u, plain.u, rtol=1e-14)
    np.testing.assert_array_equal(sim.lengths, plain.lengths)
    rates = np.arange(1.0, 4.0)[:, None]
    np.testing.assert_array_equal(sim.saved.t, OWN)
    close = 1e-4 if name == "diffrax" else 1e-8
    np.testing.assert_allclose(sim.saved.values["flow"], rates * np.exp(-rates * OWN), rtol=close)
    np.testing.assert_array_equal(sim[1].saved.values["flow"], sim.saved.values["flow"][1])
    np.testing.assert_array_equal(sim[1].saved.t, OWN)


def test_own_times_between_steps_and_backwards():
    saving = eo.SavingCallback(observed, 0.25)
    for span in ((0.0, 1.0), (1.0, 0.0)):
        prob = eo.remake(BARE, tspan=span, callback=saving)
        for options in ({"save_everystep": True}, {"saveat": [0.5]}):
            sol = eo.solve(prob, **options)
            t = np.linspace(*span, 5)
            np.testing.assert_array_equal(sol.saved.t, t)
            np.testing.assert_allclose(sol.saved.values["flow"], np.exp(-(t - span[0])), rtol=1e-7)
            np.testing.assert_array_equal(sol.saved.values["both"][:, 0], t)


@pytest.mark.slow
def test_own_times_end_with_the_trajectory():
    """Where events end the trajectories; and their derivatives do, too."""
    falls = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, eo.terminate)

    def solved(scale):
        saving = eo.SavingCallback(lambda u, p, t: jnp.log(u[0]) / p["rate"], [0.1, 0.3, 0.6])
        prob = eo.remake(PROB, callback=eo.CallbackSet(falls, saving))
        return eo.solve(ensemble(prob, scale), trajectories=3, saveat=0.5)

    sim = solved(1.0)
    expected = -np.where([[1, 1, 1], [1, 1, 0], [1, 0, 0]], [0.1, 0.3, 0.6], np.nan)
    np.testing.assert_allclose(sim.saved.values, expected, rtol=1e-8)
    np.testing.assert_array_equal(sim.lengths, [2, 1, 1])

    def total(scale):
        rates = scale * jnp.arange(1.0, 4.0)[:, None]
        return jnp.sum(rates * jnp.nan_to_num(solved(scale).saved.values))

    slope = jax.jit(jax.grad(total))(1.0)
    np.testing.assert_allclose(slope, np.nansum(np.arange(1.0, 4.0)[:, None] * expected), rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, pytest.param(OWN, id="own")])
def test_stores_keep_them(tmp_path, own):
    callback = eo.SavingCallback(observed, own)
    options = {"trajectories": 24, "batch_size": 8, "callback": callback}
    expected = eo.solve(ensemble(PROB), **options)
    sim = eo.solve(ensemble(PROB), **options, store=tmp_path / "a.zarr")
    for x in (sim, eo.open_ensemble(tmp_path / "a.zarr")):
        np.testing.assert_array_equal(x.saved.t, expected.saved.t)
        np.testing.assert_array_equal(x.u, expected.u)
        for name, values in expected.saved.values.items():
            np.testing.assert_array_equal(x.saved.values[name], values)
            np.testing.assert_array_equal(x[5].saved.values[name], values[5])
        xarray.testing.assert_equal(x.to_xarray().drop_attrs(), expected.to_xarray().drop_attrs())
    other = eo.SavingCallback(lambda u, p, t: u, own)
    with pytest.raises(eo.StoreError, match="fn of SavingCallback"):
        eo.solve(ensemble(PROB), **options | {"callback": other}, store=tmp_path / "a.zarr")


def raises_p(integrator):
    return eo.remake(integrator, p={**integrator.p, "rate": 2 * integrator.p["rate"]})


def of_each(prob, ctx):
    return eo.remake(prob, callback=eo.SavingCallback(lambda u, p, t: u * ctx.index))


@pytest.mark.parametrize(
    ("message", "callback", "more", "options"),
    [
        ("2 SavingCallbacks.*dictionary", eo.CallbackSet(SAVING, SAVING), {}, {}),
        (
            "a reduction.*output_func",
            SAVING,
            {"reduction": eo.sum_reduction, "u_init": jnp.zeros((3, 1))},
            {},
        ),
        (
            "SavingCallback has saveat.*may end.*saveat to solve",
            eo.CallbackSet(
                eo.SavingCallback(observed, 0.5),
                eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.1, eo.terminate),
            ),
            {"prob": BARE},
            {},
        ),
        (r"saveat has the time 2\.0, outside", eo.SavingCallback(observed, [0.5, 2.0]), {}, {}),
        (
            "changes p.*a component",
            eo.CallbackSet(SAVING, eo.PresetTimeCallback([0.3], raises_p)),
            {},
            {},
        ),
    ],
)
def test_what_is_refused(message, callback, more, options):
    with pytest.raises(ValueError, match=message):
        eo.solve(ensemble(**{"prob": PROB} | more), trajectories=2, callback=callback, **options)


def test_bad_functions():
    with pytest.raises(TypeError, match="fn of SavingCallback must be a function"):
        eo.SavingCallback(3)
    with pytest.raises(TypeError, match="fn must take the state, the parameters and the time"):
        eo.SavingCallback(lambda u, t: u)
    with pytest.raises(TypeError, match="fn of SavingCallback must return an array"):
        eo.solve(PROB, callback=eo.SavingCallback(lambda u, p, t: None))
    with pytest.raises(ValueError, match=r"prob_func makes a SavingCallback.*in p what differs"):
        eo.solve(eo.EnsembleProblem(PROB, of_each), trajectories=2)


def test_a_service_refuses():
    prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0), callback=SAVING)
    with pytest.raises(TypeError, match="SavingCallback, and a service answers with states"):
        eo.serve.Registry().add("decay", prob, saveat=0.5)
