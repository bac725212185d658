"""EnsembleDistributed and EnsembleSplitThreads: the trajectories of a batch on other processes.

- `programs.py`: what is computed, as programs over chunks; `worker.py`: what runs them.
- `pools.py`: where tasks go (Dask, or a `concurrent.futures` executor); `local.py`: clusters on
  this computer, and the pool of an ensemble algorithm.
- `dispatch.py`: from a batch to tasks and back, and what becomes of failures.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ... import sensitivity
from ...core.executor import Executor
from ...core.interrupts import looking_at
from ...core.job import integers, Job, Unfinished
from ...core.lane import Lane
from ...core.plan import Outcome, Plan
from ...ensemble import EnsembleDistributed, EnsembleSplitThreads
from ...ground.host import host_call
from ...ground.keys import as_before, raw
from ...ground.retcode import ReturnCode
from ...tracing.program import is_tracer
from . import local
from .dispatch import Batch, dispatch, Results
from .pools import ClusterError, Pool
from .programs import ChunkProgram, exported, Numbers, numbers_of, pickled, program_of, Shipped


_STOP = jtu.GetAttrKey("stop")


@dataclasses.dataclass(frozen=True)
class Distributed(Executor):
    """The executor on the workers of a pool.

    - `threads`: of each worker.
    - `costs`: what each trajectory costs, `[trajectory]`; None where that isn't known.
    - `notes`: what happened to trajectories, besides numerics; `lost`: those that workers died of.
    """

    pool: Pool
    threads: int
    costs: Any = None
    notes: list = dataclasses.field(default_factory=list)
    lost: set = dataclasses.field(default_factory=set)

    reports = True
    totals = True
    local = False

    def check(self, plan: Plan) -> None:
        """**Raises:** `ValueError` for forward-mode sensitivities."""
        if getattr(plan.method.value, "direction", None) == "forward":
            raise ValueError(
                "EnsembleDistributed() is differentiated in reverse mode only, so not with "
                "sensealg=ForwardDiffSensitivity(); use EnsembleThreads()."
            )

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        remote, numbers, costs = self._prepared(job, indices, repeat)
        if job.traced:
            return _solve(numbers, costs, remote)
        if not (isinstance(repeat, int) and repeat == 1):
            job = dataclasses.replace(job, report=None, sink=None)
        outcome, _, results = remote.run("solve", numbers, costs, self._seen(job, indices))
        self._note(outcome, results, indices)
        if results.cause is not None:
            raise Unfinished(outcome, results.done, results.cause) from None
        return outcome

    def total(self, job: Job, indices: Any) -> tuple[Any, Outcome]:
        """The sum of the outputs over these trajectories, and their return codes and counts.

        Workers add up what is theirs; differentiated, each gives its gradient, too, and none gives
        its trajectories.
        """
        remote, numbers, costs = self._prepared(job, indices, 1)
        if job.traced:
            return _total(numbers, costs, remote)
        each, parts, results = remote.run("total", numbers, costs, self._seen(job, indices))
        if results.cause is not None:
            raise results.cause
        self._note(each, results, indices)
        return _summed(parts), each

    def _seen(self, job: Job, indices: Any) -> Callable:
        """A function that is told of an outcome as it grows, and which rows are new in it: it notes
        lost trajectories, and reports to the job."""

        def seen(outcome, results, rows):
            self._note(outcome, results, indices)
            if job.report is not None:
                job.report(outcome.retcode[rows])
            if job.sink is not None:
                job.sink(outcome, results.done)

        return seen

    def _prepared(self, job: Job, indices: Any, repeat: Any) -> tuple["_Remote", Numbers, Any]:
        if not job.traced and job.plan.engine.is_stoppable():
            job = looking_at(job, None)  # (a worker has one of its own)
        lanes = job.trajectories.lanes(indices, repeat)
        costs = self._costs(job.plan, lanes, indices)
        numbers = numbers_of(
            lanes, job.plan.batched, indices, integers(repeat), job.key, job.output_consts
        )
        pickle = functools.partial(pickled, remake=job.remake)
        remote = _Remote(self.pool, self.threads, job.plan, indices.shape[0], pickle)
        numbers = jax.tree.map(jnp.asarray, numbers)
        if job.traced:
            name = sensitivity.label(job.trajectories.options["sensealg"])
            numbers = sensitivity.reverse_only(numbers, name)
        return remote, numbers, costs

    def _note(self, outcome: Outcome, results: Results, indices: Any) -> None:
        _fail_lost(outcome, results)
        for rows, why in results.lost:
            which = np.asarray(indices)[rows].tolist()
            if not self.lost.issuperset(which):
                self.notes.append(f"trajectories {which[0]} to {which[-1]} are lost: {why}")
            self.lost.update(which)

    def _costs(self, plan: Plan, lanes: Lane, indices: Any) -> Any:
        """What each trajectory of the batch costs, as far as is known."""
        if self.costs is not None:
            if not is_tracer(indices) and np.max(indices) >= len(self.costs):
                raise ValueError(
                    f"costs are those of {len(self.costs)} trajectories, and there are more: give "
                    "one for each."
                )
            return jnp.asarray(self.costs)[indices]
        if not (plan.batched.t0 or plan.batched.t1):
            return None
        return jax.lax.stop_gradient(jnp.abs(jnp.asarray(lanes.t1) - jnp.asarray(lanes.t0)))


def executor(ensemblealg: EnsembleDistributed | EnsembleSplitThreads, engine: Any) -> Distributed:
    """**Raises:** `ImportError` without Dask, where it is needed; `ClusterError` where the cluster
    can't be reached."""
    pool = local.pool_of(ensemblealg)
    pool.open()
    return Distributed(pool, ensemblealg._sizes()[1], ensemblealg.costs)


@dataclasses.dataclass(frozen=True)
class _Remote:
    """`n` trajectories of a plan on the workers of a pool, and the programs that are run on them.

    - `pickle`: makes what is shipped of a program that can't be exported.
    """

    pool: Pool
    threads: int
    plan: Plan
    n: int
    pickle: Callable[[ChunkProgram], Shipped] = dataclasses.field(compare=False)

    def run(
        self, kind: str, numbers: Numbers, costs: Any, seen: Callable
    ) -> tuple[Any, Any, Results]:
        """Run a program on the workers now. Returns what it gives for each trajectory and for each
        unit, and what became of the batch."""
        program = program_of(kind, self.plan, numbers, self.n)
        every, shared = ([np.asarray(raw(x)) for x in jtu.tree_leaves(x)] for x in numbers)
        paths, _ = jtu.tree_flatten_with_path(numbers.shared)
        stop = next((i for i, (path, _) in enumerate(paths) if path[-1] == _STOP), None)
        batch = Batch(every, shared, None if costs is None else np.asarray(costs), stop)

        def report(results, rows):
            seen(_unflattened(program, results.each, results.parts)[0], results, rows)

        shipped = self._shipped(program)
        results = dispatch(self.pool, program, shipped, batch, threads=self.threads, report=report)
        return *_unflattened(program, results.each, results.parts), results

    def in_program(
        self, kind: str, numbers: Numbers, costs: Any, wanted: Any = None, cotangents: Any = ()
    ) -> tuple[Any, Any]:
        """The same inside a compiled program, which calls the host. Returns what the program gives
        for each trajectory, and for each unit."""
        program = program_of(kind, self.plan, numbers, self.n, wanted)
        every, shared = ([raw(x) for x in jtu.tree_leaves(x)] for x in numbers)
        every += cotangents
        call = _Call(self.pool, self.threads, program, self._shipped(program), len(every))
        each, parts = program.results(self.n)
        costs = [] if costs is None else [costs]
        outs = host_call(call, [*each, *parts], *every, *costs, *shared)
        return _unflattened(program, outs[: len(each)], outs[len(each) :])

    def _shipped(self, program: ChunkProgram) -> Shipped:
        return exported(program, jax.export.default_export_platform()) or self.pickle(program)


@dataclasses.dataclass(frozen=True, repr=False)
class _Call:
    """What a compiled program calls on the host, with flat arrays; compared by content."""

    pool: Pool
    threads: int
    program: ChunkProgram
    shipped: Shipped
    each: int

    @property
    def stands_for(self) -> tuple:
        return self.program.kind, self.program.plan.stands_for

    def __call__(self, *operands: np.ndarray) -> list[np.ndarray]:
        every, rest = list(operands[: self.each]), list(operands[self.each :])
        shared = len(jtu.tree_leaves(self.program.numbers.shared))
        costs = rest.pop(0) if len(rest) > shared else None
        batch = Batch(every, rest, costs)
        results = dispatch(self.pool, self.program, self.shipped, batch, threads=self.threads)
        if results.cause is not None:
            raise results.cause
        if results.lost:
            self._mark(results)
        return [*results.each, *results.parts]

    def _mark(self, results: Results) -> None:
        """**Raises:** `ClusterError` for a lost gradient, which no return code could tell."""
        rows, why = results.lost[0]
        if self.program.wanted:
            raise ClusterError(
                f"the gradient of trajectories {rows[0]} to {rows[-1]} can't be computed: {why}."
            )
        _fail_lost(_unflattened(self.program, results.each, results.parts)[0], results)


@eqx.filter_custom_vjp
def _solve(numbers, costs, remote):
    return remote.in_program("solve", numbers, costs)[0]


@_solve.def_fwd
def _(perturbed, numbers, costs, remote):
    del perturbed
    outcome = remote.in_program("solve", numbers, costs)[0]
    return outcome, eqx.filter(outcome, eqx.is_inexact_array)


@_solve.def_bwd
def _(inexact, cotangents, perturbed, numbers, costs, remote):
    filled = jtu.tree_leaves(sensitivity.with_zeros(inexact, cotangents))
    each, parts = remote.in_program("pull back", numbers, costs, perturbed, filled)
    return Numbers(each, _summed(parts))


@eqx.filter_custom_vjp
def _total(numbers, costs, remote):
    each, parts = remote.in_program("total", numbers, costs)
    return _summed(parts), each


@_total.def_fwd
def _(perturbed, numbers, costs, remote):
    (codes, each), (total, shared) = remote.in_program(
        "total and gradient", numbers, costs, perturbed
    )
    return (_summed(total), codes), Numbers(each, _summed(shared))


@_total.def_bwd
def _(gradient, cotangents, perturbed, numbers, costs, remote):
    (ct,) = jtu.tree_leaves(cotangents[0]) or (0.0,)
    return jax.tree.map(lambda g: g * ct, gradient)


def _summed(parts: Any) -> Any:
    """The sum over the units, in their order, whoever computed them."""
    return jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), parts)


def _fail_lost(outcome: Outcome, results: Results) -> None:
    """Set the return codes of trajectories that workers died of to failures."""
    for rows, _ in results.lost:
        outcome.retcode[rows] = ReturnCode.Failure.value


def _unflattened(program: ChunkProgram, each: list, parts: list) -> tuple[Any, Any]:
    """The results for each trajectory and for each unit, as trees, from flat arrays."""

    def filled(structs, leaves):
        structs, structure = jtu.tree_flatten(structs)
        return jtu.tree_unflatten(structure, map(as_before, structs, leaves))

    structs = program.outputs
    return filled(structs[0], each), filled(structs[1], parts)
