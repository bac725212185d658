"""Vector fields as users write them, their Jacobians, and their vector-Jacobian products."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..problems import lorenz, lotka_volterra, ROBERTSON, robertson


class Field(NamedTuple):
    """`fn(u, p, t)` at a point; `fewer` is a smaller state for its Jacobian."""

    fn: Callable
    u: Any
    p: Any
    fewer: Any = None


def pendulum(u, p, t):
    angle, speed = u
    return jnp.array([speed, -p["g"] / p["length"] * jnp.sin(angle)])


def forced(u, p, t):
    x, v = u
    return jnp.array([v, p[0] * jnp.cos(p[1] * t) - p[2] * v - x - x**3])


def brusselator(u, p, t):
    a, b, d = p
    x, y = u.reshape(2, -1)
    diffusion = jnp.roll(x, 1) + jnp.roll(x, -1) - 2 * x, jnp.roll(y, 1) + jnp.roll(y, -1) - 2 * y
    dx = a + x**2 * y - (b + 1) * x + d * diffusion[0]
    dy = b * x - x**2 * y + d * diffusion[1]
    return jnp.concatenate([dx, dy])


def heat(u, p, t):
    padded = jnp.pad(u, 1)
    beside = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
    return p * (beside - 4 * u)


def network(u, p, t):
    weights, static = p, _STATIC[u.shape[0]]
    return eqx.combine(weights, static)(u)


def lorenz96(u, p, t):
    def column(x):
        return (jnp.roll(x, -1) - jnp.roll(x, 2)) * jnp.roll(x, 1) - x + p

    return jax.vmap(column, in_axes=1, out_axes=1)(u)


def bodies(u, p, t):
    """Gravity, softened: positions and velocities, `[2, body, axis]`."""
    x, v = u
    apart = x[None, :, :] - x[:, None, :]
    distance = jnp.sqrt(jnp.sum(apart**2, -1) + 0.01)
    pull = p[None, :, None] * apart / (distance**3)[:, :, None]
    return jnp.stack([v, jnp.sum(pull, 1)])


def kuramoto(u, p, t):
    frequencies, coupling = p
    return frequencies + coupling * jnp.mean(jnp.sin(u[None, :] - u[:, None]), 1)


def chemistry(u, p, t):
    heat, x = u[0], jnp.clip(u[1:], 0.0, 1.0)
    rate = p[0] * jnp.exp(-p[1] / jnp.where(heat > 0.1, heat, 0.1)) * x
    return jnp.concatenate([jnp.sum(p[2] * rate)[None] - heat, -rate])


def _mlp(n, width):
    net = eqx.nn.MLP(n, n, width, 1, activation=jnp.tanh, key=jax.random.key(0))
    return eqx.partition(net, eqx.is_array)


rng = np.random.default_rng(0)
_SMALL, _LARGE = _mlp(2, 50), _mlp(8, 200)
_STATIC = {2: _SMALL[1], 8: _LARGE[1]}


def _weights(tree):
    return jtu.tree_map(lambda x: rng.normal(size=x.shape) / x.shape[-1] ** 0.5, tree)


FIELDS = {
    "bodies": Field(bodies, rng.normal(size=(2, 5, 3)), rng.uniform(0.5, 1.5, 5)),
    "brusselator": Field(brusselator, rng.uniform(0.5, 3, 64), np.array([1.0, 3.0, 0.02])),
    "chemistry": Field(
        chemistry,
        np.array([0.7, -0.1, 0.4, 1.2]),
        (rng.uniform(1, 2, 3), 0.3, rng.uniform(1, 2, 3)),
    ),
    "forced": Field(forced, rng.normal(size=2), np.array([0.5, 1.2, 0.1])),
    "heat": Field(heat, rng.normal(size=(16, 16)), np.float64(0.3), rng.normal(size=(5, 5))),
    "kuramoto": Field(kuramoto, rng.uniform(0, 6, 20), (rng.normal(size=20), 1.5)),
    "lorenz": Field(lorenz, rng.normal(size=3), np.array([10.0, 28.0, 8 / 3])),
    "lorenz96": Field(lorenz96, rng.normal(size=(12, 4)), 8.0, rng.normal(size=(5, 3))),
    "lotka_volterra": Field(lotka_volterra, rng.uniform(1, 2, 2), rng.uniform(size=4)),
    "network": Field(network, rng.normal(size=2), _weights(_SMALL[0])),
    "network_large": Field(network, rng.normal(size=8), _weights(_LARGE[0])),
    "pendulum": Field(pendulum, rng.normal(size=2), {"g": 9.8, "length": 1.5}),
    "robertson": Field(robertson, rng.uniform(size=3), ROBERTSON),
}


def jacobian(fn):
    """Transposed, flat: `[component of u, component of du/dt]`."""

    def jac(u, p, t):
        return jax.jacfwd(lambda x: fn(x.reshape(u.shape), p, t).reshape(-1))(u.reshape(-1)).T

    return jac


def vjp(fn):
    """What an adjoint's state `w` is multiplied with: by `u` and by the parameters, as one vector.

    The forward solution is the first of its parameters.
    """

    def product(w, p, t):
        u, p = p
        _, pull = jax.vjp(lambda u, p: fn(u, p, t), u, p)
        return jnp.concatenate([jnp.reshape(x, -1) for x in jtu.tree_leaves(pull(w))])

    return product
