"""A function of LLVM IR as XLA calls it: the handler of a custom call, of XLA's typed FFI.

XLA hands a handler one structure, the call frame, with arrays of pointers to buffers; the handler
here passes on where their data is, and nothing else. The structures are those of XLA's header
`xla/ffi/api/c_api.h`, version 0.1 and later. Each says how large it is, and grows where it gains
members, so whatever is read here is known to be there, and at its place; if not, the call fails
with an error of XLA's.
"""

from __future__ import annotations

from .sharing import share, shared_work
from .writer import as_pointers, Writer


# Offsets in bytes. `args` and `rets` are structures within the frame.
_FRAME = {"size": 0, "extension": 8, "api": 16, "stage": 32, "args": 40, "rets": 80}
_FRAME_BYTES = 120
_LIST = {"size": 0, "count": 16, "types": 24, "pointers": 32}
_LIST_BYTES = 40
_BUFFER = {"size": 0, "data": 24}
_BUFFER_BYTES = 32
_EXTENSION = {"type": 8, "metadata": 24}
_METADATA = {"size": 0, "major": 24, "minor": 28, "traits": 32}
_METADATA_BYTES = 36
_API = {"size": 0, "version": 16, "major": 32, "minor": 36, "error": 48}
_API_BYTES, _VERSION_BYTES = 56, 24
_ERROR_BYTES = 28

_IS_METADATA, _IS_EXECUTE, _IS_BUFFER = 1, 3, 1
_FAILED_PRECONDITION = 9


def handler_name(name: str) -> str:
    """Of the handler of a function."""
    return f"{name}.handler"


def handler(name: str, operands: int, results: int, *, shared: bool = False) -> str:
    """The handler that calls `void @name(ptr a0, ..., ptr r0, ...)`, to be appended to its module.

    The pointers are those to the data of the operands, then of the results, each row-major. A
    buffer of no elements may have none.

    **Arguments:** `shared`: whether the function is `void @name(i64 first, i64 end, i64 thread,
    ptr a0, ...)`, which does a part of the work, and the handler shares the parts out: see
    `sharing`. Then the first of its buffers says how, and isn't passed on.
    """
    w = Writer()
    # How a handler is asked what it is: no call, and the extension to be filled in.
    extension = w.load("ptr", "%frame", _FRAME["extension"])
    w.branch(w.icmp("eq", "ptr", extension, "null"), "call", "extended")
    w.label("extended")
    kind = w.load("i32", extension, _EXTENSION["type"])
    w.branch(w.icmp("eq", "i32", kind, _IS_METADATA), "metadata", "call")
    w.label("metadata")
    _fill_in_metadata(w, extension)

    w.label("call")
    stage = w.load("i32", "%frame", _FRAME["stage"])
    w.branch(w.icmp("eq", "i32", stage, _IS_EXECUTE), "execute", "done")
    w.label("execute")
    lists = {"args": operands, "rets": results}
    known = [w.icmp("uge", "i64", w.load("i64", "%frame", _FRAME["size"]), _FRAME_BYTES)]
    for which, count in lists.items():
        size, number = (
            w.load("i64", "%frame", _FRAME[which] + _LIST[x]) for x in ("size", "count")
        )
        known += [w.icmp("eq", "i64", size, _LIST_BYTES), w.icmp("eq", "i64", number, count)]
    w.branch(w.all(known), "lists", "unknown")
    w.label("lists")
    known, buffers = [], []
    for which, count in lists.items():
        types, pointers = (
            w.load("ptr", "%frame", _FRAME[which] + _LIST[x]) for x in ("types", "pointers")
        )
        for i in range(count):
            buffers.append(w.load("ptr", pointers, 8 * i))
            known.append(w.icmp("eq", "i32", w.load("i32", types, 4 * i), _IS_BUFFER))
    w.branch(w.all(known), "buffers", "unknown")
    w.label("buffers")
    sizes = [w.load("i64", x, _BUFFER["size"]) for x in buffers]
    w.branch(w.all([w.icmp("uge", "i64", x, _BUFFER_BYTES) for x in sizes]), "run", "unknown")
    w.label("run")
    data = [w.load("ptr", x, _BUFFER["data"]) for x in buffers]
    if shared:
        share(w, name, *data)
    else:
        # (Inlined, there would be two of it.)
        w.line(f"call void @{name}({as_pointers(data)}) noinline")
    w.jump("done")
    w.label("done")
    w.line("ret ptr null")
    w.label("unknown")
    _return_error(w, f"{name}.refusal")
    message = f"{name}: the call frame of this XLA is not what ensembleode knows\\00"
    length = len(message) - len("\\00") + 1
    constant = f'@"{name}.refusal" = private constant [{length} x i8] c"{message}"'
    return "\n".join(
        [
            constant,
            f'define ptr @"{handler_name(name)}"(ptr %frame) nounwind {{',
            *w.lines,
            "}",
            "",
            shared_work(name, operands + results - 1) if shared else "",
        ]
    )


def _fill_in_metadata(w: Writer, extension: str) -> None:
    """The version, and no traits: a call may do something else each time."""
    metadata = w.load("ptr", extension, _EXTENSION["metadata"])
    api = w.load("ptr", "%frame", _FRAME["api"])
    size = w.load("i64", metadata, _METADATA["size"])
    w.branch(w.icmp("uge", "i64", size, _METADATA_BYTES), "versions", "unknown")
    w.label("versions")
    # XLA takes versions from some oldest one to its own: so its own, as sizes are checked when
    # called. Of another major version nothing is known, and it will refuse this one.
    minor = w.load("i32", api, _API["minor"])
    w.store("i32", 0, metadata, _METADATA["major"])
    w.store("i32", minor, metadata, _METADATA["minor"])
    w.store("i32", 0, metadata, _METADATA["traits"])
    w.jump("done")


def _return_error(w: Writer, message: str) -> None:
    """An error of XLA's; the end of the process where not even that can be made."""
    api = w.load("ptr", "%frame", _FRAME["api"])
    size = w.load("i64", api, _API["size"])
    version = w.load("i64", api, _API["version"])
    known = [
        w.icmp("uge", "i64", size, _API_BYTES),
        w.icmp("eq", "i64", version, _VERSION_BYTES),
    ]
    w.branch(w.all(known), "error", "lost")
    w.label("error")
    members = (("ptr", "null"), ("ptr", f'@"{message}"'), ("i32", _FAILED_PRECONDITION))
    arguments = w.structure(("i64", _ERROR_BYTES), *members)
    create = w.load("ptr", api, _API["error"])
    w.line(f"ret ptr {w.value(f'call ptr {create}(ptr {arguments})')}")
    w.label("lost")
    w.line("call void @llvm.trap()")
    w.line("unreachable")
