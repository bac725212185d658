"""A genetic toggle switch as a chemical Langevin equation: each reaction has a noise of its own.

Two proteins each repress the gene of the other (Gardner, Cantor and Collins, 2000), so that a cell
ends with much of one of them. Which one is decided by the noise of the four reactions (Gillespie,
"The chemical Langevin equation", 2000): their rates are the drift, and the roots of these a matrix
`[protein, reaction]`, by which the noises are multiplied. Without the repression, the mean and the
variance at rest are known, and both must be the rate of production.

    python examples/chemical_langevin.py [--trajectories N] [--no-plot]
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo


jax.config.update("jax_enable_x64", True)
# What a reaction changes: the first protein is made or decays, then the second.
CHANGES = jnp.array([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]])
PRODUCTION, HALF = 60.0, 20.0  # molecules in a lifetime; of the repressor that halve it
END, DT = 40.0, 0.01  # in lifetimes of a protein


def rates(u, half):
    """How often each reaction happens."""
    u = jnp.maximum(u, 0.0)  # (a step may end below zero)
    made = PRODUCTION / (1 + (u[::-1] / half) ** 2)
    return jnp.stack([made, u], axis=1).ravel()


def drift(u, half, t):
    return CHANGES @ rates(u, half)


def noise(u, half, t):
    return CHANGES * jnp.sqrt(rates(u, half))


def simulate(half, start, trajectories, saveat):
    prob = eo.SDEProblem(
        drift, noise, start, (0.0, END), half, noise_rate_prototype=jnp.zeros((2, 4))
    )
    ens = eo.EnsembleProblem(prob)
    return eo.solve(ens, eo.EM(), trajectories=trajectories, dt=DT, saveat=saveat)


def is_right(ends):
    """Whether the moments at rest are those known without repression, up to what is random."""
    n, mean, variance = len(ends), ends.mean(axis=0), ends.var(axis=0, ddof=1)
    print(f"without repression: mean {mean.round(2)}, variance {variance.round(1)}")
    print(f"exact: mean and variance {PRODUCTION}")
    # Four standard errors, and a hundredth for the size of the steps.
    near_mean = abs(mean - PRODUCTION) < 4 * (PRODUCTION / n) ** 0.5 + 0.01 * PRODUCTION
    near_variance = abs(variance / PRODUCTION - 1) < 4 * (2 / n) ** 0.5 + 0.01
    return bool(near_mean.all() and near_variance.all())


def has_two_states(ends):
    """Whether cells have much of one protein or of the other, and as many of each."""
    difference = ends[:, 0] - ends[:, 1]
    n, first = len(difference), np.mean(difference > 0)
    counts, _ = np.histogram(difference, bins=15, range=(-75.0, 75.0))
    left, middle, right = counts[:5].max(), counts[7], counts[10:].max()
    print(f"with it: {first:.1%} of {n} cells have more of the first protein")
    print(f"a histogram of the difference: peaks of {left} and {right}, {middle} between")
    return abs(first - 0.5) < 2 / n**0.5 and middle < 0.2 * min(left, right)


def plot(sim, free):
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    sim.plot(0, trajectories=slice(0, 12), ax=left, lw=0.8)
    left.set(xlabel="lifetimes", ylabel="first protein", title="Twelve cells")
    ends, edges = sim.u[:, -1], np.arange(-10.0, 91.0, 2.0)
    middle.hist2d(*ends.T, bins=(edges, edges), cmap="Blues")
    middle.set(xlabel="first protein", ylabel="second protein", title=f"{len(sim)} cells")
    right.hist(ends[:, 0], edges, density=True, alpha=0.5, label="first protein")
    right.hist(free[:, 0], edges, density=True, alpha=0.5, label="without repression")
    normal = np.exp(-((edges - PRODUCTION) ** 2) / (2 * PRODUCTION))
    normal /= (2 * np.pi * PRODUCTION) ** 0.5
    right.plot(edges, normal, "k:", label="normal, variance as the mean")
    right.set(xlabel="molecules", title="At the end")
    right.legend(frameon=False)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=80)


def main(trajectories, picture):
    free = simulate(np.inf, jnp.full(2, PRODUCTION), trajectories, END).u[:, -1]
    sim = simulate(HALF, jnp.full(2, HALF), trajectories, 0.25)
    print(sim)
    right = is_right(free)
    if not has_two_states(sim.u[:, -1]) or not right or len(sim.failed):
        sys.exit("another distribution than that expected")
    if picture:
        plot(sim, free)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.trajectories, not options.no_plot)
