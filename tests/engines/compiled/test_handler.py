"""The handler of XLA's calls, called as XLA calls it."""

import ctypes

import numpy as np
import pytest

from ensembleode.engines.compiled.llvm.object_cache import VARIABLE

from .ffi import Extension, Metadata, pointer, Runtime, Version
from .kernels import WHERE


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")


def where(minor=3):
    return Runtime(WHERE, "where", 1, 1, minor)


@pytest.fixture
def arrays():
    return np.zeros(1, np.int64), np.zeros(2, np.int64)


@pytest.mark.parametrize("minor", [1, 3, 7])
def test_it_says_what_it_is(arrays, minor):
    """The version of whoever asks, and nothing special."""
    runtime = where(minor)
    metadata = Metadata(version=Version(major=-1, minor=-1), traits=77, state=5)
    metadata.size = ctypes.sizeof(metadata)
    extension = Extension(size=32, type=1, metadata=ctypes.addressof(metadata))
    frame = runtime.frame(arrays[0], results=[arrays[1]])
    frame.extension = ctypes.addressof(extension)
    assert runtime.call(frame) is None
    assert (metadata.version.major, metadata.version.minor) == (0, minor)
    assert (metadata.traits, metadata.state) == (0, 5)
    assert not arrays[1].any()  # not run


def test_unknown_extensions_are_left_alone(arrays):
    runtime = where()
    extension = Extension(size=32, type=99)
    frame = runtime.frame(arrays[0], results=[arrays[1]])
    frame.extension = ctypes.addressof(extension)
    assert runtime.call(frame) is None
    assert arrays[1].all()


def test_programs_are_counted(arrays):
    """From when they are loaded until they are destroyed; not one that can't be."""
    runtime = where()
    frame = runtime.frame(arrays[0], results=[arrays[1]], stage=0)
    for count in (1, 2):
        assert runtime.call(frame) is None
        assert runtime.users.value == count
    assert not arrays[1].any()
    for count in (1, 0):
        runtime.destroy_state()
        assert runtime.users.value == count
    runtime.refuses = True
    assert runtime.call(frame) == 5678
    assert (runtime.users.value, runtime.errors) == (0, [])


def test_a_program_of_a_kernel_that_was_freed_is_not_loaded(arrays):
    runtime = where()
    runtime.place.value = 0
    assert runtime.call(runtime.frame(arrays[0], results=[arrays[1]], stage=0)) == 1234
    assert runtime.users.value == 0
    ((_, message, code),) = runtime.errors
    assert message == "a kernel of this program was freed: compile the program again"
    assert code == 9


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
    runtime = where()
    frame = runtime.frame(arrays[0], results=[arrays[1]])
    change(frame)
    assert runtime.call(frame) == 1234
    ((size, message, code),) = runtime.errors
    assert size == 28
    assert message == "where: the call frame of this XLA is not what ensembleode knows"
    assert code == 9  # failed precondition
    assert not arrays[1].any()
