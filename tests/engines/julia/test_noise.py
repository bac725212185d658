"""Stochastic problems in the Julia engine: fixed steps have the paths of the compiled engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ...marks import julia_marks
from ...noise.problems import brownian, constant, decay, for_method, matrix, METHODS, rising


pytestmark = julia_marks()

PLACES = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "distributed": eo.EnsembleDistributed(workers=2),
}


def of_time(u, p, t):
    return p["b"] * jnp.stack([jnp.stack([0.1, 0.2, 0 * t]), jnp.stack([0 * t, 0.3 + t, 0.1])])


SCALAR = eo.WienerProcess(scalar=True)
CORRELATED = eo.WienerProcess(factor=jnp.array([[1.0, 0.0], [0.6, 0.8]]))
MATRIX = {"noise_rate_prototype": jnp.zeros((2, 3))}
# A problem, and a method for it.
KINDS = {
    "scalar": (brownian(noise=SCALAR), eo.SOSRI()),
    "matrix": (brownian(matrix, decay, **MATRIX), eo.EM()),
    "matrix, Stratonovich": (brownian(matrix, decay, **MATRIX), eo.EulerHeun()),
    "matrix, additive": (brownian(of_time, decay, **MATRIX), eo.SOSRA()),
    "correlated": (brownian(noise=CORRELATED), eo.EM()),
    "correlated, additive": (brownian(constant, decay, noise=CORRELATED), eo.SRA1()),
    "many components": (brownian(u0=np.linspace(0.2, 0.9, 40)), eo.SRIW1()),
    "many components, scalar": (brownian(u0=np.linspace(0.2, 0.9, 40), noise=SCALAR), eo.EM()),
}


OPTIONS = {"trajectories": 5, "dt": 0.03, "saveat": 0.25, "seed": 3}


def both(prob, alg, *place, prob_func=rising, **options):
    """The solutions by Julia and by the compiled engine."""
    ens = eo.EnsembleProblem(prob, prob_func)
    options = OPTIONS | options
    return [eo.solve(ens, alg, *place, engine=x, **options) for x in ("julia", "compiled")]


def check_same(julia, compiled, rtol=1e-11):
    np.testing.assert_array_equal(julia.retcode, compiled.retcode)
    np.testing.assert_allclose(julia.u, compiled.u, rtol=rtol, atol=1e-13)
    assert np.ptp(np.asarray(julia.u)[:, -1]) > 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", METHODS)
def test_paths_of_the_compiled_engine(name):
    """Also where the last step is shorter than the others."""
    check_same(*both(for_method(METHODS[name]), METHODS[name]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_noise(kind):
    check_same(*both(*KINDS[kind]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", PLACES)
def test_places(place):
    check_same(*both(brownian(), eo.SOSRI(), PLACES[place]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_batches_and_times_of_each_trajectory(batch_size):
    def prob_func(prob, ctx):
        return eo.remake(prob, tspan=(0.0, 1.0 + 0.1 * ctx.index))

    check_same(*both(brownian(), eo.EM(), prob_func=prob_func, batch_size=batch_size, saveat=None))


def test_single_precision():
    prob = brownian()
    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (prob.u0, prob.p))
    prob = eo.SDEProblem(prob.f, prob.g, single[0], (0.0, 1.0), single[1])
    check_same(*both(prob, eo.SRIW1()), rtol=1e-5)


def test_paths_that_are_given():
    t = jnp.linspace(0.0, 1.0, 41)
    paths = jnp.cumsum(jax.random.normal(jax.random.key(0), (5, 2, 41, 2)) * 0.1, axis=2)

    def prob_func(prob, ctx):
        return eo.remake(prob, noise=eo.NoiseGrid(t, *paths[ctx.index]))

    start = brownian(noise=eo.NoiseGrid(t, *paths[0]))
    check_same(*both(start, eo.SOSRI(), prob_func=prob_func))


def test_adaptive_steps_have_the_distribution():
    """Their paths are Julia's own, another one for each trajectory and seed."""
    ens = eo.EnsembleProblem(brownian())
    options = {"trajectories": 4000, "engine": "julia", "abstol": 1e-4, "reltol": 1e-4}
    sim = eo.solve(ens, eo.SOSRI(), **options)
    ends = np.asarray(sim.u[:, -1] / sim.u[:, 0])
    assert np.all(np.abs(ends.mean(0) - np.exp(1.01)) < 4 * ends.std(0) / 4000**0.5)
    assert len(np.unique(ends)) == ends.size
    np.testing.assert_array_equal(eo.solve(ens, eo.SOSRI(), **options).u, sim.u)
    other = eo.solve(ens, eo.SOSRI(), seed=1, **options)
    assert not np.any(np.asarray(other.u[:, -1]) == np.asarray(sim.u[:, -1]))


def test_methods_by_their_names():
    ens = eo.EnsembleProblem(brownian(), rising)
    by_name = eo.solve(ens, eo.JuliaAlg("SRIW1()"), **OPTIONS)
    check_same(by_name, eo.solve(ens, eo.SRIW1(), **OPTIONS))
    # One that is only there, with steps that adapt.
    options = {"trajectories": 2000, "abstol": 1e-2, "reltol": 1e-2}
    ends = eo.solve(ens, eo.JuliaAlg("LambaEM()"), **options).u[:, -1, 0]
    starts = 0.5 * (1 + 0.01 * np.arange(2000))
    grown = np.asarray(ends) / starts
    assert abs(grown.mean() - np.exp(1.01)) < 4 * grown.std() / 2000**0.5 + 0.1


def test_what_is_refused():
    ens = eo.EnsembleProblem(brownian())
    options = {"trajectories": 2, "dt": 0.1, "engine": "julia"}
    for more, words in (
        ({"save_noise": True}, "save_noise"),
        ({"save_everystep": True}, "saveat"),
        ({"tstops": [0.05]}, "tstops"),
        ({"sensealg": eo.BacksolveAdjoint()}, "derivatives"),
    ):
        with pytest.raises(ValueError, match=words):
            eo.solve(ens, eo.EM(), **options, **more)
    correlated = eo.EnsembleProblem(brownian(constant, decay, noise=CORRELATED))
    for more in ({}, {"dt": 0.1, "adaptive": True}):
        with pytest.raises(ValueError, match="pass dt"):
            eo.solve(correlated, eo.SOSRA(), trajectories=2, engine="julia", **more)

    def loss(b):
        prob = eo.remake(brownian(), p={"a": 1.0, "b": b})
        return eo.solve(eo.EnsembleProblem(prob), eo.EM(), **options).u.sum()

    with pytest.raises(TypeError, match=r"noise.*engine='compiled'"):
        jax.grad(loss)(0.5)
