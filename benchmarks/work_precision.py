"""Error against time over tolerances: the plot of cpu_ensembles.py."""

import dataclasses
import functools
import sys

import diffrax
import jax
import numpy as np
from common.contenders import by_diffrax, by_solve, exact_states, imported, Skip
from common.tasks import lorenz_task
from common.timing import best_of
from cpu_contenders import heyoka_adaptive, WIDER

import ensembleode as eo


def work_precision(n, repeats):
    """`{label: [(error, seconds), ...]}`, over tolerances, all compiled once (512-bit)."""
    jax.config.update("jax_enable_x64", True)
    task = lorenz_task(n, np.float64, 10.0)
    ends = exact_states(task, task.sample)[:, -1]
    curves = {}
    for label, loosest, solve in (*solvers(task), *heyoka_curve(task)):
        points = []
        for tol in 10.0 ** -np.arange(3.0, loosest + 1):
            off = np.abs(np.asarray(solve(tol))[task.sample].reshape(ends.shape) - ends)
            seconds, _ = best_of(functools.partial(solve, tol), repeats)
            points.append((float(np.median(off.max(axis=-1))), seconds))
        curves[label] = points
    return curves


def solvers(task):
    """`(label, tightest tolerance's exponent, tol -> end states)`."""
    inputs = task.inputs()

    def compiled(by, alg):
        def solve(tol, u0, p):
            return by(dataclasses.replace(task, rtol=tol, atol=tol), alg)(u0, p)[0]

        solve = jax.jit(solve, compiler_options=WIDER)
        return lambda tol: solve(tol, *inputs)

    for name in ("Bosh3", "Tsit5", "Dopri8", "Vern7", "Vern9"):
        own = compiled(lambda task, alg: by_solve(task, alg=alg), getattr(eo, name)())
        yield f"ensembleode {name}", 8 if name == "Bosh3" else 12, own
    for name in ("Tsit5", "Dopri8"):
        yield f"diffrax {name}", 12, compiled(by_diffrax, getattr(diffrax, name)())


def heyoka_curve(task):
    try:
        imported("heyoka")
    except Skip as reason:
        print(f"skipped heyoka: {reason}", file=sys.stderr)
        return

    @functools.cache
    def integrator(tol):
        return heyoka_adaptive(dataclasses.replace(task, rtol=tol, atol=tol)).call

    yield "heyoka (Taylor)", 12, lambda tol: integrator(tol)()[0]


def plot(curves, n, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    styles = {"ensembleode": "o-", "diffrax": "s--", "heyoka": "^:"}
    for label, points in curves.items():
        off, seconds = np.array(points).T
        axes.loglog(off, 1e6 * seconds / n, styles[label.split()[0]], label=label, markersize=4)
    axes.set(xlabel="median error at t = 10", ylabel="µs per trajectory (one core)")
    axes.set_title(f"Lorenz, {n} trajectories, float64, tolerances from 1e-3 to 1e-12")
    axes.invert_xaxis()
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
