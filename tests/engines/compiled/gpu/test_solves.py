"""The kernels with options, failures and other numbers, compared with compiled code for
a core."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import launch
from ensembleode.ground import logs

from ....marks import slow_unless
from ....problems import failing, lorenz, lotka_volterra
from ...test_derivatives import with_rule
from .test_agreement import agree, both


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
    """The kernels that are traced, in order."""
    found = []
    host = launch.launcher()

    def spy(kernel, blocks, operands, outputs):
        found.append((kernel, blocks))
        return host(kernel, blocks, operands, outputs)

    monkeypatch.setattr(launch, "launcher", lambda: spy)
    return found


OPTIONS = {
    "ends": {},
    "end": {"save_start": False},
    "spacing": {"saveat": 0.25},
    "times": {"saveat": [0.0, 0.1, 0.1, 0.77, 1.0]},
    "own times": {"saveat": np.linspace(0, 0.9, 3 * N).reshape(N, 3)},
    "steps": {"save_everystep": True},
    "fixed": {"adaptive": False, "dt": 0.01, "saveat": 0.3},
    "first step": {"dt": 1e-3},
    "tolerances of components": {"abstol": np.array([1e-9, 1e-6, 1e-7]), "reltol": 1e-8},
    "non-FSAL": {"alg": eo.Vern7(), "saveat": 0.2},
}


QUICK = ("own times", "steps", "fixed")


@pytest.mark.parametrize("name", [slow_unless(x in QUICK, x) for x in OPTIONS])
def test_options(on_host, name):
    options = TIGHT | OPTIONS[name]
    alg = options.pop("alg", eo.Tsit5())
    core, kernel = both(ensemble(), alg, trajectories=N, **options)
    # Rounding moves the times of steps (by what it does to estimates of their errors).
    agree(core, kernel, 1e-6 if name == "steps" else 1e-12)
    assert len(np.unique(core.stats.naccept)) > 1 or name == "fixed"


def test_backwards_and_spans_of_their_own(on_host):
    prob = eo.ODEProblem(lotka_volterra, jnp.ones(2), (0.0, 1.0), jnp.array([1.5, 1.0, 3.0, 1.0]))

    def prob_func(prob, ctx):
        return eo.remake(prob, tspan=(1.0 + ctx.index / 10, -0.1 * ctx.index))

    ens = eo.EnsembleProblem(prob, prob_func)
    agree(*both(ens, eo.Tsit5(), trajectories=N, **TIGHT))
    agree(*both(ens, eo.Tsit5(), trajectories=N, saveat=0.3, **TIGHT))


def test_tolerances_of_their_own(on_host):
    ens = ensemble(
        prob_func=lambda prob, ctx: eo.remake(rising(prob, ctx), reltol=10.0 ** (-3 - ctx.index))
    )
    core, kernel = both(ens, eo.Tsit5(), trajectories=N, abstol=1e-9)
    agree(core, kernel)
    assert (np.diff(kernel.stats.naccept) > 0).all()


def test_single_precision(on_host):
    prob = eo.ODEProblem(
        lotka_volterra,
        jnp.ones(2, np.float32),
        (0.0, 5.0),
        jnp.array([1.5, 1.0, 3.0, 1.0], np.float32),
    )
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index / 10))
    core, kernel = both(ens, eo.Tsit5(), trajectories=N, saveat=0.5, abstol=1e-5, reltol=1e-5)
    assert kernel.u.dtype == np.float32
    np.testing.assert_allclose(kernel.u, core.u, rtol=2e-3)
    steps = core.stats.naccept.astype(int) - kernel.stats.naccept
    assert np.abs(steps).max() <= 2


def test_parameters_of_other_dtypes(on_host):
    """Whole numbers too large for the dtype of the state, and some that decide."""
    large = 2**24 + 1

    def f(u, p, t):
        whole, choice, single = p["whole"], p["choice"], p["single"]
        exact = jnp.where(whole == large, 1.0, -1.0).astype(u.dtype)
        return u * exact * single + jnp.where(choice, jnp.ones_like(u), -jnp.ones_like(u))

    def prob_func(prob, ctx):
        p = {"whole": large + ctx.index % 2, "choice": ctx.index > 2, "single": prob.p["single"]}
        return eo.remake(prob, p=p)

    single = jnp.array(0.5, np.float32)
    p = {"whole": jnp.array(large), "choice": jnp.array(True), "single": single}
    ens = eo.EnsembleProblem(eo.ODEProblem(f, jnp.ones(2, np.float32), (0.0, 1.0), p), prob_func)
    core, kernel = both(ens, eo.Tsit5(), trajectories=N)
    np.testing.assert_allclose(kernel.u, core.u, rtol=1e-5)
    assert len(np.unique(np.round(kernel.u[:, -1, 0], 3))) == 4


def test_many_parameters_of_their_own(on_host):
    """More than are copied to where a thread computes."""

    def f(u, p, t):
        return -u * jnp.sum(p) / p.size

    def prob_func(prob, ctx):
        return eo.remake(prob, p=prob.p * (1 + ctx.index))

    prob = eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0), jnp.linspace(0.0, 1.0, 100))
    agree(*both(eo.EnsembleProblem(prob, prob_func), eo.Tsit5(), trajectories=N, **TIGHT))


def test_failures_are_alone(on_host):
    ens = failing()
    core, kernel = both(
        ens, eo.Tsit5(), trajectories=6, saveat=0.25, abstol=1e-10, reltol=1e-10, maxiters=2000
    )
    np.testing.assert_array_equal(kernel.retcode, core.retcode)
    codes = eo.ReturnCode
    assert kernel.retcode[0] != codes.Success
    assert kernel.retcode[1] != codes.Success
    assert kernel.retcode[3] == codes.MaxIters
    assert kernel.stats.naccept[3] + kernel.stats.nreject[3] == 2000
    assert (kernel.retcode[4:] == codes.Success).all()
    np.testing.assert_array_equal(np.isnan(kernel.u), np.isnan(core.u))
    np.testing.assert_allclose(kernel.u[4:, -1], np.exp(-1.0), rtol=1e-8)


def test_a_start_that_is_not_finite(on_host):
    ens = ensemble(
        prob_func=lambda prob, ctx: eo.remake(prob, u0=jnp.where(ctx.index == 1, jnp.nan, prob.u0))
    )
    core, kernel = both(ens, eo.Tsit5(), trajectories=3)
    np.testing.assert_array_equal(kernel.retcode, core.retcode)
    assert kernel.retcode.tolist() == [1, eo.ReturnCode.Unstable.value, 1]
    assert str(kernel.engine).endswith("; in one kernel)")


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
        agree(core, sim, 1e-9)
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
