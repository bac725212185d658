"""States that are pytrees. (On all ensemble algorithms: test_conformance.py.)"""

import importlib.util
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo
from ensembleode.ground.state_tree import as_state, component_names, tree_of, written_order

from .marks import slow_unless


class Prey(NamedTuple):
    young: Any
    old: Any


class Place(eqx.Module):
    x: Any
    v: Any


TIGHT = {"abstol": 1e-10, "reltol": 1e-10}


def spring(u, p, t):
    return {"v": -p * u["x"], "x": u["v"]}


U0 = {"x": jnp.array([1.0, 2.0]), "v": jnp.zeros(2)}


def springs(p=2.0, **options):
    return eo.ODEProblem(spring, U0, (0.0, 1.0), p, **options)


def ensemble(**parts):
    def prob_func(prob, ctx):
        x = ctx.sim_id * prob.u0["x"]
        return eo.remake(prob, u0=prob.u0 | {"x": x})

    return eo.EnsembleProblem(springs(), prob_func, **parts)


def exact(t, n=1):
    """The places of trajectory n, counted from 1, at the times t."""
    return n * np.array([1.0, 2.0]) * np.cos(np.sqrt(2.0) * np.asarray(t))[:, None]


#
# What a state is made of
#


@pytest.mark.slow
@pytest.mark.parametrize(
    "u0",
    [
        (jnp.ones(2), jnp.zeros(3)),
        (jnp.array(1.0), jnp.array(2.0)),
        [np.ones(2), np.zeros(2)],
        (jnp.ones((2, 2)), 0.0),
        {"x": (jnp.ones(1), [1.0, 2.0])},
        ({"x": jnp.ones(2), "v": 1.0}, {"x": jnp.ones(1), "v": 0.0}),
        [Prey(1.0, 2.0), Place(jnp.ones(1), 0.0)],
    ],
    ids=str,
)
def test_tuples_of_arrays_are_states(u0):
    state = as_state(u0)
    assert tree_of(state) is not None

    def f(u, p, t):
        return jax.tree.map(lambda x: -p * x, u)

    prob = eo.ODEProblem(f, u0, (0.0, 1.0), 0.5)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=prob.p * ctx.sim_id))
    sim = eo.solve(ens, trajectories=2, save_start=False, **TIGHT)
    expected = jax.tree.map(
        lambda x: np.stack([np.exp(-0.5 * i) * x for i in (1, 2)])[:, None], state
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), sim.u, expected)
    back = jax.grad(
        lambda u0: sum(x.sum() for x in jax.tree.leaves(eo.solve(eo.remake(prob, u0=u0)).u))
    )(state)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 1 + np.exp(-0.5), rtol=1e-3), back)


@pytest.mark.slow
def test_numbers_under_grad_are_numbers():
    def end(a):
        prob = eo.ODEProblem(lambda u, p, t: -u, [a, 1.0], (0.0, 1.0))
        return eo.solve(prob, **TIGHT).u[-1, 0]

    np.testing.assert_allclose(jax.value_and_grad(end)(1.0), np.exp([-1.0, -1.0]), rtol=1e-7)


def structs(inner):
    """Whatever they hold, they are no arrays."""
    pair = st.tuples(inner, inner)
    named = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2)
    return named | pair.map(lambda x: Prey(*x)) | pair.map(lambda x: Place(*x))


arrays = st.sampled_from([(1,), (2,), (2, 1)]).map(np.ones)
inside = arrays | arrays.map(jnp.asarray) | structs(st.just(0.5) | st.just(jnp.array(0.5)))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(u0=st.recursive(inside, lambda x: structs(x) | st.lists(x, min_size=1, max_size=2)
                       | st.tuples(x, x), max_leaves=5))  # fmt: skip
def test_containers_in_any_order(u0):
    state = as_state(u0)
    assert jax.tree.structure(state) == jax.tree.structure(u0)
    jax.tree.map(np.testing.assert_array_equal, state, u0)
    if (tree := tree_of(state)) is not None:
        again = tree.unravel(tree.ravel(state))
        jax.tree.map(np.testing.assert_array_equal, again, state)
        np.testing.assert_array_equal(np.sort(tree.written()), np.arange(tree.size))


def test_names_of_components():
    u = {"b": jnp.zeros(2), "a": Prey(jnp.zeros(()), jnp.zeros((1, 2)))}
    assert component_names(u) == ("a.young", "a.old[0,0]", "a.old[0,1]", "b[0]", "b[1]")
    order = written_order(u)
    assert order == ("b", "a.young", "a.old")
    assert component_names(u, 0, order) == ("b[0]", "b[1]", "a.young", "a.old[0,0]", "a.old[0,1]")


def test_numbers_take_the_dtype_of_arrays_beside_them():
    u = as_state({"x": jnp.ones(2, jnp.float32), "v": 0.0})
    assert u["v"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("u0", "error", "message"),
    [
        ({"x": jnp.ones(2, jnp.float32), "v": jnp.ones(2)}, TypeError, r"one dtype.*u0\['v'\]"),
        ({"x": jnp.ones(2, int), "v": jnp.ones(2)}, TypeError, r"u0\['x'\] has the integer dtype"),
        ({"x": "fast", "v": 1.0}, TypeError, r"u0\['x'\] must be an array"),
        ({"x": jnp.ones(0)}, ValueError, "u0 is empty"),
        ({}, TypeError, "u0 must be an array"),
    ],
)
def test_what_is_no_state(u0, error, message):
    with pytest.raises(error, match=message):
        eo.ODEProblem(lambda u, p, t: u, u0, (0.0, 1.0))


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda u, p, t: u["x"], TypeError, "structure"),
        (lambda u, p, t: {"x": u["v"]}, TypeError, "structure"),
        (lambda u, p, t: u | {"x": u["v"][0]}, ValueError, r"du\['x'\] has the shape \(\)"),
        (lambda u, p, t: u | {"x": jnp.float32(u["v"])}, TypeError, r"du\['x'\] is float32"),
    ],
)
def test_what_f_returns_is_made_like_the_state(f, error, message):
    with pytest.raises(error, match=message):
        eo.solve(eo.ODEProblem(f, U0, (0.0, 1.0)))


def test_all_trajectories_have_one_structure():
    def prob_func(prob, ctx):
        return eo.remake(prob, u0={"y": jnp.ones(4)} if ctx.index else prob.u0)

    with pytest.raises(ValueError, match="structure"):
        eo.solve(eo.EnsembleProblem(springs(), prob_func), trajectories=2)


#
# Solved
#


def test_alone():
    sol = eo.solve(springs(), eo.Tsit5(), saveat=0.25, **TIGHT)
    np.testing.assert_allclose(sol.u["x"], exact(sol.t), rtol=1e-8)
    assert sol.u["v"].shape == (5, 2)
    assert np.asarray(sol).shape == (5, 4)
    assert "{x (2,), v (2,)}" in repr(sol)


@pytest.mark.slow
def test_dense():
    sim = eo.solve(ensemble(), trajectories=3, save_everystep=True, **TIGHT)
    ts = np.linspace(0.0, 1.0, 7)
    for i in range(3):
        np.testing.assert_allclose(sim(ts)["x"][i], exact(ts, i + 1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sim[i](ts)["x"], exact(ts, i + 1), rtol=1e-5, atol=1e-6)
        assert sim[i].u["x"].shape == (sim[i].length, 2)


def test_output_func_and_reduction():
    def output_func(sol, ctx):
        return sol.u["x"][-1], False

    ends = eo.solve(ensemble(output_func=output_func), trajectories=3, **TIGHT).u
    np.testing.assert_allclose(ends, [exact([1.0], n)[0] for n in (1, 2, 3)], rtol=1e-8)
    whole = ensemble(
        reduction=lambda u, data, i: (u + data["x"].sum(), False), u_init=jnp.array(0.0)
    )
    total = eo.solve(whole, trajectories=3, batch_size=2, save_start=False, **TIGHT).u
    np.testing.assert_allclose(total, sum(exact([1.0], n).sum() for n in (1, 2, 3)), rtol=1e-8)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_gradients(engine):
    def loss(u0, p):
        ens = eo.EnsembleProblem(
            eo.ODEProblem(spring, u0, (0.0, 1.0), p),
            lambda prob, ctx: eo.remake(prob, p=ctx.sim_id * prob.p),
        )
        sim = eo.solve(ens, eo.Tsit5(), trajectories=2, engine=engine, **TIGHT)
        return jnp.sum(sim.u["x"][:, -1] ** 2)

    (to_u0, to_p) = jax.jit(jax.grad(loss, (0, 1)))(U0, 2.0)
    # x = x0 cos(w t), w^2 = n p
    w = np.sqrt(np.array([2.0, 4.0]))
    np.testing.assert_allclose(to_u0["x"], 2 * (np.cos(w) ** 2).sum() * U0["x"], rtol=1e-6)
    by_w = -2 * np.cos(w) * np.sin(w) * 5
    np.testing.assert_allclose(to_p, (by_w * w / 4).sum(), rtol=1e-6)
    moved = (2 * np.cos(w) * np.sin(w) / w).sum()  # x = x0 cos(w t) + v0 sin(w t) / w
    np.testing.assert_allclose(to_u0["v"], moved * U0["x"], rtol=1e-6)


def test_what_is_missing_of_a_failed_trajectory_is_nan():
    prob = eo.ODEProblem(lambda u, p, t: {"a": u["a"] ** 2}, {"a": 1.0}, (0.0, 1.0))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0={"a": 0.5 + ctx.index}))
    sim = eo.solve(ens, trajectories=2)
    assert sim.failed.tolist() == [1]
    assert np.isnan(sim.u["a"][1, -1])
    np.testing.assert_allclose(sim.u["a"][0, -1], 1.0, rtol=1e-2)


def test_a_stiff_one_is_said_to_be():
    prob = eo.ODEProblem(lambda u, p, t: {"a": -1e4 * u["a"]}, {"a": jnp.ones(2)}, (0.0, 100.0))
    with pytest.raises(eo.EnsembleError, match="looks stiff"):
        eo.solve(prob, eo.Tsit5(), maxiters=500, throw=True)


def test_tolerances_like_the_state():
    def steps(tolerance):
        return eo.solve(springs(), eo.Tsit5(), abstol=tolerance, reltol=tolerance).stats.naccept

    each = {"x": 1e-8, "v": jnp.array([1e-8, 1e-8])}
    assert steps(each) == steps(1e-8) > steps({"x": 1e-3, "v": 1e-3})
    kept = springs(abstol=each, reltol=each)
    assert eo.solve(kept, eo.Tsit5()).stats.naccept == steps(1e-8)
    for bad in ({"x": 1e-3}, {"x": jnp.ones(3), "v": 1e-3}):
        with pytest.raises(ValueError, match="pytree like u0"):
            steps(bad)


def test_other_numbers_compile_nothing(compiles):
    def solved(x, p):
        prob = eo.ODEProblem(spring, {"x": x * jnp.ones(2), "v": jnp.zeros(2)}, (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=ctx.sim_id * prob.p))
        return eo.solve(ens, eo.Tsit5(), trajectories=2, **TIGHT).u["x"]

    solved(1.0, jnp.array(2.0))
    compiles.count = 0
    again = solved(3.0, jnp.array(4.0))
    assert compiles.count == 0
    np.testing.assert_allclose(again[0, -1], 3 * np.cos(2.0), rtol=1e-8)


def sir(u, p, t):
    infected = p * u["S"] * u["I"]
    return {"R": u["I"], "I": infected - u["I"], "S": -infected}


def epidemic(order="SIR", **parts):
    start = {"S": 0.9, "I": 0.1, "R": 0.0}
    prob = eo.ODEProblem(sir, {name: start[name] for name in order}, (0.0, 4.0), 3.0)

    def prob_func(prob, ctx):
        # (JAX sorts the keys of what it maps over.)
        u0 = jax.tree.map(lambda x: x * (1 + ctx.index / 10), prob.u0)
        return eo.remake(prob, u0=u0)

    return eo.EnsembleProblem(prob, prob_func, **parts)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["SIR", "RIS", "ISR"])
def test_components_keep_the_order_they_were_written_in(order, tmp_path):
    ens, options = epidemic(order), {"trajectories": 4, "saveat": 1.0}
    sim = eo.solve(ens, **options)
    outputs = eo.solve(epidemic(order, output_func=lambda sol, ctx: (sol, False)), **options)
    found = [sim, jax.jit(lambda: eo.solve(ens, **options))(), jax.tree.map(jnp.asarray, sim)]
    if importlib.util.find_spec("zarr"):
        found.append(eo.solve(ens, **options, store=tmp_path / "a.zarr"))
        found.append(eo.open_ensemble(tmp_path / "a.zarr"))
    for each in found:
        assert list(each.to_pandas().columns) == list(order)
        assert list(each.to_xarray().data_vars)[:3] == list(order)
        assert eo.EnsembleSummary(each).names == tuple(order)
        for i, name in enumerate(order):
            np.testing.assert_allclose(each.to_array()[..., i], each.u[name])
            np.testing.assert_allclose(np.asarray(each[1])[:, i], each[1].u[name])
    np.testing.assert_allclose(outputs.u.u["S"], sim.u["S"])
    np.testing.assert_allclose(outputs[1], sim[1])
    assert eo.analysis.summarize(ens, **options).names == tuple(order)


@pytest.mark.slow
def test_components_by_name():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    sim = eo.solve(epidemic(), trajectories=4, saveat=1.0)
    for shown in (sim, sim[0], eo.EnsembleSummary(sim)):
        assert shown.plot("I").get_ylabel() == "I"
        assert shown.plot(("S", "R")).get_xlabel() == "S"
        assert [t.get_text() for t in shown.plot(["R", 1]).get_legend().get_texts()][-2:] == [
            "R",
            "I",
        ]
        with pytest.raises(ValueError, match="no component has the name 'X'; there are S, I, R"):
            shown.plot("X")
    assert sim.plot("b", names=["a", "b", "c"]).get_ylabel() == "b"
    springs = eo.solve(ensemble(), trajectories=3, saveat=0.5)
    texts = {t.get_text() for t in springs.plot("v").get_legend().get_texts()}
    assert texts == {"v[0]", "v[1]"}
    assert springs.plot("v[1]").get_ylabel() == "v[1]"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("quantiles", [(0.1, 0.9), [(0.05, 0.95), (0.25, 0.75)]])
def test_a_summary_by_name(quantiles):
    ens = epidemic()
    every = eo.EnsembleSummary(eo.solve(ens, trajectories=9, saveat=1.0), quantiles=quantiles)
    one = every["I"]
    for name in ("u", "v", "med", "qlow", "qhigh"):
        np.testing.assert_array_equal(getattr(one, name), getattr(every, name)[..., 1])
    assert one.names == ("I",)
    assert one.quantiles == every.quantiles
    both = eo.EnsembleSummary(eo.solve(ensemble(), trajectories=3, saveat=0.5), quantiles=quantiles)
    np.testing.assert_array_equal(both["v"].med, both.med[:, 2:])
    assert both["v"].names == ("v[0]", "v[1]")
    with pytest.raises(ValueError, match="no component has the name 'X'"):
        every["X"]
    with pytest.raises(TypeError, match="indexed by the names"):
        every[0]


def test_names_of_leaves_are_different():
    u0 = {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    with pytest.raises(ValueError, match="of the same name"):
        eo.ODEProblem(lambda u, p, t: u, u0, (0.0, 1.0))


#
# Looked at
#


@pytest.mark.slow
def test_statistics_are_of_the_flattened_state():
    sim = eo.solve(ensemble(), trajectories=3, saveat=0.5)
    mean = eo.analysis.timeseries_steps_mean(sim)
    np.testing.assert_allclose(mean[:, :2], sim.u["x"].mean(0), rtol=1e-12)
    np.testing.assert_allclose(
        eo.analysis.timepoint_mean(sim, 0.5)[2:], sim.u["v"][:, 1].mean(0), rtol=1e-12
    )
    dense = eo.solve(ensemble(), trajectories=3, save_everystep=True)
    assert eo.analysis.get_timepoint(dense, [0.1, 0.2]).shape == (3, 2, 4)
    names = ("x[0]", "x[1]", "v[0]", "v[1]")
    summary = eo.EnsembleSummary(sim)
    assert summary.names == names
    np.testing.assert_allclose(summary.u, mean, rtol=1e-12)
    streamed = eo.analysis.summarize(ensemble(), trajectories=3, saveat=0.5, batch_size=2)
    assert streamed.names == names
    np.testing.assert_allclose(streamed.u, mean, rtol=1e-9, atol=1e-12)


def test_arrays():
    sim = eo.solve(ensemble(), trajectories=3, saveat=0.5)
    flat = np.concatenate([sim.u["x"], sim.u["v"]], axis=-1)
    np.testing.assert_array_equal(np.asarray(sim), flat)
    np.testing.assert_array_equal(sim.to_array(), flat)
    np.testing.assert_array_equal(sim.to_array("julia"), np.moveaxis(flat, (0, 1), (-1, -2)))


def test_labels():
    pytest.importorskip("xarray")
    sim = eo.solve(ensemble(), trajectories=3, saveat=0.5)
    data = sim.to_xarray()
    assert data["x"].dims == ("trajectory", "time", "x_0")
    np.testing.assert_array_equal(data["x"], sim.u["x"])
    assert sim[0].to_xarray()["v"].dims == ("time", "v_0")
    columns = ["x[0]", "x[1]", "v[0]", "v[1]"]
    assert list(sim.to_pandas().columns) == columns
    assert list(sim[0].to_pandas().columns) == columns
    with pytest.raises(ValueError, match="names are for the components of a vector"):
        sim.to_xarray(names=["a", "b", "c", "d"])
    assert eo.EnsembleSummary(sim).to_xarray()["mean"].coords["state"].values.tolist() == columns


def test_plots():
    pytest.importorskip("matplotlib").use("agg")
    sim = eo.solve(ensemble(), trajectories=3, saveat=0.5)
    for ax in (sim.plot(), sim[0].plot(), eo.EnsembleSummary(sim).plot()):
        shown = {text.get_text() for text in ax.get_legend().get_texts()}
        assert {"v[0]", "v[1]", "x[0]", "x[1]"} <= shown
    assert sim.plot(idxs=(2, 0)).get_xlabel() == "v[0]"


@pytest.mark.slow
@pytest.mark.parametrize("everystep", [False, True])
def test_stores(tmp_path, everystep):
    pytest.importorskip("zarr")
    options = {"save_everystep": True, "maxiters": 32} if everystep else {"saveat": 0.5}
    sim = eo.solve(ensemble(), trajectories=5, **options)
    options |= {"batch_size": 2, "store": tmp_path / "springs.zarr"}
    stored = eo.solve(ensemble(), trajectories=5, **options)
    for found in (stored, eo.open_ensemble(tmp_path / "springs.zarr")):
        rows = sim.u["x"].shape[1]
        for leaf in ("x", "v"):
            np.testing.assert_array_equal(found.u[leaf][:][:, :rows], sim.u[leaf])
        np.testing.assert_array_equal(found[1].u["x"][:rows], sim[1].u["x"])
        if everystep:
            np.testing.assert_allclose(found(0.3)["x"], sim(0.3)["x"], rtol=1e-12)


@pytest.mark.parametrize(
    ("what", "use"),
    [
        ("multiple_shooting", lambda: eo.multiple_shooting(springs(), [], [], group_size=2)),
        ("check_columns", lambda: eo.check_columns(springs())),
    ],
)
def test_refused_by_name(what, use):
    with pytest.raises(TypeError, match=f"{what} takes states that are arrays"):
        use()
