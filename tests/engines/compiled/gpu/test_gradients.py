"""Gradients by kernels, mapped over and on several devices. (Those of every kind of solve are
compared with code for a core in test_ptx_solves.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ....problems import lorenz


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
