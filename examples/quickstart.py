"""Train an ODE on 100 trajectories at once, with every ensemble algorithm in turn.

Trajectory i follows du/dt = 1.01 p u and starts at 0.5 + i/100 a. Adam looks for the a and p that
keep all trajectories near 1. Only the `ensemblealg` argument changes from one run to the next, and
each run must find the parameters that the Julia tutorial on data-parallel training publishes.

    python examples/quickstart.py [--updates N] [--no-plot]
"""

import argparse
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ensembleode as eo


jax.config.update("jax_enable_x64", True)
START, PUBLISHED = [3.0, 1.0], [1.094120061965113, -0.41178007289727964]  # after 99 updates


def simulate(theta, ensemblealg):
    prob = eo.ODEProblem(lambda u, p, t: 1.01 * p * u, theta[0], (0.0, 1.0), theta[1])
    ens = eo.EnsembleProblem(
        prob, prob_func=lambda prob, ctx: eo.remake(prob, u0=0.5 + ctx.sim_id / 100 * prob.u0)
    )
    return eo.solve(ens, eo.Tsit5(), ensemblealg, trajectories=100, saveat=0.1)


def train(ensemblealg, updates):
    """The parameters found, and the loss before and the seconds of each update."""
    theta, adam, log = jnp.array(START), optax.adam(0.1), []
    state = adam.init(theta)

    @jax.jit
    def update(theta, state):
        def loss(theta):
            return jnp.sum((1.0 - simulate(theta, ensemblealg).u) ** 2)

        value, gradient = jax.value_and_grad(loss)(theta)
        change, state = adam.update(gradient, state)
        return optax.apply_updates(theta, change), state, value

    for _ in range(updates):
        started = time.perf_counter()
        theta, state, value = jax.block_until_ready(update(theta, state))
        log.append((value, time.perf_counter() - started))
    return np.asarray(theta), *np.array(log).T


def plot(plt, losses, theta):
    figure, (left, before, after) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for (name, values), width in zip(losses.items(), (9, 6, 3.5, 1.5), strict=True):
        left.semilogy(values, lw=width, color=plt.cm.viridis(1 - width / 9), label=name)
    left.set(title="Loss: one curve for all modes", xlabel="update")
    left.legend(frameon=False)
    after.sharey(before)
    for axes, when, (a, p) in ((before, "Before", START), (after, "After", theta)):
        sim = simulate((a, p), eo.EnsembleGPUArray())
        sim.plot(ax=axes)  # coloured by u0, which differs
        axes.axhline(1.0, lw=1.2, color="black", ls="--")
        axes.set(title=f"{when}: a = {a:.3f}, p = {p:.3f}")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, picture):
    losses, off = {}, []
    print(f"{'mode':<18}{'a':>12}{'p':>13}{'off by':>10}{'compile s':>11}{'ms/update':>11}")
    modes = (
        eo.EnsembleSerial(),
        eo.EnsembleThreads(),
        eo.EnsembleColumns(),
        eo.EnsembleGPUArray(),
    )
    for mode in modes:
        name = type(mode).__name__
        theta, losses[name], (first, *rest) = train(mode, updates)
        off.append(abs(theta - PUBLISHED).max())
        result = f"{name:<18}{theta[0]:>12.8f}{theta[1]:>13.8f}{off[-1]:>10.1e}"
        print(f"{result}{first:>11.2f}{1e3 * np.median(rest or first):>11.2f}")
    print(f"{'published':<18}{PUBLISHED[0]:>12.8f}{PUBLISHED[1]:>13.8f}")
    if picture:
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            print("A picture needs matplotlib, the extra plot.")
        else:
            plot(plt, losses, theta)
    if updates == 99 and not np.all(np.array(off) <= 2e-6):
        sys.exit("a mode ended further than 2e-6 from the published parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=99, help="of Adam; by default 99")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, not options.no_plot)
