"""Problems with known solutions, shared by the tests."""

import equinox as eqx
import jax
import jax.numpy as jnp

import ensembleode as eo


def linear(u, p, t):
    return p * u


def lotka_volterra(u, p, t):
    return jnp.array([p[0] * u[0] - p[1] * u[0] * u[1], -p[2] * u[1] + p[3] * u[0] * u[1]])


def lorenz(u, p, t):
    return jnp.array([p[0] * (u[1] - u[0]), u[0] * (p[1] - u[2]) - u[1], u[0] * u[1] - p[2] * u[2]])


def mlp(u, p, t):
    return p(u)


def network(width=8):
    return eqx.nn.MLP(2, 2, width, 1, activation=jnp.tanh, key=jax.random.key(1))


def decay(tspan=(0.0, 1.0), **options):
    """du/dt = -u: u(t) = u0 exp(t0 - t)."""
    return eo.ODEProblem(linear, jnp.array([1.0, 2.0]), tspan, jnp.array(-1.0), **options)


def scaled(prob, ctx):
    """Trajectory i starts i + 1 times as far out."""
    return eo.remake(prob, u0=ctx.sim_id * prob.u0)


@jax.custom_vjp
def with_reverse_rule(x):
    """A sine, whose reverse mode is another function's, to be told from its derivative."""
    return jnp.sin(x)


with_reverse_rule.defvjp(lambda x: (with_reverse_rule(x), x), lambda x, g: (3 * g * x,))
