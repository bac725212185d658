"""Room for the events of trajectories."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ground.retcode import ReturnCode
from .job import Job, Unfinished, with_output
from .lane import Trajectories
from .plan import Outcome


# Of a trajectory, where nobody says how many there are.
MOST_EVENTS = 16
# By how much there is more room where that was not enough.
_MORE = 8
# Until it is this much: a ball that comes to rest bounces ever more often, and no room is enough.
_MOST_ROOM = 2**13


def first_room(every: Trajectories) -> int:
    """For how many events of a trajectory there is room at first."""
    events = every.events
    if events is None or not events.is_kept:
        return 0
    if events.only_ends:
        return 1
    return every.options["max_events"] or MOST_EVENTS


def with_all_events(job: Job, run: Callable[[Job], Outcome]) -> Outcome:
    """The outcome of `run(job)`; again with more room, where a trajectory had more events, and
    nobody has said how many may be."""
    if job.plan.events is None or job.trajectories.options["max_events"] is not None:
        return run(job)
    while job.plan.max_events < _MOST_ROOM:
        try:
            outcome = run(dataclasses.replace(job, sink=_of_whole(job.sink)))
        except Unfinished as e:
            raise Unfinished(e.outcome, e.done & ~_has_more(e.outcome), e.cause) from None
        if not _has_more(outcome).any():
            return outcome
        job = with_output(job.replan(max_events=_MORE * job.plan.max_events))
    return run(job)


def check_room(had: tuple, has: tuple) -> None:
    """**Raises:** `ValueError` where an output is of another shape than it was, as there was more
    room for events."""
    if had != has:
        raise ValueError(
            f"what output_func returns has the shape {had}, and {has} where there was more room "
            "for events: return what does not depend on how many may be, such as sol.events.count, "
            "or pass max_events, as many as a trajectory may have."
        )


def _of_whole(sink: Callable | None) -> Callable | None:
    """A sink that takes only trajectories whose events had room for done."""
    if sink is None:
        return None
    return lambda outcome, done: sink(outcome, done & ~_has_more(outcome))


def _has_more(outcome: Outcome) -> Any:
    """Which trajectories had more events than there was room for."""
    return np.asarray(outcome.retcode) == ReturnCode.MaxEvents.value
