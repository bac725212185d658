"""Parts of a benchmark in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys


def last_core():
    """The last core, to hold a process to it, if the system can do that."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


@contextlib.contextmanager
def held(cores):
    """Hold this thread, and the processes that it starts, to these cores."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def apart(script, request, *, cores=None, environment=None):
    """The result of the script's `is_worker` for this request, a list, in a process of its own,
    held to cores if these are given.

    **Raises:** `TimeoutError` if the worker was ended by its own alarm; `SystemExit`, with what it
    wrote, if it failed.
    """
    command = [sys.executable, script, "--worker", json.dumps(request)]
    environment = {**os.environ, **(environment or {})}
    with held(cores):
        # Some libraries greet on stderr, so that is shown only when something is wrong.
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == -signal.SIGALRM:
        raise TimeoutError(f"{script} took longer than its limit")
    if done.returncode:
        sys.exit(done.stderr or f"{script} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def is_worker(work):
    """Whether `apart` started this process; if so, the work is done."""
    found = len(sys.argv) == 3 and sys.argv[1] == "--worker"
    if found:
        print(json.dumps(work(*json.loads(sys.argv[2]))))
    return found
