"""Gradients by kernels, compared with those of code for a core and with finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import launch, solves

from ....marks import slow_unless
from ....problems import lorenz, mlp, network


N = 5
TIGHT = {"abstol": 1e-9, "reltol": 1e-9}
X = {
    "u0": jnp.array([1.0, 0, 0.5]),
    "shared": jnp.array([10.0, 8 / 3]),
    "own": jnp.linspace(1.0, 20.0, N),
    "t0": jnp.array(0.0),
    "t1": jnp.array(1.0),
}


def solved(x, ensemblealg, n=N, tolerances=TIGHT, **options):
    """An ensemble with numbers that all trajectories share, and some of each."""

    def prob_func(prob, ctx):
        p = jnp.stack([x["shared"][0], x["own"][ctx.index % N], x["shared"][1]])
        u0 = x["u0"] * (1 + ctx.index.astype(p.dtype) / 10)
        return eo.remake(prob, u0=u0, p=p, tspan=(x["t0"], x["t1"]))

    # (Closed over, so that it is shared.)
    scale = x["shared"][0] / 10
    u0 = jnp.zeros_like(x["u0"])
    prob = eo.ODEProblem(lambda u, p, t: scale * lorenz(u, p, t), u0, (0.0, 1.0), x["u0"])
    ens = eo.EnsembleProblem(prob, prob_func)
    options = {"trajectories": n, **tolerances, **options}
    if isinstance(ensemblealg, eo.EnsembleSerial):
        options.setdefault("engine", "compiled")
    return eo.solve(ens, options.pop("alg", eo.Tsit5()), ensemblealg, **options)


def loss(x, ensemblealg, **options):
    u = solved(x, ensemblealg, **options).u
    return jnp.sum(jnp.sin(jnp.where(jnp.isnan(u), 0, u)))


def close(got, expected, tolerance=1e-9):
    for name in expected:
        size = float(jnp.max(jnp.abs(expected[name])))
        np.testing.assert_allclose(
            got[name], expected[name], rtol=tolerance, atol=tolerance * size, err_msg=name
        )


OPTIONS = {
    "ends": {},
    "end": {"save_start": False},
    "times": {"saveat": jnp.array([0.0, 0.3, 0.3, 0.6, 1.0])},
    "fixed": {"adaptive": False, "dt": 0.01, "saveat": jnp.array([0.25, 1.0])},
    "non-FSAL": {"alg": eo.Vern7(), "saveat": jnp.array([0.25, 0.9])},
    "RK4": {"alg": eo.RK4(), "dt": 0.02},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow_unless(x == "times", x) for x in OPTIONS])
def test_reverse(on_host, name):
    options = OPTIONS[name]
    kernel = jax.grad(loss)(X, eo.EnsembleGPUKernel(), **options)
    core = jax.grad(loss)(X, eo.EnsembleSerial(), **options)
    close(kernel, core)


@pytest.mark.slow
@pytest.mark.parametrize("start", [True, False])
def test_reverse_through_every_step(on_host, start):
    options = {"save_everystep": True, "save_start": start, "maxiters": 200}

    def both(alg):
        sim = solved(X, alg, **options)
        weight = jnp.where(jnp.isnan(sim.u), 0, 1 / sim.lengths[:, None, None])

        def mean(x):
            u = solved(x, alg, **options).u
            return jnp.sum(weight * jnp.sin(jnp.where(weight == 0, 0, u)))

        return jax.grad(mean)(X)

    # (The steps are at other times, by rounding.)
    close(both(eo.EnsembleGPUKernel()), both(eo.EnsembleSerial()), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_forward(on_host, name):
    options = OPTIONS[name] | {"sensealg": eo.ForwardDiffSensitivity()}
    kernel = jax.jacfwd(loss)(X, eo.EnsembleGPUKernel(), **options)
    reverse = jax.grad(loss)(X, eo.EnsembleGPUKernel(), **OPTIONS[name])
    # Those by times follow the field, and so are exact to the tolerances only.
    close(kernel, reverse, 1e-6)
    numbers = ("u0", "shared", "own")
    core = jax.jacfwd(loss)(X, eo.EnsembleSerial(), **options)
    close({k: kernel[k] for k in numbers}, {k: core[k] for k in numbers})


@pytest.mark.slow
def test_finite_differences(on_host):
    options = {"saveat": jnp.array([0.4, 1.0]), "abstol": 1e-12, "reltol": 1e-12}
    alg, step = eo.EnsembleGPUKernel(), 1e-5
    gradient = jax.grad(loss)(X, alg, **options)
    for name in ("u0", "shared", "own", "t0"):
        direction = jnp.cos(jnp.arange(X[name].size, dtype=float)).reshape(X[name].shape)

        def moved(by, name=name, direction=direction):
            return loss(X | {name: X[name] + by * direction}, alg, **options)

        slope = (moved(step) - moved(-step)) / (2 * step)
        np.testing.assert_allclose(jnp.sum(gradient[name] * direction), slope, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("saveat", [None, jnp.array([0.0, 0.35, 1.0])])
def test_few_threads_and_short_records(on_host, monkeypatch, saveat):
    """Each thread has several trajectories, and records them in segments."""
    options = {"saveat": saveat, "maxiters": 400}
    expected = jax.grad(loss)(X, eo.EnsembleGPUKernel(), **options)
    blocks = []
    host = launch.launcher()

    def spy(kernel, n, operands, outputs):
        if kernel.name == "pull_back":
            blocks.append([x.shape for x in outputs])
        return host(kernel, n, operands, outputs)

    monkeypatch.setattr(launch, "launcher", lambda: spy)
    monkeypatch.setattr(solves, "_TURNS", 1)
    monkeypatch.setattr(solves, "_WORKSPACE", 10_000)
    jax.clear_caches()
    got = jax.grad(loss)(X, eo.EnsembleGPUKernel(), **options)
    close(got, expected, 1e-12)
    ((_, _, (_, threads), (turns,), *_),) = blocks
    assert threads == 2
    # (A state of three numbers, its time, and a step.)
    assert turns == 21 * 5 * threads
    steps = solved(X, eo.EnsembleSerial(), **options).stats.naccept
    assert steps.min() > 2 * 21


@pytest.mark.slow
def test_a_network(on_host):
    """Weights that all share."""
    net = network(16)

    def loss(net, alg):
        prob = eo.ODEProblem(mlp, jnp.array([1.0, -0.5]), (0.0, 1.0), net)
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / 10))
        )
        return jnp.sum(eo.solve(ens, eo.Tsit5(), alg, trajectories=N, saveat=0.5, **TIGHT).u ** 2)

    import equinox as eqx

    kernel = eqx.filter_grad(loss)(net, eo.EnsembleGPUKernel())
    core = eqx.filter_grad(loss)(net, eo.EnsembleSerial())
    for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(core), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_a_failed_trajectory_adds_nothing(on_host):
    def loss(x, alg, n):
        def prob_func(prob, ctx):
            # The last one explodes.
            return eo.remake(prob, u0=jnp.where(ctx.index == 2, 1e3, 1.0) * x["u0"])

        prob = eo.ODEProblem(lambda u, p, t: p * u**2, x["u0"], (0.0, 0.5), x["p"])
        ens = eo.EnsembleProblem(prob, prob_func)
        u = eo.solve(ens, eo.Tsit5(), alg, trajectories=n, maxiters=500).u
        return jnp.sum(jnp.where(jnp.isnan(u), 0, u))

    x = {"u0": jnp.array([0.5]), "p": jnp.array(1.0)}
    both = jax.grad(loss)(x, eo.EnsembleGPUKernel(), 3)
    without = jax.grad(loss)(x, eo.EnsembleGPUKernel(), 2)
    np.testing.assert_allclose(both["p"], without["p"], rtol=1e-12)
    np.testing.assert_allclose(both["u0"], without["u0"], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [False, True])
def test_mapped_over(on_host, forward):
    """The gradients of several losses in one launch, by what they share, and by what not."""
    options = {"saveat": jnp.array([0.5, 1.0])}
    derivative = jax.jacfwd if forward else jax.grad
    if forward:
        options["sensealg"] = eo.ForwardDiffSensitivity()
    many = X | {
        "u0": jnp.stack([X["u0"], 2 * X["u0"], 3 * X["u0"]]),
        "shared": jnp.stack([X["shared"], 0.9 * X["shared"], 0.8 * X["shared"]]),
    }
    axes = ({name: 0 if name in ("u0", "shared") else None for name in X},)

    def gradients(alg):
        return jax.vmap(derivative(lambda x: loss(x, alg, **options)), in_axes=axes)(many)

    kernel = gradients(eo.EnsembleGPUKernel())
    for i in range(3):
        x = {k: v[i] if k in ("u0", "shared") else v for k, v in many.items()}
        alone = derivative(lambda x: loss(x, eo.EnsembleSerial(), **options))(x)
        numbers = ("u0", "shared", "own")
        close({k: kernel[k][i] for k in numbers}, {k: alone[k] for k in numbers})


def test_on_several_devices(on_host):
    def gradient(devices, n=300):
        def loss(p):
            prob = eo.ODEProblem(lorenz, X["u0"], (0.0, 0.5), p)
            ens = eo.EnsembleProblem(
                prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / n))
            )
            alg = eo.EnsembleGPUKernel(devices=devices)
            return jnp.sum(eo.solve(ens, eo.Tsit5(), alg, trajectories=n).u)

        return jax.jit(jax.grad(loss))(jnp.array([10.0, 28.0, 8 / 3]))

    np.testing.assert_allclose(gradient(2), gradient(None), rtol=1e-10)
