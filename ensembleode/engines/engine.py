"""What an engine is: it integrates one trajectory, or many."""

import abc
from typing import Any, ClassVar

from ..core.events import Events
from ..core.lane import Lane
from ..core.plan import Plan, Result
from ..tracing.program import Program, Static
from .results import for_one, only


class Engine(abc.ABC):
    """How trajectories are integrated.

    - `name`: what `engine=` calls it.
    - `default_sensealg`: the name of the adjoint that is used without `sensealg`.
    - `chunked`: whether it takes a large ensemble apart into chunks itself.
    - `solves_columns`: whether it can solve the matrix of all states as one state.
    - `shares_work`: whether it shares a batch out to threads of the CPU itself, as many as
        `plan.threads`, and needs no devices for that.
    - `on_gpu`: whether a trajectory is a thread of a GPU.
    - `closed`: whether its solves are primitives of ours, closed under differentiation (see
        `derivatives.py`).
    - `has_mass_matrices`: whether it solves with mass matrices, by methods that can.
    - `numbers_apart`: whether a number that is written in `f` is better a constant of its program:
        other numbers compile nothing, and the bits are the same.
    """

    name: ClassVar[str]
    default_sensealg: ClassVar[str]
    chunked: ClassVar[bool] = False
    solves_columns: ClassVar[bool] = True
    shares_work: ClassVar[bool] = False
    on_gpu: ClassVar[bool] = False
    closed: ClassVar[bool] = False
    numbers_apart: ClassVar[bool] = False
    has_mass_matrices: ClassVar[bool] = False

    @abc.abstractmethod
    def refusal(self, alg: Any, options: dict, dtype: Any, ensemblealg: Any) -> str | None:
        """Why this engine can't run the solver `alg` with these resolved options on a state of
        this dtype for this ensemble algorithm (None: of a problem alone); None when it can."""

    def field_refusal(self, field: Program, state: Any, batched: Lane) -> str | None:
        """Why this engine can't run this field on such a state; None when it can.

        **Arguments:** `batched`: what differs by trajectory, a `Lane` of booleans.
        """
        del field, state, batched
        return None

    def extended_refusal(self, options: dict) -> str | None:
        """Why this engine can't solve for components that its step-size control doesn't look at,
        as integrals are (see `core.extended_state`), with these options; None when it can."""
        del options
        return (
            "its step-size control looks at all components of a state, so it has no integrands: "
            "let f return what integrand does as further components of the state."
        )

    def events_refusal(self, events: Events) -> str | None:
        """Why this engine can't solve with these callbacks; None when it can."""
        del events
        return 'it has no callbacks: use engine="compiled", on threads or GPU kernels.'

    def slower(self, field: Program, state: Any, batched: Lane) -> str | None:
        """Why another engine is faster with this field, or alone has its derivative; else None."""
        del field, state, batched
        return None

    def known_times_refusal(self, options: dict) -> str | None:
        """Why this engine can't step onto known times (`tstops`, `d_discontinuities`) with these
        options; None when it can."""
        del options
        return None

    @abc.abstractmethod
    def method(self, alg: Any, options: dict, *, has_dt: bool) -> Static:
        """The solver with its static options, as something hashable.

        **Raises:** `ValueError` and `TypeError` for options that don't go together.
        """

    def counts(self, method: Static) -> tuple[str, ...]:
        """The names of the counts that a result has (see `solution.Stats`)."""
        value = method.value
        of_f = () if value.stages is None else ("nf",)
        ours = getattr(value, "method", None)
        of_matrices = ("njac", "nw", "nsolve") if getattr(ours, "is_implicit", False) else ()
        return "naccept", "nreject", *of_f, *of_matrices

    def versions(self, method: Static) -> dict[str, str]:
        """The versions of what results depend on, besides ensembleode and JAX."""
        del method
        return {}

    def integrate(self, plan: Plan, lane: Lane) -> Result:
        """The solution of one trajectory: a pure function of its numbers."""
        plan, lane = for_one(plan, lane)
        return only(plan, self.solve_trajectories(plan, lane, 1))

    @abc.abstractmethod
    def solve_trajectories(self, plan: Plan, lanes: Lane, n: int, mask: Any = None) -> Result:
        """The solutions of `n` trajectories, whose axis comes first (in `t` only where they have
        their own times). Those that the mask leaves out need not be solved."""

    def width(self, state: Any, n: int) -> int:
        """How many of `n` trajectories of such a state belong together on a device."""
        del state, n
        return 1

    def is_stoppable(self) -> bool:
        """Whether, on a CPU, it looks at `Lane.stop`, and then gives the trajectories that have not
        ended the return code `Default`."""
        return False

    def interpolant(self, method: Static) -> Any:
        """How the solution goes on within a saved step: as the step that this method makes, or by
        the states at so many nodes within it, which are then in `Result.inner`; None: as the cubic
        of the states and slopes at both ends."""
        ours = getattr(method.value, "method", None)
        # (What remembers earlier steps makes no step again from the state alone.)
        return None if ours is None or ours.remembers else ours

    def factorises(self, plan: Plan) -> bool:
        """Whether the steps factorise matrices."""
        del plan
        return False

    def executor(self, ensemblealg: Any) -> Any:
        """What runs ensembles, where this engine does so itself; None for the usual executor.

        **Raises:** `ValueError` for ensemble algorithms that it has not got.
        """
        del ensemblealg
        return None
