"""Programs with a variable for each component, compared with JAX."""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from ensembleode.fields.scalarise import scalarise

from ..marks import slow_unless
from ..problems import lorenz
from .cases import CASES, FIELDS, INTS, M, X
from .drawn import DRAWN, reals


quick = settings(max_examples=5, deadline=None, derandomize=True, database=None)
# Of newer versions of JAX.
NEW = {"log2", "mulhi", "one_minus_square", "polynomial", "stack", "unstack"}
# What has no scalar program: numbers that are not real.
NOT_SCALAR = {"complex", "conj", "imag", "real"}


def closed_of(fn, *args):
    return jax.make_jaxpr(fn)(*args)


def components(arrays):
    return [x[None] for array in arrays for x in jnp.asarray(array).ravel()]


def scalar_program(closed):
    """The scalar program, as a function of the arguments; None if there is none."""
    program = scalarise(closed.jaxpr)
    if program is None:
        return None

    def run(*args):
        entries = iter(jax.core.eval_jaxpr(program, (), *components([*closed.consts, *jtu.tree_leaves(args)])))
        outs = [v.aval for v in closed.jaxpr.outvars]
        rows = [[next(entries) for _ in range(x.size)] for x in outs]
        return [
            jnp.concatenate(row).reshape(x.shape) if row else jnp.zeros(x.shape, x.dtype)
            for row, x in zip(rows, outs, strict=True)
        ]

    return program, run


def agree(fn, *args, rtol=1e-13):
    """The scalar program and the function; whether there is a program."""
    closed = closed_of(fn, *args)
    found = scalar_program(closed)
    if found is None:
        return False
    program, run = found
    for v in (*program.constvars, *program.invars, *program.outvars):
        assert v.aval.shape == (1,)
    expected = jtu.tree_leaves(jax.jit(fn)(*args))
    for x, want in zip(jax.jit(run)(*args), expected, strict=True):
        assert (x.shape, x.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(np.asarray(x), np.asarray(want), rtol=rtol, atol=rtol)
    return True
