"""Finds reads past the ends of arrays, for which JAX silently takes the last entry, as far as the
indices are known while tracing.

The integers of a program are evaluated with NumPy, for all given values of its inputs at once: the
last axis, `case`, counts these values. A read past an end is an error only if an output depends on
it: `jnp.where(i < n, x[i], 0)` may be right.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from ..tracing.program import is_tracer, Program
from .equations import called, interpreted
from .folding import FOLDED_INTEGERS
from .gather_scatter import iota, Windows
from .movements import MOVEMENTS


class PastEnd(NamedTuple):
    """A read past the end of an array of this `shape`: the index that was `asked` for, along an
    `axis`; `where` in the user's source; and the first `case` (the number of a value of the inputs)
    in which it happens."""

    asked: int
    axis: int
    shape: tuple[int, ...]
    where: str
    case: int

    def __str__(self) -> str:
        axis = f" along axis {self.axis}" if len(self.shape) > 1 else ""
        return f"index {self.asked}{axis} of an array of the shape {self.shape}, at {self.where}"


class _BoundedArray(NamedTuple):
    """What is known of an array: its integers `[*shape, case]`, or None; and the reads past an end
    that it depends on, each with booleans `[case]`."""

    known: np.ndarray | None = None
    past: tuple[tuple[PastEnd, np.ndarray], ...] = ()


def past_end(program: Program, consts: Sequence, inputs: Sequence) -> PastEnd | None:
    """The first read past an end on which an output of the program depends; None if there is none.
    `consts` are the values of the constants, `inputs` those of the flat inputs, each `[case]`, or
    None where they aren't known."""
    values = [*map(_of_const, consts), *map(_BoundedArray, inputs)]
    outs = interpreted(program.jaxpr, values, _of_const, _equation)
    found = [read for out in outs for read, mask in out.past if mask.any()]
    return min(found, key=lambda read: read.case) if found else None


_MOST = 10_000  # entries of a constant whose numbers are used


def _of_const(x: Any) -> _BoundedArray:
    is_followed = not is_tracer(x) and np.size(x) <= _MOST and is_integral(jnp.result_type(x))
    return _BoundedArray(np.asarray(x)[..., None]) if is_followed else _BoundedArray()


def is_integral(dtype: Any) -> bool:
    """Whether this is a dtype of integers or booleans."""
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def _equation(eqn: JaxprEqn, ins: list[_BoundedArray]) -> list[_BoundedArray]:
    name = eqn.primitive.name
    inner = called(eqn)
    if inner is not None:
        return interpreted(inner, ins, _of_const, _equation)
    if name == "select_n":
        return [_selected(eqn, ins)]
    past = tuple(read for x in ins for read in x.past) + _reads(eqn, ins)
    known = _folded(eqn, [x.known for x in ins])
    return [_BoundedArray(x, past) for x in known]


def _folded(eqn: Any, args: list) -> list:
    """The integers that an equation returns, from the integers of its operands; None for outputs
    that aren't integers or aren't known."""
    name, avals = eqn.primitive.name, [v.aval for v in eqn.outvars]
    nothing = [None] * len(avals)
    if any(x is None for x in args) or not all(is_integral(a.dtype) for a in avals):
        return nothing
    if name == "iota":
        params = eqn.params
        return [iota(np, params["shape"], params["dimension"]).astype(params["dtype"])[..., None]]
    if name in MOVEMENTS:
        cases = max(x.shape[-1] for x in args)
        args = [np.broadcast_to(x, (*x.shape[:-1], cases)) for x in args]
        return MOVEMENTS[name](np, args, eqn.params, (cases,))
    if name not in FOLDED_INTEGERS:
        return nothing
    with np.errstate(all="ignore"):
        return [np.asarray(FOLDED_INTEGERS[name](*args)).astype(avals[0].dtype)]


def _selected(eqn: Any, ins: list[_BoundedArray]) -> _BoundedArray:
    """The result of a choice between arrays. It depends on the reads of an array only in the cases
    in which some entry of that array is certainly chosen."""
    which, *arrays = ins
    if which.known is None:
        return _BoundedArray(None, which.past)
    axes = tuple(range(which.known.ndim - 1))
    taken = [(which.known == k).any(axis=axes) for k in range(len(arrays))]
    past = [(r, mask & t) for x, t in zip(arrays, taken, strict=True) for r, mask in x.past]
    values: list = [x.known for x in arrays]
    known = None
    if is_integral(eqn.outvars[0].aval.dtype) and all(x is not None for x in values):
        known = np.choose(which.known.astype(int), values)
    return _BoundedArray(known, (*which.past, *past))


def _reads(eqn: JaxprEqn, ins: list[_BoundedArray]) -> tuple[tuple[PastEnd, np.ndarray], ...]:
    """The reads of an equation that are past an end in some of the cases."""
    name, shape = eqn.primitive.name, getattr(eqn.invars[0].aval, "shape", ()) if ins else ()
    if name == "dynamic_slice":
        windows, columns = (
            Windows.whole_array(shape, eqn.params["slice_sizes"]),
            [x.known for x in ins[1:]],
        )
    elif name == "gather" and eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        indices, windows = ins[1].known, Windows.of_gather(eqn)
        if indices is None:
            return ()
        columns = [indices[..., k, :] for k in range(indices.shape[-2])]
    else:
        return ()
    found = []
    for axis, asked in zip(windows.starts, columns, strict=True):
        if asked is None:
            continue
        last = shape[axis] - windows.sizes[axis]
        outside = (asked < 0) | (asked > last)
        mask = outside.any(axis=tuple(range(outside.ndim - 1)))
        if mask.any():
            case = int(mask.argmax())
            of_case = np.broadcast_to(asked, outside.shape)[..., case]
            first = int(of_case[outside[..., case]].flat[0])
            # A negative index had the length added to it.
            index = first - shape[axis] if first < 0 else first + windows.sizes[axis] - 1
            where = source_info_util.summarize(eqn.source_info)
            found.append((PastEnd(index, axis, shape, where, case), mask))
    return tuple(found)
