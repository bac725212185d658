"""Classify scikit-learn's handwritten digits with a neural ODE between two linear layers.

A down layer makes 32 features of the 8x8 pixels, the ODE moves them from t = 0 to 1, and a linear
layer reads the digit from where they end. Each image of a minibatch is a trajectory, and all share
the weights, so the ensemble computes matrix products. Needs the extra `examples`.

    python examples/digits_neural_ode.py [--ensemble serial|threads|columns|gpuarray] [--epochs N]
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
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import ensembleode as eo


ENSEMBLES = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "columns": eo.EnsembleColumns(),
    "gpuarray": eo.EnsembleGPUArray(),
}
EPOCHS, BATCH, FEATURES = 30, 64, 32


def flow(model, images, ensemblealg, **options):
    """The paths of the features of `images [image, 64]`."""
    down, field, _ = model
    prob = eo.ODEProblem(lambda u, p, t: p(u), jnp.zeros(FEATURES, "float32"), (0.0, 1.0), field)
    ens = eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=jnp.tanh(down(images[ctx.index])))
    )
    return eo.solve(ens, eo.Tsit5(), ensemblealg, trajectories=len(images), **options)


def read(model, images, ensemblealg):
    """The logits `[image, 10]`."""
    sim = flow(model, images, ensemblealg)
    # A trajectory that failed is NaN, which the gradients of the layers after it would spread.
    ok = sim.successful
    return jax.vmap(model[2])(jnp.where(ok[:, None], sim.u[:, -1], 0.0))


def train(model, images, labels, training, test, epochs, ensemblealg):
    """The model trained, and the digits that it reads in all images."""
    batches = len(training) // BATCH
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, epochs * batches))
    state, rng = adam.init(eqx.filter(model, eqx.is_array)), np.random.default_rng(0)

    @eqx.filter_jit
    def update(model, state, images, labels):
        def loss(model):
            logits = read(model, images, ensemblealg)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        change, state = adam.update(eqx.filter_grad(loss)(model), state)
        return eqx.apply_updates(model, change), state

    guess = eqx.filter_jit(lambda model: read(model, images, ensemblealg).argmax(1))
    started = time.perf_counter()
    print(f"{'epoch':>5}{'training':>10}{'test':>10}{'seconds':>10}")
    for epoch in range(epochs):
        for batch in rng.permutation(training)[: batches * BATCH].reshape(batches, BATCH):
            # Noise on the pixels keeps the network from learning so few images by heart.
            noisy = images[batch] + 0.2 * rng.standard_normal((BATCH, 64), "float32")
            model, state = update(model, state, noisy, labels[batch])
        guesses = guess(model)
        accuracies = ((guesses == labels)[which].mean() for which in (training, test))
        row = "".join(f"{accuracy:>10.2%}" for accuracy in accuracies)
        print(f"{epoch + 1:>5}{row}{time.perf_counter() - started:>10.1f}")
    return model, guesses


def plot(images, labels, guesses, paths):
    figure = plt.figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2)
    wrong_first = np.argsort(guesses == labels, stable=True)
    left.suptitle(f"All {sum(guesses != labels)} errors in {len(labels)} test images, and others")
    for panel, i in zip(left.subplots(4, 7).flat, wrong_first, strict=False):
        panel.imshow(images[i].reshape(8, 8), cmap="gray_r")
        panel.set_title(guesses[i], color="black" if guesses[i] == labels[i] else "red", y=0.93)
        panel.axis("off")

    axes, ends = right.subplots(), paths[:, -1] - paths[:, -1].mean(0)
    components = np.linalg.svd(ends, full_matrices=False)[2][:2]
    seen = np.moveaxis((paths - paths[:, -1].mean(0)) @ components.T, -1, 0).swapaxes(1, 2)
    for digit, color in enumerate(plt.cm.tab10.colors):
        x, y = seen[..., labels == digit]  # [time, image]
        axes.plot(x, y, lw=0.5, alpha=0.5, color=color)
        axes.plot(x[-1], y[-1], ".", color=color, label=digit)
    axes.set(title="Features of the test images, from t = 0 to 1 (dots)")
    axes.set(xlabel="first principal component", ylabel="second")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), handletextpad=0)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(epochs, ensemblealg, picture):
    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images / 16, "float32"), jnp.asarray(labels)
    training, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    keys = jax.random.split(jax.random.key(0), 3)
    down = eqx.nn.Linear(64, FEATURES, key=keys[0])
    field = eqx.nn.MLP(FEATURES, FEATURES, 64, 1, activation=jnp.tanh, key=keys[1])
    model = (down, field, eqx.nn.Linear(FEATURES, 10, key=keys[2]))
    model, guesses = train(model, images, labels, training, test, epochs, ensemblealg)
    if picture:
        paths = flow(model, images[test], ensemblealg, saveat=0.05).u
        plot(*map(np.asarray, (images[test], labels[test], guesses[test], paths)))
    accuracy, wanted = (guesses == labels)[test].mean(), 0.95 if epochs >= EPOCHS else 0.5
    if accuracy < wanted:
        sys.exit(f"{accuracy:.2%} of the test images are read correctly, less than {wanted:.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ensemble", choices=ENSEMBLES, default="threads")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"by default {EPOCHS}")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.epochs, ENSEMBLES[options.ensemble], not options.no_plot)
