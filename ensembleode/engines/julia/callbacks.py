"""The callbacks of a plan in Julia: conditions and affects are printed like the vector field."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...fields import Inputs, lower, UntranslatableError
from ...plan.events import CallbackProgram, TracedContinuous, TracedDiscrete, TracedStepLimit
from ...plan.plan import Plan, RecordedEvents
from .source import julia_source, JuliaDefinition


def callbacks_as_table(plan: Plan, inputs: Inputs) -> dict[str, Any] | None:
    """The tables of the callbacks in a request, in the order in which the callbacks act; None if
    there are no callbacks.

    **Raises:** `ValueError` that names a primitive that can't be translated, and its place.
    """
    events = plan.events
    if events is None:
        return None
    table = _Table(inputs, plan.saving.mode == "steps")
    return {
        "room": plan.max_events,
        "longest": events.longest,
        "continuous": [table.continuous(x) for x in events.continuous],
        "discrete": [table.discrete(x) for x in events.discrete if not x.after_jump],
    }


def written_events(plan: Plan, n: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays in which Julia writes the events of `n` trajectories."""
    room = plan.max_events
    if plan.events is None or not room:
        return {}
    dtype, size = plan.state.dtype, math.prod(plan.state.shape)
    shapes = {
        "t": ((n, room), dtype),
        "which": ((n, room), np.int32),
        "crossed": ((n, room, plan.events.longest), np.int32),
        "before": ((n, room, size), dtype),
        "after": ((n, room, size), dtype),
        "count": ((n,), np.int32),
    }
    return {_PREFIX + name: jax.ShapeDtypeStruct(*about) for name, about in shapes.items()}


def events_of(plan: Plan, arrays: dict[str, Any]) -> RecordedEvents | None:
    """The events in the arrays that Julia wrote; None if no events are kept."""
    if _PREFIX + "t" not in arrays:
        return None
    found = RecordedEvents(
        *(jnp.asarray(arrays[_PREFIX + name]) for name in RecordedEvents._fields)
    )
    shape = (*found.which.shape, *plan.state.shape)
    return found._replace(before=found.before.reshape(shape), after=found.after.reshape(shape))


_PREFIX = "event_"


@dataclasses.dataclass(frozen=True)
class _Table:
    """Makes the tables of callbacks."""

    inputs: Inputs  # the layout of the parameters
    saves: bool  # whether every step is saved, and so are the states at events

    def continuous(self, x: TracedContinuous) -> dict[str, Any]:
        up, down = (jump and self.part(jump.part, "affect") for jump in (x.up, x.down))
        return {
            **self.common(x),
            "condition": self.part(x.conditions, "condition"),
            "up": up,
            "down": down,
            "length": x.length,
            "is_vector": x.is_vector,
            "rootfind": x.rootfind.__name__,
            "interp_points": x.interp_points,
            "repeat_nudge": x.repeat_nudge,
            "dtrelax": x.dtrelax,
        }

    def discrete(self, x: TracedDiscrete) -> dict[str, Any]:
        return {
            **self.common(x),
            "condition": self.part(x.condition, "condition"),
            "affect": self.part(x.jump.part, "affect"),
            "limit": None if x.limit is None else self.limit(x.limit),
        }

    def common(self, x: TracedContinuous | TracedDiscrete) -> dict[str, Any]:
        positions = x.save_positions if self.saves else (False, False)
        return {"which": x.which, "kept": x.is_kept, "save_positions": list(positions)}

    def limit(self, x: TracedStepLimit) -> dict[str, Any]:
        tolerance = None if x.tolerance is None else self.part(x.tolerance, "abstol")
        return {"tolerance": tolerance, "scalefactor": x.scalefactor}

    def part(self, part: CallbackProgram, what: str) -> dict[str, Any]:
        return _translated(part, self.inputs, what).as_table()


@functools.lru_cache(maxsize=256)
def _translated(part: CallbackProgram, inputs: Inputs, what: str) -> JuliaDefinition:
    extras = [(name, 0) for name in part.extras]
    inputs = inputs._replace(places=(*inputs.places, *extras))
    try:
        return julia_source(lower(part.program.jaxpr, inputs), "part")
    except UntranslatableError as e:
        raise ValueError(
            f"the {what} of a callback can't be translated to Julia: it uses {e.what}, at "
            f"{e.where}. Write that part otherwise, or use another engine."
        ) from e
