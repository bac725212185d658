"""Ensembles on disk: finished batches are neither lost nor computed again."""

import contextlib
import errno
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray
import zarr

import ensembleode as eo
from ensembleode.engines.job import job_for
from ensembleode.running.fingerprint import fingerprint
from ensembleode.store import writing
from ensembleode.store.reading import ATTRIBUTES, written_attributes

from .marks import slow_unless
from .problems import decay, lotka_volterra, scaled


N = 1000
OPTIONS = {"trajectories": N, "saveat": 0.25, "batch_size": 256}


def ensemble(n=N, p=None, **parts):
    p = jnp.array([1.5, 1.0, 3.0, 1.0]) if p is None else p
    prob = eo.ODEProblem(lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 1.0), p)
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / n)), **parts
    )


def files(path):
    """When each file of the chunks was last written."""
    return {
        str(f.relative_to(path)): f.stat().st_mtime_ns
        for f in Path(path).rglob("c/**/*")
        if f.is_file() and not f.name.endswith(".partial")
    }


def but_elapsed(data):
    """The contents of a file of metadata, without the time that the solves took."""
    found = json.loads(data)
    nodes = found.get("consolidated_metadata", {}).get("metadata", {})
    for attributes in (x["attributes"] for x in (found, *nodes.values())):
        if "ensembleode" in attributes:
            kept = json.loads(attributes.pop("ensembleode"))
            attributes["ensembleode"] = kept | {"elapsed": None}
            del attributes["ensembleode_digest"]
    return found


def said_of(path):
    return json.loads(json.loads((path / ATTRIBUTES).read_text())["attributes"]["ensembleode"])


def say(path, **changes):
    """Change the attributes of a store."""
    node = json.loads((path / ATTRIBUTES).read_text())
    node["attributes"] = written_attributes(said_of(path) | changes)
    (path / ATTRIBUTES).write_text(json.dumps(node))


def batch_of(file):
    return int(file.split("/c/")[1].split("/")[0])


def same(sim, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, sim.u), expected.u)
    np.testing.assert_array_equal(sim.retcode, expected.retcode)
    np.testing.assert_array_equal(sim.lengths, expected.lengths)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, sim.stats), expected.stats)


ALGORITHMS = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "arrays": eo.EnsembleGPUArray(),
    "columns": eo.EnsembleColumns(),
    "distributed": eo.EnsembleDistributed(workers=2),
    "split threads": eo.EnsembleSplitThreads(workers=2, threads=2),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [slow_unless(n in ("threads", "columns"), n) for n in ALGORITHMS])
def test_every_algorithm(tmp_path, name):
    """The store holds what is computed without one, and is not touched again."""
    alg, path = ALGORITHMS[name], tmp_path / "sweep.zarr"
    expected = eo.solve(ensemble(), eo.Tsit5(), alg, **OPTIONS)
    sim = eo.solve(ensemble(), eo.Tsit5(), alg, **OPTIONS, store=path)
    same(sim, expected)
    assert sim.converged
    assert sim.u.chunks == (256, 5, 2)
    written = files(path)
    same(eo.solve(ensemble(), eo.Tsit5(), alg, **OPTIONS, store=str(path)), expected)
    assert files(path) == written
    same(eo.open_ensemble(path), expected)


def test_reading(tmp_path):
    path = tmp_path / "sweep.zarr"
    expected = eo.solve(ensemble(), **OPTIONS)
    eo.solve(ensemble(), **OPTIONS, store=path)
    sim = eo.open_ensemble(path)
    assert len(sim) == N
    assert 0.0 < sim.elapsed < 1000.0
    eo.solve(ensemble(), **OPTIONS, store=path)  # which has nothing to do
    assert eo.open_ensemble(path).elapsed == sim.elapsed
    np.testing.assert_array_equal(sim[7].u, expected[7].u)
    np.testing.assert_array_equal(sim.u[10:20], expected.u[10:20])
    np.testing.assert_array_equal(np.asarray(sim), expected.u)
    np.testing.assert_array_equal(sim.to_array("julia"), expected.to_array("julia"))
    np.testing.assert_array_equal(sim.failed, [])
    assert sim.successful.all()
    assert repr(sim).splitlines()[:2] == repr(expected).splitlines()[:2]
    xarray.testing.assert_equal(
        sim.to_xarray().drop_attrs(), eo.solve(ensemble(), **OPTIONS).to_xarray().drop_attrs()
    )
    # Computed with, they are as those in memory.
    assert (sim.retcode == eo.ReturnCode.Success).all()
    np.testing.assert_array_equal(1.0 - sim.u, 1.0 - np.asarray(expected.u))
    np.testing.assert_array_equal(np.sum(sim.u, axis=0), np.sum(np.asarray(expected.u), axis=0))
    assert sim.stats.nf.max() == expected.stats.nf.max()
    ours, theirs = eo.EnsembleSummary(sim), eo.EnsembleSummary(expected)
    np.testing.assert_allclose(ours.u, theirs.u, rtol=1e-12)
    np.testing.assert_allclose(ours.qlow, theirs.qlow, rtol=1e-12)
    median = eo.analysis.timepoint_median(sim, 0.5)
    np.testing.assert_allclose(median, eo.analysis.timepoint_median(expected, 0.5), rtol=1e-12)
    data = xarray.open_zarr(path)
    np.testing.assert_array_equal(data["u"], expected.u)
    np.testing.assert_array_equal(data["time"], expected.t)
    np.testing.assert_array_equal(data["trajectory"], np.arange(N))
    assert data["u"].dims == ("trajectory", "time", "state")
    assert data["retcode"].attrs["flag_meanings"].startswith("Default Success")
    with pytest.raises(eo.StoreError, match="there is no store at"):
        eo.open_ensemble(tmp_path / "nothing.zarr")
    zarr.create_group(tmp_path / "other.zarr")
    with pytest.raises(eo.StoreError, match="not that of an ensemble"):
        eo.open_ensemble(tmp_path / "other.zarr")
    with pytest.raises(eo.StoreError, match="not that of an ensemble"):
        eo.solve(ensemble(), **OPTIONS, store=tmp_path / "other.zarr")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "file").touch()
    with pytest.raises(eo.StoreError, match="exists, and is no Zarr group"):
        eo.solve(ensemble(), **OPTIONS, store=tmp_path / "directory")


def own_spans(prob, ctx):
    return eo.remake(prob, tspan=(0.0, 0.4 + ctx.index / 100))


def trees(sol, ctx):
    return {"end": sol.u[-1], "pair": (ctx.sim_id, [sol.retcode == 1])}, False


def repeats(sol, ctx):
    return sol.u[0, 0], ctx.repeat < 1 + ctx.index % 3


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("ens", "options"),
    [
        (eo.EnsembleProblem(decay(), own_spans), {"saveat": 0.2}),
        slow_unless(False, eo.EnsembleProblem(decay(), own_spans), {}),
        (eo.EnsembleProblem(decay(), scaled), {"save_everystep": True, "maxiters": 64}),
        (eo.EnsembleProblem(decay(), scaled, trees), {}),
        (eo.EnsembleProblem(decay(), scaled, repeats), {}),
        slow_unless(
            False, eo.EnsembleProblem(eo.ODEProblem(lambda u, p, t: -u, 1.0, (0.0, 1.0))), {}
        ),
        (eo.EnsembleProblem(eo.ODEProblem(lambda u, p, t: u**2, jnp.ones((2, 2)), (0.0, 3.0))), {}),
    ],
)
@pytest.mark.parametrize("name", ["threads", slow_unless(False, "distributed")])
def test_whatever_is_saved(tmp_path, ens, options, name):
    options = {"trajectories": 50, "batch_size": 16, **options}
    expected = eo.solve(ens, None, ALGORITHMS[name], **options)
    sim = eo.solve(ens, None, ALGORITHMS[name], **options, store=tmp_path / "a.zarr")
    if expected.t is not None and "save_everystep" not in options:
        np.testing.assert_array_equal(sim.t, expected.t)
    if "save_everystep" in options:
        np.testing.assert_array_equal(sim[3].u, expected[3].u)
        np.testing.assert_allclose(sim(0.3), expected(0.3), rtol=1e-12)
    else:
        same(sim, expected)
    xarray.open_zarr(tmp_path / "a.zarr").load()


@pytest.mark.slow
def test_another_ensemble_is_refused(tmp_path):
    """And what differs is named."""
    path = tmp_path / "sweep.zarr"
    eo.solve(ensemble(), **OPTIONS, store=path)
    field = eo.EnsembleProblem(
        eo.remake(ensemble().prob, f=lambda u, p, t: -u), ensemble().prob_func
    )
    cases = {
        r"trajectories \(1000 there, 900 here\)": (ensemble(), {"trajectories": 900}),
        r"batch_size \(256 there, 128 here\)": (ensemble(), {"batch_size": 128}),
        r"differs in p\.": (ensemble(p=jnp.array([1.5, 1.0, 3.0, 1.1])), {}),
        r"differs in f\.": (field, {}),
        r"differs in abstol\.": (ensemble(), {"abstol": 1e-9}),
        r"differs in saveat\.": (ensemble(), {"saveat": [0.0, 0.25, 0.5, 0.75, 0.99]}),
        r"differs in key \(or seed\)": (ensemble(), {"seed": 1}),
        r"maxiters \(100000 there, 99 here\)": (ensemble(), {"maxiters": 99}),
        r"differs in the solver's options\.": (ensemble(), {"alg": eo.Vern7()}),
        r"engine \(compiled there, diffrax here\)": (ensemble(), {"engine": "diffrax"}),
        r"output_func": (ensemble(output_func=lambda sol, ctx: (sol.u[-1], False)), {}),
        r"differs in prob_func\.": (ensemble(n=1001), {}),
        r"shared steps": (ensemble(), {"ensemblealg": eo.EnsembleColumns()}),
    }
    before = files(path)
    for message, (ens, options) in cases.items():
        with pytest.raises(eo.StoreError, match=message):
            eo.solve(ens, **{**OPTIONS, **options}, store=path)
    assert files(path) == before


def doubled(x):
    return 2 * x


@pytest.mark.slow
def test_what_is_deep_inside_is_refused(tmp_path):
    """Constants within loops, functions of the host, the names of outputs."""

    def looping(table):
        @jax.jit
        def step(c, x):
            return c + x * jnp.asarray(table).sum(), None

        return lambda u, p, t: -jax.lax.scan(step, u, jnp.ones(3))[0]

    def calling(host):
        def f(u, p, t):
            return -jax.pure_callback(host, jax.ShapeDtypeStruct(u.shape, u.dtype), u)

        return f

    def outputs(name):
        return lambda sol, ctx: ({name: sol.u[-1]}, False)

    prob = decay()
    pairs = {
        "loop": [
            eo.EnsembleProblem(eo.remake(prob, f=looping(np.full(99, x)))) for x in (0.1, 0.2)
        ],
        "host": [eo.EnsembleProblem(eo.remake(prob, f=calling(h))) for h in (np.sin, np.cos)],
        "name": [eo.EnsembleProblem(prob, output_func=outputs(n)) for n in "ab"],
        "rerun": [
            eo.EnsembleProblem(
                prob,
                lambda prob, ctx, x=x: eo.remake(prob, u0=prob.u0 * (1 + x * (ctx.repeat - 1))),
                repeats,
            )
            for x in (1.0, 2.0)
        ],
    }
    for name, (one, other) in pairs.items():
        options = {"trajectories": 10, "store": tmp_path / f"{name}.zarr"}
        engine = {"engine": "diffrax"} if name == "host" else {}
        eo.solve(one, None, eo.EnsembleSerial(), **options, **engine)
        eo.solve(one, None, eo.EnsembleSerial(), **options, **engine)
        with pytest.raises(eo.StoreError, match="is that of another ensemble"):
            eo.solve(other, None, eo.EnsembleSerial(), **options, **engine)


def calls(host, output_func=False):
    """An ensemble whose f, or output_func, is computed on the host."""

    def called(u, *_):
        shape = jax.ShapeDtypeStruct(u.shape, u.dtype)
        return jax.pure_callback(host, shape, u, vmap_method="expand_dims")

    prob = eo.ODEProblem(called, jnp.ones(1), (0.0, 1.0))
    if not output_func:
        return eo.EnsembleProblem(prob, scaled)
    return eo.EnsembleProblem(
        eo.remake(prob, f=lambda u, p, t: -u), scaled, lambda sol, ctx: (called(sol.u[-1]), False)
    )


class Rate:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, u):
        return self.rate * np.asarray(u)

    def method(self, u):
        return self.rate * np.asarray(u)


def locked(lock):
    """What can't be compared, and needn't be, as a key says."""

    def calls(u):
        with lock:
            return -np.asarray(u)

    return calls


OF_THE_USER = {
    "a lock": locked(threading.Lock()),
    "a function": doubled,
    "a lambda": lambda u: -u,
    "a callable object": Rate(-1.0),
    "a bound method": Rate(-1.0).method,
    "a partial": functools.partial(np.multiply, -1.0),
}
CALLING = {
    "alg": eo.Euler(),
    "ensemblealg": eo.EnsembleSerial(),
    "trajectories": 3,
    "dt": 0.5,
    "adaptive": False,
    "engine": "diffrax",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_USER)
@pytest.mark.parametrize("output_func", [False, True])
def test_what_python_computes_has_a_name(tmp_path, name, output_func):
    """Its code doesn't tell what it computes, which may be read from a file."""
    ens, options = calls(OF_THE_USER[name], output_func), {**CALLING, "store": tmp_path / "a.zarr"}
    what = "output_func" if output_func else "f"
    told = (
        rf"{what}: it calls the Python function .* of your own. Give store_key='\.\.\.', a string"
    )
    with pytest.raises(eo.StoreError, match=told):
        eo.solve(ens, **options)
    assert not (tmp_path / "a.zarr").exists()
    first = eo.solve(ens, **options, store_key="one")
    np.testing.assert_array_equal(eo.solve(ens, **options, store_key="one").u, first.u)
    with pytest.raises(eo.StoreError, match=r"differs in store_key \(one there, two here\)"):
        eo.solve(ens, **options, store_key="two")
    with pytest.raises(eo.StoreError, match=r"differs in dt\."):  # all else is compared
        eo.solve(ens, **{**options, "dt": 0.25}, store_key="one")


@pytest.mark.slow
def test_what_is_installed_is_known(tmp_path):
    options = {**CALLING, "store": tmp_path / "a.zarr"}
    eo.solve(calls(np.negative), **options)
    assert eo.solve(calls(np.negative), **options).converged
    with pytest.raises(eo.StoreError, match=r"differs in f\."):
        eo.solve(calls(np.sin), **options)


def test_a_derivative_rule_is_told_apart():
    """An implicit method solves by it."""

    def digest(slope, table):
        @jax.custom_jvp
        def decaying(u):
            return -u

        @decaying.defjvp
        def rule(primals, tangents):
            return decaying(*primals), slope * jnp.asarray(table)[1000] * tangents[0]

        @jax.custom_jvp
        def refusing(u):
            return -u

        @refusing.defjvp
        def refused(primals, tangents):
            raise NotImplementedError

        prob = eo.ODEProblem(lambda u, p, t: decaying(u) + refusing(u), jnp.ones(1), (0.0, 1.0))
        job, _ = job_for(
            eo.EnsembleProblem(prob), {}, jax.random.key(0), 3, "diffrax", eo.Kvaerno5()
        )
        return fingerprint(job)["#f"]

    ones = np.ones(2000)
    other = np.where(np.arange(2000) == 1000, 2.0, ones)
    assert digest(-1.0, ones) == digest(-1.0, ones)
    assert len({digest(-1.0, ones), digest(-3.0, ones), digest(-1.0, other)}) == 3


def test_a_key_that_is_none(tmp_path, unchecked):
    with pytest.raises(ValueError, match="store_key is given without store"):
        eo.solve(calls(np.negative), **CALLING, store_key="one")
    with pytest.raises(TypeError, match="store_key must be a string"):
        eo.solve(calls(np.negative), **CALLING, store=tmp_path / "a.zarr", store_key=3)


def test_a_printing_f_is_told(tmp_path):
    """What is printed is no result, whatever prints it."""

    def printing(lock):
        def f(u, p, t):
            jax.debug.callback(lambda u: lock.locked(), u)
            return -u

        return eo.EnsembleProblem(eo.remake(decay(), f=f), scaled)

    options = {**CALLING, "store": tmp_path / "a.zarr"}
    eo.solve(printing(threading.Lock()), **options)
    eo.solve(printing(threading.Lock()), **options)


class Halved(diffrax.Euler):
    """A solver of the user's."""

    def step(self, terms, t0, t1, y0, *rest):
        return super().step(terms, t0, t0 + (t1 - t0) / 2, y0, *rest)


def test_a_solver_of_the_users_has_a_name(tmp_path):
    options = {**CALLING, "alg": Halved(), "store": tmp_path / "a.zarr"}
    ens = eo.EnsembleProblem(decay(), scaled)
    with pytest.raises(eo.StoreError, match="options: it has the class Halved of your own"):
        eo.solve(ens, **options)
    eo.solve(ens, **options, store_key="half steps")
    with pytest.raises(eo.StoreError, match="differs in the solver's options"):
        eo.solve(ens, **{**options, "alg": diffrax.Euler()}, store_key="half steps")


def by_a_branch(prob, ctx):
    """A prob_func that Python has to call."""
    return eo.remake(prob, u0=prob.u0 * (2.0 if ctx.repeat > 2 else float(ctx.index)))


@pytest.mark.slow
@pytest.mark.parametrize("last", [5.0, 0.1])
def test_a_rerun_is_part_of_the_ensemble(tmp_path, last):
    """Whichever try it is from which prob_func makes something else."""

    def solved(last, path):
        prob_func = lambda prob, ctx: eo.remake(  # noqa: E731
            prob, u0=prob.u0 * jnp.where(ctx.repeat >= 3, last, 1.0)
        )
        ens = eo.EnsembleProblem(decay(), prob_func, lambda sol, ctx: (sol.u[-1], ctx.repeat < 3))
        return eo.solve(ens, trajectories=4, store=tmp_path / path)

    solved(last, "a.zarr")
    assert solved(last, "a.zarr").converged
    with pytest.raises(eo.StoreError, match=r"differs in prob_func\."):
        solved(last + 1, "a.zarr")


def test_a_called_prob_func(tmp_path):
    """By what it makes in the first run; where there may be others, it has a name."""
    options = {"trajectories": 4, "store": tmp_path / "a.zarr"}
    ens = eo.EnsembleProblem(decay(), by_a_branch)
    eo.solve(ens, **options)
    assert eo.solve(ens, **options).converged
    with pytest.raises(eo.StoreError, match=r"differs in prob_func\."):
        eo.solve(
            eo.EnsembleProblem(eo.remake(decay(), u0=jnp.array([3.0, 2.0])), by_a_branch), **options
        )
    again = eo.EnsembleProblem(decay(), by_a_branch, repeats)
    with pytest.raises(eo.StoreError, match="prob_func: it calls the Python function by_a_branch"):
        eo.solve(again, trajectories=4, store=tmp_path / "b.zarr")
    eo.solve(again, trajectories=4, store=tmp_path / "b.zarr", store_key="mine")


def test_an_output_called_t(tmp_path):
    ens = ensemble(output_func=lambda sol, ctx: ({"t": sol.t[-1], "u": sol.u[-1]}, False))
    sim = eo.solve(ens, **OPTIONS, store=tmp_path / "a.zarr")
    np.testing.assert_array_equal(sim.u["t"], np.ones(N))


def test_an_earlier_version_is_refused(tmp_path):
    path = tmp_path / "sweep.zarr"
    eo.solve(ensemble(), **OPTIONS, store=path)
    earlier = said_of(path)["fingerprint"] | {"versions": "ensembleode 0.0.1, jax 0.1"}
    say(path, fingerprint=earlier)
    with pytest.raises(eo.StoreError, match=r"versions \(ensembleode 0.0.1, jax 0.1 there,"):
        eo.solve(ensemble(), **OPTIONS, store=path)
    say(path, format=99)
    with pytest.raises(eo.StoreError, match=r"the format 99.* reads the formats 2, 3, 4: "):
        eo.open_ensemble(path)


@pytest.mark.slow
def test_the_batch_size_is_that_of_the_store(tmp_path):
    """It is chosen once: for about 64 batches, of what belongs together."""
    path = tmp_path / "sweep.zarr"
    options = {"trajectories": 20_000, "save_start": False}
    sim = eo.solve(ensemble(20_000), **options, store=path)
    assert sim.u.chunks[0] == 320
    again = eo.solve(ensemble(20_000), None, eo.EnsembleSerial(), **options, store=path)
    np.testing.assert_array_equal(sim.retcode, again.retcode)


def test_what_a_store_can_not_hold(tmp_path):
    def solve(ens, **options):
        eo.solve(ens, trajectories=10, **options, store=tmp_path / "a.zarr")

    with pytest.raises(ValueError, match="reduction makes one thing of them"):
        solve(ensemble(reduction=eo.sum_reduction))
    with pytest.raises(ValueError, match="needs maxiters"):
        solve(ensemble(), save_everystep=True)
    with pytest.raises(TypeError, match="the output key is a PRNG key"):
        solve(ensemble(output_func=lambda sol, ctx: ({"key": ctx.key}, False)))
    with pytest.raises(TypeError, match=r"dicts \(of names\), lists and tuples of arrays"):
        solve(ensemble(output_func=lambda sol, ctx: (sol, False)))
    with pytest.raises(TypeError, match=r"dicts \(of names\)"):
        solve(ensemble(output_func=lambda sol, ctx: ({1: sol.u[-1]}, False)))
    with pytest.raises(TypeError, match="other names than"):
        solve(ensemble(output_func=lambda sol, ctx: ({"retcode": 1}, False)))
    with pytest.raises(ValueError, match="store can't work inside jit"):
        jax.jit(lambda: solve(ensemble()))()
    with pytest.raises(TypeError, match="store is given with a single ODEProblem"):
        eo.solve(decay(), store=tmp_path / "a.zarr")


RUN = """
import sys
sys.path.insert(0, {root!r})
import jax
jax.config.update("jax_enable_x64", True)
import ensembleode as eo
from tests.test_store import BIG, ensemble
if __name__ == "__main__":
    {before}
    eo.solve(ensemble(20_000), eo.Tsit5(), {alg}, **BIG, store={path!r})
"""
BIG = {"trajectories": 20_000, "saveat": 0.01, "batch_size": 512, "abstol": 1e-12, "reltol": 1e-12}


def another_process(tmp_path, path, alg="eo.EnsembleThreads()", before="", **options):
    script = tmp_path / "script.py"
    root = str(Path(__file__).parent.parent)
    script.write_text(RUN.format(root=root, path=str(path), alg=alg, before=before))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def recorded(path):
    """Batches that have a record."""
    return np.flatnonzero(zarr.open_group(path, mode="r")["digest"][:, -1])


def batches_in(path):
    with contextlib.suppress(Exception):
        return len(recorded(path))
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("alg", ["eo.EnsembleThreads()", "eo.EnsembleDistributed(workers=2)"])
def test_killed_five_times(tmp_path, alg):
    """At random times, and resumed: as if it had never been."""
    path = tmp_path / "sweep.zarr"
    rng = random.Random(7)
    written = {}
    for _ in range(5):
        process = another_process(tmp_path, path, alg)
        already = batches_in(path)
        deadline = time.monotonic() + 60
        while batches_in(path) <= already and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.4))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert batches_in(path) > already or already == 40
        assert all(files(path)[f] == at for f, at in written.items())
        done = recorded(path)
        written = {f: at for f, at in files(path).items() if batch_of(f) in done}
    partial = eo.open_ensemble(path)
    codes = np.asarray(partial.retcode)
    assert set(np.unique(codes)) <= {0, 1}
    sim = eo.solve(ensemble(20_000), **BIG, store=path)
    same(sim, eo.solve(ensemble(20_000), **BIG))
    assert all(files(path)[f] == at for f, at in written.items())


@pytest.mark.slow
def test_two_processes(tmp_path):
    """The second is refused; after the first, it goes on."""
    path = tmp_path / "sweep.zarr"
    process = another_process(tmp_path, path)
    while batches_in(path) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    # (It could be done before this process has traced its solve.)
    os.killpg(process.pid, signal.SIGSTOP)
    with pytest.raises(eo.StoreError, match=r"another process \(or solve\) is writing"):
        eo.solve(ensemble(20_000), **BIG, store=path)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    eo.solve(ensemble(20_000), **BIG, store=path)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("where", ["the store", "a folder above", "dangling", "the same"])
def test_one_store_by_two_names(tmp_path, where):
    """While one writes, the other is refused, whatever name it has for the store."""
    real = tmp_path / "real" / "a.zarr"
    real.parent.mkdir()
    if where == "the same":
        link = tmp_path / "real" / ".." / "real" / "a.zarr"
    elif where == "a folder above":
        (tmp_path / "link").symlink_to(real.parent)
        link = tmp_path / "link" / "a.zarr"
    else:
        if where == "the store":
            eo.solve(ensemble(), **OPTIONS, store=real)
        link = tmp_path / "link.zarr"
        link.symlink_to(real)
    for one, other in ((real, link), (link, real)):
        lock = writing._locked(one)
        with pytest.raises(eo.StoreError, match="another process"):
            eo.solve(ensemble(), **OPTIONS, store=other)
        lock.release()
    expected = eo.solve(ensemble(), **OPTIONS, store=link)
    written = files(real)
    same(eo.solve(ensemble(), **OPTIONS, store=real), expected)
    assert files(real) == written
    assert [x.name for x in tmp_path.rglob("*.lock")] == ["a.zarr.lock"]


def test_no_object_store(tmp_path, monkeypatch, unchecked):
    monkeypatch.chdir(tmp_path)
    for address in ("s3://bucket/a.zarr", "gs://bucket/a.zarr", "file:///a.zarr", "memory://a"):
        with pytest.raises(ValueError, match="store must be a path of a file system, got"):
            eo.solve(ensemble(), **OPTIONS, store=address)
    with pytest.raises(TypeError, match="store must be a path"):
        eo.solve(ensemble(), **OPTIONS, store=3)
    assert not list(tmp_path.iterdir())


def result_or_error(call):
    try:
        return call(), None
    except eo.StoreError as e:
        return None, e


@pytest.mark.parametrize("name", ["time", "saved.time", "zarr.json", "x.partial", "..", "x" * 201])
def test_names_that_a_store_has_itself(tmp_path, name):
    ens = ensemble(output_func=lambda sol, ctx: ({name: sol.u[-1], "u": sol.u}, False))
    with pytest.raises(TypeError, match="a store can't have an output, or"):
        eo.solve(ens, trajectories=4, store=tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()


def test_what_can_not_be_read_is_not_computed_again(tmp_path, monkeypatch):
    """An error of the file system may pass: nothing is written over."""
    path = tmp_path / "a.zarr"
    expected = eo.solve(ensemble(), **OPTIONS, store=path)
    before = files(path)
    with monkeypatch.context() as patch:
        read = Path.read_bytes

        def fails(path):
            if "/c/" in str(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(path)

        patch.setattr(Path, "read_bytes", fails)
        with pytest.raises(eo.StoreError, match="can't be read: Input/output error"):
            eo.solve(ensemble(), **OPTIONS, store=path)
    same(eo.solve(ensemble(), **OPTIONS, store=path), expected)
    assert files(path) == before


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    "content", [b"", b"{}", None, *(slow_unless(False, x) for x in (b"{", b"[1]", b"\xff"))]
)
def test_damaged_metadata(tmp_path, content, complete):
    """Is said to be damaged, or does no harm; whichever file it is."""
    path = tmp_path / "a.zarr"
    options = {"trajectories": 8, "batch_size": 4, "store": path}
    ens = eo.EnsembleProblem(decay(), scaled)
    expected = eo.solve(ens, **options)
    say(path, complete=complete)
    if not complete:
        group = json.loads((path / "zarr.json").read_text())
        del group["consolidated_metadata"]
        (path / "zarr.json").write_text(json.dumps(group))
    for file in ("zarr.json", "u/zarr.json", ATTRIBUTES):
        say(path, complete=complete)
        good = (path / file).read_bytes()
        (path / file).write_bytes(good[: len(good) // 2] if content is None else content)
        sim, error = result_or_error(lambda: eo.open_ensemble(path))
        if file == ATTRIBUTES:
            assert str(path / file) in str(error) or content in (b"{}", b"[1]")
            assert "is damaged" in str(error)
        else:  # (These are for other readers.)
            np.testing.assert_array_equal(sim.retcode, expected.retcode)
        # Written again, from the same solve, and nothing else is.
        chunks = files(path)
        same(eo.solve(ens, **options), expected)
        assert json.loads((path / file).read_text())["node_type"] in ("group", "array")
        assert said_of(path)["complete"]
        assert files(path) == chunks


def test_a_group_that_is_lost(tmp_path):
    """Is written again for the same ensemble only."""
    path = tmp_path / "a.zarr"
    options = {"trajectories": 8, "batch_size": 4, "store": path}
    expected = eo.solve(eo.EnsembleProblem(decay(), scaled), **options)
    (path / ATTRIBUTES).write_bytes(b"")
    before = files(path)
    with pytest.raises(eo.StoreError, match="what is in it is of another ensemble"):
        eo.solve(eo.EnsembleProblem(decay(), scaled), **options, abstol=1e-9)
    same(eo.solve(eo.EnsembleProblem(decay(), scaled), **options), expected)
    assert files(path) == before


def test_interrupted(tmp_path, monkeypatch):
    """What is finished is in the store; with `on_interrupt="return"` it is returned."""
    path = tmp_path / "sweep.zarr"
    seen = []

    class Interrupt:
        def __init__(self, n, done=0):
            seen.append(done)

        def report(self, codes):
            seen.append(len(codes))
            if len(seen) == 3:
                raise KeyboardInterrupt

        def close(self):
            pass

    from ensembleode import solve as solving

    monkeypatch.setattr(sys.modules[solving.__module__], "Progress", Interrupt)
    sim = eo.solve(ensemble(), **OPTIONS, store=path, progress=True, on_interrupt="return")
    assert (np.asarray(sim.retcode) == 1).sum() == 256
    assert not sim.converged
    seen[:] = [0] * 9
    sim = eo.solve(ensemble(), **OPTIONS, store=path, progress=True)
    assert seen[9:] == [256, 256, 256, 232]
    same(sim, eo.solve(ensemble(), **OPTIONS))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to mount")
def test_a_disk_that_is_full(tmp_path):
    """A small file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        path = disk / "sweep.zarr"
        full = r"No space left on device; the \d+ trajectories in it are kept"
        with pytest.raises(eo.StoreError, match=full) as caught:
            eo.solve(ensemble(20_000), **BIG, store=path)
        done = np.asarray(caught.value.solution.retcode) == 1
        assert 0 < done.sum() < 20_000
        rows = np.flatnonzero(done)[[0, -1]]
        expected = eo.solve(ensemble(20_000), **BIG)
        for row in rows:
            np.testing.assert_array_equal(caught.value.solution.u[row], expected.u[row])
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        same(eo.solve(ensemble(20_000), **BIG, store=path), expected)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        same(eo.open_ensemble(path), expected)
        with pytest.raises(eo.StoreError, match="can't be written to: Read-only file system"):
            eo.solve(ensemble(20_000), **BIG, store=path)
        with pytest.raises(eo.StoreError, match="can't be written to: Read-only file system"):
            eo.solve(ensemble(20_000), **BIG, store=disk / "new.zarr")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_store_that_can_not_be_written(tmp_path):
    """By a user who may not: root without its capabilities, if that is who runs the tests. (As
    another user it might not even be able to read its packages.)"""
    path = tmp_path / "sweep.zarr"
    eo.solve(ensemble(20_000), **BIG, store=path)
    for f in (tmp_path, *tmp_path.rglob("*")):
        f.chmod(0o555 if f.is_dir() else 0o444)
    scripts = tmp_path.parent / "scripts"
    scripts.mkdir(exist_ok=True)
    # capset(2), version 3 of its header, with no capabilities.
    before = (
        "import ctypes, os; "
        "header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(); "
        "assert os.getuid() or ctypes.CDLL(None, use_errno=True).capset(header, none) == 0"
    )
    process = another_process(scripts, path, before=before)
    _, error = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "can't be written to: Permission denied" in error


@pytest.mark.slow
def test_ten_million(tmp_path):
    """Memory is bounded by what is under way."""
    code = """
        import resource, sys
        import jax.numpy as jnp, numpy as np
        import ensembleode as eo
        prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1), (0.0, 1.0))
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=jnp.ones(1) * ctx.index)
        )
        sizes = []
        for n in (100_000, 10_000_000):
            sim = eo.solve(
                ens, trajectories=n, save_start=False, store=f"{sys.argv[1]}/{n}.zarr",
                batch_size=50_000,
            )
            sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        last = sim.u[-3:, 0, 0]
        assert np.allclose(last, np.arange(n - 3, n) * np.exp(-1), rtol=1e-3), last
        print(*sizes)
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    few, many = map(int, done.stdout.split())
    assert many < few + 150, (few, many)
