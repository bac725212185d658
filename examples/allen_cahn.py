"""Solve the Allen-Cahn equation by collocation: a network whose residual is small at many points.

An item of the fit is a collocation point, and its loss is the square of the equation's residual
there. The boundary and initial conditions hold by construction: the network sees x by waves of the
period, and what it adds to the initial state is multiplied by the time. Time is cut into windows,
fitted one after the other, each from the end of the one before. The Levenberg-Marquardt method ends
within 0.1% of a spectral solution; Adam and L-BFGS can be put beside it. `--dist` shares the points
among all devices, and memory is limited, however many points there are. Needs the extra `plot`.

    u_t = 0.0001 u_xx + 5 u - 5 u^3,   u(0, x) = x^2 cos(pi x),   -1 <= x <= 1,  0 <= t <= 1,

periodic in x. The method has several sources: initial states by construction are from Lagaris et
al. (IEEE Trans. Neural Netw. 9, 1998), and windows, for this equation, from Wight and Zhao (Commun.
Comput. Phys. 29, 2021).

    python examples/allen_cahn.py [--optimizer lm|adam|lbfgs ...] [--points N] [--steps N]
        [--batch N] [--microbatch N] [--dist] [--seed N] [--checkpoint FOLDER] [--no-plot]
"""

import argparse
import os
import pathlib
import sys
import time

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

DIFFUSION, REACTION = 1e-4, 5.0
POINTS, WINDOWS, WAVES = 16_000, 4, 5
ENOUGH = 0.002  # the largest error of `lm`
OPTIMIZERS = {  # and the steps of a window
    "lm": ("Levenberg-Marquardt", lambda _: eo.LevenbergMarquardt(floor=1.0), 40),
    "adam": ("Adam", lambda n: optax.adam(optax.cosine_decay_schedule(3e-3, n)), 2000),
    "lbfgs": ("L-BFGS", lambda _: optax.lbfgs(), 600),
}


def start(x):
    return x**2 * jnp.cos(jnp.pi * x)


class Network(eqx.Module):
    """In a window, u is what it was before, plus s times this, as s goes from 0 to 1."""

    layers: eqx.nn.MLP

    def __init__(self, key):
        self.layers = eqx.nn.MLP(2 * WAVES + 1, "scalar", 16, 3, activation=jnp.tanh, key=key)

    def __call__(self, x, s):  # [point]
        phase = jnp.pi * x[:, None] * jnp.arange(1, WAVES + 1)
        features = [jnp.cos(phase), jnp.sin(phase), 2 * s[:, None] - 1]
        return jax.vmap(self.layers)(jnp.concatenate(features, 1))


def along(fn, x):
    """The derivative of a function of each point alone."""
    return jax.jvp(fn, (x,), (jnp.ones_like(x),))[1]


def twice_along(fn, x):
    return along(lambda x: along(fn, x), x)


def residuals(network, points):
    x, s = points["x"], points["s"]
    u = points["before"] + s * network(x, s)
    u_t = WINDOWS * along(lambda s: s * network(x, s), s)
    u_xx = points["before_xx"] + s * twice_along(lambda x: network(x, s), x)
    return u_t - DIFFUSION * u_xx - REACTION * (u - u**3)


def squares(network, points):
    return residuals(network, points) ** 2


def at_the_end(networks, x):
    """The state at the end of the last of these windows."""
    return start(x) + sum(network(x, jnp.ones_like(x)) for network in networks)


def collocation_points(networks, n, rng):
    """Of the next window, with what does not depend on its network."""

    def before(networks, points):
        u = lambda x: at_the_end(networks, x)  # noqa: E731
        x = points["x"]
        return {"before": u(x), "before_xx": twice_along(u, x)}

    points = {"x": rng.uniform(-1, 1, n), "s": rng.uniform(0, 1, n)}
    return points | eo.predict(before, networks, points, batch_size=10_000)


def train(name, options):
    """The networks of the windows; and seconds and loss of each step."""
    _, optimizer, steps = OPTIMIZERS[name]
    steps = options.steps or steps
    rng, network = np.random.default_rng(options.seed), Network(jax.random.key(options.seed))
    networks, log, began = [], [], time.perf_counter()
    for window in range(WINDOWS):
        result = eo.fit(
            residuals if name == "lm" else squares,
            network,
            collocation_points(networks, options.points // WINDOWS, rng),
            optimizer=optimizer(steps),
            maxiters=steps,
            batch_size=options.batch,
            microbatch=options.microbatch,
            dist=options.dist,
            checkpoint=options.checkpoint and pathlib.Path(options.checkpoint, name, str(window)),
            callback=lambda state: log.append((time.perf_counter() - began, state.loss)),
        )
        network = result.params
        networks.append(network)
    return networks, np.array(log)


def solution(networks, t, x):
    """[time, point]"""
    windows = np.minimum((WINDOWS * t).astype(int), WINDOWS - 1)
    parts = []
    for i, network in enumerate(networks):
        s = WINDOWS * t[windows == i, None] - i
        before = at_the_end(networks[:i], x)
        parts.append(before + s * jax.vmap(lambda s, n=network: n(x, 0 * x + s))(s))
    return jnp.concatenate(parts)


def reference(n=512):
    """Times, points, and the solution there, [time, point], by a Fourier spectral method."""
    x = jnp.linspace(-1.0, 1.0, n, endpoint=False)
    squares = (jnp.pi * jnp.fft.rfftfreq(n, 1 / n)) ** 2

    def f(u, p, t):
        diffusion = jnp.fft.irfft(-DIFFUSION * squares * jnp.fft.rfft(u), n)
        return diffusion + REACTION * (u - u**3)

    prob = eo.ODEProblem(f, start(x), (0.0, 1.0))
    sol = eo.solve(prob, eo.Dopri8(), saveat=0.005, abstol=1e-8, reltol=1e-8)
    return sol.t, x, sol.u


def plot(t, x, exact, found, logs):
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    title = f"network, by {OPTIMIZERS[next(iter(logs))][0]}"
    fields = {"reference": exact, title: found, "difference": found - exact}
    for ax, (name, field) in zip(axes[:3], fields.items(), strict=True):
        most = float(jnp.abs(field).max())
        look = {"cmap": "RdBu_r", "vmin": -most, "vmax": most, "rasterized": True}
        figure.colorbar(ax.pcolormesh(t, x, np.asarray(field).T, **look), ax=ax)
        ax.set(title=name, xlabel="t", ylabel="x")
    for name, log in logs.items():
        axes[3].semilogy(*log.T, label=OPTIMIZERS[name][0], lw=0.8)
    axes[3].set(title="loss, window after window", xlabel="seconds", ylim=(1e-9, None))
    axes[3].legend(frameon=False, loc="lower left")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(options):
    t, x, exact = reference()
    errors, logs, found = {}, {}, {}
    for name in options.optimizer:
        networks, logs[name] = train(name, options)
        found[name] = solution(networks, t, x)
        errors[name] = float(jnp.linalg.norm(found[name] - exact) / jnp.linalg.norm(exact))
        seconds, loss = logs[name][-1]
        print(
            f"{OPTIMIZERS[name][0]}: {len(logs[name])} steps in {seconds:.0f} s, loss {loss:.1e} "
            f"at last, relative L2 error {100 * errors[name]:.3f}%"
        )
    if options.picture:
        plot(t, x, exact, found[options.optimizer[0]], logs)
    as_meant = options.points >= POINTS and not (options.steps or options.batch)
    if not max(errors.values()) < 1.5 or (as_meant and not errors.get("lm", 0.0) < ENOUGH):
        sys.exit("the network did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
