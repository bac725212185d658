"""Fits whose results must not depend on how items are split; also a script for several
processes."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ensembleode as eo


N = 17  # divisible by nothing


def items(n=N):
    rng = np.random.default_rng(0)
    return {"u0": rng.uniform(0.5, 2.0, (n, 2)), "target": rng.uniform(0.0, 1.0, (n, 2))}


def start():
    return {"rates": jnp.array([0.5, 1.0]), "coupling": jnp.array(0.1)}


def trajectories(engine="auto", noise=0.1, **options):
    """The loss of each trajectory of an ensemble, with noise of its own."""

    def field(u, p, t):
        return -p["rates"] * u + p["coupling"] * u[::-1] * u

    def loss(params, batch, key):
        prob = eo.ODEProblem(field, batch["u0"][0], (0.0, 1.0), params)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=batch["u0"][ctx.index]))
        count = len(batch["u0"])
        saved = {"trajectories": count, "save_start": False, "engine": engine}
        sim = eo.solve(ens, eo.Tsit5(), **saved, **options)
        shift = noise * jax.vmap(lambda k: jax.random.normal(k, (2,)))(key)
        return jnp.sum((sim.u[:, 0] - batch["target"] + shift) ** 2, axis=1)

    return loss


FITS = {
    "minibatches": {"batch_size": 7, "epochs": 2},
    "all at once": {"maxiters": 3},
    "fewer than devices": {"batch_size": 1, "maxiters": 3},
    "microbatches": {"batch_size": 11, "epochs": 1, "microbatch": 2},
    "least squares": {"optimizer": eo.LevenbergMarquardt(0.1), "batch_size": 7, "epochs": 2},
}


def fitted(name, loss=None, **where):
    options = {"optimizer": optax.adam(0.05), "progress": False, **FITS[name], **where}
    with jax.numpy_dtype_promotion("standard"):
        return eo.fit(loss or trajectories(), start(), items(), **options)


def numbers(result):
    return np.concatenate(
        [result.losses, result.params["rates"], result.params["coupling"][None], [result.best_loss]]
    )


def main():
    eo.initialize()
    where = json.loads(sys.argv[1])
    out = {name: numbers(fitted(name, **where)).tolist() for name in FITS}
    double = eo.predict(lambda p, x: 2 * x["u0"], None, items(), batch_size=5, **where)
    out["predict"] = double.tolist()
    if jax.process_index() == 0:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
