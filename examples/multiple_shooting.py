"""Fit a neural ODE to one long, noisy trajectory, by multiple shooting.

Over three and a half periods of the Lotka-Volterra equations an ordinary fit (single shooting) gets
stuck: the network settles for the mean. In groups of a few points, each solved from its own start,
the network learns. The groups are an ensemble. Their starts are fitted together with the network,
and the loss asks that each group ends where the next one starts. Needs the extra `plot`.

    python examples/multiple_shooting.py [--ensemble serial|threads|columns|gpuarray] [--updates N]
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
import optax

import ensembleode as eo


ENSEMBLES = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "columns": eo.EnsembleColumns(),
    "gpuarray": eo.EnsembleGPUArray(),
}
UPDATES, POINTS, NOISE = 1000, 121, 0.1
TS = jnp.linspace(0.0, 12.0, POINTS)
GROUPS = {"multiple shooting": 7, "single shooting": POINTS}  # how many points a group has


def lotka_volterra(u, p, t):
    return u * jnp.array([p[0] - p[1] * u[1], p[3] * u[0] - p[2]])


def neural(u, p, t):
    return p(u)


def problem(network, u0):
    return eo.ODEProblem(neural, u0, (TS[0], TS[-1]), network, maxiters=1000)


def train(network, data, group_size, updates, ensemblealg):
    """The network and the starts of the groups, fitted; and the losses on the way."""
    starts = data[: -1 : group_size - 1]
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, updates))

    def loss(fitted):
        network, starts = fitted
        how = {"ensemblealg": ensemblealg, "starts": starts, "continuity_weight": 1.0}
        return eo.multiple_shooting(problem(network, data[0]), data, TS, group_size, **how).loss

    @eqx.filter_jit
    def update(fitted, state):
        value, gradient = eqx.filter_value_and_grad(loss)(fitted)
        change, state = adam.update(gradient, state)
        return eqx.apply_updates(fitted, change), state, value

    fitted, log = (network, starts), []
    state = adam.init(eqx.filter(fitted, eqx.is_array))
    for _ in range(updates):
        fitted, state, value = update(fitted, state)
        log.append(float(value) / data.size)
    return fitted, log


def plot(data, exact, groups, sims, logs):
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    left, middle, right = axes
    for name, log in logs.items():
        left.semilogy(log, lw=0.8, label=name)
    left.axhline(NOISE**2, color="black", ls="--", lw=1, label="variance of the noise")
    left.set(title="Loss / number of data", xlabel="update")
    left.legend(frameon=False)
    middle.set(title="The groups before the fit", xlabel="t")
    for t, u in zip(groups.t, groups.u, strict=True):
        middle.set_prop_cycle(None)
        middle.plot(t, u)
    right.set(title="Solved from the first start alone", xlabel="t")
    for (name, sim), style in zip(sims.items(), ("-", ":"), strict=True):
        right.set_prop_cycle(None)
        sim.plot(names=[f"{of}, {name}" for of in ("prey", "predators")], ls=style, ax=right)
    for ax in (middle, right):
        ax.set_prop_cycle(None)
        ax.plot(TS, data, ".", ms=3)
        ax.set(ylim=(-0.5, 9))
    right.set(ylim=(-0.5, 13))
    right.legend(frameon=False, fontsize="small")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, ensemblealg, picture):
    keys = jax.random.split(jax.random.key(0))
    nature = jnp.array([1.5, 1.0, 3.0, 1.0])
    prob = eo.ODEProblem(lotka_volterra, jnp.array([1.0, 1.0]), (0.0, TS[-1]), nature)
    exact = eo.solve(prob, saveat=TS, abstol=1e-6, reltol=1e-6)
    data = exact.u + NOISE * jax.random.normal(keys[0], exact.u.shape)

    first = eqx.nn.MLP(2, 2, width_size=32, depth=2, activation=jax.nn.silu, key=keys[1])
    size = GROUPS["multiple shooting"]
    groups = eo.multiple_shooting(problem(first, data[0]), data, TS, size)
    sims, logs, errors = {}, {}, {}
    for name, group_size in GROUPS.items():
        started = time.perf_counter()
        (network, starts), logs[name] = train(first, data, group_size, updates, ensemblealg)
        sims[name] = eo.solve(problem(network, starts[0]), saveat=TS)
        errors[name] = float(jnp.sqrt(jnp.mean((sims[name].u - exact.u) ** 2)))
        took = time.perf_counter() - started
        print(
            f"{name}: loss {logs[name][0]:.4f} -> {logs[name][-1]:.4f}, rms error of the whole "
            f"trajectory {errors[name]:.3f} (noise {NOISE}), {took:.1f} s"
        )
    if picture:
        plot(data, exact, groups, sims, logs)
    multiple = logs["multiple shooting"]
    if not multiple[-1] < 0.9 * multiple[0]:
        sys.exit("the network did not learn")
    if updates >= UPDATES and not errors["multiple shooting"] < errors["single shooting"] / 3:
        sys.exit("multiple shooting was no better than single shooting")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ensemble", choices=ENSEMBLES, default="threads")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, ENSEMBLES[options.ensemble], not options.no_plot)
