"""Statistics of each component of arrays `[trajectory, ...]`, under the names of SciML's
EnsembleAnalysis.

All functions take and return arrays, and are jittable and differentiable. A value that is NaN is
missing: each statistic is over the trajectories that have a value (both values, for covariances),
so neither padding nor a failed trajectory spoils it. If too few trajectories have a value, the
statistic is NaN.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..ground.on_disk import OnDisk
from ..tracing.program import is_tracer


def own_precision(*arrays: Any) -> contextlib.AbstractContextManager:
    """Within this block, arrays in double precision keep it even where `jax_enable_x64` is off. A
    store may have been written where it was on."""
    numbers = (x for x in jtu.tree_leaves(arrays) if isinstance(x, OnDisk | jax.Array))
    is_wide = any(x.dtype in (np.float64, np.complex128) for x in numbers)
    is_off = not jax.config.read("jax_enable_x64")
    return jax.enable_x64(True) if is_off and is_wide else contextlib.nullcontext()


def in_own_precision(statistic: Callable) -> Callable:
    @functools.wraps(statistic)
    def computed(*args, **kwargs):
        with own_precision(*args):
            return statistic(*args, **kwargs)

    return computed


@in_own_precision
def componentwise_mean(A: Array | np.ndarray) -> Array | None:
    """The mean of each component over the trajectories.

    **Arguments:** `A`: `[trajectory, *state]`, NaN is missing.

    **Returns:** `[*state]`, NaN where no trajectory has a value.
    """
    return _mean(_as_samples(A))


def componentwise_median(A: Array | np.ndarray) -> Any:
    """The median of each component over the trajectories: `[*state]`.

    **Arguments:** `A`: `[trajectory, *state]`, NaN is missing.

    **Raises:** `TypeError` for complex states, which have no order.
    """
    return componentwise_quantile(A, 0.5)


@in_own_precision
def componentwise_quantile(A: Any, q: PyTree) -> Any:
    """The quantile `q` of each component over the trajectories.

    Linear between the order statistics (type 7 of Hyndman and Fan, "Sample quantiles in
    statistical packages", The American Statistician 50, 1996), as in Julia and NumPy.

    **Arguments:** `A`: `[trajectory, *state]`, NaN is missing. `q`: from 0 to 1, a number or `[n]`.

    **Returns:** `[*state]`, or `[n, *state]`.

    **Raises:** `TypeError` for complex states, which have no order; `ValueError` for a `q`
    outside of 0 to 1.
    """
    A = _as_samples(A)
    check_ordered(A)
    if not is_tracer(q) and not np.all((np.asarray(q) >= 0) & (np.asarray(q) <= 1)):
        raise ValueError(f"q must be from 0 to 1, got {q!r}.")
    return _quantile(A, jnp.asarray(q, A.dtype))


@in_own_precision
def componentwise_meanvar(A: Array | np.ndarray, bessel: bool = True) -> tuple:
    """The mean and the variance of each component over the trajectories.

    **Arguments:** `A`: `[trajectory, *state]`, NaN is missing. `bessel`: divide by n - 1 (else n).

    **Returns:** two arrays `[*state]`; the variance of a single trajectory is NaN.
    """
    return _meanvar(_as_samples(A), bool(bessel))


@in_own_precision
def componentwise_meancov(
    A: Array | np.ndarray, B: Array | np.ndarray, bessel: bool = True
) -> tuple:
    """The means of each component of A and of B, and their covariance.

    **Arguments:** `A`, `B`: `[trajectory, *state]`; a trajectory that is NaN in one is missing in
    both. `bessel`: divide by n - 1 (else n).

    **Returns:** three arrays `[*state]`.
    """
    return meancov(*_as_pairs(A, B), bool(bessel))


@in_own_precision
def componentwise_meancor(A: Array | np.ndarray, B: Array | np.ndarray) -> tuple:
    """The means of each component of A and of B, and their correlation (Pearson's).

    **Arguments:** `A`, `B`: `[trajectory, *state]`; a trajectory that is NaN in one is missing in
    both.

    **Returns:** three arrays `[*state]`; the correlation is NaN where one of them is constant.
    """
    return meancor(*_as_pairs(A, B))


@in_own_precision
def componentwise_weighted_meancov(
    A: Array | np.ndarray,
    B: Array | np.ndarray,
    W: Array | np.ndarray,
    weight_type: str = "reliability",
) -> tuple:
    """The weighted means of each component of A and of B, and their weighted covariance.

    **Arguments:**

    - `A`, `B`: `[trajectory, *state]`; a trajectory that is NaN in one is missing in both.
    - `W`: the weights, `[trajectory]` or `[trajectory, *state]`.
    - `weight_type`: what the sum of weighted products is divided by: V1 - V2/V1
        (`"reliability"`), V1 (`"population"`) or V1 - 1 (`"frequency"`: each weight says how
        often the trajectory counts), with V1 the sum of the weights and V2 that of their squares.

    **Returns:** three arrays `[*state]`.

    **Raises:** `ValueError` for weights of another shape, or another `weight_type`.
    """
    A, B = _as_pairs(A, B)
    weights: Any = jnp.asarray(W, A.dtype)
    if weights.shape not in (A.shape, A.shape[:1]):
        raise ValueError(
            f"W must have a weight for each of the {np.shape(A)[0]} trajectories, [trajectory] or "
            f"{list(A.shape)}; its shape is {weights.shape}."
        )
    if weight_type not in _DIVISORS:
        raise ValueError(f"weight_type must be one of {', '.join(_DIVISORS)}, got {weight_type!r}.")
    return _weighted_meancov(A, B, weights, weight_type)


# Each statistic is compiled as a whole: outside of `jit`, JAX would compile every operation.


@jax.jit
def _mean(A: Array) -> Array:
    there = ~jnp.isnan(A)
    return jnp.sum(jnp.where(there, A, 0), axis=0) / _count(there, A)


_quantile = jax.jit(functools.partial(jnp.nanquantile, axis=0))


@functools.partial(jax.jit, static_argnames="bessel")
def _meanvar(A: Array, bessel: bool = True) -> tuple:
    mean = _mean(A)
    there = ~jnp.isnan(A)
    # NaN would spread to the gradient, even if it is masked later.
    squares = jnp.abs(jnp.where(there, A - mean[None], 0)) ** 2
    return mean, jnp.sum(squares, axis=0) / _freedom(_count(there, squares), bessel)


@functools.partial(jax.jit, static_argnames="bessel")
def meancov(A: Array, B: Array, bessel: bool = True) -> tuple:
    A, B, there = _where_both_are(A, B)
    n = _count(there, A)
    mean_a, mean_b = jnp.sum(A, axis=0) / n, jnp.sum(B, axis=0) / n
    products = jnp.where(there, (A - mean_a[None]) * jnp.conj(B - mean_b[None]), 0)
    return mean_a, mean_b, jnp.sum(products, axis=0) / _freedom(n, bessel)


@jax.jit
def meancor(A: Array, B: Array) -> tuple:
    mean_a, mean_b, cov = meancov(A, B)
    a, b, there = _where_both_are(A, B)
    var_a, var_b = (_meanvar(jnp.where(there, x, jnp.nan))[1] for x in (a, b))
    return mean_a, mean_b, cov / (jnp.sqrt(var_a) * jnp.sqrt(var_b))


@functools.partial(jax.jit, static_argnames="weight_type")
def _weighted_meancov(A: Array, B: Array, weights: Array, weight_type: str) -> tuple:
    A, B, there = _where_both_are(A, B)
    weights = weights.reshape(weights.shape + (1,) * (A.ndim - weights.ndim))
    weights = jnp.where(there, weights, 0)
    total = jnp.sum(weights, axis=0)
    mean_a, mean_b = jnp.sum(weights * A, axis=0) / total, jnp.sum(weights * B, axis=0) / total
    products = jnp.sum(weights * (A - mean_a[None]) * jnp.conj(B - mean_b[None]), axis=0)
    return mean_a, mean_b, products / _DIVISORS[weight_type](weights, total)


_DIVISORS = {
    "reliability": lambda weights, total: total - jnp.sum(weights * weights, axis=0) / total,
    "population": lambda weights, total: total,
    "frequency": lambda weights, total: total - 1,
}


def check_ordered(A: Any) -> None:
    if jnp.iscomplexobj(A):
        raise TypeError(
            "complex states have no order, and so no quantiles: take real and imaginary parts as "
            "components, or use the means and variances."
        )


def _as_samples(A: Array | np.ndarray) -> Array | None:
    """`A` as an array of floating-point numbers, since counts have means, too."""
    A = jnp.asarray(A)
    if not A.ndim:
        raise ValueError("this is a statistic over the first axis, and a number has none.")
    return A if jnp.issubdtype(A.dtype, jnp.inexact) else A.astype(jnp.result_type(float))


def _as_pairs(A: Any, B: Any) -> tuple:
    A, B = _as_samples(A), _as_samples(B)
    if A.shape != B.shape:
        raise ValueError(f"A and B must be of one shape, got {A.shape} and {B.shape}.")
    return A, B


def _where_both_are(A: Array, B: Array) -> tuple:
    """Both arrays with zeros where either has a missing value, and a mask of where both are
    present."""
    there = ~(jnp.isnan(A) | jnp.isnan(B))
    return jnp.where(there, A, 0), jnp.where(there, B, 0), there


def _count(there: Array, like: Array) -> Array:
    return jnp.sum(there, axis=0).astype(like.dtype)


def _freedom(n: Array, bessel: bool) -> Array:
    return jnp.where(n.real > 1, n - 1 if bessel else n, jnp.nan)
