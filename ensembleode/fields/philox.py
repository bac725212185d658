"""Random numbers from counters: the generator Philox 4x32-10, and normal numbers made of its words.

The words are a function of a key and a counter alone. So a number of a stream needs no number
before it, and is the same in whichever order, batch or engine it is computed.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC '11), section 3.3.
"""

import math
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir


_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

#
# The upper half of a product, for which JAX has no operation
#


def _by_halves(x: Any, y: Any) -> tuple:
    """The upper 32 bits of a product, from products of 16 bits."""
    low, shift = np.uint32(0xFFFF), np.uint32(16)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    other = x0 * y1 + (middle & low)
    return (x1 * y1 + (middle >> shift) + (other >> shift),)


_umulhi_p: Any = jex.Primitive("umulhi")
_umulhi_p.def_impl(jax.jit(lambda x, y: _by_halves(x, y)[0]))
_umulhi_p.def_abstract_eval(lambda x, y: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_umulhi_p, mlir.lower_fun(_by_halves, multiple_results=True))
batching.defbroadcasting(_umulhi_p)
ad.defjvp(_umulhi_p, None, None)


def umulhi(x: Any, y: Any) -> Any:
    """The upper 32 bits of the products of numbers of 32 bits without sign."""
    x, y = jnp.broadcast_arrays(jnp.asarray(x, jnp.uint32), jnp.asarray(y, jnp.uint32))
    return _umulhi_p.bind(x, y)


def philox(key: Any, counter: tuple) -> tuple:
    """The four words of each counter, arrays like those of the counter.

    **Arguments:** `key [2]`, `counter`, four arrays of one shape: numbers of 32 bits without sign.
    """
    k0, k1 = key[0], key[1]
    c0, c1, c2, c3 = counter
    for i in range(_ROUNDS):
        if i:
            k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
        m0, m1 = (np.uint32(m) for m in _MULTIPLIERS)
        high0, low0, high1, low1 = umulhi(c0, m0), c0 * m0, umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


#
# Normal numbers
#


def _sine_and_cosine(turn: Any, rest: Any, dtype: np.dtype) -> tuple[Any, Any]:
    """The sine and the cosine of the angle of `turn + 2^-32 rest` units of `2^-32` turns; the first
    is a number of 32 bits. Its two highest bits are the quadrant, and Taylor's polynomials are for
    the angle within it, at most a quarter of pi."""
    shifted = turn + np.uint32(1 << 29)
    quadrant = shifted >> np.uint32(30)
    within = (shifted & np.uint32((1 << 30) - 1)).astype(jnp.int32) - np.int32(1 << 29)
    x = (within.astype(dtype) + rest) * dtype.type(2 * math.pi / 2**32)
    square = x * x
    terms = 5 if dtype.itemsize == 4 else 9
    sine = cosine = jnp.zeros_like(x)
    for k in reversed(range(terms)):
        sine = sine * square + dtype.type((-1) ** k / math.factorial(2 * k + 1))
        cosine = cosine * square + dtype.type((-1) ** k / math.factorial(2 * k))
    sine = sine * x
    swapped = (quadrant & np.uint32(1)) == np.uint32(1)
    s, c = jnp.where(swapped, cosine, sine), jnp.where(swapped, sine, cosine)
    s = jnp.where(quadrant >= np.uint32(2), -s, s)
    return s, jnp.where((quadrant + np.uint32(1)) & np.uint32(2) == np.uint32(2), -c, c)


def _pair(radius: tuple, angle: tuple, dtype: np.dtype) -> tuple[Any, Any]:
    """Two independent normal numbers from words, the higher one first (Box and Muller, 1958)."""
    unit = dtype.type(2.0**-32)
    more = [(low.astype(dtype) + dtype.type(0.5)) * unit for low in (radius[1:] + angle[1:])]
    of_radius, of_angle = more if more else (dtype.type(0.5), dtype.type(0.0))
    uniform = (radius[0].astype(dtype) + of_radius) * unit
    length = jnp.sqrt(dtype.type(-2.0) * jnp.log(uniform))
    sine, cosine = _sine_and_cosine(angle[0], of_angle, dtype)
    return length * cosine, length * sine


def normals(key: Any, place: Any, stream: int, n: int, dtype: Any) -> Any:
    """`n` independent standard normal numbers, `[n]`.

    **Arguments:** `key [2]`, `place []`: numbers of 32 bits without sign, on which the numbers
    depend, as on the number of the `stream`. In float32 each number is made of 32 random bits, and
    in float64 of 64.
    """
    dtype = np.dtype(dtype)
    each = 4 * 4 // dtype.itemsize  # numbers of a block of four words
    blocks = -(-n // each)
    block = jnp.arange(blocks, dtype=jnp.uint32)
    zeros = jnp.zeros(blocks, jnp.uint32)
    counter = zeros + place, block, zeros + np.uint32(stream), zeros
    a, b, c, d = philox(key, counter)
    if dtype.itemsize == 4:
        found = (*_pair((a,), (b,), dtype), *_pair((c,), (d,), dtype))
    else:
        found = _pair((a, b), (c, d), dtype)
    return jnp.stack(found, axis=1).reshape(-1)[:n]
