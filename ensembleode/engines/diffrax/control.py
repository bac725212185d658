"""Step-size control within diffrax: this library's controllers and norms; and, with any controller,
the end of trajectories that can't go on. diffrax always integrates forwards in time."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optimistix
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ...ground.state_tree import for_both_parts
from ...plan.known_times import differing
from ...plan.plan import Plan
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...solvers import step_size, time
from ...solvers.arithmetic import ARRAYS
from ...solvers.controllers import AbstractController
from ...solvers.norms import AbstractNorm, RMSNorm
from ..compiled.xla.stopping import stopped
from . import implicit


def norm_of_tree(norm: AbstractNorm) -> Callable:
    """The norm of a pytree, in the form that diffrax wants."""
    return lambda tree: norm(ARRAYS, tuple(jtu.tree_leaves(tree)))


class ErrorEstimates(NamedTuple):
    """Several estimates of a step's error, each with the state's shape; the largest one counts."""

    each: tuple


def _largest(estimates: ErrorEstimates, controller: Any, *states: Any) -> Array:
    """The estimate whose norm in units of the controller's tolerances is the largest."""

    def size(estimate: Array) -> Array:
        def scaled(e, *at):
            largest = functools.reduce(jnp.maximum, map(jnp.abs, at))
            return e / (controller.atol + controller.rtol * largest)

        with jax.numpy_dtype_promotion("standard"):
            return controller.norm(jax.lax.stop_gradient(jtu.tree_map(scaled, estimate, *states)))

    found, most = estimates.each[0], size(estimates.each[0])
    for estimate in estimates.each[1:]:
        this = size(estimate)
        found = jtu.tree_map(functools.partial(jnp.where, this > most), estimate, found)
        most = jnp.maximum(this, most)
    return found


def _absolute(tree: PyTree) -> Array | ErrorEstimates:
    """The absolute values of complex numbers, of which each array has all real and then all
    imaginary parts."""
    return jtu.tree_map(lambda x: step_size.looked_at(ARRAYS, (x,), None, True)[0], tree)


def _with_tolerances_of_parts(controller: Any) -> Any:
    """A controller that the user gave, with the tolerances of complex numbers for their parts."""
    tol = (controller.atol, controller.rtol)
    found = tuple(for_both_parts(x) if jnp.ndim(x) else x for x in tol)
    return eqx.tree_at(lambda x: (x.atol, x.rtol), controller, found)


def _of_absolute_values(controller: Any) -> Any:
    """A controller with the tolerances of complex numbers in place of those of their parts."""
    if not hasattr(controller, "atol"):
        return controller
    tol = step_size.of_complex(step_size.Tolerances(controller.atol, controller.rtol))
    return eqx.tree_at(lambda x: (x.atol, x.rtol), controller, tuple(tol))


class OwnController(diffrax.AbstractAdaptiveStepSizeController):
    """One of this library's step-size controllers as a controller of diffrax."""

    controller: AbstractController = eqx.field(static=True)
    own_norm: AbstractNorm = eqx.field(static=True)
    order: int = eqx.field(static=True)  # that of the method, for the first step
    rtol: Array  # (These three are named as diffrax's implicit methods look for them.)
    atol: Array
    norm: Callable
    bounds: time.StepBounds
    in_parts: bool = eqx.field(static=True, default=False)  # (see `Plan.in_parts`)

    def wrap(self, direction):
        return self  # sizes are positive

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        h, span = dt0, jnp.asarray(t1 - t0)
        if h is None:
            structure = jtu.tree_structure(y0)

            def field(y, t):
                k = func(terms, t, jtu.tree_unflatten(structure, list(y)), args)
                # (Each part of an equation in two parts has its own derivative.)
                parts = [k] if jtu.tree_structure(k) == structure else k
                return tuple(map(sum, zip(*map(jtu.tree_leaves, parts), strict=True)))

            y, about = tuple(jtu.tree_leaves(y0)), (self.own_norm, step_size.power_of_ten, field)
            at = t0, y, field(y, t0), span, self._tol, self.order, self.bounds.dtmax
            # (A solve backwards has further leaves.)
            in_parts = self.in_parts and len(y) == 1
            with jax.numpy_dtype_promotion("standard"):
                h = step_size.initial_step(ARRAYS, *about, *at, None, in_parts)
        h = self.bounds.first(ARRAYS, jax.lax.stop_gradient(jnp.abs(h)), t0, span)
        h = h.astype(span.dtype)
        memory = tuple(jnp.asarray(np.float32(x)) for x in self.controller.initial_memory())
        return t0 + h, (memory, jnp.array(True), t1, span)

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        memory, is_first, end, span = controller_state
        at = [jax.lax.stop_gradient(tuple(jtu.tree_leaves(x))) for x in (y_error, y0, y1_candidate)]
        with jax.numpy_dtype_promotion("standard"):
            error = step_size.scaled(ARRAYS, self._tol, *at)
            squared = self.own_norm.squared(ARRAYS, error)
        accepted = self.controller.accepts(ARRAYS, squared, memory)
        size = jax.lax.stop_gradient(t1 - t0)
        next_h, memory = self.controller.next_step(
            ARRAYS, size, squared, memory, accepted, is_first
        )
        next_t0 = jnp.where(accepted, t1, t0)
        short = time.underflows(ARRAYS, self.bounds, next_h, next_t0, end, span, accepted)
        short = short & (next_t0 < end)
        results: Any = diffrax.RESULTS
        result = results.where(short, results.dt_min_reached, results.successful)
        next_t1 = next_t0 + self.bounds.bounded(ARRAYS, next_h)
        state = (memory, is_first & ~accepted, end, span)
        return accepted, next_t0, next_t1, jnp.array(False), state, result

    @property
    def _tol(self) -> step_size.Tolerances:
        return step_size.Tolerances(self.atol, self.rtol)


class FixedSteps(diffrax.AbstractStepSizeController):
    """Fixed steps that end on the known times; after each of these they are laid out anew."""

    tstops: Array | None  # the known times, `[time]`; None for none
    jumps: Array | None  # those at which `f` jumps, `[time]`; None for none

    def wrap(self, direction):
        return jax.tree.map(lambda x: x * direction, self)

    def _beside(self, direction: int) -> Array:
        """The times just after or before the jumps, with the tangents of the jumps' times."""
        fixed = jax.lax.stop_gradient(self.jumps)
        return self.jumps + (time.next_time(ARRAYS, fixed, direction) - fixed)

    def _end(self, t: Any, anchor: Any, number: Array, end: Any, dt: Array) -> tuple[Array, Array]:
        """The end of a step from `t`, and the end of the stretch of time from `anchor` on."""
        tables = [] if self.tstops is None else [self.tstops]
        if self.jumps is not None:
            # (A step ends before a jump.)
            tables.append(self._beside(-1))
        ahead = [jnp.min(jnp.where(x > t, x, end)) for x in tables]
        stop = time.end_of_stretch(ARRAYS, ahead, end, 1)
        return time.fixed_step(ARRAYS, anchor, stop, t, dt, number)[0], stop

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        number = jnp.zeros((), jnp.int32)
        first, stop = self._end(t0, t0, number, t1, dt0)
        return first, (t0, number, stop, t1, dt0)

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        anchor, number, stop, end, dt = controller_state
        arrived, jumped, t = t1 >= stop, jnp.array(False), t1
        if self.jumps is not None:
            here = t1 == self._beside(-1)
            jumped = jnp.any(here)
            t = jnp.where(jumped, jnp.max(jnp.where(here, self._beside(1), -jnp.inf)), t1)
        anchor, number = jnp.where(arrived, t, anchor), jnp.where(arrived, 0, number + 1)
        next_t1, stop = self._end(t, anchor, number, end, dt)
        state = anchor, number, stop, end, dt
        return jnp.array(True), t, next_t1, jumped, state, diffrax.RESULTS.successful


@dataclasses.dataclass(frozen=True)
class ControlledComponents:
    """The components of a state that step-size control looks at, which are the first ones."""

    shape: tuple[int, ...]  # of these as a state
    whole: tuple[int, ...]  # of the state with all components

    @classmethod
    def of_plan(cls, plan: Plan) -> "ControlledComponents | None":
        """The controlled components of a solve; None where all are controlled."""
        whole = shape = plan.state.shape
        if math.prod(whole) == plan.controlled:
            return None
        if plan.extension is not None:
            shape = plan.extension.user.shape
        while math.prod(shape) > plan.controlled:
            shape = shape[1:]  # tangents
        return cls(shape, whole)

    def first(self, tree: PyTree) -> Array:
        """These components of states."""
        n = math.prod(self.shape)
        return jtu.tree_map(lambda x: x.reshape(-1)[:n].reshape(self.shape), tree)

    def tolerance(self, value: Array) -> Array:
        """A tolerance of these components."""
        return self.first(value) if jnp.ndim(value) else value

    def of_field(self, func: Callable) -> Callable:
        """The derivative of these components, which depends on no others."""

        def at(terms: Any, t: Any, y: PyTree, args: PyTree) -> PyTree:
            others = jnp.zeros(math.prod(self.whole) - y.size, y.dtype)
            whole = jnp.concatenate([y.reshape(-1), others]).reshape(self.whole)
            return self.first(func(terms, t, whole, args))

        return at


def _of_user(plan: Plan, norm: Callable) -> Callable:
    """The norm without the integrals, which are behind the user's components."""
    extension = plan.extension
    if extension is None:
        return norm

    def components(x: Any) -> Any:
        return x.reshape(-1, extension.size)[:, : extension.controlled]

    return lambda tree: norm(jtu.tree_map(components, tree))


NONFINITE: Any = diffrax.RESULTS.nonfinite_input
# Results of diffrax's that have no other use here.
STOPPED: Any = diffrax.RESULTS.event_occurred
DIVERGED: Any = diffrax.RESULTS.conlim


class Controller(diffrax.AbstractAdaptiveStepSizeController):
    """Any step-size controller, which ends a trajectory that can't go on with a return code.

    It always has the class of diffrax's adaptive controllers, from which implicit solvers read
    `rtol`, `atol` and `norm`. `controlled`: the components that it looks at; None for all.
    `norm_of_state`: the norm of these, which may not exceed `max_norm`.
    """

    inner: diffrax.AbstractStepSizeController
    rtol: ArrayLike
    atol: ArrayLike
    norm: Callable
    dt: Array | None
    adaptive: bool
    stop: Array | None
    norm_of_state: Callable
    max_norm: Array | None
    controlled: ControlledComponents | None = eqx.field(static=True, default=None)
    # Whether a state has the parts of complex numbers; `inner` gets their absolute values.
    in_parts: bool = eqx.field(static=True, default=False)

    def wrap(self, direction):
        return eqx.tree_at(lambda s: s.inner, self, self.inner.wrap(direction))

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        # dt is passed here, and not as dt0, because diffrax checks dt0 by a host callback.
        dt0 = self.dt
        if self.controlled is not None:
            y0, func = self.controlled.first(y0), self.controlled.of_field(func)
        first, state = self.inner.init(terms, t0, t1, y0, dt0, args, func, error_order)
        # A first step of length zero stands for a trajectory that can't begin.
        usable = jnp.isfinite(first) & implicit.finite(y0)
        # Of the controllers that get here, only this library's evaluate `f` for the first step.
        nf = 2 if dt0 is None and isinstance(self.inner, OwnController) else 0
        work = implicit.StepWork(*(jnp.full((), x) for x in (nf, 0, 0, 0)))
        return jnp.where(usable, first, t0), (state, jnp.asarray(0), jnp.asarray(t1 - t0), work)

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        controller_state, failures, span, work = controller_state
        if isinstance(y_error, implicit.CountedError):
            work = jax.tree.map(lambda x, new: x + new.astype(x.dtype), work, y_error.work)
            y_error = y_error.error
        if self.controlled is not None:
            y0, y1_candidate, y_error = map(self.controlled.first, (y0, y1_candidate, y_error))
        given: Any = self.inner
        inner, states = given, (y0, y1_candidate)
        if self.in_parts and eqx.is_array(y0):
            y0, y1_candidate, y_error = map(_absolute, (y0, y1_candidate, y_error))
            inner = _of_absolute_values(inner)
        y1, error = y1_candidate, y_error
        usable: Any = None
        if self.adaptive:
            # The infinite error of an infinite state would become NaN, and so would the next step.
            usable = implicit.finite(y1_candidate) & implicit.finite(y_error)
            if isinstance(y_error, ErrorEstimates):
                y_error = _largest(y_error, inner, y0, y1_candidate)
            y1 = jtu.tree_map(lambda a, b: jnp.where(usable, a, b), y1_candidate, y0)
            error = jtu.tree_map(lambda e: jnp.where(usable, e, jnp.inf), y_error)
        keep, next_t0, next_t1, jump, state, result = inner.adapt_step_size(
            t0, t1, y0, y1, args, error, error_order, controller_state
        )
        lost = ~(t1 > t0)
        if self.adaptive:
            # A trial step to infinity is rejected like any step with a large error, and tried
            # shorter until time can't resolve it, or rounding makes it no shorter. Near zero,
            # diffrax's controllers go on until the numbers underflow; ours end before.
            is_ours = isinstance(self.inner, OwnController)
            spacing = time.min_step(ARRAYS, next_t0, span if is_ours else 0.0)
            no_shorter = ~keep & (next_t1 >= t1) & (t1 - t0 <= 32 * spacing)
            stuck = (next_t1 - next_t0 <= spacing) | no_shorter
            failures = step_size.count_failures(ARRAYS, failures, ~usable, t1 - t0, span)
            # Computed only when it is needed.
            calm = jax.lax.cond(
                eqxi.unvmap_any(stuck),
                lambda: _calm(*states, given.atol),
                lambda: jnp.ones_like(stuck),
            )
            calm = calm & usable
            lost = lost | (stuck & ~calm) | (failures >= step_size.MOST_FAILURES)
            result = diffrax.RESULTS.where(stuck & calm, diffrax.RESULTS.dt_min_reached, result)
        else:
            lost = lost | ~implicit.finite(y1_candidate)
            if self.dt is not None:
                # (diffrax extends a step to an end of the span that is just beyond it.)
                stretched = t1 - t0 > time.STRETCH * self.dt
                keep = keep & ~stretched
                result = diffrax.RESULTS.where(stretched, diffrax.RESULTS.dt_min_reached, result)
        keep = keep & ~lost
        next_t0 = jnp.where(keep, next_t0, t0)
        result = diffrax.RESULTS.where(lost, NONFINITE, result)
        if self.max_norm is not None:
            with jax.numpy_dtype_promotion("standard"):
                in_units = jtu.tree_map(lambda x: x / self.max_norm, y1_candidate)
                is_far = keep & (self.norm_of_state(in_units) > 1)
            result = diffrax.RESULTS.where(is_far, DIVERGED, result)
        if self.stop is not None:
            result = diffrax.RESULTS.where(stopped(self.stop, t1), STOPPED, result)
        return keep, next_t0, next_t1, jump, (state, failures, span, work), result


def controller_for(plan: Plan, lane: TrajectoryNumbers) -> Any:
    method, controlled = plan.method.value, ControlledComponents.of_plan(plan)
    dt = None if lane.dt is None else jnp.abs(lane.dt)
    inner: Any = method.controller
    rtol, atol = whole = lane.reltol, lane.abstol
    if controlled is not None:
        rtol, atol = map(controlled.tolerance, whole)
    norm: Any = optimistix.rms_norm if method.norm is None else norm_of_tree(method.norm)
    if inner is None and method.adaptive:
        bounds = {"dtmin": lane.dtmin, "dtmax": lane.dtmax, "force_dtmin": lane.dtmin is None}
        inner = diffrax.PIDController(rtol=rtol, atol=atol, norm=norm, **bounds)
    elif isinstance(inner, AbstractController):
        own = method.norm or RMSNorm()
        control = {"controller": inner, "own_norm": own, "order": method.order}
        control |= {"rtol": rtol, "atol": atol, "norm": norm_of_tree(own)}
        bounds = time.StepBounds(lane.dtmin, lane.dtmax)
        inner = OwnController(**control, bounds=bounds, in_parts=plan.in_parts)
    elif inner is None:
        inner = diffrax.ConstantStepSize()
    elif isinstance(inner, diffrax.AbstractAdaptiveStepSizeController):
        inner = _with_tolerances_of_parts(inner) if plan.in_parts else inner
        norm, whole = inner.norm, (inner.rtol, inner.atol)
        if plan.extension is not None:
            whole = tuple(map(plan.extension.tolerance, whole))
    else:
        whole = 1e-3, 1e-6
    limit = norm, lane.max_norm
    norm, adaptive = _of_user(plan, norm), method.adaptive
    tstops, jumps = lane.tstops, lane.d_discontinuities
    jumps = None if jumps is None else _parted(differing(jumps))
    has_stops = not (tstops is None and jumps is None)
    if has_stops and isinstance(inner, diffrax.ConstantStepSize):
        inner, has_stops = FixedSteps(tstops, jumps), False
    look = controlled, plan.in_parts
    controller = Controller(inner, *whole, norm, dt, adaptive, lane.stop, *limit, *look)
    # (diffrax sorts these times in the direction of time.)
    return diffrax.ClipStepSizeController(controller, tstops, jumps) if has_stops else controller


def _parted(times: Array) -> Array:
    """The times in order. Times that are neighbouring numbers, without room for a step between
    them, become one."""
    gaps = jnp.abs(jnp.diff(times)) > _ROOM * jnp.finfo(times.dtype).eps * jnp.abs(times[1:])
    first = jnp.where(gaps, jnp.arange(1, len(times)), 0)
    return times[jax.lax.cummax(jnp.append(jnp.zeros(1, first.dtype), first))]


# In roundings; a step ends before a jump and the next begins behind it.
_ROOM = 4


def _calm(y0: Array, y1: Array, atol: ArrayLike) -> Array:
    """Whether a step too short for time to resolve leaves the state practically unchanged, and
    finite."""
    leaves = zip(jtu.tree_leaves(y0), jtu.tree_leaves(y1), strict=True)
    calm = [jnp.all(~step_size.is_moved(atol, a, b)) for a, b in leaves]
    return functools.reduce(jnp.logical_and, calm)
