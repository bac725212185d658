"""Solutions as xarray datasets and pandas frames."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .test_statistics import blowup


def ensemble(u0, output_func=None):
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.asarray(u0), (0.0, 1.0), 1.0)
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=1.0 + ctx.index), output_func
    )


def test_named_dimensions():
    sim = eo.solve(ensemble([1.0, 2.0]), trajectories=3, saveat=0.5)
    data = sim.to_xarray(names=["prey", "predator"])
    assert data["u"].dims == ("trajectory", "time", "state")
    np.testing.assert_array_equal(data["u"], sim.u)
    end = data["u"].sel(state="predator", time=1.0, trajectory=2)
    np.testing.assert_allclose(end, 2 * np.exp(-3), rtol=1e-3)
    for name in ("naccept", "nreject", "nf"):
        np.testing.assert_array_equal(data[name], getattr(sim.stats, name))
    np.testing.assert_array_equal(data["length"], sim.lengths)
    assert data.attrs["engine"].startswith("compiled")
    meanings = data["retcode"].attrs["flag_meanings"].split()
    codes = data["retcode"].attrs["flag_values"]
    assert [meanings[codes.index(code)] for code in data["retcode"].values] == ["Success"] * 3
    assert data["retcode.name"].values.tolist() == ["Success"] * 3
    assert sim[1].to_xarray()["retcode.name"].item() == "Success"
    assert list(sim.to_xarray()["state"].values) == ["u0", "u1"]
    frame = sim.to_pandas(names=["prey", "predator"])
    assert frame.index.names == ["trajectory", "time"]
    np.testing.assert_array_equal(frame.loc[(2, 0.5)], sim.u[2, 1])
    assert list(frame.columns) == ["prey", "predator"]


def test_shapes_of_the_state():
    scalar = eo.solve(ensemble(1.0), trajectories=2)
    assert scalar.to_xarray()["u"].dims == ("trajectory", "time")
    assert list(scalar.to_pandas().columns) == ["u"]
    matrix = eo.solve(ensemble(np.ones((2, 3))), trajectories=2).to_xarray()
    assert matrix["u"].dims == ("trajectory", "time", "state_0", "state_1")
    with pytest.raises(ValueError, match="this state has the shape"):
        scalar.to_xarray(names=["u"])


def test_own_times_are_a_coordinate():
    sim = eo.solve(ensemble([1.0]), trajectories=3, save_everystep=True)
    data = sim.to_xarray()
    assert data["u"].dims == ("trajectory", "step", "state")
    assert data["time"].dims == ("trajectory", "step")
    np.testing.assert_array_equal(data["time"], sim.t)
    frame = sim.to_pandas()
    assert list(frame.columns) == ["time", "u0"]
    # A row for each step that was taken, none for the padding.
    assert len(frame) == sim.lengths.sum() < sim.u.shape[0] * sim.u.shape[1]
    one = frame.loc[1]
    np.testing.assert_array_equal(one["time"], sim[1].t)
    np.testing.assert_array_equal(one["u0"], sim[1].u[:, 0])


def test_a_failed_trajectory_keeps_its_rows():
    sim = eo.solve(blowup(jnp.array([0.5, 4.0])), trajectories=2, saveat=0.2)
    data = sim.to_xarray()
    assert data["retcode"].values[1] == eo.ReturnCode.Unstable
    np.testing.assert_array_equal(np.isnan(data["u"][1, :, 0]), [False] * 2 + [True] * 4)
    assert len(sim.to_pandas()) == 12


def test_one_solution_and_a_summary():
    sim = eo.solve(ensemble([1.0, 2.0]), trajectories=3, saveat=0.5)
    one = sim[1].to_xarray(names=["a", "b"])
    np.testing.assert_array_equal(one["u"].sel(state="b"), sim.u[1, :, 1])
    assert int(one["naccept"]) == sim.stats.naccept[1]
    assert list(sim[1].to_pandas().columns) == ["u0", "u1"]
    alone = eo.solve(ensemble([1.0, 2.0]).prob, save_everystep=True).to_xarray()
    assert alone["u"].dims == ("time", "state")
    summary = eo.EnsembleSummary(sim, quantiles=(0.1, 0.9))
    data = summary.to_xarray(names=["a", "b"])
    for name, field in (("mean", "u"), ("variance", "v"), ("median", "med"), ("qlow", "qlow")):
        np.testing.assert_array_equal(data[name], getattr(summary, field))
    assert data["qhigh"].attrs["quantile"] == 0.9
    np.testing.assert_array_equal(data["num_monte"], [3, 3, 3])
    bands = eo.EnsembleSummary(sim, quantiles=[(0.1, 0.9), (0.25, 0.75)])
    data = bands.to_xarray()
    assert data["qlow"].dims == ("band", "time", "state")
    assert data["qlow"].attrs["quantile"] == (0.1, 0.25)
    np.testing.assert_array_equal(data["qhigh"], bands.qhigh)


def test_outputs():
    def output_func(sol, ctx):
        return {"end": sol.u[-1], "steps": sol.stats.naccept}, False

    sim = eo.solve(ensemble([1.0, 2.0], output_func), trajectories=3)
    data = sim.to_xarray()
    assert data["end"].dims == ("trajectory", "end_0")
    np.testing.assert_array_equal(data["end"], sim.u["end"])
    assert data["steps"].dims == ("trajectory",)
    frame = sim.to_pandas()
    assert list(frame.columns) == ["end[0]", "end[1]", "steps"]
    assert frame.index.name == "trajectory"
    np.testing.assert_array_equal(frame[["end[0]", "end[1]"]], sim.u["end"])


def test_outputs_may_have_any_name():
    def output_func(sol, ctx):
        return {"u": sol.u[0], "nf": 2 * sol.stats.nf}, False

    sim = eo.solve(ensemble([1.0], output_func), trajectories=3)
    np.testing.assert_array_equal(sim.to_xarray()["nf"], sim.u["nf"])
    assert list(sim.to_pandas().columns) == ["nf", "u[0]"]


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "c"], "ab", ["time", "b"]])
def test_names_that_do_not_fit(names):
    sim = eo.solve(ensemble([1.0, 2.0]), trajectories=2)
    with pytest.raises(ValueError, match="names must be 2 different names"):
        sim.to_xarray(names)


def test_what_has_no_labels():
    prob = ensemble([1.0]).prob
    reduced = eo.EnsembleProblem(prob, reduction=lambda u, d, i: (u + d.sum(), False), u_init=0.0)
    with pytest.raises(TypeError, match="reduced"):
        eo.solve(reduced, trajectories=2).to_xarray()
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda: eo.solve(ensemble([1.0]), trajectories=2).to_xarray())()


@pytest.mark.slow
def test_events():
    halves = eo.ContinuousCallback(lambda u, t, integrator: u["x"][0] - 0.5, lambda i: i)
    ens = ensemble([1.0])
    prob = eo.ODEProblem(
        lambda u, p, t: {"x": -p * u["x"]}, {"x": jnp.ones(2)}, (0.0, 1.0), 1.0, callback=halves
    )
    sim = eo.solve(eo.EnsembleProblem(prob, ens.prob_func), trajectories=3)
    data, one = sim.to_xarray(), sim[0].to_xarray()
    assert data["events.t"].dims == ("trajectory", "event")
    assert data["events.u_before.x"].dims == ("trajectory", "event", "x_0")
    np.testing.assert_array_equal(data["events.t"], sim.events.t)
    np.testing.assert_array_equal(data["events.count"], [1, 1, 1])
    np.testing.assert_allclose(data["events.t"][:, 0], np.log(2) / np.arange(1, 4), rtol=1e-3)
    np.testing.assert_array_equal(one["events.u_after.x"], sim[0].events.u_after["x"])
