"""From trajectories to chunks of lanes and back."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...core.saving import meant
from ...fields.lanes.field import LaneField
from ...solvers.norms import AbstractNorm
from ...solvers.step_size import Tolerances
from ...solvers.time import StepBounds
from ...tracing.program import Program
from ..results import Left, result_of
from .leaves import first_of, Leaves
from .loop import Chunk, solve_chunk, Stepping
from .replay import Wide
from .stops import has_jumps


# The bytes of one array with the state of a chunk; a step needs a few tens of such arrays.
_CHUNK = 2**14
_WIDEST, _NARROWEST = 128, 8
# The largest vector over the lanes, in bytes, for which XLA's CPU runtime runs the operations of a
# loop one after the other. Operations on larger vectors it hands to threads, which takes longer
# than the operations do.
_IN_TURN = 512


def width_of(state: Any, n: int) -> int:
    """The number of lanes of a chunk, from the size of the state and the number of trajectories.

    It is the same for every ensemble algorithm, as the bits of matrix products depend on it.
    """
    each = max(1, math.prod(state.shape)) * np.dtype(state.dtype).itemsize
    fitting = 2 ** int(math.log2(max(1, _CHUNK // each)))
    enough = 2 ** math.ceil(math.log2(n))
    return max(_NARROWEST, min(_WIDEST, fitting, enough))


class _OfFirst(AbstractNorm):
    """The norm of the first `count` components."""

    norm: AbstractNorm
    count: int

    def __call__(self, xp: Any, values: Leaves) -> Any:
        return self.norm(xp, first_of(values, self.count))

    def squared(self, xp: Any, values: Leaves) -> Any:
        return self.norm.squared(xp, first_of(values, self.count))


class Setup(NamedTuple):
    """The static part of solving the chunks of a plan."""

    plan: Plan
    field: LaneField
    width: int

    @property
    def stepping(self) -> Stepping:
        plan, solver, norm = self.plan, self.plan.method.value, self.plan.method.value.norm
        if plan.controlled < self.field.size:
            norm = _OfFirst(norm, plan.controlled)
        return Stepping(solver.method, solver.controller, norm, plan.maxiters, plan.controlled)

    def field_of(self, args: Any) -> Callable:
        return lambda y, t: self.field(args, y, t)

    def wide(self, args: Any) -> tuple[Wide, Callable]:
        """The field's arguments widened for differentiation, and a function that pulls their
        cotangents back to the arguments as they were."""
        real, rest = eqx.partition(args, eqx.is_inexact_array)
        flags = zip(real, self.field.batched, self.field.deciding, strict=True)
        has_lanes = tuple(
            jax.tree.map(lambda x, b=b, d=d: b or (x.ndim == 0 and not d), arg)
            for arg, b, d in flags
        )

        def widened(real):
            def one(x, has_lanes):
                return jnp.broadcast_to(x, (self.width,)) if has_lanes and not x.ndim else x

            return jax.tree.map(one, real, has_lanes)

        args, narrow = jax.vjp(widened, real)
        return Wide(args, rest, has_lanes), narrow


def setup_of(plan: Plan, lanes: Lane, n: int) -> Setup:
    """The setup for the chunks of `n` trajectories, with the best width. Where the components are
    separate vectors, the bits don't depend on the width, and a chunk is at most as wide as XLA runs
    it in turn. The chunk of a single trajectory is as narrow as possible."""
    u0 = lanes.u0
    shape = u0.shape[1:] if plan.batched.u0 else u0.shape
    state = jax.ShapeDtypeStruct(shape, u0.dtype)
    assert isinstance(plan.field, Program)
    field = LaneField(plan.field, state, plan.batched.consts, plan.batched.p)
    if n == plan.width == 1:
        return Setup(plan, field, _NARROWEST if field.scalarised else 1)
    width = max(plan.width, width_of(plan.state, n))
    if field.scalarised and jax.default_backend() == "cpu":
        width = min(width, _IN_TURN // field.dtype.itemsize)
    return Setup(plan, field, width)


def in_chunks(x: Any, chunks: int, width: int) -> Any:
    """`[n, ...]` as `[chunk, lane, ...]`."""
    missing = chunks * width - x.shape[0]
    if missing:
        # The last chunk is filled up with copies, which are masked.
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])
    return x.reshape(chunks, width, *x.shape[1:])


def solve_chunks(setup: Setup, every: Lane, shared: Lane, mask: Any) -> Result:
    """The solutions of all chunks, one after the other. The leaves of `every` and the mask are
    `[chunk, lane, ...]`."""
    forward_mode = setup.plan.method.value.direction == "forward"

    def one(numbers):
        each, wanted = numbers
        chunk = chunk_of(setup, each, shared, wanted)
        if not forward_mode:
            # The barrier gives the same bits, whatever the program has done with these numbers
            # before.
            chunk = jax.lax.optimization_barrier(chunk)
        stepping, field = setup.stepping, setup.field_of(chunk.args)
        state, out = solve_chunk(
            stepping, field, setup.plan.saving, chunk, setup.field.join, forward_mode=forward_mode
        )
        u, t, count = None, None, state.naccept
        if out is None:
            u = jnp.moveaxis(setup.field.join(state.y), -1, 0)[:, None]
        else:
            u, t, count = out.u, out.t, out.row
        restarts = None
        if state.stops is not None and has_jumps(chunk.more):
            restarts = jnp.broadcast_to(state.stops.restarts, state.code.shape)
        counts = state.code.astype(jnp.int8), state.naccept, state.ntried, restarts
        return result_of(setup.plan, eqx.combine(each, shared), Left(u, t, count, *counts))

    if mask.shape[0] > 1:
        return jax.lax.map(one, (every, mask))
    alone = one(jax.tree.map(lambda x: x[0], (every, mask)))
    return jax.tree.map(lambda x: x[None], alone)


def chunk_of(setup: Setup, every: Lane, shared: Lane, mask: Any) -> Chunk:
    """The numbers of a chunk, with the lanes last."""
    field, batched = setup.field, setup.plan.batched
    left = eqx.combine(every, shared)._asdict()
    width = setup.width
    times, count, stop = (left.pop(name) for name in ("saveat", "count", "stop"))

    def last(x: Any, is_own: Any) -> Any:
        return jnp.moveaxis(x, 0, -1) if is_own else jnp.asarray(x)

    def take(name: str) -> Any:
        x = left.pop(name)
        return None if x is None else jax.tree.map(last, x, getattr(batched, name))

    u0 = take("u0")
    if not batched.u0:
        u0 = jnp.broadcast_to(u0[..., None], (*u0.shape, width))
    consts, p = map(list, map(take, ("consts", "p")))
    tol = None
    if left["abstol"] is not None:
        each = [(take(name), getattr(batched, name)) for name in Tolerances._fields]
        tol = Tolerances(*(_tolerance(field, x, is_own) for x, is_own in each))
    t0, t1, dt = map(take, ("t0", "t1", "dt"))
    bounds, args = StepBounds(*map(take, StepBounds._fields)), field.prepare(consts, p)
    times = meant(times, count, t0, t1)
    more = {name: take(name) for name in list(left)}
    return Chunk(field.split(u0), args, t0, t1, tol, dt, bounds, times, mask, stop, more)


def _tolerance(field: LaneField, x: Any, batched: bool) -> Any:
    """A tolerance in the form that the loop wants: a number, a number for each lane, or leaves like
    those of the state."""
    if x.ndim == batched:
        return x
    x = x if batched else x[..., None]
    return field.split(jnp.broadcast_to(x, (*field.shape, x.shape[-1])))
