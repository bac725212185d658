"""The interface of engines, which integrate one trajectory or many."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import PyTree

from ...plan.events import TracedCallbacks
from ...plan.noise import NoiseTerms
from ...plan.plan import Plan, Result
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem.ensemble import EnsembleAlgorithm
from ...tracing.program import Program, Static
from .results import for_one, only


class Engine(abc.ABC):
    """Integrates trajectories.

    - `name`: the name that `engine=` takes.
    - `default_sensealg`: the name of the adjoint that is used without `sensealg`.
    - `shares_work`: whether the trajectories of a batch, however many, are taken in turn by
        `plan.threads` threads of the CPU, so that sharing work needs no further devices.
    - `on_gpu`: whether it runs each trajectory on a thread of a GPU.
    - `chooses`: whether rows have only the components that are saved (`Plan.chosen`).
    - `closed`: whether all its solves are this library's own primitives, which are closed under
        differentiation (see `derivatives/primitives.py`).
    - `noise_in_field`: whether the field of a stochastic problem is the step of its method, with
        the noise in it (see `plan/stochastic_field.py`); else it is the drift, beside `Plan.noise`.
    - `numbers_apart`: whether a numeric literal in `f` should become a constant of its program:
        then another number compiles nothing, and the bits are the same.

    The primitives are made of these functions:

    - `rows(plan, lanes, mask)`: returns a list of the saved states (where only ends are saved, the
        last state), `[trajectory, row, *Plan.row_shape]`; and, where there is room for events, of
        their rows (see `results.rows_of_events`). The rows of trajectories that fail are arbitrary.
    - `pull_back(flow, lanes, known, cotangents)`: turns the cotangents of the rows into those of
        the initial states and of the parameters that are `wanted` (see `flow.Flow`). There is one
        cotangent for each trajectory, or one for each group where all trajectories share a
        parameter. The cotangents of trajectories that failed are arbitrary.
    - `push(flow, lanes, known, v)`: returns the tangents of the rows. An engine without it solves
        the field with tangents.
    """

    name: ClassVar[str]
    default_sensealg: ClassVar[str]
    shares_work: ClassVar[bool] = False
    on_gpu: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    closed: ClassVar[bool] = False
    noise_in_field: ClassVar[bool] = False
    numbers_apart: ClassVar[bool] = False
    rows: ClassVar[Callable[[Plan, TrajectoryNumbers, Any], list] | None] = None
    pull_back: ClassVar[Callable[..., list] | None] = None
    push: ClassVar[Callable[..., list] | None] = None

    def closes(self, plan: Plan) -> bool:
        """Whether this solve is a primitive that is closed under differentiation."""
        return self.closed

    def missing(self) -> str | None:
        """Why this engine can't run on this machine; None when it can."""
        return None

    def unreadable(self, field: Program, state: PyTree, batched: TrajectoryNumbers) -> str | None:
        """Why this engine can't run this field on such a state; None when it can.

        **Arguments:** `batched`: which numbers differ between trajectories, as booleans.
        """
        return None

    def unreadable_callbacks(self, events: TracedCallbacks) -> str | None:
        """Why this engine can't run these callbacks; None when it can."""
        return None

    def unreadable_noise(self, noise: NoiseTerms) -> str | None:
        """Why this engine can't run a stochastic problem with this noise; None when it can."""
        return None

    def slower(
        self, field: Program, state: PyTree, batched: TrajectoryNumbers, *, is_extended: bool
    ) -> str | None:
        """Why another engine is better with this field; None where none is. `is_extended` says
        whether the state has components behind the user's."""
        return None

    @abc.abstractmethod
    def method(self, alg: Any, options: dict, *, has_dt: bool) -> Static:
        """The solver with its static options, as a hashable object.

        **Raises:** `ValueError` and `TypeError` for options that can't be combined.
        """

    def reads_form(self, method: Static) -> bool:
        """Whether the method reads what is known of `f` besides its program (`Plan.form`)."""
        return getattr(getattr(method.value, "method", None), "is_implicit", False)

    def counts(self, method: Static) -> tuple[str, ...]:
        """The names of the counts that a result has (see `Stats`)."""
        of_f = () if method.value.stages is None else ("nf",)
        of_matrices = ("njac", "nw", "nsolve") if Engine.reads_form(self, method) else ()
        return "naccept", "nreject", *of_f, *of_matrices

    def versions(self, method: Static) -> dict[str, str]:
        """The versions of the packages, besides ensembleode and JAX, that results depend on."""
        return {}

    def integrate(self, plan: Plan, lane: TrajectoryNumbers) -> Result:
        """The solution of one trajectory: a pure function of its numbers."""
        plan, lane = for_one(plan, lane)
        return only(plan, self.solve_trajectories(plan, lane, 1))

    @abc.abstractmethod
    def solve_trajectories(
        self, plan: Plan, lanes: TrajectoryNumbers, n: int, mask: Any = None
    ) -> Result:
        """The solutions of `n` trajectories, with the trajectories along the first axis (in `t`
        only where they have their own times). Those that the mask excludes need not be solved."""

    def width(self, state: PyTree, n: int) -> int:
        """How many neighbouring trajectories, of `n` with such a state, stay on the same device."""
        return 1

    def is_stoppable(self) -> bool:
        """Whether, on a CPU, the engine looks at `TrajectoryNumbers.stop`, and gives trajectories
        that have not ended by then the return code `Default`."""
        return False

    def interpolant(self, method: Static) -> Any:
        """How the solution within a saved step is computed: the method that makes the step again;
        the number of nodes of `Result.inner`; or None for the cubic polynomial that the states and
        slopes at both ends define."""
        ours = getattr(method.value, "method", None)
        # A method that remembers earlier steps can't make a step again from the state alone.
        return None if ours is None or ours.remembers else ours

    def factorises(self, plan: Plan) -> bool:
        """Whether the steps factorise matrices."""
        return False

    def executor(self, ensemblealg: EnsembleAlgorithm | None) -> Any:
        """The executor for ensembles, if this engine has its own; None for the usual executor.

        **Raises:** `ValueError` for ensemble algorithms that the engine doesn't support.
        """
        return None
