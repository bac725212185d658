"""The Julia that answers requests: in this process, by juliacall, or in a process of its own.

All requests go through one thread. A Julia in this process is also started in that thread, so that
Python's main thread keeps its signals: Julia needs some signals for its threads, but Ctrl-C belongs
to Python.
"""

import abc
import atexit
import concurrent.futures
import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ...ground.extras import installing
from . import environment
from .environment import JuliaError
from .requests import JuliaRequest


# The environment variable that asks for a process of its own.
PROCESS = "ENSEMBLEODE_JULIA_PROCESS"
_DISTRIBUTED = ("EnsembleDistributed", "EnsembleSplitThreads")


class _Thread:
    """A thread that runs functions one after the other, even while Python exits."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self.idle: Callable[[], Any] = contextlib.nullcontext
        threading.Thread(target=self._work, name="julia", daemon=True).start()

    def submit(self, fn: Callable, *args: Any, future: Future | None = None) -> Future:
        """Run `fn(*args)` in the thread, unless the future is cancelled before."""
        future = Future() if future is None else future
        self._asked.put((future, fn, args))
        return future

    def _work(self) -> None:
        while True:
            with self.idle():
                future, fn, args = self._asked.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn(*args))
            except BaseException as e:
                future.set_exception(e)


def _result(future: Future) -> Any:
    """A future's result. A signal that arrives just before a wait is only handled after the wait,
    so the function waits for a short time, again and again."""
    while not concurrent.futures.wait([future], timeout=0.5).done:
        pass
    return future.result()


class Session(abc.ABC):
    """A running Julia."""

    def __init__(self, threads: int):
        self.threads = threads
        self._thread = _Thread()
        self._has_workers = False
        self._defined: set[str] = set()
        self._started: Future = Future()

    def ready(self) -> None:
        """Start Julia, unless it runs. A caller that was interrupted may call this again.

        **Raises:** [`JuliaError`][] when Julia doesn't start.
        """
        if not self._started.done():
            self._thread.submit(self._begin)
        _result(self._started)

    def _begin(self) -> None:
        if self._started.done():
            return
        try:
            self._start()
        except BaseException as e:
            _forget(self)
            self._started.set_exception(e)
        else:
            # This runs before juliacall's own exit function, which would wait for the processes.
            atexit.register(self.close)
            self._started.set_result(None)

    def run(self, request: JuliaRequest) -> dict[str, Any]:
        """Julia's answer.

        **Raises:** [`JuliaError`][] with Julia's message; and an exception that a signal handler
        raises meanwhile, such as `KeyboardInterrupt`, once Julia has stopped.
        """
        place, workers = request.options.get("place", {}), ()
        if place.get("name") in _DISTRIBUTED:
            self._has_workers = True
            workers = self._ask(JuliaRequest("workers", {"place": place}, {}))["worker_pids"]
        new = request.leave_out(self._defined)
        answer = self._ask(request, workers)
        self._defined |= new
        return answer

    def close(self) -> None:
        """End the processes of distributed ensembles."""
        if self._has_workers:
            self._ask(JuliaRequest("stop_workers", {}, {}))
            self._has_workers = False

    def _ask(self, request: JuliaRequest, workers: Sequence[int] = ()) -> dict[str, Any]:
        """Julia's answer. `workers` are the ids of the processes that do the work."""
        request.arrays["stop"] = np.zeros(1, np.int32)
        answer: Future = Future()
        try:
            self._thread.submit(self._answer, request, future=answer)
            text = _result(answer)
        except BaseException:
            # If there is no answer yet, a signal handler raised: Ctrl-C, a time limit, ...
            if not answer.done() and not answer.cancel():
                self._stop(request, answer, workers)
            raise
        answered = tomllib.loads(text)
        if "error" in answered:
            kind, said = answered["kind"], answered["error"]
            # Many messages of Julia's errors begin with the error's type.
            said = said if said.startswith(kind) else f"{kind}: {said}"
            raise JuliaError(f"Julia failed: {said}")
        return answered

    def _stop(self, request: JuliaRequest, answer: Future, workers: Sequence[int]) -> None:
        """Tell Julia to stop, and wait until it has, as it uses the arrays until then."""
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        while not answer.done():
            # Again and again, because the array may just have been copied to where Julia reads it.
            request.arrays["stop"][0] = 1
            concurrent.futures.wait([answer], timeout=0.1)

    @abc.abstractmethod
    def _start(self) -> None:
        """Start Julia; called in its thread."""

    @abc.abstractmethod
    def _answer(self, request: JuliaRequest) -> str:
        """Julia's answer; called in its thread."""


@contextlib.contextmanager
def _own_interrupt() -> Iterator[None]:
    """A context in which Julia may start without taking Ctrl-C away from Python."""
    api: Any = ctypes.pythonapi
    api.PyOS_getsig.restype = ctypes.c_void_p
    api.PyOS_setsig.restype = ctypes.c_void_p
    api.PyOS_setsig.argtypes = (ctypes.c_int, ctypes.c_void_p)
    handler = api.PyOS_getsig(signal.SIGINT)
    yield
    api.PyOS_setsig(signal.SIGINT, handler)


def _collectable(main: Any) -> Callable[[], Any]:
    """A context in which Julia's garbage collector doesn't wait for this thread, so that other
    threads may use juliacall while this thread is idle."""

    def function(name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(main.seval(f"UInt(cglobal(:{name}))"))

    enter = function("jl_gc_safe_enter", ctypes.c_int8)
    leave = function("jl_gc_safe_leave", None, ctypes.c_int8)

    @contextlib.contextmanager
    def idle() -> Iterator[None]:
        state = enter()
        try:
            yield
        finally:
            leave(state)

    return idle


class InProcessSession(Session):
    """Julia in this process, by juliacall."""

    def _start(self) -> None:
        julia = environment.find()
        os.environ.setdefault("PYTHON_JULIACALL_EXE", julia.executable)
        os.environ.setdefault("PYTHON_JULIACALL_PROJECT", julia.project)
        # juliacall reads these once, when it is imported. With several threads, Julia needs its
        # signals.
        os.environ.setdefault("PYTHON_JULIACALL_THREADS", str(self.threads))
        os.environ.setdefault("PYTHON_JULIACALL_HANDLE_SIGNALS", "yes")
        os.environ.setdefault("PYTHON_JULIACALL_AUTOLOAD_IPYTHON_EXTENSION", "no")
        if "juliacall" in sys.modules:
            # Julia's garbage collector would wait for the thread that started Julia, which waits
            # for this one.
            raise JuliaError(
                "juliacall has started Julia in this process already.",
                "Call ensembleode.julia.start() before juliacall is imported, or run ours in a "
                "process of its own: ensembleode.julia.start(process=True).",
            )
        try:
            with _own_interrupt():
                import juliacall
        except ImportError as e:
            raise JuliaError(
                f"engine='julia' needs juliacall: {installing('julia')}, or run Julia in "
                "a process of its own: ensembleode.julia.start(process=True)."
            ) from e
        main: Any = juliacall.newmodule("ensembleode")
        self._end_in_thread(juliacall.CONFIG["lib"], main)
        self._thread.idle = _collectable(main)
        try:
            main.seval(environment.loading())
        except juliacall.JuliaError as e:
            environment.check(julia)  # too old, or a package is missing
            raise JuliaError(f"EnsembleODE does not load in {julia.project}: {e}") from e
        self.threads = int(main.seval("Threads.nthreads(:default)"))
        self._handle = main.seval("EnsembleODE.handle")

    def _end_in_thread(self, lib: Any, main: Any) -> None:
        """Have juliacall end Julia in the thread that started Julia, as Julia would wait for that
        thread otherwise."""
        end = lib.jl_atexit_hook
        end.argtypes, end.restype = [ctypes.c_int], None

        def finish(code: int) -> None:
            # Python frees Julia's objects after this, too. The function that frees them may have to
            # be compiled again: freeing one now compiles it. (Later, threads would wait for ever
            # for the compiler of a Julia that has ended.)
            main.seval("Ref(0)")
            end(code)

        lib.jl_atexit_hook = lambda code: self._thread.submit(finish, code).result()

    def _answer(self, request: JuliaRequest) -> str:
        places = {name: {"address": x.ctypes.data} for name, x in request.arrays.items()}
        # Julia calls no Python, so it runs without Python's lock.
        return str(self._handle._jl_call_nogil(request.text(places)))


class OwnProcessSession(Session):
    """Julia in a process of its own, with the arrays in memory that both processes map."""

    def _start(self) -> None:
        julia = environment.find()
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._memory = _shared_file(folder)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        options = [f"--project={julia.project}", f"--threads={self.threads}", "--startup-file=no"]
        source = environment.loading() + "; EnsembleODE.serve()"
        self._process = subprocess.Popen(
            [julia.executable, *options, "-e", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # so that Ctrl-C only reaches this process
        )
        self._input: Any = self._process.stdin
        self._output: Any = self._process.stdout
        if self._output.readline() != b"ready\n":
            environment.check(julia, in_process=False)
            raise JuliaError(f"Julia did not start.{self._last_words()}")

    def close(self) -> None:
        atexit.unregister(self.close)
        self._process.terminate()
        self._process.wait()
        self._memory.close()

    def _answer(self, request: JuliaRequest) -> str:
        ends = np.cumsum([-(-x.nbytes // 64) * 64 for x in request.arrays.values()])
        starts = dict(zip(request.arrays, (0, *map(int, ends)), strict=False))
        size = max(64, int(ends[-1]))
        # In a file on disk if there is no room in memory for files.
        if os.fstat(self._memory.fileno()).st_size < size:
            try:
                _reserve(self._memory, size)
            except OSError:
                self._memory.close()
                self._memory = _shared_file(None)
                _reserve(self._memory, size)
        shared = np.memmap(self._memory.name, np.uint8, "r+", shape=(size,))
        views = {}
        for name, x in request.arrays.items():
            view = np.ndarray(x.shape, x.dtype, shared, starts[name])
            view[...] = x
            views[name] = view
        # An interrupt has to be written to the memory that Julia reads.
        arrays, request.arrays = request.arrays, {**request.arrays, "stop": views["stop"]}
        places = {name: {"offset": start} for name, start in starts.items()}
        text = request.text(places, memory=self._memory.name).encode()
        try:
            self._input.write(b"%d\n" % len(text) + text)
            self._input.flush()
            line = self._output.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            _forget(self)
            raise JuliaError(
                "the Julia process ended in the middle of a solve; the next solve starts another "
                f"one.{self._last_words()}"
            )
        answer = self._output.read(int(line)).decode()
        for name, x in arrays.items():
            if name in request.written:
                x[...] = views[name]
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        words = self._log.read()[-2000:].decode(errors="replace").strip()
        return f" Its exit code is {code}." + (f" It said:\n{words}" if words else "")


def _shared_file(folder: str | None) -> Any:
    return tempfile.NamedTemporaryFile(prefix="ensembleode-", dir=folder)


def _reserve(file: Any, size: int) -> None:
    """Make the file this large, and reserve its pages: a page that turns out to be missing later
    would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        os.ftruncate(file.fileno(), size)


_running: Session | None = None
_starting = threading.Lock()


def start(*, threads: int | None = None, process: bool | None = None) -> Session:
    """Start Julia, if it isn't running yet.

    **Arguments:**

    - `threads`: the number of Julia's threads; by default `PYTHON_JULIACALL_THREADS`,
        `JULIA_NUM_THREADS`, or the number of cores that this process may use.
    - `process`: whether Julia runs in a process of its own; by default, it does if the environment
        variable `ENSEMBLEODE_JULIA_PROCESS` is `1`.

    **Raises:** [`JuliaError`][] if there is no Julia, saying how to install it; `ValueError` if
    Julia is already running with other arguments.
    """
    global _running
    with _starting:
        session, asked = _running, process
        if session is None:
            if process is None:
                process = os.environ.get(PROCESS, "") not in ("", "0")
            kind = OwnProcessSession if process else InProcessSession
            # Set before Julia has started: if the wait for it is interrupted, Julia goes on
            # starting, and the next solve finds it.
            session = _running = kind(threads or environment.threads())
            asked = threads = None
    session.ready()
    own = isinstance(session, OwnProcessSession)
    if threads not in (None, session.threads) or asked not in (None, own):
        where = "a process of its own" if own else "this process"
        raise ValueError(
            f"Julia runs already, with {session.threads} threads in {where}: call "
            "ensembleode.julia.start before the first solve, and once."
        )
    return session


def _forget(session: Session) -> None:
    global _running
    with _starting:
        if _running is session:
            _running = None


def close() -> None:
    """End the Julia that runs in a process of its own, if there is one.

    **Raises:** `ValueError` for a Julia in this process, which lasts as long as the process.
    """
    session = _running
    if isinstance(session, InProcessSession):
        raise ValueError("Julia runs in this process, and ends with it.")
    if session is not None:
        _forget(session)
        session.close()
