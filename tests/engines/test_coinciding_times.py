"""Known times that coincide, exactly or to rounding, or lie a billionth apart: jumps of `f`, doses,
events, saved times and the ends of the time span. Values and derivatives are those of closed forms,
which know nothing of coincidences where both sides of one have the same derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo

from ..problems import ALGS_OF_EVENTS as ALGS


TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
RATES = jnp.array([3.0, -2.0, 5.0, 1.5])
AMOUNTS = jnp.array([0.7, -0.4, 1.1])
# Four times at which the field jumps, those of two doses and of an event, and two saved times.
SLOTS = 9
END = 6.0


def passed(t, p):
    """Which jumps are behind, each written in another way, which decides what is at its time."""
    a, b, c, d = p[:4]
    return jnp.stack([t > a, ~(t <= b), t >= c, ~(t < d)])


def field(u, p, t):
    return jnp.sum(jnp.where(passed(t, p), RATES, 0.0)) - p[-1] * u


def algebraic(u, p, t):
    """The second component is twice the first."""
    return jnp.stack([field(u[0], p, t), 2 * u[0] - u[1]])


def more(amount):
    def affect(integrator):
        scale = jnp.arange(1.0, 1.0 + integrator.u.size)
        return eo.remake(integrator, u=integrator.u + amount * scale)

    return affect


def solved(x, name, only_jumps=False, **options):
    """The states at the saved times, before what happens there, and at the end.

    **Arguments:** `x`: the times, followed by the rate of decay.
    """
    jumps, doses, _, saved = jnp.split(x[:-1], [4, 6, 7])
    p = jnp.concatenate([x[:4], x[6:7], x[-1:]])
    f, u0 = field, jnp.ones(1)
    if name == "mass matrix":
        f = eo.ODEFunction(algebraic, mass_matrix=np.diag([1.0, 0.0]))
        u0 = jnp.array([1.0, 2.0])
    callbacks = [
        *(eo.PresetTimeCallback(t[None], more(a)) for t, a in zip(doses, AMOUNTS, strict=False)),
        eo.ContinuousCallback(lambda u, t, i: t - i.p[4], more(AMOUNTS[2])),
    ]
    options |= {} if only_jumps else {"callback": eo.CallbackSet(*callbacks), "max_events": 8}
    saveat = jax.lax.stop_gradient(jnp.sort(jnp.append(saved, END)))
    prob = eo.ODEProblem(f, u0, (0.0, END), p)
    how = {"d_discontinuities": jumps, "saveat": saveat, "tstops": saved[:1], **TIGHT, **options}
    return eo.solve(prob, ALGS[name], **how).u[:, 0]


def exactly(x, t, only_jumps=False):
    """The state at a time."""
    k = x[-1]
    since = jnp.maximum(t - x[:7], 0)
    # (What happens at the time itself is behind it.)
    left = jnp.where(since > 0, jnp.exp(-k * since), 0)
    of_jumps = jnp.sum(RATES * jnp.where(since[:4] > 0, 1 - left[:4], 0)) / k
    return jnp.exp(-k * t) + of_jumps + (0 if only_jumps else jnp.sum(AMOUNTS * left[4:]))


PLACES = [1.0, np.pi, 4.2]
TIMES = st.lists(
    st.tuples(st.sampled_from(PLACES), st.sampled_from(["exact", "ulp", "ulps", "apart", "below"])),
    min_size=SLOTS,
    max_size=SLOTS,
)


def times_of(drawn):
    moves = {
        "exact": lambda t: t,
        "ulp": lambda t: np.nextafter(t, END),
        "ulps": lambda t: t * (1 + 3e-16),
        "apart": lambda t: t + 1e-9,
        "below": lambda t: np.nextafter(t, 0),
    }
    return np.array([moves[how](t) for t, how in drawn])


@functools.cache
def found(name, order, only_jumps=False, **options):
    def end(x):
        return solved(x, name, only_jumps, **dict(options))[-1]

    def each(x):
        firsts = jax.grad(end)(x), jax.jacfwd(end)(x)
        seconds = (jax.hessian(end)(x),) if order > 1 else ()
        return solved(x, name, only_jumps, **dict(options)), firsts, seconds

    return jax.jit(each)


def check(x, name, order=1, only_jumps=False, tol=1e-7, **options):
    def end(x):
        return exactly(x, END, only_jumps)

    u, firsts, seconds = found(name, order, only_jumps, **options)(x)
    for got, t in zip(u, (*np.sort(x[7:9]), END), strict=True):
        # (To rounding, a saved time may be on either side of a dose, but for the same number.)
        apart = np.abs(np.asarray(x[:7]) - t)
        near = apart < 1e-12
        is_clear = not near[4:].any() or (not near[6] and not apart[near].any())
        if only_jumps or is_clear:
            assert abs(got - exactly(x, t, only_jumps)) < 1e-8, t
    n = 4 if only_jumps else 7
    which = np.r_[:n, SLOTS]
    for got in firsts:
        np.testing.assert_allclose(got[which], jax.grad(end)(x)[which], rtol=0, atol=tol)
    for got in seconds:
        np.testing.assert_allclose(got, jax.hessian(end)(x), rtol=0, atol=10 * tol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((x, 1) for x in ALGS),
        *((x, 2) for x in ("Tsit5", "Vern7", "Rodas5P")),
    ],
)
def test_all_kinds(name, order):
    @settings(max_examples=40, deadline=None)
    @given(TIMES)
    def one(drawn):
        check(jnp.append(times_of(drawn), 0.3), name, order)

    one()


@pytest.mark.slow
def test_values_on_diffrax():
    """Which has no callbacks, and derivatives by the times only where these are apart."""
    solve = jax.jit(lambda x: solved(x, "Tsit5", True, engine="diffrax"))

    @settings(max_examples=40, deadline=None)
    @given(TIMES)
    def one(drawn):
        x = jnp.append(times_of(drawn), 0.3)
        wanted = [exactly(x, t, True) for t in (*np.sort(x[7:9]), END)]
        np.testing.assert_allclose(solve(x), wanted, rtol=0, atol=1e-7)

    one()


@pytest.mark.slow
def test_derivatives_where_steps_move():
    """NaN by what coincides, which is not a number that looks like one."""

    def end(jumps):
        x = jnp.concatenate([jumps, 5 * jnp.ones(5), 0.3 * jnp.ones(1)])
        return solved(x, "Tsit5", True, engine="diffrax")[-1]

    apart, found = jnp.array([1.0, 2.0, 3.0, 4.0]), jax.jit(jax.grad(end))
    wanted = -RATES * np.exp(-0.3 * (END - apart))
    np.testing.assert_allclose(found(apart), wanted, rtol=1e-4)
    assert np.isnan(found(apart.at[1].set(1.0))[:2]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGS)
def test_a_jump_is_right_in_either_way_of_writing(name):
    """No stage before it sees what is behind it: no step is rejected."""
    at = np.pi / 3
    held = 1 - np.exp(-at)
    wanted = -3 + (held + 3) * np.exp(-(2 - at))

    def end(p, before, tspan=(0.0, 2.0)):
        f, u0 = lambda u, p, t: jnp.where(before(t, p), 1.0, -3.0) - u, jnp.zeros(1)
        if name == "mass matrix":
            f, u0 = eo.ODEFunction(f, mass_matrix=np.eye(1)), jnp.zeros(1)
        prob = eo.ODEProblem(f, u0, tspan, p)
        return eo.solve(prob, ALGS[name], d_discontinuities=p, **TIGHT)

    for before in (jnp.less, jnp.less_equal):
        sol = end(at, before)
        assert abs(float(sol.u[-1, 0]) - wanted) < 1e-11
        assert int(sol.stats.nreject) == 0
        by_time = jax.grad(lambda p, before=before: end(p, before).u[-1, 0])(at)
        assert abs(by_time - 4 * np.exp(-(2 - at))) < 1e-10
        # At the very end, too.
        sol = end(at, before, (0.0, at))
        assert abs(float(sol.u[-1, 0]) - held) < 1e-11
        assert int(sol.stats.nreject) == 0


@pytest.mark.slow
@pytest.mark.parametrize("before", [jnp.less, jnp.less_equal])
def test_a_continuous_adjoint_is_right_in_either_way_of_writing(before):
    def end(p, **options):
        f = lambda u, p, t: p[0] * jnp.where(before(t, 1.0), 1.0, -3.0) - p[1] * u  # noqa: E731
        prob = eo.ODEProblem(f, jnp.zeros(1), (0.0, 2.0), p)
        return eo.solve(prob, eo.Vern7(), d_discontinuities=1.0, **TIGHT, **options).u[-1, 0]

    p = jnp.array([1.5, 0.7])
    found = jax.grad(lambda p: end(p, sensealg=eo.GaussAdjoint()))(p)
    np.testing.assert_allclose(found, jax.grad(end)(p), rtol=1e-8)


@pytest.mark.slow
def test_infusions_one_after_the_other():
    """Each ends as the next begins, in sixteen compartments, so that many comparisons turn."""
    n, k = 16, 0.2

    def f(u, p, t):
        on, duration = p
        starts = on + duration * jnp.arange(3.0)
        given = (t > starts) & (t <= starts + duration)
        return jnp.where(given, jnp.arange(1.0, 4.0), 0.0) @ jnp.ones((3, n)) - k * u

    def times(p):
        starts = p[0] + p[1] * jnp.arange(3.0)
        return jnp.concatenate([starts, starts + p[1]])

    def end(p):
        prob = eo.ODEProblem(f, jnp.zeros(n), (0.0, 10.0), p)
        return eo.solve(prob, eo.Vern7(), d_discontinuities=times(p), **TIGHT).u[-1, 0]

    def wanted(p):
        left = jnp.exp(-k * (10 - times(p))) / k
        return jnp.arange(1.0, 4.0) @ (left[3:] - left[:3])

    p = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(jax.jit(jax.grad(end))(p), jax.grad(wanted)(p), rtol=1e-9)


def test_more_comparisons_than_are_gone_through_at_once():
    """Of thirteen, eight, nine or all turn at one time, and each has its own derivative."""
    n = 13

    def end(x):
        f = lambda u, p, t: jnp.where(t < p, 0.0, jnp.arange(1.0, 1 + n)) - u  # noqa: E731
        prob = eo.ODEProblem(f, jnp.zeros(n), (0.0, 3.0), x)
        return jnp.sum(eo.solve(prob, eo.Vern7(), d_discontinuities=x, **TIGHT).u[-1])

    found = jax.jit(jax.grad(end))
    for count in (0, 8, 9, n):
        at = jnp.where(jnp.arange(n) < count, 1.0, 1.5 + jnp.arange(n) / 13)
        wanted = -np.arange(1.0, 1 + n) * np.exp(-(3 - at))
        np.testing.assert_allclose(found(at), wanted, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behind", "direction"),
    [
        (jnp.greater_equal, 1),
        (jnp.greater, 1),
        (jnp.greater, -1),
        (jnp.greater_equal, -1),
    ],
)
def test_jumps_at_the_ends_and_at_saved_times(behind, direction):
    """Where all times move together, the end doesn't change: rates at a time are on one side, as
    the derivative by a jump there is."""

    def rows(s):
        t0, t1 = s[0], direction * 2.0 + s[1]
        jumps = jnp.stack([s[2], direction * 1.0 + s[3], direction * 2.0 + s[4]])

        def f(u, p, t):
            rates = jnp.where(behind(direction * t, direction * p), jnp.array([1.0, 2.0, 4.0]), 0)
            return jnp.sum(rates) - 0.3 * u

        prob = eo.ODEProblem(f, [1.0], (t0, t1), jumps)
        saveat = jnp.stack([direction * 1.0 + s[5], t1])
        return eo.solve(prob, d_discontinuities=jumps, saveat=saveat, **TIGHT).u[:, 0]

    zero = jnp.zeros(6)
    found = jax.jit(jax.jacrev(rows))(zero)
    np.testing.assert_allclose(found @ jnp.ones(6), 0, atol=1e-9)
    assert np.abs(found[1, [0, 1, 3]]).min() > 0.1
    pushed = jax.jvp(rows, (zero,), (jnp.arange(6.0),))[1]
    np.testing.assert_allclose(pushed, found @ jnp.arange(6.0), atol=1e-9)
