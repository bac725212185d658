"""How `fit` scales over devices, and what it adds to a loop by hand.

- Strong scaling has the same batch on more devices; weak scaling has the same number of items on
    each device. Each number of devices is measured in a process of its own, bound to as many cores.
    Efficiency refers to the time of a step on one device. `error` is the largest relative
    difference of the parameters after the steps from those of one device.
- There are two losses: an ensemble of Lorenz equations (an item is a trajectory, and its loss is
    the distance of its end from its start), and the residuals of the Allen-Cahn equation (an item
    is a collocation point).
- Overhead compares steps of about `--milliseconds` in `fit` and in a jitted optax loop by hand,
    over the same loss and batches. Both read the loss of each step (`fit` does so to stop when it
    is not finite). Steps of the two alternate, so that other programs on the computer slow both.

    python benchmarks/scaling.py [--devices N ...] [--steps N] [--milliseconds MS]
"""

import argparse
import os
import pathlib
import sys
import time


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.contenders import by_solve
from common.processes import apart, is_worker
from common.report import kind_of_machine
from common.tasks import lorenz_components, Task

import ensembleode as eo


def lorenz(u, p, t):
    return jnp.stack(lorenz_components(u, p[1], p[0], p[2]))


def ensemble_loss(params, batch):
    u0 = batch["u0"]
    task = Task(lorenz, u0, params, ("u0",), len(u0), 1.0, rtol=1e-6, atol=1e-6)
    ends, _ = by_solve(task)(u0, params)
    return jnp.sum((ends[:, 0] - batch["target"]) ** 2, axis=1)


def trajectories(n):
    rng = np.random.default_rng(0)
    u0 = rng.uniform(-1.0, 1.0, (n, 3)).astype("f4")
    return {"u0": u0, "target": u0}


def along(fn, x):
    """`fn` and its derivative, for a function of each point alone."""
    return jax.jvp(fn, (x,), (jnp.ones_like(x),))


def collocation_loss(network, points):
    def values(x, t):
        return x**2 * jnp.cos(jnp.pi * x) + t * jax.vmap(network)(jnp.stack([x, t], 1))[:, 0]

    x, t = points["x"], points["t"]
    u_t = along(lambda t: values(x, t), t)[1]
    (u, _), (_, u_xx) = along(lambda x: along(lambda x: values(x, t), x), x)
    return (u_t - 1e-4 * u_xx - 5 * (u - u**3)) ** 2


def points(n):
    x, t = np.random.default_rng(0).random((2, n), dtype=np.float32)
    return {"x": 2 * x - 1, "t": t}


def network():
    return eqx.nn.MLP(2, 1, 128, 4, activation=jnp.tanh, key=jax.random.key(0))


LOSSES = {
    "Lorenz ensemble": (ensemble_loss, jnp.array([10.0, 14.0, 8 / 3]), trajectories, 16_384),
    "Allen-Cahn": (collocation_loss, network(), points, 4096),
}


def of_fit(loss, params, data, steps, devices=1, **options):
    """Seconds of each step but the first ones, and the parameters."""
    times = []
    result = eo.fit(
        loss,
        params,
        data,
        optimizer=optax.adam(1e-3),
        maxiters=steps + 2,
        devices=devices,
        callback=lambda state: times.append(time.perf_counter()),
        progress=False,
        **options,
    )
    return np.diff(times)[1:], result.params


def measured(name, steps):
    """On as many devices as this process has: ms of a step with the same items, and with as many
    for each device; and the parameters of the former."""
    loss, params, data, n = LOSSES[name]
    count = len(jax.local_devices())
    times, found = of_fit(loss, params, data(n), steps, count)
    weak, _ = of_fit(loss, params, data(n * count), steps, count)
    numbers = [np.asarray(x).tolist() for x in jax.tree.leaves(eqx.filter(found, eqx.is_array))]
    strong, weak = (1e3 * float(np.median(x)) for x in (times, weak))
    return {"strong": strong, "weak": weak, "numbers": numbers}


def scaling(name, devices, steps):
    n = LOSSES[name][3]
    print(f"\n{name}: {n:,} items, or {n:,} for each device")
    print(f"{'devices':>8}{'strong, ms':>12}{'efficiency':>12}{'error':>10}", end="")
    print(f"{'weak, ms':>12}{'efficiency':>12}")
    one, cores = None, sorted(os.sched_getaffinity(0))
    for count in devices:
        found = apart(__file__, [name, steps], cores=cores[:count])
        one = found if one is None else one
        pairs = zip(found["numbers"], one["numbers"], strict=True)
        error = max(np.abs(np.subtract(a, b)).max() / np.abs(b).max() for a, b in pairs)
        print(
            f"{count:8}{found['strong']:12.1f}{one['strong'] / found['strong'] / count:12.2f}"
            f"{error:10.1e}{found['weak']:12.1f}{one['strong'] / found['weak']:12.2f}"
        )


def by_hand(loss, params, data, size):
    """Makes steps, with all data or with shuffled minibatches of `size`; each reads the loss."""
    optimizer = optax.adam(1e-3)
    count = len(jax.tree.leaves(data)[0])
    whole = jax.tree.map(jnp.asarray, data)
    rng = np.random.default_rng(0)

    def batches():
        while size is None:
            yield whole
        while True:
            order = rng.permutation(count)
            for i in range(0, count, size):
                yield jax.tree.map(lambda x, i=i, o=order: jnp.asarray(x[o[i : i + size]]), data)

    @jax.jit
    def update(params, state, batch):
        value, gradient = jax.value_and_grad(lambda p: jnp.mean(loss(p, batch)))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for batch in batches():
        params, state, value = update(params, state, batch)
        yield float(value)


def in_turns(loss, params, data, size, steps):
    """Seconds of each step: of `fit`, and by hand in its callback."""
    hand = by_hand(loss, params, data, size)
    times = []

    def callback(state):
        began = time.perf_counter()
        next(hand)
        times.append((began, time.perf_counter()))

    options = {"optimizer": optax.adam(1e-3), "maxiters": steps, "progress": False}
    eo.fit(loss, params, data, batch_size=size, callback=callback, **options)
    began, ended = np.array(times[5:]).T
    return began[1:] - ended[:-1], (ended - began)[1:]


def overhead(milliseconds, steps):
    loss, params, data, n = LOSSES["Lorenz ensemble"]
    took = np.median(in_turns(loss, params, data(n), None, 30)[1])
    n = max(256, int(n * milliseconds / 1e3 / took) // 256 * 256)
    print(f"\na step over {n:,} Lorenz trajectories, the median of {steps}, taking turns")
    print(f"{'':14}{'by hand, ms':>12}{'fit, ms':>10}{'more':>9}")
    for what, many, size in (("all data", data(n), None), ("minibatches", data(8 * n), n)):
        fitted, hand = (1e3 * np.median(x) for x in in_turns(loss, params, many, size, steps))
        print(f"{what:14}{hand:12.3f}{fitted:10.3f}{100 * (fitted / hand - 1):+7.1f} %")


def main():
    if is_worker(measured):
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--devices", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--milliseconds", type=float, default=10.0)
    args = parser.parse_args()
    print(f"{kind_of_machine()}, {jnp.zeros(1).dtype}")
    overhead(args.milliseconds, 50 * args.steps)
    for name in LOSSES:
        scaling(name, args.devices, args.steps)


if __name__ == "__main__":
    main()
