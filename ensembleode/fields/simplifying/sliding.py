"""Rules for windows that slide over an array."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from ..combining import folded, least, most, REDUCTIONS
from ..gather_scatter import iota, Shape, strides_of
from .memory import put, take
from .writing import rule


def _windows(
    x: Array, sizes: Shape, strides: Sequence[int], dilation: Sequence[int], count: Shape
) -> Array:
    """The contents of each window, `[*sizes, *count]`; the windows begin `strides` apart."""
    return take(x.reshape(-1), _numbers(x.shape, sizes, strides, dilation, count))


def _numbers(
    of: Shape, sizes: Shape, strides: Sequence[int], dilation: Sequence[int], count: Shape
) -> Array:
    """The numbers of the components in each window of an array of this shape."""
    shape = (*sizes, *count)
    terms = zip(strides_of(of), dilation, strides, strict=True)
    numbers = lax.full(shape, np.int64(0))
    for d, (stride, inside, between) in enumerate(terms):
        numbers = numbers + iota(jnp, shape, d) * (stride * inside)
        place = iota(jnp, shape, len(sizes) + d)
        numbers = numbers + place * (stride * between)
    return numbers


@rule("reduce_window reduce_window_max reduce_window_min reduce_window_sum")
def _reduce_window(eqn: Any, *ins: Any) -> list:
    params, n = eqn.params, len(eqn.outvars)
    by = REDUCTIONS.get(eqn.primitive.name.replace("_window", ""))
    arrays = ins[:n]
    starts = (
        ins[n:] if by is None else [lax.full((), x.dtype.type(by.neutral(x.dtype))) for x in ins]
    )
    sizes, count = params["window_dimensions"], eqn.outvars[0].aval.shape
    ends = zip(params["padding"], params["base_dilation"], strict=True)
    config = [(low, high, between - 1) for (low, high), between in ends]
    apart = params["window_strides"], params["window_dilation"]
    padded = [lax.pad(x, start, config) for x, start in zip(arrays, starts, strict=True)]
    rows = [_windows(x, sizes, *apart, count).reshape((-1, *count)) for x in padded]
    starts = [lax.broadcast(x, count) for x in starts]
    if by is None:
        return list(folded(jex.ClosedJaxpr(params["jaxpr"], params["consts"]), starts, rows))
    return [functools.reduce(by.emit, [*rows[0]], starts[0])]


@rule("select_and_gather_add")
def _select_and_gather_add(eqn: Any, tangents: Any, x: Any) -> list:
    """In each window, the tangent of the first component that is extreme there."""
    params, count = eqn.params, eqn.outvars[0].aval.shape
    ends = zip(params["padding"], params["base_dilation"], strict=True)
    config = [(low, high, between - 1) for (low, high), between in ends]
    wins, worst = _contest(eqn, x.dtype)
    apart = params["window_strides"], params["window_dilation"]
    rows, their = (
        _windows(lax.pad(y, start, config), params["window_dimensions"], *apart, count)
        for y, start in ((x, worst), (tangents, tangents.dtype.type(0)))
    )
    return [_beside_best(wins, rows.reshape((-1, *count)), their.reshape((-1, *count)))]


@rule("select_and_scatter_add")
def _select_and_scatter_add(eqn: JaxprEqn, new: Array, x: Array) -> list:
    """Each of the numbers `new`, one for each window, added to the window's first extreme
    component."""
    params, count = eqn.params, new.shape
    wins, worst = _contest(eqn, x.dtype)
    whole = lax.pad(x, worst, [(low, high, 0) for low, high in params["padding"]])
    ones, sizes = (1,) * x.ndim, params["window_dimensions"]
    numbers = _numbers(whole.shape, sizes, params["window_strides"], ones, count)
    rows = take(whole.reshape(-1), numbers).reshape((-1, *count))
    place = _beside_best(wins, rows, numbers.reshape((-1, *count)))
    nothing = lax.full((whole.size,), new.dtype.type(0))
    found = put(nothing, place, new, by="scatter-add").reshape(whole.shape)
    inside = zip(params["padding"], x.shape, strict=True)
    return [found[tuple(slice(low, low + n) for (low, _), n in inside)]]


def _contest(eqn: JaxprEqn, dtype: np.dtype) -> tuple[Callable, Any]:
    """The comparison by which a component of a window wins, and a value that wins over no other."""
    is_most = eqn.params["select_prim"].name == "ge"
    return (lax.ge, least(dtype)) if is_most else (lax.le, most(dtype))


def _beside_best(wins: Callable, rows: Array, others: Array) -> Array:
    """The entries of `others` that belong to the best of the `rows`; of equal rows, the first."""
    best, found = rows[0], others[0]
    for row, other in zip(rows[1:], others[1:], strict=True):
        stays = wins(best, row)
        best, found = lax.select(stays, best, row), lax.select(stays, found, other)
    return found


@rule("conv_general_dilated")
def _convolution(eqn: Any, x: Any, weights: Any) -> list:
    """A convolution as a product of the windows with the weights, in groups of channels."""
    params, aval = eqn.params, eqn.outvars[0].aval
    lhs, rhs, out = params["dimension_numbers"]
    x, weights = lax.transpose(x, lhs), lax.transpose(weights, rhs)  # [batch or out, channel, ...]
    groups = params["feature_group_count"]
    if params["batch_group_count"] > 1:  # groups of the batch are treated as groups of channels
        groups = params["batch_group_count"]
        x = x.reshape(groups, -1, *x.shape[1:]).swapaxes(0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
    sizes, count = weights.shape[2:], tuple(aval.shape[d] for d in out[2:])
    ends = zip(params["padding"], params["lhs_dilation"], strict=True)
    config = [(0, 0, 0)] * 2 + [(low, high, between - 1) for (low, high), between in ends]
    x = lax.pad(x, x.dtype.type(0), config)
    found = _windows(
        x,
        (1, x.shape[1], *sizes),
        (1, 1, *params["window_strides"]),
        (1, 1, *params["rhs_dilation"]),
        (x.shape[0], 1, *count),
    )
    inner, outer = weights.shape[1] * int(np.prod(sizes)), x.shape[0] * int(np.prod(count))
    total = lax.dot_general(
        weights.reshape(groups, -1, inner),
        found.reshape(groups, inner, outer),
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=aval.dtype,
    )
    total = total.reshape(weights.shape[0], x.shape[0], *count)
    total = lax.transpose(total, (1, 0, *range(2, total.ndim)))
    return [lax.transpose(total, tuple(out.index(d) for d in range(total.ndim)))]
