"""Kernels in programs: over devices, under `vmap`, and what is said where they can't be had. (What
they compute is compared with compiled code for a core in test_ptx_solves.py.)"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled.xla import launch
from ensembleode.ground import logs

from ....problems import lorenz
from ...test_derivatives import with_rule


N = 7
TIGHT = {"abstol": 1e-9, "reltol": 1e-9}


def rising(prob, ctx):
    which = ctx.index % N
    return eo.remake(prob, p=prob.p.at[1].set(which * 3.0), u0=prob.u0 + 0.1 * which)


def ensemble(tspan=(0.0, 1.0), prob_func=rising):
    prob = eo.ODEProblem(lorenz, jnp.array([1.0, 0, 0]), tspan, jnp.array([10.0, 28.0, 8 / 3]))
    return eo.EnsembleProblem(prob, prob_func)


@pytest.fixture
def launched(on_host, monkeypatch):
    found = []
    host = launch.launcher()

    def spy(kernel, blocks, operands, outputs):
        found.append((kernel, blocks))
        return host(kernel, blocks, operands, outputs)

    monkeypatch.setattr(launch, "launcher", lambda: spy)
    return found


def test_numbers_change_without_another_kernel(launched):
    def go(n, tol, end, dt=None):
        ens = ensemble((0.0, end))
        options = {"abstol": tol, "reltol": tol, "maxiters": int(1 / tol)}
        eo.solve(ens, eo.Tsit5(), eo.EnsembleGPUKernel(), trajectories=n, saveat=end / n, **options)

    go(5, 1e-6, 1.0)
    go(300, 1e-7, 2.0)
    go(17, 1e-5, 0.5)
    assert len({kernel for kernel, _ in launched}) == 1
    assert {blocks for _, blocks in launched} == {1, 3}


@pytest.mark.slow
def test_vmap_makes_more_trajectories(on_host):
    """One launch, whatever is mapped over: numbers of each trajectory, or shared by all."""

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=prob.u0 + 0.1 * ctx.index)

    def solved(u0, p, alg, engine):
        prob = eo.ODEProblem(lorenz, u0, (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, prob_func)
        return eo.solve(ens, eo.Tsit5(), alg, trajectories=N, saveat=0.5, engine=engine, **TIGHT).u

    u0s = 1 + jnp.arange(12.0).reshape(2, 2, 3) / 10
    ps = jnp.array([[10.0, 28.0, 8 / 3], [5.0, 14.0, 2.0]])

    def mapped(alg, engine="auto", **axes):
        inner = jax.vmap(lambda u0, p: solved(u0, p, alg, engine), in_axes=(0, None))
        return jax.vmap(inner, in_axes=tuple(axes.values()))

    for axes, args in (
        ({"u0": 0, "p": None}, (u0s, ps[0])),
        ({"u0": None, "p": 0}, (u0s[0], ps)),
        ({"u0": 0, "p": 0}, (u0s, ps)),
    ):
        kernel = mapped(eo.EnsembleGPUKernel(), **axes)(*args)
        core = mapped(eo.EnsembleSerial(), engine="compiled", **axes)(*args)
        np.testing.assert_allclose(kernel, core, rtol=1e-9, atol=1e-9)
        program = str(jax.make_jaxpr(mapped(eo.EnsembleGPUKernel(), **axes))(*args))
        assert program.count("ensembleode_kernel[") + program.count("ffi_call[") == 1


def test_several_devices(on_host):
    options = {"trajectories": 300, "saveat": 0.5}
    core = eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleSerial(), engine="compiled", **options)
    for devices in (2, jax.devices()[:2]):
        alg = eo.EnsembleGPUKernel(devices=devices)
        sim = eo.solve(ensemble(), eo.Tsit5(), alg, **options)
        np.testing.assert_array_equal(sim.stats.naccept, core.stats.naccept)
        np.testing.assert_allclose(sim.u, core.u, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"EnsembleGPUKernel\(devices=99\) wants 99"):
        eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleGPUKernel(devices=99), trajectories=3)


def test_without_a_gpu_the_cpu_takes_its_place_which_is_said_once(caplog):
    logs.log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="ensembleode"):
        for _ in range(2):
            sim = eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleGPUKernel(), trajectories=3)
    assert "on the CPU, for want of an NVIDIA GPU" in str(sim.engine)
    (record,) = caplog.records
    assert "EnsembleGPUKernel() finds no NVIDIA GPU" in record.message
    same = eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleSerial(), trajectories=3)
    np.testing.assert_array_equal(sim.u, same.u)


@pytest.mark.parametrize("gpu", [True, False])
def test_what_is_refused(gpu, request):
    if gpu:
        request.getfixturevalue("on_host")
    alg = eo.EnsembleGPUKernel()
    with pytest.raises(ValueError, match=r"the methods of the compiled.*EnsembleGPUArray"):
        eo.solve(ensemble(), eo.KenCarp4(), alg, trajectories=2)
    with pytest.raises(ValueError, match=r"ReplayAdjoint\(\).*not by GaussAdjoint\(\)"):
        eo.solve(ensemble(), eo.Tsit5(), alg, trajectories=2, sensealg=eo.GaussAdjoint())


def test_what_has_no_translation_is_named(on_host):
    def eigenvalues(u, p, t):
        return -jnp.linalg.eigvalsh(jnp.outer(u, u))

    prob = eo.ODEProblem(eigenvalues, jnp.ones(1), (0.0, 1.0))
    with pytest.raises(ValueError, match=r"EnsembleGPUArray.*eigh"):
        eo.solve(eo.EnsembleProblem(prob), eo.Tsit5(), eo.EnsembleGPUKernel(), trajectories=2)

    prob = eo.ODEProblem(lambda u, p, t: -with_rule(u), jnp.ones(1), (0.0, 1.0))
    alg = eo.EnsembleGPUKernel()
    with pytest.raises(ValueError, match=r"the derivative of f can't be translated.*eigh"):
        jax.grad(
            lambda u0: jnp.sum(
                eo.solve(
                    eo.EnsembleProblem(eo.remake(prob, u0=u0)), eo.Tsit5(), alg, trajectories=2
                ).u
            )
        )(prob.u0)


def test_what_is_missing_is_said_before_anything_is_compiled(monkeypatch):
    from ensembleode.executors import kernel

    monkeypatch.setattr(kernel, "computes_on_nvidia", lambda: True)
    monkeypatch.setattr(launch, "missing", lambda: ["There is no compiler."])
    with pytest.raises(eo.KernelError, match=r"can't run on a GPU here\. There is no compiler"):
        eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleGPUKernel(), trajectories=2)
