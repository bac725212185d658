"""Branches that are all computed, with one result selected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ensembleode.tracing.branches import with_selected_branches
from ensembleode.tracing.program import trace


def two(x, y):
    # (The branch that isn't taken has no derivative.)
    return lax.cond(x[0] > 1, lambda: y * jnp.sqrt(x - 1), lambda: jnp.sin(x * y))


def three(x, y):
    way = jnp.clip(jnp.int32(x[0]), 0, 2)
    return lax.switch(way, [lambda: x**2, lambda: jnp.log(x - 1) * y, lambda: y / x])


FUNCTIONS = {
    "two": two,
    "three": three,
    "called": lambda x, y: jax.jit(two)(x, y) + 1,
    "in a loop": lambda x, y: lax.scan(lambda c, z: (two(c, z), None), x, jnp.stack([y, y]))[0],
    "within a branch": lambda x, y: lax.cond(y > 0, lambda: three(x, y), lambda: two(x, y)),
    "of whole numbers": lambda x, y: x * lax.cond(x[0] > 1, lambda i: i, lambda i: 2 * i, 3),
}
X, Y = jnp.array([[0.2, 0.7], [1.8, 1.9], [2.5, 3.0]]), jnp.array([0.5, 1.2, -0.3])
ROWS = list(zip(X, Y, strict=True))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_those_of_the_branch_that_is_taken(name):
    """Also where what was differentiated in forward mode is mapped, and then in reverse mode."""
    fn = FUNCTIONS[name]
    program, consts = trace(fn, X[0], Y[0])
    selected = with_selected_branches(program)

    def along(fn):  # forward mode within
        return lambda x, y: jax.jvp(fn, (x, y), (jnp.cos(x), jnp.ones_like(y)))[1]

    def mapped(fn):
        return jax.jit(jax.grad(lambda x, y: jnp.sum(jax.vmap(along(fn))(x, y)), (0, 1)))(X, Y)

    def one_by_one(fn):
        each = [jax.grad(lambda x, y: jnp.sum(along(fn)(x, y)), (0, 1))(*at) for at in ROWS]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *each)

    def ours(x, y):
        return selected(consts, x, y)

    np.testing.assert_array_equal(jax.vmap(ours)(X, Y), jnp.stack([fn(*at) for at in ROWS]))
    for got, expected in zip(mapped(ours), one_by_one(fn), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_a_program_without_branches_is_itself():
    program, _ = trace(lambda x, y: x * y, X[0], Y[0])
    assert with_selected_branches(program) is program
