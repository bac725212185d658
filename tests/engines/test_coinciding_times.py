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

from ..marks import slow_unless


TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
ALGS = {
    "Tsit5": eo.Tsit5(),
    "Vern7": eo.Vern7(),
    "Rodas5P": eo.Rodas5P(),
    "AutoTsit5": eo.AutoTsit5(eo.Rodas5P()),
    "mass matrix": eo.Rodas5P(),
}
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


@pytest.mark.parametrize("name", [slow_unless(x == "Tsit5", x) for x in ALGS])
def test_all_kinds(name):
    @settings(max_examples=300, deadline=None)
    @given(TIMES)
    def one(drawn):
        check(jnp.append(times_of(drawn), 0.3), name)

    one()
