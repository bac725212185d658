"""The threads of a launch, as rows of NumPy arrays.

All threads that are at the same block run it together. Of the blocks at which there are threads,
the first one is run next. Since programs go downwards except in loops, threads that diverged meet
again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from . import arithmetic
from .arithmetic import dtype_of, Operation
from .errors import PtxError
from .memory import Buffer, GENERIC_GLOBAL, GENERIC_LOCAL, Local, Memory
from .parsing import ENDS, Function, Instruction, Module, parse


# Which threads: as indices, or as a slice where they are side by side.
Threads: TypeAlias = Any

_DONE = np.iinfo(np.int32).max
# Blocks that are run before a launch is taken for one that never ends.
_MOST_BLOCKS = 3_000_000
_MOST_THREADS, _MOST_BLOCKS_X = 1024, 2**31 - 1


def run(
    text: str, name: str, blocks: int, block: int, arguments: Sequence[int], memory: Memory
) -> None:
    """Launch the kernel of this name, with so many blocks, of as many threads as `block`, in one
    dimension.

    **Arguments:** `arguments`: addresses in `memory`, which the parameters are to point to.

    **Raises:** `PtxError`.
    """
    module = parse(text)
    kernel = module.functions.get(name)
    if kernel is None or not kernel.is_entry:
        raise PtxError(f"there is no kernel {name!r}.")
    if [x.type for x in kernel.parameters] != ["u64"] * len(arguments):
        raise PtxError(f"{name} doesn't take {len(arguments)} pointers.")
    bytes_ = 8 * len(arguments)
    if bytes_ > (most := _most_parameters(module)):
        raise PtxError(f"{name} has {bytes_} bytes of parameters, and at most {most} are allowed.")
    if not (1 <= blocks <= _MOST_BLOCKS_X and 1 <= block <= _MOST_THREADS):
        raise PtxError(f"{blocks} blocks of {block} threads can't be launched.")
    _Launch(text, blocks, block, memory).run(name, arguments)


def _most_parameters(module: Module) -> int:
    """The bytes of all parameters of a kernel."""
    version = tuple(map(int, module.version.split(".")))
    return 32_764 if version >= (8, 1) and int(module.target.removeprefix("sm_")) >= 70 else 4_352


class _Launch:
    """What all functions of a launch share."""

    def __init__(self, text: str, blocks: int, block: int, memory: Memory):
        self.text, self.memory = text, memory
        self.n = blocks * block
        self.threads = np.arange(self.n)
        self.local = Local(self.n)
        self.special = {
            "%tid.x": np.arange(self.n, dtype=np.uint32) % np.uint32(block),
            "%ctaid.x": np.arange(self.n, dtype=np.uint32) // np.uint32(block),
            "%ntid.x": np.full(self.n, block, np.uint32),
            "%nctaid.x": np.full(self.n, blocks, np.uint32),
        }
        self.symbols = {
            name: memory.add(Buffer(name, len(content), content), alignment)
            for name, (content, alignment) in parse(text).tables.items()
        }
        self.blocks_run = 0

    def run(self, kernel: str, arguments: Sequence[int]) -> None:
        values = [np.full(self.n, address + GENERIC_GLOBAL, np.uint64) for address in arguments]
        with np.errstate(all="ignore"):
            self.call(kernel, self.threads, values, 0)

    def call(
        self, name: str, threads: np.ndarray, values: Sequence[np.ndarray], local: int
    ) -> _Frame:
        """Run a function in these threads, whose frame in local memory begins at `local`."""
        code = _code_of(self.text, name)
        names = [x.name for x in code.function.parameters]
        frame = _Frame(self, code, dict(zip(names, values, strict=True)), local)
        size = code.function.local[1]
        self.local.enter(local, size)
        at = np.full(self.n, _DONE, np.int32)
        at[threads] = 0
        while (block := int(at.min())) != _DONE:
            here = np.flatnonzero(at == block)
            self._run_block(code, block, frame, _as_slice(here), at)
        if size:
            self.local.leave(local, threads)
        return frame

    def _run_block(
        self, code: _Code, block: int, frame: _Frame, here: Threads, at: np.ndarray
    ) -> None:
        self.blocks_run += 1
        if self.blocks_run > _MOST_BLOCKS:
            raise PtxError("the launch doesn't end.")
        for instruction, step in code.blocks[block]:
            try:
                step(frame, here)
            except Exception as e:
                raise PtxError(f"{code.function.name}: {instruction}: {e}") from e
        code.ends[block](frame, here, at)


def _as_slice(threads: np.ndarray) -> Threads:
    first, end = int(threads[0]), int(threads[-1]) + 1
    return slice(first, end) if end - first == len(threads) else threads


class _Frame:
    """A function that is run: its registers, as arrays with an entry a thread, and where it has its
    frame in local memory; `passed`: the arguments and results of what it calls."""

    def __init__(self, launch: _Launch, code: _Code, given: dict[str, Any], local: int):
        self.launch, self.code, self.given, self.local = launch, code, given, local
        self.passed: dict[str, np.ndarray] = {}
        n = launch.n
        # (A register that nobody wrote is any number; this one is seen.)
        bits = {
            name: np.full(n, 0xA5, np.uint8).repeat(dtype.itemsize).view(dtype)
            for name, dtype in code.registers.items()
        }
        self.slots = [
            bits[name].view(dtype.str)[:: max(1, bits[name].itemsize // dtype.itemsize)]
            for name, dtype in code.slots
        ]


#
# From instructions to functions of a frame
#


Source: TypeAlias = Callable[[_Frame, Threads], Any]
Step: TypeAlias = Callable[[_Frame, Threads], None]


class _End(NamedTuple):
    """Where threads go after a block: to one where a predicate says so, or to the next."""

    predicate: Source | None
    negated: bool
    target: int
    following: int

    def __call__(self, frame: _Frame, here: Threads, at: np.ndarray) -> None:
        if self.predicate is None:
            at[here] = self.target
        else:
            goes = self.predicate(frame, here) != self.negated
            at[here] = np.where(goes, self.target, self.following)


class _Code:
    """A function, made ready to run.

    `slots`: the registers as the dtypes by which they are read and written.
    """

    def __init__(self, function: Function):
        self.function = function
        self.registers: dict[str, np.dtype] = {}
        self.slots: dict[tuple[str, np.dtype], int] = {}
        self.blocks: list[list[tuple[Instruction, Step]]] = []
        self.ends: list[_End] = []
        for number, block in enumerate(function.blocks):
            last = block[-1] if block and block[-1].name in ENDS else None
            steps = block if last is None else block[:-1]
            self.blocks.append([(x, self._step(x)) for x in steps])
            self.ends.append(self._end(last, number + 1))

    def _end(self, last: Instruction | None, following: int) -> _End:
        if last is None:
            return _End(None, False, following, following)
        target = _DONE if last.name == "ret" else self.function.labels[last.operands[0]]
        guard = None if last.guard is None else self.source(last.guard, np.dtype(bool))
        return _End(guard, last.negated, target, following)

    def _step(self, i: Instruction) -> Step:
        special = {"ld": self._load, "st": self._store, "cvta": self._address, "call": self._call}
        is_split = i.name == "mov" and "{" in "".join(i.operands)
        step = (self._split if is_split else special.get(i.name, self._compute))(i)
        return step if i.guard is None else self._guarded(i, step)

    def _guarded(self, i: Instruction, step: Step) -> Step:
        predicate = self.source(i.guard, np.dtype(bool))

        def run(frame: _Frame, here: Threads) -> None:
            goes = predicate(frame, here) != i.negated
            if goes.any():
                step(frame, frame.launch.threads[here][goes])

        return run

    #
    # Operands
    #

    def _slot(self, register: str, dtype: np.dtype) -> int:
        kind = self.function.registers.get(register) or self.function.registers.get(
            re.sub(r"\d+$", "", register)
        )
        if kind is None:
            raise PtxError(f"{self.function.name} has no register {register}.")
        held = self.registers.setdefault(register, dtype_of(kind))
        if (held.kind == "b") != (dtype.kind == "b") or held.itemsize < dtype.itemsize:
            raise PtxError(f"{register}, of type .{kind}, holds no {dtype}.")
        return self.slots.setdefault((register, dtype), len(self.slots))

    def source(self, operand: str, dtype: np.dtype) -> Source:
        """What reads an operand."""
        if operand.startswith("%") and "." not in operand:
            slot = self._slot(operand, dtype)
            return lambda frame, here: frame.slots[slot][here]
        if operand.startswith("%"):
            return lambda frame, here: frame.launch.special[operand][here].view(dtype)
        if operand == self.function.local[0]:
            return lambda frame, here: np.array([frame.local]).view(dtype)
        if (number := _immediate(operand, dtype)) is not None:
            return lambda frame, here: number
        return lambda frame, here: np.array([frame.launch.symbols[operand]]).view(dtype)

    def target(self, operand: str, dtype: np.dtype) -> Callable[[_Frame, Threads, Any], None]:
        """What writes a register; a longer one has the sign of what is written."""
        slot = self._slot(operand, dtype)
        held = self.registers[operand]
        if dtype.kind in "iu" and held.itemsize > dtype.itemsize:
            slot = self._slot(operand, np.dtype(f"{dtype.kind}{held.itemsize}"))

        def write(frame: _Frame, here: Threads, x: Any) -> None:
            frame.slots[slot][here] = x

        return write

    #
    # Instructions
    #

    def _compute(self, i: Instruction) -> Step:
        operation: Operation = arithmetic.operation(i.name, i.modifiers)
        function = operation.function
        write = self.target(i.operands[0], operation.result)
        if len(i.operands) != 1 + len(operation.operands):
            raise PtxError(f"{i} has another number of operands.")
        sources = [
            self.source(x, dtype)
            for x, dtype in zip(i.operands[1:], operation.operands, strict=True)
        ]

        def run(frame: _Frame, here: Threads) -> None:
            write(frame, here, function(*[x(frame, here) for x in sources]))

        return run

    def _split(self, i: Instruction) -> Step:
        """A number into the parts of its bits, the lowest first, or from them."""
        whole = dtype_of(i.modifiers[0])
        places = [_several(x) for x in i.operands]
        parts = max(map(len, places))
        part = np.dtype(f"u{whole.itemsize // parts}")
        to, of = (whole if len(x) == 1 else part for x in places)
        writes = [self.target(x, to) for x in places[0]]
        sources = [self.source(x, of) for x in places[1]]

        def run(frame: _Frame, here: Threads) -> None:
            bits = np.stack([x(frame, here) for x in sources], axis=-1).view(to)
            for number, write in enumerate(writes):
                write(frame, here, bits[..., number])

        return run

    def _address(self, i: Instruction) -> Step:
        """Between addresses in a space, and such as tell in which they are."""
        *to, space, _ = i.modifiers
        base = {"global": GENERIC_GLOBAL, "local": GENERIC_LOCAL}[space]
        by = np.uint64(-base % 2**64 if to == ["to"] else base)
        write = self.target(i.operands[0], np.dtype("u8"))
        source = self.source(i.operands[1], np.dtype("u8"))
        return lambda frame, here: write(frame, here, source(frame, here) + by)

    def _load(self, i: Instruction) -> Step:
        space, constant, registers, dtype = _access(i, i.operands[0])
        writes = [self.target(x, dtype) for x in registers]
        if space == "param":
            name = i.operands[1].strip("[]")

            def run(frame: _Frame, here: Threads) -> None:
                source = frame.given if name in frame.given else frame.passed
                writes[0](frame, here, source[name].view(dtype)[here])

            return run
        address = self._address_of(i.operands[1], len(registers) * dtype.itemsize)

        def run(frame: _Frame, here: Threads) -> None:
            at, threads = address(frame, here), frame.launch.threads[here]
            how = dtype, threads, constant, len(writes) > 1
            for number, write in enumerate(writes):
                place = at + np.uint64(number * dtype.itemsize)
                write(frame, here, _loaded(frame.launch, space, place, *how))

        return run

    def _store(self, i: Instruction) -> Step:
        space, _, registers, dtype = _access(i, i.operands[1])
        sources = [self.source(x, dtype) for x in registers]
        if space == "param":
            name = i.operands[0].strip("[]")

            def run(frame: _Frame, here: Threads) -> None:
                room = frame.passed.setdefault(name, np.zeros(frame.launch.n, dtype))
                room.view(dtype)[here] = sources[0](frame, here)

            return run
        address = self._address_of(i.operands[0], len(registers) * dtype.itemsize)

        def run(frame: _Frame, here: Threads) -> None:
            at, threads = address(frame, here), frame.launch.threads[here]
            for number, source in enumerate(sources):
                place = at + np.uint64(number * dtype.itemsize)
                _stored(frame.launch, space, place, source(frame, here), dtype, threads)

        return run

    def _address_of(self, operand: str, size: int) -> Source:
        """An address, of `size` bytes."""
        register, _, offset = operand.strip("[]").partition("+")
        source = self.source(register, np.dtype("u8"))
        by = np.uint64(int(offset or 0) % 2**64)
        last = np.uint64(size - 1)

        def address(frame: _Frame, here: Threads) -> Any:
            at = source(frame, here) + by
            if (at & last).any():
                raise PtxError(f"an address is no multiple of {size}.")
            return np.broadcast_to(at, frame.launch.threads[here].shape)

        return address

    def _call(self, i: Instruction) -> Step:
        *result, name, arguments = i.operands if len(i.operands) > 1 else (*i.operands, "()")
        given = [x.strip() for x in arguments.strip("()").split(",") if x.strip()]
        results = [x.strip("()") for x in result]
        local = -(-self.function.local[1] // 64) * 64

        def run(frame: _Frame, here: Threads) -> None:
            launch = frame.launch
            values = [frame.passed[x] for x in given]
            inner = launch.call(name, launch.threads[here], values, frame.local + local)
            for passed in results:
                result = inner.code.function.result
                assert result is not None
                frame.passed[passed] = inner.passed[result.name]

        return run


@functools.lru_cache(maxsize=64)
def _code_of(text: str, name: str) -> _Code:
    return _Code(parse(text).functions[name])


def _immediate(operand: str, dtype: np.dtype) -> Any:
    """A number that is written in the code; None where none is."""
    if match := re.fullmatch(r"0[fd]([0-9A-F]{8}|[0-9A-F]{16})", operand):
        bits = int(match[1], 16)
        if len(match[1]) != 2 * dtype.itemsize:
            raise PtxError(f"{operand} is no number of {dtype.itemsize} bytes.")
    elif re.fullmatch(r"-?\d+", operand):
        if dtype.kind == "b":
            return np.bool_(int(operand) != 0)
        bits = int(operand) % 2 ** (8 * dtype.itemsize)
    else:
        return None
    return np.array([bits], f"u{dtype.itemsize}").view(dtype)


def _several(registers: str) -> list[str]:
    return [x.strip() for x in registers.strip("{}").split(",")]


def _access(i: Instruction, registers: str) -> tuple[str, bool, list[str], np.dtype]:
    """Of a load or a store: the space of its address (empty where the address tells), whether it is
    of what nobody writes, the registers, and the dtype."""
    *flags, kind = i.modifiers
    space = flags.pop(0) if flags and flags[0] in ("param", "global", "local") else ""
    constant = bool(flags) and flags[0] == "nc"
    rest = flags[constant:]
    several = _several(registers)
    if rest != ([f"v{len(several)}"] if len(several) > 1 else []):
        raise PtxError(f"{i} is no access that is known.")
    if space == "param" and len(several) > 1:
        raise PtxError(f"{i}: several numbers of a parameter.")
    return space, constant, several, dtype_of(kind)


def _loaded(
    launch: _Launch,
    space: str,
    at: Any,
    dtype: np.dtype,
    threads: Any,
    constant: bool,
    several: bool,
) -> Any:
    if space == "global":
        return launch.memory.load(at, dtype, threads, constant=constant)
    if space == "local":
        return launch.local.load(at, dtype, threads, several=several)
    found = np.empty(at.shape, dtype)
    for known, part in _spaces(at):
        how = dtype, threads[part], constant, several
        found[part] = _loaded(launch, *known(at[part]), *how)
    return found


def _stored(launch: _Launch, space: str, at: Any, x: Any, dtype: np.dtype, threads: Any) -> None:
    if space == "global":
        launch.memory.store(at, x, dtype, threads)
    elif space == "local":
        launch.local.store(at, x, dtype, threads)
    else:
        x = np.broadcast_to(x, at.shape)
        for known, part in _spaces(at):
            _stored(launch, *known(at[part]), x[part], dtype, threads[part])


def _spaces(at: Any) -> Any:
    """Of addresses that tell their space: each space, and which are in it."""
    for space, base, end in (
        ("global", GENERIC_GLOBAL, GENERIC_LOCAL),
        ("local", GENERIC_LOCAL, 2 * GENERIC_LOCAL),
    ):
        part = (at >= base) & (at < end)
        if part.any():
            yield (lambda x, space=space, base=base: (space, x - np.uint64(base))), part
    if (at < GENERIC_GLOBAL).any():
        raise PtxError("an address of a space, where one is wanted that tells its space.")
