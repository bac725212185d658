"""The solution between saved steps: the method's own interpolant, whichever engine made the
steps."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode import solvers
from ensembleode.solution.dense import inner_nodes

from .marks import slow_unless
from .problems import decay, scaled
from .test_conformance import alg as alg, ensemble, name as name, solve  # fixtures


METHODS = sorted(
    (cls for cls in vars(solvers).values() if isinstance(cls, type) and hasattr(cls, "tableau")),
    key=lambda cls: (cls.order, cls.__name__),
)
TS = np.linspace(0.0, 2.0, 41)
QUICK = {("compiled", eo.Tsit5), ("compiled", eo.Vern9)}
ENGINES = ["compiled", slow_unless(False, "diffrax")]


def pendulum(u, p, t):
    return jnp.stack([u[1], -p * jnp.sin(u[0]) + 0.1 * jnp.cos(t)])


def prob(u0=(1.0, 0.3), p=1.3, tspan=(0.0, 2.0), dtype=float):
    return eo.ODEProblem(pendulum, jnp.array(u0, dtype), tspan, jnp.asarray(p, dtype))


def options_of(cls, tol=1e-6, dt=0.1):
    return {"reltol": tol, "abstol": tol} if cls.adaptive else {"dt": dt}


def rounding(cls, dtype=float):
    """What the weights of its dense output make of one."""
    weights = cls.tableau.interpolant.weights
    return 16 * np.finfo(dtype).eps * (4 + sum(abs(w) for row in weights for w in row) / 10)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("tspan", [(0.0, 2.0), (2.0, 0.0)])
@pytest.mark.parametrize(
    ("cls", "engine"),
    [
        (cls, e)
        for cls in METHODS
        if cls is not eo.ExplicitRK
        for e in ("compiled", "diffrax")
        if e in cls.engines
    ],
)
def test_the_same_as_saveat(cls, engine, tspan, dtype):
    options = {"engine": engine, **options_of(cls, 1e-4 if dtype == np.float32 else 1e-6)}
    given = prob(tspan=tspan, dtype=dtype)
    ts = TS if tspan[0] == 0 else TS[::-1]
    sol = eo.solve(given, cls(), save_everystep=True, **options)
    expected = eo.solve(given, cls(), saveat=ts, **options)
    assert sol.stats.naccept == expected.stats.naccept
    assert sol(ts).dtype == dtype
    # (Time as it is saved is rounded, by which a step is longer or shorter.)
    close = rounding(cls, dtype) + 40 * np.finfo(dtype).eps
    np.testing.assert_allclose(sol(ts), expected.u, rtol=0, atol=close)
    np.testing.assert_array_equal(sol(sol.t), sol.u)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serial", "threads", "columns", "kernel"])
def test_of_ensembles(name, alg):
    """Whatever runs them: parameters of their own, shared ones, and batches."""

    def prob_func(given, ctx):
        return eo.remake(given, p=1.0 + 0.2 * ctx.index, u0=given.u0 * (1 + 0.1 * ctx.index))

    ens = eo.EnsembleProblem(prob(), prob_func)
    options = {"trajectories": 5, "batch_size": 2, "reltol": 1e-6, "abstol": 1e-6}
    sim = solve(ens, eo.Tsit5(), alg, save_everystep=True, **options)
    expected = solve(ens, eo.Tsit5(), alg, saveat=TS, **options)
    np.testing.assert_allclose(sim(TS), expected.u, rtol=0, atol=1e-13)
    np.testing.assert_allclose(sim[3](TS), expected.u[3], rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    "alg",
    [
        eo.Kvaerno3(),
        eo.KenCarp4(),
        eo.ImplicitEuler(),
        diffrax.KenCarp3(),
        diffrax.Heun(),
        diffrax.Dopri8(),
    ],
    ids=lambda alg: f"{type(alg).__module__.partition('.')[0]}.{type(alg).__name__}",
)
def test_of_methods_of_diffrax(alg):
    """What its interpolation needs is kept; it may be made again by no formula of ours."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        sol = eo.solve(prob(), alg, save_everystep=True, engine="diffrax", abstol=1e-5)
        expected = eo.solve(prob(), alg, saveat=TS, engine="diffrax", abstol=1e-5)
        late = eo.solve(
            prob(), alg, save_everystep=True, save_start=False, engine="diffrax", abstol=1e-5
        )
    np.testing.assert_allclose(sol(TS), expected.u, rtol=1e-12, atol=1e-12)
    inside = late.t[0] <= TS
    np.testing.assert_allclose(late(TS)[inside], sol(TS)[inside], rtol=1e-12, atol=1e-12)
    assert np.isnan(late(TS)[~inside]).all()


@pytest.mark.parametrize("cls", [eo.Tsit5, eo.BS5, eo.Vern7, eo.Vern9, eo.RK4])
@pytest.mark.slow
def test_derivatives_by_time(cls):
    sol = eo.solve(prob(), cls(), save_everystep=True, **options_of(cls, 1e-9, 0.01))
    u, t = sol(TS), jnp.asarray(TS)
    first = jax.vmap(pendulum, (0, None, 0))(u, 1.3, t)
    np.testing.assert_allclose(sol(TS, deriv=1), first, rtol=0, atol=2e-6)
    for t in (0.0, 0.77, 2.0):
        np.testing.assert_allclose(jax.jacfwd(sol)(t), sol(t, deriv=1), rtol=1e-12)
        second = jax.jacfwd(lambda t: sol(t, deriv=1))(t)
        np.testing.assert_allclose(sol(t, deriv=2), second, rtol=1e-10)
    assert np.isnan(sol(2.1, deriv=1)).all()


@pytest.mark.parametrize("deriv", [-1, 0.5, None])
def test_what_is_no_order(deriv):
    sol = eo.solve(prob(), save_everystep=True)
    with pytest.raises(ValueError, match=r"deriv must be the order of a derivative.*got"):
        sol(0.5, deriv=deriv)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients(engine):
    """By the initial state, the parameters, both ends and the time that is asked for, with steps
    held, so that differences are exact."""

    def middle(x, sensealg=None):
        given = prob(x[:2], x[2], (x[3], x[3] + 2.0 + x[4]))
        sol = eo.solve(
            given, eo.Tsit5(), engine=engine, save_everystep=True, maxiters=512,
            abstol=1e-11, reltol=1e-11, sensealg=sensealg,
        )  # fmt: skip
        return jnp.sum(sol(0.9 + x[5]) * jnp.array([1.0, 2.0]))

    x, h = jnp.array([1.0, 0.3, 1.3, 0.0, 0.0, 0.0]), 1e-4
    value = jax.jit(middle)
    differences = [(value(x.at[i].add(h)) - value(x.at[i].add(-h))) / (2 * h) for i in range(6)]
    np.testing.assert_allclose(jax.jit(jax.grad(middle))(x), differences, rtol=2e-6, atol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_failed_trajectories_give_no_nan_to_others(engine):
    """One that blows up, within and beyond what it reached, and one that never begins."""

    def loss(p, t):
        given = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.array([1.0]), (0.0, 1.0), p)
        ens = eo.EnsembleProblem(
            given, lambda g, ctx: eo.remake(g, u0=jnp.array([0.5, 3.0, jnp.nan])[ctx.index, None])
        )
        sim = eo.solve(ens, trajectories=3, save_everystep=True, maxiters=256, engine=engine)
        u = sim(t)[:, 0]
        return jnp.sum(jnp.where(jnp.isfinite(u), u, 0)), u

    for t, reached in ((0.2, [True, True, False]), (0.9, [True, False, False])):
        (_, u), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.array(1.0), t)
        np.testing.assert_array_equal(np.isfinite(u), reached)
        np.testing.assert_allclose(slope, t * (0.5 / (1 - 0.5 * t)) ** 2, rtol=0.05)


@pytest.mark.slow
def test_states_of_all_kinds():
    scalar = eo.solve(eo.ODEProblem(lambda u, p, t: -u, 1.0, (0.0, 1.0)), save_everystep=True)
    assert scalar(0.5).shape == ()
    np.testing.assert_allclose(scalar(0.5), np.exp(-0.5), rtol=1e-3)
    turning = eo.ODEProblem(lambda u, p, t: 1j * u, jnp.array([1.0 + 0j]), (0.0, 1.0))
    sol = eo.solve(turning, save_everystep=True, abstol=1e-9, reltol=1e-9)
    np.testing.assert_allclose(sol(0.5), np.exp([0.5j]), rtol=1e-7)
    np.testing.assert_allclose(sol(0.5, deriv=1), 1j * np.exp([0.5j]), rtol=1e-5)
    tree = eo.ODEProblem(lambda u, p, t: {"x": u["v"], "v": -u["x"]}, {"x": 1.0, "v": 0.0}, (0, 1))
    sol = eo.solve(tree, save_everystep=True, abstol=1e-9, reltol=1e-9)
    np.testing.assert_allclose(sol(0.5)["x"], np.cos(0.5), rtol=1e-7)


@pytest.mark.parametrize("how", [{}, slow_unless(False, {"alg": eo.Dopri8(), "engine": "diffrax"})])
def test_in_output_functions(how):
    """Also where steps are kept."""
    ens = eo.EnsembleProblem(
        decay(), scaled, lambda sol, ctx: ((sol(0.3), sol(0.3, deriv=1)), False)
    )
    options = {"trajectories": 2, "save_everystep": True, "abstol": 1e-8, "reltol": 1e-8}
    sim = eo.solve(ens, **how, **options)
    exact = np.exp(-0.3) * np.array([[1.0, 2.0], [2.0, 4.0]])
    np.testing.assert_allclose(sim.u[0], exact, rtol=1e-6)
    np.testing.assert_allclose(sim.u[1], -exact, rtol=1e-4)


@pytest.mark.slow
def test_with_functions_that_draw_numbers():
    """They are not called again: what was drawn is kept."""
    random = np.random.default_rng(0)
    ens = eo.EnsembleProblem(prob(), lambda g, ctx: eo.remake(g, p=float(random.random())))
    sim = eo.solve(ens, trajectories=3, save_everystep=True, abstol=1e-9, reltol=1e-9)
    rate = np.asarray(sim(TS, deriv=1))[..., 1] - 0.1 * np.cos(TS)
    p = -rate / np.sin(sim(TS)[..., 0])
    np.testing.assert_allclose(p, np.broadcast_to(p[:, :1], p.shape), rtol=1e-4)


@pytest.mark.slow
def test_what_a_user_changes_afterwards():
    p = np.array([1.0])
    sol = eo.solve(eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), p), save_everystep=True)
    before = sol(0.5)
    p[:] = 100
    np.testing.assert_array_equal(sol(0.5), before)


@pytest.mark.slow
def test_solutions_out_of_transformations():
    def solved(p):
        return eo.solve(prob(p=p), save_everystep=True, maxiters=64)

    p = jnp.array([1.3, 2.0])
    expected = jnp.stack([solved(x)(0.7) for x in p])
    np.testing.assert_allclose(jax.jit(solved)(p[0])(0.7), expected[0], rtol=1e-12)
    mapped = jax.vmap(solved)(p)
    np.testing.assert_allclose(jax.vmap(lambda sol: sol(0.7))(mapped), expected, rtol=1e-12)

    @jax.jit
    def of_index(i):
        ens = eo.EnsembleProblem(prob(), lambda g, ctx: eo.remake(g, p=p[ctx.index]))
        return eo.solve(ens, trajectories=2, save_everystep=True, maxiters=64)[i](0.7)

    np.testing.assert_allclose(of_index(1), expected[1], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [eo.Vern9, eo.Tsit5])
def test_stores(tmp_path, cls):
    """They give the same to rounding, with no program in them."""
    zarr = pytest.importorskip("zarr")
    options = {"trajectories": 3, "save_everystep": True, "abstol": 1e-10, "reltol": 1e-10}
    sim = eo.solve(ensemble(), cls(), **options)
    eo.solve(ensemble(), cls(), **options, maxiters=64, store=tmp_path / "a.zarr")
    stored = eo.open_ensemble(tmp_path / "a.zarr")
    nodes = len(inner_nodes(cls.tableau.interpolant.degree))
    assert zarr.open_group(tmp_path / "a.zarr")["inner"].shape[2] == nodes
    ts = np.linspace(0, 1, 21)
    np.testing.assert_allclose(stored(ts), sim(ts), rtol=1e-13)
    np.testing.assert_allclose(stored[1](ts, deriv=1), sim[1](ts, deriv=1), rtol=1e-11)
