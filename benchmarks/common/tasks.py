"""The ensembles that are solved."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
    """An ensemble of `f(u, p, t)` from 0 to `t1`. `own` names the numbers that differ between
    trajectories.

    With `rtol` and `atol` the steps are adaptive, and the first one is `dt` if that is given;
    otherwise all steps are `dt`. Without `times` the end is saved. Arrays are NumPy arrays.
    """

    f: Callable
    u0: Any
    p: Any
    own: tuple[str, ...]  # "u0", "p" or both, with the trajectories first
    n: int
    t1: float
    dt: float | None = None
    rtol: Any = None
    atol: Any = None
    times: Any = None

    @property
    def adaptive(self):
        return self.rtol is not None

    @property
    def dtype(self):
        return np.dtype(self.u0.dtype)

    @property
    def sample(self):
        return sample(self.n)

    def inputs(self):
        """`u0` and `p` as JAX arrays."""
        return jax.tree.map(jnp.asarray, (self.u0, self.p))

    def only(self, rows):
        """The same task with only these trajectories, and in float64."""
        every = {"u0": self.u0, "p": self.p}
        every = jax.tree.map(lambda x: np.asarray(x, np.float64), every)
        every |= {name: every[name][rows] for name in self.own}
        return dataclasses.replace(self, n=len(rows), **every)


def sample(n, most=64):
    """Trajectories whose errors are measured."""
    return np.unique(np.linspace(0, n - 1, most).astype(int))


def lorenz_components(u, rho, sigma=10.0, beta=8.0 / 3.0):
    """The equations of Lorenz, for any kind of numbers."""
    x, y, z = u
    return [sigma * (y - x), x * (rho - z) - y, x * y - beta * z]


def lorenz(u, p, t):
    return jnp.stack(lorenz_components(u, p))


def lorenz_task(n, dtype, t1, *, tol=None, **options):
    u0, rhos = np.array([1.0, 0.0, 0.0], dtype), np.linspace(0.0, 21.0, n, dtype=dtype)
    options = {"rtol": tol, "atol": tol} | options
    return Task(lorenz, u0, rhos, ("p",), n, t1, **options)


def tanh_network(u, p, t):
    """A network 2 -> W -> W -> 2 with tanh, whose layers are `p`."""
    (w1, b1), (w2, b2), (w3, b3) = p
    return w3 @ jnp.tanh(w2 @ jnp.tanh(w1 @ u + b1) + b2) + b3


def network_task(n, dtype, t1, *, scale=1.0, **options):
    """A neural ODE 2 -> 50 -> 2 (tanh), whose trajectories share the weights."""
    key = jax.random.key(0)
    network = eqx.nn.MLP(2, 2, 50, 1, activation=jnp.tanh, key=key, dtype=dtype)
    weights, rest = eqx.partition(network, eqx.is_array)
    weights = jax.tree.map(lambda x: np.asarray(scale * x), weights)
    u0 = np.asarray(jax.random.normal(key, (n, 2), dtype))
    return Task(lambda u, p, t: eqx.combine(p, rest)(u), u0, weights, ("u0",), n, t1, **options)
