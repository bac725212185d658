"""XLA's side of a call, as `xla/ffi/api/c_api.h` has it."""

import ctypes

from ensembleode.engines.compiled.compiler import compiled
from ensembleode.engines.compiled.handler import handler, handler_name


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
Api = struct(
    "Api",
    *(("version", Version), ("internal", pointer), ("error_create", Create)),
    *(("error_message", pointer), ("error_destroy", Free), ("unused", pointer * 8)),
    ("schedule", Schedule),
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


class Runtime:
    """What XLA is to the handler of a function.

    - `schedule`: given the tasks that it schedules, to be called; says whether it takes them.
    """

    def __init__(self, text, name, operands, results, minor=3, schedule=None, **options):
        self.errors, self.destroyed = [], []
        self._schedule = schedule
        self.api = Api(
            version=Version(major=0, minor=minor),
            error_create=Create(self._error),
            error_destroy=Free(self._destroy),
            schedule=Schedule(self._scheduled),
        )
        self.kept = []
        code = compiled(text + handler(name, operands, results, **options))
        self.handler = ctypes.CFUNCTYPE(pointer, pointer)(code.address(handler_name(name)))

    def _error(self, arguments):
        failure = arguments[0]
        self.errors.append((failure.size, failure.message.decode(), failure.code))
        return 1234

    def _destroy(self, arguments):
        assert arguments[0].size == 24
        self.destroyed.append(arguments[0].error)

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
