"""Which problems can be registered, and how they are described to clients."""

import json
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.ground.extras import installing
from ensembleode.serve import Limits, Registry

from ..problems import decay, linear, lotka_volterra, mlp, network


PROB = eo.ODEProblem(lotka_volterra, [1.0, 2.0], (0.0, 1.0), jnp.array([1.5, 1.0, 3.0, 1.0]))


@pytest.mark.slow
def test_without_the_extra():
    """A registry needs nothing of the extra `serve`."""
    code = (
        "import sys\n"
        "for name in ('fastapi', 'uvicorn', 'msgpack', 'prometheus_client', 'orjson', 'httpx'):\n"
        "    sys.modules[name] = None\n"
        "import ensembleode as eo\n"
        "prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))\n"
        "print(eo.serve.Registry().add('x', prob).names, eo.Client.__name__)\n"
        "for name in ('run', 'create_app'):\n"
        "    try:\n"
        "        getattr(eo.serve, name)\n"
        "    except ImportError as e:\n"
        "        print(e)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0] == "['x'] Client"
    assert ran.stdout.count(installing("serve")) == 2


def test_what_clients_are_told():
    limits = Limits(u0=(0.5, [3.0, 4.0]), p=(0.0, 9.0), tspan=(0.0, 5.0), trajectories=7)
    registry = Registry().add(
        "lotka", PROB, saveat=0.5, limits=limits, description="Hares.", labels=["x", "y"]
    )
    told = registry["lotka"].describe()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["state"] == {
        "shape": [2],
        "dtype": "float64",
        "labels": ["x", "y"],
        "default": [1.0, 2.0],
        "low": [0.5, 0.5],
        "high": [3.0, 4.0],
    }
    assert told["parameters"]["default"] == [1.5, 1.0, 3.0, 1.0]
    assert told["parameters"]["high"] == [9.0] * 4
    assert told["saveat"] == [0.0, 0.5, 1.0]
    assert told["tspan"] == [0.0, 1.0]
    assert told["alg"] == "Tsit5"
    assert told["limits"]["trajectories"] == 7
    assert told["limits"]["tspan"] == [0.0, 5.0]
    told = Registry().add("x", PROB, limits=Limits(u0=(0.0, np.inf)))["x"].describe()
    assert told["state"]["high"] == [None, None]


def test_a_vector_of_parameters():
    """The inexact leaves, in order; what else is in p stays."""
    p = {"b": jnp.arange(4.0).reshape(2, 2), "a": 5.0, "n": 3, "mask": jnp.array([True]), "f": abs}
    prob = eo.ODEProblem(lambda u, p, t: -p["a"] * u, [1.0], (0.0, 1.0), p)
    entry = Registry().add("x", prob)["x"]
    np.testing.assert_array_equal(entry.p, [5.0, 0, 1, 2, 3])
    back = entry.with_parameters(np.arange(5.0))
    assert back["a"] == 0.0
    np.testing.assert_array_equal(back["b"], [[1, 2], [3, 4]])
    assert back["n"] == 3
    assert back["f"] is abs
    entry = Registry().add("x", eo.remake(prob, p={"k": 1.0, "a": 2.0}))["x"]
    assert entry.p_labels == ["a", "k"]
    np.testing.assert_array_equal(entry.p, [2.0, 1.0])


def test_weights_of_a_file(tmp_path):
    trained = jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, network())
    eqx.tree_serialise_leaves(tmp_path / "weights.eqx", trained)
    prob = eo.ODEProblem(mlp, [2.0, 0.0], (0.0, 1.0), network())
    entry = Registry().add("x", prob, params=tmp_path / "weights.eqx")["x"]
    np.testing.assert_array_equal(entry.p, entry.flat(trained))


def test_options_of_the_problem_are_kept():
    entry = Registry().add("x", decay(saveat=0.5, abstol=1e-9, maxiters=50), reltol=1e-9)["x"]
    assert entry.saveat == 0.5
    assert entry.options["abstol"] == entry.options["reltol"] == 1e-9
    assert entry.options["maxiters"] == 50


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "Upper"}, ValueError, "name must be made of small letters"),
        ({"name": ""}, ValueError, "name must be made of small letters"),
        ({"name": "there"}, ValueError, "is in the registry already"),
        ({"prob": 3}, TypeError, "prob must be an ODEProblem"),
        ({"limits": {"u0": 1}}, TypeError, "limits must be an eo.serve.Limits"),
        ({"saveat": -1.0}, ValueError, "saveat must be a positive spacing"),
        ({"saveat": [0.0, 2.0]}, ValueError, "outside of tspan"),
        ({"saveat": [0.5, 0.1]}, ValueError, "not sorted"),
        ({"saveat": [[0.5]]}, ValueError, "its shape is"),
        ({"saveat": 1e-5}, ValueError, "limits.saveat allows 1024"),
        ({"save_everystep": True}, TypeError, "save_everystep can't be given"),
        ({"maxiters": 5}, TypeError, "maxiters can't be given"),
        ({"labels": ["x"]}, ValueError, "1 names for the 2 components of u0"),
        ({"labels": {"u": ["x"]}}, ValueError, "labels has 'u'"),
        ({"limits": Limits(u0=(2.0, 3.0))}, ValueError, "u0 of prob is outside"),
        ({"limits": Limits(u0=([1.0] * 3, 3.0))}, ValueError, "u0 of limits must be a pair"),
        ({"limits": Limits(p=(3.0, 2.0))}, ValueError, "a low above its high"),
        ({"limits": Limits(tspan=(0.5, 2.0))}, ValueError, "outside of limits.tspan"),
        ({"alg": eo.Tsit5}, TypeError, r"give Tsit5\(\)"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_refusals(arguments, error, message):
    registry = Registry().add("there", PROB)
    with pytest.raises(error, match=message):
        registry.add(**{"name": "lotka", "prob": PROB} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trajectories": 0}, "trajectories must be a positive integer"),
        ({"saveat": 1}, "saveat of Limits must be 2"),
        ({"u0": 3.0}, "u0 of Limits must be a pair"),
        ({"tspan": (1.0, 0.0)}, "the earliest first"),
    ],
)
def test_refused_limits(arguments, message):
    with pytest.raises(ValueError, match=message):
        Limits(**arguments)


def test_complex_states_are_refused():
    prob = eo.ODEProblem(linear, jnp.array([1j]), (0.0, 1.0), jnp.array(1.0 + 0j))
    with pytest.raises(TypeError, match="complex state"):
        Registry().add("x", prob)
