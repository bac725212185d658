"""Generated kernels with NVIDIA's compiler, and whole solves lowered and compiled for an H200."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ensembleode as eo
from ensembleode.engines.kernel import launch
from ensembleode.executors import kernel as executor

from ...marks import slow_unless
from ...problems import decay, lorenz
from ..lanes.test_problems import ensemble, PROBLEMS
from .test_agreement import METHODS
from .test_nvrtc import needs_nvrtc


def reported(ens, alg, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is spilled
        return eo.kernel_report(ens, alg, **options)


def as_single(ens):
    """In single precision."""

    def cast(x):
        return x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x

    prob = eo.remake(ens.prob, **jax.tree.map(cast, {"u0": ens.prob.u0, "p": ens.prob.p}))
    return eo.EnsembleProblem(prob)


@needs_nvrtc
@pytest.mark.parametrize(
    "name", [slow_unless(name in ("lorenz", "mlp"), name) for name in PROBLEMS]
)
@pytest.mark.parametrize("single", [slow_unless(s, s) for s in (True, False)])
def test_every_problem_compiles(name, single):
    if single and name == "forced":
        pytest.skip("its table is in double precision")
    ens = as_single(ensemble(PROBLEMS[name])) if single else ensemble(PROBLEMS[name])
    report = reported(ens, eo.Tsit5(), saveat=0.1)
    for usage in report.kernels.values():
        assert 16 <= usage.registers <= 255
    assert set(report.kernels) == {"solve", "pull_back"}


@needs_nvrtc
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("saving", ["ends", "times", "steps"])
def test_every_method_compiles(method, saving):
    alg = METHODS[method]
    options = {} if alg.adaptive else {"dt": 0.1}
    options |= {"times": {"saveat": 0.1}, "steps": {"save_everystep": True}}.get(saving, {})
    report = reported(as_single(ensemble(PROBLEMS["lotka_volterra"])), alg, **options)
    # A state of two numbers and all stages fit.
    assert report.solve.spill_stores < 64


@needs_nvrtc
def test_the_report():
    report = eo.kernel_report(ensemble(PROBLEMS["lorenz"]), eo.Tsit5(), arch="compute_80")
    assert report.arch == "compute_80"
    assert report.solve.stack == 0
    assert report.solve.registers < report.pull_back.registers
    head, solve, back = str(report).splitlines()
    assert head.startswith("compute_80")
    assert solve.split()[:2] == ["solve", str(report.solve.registers)]
    assert back.split()[0] == "pull_back"
    forward = eo.kernel_report(decay(), sensealg=eo.ForwardDiffSensitivity())
    assert forward.pull_back is None


@needs_nvrtc
def test_what_spills_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = eo.kernel_report(ensemble(PROBLEMS["matrix_linear"]), eo.Tsit5(), saveat=0.1)
    spilled = [name for name, usage in report.kernels.items() if usage.spill_stores > 64]
    assert "pull_back" in spilled
    messages = [str(w.message) for w in caught]
    assert len(messages) == len(spilled)
    for name, message in zip(spilled, messages, strict=True):
        bytes_of = report.kernels[name].spill_stores
        assert f"the kernel {name!r} spills {bytes_of:,} bytes a thread" in message


def test_the_report_refuses_what_has_no_kernel():
    with pytest.raises(ValueError, match=r"not by BacksolveAdjoint\(\)"):
        eo.kernel_report(decay(), eo.Tsit5(), sensealg=eo.BacksolveAdjoint())
    with pytest.raises(ValueError, match="can't run KenCarp4"):
        eo.kernel_report(decay(), eo.KenCarp4())


#
# Whole solves
#


@pytest.fixture
def as_if_on_gpu(monkeypatch):
    """What is traced is for a GPU."""
    monkeypatch.setattr(executor, "computes_on_gpu", lambda: True)
    monkeypatch.setattr(launch, "check", lambda: None)
    monkeypatch.setattr(launch, "launcher", lambda: launch.custom_call)
    jax.clear_caches()
    yield
    jax.clear_caches()


def final(p, sensealg=None, n=1000):
    prob = eo.ODEProblem(lorenz, jnp.array([1.0, 0, 0]), (0.0, 1.0), p)
    ens = eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / n))
    )
    alg = eo.EnsembleGPUKernel()
    sim = eo.solve(ens, eo.Tsit5(), alg, trajectories=n, saveat=0.1, sensealg=sensealg)
    return jnp.sum(sim.u[:, -1])


PROGRAMS = {
    "solve": final,
    "grad": jax.grad(final),
    "jacfwd": jax.jacfwd(lambda p: final(p, eo.ForwardDiffSensitivity())),
    "scan": lambda p: jax.lax.scan(lambda p, _: (p + 1e-3 * jax.grad(final)(p), None), p, None, 3),
    "vmap": lambda p: jax.vmap(final)(jnp.stack([p, 2 * p])),
}
P = jax.ShapeDtypeStruct((3,), np.float64)


@needs_nvrtc
@pytest.mark.parametrize("name", PROGRAMS)
def test_lowered(as_if_on_gpu, name):
    fn = PROGRAMS[name]
    traced = jax.jit(lambda p: fn(p)).trace(P)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @__gpu$xla.gpu.ptx" in line]
    kernels = [line.split('name = "')[1].split('"')[0] for line in calls]
    expected = {"grad": ["solve", "pull_back"], "scan": ["solve", "pull_back"]}
    expected["jacfwd"] = ["solve", "solve"]
    assert sorted(kernels) == sorted(expected.get(name, ["solve"]))
    threads = 2000 if name == "vmap" else 1000
    assert f"grid_x = {-(-threads // 128)} : i32" in calls[0]
    assert "block_x = 128 : i32" in calls[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_for_an_h200(h200, as_if_on_gpu, name):
    fn = PROGRAMS[name]
    p = jax.ShapeDtypeStruct(P.shape, P.dtype, sharding=NamedSharding(h200, PartitionSpec()))
    lowered = jax.jit(lambda p: fn(p)).trace(p).lower(lowering_platforms=("cuda",))
    text = lowered.compile().as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.ptx"') >= 1
