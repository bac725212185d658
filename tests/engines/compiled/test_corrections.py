"""Callbacks that correct the state after every step: onto a manifold, and to values not below
zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo


N = 3


def turns(u, p, t):
    return p * jnp.stack([u[1], -u[0]])


def ensemble(callback, f=turns, u0=(0.0, 1.0), end=20.0, scale=1.0, **options):
    """Of trajectories with p = 1, 3/2, 2."""
    prob = eo.ODEProblem(f, jnp.array(u0), (0.0, end), 1.0, callback=callback)
    rates = 1 + np.arange(N) / 2

    def prob_func(prob, ctx):
        return eo.remake(prob, p=scale * jnp.asarray(rates)[ctx.index])

    ens = eo.EnsembleProblem(prob, prob_func)
    return eo.solve(ens, eo.Tsit5(), trajectories=N, engine="compiled", **options)


def circle(radius):
    return eo.ManifoldProjection(lambda u, p, t: jnp.sum(u**2) - radius**2)


@pytest.mark.slow
def test_an_invariant_is_kept():
    free, kept = ensemble(None), ensemble(circle(1.0))
    assert (abs(np.sum(np.square(free.u[:, -1]), axis=1) - 1) > 1e-4).all()
    np.testing.assert_allclose(np.sum(np.square(kept.u[:, -1]), axis=1), 1.0, rtol=1e-15)
    assert kept.successful.all()
    assert kept.events is None
    # The field is evaluated anew after each step.
    steps = np.asarray(kept.stats.naccept + kept.stats.nreject)
    assert (np.asarray(kept.stats.nf) > 6 * steps + np.asarray(kept.stats.naccept)).all()


def test_the_correction_is_the_smallest():
    """Onto an ellipse in three dimensions and a plane: against the conditions of Lagrange."""

    def residual(u, p, t):
        return {"ellipse": u[0] ** 2 + 4 * u[1] ** 2 - 1, "plane": u[2:] - p * u[0]}

    def still(u, p, t):
        return 0.0 * u

    u0, p = np.array([0.8, 0.4, 0.7]), 0.5
    prob = eo.ODEProblem(still, u0, (0.0, 1.0), p, callback=eo.ManifoldProjection(residual))
    after = np.asarray(eo.solve(prob, eo.Euler(), dt=1.0).u[-1])
    assert max(map(np.max, map(np.abs, residual(after, p, 0.0).values()))) < 1e-15
    normals = np.array([[2 * u0[0], 8 * u0[1], 0.0], [-p, 0.0, 1.0]])
    left = np.linalg.lstsq(normals.T, after - u0, rcond=None)[1]
    np.testing.assert_allclose(left, 0.0, atol=1e-28)


@pytest.mark.slow
def test_before_and_after_are_rows():
    prob = eo.ODEProblem(turns, [0.0, 1.0], (0.0, 9.0), 1.0, callback=circle(1.0))
    sol = eo.solve(prob, save_everystep=True)
    assert len(sol.t) == 1 + 2 * sol.stats.naccept
    np.testing.assert_array_equal(sol.t[1::2], sol.t[2::2])
    np.testing.assert_allclose(jnp.sum(sol.u[::2] ** 2, axis=1), 1.0, rtol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd])
def test_derivatives_of_projections(mode):
    """By the radius, which moves with p: in closed form, of first and second order, tolerances
    being tight."""

    def f(u, p, t):
        return turns(u, 1.0, t) + u / (2 * t + p)

    def end(p):
        on = eo.ManifoldProjection(lambda u, p, t: jnp.sum(u**2) - p - 2 * t)
        prob = eo.ODEProblem(f, jnp.stack([0 * p, jnp.sqrt(p)]), (0.0, 2.0), p, callback=on)
        return eo.solve(prob, eo.Tsit5(), abstol=1e-12, reltol=1e-12).u[-1, 1]

    def closed(p):
        return jnp.sqrt(p + 4.0) * jnp.cos(2.0)

    for a, b in zip(
        jax.jit(lambda p: (mode(end)(p), mode(jax.grad(end))(p)))(1.5),
        (jax.grad(closed)(1.5), jax.grad(jax.grad(closed))(1.5)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-8)


@pytest.mark.slow
def test_no_manifold_to_be_found():
    """The trajectory ends there; others go on as if it weren't."""
    on = eo.ManifoldProjection(lambda u, p, t: jnp.sum(u**2) - jnp.where(p == 1.5, -1.0, 1.0))
    sim, others = ensemble(on), ensemble(circle(1.0))
    assert [eo.ReturnCode(x).name for x in np.asarray(sim.retcode)] == [
        "Success",
        "ConvergenceFailure",
        "Success",
    ]
    assert np.asarray(sim.failed).tolist() == [1]
    np.testing.assert_array_equal(sim.u[::2], others.u[::2])


def test_single_precision():
    prob = eo.ODEProblem(turns, jnp.array([0.0, 1.0], "float32"), (0.0, 9.0), np.float32(1.0))
    sol = eo.solve(eo.remake(prob, callback=circle(1.0)))
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(jnp.sum(sol.u[-1] ** 2), 1.0, rtol=3e-6)


def decays(u, p, t):
    return jnp.stack([-100.0 * p * u[0], 100.0 * p * u[0] - 50.0 * p * u[1]])


LOOSE = {"f": decays, "u0": (1.0, 0.0), "end": 5.0, "abstol": 1e-2}


def below(sim):
    return np.nanmin(np.asarray(sim.u), axis=(1, 2))


@pytest.mark.slow
def test_steps_are_shortened_and_states_not_negative():
    free = ensemble(None, save_everystep=True, **LOOSE)
    held = ensemble(eo.PositiveDomain(), save_everystep=True, **LOOSE)
    tight = ensemble(eo.PositiveDomain(abstol=1e-5), save_everystep=True, **LOOSE)
    assert (below(free) < -1e-3).all()
    assert (below(held) > -1e-3).all()
    assert (below(tight) > -1e-5).all()
    assert (np.asarray(tight.stats.naccept) > np.asarray(held.stats.naccept)).all()
    # Of each step that left something below zero there is a row after it, without that.
    for sol in held:
        t, u = np.asarray(sol.t), np.asarray(sol.u)
        before = np.flatnonzero((u < 0).any(axis=1))
        assert len(before)
        np.testing.assert_array_equal(t[before + 1], t[before])
        np.testing.assert_array_equal(u[before + 1], np.maximum(u[before], 0.0))
        assert (u[-1] >= 0).all()
    assert held.events is None


@pytest.mark.slow
def test_the_proposed_step_is_the_one_of_the_rule():
    """Of the first step that is shortened: 9/10 of the proposal halved until the extrapolated
    interpolant is above minus the tolerance."""
    prob = eo.ODEProblem(decays, [1.0, 0.0], (0.0, 5.0), 1.0, abstol=1e-2)
    free = eo.solve(prob, eo.Tsit5(), save_everystep=True)
    held = eo.solve(prob, eo.Tsit5(), save_everystep=True, callback=eo.PositiveDomain())
    t, k = np.asarray(free.t), 0
    while held.t[k + 1] == t[k + 1]:
        k += 1
    # From t[k] on they differ: the step was proposed as the free one took it, or longer.
    start, stop, u = t[k - 1], t[k], free.u[k - 1]
    one = eo.solve(
        eo.remake(prob, u0=u, tspan=(start, stop)), eo.Tsit5(), adaptive=False, dt=stop - start,
        save_everystep=True,
    )  # fmt: skip
    x = np.linspace(0, 1, 6)
    inside = np.asarray(one(start + x * (stop - start)))
    polynomial = np.polynomial.Polynomial.fit(x, inside[:, 0], 4).convert()
    other = np.polynomial.Polynomial.fit(x, inside[:, 1], 4).convert()
    ratio = (float(held.t[k + 1]) - stop) / 0.9 / (stop - start)
    assert polynomial(1 + ratio) > -1e-2
    assert other(1 + ratio) > -1e-2
    assert min(polynomial(1 + 2 * ratio), other(1 + 2 * ratio)) <= -1e-2


@pytest.mark.slow
def test_numbers_of_each_trajectory():
    """The tolerance is computed from p; and a component may have one of its own."""
    prob = eo.ODEProblem(decays, jnp.array([1.0, 0.0]), (0.0, 5.0), 1.0, abstol=1e-2)
    levels = np.array([1e-5, 1e-3, np.inf])

    def prob_func(prob, ctx):
        level = jnp.asarray(levels)[ctx.index] * jnp.ones(2)
        return eo.remake(prob, callback=eo.PositiveDomain(abstol=level))

    ens = eo.EnsembleProblem(prob, prob_func)
    sim = eo.solve(ens, eo.Tsit5(), trajectories=3, save_everystep=True)
    for i, level in enumerate(levels):
        own = eo.PositiveDomain(abstol=level)
        sol = eo.solve(prob, eo.Tsit5(), callback=own, save_everystep=True)
        np.testing.assert_array_equal(sim[i].u, sol.u)
    assert np.asarray(sim.stats.naccept)[0] > np.asarray(sim.stats.naccept)[2]


def test_gradients_with_positive_domains():
    """Where something is set to zero, nothing after it depends on what was before."""

    def f(u, p, t):
        return jnp.stack([-p + 0.0 * u[0], jnp.ones_like(p)])

    def ends(p):
        prob = eo.ODEProblem(f, jnp.stack([1.0 + 0 * p, 0 * p]), (0.0, 1.0), p)
        held = eo.PositiveDomain(abstol=10.0)
        return eo.solve(prob, eo.Euler(), callback=held, dt=0.25).u[-1]

    with pytest.raises(ValueError, match="PositiveDomain chooses how long steps are"):
        ends(1.0)

    def end(p):
        sim = ensemble(eo.PositiveDomain(), **{**LOOSE, "end": 0.02, "scale": p})
        return jnp.sum(sim.u[:, -1, 1])

    slope, h = jax.jit(jax.grad(end))(1.0), 1e-4
    difference = (end(1.0 + h) - end(1.0 - h)) / (2 * h)
    np.testing.assert_allclose(slope, difference, rtol=1e-2)


def projection(residual):
    return lambda: eo.ManifoldProjection(residual)


def domain(**options):
    return lambda: eo.PositiveDomain(**options)


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (TypeError, "residual of ManifoldProjection must be a function", projection(1.0)),
        (ValueError, "fewer numbers than the 2", projection(lambda u, p, t: u)),
        (ValueError, "it returned 0. .Is a `return`", projection(lambda u, p, t: None)),
        (TypeError, "must return real numbers, got str", projection(lambda u, p, t: "no")),
        (TypeError, "precision of the state", projection(lambda u, p, t: jnp.int32(1))),
        (TypeError, "residual must take the state, the parameters", projection(lambda u: u[0])),
        (ValueError, "scalefactor of PositiveDomain must be between", domain(scalefactor=1.0)),
        (ValueError, "abstol of PositiveDomain must be zero or positive", domain(abstol=-1.0)),
        (TypeError, "abstol of PositiveDomain must be zero or positive", domain(abstol="none")),
        (ValueError, r"abstol of callback 0, a PositiveDomain.* \(3,\)", domain(abstol=np.ones(3))),
    ],
)
def test_what_they_can_not_be(error, match, make):
    with pytest.raises(error, match=match):
        ensemble(make(), **LOOSE)
