"""Propagate uncertainty: an epidemic whose parameters and start are known only roughly.

Each trajectory draws its own numbers from `ctx.key`, which do not depend on where it runs or on how
the ensemble is cut into batches. The result is the probability that more people are ill at once
than there is room for, with its standard error.

    python examples/uncertainty.py [--trajectories N] [--no-plot]
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo


jax.config.update("jax_enable_x64", True)
NAMES, ROOM = ["susceptible", "infected", "recovered"], 0.25


def epidemic(u, p, t):
    """Kermack and McKendrick's model: shares of the population, and rates a day."""
    susceptible, infected, _ = u
    caught, healed = p["contact"] * susceptible * infected, p["recovery"] * infected
    return jnp.array([-caught, caught - healed, healed])


def draw(prob, ctx):
    """Lognormal rates, and from 1 to 100 infected of 100,000."""
    one, two, three = jax.random.split(ctx.key, 3)
    p = {
        "contact": 0.3 * jnp.exp(0.15 * jax.random.normal(one)),
        "recovery": 0.12 * jnp.exp(0.15 * jax.random.normal(two)),
    }
    infected = 10 ** jax.random.uniform(three, minval=-5, maxval=-3)
    return eo.remake(prob, p=p, u0=jnp.array([1 - infected, infected, 0.0]))


PROB = eo.ODEProblem(
    epidemic, jnp.array([1.0, 0, 0]), (0.0, 240.0), {"contact": 0.3, "recovery": 0.12}
)


def plot(sim, peaks):
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    few = slice(0, 150)
    sim.plot(1, names=NAMES, trajectories=few, color=peaks, label="peak", ax=left)
    left.set(title="150 epidemics", xlabel="day")
    eo.EnsembleSummary(sim).plot(names=NAMES, ax=middle)
    middle.set(title=f"{len(sim)} epidemics", xlabel="day", ylim=(-0.05, 1.6))
    middle.legend(frameon=False, loc="upper right")
    right.hist(peaks, bins=60, color="C1")
    right.axvline(ROOM, color="black", ls="--", label="room")
    right.set(title="Ill on the worst day", xlabel="share of the population")
    right.legend(frameon=False)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(trajectories, picture):
    ens = eo.EnsembleProblem(PROB, draw)
    options = {"trajectories": trajectories, "saveat": 1.0, "abstol": 1e-8, "reltol": 1e-8}
    sim = eo.solve(ens, **options)
    peaks = sim.u[:, :, 1].max(axis=1)
    too_many = peaks > ROOM
    error = np.std(too_many) / np.sqrt(trajectories)
    print(f"more than {ROOM:.0%} ill at once: {np.mean(too_many):.1%} ± {error:.1%}")
    print(f"{trajectories} trajectories in {sim.elapsed:.2f} s, the {sim.engine.name} engine")

    again = eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), batch_size=37, **options)
    same = np.array_equal(again.u, sim.u)
    population = abs(sim.u.sum(axis=-1) - 1).max()
    print(f"the same draws and bits in series, in batches of 37: {same}")
    print(f"people lost or found: {population:.0e}")
    if not same or population > 1e-10 or len(sim.failed):
        sys.exit("another way of running found other numbers, or people were lost")
    if picture:
        plot(sim, peaks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=5_000)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.trajectories, not options.no_plot)
