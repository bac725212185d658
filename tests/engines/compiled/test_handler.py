"""The handler of XLA's calls, called as XLA would."""

import ctypes

import numpy as np
import pytest

from ensembleode.engines.compiled.compiler import compiled
from ensembleode.engines.compiled.handler import handler, handler_name
from ensembleode.engines.compiled.object_cache import VARIABLE

from .kernels import WHERE


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")


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
Api = struct("Api", ("version", Version), ("internal", pointer), ("error_create", Create))
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
    """What XLA is to a handler."""

    def __init__(self, minor=3):
        self.errors = []
        version = Version(major=0, minor=minor)
        self.api = Api(version=version, error_create=Create(self._error))
        self.kept = []
        code = compiled(WHERE + handler("where", 1, 1))
        self.handler = ctypes.CFUNCTYPE(pointer, pointer)(code.address(handler_name("where")))

    def _error(self, arguments):
        failure = arguments[0]
        self.errors.append((failure.size, failure.message.decode(), failure.code))
        return 1234

    def frame(self, x, y, stage=3):
        return Frame(
            api=ctypes.pointer(self.api),
            stage=stage,
            operands=self._list([x]),
            results=self._list([y]),
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


@pytest.fixture
def arrays():
    return np.zeros(1, np.int64), np.zeros(2, np.int64)


def test_pointers_are_passed_on(arrays):
    x, y = arrays
    runtime = Runtime()
    assert runtime.call(runtime.frame(x, y)) is None
    assert y.tolist() == [x.ctypes.data, y.ctypes.data]
    assert runtime.errors == []


@pytest.mark.parametrize("minor", [1, 3, 7])
def test_it_says_what_it_is(arrays, minor):
    """The version of whoever asks, and nothing special."""
    runtime = Runtime(minor)
    metadata = Metadata(version=Version(major=-1, minor=-1), traits=77, state=5)
    metadata.size = ctypes.sizeof(metadata)
    extension = Extension(size=32, type=1, metadata=ctypes.addressof(metadata))
    frame = runtime.frame(*arrays)
    frame.extension = ctypes.addressof(extension)
    assert runtime.call(frame) is None
    assert (metadata.version.major, metadata.version.minor) == (0, minor)
    assert (metadata.traits, metadata.state) == (0, 5)
    assert not arrays[1].any()  # not run


def test_unknown_extensions_are_left_alone(arrays):
    runtime = Runtime()
    extension = Extension(size=32, type=99)
    frame = runtime.frame(*arrays)
    frame.extension = ctypes.addressof(extension)
    assert runtime.call(frame) is None
    assert arrays[1].all()


def test_other_stages_do_nothing(arrays):
    runtime = Runtime()
    assert runtime.call(runtime.frame(*arrays, stage=0)) is None
    assert not arrays[1].any()


def _changed(**members):
    def change(frame):
        for name, value in members.items():
            *above, last = name.split("__")
            owner = frame
            for part in above:
                owner = getattr(owner, part)
            setattr(owner, last, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _changed(size=80),
        _changed(operands__size=48),
        _changed(results__size=32),
        _changed(operands__count=2),
        _changed(results__count=0),
        lambda frame: ctypes.memset(frame.operands.types, 2, 1),
        lambda frame: ctypes.memset(pointer.from_address(frame.results.pointers).value, 16, 1),
    ],
)
def test_what_it_does_not_know_is_an_error(arrays, change):
    runtime = Runtime()
    frame = runtime.frame(*arrays)
    change(frame)
    assert runtime.call(frame) == 1234
    ((size, message, code),) = runtime.errors
    assert size == 28
    assert message == "where: the call frame of this XLA is not what ensembleode knows"
    assert code == 9  # failed precondition
    assert not arrays[1].any()
