"""The text of a function of LLVM IR: its lines, in blocks and with jumps between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .heap import Heap
    from .values import Value


class FunctionText:
    """The lines of a function as they are written, one block after the other."""

    def __init__(self):
        self.lines: list[str] = []
        self.allocas: list[str] = []
        # The instructions at the start of the function.
        self.first: list[str] = []
        # The memory for arrays that the stack may be too small for; None: all are on the stack.
        self.heap: Heap | None = None
        self._count = 0
        # The results available for reuse in this block, and in the enclosing blocks before it.
        self._scopes: list[dict] = [{}]

    def name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def emit(self, text: str) -> None:
        self.lines.append("  " + text)

    @contextmanager
    def _block(self) -> Iterator[None]:
        """A block whose instructions may not be run; their results are not reused after it."""
        self._scopes.append({})
        try:
            with nullcontext() if self.heap is None else self.heap.block():
                yield
        finally:
            self._scopes.pop()

    @property
    def position(self) -> int:
        """The place of the next instruction."""
        return len(self.lines)

    @contextmanager
    def _writing_to(self, lines: list[str]) -> Iterator[None]:
        """Within this block, instructions go to these lines, where values don't exist yet."""
        before = self.lines, self._scopes
        self.lines, self._scopes = lines, [{}]
        try:
            yield
        finally:
            self.lines, self._scopes = before

    @contextmanager
    def inserting(self, position: int) -> Iterator[None]:
        """Within this block, instructions go to an earlier position of the function."""
        inserted: list[str] = []
        with self._writing_to(inserted):
            yield
        self.lines[position:position] = inserted

    def at_start(self) -> AbstractContextManager[None]:
        """Within this block, instructions go to the start of the function."""
        return self._writing_to(self.first)

    def on_stack(self, type_: str) -> str:
        """A pointer to memory for a value of this type on the function's stack."""
        place = self.name()
        self.allocas.append(f"  {place} = alloca {type_}")
        return place

    def return_(self) -> None:
        self.emit("ret void")

    #
    # Branches and loops
    #

    def _label(self) -> str:
        return self.name().replace("%v", "%L")

    def _begin(self, label: str) -> None:
        self.lines.append(f"{label[1:]}:")

    def _jump(self, label: str) -> None:
        self.emit(f"br label {label}")

    def _branch(self, condition: Value, yes: str, no: str, likely: bool | None = None) -> None:
        weights = "" if likely is None else f", !prof !{0 if likely else 1}"
        self.emit(f"br {condition}, label {yes}, label {no}{weights}")

    def if_(
        self,
        condition: Value,
        then: Callable[[], None],
        otherwise: Callable[[], None] | None = None,
        *,
        likely: bool | None = None,
    ) -> None:
        """A branch on a scalar condition."""
        yes, no, after = self._label(), self._label(), self._label()
        self._branch(condition, yes, after if otherwise is None else no, likely)
        for label, write in ((yes, then), (no, otherwise)):
            if write is not None:
                self._begin(label)
                with self._block():
                    write()
                self._jump(after)
        self._begin(after)

    def while_(
        self,
        condition: Callable[[], Value],
        body: Callable[[], object],
        *,
        likely: bool | None = None,
    ) -> None:
        """A loop that goes on while the scalar `condition()` holds."""
        test, inside, after = self._label(), self._label(), self._label()
        self._jump(test)
        self._begin(test)
        with self._block():
            self._branch(condition(), inside, after, likely)
            self._begin(inside)
            body()
        self._jump(test)
        self._begin(after)

    def do_while(self, body: Callable[[], Value]) -> None:
        """A loop that goes on while the scalar that `body()` returns holds."""
        inside, after = self._label(), self._label()
        self._jump(inside)
        self._begin(inside)
        with self._block():
            self._branch(body(), inside, after)
        self._begin(after)
