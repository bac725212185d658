"""The engines of ours: what their solves have in common, whose derivatives are solves again."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .. import sensitivity
from ..core.lane import Lane
from ..core.plan import Plan, Result
from ..tracing.program import Static
from . import explicit
from .derivatives import differentiable
from .engine import Engine
from .flow import Flow, Known
from .results import with_times


class Closed(Engine):
    """An engine whose solves are primitives of ours (see `primitives.py`), of these functions:

    - `solved(plan, lanes, mask)`: the result of the trajectories that are wanted, its times only
        where each has its own.
    - `rows(plan, lanes, mask)`: what is saved of those that succeeded, the last state alone where
        only ends are: `[trajectory, row, *state]`; and behind that three rows an event, as far as
        there is room, the states before and after it, and its time as the first component. The
        rows of the others are any.
    - `pull_back(flow, lanes, known, cotangent)`: from the cotangents of the rows those of the first
        states, and of the real parameters, one a trajectory, or one a group where all share them.
        Those of trajectories that failed are any.
    - `moves_steps`: whether `ForwardDiffSensitivity()` differentiates the steps, too.
    - `has_jumps`: whether it solves with callbacks.
    """

    chunked = True
    closed = True
    moves_steps: ClassVar[bool] = False
    has_jumps: ClassVar[bool] = True
    solved: ClassVar[Callable[[Plan, Lane, Any], Result]]
    rows: ClassVar[Callable[[Plan, Lane, Any], Any]]
    pull_back: ClassVar[Callable[[Flow, Lane, Known, Any], list]]

    def more_of(self, plan: Plan, result: Result) -> Any:
        """What `pull_back` wants to know besides, `Known.more`."""
        del plan, result

    def widens(self, flow: Flow, size: int) -> bool:
        """Whether `size` times as many are better solved at once, than so many times these."""
        del flow, size
        return True

    def method(self, alg: Any, options: dict, *, has_dt: bool) -> Static:
        """See `explicit.method`."""
        return explicit.method(alg, options, has_dt=has_dt)

    def solve_trajectories(self, plan: Plan, lanes: Lane, n: int, mask: Any = None) -> Result:
        """Solve `n` trajectories."""
        solver = plan.method.value
        forward = solver.direction == "forward"
        mask = jnp.ones(n, bool) if mask is None else mask
        if not forward and solver.adjoint != self.default_sensealg:
            lanes = sensitivity.reverse_only(lanes, solver.adjoint + "()")
        if forward and self.moves_steps:
            result = self.solved(plan, lanes, mask)
        else:
            result = self.solved(plan, jax.tree.map(jax.lax.stop_gradient, lanes), mask)
            result = differentiable(plan, lanes, mask, result, self.more_of(plan, result))
        if forward:
            result = sensitivity.forward_only(result)
        return with_times(plan, lanes, result)
