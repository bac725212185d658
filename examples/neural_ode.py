"""Fit a neural ODE to noisy trajectories of the Lotka-Volterra equations.

The network is the `p` of the problem. Each minibatch of measured trajectories is an ensemble, whose
`prob_func` picks their initial conditions. Trajectories that were held out show what the network
has learned, for the time of the measurements and twice as far. Needs the extra `plot`.

    python examples/neural_ode.py [--ensemble serial|threads|columns|gpuarray] [--updates N]
        [--no-plot]
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


def simulate(f, p, u0s, batch, until, ensemblealg, **options):
    prob = eo.ODEProblem(f, u0s[0], (0.0, until), p)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0s[batch[ctx.index]]))
    options |= {"trajectories": len(batch), "saveat": 0.05}
    return eo.solve(ens, eo.Tsit5(), ensemblealg, **options)


def train(network, u0s, data, updates, ensemblealg):
    """The network trained, and the losses before each update: of its minibatch, and held out."""
    adam, log = optax.adam(optax.cosine_decay_schedule(1e-2, updates)), []
    state, rng = adam.init(eqx.filter(network, eqx.is_array)), np.random.default_rng(0)

    @eqx.filter_jit
    def loss(network, batch):
        sim = simulate(neural, network, u0s, batch, MEASURED, ensemblealg)
        ok = sim.successful  # a trajectory that failed must not count
        error = jnp.where(ok[:, None, None], sim.u - data[batch], 0.0)
        return jnp.sum(error**2) / (jnp.sum(ok) * error[0].size)

    @eqx.filter_jit
    def update(network, state, batch):
        value, gradient = eqx.filter_value_and_grad(loss)(network, batch)
        change, state = adam.update(gradient, state)
        return eqx.apply_updates(network, change), state, value

    print(f"{'update':>8}{'minibatch':>12}{'held out':>12}{'seconds':>10}")
    started = time.perf_counter()
    for i in range(updates):
        held_out = loss(network, HELD_OUT)
        network, state, value = update(network, state, rng.choice(TRAINING, 64, replace=False))
        log.append((float(value), float(held_out)))
        if i % max(1, updates // 10) == 0 or i == updates - 1:
            print(f"{i:>8}{value:>12.4f}{held_out:>12.4f}{time.perf_counter() - started:>10.1f}")
    return network, np.array(log)


def plot(log, sim, exact, data):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    left.semilogy(log[:, 0], lw=0.7, color="0.7", label="minibatch")
    left.semilogy(log[:, 1], lw=0.9, color="tab:red", label="held out")
    left.axhline(NOISE**2, color="black", ls="--", lw=1, label="variance of the noise")
    left.set(title="Mean square error", xlabel="update")
    left.legend(frameon=False)
    names = ("prey", "predators")
    middle.set(title="A trajectory held out (dotted: exact)", ylim=(-0.3, 10))
    middle.set(xlabel="t (grey: beyond the data)")
    middle.axvspan(MEASURED, PREDICTED, color="0.93")
    middle.plot(sim.t[: data.shape[1]], data[HELD_OUT[0]], ".", ms=4)
    middle.set_prop_cycle(None)
    sim[0].plot(names=names, ax=middle)
    exact[HELD_OUT[0]].plot(color="black", ls=":", ax=middle)
    few = slice(None, None, 4)
    look = {"color": sim.u[:, 0].sum(1), "label": "prey + predators at t = 0"}
    sim.plot((0, 1), trajectories=few, names=names, ax=right, **look)
    exact.plot((0, 1), trajectories=HELD_OUT[few], color="black", ls=":", lw=1, ax=right)
    right.set(title="Eight of them until t = 8")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, ensemblealg, picture):
    keys = jax.random.split(jax.random.key(0), 3)
    u0s = jax.random.uniform(keys[0], (256, 2), minval=0.5, maxval=2.0)
    nature, tight = jnp.array([1.5, 1.0, 3.0, 1.0]), {"abstol": 1e-6, "reltol": 1e-6}
    exact = simulate(lotka_volterra, nature, u0s, jnp.arange(256), PREDICTED, ensemblealg, **tight)
    measured = exact.t <= MEASURED
    data = exact.u[:, measured]
    data += NOISE * jax.random.normal(keys[1], data.shape)

    network = eqx.nn.MLP(2, 2, width_size=64, depth=2, activation=jax.nn.silu, key=keys[2])
    network, log = train(network, u0s, data, updates, ensemblealg)
    sim = simulate(neural, network, u0s, HELD_OUT, PREDICTED, ensemblealg, **tight)
    square = (sim.u - exact.u[HELD_OUT]) ** 2
    within, beyond = (float(np.sqrt(square[:, x].mean())) for x in (measured, ~measured))
    print(f"rms error held out: {within:.3f} for t <= 4 and {beyond:.3f} after (noise {NOISE})")
    if picture:
        plot(log, sim, exact, data)
    if not log[-1, 1] < 0.9 * log[0, 1] or (updates >= UPDATES and not within < NOISE / 2):
        sys.exit("the network did not learn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ensemble", choices=ENSEMBLES, default="threads")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, ENSEMBLES[options.ensemble], not options.no_plot)
