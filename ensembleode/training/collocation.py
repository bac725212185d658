"""Derivatives and smoothed values of data, by local polynomial regression.

The first stage of two-stage fits: once u' is estimated from the data, the parameters of
u' = f(u, p, t) are found without solving anything.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..tracing.program import is_tracer
from .measured import as_numbers, check_finite


def _on_support(shape: Callable) -> Callable:
    """A kernel with compact support: `shape(r)` for r up to 1, and zero beyond."""
    return lambda r: jnp.where(r <= 1, shape(jnp.minimum(r, 1)), 0)


def _of_distance(kernel: Callable) -> Callable:
    return lambda x: kernel(jnp.abs(x))


# Functions of r = |time - time of the estimate| / width. All but Silverman's integrate to one.
_KERNELS: dict[str, Callable] = {
    "epanechnikov": _on_support(lambda r: 3 / 4 * (1 - r**2)),
    "uniform": _on_support(lambda r: jnp.full_like(r, 1 / 2)),
    "triangular": _on_support(lambda r: 1 - r),
    "quartic": _on_support(lambda r: 15 / 16 * (1 - r**2) ** 2),
    "triweight": _on_support(lambda r: 35 / 32 * (1 - r**2) ** 3),
    "tricube": _on_support(lambda r: 70 / 81 * (1 - r**3) ** 3),
    "gaussian": lambda r: jnp.exp(-(r**2) / 2) / math.sqrt(2 * math.pi),
    "cosine": _on_support(lambda r: math.pi / 4 * jnp.cos(math.pi / 2 * r)),
    # exp(r) would overflow.
    "logistic": lambda r: jnp.exp(-r) / (1 + jnp.exp(-r)) ** 2,
    "sigmoid": lambda r: 2 / math.pi * jnp.exp(-r) / (1 + jnp.exp(-r) ** 2),
    # DiffEqFlux's variant of Silverman's kernel. Silverman's own has r / sqrt(2) in the sine. Its
    # second moment is zero, so that the matrix of a line fitted with it is singular.
    "silverman": lambda r: jnp.exp(-r / math.sqrt(2)) * jnp.sin(r / 2 + math.pi / 4) / 2,
}
KERNELS = {name: _of_distance(kernel) for name, kernel in _KERNELS.items()}
# The number of estimates made at a time, each of which takes the memory of a row of weights.
_BATCH = 256


class Collocation(NamedTuple):
    """The estimates of [`collocate_data`][ensembleode.collocate_data]: `du` and `u`, both
    `[time, *state]`."""

    du: Array
    u: Array


def collocate_data(
    ts: Any,
    data: PyTree,
    kernel: str = "triangular",
    bandwidth: Any = None,
    *,
    at: Any = None,
) -> Collocation:
    r"""Estimate the derivatives of noisy data, and smooth it.

    At each time, polynomials are fitted to the data around it by weighted least squares: a line,
    whose value is the smoothed datum, and a parabola, whose slope is the derivative. So the values
    of a linear function and the derivatives of a quadratic function are exact. With these
    estimates, the parameters of an ODE can be found without solving it, by minimising the residual
    `du - f(u, p, t)`, which is a quick start for a fit of the solution.

    The estimates are differentiable with respect to `data` (they are linear in it), and the
    function can be traced and mapped. The dtype is that of the data.

    **Arguments:**

    - `ts`: the times of the data, `[time]`, increasing; the same time may occur several times.
    - `data`: `[time, *state]`.
    - `kernel`: how the weight falls with the distance in time. These are zero beyond the bandwidth:
        `"epanechnikov"`, `"uniform"`, `"triangular"`, `"quartic"`, `"triweight"`, `"tricube"`,
        `"cosine"`. These are positive everywhere: `"gaussian"`, `"logistic"`, `"sigmoid"`.
        `"silverman"` is negative in places; it is that of DiffEqFlux, since Silverman's own has a
        second moment of zero and can't be used. Constant factors don't matter.
    - `bandwidth`: as a fraction of the time that the data spans, by default
        $n^{-1/5} n^{-3/35} (\log n)^{-1/16}$ for $n$ data. That is wide: choose a smaller one for
        data with little noise that changes quickly, and a larger one where the estimate wiggles.
    - `at`: the times to estimate at, `[m]`, by default `ts`. They may lie outside of the data, as
        far as the bandwidth reaches.

    **Returns:** a pair `(du, u)` of arrays `[time, *state]`.

    **Raises:** `ValueError` and `TypeError` for bad input. If a `bandwidth` contains too few data
    for a parabola (or so few that rounding spoils it, or if negative weights cancel the others), a
    `ValueError` says which bandwidth would do. Where the bandwidth or the times are traced, such
    estimates are NaN instead.

    The method, and the default bandwidth, are those of Roesch, Rackauckas and Stumpf,
    "Collocation based training of neural ordinary differential equations", Statistical
    Applications in Genetics and Molecular Biology 20 (2021), after Liang and Wu, "Parameter
    estimation for differential equation models using a framework of measurement error in
    regression models", JASA 103 (2008); as in DiffEqFlux's `collocate_data(data, ts)`, whose
    `data` is `[*state, time]`.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> ts = jnp.linspace(0.0, 6.0, 61)
    >>> du, u = eo.collocate_data(ts, jnp.sin(ts), "epanechnikov", bandwidth=0.05)
    >>> print(f"{jnp.abs(du - jnp.cos(ts)).max():.3f}, {jnp.abs(u - jnp.sin(ts)).max():.3f}")
    0.005, 0.008
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; got {kernel!r}.")
    data, ts = as_numbers("data", data), _as_times("ts", ts)
    check_finite("data has a value", data, "leave such times out, of ts, too")
    if data.ndim == 0 or data.shape[0] != ts.shape[0]:
        raise ValueError(
            f"data must have a row for each of the {ts.shape[0]} times in ts, [time, *state]; its "
            f"shape is {data.shape}."
        )
    if ts.shape[0] < 3:
        raise ValueError(f"ts must be three times at least, as a parabola needs; got {ts}.")
    if not is_tracer(ts):
        if (np.diff(ts) < 0).any():
            raise ValueError("ts must be increasing; sort it, and data with it (np.argsort).")
        if ts[0] == ts[-1]:
            raise ValueError(f"ts spans no time: all of it is {ts[0]:g}.")
    at = ts if at is None else _as_times("at", at)
    if bandwidth is None:
        n = ts.shape[0]
        bandwidth = n ** (-1 / 5) * n ** (-3 / 35) * math.log(n) ** (-1 / 16)
    bandwidth = _as_bandwidth(bandwidth)
    # (Counted from the first time, even times with a large offset are represented accurately.)
    ts, at, start = ts - ts[0], at - ts[0], ts[0]
    precision = np.promote_types(ts.dtype, jnp.finfo(data.dtype).dtype)
    precision = jax.dtypes.canonicalize_dtype(precision)
    given = [x.astype(precision) for x in (ts, at, bandwidth)]
    if not any(map(is_tracer, given)):
        with jax.ensure_compile_time_eval():
            _check_bandwidth(kernel, *given, start)
    return Collocation(*_estimate(kernel, *given, jnp.asarray(data)))


def _weights(kernel: str, ts: Array, t: Array, width: Array) -> tuple:
    """The weights `[time]` of the data in the estimates `du` and `u` at the time `t`, and whether
    the estimates are valid. They come from the polynomials 1, x - a and x^2 - b (x - a) - c, which
    are orthogonal in the weighted sum over the data."""
    # A QR decomposition would need square roots of the weights, which some kernels make negative;
    # and the normal equations would square the condition number.
    x = (ts - t) / width
    w = KERNELS[kernel](x)
    one = jnp.ones_like(x)
    per_one, ok_one = _inverse_norm(w, one, one)
    a, c = jnp.sum(w * x) * per_one, jnp.sum(w * x**2) * per_one
    line = x - a
    per_line, ok_line = _inverse_norm(w, line, x)
    b = jnp.sum(w * line * x**2) * per_line
    parabola = x**2 - b * line - c
    per_parabola, ok_parabola = _inverse_norm(w, parabola, x**2)
    # At x = 0, the slopes of the polynomials are 0, 1 and -b, and the values 1 and -a.
    du = w * (line * per_line - b * parabola * per_parabola) / width
    u = w * (per_one - a * line * per_line)
    ok = ok_one & ok_line & ok_parabola
    return jnp.where(ok, du, jnp.nan), jnp.where(ok, u, jnp.nan), ok


def _inverse_norm(w: Array, q: Array, leading: Array) -> tuple:
    """One over the sum of `w q^2`, and whether that sum is accurate enough to divide by: after the
    orthogonalisation of `q` from its `leading` term, half of the digits have to be left, and where
    weights of both signs cancel, a tenth of the sum."""
    norm, uncancelled = jnp.sum(w * q**2), jnp.sum(jnp.abs(w) * q**2)
    digits = math.sqrt(jnp.finfo(norm.dtype).eps)
    ok = uncancelled > digits * jnp.sum(jnp.abs(w) * leading**2)
    ok &= jnp.abs(norm) > uncancelled / 10
    return jnp.where(ok, 1 / jnp.where(ok, norm, 1), 0), ok


@functools.partial(jax.jit, static_argnums=0)
def _estimate(kernel, ts, at, bandwidth, data):
    width = bandwidth * (ts[-1] - ts[0])

    def one(t):
        weights = _weights(kernel, ts, t, width)[:2]
        return [jnp.tensordot(w.astype(data.dtype), data, 1) for w in weights]

    return jax.lax.map(one, at, batch_size=_BATCH)


@functools.partial(jax.jit, static_argnums=0)
def _enough(kernel, ts, at, bandwidth):
    """For each time, whether the data within the bandwidth suffice, `[m]`."""
    width = bandwidth * (ts[-1] - ts[0])
    return jax.lax.map(lambda t: _weights(kernel, ts, t, width)[2], at, batch_size=_BATCH)


def _check_bandwidth(kernel: str, ts: Any, at: Any, bandwidth: Any, start: Any) -> None:
    ok = np.asarray(_enough(kernel, ts, at, bandwidth))
    if ok.all():
        return
    where = at[np.argmin(ok)] + start
    needed = _smallest_bandwidth(kernel, ts, at, float(bandwidth))
    remedy = (
        "There is none that does at all times."
        if needed is None
        else f"The smallest above it that does at all times is about {needed}."
    )
    raise ValueError(
        f"bandwidth={float(bandwidth):.3g} (a share of the time spanned) doesn't determine a "
        f"parabola around t={where:.10g} with the {kernel} kernel. {remedy}"
    )


def _smallest_bandwidth(kernel: str, ts: np.ndarray, at: np.ndarray, low: float) -> str | None:
    """The smallest bandwidth above `low` that suffices, by bisection, with three digits rounded up;
    `low` is too small."""

    def enough(bandwidth):
        return bool(np.all(_enough(kernel, ts, at, ts.dtype.type(bandwidth))))

    low = max(low, 1e-12)
    high = low
    while not enough(high):
        low, high = high, 2 * high
        if high > 1e6:
            return None
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    shown = high
    while not enough(float(f"{shown:.3g}")):
        shown *= 1.002
    return f"{shown:.3g}"


def _as_bandwidth(bandwidth: Any) -> np.ndarray | None:
    what = f"bandwidth must be a positive number (a share of the time spanned), got {bandwidth!r}."
    try:
        value = bandwidth if is_tracer(bandwidth) else np.asarray(float(bandwidth))
    except (TypeError, ValueError):
        raise TypeError(what) from None
    if value.ndim or not (is_tracer(value) or 0 < value < math.inf):
        raise ValueError(what)
    return value


def _as_times(name: str, times: Any) -> np.ndarray | None:
    """The times as `[n]` real numbers of an inexact dtype, in NumPy where they are known."""
    if not is_tracer(times):
        try:
            times = np.asarray(times)
        except ValueError as e:  # ragged
            raise TypeError(f"{name} must be an array of times, got {times!r}.") from e
    if jnp.issubdtype(times.dtype, jnp.integer):
        times = times.astype(jnp.result_type(float))
    if times.ndim != 1 or not times.size or not jnp.issubdtype(times.dtype, jnp.floating):
        raise ValueError(
            f"{name} must be an array of times, [time]; got the shape {times.shape} and the dtype "
            f"{times.dtype}."
        )
    check_finite(f"{name} has a time", times)
    return times
