"""The solution of an ensemble, from what was computed."""

from typing import Any, Literal

import jax
import numpy as np
from jax import Array

from ..ground.devices.placement import as_jax_arrays
from ..ground.hidden_object import HiddenObject
from ..plan.plan import dense_of, Outcome, shared_times
from ..plan.trajectory_numbers import TrajectoryNumbers
from ..solution.events import first_events
from ..solution.solution import EnsembleSolution
from ..solution.stats import Stats
from ..trajectories.saved_values import rows_apart
from .job import adds_end, events_of, integers, Job, may_rerun, saved_of
from .run import Run


def ensemble_solution(run: Run, outcome: Outcome, elapsed: Any) -> EnsembleSolution:
    """The solution of an ensemble, of which this was computed in `elapsed` seconds."""
    ens, job = run.ens, run.job
    kind: Literal["trajectories", "outputs", "reduced"] = "trajectories"
    if ens.reduction is not None:
        kind = "reduced"
    elif ens.output_func is not None:
        kind = "outputs"
    u, t, inner, values, dense = outcome.u, outcome.t, outcome.inner, outcome.saved, None
    beside: tuple = (None, None, None)
    if kind == "trajectories":
        beside = outcome.integral, outcome.p_at, outcome.noise
    if t is None and kind == "trajectories":
        t = shared_times_of(job)
    retcode, lengths = outcome.retcode, outcome.length
    stats = Stats(*outcome.counts)
    if not job.traced:
        retcode, lengths, stats = jax.tree.map(np.asarray, (retcode, lengths, stats))
        if job.plan.saving.mode == "steps" and kind == "trajectories":
            most = max(1, int(lengths.max()))
            rows = (u, t, inner, beside)
            u, t, inner, beside = jax.tree.map(lambda x: x[:, :most], rows)
            if job.trajectories.times_of_values is None:
                values = jax.tree.map(lambda x: x[:, :most], values)
        if kind != "reduced":
            u, t, inner, beside, values = as_jax_arrays((u, t, inner, beside, values))
    numbers = step_numbers(job, run.n) if kind == "trajectories" else None
    if numbers is not None:
        own = jax.tree.map(bool, (job.plan.batched.consts, job.plan.batched.p))
        known = numbers.consts, numbers.p
        dense = dense_of(outcome._replace(inner=inner), job.plan, known, own)
    events = events_of(outcome, job.plan) if kind == "trajectories" else None
    if events is not None and not job.traced:
        most = int(np.max(np.asarray(events.count), initial=0))
        events = first_events(events, most, several=True)
    about = outcome.converged, elapsed, run.choice, kind, dense, job.plan.order, beside[0], events
    more: dict[str, Any] = {}
    if kind == "trajectories":
        ended = outcome.ended if job.traced else as_jax_arrays(outcome.ended)
        more = {"p_at": beside[1], "noise": beside[2], "_ended": ended, "_adds_end": adds_end(job)}
        more["_names"] = job.plan.names
        more["saved"] = saved_of(job, t, values)
    return EnsembleSolution(u, t, retcode, lengths, stats, *about, inputs_of(job), **more)


def inputs_of(job: Job) -> HiddenObject:
    """The initial states and parameters of the trajectories, where they are known."""
    # With reruns, nobody has recorded which run the start and parameters of a trajectory are of.
    return HiddenObject(None if may_rerun(job.plan) else job.trajectories.given)


def step_numbers(job: Job, n: int | None = None) -> TrajectoryNumbers | None:
    """The numbers of all trajectories (None: of a single problem), if steps may have to be made
    again with them; else None."""
    if job.plan.saving.mode != "steps":
        return None
    every = job.trajectories
    return every.lane(0, 1) if n is None else every.lanes(integers(np.arange(n)), 1)


def shared_times_of(job: Job) -> Array:
    """The saved times, where all trajectories share them: `[time]`."""
    lane, own = job.trajectories.shared, job.trajectories.times_of_values
    wanted = ("saveat",) if job.plan.saving.mode == "times" else ("t0", "t1")
    if any(getattr(lane, name) is None for name in wanted):
        lane = job.trajectories.lane(0, 1)
    times = shared_times(job.plan, lane)
    return times if own is None else times[rows_apart(lane, own)[0]]
