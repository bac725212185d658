"""Functions that are written out as loops, for targets that have none of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ensembleode.fields.simplifying import FUNCTIONS

from ..marks import slow_unless
from .drawn import reals
from .test_primitives import agree_on


X, Y = np.array([0.2, 0.9, 3.0, 11.0, 1e-9]), np.array([0.3, 4.0, 2.5, 9.0, 0.0])
UNIT = np.array([0.1, 0.5, 0.9, 0.0, 1.0])
ALL = np.array([-20.0, -8.0, -3.0, -0.5, -1e-9, 0.0, 1e-12, 0.7, 2.0, 7.9, 8.1, 40.0, 1e4])
CASES = {
    "bessel_i0e": (lax.bessel_i0e, ALL),
    "bessel_i1e": (lax.bessel_i1e, ALL),
    "igamma": (lax.igamma, X, Y),
    "igamma_grad_a": (lax.igamma_grad_a, X, Y),
    "igammac": (lax.igammac, X, Y),
    "regularized_incomplete_beta": (lax.betainc, X, Y[::-1] + 0.1, UNIT),
    "zeta": (lax.zeta, 1.1 + X, 0.1 + Y),
}


def test_every_function_has_a_case():
    assert set(FUNCTIONS) == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_values(name):
    fn, *args = CASES[name]
    agree_on(fn, *args, functions=True)


@pytest.mark.parametrize("name", [slow_unless(x == "igamma", x) for x in sorted(CASES)])
def test_single_precision(name):
    fn, *args = CASES[name]
    args = [x.astype(np.float32) for x in args]
    agree_on(fn, *args, functions=True, rtol=1e-4, storage=np.float32, t=np.float32(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.scipy.special.gammainc(1 + x, 2 * x),
        lambda x: jax.scipy.special.betainc(1.5, 2.0, x / 20),
        lambda x: jax.scipy.special.i0e(x) * jax.scipy.special.i1(x),
    ],
)
def test_derivatives(fn):
    x = reals(4, low=0.5, high=3.0)
    agree_on(jax.grad(lambda x: jnp.sum(jnp.sin(fn(x)))), x, functions=True)
    agree_on(lambda x: jax.jvp(fn, (x,), (jnp.cos(x),))[1], x, functions=True)
