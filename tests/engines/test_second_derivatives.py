"""Derivatives of any order, without `sensealg`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import ensembleode as eo
from ensembleode.engines.compiled import kernel

from ..marks import slow_unless
from ..problems import lorenz, lotka_volterra


TIGHT = {"abstol": 1e-11, "reltol": 1e-11, "engine": "compiled"}

WAYS = {
    "hessian": jax.hessian,
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f)),
    "jvp of grad": lambda f: (
        lambda x: jax.vmap(lambda v: jax.jvp(jax.grad(f), (x,), (v,))[1], out_axes=1)(
            jnp.eye(len(x))
        )
    ),
}
# What is of one engine.
OF_COMPILED = ("test_every_step", "test_third_order", "test_nothing_of_the_second_order")


def pytest_generate_tests(metafunc):
    """(diffrax's programs take half a minute each to compile: one way of those that are JAX's.)"""
    of_diffrax = not metafunc.function.__name__.startswith(OF_COMPILED)
    if "way" in metafunc.fixturenames:
        ways = [slow_unless(way == "hessian", "compiled", way) for way in WAYS]
        ways += [slow_unless(False, "diffrax", "hessian")] * of_diffrax
        metafunc.parametrize(("engine", "way"), ways, indirect=["engine"])
        return
    engines = ["compiled", *[slow_unless(False, "diffrax")] * of_diffrax]
    metafunc.parametrize("engine", engines, indirect=True)


@pytest.fixture(autouse=True)
def engine(request, monkeypatch):
    monkeypatch.setitem(TIGHT, "engine", request.param)
    return request.param


def method():
    """One with few stages for diffrax, whose derivatives take longer to compile with each."""
    return eo.Tsit5() if TIGHT["engine"] == "diffrax" else eo.Vern7()


def flat_loss(outputs, x):
    """A loss of the states that `outputs(x)` gives, as a function of a vector, and that."""
    flat, unravel = ravel_pytree(x)

    def loss(flat):
        u = outputs(unravel(flat))
        weights = jnp.cos(jnp.arange(u.size, dtype=u.dtype)).reshape(u.shape)
        return jnp.sum(jnp.where(jnp.isnan(u), 0, u) ** 2 * weights)

    return loss, flat


def differences(f, x, h=1e-3):
    """The Jacobian of `f` by central differences of fourth order, whose rows are those of `x`."""
    steps = h * jnp.eye(len(x))
    at = jax.jit(jax.vmap(lambda k, step: f(x + k * step), (None, 0)))
    first, second = (at(k, steps) - at(-k, steps) for k in (1.0, 2.0))
    return (8 * first - second) / (12 * h)


def decay(u, p, t):
    return -p[0] * u + p[1]


def decayed(x):
    """The solution of `decay` from `t0` to `t1`, or at the times to save."""
    rate, source = x["p"]
    times = x["times"] if "times" in x else x["t1"][None]
    left = jnp.exp(-rate * (times - x["t0"]))[:, None]
    return x["u0"][None] * left + source / rate * (1 - left)


def solved_decay(x, **options):
    options |= {"saveat": x["times"]} if "times" in x else {"save_start": False}
    prob = eo.ODEProblem(decay, x["u0"], (x["t0"], x["t1"]), x["p"])
    return eo.solve(prob, eo.Tsit5(), **TIGHT, **options).u


def numbers(mode):
    x = {
        "u0": jnp.array([1.2]),
        "p": jnp.array([1.5, 0.5]),
        "t0": jnp.array(0.2),
        "t1": jnp.array(1.3),
    }
    return {**x, "times": jnp.array([0.2, 0.9])} if mode == "times" else x


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ends", "times"])
def test_by_numbers_and_times(mode, way):
    """By `u0`, `p`, `t0`, `t1` and `saveat`, all against all."""
    x = numbers(mode)
    if mode == "times":
        x["t1"] = jnp.array(1.0)
    loss, flat = flat_loss(solved_decay, x)
    exact, _ = flat_loss(decayed, x)
    found, expected = jax.jit(lambda x: (WAYS[way](loss)(x), jax.hessian(exact)(x)))(flat)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


BY_FEW = [("p",), ("u0",), ("t0",), ("t1",), ("p", "t1"), ("u0", "t0")]


@pytest.mark.slow
@pytest.mark.parametrize("names", BY_FEW, ids="-".join)
def test_by_some_of_them(names, way):
    """Where others don't move, there are no tangents."""
    rest = numbers("ends")
    x = {name: rest[name] for name in names}
    loss, flat = flat_loss(lambda x: solved_decay({**rest, **x}), x)
    exact, _ = flat_loss(lambda x: decayed({**rest, **x}), x)
    found = WAYS[way](loss)(flat)
    np.testing.assert_allclose(found, jax.hessian(exact)(flat), rtol=1e-6, atol=1e-7)


THIRD = {
    "reverse first": lambda f: jax.jacfwd(jax.hessian(f)),
    "reverse last": lambda f: jax.jacrev(jax.hessian(f)),
    "reverse thrice": lambda f: jax.jacrev(jax.jacrev(jax.jacrev(f))),
    "forward thrice": lambda f: jax.jacfwd(jax.jacfwd(jax.jacfwd(f))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THIRD)
def test_third_order(name):
    x = numbers("ends")
    loss, flat = flat_loss(solved_decay, x)
    exact, _ = flat_loss(decayed, x)
    expected = jax.jacfwd(jax.hessian(exact))(flat)
    np.testing.assert_allclose(jax.jit(THIRD[name](loss))(flat), expected, rtol=1e-6, atol=1e-7)


def perceptron(u, p, t):
    inner, bias, outer = p
    return outer @ jnp.tanh(inner @ u + bias)


def random(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


# field: (f, u0, p, span); each trajectory has its own first state, and all share p
PROBLEMS = {
    "lotka_volterra": (lotka_volterra, jnp.ones(2), jnp.array([1.5, 1.0, 3.0, 1.0]), 2.0),
    "lorenz": (lorenz, jnp.array([1.0, 0.5, 0.2]), jnp.array([10.0, 28.0, 8 / 3]), 0.3),
    "perceptron": (
        perceptron,
        jnp.array([1.0, -0.5]),
        (random(3, 2), random(3), random(2, 3)),
        1.0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_against_differences(name, way, engine):
    """By first states, parameters and both ends of time, under `vmap`, with a trajectory of which
    nothing is finite among the others."""
    found = jax.jit(jax.vmap(WAYS[way](of_problem(name)[0])))(of_problem(name)[1])
    expected = differences_of(name, engine)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=1e-7 * max(1.0, scale))


def of_problem(name):
    """A loss, and two places to differentiate it at."""
    f, u0, p, span = PROBLEMS[name]
    spread = jnp.array([[1.0], [1.1], [1.0], [0.9]])

    def outputs(x):
        prob = eo.ODEProblem(f, u0, (x["t0"], x["t1"]), x["p"])
        starts = (x["u0"][None] * spread).at[2].set(np.nan)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index]))
        return eo.solve(ens, method(), trajectories=4, **TIGHT).u[:, -1] / 10

    x = {"u0": u0, "p": p, "t0": jnp.array(0.1), "t1": jnp.array(span)}
    loss, flat = flat_loss(outputs, x)
    return loss, jnp.stack([flat, 1.05 * flat])


@functools.cache
def differences_of(name, engine):
    del engine  # (by which `TIGHT` has them solved)
    loss, many = of_problem(name)
    gradient = jax.jit(jax.vmap(jax.grad(loss)))
    n = many.shape[1]
    sizes = 1e-3 * jnp.array([1.0, -1.0, 2.0, -2.0])
    at = many[None, :, None] + sizes[:, None, None, None] * jnp.eye(n)[None, None]
    near, before, far, far_before = gradient(at.reshape(-1, n)).reshape(at.shape)
    return (8 * (near - before) - (far - far_before)) / 12e-3


def both_kinds(u, p, t):
    own, shared = p
    x, y = u
    return jnp.stack([own[0] * x - x * y, x * y - shared * y * (1 + 0.1 * jnp.sin(t))])


N = 5


def ensemble(x, **options):
    """Parameters of each trajectory, those that all share, and a value that `f` closes over."""
    closed_over = x["closed_over"]

    def f(u, p, t):
        return both_kinds(u, p, t) * closed_over

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=x["u0"][ctx.index], p=(x["own"][ctx.index], x["shared"]))

    prob = eo.ODEProblem(f, x["u0"][0], (0.0, 1.0), (x["own"][0], x["shared"]))
    ens = eo.EnsembleProblem(prob, prob_func)
    return eo.solve(ens, method(), trajectories=len(x["u0"]), **(TIGHT | options)).u


def of_ensemble():
    rng = np.random.default_rng(0)
    return {
        "u0": jnp.asarray(rng.uniform(0.5, 2.0, (N, 2))),
        "own": jnp.asarray(rng.uniform(0.5, 3.0, (N, 1))),
        "shared": jnp.asarray(1.1),
        "closed_over": jnp.asarray(0.9),
    }


SAVING = {
    "ends": {},
    "times": {"saveat": np.array([0.3, 0.7, 1.0])},
    "steps": {"save_everystep": True, "maxiters": 128},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ends", "times"])
def test_own_and_shared(mode, way):
    loss, flat = flat_loss(functools.partial(ensemble, **SAVING[mode]), of_ensemble())
    found = jax.jit(WAYS[way](loss))(flat)
    expected = differences(jax.grad(loss), flat)
    # (Dense output is less accurate than ends, and differs with the steps.)
    rtol = 1e-7 if mode == "ends" else 1e-5
    np.testing.assert_allclose(found, expected, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("mode", [slow_unless(mode == "ends", mode) for mode in SAVING])
def test_ways_agree(mode, engine):
    """Steps being constants, second derivatives are symmetric, in whichever way they are made."""
    if engine == "diffrax" and mode != "ends":
        pytest.skip("takes long to compile")
    loss, flat = flat_loss(functools.partial(ensemble, **SAVING[mode]), of_ensemble())
    v = jnp.cos(jnp.arange(len(flat), dtype=flat.dtype))

    @jax.jit
    def every(x):
        return {
            "forward over reverse": jax.jvp(jax.grad(loss), (x,), (v,))[1],
            "reverse over reverse": jax.grad(lambda x: jax.grad(loss)(x) @ v)(x),
            "reverse over forward": jax.grad(lambda x: jax.jvp(loss, (x,), (v,))[1])(x),
        }

    found = every(flat)
    expected = found.pop("forward over reverse")
    for name, got in found.items():
        np.testing.assert_allclose(got, expected, atol=1e-10 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow
def test_every_step():
    """What is saved at every step has the second derivatives that diffrax gives.

    (With steps of a fixed size: chosen ones differ by rounding, and their states more.)
    """
    how = {"save_everystep": True, "maxiters": 16, "adaptive": False, "dt": 0.1}
    how["sensealg"] = eo.ForwardDiffSensitivity()
    found, expected = (
        flat_loss(functools.partial(ensemble, engine=engine, **how), of_ensemble())
        for engine in ("compiled", "diffrax")
    )
    v = jnp.cos(jnp.arange(len(found[1]), dtype=found[1].dtype))

    def twice(loss, x):
        return jax.jvp(lambda x: jax.jvp(loss, (x,), (v,))[1], (x,), (v,))[1]

    assert twice(*expected) != 0
    np.testing.assert_allclose(twice(*found), twice(*expected), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("differentiated", [False, True])
def test_under_vmap(differentiated, engine):
    if engine == "diffrax" and differentiated:
        pytest.skip("takes minutes to compile, by rules that are JAX's")
    loss, flat = flat_loss(ensemble, of_ensemble())
    many = jnp.stack([flat, 1.1 * flat])
    v = jnp.sin(jnp.arange(len(flat), dtype=flat.dtype))

    def product(x):
        return jax.jvp(jax.grad(loss), (x,), (v,))[1]

    if differentiated:
        total = jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(product)(x))))
        alone = jax.grad(lambda x: jnp.sum(jnp.sin(product(x))))
        np.testing.assert_allclose(total(many)[1], alone(many[1]), rtol=1e-9)
        return
    found, alone = jax.jit(lambda x: (jax.vmap(product)(x), jax.lax.map(product, x)))(many)
    np.testing.assert_allclose(found, alone, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_failures_change_nothing(bad):
    """Trajectories that fail have zero second derivatives, and change no others'."""
    x = of_ensemble()
    spoilt = {**x, "u0": x["u0"].at[2].set(bad)}
    loss, _ = flat_loss(ensemble, x)
    v = ravel_pytree(jax.tree.map(jnp.ones_like, x))[0]
    unravel = ravel_pytree(x)[1]

    @jax.jit
    def product(x):
        return unravel(jax.jvp(jax.grad(loss), (ravel_pytree(x)[0],), (v,))[1])

    found, expected = product(spoilt), product(x)
    rest = np.array([0, 1, 3, 4])
    for name in ("u0", "own"):
        np.testing.assert_array_equal(found[name][2], 0.0)
        np.testing.assert_allclose(found[name][rest], expected[name][rest], rtol=1e-13)
    assert np.isfinite(found["shared"])
    assert np.isfinite(found["closed_over"])


def test_nothing_of_the_second_order_is_made_before(monkeypatch):
    """A gradient has the kernels of the field alone."""
    sizes = []
    for name in ("solving", "pulling_back"):
        make = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda d, make=make: sizes.append(d.size) or make(d))
    loss, flat = flat_loss(ensemble, of_ensemble())
    jax.jit(jax.grad(loss))(flat)
    assert set(sizes) == {2}
    jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])(flat)
    assert set(sizes) == {2, 4}


def test_f_without_a_forward_derivative():
    """Its gradient is there; what needs more says why."""

    @jax.custom_vjp
    def rate(u):
        return -u

    rate.defvjp(lambda u: (-u, None), lambda _, c: (-c,))

    def end(u0):
        prob = eo.ODEProblem(lambda u, p, t: rate(u), u0, (0.0, 1.0))
        return eo.solve(prob, eo.Tsit5(), **TIGHT).u[-1, 0]

    u0 = jnp.array([1.0])
    np.testing.assert_allclose(jax.grad(end)(u0), np.exp(-1.0), rtol=1e-9)
    for derivative in (jax.jacfwd(end), jax.hessian(end)):
        with pytest.raises(TypeError, match=r"[Ww]rite .* with jax.custom_jvp"):
            derivative(u0)


BAD = (np.nan, np.inf)
HOW = {"ours": {}, "gauss": {"sensealg": eo.GaussAdjoint()}, "diffrax": {"engine": "diffrax"}}
CAUSES = [(name, bad) for name in ("u0", "own", "shared", "t0", "t1", "times") for bad in BAD]


def failing(x, **options):
    """Of both own and shared numbers, times among them."""
    options |= {"saveat": x["times"]} if "times" in x else {}

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=x["u0"][ctx.index], p=(x["own"][ctx.index], x["shared"]))

    prob = eo.ODEProblem(both_kinds, x["u0"][0], (x["t0"], x["t1"]), (x["own"][0], x["shared"]))
    ens = eo.EnsembleProblem(prob, prob_func)
    u = eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), trajectories=N, **options).u
    return jnp.sum(jnp.where(jnp.isnan(u), 0, u) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "mode"),
    [(how, mode) for how in HOW for mode in SAVING],
)
def test_derivatives_of_what_failed_are_zero(how, mode, engine):
    """Whatever they failed by, whichever did: also where none succeeded."""
    if how != "ours" and engine != "compiled":
        pytest.skip("is of the compiled engine, or the same")
    if (how, mode) == ("diffrax", "steps") or (how, engine, mode) == ("ours", "diffrax", "times"):
        pytest.skip("takes long")
    options = {"engine": engine} | HOW[how] | SAVING[mode]
    x = of_ensemble() | {"t0": jnp.array(0.0), "t1": jnp.array(1.0)}
    del x["closed_over"]
    if mode == "times":
        x["times"] = jnp.asarray(options.pop("saveat"))
    v = jax.tree.map(jnp.ones_like, x)
    gradient = jax.grad(functools.partial(failing, **options))

    @jax.jit
    def both(x):
        if how != "ours":
            return (gradient(x),)
        return jax.jvp(gradient, (x,), (v,))

    for name, bad in CAUSES:
        if name not in x:
            continue
        spoilt = both({**x, name: jnp.full_like(x[name], bad)})
        if name not in ("times", "t1"):
            # (At times before those the states are there.)
            for leaf in jax.tree.leaves(spoilt):
                np.testing.assert_array_equal(leaf, 0.0, err_msg=f"{name} = {bad}")
        if name in ("u0", "own"):
            spoilt = both({**x, name: x[name].at[jnp.array([1, 3])].set(bad)})
            for found in spoilt:
                assert np.all(np.asarray(found[name])[[1, 3]] == 0)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(spoilt)), (name, bad)
