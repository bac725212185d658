"""How the solve of a trajectory ended."""

import enum
import functools
import operator
from typing import Any

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

    def __str__(self) -> str:
        return self.name


def is_successful(retcode: Any) -> Any:
    """Which return codes belong to trajectories that reached their end, or an event that ended
    them."""
    return (retcode == ReturnCode.Success.value) | (retcode == ReturnCode.Terminated.value)


def has_failed(retcode: Any) -> Any:
    """Which return codes belong to trajectories that were run and did not succeed."""
    fine = ReturnCode.Success, ReturnCode.Terminated, ReturnCode.Default
    return functools.reduce(operator.and_, (retcode != code.value for code in fine))


def count_codes(retcode: Any, most: int = 5) -> str:
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
