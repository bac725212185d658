"""The batching rule of the four primitives: a mapped axis becomes more trajectories."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ...ground.devices.alone import split_like, together
from .along import sizes_of
from .flow import folded, widened
from .primitives import bend_p, bind, pull_p, push_p, solve_p, unpack


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
    are_batched = lanes_b, known_b, *rows_b
    wide, lanes, known, *rows = widened(flow, size, are_batched, lanes, known, *rows)
    moved: Sequence = flow.moved
    if n_v:
        own = [True, *(m for m in flow.moved if m is not None)]
        v = list(map(functools.partial(folded, size, flow.n), v, v_b, own))
        flags = iter([a or b for a, b in zip(own[1:], v_b[1:], strict=True)])
        moved = [None if m is None else next(flags) for m in flow.moved]
    wide = wide.with_moved(moved, groups=1 if prim in (solve_p, push_p) else wide.groups)
    outs = bind(prim, wide, lanes, known, *rows[:start], *v, *rows[start:])
    found = [x.reshape(size, -1, *x.shape[1:]) for x in outs]
    if prim in (pull_p, bend_p):
        for i, (was, now) in enumerate(zip(flow.own, wide.own, strict=True), start=1):
            if now and not was:
                # Only trajectories of one entry of the mapped axis share it: sums for each group.
                found[i] = found[i].reshape(size, flow.groups, -1, *found[i].shape[2:]).sum(2)
    return split_like(found, given, axes), [0] * len(found)
