"""A job: what executors get to solve an ensemble, and what they return."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.devices.alone import alone
from ..ground.hidden_object import HiddenObject
from ..plan.checked_reads import check_reads_by_index
from ..plan.given import GivenInputs
from ..plan.plan import dense_of, Outcome, Plan, RecordedEvents, Result
from ..plan.saved_components import SavedComponents
from ..plan.trajectory_numbers import Trajectories, TrajectoryNumbers
from ..problem.options import time_dtype_of
from ..problem.problem import EnsembleContext, said_of_context
from ..problem.saving_callback import Saved
from ..solution.dense import kept
from ..solution.events import End, Events, with_end
from ..solution.solution import EngineChoice, ODESolution
from ..solution.stats import COUNTS, Stats
from ..tracing.program import is_tracer, NOT_TRACEABLE, trace
from ..tracing.purity import check_once, numbers_in
from ..trajectories.saved_values import taken_apart


@dataclasses.dataclass(frozen=True)
class Job:
    """A plan, the trajectories that it is for, and the arrays that go with it.

    - `key`: the PRNG key from which the keys of the trajectories are derived.
    - `traced`: whether this runs inside of `jit`, `grad` or `vmap`.
    - `make`, `arguments`: a function by which another process makes this job again, and its
        arguments.
    - `output_func`: the user's function. Once the number of saved times is known it is traced, and
        the trace is in the plan; `output_consts` are the arrays that it closes over.
    - `report`: called with the return codes of trajectories that are done; None where there is no
        progress to show.
    - `sink`: called with the outcome of a batch so far, and a mask of those trajectories that are
        done.
    - `stop`: the flag that Ctrl-C sets, if the engine looks at one (see `interrupts`).
    """

    plan: Plan
    trajectories: Trajectories
    key: Array
    traced: bool
    make: Callable
    arguments: "JobArguments"
    output_func: Callable | None = None
    output_consts: tuple = ()
    report: Callable | None = None
    sink: Callable[[Any, np.ndarray], Any] | None = None
    stop: Any = None

    def replan(self, **changes: Any) -> "Job":
        """The job with these fields of its plan changed."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, **changes))


class JobArguments(NamedTuple):
    """What a job is made from: an ensemble, the options of its solve, the PRNG key, the number of
    trajectories (None for a single problem), and the `engine` and `alg` that were asked for."""

    ens: Any
    options: dict[str, Any]
    key: Any
    n: int | None
    engine: str
    alg: Any


class UnfinishedBatch(Exception):
    """A batch was stopped before its end; `outcome` holds what was computed, `done [trajectory]`
    says which trajectories are complete, and `cause` why it was stopped."""

    def __init__(self, outcome: Outcome, done: np.ndarray, cause: BaseException):
        super().__init__(str(cause))
        self.outcome = outcome
        self.done = done
        self.cause = cause


def cause_of(e: BaseException) -> BaseException:
    """The exception that stopped a batch."""
    return e.cause if isinstance(e, UnfinishedBatch) else e


def solve_lane(plan: Plan, lane: TrajectoryNumbers, index, repeat, key, output_consts) -> Outcome:
    """Integrate one trajectory and apply `output_func`: a pure function, to be mapped."""
    result = plan.engine.integrate(plan, lane)
    numbers = _numbers(plan, lane)
    return finish(plan, result, numbers, index, repeat, key, output_consts)


def solve_lanes(
    plan: Plan,
    lanes: TrajectoryNumbers,
    indices,
    repeat,
    key,
    output_consts,
    mask: Array | None = None,
) -> Outcome:
    """Integrate several trajectories, whose axis comes first, and apply `output_func`."""
    result = plan.engine.solve_trajectories(plan, lanes, indices.shape[0], mask)
    return finish_lanes(plan, result, lanes, indices, repeat, key, output_consts)


def finish_lanes(
    plan: Plan,
    result: Result,
    lanes: TrajectoryNumbers,
    indices,
    repeat,
    key,
    output_consts,
    where: Result | None = None,
) -> Outcome:
    """Apply `output_func` to several trajectories, whose axes in the result are `where`, by default
    the first."""

    def one(result, numbers, index):
        return finish(plan, result, numbers, index, repeat, key, output_consts)

    where = where or Result(*[0] * len(result))._replace(t=0 if plan.own_times else None)
    numbers = _numbers(plan, lanes)
    own = axes(_numbers(plan, plan.batched))
    return jax.vmap(one, in_axes=(where, own, 0))(result, numbers, indices)


def finish(plan: Plan, result: Result, numbers, index, repeat, key, output_consts) -> Outcome:
    """The outcome of a trajectory as the user gets it, with `output_func` applied. `numbers` are
    what `_numbers` returns for the trajectory."""
    if plan.output is not None:
        u, rerun = alone(plan.output, output_consts, result, numbers, index, repeat, key)
        gone = dict.fromkeys(("t", "inner", "events", "ended"))
        return Outcome(*result._replace(u=u, **gone), rerun)
    values = None
    if plan.apart is not None:
        result, values = alone(plan.apart, output_consts, result, numbers)
    given = _as_given(plan, result, numbers, inner=plan.inner)
    return given._replace(saved=values, t=result.t if plan.own_times else None)


def _as_given(plan: Plan, result: Result, numbers: Any, *, inner: bool = False) -> Outcome:
    """The outcome of a result, with what is saved of states in the structure that the user gave,
    and the integrals separate; with `inner`, also the states within steps."""
    events = result.events

    def beside(u: Array) -> tuple:
        return plan.integral_of(u), plan.changing_of(u), plan.noise_of(u)

    if events is not None:
        before, after = plan.as_given(events.before), plan.as_given(events.after)
        events = events._replace(before=before, after=after)
    ended = result.ended
    if ended is not None:
        ended = End(ended.t, plan.as_given(ended.u), *beside(ended.u))
    u = result.u if plan.chosen is not None else plan.as_given(result.u)
    within = plan.as_given(result.inner)
    given = Outcome(*result._replace(u=u, inner=within, events=events, ended=ended))
    integral, p_at, noise = beside(result.u)
    given = given._replace(integral=integral, p_at=p_at, noise=noise)
    # (A step can't be made again from some of the components.)
    inner = inner or (plan.saved is not None and plan.saving.mode == "steps")
    if inner and within is None:
        dense = dense_of(given, plan, (numbers.consts, numbers.p))
        assert dense is not None  # (Every step is saved.)
        within = kept(dense, result.t, u, result.length, several=False).inner
        given = given._replace(inner=within)
    return given if plan.saved is None else _chosen(plan, plan.saved, given)


def _chosen(plan: Plan, saved: SavedComponents, given: Outcome) -> Outcome:
    """The outcome with only those components of its states that are saved."""
    events, ended = given.events, given.ended
    if events is not None:
        before, after = saved.chosen_of(events.before, 1), saved.chosen_of(events.after, 1)
        events = events._replace(before=before, after=after)
    if ended is not None:
        ended = dataclasses.replace(ended, u=saved.chosen_of(ended.u, 0))
    u = saved.chosen_of(given.u, 1) if plan.chosen is None else saved.shaped(given.u)
    inner = saved.chosen_of(given.inner, 2)
    return given._replace(u=u, inner=inner, events=events, ended=ended)


def _numbers(plan: Plan, lanes: TrajectoryNumbers) -> TrajectoryNumbers | None:
    """The numbers that are needed after the solve: to compute saved steps again, and for values
    that are saved beside the states. None where nothing needs them."""
    if not (plan.saving.mode == "steps" or plan.saves_values):
        return None
    more = ("u0", "t0", "t1", "saveat") if plan.saves_values else ()
    return TrajectoryNumbers(**{name: getattr(lanes, name) for name in ("consts", "p", *more)})


def codes_and_counts(outcome: Outcome) -> Outcome:
    """The outcome without states and times."""
    gone = ("u", "t", "inner", "length", "events", "ended", "rerun", "integral", "p_at", "noise")
    return outcome._replace(**dict.fromkeys(gone))


def with_output(job: Job) -> Job:
    """The job with its `output_func` traced, on a solution of the planned shape.

    **Raises:** `TypeError` for an `output_func` that can't be traced, or that doesn't return a
    pair.
    """
    output_func, plan = job.output_func, job.plan
    if output_func is None and not plan.saves_values:
        return job
    state = plan.state
    rows = (plan.saving.rows,)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    u = array((*rows, *plan.row_shape), state.dtype)
    t = array(rows, time_dtype_of(state))
    inner = None
    jaxpr: Any = plan.field.jaxpr
    consts, p = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type),
        (tuple(jaxpr.constvars), tuple(jaxpr.invars[1:-1])),
    )
    times = t if plan.saving.mode == "times" else None
    end = array((), t.dtype)
    numbers = _numbers(
        plan, TrajectoryNumbers(u0=state, p=p, consts=consts, t0=end, t1=end, saveat=times)
    )
    nodes = plan.engine.interpolant(plan.method) if plan.saving.mode == "steps" else None
    if isinstance(nodes, int):
        inner = array((*rows, nodes, *state.shape), state.dtype)
    count = array((), np.int32)
    events = None
    if plan.events is not None and (room := plan.max_events):
        states = array((room, *state.shape), state.dtype)
        crossed = array((room, plan.events.longest), np.int32)
        times, which = array((room,), time_dtype_of(state)), array((room,), np.int32)
        events = RecordedEvents(times, which, crossed, states, states, count)
    counts = dict.fromkeys(plan.engine.counts(plan.method), count)
    about = {"length": count, "retcode": array((), np.int8), **dict.fromkeys(COUNTS), **counts}
    ended = End(array((), t.dtype), state) if plan.keeps_end else None
    result = Result(u, t, inner, **about, events=events, ended=ended)

    def traced(consts, **programs):
        is_traced, consts = job.traced or any(map(is_tracer, consts)), tuple(consts)
        return dataclasses.replace(job.replan(**programs), traced=is_traced, output_consts=consts)

    apart = taken_apart(job.trajectories, plan) if plan.saves_values else None
    if output_func is None:
        assert apart is not None
        program, consts = trace(apart, result, numbers, rules=True)
        return traced(consts, apart=program)

    def output(result, numbers, index, repeat, key):
        values = None
        if apart is not None:
            result, values = apart(result, numbers)
        outcome = _as_given(plan, result, numbers)
        saved = saved_of(job, result.t, values)
        sol = solution_of(outcome_with_end(job, outcome)[0], plan, numbers)
        sol = dataclasses.replace(sol, saved=saved)
        with said_of_context("output_func(sol, ctx)"):
            got = output_func(sol, EnsembleContext(index, repeat, key))
        if not isinstance(got, tuple) or len(got) != 2:
            raise TypeError(
                "output_func must return a pair (out, rerun), such as (sol.u[-1], False); it "
                f"returned {type(got).__name__}."
            )
        out, rerun = got
        if np.shape(rerun) != ():
            raise TypeError(
                "output_func must return a pair (out, rerun) with rerun a boolean; its rerun has "
                f"the shape {np.shape(rerun)}."
            )
        if not (rerun is None or eqx.is_array_like(rerun)):
            raise TypeError(
                f"output_func must return a pair (out, rerun) with rerun a boolean, got {rerun!r}."
            )
        if not all(map(eqx.is_array_like, jax.tree.leaves(out))):
            raise TypeError(
                f"output_func must return a pair (out, rerun) with out made of arrays, got {out!r}."
            )
        never = not is_tracer(rerun) and not rerun
        return jax.tree.map(jnp.asarray, out), None if never else jnp.asarray(rerun, bool)

    args = (result, numbers, 0, 1, job.key)

    try:
        program, consts = trace(output, *args, rules=True)
    except (*NOT_TRACEABLE, IndexError) as e:
        raise TypeError(
            "output_func must be written in JAX, as it is traced once for all trajectories: "
            f"use jnp instead of np, and jnp.where instead of `if`. ({e})"
        ) from e
    if (given := job.trajectories.given) is not None:
        others = len(jax.tree.leaves((result, numbers)))
        check_reads_by_index("output_func", program, consts, given.n, others)
    check_once(
        output_func,
        lambda: numbers_in(program, consts) == numbers_in(*trace(output, *args)),
        "output_func gives another value each time it is called with the same solution (by "
        "random numbers of NumPy or Python, or the clock). It is traced once for all "
        "trajectories, and they would be drawn once: draw them by jax.random with ctx.key.",
    )
    return traced(consts, output=program)


def may_rerun(plan: Plan) -> bool:
    """Whether `output_func` may ask for a rerun."""
    if plan.output is None:
        return False
    _, rerun = jtu.tree_unflatten(plan.output.out_tree, plan.output.out_avals)
    return rerun is not None


def solution_of(
    outcome: Outcome,
    plan: Plan,
    numbers: TrajectoryNumbers | None,
    engine: EngineChoice | None = None,
    given: GivenInputs | None = None,
) -> ODESolution:
    """The solution of one trajectory, from its `_numbers`, and from its initial state and its
    parameters where they are known."""
    u, t, length, stats = outcome.u, outcome.t, outcome.length, Stats(*outcome.counts)
    dense = None if numbers is None else dense_of(outcome, plan, (numbers.consts, numbers.p))
    about = (
        dense,
        engine,
        plan.order,
        outcome.integral,
        events_of(outcome, plan),
        HiddenObject(given),
    )
    more: dict[str, Any] = {"p_at": outcome.p_at, "noise": outcome.noise, "_names": plan.names}
    return ODESolution(u, t, outcome.retcode, stats, length, *about, **more)


def adds_end(job: Job) -> bool:
    """Whether the end of a trajectory needs a row of its own, since an event may end it and the
    last of the saved times isn't known to be `t1`."""
    plan, of = job.plan, job.trajectories
    if plan.saving.mode != "times" or not plan.may_end:
        return False
    known = (of.shared.saveat, of.shared.t1)
    if any(x is None or is_tracer(x) for x in known) or of.times_of_values is not None:
        return True
    return bool(np.asarray(known[0])[-1] != known[1])


def outcome_with_end(job: Job, outcome: Outcome) -> tuple[Outcome, Any]:
    """The outcome of one trajectory with its end in the last row, and how many rows were reached,
    with the end: see `events.with_end`."""
    if not (job.plan.may_end or job.plan.saving.mode == "steps"):
        return outcome, outcome.length
    rows = End(outcome.t, outcome.u, outcome.integral, outcome.p_at, outcome.noise)
    at = outcome.ended, outcome.length, outcome.retcode
    rows, count = with_end(rows, *at, adds=adds_end(job))
    return outcome._replace(**vars(rows)), count


def saved_of(job: Job, t: Any, values: PyTree) -> Saved | None:
    """The values of a `SavingCallback`, in the form that solutions have; `t` are the times of
    these."""
    if not job.plan.saves_values:
        return None
    own = job.trajectories.times_of_values
    return Saved(t, values) if own is None else Saved(jnp.asarray(own), values, True)


def events_of(outcome: Outcome, plan: Plan) -> Events | None:
    """The events of an outcome, in the form that solutions have."""
    events = outcome.events
    if events is None or plan.events is None:
        return None
    t, which, crossed, before, after, count = events
    direction = crossed[..., 0] if plan.events.longest == 1 else crossed
    return Events(t, which, direction, before, after, count)


def compiler_options(platform: str) -> dict[str, Any]:
    """Options of XLA. Without them, XLA leaves half of wide vector units of a CPU idle."""
    return {"xla_cpu_prefer_vector_width": 512} if platform == "cpu" else {}


def blank(shape: tuple, dtype: np.dtype, fill: ArrayLike) -> np.ndarray:
    """An array filled with `fill`; it is aligned, so that JAX on the CPU uses it without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    array = room[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


_ALIGNMENT = 64  # bytes


def integers(values: Any) -> Any:
    """Indices in the integer dtype that JAX uses at the moment."""
    dtype = jax.dtypes.canonicalize_dtype(int)
    return values.astype(dtype) if is_tracer(values) else jnp.asarray(values, dtype)


def axes(batched: Any) -> Any:
    """The `in_axes` of `TrajectoryNumbers`, or of a part of them, from the booleans that say what
    is batched."""
    return jax.tree.map(lambda b: 0 if b else None, batched)
