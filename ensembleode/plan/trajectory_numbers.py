"""The numbers of trajectories, as arrays."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..fields import parameters_of
from ..ground.devices.alone import alone
from ..ground.state_tree import StateTree
from ..problem.number_table import NUMBERS, of_kind
from ..problem.saving_callback import SavingCallback
from ..problem.sensitivity import constant
from ..tracing.program import is_tracer, Program, Static, structs_of
from ..tracing.written_numbers import with_numbers_apart
from .events import CallbackProgram, of_extended, over_numbers, TracedCallbacks
from .extended_state import Extension, held_like, with_held
from .given import GivenInputs
from .implicit_form import ImplicitForm, with_constants_around
from .noise import is_adaptive, JUMPS, NoiseTerms
from .stochastic_field import stochastic_field


_CONSTANTS = of_kind("constants")


_NAMES = [x.name for x in NUMBERS]


class TrajectoryNumbers(
    collections.namedtuple("TrajectoryNumbers", _NAMES, defaults=[None] * len(_NAMES))
):
    """The numbers of one trajectory (of several, with a leading axis), by the names of
    `problem/number_table.py`; those that don't apply are None.

    `p` and `consts` are the array leaves of the parameters and the arrays that `f` closes over.
    `count` is how many of the times in `saveat` are to be saved (None: all). `stop` is the address
    of a flag that ends the solve early (see `running/interrupts.py`).
    """

    __slots__ = ()
    count: Any  # declared, since type checkers would take it for `tuple.count`

    @property
    def parameters(self) -> tuple:
        """The inputs of `f` besides the state and the time, in the order of
        `fields.parameters_of`."""
        return (*self.consts, *self.p)

    def with_parameters(self, values: Sequence) -> "TrajectoryNumbers":
        n = len(self.consts)
        return self._replace(consts=tuple(values[:n]), p=tuple(values[n:]))


@dataclasses.dataclass
class Trajectories:
    """An ensemble as arrays.

    - `field`: the vector field, a program `field(consts, u, p, t)`.
    - `beside`: the other programs of the problem, each with the name of its function.
    - `events`: the callbacks; None without callbacks. Their programs have constants of their own
        until all programs read one list of numbers (see `with_one_list`).
    - `form`: what implicit methods need besides the field; None where they need nothing.
    - `noise`: the noise of a stochastic problem, until its method is known (see `with_noise`).
    - `saving`: what each trajectory saves.
    - `extension`: the components of the state behind the user's; None where there are none.
    - `tree`: the structure of a state that is a pytree; None for an array.
    - `options`: the resolved solver options that all trajectories share.
    - `batched`: booleans in the place of numbers, true for leaves that differ between trajectories.
    - `lanes(indices, repeat)`: returns the numbers of several trajectories; leaves that differ
        between these have a leading axis.
    - `lane(index, repeat)`: returns the numbers of one trajectory, computed operation by operation,
        as the user's own Python would.
    - `shared`: the leaves that all trajectories share and whose values are known; the
        others are None.
    - `traced`: whether anything here is a tracer of an outer transformation.
    - `repeatable`: whether `repeat` may be traced (not if `prob_func` has to be called).
    - `given`: the initial states and parameters as the user gave them, whatever is done to the
        numbers.
    - `made`: the function `lanes` as it was before the times of each trajectory were laid out.
    - `saving_callback`: the `SavingCallback`, or None; `times_of_values`: the times at which it
        saves, if it has times of its own.
    - `before_parameters`: how many numbers stand before the user's parameters in `p`.
    """

    field: Program
    saving: Any
    tree: StateTree | None
    options: dict
    batched: TrajectoryNumbers
    lanes: Callable[[Any, Any], TrajectoryNumbers]
    lane: Callable[[Any, Any], TrajectoryNumbers]
    shared: TrajectoryNumbers
    traced: bool
    repeatable: bool
    made: Any = None
    beside: tuple[tuple[str, Program], ...] = ()
    extension: Extension | None = None
    events: TracedCallbacks | None = None
    form: ImplicitForm | None = None
    noise: NoiseTerms | None = None
    given: GivenInputs | None = None
    saving_callback: SavingCallback | None = None
    times_of_values: PyTree = None
    before_parameters: int = 0

    def __post_init__(self):
        self.made = self.made or self.lanes

    def changed(
        self, change: Callable[[TrajectoryNumbers], TrajectoryNumbers], **fields: Any
    ) -> "Trajectories":
        """The ensemble with these fields changed, and `change` applied to the numbers of
        trajectories."""

        def after(
            make: Callable[[Any, Any], TrajectoryNumbers],
        ) -> Callable[[Any, Any], TrajectoryNumbers]:
            return lambda index, repeat: change(make(index, repeat))

        lanes, lane, made = map(after, (self.lanes, self.lane, self.made))
        return dataclasses.replace(self, lanes=lanes, lane=lane, made=made, **fields)

    def with_numbers_apart(self) -> "Trajectories":
        """The ensemble with the numeric literals of its programs moved to the programs'
        constants."""
        programs = {"f": self.field, **dict(self.beside)}
        apart = {name: with_numbers_apart(program) for name, program in programs.items()}
        more = {x.name: apart[x.option][1] for x in _CONSTANTS if x.option in apart}
        (_, field), *beside = ((name, program) for name, (program, _) in apart.items())
        changes: dict[str, Any] = {"field": field, "beside": tuple(beside)}
        around = functools.partial(_with_constants_behind, numbers=apart["f"][1])
        if self.form is not None:
            changes["form"] = self.form.mapped(around)
        if self.noise is not None:
            changes["noise"] = self.noise.mapped(around)
        found = self._with_more_constants(more, **changes)
        if found.noise is None:
            return found
        # (The numbers in the drift are constants of the other programs by now.)
        diffusion, numbers = with_numbers_apart(found.noise.diffusion)
        around = functools.partial(_with_constants_behind, numbers=numbers)
        noise = dataclasses.replace(found.noise.mapped(around), diffusion=diffusion)
        more = {"consts": numbers}
        return found._with_more_constants(more, field=around(found.field), noise=noise)

    def _with_more_constants(self, more: dict[str, list], **changes: Any) -> "Trajectories":
        """The ensemble with more constants, the same for all trajectories, behind those of these
        names, and with other changes."""

        def added(lane: TrajectoryNumbers, more: dict[str, list] = more) -> TrajectoryNumbers:
            return lane._replace(**{name: (*getattr(lane, name), *x) for name, x in more.items()})

        batched = added(self.batched, {name: [False] * len(x) for name, x in more.items()})
        return self.changed(added, **changes, batched=batched, shared=added(self.shared))

    def with_noise_apart(self) -> "Trajectories":
        """The ensemble for an engine that draws the noise itself: steps are fixed where they have a
        size and nothing else is said."""
        known = self.options["adaptive"] is not None or self.batched.dt is None
        if self.noise is None or known:
            return self
        return dataclasses.replace(self, options=self.options | {"adaptive": False})

    def with_noise(self, alg: Any) -> "Trajectories":
        """The ensemble whose field is the step of the method `alg` with the noise in it; the
        ensemble itself where there is no noise."""
        if self.noise is None:
            return self
        adaptive = is_adaptive(alg, self.options["adaptive"], self.batched.dt is not None)
        about = self.field, self.noise, Static(alg)
        is_cut = self.events is not None and bool(self.events.continuous)
        field, extension, form = stochastic_field(*about, adaptive=adaptive, is_cut=is_cut)
        user, jumps = extension.user, self.noise.kind == JUMPS
        before, after = extension.around_time

        def extended(lane: TrajectoryNumbers) -> TrajectoryNumbers:
            zeros = np.zeros(before), np.zeros(after)
            parts = [(lane.u0, len(user.shape)), (zeros[0], 1), (lane.t0, 0), (zeros[1], 1)]
            tolerances = {
                x.name: extension.tolerance(getattr(lane, x.name))
                for x in of_kind("tolerance")
                if getattr(lane, x.name) is not None
            }
            lane = lane._replace(u0=_joined(parts, user.dtype), **tolerances)
            return _with_jumps_saved(lane, self.saving) if jumps else lane

        own = bool(self.batched.u0 or self.batched.t0)
        batched = self.batched._replace(u0=own)
        if jumps:
            batched = _batched_with_jumps_saved(batched, self.saving)
        known = self.shared.u0 is not None and self.shared.t0 is not None
        shared = extended(self.shared) if known and not own else self.shared._replace(u0=None)
        return self.changed(
            extended,
            field=field,
            extension=extension,
            form=form,
            noise=None,
            options=self.options | {"adaptive": adaptive},
            batched=batched,
            shared=shared,
        )

    def with_one_list(self) -> "Trajectories":
        """The ensemble in which `p` holds every number that programs read: the constants of the
        field, its parameters, and the constants of the callbacks. Its programs have no constants.
        Parameters that affects change are moved behind the state."""
        events = self.events
        assert events is not None
        parameters = parameters_of(self.field)
        avals = [*parameters, *events.consts]
        numbers = tuple((x.shape, x.dtype) for x in avals)
        n_consts, n = len(self.field.jaxpr.constvars), len(parameters)
        field = over_numbers(CallbackProgram(self.field), numbers, tuple(range(n))).program
        form = self.form and self.form.over_numbers(numbers, tuple(range(n)))
        held = held_like(field, [n_consts + i for i in events.changes])
        before = extension = self.extension
        if held:
            (user,) = structs_of(self.field.jaxpr.outvars)
            parts = before or Extension(user)
            structure = None if self.given is None else (n_consts, self.given.numbers)
            extension = dataclasses.replace(parts, held=held, parameters=structure)
            form = form and form.with_held(field, before, extension)
            field = with_held(field, before, extension)

        def changed(part: CallbackProgram, changes: tuple[int, ...] | None) -> CallbackProgram:
            first = n + part.start
            places = (*range(first, first + part.n_consts), *range(n_consts, n))
            found = over_numbers(part, numbers, places)
            if extension is None:
                return found
            of_jump = None if changes is None else tuple(n_consts + i for i in changes)
            return of_extended(found, extension, of_jump)

        def moved(lane: TrajectoryNumbers) -> TrajectoryNumbers:
            p = (*lane.parameters, *lane.callback_consts)
            return lane._replace(consts=(), p=p, callback_consts=())

        def extended(lane: TrajectoryNumbers) -> TrajectoryNumbers:
            lane = moved(lane)
            if not held:
                return lane
            (state,) = self.field.out_avals
            parts = [(lane.u0, state.ndim), *((lane.p[i], x.ndim) for i, x in held)]
            return lane._replace(u0=_joined(parts, state.dtype))

        batched = moved(self.batched)
        own = batched.u0 or any(batched.p[i] for i, _ in held)
        shared = moved(self.shared)
        return self.changed(
            extended,
            field=field,
            extension=extension,
            form=form,
            events=events.mapped(changed),
            batched=batched._replace(u0=own),
            before_parameters=n_consts,
            shared=shared._replace(u0=None) if held else shared,
        )

    def with_start(self, of_one: Callable[[Any, Sequence, Any], Any]) -> "Trajectories":
        """The ensemble with the initial states `of_one(u0, numbers, t0)`, a function of the
        previous initial state, of the constants and parameters, and of the start time."""
        u: Any = self.field.jaxpr.invars[0]
        t: Any = self.field.jaxpr.invars[-1]
        avals = [u.aval, *parameters_of(self.field), t.aval]
        batched = [self.batched.u0, *self.batched.parameters, self.batched.t0]

        def changed(lane: TrajectoryNumbers) -> TrajectoryNumbers:
            u0, *numbers, t0 = map(jnp.asarray, (lane.u0, *lane.parameters, lane.t0))
            each = zip((u0, *numbers, t0), avals, batched, strict=True)
            fn = of_one
            if any(x.ndim > a.ndim for x, a, b in each if b):
                axes = [0 if b else None for b in batched]
                fn = jax.vmap(of_one, in_axes=(axes[0], axes[1:-1], axes[-1]))
            return lane._replace(u0=alone(fn, u0, numbers, t0))

        own, given = any(batched), self.shared
        unknown = own or any(x is None for x in (given.u0, *given.parameters, given.t0))
        known = None if unknown else changed(given).u0
        shared = self.shared._replace(u0=known)
        return self.changed(changed, batched=self.batched._replace(u0=own), shared=shared)


_NO_DERIVATIVES = (
    "a JumpProblem has no derivatives, as reactions happen or don't: differentiate prob.ode() or "
    "prob.langevin(), or take numbers for constants, jax.lax.stop_gradient(p)."
)


def _with_jumps_saved(lane: TrajectoryNumbers, saving: Any) -> TrajectoryNumbers:
    """The numbers of reactions, whose steps end at the saved times, and are as long as the time
    span where the user doesn't say it."""
    lane = jax.tree.map(lambda x: constant(x, _NO_DERIVATIVES) if is_tracer(x) else x, lane)
    dt = lane.t1 - lane.t0 if lane.dt is None else lane.dt
    if saving.mode != "times":
        return lane._replace(dt=dt)
    times = jnp.asarray(lane.saveat)
    if lane.tstops is not None:
        stops = jnp.asarray(lane.tstops)
        lead = jnp.broadcast_shapes(times.shape[:-1], stops.shape[:-1])
        both = (jnp.broadcast_to(x, (*lead, x.shape[-1])) for x in (times, stops))
        times = jnp.concatenate(list(both), axis=-1)
    # (NaN, which also ends a row, is infinity among known times.)
    return lane._replace(dt=dt, tstops=jnp.sort(jnp.where(jnp.isnan(times), jnp.inf, times)))


def _batched_with_jumps_saved(batched: TrajectoryNumbers, saving: Any) -> TrajectoryNumbers:
    """Which of the numbers of `_with_jumps_saved` differ between trajectories."""
    dt = bool(batched.t0 or batched.t1) if batched.dt is None else batched.dt
    if saving.mode != "times":
        return batched._replace(dt=dt)
    return batched._replace(dt=dt, tstops=bool(batched.tstops or batched.saveat))


def _with_constants_behind(program: Program, numbers: Sequence) -> Program:
    avals = tuple((x.shape, x.dtype) for x in numbers)
    return with_constants_around(program, (), avals)


def _joined(parts: Sequence[tuple[Any, int]], dtype: DTypeLike) -> Array:
    """One vector for each trajectory, from arrays that are each paired with their number of axes
    for one trajectory."""
    flat, lead = [], ()
    for x, ndim in parts:
        x = jnp.asarray(x, dtype)
        before = x.shape[: x.ndim - ndim]
        flat.append(x.reshape(*before, -1))
        lead = before or lead
    return jnp.concatenate([jnp.broadcast_to(x, (*lead, x.shape[-1])) for x in flat], axis=-1)
