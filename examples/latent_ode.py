"""Fit a latent ODE to short, noisy series, each measured at times of its own.

A recognition network reads a series backwards and says where a hidden state began: a mean and a
variance. A neural ODE moves that state, and a decoder says what is measured of it. `fit` trains all
three by the evidence lower bound (ELBO). The solves are one ensemble, in which each trajectory is
saved at the times of its own series. Needs the extra `plot`.

    python examples/latent_ode.py [--updates N] [--no-plot]
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


UPDATES, NOISE, LATENT, HIDDEN = 4000, 0.1, 4, 32
MEASURED, PREDICTED = 5.0, 10.0  # until when there are data, until when series are followed


class LatentODE(eqx.Module):
    reader: eqx.nn.GRUCell
    start: eqx.nn.Linear
    field: eqx.nn.MLP
    decoder: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.reader = eqx.nn.GRUCell(2, HIDDEN, key=keys[0])
        self.start = eqx.nn.Linear(HIDDEN, 2 * LATENT, key=keys[1])
        self.field = eqx.nn.MLP(LATENT, LATENT, HIDDEN, 2, activation=jnp.tanh, key=keys[2])
        self.decoder = eqx.nn.MLP(LATENT, 1, HIDDEN, 1, activation=jnp.tanh, key=keys[3])

    def recognize(self, t, y, seen):
        """The mean of a series' hidden start, and the logarithm of its variance, by what is seen
        of the series."""

        def read(state, now):
            seen, measured = now
            return jnp.where(seen, self.reader(measured, state), state), None

        series = jnp.where(seen[:, None], jnp.stack([t, y], axis=1), 0.0)
        state, _ = jax.lax.scan(read, jnp.zeros(HIDDEN), (seen, series), reverse=True)
        return jnp.split(self.start(state), 2)

    def decode(self, z):
        return jnp.vectorize(self.decoder, signature="(n)->(m)")(z)[..., 0]


def follow(model, starts, t, until):
    """The solution from hidden starts `[series, LATENT]`, at the times of each series."""
    prob = eo.ODEProblem(lambda z, field, t: field(z), starts[0], (0.0, until), model.field)
    return eo.solve(eo.EnsembleProblem(prob, u0=starts), eo.Tsit5(), saveat=t)


def loss(model, batch, key):
    """The negative ELBO of each series."""
    t, y = batch["t"], batch["y"]
    measured = jnp.isfinite(t)
    keys = jax.vmap(jax.random.split)(key)
    # The network sees half of what is to be predicted, each time another; else it overfits.
    half = jax.vmap(lambda key: jax.random.bernoulli(key, shape=t[0].shape))(keys[:, 0])
    mean, log_var = jax.vmap(model.recognize)(t, y, measured & half)
    drawn = jax.vmap(lambda key: jax.random.normal(key, (LATENT,)))(keys[:, 1])
    sim = follow(model, mean + jnp.exp(log_var / 2) * drawn, t, MEASURED)
    # Where nothing was measured, the solution is NaN, as the data are.
    there = measured & sim.successful[:, None]
    predicted = model.decode(jnp.where(there[..., None], sim.u, 0.0))
    misses = jnp.where(there, predicted - jnp.where(there, y, 0.0), 0.0) / NOISE
    divergence = jnp.exp(log_var) + mean**2 - 1.0 - log_var  # from a standard normal
    return (jnp.sum(misses**2, axis=1) + jnp.sum(divergence, axis=1)) / 2


def oscillations(n, seed):
    """A damped oscillator from `n` starts, as a function of the time, and 20 to 40 measurements of
    each series at random times. Times after the last one are `inf`, and values NaN."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, n, 1))

    def exact(t):
        return np.exp(-0.1 * t) * (a * np.cos(2.0 * t) + b * np.sin(2.0 * t))

    t = rng.uniform(0.0, MEASURED, (n, 40))
    t[np.arange(40) >= rng.integers(20, 41, (n, 1))] = np.inf
    t.sort(axis=1)
    y = exact(np.where(np.isfinite(t), t, np.nan)) + NOISE * rng.normal(size=t.shape)
    return exact, {"t": t.astype("f4"), "y": y.astype("f4")}


def plot(result, batch, exact, t, drawn):
    figure, (left, *others) = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    result.plot(ax=left, label="negative ELBO")
    left.set(title="Negative ELBO", xlabel="update", ylabel=None)
    for i, ax in zip((16, 18), others, strict=True):
        ax.axvspan(MEASURED, PREDICTED, color="0.93")
        ax.plot(t, drawn[:, i].T, color="tab:blue", lw=0.5, alpha=0.4)
        ax.plot(t, exact(t)[i], "k:", lw=1)
        ax.plot(batch["t"][i], batch["y"][i], ".", color="tab:orange", ms=5)
        ax.set(xlabel="t (grey: beyond the data)", ylim=(-1.8, 1.8))
        ax.set(title="A series held out (dotted: exact)")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, picture):
    _, training = oscillations(128, seed=0)
    exact, held_out = oscillations(64, seed=1)
    result = eo.fit(
        loss,
        LatentODE(jax.random.key(0)),
        training,
        optimizer=optax.adam(optax.cosine_decay_schedule(1e-2, updates)),
        maxiters=updates,
        batch_size=32,
        validation=held_out,
        validate_every=20,
    )
    print(result)

    # Twenty starts of each series that was held out, by all that was measured of it.
    model, t, y = result.best, held_out["t"], held_out["y"]
    mean, log_var = jax.vmap(model.recognize)(t, y, jnp.isfinite(t))
    starts = mean + jnp.exp(log_var / 2) * jax.random.normal(jax.random.key(1), (20, *mean.shape))
    t = jnp.linspace(0.0, PREDICTED, 101)
    sim = follow(model, starts.reshape(-1, LATENT), t, PREDICTED)
    drawn = model.decode(sim.u).reshape(20, len(mean), len(t))
    square = (drawn.mean(0) - exact(t)) ** 2
    within, beyond = (float(jnp.sqrt(square[:, x].mean())) for x in (t <= MEASURED, t > MEASURED))
    print(f"rms error held out: {within:.3f} for t <= 5 and {beyond:.3f} after (noise {NOISE})")
    if picture:
        plot(result, held_out, exact, t, drawn)
    learned = result.best_loss < 0.9 * result.validation_losses[0]
    if not learned or (updates >= UPDATES and not within < NOISE):
        sys.exit("the model did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, not options.no_plot)
