"""A Brownian path as a tree of pieces: the whole time span, its halves, their halves and so on.

Of each piece there are, for every noise, the increment `w` of the path, and `a`, the integral of
the path within the piece less that of a straight line, over the piece's length. These decide those
of its halves, but for two normal numbers, which are a function of the trajectory's key and of the
piece alone. So the path depends on no step size.

Lengths and times are whole numbers of units, of which the time span has `units_of`. A piece has a
number: 1 is the whole span, and the halves of number n are 2n and 2n + 1.

Source: Foster, Lyons and Oberhauser, "An optimal polynomial approximation of Brownian motion",
SIAM J. Numer. Anal. 58(3), 2020; Jelincic, Foster and Kidger, arXiv:2405.06464 (2024).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .arithmetic import Mask, Number
from .philox import normals, primitive_of_numbers


# The standard deviation of `a` in a piece of the length 1.
SPREAD = (1 / 12) ** 0.5


def units_of(dtype: DTypeLike) -> int:
    """How many units the time span has that adaptive steps are made of."""
    return 2**20 if np.dtype(dtype).itemsize == 4 else 2**30


def halves(
    w: Number, a: Number, root: Number, first: Number, second: Number
) -> tuple[tuple, tuple]:
    """The numbers `(w, a)` of the left and of the right half of a piece with the numbers `w` and
    `a`. `root`: the square root of the piece's length; `first`, `second`: normal numbers."""
    moved = 1.5 * a + (0.25 * root) * first
    # The sum of both halves' `a` is known, and their difference is drawn.
    rest, own = a - 0.5 * moved, (root * (1 / 48) ** 0.5) * second
    half = 0.5 * w
    return (half + moved, rest + own), (half - moved, rest - own)


def piece(
    key: Number,
    index: Number,
    stream: Number,
    start: Number,
    length: Number,
    n: int,
    dtype: DTypeLike,
) -> Number:
    """The numbers `[2, n]` of a piece for `n` noises, `w` and then `a`, over the square root of the
    time span.

    **Arguments:** `key [2]`, `index`, `stream`: numbers of 32 bits without sign, on which the path
    depends; `start`, `length`: the piece, in units.
    """
    operands = key[0], key[1], index, stream, start, length
    dtype = np.dtype(dtype)
    found = [_piece_p.bind(*operands, which=i, noises=n, dtype=dtype) for i in range(2 * n)]
    return jnp.stack(found).reshape(2, n)


def _number(*operands: Number, which: int, noises: int, dtype: DTypeLike) -> Any:
    words = jnp.broadcast_arrays(*operands)

    def number(first: Number, second: Number, *others: Number) -> Number:
        return from_the_root((first, second), *others, noises, dtype).reshape(-1)[which]

    return jax.vmap(number)(*(x.reshape(-1) for x in words)).reshape(words[0].shape)


def from_the_root(
    key: Number,
    index: Number,
    stream: Number,
    start: Number,
    last: Number,
    n: int,
    dtype: DTypeLike,
) -> Number:
    """What `piece` returns, by halving the pieces that it is in, from the whole span on."""
    units = units_of(dtype)

    def drawn(number: Number) -> Number:
        return normals(key, (number, index, stream), 2 * n, dtype).reshape(2, n)

    def goes_on(carry: tuple) -> Mask:
        return carry[0] > last

    def halved(carry: tuple) -> tuple:
        length, number, w, a = carry
        root = jnp.sqrt(length.astype(dtype) * (1 / units))
        left, right = halves(w, a, root, *drawn(number))
        half = length >> 1
        is_right = (start & half) != 0
        w, a = (jnp.where(is_right, y, x) for x, y in zip(left, right, strict=True))
        return half, (number << 1) + is_right.astype(jnp.uint32), w, a

    w, a = drawn(jnp.uint32(0))
    whole = jnp.uint32(units), jnp.uint32(1), w, SPREAD * a
    *_, w, a = jax.lax.while_loop(goes_on, halved, whole)
    return jnp.stack([w, a])


# (The compiled engine remembers pieces, instead of beginning with the whole span each time.)
_piece_p = primitive_of_numbers("brownian_piece", _number, 6, "which", "noises")
