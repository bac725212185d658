"""How `fit` scales over devices, and what it adds to a loop by hand.

- Strong scaling: the same batch on more devices; weak: as many items for each. Each number of
  devices is run by a process of its own, bound to as many cores. Efficiency is by the time of a
  step on one. `error` is the largest relative difference of the parameters after the steps from
  those of one device.
- Two losses: an ensemble of Lorenz equations (an item is a trajectory, its loss the distance of its
  end from its start), and the residuals of the Allen-Cahn equation (`examples/allen_cahn.py`).
- Overhead: steps of about `--milliseconds` in `fit` and in a jitted optax loop by hand, over the
  same loss and batches; by hand it reads the loss of each step (as `fit` does, to stop when it is
  not finite), or reads none. The ways take turns, and the time is the median of `--repeats`.

    python benchmarks/scaling.py [--devices N ...] [--steps N] [--repeats R] [--milliseconds MS]
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time


ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if "SCALING" in os.environ:  # before JAX starts its threads
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["SCALING"])])

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import ensembleode as eo  # noqa: E402
from examples import allen_cahn  # noqa: E402


def lorenz(u, p, t):
    x, y, z = u
    return jnp.stack([p[0] * (y - x), x * (p[1] - z) - y, x * y - p[2] * z])


def ensemble_loss(params, batch):
    prob = eo.ODEProblem(lorenz, batch["u0"][0], (0.0, 1.0), params)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=batch["u0"][ctx.index]))
    options = {"abstol": 1e-6, "reltol": 1e-6, "save_start": False}
    sim = eo.solve(ens, eo.Tsit5(), eo.EnsembleThreads(1), trajectories=len(batch["u0"]), **options)
    return jnp.sum((sim.u[:, 0] - batch["target"]) ** 2, axis=1)


def trajectories(n):
    rng = np.random.default_rng(0)
    u0 = rng.uniform(-1.0, 1.0, (n, 3)).astype("f4")
    return {"u0": u0, "target": u0}


def points(n):
    x, t = np.random.default_rng(0).random((2, n), dtype=np.float32)
    return {"x": 2 * x - 1, "t": t}


def network():
    return eqx.nn.MLP(2, 1, 128, 4, activation=jnp.tanh, key=jax.random.key(0))


LOSSES = {
    "Lorenz ensemble": (ensemble_loss, jnp.array([10.0, 14.0, 8 / 3]), trajectories, 16_384),
    "Allen-Cahn": (allen_cahn.loss, network(), points, 4096),
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
    one = None
    for count in devices:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", name, "--steps", str(steps)],
            env={**os.environ, "SCALING": str(count)},
            stdout=subprocess.PIPE,
            check=True,
        )
        found = json.loads(done.stdout)
        one = found if one is None else one
        pairs = zip(found["numbers"], one["numbers"], strict=True)
        error = max(np.abs(np.subtract(a, b)).max() / np.abs(b).max() for a, b in pairs)
        print(
            f"{count:8}{found['strong']:12.1f}{one['strong'] / found['strong'] / count:12.2f}"
            f"{error:10.1e}{found['weak']:12.1f}{one['strong'] / found['weak']:12.2f}"
        )


def by_hand(loss, params, data, size, steps, reads):
    """Seconds of a step: all data, or shuffled minibatches of `size`."""
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

    state, batches = optimizer.init(params), batches()
    for _ in range(2):
        params, state, value = update(params, state, next(batches))
    jax.block_until_ready(value)
    started = time.perf_counter()
    for _ in range(steps):
        params, state, value = update(params, state, next(batches))
        if reads and not np.isfinite(float(value)):
            break
    jax.block_until_ready(params)
    return (time.perf_counter() - started) / steps


def overhead(milliseconds, steps, repeats):
    loss, params, data, n = LOSSES["Lorenz ensemble"]
    took = by_hand(loss, params, data(n), None, 5, True)
    n = max(256, int(n * milliseconds / 1e3 / took) // 256 * 256)
    print(f"\na step over {n:,} Lorenz trajectories, {steps} steps, {repeats} repeats")
    for what, many, size in (("all data", data(n), None), ("minibatches", data(8 * n), n)):
        given = (loss, params, many)

        def fitted(given=given, size=size):
            return float(np.mean(of_fit(*given, steps, batch_size=size)[0]))

        ways = {
            "by hand, reads no loss": functools.partial(by_hand, *given, size, steps, False),
            "by hand": functools.partial(by_hand, *given, size, steps, True),
            "fit": fitted,
        }
        times = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                times[name].append(way())
        base = statistics.median(times["by hand"])
        for name, values in times.items():
            took = statistics.median(values)
            print(f"{what + ', ' + name:38}{1e3 * took:8.3f} ms{100 * (took / base - 1):+8.1f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--devices", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=10.0)
    parser.add_argument("--measure", choices=LOSSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(args.measure, args.steps)))
        return
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"jax {jax.__version__}, {jnp.zeros(1).dtype}"
    )
    overhead(args.milliseconds, 10 * args.steps, args.repeats)
    for name in LOSSES:
        scaling(name, args.devices, args.steps)


if __name__ == "__main__":
    main()
