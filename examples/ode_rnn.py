"""Predict the next value of irregular series by an ODE-RNN: a state that jumps at observations.

Between observations the hidden state follows a neural ODE; at each one, a GRU cell takes the value
in: a `PresetTimeCallback` with the times of that series. The state before the jump predicts the
value. `fit` trains the three networks on noisy oscillations of many periods, seen at random times;
the prediction is compared with the last value that was seen. Needs the extra `plot`.

    python examples/ode_rnn.py [--updates N] [--no-plot]
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


UPDATES, SIZE, MOST, END, NOISE = 1500, 12, 24, 6.0, 0.05


def make_data(n, seed):
    """Times and values `[series, observation]`; rows of shorter series end in `inf` and 0."""
    rng = np.random.default_rng(seed)
    t = np.sort(rng.uniform(0.05, END, (n, MOST)), axis=1)
    t[np.arange(MOST) >= rng.integers(MOST // 2, MOST + 1, (n, 1))] = np.inf
    speed, phase = rng.uniform(1.0, 4.0, (n, 1)), rng.uniform(0.0, 2 * np.pi, (n, 1))
    seen = np.isfinite(t)
    y = np.sin(np.where(seen, speed * t, 0.0) + phase) + NOISE * rng.normal(size=t.shape)
    return {"t": jnp.asarray(t, "f4"), "y": jnp.asarray(np.where(seen, y, 0.0), "f4")}


def make_networks(key):
    keys = jax.random.split(key, 3)
    return {
        "field": eqx.nn.MLP(SIZE, SIZE, 32, 1, activation=jnp.tanh, key=keys[0]),
        "cell": eqx.nn.GRUCell(1, SIZE, key=keys[1]),
        "value": eqx.nn.Linear(SIZE, 1, key=keys[2]),
    }


def field(h, p, t):
    return p["networks"]["field"](h)


def take_in(integrator):
    p = integrator.p
    i = jnp.argmin(jnp.abs(p["t"] - integrator.t))  # which observation this is
    return eo.remake(integrator, u=p["networks"]["cell"](p["y"][i, None], integrator.u))


def states(networks, batch, times, **options):
    """The hidden states `[series, time, component]`, at observations before they are seen."""
    p = {"networks": networks, "t": batch["t"][0], "y": batch["y"][0]}
    prob = eo.ODEProblem(field, jnp.zeros(SIZE), (0.0, END), p)

    def prob_func(prob, ctx):
        own = {name: batch[name][ctx.index] for name in ("t", "y")}
        seen = eo.PresetTimeCallback(own["t"], take_in)
        return eo.remake(prob, p=prob.p | own, callback=seen)

    n = len(batch["t"])
    tolerances = {"reltol": 1e-3, "abstol": 1e-3}
    ens = eo.EnsembleProblem(prob, prob_func)
    return eo.solve(ens, eo.Tsit5(), trajectories=n, saveat=times, **tolerances, **options)


def predictions(networks, hidden):
    return jax.vmap(jax.vmap(networks["value"]))(hidden)[..., 0]


def errors(networks, batch):
    """The errors of the predictions, and 0 where nothing was observed; and how many count."""
    sim = states(networks, batch, batch["t"])
    counts = jnp.isfinite(batch["t"]).at[:, 0].set(False) & sim.successful[:, None]
    found = predictions(networks, jnp.nan_to_num(sim.u))
    return jnp.where(counts, found - batch["y"], 0.0), counts


def loss(networks, batch):
    error, counts = errors(networks, batch)
    return jnp.sum(error**2, axis=1) / jnp.maximum(counts.sum(axis=1), 1)


def plot(result, networks, batch):
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    result.plot(ax=axes[0])
    axes[0].set(title="Square error of the next value", xlabel="update", ylabel=None)
    grid = np.linspace(0.0, END, 400, dtype="f4")
    sim = states(networks, batch, grid)
    lines = predictions(networks, sim.u)
    for i, ax in enumerate(axes[1:]):
        ax.plot(grid, lines[i], lw=1, label="prediction")
        ax.plot(batch["t"][i], batch["y"][i], ".", color="black", label="seen")
        ax.set(title="A series held out", xlabel="t", ylim=(-1.6, 1.6))
    axes[1].legend(frameon=False, loc="upper right")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, picture):
    training, held_out = make_data(1024, 0), make_data(64, 1)
    rate = optax.cosine_decay_schedule(1e-2, updates)
    options = {"maxiters": updates, "batch_size": 64, "validation": held_out}
    networks = make_networks(jax.random.key(0))
    result = eo.fit(loss, networks, training, optimizer=optax.adam(rate), **options)
    print(result)

    error, counts = errors(result.best, held_out)
    last = jnp.diff(held_out["y"], axis=1)[counts[:, 1:]]
    found = float(jnp.sqrt(jnp.sum(error**2) / counts.sum()))
    as_before = float(jnp.sqrt(jnp.mean(last**2)))
    print(f"rms error of the next value, held out: {found:.3f} (as the last one: {as_before:.3f})")
    if picture:
        plot(result, result.best, held_out)
    if updates >= UPDATES and not found < as_before / 2:
        sys.exit("it did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, not options.no_plot)
