"""From one batch to the whole ensemble: batches, reruns, reduction, early stop.

Eagerly the batches are a Python loop and the results are gathered on the host, so the memory of
the device is bounded by a batch. Inside `jit`, `grad` or `vmap` the same is a loop in the program.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..tracing.program import being_staged
from .executor import Executor
from .job import (
    blank,
    codes_and_counts,
    integers,
    Job,
    may_rerun,
    solve_lanes,
    Unfinished,
    with_output,
)
from .plan import Result
from .reductions import sum_reduction, total
from .retcode import ReturnCode
from .saving import Saving


# Bytes of a batch. On the CPU a lockstep loop over more than the cache holds takes several times
# longer for each trajectory.
_CACHE = 2**20
_HOST = 2**28
_LEAST = 256  # trajectories, below which the cost of starting a batch shows


class Ensemble(NamedTuple):
    """The outcome of the whole ensemble; `u` is reduced where there is a reduction."""

    u: Any
    outcome: Result
    converged: Any


class Stopped(Exception):
    """The ensemble ended before its end: the `result` so far, and the `cause`."""

    def __init__(self, result: Ensemble | None, cause: BaseException):
        super().__init__(str(cause))
        self.result = result
        self.cause = cause


def default_batch_size(job: Job, executor: Executor, trajectories: int) -> int:
    """How many trajectories make a batch, from an estimate of their memory.

    On the CPU, what fits the cache where the executor is vectorised, and 256 MiB otherwise; on an
    accelerator a quarter of its memory. Batches are of equal size but for the last.
    """
    u0 = job.plan.state
    state = max(1, math.prod(u0.shape))
    rows = job.plan.saving.rows or 256
    # Stages twice over (XLA keeps old and new), or the Jacobian of an implicit method.
    work = 2 * (job.plan.method.value.stages or state + 8) + 16
    step_bytes = u0.dtype.itemsize * state * work
    all_bytes = step_bytes + u0.dtype.itemsize * state * rows
    device = default_device()
    if device.platform == "cpu":
        most = max(1, _HOST // all_bytes)
        if executor.vectorised and not job.plan.engine.chunked:
            most = min(most, max(_LEAST, _CACHE // step_bytes))
    else:
        most = max(1, _share_of_memory(device) // all_bytes)
    return math.ceil(trajectories / math.ceil(trajectories / most))


def as_jax_arrays(tree: Any) -> Any:
    """Results as JAX arrays, however many batches they are from.

    What was gathered on the host goes to JAX's default device; on an accelerator only where it
    takes less than a quarter of its memory, and else to JAX's CPU device.
    """
    device = default_device()
    gathered = [x for x in jtu.tree_leaves(tree) if isinstance(x, np.ndarray)]
    home = None
    if device.platform != "cpu" and sum(x.nbytes for x in gathered) > _share_of_memory(device):
        home = _cpu_device()

    def put(x):
        return jax.device_put(x, home, may_alias=True) if isinstance(x, np.ndarray) else x

    return jax.tree.map(put, tree)


def default_device() -> Any:
    """Where JAX computes what is on no device yet."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    return chosen if isinstance(chosen, jax.Device) else jax.devices()[0]


def _cpu_device() -> Any:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None


def _share_of_memory(device: Any) -> int:
    """Bytes of an accelerator that a batch, or the results of all, may take."""
    return (device.memory_stats() or {}).get("bytes_limit", 4 * _HOST) // 4


#
# Eagerly
#


def run_eagerly(
    job: Job,
    executor: Executor,
    trajectories: int,
    batch_size: int,
    *,
    reduction: Callable | None,
    u_init: Any,
    max_repeats: int,
    gather: Any = None,
) -> Ensemble | None:
    """Run batch after batch.

    **Arguments:** `gather`: what collects them, by default arrays on the host. It says which
    batches it still wants. (A store gives nothing back.)

    **Raises:** `Stopped`, with what was done, for whatever ends it before its end.
    """
    solve = _Solver(job, executor, batch_size, max_repeats)
    if reduction is not None:
        return _reduce_eagerly(solve, trajectories, reduction, u_init)
    if gather is None and trajectories <= batch_size:
        try:
            outcome = solve.batch(np.arange(trajectories))
        except (Unfinished, KeyboardInterrupt) as e:
            gather = _Gather(trajectories)
            raise Stopped(gather.ensemble(job, e, np.arange(trajectories)), _cause(e)) from None
        return Ensemble(outcome.u, outcome, True)
    gather = gather or _Gather(trajectories)
    for wanted in gather.missing(batch_size):
        try:
            gather.add(wanted, solve.into(gather, wanted))
        except (Exception, KeyboardInterrupt) as e:
            if gather.empty and not isinstance(e, Unfinished | KeyboardInterrupt):
                raise
            raise Stopped(gather.ensemble(job, e, wanted), _cause(e)) from None
    return gather.ensemble(job)


def _cause(e: BaseException) -> BaseException:
    return e.cause if isinstance(e, Unfinished) else e


class _Solver(NamedTuple):
    """Solves batches, and tells who asks."""

    job: Job
    executor: Executor
    batch_size: int
    max_repeats: int

    def batch(self, wanted: np.ndarray) -> Result:
        outcome = _with_reruns(self.job, self.executor, wanted, self.batch_size, self.max_repeats)
        self.report(outcome)
        return outcome

    def into(self, gather: Any, wanted: np.ndarray) -> Result:
        """As they are done, where the executor gives them as they are."""
        if not hasattr(gather, "part") or may_rerun(self.job.plan):
            return self.batch(wanted)
        sink = functools.partial(gather.part, wanted)
        return self._replace(job=dataclasses.replace(self.job, sink=sink)).batch(wanted)

    def total(self, wanted: np.ndarray) -> tuple[Any, Result]:
        u, outcome = self.executor.total(self.job, integers(wanted))
        self.report(outcome)
        return u, outcome

    def report(self, outcome: Result) -> None:
        if self.job.report is not None and not self.executor.reports:
            self.job.report(np.asarray(outcome.retcode))


def _ranges(trajectories: int, batch_size: int):
    for start in range(0, trajectories, batch_size):
        yield np.arange(start, min(start + batch_size, trajectories))


def _reduce_eagerly(solve: _Solver, trajectories: int, reduction: Callable, u_init: Any):
    """Keeps of each trajectory its return code only, one byte."""
    u, converged, codes, counts = u_init, False, [], None
    where_it_is = reduction is sum_reduction and adds_up(solve.job, solve.executor)

    def ensemble():
        retcode = np.concatenate([*codes, np.zeros(0, np.int8)])
        not_run = trajectories - len(retcode)
        retcode = np.pad(retcode, (0, not_run), constant_values=ReturnCode.Default.value)
        return Ensemble(u, _total(retcode, counts or (0, 0, 0)), converged)

    for wanted in _ranges(trajectories, solve.batch_size):
        try:
            if where_it_is:
                more, outcome = solve.total(wanted)
                u = more if u is None else jax.tree.map(jnp.add, u, more)
                stop = False
            else:
                outcome = solve.batch(wanted)
                outcome = outcome._replace(u=as_jax_arrays(outcome.u))
                u = _empty(reduction, outcome.u) if u is None else u
                u, stop = _reduced(reduction(u, outcome.u, wanted))
        except (Exception, KeyboardInterrupt) as e:
            raise Stopped(ensemble(), _cause(e)) from None
        codes.append(np.asarray(outcome.retcode))
        new = jax.tree.map(lambda x: int(np.asarray(x).sum()), _counts(outcome))
        counts = new if counts is None else jax.tree.map(int.__add__, counts, new)
        if converged := bool(stop):
            break
    return ensemble()


def _empty(reduction: Callable | None, out: Any) -> Any:
    """What a reduction starts from, without `u_init`."""
    if reduction is sum_reduction:
        sums = jax.eval_shape(lambda out: jax.tree.map(total, out), out)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    return jax.tree.map(lambda x: x[:0], out)


def adds_up(job: Job, executor: Executor) -> bool:
    """Whether the executor can add up the outputs where they are.

    Inside `jit` they may be differentiated, and so have to be one real number.
    """
    if job.plan.output is None or not executor.totals or may_rerun(job.plan):
        return False
    out, _ = jtu.tree_unflatten(job.plan.output.out_tree, job.plan.output.out_avals)
    real = [jnp.issubdtype(x.dtype, jnp.floating) and not x.shape for x in jtu.tree_leaves(out)]
    return not job.traced or real == [True]


def _counts(outcome: Result) -> tuple:
    return outcome.naccept, outcome.nreject, outcome.nf


def _total(retcode: Any, counts: Any) -> Result:
    """The outcome of a reduced ensemble: return codes of each, and total counts."""
    naccept, nreject, nf = counts
    return Result(None, None, None, None, retcode, naccept, nreject, nf, None)


def _with_reruns(job, executor, wanted, batch_size, max_repeats) -> Result:
    try:
        outcome = _batch(job, executor, wanted, 1, batch_size)
    except Unfinished as e:
        if e.outcome.rerun is None:
            raise
        raise Unfinished(e.outcome, e.done & ~e.outcome.rerun, e.cause) from None
    if outcome.rerun is None:
        return outcome
    outcome = jax.tree.map(np.array, outcome)
    for repeat in range(2, max_repeats + 1):
        pending = np.flatnonzero(outcome.rerun)
        if not len(pending):
            break
        # Powers of two, so that few shapes are compiled (where a batch can be filled up).
        size = min(2 ** math.ceil(math.log2(len(pending))), batch_size)
        try:
            again = _batch(job, executor, wanted[pending], repeat, size)
        except (Unfinished, KeyboardInterrupt) as e:
            raise Unfinished(outcome, ~outcome.rerun, _cause(e)) from None
        for old, new in zip(jtu.tree_leaves(outcome), jtu.tree_leaves(again), strict=True):
            old[pending] = new
    return _give_up(outcome, np)


def _batch(job, executor, wanted, repeat, size) -> Result:
    missing = size - len(wanted) if executor.vectorised else 0
    # (NumPy's, as the jitted functions that they go to take those faster.)
    indices = np.pad(wanted, (0, missing), mode="edge").astype(jax.dtypes.canonicalize_dtype(int))
    if not job.plan.saving.rows:
        job = count_steps(job, executor, indices, repeat)
    outcome = executor.run(job, indices, repeat)
    return jax.tree.map(lambda x: x[: len(wanted)], outcome) if missing else outcome


def count_steps(job, executor, indices, repeat) -> Job:
    """Saving every step needs room for them, so a first solve counts them."""
    ends = dataclasses.replace(job, report=None, sink=None)
    try:
        counts = executor.run(ends.replan(saving=Saving("ends", False, 1)), indices, repeat)
    except Unfinished as e:  # of states, there are none yet
        raise e.cause from None
    most = int(np.max(np.asarray(counts.naccept) + np.asarray(counts.nreject)))
    # A little more, as the program that saves them is another and may round otherwise.
    room = 2 ** math.ceil(math.log2(max(16, most + most // 16 + 1)))
    room = min(room, job.plan.maxiters)
    return bounded(job, room)


def bounded(job: Job, steps: int) -> Job:
    """The job with room for this many saved steps."""
    saving = job.plan.saving._replace(rows=steps + job.plan.saving.start)
    return with_output(job.replan(saving=saving, maxiters=steps))


class _Gather:
    """Collects batches into arrays on the host."""

    def __init__(self, trajectories: int):
        self.trajectories = trajectories
        self.leaves: list[np.ndarray] = []
        self.structure: Any = None

    @property
    def empty(self) -> bool:
        return not self.leaves

    def missing(self, batch_size: int):
        return _ranges(self.trajectories, batch_size)

    def add(self, wanted: np.ndarray, outcome: Result) -> None:
        leaves, self.structure = jtu.tree_flatten(outcome)
        leaves = [np.asarray(x) for x in leaves]
        if not self.leaves:
            self.leaves = [blank((self.trajectories, *x.shape[1:]), x.dtype) for x in leaves]
        for i, new in enumerate(leaves):
            self.leaves[i] = _fit(self.leaves[i], new)
            rows = tuple(slice(0, n) for n in new.shape[1:])
            self.leaves[i][(wanted, *rows)] = new

    def ensemble(
        self, job: Job, stopped: BaseException | None = None, wanted: Any = None
    ) -> Ensemble:
        """What was collected, and what is done of the batch that was `stopped`."""
        if isinstance(stopped, Unfinished):
            done = stopped.done
            outcome = jax.tree.map(lambda x: x[done], stopped.outcome._replace(rerun=None))
            self.add(wanted[done], outcome)
        if self.empty:
            self.add(np.arange(0), _nothing(job))
        outcome = jtu.tree_unflatten(self.structure, self.leaves)
        return Ensemble(outcome.u, outcome, stopped is None)


def _nothing(job: Job) -> Result:
    """The outcome of no trajectories."""
    one = outcome_of_one(job)
    return jax.tree.map(lambda x: np.zeros((0, *x.shape), x.dtype), one._replace(rerun=None))


def outcome_of_one(job: Job) -> Result:
    """Of one trajectory, the abstract values."""
    if not job.plan.saving.rows:
        job = bounded(job, 1)
    plan, indices = job.plan, integers(np.arange(1))

    def solve(lanes):
        return solve_lanes(plan, lanes, indices, 1, job.key, job.output_consts)

    one = jax.eval_shape(solve, job.trajectories.lanes(indices, 1))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), one)


def _fit(full: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Room for a batch that saved more steps than those before it."""
    shape = (len(full), *map(max, full.shape[1:], new.shape[1:]))
    if shape == full.shape:
        return full
    larger = blank(shape, full.dtype)
    larger[tuple(map(slice, full.shape))] = full
    return larger


def _reduced(pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"reduction must return a pair (u, converged), got {type(pair).__name__}.")
    u, converged = pair
    if np.shape(converged) != ():
        raise TypeError(
            "reduction must return a pair (u, converged) with converged a boolean; its converged "
            f"has the shape {np.shape(converged)}."
        )
    return u, converged


def _give_up(outcome: Result, np_: Any) -> Result:
    """A trajectory that still asks for a rerun has not succeeded."""
    unsettled = outcome.rerun & (outcome.retcode == ReturnCode.Success.value)
    failure = np_.asarray(ReturnCode.Failure.value, outcome.retcode.dtype)
    return outcome._replace(retcode=np_.where(unsettled, failure, outcome.retcode), rerun=None)


#
# Inside jit, grad, vmap
#


def run_traced(
    job: Job,
    executor: Executor,
    trajectories: int,
    batch_size: int,
    *,
    reduction: Callable | None,
    u_init: Any,
    max_repeats: int,
) -> Ensemble:
    """The same as one traced program."""

    def batch(indices):
        return _traced_reruns(job, executor, indices, max_repeats)

    indices = np.arange(trajectories)
    if reduction is sum_reduction and u_init is None:
        if adds_up(job, executor):
            u, outcome = executor.total(job, integers(indices))
            sums = jax.tree.map(jnp.sum, _counts(outcome))
            return Ensemble(u, _total(outcome.retcode, sums), jnp.asarray(False))
        u_init = _empty(reduction, jax.eval_shape(batch, integers(indices)).u)
    if reduction is None:
        if batch_size >= trajectories:
            outcome = batch(integers(indices))
            return Ensemble(outcome.u, outcome, True)
        if executor.vectorised:
            indices = np.pad(indices, (0, -trajectories % batch_size), mode="edge")
        head, rest = _split(indices, batch_size)
        if not being_staged():
            # Differentiated or mapped outside of jit: batch by batch, as eagerly, by the programs
            # that are compiled already.
            outcomes = [batch(some) for some in [*head, *([rest] if len(rest) else [])]]
            outcome = jax.tree.map(lambda *x: jnp.concatenate(x)[:trajectories], *outcomes)
            return Ensemble(outcome.u, outcome, True)
        # Recomputed in the backward pass, so that memory stays that of a batch there, too.
        outcome = _merge(jax.lax.map(jax.checkpoint(batch), head))
        if len(rest):
            outcome = _join(outcome, jax.checkpoint(batch)(rest))
        outcome = jax.tree.map(lambda x: x[:trajectories], outcome)
        return Ensemble(outcome.u, outcome, True)

    def step(carry, indices):
        u, converged = carry

        def go():
            outcome = batch(indices)
            new, stop = _reduced(reduction(u, outcome.u, indices))
            _same_structure(u, new)
            counts = codes_and_counts(outcome)
            return (jax.tree.map(jnp.asarray, new), jnp.asarray(stop, bool)), counts

        def skip():
            counts = jax.eval_shape(go)[1]
            return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), counts)

        return jax.lax.cond(converged, skip, go)

    carry = (jax.tree.map(jnp.asarray, u_init), jnp.asarray(False))
    head, rest = _split(indices, batch_size)
    carry, outcome = jax.lax.scan(step, carry, head)
    outcome = _merge(outcome)
    if len(rest):
        carry, last = step(carry, rest)
        outcome = _join(outcome, last)
    sums = jax.tree.map(jnp.sum, _counts(outcome))
    return Ensemble(carry[0], _total(outcome.retcode, sums), carry[1])


def _split(indices: np.ndarray, batch_size: int) -> tuple[Any, Any]:
    """Whole batches `[batch, trajectory]`, and what is left."""
    whole = len(indices) // batch_size * batch_size
    return integers(indices[:whole].reshape(-1, batch_size)), integers(indices[whole:])


def _merge(batches: Result) -> Result:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)


def _join(first: Result, last: Result) -> Result:
    return jax.tree.map(lambda *x: jnp.concatenate(x), first, last)


def _traced_reruns(job, executor, indices, max_repeats) -> Result:
    first = executor.run(job, indices, 1)
    if first.rerun is None:
        return first

    def again(outcome, repeat):
        def redo():
            new = executor.run(job, indices, repeat)

            def pick(old, new):
                mask = outcome.rerun.reshape(-1, *(1,) * (old.ndim - 1))
                return jnp.where(mask, new, old)

            return jax.tree.map(pick, outcome, new)

        return jax.lax.cond(jnp.any(outcome.rerun), redo, lambda: outcome), None

    outcome, _ = jax.lax.scan(again, first, integers(np.arange(2, max_repeats + 1)))
    return _give_up(outcome, jnp)


def _same_structure(u: Any, new: Any) -> None:
    def struct(tree):
        leaves, structure = jtu.tree_flatten(tree)
        return structure, [(np.shape(x), jnp.result_type(x)) for x in leaves]

    if struct(u) != struct(new):
        raise TypeError(
            "inside jit, reduction must return a u of the structure, shapes and dtypes of u_init; "
            f"u_init has {struct(u)}, it returned {struct(new)}."
        )
