"""The progress bar over the trajectories."""

import io
import re
import sys
import types

import jax.numpy as jnp
import pytest

import ensembleode as eo
from ensembleode.running import progress
from ensembleode.running.progress import Progress

from ..marks import slow_unless


PROB = eo.ODEProblem(lambda u, p, t: u**2, jnp.ones(1), (0.0, 0.9))
# u0 / (1 - u0 t) blows up before 0.9 for the later half.
ENS = eo.EnsembleProblem(PROB, lambda prob, ctx: eo.remake(prob, u0=jnp.ones(1) * ctx.index / 500))


@pytest.mark.parametrize(
    "alg",
    [
        slow_unless(False, eo.EnsembleSerial()),
        eo.EnsembleThreads(),
        slow_unless(False, eo.EnsembleDistributed(workers=2)),
    ],
    ids=str,
)
def test_how_many_and_how_many_failed(alg, capfd):
    sim = eo.solve(ENS, None, alg, trajectories=1000, progress=True)
    said = capfd.readouterr().err
    assert "1000/1000" in said
    assert f"{len(sim.failed)} failed" in said
    assert len(sim.failed) > 400
    assert re.search(r"\d+(\.\d+)?k?traj/s", said)


def test_batches_are_small_enough_to_show(monkeypatch):
    told = []
    monkeypatch.setattr(Progress, "report", lambda self, codes: told.append(len(codes)))
    eo.solve(ENS, trajectories=1000, progress=True)
    assert told == [50] * 20


@pytest.mark.parametrize(("each", "fewest", "most"), [(1e9, 1, 3), (0.0, 50, 110)])
def test_lines_of_a_log(monkeypatch, each, fewest, most):
    """Not a terminal: a line now and then, the first and the last always. (Whatever has been
    imported.)"""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(progress, "_EACH", each)
    bar = Progress(100)
    for _ in range(100):
        bar.report([1])
    bar.close()
    lines = log.getvalue().splitlines()
    assert fewest <= len(lines) <= most
    assert "\r" not in log.getvalue()
    assert "0/100" in lines[0]
    assert "100/100" in lines[-1]


def test_in_a_notebook(monkeypatch):
    ipython = types.ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    for shell, expected in (
        (None, False),
        (object(), False),
        (types.SimpleNamespace(kernel=1), True),
    ):
        ipython.get_ipython = lambda shell=shell: shell
        assert progress._in_notebook() == expected


@pytest.mark.slow
def test_what_is_there_counts(tmp_path, capfd):
    options = {"trajectories": 1000, "batch_size": 256, "store": tmp_path / "a.zarr"}
    eo.solve(ENS, **options)
    eo.solve(ENS, **options, progress=True)
    assert "1000/1000" in capfd.readouterr().err
