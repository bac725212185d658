"""All that decides a kernel."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ...core.events import Events
from ...core.saving import Saving
from ...solvers.controllers import AbstractController
from ...solvers.method import carry_like, Method
from ...solvers.norms import AbstractNorm
from ...solvers.switching import Switching
from ...tracing.program import Program
from .numbers import Layout
from .stops import known_times


@dataclasses.dataclass(frozen=True)
class Description:
    """All that decides a kernel.

    - `field`: the vector field, `field(consts, u, p, t)`.
    - `controlled`: how many components of the state step-size control looks at.
    - `method`, `controller`, `norm`: how it steps; no controller with a fixed step.
    - `saving`: what is saved (however many rows).
    - `layout`: what the numbers of a trajectory are.
    - `own_times`: whether each trajectory has its own times to save.
    - `events`: the callbacks, whose programs have no constants; None without.
    - `width`: how many lanes; `has_fma`: whether the machine has fused operations.
    - `on_gpu`: whether this is what a thread of a GPU does, `thread` of `threads`, both parameters
        that come first.
    """

    field: Program
    controlled: int
    method: Method
    controller: AbstractController | None
    norm: AbstractNorm
    saving: Saving
    layout: Layout
    own_times: bool
    width: int
    has_fma: bool = True
    on_gpu: bool = False
    events: Events | None = None

    @property
    def size(self) -> int:
        return math.prod(self.field.out_avals[0].shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.field.out_avals[0].dtype)

    @property
    def carry_like(self) -> Any:
        """What the method carries, of zeros."""
        return carry_like(self.method, self.size, self.dtype)

    @property
    def recorded(self) -> int:
        """How many numbers say what a step was: the state, what was carried (where that is not
        made of the state again), the time and the size; which of two methods made it; its end,
        where `records_end`, and with callbacks what acted there."""
        carried = jax.tree.leaves(self.carry_like) if self.method.remembers else []
        ends = int(self.records_end) + (0 if self.events is None else self.events.marks)
        return self.size + len(carried) + int(self.switches) + ends + 2

    @property
    def records_end(self) -> bool:
        """Whether a step may end before the attempt, or the next one begin later."""
        jumps = self.method.remembers and self.has("d_discontinuities")
        return self.events is not None or jumps

    @property
    def is_uniform(self) -> bool:
        """Whether all trajectories take the same steps, of a fixed size."""
        named = [x for x in self.layout.numbers if x.name in ("t0", "t1", "dt")]
        own = self.has_stops or any(x.is_own for x in named)
        return self.controller is None and not own and self.events is None

    @property
    def restarts(self) -> bool:
        """Whether what the method carries may be made anew on the way."""
        return self.events is not None or self.has("d_discontinuities")

    @property
    def counted(self) -> tuple[str, ...]:
        """What is counted of each trajectory besides its steps and rows."""
        events = ("events",) if self.events is not None else ()
        switches = ("stiff", "switches") if self.switches else ()
        return (*events, *switches, "restarts") if self.restarts else (*events, *switches)

    @property
    def switches(self) -> bool:
        """Whether each step is one of two methods'."""
        return isinstance(self.method, Switching)

    @property
    def has_stops(self) -> bool:
        """Whether there are known times to be stepped onto."""
        return bool(known_times(self.layout))

    @property
    def adaptive(self) -> bool:
        return self.controller is not None

    def has(self, name: str) -> bool:
        """Whether the trajectories have a number of this name."""
        return self.layout.find(name) is not None
