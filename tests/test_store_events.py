"""Stores keep events, as many as trajectories have, and initial states and parameters."""

import dataclasses
import logging
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
import xarray

import ensembleode as eo
from ensembleode.engines.job import job_for
from ensembleode.plan.plan import Outcome
from ensembleode.running.job import UnfinishedBatch
from ensembleode.running.run import Run

from .marks import slow_unless
from .problems import decay, scaled
from .test_store import batch_of, but_elapsed, files, same


# Of the first batches a few events, of the last ones more than are in a chunk.
OPTIONS = {"trajectories": 24, "batch_size": 8, "saveat": 0.5, "abstol": 1e-10}


def ball(u, p, t):
    return {"height": u["speed"], "speed": -9.8 + p["thrust"]}


def bounced(integrator):
    u = integrator.u
    return eo.remake(integrator, u={"height": 0.0 * u["height"], "speed": -u["speed"]})


def balls(thrust=0.0, **parts):
    ground = eo.ContinuousCallback(lambda u, t, integrator: u["height"], None, bounced)
    gate = eo.ContinuousCallback(lambda u, t, integrator: u["height"] - 0.01, lambda x: x)
    u0 = {"height": jnp.array(1.0), "speed": jnp.array(0.0)}
    p = {"thrust": jnp.array(thrust), "label": "ball", "unused": [None, jnp.ones((2, 2))]}
    callback = eo.CallbackSet(ground, gate)
    prob = eo.ODEProblem(ball, u0, (0.0, 2.0), p, callback=callback)

    def prob_func(prob, ctx):
        height = prob.u0["height"] * 0.85**ctx.index
        p = {**prob.p, "thrust": prob.p["thrust"] + ctx.index / 100}
        return eo.remake(prob, u0={**prob.u0, "height": height}, p=p)

    return eo.EnsembleProblem(prob, prob_func, **parts)


def assert_same_events(events, expected):
    for (path, x), y in zip(
        jtu.tree_leaves_with_path(events), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), str(path))


@pytest.fixture(scope="module")
def expected():
    return eo.solve(balls(), **OPTIONS)


def test_what_happened_in_memory_and_on_disk(tmp_path, expected):
    """The axis of events is as long as the trajectory with most needs, whatever the batches."""
    counts = expected.events.count
    assert counts.max() > 32 > 16 > counts[:8].max()
    sim = eo.solve(balls(), **OPTIONS, store=tmp_path / "a.zarr")
    for x in (sim, eo.open_ensemble(tmp_path / "a.zarr")):
        same(x, expected)
        assert_same_events(x.events, expected.events)
        assert x.events.t.chunks == (8, 16)
        assert repr(x).splitlines()[4] == repr(expected).splitlines()[4]
        for i in (3, -1):
            assert_same_events(x[i].events, expected[i].events)
        xarray.testing.assert_equal(x.to_xarray().drop_attrs(), expected.to_xarray().drop_attrs())
    # Where none happened, there is no file; and nothing is written again.
    written = files(tmp_path / "a.zarr")
    assert {f"events.t/c/{i}" for i in ("0/0", "2/0", "2/1", "2/2")} < set(written)
    assert "events.t/c/0/1" not in written
    assert_same_events(
        eo.solve(balls(), **OPTIONS, store=tmp_path / "a.zarr").events, expected.events
    )
    assert files(tmp_path / "a.zarr") == written


@pytest.mark.slow
def test_starts_and_parameters(tmp_path, expected):
    eo.solve(balls(), **OPTIONS, store=tmp_path / "a.zarr")
    sim = eo.open_ensemble(tmp_path / "a.zarr")
    for kept, made in ((sim.u0, expected.u0), (sim.p, expected.p)):
        assert jtu.tree_structure(kept) == jtu.tree_structure(made)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, kept), made)
    assert type(sim.p["thrust"]).__name__ == "OnDisk"
    assert sim.p["unused"][1].strides[0] == 0
    assert sim.p["label"] == "ball"
    for i in (2, -1):
        assert sim[i].p["thrust"] == expected.p["thrust"][i]
        assert sim[i].p["unused"][1].shape == (2, 2)
        np.testing.assert_array_equal(sim[i].u0["height"], expected.u0["height"][i])
    data = xarray.open_zarr(tmp_path / "a.zarr").load()
    assert {"p.thrust", "u0.height"} < set(data.coords)
    np.testing.assert_array_equal(data["p.thrust"], expected.p["thrust"])


class Rates(NamedTuple):
    k: float
    act: object


def test_what_of_the_parameters_a_store_can_not_keep(tmp_path, caplog):
    """Is said, and is no error; names may be any."""
    p = {"CL/F": 1.0, "rates": Rates(jnp.ones(2), jnp.tanh)}

    def f(u, p, t):
        return -p["CL/F"] * p["rates"].act(p["rates"].k[0]) * u

    prob = eo.ODEProblem(f, 1.0, (0.0, 1.0), p)
    ens = eo.EnsembleProblem(
        prob,
        lambda prob, ctx: eo.remake(prob, p={**prob.p, "CL/F": 1.0 + ctx.index}),
        lambda sol, ctx: ({"p": sol.u[-1]}, False),
    )
    with caplog.at_level(logging.INFO, "ensembleode"):
        eo.solve(ens, trajectories=5, store=tmp_path / "a.zarr")
    assert "and not p.rates.act: what opens it" in caplog.text
    sim = eo.open_ensemble(tmp_path / "a.zarr")
    np.testing.assert_array_equal(sim.p["CL/F"], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert sim.p["rates"]["act"] is None
    np.testing.assert_array_equal(sim.p["rates"]["k"], np.ones((5, 2)))
    np.testing.assert_array_equal(sim.u0, np.ones(5))
    np.testing.assert_allclose(sim.u["p"], np.exp(-np.tanh(1.0) * np.arange(1, 6)), rtol=1e-3)
    again = eo.EnsembleProblem(decay(), scaled, lambda sol, ctx: (sol.u, ctx.repeat < 2))
    eo.solve(again, trajectories=5, store=tmp_path / "b.zarr")
    with pytest.raises(ValueError, match="after reruns"):
        _ = eo.open_ensemble(tmp_path / "b.zarr").p


def damaged(path, how, name):
    """Damages a chunk of this variable in the second batch."""
    second = path / name / "c" / "1"
    chunk = next(x for x in (second, *second.rglob("*")) if x.is_file())
    data = bytearray(chunk.read_bytes())
    if how == "missing":
        chunk.unlink()
        return chunk
    if how == "flipped":
        data[len(data) // 2] ^= 1
    chunk.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    return chunk


@pytest.mark.parametrize("how", ["missing", "flipped", slow_unless(False, "truncated")])
@pytest.mark.parametrize("name", ["events.t", slow_unless(False, "u0.height")])
def test_damage_is_found(tmp_path, how, name, expected):
    path = tmp_path / "a.zarr"
    eo.solve(balls(), **OPTIONS, store=path)
    written, chunk = files(path), damaged(path, how, name)
    sim = eo.open_ensemble(path)
    read = {"events.t": lambda: sim.events.t, "u0.height": lambda: sim.u0["height"]}[name]
    if how == "flipped":
        with pytest.raises(eo.StoreError, match=f"{name}/c/1.*of the trajectories 8 to 15"):
            np.asarray(read())
        assert len(read()[16:]) == 8  # of other batches
    else:
        assert (np.asarray(sim.retcode) == 0).sum() == 8
        assert np.isnan(np.asarray(read())[8:16]).all()
    again = eo.solve(balls(), **OPTIONS, store=path)
    assert_same_events(again.events, expected.events)
    changed = {file for file, at in files(path).items() if written[file] != at}
    assert str(chunk.relative_to(path)) in changed
    assert {batch_of(file) for file in changed} == {1}


@pytest.mark.slow
def test_the_batch_with_most_events_is_lost(tmp_path, expected):
    """The axis is shorter then, and as long as before when they have been computed again."""
    path = tmp_path / "a.zarr"
    eo.solve(balls(), **OPTIONS, store=path)

    def contents():
        found = {x: x.read_bytes() for x in path.rglob("*") if x.is_file()}
        said = path / "zarr.json", path / "digest" / "zarr.json"
        return found | {x: but_elapsed(found[x]) for x in said}

    before = contents()
    (path / "digest" / "c" / "2" / "0").unlink()
    (path / "digest" / "zarr.json").unlink()
    again = eo.solve(balls(), **OPTIONS, store=path)
    assert_same_events(again.events, expected.events)
    assert contents() == before


@pytest.mark.slow
def test_another_callback_is_refused(tmp_path):
    path = tmp_path / "a.zarr"
    eo.solve(balls(), **OPTIONS, store=path)
    with pytest.raises(eo.StoreError, match="differs in max_events"):
        eo.solve(balls(), **OPTIONS, store=path, max_events=100)
    gate = eo.ContinuousCallback(lambda u, t, integrator: u["height"] - 0.2, lambda x: x)
    with pytest.raises(eo.StoreError, match="what callbacks do"):
        eo.solve(balls(), **OPTIONS, store=path, callback=gate)


@pytest.mark.slow
def test_vectors_of_conditions_terminated_and_none_at_all(tmp_path):
    def solve(level, **options):
        callback = eo.VectorContinuousCallback(
            lambda u, t, integrator: u - jnp.array([level, 0.5]),
            lambda integrator, mask: eo.terminate(integrator),
            2,
        )
        prob = eo.ODEProblem(lambda u, p, t: -u, jnp.array([2.0, 1.0]), (0.0, 1.0))
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index))
        return eo.solve(ens, trajectories=9, callback=callback, **options)

    for i, level in enumerate((1.0, -1.0)):
        path = tmp_path / f"{i}.zarr"
        expected, _ = solve(level), solve(level, store=path)
        sim = eo.open_ensemble(path)
        same(sim, expected)
        assert_same_events(sim.events, expected.events)
        assert sim.events.direction.shape[2] == 2
        xarray.testing.assert_equal(sim.to_xarray().drop_attrs(), expected.to_xarray().drop_attrs())
    assert solve(-1.0).events.t.shape[1] <= 1


def test_room_that_grows_is_not_taken_for_the_end():
    """A batch that is stopped while there is too little room has nothing of those that need more;
    nor does a store get it."""
    ens = balls()
    job, choice = job_for(ens, {}, jax.random.key(0), 3, "auto", eo.Tsit5())
    taken = []
    codes = [eo.ReturnCode.Success, eo.ReturnCode.MaxEvents, eo.ReturnCode.Terminated]
    outcome = Outcome(retcode=np.array([x.value for x in codes], np.int8))

    def run(job, indices, repeat):
        job.sink(outcome, np.ones(3, bool))
        raise UnfinishedBatch(outcome, np.ones(3, bool), KeyboardInterrupt())

    job = dataclasses.replace(job, sink=lambda outcome, done: taken.append(done.tolist()))
    executor = types.SimpleNamespace(vectorised=False, fills_up=lambda plan: False, run=run)
    every = Run(job, ens, eo.EnsembleSerial(), executor, choice, 3, 3, 1, False, None, None, 0.0)
    with pytest.raises(UnfinishedBatch) as e:
        every.solve(np.arange(3))
    assert e.value.done.tolist() == taken[0] == [True, False, True]
    # With as much room as there ever is, it is done.
    full = every._replace(job=job.replan(max_events=2**13))
    with pytest.raises(UnfinishedBatch) as e:
        full.solve(np.arange(3))
    assert e.value.done.all()


def test_outputs_as_long_as_the_room(tmp_path):
    """Are refused in a store, where there is another shape for some, and when run again."""

    def ens(rerun):
        def output_func(sol, ctx):
            return sol.events.t, (ctx.repeat < 2) & rerun

        made = balls(output_func=output_func)
        return eo.EnsembleProblem(
            made.prob,
            lambda prob, ctx: made.prob_func(prob, dataclasses.replace(ctx, index=23 * ctx.repeat)),
            output_func,
        )

    options = {**OPTIONS, "trajectories": 1}
    with pytest.raises(ValueError, match=r"shape \(16,\), and \(128,\).*pass max_events"):
        eo.solve(ens(False), **options, store=tmp_path / "a.zarr")
    sim = eo.solve(ens(False), **options, max_events=50, store=tmp_path / "b.zarr")
    assert sim.u.shape == (1, 50)


@pytest.mark.slow
@pytest.mark.parametrize("alg", [eo.EnsembleDistributed(workers=2), eo.EnsembleSerial()])
def test_every_algorithm(tmp_path, alg, expected):
    sim = eo.solve(balls(), None, alg, **OPTIONS, store=tmp_path / "a.zarr")
    same(sim, expected)
    assert_same_events(sim.events, expected.events)
