"""Systems of linear equations in f and in callbacks, by the compiled engine: its solves, and their
derivatives."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest

import ensembleode as eo
from ensembleode import ReturnCode

from ..marks import slow_unless


N = 5
OPTIONS = {"abstol": 1e-9, "reltol": 1e-9, "saveat": [0.5, 1.0], "engine": "compiled"}


def mass(u, p):
    """A matrix of each trajectory's own, which isn't symmetric."""
    n = u.shape[0]
    beside = jnp.eye(n, k=1, dtype=u.dtype)
    return p * jnp.eye(n, dtype=u.dtype) + 0.3 * jnp.outer(jnp.sin(u), jnp.cos(u)) + beside


FIELDS = {
    "solve": lambda u, p, t: -jnp.linalg.solve(mass(u, p), u),
    "inverse": lambda u, p, t: -jnp.linalg.inv(mass(u, p)) @ u,
    "determinant": lambda u, p, t: -u * jnp.linalg.det(mass(u, p) / 3),
    "slogdet": lambda u, p, t: -u * jnp.linalg.slogdet(mass(u, p))[1] / 3,
    "cholesky": lambda u, p, t: -jsl.cho_solve(jsl.cho_factor(mass(u, p) @ mass(u, p).T), u),
    "triangle": lambda u, p, t: -jsl.solve_triangular(mass(u, p), u, lower=True, trans=1),
    "qr": lambda u, p, t: -jnp.linalg.qr(mass(u, p))[1].T @ u / 9,
    "exponential": lambda u, p, t: -jsl.expm(mass(u, p) / 9) @ u,
}
METHODS = {"Tsit5": eo.Tsit5(), "Rodas5P": eo.Rodas5P()}


def ensemble(field, n, ps):
    u0 = jnp.linspace(0.5, 1.0, n).astype(ps.dtype)
    prob = eo.ODEProblem(field, u0, (0.0, 1.0), ps[0])
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + 0.1 * ctx.index), p=ps[ctx.index])
    )


def by_hand(field, n, ps, steps=128):
    """The same solves by the classical method of Runge and Kutta in JAX."""
    u0 = jnp.linspace(0.5, 1.0, n)
    h = 1.0 / steps

    def end(i, p):
        def step(_, u):
            a = field(u, p, 0.0)
            b = field(u + h / 2 * a, p, 0.0)
            c = field(u + h / 2 * b, p, 0.0)
            return u + h / 6 * (a + 2 * b + 2 * c + field(u + h * c, p, 0.0))

        start = u0 * (1 + 0.1 * i)
        return jax.lax.scan(lambda u, _: (step(0, u), None), start, None, length=steps)[0]

    return jax.vmap(end)(jnp.arange(float(len(ps))), ps)


CASES = [
    *((name, "Tsit5", 3) for name in FIELDS if name != "exponential"),
    *((name, "Rodas5P", 3) for name in ("solve", "qr", "slogdet")),
    *((name, "Tsit5", 6) for name in ("solve", "cholesky", "determinant", "triangle")),
    *(("exponential", method, 2) for method in METHODS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method", "n"), CASES)
def test_solves_and_gradients(name, method, n):
    field, ps = FIELDS[name], 3.0 + 0.2 * jnp.arange(float(N))

    def loss(ps):
        sim = eo.solve(ensemble(field, n, ps), METHODS[method], trajectories=N, **OPTIONS)
        return jnp.sum(jnp.sin(sim.u[:, -1])), sim.u[:, -1]

    def other(ps):
        ends = by_hand(field, n, ps)
        return jnp.sum(jnp.sin(ends)), ends

    (_, ends), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(ps)
    (_, expected), slopes = jax.jit(jax.value_and_grad(other, has_aux=True))(ps)
    np.testing.assert_allclose(ends, expected, rtol=1e-7)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        for name, method in (("solve", "Tsit5"), ("solve", "Rodas5P"), ("cholesky", "Tsit5"))
    ],
)
def test_second_derivatives(name, method):
    field, ps = FIELDS[name], 3.0 + 0.2 * jnp.arange(2.0)

    def loss(ps, solved):
        return jnp.sum(jnp.sin(solved(ps)))

    def by_engine(ps):
        sim = eo.solve(ensemble(field, 2, ps), METHODS[method], trajectories=2, **OPTIONS)
        return sim.u[:, -1]

    hessians = [
        jax.jit(jax.hessian(lambda ps, solved=solved: loss(ps, solved)))(ps)
        for solved in (by_engine, lambda ps: by_hand(field, 2, ps))
    ]
    np.testing.assert_allclose(*hessians, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "method", "n"),
    [
        slow_unless((name, n) == ("solve", 2), name, method, n)
        for name in ("solve", "inverse", "cholesky")
        for method in ("Rosenbrock23", "Rodas5P")
        for n in (2, 9)
    ],
)
def test_both_modes_differentiate_the_same_steps(name, method, n):
    """To rounding, though the steps are coarse: also where a method needs the Jacobian of f, whose
    derivative is not that of how a linear system is solved."""
    u0, field, alg = jnp.linspace(0.5, 1.0, n), FIELDS[name], getattr(eo, method)()

    def end(p):
        prob = eo.ODEProblem(field, u0 * p, (0.0, 1.0), p)
        sol = eo.solve(prob, alg, abstol=1e-2, reltol=1e-2, engine="compiled")
        return jnp.sum(jnp.sin(sol.u[-1]))

    np.testing.assert_allclose(jax.grad(end)(3.0), jax.jacfwd(end)(3.0), rtol=1e-12)
    if n == 2:
        second = [jax.jacfwd(first(end))(3.0) for first in (jax.grad, jax.jacfwd)]
        np.testing.assert_allclose(*second, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_single_precision(name):
    field = FIELDS[name]
    ps = 3.0 + 0.2 * jnp.arange(float(N))
    options = {**OPTIONS, "abstol": 1e-5, "reltol": 1e-5}
    ends = [
        eo.solve(ensemble(field, 3, ps.astype(d)), trajectories=N, **options).u[:, -1]
        for d in (jnp.float32, jnp.float64)
    ]
    assert ends[0].dtype == jnp.float32
    np.testing.assert_allclose(*ends, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 5])
def test_a_matrix_without_an_inverse_ends_its_trajectory_alone(n):
    """Or one whose numbers are too large."""
    eye = jnp.eye(n)
    bad = jnp.stack([eye, jnp.ones((n, n)), 0 * eye, 1e308 * (eye + 1), jnp.nan * eye])
    matrices = jnp.concatenate([bad, jnp.broadcast_to(2 * eye, (N, n, n))])

    def solve(matrices):
        prob = eo.ODEProblem(
            lambda u, a, t: -jnp.linalg.solve(a, u), jnp.arange(1.0, n + 1), (0.0, 1.0), matrices[0]
        )
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=matrices[ctx.index]))
        return eo.solve(ens, eo.Tsit5(), trajectories=len(matrices), **OPTIONS)

    sim = solve(matrices)
    codes = [ReturnCode(int(c)) for c in sim.retcode]
    assert codes[1] == codes[2] == codes[4] == ReturnCode.Unstable
    assert all(c == ReturnCode.Success for c in (codes[0], *codes[5:]))
    alone = solve(2 * eye[None])
    np.testing.assert_array_equal(sim.u[5:, -1], jnp.broadcast_to(alone.u[0, -1], (N, n)))


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [False, True])
def test_an_affect_that_solves_a_system(derivative):
    """Two bodies collide: momenta and speeds after it are solved for."""

    def affect(i):
        (v, w), (m, k) = i.u[1::2], i.p
        conserved = jnp.array([[m, k], [1.0, -1.0]])
        after = jnp.linalg.solve(conserved, jnp.array([m * v + k * w, w - v]))
        return eo.remake(i, u=i.u.at[1::2].set(after))

    collide = eo.ContinuousCallback(lambda u, t, i: u[2] - u[0], affect)

    def end(masses):
        prob = eo.ODEProblem(
            lambda u, p, t: jnp.array([u[1], 0.0, u[3], 0.0]),
            jnp.array([0.0, 1.0, 1.0, -1.0]),
            (0.0, 1.0),
            masses,
        )
        return eo.solve(prob, callback=collide, **OPTIONS).u[-1]

    def exact(masses):
        m, k = masses
        v = (m - k - 2 * k) / (m + k)
        w = (2 * m - (k - m)) / (m + k)
        return jnp.array([0.5 + 0.5 * v, v, 0.5 + 0.5 * w, w])

    masses = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(end(masses), exact(masses), rtol=1e-8)
    if derivative:
        np.testing.assert_allclose(jax.jacrev(end)(masses), jax.jacfwd(exact)(masses), 1e-7)
