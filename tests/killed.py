"""Kills a process that writes a store, or runs a fit, at random moments, and goes on with the next.

    python -m tests.killed store|fit|events FOLDER KILLS SEED

Each process is forked from this one, in which JAX is imported and has computed nothing yet.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401
import zarr  # noqa: F401

import ensembleode as eo
import ensembleode.store.store_files


def lorenz(u, p, t):
    x, y, z = u
    return jnp.stack([10.0 * (y - x), x * (p - z) - y, x * y - 8.0 / 3.0 * z])


def solved(folder, **options):
    ens = eo.EnsembleProblem(
        eo.ODEProblem(lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 1.0), 28.0),
        lambda prob, ctx: eo.remake(prob, p=ctx.index / 10),
        lambda sol, ctx: ({"at": (100 * sol.u[-1, 0]).astype(int), "u": sol.u}, False),
    )
    sim = eo.solve(ens, trajectories=240, saveat=0.1, batch_size=8, **options)
    return [sim.u["at"], sim.u["u"], sim.retcode]


def with_events(folder, **options):
    turn = eo.ContinuousCallback(lambda u, t, integrator: u[0] - u[1], lambda x: x)
    ens = eo.EnsembleProblem(
        eo.ODEProblem(lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 8.0), 28.0, callback=turn),
        lambda prob, ctx: eo.remake(prob, p=20.0 + ctx.index / 4),
    )
    sim = eo.solve(ens, trajectories=240, saveat=1.0, batch_size=8, **options)
    return [sim.retcode, *jax.tree.leaves(sim.events), sim.u, sim.p]


def events(folder, expected):
    """As `store`, with events."""
    path = folder / "a.zarr"
    with contextlib.suppress(eo.StoreError):  # (not begun yet)
        sim = eo.open_ensemble(path)
        there, t = np.asarray(sim.retcode) != 0, np.asarray(sim.events.t)
        most = min(t.shape[1], expected[1].shape[1])
        np.testing.assert_array_equal(t[there, :most], expected[1][there, :most])
        assert np.isnan(t[there, most:]).all()
    found = list(map(np.asarray, with_events(folder, store=path)))
    again = eo.open_ensemble(path)
    return [*found[:-1], np.asarray(again.p)]


def store(folder, expected):
    """Check what is there, and go on."""
    path = folder / "a.zarr"
    with contextlib.suppress(eo.StoreError):  # (not begun yet)
        sim = eo.open_ensemble(path)
        there = np.asarray(sim.retcode) != 0
        for x, y in zip([sim.u["at"], sim.u["u"]], expected, strict=False):
            np.testing.assert_array_equal(np.asarray(x)[there], y[there])
    return list(map(np.asarray, solved(folder, store=path)))


def fit(folder, expected):
    """Go on."""
    x = np.linspace(0.0, 1.0, 64)
    how = eo.Checkpoints(folder / "run", steps=2) if expected is not None else None
    result = eo.fit(
        lambda p, b: (p["slope"] * b["x"] + p["shift"] - b["y"]) ** 2,
        {"slope": jnp.array(0.0), "shift": jnp.array(1.0)},
        {"x": x, "y": 3 * x},
        optimizer=optax.adam(0.1),
        batch_size=16,
        maxiters=60,
        checkpoint=how,
        log=folder / "log" if expected is not None else None,
        progress=False,
    )
    return [result.losses, *map(np.asarray, jax.tree.leaves((result.params, result.best)))]


def forked(work, *args):
    """The process id of one that does this, and ends."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*args)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(what, folder, kills, seed):
    folder, rng = Path(folder), random.Random(seed)
    begun, wanted = folder / "begun", folder / "expected.npz"

    def expect():
        make = {"store": solved, "fit": lambda x: fit(x, None), "events": with_events}[what]
        of = make(folder)
        np.savez(wanted, *map(np.asarray, of))

    def go_on():
        with np.load(wanted) as file:
            expected = list(file.values())
        begun.touch()
        found = {"store": store, "fit": fit, "events": events}[what](folder, expected)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)

    def undisturbed(work):
        started = time.monotonic()
        assert os.waitpid(forked(work), 0)[1] == 0
        return time.monotonic() - started

    def clear():
        for place in ("a.zarr", "run"):
            shutil.rmtree(folder / place, ignore_errors=True)
        (folder / "log").unlink(missing_ok=True)

    undisturbed(expect)
    undisturbed(go_on)
    seconds = time.time() - begun.stat().st_mtime
    clear()
    killed = 0
    while killed < kills:
        begun.unlink(missing_ok=True)
        child = forked(go_on)
        while not begun.exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        else:  # it was done before
            assert status == 0, status
            clear()
    undisturbed(go_on)
    print("killed", killed)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
