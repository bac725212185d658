"""Find an unknown term of an equation: a universal differential equation, and sparse regression.

That prey grow and predators die is known, with unknown rates; how they meet isn't. A network stands
for it. `fit` trains the rates and the network on twenty noisy series. Then a regression with few
terms, among all products up to the third degree, says what the network has found. The equation that
it gives is solved twice as far as there are data. Needs the extra `plot`.

    python examples/universal_ode.py [--updates N] [--no-plot]
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


jax.config.update("jax_enable_x64", True)
UPDATES, SERIES, NOISE, WINDOW = 3000, 20, 0.01, 11
TIMES, LATER = np.linspace(0.0, 4.0, 41), np.linspace(0.0, 8.0, 161)
EXPONENTS = [(i, j) for i in range(4) for j in range(4) if i + j <= 3]


def nature(u, p, t):
    x, y = u
    return jnp.stack([1.5 * x - x * y, x * y - 3.0 * y])


def universal(u, p, t):
    grow, die = jnp.exp(p["log_rates"])
    return jnp.stack([grow * u[0], -die * u[1]]) + 5.0 * p["network"](u / 3.0)


def simulate(f, p, starts, times):
    prob = eo.ODEProblem(f, starts[0], (times[0], times[-1]), p)
    return eo.solve(eo.EnsembleProblem(prob, u0=starts), eo.Tsit5(), saveat=times, reltol=1e-5)


def windows(data):
    """Short pieces of the series: from a bad guess, a solve over a whole one goes astray."""
    pieces = [data[:, i : i + WINDOW] for i in range(0, len(TIMES) - 1, WINDOW - 1)]
    return jnp.concatenate(pieces)


def train(data, held_out, updates):
    def loss(p, batch):
        sim = simulate(universal, p, batch[:, 0], TIMES[:WINDOW])
        error = jnp.where(sim.successful[:, None, None], sim.u - batch, 0.0)
        return jnp.mean(error**2, axis=(1, 2))

    network = eqx.nn.MLP(2, 2, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    rate = optax.cosine_decay_schedule(2e-2, updates)
    start = {"log_rates": jnp.zeros(2), "network": network}
    options = {"maxiters": updates, "validation": held_out, "patience": 400}
    return eo.fit(loss, start, data, optimizer=optax.adam(rate), batch_size=len(data), **options)


def products(u):
    """All products of powers up to the third degree, `[..., term]`."""
    return jnp.stack([u[..., 0] ** i * u[..., 1] ** j for i, j in EXPONENTS], axis=-1)


def sparse_regression(u, du, threshold=0.15):
    """Coefficients `[term, component]`: least squares, again and again without the small terms
    (SINDy; Brunton, Proctor and Kutz, 2016)."""
    terms = np.asarray(products(u))
    size = np.linalg.norm(terms, axis=0)
    found = np.zeros((len(EXPONENTS), 2))
    for i in range(2):
        kept = np.ones(len(EXPONENTS), bool)
        for _ in range(10):
            found[:, i] = 0.0
            found[kept, i] = np.linalg.lstsq(terms[:, kept], du[:, i], rcond=None)[0]
            small = np.abs(found[:, i]) * size < threshold * np.linalg.norm(du[:, i])
            kept &= ~small
    return found


def as_text(coefficients):
    names = [f"x^{i} y^{j}" for i, j in EXPONENTS]
    terms = zip(names, coefficients, strict=True)
    return " ".join(f"{c:+.3f} {name}" for name, c in terms if c) or "0"


def plot(result, starts, coefficients, known):
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    result.plot(ax=left)
    left.axhline(NOISE**2, color="black", ls="--", lw=1, label="variance of the noise")
    left.set(title="Mean square error", xlabel="update", ylabel=None)
    left.legend(frameon=False)
    exact = simulate(nature, None, starts, LATER)
    exact[0].plot(names=("prey", "predators"), ax=right, color="black", ls=":")
    right.set_prop_cycle(None)
    simulate(known, coefficients, starts, LATER)[0].plot(names=("prey", "predators"), ax=right)
    right.axvspan(TIMES[-1], LATER[-1], color="0.93")
    right.legend(frameon=False)
    right.set(
        title="The equation that was found (dotted: exact)", xlabel="t (grey: beyond the data)"
    )
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(updates, picture):
    keys = jax.random.split(jax.random.key(1), 2)
    starts = jax.random.uniform(keys[0], (SERIES + 4, 2), minval=0.5, maxval=2.5)
    exact = simulate(nature, None, starts, TIMES).u
    data = exact + NOISE * jax.random.normal(keys[1], exact.shape)
    result = train(windows(data[:SERIES]), windows(data[SERIES:]), updates)
    print(result)

    # What the rates and the network say, at the states that the trained model goes through.
    best = result.best
    states = simulate(universal, best, data[:SERIES, 0], TIMES).u.reshape(-1, 2)
    slopes = jax.vmap(lambda u: universal(u, best, 0.0))(states)
    coefficients = sparse_regression(states, np.asarray(slopes))
    for name, found in zip("xy", coefficients.T, strict=True):
        print(f"d{name}/dt = {as_text(found)}")

    def known(u, coefficients, t):
        return products(u) @ coefficients

    ahead = simulate(known, jnp.asarray(coefficients), starts[SERIES:], LATER)
    truth = simulate(nature, None, starts[SERIES:], LATER)
    error = float(jnp.sqrt(jnp.mean((ahead.u - truth.u) ** 2)))
    print(f"rms error until t = 8, series held out: {error:.3f}")
    if picture:
        plot(result, starts[SERIES:], jnp.asarray(coefficients), known)
    terms = [[EXPONENTS[i] for i in np.flatnonzero(x)] for x in coefficients.T]
    if updates >= UPDATES and terms != [[(1, 0), (1, 1)], [(0, 1), (1, 1)]]:
        sys.exit("these are not the terms of the equation")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"by default {UPDATES}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.updates, not options.no_plot)
