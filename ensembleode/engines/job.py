"""Makes the job that solves an ensemble, and chooses its engine."""

import dataclasses
import math
from typing import Any

import jax.tree_util as jtu
from jax import Array

from ..jumps.at_start import after_start
from ..jumps.consistent_start import with_consistent_start
from ..plan.noise import method_for
from ..plan.plan import Plan
from ..problem.ensemble import EnsembleAlgorithm
from ..problem.problem import EnsembleProblem
from ..running.every_event import first_room, with_room_of_trace
from ..running.every_step import bounded
from ..running.job import Job, JobArguments, may_rerun, with_output
from ..running.reductions import sum_reduction
from ..solution.solution import EngineChoice
from ..solvers import SDESolver
from ..tracing.program import is_tracer
from ..trajectories.arguments import check_direction
from ..trajectories.saved_values import with_times_of_values
from ..trajectories.trajectories import describe
from .base.checks import check_bounds, check_limits, say_if_it_switches, say_if_too_tight
from .choice import choose


def job_for(
    ens: EnsembleProblem,
    options: dict,
    key: Array,
    n: int | None,
    engine: str,
    alg: Any,
    ensemblealg: EnsembleAlgorithm | None = None,
    *,
    is_given: bool = False,
) -> tuple[Job, EngineChoice]:
    """The job of `n` trajectories (None: of a single problem), and the engine that it is for.

    **Arguments:** `is_given`: whether the user asked for this ensemble algorithm.
    """
    every = describe(ens, options, key, n)
    check_direction(every, n or 1)
    alg = method_for(alg, every.noise)
    module, choice, alg = choose(engine, alg, every, ensemblealg, is_given=is_given)
    if module.numbers_apart:
        every = every.with_numbers_apart()
    every = every.with_noise(alg) if module.noise_in_field else every.with_noise_apart()
    if module.noise_in_field and isinstance(alg, SDESolver):
        assert every.extension is not None
        alg = dataclasses.replace(alg, _errors=every.extension.errors)
    every = with_times_of_values(with_consistent_start(every))
    if every.events is not None:
        every = after_start(every.with_one_list())
    (state,) = every.field.out_avals
    has_dt, extension = every.batched.dt is not None, every.extension
    method = module.method(alg, every.options, has_dt=has_dt)
    has_rate = every.form is not None and every.form.rate is not None
    room, last = first_room(every)
    saving = every.saving
    if saving.mode == "times" and every.events is not None:
        saving = saving._replace(after_events=bool(every.options["save_after_events"]))
    plan = Plan(
        engine=module,
        method=method,
        field=every.field,
        state=state,
        controlled=extension.controlled if extension else math.prod(state.shape),
        saving=saving,
        saved=every.options["save_idxs"],
        maxiters=every.options["maxiters"],
        width=module.width(state, n or 1),
        batched=every.batched,
        tree=every.tree,
        in_parts=every.tree is not None and every.tree.is_complex,
        beside=every.beside,
        extension=extension,
        events=every.events,
        form=every.form if module.reads_form(method) or has_rate else None,
        noise=every.noise,
        max_events=room,
        last_event=last,
        saves_values=every.saving_callback is not None,
    )
    plan = dataclasses.replace(plan, keeps_end=plan.may_end)
    adaptive = getattr(plan.method.value, "adaptive", None)
    check_bounds(adaptive, every.batched)
    check_limits(adaptive, every.events)
    say_if_too_tight(adaptive, state.dtype, every.shared)
    say_if_it_switches(adaptive, every)
    traced = every.traced or any(map(is_tracer, jtu.tree_leaves(ens.u_init)))
    arguments = JobArguments(ens, options, key, n, engine, alg)
    job = Job(plan, every, key, traced, job_for, arguments, ens.output_func)
    # Where every step is saved, the number of times is known only later.
    return (job if every.saving.mode == "steps" else with_output(job)), choice


def make_storable(job: Job, ens: EnsembleProblem) -> Job:
    """**Raises:** `ValueError` for an ensemble whose results a store can't hold."""
    if ens.reduction is not None:
        raise ValueError(
            "store keeps the trajectories, and reduction makes one thing of them: drop one of the "
            "two (eo.open_ensemble reads a store in parts, to be reduced)."
        )
    return _with_room(job, "with a store").replan(inner=job.plan.saving.mode == "steps")


def _with_room(job: Job, where: str) -> Job:
    """The job with room for every step, where steps are saved and can't be counted first.

    **Raises:** `ValueError` where the user hasn't said how many steps there are at most.
    """
    if job.plan.saving.mode != "steps":
        return job
    if not job.trajectories.options["maxiters_given"]:
        raise ValueError(
            f"save_everystep=True {where} needs maxiters, as room is kept for that many steps: "
            "pass the smallest that works, such as maxiters=256."
        )
    return bounded(job, job.plan.maxiters)


def make_traceable(job: Job, ens: EnsembleProblem, n: int) -> Job:
    """The job of `n` trajectories inside of jit, where no decision can depend on numbers."""
    job = with_room_of_trace(_with_room(job, "inside jit, grad or vmap"), n)
    if ens.reduction not in (None, sum_reduction) and ens.u_init is None:
        raise ValueError(
            "u_init is missing: inside jit, grad or vmap a reduction needs it, with the structure, "
            "shapes and dtypes of what it returns."
        )
    if may_rerun(job.plan) and not job.trajectories.repeatable:
        raise ValueError(
            "output_func asks for reruns inside jit, grad or vmap, but prob_func can't be traced, "
            "so it can't be called again there. Write prob_func in JAX."
        )
    return job
