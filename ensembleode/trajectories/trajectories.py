"""From a `prob_func` to trajectories as arrays: traced once, with shared numbers kept shared.

[`TrajectoryNumbers`][ensembleode.plan.trajectory_numbers.TrajectoryNumbers] holds the numbers of
one trajectory or, with a leading axis on *some* of the leaves, those of a batch. Which leaves vary
with the index is found by walking the jaxpr of `prob_func`, so that the weights of a network, for
example, are never copied for each trajectory.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array

from ..ground.lifting import lift_numpy, NUMPY_INDEXED
from ..ground.logs import log_once
from ..ground.recent import jit_recent
from ..plan.checked_reads import check_reads_by_index
from ..plan.saving import grid, Saving, Spacing
from ..plan.trajectory_numbers import Trajectories
from ..problem.jump_problem import JumpProblem
from ..problem.number_table import of_kind
from ..problem.problem import EnsembleProblem
from ..problem.stochastic import SDEProblem
from ..tracing.program import being_staged, is_tracer
from ..tracing.purity import owned
from .called_prob_func import called
from .traced_prob_func import as_input, ImpureError, ProbFuncTrace, trace_checked
from .trajectory_maker import TrajectoryMaker


# The options that may have a row for each trajectory.
_TIMES = [row.option for row in of_kind("times", "stops")]


def describe(
    ens: EnsembleProblem, solve_options: dict, key: Array, trajectories: int | None
) -> Trajectories:
    """Evaluate `ens.prob_func` over the index, by tracing it where that is possible. `trajectories`
    is their number; None for a single problem.

    **Raises:** the exceptions that `prob_func` raises; `TypeError` and `ValueError` for problems
    that can't be solved (see [`solve`][ensembleode.solve]).
    """
    staged = being_staged()
    maker = TrajectoryMaker(ens, solve_options, trajectories)
    n = trajectories or 1
    if not staged and _is_plain(maker, key):
        return _laid_out(_shared_by_all(maker, key), n)
    every = _laid_out(_evaluated(maker, key, n), n)
    return dataclasses.replace(every, traced=every.traced or staged)


def _evaluated(maker: TrajectoryMaker, key: Array, n: int) -> Trajectories:
    ens = maker.ens
    try:
        made = trace_checked(maker, key)
    except ImpureError as error:
        if being_staged():
            raise TypeError(str(error)) from None
        message = _CALLED_AS_IMPURE
    except Exception as error:
        if ens.prob_func is None:
            raise
        by_array = isinstance(error.__cause__ or error, NUMPY_INDEXED)
        lifted = lift_numpy(ens.prob_func) if by_array else None
        if lifted is not None:
            ens = dataclasses.replace(ens, prob_func=lifted)
            return _evaluated(TrajectoryMaker(ens, maker.solve_options, maker.n), key, n)
        first_line = str(error).partition("\n")[0]
        message = _CALLED_AS_NOT_TRACEABLE.format(f"{type(error).__name__}: {first_line}")
    else:
        return _traced(maker, key, n, made)
    # If prob_func needs a concrete index, this works; if it is wrong, this raises its plain error.
    # The trace has to be forgotten by now: as long as a constant of it lives, JAX takes it for the
    # NumPy array that it was made from, even if the array has changed since.
    found = called(TrajectoryMaker(ens, maker.solve_options, maker.n, concrete=True), key, n)
    log_once(message)
    return found


_CALLED_AS_NOT_TRACEABLE = (
    "prob_func can't be traced over the index, so it is called once a trajectory, which is slow "
    "({}). Index JAX arrays, jnp.asarray(u0s)[ctx.index], and use jnp.where instead of `if`."
)


_CALLED_AS_IMPURE = (
    "prob_func makes another problem each time it is called (by random numbers of NumPy or Python, "
    "or the clock), so it is called once a trajectory, which is slow. Draw them by jax.random with "
    "ctx.key: fast, and the same whatever the batches or devices."
)


def _traced(maker: TrajectoryMaker, key: Array, n: int, made: ProbFuncTrace) -> Trajectories:
    program, consts, leaves, structure = made
    check_reads_by_index("prob_func", program, consts, n)
    # The solution computes `u0` and `p` from these copies, also after the user has overwritten
    # arrays.
    consts = list(map(owned, consts))
    # (The index, the repeat, and the key, of which each trajectory makes its own by these.)
    varies = tuple(program.depends_on([True, True, False]))
    is_output = list(map(is_tracer, leaves))
    values = [None if out else as_input(x) for out, x in zip(is_output, leaves, strict=True)]

    def fill(outs, rest):
        outs = iter(outs)
        leaves = [next(outs) if out else x for out, x in zip(is_output, rest, strict=True)]
        return jtu.tree_unflatten(structure, leaves)

    aval: Any = program.jaxpr.invars[0].aval
    integer = aval.dtype

    def as_integers(*args):
        return [x.astype(integer) if is_tracer(x) else np.asarray(x, integer) for x in args]

    def lanes(indices, repeat):
        return fill(_evaluate(program, varies, consts, *as_integers(indices, repeat), key), values)

    def lane(index, repeat):
        return fill(program(consts, *as_integers(index, repeat), key), values)

    if maker.ens.prob_func is not None and n > 1 and not any(varies):
        log_once(
            "prob_func makes the same problem for every trajectory: let it depend on ctx.index, or "
            "draw random numbers by jax.random with ctx.key."
        )
    return maker.trajectories(
        batched=fill(varies, [False] * len(values)),
        lanes=lanes,
        lane=lane,
        shared=fill([None] * len(varies), values),
        traced=any(is_tracer(x) for x in (*consts, key)),
        repeatable=True,
    )


@functools.partial(jit_recent, static=2)
def _evaluate(program, varies, consts, indices, repeat, key):
    def pick(index, wanted):
        outs = program(consts, index, repeat, key)
        return [x for x, v in zip(outs, varies, strict=True) if v == wanted]

    each = iter(jax.vmap(functools.partial(pick, wanted=True))(indices))
    shared = iter(pick(indices[0], wanted=False))
    return [next(each) if v else next(shared) for v in varies]


def _laid_out(traj: Trajectories, n: int) -> Trajectories:
    """Replace each spacing (a number as `saveat`) by the grid of each trajectory's own time
    span."""
    spacing = traj.saving
    if not isinstance(spacing, Spacing):
        return traj
    every = traj.lanes(np.arange(n, dtype=np.int32), 1)
    if is_tracer(every.t0) or is_tracer(every.t1):
        raise TypeError(
            "saveat is a number while tspan is traced, so the count of saved times is not known; "
            "pass saveat as an array of times."
        )
    dtype = every.t0.dtype
    rows = int(grid(spacing, every.t0, every.t1, dtype)[1].max())

    def with_grid(lanes):
        times, counts = grid(spacing, lanes.t0, lanes.t1, dtype, rows)
        return lanes._replace(saveat=jnp.asarray(times), count=jnp.asarray(counts))

    varies = traj.batched.t0 or traj.batched.t1
    return dataclasses.replace(
        traj,
        saving=Saving("times", False, rows),
        batched=traj.batched._replace(saveat=varies, count=varies),
        lanes=lambda indices, repeat: with_grid(traj.lanes(indices, repeat)),
        lane=lambda index, repeat: with_grid(traj.lane(index, repeat)),
    )


def _is_plain(maker: TrajectoryMaker, key: Array) -> bool:
    """Whether all trajectories solve the problem as it was given, so that only `f` has to be
    traced: there is no `prob_func`, no noise, no traced number, and no option with a row for each
    trajectory."""
    if maker.ens.prob_func is not None or isinstance(maker.ens.prob, SDEProblem | JumpProblem):
        return False
    if any(map(is_tracer, jtu.tree_leaves((maker.ens.prob, maker.solve_options, key)))):
        return False
    options = maker.solve_options, maker.ens.prob.options
    given: Any = [each.get(name) for each in options for name in _TIMES]
    try:
        return all(np.ndim(x) < 2 for x in given)
    except ValueError:  # ragged times, for which a later check raises
        return False


def _shared_by_all(maker: TrajectoryMaker, key: Array) -> Trajectories:
    lane = jax.tree.map(as_input, maker(0, 1, key))
    return maker.trajectories(
        batched=jax.tree.map(lambda _: False, lane),
        lanes=lambda indices, repeat: lane,
        lane=lambda index, repeat: lane,
        shared=lane,
        traced=any(map(is_tracer, jtu.tree_leaves(lane))),
        repeatable=True,
    )
