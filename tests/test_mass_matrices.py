"""Mass matrices, and differential-algebraic equations of index one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import ensembleode as eo
from ensembleode.fields.derivatives.elimination import factors_of
from ensembleode.solvers.mass_matrix import mass_matrix_of, mixing, rows_for_pivots
from ensembleode.training.multiple_shooting import multiple_shooting

from .engines.test_julia_steps import robertson
from .marks import slow_unless
from .serve.running import Running
from .solvers.test_rosenbrock import METHODS


few = functools.partial(
    pytest.mark.parametrize,
    "alg",
    [slow_unless(x is METHODS[1], x) for x in METHODS],
    ids=lambda x: type(x).__name__,
)
TIGHT: Any = {"abstol": 1e-9, "reltol": 1e-9}


def circle(u, p, t):
    """`x' = -p z, z = sqrt(1 - x^2)` from a state with `z > 0`: `x = sin(angle - p t)`."""
    x, z = u
    return jnp.stack([-p * z, x**2 + z**2 - 1.0])


CIRCLE = eo.ODEFunction(circle, mass_matrix=[1.0, 0.0])


def on_circle(angle, p, f=CIRCLE, tspan=(0.0, 1.0), **options):
    u0 = jnp.stack([jnp.sin(angle), jnp.cos(angle)])
    return eo.ODEProblem(f, u0, tspan, p, **options)


def coupled(u, p, t):
    """Equations that are not linear, and depend on the time."""
    return jnp.stack([-p * u[0] ** 2 + u[1], jnp.sin(t) - u[1] * u[2], -5.0 * u[2] + u[0]])


MASS = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, -0.5], [0.3, 0.0, 3.0]])


def of_coupled(f, p=0.7, **options):
    return eo.ODEProblem(f, jnp.array([1.0, 0.5, -0.2]), (0.0, 2.0), jnp.asarray(p), **options)


#
# The matrix, and how it is eliminated
#


# Matrices of small whole numbers, in which pivots often vanish.
small_matrices = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.integers(-1, 1), min_size=n * n, max_size=n * n).map(
        lambda x: np.array(x, float).reshape(n, n)
    )
)


def is_regular(matrix):
    return abs(np.linalg.det(matrix)) > 0.5


def without_exchanges(matrix, order):
    """The pivots of an elimination in this order."""
    matrix, pivots = matrix.copy(), []
    for k in order:
        pivots.append(matrix[k, k])
        others = [i for i in order if i not in order[: len(pivots)]]
        for i in others:
            matrix[i] -= matrix[i, k] / matrix[k, k] * matrix[k]
    return np.array(pivots)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3), small_matrices.filter(is_regular), st.randoms(), st.data())
def test_no_pivot_vanishes_where_the_index_is_one(n, of_equations, random, data):
    """A random order of the equations, of the components and of the elimination, and any coupling
    of both kinds of components."""
    m = len(of_equations)
    size = n + m
    coupling = data.draw(st.lists(st.integers(-1, 1), min_size=size**2, max_size=size**2))
    jac = np.array(coupling, float).reshape(size, size)
    jac[n:, n:] = of_equations
    matrix = np.zeros((size, size))
    matrix[:n, :n] = np.eye(n)
    order, columns = (random.sample(range(size), size) for _ in range(2))
    jac, matrix = jac[order][:, columns], matrix[order][:, columns]
    mass = mass_matrix_of(matrix)
    assert mass is not None
    pattern = tuple((int(i), int(j)) for i, j in zip(*np.nonzero(jac), strict=True))
    summed = factors_of(rows_for_pivots(mass, pattern), size)
    assert abs(np.linalg.det(summed)) > 1e-3
    h = 1e-8
    found = without_exchanges(summed @ (matrix - h * jac), random.sample(range(size), size))
    # The pivots of algebraic components are as small as h.
    assert (abs(found) > 1e-4 * h).all()


def linear(of_equations, dtype):
    """`x' = -p x` and `G z = c x`, and the solution at the time 1 for `p = 1`."""
    n = len(of_equations)
    c = np.arange(1.0, n + 1)
    start = np.concatenate([[1.0], np.linalg.solve(of_equations, c)])
    matrix = jnp.asarray(of_equations, dtype)

    def f(u, p, t):
        rest = jnp.matmul(matrix, u[1:], precision="highest") - jnp.asarray(c, dtype) * u[0]
        return jnp.concatenate([-p * u[:1], rest])

    f = eo.ODEFunction(f, mass_matrix=np.eye(n + 1)[0])
    prob = eo.ODEProblem(f, jnp.asarray(start, dtype), (0.0, 1.0), jnp.ones((), dtype))
    return prob, start * np.exp(-1)


VANISHING = np.array([[1.0, 1, 0], [1, 1, 1], [0, 1, 1]])
# With numbers of few bits as factors, the sum of its equations had a pivot of zero.
MOVED = np.array(
    [[0.0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]
)


@pytest.mark.parametrize("n", range(2, 9))
def test_factors_of_sums_do_not_add_up_to_zero(n):
    """However equations with ones and minus ones are summed up."""
    for row in mixing(n):
        sums = np.zeros(1)
        for x in row:
            sums = np.concatenate([sums, sums + x, sums - x])
        assert np.sort(abs(sums))[1] > 1e-6  # (the first is that of none)


@pytest.mark.parametrize("of_equations", [VANISHING, MOVED], ids=["vanishing", "moved"])
def test_a_pivot_that_would_vanish(of_equations):
    prob, exact = linear(of_equations, np.float64)
    np.testing.assert_allclose(eo.solve(prob, eo.Rodas5P(), **TIGHT).u[-1], exact, rtol=1e-7)


@pytest.mark.slow
def test_derivatives_where_a_pivot_would_vanish():
    """By a parameter, and by the end of the time."""
    prob, exact = linear(VANISHING, np.float64)

    def end(p, t):
        found = eo.solve(eo.remake(prob, p=p, tspan=(0.0, t)), eo.Rodas5P(), **TIGHT)
        return jnp.sum(found.u[-1] * jnp.arange(1.0, 5.0))

    value, grads = jax.value_and_grad(end, argnums=(0, 1))(1.0, 1.0)
    exact = np.sum(exact * np.arange(1.0, 5.0))
    np.testing.assert_allclose([value, *grads], [exact, -exact, -exact], rtol=1e-7)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(small_matrices.filter(is_regular))
def test_equations_in_a_circle(of_equations):
    for alg, dtype in ((eo.Rodas5P(), np.float64), (eo.Rosenbrock23(), np.float32)):
        prob, exact = linear(of_equations, dtype)
        sol = eo.solve(prob, alg, abstol=1e-5, reltol=1e-4)
        assert sol.retcode == eo.ReturnCode.Success
        np.testing.assert_allclose(sol.u[-1], exact, rtol=0, atol=1e-3 * abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_equations_in_a_circle_by_loops(dtype):
    """Large circles are factorised by loops, backwards too."""
    rng, tol = np.random.default_rng(0), 1e-6 if dtype == np.float64 else 1e-4
    for n in (7, 17):
        found = (rng.choice([0.0, 1.0], (n, n), p=[0.6, 0.4]) for _ in range(100))
        of_equations = next(x for x in found if is_regular(x) and np.linalg.cond(x) < 100)
        prob, exact = linear(of_equations, dtype)

        def end(p, prob=prob):
            sol = eo.solve(eo.remake(prob, p=p), eo.Rodas5P(), abstol=tol, reltol=tol)
            return sol.u[-1].sum(), sol.u[-1]

        (_, value), grad = jax.value_and_grad(end, has_aux=True)(prob.p)
        size = abs(exact).max()
        np.testing.assert_allclose(value, exact, rtol=0, atol=1e-3 * size)
        np.testing.assert_allclose(grad, -exact.sum(), rtol=0, atol=1e-2 * size)


def test_an_entry_that_is_zero_at_the_start():
    """`x' = 1`, `x w + v = 1` and `w + x v = 0`: what the first diagonal entry would be is zero at
    the start."""

    def f(u, p, t):
        x, w, v = u
        return jnp.stack([jnp.ones(()), x * w + v - 1.0, w + x * v])

    f = eo.ODEFunction(f, mass_matrix=[1.0, 0.0, 0.0])
    sol = eo.solve(eo.ODEProblem(f, [0.0, 0.0, 1.0], (0.0, 0.5)), eo.Rodas5P(), **TIGHT)
    np.testing.assert_allclose(sol.u[-1], [0.5, -0.5 / 0.75, 1 / 0.75], rtol=1e-7)


@few()
def test_orders_of_convergence(alg):
    """The orders of both components, for an equation of index one that is not linear."""
    p, angle = jnp.array(1.3), 0.9
    dts = jnp.array([1 / 16, 1 / 32])
    ens = eo.EnsembleProblem(
        on_circle(angle, p), lambda prob, ctx: eo.remake(prob, dt=dts[ctx.index])
    )
    sim = eo.solve(ens, alg, adaptive=False, trajectories=2, save_start=False)
    exact = np.stack([np.sin(angle - 1.3), np.cos(angle - 1.3)])
    errors = np.abs(np.asarray(sim.u[:, 0]) - exact)
    assert (errors[1] < 1.25 * errors[0] / 2**alg.order).all(), errors
    assert (errors[1] > 1e-13).all()


@few()
def test_within_steps(alg):
    times = jnp.array([0.13, 0.5, 0.77])
    sol = eo.solve(on_circle(0.9, jnp.array(1.3)), alg, saveat=times, **TIGHT)
    exact = np.stack([np.sin(0.9 - 1.3 * times), np.cos(0.9 - 1.3 * times)], axis=1)
    np.testing.assert_allclose(sol.u, exact, atol=3e-7)


def robertson_dae(u, k, t):
    return robertson(u, k, t).at[2].set(jnp.sum(u) - 1.0)


@pytest.mark.slow
@few()
def test_robertson_as_a_dae(alg):
    """The solution doesn't depend on the order of the equations."""
    u0, k, order = jnp.array([1.0, 0.0, 0.0]), jnp.array([0.04, 3e7, 1e4]), np.array([2, 0, 1])
    mass = np.diag([1.0, 1.0, 0.0])
    options: Any = {"reltol": 1e-7, "abstol": 1e-11, "save_start": False}

    def permuted(u, k, t):
        return robertson_dae(u, k, t)[order]

    found = []
    for f, m in ((robertson_dae, mass), (permuted, mass[order])):
        prob = eo.ODEProblem(eo.ODEFunction(f, mass_matrix=m), u0, (0.0, 1e5), k)
        found.append(eo.solve(prob, alg, **options))
    ode = eo.ODEProblem(robertson, u0, (0.0, 1e5), k)
    exact = eo.solve(ode, eo.Rodas5P(), reltol=1e-10, abstol=1e-14, save_start=False)
    np.testing.assert_allclose(found[0].u, exact.u, rtol=1e-4 if alg.order < 3 else 1e-6)
    np.testing.assert_allclose(found[0].u, found[1].u, rtol=1e-10)
    assert found[0].stats.nreject == found[1].stats.nreject


# Accepted and rejected steps at the tolerances `reltol` 1e-4 and 1e-7, `abstol` a thousandth of
# these, by Julia 1.10.8 with OrdinaryDiffEqRosenbrock 2.6.6. (There, Rosenbrock23 only takes
# diagonal matrices.)
STEPS = {
    "Rosenbrock23": {"robertson": [(96, 0), (976, 0)], "circle": [(1889, 0)]},
    "Rodas4": {
        "robertson": [(107, 0), (403, 0)],
        "circle": [(20, 0), (65, 0)],
        "coupled": [(22, 0), (79, 2)],
    },
    "Rodas5P": {
        "robertson": [(79, 0), (201, 1)],
        "circle": [(21, 0), (55, 0)],
        "coupled": [(14, 0), (30, 0)],
    },
}


@few()
def test_steps_are_those_of_ordinary_diff_eq(alg):
    rates = jnp.array([0.04, 3e7, 1e4])
    dae = eo.ODEFunction(robertson_dae, mass_matrix=[1.0, 1.0, 0.0])
    probs = {
        "robertson": eo.ODEProblem(dae, jnp.array([1.0, 0.0, 0.0]), (0.0, 1e5), rates),
        "circle": on_circle(0.9, jnp.array(1.3)),
        "coupled": of_coupled(eo.ODEFunction(coupled, mass_matrix=MASS)),
    }
    for name, counts in STEPS[type(alg).__name__].items():
        for reltol, count in zip((1e-4, 1e-7), counts, strict=False):
            sol = eo.solve(probs[name], alg, reltol=reltol, abstol=reltol * 1e-3)
            assert (int(sol.stats.naccept), int(sol.stats.nreject)) == count, (name, reltol)


#
# Matrices that are not singular
#


@few()
def test_a_full_matrix_is_its_inverse_times_f(alg):
    inverse = jnp.asarray(np.linalg.inv(MASS))
    probs = [
        of_coupled(eo.ODEFunction(coupled, mass_matrix=MASS)),
        of_coupled(lambda u, p, t: jnp.matmul(inverse, coupled(u, p, t))),
    ]
    with_mass, without = (eo.solve(prob, alg, saveat=0.5, dt=0.01) for prob in probs)
    assert int(with_mass.stats.naccept) == int(without.stats.naccept)
    np.testing.assert_allclose(with_mass.u, without.u, rtol=1e-9)


@pytest.mark.parametrize("order", [slow_unless(False, "own"), "turned"])
def test_a_full_matrix_in_loops(order):
    """17 components are eliminated by loops; permuted equations are in the rows of others."""
    rng = np.random.default_rng(3)
    n = 17
    a, mass = rng.normal(size=(n, n)) - 5 * np.eye(n), 0.2 * rng.normal(size=(n, n)) + np.eye(n)
    turn = slice(None, None, -1 if order == "turned" else 1)
    f = eo.ODEFunction(lambda u, p, t: (a @ jnp.sin(u))[turn], mass_matrix=mass[turn])
    prob = eo.ODEProblem(f, jnp.linspace(0.1, 1.0, n), (0.0, 1.0))
    plain = eo.remake(prob, f=lambda u, p, t: np.linalg.inv(mass) @ (a @ jnp.sin(u)))
    found, right = (
        eo.solve(x, eo.Rodas5P(), abstol=1e-9, reltol=1e-9).u[-1] for x in (prob, plain)
    )
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_gradients_with_a_full_matrix_in_loops():
    n, rng = 14, np.random.default_rng(0)
    mass = np.eye(n) + 0.1 * rng.standard_normal((n, n))
    coupling = jnp.asarray(rng.standard_normal((n, n)) / n - 2 * np.eye(n))
    inverse = jnp.asarray(np.linalg.inv(mass))

    def f(u, p, t):
        return jnp.matmul(coupling, jnp.sin(p * u))

    def end(p, f):
        prob = eo.ODEProblem(f, jnp.linspace(0.5, 1.0, n), (0.0, 1.0), p)
        sol = eo.solve(prob, eo.Rodas4(), dt=0.01)
        return jnp.sum(sol.u[-1] * jnp.arange(1.0, n + 1))

    fs = eo.ODEFunction(f, mass_matrix=mass), lambda u, p, t: jnp.matmul(inverse, f(u, p, t))
    with_mass, without = (jax.value_and_grad(end)(1.3, x) for x in fs)
    np.testing.assert_allclose(with_mass, without, rtol=1e-9)


@pytest.mark.slow
def test_a_diagonal_is_a_matrix():
    numbers = np.array([2.0, 0.5, 3.0])
    ends = [
        eo.solve(of_coupled(eo.ODEFunction(coupled, mass_matrix=m)), eo.Rodas4()).u
        for m in (numbers, np.diag(numbers))
    ]
    np.testing.assert_array_equal(*ends)
    plain = eo.solve(of_coupled(coupled), eo.Rodas4()).u
    same = eo.solve(of_coupled(eo.ODEFunction(coupled, mass_matrix=np.eye(3))), eo.Rodas4()).u
    np.testing.assert_array_equal(same, plain)


@pytest.mark.slow
def test_of_states_that_are_pytrees():
    """JAX sorts the names."""

    def f(u, p, t):
        return {"z": u["z"] ** 2 + u["a"] ** 2 - 1.0, "a": -p * u["z"]}

    u0 = {"z": jnp.cos(0.9), "a": jnp.sin(0.9)}
    for mass in ({"a": 1.0, "z": 0.0}, np.array([[0.0, 0.0], [0.0, 1.0]])):
        prob = eo.ODEProblem(eo.ODEFunction(f, mass_matrix=mass), u0, (0.0, 1.0), 1.3)
        sol = eo.solve(prob, eo.Rodas5P(), **TIGHT)
        np.testing.assert_allclose(sol.u["a"][-1], np.sin(0.9 - 1.3), atol=1e-8)


@pytest.mark.slow
def test_an_inconsistent_start_has_a_return_code_and_neighbours_keep_their_bits():
    angles = jnp.linspace(0.2, 0.9, 9)
    off = jnp.zeros(9).at[3].set(1e-2)

    def prob_func(prob, ctx):
        at = on_circle(angles[ctx.index], prob.p)
        return eo.remake(at, u0=at.u0.at[1].add(off[ctx.index]))

    ens = eo.EnsembleProblem(on_circle(0.1, jnp.array(1.3)), prob_func)
    sim = eo.solve(ens, METHODS[1], trajectories=9)
    assert isinstance(sim, eo.EnsembleSolution)
    assert sim.retcode[3] == eo.ReturnCode.InitialFailure
    assert sim.failed.tolist() == [3]
    off = jnp.zeros(9)
    good = eo.solve(ens, METHODS[1], trajectories=9)
    others = np.arange(9) != 3
    np.testing.assert_array_equal(sim.u[others], good.u[others])
    assert (good.retcode == eo.ReturnCode.Success).all()


@pytest.mark.slow
def test_an_inconsistent_start_with_fixed_steps():
    prob = eo.remake(on_circle(0.3, jnp.array(1.3)), u0=jnp.array([0.5, 0.5]))
    sol = eo.solve(prob, METHODS[1], dt=0.1, adaptive=False)
    assert sol.retcode == eo.ReturnCode.InitialFailure
    loose = eo.solve(prob, METHODS[1], abstol=1.0, dt=0.1, adaptive=False)
    assert loose.retcode == eo.ReturnCode.Success


BROWN = eo.BrownFullBasicInit()


@pytest.mark.slow
def test_starts_that_are_made_consistent():
    """Each trajectory finds a consistent start from algebraic components that are not consistent.
    If there is no solution, or a NaN, the trajectory has a return code."""
    xs = jnp.array([0.0, 0.3, 0.6, 1.5, jnp.nan, 0.9])

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=jnp.stack([xs[ctx.index], 0.3 + 0.1 * ctx.index]))

    ens = eo.EnsembleProblem(on_circle(0.3, jnp.array(1.3)), prob_func)
    options: Any = {"trajectories": 6, "initializealg": BROWN}
    sim = eo.solve(ens, METHODS[1], **options)
    good = np.array([0, 1, 2, 5])
    x = np.asarray(xs)[good]
    np.testing.assert_allclose(sim.u[good, 0], np.stack([x, np.sqrt(1 - x**2)], axis=1), atol=1e-10)
    names = [eo.ReturnCode(code).name for code in np.asarray(sim.retcode)[[3, 4]]]
    assert names == ["InitialFailure", "Unstable"]
    # A failed start is reported as it was given, and a consistent one isn't changed.
    np.testing.assert_array_equal(np.asarray(sim.u0)[:, 1], 0.3 + 0.1 * np.arange(6))
    prob = on_circle(0.3, jnp.array(1.3))
    ends = [eo.solve(prob, METHODS[1], initializealg=x).u for x in (eo.CheckInit(), BROWN)]
    np.testing.assert_array_equal(*ends)


def of_found_start(x, **options):
    """A solution as a function of the angle and the parameter."""
    angle, p = x
    prob = eo.remake(on_circle(angle, p), u0=jnp.stack([jnp.sin(angle), jnp.ones(())]))
    return eo.solve(prob, METHODS[-1], initializealg=BROWN, **TIGHT, **options)


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [jax.jacrev, jax.hessian])
def test_derivatives_through_starts_that_are_found(derivative):
    """Derivatives of the states at the start and at a later time."""

    def exact(x):
        t = jnp.array([0.0, 1.0])
        angles = x[0] - x[1] * t
        return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=1)

    x = jnp.array([0.9, 1.3])
    found = derivative(lambda x: of_found_start(x).u)(x)
    np.testing.assert_allclose(found, derivative(exact)(x), atol=1e-6)


@pytest.mark.slow
def test_derivatives_through_starts_of_equations_with_branches():
    """In both modes: the branch that isn't taken has no derivative."""

    def f(u, p, t):
        x, z = u
        return jnp.stack([-p * x, lax.cond(x > 1, lambda: jnp.sqrt(x - 1), lambda: p * x) - z])

    function = eo.ODEFunction(f, mass_matrix=np.diag([1.0, 0.0]))

    def starts(ps):
        prob = eo.ODEProblem(function, [0.7, 0.0], (0.0, 1.0), ps[0])
        sim = eo.solve(eo.EnsembleProblem(prob, p=ps), eo.Rodas5P(), initializealg=BROWN)
        return jnp.sum(sim.u[:, 0, 1] ** 2)

    ps = jnp.array([0.5, 2.0])
    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(derivative(starts)(ps), 2 * ps * 0.49, rtol=1e-9)


@pytest.mark.slow
def test_found_starts_within_jit_and_beside_events_and_integrals():
    def loss(x):
        halved = eo.PresetTimeCallback(
            jnp.array([0.5]), lambda i: eo.remake(i, p=i.p / 2), save_positions=(False, False)
        )
        angle, p = x
        prob = on_circle(angle, p, integrand=lambda u, p, t: u[1], callback=halved)
        prob = eo.remake(prob, u0=jnp.stack([jnp.sin(angle), jnp.ones(())]))
        sol = eo.solve(prob, METHODS[-1], initializealg=BROWN, **TIGHT)
        return jnp.sum(sol.u[-1]) + sol.integral[-1]

    def exact(x):
        angle, p = x
        middle, end = angle - 0.5 * p, angle - 0.75 * p
        integral = (jnp.sin(angle) - jnp.sin(middle)) / p
        integral += (jnp.sin(middle) - jnp.sin(end)) / (p / 2)
        return jnp.sin(end) + jnp.cos(end) + integral

    x = jnp.array([0.9, 1.3])
    value, grad = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, exact(x), rtol=1e-8)
    np.testing.assert_allclose(grad, jax.grad(exact)(x), rtol=1e-7)


@pytest.mark.parametrize("mass", [(1.0, np.zeros(2)), np.diag([1.0, 0.0, 0.0])], ids=["own", "one"])
def test_for_a_state_that_is_a_tuple(mass):
    f = eo.ODEFunction(lambda u, p, t: (-u[0], u[1] - p * u[0]), mass_matrix=mass)
    prob = eo.ODEProblem(
        f, (jnp.ones(()), jnp.array([1.0, 2.0])), (0.0, 1.0), jnp.array([1.0, 2.0])
    )
    x, y = eo.solve(prob, eo.Rodas4(), **TIGHT).u
    np.testing.assert_allclose(x[-1], np.exp(-1), rtol=1e-7)
    np.testing.assert_allclose(y[-1], np.exp(-1) * np.array([1.0, 2.0]), rtol=1e-7)


@pytest.mark.slow
def test_for_a_tuple_of_numbers():
    f = eo.ODEFunction(lambda u, p, t: (u[1] - u[0], -u[1]), mass_matrix=(0.0, 1.0))
    prob = eo.ODEProblem(f, (jnp.ones(()), jnp.ones(())), (0.0, 1.0))
    sol = eo.solve(prob, eo.Rodas4(), **TIGHT)
    np.testing.assert_allclose(np.stack(sol.u)[:, -1], np.exp(-1), rtol=1e-7)


#
# Derivatives
#


@jax.custom_vjp
def square(u):
    return u**2


square.defvjp(lambda u: (u**2, u), lambda u, ct: (2 * u * ct,))


@pytest.mark.slow
def test_of_equations_with_reverse_mode_only():
    """`x' = -p x` and `z^2 = x`: a start that is found, states within steps, and derivatives by `p`
    and by the end."""

    def f(u, p, t):
        return jnp.stack([-p * u[0], square(u)[1] - u[0]])

    f = eo.ODEFunction(f, mass_matrix=[1.0, 0.0])
    prob = eo.ODEProblem(f, [1.0, 0.7], (0.0, 1.0), 1.3)

    def end(p, t):
        at = eo.remake(prob, p=p, tspan=(0.0, t))
        return eo.solve(at, eo.Rodas5P(), initializealg=BROWN, **TIGHT).u[-1, 1]

    found = jax.value_and_grad(end, argnums=(0, 1))(1.3, 1.0)
    z = np.exp(-0.65)
    np.testing.assert_allclose([found[0], *found[1]], [z, -0.5 * z, -0.65 * z], rtol=1e-7)
    start = eo.remake(prob, u0=jnp.ones(2))
    sol = eo.solve(start, eo.Rodas5P(), save_everystep=True, **TIGHT)
    np.testing.assert_allclose(sol(0.3), [np.exp(-0.39), np.exp(-0.195)], rtol=1e-6)
    with pytest.raises(TypeError, match=r"jax\.custom_jvp, which has both modes"):
        jax.jvp(lambda p: end(p, 1.0), (1.3,), (1.0,))


@pytest.mark.slow
def test_derivatives_by_closed_forms():
    """First and second derivatives of both components, with respect to the start, a parameter and
    the end."""
    alg = METHODS[-1]

    def found(x):
        angle, p, end = x
        sol = eo.solve(on_circle(angle, p, tspan=(0.0, end)), alg, **TIGHT)
        return jnp.sum(sol.u[-1] * jnp.array([1.0, 2.0]))

    def exact(x):
        angle, p, end = x
        return jnp.sin(angle - p * end) + 2 * jnp.cos(angle - p * end)

    x = jnp.array([0.9, 1.3, 0.8])
    np.testing.assert_allclose(jax.grad(found)(x), jax.grad(exact)(x), atol=1e-7)
    np.testing.assert_allclose(jax.hessian(found)(x), jax.hessian(exact)(x), atol=1e-6)


@few()
def test_derivatives_are_of_the_steps_made(alg):
    """Gradients with a full matrix and saved states within steps, compared with finite differences
    at fixed steps."""
    how: Any = {"dt": 0.25, "adaptive": False, "saveat": jnp.array([0.3, 2.0])}
    f = eo.ODEFunction(coupled, mass_matrix=MASS)

    @jax.jit
    def loss(p):
        return jnp.sum(jnp.sin(eo.solve(of_coupled(f, p), alg, **how).u))

    d = 1e-5
    difference = (loss(0.7 + d) - loss(0.7 - d)) / (2 * d)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(0.7), difference, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("mass", [[1.0, 0.0], [1.0, 0.0, 0.0], "full"], ids=str)
def test_events_and_integrals(mass):
    """`x` is zero at `t = angle / p`, and the integral of `z` until then is `sin(angle) / p`. The
    derivatives of both are compared, too."""

    def three(u, p, t):
        """Equations with another algebraic component, before they are permuted."""
        x, z, w = u
        return jnp.stack([x**2 + z**2 - 1.0, w - z * x, -p * z])

    def plain(u, p, t):
        """`z' = p x`, and sums of both equations."""
        x, z = u
        return jnp.stack([-p * z + p * x, -p * z - p * x])

    f = CIRCLE
    if mass == "full":
        f = eo.ODEFunction(plain, mass_matrix=[[1.0, 1.0], [1.0, -1.0]])
    elif len(mass) == 3:
        f = eo.ODEFunction(three, mass_matrix=[[0.0] * 3, [0.0] * 3, [1.0, 0.0, 0.0]])
    stop = eo.ContinuousCallback(lambda u, t, integrator: u[0], eo.terminate)

    def found(x):
        angle, p = x
        parts = [jnp.sin(angle), jnp.cos(angle)]
        if mass != "full" and len(mass) == 3:
            parts.append(parts[0] * parts[1])
        prob = eo.ODEProblem(
            f, jnp.stack(parts), (0.0, 3.0), p, callback=stop, integrand=lambda u, p, t: u[1]
        )
        sol = eo.solve(prob, eo.Rodas5P(), abstol=1e-10, reltol=1e-10, max_events=1)
        assert sol.events is not None
        return jnp.stack([sol.events.t[0], sol.integral[-1]])

    def exact(x):
        angle, p = x
        return jnp.stack([angle / p, jnp.sin(angle) / p])

    x = jnp.array([0.9, 1.3])
    np.testing.assert_allclose(found(x), exact(x), rtol=1e-8)
    np.testing.assert_allclose(jax.jacrev(found)(x), jax.jacrev(exact)(x), atol=1e-7)
    if mass == "full":
        np.testing.assert_allclose(jax.hessian(found)(x), jax.hessian(exact)(x), atol=1e-6)


@pytest.mark.slow
def test_an_affect_that_leaves_the_equations_ends_it():
    def off(integrator):
        return eo.remake(integrator, u=integrator.u * 1.1)

    callback = eo.PresetTimeCallback(jnp.array([0.5]), off)
    sol = eo.solve(on_circle(0.3, jnp.array(1.3), callback=callback), eo.Rodas4())
    assert sol.retcode == eo.ReturnCode.InitialFailure


@pytest.mark.slow
def test_affects_change_differential_components_alone():
    """`x' = -(w + z) / 2`, `w^3 = x^3` and `w + z = 2 x`: so `x' = -x`, and a dose `d` at the time
    `s` leaves `d exp(s - 1)`, with derivatives by both."""

    def f(u, p, t):
        x, z, w = u
        return jnp.stack([-(w + z) / 2, w**3 - x**3, w + z - 2 * x])

    def end(dose, time, init: Any = BROWN):
        callback = eo.PresetTimeCallback(
            time[None], lambda i: eo.remake(i, u=i.u.at[0].add(dose)), save_positions=(False, True)
        )
        dae = eo.ODEFunction(f, mass_matrix=[1.0, 0.0, 0.0])
        prob = eo.ODEProblem(dae, jnp.ones(3), (0.0, 1.0), callback=callback)
        sol = eo.solve(prob, eo.Rodas5P(), initializealg=init, **TIGHT)
        return sol.u[-1].sum(), sol.retcode

    x = 2.0, jnp.asarray(0.5)
    (value, code), grads = jax.value_and_grad(end, argnums=(0, 1), has_aux=True)(*x)
    fall = 3 * np.exp(-0.5)
    np.testing.assert_allclose([value, *grads], [3 * np.exp(-1) + 2 * fall, fall, 2 * fall], 1e-7)
    assert code == eo.ReturnCode.Success
    assert end(*x, init=None)[1] == eo.ReturnCode.InitialFailure


@pytest.mark.slow
def test_equations_that_jump():
    """`x' = -z` and `z^3 = p x^3`, where p becomes 8 at the time 0.5: by an affect, which solves
    for z again."""

    def f(u, p, t):
        return jnp.stack([-u[1], u[1] ** 3 - p * u[0] ** 3])

    callback = eo.PresetTimeCallback(jnp.array([0.5]), lambda i: eo.remake(i, p=jnp.asarray(8.0)))
    f = eo.ODEFunction(f, mass_matrix=[1.0, 0.0])
    prob = eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0), jnp.ones(()), callback=callback)
    sol = eo.solve(prob, eo.Rodas5P(), initializealg=BROWN, **TIGHT)
    np.testing.assert_allclose(sol.u[-1], np.exp(-1.5) * np.array([1.0, 2.0]), rtol=1e-7)


@pytest.mark.slow
@few()
def test_linear_equations_that_jump_at_known_times(alg):
    """`x' = -z`, and `z = x` until the time 0.5, then `z = x + 1`: the first step solves for z."""

    def f(u, p, t):
        return jnp.stack([-u[1], u[1] - u[0] - jnp.where(t > 0.5, 1.0, 0.0)])

    prob = eo.ODEProblem(eo.ODEFunction(f, mass_matrix=[1.0, 0.0]), jnp.ones(2), (0.0, 1.0))
    sol = eo.solve(prob, alg, d_discontinuities=[0.5], abstol=1e-8, reltol=1e-6)
    x = (np.exp(-0.5) + 1) * np.exp(-0.5) - 1
    np.testing.assert_allclose(sol.u[-1], [x, x + 1], atol=2e-5)


def jumping(at, factor, tspan=(0.0, 1.0)):
    """`x' = -z` and `z^3 = x^3`; and from the time `at` on, `z^3 = factor^3 x^3`."""

    def f(u, p, t):
        is_after = (t - p[0]) * (tspan[1] - tspan[0]) > 0
        return jnp.stack([-u[1], u[1] ** 3 - jnp.where(is_after, p[1] ** 3, 1.0) * u[0] ** 3])

    f = eo.ODEFunction(f, mass_matrix=[1.0, 0.0])
    p = jnp.stack([jnp.asarray(at), jnp.asarray(factor)])
    return eo.ODEProblem(f, jnp.ones(2), tspan, p)


@few()
def test_equations_that_jump_at_known_times_are_solved_again(alg):
    how = {"initializealg": BROWN, "d_discontinuities": [0.5], "abstol": 1e-8, "reltol": 1e-6}
    sol = eo.solve(jumping(0.5, 2.0), alg, **how)
    np.testing.assert_allclose(sol.u[-1], np.exp(-1.5) * np.array([1.0, 2.0]), rtol=2e-4)
    assert sol.events is None


@pytest.mark.slow
def test_equations_that_jump_backwards_and_with_a_callback():
    """The callback is at the same time, and comes before the jump."""
    how = {"initializealg": BROWN, "d_discontinuities": [0.5], **TIGHT}
    alg = eo.Rodas5P()
    back = eo.solve(jumping(0.5, 2.0, (1.0, 0.0)), alg, **how)
    np.testing.assert_allclose(back.u[-1], np.exp(1.5) * np.array([1.0, 2.0]), rtol=1e-5)

    def halved(integrator):
        return eo.remake(integrator, u=integrator.u * jnp.array([0.5, 1.0]))

    both = eo.solve(jumping(0.5, 2.0), alg, callback=eo.PresetTimeCallback([0.5], halved), **how)
    np.testing.assert_allclose(both.u[-1], np.exp(-1.5) * np.array([0.5, 1.0]), rtol=1e-5)
    assert both.events is not None
    assert both.events.which.tolist() == [0]
    np.testing.assert_allclose(both.events.u_after, 0.5 * both.events.u_before, rtol=1e-7)


@pytest.mark.slow
def test_equations_that_jump_without_a_solution_are_a_return_code():
    def f(u, p, t):
        return jnp.stack([-u[1], u[1] ** 2 - jnp.where(t > 0.5, -1.0, 1.0)])

    prob = eo.ODEProblem(eo.ODEFunction(f, mass_matrix=[1.0, 0.0]), jnp.ones(2), (0.0, 1.0))
    how = {"initializealg": BROWN, "d_discontinuities": [0.5], **TIGHT}
    sol = eo.solve(prob, eo.Rodas5P(), **how)
    assert sol.retcode == eo.ReturnCode.InitialFailure


@pytest.mark.slow
def test_gradients_where_equations_jump():
    """By the time of each trajectory's jump and by its size: `x = exp(-at - factor (1 - at))`."""

    def ends(p):
        def own(prob, ctx):
            at = p[ctx.index, :1]
            return eo.remake(prob, p=p[ctx.index], d_discontinuities=at)

        ens = eo.EnsembleProblem(jumping(0.5, 2.0), own)
        how = {"initializealg": BROWN, "trajectories": 2, **TIGHT}
        return eo.solve(ens, eo.Rodas5P(), **how).u[:, -1, 0]

    p = jnp.array([[0.3, 2.0], [0.6, 1.5]])
    at, factor = p.T
    exact = jnp.exp(-at - factor * (1 - at))
    np.testing.assert_allclose(ends(p), exact, rtol=1e-7)
    gradient = jax.jit(jax.grad(lambda p: ends(p).sum()))(p)
    expected = exact[:, None] * jnp.stack([factor - 1, at - 1], 1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.slow
def test_stores_tell_mass_matrices_apart(tmp_path):
    def stored(mass, jac=None):
        ens = eo.EnsembleProblem(
            of_coupled(eo.ODEFunction(coupled, mass_matrix=mass, jac=jac)),
            lambda prob, ctx: eo.remake(prob, p=0.1 * ctx.sim_id),
        )
        return eo.solve(ens, eo.Rodas4(), trajectories=3, store=tmp_path / "sims")

    sim = stored(MASS)
    np.testing.assert_array_equal(stored(MASS).u, sim.u)
    with pytest.raises(eo.StoreError, match="what is known of f"):
        stored(2 * MASS)
    with pytest.raises(eo.StoreError, match="what is known of f"):
        stored(MASS, jac=lambda u, p, t: jnp.zeros((3, 3)))


@pytest.mark.slow
def test_services_solve_with_mass_matrices():
    """The service computes consistent starts."""
    prob = eo.remake(on_circle(0.9, jnp.array(1.3)), u0=jnp.stack([jnp.sin(0.9), jnp.ones(())]))
    how: Any = {"alg": eo.Rodas4(), "saveat": [1.0], "initializealg": BROWN, **TIGHT}
    limits = eo.serve.Limits(saveat=4, trajectories=4, maxiters=1000)
    with Running(eo.serve.Registry().add("circle", prob, limits=limits, **how)) as app:
        answer = app.solve("circle", u0=[[0.5, 0.7], [0.0, 0.9]])
    assert answer.status_code == 200, answer.text
    angles = np.array([np.pi / 6, 0.0]) - 1.3
    exact = np.stack([np.sin(angles), np.cos(angles)], axis=1)
    np.testing.assert_allclose(np.array(answer.json()["u"])[:, 0], exact, atol=1e-7)


@pytest.mark.slow
def test_with_a_jacobian_and_steps_made_again():
    def jac(u, p, t):
        return jnp.stack([jnp.stack([jnp.zeros(()), -p]), 2.0 * u])

    f = eo.ODEFunction(circle, mass_matrix=[1.0, 0.0], jac=jac)
    plain, own = (on_circle(0.9, jnp.array(1.3), f=x) for x in (CIRCLE, f))
    times = jnp.array([0.13, 0.77])
    saved = eo.solve(plain, eo.Rodas5P(), saveat=times)
    sol = eo.solve(own, eo.Rodas5P(), save_everystep=True)
    np.testing.assert_allclose(sol(times), saved.u, rtol=1e-10)
    grads = [
        jax.grad(lambda p, f=f: jnp.sum(eo.solve(on_circle(0.9, p, f=f), eo.Rodas5P()).u))(1.3)
        for f in (CIRCLE, f)
    ]
    np.testing.assert_allclose(*grads, rtol=1e-10)


def test_errors_name_the_argument():
    def solved(mass, alg=None, **options):
        prob = of_coupled(eo.ODEFunction(coupled, mass_matrix=mass))
        return eo.solve(prob, alg or eo.Rodas4(), **options)

    with pytest.raises(TypeError, match="mass_matrix is traced"):
        jax.jit(lambda x: solved(x).u)(jnp.ones(3))
    with pytest.raises(TypeError, match="mass_matrix must be an array of real numbers"):
        eo.ODEFunction(coupled, mass_matrix="a")
    with pytest.raises(ValueError, match=r"mass_matrix has the shape \(2, 2\).*\(3, 3\)"):
        solved(np.eye(2))
    with pytest.raises(ValueError, match="mass_matrix has entries"):
        solved([1.0, np.nan, 0.0])
    with pytest.raises(ValueError, match="mass_matrix has 0 rows and 1 columns of zeros"):
        solved([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 1.0, 0.0]])
    with pytest.raises(ValueError, match="mass_matrix is singular, and not by rows"):
        solved([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    for alg in (eo.Tsit5(), eo.Kvaerno5()):
        with pytest.raises(ValueError, match=r"mass_matrix is given, and .* eo.Rodas5P\(\)"):
            solved(2 * np.eye(3), alg)
    with pytest.raises(TypeError, match=r"initializealg must be eo\.CheckInit"):
        solved([1.0, 1.0, 0.0], initializealg="brown")
    with pytest.raises(ValueError, match="abstol must be a positive number"):
        eo.BrownFullBasicInit(abstol=0.0)
    with pytest.raises(ValueError, match="engine='diffrax' can't run Rodas4"):
        solved(2 * np.eye(3), engine="diffrax")


def test_columns_that_count_time_from_their_start_keep_the_mass_matrix():
    """A method without mass matrices therefore refuses the problem."""
    ts = jnp.linspace(0.0, 1.0, 5)
    data = jnp.stack([jnp.sin(0.9 - ts), jnp.cos(0.9 - ts)], axis=1)
    with pytest.raises(ValueError, match="mass_matrix is given, and Tsit5"):
        multiple_shooting(
            on_circle(0.9, jnp.array(1.0)), data, ts, 3, ensemblealg=eo.EnsembleColumns()
        )


def test_an_index_of_two_is_refused():
    f = eo.ODEFunction(lambda u, p, t: jnp.stack([-u[1], u[0] - t]), mass_matrix=[1.0, 0.0])
    prob = eo.ODEProblem(f, [0.0, -1.0], (0.0, 1.0))
    with pytest.raises(ValueError, match=r"mass_matrix has rows of zeros .* index"):
        eo.solve(prob, eo.Rodas4())
