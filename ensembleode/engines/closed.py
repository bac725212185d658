"""The common part of this library's own engines: their solves are primitives whose derivatives are
solves again."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .. import sensitivity
from ..core.lane import Lane
from ..core.plan import Plan, Result
from ..ground.alone import alone
from ..tracing.program import Static
from . import own_methods
from .derivatives import differentiable
from .engine import Engine
from .flow import Flow, Known
from .rest import at_rest
from .results import with_times


class Closed(Engine):
    """An engine whose solves are the primitives of `primitives.py`, which are made of these
    functions:

    - `solved(plan, lanes, mask)`: returns the result of the wanted trajectories; it has times only
        where each trajectory has its own.
    - `rows(plan, lanes, mask)`: returns a list with the saved states of the trajectories that
        succeeded (where only ends are saved, the last state), `[trajectory, row, *state]`; and,
        where there is room for events, with three rows for each of the `Plan.event_slots`: the
        state before it, the state after it, and its time as the first component. The rows of other
        trajectories are arbitrary.
    - `pull_back(flow, lanes, known, cotangents)`: turns the cotangents of the rows into those of
        the initial states and of the parameters that are `wanted` (see `flow.Flow`). There is one
        cotangent for each trajectory, or one for each group where all trajectories share a
        parameter. The cotangents of trajectories that failed are arbitrary.
    - `moves_steps`: whether `ForwardDiffSensitivity()` also differentiates the step sizes.
    """

    chunked = True
    closed = True
    moves_steps: ClassVar[bool] = False
    solved: ClassVar[Callable[[Plan, Lane, Any], Result]]
    rows: ClassVar[Callable[[Plan, Lane, Any], list]]
    pull_back: ClassVar[Callable[[Flow, Lane, Known, Any], list]]

    def more_of(self, plan: Plan, result: Result) -> Any:
        """The additional data that `pull_back` needs, `Known.more`."""
        del plan, result

    def widens(self, flow: Flow, size: int) -> bool:
        """Whether one solve of `size` times as many trajectories is better than `size` solves in
        turn."""
        del flow, size
        return True

    def method(self, alg: Any, options: dict, *, has_dt: bool) -> Static:
        """See `own_methods.method`."""
        return own_methods.method(alg, options, has_dt=has_dt)

    def solve_trajectories(self, plan: Plan, lanes: Lane, n: int, mask: Any = None) -> Result:
        """Solve `n` trajectories."""
        solver = plan.method.value
        forward = solver.direction == "forward"
        mask = jnp.ones(n, bool) if mask is None else mask
        if not forward and solver.adjoint != self.default_sensealg:
            lanes = sensitivity.reverse_only(lanes, solver.adjoint + "()")
        solve: Any = self.solved
        solved = functools.partial(solve, plan)
        if forward and self.moves_steps:
            result = alone(solved, lanes, mask)
        else:
            result = alone(solved, jax.tree.map(jax.lax.stop_gradient, lanes), mask)
            result = differentiable(plan, lanes, mask, result, self.more_of(plan, result))
        result = at_rest(plan, lanes, result)
        if forward:
            result = sensitivity.forward_only(result)
        return with_times(plan, lanes, result)
