"""Neural ODEs with components that nobody measured: augmented, and of second order.

Solutions of an equation for one number can't cross, so a plain neural ODE can't carry x to -x, nor
can it swing to and fro. In the first part a further component begins at zero, and lets the
solutions pass each other. In the second the velocity of a pendulum with friction is the further
component: a network says what it is at first, by the first few positions, and another says how it
changes. Both are fitted beside plain neural ODEs. Needs the extra `plot`.

    python examples/augmented_ode.py [--updates N] [--no-plot]
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


UPDATES, NOISE, FIRST = 1000, 0.05, 10  # FIRST: how many positions tell the start of a series
TIMES = np.linspace(0.0, 5.0, 51, dtype="f4")  # of the measurements
LATER = np.linspace(0.0, 10.0, 101, dtype="f4")


def mlp(ins, outs, key):
    return eqx.nn.MLP(ins, outs, width_size=32, depth=2, activation=jnp.tanh, key=key)


def follow(field, p, starts, times):
    prob = eo.ODEProblem(field, starts[0], (times[0], times[-1]), p)
    return eo.solve(eo.EnsembleProblem(prob, u0=starts), saveat=times).u


#
# From x to -x
#


def carried(network, x, times=(0.0, 1.0)):
    starts = jnp.pad(x[:, None], ((0, 0), (0, network.in_size - 1)))  # zeros, as many as it takes
    return follow(lambda u, network, t: network(u), network, starts, jnp.asarray(times))[..., 0]


def mirrored(network, x):
    """The squared errors of the points `[n]`."""
    return (carried(network, x)[:, -1] + x) ** 2


#
# A pendulum, of which positions are known
#


class Swing(eqx.Module):
    """An equation of some order for the position, and its start by the first few positions."""

    start: eqx.nn.MLP
    highest: eqx.nn.MLP

    def __init__(self, order, key):
        keys = jax.random.split(key)
        self.start = mlp(FIRST, order, keys[0])
        self.highest = mlp(order, 1, keys[1])


def swung(model, positions, times):
    def field(u, highest, t):  # of order two: x' = v, v' = highest(x, v)
        return jnp.concatenate([u[1:], highest(u)])

    starts = jax.vmap(model.start)(positions[:, :FIRST])
    return follow(field, model.highest, starts, times)[..., 0]


def missed(model, positions):
    """The mean square errors of the series `[n, time]`."""
    return jnp.mean((swung(model, positions, TIMES) - positions) ** 2, axis=1)


def pendulum(n, seed):
    """Exact positions until twice the time of the measurements, and these."""
    rng = np.random.default_rng(seed)

    def field(u, p, t):
        return jnp.stack([u[1], -4.0 * jnp.sin(u[0]) - 0.2 * u[1]])

    exact = np.asarray(follow(field, None, rng.uniform(-1.5, 1.5, (n, 2)).astype("f4"), LATER))
    exact = exact[..., 0]
    noise = NOISE * rng.normal(size=(n, len(TIMES)))
    return exact, np.float32(exact[:, : len(TIMES)] + noise)


def plot(fits, x, exact, positions):
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.3), layout="constrained")
    along = np.linspace(0.0, 1.0, 41)
    for (names, mirror, swing), color in zip(fits, ("tab:orange", "tab:blue"), strict=True):
        axes[0].semilogy(mirror.losses, color=color, label=names[0])
        axes[1].plot(along, carried(mirror.params, x[::9], along).T, color=color, lw=1)
        validated = swing.validation_steps, swing.validation_losses
        axes[2].semilogy(*validated, color=color, label=names[1])
        axes[3].plot(LATER, swung(swing.best, positions[:1], LATER)[0], color=color)
    axes[0].axhline(np.mean(x**2), color="black", ls="--", lw=1, label="least without crossing")
    axes[0].set(title="From x to -x: loss", xlabel="update")
    axes[1].set(title="Its solutions", xlabel="t")
    axes[2].axhline(NOISE**2, color="black", ls="--", lw=1, label="variance of the noise")
    axes[2].set(title="Pendulum: loss of series held out", xlabel="update")
    axes[3].axvspan(TIMES[-1], LATER[-1], color="0.93")
    axes[3].plot(LATER, exact[0], "k:", lw=1)
    axes[3].plot(TIMES, positions[0], "k.", ms=3)
    axes[3].set(title="One of them (dotted: exact)", xlabel="t (grey: beyond the data)")
    for ax in axes[[0, 2]]:
        ax.legend(frameon=False)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, picture):
    key = jax.random.key(0)
    how = {"optimizer": optax.adam(optax.cosine_decay_schedule(1e-2, updates)), "maxiters": updates}
    x = np.linspace(-1.0, 1.0, 64, dtype="f4")
    (_, training), (exact, held_out) = pendulum(64, seed=0), pendulum(32, seed=1)
    watched = {"batch_size": 32, "validation": held_out, "validate_every": 20}
    fits = []
    for size, names in ((1, ("plain", "first order")), (2, ("augmented", "second order"))):
        mirror = eo.fit(mirrored, mlp(size, size, key), x, **how)
        swing = eo.fit(missed, Swing(size, key), training, **how, **watched)
        fits.append((names, mirror, swing))
        square = (swung(swing.best, held_out, LATER) - exact) ** 2
        within, beyond = (np.sqrt(np.mean(y)) for y in np.split(square, [len(TIMES)], axis=1))
        print(f"x to -x, {names[0]}: loss {mirror.losses[0]:.3f} -> {mirror.losses[-1]:.2g}")
        print(f"pendulum, {names[1]}: rms error held out {within:.3f}, and later {beyond:.3f}")
    if picture:
        plot(fits, x, exact, held_out)
    (_, plain, first), (_, augmented, second) = fits
    better = augmented.losses[-1] < plain.losses[-1] and second.best_loss < first.best_loss
    if not better or (updates >= UPDATES and not (augmented.losses[-1] < 1e-3 and within < NOISE)):
        sys.exit("the further components were of no use")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, not options.no_plot)
