"""What errors and messages say to write is Python that works: every hint of code in the source."""

import ast
import builtins
import dataclasses
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ensembleode as eo
from ensembleode.problem.callbacks import Integrator
from ensembleode.problem.options import DEFAULTS


SOURCE = pathlib.Path(eo.__file__).parent
# In place of what a message fills in.
FILLED = "_filled_in_"
MODULES = {
    "eo": eo, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "diffrax": diffrax, "eqx": eqx,
    "equinox": eqx,
}  # fmt: skip
# A call of something public, such as `eo.remake(` or `EnsembleColumns(`; or a name in a module.
HINT = re.compile(
    rf"(?<![\w.])(?:(?:{'|'.join(MODULES)})\.\w+(?:\.\w+)*\(?|(?:{'|'.join(eo.__all__)})\()"
)


def f(u, p, t):
    return -u


def condition(u, t, integrator):
    return u[0] - 0.5


def affect(integrator):
    return integrator


PROB = eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0), jnp.array(1.0))
ENS = eo.EnsembleProblem(PROB)
SIM = eo.solve(ENS, trajectories=3)
# What the names in hints stand for.
NAMES = {
    "f": f,
    "u0": jnp.ones(2),
    "tspan": (0.0, 1.0),
    "p": jax.tree_util.Partial(lambda u: -u),
    "prob": PROB,
    "ens": ENS,
    "sim": SIM,
    "u": jnp.ones((2, 3)),
    "y": jnp.array([1.0, jnp.nan]),
    "model": jnp.ones(2),
    "network": eqx.nn.Linear(2, 2, key=jax.random.key(0)),
    "u0s": jnp.ones((3, 2)),
    "ps": jnp.ones(3),
    "condition": condition,
    "affect": affect,
    "integrator": Integrator(jnp.ones(2), None, jnp.array(0.0)),
    "jac": lambda u, p, t: -jnp.eye(2),
    "M": np.eye(2),
    "pattern": np.eye(2),
    "t0": 0.0,
    "dt": 0.1,
    "n": 4,
    "m": 2,
    "g": f,
    "i": 0,
    "times": jnp.array([0.1, 0.2]),
    "idxs": [0],
    "alg": eo.Tsit5(),
    "loss": lambda params: jnp.sum(params**2),
    "params": jnp.ones(2),
    "client": None,
    "data": jnp.ones((4, 2)),
    "folder": "a folder",
    "ts": jnp.array([0.0, 1.0]),
    "beta1": 0.4,
    "beta2": 0.1,
    FILLED: None,
}


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings of a module, but not its docstrings; each with its line."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (x.value if isinstance(x, ast.Constant) else FILLED for x in node.values)
            yield node.lineno, "".join(map(str, parts))


def hints(text: str) -> Iterator[str]:
    """The names and calls in a text."""
    for match in HINT.finditer(text):
        start, end = match.span()
        if text[end - 1] == "(":
            depth = 1
            while depth and end < len(text):
                depth += (text[end] == "(") - (text[end] == ")")
                end += 1
            if depth:  # a text in several parts, or a sentence
                continue
        yield text[start:end]


TEXTS = [
    (f"{file.relative_to(SOURCE)}:{line}", text)
    for file in sorted(SOURCE.rglob("*.py"))
    for line, text in texts(ast.parse(file.read_text()))
]
# Each with a place where it is. (What a message fills in isn't known, and neither are parts of the
# texts that describe objects.)
HINTS = {
    hint: place
    for place, text in TEXTS
    for hint in hints(text)
    if f".{FILLED}" not in hint and ", traced" not in hint and ", mapped" not in hint
    if ") -> (" not in hint
}


def options_of(fn: Any) -> set[str]:
    """The names of the arguments that a function takes."""
    names = set(inspect.signature(fn).parameters)
    if fn in (eo.ODEProblem, eo.remake):
        names |= {*DEFAULTS, *inspect.signature(eo.ODEProblem).parameters}
    if fn is eo.remake:
        names |= {"u", *inspect.signature(eo.EnsembleProblem).parameters}
    return names


# What would change the process, needs a GPU, or leaves out what the message is not about.
NOT_RUN = (
    "WandbLog()",
    "jax.config.update",
    'jax.devices("cuda")',
    "initialize",
    "fit(loss, params, data)",
)


def test_there_are_hints():
    assert len(HINTS) > 100
    assert "eo.EnsembleThreads()" in HINTS
    assert "eo.remake(prob, u0=...)" in HINTS


@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_can_be_written(hint):
    """Its names exist; the arguments by name are there; and it runs, if it is complete."""
    scope = {**vars(builtins), **{x: getattr(eo, x) for x in eo.__all__}, **MODULES, **NAMES}
    tree = ast.parse(hint.rstrip(".").replace("=)", "=...)"), mode="eval")
    given = {a.arg for x in ast.walk(tree) if isinstance(x, ast.Lambda) for a in x.args.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = eval(ast.unparse(node.func), scope) if not reads(node.func, given) else None
            module = getattr(called, "__module__", "") or ""
            if called is not None and module.startswith("ensembleode"):
                by_name = {x.arg for x in node.keywords if x.arg}
                assert by_name <= options_of(called), (HINTS[hint], by_name - options_of(called))
    if hint.startswith("jax.tree.map("):  # of many solutions in one
        scope["sim"] = jax.vmap(lambda u0: eo.solve(eo.remake(ENS, u0=u0)))(jnp.ones((2, 3, 2)))
    whole = not any(isinstance(x, ast.Constant) and x.value is ... for x in ast.walk(tree))
    if whole and FILLED not in hint and not hint.startswith(NOT_RUN):
        with jax.numpy_dtype_promotion("standard"):
            eval(compile(tree, HINTS[hint], "eval"), scope)


def reads(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(x, ast.Name) and x.id in names for x in ast.walk(node))


@pytest.mark.parametrize(
    ("name", "kind"),
    {"sim": eo.EnsembleSolution, "sol": eo.ODESolution, "ctx": eo.EnsembleContext}.items(),
)
def test_attributes_in_hints_are_there(name, kind):
    known = {field.name for field in dataclasses.fields(kind)} | set(dir(kind))
    for place, text in TEXTS:
        for attribute in re.findall(rf"(?<![\w.]){name}\.([a-z]\w*)", text):
            assert attribute in known, f"{place}: {name}.{attribute}"
