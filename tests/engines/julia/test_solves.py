"""The Julia engine, compared with the compiled engine, which takes the same steps, and with JAX's
shapes."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.julia import environment, methods, session
from ensembleode.engines.julia.environment import JuliaError
from ensembleode.solvers.julia_alg import FIXED_STEP, is_stochastic, PACKAGES

from ...marks import julia_marks, why_no_julia
from ...problems import lorenz, lotka_volterra, mlp, network
from ...test_tutorial import PUBLISHED, trained
from ..test_julia_steps import robertson


pytestmark = julia_marks()

PLACES = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "distributed": eo.EnsembleDistributed(workers=2),
    "split threads": eo.EnsembleSplitThreads(workers=2, threads=1),
}
LORENZ = eo.ODEProblem(
    lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 2.0), jnp.array([10.0, 28.0, 8 / 3])
)


def sweep(prob):
    def prob_func(prob, ctx):
        return eo.remake(prob, p=prob.p.at[1].set(21.0 * ctx.index / 7))

    return eo.EnsembleProblem(prob, prob_func)


def both(ens, solver, n, place=None, **options):
    """The solutions by Julia and by the compiled engine."""
    place = place or eo.EnsembleThreads()
    sim = eo.solve(ens, solver, place, trajectories=n, engine="julia", **options)
    return sim, eo.solve(ens, solver, trajectories=n, engine="compiled", **options)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", PLACES)
def test_the_steps_of_the_compiled_engine(place):
    options = {"abstol": 1e-8, "reltol": 1e-8, "saveat": 0.25}
    sim, ours = both(sweep(LORENZ), eo.Tsit5(), 8, PLACES[place], **options)
    assert sim.engine.name == "julia"
    np.testing.assert_array_equal(sim.stats.naccept, ours.stats.naccept)
    np.testing.assert_array_equal(sim.stats.nreject, ours.stats.nreject)
    np.testing.assert_array_equal(sim.stats.nf, ours.stats.nf)
    np.testing.assert_allclose(sim.u, ours.u, rtol=1e-9, atol=1e-9)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("solver", [eo.Tsit5(), eo.Vern6(), eo.Vern7(), eo.Vern9()], ids=str)
def test_accepted_times(solver):
    options = {"abstol": 1e-6, "reltol": 1e-6, "save_everystep": True}
    sim, ours = both(sweep(LORENZ), solver, 3, **options)
    np.testing.assert_array_equal(sim.lengths, ours.lengths)
    np.testing.assert_allclose(sim.t, ours.t, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sim(0.7), ours(0.7), rtol=1e-2, atol=1e-2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", PLACES)
def test_the_same_bits_wherever(place):
    ens = sweep(LORENZ)
    sim = eo.solve(ens, None, PLACES[place], trajectories=9, engine="julia", saveat=0.5)
    serial = eo.solve(ens, None, PLACES["serial"], trajectories=9, engine="julia", saveat=0.5)
    np.testing.assert_array_equal(sim.u, serial.u)


METHODS = {
    "Bosh3": (eo.Bosh3(), 1e-6),
    "BS5": (eo.BS5(), 1e-7),
    "Dopri5": (eo.Dopri5(), 1e-8),
    "Euler": (eo.Euler(), 1e-2),
    "Heun": (eo.Heun(), 1e-4),
    "Midpoint": (eo.Midpoint(), 1e-4),
    "Ralston": (eo.Ralston(), 1e-4),
    "RK4": (eo.RK4(), 1e-8),
    "SSPRK33": (eo.SSPRK33(), 1e-6),
    "Vern6": (eo.Vern6(), 1e-7),
    "ImplicitEuler": (eo.ImplicitEuler(), 1e-2),
    "KenCarp4": (eo.KenCarp4(), 1e-6),
    "Kvaerno5": (eo.Kvaerno5(), 1e-6),
    "Rodas5P": (eo.JuliaAlg("Rodas5P()"), 1e-6),
    "AutoTsit5": (eo.JuliaAlg("AutoTsit5(Rosenbrock23())"), 1e-6),
    "Vern8": (eo.JuliaAlg("Vern8(lazy=false)"), 1e-8),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    """A forced pendulum, whose time derivative the implicit methods need, too."""
    solver, rtol = METHODS[name]

    def f(u, p, t):
        return jnp.array([u[1], jnp.cos(p * t) - jnp.sin(u[0])])

    prob = eo.ODEProblem(f, jnp.array([0.1, 0.0]), (0.0, 2.0), 1.5)
    options = {"abstol": 1e-9, "reltol": 1e-9}
    if not isinstance(solver, eo.JuliaAlg) and (not solver.adaptive or name == "Euler"):
        options = {"dt": 1e-3, "adaptive": False}
    if name == "ImplicitEuler":
        options = {"dt": 1e-3, "adaptive": False}
    sol = eo.solve(prob, solver, engine="julia", saveat=0.5, **options)
    exact = eo.solve(prob, eo.Vern9(), saveat=0.5, abstol=1e-12, reltol=1e-12)
    np.testing.assert_allclose(sol.u, exact.u, rtol=rtol, atol=rtol)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("solver", ["Rosenbrock23()", "Rodas5P()", "KenCarp4()", "QNDF()"])
def test_stiff(solver):
    """Robertson's problem, with the Jacobian from JAX."""
    prob = eo.ODEProblem(
        robertson, jnp.array([1.0, 0.0, 0.0]), (0.0, 1e4), jnp.array([0.04, 3e7, 1e4])
    )
    sol = eo.solve(prob, eo.JuliaAlg(solver), abstol=1e-10, reltol=1e-6)
    assert sol.engine is not None
    assert sol.engine.name == "julia"
    assert "no reference is on record" not in eo.citation(sol)
    exact = eo.solve(prob, eo.Kvaerno5(), abstol=1e-12, reltol=1e-9)
    np.testing.assert_allclose(sol.u[-1], exact.u[-1], rtol=1e-3)
    assert sol.stats.naccept < 2000


def test_large_fields():
    """The printed functions of large systems have loops, matrix products and scratch memory."""
    prob = eo.ODEProblem(mlp, jnp.array([1.0, -0.5]), (0.0, 1.0), network(100))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id))
    sim, ours = both(ens, eo.Tsit5(), 6, saveat=0.25, abstol=1e-8, reltol=1e-8)
    np.testing.assert_allclose(sim.u, ours.u, rtol=1e-10)
    np.testing.assert_array_equal(sim.stats.naccept, ours.stats.naccept)

    def heat(u, p, t):
        return p * (jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1))

    x = jnp.linspace(0, 2 * jnp.pi, 200, endpoint=False)
    ens = eo.EnsembleProblem(
        eo.ODEProblem(heat, jnp.sin(x), (0.0, 1.0), 1.0),
        lambda prob, ctx: eo.remake(prob, p=100.0 * ctx.sim_id),
    )
    sim, ours = both(ens, eo.Tsit5(), 3, abstol=1e-8, reltol=1e-8)
    np.testing.assert_allclose(sim.u, ours.u, atol=1e-8)


def test_single_precision():
    prob = eo.remake(LORENZ, u0=LORENZ.u0.astype("float32"), p=LORENZ.p.astype("float32"))
    sim, ours = both(sweep(prob), eo.Tsit5(), 4, abstol=1e-4, reltol=1e-4)
    assert np.asarray(sim.u).dtype == np.float32
    np.testing.assert_allclose(sim.u, ours.u, rtol=1e-2, atol=1e-2)


DOCUMENTED = re.compile(r"""["'](\w+)(\([^"'\n]*\))["']""")
ROOT = pathlib.Path(__file__).parents[3]


def documented():
    """Every method as it is called in Julia, in the documentation and in docstrings: one test case
    for each, which is skipped if its package is not installed."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("ensembleode/**/*.py")]
    texts = [name + call for page in pages for name, call in DOCUMENTED.findall(page.read_text())]
    known = {name: package for package, names in PACKAGES.items() for name in names.split()}
    texts = sorted({text for text in texts if text.split("(")[0] in known})
    assert {"Rodas5P()", "AutoTsit5(Rosenbrock23())", "QNDF(max_order=Val(3))"} <= set(texts)
    there = environment.inspect(environment.find()).packages if not why_no_julia() else {}
    for text in texts:
        lacking = methods.packages(eo.JuliaAlg(text).description) - there.keys()
        skip = pytest.mark.skipif(bool(lacking), reason=f"{lacking} is not installed")
        yield pytest.param(text, marks=skip)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("text", list(documented()))
def test_what_is_documented_of_julia_alg(text):
    alg, about = eo.JuliaAlg(text), (jnp.ones(2), (0.0, 1.0), 1.0)
    prob: Any = eo.ODEProblem(lambda u, p, t: -p * u, *about)
    if is_stochastic(alg.description):
        prob = eo.SDEProblem(prob.f, lambda u, p, t: 1e-5 * u, *about)
    options = {"dt": 1e-3} if alg.fixed_step else {}
    sol = eo.solve(prob, alg, abstol=1e-8, reltol=1e-8, **options)
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.u[-1], np.exp(-1.0), rtol=1e-3)


def test_which_methods_have_fixed_steps():
    """Julia says it of every installed method, except of those that switch."""
    julia = environment.find()
    there = environment.inspect(julia).packages
    names = [
        f"{package}={name}"
        for package, names in PACKAGES.items()
        for name in names.split()
        if package in there and not name.startswith("Auto")
    ]
    code = """
        using SciMLBase: SciMLBase
        for argument in ARGS
            package, name = Symbol.(split(argument, "="))
            @eval import $package
            adaptive = @eval SciMLBase.isadaptive($package.$name())
            println(name, " ", adaptive)
        end
    """
    said = environment.run(julia, code, *names, capture=True).stdout.split()
    adaptive = dict(zip(said[::2], said[1::2], strict=True))
    assert len(adaptive) == len(names)
    fixed = {name for name, is_adaptive in adaptive.items() if is_adaptive == "false"}
    assert fixed == FIXED_STEP & adaptive.keys()


def test_versions_are_part_of_a_store(tmp_path, monkeypatch):
    def solve():
        options = {"trajectories": 4, "engine": "julia", "store": tmp_path / "sweep.zarr"}
        return eo.solve(sweep(LORENZ), None, PLACES["serial"], **options)

    first = solve()
    np.testing.assert_array_equal(solve().u, first.u)
    there = environment.inspect(environment.find())
    other = dataclasses.replace(there, packages={**there.packages, "OrdinaryDiffEqCore": "99.0.0"})
    monkeypatch.setattr(environment, "inspected", lambda _: other)
    with pytest.raises(eo.StoreError, match=r"versions .*OrdinaryDiffEqCore 99\.0\.0"):
        solve()


def lotka_loss(x, place, **options):
    prob = eo.ODEProblem(lotka_volterra, x["u0"], (0.0, 2.0), x["p"])

    def prob_func(prob, ctx):
        own = prob.p * (1 + 0.1 * x["own"][ctx.index])
        return eo.remake(prob, u0=prob.u0 * (1 + 0.05 * ctx.index), p=own)

    options = {"saveat": jnp.linspace(0.0, 2.0, 5), "abstol": 1e-10, "reltol": 1e-10, **options}
    sim = eo.solve(eo.EnsembleProblem(prob, prob_func), None, place, trajectories=3, **options)
    return jnp.sum(jnp.sin(sim.u) * jnp.cos(jnp.arange(sim.u.shape[1]))[None, :, None])


POINT = {
    "u0": jnp.array([1.0, 1.0]),
    "p": jnp.array([1.5, 1.0, 3.0, 1.0]),
    "own": jnp.array([0.0, 1.0, -1.0]),
}
SENSEALGS = {
    "default": None,
    "interpolating": eo.InterpolatingAdjoint(),
    "backsolve": eo.BacksolveAdjoint(),
}


def close(a, b, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), a, b)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sensealg", SENSEALGS)
def test_gradient(sensealg, place):
    """Gradients are compared with the exact adjoint of the compiled engine, at tight tolerances."""
    chosen = SENSEALGS[sensealg]

    @jax.jit
    def gradient(x):
        return jax.grad(lotka_loss)(x, PLACES[place], engine="julia", sensealg=chosen)

    close(gradient(POINT), jax.grad(lotka_loss)(POINT, None, engine="compiled"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options", [{"saveat": None}, {"saveat": None, "save_start": False}], ids=str
)
@pytest.mark.parametrize("sensealg", SENSEALGS)
def test_gradient_of_the_ends(sensealg, options):
    options = {**options, "sensealg": SENSEALGS[sensealg]}
    gradient = jax.grad(lotka_loss)(POINT, PLACES["serial"], engine="julia", **options)
    del options["sensealg"]
    close(gradient, jax.grad(lotka_loss)(POINT, None, engine="compiled", **options))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sensealg", SENSEALGS)
def test_gradient_of_times(sensealg):
    """Derivatives with respect to the span and the saved times."""

    def of(x, engine, chosen=None):
        def prob_func(prob, ctx):
            return eo.remake(prob, tspan=(x["t0"], 2.0 + x["more"] * ctx.index))

        prob = eo.ODEProblem(lotka_volterra, POINT["u0"], (0.0, 2.0), POINT["p"])
        ens = eo.EnsembleProblem(prob, prob_func)
        tight = {"abstol": 1e-10, "reltol": 1e-10, "engine": engine, "sensealg": chosen}
        ends = eo.solve(ens, trajectories=3, save_start=False, **tight).u
        saved = eo.solve(ens, trajectories=3, saveat=x["times"], **tight).u
        return jnp.sum(jnp.sin(ends)) + jnp.sum(jnp.cos(saved))

    x = {"t0": jnp.array(0.1), "more": jnp.array(0.3), "times": jnp.array([0.5, 1.0, 1.7])}
    gradient = jax.grad(of)(x, "julia", SENSEALGS[sensealg])
    close(gradient, jax.grad(of)(x, "compiled"), rtol=1e-5)


def test_forward_mode():
    sensealg = eo.ForwardDiffSensitivity()

    def of(x, engine):
        return lotka_loss(x, PLACES["serial"], engine=engine, sensealg=sensealg)

    tangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(1.0, x.size + 1.0)), POINT)
    out, d = jax.jvp(lambda x: of(x, "julia"), (POINT,), (tangent,))
    expected, d_expected = jax.jvp(lambda x: of(x, "compiled"), (POINT,), (tangent,))
    np.testing.assert_allclose(out, expected, rtol=1e-8)
    np.testing.assert_allclose(d, d_expected, rtol=1e-6)
    with pytest.raises(TypeError, match="is for forward mode only"):
        jax.grad(of)(POINT, "julia")
    with pytest.raises(TypeError, match="is for reverse mode only"):
        jax.jvp(lambda x: lotka_loss(x, None, engine="julia"), (POINT,), (tangent,))


def test_gradient_of_a_network():
    """A gradient with respect to more parameters than forward sensitivities are used for."""
    net = network(16)

    def of(net, engine):
        prob = eo.ODEProblem(mlp, jnp.array([1.0, -0.5]), (0.0, 1.0), net)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id))
        tight = {"abstol": 1e-9, "reltol": 1e-9, "engine": engine}
        return jnp.sum(eo.solve(ens, trajectories=5, saveat=0.25, **tight).u ** 2)

    close(eqx.filter_grad(of)(net, "julia"), eqx.filter_grad(of)(net, "compiled"), rtol=1e-5)


def test_gradient_of_a_stiff_problem():
    """The adjoint's time derivative includes that of the forward solution, so it takes few
    steps."""

    def end(p, **options):
        prob = eo.ODEProblem(robertson, jnp.array([1.0, 0.0, 0.0]), (0.0, 40.0), p)
        sol = eo.solve(prob, abstol=1e-10, reltol=1e-8, maxiters=5000, **options)
        return sol.u[-1, 0]

    p = jnp.array([0.04, 3e7, 1e4])
    rodas, adjoint = eo.JuliaAlg("Rodas5P()"), eo.InterpolatingAdjoint()
    gradient = jax.grad(end)(p, alg=rodas, sensealg=adjoint)
    exact = jax.grad(end)(p, alg=eo.Kvaerno5())
    np.testing.assert_allclose(gradient * p, exact * p, rtol=1e-4)


def test_gradient_past_a_failure():
    """A failed trajectory has a gradient of zero, and changes no other gradient."""

    def of(p, chosen):
        def prob_func(prob, ctx):
            return eo.remake(prob, p=p * jnp.array([-1.0, 2.0, -0.5])[ctx.index])

        prob = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.array([1.0]), (0.0, 1.0), 1.0)
        sim = eo.solve(
            eo.EnsembleProblem(prob, prob_func),
            trajectories=3,
            engine="julia",
            sensealg=chosen,
            abstol=1e-10,
            reltol=1e-10,
        )
        good = sim.retcode == eo.ReturnCode.Success
        return jnp.sum(jnp.where(good[:, None], sim.u[:, -1], 0.0))

    # u(1) = 1 / (1 - c p)
    expected = sum(c / (1 - c) ** 2 for c in (-1.0, -0.5))
    for chosen in SENSEALGS.values():
        np.testing.assert_allclose(jax.grad(of)(jnp.array(1.0), chosen), expected, rtol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", PLACES)
def test_published_parameters(place):
    """SciML's tutorial, trained through Julia."""
    theta = trained(PLACES[place], abstol=1e-10, reltol=1e-10, engine="julia")
    np.testing.assert_allclose(theta, PUBLISHED, atol=2e-6, rtol=0)


KERNELS = {
    "kernel": eo.EnsembleGPUKernel(backend="CPU"),
    "array": eo.EnsembleGPUArray(backend="CPU"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KERNELS)
def test_gpu_algorithms(name):
    options = {"abstol": 1e-8, "reltol": 1e-8, "saveat": 0.25}
    sim, ours = both(sweep(LORENZ), eo.Tsit5(), 8, KERNELS[name], **options)
    np.testing.assert_allclose(sim.u, ours.u, rtol=1e-4, atol=1e-4)
    assert (np.asarray(sim.retcode) == eo.ReturnCode.Success).all()
    gradient = jax.grad(lotka_loss)(POINT, KERNELS[name], engine="julia", saveat=0.5)
    close(gradient, jax.grad(lotka_loss)(POINT, None, engine="compiled", saveat=0.5), rtol=1e-4)


def test_what_a_gpu_kernel_refuses():
    """(And what is refused without Julia: see test_engine.py.)"""
    kernel = KERNELS["kernel"]
    large = eo.ODEProblem(mlp, jnp.array([1.0, -0.5]), (0.0, 1.0), network(400))
    with pytest.raises(ValueError, match="f is larger"):
        eo.solve(eo.EnsembleProblem(large), None, kernel, trajectories=2, engine="julia")
    with pytest.raises(JuliaError, match="Kvaerno4"):
        eo.solve(sweep(LORENZ), eo.Kvaerno4(), kernel, trajectories=2, engine="julia")


def test_nothing_is_lost_by_an_error():
    with pytest.raises(JuliaError, match=r"^Julia failed: MethodError: no method"):
        eo.solve(LORENZ, eo.JuliaAlg("Tsit5(1, 2, 3, 4)"))
    assert eo.solve(LORENZ, engine="julia").retcode == eo.ReturnCode.Success


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, SystemExit])
def test_interrupt(error):
    """Ctrl-C stops Julia, as do a time limit and a handler that exits, and the next solve works.
    Workers without a part in the solve are left alone."""
    prob = eo.remake(LORENZ, tspan=(0.0, 1e9))
    ens = eo.EnsembleProblem(prob)
    main = threading.main_thread().ident
    assert main is not None
    number = signal.SIGINT if error is KeyboardInterrupt else signal.SIGALRM

    def handler(*_):
        raise error

    def press():
        time.sleep(3)
        signal.pthread_kill(main, number)

    for place in (eo.EnsembleDistributed(workers=2), PLACES["threads"]):
        eo.solve(eo.EnsembleProblem(LORENZ), None, place, trajectories=4, engine="julia")
    workers = worker_pids()
    if number == signal.SIGALRM:
        signal.signal(number, handler)
    threading.Thread(target=press).start()
    started = time.perf_counter()
    with pytest.raises(error):
        eo.solve(
            ens,
            None,
            PLACES["threads"],
            trajectories=4,
            engine="julia",
            maxiters=10**9,
            abstol=1e-12,
        )
    assert time.perf_counter() - started < 30
    assert eo.solve(LORENZ, engine="julia").retcode == eo.ReturnCode.Success
    assert worker_pids() == workers


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


OWN = """
    import jax, jax.numpy as jnp, numpy as np, sys
    jax.config.update("jax_enable_x64", True)
    import ensembleode as eo
    from ensembleode import julia

    prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.ones(2), (0.0, 1.0), -1.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=-1.0 * ctx.sim_id))

    def ends(place=None):
        options = dict(trajectories=50, engine="julia", abstol=1e-10, reltol=1e-10)
        return np.asarray(eo.solve(ens, None, place, **options).u)[:, -1, 0]

    exact = np.exp(-np.arange(1, 51))
"""


def test_a_process_of_its_own():
    """juliacall is never imported; if Julia's process dies, the next solve starts another one."""
    done = run_python(
        OWN
        + """
    np.testing.assert_allclose(ends(), exact, atol=1e-9)
    np.testing.assert_allclose(ends(eo.EnsembleDistributed(workers=2)), exact, atol=1e-9)
    assert "juliacall" not in sys.modules
    def loss(p):
        ens = eo.EnsembleProblem(eo.remake(prob, p=p))
        tight = dict(abstol=1e-10, reltol=1e-10)
        return eo.solve(ens, trajectories=3, engine="julia", **tight).u[:, -1].sum()
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(-1.0), 6 / np.e, rtol=1e-7)
    session = julia.start(process=True)
    session._process.kill()
    try:
        ends()
    except julia.JuliaError as e:
        assert "the next solve starts another" in str(e), e
    else:
        raise AssertionError("no error")
    np.testing.assert_allclose(ends(), exact, atol=1e-9)
    print("done")
    """,
        ENSEMBLEODE_JULIA_PROCESS="1",
    )
    assert done.stdout.strip().endswith("done"), done.stderr


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", ["SIGINT", "SIGALRM"])
def test_interrupting_a_process_of_its_own(number):
    done = run_python(
        OWN
        + """
    import os, signal, threading
    number = getattr(signal, os.environ["NUMBER"])
    signal.signal(number, lambda *_: sys.exit("stop"))
    np.testing.assert_allclose(ends(), exact, atol=1e-9)
    long = eo.EnsembleProblem(eo.remake(prob, tspan=(0.0, 1e9)))
    threading.Timer(3, lambda: os.kill(os.getpid(), number)).start()
    try:
        eo.solve(long, trajectories=4, engine="julia", maxiters=10**9, dt=1e-3, adaptive=False)
    except SystemExit:
        print("stopped")
    np.testing.assert_allclose(ends(), exact, atol=1e-9)
    print("done")
    """,
        ENSEMBLEODE_JULIA_PROCESS="1",
        NUMBER=number,
    )
    assert done.stdout.split() == ["stopped", "done"], done.stderr


def test_workers_have_the_methods_that_were_loaded_before_them():
    done = run_python(
        OWN
        + """
    options = dict(trajectories=4, engine="julia", dt=0.01)
    serial = eo.solve(ens, eo.Euler(), eo.EnsembleSerial(), **options)
    there = eo.solve(ens, eo.Euler(), eo.EnsembleDistributed(workers=2), **options)
    np.testing.assert_array_equal(there.u, serial.u)
    print("done")
    """
    )
    assert done.stdout.strip().endswith("done"), done.stderr


def test_juliacall_beside_it():
    """The user's own Julia code collects garbage while the engine's thread is idle."""
    done = run_python(
        OWN
        + """
    ends()
    from juliacall import Main as jl
    for _ in range(3):
        jl.seval("sum(length([i]) for i in 1:10^6); GC.gc(); 1")
        np.testing.assert_allclose(ends(), exact, atol=1e-9)
    print("done")
    """
    )
    assert done.stdout.strip().endswith("done"), done.stderr
    done = run_python("from juliacall import Main" + textwrap.dedent(OWN) + "ends()")
    assert "juliacall has started Julia in this process already" in done.stderr


def test_python_ends_after_julia():
    """Python frees Julia's objects after Julia has ended. The packages for GPUs replace methods, so
    that Julia would compile the function that frees them again."""
    solving = "ends(eo.EnsembleGPUKernel(backend='CPU')); print('done')"
    done = run_python(textwrap.dedent(OWN) + solving)
    assert done.stdout.strip().endswith("done"), done.stderr
    assert done.returncode == 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_one_core_and_large_arrays():
    """The arrays have 40 MB each way; a callback that waited for JAX would never return."""
    done = run_python(
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
        + textwrap.dedent(OWN)
        + textwrap.dedent("""
    n = 100_000
    u0 = jnp.linspace(0.5, 1.0, 50 * n).reshape(n, 50)

    @jax.jit
    def total(u0, scale):
        prob = eo.ODEProblem(lambda u, p, t: p * u, u0[0], (0.0, 1.0), scale)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        options = dict(trajectories=n, engine="julia", dt=1.0, batch_size=n)
        return eo.solve(ens, eo.Euler(), eo.EnsembleSerial(), **options).u[:, -1].sum()

    np.testing.assert_allclose(total(u0, -0.5), 0.5 * u0.sum(), rtol=1e-9)
    print("done")
    """)
    )
    assert done.stdout.strip().endswith("done"), done.stderr


def worker_pids():
    return session.start()._ask(session.JuliaRequest("status", {}, {}))["worker_pids"]


def test_a_worker_that_dies():
    """There is one error, and the next solve has other workers."""
    place = eo.EnsembleDistributed(workers=2)
    short, ens = eo.EnsembleProblem(LORENZ), eo.EnsembleProblem(eo.remake(LORENZ, tspan=(0.0, 1e8)))
    options = {"trajectories": 4, "engine": "julia"}
    eo.solve(short, None, place, **options)
    victim = worker_pids()[0]

    def kill():
        time.sleep(3)
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(JuliaError, match="ProcessExitedException"):
        eo.solve(ens, None, place, maxiters=10**9, abstol=1e-12, **options)
    for where in (eo.EnsembleSerial(), PLACES["threads"], place):
        sim = eo.solve(short, None, where, **options)
        assert (np.asarray(sim.retcode) == eo.ReturnCode.Success).all()
    assert victim not in worker_pids()
