"""The events of a solution."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree


class Events(eqx.Module):
    """The events of callbacks, one after another; for several trajectories, these are the first
    axis.

    - `t [event]`: the times.
    - `which [event]`: the number of the callback, counted from 0.
    - `direction [event]`: whether its condition rose (1) or fell (-1) through zero; for a discrete
        callback it is 1. With a vector callback it has an entry for each of the conditions,
        `[event, condition]`, which is 0 where a condition did not cross.
    - `u_before`, `u_after [event, *state]`: the states, in the structure of `u`.
    - `count []`: the number of events.

    Where a trajectory had fewer events than others, the rest is NaN, and `which` is -1. Callbacks
    with `save_positions=(False, False)` have no entries.
    """

    t: Any
    which: Any
    direction: Any
    u_before: PyTree
    u_after: PyTree
    count: Any


def first_events(events: Events, most: int, *, several: bool) -> Events:
    """The first `most` events of a trajectory, or of each of several."""
    part = (slice(None), slice(most)) if several else slice(most)
    names = ("t", "which", "direction", "u_before", "u_after")
    cut = {x: getattr(events, x) for x in names}
    return Events(**jax.tree.map(lambda x: x[part], cut), count=events.count)
