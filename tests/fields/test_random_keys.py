"""Programs that draw random numbers: the same numbers as JAX draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ensembleode.fields import UntranslatableError

from ..marks import slow_unless
from .drawn import reals
from .lowered import agree, Lowered


U = reals(3)
KEY = jax.random.key(7)
DRAWN = {
    "normal": lambda key: jax.random.normal(key, (3,)),
    "uniform": lambda key: jax.random.uniform(key, (3,), minval=-1.0),
    "bits": lambda key: jax.random.bits(key, (3,), "uint8").astype(float),
    "words": lambda key: jax.random.bits(key, (3,), "uint64").astype(float) * 2.0**-64,
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.4, (3,)).astype(float),
    "integers": lambda key: jax.random.randint(key, (3,), 0, 100).astype(float),
    "categorical": lambda key: jax.random.categorical(key, jnp.arange(4.0), shape=(3,)).astype(
        float
    ),
    "permutation": lambda key: jax.random.permutation(key, 3).astype(float),
    "exponential": lambda key: jax.random.exponential(key, (3,)),
    "gamma": lambda key: jax.random.gamma(key, jnp.array([0.5, 1.0, 3.0])),
    "poisson": lambda key: jax.random.poisson(key, 3.0, (3,)).astype(float),
    "two": lambda key: sum(jax.random.normal(k, (3,)) for k in jax.random.split(key)),
    "folded": lambda key: jax.random.normal(jax.random.fold_in(key, 5), (3,)),
    "mapped": lambda key: jax.vmap(jax.random.normal)(jax.random.split(key, 3)),
    "several": lambda key: jax.vmap(jax.random.normal)(jax.random.split(key, (2, 3))[1][::-1]),
    "old": lambda key: jax.random.normal(jax.random.PRNGKey(3), (3,)),
    "data": lambda key: jnp.full(3, jax.random.key_data(key)[0]).astype(float),
    "clone": lambda key: jax.random.normal(jax.random.clone(key), (3,)),
    "chosen": lambda key: jax.random.normal(
        jax.random.split(key, 4)[jnp.argmax(jax.random.normal(key, (4,)))], (3,)
    ),
    "loop": lambda key: lax.fori_loop(
        0,
        3,
        lambda i, c: (jax.random.split(c[0])[1], c[1] + jax.random.normal(c[0], (3,))),
        (key, jnp.zeros(3)),
    )[1],
    "while": lambda key: lax.while_loop(
        lambda c: jnp.sum(c[1]) < 3,
        lambda c: (jax.random.fold_in(c[0], 1), c[1] + jax.random.uniform(c[0], (3,))),
        (key, jnp.zeros(3)),
    )[1],
    "branches": lambda key: (
        lax.cond(
            jax.random.bernoulli(key),
            jax.random.normal,
            lambda k, *s: jax.random.uniform(k, *s),
            key,
        )
        * jnp.ones(3)
    ),
    "scanned": lambda key: lax.scan(
        lambda c, k: (c + jax.random.normal(k, (3,)), k), jnp.zeros(3), jax.random.split(key, 3)
    )[0],
}
QUICK = {"normal", "two", "loop"}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", [slow_unless(x in QUICK, x) for x in DRAWN])
@pytest.mark.parametrize(
    "key", [lambda: jax.random.key(3), lambda: KEY], ids=["made", "closed over"]
)
def test_keys_of_the_program(name, key):
    agree(lambda u, p, t: u * DRAWN[name](key()), U)


@pytest.mark.parametrize("name", [slow_unless(x == "normal", x) for x in DRAWN])
def test_keys_among_the_parameters(name):
    agree(lambda u, p, t: u * p["rate"] * DRAWN[name](p["key"]), U, {"key": KEY, "rate": 0.5})


def test_keys_that_depend_on_the_time():
    def dropped(u, p, t):
        key = jax.random.fold_in(p, jnp.int32(10 * t))
        return jnp.where(jax.random.bernoulli(key, 0.5, u.shape), u, 0.0)

    for t in (0.1, 0.25, 0.77):
        agree(dropped, reals(30), KEY, t)


@pytest.mark.slow
def test_derivatives():
    def noisy(u, p, t):
        return jnp.sum(jnp.sin(u + jax.random.normal(p, u.shape)) ** 2)

    agree(lambda u, p, t: jax.grad(noisy)(u, p, t), U, KEY)
    agree(lambda u, p, t: jax.hessian(noisy)(u, p, t), U, KEY)


def test_single_precision():
    agree(
        lambda u, p, t: u * jax.random.normal(jax.random.key(1), u.shape, u.dtype),
        U.astype(np.float32),
        t=np.float32(0),
        rtol=1e-5,
        storage=np.float32,
    )
    # Its integers have no place among numbers of 32 bits.
    with pytest.raises(UntranslatableError, match="the primitive random_bits"):
        Lowered(
            lambda u, p, t: u * jax.random.normal(p, u.shape, u.dtype),
            U.astype(np.float32),
            KEY,
            np.float32(0),
            storage=np.float32,
        )


def test_keys_of_another_kind_are_refused():
    with pytest.raises(UntranslatableError, match=r"rng_bit_generator.*test_random_keys"):
        Lowered(lambda u, p, t: u * jax.random.normal(jax.random.key(0, impl="rbg"), (3,)), U)
