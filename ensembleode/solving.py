"""`solve`: the single path that every solve takes."""

import contextlib
import dataclasses
import inspect
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from . import store as stores
from .engines.choice import NoEngine
from .engines.compiled.llvm.compiler import CompileError
from .engines.job import job_for, make_storable, make_traceable
from .executors import executor_for, stiffness
from .executors.places import NotHereError, Place, places
from .ground.logs import log_once
from .ground.retcode import count_codes, has_failed, ran_out_of_steps, ReturnCode, was_ended
from .problem import sensitivity
from .problem.ensemble import EnsembleAlgorithm, EnsembleColumns, EnsembleGPUKernel
from .problem.jump_problem import JumpProblem
from .problem.options import among, as_count
from .problem.problem import EnsembleProblem, ODEProblem
from .problem.sensitivity import SensitivityAlgorithm
from .problem.stochastic import SDEProblem
from .problem.unknown_options import refuse_unknown
from .running import batches
from .running.ensemble_solution import ensemble_solution, inputs_of, shared_times_of, step_numbers
from .running.every_event import with_more_room
from .running.every_step import count_steps
from .running.gather import outcome_of_one
from .running.interrupts import check, stoppable
from .running.job import (
    integers,
    Job,
    may_rerun,
    outcome_with_end,
    saved_of,
    solution_of,
    UnfinishedBatch,
)
from .running.progress import Progress
from .running.run import Run
from .solution.events import cut, first_events
from .solution.solution import EnsembleError, EnsembleSolution, ODESolution
from .solution.stats import COUNTS
from .solvers import JuliaAlg, Tsit5
from .solvers.norms import AbstractNorm
from .trajectories.arguments import (
    check_store_key,
    check_trajectories,
    key_from,
    refuse_ensemble_options,
    refuse_traced,
    solver_and_algorithm,
)


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    """Whatever JAX is told to do for debugging: without `jit`, every step of a loop would be called
    from Python; and rows that aren't reached are NaN, and times inf, of which nothing is wrong."""
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        yield


@overload
def solve(prob: ODEProblem, alg: Any = None, **options: Any) -> ODESolution: ...


@overload
def solve(
    prob: EnsembleProblem,
    alg: Any = None,
    ensemblealg: EnsembleAlgorithm | None = None,
    **options: Any,
) -> EnsembleSolution: ...


@_as_it_is()
def solve(
    prob: ODEProblem | EnsembleProblem,
    alg: Any = None,
    ensemblealg: EnsembleAlgorithm | None = None,
    *,
    trajectories: int | float | None = None,
    saveat: Any = None,
    save_start: bool | None = None,
    save_end: bool | None = None,
    save_everystep: bool | None = None,
    save_idxs: Any = None,
    save_after_events: bool | None = None,
    save_noise: bool | None = None,
    abstol: PyTree = None,
    reltol: PyTree = None,
    dt: Any = None,
    dtmin: ArrayLike | None = None,
    dtmax: ArrayLike | None = None,
    max_norm: ArrayLike | None = None,
    tstops: Any = None,
    d_discontinuities: Any = None,
    adaptive: bool | None = None,
    maxiters: int | float | None = None,
    stepsize_controller: Any = None,
    internalnorm: AbstractNorm | None = None,
    callback: Any = None,
    max_events: int | float | None = None,
    initializealg: Any = None,
    sensealg: SensitivityAlgorithm | None = None,
    batch_size: int | float | None = None,
    seed: int = 0,
    key: Any = None,
    max_repeats: int | float = 10,
    engine: str = "auto",
    progress: bool = False,
    throw: bool = False,
    on_interrupt: Literal["raise", "return"] = "raise",
    store: str | os.PathLike | None = None,
    store_key: str | None = None,
    **_unknown: Any,
) -> ODESolution | EnsembleSolution:
    """Solve one problem, or an ensemble of them.

    A solve can be differentiated, jitted and vmapped with respect to the arrays in `u0`, `p` and
    the closures of `f`, `prob_func` and `output_func`. (Some can't be differentiated, such as those
    with callbacks in Julia; an error says so.) A trajectory that fails has a return code. It
    doesn't raise, and doesn't affect other trajectories, except with
    [`EnsembleColumns`][ensembleode.EnsembleColumns], where all share their steps. Calling `solve`
    again with other numbers compiles nothing, as long as shapes stay the same and the numbers are
    arrays (except for a reduction or reruns that are differentiated outside of `jit`).
    Outside of `jit`, functions are traced in each call, which takes 2 to 3 ms for a small problem,
    so changes of what they close over take effect. Inside `jit`, a call of the compiled program
    takes some 10 us.

    `f` has the meaning that it has under `jax.vmap`: a `lax.cond` on the state is a select between
    branches that are all computed, and an `eqx.error_if` that fails for one trajectory raises for
    all.

    **Arguments:**

    - `prob`: an [`ODEProblem`][ensembleode.ODEProblem] or
        [`EnsembleProblem`][ensembleode.EnsembleProblem].
    - `alg`: the solver, by default `Tsit5()`; or any diffrax ODE solver. For an
        [`SDEProblem`][ensembleode.SDEProblem], a method for it, by default `SOSRI()`; for additive
        noise `SOSRA()`, and for other matrices of noises `EM()`.
    - `ensemblealg`: the ensemble algorithm, which says where the trajectories run, by default
        `EnsembleThreads()`. Where JAX computes on a GPU, it is `EnsembleGPUKernel()` for what that
        can solve, and otherwise `EnsembleGPUArray()`. `sim.engine` says which, and why. A single
        problem is solved on the CPU there if the compiled engine takes it, and as arrays if not.
    - `trajectories`: the number of trajectories (`1e4` is allowed); required for an ensemble
        without rows in `u0` or `p`.
    - `saveat`: a spacing (both ends are saved, too); or an array of times (saved exactly as it is);
        or an array `[trajectory, time]`, whose rows may end early, in inf or NaN. By default the
        start and the end are saved.
    - `save_start`, `save_end`: False leaves out the start or the end, where `saveat` is not an
        array.
    - `save_everystep`: saves every accepted step, and makes the solution callable, by the
        interpolant of the method that `saveat` uses, too. By default False. Outside of `jit` it
        solves twice, to count the steps first; under `jit` it needs an explicit `maxiters`, as
        memory is reserved for that many steps.
    - `save_idxs`: the components of the state that are saved, as in SciML: an integer (`u` is then
        `[time]`, without an axis of the state), a list of integers or a slice, over the flattened
        array; of a state that is a pytree, the name of a leaf (`u` is that leaf) or a list of names
        (`u` is a dict of these). All that solutions have of states has only these, in this order:
        `u`, `sol(t)`, the states at events, and `end`; `sol.names` are their names. The others are
        kept in no result and in no store, nor by the compiled engine in the rows of a batch (except
        with `save_everystep`, an `integrand`, or a callback that saves values, changes parameters
        or ends at rest).
    - `save_after_events`: whether the state that `saveat` saves at the time of an event is the one
        after all events at that time, instead of the one before. By default False.
    - `save_noise`: whether solutions of an [`SDEProblem`][ensembleode.SDEProblem] have the path of
        its noise, `sol.W`, at the saved times, and `sol.Z` for the methods with a second process.
        By default False.
    - `abstol`, `reltol`: the tolerances, by default 1e-6 and 1e-3, and both 1e-2 for an
        `SDEProblem`; numbers, or arrays like `u0`.
    - `dt`: the size of the first step, or of all steps if they are fixed. It may be negative if
        time runs backwards, but needn't be. (A traced one is used without its sign.)
    - `adaptive`: False for fixed steps; by default true if the solver can adapt its steps. (For an
        [`SDEProblem`][ensembleode.SDEProblem] it is false where `dt` is given.)
    - `maxiters`: the largest number of steps of a trajectory, by default 100,000. Where most
        trajectories reach it with an explicit method, a few are solved again for up to 4096 steps,
        to find out whether the problem is stiff, which the log then says.
    - `dtmin`, `dtmax`: bounds of adaptive step sizes. A trajectory that needs shorter steps than
        `dtmin` ends with `ReturnCode.DtLessThanMin`.
    - `max_norm`: a trajectory ends with `ReturnCode.Diverged` where the norm of its state, by
        `internalnorm` and without tolerances, exceeds this after a step (and the events at its
        end). It keeps what it saved until the end of that step. By default there is no limit.
    - `tstops`: known times at which steps end exactly, any number of them: an array in any order,
        or an array `[trajectory, time]`, whose rows are filled up with inf. They may be traced, for
        example computed from `p`. Times outside of `tspan` are ignored.
    - `d_discontinuities`: times at which `f` jumps, in the same form. A step ends there, with `f`
        as it is before that time. The next step begins one unit in the last place later, with `f`
        evaluated anew. Solves have derivatives with respect to these times, also where some
        coincide.
    - `stepsize_controller`: chooses the steps, by default the engine's
        [`PIController()`][ensembleode.PIController] (with `engine="diffrax"`, diffrax's own
        `PIDController`); or a diffrax step-size controller, in place of the tolerances.
    - `internalnorm`: turns the errors of the components into one number, by default
        [`RMSNorm()`][ensembleode.RMSNorm].
    - `callback`: the actions at events: a [`ContinuousCallback`][ensembleode.ContinuousCallback],
        [`VectorContinuousCallback`][ensembleode.VectorContinuousCallback],
        [`DiscreteCallback`][ensembleode.DiscreteCallback], or a
        [`CallbackSet`][ensembleode.CallbackSet] of several. Callbacks from a `prob_func` may close
        over different numbers for each trajectory.
    - `max_events`: the largest number of events of a trajectory in `sim.events`; a trajectory that
        has more ends with `ReturnCode.MaxEvents`. By default as many as there are: events at known
        times are counted, and of others there may be 8,192 (where a trajectory has more than 16 of
        these, all are solved again with more room). Inside `jit` there is room for 1,024 of these,
        and for fewer where those of all trajectories would take more than 16 MiB (2 MiB in a
        gradient outside of `jit`), which a warning says; later ones act, too, and
        `sim.events.count` counts them.
    - `initializealg`: the treatment of a start at which the algebraic equations of a mass matrix
        don't hold: by default [`CheckInit()`][ensembleode.CheckInit], which gives a return code; or
        [`BrownFullBasicInit()`][ensembleode.BrownFullBasicInit], which solves them.
    - `sensealg`: how the solve is differentiated, by default as the engine does: `ReplayAdjoint()`
        (compiled and lanes), `RecursiveCheckpointAdjoint()` (diffrax); for Julia, forward
        sensitivities where there are few numbers and `InterpolatingAdjoint()` where there are many.
    - `batch_size`: the number of trajectories solved at a time. The memory on the device is that of
        a batch, and the results of several batches are gathered on the host. By default it follows
        from an estimate of the memory needed (see `ensembleode.core.batch_size`), and with diffrax
        on the CPU a batch fits its cache.
    - `seed`, `key`: the source of the PRNG keys of the trajectories (`ctx.key`); `key` takes
        precedence.
    - `max_repeats`: how often a trajectory is solved at most when `output_func` asks for reruns.
    - `engine`: `"auto"`, `"compiled"`, `"diffrax"` or `"julia"`. Auto is the first of these that
        can run `alg` and `f`, and Julia only for a [`JuliaAlg`][ensembleode.JuliaAlg]. It chooses
        compiled on a CPU, for fields of up to 1,500 operations, networks and loops among them.
        `sim.engine` says which engine ran, and why.
    - `progress`: show a progress bar over the trajectories (batch by batch, of which there are then
        at least twenty), with the rate, the remaining time, and the number of failures so far. In a
        log file it is a line every ten seconds at most.
    - `throw`: raise when a trajectory fails.
    - `on_interrupt`: on Ctrl-C, `"raise"` a `KeyboardInterrupt`, or `"return"` the results so far,
        in which the other trajectories have the return code `Default`, and NaN as states. An
        exception that ends a solve, this or another, has the results so far as its `solution`.
    - `store`: the path of a Zarr store (with the extra `store`), into which batches go as they are
        done. Called again with the same store, `solve` computes only what is missing. The solution
        is that of [`open_ensemble`][ensembleode.open_ensemble], which reads what it is asked for.
    - `store_key`: a string that identifies what your own functions and classes compute that Python
        calls at run time (by `jax.pure_callback`, or as a solver, norm or controller). A store
        needs it to tell ensembles apart, because these computations aren't in what JAX traces;
        where there are any, `StoreError` asks for it. Pass another string whenever they change.

    **Returns:** an [`ODESolution`][ensembleode.ODESolution] for a problem, an
    [`EnsembleSolution`][ensembleode.EnsembleSolution] for an ensemble.

    **Raises:** `ValueError` and `TypeError` for bad input, naming the argument, before anything is
    compiled; [`EnsembleError`][ensembleode.EnsembleError] with `throw=True`.

    >>> import ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), 1.0)
    >>> ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=ctx.index / 10))
    >>> sim = eo.solve(ens, eo.Tsit5(), eo.EnsembleThreads(), trajectories=100, saveat=0.25)
    >>> sim.u.shape, sim.t.tolist(), sim.failed.tolist()
    ((100, 5, 1), [0.0, 0.25, 0.5, 0.75, 1.0], [])
    """
    started, options = time.perf_counter(), among(locals())
    if _unknown:
        parameters = inspect.signature(solve).parameters.values()
        known = [x.name for x in parameters if x.kind != x.VAR_KEYWORD]
        refuse_unknown("solve", _unknown, known)
    alg, ensemblealg = solver_and_algorithm(alg, ensemblealg)
    alone = isinstance(prob, ODEProblem)
    one = prob if alone else getattr(prob, "prob", None)
    if alg is None and not isinstance(one, SDEProblem | JumpProblem):
        alg = Tsit5()
    if alone:
        ens, n = EnsembleProblem(prob), 1
        of_ensembles = {"batch_size": batch_size, "progress": progress or None, "store": store}
        refuse_ensemble_options(ensemblealg=ensemblealg, trajectories=trajectories, **of_ensembles)
    elif isinstance(prob, EnsembleProblem):
        ens, n = prob, check_trajectories(prob, trajectories)
    else:
        raise TypeError(
            f"solve takes an ODEProblem or an EnsembleProblem, got {type(prob).__name__}."
        )
    if batch_size is not None:
        batch_size = min(as_count("batch_size", batch_size), n)
    max_repeats = as_count("max_repeats", max_repeats)
    check_store_key(store_key, store)
    key = key_from(seed, key)
    how: Any = {"batch_size": batch_size, "max_repeats": max_repeats, "progress": progress}
    how |= {"store": store, "store_key": store_key, "started": started}
    candidates = places(
        ensemblealg, alone=alone, in_julia=engine == "julia" or isinstance(alg, JuliaAlg)
    )
    refusals: list[str] = []

    def planned(place: Place, engine: str) -> Run:
        """**Raises:** `NoEngine` or `NotHereError` where the next place is to be tried."""
        count = None if alone else n
        # (Nothing is differentiated by an adjoint before there is a plan.)
        with sensitivity.explained(sensealg, "ReplayAdjoint"):
            about = ens, options, key, count, engine, alg, place.asked
            job, choice = job_for(*about, is_given=place.is_given)
        executor = executor_for(place.algorithm, job.plan.engine)
        place.check(executor, job.plan, choice)
        said = [choice.reason, *refusals, executor.how, place.how]
        choice = choice._replace(reason="; ".join(filter(None, said)))
        return Run(job, ens, place.algorithm, executor, choice, n, **how)

    def refuse(e: Exception) -> None:
        """Leave out the first candidate, or raise its error if it is the last."""
        if len(candidates) == 1:
            raise e
        name = type(candidates.pop(0).algorithm).__name__
        refusals.append(f"not {name}(): {str(e).split('. ')[0].removesuffix('.')}")

    def first() -> tuple[Place, Run]:
        """The first place that can solve it, and what it runs."""
        while True:
            place = candidates[0]
            try:
                with place.computing():
                    return place, planned(place, engine)
            except (NoEngine, NotHereError) as e:
                refuse(e)

    place, run = first()
    if run.job.plan.saves_values and ens.reduction is not None and ens.output_func is None:
        raise ValueError(
            "callback has a SavingCallback, and a reduction is given no more than the states: let "
            "output_func return what the reduction needs of sol.saved.values."
        )
    if run.job.traced:
        given_up = {"progress": progress, "throw": throw, "store": store is not None}
        refuse_traced(**given_up, on_interrupt=on_interrupt != "raise")
        place.check_staged(run.job.plan.engine)
        given = run.job.trajectories.options["sensealg"]
        closes = run.job.plan.engine.closes(run.job.plan)
        explained = sensitivity.explained(given, run.choice.sensealg, closes=closes)
        with explained, place.computing():
            run = run._replace(job=make_traceable(run.job, ens, run.n))
            if alone:
                sim, _ = _solve_alone(run)
            else:
                sim = ensemble_solution(run, batches.run_traced(run), jnp.nan)
        return place.brought_home(sim)

    solve_it = _solve_alone if alone else _solve_eagerly
    try:
        with place.computing():
            sim, cause = solve_it(run)
    except CompileError as e:
        if engine != "auto":
            raise
        if isinstance(place.algorithm, EnsembleGPUKernel):
            refuse(e)
            place, run = first()
        else:
            log_once(f"diffrax solves what the compiled engine can't: {e}")
            with place.computing():
                try:
                    run = planned(place, "diffrax")
                except NoEngine:
                    raise e from None
        with place.computing():
            sim, cause = solve_it(run)
    if cause is not None and not (
        isinstance(cause, KeyboardInterrupt) and on_interrupt == "return"
    ):
        cause.solution = place.brought_home(sim)  # pyright: ignore
        raise cause
    with place.computing():
        notes = _say_if_stiff(run.job, alg, sim)
    sim = place.brought_home(sim)
    if throw:
        _throw(sim, [*run.executor.notes, *notes])
    return sim


#
# Running it
#


def _solve_alone(run: Run) -> tuple[ODESolution, None]:
    """The solution of one problem."""
    try:
        with stoppable(run.job, local=run.executor.local) as job:
            if job.plan.saving.mode == "steps" and not job.traced:
                job = count_steps(job, run.executor, integers(np.arange(1)), 1)
            outcome = run.executor.run_one(job, 0, 1)
            while (more := with_more_room(job, outcome)) is not None:
                job, outcome = more, run.executor.run_one(more, 0, 1)
            check(job, outcome)
    except UnfinishedBatch as e:
        raise e.cause from None
    if outcome.t is None:
        outcome = outcome._replace(t=shared_times_of(job))
    given = job.trajectories.given and job.trajectories.given.of_trajectory(0)
    t = outcome.t
    if job.traced:
        outcome, _ = outcome_with_end(job, outcome)
        sol = solution_of(outcome, job.plan, step_numbers(job), run.choice, given)
        return dataclasses.replace(sol, saved=saved_of(job, t, outcome.saved)), None
    outcome = jax.block_until_ready(outcome)
    retcode = ReturnCode(int(outcome.retcode))
    is_cut, count = job.plan.own_times, outcome.length
    if was_ended(retcode):
        is_cut, (outcome, count) = True, outcome_with_end(job, outcome)
    known = {name: jax.tree.map(int, getattr(outcome, name)) for name in ("length", *COUNTS)}
    known["retcode"] = retcode
    if is_cut:
        names = ("u", "t", "inner", "integral", "p_at", "noise")
        rows = {name: getattr(outcome, name) for name in names}
        known |= cut(rows, known["length"], int(count))
        if job.trajectories.times_of_values is None:
            values = t, outcome.saved
            t, known["saved"] = cut(values, known["length"], known["length"])
    outcome = outcome._replace(**known)
    sol = solution_of(outcome, job.plan, step_numbers(job), run.choice, given)
    if sol.events is not None:
        count = int(sol.events.count)
        events = dataclasses.replace(first_events(sol.events, count, several=False), count=count)
        sol = dataclasses.replace(sol, events=events)
    return dataclasses.replace(sol, saved=saved_of(job, t, outcome.saved)), None


def _solve_eagerly(run: Run) -> tuple[EnsembleSolution, BaseException | None]:
    """Solve an ensemble batch by batch; also returns what ended it early, if anything did."""
    size, writer = run.size, None
    if run.store is not None:
        run = run._replace(job=make_storable(run.job, run.ens))
        writer = _writer(run)
        size = stores.batch_size_for(writer, run.executor, size)
    bar = Progress(run.n, 0 if writer is None else writer.done) if run.progress else None
    cause = result = None
    try:
        job = dataclasses.replace(run.job, report=None if bar is None else bar.report)
        with stoppable(job, local=run.executor.local) as watched:
            result = batches.run_eagerly(run._replace(job=watched, batch_size=size), writer)
        jax.block_until_ready(result)
    except batches.EnsembleStopped as stopped:
        result, cause = stopped.result, stopped.cause
    except KeyboardInterrupt as e:
        if result is None:
            raise
        cause = e  # it interrupted only the wait for results
    finally:
        if bar is not None:
            bar.close()
        if writer is not None:
            writer.close()
    elapsed = time.perf_counter() - run.started
    if isinstance(cause, stores.StoreError):
        return cause.solution, cause  # pyright: ignore
    if writer is not None:
        return dataclasses.replace(writer.solution(elapsed), _given=inputs_of(run.job)), cause
    assert result is not None
    return ensemble_solution(run, result, elapsed), cause


def _writer(run: Run) -> stores.StoreWriter:
    job, size, lost = run.job, run.batch_size, run.executor.lost
    described: dict[str, Any] = {"shared steps": isinstance(run.ensemblealg, EnsembleColumns)}
    if may_rerun(job.plan):
        described["max_repeats"] = run.max_repeats
    times = None if job.plan.own_times else shared_times_of(job)
    one = outcome_of_one(job)
    return stores.StoreWriter(
        run.store, job, one, times, run.choice, run.n, size, described, lost, run.store_key,
        run.started,
    )  # fmt: skip


#
# Checks
#


def _say_if_stiff(job: Job, alg: Any, sim: EnsembleSolution | ODESolution) -> list[str]:
    """Where most trajectories ran out of steps, log any indication of stiffness, and return it in a
    list."""
    codes = np.atleast_1d(np.asarray(sim.retcode))
    note = None
    if ran_out_of_steps(codes).any():
        note = stiffness.note(job, alg, codes)
    if note is None:
        return []
    log_once(note + ".")
    return [note]


def _throw(sim: Any, notes: Sequence[str]) -> None:
    codes = np.atleast_1d(np.asarray(sim.retcode))
    if has_failed(codes).any():
        raise EnsembleError(
            f"not all trajectories succeeded: {count_codes(codes, most=20)}. "
            + "".join(note + ". " for note in notes)
            + "What was computed is in the `solution` of this exception.",
            sim,
        )
