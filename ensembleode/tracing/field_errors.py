"""Explains why an `f` can't be traced, and what to write instead."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .program import NOT_TRACEABLE


_TIME = ("t", "time")
_IN_PLACE = (
    "f must return du, and can't write it into an array, as it is traced: return jnp.array([...]) "
    "of its components (or du = du.at[0].set(...) in place of du[0] = ...)."
)
# JAX's messages about shapes that don't fit together.
_SHAPES = re.compile(r"[Ii]ncompatible shapes|could not be broadcast|dot_general requires")


class NeedsNumber(TypeError):
    """`f` branches on an integer or a boolean of `p`, which is traced."""


def check_signature(f: Callable, name: str = "f") -> None:
    """**Raises:** `TypeError` for an `f` that can't be called as `f(u, p, t)`, or whose parameters
    have the names of SciPy's or diffrax's."""
    call = "f(u, p, t) -> du" if name == "f" else f"{name}(u, p, t)"
    right = f"{name} must take the state, the parameters and the time, in this order: {call}"
    try:
        signature = inspect.signature(f)
    except (ValueError, TypeError):  # builtins without a signature
        return
    parameters = list(signature.parameters.values())
    positional = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    names = [x.name for x in positional]
    takes = f"it takes ({', '.join(names)})"
    time_first = bool(names) and names[0].lower() in _TIME
    try:
        signature.bind(None, None, None)
    except TypeError:
        if len(names) == 4:
            hint = "in place, as f(du, u, p, t) in Julia, does not work: return du."
        elif len(names) == 2 and (time_first or names[1].lower() in _TIME):
            state = names[1 if time_first else 0]
            hint = f"write {name}({state}, p, t), with p unused where there are no parameters."
        else:
            hint = "give it all three, used or not."
        raise TypeError(f"{right}. But {takes}: {hint}") from None
    if len(names) < 3 or names[2].lower() in _TIME:
        return
    if time_first:
        how, order = "first, as in solve_ivp and diffrax", (names[1], names[2], names[0])
    elif names[1].lower() in _TIME:
        how, order = "second, as in odeint", (names[0], names[2], names[1])
    else:
        return
    raise TypeError(f"{right}. But {takes}, with the time {how}: write {name}({', '.join(order)}).")


def explain(error: Exception, u: PyTree, p: PyTree, leaf_paths: list) -> Exception:
    """The error to raise in place of one that was raised while `f(u, p, t)` was traced: the same
    error, if there is nothing to add. `leaf_paths` are the numbers in `p`, each with its path."""
    text = str(error)
    first_line = text.partition("\n")[0]
    if "does not support in-place item" in text or "in-place item assignment" in text:
        return TypeError(_IN_PLACE)
    if "setting an array element" in text and isinstance(error.__cause__, NOT_TRACEABLE):
        return TypeError(_IN_PLACE)
    if p is None and isinstance(error, TypeError) and "NoneType" in text:
        return TypeError(
            f"f failed: {first_line}. In f(u, p, t) p is None, as this problem has no parameters: "
            "if f uses them, give them to the problem, ODEProblem(f, u0, tspan, p)."
        )
    if said := _of_containers(error, u, p):
        return TypeError(f"f failed: {first_line.removesuffix('.')}. {said}")
    if np.ndim(u) == 2 and callable(p) and _SHAPES.search(text):
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(
            f"f failed: {first_line.removesuffix('.')}. The state is a matrix, of "
            f"{u.shape[0]} x {u.shape[1]} numbers, and p is a network or another function, which "
            "mostly takes a vector. If each column is a state, map it over them: "
            "jax.vmap(p, in_axes=1, out_axes=1)(u). Or let u0 be one column, and solve an ensemble "
            "with EnsembleColumns(), which does that."
        )
    if "as an abstract array" in text and "numpy.ndarray" in text:
        return TypeError(
            "f computes with a NumPy array of objects, strings or dates, which holds no numbers: "
            "use x.astype(float) before."
        )
    if "is not a valid JAX type" in text:
        return TypeError(f"f must return an array like the state u; {text}")
    if not isinstance(error, NOT_TRACEABLE):
        return error
    if names := _python_numbers(text, leaf_paths):
        return NeedsNumber(
            f"f needs to know {names}, for a loop, a branch or an index of Python. Integers and "
            "booleans of Python in p may decide so, but not where they differ by trajectory, nor "
            "arrays: they are traced. Let f close over what decides about the computation, as in "
            "f = functools.partial(f, n=3); numbers that only enter into it stay in p. "
            f"({first_line})"
        )
    return TypeError(
        "f must be written in JAX, as it is traced: use jnp instead of np, and jnp.where "
        f"instead of `if`. ({first_line})"
    )


# The messages of Python and JAX about a number that is indexed or unpacked, and about arithmetic
# with a list or a tuple.
_NO_AXES = re.compile(
    r"Too many indices: array is 0-d|over a 0-d array|has no len|not subscriptable"
)
_SEQUENCE = re.compile(r"operand.*'(list|tuple)'|multiply sequence|got <class '(list|tuple)'>")


def _of_containers(error: Exception, u: PyTree, p: PyTree) -> str | None:
    """What to write if `f` treats numbers in the state or the parameters as containers, or
    containers as numbers; None if it doesn't."""
    text = str(error)
    if isinstance(error, KeyError):
        given = {name: x for name, x in (("u", u), ("p", p)) if isinstance(x, Mapping)}
        keys = " and ".join(
            f"{name} has the keys {', '.join(map(repr, x))}" for name, x in given.items()
        )
        return keys and (
            f"{keys}. remake(prob, p=...) replaces the whole of p: to change a part, write "
            "p={**prob.p, 'key': value}."
        )
    if _NO_AXES.search(text):
        given = {"u0": u, "p": p}
        names = [n for n, x in given.items() if eqx.is_array_like(x) and np.shape(x) == ()]
        if not names:
            return None
        return (
            f"{' and '.join(names)} of the problem {'is' if len(names) == 1 else 'are'} given as a "
            f"number, without axes: write {names[0]}=[1.0] or jnp.array([1.0]) for a vector of one."
        )
    if isinstance(error, TypeError) and _SEQUENCE.search(text):
        return (
            "A list or a tuple is no array (except for lists of nothing but numbers in p, as "
            "p=[1.5, 1.0]): write jnp.array([...]) of its numbers."
        )
    return None


def is_whole(x: Any) -> bool:
    """Whether `x` is an integer or a boolean of Python or NumPy."""
    return isinstance(x, bool | int | np.integer | np.bool_)


def _python_numbers(text: str, leaf_paths: list) -> str:
    """The leaves of p that are integers and that JAX's error is about, as text."""
    found = [int(i) for i in re.findall(r"\ba\[1\]\[(\d+)\]", text)]
    names = []
    for i in found:
        path, leaf = leaf_paths[i] if i < len(leaf_paths) else ((), np.nan)
        kind = getattr(leaf, "dtype", np.dtype(object)).kind
        if is_whole(leaf) or (np.shape(leaf) == () and kind in "biu"):
            names.append("p" + jtu.keystr(path))
    return " and ".join(names)
