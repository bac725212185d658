"""Several devices: the same bits as on one, no collective in the time loop, and errors."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.executors import sharded

from .marks import slow_unless


# (Of the engines that run on CPUs without Julia, only diffrax has a device for each core.)
STATE, N = 30, 37


def field(u, p, t):
    return p["rate"] * jnp.sin(u) - 0.1 * jnp.roll(u, 1) * jnp.sum(p["shared"] * p["shared"])


def ensemble(rates, shared, u0):
    prob = eo.ODEProblem(field, u0, (0.0, 1.0), {"rate": rates[0], "shared": shared})

    def prob_func(prob, ctx):
        return eo.remake(prob, p={"rate": rates[ctx.index], "shared": shared})

    return eo.EnsembleProblem(prob, prob_func)


RATES, SHARED = jnp.linspace(-2.0, 1.0, N), jnp.array([0.5, 1.0])
U0 = jnp.linspace(0.1, 2.0, STATE)


def solve(alg, rates=RATES, shared=SHARED, u0=U0, **options):
    options = {"engine": "diffrax", "trajectories": N, **options}
    return eo.solve(ensemble(rates, shared, u0), alg, **options)


ON_SEVERAL = [eo.EnsembleThreads(), eo.EnsembleThreads(2), eo.EnsembleGPUArray(devices=2)]


@pytest.mark.slow
def test_same_bits_on_several():
    """In a process with XLA's flags as users have them: with those of tests/conftest.py, programs
    are compiled in another way, in which the last lanes of a loop may have other bits."""
    test = f"{__file__}::test_same_bits_as_on_one"
    how = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "slow", "-k", "not saveat and not dt"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *how, test],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(ON_SEVERAL)} passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("alg", ON_SEVERAL, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"saveat": 0.25}, {"dt": 0.01, "adaptive": False}], ids=str
)
def test_same_bits_as_on_one(alg, options):
    one = solve(eo.EnsembleGPUArray(), **options)
    serial = solve(eo.EnsembleSerial(), **options)
    several = solve(alg, **options)
    # (The numbers are arguments: with those that it knows the compiler computes what it can itself,
    # and rounds otherwise.)
    traced = jax.jit(lambda *numbers: solve(alg, *numbers, **options))(RATES, SHARED, U0)
    for other in (serial, several, traced):
        np.testing.assert_array_equal(other.u, one.u)
        np.testing.assert_array_equal(other.t, one.t)
        np.testing.assert_array_equal(other.stats.naccept, one.stats.naccept)
        np.testing.assert_array_equal(other.retcode, one.retcode)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8, 20, 100])
def test_batches_are_dealt_out_too(batch_size):
    whole = solve(eo.EnsembleGPUArray())
    split = solve(eo.EnsembleThreads(), batch_size=batch_size)
    np.testing.assert_array_equal(split.u, whole.u)


@pytest.mark.parametrize(
    "options",
    [
        slow_unless(False, {"engine": "diffrax", "saveat": 0.25}, id="diffrax"),
        slow_unless(
            False, {"engine": "diffrax", "sensealg": eo.BacksolveAdjoint()}, id="backsolve"
        ),
        slow_unless(False, {"solver": eo.Kvaerno5(), "saveat": 0.5}, id="implicit"),
    ],
)
@pytest.mark.parametrize(
    "transform",
    [slow_unless(True, jax.jit, id="jit"), slow_unless(False, lambda f: f, id="eager")],
)
def test_gradients(options, transform):
    """With respect to shared parameters, which all devices add to, and to those of each."""
    options = dict(options)
    solver = options.pop("solver", eo.Tsit5())
    small = 3

    def loss(rates, shared, alg):
        prob = eo.ODEProblem(
            lambda u, p, t: p[0] * u - jnp.sum(shared) * u**2,
            jnp.ones(small),
            (0.0, 1.0),
            rates[:1],
        )
        ens = eo.EnsembleProblem(prob, lambda prob, i, _: eo.remake(prob, p=rates[i][None]))
        return jnp.sum(eo.solve(ens, solver, alg, trajectories=len(rates), **options).u ** 2)

    rates = jnp.linspace(-1.0, 0.5, 5)
    grad = jax.grad(loss, argnums=(0, 1))
    one = grad(rates, SHARED, eo.EnsembleGPUArray())
    several = transform(lambda r, s: grad(r, s, eo.EnsembleThreads()))(rates, SHARED)
    for a, b in zip(one, several, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
        assert np.linalg.norm(a) > 0.1


@pytest.mark.slow
def test_forward_mode():
    def end(shared, alg):
        sim = solve(alg, shared=shared, sensealg=eo.ForwardDiffSensitivity(), maxiters=64)
        return sim.u[:, -1, 0]

    one, several = (
        jax.jacfwd(end)(SHARED, alg) for alg in (eo.EnsembleGPUArray(), eo.EnsembleThreads())
    )
    np.testing.assert_allclose(several, one, rtol=1e-10)


@pytest.mark.slow
def test_no_collective_in_the_time_loop():
    """The devices never wait for each other while they step."""

    def loss(rates, shared):
        return jnp.sum(solve(eo.EnsembleThreads(), rates, shared).u ** 2)

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(RATES, SHARED).compile().as_text()
    computations = re.split(r"\n(?=%|ENTRY)", program)
    bodies = set(re.findall(r"(?:body|condition)=%?([\w.\-]+)", program))
    assert len(bodies) > 4
    collective = re.compile(r"all-reduce|all-gather|collective-permute|all-to-all")
    for text in computations:
        name = re.match(r"%?([\w.\-]+)", text.removeprefix("ENTRY "))[1]
        if name in bodies:
            assert not collective.search(text), name


def test_results_come_back_to_the_device_of_the_arguments():
    devices = jax.devices()
    assert solve(eo.EnsembleThreads()).u.devices() == {devices[0]}
    rates = jax.device_put(RATES, devices[1])
    sim = solve(eo.EnsembleThreads(), rates)
    assert sim.u.devices() == {devices[1]}
    np.testing.assert_array_equal(sim.u, solve(eo.EnsembleGPUArray()).u)
    (rates + sim.u[:, 0, 0]).block_until_ready()


def test_a_list_of_devices():
    devices = jax.devices()
    alg = eo.EnsembleGPUArray(devices=[devices[1]])
    np.testing.assert_array_equal(solve(alg).u, solve(eo.EnsembleGPUArray()).u)


def test_inside_shard_map_each_shard_is_where_it_is():
    """An ensemble in a map over devices is solved by the device that it is on."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def part(rates):
        return solve(eo.EnsembleThreads(), rates, trajectories=len(rates)).u[:, -1]

    mapped = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    u = jax.jit(mapped)(RATES[:-1])
    np.testing.assert_allclose(u, solve(eo.EnsembleGPUArray()).u[:-1, -1], rtol=1e-12)


def test_errors():
    with pytest.raises(ValueError, match=r"eo.use_cpu_devices\(99\)"):
        solve(eo.EnsembleThreads(99))
    with pytest.raises(ValueError, match="wants 99 devices"):
        solve(eo.EnsembleGPUArray(devices=99))
    with pytest.raises(ValueError, match="n must be a positive integer"):
        eo.EnsembleThreads(0)
    with pytest.raises(ValueError, match="empty"):
        eo.EnsembleGPUArray(devices=[])


def run(code, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "ENSEMBLEODE"))}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        env={**env, "JAX_PLATFORMS": "cpu", **variables},
        check=False,
    )
    return done.stdout.strip(), done.stderr


def decays(rate, alg=None, **how):
    """More than a chunk, so that there is work for two devices."""
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.0]), (0.0, 1.0), rate)
    ens = eo.EnsembleProblem(
        prob,
        lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id),
        how.pop("output_func", None),
    )
    return eo.solve(ens, None, alg or eo.EnsembleThreads(), trajectories=300, **how).u


@pytest.mark.slow
def test_what_comes_back_goes_anywhere():
    """Data from one solve, a fit of it inside jit and outside, and the parameters found."""
    data = decays(jnp.array(0.5))

    def loss(rate, data):
        return jnp.mean((decays(rate) - data) ** 2)

    rate = jnp.array(0.4)
    inside = jax.jit(jax.grad(loss))(rate, data)
    outside = jax.grad(loss)(rate, data)
    np.testing.assert_allclose(inside, outside, rtol=1e-12)
    for gradient in (inside, outside):
        moved = rate - 1e-6 * gradient
        assert loss(moved, data) < loss(rate, data)
        jax.jit(jax.grad(loss))(moved, data)
        alone = decays(moved, eo.EnsembleSerial()) - data
        assert np.all(np.isfinite(alone))
    committed = jax.device_put(rate, jax.devices()[0])
    np.testing.assert_allclose(jax.grad(loss)(committed, data), outside, rtol=1e-12)
    assert decays(committed).devices() == {jax.devices()[0]}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("alg", [eo.EnsembleThreads(), eo.EnsembleSerial()], ids=str)
@pytest.mark.parametrize("batch_size", [None, 100])
def test_output_func_closes_over_what_is_differentiated(alg, batch_size):
    def loss(factor):
        def output(sol, ctx):
            return sol.u[-1, 0] * factor, False

        return decays(jnp.array(0.5), alg, output_func=output, batch_size=batch_size).sum()

    expected = np.exp(-0.5) * 300 * 301 / 2
    np.testing.assert_allclose(jax.grad(loss)(2.0), expected, rtol=1e-3)


COUNT = "import ensembleode as eo, jax; print(len(jax.devices()))"
ASKED = COUNT.replace("; ", "; eo.use_cpu_devices(); ", 1)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import jax; "])
def test_importing_changes_nothing_of_jax(before):
    code = """
import jax, sys
found = jax.config.values
import ensembleode as eo
eo.solve
assert jax.config.values == found, "configuration"
print(*(type(x).__name__ for x in sys.meta_path if "ensembleode" in type(x).__module__))
"""
    assert run(before + code)[0] == "FormerModules"  # for names in pickles
    assert run(before + COUNT)[0] == "1"
    assert run(before + ASKED)[0] == str(CORES)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
@pytest.mark.slow
def test_cpu_affinity_is_respected():
    assert run("import os; os.sched_setaffinity(0, {0}); " + ASKED)[0] == "1"


@pytest.mark.slow
def test_the_number_can_be_chosen():
    assert run(ASKED, ENSEMBLEODE_NUM_THREADS="3")[0] == "3"
    assert run(ASKED, ENSEMBLEODE_NUM_THREADS="0")[0] == str(CORES)
    assert run(ASKED.replace("devices()", "devices(4)", 1))[0] == "4"
    assert run(COUNT, JAX_NUM_CPU_DEVICES="4")[0] == "4"
    assert run(COUNT, XLA_FLAGS="--xla_force_host_platform_device_count=5")[0] == "5"
    _, error = run(ASKED, ENSEMBLEODE_NUM_THREADS="many")
    assert "ENSEMBLEODE_NUM_THREADS must be a whole number" in error
    _, error = run(ASKED.replace("devices()", "devices(0)", 1))
    assert "n must be a whole number, 1 or more, got 0" in error
    late = "import jax, ensembleode as eo; jax.devices(); eo.use_cpu_devices(3)"
    _, error = run(late)
    assert "use_cpu_devices(3) comes too late" in error


@pytest.mark.slow
def test_one_device_is_told_once():
    code = """
import jax.numpy as jnp
import ensembleode as eo
prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(2), (0.0, 1.0))
for _ in range(2):
    print(eo.solve(eo.EnsembleProblem(prob), trajectories=3, engine="diffrax").retcode)
eo.solve(eo.EnsembleProblem(prob), eo.EnsembleThreads(1), trajectories=3, engine="diffrax")
print(eo.solve(eo.EnsembleProblem(prob), trajectories=4).engine)
"""
    out, error = run(code, ENSEMBLEODE_NUM_THREADS="2")
    assert out.count("[1 1 1]") == 2
    # (Which needs none of them.)
    assert "compiled" in out
    assert error.count("the diffrax engine runs on one core") == 1
    assert "eo.use_cpu_devices()" in error


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["older jaxlib", "newer jaxlib"])
def test_where_devices_may_wait_for_each_other_there_is_one(waits, monkeypatch):
    """All of them factorise matrices with an implicit method, or an `f` that does, however deep."""
    used = []
    mesh = sharded.Mesh

    def seen(devices, *args, **kwargs):
        used.append(len(devices))
        return mesh(devices, *args, **kwargs)

    monkeypatch.setattr(sharded, "_WAITS_IN_LAPACK", waits)
    monkeypatch.setattr(sharded, "Mesh", seen)

    def plain(u, p, t):
        return -u

    @jax.jit
    def inner(u):
        return jnp.linalg.solve(jnp.eye(2, dtype=u.dtype), u)

    def factorises(u, p, t):
        return jax.lax.cond(t >= 0, lambda: -inner(u), lambda: -u)

    for f, alg, alone in (
        (plain, eo.Euler(), False),
        (factorises, eo.Euler(), True),
        (plain, eo.ImplicitEuler(), True),
    ):
        used.clear()
        ens = eo.EnsembleProblem(
            eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0)),
            lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index)),
        )
        how = {"engine": "diffrax", "dt": 0.5, "adaptive": False}
        sim = eo.solve(ens, alg, eo.EnsembleThreads(2), trajectories=300, **how)
        assert set(used) == (set() if waits and alone else {2})
        end = 1 / 2.25 if alg == eo.ImplicitEuler() else 0.25
        np.testing.assert_allclose(sim.u[:, -1, 0], end * np.arange(1, 301), rtol=1e-6)
