"""XLA's side of a call, according to `xla/ffi/api/c_api.h`."""

import ctypes
import functools

from ensembleode.engines.compiled.llvm.compiler import compiled, define
from ensembleode.engines.compiled.xla.handler import (
    handler,
    handler_name,
    trampoline_name,
    trampolines,
)
from ensembleode.engines.compiled.xla.sharing import STAYS


class Struct(ctypes.Structure):
    """Whose first member is its size."""

    def __init__(self, **members):
        super().__init__(size=ctypes.sizeof(self), **members)


def struct(name, *members):
    fields = [("size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]
    every = fields + [(x, type_) for x, type_ in members]
    return type(name, (Struct,), {"_fields_": every})


i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p

Version = struct("Version", ("major", i32), ("minor", i32))
Buffer = struct("Buffer", ("dtype", i32), ("data", pointer), ("rank", i64), ("dims", pointer))
List = struct("List", ("count", i64), ("types", pointer), ("pointers", pointer))
Attributes = struct(
    "Attributes", ("count", i64), ("types", pointer), ("names", pointer), ("pointers", pointer)
)
Failure = struct("Failure", ("message", ctypes.c_char_p), ("code", i32))
Create = ctypes.CFUNCTYPE(pointer, ctypes.POINTER(Failure))
Destroy = struct("Destroy", ("error", pointer))
Free = ctypes.CFUNCTYPE(None, ctypes.POINTER(Destroy))
Task = ctypes.CFUNCTYPE(None, pointer)
Scheduled = struct("Scheduled", ("context", pointer), ("task", Task), ("data", pointer))
Schedule = ctypes.CFUNCTYPE(pointer, ctypes.POINTER(Scheduled))
State = struct("State", ("context", pointer), ("stage", i64), ("type", pointer), ("state", pointer))
SetState = ctypes.CFUNCTYPE(pointer, ctypes.POINTER(State))
Api = struct(
    "Api",
    *(("version", Version), ("internal", pointer), ("error_create", Create)),
    *(("error_message", pointer), ("error_destroy", Free), ("unused", pointer * 4)),
    *(("set_state", SetState), ("others", pointer * 3), ("schedule", Schedule)),
)
Frame = struct(
    "Frame",
    *(("api", ctypes.POINTER(Api)), ("context", pointer), ("stage", i32)),
    *(("operands", List), ("results", List), ("attributes", Attributes), ("future", pointer)),
)


class Extension(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("type", i32), ("next", pointer), ("metadata", pointer))


class Metadata(ctypes.Structure):
    _fields_ = (
        *(("size", ctypes.c_size_t), ("version", Version)),
        *(("traits", ctypes.c_uint32), ("state", i64)),
    )


@functools.cache
def entries():
    code = compiled(trampolines(2))
    for name in STAYS:
        define(name, code.address(name))
    return code


class Runtime:
    """What XLA is to the handler of a function, behind a trampoline of its own.

    - `states`: what has been set, by instantiating; `refuses`: whether that is refused.
    - `schedule`: given the tasks that it schedules, to be called; says whether it takes them.
    """

    def __init__(self, text, name, operands, results, minor=3, schedule=None, **options):
        self.errors, self.destroyed, self.states, self.refuses = [], [], [], False
        self._schedule = schedule
        self.api = Api(
            version=Version(major=0, minor=minor),
            error_create=Create(self._error),
            error_destroy=Free(self._destroy),
            set_state=SetState(self._set_state),
            schedule=Schedule(self._scheduled),
        )
        self.kept = []
        self.entries = entries()
        self.code = compiled(text + handler(name, operands, results, **options))
        self.place = ctypes.c_uint64.from_address(self.entries.address("handlers") + 8)
        self.users = ctypes.c_int64.from_address(self.entries.address("users") + 8)
        self.place.value, self.users.value = self.code.address(handler_name(name)), 0
        entry = self.entries.address(trampoline_name(1))
        self.handler = ctypes.CFUNCTYPE(pointer, pointer)(entry)

    def _error(self, arguments):
        failure = arguments[0]
        self.errors.append((failure.size, failure.message.decode(), failure.code))
        return 1234

    def _destroy(self, arguments):
        assert arguments[0].size == 24
        self.destroyed.append(arguments[0].error)

    def _set_state(self, arguments):
        given = arguments[0]
        assert (given.size, given.context, given.stage) == (48, 4321, 0)
        assert given.type == self.entries.address("id")
        self.states.append(given.state)
        return 5678 if self.refuses else None

    def destroy_state(self):
        """As XLA does with a program."""
        information = (ctypes.c_uint64 * 3).from_address(self.entries.address("info"))
        assert tuple(information[:2]) == (24, 0)
        ctypes.CFUNCTYPE(None, pointer)(information[2])(self.states.pop())

    def _scheduled(self, arguments):
        given = arguments[0]
        assert (given.size, given.context) == (40, 4321)
        address, data = ctypes.cast(given.task, pointer).value, given.data
        return None if self._schedule(lambda: Task(address)(data)) else 5678

    def frame(self, *operands, results, stage=3):
        return Frame(
            api=ctypes.pointer(self.api),
            context=4321,
            stage=stage,
            operands=self._list(operands),
            results=self._list(results),
            attributes=Attributes(count=0),
        )

    def _list(self, arrays):
        buffers = [Buffer(dtype=5, data=x.ctypes.data, rank=1) for x in arrays]
        types = (i32 * len(arrays))(*[1] * len(arrays))
        pointers = (pointer * len(arrays))(*map(ctypes.addressof, buffers))
        self.kept += [buffers, types, pointers]
        return List(
            count=len(arrays),
            types=ctypes.addressof(types),
            pointers=ctypes.addressof(pointers),
        )

    def call(self, frame):
        return self.handler(ctypes.addressof(frame))
