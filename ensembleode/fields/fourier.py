"""Discrete Fourier transforms of short lengths, of real and imaginary parts, written out as sums.

A transform whose length is a product is made of transforms of the factors' lengths (Cooley and
Tukey, "An algorithm for the machine calculation of complex Fourier series", Math. Comput. 1965).
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from . import tuning


def is_short(n: int) -> bool:
    """Whether a transform of this length is written out."""
    primes = [k for k in range(2, n + 1) if n % k == 0 and all(k % i for i in range(2, k))]
    return (
        n <= tuning.LONGEST_TRANSFORM and max(primes, default=1) <= tuning.LONGEST_PRIME_TRANSFORM
    )


def transformed(eqn: Any, x: Any) -> PyTree:
    """The result of an `fft` equation: a tuple of real and imaginary parts, or an array where it is
    real. `x` is such a tuple, or an array."""
    params, out = eqn.params, eqn.outvars[0].aval
    kind = str(getattr(params["fft_type"], "name", params["fft_type"])).rpartition(".")[2]
    lengths, last = params["fft_lengths"], len(out.shape) - 1
    others = range(last + 1 - len(lengths), last)
    if kind == "RFFT":
        x = [y[..., : out.shape[-1]] for y in _along_axis((x, lax.full_like(x, 0)), last)]
    is_forwards = kind in ("FFT", "RFFT")
    for axis in [*others, last] if kind in ("FFT", "IFFT") else others:
        x = _along_axis(x, axis, is_forwards=is_forwards)
    if kind != "IRFFT":
        return tuple(x)
    n = lengths[-1]
    k = lax.iota(jnp.int32, n // 2 + 1)
    real = (k == 0) | (2 * k == n)  # whose imaginary parts don't count
    half = [x[0], jnp.where(real, 0, x[1])]
    whole = [
        jnp.concatenate([y, sign * y[..., 1 : (n + 1) // 2][..., ::-1]], axis=-1)
        for y, sign in zip(half, (1, -1), strict=True)
    ]
    return _along_axis(whole, last, is_forwards=False)[0]


def _along_axis(x: Sequence, axis: int, *, is_forwards: bool = True) -> Sequence:
    """The transform along an axis; backwards it is the inverse."""
    re, im = (jnp.moveaxis(y, axis, 0) for y in x)
    n = re.shape[0]
    if is_forwards:
        re, im = _transform(re, im)
    else:
        im, re = (y * (1 / n) for y in _transform(im, re))
    return [jnp.moveaxis(y, 0, axis) for y in (re, im)]


def _transform(re: Array, im: Array) -> tuple[Array, Array]:
    """The transform along the first axis."""
    n = re.shape[0]
    first = max((k for k in range(2, tuning.LONGEST_WHOLE_TRANSFORM + 1) if n % k == 0), default=n)
    if n <= tuning.LONGEST_WHOLE_TRANSFORM or first == n:
        return _written_out(re, im)
    # With j = j1 + first j2, the sums over j2 come first, for each j1.
    second = n // first
    parts = [x.reshape(second, first, *x.shape[1:]) for x in (re, im)]
    re, im = _transform(*parts)
    rows = [[_turned(re[k, j], im[k, j], j * k, n) for j in range(first)] for k in range(second)]
    parts = [jnp.stack([jnp.stack([x[i] for x in row]) for row in rows], axis=1) for i in range(2)]
    return tuple(x.reshape(n, *x.shape[2:]) for x in _transform(*parts))  # type: ignore[return-value]


def _written_out(re: Array, im: Array) -> tuple[Array, Array]:
    n = re.shape[0]
    rows = [[_turned(re[j], im[j], j * k, n) for j in range(n)] for k in range(n)]
    sums = [[functools.reduce(operator.add, x) for x in zip(*row, strict=True)] for row in rows]
    re, im = (jnp.stack(x) for x in zip(*sums, strict=True))
    return re, im


def _turned(re: Array, im: Array, k: int, n: int) -> tuple[Array, Array]:
    """A number times `exp(-2 pi i k / n)`."""
    match 4 * (k % n) / n:
        case 0:
            return re, im
        case 1:
            return im, -re
        case 2:
            return -re, -im
        case 3:
            return -im, re
    c, s = math.cos(2 * math.pi * k / n), math.sin(2 * math.pi * k / n)
    return c * re + s * im, c * im - s * re
