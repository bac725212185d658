"""Derivatives of any order of a solve: four primitives over the two kernels.

With S the saved states as a function of x, the first state and the parameters, and JF the field
augmented by a tangent:

    solve[F](x)          S(x)                              kernel `solve` of F
    push[F](x; v)        DS(x) v                           kernel `solve` of JF, its tangent half
    pull[F](x; c)        DS(x)^T c                         kernel `pull_back` of F
    bend[F](x, c; v, w)  DS(x)^T w + (D^2 S(x) v)^T c      kernel `pull_back` of JF, its primal half

What stands after the `;` is what they are linear in. They are closed: the derivative of each is one
of them, of F or of JF, and so is each transpose (that of `bend` in v is `bend`, as second
derivatives are symmetric). Batching makes more trajectories. Nothing is traced of JF before a
program with `push` or `bend` is lowered, or one of them is differentiated: in a first gradient
`push` is only a step on the way to `pull`.

Steps are constants, chosen by the components of F's own state alone, which JF computes by the same
operations: they have the same bits, and the steps are the same. (Where a derivative rule of a
function of the user's computes it otherwise, a step whose error is at the bound may be another's:
then these are derivatives of other steps, as right as those.) The solution is that of F always.
Derivatives by times are those of the solution of the ODE, along the field: S moves by f when its
times do, and by -DS f when `t0` does.

Only trajectories that succeeded have derivatives, and rows that were reached; others have zero.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import mlir

from ..core.lane import Lane
from ..fields import parameters_of
from ..ground.recent import jit_recent
from .along import is_there, rows_of, where
from .flow import augmented, Flow, Known, own_of, real_of, unaugmented


def half(rows: Any, i: int) -> Any:
    """Of rows of JF `[trajectory, row, 2, *state]`: the states (0), or their tangents (1)."""
    return rows[:, :, i]


#
# What the kernels compute
#


def _solve(flow: Flow, lanes: Lane, known: Known) -> list:
    rows = flow.plan.engine.rows(flow.plan, lanes, known.ok)
    return [where(is_there(flow, known), rows)]


def _push(flow: Flow, lanes: Lane, known: Known, *v: Any) -> list:
    (rows,) = _solve(*augmented(flow, lanes, v), known)
    return [half(rows, 1)]


def _pull(flow: Flow, lanes: Lane, known: Known, c: Any) -> list:
    # (Of what was not reached they may be NaN.)
    c = where(is_there(flow, known), c)
    u0, *parameters = flow.plan.engine.pull_back(flow, lanes, known, c)
    own = own_of(flow.plan)
    parameters = [where(known.ok, x) if o else x for x, o in zip(parameters, own, strict=True)]
    return [where(known.ok, u0), *parameters]


def _bend(flow: Flow, lanes: Lane, known: Known, c: Any, *rest: Any) -> list:
    *v, w = rest
    wide, both = augmented(flow, lanes, v)
    u0, *parameters = _pull(wide, both, known, jnp.stack([w, c], axis=2))
    return [u0[:, 0], *unaugmented(flow, wide, parameters)]


def rows_avals(flow: Flow) -> list:
    plan = flow.plan
    return [jax.core.ShapedArray((flow.n, rows_of(flow), *plan.state.shape), plan.state.dtype)]


def numbers_avals(flow: Flow) -> list:
    """Cotangents: of what all share, one a group."""
    plan = flow.plan
    avals = [parameters_of(plan.field)[i] for i in real_of(plan)]
    lead = [flow.n if own else flow.groups for own in own_of(plan)]
    parameters = [
        jax.core.ShapedArray((k, *a.shape), a.dtype) for k, a in zip(lead, avals, strict=True)
    ]
    return [jax.core.ShapedArray((flow.n, *plan.state.shape), plan.state.dtype), *parameters]


def _primitive(name: str, fn: Callable, results: Callable[[Flow], list]) -> Any:
    """A primitive whose operands are the numbers of a `Lane`, what is `Known`, and what is its
    own."""
    prim: Any = jex.Primitive(f"ensembleode_{name}")
    prim.multiple_results = True

    def run(*operands, flow):
        return fn(flow, *unpack(flow, operands))

    prim.opened = run  # (see `compiled.call.kernels_in`)
    eagerly = jit_recent(lambda flow, *operands: run(*operands, flow=flow))
    prim.def_impl(jax.disable_jit(False)(lambda *operands, flow: eagerly(flow, *operands)))
    prim.def_abstract_eval(lambda *_, flow: results(flow))
    lower: Callable = mlir.lower_fun(run, multiple_results=True)
    mlir.register_lowering(prim, lower)
    return prim


def unpack(flow: Flow, operands: Sequence) -> list:
    """The operands of a primitive (or their tangents): the numbers, what is known, and others."""
    n = flow.tree.num_leaves
    return [*jtu.tree_unflatten(flow.tree, operands[:n]), *operands[n:]]


def bind(prim: Any, flow: Flow, lanes: Lane, known: Known, *others: Any) -> list:
    leaves, tree = jtu.tree_flatten((lanes, known))
    return prim.bind(*leaves, *others, flow=dataclasses.replace(flow, tree=tree))


def _solve_or_given(flow: Flow, lanes: Lane, known: Known, *given: Any) -> list:
    return list(given) or _solve(flow, lanes, known)


# (Where the rows are at hand, they are an operand, and what it gives.)
solve_p = _primitive("solve", _solve_or_given, rows_avals)
push_p = _primitive("push", _push, rows_avals)
pull_p = _primitive("pull", _pull, numbers_avals)
bend_p = _primitive("bend", _bend, numbers_avals)
