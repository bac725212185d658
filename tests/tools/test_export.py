"""Functions with solves in files, called in processes that don't know the functions."""

import json
import pathlib
import subprocess
import sys
import textwrap
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled.llvm.compiler import CompileError

from ..problems import lotka_volterra


P = np.array([1.5, 1.0, 3.0, 1.0])
U0S = np.linspace([0.5, 1.5], [1.5, 0.5], 40)


def simulated(u0s, p, **options):
    prob = eo.ODEProblem(lotka_volterra, u0s[0], (0.0, 2.0), p)
    options = {"alg": eo.Tsit5(), "saveat": 0.5, **options}
    return eo.solve(eo.EnsembleProblem(prob, u0=u0s), **options)


def elsewhere(path, call, *, without="nothing"):
    """What an expression of `model` and `args` is in a new process, which lacks a module."""
    script = f"""
        import sys
        import jax.export
        sys.modules[{without!r}] = None
        import jax.numpy as jnp, numpy as np
        jax.config.update("jax_enable_x64", True)
        args = [jnp.array(np.load({str(path.parent)!r} + f"/{{i}}.npy")) for i in range(2)]
        if {without != "ensembleode"}:
            import ensembleode as eo
            model = eo.load_exported({str(path)!r})
        else:
            import zipfile
            with zipfile.ZipFile({str(path)!r}) as file:
                model = jax.export.deserialize(bytearray(file.read("program"))).call
        found = {call}
        np.savez({str(path.parent / "found.npz")!r}, *jax.tree.leaves(found))
    """
    for i, x in enumerate([U0S, P]):
        np.save(path.parent / f"{i}.npy", x)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with np.load(path.parent / "found.npz") as found:
        return list(found.values())


def total(u0s, p):
    return jnp.sum(jnp.sin(simulated(u0s, p).u))


def total_and_codes(u0s, p):
    sim = simulated(u0s, p)
    return jnp.sum(jnp.sin(sim.u)), sim.retcode


def test_saved_and_read_elsewhere(tmp_path):
    """The same bits as here, and the gradient."""
    path = tmp_path / "model.zip"
    made = eo.export(total, U0S, P, derivatives=1)
    assert made.kernels
    made.save(path)
    call = "[model(*args), jax.jit(model)(*args), jax.grad(model, 1)(*args)]"
    value, jitted, gradient = elsewhere(path, call)
    args = jnp.array(U0S), jnp.array(P)
    np.testing.assert_array_equal(value, jax.jit(total)(*args))
    np.testing.assert_array_equal(jitted, value)
    np.testing.assert_allclose(gradient, jax.grad(total, 1)(*args), rtol=1e-12)
    assert "float64[40,2], float64[4]) -> (float64[])" in repr(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"alg": eo.Rodas5P(), "saveat": None, "save_start": False},
        {"callback": eo.ContinuousCallback(lambda u, t, i: u[0] - 1.0, eo.terminate)},
        {"alg": eo.AutoTsit5(eo.Rodas5P()), "ensemblealg": eo.EnsembleSerial()},
        {"ensemblealg": eo.EnsembleGPUArray(), "adaptive": False, "dt": 0.01},
    ],
)
def test_other_solves(tmp_path, options):
    """Results of several arrays, in containers."""

    def model(u0s, p):
        sim = simulated(u0s, p, **options)
        return {"u": sim.u, "rest": (sim.retcode, [sim.stats.naccept])}

    eo.export(model, U0S, P).save(tmp_path / "a.zip")
    found = elsewhere(tmp_path / "a.zip", "model(*args)")
    expected = jax.tree.leaves(jax.jit(model)(U0S, P))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_the_derivative_of_one_of_several_results(tmp_path):
    """Beside integers, which have none."""
    path = tmp_path / "a.zip"
    eo.export(total_and_codes, U0S, P, derivatives=1).save(path)
    found = elsewhere(path, "jax.grad(model, 1, has_aux=True)(*args)")
    expected = jax.grad(total_and_codes, 1, has_aux=True)(jnp.array(U0S), jnp.array(P))
    for x, y in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


@pytest.mark.slow
def test_the_second_derivative(tmp_path):
    path = tmp_path / "a.zip"
    eo.export(total, U0S, P, derivatives=2).save(path)
    twice = "jax.grad(lambda p: jax.grad(model, 1)(args[0], p).sum())(args[1])"
    (found,) = elsewhere(path, twice)
    exact = jax.hessian(total, 1)(jnp.array(U0S), jnp.array(P)).sum(0)
    np.testing.assert_allclose(found, exact, rtol=1e-9)


@pytest.mark.slow
def test_without_this_library(tmp_path):
    """By diffrax, there is no code but JAX's."""

    def model(u0s, p):
        return simulated(u0s, p, engine="diffrax", ensemblealg=eo.EnsembleSerial()).u

    made = eo.export(model, U0S, P)
    assert not made.kernels
    made.save(tmp_path / "a.zip")
    (found,) = elsewhere(tmp_path / "a.zip", "model(*args)", without="ensembleode")
    np.testing.assert_allclose(found, model(jnp.array(U0S), P), rtol=1e-12)


def test_what_cant_be_exported(tmp_path):
    network = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"the arguments contain a equinox\S*Linear, .*Close over"):
        eo.export(lambda network, u: network(u), network, jnp.ones(2))
    with pytest.raises(TypeError, match=r"the results contain a \S*Solution, .*return arrays such"):
        eo.export(simulated, U0S, P)

    def asks(u0s):
        def f(u, p, t):
            return jax.pure_callback(np.negative, u, u, vmap_method="expand_dims")

        return eo.solve(eo.ODEProblem(f, u0s[0], (0.0, 1.0)), eo.Tsit5()).u

    with pytest.raises(ValueError, match=r"calls what exists only in this process \(a pure_callb"):
        eo.export(asks, U0S)
    if len(jax.devices()) > 1:
        with pytest.raises(ValueError, match=r"spread over \d devices .* by EnsembleSerial\(\)"):
            eo.export(lambda u0s: simulated(u0s, P, engine="diffrax").u, U0S)
    made = eo.export(lambda x: 2 * x, 1.0)
    with pytest.raises(ValueError, match="No VJP"):
        jax.grad(made)(1.0)
    with pytest.raises(OSError, match="nowhere"):
        made.save(tmp_path / "nowhere" / "a.zip")


def test_files_that_cant_be_read(tmp_path):
    path = tmp_path / "a.zip"
    with pytest.raises(FileNotFoundError):
        eo.load_exported(path)
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"a.zip wasn't written by ExportedFunction.save"):
        eo.load_exported(path)
    eo.export(lambda x: 2 * x, 1.0).save(path)
    assert eo.load_exported(path)(3.0) == 6.0
    _rewrite(path, "program", b"of another JAX")
    with pytest.raises(ValueError, match=r"with ensembleode \S+ and JAX .* export it again"):
        eo.load_exported(path)


def test_a_kernel_for_a_better_cpu(tmp_path):
    """It is refused by name, whatever this computer is."""
    path = tmp_path / "a.zip"
    made = eo.export(lambda u0s: simulated(u0s, P).u, U0S)
    made.save(path)
    (kernel,) = json.loads(zipfile.ZipFile(path).read("kernels.json"))
    lesser = {"name": "lesser", "triple": "none-none-none", "cpu": "", "features": ""}
    lesser |= {"vector_bytes": 16, "registers": 16, "has_fma": False}
    _rewrite(path, "kernels.json", json.dumps([{**kernel, "machine": lesser}]).encode())
    with pytest.raises(CompileError, match=r"code for lesser .* can't run here"):
        eo.load_exported(path)


def _rewrite(path: pathlib.Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(path) as file:
        members = {x: file.read(x) for x in file.namelist()} | {name: content}
    with zipfile.ZipFile(path, "w") as file:
        for x, y in members.items():
            file.writestr(x, y)
