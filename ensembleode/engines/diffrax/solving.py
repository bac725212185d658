"""Solving by diffrax: any of its solvers, step-size controllers and adjoints.

The reference that other engines are tested against. What it adds to `diffrax.diffeqsolve`: a
step-size controller that stops a trajectory which became infinite or NaN, or whose step
underflowed, with a return code; NaN where a trajectory did not get to; no host callback.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, get_origin

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optimistix

from ... import sensitivity
from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...dense import inner_nodes
from ...ground.retcode import ReturnCode
from ...solvers import Bosh3, Dopri5, Euler, ExplicitRungeKutta, ODESolver, Tsit5
from ...solvers.arithmetic import Components
from ...solvers.controllers import AbstractController
from ...solvers.method import Attempt, Equations
from ...solvers.norms import AbstractNorm
from ...solvers.step_size import count_failures, is_moved, MOST_FAILURES, Tolerances
from ...solvers.time import min_step, next_time, StepBounds, STRETCH
from ...tracing.program import Static
from ..checks import check_backsolve, check_controller, check_steps, refusal_backwards
from ..compiled.stopping import stopped
from . import implicit
from .control import ARRAYS, norm_of_tree, OwnController


_NONFINITE: Any = diffrax.RESULTS.nonfinite_input
# (Of those that diffrax has, one that it has no use for.)
_STOPPED: Any = diffrax.RESULTS.event_occurred
_IMEX = (diffrax.KenCarp3, diffrax.KenCarp4, diffrax.KenCarp5, diffrax.Sil3)


class _Method(eqx.Module):
    """A diffrax solver with what is fixed about its steps."""

    solver: diffrax.AbstractSolver
    controller: diffrax.AbstractStepSizeController | AbstractController | None
    norm: AbstractNorm | None
    order: int
    adjoint: diffrax.AbstractAdjoint
    adaptive: bool
    imex: bool
    stages: int | None
    fsal: bool
    direction: str
    method: Any


#
# What the engine is asked
#


def refusal(alg: Any, options: dict) -> str | None:
    """Why this engine can't run `alg` with these options; None when it can."""
    sensealg = options["sensealg"]
    if isinstance(sensealg, sensitivity.ReplayAdjoint | sensitivity.GaussAdjoint):
        return f"sensealg={type(sensealg).__name__}() is one of the lanes engine."
    if isinstance(alg, ODESolver):
        if "diffrax" in alg.engines:
            return None
        return f"it runs on {', '.join(alg.engines)}."
    if not isinstance(alg, diffrax.AbstractSolver):
        return "it is neither an ensembleode solver nor a diffrax one."
    if isinstance(alg, _IMEX) or _structure(alg) is diffrax.AbstractTerm:
        return None
    return (
        f"it solves equations of the form {alg.term_structure}, not du/dt = f(u, p, t). Use an ODE "
        "solver, such as Tsit5()."
    )


def known_times_refusal(options: dict) -> str | None:
    """Why known times can't be stepped onto with these options; None when they can."""
    if isinstance(options["stepsize_controller"], diffrax.StepTo):
        return (
            "stepsize_controller=StepTo(...) takes the steps that it is given: put the times there."
        )
    return refusal_backwards(options)


def versions() -> dict[str, str]:
    """Of the packages that do the arithmetic."""
    packages = ("diffrax", "equinox", "lineax", "optimistix")
    return {package: importlib.metadata.version(package) for package in packages}


def method(alg: Any, options: dict, *, has_dt: bool) -> Static:
    """The solver with its options.

    **Raises:** `ValueError` for a fixed step without `dt` or an adaptive one without an error
    estimate; `TypeError` for a wrong `sensealg` or `stepsize_controller`.
    """
    ours = isinstance(alg, ODESolver)
    can_adapt = alg.adaptive if ours else isinstance(alg, diffrax.AbstractAdaptiveSolver)
    label, controller = type(alg).__name__, options["stepsize_controller"]
    adaptive = can_adapt if options["adaptive"] is None else bool(options["adaptive"])
    if controller is not None:
        is_ours = isinstance(controller, AbstractController)
        if not (is_ours or isinstance(controller, diffrax.AbstractStepSizeController)):
            raise TypeError(
                "stepsize_controller must be one such as eo.PIController(), or a diffrax step-size "
                f"controller, got {controller!r}."
            )
        adaptive = is_ours or isinstance(controller, diffrax.AbstractAdaptiveStepSizeController)
        if adaptive:
            check_controller(label, can_adapt, controller)
    check_steps(label, can_adapt, adaptive, has_dt or isinstance(controller, diffrax.StepTo))
    if ours:
        solver = implicit.solver(label, adaptive) if alg.implicit else _solver(type(alg))
    else:
        solver = implicit.with_retries(alg)
    imex = isinstance(alg, _IMEX)
    adjoint, direction = _adjoint(options["sensealg"])
    if isinstance(adjoint, diffrax.BacksolveAdjoint):
        if imex:
            raise ValueError(
                f"sensealg=BacksolveAdjoint() can't be used with {label}; leave it out."
            )
        check_backsolve(options)
    stages, fsal = _cost(solver)
    order, embedded_order = _orders(alg, solver)
    if isinstance(controller, AbstractController):
        controller = controller.for_method(order, embedded_order)
    norm = options["internalnorm"]
    counted = (stages, fsal)
    return Static(
        _Method(
            solver, controller, norm, order, adjoint, adaptive, imex, *counted, direction,
            alg.method if type(alg) in _AS_OURS else None,
        )
    )  # fmt: skip


def _orders(alg: Any, solver: Any) -> tuple[int, int]:
    """Of the method, and of that which it is compared with (or about that)."""
    if isinstance(alg, ExplicitRungeKutta):
        return alg.order, alg.method.embedded_order or alg.order - 1
    if isinstance(alg, ODESolver):
        return alg.order, alg.order - 1
    order = solver.order(diffrax.ODETerm(_zero)) or 1
    return int(order), max(1, int(order) - 1)


def integrate(plan: Plan, lane: Lane) -> Result:
    """Solve one trajectory."""
    method: _Method = plan.method.value
    if method.direction == "reverse":
        label = type(method.adjoint).__name__ + "()"
        return _isolated(sensitivity.reverse_only(lane, label), plan)
    result = _integrate(plan, lane)
    return sensitivity.forward_only(result) if method.direction == "forward" else result


def solve_trajectories(plan: Plan, lanes: Lane, n: int) -> Result:
    """Solve trajectories, all at once."""
    in_axes = jax.tree.map(lambda b: 0 if b else None, plan.batched)
    t = 0 if plan.own_times else None
    out_axes = Result(*[0] * len(Result._fields))._replace(t=t)
    solve = functools.partial(integrate, plan)
    return jax.vmap(solve, in_axes=(in_axes,), out_axes=out_axes, axis_size=n)(lanes)


def interpolant(method: Static) -> Any:
    """See [`Engine.interpolant`][ensembleode.engines.engine.Engine.interpolant]."""
    ours, solver = method.value.method, method.value.solver
    if ours is None and isinstance(solver, diffrax.AbstractERK):
        return _Steps(Static(solver))
    return ours or len(inner_nodes(_degree(solver)))


def _keeps(plan: Plan) -> bool:
    """Whether what is within steps has to be kept, as they are not made again."""
    return isinstance(interpolant(plan.method), int)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The steps of an explicit solver of diffrax, one by one, as a `Method` makes its own."""

    solver: Static

    @property
    def degree(self) -> int:
        return _HIGHEST

    def init(self, xp: Any, equations: Equations, y: Components, t: Any) -> tuple:
        del xp, equations, y, t
        return ()

    def step(
        self, xp: Any, equations: Equations, y: Components, carry: tuple, t: Any, h: Any
    ) -> Attempt:
        del xp
        (start,), solver = y, self.solver.value

        def f(t, u, args):
            del args
            return equations.f((u,), t)[0]

        # (diffrax differentiates by what it is given, and not by what that closes over.)
        terms = diffrax.ODETerm(eqx.filter_closure_convert(f, t, start, None))
        state = solver.init(terms, t, t + h, start, None)
        end, _, dense, _, _ = solver.step(terms, t, t + h, start, None, state, False)
        return Attempt((end,), carry, (), solver.interpolation_cls(t0=t, t1=t + h, **dense))

    def dense(
        self, xp: Any, equations: Equations, y: Components, dense: Any, t: Any, h: Any
    ) -> Any:
        del xp, equations, y, t, h
        return dense

    def interpolate(self, xp: Any, y: Components, dense: Any, h: Any, theta: float) -> Components:
        del xp
        (start,) = y
        return (dense.evaluate(dense.t0 + theta * h).astype(start.dtype),)


# Whose dense output in diffrax is that of our tableau.
_AS_OURS = (Bosh3, Dopri5, Euler, Tsit5)


def _degree(solver: diffrax.AbstractSolver) -> int:
    """Of the polynomial that it interpolates by, at most."""
    return 3 if isinstance(solver, implicit.Method) else _HIGHEST


_HIGHEST = 6  # Dopri8's


def factorises(plan: Plan) -> bool:
    """Whether the steps factorise matrices."""
    return isinstance(plan.method.value.solver, diffrax.AbstractImplicitSolver)


#
# Gradients of failed trajectories
#


@eqx.filter_custom_vjp
def _isolated(lane: Lane, plan: Plan) -> Result:
    """`_integrate`, whose gradient is zero, and never NaN, for a trajectory that failed.

    A loss can mask a failed trajectory, but its zero cotangents times the infinities of the
    backward pass are NaN, and would spread to all through the shared parameters.
    """
    return _integrate(plan, lane)


@_isolated.def_fwd
def _(perturbed, lane, plan):
    diff, rest = eqx.partition(lane, perturbed)

    def solution(diff):
        return eqx.partition(_integrate(plan, eqx.combine(diff, rest)), eqx.is_inexact_array)

    inexact, pullback, counts = jax.vjp(solution, diff, has_aux=True)
    result = eqx.combine(inexact, counts)
    return result, (pullback, inexact, result.retcode)


@_isolated.def_bwd
def _(residuals, cotangents, perturbed, lane, plan):
    del perturbed, lane, plan
    pullback, inexact, retcode = residuals
    cotangents = jax.tree.map(
        lambda x, ct: jnp.zeros_like(x) if ct is None else ct, inexact, Result(*cotangents)
    )
    (gradient,) = pullback(cotangents)
    succeeded = retcode == ReturnCode.Success.value
    return jax.tree.map(lambda g: jnp.where(succeeded, g, jnp.zeros_like(g)), gradient)


#
# Pieces
#


def _integrate(plan: Plan, lane: Lane) -> Result:
    method: _Method = plan.method.value
    field = _Field(plan.field, len(lane.consts))
    # BacksolveAdjoint can't take empty containers.
    args = lane.parameters or None
    terms = diffrax.ODETerm(field)
    if method.imex:
        terms = diffrax.MultiTerm(diffrax.ODETerm(_zero), terms)
    saving = plan.saving
    save = functools.partial(diffrax.SaveAt, controller_state=True)
    saveat, adjoint = save(t0=saving.start, t1=True), method.adjoint
    if saving.mode == "times":
        # diffrax integrates backwards in time by flipping its sign
        sign = jnp.where(lane.t0 < lane.t1, 1, -1).astype(lane.saveat.dtype)
        ts = jnp.where(jnp.isfinite(lane.saveat), lane.saveat, lane.t1) * sign
        saveat, adjoint = save(t1=True), _SaveTimes(adjoint, ts)
    elif saving.mode == "steps":
        saveat = save(t0=saving.start, steps=True, dense=_keeps(plan))
    t0 = lane.t0
    if lane.d_discontinuities is not None:
        # diffrax steps over the others itself.
        direction = jnp.where(lane.t1 < t0, -1, 1).astype(t0.dtype)
        at_start = lane.d_discontinuities[0] == t0
        t0 = jnp.where(at_start, next_time(ARRAYS, jnp.asarray(t0), direction), t0)
    sol = diffrax.diffeqsolve(
        terms,
        method.solver,
        t0,
        lane.t1,
        None,
        lane.u0,
        args,
        saveat=saveat,
        stepsize_controller=_controller(method, lane),
        adjoint=adjoint,
        max_steps=plan.maxiters,
        throw=False,
    )
    return _result(plan, lane, sol)


class _Field(eqx.Module):
    field: Any = eqx.field(static=True)
    n_consts: int = eqx.field(static=True)

    def __call__(self, t, u, args):
        args = args or ()
        return self.field(args[: self.n_consts], u, args[self.n_consts :], t)


def _zero(t: Any, u: Any, args: Any) -> Any:
    del t, args
    return jnp.zeros_like(u)


def _structure(solver: diffrax.AbstractSolver) -> Any:
    structure = solver.term_structure
    return get_origin(structure) or structure


def _adjoint(sensealg: Any) -> tuple[diffrax.AbstractAdjoint, str]:
    """The diffrax adjoint, and the direction of differentiation that it is limited to."""
    if sensealg is None or isinstance(sensealg, sensitivity.RecursiveCheckpointAdjoint):
        checkpoints = None if sensealg is None else sensealg.checkpoints
        return diffrax.RecursiveCheckpointAdjoint(checkpoints), "reverse"
    if isinstance(sensealg, sensitivity.DirectAdjoint):
        return diffrax.DirectAdjoint(), "both"
    if isinstance(sensealg, sensitivity.BacksolveAdjoint):
        return diffrax.BacksolveAdjoint(), "reverse"
    if isinstance(sensealg, sensitivity.ForwardDiffSensitivity):
        return diffrax.ForwardMode(), "forward"
    if isinstance(sensealg, diffrax.AbstractAdjoint):
        reverse = (diffrax.RecursiveCheckpointAdjoint, diffrax.BacksolveAdjoint)
        return sensealg, "reverse" if isinstance(sensealg, reverse) else "both"
    raise TypeError(
        "sensealg must be RecursiveCheckpointAdjoint(), DirectAdjoint(), BacksolveAdjoint(), "
        f"ForwardDiffSensitivity() or a diffrax adjoint, got {sensealg!r}."
    )


@functools.cache
def _solver(cls: type) -> Any:
    return getattr(diffrax, cls.__name__)()


def _cost(solver: Any) -> tuple[int | None, bool]:
    """Stages of a step, None if they can't be counted; whether the last is the next one's first."""
    if isinstance(solver, diffrax.Euler):
        return 1, False
    tableau = getattr(solver, "tableau", None)
    counted = isinstance(solver, diffrax.AbstractERK | implicit.Method)
    if counted and isinstance(tableau, diffrax.ButcherTableau):
        return tableau.num_stages, bool(tableau.fsal)
    return None, False


class _Controller(diffrax.AbstractAdaptiveStepSizeController):
    """Any step-size controller, with a return code when the trajectory can't go on.

    Always of the adaptive kind, so that implicit solvers find their tolerances here when the
    step is fixed, too.
    """

    inner: diffrax.AbstractStepSizeController
    rtol: Any
    atol: Any
    norm: Any
    dt: Any
    adaptive: bool
    stop: Any

    def wrap(self, direction):
        return eqx.tree_at(lambda s: s.inner, self, self.inner.wrap(direction))

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        # dt comes this way, not as dt0, as diffrax checks dt0 by a host callback.
        dt0 = self.dt
        first, state = self.inner.init(terms, t0, t1, y0, dt0, args, func, error_order)
        # A first step of no length stands for a trajectory that can't begin.
        usable = jnp.isfinite(first) & _finite(y0)
        # Of those controllers that are met here, only ours evaluate `f` for the first step.
        nf = jnp.full((), 2 if dt0 is None and isinstance(self.inner, OwnController) else 0)
        return jnp.where(usable, first, t0), (state, jnp.asarray(0), jnp.asarray(t1 - t0), nf)

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        controller_state, failures, span, nf = controller_state
        if isinstance(y_error, implicit.Counted):
            y_error, nf = y_error.error, nf + y_error.nf.astype(nf.dtype)
        y1, error = y1_candidate, y_error
        usable: Any = None
        if self.adaptive:
            # An infinite error of an infinite state would be NaN, and so would be the next step.
            usable = _finite(y1_candidate) & _finite(y_error)
            y1 = jtu.tree_map(lambda a, b: jnp.where(usable, a, b), y1_candidate, y0)
            error = jtu.tree_map(lambda e: jnp.where(usable, e, jnp.inf), y_error)
        keep, next_t0, next_t1, jump, state, result = self.inner.adapt_step_size(
            t0, t1, y0, y1, args, error, error_order, controller_state
        )
        lost = ~(t1 > t0)
        if self.adaptive:
            # A trial step to infinity is rejected like any with a large error, and tried shorter
            # until time stands still, or rounding makes it no shorter.
            # (Near zero it goes on for as long as numbers do.)
            spacing = min_step(ARRAYS, next_t0, 0.0)
            no_shorter = ~keep & (next_t1 >= t1) & (t1 - t0 <= 32 * spacing)
            stuck = (next_t1 - next_t0 <= spacing) | no_shorter
            failures = count_failures(ARRAYS, failures, ~usable, t1 - t0, span)
            # Looked into only when it happens, as it costs a tenth of a small step.
            calm = jax.lax.cond(
                eqxi.unvmap_any(stuck),
                lambda: _calm(y0, y1_candidate, self.atol),
                lambda: jnp.ones_like(stuck),
            )
            calm = calm & usable
            lost = lost | (stuck & ~calm) | (failures >= MOST_FAILURES)
            result = diffrax.RESULTS.where(stuck & calm, diffrax.RESULTS.dt_min_reached, result)
        else:
            lost = lost | ~_finite(y1_candidate)
            if self.dt is not None:
                # diffrax goes to the end of the span from a hundred roundings away.
                stretched = t1 - t0 > STRETCH * self.dt
                keep = keep & ~stretched
                result = diffrax.RESULTS.where(stretched, diffrax.RESULTS.dt_min_reached, result)
        keep = keep & ~lost
        next_t0 = jnp.where(keep, next_t0, t0)
        result = diffrax.RESULTS.where(lost, _NONFINITE, result)
        if self.stop is not None:
            result = diffrax.RESULTS.where(stopped(self.stop, t1), _STOPPED, result)
        return keep, next_t0, next_t1, jump, (state, failures, span, nf), result


def _controller(method: _Method, lane: Lane) -> Any:
    dt = None if lane.dt is None else jnp.abs(lane.dt)
    inner: Any = method.controller
    rtol, atol = lane.reltol, lane.abstol
    norm: Any = optimistix.rms_norm
    if method.norm is not None:
        norm = norm_of_tree(method.norm)
    if inner is None and method.adaptive:
        bounds = {"dtmin": lane.dtmin, "dtmax": lane.dtmax, "force_dtmin": lane.dtmin is None}
        inner = diffrax.PIDController(rtol=rtol, atol=atol, norm=norm, **bounds)
    elif isinstance(inner, AbstractController):
        tol, bounds = Tolerances(lane.abstol, lane.reltol), StepBounds(lane.dtmin, lane.dtmax)
        inner = OwnController.of(inner, method.norm, method.order, tol, bounds)
    elif inner is None:
        inner = diffrax.ConstantStepSize()
    elif isinstance(inner, diffrax.AbstractAdaptiveStepSizeController):
        rtol, atol, norm = inner.rtol, inner.atol, inner.norm
    else:
        rtol, atol = 1e-3, 1e-6
    controller = _Controller(inner, rtol, atol, norm, dt, method.adaptive, lane.stop)
    if lane.tstops is None and lane.d_discontinuities is None:
        return controller
    # (It sorts them in the direction of time.)
    return diffrax.ClipStepSizeController(controller, lane.tstops, lane.d_discontinuities)


def _finite(y: Any) -> Any:
    return _everywhere(jnp.isfinite, y)


def _calm(y0: Any, y1: Any, atol: Any) -> Any:
    """Whether a step too short for time to feel it leaves the state as good as unchanged.

    (False for a state that is not finite.)
    """
    return _everywhere(lambda a, b: ~is_moved(atol, a, b), y0, y1)


def _everywhere(test: Callable, *trees: Any) -> Any:
    leaves = zip(*map(jtu.tree_leaves, trees), strict=True)
    return functools.reduce(jnp.logical_and, [jnp.all(test(*x)) for x in leaves])


class _SaveTimes(diffrax.AbstractAdjoint):
    """An adjoint that saves at given times.

    `diffeqsolve(saveat=SaveAt(ts=...))` checks traced times by a host callback; here they are
    put in place behind that check (concrete ones have been checked by then).
    """

    inner: diffrax.AbstractAdjoint
    ts: Any

    def loop(self, *, saveat, init_state, **kwargs):
        del saveat
        rows = self.ts.shape[0]

        def buffers(state):
            return state.save_state.ts, state.save_state.ys

        ts = jnp.full((rows,), jnp.inf, self.ts.dtype)
        ys = jnp.full((rows, *init_state.y.shape), jnp.inf, init_state.y.dtype)
        saveat = diffrax.SaveAt(ts=self.ts)
        if not isinstance(self.inner, diffrax.BacksolveAdjoint):  # (which takes no function)
            # An interpolant may be of higher precision than the state.
            saveat = diffrax.SaveAt(ts=self.ts, fn=_in(ys.dtype))
        return self.inner.loop(
            saveat=saveat,
            init_state=eqx.tree_at(buffers, init_state, (ts, ys)),
            **kwargs,
        )


def _in(dtype: Any) -> Callable:
    def state(t, y, args):
        del t, args
        return y.astype(dtype)

    return state


_CODES = (
    (diffrax.RESULTS.successful, ReturnCode.Success),
    (diffrax.RESULTS.max_steps_reached, ReturnCode.MaxIters),
    (diffrax.RESULTS.dt_min_reached, ReturnCode.DtLessThanMin),
    (_NONFINITE, ReturnCode.Unstable),
    (_STOPPED, ReturnCode.Default),
)


def _result(plan: Plan, lane: Lane, sol: Any) -> Result:
    method: _Method = plan.method.value
    saving = plan.saving
    retcode = jnp.asarray(ReturnCode.Failure.value, jnp.int8)
    for result, code in _CODES:
        retcode = jnp.where(sol.result == result, jnp.asarray(code.value, jnp.int8), retcode)
    if saving.mode == "ends":
        # The last state of a failed trajectory is not its state at t1.
        reached = jnp.ones(saving.rows, bool).at[-1].set(retcode == ReturnCode.Success.value)
        t = jnp.stack([lane.t0, lane.t1][-saving.rows :])
    else:
        reached = jnp.isfinite(sol.ts)
        t = sol.ts
        if lane.d_discontinuities is not None:
            # (Of a step that ends before a jump it has the time after it, from which it goes on.)
            backwards = jnp.where(lane.t1 < lane.t0, 1, -1).astype(t.dtype)
            at = next_time(ARRAYS, t, backwards)
            jumped = jnp.any(at[:, None] == lane.d_discontinuities[None], axis=1)
            t = jnp.where(jumped, at, t)
    if saving.mode == "times":
        t = lane.saveat
        reached = reached & jnp.isfinite(t)
    if lane.count is not None:
        reached = reached & (jnp.arange(saving.rows, dtype=lane.count.dtype) < lane.count)
    ys = sol.ys
    overflow = reached & ~jnp.all(jnp.isfinite(ys), axis=tuple(range(1, ys.ndim)))
    reached = reached & ~overflow
    unstable = jnp.asarray(ReturnCode.Unstable.value, jnp.int8)
    retcode = jnp.where(jnp.any(overflow), unstable, retcode)
    rows = reached.reshape(-1, *(1,) * (ys.ndim - 1))
    u = jnp.where(rows, ys, jnp.nan)
    inner = None
    if saving.mode == "steps" and _keeps(plan):
        inner = _within_steps(plan, sol, reached)
    if plan.own_times:
        t = jnp.where(reached, t, jnp.nan)
    steps, naccept = (
        jnp.asarray(sol.stats[k], jnp.int32) for k in ("num_steps", "num_accepted_steps")
    )
    nf = None
    if isinstance(method.solver, implicit.Method):
        # (With known times, it is within the state of what steps onto them.)
        state = getattr(sol.controller_state, "inner_state", sol.controller_state)
        nf = jnp.asarray(state[-1], jnp.int32)
    elif method.stages is not None:
        nf = steps * (method.stages - 1) + 1 if method.fsal else steps * method.stages
        if method.adaptive and lane.dt is None:
            nf = nf + 2  # the automatic first step
        if method.fsal and (jumps := getattr(sol.controller_state, "jump_info", None)):
            # Those that were passed, of which some may be the same.
            passed, times = jumps
            forwards = jnp.where(lane.t1 < lane.t0, -1, 1).astype(times.dtype)
            before = jnp.concatenate([(forwards * lane.t0)[None], times[:-1]])
            here = jnp.arange(len(times), dtype=jnp.int32) < jnp.asarray(passed, jnp.int32)
            nf = nf + jnp.sum((times > before) & here, dtype=jnp.int32)
    length = jnp.sum(reached, dtype=jnp.int32)
    return Result(u, t, inner, length, retcode, naccept, steps - naccept, nf)


def _within_steps(plan: Plan, sol: Any, reached: Any) -> Any:
    """The states within the steps, `[time, node, *state]`, in the row where each starts; NaN where
    there is no step, or its start isn't saved."""
    method: _Method = plan.method.value
    dense, start, dtype = sol.interpolation, plan.saving.start, plan.state.dtype
    ends = dense.ts[1 - start : 1 - start + plan.saving.rows]
    infos = jax.tree.map(lambda x: x[1 - start :], dense.infos)
    nodes = jnp.asarray(inner_nodes(_degree(method.solver)), ends.dtype)
    steps = len(ends) - 1

    def within(step, infos):
        there = reached[step] & reached[step + 1]
        t0, t1 = jnp.where(there, ends[step], 0), jnp.where(there, ends[step + 1], 1)
        infos = jax.tree.map(lambda x: jnp.where(there, x, 0), infos)
        between = method.solver.interpolation_cls(t0=t0, t1=t1, **infos)
        inner = jax.vmap(between.evaluate)(t0 + nodes * (t1 - t0)).astype(dtype)
        return jnp.where(there, inner, jnp.nan)

    inner = jax.vmap(within)(jnp.arange(steps), jax.tree.map(lambda x: x[:steps], infos))
    return jnp.pad(inner, ((0, 1), *(((0, 0),) * (inner.ndim - 1))), constant_values=jnp.nan)
