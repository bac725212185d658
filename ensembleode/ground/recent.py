"""What is compiled for one problem after another, kept for the recent ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax


# A program takes some megabytes.
RECENT = 64


def jit_recent(fn: Callable, *, static: int = 1, **options: Any) -> Callable:
    """`jax.jit(fn)`, the first `static` arguments static, which forgets what was compiled for those
    that are not among the last `RECENT`. (JAX does so after thousands.)

    **Arguments:** `options`: those of `jax.jit`.
    """

    @functools.lru_cache(maxsize=RECENT)
    def jitted(*values):
        return jax.jit(functools.partial(fn, *values), **options)

    @functools.wraps(fn)
    def call(*args):
        return jitted(*args[:static])(*args[static:])

    return call
