"""Fit a neural ODE to noisy trajectories of the Lotka-Volterra equations.

The network is the `p` of the problem, and each minibatch of measured trajectories is an ensemble.
`fit` trains it, with a learning rate that falls, and stops early where the error of trajectories
that were held out falls no more. These show what the network has learned, for the time of the
measurements and twice as far. Needs the extra `plot`, and `train` for checkpoints.

    python examples/neural_ode.py [--ensemble serial|threads|columns|gpuarray] [--updates N]
        [--checkpoint FOLDER] [--no-plot]
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


ENSEMBLES = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "columns": eo.EnsembleColumns(),
    "gpuarray": eo.EnsembleGPUArray(),
}
UPDATES, TRAINING, HELD_OUT = 2000, jnp.arange(224), jnp.arange(224, 256)
MEASURED, PREDICTED, NOISE = 4.0, 8.0, 0.1  # until when, until when, its standard deviation


def lotka_volterra(u, p, t):
    return u * jnp.array([p[0] - p[1] * u[1], p[3] * u[0] - p[2]])


def neural(u, p, t):
    return p(u)


def simulate(f, p, u0s, until, ensemblealg, **options):
    prob = eo.ODEProblem(f, u0s[0], (0.0, until), p)
    ens = eo.EnsembleProblem(prob, u0=u0s)
    return eo.solve(ens, eo.Tsit5(), ensemblealg, saveat=0.05, **options)


def train(network, training, held_out, updates, ensemblealg, checkpoint):
    """The result of a fit, with the parameters of the lowest error held out as its `best`."""

    def loss(network, batch):
        sim = simulate(neural, network, batch["u0"], MEASURED, ensemblealg)
        ok = sim.successful  # a trajectory that failed must not count
        error = jnp.where(ok[:, None, None], sim.u - batch["u"], 0.0)
        return jnp.mean(error**2, axis=(1, 2))  # one number for each trajectory

    rate = optax.cosine_decay_schedule(1e-2, updates)
    return eo.fit(
        loss,
        network,
        training,
        optimizer=optax.inject_hyperparams(optax.adam)(learning_rate=rate),
        maxiters=updates,
        batch_size=64,
        validation=held_out,
        patience=100,  # passes over the data
        checkpoint=checkpoint,
    )


def plot(result, sim, exact, data):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    result.plot(ax=left, color="tab:blue", label="minibatches")
    left.axhline(NOISE**2, color="black", ls="--", lw=1, label="variance of the noise")
    left.set(title="Mean square error", xlabel="update", ylabel=None)
    left.legend(frameon=False)
    names = ("prey", "predators")
    middle.set(title="One held out (dotted: exact)", ylim=(-0.3, 10))
    middle.set(xlabel="t (grey: beyond the data)")
    middle.axvspan(MEASURED, PREDICTED, color="0.93")
    middle.plot(sim.t[: data.shape[1]], data[HELD_OUT[0]], ".", ms=4)
    middle.set_prop_cycle(None)
    sim[0].plot(names=names, ax=middle)
    exact[HELD_OUT[0]].plot(color="black", ls=":", ax=middle)
    middle.legend(frameon=False)
    few = slice(None, None, 4)
    look = {"color": sim.u[:, 0].sum(1), "label": "prey + predators at t = 0"}
    sim.plot((0, 1), trajectories=few, names=names, ax=right, **look)
    dotted = {"color": "black", "ls": ":", "lw": 1, "arrows": False}
    exact.plot((0, 1), trajectories=HELD_OUT[few], ax=right, **dotted)
    right.set(title="Eight of them until t = 8")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, ensemblealg, checkpoint, picture):
    keys = jax.random.split(jax.random.key(0), 3)
    u0s = jax.random.uniform(keys[0], (256, 2), minval=0.5, maxval=2.0)
    nature, tight = jnp.array([1.5, 1.0, 3.0, 1.0]), {"abstol": 1e-6, "reltol": 1e-6}
    exact = simulate(lotka_volterra, nature, u0s, PREDICTED, ensemblealg, **tight)
    measured = exact.t <= MEASURED
    data = exact.u[:, measured]
    data += NOISE * jax.random.normal(keys[1], data.shape)

    network = eqx.nn.MLP(2, 2, width_size=64, depth=2, activation=jax.nn.silu, key=keys[2])
    training, held_out = ({"u0": u0s[i], "u": data[i]} for i in (TRAINING, HELD_OUT))
    result = train(network, training, held_out, updates, ensemblealg, checkpoint)
    print(result)
    sim = simulate(neural, result.best, held_out["u0"], PREDICTED, ensemblealg, **tight)
    square = (sim.u - exact.u[HELD_OUT]) ** 2
    within, beyond = (float(np.sqrt(square[:, x].mean())) for x in (measured, ~measured))
    print(f"rms error held out: {within:.3f} for t <= 4 and {beyond:.3f} after (noise {NOISE})")
    if picture:
        plot(result, sim, exact, data)
    learned = result.best_loss < 0.9 * result.losses[0]
    if not learned or (updates >= UPDATES and not within < NOISE / 2):
        sys.exit("the network did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ensemble", choices=ENSEMBLES, default="threads")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--checkpoint", help="a folder, from which a run that was killed goes on")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    ensemblealg = ENSEMBLES[options.ensemble]
    main(options.updates, ensemblealg, options.checkpoint, not options.no_plot)
