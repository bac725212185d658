"""Jacobians that the user gives, and where they may be other than zero."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import ensembleode as eo
from ensembleode.fields.derivatives.jacobian import jacobian
from ensembleode.plan.implicit_form import product_of
from ensembleode.tracing.program import trace


SIZE = 3
# (A constant that jac closes over, too.)
RATES = jnp.array([1.0, 40.0, 900.0])


def chain(u, p, t):
    """Each component is fed by the one before it."""
    fed = jnp.concatenate([jnp.sin(t)[None], u[:-1] ** 2])
    return RATES * (p * fed - u)


def chain_jac(u, p, t, factor=1.0):
    below = [jnp.zeros(SIZE).at[i].set(2 * p * RATES[i + 1] * u[i]) for i in range(SIZE - 1)]
    return factor * (jnp.stack([jnp.zeros(SIZE), *below]) - jnp.diag(RATES))


def below_diagonal(size=SIZE):
    return np.eye(size) + np.eye(size, k=-1)


def end(p, f, alg=None, **options):
    prob = eo.ODEProblem(f, jnp.full(SIZE, 0.5), (0.0, 1.0), p)
    return eo.solve(prob, alg or eo.Rodas4(), **options).u[-1]


def pattern(fn, jac=None, places=None, *, apart=True):
    """The places of the entries, of a state of three."""
    u, t = jax.ShapeDtypeStruct((SIZE,), float), jax.ShapeDtypeStruct((), float)
    field, _ = trace(fn, u, (t,), t, rules=True)
    jac = jac and trace(jac, u, (t,), t, rules=True)[0]
    places = None if places is None else tuple(places.ravel().tolist())
    return jacobian(field, product_of(field, jac, places, None), apart=apart).pattern


def coupled(u, p, t):
    """(Nothing shows in its structure.)"""
    return -u + 0.0 * p[0] * jnp.cumsum(u) * jnp.sum(u) + t


def coupled_jac(u, p, t):
    zero = jnp.zeros(())
    return jnp.stack([jnp.stack([-u[0], zero, zero]), jnp.stack([u[1], p[0], zero]), u * t])


@pytest.mark.parametrize("apart", [True, False])
def test_zeros_are_those_of_the_prototype(apart):
    places = below_diagonal()
    found = pattern(coupled, coupled_jac, places, apart=apart)
    assert found == ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2))
    assert pattern(coupled, None, places, apart=apart) == found


def test_zeros_that_are_written_in_jac_are_left_out():
    assert pattern(coupled, coupled_jac) == ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2))


@pytest.fixture(scope="module")
def plain():
    p = jnp.array(0.8)
    return end(p, chain), jax.grad(lambda p: jnp.sum(end(p, chain)))(p)


@pytest.mark.slow
@pytest.mark.parametrize(
    "known",
    [
        {"jac": chain_jac},
        {"jac_prototype": below_diagonal()},
        {"jac": chain_jac, "jac_prototype": scipy.sparse.csr_array(below_diagonal())},
    ],
    ids=" ".join,
)
def test_the_solution_is_the_same(known, plain):
    p, f = jnp.array(0.8), eo.ODEFunction(chain, **known)
    u, grad = plain
    np.testing.assert_allclose(end(p, f), u, rtol=1e-12)
    found = jax.grad(lambda p: jnp.sum(end(p, f)))(p)
    np.testing.assert_allclose(found, grad, rtol=1e-11)


def test_derivatives_are_of_the_steps_made_whatever_jac_is():
    """Against differences, with a Jacobian that is wrong; in both modes, and the second, too."""
    f = eo.ODEFunction(chain, jac=functools.partial(chain_jac, factor=1.1))
    how = {"dt": 0.1, "adaptive": False}

    @jax.jit
    def loss(p):
        return jnp.sum(jnp.sin(end(p, f, **how)))

    p, d = jnp.array(0.8), 1e-4
    grads = jax.jit(jax.vmap(jax.grad(loss)))(jnp.array([p - d, p, p + d]))
    values = [loss(p - d), loss(p + d)]
    np.testing.assert_allclose(grads[1], (values[1] - values[0]) / (2 * d), rtol=1e-6)
    first, second = jax.jvp(jax.grad(loss), (p,), (jnp.ones(()),))
    np.testing.assert_allclose(first, grads[1], rtol=1e-13)
    np.testing.assert_allclose(second, (grads[2] - grads[0]) / (2 * d), rtol=1e-6)
    # (And it is the wrong one that was taken.)
    assert abs(loss(p) - jnp.sum(jnp.sin(end(p, chain, **how)))) > 1e-9


@pytest.mark.slow
def test_steps_are_made_again_with_it():
    f = eo.ODEFunction(chain, jac=functools.partial(chain_jac, factor=1.1))
    prob = eo.ODEProblem(f, jnp.full(SIZE, 0.5), (0.0, 1.0), jnp.array(0.8))
    times = jnp.array([0.123, 0.77])
    sol = eo.solve(prob, eo.Rodas5P(), save_everystep=True)
    saved = eo.solve(prob, eo.Rodas5P(), saveat=times)
    np.testing.assert_allclose(sol(times), saved.u, rtol=1e-12)


@pytest.mark.slow
def test_beside_an_integrand_and_a_parameter_that_an_event_changes():
    def halved(integrator):
        return eo.remake(integrator, p=integrator.p / 2)

    callback = eo.PresetTimeCallback(jnp.array([0.4]), halved)
    extra = {"integrand": lambda u, p, t: p * u[0] * u[1], "callback": callback}
    found = []
    for f in (chain, eo.ODEFunction(chain, jac=chain_jac)):

        def loss(p, f=f):
            prob = eo.ODEProblem(f, jnp.full(SIZE, 0.5), (0.0, 1.0), p, **extra)
            sol = eo.solve(prob, eo.Rodas4())
            return jnp.sum(sol.u[-1]) + sol.integral[-1]

        found.append(jax.value_and_grad(loss)(jnp.array(0.8)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-11)


@pytest.mark.slow
def test_components_of_a_pytree_are_counted_as_they_are_written():
    """(JAX sorts the names.)"""
    f = eo.ODEFunction(
        lambda u, p, t: {"z": -p * u["z"] + u["a"][0], "a": -u["a"] * u["z"]},
        jac=lambda u, p, t: jnp.array(
            [[-p, 1.0, 0.0], [-u["a"][0], -u["z"], 0.0], [-u["a"][1], 0.0, -u["z"]]]
        ),
    )
    prob = eo.ODEProblem(f, {"z": 1.0, "a": jnp.array([2.0, 3.0])}, (0.0, 1.0), jnp.array(3.0))
    own = eo.solve(prob, eo.Rodas4())
    found = eo.solve(eo.remake(prob, f=f.f), eo.Rodas4())
    assert own.stats.naccept == found.stats.naccept
    for name in ("a", "z"):
        np.testing.assert_allclose(own.u[name], found.u[name], rtol=1e-12)


def test_it_is_a_function_and_other_methods_take_it_for_one():
    f = eo.ODEFunction(chain, jac=chain_jac, jac_prototype=below_diagonal())
    u, p, t = jnp.full(SIZE, 0.5), jnp.array(0.8), jnp.array(0.1)
    np.testing.assert_array_equal(f(u, p, t), chain(u, p, t))
    np.testing.assert_array_equal(end(p, f, eo.Tsit5()), end(p, chain, eo.Tsit5()))


def solved(**known):
    return end(jnp.array(0.8), eo.ODEFunction(chain, **known))


def test_errors_name_the_argument():
    not_a_function: Any = np.eye(3)
    with pytest.raises(TypeError, match="f must be a function"):
        eo.ODEFunction(eo.ODEFunction(chain))
    with pytest.raises(TypeError, match="jac must be a function"):
        eo.ODEFunction(chain, jac=not_a_function)
    with pytest.raises(TypeError, match="jac_prototype must be an array"):
        eo.ODEFunction(chain, jac_prototype=[["a"]])
    with pytest.raises(TypeError, match="jac_prototype must be an array"):
        eo.ODEFunction(chain, jac_prototype=[[1, 0], [1]])
    with pytest.raises(TypeError, match="jac_prototype is traced"):
        jax.jit(lambda x: eo.ODEFunction(chain, jac_prototype=x)(x, x, x))(jnp.ones((3, 3)))
    with pytest.raises(TypeError, match="tgrad"):
        eo.ODEFunction(chain, tgrad=chain)
    with pytest.raises(ValueError, match=r"jac must return .* \(3, 3\).*\(3,\)"):
        solved(jac=lambda u, p, t: u)
    with pytest.raises(TypeError, match=r"jac must return .* float32"):
        solved(jac=lambda u, p, t: jnp.zeros((3, 3), "float32"))
    with pytest.raises(TypeError, match=r"jac must return .* structure"):
        solved(jac=lambda u, p, t: [u, u, u])
    with pytest.raises(TypeError, match="jac must take the state"):
        solved(jac=lambda t, u, p: jnp.eye(3))
    with pytest.raises(ValueError, match=r"jac_prototype has the shape \(2, 2\).*\(3, 3\)"):
        solved(jac_prototype=np.eye(2))


@pytest.mark.slow
def test_as_many_entries_beside_a_block_as_it_has_zeros():
    """16 integrals' entries in the place of 16 zeros on the diagonal: they are not taken for it."""
    n = 16
    a = np.random.default_rng(0).normal(size=(n, n)) * (1 - np.eye(n)) / 4
    f = eo.ODEFunction(lambda u, p, t: a @ jnp.sin(u), jac_prototype=1 - np.eye(n))
    prob = eo.ODEProblem(f, jnp.linspace(0.1, 1.0, n), (0.0, 1.0))
    counted = eo.remake(prob, integrand=lambda u, p, t: jnp.sum(u * u))
    plain, beside = (eo.solve(x, eo.Rodas5P(), abstol=1e-6, reltol=1e-6) for x in (prob, counted))
    assert int(beside.stats.naccept) == int(plain.stats.naccept)
    np.testing.assert_array_equal(beside.u, plain.u)
