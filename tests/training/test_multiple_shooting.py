"""Multiple shooting, compared with closed forms, finite differences, and plain fits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo
from ensembleode.training.multiple_shooting import shooting_groups, shooting_losses

from ..marks import slow_unless
from ..problems import linear, lotka_volterra
from ..test_gradients import check_against_differences


TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
ALGORITHMS = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "arrays": eo.EnsembleGPUArray(),
    "columns": eo.EnsembleColumns(),
}
TS = np.linspace(1.0, 3.0, 13)
DATA = np.stack([np.cos(TS), 2 + np.sin(3 * TS)], axis=1)
RATE = -0.7


def decay(p=RATE, dtype=jnp.float64):
    return eo.ODEProblem(linear, jnp.zeros(2, dtype), (0.0, 1.0), jnp.asarray(p, dtype))


def expected_parts(data, ts, size, p=RATE, starts=None):
    """The data part and the continuity part for u' = p u, a group at a time."""
    data_part = continuity = 0.0
    first = list(range(0, len(ts) - 1, size - 1))
    u0s = data[first] if starts is None else starts
    for k, (i, u0) in enumerate(zip(first, u0s, strict=True)):
        group = slice(i, min(i + size, len(ts)))
        u = u0 * np.exp(p * (ts[group] - ts[i]))[:, None]
        data_part += np.sum((u - data[group])[0 if k == 0 else 1 :] ** 2)
        if k + 1 < len(first):
            continuity += np.sum(np.abs(u[-1] - u0s[k + 1]))
    return data_part, continuity


@pytest.mark.slow
@given(n=st.integers(2, 40), data=st.data())
@settings(max_examples=30, deadline=None)
def test_groups(n, data):
    """No point is dropped, and each is counted once."""
    size = data.draw(st.integers(2, n))
    ts = np.arange(n) ** 1.5
    groups = jax.tree.map(np.asarray, shooting_groups(np.arange(float(n)), ts, size))
    ranges = [range(i, min(i + size, n)) for i in range(0, n - 1, size - 1)]
    assert groups.ts.shape == groups.data.shape == (len(ranges), size)
    for k, points in enumerate(ranges):
        m = len(points)
        assert m >= 2
        np.testing.assert_array_equal(groups.data[k, :m], list(points))
        np.testing.assert_array_equal(groups.ts[k, :m], ts[list(points)])
        np.testing.assert_array_equal(groups.ts[k, m:], ts[points[-1]])
        assert groups.inside[k].tolist() == [True] * m + [False] * (size - m)
        assert groups.u0[k] == points[0]
        assert groups.target[k] == points[-1]
    np.testing.assert_array_equal(np.sort(groups.data[groups.counted]), np.arange(n))
    assert groups.has_next.tolist() == [True] * (len(ranges) - 1) + [False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in ALGORITHMS
        for size in (2, 5, 6, 12, 13)
        if name != "columns" or 12 % (size - 1) == 0
    ],
)
def test_closed_form(name, size):
    how = {"ensemblealg": ALGORITHMS[name], **TIGHT}
    shot = eo.multiple_shooting(decay(), DATA, TS, size, 10.0, **how)
    data_part, continuity = expected_parts(DATA, TS, size)
    np.testing.assert_allclose(shot.data_loss, data_part, rtol=1e-8)
    np.testing.assert_allclose(shot.continuity_loss, continuity, rtol=1e-8)
    np.testing.assert_allclose(shot.loss, data_part + 10 * continuity, rtol=1e-8)
    assert (shot.retcode == eo.ReturnCode.Success).all()
    inside = shooting_groups(DATA, TS, size).inside
    np.testing.assert_array_equal(jnp.isnan(shot.u), ~np.stack([inside, inside], axis=2))
    exact = shot.u[:, :1] * jnp.exp(RATE * (shot.t - shot.t[:, :1]))[..., None]
    np.testing.assert_allclose(shot.u, jnp.where(jnp.isnan(shot.u), jnp.nan, exact), rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threads", "columns"])
def test_time_in_the_equation(name):
    """u' = t, of times that every group has for itself."""
    ts = jnp.linspace(-2.0, 4.0, 7)
    data = ts[:, None] ** 2 / 2
    prob = eo.ODEProblem(lambda u, p, t: p * t * jnp.ones_like(u), [0.0], (0.0, 1.0), 1.0)
    shot = eo.multiple_shooting(prob, data, ts, 3, ensemblealg=ALGORITHMS[name], **TIGHT)
    np.testing.assert_allclose(shot.loss, 0.0, atol=1e-9)
    twice = eo.multiple_shooting(
        eo.remake(prob, p=2.0), data, ts, 3, ensemblealg=ALGORITHMS[name], **TIGHT
    )
    np.testing.assert_allclose(twice.continuity_loss, 4.0, rtol=1e-9)


@pytest.mark.slow
def test_one_group_is_a_plain_fit():
    shot = eo.multiple_shooting(decay(), DATA, TS, 13)
    sol = eo.solve(eo.remake(decay(), u0=DATA[0], tspan=(1.0, 3.0)), saveat=TS)
    np.testing.assert_array_equal(shot.u[0], sol.u)
    np.testing.assert_allclose(shot.loss, jnp.sum((sol.u - DATA) ** 2), rtol=1e-13)
    assert shot.continuity_loss == 0


@pytest.mark.parametrize("own_times", [True, False])
@pytest.mark.slow
def test_several_trajectories(own_times):
    """With times of their own, or with starts."""
    data = np.stack([DATA, 1 + DATA**2])
    ts = np.stack([TS, TS**2]) if own_times else TS
    starts = None if own_times else np.stack([DATA[[0, 5, 10]], 2 + DATA[[0, 5, 10]]])
    many = eo.multiple_shooting(decay(), data, ts, 6, starts=starts, **TIGHT)
    each = [
        eo.multiple_shooting(decay(), x, t, 6, starts=None if own_times else starts[i], **TIGHT)
        for i, (x, t) in enumerate(zip(data, np.broadcast_to(ts, (2, 13)), strict=True))
    ]
    assert many.u.shape == (2, 3, 6, 2)
    assert many.t.shape == (2, 3, 6)
    assert many.retcode.shape == (2, 3)
    for name in ("loss", "data_loss", "continuity_loss"):
        together = sum(getattr(one, name) for one in each)
        np.testing.assert_allclose(getattr(many, name), together, rtol=1e-10)
    for i, one in enumerate(each):
        np.testing.assert_allclose(many.u[i], one.u, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), jnp.float32),
        ((2, 2), jnp.float64),
        ((2,), jnp.complex128),
    ],
)
def test_states_of_any_shape_and_dtype(shape, dtype):
    ts = np.linspace(0.0, 1.0, 5)
    p = jnp.asarray(-1.0 + (2j if dtype == jnp.complex128 else 0.0), dtype)
    prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.ones(shape, dtype), (0.0, 1.0), p)
    data = jnp.exp(p * jnp.asarray(ts, dtype))
    data = jnp.broadcast_to(data.reshape(5, *[1] * len(shape)), (5, *shape))

    def loss(p):
        tolerances = {"abstol": 1e-7, "reltol": 1e-7}
        return eo.multiple_shooting(eo.remake(prob, p=p), data, ts, 3, **tolerances).loss

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    value, gradient = value_and_grad(p)
    assert value < 1e-3
    assert value.dtype == jnp.finfo(dtype).dtype
    assert jnp.isfinite(gradient)
    assert value_and_grad(p / 2)[0] > 1


@pytest.mark.slow
def test_losses_of_the_user():
    def huber_by_hand(x):
        return np.where(np.abs(x) < 1, x**2 / 2, np.abs(x) - 0.5)

    how = {"loss": optax.huber_loss, "continuity_loss": lambda a, b: jnp.max(jnp.abs(a - b))}
    shot = eo.multiple_shooting(decay(), 3 * DATA, TS, 5, **how, **TIGHT)
    u = np.asarray(shot.u)
    np.testing.assert_allclose(shot.data_loss, huber_by_hand(u - 3 * DATA[GROUPS_OF_5]).sum())
    ends = np.abs(u[:-1, -1] - 3 * DATA[[4, 8]])
    np.testing.assert_allclose(shot.continuity_loss, ends.max(axis=1).sum())


GROUPS_OF_5 = np.array([range(0, 5), range(4, 9), range(8, 13)])


@pytest.mark.slow
def test_starts():
    starts = DATA[[0, 5, 10]] + 0.25
    shot = eo.multiple_shooting(decay(), DATA, TS, 6, 1.0, starts=starts, **TIGHT)
    data_part, continuity = expected_parts(DATA, TS, 6, starts=starts)
    np.testing.assert_allclose(shot.data_loss, data_part, rtol=1e-8)
    np.testing.assert_allclose(shot.continuity_loss, continuity, rtol=1e-8)
    same = eo.multiple_shooting(decay(), DATA, TS, 6, starts=DATA[[0, 5, 10]])
    assert same.loss == eo.multiple_shooting(decay(), DATA, TS, 6).loss


def test_losses_of_groups():
    weight = 3.0
    groups = shooting_groups(DATA, TS, 6)
    losses = shooting_losses(decay(), groups, weight)
    whole = eo.multiple_shooting(decay(), DATA, TS, 6, weight)
    assert losses.shape == (3,)
    np.testing.assert_allclose(jnp.sum(losses), whole.loss, rtol=1e-13)

    @jax.jit
    def of_batch(p, batch):
        return shooting_losses(decay(p), batch, weight)

    for indices in ([2, 0], [1, 2]):
        batch = jax.tree.map(lambda x, i=indices: x[np.array(i)], groups)
        np.testing.assert_allclose(of_batch(RATE, batch), losses[np.array(indices)], rtol=1e-9)


def test_groups_of_several_trajectories():
    data, ts = np.stack([DATA, 1 + DATA]), np.stack([TS, 2 * TS])
    groups = shooting_groups(data, ts, 6)
    parts = [shooting_groups(data[i], ts[i], 6) for i in (0, 1)]
    together = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    jax.tree.map(np.testing.assert_array_equal, groups, together)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        slow_unless(case == ("threads", 6), *case)
        for case in [("threads", 6), ("threads", 13), ("serial", 4), ("arrays", 6), ("columns", 5)]
    ],
)
def test_finite_differences(name, size):
    prob = eo.ODEProblem(lotka_volterra, jnp.ones(2), (0.0, 1.0))
    groups = shooting_groups(DATA + 2, TS, size)

    def loss(x):
        how = {"ensemblealg": ALGORITHMS[name], "starts": x["starts"], **TIGHT}
        smooth = {"continuity_loss": lambda a, b: jnp.sum((a - b) ** 2)}
        changed = eo.remake(prob, p=x["p"])
        return eo.multiple_shooting(changed, DATA + 2, TS, size, 2.0, **how, **smooth).loss

    x = {"p": jnp.array([1.5, 1.0, 3.0, 1.0]), "starts": groups.u0}
    value_and_grad = jax.jit(jax.value_and_grad(loss))
    check_against_differences(lambda x: value_and_grad(x)[0], x, value_and_grad(x)[1])


def test_jit():
    def of(p, data, ts, weight):
        return eo.multiple_shooting(decay(p), data, ts, 6, weight)

    eager = of(RATE, DATA, TS, 7.0)
    for jitted in (jax.jit(of), jax.jit(lambda *x: of(*x[:1], DATA, TS, *x[3:]))):
        got = jitted(RATE, DATA, TS, 7.0)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, eager)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "weight"),
    [
        (jax.jit, 100.0),
        *[(jax.jit, 0.0), (lambda f: f, 100.0)],
    ],
)
def test_groups_that_fail_are_infinitely_bad(wrap, weight):
    """u' = p u^2 blows up at 1 / (p u0): in the second group of three."""
    ts, data = jnp.arange(7.0), jnp.array([0.1, 0.1, 0.6, 0.6, 0.2, 0.2, 0.2])[:, None]

    def loss(p):
        prob = eo.ODEProblem(lambda u, p, t: p * u**2, [1.0], (0.0, 1.0), p)
        shot = eo.multiple_shooting(prob, data, ts, 3, weight, maxiters=200, **TIGHT)
        return shot.loss, shot

    (value, shot), gradient = wrap(jax.value_and_grad(loss, has_aux=True))(1.0)
    assert value == shot.loss == shot.data_loss == jnp.inf
    codes = [eo.ReturnCode(int(x)) for x in shot.retcode]
    assert codes[0] == codes[2] == eo.ReturnCode.Success != codes[1]
    assert np.isnan(np.asarray(shot.u)[1, -1]).all()

    def of_the_others(p):
        def end(u0, t):
            return u0 / (1 - p * u0 * t)

        errors = [end(0.1, 1) - 0.1, end(0.1, 2) - 0.6, end(0.2, 1) - 0.2, end(0.2, 2) - 0.2]
        return sum(e**2 for e in errors) + weight * abs(errors[1])

    np.testing.assert_allclose(gradient, jax.grad(of_the_others)(1.0), rtol=1e-7)


@pytest.mark.slow
def test_options_of_the_problem():
    """Those that say what is saved give way."""
    for kept in ({"saveat": 0.1, "save_start": False}, {"save_everystep": True}):
        prob = eo.remake(decay(), reltol=1e-9, **kept)
        assert eo.multiple_shooting(prob, DATA, TS, 6).u.shape == (3, 6, 2)


def test_throw():
    prob = eo.ODEProblem(lambda u, p, t: u**2, [1.0], (0.0, 1.0))
    with pytest.raises(eo.EnsembleError, match="not all trajectories succeeded"):
        eo.multiple_shooting(prob, jnp.ones((5, 1)), jnp.arange(5.0), 3, throw=True)


def test_columns_need_groups_alike():
    columns = {"ensemblealg": eo.EnsembleColumns()}
    with pytest.raises(ValueError, match=r"EnsembleColumns .* group 2 is not.*group_size"):
        eo.multiple_shooting(decay(), DATA, TS, 6, **columns)
    with pytest.raises(ValueError, match=r"EnsembleColumns .* group 1 is not"):
        eo.multiple_shooting(decay(), DATA, TS**2, 4, **columns)
    # It is known inside jit, too, if the times are.
    with pytest.raises(ValueError, match=r"group 2 is not"):
        jax.jit(lambda p: eo.multiple_shooting(decay(p), DATA, TS, 6, **columns).loss)(RATE)
    groups = shooting_groups(DATA, TS, 6)
    losses = jax.jit(lambda g: shooting_losses(decay(), g, **columns, **TIGHT))(groups)
    assert jnp.isnan(losses).tolist() == [False, False, True]
    np.testing.assert_allclose(losses[:2], shooting_losses(decay(), groups, **TIGHT)[:2], rtol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prob": linear}, "prob"),
        ({"group_size": 1}, "group_size must be from 2 to the number of points, 13; got 1"),
        ({"group_size": 14}, "group_size must be from 2 to the number of points, 13; got 14"),
        ({"group_size": 2.5}, "group_size"),
        ({"group_size": True}, "group_size must be an integer, got True"),
        ({"ts": TS[:-1]}, r"ts must have a time for each point of data, \(13,\).*\(12,\)"),
        ({"ts": TS[::-1]}, "ts must increase"),
        ({"ts": np.repeat(TS[:7], 2)[:13]}, "ts must increase"),
        ({"ts": 1e8 + TS, "prob": decay(dtype=jnp.float32)}, "must increase .*as float32"),
        ({"ts": np.where(TS > 2.5, np.nan, TS)}, "ts must be finite"),
        ({"ts": "now"}, "ts must be an array of times"),
        ({"data": np.where(DATA > 2.9, np.nan, DATA)}, r"data .* not finite, at \(\d+, 1\)"),
        ({"data": DATA[:, :1]}, r"data must be \[time, \*state\].*\(2,\); its shape is \(13, 1\)"),
        ({"data": DATA[0]}, r"data must be \[time, \*state\]"),
        ({"data": [[1.0], [2.0, 3.0]]}, "data must be one array"),
        ({"data": np.full((13, 2), "x")}, "data must be an array of numbers"),
        ({"data": DATA + 1j}, "data is complex and the state is not"),
        ({"starts": DATA[:2]}, r"starts must be \[group, \*state\], \(3, 2\).*\(2, 2\)"),
        ({"starts": np.ones((3, 2), complex)}, "starts is complex and the state is not"),
        ({"continuity_weight": -1.0}, "continuity_weight must be zero or positive"),
        ({"continuity_weight": np.nan}, "continuity_weight must be zero or positive"),
        ({"saveat": 0.1}, "saveat is no option of multiple shooting"),
        ({"trajectories": 3}, "trajectories is no option of multiple shooting"),
        ({"abstoll": 1e-3}, "abstoll"),
    ],
)
def test_bad_input(change, message):
    how = {"prob": decay(), "data": DATA, "ts": TS, "group_size": 6} | change
    with pytest.raises((ValueError, TypeError), match=message):
        eo.multiple_shooting(**how)
