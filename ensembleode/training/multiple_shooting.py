"""Multiple shooting: a long trajectory is fitted in short pieces that are made to meet."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Inexact, PyTree

from ..ground.retcode import reached_end, ReturnCodes
from ..ground.state_tree import refuse_tree
from ..problem.ensemble import EnsembleAlgorithm, EnsembleColumns
from ..problem.ode_function import with_mass_of
from ..problem.options import SAVING, time_dtype_of
from ..problem.problem import EnsembleProblem, ODEProblem, remake
from ..solving import solve
from ..tracing.program import is_tracer
from .measured import as_numbers, check_finite


def squared_error(predicted: Array, measured: Array) -> Array:
    """The sum of the squared differences."""
    return jnp.sum(jnp.abs(predicted - measured) ** 2)


def absolute_error(predicted: Array, start: Array) -> Array:
    """The sum of the absolute differences."""
    return jnp.sum(jnp.abs(predicted - start))


class ShootingGroups(NamedTuple):
    """The groups of multiple shooting, which are pieces of measured trajectories: arrays with the
    group as their first axis.

    - `ts`: the times, `[group, time]`. A group that is shorter than the others repeats its end.
    - `data`: the measured states, `[group, time, *state]`.
    - `inside`: whether a point belongs to the group, and isn't a repetition of its end,
        `[group, time]`.
    - `counted`: the points that the data part of the loss sums over, `[group, time]`. Each point
        counts once, in the group that arrives at it; the first point of a trajectory counts in the
        group that starts there.
    - `u0`: the state at which the group starts, `[group, *state]`.
    - `target`: the state at which it should end, which is the start of the next group,
        `[group, *state]`.
    - `has_next`: whether there is a next group, `[group]`.

    A minibatch is a part of the groups: `jax.tree.map(lambda x: x[indices], groups)`.
    """

    ts: Any
    data: Any
    inside: Any
    counted: Any
    u0: Any
    target: Any
    has_next: Any


class MultipleShooting(NamedTuple):
    """The result of [`multiple_shooting`][ensembleode.multiple_shooting].

    - `loss`: the sum of the data part and of the weighted continuity part.
    - `data_loss`, `continuity_loss`: the two parts, the second without its weight.
    - `u`: the states of the groups, `[group, time, *state]`; NaN where a group has no data, or
        which it did not reach.
    - `t`: their times, `[group, time]`. A group that is shorter than the others repeats its end.
    - `retcode`: `[group]`, [`ReturnCode`][ensembleode.ReturnCode]s as integers.

    With several measured trajectories, these arrays have the axis `trajectory` in front of `group`.
    """

    loss: Any
    data_loss: Any
    continuity_loss: Any
    u: Any
    t: Any
    retcode: ReturnCodes


def multiple_shooting(
    prob: ODEProblem,
    data: PyTree,
    ts: Any,
    group_size: int,
    continuity_weight: ArrayLike = 100.0,
    *,
    alg: Any = None,
    ensemblealg: EnsembleAlgorithm | None = None,
    loss: Callable = squared_error,
    continuity_loss: Callable = absolute_error,
    starts: Array | np.ndarray | None = None,
    **solve_options: Any,
) -> MultipleShooting:
    r"""The loss of a fit to measured trajectories, by multiple shooting.

    Over a long time, a trajectory depends so sensitively, or so indirectly, on its parameters that
    a fit of the whole trajectory gets stuck. So the data is divided into groups of `group_size`
    points. Each group starts with the last point of the group before it; the last group may be
    shorter. Every group is solved from its own start, all of them as one ensemble, and the loss is

    $$\sum_\text{points} \text{loss}(\hat u, u) + \text{continuity\_weight}
    \sum_\text{groups} \text{continuity\_loss}(\hat u_\text{end}, u_\text{next start}).$$

    Every point counts once, whatever the size of its group. If `group_size` is the number of
    points, there is a single group, and this is an ordinary fit (single shooting).

    The loss is differentiable with respect to `prob.p`, `starts`, and arrays that `f` closes over,
    and it can be jitted. So a fit minimises
    `multiple_shooting(eo.remake(prob, p=p), data, ts, ...).loss` over `p`.

    **Arguments:**

    - `prob`: the [`ODEProblem`][ensembleode.ODEProblem] with the parameters. Only the shape and
        dtype of its `u0` matter, and its `tspan` doesn't matter.
    - `data`: the measured states, `[time, *state]`; or those of several trajectories with the same
        parameters, `[trajectory, time, *state]`.
    - `ts`: the times of the data, `[time]`, increasing; or `[trajectory, time]`.
    - `group_size`: the number of points of a group, from 2 to all.
    - `continuity_weight`: the weight of the gaps between groups, by default 100.
    - `alg`, `ensemblealg`: the solver and the ensemble algorithm, as for
        [`solve`][ensembleode.solve]. With `EnsembleColumns`, all groups must be measured at the
        same times after their starts.
    - `loss`: `loss(predicted, measured)` for a state `[*state]`, by default the sum of squares. Its
        result is summed, so a loss of optax (such as `optax.huber_loss`) works, too.
    - `continuity_loss`: `continuity_loss(end, start)` for the end of a group and the start of the
        next one, by default the sum of the absolute differences.
    - `starts`: the states at which the groups start, `[group, *state]` (for several trajectories
        `[trajectory, group, *state]`), by default the data there. If the data is noisy, fit the
        starts together with the parameters; otherwise the noise is in the start of every group.
    - `solve_options`: other options of `solve`, such as `abstol` or `sensealg`.

    **Returns:** a [`MultipleShooting`][ensembleode.training.multiple_shooting.MultipleShooting].
    If a group fails, the loss is infinite, so that no optimiser mistakes it for a better one; the
    gradient is then that of the other groups.

    **Raises:** `ValueError` and `TypeError` for bad input, naming the argument: data that is NaN,
    times that don't increase, shapes that don't fit, a `group_size` outside of 2 to the number of
    points.

    The method goes back to Bock and Plitt, "A multiple shooting algorithm for direct solution of
    optimal control problems", IFAC Proceedings 17 (1984). With the data as starts, it is
    DiffEqFlux's `multiple_shoot`, with the same continuity part; there,
    `loss_function(data, prediction)` is a function of the arrays of a group.

    >>> import jax, jax.numpy as jnp, ensembleode as eo
    >>> ts = jnp.linspace(0.0, 2.0, 11)
    >>> data = jnp.exp(-ts)[:, None]
    >>> def loss(p):
    ...     prob = eo.ODEProblem(lambda u, p, t: -p * u, data[0], (0.0, 2.0), p)
    ...     return eo.multiple_shooting(prob, data, ts, group_size=5).loss
    >>> value, gradient = jax.value_and_grad(loss)(1.5)
    >>> print(f"{value:.2f} {gradient:.1f}")
    21.55 35.2
    """
    if not isinstance(prob, ODEProblem):
        raise TypeError(f"prob must be an ODEProblem, got {type(prob).__name__}.")
    refuse_tree(prob.u0, "multiple_shooting")
    data = _as_data(data, prob.u0.shape, prob.u0.dtype)
    several = data.ndim > 1 + prob.u0.ndim
    groups = _groups(data, ts, group_size, starts, several=several)
    of_solve = (alg, ensemblealg, loss, continuity_loss, solve_options)
    *losses, u, retcode = _shoot(prob, groups, continuity_weight, *of_solve)
    lead = (data.shape[0], -1) if several else (-1,)
    return MultipleShooting(
        *map(jnp.sum, losses), *(x.reshape(*lead, *x.shape[1:]) for x in (u, groups.ts, retcode))
    )


def shooting_groups(data: Any, ts: Any, group_size: int, *, starts: Any = None) -> ShootingGroups:
    """The groups that [`multiple_shooting`][ensembleode.multiple_shooting] solves, one after the
    other; those of the first trajectory come first.

    They are the data for fits with minibatches of groups: see
    [`shooting_losses`][ensembleode.training.multiple_shooting.shooting_losses].

    **Arguments:** `data`, `ts`, `group_size` and `starts`: those of `multiple_shooting`. Data is
    `[trajectory, time, *state]` if `ts` is `[trajectory, time]`, and `[time, *state]` otherwise.

    **Raises:** the same errors as `multiple_shooting`.
    """
    several, data = np.ndim(ts) == 2, as_numbers("data", data)
    data = _as_data(data, data.shape[1 + several :], data.dtype)
    return _groups(data, ts, group_size, starts, several=several)


def shooting_losses(
    prob: ODEProblem,
    groups: ShootingGroups,
    continuity_weight: Any = 100.0,
    *,
    alg: Any = None,
    ensemblealg: EnsembleAlgorithm | None = None,
    loss: Callable = squared_error,
    continuity_loss: Callable = absolute_error,
    **solve_options: Any,
) -> Inexact[Array, " group"]:
    """The contribution of each group to the loss of
    [`multiple_shooting`][ensembleode.multiple_shooting].

    This is the loss of each item in a fit by minibatches, with groups as items; summed over all
    groups, it is the loss of `multiple_shooting`. The groups are solved as one ensemble. A group
    that fails has an infinite loss.

    **Arguments:** `groups`: from
    [`shooting_groups`][ensembleode.training.multiple_shooting.shooting_groups], or a part of them;
    `prob`, `continuity_weight`, `alg`, `ensemblealg`, `loss`, `continuity_loss` and
    `solve_options`: those of `multiple_shooting`. (With `EnsembleColumns`, inside `jit` and with
    traced groups, groups whose times differ have a NaN loss.)

    **Returns:** `[group]`.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> from ensembleode.training.multiple_shooting import shooting_groups, shooting_losses
    >>> ts = jnp.linspace(0.0, 2.0, 11)
    >>> groups = shooting_groups(jnp.exp(-ts)[:, None], ts, group_size=5)
    >>> def loss(p, batch, key):
    ...     prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 2.0), p)
    ...     return shooting_losses(prob, batch)
    >>> print(loss(1.5, groups, None).round(2))
    [14.88  6.67  0.  ]
    """
    of_solve = (alg, ensemblealg, loss, continuity_loss, solve_options)
    return _shoot(prob, groups, continuity_weight, *of_solve)[0]


def _shoot(prob, groups, weight, alg, ensemblealg, loss, continuity_loss, solve_options) -> tuple:
    """The data part and the continuity part of the loss of each group (infinite where it failed),
    its states, and its return code."""
    if not is_tracer(weight) and not 0 <= weight < np.inf:
        raise ValueError(f"continuity_weight must be zero or positive, and finite; got {weight!r}.")
    for name in ("trajectories", *SAVING, "store"):
        if name in solve_options:
            raise TypeError(
                f"{name} is no option of multiple shooting: what is solved and saved follows from "
                "ts and group_size."
            )
    whole = remake(prob, save_idxs=None)
    ens, saveat, valid = _ensemble(whole, groups, isinstance(ensemblealg, EnsembleColumns))
    options = {**solve_options, "trajectories": groups.ts.shape[0], "saveat": saveat}
    sim = solve(ens, alg, ensemblealg, **options)
    u, retcode = jnp.asarray(sim.u), jnp.asarray(sim.retcode)
    ok = valid & reached_end(retcode)
    # Neither the NaN of a group that failed nor padding may get into the gradient.
    counted = groups.counted & ok[:, None]
    points = jax.vmap(jax.vmap(lambda *states: jnp.sum(loss(*states))))(
        jnp.where(_like(counted, u), u, groups.data), groups.data
    )
    linked = groups.has_next & ok
    gaps = jax.vmap(lambda *states: jnp.sum(continuity_loss(*states)))(
        jnp.where(_like(linked, groups.target), u[:, -1], groups.target), groups.target
    )
    points, gaps = jnp.sum(jnp.where(counted, points, 0), axis=1), jnp.where(linked, gaps, 0)
    failure = jnp.where(valid, jnp.inf, jnp.nan).astype(points.dtype)
    losses = points + jnp.asarray(weight, points.dtype) * gaps, points, gaps
    u = jnp.where(_like(groups.inside, u), u, jnp.nan)
    return *(jnp.where(ok, x, failure) for x in losses), u, retcode


def _ensemble(prob: ODEProblem, groups: ShootingGroups, columns: bool) -> tuple:
    """The ensemble of the groups, its `saveat`, and a mask of the groups for which it is right."""
    ts, u0s = jnp.asarray(groups.ts), jnp.asarray(groups.u0)
    if not columns:

        def group(prob, ctx):
            span = (ts[ctx.index, 0], ts[ctx.index, -1])
            return remake(prob, u0=u0s[ctx.index], tspan=span)

        return EnsembleProblem(prob, group), groups.ts, jnp.ones(ts.shape[0], bool)

    # Columns share their time, so the time of each is counted from its own start.
    def since_start(u, p, t):
        p, start = p
        return prob.f(u, p, start + t)

    def column(prob, ctx):
        return remake(prob, u0=u0s[ctx.index], p=(prob.p[0], ts[ctx.index, 0]))

    times, valid = _shared_times(groups.ts)
    f = with_mass_of(since_start, prob.f)
    shifted = remake(prob, f=f, p=(prob.p, ts[0, 0]), tspan=(0.0, times[-1]))
    return EnsembleProblem(shifted, column), times, valid


def _shared_times(ts: Array | np.ndarray) -> tuple:
    """The times after the start `[time]`, and a mask of the groups that have these times; all
    groups have them where the times are known."""
    known = not is_tracer(ts)
    xp: ModuleType = np if known else jnp
    ts = xp.asarray(ts)
    since = ts - ts[:, :1]
    rounding = 16 * jnp.finfo(ts.dtype).eps * xp.max(xp.abs(ts))
    alike = xp.all(xp.abs(since - since[:1]) <= rounding, axis=1)
    if known and not alike.all():
        other = int(np.argmin(alike))
        raise ValueError(
            "EnsembleColumns solves all groups with the same steps, so they must be measured at "
            f"the same times after their start; group {other} is not. Choose, of data evenly "
            "spaced, a group_size that leaves no shorter group at the end (the number of points "
            "less one is a multiple of group_size - 1); or use EnsembleThreads() or "
            "EnsembleGPUArray()."
        )
    return since[0], jnp.asarray(alike)


def _like(mask: Array, x: Array) -> Array:
    """The mask with additional axes, so that it has as many as `x`."""
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x.shape)


def _groups(data: Any, ts: Any, group_size: Any, starts: Any, *, several: bool) -> ShootingGroups:
    """The groups of data `[trajectory, time, *state]` (without `several`, `[time, *state]`)."""
    # Known times stay in NumPy, so that they are known inside of a trace, too.
    ts = _as_times(ts, data, several)
    if not several:
        data, ts = data[None], ts[None]
    n = data.shape[1]
    if isinstance(group_size, bool) or not isinstance(group_size, int | np.integer):
        raise TypeError(f"group_size must be an integer, got {group_size!r}.")
    if not 2 <= group_size <= n:
        raise ValueError(
            f"group_size must be from 2 to the number of points, {n}; got {group_size}."
        )
    first = np.arange(0, n - 1, group_size - 1)
    index = first[:, None] + np.arange(group_size)
    inside, index = index < n, np.minimum(index, n - 1)
    counted = inside.copy()
    counted[1:, 0] = False
    has_next = np.arange(len(first)) < len(first) - 1
    pieces = data[:, index]  # [trajectory, group, time, *state]
    u0, target = pieces[:, :, 0], pieces[:, :, -1]
    if starts is not None:
        u0 = _as_starts(starts, u0, several)
        target = jnp.concatenate([u0[:, 1:], target[:, -1:]], axis=1)
    masks = (np.broadcast_to(x, (len(data), *x.shape)) for x in (inside, counted, has_next))
    inside, counted, has_next = masks
    groups = ShootingGroups(ts[:, index], pieces, inside, counted, u0, target, has_next)
    groups = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), groups)
    return jax.tree.map(jnp.asarray, groups)._replace(ts=groups.ts)


def _as_data(data: PyTree, state: tuple, dtype: DTypeLike) -> Array | np.ndarray | None:
    """The data as `[time, *state]` or `[trajectory, time, *state]`, checked to be finite."""
    data = as_numbers("data", data)
    axes = data.ndim - len(state)
    if axes not in (1, 2) or data.shape[axes:] != state or 0 in data.shape:
        raise ValueError(
            f"data must be [time, *state] or [trajectory, time, *state], with the shape of a state "
            f"as in prob.u0, {state}; its shape is {data.shape}."
        )
    how = "leave such times out, or fill them in (eo.collocate_data estimates values at any time)"
    check_finite("data has a value", data, how)
    return _cast("data", data, dtype)


def _as_starts(starts: Any, u0: PyTree, several: bool) -> PyTree:
    starts = _cast("starts", as_numbers("starts", starts), u0.dtype)
    needed = u0.shape if several else u0.shape[1:]
    if starts.shape != needed:
        axes = "[trajectory, group, *state]" if several else "[group, *state]"
        raise ValueError(f"starts must be {axes}, {needed}; its shape is {starts.shape}.")
    return starts.reshape(u0.shape)


def _cast(name: str, states: Any, dtype: DTypeLike) -> Any:
    if jnp.iscomplexobj(states) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} is complex and the state is not ({dtype}): give prob a complex u0."
        )
    return states.astype(dtype)


def _as_times(ts: Any, data: Array | np.ndarray, several: bool) -> Array | np.ndarray | None:
    """The times as `[time]`, or for `several` trajectories `[trajectory, time]`, in the precision
    of the state."""
    dtype = time_dtype_of(data)
    try:
        ts = ts.astype(dtype) if is_tracer(ts) else np.asarray(ts).astype(dtype)
    except (TypeError, ValueError) as e:
        raise TypeError(f"ts must be an array of times, got {ts!r}.") from e
    points = data.shape[: 1 + several]
    if ts.shape not in (points, points[-1:]):
        which = f"{points[-1:]} or {points}" if several else f"{points}"
        raise ValueError(
            f"ts must have a time for each point of data, {which}; its shape is {ts.shape}."
        )
    if not is_tracer(ts):
        if not np.isfinite(ts).all():
            raise ValueError(f"ts must be finite, got {ts}.")
        stops = np.argwhere(~(np.diff(ts) > 0))
        if len(stops):
            raise ValueError(
                f"ts must increase from each time to the next (as {dtype} numbers); at index "
                f"{stops[0][-1] + 1} it doesn't: {ts[tuple(stops[0])]} comes before."
            )
        return np.broadcast_to(ts, points)
    return jnp.broadcast_to(ts, points)
