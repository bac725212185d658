"""Derivatives of solves by the diffrax engine without `sensealg`: of any order, in both modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless
from ..problems import lotka_volterra
from .test_second_derivatives import WAYS


P = jnp.array([1.5, 1.0, 3.0, 1.0])
TIMES = [0.31, 1.0, 2.0]


def loss(p, alg=None, **options):
    prob = eo.ODEProblem(lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 2.0), p)
    how = {"saveat": TIMES, "engine": "diffrax", "abstol": 1e-7, "reltol": 1e-7, **options}
    u = eo.solve(prob, alg or eo.Vern7(), **how).u
    return jnp.sum(u**2 * jnp.array([[1.0, 0.7]]))


PI = {"stepsize_controller": eo.PIController()}
METHODS = {"Vern7": (eo.Vern7(), {}), "Tsit5": (eo.Tsit5(), PI), "BS5": (eo.BS5(), {})}
FIRST = {"jvp": jax.jacfwd, "grad": jax.grad}


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in METHODS for way in (FIRST | WAYS)],
)
def test_those_of_the_compiled_engine(name, way):
    alg, how = METHODS[name]
    found = jax.jit((FIRST | WAYS)[way](functools.partial(loss, alg=alg, **how)))(P)
    of = jax.grad if way in FIRST else jax.hessian
    expected = of(functools.partial(loss, alg=alg, engine="compiled", **how))(P)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-8 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("alg", [eo.Kvaerno3(), eo.KenCarp4()])
@pytest.mark.parametrize("way", FIRST | WAYS)
def test_of_implicit_methods(alg, way):
    found = (FIRST | WAYS)[way](functools.partial(loss, alg=alg))(P)
    expected = (jax.grad if way in FIRST else jax.hessian)(
        functools.partial(loss, engine="compiled", abstol=1e-11, reltol=1e-11)
    )(P)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("way", FIRST | WAYS)
def test_of_complex_states(way):
    """u' = (i a - b) u."""

    def f(u, p, t):
        return jax.lax.complex(-p[1], p[0]) * u

    def found(x):
        prob = eo.ODEProblem(f, jax.lax.complex(x[0], x[1] ** 2)[None], (0.0, 1.0), x)
        how = {"engine": "diffrax", "abstol": 1e-11, "reltol": 1e-11}
        u = eo.solve(prob, eo.Vern7(), **how).u[-1, 0]
        return jnp.real(u) * jnp.imag(u)

    def exact(x):
        u = jax.lax.complex(x[0], x[1] ** 2) * jnp.exp(jax.lax.complex(-x[1], x[0]))
        return jnp.real(u) * jnp.imag(u)

    x = jnp.array([1.3, 0.4])
    expected = (jax.grad if way in FIRST else jax.hessian)(exact)(x)
    np.testing.assert_allclose((FIRST | WAYS)[way](found)(x), expected, rtol=1e-8, atol=1e-9)


def driven(u, p, t):
    return jnp.where(t < p[1], p[0], -1.0) - u


def jumping(p, when, **options):
    prob = eo.ODEProblem(driven, [0.5], (0.0, 2.0), p)
    how = {"d_discontinuities": [when], "engine": "diffrax", "abstol": 1e-9, "reltol": 1e-9}
    return eo.solve(prob, **(how | options)).u[-1, 0]


def jumped(p, when):
    at = p[0] + (0.5 - p[0]) * jnp.exp(-when)
    return -1 + (at + 1) * jnp.exp(when - 2)


@pytest.mark.parametrize("mode", [jax.jacfwd, slow_unless(False, jax.jacrev)])
def test_by_the_times_of_jumps(mode):
    p = jnp.array([2.0, np.pi / 3])
    found = mode(lambda p: jumping(p, p[1]))(p)
    np.testing.assert_allclose(found, jax.grad(lambda p: jumped(p, p[1]))(p), rtol=1e-6)


@pytest.mark.slow
def test_second_derivatives_where_f_jumps():
    """By other numbers; by the times, the error says what has them."""
    p = jnp.array([2.0, np.pi / 3])
    when = np.pi / 3
    found = jax.hessian(lambda x: jumping(p.at[0].set(jnp.sin(x)), when))(0.3)
    expected = jax.hessian(lambda x: jumped(p.at[0].set(jnp.sin(x)), when))(0.3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"engine='compiled', which has"):
        jax.hessian(lambda p: jumping(p, p[1]))(p)


@pytest.mark.slow
def test_the_memory_of_reverse_mode_grows_with_the_root_of_maxiters():
    def bytes_of(maxiters):
        of = functools.partial(loss, alg=eo.Midpoint(), maxiters=maxiters)
        lowered = jax.jit(jax.grad(of)).lower(P)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(64_000) < 12 * bytes_of(1_000)


@pytest.mark.slow
def test_states_within_kept_steps_have_first_derivatives():
    def at(p, **options):
        prob = eo.ODEProblem(lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 2.0), p)
        how = {"save_everystep": True, "maxiters": 500, "abstol": 1e-7, "reltol": 1e-7}
        return eo.solve(prob, eo.Kvaerno3(), **how, **options)(0.77)[0]

    found = jax.grad(at)(P)
    expected = jax.grad(
        lambda p: eo.solve(
            eo.ODEProblem(lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 2.0), p), eo.Vern7(),
            saveat=[0.77], abstol=1e-11, reltol=1e-11,
        ).u[-1, 0]
    )(P)  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    with pytest.raises(TypeError, match="nor with save_everystep"):
        jax.jacfwd(at)(P)
    forward = jax.jacfwd(functools.partial(at, sensealg=eo.ForwardDiffSensitivity()))(P)
    np.testing.assert_allclose(forward, found, rtol=1e-6)


@pytest.mark.slow
def test_of_an_f_with_effects(capfd):
    def f(u, p, t):
        jax.debug.print("evaluated")
        return -p * u

    def end(p):
        return eo.solve(eo.ODEProblem(f, [1.0], (0.0, 1.0), p), reltol=1e-8, abstol=1e-8).u[-1, 0]

    np.testing.assert_allclose(jax.grad(end)(0.7), -np.exp(-0.7), rtol=1e-6)
    jax.effects_barrier()
    assert "evaluated" in capfd.readouterr().out
    with pytest.raises(TypeError, match="not with effects in f"):
        jax.jvp(end, (0.7,), (1.0,))
