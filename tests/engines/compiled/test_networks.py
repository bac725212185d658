"""Networks whose weights all trajectories share, in the compiled engine."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import ensembleode as eo
from ensembleode.engines.compiled import solves
from ensembleode.engines.compiled.algebra import panels, parameter_sums


FIXED = {"adaptive": False, "dt": 0.1}


def network(u, p, t):
    for w, b in p[:-1]:
        u = jnp.tanh(w @ u + b)
    w, b = p[-1]
    return w @ u + b


def weights(*sizes, dtype=float):
    rng = np.random.default_rng(0)
    return [
        tuple(jnp.asarray(rng.normal(size=shape) / n**0.5, dtype) for shape in ((m, n), (m,)))
        for n, m in itertools.pairwise(sizes)
    ]


def ends(field, u0, p, engine, threads=1, alg=None, **options):
    ens = eo.EnsembleProblem(
        eo.ODEProblem(field, u0[0], (0.0, 0.5), p),
        lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]),
    )
    where = eo.EnsembleThreads(threads)
    if "saveat" not in options:
        options["save_start"] = False
    options |= {"trajectories": len(u0), "engine": engine}
    return eo.solve(ens, alg or eo.Tsit5(), where, **options).u


def gradient(field, u0, p, engine, **options):
    def loss(u0, p):
        u = ends(field, u0, p, engine, **options)
        return jnp.sum(jnp.where(jnp.isfinite(u), u, 0) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(u0, p)


def states(n, size=2, dtype=float):
    return jnp.asarray(np.random.default_rng(1).normal(size=(n, size)), dtype)


def same(found, expected, compare=np.testing.assert_array_equal, **tolerance):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        compare(x, y, **tolerance)


def direction_like(p):
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), p)


def along(direction, gradient):
    """The derivative along a direction, from the gradient."""
    return sum(map(jnp.vdot, jax.tree.leaves(direction), jax.tree.leaves(gradient)))


@pytest.mark.slow
def test_gradient_is_that_of_the_steps():
    """By the weights and the states: that of JAX through the same fixed steps."""
    u0, p = states(7), weights(2, 12, 2)

    def loss(u0, p):
        def step(u, _):
            f = jax.vmap(lambda u: network(u, p, 0.0))
            k1 = f(u)
            k2 = f(u + 0.05 * k1)
            k3 = f(u + 0.05 * k2)
            k4 = f(u + 0.1 * k3)
            return u + 0.1 * (k1 + 2 * k2 + 2 * k3 + k4) / 6, None

        return jnp.sum(lax.scan(step, u0, None, length=5)[0] ** 2)

    found = gradient(network, u0, p, "compiled", alg=eo.RK4(), **FIXED)
    expected = jax.grad(loss, argnums=(0, 1))(u0, p)
    same(found, expected, np.testing.assert_allclose, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "columns", "inner", "dtype"),
    [
        (21, 16, 3, "float32"),
        *(
            *((9, 37, 1, "float64"), (8, 8, 1, "float64"), (50, 50, 1, "float32")),
            *((13, 25, 5, "float64"), (17, 18, 2, "float32"), (130, 120, 40, "float64")),
        ),
    ],
)
def test_sums_of_products(rows, columns, inner, dtype, monkeypatch):
    """Weights along rows and along columns, of sizes that fill no vectors and no tiles, and with
    sums over a batch inside of the field."""
    written = []
    write = panels.Panels.write
    monkeypatch.setattr(panels.Panels, "write", lambda x: (written.append(x.term), write(x)))
    rng = np.random.default_rng(2)
    p = [jnp.asarray(rng.normal(size=(rows, columns)) / 8, dtype) for _ in range(2)]
    u0 = jnp.asarray(rng.normal(size=(19, inner, columns)), dtype)

    def field(u, p, t):
        return jnp.tanh(u @ p[0].T) @ p[1] - u

    # (Larger systems than `auto` would choose this engine for.)
    found = gradient(field, u0, p, "compiled", **FIXED)
    expected = gradient(field, u0, p, "diffrax", **FIXED)
    tolerance = 100 * float(jnp.finfo(dtype).eps)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * float(jnp.abs(y).max()))
    assert {(x.rows, x.columns) for x in written} == {(rows, columns)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [FIXED, {"abstol": 1e-6, "reltol": 1e-6}], ids=["fixed", "adaptive"]
)
def test_threads_and_collections_change_nothing(options, monkeypatch):
    """The gradients have the same bits with any number of threads. How many calls are multiplied
    together changes only how sums are rounded."""
    u0, p = states(300), weights(2, 9, 7, 2)
    expected = gradient(network, u0, p, "compiled", **options)
    same(gradient(network, u0, p, "compiled", threads=2, **options), expected)
    for calls in (1, 3):
        monkeypatch.setattr(parameter_sums, "_MOST_CALLS", calls)
        found = gradient(network, u0, p, "compiled", **options)
        same(found[0], expected[0])
        same(found[1], expected[1], np.testing.assert_allclose, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "alg", "options"),
    [
        (2, eo.Tsit5(), FIXED),
        (20, eo.Tsit5(), FIXED),
        *(
            *((2, eo.Tsit5(), {}), (2, eo.RK4(), FIXED), (20, eo.Vern7(), FIXED)),
            *((2, eo.Tsit5(), FIXED | {"saveat": [0.17, 0.5]}), (20, eo.Tsit5(), {})),
        ),
    ],
)
def test_segments_change_nothing(size, alg, options, monkeypatch):
    """Steps are recorded in the memory that there is for them, and anew from the checkpoints that
    there is room for, with states in registers and in memory, and with evaluations that a step
    passes on to the next."""
    u0, p = states(21, size), weights(size, 24, size)
    run = functools.partial(gradient, network, u0, p, "compiled", alg=alg, **options)
    expected = run(maxiters=1000)
    monkeypatch.setattr(solves, "_segment_turns", lambda most, _: min(most, 1))
    monkeypatch.setattr(solves.tuning, "MOST_CHECKPOINTS", 2)
    same(run(maxiters=1001), expected)  # (another program)


@pytest.mark.slow
@pytest.mark.parametrize("alg", [eo.Rosenbrock23(), eo.Rodas5P(), eo.Vern7()], ids=type)
def test_methods(alg):
    """Implicit methods and interpolants, whose derivatives go through other programs: as along a
    direction forwards."""
    u0, p = states(5), weights(2, 9, 7, 2)
    saving = {"saveat": jnp.linspace(0.1, 0.5, 4), "abstol": 1e-7, "reltol": 1e-7, "alg": alg}
    forwards = {"sensealg": eo.ForwardDiffSensitivity(), **saving}
    direction = direction_like(p)

    def loss(p):
        return jnp.sum(ends(network, u0, p, "compiled", **forwards) ** 2)

    _, expected = jax.jvp(loss, (p,), (direction,))
    _, found = gradient(network, u0, p, "compiled", **saving)
    np.testing.assert_allclose(along(direction, found), expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "alg",
    [eo.Tsit5(), *(eo.Rodas5P(), eo.Vern7())],
    ids=type,
)
def test_callbacks(alg):
    """Weights that conditions and affects read, too, and by which events move: as along a direction
    forwards."""
    u0, p = states(9), weights(2, 10, 2)

    def condition(u, t, integrator):
        return u[0] - 0.5 * integrator.p[0][1][2] * u[1]

    def kick(integrator):
        return eo.remake(integrator, u=integrator.u * 0.5 + network(integrator.u, integrator.p, 0))

    def pulse(integrator):
        return eo.remake(integrator, u=integrator.u + integrator.p[1][1])

    callback = eo.CallbackSet(
        eo.ContinuousCallback(condition, kick), eo.PresetTimeCallback([0.2], pulse)
    )

    def loss(p, sensealg=None):
        prob = eo.ODEProblem(network, u0[0], (0.0, 1.0), p, callback=callback)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        options = {"trajectories": 9, "abstol": 1e-7, "reltol": 1e-7, "saveat": [0.6, 1.0]}
        sim = eo.solve(ens, alg, engine="compiled", sensealg=sensealg, **options)
        times = jnp.where(jnp.isfinite(sim.events.t), sim.events.t, 0)
        return jnp.sum(sim.u**2) + jnp.sum(times), sim.events.count

    found, count = jax.jit(jax.grad(loss, has_aux=True))(p)
    assert len(np.unique(count)) > 1
    direction = direction_like(p)
    forwards = functools.partial(loss, sensealg=eo.ForwardDiffSensitivity())
    _, expected, _ = jax.jvp(forwards, (p,), (direction,), has_aux=True)
    np.testing.assert_allclose(along(direction, found), expected, rtol=1e-9)


@pytest.mark.slow
def test_vmap_of_gradients():
    """Over several networks at once: as one after the other."""
    u0, p = states(21), weights(2, 9, 7, 2)
    many = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x, -x]), p)
    found = jax.vmap(lambda p: gradient(network, u0, p, "compiled", **FIXED)[1])(many)
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], many)
        expected = gradient(network, u0, one, "compiled", **FIXED)[1]
        same(
            [x[i] for x in jax.tree.leaves(found)], expected, np.testing.assert_allclose, rtol=1e-11
        )


def dense(rng, size, width, activation):
    w, b = rng.normal(size=(width, size)) / size**0.5, rng.normal(size=width)
    return (w, b), lambda x, p: activation(p[0] @ x + p[1]), width


def residual(rng, size, width, activation):
    w, v = rng.normal(size=(width, size)) / size**0.5, rng.normal(size=(size, width)) / width**0.5
    return (w, v), lambda x, p: x + p[1] @ activation(p[0] @ x), size


def norm(rng, size, width, activation):
    del width, activation

    def apply(x, p):
        return p[0] * (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + 0.1) + p[1]

    return (rng.normal(size=size), rng.normal(size=size)), apply, size


def attention(rng, size, width, activation):
    """Among the components, each with `width` features."""
    p = (rng.normal(size=(3, 1, width)) / width**0.5, rng.normal(size=(width, 1)))

    def apply(x, p):
        query, key, value = (x[:, None] @ w for w in p[0])
        return x + (jax.nn.softmax(query @ key.T) @ activation(value) @ p[1])[:, 0]

    return p, apply, size


def convolution(rng, size, width, activation):
    del width

    def apply(x, p):
        return activation(lax.conv(x[None, None], p, (1,), "SAME")[0, 0])

    return rng.normal(size=(1, 1, 3)), apply, size


LAYERS = (dense, residual, norm, attention, convolution)
ACTIVATIONS = (jnp.tanh, jax.nn.relu, jax.nn.softplus, jnp.sin, jax.nn.gelu, jax.nn.sigmoid)


@st.composite
def networks(draw):
    """A network as a field, its state's size, and its weights."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    size = now = draw(st.integers(1, 6))
    layers, p = [], []
    for _ in range(draw(st.integers(1, 4))):
        make, activation = draw(st.sampled_from(LAYERS)), draw(st.sampled_from(ACTIVATIONS))
        more, apply, now = make(rng, now, draw(st.integers(1, 24)), activation)
        layers.append(apply)
        p.append(more)
    p.append(rng.normal(size=(size, now)) / now**0.5)

    def field(u, p, t):
        x = u
        for apply, more in zip(layers, p[:-1], strict=True):
            x = apply(x, more)
        return p[-1] @ x - u

    return field, size, p


@pytest.mark.slow
@given(network=networks(), dtype=st.sampled_from([np.float32, np.float64]), fixed=st.booleans())
@settings(max_examples=3, deadline=None)
def test_networks_at_random(network, dtype, fixed):
    """Values and gradients are those of diffrax."""
    field, size, p = network
    p = jax.tree.map(lambda x: jnp.asarray(x, dtype), p)
    u0 = states(9, size, dtype)
    # (The controller is given, as diffrax's own takes other steps, and where an activation has a
    # kink, the derivative of a step depends on where it is.)
    adaptive = {"abstol": 1e-4, "reltol": 1e-4, "stepsize_controller": eo.PIController()}
    options = FIXED if fixed else adaptive
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype == np.float32 else {"rtol": 1e-5, "atol": 1e-7}
    found, expected = (ends(field, u0, p, x, **options) for x in ("compiled", "diffrax"))
    np.testing.assert_allclose(found, expected, **close)
    found, expected = (gradient(field, u0, p, x, **options) for x in ("compiled", "diffrax"))
    scale = max(1.0, *(float(jnp.max(abs(x))) for x in jax.tree.leaves(expected)))
    close["atol"] *= scale
    same(found, expected, np.testing.assert_allclose, **close)
