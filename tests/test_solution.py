"""The results of a solve."""

import copy
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.ground.devices import placement
from ensembleode.ground.retcode import count_codes
from ensembleode.running.job import blank
from ensembleode.solution.dense import KeptSlopes, states_at
from ensembleode.solution.solution import EngineChoice, EnsembleSolution

from .problems import decay, scaled


settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=50)

S, M, U = eo.ReturnCode.Success, eo.ReturnCode.MaxIters, eo.ReturnCode.Unstable


def solution(codes=(S, S, M, U), times=3, state=(2,), make=jnp.asarray, **changes):
    """An ensemble solution of numbers that are all different, with its counts on the host."""
    n = len(codes)
    counts = np.arange(10, 10 + n, dtype=np.int32)
    fields = {
        "u": make(np.arange(1.0 * n * times * np.prod(state)).reshape(n, times, *state)),
        "t": make(np.linspace(0.0, 1.0, times)),
        "retcode": np.array(codes, np.int8),
        "lengths": np.where(np.array(codes) == S, times, 1).astype(np.int32),
        "stats": eo.Stats(counts, counts - 10, 7 * counts),
        "converged": True,
        "elapsed": 0.25,
        "engine": EngineChoice("diffrax", "asked for"),
        "kind": "trajectories",
        "_dense": None,
    }
    return EnsembleSolution(*{**fields, **changes}.values())


@pytest.fixture(scope="module")
def solved():
    """Two trajectories with every accepted step."""
    ens = eo.EnsembleProblem(decay(), scaled)
    return eo.solve(ens, trajectories=2, save_everystep=True, abstol=1e-9, reltol=1e-9)


def test_return_codes():
    """Their values are part of the contract: they are stored."""
    assert {c.name: c.value for c in eo.ReturnCode} == {
        "Default": 0,
        "Success": 1,
        "MaxIters": 2,
        "DtLessThanMin": 3,
        "Unstable": 4,
        "Failure": 5,
        "Terminated": 6,
        "MaxEvents": 7,
        "ConvergenceFailure": 8,
        "InitialFailure": 9,
        "Diverged": 10,
    }


def test_count_codes():
    assert count_codes(np.array([S, S])) == "Success 2"
    assert count_codes(np.array([U, S, M, U])) == "Success 1, MaxIters 1 [2], Unstable 2 [0, 3]"
    assert count_codes(np.array([0, 5])) == "Default 1 [0], Failure 1 [1]"
    assert count_codes(np.array([], int)) == ""
    many = np.full(7, M)
    assert count_codes(many) == "MaxIters 7 [0, 1, 2, 3, 4, ...]"
    assert count_codes(many, most=7) == "MaxIters 7 [0, 1, 2, 3, 4, 5, 6]"


def test_failed():
    np.testing.assert_array_equal(solution().failed, [2, 3])
    assert solution([S, S]).failed.size == 0
    # One that did not run did not fail.
    np.testing.assert_array_equal(solution([eo.ReturnCode.Default, U]).failed, [1])


def test_masks():
    """Of those that are successful, and inside jit of those that failed."""
    expected = np.array([True, True, False, False])
    assert solution().successful.tolist() == expected.tolist()
    good, bad = jax.jit(lambda sim: (sim.successful, sim.failed))(solution())
    np.testing.assert_array_equal(good, expected)
    np.testing.assert_array_equal(bad, ~expected)


def test_whether_one_is_successful():
    of = [S, eo.ReturnCode.Terminated, M, U]
    expected = [True, True, False, False]
    assert [sol.successful for sol in solution(of)] == expected

    def by_jit(u0):
        prob = eo.ODEProblem(lambda u, p, t: u**2, u0, (0.0, 1.0))  # blows up at 1 / u0
        return eo.solve(prob).successful

    assert [bool(jax.jit(by_jit)(u0)) for u0 in (0.5, 1.5)] == [True, False]


def test_a_return_code_is_its_name():
    assert str(eo.ReturnCode.MaxIters) == f"{solution()[2].retcode}" == "MaxIters"


def test_the_states_of_a_solution_are_in_u():
    with pytest.raises(TypeError, match=r"its states are sol.u\[1\]"):
        solution()[0][1]
    with pytest.raises(TypeError, match="not indexed"):
        list(solution()[0])


def test_a_trajectory():
    sim = solution()
    for i in (1, -3, np.int64(1), jnp.asarray(1)):
        sol = sim[i]
        assert isinstance(sol, eo.ODESolution)
        np.testing.assert_array_equal(sol.u, sim.u[1])
        np.testing.assert_array_equal(sol.t, sim.t)
        assert sol.retcode is S
        assert sol.length == 3
        assert (sol.stats.naccept, sol.stats.nreject, sol.stats.nf) == (11, 1, 77)
        assert len(sol) == 3
    assert sim[2].retcode is M
    assert sim[-1].retcode is U


@pytest.mark.parametrize("i", [4, -5, 100])
def test_a_trajectory_that_is_not_there(i):
    with pytest.raises(IndexError, match=f"trajectory {i} of 4"):
        solution()[i]


def test_an_index_of_several_axes_says_what_to_do():
    with pytest.raises(TypeError, match=r"a slice, a mask .* index sim\.u"):
        solution()[1, 0]


def bouncing(**options):
    """Four trajectories that end at different times, with events, integrals and values beside."""
    ground = eo.ContinuousCallback(
        lambda u, t, i: u["x"], lambda i: eo.remake(i, u={**i.u, "v": -i.p["e"] * i.u["v"]})
    )
    prob = eo.ODEProblem(
        lambda u, p, t: {"x": u["v"], "v": -jnp.ones_like(u["v"])},
        {"x": 1.0, "v": 0.0},
        (0.0, 1.0),
        {"e": 0.5, "kind": "ball"},
        integrand=lambda u, p, t: u["x"],
    )
    ens = eo.EnsembleProblem(
        prob,
        lambda prob, ctx: eo.remake(
            prob, tspan=(0.0, 1.0 + ctx.index), p={**prob.p, "e": 0.5 + ctx.index / 10}
        ),
        **options.pop("parts", {}),
    )
    values = eo.SavingCallback(lambda u, p, t: 2.0 * u["x"])
    callback = eo.CallbackSet(ground, values) if not ens.output_func else ground
    return eo.solve(ens, trajectories=4, callback=callback, **options)


@pytest.fixture(scope="module")
def some_of(tmp_path_factory):
    """Ensembles to take some trajectories of, with all that solutions have."""
    path = tmp_path_factory.mktemp("some") / "store.zarr"
    bouncing(saveat=0.5, store=path)
    output = {"output_func": lambda sol, ctx: ({"end": sol.u["x"][-1]}, False)}
    return {
        "own times": bouncing(saveat=0.5),
        "every step": bouncing(save_everystep=True),
        "store": eo.open_ensemble(path),
        "outputs": bouncing(parts=output),
    }


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["own times", "every step", "store", "outputs"])
@pytest.mark.parametrize(
    "which",
    [slice(1, 3), slice(None, None, -2), [3, 0, 3], np.array([True, False, False, True]), [-1], []],
    ids=str,
)
def test_some_trajectories(some_of, name, which):
    """They are the trajectories that they are by themselves."""
    sim = some_of[name]
    some, wanted = sim[which], np.arange(4)[which]
    assert len(some) == len(wanted)
    for mine, i in zip(some, wanted.tolist(), strict=True):
        theirs = sim[i]
        a, b = jax.tree.flatten(mine), jax.tree.flatten(theirs)
        assert a[1] == b[1]
        jax.tree.map(np.testing.assert_array_equal, a[0], b[0])
        if name != "outputs":
            np.testing.assert_array_equal(mine.p["e"], theirs.p["e"])
            assert mine.p["kind"] == "ball"
            np.testing.assert_array_equal(mine.u0["x"], theirs.u0["x"])
    if name == "every step" and len(wanted):
        np.testing.assert_array_equal(some(0.5)["x"], sim(0.5)["x"][wanted])
    if name != "outputs":
        assert some.to_xarray()["p.e"].shape == (len(wanted),)


@pytest.mark.parametrize("which", [1.5, [0, 4], [True, False], [0.5], "a", None])
def test_some_that_are_not_there(which, unchecked):
    with pytest.raises((IndexError, TypeError)):
        solution()[which]


def test_a_trajectory_inside_jit():
    """Its index may be traced."""
    u, retcode = jax.jit(lambda sim, i: (sim[i].u, sim[i].retcode))(solution(), 2)
    np.testing.assert_array_equal(u, solution().u[2])
    assert retcode == M


def test_own_times_are_cut_to_what_was_reached():
    t = np.array([[0, 0.5, 1], [0, 1, np.nan]])
    slopes = KeptSlopes(solution([S, S]).u + 1)
    sim = solution([S, S], t=t, lengths=np.array([3, 2]), _dense=slopes)
    assert [len(sol) for sol in sim] == [3, 2]
    np.testing.assert_array_equal(sim[1].t, [0, 1])
    np.testing.assert_array_equal(sim[1].u, sim.u[1, :2])
    np.testing.assert_array_equal(sim[1]._dense.du, sim.u[1, :2] + 1)


def test_shared_times_are_not_cut():
    """A trajectory that fails has NaN there, and its length says how far it came."""
    assert len(solution()[2]) == 3
    assert solution()[2].length == 1


def test_outputs_are_indexed_leaf_by_leaf():
    u = {"a": jnp.arange(4.0), "b": (jnp.ones((4, 2)),)}
    sim = solution(u=u, t=None, kind="outputs")
    assert sim[1]["a"] == 1.0
    assert sim[-1]["b"][0].shape == (2,)
    assert [float(out["a"]) for out in sim] == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(IndexError):
        sim[4]


def test_a_reduced_ensemble_has_no_trajectories():
    sim = solution(u=jnp.array(3.0), t=None, kind="reduced")
    with pytest.raises(TypeError, match=r"was reduced.*sim\.u"):
        sim[0]
    with pytest.raises(TypeError, match="was reduced"):
        list(sim)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
@pytest.mark.parametrize("state", [(), (2,), (2, 5)], ids=str)
def test_as_an_array(state, make):
    sim = solution(state=state, make=make)
    for array in (np.asarray(sim), jnp.asarray(sim), sim.to_array(), sim.to_array("batch")):
        assert array.shape == (4, 3, *state)
        np.testing.assert_array_equal(array, sim.u)
    julia = sim.to_array("julia")
    assert julia.shape == (*state, 3, 4)
    for i in range(4):
        for k in range(3):
            np.testing.assert_array_equal(julia[..., k, i], sim.u[i, k])


def test_as_an_array_of_another_dtype():
    array = np.asarray(solution(), np.float32)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, solution().u)


def test_another_layout(unchecked):
    with pytest.raises(ValueError, match="layout must be 'batch' or 'julia', got 'time'"):
        solution().to_array("time")


@pytest.mark.parametrize("kind", ["outputs", "reduced"])
def test_what_is_no_array(kind):
    sim = solution(u={"a": jnp.ones(4)}, t=None, kind=kind)
    for convert in (np.asarray, lambda sim: sim.to_array(), lambda sim: sim.to_array("julia")):
        with pytest.raises(TypeError, match=r"pytree: use sim\.u"):
            convert(sim)


def test_one_solution_as_an_array():
    np.testing.assert_array_equal(np.asarray(solution()[1]), solution().u[1])


def test_through_tree_map():
    sim = solution()
    twice = jax.tree.map(lambda x: 2 * x, sim)
    assert isinstance(twice, EnsembleSolution)
    np.testing.assert_array_equal(twice.u, 2 * sim.u)
    np.testing.assert_array_equal(twice.t, 2 * sim.t)
    np.testing.assert_array_equal(twice.stats.nf, 2 * sim.stats.nf)
    assert twice.engine == sim.engine
    assert twice.kind == sim.kind


def test_through_jit():
    def go(scale):
        ens = eo.EnsembleProblem(eo.remake(decay(), p=-scale), scaled)
        return eo.solve(ens, trajectories=2, saveat=[0.5, 1.0])

    sim = jax.jit(go)(1.0)
    assert isinstance(sim, EnsembleSolution)
    assert sim.u.shape == (2, 2, 2)
    assert sim[1].retcode is S
    assert len(list(sim)) == 2
    assert sim.failed.size == 0
    assert np.isnan(sim.elapsed)
    ends = jax.jit(lambda sim: sim.u[:, -1])(sim)
    np.testing.assert_array_equal(ends, sim.u[:, -1])


def test_one_solution_through_jit():
    sol = jax.jit(lambda sol: jax.tree.map(lambda x: 2 * x, sol))(solution()[1])
    assert isinstance(sol, eo.ODESolution)
    np.testing.assert_array_equal(sol.u, 2 * solution().u[1])


def test_repr_of_an_ensemble():
    assert repr(solution()).splitlines() == [
        "EnsembleSolution: 4 trajectories x 3 times, state (2,) float64",
        "  retcode  Success 2, MaxIters 1 [2], Unstable 1 [3]",
        "  t        0 to 1",
        "  steps    10 to 13 accepted, 0 to 3 rejected",
        "  engine   diffrax (asked for)",
        "  elapsed  0.25 s",
    ]


def test_repr_of_own_times():
    t = np.array([[0, 0.5, 1], [0.25, 1, np.nan]])
    assert "own times for each, from 0 to 0.25 on" in repr(solution([S, S], t=t))


def test_repr_of_outputs():
    text = repr(solution(u={"end": jnp.ones((4, 2))}, t=None, kind="outputs"))
    assert text.startswith("EnsembleSolution: 4 trajectories, outputs {'end': 'float64[4, 2]'}\n")
    assert "Success 2, MaxIters 1 [2]" in text
    assert "  t  " not in text


def test_repr_of_a_reduced_ensemble():
    text = repr(solution(u=jnp.array(3.0), t=None, kind="reduced", converged=jnp.asarray(False)))
    assert "4 trajectories, reduced float64[]" in text
    assert "converged False" in text


def test_repr_of_a_solution():
    assert repr(solution()[2]).splitlines() == [
        "ODESolution: 3 times, state (2,) float64",
        "  retcode  MaxIters",
        "  t        0 to 1",
        "  steps    12 accepted, 2 rejected",
    ]


def test_repr_inside_jit():
    seen = []

    def look(sim):
        seen.extend([repr(sim), repr(sim[0])])
        return sim.u

    jax.jit(look)(solution())
    assert seen == [
        "EnsembleSolution(u=float64[4, 3, 2], engine=diffrax, traced)",
        "ODESolution(u=float64[3, 2], traced)",
    ]


def test_repr_of_what_comes_out_of_jit():
    sim = jax.jit(lambda sim: sim)(solution())
    assert repr(sim) == repr(solution())
    assert repr(sim[2]) == repr(solution()[2])


@pytest.mark.parametrize(
    "make",
    [
        lambda sol: jax.tree.map(lambda x: jnp.stack([x, x]), sol),
        lambda sol: jax.vmap(lambda scale: jax.tree.map(lambda x: x, solution()))(jnp.ones(2)),
        lambda sol: solution(u=sol, t=None, kind="outputs"),
        lambda sol: jax.eval_shape(lambda: jax.tree.map(jnp.asarray, sol)),
        lambda sol: jax.eval_shape(solution),
    ],
    ids=["stacked", "vmapped", "output", "shapes", "shapes of an ensemble"],
)
def test_repr_of_what_was_mapped(make):
    """A pytree may hold anything; to show it never raises."""
    assert "Solution" in repr(make(solution()[0]))


def sampled(coefficients, ts):
    """Polynomials and their derivatives: `[time, state]`."""
    return (
        np.stack([np.polyval(c, ts) for c in coefficients], -1),
        np.stack([np.polyval(np.polyder(c), ts) for c in coefficients], -1),
    )


def interpolate(ts, us, dus, length, at):
    return states_at(KeptSlopes(dus), ts, us, length, True, jnp.asarray(at), several=False)


@pytest.mark.slow
@settings
@hypothesis.given(
    coefficients=st.lists(
        st.lists(st.floats(-2, 2), min_size=4, max_size=4), min_size=2, max_size=2
    ),
    start=st.floats(-3, 3),
    steps=st.lists(st.floats(0.05, 1), min_size=5, max_size=5),
    sign=st.sampled_from([1, -1]),
    parts=st.lists(st.floats(0, 1), min_size=7, max_size=7),
)
def test_cubics_are_exact(coefficients, start, steps, sign, parts):
    """On uneven steps, forwards and backwards."""
    ts = start + sign * np.cumsum([0.0, *steps])
    at = np.clip(ts[0] + np.array(parts) * (ts[-1] - ts[0]), min(ts), max(ts))
    us, dus = sampled(coefficients, ts)
    expected, _ = sampled(coefficients, at)
    np.testing.assert_allclose(interpolate(ts, us, dus, 6, at), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(interpolate(ts, us, dus, 6, ts), us, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_outside_is_nan(sign):
    ts = sign * np.array([0.0, 0.5, 1.0])
    us, dus = sampled([[1.0, 0.0]], ts)
    at = sign * np.array([-1e-9, 0.0, 0.75, 1.0, 1 + 1e-9, np.nan, np.inf, -np.inf])
    got = interpolate(ts, us, dus, 3, at)[:, 0]
    nan = np.nan
    np.testing.assert_allclose(got, sign * np.array([nan, 0, 0.75, 1, nan, nan, nan, nan]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_was_not_reached_is_nan(sign):
    ts = sign * np.array([0.0, 0.5, 1.0, np.nan, np.nan])
    us, dus = sampled([[1.0, 2.0, 0.0]], ts)
    at = sign * np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.5])
    expected = sampled([[1.0, 2.0, 0.0]], at)[0]
    got = interpolate(ts, us, dus, 3, at)
    np.testing.assert_allclose(got[:5], expected[:5], rtol=1e-14)
    assert np.isnan(got[5:]).all()
    got = interpolate(ts, us, dus, 2, at)
    np.testing.assert_allclose(got[:3], expected[:3], rtol=1e-14)
    assert np.isnan(got[3:]).all()
    assert np.isnan(interpolate(ts, us, dus, 0, at)).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_start_alone_was_reached(rows):
    """As by a trajectory that fails in its first step."""
    ts = jnp.array([0.5, np.nan, np.nan])[:rows]
    us = jnp.array([[2.0], [np.nan], [np.nan]])[:rows]
    got = interpolate(ts, us, us, 1, jnp.array([0.4, 0.5, 0.6]))
    np.testing.assert_array_equal(got, [[np.nan], [2.0], [np.nan]])


@pytest.mark.slow
def test_dense_solutions(solved):
    t = np.array([0.0, 0.1, 0.77, 1.0])
    exact = np.exp(-t)[:, None] * np.array([1.0, 2.0])
    np.testing.assert_allclose(solved(t), np.stack([exact, 2 * exact]), rtol=1e-6)
    np.testing.assert_allclose(solved(0.77), [exact[2], 2 * exact[2]], rtol=1e-6)
    np.testing.assert_allclose(solved[1](list(t)), 2 * exact, rtol=1e-6)
    np.testing.assert_allclose(solved[1](0.77), 2 * exact[2], rtol=1e-6)


def test_dense_solutions_on_the_host(solved):
    """Gathered from batches, they are NumPy arrays."""
    sim = jax.tree.map(np.asarray, solved)
    np.testing.assert_array_equal(sim(0.77), solved(0.77))
    np.testing.assert_array_equal(sim[1](0.77), solved[1](0.77))

    np.testing.assert_array_equal(sim[1]([0.1, 0.77]), solved[1]([0.1, 0.77]))


def test_dense_solutions_can_be_differentiated(solved):
    slope = jax.jit(jax.jacfwd(lambda t: solved[0](t)))(0.5)
    np.testing.assert_allclose(slope, -np.exp(-0.5) * np.array([1.0, 2.0]), rtol=1e-4)


@pytest.mark.parametrize("t", [0.5, [0.25, 0.5]])
def test_solutions_without_every_step_cannot_be_interpolated(t):
    for sol in (solution(), solution()[0]):
        with pytest.raises(ValueError, match=r"can't be interpolated.*save_everystep=True.*saveat"):
            sol(t)


def test_a_trajectory_that_never_began():
    """It has its code, one row of NaN, and NaN between."""
    sol = eo.solve(eo.remake(decay(), u0=jnp.array([jnp.nan])), save_everystep=True)
    assert sol.retcode == eo.ReturnCode.Unstable
    assert sol.length == 0
    assert np.isnan(sol.u).all()
    assert np.isnan(sol(0.5)).all()
    assert "Unstable" in repr(sol)


@pytest.mark.slow
def test_interpolation_has_a_slope_at_saved_times():
    prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.array([1.0]), (0.0, 1.0), jnp.array(-0.5))
    sol = eo.solve(prob, save_everystep=True)
    for i, t in enumerate(sol.t):
        assert sol(t)[0] == sol.u[i, 0]
        slope = jax.grad(lambda t: sol(t)[0])(t)
        np.testing.assert_allclose(slope, -0.5 * sol.u[i, 0], rtol=1e-12)


def test_interpolation_over_no_time():
    def at_start(rate):
        prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.array([1.0]), (0.0, 0.0 * rate), rate)
        return eo.solve(prob, save_everystep=True, maxiters=8)(0.0)[0]

    value, gradient = jax.jit(jax.value_and_grad(at_start))(jnp.array(-0.5))
    assert value == 1
    assert gradient == 0


def of_kind(kind, datas):
    def output_func(sol, ctx):
        return {"end": sol.u[-1], "key": ctx.index}, (ctx.repeat < 3) & (ctx.index == 2)

    def reduction(u, data, indices):
        datas.append(data)
        return u + data["end"].sum(), False

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=ctx.sim_id * prob.u0, tspan=(0.0, 1.0 * ctx.sim_id))

    output = {} if kind == "trajectories" else {"output_func": output_func}
    reduced = {"reduction": reduction, "u_init": 0.0} if kind == "reduced" else {}
    return eo.EnsembleProblem(decay(), prob_func, **output, **reduced)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("trajectories", {"saveat": 0.5}),
        ("trajectories", {"save_everystep": True}),
        ("outputs", {}),
        ("reduced", {}),
    ],
)
def test_types_do_not_depend_on_the_batches(kind, options):
    types = set()
    for batch_size in (None, 5, 2):
        datas = []
        sim = eo.solve(of_kind(kind, datas), trajectories=5, batch_size=batch_size, **options)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((sim.u, sim.t, datas)))
        one = datas[:1]
        leaves = jax.tree.leaves((sim.retcode, sim.lengths, sim.stats, sim.converged, one))
        types.add(tuple(map(type, leaves)))
    assert len(types) == 1


@pytest.mark.parametrize(("limit", "moved"), [(10**6, False), (319, True)])
def test_what_is_too_large_for_an_accelerator_stays_in_the_memory_of_the_host(
    limit, moved, monkeypatch
):
    class Accelerator:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": limit}

    monkeypatch.setattr(placement, "default_device", Accelerator)
    gathered, there = blank((10, 1), np.dtype(float), np.nan), jnp.ones(3)
    gathered[...] = 2.0
    result, same = placement.as_jax_arrays((gathered, there))
    assert same is there
    assert isinstance(result, jax.Array)
    assert result.committed == moved  # to the CPU, whichever the default device is
    np.testing.assert_array_equal(result, 2.0)


def test_what_is_gathered_is_not_copied():
    array = blank((3, 5), np.dtype(np.float32), np.nan)
    assert placement.as_jax_arrays(array).unsafe_buffer_pointer() == array.ctypes.data


def test_attributes_by_their_names_elsewhere():
    sim = solution()
    for name, remedy in (("save", "to_netcdf"), ("ys", "called u"), ("success", "retcode")):
        for of in (sim, sim[0]):
            assert not hasattr(of, name)
            with pytest.raises(AttributeError, match=remedy):
                getattr(of, name)
    with pytest.raises(AttributeError, match=r"'EnsembleSolution' object has no attribute 'x'$"):
        _ = sim.x
    again = pickle.loads(pickle.dumps(sim))
    np.testing.assert_array_equal(again.u, copy.deepcopy(sim).u)
