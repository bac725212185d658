"""Ctrl-C while compiled programs run: a flag in memory tells them to stop.

Python raises `KeyboardInterrupt` only between two of its own instructions, and a running program is
a single instruction. But Python writes the numbers of signals to a file descriptor as they arrive,
so a thread that reads them can set a flag at any time. The address of the flag is one of the
numbers that engines get, and their programs read the flag. When a program has stopped, its results
are collected, and `KeyboardInterrupt` is raised.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ..ground.devices.placement import platform
from ..ground.retcode import was_run
from .job import Job, UnfinishedBatch


NEVER = np.zeros(2, np.uint32)  # the address that stands for no flag


class StopFlag:
    """A flag in memory that Ctrl-C sets, and that running programs read."""

    def __init__(self):
        self._flag = ctypes.c_ubyte(0)
        self._is_held = self._is_noted = False

    @property
    def address(self) -> np.ndarray:
        """The address of the flag as two integers of 32 bits, the lower half first."""
        return np.array([ctypes.addressof(self._flag)], np.uint64).view(np.uint32)

    @property
    def is_set(self) -> bool:
        return bool(self._flag.value)

    def set(self) -> None:
        self._flag.value = 1

    @contextlib.contextmanager
    def setting_the_flag(self) -> Iterator[None]:
        """Within this block, Ctrl-C sets the flag instead of raising; if it is pressed twice, it
        raises."""
        self._is_held = True
        try:
            yield
        except BaseException:
            _never_freed.append(self)  # a program that reads it may still run
            raise
        finally:
            self._is_held = False

    def pressed(self, number: int, frame: Any) -> None:
        again, self._is_noted = self._is_noted, True
        self.set()
        if again or not self._is_held:
            signal.default_int_handler(number, frame)


_never_freed: list[StopFlag] = []


@contextlib.contextmanager
def stoppable(job: Job, *, local: bool) -> Iterator[Job]:
    """The job with a flag that Ctrl-C sets, if its engine reads one. `local` says whether its
    programs run in this process."""
    on_cpu = local and platform() == "cpu"
    if job.traced or not (on_cpu and job.plan.engine.is_stoppable()):
        yield job
        return
    with watched() as stop:
        yield looking_at(job, stop)


def looking_at(job: Job, stop: StopFlag | None) -> Job:
    """The job whose programs read the flag `stop`, or none if it is None."""
    address = NEVER if stop is None else stop.address
    batched = job.plan.batched._replace(stop=False)
    every = job.trajectories.changed(lambda x: x._replace(stop=address), batched=batched)
    plan = dataclasses.replace(job.plan, batched=batched)
    return dataclasses.replace(job, plan=plan, trajectories=every, stop=stop)


def finished(job: Job, program: Callable, *args: Any) -> Any:
    """The result of a program, once the program has finished."""
    if job.stop is None:
        return program(*args)
    with job.stop.setting_the_flag():
        return jax.block_until_ready(program(*args))


def check(job: Job, outcome: Any) -> None:
    """**Raises:** `UnfinishedBatch` where Ctrl-C has stopped a batch."""
    if job.stop is not None and job.stop.is_set:
        # (By NumPy, since JAX would have to compile this.)
        outcome = jax.tree.map(np.asarray, outcome)
        done = was_run(outcome.retcode)
        raise UnfinishedBatch(outcome, done, KeyboardInterrupt())


@contextlib.contextmanager
def watched() -> Iterator[StopFlag | None]:
    """A flag that Ctrl-C sets within this block; None where Ctrl-C isn't handled by Python's own
    handler."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield None
        return
    stop, listener = StopFlag(), _listener(os.getpid())
    listener.stop = stop
    signal.signal(signal.SIGINT, stop.pressed)
    listener.before = signal.set_wakeup_fd(listener.descriptor, warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(listener.before, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        listener.stop = None


class _Listener:
    """A thread to which Python writes signals, while the main thread is busy elsewhere.

    - `stop`: the flag to set.
    - `before`: the file descriptor to which Python wrote signals before, and to which they are
        passed on; -1 if there was none.
    """

    def __init__(self):
        self._here, self._there = socket.socketpair()
        self._there.setblocking(False)
        self.stop: StopFlag | None = None
        self.before = -1
        threading.Thread(target=self._listen, name="ensembleode Ctrl-C", daemon=True).start()

    @property
    def descriptor(self) -> int:
        return self._there.fileno()

    def _listen(self) -> None:
        while numbers := self._here.recv(64):
            stop = self.stop
            if stop is not None and signal.SIGINT in numbers:
                stop.set()
            if self.before != -1:
                with contextlib.suppress(OSError):
                    os.write(self.before, numbers)


@functools.cache
def _listener(process: int) -> _Listener:
    """The listener of this process, made when it is first needed."""
    return _Listener()
