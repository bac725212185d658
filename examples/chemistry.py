"""Chemistry from text: how sure is the ozone of a polluted hour, and which rates do data give?

The mechanism is written as chemists write it: 20 species, 25 reactions (Verwer, "Gauss-Seidel
iteration for stiff ODEs from chemical kinetics", 1994), with rate constants apart by fifteen powers
of ten. A stiff method solves it for 10,000 sets of perturbed constants. Then some of the constants
are forgotten, and found again from measurements of a few species, by the gradient through the
solves.

    python examples/chemistry.py [--trajectories N] [--updates N] [--no-plot]
"""

import argparse
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ensembleode as eo


jax.config.update("jax_enable_x64", True)

# In ppm and minutes; oxygen and water, of which there is plenty, are not written.
POLLUTION = """
    NO2 -> NO + O3P                 0.35
    NO + O3 -> NO2                  26.6
    HO2 + NO -> NO2 + OH            1.23e4
    HCHO -> 2 HO2 + CO              8.6e-4
    HCHO -> CO                      8.2e-4
    HCHO + OH -> HO2 + CO           1.5e4
    ALD -> MEO2 + HO2 + CO          1.3e-4
    ALD + OH -> C2O3                2.4e4
    C2O3 + NO -> NO2 + MEO2 + CO2   1.65e4
    C2O3 + NO2 -> PAN               9e3
    PAN -> C2O3 + NO2               0.022
    MEO2 + NO -> CH3O + NO2         1.2e4
    CH3O -> HCHO + HO2              1.88
    NO2 + OH -> HNO3                1.63e4
    O3P -> O3                       4.8e6
    O3 -> O1D                       3.5e-4
    O3 -> O3P                       0.0175
    O1D -> 2 OH                     1e8
    O1D -> O3P                      4.44e11
    SO2 + OH -> SO4 + HO2           1.24e3
    NO3 -> NO                       2.1
    NO3 -> NO2 + O3P                5.78
    NO2 + O3 -> NO3                 0.0474
    NO3 + NO2 -> N2O5               1.78e3
    N2O5 -> NO3 + NO2               3.12
"""
START = {"NO": 0.2, "O3": 0.04, "HCHO": 0.1, "CO": 0.3, "ALD": 0.01, "SO2": 0.007}
HOUR, TOLERANCES = 60.0, {"reltol": 1e-5, "abstol": 1e-11}

# What the second half finds again. (Of what takes OH away one must be known: the data tell ratios.)
UNKNOWN = {"NO2 -> NO + O3P": 0, "HCHO -> 2 HO2 + CO": 3, "HCHO + OH -> HO2 + CO": 5}
UNKNOWN |= {"C2O3 + NO2 -> PAN": 9, "NO2 + OH -> HNO3": 13}
MEASURED, NOISE = ["NO", "NO2", "O3", "HCHO", "PAN", "HNO3"], 0.01


def side(text):
    """The species of one side of a reaction, as often as they are there."""
    found = []
    for term in text.split("+"):
        *count, name = term.split()
        found += [name] * int(*count or [1])
    return found


def mechanism(text):
    """`f(u, k, t)` by the law of mass action, where `u` has a number for each species; all the
    species; and the rate constants."""
    reactions, constants = [], []
    for line in text.strip().splitlines():
        equation, _, constant = line.rpartition(" ")
        reactions.append([side(x) for x in equation.split("->")])
        constants.append(float(constant))

    def f(u, k, t):
        du = dict.fromkeys(u, 0.0)
        for constant, (before, after) in zip(k, reactions, strict=True):
            rate = constant * math.prod(u[x] for x in before)
            for x in before:
                du[x] -= rate
            for x in after:
                du[x] += rate
        return du

    species = {x: None for before, after in reactions for x in before + after}
    return f, list(species), np.array(constants)


F, SPECIES, CONSTANTS = mechanism(POLLUTION)
U0 = {x: START.get(x, 0.0) for x in SPECIES}
PROB = eo.ODEProblem(F, U0, (0.0, HOUR), jnp.asarray(CONSTANTS))


def perturbed(prob, ctx):
    """All constants, each known to about 10%."""
    return eo.remake(prob, p=prob.p * jnp.exp(0.1 * jax.random.normal(ctx.key, prob.p.shape)))


def uncertainty(trajectories):
    ens, times = eo.EnsembleProblem(PROB, perturbed), np.geomspace(0.01, HOUR, 40)
    options = {"saveat": times, **TOLERANCES}
    first, sim = (eo.solve(ens, eo.Rodas5P(), trajectories=trajectories, **options) for _ in "12")
    low, middle, high = np.quantile(sim.u["O3"][:, -1], [0.05, 0.5, 0.95])
    seconds = f"{sim.elapsed:.2f} s, at first, with compilation, {first.elapsed:.2f} s"
    print(f"{trajectories} sets of 25 constants in {seconds}")
    print(f"ozone after an hour: {middle:.3f} ppm, 90% between {low:.3f} and {high:.3f}")
    if not sim.successful.all():
        sys.exit("some trajectories failed")
    return sim


def experiments(constants, starts, times):
    """What is measured in each of them, `[experiment, time, species]`."""

    def prob_func(prob, ctx):
        u0 = prob.u0 | {x: values[ctx.index] for x, values in starts.items()}
        return eo.remake(prob, u0=u0, p=constants)

    ens, number = eo.EnsembleProblem(PROB, prob_func), len(next(iter(starts.values())))
    sim = eo.solve(ens, eo.Rodas5P(), trajectories=number, saveat=times, **TOLERANCES)
    return jnp.stack([sim.u[x] for x in MEASURED], axis=-1)


def estimation(updates):
    """The unknown constants from eight experiments with noise, begun wrong by factors of up to
    three: `[update, constant]` over the true ones."""
    rng = np.random.default_rng(0)
    starts = {x: jnp.asarray(START[x] * rng.uniform(0.3, 3, 8)) for x in START}
    times, which = np.linspace(5.0, HOUR, 12), np.array(list(UNKNOWN.values()))
    data = experiments(jnp.asarray(CONSTANTS), starts, times)
    data *= 1 + NOISE * rng.normal(size=data.shape)

    def loss(factors):
        constants = CONSTANTS * jnp.exp(jnp.zeros(len(CONSTANTS)).at[which].set(factors))
        return jnp.mean(((experiments(constants, starts, times) / data - 1) / NOISE) ** 2)

    optimiser = optax.adam(optax.cosine_decay_schedule(0.2, updates))

    @jax.jit
    def update(factors, state):
        value, gradient = jax.value_and_grad(loss)(factors)
        change, state = optimiser.update(gradient, state)
        return factors + change, state, value

    factors = jnp.asarray(rng.uniform(-np.log(3), np.log(3), len(which)))
    state, path, losses = optimiser.init(factors), [np.exp(factors)], []
    for _ in range(updates):
        factors, state, value = update(factors, state)
        path.append(np.exp(factors))
        losses.append(float(value))
    print(f"loss {losses[0]:.3g}, in the end {losses[-1]:.3g}; constants found over true ones:")
    for name, begun, found in zip(UNKNOWN, path[0], path[-1], strict=True):
        print(f"  {name:24} begun at {begun:.2f}, found {found:.3f}")
    return np.array(path)


def plot(sim, path):
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    ozone = np.quantile(sim.u["O3"], [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
    left.fill_between(sim.t, ozone[0], ozone[4], alpha=0.2, label="90%")
    left.fill_between(sim.t, ozone[1], ozone[3], alpha=0.4, label="50%")
    left.semilogx(sim.t, ozone[2], color="black", label="median")
    left.set(title=f"Ozone, {len(sim)} sets of constants", xlabel="minute", ylabel="ppm")
    left.legend(frameon=False)
    right.plot(path, label=list(UNKNOWN))
    right.axhline(1, color="black", lw=0.5)
    right.set(title="Constants over the true ones", xlabel="update")
    right.legend(frameon=False)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(trajectories, updates, picture):
    sim = uncertainty(trajectories)
    path = estimation(updates)
    if picture:
        plot(sim, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.trajectories, options.updates, not options.no_plot)
