"""Processes that train together."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys


ROOT = pathlib.Path(__file__).parents[2]


def environment(devices=1, **more):
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_ENABLE_X64": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "ENSEMBLEODE_NUM_THREADS": str(devices),
        **more,
    }


def free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(script, count, *arguments, devices=1):
    """The processes, which have their rank, their number and the coordinator in the environment."""
    where = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=environment(devices, COORDINATOR=where, PROCESSES=str(count), RANK=str(i)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]


def join(**options):
    """In one of them: begin to train with the others."""
    if "COORDINATOR" in os.environ:
        from ensembleode import initialize

        count, rank = int(os.environ["PROCESSES"]), int(os.environ["RANK"])
        initialize(os.environ["COORDINATOR"], count, rank, **options)


def finish(processes, timeout=120):
    """What each has printed; all are ended."""
    try:
        return [p.communicate(timeout=timeout) for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.send_signal(signal.SIGKILL)
