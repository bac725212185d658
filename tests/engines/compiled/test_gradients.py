"""Derivatives of solves by the compiled engine: exact for the steps taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import solves


N = 13


def field(u, p, t):
    own, shared = p
    x, y = u
    return jnp.stack([own[0] * x - x * y, x * y - shared * y * (1 + 0.1 * jnp.sin(t))])


def numbers():
    rng = np.random.default_rng(0)
    return {
        "u0": jnp.asarray(rng.uniform(0.5, 2.0, (N, 2))),
        "own": jnp.asarray(rng.uniform(0.5, 3.0, (N, 1))),
        "shared": jnp.asarray(1.1),
        "t0": jnp.asarray(rng.uniform(-0.5, 0.5, N)),
        "t1": jnp.asarray(rng.uniform(1.5, 2.5, N)),
        "times": jnp.linspace(0.6, 1.4, 5),
    }


ADAPTIVE = {"abstol": 1e-8, "reltol": 1e-8}
FIXED = {"adaptive": False, "dt": 0.05}


def outputs(x, alg, mode, engine="compiled", n=N, **options):
    prob = eo.ODEProblem(field, x["u0"][0], (0.0, 2.0), (x["own"][0], x["shared"]))

    def prob_func(prob, ctx):
        i = ctx.index
        p = (x["own"][i], x["shared"])
        return eo.remake(prob, u0=x["u0"][i], p=p, tspan=(x["t0"][i], x["t1"][i]))

    saving = {"ends": {}, "times": {"saveat": x["times"]}}[mode]
    ens = eo.EnsembleProblem(prob, prob_func)
    threads = eo.EnsembleThreads(1)
    return eo.solve(ens, alg, threads, trajectories=n, engine=engine, **saving, **options).u


def loss(x, alg, mode, **options):
    u = outputs(x, alg, mode, **options)
    weights = jnp.cos(jnp.arange(u.size, dtype=u.dtype)).reshape(u.shape)
    return jnp.sum(jnp.where(jnp.isfinite(u), u, 0) ** 2 * weights)


# (With extra stages, and every combination of the kinds of steps and methods: slow.)
slow = pytest.mark.slow
names = pytest.mark.parametrize(
    ("alg", "steps"),
    [
        pytest.param(eo.Tsit5(), ADAPTIVE, id="Tsit5"),
        pytest.param(eo.RK4(), FIXED, id="RK4"),
        pytest.param(eo.Vern7(), ADAPTIVE, id="Vern7", marks=slow),
        pytest.param(eo.Bosh3(), FIXED, id="Bosh3", marks=slow),
    ],
)


@pytest.mark.slow
@names
@pytest.mark.parametrize("mode", ["ends", "times"])
def test_reverse_is_that_of_differences(alg, steps, mode):
    """By all numbers: of each, shared, and the times."""
    x = numbers()
    found = jax.jit(jax.grad(lambda x: loss(x, alg, mode, **steps)))(x)
    # (Those by times are those of the solution: as exact as it is.)
    rng = np.random.default_rng(1)
    direction = {k: jnp.asarray(rng.normal(size=v.shape)) for k, v in x.items()}
    if mode == "ends":
        direction["times"] = jnp.zeros_like(x["times"])

    @jax.jit
    def along(s):
        moved = {k: v + s * direction[k] for k, v in x.items()}
        return loss(moved, alg, mode, **{**steps, **({} if "dt" in steps else TIGHT)})

    step = 1e-5
    expected = (along(step) - along(-step)) / (2 * step)
    got = sum(jnp.sum(found[k] * direction[k]) for k in x)
    np.testing.assert_allclose(got, expected, rtol=2e-3 if "dt" in steps else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("some", "own", "engine"),
    [
        pytest.param(
            *(some, own, engine),
            marks=() if engine == "compiled" else slow,
            id=f"{'some' if some else 'none'}-{'own' if own else 'shared'} times-{engine}",
        )
        for some in (2, 0)
        for own in (False, True)
        for engine in ("compiled", "diffrax")
    ],
)
def test_rows_that_are_not_reached(some, own, engine):
    """Times that are infinitely far are not there, and their cotangents don't count: as without
    these rows, by the times, too."""
    x = numbers()
    near = jnp.linspace(0.5, 1.0, some)
    far = jnp.full(3, jnp.inf)

    def loss(u0, times):
        def prob_func(prob, ctx):
            given = {"saveat": times + 0.01 * ctx.index} if own else {}
            return eo.remake(prob, u0=u0[ctx.index], **given)

        p = (x["own"][0], x["shared"])
        ens = eo.EnsembleProblem(eo.ODEProblem(field, u0[0], (0.0, 2.0), p), prob_func)
        given = {} if own else {"saveat": times}
        u = eo.solve(ens, trajectories=N, engine=engine, **given, **ADAPTIVE).u
        weights = jnp.arange(1.0, times.size + 1)[:, None]
        return jnp.sum(jnp.where(jnp.isnan(u), 0.0, u) ** 2 * weights[None])

    both = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, found = both(x["u0"], jnp.concatenate([near, far]))
    expected = (0.0, (jnp.zeros_like(x["u0"]), near))
    if some:
        expected = both(x["u0"], near)
    np.testing.assert_allclose(value, expected[0], rtol=1e-14)
    np.testing.assert_allclose(found[0], expected[1][0], rtol=1e-12)
    np.testing.assert_allclose(found[1][:some], expected[1][1], rtol=1e-12)
    np.testing.assert_array_equal(found[1][some:], 0.0)


TIGHT = {"abstol": 1e-12, "reltol": 1e-12}


@pytest.mark.slow
@names
def test_forward_is_reverse(alg, steps):
    x = numbers()
    rng = np.random.default_rng(2)
    direction = {k: jnp.asarray(rng.normal(size=v.shape)) for k, v in x.items()}
    forward = eo.ForwardDiffSensitivity()

    def value(s):
        moved = {k: v + s * direction[k] for k, v in x.items()}
        return loss(moved, alg, "times", sensealg=forward, **steps)

    _, tangent = jax.jvp(value, (0.0,), (1.0,))
    found = jax.grad(lambda x: loss(x, alg, "times", **steps))(x)
    got = sum(jnp.sum(found[k] * direction[k]) for k in x)
    np.testing.assert_allclose(got, tangent, rtol=1e-6)


@pytest.mark.slow
@names
@pytest.mark.parametrize("mode", [pytest.param("ends", marks=slow), "times"])
def test_segments_and_groups_change_nothing(alg, steps, mode, monkeypatch):
    """Recorded anew from checkpoints, be they few or many, every gradient of a trajectory has the
    same bits; so it has at other widths."""
    x = numbers()

    def gradient(maxiters):
        # (Another number of steps is another program.)
        return jax.grad(lambda x: loss(x, alg, mode, maxiters=maxiters, **steps))(x)

    expected = gradient(10_000)
    for turns, group, width, checkpoints in ((7, 16, 4, 2), (11, 3, 2, 6)):
        asked = []
        monkeypatch.setattr(solves.tuning, "MOST_CHECKPOINTS", checkpoints)
        monkeypatch.setattr(solves, "_segment_turns", lambda most, _, turns=turns: min(most, turns))
        monkeypatch.setattr(solves.tuning, "GROUP", group)
        monkeypatch.setattr(solves.tuning, "GROUP_OF_FIXED_STEPS", group)
        monkeypatch.setattr(
            solves, "width_of", lambda *_, width=width, asked=asked, **__: asked.append(0) or width
        )
        found = gradient(10_000 + width)
        assert asked
        for name in ("u0", "own", "t0", "t1"):
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
        np.testing.assert_allclose(found["shared"], expected["shared"], rtol=1e-13)


@pytest.mark.slow
def test_many_arrays_that_trajectories_share():
    """More than LLVM takes as so many loops in one function."""
    p = {str(i): jnp.array(0.01 * (i % 7)) for i in range(120)}
    prob = eo.ODEProblem(lambda u, p, t: -sum(p.values()) * u, jnp.ones(1), (0.0, 0.5), p)

    def total(p):
        options = {"adaptive": False, "dt": 0.25, "engine": "compiled"}
        return jnp.sum(eo.solve(eo.remake(prob, p=p), eo.Euler(), **options).u)

    # The end is (1 - dt s)^2, where s is the sum.
    wanted = -0.5 * (1 - 0.25 * sum(p.values()))
    for found in jax.grad(total)(p).values():
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.slow
def test_arrays_without_numbers():
    """A parameter may be empty, of each trajectory or of all."""

    def value(p, engine):
        prob = eo.ODEProblem(
            lambda u, p, t: -p["k"] * u + jnp.sum(p["more"]), jnp.ones(2), (0, 1.0)
        )
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, p=p | {"k": p["k"] * (1 + ctx.index)})
        )
        sim = eo.solve(
            ens, eo.Tsit5(), eo.EnsembleThreads(1), trajectories=3, engine=engine, **TIGHT
        )
        return jnp.sum(sim.u[:, -1])

    p = {"k": jnp.array(0.5), "more": jnp.zeros((0, 4))}
    got, expected = (jax.grad(value)(p, engine) for engine in ("compiled", "diffrax"))
    assert got["more"].shape == (0, 4)
    np.testing.assert_allclose(got["k"], expected["k"], rtol=1e-7)
