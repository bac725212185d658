"""Cotangents of parameters as sums of outer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ensembleode.fields.derivatives.outer_products import taken_out
from ensembleode.fields.derivatives.transposes import transposed
from ensembleode.tracing.program import trace


def layers(u, p, t):
    (w1, b1), (w2, b2), (w3, b3) = p
    return w3 @ jnp.tanh(w2 @ jax.jit(jnp.tanh)(w1 @ u + b1) + b2) + b3 * t


def twice(u, p, t):
    return p[0] @ jnp.sin(p[0] @ u) - u @ p[0]


def attention(u, p, t):
    query, key, value, gain = p
    x = u.reshape(16, 3)
    x = gain[None] * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3)
    return (jax.nn.softmax((x @ query) @ (x @ key).T) @ (x @ value)).reshape(-1)


def convolution(u, p, t):
    return lax.conv(u[None, None], p[0], (1,), "SAME")[0, 0] * p[1]


def scanned(u, p, t):
    return lax.scan(lambda x, _: (jnp.tanh(p[0] @ x), None), u, None, length=3)[0]


def looked_up(u, p, t):
    """At an index and the next one, at several indices (one of them outside), and by windows."""
    table, rows = p
    i = jnp.floor(8 * jnp.abs(u[0])).astype(int)
    several = table.at[jnp.array([3, 1, 1]) * i].get(mode="fill", fill_value=0)
    window = lax.dynamic_slice(rows, (i, 1), (2, 2))
    return u * table[i] + (table[i + 1] + several.sum()) * rows[i] + window.sum() * table[-1]


def interpolated(u, p, t):
    return u * jnp.interp(t, jnp.linspace(0.0, 1.0, 40), p[0]) + p[1]


def unused(u, p, t):
    return jnp.sum(p[0]) * u + p[2]


# The field, the shapes of the state and the parameters, and how many numbers the cotangents are
# made from: the two vectors of each product, or the whole cotangent where that is less.
CASES = {
    "layers": (
        layers,
        2,
        [[(8, 2), (8,)], [(8, 8), (8,)], [(2, 8), (2,)]],
        2 + 8 + 8 + 8 + 8 + 2 + 2,
    ),
    "twice": (twice, 6, [(6, 6)], 5 * 6),
    "attention": (attention, 48, [(3, 3), (3, 3), (3, 3), (3,)], 3 * 9 + 3),
    "convolution": (convolution, 7, [(1, 1, 3), (7,)], 3 + 7),
    "scanned": (scanned, 4, [(4, 4)], 16),
    "looked up": (looked_up, 3, [(40,), (12, 3)], 2 * (1 + 1 + 3 + 3 + 4) + 1),
    "interpolated": (interpolated, 3, [(40,), (3,)], 2 * 4 + 2 + 3),
    "unused": (unused, 3, [(2, 2), (5, 5), (3,)], 4 + 3),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", CASES)
def test_terms_add_up_to_cotangents(name):
    field, size, shapes, most = CASES[name]
    rng = np.random.default_rng(0)
    is_shape = lambda x: isinstance(x, tuple) and isinstance(x[0], int)  # noqa: E731
    p = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s)), shapes, is_leaf=is_shape)
    u, t, cotangent = jnp.asarray(rng.normal(size=size)), jnp.array(0.7), rng.normal(size=size)
    program, consts = trace(field, u, p, t, rules=True)
    jaxpr = transposed(program, range(len(jax.tree.leaves(p))))
    args = [*consts, jnp.asarray(cotangent), *jax.tree.leaves(p), u, t]
    found = taken_out(jaxpr, size)

    @jax.jit
    def evaluated(args):
        n, both = len(consts), (jaxpr, found.jaxpr)
        return [jax.core.eval_jaxpr(x, args[:n], *args[n:]) for x in both]

    (expected,), results = evaluated(args)
    flat = np.concatenate([np.ravel(x) for x in results])
    np.testing.assert_allclose(flat[:size], expected[:size], rtol=1e-12)
    factors, sums = flat[size:], np.zeros(len(expected) - size)
    assert len(factors) == found.size <= most
    for term in found.terms:
        i, j, c = np.ogrid[: term.rows, : term.columns, : term.inner]
        product = factors[_places(term.left, i, c)]
        if term.right is not None:
            product = product * factors[_places(term.right, c, j)]
        places = np.broadcast_to(_places(term.to, i, j), (*product.shape[:2], 1))
        np.add.at(sums, places[..., 0], product.sum(2))
    for part in found.scattered:
        i = np.arange(part.rows)
        number = factors[_places(part.number, i, 0)].astype(int)
        np.add.at(sums, _places(part.to, number, 0), factors[_places(part.left, i, 0)])
    np.testing.assert_allclose(sums, expected[size:], rtol=1e-10, atol=1e-12)


def _places(places, first, second):
    return places.start + first * places.first + second * places.second


@pytest.mark.slow
@pytest.mark.parametrize("from_left", [True, False])
def test_sums_may_be_longer_than_a_stack_is_deep(from_left):
    def cotangents(a, b):
        total = a[:, None] @ b[None]
        for _ in range(1500):
            more = jnp.sin(a)[:, None] @ b[None]
            total = total + more if from_left else more + total
        return jnp.concatenate([a, total.reshape(-1)])

    jaxpr = jax.make_jaxpr(cotangents)(jnp.ones(4), jnp.ones(4)).jaxpr
    found = taken_out(jaxpr, 4)
    assert len(found.terms) == 1501
    assert {(x.rows, x.columns) for x in found.terms} == {(4, 4)}
