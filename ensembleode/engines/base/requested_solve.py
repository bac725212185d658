"""What a solve asks an engine for."""

from typing import Any, NamedTuple

from ...plan.trajectory_numbers import Trajectories
from ...problem.ensemble import EnsembleAlgorithm
from ...problem.number_table import but, of_kind
from ...solvers import JuliaAlg
from ...solvers.julia_alg import among


class RequestedSolve(NamedTuple):
    """What a solve asks for: the solver `alg`, the trajectories `every` with their options, and the
    ensemble algorithm (None for a single problem, and where any will do)."""

    alg: Any
    every: Trajectories
    ensemblealg: EnsembleAlgorithm | None

    def option(self, name: str) -> Any:
        return self.every.options[name]

    def by(self, *sensealgs: str) -> bool:
        """Whether the solve is differentiated by one of these adjoints."""
        return type(self.option("sensealg")).__name__ in sensealgs

    @property
    def state(self) -> Any:
        return self.every.field.out_avals[0]

    @property
    def mass(self) -> Any:
        """The mass matrix; None for the identity."""
        return None if self.every.form is None else self.every.form.mass

    def first_given(self, *kinds: str) -> str:
        """The first option of these kinds that is given; empty where none is."""
        rows = (x for x in of_kind(*kinds) if getattr(self.every.batched, x.name) is not None)
        return next((x.option for x in rows), "")

    def first_own(self, *shared: str) -> str:
        """The first option of other kinds than these that differs between trajectories."""
        rows = but("state", "parameters", "constants", "flag", *shared)
        return next((x.option for x in rows if getattr(self.every.batched, x.name)), "")

    @property
    def in_julia(self) -> set[str]:
        """The names of the method in Julia, and of those that it switches between."""
        alg = self.alg
        if isinstance(alg, JuliaAlg):
            return {x.name for x in among(alg.description)}
        return {type(x).__name__ for x in (alg, getattr(alg, "stiff", alg))}
