"""The Julia engine without Julia: its requests, and its errors."""

import signal
import subprocess
import sys
import threading
import tomllib
import weakref
from types import SimpleNamespace

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines import julia
from ensembleode.engines.julia import environment, methods, session
from ensembleode.engines.julia.environment import JuliaError
from ensembleode.engines.julia.fields import translate
from ensembleode.engines.julia.requests import JuliaRequest, toml
from ensembleode.ground.host import host_call
from ensembleode.tracing.program import Static, trace


PROB = eo.ODEProblem(lambda u, p, t: -p * u, jnp.ones(2), (0.0, 1.0), 1.0)


class Asked(Exception):
    """Ends a solve where Julia would begin."""


class NoJulia(session.Session):
    """Takes a request, and keeps it."""

    def __init__(self):
        self.threads, self.request = 2, None

    def run(self, request):
        self.request = tomllib.loads(request.text({k: {"address": 1} for k in request.arrays}))
        raise Asked

    def ready(self):
        pass

    def _start(self):
        raise AssertionError

    _answer = _start


@pytest.fixture
def asked(monkeypatch):
    """A fake Julia that keeps the request of a solve."""
    fake = NoJulia()
    monkeypatch.setattr(session, "_running", fake)

    def solve(ens, alg=None, place=None, **options):
        trajectories = {} if isinstance(ens, eo.ODEProblem) else {"trajectories": 3}
        with pytest.raises(Asked):
            eo.solve(ens, alg, place, engine="julia", **trajectories, **options)
        return fake.request

    return solve


def test_a_request(asked):
    ens = eo.EnsembleProblem(PROB, lambda prob, ctx: eo.remake(prob, p=1.0 * ctx.sim_id))
    place = eo.EnsembleSplitThreads(workers=2, threads=1)
    request = asked(ens, eo.Vern7(), place, saveat=[0.5, 1.0])
    assert request["operation"] == "solve"
    assert request["method"]["name"] == "Vern7"
    assert request["place"] == {"name": "EnsembleSplitThreads", "workers": 2, "threads": 1}
    assert (request["mode"], request["start"], request["trajectories"]) == ("times", False, 3)
    assert request["field"]["f"]["source"].startswith("function f_")
    assert "jac" not in request["field"]
    # Julia's order of the axes is reversed.
    dims = {name: x["dims"] for name, x in request["arrays"].items()}
    assert dims["u0"] == [2]
    assert dims["own"] == [1, 3]
    assert dims["u"] == [2, 2, 3]


def test_callbacks(asked):
    """Callbacks are sent as functions like the field, with their numbers as parameters; events are
    written to arrays."""

    def kicked(integrator):
        return eo.remake(integrator, u=integrator.u + 0.3, p=2.0 * integrator.p)

    at = eo.ContinuousCallback(lambda u, t, _: u[0] - 0.7, kicked, None, interp_points=4)
    known = eo.PresetTimeCallback([0.75, 0.25], kicked)
    request = asked(PROB, callback=eo.CallbackSet(known, at), max_events=5)
    callbacks, dims = request["callbacks"], {k: x["dims"] for k, x in request["arrays"].items()}
    assert (callbacks["room"], callbacks["longest"]) == (5, 1)
    (continuous,), (discrete,) = callbacks["continuous"], callbacks["discrete"]
    assert (continuous["which"], discrete["which"]) == (1, 0)
    assert continuous["rootfind"] == "LeftRootFind"
    assert continuous["interp_points"] == 4
    assert "down" not in continuous
    # The numbers of p that an affect changes come after the state, without step-size control.
    assert dims["u0"] == [3]
    assert request["controlled"] == 2
    assert dims["event_before"] == [3, 5, 1]
    for part in (continuous["condition"], continuous["up"], discrete["affect"]):
        assert part["source"].startswith(f"function {part['name']}(u, p, t, uprev, tprev, mask)\n")
        assert "0.7" not in part["source"]
        assert "0.3" not in part["source"]
    # The times of the schedule are stepped onto like known times.
    assert dims["tstops"] == [2]
    assert "reinterpret(Float64" in continuous["condition"]["source"]


def test_whole_numbers_of_64_bits_have_all_of_their_values(asked, monkeypatch):
    """A floating-point number would not have all of them."""
    kept = {}
    monkeypatch.setattr(
        JuliaRequest, "text", lambda self, places, **_: kept.update(self.arrays) or ""
    )
    prob = eo.remake(PROB, p={"k": 1.5, "n": jnp.array([2**53 + 1, -3])})
    prob = eo.remake(prob, f=lambda u, p, t: u * p["k"] * p["n"].astype(float))
    asked(prob)
    np.testing.assert_array_equal(kept["shared"][1:].view(np.int64), [2**53 + 1, -3])


def test_implicit_methods_have_their_jacobian(asked):
    request = asked(eo.EnsembleProblem(PROB), eo.KenCarp4(), eo.EnsembleSerial())
    assert request["method"]["package"] == "OrdinaryDiffEqSDIRK"
    assert {"f", "jac", "tgrad"} <= request["field"].keys()
    assert "SMatrix{2, 2, Float64}" in request["field"]["jac"]["source"]


def test_names_in_julia(asked):
    for alg, name in ((eo.Bosh3(), "BS3"), (eo.Dopri5(), "DP5"), (eo.BS5(), "BS5")):
        assert asked(eo.EnsembleProblem(PROB), alg, eo.EnsembleSerial())["method"]["name"] == name


def test_places():
    def four():
        return 4

    def not_asked():
        raise AssertionError("Julia is started")

    assert methods.place(eo.EnsembleThreads(), four) == ("EnsembleThreads", ())
    assert methods.place(eo.EnsembleThreads(1), not_asked) == methods.SERIAL
    assert methods.place(eo.EnsembleThreads(), lambda: 1) == methods.SERIAL
    kernel = methods.place(eo.EnsembleGPUKernel(backend="AMDGPU"), not_asked)
    assert kernel == ("EnsembleGPUKernel", (("backend", "AMDGPU"),))
    with pytest.raises(ValueError, match=r"EnsembleThreads\(n=3\) wants 3 threads, and Julia runs"):
        methods.place(eo.EnsembleThreads(3), four)
    with pytest.raises(ValueError, match="are devices of JAX"):
        methods.place(eo.EnsembleGPUArray(devices=2), not_asked)
    for kind in (eo.EnsembleGPUArray, eo.EnsembleGPUKernel):
        with pytest.raises(ValueError, match="backend must be one of CPU, AMDGPU, CUDA, Metal"):
            methods.place(kind(backend="cuda"), not_asked)


def test_what_the_engine_refuses():
    def refused(message, alg=None, **options):
        with pytest.raises(ValueError, match=message):
            eo.solve(PROB, alg, engine="julia", **options)

    refused("runs ensembleode's own solvers", diffrax.Tsit5())
    refused("it runs on compiled, diffrax", eo.Dopri8())
    refused("ReplayAdjoint\\(\\) is of other engines", sensealg=eo.ReplayAdjoint())
    refused("is one of diffrax", stepsize_controller=diffrax.PIDController(1e-3, 1e-6))
    refused("Euler has a fixed step", eo.Euler())
    refused("Euler has no error estimate", eo.Euler(), adaptive=True, dt=0.1)
    refused("Euler has a fixed step", eo.JuliaAlg("Euler()"))
    refused("ABM54 has no error estimate", eo.JuliaAlg("ABM54()"), adaptive=True, dt=0.1)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "sensealg", [None, eo.ForwardDiffSensitivity(), eo.BacksolveAdjoint()], ids=str
)
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_name_a_remedy(outer, inner, sensealg, monkeypatch):
    monkeypatch.setattr(session, "_running", NoJulia())

    def loss(p):
        return jnp.sum(eo.solve(eo.remake(PROB, p=p), engine="julia", sensealg=sensealg).u)

    is_forward = isinstance(sensealg, eo.ForwardDiffSensitivity)
    remedy = "engine='compiled'" if is_forward else r"Pass .*sensealg=ForwardDiffSensitivity\(\)"
    with pytest.raises(TypeError, match=remedy):
        outer(inner(loss))(jnp.array(1.0))


def test_versions():
    """A store is compared by these versions. They don't include packages of other methods, which
    may be installed later."""

    def named(text):
        return Static(SimpleNamespace(description=eo.JuliaAlg(text).description))

    there = {
        "SciMLBase": "3.49.2",
        "OrdinaryDiffEqCore": "5.0.0",
        "OrdinaryDiffEqTsit5": "2.1.3",
        "OrdinaryDiffEqRosenbrock": "2.6.6",
        "OrdinaryDiffEqVerner": "2.3.0",
        "OrdinaryDiffEqBDF": "2.0.1",
        "PythonCall": "0.9.34",
    }
    found = environment.Versions("1.10.8", there, {"DiffEqGPU": "3.17.0"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "find", lambda: None)
        patch.setattr(environment, "inspected", lambda _: found)
        versions = julia.ENGINE.versions(named("AutoTsit5(Rosenbrock23())"))
    assert versions == {
        "Julia": "1.10.8",
        "SciMLBase": "3.49.2",
        "OrdinaryDiffEqCore": "5.0.0",
        "OrdinaryDiffEqTsit5": "2.1.3",
        "OrdinaryDiffEqRosenbrock": "2.6.6",
        "DiffEqGPU": "3.17.0",
    }


@pytest.mark.parametrize(
    "alg", [eo.Rosenbrock23(), eo.JuliaAlg("AutoTsit5(Rosenbrock23())")], ids=str
)
def test_saved_times_that_julia_has_wrong_are_refused(asked, alg):
    at = eo.ContinuousCallback(lambda u, t, _: u[0] - 0.5, eo.terminate)
    ens = eo.EnsembleProblem(eo.remake(PROB, callback=at))
    place = eo.EnsembleSerial()
    with pytest.raises(ValueError, match="Rosenbrock23 has no right states within a step"):
        eo.solve(ens, alg, place, trajectories=2, engine="julia", saveat=0.5)
    assert asked(ens, alg, place)["callbacks"]["room"] == 1
    known = eo.EnsembleProblem(PROB)
    assert asked(known, alg, place, saveat=0.5)["mode"] == "times"


def test_what_gpu_kernels_refuse(monkeypatch):
    monkeypatch.setattr(session, "_running", NoJulia())
    own = jnp.array([1e-3, 1e-6, 1e-9])
    ens = eo.EnsembleProblem(PROB, lambda prob, ctx: eo.remake(prob, reltol=own[ctx.index]))
    for message, case, options in (
        ("shares reltol among all", ens, {}),
        ("can't save every step", eo.EnsembleProblem(PROB), {"save_everystep": True}),
        ("can't keep", eo.EnsembleProblem(PROB), {"sensealg": eo.InterpolatingAdjoint()}),
        ("has no callbacks", eo.EnsembleProblem(PROB), {"callback": eo.TerminateSteadyState()}),
        ("has no tstops", eo.EnsembleProblem(PROB), {"tstops": [0.5]}),
    ):
        with pytest.raises(ValueError, match=message):
            eo.solve(case, None, eo.EnsembleGPUKernel(), trajectories=3, engine="julia", **options)


def test_what_can_not_be_translated():
    """The error names the primitive and its line, and is raised before Julia is looked for."""

    def f(u, p, t):
        return jnp.linalg.eigvalsh(jnp.diag(u))

    line = f.__code__.co_firstlineno + 1
    prob = eo.ODEProblem(f, jnp.ones(3), (0.0, 1.0))
    with pytest.raises(
        ValueError, match=rf"it uses the primitive eigh, at .*{__name__[-11:]}.py:{line}"
    ):
        eo.solve(prob, engine="julia")


def test_constants_of_derivative_rules():
    """A derivative rule may close over an array."""
    weights = np.array([0.5, 2.0])

    @jax.custom_jvp
    def g(u):
        return u * u

    g.defjvp(lambda primals, tangents: (g(*primals), jnp.asarray(weights) * tangents[0]))
    u, t = jax.ShapeDtypeStruct((2,), np.float64), jax.ShapeDtypeStruct((), np.float64)
    program, consts = trace(lambda u, p, t: g(u), u, (), t, rules=True)
    assert not consts
    jacobian = translate(program, (), implicit=True).jac
    assert jacobian is not None
    assert "0.5" in jacobian.source
    assert "2.0" in jacobian.source


def test_without_julia(monkeypatch):
    monkeypatch.setattr(session, "_running", None)
    monkeypatch.setenv("PYTHON_JULIACALL_EXE", "/nowhere/julia")
    monkeypatch.setenv("PYTHON_JULIACALL_PROJECT", "/nowhere")
    with pytest.raises(JuliaError, match="which is no executable"):
        eo.solve(PROB, engine="julia")


@pytest.mark.slow
def test_juliacall_is_left_alone():
    code = (
        "import sys, ensembleode as eo, ensembleode.julia\n"
        "eo.solve(eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0)))\n"
        "sys.exit('juliacall' in sys.modules or 'juliapkg' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_starting_twice(monkeypatch):
    monkeypatch.setattr(session, "_running", NoJulia())
    assert session.start().threads == 2
    with pytest.raises(ValueError, match="Julia runs already, with 2 threads"):
        session.start(threads=3)
    with pytest.raises(ValueError, match="Julia runs already"):
        session.start(process=True)


@pytest.mark.parametrize("error", ["at index [3]", "BoundsError: at index [3]"])
def test_what_julia_says_is_raised(error):
    """The error's type is in the message once."""

    class Failing(session.Session):
        def _start(self):
            pass

        def _answer(self, request):
            return toml({"kind": "BoundsError", "error": error})

    with pytest.raises(JuliaError) as caught:
        Failing(1).run(JuliaRequest("status", {}, {}))
    assert str(caught.value) == "Julia failed: BoundsError: at index [3]"


class Ended(BaseException):
    """An exception that no code expects."""


@pytest.fixture(params=[KeyboardInterrupt, SystemExit, TimeoutError, Ended])
def interrupting(request):
    """A function that interrupts the main thread with the exception in its attribute."""
    main = threading.get_ident()

    def handler(_, frame):
        if frame is not None and frame.f_code.co_filename == weakref.__file__:
            # Python ignores what is raised where an object goes: a moment later, then.
            threading.Timer(0.01, interrupt).start()
            return
        raise request.param

    def interrupt():
        signal.pthread_kill(main, signal.SIGUSR1)

    interrupt.error = request.param
    before = signal.signal(signal.SIGUSR1, handler)
    yield interrupt
    signal.signal(signal.SIGUSR1, before)


class Solving(session.Session):
    """Solves until it is told to stop, as Julia does; a request of "status" is answered at once."""

    def __init__(self, begun):
        self.begun, self.stopped, self.asked = begun, [], []
        super().__init__(1)

    def _start(self):
        pass

    def _answer(self, request):
        self.asked.append(request)
        if request.options["operation"] == "solve":
            self.begun()
            stopped = threading.Event()
            # The limit only ends a test that fails.
            for _ in range(3000):
                if request.arrays["stop"][0]:
                    stopped.set()
                    break
                stopped.wait(0.01)
            self.stopped.append(stopped.is_set())
        return ""


@pytest.mark.quick_cases(2)
def test_whatever_ends_a_solve_stops_julia(interrupting):
    """A time limit and a handler that exits stop Julia like Ctrl-C; the next solve doesn't wait."""
    solving = Solving(interrupting)
    with pytest.raises(interrupting.error):
        solving.run(JuliaRequest("solve", {}, {}))
    # The arrays are free as soon as the exception arrives.
    assert solving.stopped == [True]
    assert solving.run(JuliaRequest("status", {}, {})) == {}


def test_a_solve_that_has_not_begun_is_never_begun(interrupting):
    """The second solve is interrupted while it waits for the first one, of another thread, which
    goes on undisturbed."""
    begun = threading.Event()
    solving = Solving(begun.set)
    first, second = JuliaRequest("solve", {}, {}), JuliaRequest("solve", {}, {})
    other = threading.Thread(target=solving.run, args=(first,))
    other.start()
    begun.wait()
    waiting = threading.Thread(target=_when_queued, args=(solving, interrupting))
    waiting.start()
    with pytest.raises(interrupting.error):
        solving.run(second)
    first.arrays["stop"][0] = 1
    other.join()
    waiting.join()
    assert solving.run(JuliaRequest("status", {}, {})) == {}
    assert [x.options["operation"] for x in solving.asked] == ["solve", "status"]
    assert solving.asked[0] is first


def _when_queued(solving, interrupt):
    while solving._thread._asked.empty():
        pass
    interrupt()


@pytest.mark.quick_cases(2)
def test_an_interrupted_start_goes_on(interrupting, monkeypatch):
    """The start must go on, because a second Julia can't be started in this process."""
    released = threading.Event()

    class Starting(Solving):
        def __init__(self, threads):
            super().__init__(None)

        def _start(self):
            interrupting()
            released.wait()

    monkeypatch.setattr(session, "_running", None)
    monkeypatch.setattr(session, "InProcessSession", Starting)
    with pytest.raises(interrupting.error):
        session.start(process=False)
    started = session._running
    assert isinstance(started, Starting)
    released.set()
    assert session.start() is started


def test_a_start_that_fails_is_forgotten(monkeypatch):
    class Failing(Solving):
        def __init__(self, threads):
            super().__init__(None)

        def _start(self):
            raise JuliaError("it is not there.")

    monkeypatch.setattr(session, "_running", None)
    monkeypatch.setattr(session, "InProcessSession", Failing)
    for _ in range(2):
        with pytest.raises(JuliaError, match="it is not there"):
            session.start(process=False)
        assert session._running is None


def doubled(x):
    return (2 * x,)


def test_host_calls():
    """Host calls get plain arrays, under every transformation except differentiation."""
    x = jnp.arange(6.0).reshape(2, 3)

    def call(x):
        return host_call(doubled, [jax.ShapeDtypeStruct(x.shape, x.dtype)], x)[0]

    np.testing.assert_array_equal(call(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(call)(x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(call)(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(jax.vmap(call, in_axes=1, out_axes=1))(x), 2 * x)
    _, ys = jax.lax.scan(lambda c, x: (c, call(x)), 0.0, x)
    np.testing.assert_array_equal(ys, 2 * x)
