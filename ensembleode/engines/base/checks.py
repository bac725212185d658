"""Checks of a solver and its options that several engines make."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ...ground.logs import log_once
from ...plan.events import TracedCallbacks
from ...plan.plan import Plan
from ...plan.trajectory_numbers import Trajectories, TrajectoryNumbers
from ...problem.number_table import of_kind
from ...problem.options import holds_tolerances
from ...tracing.program import is_tracer
from ...tracing.pulses import switches_in_time


def check_backsolve(options: dict) -> None:
    """**Raises:** `ValueError` for options with which the ODE can't be solved backwards."""
    if options["save_everystep"]:
        raise ValueError(
            "sensealg=BacksolveAdjoint() can't be used with save_everystep=True; use saveat."
        )


def check_controller(label: str, can_adapt: bool, controller: Any) -> None:
    """**Raises:** `ValueError` for a controller where the method has no error estimate."""
    if controller is not None and not can_adapt:
        raise ValueError(
            f"{label} has no error estimate for stepsize_controller to choose steps by: drop it "
            "and pass dt, or use an adaptive solver."
        )


def check_steps(label: str, can_adapt: bool, adaptive: bool, has_dt: bool) -> None:
    """**Raises:** `ValueError` for a fixed step without `dt`, or an adaptive one without an error
    estimate."""
    if adaptive and not can_adapt:
        raise ValueError(
            f"{label} has no error estimate, so adaptive must be False: pass adaptive=False and dt."
        )
    if not adaptive and not has_dt:
        reason = f"{label} has a fixed step" if not can_adapt else "adaptive=False"
        raise ValueError(f"dt is missing: {reason}, so pass its size, such as dt=0.01.")


def say_if_too_tight(adaptive: bool | None, dtype: DTypeLike, shared: TrajectoryNumbers) -> None:
    """Log a warning where the tolerances are smaller than `_ROUNDINGS` rounding errors of the
    state. `shared` has the known numbers that all trajectories share."""
    abstol, reltol, u0 = (
        None if x is None or is_tracer(x) else np.abs(np.asarray(x))
        for x in (shared.abstol, shared.reltol, shared.u0)
    )
    if adaptive is False or abstol is None or reltol is None:
        return
    size = np.float64(1) if u0 is None else u0
    precision = jnp.finfo(dtype)
    if not np.any(abstol + reltol * size < _ROUNDINGS * precision.eps * size):
        return
    remedy = "choose larger ones"
    if precision.bits < 64:
        remedy += (
            " or compute in float64: jax.config.update('jax_enable_x64', True) before anything "
            "else, and u0 in float64"
        )
    log_once(
        f"reltol={reltol.min():g} and abstol={abstol.min():g} are finer than the roundings of u0's "
        f"{np.dtype(dtype)}, which resolves {precision.eps:.2g} of a number: the solution is not "
        f"as accurate as they say, and its steps are chosen by rounding errors. So {remedy}."
    )


# In rounding errors of the state; an error estimate below this is noise.
_ROUNDINGS = 4


def say_if_it_switches(adaptive: bool | None, every: Trajectories) -> None:
    """Log a warning where `f` changes abruptly at a time that steps may cross."""
    told = every.batched.tstops, every.batched.d_discontinuities, every.batched.dtmax, every.events
    is_told = any(x is not None for x in told)
    if adaptive is False or is_told or holds_tolerances(every.options["stepsize_controller"]):
        return
    if how := switches_in_time(every.field):
        log_once(_SWITCHES[how], of=hash(every.field))


_SWITCHES = {
    "jump": (
        "f compares the time with something, or takes a remainder of it, and steps don't know of "
        "that: a pulse shorter than a step may be stepped over, and the solve succeeds without it; "
        "derivatives by the times where f jumps are 0. Give these times as d_discontinuities=, "
        "then they have derivatives, too; where f only bends, as tstops=; or bound the steps by "
        "dtmax=."
    ),
    "bend": (
        "f limits the time (a ramp by jnp.clip, say), and steps don't know where it bends: a ramp "
        "up and down within a step may be stepped over, and a step across a bend is as long as its "
        "order there, which is lower, allows. Give the times where f bends as tstops=, or bound "
        "the steps by dtmax=."
    ),
}


def say_that_stops_move(plan: Plan) -> None:
    """Log a warning where `f` jumps, and derivatives by `tstops` are asked for."""
    if plan.events is None and switches_in_time(plan.field) == "jump":
        log_once(
            "tstops depend on what this solve is differentiated by, and f compares the time with "
            "something. Where f jumps, the derivatives by these times are 0: give them as "
            "d_discontinuities=, which have derivatives.",
            of=hash(plan.field),
        )


def check_limits(adaptive: bool | None, events: TracedCallbacks | None) -> None:
    """**Raises:** `ValueError` for a callback that limits the step size, with a fixed step."""
    if adaptive is False and events is not None and events.limits:
        raise ValueError(
            "callback has a PositiveDomain, and PositiveDomain chooses how long steps are: pass a "
            "solver that is adaptive, such as eo.Tsit5(), and no adaptive=False."
        )


def check_bounds(adaptive: bool | None, batched: TrajectoryNumbers) -> None:
    """**Raises:** `ValueError` for bounds of the step size that are given with a fixed step."""
    for row in of_kind("bound"):
        if adaptive is False and getattr(batched, row.name) is not None:
            raise ValueError(
                f"{row.option} is given with a fixed step, which dt says: it bounds the steps that "
                "step-size control takes, so drop one of the two."
            )
