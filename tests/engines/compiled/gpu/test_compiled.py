"""Kernels as PTX, assembled for several GPUs, and whole solves lowered and compiled for an H100 and
an H200."""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ensembleode as eo
from ensembleode import solvers
from ensembleode.engines.compiled import gpu_engine
from ensembleode.engines.compiled.xla import launch, ptxas
from ensembleode.engines.job import job_for
from ensembleode.executors import kernel as executor

from ....marks import slow_unless
from ....problems import decay, lorenz
from ...methods import SOLVERS
from ...standard_problems import ensemble, PROBLEMS
from .conftest import MEMORY
from .ptx.parsing import parse


ARCHS = ("sm_80", "sm_90", "sm_100")
METHODS = {name: cls() for name, cls in sorted(vars(solvers).items()) if hasattr(cls, "tableau")}

needs_ptxas = pytest.mark.skipif(
    not ptxas.available(), reason="no ptxas, NVIDIA's assembler: pip install nvidia-cuda-nvcc"
)


def reported(ens, alg, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is spilled
        return eo.kernel_report(ens, alg, **options)


def as_single(ens):
    def cast(x):
        return x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x

    prob = eo.remake(ens.prob, **jax.tree.map(cast, {"u0": ens.prob.u0, "p": ens.prob.p}))
    return eo.EnsembleProblem(prob)


@needs_ptxas
def test_the_report():
    report = eo.kernel_report(ensemble(PROBLEMS["lorenz"]), eo.Tsit5(), arch="compute_80")
    assert report.arch == "sm_80"
    assert report.solve.stack == 0
    assert report.solve.registers < report.pull_back.registers
    head, solve, back = str(report).splitlines()
    assert head.startswith("sm_80")
    assert solve.split()[:2] == ["solve", str(report.solve.registers)]
    assert back.split()[0] == "pull_back"
    forward = eo.kernel_report(decay(), sensealg=eo.ForwardDiffSensitivity())
    assert forward.pull_back is None


@pytest.mark.slow
@needs_ptxas
def test_what_spills_warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = eo.kernel_report(ensemble(PROBLEMS["matrix_linear"]), eo.Tsit5(), saveat=0.1)
    spilled = [name for name, usage in report.kernels.items() if usage.spill_stores > 64]
    assert "pull_back" in spilled
    messages = [str(w.message) for w in caught]
    assert len(messages) == len(spilled)
    for name, message in zip(spilled, messages, strict=True):
        bytes_of = report.kernels[name].spill_stores
        assert f"the kernel {name!r} spills {bytes_of:,} bytes a thread" in message


def test_the_report_refuses_what_has_no_kernel():
    with pytest.raises(ValueError, match=r"BacksolveAdjoint\(\) is of other engines"):
        eo.kernel_report(decay(), eo.Tsit5(), sensealg=eo.BacksolveAdjoint())
    with pytest.raises(ValueError, match=r"EnsembleGPUArray.*not compiled: it runs on diffrax"):
        eo.kernel_report(decay(), eo.KenCarp4())


@pytest.mark.slow
@needs_ptxas
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fixed", [False, True])
def test_every_architecture(arch, fixed):
    """Forwards and in reverse, saved at times: all that is read and written of arrays is global."""
    options = {"dt": 0.1, "adaptive": False} if fixed else {}
    ens = ensemble(PROBLEMS["lorenz"])
    report = reported(ens, eo.Tsit5(), saveat=0.1, arch=arch, **options)
    assert report.arch == arch
    assert report.solve.registers < 200
    assert report.solve.stack == 0
    # (All stages and their cotangents are as many numbers as there are registers. How many of them
    # are spilled differs between versions of ptxas.)
    assert report.pull_back.stack <= 64
    for code in ptx_of(ens, arch, saveat=0.1, **options):
        assert f".target {arch}" in code
        assert "ld.global.nc" in code
        assert "st.global" in code
        assert not re.search(r"\b(ld|st)\.[bfsu]\d", code)


def ptx_of(ens, arch, **options):
    every = (
        "saveat save_start save_everystep abstol reltol dt adaptive maxiters stepsize_controller "
        "sensealg"
    )
    options = dict.fromkeys(every.split()) | options
    job, _ = job_for(ens, options, jax.random.key(0), 2, "auto", eo.Tsit5())
    job = job.replan(engine=gpu_engine.ENGINE)
    lanes = jax.eval_shape(lambda: job.trajectories.lanes(np.arange(2), 1))
    return [launch.ptx_of(x, arch) for x in gpu_engine.kernels(job.plan, lanes).values()]


def every_function(dtype):
    """Each component is another function of the parameter."""
    special = jax.scipy.special
    functions = (
        *(jnp.sin, jnp.cos, jnp.tan, jnp.exp, jnp.exp2, jnp.expm1, jnp.log1p, jnp.tanh, jnp.sinh),
        *(jnp.arctan, jnp.arcsinh, jnp.log, jnp.sqrt, jnp.cbrt, special.erf, special.erfc),
        *(special.gammaln, special.digamma, lambda x: special.erfinv(x / 2e9)),
        *(lambda x: x ** (x / 1e9), lambda x: jnp.arctan2(x, 3 * x + 1), jnp.floor, jnp.round),
    )

    def f(u, p, t):
        return jnp.stack([g(p) for g in functions]).astype(u.dtype)

    p = jnp.array(1.5, dtype)
    return eo.ODEProblem(f, jnp.zeros(len(functions), dtype), (0.0, 1.0), p)


@pytest.mark.quick_cases(1)
@needs_ptxas
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_function_assembles(dtype):
    """With their tables, and what is called out of line."""

    report = reported(
        eo.EnsembleProblem(every_function(dtype)),
        eo.Euler(),
        dt=0.1,
        adaptive=False,
        sensealg=eo.ForwardDiffSensitivity(),
    )
    assert report.solve.registers >= 32


def test_usage_is_read_from_the_log():
    # Of CUDA 12.4 (the second without "cumulative"), and of what isn't inlined.
    log = """
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
ptxas         .     1184 bytes stack frame, 2576 bytes spill stores, 2760 bytes spill loads
ptxas info    : Used 64 registers, 1600 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers
ptxas info    : Function properties for _Z1fPKdi
ptxas         .     99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
"""
    assert ptxas.parse_usage(log) == {
        "first": ptxas.Usage(64, 2576, 2760, 1600),
        "second": ptxas.Usage(255, 8, 4, 16),
    }


def test_no_ptxas(monkeypatch):
    monkeypatch.setattr(ptxas, "_path", lambda: None)
    assert not ptxas.available()
    with pytest.raises(eo.PtxasError, match="pip install nvidia-cuda-nvcc"):
        eo.kernel_report(decay(), eo.Tsit5(), arch="sm_75")


@pytest.fixture
def as_if_on_gpu(monkeypatch):
    monkeypatch.setattr(executor, "computes_on_nvidia", lambda: True)
    monkeypatch.setattr(launch, "check", lambda: None)
    monkeypatch.setattr(launch, "launcher", lambda: launch.custom_call)
    jax.clear_caches()
    yield
    jax.clear_caches()


def final(p, sensealg=None, n=1000):
    prob = eo.ODEProblem(lorenz, jnp.array([1.0, 0, 0]), (0.0, 1.0), p)
    ens = eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / n))
    )
    alg = eo.EnsembleGPUKernel()
    sim = eo.solve(ens, eo.Tsit5(), alg, trajectories=n, saveat=0.1, sensealg=sensealg)
    return jnp.sum(sim.u[:, -1])


PROGRAMS = {
    "solve": final,
    "grad": jax.grad(final),
    "jacfwd": jax.jacfwd(lambda p: final(p, eo.ForwardDiffSensitivity())),
    "scan": lambda p: jax.lax.scan(lambda p, _: (p + 1e-3 * jax.grad(final)(p), None), p, None, 3),
    "vmap": lambda p: jax.vmap(final)(jnp.stack([p, 2 * p])),
}
P = jax.ShapeDtypeStruct((3,), np.float64)


def calls_in(text) -> list[str]:
    return [line for line in text.splitlines() if "custom_call @__gpu$xla.gpu.ptx" in line]


def code_in(call) -> str:
    code = re.search(r'kernel_data = "((?:\\.|[^"\\])*)"', call)[1]
    return re.sub(r"\\([0-9A-F]{2})", lambda x: chr(int(x[1], 16)), code)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_lowered(as_if_on_gpu, name):
    fn = PROGRAMS[name]
    traced = jax.jit(lambda p: fn(p)).trace(P)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = calls_in(text)
    kernels = [line.split(' name = "')[1].split('_entry"')[0] for line in calls]
    expected = {"grad": ["solve", "pull_back"], "scan": ["solve", "pull_back"]}
    expected["jacfwd"] = ["solve", "solve"]
    assert sorted(kernels) == sorted(expected.get(name, ["solve"]))
    threads = 2000 if name == "vmap" else 1000
    assert f"grid_x = {-(-threads // 128)} : i32" in calls[0]
    assert "block_x = 128 : i32" in calls[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["solve", "pull_back"])
def test_the_call_fits_the_kernel(as_if_on_gpu, name):
    """XLA passes a pointer to each operand, and after these to each result, all row-major, aligned
    to 16 bytes at least, and a kernel takes what it is passed."""
    traced = jax.jit(jax.grad(final)).trace(P)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [x for x in calls_in(text) if f'name = "{name}_entry"' in x]
    module = parse(code_in(call))
    (kernel,) = [x for x in module.functions.values() if x.is_entry]
    assert kernel.name == f"{name}_entry"
    operands, results = (
        re.findall(r"tensor<(.*?)>", x) for x in call.rpartition(" : (")[2].split("->")
    )
    count = len(operands) + len(results)
    assert [x.name for x in kernel.parameters] == [f"{name}_entry_param_{i}" for i in range(count)]
    assert {x.type for x in kernel.parameters} == {"u64"}
    assert all(16 % x.pointer_alignment == 0 for x in kernel.parameters)
    places = ", ".join(f"{i} : i32" for i in range(len(operands), count))
    assert f"output_indices = [{places}]" in call
    layouts = re.findall(r"dense<(.*?)> : tensor<(\d)xindex>", call)
    assert len(layouts) == count
    assert set(layouts) <= {("", "0"), ("0", "1"), ("[1, 0]", "2")}
    assert "output_operand_aliases" not in call


@pytest.fixture
def for_mesh(as_if_on_gpu, monkeypatch, mesh):
    monkeypatch.setattr(launch, "cuda_devices", lambda: list(mesh.devices.flat))
    return mesh


def compiled_kernels(fn, x, mesh) -> list[str]:
    """Compile the program `fn(x)` for the mesh's GPU; the code of its kernels."""
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), x)
    lowered = jax.jit(lambda x: fn(x)).trace(x).lower(lowering_platforms=("cuda",))
    text = lowered.compile().as_text()
    found = dict.fromkeys(map(code_in, calls_in(lowered.as_text())))
    # (None is lost, and none but those of a loop is there more often.)
    assert text.count('custom_call_target="__gpu$xla.gpu.ptx"') >= len(found) >= 1
    return list(found)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compile(for_mesh, name):
    assert all(".target sm_90\n" in x for x in compiled_kernels(PROGRAMS[name], P, for_mesh))


def every(alg=None, derivative=jax.grad, ens=None, **options):
    """A function of the numbers of an ensemble, and these: its solve and a derivative."""
    ens = ensemble(PROBLEMS["lorenz"]) if ens is None else ens
    numbers, rest = eqx.partition((ens.prob.u0, ens.prob.p), eqx.is_inexact_array)

    def loss(x):
        u0, p = eqx.combine(x, rest)
        chosen = eo.EnsembleProblem(eo.remake(ens.prob, u0=u0, p=p), ens.prob_func)
        given = {"trajectories": 130, **options}
        sim = eo.solve(chosen, alg or eo.Tsit5(), eo.EnsembleGPUKernel(), **given)
        events = 0.0 if sim.events is None else jnp.sum(jnp.nan_to_num(sim.events.t))
        integrals = sum(map(jnp.sum, jax.tree.leaves(sim.integral)))
        return jnp.sum(jnp.nan_to_num(sim.u)) + events + integrals

    return (lambda x: derivative(loss)(x)), numbers


def forward(loss):
    return lambda x: jax.jvp(loss, (x,), (x,))[1]


def ball():
    """One that bounces off the floor and a wall."""

    def bounced(integrator, mask):
        u, p = integrator.u, integrator.p
        down = mask[0].astype(u.dtype)
        return eo.remake(integrator, u=u.at[1].multiply(1 - (1 + p[1]) * jnp.abs(down)))

    surfaces = eo.VectorContinuousCallback(
        lambda u, t, integrator: jnp.stack([u[0], u[0] - 3.0]), bounced, 2
    )
    stop = eo.DiscreteCallback(lambda u, t, integrator: (u[0] > 2.5) & (t > 1.0), eo.terminate)
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.stack([u[1], -p[0]]),
        *(jnp.array([2.0, 0.0]), (0.0, 1.2), jnp.array([9.81, 0.8])),
        callback=eo.CallbackSet(surfaces, stop),
    )
    return eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index))


def constrained():
    """A circle, one of whose components has no derivative."""

    def f(u, p, t):
        return jnp.stack([-p[0] * u[1], u[0] ** 2 + u[1] ** 2 - p[1]])

    f = eo.ODEFunction(f, mass_matrix=[1.0, 0.0])
    prob = eo.ODEProblem(f, jnp.array([0.6, 0.8]), (0.0, 0.5), jnp.array([1.0, 1.0]))
    return eo.EnsembleProblem(prob)


def with_integrand():
    prob = ensemble(PROBLEMS["lorenz"]).prob
    integrand = lambda u, p, t: {"u": u[0] ** 2, "t": t * p}  # noqa: E731
    return eo.EnsembleProblem(eo.remake(prob, integrand=integrand))


AUTO = eo.AutoTsit5(eo.Rodas5P())
KINDS = {
    "solve": {"derivative": lambda loss: loss},
    "explicit": {"saveat": 0.1},
    "explicit, single": {"ens": as_single(ensemble(PROBLEMS["lotka_volterra"])), "saveat": 0.1},
    "stiff": {"alg": eo.Rodas5P(), "saveat": 0.1},
    "stiff, Rosenbrock23": {"alg": eo.Rosenbrock23(), "save_everystep": True, "maxiters": 300},
    "stiff, with a mass matrix": {"alg": eo.Rodas5P(), "ens": constrained()},
    "switching": {"alg": AUTO, "saveat": 0.1},
    "stiff, events": {"alg": eo.Rodas5P(), "ens": ball(), "max_events": 3},
    "switching, events": {"alg": AUTO, "ens": ball(), "max_events": 3, "saveat": 0.3},
    "events": {"ens": ball(), "max_events": 3},
    "events, forwards": {
        "ens": ball(),
        "max_events": 3,
        "derivative": forward,
        "sensealg": eo.ForwardDiffSensitivity(),
    },
    "a network": {"ens": ensemble(PROBLEMS["mlp"]), "saveat": 0.5},
    "a network, single": {"ens": as_single(ensemble(PROBLEMS["mlp"])), "saveat": 0.5},
    "a network, stiff": {"ens": ensemble(PROBLEMS["mlp"]), "alg": eo.Rodas5P()},
    "every step": {"save_everystep": True, "maxiters": 300},
    "fixed steps": {"adaptive": False, "dt": 0.05, "saveat": 0.5},
    "known times": {"tstops": [0.2, 0.7], "d_discontinuities": [0.4], "saveat": 0.2},
    "integrands": {"ens": with_integrand(), "saveat": 0.5},
    "another controller": {"stepsize_controller": eo.PIDController(0.6, -0.2)},
    "forwards": {"derivative": forward, "saveat": 0.1, "sensealg": eo.ForwardDiffSensitivity()},
    "Hessian": {"derivative": jax.hessian},
    "Hessian of a stiff one": {"derivative": jax.hessian, "alg": eo.Rosenbrock23()},
    "Hessian, events": {"derivative": jax.hessian, "ens": ball(), "max_events": 3},
    "Hessian of a network": {
        # (Along one direction, as there are many.)
        "derivative": lambda loss: lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1],
        "ens": ensemble(PROBLEMS["mlp"]),
    },
    **{f"method {x}": {"alg": METHODS[x], "dt": 0.05, "saveat": 0.1} for x in METHODS},
    **{f"method {x}": {"alg": SOLVERS[x], "saveat": 0.1} for x in SOLVERS},
    **{f"problem {x}": {"ens": ensemble(PROBLEMS[x]), "saveat": 0.5} for x in PROBLEMS},
    **{
        # (The table of the other is in double precision.)
        f"problem {x}, single": {"ens": as_single(ensemble(PROBLEMS[x])), "saveat": 0.1}
        for x in PROBLEMS
        if x != "forced"
    },
}
QUICK = ("explicit", "explicit, single", "stiff", "events", "Hessian")


@pytest.mark.quick_cases(1)
@needs_ptxas
@pytest.mark.parametrize("kind", [slow_unless(x in QUICK, x) for x in KINDS])
@pytest.mark.parametrize("mesh", MEMORY, indirect=True)
def test_every_kind_compiles(for_mesh, kind):
    """By XLA as a part of a program, and by NVIDIA's assembler; a GPU's driver is as strict."""
    for code in compiled_kernels(*every(**KINDS[kind]), for_mesh):
        assert ".target sm_90\n" in code
        (usage,) = ptxas.usage(code, "sm_90").values()
        # What a block of these can have on a multiprocessor, and what a thread can have at all.
        assert usage.registers * launch.BLOCK <= 65536
        assert usage.stack <= 512 * 1024
