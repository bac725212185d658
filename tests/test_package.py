"""What importing the package loads, and that all of its names exist."""

import importlib
import pickle
import pkgutil
import subprocess
import sys
import types

import pytest

import ensembleode as eo


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


SOLVED = """
prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
assert "compiled" in str(eo.solve(eo.EnsembleProblem(prob), trajectories=3).engine)
"""


@pytest.mark.slow
def test_little_is_imported_with_it():
    """None of what it depends on; and by a solve, only what that needs."""
    program = f"import sys, ensembleode as eo\nprint(*sys.modules)\n{SOLVED}\nprint(*sys.modules)"
    packages = [{name.partition(".")[0] for name in x.split()} for x in run(program).splitlines()]
    first, after_a_solve = packages
    assert not first & {"equinox", "jax", "jaxtyping", "llvmlite", "numpy", "tqdm"}
    other = """
        dask diffrax distributed fastapi httpx jsonargparse juliacall lineax matplotlib msgpack
        optax optimistix orbax pandas tqdm xarray yaml zarr
    """
    assert "llvmlite" in after_a_solve
    assert not (first | after_a_solve) & set(other.split())


@pytest.mark.slow
def test_a_checkout_that_is_not_installed():
    """Nor most of what it depends on: it is imported, and solves."""
    run(f"""
import importlib.metadata, sys
installed = importlib.metadata.version

def version(name):
    if name == "ensembleode":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

importlib.metadata.version = version
for name in "distributed fastapi httpx jsonargparse juliacall matplotlib orbax xarray zarr".split():
    sys.modules[name] = None
import ensembleode as eo
{SOLVED}
assert eo.__version__.count(".") == 2
""")


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports", ["import jax, ensembleode as eo", "import ensembleode as eo, jax; eo.Tsit5"]
)
def test_what_was_compiled_is_kept(imports):
    """By JAX, though the first solve imports most of the package."""
    run(f"""
{imports}
traced = []
compiled = jax.jit(lambda x: traced.append(x) or 2 * x)
compiled(1.0)
{SOLVED}
compiled(1.0)
assert len(traced) == 1
""")


def test_every_name_is_there():
    assert set(eo.__all__) == {name for name in dir(eo) if not name.startswith("_")}
    assert all(name.startswith("__") for name in set(dir(eo)) - set(eo.__all__))
    for name in eo.__all__:
        found = getattr(eo, name)
        assert vars(eo)[name] is found
        if not isinstance(found, types.ModuleType):
            assert pickle.loads(pickle.dumps(found)) is found
    namespace = {}
    exec("from ensembleode import *", namespace)
    assert set(eo.__all__) < set(namespace)
    assert eo.__version__


def test_no_module_hides_a_name():
    """As importing a module of a package sets its name there."""
    for module in pkgutil.iter_modules(eo.__path__):
        assert getattr(eo, module.name) is importlib.import_module(f"ensembleode.{module.name}")


@pytest.mark.parametrize("name", ["nothing", "__wrapped__", "DP5"])
def test_a_name_that_is_not_there(name):
    assert not hasattr(eo, name)
    assert name not in dir(eo)
