"""Arrays that are only moved are read where they come from."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ensembleode.fields import ir
from ensembleode.fields.derivatives.forwarding import forwarded
from ensembleode.fields.walking import statements

from .lowered import Lowered
from .python_printer import run


REAL, COUNTER = np.dtype(np.float64), ir.Var("i", np.dtype(np.int64))
SIZE = 8


def lorenz96(u, p, t):
    return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u


def diffusion(u, p, t):
    v = jnp.pad(u, 1)
    return v[2:] - 2 * v[1:-1] + v[:-2]


def joined(u, p, t):
    return jnp.concatenate([u[5:], jnp.zeros(2), -u[:3]]) * u


FIELDS = {f.__name__: f for f in (lorenz96, diffusion, joined)}


def scratch(fn):
    return [s for s in statements(fn.body) if isinstance(s, ir.Store) and s.buffer.group == "work"]


@pytest.mark.parametrize("name", FIELDS)
def test_nothing_is_made_that_is_only_moved(name):
    u = np.random.default_rng(0).normal(size=SIZE)
    before = Lowered(FIELDS[name], u, apart=False).function
    after = forwarded(before)
    assert scratch(before)
    assert not scratch(after)
    np.testing.assert_array_equal(run(after, u), run(before, u))


def test_what_is_written_over_is_not_written_first():
    def field(u, p, t):
        return jnp.pad(u[2:] * u[2:], (2, 0)) * u

    u = np.arange(1.0, SIZE + 1)
    before = Lowered(field, u, apart=False).function
    after = forwarded(before)
    assert len(scratch(after)) < len(scratch(before))
    assert not any(isinstance(s.expr, ir.Const) for s in scratch(after)), "no zeros"
    np.testing.assert_array_equal(run(after, u), run(before, u))


def test_loops_are_split_in_few_parts():
    def many(u, p, t):
        return u + sum(jnp.roll(u, k) for k in range(1, 10))

    u = np.arange(20.0)
    before = Lowered(many, u, apart=False).function
    after = forwarded(before)
    assert len(after.body) <= len(before.body)
    np.testing.assert_array_equal(run(after, u), run(before, u))


@st.composite
def moves(draw):
    """Statements that move and change parts of memory, which may overlap."""

    def part(group, n):
        start = draw(st.integers(0, SIZE - n))
        first = draw(st.integers(0, start))
        return ir.Buffer(group, REAL, first, SIZE - first), start - first

    def statement(group, n):
        counts = draw(st.booleans())

        def index(offset):
            return ir.Index(offset, ((COUNTER, 1),) if counts else ())

        def number():
            if draw(st.integers(0, 5)) == 0:
                return ir.Const(np.float64(draw(st.integers(1, 9))))
            buffer, offset = part(draw(st.sampled_from(["u", "work", "work"])), n)
            return ir.Load(buffer, index(offset))

        how, x = draw(st.sampled_from(["move", "move", "neg", "sub"])), number()
        if how != "move":
            x = ir.Op(how, (x, number()) if how == "sub" else (x,), REAL)
        buffer, offset = part(group, n)
        store = ir.Store(buffer, index(offset), x)
        if not counts and draw(st.booleans()):
            return store
        return ir.For(COUNTER, n, (store,))

    begin = ir.For(COUNTER, SIZE, (computed("work"),))
    sizes = draw(st.lists(st.integers(1, SIZE), min_size=1, max_size=6))
    body = [begin, *(statement("work", n) for n in sizes)]
    body += [
        ir.For(COUNTER, SIZE, (copy("out", "work"),)),
        statement("out", draw(st.integers(1, 8))),
    ]
    return ir.Function(tuple(body), (), SIZE, REAL, ((REAL, SIZE),), ())


def computed(to):
    """What isn't only moved."""
    store = copy(to, "u")
    return dataclasses.replace(
        store, expr=ir.Op("sub", (store.expr, ir.Const(np.float64(3))), REAL)
    )


def copy(to, source):
    index = ir.Index(0, ((COUNTER, 1),))
    whole = ir.Load(ir.Buffer(source, REAL, 0, SIZE), index)
    return ir.Store(ir.Buffer(to, REAL, 0, SIZE), index, whole)


@settings(max_examples=150, deadline=None)
@given(moves())
def test_any_moves(fn):
    u = np.arange(1.0, SIZE + 1) ** 2
    np.testing.assert_array_equal(run(forwarded(fn), u), run(fn, u))
