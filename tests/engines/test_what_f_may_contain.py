"""Fields with many features of JAX: if `vmap(diffeqsolve)` runs a field, it means the same here.

Otherwise `engine="auto"` takes diffrax, and says why.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from jax import lax
from jax.experimental import io_callback

import ensembleode as eo

from ..marks import slow_unless


START, N, P = jnp.array([1.0, 2.0]), 3, 1.3
ALGORITHMS = {
    "threads": eo.EnsembleThreads(),
    "arrays": eo.EnsembleGPUArray(),
    "serial": eo.EnsembleSerial(),
    "columns": eo.EnsembleColumns(),
    "devices": eo.EnsembleGPUArray(devices=2),
}
NET = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
TIMES = jnp.linspace(0.0, 1.0, 5)


def matrix(u, p):
    return jnp.eye(2) * (3 + p) + jnp.outer(u, u)


def linear_solve(solver, *tags, **options):
    def field(u, p, t):
        operator = lx.MatrixLinearOperator(matrix(u, p), tags)
        return -lx.linear_solve(operator, u, solver, **options).value

    return field


def root(solver, **options):
    def cubic(y, args):
        u, p = args
        return y**3 + 3 * y - u * p

    return lambda u, p, t: -optx.root_find(cubic, solver, u, args=(u, p), **options).value


def bisection(u, p, t):
    options = {"lower": -9.0, "upper": 9.0}
    start, solver = jnp.array(0.5), optx.Bisection(1e-10, 1e-10)
    found = optx.root_find(
        lambda y, a: y**3 + y - a, solver, start, args=p * jnp.sum(u), options=options
    )
    return -u * found.value


def fixed_point(u, p, t):
    solver = optx.FixedPointIteration(1e-10, 1e-10)
    return -optx.fixed_point(lambda y, a: 0.05 * p * a * jnp.cos(y), solver, u, args=u).value


def least_squares(u, p, t):
    solver = optx.LevenbergMarquardt(1e-10, 1e-10)
    return -optx.least_squares(lambda y, a: y * (1 + p) - a, solver, u, args=u).value


def checked(u, p, t):
    return -p * eqx.error_if(u, u[0] > 1e9, "too large")


def checked_parameter(u, p, t):
    return -u * eqx.error_if(p, p > 1e9, "too large")


def equinox_loop(kind):
    def field(u, p, t):
        return eqx.internal.while_loop(
            lambda z: jnp.sum(z**2) > 1, lambda z: 0.5 * p * z, -p * u, max_steps=16, kind=kind
        )

    return field


def callback(method):
    def field(u, p, t):
        like = jax.ShapeDtypeStruct(u.shape, u.dtype)
        return -p * jax.pure_callback(np.sin, like, u, vmap_method=method)

    return field


@jax.custom_jvp
def called_back(x):
    return jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"
    )


@called_back.defjvp
def _(primals, tangents):
    return called_back(*primals), jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def with_reverse_rule(u, p):
    return p * jnp.sin(u)


with_reverse_rule.defvjp(
    lambda u, p: (with_reverse_rule(u, p), (u, p)),
    lambda kept, g: (g * kept[1] * jnp.cos(kept[0]), jnp.sum(g * jnp.sin(kept[0]))),
)


def nested_maps(u, p, t):
    each = jax.vmap(jax.vmap(lambda a, b: jnp.sin(p * a * b), (None, 0)), (0, None))
    return -jnp.sum(each(u, u), 1)


def interpolated(u, p, t):
    coefficients = diffrax.backward_hermite_coefficients(TIMES, jnp.sin(p * TIMES))
    rate = diffrax.CubicInterpolation(TIMES, coefficients).evaluate(t)
    return -rate * u * jnp.interp(u, TIMES, TIMES**2)


def half_defined(u, p, t):
    # The branch not taken has a NaN, in its value and in its derivative.
    return lax.cond(u[0] > 1.5, lambda: -p * jnp.sqrt(u - 1.5), lambda: -p * u)


def inner_solve(u, p, t):
    term = diffrax.ODETerm(lambda t, y, args: -y * args)
    return -diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.5, u, p).ys[-1]


SYMMETRIC = lx.positive_semidefinite_tag
RUN = {
    "lineax LU": linear_solve(lx.AutoLinearSolver(well_posed=True)),
    "lineax LU, not thrown": linear_solve(lx.LU(), throw=False),
    "lineax QR": linear_solve(lx.QR()),
    "lineax SVD": linear_solve(lx.SVD()),
    "lineax Cholesky": linear_solve(lx.Cholesky(), SYMMETRIC),
    "lineax CG": linear_solve(lx.CG(1e-10, 1e-10), SYMMETRIC),
    "lineax CG, not thrown": linear_solve(lx.CG(1e-10, 1e-10), SYMMETRIC, throw=False),
    "Newton": root(optx.Newton(1e-10, 1e-10)),
    "Newton, not thrown": root(optx.Newton(1e-10, 1e-10), throw=False),
    "chord": root(optx.Chord(1e-10, 1e-10), max_steps=1000),
    "bisection": bisection,
    "fixed point": fixed_point,
    "least squares": least_squares,
    "checked": checked,
    "checked parameter": checked_parameter,
    "checkpointed loop": equinox_loop("checkpointed"),
    "bounded loop": equinox_loop("bounded"),
    "loop of Equinox": equinox_loop("lax"),
    "callback in turn": callback("sequential"),
    "callback of one more axis": callback("expand_dims"),
    "callback of all": callback("broadcast_all"),
    "callback with a rule": lambda u, p, t: -p * called_back(u),
    "solve": lambda u, p, t: -jnp.linalg.solve(matrix(u, p), u),
    "eigenvalues": lambda u, p, t: -u * jnp.linalg.eigh(matrix(u, p))[0] / 9,
    "singular values": lambda u, p, t: -u * jnp.linalg.svd(matrix(u, p))[1] / 9,
    "interpolated": interpolated,
    "nested maps": nested_maps,
    "reverse rule": lambda u, p, t: -with_reverse_rule(u, p),
    "checkpoint": lambda u, p, t: -jax.checkpoint(lambda v: p * jnp.sin(v))(u),
    "network": lambda u, p, t: p * NET(u),
    "half defined": half_defined,
    "one branch for all": lambda u, p, t: lax.cond(p > 0, lambda: -jnp.sqrt(p) * u, lambda: 0 * u),
    "Jacobian": lambda u, p, t: -p * jax.jacfwd(lambda v: v * jnp.sin(v[::-1]))(u) @ u / 9,
    "reduced": lambda u, p, t: -u * lax.reduce(p * u, 5.0, lax.add, (0,)) / 9,
    "inner solve": inner_solve,
}
# Without a gradient in diffrax, either.
NOT_DIFFERENTIABLE = {
    "callback in turn": "Pure callbacks do not support JVP",
    "callback of one more axis": "Pure callbacks do not support JVP",
    "callback of all": "Pure callbacks do not support JVP",
    "loop of Equinox": "Reverse-mode differentiation does not work",
}
# The derivative that JAX has of a reduction forgets its initial value.
REFERENCES = {"reduced": lambda u, p, t: -u * (5.0 + jnp.sum(p * u)) / 9}


def by_diffrax(field, starts):
    """The sum of the squares of the ends, as a function of `p`."""
    term = diffrax.ODETerm(lambda t, u, p: field(u, p, t))

    def end(u0, p):
        return diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.5, u0, p).ys[-1]

    return lambda p: jnp.sum(jax.vmap(end, (0, None))(starts, p) ** 2)


def ensemble(field, p=P):
    prob = eo.ODEProblem(field, START, (0.0, 1.0), p)
    return eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (ctx.index + 1)))


def by_solve(field, alg, **options):
    def loss(p):
        sim = eo.solve(ensemble(field, p), eo.Euler(), alg, dt=0.5, trajectories=N, **options)
        return jnp.sum(sim.u[:, -1] ** 2)

    return loss


def alone(field):
    def loss(p):
        prob = eo.ODEProblem(field, START, (0.0, 1.0), p)
        return jnp.sum(eo.solve(prob, eo.Euler(), dt=0.5).u[-1] ** 2)

    return loss


def mapped(field):
    def end(u0, p):
        prob = eo.ODEProblem(field, u0, (0.0, 1.0), p)
        return eo.solve(prob, eo.Euler(), dt=0.5).u[-1]

    return lambda p: jnp.sum(jax.vmap(end, (0, None))(starts(), p) ** 2)


def starts(n=N):
    return jnp.outer(jnp.arange(1.0, n + 1), START)


def assert_agree(ours, theirs):
    assert_close(ours(P), theirs(P))
    assert_close(jax.grad(ours)(P), jax.grad(theirs)(P))


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-7)


@pytest.mark.slow
def test_parameters_of_each_trajectory():
    """Operands of other libraries' primitives may be shared, or be each trajectory's own."""
    field = RUN["lineax LU"]

    def ours(ps):
        prob = eo.ODEProblem(field, START, (0.0, 1.0), ps[0])
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=ps[ctx.index]))
        sim = eo.solve(ens, eo.Euler(), dt=0.5, trajectories=N)
        assert sim.engine.name == "diffrax"
        return jnp.sum(sim.u[:, -1] ** 2)

    def theirs(ps):
        ends = jax.vmap(by_diffrax(field, START[None]))(ps)
        return jnp.sum(ends)

    ps = P + jnp.arange(float(N))
    assert_close(ours(ps), theirs(ps))
    assert_close(jax.grad(ours)(ps), jax.grad(theirs)(ps))


@pytest.mark.parametrize("name", RUN)
@pytest.mark.slow
def test_an_ensemble_is_that_of_vmapped_diffrax(name):
    field = RUN[name]
    ours, theirs = by_solve(field, None), by_diffrax(REFERENCES.get(name, field), starts())
    if name in NOT_DIFFERENTIABLE:
        assert_close(ours(P), theirs(P))
        for loss in (ours, theirs):
            with pytest.raises(ValueError, match=NOT_DIFFERENTIABLE[name]):
                jax.grad(loss)(P)
    else:
        assert_agree(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("alg", [eo.Rosenbrock23(), eo.Rodas5P()], ids=["second", "fifth"])
@pytest.mark.parametrize(
    "name",
    [
        *("solve", "network", "half defined", "one branch for all", "nested maps", "checkpoint"),
        *("Jacobian", "reduced", "lineax LU", "Newton", "eigenvalues"),
    ],
)
def test_both_modes_differentiate_the_same_coarse_steps(name, alg):
    """To rounding, where a method needs the Jacobian of f: a part that one of them left out of it
    would be as small as the error of a step."""

    def loss(p):
        prob = eo.ODEProblem(RUN[name], p * START, (0.0, 1.0), p)
        return jnp.sum(eo.solve(prob, alg, abstol=1e-2, reltol=1e-2).u[-1] ** 2)

    np.testing.assert_allclose(jax.grad(loss)(P), jax.jacfwd(loss)(P), rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("alg", [name for name in ALGORITHMS if name != "threads"])
@pytest.mark.parametrize("name", ["lineax LU", "Newton", "checked", "callback with a rule"])
def test_every_algorithm_runs_them(name, alg):
    field, alg = RUN[name], ALGORITHMS[alg]
    assert_agree(by_solve(field, alg), by_diffrax(field, starts()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lineax LU", "Newton", "checked", "half defined"])
def test_a_problem_alone_and_mapped(name):
    assert_agree(mapped(RUN[name]), by_diffrax(RUN[name], starts()))
    assert_agree(alone(RUN[name]), by_diffrax(RUN[name], starts(1)))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2], ids=["one device", "two devices"])
def test_on_devices_of_a_mesh(devices):
    """The chunks are dealt out, and lineax compares abstract values, which may know of the mesh."""
    field, n = RUN["lineax LU"], 130

    def loss(p, alg):
        sim = eo.solve(ensemble(field, p), eo.Euler(), alg, dt=0.5, trajectories=n)
        return jnp.sum(jnp.mean(sim.u[:, -1], 0))

    both = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    assert_close(both(P, eo.EnsembleGPUArray(devices=devices)), both(P, eo.EnsembleSerial()))


def printing(u, p, t):
    jax.debug.callback(lambda x: None, u)
    return -p * u


def writing(u, p, t):
    return -p * io_callback(np.sin, jax.ShapeDtypeStruct(u.shape, u.dtype), u)


REFUSED = {
    "callback of one": (callback(None), "the primitive pure_callback, at .*callback"),
    "print": (printing, "f has effects"),
    "write": (writing, "f has effects"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_diffrax_runs_what_is_not_compiled(name):
    field, why = REFUSED[name]
    prob = eo.ODEProblem(field, START, (0.0, 1.0), P)
    sol = eo.solve(prob, eo.Euler(), dt=0.5)
    assert sol.engine.name == "diffrax"
    assert sol.engine.reason.startswith("auto: the first that runs Euler; not compiled: f ")
    with pytest.raises(ValueError, match=f"engine='compiled' can't run this f: .*{why}"):
        eo.solve(prob, eo.Euler(), dt=0.5, engine="compiled")
    untranslated = "f (has effects|can't be translated: it uses the primitive pure_callback)"
    with pytest.raises(
        ValueError, match=f"EnsembleGPUKernel.*EnsembleGPUArray.*not compiled: .*{untranslated}"
    ):
        eo.solve(ensemble(field), eo.Euler(), eo.EnsembleGPUKernel(), dt=0.5, trajectories=N)


def test_effects_are_had_as_often_as_by_diffrax():
    seen = []

    def field(u, p, t):
        jax.debug.callback(lambda x: seen.append(float(x)), u[0])
        return -p * u

    sim = eo.solve(ensemble(field), eo.Euler(), dt=0.5, trajectories=N)
    jax.effects_barrier()
    assert sim.engine.name == "diffrax"
    ours, seen[:] = sorted(seen), []
    by_diffrax(field, starts())(P)
    jax.effects_barrier()
    assert ours == sorted(seen)


@pytest.mark.parametrize("ordered", [True, slow_unless(False, False)])
def test_effects_on_the_way_back(ordered):
    """Of a `custom_vjp`, such as `eqx.debug.backward_nan`: had as often as f is pulled back."""

    @jax.custom_vjp
    def watched(x):
        return x

    def back(_, cotangent):
        jax.debug.callback(lambda x: seen.append(1), cotangent, ordered=ordered)
        return (cotangent,)

    watched.defvjp(lambda x: (x, None), back)

    def end(rate):
        prob = eo.ODEProblem(lambda u, p, t: -watched(p * u), jnp.ones(2), (0.0, 1.0), rate)
        return eo.solve(prob, eo.Euler(), dt=0.5).u[-1, 0]

    seen = []
    np.testing.assert_allclose(jax.grad(end)(0.8), -2 * 0.5 * (1 - 0.4))
    jax.effects_barrier()
    assert len(seen) == 2


class TheirError(Exception):
    pass


def test_errors_of_the_field_are_the_users():
    def wrong(u, p, t):
        raise NotImplementedError("of the user's own")

    @jax.custom_batching.custom_vmap
    def mapped_wrongly(u):
        return jnp.sin(u)

    @mapped_wrongly.def_vmap
    def _(size, in_batched, u):
        raise TheirError

    with pytest.raises(NotImplementedError, match="of the user's own"):
        eo.solve(eo.ODEProblem(wrong, START, (0.0, 1.0)))
    wrongly = eo.ODEProblem(lambda u, p, t: mapped_wrongly(u), START, (0.0, 1.0))
    with pytest.raises(TheirError):
        eo.solve(ensemble(wrongly.f), None, eo.EnsembleGPUArray(), trajectories=N, engine="diffrax")
    # Code for one trajectory has no use for the rule.
    assert eo.solve(wrongly).engine.name == "compiled"


@pytest.mark.slow
def test_a_check_that_fails_in_one_trajectory_raises():
    """As under `jax.vmap`; with the other trajectories it is like any exception."""

    def field(u, p, t):
        return -p * eqx.error_if(u, u[0] > 2.5, "too far out")

    with pytest.raises(Exception, match="too far out"):
        eo.solve(ensemble(field), eo.Euler(), dt=0.5, trajectories=N, engine="diffrax")
    fine = eo.solve(ensemble(field), eo.Euler(), dt=0.5, trajectories=N - 1, engine="diffrax")
    assert fine.successful.all()


def test_jax_forgets_the_initial_value_in_the_derivative():
    """Once this fails, JAX has been mended: without a version that has the defect, `REFERENCES` is
    not needed here."""

    def total(x):
        return lax.reduce(x, np.float64(5), lax.add, (0,))

    value, _ = jax.jvp(total, (jnp.ones(2),), (jnp.ones(2),))
    assert float(total(jnp.ones(2))) == 7.0
    assert float(value) == 2.0


def test_a_reduction_keeps_its_initial_value():
    """Where XLA optimises, whatever the form of the state."""

    def field(u, p, t):
        windows = lax.reduce_window(u, 5.0, lax.add, u.shape, (1,), "VALID")
        return u * lax.reduce(u, 5.0, lax.add, (0,)) + windows[0]

    for n in (3, 30):
        u0 = jnp.arange(1.0, n + 1)
        expected = u0 + u0 * (5 + u0.sum()) + 5 + u0.sum()
        prob = eo.ODEProblem(field, u0, (0.0, 1.0))
        solve = jax.jit(lambda u0, prob=prob: eo.solve(eo.remake(prob, u0=u0), eo.Euler(), dt=1.0))
        compiled = solve.lower(u0).compile({"xla_backend_optimization_level": 1})
        np.testing.assert_allclose(compiled(u0).u[-1], expected)
