"""From trajectories to chunks of lanes and back."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ...core.known_times import differing
from ...core.lane import Lane
from ...core.plan import Plan
from ...core.saving import meant
from ...fields.lanes.field import LaneField
from ...ground.placement import default_device, platform, share_of_memory
from ...numbers import of_kind
from ...tracing.program import Program


# The bytes of one array with the state of a chunk; a step needs a few tens of such arrays.
_CHUNK = 2**14
_WIDEST, _NARROWEST = 128, 8
# The largest vector over the lanes, in bytes, for which XLA's CPU runtime runs the operations of a
# loop one after the other. Operations on larger vectors it hands to threads, which takes longer
# than the operations do.
_IN_TURN = 512
_TOLERANCES = [row.name for row in of_kind("tolerance")]
# The numbers that are not rearranged: all lanes share them, or the lanes stay their first axis.
_AS_IS = [row.name for row in of_kind("times", "count", "flag")]


def width_of(state: Any, n: int) -> int:
    """The number of lanes of a chunk, from the size of the state and the number of trajectories.

    It is the same for every ensemble algorithm, as the bits of matrix products depend on it.
    """
    each = max(1, math.prod(state.shape)) * np.dtype(state.dtype).itemsize
    fitting = 2 ** int(math.log2(max(1, _CHUNK // each)))
    enough = 2 ** math.ceil(math.log2(n))
    return max(_NARROWEST, min(_WIDEST, fitting, enough))


def lane_field(plan: Plan) -> LaneField:
    """The vector field of the plan, for a chunk of lanes."""
    assert isinstance(plan.field, Program)
    return LaneField(plan.field, plan.state, plan.batched.consts, plan.batched.p)


def width_in(plan: Plan, field: LaneField, n: int) -> int:
    """The number of lanes of a chunk of `n` trajectories, at its best. If the components are
    separate vectors, the bits don't depend on the width, and a chunk is at most as wide as XLA runs
    it in turn. The chunk of a single trajectory is as narrow as possible.

    An accelerator runs all trajectories at once, as fewer would leave most of it idle.
    """
    if platform() != "cpu":
        return n
    if n == plan.width == 1:
        return _NARROWEST if field.scalarised else 1
    width = max(plan.width, width_of(plan.state, n))
    return min(width, _IN_TURN // field.dtype.itemsize) if field.scalarised else width


def width_back(plan: Plan, field: LaneField, n: int) -> int:
    """The same on the way back, where lanes keep a record of steps and checkpoints (see `replay`):
    on an accelerator, as many as its memory has room for."""
    width = width_in(plan, field, n)
    if platform() == "cpu":
        return width
    # A state, the method's carry, and a handful of numbers, for each step of a segment, and for
    # each segment.
    kept = 2 * math.isqrt(plan.maxiters) * (2 * math.prod(plan.state.shape) + 8)
    room = share_of_memory(default_device()) // (kept * field.dtype.itemsize)
    return min(width, max(_NARROWEST, room))


def in_chunks(x: Any, chunks: int, width: int) -> Any:
    """`[n, ...]` as `[chunk, lane, ...]`."""
    missing = chunks * width - x.shape[0]
    if missing:
        # The last chunk is filled up with copies, which are masked.
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])
    return x.reshape(chunks, width, *x.shape[1:])


def merged(x: Any) -> Any:
    """`[chunk, lane, ...]` as `[n, ...]`, including the copies that fill up the last chunk."""
    return x.reshape(-1, *x.shape[2:])


def chunk_of(plan: Plan, field: LaneField, every: Lane, shared: Lane, width: int) -> Lane:
    """The numbers of a chunk in the form that the loop wants, with the lanes last.

    `u0` and tolerances for each component become leaves. `p` becomes all that the field needs
    besides the state and the time, including its constants. In `saveat`, times past the count of a
    lane are infinite, in the direction of time, and `count` is None.

    **Arguments:** `every`: the numbers that differ between lanes, with the lanes first.
    """
    lanes, batched = eqx.combine(every, shared), plan.batched

    def last(x: Any, is_own: Any) -> Any:
        return jnp.moveaxis(x, 0, -1) if is_own else jnp.asarray(x)

    def moved(name: str, x: Any) -> Any:
        return x if x is None or name in _AS_IS else jax.tree.map(last, x, getattr(batched, name))

    chunk = Lane(*map(moved, Lane._fields, lanes))
    u0 = chunk.u0 if batched.u0 else jnp.broadcast_to(chunk.u0[..., None], (*chunk.u0.shape, width))
    tolerances = {
        name: _tolerance(field, getattr(chunk, name), getattr(batched, name))
        for name in _TOLERANCES
    }
    jumps = chunk.d_discontinuities
    return chunk._replace(
        d_discontinuities=None if jumps is None else differing(jumps),
        u0=field.split(u0),
        p=field.prepare(chunk.consts, chunk.p),
        consts=(),
        saveat=meant(lanes.saveat, lanes.count, chunk.t0, chunk.t1),
        count=None,
        **tolerances,
    )


def _tolerance(field: LaneField, x: Any, batched: Any) -> Any:
    """A tolerance in the form that the loop wants: a number, a number for each lane, or leaves like
    those of the state."""
    if x is None or x.ndim == batched:
        return x
    x = x if batched else x[..., None]
    return field.split(jnp.broadcast_to(x, (*field.shape, x.shape[-1])))
