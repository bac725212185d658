"""The description of a store's contents: its variables, and in JSON the pytrees that are made of
them."""

import math
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree


class StoredVariable(NamedTuple):
    """An array of the store: its name and dimensions; the shape and dtype of one trajectory's part,
    and whether the first axis of that `grows` with what trajectories need."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    grows: bool = False
    fill: Any = 0

    def in_json(self) -> list:
        name, dims, shape, dtype, grows, fill = self
        fill = None if fill != fill else fill
        return [name, list(dims), list(shape), np.dtype(dtype).name, grows, fill]

    @classmethod
    def of_json(cls, parts: list) -> "StoredVariable":
        name, dims, shape, dtype, grows, fill = parts
        fill = math.nan if fill is None else fill
        return cls(name, tuple(dims), tuple(shape), np.dtype(dtype), grows, fill)


def described(out: Any, name: str) -> dict[str, Any] | str | None:
    """A pytree of outputs in JSON, with the names of its leaves; raises `TypeError` for leaves that
    can't be stored."""
    inside = f"{name}." if name else ""
    if type(out) is dict and all(isinstance(k, str) for k in out):
        return {"dict": {str(k): described(v, f"{inside}{k}") for k, v in out.items()}}
    if type(out) in (list, tuple):
        parts = [described(v, f"{inside}{i}") for i, v in enumerate(out)]
        return {type(out).__name__: parts}
    if out is None:
        return None
    if not hasattr(out, "shape"):
        raise TypeError(
            "a store keeps outputs and states that are made of dicts (of names), lists and tuples "
            f"of arrays; here there is a {type(out).__name__}."
        )
    return name or "out"


def put_together(tree: PyTree, leaf: Callable[[str], Any], plain: Callable = lambda x: x) -> PyTree:
    """The pytree that was `described`; `leaf` returns the leaf of a name, and `plain` converts a
    leaf that is in the JSON itself."""

    def put(part):
        return put_together(part, leaf, plain)

    match tree:
        case None:
            return None
        case str():
            return leaf(tree)
        case {"value": value}:
            return plain(value)
        case {"dict": parts}:
            return {k: put(v) for k, v in parts.items()}
        case {"list": parts}:
            return [put(v) for v in parts]
        case {"tuple": parts}:
            return tuple(put(v) for v in parts)
    raise AssertionError(tree)


def safe_name(name: str, taken: Collection[str]) -> str:
    """A name for a folder, similar to this name, that is not among the `taken` ones."""
    name = re.sub(r"[^\w.,+-]+", "_", name)
    while name in taken:
        name = f"given.{name}"
    return name
