"""How many events of a trajectory the record has room for, and how many a trajectory may have.

Outside of `jit`, a trajectory ends where there is no more room, and is solved again with more. In a
traced solve, it goes on past the record, which changes nothing of its states and their derivatives.
"""

import dataclasses
from typing import Any

import numpy as np

from ..ground.logs import log_once
from ..ground.retcode import ran_out_of_events
from ..plan.events import EVENT_ROWS
from ..plan.plan import Outcome, Plan
from ..plan.trajectory_numbers import Trajectories
from ..tracing.program import being_staged
from . import tuning
from .job import Job, with_output


def first_room(every: Trajectories) -> tuple[int, int]:
    """The number of events of a trajectory for which the record has room at first, and the number
    that it may have: the next one ends it. Events at known times are included."""
    events, given = every.events, every.options["max_events"]
    if events is None or not events.is_kept:
        return 0, 0
    if events.only_ends:
        room = sum(x.is_kept for x in events.callbacks)
    else:
        room = given or max(1, events.most_known + events.unforeseen * tuning.MOST_EVENTS)
    return room, room


def with_room_of_trace(job: Job, n: int) -> Job:
    """The job of a traced solve of `n` trajectories, with room in the record for as many events as
    memory allows; trajectories go on beyond it. Where that may be too few, a warning says so."""
    plan, events = job.plan, job.plan.events
    given = job.trajectories.options["max_events"]
    if not plan.max_events or given is not None:
        return job
    assert events is not None
    if events.only_ends:
        return job
    last = max(1, events.most_known + events.unforeseen * tuning.MOST_ROOM)
    record = tuning.RECORD_BYTES if being_staged() else tuning.RECORD_BYTES // tuning.EAGER_PART
    fitting = max(tuning.MOST_EVENTS, record // (n * _bytes(plan)))
    foreseen = (
        min(tuning.MOST_ROOM_TRACED, len(events.callbacks) * plan.maxiters) * events.unforeseen
    )
    room = max(1, min(events.most_known + foreseen, fitting))
    if room < last:
        later = "later ones act, and are counted, but are not in its arrays"
        if not plan.engine.closed:
            last, later = room, "a trajectory that has more ends with ReturnCode.MaxEvents"
        log_once(
            "inside jit, grad or vmap there is limited room for the events of a trajectory, as "
            f"sol.events.t.shape says: {later}. Pass max_events, as many as there may be."
        )
    return with_output(job.replan(max_events=room, last_event=last))


def _bytes(plan: Plan) -> int:
    """The bytes of an event in the record."""
    assert plan.events is not None
    return EVENT_ROWS * plan.state.size * plan.state.dtype.itemsize + 4 * (1 + plan.events.longest)


def with_more_room(job: Job, outcome: Outcome) -> Job | None:
    """The job with more room for events, to be run again. None if no trajectory had more events
    than there was room for, or if the user has said how many there may be."""
    if not lacks_room(job, outcome).any():
        return None
    room = tuning.ROOM_FACTOR * job.plan.max_events
    return with_output(job.replan(max_events=room, last_event=room))


def lacks_room(job: Job, outcome: Outcome) -> Any:
    """The trajectories that had more events than there was room for, and for which there may be
    more room."""
    given = job.trajectories.options["max_events"]
    if job.plan.events is None or given is not None or job.traced:
        return np.False_
    if job.plan.max_events >= tuning.MOST_ROOM + job.plan.events.most_known:
        return np.False_
    return ran_out_of_events(np.asarray(outcome.retcode))


def check_room(had: tuple, has: tuple) -> None:
    """**Raises:** `ValueError` where an output has another shape now that there is more room for
    events."""
    if had != has:
        raise ValueError(
            f"what output_func returns has the shape {had}, and {has} where there was more room "
            "for events: return what does not depend on how many may be, such as sol.events.count, "
            "or pass max_events, as many as a trajectory may have."
        )


def of_whole(job: Job) -> Job:
    """The job whose `sink` gets a trajectory as done only if there was room for its events."""
    sink = job.sink
    if sink is None or job.plan.events is None:
        return job
    return dataclasses.replace(
        job, sink=lambda outcome, done: sink(outcome, done & ~lacks_room(job, outcome))
    )
