"""Files that an earlier version of the library wrote are read: pickles, stores, checkpoints. (Its
modules had other names.)"""

import pathlib
import pickle
import zipfile

import equinox as eqx
import jax
import numpy as np
import pytest

import ensembleode as eo

from . import old_files


DATA = pathlib.Path(__file__).parent / "data"


@pytest.fixture
def folder(tmp_path):
    with zipfile.ZipFile(DATA / "old_files.zip") as held:
        held.extractall(tmp_path)
    return tmp_path


def same(old, new):
    """The same structure and other values, with the same numbers but for rounding."""
    old, new = ([jax.tree.flatten(x) for x in pair] for pair in ((old,), (new,)))
    (old_leaves, old_tree), (new_leaves, new_tree) = *old, *new
    assert old_tree == new_tree
    for x, y in zip(old_leaves, new_leaves, strict=True):
        if eqx.is_array_like(x):
            np.testing.assert_allclose(x, y, rtol=1e-9)
        else:
            assert x == y


def test_pickled_problems(folder):
    found = pickle.loads((folder / "problems.pickle").read_bytes())
    new = old_files.problems()
    assert found.keys() == new.keys()
    for name in new:
        same(found[name], new[name])
    sim = eo.solve(found["ens"], eo.Tsit5(), trajectories=3, saveat=old_files.SAVED)
    same(sim.u, old_files.solutions()["saved"].u)


def test_pickled_solutions(folder):
    found = pickle.loads((folder / "solutions.pickle").read_bytes())
    new = old_files.solutions()
    for name in new:
        same((found[name].t, found[name].u), (new[name].t, new[name].u))
        same(found[name].p, new[name].p)
        assert np.array_equal(found[name].retcode, new[name].retcode)
        assert np.array_equal(found[name].stats.naccept, new[name].stats.naccept)
    sol = found["sol"]
    same(sol(1.234), new["sol"](1.234))
    same(sol.events.t, new["sol"].events.t)
    same(sol.saved.values, new["sol"].saved.values)


@pytest.mark.parametrize("name", old_files.STORES)
def test_store(folder, name):
    """It is read; and solved again, it is the same ensemble, of which nothing is computed again.
    (But for other versions of JAX, whose numbers may differ.)"""
    path = folder / f"{name}.zarr"
    found = np.asarray(eo.open_ensemble(path).u)
    if name == "Tsit5":
        same(found, old_files.solutions()["saved"].u)
    chunks = {x: x.stat().st_mtime_ns for x in path.glob("*/c/**/*") if x.is_file()}
    assert len(chunks) > 10
    if (jax.__version__, eo.__version__) == old_files.VERSIONS:
        same(np.asarray(old_files.stored(name, path).u), found)
    else:
        with pytest.raises(eo.StoreError, match="which differs in versions "):
            old_files.stored(name, path)
    assert chunks == {x: x.stat().st_mtime_ns for x in path.glob("*/c/**/*") if x.is_file()}


@pytest.mark.slow
def test_checkpoints(folder):
    result = old_files.fitted(folder / "checkpoints", 3)
    expected = old_files.fitted(folder / "others", 3)
    same(result.params, expected.params)
    assert len(result.losses) == len(expected.losses)
