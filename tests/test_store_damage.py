"""Whatever happens to a file of a store, other numbers are never read without a word."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import ensembleode as eo


N, BATCH = 12, 4
FAULTS = ("bit", "cut", "empty", "exchanged", "gone", "zeros")


def solved(path, scale=1.0):
    """With events, and numbers of each kind: those that trajectories share, and their own."""
    crossing = eo.ContinuousCallback(lambda u, t, i: u[0] - i.p["k"], lambda i: i)
    p = {"k": 0.5, "w": scale * jnp.array([0.25, 0.5]), "nothing": jnp.zeros(2)}
    prob = eo.ODEProblem(
        lambda u, p, t: -p["w"].sum() * u, [2.0 * scale], (0.0, 4.0), p, callback=crossing
    )
    ens = eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p={**prob.p, "k": 0.5 + 0.1 * ctx.index})
    )
    options = {"trajectories": N, "batch_size": BATCH, "saveat": scale}
    return eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), **options, store=path)


def numbers(sim):
    every = sim.u, sim.t, sim.retcode, sim.lengths, sim.u0, sim.p, sim.events, sim.stats
    return jax.tree.map(np.asarray, every)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    solved(folder / "a"), solved(folder / "b", 2.0)
    files = (x.relative_to(folder / "a") for x in (folder / "a").rglob("*") if x.is_file())
    return folder, sorted(files)


def damaged(data: bytes, other: bytes, fault: str, at: float, bit: int) -> bytes | None:
    place = int(at * len(data))
    match fault:
        case "bit":
            changed = bytes([data[place] ^ 1 << bit]) if data else b""
            return data[:place] + changed + data[place + 1 :]
        case "cut":
            return data[:place]
        case "exchanged":
            return other
        case "empty":
            return b""
        case "zeros":
            return bytes(len(data))
    return None


def check(place, folder, said):
    """That what is read is right, or is said not to be there."""
    expected = eo.open_ensemble(folder / "a")
    said.clear()
    try:
        sim = eo.open_ensemble(place)
        found = numbers(sim)
    except eo.StoreError:
        return
    there = found[2] != 0
    assert there.all() or (said.text and not sim.converged)

    def same(x, y):
        assert x.dtype == y.dtype
        x, y = (z[there] if len(z) == N else z for z in (x, y))
        np.testing.assert_array_equal(x, y)

    jax.tree.map(same, found, numbers(expected))


CHOSEN = st.tuples(
    st.integers(0, 10**6), st.sampled_from(FAULTS), st.floats(0, 0.999), st.integers(0, 7)
)


def damage(stores, chosen) -> Path:
    folder, files = stores
    number, fault, at, bit = chosen
    place, file = folder / "c", files[number % len(files)]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "a", place)
    other = (folder / "b" / file).read_bytes() if (folder / "b" / file).exists() else b""
    data = damaged((place / file).read_bytes(), other, fault, at, bit)
    (place / file).unlink()
    if data is not None:
        (place / file).write_bytes(data)
    return place


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(40))
def test_a_fault_in_any_file(stores, caplog, seed):
    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(CHOSEN)
    def run(chosen):
        check(damage(stores, chosen), stores[0], caplog)

    hypothesis.seed(seed)(run)()


@pytest.mark.slow
def test_a_solve_mends_it(stores):
    @hypothesis.settings(max_examples=10, deadline=None)
    @hypothesis.given(CHOSEN)
    def run(chosen):
        place = damage(stores, chosen)
        expected = eo.open_ensemble(stores[0] / "a")
        jax.tree.map(np.testing.assert_array_equal, numbers(solved(place)), numbers(expected))
        assert eo.open_ensemble(place).converged

    run()


@pytest.mark.parametrize("name", ["time", "u0", "p.w"])
def test_arrays_that_all_share(stores, name, caplog):
    """Where they are missing, that is said when the store is opened, and is an error when they are
    read; what else is there can be read."""
    place = damage(stores, (stores[1].index(Path(name, "c", "0")), "gone", 0.0, 0))
    if name == "time":  # which is read at once
        with pytest.raises(eo.StoreError, match="time/c/0 is not what was written"):
            eo.open_ensemble(place)
        return
    sim = eo.open_ensemble(place)
    assert f"{name}/c/0 is missing" in caplog.text
    assert not sim.converged
    assert np.isfinite(np.asarray(sim.u)).all()
    with pytest.raises(eo.StoreError, match=f"{name}/c/0 is not what was written"):
        np.asarray(sim.u0 if name == "u0" else sim.p["w"])


def as_of_earlier(path, format):
    """The store as it was written before: the attributes are the group's, and have no checksum."""
    digest, group = (json.loads((path / x).read_text()) for x in ("digest/zarr.json", "zarr.json"))
    attributes = digest.pop("attributes")
    (path / "digest" / "zarr.json").write_text(json.dumps(digest | {"attributes": {}}))
    kept: dict[str, Any] = json.loads(attributes["ensembleode"])
    dims = {name: len(dims) for name, dims, *_ in kept.pop("variables")}
    del kept["shared"], kept["sums"]
    growing = [name for name in dims if name.startswith("events.") and name != "events.count"]
    kept |= {"dims": [*dims.items()], "format": format}
    if kept["events"]:
        kept["events"] |= {"growing": growing}
    group["attributes"]["ensembleode"] = kept
    (path / "zarr.json").write_text(json.dumps(group))


def test_the_format_before(stores, tmp_path):
    """Is read, but not gone on with."""
    path = tmp_path / "old"
    shutil.copytree(stores[0] / "a", path)
    as_of_earlier(path, 3)
    sim = eo.open_ensemble(path)
    assert sim.converged
    expected = eo.open_ensemble(stores[0] / "a")
    jax.tree.map(np.testing.assert_array_equal, numbers(sim), numbers(expected))
    with pytest.raises(eo.StoreError, match=r"differs in format \(3 there, 4 here\)"):
        solved(path)


@pytest.mark.slow
def test_what_others_do_with_it(stores, tmp_path):
    """A store can be copied into other formats; what is added to it is kept, and is nothing to us,
    nor are the metadata that are for others."""
    path = tmp_path / "a.zarr"
    shutil.copytree(stores[0] / "a", path)
    expected = numbers(eo.open_ensemble(path))
    with xarray.open_zarr(path) as found:
        found.to_netcdf(tmp_path / "a.nc")
    with xarray.open_dataset(tmp_path / "a.nc") as copied:
        np.testing.assert_array_equal(copied.u.values, expected[0])
    xarray.Dataset({"score": ("trajectory", np.arange(N * 1.0))}).to_zarr(
        path, mode="a", consolidated=False
    )
    (path / "u" / "zarr.json").write_text("{}")
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal, expected)
    same(numbers(eo.open_ensemble(path)))
    same(numbers(solved(path)))
    with xarray.open_zarr(path, consolidated=False) as found:
        assert found.score.values[-1] == N - 1
