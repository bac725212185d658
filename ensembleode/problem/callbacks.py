"""Events: changes of a trajectory at times that its solution decides, at known times, or after
every step.

The names, signatures and meanings are SciML's: a `condition(u, t, integrator)`; and an `affect`,
which gets an integrator and returns another, made by [`remake`][ensembleode.remake] and
[`terminate`][ensembleode.terminate].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..ground.state_tree import as_parameters
from ..tracing.program import is_tracer
from .number_table import check_stops
from .options import check_count, check_function, positions_to_save
from .saving_callback import SavingCallback


class LeftRootFind:
    """The event is at the last time before the root, at which the condition still has its old
    sign."""


class RightRootFind:
    """The event is at the first time after the root."""


class NoRootFind:
    """The root is not searched: the event is at the point where the sign change was noticed, which
    is the end of the step or one of the `interp_points` within it."""


class Integrator(eqx.Module):
    """A trajectory as conditions and affects see it: an immutable record, a pytree.

    - `u`: the state, as in the problem; `p`: the parameters; `t`: the time.
    - `uprev`, `tprev`: the state and the time at the start of the step; None for the condition of a
        continuous callback, which is evaluated at any time.
    - `du`: the derivative `f(u, p, t)`, which is evaluated only if it is asked for.
    - `sign`, `mask`: for an affect, how the condition of its callback crosses zero at this time: 1
        where it rises, -1 where it falls; and whether it does. With a `VectorContinuousCallback`
        both are `[length]`, and `sign` is 0 where a condition doesn't cross. For other callbacks
        they are 1 and True. An affect that asked the condition again would get the sign that it had
        before (with `LeftRootFind`), or one that rounding made. None for a condition.

    Two integrators can be combined: `jax.tree.map(functools.partial(jnp.where, mask), a, b)`.
    """

    u: PyTree
    p: PyTree
    t: jax.Array
    uprev: PyTree = None
    tprev: jax.Array | None = None
    sign: Any = None
    # Whether the trajectory ends here, or an `AffectOutcome` where the affect may not converge.
    _ends: Any = eqx.field(default_factory=lambda: np.bool_(False))
    _f: Callable | None = eqx.field(static=True, default=None)

    @property
    def du(self) -> PyTree:
        """The derivative of the state, `f(u, p, t)`, like `u`."""
        assert self._f is not None
        return self._f(self.u, self.p, self.t)

    @property
    def mask(self) -> Any:
        """Whether each condition of the callback crosses zero: `sign != 0`."""
        return None if self.sign is None else self.sign != 0

    def remade(self, changes: dict[str, Any]) -> "Integrator":
        """The integrator with another state or other parameters; `remake` calls it.

        **Arguments:** `changes`: `u` and `p`, by name.

        **Raises:** `TypeError` for anything else, which an affect can't change.
        """
        if unknown := sorted(set(changes) - {"u", "p"}):
            raise TypeError(
                f"an affect changes u and p of the integrator, not {unknown[0]}: write "
                "eo.remake(integrator, u=..., p=...)."
            )
        if "p" in changes:
            changes = changes | {"p": as_parameters(changes["p"], self.t.dtype)}
        return dataclasses.replace(self, **changes)


def terminate(integrator: Integrator) -> Integrator:
    """The integrator of a trajectory that ends here, with `ReturnCode.Terminated`. An affect can
    return it, or it can be an affect itself.

    **Arguments:** `integrator`: the one that the affect got, or one made from it.

    **Raises:** `TypeError` for anything else.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> down = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, eo.terminate)
    >>> prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 10.0), callback=down)
    >>> sol = eo.solve(prob, abstol=1e-9, reltol=1e-9)
    >>> sol.retcode.name, f"{sol.events.t[0]:.6f}"
    ('Terminated', '0.693147')
    """
    if not isinstance(integrator, Integrator):
        raise TypeError(f"terminate takes an integrator, got {type(integrator).__name__}.")
    return dataclasses.replace(integrator, _ends=np.bool_(True))


class _Continuous(eqx.Module):
    condition: Callable
    affect: Callable | None
    rootfind: type = eqx.field(static=True)
    interp_points: int = eqx.field(static=True)
    save_positions: tuple[bool, bool] = eqx.field(static=True)
    repeat_nudge: float = eqx.field(static=True)
    dtrelax: float = eqx.field(static=True)

    def _set(
        self, condition, affect, rootfind, interp_points, save_positions, repeat_nudge, dtrelax
    ) -> None:
        name = type(self).__name__
        check_function(name, "condition", condition, "(u, t, integrator)")
        if rootfind not in (LeftRootFind, RightRootFind, NoRootFind):
            raise ValueError(
                f"rootfind of {name} must be eo.LeftRootFind, eo.RightRootFind or eo.NoRootFind, "
                f"got {rootfind!r}."
            )
        whole = isinstance(interp_points, int | np.integer) and not isinstance(interp_points, bool)
        if not whole or interp_points < 0:
            raise ValueError(
                f"interp_points of {name} must be a whole number, zero or more, got "
                f"{interp_points!r}."
            )
        if not 0 < repeat_nudge < 1:
            raise ValueError(
                f"repeat_nudge of {name} must be between 0 and 1, got {repeat_nudge!r}."
            )
        if not 0 < dtrelax < float("inf"):
            raise ValueError(f"dtrelax of {name} must be a positive number, got {dtrelax!r}.")
        self.condition, self.affect = condition, affect
        self.rootfind, self.interp_points = rootfind, int(interp_points)
        self.save_positions = positions_to_save(name, save_positions)
        self.repeat_nudge, self.dtrelax = float(repeat_nudge), float(dtrelax)


class ContinuousCallback(_Continuous):
    """An event where `condition(u, t, integrator)`, a real number, crosses zero.

    **Arguments:**

    - `condition`: a real number. At the end of every accepted step, its sign is compared with that
        at the start; where both are the same, signs within the step are looked at, too.
    - `affect`: `affect(integrator) -> integrator`, called where the condition rises through zero.
        None: nothing is done there.
    - `affect_neg`: the same where it falls; by default `affect`.
    - `rootfind`: the time of the event: `eo.LeftRootFind`, the last floating-point number before
        the root; `eo.RightRootFind`, the first one after it; or `eo.NoRootFind`.
    - `interp_points`: the number of points of a step, including both ends, at which the condition
        is looked at, so that pairs of roots are seen; 0: only at the end.
    - `save_positions`: with `save_everystep=True`, whether the states before and after the event
        are rows (the one before always is, as the end of a step). `(False, False)`: the events of
        this callback are not in `sim.events`, either, and take no room there.
    - `repeat_nudge`: where the affect leaves the condition at its root, the sign at the start of
        the next step is taken after this part of the step.
    - `dtrelax`: the next step is this many times as long as the step that the event cut short.

    **Raises:** `TypeError` and `ValueError`, naming the argument.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> def bounce(integrator):
    ...     height, speed = integrator.u
    ...     return eo.remake(integrator, u=jnp.array([height, -0.9 * speed]))
    >>> floor = eo.ContinuousCallback(lambda u, t, integrator: u[0], None, bounce)
    >>> def f(u, p, t):
    ...     return jnp.array([u[1], -9.8])
    >>> prob = eo.ODEProblem(f, [50.0, 0.0], (0.0, 15.0), callback=floor)
    >>> sol = eo.solve(prob, abstol=1e-8, reltol=1e-8)
    >>> [f"{t:.3f}" for t in sol.events.t]
    ['3.194', '8.944', '14.119']
    """

    affect_neg: Callable | None

    def __init__(
        self,
        condition: Callable,
        affect: Callable | None,
        affect_neg: Callable | Literal["affect"] | None = "affect",
        *,
        rootfind: type = LeftRootFind,
        interp_points: int = 10,
        save_positions: tuple[bool, bool] = (True, True),
        repeat_nudge: float = 0.01,
        dtrelax: float = 1.0,
    ):
        affect_neg = affect if isinstance(affect_neg, str) else affect_neg
        if affect is None and affect_neg is None:
            raise ValueError(
                "ContinuousCallback has neither an affect nor an affect_neg: give one of the two."
            )
        for name, fn in (("affect", affect), ("affect_neg", affect_neg)):
            if fn is not None:
                check_function("ContinuousCallback", name, fn, "(integrator)")
        self._set(condition, affect, rootfind, interp_points, save_positions, repeat_nudge, dtrelax)
        self.affect_neg = affect_neg


class VectorContinuousCallback(_Continuous):
    """Events where one of several conditions crosses zero.

    **Arguments:** those of [`ContinuousCallback`][ensembleode.ContinuousCallback], except for:

    - `condition`: `condition(u, t, integrator)`, real numbers `[length]`.
    - `affect`: `affect(integrator, mask) -> integrator`. `mask`, integers `[length]`, says how each
        condition crosses zero at this time: 1 where it rises, -1 where it falls, 0 where it does
        not cross (the integrator's `sign`).
    - `length`: the number of conditions.

    **Raises:** `TypeError` and `ValueError`, naming the argument.
    """

    length: int = eqx.field(static=True)

    def __init__(
        self,
        condition: Callable,
        affect: Callable,
        length: int,
        *,
        rootfind: type = LeftRootFind,
        interp_points: int = 10,
        save_positions: tuple[bool, bool] = (True, True),
        repeat_nudge: float = 0.01,
        dtrelax: float = 1.0,
    ):
        check_function("VectorContinuousCallback", "affect", affect, "(integrator, mask)")
        self.length = check_count("length of VectorContinuousCallback", length)
        self._set(condition, affect, rootfind, interp_points, save_positions, repeat_nudge, dtrelax)


class StepLimit(NamedTuple):
    """The request that the state should not be negative at the end of the next step: see
    `PositiveDomain`."""

    abstol: Any
    scalefactor: float


class DiscreteCallback(eqx.Module):
    """An event at the end of every accepted step where `condition(u, t, integrator)` is true.

    **Arguments:**

    - `condition`: a boolean. It is evaluated after the affects of continuous callbacks, and of
        earlier discrete callbacks, at the same time.
    - `affect`: `affect(integrator) -> integrator`.
    - `save_positions`: see [`ContinuousCallback`][ensembleode.ContinuousCallback].

    **Raises:** `TypeError` and `ValueError`, naming the argument.
    """

    condition: Callable
    affect: Callable
    save_positions: tuple[bool, bool] = eqx.field(static=True)
    # See `plan.events.TracedDiscrete`.
    rest: ClassVar[bool | str] = False

    def __init__(
        self,
        condition: Callable,
        affect: Callable,
        *,
        save_positions: tuple[bool, bool] = (True, True),
    ):
        name = "DiscreteCallback"
        check_function(name, "condition", condition, "(u, t, integrator)")
        check_function(name, "affect", affect, "(integrator)")
        self.condition, self.affect = condition, affect
        self.save_positions = positions_to_save(name, save_positions)

    @property
    def limit(self) -> StepLimit | None:
        """The limit on the next step, if the callback has one."""
        return None

    @property
    def is_kept(self) -> bool:
        """Whether solutions record its events."""
        return any(self.save_positions)


class PresetTimeCallback(eqx.Module):
    """An event at known times, at which steps end exactly: a dose, for example.

    **Arguments:**

    - `times`: an array, in any order. A time that occurs twice counts once, and times outside of
        `tspan` are ignored. The times may be traced or computed from `p`, and `prob_func` may give
        each trajectory its own: equally many for all, filled up with inf.
    - `affect`: `affect(integrator) -> integrator`. At the start of `tspan` it changes the state
        with which the solution begins; that is no event of `sim.events`.
    - `save_positions`: see [`ContinuousCallback`][ensembleode.ContinuousCallback].

    **Raises:** `TypeError` and `ValueError`, naming the argument.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> dose = lambda integrator: eo.remake(integrator, u=integrator.u + 10.0)
    >>> doses = eo.PresetTimeCallback([12.0, 24.0], dose)
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [10.0], (0.0, 36.0), 0.1, callback=doses)
    >>> sol = eo.solve(prob)
    >>> sol.events.t.tolist(), f"{sol.u[-1, 0]:.2f}"
    ([12.0, 24.0], '4.19')
    """

    times: Any
    affect: Callable
    save_positions: tuple[bool, bool] = eqx.field(static=True)

    def __init__(
        self, times: Any, affect: Callable, *, save_positions: tuple[bool, bool] = (True, True)
    ):
        name = "PresetTimeCallback"
        if not any(map(is_tracer, jax.tree.leaves(times))):
            check_stops(f"times of {name}", times)
            if np.ndim(times) > 1:
                raise ValueError(
                    f"times of {name} must be those of one trajectory, got the shape "
                    f"{np.shape(times)}; let prob_func pick a row of them."
                )
        check_function(name, "affect", affect, "(integrator)")
        self.times, self.affect = times, affect
        self.save_positions = positions_to_save(name, save_positions)


class PeriodicCallback(eqx.Module):
    """An event every `dt`, counted from the start of `tspan`.

    The times are `t0 + phase + i dt`, up to the end of `tspan`. At the end itself nothing is done,
    except with `final_affect`.

    **Arguments:**

    - `affect`: `affect(integrator) -> integrator`.
    - `dt`: the period, a positive Python number. It has to be known, and so has `tspan`, to count
        the times; where they are not, use `PresetTimeCallback(t0 + dt * jnp.arange(1, n), affect)`.
    - `phase`: the time from the start to the first event, positive; with zero, the first event is
        after one period.
    - `initial_affect`: whether the affect is also called at the start, as in
        [`PresetTimeCallback`][ensembleode.PresetTimeCallback].
    - `final_affect`: whether it is also called at the end of `tspan`.
    - `save_positions`: see [`ContinuousCallback`][ensembleode.ContinuousCallback].

    **Raises:** `TypeError` and `ValueError`, naming the argument.
    """

    affect: Callable
    dt: float = eqx.field(static=True)
    phase: float = eqx.field(static=True)
    initial_affect: bool = eqx.field(static=True)
    final_affect: bool = eqx.field(static=True)
    save_positions: tuple[bool, bool] = eqx.field(static=True)

    def __init__(
        self,
        affect: Callable,
        dt: float,
        *,
        phase: float = 0.0,
        initial_affect: bool = False,
        final_affect: bool = False,
        save_positions: tuple[bool, bool] = (True, True),
    ):
        name = "PeriodicCallback"
        check_function(name, "affect", affect, "(integrator)")
        for argument, value in (("dt", dt), ("phase", phase)):
            if is_tracer(value):
                raise TypeError(
                    f"{argument} of {name} is traced, so how many times there are is not known: "
                    "use eo.PresetTimeCallback(t0 + dt * jnp.arange(1, n), affect)."
                )
        if not 0 < dt < float("inf"):
            raise ValueError(f"dt of {name} must be a positive number, got {dt!r}.")
        if not 0 <= phase < float("inf"):
            raise ValueError(f"phase of {name} must be zero or a positive number, got {phase!r}.")
        self.affect, self.dt, self.phase = affect, float(dt), float(phase)
        self.initial_affect, self.final_affect = bool(initial_affect), bool(final_affect)
        self.save_positions = positions_to_save(name, save_positions)


def TerminateSteadyState(
    abstol: float | None = None, reltol: float | None = None, *, min_t: float | None = None
) -> DiscreteCallback:
    """A callback that ends a trajectory, with `ReturnCode.Terminated`, after the first step at
    which it is at rest.

    **Arguments:**

    - `abstol`, `reltol`: a trajectory is at rest if every component of the derivative is at most
        `abstol`, or at most `reltol` times the component of the state. By default 1e-8 and 1e-6, as
        in Julia, but at least a hundred rounding errors: both are 1.2e-5 in single precision.
    - `min_t`: the trajectory doesn't end before this time.

    The end, which is `sol.u[-1]`, `sim.end.u` and the last of the events, is the state of the solve
    there, as near to rest as the tolerances ask for. Its derivatives, though, are those of the
    state at rest, by the implicit function theorem (not with `engine="julia"`). They are the
    solve's own where Newton's method finds no such state, where `f` still changes with time, and
    where another callback ended the trajectory. [`steady_state`][ensembleode.steady_state] returns
    the state at rest itself, and says whether there is one.

    >>> import ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: p - u, [0.0], (0.0, 1e6), 2.0)
    >>> sol = eo.solve(prob, callback=eo.TerminateSteadyState())
    >>> sol.retcode.name, f"{sol.u[-1, 0]:.4f}", bool(sol.t[-1] < 30)
    ('Terminated', '2.0000', True)
    """

    def at_rest(x: jax.Array) -> jax.Array:
        noise = 100 * float(jnp.finfo(x.dtype).eps)
        absolute = max(1e-8, noise) if abstol is None else abstol
        relative = max(1e-6, noise) if reltol is None else reltol
        return jnp.maximum(absolute, relative * abs(x))

    def is_at_rest(u: PyTree, t: jax.Array, integrator: Integrator) -> jax.Array:
        rates = zip(jax.tree.leaves(integrator.du), jax.tree.leaves(u), strict=True)
        calm = [jnp.all(abs(du) <= at_rest(x)) for du, x in rates]
        if min_t is not None:
            calm.append(t >= min_t)
        return functools.reduce(jnp.logical_and, calm)

    return _AtRest(is_at_rest, terminate)


class _AtRest(DiscreteCallback):
    rest: ClassVar[bool | str] = True


class _Settling(_AtRest):
    rest: ClassVar[bool | str] = "settled"


class CallbackSet(eqx.Module):
    """Several callbacks, or sets of them; `sim.events.which` counts them from 0 in this order.

    In a step, the earliest event of the continuous callbacks acts. If several are at that time, to
    rounding, each acts once, in this order. Then the discrete callbacks act, in this order.

    **Arguments:** `callbacks`: the callbacks.

    **Raises:** `TypeError` for an object that is no callback.
    """

    callbacks: tuple

    def __init__(self, *callbacks: Any):
        self.callbacks = tuple(x for y in callbacks for x in all_of(y))


def settling(callback: Any) -> CallbackSet:
    """The callbacks with which a solve replaces the state at rest by the root of the field: those
    given, and a `TerminateSteadyState` if none of them is one."""
    every = all_of(callback)
    if not any(isinstance(x, _AtRest) for x in every):
        every = (*every, TerminateSteadyState())
    return CallbackSet(
        *(_Settling(x.condition, x.affect) if isinstance(x, _AtRest) else x for x in every)
    )


def all_of(callback: Any) -> tuple:
    """The callbacks in a callback, in a set, or in None.

    **Raises:** `TypeError` for anything else.
    """
    if callback is None:
        return ()
    if isinstance(callback, CallbackSet):
        return callback.callbacks
    if isinstance(callback, _KINDS):
        return (callback,)
    *most, last = (f"eo.{kind.__name__}" for kind in _KINDS)
    raise TypeError(
        f"callback must be an {', '.join(most)}, {last} or an eo.CallbackSet of several, got "
        f"{type(callback).__name__}."
    )


_KINDS = (
    ContinuousCallback,
    VectorContinuousCallback,
    DiscreteCallback,
    PresetTimeCallback,
    PeriodicCallback,
    SavingCallback,
)
