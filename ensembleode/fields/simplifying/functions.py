"""Rules for functions that are loops, or long sums, of elementary ones.

JAX itself lowers most of them from functions in Python, and those are used here where they exist.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from .writing import function


def _register(name: str, fn: Callable) -> None:
    @function(name)
    def _(eqn: Any, *args: Any) -> list:
        aval = eqn.outvars[0].aval
        args = tuple(jnp.broadcast_to(x, aval.shape) for x in args)
        return [fn(*args, **{} if name == "bessel_i0e" else {"dtype": aval.dtype})]


# (If a version of JAX has these functions elsewhere, there are no rules for them.)
_OF_JAX = ("bessel_i0e", "igamma", "igamma_grad_a", "igammac", "regularized_incomplete_beta")
with contextlib.suppress(ImportError):
    _special = importlib.import_module("jax._src.lax.special")
    for _name in _OF_JAX:
        if (_fn := getattr(_special, f"{_name}_impl", None)) is not None:
            _register(_name, _fn)


#
# Functions that JAX leaves to XLA
#

# (Moshier, Cephes Mathematical Library, 1989: `i1e`, on [0, 8] and on [8, inf).)
_I1E_NEAR = """
    2.77791411276104639959e-18 -2.11142121435816608115e-17 1.55363195773620046921e-16
    -1.10559694773538630805e-15 7.60068429473540693410e-15 -5.04218550472791168711e-14
    3.22379336594557470981e-13 -1.98397439776494371520e-12 1.17361862988909016308e-11
    -6.66348972350202774223e-11 3.62559028155211703701e-10 -1.88724975172282928790e-9
    9.38153738649577178388e-9 -4.44505912879632808065e-8 2.00329475355213526229e-7
    -8.56872026469545474066e-7 3.47025130813767847674e-6 -1.32731636560394358279e-5
    4.78156510755005422638e-5 -1.61760815825896745588e-4 5.12285956168575772895e-4
    -1.51357245063125314899e-3 4.15642294431288815669e-3 -1.05640848946261981558e-2
    2.47264490306265168283e-2 -5.29459812080949914269e-2 1.02643658689847095384e-1
    -1.76416518357834055153e-1 2.52587186443633654823e-1
"""
_I1E_FAR = """
    7.51729631084210481353e-18 4.41434832307170791151e-18 -4.65030536848935832153e-17
    -3.20952592199342395980e-17 2.96262899764595013876e-16 3.30820231092092828324e-16
    -1.88035477551078244854e-15 -3.81440307243700780478e-15 1.04202769841288027642e-14
    4.27244001671195135429e-14 -2.10154184277266431302e-14 -4.08355111109219731823e-13
    -7.19855177624590851209e-13 2.03562854414708950722e-12 1.41258074366137813316e-11
    3.25260358301548823856e-11 -1.89749581235054123450e-11 -5.58974346219658380687e-10
    -3.83538038596423702205e-9 -2.63146884688951950684e-8 -2.51223623787020892529e-7
    -3.88256480887769039346e-6 -1.10588938762623716291e-4 -9.76109749136146840777e-3
    7.78576235018280120474e-1
"""


def _chebyshev(x: Array, coefficients: str) -> Array:
    """A sum of Chebyshev polynomials of `x / 2`, of which the last coefficient is doubled."""
    now, before, last = (jnp.zeros_like(x) for _ in range(3))
    for c in map(float, coefficients.split()):
        now, before, last = x * now - before + c, now, before
    return 0.5 * (now - last)


@function("bessel_i1e")
def _bessel_i1e(eqn: JaxprEqn, x: Array) -> list:
    size = jnp.abs(x)
    near = _chebyshev(0.5 * size - 2, _I1E_NEAR) * size
    far = _chebyshev(32 / size - 2, _I1E_FAR) / jnp.sqrt(size)
    return [jnp.sign(x) * jnp.where(size <= 8, near, far)]


# The Bernoulli numbers `B[2 k] / (2 k)!`, inverted.
_INVERSE_BERNOULLI = (
    *(12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10),
    *(-2.950130727918164224e12, 1.1646782814350067249e14, -4.5979787224074726105e15),
    *(1.8152105401943546773e17, -7.1661652561756670113e18),
)


@function("zeta")
def _zeta(eqn: JaxprEqn, x: Array, q: Array) -> list:
    """Hurwitz's zeta function: ten terms, and the rest by the formula of Euler and Maclaurin."""
    total = term = q**-x
    for _ in range(9):
        q = q + 1
        term = q**-x
        total = total + term
    total = total + term * q / (x - 1) - 0.5 * term
    factor = x * term / q
    for i, b in enumerate(_INVERSE_BERNOULLI):
        total = total + factor / b
        factor = factor * ((x + 2 * i + 1) / q) * ((x + 2 * i + 2) / q)
    q = q - 9
    is_pole = (q <= 0) & (q == jnp.floor(q))
    total = jnp.where(is_pole, jnp.where(jnp.fmod(x, 2) == 0, jnp.inf, jnp.nan), total)
    total = jnp.where((q <= 0) & ~is_pole & (x != jnp.floor(x)), jnp.nan, total)
    return [jnp.where(x < 1, jnp.nan, jnp.where(x == 1, jnp.inf, total))]
