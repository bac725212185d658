"""`solve` and diffrax: functions of `(u0, p)` of a task, which return the states and the number of
steps tried."""

import dataclasses
import importlib
import warnings

import jax
import numpy as np

import ensembleode as eo


class Skip(Exception):
    """The reason why a contender does not take part."""


def imported(name):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gradsolve's, of float64 in a float32 process
            return importlib.import_module(name)
    except ImportError as error:
        raise Skip("not installed") from error


def solution(task, u0, p, where=None, alg=None, first=None, **options):
    """The solution by `solve`, with a new `prob_func` at each call, like a function of a user.

    `first` has the numbers of the problem that are in `own`; by default they are those of the first
    trajectory.
    """
    every = {"u0": u0, "p": p}
    if task.adaptive:
        options |= {"abstol": task.atol, "reltol": task.rtol}
    else:
        options["adaptive"] = False
    options |= {} if task.dt is None else {"dt": task.dt}
    options |= {"save_start": False} if task.times is None else {"saveat": task.times}

    def change(prob, ctx):
        return eo.remake(prob, **{name: every[name][ctx.index] for name in task.own})

    first = every | (first or {name: every[name][0] for name in task.own})
    prob = eo.ODEProblem(task.f, first["u0"], (0.0, task.t1), first["p"])
    ens = eo.EnsembleProblem(prob, change)
    where = where or eo.EnsembleThreads(1)
    return eo.solve(ens, alg or eo.Tsit5(), where, trajectories=task.n, **options)


def by_solve(task, where=None, alg=None, **options):
    def solve(u0, p):
        sim = solution(task, u0, p, where, alg, **options)
        return sim.u, sim.stats.naccept + sim.stats.nreject

    return solve


def by_diffrax(task, solver=None, max_steps=100_000, *, terms=None, gives=None):
    """`jax.vmap` of `diffrax.diffeqsolve`; `gives` computes from its solution what is returned.

    **Raises:** `Skip` without diffrax.
    """
    diffrax = imported("diffrax")
    terms = terms or diffrax.ODETerm(lambda t, u, p: task.f(u, p, t))
    gives = gives or (lambda sol: (sol.ys, sol.stats["num_steps"]))
    saveat = diffrax.SaveAt(t1=True) if task.times is None else diffrax.SaveAt(ts=task.times)
    controller = diffrax.ConstantStepSize()
    if task.adaptive:
        controller = diffrax.PIDController(rtol=task.rtol, atol=task.atol)

    def one(u0, p):
        sol = diffrax.diffeqsolve(
            terms,
            solver or diffrax.Tsit5(),
            0.0,
            task.t1,
            task.dt,
            u0,
            p,
            saveat=saveat,
            stepsize_controller=controller,
            max_steps=max_steps,
            throw=False,
        )
        return gives(sol)

    return jax.vmap(one, in_axes=tuple(0 if name in task.own else None for name in ("u0", "p")))


def exact_states(task, rows, tol=1e-13, **options):
    """The states of these trajectories by Vern9 in float64, on the CPU."""
    task = dataclasses.replace(task.only(rows), dt=None, rtol=tol, atol=tol)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        states, _ = by_solve(task, alg=eo.Vern9(), **options)(*task.inputs())
        return np.asarray(states)


def flat(tree):
    """All numbers of a tree in one row, in float64."""
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def gradient_error(found, expected):
    """The relative error, in norm."""
    found, expected = flat(found), flat(expected)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
