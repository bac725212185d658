"""Bounds the number of compiled programs that are kept, where one problem after another is
solved."""

import functools
from collections.abc import Callable
from typing import Any

import jax


RECENT = 64  # programs, each of some megabytes


def jit_recent(fn: Callable, *, static: int = 1, **options: Any) -> Callable:
    """`jax.jit(fn, **options)` with the first `static` arguments static. Programs for static
    arguments that are not among the last `RECENT` are forgotten; JAX itself would keep thousands.
    """

    @functools.lru_cache(maxsize=RECENT)
    def jitted(*values):
        return jax.jit(functools.partial(fn, *values), **options)

    @functools.wraps(fn)
    def call(*args):
        return jitted(*args[:static])(*args[static:])

    return call
