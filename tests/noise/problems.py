"""Stochastic problems whose solutions are known, and what several of these tests do."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo


METHODS = {
    "EM": eo.EM(),
    "EM, not split": eo.EM(split=False),
    "EulerHeun": eo.EulerHeun(),
    "RKMil": eo.RKMil(),
    "RKMil, Stratonovich": eo.RKMil("Stratonovich"),
    "SRIW1": eo.SRIW1(),
    "SOSRI": eo.SOSRI(),
    "SRA1": eo.SRA1(),
    "SOSRA": eo.SOSRA(),
}
A, B = 1.01, 0.87


def growing(u, p, t):
    return p["a"] * u


def proportional(u, p, t):
    return p["b"] * u


def constant(u, p, t):
    return p["b"] * jnp.ones_like(u)


def decay(u, p, t):
    return -p["a"] * u


def brownian(g=proportional, f=growing, u0=(0.5, 0.2), **options):
    p = {"a": jnp.array(A), "b": jnp.array(B)}
    return eo.SDEProblem(f, g, jnp.array(u0), (0.0, 1.0), p, **options)


def for_method(alg, **options):
    """A problem that the method can solve."""
    return brownian(constant, decay, **options) if alg.additive else brownian(**options)


def moments(x):
    """The mean and the variance, each with its standard error."""
    x = np.asarray(x, float).ravel()
    mean, spread = x.mean(), (x - x.mean()) ** 2
    root = math.sqrt(len(x))
    return (mean, x.std() / root), (spread.mean(), spread.std() / root)


def rising(prob, ctx):
    return eo.remake(prob, u0=prob.u0 * (1 + 0.01 * ctx.index))


ALGORITHMS = {
    "threads": {"ensemblealg": eo.EnsembleThreads(2)},
    "one thread": {"ensemblealg": eo.EnsembleThreads(1)},
    "arrays": {"ensemblealg": eo.EnsembleGPUArray()},
    "batches of 1": {"batch_size": 1},
    "batches of 10": {"batch_size": 10},
}
ADAPTIVE = [name for name, alg in METHODS.items() if alg.adaptive]


def matrix(u, p, t):
    return jnp.stack([jnp.stack([0.1 * u[0], 0.2, 0 * t]), jnp.stack([0 * t, 0.3 * u[1], 0.1])])


def check_derivatives(loss, prob, size, rtol):
    """In reverse mode, in forward mode and by differences of this size, of `loss(p, u0)`."""
    at, along = (prob.p, prob.u0), ({"a": 0.3, "b": -0.7}, np.linspace(0.5, 1.0, prob.u0.size))
    along = jax.tree.map(lambda x, v: jnp.reshape(v, x.shape), at, along)
    by, tangent = jax.grad(loss, argnums=(0, 1))(*at), jax.jvp(loss, at, along)[1]
    pairs = zip(jax.tree.leaves(by), jax.tree.leaves(along), strict=True)
    np.testing.assert_allclose(sum((a * b).sum() for a, b in pairs), tangent, 1e-9, 1e-14)

    def moved(e):
        return loss(*jax.tree.map(lambda x, v: x + e * v, at, along))

    np.testing.assert_allclose(tangent, (moved(size) - moved(-size)) / (2 * size), rtol, 1e-9)
