"""Batches that don't fit into memory."""

import json
import logging
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ensembleode as eo
from ensembleode.training import microbatch

from . import several
from .test_fit import fit_line, QUIET


pytestmark = pytest.mark.usefixtures("optax_mixes_dtypes")
SCRIPT = several.ROOT / "tests" / "training" / "oom.py"
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")


def run(*arguments, check=True):
    [process] = several.start(SCRIPT, 1, json.dumps(arguments))
    [(out, err)] = several.finish([process])
    assert (process.returncode == 0) == check, err
    return (json.loads(out) if check else None), err


@pytest.mark.slow
@linux
def test_it_is_halved_when_memory_runs_out():
    whole, _ = run(0, None)
    found, said = run(300, "auto")
    assert "out of memory with 100000 items at a time: microbatch=50000" in said
    np.testing.assert_allclose(found["losses"], whole["losses"], rtol=1e-10)


@pytest.mark.slow
@linux
def test_without_auto_the_error_says_what_to_do():
    _, said = run(300, None, check=False)
    assert "RESOURCE_EXHAUSTED" in said
    assert "ensembleode: give microbatch='auto', or a smaller number." in said


@linux
@pytest.mark.slow
def test_memory_is_that_of_a_microbatch():
    """Ten times the items take what their numbers take, and no more."""
    few, _ = run(0, 1000, 20_000)
    many, _ = run(0, 1000, 200_000)
    whole, _ = run(0, None, 200_000)
    assert many["peak"] - few["peak"] < 40
    assert whole["peak"] - many["peak"] > 500


def test_the_largest_that_is_said_to_fit(monkeypatch, caplog):
    """By the compiler's account of the step."""
    width, n = 256, 4096

    def loss(params, x):
        return jnp.sum(
            jnp.sin(jnp.tanh(x[:, None] * params[None]) @ jnp.ones((width, width))), axis=1
        )

    options = {"optimizer": optax.sgd(1e-9), "maxiters": 1, **QUIET}
    whole = eo.fit(loss, jnp.ones(width), np.ones(n), **options)
    chosen = []
    fits = microbatch.that_fits

    def recorded(*arguments):
        chosen.append(fits(*arguments))
        return chosen[-1]

    monkeypatch.setattr("ensembleode.training.fit.that_fits", recorded)
    monkeypatch.setattr(microbatch, "free_bytes", lambda device: 4 * 2**20)
    with caplog.at_level(logging.INFO):
        found = eo.fit(loss, jnp.ones(width), np.ones(n), microbatch="auto", **options)
    (step,) = chosen
    assert 16 <= step.microbatch < n / 2
    assert f"microbatch={step.microbatch}" in caplog.text
    np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-12)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", [1, 3, 10, 11, 1000])
def test_the_same_whatever_it_is(size):
    expected = fit_line(batch_size=10)
    for devices in (1, 2):
        found = fit_line(batch_size=10, microbatch=size, devices=devices)
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-13)
