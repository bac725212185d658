"""A function of LLVM IR as XLA calls it: the handler of a custom call, of XLA's typed FFI.

XLA hands a handler one structure, the call frame, with arrays of pointers to buffers; the handler
here passes on where their data is, and nothing else. The structures are those of XLA's header
`xla/ffi/api/c_api.h`, version 0.1 and later. Each says how large it is, and grows where it gains
members, so whatever is read here is known to be there, and at its place; if not, the call fails
with an error of XLA's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable


# Offsets in bytes. `args` and `rets` are structures within the frame.
_FRAME = {"size": 0, "extension": 8, "api": 16, "context": 24, "stage": 32, "args": 40, "rets": 80}
_FRAME_BYTES = 120
_LIST = {"size": 0, "count": 16, "types": 24, "pointers": 32}
_LIST_BYTES = 40
_BUFFER = {"size": 0, "data": 24}
_BUFFER_BYTES = 32
_EXTENSION = {"type": 8, "metadata": 24}
_METADATA = {"size": 0, "major": 24, "minor": 28, "traits": 32}
_METADATA_BYTES = 36
_API = {"size": 0, "version": 16, "major": 32, "minor": 36, "error": 48, "destroy": 64}
_API |= {"schedule": 136}
_API_BYTES, _VERSION_BYTES, _API_BYTES_WITH_THREADS = 56, 24, 144
_ERROR_BYTES, _DESTROY_BYTES, _SCHEDULE_BYTES = 28, 24, 40

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
    `_share`. Then the first of its buffers says how, and isn't passed on.
    """
    w = _Writer()
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
        _share(w, name, *data)
    else:
        # (Inlined, there would be two of it.)
        w.line(f"call void @{name}({_pointers(data)}) noinline")
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
            _shared_work(name, operands + results - 1) if shared else "",
        ]
    )


def _pointers(values: Iterable[str]) -> str:
    return ", ".join(f"ptr {x}" for x in values)


def _fill_in_metadata(w: _Writer, extension: str) -> None:
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


def _return_error(w: _Writer, message: str) -> None:
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
    w.line("%arguments = alloca { i64, ptr, ptr, i32 }")
    for type_, value, offset in (
        ("i64", _ERROR_BYTES, 0),
        ("ptr", "null", 8),
        ("ptr", f'@"{message}"', 16),
        ("i32", _FAILED_PRECONDITION, 24),
    ):
        w.store(type_, value, "%arguments", offset)
    create = w.load("ptr", api, _API["error"])
    w.line(f"%made = call ptr {create}(ptr %arguments)")
    w.line("ret ptr %made")
    w.label("lost")
    w.line("call void @llvm.trap()")
    w.line("unreachable")


#
# Shared work
#
# The parts of it are taken in turn by the thread that calls and by those of XLA's that have time,
# first large ones, then smaller ones. A thread that comes late finds nothing left, and nobody waits
# for it: so the calls of several programs that share these threads don't wait for each other, and
# of a thread that never comes nothing is lost. What they all look at is on the heap, and goes with
# the last of them.
#

# What the first buffer says: of how many items the work is, how many threads may do it, and the
# least number of items to a part.
N, THREADS, LEAST = range(3)

_WORK = {"next": 0, "n": 8, "threads": 16, "least": 24, "thread": 32, "running": 40, "users": 48}
_WORK_BYTES = 56
# Added to those that run, when nobody may begin any more.
_CLOSED = 2**40


def _share(w: _Writer, name: str, how: str, *data: str) -> None:
    """Do all the work, with as many threads as come."""
    n, threads, least = (
        w.value(f"sext i32 {w.load('i32', how, 4 * i)} to i64") for i in (N, THREADS, LEAST)
    )
    api = w.load("ptr", "%frame", _FRAME["api"])
    known = [
        w.icmp("uge", "i64", w.load("i64", api, _API["size"]), _API_BYTES_WITH_THREADS),
        w.icmp("sgt", "i64", threads, 1),
        w.icmp("sgt", "i64", n, least),
    ]
    w.branch(w.all(known), "share", "alone")
    w.label("alone")
    w.line(f"call void @{name}(i64 0, i64 {n}, i64 0, {_pointers(data)})")
    w.jump("done")

    w.label("share")
    work = w.value(f"call ptr @malloc(i64 {_WORK_BYTES + 8 * len(data)})")
    w.branch(w.icmp("eq", "ptr", work, "null"), "alone", "begin")
    w.label("begin")
    first = {"next": 0, "n": n, "threads": threads, "least": least, "thread": 1, "running": 0}
    for which, value in (first | {"users": threads}).items():
        w.store("i64", value, work, _WORK[which])
    for i, pointer in enumerate(data):
        w.store("ptr", pointer, work, _WORK_BYTES + 8 * i)
    context = w.load("ptr", "%frame", _FRAME["context"])
    task = "%task"
    w.line(f"{task} = alloca {{ i64, ptr, ptr, ptr, ptr }}")
    for type_, value, offset in (
        ("i64", _SCHEDULE_BYTES, 0),
        ("ptr", "null", 8),
        ("ptr", context, 16),
        ("ptr", f"@{name}.task", 24),
        ("ptr", work, 32),
    ):
        w.store(type_, value, task, offset)
    schedule = w.load("ptr", api, _API["schedule"])
    w.line("%destroyed = alloca { i64, ptr, ptr }")
    helpers = w.value(f"sub i64 {threads}, 1")
    w.jump("ask")
    w.label("ask")
    w.line(f"%asked = phi i64 [ 0, %begin ], [ %more, %asked.next ]")
    w.line("%more = add i64 %asked, 1")
    refused = w.value(f"call ptr {schedule}(ptr {task})")
    w.branch(w.icmp("eq", "ptr", refused, "null"), "asked.next", "refused")
    w.label("refused")
    for type_, value, offset in (("i64", _DESTROY_BYTES, 0), ("ptr", "null", 8), ("ptr", refused, 16)):
        w.store(type_, value, "%destroyed", offset)
    w.line(f"call void {w.load('ptr', api, _API['destroy'])}(ptr %destroyed)")
    w.line(f"call void @{name}.leave(ptr {work})")
    w.jump("asked.next")
    w.label("asked.next")
    w.branch(w.icmp("slt", "i64", "%more", helpers), "ask", "work")
    w.label("work")
    w.line(f"call void @{name}.parts(ptr {work}, i64 0)")
    running = w.at(work, _WORK["running"])
    w.line(f"%before = atomicrmw add ptr {running}, i64 {_CLOSED} acq_rel")
    w.branch(w.icmp("eq", "i64", "%before", 0), "finished", "wait")
    w.label("wait")
    w.line(f"call i32 @{_YIELD}()")
    w.line(f"%still = load atomic i64, ptr {running} acquire, align 8")
    w.branch(w.icmp("eq", "i64", "%still", _CLOSED), "finished", "wait")
    w.label("finished")
    w.line(f"call void @{name}.leave(ptr {work})")


# Lets other threads run; of the C library, or of Windows.
_YIELD = "SwitchToThread" if sys.platform == "win32" else "sched_yield"


def _shared_work(name: str, count: int) -> str:
    """What the threads of shared work do, with as many pointers."""
    parts = _Writer()
    for which in ("n", "threads", "least"):
        parts.line(f"%{which} = load i64, ptr {parts.at('%work', _WORK[which])}")
    following = parts.at("%work", _WORK["next"])
    pointers = [parts.load("ptr", "%work", _WORK_BYTES + 8 * i) for i in range(count)]
    parts.line("%shares = mul i64 %threads, 2")
    parts.jump("next")
    parts.label("next")
    # A part of what is left, in whole multiples of the least.
    parts.line(f"%first = load atomic i64, ptr {following} monotonic, align 8")
    parts.line("%left = sub i64 %n, %first")
    parts.branch(parts.icmp("sgt", "i64", "%left", 0), "take", "none")
    parts.label("take")
    parts.line("%share = udiv i64 %left, %shares")
    parts.line("%many = udiv i64 %share, %least")
    parts.line("%rounded = mul i64 %many, %least")
    parts.line("%size = call i64 @llvm.smax.i64(i64 %rounded, i64 %least)")
    parts.line("%last = add i64 %first, %size")
    parts.line("%end = call i64 @llvm.smin.i64(i64 %last, i64 %n)")
    parts.line(
        f"%tried = cmpxchg ptr {following}, i64 %first, i64 %end acq_rel monotonic, align 8"
    )
    parts.line("%taken = extractvalue { i64, i1 } %tried, 1")
    parts.branch("%taken", "run", "next")
    parts.label("run")
    parts.line(
        f"call void @{name}(i64 %first, i64 %end, i64 %thread, {_pointers(pointers)}) noinline"
    )
    parts.jump("next")
    parts.label("none")
    parts.line("ret void")

    task = _Writer()
    running = task.at("%work", _WORK["running"])
    task.line(f"%before = atomicrmw add ptr {running}, i64 1 acq_rel")
    task.branch(task.icmp("ult", "i64", "%before", _CLOSED), "run", "late")
    task.label("run")
    task.line(f"%thread = atomicrmw add ptr {task.at('%work', _WORK['thread'])}, i64 1 monotonic")
    task.line(f"call void @{name}.parts(ptr %work, i64 %thread)")
    task.jump("late")
    task.label("late")
    task.line(f"atomicrmw sub ptr {running}, i64 1 acq_rel")
    task.line(f"call void @{name}.leave(ptr %work)")
    task.line("ret void")

    leave = _Writer()
    users = leave.at("%work", _WORK["users"])
    leave.line(f"%before = atomicrmw sub ptr {users}, i64 1 acq_rel")
    leave.branch(leave.icmp("eq", "i64", "%before", 1), "last", "done")
    leave.label("last")
    leave.line("call void @free(ptr %work)")
    leave.jump("done")
    leave.label("done")
    leave.line("ret void")

    def function(head: str, body: _Writer) -> list[str]:
        return [f"define internal void @{name}.{head} nounwind {{", *body.lines, "}", ""]

    return "\n".join(
        [
            "declare ptr @malloc(i64)",
            "declare void @free(ptr)",
            f"declare i32 @{_YIELD}()",
            "",
            *function("parts(ptr %work, i64 %thread)", parts),
            *function("task(ptr %work)", task),
            *function("leave(ptr %work)", leave),
        ]
    )


class _Writer:
    """Writes instructions on memory given by bytes."""

    def __init__(self):
        self.lines: list[str] = []
        self._count = 0

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def value(self, text: str) -> str:
        self._count += 1
        self.line(f"%h{self._count} = {text}")
        return f"%h{self._count}"

    def at(self, base: str, offset: int) -> str:
        return self.value(f"getelementptr i8, ptr {base}, i64 {offset}")

    def load(self, type_: str, base: str, offset: int) -> str:
        return self.value(f"load {type_}, ptr {self.at(base, offset)}")

    def store(self, type_: str, value: str | int, base: str, offset: int) -> None:
        self.line(f"store {type_} {value}, ptr {self.at(base, offset)}")

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
