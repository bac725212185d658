"""Derivatives of any order of solves by diffrax, where no adjoint is asked for: the solves are the
primitives of `engines/derivatives/primitives.py`, and this module computes these.

In forward mode, diffrax's ordinary loop is differentiated, in reverse mode its loop that keeps
checkpoints. Both give the derivatives of the numerical solution with its steps held constant.
"""

from collections.abc import Callable, Sequence
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from ...ground.devices.alone import alone
from ...plan.plan import Plan, Result
from ...plan.trajectory_numbers import TrajectoryNumbers
from ..base.results import numbers_of_each, with_times
from ..derivatives.along import fit_for
from ..derivatives.derivatives import by_group, differentiable, of_groups
from ..derivatives.flow import Flow, inexact_of, RecordedSolve, with_own, with_wanted
from .solving import each_of


def solve(plan: Plan, lanes: TrajectoryNumbers, n: int, mask: Array | None) -> Result:
    """The solutions of `n` trajectories, of which those in the mask are wanted."""
    fixed = jax.tree.map(jax.lax.stop_gradient, lanes)
    result = alone(lambda lanes: each_of(plan, lanes, n), fixed)
    mask = jnp.ones(n, bool) if mask is None else mask
    return with_times(plan, lanes, differentiable(plan, lanes, mask, result))


def rows(plan: Plan, lanes: TrajectoryNumbers, mask: Any) -> list:
    """See `engine.Engine`."""
    return [_rows_by(None, plan, lanes, len(mask))]


def push(flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, v: Sequence) -> list:
    """The tangents of the rows, from those of the initial states and of the parameters that are
    `moved`."""
    v0, *tangents = v
    moved = dict(zip(inexact_of(flow.plan.field), flow.moved, strict=True))
    asked = {i: m for i, m in moved.items() if m is not None}
    flow, lanes = with_own(flow.with_moved(wanted=tuple(asked)), lanes, list(asked.values()))
    # (A parameter that each trajectory has for itself may have a tangent that all share.)
    given = zip(tangents, asked.values(), flow.own, strict=True)
    tangents = [numbers_of_each(x, bool(is_own) or not own, flow.n) for x, is_own, own in given]

    def at(u0: Array, values: list) -> Array:
        numbers = with_wanted(flow, lanes, values)._replace(u0=u0)
        return _rows_by(diffrax.ForwardMode(), flow.plan, numbers, flow.n)

    return [jax.jvp(at, (lanes.u0, flow.wanted_of(lanes)), (v0, tangents))[1]]


def pull_back(
    flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, cotangents: Sequence
) -> list:
    """See `engine.Engine`."""
    fit: Callable = fit_for(known.ok)
    lanes = jax.tree.map(lambda x, own: fit(x, bool(own)), lanes, flow.plan.batched)

    def at(u0: PyTree, values: list) -> PyTree:
        here, numbers = of_groups(flow, lanes, values)
        return _rows_by(None, here.plan, numbers._replace(u0=u0), flow.n)

    _, pulled = jax.vjp(at, lanes.u0, by_group(flow, lanes))
    # diffrax promotes types where it solves backwards, which jax may be told to refuse.
    with jax.numpy_dtype_promotion("standard"):
        to_u0, to_values = pulled(*cotangents)
    # If none succeeded, the numbers are those of one that failed.
    some = jnp.any(known.ok)
    return [jnp.where(some, x, jnp.zeros_like(x)) for x in (to_u0, *to_values)]


def _rows_by(
    adjoint: diffrax.AbstractAdjoint | None, plan: Plan, lanes: TrajectoryNumbers, n: int
) -> Array:
    """The saved states of `n` trajectories; where only ends are saved, the last state."""
    u = each_of(plan, lanes, n, adjoint).u
    return u[:, -1:] if plan.saving.mode == "ends" else u
