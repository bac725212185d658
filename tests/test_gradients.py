"""Gradients: compared with finite differences, in every mode of differentiation, and beside
failures."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import ensembleode as eo

from .marks import slow_unless
from .problems import linear, lorenz, lotka_volterra, mlp, network, scaled
from .test_conformance import ALGORITHMS as ALL


# (Those by kernels are in tests/engines/compiled/gpu/test_gradients.py.)
ALGORITHMS = {name: alg for name, alg in ALL.items() if name != "kernel"}


TIGHT = {"abstol": 1e-12, "reltol": 1e-12}
N = 3
# field: (f, u0, p, span)
FIELDS = {
    "linear": (linear, jnp.array([1.0, 2.0]), jnp.array([-1.0, 0.5]), 1.0),
    "lotka_volterra": (lotka_volterra, jnp.array([1.0, 1.0]), jnp.array([1.5, 1.0, 3.0, 1.0]), 2.0),
    "lorenz": (lorenz, jnp.array([1.0, 0.0, 0.0]), jnp.array([10.0, 28.0, 8 / 3]), 2.0),
    "mlp": (mlp, jnp.array([1.0, -0.5]), network(), 1.0),
}


def loss_of(field, alg, **options):
    """A loss over all save points, of (u0, shared p, p of each trajectory), and its argument."""
    f, u0, p, span = FIELDS[field]
    p, unravel = ravel_pytree(eqx.filter(p, eqx.is_array))
    static = eqx.filter(FIELDS[field][2], eqx.is_array, inverse=True)
    weights = jnp.cos(jnp.arange(5.0))

    def loss(x):
        def prob_func(prob, ctx):
            own = unravel(x["p"] * (1 + 0.1 * x["own"][ctx.index]))
            return eo.remake(prob, u0=x["u0"] * (1 + 0.05 * ctx.index), p=eqx.combine(own, static))

        prob = eo.ODEProblem(f, u0, (0.0, span), FIELDS[field][2])
        sim = eo.solve(
            eo.EnsembleProblem(prob, prob_func),
            options.get("solver"),
            alg,
            trajectories=N,
            saveat=jnp.linspace(0.0, span, 5),
            sensealg=options.get("sensealg"),
            maxiters=options.get("maxiters", 4096),
            **TIGHT,
        )
        return jnp.sum(jnp.sin(sim.u) * weights[None, :, None])

    return loss, {"u0": u0, "p": p, "own": jnp.array([0.0, 1.0, -1.0])}


def check_against_differences(loss, x, gradient, directions=3, rtol=1e-6):
    """Along random directions, by a central difference of fourth order."""
    flat, unravel = ravel_pytree(x)
    gradient = ravel_pytree(gradient)[0]
    rng = np.random.default_rng(0)
    for _ in range(directions):
        v = rng.normal(size=flat.shape)
        v /= np.linalg.norm(v)
        h = 1e-3

        def at(k, v=v, h=h):
            return float(loss(unravel(flat + k * h * v)))

        difference = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * h)
        scale = float(jnp.linalg.norm(gradient)) / np.sqrt(len(flat))
        assert abs(float(gradient @ v) - difference) < rtol * max(abs(difference), scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "name"),
    [(field, name) for field in FIELDS for name in ALGORITHMS],
)
def test_finite_differences(field, name):
    loss, x = loss_of(field, ALGORITHMS[name])
    check_against_differences(loss, x, jax.jit(jax.grad(loss))(x))


@pytest.fixture(scope="module")
def expected():
    """The gradient that the default adjoint has."""
    loss, x = loss_of("lotka_volterra", eo.EnsembleGPUArray())
    return jax.jit(jax.grad(loss))(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sensealg", [eo.DirectAdjoint(), eo.BacksolveAdjoint()])
def test_adjoints_agree(name, sensealg, expected):
    loss, x = loss_of("lotka_volterra", ALGORITHMS[name], sensealg=sensealg, maxiters=512)
    got = jax.jit(jax.grad(loss))(x)
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-7, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sensealg", [eo.ForwardDiffSensitivity(), eo.DirectAdjoint()])
def test_forward_mode(name, sensealg, expected):
    loss, x = loss_of("lotka_volterra", ALGORITHMS[name], sensealg=sensealg, maxiters=512)
    along = jax.tree.map(jnp.ones_like, x)
    _, tangent = jax.jit(lambda x: jax.jvp(loss, (x,), (along,)))(x)
    np.testing.assert_allclose(tangent, sum(jnp.sum(g) for g in expected.values()), rtol=1e-7)
    jacobian = jax.jit(jax.jacfwd(loss))(x)
    np.testing.assert_allclose(jacobian["p"], expected["p"], rtol=1e-7)


def _jvp(loss, x):
    return jax.jvp(loss, (x,), (jax.tree.map(jnp.ones_like, x),))


WAYS_FORWARD = {
    "jvp": _jvp,
    "jit of jvp": lambda loss, x: jax.jit(lambda x: _jvp(loss, x))(x),
    "jvp of jit": lambda loss, x: _jvp(jax.jit(loss), x),
    "jacfwd": lambda loss, x: jax.jacfwd(loss)(x),
    "jacfwd of jit": lambda loss, x: jax.jacfwd(jax.jit(loss))(x),
    "hessian": lambda loss, x: jax.hessian(loss)(x),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        slow_unless(way == "jvp" and name in ("threads", "columns"), way, name)
        for way in WAYS_FORWARD
        for name in ALGORITHMS
    ],
)
def test_forward_mode_of_a_reverse_adjoint_names_the_remedy(name, way):
    loss, x = loss_of("linear", ALGORITHMS[name], sensealg=eo.BacksolveAdjoint())
    with pytest.raises(TypeError, match=r"sensealg=ForwardDiffSensitivity\(\) for forward mode"):
        WAYS_FORWARD[way](loss, x)


WAYS_TWICE = {
    "jvp of grad": lambda loss, x, v: jax.jvp(jax.grad(loss), (x,), (v,))[1],
    "jacfwd of grad": lambda loss, x, v: jax.jacfwd(jax.grad(loss))(x),
    "grad of grad along": lambda loss, x, v: jax.grad(lambda x: jax.grad(loss)(x) @ v)(x),
    "grad of jvp": lambda loss, x, v: jax.grad(lambda x: jax.jvp(loss, (x,), (v,))[1])(x),
    "jacfwd of jacfwd": lambda loss, x, v: jax.jacfwd(jax.jacfwd(loss))(x),
    "jacrev of jacrev": lambda loss, x, v: jax.jacrev(jax.jacrev(loss))(x),
    "hessian": lambda loss, x, v: jax.hessian(loss)(x),
    "grad of grad by another": lambda loss, x, v: jax.grad(
        lambda a: jax.grad(lambda x: a * loss(x))(x) @ v
    )(1.0),
}
ONCE = [
    ("compiled", eo.GaussAdjoint()),
    ("diffrax", eo.RecursiveCheckpointAdjoint()),
    ("diffrax", eo.BacksolveAdjoint()),
    ("diffrax", eo.ForwardDiffSensitivity()),
]


@pytest.mark.parametrize(
    ("engine", "sensealg", "wrap"),
    [
        slow_unless(which == ONCE[0] and wrap is jax.jit, *which, wrap)
        for which in ONCE
        for wrap in (jax.jit, lambda f: f)
    ],
)
def test_second_derivatives_work_or_name_the_remedy(engine, sensealg, wrap):
    """Nothing is left to JAX's own errors, which say nothing of `sensealg`."""
    x, v = jnp.array([1.5, 0.5]), jnp.array([0.3, -0.7])

    def loss(x):
        prob = eo.ODEProblem(lambda u, p, t: -p[0] * u + p[1], jnp.array([1.0]), (0.0, 1.0), x)
        ens = eo.EnsembleProblem(prob, scaled)
        how = {"engine": engine, "sensealg": sensealg, "maxiters": 64, "reltol": 1e-8}
        return jnp.sum(eo.solve(ens, trajectories=2, **how).u[:, -1] ** 2)

    def exact(x):
        u0, decayed = jnp.arange(1.0, 3.0), jnp.exp(-x[0])
        return jnp.sum((u0 * decayed + x[1] / x[0] * (1 - decayed)) ** 2)

    for name, way in WAYS_TWICE.items():
        derivative = wrap(functools.partial(way, loss))
        if isinstance(sensealg, eo.ForwardDiffSensitivity) and name == "jacfwd of jacfwd":
            np.testing.assert_allclose(derivative(x, v), jax.hessian(exact)(x), rtol=1e-4)
            continue
        # (The backward pass of diffrax's BacksolveAdjoint multiplies integers with states.)
        how = jax.numpy_dtype_promotion("standard")
        with how, pytest.raises(TypeError, match=r"sensealg=.*sensealg=DirectAdjoint\(\)"):
            derivative(x, v)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_reverse_mode_of_forward_sensitivity_names_the_remedy(wrap):
    loss, x = loss_of("linear", eo.EnsembleGPUArray(), sensealg=eo.ForwardDiffSensitivity())
    with pytest.raises(TypeError, match="Leave sensealg out for reverse mode"):
        wrap(jax.grad(loss))(x)


@pytest.mark.slow
def test_vmap_of_grad():
    loss, x = loss_of("linear", eo.EnsembleGPUArray())
    many = jax.tree.map(lambda v: jnp.stack([v, 1.1 * v]), x)
    batched = jax.jit(jax.vmap(jax.grad(loss)))(many)
    single = jax.jit(jax.grad(loss))
    for i in range(2):
        alone = single(jax.tree.map(lambda v, i=i: v[i], many))
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-9), batched, alone
        )


@pytest.mark.parametrize(
    "name",
    [slow_unless(name == "threads", name) for name in ALGORITHMS if name != "columns"],
)
@pytest.mark.parametrize("sensealg", [None, slow_unless(False, eo.BacksolveAdjoint())])
def test_failed_trajectories_do_not_spoil_the_gradient(name, sensealg):
    """u' = p u^2 from 1 blows up at t = 1/p; a NaN is lost from the start. Masked, both vanish."""
    u0s = jnp.array([0.5, 3.0, jnp.nan, 0.7])

    def loss(p):
        prob = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.array([1.0]), (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0s[ctx.index][None]))
        sim = eo.solve(
            ens,
            None,
            ALGORITHMS[name],
            trajectories=4,
            sensealg=sensealg,
            abstol=1e-10,
            reltol=1e-10,
        )
        good = sim.retcode == eo.ReturnCode.Success.value
        return jnp.sum(jnp.where(good[:, None], sim.u[:, -1], 0.0))

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.array(1.0))
    good = np.array([0.5, 0.7])
    np.testing.assert_allclose(value, np.sum(good / (1 - good)), rtol=1e-8)
    np.testing.assert_allclose(gradient, np.sum(good**2 / (1 - good) ** 2), rtol=1e-7)


@pytest.mark.slow
def test_gradient_of_closures_spans_and_save_times():
    """What f closes over, the ends of the span and the save times are differentiated, too."""

    def end(rate, t1, save):
        prob = eo.ODEProblem(lambda u, p, t: rate * u, jnp.array([1.0]), (0.0, t1))
        ends = eo.solve(prob, **TIGHT).u[-1, 0]
        return ends + eo.solve(prob, saveat=save[None], **TIGHT).u[0, 0]

    point = (jnp.array(-1.0), jnp.array(1.0), jnp.array(0.5))
    d_rate, d_t1, d_save = jax.jit(jax.grad(end, argnums=(0, 1, 2)))(*point)
    np.testing.assert_allclose(d_rate, np.exp(-1) + 0.5 * np.exp(-0.5), rtol=1e-8)
    np.testing.assert_allclose(d_t1, -np.exp(-1), rtol=1e-8)
    np.testing.assert_allclose(d_save, -np.exp(-0.5), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_step(name):
    """Through all accepted steps, the room that is left over, and interpolation."""

    def loss(rate):
        prob = eo.ODEProblem(linear, jnp.array([1.0]), (0.0, 1.0), rate)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id))
        options = {"trajectories": 2, "save_everystep": True, "maxiters": 64, **TIGHT}
        sim = eo.solve(ens, eo.Dopri8(), ALGORITHMS[name], **options)
        ends = jax.vmap(lambda u, n: u[n - 1, 0])(sim.u, sim.lengths)
        return ends.sum() + sim(0.5).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.array(-1.0))
    np.testing.assert_allclose(value, 3 * (np.exp(-1) + np.exp(-0.5)), rtol=1e-5)
    np.testing.assert_allclose(gradient, 3 * (np.exp(-1) + 0.5 * np.exp(-0.5)), rtol=1e-4)
