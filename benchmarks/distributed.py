"""EnsembleDistributed on this computer: what it adds to the solving, and other ways to do the same.

The ensemble is Lorenz trajectories with rho from 0 to 21, in float64, by `Tsit5` with a fixed step,
in chunks of 128 trajectories. `--seconds` is the time that one chunk takes, set by a calibrated
time span. The main process has two worker processes with one thread each, and everything is
compiled before it is timed. The contenders take turns, and the time is the best of `--repeats`.

- `useful`: the seconds of solving, as the workers measure them, over workers x wall time.
- `cost of a chunk`: the rest of workers x wall time, divided by the number of chunks.
- The contenders compute the same chunks, by a function that is compiled once in each of their
    workers and returns NumPy arrays: `joblib` (loky), `concurrent.futures.ProcessPoolExecutor`
    (spawn), and futures of Dask by hand, on a cluster like that of `EnsembleDistributed`. They send
    numbers to a worker, and get the same results back.
- Strong scaling has the same chunks on more workers; weak scaling has as many chunks for each
    worker. The reference is `EnsembleSerial()` in this process.
- Training is a step of `jax.value_and_grad` inside `jit`, by trajectories and by
    `reduction=eo.sum_reduction`, and the bytes that it sends.

All results are compared with those of `EnsembleSerial()`; `error` is the largest difference.

    python benchmarks/distributed.py [--seconds S ...] [--chunks N] [--workers W ...] [--repeats R]
"""

import sys
from pathlib import Path


# This file has the name of a package that it uses, so its folder is not where to look for modules.
folder = Path(__file__).resolve().parent
sys.path[:] = [str(folder.parent), *(x for x in sys.path if Path(x).resolve() != folder)]

import argparse  # noqa: E402
import concurrent.futures  # noqa: E402
import functools  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402

import jax  # noqa: E402


jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import ensembleode as eo  # noqa: E402
from benchmarks.common.report import kind_of_machine  # noqa: E402
from benchmarks.common.timing import best_of, timed  # noqa: E402
from benchmarks.lorenz_chunk import chunk, ensemble, solve, WIDTH  # noqa: E402
from ensembleode.executors.distributed.local import LOCAL  # noqa: E402


def rhos_of(chunks):
    return np.linspace(0.0, 21.0, chunks * WIDTH)


def calibrated(seconds):
    """The span that a chunk takes so long for."""
    rhos, t1 = rhos_of(1), 0.5
    chunk(rhos, t1)
    while True:
        took, _ = best_of(functools.partial(chunk, rhos, t1), 3)
        if took > 0.8 * seconds:
            return t1 * seconds / took
        t1 *= min(8.0, max(1.3, seconds / took))


def contenders(workers, seconds, chunks, repeats):
    """Times over the same chunks."""
    import distributed
    import joblib

    t1 = calibrated(seconds)
    rhos = rhos_of(chunks)
    parts = list(rhos.reshape(chunks, WIDTH))
    serial_time, serial = timed(lambda: solve(rhos, t1, eo.EnsembleSerial()))
    os.environ.update(eo.worker_environment())
    parallel = joblib.Parallel(n_jobs=workers)
    spawn = multiprocessing.get_context("spawn")
    with (
        eo.EnsembleDistributed(workers=workers) as alg,
        concurrent.futures.ProcessPoolExecutor(workers, spawn) as pool,
        distributed.LocalCluster(n_workers=workers, **LOCAL) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        ways = {
            "EnsembleDistributed": lambda: [(solve(rhos, t1, alg).u,)],
            "joblib": lambda: parallel(joblib.delayed(chunk)(x, t1) for x in parts),
            "ProcessPoolExecutor": lambda: [
                future.result() for future in [pool.submit(chunk, x, t1) for x in parts]
            ],
            "Dask futures": lambda: client.gather(
                [client.submit(chunk, x, t1, pure=False) for x in parts]
            ),
        }
        for way in ways.values():  # compiles
            way()
        best = dict.fromkeys(ways, np.inf)
        errors, useful = {}, 0.0
        for _ in range(repeats):
            for name, way in ways.items():
                before = alg.traffic()
                took, value = timed(way)
                if name == "EnsembleDistributed" and took < best[name]:
                    traffic = alg.traffic() - before
                    useful = traffic.seconds
                best[name] = min(best[name], took)
                states = np.reshape(np.concatenate([part[0] for part in value]), (len(rhos), 3))
                errors[name] = np.abs(states - np.reshape(np.asarray(serial.u), (-1, 3))).max()
    ours = best["EnsembleDistributed"]
    print(f"\n{chunks} chunks of {seconds:g} s, {workers} workers (serial: {serial_time:.2f} s)")
    print(f"{'':22}{'seconds':>10}{'x ours':>9}{'error':>11}")
    for name, took in best.items():
        print(f"{name:22}{took:10.3f}{took / ours:9.2f}{errors[name]:11.1e}")
    share = useful / (workers * ours)
    left = (workers * ours - useful) / chunks
    print(
        f"useful {share:.3f}; cost of a chunk {1e3 * left:.1f} ms; {traffic.tasks} tasks, "
        f"{traffic.sent / 1e3:.0f} kB sent, {traffic.received / 1e3:.0f} kB received"
    )


def scaling(workers, seconds, chunks, repeats):
    t1 = calibrated(seconds)

    def took(alg, chunks):
        rhos = rhos_of(chunks)
        solve(rhos, t1, alg)
        return best_of(lambda: solve(rhos, t1, alg), repeats)[0]

    serial = took(eo.EnsembleSerial(), chunks)
    print(
        f"\nstrong scaling, {chunks} chunks of {seconds:g} s; weak, {chunks // 2} for each worker"
    )
    print(f"{'workers':>8}{'strong, s':>11}{'efficiency':>12}{'weak, s':>10}{'efficiency':>12}")
    print(f"{'serial':>8}{serial:11.2f}{'':>12}{serial / 2:10.2f}")
    for n in workers:
        with eo.EnsembleDistributed(workers=n) as alg:
            strong, weak = took(alg, chunks), took(alg, chunks // 2 * n)
        print(
            f"{n:8}{strong:11.2f}{serial / n / strong:12.2f}{weak:10.2f}{serial / 2 / weak:12.2f}"
        )


def training(workers, repeats):
    """A step of a fit of 20,000 trajectories, 11 times saved of each."""
    n = 20_000
    rhos = jnp.linspace(0.0, 21.0, n)
    options = {"trajectories": n, "saveat": 0.1, "abstol": 1e-6, "reltol": 1e-6}

    def by_trajectories(scale, alg):
        return (eo.solve(ensemble(rhos, 1.0, scale), eo.Tsit5(), alg, **options).u ** 2).sum()

    def by_sums(scale, alg):
        ens = ensemble(rhos, 1.0, scale)
        ens = eo.EnsembleProblem(
            ens.prob, ens.prob_func, lambda sol, ctx: ((sol.u**2).sum(), False), eo.sum_reduction
        )
        return eo.solve(ens, eo.Tsit5(), alg, **options).u

    print(f"\na step of training, {n:,} trajectories, {workers} workers")
    print(f"{'':36}{'ms':>8}{'sent, kB':>10}{'received, kB':>14}{'error':>11}")
    with eo.EnsembleDistributed(workers=workers) as alg:
        for name, loss in (("trajectories", by_trajectories), ("sum_reduction", by_sums)):
            expected = None
            for where, on in (("serial", eo.EnsembleSerial()), ("distributed", alg)):
                step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
                jax.block_until_ready(step(1.0, on))
                before = alg.traffic()
                took, value = best_of(functools.partial(step, 1.0, on), repeats)
                sent = alg.traffic() - before
                expected = value if expected is None else expected
                error = abs(value[1] / expected[1] - 1)
                print(
                    f"{name + ', ' + where:36}{1e3 * took:8.1f}{sent.sent / repeats / 1e3:10.1f}"
                    f"{sent.received / repeats / 1e3:14.1f}{error:11.1e}"
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.5, 0.05])
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(kind_of_machine())
    most = max(args.workers)
    for seconds in args.seconds:
        chunks = args.chunks if seconds >= 0.2 else 10 * args.chunks
        contenders(most, seconds, chunks, args.repeats)
    scaling(args.workers, args.seconds[0], args.chunks // 2, args.repeats)
    training(most, args.repeats)


if __name__ == "__main__":
    main()
