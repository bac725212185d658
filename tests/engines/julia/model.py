"""A model of the part of Julia that is printed, to run printed functions without Julia. The source
is translated to Python line by line.

Numbers have Julia's types, arrays count from 1 and are stored by columns, and a value that is
assigned to an element must have the element's type. The source has all parentheses, so that Python
and Julia agree on its meaning.
"""

import re
from typing import Any

import numpy as np

from ...fields.operations import convert, OPERATIONS, wrapped


def call(source: str, u: Any, p: Any, t: Any, out: Any = None) -> np.ndarray:
    """The result of the function in `source`, with arrays of `Vector` in `p`."""
    (name,) = re.findall(r"^function (\w+)\(", source, re.MULTILINE)
    scope = {**_BASE}
    exec("\n".join(_python(source)), scope)
    with np.errstate(all="ignore"):
        if out is None:
            return scope[name](u, p, t)
        assert scope[name](out, u, p, t) is None
    return out.array


class Vector:
    """An array that counts from 1; a matrix is stored by columns."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __getitem__(self, i: Any) -> Any:
        assert isinstance(i, np.int64)
        assert 1 <= i <= self.array.size, (i, self.array.size)
        return self.array[i - 1]

    def __setitem__(self, i: Any, x: Any) -> None:
        self[i]
        assert x.dtype == self.array.dtype, (x, self.array.dtype)
        self.array[i - 1] = x


class Type:
    """A type of numbers: `T(x)` and `x % T`."""

    __array_ufunc__ = None  # so that NumPy leaves `x % T` to it

    def __init__(self, dtype: Any):
        self.dtype = np.dtype(dtype)

    def __call__(self, x: Any) -> Any:
        y = self.dtype.type(x)
        assert self.dtype.kind == "f" or y == x, "InexactError"
        return y

    def __rmod__(self, x: Any) -> Any:
        assert x.dtype.kind in "biu"
        return wrapped(int(x), self.dtype)


class _Primitives:
    def __getattr__(self, name: str) -> Any:
        return OPERATIONS[name]

    def truncated(self, kind: Type, x: Any) -> Any:
        assert x.dtype.kind == "f"
        return convert(x, kind.dtype)


def _view(x: Vector, first: int, last: int) -> Vector:
    assert 1 <= first <= last <= x.array.size
    return Vector(x.array[first - 1 : last])


def _reshape(x: Vector, *shape: int) -> Vector:
    y = x.array.reshape(shape, order="F")
    assert np.shares_memory(y, x.array)
    return Vector(y)


def _mul(out: Vector, x: Vector, y: Vector) -> None:
    assert not np.shares_memory(out.array, x.array)
    assert not np.shares_memory(out.array, y.array)
    product = x.array @ y.array
    assert product.shape == out.array.shape
    assert product.dtype == out.array.dtype
    out.array[...] = product


def _static(kind: str, *parameters: Any) -> Any:
    *sizes, dtype = parameters

    def made(*xs: Any) -> np.ndarray:
        assert all(x.dtype == dtype.dtype for x in xs)
        assert len(xs) == np.prod(sizes)
        assert len(sizes) == (1 if kind == "SVector" else 2)
        return np.array(xs, dtype.dtype)

    return made


def _ifelse(test: Any, x: Any, y: Any) -> Any:
    assert test.dtype == bool
    assert x.dtype == y.dtype
    return x if test else y


_TYPES = {f"{kind}{n}": f"{kind.lower()}{n}" for kind in ("Int", "UInt") for n in (8, 16, 32, 64)}
_TYPES |= {f"Float{n}": f"float{n}" for n in (16, 32, 64)} | {"Bool": "bool"}
_BASE = {
    **{name: Type(dtype) for name, dtype in _TYPES.items()},
    **{f"NaN{n}": np.dtype(f"f{n // 8}").type("nan") for n in (16, 32)},
    **{f"Inf{n}": np.dtype(f"f{n // 8}").type("inf") for n in (16, 32)},
    "NaN": np.float64("nan"),
    "Inf": np.float64("inf"),
    "Primitives": _Primitives(),
    "made": lambda kind, n: Vector(np.full(n, 77, kind.dtype)),
    "Table": lambda *xs: Vector(np.array(xs, np.int64)),
    "Val": int,
    "float32": np.float32,
    "float64": np.float64,
    "ifelse": _ifelse,
    "integer": lambda x: np.int64(x) if x < 2**63 else x,
    "mul": _mul,
    "nothing": None,
    "reinterpret": lambda kind, x: x.view(kind.dtype),
    "reshape": _reshape,
    "static": _static,
    "transpose": lambda x: Vector(x.array.T),
    "turns": lambda a, b: map(np.int64, range(a, b + 1)),
    "typemin": lambda kind: kind.dtype.type(np.iinfo(kind.dtype).min),
    "view": _view,
    "yes": np.bool_(True),
    "no": np.bool_(False),
}


def _python(source: str) -> Any:
    depth = 0
    for line in source.splitlines():
        text = line.strip()
        if text in ("end", "else") or text.startswith("elseif "):
            assert re.match(" *", line).end() == 4 * (depth - 1)
            depth -= 1
        else:
            assert re.match(" *", line).end() == 4 * depth
        if text == "end":
            continue
        statement = _statement(text)
        yield "    " * depth + statement
        if statement.endswith(":"):
            depth += 1
            yield "    " * depth + "pass"
    assert not depth


def _statement(text: str) -> str:
    if found := re.fullmatch(r"function (\w+)\((.*)\)", text):
        return f"def {found[1]}({found[2]}):"
    if found := re.fullmatch(r"const (\w+) = Int64\[(.*)\]", text):
        return f"{found[1]} = Table({found[2]})"
    if found := re.fullmatch(r"(?:@simd )?for (\w+) in (\d+):(-?\d+)", text):
        return f"for {found[1]} in turns({found[2]}, {found[3]}):"
    if found := re.fullmatch(r"(if|elseif) (.*)", text):
        return f"{'el' * (found[1] == 'elseif')}if {_expression(found[2])}:"
    if found := re.fullmatch(r"(.*) \|\| break", text):
        return f"if not {_expression(found[1])}: break"
    if found := re.fullmatch(r"return (S\w+)\{(.*?)\}\((.*)\)", text):
        return f"return static('{found[1]}', {found[2]})({_expression(found[3])})"
    if found := re.fullmatch(r"(\w+) = Vector\{(\w+)\}\(undef, (\d+)\)", text):
        return f"{found[1]} = made({found[2]}, {found[3]})"
    if text == "return out":
        return text
    if text in ("@inbounds begin", "while true", "else", "return nothing"):
        return {"@inbounds begin": "if True:", "while true": "while True:", "else": "else:"}.get(
            text, "return None"
        )
    if text.startswith("mul!("):
        return re.sub(r"(\d+):(\d+)", r"\1, \2", text.replace("mul!", "mul"))
    left, right = text.split(" = ", 1)
    assert re.fullmatch(r"\w+(\[.*\])?|\((\w+, ?)+\)", left), text
    return f"{_expression(left)} = {_expression(right)}"


_TOKEN = re.compile(
    r"(?P<float32>\d+(\.\d+)?f[+-]?\d+)|(?P<float64>\d+(\.\d+)?e[+-]?\d+|\d+\.\d+)"
    r"|(?P<integer>(?<![\w.])\d+\b)|(?P<word>[A-Za-z_]\w*)|(?P<sign>[!⊻])(?!=)"
)
_OTHER = {"true": "yes", "false": "no", "!": "~", "⊻": "^"}


def _expression(text: str) -> str:
    def token(found: re.Match) -> str:
        if found.lastgroup in ("float32", "float64"):
            return f"{found.lastgroup}('{found[0].replace('f', 'e')}')"
        if found.lastgroup == "integer":
            return f"integer({found[0]})"
        return _OTHER.get(found[0], found[0])

    return _TOKEN.sub(token, text)
