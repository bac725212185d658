"""The handler of a custom call of XLA's typed FFI that calls a function of LLVM IR.

XLA hands a handler one structure, the call frame, with arrays of pointers to buffers. The handler
passes pointers to the buffers' data on to the function. XLA has no way to forget a handler, so it
is given trampolines, which stay in memory when the handlers that they jump to are freed. The
structures are those of XLA's header `xla/ffi/api/c_api.h`, version 0.3 and later, where newer
versions only append members. The handler checks that all it reads is there; otherwise XLA's call
fails with an error.
"""

from __future__ import annotations

from ..llvm.writer import as_pointers, InstructionWriter
from .sharing import share, shared_work, thread_work


# Offsets in bytes. `args` and `rets` are structures within the frame.
_FRAME = {"size": 0, "extension": 8, "api": 16, "stage": 32, "args": 40, "rets": 80}
_CONTEXT, _FRAME_BYTES = 24, 120
_LIST = {"size": 0, "count": 16, "types": 24, "pointers": 32}
_LIST_BYTES = 40
_BUFFER = {"size": 0, "data": 24}
_BUFFER_BYTES = 32
_EXTENSION = {"type": 8, "metadata": 24}
_METADATA = {"size": 0, "major": 24, "minor": 28, "traits": 32}
_METADATA_BYTES = 36
_API = {"size": 0, "version": 16, "major": 32, "minor": 36, "error": 48, "set_state": 104}
_API_BYTES, _VERSION_BYTES = 112, 24
_ERROR_BYTES, _STATE_BYTES, _TYPE_BYTES = 28, 48, 24

_IS_METADATA, _IS_INSTANTIATE, _IS_EXECUTE, _IS_BUFFER = 1, 0, 3, 1
_FAILED_PRECONDITION = 9


def handler_name(name: str) -> str:
    """The name of the handler of a function."""
    return f"{name}.handler"


def handler(name: str, operands: int, results: int, *, shared: bool = False) -> str:
    """The handler that calls `void @name(ptr a0, ..., ptr r0, ...)`, to be appended to its module.
    The pointers are to the data of the operands, then of the results, each row-major; that of a
    buffer without elements may be null.

    **Arguments:** `shared`: whether the function is `void @name(i64 first, i64 end, i64 thread, ptr
    a0, ...)`, which does a part of the work. The first buffer, which isn't passed on, then says how
    it is shared out (see `sharing`).
    """
    w = InstructionWriter()
    lists = {"args": operands, "rets": results}
    known = [w.icmp("uge", "i64", w.load("i64", "%frame", _FRAME["size"]), _FRAME_BYTES)]
    for which, count in lists.items():
        size, number = (
            w.load("i64", "%frame", _FRAME[which] + _LIST[x]) for x in ("size", "count")
        )
        known += [w.icmp("eq", "i64", size, _LIST_BYTES), w.icmp("eq", "i64", number, count)]
    w.go_on_if(w.all(known), "lists", "unknown")
    known, buffers = [], []
    for which, count in lists.items():
        types, pointers = (
            w.load("ptr", "%frame", _FRAME[which] + _LIST[x]) for x in ("types", "pointers")
        )
        for i in range(count):
            buffers.append(w.load("ptr", pointers, 8 * i))
            known.append(w.icmp("eq", "i32", w.load("i32", types, 4 * i), _IS_BUFFER))
    w.go_on_if(w.all(known), "buffers", "unknown")
    sizes = [w.load("i64", x, _BUFFER["size"]) for x in buffers]
    w.go_on_if(w.all([w.icmp("uge", "i64", x, _BUFFER_BYTES) for x in sizes]), "run", "unknown")
    data = [w.load("ptr", x, _BUFFER["data"]) for x in buffers]
    if shared:
        share(w, name, *data)
    else:
        # Inlined, the function would be there twice.
        w.line(f"call void @{name}({as_pointers(data)}) noinline")
    w.go_on("done")
    w.line("ret ptr null")
    w.label("unknown")
    _return_error(w, f'@"{name}.refusal"')
    return "\n".join(
        [
            _message(f"{name}.refusal", f"{name}: {_UNKNOWN}"),
            f'define ptr @"{handler_name(name)}"(ptr %frame) nounwind {{',
            *w.lines,
            "}",
            "",
            shared_work(name, operands + results - 1) if shared else "",
        ]
    )


_UNKNOWN = "the call frame of this XLA is not what ensembleode knows"


def trampolines(count: int) -> str:
    """A module of functions `ptr @trampoline0(ptr frame)` and so on, which XLA is given and which
    stay in memory. Trampoline `i` jumps to the handler at `@handlers[i]`; without one, XLA fails to
    load the program. `@users[i]` counts the loaded programs that call the trampoline. XLA keeps it
    as a program's state, whose type `@id` and `@info` describe to it."""
    w = InstructionWriter()
    # XLA asks a handler about itself by a frame that has an extension to be filled in.
    extension = w.load("ptr", "%frame", _FRAME["extension"])
    w.branch(w.icmp("eq", "ptr", extension, "null"), "call", "extended")
    w.label("extended")
    kind = w.load("i32", extension, _EXTENSION["type"])
    w.go_on_if(w.icmp("eq", "i32", kind, _IS_METADATA), "metadata", "call")
    _fill_in_metadata(w, extension)
    w.label("call")
    stage = w.load("i32", "%frame", _FRAME["stage"])
    w.go_on_if(w.icmp("eq", "i32", stage, _IS_EXECUTE), "execute", "other")
    target = w.load("ptr", "%handler", 0)
    w.line(f"ret ptr {w.value(f'tail call ptr {target}(ptr %frame)')}")
    w.label("other")
    w.go_on_if(w.icmp("eq", "i32", stage, _IS_INSTANTIATE), "instantiate", "done")
    w.branch(w.icmp("eq", "ptr", w.load("ptr", "%handler", 0), "null"), "absent", "there")
    w.label("there")
    api = w.load("ptr", "%frame", _FRAME["api"])
    size = w.load("i64", api, _API["size"])
    w.go_on_if(w.icmp("uge", "i64", size, _API_BYTES), "state", "unknown")
    context = w.load("ptr", "%frame", _CONTEXT)
    members = (("ptr", context), ("i64", _IS_INSTANTIATE), ("ptr", "@id"), ("ptr", "%users"))
    state = w.structure(("i64", _STATE_BYTES), ("ptr", "null"), *members)
    w.line("atomicrmw add ptr %users, i64 1 acq_rel")
    refused = w.value(f"call ptr {w.load('ptr', api, _API['set_state'])}(ptr {state})")
    w.branch(w.icmp("eq", "ptr", refused, "null"), "done", "refused")
    w.label("refused")
    w.line("call void @forget(ptr %users)")
    w.line(f"ret ptr {refused}")
    w.label("done")
    w.line("ret ptr null")
    for label in ("absent", "unknown"):
        w.label(label)
        w.jump("failed")
    w.label("failed")
    w.line("%message = phi ptr [ @absence, %absent ], [ @refusal, %unknown ]")
    _return_error(w, "%message")
    lines = [
        _message("refusal", _UNKNOWN),
        _message("absence", "a kernel of this program was freed: compile the program again"),
        f"@handlers = global [{count} x ptr] zeroinitializer",
        f"@users = global [{count} x i64] zeroinitializer",
        "@id = global i64 0",
        f"@info = global {{ i64, ptr, ptr }} {{ i64 {_TYPE_BYTES}, ptr null, ptr @forget }}",
        "define void @forget(ptr %users) nounwind {",
        "  atomicrmw sub ptr %users, i64 1 acq_rel",
        "  ret void",
        "}",
        "define internal ptr @enter(ptr %frame, ptr %handler, ptr %users) nounwind noinline {",
        *w.lines,
        "}",
        thread_work(),
    ]
    for i in range(count):
        at = [f"ptr getelementptr (i64, ptr @{x}, i64 {i})" for x in ("handlers", "users")]
        lines += [
            f"define ptr @{trampoline_name(i)}(ptr %frame) nounwind {{",
            f"  %error = tail call ptr @enter(ptr %frame, {', '.join(at)})",
            "  ret ptr %error",
            "}",
        ]
    return "\n".join(lines)


def trampoline_name(i: int) -> str:
    return f"trampoline{i}"


def _message(name: str, text: str) -> str:
    return f'@"{name}" = private constant [{len(text) + 1} x i8] c"{text}\\00"'


def _fill_in_metadata(w: InstructionWriter, extension: str) -> None:
    """Write the version of the interface, and no traits: two calls may have different effects."""
    metadata = w.load("ptr", extension, _EXTENSION["metadata"])
    api = w.load("ptr", "%frame", _FRAME["api"])
    size = w.load("i64", metadata, _METADATA["size"])
    w.go_on_if(w.icmp("uge", "i64", size, _METADATA_BYTES), "versions", "unknown")
    # XLA accepts versions from an oldest one up to its own, and sizes are checked at each call: so
    # its own minor version is returned. XLA refuses another major version.
    minor = w.load("i32", api, _API["minor"])
    w.store("i32", 0, metadata, _METADATA["major"])
    w.store("i32", minor, metadata, _METADATA["minor"])
    w.store("i32", 0, metadata, _METADATA["traits"])
    w.jump("done")


def _return_error(w: InstructionWriter, message: str) -> None:
    """Return an error of XLA's; end the process if not even an error can be made."""
    api = w.load("ptr", "%frame", _FRAME["api"])
    size = w.load("i64", api, _API["size"])
    version = w.load("i64", api, _API["version"])
    known = [w.icmp("uge", "i64", size, _API_BYTES), w.icmp("eq", "i64", version, _VERSION_BYTES)]
    w.go_on_if(w.all(known), "error", "lost")
    members = (("ptr", "null"), ("ptr", message), ("i32", _FAILED_PRECONDITION))
    arguments = w.structure(("i64", _ERROR_BYTES), *members)
    create = w.load("ptr", api, _API["error"])
    w.line(f"ret ptr {w.value(f'call ptr {create}(ptr {arguments})')}")
    w.label("lost")
    w.line("call void @llvm.trap()")
    w.line("unreachable")
