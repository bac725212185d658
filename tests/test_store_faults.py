"""Stores whose writer dies, or fails, at any call of the operating system, possibly losing
everything that was not on the disk: no wrong data is returned, and the solve goes on."""

import errno
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.store import stored

from .marks import slow_unless
from .problems import decay, scaled


ROOT = Path(__file__).parent.parent
OPTIONS = {"trajectories": 7, "batch_size": 4, "saveat": 0.5}


class Died(BaseException):
    """The process ends here, and does nothing more."""


class System:
    """The calls that change what is in a folder, one of which is `at` something: the process dies
    before it or after it, or it fails. What is not on the disk yet is known."""

    def __init__(self, patch, folder, at, how):
        self.folder, self.numbers = folder, itertools.count(1)
        self.at, self.how, self.count, self.dead, self.synced = at, how, 0, False, set()
        patch.setattr(os, "replace", self.call(os.replace))
        patch.setattr(os, "mkdir", self.call(os.mkdir))
        patch.setattr(os, "unlink", self.call(os.unlink))
        patch.setattr(tempfile, "mkstemp", self.call(tempfile.mkstemp))
        patch.setattr(os, "fsync", self.call(self.sync))

    def sync(self, handle):
        self.synced.add(os.fstat(handle).st_ino)

    def call(self, fn):
        def called(*args, **options):
            if not any(map(self.is_within, args)):
                return fn(*args, **options)
            self.count = number = next(self.numbers)  # (several threads call)
            if self.dead or (number == self.at and self.how == "before"):
                self.dead = True
                raise Died
            if number == self.at and self.how == "fails":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            try:
                return fn(*args, **options)
            finally:
                if number == self.at:  # "after", "no power"
                    self.dead = True
                    raise Died

        return called

    def is_within(self, place):
        """(Kernels, too, are kept in files.)"""
        if isinstance(place, int):
            inode = os.fstat(place).st_ino
            return any(x.stat().st_ino == inode for x in [self.folder, *self.folder.rglob("*")])
        return str(self.folder) in str(place)

    def lose(self):
        """What a power cut leaves of the files that were not put on the disk."""
        for x in self.folder.rglob("*"):
            if x.is_file() and x.stat().st_ino not in self.synced:
                x.write_bytes(b"")


def often(prob, ctx):
    return eo.remake(scaled(prob, ctx), p=10.0 + 2.0 * ctx.index)


def solved(path=None, what="plain") -> Any:
    ens, options = eo.EnsembleProblem(decay(), scaled), OPTIONS
    if what == "events":  # 3 to 7 of a trajectory, and 2 of them in a chunk
        crossing = eo.ContinuousCallback(lambda u, t, i: jnp.sin(i.p * t + 0.1), lambda x: x)
        ens = eo.EnsembleProblem(decay(), often)
        options = {**OPTIONS, "callback": crossing, "abstol": 1e-12}
    return eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), **options, store=path)


def check(sim, expected):
    """That what is there is right, and the rest is said not to be there."""
    there = np.asarray(sim.retcode) == 1
    assert sim.converged <= there.all()
    u = np.asarray(sim.u)
    np.testing.assert_array_equal(u[there], expected.u[there])
    assert np.isnan(u[~there]).all()
    if expected.events is not None:
        count, t = np.asarray(sim.events.count), np.asarray(sim.events.t)
        assert (count[there] == np.asarray(expected.events.count)[there]).all()
        most = min(t.shape[1], expected.events.t.shape[1])
        assert count.max(initial=0) <= most
        np.testing.assert_array_equal(t[there, :most], expected.events.t[there, :most])
        assert np.isnan(t[~there]).all()
    return there.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "every", "first"),
    [*(("plain", 5, 1 + i) for i in range(5)), *(("events", 28, 1 + 7 * i) for i in range(4))],
)
@pytest.mark.parametrize("how", ["no power", *("fails", "before", "after")])
def test_a_store_at_every_call(tmp_path, monkeypatch, how, what, every, first):
    if what == "events":
        monkeypatch.setattr(stored, "_EVENTS", 2)
    expected, kept, said, at = solved(what=what), 0, 0, first
    while True:
        path, error = tmp_path / str(at) / "a.zarr", None
        with monkeypatch.context() as patch:
            system = System(patch, path.parent, at, how)
            try:
                done = solved(path, what)
            except Died:
                assert how != "fails"
            except eo.StoreError as e:
                error = e
            else:
                check(done, expected)
                if system.count < at:
                    break
                assert how == "fails"  # to make a folder that is there, or to remove no file
        if error is not None:
            said += 1
            assert f"{path} can't be written to: Input/output error" in str(error)
            if error.solution is not None:
                check(error.solution, expected)
        if how == "no power":
            system.lose()
        if not (path / "digest" / "zarr.json").exists():
            with pytest.raises(eo.StoreError, match="there is no store"):
                eo.open_ensemble(path)
        else:
            found = check(eo.open_ensemble(path), expected)
            if how == "fails":  # some failures are none, others are said
                assert error is not None or found == len(expected)
            else:
                assert found >= kept
            kept = found
        again = solved(path, what)
        assert again.converged
        assert check(again, expected) == len(again)
        at += every
    assert at > 60  # (so many there are)
    assert kept == len(expected) or at - every < system.count  # (all were there at the last one)
    assert how != "fails" or said > at / every * 0.7


@pytest.mark.slow
@pytest.mark.drawn(8)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("what", ["fit", "store", "events"])
def test_killed_at_random_moments(tmp_path, what, seed):
    """By the operating system, five times; and it ends as if it had never been."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.killed", what]
    done = subprocess.run(
        [*command, str(tmp_path), "5", str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "killed 5\n"


@pytest.mark.parametrize("how", ["moved", "deleted"])
@pytest.mark.parametrize("when", [slow_unless(False, 0), 3])
def test_a_store_that_vanishes(tmp_path, monkeypatch, how, when):
    """Is an error, with what was computed, where that is still somewhere."""
    import shutil

    from ensembleode import store

    ens = eo.EnsembleProblem(decay(), scaled)
    options = {"trajectories": 20, "batch_size": 4, "ensemblealg": eo.EnsembleSerial()}
    path, write, seen = tmp_path / "a.zarr", store.StoreWriter._write, []

    def vanishing(self, *args):
        seen.append(1)
        if len(seen) == when + 1:
            path.rename(tmp_path / "b.zarr") if how == "moved" else shutil.rmtree(path)
        write(self, *args)

    expected = eo.solve(ens, **options)
    with monkeypatch.context() as patch:
        patch.setattr(store.StoreWriter, "_write", vanishing)
        with pytest.raises(eo.StoreError, match="can't be written to: No such file") as caught:
            eo.solve(ens, **options, store=path)
    if how == "moved":
        done = np.asarray(caught.value.solution.retcode) == 1
        assert done.sum() == 4 * when
        np.testing.assert_array_equal(caught.value.solution.u[done], expected.u[done])
        path = tmp_path / "b.zarr"
    else:
        assert getattr(caught.value, "solution", None) is None
    jax.tree.map(
        np.testing.assert_array_equal, eo.solve(ens, **options, store=path).u[:], expected.u
    )


def test_a_store_that_vanishes_at_the_end(tmp_path, monkeypatch):
    """When all batches were written: it is looked whether they are there."""
    path, ens = tmp_path / "a.zarr", eo.EnsembleProblem(decay(), scaled)
    options = {"trajectories": 20, "batch_size": 4, "store": path}
    from ensembleode.store.store_files import StoreFiles

    flush = StoreFiles.flush

    def losing(self):
        flush(self)
        (path / "u" / "c" / "0" / "0" / "0").unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(StoreFiles, "flush", losing)
        with pytest.raises(eo.StoreError, match="u/c/0/0/0 is gone; the 16 trajectories in it"):
            eo.solve(ens, **options)
    assert np.asarray(eo.solve(ens, **options).successful).all()


def test_beside_one_that_begins(tmp_path, monkeypatch):
    """A reader finds no store, until it is one."""
    from ensembleode import store

    path, seen = tmp_path / "a.zarr", []
    for name in ("_arrays", "_write_group"):
        made = getattr(store.StoreWriter, name)

        def looked(self, *args, made=made):
            out = None
            for when in ("before", "after"):
                try:
                    seen.append(np.asarray(eo.open_ensemble(path).u).shape)
                except eo.StoreError as e:
                    seen.append(str(e)[:17])
                out = made(self, *args) if when == "before" else out
            return out

        monkeypatch.setattr(store.StoreWriter, name, looked)
    solved(path)
    shape = (7, *np.shape(eo.open_ensemble(path).u)[1:])
    assert seen[:4] == ["there is no store"] * 3 + [shape]
