"""Whether trajectories ran out of steps because the problem is stiff, as measured from their steps.

An explicit method has to keep `h lambda` within its stability region for every eigenvalue of the
Jacobian of `f`. If that bounds the step, and not the accuracy, because the fast modes have decayed
long ago, the problem is stiff. So a few of the trajectories that ran out of steps are solved again
for a limited number of steps, all of which are kept, and `h lambda` is computed along them.

Source: Hairer and Wanner, "Solving Ordinary Differential Equations II", IV.2.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..ground.recent import jit_recent
from ..ground.retcode import ran_out_of_steps, was_run
from ..problem.options import holds_tolerances
from ..running.every_step import bounded
from ..running.job import Job
from ..solvers import ExplicitRungeKutta
from ..solvers.arithmetic import NUMBERS
from ..solvers.method import Equations, Method
from .serial import SerialExecutor


_TRAJECTORIES = 3  # the number of trajectories looked at
_STEPS = 4096  # the largest number of steps of each
_POINTS = 32  # the points in the second half of the steps at which the Jacobian is computed
_LARGEST = 64  # the largest state of which all eigenvalues are computed
_ITERATIONS = 40  # the number of iterations of the power method, for larger states
# The fraction of the real stability boundary above which stability bounds the steps; where accuracy
# bounds them, they stay well below.
_AT_THE_EDGE = 0.5
_STABILITY_STEPS = 50  # the number of steps after which growth shows


def note(job: Job, alg: Any, codes: np.ndarray) -> str | None:
    """A note about trajectories that ran out of steps, by their return codes `[trajectory]`; None
    where nothing indicates stiffness."""
    out_of_steps = np.flatnonzero(ran_out_of_steps(codes))
    run = np.count_nonzero(was_run(codes))
    if 2 * len(out_of_steps) <= run or not _can_be_bounded_by_stability(job, alg):
        return None
    middle = out_of_steps[np.linspace(0, len(out_of_steps) - 1, _TRAJECTORIES).astype(int)]
    boundary = real_stability_boundary(alg.method)
    ratios = [_step_times_rate(job, int(i)) / boundary for i in np.unique(middle)]
    at_the_edge = [x for x in ratios if x > _AT_THE_EDGE]
    if 2 * len(at_the_edge) <= len(ratios):
        return None
    remedy = (
        "eo.Rodas5P(), or eo.Rosenbrock23() at loose tolerances, or where only some of them are "
        "stiff, or some of the time, eo.AutoTsit5(eo.Rosenbrock23())"
    )
    if job.plan.engine.name == "diffrax":
        remedy = "an implicit method, such as eo.Kvaerno5()"
    return (
        "most trajectories ran out of steps, and the problem looks stiff: stability bounds their "
        f"steps, not accuracy (the step times the fastest rate of decay is {max(ratios):.0%} of "
        f"what {type(alg).__name__} allows). Try {remedy}"
    )


def _can_be_bounded_by_stability(job: Job, alg: Any) -> bool:
    options = job.trajectories.options
    return (
        isinstance(alg, ExplicitRungeKutta)
        and alg.adaptive
        and options["adaptive"] is not False
        and not holds_tolerances(options["stepsize_controller"])
        and job.plan.engine.name in ("compiled", "diffrax")
        and jnp.issubdtype(job.plan.state.dtype, jnp.floating)
    )


def _step_times_rate(job: Job, index: int) -> float:
    """The median, along a trajectory, of the step size times the fastest rate of decay."""
    size = max(1, math.prod(job.plan.state.shape))
    steps = min(job.plan.maxiters, _STEPS, max(64, 2**22 // size))
    # The trajectory has no output and no times to save: every step is kept.
    without = {"saveat": None, "count": None}
    lane_of = job.trajectories.lane
    trajectories = dataclasses.replace(
        job.trajectories, lane=lambda i, repeat: lane_of(i, repeat)._replace(**without)
    )
    plain = dataclasses.replace(job, trajectories=trajectories, output_func=None, output_consts=())
    saving = plain.plan.saving._replace(mode="steps", start=True)
    nothing = dict.fromkeys(("output", "apart", "saved", "tree"))
    plain = bounded(plain.replan(saving=saving, saves_values=False, **nothing), steps)
    outcome = jax.device_get(SerialExecutor().run_one(plain, index, 1))
    length = int(outcome.length)
    if length < 8:
        return 0.0
    t, u = outcome.t[:length], outcome.u[:length]
    at = np.unique(np.linspace(length // 2, length - 2, _POINTS).astype(int))
    # The mean of several steps, since steps alternate in size where stability bounds them.
    h = np.abs([np.mean(np.diff(t[max(0, i - 3) : i + 5])) for i in at])
    lane = lane_of(index, 1)
    try:
        decay = _rates_of_decay(job.plan.users_field, lane.consts, lane.p, u[at], t[at])
    except (TypeError, ValueError, NotImplementedError):
        return 0.0  # f has no forward mode, because of a custom_vjp or a callback
    backwards = bool(np.asarray(lane.t1) < np.asarray(lane.t0))
    rates = np.asarray(decay[int(backwards)])
    return float(np.median(h * np.where(np.isfinite(rates), rates, 0.0)))


def _rates_of_decay(field: Any, consts: PyTree, p: PyTree, u: np.ndarray, t: np.ndarray) -> tuple:
    """The fastest rates of decay of the modes at states `[point, *state]`: forwards and backwards
    in time. A mode counts if it decays at least as fast as it oscillates."""
    if math.prod(u.shape[1:]) <= _LARGEST:
        jacobians = np.asarray(_jacobians(field, consts, p, u, t))
        is_finite = np.isfinite(jacobians).all(axis=(1, 2), keepdims=True)
        eigenvalues: Any = np.linalg.eigvals(np.where(is_finite, jacobians, 0.0))
    else:
        eigenvalues = np.asarray(_dominant(field, consts, p, u, t))[:, None]
    real = np.where(np.abs(eigenvalues.imag) <= np.abs(eigenvalues.real), eigenvalues.real, 0.0)
    return (-real).max(axis=1), real.max(axis=1)


@jit_recent
def _jacobians(field, consts, p, u, t):
    def one(u, t):
        jacobian = jax.jacfwd(lambda u: field(consts, u, p, t))(u)
        return jacobian.reshape(u.size, u.size)

    return jax.vmap(one)(u, t)


@jit_recent
def _dominant(field, consts, p, u, t):
    """The real part of the largest eigenvalue, by the power method; 0 where the eigenvalue is
    complex."""

    def one(u, t):
        _, times_jacobian = jax.linearize(lambda u: field(consts, u, p, t), u)

        def iteration(_, v):
            w = times_jacobian(v)
            return w / jnp.maximum(jnp.linalg.norm(w.ravel()), jnp.finfo(w.dtype).tiny)

        # Any start that has a component in every mode will do.
        start = jax.random.normal(jax.random.key(0), u.shape, u.dtype)
        v = jax.lax.fori_loop(0, _ITERATIONS, iteration, start)
        w = times_jacobian(v)
        along = jnp.vdot(v, w)
        is_real = jnp.abs(along) > jnp.sqrt(0.5) * jnp.linalg.norm(w.ravel())
        return jnp.where(is_real, along, 0.0)

    return jax.vmap(one)(u, t)


def real_stability_boundary(method: Method) -> float:
    """The largest `x` such that the numerical solution of `y' = -a y` with steps of one doesn't
    grow for any `a` up to `x`."""
    x = np.arange(0.05, 100.0, 0.05)
    equations = Equations(lambda y, t: (-x * y[0],), lambda y, t, dy, dt: (-x * dy[0],))
    y = (np.ones_like(x),)
    with np.errstate(all="ignore"):
        carry = method.init(NUMBERS, equations, y, 0.0)
        for i in range(_STABILITY_STEPS):
            y, carry, *_ = method.step(NUMBERS, equations, y, carry, float(i), 1.0)
    grows = ~(abs(y[0]) <= 1 + 1e-7)
    if not grows.any():
        raise ValueError("An explicit method has a bounded stability region.")
    return float(x[np.argmax(grows)] - 0.05)
