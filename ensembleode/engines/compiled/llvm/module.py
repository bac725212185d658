"""A module of LLVM IR: functions, each written by a `Builder`, and the constants that they read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from .builder import Builder
from .values import literal, type_of


class Module:
    """Functions of LLVM IR for vectors of `width` lanes (with one lane, for scalars); `text` is the
    whole module. On a GPU a function may be a kernel; `has_fma` says whether a fused product and
    sum is fast, `has_range` whether `largest_magnitude` may use AVX-512."""

    def __init__(
        self, width: int, *, is_gpu: bool = False, has_fma: bool = True, has_range: bool = False
    ):
        assert width >= 1
        assert width == 1 or not is_gpu
        self.width, self.lanes = width, width if width > 1 else 0
        self.is_gpu, self.has_fma, self.has_range = is_gpu, has_fma, has_range
        self._declared: dict[str, str] = {}
        self._globals: dict[str, str] = {}
        self._functions: dict[str, str] = {}

    def declare(self, name: str, signature: str) -> None:
        self._declared[name] = f"declare {signature}"

    def table(self, values: Sequence, dtype: np.dtype) -> str:
        """A pointer to a constant array in memory; equal arrays are written once."""
        entries = ", ".join(f"{type_of(dtype)} {literal(x, dtype)}" for x in values)
        text = f"[{len(values)} x {type_of(dtype)}] [{entries}]"
        return self._globals.setdefault(text, f"@table{len(self._globals)}")

    def has(self, name: str) -> bool:
        """Whether there is a function of this name."""
        return name in self._functions

    @contextmanager
    def function(
        self,
        name: str,
        parameters: Sequence[str],
        *,
        attributes: str = "",
        linkage: str = "internal",
    ) -> Iterator[Builder]:
        """Yields the builder that writes a new function, and that has to `return_`.

        **Arguments:** `parameters`: each as LLVM writes it, such as `"ptr noalias %u0"`.
        """
        self._functions[name] = ""  # (in order of their beginnings, and known within itself)
        builder = Builder(self)
        yield builder
        head = f"define {linkage} void @{name}({', '.join(parameters)}) {attributes} #0 {{"
        body = "\n".join(["entry:", *builder.allocas, *builder.first, *builder.lines])
        self._functions[name] = f"{head}\n{body}\n}}\n"

    @property
    def text(self) -> str:
        tables = (
            f"{name} = private unnamed_addr constant {text}, align 64"
            for text, name in self._globals.items()
        )
        # Vectors stay as wide as they are written.
        wide = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'
        attributes = f"attributes #0 = {{ nounwind {'' if self.is_gpu else wide} }}"
        likely = (
            '!0 = !{!"branch_weights", i32 2000, i32 1}\n!1 = !{!"branch_weights", i32 1, i32 2000}'
        )
        parts = [*tables, *self._functions.values(), *self._declared.values(), attributes, likely]
        return "\n".join([*parts, ""])
