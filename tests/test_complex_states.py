"""States of complex numbers: every method, option and derivative, as of closed forms."""

import functools

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings, strategies as st

import ensembleode as eo

from .marks import slow_unless


_RANDOM = np.random.default_rng(0)
_ANY = _RANDOM.normal(size=(3, 3)) + 1j * _RANDOM.normal(size=(3, 3))
H = _ANY + _ANY.conj().T
V = np.array([[0.0, 1.0, 0.5], [1.0, 0.3, 0.0], [0.5, 0.0, -0.7]], complex)
START = np.array([1.0, 0.5j, -0.3 + 0.2j])
P = np.array([0.0, 0.4, 1.0], complex)
TIGHT = {"reltol": 1e-9, "abstol": 1e-11}


def schroedinger(u, p, t):
    return -1j * ((H + p * V) @ u)


def exact(p, t, start=START):
    return scipy.linalg.expm(-1j * t * (H + p * V)) @ start


def problem(f=schroedinger, u0=START, p=0.4 + 0j, **options):
    return eo.ODEProblem(f, u0, (0.0, 1.0), p, **options)


def ensemble(**options):
    def chosen(prob, ctx):
        return eo.remake(prob, u0=prob.u0 * jnp.exp(1j * ctx.index), p=jnp.asarray(P)[ctx.index])

    return eo.EnsembleProblem(problem(**options), chosen)


def ends(t=1.0):
    return np.stack([exact(p, t, START * np.exp(1j * i)) for i, p in enumerate(P)])


def close(found, expected, tol=1e-8):
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=tol, atol=tol)


#
# Methods and executors
#


METHODS = [
    ("compiled", eo.Tsit5(), TIGHT),
    slow_unless(False, "compiled", eo.Vern7(), TIGHT),
    slow_unless(False, "compiled", eo.RK4(), {"dt": 2e-3}),
    slow_unless(False, "compiled", eo.Bosh3(), {"reltol": 1e-8, "abstol": 1e-10}),
    ("compiled", eo.Rodas5P(), TIGHT),
    slow_unless(False, "compiled", eo.AutoTsit5(eo.Rodas5P()), TIGHT),
    slow_unless(False, "diffrax", eo.Tsit5(), TIGHT),
    ("diffrax", eo.Vern7(), TIGHT),
    slow_unless(False, "diffrax", eo.Kvaerno5(), {"reltol": 1e-10, "abstol": 1e-12}),
]


@pytest.mark.parametrize(("engine", "alg", "how"), METHODS, ids=str)
def test_methods(engine, alg, how):
    sim = eo.solve(ensemble(), alg, trajectories=3, saveat=[0.3, 1.0], engine=engine, **how)
    assert sim.converged
    close(sim.u[:, 1], ends(), 1e-7)
    close(sim.u[:, 0], ends(0.3), 1e-7)


def test_single_precision():
    matrix = (H + 0.4 * V).astype(np.complex64)
    prob = problem(lambda u, p, t: -1j * (matrix @ u), START.astype(np.complex64))
    sol = eo.solve(prob, reltol=1e-5, abstol=1e-6)
    assert sol.engine.name == "compiled"
    close(sol.u[-1], exact(0.4, 1.0).astype(np.complex64), 1e-4)


@pytest.mark.parametrize(
    "ensemblealg",
    [
        eo.EnsembleSerial(),
        eo.EnsembleThreads(),
        eo.EnsembleGPUArray(),
        slow_unless(False, eo.EnsembleDistributed(workers=2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_executors(ensemblealg):
    how = {"saveat": [0.3, 1.0], **TIGHT}
    alone = eo.solve(problem(u0=START * np.exp(2j), p=P[2]), eo.Tsit5(), **how).u
    for more in ({}, {"batch_size": 2}):
        sim = eo.solve(ensemble(), eo.Tsit5(), ensemblealg, trajectories=3, **how, **more)
        np.testing.assert_allclose(sim.u[2], alone, rtol=1e-14)
        close(sim.u[:, -1], ends())


def test_columns():
    sim = eo.solve(ensemble(), eo.Tsit5(), eo.EnsembleColumns(), trajectories=3, **TIGHT)
    close(sim.u[:, -1], ends())


#
# Step sizes
#


def steps(f, u0, **options):
    prob = eo.ODEProblem(f, u0[0], (0.0, 1.0))
    sim = eo.solve(eo.EnsembleProblem(prob, u0=u0), saveat=[1.0], **options)
    return np.asarray(sim.stats.naccept), np.asarray(sim.stats.nreject)


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (3, {}),
        slow_unless(False, 3, {"alg": eo.Rodas5P()}),
        slow_unless(False, 3, {"internalnorm": eo.MaxNorm()}),
        (40, {"engine": "compiled"}),  # in memory
        slow_unless(False, 40, {"engine": "compiled", "abstol": np.full(40, 1e-9)}),
        slow_unless(False, 3, {"engine": "diffrax", "alg": eo.Vern7()}),
        (3, {"engine": "diffrax", "alg": eo.Tsit5()}),
        slow_unless(False, 3, {"engine": "diffrax", "alg": eo.Kvaerno5()}),
        slow_unless(
            False,
            3,
            {
                "engine": "diffrax",
                "alg": eo.Tsit5(),
                "stepsize_controller": diffrax.PIDController(rtol=1e-6, atol=np.full(3, 1e-9)),
            },
        ),
    ],
    ids=str,
)
def test_a_phase_changes_no_step(n, options):
    """Errors and states count by their absolute values, as the phase of a state means nothing."""
    rates = np.linspace(0.5, 5.0, n) * (1j - 0.1)
    u0 = np.linspace(0.1, 1.0, n) * np.exp(1j * np.arange(n))
    phases = np.exp(1j * np.array([0.0, 0.3, np.pi / 2, 2.2]))
    tolerances = {} if "stepsize_controller" in options else {"reltol": 1e-7, "abstol": 1e-9}
    how = {**tolerances, "trajectories": 4, **options}
    accepted, rejected = steps(lambda u, p, t: rates * u, phases[:, None] * u0, **how)
    assert len({*zip(accepted.tolist(), rejected.tolist(), strict=True)}) == 1
    assert accepted[0] > 5


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_any_size(engine):
    """Absolute values of numbers whose squares overflow, or are zero."""
    sizes = 2.0 ** np.array([0, -93, 93])

    def found(size):
        u0 = (size * np.array([1.0, 0.5j])).astype(np.complex64)
        prob = eo.ODEProblem(lambda u, p, t: np.complex64(3j) * u, u0, (0.0, 1.0))
        how = {"abstol": float(1e-6 * size), "reltol": 1e-5, "engine": engine}
        sol = eo.solve(prob, eo.Vern7(), **how)
        np.testing.assert_allclose(sol.u[-1] / u0, np.full(2, np.exp(3j)), rtol=1e-4)
        return int(sol.stats.naccept)

    assert len(set(map(found, sizes))) == 1


def test_tolerances_as_people_write_them():
    """Of an array, in a list or a tuple, and within a trace; of a pytree, as a vector."""
    of_array = [
        eo.solve(problem(), abstol=x, reltol=1e-9).u[-1]
        for x in (np.array([1e-9, 1e-6, 1e-9]), [1e-9, 1e-6, 1e-9], (1e-9, 1e-6, 1e-9))
    ]
    np.testing.assert_array_equal(of_array[0], of_array[1])
    np.testing.assert_array_equal(of_array[0], of_array[2])

    @jax.jit
    def traced(u0, abstol):
        return eo.solve(problem(u0=u0), abstol=abstol, reltol=1e-9).u[-1]

    np.testing.assert_allclose(
        traced(START, jnp.array([1e-9, 1e-6, 1e-9])), of_array[0], rtol=1e-13
    )
    with pytest.raises(ValueError, match="abstol must be zero or positive"):
        jax.jit(lambda u0: eo.solve(problem(u0=u0), abstol=np.array([1.0, 1.0, -1.0])).u)(START)

    def f(u, p, t):
        return {"a": 1j * u["a"], "b": 30j * u["b"]}

    prob = eo.ODEProblem(f, {"a": 1.0 + 0j, "b": 0.5 + 0j}, (0.0, 1.0))
    few, many = (
        eo.solve(prob, abstol=np.array(x), reltol=1e-12).stats.naccept
        for x in ([1e-9, 1e-3], [1e-9, 1e-9])
    )
    assert 2 * few < many
    with pytest.raises(ValueError, match=r"abstol has the shape \(4,\).* of u0, \(2,\)"):
        eo.solve(prob, abstol=np.full(4, 1e-9))


def test_a_norm_of_ones_own_in_a_controller_of_diffrax():
    """It gets an array; for real states, too, and where there are several estimates."""
    controller = diffrax.PIDController(rtol=1e-6, atol=1e-8, norm=lambda y: jnp.max(jnp.abs(y)))
    how = {"engine": "diffrax", "stepsize_controller": controller, "max_norm": 10.0}
    for u0 in (np.array([1.0, 0.5]), np.array([1.0, 0.5j])):
        for alg in (eo.Tsit5(), eo.BS5()):
            prob = eo.ODEProblem(lambda u, p, t: jnp.stack([u[1], -u[0]]), u0, (0.0, 1.0))
            c, s = np.cos(1.0), np.sin(1.0)
            close(eo.solve(prob, alg, **how).u[-1], np.array([[c, s], [-s, c]]) @ u0, 1e-5)


def test_a_norm_that_is_too_large():
    """`max_norm` is that of absolute values."""
    prob = eo.ODEProblem(lambda u, p, t: (1 + 1j) * u, [3.0 + 4.0j], (0.0, 2.0))
    how = {"save_everystep": True, "dtmax": 0.01, "maxiters": 1000}
    sol = eo.solve(prob, max_norm=5 * np.e, **how)
    assert sol.retcode == eo.ReturnCode.Diverged
    assert 1.0 < sol.t[-1] < 1.02


#
# Options
#


@pytest.mark.parametrize(
    "idxs", [1, [2, 0], slice(0, 2), slow_unless(False, np.array([True, False, True]))], ids=str
)
def test_chosen_components(idxs):
    sim = eo.solve(ensemble(), saveat=[1.0], trajectories=3, save_idxs=idxs, **TIGHT)
    close(sim.u[:, -1], ends()[:, idxs])
    sol = eo.solve(problem(), save_everystep=True, save_idxs=idxs, **TIGHT)
    close(sol(0.37), exact(0.4, 0.37)[idxs])


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_between_steps(engine):
    sol = eo.solve(problem(), eo.Vern7(), save_everystep=True, engine=engine, **TIGHT)
    times = np.array([0.1, 0.55, 0.99])
    close(sol(times), np.stack([exact(0.4, t) for t in times]))


def _coupled(u, p, t):
    return {"b": -1j * p * u["a"], "a": -1j * p * u["b"]}


def test_trees():
    u0 = {"b": np.array([[1.0 + 0j, 0.5]]), "a": np.array([[0.1j, 0.2]])}
    prob = eo.ODEProblem(_coupled, u0, (0.0, 1.0), 0.7)
    how = {"abstol": {"a": 1e-11, "b": np.full((1, 2), 1e-11)}, "reltol": 1e-9}
    sol = eo.solve(prob, **how)
    c, s = np.cos(0.7), np.sin(0.7)
    close(sol.u["b"][-1], c * u0["b"] - 1j * s * u0["a"])
    close(sol.u["a"][-1], c * u0["a"] - 1j * s * u0["b"])
    close(eo.solve(prob, save_idxs="b", **how).u[-1], sol.u["b"][-1])
    close(eo.solve(prob, save_idxs=["b"], **how).u["b"][-1], sol.u["b"][-1])


def test_integrands():
    """Real ones stay real; beside a complex one, all are complex."""
    sol = eo.solve(problem(integrand=lambda u, p, t: jnp.abs(u) ** 2), **TIGHT)
    assert sol.integral.dtype == np.float64
    np.testing.assert_allclose(sol.integral[-1].sum(), (abs(START) ** 2).sum(), rtol=1e-8)
    matrix = -1j * (H + 0.4 * V)
    expected = np.linalg.solve(matrix, exact(0.4, 1.0) - START)
    sol = eo.solve(problem(integrand=lambda u, p, t: (u, jnp.abs(u[0]))), eo.Rodas5P(), **TIGHT)
    close(sol.integral[0][-1], expected)
    assert sol.integral[1].dtype == np.complex128


def test_mass_matrices():
    mass = np.diag([2.0, 1.0, 3.0])
    prob = problem(eo.ODEFunction(schroedinger, mass_matrix=mass))
    matrix = np.linalg.solve(mass, -1j * (H + 0.4 * V))
    close(
        eo.solve(prob, eo.Rodas5P(), **TIGHT).u[-1],
        scipy.linalg.expm(matrix) @ START.astype(complex),
    )


@pytest.mark.parametrize("start", [0.5j, 3.0 - 0.7j])
def test_algebraic_equations(start):
    """u' = -i u + v, 0 = v - u i / 2: u = exp(-i t / 2)."""

    def f(u, p, t):
        return jnp.stack([-1j * u[0] + u[1], u[1] - 0.5j * u[0]])

    f = eo.ODEFunction(f, mass_matrix=np.diag([1.0, 0.0]))
    prob = eo.ODEProblem(f, jnp.array([1.0, start]), (0.0, 1.0))
    how = {} if start == 0.5j else {"initializealg": eo.BrownFullBasicInit()}
    sol = eo.solve(prob, eo.Rodas5P(), **how, **TIGHT)
    close(sol.u[-1], np.exp(-0.5j) * np.array([1.0, 0.5j]))


def test_jacobians_of_users():
    of_users = eo.ODEFunction(schroedinger, jac=lambda u, p, t: -1j * (H + p * V))
    close(eo.solve(problem(of_users), eo.Rodas5P(), **TIGHT).u[-1], exact(0.4, 1.0))
    wrong = eo.ODEFunction(schroedinger, jac=lambda u, p, t: jnp.eye(2, dtype=complex))
    with pytest.raises(ValueError, match=r"here \(3, 3\).* returned the shape \(2, 2\)"):
        eo.solve(problem(wrong), eo.Rodas5P())
    matrix = np.diag([1j, -2j, 0.3j])
    matrix[0, 1] = 0.5

    def f(u, p, t):
        return jnp.stack([1j * u[0] + 0.5 * u[1], -2j * u[1], 0.3j * u[2]])

    known = eo.ODEFunction(f, jac_prototype=(matrix != 0).astype(float))
    sol = eo.solve(problem(known), eo.Rodas5P(), **TIGHT)
    close(sol.u[-1], scipy.linalg.expm(matrix) @ START)


def test_branches():
    def f(u, p, t):
        return jax.lax.cond(jnp.abs(u[0]) > 0.5, lambda u: p * u, lambda u: 1j * u, u)

    def end(p):
        sol = eo.solve(eo.ODEProblem(f, [1.0 + 0.5j], (0.0, 1.0), p), **TIGHT)
        assert sol.engine.name == "compiled"
        return jnp.real(sol.u[-1, 0])

    grad = jax.grad(end)(0.2 + 1j)
    close(grad, jax.grad(lambda p: jnp.real((1 + 0.5j) * jnp.exp(p)))(0.2 + 1j))


def test_transforms():
    """A field with Fourier transforms, in memory: a free wave packet."""
    n = 16
    k = 2 * np.pi * np.fft.fftfreq(n, 1 / n).astype(complex)
    u0 = np.exp(1j * np.cos(2 * np.pi * np.arange(n) / n))

    def f(u, p, t):
        return -0.5j * p * jnp.fft.ifft(k**2 * jnp.fft.fft(u))

    sol = eo.solve(eo.ODEProblem(f, u0, (0.0, 1.0), 1e-2), **TIGHT)
    assert sol.engine.name == "compiled"
    close(sol.u[-1], np.fft.ifft(np.exp(-0.5j * 1e-2 * k**2) * np.fft.fft(u0)), 1e-7)


#
# Callbacks
#


def test_events():
    """The phase turns where a population falls to a half, and a complex parameter changes."""

    def rabi(u, p, t):
        return -1j * p["rabi"] * u[::-1]

    def turned(i):
        p = i.p | {"rabi": i.p["rabi"] * jnp.exp(0.3j)}
        return eo.remake(i, u=i.u * jnp.exp(0.5j), p=p)

    half = eo.ContinuousCallback(lambda u, t, i: jnp.abs(u[0]) ** 2 - 0.5, turned)
    prob = eo.ODEProblem(rabi, [1.0 + 0j, 0j], (0.0, 1.0), {"rabi": jnp.array(1.0 + 0j)})
    sol = eo.solve(prob, callback=half, saveat=[0.5, 1.0], **TIGHT)
    at = np.pi / 4
    np.testing.assert_allclose(sol.events.t, [at], rtol=1e-9)
    after = np.exp(0.5j) * np.array([np.cos(at), -1j * np.sin(at)])
    turn = np.exp(0.3j) * np.array([[0.0, -1j], [-1j, 0.0]])
    close(sol.u[-1], scipy.linalg.expm((1 - at) * turn) @ after)
    close(sol.p_at["rabi"], np.array([1.0, np.exp(0.3j)]))


def test_ends_by_events():
    stop = eo.ContinuousCallback(lambda u, t, i: jnp.abs(u[0]) ** 2 - 0.5, eo.terminate)
    sim = eo.solve(ensemble(), trajectories=3, callback=stop, **TIGHT)
    assert sim.end.u.dtype == np.complex128
    np.testing.assert_allclose(abs(sim.end.u[:, 0]) ** 2, 0.5, rtol=1e-9)


def test_projections():
    """A norm that is kept, with amplitudes of any phase."""
    norm = float((abs(START) ** 2).sum())
    kept = eo.ManifoldProjection(lambda u, p, t: jnp.sum(jnp.abs(u) ** 2) - norm)
    how = {"reltol": 1e-3, "abstol": 1e-4}
    sol = eo.solve(problem(), eo.Tsit5(), callback=kept, **how)
    assert abs((abs(sol.u[-1]) ** 2).sum() - norm) < 1e-12
    np.testing.assert_allclose(sol.u[-1], exact(0.4, 1.0), atol=5e-3)


def test_refusals():
    with pytest.raises(TypeError, match="PositiveDomain is for real states, and u0 is complex128"):
        eo.solve(problem(), callback=eo.PositiveDomain())
    with pytest.raises(TypeError, match="dtype of the state u, complex128; it returned float64"):
        eo.solve(problem(lambda u, p, t: u.real))
    with pytest.raises(ValueError, match=r"shape of the state u, \(3,\); it returned the shape"):
        eo.solve(problem(lambda u, p, t: u[:2]))
    with pytest.raises(TypeError, match="Is a `return` missing"):
        eo.solve(problem(lambda u, p, t: None))
    with pytest.raises(ValueError, match=r"abstol has the shape \(6,\).* of u0, \(3,\)"):
        eo.solve(problem(), abstol=np.full(6, 1e-6))
    with pytest.raises(ValueError, match="of the 3 components of u0"):
        eo.solve(problem(), save_idxs=[3])


#
# Results
#


def test_stores(tmp_path):
    how = {"trajectories": 3, "saveat": [0.3, 1.0], **TIGHT}
    eo.solve(ensemble(), store=tmp_path / "sim", **how)
    close(np.asarray(eo.open_ensemble(tmp_path / "sim").u)[:, -1], ends())


def test_outputs_and_means():
    prob, chosen = ensemble().prob, ensemble().prob_func
    populations = eo.EnsembleProblem(
        prob, chosen, output_func=lambda sol, ctx: (jnp.abs(sol.u[-1]) ** 2, False)
    )
    sim = eo.solve(populations, trajectories=3, **TIGHT)
    close(sim.u, abs(ends()) ** 2)
    sim = eo.solve(ensemble(), trajectories=3, saveat=[1.0], **TIGHT)
    close(eo.analysis.timestep_mean(sim, 0), ends().mean(axis=0))


#
# Derivatives
#


def _value(x, **options):
    """Of the closed form `u = z exp(i (a + b i))`."""
    z, rate = jax.lax.complex(x[0], x[1] ** 2), jax.lax.complex(x[2], x[3])
    prob = eo.ODEProblem(lambda u, p, t: 1j * p * u, z[None], (0.0, 1.0), rate)
    u = eo.solve(prob, **{"abstol": 1e-11, "reltol": 1e-11, **options}).u[-1, 0]
    return jnp.real(u) * jnp.imag(u)


def _exact_value(x):
    u = jax.lax.complex(x[0], x[1] ** 2) * jnp.exp(1j * jax.lax.complex(x[2], x[3]))
    return jnp.real(u) * jnp.imag(u)


WAYS = {
    "grad": jax.grad,
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
}


@pytest.mark.parametrize("way", [slow_unless(x in ("grad", "hessian"), x) for x in WAYS])
@pytest.mark.parametrize(
    "options",
    [
        {"alg": eo.Vern7()},
        slow_unless(False, {"alg": eo.Rodas5P()}),
    ],
    ids=str,
)
def test_derivatives(way, options):
    x = jnp.array([1.3, 0.4, 0.7, -0.2])
    expected = WAYS[way](_exact_value)(x)
    found = WAYS[way](functools.partial(_value, **options))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-8)


def test_derivatives_by_complex_numbers():
    """JAX's convention, for the initial state and a parameter."""

    def loss(z, rate, solve):
        u = solve(z, rate)
        return jnp.sum(jnp.abs(u) ** 2 * jnp.array([1.0, 2.0])) + jnp.real(jnp.sum(u**2))

    def by_solve(z, rate):
        prob = eo.ODEProblem(lambda u, p, t: p * u, z, (0.0, 1.0), rate)
        return eo.solve(prob, abstol=1e-11, reltol=1e-11).u[-1]

    z, rate = jnp.array([1.0 + 0.3j, -0.4j]), jnp.array([0.2 + 1j, -0.5 + 0.4j])
    found = jax.grad(loss, (0, 1))(z, rate, by_solve)
    expected = jax.grad(loss, (0, 1))(z, rate, lambda z, rate: z * jnp.exp(rate))
    for a, b in zip(found, expected, strict=True):
        close(a, b)


#
# Any
#


@st.composite
def _linear_systems(draw):
    """A matrix, a start, a shape, and a way to solve."""
    n = draw(st.integers(1, 4))
    numbers = st.floats(-2.0, 2.0, allow_subnormal=False)
    size = 2 * n * n + 2 * n
    flat = np.array(draw(st.lists(numbers, min_size=size, max_size=size)))
    matrix = (flat[: n * n] + 1j * flat[n * n : 2 * n * n]).reshape(n, n)
    start = flat[-2 * n : -n] + 1j * flat[-n:]
    return matrix, start, draw(st.sampled_from(["vector", "row", "tree"]))


@settings(max_examples=8, deadline=None)
@given(_linear_systems(), st.sampled_from([eo.Tsit5(), eo.Vern7(), eo.Rodas5P()]))
def test_any_linear_system(system, alg):
    matrix, start, form = system
    ways = {
        "vector": (lambda v: v, lambda u: u),
        "row": (lambda v: v[None], lambda u: u[0]),
        "tree": (
            lambda v: {"last": v[-1], "first": v[:-1]},
            lambda u: jnp.append(u["first"], u["last"]),
        ),
    }
    wrapped, vector = ways[form]
    prob = eo.ODEProblem(
        lambda u, p, t: wrapped(p @ vector(u)), wrapped(jnp.asarray(start)), (0.0, 1.0), matrix
    )
    sol = eo.solve(prob, alg, **TIGHT)
    expected = scipy.linalg.expm(matrix) @ start
    end = vector(jax.tree.map(lambda x: x[-1], sol.u))
    np.testing.assert_allclose(end, expected, rtol=1e-6, atol=1e-7 * (1 + abs(expected).max()))


@pytest.mark.slow
def test_a_solve_backwards():
    """`BacksolveAdjoint`, whose state has further leaves, with this library's controller."""
    matrix = jnp.array([0.3 + 1j, -0.5j])

    def loss(z, rate):
        prob = eo.ODEProblem(lambda u, p, t: p * u, z, (0.0, 1.0), rate)
        how = {"sensealg": diffrax.BacksolveAdjoint(), "stepsize_controller": eo.PIController()}
        u = eo.solve(prob, diffrax.Dopri5(), abstol=1e-9, reltol=1e-9, **how).u[-1]
        return jnp.sum(jnp.abs(u) ** 2)

    found = jax.grad(loss, (0, 1))(jnp.asarray(START[:2]), matrix)
    expected = jax.grad(lambda z, rate: jnp.sum(jnp.abs(z * jnp.exp(rate)) ** 2), (0, 1))(
        jnp.asarray(START[:2]), matrix
    )
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-5)
