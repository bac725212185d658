"""The diffrax engine: any diffrax solver, step-size controller and adjoint.

- `solving.py`: solving by diffrax. It is imported when this engine is first used, because importing
    diffrax takes a third as long as importing everything else.
- `control.py`: this library's step-size controllers and norms within diffrax, and the end of
    trajectories that can't go on.
- `within_steps.py`: the solution within saved steps.
- `explicit.py`: this library's explicit methods that diffrax doesn't have.
- `noise.py`: stochastic problems, by the methods of diffrax for them.
- `gradients.py`: derivatives of any order, where no adjoint is asked for.
- `implicit.py`: diagonally implicit methods, with an explicit first stage.
"""

import importlib.metadata
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from ...plan.plan import Plan, Result
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...tracing.program import Static
from ..base.engine import Engine
from ..compiled.llvm.compiler import available


class DiffraxEngine(Engine):
    """Solves by diffrax, mapped over trajectories by `jax.vmap`."""

    name = "diffrax"
    default_sensealg = "RecursiveCheckpointAdjoint"

    def method(self, alg: Any, options: dict, *, has_dt: bool) -> Static:
        """See `solving.method`."""
        return _solving().method(alg, options, has_dt=has_dt)

    def counts(self, method: Static) -> tuple[str, ...]:
        """See `solving.counts`."""
        return _solving().counts(method)

    def versions(self, method: Static) -> dict[str, str]:
        """The versions of the packages that do the arithmetic."""
        packages = ("diffrax", "equinox", "lineax", "optimistix")
        return {package: importlib.metadata.version(package) for package in packages}

    def closes(self, plan: Plan) -> bool:
        """See `solving.closes`."""
        return _solving().closes(plan)

    def integrate(self, plan: Plan, lane: TrajectoryNumbers) -> Result:
        """Solve one trajectory."""
        if not self.closes(plan):
            return _solving().integrate(plan, lane)
        result = super().integrate(plan, lane)
        if plan.own_times:
            reached = jnp.arange(plan.saving.rows, dtype=result.length.dtype) < result.length
            result = result._replace(t=jnp.where(reached, result.t, jnp.nan))
        return result

    def solve_trajectories(
        self, plan: Plan, lanes: TrajectoryNumbers, n: int, mask: Array | None = None
    ) -> Result:
        """Solve trajectories, all at once."""
        if self.closes(plan):
            return _gradients().solve(plan, lanes, n, mask)
        return _solving().solve_trajectories(plan, lanes, n)

    @staticmethod
    def rows(plan: Plan, lanes: TrajectoryNumbers, mask: Any) -> list:
        """See `gradients.rows`."""
        return _gradients().rows(plan, lanes, mask)

    @staticmethod
    def push(flow: Any, lanes: TrajectoryNumbers, known: Any, v: tuple[Array, ...]) -> list:
        """See `gradients.push`."""
        return _gradients().push(flow, lanes, known, v)

    @staticmethod
    def pull_back(flow: Any, lanes: TrajectoryNumbers, known: Any, cotangents: PyTree) -> list:
        """See `gradients.pull_back`."""
        return _gradients().pull_back(flow, lanes, known, cotangents)

    def interpolant(self, method: Static) -> Any:
        """See `solving.interpolant`."""
        return _solving().interpolant(method)

    def is_stoppable(self) -> bool:
        """True where there is LLVM, which compiles the kernel that reads the flag."""
        return available() is None

    def factorises(self, plan: Plan) -> bool:
        """Whether its solver is implicit."""
        return _solving().factorises(plan)


def _solving() -> Any:
    from . import solving

    return solving


def _gradients() -> Any:
    from . import gradients

    return gradients


ENGINE = DiffraxEngine()
