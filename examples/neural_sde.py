"""Train a neural SDE on a series of measurements, by the distribution of what comes next.

Drift and diffusion are networks. From the start of each window of the series the model draws
samples of its continuation, and `fit` minimises their energy score (Gneiting and Raftery, 2007),
which is least where the samples have the distribution of the data. Each window has a key, by which
its samples have their noise: the gradient goes through the solve with this noise, and each update
has another. The series is made up, so that the equation is known. Needs the extra `plot`.

    python examples/neural_sde.py [--updates N] [--no-plot]
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import ensembleode as eo


UPDATES, SAMPLES = 800, 32
SPACING, WINDOW, DT = 0.25, 4, 0.05  # between observations; observations to predict; of a step
LAGS = np.arange(41)


class Model(NamedTuple):
    drift: Callable
    diffusion: Callable


# Two wells, between which there is most noise.
NATURE = Model(lambda u: u - u**3, lambda u: 0.4 + 0.4 * jnp.exp(-(u**2)))


def neural(key):
    one, two = jax.random.split(key)
    options = {"width_size": 16, "depth": 2, "activation": jnp.tanh}
    drift = eqx.nn.MLP("scalar", "scalar", key=one, **options)
    options["final_activation"] = jax.nn.softplus
    return Model(drift, eqx.nn.MLP("scalar", "scalar", key=two, **options))


def paths(model, start, key, n, times):
    """Solutions from one start, `[n, time]`."""
    prob = eo.SDEProblem(
        lambda u, model, t: model.drift(u),
        lambda u, model, t: model.diffusion(u),
        start,
        (0.0, times[-1]),
        model,
    )
    ens = eo.EnsembleProblem(prob)
    return eo.solve(ens, eo.EM(), trajectories=n, dt=DT, saveat=times, key=key).u


def energy_score(samples, seen):
    """That of samples `[sample, ...]` for an observation `[...]`."""

    def distance(x):
        return jnp.sqrt(jnp.sum(x**2, axis=-1) + 1e-12)  # (the root has no slope at zero)

    n = len(samples)
    spread = jnp.sum(distance(samples[:, None] - samples)) / (n * (n - 1))
    return jnp.mean(distance(samples - seen)) - spread / 2


def loss(model, windows, keys):
    """The score of each window, whose samples are solved with its key."""
    times = SPACING * np.arange(1, WINDOW + 1)

    def of_window(window, key):
        return energy_score(paths(model, window[0], key, SAMPLES, times), window[1:])

    return jax.vmap(of_window)(windows, keys)


def statistics(series):
    """The standard deviation and the autocorrelation of series `[series, time]`."""
    series, length = series - series.mean(), series.shape[1]
    shifted = [np.mean(series[:, lag:] * series[:, : length - lag]) for lag in LAGS]
    return shifted[0] ** 0.5, np.array(shifted) / shifted[0]


def plot(models, series, runs, correlations):
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    axes[0].plot(SPACING * np.arange(400), series[0, :400], lw=0.8)
    axes[0].set(xlabel="t", title="The start of the series")
    x, bins = np.linspace(-1.6, 1.6, 200), np.linspace(-2.5, 2.5, 76)
    for (name, model), style in zip(models.items(), ("-", "k:"), strict=True):
        axes[1].plot(x, jax.vmap(model.drift)(x), style)
        axes[1].plot(x, jax.vmap(model.diffusion)(x), style)
        density, _ = np.histogram(runs[name], bins, density=True)
        axes[2].plot((bins[1:] + bins[:-1]) / 2, density, style, label=name)
        axes[3].plot(SPACING * LAGS, correlations[name], style)
    axes[1].set(xlabel="u", title="Drift and diffusion")
    axes[2].set(xlabel="u", title="Density after a long time")
    axes[2].legend(frameon=False)
    axes[3].set(xlabel="lag", title="Autocorrelation")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=80)


def main(updates, picture):
    keys = jax.random.split(jax.random.key(0), 4)
    series = np.asarray(paths(NATURE, 1.0, keys[0], 1, SPACING * np.arange(8001)))
    windows = np.stack([series[0, i : i + WINDOW + 1] for i in range(0, 8000, WINDOW)])
    result = eo.fit(
        loss,
        neural(keys[1]),
        windows[:1500],
        optimizer=optax.adam(optax.cosine_decay_schedule(1e-2, updates)),
        maxiters=updates,
        batch_size=250,
        validation=windows[1500:],
        validate_every=20,
        key=keys[2],
    )
    print(result)

    models = {"learned": result.best, "exact": NATURE}
    late = np.arange(30.0, 80.0, SPACING)  # when the start is forgotten
    runs = {name: np.asarray(paths(x, 0.0, keys[3], 2000, late)) for name, x in models.items()}
    spreads, correlations = {}, {}
    for name, run in (runs | {"data": series}).items():
        spreads[name], correlations[name] = statistics(run)
        after = ", ".join(f"{correlations[name][4 * i]:.2f} after {i}" for i in (1, 4, 10))
        print(f"{name}: standard deviation {spreads[name]:.3f}, autocorrelation {after}")
    if picture:
        plot(models, series, runs, correlations)
    learned = result.best_loss < result.validation_losses[0]
    if updates >= UPDATES:
        learned &= abs(spreads["learned"] / spreads["exact"] - 1) < 0.05
        learned &= np.abs(correlations["learned"] - correlations["exact"]).max() < 0.05
    if not learned:
        sys.exit("the model did not learn the distribution")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, not options.no_plot)
