import collections
import ctypes
import gc
import os

import jax
import jaxtyping
import pytest

from ensembleode.ground.devices.cpu_devices import are_chosen, use_cpu_devices

from . import gpu_machine


if not are_chosen():
    use_cpu_devices()
if gpus := os.environ.get(gpu_machine.VARIABLE):
    gpu_machine.simulate(int(gpus))
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Compiling takes most of the time of the tests.
jax.config.update("jax_disable_most_optimizations", True)
# (Where each operation was written is noted otherwise, in every program.)
jax.config.update("jax_traceback_in_locations_limit", 0)
# (And those that workers compile.)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if jax.__version_info__ < (0, 11):  # (XLA ends the process at flags that it does not know.)
    # Its other way of compiling loops takes half the time, in less memory; and a process for each
    # core leaves nothing to do for more threads. All tests run nightly without these.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
    )
# (Programs are many long-lived objects, which are looked through in vain.)
gc.set_threshold(50_000, 20, 100)


class Compiles:
    """Counts the programs that XLA compiles."""

    def __init__(self):
        self.count = self.total = 0

    def __call__(self, event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
            self.total += 1


_compiles = Compiles()
jax.monitoring.register_event_duration_secs_listener(_compiles)


@pytest.fixture
def compiles():
    """A counter of compilations, at zero."""
    _compiles.count = 0
    return _compiles


@pytest.fixture
def unchecked(monkeypatch):
    """As users have it: where annotations are enforced, their checks would speak first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def on_host(monkeypatch):
    """EnsembleGPUKernel runs on the CPU as if that were a GPU; on one, where it is there."""
    from .host_kernels import replace_gpu

    replace_gpu(monkeypatch)


def pytest_collection_modifyitems(items):
    """Of the conformance suite, what is run every time; elsewhere, workers are tested in
    tests/executors, or by tests marked slow; and of `quick_cases(n)`, the first n. Files that wait
    for other processes go first, as they would be waited for at the end, and then those with the
    most tests."""
    from .test_conformance import is_slow

    if unsteady := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        # (Processes that share the tests would refuse to: each has another address.)
        raise pytest.UsageError(f"give these cases ids, which hold addresses: {unsteady}")
    of_file = collections.Counter(item.path for item in items)
    waits = {"cluster", "subprocess", "Running", "uvicorn"}
    items.sort(
        key=lambda item: (waits.isdisjoint(vars(item.module)), -of_file[item.path], item.path)
    )
    for item in items:
        if "name" not in (given := getattr(getattr(item, "callspec", None), "params", {})):
            continue
        if item.module.__name__.endswith("test_conformance"):
            if is_slow(item.originalname, **given):
                item.add_marker(pytest.mark.slow)
        elif given["name"] == "distributed":
            item.add_marker(pytest.mark.slow)
    cases = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("quick_cases")
        if mark is None or item.get_closest_marker("slow"):
            continue
        cases[item.path, item.originalname] += 1
        if cases[item.path, item.originalname] > mark.args[0]:
            item.add_marker(pytest.mark.slow)


# What a process may take after a test, in MiB; most tests take a hundred more. (The libraries that
# they import take half of it.)
_MOST = 1_200
_WORTH_IT = 60  # and more than after it was last cleared
# Of which Linux gives a process 65,530. A program takes some, a large one dozens, and counting them
# takes as long as compiling a small one.
_MOST_MAPPINGS = 40_000
_COUNTED_AFTER = 300  # programs


class _Memory:
    """Gives back the memory that compiling leaves behind, and forgets compiled programs, of which
    tests have few in common."""

    def __init__(self):
        self.cleared = self.counted = 0

    def __call__(self, may_forget):
        if self._is_too_much():
            _trim()
        if not may_forget:
            return
        if self._is_too_much() or self._has_too_many_mappings():
            jax.clear_caches()
            gc.collect()
            _trim()
            self.cleared = _resident()

    def _has_too_many_mappings(self):
        if _compiles.total < self.counted + _COUNTED_AFTER:
            return False
        self.counted = _compiles.total
        return _mappings() > _MOST_MAPPINGS

    def _is_too_much(self):
        return _resident() > max(_MOST, self.cleared + _WORTH_IT)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    session.config.memory = _Memory()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    # (Something is compiled for all tests of a module; each counts that nothing else is.)
    is_warm = {"running", "warm"} & set(item.fixturenames)
    is_warm = is_warm and nextitem and nextitem.module is item.module
    item.config.memory(may_forget=not is_warm)


def _resident() -> int:
    """The memory of this process, in MiB (none where that can't be told)."""
    try:
        with open("/proc/self/statm") as sizes:
            pages = int(sizes.read().split()[1])
    except FileNotFoundError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def _trim() -> None:
    """Free memory stays with glibc's arenas, of which each compiling thread has one."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _mappings() -> int:
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except FileNotFoundError:
        return 0
