"""Which pulses in f are recognised. (The message about them is tested in test_problem.py.)"""

import jax
import jax.numpy as jnp
import pytest

from ensembleode.tracing.program import trace
from ensembleode.tracing.pulses import switches_in_time


TABLE = jnp.arange(3.0)


def interpolated(u, p, t):
    i = jnp.clip(jnp.searchsorted(TABLE, t), 1, 2)
    return (TABLE[i - 1] + (t - TABLE[i - 1]) * p) * u


SWITCHING = {
    "pulse": lambda u, p, t: jnp.where((t >= 1) & (t < 2), 1.0, 0.0) - u,
    "at a parameter": lambda u, p, t: jnp.where(t > p, 1.0, 0.0) * u,
    "remainder": lambda u, p, t: jnp.sin(t % 24) * u,
    "floor": lambda u, p, t: jnp.floor(t) * u,
    "square wave": lambda u, p, t: jnp.sign(jnp.sin(t)) * u,
    "table of steps": lambda u, p, t: TABLE[jnp.searchsorted(TABLE, t, side="right") - 1] * u,
    "places compared": lambda u, p, t: jnp.sum(jnp.where(t > TABLE, 1.0, 0.0)) * u,
    "cond": lambda u, p, t: jax.lax.cond(t > 1, lambda: u, lambda: -u),
    "within a jit": lambda u, p, t: jax.jit(lambda s: jnp.where(s < 1, 0.0, 1.0))(2 * t) * u,
    "within a loop": lambda u, p, t: jax.lax.scan(
        lambda u, at: (u + jnp.where(t > at, 1.0, 0.0), None), u, TABLE
    )[0],
}
BENDING = {
    "ramp": lambda u, p, t: jnp.clip(t - p, 0, 1) * u,
    "later": lambda u, p, t: jnp.maximum(t, 1.0) * u,
}
OTHERS = {
    "table": lambda u, p, t: jnp.interp(t, TABLE, TABLE) * u,
    "periodic table": lambda u, p, t: jnp.interp(t, TABLE, TABLE, period=3.0) * u,
    "a table's own interpolation": interpolated,
    "gate": lambda u, p, t: jax.nn.sigmoid(t) + jax.nn.silu(t) * u,
    "smooth": lambda u, p, t: u * (
        jnp.sin(t) + jnp.exp(-((t - 5) ** 2) / p) + jax.nn.softplus(t) + jnp.tanh(t) + t**1.5
    ),
    "by the state": lambda u, p, t: jnp.where(u > 0, 1.0, 0.0) * t,
    "by state and time": lambda u, p, t: jnp.where(u > t, 1.0, 0.0),
    "by a parameter": lambda u, p, t: jnp.where(p > 0.5, u, -u) * t,
    "loop": lambda u, p, t: jax.lax.fori_loop(0, 3, lambda i, x: x + t, u),
    "autonomous": lambda u, p, t: -u,
}  # fmt: skip


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        *((f, "jump") for f in SWITCHING.values()),
        *((f, "bend") for f in BENDING.values()),
        *((f, "") for f in OTHERS.values()),
    ],
    ids=[*SWITCHING, *BENDING, *OTHERS],
)
def test_switches_in_time(f, expected):
    program, _ = trace(f, jnp.array(1.0), jnp.array(0.5), jnp.array(0.0))
    assert switches_in_time(program) == expected
