"""Solves over lanes, with derivatives (see `engines/derivatives.py`): of any order by replay, the
first alone, in reverse mode, by a continuous adjoint.

What pushes tangents forwards is the derivative, by JAX, of the time loop, and what a second
derivative wants is that of what pulls cotangents back: in both, steps are constants.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ... import sensitivity
from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...fields import parameters_of
from ..along import where
from ..derivatives import differentiable
from ..flow import Known, own_of, real_of, reals_of, with_own, with_reals
from ..results import with_times
from .chunks import chunk_of, in_chunks, Setup, setup_of, solve, width_of
from .continuous_adjoints import backsolve, gauss
from .loop import Chunk
from .replay import buffers, Cotangent, pull_back, Replay


# How a chunk is pulled back, by the name of its `sensealg`.
_ADJOINTS = {"ReplayAdjoint": pull_back, "GaussAdjoint": gauss, "BacksolveAdjoint": backsolve}


class Found(NamedTuple):
    """What else is known of trajectories: how many `steps` they took, `[trajectory]`, and what was
    saved (`u`, `t`, and how many rows), where that is wanted."""

    steps: Any
    saved: Any = None


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
    mask = jnp.ones(n, bool) if mask is None else mask
    solver = plan.method.value
    setup = Trajectories(plan, n, alone=alone)
    if solver.direction == "forward":
        result = sensitivity.forward_only(_solved(setup, lanes, mask))
        return with_times(plan, lanes, result)
    if solver.adjoint != "ReplayAdjoint":
        lanes = sensitivity.reverse_only(lanes, solver.adjoint + "()")
    result = _solved(setup, jax.lax.stop_gradient(lanes), mask)
    keeps = plan.saving.mode == "steps" or solver.adjoint == "BacksolveAdjoint"
    saved = (result.u, result.t, result.length) if keeps else None
    found = Found(result.naccept + result.nreject, saved)
    result = result._replace(u=differentiable(setup, lanes, mask, result, found))
    return with_times(plan, lanes, result)


class _Below(NamedTuple):
    """Of a field with tangents: that without, its state, how many of its parameters are constants,
    which of them have tangents, and what is below that."""

    field: Any
    state: Any
    consts: int
    moved: tuple[int, ...]
    below: Any


class Trajectories(NamedTuple):
    """`flow.Setup` of chunks of lanes.

    - `alone`: whether the chunk of a single trajectory may be narrower than that of an ensemble.
    """

    plan: Plan
    n: int
    groups: int = 1
    alone: bool = False
    below: _Below | None = None

    def with_tangents(self, plan: Plan, moved: tuple[int, ...]) -> "Trajectories":
        here = self.plan
        consts = len(here.batched.consts)
        below = _Below(here.field, here.state, consts, moved, self.below)
        return self._replace(plan=plan, below=below)

    def widens(self, size: int) -> bool:
        # Where a chunk is full they are solved in turn, and what they share stays shared.
        return 2 * self.n <= width_of(self.plan.state, size * self.n)

    def chunks(self, lanes: Lane) -> Setup:
        """How they are laid out."""
        alone = self.alone and self.n == 1
        setup = setup_of(self.plan, lanes, alone=alone)
        if alone:
            return setup
        return setup._replace(width=max(setup.width, width_of(self.plan.state, self.n)))

    def rows(self, lanes: Lane, known: Known) -> Any:
        if self.below is None:
            u = _solved(self, lanes, known.ok).u
            return u[:, -1:] if self.plan.saving.mode == "ends" else u
        low, at, x, v = self._apart(lanes)
        pair = jax.jvp(lambda *x: low.rows(at(*x), known), x, v)
        return jnp.stack(pair, axis=2)

    def pull_back(self, lanes: Lane, known: Known, cotangent: Any) -> list:
        if self.below is not None:
            return self._pull_back_tangents(lanes, known, cotangent)
        own = own_of(self.plan)
        if self.groups == 1:
            return _pulled_back(self, lanes, known, cotangent)
        setup, lanes = with_own(self._replace(groups=1), lanes, [True] * len(own))
        u0, *parameters = _pulled_back(setup, lanes, known, cotangent)
        return [u0, *self._summed(parameters, own_of(setup.plan), own, known)]

    def _pull_back_tangents(self, lanes: Lane, known: Known, cotangent: Any) -> list:
        low, at, x, v = self._apart(lanes)
        # The states that were saved have tangents, too: they are found anew.
        known = known._replace(more=known.more._replace(saved=None))

        def pulled(c, *x):
            return low.pull_back(at(*x), known, c)

        of_states, of_tangents = cotangent[:, :, 0], cotangent[:, :, 1]
        to_tangents, to_numbers = jax.jvp(pulled, (of_tangents, *x), (of_states, *v))
        u0 = jnp.stack([to_numbers[0], to_tangents[0]], axis=1)
        n_consts, real = len(lanes.consts), real_of(low.plan)
        avals = parameters_of(self.plan.field)[:n_consts]
        consts = [jnp.zeros((self.groups, *a.shape), a.dtype) for a in avals if _is_real(a)]
        which = [real.index(i) for i in self.below.moved]
        found = [*to_numbers[1:], *(to_tangents[1 + j] for j in which)]
        own = own_of(low.plan)
        own = [*own, *(own[j] for j in which)]
        wanted = own_of(self.plan)[len(consts) :]
        return [u0, *consts, *self._summed(found, own, wanted, known)]

    def _summed(self, parameters: list, own: list, wanted: list, known: Known) -> list:
        """Of those that are one a trajectory the sum over each group, where that is wanted."""

        def one(x, is_own, wants_own):
            if not is_own or wants_own:
                return x
            return where(known.ok, x).reshape(self.groups, -1, *x.shape[1:]).sum(1)

        return list(map(one, parameters, own, wanted))

    def _apart(self, lanes: Lane) -> tuple:
        """Of a field with tangents: the setup without, what makes its numbers of the first states
        and of the parameters that have tangents, these, and their tangents.

        (Each trajectory has its own of what has a tangent of its own.)
        """
        below, batched = self.below, self.plan.batched
        last = len(lanes.p) - len(below.moved)
        parts = slice(below.consts), slice(below.consts, last), slice(last, None)
        (consts, p, tangents), own = ([x[part] for part in parts] for x in (lanes.p, batched.p))
        plan = dataclasses.replace(
            self.plan,
            field=below.field,
            state=below.state,
            batched=batched._replace(consts=own[0], p=own[1]),
        )
        low = self._replace(plan=plan, below=below.below)
        numbers = lanes._replace(u0=lanes.u0[:, 0], consts=consts, p=p)
        is_own = dict(zip(below.moved, own[2], strict=True))
        real = real_of(plan)
        low, numbers = with_own(low, numbers, [is_own.get(i, False) for i in real])
        reals = reals_of(plan, numbers)
        which = [real.index(i) for i in below.moved]
        x = [reals[j] for j in which]
        v = [jnp.broadcast_to(a, b.shape) for a, b in zip(tangents, x, strict=True)]

        def at(u0, *x):
            moved = dict(zip(which, x, strict=True))
            now = [moved.get(j, x) for j, x in enumerate(reals)]
            return with_reals(plan, numbers._replace(u0=u0), now)

        return low, at, (numbers.u0, *x), (lanes.u0[:, 1], *v)


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _solved(setup: Trajectories, lanes: Lane, mask: Any) -> Result:
    """All chunks, one after the other, the times as far as each lane has its own."""
    chunked, n = setup.chunks(lanes), setup.n
    width = chunked.width
    every, shared = eqx.partition(lanes, setup.plan.batched)
    chunks = -(-n // width)
    every = jax.tree.map(lambda x: in_chunks(x, chunks, width), every)
    wanted = in_chunks(jnp.asarray(mask), chunks, width)
    wanted = wanted & jnp.asarray(np.arange(chunks * width).reshape(chunks, width) < n)
    result = solve(chunked, every, shared, wanted)
    return jax.tree.map(lambda x: _merged(x)[:n], result)


def _pulled_back(setup: Trajectories, lanes: Lane, known: Known, cotangent: Any) -> list:
    """See `flow.Setup`: of what all share, the sum over all."""
    plan = setup.plan
    solver, saving = plan.method.value, plan.saving
    steps, saved = known.more
    if saving.mode == "steps" and saved is None:
        result = _solved(setup, lanes, known.ok)
        saved = result.u, result.t, result.length
    chunked = setup.chunks(lanes)
    own, reals = own_of(plan), reals_of(plan, lanes)
    every = [lanes.u0, *(x for x, o in zip(reals, own, strict=True) if o)]
    shared = [x for x, o in zip(reals, own, strict=True) if not o]
    fixed_every, fixed_shared = eqx.partition(lanes, plan.batched)
    order, back, ok = _by_cost(chunked, steps, known.ok)

    def one(carry, which):
        room, grad_shared = carry
        which, ok = which
        # A failed lane is not solved again; its numbers, which may be infinite or NaN, are replaced
        # by those of one that succeeded, so that products with shared weights stay finite.
        which = jnp.where(ok, which, which[jnp.argmax(ok)])
        here, fixed, c, saved_here = jax.tree.map(
            lambda x: x[which], (every, fixed_every, cotangent, saved)
        )

        def numbers_of(every, shared):
            u0, *each = every
            each, rest = iter(each), iter(shared)
            lane = eqx.combine(fixed, fixed_shared)._replace(u0=u0)
            lane = with_reals(plan, lane, [next(each if o else rest) for o in own])
            lane, rest = eqx.partition(lane, plan.batched)
            chunk = chunk_of(chunked, lane, rest, ok)
            return (chunk.u0, eqx.filter(chunk.args, eqx.is_inexact_array)), chunk

        _, pullback, chunk = jax.vjp(numbers_of, here, shared, has_aux=True)
        grads, room = _pull_back(chunked, chunk, where(ok, c), saved_here, room)
        # (With no lane that succeeded, all numbers are those of one that failed.)
        some = jnp.any(ok)
        grads = jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), grads)
        grad_every, more_shared = pullback(grads)
        return (room, jax.tree.map(jnp.add, grad_shared, more_shared)), grad_every

    like = jax.eval_shape(
        lambda which: chunk_of(
            chunked,
            jax.tree.map(lambda x: x[which], fixed_every),
            fixed_shared,
            ok[0],
        ),
        order[0],
    )
    room = None
    if solver.adjoint != "BacksolveAdjoint":
        room = buffers(chunked.stepping, saving, like)
    zero = jax.tree.map(jnp.zeros_like, shared)
    (_, grad_shared), grad_every = jax.lax.scan(one, (room, zero), (order, ok))
    u0, *each = [_merged(x)[back] for x in grad_every]
    each, rest = iter(each), iter(grad_shared)
    return [u0, *(next(each) if o else next(rest)[None] for o in own)]


def _by_cost(setup: Setup, steps: Any, ok: Any) -> tuple:
    """Lanes in chunks of those that took about as many steps, as a chunk takes the most of any.

    **Returns:** which trajectory is at each place, `[chunk, lane]`, at which place each is,
    `[trajectory]`, and which places hold one that succeeded.
    """
    n = len(steps)
    chunks = -(-n // setup.width)
    places = chunks * setup.width
    here = np.arange(places, dtype=np.int32)
    order = back = here
    if setup.stepping.controller is not None and chunks > 1:
        order = jnp.argsort(jnp.pad(steps, (0, places - n))).astype(np.int32)
        back = jnp.zeros_like(order).at[order].set(here, unique_indices=True)
    succeeded = jnp.pad(ok, (0, places - n))[order]
    shape = chunks, setup.width
    return jnp.minimum(order, n - 1).reshape(shape), back[:n], succeeded.reshape(shape)


def _merged(x: Any) -> Any:
    """Without the axis of the chunks."""
    return x.reshape(-1, *x.shape[2:])


def _pull_back(setup: Setup, chunk: Chunk, cotangent: Any, saved: Any, room: Any) -> tuple:
    """The cotangents of the first states and of the arguments that are real, from that of the rows.

    `saved`: the saved states, their times and how many, where they are wanted.
    """
    saving, field = setup.plan.saving, setup.field
    at_end = tuple(map(jnp.zeros_like, chunk.u0))
    rows = cotangent
    if saving.mode == "ends":
        at_end, rows = field.split(jnp.moveaxis(cotangent[:, 0], 0, -1)), None
    wide, narrow = setup.wide(chunk.args)
    u, t, length = saved or (None, None, None)
    replay = Replay(setup.stepping, setup.field_of, saving, chunk, rows, field.split, wide)
    _, at_u0, grad_args, room = _ADJOINTS[setup.plan.method.value.adjoint](
        replay, Cotangent(at_end, u, t, length), room
    )
    (grad_args,) = narrow(grad_args)
    return (at_u0, grad_args), room
