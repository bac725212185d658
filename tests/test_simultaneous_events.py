"""Callbacks that act at one time, exactly or to rounding, or a billionth apart: each acts once, in
its turn, and is a row of `sim.events`; derivatives are those of closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo

from .problems import ALGS_OF_EVENTS as ALGS


AT, END, N = 0.75, 1.0, 48
TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
# Conditions that cross zero where the state `x` is `a`, which is positive.
FORMS = {
    "less": lambda x, a: x - a,
    "reverse": lambda x, a: a - x,
    "tripled": lambda x, a: 3.0 * (x - a),
    "large": lambda x, a: 1e6 * (x - a),
    "small": lambda x, a: 1e-6 * (x - a),
    "ratio": lambda x, a: x / a - 1.0,
    "inverse": lambda x, a: a / x - 1.0,
    "sin": lambda x, a: jnp.sin(x / 2) - jnp.sin(a / 2),
    "log": lambda x, a: jnp.log(x) - jnp.log(a),
    "powers": lambda x, a: (x - a) * (x + 1.0) ** 3,
    "steep": lambda x, a: jnp.where(x > a, 1.0, -1.0),
    "unbounded": lambda x, a: jnp.interp(x - a, jnp.array([-4.0, 4.0]), jnp.array([-3.0, 3.0])),
}
FALLS = {"reverse", "inverse"}


def field(u, p, t):
    """Of `x`, which grows steadily; of `y`, which decays; and of twice `x`."""
    _, y, z = u
    rate, decay = p
    return jnp.stack([rate, -decay * y, 2 * rate * jnp.ones_like(z)])


def algebraic(u, p, t):
    return field(u, p, t).at[2].set(2 * u[0] - u[2])


def problem(alg, callback, u0, p, end=END):
    f = field
    if alg == "mass matrix":
        f = eo.ODEFunction(algebraic, mass_matrix=np.diag([1.0, 1.0, 0.0]))
    return eo.ODEProblem(f, u0, (0.0, end), p, callback=callback)


def remade(affect):
    """The affect `y, t -> y`."""

    def on(integrator, *_):
        u = integrator.u
        return eo.remake(integrator, u=u.at[1].set(affect(u[1], integrator.t)))

    return on


def continuous(form, level, affect, **how):
    return eo.ContinuousCallback(lambda u, t, _: FORMS[form](u[0], level), affect, **how)


KINDS = st.lists(st.sampled_from([*FORMS, "preset", "periodic", "pair"]), min_size=2, max_size=4)


def pair(level, affect):
    """Of a rising and a falling condition."""
    return eo.VectorContinuousCallback(
        lambda u, t, _: jnp.stack([u[0] - level, 1 - u[0] / level]), affect, 2
    )


def check(alg, kinds, seed):
    """Callbacks of these kinds, at times that differ by nothing, by roundings, or by 1e-9, for each
    of the trajectories in another way. Their affects, `y -> 2 y + number`, tell the order."""
    random = np.random.default_rng(seed)
    rates = random.uniform(0.3, 2.0, N)
    # (The parameters of some conditions are a few roundings off.)
    offsets = random.choice([0.0, 0.0, 0.0, 1e-9, -1e-9], (N, len(kinds)))
    levels = rates[:, None] * (AT + offsets)
    levels *= 1 + random.integers(-2, 3, levels.shape) * np.finfo(float).eps
    known = [kind in ("preset", "periodic") for kind in kinds]
    offsets[:, known] = 0.0

    def callbacks(level):
        found = []
        for k, kind in enumerate(kinds):
            affect = remade(lambda y, t, k=k: 2 * y + k + 1)
            if kind == "preset":
                found.append(eo.PresetTimeCallback([AT, 0.1], affect))
            elif kind == "periodic":
                found.append(eo.PeriodicCallback(affect, AT / 3))
            elif kind == "pair":
                found.append(pair(level[k], affect))
            else:
                found.append(continuous(kind, level[k], affect))
        return eo.CallbackSet(*found)

    prob = problem(alg, None, [0.0, 0.0, 0.0], [1.0, 0.0])

    def prob_func(prob, ctx):
        i = ctx.index
        p = jnp.stack([jnp.asarray(rates)[i], 0.0])
        return eo.remake(prob, p=p, callback=callbacks(jnp.asarray(levels)[i]))

    ens = eo.EnsembleProblem(prob, prob_func)
    sim = eo.solve(ens, ALGS[alg], trajectories=N, max_events=24, **TIGHT)
    assert (sim.retcode == eo.ReturnCode.Success).all()
    events, several = sim.events, "pair" in kinds
    for i in range(N):
        rows = [(AT + offsets[i, k], known[k], k) for k in range(len(kinds))]
        rows += [(0.1, True, k) for k, x in enumerate(kinds) if x == "preset"]
        more = (AT / 3, 2 * AT / 3)
        rows += [(t, True, k) for t in more for k, x in enumerate(kinds) if x == "periodic"]
        times, _, which = zip(*sorted(rows), strict=True)
        n = len(which)
        assert int(events.count[i]) == n
        np.testing.assert_array_equal(events.which[i, :n], which)
        np.testing.assert_allclose(events.t[i, :n], times, rtol=0, atol=2e-11)
        y = 0.0
        for k in which:
            y = 2 * y + k + 1
        np.testing.assert_allclose(sim.u[i, -1, 1], y, rtol=1e-12)
        ways = [(1, -1) if kinds[k] == "pair" else (1 - 2 * (kinds[k] in FALLS), 0) for k in which]
        found = np.asarray(events.direction[i, :n]).reshape(n, -1)
        np.testing.assert_array_equal(found, np.array(ways)[:, : 1 + several])


@pytest.mark.slow
@pytest.mark.parametrize("alg", ["Tsit5", "mass matrix"])
def test_each_acts_once_in_turn(alg):
    check(alg, ["powers", "steep", "preset", "pair"], 1)


@pytest.mark.slow
@pytest.mark.parametrize(("alg", "examples"), [("Tsit5", 2), *((x, 3) for x in ALGS)])
def test_sets_at_random(alg, examples):
    @settings(max_examples=examples, deadline=None)
    @given(KINDS, st.integers(0, 2**32 - 1))
    def each(kinds, seed):
        check(alg, kinds, seed)

    each()


#
# Waves: each condition rises once, and falls once
#

WAVES = {
    "same": lambda x, a: [x - a, x - a],
    "scaled": lambda x, a: [x - a, 3.0 * (x - a)],
    "rounded otherwise": lambda x, a: [x - a, x / a - 1.0],
    "sin": lambda x, a: [x - a, jnp.sin(x) - jnp.sin(a)],
}


def same(integrator, *_):
    return integrator


@pytest.mark.slow
@pytest.mark.parametrize(
    ("several", "wave"),
    [(x, y) for x in (False, True)
     for y in WAVES],
)  # fmt: skip
def test_each_condition_rises_and_falls_once(several, wave):
    n, conditions = 1000, WAVES[wave]
    if several:
        callback = eo.VectorContinuousCallback(
            lambda u, t, i: jnp.stack(conditions(u[0], i.p)), same, 2
        )
    else:
        callback = eo.CallbackSet(
            *[
                eo.ContinuousCallback(lambda u, t, i, k=k: conditions(u[0], i.p)[k], same)
                for k in range(2)
            ]
        )
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.cos(t)[None], [0.0], (0.0, 3.0), 0.5, callback=callback
    )
    levels = jnp.linspace(0.3, 0.9, n)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=levels[ctx.index]))
    sim = eo.solve(ens, trajectories=n, abstol=1e-9, reltol=1e-9, max_events=8)
    assert (sim.retcode == eo.ReturnCode.Success).all()
    events = sim.events
    assert (events.count == (2 if several else 4)).all()
    ways = np.asarray(events.direction)
    expected = [[1, 1], [-1, -1]] if several else [1, 1, -1, -1]
    np.testing.assert_array_equal(
        ways[:, : len(expected)], np.broadcast_to(expected, (n, *np.shape(expected)))
    )
    if not several:
        np.testing.assert_array_equal(events.which[:, :4], np.tile([0, 1, 0, 1], (n, 1)))


def weighted(*arrays):
    return sum(jnp.sum(x**2 * jnp.cos(1.0 + jnp.arange(float(x.size)))) for x in arrays)


def of_first_and_second_order(fn, x):
    """The gradient, and its derivative in some direction."""
    along = jnp.cos(1.0 + jnp.arange(float(x.size)))
    return jax.jit(lambda x: jax.jvp(jax.grad(fn), (x,), (along,)))(x)


# The kinds, each with an offset of its level.
DERIVED = {
    "two": [("less", 0.0), ("ratio", 0.0)],
    "four": [("ratio", 0.0), ("less", 1e-9), ("preset", 0.0), ("sin", 0.0)],
    "a vector's": [("pair", 0.0), ("inverse", 0.0)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alg", "name"),
    [(x, y) for x in ALGS for y in DERIVED],
)
def test_derivatives_of_what_stays_together(alg, name):
    """Of the end, and of times and states of events: by the level, the rate of growth, the decay,
    and a weight in affects whose order matters."""
    kinds = DERIVED[name]

    def affect(y, t, k, weight):
        return 1.5 * y + (k + 1.0) * weight * t

    def found(x):
        level, rate, decay, weight = x
        callbacks = []
        for k, (kind, off) in enumerate(kinds):
            on = remade(lambda y, t, k=k: affect(y, t, k, weight))
            if kind == "preset":
                callbacks.append(eo.PresetTimeCallback((level / rate)[None], on))
            elif kind == "pair":
                callbacks.append(pair(level, on))
            else:
                callbacks.append(continuous(kind, level * (1 + off), on))
        u0 = jnp.stack([0 * level, 1 + 0 * level, 0 * level])
        prob = problem(alg, eo.CallbackSet(*callbacks), u0, jnp.stack([rate, decay]))
        sol = eo.solve(prob, ALGS[alg], max_events=len(kinds), **TIGHT)
        events = sol.events
        return weighted(sol.u[-1, :2], events.t, events.u_before[:, 1], events.u_after[:, 1])

    def expected(x):
        level, rate, decay, weight = x
        y, t, rows = 1.0, 0.0, []
        for off, _, k in sorted((off, kind == "preset", k) for k, (kind, off) in enumerate(kinds)):
            at = level * (1 + off) / rate
            before = y * jnp.exp(-decay * (at - t))
            y, t = affect(before, at, k, weight), at
            rows.append((at, before, y))
        end = jnp.stack([rate * END, y * jnp.exp(-decay * (END - t))])
        return weighted(end, *map(jnp.stack, zip(*rows, strict=True)))

    x = jnp.array([0.9, 1.2, 0.7, 0.8])
    for a, b in zip(*(of_first_and_second_order(f, x) for f in (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("resets", [True, False])
def test_each_moves_by_its_own_condition(resets):
    """Of callbacks that only happen to act at one time. The first one may reset what the second
    one looks at, which moves as it would have moved."""

    def found(x):
        level, other, time, dose, rate, decay = x
        add = [remade(lambda y, t, k=k: y + (k + 1.0) * (1 + t)) for k in range(4)]
        if resets:
            other = level
            add[0] = lambda i: eo.remake(i, u=i.u.at[0].set(0.0).at[1].add(1 + i.t))
        callback = eo.CallbackSet(
            continuous("less", level, add[0]),
            continuous("ratio", other, add[1]),
            eo.ContinuousCallback(lambda u, t, _: t - time, add[2]),
            eo.PresetTimeCallback(dose[None], add[3]),
        )
        u0 = jnp.stack([0 * level, 1 + 0 * level, 0 * level])
        prob = problem("Tsit5", callback, u0, jnp.stack([rate, decay]))
        sol = eo.solve(prob, max_events=4, **TIGHT)
        return weighted(sol.u[-1, :2], sol.events.t)

    def expected(x):
        level, other, time, dose, rate, decay = x
        at = jnp.stack([level / rate, (level if resets else other) / rate, time, dose])
        y = jnp.sum((1 + jnp.arange(4.0)) * (1 + at) * jnp.exp(-decay * (END - at)))
        end = rate * (END - at[0]) if resets else rate * END
        return weighted(jnp.stack([end, jnp.exp(-decay) + y]), at)

    x = jnp.array([0.9, 0.9, AT, AT, 1.2, 0.7])
    for a, b in zip(*(of_first_and_second_order(f, x) for f in (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


#
# What an affect is told
#


def test_an_affect_is_told_what_crosses():
    """By sign and mask, of one condition, of several, and of a discrete callback."""

    def told(integrator, *mask):
        sign = jnp.atleast_1d(integrator.sign)
        assert jnp.shape(integrator.mask) == jnp.shape(integrator.sign)
        for x in mask:
            assert x is integrator.sign
        crosses = jnp.atleast_1d(integrator.mask)
        code = jnp.sum(
            jnp.where(crosses, 0.5 + sign.astype(float) * 10.0 ** jnp.arange(float(sign.size)), 0.0)
        )
        return eo.remake(integrator, u=integrator.u.at[1].set(code))

    level = 0.5
    callback = eo.CallbackSet(
        continuous("less", level, told),
        eo.VectorContinuousCallback(
            lambda u, t, _: jnp.stack([u[0] - 9.0, level - u[0], u[0] / level - 1.0]), told, 3
        ),
        eo.DiscreteCallback(lambda u, t, integrator: t == 0.75, told),
        continuous("less", 0.25, None, affect_neg=told),
        eo.PresetTimeCallback([0.75], told),
    )
    prob = problem("Tsit5", callback, [0.0, 0.0, 0.0], [1.0, 0.0])
    events = eo.solve(prob).events
    np.testing.assert_array_equal(events.which, [0, 1, 2, 4])
    np.testing.assert_array_equal(events.u_after[:, 1], [1.5, 91.0, 1.5, 1.5])


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
def test_at_the_ends_of_steps(backwards):
    """With fixed steps, in single precision, too: a state that is zero there but for roundings;
    what ends the solve and what else acts then."""
    at = eo.ContinuousCallback
    for dtype in (jnp.float32, jnp.float64):
        conditions = [lambda x: x - 0.7, lambda x: 3 * (x - 0.7), lambda x: x / 0.7 - 1]

        def f(u, p, t):
            return jnp.stack([jnp.ones_like(t), jnp.zeros_like(t)])

        def kept(k):
            return lambda i: eo.remake(i, u=i.u.at[1].set(2 * i.u[1] + k))

        callback = eo.CallbackSet(
            *[at(lambda u, t, _, c=c: c(u[0]), kept(k)) for k, c in enumerate(conditions)],
            at(lambda u, t, _: u[0] - 0.7, lambda i: eo.terminate(kept(5)(i))),
            at(lambda u, t, _: u[0] - 0.7, kept(7)),
        )
        span = (1.0, 0.0) if backwards else (0.0, 1.0)
        u0 = jnp.array([span[0], 0.0], dtype)
        prob = eo.ODEProblem(f, u0, tuple(jnp.asarray(x, dtype) for x in span), callback=callback)
        sol = eo.solve(prob, eo.Tsit5(), dt=0.1, adaptive=False)
        assert sol.retcode == eo.ReturnCode.Terminated
        np.testing.assert_array_equal(sol.events.which, range(5))
        np.testing.assert_array_equal(sol.events.t, sol.events.t[0])
        assert sol.u[-1, 1] == 2 * (2 * (2 * (2 * 0 + 1) + 2) + 5) + 7


def test_ends_together():
    """Where each event ends the solve, several may."""
    ends = [continuous(x, 0.5, eo.terminate) for x in ("less", "ratio")]
    prob = problem("Tsit5", eo.CallbackSet(*ends), [0.0, 0.0, 0.0], [1.0, 0.0])
    sol = jax.jit(lambda p: eo.solve(eo.remake(prob, p=p)))(jnp.array([1.0, 0.0]))
    assert sol.retcode == eo.ReturnCode.Terminated
    np.testing.assert_array_equal(sol.events.which, [0, 1])


def test_looks_again_after_it_has_left_zero():
    """A state that an affect stops at the root of two conditions, where another one moves it by
    roundings; it goes down, and rises again."""

    def to(speed):
        return lambda i: eo.remake(i, p=speed * jnp.ones_like(i.p))

    def jitter(i):
        by = jnp.where(jnp.sin(1e3 * i.t) > 0, 3.0, -3.0) * jnp.finfo(i.u.dtype).eps
        return eo.remake(i, u=i.u * (1 + by))

    callback = eo.CallbackSet(
        eo.ContinuousCallback(lambda u, t, _: u[0] - 0.25, lambda i: eo.remake(i, p=0.0 * i.p)),
        eo.ContinuousCallback(lambda u, t, _: 1e3 * (u[0] - 0.25), same),
        eo.PeriodicCallback(jitter, 0.05),
        eo.PresetTimeCallback([0.6], to(-1.0)),
        eo.PresetTimeCallback([0.8], to(1.0)),
    )
    prob = eo.ODEProblem(lambda u, p, t: p * jnp.ones_like(u), [0.0], (0.0, 1.5), 1.0)
    sol = eo.solve(prob, callback=callback, max_events=64)
    assert sol.retcode == eo.ReturnCode.Success
    which, direction = np.asarray(sol.events.which), np.asarray(sol.events.direction)
    for k in range(2):
        np.testing.assert_array_equal(direction[which == k], [1, 1])
        np.testing.assert_allclose(sol.events.t[which == k], [0.25, 1.0], rtol=1e-13)
    np.testing.assert_array_equal(which[which < 2], [0, 1, 0, 1])
