"""The generator, and the normal numbers made of it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.solvers import philox

from ..marks import slow_unless
from .problems import brownian, constant


def test_words_are_those_of_random123():
    words = functools.partial(philox.philox, philox._by_halves)
    known = {
        ((0, 0), (0, 0, 0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        ): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (key, counter), expected in known.items():
        found = words(*(tuple(map(jnp.uint32, x)) for x in (key, counter)))
        assert " ".join(f"{int(x):08x}" for x in found) == expected


@pytest.mark.parametrize("each", range(1, 13))
def test_steps_that_share_blocks_share_no_number(each):
    """And leave none over, where they do."""
    group = philox.steps_per_group(each)
    used = [
        (step // group, step % group * each + i) for step in range(3 * group) for i in range(each)
    ]
    assert len(set(used)) == len(used)
    if group > 1:
        assert len(used) % 4 == 0
        assert {number for _, number in used} == set(range(group * each))
    else:
        assert each % 4 == 0 or each > 4


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("own_ends", [True, False])
@pytest.mark.parametrize("each", [3, 1, 2, 4, 5, 6])
def test_compiled_numbers_are_those_of_jax(each, own_ends, dtype):
    """Paths that the engine draws, against the same numbers drawn by JAX. Trajectories of other
    lengths are at other steps of a group."""
    prob = eo.SDEProblem(
        lambda u, p, t: 0 * u,
        lambda u, p, t: jnp.ones_like(u),
        jnp.zeros(each, dtype),
        (0.0, 2.5),
    )

    def with_end(prob, ctx):
        return eo.remake(prob, tspan=(0.0, 0.25 * (1 + ctx.index * 7 % 10)))

    n, key = 37, jax.random.key(7)
    sim = eo.solve(
        eo.EnsembleProblem(prob, with_end if own_ends else None),
        eo.EM(),
        trajectories=n,
        dt=0.25,
        save_everystep=True,
        key=key,
    )
    words = jax.random.key_data(key)
    draw = jax.jit(
        lambda *place: philox.normals_of_step(words, (*place, jnp.uint32(8)), each, dtype)
    )
    numbers = jax.vmap(jax.vmap(draw, (0, None)), (None, 0))
    drawn = numbers(jnp.arange(10, dtype=np.uint32), jnp.arange(n, dtype=np.uint32))
    for i in range(n):
        steps = np.diff(np.asarray(sim[i].u), axis=0) / 0.5
        assert len(steps) == (1 + i * 7 % 10 if own_ends else 10)
        np.testing.assert_allclose(steps, drawn[i, : len(steps)], atol=4e-6)


def test_both_precisions_have_the_same_path():
    paths = []
    for dtype in (np.float32, np.float64):
        prob = brownian(u0=np.array([0.5, 0.2], dtype))
        paths.append(eo.solve(prob, adaptive=False, dt=0.1, saveat=0.1, save_noise=True).W)
    np.testing.assert_allclose(*paths, atol=1e-5)


@pytest.mark.parametrize("n", [slow_unless(True, 20_000), slow_unless(False, 2_000_000)])
def test_numbers_are_normal_and_independent(n):
    """Moments, and correlations of neighbouring trajectories, steps, components and seeds."""
    prob = brownian(constant, lambda u, p, t: 0 * u, u0=(0.0, 0.0, 0.0))
    sim = eo.solve(
        eo.EnsembleProblem(prob),
        eo.SRA1(),
        trajectories=n,
        adaptive=False,
        dt=0.25,
        saveat=0.25,
        save_noise=True,
    )
    every = np.stack([np.diff(np.asarray(x), axis=1) for x in (sim.W, sim.Z)]) / 0.5
    options = {"dt": 0.25, "saveat": 0.25, "save_noise": True, "seed": 1}
    # (Steps of this method share blocks.)
    other = eo.solve(eo.EnsembleProblem(prob), eo.EM(), trajectories=n, **options)
    other = np.diff(np.asarray(other.W), axis=1) / 0.5
    check_independence(every)
    check_independence(other)
    assert abs((every[0] * other).mean()) < 4.5 / math.sqrt(other.size)


def check_independence(every):
    """By moments, and along all axes, within 4.5 standard errors."""
    count = every.size
    assert abs(every.mean()) < 4.5 / math.sqrt(count)
    assert abs((every**2).mean() - 1) < 4.5 * math.sqrt(2 / count)
    assert abs((every**3).mean()) < 4.5 * math.sqrt(15 / count)
    assert abs((every**4).mean() - 3) < 4.5 * math.sqrt(96 / count)
    for axis in range(every.ndim):
        first, second = (np.delete(every, i, axis) for i in (0, -1))
        assert abs((first * second).mean()) < 4.5 / math.sqrt(first.size), axis
        squares = (first**2 - 1) * (second**2 - 1)
        assert abs(squares.mean()) < 4.5 * 2 / math.sqrt(first.size), axis
