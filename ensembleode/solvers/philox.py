"""Random numbers from counters: words of the generator Philox 4x32-10, as numbers from 0 to 1, or
in pairs, each of which Box and Muller's method makes two normal numbers of.

They are a function of a key and a counter alone. So a number of a stream needs no number before it,
and is the same in whichever order, batch or engine it is computed. One block of four words makes
four numbers, in float32 and float64 alike, so that both have the same path, but for rounding. With
32 bits for the radius, no normal number is larger than 6.77, as one in 10^11 would be.

Neighbouring steps share blocks where each takes few numbers (see `steps_per_group`).

The formulas are written once, over the operations that JAX arrays and the values of generated code
share.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC '11), section 3.3; Box and
Muller, "A note on the generation of random normal deviates" (1958).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from .arithmetic import JaxArithmetic, Number


_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
# The largest number of normal numbers of a step with which steps share blocks. (Of more, the last
# block of each is a small part; and lanes remember the numbers of a group, in fast memory.)
_MOST_SHARED = 5


def philox(product: Callable[[Number, int], tuple], key: tuple, counter: tuple) -> tuple:
    """The four words of a counter of four words, with a key of two.

    **Arguments:** `product(x, m)`: the upper and the lower 32 bits of the product of two words.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for i in range(_ROUNDS):
        if i:
            k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
        (high0, low0), (high1, low1) = product(c0, _MULTIPLIERS[0]), product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def box_muller(
    xp: Any, log: Callable, radius: Number, angle: Number, dtype: DTypeLike
) -> tuple[Number, Number]:
    """Two normal numbers from two words, by the operations `cast`, `where`, `equal` and `sqrt` of
    `xp`, as of an `Arithmetic`, and the logarithm of numbers from `2^-33` to 1."""
    uniform = (xp.cast(radius, dtype) + 0.5) * 2.0**-32
    length = xp.sqrt(log(uniform) * -2.0)
    # The two highest bits of the angle are its quadrant; Taylor's polynomials are for the angle
    # within it, at most a quarter of pi.
    turned = angle + (1 << 29)
    quadrant = turned >> 30
    within = xp.cast(turned & ((1 << 30) - 1), np.dtype(np.int32)) - (1 << 29)
    x = xp.cast(within, dtype) * (2 * math.pi / 2**32)
    square, terms = x * x, 5 if np.dtype(dtype).itemsize == 4 else 9
    sine, cosine = (
        _polynomial(square, [(-1) ** k / math.factorial(2 * k + odd) for k in range(terms)])
        for odd in (1, 0)
    )
    sine = sine * x
    swapped = xp.equal(quadrant & 1, 1)
    s, c = xp.where(swapped, cosine, sine), xp.where(swapped, sine, cosine)
    s = xp.where(quadrant >= 2, -s, s)
    c = xp.where(xp.equal((quadrant + 1) & 2, 2), -c, c)
    return length * c, length * s


def uniform(xp: Any, word: Number, dtype: DTypeLike) -> Number:
    """A number from 0 to 1 (without 1) of as many bits of a word as its dtype holds exactly."""
    lost = 8 if np.dtype(dtype).itemsize == 4 else 0
    return xp.cast(word >> lost if lost else word, dtype) * 2.0 ** (lost - 32)


def _polynomial(x: Number, coefficients: list[float]) -> Number:
    *rest, value = coefficients
    for c in reversed(rest):
        value = x * value + c
    return value


#
# A number of a block, as a primitive of JAX that acts component by component
#


def _by_halves(x: Number, m: int) -> tuple[Number, Number]:
    """The halves of a product, from products of 16 bits, as JAX may have no 64."""
    y0, y1 = m & 0xFFFF, m >> 16
    x0, x1 = x & 0xFFFF, x >> 16
    middle = x1 * y0 + (x0 * y0 >> 16)
    other = x0 * y1 + (middle & 0xFFFF)
    return x1 * y1 + (middle >> 16) + (other >> 16), x * np.uint32(m)


def _normal(*operands: Number, which: int, dtype: DTypeLike) -> Number:
    words = philox(_by_halves, operands[:2], operands[2:])
    radius, angle = words[which // 2 * 2 :][:2]
    return box_muller(JaxArithmetic(), jnp.log, radius, angle, dtype)[which % 2]


def _normal_of_step(*operands: Number, which: int, each: int, dtype: DTypeLike) -> Number:
    k0, k1, step, index, stream = operands
    group = np.uint32(steps_per_group(each))
    number = step % group * np.uint32(each) + np.uint32(which)
    words = philox(_by_halves, (k0, k1), (step // group, number >> 2, index, stream))
    second, odd = (number & 2) != 0, (number & 1) != 0
    radius, angle = (jnp.where(second, words[2 + i], words[i]) for i in range(2))
    even, other = box_muller(JaxArithmetic(), jnp.log, radius, angle, dtype)
    return jnp.where(odd, other, even)


def _uniform(*operands: Number, which: int, dtype: DTypeLike) -> Number:
    words = philox(_by_halves, operands[:2], operands[2:])
    return uniform(JaxArithmetic(), words[which], dtype)


def primitive_of_numbers(name: str, number: Callable, words: int, *static: str) -> Any:
    """A primitive whose results are random numbers, each of so many words, of which the first two
    are a key: `number(*words, dtype=..., **static)`, component by component."""

    def computed(*operands: Number, **params: Any) -> list:
        return [number(*operands, **params)]

    def abstract(*operands: Number, dtype: DTypeLike, **params: Any) -> Number:
        # (Where it is mapped, some operands may be single words.)
        return jax.core.ShapedArray(np.broadcast_shapes(*(x.shape for x in operands)), dtype)

    made: Any = jex.Primitive(name)
    made.def_impl(jax.jit(number, static_argnames=("dtype", *static)))
    made.def_abstract_eval(abstract)
    mlir.register_lowering(made, mlir.lower_fun(computed, multiple_results=True))
    batching.defbroadcasting(made)
    ad.defjvp(made, *[None] * words)
    return made


_normal_p = primitive_of_numbers("philox_normal", _normal, 6, "which")
_uniform_p = primitive_of_numbers("philox_uniform", _uniform, 6, "which")
# (The compiled engine remembers the numbers of a group of steps.)
_normal_of_step_p = primitive_of_numbers(
    "philox_normal_of_step", _normal_of_step, 5, "which", "each"
)


def normals(key: Number, place: tuple[Number, Number, Number], n: int, dtype: DTypeLike) -> Number:
    """`n` independent standard normal numbers, `[n]`, of which the first are the same for any `n`.

    **Arguments:** `key [2]`, `place`: three numbers of 32 bits without sign, on which the numbers
    depend.
    """
    return _drawn(_normal_p, key, place, n, dtype)


def steps_per_group(each: int) -> int:
    """How many steps share blocks of four numbers, of which each takes `each`: as many as leave no
    number over. A step's numbers follow those of the one before it in the group."""
    return 4 // math.gcd(4, each) if each <= _MOST_SHARED else 1


def normals_of_step(
    key: Number, place: tuple[Number, Number, Number], n: int, dtype: DTypeLike
) -> Number:
    """`n` independent standard normal numbers of a step, `[n]`.

    **Arguments:** as of `normals`; the first number of the `place` is that of the step.
    """
    if steps_per_group(n) == 1:
        return normals(key, place, n, dtype)
    operands, dtype = (key[0], key[1], *place), np.dtype(dtype)
    found = [_normal_of_step_p.bind(*operands, which=i, each=n, dtype=dtype) for i in range(n)]
    return jnp.stack(found)


def uniforms(key: Number, place: tuple[Number, Number, Number], n: int, dtype: DTypeLike) -> Number:
    """`n` independent numbers that are evenly distributed from 0 to 1 (without 1), `[n]`; for the
    arguments see `normals`."""
    return _drawn(_uniform_p, key, place, n, dtype)


def _drawn(primitive: Any, key: Number, place: tuple, n: int, dtype: DTypeLike) -> Number:
    blocks = jnp.arange(-(-n // 4), dtype=jnp.uint32)
    zeros = jnp.zeros_like(blocks)
    first, *rest = (zeros + x for x in place)
    operands = zeros + key[0], zeros + key[1], first, blocks, *rest
    dtype = np.dtype(dtype)
    found = [primitive.bind(*operands, which=i, dtype=dtype) for i in range(min(4, n))]
    return jnp.stack(found, axis=1).reshape(-1)[:n]
