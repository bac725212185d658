"""Solve the Allen-Cahn equation by collocation: a network whose residual is small at many points.

An item of the fit is a collocation point. The boundary conditions are added to the loss of each
point, so that the mean over the points counts them once. The initial condition holds by
construction (Lagaris et al., IEEE Trans. Neural Netw. 9, 1998). Adam on minibatches comes first,
then L-BFGS on all points. `--dist` shares the points among all devices, and `--microbatch` limits
the memory, however many points there are. The result is compared with a reference solution by a
Fourier spectral method, which the script computes. Needs the extra `plot`.

    u_t = 0.0001 u_xx + 5 u - 5 u^3,   u(0, x) = x^2 cos(pi x),   -1 <= x <= 1,  0 <= t <= 1,

periodic in x.

    python examples/allen_cahn.py [--points N] [--adam N] [--lbfgs N] [--batch N] [--dist]
        [--microbatch N] [--checkpoint FOLDER] [--no-plot]
"""

import argparse
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


DIFFUSION, REACTION = 1e-4, 5.0
N_X, N_T = 512, 201  # points of the reference solution, and of the boundary


def start(x):
    return x**2 * jnp.cos(jnp.pi * x)


def values(network, x, t):
    """[point]"""
    return start(x) + t * jax.vmap(network)(jnp.stack([x, t], 1))[:, 0]


def along(fn, x):
    """`fn` and its derivative, for a function of each point alone."""
    return jax.jvp(fn, (x,), (jnp.ones_like(x),))


def residuals(network, x, t):
    u_t = along(lambda t: values(network, x, t), t)[1]
    (u, _), (_, u_xx) = along(lambda x: along(lambda x: values(network, x, t), x), x)
    return u_t - DIFFUSION * u_xx - REACTION * (u - u**3)


def boundary(network):
    """The mean square of what differs between the two ends.

    (Of the derivatives, at t = 0 and just after it, the initial condition says what differs: the
    loss stays above 0.08.)
    """
    t = jnp.linspace(0.0, 1.0, N_T)
    ends = (along(lambda x: values(network, x, t), jnp.full(N_T, end)) for end in (-1.0, 1.0))
    (left, left_x), (right, right_x) = ends
    return jnp.mean((left - right) ** 2 + (left_x - right_x) ** 2)


def loss(network, points):
    # What is wrong early grows with exp(5 t), as u = 0 is unstable: it weighs so much more.
    weight = jnp.exp(-REACTION * points["t"])
    return weight * residuals(network, points["x"], points["t"]) ** 2 + boundary(network)


def reference():
    """Times, points and the solution there: [time], [point], [time, point]."""
    x = jnp.linspace(-1.0, 1.0, N_X, endpoint=False)
    squares = (jnp.pi * jnp.fft.rfftfreq(N_X, 1 / N_X)) ** 2

    def f(u, p, t):
        diffusion = jnp.fft.irfft(-DIFFUSION * squares * jnp.fft.rfft(u), N_X)
        return diffusion + REACTION * (u - u**3)

    prob = eo.ODEProblem(f, start(x), (0.0, 1.0))
    sol = eo.solve(prob, eo.Dopri8(), saveat=0.01, abstol=1e-6, reltol=1e-6)
    return sol.t, x, sol.u


def plot(t, x, exact, found, results):
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    for ax, (name, field) in zip(
        axes,
        {"reference": exact, "network": found, "difference": found - exact}.items(),
        strict=False,
    ):
        picture = ax.pcolormesh(t, x, np.asarray(field).T, cmap="RdBu_r", rasterized=True)
        figure.colorbar(picture, ax=ax)
        ax.set(title=name, xlabel="t", ylabel="x")
    done = 0
    for name, result in results.items():
        axes[3].semilogy(done + np.arange(result.steps), result.losses, label=name, lw=0.8)
        done += result.steps
    axes[3].set(title="loss", xlabel="step")
    axes[3].legend(frameon=False)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(options):
    key, places = jax.random.split(jax.random.key(0))
    unit = np.random.default_rng(0).random((2, options.points), dtype=np.float32)
    points = {"x": 2 * unit[0] - 1, "t": unit[1]}
    network = eqx.nn.MLP(2, 1, width_size=128, depth=4, activation=jnp.tanh, key=key)
    how = {"dist": options.dist, "microbatch": options.microbatch, "key": places}
    rate = optax.cosine_decay_schedule(3e-3, max(1, options.adam))
    stages = {
        "Adam": (optax.adam(rate), options.adam, options.batch),
        "L-BFGS": (optax.lbfgs(), options.lbfgs, None),
    }
    results = {}
    for name, (optimizer, steps, batch_size) in stages.items():
        if not steps:
            continue
        folder = options.checkpoint and pathlib.Path(options.checkpoint) / name
        began = time.perf_counter()
        results[name] = result = eo.fit(
            loss,
            network,
            points,
            optimizer=optimizer,
            maxiters=steps,
            batch_size=batch_size,
            checkpoint=folder,
            **how,
        )
        network = result.params
        seconds = (time.perf_counter() - began) / steps
        first, last = result.losses[[0, -1]]
        print(f"{name}: {steps} steps of {seconds:.3f} s, loss from {first:.3g} to {last:.3g}")

    t, x, exact = reference()
    grid = {"x": np.tile(x, len(t)), "t": np.repeat(np.asarray(t), len(x))}
    found = eo.predict(
        lambda network, b: values(network, b["x"], b["t"]), network, grid, batch_size=10_000
    ).reshape(exact.shape)
    error = float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
    print(f"relative L2 error over {len(t)} x {len(x)} points: {error:.3f}")
    if options.picture:
        plot(t, x, exact, found, results)
    if any(result.stopped == "nonfinite" for result in results.values()) or not error < 1.5:
        sys.exit("the network did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=20_000, help="by default 20,000")
    parser.add_argument("--adam", type=int, default=15_000, help="steps; by default 15,000")
    parser.add_argument("--lbfgs", type=int, default=300, help="steps; by default 300")
    parser.add_argument(
        "--batch", type=int, default=1000, help="points of a step of Adam; 0 is all"
    )
    parser.add_argument("--dist", action="store_true", help="share them among all devices")
    parser.add_argument("--microbatch", type=int, help="points that a device has at a time")
    parser.add_argument("--checkpoint", help="a folder")
    parser.add_argument("--no-plot", dest="picture", action="store_false")
    given = parser.parse_args()
    given.batch = given.batch or None
    main(given)
