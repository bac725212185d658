"""Statistics over the trajectories of an ensemble at steps and times, under the names of SciML's
EnsembleAnalysis. They are the statistics of `componentwise.py`, and also jittable and
differentiable.

For a state that is a pytree, `*state` is a single axis: its components, flattened in the order in
which they were written.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.state_tree import flattened
from ..solution.solution import AnyArray, EnsembleSolution
from ..tracing.program import is_tracer
from .componentwise import (
    componentwise_mean,
    componentwise_meancor,
    componentwise_meancov,
    componentwise_meanvar,
    componentwise_median,
    componentwise_quantile,
    componentwise_weighted_meancov,
    in_own_precision,
    meancor,
    meancov,
)


@in_own_precision
def get_timestep(sim: EnsembleSolution, i: Any) -> AnyArray:
    """The states at step `i`: `[trajectory, *state]`.

    `i` counts the saved times from 0; a slice gives `[trajectory, time, *state]`. Where
    trajectories have their own times (`save_everystep`), step i is at a different time for each
    trajectory; use the functions of a time (`timepoint_...`) there.

    **Raises:** `IndexError` for a step that doesn't exist; `TypeError` where an `output_func` or a
    `reduction` replaced the states.
    """
    u = states_of(sim)
    rows = u.shape[1]
    if not is_tracer(i) and not isinstance(i, slice):
        i = np.asarray(i)
        outside = i.dtype != bool and i[(i < -rows) | (i >= rows)]
        if np.size(outside):  # JAX would take the last step instead
            raise IndexError(f"step {outside.flat[0]} of {rows}")
    return u[:, i] if isinstance(i, slice) or i.dtype == bool else _steps(u, i)


def componentwise_vectors_timestep(sim: EnsembleSolution, i: Any) -> AnyArray:
    """The states at step `i`, for each component a vector: `[*state, trajectory]`."""
    return jnp.moveaxis(jnp.asarray(get_timestep(sim, i)), 0, -1)


def timestep_mean(sim: EnsembleSolution, i: Any) -> AnyArray:
    """The mean of each component at step `i`: `[*state]`."""
    return componentwise_mean(get_timestep(sim, i))


def timestep_median(sim: EnsembleSolution, i: Any) -> AnyArray:
    """The median of each component at step `i`: `[*state]`."""
    return componentwise_median(get_timestep(sim, i))


def timestep_quantile(sim: EnsembleSolution, q: Any, i: Any) -> AnyArray:
    """The quantile `q` of each component at step `i`: `[*state]`, or `[n, *state]` of `q [n]`."""
    return componentwise_quantile(get_timestep(sim, i), q)


def timestep_meanvar(sim: EnsembleSolution, i: Any) -> tuple:
    """The mean and the variance of each component at step `i`: `[*state]` each."""
    return componentwise_meanvar(get_timestep(sim, i))


def timestep_meancov(sim: EnsembleSolution, i: Any, j: Any) -> tuple:
    """The means of each component at steps `i` and `j`, and the covariance: `[*state]` each."""
    return componentwise_meancov(get_timestep(sim, i), get_timestep(sim, j))


def timestep_meancor(sim: EnsembleSolution, i: Any, j: Any) -> tuple:
    """The means of each component at steps `i` and `j`, and the correlation: `[*state]` each."""
    return componentwise_meancor(get_timestep(sim, i), get_timestep(sim, j))


def timestep_weighted_meancov(
    sim: EnsembleSolution, W: np.ndarray, i: Any, j: Any, weight_type: str = "reliability"
) -> tuple:
    """The weighted means of each component at the steps `i` and `j`, and the weighted covariance:
    `[*state]` each. `W` and `weight_type`:
    [`componentwise_weighted_meancov`][ensembleode.analysis.componentwise_weighted_meancov]."""
    return componentwise_weighted_meancov(
        get_timestep(sim, i), get_timestep(sim, j), W, weight_type
    )


def timeseries_steps_mean(sim: EnsembleSolution) -> AnyArray:
    """The mean of each component at each step: `[time, *state]`."""
    return componentwise_mean(states_of(sim))


def timeseries_steps_median(sim: EnsembleSolution) -> AnyArray:
    """The median of each component at each step: `[time, *state]`."""
    return componentwise_median(states_of(sim))


def timeseries_steps_quantile(sim: EnsembleSolution, q: Any) -> AnyArray:
    """The quantile `q` of each component at each step: `[time, *state]`, or `[n, time, *state]`
    of `q [n]`."""
    return componentwise_quantile(states_of(sim), q)


def timeseries_steps_meanvar(sim: EnsembleSolution) -> tuple:
    """The mean and the variance of each component at each step: `[time, *state]` each.

    >>> import ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: 0 * u + p, [0.0], (0.0, 1.0), 1.0)
    >>> ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=1.0 * ctx.index))
    >>> sim = eo.solve(ens, trajectories=3, saveat=0.5)
    >>> mean, variance = eo.analysis.timeseries_steps_meanvar(sim)
    >>> mean[:, 0].round(4).tolist(), variance[:, 0].round(4).tolist()
    ([0.0, 0.5, 1.0], [0.0, 0.25, 1.0])
    """
    return componentwise_meanvar(states_of(sim))


def timeseries_steps_meancov(sim: EnsembleSolution) -> tuple:
    """The means of each component at steps i and j and the covariance: `[i, j, *state]` each."""
    return _of_pairs(meancov, states_of(sim), states_of(sim))


def timeseries_steps_meancor(sim: EnsembleSolution) -> tuple:
    """The means of each component at steps i and j and the correlation: `[i, j, *state]` each."""
    return _of_pairs(meancor, states_of(sim), states_of(sim))


def timeseries_steps_weighted_meancov(
    sim: EnsembleSolution, W: np.ndarray, weight_type: str = "reliability"
) -> tuple:
    """The weighted means of each component at the steps i and j and the weighted covariance, for
    all pairs: `[i, j, *state]` each. `W`: the weights `[trajectory]`; `weight_type`:
    [`componentwise_weighted_meancov`][ensembleode.analysis.componentwise_weighted_meancov]."""
    return _of_pairs(_weighted(weight_type), states_of(sim), states_of(sim), _as_given(W))


@in_own_precision
def get_timepoint(sim: EnsembleSolution, t: ArrayLike) -> AnyArray:
    """The states at the time `t`: `[trajectory, *state]`; at times `[n]`,
    `[trajectory, n, *state]`.

    The states are interpolated: by the method after `save_everystep=True` (`sim(t)`), otherwise
    linearly between the saved times (at which they are exact). They are NaN outside of what was
    reached.

    **Raises:** `TypeError` where an `output_func` or a `reduction` replaced the states.
    """
    u = states_of(sim)
    if sim._dense is not None:
        return flattened(sim(t), 1 + np.ndim(t), sim._order)
    ts = jnp.asarray(sim.t)
    return _between(ts, u, jnp.asarray(t, ts.dtype))


def componentwise_vectors_timepoint(sim: EnsembleSolution, t: Any) -> AnyArray:
    """The states at the time `t`, for each component a vector: `[*state, trajectory]`."""
    return jnp.moveaxis(jnp.asarray(get_timepoint(sim, t)), 0, -1)


def timepoint_mean(sim: EnsembleSolution, t: Any) -> AnyArray:
    """The mean of each component at the time `t`: `[*state]`."""
    return componentwise_mean(get_timepoint(sim, t))


def timepoint_median(sim: EnsembleSolution, t: Any) -> AnyArray:
    """The median of each component at the time `t`: `[*state]`."""
    return componentwise_median(get_timepoint(sim, t))


def timepoint_quantile(sim: EnsembleSolution, q: Any, t: Any) -> AnyArray:
    """The quantile `q` of each component at the time `t`: `[*state]`; of `q [n]`, `[n, *state]`."""
    return componentwise_quantile(get_timepoint(sim, t), q)


def timepoint_meanvar(sim: EnsembleSolution, t: Any) -> tuple:
    """The mean and the variance of each component at the time `t`: `[*state]` each."""
    return componentwise_meanvar(get_timepoint(sim, t))


def timepoint_meancov(sim: EnsembleSolution, t1: Any, t2: Any) -> tuple:
    """The means of each component at times `t1` and `t2`, and the covariance: `[*state]` each."""
    return componentwise_meancov(get_timepoint(sim, t1), get_timepoint(sim, t2))


def timepoint_meancor(sim: EnsembleSolution, t1: Any, t2: Any) -> tuple:
    """The means of each component at times `t1` and `t2`, and the correlation: `[*state]` each."""
    return componentwise_meancor(get_timepoint(sim, t1), get_timepoint(sim, t2))


def timepoint_weighted_meancov(
    sim: EnsembleSolution, W: np.ndarray, t1: Any, t2: Any, weight_type: str = "reliability"
) -> tuple:
    """The weighted means of each component at the times `t1` and `t2`, and the weighted
    covariance: `[*state]` each. `W` and `weight_type`:
    [`componentwise_weighted_meancov`][ensembleode.analysis.componentwise_weighted_meancov]."""
    return componentwise_weighted_meancov(
        get_timepoint(sim, t1), get_timepoint(sim, t2), W, weight_type
    )


def timeseries_point_mean(sim: EnsembleSolution, ts: ArrayLike) -> AnyArray:
    """The mean of each component at the times `ts`: `[time, *state]`."""
    return componentwise_mean(get_timepoint(sim, _times(ts)))


def timeseries_point_median(sim: EnsembleSolution, ts: Any) -> AnyArray:
    """The median of each component at the times `ts`: `[time, *state]`."""
    return componentwise_median(get_timepoint(sim, _times(ts)))


def timeseries_point_quantile(sim: EnsembleSolution, q: Any, ts: PyTree) -> AnyArray:
    """The quantile `q` of each component at the times `ts`: `[time, *state]`, or
    `[n, time, *state]` of `q [n]`."""
    return componentwise_quantile(get_timepoint(sim, _times(ts)), q)


def timeseries_point_meanvar(sim: EnsembleSolution, ts: Array) -> tuple:
    """The mean and the variance of each component at the times `ts`: `[time, *state]` each."""
    return componentwise_meanvar(get_timepoint(sim, _times(ts)))


def timeseries_point_meancov(sim: EnsembleSolution, ts1: Any, ts2: Any = None) -> tuple:
    """The means of each component at the times `ts1[i]` and `ts2[j]` and the covariance, for all
    pairs: `[i, j, *state]` each. With `ts1` only: between all of its times but the last, and all
    but the first (as in SciML)."""
    return _of_pairs(meancov, *_at_both_times(sim, ts1, ts2))


def timeseries_point_meancor(sim: EnsembleSolution, ts1: Any, ts2: Any = None) -> tuple:
    """The means of each component at the times `ts1[i]` and `ts2[j]` and the correlation, for all
    pairs: `[i, j, *state]` each. With `ts1` only: between all of its times but the last, and all
    but the first (as in SciML)."""
    return _of_pairs(meancor, *_at_both_times(sim, ts1, ts2))


def timeseries_point_weighted_meancov(
    sim: EnsembleSolution, W: Any, ts1: Any, ts2: Any = None, weight_type: str = "reliability"
) -> tuple:
    """The weighted means of each component at the times `ts1[i]` and `ts2[j]` and the weighted
    covariance, for all pairs: `[i, j, *state]` each. With `ts1` only: between all of its times but
    the last, and all but the first (as in SciML). `W`: the weights `[trajectory]`; `weight_type`:
    [`componentwise_weighted_meancov`][ensembleode.analysis.componentwise_weighted_meancov]."""
    return _of_pairs(_weighted(weight_type), *_at_both_times(sim, ts1, ts2), _as_given(W))


@in_own_precision
def states_of(sim: EnsembleSolution) -> Array | None:
    if sim.kind != "trajectories":
        raise TypeError(
            f"this ensemble has {sim.kind} in place of its states. Use the componentwise_... "
            "functions on arrays with the trajectory first, such as sim.u."
        )
    if np.ndim(sim.retcode) != 1:
        raise TypeError(
            "these are many ensembles in one, as vmap makes them: take the statistics within "
            "vmap, or pick one with jax.tree.map(lambda x: x[i], sim)."
        )
    return jnp.asarray(flattened(sim.u, 2, sim._order))  # what is on disk is read


def _as_given(x: PyTree) -> np.ndarray:
    """`x` as an array of its own precision, which JAX may not have enabled."""
    return x if is_tracer(x) else np.asarray(x)


def _times(ts: PyTree) -> np.ndarray | None:
    ts = _as_given(ts)
    if ts.ndim != 1:
        raise ValueError(f"the times must be an array [n], got the shape {ts.shape}.")
    return ts


def _at_both_times(sim: EnsembleSolution, ts1: Any, ts2: Any) -> tuple:
    ts1 = _times(ts1)
    ts1, ts2 = (ts1[:-1], ts1[1:]) if ts2 is None else (ts1, _times(ts2))
    return get_timepoint(sim, ts1), get_timepoint(sim, ts2)


@functools.cache  # so that compiled code for it is found again
def _weighted(weight_type: str) -> Callable:
    return functools.partial(componentwise_weighted_meancov, weight_type=weight_type)


@in_own_precision
@functools.partial(jax.jit, static_argnums=0)
def _of_pairs(statistic: Any, a: Array, b: Array, *weights: Any) -> tuple:
    """The statistic of all pairs of `a [trajectory, i, ...]` and `b [trajectory, j, ...]`:
    `[i, j, ...]`."""
    rows = jax.vmap(lambda x, y: statistic(x, y, *weights), in_axes=(None, 1))
    # One pair after another: all at once would take the square of the ensemble's memory.
    return jax.lax.map(lambda x: rows(x, b), jnp.moveaxis(a, 1, 0))


_steps = jax.jit(lambda u, i: u[:, i])


@jax.jit
def _between(ts: Array, us: Array, t: Array) -> Array:
    """The states at the time `t`, of trajectories `us` whose times `ts` are their own or shared."""
    return jax.vmap(_linear, in_axes=(0 if ts.ndim == 2 else None, 0, None))(ts, us, t)


def _linear(ts: Array, us: Array, t: Array) -> Array:
    """The piecewise linear function through `us` at `ts`; NaN next to a time that was not
    reached."""
    sign = jnp.where(jnp.any(ts < ts[0]), -1, 1).astype(ts.dtype)
    ordered = jnp.where(jnp.isnan(ts), jnp.inf, ts * sign)

    def at(t):
        right = jnp.clip(jnp.searchsorted(ordered, t * sign), 0, ts.shape[0] - 1)
        left = jnp.maximum(right - 1, 0)
        # NaN would spread to the gradient, even if it is masked later; zeros take its place.
        there = jnp.isfinite(ordered[right]) & ~jnp.any(jnp.isnan(us[left] + us[right]))
        inside = (left != right) & (t * sign > ordered[0]) & (t * sign < ordered[right]) & there
        t0, t1 = jnp.where(inside, ts[left], 0), jnp.where(inside, ts[right], 1)
        u0, u1 = jnp.where(inside, us[left], 0), jnp.where(inside, us[right], 0)
        between = u0 + (jnp.where(inside, t, 0) - t0) / (t1 - t0) * (u1 - u0)
        other = jnp.where(t == ts[right], us[right], jnp.nan)
        return jnp.where(inside, between, other)

    return jax.vmap(at)(t) if t.ndim else at(t)
