"""Problems with known solutions, shared by the tests."""

import importlib
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo


BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def of_benchmarks(name):
    """A module of them, found as by one that is run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        return importlib.import_module(name)


def linear(u, p, t):
    return p * u


def lotka_volterra(u, p, t):
    return jnp.array([p[0] * u[0] - p[1] * u[0] * u[1], -p[2] * u[1] + p[3] * u[0] * u[1]])


def lorenz(u, p, t):
    return jnp.array([p[0] * (u[1] - u[0]), u[0] * (p[1] - u[2]) - u[1], u[0] * u[1] - p[2] * u[2]])


ROBERTSON = np.array([0.04, 1e4, 3e7])


def robertson(u, p, t):
    """Three reactions, with the rates `p`; `ROBERTSON` are the usual ones."""
    x, y, z = u
    a, b, c = p
    return jnp.stack([b * y * z - a * x, a * x - b * y * z - c * y**2, c * y**2])


def forced(u, p, t):
    """A component that follows a cosine, and one that drives it and dies away."""
    return jnp.stack([p[0] * (jnp.cos(p[1] * t) - u[0]) + u[1], -p[2] * u[1] ** 3])


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


def failing(*, nan_start=None):
    """An ensemble whose first four trajectories fail: by NaN, an infinite solution, a step that
    underflows (the slope jumps from one side of zero to the other), and too many steps. So does
    the one that starts at NaN. All others are exp(-t)."""

    def f(u, p, t):
        nan = jnp.where(t > 0.6, jnp.nan, 1.0) * u
        explodes = u**2 * 10
        sticks = jnp.sign(0.3 - u) * 1e3
        long = jnp.cos(3e3 * t) * 3e3
        return jnp.select([p == 0, p == 1, p == 2, p == 3], [nan, explodes, sticks, long], -u)

    def prob_func(prob, ctx):
        prob = eo.remake(prob, p=ctx.index * 1.0)
        if nan_start is None:
            return prob
        return eo.remake(prob, u0=jnp.where(ctx.index == nan_start, jnp.nan, prob.u0))

    return eo.EnsembleProblem(eo.ODEProblem(f, jnp.ones(1), (0.0, 1.0), jnp.array(0.0)), prob_func)


@jax.custom_vjp
def with_reverse_rule(x):
    """A sine, whose reverse mode is another function's, to be told from its derivative."""
    return jnp.sin(x)


with_reverse_rule.defvjp(lambda x: (with_reverse_rule(x), x), lambda x, g: (3 * g * x,))


# A method of each kind that meets events and known times in its own way; the last of them is for
# problems with a mass matrix.
ALGS_OF_EVENTS = {
    "Tsit5": eo.Tsit5(),
    "Vern7": eo.Vern7(),
    "Rodas5P": eo.Rodas5P(),
    "AutoTsit5": eo.AutoTsit5(eo.Rodas5P()),
    "mass matrix": eo.Rodas5P(),
}
