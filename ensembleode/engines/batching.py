"""The batching rule of the four primitives: a mapped axis makes more trajectories."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..ground.alone import split_like, together
from .along import sizes_of
from .flow import Flow, widened
from .primitives import bend_p, bind, pull_p, push_p, solve_p, unpack


def _folded_tangents(flow: Flow, size: int, v: Sequence, batched: Sequence) -> tuple[list, list]:
    """The tangents of `size` times as many trajectories, and whether each trajectory has its
    own."""
    own = [True, *(m for m in flow.moved if m is not None)]
    found, now = [], []
    for x, is_batched, is_own in zip(v, batched, own, strict=True):
        now.append(is_own or is_batched)
        if not is_own:
            found.append(jnp.repeat(x, flow.n, axis=0) if is_batched else x)
            continue
        x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        found.append(x.reshape(-1, *x.shape[2:]))
    return found, now


def batch(prim: Any, operands, axes, *, flow):
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    given = operands
    first = zip(given, axes, strict=True)
    operands = together([x if a is None else jnp.moveaxis(x, a, 0) for x, a in first])
    batched = [a is not None for a in axes]
    lanes, known, *others = unpack(flow, operands)
    lanes_b, known_b, *others_b = unpack(flow, batched)
    # These operands differ between trajectories: rows and tangents.
    n_v = 0 if prim in (solve_p, pull_p) else 1 + sum(m is not None for m in flow.moved)
    start = len(sizes_of(flow)) if prim is bend_p else 0
    v, v_b = (x[start : start + n_v] for x in (others, others_b))
    rows, rows_b = (x[:start] + x[start + n_v :] for x in (others, others_b))
    wide, lanes, known, *rows = widened(
        flow, size, (lanes_b, known_b, *rows_b), lanes, known, *rows
    )
    moved: Sequence = flow.moved
    if n_v:
        v, now = _folded_tangents(flow, size, v, v_b)
        flags = iter(now[1:])
        moved = [None if m is None else next(flags) for m in flow.moved]
    wide = wide.with_moved(moved, groups=1 if prim in (solve_p, push_p) else wide.groups)
    outs = bind(prim, wide, lanes, known, *rows[:start], *v, *rows[start:])
    if prim in (solve_p, push_p):
        found = [x.reshape(size, -1, *x.shape[1:]) for x in outs]
    else:
        found = [outs[0].reshape(size, -1, *outs[0].shape[1:])]
        for x, was, now in zip(outs[1:], flow.own, wide.own, strict=True):
            if now and not was:
                # Shared within each entry of the mapped axis only: summed up in each group.
                x = x.reshape(size, flow.groups, -1, *x.shape[1:]).sum(2)
            else:
                x = x.reshape(size, -1, *x.shape[1:])
            found.append(x)
    return split_like(found, given, axes), [0] * len(found)
