"""What is fixed when a solve is compiled, and the results of the compiled program."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.devices.placement import copied_to_jax
from ..ground.retcode import ReturnCodes
from ..ground.state_tree import StateTree
from ..solution.dense import Dense, DensePlan, KeptNodes, RemadeSteps, StraightSteps
from ..solution.stats import COUNTS
from ..solvers.mass_matrix import MassMatrix
from ..tracing.program import Program, Static
from .events import TracedCallbacks
from .extended_state import Extension, users_field
from .implicit_form import ImplicitForm
from .noise import NoiseTerms
from .rate import rate_of
from .saved_components import SavedComponents
from .saving import Saving
from .trajectory_numbers import TrajectoryNumbers


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that decides the compiled program of a solve, without the solve's numbers.

    A plan is hashable and compared by content, so solves that differ only in numbers share a
    compiled program.

    - `engine`: the module that integrates (see `ensembleode.engines`).
    - `method`: the solver and its static options, in the form that the engine wants.
    - `field`: the vector field, `field(consts, u, p, t)`.
    - `beside`: the other programs of the problem, each with the name of its function.
    - `state`: the shape and dtype of a trajectory's state (an abstract value).
    - `controlled`: the number of components of the state that step-size control looks at; they are
        the first ones.
    - `extension`: the components of the state behind the user's; None where there are none.
    - `saving`: which times are saved; `saved`: which components, None for all.
    - `maxiters`: the largest number of steps.
    - `width`: how many neighbouring trajectories stay on the same device.
    - `batched`: booleans in the place of numbers, true where numbers differ between trajectories.
    - `output`: the traced `output_func`, or None.
        `output(consts, result, numbers, index, repeat, key)` returns its output, and whether to
        rerun (None if it never asks for that).
    - `saves_values`: whether there is a `SavingCallback`. Without an `output_func`, `apart` is then
        the traced `saved_values.taken_apart`: `apart(consts, result, numbers)` returns the result
        and the values.
    - `tree`: the structure of a state that is a pytree or complex to the user.
    - `events`: the callbacks (see `plan/events.py`); None without callbacks.
    - `max_events`: the number of events of a trajectory that there is room for in the record; zero
        where none are kept.
    - `last_event`: the number of events that a trajectory may have; the next one ends it, with
        `ReturnCode.MaxEvents`.
    - `keeps_end`: whether there is also room for the event that ends a trajectory.
    - `inner`: whether results also have states within the steps, if every step is saved.
    - `form`: what implicit methods need besides the field; None where they need nothing, and for
        explicit methods.
    - `noise`: the noise of a stochastic problem, where the engine draws it; None elsewhere.
    - `in_parts`: whether the components that step-size control looks at are the real parts of
        complex numbers, and then their imaginary parts. It looks at their absolute values.
    - `threads`: how many threads of the CPU may share the work, in engines that can share it.
    """

    engine: Any
    method: Static
    field: Callable
    state: Any
    controlled: int
    saving: Saving
    maxiters: int
    width: int
    batched: TrajectoryNumbers
    output: Program | None = None
    saved: SavedComponents | None = None
    saves_values: bool = False
    apart: Program | None = None
    beside: tuple[tuple[str, Program], ...] = ()
    threads: int = 1
    tree: StateTree | None = None
    inner: bool = False
    extension: Extension | None = None
    events: TracedCallbacks | None = None
    max_events: int = 0
    last_event: int = 0
    keeps_end: bool = False
    form: ImplicitForm | None = None
    noise: NoiseTerms | None = None
    in_parts: bool = False

    @property
    def own_times(self) -> bool:
        """Whether the saved times differ between trajectories."""
        ends = self.batched.t0 or self.batched.t1 or self.may_end
        return {"steps": True, "ends": ends, "times": bool(self.batched.saveat)}[self.saving.mode]

    @property
    def mass(self) -> MassMatrix | None:
        """The mass matrix of the state; None if it is the identity."""
        return None if self.form is None else self.form.mass

    @property
    def users_field(self) -> Any:
        """The vector field of the user's components alone."""
        if self.extension is None:
            return self.field
        assert isinstance(self.field, Program)
        return users_field(self.field, self.extension)

    @property
    def users_form(self) -> ImplicitForm | None:
        """The form for the field of the user's components alone."""
        if self.extension is None or self.form is None:
            return self.form
        assert isinstance(self.field, Program)
        return self.form.of_user(self.field, self.extension)

    @property
    def may_end(self) -> bool:
        """Whether an event that the engine reports may end a trajectory before `t1`."""
        events = self.events
        return events is not None and events.may_end and (self.engine.closed or events.is_kept)

    @property
    def event_slots(self) -> int:
        """The number of events of a trajectory that there is room for: those of the record, and one
        more for the event that ends it, where one may."""
        return self.max_events + self.keeps_end

    @property
    def order(self) -> tuple[str, ...] | None:
        """The names of the saved state's leaves in the order in which they were written; None for
        an array."""
        tree = self.tree if self.saved is None else self.saved.tree
        return None if tree is None else tree.order

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the saved components, where these are some of an array or of one leaf."""
        return None if self.saved is None else self.saved.names

    @property
    def chosen(self) -> tuple[int, ...] | None:
        """The components that the rows of the engine have; None for all. Those of other plans are
        chosen from whole rows: where further values are computed from rows, where there are further
        components, and in engines that write whole states."""
        rests = self.events is not None and bool(self.events.rests)
        whole = self.saving.mode == "steps" or self.saves_values or self.extension is not None
        if self.saved is None or whole or rests or not self.engine.chooses:
            return None
        places = self.saved.places
        return places if self.tree is None else self.tree.places_of(places)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a saved state in the rows of the engine."""
        return self.state.shape if self.chosen is None else (len(self.chosen),)

    def row_of(self, u: Array) -> Array:
        """States `[..., *state]` as the rows of the engine have them."""
        if self.chosen is None:
            return u
        lead = u.shape[: u.ndim - len(self.state.shape)]
        return u.reshape(*lead, -1)[..., np.array(self.chosen)]

    @property
    def stands_for(self) -> tuple:
        """The parts of the plan on which the resulting numbers depend, whichever code computes
        them."""
        solver = self.method.value, self.maxiters, self.saving
        state = self.state, self.tree, self.extension
        events = self.events, self.max_events, self.last_event, self.keeps_end
        programs = self.field, *state, self.batched, self.output, *events, *self.beside
        parts = self.form, self.apart, self.saved, self.noise, self.in_parts or None
        more = [x for x in parts if x is not None]
        return (*solver, *programs, *more)

    def as_given(self, u: Array | None) -> Any:
        """States `[..., component]` in the structure that the user gave them; None stays None."""
        if u is not None and self.extension is not None:
            u = self.extension.user_of(u)
        return u if self.tree is None or u is None else self.tree.unravel(u)

    def integral_of(self, u: Array) -> PyTree:
        """The integrals of states `[..., component]`, in the structure of the integrand; None where
        there is none."""
        return None if self.extension is None else self.extension.integral_of(u)

    def changing_of(self, u: Array) -> PyTree:
        """The parameters that affects change, of states `[..., component]`, in the structure of the
        parameters; None where none change."""
        return None if self.extension is None else self.extension.changing_of(u)

    def noise_of(self, u: Array) -> dict[str, Array] | None:
        """The paths of the noise in states `[..., component]`, by their names; None where none are
        kept."""
        return None if self.extension is None else self.extension.noise_of(u)


NO_CALLBACK = -1  # stands for the number of the callback, where there was no event


def fill_of(path: tuple, dtype: Any) -> ArrayLike:
    """The value of the leaf at this path of an outcome where nothing was computed."""
    if jax.dtypes.issubdtype(dtype, np.inexact):
        return np.nan
    names = [getattr(part, "name", None) for part in path]
    return NO_CALLBACK if names == ["events", "which"] else 0


class RecordedEvents(NamedTuple):
    """The events of a trajectory, or of several, with an additional first axis. In the place of an
    event that did not happen, states and times are NaN and `which` is -1.

    - `t [event]`: the times; `which [event]`: the numbers of the callbacks.
    - `crossed [event, longest]`: how each condition of the callback crossed zero: -1, 0 or 1. For a
        discrete callback the first entry is 1.
    - `before`, `after [event, *state]`: the states.
    - `count []`: the number of events.
    """

    t: Any
    which: Any
    crossed: Any
    before: Any
    after: Any
    count: Any


class Result(NamedTuple):
    """What an engine returns for a trajectory, or for several, with an additional first axis.

    - `u [time, *state]`: the states; NaN where a time was not reached.
    - `t [time]`: the times, likewise; only if trajectories have their own times.
    - `length`: the number of times that were reached.
    - `inner [time, node, *state]`: the states within the steps (see `dense.py`); None where they
        were not kept.
    - The counts are those of `Stats`.
    - `events`: `RecordedEvents`; None without callbacks whose events are kept.
    - `ended`: an `End`, NaN unless an event ended the trajectory; None where none may.
    """

    u: Any
    t: Any
    inner: Any
    length: Any
    retcode: ReturnCodes
    naccept: Any
    nreject: Any
    nf: Any
    njac: Any = None
    nw: Any = None
    nsolve: Any = None
    events: Any = None
    ended: Any = None


_GIVEN = (*Result._fields, "rerun", "integral", "p_at", "saved", "converged", "noise")


class Outcome(collections.namedtuple("Outcome", _GIVEN, defaults=[None] * len(_GIVEN))):
    """What the user gets for a trajectory, or for several (see `running.job.finish`).

    The fields are those of a `Result`, with these differences:

    - `u` is in the structure of the user's state. With an `output_func` it is the output instead,
        and `t`, `inner`, `events` and `ended` are None.
    - `t` is None unless the trajectories have their own times.
    - `rerun` is None where no reruns can be asked for.
    - `integral` is that of the integrand, `[time, ...]`; None where there is none.
    - `p_at` are the parameters that affects change, `[time, ...]`; None where none change.
    - `noise`: the paths of the noise, `[time, ...]`, by their names; None where none are kept.
    - `saved`: the values of a `SavingCallback`, `[time, ...]`; None where there is none.
    - For an ensemble with a reduction, `u` is reduced. `converged` says whether the reduction, or
        the last trajectory, ended the ensemble; it is None for a batch.
    """

    __slots__ = ()

    @property
    def counts(self) -> tuple:
        """The counts, which are those of `Stats`."""
        return tuple(getattr(self, name) for name in COUNTS)


def dense_of(outcome: Outcome, plan: Plan, numbers: Any, own: Any = None) -> Dense | None:
    """The solution within a trajectory's steps, where every step was saved. `numbers` are the
    constants and parameters of `f`; `own` says which of these differ between several trajectories,
    by default none."""
    if plan.saving.mode != "steps":
        return None
    if outcome.inner is not None:
        return KeptNodes(outcome.inner)
    if plan.extension is not None and plan.extension.has_clock:
        return StraightSteps()
    own = own or jax.tree.map(lambda _: False, tuple(numbers))
    method: Any = plan.engine.interpolant(plan.method)
    consts, p = jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else copied_to_jax(x), tuple(numbers)
    )
    jumps = plan.batched.d_discontinuities is not None
    field, form = plan.users_field, plan.users_form
    # Where steps can't be computed again, the slopes at their ends are needed.
    field = field if method is not None else rate_of(field, form)
    known = DensePlan(field, method, plan.tree, own, jumps, form)
    return RemadeSteps(consts, p, known)


def shared_times(plan: Plan, lanes: TrajectoryNumbers) -> Array:
    """The saved times of `lanes`, if all trajectories share them: `[time]`."""
    if plan.saving.mode == "times":
        return jnp.asarray(lanes.saveat)
    ends = [lanes.t0, lanes.t1][-plan.saving.rows :]
    if any(isinstance(x, jax.Array) for x in ends):
        return jnp.stack([jnp.asarray(x) for x in ends])
    return copied_to_jax(np.stack(ends))
