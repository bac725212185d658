"""A process that trains with others, as a script: when one of them goes, it is doing what the
argument says."""

import sys
import time

import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils

import ensembleode as eo


def fitted(callback=None, steps=10_000):
    options = {"optimizer": optax.sgd(0.1), "batch_size": 4, "maxiters": steps, "progress": False}
    return eo.fit(
        lambda p, x: (p - x) ** 2, jnp.array(0.5), jnp.arange(8.0), callback=callback, **options
    )


def tell(what):
    """Each process prints this when it is where the test wants it."""
    print(what, flush=True)


def main(doing):
    eo.initialize(patience=3)
    first = jax.process_index() == 0
    fitted(steps=2)
    tell("ready")
    if doing == "steps":
        fitted()
    elif doing == "callback":
        fitted(lambda state: time.sleep(60))
    elif doing == "python":
        time.sleep(60)
    elif doing == "computation":
        multihost_utils.broadcast_one_to_all(jnp.zeros(3)) if first else time.sleep(60)
    elif doing == "caught":
        try:
            fitted()
        except eo.ProcessLost as e:
            tell(f"caught it after {e.result.steps > 0} steps: {e}")
            time.sleep(6)  # longer than one that isn't told
            tell("and had the time for this")
    elif doing == "error in one" and first:
        raise ValueError("of one process")
    elif doing == "error in one":
        fitted()
    elif doing == "exit in one":
        fitted(lambda state: sys.exit(3))
    elif doing == "one is done" and first:
        fitted()
    elif doing == "one takes longer" and first:
        time.sleep(7)
        tell("done")


if __name__ == "__main__":
    main(sys.argv[1])
