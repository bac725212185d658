"""The results of a solve."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TYPE_CHECKING, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Inexact, Int, PyTree, Real

from ..ground.hidden_object import HiddenObject
from ..ground.on_disk import OnDisk
from ..ground.retcode import (
    has_failed,
    is_successful,
    ReturnCode as ReturnCode,
    ReturnCodes,
    was_ended,
)
from ..ground.state_tree import component_names, flattened
from ..problem.saving_callback import Saved
from ..problem.unknown_options import missing_of_solution
from ..tracing.program import is_tracer
from .dense import Dense, kept, RemadeSteps, states_at
from .events import cut, End, end_of, Events, first_events, with_end
from .stats import Stats
from .text import text_of_ensemble, text_of_solution


# The arrays of a solution are JAX's, except for return codes, counts, and arrays read from a store.
AnyArray: TypeAlias = Array | np.ndarray | np.generic


class EnsembleError(RuntimeError):
    """Raised with `throw=True` when trajectories failed; `solution` holds what was computed."""

    def __init__(self, message: str, solution: Any = None):
        super().__init__(message)
        self.solution = solution


class EngineChoice(NamedTuple):
    """Which engine ran, and why; its solver, and its adjoint for gradients; and the preferred
    engines that did not run, each with the reason."""

    name: str
    reason: str
    solver: str = ""
    sensealg: str = ""
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


class _Solution(eqx.Module):
    """The common part of solutions: errors that name the right attribute for one of another
    library, pickling without programs, which can't be pickled, and names of components."""

    if not TYPE_CHECKING:  # type checkers would believe that every attribute exists

        def __getattr__(self, name):
            raise missing_of_solution(self, name)

        def __getstate__(self):
            state = dict(vars(self))
            if isinstance(self._dense, RemadeSteps):
                several = isinstance(self, EnsembleSolution)
                lengths = self.lengths if several else self.length
                state["_dense"] = kept(self._dense, self.t, self.u, lengths, several=several)
            given = self._given.content
            state["_given"] = HiddenObject(given and given.portable())
            return state

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the saved components, in the order in which they are flattened: those that
        `save_idxs` chose, or all of a state that is a pytree. None for an array with all of its
        components, and for outputs."""
        sol: Any = self
        several = isinstance(sol, EnsembleSolution)
        if several and sol.kind != "trajectories":
            return None
        return sol._names or component_names(sol.u, 1 + several, sol._order)

    @property
    def u0(self) -> PyTree:
        """The initial state, in the structure of the state; for an ensemble those of all
        trajectories, `[trajectory, ...]`.

        **Raises:** the same error as `p`.
        """
        return self._known_inputs().u0

    @property
    def p(self) -> PyTree:
        """The parameters, in the structure of the problem's `p`; for an ensemble those of all
        trajectories, with numbers as `[trajectory, ...]`. They are computed again when they are
        asked for. A value that all trajectories share is in memory once, as a broadcast view.

        **Raises:** `ValueError` for a solution that doesn't know them: one that JAX has taken apart
        (because it was returned from `jit`, or mapped over), one inside of `output_func`, and that
        of an ensemble whose `output_func` may ask for reruns.
        """
        return self._known_inputs().p

    def _known_inputs(self) -> Any:
        given = vars(self)["_given"].content
        if given is None:
            raise ValueError(
                "this solution has no u0 and p with it: solutions lose them on their way out of "
                "jit, through vmap and tree_map, and have none in output_func, after reruns and in "
                "answers of a service. Use what prob_func makes them of."
            )
        return given


class ODESolution(_Solution):
    """The solution of one problem.

    - `u`: the states, `[time, *state]`; for a state that is a pytree, its structure with leaves
        `[time, *leaf]`; with `save_idxs`, only what that chooses.
    - `names`: the names of the saved components of a pytree, or of those that `save_idxs` chose.
    - `t`: the times, `[time]`.
    - `retcode`: its [`ReturnCode`][ensembleode.ReturnCode].
    - `stats`: its [`Stats`][ensembleode.Stats].
    - `integral`: the integral of the problem's `integrand` from the start to each time, in the
        structure of the integrand with leaves `[time, ...]`; None without an integrand.
    - `u0`, `p`: the initial state and the parameters, in the structure of the problem's.
    - `length`: how many of the times were reached; states after that are NaN if it failed. If times
        differ between trajectories or an event ended it, solutions are cut to this length, and to
        the end, outside of `jit`.
    - `engine`: which engine ran, and why.
    - `events`: with callbacks, its [`Events`][ensembleode.Events].
    - `saved`: with a `SavingCallback`, the values that it [`Saved`][ensembleode.Saved].
    - `p_at`: the parameters that affects change, at each time, in the structure of the problem's
        `p` with leaves `[time, ...]`, and None for all others; None where none change.
    - `W`, `Z`: the path of the noise of an [`SDEProblem`][ensembleode.SDEProblem], and that of its
        second process, `[time, *noise]`, with `save_noise=True`; None otherwise.

    Where an event has ended it, `t[-1]` and `u[-1]` are the event's, whatever else is saved. Inside
    of `jit` and of an `output_func`, the last row is the end, after rows of NaN that were not
    reached; where an event may end it, and the end of `tspan` isn't known to be saved, there is one
    more row for that.

    Called with times, it interpolates (after `save_everystep=True`).
    """

    u: PyTree[Inexact[AnyArray, "..."]]
    t: Real[AnyArray, " time"]
    retcode: ReturnCodes
    stats: Stats
    length: Int[AnyArray, ""] | int
    _dense: Dense | None = None
    engine: EngineChoice | None = eqx.field(static=True, default=None)
    _order: tuple[str, ...] | None = eqx.field(static=True, default=None)
    integral: PyTree = None
    events: Events | None = None
    _given: HiddenObject = HiddenObject()
    saved: Saved | None = None
    p_at: PyTree = None
    _names: tuple[str, ...] | None = eqx.field(static=True, default=None)
    noise: PyTree = None

    @property
    def W(self) -> Any:
        """The path of the noise, `[time, *noise]`; None unless it was saved."""
        return (self.noise or {}).get("W")

    @property
    def Z(self) -> Any:
        """The path of the second process, `[time, *noise]`; None unless there is one."""
        return (self.noise or {}).get("Z")

    @property
    def successful(self) -> Any:
        """Whether it succeeded: a boolean, also under `jit`. A loss should leave out the states of
        a solution that failed, as those of
        [`EnsembleSolution.successful`][ensembleode.EnsembleSolution.successful].

        >>> import ensembleode as eo
        >>> prob = eo.ODEProblem(lambda u, p, t: u**2, 0.5, (0.0, 1.0))  # blows up at 1 / u0
        >>> eo.solve(prob).successful, eo.solve(eo.remake(prob, u0=1.5)).successful
        (True, False)
        """
        return is_successful(self.retcode)

    def __call__(self, t: PyTree, deriv: ArrayLike | None = 0) -> Array | None:
        """The state at `t` (a number or `[n]`): `[*state]` or `[n, *state]`.

        Between accepted steps, it is the interpolant of the method, which `saveat` uses, too: that
        of its tableau, or a cubic polynomial if the method has none of its own. It is
        differentiable with respect to everything that the solution depends on, and to `t`. It is
        NaN outside of what was reached.

        **Arguments:** `deriv`: the order of the derivative with respect to time that is returned
        instead of the state; each order is less accurate than the one before.

        **Raises:** `ValueError` without `save_everystep=True`, and for a `deriv` that is no order
        of a derivative.

        >>> import ensembleode as eo
        >>> prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
        >>> sol = eo.solve(prob, save_everystep=True)
        >>> print(f"{sol(0.5)[0]:.3f} {sol(0.5, deriv=1)[0]:.3f}")
        0.607 -0.607
        """
        return _interpolated(self, self.length, t, deriv, several=False)

    def plot(
        self,
        idxs: Any = None,
        *,
        color: str | None = None,
        names: Any = None,
        units: Mapping[str, Any] | None = None,
        arrows: bool = True,
        events: bool | Sequence[str] = True,
        ax: Any = None,
        **line: Any,
    ) -> Any:
        """Plot the solution with matplotlib (the extra `plot`); returns the axes.

        After `save_everystep=True`, the curves are interpolated between the steps. A solution that
        failed ends in a red cross.

        **Arguments:**

        - `idxs`, `names`, `units`, `arrows`, `events`, `ax`: see
            [`EnsembleSolution.plot`][ensembleode.EnsembleSolution.plot].
        - `color`: a matplotlib colour; line styles then tell components apart.
        - `line`: options of the lines, for `matplotlib.lines.Line2D`.

        **Raises:** the same errors as `EnsembleSolution.plot`.
        """
        from ..analysis.plotting import plot_solution

        options = {"events": events, "arrows": arrows}
        return plot_solution(self, idxs, color, names, units, ax, line, **options)

    def to_xarray(self, names: Sequence[str] | None = None) -> Any:
        """An `xarray.Dataset` of `u` over time and state, the return code and the counts.
        See [`EnsembleSolution.to_xarray`][ensembleode.EnsembleSolution.to_xarray].
        """
        from . import labelled

        return labelled.solution_dataset(self, names)

    def to_pandas(self, names: Sequence[str] | None = None) -> Any:
        """A `pandas.DataFrame` of the states, with a row for each time and a column for each
        component, named by `names` (see
        [`EnsembleSolution.to_xarray`][ensembleode.EnsembleSolution.to_xarray])."""
        from . import labelled

        return labelled.frame(self, names)

    def __len__(self) -> int:
        return np.shape(self.t)[0]

    def __getitem__(self, i: Any) -> Any:
        raise TypeError(f"an ODESolution is not indexed: its states are sol.u[{i!r}].")

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(flattened(self.u, 1, self._order), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return text_of_solution(self)


class EnsembleSolution(_Solution):
    """The solutions of an ensemble, as arrays.

    - `u`: the states `[trajectory, time, *state]`; for a state that is a pytree, its structure with
        leaves `[trajectory, time, *leaf]`; with `save_idxs`, only what that chooses; or the outputs
        of `output_func`, each leaf with the trajectory axis first; or the result of `reduction`.
    - `names`: the names of the saved components of a pytree, or of those that `save_idxs` chose.
    - `t`: the times: `[time]` where all trajectories share them, else `[trajectory, time]`; None
        with an `output_func` or a `reduction`.
    - `integral`: the integral of the problem's `integrand` from the start to each time, in the
        structure of the integrand with leaves `[trajectory, time, ...]`. None without an integrand,
        and with an `output_func` (whose `sol` has the integral) or a `reduction`.
    - `u0`, `p`: the initial states and parameters of the trajectories, in the structure of the
        problem's, with numbers as `[trajectory, ...]`. They are computed again when they are asked
        for.
    - `retcode`: `[trajectory]`, [`ReturnCode`][ensembleode.ReturnCode]s as integers.
    - `lengths`: `[trajectory]`, how many times each trajectory reached. States that were not
        reached are NaN.
    - `stats`: [`Stats`][ensembleode.Stats] over the trajectories.
    - `converged`: whether `reduction` stopped the ensemble; true without a reduction.
    - `elapsed`: seconds; NaN under `jit`.
    - `engine`: which engine ran, and why.
    - `kind`: what `u` is: `"trajectories"`, `"outputs"` or `"reduced"`.
    - `events`: with callbacks, their [`Events`][ensembleode.Events] over the trajectories.
    - `saved`: with a `SavingCallback`, the values that it [`Saved`][ensembleode.Saved].
    - `p_at`: the parameters that affects change, `[trajectory, time, ...]`: see
        [`ODESolution`][ensembleode.ODESolution]. `end`: where the trajectories stopped.
    - `W`, `Z`: the paths of the noise, `[trajectory, time, *noise]`, with `save_noise=True`.

    For any batches and any ensemble algorithm, `u` and `t` are JAX arrays, and outside of `jit`,
    `retcode`, `lengths` and `stats` are NumPy arrays. With an accelerator, results that were
    gathered from several batches are on the accelerator if they take less than a quarter of its
    memory, and otherwise on JAX's CPU device. The arrays of a store
    ([`open_ensemble`][ensembleode.open_ensemble]) are on disk, and are read as NumPy arrays when
    they are indexed: `jnp.asarray(sim.u)` reads everything.

    `len(sim)` is the number of trajectories, and `sim[i]` is the solution (or output) of trajectory
    i, counted from 0. `sim[2:5]`, `sim[mask]` and `sim[indices]` are the ensembles of some
    trajectories, such as `sim[sim.successful]`. `np.asarray(sim)` is `sim.u`. Called with times, a
    solution interpolates (after `save_everystep=True`). It is a pytree: it can be returned from
    `jit` and differentiated.
    """

    u: PyTree
    t: Any
    retcode: ReturnCodes
    lengths: Any
    stats: Stats
    converged: ArrayLike
    elapsed: Any
    engine: EngineChoice = eqx.field(static=True)
    kind: Literal["trajectories", "outputs", "reduced"] = eqx.field(static=True)
    _dense: Dense | None = None
    _order: tuple[str, ...] | None = eqx.field(static=True, default=None)
    integral: PyTree = None
    events: Events | None = None
    _given: HiddenObject = HiddenObject()
    saved: Saved | None = None
    p_at: PyTree = None
    _ended: End | None = None
    _adds_end: bool = eqx.field(static=True, default=False)
    _names: tuple[str, ...] | None = eqx.field(static=True, default=None)
    noise: PyTree = None

    @property
    def W(self) -> Any:
        """The paths of the noise, `[trajectory, time, *noise]`; None unless they were saved."""
        return (self.noise or {}).get("W")

    @property
    def Z(self) -> Any:
        """The paths of the second process, `[trajectory, time, *noise]`; None unless there is
        one."""
        return (self.noise or {}).get("Z")

    @property
    def end(self) -> End:
        """Where trajectories have [stopped][ensembleode.End], also under `jit`: `sim.end.t[i]` is
        `sim[i].t[-1]` if that trajectory succeeded. The times of events that ended trajectories
        have derivatives, too.

        **Raises:** `TypeError` for outputs and for a reduced ensemble.

        >>> import ensembleode as eo
        >>> lands = eo.ContinuousCallback(lambda u, t, integrator: u, eo.terminate)
        >>> prob = eo.ODEProblem(lambda u, p, t: -p, 1.0, (0.0, 2.0), 1.0, callback=lands)
        >>> ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=2.0**-ctx.index))
        >>> sim = eo.solve(ens, trajectories=3, saveat=0.3)
        >>> sim.end.t.round(5).tolist(), sim.end.u.round(5).tolist()
        ([1.0, 2.0, 2.0], [0.0, 0.0, 0.5])
        """
        if self.kind != "trajectories":
            raise TypeError(
                "this ensemble has outputs, or was reduced: let output_func return sol.t[-1] and "
                "sol.u[-1]."
            )
        t = self.t if np.ndim(self.t) == 2 else jnp.broadcast_to(self.t, (len(self), len(self.t)))
        rows = End(t, self.u, self.integral, self.p_at, self.noise)
        rows = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), rows)
        return end_of(rows, self._ended, self.lengths, self.retcode)

    @property
    def successful(self) -> Array | np.ndarray:
        """Whether each trajectory succeeded: booleans `[trajectory]`, also under `jit`.

        A loss can mask failed trajectories by it: `jnp.where(sim.successful[:, None], ..., 0)`. It
        should do so before it computes anything else with their states, whose NaN would spread to
        the gradient.

        >>> import ensembleode as eo
        >>> prob = eo.ODEProblem(lambda u, p, t: u**2, 1.0, (0.0, 1.0))  # blows up at 1 / u0
        >>> ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=0.5 + ctx.index))
        >>> sim = eo.solve(ens, trajectories=3)
        >>> sim.successful.tolist(), sim.failed.tolist()
        ([True, False, False], [1, 2])
        """
        return is_successful(self.retcode)

    @property
    def failed(self) -> Any:
        """The indices of the trajectories that were run and did not succeed; under `jit`, a
        mask."""
        mask = has_failed(self.retcode)
        return mask if is_tracer(mask) else np.flatnonzero(mask)

    def __len__(self) -> int:
        return self.retcode.shape[0]

    def __getitem__(self, i: Any) -> Any:
        if self.kind == "reduced":
            raise TypeError("this ensemble was reduced: its result, as a whole, is sim.u.")
        if not is_tracer(i):
            n = len(self)
            if isinstance(i, slice) or (np.ndim(i) == 1 and not isinstance(i, tuple)):
                return self._of_trajectories(np.arange(n)[i])
            try:
                i = operator.index(i)  # pyright: ignore
            except TypeError:
                raise TypeError(
                    "the index of a trajectory is an integer, and of several a slice, a mask "
                    f"[trajectory] or a list of integers, got {i!r}; index sim.u for times and "
                    "components."
                ) from None
            if not -n <= i < n:
                raise IndexError(f"trajectory {i} of {n}")
        if self.kind == "outputs":
            return jax.tree.map(lambda x: x[i], self.u)
        own_times = np.ndim(self.t) == 2
        t = self.t[i] if own_times else self.t
        values = None if self.saved is None else self.saved.values
        every = self.u, self.integral, self.p_at, self.noise, values, self._ended
        *rows, values, ended = jax.tree.map(lambda x: x[i], every)
        rows, saved_t = End(t, *rows), t
        count = length = self.lengths[i]
        dense = None if self._dense is None else self._dense.of_trajectories(i)
        is_known = not is_tracer(length)
        retcode = ReturnCode(int(self.retcode[i])) if is_known else self.retcode[i]
        may_lack = own_times or ended is not None
        is_cut = is_known and (own_times or was_ended(retcode))
        if is_cut and self.saved is not None and not self.saved.has_own_times:
            saved_t, values = cut((t, values), int(length), int(length))
        if (is_known and was_ended(retcode)) or (may_lack and not is_known):
            rows, count = with_end(rows, ended, length, retcode, adds=self._adds_end)
        if is_cut:
            rows = cut(rows, int(length), int(count))
            dense = None if dense is None else dense.rows(slice(len(rows.t)))
        stats = jax.tree.map(lambda x: x[i], self.stats)
        events = jax.tree.map(lambda x: x[i], self.events)
        if events is not None and not is_tracer(length):
            events = first_events(events, int(events.count), several=False)
        given = HiddenObject(self._given.content and self._given.content.of_trajectory(i))
        saved = None
        if self.saved is not None:
            own = self.saved.has_own_times
            saved = Saved(self.saved.t if own else saved_t, values, own)
        return ODESolution(
            rows.u, rows.t, retcode, stats, length, dense, self.engine, self._order, rows.integral,
            events, given, saved, rows.p_at, self._names, rows.noise,
        )  # fmt: skip

    def _of_trajectories(self, indices: np.ndarray) -> "EnsembleSolution":
        """The ensemble of these trajectories."""

        def rows(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x[indices], tree)

        given, saved = self._given.content, self.saved
        changes = {
            "t": rows(self.t) if self.t is not None and np.ndim(self.t) == 2 else self.t,
            "_dense": None if self._dense is None else self._dense.of_trajectories(indices),
            "_given": HiddenObject(given and given.of_trajectories(indices)),
            **{name: getattr(self, name) for name in _OF_ALL},
        }
        if saved is not None:
            own = saved.has_own_times
            changes["saved"] = Saved(saved.t if own else changes["t"], rows(saved.values), own)
        rest = {name: rows(x) for name, x in vars(self).items() if name not in changes}
        return EnsembleSolution(**rest, **changes)

    def __iter__(self) -> Iterator:
        return (self[i] for i in range(len(self)))

    def __call__(self, t: PyTree, deriv: Any = 0) -> PyTree:
        """The states at `t` (a number or `[n]`): `[trajectory, *state]` or
        `[trajectory, n, *state]`, or their derivatives with respect to time. See
        [`ODESolution`][ensembleode.ODESolution].
        """
        return _interpolated(self, self.lengths, t, deriv, several=True)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.to_array(), dtype=dtype, copy=copy)

    def plot(
        self,
        idxs: Any = None,
        *,
        trajectories: Any = None,
        color: Any = "varying",
        names: list[str] | str | None = None,
        units: Mapping[str, Any] | None = None,
        alpha: float | None = None,
        density: bool | None = None,
        arrows: bool = True,
        events: bool | Sequence[str] = True,
        against: Any = None,
        ax: Any = None,
        **line: Any,
    ) -> Any:
        """Plot the trajectories with matplotlib (the extra `plot`); returns the axes.

        Trajectories are coloured by the number that differs between them, which a colorbar names
        (`color`). More than 500 are drawn as a density (`density`). In a phase portrait, arrows
        show the direction of time (`arrows`).

        A trajectory that failed is drawn as far as it came, and ends in a red cross. So that one
        that blows up doesn't flatten the others, failed trajectories widen the view on either side
        by at most twice the range of the others. The legend says how many end outside of the view;
        over time, these have a cross at its border. A trajectory that was not run isn't drawn.
        After `save_everystep=True`, the curves are interpolated between the steps.

        **Arguments:**

        - `idxs`: the components to draw, counted from 0 in the flattened state, or by name (for a
            state that is a pytree, or one of `names`; the name of a leaf stands for all of its
            components). One component or a list is drawn against time (by default all). A tuple of
            two or three, such as `(0, 2)` or `("S", "I")`, is a phase portrait, in three dimensions
            for three.
        - `trajectories`: the trajectories to draw: indices, a slice or a mask. By default all; or
            where more than 500 are drawn as lines, that many, evenly spaced by index, and up to 20
            that failed.
        - `color`: by default `"varying"`, the first number that differs between the trajectories
            that are drawn: of the parameters, and then of the initial states, in the order in which
            JAX flattens them (a dictionary by its keys). A leaf with more than 10 components counts
            as no number, and nor does one that isn't finite. Several components (up to 10) have
            shades of their colours, light for small numbers, unless there is a `cmap`. Nothing is
            coloured so with a `label`, or in axes that have data. `color=None` turns it off. Else
            the name of a number, such as `"p.k"`, `"p[0]"` or `"u0[1]"`; or numbers `[trajectory]`,
            with one for each trajectory of the ensemble, which a colorbar explains; or a matplotlib
            colour. With any of these, line styles tell components apart, up to four, instead of
            colours. The scale of a colorbar is logarithmic where the numbers are spread over
            decades.
        - `names`: the names of all components of the flattened state; by default `u0`, `u1`, ...
            (`u` for a scalar state, `u[0,1]` for a matrix).
        - `units`: units by name, which labels have in parentheses, as in `{"t": "days", "S":
            "mg/L", "p.k": "1/h"}`. The name of a leaf, or `u` for `u0`, `u1`, ..., stands for
            all of its components. A unit that all drawn components share labels the axis alone.
        - `alpha`: the opacity of the lines; by default it is lower the more there are.
        - `density`: whether to draw how dense the trajectories are, instead of lines: a histogram
            of each component at each time, whose integral over the values is one, or of all points
            of a phase portrait in two dimensions. The title says of how many. By default for more
            than 500 trajectories, unless `color` has numbers or `line` has options of lines. Events
            aren't marked in it.
        - `arrows`: whether phase portraits have arrows in the direction of time (up to 24), and a
            dot where each trajectory starts.
        - `events`: whether events are marked, each with the states before and after it. The shapes
            of marks tell callbacks apart. The legend has the numbers of the callbacks, or the names
            that are given instead, one for each callback.
        - `against`: draw the outcome of each trajectory, its last state or its output, as a point
            against one of its numbers: the name of an initial value or a parameter, such as `"p"`,
            `"p.k"`, `"p[0]"` or `"u0[1]"`; or numbers `[trajectory]`. Then `idxs` chooses among the
            components of the state or of the outputs, and `line` has options of the points.
        - `ax`: matplotlib axes to draw into, three-dimensional for a tuple of three; by default
            those of a new figure. Axes that have labels keep them.
        - `line`: options of the lines, for `matplotlib.collections.LineCollection` (`lw`, `ls`,
            ...). `label` is for the legend (before the names, if there are several components).
            With numbers as `color`: `cmap` (by default `"viridis"`), `norm`, and `label` for the
            colorbar. A density has `cmap` and `norm`, too.

        **Raises:** `ValueError` and `TypeError` for bad arguments, and for an ensemble that can't
        be drawn (of outputs or reduced, traced, or with complex states); `ImportError` without
        matplotlib.
        """
        from ..analysis.plotting import plot_ensemble, PlotArguments

        wanted = PlotArguments(
            idxs, trajectories, color, names, units, alpha, density, arrows, ax, line
        )
        return plot_ensemble(self, wanted, events=events, against=against)

    def to_array(self, layout: Literal["batch", "julia"] = "batch") -> AnyArray | OnDisk:
        """The states as one array. The components of a state that is a pytree are flattened in the
        order in which they were written. Where they are in a store, they are read by what uses the
        array.

        **Arguments:** `layout="batch"` is `[trajectory, time, *state]`; `"julia"` is
        `[*state, time, trajectory]`, the shape of `Array(sim)` in Julia.
        """
        if self.kind != "trajectories":
            raise TypeError("the outputs of this ensemble are a pytree: use sim.u.")
        if layout not in ("batch", "julia"):
            raise ValueError(f"layout must be 'batch' or 'julia', got {layout!r}.")
        array = flattened(self.u, 2, self._order)
        return array if layout == "batch" else jnp.moveaxis(jnp.asarray(array), (0, 1), (-1, -2))

    def to_xarray(self, names: Sequence[str] | None = None) -> Any:
        """An `xarray.Dataset` (with the extra `plot`): the states with named dimensions.

        - `u` over `trajectory`, `time` and `state` (`state_0`, `state_1`, ... for a matrix); for a
            state that is a pytree, a variable for each leaf, with its name. Where trajectories have
            their own times, these are over `trajectory` and `step`, and `time` is a coordinate over
            both.
        - `integral`, over the same dimensions, for a problem with an `integrand`; if that returns a
            pytree, a variable for each leaf, `integral.name`. With a `SavingCallback` also `saved`
            or, for a pytree, `saved.name`; over `saved.time` if that has times of its own.
        - `retcode` (integers), `retcode.name` (`"Success"`, `"MaxIters"`, ...), `length` and the
            counts of `stats`, over `trajectory`.
        - `p_at`, over the same dimensions, where affects change parameters: `p_at.name`, likewise.
        - With callbacks: `events.t`, `events.which`, `events.direction`, `events.u_before` and
            `events.u_after` over `trajectory` and `event`, and `events.count` over `trajectory`;
            and where they may end trajectories, `end.t` and `end.u`, as in `sim.end`.
        - With an `output_func`: a variable for each leaf of its outputs, in place of `u`.
        - The initial states and parameters that differ between trajectories, as coordinates: `u0`
            and `p`, or one for each leaf, `u0.name`, `p.name` (unless a variable has that name). So
            an outcome can be drawn against a parameter:
            `ds["u"].isel(time=-1).plot.scatter(x="p")`.

        **Arguments:** `names`: names for the components of a vector state, by default `u0`, `u1`,
        ...

        **Raises:** `TypeError` for a reduced ensemble, or inside `jit`; `ValueError` for names
        that don't fit; `ImportError` without xarray.
        """
        from . import labelled

        return labelled.ensemble_dataset(self, names)

    def to_pandas(self, names: Sequence[str] | None = None) -> Any:
        """A `pandas.DataFrame` made from [`to_xarray`][ensembleode.EnsembleSolution.to_xarray],
        with a row for each trajectory and time, and a column for each component. With an
        `output_func`, it has a row for each trajectory, and a column for each number of its
        outputs.
        """
        from . import labelled

        if self.kind == "outputs":
            return labelled.outputs_frame(self)
        return labelled.frame(self, names)

    def __repr__(self) -> str:
        return text_of_ensemble(self)


# The fields that the solution of some trajectories shares with that of all.
_OF_ALL = ("converged", "elapsed", "engine", "kind", "_order", "_adds_end", "_names")


def _interpolated(
    solution: ODESolution | EnsembleSolution,
    lengths: Any,
    t: PyTree,
    deriv: ArrayLike | None,
    *,
    several: bool,
) -> PyTree:
    dense = solution._dense
    if dense is None:
        raise ValueError(
            "this solution can't be interpolated: solve with save_everystep=True, or save the "
            "times you need with saveat."
        )
    if not isinstance(deriv, int) or deriv < 0:
        raise ValueError(f"deriv must be the order of a derivative, 0, 1, ..., got {deriv!r}.")
    t = jnp.asarray(t, solution.t.dtype)
    reached = lengths, is_successful(solution.retcode)
    return states_at(dense, solution.t, solution.u, *reached, t, deriv, several=several)
