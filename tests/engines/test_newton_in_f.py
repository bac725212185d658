"""Fields that solve an equation by Newton's method, written in each of the ways that JAX has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ensembleode as eo

from ..marks import slow_unless


def residual(z, u, p):
    return z + p[0] * z**3 - u[0]


def slope(z, p):
    return 1 + 3 * p[0] * z**2


def iterated(u, p):
    """As many iterations as it takes."""

    def goes_on(now):
        _, change, count = now
        return (jnp.abs(change) > 1e-12) & (count < 50)

    def once(now):
        z, _, count = now
        change = residual(z, u, p) / slope(z, p)
        return z - change, change, count + 1

    return lax.while_loop(goes_on, once, (u[0], jnp.ones_like(u[0]), 0))[0]


@jax.custom_jvp
def with_forward_rule(u, p):
    return iterated(u, p)


@with_forward_rule.defjvp
def _(primals, tangents):
    (u, p), (du, dp) = primals, tangents
    z = with_forward_rule(u, p)
    return z, (du[0] - dp[0] * z**3) / slope(z, p)


@jax.custom_vjp
def with_reverse_rule(u, p):
    return iterated(u, p)


def _forwards(u, p):
    z = iterated(u, p)
    return z, (z, u, p)


def _backwards(kept, cotangent):
    z, u, p = kept
    w = cotangent / slope(z, p)
    return jnp.zeros_like(u).at[0].set(w), jnp.zeros_like(p).at[0].set(-w * z**3)


with_reverse_rule.defvjp(_forwards, _backwards)


def by_custom_root(u, p):
    def solved(f, z):
        return iterated(u, p) + 0 * f(z)

    return lax.custom_root(
        lambda z: residual(z, u, p), u[0], solved, lambda g, y: y / g(jnp.ones_like(y))
    )


def by_optimistix(u, p):
    optimistix = pytest.importorskip("optimistix")
    newton = optimistix.Newton(rtol=1e-10, atol=1e-10)
    found = optimistix.root_find(
        lambda z, given: residual(z, *given), newton, u[0], args=(u, p), throw=False
    )
    return found.value


WAYS = {
    "while_loop": iterated,
    "custom_jvp": with_forward_rule,
    "custom_vjp": with_reverse_rule,
    "custom_root": by_custom_root,
    "optimistix": by_optimistix,
}
FAST = {("while_loop", "Rodas5P"), ("custom_jvp", "Tsit5"), ("custom_root", "Rodas5P")}
CASES = [slow_unless((way, alg) in FAST, way, alg) for way in WAYS for alg in ("Tsit5", "Rodas5P")]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("way", "alg"), CASES)
def test_solutions_and_gradients(way, alg, size):
    """Of a state of one component, too, whose Jacobian is followed component by component."""

    def f(u, p, t):
        z = WAYS[way](u, p)
        return jnp.stack([-p[1] * z, u[0] - u[-1]])[:size]

    def loss(p):
        prob = eo.ODEProblem(f, jnp.array([1.0, 0.3])[:size], (0.0, 1.0), p)
        ens = eo.EnsembleProblem(
            prob, prob_func=lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / 4))
        )
        options = {"save_start": False, "abstol": 1e-9, "reltol": 1e-9}
        sim = eo.solve(ens, getattr(eo, alg)(), trajectories=3, **options)
        return jnp.sum(sim.u**2)

    p = jnp.array([0.5, 1.2])
    gradient = jax.jit(jax.grad(loss))(p)
    e = 1e-4
    for i in range(2):
        by = jnp.zeros(2).at[i].set(e)
        np.testing.assert_allclose(gradient[i], (loss(p + by) - loss(p - by)) / (2 * e), rtol=2e-6)


def nested(u, p):
    """A root whose equation has another one in it."""
    optimistix = pytest.importorskip("optimistix")
    newton = optimistix.Newton(rtol=1e-10, atol=1e-10)

    def outside(z, given):
        u, p = given
        inside = by_optimistix(z[None], p)
        return inside + z - u[0]

    return optimistix.root_find(outside, newton, u[0], args=(u, p), throw=False).value


@pytest.mark.slow
@pytest.mark.parametrize("way", [by_optimistix, nested])
def test_an_eager_repeat_compiles_nothing(way, compiles):
    """Linear solves of Lineax, in the rules of root finders, hold functions of their own in each
    trace."""

    def loss(scale):
        prob = eo.ODEProblem(
            lambda u, p, t: -jnp.atleast_1d(way(u, p)), jnp.ones(1), (0.0, 0.5), scale * P
        )
        return eo.solve(prob, eo.Euler(), dt=0.25, adaptive=False).u[-1].sum()

    losses, gradients = [], []
    for i in range(3):
        losses.append(loss(1.0 + i))
        gradients.append(jax.grad(loss)(1.0 + i))
        if i == 0:
            first = compiles.count
    assert compiles.count == first
    assert len(set(map(float, losses))) == len(set(map(float, gradients))) == 3
    e = 1e-5
    np.testing.assert_allclose(gradients[2], (loss(3 + e) - loss(3 - e)) / (2 * e), rtol=1e-6)


P = jnp.array([0.5, 1.2])
