"""From one batch to the whole ensemble: the loop over batches, reductions, and early stops.

When run eagerly, the batches are a Python loop, and results are gathered on the host, so that a
batch bounds the memory used on the device. Inside `jit`, `grad` or `vmap` the loop is part of the
program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.devices.placement import as_jax_arrays
from ..ground.retcode import ReturnCode
from ..plan.plan import Outcome
from ..tracing.program import being_staged
from .gather import BatchGatherer, ranges
from .job import cause_of, codes_and_counts, integers, UnfinishedBatch
from .reductions import adds_up, check_structure, checked, empty, sum_reduction
from .run import Run


class EnsembleStopped(Exception):
    """The ensemble was stopped before its end; `result` holds what was computed, `cause` says
    why."""

    def __init__(self, result: Outcome | None, cause: BaseException):
        super().__init__(str(cause))
        self.result = result
        self.cause = cause


def run_eagerly(run: Run, gather: Any = None) -> Outcome | None:
    """The outcome of all trajectories, run batch after batch; with a reduction, its `u` is reduced.
    `gather` chooses the batches and collects them, by default in arrays on the host. With a store,
    None is returned.

    **Raises:** `EnsembleStopped`, with the results so far, for anything that stops the ensemble
    before its end.
    """
    if run.ens.reduction is not None:
        return _reduce_eagerly(run, run.ens.reduction)
    job = run.job
    if gather is None and run.n <= run.size:
        every = np.arange(run.n)
        try:
            return run.solve(every)._replace(converged=True)
        except (UnfinishedBatch, KeyboardInterrupt) as e:
            raise EnsembleStopped(
                BatchGatherer(run.n).ensemble(job, e, every), cause_of(e)
            ) from None
    gather = gather or BatchGatherer(run.n)
    for wanted in gather.missing(run.size):
        try:
            gather.add(wanted, run.solve_into(gather, wanted))
        except (Exception, KeyboardInterrupt) as e:
            if gather.empty and not isinstance(e, UnfinishedBatch | KeyboardInterrupt):
                raise
            raise EnsembleStopped(gather.ensemble(job, e, wanted), cause_of(e)) from None
    return gather.ensemble(job)


def _reduce_eagerly(run: Run, reduction: Callable) -> Outcome:
    """Run batch after batch and reduce each. Return codes are kept, at one byte for each
    trajectory."""
    u, converged, codes, counts = run.ens.u_init, False, [], None
    where_it_is = reduction is sum_reduction and adds_up(run.job, run.executor)

    def reduced():
        retcode = np.concatenate([*codes, np.zeros(0, np.int8)])
        not_run = run.n - len(retcode)
        retcode = np.pad(retcode, (0, not_run), constant_values=ReturnCode.Default.value)
        return _total(u, retcode, counts or (0, 0, 0), converged)

    for wanted in ranges(run.n, run.size):
        try:
            if where_it_is:
                more, outcome = run.total(wanted)
                u = more if u is None else jax.tree.map(jnp.add, u, more)
                stop = False
            else:
                outcome = run.solve(wanted)
                outcome = outcome._replace(u=as_jax_arrays(outcome.u))
                u = empty(reduction, outcome.u) if u is None else u
                u, stop = checked(reduction(u, outcome.u, wanted))
        except (Exception, KeyboardInterrupt) as e:
            raise EnsembleStopped(reduced(), cause_of(e)) from None
        codes.append(np.asarray(outcome.retcode))
        new = jax.tree.map(lambda x: int(np.asarray(x).sum()), outcome.counts)
        counts = new if counts is None else jax.tree.map(int.__add__, counts, new)
        if converged := bool(stop):
            break
    return reduced()


def _total(u: PyTree, retcode: Array | np.ndarray, counts: PyTree, converged: ArrayLike) -> Outcome:
    """The outcome of a reduced ensemble, with all return codes, and total counts."""
    return Outcome(u, None, None, None, retcode, *counts, converged=converged)


def run_traced(run: Run) -> Outcome:
    """`run_eagerly` as one traced program."""
    job, executor, batch_size, batch = run.job, run.executor, run.size, run.solve_traced
    reduction, u_init = run.ens.reduction, run.ens.u_init
    indices = np.arange(run.n)
    if reduction is sum_reduction and u_init is None:
        if adds_up(job, executor):
            u, outcome = executor.total(job, integers(indices))
            sums = jax.tree.map(jnp.sum, outcome.counts)
            return _total(u, outcome.retcode, sums, jnp.asarray(False))
        u_init = empty(reduction, jax.eval_shape(batch, integers(indices)).u)
    if reduction is None:
        if batch_size >= run.n:
            return batch(integers(indices))._replace(converged=True)
        if executor.vectorised:
            indices = np.pad(indices, (0, -run.n % batch_size), mode="edge")
        head, rest = _split(indices, batch_size)
        if not being_staged():
            # Under `grad` or `vmap` outside of `jit`: batch by batch as when run eagerly, with the
            # programs that are already compiled.
            outcomes = [batch(some) for some in [*head, *([rest] if len(rest) else [])]]
            outcome = jax.tree.map(lambda *x: jnp.concatenate(x)[: run.n], *outcomes)
            return outcome._replace(converged=True)
        # Recomputed in the backward pass, so that a batch bounds the memory there, too.
        outcome = _merge(jax.lax.map(jax.checkpoint(batch), head))
        if len(rest):
            outcome = _join(outcome, jax.checkpoint(batch)(rest))
        outcome = jax.tree.map(lambda x: x[: run.n], outcome)
        return outcome._replace(converged=True)

    def step(carry, indices):
        u, converged = carry

        def go():
            outcome = batch(indices)
            new, stop = checked(reduction(u, outcome.u, indices))
            check_structure(u, new)
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
    sums = jax.tree.map(jnp.sum, outcome.counts)
    return _total(carry[0], outcome.retcode, sums, carry[1])


def _split(indices: np.ndarray, batch_size: int) -> tuple[Any, Any]:
    """The indices as whole batches `[batch, trajectory]`, and the indices of the last batch if it
    is shorter."""
    whole = len(indices) // batch_size * batch_size
    return integers(indices[:whole].reshape(-1, batch_size)), integers(indices[whole:])


def _merge(batches: Outcome) -> Outcome:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)


def _join(first: Outcome, last: Outcome) -> Outcome:
    return jax.tree.map(lambda *x: jnp.concatenate(x), first, last)
