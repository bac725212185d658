"""The standard problems of comparisons of solvers, as ensembles."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import ensembleode as eo

from ..problems import lorenz, lotka_volterra, mlp


class Standard(NamedTuple):
    """A field, where it starts and its parameters; the ensemble has both a little varied.

    - `close`: how close the answers are, relative to the largest of the solution.
    - `vary`: by how much trajectories differ.
    """

    f: Any
    u0: Any
    end: float
    p: Any = None
    close: float = 1e-10
    vary: float = 0.05


def van_der_pol(u, p, t):
    return jnp.array([u[1], p * (1 - u[0] ** 2) * u[1] - u[0]])


def pendulum(u, p, t):
    return jnp.array([u[1], -p["g"] / p["length"] * jnp.sin(u[0])])


def arenstorf(u, p, t):
    """The restricted three-body problem."""
    x, y, vx, vy = u
    rest = 1 - p
    d1 = ((x + p) ** 2 + y**2) ** 1.5
    d2 = ((x - rest) ** 2 + y**2) ** 1.5
    ax = x + 2 * vy - rest * (x + p) / d1 - p * (x - rest) / d2
    ay = y - 2 * vx - rest * y / d1 - p * y / d2
    return jnp.stack([vx, vy, ax, ay])


def pleiades(u, p, t):
    """Seven stars in the plane: `u` is `[position or velocity, coordinate, star]`."""
    q, v = u
    gaps = q[:, None, :] - q[:, :, None]
    distances = jnp.sum(gaps**2, axis=0) + jnp.eye(7, dtype=u.dtype)
    return jnp.stack([v, jnp.sum(p[None, None] * gaps / distances[None] ** 1.5, axis=2)])


PLEIADES = jnp.array(
    [
        [[3, 3, -1, -3, 2, -2, 2], [3, -3, 2, 0, 0, -4, 4]],
        [[0, 0, 0, 0, 0, 1.75, -1.5], [0, 0, 0, -1.25, 1, 0, 0]],
    ]
)


def brusselator(u, p, t):
    """In one dimension, 16 cells, `u` is `[substance, cell]`."""
    x, y = u
    diffusion = p[2] * (x.shape[0] + 1) ** 2

    def spread(z, edge):
        wide = jnp.pad(z, 1, constant_values=edge)
        return diffusion * (wide[2:] - 2 * z + wide[:-2])

    reaction = x**2 * y
    return jnp.stack(
        [
            p[0] + reaction - (p[1] + 1) * x + spread(x, 1.0),
            p[1] * x - reaction + spread(y, 3.0),
        ]
    )


CELLS = jnp.arange(1, 17) / 17


def lorenz96(u, p, t):
    return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u + p


def rigid_body(u, p, t):
    """Euler's equations, with a torque."""
    spin = jnp.array([p[0] * u[1] * u[2], p[1] * u[0] * u[2], p[2] * u[0] * u[1]])
    return spin + jnp.where(t < 100, 0.25 * jnp.sin(t) ** 2, 0.0)


TABLE = jnp.array([0.0, 1.0, 0.5, -0.5, -1.0, 0.0])


def forced(u, p, t):
    """An oscillator, forced by a table; its kinks are where trajectories may step on them."""
    force = jnp.interp(t, jnp.linspace(0.0, 5.0, 6), TABLE)
    return jnp.array([u[1], -p[0] * u[0] - p[1] * u[1] + force])


def matrix_linear(u, p, t):
    return p @ u - u @ p + 0.1 * jnp.cos(t) * u


NETWORK = eqx.nn.MLP(2, 2, 50, 1, activation=jnp.tanh, key=jax.random.key(1))
PROBLEMS = {
    "lorenz": Standard(lorenz, [1.0, 0, 0], 2.0, [10.0, 28.0, 8 / 3]),
    "lotka_volterra": Standard(lotka_volterra, [1.0, 1], 10.0, [1.5, 1.0, 3.0, 1.0]),
    "van_der_pol": Standard(van_der_pol, [2.0, 0], 6.0, 1.0),
    "pendulum": Standard(pendulum, [1.0, 0.2], 5.0, {"g": 9.81, "length": 1.0}),
    "arenstorf": Standard(
        arenstorf,
        [0.994, 0, 0, -2.00158510637908252240537862224],
        17.0652165601579625588917206249,
        0.012277471,
        close=1e-6,
        vary=0.0,
    ),
    "pleiades": Standard(pleiades, PLEIADES, 3.0, jnp.arange(1.0, 8.0), vary=0.005),
    "brusselator": Standard(
        brusselator,
        [1 + jnp.sin(2 * jnp.pi * CELLS), jnp.full(16, 3.0)],
        2.0,
        [1.0, 3.0, 0.02],
    ),
    "lorenz96": Standard(lorenz96, 8 + 0.01 * jnp.cos(jnp.arange(40.0)), 1.0, 8.0),
    "rigid_body": Standard(rigid_body, [1.0, 0, 0.9], 10.0, [-2.0, 1.25, -0.5]),
    "forced": Standard(forced, [1.0, 0], 5.0, [4.0, 0.2]),
    "mlp": Standard(mlp, [1.0, -0.5], 2.0, NETWORK),
    "matrix_linear": Standard(
        matrix_linear,
        jnp.arange(9.0).reshape(3, 3) / 9,
        3.0,
        jnp.array([[0, 1, 0.3], [-1, 0, 0.5], [0.2, -0.4, 0]]),
    ),
}


def ensemble(problem):
    arrays = eqx.is_array if problem.f is mlp else lambda x: True
    p, static = eqx.partition(problem.p, arrays)
    p = jax.tree.map(jnp.asarray, p)
    if isinstance(problem.p, list):
        p = jnp.array(problem.p)
    u0 = jnp.asarray(jnp.array(problem.u0))
    prob = eo.ODEProblem(problem.f, u0, (0.0, problem.end), eqx.combine(p, static))

    def prob_func(prob, ctx):
        factor = 1 + problem.vary * ctx.index
        own = p if problem.f is mlp else jax.tree.map(lambda x: x / factor, p)
        return eo.remake(prob, u0=prob.u0 * factor, p=eqx.combine(own, static))

    return eo.EnsembleProblem(prob, prob_func)
