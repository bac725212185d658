"""Step-size controllers, norms and bounds of steps: on every engine, compared with their
formulas."""

import math
import pickle

import hypothesis as hp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.job import job_for
from ensembleode.running.fingerprint import fingerprint
from ensembleode.solvers.arithmetic import ARRAYS, JaxArithmetic, NUMBERS
from ensembleode.solvers.powers import arctan, exp2, log2

from .. import oracle
from ..marks import slow_unless
from ..problems import lotka_volterra


ENGINES = ("compiled", "diffrax")
JAX = JaxArithmetic()
TIGHT = {"abstol": 1e-7, "reltol": 1e-7}
CONTROLLERS = {
    "PI": eo.PIController(),
    "PI by hand": eo.PIController(0.1, 0.05, gamma=0.8, qmin=0.5, qmax=3.0),
    "I": eo.IController(),
    "PI42": eo.PIDController(0.6, -0.2),
    "H312PID": eo.PIDController(1 / 18, 1 / 9, 1 / 18),
}


class Halves(eo.AbstractController):
    """The user's own: steps are powers of two, and one is remembered."""

    most: float = 4.0

    def initial_memory(self):
        return (0.0,)

    def factor(self, xp, log_error, memory, accepted, is_first):
        power = xp.floor((-1.0 - log_error) / 5.0 + 0.0 * memory[0])
        power = xp.minimum(xp.maximum(power, -3.0), self.most)
        return self.exp2(xp, power), (log_error,)


class MeanNorm(eo.AbstractNorm):
    def __call__(self, xp, values):
        return xp.mean(tuple(xp.abs(x) for x in values))


def predators(**changes):
    prob = eo.ODEProblem(
        lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 5.0), jnp.array([1.5, 1.0, 3.0, 1.0])
    )
    return eo.remake(prob, **changes)


def shifted(**changes):
    return eo.EnsembleProblem(
        predators(**changes), lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index / 10)
    )


def steps_of(sol):
    return np.diff(np.asarray(sol.t))


@hp.given(st.floats(-125, 125, width=32))
def test_powers(x):
    def of(fn, x):
        return float(fn(NUMBERS, np.array([x], np.float32))[0])

    assert of(exp2, x) == pytest.approx(2.0**x, rel=2e-6)
    assert of(log2, of(exp2, x)) == pytest.approx(x, abs=2e-3)
    assert of(arctan, x) == pytest.approx(math.atan(x), rel=5e-7)
    assert of(arctan, of(exp2, x)) == pytest.approx(math.atan(of(exp2, x)), rel=5e-7)


def by_formula(controller, order, embedded, errors):
    """The factors after steps of these errors, all accepted but where the error is above one."""
    factors, old = [], [1e-4] if isinstance(controller, eo.PIController) else [1.0, 1.0]
    for i, error in enumerate(errors):
        if isinstance(controller, eo.PIDController):
            k = min(order, embedded) + 1
            betas = (controller.beta1, controller.beta2, controller.beta3)
            power = math.prod(e ** (-b / k) for e, b in zip((error, *old), betas, strict=True))
            factor = 1 + math.atan(power - 1)
            accepted = factor >= controller.accept_safety
            old = [error, old[0]] if accepted else old
        else:
            accepted = error <= 1
            if isinstance(controller, eo.IController):
                factor = controller.gamma * error ** (-1 / (embedded + 1))
            else:
                beta1 = controller.beta1 or 7 / (10 * order)
                beta2 = controller.beta2 or 2 / (5 * order)
                factor = controller.gamma * error**-beta1 * (old[0] ** beta2 if accepted else 1)
                old = [max(error, 1e-4)] if accepted else old
            most = controller.qmax if any(e <= 1 for e in errors[:i]) else 10_000.0
            factor = max(controller.qmin, min(most, factor))
        factors.append((factor, accepted))
    return factors


@pytest.mark.slow
@hp.given(
    st.sampled_from(list(CONTROLLERS.values())),
    st.sampled_from([(5, 4), (3, 2), (9, 8), (2, 3)]),
    st.lists(st.floats(-12, 12).map(lambda x: 10.0**x), min_size=1, max_size=6),
)
def test_factors_are_those_of_the_formulas(controller, orders, errors):
    controller_of = controller.for_method(*orders)
    memory = tuple(np.array([x], np.float32) for x in controller_of.initial_memory())
    is_first = np.array([True])
    for error, (factor, accepted) in zip(
        errors, by_formula(controller, *orders, errors), strict=True
    ):
        squared = np.array([error**2])
        found = controller_of.accepts(NUMBERS, squared, memory)
        # (Logarithms are to a thousandth: what is that close to being accepted may be either.)
        hp.assume(abs(error - 1) > 1e-3)
        if isinstance(controller, eo.PIDController):
            hp.assume(abs(factor - controller.accept_safety) > 1e-2)
        assert found[0] == accepted
        h, memory = controller_of.next_step(
            NUMBERS, np.array([2.0]), squared, memory, found, is_first
        )
        assert h[0] == pytest.approx(2 * factor, rel=2e-2)
        is_first = is_first & ~found


@pytest.mark.parametrize("engine", [slow_unless(x != "diffrax", x) for x in ENGINES])
def test_the_constants_of_ordinarydiffeq_are_the_default(engine):
    solved = [
        eo.solve(shifted(), trajectories=3, engine=engine, stepsize_controller=x, **TIGHT)
        for x in (eo.PIController(), eo.PIController(7 / 50, 2 / 25), eo.PIController(0.14, 0.08))
    ]
    if engine != "diffrax":  # whose default is diffrax's own
        solved.append(eo.solve(shifted(), trajectories=3, engine=engine, **TIGHT))
    for sim in solved[1:]:
        np.testing.assert_array_equal(sim.u, solved[0].u)
        np.testing.assert_array_equal(sim.stats.naccept, solved[0].stats.naccept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [*CONTROLLERS, "own", "own norm", "max norm", "dtmax"],
)
def test_engines_take_the_same_steps(how):
    options = {
        "own": {"stepsize_controller": Halves()},
        "own norm": {"internalnorm": MeanNorm(), "stepsize_controller": eo.PIController()},
        "max norm": {"internalnorm": eo.MaxNorm(), "stepsize_controller": eo.PIController()},
        "dtmax": {"dtmax": 0.03, "stepsize_controller": eo.PIController()},
    }.get(how) or {"stepsize_controller": CONTROLLERS[how]}
    sims = [
        eo.solve(shifted(), trajectories=3, engine=engine, **options, **TIGHT) for engine in ENGINES
    ]
    exact = eo.solve(shifted(), eo.Vern9(), trajectories=3, abstol=1e-12, reltol=1e-12)
    for sim in sims:
        assert (np.asarray(sim.retcode) == eo.ReturnCode.Success).all()
        np.testing.assert_allclose(sim.u, exact.u, rtol=1e-4)
        np.testing.assert_array_equal(sim.stats.naccept, sims[0].stats.naccept)
        np.testing.assert_array_equal(sim.stats.nreject, sims[0].stats.nreject)
        np.testing.assert_allclose(sim.u, sims[0].u, rtol=1e-9)
    expected = oracle.solve_each(shifted(), n=3, **options, **TIGHT)
    oracle.assert_same_steps(sims[0], expected, rtol=1e-7)


def test_norms():
    values = tuple(jnp.array([x]) for x in (3.0, -4.0, 0.0))
    for norm, expected in ((eo.RMSNorm(), (25 / 3) ** 0.5), (eo.MaxNorm(), 4), (MeanNorm(), 7 / 3)):
        for xp, x in ((JAX, values), (ARRAYS, (jnp.stack(values),)), (NUMBERS, values)):
            np.testing.assert_allclose(norm(xp, x), expected, rtol=1e-15)
            np.testing.assert_allclose(norm.squared(xp, x), expected**2, rtol=1e-15)
        for place in range(3):
            lost = tuple(x.at[:].set(jnp.nan) if i == place else x for i, x in enumerate(values))
            assert np.isnan(norm(JAX, lost)).all()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_one_step_by_each_norm(engine):
    """The error of Heun's method with `u' = (t, 0)` is `h / 2` in one of both components: whether
    a step is accepted is known."""
    f = lambda u, p, t: jnp.stack([t, 0 * t])  # noqa: E731
    prob = eo.ODEProblem(f, jnp.zeros(2), (0.0, 1.0))
    # Of the step to the end, the scaled error is `h^2 / 2 / abstol`, and its mean square half that.
    common = {"dt": 1.0, "engine": engine, "reltol": 0.0, "save_everystep": True}
    common["stepsize_controller"] = eo.PIController()
    for norm, abstol in ((eo.RMSNorm(), 0.5 / math.sqrt(2)), (eo.MaxNorm(), 0.5)):
        for factor, rejected in ((1.001, 0), (0.999, 1)):
            sol = eo.solve(
                prob, eo.Heun(), internalnorm=norm, abstol=abstol * factor, maxiters=99, **common
            )
            assert sol.stats.nreject == rejected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("norm", [eo.MaxNorm(), MeanNorm()])
def test_steps_to_what_is_not_finite_are_rejected(engine, norm):
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.stack([-jnp.sqrt(u[0]), -u[1]]), jnp.ones(2), (0.0, 1.9)
    )
    sol = eo.solve(prob, engine=engine, internalnorm=norm, dt=100.0)
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.u[-1], [0.0025, np.exp(-1.9)], rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "back"),
    [(engine, back) for engine in ENGINES for back in (False, True)],
)
def test_dtmax_bounds_every_step(engine, back):
    prob = predators(tspan=(5.0, 0.0)) if back else predators()
    free = eo.solve(prob, engine=engine, save_everystep=True)
    for extra in ({}, {"dt": 2.0}):
        sol = eo.solve(prob, engine=engine, save_everystep=True, dtmax=0.05, **extra)
        assert sol.retcode == eo.ReturnCode.Success
        assert np.abs(steps_of(sol)).max() <= 0.05 * (1 + 1e-12) < np.abs(steps_of(free)).max()
        assert np.sign(steps_of(sol)).min() == np.sign(steps_of(sol)).max()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("controller", [None, slow_unless(False, eo.IController())])
def test_steps_below_dtmin_end_the_trajectory(engine, controller):
    options = {"engine": engine, "stepsize_controller": controller}
    fast = eo.ODEProblem(lambda u, p, t: -1e4 * (u - jnp.cos(t)), jnp.zeros(1), (0.0, 1.0))
    assert eo.solve(fast, dtmin=1e-2, **options).retcode == eo.ReturnCode.DtLessThanMin
    assert eo.solve(fast, dtmin=1e-6, **options).retcode == eo.ReturnCode.Success
    # The last step may be short.
    easy = eo.ODEProblem(lambda u, p, t: 0 * u, jnp.ones(1), (0.0, 1.0))
    assert eo.solve(easy, dtmin=0.3, dt=0.4, dtmax=0.4, **options).retcode == eo.ReturnCode.Success


@pytest.mark.slow
def test_bounds_may_differ_by_trajectory():
    sizes = jnp.array([0.01, 0.02, 0.05])

    def prob_func(prob, ctx):
        return eo.remake(prob, dtmax=sizes[ctx.index])

    ens = eo.EnsembleProblem(predators(), prob_func)
    for engine in ENGINES:
        sim = eo.solve(ens, trajectories=3, engine=engine)
        np.testing.assert_allclose(sim.stats.naccept, [500, 250, 100], rtol=0.05)
    with pytest.raises(ValueError, match="so dtmax must be the same for all"):
        eo.solve(ens, eo.Tsit5(), eo.EnsembleColumns(), trajectories=3)


@pytest.mark.slow
def test_columns_share_their_steps():
    options = {"dtmax": 0.1, "internalnorm": eo.MaxNorm(), "stepsize_controller": eo.IController()}
    sim = eo.solve(shifted(), eo.Tsit5(), eo.EnsembleColumns(), trajectories=3, **options)
    alone = eo.solve(shifted(), trajectories=3, **options)
    np.testing.assert_allclose(sim.u, alone.u, rtol=1e-2)
    assert (np.asarray(sim.stats.naccept) >= 50).all()


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        slow_unless(engine == "compiled", engine, how)
        for engine in ENGINES
        for how in ("PI42", "own")
    ],
)
def test_gradients(engine, how):
    """Against finite differences of the same steps: they are short, and many."""
    controller = Halves(most=1.0) if how == "own" else CONTROLLERS[how]
    options = {"stepsize_controller": controller, "internalnorm": eo.MaxNorm(), "dtmax": 0.5}
    options |= {"engine": engine, "abstol": 1e-10, "reltol": 1e-10, "maxiters": 2048}

    def loss(p):
        return eo.solve(predators(p=p), eo.Tsit5(), **options).u[-1].sum()

    p = jnp.array([1.5, 1.0, 3.0, 1.0])
    gradient = jax.grad(loss)(p)
    for i, e in enumerate(1e-4 * jnp.eye(4)):
        central = (loss(p + e) - loss(p - e)) / 2e-4
        np.testing.assert_allclose(gradient[i], central, rtol=1e-5)


@pytest.mark.slow
def test_they_are_told_apart_and_the_same_in_every_process():
    def known(**options):
        job, _ = job_for(shifted(), options, jax.random.key(0), 3, "compiled", eo.Tsit5())
        return tuple(sorted(fingerprint(job, "mine").items()))

    every = [
        *({"stepsize_controller": x} for x in (*CONTROLLERS.values(), Halves(), Halves(3.0))),
        *({"internalnorm": x} for x in (eo.MaxNorm(), MeanNorm())),
        *({"dtmax": x} for x in (0.1, 0.2)),
        *({"dtmin": x} for x in (1e-6, 1e-5)),
    ]
    assert len({known(**options) for options in every}) == len(every)
    assert [known(**o) for o in every] == [known(**pickle.loads(pickle.dumps(o))) for o in every]
    assert known(stepsize_controller=eo.PIController()) == known()


def test_they_belong_to_a_problem_too():
    prob = predators(stepsize_controller=eo.IController(), dtmax=0.1, internalnorm=eo.MaxNorm())
    options = {"stepsize_controller": eo.IController(), "dtmax": 0.1, "internalnorm": eo.MaxNorm()}
    np.testing.assert_array_equal(eo.solve(prob).u, eo.solve(predators(), **options).u)
    # A fixed step takes the place of a controller.
    assert "stepsize_controller" not in eo.remake(prob, adaptive=False).options


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (ValueError, "gamma must be in", lambda: eo.PIController(gamma=1.1)),
        (ValueError, "qmin must be in", lambda: eo.IController(qmin=1.0)),
        (ValueError, "qmin must be in", lambda: eo.IController(qmax=1.0)),
        (ValueError, "qoldinit must be positive", lambda: eo.PIController(qoldinit=0.0)),
        (ValueError, "accept_safety must be in", lambda: eo.PIDController(1, 0, accept_safety=1)),
        (TypeError, "beta1 of PIController must be a finite", lambda: eo.PIController("a")),
        (TypeError, "beta2 of PIDController must be", lambda: eo.PIDController(1, jnp.ones(2))),
        (TypeError, "must be a finite", lambda: eo.PIController(math.nan)),
        (TypeError, "abstract", lambda: eo.AbstractController()),
    ],
)
def test_wrong_constants(error, message, make):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "internalnorm must be a norm such as", {"internalnorm": max}),
        (TypeError, "internalnorm must be a norm such as", {"internalnorm": eo.MaxNorm}),
        (TypeError, "stepsize_controller must be one such", {"stepsize_controller": max}),
        (ValueError, "adaptive=False are both given", {
            "stepsize_controller": eo.PIController(), "adaptive": False, "dt": 0.1}),
        (ValueError, "dtmin must be a positive", {"dtmin": 0.0}),
        (ValueError, "dtmax must be a positive", {"dtmax": [0.1, 0.2]}),
        (TypeError, "dtmax must be a positive", {"dtmax": "a"}),
        (ValueError, "dtmax is smaller", {"dtmin": 0.2, "dtmax": 0.1}),
        (ValueError, "dtmax is given with a fixed step", {
            "dtmax": 0.1, "adaptive": False, "dt": 0.1}),
        (ValueError, "RK4 has no error estimate for stepsize_controller", {
            "alg": eo.RK4(), "stepsize_controller": eo.PIController()}),
        (ValueError, "Halves\\(\\) is in Python", {
            "engine": "julia", "stepsize_controller": Halves()}),
        (ValueError, "MeanNorm\\(\\) is in Python", {
            "engine": "julia", "internalnorm": MeanNorm()}),
        (ValueError, "give PIController\\(beta1, beta2\\)", {
            "alg": eo.JuliaAlg("Rodas5P()"), "stepsize_controller": eo.PIController()}),
    ],
)  # fmt: skip
def test_wrong_arguments(error, message, options):
    with pytest.raises(error, match=message):
        eo.solve(predators(), **options)


def test_constants_are_no_tracers():
    def run(gamma):
        return eo.solve(predators(), stepsize_controller=eo.PIController(gamma=gamma)).u

    with pytest.raises(TypeError, match="gamma of PIController must be a finite Python number"):
        jax.jit(run)(0.9)
