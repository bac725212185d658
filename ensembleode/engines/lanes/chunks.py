"""From trajectories to chunks of lanes and back, forwards and in reverse."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ... import sensitivity
from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...core.retcode import ReturnCode
from ...fields.lanes.field import LaneField
from ...solvers.step_size import Tolerances
from ...solvers.time import StepBounds
from ...tracing.program import Program
from ..results import Counts, Numbers, result_of, Saved, with_times
from .adjoint import buffers, Cotangent, pull_back, Wide
from .continuous import backsolve, gauss
from .leaves import Leaves, map_leaves, select, sum_of
from .loop import Chunk, Output, retcodes, solve_chunk, State, Stepping


# Bytes of one array of the size of a chunk's state; a step needs a few tens of them.
_CHUNK = 2**14
_WIDEST, _NARROWEST = 128, 8
# How a chunk is pulled back, by the name of its `sensealg`.
_ADJOINTS = {"ReplayAdjoint": pull_back, "GaussAdjoint": gauss, "BacksolveAdjoint": backsolve}


def width_of(state: Any, n: int) -> int:
    """How many lanes a chunk has, from the size of the state and the number of trajectories.

    The same for every ensemble algorithm, as the bits of matrix products depend on it.
    """
    each = max(1, math.prod(state.shape)) * np.dtype(state.dtype).itemsize
    fitting = 2 ** int(math.log2(max(1, _CHUNK // each)))
    enough = 2 ** math.ceil(math.log2(n))
    return max(_NARROWEST, min(_WIDEST, fitting, enough))


class Setup(NamedTuple):
    """What is needed to solve chunks of a plan, besides their numbers."""

    plan: Plan
    field: LaneField
    width: int

    @property
    def stepping(self) -> Stepping:
        solver = self.plan.method.value
        return Stepping(solver.method, solver.controller, solver.norm, self.plan.maxiters)

    def field_of(self, args: Any) -> Callable:
        return lambda y, t: self.field(args, y, t)

    def wide(self, args: Any) -> tuple[Wide, Callable]:
        """The arguments as they are differentiated, and what pulls their cotangents back."""
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


def solve_trajectories(
    plan: Plan, lanes: Lane, n: int, mask: Any = None, *, alone: bool = False
) -> Result:
    """Solve `n` trajectories, chunk by chunk; the leaves of the result have their axis first.

    (But `t`, which has it where the trajectories have their own times.)

    **Arguments:**

    - `lanes`: the numbers, a leading axis on the leaves that `plan.batched` marks.
    - `mask`: false for those that only fill a place, and are not solved: [n].
    - `alone`: whether the chunk may be narrower than that of an ensemble.
    """
    setup = _setup(plan, lanes, alone)
    every, shared = eqx.partition(lanes, plan.batched)
    chunks = -(-n // setup.width)
    every = jax.tree.map(lambda x: _in_chunks(x, chunks, setup.width), every)
    wanted = np.arange(chunks * setup.width).reshape(chunks, setup.width) < n
    if mask is not None:
        wanted = wanted & _in_chunks(mask, chunks, setup.width)
    result = _solved(setup, every, shared, jnp.asarray(wanted))
    result = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], result)
    return with_times(plan, lanes, result)


def _setup(plan: Plan, lanes: Lane, alone: bool) -> Setup:
    u0 = lanes.u0
    shape = u0.shape[1:] if plan.batched.u0 else u0.shape
    state = jax.ShapeDtypeStruct(shape, u0.dtype)
    assert isinstance(plan.field, Program)
    field = LaneField(plan.field, state, plan.batched.consts, plan.batched.p)
    narrowest = _NARROWEST if field.scalarised else 1
    return Setup(plan, field, narrowest if alone else plan.width)


def _in_chunks(x: Any, chunks: int, width: int) -> Any:
    missing = chunks * width - x.shape[0]
    if missing:
        # Copies of the last, which are masked.
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])
    return x.reshape(chunks, width, *x.shape[1:])


#
# Forwards
#


def _solved(setup: Setup, every: Lane, shared: Lane, mask: Any) -> Result:
    """All chunks, differentiable: `every` leaf `[chunk, lane, ...]`."""
    direction = setup.plan.method.value.direction
    if direction == "forward":
        return sensitivity.forward_only(_all_chunks(setup, every, shared, mask))
    label = setup.plan.method.value.adjoint + "()"
    every, shared = sensitivity.reverse_only((every, shared), label)
    return _with_adjoint((every, shared), mask, setup)


def _all_chunks(setup: Setup, every: Lane, shared: Lane, mask: Any) -> Result:
    if mask.shape[0] == 1:
        result = _solve_one(setup, _first(every), shared, mask[0])
        return jax.tree.map(lambda x: x[None], result)

    def one(numbers):
        lane, mask = numbers
        return _solve_one(setup, lane, shared, mask)

    return jax.lax.map(one, (every, mask))


def _solve_one(setup: Setup, every: Lane, shared: Lane, mask: Any) -> Result:
    """The solution of a chunk, `[lane, ...]` each."""
    chunk = _chunk(setup, every, shared, mask)
    forward_mode = setup.plan.method.value.direction == "forward"
    if not forward_mode:
        # The same bits, whatever the program does with these numbers before.
        chunk = jax.lax.optimization_barrier(chunk)
    stepping, field = setup.stepping, setup.field_of(chunk.args)
    state, out = solve_chunk(
        stepping, field, setup.plan.saving, chunk, setup.field.join, forward_mode=forward_mode
    )
    codes = retcodes(stepping, field, chunk, state)
    return _result(setup, chunk, state, out, codes)


def _chunk(setup: Setup, every: Lane, shared: Lane, mask: Any) -> Chunk:
    """The numbers of a chunk, lanes last."""
    field, batched = setup.field, setup.plan.batched
    lane = eqx.combine(every, shared)
    width = setup.width

    def last(x, is_batched):
        return jnp.moveaxis(x, 0, -1) if is_batched else jnp.asarray(x)

    u0 = last(lane.u0, batched.u0)
    if not batched.u0:
        u0 = jnp.broadcast_to(u0[..., None], (*u0.shape, width))
    consts = [last(x, b) for x, b in zip(lane.consts, batched.consts, strict=True)]
    p = [last(x, b) for x, b in zip(lane.p, batched.p, strict=True)]
    tol = None
    if lane.abstol is not None:
        pair = ((lane.abstol, batched.abstol), (lane.reltol, batched.reltol))
        tol = Tolerances(*(_tolerance(field, last(x, b), b) for x, b in pair))
    t0, t1 = last(lane.t0, batched.t0), last(lane.t1, batched.t1)
    sizes = ((lane.dt, batched.dt), (lane.dtmin, batched.dtmin), (lane.dtmax, batched.dtmax))
    dt, *bounds = [None if x is None else last(x, b) for x, b in sizes]
    times = lane.saveat
    if times is not None and lane.count is not None:
        rows = jnp.arange(times.shape[-1], dtype=lane.count.dtype)
        beyond = jnp.where(t1 < t0, -jnp.inf, jnp.inf).astype(times.dtype)
        if batched.count or beyond.ndim:
            wanted = rows[None] < jnp.broadcast_to(lane.count, (width,))[:, None]
            beyond = jnp.broadcast_to(beyond, (width,))[:, None]
            times = jnp.where(wanted, jnp.broadcast_to(times, wanted.shape), beyond)
        else:
            times = jnp.where(rows < lane.count, times, beyond)
    return Chunk(
        field.split(u0), field.prepare(consts, p), t0, t1, tol, dt, StepBounds(*bounds), times, mask
    )


def _tolerance(field: LaneField, x: Any, batched: bool) -> Any:
    """A number, a number a lane, or leaves."""
    if x.ndim == batched:
        return x
    return field.split(x if batched else x[..., None])


def _result(setup: Setup, chunk: Chunk, state: State, out: Output | None, codes: Any) -> Result:
    field, stepping = setup.field, setup.stepping
    u0, end = (jnp.moveaxis(field.join(x), -1, 0) for x in (chunk.u0, state.y))
    saved = Saved(None, None, None) if out is None else Saved(out.u, out.t, out.row)
    numbers = Numbers(u0, chunk.t0, chunk.t1, chunk.times)
    counts = Counts(codes, state.naccept, state.ntried)
    has_dt = chunk.dt is not None
    return result_of(setup.plan, stepping.method, has_dt, numbers, end, saved, counts)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


#
# In reverse
#


@eqx.filter_custom_vjp
def _with_adjoint(numbers, mask, setup):
    return _all_chunks(setup, *numbers, mask)


@_with_adjoint.def_fwd
def _(perturbed, numbers, mask, setup):
    del perturbed
    result = _all_chunks(setup, *numbers, mask)
    steps = result.naccept + result.nreject
    return result, (result.retcode, steps, (result.u, result.t, result.length))


@_with_adjoint.def_bwd
def _(residuals, cotangents, perturbed, numbers, mask, setup):
    codes, steps, saved = residuals
    cotangent = cotangents[0]
    if cotangent is None:
        return jax.tree.map(lambda _: None, numbers)
    adjoint = setup.plan.method.value.adjoint
    moving = any(jtu.tree_leaves([[x.t0, x.t1, x.saveat] for x in perturbed]))
    if not (moving or adjoint == "BacksolveAdjoint" or setup.plan.saving.mode == "steps"):
        saved = None
    (every, shared), fixed = eqx.partition(numbers, eqx.is_inexact_array)
    fixed_every, fixed_shared = fixed
    order, back = _by_cost(setup, steps)
    lanes = jax.tree.map(_merged, (every, fixed_every, cotangent, saved))

    def one(carry, numbers):
        room, grad_shared = carry
        which, ok = numbers
        # A failed lane is not solved again; its numbers, which may be infinite or NaN, are replaced
        # by those of one that succeeded, so that products with shared weights stay finite.
        which = jnp.where(ok, which, which[jnp.argmax(ok)])
        every, fixed, cotangent, saved = jax.tree.map(lambda x: x[which], lanes)
        weight = ok.reshape(-1, *(1,) * (cotangent.ndim - 1))
        cotangent = jnp.where(weight, cotangent, jnp.zeros_like(cotangent))

        def chunk_of(every, shared):
            lane, rest = eqx.combine(every, fixed), eqx.combine(shared, fixed_shared)
            chunk = _chunk(setup, lane, rest, ok)
            return _real_parts(chunk), chunk

        _, pullback, chunk = jax.vjp(chunk_of, every, shared, has_aux=True)
        grads, room = _pull_back(setup, chunk, cotangent, saved, moving, room)
        # (With no lane that succeeded, all numbers are those of one that failed.)
        some = jnp.any(ok)
        grads = jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), grads)
        grad_every, more_shared = pullback(grads)
        return (room, jax.tree.map(jnp.add, grad_shared, more_shared)), grad_every

    like = jax.eval_shape(lambda e, s, m: _chunk(setup, e, s, m), *_firsts(numbers), mask[0])
    zero = jax.tree.map(jnp.zeros_like, shared)
    room = (
        None if adjoint == "BacksolveAdjoint" else buffers(setup.stepping, setup.plan.saving, like)
    )
    succeeded = _merged(mask & (codes == ReturnCode.Success.value))[order]
    (_, grad_shared), grad_every = jax.lax.scan(one, (room, zero), (order, succeeded))
    return jax.tree.map(lambda x: _merged(x)[back].reshape(x.shape), grad_every), grad_shared


def _by_cost(setup: Setup, steps: Any) -> tuple:
    """Lanes in chunks of those that took about as many steps, as a chunk takes the most of any.

    **Returns:** which lane is at each place, `[chunk, lane]`, and at which place each is, `[n]`.
    """
    here = np.arange(steps.size, dtype=np.int32)
    if setup.stepping.controller is None or steps.shape[0] == 1:
        return here.reshape(steps.shape), here
    order = jnp.argsort(steps.reshape(-1)).astype(np.int32)
    back = jnp.zeros_like(order).at[order].set(here, unique_indices=True)
    return order.reshape(steps.shape), back


def _merged(x: Any) -> Any:
    """Without the axis of the chunks."""
    return x.reshape(-1, *x.shape[2:])


def _firsts(numbers: tuple) -> tuple:
    every, shared = numbers
    return _first(every), shared


def _real_parts(chunk: Chunk) -> tuple:
    """What of a chunk has cotangents."""
    args = eqx.filter(chunk.args, eqx.is_inexact_array)
    return chunk.u0, args, chunk.t0, chunk.t1, chunk.times


def _pull_back(
    setup: Setup, chunk: Chunk, cotangent: Any, saved: Any, moving: bool, room: Any
) -> tuple:
    """The cotangents of `_real_parts(chunk)`, from that of the saved states.

    `saved`: the saved states, their times and how many, where they are wanted; `moving`: whether
    times have cotangents.
    """
    saving, field = setup.plan.saving, setup.field
    at_start = at_end = tuple(map(jnp.zeros_like, chunk.u0))
    rows = cotangent
    if saving.mode == "ends":
        at_end, rows = field.split(_lane_last(cotangent[:, -1])), None
        if saving.start:
            at_start = field.split(_lane_last(cotangent[:, 0]))
    wide, narrow = setup.wide(chunk.args)
    u, t, length = saved or (None, None, None)
    pulled = Cotangent(at_end, rows, u, t, length)
    adjoint, at_u0, grad_args, room = _ADJOINTS[setup.plan.method.value.adjoint](
        setup.stepping, setup.field_of, saving, chunk, pulled, room, field.split, wide
    )
    (grad_args,) = narrow(grad_args)
    grad_u0 = map_leaves(jnp.add, at_u0, at_start)
    times = (chunk.t0, chunk.t1, chunk.times)
    if not moving:
        grad_times = jax.tree.map(jnp.zeros_like, times)
    else:
        # A state saved at t0 is u0, whenever that is; but where it is at a time given by saveat.
        at_t0 = at_u0 if saving.mode == "times" else adjoint
        grad_times = _pull_back_times(setup, chunk, cotangent, u, length, at_t0)
    return (grad_u0, grad_args, *grad_times), room


def _pull_back_times(
    setup: Setup, chunk: Chunk, cotangent: Any, u: Any, length: Any, adjoint: Leaves
) -> tuple:
    """The cotangents of `t0`, `t1` and the saved times: those of the states along the field, in the
    lanes of the mask.

    Exact for the solution of the ODE, and so to the tolerances for the one computed.
    """
    field, split = setup.field_of(chunk.args), setup.field.split
    t0, t1, times = chunk.t0, chunk.t1, chunk.times

    def along(adjoint, y, t):
        return jnp.where(chunk.mask, sum_of(jnp.multiply, adjoint, field(y, t)), 0)

    def at_row(i, t):
        # Of rows that are not reached there is no state, and their times may be infinite.
        there = i < length
        adjoint, y = (split(_lane_last(x[:, i])) for x in (cotangent, u))
        found = along(adjoint, select(there, y, chunk.u0), jnp.where(there, t, t0))
        return jnp.where(there, found, 0)

    def at_last(t):
        last = jnp.maximum(length - 1, 0).reshape(-1, *(1,) * (u.ndim - 1))
        rows = (jnp.take_along_axis(x, last, 1)[:, 0] for x in (cotangent, u))
        return along(*(split(_lane_last(x)) for x in rows), t)

    def like(x, value):
        return value if x.ndim else jnp.sum(value)

    grad_t0 = like(t0, -along(adjoint, chunk.u0, t0))
    grad_t1 = jnp.zeros_like(t1)
    if setup.plan.saving.mode != "times":
        grad_t1 = like(t1, at_last(t1))
    if times is None:
        return grad_t0, grad_t1, None
    by_row = [at_row(i, times[..., i]) for i in range(times.shape[-1])]
    grad_times = jnp.stack(by_row, axis=-1)
    return grad_t0, grad_t1, grad_times if times.ndim == 2 else jnp.sum(grad_times, axis=0)


def _lane_last(x: Any) -> Any:
    return jnp.moveaxis(x, 0, -1)
