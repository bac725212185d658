"""Parses PTX, as LLVM prints it with one statement in a line, into functions and their blocks."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from .errors import PtxError


class Instruction(NamedTuple):
    """An instruction.

    - `guard`: the predicate register that it depends on, or None; `negated`: on its being false.
    - `name`, `modifiers`: `ld` and `("global", "nc", "b32")` of `ld.global.nc.b32`.
    - `operands`: as they are written.
    """

    guard: str | None
    negated: bool
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.guard} " if self.guard else ""
        return f"{guard}{'.'.join([self.name, *self.modifiers])} {', '.join(self.operands)}"


class Parameter(NamedTuple):
    """A parameter of a function, or its result: its type (`"b64"`), and of a pointer of a kernel
    how its target is aligned at least (else None)."""

    name: str
    type: str
    pointer_alignment: int | None


class Function(NamedTuple):
    """A function.

    - `registers`: the type of those that are declared, by the part of their names before a number.
    - `local`: the name of its frame in local memory, and the bytes; `("", 0)` for none.
    - `blocks`: instructions that run one after the other: only the last is a branch or a return.
    - `labels`: the block that begins at each.
    """

    name: str
    is_entry: bool
    result: Parameter | None
    parameters: tuple[Parameter, ...]
    registers: dict[str, str]
    local: tuple[str, int]
    blocks: tuple[tuple[Instruction, ...], ...]
    labels: dict[str, int]


class Module(NamedTuple):
    """`tables`: the bytes of each variable in global memory, and their alignment."""

    version: str
    target: str
    functions: dict[str, Function]
    tables: dict[str, tuple[bytes, int]]


_TABLE = re.compile(r"\.global \.align (\d+) \.b8 (\w+)\[(\d+)\] = \{(.*)\};")
_HEAD = re.compile(r"(?:\.visible )?\.(entry|func)\s+(?:\((.*?)\)\s*)?(\w+)\s*\((.*)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param \.(\w+)(?: \.ptr(?: \.\w+)? \.align (\d+))? (\w+)")
_LOCAL = re.compile(r"\.local \.align \d+ \.b8 (\w+)\[(\d+)\]")
_REGISTERS = re.compile(r"\.reg \.(\w+) (%\w+?)(?:<\d+>)?$")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+) )?(\w+)((?:\.\w+)*)(?: (.*))?$")
_OPERAND = re.compile(r"\{[^}]*\}|\([^)]*\)|[^,\s][^,]*")
ENDS = ("bra", "ret")


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Module:
    """
    **Raises:** `PtxError` for what LLVM doesn't write, or our kernels don't need.
    """
    lines = [" ".join(x.partition("//")[0].split()) for x in text.splitlines()]
    lines = [x for x in lines if x]
    directives, functions, tables = {}, {}, {}
    at = 0
    while at < len(lines):
        line = lines[at]
        if match := re.fullmatch(r"\.(version|target|address_size) (\S+)", line):
            directives[match[1]] = match[2]
        elif match := _TABLE.fullmatch(line):
            alignment, name, size, values = match.groups()
            content = bytes(map(int, values.split(",")))
            tables[name] = content.ljust(int(size), b"\0"), int(alignment)
        elif line.startswith((".func", ".visible .entry")):
            start = next(i for i in range(at, len(lines)) if lines[i] in ("{", ";"))
            if lines[start] == ";":  # (a declaration of what comes later)
                at = start + 1
                continue
            end = _end(lines, start)
            function = _function(" ".join(lines[at:start]), lines[start + 1 : end])
            functions[function.name] = function
            at = end
        else:
            raise PtxError(f"a line of a module that isn't understood: {line}")
        at += 1
    if directives.get("address_size") != "64":
        raise PtxError("addresses have to have 64 bits.")
    return Module(directives["version"], directives["target"], functions, tables)


def _end(lines: list[str], start: int) -> int:
    """Where the brace is closed that a line opens."""
    depth = 0
    for at in range(start, len(lines)):
        depth += {"{": 1, "}": -1}.get(lines[at], 0)
        if depth == 0:
            return at
    raise PtxError("a brace that isn't closed.")


def _function(head: str, body: list[str]) -> Function:
    match = _HEAD.fullmatch(head)
    if match is None:
        raise PtxError(f"a function's head that isn't understood: {head}")
    kind, result, name, parameters = match.groups()
    registers, local = {}, ("", 0)
    blocks: list[list[Instruction]] = [[]]
    labels = {}
    for line in body:
        statement = line.removesuffix(";")
        if line in ("{", "}") or line.startswith(".param"):
            continue  # (the space of a call's arguments, which are known by their names)
        if line.endswith(":"):
            if blocks[-1]:
                blocks.append([])
            labels[line.removesuffix(":")] = len(blocks) - 1
        elif found := _LOCAL.fullmatch(statement):
            local = found[1], int(found[2])
        elif found := _REGISTERS.fullmatch(statement):
            registers[found[2]] = found[1]
        else:
            instruction = _instruction(statement)
            blocks[-1].append(instruction)
            if instruction.name in ENDS:
                blocks.append([])
    return Function(
        name,
        kind == "entry",
        next(iter(_parameters(result or "")), None),
        _parameters(parameters),
        registers,
        local,
        tuple(map(tuple, blocks)),
        labels,
    )


def _parameters(text: str) -> tuple[Parameter, ...]:
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        match = _PARAMETER.fullmatch(part)
        if match is None:
            raise PtxError(f"a parameter that isn't understood: {part}")
        kind, alignment, name = match.groups()
        found.append(Parameter(name, kind, alignment and int(alignment)))
    return tuple(found)


def _instruction(statement: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(statement)
    if match is None:
        raise PtxError(f"a statement that isn't understood: {statement}")
    negated, guard, name, modifiers, operands = match.groups()
    parts = tuple(x.strip() for x in _OPERAND.findall(operands or ""))
    return Instruction(guard, bool(negated), name, tuple(modifiers.split(".")[1:]), parts)
