"""The cost and the length of programs: nothing expensive is computed twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ensembleode.fields.ir import Assign, For, Let, Load, Op, Store, Switch, While

from .lowered import Lowered


N = 30


def evaluations(stmts, name=None):
    """How often an operation is evaluated, or any; all cases of a branch, and a turn of a loop."""
    total = 0
    for s in stmts:
        match s:
            case Let(_, expr) | Assign(_, expr):
                total += operations(expr, name)
            case Store(_, index, expr):
                total += sum(operations(e, name) for e in (expr, *(e for e, _ in index.terms)))
            case For(_, n, body):
                total += n * evaluations(body, name)
            case While(test, condition, body):
                total += evaluations((*test, *body), name) + operations(condition, name)
            case Switch(which, cases):
                total += operations(which, name) + sum(evaluations(c, name) for c in cases)
    return total


def operations(expr, name=None):
    match expr:
        case Op(found, args):
            return (name in (found, None)) + sum(operations(x, name) for x in args)
        case Load(_, index):
            return sum(operations(e, name) for e, _ in index.terms)
    return 0


@jax.jit
def thrice(x):
    return x * x - x


COSTLY = {
    "used thrice": lambda s, t: s * s + s,
    "called": lambda s, t: thrice(thrice(thrice(s))),
    "called in a loop": lambda s, t: lax.fori_loop(0, 3, lambda i, z: thrice(z) * thrice(s), s),
    "broadcast": lambda s, t: jnp.sum(s[:, None] * jnp.cos(s)[None, :], 1),
    "broadcast in place": lambda s, t: jnp.sum(lax.mul(s[:, None], s[None, :]), 1),
    "tiled": lambda s, t: jnp.tile(s, 3),
    "repeated": lambda s, t: jnp.repeat(s, 3),
    "joined": lambda s, t: jnp.concatenate([s, s[::-1], s]),
    "rolled": lambda s, t: jnp.roll(s, 1) - jnp.roll(s, -1),
    "sliced": lambda s, t: s[1:] + s[:-1],
    "padded": lambda s, t: jnp.pad(s, 1),
    "transposed": lambda s, t: s.reshape(5, 6).T,
    "gathered": lambda s, t: s[np.arange(0, N, 2) % 7],
    "indexed": lambda s, t: s * s[jnp.int32(t)],
    "updated": lambda s, t: s.at[jnp.int32(t)].add(1.0),
    "added up": lambda s, t: jnp.cumsum(s) + jnp.sum(s) + jnp.max(s),
    "the largest": lambda s, t: jnp.argmax(s) + 0 * s.astype(int),
    "multiplied": lambda s, t: jnp.ones((N, N)) @ s,
    "multiplied by little": lambda s, t: jnp.ones((2, 2, N)) @ s,
    "scanned": lambda s, t: lax.scan(lambda c, x: (c + x * x, c - x), t, s)[1],
    "closed over": lambda s, t: lax.scan(lambda c, x: (c + s * x, x), s, jnp.ones(4))[0],
    "of a branch": lambda s, t: lax.cond(t > 0, lambda: s * s, lambda: s + 1),
    "while": lambda s, t: lax.while_loop(lambda z: z[0] < s[0], lambda z: z + s, s - 1),
    "mapped": lambda s, t: jax.vmap(lambda x: x**2 + x)(s),
    "differentiated": lambda s, t: jax.grad(lambda s: jnp.sum(s**3))(s),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", COSTLY)
def test_what_is_costly_is_computed_once(name):
    fn = COSTLY[name]
    for program in (
        Lowered(lambda u, p, t: fn(jnp.sin(u), t), np.ones(N), apart=False),
        Lowered(lambda u, p, t: fn(jnp.sin(u), t), np.ones(N)),
    ):
        assert evaluations(program.function.body, "sin") <= N


def test_numbers_are_computed_before_loops():
    for fn in (
        lambda u, p, t: jnp.sin(t) * u,
        lambda u, p, t: jnp.full(N, jnp.sin(t)) * u,
        lambda u, p, t: u.at[2].set(jnp.sin(p)) - jnp.sin(u[3]),
        lambda u, p, t: jnp.outer(u, u * jnp.sin(p)),
    ):
        program = Lowered(fn, np.ones(N), 0.5, apart=False)
        assert evaluations(program.function.body, "sin") <= 2


def test_parameters_of_another_dtype_are_converted_once():
    def fn(u, p, t):
        return p @ u + p @ (2 * u)

    program = Lowered(fn, np.ones(N), np.ones((N, N)), storage=np.float32)
    assert evaluations(program.function.body, "convert_element_type") == N**2


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_long_chains_stay_as_long_as_they_are(apart):
    def chain(u, p, t):
        for k in range(200):
            u = jnp.sin(u) * p + (u if k % 3 else t)
        return u

    for n in (1, 4, 40):
        program = Lowered(chain, np.ones(n), 0.5, apart=apart)
        count = evaluations(program.function.body)
        assert count + sum(map(operations, program.function.outputs)) <= 601 * n

    def branching(u, p, t):
        for _ in range(60):
            u = thrice(u) / thrice(u + 1)
        return u

    for n in (1, 40):
        program = Lowered(branching, np.ones(n), apart=apart)
        assert evaluations(program.function.body) <= 60 * 6 * n + 100


def test_what_is_not_used_is_not_computed():
    def gradient(u, p, t):
        return jax.grad(lambda u: jnp.sum(jnp.sin(u)))(u)

    for n in (3, N):
        for apart in (True, False):
            program = Lowered(gradient, np.ones(n), apart=apart)
            body = program.function.body
            assert not evaluations(body, "sin")
            assert evaluations(body, "cos") <= n


def test_memory_is_no_more_than_a_few_arrays():
    # Chains are not stored, and no array is copied that is there already.
    program = Lowered(
        lambda u, p, t: jnp.tanh(p @ jnp.tanh(p @ u) - u * t), np.ones(N), np.ones((N, N))
    )
    assert sum(size for _, size in program.function.work) == 3 * N
    program = Lowered(
        lambda u, p, t: u.reshape(5, 6).reshape(-1)[::-1] * 2, np.ones(N), apart=False
    )
    assert not program.function.work
