"""The room for the events of trajectories, which grows where it is too small."""

import dataclasses
from typing import Any

import numpy as np

from ..ground.retcode import ReturnCode
from .job import Job, with_output
from .lane import Trajectories
from .plan import Outcome


# The room for events of a trajectory where the user doesn't say how many there are.
MOST_EVENTS = 16
# The factor by which the room grows where it is too small.
_MORE = 8
# The largest room. A ball that comes to rest bounces ever more often, and no room is enough for it.
_MOST_ROOM = 2**13


def first_room(every: Trajectories) -> int:
    """The number of events of a trajectory for which there is room at first."""
    events = every.events
    if events is None or not events.is_kept:
        return 0
    if events.only_ends:
        return len(events.callbacks)  # several may act at the end
    return every.options["max_events"] or MOST_EVENTS


def with_more_room(job: Job, outcome: Outcome) -> Job | None:
    """The job with more room for events, to be run again. None if no trajectory had more events
    than there was room for, or if the user has said how many there may be."""
    if not lacks_room(job, outcome).any():
        return None
    return with_output(job.replan(max_events=_MORE * job.plan.max_events))


def lacks_room(job: Job, outcome: Outcome) -> Any:
    """The trajectories that had more events than there was room for, and for which there may be
    more room."""
    given = job.trajectories.options["max_events"]
    if job.plan.events is None or given is not None or job.traced:
        return np.False_
    if job.plan.max_events >= _MOST_ROOM:
        return np.False_
    return np.asarray(outcome.retcode) == ReturnCode.MaxEvents.value


def check_room(had: tuple, has: tuple) -> None:
    """**Raises:** `ValueError` where more room for events has changed the shape of an output."""
    if had != has:
        raise ValueError(
            f"what output_func returns has the shape {had}, and {has} where there was more room "
            "for events: return what does not depend on how many may be, such as sol.events.count, "
            "or pass max_events, as many as a trajectory may have."
        )


def of_whole(job: Job) -> Job:
    """The job whose sink regards a trajectory as done only if there was room for its events."""
    sink = job.sink
    if sink is None or job.plan.events is None:
        return job
    return dataclasses.replace(
        job, sink=lambda outcome, done: sink(outcome, done & ~lacks_room(job, outcome))
    )
