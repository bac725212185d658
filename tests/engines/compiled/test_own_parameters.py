"""Gradients by many numbers of each trajectory's own, in the compiled engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import kernel

from .test_networks import same


FIXED = {"adaptive": False, "dt": 0.1}
TIGHT = {"abstol": 1e-9, "reltol": 1e-9}
N = 19


def network(u, p, t):
    """Two uses of the same weights, and a number that all share."""
    (w, b, v), decay = p
    return v @ jnp.tanh(w @ u + b) - decay * u + 0.1 * jnp.tanh(w @ (u / 2))[:2]


def forced(u, p, t):
    """By a table that is interpolated, and by its first numbers."""
    (table,), decay = p
    place = t * (len(table) - 1)
    i = jnp.clip(jnp.floor(place).astype(int), 0, len(table) - 2)
    force = table[i] + (place - i.astype(t.dtype)) * (table[i + 1] - table[i])
    return jnp.stack([u[1], force - u[0] - decay * u[1] + table[:3].sum()])


def numbers(field, dtype=float, size=60, n=N):
    """The initial states, each trajectory's own numbers, and what all share."""
    rng = np.random.default_rng(0)
    shapes = [(20, 2), (20,), (2, 20)] if field is network else [(size,)]
    own = [jnp.asarray(rng.normal(size=(n, *shape)) / 2, dtype) for shape in shapes]
    return jnp.asarray(rng.normal(size=(n, 2)), dtype), own, jnp.asarray(0.3, dtype)


def loss_of(field, engine="compiled", threads=1, alg=None, **options):
    def loss(u0, own, shared):
        prob = eo.ODEProblem(field, u0[0], (0.0, 1.0), ([x[0] for x in own], shared))
        ens = eo.EnsembleProblem(
            prob,
            lambda prob, ctx: eo.remake(
                prob, u0=u0[ctx.index], p=([x[ctx.index] for x in own], shared)
            ),
        )
        given = {"trajectories": len(u0), "engine": engine, **options}
        sol = eo.solve(ens, alg or eo.Tsit5(), eo.EnsembleThreads(threads), **given)
        return jnp.sum(sol.u**2)

    return loss


def gradient(field, x, *args, **options):
    return jax.jit(jax.grad(loss_of(field, *args, **options), argnums=(0, 1, 2)))(*x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "dtype", "options"),
    [
        (network, float, FIXED | {"save_start": False, "alg": eo.RK4()}),
        (forced, float, FIXED | {"saveat": 0.3}),
        (network, float, TIGHT | {"saveat": 0.3}),
        (network, "float32", FIXED | {"saveat": 0.3}),
        (forced, "float32", FIXED | {"save_start": False}),
    ],
)
def test_gradient_is_that_of_diffrax(field, dtype, options):
    x = numbers(field, dtype)
    if "dt" not in options:
        options = options | {"stepsize_controller": eo.PIController()}
    found, expected = (gradient(field, x, engine, **options) for engine in ("compiled", "diffrax"))
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if dtype is float else {"rtol": 2e-4, "atol": 1e-5}
    same(found, expected, np.testing.assert_allclose, **tolerance)


@pytest.mark.parametrize("field", [network, pytest.param(forced, marks=pytest.mark.slow)])
def test_bits_of_threads_and_of_a_trajectory_alone(field):
    """Though lanes end at different times, and with that what is collected is added up."""
    x = u0, own, shared = numbers(field, n=150)
    options = {"save_start": False}
    found = gradient(field, x, **options)
    same(gradient(field, x, threads=2, **options), found)
    alone = gradient(field, (u0[70:71], [x[70:71] for x in own], shared), **options)
    same(alone[:2], jax.tree.map(lambda x: x[70:71], found[:2]))


def test_code_does_not_grow_with_the_numbers(monkeypatch):
    found, original = [], kernel.pulling_back

    def pulling_back(d):
        back = original(d)
        found.append(back.text.count("\n"))
        return back

    monkeypatch.setattr(kernel, "pulling_back", pulling_back)
    loss = loss_of(forced, alg=eo.RK4(), **FIXED, save_start=False)
    for size in (200, 4000):
        x = numbers(forced, size=size)
        jax.jit(jax.grad(loss, argnums=1)).lower(*x)
    small, large = found
    assert large < 1.1 * small < 10_000


def test_numbers_that_are_not_used():
    x = numbers(lambda u, p, t: -p[1] * u)
    _, (found,), shared = gradient(lambda u, p, t: -p[1] * u, x, **FIXED, save_start=False)
    np.testing.assert_array_equal(found, np.zeros((N, 60)))
    assert shared < 0


def kicked():
    """Callbacks that read each trajectory's own numbers."""
    return eo.CallbackSet(
        eo.ContinuousCallback(
            lambda u, t, i: u[0] - 0.3 - 0.01 * i.p[0][1][2],
            lambda i: eo.remake(i, u=i.u + jnp.stack([0.1 * i.p[0][1][0], 0.2])),
        ),
        eo.PresetTimeCallback(
            np.array([0.4, 0.7]), lambda i: eo.remake(i, u=0.9 * i.u + 0.1 * i.p[0][2][:, 3])
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"callback": kicked()},
        {"alg": eo.Rodas5P()},
        {"alg": eo.AutoTsit5(eo.Rosenbrock23())},
    ],
    ids=["callbacks", "Rodas5P", "AutoTsit5"],
)
def test_gradient_is_that_of_finite_differences(options):
    x = numbers(network)
    loss = loss_of(network, **TIGHT, save_start=False, **options)
    rng, h = np.random.default_rng(1), 1e-5
    along = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), x)
    found = gradient(network, x, **TIGHT, save_start=False, **options)
    moved = (jax.tree.map(lambda x, d, h=h: x + h * d, x, along) for h in (h, -h))
    up, down = (jax.jit(loss)(*x) for x in moved)
    derivative = sum(map(jnp.vdot, jax.tree.leaves(found), jax.tree.leaves(along)))
    np.testing.assert_allclose(derivative, (up - down) / (2 * h), rtol=1e-5)
