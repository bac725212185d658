"""The lanes engine: an integrator for chunks of trajectories, on arrays of JAX.

The state of a chunk is `[*state, lane]`, with the trajectories last: one contiguous vector for each
component where the field is small, and matrix products `W @ X` where it is a network. Every lane
has its own step size, acceptance, end and return code.

- `chunks.py`: from trajectories to chunks and back. `solves.py`: solves, chunk by chunk.
- `loop.py`: the time loop of a chunk; `stops.py`: its position among known times; `saved_rows.py`:
    the states that it saves.
- `gradients.py`: the way back through solves; `replay.py` and `continuous_adjoints.py`: the way
    back through a chunk.

The vector field over lanes is in `fields/lanes`.
"""

import functools
from typing import Any

import jax

from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...fields.lanes.field import LaneField
from ...fields.lanes.interpreter import NotInLanesError
from ...fields.transposes import effects_of
from ...ground.placement import platform
from ...tracing.program import Program
from ..closed import Closed
from ..compiled.compiler import available
from ..flow import Flow
from . import gradients, solves
from .chunks import width_of
from .gradients import Found
from .replay import SavedRows


@functools.lru_cache(maxsize=256)
def _unreadable(field, shape, dtype, batched_consts, batched_p) -> str | None:
    if found := effects_of(field):
        # Lanes that only fill up a chunk would have these effects, too.
        effects = ", ".join(sorted(map(str, found)))
        return f"f has effects ({effects}), and it would have them more often than asked for."
    try:
        LaneField(field, jax.ShapeDtypeStruct(shape, dtype), batched_consts, batched_p)
    except NotInLanesError as e:
        return f"f can't be evaluated for several trajectories at once ({e})."
    return None


class Lanes(Closed):
    """Integrates over arrays of JAX, whose last axis is the lane."""

    name = "lanes"
    default_sensealg = "ReplayAdjoint"
    moves_steps = True
    solved = staticmethod(solves.solve)
    rows = staticmethod(solves.rows)
    pull_back = staticmethod(gradients.pull_back)

    def unreadable(self, field: Program, state: Any, batched: Lane) -> str | None:
        """Why this engine can't run this field on such a state; None when it can."""
        return _unreadable(field, state.shape, state.dtype, batched.consts, batched.p)

    def is_stoppable(self) -> bool:
        """True where there is LLVM, which compiles the kernel that reads the flag."""
        return available() is None

    def width(self, state: Any, n: int) -> int:
        """The number of lanes of a chunk."""
        return width_of(state, n)

    def more_of(self, plan: Plan, result: Result) -> Found:
        """The numbers of steps that trajectories took, and the saved states, where they are
        needed."""
        keeps = plan.saving.mode == "steps" or plan.method.value.adjoint == "BacksolveAdjoint"
        saved = SavedRows(result.u, result.t, result.length) if keeps else None
        return Found(result.naccept + result.nreject, saved)

    def widens(self, flow: Flow, size: int) -> bool:
        """False where a chunk is full: more trajectories are then solved in turn, so that what they
        share stays shared. On an accelerator, a chunk is never full."""
        return platform() != "cpu" or 2 * flow.n <= width_of(flow.plan.state, size * flow.n)


ENGINE = Lanes()
