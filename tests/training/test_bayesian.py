"""Samplers of NumPyro and BlackJAX on solves, as they are."""

import functools

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.stats import norm
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import init_to_median, MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import potential_energy

import ensembleode as eo


@pytest.fixture(autouse=True)
def _as_users_have_it():
    """Both libraries mix dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


#
# A posterior that is known: the solution is linear in the unknowns, and all else is Gaussian
#

TIMES = np.linspace(0.5, 4.0, 8)
ERROR, SPREAD = 0.3, 2.0
# By the unknowns: a start of which e^-t is left, and an inflow.
DESIGN = np.stack([np.exp(-TIMES), 1 - np.exp(-TIMES)], axis=1)
SEEN = DESIGN @ [2.0, 0.5] + np.random.default_rng(0).normal(0.0, ERROR, TIMES.size)
PRECISION = DESIGN.T @ DESIGN / ERROR**2 + np.eye(2) / SPREAD**2
MEAN = np.linalg.solve(PRECISION, DESIGN.T @ SEEN / ERROR**2)
SD = np.sqrt(np.diag(np.linalg.inv(PRECISION)))
TIGHT = {"abstol": 1e-10, "reltol": 1e-10}


def inflow(u, p, t):
    return p - u


def linear():
    x = numpyro.sample("x", dist.Normal(0.0, SPREAD).expand([2]).to_event(1))
    sol = eo.solve(eo.ODEProblem(inflow, x[0], (0.0, 4.0), x[1], **TIGHT), saveat=TIMES)
    numpyro.factor("solved", jnp.where(sol.successful, 0.0, -jnp.inf))
    u = jnp.where(sol.successful, sol.u, 0.0)
    numpyro.sample("seen", dist.Normal(u, ERROR).to_event(1), obs=SEEN)


def in_ensemble():
    """The same, where three subjects have a factor of their own."""
    x = numpyro.sample("x", dist.Normal(0.0, SPREAD).expand([2]).to_event(1))
    with numpyro.plate("subjects", 3):
        own = numpyro.sample("own", dist.Normal(1.0, 0.5))
        prob = eo.ODEProblem(inflow, x[0], (0.0, 4.0), x[1], **TIGHT)
        sim = eo.solve(eo.EnsembleProblem(prob, u0=own * x[0], p=own * x[1]), saveat=TIMES)
        numpyro.factor("solved", jnp.where(sim.successful, 0.0, -jnp.inf))
        u = jnp.where(sim.successful[:, None], sim.u, 0.0)
        numpyro.sample("seen", dist.Normal(u, ERROR).to_event(1), obs=np.stack([SEEN] * 3))


def energy(x):
    """The closed form."""
    total, u = norm.logpdf(x["x"], 0.0, SPREAD).sum(), DESIGN @ x["x"]
    if "own" in x:
        total, u = total + norm.logpdf(x["own"], 1.0, 0.5).sum(), x["own"][:, None] * u
    return -total - norm.logpdf(SEEN, u, ERROR).sum()


CHAINS = {
    linear: {"x": np.random.default_rng(1).normal(size=(4, 2))},
    in_ensemble: {
        "x": np.random.default_rng(1).normal(size=(4, 2)),
        "own": np.random.default_rng(2).normal(1.0, 0.5, (4, 3)),
    },
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", [linear, in_ensemble])
def test_energy_and_its_gradient(model):
    """Those of the closed form; of several chains at once those of each."""
    found = jax.value_and_grad(functools.partial(potential_energy, model, (), {}))
    at_once = jax.jit(jax.vmap(found))(CHAINS[model])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8),
        at_once,
        jax.vmap(jax.value_and_grad(energy))(CHAINS[model]),
    )
    found = jax.jit(found)
    each = [found(jax.tree.map(lambda x, i=i: x[i], CHAINS[model])) for i in range(4)]
    each = jax.tree.map(lambda *x: jnp.stack(x), *each)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-13), at_once, each)


def sampled(model, extra=(), chains=4, warmup=200, samples=400, method="vectorized", **how):
    """The samples `[chain, sample, ...]`, and what was asked for besides."""
    mcmc = MCMC(
        NUTS(model, **how),
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), extra_fields=extra)
    found = jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True))
    return found, mcmc.get_extra_fields()


def assert_posterior(x, mean=MEAN, sd=SD):
    """Samples `[chain, sample, ...]` have this mean and this standard deviation, within five of the
    Monte Carlo errors."""
    n = effective_sample_size(x)
    assert np.min(n) > 200
    assert np.all(abs(x.mean((0, 1)) - mean) < 5 * sd / np.sqrt(n))
    assert np.all(abs(x.std((0, 1)) / sd - 1) < 5 / np.sqrt(2 * n))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [False, True])
def test_nuts_finds_the_posterior(forward):
    found, _ = sampled(linear, dense_mass=True, forward_mode_differentiation=forward)
    assert_posterior(found["x"])


@pytest.mark.slow
def test_chains_at_once_are_those_one_by_one():
    """With the same seeds, up to roundings, which grow."""
    found = [
        sampled(linear, chains=2, warmup=30, samples=10, method=method)[0]["x"]
        for method in ("vectorized", "sequential")
    ]
    np.testing.assert_allclose(*found, rtol=1e-4)


#
# Where solves fail
#

HALF = 0.5  # what is measured: the state at this time
BOUND = 1.0  # from which on the state blows up before the end


def exploding(u0, **options):
    """u0 / (1 - u0 t)."""
    prob = eo.ODEProblem(lambda u, p, t: u**2, u0, (0.0, 1 / BOUND))
    sol = eo.solve(prob, eo.Tsit5(), saveat=[HALF], **TIGHT, **options)
    return jnp.where(sol.successful, sol.u[0], 0.0), sol.successful


def explosive(**options):
    x = numpyro.sample("x", dist.Normal(0.8, 0.3))
    u, ok = exploding(x, **options)
    numpyro.factor("solved", jnp.where(ok, 0.0, -jnp.inf))
    numpyro.sample("seen", dist.Normal(u, 0.5), obs=1.5)


def explosive_density(x):
    u, ok = exploding(x)
    return jnp.where(ok, norm.logpdf(x, 0.8, 0.3) + norm.logpdf(1.5, u, 0.5), -jnp.inf)


def by_quadrature():
    """The mean and the standard deviation of the posterior, none of which is beyond the bound."""
    x = np.linspace(-2.0, BOUND, 100_001)[:-1]
    weight = np.exp(norm.logpdf(x, 0.8, 0.3) + norm.logpdf(1.5, x / (1 - HALF * x), 0.5))
    mean = np.average(x, weights=weight)
    return mean, np.sqrt(np.average((x - mean) ** 2, weights=weight))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"maxiters": 5}, {"max_norm": 2.0}])
def test_a_failure_has_no_probability_and_a_finite_gradient(options):
    found = jax.value_and_grad(functools.partial(potential_energy, explosive, (), options))
    energy, gradient = jax.vmap(found)({"x": jnp.array([0.7, 1.5])})
    assert np.isinf(energy[1])
    assert np.isfinite(gradient["x"]).all()
    assert np.isfinite(energy[0]) == (not options)


@pytest.mark.slow
def test_nuts_goes_on_where_solves_fail():
    found, extra = sampled(explosive, extra=("diverging",), samples=1000)
    assert extra["diverging"].sum() > 20
    assert found["x"].max() < BOUND
    assert_posterior(found["x"], *by_quadrature())


#
# BlackJAX, and other ways to a posterior
#


def log_density(x):
    sol = eo.solve(eo.ODEProblem(inflow, x[0], (0.0, 4.0), x[1], **TIGHT), saveat=TIMES)
    u = jnp.where(sol.successful, sol.u, 0.0)
    total = norm.logpdf(x, 0.0, SPREAD).sum() + norm.logpdf(SEEN, u, ERROR).sum()
    return jnp.where(sol.successful, total, -jnp.inf)


def by_blackjax(density, starts, samples):
    """Those of BlackJAX's NUTS: positions and which of them diverge, `[chain, sample, ...]`."""

    @jax.jit
    @jax.vmap
    def run(key, start):
        for_warmup, for_samples = jax.random.split(key)
        warmup = blackjax.window_adaptation(blackjax.nuts, density)
        (state, parameters), _ = warmup.run(for_warmup, start, num_steps=200)
        step = blackjax.nuts(density, **parameters).step

        def following(state, key):
            state, info = step(key, state)
            return state, (state.position, info.is_divergent)

        return jax.lax.scan(following, state, jax.random.split(for_samples, samples))[1]

    return jax.tree.map(np.asarray, run(jax.random.split(jax.random.key(0), len(starts)), starts))


@pytest.mark.slow
def test_nuts_of_blackjax():
    x, diverging = by_blackjax(log_density, CHAINS[linear]["x"], 400)
    assert_posterior(x)
    assert not diverging.any()


@pytest.mark.slow
def test_nuts_of_blackjax_goes_on_where_solves_fail():
    x, diverging = by_blackjax(explosive_density, np.array([0.5, 0.6, 0.7, 0.8]), 1000)
    assert diverging.sum() > 20
    assert x.max() < BOUND
    assert_posterior(x, *by_quadrature())


@pytest.mark.slow
def test_pathfinder():
    """The normal distribution that is nearest, which is the posterior."""
    key = jax.random.key(0)
    state, _ = blackjax.vi.pathfinder.approximate(key, log_density, jnp.zeros(2))
    x, _ = blackjax.vi.pathfinder.sample(jax.random.key(1), state, 20_000)
    assert np.all(abs(x.mean(0) - MEAN) < 0.1 * SD)
    assert np.all(abs(x.std(0) / SD - 1) < 0.1)


@pytest.mark.slow
def test_variational_inference_with_an_ensemble():
    """The mean of a normal posterior, and the standard deviations given the others."""

    def fitted(model, steps, **how):
        rate = optax.exponential_decay(0.05, steps, 0.01)
        guide = AutoNormal(model, **how)
        svi = SVI(model, guide, optax.adam(rate), Trace_ELBO(num_particles=8))
        return svi.run(jax.random.key(0), steps, progress_bar=False).params

    found = fitted(linear, 1000)
    assert np.all(abs(found["x_auto_loc"] - MEAN) < 0.1 * SD)
    assert np.allclose(found["x_auto_scale"], 1 / np.sqrt(np.diag(PRECISION)), rtol=0.1)
    # (All subjects have the same data, and the prior of their factors is about 1.)
    found = fitted(in_ensemble, 500, init_loc_fn=init_to_median)
    own, x = found["own_auto_loc"], found["x_auto_loc"]
    assert np.allclose(own, own.mean(), atol=0.1)
    assert np.allclose(own[:, None] * x, MEAN, atol=0.3)
