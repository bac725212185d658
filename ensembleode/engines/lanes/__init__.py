"""The lanes engine: our own integrator for chunks of trajectories.

The state of a chunk is `[*state, lane]`, the trajectories last: one contiguous vector a component
where the field is small, matrix products `W @ X` where it is a network. Every lane has its own step
size, its own acceptance, its own end and its own return code.

- `field.py`: the vector field over lanes, from its jaxpr.
- `loop.py`: the time loop of a chunk, and what it saves.
- `adjoint.py`: its reverse mode; `continuous.py`: the continuous adjoints.
- `chunks.py`: trajectories to chunks and back.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ... import sensitivity
from ...core.plan import Plan, Result
from ...core.trajectories import Lane
from ...fields.lanes.field import LaneField
from ...fields.lanes.interpreter import NotInLanesError
from ...solvers.control import PIController
from ...tracing.program import Program, Static, trace
from ..checks import check_steps, refusal_of_ours
from ..rates import with_rates
from ..results import only
from . import chunks as _chunks


name = "lanes"
default_sensealg = "ReplayAdjoint"
chunked = True


class _Method(NamedTuple):
    """A solver and how it is differentiated: the `adjoint` is that of reverse mode."""

    tableau: Any
    controller: PIController | None
    direction: str
    adjoint: str

    @property
    def stages(self) -> int:
        return self.tableau.stages


_REVERSE = (
    sensitivity.ReplayAdjoint,
    sensitivity.GaussAdjoint,
    sensitivity.BacksolveAdjoint,
)
_SENSEALGS = (*_REVERSE, sensitivity.ForwardDiffSensitivity)


def refusal(alg: Any, options: dict, dtype: Any) -> str | None:
    """Why this engine can't run `alg` with these options on such a state; None when it can."""
    sensealg = options["sensealg"]
    if reason := refusal_of_ours(name, alg, options, dtype):
        return reason
    if sensealg is not None and not isinstance(sensealg, _SENSEALGS):
        return f"sensealg={type(sensealg).__name__}() is one of diffrax."
    return None


def field_refusal(field: Program, state: Any, batched: Lane) -> str | None:
    """Why this engine can't run this field, on such a state; None when it can."""
    return _field_refusal(field, state.shape, state.dtype, batched.consts, batched.p)


@functools.lru_cache(maxsize=1024)
def _field_refusal(field, shape, dtype, batched_consts, batched_p) -> str | None:
    if field.jaxpr.effects:
        # Lanes that fill up a chunk would have them, too.
        effects = ", ".join(sorted(map(str, field.jaxpr.effects)))
        return f"f has effects ({effects}), and it would have them more often than asked for."
    try:
        LaneField(field, jax.ShapeDtypeStruct(shape, dtype), batched_consts, batched_p)
    except NotInLanesError as e:
        return f"f can't be evaluated for several trajectories at once ({e})."
    return None


def versions(method: Static) -> dict[str, str]:
    """None besides ensembleode's and JAX's."""
    del method
    return {}


def method(alg: Any, options: dict, *, has_dt: bool) -> Static:
    """The solver with its options.

    **Raises:** `ValueError` for a fixed step without `dt`, or an adaptive one without an error
    estimate, or an adjoint that can't be used with `save_everystep`.
    """
    adaptive = alg.adaptive if options["adaptive"] is None else bool(options["adaptive"])
    check_steps(type(alg).__name__, alg.adaptive, adaptive, has_dt)
    sensealg = options["sensealg"]
    if isinstance(sensealg, sensitivity.BacksolveAdjoint) and options["save_everystep"]:
        raise ValueError(
            "sensealg=BacksolveAdjoint() can't be used with save_everystep=True; use saveat."
        )
    forward = isinstance(sensealg, sensitivity.ForwardDiffSensitivity)
    adjoint = next((x for x in _REVERSE if isinstance(sensealg, x)), sensitivity.ReplayAdjoint)
    controller = PIController(alg.order) if adaptive else None
    direction = "forward" if forward else "reverse"
    return Static(_Method(alg.tableau, controller, direction, adjoint.__name__))


def integrate(plan: Plan, lane: Lane) -> Result:
    """Solve one trajectory: a chunk on its own, as narrow as goes."""
    if not isinstance(plan.field, Program):
        plan, lane = _traced(plan, lane)
    batched = jax.tree.map(lambda _: False, plan.batched)
    plan = dataclasses.replace(plan, batched=batched)
    solved = _chunks.solve_trajectories(plan, lane, 1, alone=True)
    return only(plan, with_rates(plan, lane, solved))


def width(state: Any, n: int) -> int:
    """How many lanes a chunk has."""
    return _chunks.width_of(state, n)


def solve_trajectories(plan: Plan, lanes: Lane, n: int, mask: Any = None) -> Result:
    """Solve `n` trajectories, chunk by chunk."""
    return with_rates(plan, lanes, _chunks.solve_trajectories(plan, lanes, n, mask))


def _traced(plan: Plan, lane: Lane) -> tuple[Plan, Lane]:
    """The plan with a field of matrices, say, traced again."""

    def field(u, p, t):
        return plan.field(lane.consts, u, p, t)

    t = jax.ShapeDtypeStruct((), jnp.asarray(lane.t0).dtype)
    program, consts = trace(field, lane.u0, lane.p, t, rules=True)
    batched = plan.batched._replace(consts=(False,) * len(consts))
    plan = dataclasses.replace(plan, field=program, batched=batched)
    return plan, lane._replace(consts=tuple(consts))
