"""The two kernels as functions of arrays, which `jax.vmap` makes wider: an axis that is mapped over
becomes more trajectories of the same launch."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ...plan import Plan
from ...program import Program
from ...trajectories import Lane
from ..codegen import parameters_of
from ..results import Counts, Saved
from . import launch
from .generate import BLOCK, Description, pulling_back, size_of, solving, with_gradients
from .numbers import arrays_of, layout_of


# Steps of a record, at least: longer ones need fewer runs.
_RECORD = 512
# Bytes that the records of all threads take: where they would be more, there are fewer threads.
_WORKSPACE = 2**30


class Setup(NamedTuple):
    """What a launch is for, but for the numbers.

    - `controlled`: how many components of the state step-size control looks at (the first ones).
    - `n`: how many trajectories; `groups`: how many groups of as many, each of which has its own
        sum of the gradients by shared parameters.
    """

    plan: Plan
    controlled: int
    n: int
    groups: int = 1

    def description(self, lanes: Lane) -> Description:
        plan, solver = self.plan, self.plan.method.value
        # The number of rows is no part of the source.
        saving = plan.saving._replace(rows=0)
        layout = layout_of(plan, lanes)
        own_times = bool(plan.batched.saveat)
        assert isinstance(plan.field, Program)
        return Description(
            plan.field,
            self.controlled,
            solver.tableau,
            solver.controller,
            saving,
            layout,
            own_times,
        )


#
# Forwards
#


def solve(setup: Setup, lanes: Lane, mask: Any) -> tuple[Any, Saved, Counts]:
    """Solve: the last states where nothing else is saved, what is saved, and the counts.

    **Arguments:**

    - `lanes`: the numbers, the trajectories first where `setup.plan.batched` says so.
    - `mask`: which are wanted: [n].
    """
    call = jax.custom_batching.custom_vmap(functools.partial(_solve, setup))

    @call.def_vmap
    def _(size, batched, lanes, mask):
        wide, lanes, mask = _widened(setup, size, batched, lanes, mask)
        out = solve(wide, lanes, mask)
        return _folded(out, size), jax.tree.map(lambda _: True, out)

    return call(lanes, mask)


def _solve(setup: Setup, lanes: Lane, mask: Any) -> tuple[Any, Saved, Counts]:
    plan, n = setup.plan, setup.n
    d = setup.description(lanes)
    rows, steps = plan.saving.rows, plan.saving.mode == "steps"
    outputs = [jax.ShapeDtypeStruct((_rows(plan), d.size, n), d.dtype)]
    if steps:
        outputs.append(jax.ShapeDtypeStruct((rows, n), d.dtype))
    outputs.append(jax.ShapeDtypeStruct((3 + (plan.saving.mode != "ends"), n), jnp.int32))
    sizes = jnp.array([n, rows, plan.maxiters, n, n, n, 0], jnp.int32)
    kernel = launch.Kernel(solving(d), "solve", BLOCK)
    u, *t, counts = launch.launch(kernel, n, _operands(d, setup, lanes, mask, sizes), outputs)
    u = jnp.moveaxis(u, -1, 0).reshape(n, -1, *plan.state.shape)
    codes = Counts(counts[0].astype(jnp.int8), counts[1], counts[2])
    if plan.saving.mode == "ends":
        return u[:, 0], Saved(None, None, None), codes
    return None, Saved(u, t[0].T if steps else None, counts[3]), codes


def _rows(plan: Plan) -> int:
    return 1 if plan.saving.mode == "ends" else plan.saving.rows


def _operands(d: Description, setup: Setup, lanes: Lane, mask: Any, sizes: Any) -> list[Any]:
    operands = [sizes, mask]
    if d.saving.mode == "times":
        times = jnp.asarray(lanes.saveat, d.dtype)
        operands.append(times.T if d.own_times else times)
    return [*operands, *arrays_of(d.layout, setup.plan, lanes, setup.n)]


#
# In reverse
#


class Pulled(NamedTuple):
    """Cotangents: `u0 [trajectory, *state]`, and of the constants and parameters of the field those
    that are real numbers, `[trajectory, ...]`, or `[group, ...]` where all share them."""

    u0: Any
    parameters: list[Any]


def pull_back(setup: Setup, lanes: Lane, mask: Any, cotangent: Any, saved: Any) -> Pulled:
    """Pull back through the trajectories of the mask.

    **Arguments:**

    - `cotangent`: that of the last states, `[trajectory, *state]`, or of the saved ones,
        `[trajectory, row, *state]`.
    - `saved`: where every step is saved, the states, their times and how many; else None.
    """
    call = jax.custom_batching.custom_vmap(functools.partial(_pull_back, setup))

    @call.def_vmap
    def _(size, batched, lanes, mask, cotangent, saved):
        wide, lanes, mask, cotangent, saved = _widened(
            setup, size, batched, lanes, mask, cotangent, saved
        )
        out = pull_back(wide, lanes, mask, cotangent, saved)
        u0, parameters = _folded(out, size)
        before = _real(setup.plan)
        parameters = [
            # Shared in each, but not by all: the sum over the trajectories of each group.
            x.reshape(size, setup.groups, -1, *x.shape[2:]).sum(2) if own and not was_own else x
            for x, was_own, own in zip(parameters, before, _real(wide.plan), strict=True)
        ]
        out = Pulled(u0, parameters)
        return out, jax.tree.map(lambda _: True, out)

    return call(lanes, mask, cotangent, saved)


def _real(plan: Plan) -> list[bool]:
    """Of the constants and parameters of the field that are real numbers: which are batched?"""
    batched = (*plan.batched.consts, *plan.batched.p)
    avals = parameters_of(plan.field)
    return [b for b, a in zip(batched, avals, strict=True) if jnp.issubdtype(a.dtype, jnp.floating)]


def _pull_back(setup: Setup, lanes: Lane, mask: Any, cotangent: Any, saved: Any) -> Pulled:
    plan, n, groups = setup.plan, setup.n, setup.groups
    d = setup.description(lanes)
    which = with_gradients(d)
    avals = parameters_of(plan.field)
    own, shared = (size_of(d, part) for part in which)
    record = min(plan.maxiters, max(_RECORD, math.isqrt(plan.maxiters - 1) + 1))
    segments = -(-plan.maxiters // record)
    each = max(1, shared)
    if saved is None:
        each += record * (d.size + 2) + segments * (d.size + 3)
    most = max(1, _WORKSPACE // (each * d.dtype.itemsize) // groups)
    of_group = min(n // groups, most)
    threads = groups * of_group

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, d.dtype)

    sizes = [n, plan.saving.rows, plan.maxiters, threads, of_group, n // groups, record]
    operands = _operands(d, setup, lanes, mask, jnp.array(sizes, jnp.int32))
    operands.append(cotangent.reshape(n, -1).T)
    outputs = [array(d.size, n), array(max(1, own), n), array(max(1, shared), threads)]
    if saved is None:
        outputs += [array(record, d.size + 2, threads), array(segments, d.size + 3, threads)]
    else:
        u, t, length = saved
        operands += [u.reshape(n, -1).T, t.T, length.astype(jnp.int32)]
    kernel = launch.Kernel(pulling_back(d), "pull_back", BLOCK)
    to_u0, to_own, to_shared, *_ = launch.launch(kernel, threads, operands, outputs)
    to_shared = to_shared.reshape(-1, groups, of_group).sum(2)
    found = {}
    for part, flat in zip(which, (to_own, to_shared), strict=True):
        start = 0
        for i in part:
            end = start + math.prod(avals[i].shape)
            found[i] = flat[start:end].T.reshape(-1, *avals[i].shape).astype(avals[i].dtype)
            start = end
    return Pulled(to_u0.T.reshape(n, *plan.state.shape), [found[i] for i in sorted(found)])


#
# Wider
#


def _widened(setup: Setup, size: int, batched: Any, lanes: Lane, mask: Any, *more: Any) -> tuple:
    """For an axis of this size, which comes first in what is `batched`: as many more trajectories.

    What all share, but not over that axis, becomes each trajectory's own.
    """
    n, own = setup.n, setup.plan.batched
    lanes_batched, mask_batched, *more_batched = batched

    def fold(x, is_batched, is_own=True):
        if not is_own:
            return jnp.repeat(x, n, axis=0) if is_batched else x
        x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        return x.reshape(size * n, *x.shape[2:])

    now_own = jax.tree.map(lambda a, b: bool(a or b), own, lanes_batched)
    plan = dataclasses.replace(setup.plan, batched=now_own)
    wide = setup._replace(plan=plan, n=size * n, groups=size * setup.groups)
    lanes = jax.tree.map(fold, lanes, lanes_batched, own)
    folded = [jax.tree.map(fold, x, b) for x, b in zip(more, more_batched, strict=True)]
    return (wide, lanes, fold(mask, mask_batched), *folded)


def _folded(out: Any, size: int) -> Any:
    """Their results, with that axis first again."""
    return jtu.tree_map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
