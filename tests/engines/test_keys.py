"""PRNG keys among the parameters: they go with the trajectories, whatever `f` makes of them."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.julia.fields import translate
from ensembleode.engines.julia.numbers import _parameters
from ensembleode.tracing.program import trace

from ..marks import slow_unless


N = 3
KEYS = jax.random.split(jax.random.key(0), N)
ENGINES = ("compiled", "lanes", "diffrax")


def decay(u, p, t):
    return -p["k"] * u


def shaken(u, p, t):
    return decay(u, p, t) + jax.random.normal(p["key"], u.shape, u.dtype)


def solved(f, k=1.0, **options):
    prob = eo.ODEProblem(f, [1.0, 2.0], (0.0, 1.0), {"k": 1.0, "key": KEYS[0]})

    def prob_func(prob, ctx):
        return eo.remake(prob, p={"k": k + ctx.index, "key": KEYS[ctx.index]})

    return eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=N, saveat=[1.0], **options)


def total(k, engine="compiled"):
    return jnp.sum(solved(decay, k, engine=engine, reltol=1e-6, abstol=1e-8).u[:, -1, 0])


@pytest.mark.parametrize("engine", [slow_unless(x == "compiled", x) for x in ENGINES])
def test_keys_that_f_does_not_use(engine):
    sim = solved(decay, engine=engine, reltol=1e-6, abstol=1e-8)
    np.testing.assert_allclose(sim.u[:, -1, 0], np.exp(-1.0 - np.arange(N)), rtol=1e-5)
    np.testing.assert_array_equal(jax.random.key_data(sim.p["key"]), jax.random.key_data(KEYS))
    slope = -np.sum(np.exp(-1.0 - np.arange(N)))
    np.testing.assert_allclose(jax.jit(jax.grad(total), static_argnums=1)(1.0, engine), slope, 1e-5)


@pytest.mark.slow
def test_stiff_methods_and_callbacks():
    options = {"engine": "compiled", "reltol": 1e-8, "abstol": 1e-10}
    sim = solved(decay, alg=eo.Rodas5P(), **options)
    np.testing.assert_allclose(sim.u[:, -1, 0], np.exp(-1.0 - np.arange(N)), 1e-6)
    stops = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, eo.terminate)
    sim = solved(decay, callback=stops, **options)
    assert sim.events is not None
    np.testing.assert_allclose(sim.events.t[:, 0], np.log(2) / (1.0 + np.arange(N)), 1e-6)


def test_keys_that_f_uses_are_refused():
    with pytest.raises(ValueError, match="random_bits"):
        solved(shaken, engine="compiled")


@pytest.mark.slow
def test_keys_that_f_uses_go_where_random_numbers_are():
    sim = solved(shaken)
    noise = np.stack([jax.random.normal(key, (2,)) for key in KEYS])
    ks = 1.0 + np.arange(N)[:, None]
    exact = noise / ks + (np.array([1.0, 2.0]) - noise / ks) * np.exp(-ks)
    np.testing.assert_allclose(sim.u[:, -1], exact, rtol=0.02, atol=0.02)


def test_jit_traces_prob_func_that_indexes_keys(caplog):
    jax.jit(total).lower(1.0)
    assert "can't be traced" not in caplog.text


def test_julia_is_given_their_integers():
    u, k = jnp.ones(2), jnp.ones(())

    def flat(u, numbers, t):
        return -numbers[0] * u

    program, _ = trace(flat, u, (k, KEYS[0]), k)
    field = translate(program, (True, True))
    lanes: Any = SimpleNamespace(parameters=[np.arange(3.0), KEYS])
    own, shared = _parameters(field, lanes, (True, True), N)
    np.testing.assert_array_equal(own[:, 0], np.arange(3.0))
    np.testing.assert_array_equal(own[:, 1:], jax.random.key_data(KEYS))
    assert not shared.size


def test_a_state_is_no_key():
    with pytest.raises(TypeError, match="u0 is a PRNG key"):
        eo.ODEProblem(decay, KEYS[0], (0.0, 1.0))
