"""The time loop of trajectories that differ: they don't affect each other, and what is saved of
each is on the solution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo


TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
SUCCESS = eo.ReturnCode.Success


def rotation(u, p, t):
    """u turns about the origin, at a rate that grows with time."""
    return p * (1 + t) * jnp.array([-u[1], u[0]])


def turned(u0, p, t, t0=0.0):
    angle = np.asarray(p) * (t - t0 + (t**2 - t0**2) / 2)
    c, s = np.cos(angle), np.sin(angle)
    return np.stack([c * u0[0] - s * u0[1], s * u0[0] + c * u0[1]], axis=-1)


START = np.array([1.0, 0.5])


def ensemble(tspan=(0.0, 1.0), **each):
    """Trajectory i turns at the rate 1 + i/10; `each` gives more numbers to remake it by."""

    def prob_func(prob, ctx):
        own = {name: fn(ctx.index) for name, fn in each.items()}
        own["tspan"] = tspan(ctx.index) if callable(tspan) else tspan
        return eo.remake(prob, p=1 + ctx.index / 10, **own)

    prob = eo.ODEProblem(rotation, jnp.asarray(START), (0.0, 1.0), jnp.array(1.0))
    return eo.EnsembleProblem(prob, prob_func)


def rates(n):
    return 1 + np.arange(n) / 10


def solve(ens, n=3, alg=None, where=None, **options):
    return eo.solve(ens, alg, where, trajectories=n, engine="compiled", **options)


def troubled(u, p, t):
    """By `p[0]`: 0 all is well; 1 it becomes NaN; 2 it blows up; 3 (see below); 4 it turns so fast
    that it takes many steps."""
    kind = p[0]
    well = rotation(u, p[1], t) * jnp.where(kind == 4, 1000.0, 1.0)
    nan = jnp.where((kind == 1) & (t > 1.4), jnp.nan, 0.0)
    blowup = jnp.where(kind == 2, 30 * u * jnp.abs(u), 0.0)
    return well + nan + blowup


KINDS = {
    1: eo.ReturnCode.Unstable,
    2: eo.ReturnCode.Unstable,
    3: eo.ReturnCode.DtLessThanMin,
    4: eo.ReturnCode.MaxIters,
}


def troubled_ensemble(kinds):
    """Trajectories of those kinds; the tolerance of kind 3 is one that no step meets."""
    p = jnp.stack([jnp.asarray(kinds, float), jnp.asarray(rates(len(kinds)))], axis=1)
    tol = jnp.where(p[:, 0] == 3, 1e-60, 1e-6)

    def prob_func(prob, ctx):
        i = ctx.index
        return eo.remake(prob, p=p[i], abstol=tol[i], reltol=tol[i])

    prob = eo.ODEProblem(troubled, jnp.array([1.0, 0.5]), (1.0, 2.0), p[0])
    return eo.EnsembleProblem(prob, prob_func)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saving",
    [{}, {"saveat": 0.1}, {"save_everystep": True}],
)
def test_a_failed_trajectory_is_alone(saving):
    n = 133
    kinds = np.zeros(n, int)
    where = {3: 1, 10: 2, 17: 3, 40: 4, 130: 1, 131: 4}
    for i, kind in where.items():
        kinds[i] = kind
    options = {"maxiters": 400, **saving}
    sim = solve(troubled_ensemble(kinds), n, **options)
    codes = np.full(n, SUCCESS)
    for i, kind in where.items():
        codes[i] = KINDS[kind]
    np.testing.assert_array_equal(sim.retcode, codes)
    well = solve(troubled_ensemble(np.zeros(n, int)), n, **options)
    assert (well.retcode == SUCCESS).all()
    good = codes == SUCCESS
    rows = min(sim.u.shape[1], well.u.shape[1])
    np.testing.assert_array_equal(sim.u[good, :rows], well.u[good, :rows])
    np.testing.assert_array_equal(sim.stats.naccept[good], well.stats.naccept[good])
    for i in where:
        length = sim.lengths[i]
        assert np.isfinite(sim.u[i, :length]).all()
        assert np.isnan(sim.u[i, length:]).all()
        np.testing.assert_allclose(sim.u[i, :1], [[1.0, 0.5]])


def exact(times, n=3, t0=0.0):
    return np.stack([turned(START, rate, np.asarray(times), t0) for rate in rates(n)])


TIMES = {
    "inside": [0.1, 0.35, 0.36, 0.9],
    "both ends": [0.0, 0.3, 1.0],
    "repeated": [0.0, 0.0, 0.4, 0.4, 0.4, 1.0, 1.0],
    "many in a step": np.linspace(0.5, 0.5001, 50),
    "the end": [1.0],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fixed", "alg"),
    [
        pytest.param(
            name,
            fixed,
            {"own stages": eo.Tsit5(), "extra stages": eo.Vern7()}[alg],
            id=f"{name}-{fixed}-{alg}",
        )
        for name in TIMES
        for fixed in (False, True)
        for alg in ("own stages", "extra stages")
    ],
)
def test_saveat(name, fixed, alg):
    times = np.array(TIMES[name])
    how = {"dt": 1 / 128, "adaptive": False} if fixed else TIGHT
    for backwards in (False, True):
        tspan = (1.0, 0.0) if backwards else (0.0, 1.0)
        wanted = times[::-1] if backwards else times
        sim = solve(ensemble(tspan), alg=alg, saveat=wanted, **how)
        np.testing.assert_array_equal(sim.t, wanted)
        np.testing.assert_allclose(sim.u, exact(wanted, t0=tspan[0]), rtol=0, atol=2e-9)
        at_start = wanted == tspan[0]
        for u in np.asarray(sim.u):
            np.testing.assert_array_equal(u[at_start], np.tile(START, (at_start.sum(), 1)))
        assert (sim.lengths == len(times)).all()
        # And each with its own.
        own = jnp.stack([jnp.asarray(wanted), jnp.full(len(times), 0.5), jnp.asarray(wanted)])
        each = solve(ensemble(tspan, saveat=lambda i, own=own: own[i]), alg=alg, **how)
        np.testing.assert_array_equal(each.t, own)
        np.testing.assert_array_equal(each.u[::2], sim.u[::2])
        np.testing.assert_allclose(
            each.u[1], [turned(START, 1.1, 0.5, tspan[0])] * len(times), rtol=0, atol=2e-9
        )


def test_times_exactly_at_steps():
    """A step that ends at a time to save: saved once, and as the step has it."""
    ens = ensemble()
    options = {"dt": 1 / 16, "adaptive": False}
    steps = solve(ens, save_everystep=True, **options)
    saved = solve(ens, saveat=np.arange(17) / 16, **options)
    np.testing.assert_array_equal(steps.t, np.broadcast_to(saved.t, (3, 17)))
    np.testing.assert_allclose(saved.u, steps.u, rtol=0, atol=1e-15)


@pytest.mark.parametrize("tspan", [(0.0, 1.0), (1.0, 0.0), (-1.0, 0.0), (0.0, -1.0)])
@pytest.mark.parametrize("steps", [10, 24])
def test_a_fixed_step_is_taken_as_often_as_it_fits(tspan, steps):
    """Though the sum of the steps is not the end, but for rounding; as in OrdinaryDiffEq."""
    sim = solve(ensemble(tspan), dt=1 / steps, adaptive=False)
    assert (sim.retcode == SUCCESS).all()
    assert (sim.stats.naccept == steps).all()


@pytest.mark.slow
def test_tolerances_of_each_component():
    """An array weighs the components of the error: infinite, it leaves one out."""
    ens = ensemble()
    same = solve(ens, abstol=1e-8, reltol=1e-8)
    arrays = solve(ens, abstol=jnp.full(2, 1e-8), reltol=jnp.full(2, 1e-8))
    np.testing.assert_array_equal(same.u, arrays.u)
    loose = solve(ens, abstol=jnp.array([1e-8, 1e3]), reltol=1e-8)
    tight = solve(ens, abstol=jnp.array([1e-11, 1e3]), reltol=0.0)
    assert (loose.stats.naccept < same.stats.naccept).all()
    assert (tight.stats.naccept > same.stats.naccept).all()
    each = solve(ensemble(abstol=lambda i: jnp.array([1e-8, 1e3]) * 10.0**-i), reltol=1e-8)
    np.testing.assert_array_equal(each.u[0], loose.u[0])
    assert each.stats.naccept[2] > loose.stats.naccept[2]


def test_traced_times():
    """Rounding at the end is forgiven; times outside of the span or out of order are not."""

    @jax.jit
    def run(times):
        prob = eo.ODEProblem(lambda u, p, t: -u, jnp.array([1.0]), (0.0, 0.3))
        sol = eo.solve(prob, saveat=times, engine="compiled", **TIGHT)
        return sol.u[:, 0], sol.retcode

    u, code = run(jnp.arange(4.0) * 0.1)  # 0.30000000000000004
    assert code == eo.ReturnCode.Success
    np.testing.assert_allclose(u, np.exp(-np.arange(4) / 10), rtol=1e-9)
    for times, lost in (([-2.0, 0.1, 0.3], 0), ([0.1, 0.2, 0.4], 2), ([0.1, 0.2, 0.15], 2)):
        u, code = run(jnp.array(times))
        assert code == eo.ReturnCode.Failure
        assert np.isnan(u).tolist() == [i == lost for i in range(3)]


@pytest.mark.slow
def test_states_that_are_not_ours():
    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(2, "float16"), (0.0, 1.0))
    sol = eo.solve(prob, eo.Tsit5())
    np.testing.assert_allclose(sol.u[-1], np.full(2, np.exp(-1)), rtol=1e-2)
    with pytest.raises(ValueError, match="float32 or float64, and u0 is float16"):
        eo.solve(prob, eo.Tsit5(), engine="compiled")
