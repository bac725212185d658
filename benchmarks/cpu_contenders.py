"""The contenders of cpu_ensembles.py, and which of them take part in a table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from common import numba_loops, peers
from common.contenders import by_diffrax, by_solve, imported, Skip
from common.peers import Contender
from common.tasks import lorenz_components

import ensembleode as eo


DIFFRAX, JITTED, EAGER = "diffrax (by hand)", "ensembleode, in jit", "ensembleode, eager"
# An option of XLA's that `solve` sets when called eagerly. Inside `jit` it is the caller's to set.
WIDE, WIDER = "512-bit", {"xla_cpu_prefer_vector_width": 512}


def loss_of(solve):
    """Of `p`, and then of `u0`."""

    def loss(p, u0):
        states, _ = solve(u0, p)
        return jnp.mean((states - 1.0) ** 2)

    return loss


def value_and_grad(solve, **jit_options):
    return jax.jit(jax.value_and_grad(loss_of(solve)), **jit_options)


def jitted(name, solve, task, **jit_options):
    solve, inputs = jax.jit(solve, **jit_options), task.inputs()
    return Contender(name, lambda: solve(*inputs))


def gradient(name, solve, task, **jit_options):
    grad, (u0, p) = value_and_grad(solve, **jit_options), task.inputs()
    return Contender(name, lambda: grad(p, u0))


def diffrax_by_hand(task, name=DIFFRAX, **jit_options):
    return jitted(name, by_diffrax(task), task, **jit_options)


def ours_in_jit(task, where=None, name=JITTED, **jit_options):
    return jitted(name, by_solve(task, where), task, **jit_options)


def ours_eager(task, where=None, name=EAGER):
    inputs = task.inputs()
    return Contender(name, lambda: by_solve(task, where)(*inputs))


def diffrax_gradient(task, max_steps):
    name = f"{DIFFRAX}, max_steps={max_steps}"
    return gradient(name, by_diffrax(task, max_steps=max_steps), task)


def ours_gradient(task, name=JITTED, maxiters=None, **jit_options):
    bound = {} if maxiters is None else {"maxiters": maxiters}
    name = name if maxiters is None else f"{name}, maxiters={maxiters}"
    return gradient(name, by_solve(task, **bound), task, **jit_options)


def components(xp, u, p, t):
    return lorenz_components(u, p[0])


def adaptive_lorenz_only(task):
    peers.lorenz_only(task)
    if not task.adaptive:
        raise Skip("has no fixed steps")


def heyoka_adaptive(task):
    adaptive_lorenz_only(task)
    return Contender("heyoka (Taylor)", peers.heyoka_adaptive(task, components, task.rtol))


def heyoka_gradient(task):
    adaptive_lorenz_only(task)
    return Contender("heyoka (Taylor, variational)", peers.heyoka_gradient(task, components))


def scipy_adaptive(task, most=8):
    adaptive_lorenz_only(task)
    if task.dtype != np.float64:
        raise Skip("computes in float64")
    rows = task.sample[:: -(-len(task.sample) // most)]
    name = f"SciPy RK45 (from {len(rows)} trajectories)"
    return Contender(name, peers.scipy_adaptive(task, rows), rows)


def numba_fixed(task):
    peers.lorenz_only(task)
    kernel = numba_loops.lorenz_lanes(imported("numba"), task.dtype.type, task.dt)
    steps = round(task.t1 / task.dt)
    counts = np.full(task.n, steps)
    return Contender("Numba, by hand", lambda: (kernel(task.u0, task.p, steps), counts))


def makers(case):
    """The contenders of a table, the one that ratios are to first."""
    partial = functools.partial
    threads, one = eo.EnsembleThreads(), eo.EnsembleThreads(1)
    wide = {"name": f"{JITTED}, {WIDE}", "compiler_options": WIDER}
    main = [diffrax_by_hand, ours_in_jit, ours_eager, partial(ours_in_jit, **wide)]
    main.append(partial(diffrax_by_hand, name=f"{DIFFRAX}, {WIDE}", compiler_options=WIDER))
    if case == "a":
        return [*main, peers.gradsolve_fixed, heyoka_adaptive, scipy_adaptive, numba_fixed]
    if case == "b":
        return [*main, peers.gradsolve_adaptive, heyoka_adaptive, scipy_adaptive]
    if case == "c":
        return main
    if case in "de":
        tight = {"d": 256, "e": 128}[case]
        ways = [partial(diffrax_gradient, max_steps=m) for m in (tight, 4096)]
        ways += [ours_gradient, partial(ours_gradient, maxiters=tight)]
        ways.append(partial(ours_gradient, **wide))
        return ways if case == "d" else [*ways, peers.gradsolve_gradient, heyoka_gradient]
    return [
        partial(ours_in_jit, where=one, name=f"{JITTED}, one core"),
        partial(ours_in_jit, where=threads, name=f"{JITTED}, all cores"),
        partial(ours_eager, where=one, name=f"{EAGER}, one core"),
        partial(ours_eager, where=threads, name=f"{EAGER}, all cores"),
        diffrax_by_hand,
    ]
