"""A fit with checkpoints, as a script that can be killed."""

import json
import sys
import time

import jax
import optax

import ensembleode as eo
from tests.training import parity


def fitted(folder, callback=None, **where):
    return eo.fit(
        parity.trajectories(),
        parity.start(),
        parity.items(),
        optimizer=optax.adam(0.05),
        batch_size=7,
        maxiters=40,
        validation=parity.items(9),
        validate_every=4,
        patience=30,
        callback_state=0.0,
        checkpoint=None if folder == "none" else eo.Checkpoints(folder, steps=3),
        callback=callback,
        progress=False,
        **where,
    )


def main():
    folder, where = sys.argv[1], json.loads(sys.argv[2])
    eo.initialize(patience=3)
    slow = where.pop("slow", 0.0)

    def callback(state, mean):
        if jax.process_index() == 0:
            print("step", state.step, flush=True)
        time.sleep(slow)
        return False, 0.9 * mean + 0.1 * state.loss

    result = fitted(folder, callback, **where)
    more = [*result.validation_losses, *result.best["rates"], result.callback_state]
    if jax.process_index() == 0:
        numbers = [float(x).hex() for x in (*parity.numbers(result), *more)]
        print("result", json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
