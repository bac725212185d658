"""Several processes that train together, each with devices of its own."""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ..ground.devices import cpu_devices
from . import launch as launches
from .lifelines import Lifeline
from .signals import writing


LOST = 75  # the exit status (EX_TEMPFAIL of sysexits.h: try again)
_JOINING = 300.0  # seconds for all processes to join
_GRACE = 5.0  # seconds in which a loss may show as an error of a computation


class ProcessLost(RuntimeError, SystemExit):
    """A process that trains with this one is gone, and `fit` or `predict` can't go on.

    Uncaught, it ends this process with status 75 and a sentence. Where it is caught, the process
    may do what it can do alone, and ends in the same way.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.code = LOST


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    patience: int = 30,
) -> None:
    """Join the processes that were launched together to run this script. Call it before JAX
    computes anything.

    It finds out from the environment how the script was launched: by `mpirun` (Open MPI) or
    `mpiexec` (MPICH, Intel MPI), by `srun` (Slurm), by `torchrun` (`RANK`, `WORLD_SIZE`,
    `MASTER_ADDR`, `MASTER_PORT`), or by whatever sets `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES` (or `JAX_PROCESS_COUNT`) and `JAX_PROCESS_ID`. A script that was launched
    alone stays alone: nothing is done then, and nothing in further calls.

    After it, [`fit`][ensembleode.fit] and [`predict`][ensembleode.predict] share the work out among
    all processes: each reads the same data and computes with its part of a batch on its own
    devices, and the gradients are added up by one all-reduce (by gloo on CPUs, NCCL on GPUs).

    Processes that may use the same cores of a computer divide them up, unless
    `ENSEMBLEODE_NUM_THREADS`, or JAX's configuration, says how many devices each has. Cores to
    which the launcher has bound a process are left as they are.

    Where a process is killed, the others don't wait for it: `fit` and `predict` raise
    [`ProcessLost`][ensembleode.ProcessLost], and a process that doesn't get there within five
    seconds, or is stuck in a computation, is ended. In any case its status is 75, and it says why
    in a sentence.

    **Arguments:**

    - `coordinator`: the address of process 0, such as `"127.0.0.1:12345"`; by default what the
        launcher says, with a port worked out from its job, or `JAX_COORDINATOR_ADDRESS` (or
        `JAX_COORDINATOR_PORT`).
    - `processes`, `process`: the number of processes, and the number of this one, from 0, where no
        launcher says so.
    - `patience`: the number of seconds for which another computer may not answer.

    **Raises:** `ValueError` where arguments or variables are missing or contradict one another;
    `RuntimeError` where JAX has started already, where not all come within five minutes, and where
    the port of process 0 is taken.
    """
    global _together
    if _together is not None or jax.distributed.is_initialized():
        return
    if processes is None and process is None:
        launch = launches.launch_found(os.environ, coordinator)
    elif processes is not None and process is not None:
        address = coordinator or os.environ.get(launches.ADDRESS)
        if address is None and processes != 1:
            raise _incomplete(coordinator, processes, process)
        launch = launches.launch_given(address or "", processes, process)
    else:
        raise _incomplete(coordinator, processes, process)
    if launch is not None:
        _together = _LaunchedProcesses(launch, patience)


def _incomplete(coordinator: Any, processes: Any, process: Any) -> ValueError:
    return ValueError(
        "initialize wants all of coordinator, processes and process, or none of them (where a "
        f"launcher says them): got coordinator={coordinator!r}, processes={processes!r}, "
        f"process={process!r}."
    )


class _LaunchedProcesses:
    """This process, one of several that were launched together."""

    def __init__(self, launch: launches.Launch, patience: int):
        self._launch, self._patience, self._pid = launch, patience, os.getpid()
        self._needs_others: Any = None  # an object during a computation of all
        self._loss: str | None = None  # a text on what became of another process
        self._is_told = False  # whether `ProcessLost` has been raised
        self._exit: SystemExit | None = None  # the exception that has ended a fit
        self._is_done = False
        self._advice = "start it again"
        self._heard: dict[str, set[int]] = {"bye": set(), "left": set(), "done": set()}
        self._change = threading.Condition()
        self._due: list[tuple[float, Callable, tuple]] = []  # times, and calls that are due then
        # (No thread can be started once Python has begun to end.)
        threading.Thread(target=self._do_in_time, name="ensembleode watch", daemon=True).start()
        self._line = Lifeline(self._hear, patience)
        try:
            here = self._join()
        except RuntimeError:
            self._line.close()
            raise
        atexit.register(self._end)
        self._initialize(here)

    def _join(self) -> list[dict]:
        """Join the others. Returns what the processes on this computer say about themselves, in
        their order."""
        launch, line = self._launch, self._line
        about = {
            "process": launch.process,
            "processes": launch.processes,
            "computer": cpu_devices.computer(),
            "cores": cpu_devices.usable(),
        }
        place = f"{launch.host}:{launch.port}"
        try:
            self._service = None
            if launch.process == 0:
                local = launch.host in ("127.0.0.1", "localhost", "::1")
                self._service = line.open_door(
                    launch.processes, launch.port, launch.host if local else None
                )
            everyone = line.join(launch.host, launch.port, about, _JOINING)
        except TimeoutError as e:
            raise RuntimeError(
                f"not all {launch.processes} processes have called initialize within "
                f"{_JOINING:.0f} s (this is process {launch.process}, by {launch.by}): see what "
                "the others say."
            ) from e
        except ConnectionError as e:
            raise RuntimeError(
                f"process {launch.process} of {launch.processes} (by {launch.by}) can't join the "
                f"others at {place}: {e}. Another job may use this port: set {launches.PORT} to a "
                "free one in all processes."
            ) from e
        except OSError as e:
            raise RuntimeError(
                f"process {launch.process} of {launch.processes} (by {launch.by}) can't reach or "
                f"open {place} of process 0: {e}. Set {launches.ADDRESS} to its host and a free "
                "port in all processes."
            ) from e
        return [x for x in everyone if x["computer"] == about["computer"]]

    def _initialize(self, here: list[dict]) -> None:
        launch = self._launch
        place = [x["process"] for x in here].index(launch.process)
        alike = [x["process"] for x in here if x["cores"] == here[place]["cores"]]
        port = self._service or self._line.relay(launch.host, launch.port)
        # As JAX does under the launchers that it knows: each process has one GPU.
        by_launcher = launch.by != "JAX" and len(here) > 1
        local = [place] if by_launcher and "JAX_LOCAL_DEVICE_IDS" not in os.environ else None
        _bypass_proxies()
        try:
            cpu_devices.share(alike.index(launch.process), len(alike))
            with _left_to_end_by_sigterm():
                jax.distributed.initialize(
                    f"127.0.0.1:{port}",
                    launch.processes,
                    launch.process,
                    local_device_ids=local,
                    cluster_detection_method="deactivate",
                    coordinator_bind_address=f"127.0.0.1:{port}",
                    heartbeat_timeout_seconds=_NEVER,
                )
        except RuntimeError as e:
            if "before" not in str(e):
                raise
            raise RuntimeError(
                "initialize must be called before JAX computes anything or is asked for its "
                "devices: put it right after the imports."
            ) from e

    #
    # Messages about other processes
    #

    def _hear(self, word: str, process: int) -> None:
        """Note a message about another process. The lifeline calls this in its own thread."""
        with self._change:
            if word in self._heard:
                self._heard[word].add(process)
            is_loss = word == "lost" or (word == "closed" and 0 not in self._heard["left"])
            if is_loss and self._loss is None and not self._is_done:
                self._loss = f"process {process} was killed or can't be reached any more"
                self._after(0.0 if self._is_over() else _GRACE, self._end_unless_told)
            stuck = self._needs_others
            if word in ("bye", "left") and process != self._launch.process and stuck is not None:
                # By then, all others would have finished the computation that this one waits for.
                wait = _GRACE if word == "left" else self._patience
                self._after(wait, self._end_if_stuck, process, stuck)
            self._change.notify_all()

    def _is_over(self) -> bool:
        """Whether all processes are ready to end."""
        return len(self._heard["bye"]) == self._launch.processes

    def _after(self, seconds: float, does: Callable, *args: Any) -> None:
        self._due.append((time.monotonic() + seconds, does, args))

    def _do_in_time(self) -> None:
        while True:
            with self._change:
                now = time.monotonic()
                due = [x for x in self._due if x[0] <= now]
                self._due = [x for x in self._due if x[0] > now]
                if not due:
                    first = min((x[0] for x in self._due), default=None)
                    self._change.wait(None if first is None else first - now)
            for _, does, args in due:
                does(*args)

    def _end_unless_told(self) -> None:
        if not self._is_told:
            self._end_lost()

    def _end_if_stuck(self, process: int, computation: Any) -> None:
        if self._needs_others is computation and not self._is_told:
            self._loss = self._loss or f"process {process} has ended"
            self._end_lost()

    def lost(self, error: Exception | None = None) -> ProcessLost | None:
        """The exception to raise where another process is gone, without which this one can't
        compute; None where all are there.

        **Arguments:** `error`: the error of a computation that needs all processes, if there was
        one.
        """
        with self._change:
            if error is not None:  # which may come before the word `lost`
                self._change.wait_for(lambda: self._loss or self._gone(), _GRACE)
            if self._loss is None and (gone := self._gone()):
                self._loss = f"process {min(gone)} has ended"
            if self._loss is None and error is not None:
                self._loss = f"another is gone ({str(error).splitlines()[0]})"
            if self._loss is None:
                return None
            self._is_told = True
            return ProcessLost(
                f"a process that trains with this one ({self._me}) is gone: {self._loss}. "
                f"{self._advice[0].upper()}{self._advice[1:]}."
            )

    def _gone(self) -> set[int]:
        return (self._heard["bye"] | self._heard["left"]) - {self._launch.process}

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        if (lost := self.lost()) is not None:
            raise lost
        self._needs_others = object()
        try:
            yield
        finally:
            self._needs_others = None

    @contextlib.contextmanager
    def advised(self, advice: str) -> Iterator[None]:
        """Within this block, the message about a lost process has this `advice`."""
        before, self._advice = self._advice, advice
        try:
            yield
        except SystemExit as e:
            self._exit = e
            raise
        if self._loss is None:
            self._advice = before

    #
    # The end of this process
    #

    def _end(self) -> None:
        """Called when Python ends: end together with the others, or with the status for a loss. JAX
        would wait for the others, and end this process from C++ where one is gone."""
        if os.getpid() != self._pid:
            return  # (a fork)
        if self._loss is not None:
            self._end_lost()
        if (code := self._own_code()) is not None:
            self._leave(code)
        self._say("bye")
        try:
            with self._change:
                self._change.wait_for(lambda: self._loss or self._heard["left"] or self._is_over())
                if self._loss is None and not self._is_over():
                    self._loss = f"process {min(self._heard['left'])} was ended by an error"
        except KeyboardInterrupt:
            self._leave(_INTERRUPTED)
        if self._loss is not None:
            self._end_lost()
        jax.distributed.shutdown()
        self._is_done = True
        self._say("done")
        if self._launch.process == 0:  # the others still need its door
            with self._change:
                everyone = self._launch.processes
                self._change.wait_for(lambda: len(self._heard["done"]) == everyone, self._patience)

    def _leave(self, code: int) -> None:
        """End this process without the others."""
        self._say("left")
        _flush()
        os._exit(code)

    def _say(self, word: str) -> None:
        """Send a word to the others, and wait until process 0 has passed it on."""
        self._line.say(word)
        with self._change:
            self._change.wait_for(
                lambda: self._loss or self._launch.process in self._heard[word], _GRACE
            )

    def _own_code(self) -> int | None:
        """The exit status of this process if an exception has ended it, as far as that can be
        known."""
        last = getattr(sys, "last_value", None)  # which Python has printed
        if last is not None:
            return _INTERRUPTED if isinstance(last, KeyboardInterrupt) else 1
        if self._exit is None:
            return None
        code = self._exit.code or 0
        return code if isinstance(code, int) else 1

    def _end_lost(self) -> None:
        """End this process, whatever its main thread does, except while it writes a file."""
        with _once:
            writing.acquire(timeout=self._patience)
            self._line.say("left")
            _flush()
            text = f"{self._me} ends with status {LOST}, as {self._loss}: {self._advice}"
            os.write(2, f"ensembleode: {text}.\n".encode())
            os._exit(LOST)

    @property
    def _me(self) -> str:
        return f"process {self._launch.process} of {self._launch.processes}"


@contextlib.contextmanager
def _left_to_end_by_sigterm() -> Iterator[None]:
    """Within this block, JAX starts no service that swallows SIGTERM, by which launchers end a
    process."""
    option = "jax_enable_preemption_service"
    before = getattr(jax.config, option)
    jax.config.update(option, False)
    try:
        yield
    finally:
        jax.config.update(option, before)


def _bypass_proxies() -> None:
    """Let gRPC connect to this computer without a proxy, if one is configured."""
    if {name.lower() for name in os.environ} & {"grpc_proxy", "http_proxy", "https_proxy"}:
        name, other = "no_grpc_proxy", "no_proxy"
        before = os.environ.get(name) or os.environ.get(other)
        os.environ[name] = f"{before},127.0.0.1" if before else "127.0.0.1"


_INTERRUPTED = 130  # the exit status by Ctrl-C
_NEVER = 10**9  # seconds
_once = threading.Lock()
_together: _LaunchedProcesses | None = None


def _flush() -> None:
    """Flush Python's output streams."""

    def flush():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # it is closed
                stream.flush()
        logging.shutdown()

    if threading.current_thread() is threading.main_thread():
        flush()
        return
    # (The main thread may be blocked for ever while it writes.)
    thread = threading.Thread(target=flush, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python has begun to end
        flush()
    else:
        thread.join(1.0)


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def from_first(value: bytes) -> bytes:
    """The `value` of the first process, in all processes."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    with needed():
        count = int(multihost_utils.broadcast_one_to_all(np.int32(len(value))))
        room = np.frombuffer(value, np.uint8) if is_first() else np.zeros(count, np.uint8)
        return np.asarray(multihost_utils.broadcast_one_to_all(room)).tobytes()


def needed() -> contextlib.AbstractContextManager:
    """Within this block, all processes are needed for a computation.

    **Raises:** `ProcessLost` where one is gone already.
    """
    return contextlib.nullcontext() if _together is None else _together.needed()


@contextlib.contextmanager
def peers(what_then: str) -> Iterator[None]:
    """Within this block, an error that the loss of another process causes becomes `ProcessLost`,
    which says what to do: `what_then`."""
    try:
        with contextlib.nullcontext() if _together is None else _together.advised(what_then):
            yield
    except (jax.errors.JaxRuntimeError, ValueError) as e:  # ValueError is raised when dispatching
        known = ("Gloo", "NCCL", "Connection closed", "CoordinationService")
        if jax.process_count() == 1 or not any(x in str(e) for x in known):
            raise
        lost = None if _together is None else _together.lost(e)
        raise lost or ProcessLost(
            f"a process that trains with this one is gone: {str(e).splitlines()[0]}. {what_then}."
        ) from e
