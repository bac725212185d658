"""The initial states and parameters of trajectories: `sim.u0` and `sim.p`."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .problems import linear


WEIGHTS = jnp.ones((3, 3))


def oscillators(**parts):
    """A state and parameters of several parts; each trajectory has its own stiffness and place."""

    def f(u, p, t):
        return {"v": -p["k"] * u["x"], "x": u["v"] * p["weights"][0, 0]}

    p = {"k": 1.0, "weights": WEIGHTS, "label": "spring", "order": 2}
    prob = eo.ODEProblem(f, {"x": jnp.ones(2), "v": jnp.zeros(2)}, (0.0, 1.0), p)

    def prob_func(prob, ctx):
        u0 = {"x": ctx.sim_id * prob.u0["x"], "v": prob.u0["v"]}
        return eo.remake(prob, u0=u0, p=prob.p | {"k": 1.0 + ctx.index / 10})

    return eo.EnsembleProblem(prob, prob_func, **parts)


@pytest.mark.slow
def test_of_an_ensemble_and_its_trajectories():
    sim = eo.solve(oscillators(), trajectories=4)
    np.testing.assert_allclose(sim.p["k"], [1.0, 1.1, 1.2, 1.3])
    np.testing.assert_array_equal(sim.u0["x"][:, 0], [1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(sim.u0["x"], sim.u["x"][:, 0])
    np.testing.assert_array_equal(sim.u0["v"], sim.u["v"][:, 0])
    assert sim.p["label"] == "spring"
    np.testing.assert_array_equal(sim.p["order"], [2] * 4)
    for i in (2, -1):
        assert sim[i].p["k"] == sim.p["k"][i]
        assert sim[i].p["weights"].shape == WEIGHTS.shape
        assert sim[i].p["label"] == "spring"
        np.testing.assert_array_equal(sim[i].u0["x"], sim.u0["x"][i])


def test_what_all_share_is_there_once():
    sim = eo.solve(oscillators(), trajectories=4)
    assert sim.p["weights"].shape == (4, *WEIGHTS.shape)
    assert sim.p["weights"].strides[0] == 0


def test_of_a_single_problem():
    prob = eo.ODEProblem(linear, [1.0, 2.0], (0.0, 1.0), -0.5, integrand=lambda u, p, t: u)
    sol = eo.solve(prob)
    assert sol.p == -0.5
    np.testing.assert_array_equal(sol.u0, [1.0, 2.0])
    assert eo.solve(eo.ODEProblem(lambda u, p, t: -u, 1.0, (0.0, 1.0))).p is None


def test_a_prob_func_that_python_calls():
    starts = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=starts[int(ctx.index)])

    prob = eo.ODEProblem(linear, starts[0], (0.0, 1.0), -1.0)
    sim = eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=2)
    np.testing.assert_array_equal(sim.u0, starts)
    np.testing.assert_array_equal(sim.p, [-1.0, -1.0])


def test_arrays_that_are_written_into_afterwards():
    starts = np.ones((2, 1))
    prob = eo.ODEProblem(linear, starts[0], (0.0, 1.0), -1.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index]))
    for i in range(2):
        sim = eo.solve(ens, trajectories=2)
        starts += 1
        np.testing.assert_array_equal(sim.u0, np.full((2, 1), 1.0 + i))


def test_inside_jit_and_on_the_way_out():
    @jax.jit
    def run(scale):
        ens = oscillators()
        ens = eo.EnsembleProblem(
            ens.prob, lambda prob, ctx: eo.remake(prob, p=prob.p | {"k": scale * ctx.sim_id})
        )
        sim = eo.solve(ens, trajectories=3)
        return sim, jnp.sum(sim.p["k"]), sim[1].p["k"]

    sim, total, second = run(0.5)
    np.testing.assert_allclose((total, second), (3.0, 1.0))
    with pytest.raises(ValueError, match="no u0 and p with it"):
        _ = sim.p
    np.testing.assert_allclose(jax.jacfwd(lambda x: run(x)[1])(0.5), 6.0)


def test_with_outputs_but_not_after_reruns():
    def output_func(sol, ctx):
        return sol.u["x"][-1, 0], False

    sim = eo.solve(oscillators(output_func=output_func), trajectories=3)
    np.testing.assert_allclose(sim.p["k"], [1.0, 1.1, 1.2])
    again = oscillators(output_func=lambda sol, ctx: (sol.u["x"][-1, 0], ctx.repeat < 2))
    with pytest.raises(ValueError, match="reruns"):
        _ = eo.solve(again, trajectories=3).p


def test_an_outcome_beside_a_parameter():
    sim = eo.solve(oscillators(), trajectories=4)
    data = sim.to_xarray()
    np.testing.assert_array_equal(data["p.k"], sim.p["k"])
    assert data["p.k"].dims == ("trajectory",)
    assert "p.weights" not in data.variables
    np.testing.assert_array_equal(data["u0.x"], sim.u0["x"])
    assert list(sim.to_pandas().columns) == ["x[0]", "x[1]", "v[0]", "v[1]"]

    def output_func(sol, ctx):
        return {"end": sol.u["x"][-1, 0]}, False

    data = eo.solve(oscillators(output_func=output_func), trajectories=4).to_xarray()
    assert data["end"].coords["p.k"].dims == ("trajectory",)


def test_pickled():
    sim = eo.solve(oscillators(), trajectories=4)
    back = pickle.loads(pickle.dumps(sim))
    np.testing.assert_array_equal(back.p["k"], sim.p["k"])
    np.testing.assert_array_equal(back[2].u0["x"], sim[2].u0["x"])
    assert back.p["label"] == "spring"
    # What can't be pickled keeps nobody from the rest.
    ens = oscillators()
    prob = eo.remake(ens.prob, p=ens.prob.p | {"label": lambda x: x})
    sim = eo.solve(eo.EnsembleProblem(prob, ens.prob_func), trajectories=2)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(sim)).u["x"], sim.u["x"])
