"""Writes LLVM IR for the code around a kernel, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable


class InstructionWriter:
    """Writes the instructions of a function that accesses structures in memory by byte offsets."""

    def __init__(self):
        self.lines: list[str] = []
        self._count = 0

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def value(self, text: str) -> str:
        self._count += 1
        self.line(f"%h{self._count} = {text}")
        return f"%h{self._count}"

    def address(self, base: str, offset: int) -> str:
        return self.value(f"getelementptr i8, ptr {base}, i64 {offset}")

    def load(self, type_: str, base: str, offset: int) -> str:
        return self.value(f"load {type_}, ptr {self.address(base, offset)}")

    def store(self, type_: str, value: str | int, base: str, offset: int) -> None:
        self.line(f"store {type_} {value}, ptr {self.address(base, offset)}")

    def structure(self, *members: tuple[str, str | int]) -> str:
        """A structure in memory with these members, types and values, of eight bytes each."""
        base = self.value(f"alloca {{ {', '.join(type_ for type_, _ in members)} }}")
        for i, (type_, value) in enumerate(members):
            self.store(type_, value, base, 8 * i)
        return base

    def icmp(self, how: str, type_: str, x: str, y: str | int) -> str:
        return self.value(f"icmp {how} {type_} {x}, {y}")

    def all(self, conditions: list[str]) -> str:
        found = "true"
        for x in conditions:
            found = self.value(f"and i1 {found}, {x}")
        return found

    def branch(self, condition: str, yes: str, no: str) -> None:
        self.line(f"br i1 {condition}, label %{yes}, label %{no}")

    def jump(self, label: str) -> None:
        self.line(f"br label %{label}")

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def go_on(self, name: str) -> None:
        """Jump to the code that follows, which gets this label."""
        self.jump(name)
        self.label(name)

    def go_on_if(self, condition: str, name: str, otherwise: str) -> None:
        """Jump to the code that follows, which gets this label, or to another."""
        self.branch(condition, name, otherwise)
        self.label(name)


def as_pointers(values: Iterable[str]) -> str:
    """These names as pointer arguments of a call."""
    return ", ".join(f"ptr {x}" for x in values)
