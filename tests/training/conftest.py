import jax
import pytest


@pytest.fixture
def optax_mixes_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        yield
