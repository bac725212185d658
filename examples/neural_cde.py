"""Classify series by a neural CDE: a hidden state that the measured path drives.

A controlled differential equation dh = F(h) dX follows the path X of the measurements, which are
joined by lines. Its slope jumps at each measurement; with these times as `d_discontinuities`, each
series has steps that end there. `fit` trains it to tell spirals that turn to the left from those
that turn to the right, seen at random times and with noise. Needs the extra `plot`.

    python examples/neural_cde.py [--updates N] [--no-plot]
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


UPDATES, SIZE, SEEN, NOISE = 400, 8, 20, 0.3


def make_data(n, seed):
    """Times `[series, measurement]`, paths `[series, measurement, (t, x, y)]`, and whether each
    turns to the left."""
    rng = np.random.default_rng(seed)
    t = np.sort(rng.uniform(0.0, 1.0, (n, SEEN)), axis=1)
    t[:, 0], t[:, -1] = 0.0, 1.0
    left = rng.random(n) < 0.5
    angle = rng.uniform(0, 2 * np.pi, (n, 1)) + np.where(left, 8.0, -8.0)[:, None] * t
    spiral = np.exp(-t)[..., None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    path = np.concatenate([t[..., None], spiral + NOISE * rng.normal(size=spiral.shape)], axis=-1)
    return {"t": jnp.asarray(t, "f4"), "path": jnp.asarray(path, "f4"), "left": jnp.asarray(left)}


def make_networks(key):
    keys = jax.random.split(key, 3)
    tanh = {"activation": jnp.tanh, "final_activation": jnp.tanh}
    return {
        "start": eqx.nn.Linear(3, SIZE, key=keys[0]),
        "field": eqx.nn.MLP(SIZE, 3 * SIZE, 32, 1, **tanh, key=keys[1]),
        "answer": eqx.nn.Linear(SIZE, "scalar", key=keys[2]),
    }


def field(h, p, t):
    i = jnp.clip(jnp.searchsorted(p["t"], t, side="right") - 1, 0, SEEN - 2)
    return p["network"](h).reshape(SIZE, 3) @ p["slopes"][i]


def answers(networks, batch):
    """The logits `[series]` that the path turns to the left, and whether the solve succeeded."""
    t, path = batch["t"], batch["path"]
    slopes = jnp.diff(path, axis=1) / jnp.maximum(jnp.diff(t, axis=1), 1e-4)[..., None]
    starts = jax.vmap(networks["start"])(path[:, 0])
    p = {"network": networks["field"], "t": t[0], "slopes": slopes[0]}
    prob = eo.ODEProblem(field, starts[0], (0.0, 1.0), p)

    def prob_func(prob, ctx):
        own = {"t": t[ctx.index], "slopes": slopes[ctx.index]}
        return eo.remake(prob, u0=starts[ctx.index], p=prob.p | own)

    how = {"reltol": 1e-3, "abstol": 1e-3, "d_discontinuities": t[:, 1:-1]}
    ens = eo.EnsembleProblem(prob, prob_func)
    sim = eo.solve(ens, eo.Tsit5(), trajectories=len(t), save_everystep=False, **how)
    return jax.vmap(networks["answer"])(sim.u[:, -1]), sim.successful


def loss(networks, batch):
    logits, successful = answers(networks, batch)
    errors = optax.sigmoid_binary_cross_entropy(logits, batch["left"].astype("f4"))
    return jnp.where(successful, errors, 0.0)


def plot(result, networks, batch):
    figure, (left, *others) = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    result.plot(ax=left)
    left.set(title="Cross-entropy", xlabel="update", ylabel=None)
    logits, _ = answers(networks, batch)
    for i, ax in enumerate(others):
        path = batch["path"][i]
        ax.plot(*path[:, 1:].T, "-", color="0.8")
        points = ax.scatter(*path[:, 1:].T, c=path[:, 0], s=25, zorder=2)
        truth = ("right", "left")[int(batch["left"][i])]
        chance = float(jax.nn.sigmoid(logits[i]))
        ax.set(title=f"turns {truth}; P(left) = {chance:.2f}", aspect="equal")
    figure.colorbar(points, label="t")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, picture):
    training, held_out = make_data(512, 0), make_data(256, 1)
    options = {"maxiters": updates, "batch_size": 64, "validation": held_out, "patience": 12}
    networks = make_networks(jax.random.key(0))
    result = eo.fit(loss, networks, training, optimizer=optax.adam(5e-3), **options)
    print(result)
    logits, _ = answers(result.best, held_out)
    right = float(jnp.mean((logits > 0) == held_out["left"]))
    print(f"right of those held out: {right:.1%}")
    if picture:
        plot(result, result.best, held_out)
    if updates >= UPDATES and not right > 0.95:
        sys.exit("it did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, not options.no_plot)
