"""Solving by diffrax: any of its solvers, step-size controllers and adjoints.

This is the reference that other engines are tested against. In addition to `diffrax.diffeqsolve`,
a trajectory stops with a return code when it becomes infinite or NaN, or when its step underflows,
and rows that it didn't reach are NaN. Checks of diffrax's by host callbacks are avoided.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from ... import solvers
from ...fields.derivatives.jacobian import is_reverse_only
from ...fields.derivatives.transposes import effects_of
from ...ground.devices.alone import alone, operands_of
from ...ground.retcode import reached_end, ReturnCode
from ...plan.events import TracedCallbacks
from ...plan.plan import Plan, Result, shared_times
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem import sensitivity
from ...problem.sensitivity import SensitivityAlgorithm
from ...solvers import ExplicitRungeKutta, ODESolver
from ...solvers.arithmetic import ARRAYS
from ...solvers.controllers import AbstractController, PIController
from ...solvers.norms import AbstractNorm
from ...solvers.time import next_time
from ...tracing.program import Program, Static
from ..base.capabilities import is_imex
from ..base.checks import check_backsolve, check_controller, check_steps
from . import implicit
from .control import ControlledComponents, controller_for, DIVERGED, NONFINITE, STOPPED
from .explicit import Explicit
from .noise import stochastic_terms
from .within_steps import AS_OURS, interpolant as interpolant, keeps, within_steps


_OF_MATRICES = ("njac", "nw", "nsolve")


class _DiffraxMethod(eqx.Module):
    """A diffrax solver with the static properties of its steps."""

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
    by_default: bool
    method: Any


#
# The methods of the engine
#


def method(alg: Any, options: dict, *, has_dt: bool) -> Static:
    """The solver with its options.

    **Raises:** `ValueError` for a fixed step without `dt`, or for an adaptive step without an error
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
    solver = _solver(alg, adaptive) if ours else implicit.with_retries(alg)
    made_here = isinstance(solver, Explicit)
    if made_here and adaptive and controller is None:
        # (diffrax's own control belongs to its own methods.)
        controller = PIController()
    imex = is_imex(alg)
    adjoint, direction = _adjoint(options["sensealg"])
    if isinstance(adjoint, diffrax.BacksolveAdjoint):
        # (With some methods of `explicit.py`, its gradients by parameters are zero.)
        if imex or made_here:
            raise ValueError(
                f"sensealg=BacksolveAdjoint() can't be used with {label} on the diffrax engine; "
                "leave it out."
            )
        check_backsolve(options)
    stages, fsal = _cost(solver)
    order, embedded_order = _orders(alg, solver)
    if isinstance(controller, AbstractController):
        controller = controller.for_method(order, embedded_order)
    norm, by_default = options["internalnorm"], options["sensealg"] is None
    is_made_again = type(alg) in AS_OURS or (made_here and not alg.method.remembers)
    again = alg.method if is_made_again else None
    steps = solver, controller, norm, order, adjoint, adaptive, imex, stages, fsal
    return Static(_DiffraxMethod(*steps, direction, by_default, again))


def _orders(alg: Any, solver: Any) -> tuple[int, int]:
    """The order of the method, and approximately that of the method with which its error estimate
    compares."""
    if isinstance(alg, ExplicitRungeKutta) or isinstance(solver, Explicit):
        return alg.order, alg.method.embedded_order or alg.order - 1
    if isinstance(alg, ODESolver):
        return alg.order, alg.order - 1
    if isinstance(solver, diffrax.ItoMilstein | diffrax.StratonovichMilstein):
        return 1, 1  # (They are for stochastic problems only, and refuse to say.)
    order = solver.order(diffrax.ODETerm(_zero)) or 1
    return int(order), max(1, int(order) - 1)


def closes(plan: Plan) -> bool:
    """See [`Engine.closes`][ensembleode.engines.base.engine.Engine.closes]. True where no adjoint
    is asked for, and nothing but the saved states and times has derivatives."""
    is_kept = plan.saving.mode == "steps" and keeps(plan)
    field: Any = getattr(plan.field, "field", plan.field)  # of the columns of a matrix
    return plan.method.value.by_default and not is_kept and not effects_of(field)


def integrate(plan: Plan, lane: TrajectoryNumbers) -> Result:
    """Solve one trajectory."""
    return _timed(plan, lane, _integrated(plan, lane))


def _integrated(plan: Plan, lane: TrajectoryNumbers) -> Result:
    method: _DiffraxMethod = plan.method.value
    if isinstance(method.adjoint, diffrax.BacksolveAdjoint):
        t0, t1 = (sensitivity.constant(jnp.asarray(x), _BY_TIMES) for x in (lane.t0, lane.t1))
        lane = lane._replace(t0=t0, t1=t1)
    if method.direction == "reverse":
        label = type(method.adjoint).__name__ + "()"
        return _isolated(operands_of(sensitivity.reverse_only(lane, label)), plan)
    result = alone(functools.partial(_integrate, plan), lane)
    return sensitivity.forward_only(result) if method.direction == "forward" else result


_BY_TIMES = (
    "this solve is differentiated by the ends of its tspan, by which sensealg=BacksolveAdjoint() "
    "has no derivatives on the diffrax engine: leave sensealg out."
)


def _check_derivatives(plan: Plan) -> None:
    """**Raises:** `TypeError` for an `f` without the derivative that an implicit method takes."""
    field = plan.field
    if factorises(plan) and isinstance(field, Program) and is_reverse_only(field):
        label = type(plan.method.value.solver).__name__
        raise TypeError(
            f"alg={label}() takes the derivative of f along tangents, but f calls a jax.custom_vjp "
            "function, which has none: write it with jax.custom_jvp, or use a Rosenbrock method of "
            "the compiled engine, such as alg=eo.Rodas5P()."
        )


def solve_trajectories(plan: Plan, lanes: TrajectoryNumbers, n: int) -> Result:
    """Solve trajectories, all at once."""
    return _timed(plan, lanes, _mapped(plan, functools.partial(_integrated, plan), lanes, n))


def each_of(
    plan: Plan, lanes: TrajectoryNumbers, n: int, adjoint: diffrax.AbstractAdjoint | None = None
) -> Result:
    """The results of trajectories, all at once, with the derivatives of diffrax; they have times
    only where each trajectory has its own.

    **Arguments:** `adjoint`: by default the method's.
    """
    solve = functools.partial(_integrate, plan, adjoint=adjoint)
    if n > 1:
        return _mapped(plan, solve, lanes, n)
    one = jax.tree.map(lambda x, own: x[0] if own else x, lanes, plan.batched)
    return jax.tree.map(lambda x: x[None], solve(one))


def _mapped(plan: Plan, solve: Callable, lanes: TrajectoryNumbers, n: int) -> Result:
    in_axes = jax.tree.map(lambda b: 0 if b else None, plan.batched)
    return jax.vmap(solve, in_axes=(in_axes,), axis_size=n)(lanes)


def _timed(plan: Plan, lanes: TrajectoryNumbers, result: Result) -> Result:
    """The result with its saved times, which it lacks where trajectories share them."""
    return result if plan.own_times else result._replace(t=shared_times(plan, lanes))


def counts(method: Static) -> tuple[str, ...]:
    """The names of the counts of its results."""
    value: _DiffraxMethod = method.value
    of_f = () if value.stages is None else ("nf",)
    of_matrices = _OF_MATRICES if isinstance(value.solver, implicit.CountingESDIRK) else ()
    return "naccept", "nreject", *of_f, *of_matrices


def factorises(plan: Plan) -> bool:
    """Whether the steps factorise matrices."""
    return isinstance(plan.method.value.solver, diffrax.AbstractImplicitSolver)


@eqx.filter_custom_vjp
def _isolated(lane: TrajectoryNumbers, plan: Plan) -> Result:
    """`_integrate` with gradients that are zero, and never NaN, for a trajectory that failed.

    A loss can mask a failed trajectory. But its zero cotangents times infinite derivatives in the
    backward pass are NaN, which would spread to all trajectories through shared parameters.
    """
    return alone(functools.partial(_integrate, plan), lane)


@_isolated.def_fwd
def _(perturbed, lane, plan):
    def forward(diff, rest):
        def solution(diff):
            return eqx.partition(_integrate(plan, eqx.combine(diff, rest)), eqx.is_inexact_array)

        inexact, pullback, counts = jax.vjp(solution, diff, has_aux=True)
        return eqx.combine(inexact, counts), pullback

    result, pullback = alone(forward, *eqx.partition(lane, perturbed))
    return result, (pullback, eqx.filter(result, eqx.is_inexact_array), result.retcode)


@_isolated.def_bwd
def _(residuals, cotangents, perturbed, lane, plan):
    pullback, inexact, retcode = residuals
    # diffrax promotes types where it solves backwards, which jax may be told to refuse.
    with jax.numpy_dtype_promotion("standard"):
        cotangents = sensitivity.with_zeros(inexact, cotangents)
        (gradient,) = alone(lambda pull, c: pull(c), pullback, cotangents)
    succeeded = reached_end(retcode)
    return jax.tree.map(lambda g: jnp.where(succeeded, g, jnp.zeros_like(g)), gradient)


#
# Parts of a solve
#


def _integrate(
    plan: Plan, lane: TrajectoryNumbers, adjoint: diffrax.AbstractAdjoint | None = None
) -> Result:
    _check_derivatives(plan)
    method: _DiffraxMethod = plan.method.value
    if plan.events is not None:
        lane = _with_moving_jumps(plan.events, lane)
    field = _Field(plan.field, len(lane.consts))
    # BacksolveAdjoint can't take empty containers.
    args = lane.parameters or None
    terms = diffrax.ODETerm(field)
    if plan.noise is not None:
        terms = stochastic_terms(plan, lane, field)
    elif method.imex:
        terms = diffrax.MultiTerm(diffrax.ODETerm(_zero), terms)
    saving = plan.saving
    save = functools.partial(diffrax.SaveAt, controller_state=True)
    saveat, solver = save(t0=saving.start, t1=True), method.solver
    adjoint = adjoint or method.adjoint
    if saving.mode == "times":
        # diffrax integrates backwards in time by changing the sign of time.
        sign = jnp.where(lane.t0 < lane.t1, 1, -1).astype(lane.saveat.dtype)
        ts = jnp.where(jnp.isfinite(lane.saveat), lane.saveat, lane.t1) * sign
        saveat, adjoint = save(t1=True), _SaveTimes(adjoint, ts)
        if isinstance(solver, Explicit):
            times = jax.lax.stop_gradient(ts)
            solver = dataclasses.replace(solver, is_dense=True, times=times)
    elif saving.mode == "steps":
        saveat = save(t0=saving.start, steps=True, dense=keeps(plan))
        if isinstance(solver, Explicit):
            solver = dataclasses.replace(solver, is_dense=keeps(plan))
    t0 = lane.t0
    if lane.d_discontinuities is not None:
        # diffrax itself steps over the other times.
        direction = jnp.where(lane.t1 < t0, -1, 1).astype(t0.dtype)
        at_start = lane.d_discontinuities[0] == t0
        t0 = jnp.where(at_start, next_time(ARRAYS, jnp.asarray(t0), direction), t0)
        solver = implicit.before_jumps(solver, direction * lane.d_discontinuities)
    sol = diffrax.diffeqsolve(
        terms,
        solver,
        t0,
        lane.t1,
        None,
        lane.u0,
        args,
        saveat=saveat,
        stepsize_controller=controller_for(plan, lane),
        adjoint=adjoint,
        max_steps=plan.maxiters,
        throw=False,
    )
    return _result(plan, lane, sol)


def _with_moving_jumps(events: TracedCallbacks, lane: TrajectoryNumbers) -> TrajectoryNumbers:
    """The numbers, in which the times at which `f` jumps have their derivatives, so that steps that
    end there move with them. These times are then the last parameter (see
    `jumps/moving_discontinuities.py`).

    **Raises:** `NotImplementedError` for the field with tangents, which jump there themselves.
    """
    if any(x.jump.moves is not None for x in events.discrete):
        raise NotImplementedError(
            "this solve is differentiated twice, once by its d_discontinuities, and the diffrax "
            "engine has first derivatives by them: pass sensealg=DirectAdjoint(), or use "
            "engine='compiled', which has derivatives of any order."
        )
    return lane._replace(d_discontinuities=lane.p[-1])


class _Field(eqx.Module):
    field: Any = eqx.field(static=True)
    n_consts: int = eqx.field(static=True)

    def __call__(self, t, u, args):
        args = args or ()
        return self.field(args[: self.n_consts], u, args[self.n_consts :], t)


def _zero(t: Any, u: PyTree, args: PyTree) -> PyTree:
    return jnp.zeros_like(u)


def _adjoint(sensealg: SensitivityAlgorithm | None) -> tuple[diffrax.AbstractAdjoint, str]:
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


# The explicit methods of this library that diffrax has, too.
_NAMES = "Bosh3 Dopri5 Dopri8 Euler Heun Midpoint Ralston Tsit5"
_THEIRS = {getattr(solvers, name): getattr(diffrax, name)() for name in _NAMES.split()}


def _solver(alg: Any, adaptive: bool) -> Any:
    """The diffrax solver for one of this library's methods."""
    if alg.implicit:
        return implicit.solver(type(alg).__name__, adaptive)
    return _THEIRS[type(alg)] if type(alg) in _THEIRS else Explicit(alg.method)


def _cost(solver: Any) -> tuple[int | None, bool]:
    """The number of stages of a step, None if it can't be determined; and whether the last stage is
    the first of the next step."""
    if isinstance(solver, diffrax.Euler):
        return 1, False
    if isinstance(solver, Explicit):
        return solver.method.stages, solver.method.evaluations(0) > 0
    tableau = getattr(solver, "tableau", None)
    counted = isinstance(solver, diffrax.AbstractERK | implicit.CountingESDIRK)
    if counted and isinstance(tableau, diffrax.ButcherTableau):
        return tableau.num_stages, bool(tableau.fsal)
    return None, False


class _SaveTimes(diffrax.AbstractAdjoint):
    """An adjoint that saves at given times. They replace the times that `diffeqsolve` was given
    after it has checked these, as it checks traced times by a host callback."""

    inner: diffrax.AbstractAdjoint
    ts: Array

    def loop(self, *, saveat, init_state, **kwargs):
        rows = self.ts.shape[0]

        def buffers(state):
            return state.save_state.ts, state.save_state.ys

        ts = jnp.full((rows,), jnp.inf, self.ts.dtype)
        ys = jnp.full((rows, *init_state.y.shape), jnp.inf, init_state.y.dtype)
        saveat = diffrax.SaveAt(ts=self.ts)
        if not isinstance(self.inner, diffrax.BacksolveAdjoint):  # it takes no function
            # An interpolant may have a higher precision than the state.
            saveat = diffrax.SaveAt(ts=self.ts, fn=lambda t, y, args: y.astype(ys.dtype))
        init_state = eqx.tree_at(buffers, init_state, (ts, ys))
        return self.inner.loop(saveat=saveat, init_state=init_state, **kwargs)


_CODES = (
    (diffrax.RESULTS.successful, ReturnCode.Success),
    (diffrax.RESULTS.max_steps_reached, ReturnCode.MaxIters),
    (diffrax.RESULTS.dt_min_reached, ReturnCode.DtLessThanMin),
    (NONFINITE, ReturnCode.Unstable),
    (STOPPED, ReturnCode.Default),
    (DIVERGED, ReturnCode.Diverged),
)


def _result(plan: Plan, lane: TrajectoryNumbers, sol: Any) -> Result:
    method: _DiffraxMethod = plan.method.value
    saving = plan.saving
    retcode = jnp.asarray(ReturnCode.Failure.value, jnp.int8)
    for result, code in _CODES:
        retcode = jnp.where(sol.result == result, jnp.asarray(code.value, jnp.int8), retcode)
    unstable = jnp.asarray(ReturnCode.Unstable.value, jnp.int8)
    # (diffrax takes no step then, and calls that a success.)
    retcode = jnp.where(jnp.isfinite(lane.t0) & jnp.isfinite(lane.t1), retcode, unstable)
    if saving.mode == "ends":
        # The last state of a failed trajectory is not its state at t1.
        reached = jnp.ones(saving.rows, bool).at[-1].set(reached_end(retcode))
        t = jnp.stack([lane.t0, lane.t1][-saving.rows :])
    else:
        reached, t = jnp.isfinite(sol.ts), sol.ts
        if lane.d_discontinuities is not None:
            # For a step that ends before a jump, this is the time after the jump, from which it
            # goes on.
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
    controlled = ControlledComponents.of_plan(plan)
    first = ys if controlled is None else jax.vmap(controlled.first)(ys)
    overflow = reached & ~jnp.all(jnp.isfinite(first), axis=tuple(range(1, first.ndim)))
    reached = reached & ~overflow
    retcode = jnp.where(jnp.any(overflow), unstable, retcode)
    rows = reached.reshape(-1, *(1,) * (ys.ndim - 1))
    u = jnp.where(rows, ys, jnp.nan)
    # Failed trajectories have no derivatives.
    u = jnp.where(reached_end(retcode), u, jax.lax.stop_gradient(u))
    has_inner = saving.mode == "steps" and keeps(plan)
    inner = within_steps(plan, sol, reached) if has_inner else None
    t = jnp.where(reached, t, jnp.nan) if plan.own_times else None
    numbers = (sol.stats["num_steps"], sol.stats["num_accepted_steps"])
    steps, naccept = (jnp.asarray(x, jnp.int32) for x in numbers)
    nf, of_matrices = None, {}
    if isinstance(method.solver, implicit.CountingESDIRK):
        # With known times, this state is nested in that of the controller that handles these times.
        state = getattr(sol.controller_state, "inner_state", sol.controller_state)
        counted = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), state[-1])
        nf, of_matrices = counted.nf, {x: getattr(counted, x) for x in _OF_MATRICES}
    elif method.stages is not None:
        if isinstance(method.solver, Explicit):
            nf = method.solver.method.evaluations(steps)
        else:
            nf = steps * (method.stages - 1) + 1 if method.fsal else steps * method.stages
        if method.adaptive and lane.dt is None:
            nf = nf + 2  # the automatic choice of the first step
        if method.fsal and (jumps := getattr(sol.controller_state, "jump_info", None)):
            # Counts the jumps that were passed; some times may be equal.
            passed, times = jumps
            forwards = jnp.where(lane.t1 < lane.t0, -1, 1).astype(times.dtype)
            before = jnp.concatenate([(forwards * lane.t0)[None], times[:-1]])
            here = jnp.arange(len(times), dtype=jnp.int32) < jnp.asarray(passed, jnp.int32)
            nf = nf + jnp.sum((times > before) & here, dtype=jnp.int32)
    length = jnp.sum(reached, dtype=jnp.int32)
    return Result(u, t, inner, length, retcode, naccept, steps - naccept, nf, **of_matrices)
