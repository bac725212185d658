"""Other libraries. The tasks are written for their own functions. Libraries that are not installed
are skipped."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .contenders import imported, Skip
from .tasks import lorenz, lorenz_components


class Contender(NamedTuple):
    """A contender; `call()` returns `(states, steps)`, or `(loss, gradient)`."""

    name: str
    call: Callable
    # The number of trajectories it solves, by default all; its time is extrapolated from theirs.
    rows: Any = None


def lorenz_only(task):
    if task.f is not lorenz:
        raise Skip("written for Lorenz only")


#
# gradsolve
#


def gradsolve_problem(task):
    """gradsolve's own name for this Lorenz field, so that its fused kernel runs it if Warp is
    installed."""
    lorenz_only(task)
    imported("gradsolve")

    class Lorenz:
        name, dim, t0, t1, is_stiff = "diffeqgpu_lorenz", 3, 0.0, task.t1, False

        @staticmethod
        def f_jax(t, u, p):
            return lorenz(u, p[0], t)

    return Lorenz(), np.tile(task.u0, (task.n, 1)), task.p[:, None]


def has_warp():
    try:
        imported("warp").config.quiet = True
    except Skip:
        return False
    return True


def gradsolve_fixed(task):
    problem, u0, p = gradsolve_problem(task)
    engine = imported("gradsolve.solvers.fixed_step_tsit5")
    steps = round(task.t1 / task.dt)
    solve = jax.jit(lambda u0, p: engine.solve_jax(problem, u0, p, n_steps=steps))
    u0, p = jnp.array(u0), jnp.array(p)
    return Contender("gradsolve (lax.scan)", lambda: (solve(u0, p), np.full(task.n, steps)))


def gradsolve_record(task):
    """How gradsolve does the adaptive solve, and a call that returns states, steps and their
    sizes."""
    problem, u0, p = gradsolve_problem(task)
    options = {"rtol": task.rtol, "atol": task.atol}
    if has_warp():
        engine = imported("gradsolve.warp.warp_replay")
        options |= {"precision": task.dtype.name, "device": "cpu"}
        return "Warp", lambda: engine.record(problem, u0, p, **options)
    if task.dtype != np.float64:
        raise Skip("without warp-lang its adaptive solver is float64 only")
    engine = imported("gradsolve.solvers.tsit5_replay")

    def record():
        states, sizes, steps = engine.record_tsit5_jax(
            problem.f_jax, u0, p, 0.0, task.t1, **options
        )
        return states, steps, sizes

    return "vmap", record


def gradsolve_public(task, engine, device):
    """gradsolve's public call, a function of the parameters."""
    problem, u0, _ = gradsolve_problem(task)
    options = {"engine": engine, "rtol": task.rtol, "atol": task.atol, "device": device}
    solve = imported("gradsolve").solve
    return lambda p: solve(problem, u0, p[:, None], **options)


def gradsolve_adaptive(task):
    kind, record = gradsolve_record(task)
    if kind != "Warp":
        return Contender(f"gradsolve ({kind})", lambda: record()[:2])
    solve = gradsolve_public(task, "warp_ode", "cpu")

    def call():
        sol = solve(task.p)
        return sol.y_final, sol.accepted_steps + sol.rejected_steps

    return Contender("gradsolve (Warp)", call)


def gradsolve_gradient(task):
    """A gradient by gradsolve: it records the steps, then differentiates the replay, which is
    compiled once and gets the steps."""
    kind, record = gradsolve_record(task)
    problem, u0, _ = gradsolve_problem(task)
    replay = imported("gradsolve.warp.warp_replay").replay_solve_saveat_jax

    def loss(p, u0, sizes):
        _, states = replay(problem, u0, p[:, None], sizes, jnp.asarray(task.times))
        return jnp.mean((states - 1.0) ** 2)

    grad, u0, p = jax.jit(jax.value_and_grad(loss)), jnp.array(u0), jnp.array(task.p)
    return Contender(f"gradsolve ({kind})", lambda: grad(p, u0, jnp.array(record()[2])))


#
# heyoka
#


def heyoka_batches(task, components, tol, *, variational=False):
    """heyoka's batch integrator, once for each batch, at the start of the batch's trajectories.

    `components(xp, u, p, t)` is the field, as a list. With `variational`, the derivatives of the
    states with respect to the parameters follow the states.
    """
    heyoka, real = imported("heyoka"), task.dtype.type
    width, size = heyoka.recommended_simd_size(fp_type=real), task.u0.shape[-1]
    rows = np.arange(task.n + -task.n % width).clip(max=task.n - 1).reshape(-1, width)
    starts = np.broadcast_to(task.u0, (task.n, size))
    has_own = "p" in task.own
    pars = task.p.reshape(task.n, -1) if has_own else np.zeros((task.n, 0), real)
    u = list(heyoka.make_vars(*(f"u{i}" for i in range(size))))
    p = [heyoka.par[i] for i in range(pars.shape[1])] if has_own else [real(x) for x in task.p]
    field = components(heyoka, u, p, heyoka.time)
    if real is not np.float64:
        field = [heyoka.expression(x) for x in field]
    system = list(zip(u, field, strict=True))
    if variational:
        system = heyoka.var_ode_sys(system, p, order=1)
    integrator = heyoka.taylor_adaptive_batch(
        system,
        np.zeros((size, width), real),
        tol=real(tol),
        fp_type=real,
        **({"pars": np.zeros((pars.shape[1], width), real)} if has_own else {}),
    )

    def batches():
        for batch in rows:
            integrator.set_time(real(0.0))
            integrator.state[size:] = 0.0
            integrator.state[:size] = starts[batch].T
            if has_own:
                integrator.pars[:] = pars[batch].T
            yield integrator

    return batches


def heyoka_adaptive(task, components, tol):
    """A call that returns the ends and the number of steps tried."""
    batches, end = heyoka_batches(task, components, tol), task.dtype.type(task.t1)

    def call():
        states, steps = [], []
        for integrator in batches():
            integrator.propagate_until(end)
            states.append(integrator.state.T.copy())
            steps += [result[3] for result in integrator.propagate_res]
        return np.concatenate(states)[: task.n], np.array(steps[: task.n])

    return call


def heyoka_gradient(task, components):
    """A gradient by forward sensitivities, with one parameter for each trajectory."""
    batches, size = heyoka_batches(task, components, task.rtol, variational=True), len(task.u0)

    def call():
        rows = []
        for integrator in batches():
            times = np.repeat(task.times[:, None], integrator.batch_size, axis=1)
            rows.append(np.moveaxis(integrator.propagate_grid(times)[1], -1, 0))
        states = np.concatenate(rows)[: task.n]  # [trajectory, time, state and sensitivity]
        off, sensitivity = states[..., :size] - 1.0, states[..., size:]
        return np.mean(off**2), np.sum(2.0 * off * sensitivity, axis=(1, 2)) / off.size

    return call


#
# SciPy
#


def scipy_adaptive(task, rows):
    """A call that returns the ends and the number of steps of these trajectories of Lorenz."""
    solve_ivp = imported("scipy.integrate").solve_ivp
    options = {"method": "RK45", "rtol": task.rtol, "atol": task.atol}

    def field(t, u, p):
        return lorenz_components(u, p)

    def call():
        span = 0.0, task.t1
        sols = [solve_ivp(field, span, task.u0, args=(p,), **options) for p in task.p[rows]]
        return np.stack([sol.y[:, -1] for sol in sols]), np.array([sol.nfev / 6 for sol in sols])

    return call
