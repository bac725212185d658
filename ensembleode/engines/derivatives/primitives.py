"""Derivatives of any order of a solve: four primitives over the two kernels.

Let S be the saved states as a function of x, the initial state and the parameters, and let JF be
the field F extended by a tangent:

    solve[F](x)          S(x)                              kernel `solve` of F
    push[F](x; v)        DS(x) v                           kernel `solve` of JF, its tangent half
    pull[F](x; c)        DS(x)^T c                         kernel `pull_back` of F
    bend[F](x, c; v, w)  DS(x)^T w + (D^2 S(x) v)^T c      kernel `pull_back` of JF, its primal half

`pull` and `bend` compute their results for the initial state and for the parameters that are
wanted (see `flow.Flow`), so that what JAX knows to be constant costs nothing on the way back.

The saved states are a list, and so are `c` and `w`: where there is room for events, the second item
has the rows of events.

The primitives are linear in the operands after the `;`. They are closed: the derivative of each is
one of them, for F or for JF, and so is each transpose (the transpose of `bend` with respect to v is
`bend`, as second derivatives are symmetric). Batching makes more trajectories. JF is traced when a
program with `push` or `bend` is lowered, or one of these is differentiated. A first gradient needs
no JF, as JAX transposes its `push` to a `pull` before that.

Steps are regarded as constants. They are chosen by the components of F's own state alone, which JF
computes by the same operations, so the steps are the same (unless the user's derivative rule of a
function computes its value differently). The solution is always that of F. Derivatives with respect
to times are those of the solution of the ODE, along the field: S has the derivative f with respect
to its times, and -DS f with respect to `t0`.

Only trajectories that succeeded, and rows that were reached, have derivatives; those of others are
zero.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array
from jax.interpreters import mlir

from ...fields import parameters_of
from ...ground.devices.alone import lowered, results_of, together
from ...ground.recent import jit_recent
from ...plan.trajectory_numbers import TrajectoryNumbers
from .along import is_there, sizes_of, where
from .flow import augmented, Flow, RecordedSolve


def half(rows: Array, i: int) -> Array:
    """The states (0) or the tangents (1) in rows of JF, `[trajectory, row, 2, *state]`."""
    return rows[:, :, i]


#
# Computation by the kernels
#


def _solve(flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, *given: Any) -> list:
    """The rows; those that have been computed already may be given."""
    if given:
        return list(given)
    rows = flow.plan.engine.rows(flow.plan, lanes, known.ok)
    return list(map(where, is_there(flow, known), rows))


def _push(flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, *v: Any) -> list:
    if (push := flow.plan.engine.push) is not None:
        return list(map(where, is_there(flow, known), push(flow, lanes, known, v)))
    return [half(rows, 1) for rows in _solve(*augmented(flow, lanes, v), known)]


def _pull(flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, *c: Any) -> list:
    # The cotangents of rows that were not reached may be NaN.
    cotangents = list(map(where, is_there(flow, known), c))
    u0, *parameters = flow.plan.engine.pull_back(flow, lanes, known, cotangents)
    own = zip(parameters, flow.own, strict=True)
    parameters = [where(known.ok, x) if is_own else x for x, is_own in own]
    return [where(known.ok, u0), *parameters]


def _bend(flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, *rest: Any) -> list:
    c, v, w = parted(flow, rest)
    wide, both = augmented(flow, lanes, v)
    doubled = [jnp.stack(x, axis=2) for x in zip(w, c, strict=True)]
    u0, *parameters = _pull(wide, both, known, *doubled)
    return [u0[:, 0], *parameters]


def parted(flow: Flow, operands: Sequence) -> tuple[Sequence, Sequence, Sequence]:
    """The operands `c`, `v` and `w` of `bend`, where `c` and `w` are lists like the rows."""
    n = len(sizes_of(flow))
    return operands[:n], operands[n:-n], operands[-n:]


def rows_avals(flow: Flow) -> list:
    plan, (saved, *of_events) = flow.plan, sizes_of(flow)
    rows = [(saved, *plan.row_shape), *((n, *plan.state.shape) for n in of_events)]
    return [jax.core.ShapedArray((flow.n, *shape), plan.state.dtype) for shape in rows]


def numbers_avals(flow: Flow) -> list:
    """The abstract values of the cotangents of the initial state and of the `wanted` parameters; a
    number that all trajectories share has one for each group."""
    avals = parameters_of(flow.plan.field)
    lead = [flow.n, *(flow.n if own else flow.groups for own in flow.own)]
    like = [flow.plan.state, *(avals[i] for i in flow.wanted)]
    pairs = zip(lead, like, strict=True)
    return [jax.core.ShapedArray((n, *x.shape), x.dtype) for n, x in pairs]


def _primitive(name: str, fn: Callable, results: Callable[[Flow], list]) -> Any:
    """A primitive with the operands `lanes` and `known`, followed by the primitive's own."""
    prim: Any = jex.Primitive(f"ensembleode_{name}")
    prim.multiple_results = True

    def run(*operands, flow):
        return fn(flow, *unpack(flow, operands))

    prim.opened = run  # see `kernels_in` of compiled/xla/call.py
    eagerly = jit_recent(lambda flow, *operands: prim.bind(*operands, flow=flow))
    prim.def_impl(jax.disable_jit(False)(lambda *operands, flow: eagerly(flow, *operands)))
    prim.def_abstract_eval(lambda *avals, flow: results_of(results(flow), avals))
    mlir.register_lowering(prim, lowered(run))
    return prim


def unpack(flow: Flow, operands: Sequence) -> list:
    """The operands of a primitive, or their tangents: the `TrajectoryNumbers`, the `RecordedSolve`,
    and the others."""
    n = flow.tree.num_leaves
    return [*jtu.tree_unflatten(flow.tree, operands[:n]), *operands[n:]]


def bind(
    prim: Any, flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, *others: Any
) -> list:
    leaves, tree = jtu.tree_flatten((lanes, known))
    flow = dataclasses.replace(flow, tree=tree)
    return prim.bind(*together([*leaves, *others]), flow=flow)


solve_p = _primitive("solve", _solve, rows_avals)
push_p = _primitive("push", _push, rows_avals)
pull_p = _primitive("pull", _pull, numbers_avals)
bend_p = _primitive("bend", _bend, numbers_avals)
