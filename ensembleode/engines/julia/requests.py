"""Requests to Julia: a TOML text, in which arrays are given by their addresses."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from .source import TYPES


class JuliaRequest:
    """One request: an operation, its options, and the arrays that Julia reads and writes.

    An array `[trajectory, ..., last]` is `[last, ..., trajectory]` in Julia, in the same memory.
    Julia writes to the arrays in `written`.
    """

    def __init__(
        self,
        operation: str,
        options: Mapping[str, Any],
        read: Mapping[str, np.ndarray],
        written: Mapping[str, np.ndarray] | None = None,
    ):
        self.options = {"operation": operation, **options}
        self.written = dict(written or {})
        self.arrays = {**read, **self.written}
        for name, x in self.arrays.items():
            assert x.flags.c_contiguous, name

    def leave_out(self, defined: Collection[str]) -> set[str]:
        """Leave out the sources of the functions `defined`, and return the names of the others."""
        new = set()
        for function in _functions(self.options):
            if function["name"] in defined:
                del function["source"]
            new.add(function["name"])
        return new - set(defined)

    def text(self, places: Mapping[str, Mapping[str, Any]], **more: Any) -> str:
        """The text, with each array at its place."""
        arrays = {
            name: {"type": TYPES[x.dtype.name], "dims": list(x.shape[::-1]), **places[name]}
            for name, x in self.arrays.items()
        }
        return toml({**self.options, **more, "arrays": arrays})


def _functions(x: Any) -> Iterator[dict]:
    """The tables of functions in a table or a list, at any depth."""
    if isinstance(x, dict) and "source" in x:
        yield x
    elif isinstance(x, dict | list):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _functions(y)


def toml(table: Mapping[str, Any]) -> str:
    """A table as TOML, without the values that are None."""
    return "\n".join(f"{key} = {_value(v)}" for key, v in table.items() if v is not None) + "\n"


def _value(x: Any) -> str:
    if isinstance(x, str):
        return json.dumps(x, ensure_ascii=False)  # (which TOML reads, too)
    if isinstance(x, bool | np.bool_):
        return "true" if x else "false"
    if isinstance(x, int | np.integer):
        return str(int(x))
    if isinstance(x, float | np.floating):
        return repr(float(x))
    if isinstance(x, Mapping):
        inner = ", ".join(f"{k} = {_value(v)}" for k, v in x.items() if v is not None)
        return f"{{{inner}}}"
    return f"[{', '.join(map(_value, x))}]"
