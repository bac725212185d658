"""Checks of what the functions of a problem read: that no index is past the end of an array, and
that parameters that `prob_func` adds are read at all."""

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..fields.bounds import is_integral, past_end, PastEnd
from ..fields.equations import used
from ..ground.recent import RECENT
from ..tracing.program import Program


# The most trajectories that are checked; of more, this many, evenly spaced by index.
_MOST_TRAJECTORIES = 65_536


def check_reads(name: str, program: Program, consts: Sequence) -> None:
    """**Raises:** `IndexError` for a function that reads past the end of an array."""
    read = _past_end(program, consts, None)
    if read is not None:
        raise IndexError(
            f"{name} reads {read}. JAX would take the last entry there: write an index that exists."
        )


def check_reads_by_index(
    name: str, program: Program, consts: Sequence, n: int, others: int = 0
) -> None:
    """`check_reads` for a function of the index of one of `n` trajectories. The flat inputs of its
    program are `others`, the index, the number of the run, and the key."""
    read = _past_end(program, consts, n, others)
    if read is not None:
        raise IndexError(
            f"{name} reads {read}, for trajectory {_looked_at(n)[read.case]} of {n}, counted from "
            "0. JAX would take the last entry there: solve as many trajectories as there are "
            "entries, or use them again by v[ctx.index % len(v)]."
        )


def _looked_at(n: int) -> np.ndarray:
    return np.linspace(0, n - 1, min(n, _MOST_TRAJECTORIES)).astype(np.int64)


def _past_end(program: Program, consts: Sequence, *of_index: Any) -> PastEnd | None:
    """**Arguments:** `of_index`: for a function of an index, the number of trajectories, and how
    many inputs come before the index."""
    if any(is_integral(jnp.result_type(x)) for x in consts):
        return _found_past_end(program, consts, *of_index)
    return _known_without_integers(program, *of_index)


def _found_past_end(
    program: Program, consts: Sequence, n: int | None, others: int = 0
) -> PastEnd | None:
    inputs: list = [None] * len(program.jaxpr.invars)
    if n is not None:
        inputs[others : others + 2] = _looked_at(n), np.ones(1, np.int64)
    return past_end(program, consts, inputs)


@functools.lru_cache(maxsize=RECENT)
def _known_without_integers(program: Program, *of_index: Any) -> PastEnd | None:
    # (Without integers among the constants, their values don't matter.)
    return _found_past_end(program, [np.float32(0)] * len(program.jaxpr.constvars), *of_index)


def check_new_parameters(
    p: PyTree, known: Any, is_number: Callable, programs: Iterable[Program]
) -> None:
    """**Raises:** `ValueError` for a number in `p` that is not in the `known` parameters of the
    problem, and that none of its functions reads. `programs` are these functions,
    `(u, (*leaves of p, *others), t)`, with the leaves for which `is_number` is true."""
    if p is known:
        return
    before = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(known)]
    paths = [jtu.keystr(path) for path, x in jtu.tree_leaves_with_path(p) if is_number(x)]
    new = {path: i for i, path in enumerate(paths, 1) if path not in before}
    uses = [(used(x.jaxpr)[1], x.jaxpr.invars) for x in programs] if new else []
    for path, i in new.items():
        if any(count[inputs[i]] for count, inputs in uses):
            continue
        lower = {x.lower(): x for x in before}
        close = difflib.get_close_matches(path.lower(), lower, n=1)
        hint = f" Is it p{lower[close[0]]}?" if close else ""
        raise ValueError(
            f"prob_func gives p{path}, which the problem doesn't have, and f never reads p{path}, "
            f"nor does a callback.{hint} Leave out what nothing reads."
        )
