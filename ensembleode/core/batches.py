"""From one batch to the whole ensemble: batch after batch, reduction, early stop.

Eagerly the batches are a Python loop and the results are gathered on the host, so the memory of
the device is bounded by a batch. Inside `jit`, `grad` or `vmap` the same is a loop in the program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ground.placement import as_jax_arrays
from ..ground.retcode import ReturnCode
from ..problem import EnsembleProblem
from ..tracing.program import being_staged
from .gather import Ensemble, Gather, ranges
from .job import cause_of, codes_and_counts, integers, Unfinished
from .plan import Outcome
from .reductions import adds_up, check_structure, checked, empty, sum_reduction
from .reruns import Batches


class Stopped(Exception):
    """The ensemble ended before its end: the `result` so far, and the `cause`."""

    def __init__(self, result: Ensemble | None, cause: BaseException):
        super().__init__(str(cause))
        self.result = result
        self.cause = cause


#
# Eagerly
#


def run_eagerly(
    batches: Batches, ens: EnsembleProblem, trajectories: int, gather: Any = None
) -> Ensemble | None:
    """Run batch after batch.

    **Arguments:** `gather`: what collects them, by default arrays on the host. It says which
    batches it still wants. (A store gives nothing back.)

    **Raises:** `Stopped`, with what was done, for whatever ends it before its end.
    """
    if ens.reduction is not None:
        return _reduce_eagerly(batches, trajectories, ens.reduction, ens.u_init)
    job, batch_size = batches.job, batches.batch_size
    if gather is None and trajectories <= batch_size:
        try:
            outcome = batches.solve(np.arange(trajectories))
        except (Unfinished, KeyboardInterrupt) as e:
            gather = Gather(trajectories)
            raise Stopped(gather.ensemble(job, e, np.arange(trajectories)), cause_of(e)) from None
        return Ensemble(outcome.u, outcome, True)
    gather = gather or Gather(trajectories)
    for wanted in gather.missing(batch_size):
        try:
            gather.add(wanted, batches.solve_into(gather, wanted))
        except (Exception, KeyboardInterrupt) as e:
            if gather.empty and not isinstance(e, Unfinished | KeyboardInterrupt):
                raise
            raise Stopped(gather.ensemble(job, e, wanted), cause_of(e)) from None
    return gather.ensemble(job)


def _reduce_eagerly(batches: Batches, trajectories: int, reduction: Callable, u_init: Any):
    """Run batch after batch and reduce each. (Return codes are kept, one byte a trajectory.)"""
    u, converged, codes, counts = u_init, False, [], None
    where_it_is = reduction is sum_reduction and adds_up(batches.job, batches.executor)

    def ensemble():
        retcode = np.concatenate([*codes, np.zeros(0, np.int8)])
        not_run = trajectories - len(retcode)
        retcode = np.pad(retcode, (0, not_run), constant_values=ReturnCode.Default.value)
        return Ensemble(u, _total(retcode, counts or (0, 0, 0)), converged)

    for wanted in ranges(trajectories, batches.batch_size):
        try:
            if where_it_is:
                more, outcome = batches.total(wanted)
                u = more if u is None else jax.tree.map(jnp.add, u, more)
                stop = False
            else:
                outcome = batches.solve(wanted)
                outcome = outcome._replace(u=as_jax_arrays(outcome.u))
                u = empty(reduction, outcome.u) if u is None else u
                u, stop = checked(reduction(u, outcome.u, wanted))
        except (Exception, KeyboardInterrupt) as e:
            raise Stopped(ensemble(), cause_of(e)) from None
        codes.append(np.asarray(outcome.retcode))
        new = jax.tree.map(lambda x: int(np.asarray(x).sum()), outcome.counts)
        counts = new if counts is None else jax.tree.map(int.__add__, counts, new)
        if converged := bool(stop):
            break
    return ensemble()


def _total(retcode: Any, counts: Any) -> Outcome:
    """The outcome of a reduced ensemble: return codes of each, and total counts."""
    return Outcome(None, None, None, None, retcode, *counts)


#
# Inside jit, grad, vmap
#


def run_traced(batches: Batches, ens: EnsembleProblem, trajectories: int) -> Ensemble:
    """`run_eagerly` as one traced program."""
    job, executor, batch_size, _ = batches
    reduction, u_init = ens.reduction, ens.u_init

    def batch(indices):
        return batches.solve_traced(indices)

    indices = np.arange(trajectories)
    if reduction is sum_reduction and u_init is None:
        if adds_up(job, executor):
            u, outcome = executor.total(job, integers(indices))
            sums = jax.tree.map(jnp.sum, outcome.counts)
            return Ensemble(u, _total(outcome.retcode, sums), jnp.asarray(False))
        u_init = empty(reduction, jax.eval_shape(batch, integers(indices)).u)
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
    return Ensemble(carry[0], _total(outcome.retcode, sums), carry[1])


def _split(indices: np.ndarray, batch_size: int) -> tuple[Any, Any]:
    """The indices as whole batches `[batch, trajectory]`, and those of the shorter last batch."""
    whole = len(indices) // batch_size * batch_size
    return integers(indices[:whole].reshape(-1, batch_size)), integers(indices[whole:])


def _merge(batches: Outcome) -> Outcome:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)


def _join(first: Outcome, last: Outcome) -> Outcome:
    return jax.tree.map(lambda *x: jnp.concatenate(x), first, last)
