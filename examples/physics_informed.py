"""Solve equations by collocation: a network whose residual is small at many points, without data.

An item of the fit is a collocation point, and its loss is the square of the equation's residual
there. The Allen-Cahn equation, Burgers' and that of waves are solved, and compared with closed
forms or a spectral solution: by Levenberg-Marquardt, they end within half a percent of these. Adam
and L-BFGS can be put beside it. Needs the extra `plot`.

    allen-cahn   u_t = 0.0001 u_xx + 5 u - 5 u^3    u(0, x) = x^2 cos(pi x)
    burgers      u_t = 0.01 / pi u_xx - u u_x       u(0, x) = -sin(pi x)
    wave         u_tt = 4 u_xx                      u(0, x) = sin(pi x) + sin(4 pi x) / 2

for -1 <= x <= 1 and 0 <= t <= 1, periodic in x. The boundary and initial conditions hold by
construction: the network sees x by waves of the period, and what it adds to the initial state is
multiplied by the time (or its square, where the equation is of second order in time). Time is cut
into windows, fitted one after the other, each from the end of the one before. `--dist` shares the
points among all devices, and memory is limited, however many points there are.

The method has several sources: initial states by construction are from Lagaris et al. (IEEE Trans.
Neural Netw. 9, 1998), and windows, for the Allen-Cahn equation, from Wight and Zhao (Commun.
Comput. Phys. 29, 2021).

    python examples/physics_informed.py [--equation allen-cahn|burgers|wave ...]
        [--optimizer lm|adam|lbfgs ...] [--points N] [--steps N] [--batch N] [--microbatch N]
        [--dist] [--seed N] [--checkpoint FOLDER] [--no-plot]
"""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import ensembleode as eo


jax.config.update("jax_enable_x64", True)
# Threads that factorise a matrix of this size wait for one another, if other programs run.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

POINTS, WINDOWS, WAVES = 16_000, 4, 5
VISCOSITY = 0.01 / np.pi
OPTIMIZERS = {  # and the steps of a window
    "lm": ("Levenberg-Marquardt", lambda _: eo.LevenbergMarquardt(floor=1.0), 40),
    "adam": ("Adam", lambda n: optax.adam(optax.cosine_decay_schedule(3e-3, n)), 2000),
    "lbfgs": ("L-BFGS", lambda _: optax.lbfgs(), 600),
}


class Equation(NamedTuple):
    start: Callable  # u(0, x); where the equation is of second order, u_t(0, x) = 0
    order: int  # of the derivative by time, which is rate(u, u_x, u_xx)
    rate: Callable
    exact: Callable  # exact(t, x): [time, point]
    enough: float  # the largest error of `lm`


def spectral(t, x):
    """The Allen-Cahn equation, by a Fourier spectral method on these points of a grid."""
    n, equation = len(x), EQUATIONS["allen-cahn"]
    squares = (jnp.pi * jnp.fft.rfftfreq(n, 1 / n)) ** 2

    def f(u, p, t):
        return equation.rate(u, None, jnp.fft.irfft(-squares * jnp.fft.rfft(u), n))

    prob = eo.ODEProblem(f, equation.start(x), (0.0, 1.0))
    return eo.solve(prob, eo.Dopri8(), saveat=t, abstol=1e-8, reltol=1e-8).u


def cole_hopf(t, x):
    """The closed form of Burgers' equation: integrals, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    t, x = t[1:, None, None], x[:, None]
    y = x - np.sqrt(4 * VISCOSITY * t) * nodes
    heat = np.exp(-np.cos(np.pi * y) / (2 * np.pi * VISCOSITY)) * weights
    later = -(np.sin(np.pi * y) * heat).sum(-1) / heat.sum(-1)
    return np.concatenate([-np.sin(np.pi * x.T), later])


def standing(t, x):
    """The wave equation: each sine swings for itself."""
    waves = ((1, 1.0), (4, 0.5))
    return sum(a * np.sin(k * np.pi * x) * np.cos(2 * k * np.pi * t[:, None]) for k, a in waves)


EQUATIONS = {
    "allen-cahn": Equation(
        lambda x: x**2 * jnp.cos(jnp.pi * x),
        1,
        lambda u, u_x, u_xx: 1e-4 * u_xx + 5 * (u - u**3),
        spectral,
        0.002,
    ),
    "burgers": Equation(
        lambda x: -jnp.sin(jnp.pi * x),
        1,
        lambda u, u_x, u_xx: VISCOSITY * u_xx - u * u_x,
        cole_hopf,
        0.005,
    ),
    "wave": Equation(
        lambda x: jnp.sin(jnp.pi * x) + jnp.sin(4 * jnp.pi * x) / 2,
        2,
        lambda u, u_x, u_xx: 4 * u_xx,
        standing,
        0.01,
    ),
}


class Network(eqx.Module):
    """In a window, u is what is known of it before, plus a power of s times this, as s goes from 0
    to 1."""

    layers: eqx.nn.MLP

    def __init__(self, key):
        self.layers = eqx.nn.MLP(2 * WAVES + 1, "scalar", 16, 3, activation=jnp.tanh, key=key)

    def __call__(self, x, s):  # [point]
        phase = jnp.pi * x[:, None] * jnp.arange(1, WAVES + 1)
        features = [jnp.cos(phase), jnp.sin(phase), 2 * s[:, None] - 1]
        return jax.vmap(self.layers)(jnp.concatenate(features, 1))


def with_slope(fn, x):
    """A function of each point alone, and its derivative."""
    return jax.jvp(fn, (x,), (jnp.ones_like(x),))


def with_derivatives(fn, x):
    """The same with the first two derivatives, [3, point]."""
    (u, u_x), (_, u_xx) = with_slope(lambda x: with_slope(fn, x), x)
    return jnp.stack([u, u_x, u_xx])


def at_the_end(equation, networks, x):
    """At the end of the last of these windows, u and, by s, its derivatives below the order."""
    if not networks:
        return [equation.start(x), jnp.zeros_like(x)][: equation.order]
    known = at_the_end(equation, networks[:-1], x)
    of_s = lambda s: solved(equation, networks[-1], known, x, s)  # noqa: E731
    return list(with_slope(of_s, jnp.ones_like(x)))[: equation.order]


def solved(equation, network, known, x, s):
    """u in a window, from what is known at its beginning."""
    return sum(a * s**k for k, a in enumerate(known)) + s**equation.order * network(x, s)


def residuals_of(equation):
    """The residuals at points, as a loss for Levenberg-Marquardt."""

    def residuals(network, points):
        x, s, known = points["x"], points["s"], points["known"].transpose(1, 2, 0)
        by_time = lambda s: solved(equation, network, known[:, 0], x, s)  # noqa: E731
        for _ in range(equation.order):
            by_time = lambda s, fn=by_time: WINDOWS * with_slope(fn, s)[1]  # noqa: E731
        new = with_derivatives(lambda x: network(x, s), x)
        u = sum(a * s**k for k, a in enumerate(known)) + s**equation.order * new
        return by_time(s) - equation.rate(*u)

    return residuals


def collocation_points(equation, networks, n, rng):
    """Of the next window, with what does not depend on its network."""

    def known(networks, points):  # [point, derivative by s, derivative by x]
        found = lambda x: at_the_end(equation, networks, x)  # noqa: E731
        each = [
            with_derivatives(lambda x, k=k: found(x)[k], points["x"]) for k in range(equation.order)
        ]
        return jnp.stack(each).transpose(2, 0, 1)

    points = {"x": rng.uniform(-1, 1, n), "s": rng.uniform(0, 1, n)}
    return points | {"known": eo.predict(known, networks, points, batch_size=10_000)}


def train(name, of, options):
    """The networks of the windows; and seconds and loss of each step."""
    equation, (_, optimizer, steps) = EQUATIONS[of], OPTIMIZERS[name]
    residuals, steps = residuals_of(equation), options.steps or steps
    rng, network = np.random.default_rng(options.seed), Network(jax.random.key(options.seed))
    networks, log, began = [], [], time.perf_counter()
    for window in range(WINDOWS):
        folder = options.checkpoint and pathlib.Path(options.checkpoint, of, name, str(window))
        result = eo.fit(
            residuals if name == "lm" else lambda network, points: residuals(network, points) ** 2,
            network,
            collocation_points(equation, networks, options.points // WINDOWS, rng),
            optimizer=optimizer(steps),
            maxiters=steps,
            batch_size=options.batch,
            microbatch=options.microbatch,
            dist=options.dist,
            checkpoint=folder,
            callback=lambda state: log.append((time.perf_counter() - began, state.loss)),
        )
        network = result.params
        networks.append(network)
    return networks, np.array(log)


def solution(equation, networks, t, x):
    """[time, point]"""
    windows = np.minimum((WINDOWS * t).astype(int), WINDOWS - 1)
    parts = []
    for i, network in enumerate(networks):
        known, times = at_the_end(equation, networks[:i], x), WINDOWS * t[windows == i] - i
        of_time = lambda s, n=network, a=known: solved(equation, n, a, x, 0 * x + s)  # noqa: E731
        parts.append(jax.vmap(of_time)(times))
    return jnp.concatenate(parts)


def plot(t, x, solutions, logs):
    """What was found, and the difference from the reference, of each equation; and the losses."""
    n = len(solutions)
    figure, axes = plt.subplots(2, n + 1, figsize=(4 * n + 4, 5.6), layout="constrained")
    for column, (of, (exact, found)) in zip(axes.T, solutions.items(), strict=False):
        for ax, title, field in zip(
            column, (of, "difference"), (found, found - exact), strict=True
        ):
            most = float(np.abs(field).max())
            look = {"cmap": "RdBu_r", "vmin": -most, "vmax": most, "rasterized": True}
            figure.colorbar(ax.pcolormesh(t, x, np.asarray(field).T, **look), ax=ax)
            ax.set(title=title, xlabel="t", ylabel="x")
    top, bottom = axes[:, -1]
    bottom.axis("off")
    for (of, name), log in logs.items():
        top.semilogy(*log.T, label=f"{of}, {name}", lw=0.8)
    top.set(title="loss, window after window", xlabel="seconds")
    bottom.legend(*top.get_legend_handles_labels(), frameon=False, loc="upper left")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=70)


def main(options):
    t, x = np.linspace(0.0, 1.0, 201), np.linspace(-1.0, 1.0, 512, endpoint=False)
    solutions, logs, missed = {}, {}, False
    as_meant = options.points >= POINTS and not (options.steps or options.batch)
    for of in options.equation:
        equation = EQUATIONS[of]
        exact = equation.exact(t, x)
        for name in options.optimizer:
            networks, log = train(name, of, options)
            found = solution(equation, networks, t, x)
            error = float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
            print(
                f"{of}, {OPTIMIZERS[name][0]}: {len(log)} steps in {log[-1, 0]:.0f} s, loss "
                f"{log[-1, 1]:.1e} at last, relative L2 error {100 * error:.3f}%"
            )
            logs[of, name] = log
            solutions.setdefault(of, (exact, found))  # (of the first optimiser)
            missed |= not error < (equation.enough if as_meant and name == "lm" else 1.5)
    if options.picture:
        plot(t, x, solutions, logs)
    if missed:
        sys.exit("the network did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--equation", nargs="+", choices=EQUATIONS, default=["allen-cahn"])
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=["lm"])
    parser.add_argument("--points", type=int, default=POINTS, help=f"by default {POINTS:,}")
    parser.add_argument("--steps", type=int, help="of each window")
    parser.add_argument("--batch", type=int, help="points of a step; by default all of a window")
    parser.add_argument("--microbatch", type=int, help="points that a device has at a time")
    parser.add_argument("--dist", action="store_true", help="share them among all devices")
    parser.add_argument("--seed", type=int, default=0, help="of the points and the network")
    parser.add_argument("--checkpoint", help="a folder")
    parser.add_argument("--no-plot", dest="picture", action="store_false")
    main(parser.parse_args())
