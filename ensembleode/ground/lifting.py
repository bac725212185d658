"""NumPy arrays that a `prob_func` indexes by a traced index: these are lifted to JAX arrays."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


NUMPY_INDEXED = (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError)


def lift_numpy(fn: Any) -> Callable | None:
    """`fn` with the NumPy arrays that it closes over turned into JAX arrays; None if it has
    none."""
    if isinstance(fn, functools.partial):
        func = lift_numpy(fn.func)
        args = [_lift(x) for x in fn.args]
        keywords = {k: _lift(x) for k, x in fn.keywords.items()}
        lifted_args = any(map(_is_numpy, [*fn.args, *fn.keywords.values()]))
        if func is None and not lifted_args:
            return None
        return functools.partial(func or fn.func, *args, **keywords)
    if not isinstance(fn, types.FunctionType):
        return None
    cells = fn.__closure__ or ()
    names = set(fn.__code__.co_names)
    lifted_globals = {k: _lift(v) for k, v in fn.__globals__.items() if k in names and _is_numpy(v)}
    defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
    held = [*_contents(cells), *defaults, *keywords.values()]
    if not lifted_globals and not any(map(_is_numpy, held)):
        return None
    lifted = types.FunctionType(
        fn.__code__,
        {**fn.__globals__, **lifted_globals},
        fn.__name__,
        tuple(map(_lift, defaults)) or None,
        tuple(_lift_cell(c) for c in cells),
    )
    lifted.__kwdefaults__ = {k: _lift(x) for k, x in keywords.items()} or None
    return lifted


def _contents(cells: Sequence) -> list:
    return [c.cell_contents for c in cells if c != types.CellType()]


def _lift_cell(cell: types.CellType) -> types.CellType:
    if _contents([cell]) and _is_numpy(cell.cell_contents):
        return types.CellType(_lift(cell.cell_contents))
    return cell


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0 and np.issubdtype(x.dtype, np.number)


def _lift(x: ArrayLike) -> ArrayLike:
    return jnp.asarray(x) if _is_numpy(x) else x
