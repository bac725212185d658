"""The same training by the Julia engine and by the compiled one.

The ensemble and the loss are those of `quickstart.py`; only `engine=` changes. With `"julia"`
trajectories are solved by OrdinaryDiffEq in Julia. The gradient is computed in Julia, too, by
forward sensitivities, because there are few parameters. Both engines must find the parameters that
the Julia tutorial on data-parallel training publishes. If Julia is missing, the script says how to
install it.

    python examples/julia_engine.py [--updates N] [--ensemble serial|threads]
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ensembleode as eo
import ensembleode.julia


jax.config.update("jax_enable_x64", True)
START, PUBLISHED = [3.0, 1.0], [1.094120061965113, -0.41178007289727964]  # after 99 updates


def loss(theta, ensemblealg, engine):
    prob = eo.ODEProblem(lambda u, p, t: 1.01 * p * u, theta[:1], (0.0, 1.0), theta[1:])
    ens = eo.EnsembleProblem(
        prob, prob_func=lambda prob, ctx: eo.remake(prob, u0=0.5 + ctx.sim_id / 100 * prob.u0)
    )
    sim = eo.solve(
        ens,
        eo.Tsit5(),
        ensemblealg,
        trajectories=100,
        saveat=0.1,
        abstol=1e-10,
        reltol=1e-10,
        engine=engine,
    )
    return jnp.sum((1.0 - sim.u) ** 2)


def train(ensemblealg, engine, updates):
    """The parameters found, the loss before the last update, and the seconds of each."""
    theta, adam, seconds = jnp.array(START), optax.adam(0.1), []
    state, value = adam.init(theta), jnp.nan

    @jax.jit
    def update(theta, state):
        value, gradient = jax.value_and_grad(loss)(theta, ensemblealg, engine)
        change, state = adam.update(gradient, state)
        return optax.apply_updates(theta, change), state, value

    for _ in range(updates):
        started = time.perf_counter()
        theta, state, value = jax.block_until_ready(update(theta, state))
        seconds.append(time.perf_counter() - started)
    return np.asarray(theta), float(value), seconds


def main(updates, ensemblealg):
    began = time.perf_counter()
    try:
        ensembleode.julia.start()
    except ensembleode.julia.JuliaError as error:
        sys.exit(str(error))
    took = time.perf_counter() - began
    versions = ensembleode.julia.status()
    print(f"Julia {versions['julia']}, {versions['threads']} threads, started in {took:.1f} s")
    header = ("engine", "a", "p", "loss", "off by", "first s", "ms/update")
    print("{:<11}{:>12}{:>13}{:>15}{:>10}{:>9}{:>11}".format(*header))
    off = []
    for engine in ("compiled", "julia"):
        theta, value, (first, *rest) = train(ensemblealg, engine, updates)
        off.append(abs(theta - PUBLISHED).max())
        found = f"{engine:<11}{theta[0]:>12.8f}{theta[1]:>13.8f}{value:>15.8f}{off[-1]:>10.1e}"
        print(f"{found}{first:>9.2f}{1e3 * np.median(rest or first):>11.2f}")
    print(f"{'published':<11}{PUBLISHED[0]:>12.8f}{PUBLISHED[1]:>13.8f}")
    if updates == 99 and not np.all(np.array(off) <= 2e-6):
        sys.exit("an engine ended further than 2e-6 from the published parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=99, help="of Adam; by default 99")
    parser.add_argument("--ensemble", choices=["serial", "threads"], default="threads")
    options = parser.parse_args()
    algorithms = {"serial": eo.EnsembleSerial(), "threads": eo.EnsembleThreads()}
    main(options.updates, algorithms[options.ensemble])
