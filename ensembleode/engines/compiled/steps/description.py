"""The complete description of a kernel."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ....fields import parameters_of
from ....fields.derivatives.residuals import SplitTranspose
from ....fields.derivatives.transposes import in_two_parts
from ....plan.events import TracedCallbacks
from ....plan.implicit_form import ImplicitForm
from ....plan.saving import Saving
from ....solvers.controllers import AbstractController
from ....solvers.explicit_runge_kutta import RungeKutta
from ....solvers.mass_matrix import MassMatrix
from ....solvers.method import carry_like, Method
from ....solvers.norms import AbstractNorm
from ....solvers.switching import Switching
from ....tracing.program import Program
from ...derivatives.flow import inexact_of
from ..llvm.machine import current
from . import tuning
from .layout import NumbersLayout
from .stops import known_times


def least_in_memory() -> int:
    """The least number of components of a state that is an array in memory."""
    return current().registers


@dataclasses.dataclass(frozen=True)
class KernelDescription:
    """Everything that determines the code of a kernel.

    - `field`: the vector field, `field(consts, u, p, t)`.
    - `controlled`: how many components of the state, the first ones, step-size control looks at;
        `in_parts`: whether they are the parts of complex numbers (see `Plan.in_parts`).
    - `controller`: None with a fixed step.
    - `saving`: what is saved; its number of rows is no part of the code.
    - `saved`: the components that are saved; None for all.
    - `own_times`: whether each trajectory has its own times to save.
    - `events`: the callbacks, whose programs have no constants; None without callbacks.
    - `form`: what implicit methods need besides the field; None where they need nothing.
    - `in_memory`: whether a state is an array in memory (see `algebra/components.py`).
    - `inner`: whether states at inner nodes of steps are saved (`solution.dense.inner_nodes`).
    - `wanted`: the numbers of the field's constants and parameters whose cotangents are computed.
    - `has_fma`, `has_range`: whether the machine has these operations (see `machine.Machine`).
    - `on_gpu`: whether the kernel is for the threads of a GPU; see `kernel.KernelFrame`.
    """

    field: Program
    controlled: int
    method: Method
    controller: AbstractController | None
    norm: AbstractNorm
    saving: Saving
    layout: NumbersLayout
    own_times: bool
    width: int
    wanted: tuple[int, ...] = ()
    has_fma: bool = True
    has_range: bool = False
    on_gpu: bool = False
    events: TracedCallbacks | None = None
    form: ImplicitForm | None = None
    in_memory: bool = False
    inner: bool = False
    saved: tuple[int, ...] | None = None
    in_parts: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.field.out_avals[0].shape)

    @property
    def row(self) -> int:
        """How many components a saved row has."""
        return self.size if self.saved is None else len(self.saved)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.field.out_avals[0].dtype)

    @property
    def mass(self) -> MassMatrix | None:
        """The mass matrix; None for the identity."""
        return None if self.form is None else self.form.mass

    @property
    def carry_like(self) -> Any:
        """Zeros with the structure of the method's carry."""
        return carry_like(self.method, self.values, self.dtype)

    @property
    def values(self) -> int:
        """How many values represent a state in the code: one array, or one for each component."""
        return 1 if self.in_memory else self.size

    @property
    def recorded(self) -> int:
        """How many numbers a recorded step has, with its `evaluations` of the field."""
        return self.of_step + self.evaluations * self.evaluation

    @property
    def of_step(self) -> int:
        """How many numbers a recorded step has besides its evaluations: see
        `record.RecordedTurn`."""
        carried = jax.tree.leaves(self.carry_like) if self.method.remembers else []
        ends = int(self.records_end) + (0 if self.events is None else self.events.marks)
        return self.size * (1 + self.stages_apart) + len(carried) + int(self.switches) + ends + 2

    @property
    def parts(self) -> SplitTranspose | None:
        """The transposed field in two parts, if its residuals are recorded at every stage."""
        if not self.stages:
            return None
        own, shared = with_gradients(self)
        found = in_two_parts(self.field, (*own, *shared))
        return None if found is None or found.size > tuning.MOST_RESIDUALS else found

    @property
    def evaluation(self) -> int:
        """How many numbers are recorded of an evaluation: the derivative and the residuals."""
        parts = self.parts
        return 0 if parts is None else self.size + parts.size

    @property
    def evaluations(self) -> int:
        """How many evaluations of the field are recorded for a step. The last stage of some methods
        is the first one of the next step."""
        if not self.evaluation:
            return 0
        assert isinstance(self.method, RungeKutta)
        return self.stages - self.method.tableau.fsal

    @property
    def passes_on(self) -> bool:
        """Whether the last recorded evaluation of a step is always the first one of the next."""
        return self.is_uniform and 0 < self.evaluations < self.stages

    @property
    def sums_in_memory(self) -> bool:
        """Whether the cotangents of parameters that all trajectories share are summed up in memory.
        This doesn't depend on which are wanted, as it also decides how a step is recorded."""
        _, shared = _own_and_shared(self, inexact_of(self.field))
        many = size_of(self, shared) > tuning.MOST_VARIABLES
        return self.own_in_memory or (many and not self.on_gpu)

    @property
    def own_in_memory(self) -> bool:
        """Whether the cotangents of own parameters are summed up in memory, too."""
        own, _ = _own_and_shared(self, inexact_of(self.field))
        return not self.on_gpu and size_of(self, own) > tuning.MOST_OWN_VARIABLES

    @property
    def returned(self) -> int:
        """How many cotangents of own parameters the transposed field returns."""
        return 0 if self.own_in_memory else size_of(self, with_gradients(self)[0])

    @property
    def stages(self) -> int:
        """How many stages of a step are recorded: none if there are few parameters, so that the
        field is short, or if the state is large."""
        if not isinstance(self.method, RungeKutta) or not self.sums_in_memory:
            return 0
        return self.method.stages if self.size <= tuning.MOST_RECORDED else 0

    @property
    def unevaluated(self) -> int:
        """How many of the recorded stages, the first ones, have no recorded evaluation."""
        return self.stages - self.evaluations - self.passes_on

    @property
    def stages_apart(self) -> int:
        """How many of the stages, the first ones, are recorded apart from the evaluations."""
        return self.unevaluated if self.in_memory else self.stages

    @property
    def records_end(self) -> bool:
        """Whether a step may end before the method's attempt, or the next one begin later."""
        jumps = self.method.remembers and self.has("d_discontinuities")
        return self.events is not None or jumps

    @property
    def is_uniform(self) -> bool:
        """Whether all trajectories take the same steps, of one fixed size."""
        named = [x for x in self.layout.numbers if x.name in ("t0", "t1", "dt")]
        own = self.has_stops or self.has("max_norm") or any(x.is_own for x in named)
        return self.controller is None and not own and self.events is None

    @property
    def restarts(self) -> bool:
        """Whether the method's carry may have to be made anew during a trajectory."""
        return self.events is not None or self.has("d_discontinuities")

    @property
    def counted(self) -> tuple[str, ...]:
        """The names of the counts of a trajectory besides those of steps and rows."""
        events = ("events",) if self.events is not None else ()
        switches = ("stiff", "switches") if self.switches else ()
        return (*events, *switches, "restarts") if self.restarts else (*events, *switches)

    @property
    def switches(self) -> bool:
        """Whether each step is made by one of two methods."""
        return isinstance(self.method, Switching)

    @property
    def has_stops(self) -> bool:
        """Whether there are known times on which steps must end."""
        return bool(known_times(self.layout))

    @property
    def adaptive(self) -> bool:
        return self.controller is not None

    def has(self, name: str) -> bool:
        """Whether the trajectories have a number of this name."""
        return self.layout.find(name) is not None


def with_gradients(d: KernelDescription) -> tuple[list[int], list[int]]:
    """The indices of the constants and parameters of the field whose cotangents are computed: first
    those that each trajectory has for itself, then those that all trajectories share."""
    return _own_and_shared(d, d.wanted)


def _own_and_shared(d: KernelDescription, which: Sequence[int]) -> tuple[list[int], list[int]]:
    found: dict[str, list[int]] = {"own": [], "shared": []}
    for i in which:
        found[d.layout.inputs.places[i][0]].append(i)
    return found["own"], found["shared"]


def size_of(d: KernelDescription, which: Sequence[int]) -> int:
    """The total number of components of these constants and parameters of the field."""
    avals = parameters_of(d.field)
    return sum(math.prod(avals[i].shape) for i in which)
