"""Threads that share work: they call a kernel, each time for a range of items, until all are done.

The calling thread, and those threads of XLA that are idle, take parts in turn, large ones first and
smaller ones later. A thread that comes late finds nothing left, and no other thread waits for it.
So calls that share XLA's threads don't wait for each other, nor for a thread that never comes. The
state that the threads share is on the heap, and the last of them frees it.

The structures are those of `xla/ffi/api/c_api.h`; see `handler.py`.
"""

from __future__ import annotations

import sys

from ..llvm.writer import as_pointers, InstructionWriter


# Offsets in bytes.
_FRAME = {"api": 16, "context": 24}
_API = {"size": 0, "destroy": 64, "schedule": 136}
_API_BYTES = 144
_DESTROY_BYTES, _SCHEDULE_BYTES = 24, 40

# The entries of the first buffer: how many items of work there are, how many threads may do them,
# and how many items a part has at least.
N, THREADS, LEAST = range(3)

_WORK = {
    **{"next": 0, "n": 8, "threads": 16, "least": 24, "thread": 32, "running": 40, "users": 48},
    "parts": 56,
}
_WORK_BYTES = 64
# Added to the number of running threads when no further thread may begin.
_CLOSED = 2**40


def share(w: InstructionWriter, name: str, how: str, *data: str) -> None:
    """Do all the work, with those threads that come."""
    n, threads, least = (
        w.value(f"sext i32 {w.load('i32', how, 4 * i)} to i64") for i in (N, THREADS, LEAST)
    )
    api = w.load("ptr", "%frame", _FRAME["api"])
    known = [
        w.icmp("uge", "i64", w.load("i64", api, _API["size"]), _API_BYTES),
        w.icmp("sgt", "i64", threads, 1),
        w.icmp("sgt", "i64", n, least),
    ]
    w.branch(w.all(known), "share", "alone")
    w.label("alone")
    w.line(f"call void @{name}(i64 0, i64 {n}, i64 0, {as_pointers(data)})")
    w.jump("done")

    w.label("share")
    work = w.value(f"call ptr @malloc(i64 {_WORK_BYTES + 8 * len(data)})")
    w.branch(w.icmp("eq", "ptr", work, "null"), "alone", "begin")
    w.label("begin")
    first = {"next": 0, "n": n, "threads": threads, "least": least, "thread": 1, "running": 0}
    for which, value in (first | {"users": threads}).items():
        w.store("i64", value, work, _WORK[which])
    w.store("ptr", f"@{name}.parts", work, _WORK["parts"])
    for i, pointer in enumerate(data):
        w.store("ptr", pointer, work, _WORK_BYTES + 8 * i)
    context = w.load("ptr", "%frame", _FRAME["context"])
    members = (("ptr", context), ("ptr", f"@{TASK}"), ("ptr", work))
    task = w.structure(("i64", _SCHEDULE_BYTES), ("ptr", "null"), *members)
    destroyed = w.structure(("i64", _DESTROY_BYTES), ("ptr", "null"), ("ptr", "null"))
    schedule = w.load("ptr", api, _API["schedule"])
    helpers = w.value(f"sub i64 {threads}, 1")
    w.go_on("ask")
    w.line("%asked = phi i64 [ 0, %begin ], [ %more, %asked.next ]")
    w.line("%more = add i64 %asked, 1")
    refused = w.value(f"call ptr {schedule}(ptr {task})")
    w.branch(w.icmp("eq", "ptr", refused, "null"), "asked.next", "refused")
    w.label("refused")
    w.store("ptr", refused, destroyed, 16)
    w.line(f"call void {w.load('ptr', api, _API['destroy'])}(ptr {destroyed})")
    w.line(f"call void @{LEAVE}(ptr {work})")
    w.go_on("asked.next")
    w.branch(w.icmp("slt", "i64", "%more", helpers), "ask", "work")
    w.label("work")
    w.line(f"call void @{name}.parts(ptr {work}, i64 0)")
    running = w.address(work, _WORK["running"])
    w.line(f"%before = atomicrmw add ptr {running}, i64 {_CLOSED} acq_rel")
    w.branch(w.icmp("eq", "i64", "%before", 0), "finished", "wait")
    w.label("wait")
    w.line(f"call i32 @{_YIELD}()")
    w.line(f"%still = load atomic i64, ptr {running} acquire, align 8")
    w.go_on_if(w.icmp("eq", "i64", "%still", _CLOSED), "finished", "wait")
    w.line(f"call void @{LEAVE}(ptr {work})")


# The functions that stay in memory, and with which kernels are linked.
STAYS = TASK, LEAVE = "ensembleode_task", "ensembleode_leave"
# Lets other threads run; a function of the C library, or of Windows.
_YIELD = "SwitchToThread" if sys.platform == "win32" else "sched_yield"


def shared_work(name: str, count: int) -> str:
    """The function that threads run on parts of the work of a kernel with `count` pointers."""
    parts = InstructionWriter()
    for which in ("n", "threads", "least"):
        parts.line(f"%{which} = load i64, ptr {parts.address('%work', _WORK[which])}")
    following = parts.address("%work", _WORK["next"])
    data = [parts.load("ptr", "%work", _WORK_BYTES + 8 * i) for i in range(count)]
    parts.line("%shares = mul i64 %threads, 2")
    parts.go_on("next")
    # A fraction of what is left, rounded to a multiple of the least part.
    parts.line(f"%first = load atomic i64, ptr {following} monotonic, align 8")
    parts.line("%left = sub i64 %n, %first")
    parts.go_on_if(parts.icmp("sgt", "i64", "%left", 0), "take", "none")
    parts.line("%share = udiv i64 %left, %shares")
    parts.line("%many = udiv i64 %share, %least")
    parts.line("%rounded = mul i64 %many, %least")
    parts.line("%size = call i64 @llvm.smax.i64(i64 %rounded, i64 %least)")
    parts.line("%last = add i64 %first, %size")
    parts.line("%end = call i64 @llvm.smin.i64(i64 %last, i64 %n)")
    parts.line(f"%tried = cmpxchg ptr {following}, i64 %first, i64 %end acq_rel monotonic, align 8")
    parts.line("%taken = extractvalue { i64, i1 } %tried, 1")
    parts.go_on_if("%taken", "run", "next")
    parts.line(
        f"call void @{name}(i64 %first, i64 %end, i64 %thread, {as_pointers(data)}) noinline"
    )
    parts.jump("next")
    parts.label("none")
    parts.line("ret void")

    lines = _function(f"internal void @{name}.parts(ptr %work, i64 %thread)", parts)
    return "\n".join(
        [
            "declare ptr @malloc(i64)",
            f"declare i32 @{_YIELD}()",
            f"declare void @{TASK}(ptr)",
            f"declare void @{LEAVE}(ptr)",
            "",
            *lines,
        ]
    )


def thread_work() -> str:
    """The functions that threads run whatever the work is; their code stays in memory."""
    task = InstructionWriter()
    running = task.address("%work", _WORK["running"])
    task.line(f"%before = atomicrmw add ptr {running}, i64 1 acq_rel")
    task.go_on_if(task.icmp("ult", "i64", "%before", _CLOSED), "run", "late")
    task.line(
        f"%thread = atomicrmw add ptr {task.address('%work', _WORK['thread'])}, i64 1 monotonic"
    )
    task.line(f"call void {task.load('ptr', '%work', _WORK['parts'])}(ptr %work, i64 %thread)")
    task.go_on("late")
    task.line(f"atomicrmw sub ptr {running}, i64 1 acq_rel")
    task.line(f"call void @{LEAVE}(ptr %work)")
    task.line("ret void")

    leave = InstructionWriter()
    users = leave.address("%work", _WORK["users"])
    leave.line(f"%before = atomicrmw sub ptr {users}, i64 1 acq_rel")
    leave.go_on_if(leave.icmp("eq", "i64", "%before", 1), "last", "done")
    leave.line("call void @free(ptr %work)")
    leave.go_on("done")
    leave.line("ret void")

    lines = [
        *_function(f"void @{TASK}(ptr %work)", task),
        *_function(f"void @{LEAVE}(ptr %work)", leave),
    ]
    return "\n".join(["declare void @free(ptr)", "", *lines])


def _function(head: str, body: InstructionWriter) -> list[str]:
    return [f"define {head} nounwind {{", *body.lines, "}", ""]
