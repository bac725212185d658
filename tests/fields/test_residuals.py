"""A transposed field in two parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ensembleode.fields.derivatives.transposes import in_two_parts, transposed
from ensembleode.fields.equations import used
from ensembleode.tracing.program import trace


def perceptron(u, p, t):
    return p["w"].T @ jnp.tanh(p["v"] @ jnp.tanh(p["w"] @ u + p["b"])) - t * u


def rectified(u, p, t):
    return p["w"].T @ jax.nn.relu(p["v"] @ jax.nn.relu(p["w"] @ u + p["b"])) * t


def normed(u, p, t):
    x = p["w"] @ u
    x = (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + 0.1) * p["b"]
    return p["v"][:3] @ jnp.exp(-x * x)


def attentive(u, p, t):
    query = jnp.outer(u, p["b"])
    return jax.nn.softmax(query @ p["v"] @ query.T) @ jnp.outer(u, p["b"]) @ p["w"][:, 0]


def scanned(u, p, t):
    def layer(x, w):
        return jnp.tanh(w[:3] * x + t), None

    return jax.lax.scan(layer, u, p["v"])[0] @ p["w"][:3] + p["b"][:3]


FIELDS = {
    "tanh": perceptron,
    "relu": rectified,
    "norm": normed,
    "attention": attentive,
    "scan": scanned,
}


def numbers():
    rng = np.random.default_rng(0)
    p = {"b": rng.normal(size=6), "v": rng.normal(size=(6, 6)), "w": rng.normal(size=(6, 3))}
    return jnp.asarray(rng.normal(size=3)), jax.tree.map(jnp.asarray, p)


def evaluated(jaxpr, args):
    return jax.jit(lambda args: jax.core.eval_jaxpr(jaxpr, [], *args))(args)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FIELDS)
def test_the_parts_are_the_whole(name):
    u, p = numbers()
    (field, _), which = trace(FIELDS[name], u, p, jnp.array(0.3)), (0, 1, 2)
    parts = in_two_parts(field, which)
    cotangent, given = jnp.array([1.0, -2.0, 0.5]), [*jax.tree.leaves(p), u]
    t = jnp.array(0.3)
    value, *residuals = evaluated(parts.forward, [jnp.full(3, jnp.nan), *given, t])
    np.testing.assert_allclose(value, FIELDS[name](u, p, 0.3), rtol=1e-14)
    assert tuple(x.shape for x in residuals) == parts.residuals
    (found,) = evaluated(parts.backward, [cotangent, *given, *residuals, t])
    (expected,) = evaluated(transposed(field, which), [cotangent, *given, t])
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_what_is_kept():
    """Of a perceptron: the activations, once; nothing dear is done again."""
    u, p = numbers()
    parts = in_two_parts(trace(perceptron, u, p, jnp.array(0.3))[0], (0, 1, 2))
    assert parts.residuals == ((6,), (6,))
    names = [eqn.primitive.name for eqn in used(parts.backward)[0]]
    assert "tanh" not in names
    assert names.count("dot_general") == 6  # by the weights and by the states, of three layers


def test_a_field_that_keeps_nothing():
    u, p = numbers()
    cheap, _ = trace(lambda u, p, t: p["b"][:3] * u * u - t, u, p, jnp.array(0.3))
    assert in_two_parts(cheap, (0, 1, 2)) is None
