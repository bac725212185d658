"""EnsembleColumns: one solve whose state is the matrix of all trajectories."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..engines import columns
from ..engines.compiled import CompiledEngine
from ..ground.devices import cpu_devices
from ..ground.recent import jit_recent
from ..plan.plan import Outcome, Result
from ..plan.trajectory_numbers import TrajectoryNumbers
from ..problem.number_table import of_kind
from ..running.executor import Executor
from ..running.interrupts import finished
from ..running.job import axes, finish_lanes, Job
from ..tracing.program import Program


class ColumnsExecutor(Executor):
    """Solves the trajectories as the columns of one state."""

    def run(self, job: Job, indices: Any, repeat: Any) -> Outcome:
        lanes = job.trajectories.lanes(indices, repeat)
        job = job.replan(threads=cpu_devices.threads())
        args = (job.plan, lanes, indices, repeat, job.key, job.output_consts)
        return finished(job, _solve, *args)


class _ColumnsField(NamedTuple):
    """`f`, or the product with its Jacobian, mapped over the last axis of `[*state, trajectory]`;
    static and hashable."""

    field: Program
    axes_of_p: tuple
    axes_of_consts: tuple

    def __call__(self, consts, u, p, t):
        in_axes = (self.axes_of_consts, -1, self.axes_of_p, None)
        return jax.vmap(self.field, in_axes=in_axes, out_axes=-1)(consts, u, p, t)


@jit_recent
def _solve(plan, lanes, indices, repeat, key, output_consts):
    n = indices.shape[0]
    batched, form = plan.batched, plan.form
    of_p, of_consts = axes(batched.p), axes(batched.consts)
    if form is not None:
        # The last parameter of a product is the direction, with columns like the state's.
        form = form.mapped(lambda x: _ColumnsField(x, (*of_p, -1), of_consts))
    whole = dataclasses.replace(plan, saved=None)
    matrix_plan = dataclasses.replace(
        whole,
        field=_ColumnsField(plan.field, of_p, of_consts),
        form=form,
        batched=jax.tree.map(lambda _: False, batched),
        output=None,
    )
    matrix = _as_matrix(lanes, batched.u0, n)
    if isinstance(plan.engine, CompiledEngine):
        result = columns.solve(whole, lanes, matrix_plan, matrix, n)
        result = result._replace(u=plan.row_of(result.u))
        return finish_lanes(plan, result, lanes, indices, repeat, key, output_consts)
    result = plan.engine.integrate(matrix_plan, matrix)
    where = Result(*[None] * len(result))._replace(u=-1, inner=-1)
    return finish_lanes(plan, result, lanes, indices, repeat, key, output_consts, where)


def _as_matrix(lanes: TrajectoryNumbers, batched_u0: bool, n: int) -> TrajectoryNumbers:
    u0 = jnp.asarray(lanes.u0)
    u0 = jnp.moveaxis(u0, 0, -1) if batched_u0 else jnp.repeat(u0[..., None], n, axis=-1)
    tolerances = {
        row.name: jnp.broadcast_to(jnp.asarray(value)[..., None], u0.shape)
        for row in of_kind("tolerance")
        if (value := getattr(lanes, row.name)) is not None and jnp.ndim(value) > 0
    }
    return lanes._replace(u0=u0, **tolerances)
