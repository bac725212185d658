"""Strong stability preservation in its typical use: the transport of a jump."""

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless


CELLS = 40


def upwind(u, p, t):
    """Transport to the right, at one cell a unit of time."""
    return jnp.roll(u, 1) - u


def transported(alg, dt, engine):
    """A jump up and one down, at times within the steps and at their ends: [time, cell]."""
    box = jnp.where(jnp.arange(CELLS) < CELLS // 2, 1.0, 0.0)
    prob = eo.ODEProblem(upwind, box, (0.0, 6.0))
    times = np.linspace(0, 6, 61)
    return np.asarray(
        eo.solve(prob, alg, saveat=times, dt=dt, adaptive=False, engine=engine).u, float
    )


def variation(u):
    return np.abs(u - np.roll(u, 1, axis=-1)).sum(axis=-1)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_nothing_overshoots_up_to_the_step_of_euler(engine):
    """Neither at the ends of steps nor within them."""
    u = transported(eo.SSPRK33(), 1.0, engine)
    assert np.all(u > -1e-14)
    assert np.all(u < 1 + 1e-14)
    assert np.all(np.diff(variation(u)) < 1e-13)


def test_this_can_fail():
    """With a longer step, or a method that does not preserve it."""
    assert transported(eo.SSPRK33(), 1.5, "compiled").min() < -1e-3
    assert transported(eo.Midpoint(), 1.0, "compiled").min() < -1e-3
