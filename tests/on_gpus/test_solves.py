"""Solves where JAX computes on GPUs: which place has them, where their results are, and that they
are the same as on the CPU."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled.xla import launch
from ensembleode.ground.devices import placement

from ..marks import slow_unless
from ..problems import lorenz


pytestmark = pytest.mark.skipif(
    placement.platform() != "gpu" or len(jax.devices()) < 2,
    reason="there are no two GPUs (see tests/gpu_machine.py)",
)

N = 5
ON_CPU = [eo.EnsembleThreads(), eo.EnsembleThreads(1), eo.EnsembleSerial()]
ON_GPUS = [
    eo.EnsembleGPUKernel(),
    eo.EnsembleGPUKernel(devices=2),
    eo.EnsembleGPUArray(),
    eo.EnsembleGPUArray(devices=2),
    None,
]


def ensemble_of(x, f=lorenz):
    prob = eo.ODEProblem(f, jnp.array([1.0, 0.5, 2.0]) * x, (0.0, 0.5), (10.0, 28.0, 8 / 3))

    def prob_func(prob, ctx):
        return eo.remake(prob, p=(10.0, 20 + x * (1 + ctx.index), 8 / 3))

    return eo.EnsembleProblem(prob, prob_func)


def rotating(u, p, t):
    """A field of which the compiled engine has no code: a long Fourier transform."""
    return jnp.fft.irfft(1j * jnp.fft.rfft(u, 128))[:3] - u


def solved(x, ensemblealg, f=lorenz, **options):
    # (With this controller all engines take the same steps.)
    tight = {"reltol": 1e-8, "abstol": 1e-8, "stepsize_controller": eo.PIController(), **options}
    return eo.solve(ensemble_of(x, f), eo.Tsit5(), ensemblealg, trajectories=N, **tight)


def is_home(x):
    """Whether an array is where JAX computes, and can be used with arrays anywhere."""
    return x.devices() == {jax.devices()[0]} and not x.committed


@pytest.fixture(scope="module")
def expected():
    """The states at three times, the gradient and the second derivative of `loss_of`, on the
    CPU."""
    with placement.on_cpu():
        loss = loss_of(eo.EnsembleThreads())
        x = jnp.asarray(1.1)
        u = np.asarray(solved(x, eo.EnsembleThreads(), saveat=0.25).u)
        return u, float(jax.grad(loss)(x)), float(jax.grad(jax.grad(loss))(x))


def loss_of(ensemblealg):
    return lambda x: jnp.mean(solved(x, ensemblealg, saveat=0.25, maxiters=512).u ** 2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "ensemblealg",
    [slow_unless(x in (eo.EnsembleGPUKernel(), None), x) for x in [*ON_CPU, *ON_GPUS]],
    ids=str,
)
def test_the_same_everywhere(ensemblealg, expected):
    u, slope, curvature = expected
    x, loss = jnp.asarray(1.1), loss_of(ensemblealg)
    sim = solved(x, ensemblealg, saveat=0.25)
    np.testing.assert_allclose(sim.u, u, rtol=1e-9)
    assert is_home(sim.u)
    assert is_home(sim.t)
    assert isinstance(sim.retcode, np.ndarray)
    gradient = jax.grad(loss)(x)
    assert is_home(gradient)
    for found in (gradient, jax.jit(jax.grad(loss))(x), jax.jvp(loss, (x,), (1.0,))[1]):
        np.testing.assert_allclose(found, slope, rtol=1e-8)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.grad(loss)))(x), curvature, rtol=1e-7)
    several = jax.jit(jax.vmap(loss))(jnp.stack([x, x]))
    np.testing.assert_allclose(several, loss(x), rtol=1e-12)


@pytest.mark.parametrize(
    "ensemblealg",
    [slow_unless(x is None, x) for x in (eo.EnsembleThreads(), eo.EnsembleSerial(), None)],
    ids=str,
)
@pytest.mark.parametrize("which", [slow_unless(False, 0), 1])
def test_numbers_that_are_committed_to_a_gpu(ensemblealg, which, expected):
    device = jax.devices()[which]
    x, loss = jax.device_put(1.1, device), loss_of(ensemblealg)
    np.testing.assert_allclose(solved(x, ensemblealg, saveat=0.25).u, expected[0], rtol=1e-9)
    for gradient in (jax.grad(loss)(x), jax.jit(jax.grad(loss))(x)):
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-8)
        assert np.isfinite(gradient + x)  # they can be used together


def test_the_default_is_a_kernel_and_says_so():
    sim = solved(1.0, None)
    assert sim.engine.name == "compiled"
    assert sim.engine.reason.endswith("in one kernel")


@pytest.mark.slow
def test_arrays_where_there_is_no_kernel():
    """All trajectories at once, without a loop over chunks."""
    sim = solved(1.0, None, rotating)
    assert sim.engine.name == "diffrax"
    assert "not EnsembleGPUKernel(" in sim.engine.reason
    with placement.on_cpu():
        np.testing.assert_allclose(sim.u, solved(1.0, eo.EnsembleThreads(), rotating).u, rtol=1e-9)

    def ends(x):
        arrays = eo.EnsembleGPUArray()
        return eo.solve(ensemble_of(x), eo.Tsit5(), arrays, trajectories=1000).u[:, -1]

    loops = [eqn for eqn in jax.make_jaxpr(ends)(1.0).eqns if eqn.primitive.name == "scan"]
    text = jax.jit(ends).lower(1.0).as_text()
    assert not loops
    assert "1000xf64" in text
    assert "128xf64" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("width", "engine"), [(14, "compiled"), (15, "diffrax")])
def test_networks_with_many_shared_weights_are_arrays(width, engine):
    """Their gradients would take long to compile as kernels: 2-14-14-2 has 282 weights, 2-15-15-2
    has 317."""
    network = eqx.nn.MLP(2, 2, width, 2, jnp.tanh, key=jax.random.key(0))
    prob = eo.ODEProblem(lambda u, p, t: p(u), jnp.ones(2), (0.0, 1.0), network)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.index))
    options = {"trajectories": N, "stepsize_controller": eo.PIController()}
    sim = eo.solve(ens, **options)
    assert sim.engine.name == engine
    kernel = eo.EnsembleGPUKernel()
    if engine == "diffrax":
        assert "317 numbers" in sim.engine.reason
    asked = eo.solve(ens, eo.Tsit5(), kernel, **options)
    assert asked.engine.name == "compiled"
    np.testing.assert_allclose(asked.u, sim.u, rtol=1e-9)


@pytest.mark.slow
def test_several_gpus_do_not_wait_for_each_other():
    def ends(x):
        arrays = eo.EnsembleGPUArray(devices=2)
        return eo.solve(ensemble_of(x), eo.Tsit5(), arrays, trajectories=1000).u[:, -1]

    text = jax.jit(ends).lower(1.0).compile().as_text()
    assert "while(" in text
    # What they exchange is in no function that is called, such as the body of the loop.
    exchanging = [part for part in text.split("\n\n") if re.search(r"= \S+ all-\w+\(", part)]
    assert [part.startswith("ENTRY") for part in exchanging] == [True]


def test_the_cpu_where_there_are_neither(monkeypatch):
    def missing():
        raise launch.KernelError("Kernels can't run on a GPU here.")

    monkeypatch.setattr(launch, "check", missing)
    sim = eo.solve(ensemble_of(1.0), eo.Rodas5P(), trajectories=N)
    assert sim.engine.reason.endswith("on the CPU")
    assert "not EnsembleGPUKernel(" in sim.engine.reason
    assert "not EnsembleGPUArray(" in sim.engine.reason
    assert is_home(sim.u)
    with pytest.raises(launch.KernelError):
        eo.solve(ensemble_of(1.0), eo.Rodas5P(), eo.EnsembleGPUKernel(), trajectories=N)


@pytest.mark.slow
@pytest.mark.parametrize("ensemblealg", [eo.EnsembleThreads(), eo.EnsembleSerial()], ids=str)
def test_programs_of_arrays_on_the_cpu(ensemblealg):
    """They run there by themselves; a program for GPUs can't have them."""
    x = jnp.asarray(1.1)
    with placement.on_cpu():
        u = np.asarray(solved(1.1, ensemblealg, rotating).u)
    assert is_home(solved(x, ensemblealg, rotating).u)
    np.testing.assert_allclose(solved(x, ensemblealg, rotating).u, u, rtol=1e-12)

    def loss(x):
        return jnp.mean(solved(x, ensemblealg, rotating).u ** 2)

    h = 1e-6
    slope = (loss(x + h) - loss(x - h)) / (2 * h)
    np.testing.assert_allclose(jax.grad(loss)(x), slope, rtol=1e-6)
    with pytest.raises(ValueError, match=r"use EnsembleGPUArray\(\)"):
        jax.jit(loss)(x)
    with jax.default_device("cpu"):
        np.testing.assert_allclose(jax.jit(loss)(x), loss(x), rtol=1e-12)


def test_a_single_problem():
    """It is solved on the CPU, from any program; as arrays where it can't be compiled."""
    prob = ensemble_of(1.0).prob
    sol = eo.solve(prob, saveat=0.25)
    assert sol.engine.reason.endswith("on the CPU")
    assert is_home(sol.u)
    u = jax.jit(lambda x: eo.solve(eo.remake(prob, u0=prob.u0 * x), saveat=0.25).u)(1.0)
    np.testing.assert_array_equal(u, sol.u)
    other = eo.solve(ensemble_of(1.0, rotating).prob)
    assert other.engine.name == "diffrax"
    assert "not EnsembleSerial(" in other.engine.reason
    assert is_home(other.u)


@pytest.mark.slow
@pytest.mark.parametrize("ensemblealg", [eo.EnsembleThreads(), None], ids=str)
def test_all_that_an_ensemble_has(ensemblealg, tmp_path):
    """Events, integrals, outputs with keys, reductions, steps, batches, stores."""

    def falling(u, p, t):
        return jnp.array([u[1], -9.81])

    prob = eo.ODEProblem(falling, [1.0, 0.0], (0.0, 1.0), integrand=lambda u, p, t: u)
    bounce = eo.ContinuousCallback(
        lambda u, t, integrator: u[0], lambda i: eo.remake(i, u=i.u * jnp.array([1.0, -0.9]))
    )
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index / 9))

    def both(**options):
        ens = options.pop("ens")
        how = {"trajectories": 7, "reltol": 1e-8, "abstol": 1e-8, **options}
        found = eo.solve(ens, eo.Tsit5(), ensemblealg, **how)
        with placement.on_cpu():
            return found, eo.solve(ens, eo.Tsit5(), eo.EnsembleThreads(), **how)

    found, expected = both(ens=ens, callback=bounce, saveat=0.1)
    np.testing.assert_allclose(found.u, expected.u, atol=1e-9)
    np.testing.assert_allclose(found.integral, expected.integral, atol=1e-9)
    np.testing.assert_allclose(found.events.t, expected.events.t, atol=1e-9)
    found, expected = both(ens=ens, save_everystep=True, batch_size=3)
    np.testing.assert_allclose(found(0.37), expected(0.37), atol=1e-9)

    def output(sol, ctx):
        return (sol.u[-1], ctx.key), ctx.repeat < 2

    found, expected = both(ens=eo.EnsembleProblem(ens.prob, ens.prob_func, output_func=output))
    np.testing.assert_allclose(found.u[0], expected.u[0], atol=1e-9)
    assert (jax.random.key_data(found.u[1]) == jax.random.key_data(expected.u[1])).all()
    summed = eo.EnsembleProblem(
        ens.prob, ens.prob_func, output_func=lambda sol, _: (sol.u[-1], False),
        reduction=eo.sum_reduction,
    )  # fmt: skip
    found, expected = both(ens=summed, batch_size=3)
    np.testing.assert_allclose(found.u, expected.u, atol=1e-9)
    stored = [
        eo.solve(ens, eo.Tsit5(), ensemblealg, trajectories=7, store=tmp_path / "store.zarr")
        for _ in range(2)
    ]
    plain = eo.solve(ens, eo.Tsit5(), ensemblealg, trajectories=7)
    for sim in stored:
        np.testing.assert_array_equal(np.asarray(sim.u), plain.u)


def test_results_that_the_gpu_has_no_room_for(monkeypatch):
    monkeypatch.setattr(placement, "share_of_memory", lambda device: 100)
    sim = solved(1.0, eo.EnsembleThreads(), saveat=0.01)
    assert sim.u.devices() == {jax.devices("cpu")[0]}


@pytest.mark.slow
def test_workers():
    alg = eo.EnsembleDistributed(workers=1)
    with alg, placement.on_cpu():
        expected = solved(1.1, eo.EnsembleThreads()).u
    with alg:
        x = jnp.asarray(1.1)
        sim = solved(x, alg)
        np.testing.assert_array_equal(sim.u, expected)
        assert is_home(sim.u)
        loss = lambda x: jnp.mean(solved(x, alg, saveat=0.25, maxiters=512).u ** 2)  # noqa: E731
        gradient = jax.grad(loss)(x)
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), gradient, rtol=1e-12)
        # Programs of arrays are called from GPU programs, too, as they run elsewhere.
        elsewhere = jax.jit(lambda x: solved(x, alg, rotating).u)(x)
    np.testing.assert_allclose(elsewhere, solved(x, None, rotating).u, rtol=1e-9)
