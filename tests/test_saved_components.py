"""`save_idxs`: what is saved has the same bits as in a solve that saves all components."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled.steps import description
from ensembleode.engines.job import job_for
from ensembleode.problem.options import among

from .problems import lorenz


N = 3
P = jnp.array([10.0, 28.0, 8 / 3])
PROB = eo.ODEProblem(lorenz, jnp.array([1.0, 0.5, 2.0]), (0.0, 1.0), P)
CHOSEN = [2, 0]
FALLS = eo.ContinuousCallback(
    lambda u, t, integrator: u[0] - 3, lambda i: eo.remake(i, u=0.5 * i.u), None
)
LANDS = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 9, eo.terminate)


def ensemble(prob=PROB, **parts):
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=prob.p + ctx.index), **parts
    )


def both(ens=None, **options):
    """A solve that saves all, and one that saves the chosen components."""
    ens = ensemble() if ens is None else ens
    of_all = eo.solve(ens, trajectories=N, **options)
    return of_all, eo.solve(ens, trajectories=N, save_idxs=CHOSEN, **options)


def same(every, some):
    np.testing.assert_array_equal(some, np.asarray(every)[..., CHOSEN])


@pytest.mark.parametrize(
    ("idxs", "shape", "names"),
    [
        (1, (), ("u1",)),
        (-1, (), ("u2",)),
        ([2, 0], (2,), ("u2", "u0")),
        (range(1, 3), (2,), ("u1", "u2")),
        (slice(1, None), (2,), ("u1", "u2")),
        (np.array([True, False, True]), (2,), ("u0", "u2")),
        (slice(None), (3,), None),
    ],
    ids=str,
)
def test_of_a_vector(idxs, shape, names):
    sol = eo.solve(PROB, save_idxs=idxs)
    at = list(idxs) if isinstance(idxs, range) else idxs
    np.testing.assert_array_equal(sol.u, np.asarray(eo.solve(PROB).u)[:, at])
    assert (sol.u.shape[1:], sol.names) == (shape, names)


def test_of_other_states():
    def f(u, p, t):
        return jax.tree.map(lambda x: -x, u)

    matrix = eo.ODEProblem(f, [[1.0, 2.0], [3.0, 4.0]], (0.0, 1.0), save_idxs=[3, 0])
    assert eo.solve(matrix).u[0].tolist() == [4, 1]
    assert eo.solve(matrix).names == ("u[1,1]", "u[0,0]")
    tree = eo.ODEProblem(f, {"b": [1.0, 2.0], "a": 3.0, "c": 4.0}, (0.0, 1.0))
    sol = eo.solve(tree, save_idxs=["c", "b"])
    assert jax.tree.map(lambda x: x[0].tolist(), sol.u) == {"b": [1, 2], "c": 4}
    assert sol.names == ("c", "b[0]", "b[1]")
    sol = eo.solve(tree, save_idxs="b", save_everystep=True)
    assert (sol.u[0].tolist(), sol.names) == ([1, 2], ("b[0]", "b[1]"))
    np.testing.assert_allclose(sol(0.5), np.exp(-0.5) * np.array([1, 2]), rtol=1e-3)


@pytest.mark.parametrize(
    ("idxs", "error", "match"),
    [
        (3, ValueError, "of the 3 components of u0, counted from 0; got 3"),
        ([0, -3], ValueError, "a component twice"),
        ([], ValueError, "leaves nothing to save"),
        (True, TypeError, "must be an integer, a list"),
        ("u0", TypeError, "must be an integer, a list"),
        ([0.0, 1.0], TypeError, "must be an integer, a list"),
        ([[0, 1]], TypeError, "must be an integer, a list"),
    ],
)
def test_errors(idxs, error, match):
    with pytest.raises(error, match=match):
        eo.solve(PROB, save_idxs=idxs)


def test_errors_of_names_and_elsewhere():
    tree = eo.ODEProblem(lambda u, p, t: u, {"a": 1.0, "b": 2.0}, (0.0, 1.0))
    for idxs, error, match in (
        ("c", ValueError, "'c', and the leaves of u0 are a, b"),
        (["a", "a"], ValueError, "twice"),
        (0, TypeError, "the name of a leaf of u0, or a list of names.*: a, b; got 0"),
    ):
        with pytest.raises(error, match=match):
            eo.solve(tree, save_idxs=idxs)
    with pytest.raises(TypeError, match="save_idxs must be a Python value"):
        jax.jit(lambda i: eo.solve(PROB, save_idxs=i).u)(1)
    own = eo.EnsembleProblem(PROB, lambda prob, ctx: eo.remake(prob, save_idxs=ctx.index))
    with pytest.raises(ValueError, match="all trajectories of an ensemble must have the same"):
        eo.solve(own, trajectories=2)
    with pytest.raises(ValueError, match="save_idxs is given, and steady_state"):
        eo.steady_state(PROB, save_idxs=1)
    with pytest.raises(TypeError, match="save_idxs can't be given to a registry"):
        eo.serve.Registry().add("lorenz", eo.remake(PROB, save_idxs=1))


SAVING = {
    "ends": {},
    "times": {"saveat": 0.25},
    "own times": {"saveat": np.array([[0.1, 0.5], [0.2, 1.0], [0.3, np.inf]])},
    "steps": {"save_everystep": True},
}
# What has kernels whose rows are whole is chosen from after the solve.
WITH = {
    "nothing": {},
    "events": {"callback": FALLS, "save_after_events": True},
    "an end": {"callback": LANDS},
    "saved values": {"callback": eo.SavingCallback(lambda u, p, t: u[1])},
    "diffrax": {"engine": "diffrax"},
}
QUICK = {("times", "events"), ("times", "saved values"), ("steps", "nothing")}


@pytest.mark.parametrize(
    ("saving", "more"),
    [
        pytest.param(s, m, marks=() if (s, m) in QUICK else pytest.mark.slow)
        for s in SAVING
        for m in WITH
    ],
)
def test_all_that_a_solution_has(saving, more):
    every, some = both(**SAVING[saving], **WITH[more])
    same(every.u, some.u)
    np.testing.assert_array_equal(every.t, some.t)
    np.testing.assert_array_equal(every.lengths, some.lengths)
    same(every.end.u, some.end.u)
    same(every[1].u, some[1].u)
    if every.events is not None:
        same(every.events.u_before, some.events.u_before)
        same(every.events.u_after, some.events.u_after)
    if every.saved is not None:
        np.testing.assert_array_equal(every.saved.values, some.saved.values)
    if saving == "steps":
        t = np.linspace(0, 0.9, 5)
        np.testing.assert_allclose(some(t), np.asarray(every(t))[..., CHOSEN], rtol=1e-12)


@pytest.mark.slow
def test_outputs_and_what_is_integrated():
    prob = eo.remake(PROB, integrand=lambda u, p, t: u[1] ** 2, saveat=0.5)
    np.testing.assert_array_equal(eo.solve(prob, save_idxs=2).integral, eo.solve(prob).integral)
    ends = ensemble(output_func=lambda sol, ctx: (sol(0.7), False))
    every, some = both(ends, save_everystep=True)
    np.testing.assert_allclose(some.u, every.u[:, jnp.array(CHOSEN)], rtol=1e-12)


@pytest.mark.parametrize("engine", ["compiled", pytest.param("diffrax", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "derivative",
    [
        jax.grad,
        pytest.param(jax.jacfwd, marks=pytest.mark.slow),
        pytest.param(jax.hessian, marks=pytest.mark.slow),
    ],
)
def test_derivatives(derivative, engine):
    """By the parameters, and by the saved times, at which `f` needs the whole state."""

    def loss(idxs, x):
        p, t = P + x[0], jnp.array([0.2, 0.5]) + x[1]
        sim = eo.solve(ensemble(eo.remake(PROB, p=p)), trajectories=N, engine=engine, saveat=t,
                       save_idxs=idxs)  # fmt: skip
        u = sim.u if idxs else sim.u[..., jnp.array(CHOSEN)]
        return jnp.sum(jnp.sin(u[..., 0]) + 3 * u[..., 1] ** 2)

    x = jnp.zeros(2)
    every, some = (derivative(functools.partial(loss, idxs))(x) for idxs in (None, CHOSEN))
    np.testing.assert_allclose(some, every, rtol=1e-12)


@pytest.mark.parametrize("in_memory", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_overflow_of_a_component_that_is_not_saved(in_memory, monkeypatch):
    """With fixed steps, where all trajectories go on."""
    if in_memory:
        monkeypatch.setattr(description, "least_in_memory", lambda: 1)
    prob = eo.ODEProblem(lambda u, p, t: jnp.stack([p * u[0] ** 2, -u[1]]), [1.0, 1.0], (0.0, 2.0))
    ens = eo.EnsembleProblem(prob, p=jnp.array([0.1, 5.0]))
    options = {"dt": 0.1, "adaptive": False, "saveat": 0.25, "engine": "compiled"}
    every, some = (eo.solve(ens, **options, save_idxs=idxs) for idxs in (None, 1))
    np.testing.assert_array_equal(some.retcode, every.retcode)
    np.testing.assert_array_equal(some.lengths, every.lengths)
    np.testing.assert_array_equal(some.u, every.u[..., 1])
    assert some.failed.tolist() == [1]


def test_rows_of_a_batch_have_only_what_is_saved():
    def rows(**options):
        job, _ = job_for(ensemble(), among(options), jax.random.key(0), N, "auto", eo.Tsit5())
        lanes = job.trajectories.lanes(jnp.arange(N), 1)
        text = str(
            jax.make_jaxpr(lambda x: job.plan.engine.solve_trajectories(job.plan, x, N))(lanes)
        )
        return f"f64[{N},{3 * 5}]" in text, f"f64[{N},{2 * 5}]" in text

    assert rows(saveat=0.25) == (True, False)
    assert rows(saveat=0.25, save_idxs=CHOSEN) == (False, True)


def test_names_in_tables_plots_and_stores(tmp_path):
    pytest.importorskip("matplotlib")
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    options = {"trajectories": N, "saveat": 0.5, "save_idxs": CHOSEN}
    ens = eo.EnsembleProblem(PROB, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index))
    sim = eo.solve(ens, **options)
    eo.solve(ens, **options, store=tmp_path / "s")
    assert "state (2,) float64 of u2, u0" in repr(sim)
    for x in (sim, eo.open_ensemble(tmp_path / "s")):
        assert x.names == ("u2", "u0")
        assert list(x.to_pandas().columns) == ["u2", "u0"]
        assert x.to_xarray().state.values.tolist() == ["u2", "u0"]
        assert x.to_xarray().coords["u0"].shape == (N, 3)
        np.testing.assert_array_equal(x.u, sim.u)
        (line,) = x[0].plot(idxs="u0").get_lines()
        np.testing.assert_array_equal(line.get_ydata(), sim.u[0, :, 1])
    assert xarray.open_zarr(tmp_path / "s").sizes["state"] == 2
    summary = eo.analysis.summarize(ens, **options)
    assert summary.names == eo.EnsembleSummary(sim).names == sim.names
    with pytest.raises(eo.StoreError, match="differs in save_idxs"):
        eo.solve(ens, **options | {"save_idxs": [0, 2]}, store=tmp_path / "s")
    one = eo.solve(ens, **options | {"save_idxs": 1})
    assert list(one.to_pandas().columns) == ["u1"]
    assert one.to_xarray().u.attrs == {"long_name": "u1"}
