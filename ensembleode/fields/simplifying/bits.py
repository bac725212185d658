"""Rules for primitives that work on the bits of numbers: random ones, and roundings."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jaxtyping import PyTree

from .writing import rule


@rule("threefry2x32", apart=True)
def _threefry2x32(eqn: Any, key1: Any, key2: Any, x1: Any, x2: Any) -> list:
    """Two words scrambled by two of a key, in 20 rounds. (Salmon, Moraes, Dror and Shaw, Parallel
    random numbers: as easy as 1, 2, 3, 2011.)"""
    shape = eqn.outvars[0].aval.shape
    keys = [key1, key2, key1 ^ key2 ^ np.uint32(0x1BD11BDA)]
    keys = [jnp.broadcast_to(k, shape) for k in keys]
    x1, x2 = x1 + keys[0], x2 + keys[1]
    for i in range(5):
        for n in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x1 = x1 + x2
            rotated = lax.shift_left(x2, lax.full_like(x2, n))
            x2 = x1 ^ (rotated | lax.shift_right_logical(x2, lax.full_like(x2, 32 - n)))
        x1, x2 = x1 + keys[(i + 1) % 3], x2 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return [x1, x2]


@rule("iota_2x32_shape", apart=True)
def _iota_2x32_shape(eqn: JaxprEqn) -> list:
    """The numbers of components, each in two words."""
    shape = eqn.params["shape"]
    counts = lax.iota(np.uint64, int(np.prod(shape))).reshape(shape)
    upper = lax.shift_right_logical(counts, lax.full_like(counts, 32))
    return [upper.astype(np.uint32), counts.astype(np.uint32)]


@rule("mulhi")
def _mulhi(eqn: Any, x: Any, y: PyTree) -> list:
    """The upper half of the bits of a product."""
    dtype = eqn.outvars[0].aval.dtype
    n = 8 * dtype.itemsize
    if n < 64:
        product = x.astype(f"{dtype.kind}{n // 4}") * y.astype(f"{dtype.kind}{n // 4}")
        return [lax.shift_right_arithmetic(product, lax.full_like(product, n)).astype(dtype)]
    (x1, x0), (y1, y0) = _halves(x), _halves(y)
    middle1, middle0 = _halves(x1 * y0)
    other1, other0 = _halves(x0 * y1)
    carried, _ = _halves(_halves(x0 * y0)[0] + middle0 + other0)
    upper = (x1 * y1 + middle1 + other1 + carried).astype(dtype)
    if dtype.kind == "i":  # read as unsigned, a negative number is too large by 2^64
        upper = upper - jnp.where(x < 0, y, 0) - jnp.where(y < 0, x, 0)
    return [upper]


def _halves(x: Any) -> tuple[Array, Array]:
    x = x.astype(np.uint64)
    upper = lax.shift_right_logical(x, lax.full_like(x, 32))
    return upper, x & np.uint64(2**32 - 1)


@rule("reduce_precision")
def _reduce_precision(eqn: JaxprEqn, x: Array) -> list:
    """A number rounded to one of fewer bits, as XLA rounds: to the nearest one, of two the even
    one; to an infinity beyond the largest one, and to zero below the smallest normal one."""
    info, params = np.finfo(x.dtype), eqn.params
    kind = np.dtype(f"u{x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, kind)
    sign = kind.type(1 << (8 * kind.itemsize - 1))
    n, kept = info.nmant, params["mantissa_bits"]
    if kept < n:
        last = lax.shift_right_logical(bits, lax.full_like(bits, n - kept)) & kind.type(1)
        bits = bits + last + kind.type((1 << (n - kept - 1)) - 1)
        bits = bits & kind.type(~((1 << (n - kept)) - 1) % (1 << (8 * kind.itemsize)))
    if params["exponent_bits"] < info.nexp:
        own, other = ((1 << (e - 1)) - 1 for e in (info.nexp, params["exponent_bits"]))
        exponent = lax.shift_right_logical(bits & ~sign, lax.full_like(bits, n))
        infinite = kind.type(((1 << info.nexp) - 1) << n)
        bits = jnp.where(exponent > own + other, (bits & sign) | infinite, bits)
        bits = jnp.where(exponent <= own - other, bits & sign, bits)
    return [jnp.where(x == x, lax.bitcast_convert_type(bits, x.dtype), x)]
