"""How the solve of a trajectory ended."""

import enum
from typing import Any, TypeAlias

import numpy as np


class ReturnCode(enum.IntEnum):
    """How the solve of a trajectory ended (SciML's names)."""

    Default = 0
    """Not run: an ensemble stopped early before this trajectory."""
    Success = 1
    MaxIters = 2
    """`maxiters` steps were not enough."""
    DtLessThanMin = 3
    """The step size fell below the spacing of floating-point numbers, or a `dtmin`."""
    Unstable = 4
    """The state became infinite or NaN, or diverges within one spacing of time; or `f` is infinite
    or NaN at a point where the trajectory has to go on."""
    Failure = 5
    """Anything else: an implicit step that can't be solved; an `output_func` that still asked for a
    rerun after `max_repeats`; with `engine="julia"`, an event at which several conditions cross
    zero, of which Julia would lose some."""

    Terminated = 6
    """An affect ended it, by [`terminate`][ensembleode.terminate]: it is successful."""
    MaxEvents = 7
    """`max_events` events were not enough; the events until then are recorded."""
    ConvergenceFailure = 8
    """A [`ManifoldProjection`][ensembleode.ManifoldProjection] found no point on the manifold,
    or [`steady_state`][ensembleode.steady_state] no state at rest."""
    InitialFailure = 9
    """The algebraic equations of a singular mass matrix don't hold at the start, or after an
    affect."""
    Diverged = 10
    """The norm of the state exceeded `max_norm` after a step. (SciML has no such code.)"""

    def __str__(self) -> str:
        return self.name


class AffectOutcome(enum.IntEnum):
    """What an affect says of its trajectory, as the last number that it returns."""

    GoesOn = 0
    Terminates = 1
    """By [`terminate`][ensembleode.terminate]: the trajectory ends as `Terminated`."""
    NotConverged = 2
    """The affect could not be done: the trajectory ends as `ConvergenceFailure`."""


# A return code, its number, or an array of such numbers.
ReturnCodes: TypeAlias = Any


def reached_end(retcode: ReturnCodes) -> Any:
    """Which return codes belong to trajectories that reached the end of their time span."""
    return retcode == ReturnCode.Success.value


def was_ended(retcode: ReturnCodes) -> Any:
    """Which return codes belong to trajectories that an event ended."""
    return retcode == ReturnCode.Terminated.value


def was_run(retcode: ReturnCodes) -> Any:
    """Which return codes belong to trajectories that were run."""
    return retcode != ReturnCode.Default.value


def ran_out_of_steps(retcode: ReturnCodes) -> Any:
    """Which return codes belong to trajectories that `maxiters` stopped."""
    return retcode == ReturnCode.MaxIters.value


def ran_out_of_events(retcode: ReturnCodes) -> Any:
    """Which return codes belong to trajectories that `max_events` stopped."""
    return retcode == ReturnCode.MaxEvents.value


def is_successful(retcode: ReturnCodes) -> Any:
    """Which return codes belong to trajectories that reached their end, or an event that ended
    them."""
    return reached_end(retcode) | was_ended(retcode)


def has_failed(retcode: ReturnCodes) -> Any:
    """Which return codes belong to trajectories that were run and did not succeed."""
    # (`~` is another operation for a `bool`.)
    return was_run(retcode) & (is_successful(retcode) ^ True)


def count_codes(retcode: ReturnCodes, most: int = 5) -> str:
    """`Success 98, Unstable 2 [17, 42]`: each code, how often it occurs, and where."""
    parts = []
    for code in ReturnCode:
        where = np.flatnonzero(np.asarray(retcode) == code.value)
        if not len(where):
            continue
        part = f"{code.name} {len(where)}"
        if not is_successful(code.value):
            more = ", ..." if len(where) > most else ""
            part += f" [{', '.join(map(str, where[:most]))}{more}]"
        parts.append(part)
    return ", ".join(parts)
