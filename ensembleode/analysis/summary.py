"""EnsembleSummary: mean, variance and quantiles of an ensemble over time."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Inexact, Int, PyTree, Real

from ..ground.retcode import ReturnCodes, was_ended
from ..ground.state_tree import components_of, flattened
from ..problem.callbacks import all_of
from ..problem.ensemble import EnsembleAlgorithm
from ..problem.problem import EnsembleProblem
from ..solution.solution import AnyArray, EnsembleSolution
from ..tracing.program import is_tracer
from .componentwise import (
    check_ordered,
    componentwise_meanvar,
    componentwise_quantile,
    own_precision,
)
from .digest import Digest
from .over_time import get_timepoint, states_of


class EnsembleSummary(eqx.Module):
    """The mean, the variance and quantiles of the states of an ensemble, at each time.

    The statistics are over the `num_monte` trajectories that reached the time. A trajectory that
    failed counts as long as it went well, and one that a callback ended counts until then. (After
    that their states are NaN, which doesn't count. Where all trajectories have ended, the summary
    is NaN. For the last states of all, return them by an `output_func`.)

    - `t`: the times, `[time]`.
    - `u`, `v`: the mean and the (unbiased) variance, `[time, *state]`.
    - `med`, `qlow`, `qhigh`: the median and the two quantiles, `[time, *state]`; with several pairs
        of quantiles, `qlow` and `qhigh` are `[band, time, *state]`.
    - `num_monte`: `[time]`.
    - `num_events`: with callbacks, the number of events of all trajectories; else None.
    - `num_terminated`: the number of trajectories that a callback ended.
    - `quantiles`: the levels of `qlow` and `qhigh`.
    - `names`: for a state that is a pytree, the names of its components, flattened in the order in
        which they were written; else None. `summary["I"]` is the summary of the component (or the
        leaf) of that name.

    **Arguments:**

    - `sim`: an [`EnsembleSolution`][ensembleode.EnsembleSolution].
    - `ts`: the times `[time]`, at which `sim` is interpolated (see
        [`get_timepoint`][ensembleode.analysis.get_timepoint]). By default the saved times; where
        trajectories have their own times, those of the trajectory that came furthest, and of these
        the one with most steps.
    - `quantiles`: the lower and the upper level; or several such pairs, each for a band, such as
        `[(0.05, 0.95), (0.25, 0.75)]`.

    The summary is computed in the precision of `sim`. So a store of float64 is summarised in
    float64 even where JAX's `jax_enable_x64` is off. It can be computed under `jit`. For ensembles
    that don't fit in memory, see [`summarize`][ensembleode.analysis.summarize].

    **Raises:** `TypeError` for complex states, or where an `output_func` or a `reduction` replaced
    the states; `ValueError` for quantiles that are no pairs of numbers from 0 to 1, and for an
    unknown name.

    >>> import ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), 1.0)
    >>> ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=ctx.index / 100))
    >>> summary = eo.EnsembleSummary(eo.solve(ens, trajectories=101, saveat=0.5))
    >>> [f"{x:.3f}" for x in summary.med[:, 0]]  # exp(-t / 2)
    ['1.000', '0.779', '0.607']
    """

    t: Real[AnyArray, " time"]
    u: Inexact[AnyArray, " time *state"]
    v: Inexact[AnyArray, " time *state"]
    med: Inexact[AnyArray, " time *state"]
    num_monte: Int[AnyArray, " time"]
    num_events: Any
    num_terminated: Any
    quantiles: tuple = eqx.field(static=True)
    names: tuple[str, ...] | None = eqx.field(static=True)
    _low: Any  # [band, time, *state]
    _high: Any  # [band, time, *state]

    def __init__(
        self, sim: Any, ts: Array | list[float] | None = None, quantiles: Any = (0.05, 0.95)
    ):
        self.quantiles = _as_quantiles(quantiles)
        if isinstance(sim, _SummaryFields):
            self.t, numbers, self.names, (self.num_events, self.num_terminated) = sim
        else:
            with own_precision(sim):
                self.t, u = _states_at(sim, ts)
                numbers = _statistics(u, _levels(self.quantiles))
            self.names = sim.names
            events = None if sim.events is None else sim.events.count
            self.num_events, self.num_terminated = _ended(events, sim.retcode)
        self.u, self.v, self._low, self.med, self._high, self.num_monte = numbers

    @property
    def qlow(self) -> Inexact[AnyArray, "..."]:
        return self._low if self._has_several_bands else self._low[0]

    @property
    def qhigh(self) -> Inexact[AnyArray, "..."]:
        return self._high if self._has_several_bands else self._high[0]

    @property
    def _has_several_bands(self) -> bool:
        return isinstance(self.quantiles[0], tuple)

    @property
    def _bands(self) -> tuple[tuple[float, float], ...]:
        return self.quantiles if self._has_several_bands else (self.quantiles,)

    def __len__(self) -> int:
        return np.shape(self.t)[0]

    def __getitem__(self, name: str) -> "EnsembleSummary":
        """The summary of the component, or of the leaf, with this name."""
        if self.names is None or not isinstance(name, str):
            raise TypeError(
                "a summary is indexed by the names of the components of a state that is a pytree "
                f"(such as a dict), got {name!r}; of an array, index summary.u, summary.med, ..."
            )
        at = components_of(name, self.names)
        part = at[0] if self.names[at[0]] == name else np.asarray(at)
        several: tuple = (self.u, self.v, self._low, self.med, self._high)
        numbers = _SummaryNumbers(*(x[..., part] for x in several), self.num_monte)
        names = tuple(self.names[i] for i in at)
        made = _SummaryFields(self.t, numbers, names, (self.num_events, self.num_terminated))
        return EnsembleSummary(made, quantiles=self.quantiles)

    def __repr__(self) -> str:
        shape = np.shape(self.u)
        if is_tracer(self.u) or not eqx.is_array_like(self.u) or np.ndim(self.t) != 1:
            return f"EnsembleSummary(u={shape}, traced or mapped)"
        counts = np.asarray(self.num_monte)
        few, many = int(counts.min()), int(counts.max())
        n = f"{many}" if few == many else f"{few} to {many}"
        t = np.asarray(self.t)
        bands = ", ".join(f"{low:g} to {high:g}" for low, high in self._bands)
        lines = [
            f"EnsembleSummary: {n} trajectories, {shape[0]} times, state {shape[1:]}",
            f"  t          {t[0]:g} to {t[-1]:g}",
            f"  quantiles  {bands}",
        ]
        if self.num_events is not None:
            ended = f", which ended {self.num_terminated} trajectories" * bool(self.num_terminated)
            lines.append(f"  events     {self.num_events}{ended}")
        return "\n".join(lines)

    def plot(
        self,
        idxs: Any = None,
        *,
        ci_type: str = "quantile",
        error_style: str = "ribbon",
        names: Any = None,
        units: Mapping[str, Any] | None = None,
        ax: Any = None,
        **line: Any,
    ) -> Any:
        """Draw the summary over time (with matplotlib, the extra `plot`).

        **Arguments:**

        - `idxs`: the components of the flattened state, by number from 0 or by name: one, a list,
            or a tuple of two or three for a path in phase space (without a ribbon). By default all,
            over time.
        - `ci_type`: `"quantile"`, the median between the two quantiles (of each band); or `"SEM"`,
            the mean with 1.96 of its standard errors, `sqrt(v / num_monte)`.
        - `error_style`: `"ribbon"`, `"bars"` or `"none"`.
        - `names`: names for the components of the flattened state.
        - `units`: see [`EnsembleSolution.plot`][ensembleode.EnsembleSolution.plot].
        - `ax`: the Axes to draw in, by default new ones.
        - `line`: passed on to the lines (`lw`, `ls`, `label`, ...).

        **Returns:** the matplotlib Axes.

        **Raises:** `ValueError` and `TypeError` for bad arguments; `ImportError` without
        matplotlib.
        """
        from .plotting import plot_summary

        return plot_summary(self, idxs, ci_type, error_style, names, units, ax, line)

    def to_xarray(self, names: Any = None) -> Any:
        """An `xarray.Dataset` of `mean`, `variance`, `median`, `qlow`, `qhigh` over time and state,
        and `num_monte` over time. `names`: names for the components."""
        from ..solution import labelled

        return labelled.summary_dataset(self, names)


def _states_at(sim: EnsembleSolution, ts: Array | list[float] | None) -> tuple:
    """The times of a summary, and the states at these times: `[trajectory, time, *state]`."""
    if not isinstance(sim, EnsembleSolution):
        raise TypeError(f"EnsembleSummary takes an EnsembleSolution, got {type(sim).__name__}.")
    u = states_of(sim)
    check_ordered(u)
    if ts is None and np.ndim(sim.t) == 1:
        return sim.t, u
    times = jnp.asarray(sim.t)
    if ts is None:
        ts = _times_of_the_furthest(times, jnp.asarray(sim.lengths))
    ts = jnp.asarray(ts, times.dtype)
    if ts.ndim != 1 or not ts.size:
        raise ValueError(f"ts must be an array of times [n], its shape is {ts.shape}.")
    return ts, get_timepoint(sim, ts)


def _times_of_the_furthest(times: Array, lengths: Array) -> Array:
    """The times of the trajectory that came furthest; of several, the one with most times."""
    reach = jnp.nanmax(jnp.abs(times - times[:, :1]), axis=1)
    furthest = reach >= (1 - 1e-6) * jnp.max(reach)
    most = jnp.argmax(jnp.where(furthest, lengths, 0))
    return times[most] if is_tracer(times) else times[most, : int(lengths[most])]


class _SummaryNumbers(NamedTuple):
    """The numbers of a summary: `[time, *state]`; `low` and `high` are `[band, time, *state]`, `n`
    is `[time]`."""

    mean: Any
    variance: Any
    low: Any
    median: Any
    high: Any
    n: Any


class _SummaryFields(NamedTuple):
    """The fields of a summary."""

    t: Any
    numbers: _SummaryNumbers
    names: tuple[str, ...] | None
    ended: tuple[Array, Array]


def _ended(events: Any, retcode: ReturnCodes) -> tuple:
    """The number of events (None where there are no callbacks, or no counts), and the number of
    trajectories that an event ended."""
    ended = was_ended(retcode).sum()
    return None if events is None else events.sum(), ended


def _statistics(u: Any, levels: tuple[float, ...]) -> _SummaryNumbers:
    """The numbers for the states `[trajectory, time, *state]`, with the quantiles of `_levels`."""
    on_host = isinstance(u, np.ndarray)
    if on_host or (not is_tracer(u) and {d.platform for d in u.devices()} == {"cpu"}):
        return _statistics_on_host(np.asarray(u), levels)
    return _statistics_on_device(u, jnp.asarray(levels, u.dtype))


@jax.jit
def _statistics_on_device(u: PyTree, levels: Array) -> _SummaryNumbers:
    mean, variance = componentwise_meanvar(u)
    quantiles = componentwise_quantile(u, levels)
    there = ~jnp.any(jnp.isnan(u), axis=tuple(range(2, u.ndim)))
    return _SummaryNumbers(mean, variance, *_of_levels(quantiles), jnp.sum(there, axis=0))


def _statistics_on_host(u: np.ndarray, levels: tuple[float, ...]) -> _SummaryNumbers:
    """The same as `_statistics` by NumPy, which sorts several times as fast and takes the memory of
    one time."""

    def at(x):
        n, mean, squares = _moments(x)
        ordered = np.sort(x, axis=0)  # NaN last

        def quantile(q):
            rank = q * np.maximum(n - 1, 0)
            below = np.floor(rank).astype(np.intp)[None]
            above = np.minimum(below + 1, np.maximum(n - 1, 0))
            a, b = (np.take_along_axis(ordered, i, axis=0)[0] for i in (below, above))
            return a + (rank - below[0]) * (b - a)

        return n, mean, squares, *map(quantile, levels)

    with np.errstate(over="ignore", invalid="ignore"):
        times = zip(*(at(x) for x in u.swapaxes(0, 1)), strict=True)
        n, mean, squares, *quantiles = map(np.stack, times)
    return _numbers(n, mean, squares, quantiles, u.dtype)


def _moments(x: np.ndarray) -> tuple:
    """For `x [trajectory, ...]`: the count, the mean (zero where there are none), and the sum of
    squared differences from it."""
    there = ~np.isnan(x)
    n = there.sum(axis=0)
    mean = np.where(there, x, 0).sum(axis=0, dtype=np.float64) / np.maximum(n, 1)
    return n, mean, np.where(there, (x - mean) ** 2, 0).sum(axis=0)


def _numbers(
    n: np.ndarray,
    mean: np.ndarray,
    squares: np.ndarray,
    quantiles: list[np.ndarray],
    dtype: DTypeLike,
) -> _SummaryNumbers:
    """The numbers from the moments and the quantiles of `_levels`, `[time, *state]` each."""
    mean = np.where(n > 0, mean, np.nan)
    variance = squares / np.where(n > 1, n - 1, np.nan)
    num_monte = n.reshape(len(n), -1).min(axis=1)
    with np.errstate(over="ignore"):
        of_levels = _of_levels(np.stack(quantiles))
        numbers = [x.astype(dtype) for x in (mean, variance, *of_levels)]
    return _SummaryNumbers(*numbers, num_monte.astype(jax.dtypes.canonicalize_dtype(int)))


def _as_quantiles(quantiles: Any) -> tuple:
    """The quantiles as a pair of floats, or as a tuple of such pairs."""
    try:
        ranks = np.asarray(quantiles, float)
    except (TypeError, ValueError):
        ranks = np.zeros(0)
    if ranks.ndim not in (1, 2) or not ranks.size or ranks.shape[-1] != 2:
        raise ValueError(
            f"quantiles must be a pair of numbers, or a list of such pairs, got {quantiles!r}."
        )
    if not np.all((ranks >= 0) & (ranks <= 1) & (ranks[..., :1] <= ranks[..., 1:])):
        raise ValueError(f"quantiles must be pairs from 0 to 1 in order, got {quantiles!r}.")
    pairs = tuple(map(tuple, np.atleast_2d(ranks).tolist()))
    return pairs if ranks.ndim == 2 else pairs[0]


def _levels(quantiles: tuple) -> tuple[float, ...]:
    """The levels of all quantiles of a summary: the lower ones, the median, the upper ones."""
    low, high = np.atleast_2d(quantiles).T.tolist()
    return (*low, 0.5, *high)


def _of_levels(quantiles: Array | np.ndarray) -> tuple:
    """The lower quantiles, the median and the upper quantiles, from the quantiles
    `[level, ...]`."""
    middle = len(quantiles) // 2
    return quantiles[:middle], quantiles[middle], quantiles[middle + 1 :]


# The bins of the digests; the rank of a median of many trajectories is off by less than 2/bins.
_BINS = 1000


def summarize(
    ens: EnsembleProblem,
    alg: Any = None,
    ensemblealg: EnsembleAlgorithm | None = None,
    *,
    trajectories: int,
    quantiles: Any = (0.05, 0.95),
    **options: Any,
) -> EnsembleSummary:
    """Solve an ensemble and summarise it, batch by batch, in one pass.

    The memory is that of a batch (`batch_size`) and about 100 kB for each time and component,
    however many trajectories there are. Mean and variance are those of
    [`EnsembleSummary`][ensembleode.analysis.EnsembleSummary] up to rounding (batches are combined
    as in Chan, Golub and LeVeque, "Algorithms for computing the sample variance", The American
    Statistician 37, 1983). The quantiles come from t-digests: they are exact up to a few hundred
    trajectories, and beyond that off by at most 0.2% in rank (measured: 0.03% at 100,000).

    **Arguments:** `ens`, `alg`, `ensemblealg`, `trajectories` and the other `options` are those of
    [`solve`][ensembleode.solve]; `quantiles` are those of `EnsembleSummary`. All trajectories must
    be saved at the same times (`saveat`); where their time spans differ, each is saved as far as
    its span goes. With events, the last of these times is left out if no trajectory reached it.

    **Cost:** each batch is sorted on the host, and has an additional cost like that of 2,000
    trajectories, so batches should not be small.

    **Raises:** `ValueError` for an ensemble with an `output_func` or a `reduction`, for one whose
    trajectories have their own times, and inside `jit` (use `EnsembleSummary` of a solution there);
    `TypeError` for complex states.

    >>> import ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), 1.0)
    >>> ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=ctx.index / 10_000))
    >>> summary = eo.analysis.summarize(ens, trajectories=10_001, saveat=1.0, batch_size=1000)
    >>> print(f"{summary.u[-1, 0]:.3f}, {summary.num_monte[-1]}")  # 1 - exp(-1)
    0.632, 10001
    """
    quantiles = _as_quantiles(quantiles)
    if not isinstance(ens, EnsembleProblem):
        raise TypeError(f"summarize takes an EnsembleProblem, got {type(ens).__name__}.")
    for name in ("output_func", "reduction"):
        if getattr(ens, name) is not None:
            raise ValueError(
                f"the ensemble has {name}=, and summarize needs the states: leave it out."
            )
    if options.get("save_everystep", ens.prob.options.get("save_everystep")):
        raise ValueError("summarize needs times that all trajectories share: use saveat.")
    for x in jax.tree.leaves(ens.prob.u0):
        check_ordered(x)
    acts = bool(all_of(options.get("callback", ens.prob.options.get("callback"))))
    names = None

    def of_batch(sol: Any, ctx: Any) -> tuple:
        nonlocal names
        names = sol.names
        return _of_batch(sol, acts), False

    streamed = EnsembleProblem(
        ens.prob,
        ens.prob_func,
        output_func=of_batch,
        reduction=_add_batch,
        u_init=(),
    )
    from ..solving import solve  # which imports this package

    sim: Any = solve(streamed, alg, ensemblealg, trajectories=trajectories, **options)
    ended = _ended(sim.u.events, sim.retcode)
    # (The last row may have been for ends alone.)
    numbers, times = sim.u.statistics(_levels(quantiles)), sim.u.t
    if np.isnan(times[-1]):
        bands = numbers.low[:, :-1], numbers.median[:-1], numbers.high[:, :-1]
        numbers = _SummaryNumbers(numbers.mean[:-1], numbers.variance[:-1], *bands, numbers.n[:-1])
        times = times[:-1]
    made = _SummaryFields(times, numbers, names, ended)
    return EnsembleSummary(made, quantiles=quantiles)


def _of_batch(sol: Any, acts: bool) -> tuple:
    """**Arguments:** `acts`: whether the problem has callbacks, which needn't be recorded."""
    t, u, events = sol.t, flattened(sol.u, 1, sol._order), sol.events
    count = None if events is None else events.count
    if events is None and not acts:
        return t, u, count
    # An end that an event made is not at a time that all trajectories share.
    was_reached = sol.length >= t.size
    t = t.at[-1].set(jnp.where(was_reached, t[-1], jnp.nan))
    return t, u.at[-1].set(jnp.where(was_reached, u[-1], jnp.nan)), count


def _add_batch(stream: Any, data: tuple, indices: np.ndarray) -> tuple:
    if any(map(is_tracer, data)):
        raise ValueError(
            "summarize works outside of jit, grad and vmap, where batches are joined on the host; "
            "inside, use EnsembleSummary(solve(...))."
        )
    t, u, events = jax.tree.map(np.asarray, data)
    stream = stream or _Stream.empty(t, u)
    if events is not None:
        stream = stream._replace(events=(stream.events or 0) + events.sum())
    return stream.add(t, u), False


class _Stream(NamedTuple):
    """The numbers of all batches so far: `[time, *state]`, except for `t [time]` and the digest of
    the columns."""

    t: np.ndarray
    n: np.ndarray
    mean: np.ndarray
    squares: np.ndarray  # the sum of squared differences from the mean
    digest: Digest
    dtype: DTypeLike
    events: Any = None

    @classmethod
    def empty(cls, t: np.ndarray, u: np.ndarray) -> "_Stream":
        zeros = np.zeros(u.shape[1:])
        digest = Digest.empty(zeros.size, _BINS)
        return cls(np.full(t.shape[1:], np.nan, t.dtype), zeros, zeros, zeros, digest, u.dtype)

    def add(self, t: np.ndarray, u: np.ndarray) -> "_Stream":
        # Where trajectories have their own times, those that are not reached are NaN.
        times = np.fmax(self.t, np.fmax.reduce(t, axis=0))
        if not all(np.all((x == times) | np.isnan(x)) for x in (t, self.t)):
            raise ValueError(
                "summarize needs times that all trajectories share; these have their own. Give "
                "all the same saveat, or use EnsembleSummary(sim, ts), which interpolates."
            )
        n, mean, squares = _moments(u)
        total = self.n + n
        shift, share = mean - self.mean, n / np.maximum(total, 1)
        return self._replace(
            t=times,
            n=total,
            mean=self.mean + shift * share,
            squares=self.squares + squares + shift**2 * self.n * share,
            digest=self.digest.add(u.reshape(len(u), -1)),
        )

    def statistics(self, levels: tuple[float, ...]) -> _SummaryNumbers:
        there = [self.digest.quantile(q).reshape(self.mean.shape) for q in levels]
        return _numbers(self.n, self.mean, self.squares, there, self.dtype)
