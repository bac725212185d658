"""Room for the events of trajectories."""

from collections.abc import Callable

import numpy as np

from ..ground.retcode import ReturnCode
from .job import Job, with_output
from .lane import Trajectories
from .plan import Result


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


def with_all_events(job: Job, run: Callable[[Job], Result]) -> Result:
    """The outcome of `run(job)`; again with more room, where a trajectory had more events, and
    nobody has said how many may be."""
    if job.plan.events is None or job.trajectories.options["max_events"] is not None:
        return run(job)
    while True:
        outcome = run(job)
        has_more = (np.asarray(outcome.retcode) == ReturnCode.MaxEvents.value).any()
        if not has_more or job.plan.max_events >= _MOST_ROOM:
            return outcome
        job = with_output(job.replan(max_events=_MORE * job.plan.max_events))
