"""Systems whose matrices are too large for a stack, and whose code is too long for a compiler."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines import compiled
from ensembleode.engines.compiled import kernel, solves
from ensembleode.engines.compiled.llvm import heap, machine
from ensembleode.tracing.program import trace

from ...solvers.test_rosenbrock import METHODS


def dense(n):
    """A dense system, whose matrices are factorised by loops."""
    a = np.random.default_rng(0).normal(size=(n, n)) / np.sqrt(n) - 2 * np.eye(n)
    return eo.ODEProblem(lambda u, p, t: p * (a @ jnp.tanh(u)), jnp.ones(n), (0.0, 1.0), 1.0)


def heat(n):
    """The heat equation by lines."""

    def f(u, p, t):
        right, left = jnp.append(u[1:], 0.0), jnp.append(jnp.zeros(1), u[:-1])
        return p * (n + 1) ** 2 * (right - 2 * u + left)

    x = jnp.arange(1, n + 1) / (n + 1)
    return eo.ODEProblem(f, jnp.sin(jnp.pi * x), (0.0, 0.1), 1.0)


def ensemble(prob):
    def prob_func(prob, ctx):
        return eo.remake(prob, u0=prob.u0 * (1 + ctx.index / 10))

    return eo.EnsembleProblem(prob, prob_func=prob_func)


class Written(Exception):
    """Raised in place of writing a kernel, with its description."""


def described(ens, **options):
    """The description of the kernel that solves an ensemble."""

    def stop(d):
        raise Written(d)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "solving", stop)
        with pytest.raises(Written) as caught:
            eo.solve(ens, METHODS[0], **options)
    return caught.value.args[0]


@pytest.mark.parametrize(("n", "is_large"), [(16, False), (100, True)])
def test_large_arrays_are_handed_in(n, is_large):
    text, size = kernel.solving(described(ensemble(dense(n)), trajectories=1))
    assert ("%arrays" in text) == is_large
    assert (size >= 2 * n**2 * 8) == is_large
    taken = sum(int(x.split(" x ")[0]) for x in text.split("alloca [")[1:])
    assert 8 * taken <= heap.MOST_ON_STACK


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["1024", "unlimited"])
def test_threads_with_a_small_stack(limit):
    code = (
        "import jax.numpy as jnp, ensembleode as eo\n"
        f"from {__name__} import dense, ensemble\n"
        "sim = eo.solve(ensemble(dense(90)), eo.Rosenbrock23(), trajectories=40)\n"
        "assert sim.engine.name == 'compiled' and sim.retcode.min() == 1\n"
    )
    line = f'ulimit -s {limit} && exec {sys.executable} -c "$0"'
    done = subprocess.run(["bash", "-c", line, code], timeout=300, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_lanes_are_fewer_where_a_stack_is_small(lanes, monkeypatch):
    ens, enough = ensemble(dense(60)), 2 * solves.tuning.SPILLED * 60 * 8 * lanes
    for size, width in ((enough, lanes), (enough - 1, max(1, lanes // 2))):
        monkeypatch.setattr(machine, "stack_bytes", lambda size=size: size)
        assert described(ens, trajectories=64).width == min(width, machine.current().lanes(float))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alg", [METHODS[-1], eo.AutoTsit5(METHODS[0])])
def test_both_sides_of_the_limit(alg, monkeypatch, caplog):
    prob = heat(9)
    lines = compiled.lines(alg.method, trace(prob.f, prob.u0, 1.0, 0.0)[0])
    options = {"abstol": 1e-9, "reltol": 1e-9, "save_start": False}
    true = np.exp(-4 * 10**2 * np.sin(np.pi / 20) ** 2 * 0.1) * prob.u0
    # (Near the limit, entries count, too.)
    lines += compiled.tuning.LINES_OF_ENTRY * (3 * 9 - 2)
    for most, engine in ((lines, "compiled"), (lines - 1, "diffrax")):
        monkeypatch.setattr(compiled.tuning, "MOST_LINES", most)
        sol = eo.solve(prob, alg, **options)
        assert sol.engine.name == engine
        np.testing.assert_allclose(sol.u[-1], true, rtol=1e-6)
        assert len(caplog.records) == (engine == "diffrax")
        caplog.clear()
    # What is asked for is compiled even so, and what diffrax doesn't have.
    assert eo.solve(prob, alg, engine="compiled", **options).engine.name == "compiled"
    event = eo.DiscreteCallback(lambda u, t, integrator: u[0] > 9.0, eo.terminate)
    assert eo.solve(prob, alg, callback=event, **options).engine.name == "compiled"
