"""PRNG keys among the parameters: they go with the trajectories, whatever `f` makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.julia.fields import translate
from ensembleode.engines.julia.numbers import _parameters
from ensembleode.tracing.program import trace


N = 3
KEYS = jax.random.split(jax.random.key(0), N)
ENGINES = ("compiled", "diffrax")


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


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
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


def exact(k, noise):
    ks = k + jnp.arange(float(N))[:, None]
    return noise / ks + (jnp.array([[1.0, 2.0]]) - noise / ks) * jnp.exp(-ks)


TIGHT = {"reltol": 1e-8, "abstol": 1e-10}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "alg"),
    [
        ("compiled", eo.Tsit5()),
        ("compiled", eo.Rodas5P()),
        *((x, eo.Tsit5()) for x in ENGINES[1:]),
    ],
    ids=str,
)
def test_keys_that_f_uses(engine, alg):
    """Each trajectory has its own random numbers, those of JAX; so have derivatives."""

    def total(k, solve):
        return jnp.sum(jnp.sin(solve(k)))

    noise = jnp.stack([jax.random.normal(key, (2,)) for key in KEYS])
    by_engine = lambda k: solved(shaken, k, engine=engine, alg=alg, **TIGHT).u[:, -1]  # noqa: E731
    np.testing.assert_allclose(by_engine(1.0), exact(1.0, noise), rtol=1e-6)
    slopes = [
        jax.grad(functools.partial(total, solve=x))(1.0)
        for x in (by_engine, lambda k: exact(k, noise))
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-5)


def test_keys_that_f_uses_are_compiled_by_default():
    assert solved(shaken).engine.name == "compiled"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dropout(dtype):
    """Of a network, with a key that is closed over and folded with the number of the step."""
    weights = jax.random.normal(jax.random.key(1), (8, 2), dtype) / 3

    def field(u, p, t):
        key = jax.random.fold_in(KEYS[1], jnp.int32(4 * t))
        hidden = jnp.tanh(p @ u)
        kept = jax.random.bernoulli(key, 0.5, hidden.shape)
        return -p.T @ jnp.where(kept, 2 * hidden, 0)

    def loss(weights, engine):
        prob = eo.ODEProblem(field, jnp.ones(2, dtype), (0.0, 1.0), weights)
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index))
        )
        sim = eo.solve(ens, eo.Euler(), trajectories=N, dt=0.25, engine=engine)
        return jnp.sum(sim.u[:, -1] ** 2)

    both = [jax.value_and_grad(loss)(weights, engine) for engine in ("compiled", "diffrax")]
    for got, expected in zip(*both, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.slow
def test_an_affect_that_draws():
    """At each event, from a key of its own."""

    def affect(i):
        key = jax.random.fold_in(i.p["key"], jnp.int32(10 * i.t))
        return eo.remake(i, u=i.u + jax.random.uniform(key, i.u.shape))

    doses = eo.PresetTimeCallback([0.25, 0.5], affect)
    sim = solved(decay, callback=doses, engine="compiled", **TIGHT)
    for i, key in enumerate(KEYS):
        u, before = jnp.array([1.0, 2.0]), 0.0
        for t in (0.25, 0.5):
            drawn = jax.random.uniform(jax.random.fold_in(key, int(10 * t)), (2,))
            u, before = u * jnp.exp(-(1.0 + i) * (t - before)) + drawn, t
        np.testing.assert_allclose(sim.u[i, -1], u * jnp.exp(-(1.0 + i) * 0.5), rtol=1e-6)


def test_jit_traces_prob_func_that_indexes_keys(caplog):
    jax.jit(total).lower(1.0)
    assert "can't be traced" not in caplog.text


def test_julia_is_given_their_integers():
    u, k = jnp.ones(2), jnp.ones(())

    def flat(u, numbers, t):
        return -numbers[0] * u

    program, _ = trace(flat, u, (k, KEYS[0]), k)
    field = translate(program, (True, True))
    own, shared = _parameters(field, [np.arange(3.0), KEYS], (True, True), N)
    np.testing.assert_array_equal(own[:, 0], np.arange(3.0))
    np.testing.assert_array_equal(own[:, 1:], jax.random.key_data(KEYS))
    assert not shared.size


def test_a_state_is_no_key():
    with pytest.raises(TypeError, match="u0 is a PRNG key"):
        eo.ODEProblem(decay, KEYS[0], (0.0, 1.0))
