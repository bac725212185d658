"""Solves with callbacks are those of OrdinaryDiffEq, event for event, as recorded from Julia.

Accepted and rejected steps and evaluations of f are equal in number. The times of steps agree to
the single precision of the controller's powers (see `test_julia_steps.py`), and so do events at
their ends. Events that are searched agree up to some roundings of the 110 steps before them, and
with Julia's own powers up to four roundings, or what roundings of the data move.
"""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..julia_powers import JuliasController
from ..marks import on_julia, slow_unless


DATA = pathlib.Path(__file__).parents[1] / "data" / "julia_events.json"
RECORDED = json.loads(DATA.read_text())["cases"]


def half(u, t, integrator):
    return u[0] - 0.5


def kick(integrator):
    return eo.remake(integrator, u=integrator.u + jnp.array([0.0, 0.1]))


def scaled(*factors):
    return lambda integrator: eo.remake(integrator, u=integrator.u * jnp.array(factors))


def moved(*by):
    return lambda integrator: eo.remake(integrator, u=integrator.u + jnp.array(by))


def same(integrator):
    return integrator


def box(integrator, mask):
    """A ball that bounces off the floor and two walls."""
    factors = jnp.where(mask[jnp.array([0, 0, 1, 1])] != 0, jnp.array([1, -0.9, 1, -0.9]), 1.0)
    return eo.remake(integrator, u=factors * integrator.u)


def oscillator(callback, **options):
    return lambda u, p, t: jnp.array([u[1], -u[0]]), [1.0, 0.0], 10.0, callback, options


def decay(callback, end=10.0, **options):
    return lambda u, p, t: -u, [1.0], end, callback, options


At, Discrete = eo.ContinuousCallback, eo.DiscreteCallback
CASES = {
    "both directions": oscillator(At(half, same)),
    "up only": oscillator(At(half, same, None)),
    "down only": oscillator(At(half, None, same)),
    "left": oscillator(At(half, kick)),
    "none": oscillator(At(half, kick, rootfind=eo.NoRootFind)),
    "end only": oscillator(At(half, kick, interp_points=0)),
    "twice in a step": oscillator(At(lambda u, t, _: (t - 2.0) * (t - 2.05), kick)),
    "vector": (
        lambda u, p, t: jnp.array([u[1], -9.8, u[3], 0.0]),
        [50.0, 0.0, 0.0, 2.0],
        15.0,
        eo.VectorContinuousCallback(lambda u, t, _: jnp.array([u[0], (u[2] - 10) * u[2]]), box, 2),
        {},
    ),
    "ends": decay(At(half, eo.terminate), saveat=0.1),
    "ends, discrete": decay(Discrete(lambda u, t, _: u[0] < 0.5, eo.terminate)),
    "every step": decay(Discrete(lambda u, t, _: True, scaled(1.01)), 5.0),
    "set": oscillator(
        eo.CallbackSet(
            At(half, kick),
            At(lambda u, t, _: u[1] - 0.3, scaled(0.99, 1.0)),
            Discrete(lambda u, t, _: u[0] > 0.9, moved(-0.01, 0.0)),
        )
    ),
    "start": oscillator(At(lambda u, t, _: u[0] - 1.0, same)),
    "changes p": (
        lambda u, p, t: p * u,
        [1.0],
        3.0,
        At(half, None, lambda integrator: eo.remake(integrator, p=0.5)),
        {"p": -1.0},
    ),
    "fixed dt": oscillator(At(half, kick), dt=0.1, adaptive=False),
    "ball": (
        lambda u, p, t: jnp.array([u[1], -9.8]),
        [50.0, 0.0],
        15.0,
        At(lambda u, t, _: u[0], scaled(1.0, -0.9)),
        {},
    ),
}
# Where the error estimate is nothing but rounding.
NOISE = ("vector", "ball")
# Where events are at the ends of steps.
AT_STEPS = ("none", "ends, discrete", "every step", "set")
QUICK = ("twice in a step", "vector", "ends", "set", "changes p")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(slow_unless(x in QUICK, "compiled", x) for x in CASES),
        *(on_julia("julia", x) for x in CASES),
    ],
)
def test_events_are_julias(engine, name):
    f, u0, end, callback, options = CASES[name]
    recorded, p = RECORDED[name], options.get("p")
    options = {key: x for key, x in options.items() if key != "p"}
    prob = eo.ODEProblem(f, u0, (0.0, end), p, callback=callback)
    sol = eo.solve(prob, eo.Tsit5(), engine=engine, abstol=1e-8, reltol=1e-8, **options)
    assert sol.retcode.name == recorded["retcode"]
    if name not in NOISE:
        found = sol.stats.naccept, sol.stats.nreject, sol.stats.nf
        assert found == (recorded["naccept"], recorded["nreject"], recorded["nf"])
    t, expected = np.asarray(sol.events.t), np.array(recorded["t"])
    assert t.shape == expected.shape
    near = 4e-7 if name in AT_STEPS else 1e-14
    np.testing.assert_allclose(t, expected, rtol=near)
    ended = sol.retcode == eo.ReturnCode.Terminated
    np.testing.assert_allclose((sol.events.u_after if ended else sol.u)[-1], recorded["end"], 1e-6)
    if "before" in recorded:
        off = 1e-6 if name in AT_STEPS else 1e-12
        np.testing.assert_allclose(sol.events.u_before, recorded["before"], rtol=off, atol=off)
    if "which" in recorded:
        np.testing.assert_array_equal(sol.events.which + 1, recorded["which"])
    if "dir" in recorded:
        signs = [{"up": 1, "down": -1}[x] for x in recorded["dir"]]
        np.testing.assert_array_equal(sol.events.direction, signs)
    if "mask" in recorded:
        np.testing.assert_array_equal(sol.events.direction, recorded["mask"])


# Cases whose events are searched. In those of `FOUR`, times are Julia's to four roundings. In the
# others, error estimates are hardly more than roundings, or nothing else, so that a rounding of the
# data moves the steps.
FOUR = ("both directions", "up only", "down only", "left", "end only", "twice in a step")
SEARCHED = (*FOUR, "ends", "changes p", "ball", "vector")


def neighbours(u0, p):
    """Numbers of trajectories: those of the case, and those with one of its numbers moved by a
    rounding, in pairs of both directions. The numbers are initial values, p, and a factor of f."""
    numbers = np.array([*u0, 0.0 if p is None else p, 1.0])
    rows = [numbers]
    for i in np.flatnonzero(numbers):
        for end in (-np.inf, np.inf):
            rows.append(numbers.copy())
            rows[-1][i] = np.nextafter(numbers[i], end)
    return jnp.array(rows)


@pytest.mark.parametrize("name", [slow_unless(x == "left", x) for x in SEARCHED])
def test_times_to_the_last_roundings(name):
    """With Julia's powers. Four roundings, or what a rounding of each number moves."""
    f, u0, end, callback, options = CASES[name]
    options = {**options, "abstol": 1e-8, "reltol": 1e-8, "engine": "compiled"}
    rows = neighbours(u0, p := options.pop("p", None))

    def moved(prob, ctx):
        *start, own, factor = rows[ctx.index]
        by = {} if p is None else {"p": own}
        return eo.remake(prob, f=lambda u, p, t: factor * f(u, p, t), u0=jnp.stack(start), **by)

    ens = eo.EnsembleProblem(eo.ODEProblem(f, u0, (0.0, end), p, callback=callback), moved)
    options |= {"stepsize_controller": JuliasController(), "trajectories": len(rows)}
    times = np.asarray(eo.solve(ens, eo.Tsit5(), **options).events.t)
    expected = np.array(RECORDED[name]["t"])
    assert times.shape == (len(rows), expected.size)
    ours, (lower, upper) = times[0], (times[1::2], times[2::2])
    off, *moves = (
        np.max(np.abs(x - ours) / np.spacing(expected), axis=-1, initial=0.0)
        for x in (expected, lower, upper)
    )
    allowed = 4 if name in FOUR else max(4, np.sum(np.maximum(*moves)))
    assert off <= allowed


def test_times_of_fixed_steps():
    """They are Julia's to four roundings, apart from the roundings of the starts of steps: Julia
    adds the steps up, and here each is laid out from the last event."""
    f, u0, end, callback, options = CASES["fixed dt"]
    prob = eo.ODEProblem(f, u0, (0.0, end), callback=callback)
    times = eo.solve(prob, eo.Tsit5(), engine="compiled", **options).events.t
    expected, dt = np.array(RECORDED["fixed dt"]["t"]), options["dt"]
    start = drift = 0.0
    for found, recorded in zip(np.asarray(times), expected, strict=True):
        steps = int((recorded - start) / dt)
        added = start
        for _ in range(steps):
            added += dt
        drift += added - (start + steps * dt)
        assert abs(found + drift - recorded) <= 4 * np.spacing(recorded)
        start = recorded
