"""Whether a traced function computes the same each time it is called.

A traced function is called once, for all trajectories and all times. That would freeze random
numbers that aren't JAX's, the clock, or a counter at one value. If a function uses them, the
programs of two traces differ in a number.
"""

import functools
import hashlib
import inspect
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike

from .evaluation import is_jaxpr
from .program import is_tracer, Program


_known_by_code: weakref.WeakSet = weakref.WeakSet()


def numbers_in(program: Program, consts: Sequence, known: Sequence = ()) -> tuple:
    """The primitives of a program and all numbers in it, to be compared with those of another trace
    of the same function. Functions among the parameters are left out, since each trace may make its
    own."""
    return tuple(_numbers_of_jaxpr(program.jaxpr)), contents(consts, known)


def contents(values: Sequence, known: Sequence = ()) -> tuple:
    """The present contents of arrays, which another trace may overwrite. Tracers have no contents;
    arrays that are `known` not to change are not read."""
    ids = {id(x) for x in known if isinstance(x, jax.Array)}
    return tuple(None if id(x) in ids else _content(x) for x in values)


def random_state() -> tuple:
    """The state of the generators that NumPy and Python share among all callers. (Tracing by itself
    draws from neither.)"""
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return random.getstate(), state["state"]["pos"], state["state"]["key"].tobytes()


def owned(x: Any) -> ArrayLike:
    """A copy of a NumPy array, which later changes of the array don't reach; anything else as it
    is."""
    is_shared = not (is_tracer(x) or isinstance(x, jax.Array)) and np.ndim(x) > 0
    return np.array(x) if is_shared else x


def check_once(fn: Callable, computes_the_same: Callable[[], bool], error: str) -> None:
    """Check that `fn` computes the same when called again, the first time that its code is seen.

    **Raises:** `TypeError` with `error` where it does not.
    """
    if is_known(fn):
        return
    code = _code_of(fn)
    if not computes_the_same():
        raise TypeError(error)
    if code is not None:
        _known_by_code.add(code)


def is_known(fn: Callable) -> bool:
    """Whether a function with the same code has been found to compute the same each time."""
    code = _code_of(fn)
    return code is not None and code in _known_by_code


def _code_of(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    call = getattr(type(fn), "__call__", None)  # noqa: B004
    return code or getattr(call, "__code__", None)


def _numbers_of_jaxpr(jaxpr: jex.Jaxpr) -> Iterator:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for x in eqn.invars:
            if isinstance(x, jex.Literal):
                yield _content(x.val)
        for name, value in sorted(eqn.params.items()):
            for leaf in jtu.tree_leaves(value, is_leaf=is_jaxpr):
                if isinstance(leaf, jex.ClosedJaxpr):
                    yield from _numbers_of_jaxpr(leaf.jaxpr)
                    yield contents(leaf.consts)
                elif isinstance(leaf, jex.Jaxpr):
                    yield from _numbers_of_jaxpr(leaf)
                elif isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic):
                    yield name, _content(leaf)


def _content(x: Any) -> Any:
    if is_tracer(x):
        return "traced"
    if isinstance(x, jax.Array):
        if not x.is_fully_addressable:  # several processes hold it, and none can read all of it
            return "elsewhere"
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            with jax.ensure_compile_time_eval():  # (also inside of an outer trace)
                x = jax.random.key_data(x)
    array = np.asarray(x)
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    # As bytes, since some dtypes of JAX (bfloat16) can't be Python buffers.
    return array.dtype, array.shape, hashlib.sha256(flat.view(np.uint8)).digest()
