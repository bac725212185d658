"""Two things have one digest if they are the same, in any process; and another if they differ."""

import dataclasses
import functools
import math
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import equinox as eqx
import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as some
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ensembleode.tracing.by_value import digest_by_value, NotByValue


def of(text, **names):
    """What a module of this text calls `host`."""
    module = types.ModuleType("of_a_test")
    vars(module).update(names)
    exec(text, vars(module))
    return vars(module)["host"]


class Model:
    def __init__(self, value):
        self.value = value

    def __call__(self, u):
        return self.value

    def method(self, u):
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Module(eqx.Module):
    value: object
    weight: jax.Array = dataclasses.field(default_factory=lambda: jnp.ones(2))

    def __call__(self, u):
        return u


def class_with(value):
    return type("Made", (Model,), {"value": value, "get": lambda self: self.value})


def helper(value):
    module = types.ModuleType("helper_of_a_test")
    module.value, module.unrelated = value, threading.Lock()
    return module


def in_itself(value):
    def one(u):
        return two(u) if u else value

    def two(u):
        return one(u - 1)

    return one


# Each holds a value somewhere.
HOLDERS = {
    "itself": lambda x: x,
    "default": lambda x: of("def host(u, v=value): return v", value=x),
    "keyword": lambda x: of("def host(u, *, v=value): return v", value=x),
    "closure": lambda x: lambda u: x,
    "global": lambda x: of("def host(u): return value", value=x),
    "global of a lambda": lambda x: of("def host(u): return (lambda: value)()", value=x),
    "global of a comprehension": lambda x: of("def host(u): return [value for _ in u]", value=x),
    "function of the module": lambda x: of(
        "def other(): return value\ndef host(u): return other()", value=x
    ),
    "module": lambda x: of("def host(u): return helper.value", helper=helper(x)),
    "partial": lambda x: functools.partial(Model.method, x),
    "keyword of a partial": lambda x: functools.partial(Model.method, u=x),
    "instance": Model,
    "bound method": lambda x: Model(x).method,
    "slot": Slotted,
    "class": class_with,
    "base": lambda x: type("Derived", (class_with(x),), {}),
    "instance of a class": lambda x: class_with(x)(0),
    "field of a module": Module,
    "property": lambda x: property(lambda self: x),
    "jitted": lambda x: jax.jit(lambda u: x),
    "cached": lambda x: functools.lru_cache(lambda u: x),
    "decorated": lambda x: functools.wraps(Model.method)(lambda u: x),
    "in a dict": lambda x: {"a": [x, (1, {"b": x})]},
    "objects": lambda x: np.array([[x, 1], None, "a"], dtype=object),
    "recursive": in_itself,
    "attribute of a function": lambda x: [f := lambda u: u, setattr(f, "value", x)][0],
}
SCALARS = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.complex_numbers()
    | some.text(max_size=5)
    | some.binary(max_size=5)
    | arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(max_dims=2, max_side=3))
)
KEYS = some.integers() | some.text(max_size=3)
VALUES = some.recursive(
    SCALARS | some.frozensets(KEYS, max_size=4),
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.tuples(inner, inner)
        | some.dictionaries(some.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def written(x):
    """A value in words that are the same just for the same."""
    match x:
        case np.ndarray():
            return f"array {x.dtype} {x.shape} {x.tobytes()!r}"
        case dict():
            return str([(written(k), written(v)) for k, v in x.items()])
        case frozenset():
            return f"set {sorted(map(written, x))}"
        case list() | tuple():
            return f"{type(x).__name__} {list(map(written, x))}"
        case float():
            return f"float {np.float64(x).tobytes()!r}"
        case complex():
            return f"complex {np.complex128(x).tobytes()!r}"
    return f"{type(x).__name__} {x!r}"


def copied(x):
    """The same of other objects, sets filled in another order."""
    match x:
        case np.ndarray():
            return x.copy()
        case dict():
            return {copied(k): copied(v) for k, v in x.items()}
        case frozenset():
            return frozenset(sorted(x, key=written, reverse=True))
        case list() | tuple():
            return type(x)(map(copied, x))
        case str():
            return "".join([x[:1], x[1:]])
    return x


@pytest.mark.parametrize("name", HOLDERS)
@hypothesis.given(x=VALUES, y=VALUES)
@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.example(x=np.zeros(5000), y=np.eye(1, 5000, 2500)[0])
@hypothesis.example(x=1, y=True)
@hypothesis.example(x=0.0, y=-0.0)
@hypothesis.example(x=-1.0, y=-3.0)
def test_wherever_a_value_is(name, x, y):
    holder = HOLDERS[name]
    assert digest_by_value(holder(x)) == digest_by_value(holder(copied(x)))
    assert (digest_by_value(holder(x)) == digest_by_value(holder(y))) == (written(x) == written(y))


def test_what_code_does():
    texts = [
        "def host(u): return -1.0 * u",
        "def host(u): return -3.0 * u",
        "def host(u): return -1.0 + u",
        "def host(u): return (lambda x: -1.0 * x)(u)",
        "def host(u): return (lambda x: -3.0 * x)(u)",
        "def host(u): return [-1.0 * x for x in u]",
        "def host(u): return [-3.0 * x for x in u]",
        "def host(u, v): return -1.0 * u",
        "def host(*u): return -1.0 * u",
        "import math\ndef host(u): return math.sin(u)",
        "import math\ndef host(u): return math.cos(u)",
        "def host(u):\n    import math\n    return math.sin(u)",
        "def host(u):\n    from math import sin\n    return sin(u)",
        "def host(u):\n    try:\n        return u\n    except ValueError:\n        return 1",
        "def host(u):\n    import no_such_module",
        "def host(u):\n    import no_such_module_either",
        "class A:\n    def f(self): return 1\ndef host(u): return A().f()",
        "class A:\n    def f(self): return 2\ndef host(u): return A().f()",
        "class A:\n    f = staticmethod(lambda: 2)\ndef host(u): return A().f()",
    ]
    digests = [digest_by_value(of(x)) for x in texts]
    assert len(set(digests)) == len(texts)
    # Not where it is written, nor what is said of it.
    assert digests == [digest_by_value(of(f"# a comment\n\n\n{x}  # another")) for x in texts]


def test_what_is_installed_goes_by_name(monkeypatch):
    from ensembleode.tracing import by_value

    things = [np.sin, np.linalg.norm, math.sin, jnp.tanh, eqx.nn.MLP, functools.partial, str.upper]
    assert all(map(by_value.is_installed, things))
    assert len({digest_by_value(x) for x in things}) == len(things)
    assert not by_value.is_installed(Model)
    before = [digest_by_value(x) for x in (eqx.nn.MLP, lambda u: eqx.nn.MLP, np.add, Model)]
    version = by_value.importlib.metadata.version
    by_value._version_of.cache_clear()
    monkeypatch.setattr(
        by_value.importlib.metadata, "version", lambda x: version(x) + ".1" * (x == "equinox")
    )
    try:
        after = [digest_by_value(x) for x in (eqx.nn.MLP, lambda u: eqx.nn.MLP, np.add, Model)]
    finally:
        by_value._version_of.cache_clear()
    assert after[0] != before[0]
    assert after[2:] == before[2:]


def generator():
    yield 1


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (threading.Lock(), "a _thread.lock, which can't be pickled"),
        (Model(threading.Lock()), "a _thread.lock, which can't be pickled"),
        (generator(), "a builtins.generator, which can't be pickled"),
        (of("def host(u): return eval(u)"), "calls eval"),
        (of("def host(u): return globals()[u]"), "calls globals"),
        (of("def host(u): return getattr(a, u)", a=helper(1)), "by getattr"),
        (helper(1), "holds the module helper_of_a_test"),
        (functools.reduce(lambda x, _: [x], range(5000), 1), "nested too deeply"),
    ],
    ids=range(8),
)
def test_what_can_not_be_told(thing, message):
    with pytest.raises(NotByValue, match=message):
        digest_by_value(thing)


ELSEWHERE = """
import functools, sys
import numpy as np
import equinox as eqx, jax
from ensembleode.tracing.by_value import digest_by_value
WORDS = {"one", "two", "three", ("four", 5)}
class Model:
    table = {"a": WORDS}
    def __init__(self): self.words, self.me = frozenset(WORDS), self
    def __call__(self, u): return [x for x in WORDS if x in self.words], Model
class Net(eqx.Module):
    weight: jax.Array
    names: frozenset = eqx.field(static=True)
def host(u, words=WORDS):
    if u in {"one", "six", "seven"}:
        return helper(u)
    return np.linalg.norm(u)
def helper(u): return host("one") if u else Model()
net = Net(np.ones(3), frozenset(WORDS))
for thing in (Model(), Model, host, functools.partial(host, words={"x", "y"}), WORDS, net, Net):
    print(digest_by_value(thing).hex())
"""


@pytest.mark.slow
def test_in_other_processes(tmp_path):
    """Whatever the order of sets, and wherever the file and its lines are."""
    said = []
    for seed, before in (("1", ""), ("2", "'''A docstring.'''\n# a comment\n\n")):
        script = tmp_path / f"script{seed}.py"
        script.write_text(before + ELSEWHERE)
        root = str(Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, env=environment, check=True
        )
        said.append(done.stdout.split())
    assert len(said[0]) == len(set(said[0])) == 7
    assert said[0] == said[1]
