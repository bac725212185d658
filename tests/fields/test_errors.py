"""Functions that can't be translated, and the place that the error names."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ensembleode.fields import UntranslatableError

from .lowered import Lowered


U = np.array([0.3, 1.2, 0.7])


def positive(u):
    return jnp.outer(u, u) + jnp.eye(3)


def root(u):
    return jnp.linalg.eigvalsh(positive(u))


# Each with the primitive that it is known by, in one line.
REFUSED = {
    "fft": (lambda u, p, t: u + abs(jnp.fft.rfft(u, 128)[0]), "the primitive fft"),
    "eigenvalues": (lambda u, p, t: jnp.linalg.eigvalsh(positive(u)), "the primitive eigh"),
    "values": (lambda u, p, t: jnp.linalg.svdvals(positive(u)), "the primitive svd"),
    "again": (lambda u, p, t: 2 * jnp.linalg.svdvals(positive(u)), "the primitive svd"),
    "complex": (lambda u, p, t: jnp.real(jnp.sort(lax.complex(u, u))), "sort of complex numbers"),
    "converted": (lambda u, p, t: jnp.real(jnp.sort(u.astype("c16"))), "sort of complex numbers"),
    "random": (
        lambda u, p, t: u + jax.random.normal(jax.random.key(0, impl="rbg"), (3,)),
        "the primitive rng_bit_generator",
    ),
    "callback": (lambda u, p, t: jax.pure_callback(np.sin, u, u), "the primitive pure_callback"),
    "print": (lambda u, p, t: (jax.debug.print("{}", u), u)[1], "the primitive debug_print"),
    "bfloat16": (lambda u, p, t: u.astype(jnp.bfloat16).astype(u.dtype), "bfloat16 numbers"),
}


def place(fn):
    """Where the code of a function is."""
    _, line = inspect.getsourcelines(fn)
    return f"{inspect.getsourcefile(fn)}:{line}"


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("name", REFUSED)
def test_names_the_primitive_and_the_line(name):
    fn, what = REFUSED[name]
    for field in (
        fn,
        lambda u, p, t: jax.jit(lambda x: fn(x, p, t))(u),
        lambda u, p, t: lax.cond(t > 0, lambda x: fn(x, p, t), lambda x: x, u),
        lambda u, p, t: lax.scan(lambda c, _: (fn(c, p, t), None), u, None, length=3)[0],
        lambda u, p, t: lax.while_loop(
            lambda c: c[0] < 1, lambda c: fn(jax.jit(jnp.sin)(c), p, t), u
        ),
        lambda u, p, t: lax.fori_loop(0, 2, lambda i, x: jax.checkpoint(fn)(x, p, t), u),
    ):
        with pytest.raises(UntranslatableError) as caught:
            Lowered(field, U)
        if name == "print":  # its name is another one in each version
            assert caught.value.what.startswith("the primitive debug_")
        else:
            assert what in caught.value.what
        assert place(fn) in caught.value.where
        assert str(caught.value) == f"{caught.value.what} (at {caught.value.where})"


def test_what_is_not_used_is_not_refused():
    def fn(u, p, t):
        root(u)
        return lax.fori_loop(0, 2, lambda i, c: (jnp.sin(c[0]), c[1]), (u, root(u)))[0] * 2

    with pytest.raises(UntranslatableError, match="eigh"):  # a loop carries it
        Lowered(fn, U)
    assert Lowered(lambda u, p, t: (root(u), jnp.sin(u))[1], U).function.is_scalar
    # Part of the derivative's program, and of nothing else.
    Lowered(lambda u, p, t: jax.grad(lambda u: jnp.max(u) ** 2)(u), U)
