"""Fit a continuous normalising flow to points in the plane, by their likelihood.

A neural ODE carries the points to a standard normal. By how much it stretches the plane on the way,
the logarithm of the determinant, is the integral of the divergence of its field, which `integrand`
of the problem adds up beside the solution. So each point has a density, and `fit` maximises that of
the data. Solved the other way, points of the normal become samples. Needs the extra `plot`.

    python examples/normalizing_flow.py [--updates N] [--no-plot]
"""

import argparse
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import ensembleode as eo


UPDATES, NOISE = 2000, 0.15
GRID = np.linspace(-6.0, 6.0, 241)  # on which the density is integrated


def field(x, network, t):
    return network(jnp.concatenate([x, t[None]]))


def divergence(x, network, t):
    return jnp.trace(jax.jacfwd(field)(x, network, t))


def flow(network, points, tspan, **options):
    """The solution from points `[n, 2]`: forwards to the normal, and backwards from it."""
    # (The steps don't look at the integral, which needs a tighter tolerance than the points.)
    prob = eo.ODEProblem(field, points[0], tspan, network, integrand=divergence)
    return eo.solve(eo.EnsembleProblem(prob, u0=points), reltol=1e-4, **options)


def log_density(network, points, **options):
    sim = flow(network, points, (0.0, 1.0), **options)
    normal = -jnp.sum(sim.u[:, -1] ** 2, axis=1) / 2 - jnp.log(2 * jnp.pi)
    return normal + sim.integral[:, -1]


def loss(network, points):
    """The negative log-likelihood of each point."""
    return -log_density(network, points)


def circles(angle):
    """Points on two half circles, `[2, n, 2]`."""
    upper = 2 * np.stack([np.cos(angle) - 0.5, np.sin(angle) - 0.25], axis=-1)
    return np.stack([upper, -upper])


def moons(n, seed):
    """Points on the half circles, with noise."""
    rng = np.random.default_rng(seed)
    points = circles(rng.uniform(0.0, np.pi, n))[rng.integers(2, size=n), np.arange(n)]
    return np.float32(points + NOISE * rng.normal(size=(n, 2)))


def exact_log_density(points):
    """That of the moons: normals whose centres are spread over the half circles."""
    centres = circles((np.arange(500) + 0.5) * np.pi / 500).reshape(-1, 2)
    square = np.sum((points[:, None] - centres) ** 2, axis=2) / NOISE**2
    return np.log(np.mean(np.exp(-square / 2), axis=1) / (2 * np.pi * NOISE**2))


def plot(result, best, density, paths):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    result.plot(ax=left, label="batches")
    left.axhline(best, color="black", ls="--", lw=1, label="by the exact density")
    left.set(title="Negative log-likelihood", xlabel="update", ylabel=None, yscale="linear")
    left.legend(frameon=False)
    middle.set_title("Density")
    middle.pcolormesh(GRID, GRID, density)
    right.set_title("Samples, and the way of some")
    right.plot(*paths[:60].T, color="0.7", lw=0.6)
    right.plot(*paths[:, -1].T, ".", ms=2)
    for ax in (middle, right):
        ax.set(aspect="equal", xlim=(-4, 4), ylim=(-3, 3))
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, picture):
    training, held_out = moons(4096, seed=0), moons(2048, seed=1)
    result = eo.fit(
        loss,
        eqx.nn.MLP(3, 2, width_size=32, depth=2, activation=jnp.tanh, key=jax.random.key(0)),
        training,
        optimizer=optax.adam(optax.cosine_decay_schedule(1e-2, updates)),
        maxiters=updates,
        batch_size=256,
        validation=held_out,
        validate_every=50,
    )
    print(result)

    grid = np.stack(np.meshgrid(GRID, GRID), axis=-1, dtype="f4")
    density = jnp.exp(log_density(result.best, grid.reshape(-1, 2))).reshape(grid.shape[:2])
    total = float(density.sum()) * (GRID[1] - GRID[0]) ** 2
    best = -exact_log_density(held_out).mean()
    print(f"negative log-likelihood held out: {result.best_loss:.3f}; exact: {best:.3f}")
    print(f"the density integrates to {total:.4f}")
    if picture:
        normals = jax.random.normal(jax.random.key(1), (1000, 2))
        times = jnp.linspace(1.0, 0.0, 21)
        plot(result, best, density, flow(result.best, normals, (1.0, 0.0), saveat=times).u)
    learned = result.best_loss < result.validation_losses[0]
    if not learned or (updates >= UPDATES and not result.best_loss < best + 0.1):
        sys.exit("the flow did not learn")
    if not abs(total - 1.0) < 0.02:
        sys.exit("the density does not integrate to 1")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, not options.no_plot)
