"""The adjoint ODE of explicit methods: gradients of the solution up to the tolerances."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ...marks import slow_unless
from ...problems import lotka_volterra, mlp, network
from .test_convergence import METHODS
from .test_replay_adjoint import assert_close, GOOD, SAVING, solve, weighed, X


GAUSS = eo.GaussAdjoint()
TOL = {"abstol": 1e-10, "reltol": 1e-10}
ADAPTIVE = [x for x in METHODS if x.adaptive]
SPANS = (np.array([0.0, 1.0]), np.array([1.0, 0.0]))


@functools.cache
def compiled(sensealg, saving, alg=None, **options):
    """Value and gradient of a loss of all there is to vary: of x and the span."""

    def loss(x, span):
        how = {"sensealg": sensealg, "engine": "compiled", **options}
        return weighed(solve(x, SAVING[saving], alg and alg(), span=span, **how).u)

    return jax.jit(jax.value_and_grad(loss))


def replayed(saving, alg=None, **options):
    return compiled(eo.ReplayAdjoint(), saving, alg, **options)


def assert_as_replayed(loss, x, rtol):
    """The gradient of `loss(x, sensealg)` at `x` is that of the steps."""
    got, expected = (
        jax.jit(jax.grad(functools.partial(loss, sensealg=s)))(x)
        for s in (GAUSS, eo.ReplayAdjoint())
    )
    assert_close(got, expected, rtol)


def distance(tree, other):
    """The largest difference, relative to the largest number of each leaf."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("saving", ["ends", "end", "times", "own times"])
def test_the_gradient_is_that_of_the_steps(saving):
    """With rows within steps, at both ends and none; forwards and backwards in time."""
    for span in SPANS:
        expected = replayed(saving, **TOL)(X, span)[1]
        got = compiled(GAUSS, saving, **TOL)(X, span)[1]
        assert_close(got, expected, 1e-8)
        assert distance(got, expected) > 1e-14


@pytest.mark.slow
def test_the_gradient_through_every_step():
    for tol in (1e-6, 1e-9):
        options = {"abstol": tol, "reltol": tol}
        expected = replayed("steps", **options)(X, SPANS[0])[1]
        got = compiled(GAUSS, "steps", **options)(X, SPANS[0])[1]
        assert distance(got, expected) < 10 * tol


@pytest.mark.slow
@pytest.mark.parametrize("alg", ADAPTIVE, ids=lambda cls: cls.__name__)
def test_every_adaptive_method(alg):
    """To the tolerances, which those of low order meet in many steps."""
    tol = {1: 1e-4, 2: 1e-5, 3: 1e-8}.get(alg.order, 1e-10)
    options = {"abstol": tol, "reltol": tol}
    expected = replayed("times", alg, **options)(X, SPANS[0])[1]
    got = compiled(GAUSS, "times", alg, **options)(X, SPANS[0])[1]
    assert_close(got, expected, 1e3 * tol)


@pytest.mark.slow
def test_the_weights_of_a_network():
    params, static = eqx.partition(network(), eqx.is_array)

    def loss(params, sensealg):
        net = eqx.combine(params, static)
        prob = eo.ODEProblem(mlp, GOOD[0], (0.0, 1.0), net)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=GOOD[ctx.index]))
        how = {"saveat": 0.3, "engine": "compiled", "sensealg": sensealg, **TOL}
        return weighed(eo.solve(ens, trajectories=4, **how).u)

    assert_as_replayed(loss, params, 1e-8)


@pytest.mark.slow
def test_an_array_state():
    """With weights that are shared and a bias that is not."""
    size, n = 30, 140
    rng = np.random.default_rng(1)
    x = {
        "w": jnp.asarray(rng.normal(size=(size, size)) / np.sqrt(size)),
        "b": jnp.asarray(rng.normal(size=(n, size))),
        "u0": jnp.asarray(rng.normal(size=size)),
        "rate": jnp.asarray(0.7),
    }

    def f(u, p, t):
        w, b, rate = p
        return jnp.tanh(w @ u + b * jnp.cos(rate * t)) - rate * u

    def loss(x, sensealg):
        prob = eo.ODEProblem(f, x["u0"], (0.0, 1.0), (x["w"], x["b"][0], x["rate"]))

        def prob_func(prob, ctx):
            return eo.remake(prob, p=(x["w"], x["b"][ctx.index], x["rate"]))

        how = {"saveat": np.array([0.3, 0.9]), "engine": "compiled", "sensealg": sensealg, **TOL}
        return weighed(eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=n, **how).u)

    assert_as_replayed(loss, x, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saveat",
    [
        0.1,
        [0.5, 0.5, 1.0, 1.0],
        [0.0, 0.0, 1e-17, 0.3],
    ],
)
def test_rows_alike(saveat):
    """Those that are there twice, or differ from the start by rounding."""
    saveat = saveat if isinstance(saveat, float) else np.array(saveat)

    def loss(x, sensealg):
        how = {"engine": "compiled", "sensealg": sensealg, **TOL}
        prob = eo.ODEProblem(lotka_volterra, x["u0"], (0.0, 1.0), x["p"], saveat=saveat)
        return weighed(eo.solve(prob, eo.Dopri5(), **how).u)

    x = {"u0": X["u0"], "p": X["p"]}
    assert_as_replayed(loss, x, 1e-8)


@pytest.mark.slow
def test_spans_and_counts_of_rows_that_differ():
    def loss(x, sensealg):
        prob = eo.ODEProblem(lotka_volterra, x["u0"], (0.0, 1.0), x["p"])
        t1 = jnp.array([0.35, 1.0, 0.9])

        def prob_func(prob, ctx):
            return eo.remake(prob, tspan=(0.0, t1[ctx.index]))

        how = {"saveat": 0.3, "engine": "compiled", "sensealg": sensealg, **TOL}
        sim = eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=3, **how)
        return weighed(sim.u), sim.lengths

    x = {"u0": X["u0"], "p": X["p"]}
    (got, lengths), (expected, _) = (
        jax.grad(functools.partial(loss, sensealg=s), has_aux=True)(x)
        for s in (GAUSS, eo.ReplayAdjoint())
    )
    assert len(set(np.asarray(lengths))) > 1
    assert_close(got, expected, 1e-8)


@pytest.mark.slow
def test_times_have_gradients():
    def loss(x, sensealg):
        prob = eo.ODEProblem(lotka_volterra, X["u0"], (x["t0"], x["t1"]), X["p"])
        how = {"engine": "compiled", "sensealg": sensealg, **TOL}
        ends = eo.solve(prob, **how).u
        return weighed(ends) + weighed(eo.solve(prob, saveat=x["times"], **how).u)

    x = {"t0": jnp.array(0.1), "t1": jnp.array(1.2), "times": jnp.array([0.3, 0.5, 0.55])}
    assert_as_replayed(loss, x, 1e-8)


@pytest.mark.parametrize("saving", [slow_unless(False, {}), {"saveat": np.array([0.4, 1.0])}])
def test_a_failed_trajectory_pulls_back_nothing(saving):
    """Though its cotangent is NaN; what others have, their own and shared, is as without it."""
    u0s = jnp.array([0.5, 3.0, 0.7, jnp.nan, 2.0])
    good = np.array([0.5, 0.7])

    def loss(u0s, p):
        prob = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.zeros(1), (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0s[ctx.index][None]))
        how = {"engine": "compiled", "sensealg": GAUSS, **TOL, **saving}
        sim = eo.solve(ens, eo.Vern7(), trajectories=5, **how)
        return jnp.sum(sim.u[:, -1, 0]), sim.retcode

    (by_u0, by_p), codes = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(u0s, jnp.array(1.0))
    np.testing.assert_array_equal(codes == eo.ReturnCode.Success, [1, 0, 1, 0, 0])
    np.testing.assert_allclose(by_u0, [1 / 0.5**2, 0, 1 / 0.3**2, 0, 0], rtol=1e-8)
    np.testing.assert_allclose(by_p, np.sum(good**2 / (1 - good) ** 2), rtol=1e-8)


@pytest.mark.slow
def test_single_precision():
    def loss(x):
        prob = eo.ODEProblem(lotka_volterra, x["u0"], (0.0, 1.0), x["p"])
        how = {"saveat": 0.2, "engine": "compiled", "sensealg": GAUSS, "reltol": 1e-5}
        return weighed(eo.solve(prob, **how).u)

    x = {"u0": X["u0"], "p": X["p"]}
    single = jax.jit(jax.grad(loss))(jax.tree.map(jnp.float32, x))
    assert all(a.dtype == np.float32 for a in jax.tree.leaves(single))
    assert_close(single, jax.jit(jax.grad(loss))(x), 1e-3)


def test_which_engine_runs_it():
    prob = eo.ODEProblem(lotka_volterra, X["u0"], (0.0, 1.0), X["p"])
    found = eo.solve(eo.EnsembleProblem(prob), trajectories=2, sensealg=GAUSS)
    assert found.engine.name == "compiled"
    with pytest.raises(ValueError, match=r"no engine can run Kvaerno5.*GaussAdjoint\(\)"):
        eo.solve(prob, eo.Kvaerno5(), sensealg=GAUSS)
    with pytest.raises(ValueError, match=r"can't run Tsit5: sensealg=GaussAdjoint\(\)"):
        eo.solve(prob, engine="diffrax", sensealg=GAUSS)
