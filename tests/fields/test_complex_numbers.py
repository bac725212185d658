"""Programs with complex numbers inside, as programs of real ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ensembleode as eo
from ensembleode.fields.complex_numbers import NotInPairsError, without_complex
from ensembleode.fields.fourier import is_short
from ensembleode.tracing.evaluation import equations

from ..marks import slow_unless


@pytest.fixture(autouse=True)
def _promotion():
    """`1j * x` promotes a dtype."""
    with jax.numpy_dtype_promotion("standard"):
        yield


X = np.random.default_rng(0).normal(size=6)


def z(x):
    return x[:3] + 1j * x[3:]


def parts(y):
    return jnp.real(y), jnp.imag(y)


FUNCTIONS = (
    *("abs", "angle", "conj", "cos", "cosh", "exp", "expm1", "log", "log1p", "reciprocal", "sign"),
    *("sin", "sinh", "sqrt", "square", "tan", "tanh"),
)
PROGRAMS = {
    **{name: lambda x, name=name: parts(getattr(jnp, name)(z(x))) for name in FUNCTIONS},
    "a power": lambda x: parts(z(x) ** (1.5 + 0.3j)),
    "an integer power": lambda x: parts(z(x) ** -3),
    "a quotient": lambda x: parts(z(x) / (2 - z(x))),
    "a product of matrices": lambda x: parts(jnp.outer(z(x), x[:3]) @ z(x)),
    "a product over components": lambda x: parts(jnp.prod(z(x))),
    "sums": lambda x: parts(jnp.sum(z(x)) + jnp.cumsum(z(x))),
    "the logistic function": lambda x: parts(jax.nn.sigmoid(z(x))),
    "the reciprocal root": lambda x: parts(lax.rsqrt(z(x))),
    "a scan": lambda x: parts(lax.scan(lambda c, y: (c * 1j + y, c), 0j, x)[1]),
    "a loop": lambda x: parts(
        lax.while_loop(lambda c: jnp.abs(c) < 10, lambda c: c * (1 + 0.5j), x[0] + 1j)
    ),
    "a branch": lambda x: parts(lax.cond(x[0] > 0, lambda y: y * 1j, lambda y: y, z(x))),
    "indices": lambda x: parts(jnp.roll(z(x), 1).at[0].set(1j)[::-1]),
    "a choice": lambda x: parts(jnp.where(x[:3] > 0, z(x), 0)),
    "comparisons": lambda x: (z(x) == z(x)[::-1]) * 1.0 + (z(x) != 1j),
    "single precision": lambda x: jnp.abs(jnp.exp(1j * x.astype(np.float32))),
    "a gradient": jax.grad(lambda x: jnp.sum(jnp.abs(jnp.exp(z(x))) ** 2)),
    "a Hessian": jax.hessian(lambda x: jnp.sum(jnp.abs(jnp.sin(z(x))) ** 2)),
    "a gradient of a transform": jax.grad(lambda x: jnp.sum(jnp.abs(jnp.fft.rfft(x)) ** 3)),
    "a convolution": lambda x: jax.scipy.signal.fftconvolve(x, x, mode="same"),
    "two axes": lambda x: parts(jnp.fft.fft2(x.reshape(2, 3))),
    "two real axes": lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x.reshape(3, 2)) * 2j, (3, 2)),
    "the first axis": lambda x: parts(jnp.fft.fft(x.reshape(2, 3), axis=0)),
}


def is_real(jaxpr):
    avals = [v.aval for eqn in equations(jaxpr) for v in (*eqn.invars, *eqn.outvars)]
    return not any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in avals)


def agree(fn, x, rtol=1e-13):
    jaxpr = without_complex(jax.make_jaxpr(fn)(x).jaxpr)
    assert is_real(jaxpr)
    expected = jax.tree.leaves(fn(x))
    for a, b in zip(jax.core.eval_jaxpr(jaxpr, [], x), expected, strict=True):
        assert a.dtype == b.dtype
        tiny = rtol * float(np.max(np.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=max(tiny, float(np.finfo(b.dtype).eps)))


@pytest.mark.quick_cases(26)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    agree(PROGRAMS[name], jnp.asarray(X))


@pytest.mark.parametrize("x", [0.0, -0.0, np.inf, -np.inf, 1e300, 1e-300])
def test_at_the_ends_of_the_numbers(x):
    """Sizes, roots and logarithms are as good there as NumPy's."""

    def both(a, b):
        number = lax.complex(a, b)
        return (jnp.abs(number), *parts(jnp.sqrt(number)))

    for re, im in ((x, 0.0), (0.0, x), (x, x), (-1.0, x)):
        jaxpr = without_complex(jax.make_jaxpr(both)(re, im).jaxpr)
        size, *root = jax.core.eval_jaxpr(jaxpr, [], jnp.asarray(re), jnp.asarray(im))
        np.testing.assert_allclose(size, np.hypot(re, im), rtol=1e-15)
        if max(abs(re), abs(im)) != 1e300:  # where the size of the sum overflows
            expected = np.sqrt(complex(re, im))
            np.testing.assert_allclose(root, [expected.real, expected.imag], rtol=1e-15)


LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 22, 26, 27, 30, 49, 60, 64)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [slow_unless(n in (1, 2, 5, 8, 9, 13, 16, 30), n) for n in LENGTHS])
def test_transforms(n):
    x = jnp.asarray(np.random.default_rng(n).normal(size=n))
    agree(lambda x: parts(jnp.fft.fft(x + 1j * x**2)), x)
    agree(lambda x: parts(jnp.fft.ifft(x + 1j * x**2)), x)
    agree(lambda x: parts(jnp.fft.rfft(x)), x)
    # (The imaginary part of the mean is without effect.)
    agree(lambda x: jnp.fft.irfft(x[: n // 2 + 1] * (1 + 2j), n), x)


def test_what_is_left_as_it_is():
    def left(fn, *args):
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
        return without_complex(jaxpr) is jaxpr

    assert [is_short(n) for n in (64, 65, 13, 17, 34)] == [True, False, True, False, False]
    with pytest.raises(NotInPairsError, match="primitive fft of 65 points") as caught:
        left(lambda x: jnp.fft.rfft(x).real, jnp.zeros(65))
    assert "test_complex_numbers.py" in caught.value.where
    with pytest.raises(NotInPairsError, match="primitive sort of complex numbers"):
        left(lambda x: jnp.sort(z(x)).real, X)
    assert left(lambda x: x * 1j, X)  # a complex result
    assert left(jnp.sin, X)  # nothing complex


#
# Solved
#


def diffusion(n):
    """The heat equation on a circle, whose Fourier coefficients decay one by one."""
    k = np.arange(n // 2 + 1)
    return lambda u, p, t: jnp.fft.irfft(-p * k**2 * jnp.fft.rfft(u), n)


def solved(f, u0, p, alg, **options):
    return eo.solve(eo.ODEProblem(f, u0, (0.0, 1.0), p), alg, abstol=1e-9, reltol=1e-9, **options)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alg", [eo.Vern7(), slow_unless(True, eo.Rodas5P())])
def test_a_spectral_method_is_compiled(alg):
    u0 = jnp.asarray(np.random.default_rng(1).normal(size=12))
    sol = solved(diffusion(12), u0, 0.1, alg)
    assert sol.engine.name == "compiled"
    at_end = np.exp(-0.1 * np.arange(7) ** 2)
    np.testing.assert_allclose(sol.u[-1], np.fft.irfft(at_end * np.fft.rfft(u0), 12), atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("alg", "n"), [(eo.Tsit5(), 8), (eo.Rodas5P(), 4)])
def test_its_derivatives(alg, n):
    """The second derivatives, too, by the rate of decay."""
    u0 = jnp.asarray(np.random.default_rng(1).normal(size=n))
    k = np.arange(n // 2 + 1)

    def end(p):
        return solved(diffusion(n), u0, p, alg).u[-1, 0]

    def exact(p, power):
        by = (-(k**2.0)) ** power * np.exp(-p * k**2)
        return np.fft.irfft(by * np.fft.rfft(u0), n)[0]

    np.testing.assert_allclose(jax.grad(end)(0.1), exact(0.1, 1), rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(end)(0.1), exact(0.1, 2), rtol=1e-5)


@pytest.mark.slow
def test_long_transforms_go_to_diffrax():
    sol = solved(diffusion(66), jnp.ones(66), 0.1, eo.Tsit5())
    assert sol.engine.name == "diffrax"
    assert "fft" in dict(sol.engine.refused)["compiled"]


@pytest.mark.slow
def test_an_event_of_a_field_with_complex_numbers():
    """A phase that turns at a constant rate reaches the half turn at a known time."""

    def f(u, p, t):
        return p * jnp.abs(jnp.exp(1j * u))

    half = eo.ContinuousCallback(
        lambda u, t, integrator: u[0] - np.pi, lambda integrator: integrator
    )
    prob = eo.ODEProblem(f, jnp.zeros(1), (0.0, 1.0), 5.0)
    sol = eo.solve(prob, eo.Tsit5(), callback=half, abstol=1e-9, reltol=1e-9)
    np.testing.assert_allclose(sol.events.t[: int(sol.events.count)], [np.pi / 5], rtol=1e-8)
