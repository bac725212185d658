"""Random expressions, in both forms, compared with JAX."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from .lowered import agree


N = 5
rng = np.random.default_rng(0)
PARAMETERS = {"matrix": rng.normal(size=(N, N)), "vector": rng.normal(size=N), "rate": 0.7}

# Each makes a vector of one vector or two, of the parameters and the time.
ONE = [
    lambda x, p, t: jnp.sin(x),
    lambda x, p, t: jnp.exp(-jnp.abs(x)),
    lambda x, p, t: jnp.tanh(x) * t,
    lambda x, p, t: x**2 - p["rate"],
    lambda x, p, t: x[::-1],
    lambda x, p, t: jnp.roll(x, 2),
    lambda x, p, t: jnp.concatenate([x[2:], 2 * x[:2]]),
    lambda x, p, t: jnp.pad(x[1:-1], 1),
    lambda x, p, t: p["matrix"] @ x,
    lambda x, p, t: x @ p["matrix"],
    lambda x, p, t: jnp.sum(x) * p["vector"],
    lambda x, p, t: jnp.cumsum(x),
    lambda x, p, t: x - jnp.max(x),
    lambda x, p, t: jnp.full(N, x[3]),
    lambda x, p, t: x.at[1].set(x[4]).at[np.array([0, 0, 3])].add(t),
    lambda x, p, t: jnp.mean(jnp.outer(x, p["vector"]), 0),
    lambda x, p, t: jnp.sum(jnp.cos(x[:, None] - x[None, :]), 1) / N,
]
TWO = [
    lambda x, y, p, t: x + y,
    lambda x, y, p, t: x * y,
    lambda x, y, p, t: x - p["rate"] * y,
    lambda x, y, p, t: x / (1 + y**2),
    lambda x, y, p, t: jnp.where(x > y, x, -y),
    lambda x, y, p, t: jnp.maximum(x, y),
    lambda x, y, p, t: x * jnp.dot(x, y) / N,
    lambda x, y, p, t: jnp.stack([x, y]).T.reshape(-1)[:N],
    lambda x, y, p, t: jnp.concatenate([x[:2], y[2:]]),
    lambda x, y, p, t: jnp.outer(x, y)[:, 1] + jnp.outer(y, x).T[0],
]
leaves = st.sampled_from(["u", "vector", "time"])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(range(len(ONE))), inner),
        st.tuples(st.sampled_from(range(len(TWO))), inner, inner),
        # What is used twice.
        st.tuples(st.sampled_from(range(len(TWO))), inner),
    ),
    max_leaves=6,
)


def value(tree, u, p, t):
    if isinstance(tree, str):
        return {"u": u, "vector": p["vector"] * u[0], "time": jnp.full(N, t)}[tree]
    k, *inner = tree
    values = [value(x, u, p, t) for x in inner]
    if len(values) == 2:
        return TWO[k](*values, p, t)
    return ONE[k](*values, p, t) + TWO[k % len(TWO)](values[0], values[0], p, t)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(trees)
def test_any_expression(tree):
    agree(lambda u, p, t: value(tree, u, p, t), rng.normal(size=N), PARAMETERS, rtol=1e-10)
